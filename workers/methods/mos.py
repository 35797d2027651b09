"""MOS: adapters that start from the previous task's, and a search for those that fit an image.

Sun, Zhou, Zhao, Gan, Zhan, Ye: MOS: Model Surgery for Pre-Trained Model-Based Class-Incremental
Learning, AAAI 2025.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from workers.data.batch import Batch
from workers.data.features import extract_features
from workers.errors import UserError
from workers.job import ActiveIf
from workers.methods.base import OptimPlan, ParamGroup, Progress, Step, StepContext
from workers.methods.bases.alignment import ALIGN, AlignmentPlan, AlignsHeads
from workers.methods.bases.statistics import class_means
from workers.methods.bases.task_adapters import (
    ADAPTERS,
    TRAIN,
    TaskAdapters,
    TaskAdapterSettings,
)
from workers.methods.train_defaults import TrainDefaults
from workers.storage.taskstate import Carried, TaskState

# Names in the stored state.
FIRST, PROTOTYPES = "first", "prototypes"
HEAD_RATE = 0.1  # learning rate of a head, relative to the adapters'
TEMPERATURE = 0.8  # of the contrast loss
ROUNDS = 4  # maximum number of tasks whose adapters are tried for an image


class MosSettings(TaskAdapterSettings):
    """Settings of `mos`."""

    width: PositiveInt = Field(16, description="m, number of hidden units of an adapter")
    merge: float = Field(
        0.1,
        ge=0,
        le=1,
        description="share of the mean of earlier tasks' adapters that the adapters in training "
        "take in after each step",
    )
    contrast: NonNegativeFloat = Field(
        0.1,
        description="weight of the loss that separates features from the means of earlier classes",
    )
    align_epochs: NonNegativeInt = Field(
        30, description="epochs of the alignment; 0: heads stay as they were trained"
    )
    align_draws: Annotated[PositiveInt, ActiveIf("align_epochs", but=(0,))] = Field(
        240,
        description="features drawn of each class in an epoch of the alignment, and in its "
        "batches; five times the batch size in the released code",
    )
    align_lr: Annotated[PositiveFloat, ActiveIf("align_epochs", but=(0,))] = Field(
        0.005, description="initial learning rate of the alignment (SGD)"
    )


class Mos(TaskAdapters[MosSettings], AlignsHeads[MosSettings]):
    """A chain of two steps: `train`, `align`. f_j is the backbone with the adapters of task j.

    - `train` trains the task's head and its adapters theta, which start as a copy of the previous
      task's. After each optimizer step theta <- (1 - merge) theta + merge mean(theta of earlier
      tasks). The loss is the cross-entropy over the task's own classes + contrast *
      `compute_mean_contrast`.
    - `align` fits a Gaussian of f_t, and computes the mean of f_0, for each class of the task. From
      the second task on, all heads are trained on features drawn from the Gaussians
      (`align_heads`).

    The first guess for an image is the task of the class whose mean of f_0 is nearest to the
    image's f_0, by cosine. With f_j of that task, all heads predict a class. If this class belongs
    to another task, the adapters of that task are tried next, at most four sets of adapters in
    total. The result is the mean of two softmaxes: of the last logits, and of the cosines times the
    number of tasks.

    While a task trains, validation uses only the adapters of this task. Stored per task: adapters,
    class means, and an aligned head. An image costs one forward pass if the task is given, else one
    to five.

    Differences from the released code: the code merges the adapters again in every block of each
    forward pass, also at test time, which changes the stored adapters; the code also contrasts the
    images of a batch with each other, so that the loss depends on which images share a batch. Here
    an alignment starts from the heads as they were trained, in the code from the previously aligned
    heads.
    """

    name = "mos"
    has_constant_step = True
    keeps = "adapters, class means, head"
    paper = "MOS: Model Surgery for Pre-Trained Model-Based Class-Incremental Learning, AAAI 2025"
    Settings = MosSettings
    train_defaults = TrainDefaults(
        lr=0.03,
        optimizer="sgd",
        weight_decay=5e-4,
        warmup=0.0,
        floor=0.0,
        epochs=20,
        batch_size=48,
        source="released code of MOS on CIFAR-100",
    )
    penalty_terms: ClassVar[Mapping[str, str]] = {"contrast": "contrast"}
    steps = (Step(TRAIN), Step(ALIGN, trains=False, measured=True))
    carries = AlignsHeads.carries
    scenarios = frozenset({"class", "domain"})
    per_task = frozenset(MosSettings.model_fields.keys() - {"width"})

    @classmethod
    def ignored_settings(cls, step: str) -> frozenset[str]:
        aligning = {"align_epochs", "align_draws", "align_lr"}
        return frozenset(aligning if step == TRAIN else cls.per_task - aligning)

    def __init__(self, backbone: nn.Module, settings: MosSettings, seed: int):
        super().__init__(backbone, settings, seed)
        self.prototypes: dict[str, Tensor] = {}  # task -> means of f_0 by class, (K, d)
        self.firsts: dict[str, str] = {}  # task -> the first task, whose adapters f_0 has
        self.merged: dict[str, Tensor] = {}  # mean of earlier tasks' adapters, by name
        self.known = torch.empty(0)  # means of earlier classes for the contrast loss, (P, d)

    # ---- training --------------------------------------------------------------------------------
    def begin(self, context: StepContext) -> list[ParamGroup]:
        self.prototypes.pop(context.task.name, None)
        groups = super().begin(context)
        if self.is_learning:
            self.continue_adapters()
            return groups
        self.firsts[context.task.name] = next(iter(self.loaded))
        self.read_statistics(context)
        if len(self.loaded) > 1:
            settings = self.settings
            draws, epochs, lr = settings.align_draws, settings.align_epochs, settings.align_lr
            self.align(AlignmentPlan(epochs, draws, draws, lr))
        return []

    def head_groups(self, optim: OptimPlan, names: list[str]) -> list[ParamGroup]:
        groups = super().head_groups(optim, names)
        for group in groups:
            group["lr"] = HEAD_RATE * optim.lr
        return groups

    @torch.no_grad()
    def continue_adapters(self) -> None:
        """Start from the previous task's adapters; set `merged` and `known` from earlier tasks."""
        earlier = [self.find_adapters(name) for name in self.loaded]
        self.merged = {}
        for name, tensor in self.adapters.tensors().items() if earlier else ():
            tensor.copy_(earlier[-1][name])
            self.merged[name] = torch.stack([tensors[name] for tensors in earlier]).mean(0)
        means = [self.gaussians[name].means for name in self.loaded if name in self.gaussians]
        self.known = torch.cat([torch.empty(0, self.heads.width), *means]).to(self.device)

    def loss(self, batch: Batch, progress: Progress) -> tuple[Tensor, dict[str, Tensor]]:
        self.active_task = None
        self.weight_overrides = self.training_weights(batch, progress)
        features = self.features(batch.images)
        ce = self.classification_loss(features, batch)
        if not len(self.known) or not self.settings.contrast:
            return ce, {"ce": ce.detach()}
        contrast = self.settings.contrast * compute_mean_contrast(features.float(), self.known)
        return ce + contrast, {"ce": ce.detach(), "contrast": contrast.detach()}

    @torch.no_grad()
    def after_step(self, progress: Progress) -> None:
        for name, mean in self.merged.items():
            self.adapters.tensors()[name].lerp_(mean, self.settings.merge)

    def read_statistics(self, context: StepContext) -> None:
        """Compute the Gaussians of the task's classes under f_t, and their means under f_0."""
        name = context.task.name
        self.activate_task(name)
        self.fit_classes(context)
        self.activate_task(self.firsts[name])
        batch = extract_features(self.features, context.data.feed("train"))
        means = class_means(batch.features, batch.labels, context.task.num_classes)
        self.prototypes[name] = means.float().to(self.device)

    def finish(self) -> tuple[TaskState, Carried]:
        assert self.task is not None
        carried, tensors = self.carry_heads(), self.export_adapters()
        if self.is_learning:
            carried.tensors.update({f"{ADAPTERS}/{key}": t for key, t in tensors.items()})
            return self.state(), carried
        tensors[PROTOTYPES] = self.prototypes[self.task.name].clone()
        return self.state(copies=tensors, meta={FIRST: self.firsts[self.task.name]}), carried

    # ---- serving ---------------------------------------------------------------------------------
    def load_task(self, state: TaskState) -> None:
        super().load_task(state)
        prototypes, first = state.copies.get(PROTOTYPES), state.meta.get(FIRST)
        shape = None if prototypes is None else tuple(prototypes.shape)
        if prototypes is None or shape != (len(state.classes), self.heads.width) or not first:
            raise UserError(
                f"task {state.task!r}: its state has class means of shape {shape} for "
                f"{len(state.classes)} classes and features of width {self.heads.width}; export it "
                "again, or write a new model folder with `accrete bundle`"
            )
        self.prototypes[state.task] = prototypes
        self.firsts[state.task] = first

    def serving_weights(self, task: str) -> dict[str, Tensor]:
        return self.find_adapters(task)

    def features(self, images: Tensor) -> Tensor:
        """Return features (b, d) of images (b, 3, H, W) with the adapters in `weight_overrides`."""
        return self.adapted(images, self.weight_overrides)

    def logits(self, images: Tensor, task: str | None) -> Tensor:
        own = self.task.name if self.task is not None and self.is_learning else None
        if task is not None:
            return super().logits(images, task)
        if own is not None:
            self.activate_task(own)
            return self.all_logits(self.features(images))
        names = list(self.class_slices())
        first = names[0]
        self.check_first(names)
        self.activate_task(first)
        features = self.features(images)
        prototypes = torch.cat([self.prototypes[name].to(self.device) for name in names])
        cosines = F.normalize(features.float()) @ F.normalize(prototypes).T
        logits = self.refine(images, cosines, {first: features})
        scores = len(names) * cosines
        both = torch.stack([logits.float().log_softmax(1), scores.log_softmax(1)])
        return both.logsumexp(0) - math.log(2)

    def check_first(self, names: list[str]) -> None:
        """Raise `UserError` if the class means are not those of the first task's adapters."""
        for name in names:
            if self.firsts[name] != names[0]:
                raise UserError(
                    f"task {name!r}: its class means need the adapters of task "
                    f"{self.firsts[name]!r}, and the first task here is {names[0]!r}; load the "
                    "tasks of one run, all of them up to the last"
                )

    def refine(self, images: Tensor, cosines: Tensor, known: dict[str, Tensor]) -> Tensor:
        """Return logits (b, A) of all heads; for each image, search the adapters that fit.

        If the logits predict a class of another task than that of the adapters in use, the adapters
        of that task are tried next, up to `ROUNDS` sets. The last logits count.

        Args:
            images: Images (b, 3, H, W).
            cosines: Scores of all classes, (b, A). The best class decides which adapters are tried
                first.
            known: Features (b, d) of the images with the adapters of a task, by task.
        """
        slices = self.class_slices()
        sizes = torch.tensor([columns.stop - columns.start for columns in slices.values()])
        owners = torch.arange(len(slices)).repeat_interleave(sizes).to(images.device)
        logits = torch.empty_like(cosines)
        choices = owners[cosines.argmax(1)]
        is_pending = torch.ones_like(choices, dtype=torch.bool)
        for _ in range(ROUNDS):
            for index, name in enumerate(slices):
                rows = ((choices == index) & is_pending).nonzero().squeeze(1)
                if not len(rows):
                    continue
                if name in known:
                    features = known[name][rows]
                else:
                    self.activate_task(name)
                    features = self.features(images[rows])
                logits[rows] = self.all_logits(features).to(logits.dtype)
            named = owners[logits.argmax(1)]
            is_pending &= named != choices
            choices = torch.where(is_pending, named, choices)
        return logits

    def flops_share(self, state: TaskState) -> float:
        """Return the relative FLOPs of f_0 and, for later tasks, of the task's own pass."""
        passes = 1 if state.meta.get(FIRST, state.task) == state.task else 2
        return passes * self.compute_relative_flops()


def compute_mean_contrast(features: Tensor, means: Tensor) -> Tensor:
    """Return the contrast of each image with the means of earlier classes, a mean over images.

    For one image, M has the means and its features as rows. The contrast is the cross-entropy of
    M M^T / 0.8 against the identity, a mean over rows.

    Args:
        features: Features of images, (b, d).
        means: Class means, (P, d).
    """
    known = means @ means.T / TEMPERATURE  # (P, P)
    cross = features @ means.T / TEMPERATURE  # (b, P)
    own = features.square().sum(1, keepdim=True) / TEMPERATURE  # (b, 1)
    of_means = torch.logaddexp(known.logsumexp(1), cross) - known.diagonal()  # (b, P)
    of_images = torch.cat([cross, own], 1).logsumexp(1, keepdim=True) - own  # (b, 1)
    return torch.cat([of_means, of_images], 1).mean()
