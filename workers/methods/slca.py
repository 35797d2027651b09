"""SLCA: a slowly trained backbone, and heads that are aligned on Gaussians of all classes.

Zhang, Wang, Kang, Chen, Wei: SLCA: Slow Learner with Classifier Alignment for Continual Learning on
a Pre-trained Model, ICCV 2023.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn

from workers.data.batch import Batch
from workers.data.features import extract_features
from workers.errors import UserError
from workers.job import ActiveIf
from workers.methods.base import Method, MethodSettings, ParamGroup, Step, StepContext
from workers.methods.bases.alignment import (
    AlignmentPlan,
    ClassGaussians,
    align_heads,
    fit_gaussians,
)
from workers.methods.bases.class_incremental import ClassIncremental
from workers.methods.finetune import collect_tensors, weight_groups
from workers.methods.train_defaults import TrainDefaults
from workers.storage.taskstate import Carried, TaskState

BACKBONE, HEADS, ALIGNED, MEANS, FACTORS = "backbone", "heads", "aligned", "means", "factors"


class SlcaSettings(MethodSettings):
    """Settings of `slca`."""

    backbone_rate: PositiveFloat = Field(
        0.01, description="learning rate of the backbone, relative to the head's"
    )
    align_epochs: NonNegativeInt = Field(
        5, description="epochs of the alignment; 0: heads stay as they were trained"
    )
    align_draws: Annotated[PositiveInt, ActiveIf("align_epochs", but=(0,))] = Field(
        256,
        description="features drawn of each class in an epoch of the alignment, and in its batches",
    )
    align_lr: Annotated[PositiveFloat, ActiveIf("align_epochs", but=(0,))] = Field(
        0.01, description="initial learning rate of the alignment (SGD)"
    )
    tau: Annotated[PositiveFloat, ActiveIf("align_epochs", but=(0,))] = Field(
        0.1,
        description="temperature of the logits in the alignment, after a division by their mean "
        "length over tasks; 0.05 in the paper for Cars",
    )


class Slca(ClassIncremental[SlcaSettings]):
    """A chain of three steps: `train`, `statistics`, `align`.

    - `train`: the backbone and the task's new head, at a rate for the backbone that is 100 times
      lower; cross-entropy over the task's own classes.
    - `statistics`: a Gaussian of the features of each class, under the network of that moment. It
      is never updated.
    - `align`, from the second task on: all heads are trained on features drawn from N(rho_c mu_c,
      Sigma_c + 1e-4 I), rho_c = 0.9 + 0.1 (t_c + 1) / (t + 1) for a class of task t_c, with the
      cross-entropy of z / (nu tau), nu the mean over tasks s of |z_s|.

    An alignment always starts from the heads as they were trained, and training sees no aligned
    head: the chain carries both. Stored per task: its aligned head.

    Differences from the released code: t_c is the task of the class, where the code divides by the
    size of the newest task; heads of earlier tasks have no weight decay while a task trains.
    """

    name = "slca"
    family = "class statistics"
    keeps = "a head"
    paper = (
        "SLCA: Slow Learner with Classifier Alignment for Continual Learning on a Pre-trained "
        "Model, ICCV 2023"
    )
    train_defaults = TrainDefaults(
        lr=1e-2,
        optimizer="sgd",
        weight_decay=5e-4,
        warmup=0.0,
        epochs=20,
        batch_size=128,
        source="released code of SLCA on CIFAR-100, with a cosine for its step at epoch 18 of 20",
    )
    Settings = SlcaSettings
    steps = (
        Step("train"),
        Step("statistics", trains=False),
        Step("align", trains=False, measured=True, later=True),
    )
    carries = ("weights", "heads", "statistics")
    training_only = (f"{HEADS}/*/{MEANS}", f"{HEADS}/*/{FACTORS}")
    needs_states = True  # for the head of a base task
    scenarios = frozenset({"class"})
    freezes_backbone = False
    may_forget = True
    per_task = frozenset({"backbone_rate", "align_epochs", "align_draws", "align_lr", "tau"})

    @classmethod
    def steps_for(cls, settings: SlcaSettings, position: int) -> tuple[Step, ...]:
        """A base task has the step `statistics` alone."""
        return cls.steps if position >= 0 else cls.steps[1:2]

    @classmethod
    def ignored_settings(cls, step: str) -> frozenset[str]:
        used = {"train": {"backbone_rate"}, "statistics": set()}
        return frozenset(cls.Settings.model_fields) - used.get(step, cls.per_task)

    def __init__(self, backbone: nn.Module, settings: SlcaSettings, seed: int):
        super().__init__(backbone, settings, seed)
        self.trained: dict[str, dict[str, Tensor]] = {}  # task -> its head before any alignment
        self.gaussians: dict[str, ClassGaussians] = {}

    # ---- training --------------------------------------------------------------------------------
    def begin(self, context: StepContext) -> list[ParamGroup]:
        if context.carried is not None:
            self.load_carried(context.carried)
            for name, head in self.trained.items():
                self.heads.restore(name, head)
        super().begin(context)
        if context.step == "statistics":
            self.eval()
            batch = extract_features(self.features, context.data.feed("train"))
            num_classes = context.task.num_classes
            gaussians = fit_gaussians(batch.features, batch.labels, num_classes)
            self.gaussians[context.task.name] = gaussians
        elif context.step == "align":
            self.align()
        else:
            groups = weight_groups(self.backbone, context.optim)
            for group in groups:
                group["lr"] = context.optim.lr * self.settings.backbone_rate
            return self.head_groups(context.optim, [context.task.name]) + groups
        return []

    def classification_loss(self, features: Tensor, batch: Batch) -> Tensor:
        """Return the cross-entropy over the classes of the task."""
        return Method.classification_loss(self, features, batch)

    def competing_outputs(self) -> int:
        return Method.competing_outputs(self)

    def align(self) -> None:
        """Replace the heads of all tasks by aligned ones."""
        settings = self.settings
        plan = AlignmentPlan(
            settings.align_epochs,
            settings.align_draws,
            settings.align_draws,
            settings.align_lr,
            settings.tau,
            shrinks=True,
        )
        heads = {}
        for name in self.class_slices():  # in stream order, which rho depends on
            if name not in self.gaussians:
                raise UserError(
                    f"task {name!r}: the carried state lacks the Gaussians of its classes; run the "
                    "stream again in another storage"
                )
            heads[name] = (self.heads[name].weight, self.heads[name].bias)
        aligned = align_heads(heads, self.gaussians, plan, self.seed)
        for name, (weight, bias) in aligned.items():
            self.heads.restore(name, {"weight": weight, "bias": bias})

    def finish(self) -> tuple[TaskState, Carried]:
        assert self.task is not None
        # `statistics` and `align` are handed the trained head of the task
        self.trained.setdefault(self.task.name, self.heads.export(self.task.name))
        earlier = [name for name in self.trained if name != self.task.name]
        aligned = earlier if self.context.step == "align" else []
        tensors = {f"{BACKBONE}/{k}": t for k, t in collect_tensors(self.backbone).items()}
        for name, head in self.trained.items():
            # removing a task from a model folder deletes what is below heads/NAME/
            tensors |= {f"{HEADS}/{name}/{key}": tensor.clone() for key, tensor in head.items()}
        for name in aligned:
            for key, tensor in self.heads.export(name).items():
                tensors[f"{HEADS}/{name}/{ALIGNED}.{key}"] = tensor
        for name, gaussians in self.gaussians.items():
            tensors[f"{HEADS}/{name}/{MEANS}"] = gaussians.means.clone()
            tensors[f"{HEADS}/{name}/{FACTORS}"] = gaussians.factors.clone()
        return self.state(), Carried(tensors, {ALIGNED: aligned})

    # ---- serving ---------------------------------------------------------------------------------
    @torch.no_grad()
    def load_carried(self, carried: Carried) -> None:
        """Load the weights and the aligned heads of earlier tasks; `begin` uses the rest."""
        super().load_carried(carried)
        backbone: dict[str, Tensor] = {}
        parts: dict[str, dict[str, Tensor]] = {}  # task -> tensors by name
        for path, tensor in carried.tensors.items():
            owner, _, rest = path.partition("/")
            if owner == BACKBONE:
                backbone[rest] = tensor
            else:
                name, _, key = rest.rpartition("/")
                parts.setdefault(name, {})[key] = tensor
        self.backbone.load_state_dict(backbone)
        self.trained, self.gaussians = {}, {}
        for name, tensors in parts.items():
            if MEANS in tensors:
                means, factors = tensors.pop(MEANS).cpu(), tensors.pop(FACTORS).cpu()
                self.gaussians[name] = ClassGaussians(means, factors)
            self.trained[name] = {k: t for k, t in tensors.items() if not k.startswith(ALIGNED)}
        for name in carried.meta[ALIGNED]:
            keys = {f"{ALIGNED}.{key}": key for key in self.trained.get(name, {})}
            aligned = {key: parts[name][path] for path, key in keys.items() if path in parts[name]}
            if aligned:
                self.heads.restore(name, aligned)
            elif name in self.heads.names:
                raise UserError(
                    f"task {name!r}: the carried state lacks its aligned head; make the folder "
                    "again"
                )
