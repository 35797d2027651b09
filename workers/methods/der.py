"""DER: a separate feature extractor for every task, and one classifier over all their features.

All older extractors are frozen.

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
from workers.methods.finetune import save_heads, weight_groups
from workers.methods.train_defaults import TrainDefaults
from workers.model.heads import JointHeads, sum_old_targets
from workers.rng import derive_seed
from workers.storage.taskstate import Carried, TaskState

# Tensors of a stored extractor: `copies` of the parameters, and `masks` if it was pruned.
Parts = dict[str, dict[str, Tensor]]


class DerSettings(RehearsalSettings):
    """Settings of `der`."""

    auxiliary: NonNegativeFloat = Field(
        1.0, description="weight of the auxiliary loss, which classifies by the new extractor alone"
    )
    restart: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of the optimizer steps of `train` after which classifier and "
        "auxiliary head are initialised again; 0: never; 10 of 170 epochs in the authors' code",
    )
    temperature: PositiveFloat = Field(
        5.0,
        description="divisor of the logits while step `finetune` trains the classifier; 1 in "
        "the paper for ImageNet-100",
    )


# Step -> the settings in this table that the step uses. The key of the step's stage does not
# contain the other settings of the table.
SETTINGS_OF_STEP = {
    "train": {"auxiliary", "restart"},
    "finetune": {"temperature"},
    "herd": {"memory", "per_class", "selection"},
}


S = TypeVar("S", bound=DerSettings, default=Any)


class Der(Rehearsal[S]):
    """Each task s adds an extractor F_s; the logits are W u, with u = [F_0(x), ..., F_t(x)].

    An extractor has D features, so u has (t + 1) D. W has no bias. The steps of task t:

    - `train`: F_t starts as F_{t-1}, W is new, and L = CE(W u, y) + auxiliary * CE(aux(F_t(x)),
      y'). In y' all old classes are one class. The head aux: D -> K_t + 1, for the K_t new
      classes, is discarded afterwards. Without earlier tasks L is CE only.
    - `finetune`, unless t is the first task of the stream: all extractors are frozen, and a new W
      learns CE(W u / temperature) on a balanced subset. It has the same number of images of each
      class, from the task's images and the exemplars, chosen by a hash of the seed and the key of
      each image.
    - `herd` selects exemplars by u.

    The prediction is the largest entry of W u.

    Stored per task: its extractor, which never changes again, and its rows of W at that time. The
    chain carries W and the memory. Frozen extractors are in evaluation mode and have no autograd
    graph.

    A base task is not trained here. Its extractor is the backbone, and the head that was trained
    with the backbone (with a bias) is used until `train` of the next task creates W.

    Differences from the paper: extractors keep all their units (see `der_p`). The paper's warm-up,
    after which classifier and auxiliary head are initialised again, is the setting `restart`. It is
    off by default, because it is meant for 170 epochs from random weights. The optimizer's moments
    are not reset.
    """

    name = "der"
    has_constant_step = True
    family = "expansion"
    keeps = "an extractor"
    paper = "DER: Dynamically Expandable Representation for Class Incremental Learning, CVPR 2021"
    train_defaults = TrainDefaults(
        lr=1e-4,
        scratch_lr=1e-3,
        steps={"finetune": {"epochs": 10, "lr": 1e-2, "scratch_lr": 5e-3}},
        source="measured on 25 classes of CIFAR-100 at 64 px: configs/RESULTS.md",
    )
    steps = (Step("train"), Step("finetune", later=True), Step("herd", trains=False))
    Settings = DerSettings
    per_task = Rehearsal.per_task | {"auxiliary", "restart", "temperature"}
    heads: JointHeads
    step = ""

    @classmethod
    def ignored_settings(cls, step: str) -> frozenset[str]:
        if step not in SETTINGS_OF_STEP:
            return frozenset()
        return frozenset().union(*SETTINGS_OF_STEP.values()) - SETTINGS_OF_STEP[step]

    def __init__(self, backbone: nn.Module, settings: S, seed: int):
        super().__init__(backbone, settings, seed)
        self.dim: int = self.heads.width
        self.heads = JointHeads(self.dim)
        self.extractors = nn.ModuleList()  # of finished tasks
        self.extracted: list[str] = []  # the tasks of `extractors`
        self.auxiliary: nn.Linear | None = None
        # Tensors of the newest extractor: from the state of the last task, or carried from the
        # previous step of this task.
        self.stored: Parts = {}

    # ---- memory ----------------------------------------------------------------------------------
    def memory(self, context: StepContext) -> dict[str, list[str]]:
        """Return the exemplars; in `finetune` the balanced subset, with images of the task."""
        if context.step != "finetune":
            return super().memory(context)
        assert context.carried is not None
        pool: Memory = context.carried.meta[MEMORY] | {
            context.task.name: context.data.keys(context.task)
        }
        count = min(min(map(len, classes.values())) for classes in pool.values())

        def order(key: str) -> int:
            return derive_seed(self.seed, "balanced", context.task.name, key)

        balanced: dict[str, list[str]] = {}  # task -> `count` keys of each class
        for name, classes in pool.items():
            balanced[name] = []
            for keys in classes.values():
                balanced[name] += sorted(keys, key=order)[:count]
        return balanced

    # ---- training --------------------------------------------------------------------------------
    def begin(self, context: StepContext) -> list[ParamGroup]:
        groups = super().begin(context)
        if context.step == "herd":
            return groups
        self.heads.renew(len(self.class_slices()) * self.dim)
        groups = []
        if context.step == "train":
            self.inherit()
            if self.old:  # there are earlier tasks
                self.auxiliary = nn.Linear(self.dim, 1 + context.task.num_classes, bias=False)
                groups.append(
                    {
                        "name": "auxiliary",
                        "params": [self.auxiliary.weight],
                        "weight_decay": context.optim.weight_decay,
                    }
                )
            groups += self.extractor_groups(context.optim)
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

    def extractor_groups(self, optim: OptimPlan) -> list[ParamGroup]:
        """Return the parameters of the new extractor that `train` trains."""
        return weight_groups(self.backbone, optim)

    def inherit(self) -> None:
        """Load the parameters of the newest extractor into the backbone."""
        self.backbone.load_state_dict(self.stored.get("copies", {}), strict=False)

    def start_classifier(self, *when: object) -> None:
        """Draw new values of W and of the auxiliary head, the same on all ranks.

        Args:
            when: Part of the seed, to distinguish the draws of one task: the name of the step, or
                "again" for the restart (setting `restart`).
        """
        assert self.task is not None
        layers: dict[str, nn.Linear] = {name: self.heads[name] for name in self.class_slices()}
        if self.auxiliary is not None:
            layers[""] = self.auxiliary
        for name, layer in layers.items():
            seed = derive_seed(self.seed, "classifier", self.task.name, name, *when)
            self.heads.start(layer, torch.Generator().manual_seed(seed))

    def train(self, mode: bool = True) -> Der:
        super().train(mode)
        self.extractors.eval()
        if self.step == "finetune":
            self.backbone.eval()
        return self

    def features(self, images: Tensor) -> Tensor:
        """Return u (b, (t + 1) D) of images (b, 3, H, W), in the order of `class_slices`."""
        with torch.no_grad():
            parts = [extractor(images) for extractor in self.finished()]
        if self.task is not None:
            parts.append(super().features(images))
        return torch.cat(parts, 1)

    def finished(self) -> list[nn.Module]:
        """Return the extractors of finished tasks, in the order of `class_slices`."""
        names = list(self.class_slices())
        if self.task is not None and self.task.name in names:
            names.remove(self.task.name)
        return [self.extractors[self.extracted.index(name)] for name in names]

    def loss(self, batch: Batch, progress: Progress) -> tuple[Tensor, dict[str, Tensor]]:
        self.active_task = None
        self.weight_overrides = self.training_weights(batch, progress)
        u = self.features(batch.images)
        z = self.all_logits(u).float()
        if self.step == "finetune":
            z = z / self.settings.temperature
        if batch.targets is None:
            targets = self.global_labels(batch)  # class indices suffice without soft targets
        else:
            targets = self.global_targets(batch)
        loss = F.cross_entropy(z, targets)
        values = {"ce": loss.detach()}
        if self.step == "train":
            for name, (weight, term) in self.terms(u, z, batch).items():
                loss = loss + weight * term
                values[name] = term.detach()
        return loss, values

    def terms(self, u: Tensor, z: Tensor, batch: Batch) -> dict[str, tuple[float, Tensor]]:
        """Return the terms that `train` adds to the cross-entropy: weight and scalar by name.

        Args:
            u: Features (b, (t + 1) D).
            z: Logits (b, classes so far).
            batch: The batch.
        """
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

    # ---- state -----------------------------------------------------------------------------------
    def parts(self) -> Parts:
        """Return copies of the tensors of the task's extractor, to be stored.

        In `train` these are the trained tensors. The later steps of the task do not change the
        extractor: they return the tensors that `train` carried to them.
        """
        parts = self.trained() if self.step == "train" else self.stored
        copies: Parts = {}
        for kind, tensors in parts.items():
            copies[kind] = {name: t.detach().cpu().clone() for name, t in tensors.items()}
        return copies

    def trained(self) -> Parts:
        """Return the tensors of the extractor in training."""
        return {"copies": dict(self.backbone.named_parameters())}

    def finish(self) -> tuple[TaskState, Carried]:
        """Return the task's state and the carried state.

        After the task's last step (`herd`) the extractor is only in the task's state. After an
        earlier step of the task it is only in the carried state. A base task stores no extractor.
        """
        state, carried = super().finish()
        parts = self.parts()
        if self.ends:
            state.copies, state.masks = parts.get("copies", {}), parts.get("masks", {})
        else:
            for kind, tensors in parts.items():
                for name, tensor in tensors.items():
                    carried.tensors[f"{kind}/{name}"] = tensor
        return state, carried

    def network_tensors(self, heads: list[str]) -> dict[str, Tensor]:
        return save_heads(self, heads)

    def load_carried(self, carried: Carried) -> None:
        parts: Parts = {"copies": {}, "masks": {}}
        heads: dict[str, Tensor] = {}
        for name, tensor in carried.tensors.items():
            kind, _, rest = name.partition("/")
            if kind in parts:
                parts[kind][rest] = tensor
            elif kind == "heads":
                heads[name] = tensor
        if parts["copies"]:
            self.stored = parts
            self.backbone = self.extractor("the carried extractor", parts).to(self.device)
        super().load_carried(Carried(heads, carried.meta))

    def load_task(self, state: TaskState) -> None:
        """Load the task's head and its extractor.

        The extractor is a copy of the backbone with the stored parameters. A base task has no
        stored parameters: its extractor is a copy of the unchanged backbone. Therefore states must
        be loaded before `begin`, which changes the backbone.
        """
        super().load_task(state)
        self.stored = {"copies": state.copies, "masks": state.masks}
        name = f"the extractor of task {state.task!r}"
        extractor = self.extractor(name, self.stored).eval().requires_grad_(False)
        if state.task in self.extracted:
            self.extractors[self.extracted.index(state.task)] = extractor
        else:
            self.extracted.append(state.task)
            self.extractors.append(extractor)

    def extractor(self, name: str, parts: Parts) -> Any:
        """Return a copy of the backbone with the parameters in `parts`, if it has any.

        Args:
            name: Name of the extractor in errors.
            parts: Stored tensors.

        Raises:
            UserError: If the parameters belong to another architecture.
        """
        network = self.copy_backbone()
        if parts["copies"]:
            shapes = {name: p.shape for name, p in network.named_parameters()}
            own_shapes = {name: shape for name, shape in shapes.items() if self.is_own(name)}
            stored_shapes = {name: t.shape for name, t in parts["copies"].items()}
            if stored_shapes not in (shapes, own_shapes):
                raise UserError(
                    f"{name} does not fit this backbone: its parameters have other names or "
                    "shapes; use the backbone of the run that stored it"
                )
            network.load_state_dict(parts["copies"], strict=False)
        return network

    def copy_backbone(self) -> nn.Module:
        """Return the network that becomes a task's extractor."""
        return copy.deepcopy(self.backbone)

    def is_own(self, parameter: str) -> bool:
        """Return whether each task has its own values for this parameter of the backbone."""
        return True

    def flops_share(self, state: TaskState) -> float:
        """Return the FLOPs relative to the backbone: one pass through each extractor."""
        return float(len(self.class_slices()))
