"""CTR's task-specific module: adapters that all tasks share and train on, with HAT's hard masks on
their units.

Ke, Liu, Ma, Xu, Shu: Achieving Forgetting Prevention and Knowledge Transfer in Continual Learning,
NeurIPS 2021. HAT: see `hat`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import TypeVar

from workers.data.batch import Batch
from workers.errors import UserError
from workers.job import DataSettings, TrainSettings
from workers.methods.adapter import added_share
from workers.methods.base import (
    Method,
    MethodSettings,
    OptimPlan,
    ParamGroup,
    Progress,
    StepContext,
    needs_adamw,
)
from workers.model.adapters import AdapterSites, Bottlenecks
from workers.model.masks import AnnealedSigmoid, Start, annealed_scale, initial_embedding
from workers.model.penalties import newly_used
from workers.model.protect import Protector
from workers.rng import derive_seed
from workers.storage.taskstate import Carried, TaskState

FEW = 0.01  # share of free units below which a task learns little but its head


class CtrSettings(MethodSettings):
    width: PositiveInt = Field(64, description="A, units of a bottleneck, for all tasks together")
    s_max: float = Field(400.0, gt=1, description="scale of the masks when they are hardest")
    c: NonNegativeFloat = Field(
        0.75, description="weight of R, the price of units that no earlier task uses"
    )
    start: Start = Field(
        "normal",
        description="where embeddings start; normal, the paper's, has half of the units on",
    )
    expected_tasks: int = Field(
        10, ge=2, description="for start sparse: of how many tasks one should use a unit"
    )
    mask_lr: PositiveFloat | Literal["auto"] = Field(
        "auto", description="peak learning rate of the embeddings; auto: by mask_travel"
    )
    mask_travel: PositiveFloat = Field(
        4.0,
        description="for mask_lr auto: how far an embedding can go over all steps; half of them "
        "start within 0.7 of 0",
    )


def masked_bottleneck(
    x: Tensor, down: Tensor, down_bias: Tensor, up: Tensor, up_bias: Tensor
) -> Tensor:
    """x + z2 with z1 = relu(fc1 x) and z2 = relu(fc2 z1). The masks are in the weights: m relu(v) =
    relu(m v) for m >= 0."""
    return x + F.linear(F.linear(x, down, down_bias).relu_(), up, up_bias).relu_()


S = TypeVar("S", bound=CtrSettings, default=Any)


class CtrTsm(Method[S]):
    """A chain: z1 = m1 .* relu(fc1 x), z2 = m2 .* relu(fc2 z1), x + z2, behind attention and behind
    the FFN of every block of a frozen ViT. The linears are shared and trained on by every task; m =
    sigmoid(s e) per task as in HAT, stored as 1[e > 0]. What earlier tasks use is locked: rows of
    fc1 and its bias by m1, entries of fc2 by the smaller of m2 (out) and m1 (in), the bias of fc2
    by m2. Stored per task: (A + d) 2 L bits and a head.

    Where it differs from the released code: all layer norms are frozen, masks are hard when served
    and locked, and locked entries are put back after each step, so that nothing is forgotten. A
    base task is served by the backbone alone.
    """

    name = "ctr_tsm"
    paper = (
        "Achieving Forgetting Prevention and Knowledge Transfer in Continual Learning, NeurIPS 2021"
    )
    needs_vit = True
    carries: ClassVar[tuple[str, ...]] = ("adapters", "used")
    starts_as_backbone = False
    form: ClassVar[Callable[..., Tensor]] = staticmethod(masked_bottleneck)
    Settings = CtrSettings
    per_task = frozenset({"s_max", "c", "start", "expected_tasks", "mask_lr", "mask_travel"})

    @classmethod
    def validate(cls, settings: S, train: TrainSettings, data: DataSettings, scenario: str) -> None:
        needs_adamw(settings.mask_lr, train)

    @classmethod
    def changes_past_predictions(cls, scenario: str) -> bool:
        return cls.may_forget

    def __init__(self, backbone: nn.Module, settings: S, seed: int):
        super().__init__(backbone, settings, seed)
        self.sites = AdapterSites(backbone, self.form)
        # The up-projection starts as PyTorch's Linear does. Not at zero: there relu has no
        # gradient.
        self.adapters = Bottlenecks(
            len(self.sites),
            self.sites.width,
            settings.width,
            up_std=1 / math.sqrt(3 * settings.width),
        )
        self.shared = nn.ModuleDict({"adapters": self.adapters})  # what tasks hand on
        # (S, A + d), by earlier tasks
        self.used = torch.zeros(
            len(self.sites), settings.width + self.sites.width, dtype=torch.bool
        )
        self.position = 0  # number of earlier tasks
        self.loaded: dict[str, dict[str, Tensor]] = {}  # task -> masks by kind

    def split(self, units: Tensor) -> tuple[Tensor, Tensor]:
        """(S, A + d) -> those of the bottleneck (S, A), those of the output (S, d)."""
        inner, outer = units.split([self.settings.width, self.sites.width], 1)
        return inner, outer

    # ---- training --------------------------------------------------------------------------------
    def begin(self, context: StepContext) -> list[ParamGroup]:
        if context.carried is not None:
            self.load_carried(context.carried)
        groups = super().begin(context)
        self.loaded.pop(context.task.name, None)
        device, s = self.device, self.settings
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "ctr", context.task.name))
        self.mask = AnnealedSigmoid(
            initial_embedding(tuple(self.used.shape), s.start, generator, s.expected_tasks).to(
                device
            ),
            s.s_max,
        )
        self.shared.to(device)
        self.used = self.used.to(device)
        self.protector = Protector(self.locks())
        mask_lr = (
            s.mask_travel / max(context.optim.mean_rate_steps, 1e-9)
            if s.mask_lr == "auto"
            else s.mask_lr
        )
        return [
            *groups,
            *self.shared_groups(context.optim),
            {"name": "masks", "params": [self.mask.embedding], "lr": mask_lr, "weight_decay": 0.0},
        ]

    def shared_groups(self, optim: OptimPlan) -> list[ParamGroup]:
        return self.adapters.groups(optim.weight_decay)

    def locks(self) -> dict[str, tuple[nn.Parameter, Tensor]]:
        """Entries that an earlier task may use, by HAT's rule: both its output and its input are
        used; inputs of fc1 always are."""
        inner, outer = self.split(self.used)
        a = self.adapters
        return {
            "down": (a.down, inner[:, :, None]),
            "down_bias": (a.down_bias, inner),
            "up": (a.up, outer[:, :, None] & inner[:, None, :]),
            "up_bias": (a.up_bias, outer),
        }

    def masked(self, inner: Tensor, outer: Tensor) -> dict[str, Tensor]:
        """The adapters' tensors with m1 (S, A) and m2 (S, d) multiplied in, boolean or in [0,
        1]."""
        a = self.adapters
        return {
            "down": a.down * inner[:, :, None],
            "down_bias": a.down_bias * inner,
            "up": a.up * outer[:, :, None],
            "up_bias": a.up_bias * outer,
        }

    def training_weights(self, batch: Batch, progress: Progress) -> dict[str, Tensor]:
        if progress.steps_per_epoch == 1:
            raise UserError(
                f"task {self.training_tasks[0].name!r} has one step per epoch, and masks are "
                "hardened from step to step of an epoch; lower "
                "train.batch_size until an epoch has several"
            )
        self.soft = self.mask.sample(
            annealed_scale(progress.step, progress.steps_per_epoch, self.settings.s_max)
        )
        return self.masked(*self.split(self.soft))

    def features(self, images: Tensor) -> Tensor:
        with self.sites.using(self.weight_overrides):
            features: Tensor = self.backbone(images)
        return features

    def loss(self, batch: Batch, progress: Progress) -> tuple[Tensor, dict[str, Tensor]]:
        """CE + c R, R over the masks of the task in training, as they are in this step."""
        ce, terms = super().loss(batch, progress)
        taken = newly_used([self.soft], [self.used])
        return ce + self.settings.c * taken, terms | {"newly_used": taken.detach()}

    def after_backward(self) -> None:
        self.protector.gate()

    def after_step(self, progress: Progress) -> None:
        self.protector.restore()
        self.mask.clamp()

    def metrics(self) -> dict[str, float]:
        """Shares of units: this task's, and those that no task uses so far."""
        own = self.mask.hard()
        return {
            "density": float(own.float().mean()),
            "free": 1 - float((own | self.used).float().mean()),
        }

    def warnings(self) -> list[str]:
        assert self.task is not None
        free, left = 1 - float(self.used.float().mean()), self.metrics()["free"]
        if free < FEW:
            return [
                f"task {self.task.name!r}: only {free:.2%} of the adapters' units were free, so "
                "it learned little but its head and the choice of "
                "units; raise width, or c so that tasks use fewer units"
            ]
        if left < FEW:
            return [
                f"task {self.task.name!r}: {left:.2%} of the adapters' units are left for later "
                "tasks; raise width or c, or set start: sparse"
            ]
        return []

    def finish(self) -> tuple[TaskState, Carried]:
        own = self.mask.hard()
        shared = {name: t.detach().clone() for name, t in self.shared.named_parameters()}
        inner, outer = (m.cpu().clone() for m in self.split(own))
        return self.state(masks={"inner": inner, "outer": outer}), Carried(
            shared | {"used": self.used | own}, {"tasks": self.position + 1}
        )

    # ---- serving ---------------------------------------------------------------------------------
    def load_carried(self, carried: Carried) -> None:
        super().load_carried(carried)
        self.shared.load_state_dict(
            {name: t for name, t in carried.tensors.items() if name != "used"}
        )
        self.used = carried.tensors["used"].to(self.used.device, copy=True)
        self.position = carried.meta["tasks"]

    def load_task(self, state: TaskState) -> None:
        """Keeps the task's masks beside those of other tasks. A base task has none: the backbone
        alone serves it."""
        super().load_task(state)
        for name, size in (("inner", self.settings.width), ("outer", self.sites.width)):
            found, fits = state.masks.get(name), (len(self.sites), size)
            if state.masks and (found is None or tuple(found.shape) != fits):
                raise UserError(
                    f"task {state.task!r}: its state has {name} masks of shape "
                    f"{None if found is None else tuple(found.shape)}, these settings "
                    f"have {fits}; use the backbone and the method's settings of its run"
                )
        self.loaded[state.task] = dict(state.masks)

    def serving_weights(self, task: str) -> dict[str, Tensor]:
        if task not in self.loaded:
            return self.masked(*self.split(self.mask.hard()))
        device, masks = self.adapters.down.device, self.loaded[task]
        return self.masked(masks["inner"].to(device), masks["outer"].to(device)) if masks else {}

    def flops_share(self, state: TaskState) -> float:
        """With units cut that the task does not use."""
        inner, outer = (state.masks[name].sum(1) for name in ("inner", "outer"))
        return 1 + added_share(self.backbone, int((inner * (self.sites.width + outer)).sum()))
