"""FOSTER: a second extractor corrects the first one, then one network is distilled from both.

Wang, Zhou, Ye, Zhan: FOSTER: Feature Boosting and Compression for Class-Incremental Learning, ECCV
2022.
"""

from __future__ import annotations

import copy

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor, nn
from torch.nn import functional as F

from workers.data.batch import Batch
from workers.methods.base import ParamGroup, Progress, Step, StepContext
from workers.methods.bases.rehearsal import Rehearsal, RehearsalSettings
from workers.methods.finetune import collect_tensors, weight_groups
from workers.methods.train_defaults import TrainDefaults
from workers.model.distill import kd_ce
from workers.storage.taskstate import Carried, TaskState

BOOSTED = "boosted/"  # prefix of tensors that `train` carries to `compress`
# Step -> the settings in this table that the step uses. The key of the step's stage does not
# contain the other settings of the table.
SETTINGS_OF_STEP = {
    "train": {"beta", "distillation", "tau"},
    "compress": {"compress_beta", "tau"},
    "herd": {"memory", "per_class", "selection"},
}


class FosterSettings(RehearsalSettings):
    """Settings of `foster`."""

    beta: float = Field(
        0.96,
        ge=0,
        lt=1,
        description="step `train` divides the logits by the weight of their class, (1 - beta) / "
        "(1 - beta^n) for n images, scaled to the mean 1; 0: all weights are 1",
    )
    compress_beta: float = Field(
        0.97,
        ge=0,
        lt=1,
        description="the same in step `compress`, which multiplies the teacher's probabilities "
        "by these weights",
    )
    distillation: NonNegativeFloat = Field(
        1.0, description="weight of the distillation from the old network in step `train`"
    )
    tau: PositiveFloat = Field(
        2.0, description="temperature of the softmax of student and teacher in both steps"
    )


class Boosted(nn.Module):
    """The frozen old extractor, and a classifier over the features of the old and the new one.

    Attributes:
        old: Copy of the method's extractor, as it was before the task. It stays in evaluation mode.
        joint: Classifier of the 2 D features (old, then new) over all classes so far.
        new: In step `compress`, the extractor that `train` trained. None in `train`, which trains
            the method's own extractor.
    """

    def __init__(self, backbone: nn.Module, width: int, classes: int):
        super().__init__()
        self.old = copy.deepcopy(backbone)
        self.joint = _create_classifier(2 * width, classes)
        self.new: nn.Module | None = None

    def train(self, mode: bool = True) -> Boosted:
        super().train(mode)
        self.old.eval()
        return self


