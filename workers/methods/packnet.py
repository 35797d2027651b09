"""PackNet: every weight belongs to one task.

A task trains the free weights, frees some again, and keeps the rest permanently.

Mallya, Lazebnik: PackNet: Adding Multiple Tasks to a Single Network by Iterative Pruning, CVPR
2018.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from pydantic import Field, JsonValue, field_validator
from torch import Tensor, nn

from workers.data.batch import Batch
from workers.errors import UserError
from workers.job import ActiveIf, Task
from workers.methods.base import (
    Method,
    MethodSettings,
    ParamGroup,
    Progress,
    Step,
    StepContext,
)
from workers.methods.finetune import collect_tensors
from workers.methods.train_defaults import TrainDefaults
from workers.model.protect import Protector
from workers.model.weights import Copies, weight_sites
from workers.storage.taskstate import Carried, TaskState

# Owner numbers of weights. The first owner is the base task if it keeps weights, else the first
# task.
FREE = 0
FIRST = 1
MAX_OWNERS = torch.iinfo(torch.uint8).max
# JSON schemas for editors: of a number in the setting `prune`, and of an entry of its list.
PRUNED: dict[str, JsonValue] = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}
SHARE_SCHEMA: dict[str, JsonValue] = {"anyOf": [PRUNED, {"type": "null"}, {"const": "none"}]}


class PackNetSettings(MethodSettings):
    """Settings of `packnet`."""

    prune: float | tuple[float | None, ...] = Field(
        0.75,
        description="share of a task's new weights that are pruned, and so free for later "
        "tasks: a number for all tasks, or a list with one entry per task, `none` for no "
        "pruning",
        json_schema_extra={"anyOf": [PRUNED, {"type": "array", "items": SHARE_SCHEMA}]},
    )
    base_mode: Literal["own_nothing", "prune_only", "prune_retrain"] = Field(
        "own_nothing",
        description="weights reserved for the base task: `own_nothing`: none; `prune_only`: "
        "the backbone's largest; `prune_retrain`: the largest, trained again on the base task",
    )
    base_prune: Annotated[float, ActiveIf("base_mode", but=("own_nothing",))] = Field(
        0.5,
        gt=0,
        lt=1,
        description="share of the backbone's weights that are pruned for `prune_only` and "
        "`prune_retrain`",
    )
    per_task_affine: bool = Field(
        False,
        description="whether each task trains its own copies of biases, norms, class token "
        "and position embedding",
    )

    @field_validator("prune", mode="before")
    @classmethod
    def _shares(cls, value: Any) -> Any:
        listed = isinstance(value, (list, tuple))
        shares: list[Any] = (
            [None if share == "none" else share for share in value] if listed else [value]
        )
        for share in shares:
            if not (listed if share is None else type(share) in (int, float) and 0 < share < 1):
                raise ValueError(
                    "a share to give back lies between 0 and 1, both excluded; a list has one "
                    "per task, and `none` for a task that keeps all"
                )
        return shares if listed else value

    def share(self, position: int) -> float | None:
        """Return the share of its new weights that a task frees. None: it keeps all.

        Args:
            position: Position of the task in the stream, from 0; -1 is the base task.

        Raises:
            UserError: If `prune` is a list and too short.
        """
        if position < 0:
            return self.base_prune
        if isinstance(self.prune, float):
            return self.prune
        if position >= len(self.prune):
            raise UserError(
                f"packnet: `prune` has {len(self.prune)} shares and the stream a task "
                f"{position + 1}; list one per task, `none` for one that "
                "keeps all, or give one number for all tasks"
            )
        return self.prune[position]


class PackNet(Method[PackNetSettings]):
    """Task t claims all free weights and trains them, prunes a share, and retrains the rest.

    The step `prune` frees the smallest round(p * count) of the task's weights in each layer, with
    p the setting `prune`. Freed weights become 0. A task is served with W_eff(t) = W .* 1[1 <=
    owner <= t]: the weights of earlier tasks are used and never change. While t trains, W_eff is W,
    because weights that are still free are 0 and locked.

    Stored for a task: its head and its owner number. Carried: weights, and the owner map, one byte
    per weight of patch embedding and blocks (qkv is one tensor). Biases, norms, class token and
    position embedding keep the values of the backbone, unless `per_task_affine` gives each task its
    own copies.

    base_mode: with `own_nothing` the first task claims every weight *at its pretrained value*, so
    that the backbone is fine-tuned. The weights that it frees start from 0 for later tasks. A base
    task in the stream is served by the current weights, so it is forgotten. `prune_only` keeps the
    backbone's largest weights (the base task's row of the accuracy matrix shows the cost).
    `prune_retrain` is the paper's way: the base task is pruned, and trained again together with
    biases and norms.

    By default `train` and `retrain` differ only in their length (`train_defaults`). The released
    code retrains for half of the epochs at a tenth of the rate: `steps: {retrain: {epochs: 10, lr:
    1e-4}}` with `train: {epochs: 20, lr: 1e-3}`. It also frees all weights equal to the threshold,
    evaluates by writing zeros into W, and lets decay and momentum move owned weights; this code
    does not.
    """

    name = "packnet"
    has_constant_step = True
    family = "parameter isolation"
    keeps = "a head; who owns a weight"
    paper = "PackNet: Adding Multiple Tasks to a Single Network by Iterative Pruning, CVPR 2018"
    train_defaults = TrainDefaults(
        lr=5e-4,
        scratch_lr=1e-3,
        epochs=2,
        min_steps=120,
        steps={"retrain": {"epochs": 3}},
        source="measured on seven real tasks at 64 px: configs/RESULTS.md",
    )
    carries = ("weights", "owners")
    steps = (Step("train"), Step("prune", trains=False, measured=True), Step("retrain"))
    needs_states = True  # for the head of a base task that has its own steps
    freezes_backbone = False
    Settings = PackNetSettings
    per_task = frozenset({"prune", "per_task_affine"})

    @classmethod
    def steps_for(cls, settings: PackNetSettings, position: int) -> tuple[Step, ...]:
        if position < 0:
            return cls.steps[1:] if settings.base_mode == "prune_retrain" else ()
        return cls.steps[:1] if settings.share(position) is None else cls.steps

    @classmethod
    def needs_base(cls, settings: PackNetSettings) -> bool:
        return settings.base_mode == "prune_retrain"

    def __init__(self, backbone: nn.Module, settings: PackNetSettings, seed: int):
        super().__init__(backbone, settings, seed)
        self.sites: dict[str, Any] = weight_sites(backbone)
        # Names of the parameters without owners: biases, norms, class token, position embedding.
        self.others = [
            name
            for name, _ in backbone.named_parameters()
            if name.removesuffix(".weight") not in self.sites
        ]
        self.owners: dict[str, Tensor] = {}  # site -> owner number of each weight, uint8
        self.latest, self.latest_name = FREE, ""  # number of the newest owner, and its task
        self.numbers: dict[str, int] = {}  # loaded task -> its owner number
        self.loaded: dict[str, dict[str, Tensor]] = {}  # loaded task -> its copies
        self.copies: Copies | None = None  # copies of the task in training

    # ---- training --------------------------------------------------------------------------------
    def begin(self, context: StepContext) -> list[ParamGroup]:
        if context.carried is None:
            self.start(context.task)
        else:
            self.load_carried(context.carried)
        self.step, self.copies = context.step, None
        self.numbers.pop(context.task.name, None)
        self.loaded.pop(context.task.name, None)
        if self.latest_name != context.task.name:
            self.claim(context.task)
        elif context.carried is not None:  # the previous step of the same task carries the head
            self.heads.restore(context.task.name, under("head", context.carried))
        if context.step == "prune":
            self.give_back(self.settings.share(self.position) or 0.0)
        self.protector = Protector(
            {
                site: (weight, self.owners[site] != self.latest)
                for site, weight in self.sites.items()
            }
        )
        groups = super().begin(context)
        groups.append(
            {
                "name": "weights",
                "params": [*self.sites.values()],
                "weight_decay": context.optim.weight_decay,
            }
        )
        return [
            *groups,
            {
                "name": "others",
                "params": self.list_trained_others(context.carried),
                "weight_decay": 0.0,
            },
        ]

    def start(self, task: Task) -> None:
        """Create the owner map before the first step of the first task."""
        self.latest = FREE if self.settings.base_mode == "own_nothing" else FIRST
        self.owners = {
            site: torch.full_like(weight, self.latest, dtype=torch.uint8)
            for site, weight in self.sites.items()
        }
        if self.settings.base_mode == "prune_only":
            self.give_back(self.settings.base_prune)
        elif self.settings.base_mode == "prune_retrain":
            self.latest_name = task.name  # the base task owns all weights: `begin` must not claim

    def claim(self, task: Task) -> None:
        """Assign all free weights to a task.

        Raises:
            UserError: If the owner map cannot store one more owner.
        """
        if self.latest == MAX_OWNERS:
            raise UserError(
                f"packnet: task {task.name!r} would be owner {MAX_OWNERS + 1}, and one byte "
                f"per weight has room for {MAX_OWNERS}; "
                "end the stream before it, or begin another run there"
            )
        self.latest, self.latest_name = self.latest + 1, task.name
        for owner in self.owners.values():
            owner[owner == FREE] = self.latest

    @torch.no_grad()
    def give_back(self, share: float) -> None:
        """Free the smallest round(share * count) weights of the latest owner in each layer.

        The freed weights become 0.
        """
        for site, weight in self.sites.items():
            freed = smallest(weight, self.owners[site] == self.latest, share)
            weight.view(-1)[freed] = 0
            self.owners[site].view(-1)[freed] = FREE

    def list_trained_others(self, carried: Carried | None) -> list[nn.Parameter]:
        """Return the trained parameters other than weights and head.

        For the base task these are the backbone's other parameters, for a later task its copies.
        """
        parameters = dict(self.backbone.named_parameters())
        if self.position < 0:
            return [parameters[name] for name in self.others]
        if not self.settings.per_task_affine:
            return []
        self.copies = Copies(self.backbone, self.others)
        with torch.no_grad():
            for name, value in under("copies", carried).items():
                self.copies.tensors()[name].copy_(value)
        return [*self.copies.parameters()]

    @property
    def position(self) -> int:
        """Return the position of the latest owner in the stream, from 0; -1 is the base task."""
        return self.latest - FIRST - (self.settings.base_mode != "own_nothing")

    def training_weights(self, batch: Batch, progress: Progress) -> dict[str, Tensor]:
        return self.copies.tensors() if self.copies else {}

    def after_backward(self) -> None:
        self.protector.gate()

    def after_step(self, progress: Progress) -> None:
        self.protector.restore()

    def metrics(self) -> dict[str, float]:
        """Return shares of all weights: owned by the task, used by it, and free.

        A task uses its own weights and those of earlier tasks.
        """
        free = self.owned_share(FREE)
        return {"own": self.owned_share(self.latest), "used": 1 - free, "free": free}

    def owned_share(self, number: int) -> float:
        """Return the share of all weights that have this owner number."""
        total = sum(owner.numel() for owner in self.owners.values())
        return float(sum((owner == number).sum() for owner in self.owners.values())) / total

    def warnings(self) -> list[str]:
        if not self.owners or self.metrics()["own"]:
            return []
        return [
            f"task {self.latest_name!r}: no weight was free for it, so that only its head was "
            "trained; give more back with a larger `prune`"
        ]

    def finish(self) -> tuple[TaskState, Carried]:
        copies: dict[str, Tensor] = {}
        if self.copies:
            copies = {name: t.detach().clone() for name, t in self.copies.tensors().items()}
        state = self.state(copies=copies, meta={"owner": self.latest})
        tensors = {f"backbone/{name}": t for name, t in collect_tensors(self.backbone).items()}
        tensors |= {f"owners/{site}": owner.clone() for site, owner in self.owners.items()}
        last_step = self.steps_for(self.settings, self.position)[-1]
        if self.step != last_step.name:  # the next step of the same task starts from these tensors
            tensors |= {f"head/{name}": t.clone() for name, t in state.head.items()}
            tensors |= {f"copies/{name}": t.clone() for name, t in state.copies.items()}
        return state, Carried(tensors, {"owner": self.latest, "task": self.latest_name})

    # ---- serving ---------------------------------------------------------------------------------
    def load_carried(self, carried: Carried) -> None:
        super().load_carried(carried)
        self.backbone.load_state_dict(under("backbone", carried))
        self.owners = {
            site: owner.to(self.sites[site].device, copy=True)
            for site, owner in under("owners", carried).items()
        }
        self.latest, self.latest_name = carried.meta["owner"], carried.meta["task"]

    def load_task(self, state: TaskState) -> None:
        super().load_task(state)
        if state.method == self.name:
            self.numbers[state.task] = state.meta["owner"]
        elif self.settings.base_mode != "own_nothing":  # a base task without own steps
            self.numbers[state.task] = FIRST
        self.loaded[state.task] = state.copies

    def serving_weights(self, task: str) -> dict[str, Tensor]:
        """Return W_eff and the copies of a task; for the latest owner only copies: W_eff is W."""
        if self.task is not None and self.task.name == task:
            return self.copies.tensors() if self.copies else {}
        device = self.device
        weights = {name: t.to(device) for name, t in self.loaded[task].items()}
        number = self.numbers.get(task, self.latest)
        if number >= self.latest:
            return weights
        for site, weight in self.sites.items():
            is_unused = ~in_effect(self.owners[site].to(device), number)
            weights[f"{site}.weight"] = weight.masked_fill(is_unused, 0)
        return weights

    @classmethod
    def display_masks(cls, state: TaskState, carried: Carried) -> dict[str, Tensor]:
        if state.method != cls.name:
            return {}
        number = state.meta["owner"]
        return {site: in_effect(owner, number) for site, owner in under("owners", carried).items()}


def smallest(weight: Tensor, among: Tensor, share: float) -> Tensor:
    """Return the positions in the flattened weight of the round(share * count) smallest |w|.

    Only weights in `among` are considered. Of equal weights the first ones are taken.
    """
    candidates = among.flatten().nonzero().squeeze(1)
    order = weight.flatten()[candidates].abs().argsort(stable=True)
    return candidates[order[: round(share * len(candidates))]]


def in_effect(owner: Tensor, number: int) -> Tensor:
    """Return 1[1 <= owner <= number]: the weights that a task uses."""
    return (owner >= FIRST) & (owner <= number)


def under(kind: str, carried: Carried | None) -> dict[str, Tensor]:
    """Return the carried tensors `KIND/NAME`, by NAME."""
    tensors = {} if carried is None else carried.tensors
    return {
        name.removeprefix(f"{kind}/"): t
        for name, t in tensors.items()
        if name.startswith(f"{kind}/")
    }
