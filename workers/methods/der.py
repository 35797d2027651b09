"""DER: a feature extractor of its own for every task, all older ones frozen, and one classifier
over all their features.

Yan, Xie, He: DER: Dynamically Expandable Representation for Class Incremental Learning, CVPR 2021.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import TypeVar

from workers.data.batch import Batch
from workers.errors import UserError
from workers.methods.base import OptimPlan, ParamGroup, Progress, Step, StepContext
from workers.methods.bases.rehearsal import MEMORY, Memory, Rehearsal, RehearsalSettings
from workers.methods.finetune import heads_of, weight_groups
from workers.model.heads import JointHeads, sum_old_targets
from workers.rng import derive_seed
from workers.storage.taskstate import Carried, TaskState

Parts = dict[
    str, dict[str, Tensor]
]  # what an extractor is stored as: `copies` of parameters, `masks` where it was pruned


class DerSettings(RehearsalSettings):
    auxiliary: NonNegativeFloat = Field(
        1.0, description="weight of the auxiliary loss on the new extractor alone"
    )
    restart: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of the training after which classifier and auxiliary head start anew; "
        "the authors' code: 10 of "
        "170 epochs; 0: never",
    )
    temperature: PositiveFloat = Field(
        5.0,
        description="that outputs are divided by while `finetune` trains the classifier; 1 for "
        "ImageNet-100",
    )


READ = {
    "train": {"auxiliary", "restart"},
    "finetune": {"temperature"},
    "herd": {"memory", "per_class", "selection"},
}  # settings, by step


S = TypeVar("S", bound=DerSettings, default=Any)


class Der(Rehearsal[S]):
    """u = [F_0(x), ..., F_t(x)], logits W u without bias, over (t + 1) D features. `train`: F_t
    starts as F_{t-1}, W anew, and L = CE(W u, y) + auxiliary * CE(aux(F_t(x)), y'), where y' has
    one class for all old ones; aux: D -> K_t + 1, thrown away afterwards. The first task is CE
    alone. `finetune`, from the second task on: all extractors are frozen, W starts anew and learns
    CE(W u / temperature) on a balanced subset: of the task's images and the exemplars equally many
    of each class, drawn by a hash of seed and key. `herd` chooses exemplars by u. Answers are the
    largest of W u.

    Stored per task: its extractor, which never changes again, and its rows of W as they were then;
    a base task's extractor is the backbone itself. The chain carries W and the memory. Frozen
    extractors are in evaluation mode and leave no graph.

    Where it differs from the paper: extractors keep all their units (see `der_p`). Its warm-up,
    after which classifier and auxiliary head start anew, is the setting `restart`, off by default:
    it is for 170 epochs from random weights, and the optimizer's moments stay. A base task answers
    with the head that it was trained with, bias and all, until W takes its place.
    """

    name = "der"
    paper = "DER: Dynamically Expandable Representation for Class Incremental Learning, CVPR 2021"
    steps = (Step("train"), Step("finetune", later=True), Step("herd", trains=False))
    Settings = DerSettings
    per_task = Rehearsal.per_task | {"auxiliary", "restart", "temperature"}
    heads: JointHeads
    step = ""

    @classmethod
    def ignored_settings(cls, step: str) -> frozenset[str]:
        return (
            frozenset(name for settings in READ.values() for name in settings) - READ[step]
            if step in READ
            else frozenset()
        )

    def __init__(self, backbone: nn.Module, settings: S, seed: int):
        super().__init__(backbone, settings, seed)
        self.dim: int = self.heads.width
        self.heads = JointHeads(self.dim)
        self.extractors = nn.ModuleList()  # of finished tasks
        self.extracted: list[str] = []  # their names
        self.auxiliary: nn.Linear | None = None
        self.stored: Parts = {}  # the newest extractor as it was loaded or handed on

    # ---- who is trained on what ------------------------------------------------------------------
    def memory(self, context: StepContext) -> dict[str, list[str]]:
        if context.step != "finetune":
            return super().memory(context)
        assert context.carried is not None
        pool: Memory = context.carried.meta[MEMORY] | {
            context.task.name: context.data.keys(context.task)
        }
        count = min(len(keys) for classes in pool.values() for keys in classes.values())

        def drawn(keys: list[str]) -> list[str]:
            return sorted(
                keys, key=lambda key: derive_seed(self.seed, "balanced", context.task.name, key)
            )[:count]

        return {
            name: [key for keys in classes.values() for key in drawn(keys)]
            for name, classes in pool.items()
        }

    # ---- training --------------------------------------------------------------------------------
    def begin(self, context: StepContext) -> list[ParamGroup]:
        groups = super().begin(context)
        if context.step == "herd":
            return groups
        self.heads.renew(len(self.class_slices()) * self.dim)
        groups = []
        if context.step == "train":
            self.inherit()
            if self.old:
                self.auxiliary = nn.Linear(self.dim, 1 + context.task.num_classes, bias=False)
                groups.append(
                    {
                        "name": "auxiliary",
                        "params": [self.auxiliary.weight],
                        "weight_decay": context.optim.weight_decay,
                    }
                )
            groups += weight_groups(self.backbone, context.optim)
        self.start_classifier(context.step)
        return [*self.head_groups(context.optim, list(self.class_slices())), *groups]

    def head_groups(self, optim: OptimPlan, names: list[str]) -> list[ParamGroup]:
        return [
            {
                "name": "head.weight",
                "params": [self.heads[name].weight for name in names],
                "weight_decay": optim.weight_decay,
            }
        ]

    def inherit(self) -> None:
        """The backbone becomes what the newest extractor is."""
        self.backbone.load_state_dict(self.stored.get("copies", {}), strict=False)

    def start_classifier(self, *when: object) -> None:
        """Values of W and of the auxiliary head, the same on all ranks."""
        assert self.task is not None
        for layer, name in [
            *((self.heads[name], name) for name in self.class_slices()),
            *([(self.auxiliary, "")] if self.auxiliary else []),
        ]:
            self.heads.start(
                layer,
                torch.Generator().manual_seed(
                    derive_seed(self.seed, "classifier", self.task.name, name, *when)
                ),
            )

    def train(self, mode: bool = True) -> Der:
        super().train(mode)
        self.extractors.eval()
        if self.step == "finetune":
            self.backbone.eval()
        return self

    def features(self, images: Tensor) -> Tensor:
        """images (b, 3, H, W) -> u (b, (t + 1) D), extractors in the order of `class_slices`."""
        with torch.no_grad():
            parts = [extractor(images) for extractor in self.finished()]
        return torch.cat(parts if self.task is None else [*parts, super().features(images)], 1)

    def finished(self) -> list[nn.Module]:
        """Extractors of all tasks but the one in training, in the order of `class_slices`."""
        training = None if self.task is None else self.task.name
        return [
            self.extractors[self.extracted.index(name)]
            for name in self.class_slices()
            if name != training
        ]

    def loss(self, batch: Batch, progress: Progress) -> tuple[Tensor, dict[str, Tensor]]:
        self.active_task, self.weight_overrides = None, self.training_weights(batch, progress)
        u = self.features(batch.images)
        z = self.all_logits(u).float() / (
            self.settings.temperature if self.step == "finetune" else 1.0
        )
        ce = F.cross_entropy(
            z, self.global_labels(batch) if batch.targets is None else self.global_targets(batch)
        )
        terms = self.terms(u, z, batch) if self.step == "train" else {}
        return sum((weight * term for weight, term in terms.values()), ce), {
            "ce": ce.detach(),
            **{name: term.detach() for name, (_, term) in terms.items()},
        }

    def terms(self, u: Tensor, z: Tensor, batch: Batch) -> dict[str, tuple[float, Tensor]]:
        """What `train` adds to the cross-entropy, by name: weights and scalars. u (b, (t + 1) D), z
        (b, classes so far)."""
        if self.auxiliary is None:
            return {}
        assert self.task is not None
        targets = sum_old_targets(
            self.global_targets(batch), self.class_slices()[self.task.name].start
        )
        return {
            "auxiliary": (
                self.settings.auxiliary,
                F.cross_entropy(self.auxiliary(u[:, -self.dim :]).float(), targets),
            )
        }

    def after_step(self, progress: Progress) -> None:
        if self.step == "train" and progress.global_step + 1 == int(
            self.settings.restart * progress.total
        ):
            self.start_classifier("again")

    # ---- what is kept ----------------------------------------------------------------------------
    def parts(self) -> Parts:
        """The extractor of the task in training, to be stored: as `train` leaves it, later as it
        was handed on."""
        parts = self.trained() if self.step == "train" else self.stored
        return {
            kind: {name: t.detach().cpu().clone() for name, t in tensors.items()}
            for kind, tensors in parts.items()
        }

    def trained(self) -> Parts:
        return {"copies": dict(self.backbone.named_parameters())}

    def finish(self) -> tuple[TaskState, Carried]:
        """After the last step the extractor is in the task's state alone, before that it is handed
        on alone. A base task has none."""
        state, carried = super().finish()
        parts = self.parts()
        if self.ends:
            state.copies, state.masks = parts.get("copies", {}), parts.get("masks", {})
        else:
            carried.tensors |= {
                f"{kind}/{name}": t
                for kind, tensors in parts.items()
                for name, t in tensors.items()
            }
        return state, carried

    def network_tensors(self, heads: list[str]) -> dict[str, Tensor]:
        return heads_of(self, heads)

    def load_carried(self, carried: Carried) -> None:
        handed = {
            kind: {
                n.removeprefix(f"{kind}/"): t
                for n, t in carried.tensors.items()
                if n.startswith(f"{kind}/")
            }
            for kind in ("copies", "masks")
        }
        if handed["copies"]:
            self.stored = handed
            self.backbone = self.extractor("in training", handed).to(self.device)
        super().load_carried(
            Carried(
                {n: t for n, t in carried.tensors.items() if n.startswith("heads/")}, carried.meta
            )
        )

    def load_task(self, state: TaskState) -> None:
        """Also the task's extractor. Loaded before anything is trained: a base task's is the
        backbone as it is."""
        super().load_task(state)
        self.stored = {"copies": state.copies, "masks": state.masks}
        extractor = self.extractor(state.task, self.stored).eval().requires_grad_(False)
        if state.task in self.extracted:
            self.extractors[self.extracted.index(state.task)] = extractor
        else:
            self.extracted.append(state.task)
            self.extractors.append(extractor)

    def extractor(self, task: str, parts: Parts) -> Any:
        """The network that is stored as `parts`; of no parts the backbone. Raises UserError where
        they are of another architecture."""
        network = copy.deepcopy(self.backbone)
        if parts["copies"]:
            wanted, found = (
                {name: tuple(t.shape) for name, t in tensors}
                for tensors in (network.named_parameters(), parts["copies"].items())
            )
            if wanted != found:
                raise UserError(
                    f"task {task!r}: the parameters of its extractor are not those of this "
                    "backbone; use the backbone of its run"
                )
            network.load_state_dict(parts["copies"], strict=False)
        return network

    def flops_share(self, state: TaskState) -> float:
        """Every image passes through all extractors."""
        return float(len(self.class_slices()))