class Foster(Rehearsal[FosterSettings]):
    """From the second task on, `train` adds an extractor, and `compress` distills both into one.

    `train`: the extractor F' starts as the old F, which is frozen. A classifier W over [F, F'] is
    created; its entries from F to old classes start as the old head. With z = W [F(x), F'(x)], n_c
    images of class c and w_c = (1 - beta) / (1 - beta^n_c), scaled to the mean 1,

        L = CE(z / w, y) + CE(branch(F'(x)), y) + distillation KD_ce(tau)(z_old, head(F(x)))

    z_old are the entries of z for old classes, head is the old head, and KD_ce is `distill.kd_ce`.
    `branch` is a head over F' that is discarded after the step.

    `compress`: a student starts as F with its head, and learns KD_ce(tau) from z. The teacher's
    probabilities are multiplied by w, with `compress_beta`, and normalised. The student is served,
    and is the next task's F, so the size of the network stays constant. The first task is trained
    with the cross-entropy alone, and has no step `compress`.

    Differences from the released code: the classifier's new entries start with a standard deviation
    of 0.02, as all heads here; exemplars are chosen by the features of the student, in the code by
    those of both extractors; weights are never aligned (an option of the code, which its configs do
    not use).
    """

    name = "foster"
    has_constant_step = True
    family = "expansion"
    keeps = "a head"
    paper = "FOSTER: Feature Boosting and Compression for Class-Incremental Learning, ECCV 2022"
    train_defaults = TrainDefaults(
        lr=1e-4,
        scratch_lr=1e-3,
        source="the rates of the other rehearsal methods; not measured for this one",
    )
    steps = (Step("train"), Step("compress", later=True), Step("herd", trains=False))
    Settings = FosterSettings
    per_task = Rehearsal.per_task | {"beta", "compress_beta", "distillation", "tau"}
    later_settings = frozenset({"beta", "distillation", "tau"})
    class_weights: Tensor
    step = ""

    @classmethod
    def ignored_settings(cls, step: str) -> frozenset[str]:
        if step not in SETTINGS_OF_STEP:
            return frozenset()
        return frozenset().union(*SETTINGS_OF_STEP.values()) - SETTINGS_OF_STEP[step]

    def __init__(self, backbone: nn.Module, settings: FosterSettings, seed: int):
        super().__init__(backbone, settings, seed)
        self.boosted: Boosted | None = None
        self.branch: nn.Linear | None = None
        self.carried_teacher: dict[str, Tensor] = {}

    # ---- training --------------------------------------------------------------------------------
    def begin(self, context: StepContext) -> list[ParamGroup]:
        groups = super().begin(context)
        if context.step == "herd" or not self.old:
            return groups
        boosted = Boosted(self.backbone, self.heads.width, self.num_classes)
        self.boosted = boosted
        beta = self.settings.beta if context.step == "train" else self.settings.compress_beta
        weights = weigh_classes(self.count_images(), beta)
        self.register_buffer("class_weights", weights, persistent=False)
        if context.step == "compress":
            boosted.new = copy.deepcopy(self.backbone)
            teacher = {f"old.{name}": t for name, t in boosted.old.state_dict().items()}
            boosted.load_state_dict(teacher | self.carried_teacher)
            return groups
        self.start_joint(boosted.joint)
        self.branch = _create_classifier(self.heads.width, self.num_classes)
        layers = (boosted.joint, self.branch)
        return [
            {
                "name": "head.weight",
                "params": [layer.weight for layer in layers],
                "weight_decay": context.optim.weight_decay,
            },
            {
                "name": "head.bias",
                "params": [layer.bias for layer in layers],
                "weight_decay": 0.0,
            },
            *weight_groups(self.backbone, context.optim),
        ]

    @torch.no_grad()
    def start_joint(self, joint: nn.Linear) -> None:
        """Copy the old heads into the rows of old classes and the columns of the old extractor."""
        slices = self.class_slices()
        for name in self.old:
            head = self.heads[name]
            joint.weight[slices[name], : self.heads.width] = head.weight
            joint.bias[slices[name]] = head.bias

    def count_images(self) -> list[int]:
        """Return the number of training images of each class, in the order of `class_slices`."""
        assert self.task is not None
        keys = self.exemplars | {self.task.name: self.context.data.keys(self.task)}
        return [len(keys[task.name][label]) for task in self.stream for label in task.classes]

    @property
    def boosts(self) -> bool:
        """Return whether logits use both extractors: in `train`, except at the first task."""
        return self.step == "train" and self.boosted is not None

    def features(self, images: Tensor) -> Tensor:
        """Return features (b, D) of images (b, 3, H, W); if `boosts`, (b, 2 D): old, then new."""
        if not self.boosts:
            return super().features(images)
        assert self.boosted is not None
        with torch.no_grad():
            old = self.boosted.old(images)
        return torch.cat([old, super().features(images)], 1)

    def all_logits(self, features: Tensor) -> Tensor:
        if self.boosts:
            assert self.boosted is not None
            logits: Tensor = self.boosted.joint(features)
            return logits
        return super().all_logits(features)

    def logits(self, images: Tensor, task: str | None) -> Tensor:
        if task is not None and self.boosts:
            return self.all_logits(self.features(images))[:, self.class_slices()[task]]
        return super().logits(images, task)

    @torch.no_grad()
    def teach(self, images: Tensor) -> Tensor:
        """Return logits (b, classes so far) of images by the network that `train` trained."""
        assert self.boosted is not None
        assert self.boosted.new is not None
        features = torch.cat([self.boosted.old(images), self.boosted.new(images)], 1)
        logits: Tensor = self.boosted.joint(features)
        return logits

    def loss(self, batch: Batch, progress: Progress) -> tuple[Tensor, dict[str, Tensor]]:
        if self.boosted is None:
            return super().loss(batch, progress)
        if self.step == "compress":
            student = self.all_logits(self.features(batch.images))
            teacher = self.teach(batch.images)
            kd = kd_ce(student, teacher, self.settings.tau, self.class_weights)
            return kd, {"kd": kd.detach()}
        assert self.branch is not None
        features = self.features(batch.images)
        z = self.all_logits(features).float()
        targets = self.global_labels(batch) if batch.targets is None else self.global_targets(batch)
        old, new = features.split(self.heads.width, 1)
        with torch.no_grad():
            taught = torch.cat([self.heads[name](old) for name in self.old], 1)
        ce = F.cross_entropy(z / self.class_weights, targets)
        branch = F.cross_entropy(self.branch(new).float(), targets)
        kd = kd_ce(z[:, : taught.shape[1]], taught, self.settings.tau)
        loss = ce + branch + self.settings.distillation * kd
        return loss, {"ce": ce.detach(), "branch": branch.detach(), "kd": kd.detach()}

    def train(self, mode: bool = True) -> Foster:
        super().train(mode)
        if self.boosted is not None and self.step == "compress":
            self.boosted.eval()
        return self

    # ---- state -----------------------------------------------------------------------------------
    def finish(self) -> tuple[TaskState, Carried]:
        state, carried = super().finish()
        if self.boosts:
            # The teacher of `compress` needs both extractors. The carried backbone is the old one,
            # from which the student of `compress` starts.
            assert self.boosted is not None
            for name, tensor in collect_tensors(self.backbone).items():
                carried.tensors[f"{BOOSTED}new.{name}"] = tensor
            for name, tensor in collect_tensors(self.boosted).items():
                kind, _, rest = name.partition(".")
                carried.tensors[f"backbone/{rest}" if kind == "old" else BOOSTED + name] = tensor
        return state, carried

    def load_carried(self, carried: Carried) -> None:
        network = {}
        self.carried_teacher = {}
        for name, tensor in carried.tensors.items():
            if name.startswith(BOOSTED):
                self.carried_teacher[name.removeprefix(BOOSTED)] = tensor
            else:
                network[name] = tensor
        super().load_carried(Carried(network, carried.meta))


def _create_classifier(width: int, classes: int) -> nn.Linear:
    layer = nn.Linear(width, classes)
    nn.init.trunc_normal_(layer.weight, std=0.02)
    nn.init.zeros_(layer.bias)
    return layer


def weigh_classes(counts: list[int], beta: float) -> Tensor:
    """Return the weights of classes by their effective number of images, with the mean 1.

    w_c = (1 - beta) / (1 - beta^n_c), from Cui et al.: Class-Balanced Loss Based on Effective
    Number of Samples, CVPR 2019.

    Args:
        counts: n_c, the number of images of each class; 0 counts as 1.
        beta: 0 for equal weights; the closer to 1, the more weight rare classes have.
    """
    number = torch.tensor(counts, dtype=torch.float64).clamp(min=1)
    weights = (1 - beta) / (1 - beta**number)
    return (weights * len(counts) / weights.sum()).float()
