"""BiC: training with distillation, then a bias correction of the outputs of new classes.

The correction has two scalars, fitted on images that were held out of training.

Wu, Chen, Wang, Ye, Liu, Guo, Fu: Large Scale Incremental Learning, CVPR 2019.
"""

from __future__ import annotations

import math
from itertools import chain
from typing import Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor, nn

from workers.data.batch import Batch
from workers.errors import UserError
from workers.job import Task
from workers.methods.base import ParamGroup, Progress, Step, StepContext
from workers.methods.bases.rehearsal import Memory, Rehearsal, RehearsalSettings
from workers.methods.train_defaults import TrainDefaults
from workers.model.bias import apply_bias, fit_bias
from workers.model.distill import kd_ce
from workers.model.exemplars import quota
from workers.rng import derive_seed
from workers.storage.taskstate import Carried, TaskState

VALIDATION = "validation"
BIAS = "bias/"


class BicSettings(RehearsalSettings):
    """Settings of `bic`."""

    tau: PositiveFloat = Field(
        2.0,
        description="temperature of the softmax of student and teacher in the distillation loss",
    )
    val_share: float = Field(
        0.1,
        gt=0,
        le=0.5,
        description="share of the exemplars of each class that are not trained on; the bias "
        "correction is fitted on them",
    )
    beta_decay: NonNegativeFloat = Field(
        0.1, description="weight of the penalty beta^2 / 2 when the bias correction is fitted"
    )
    bias_mode: Literal["newest", "all"] = Field(
        "newest",
        description="which outputs are corrected: `newest`: those of the last task; `all`: "
        "those of every task, each by the correction fitted for it",
    )


class Bic(Rehearsal[BicSettings]):
    """L = (1 - a) CE over all classes + a KD_ce(tau) over old classes.

    a is the number of old classes divided by the number of all classes so far. KD_ce is the
    cross-entropy of teacher and student, with a softmax at temperature tau (`kd_ce`). Both terms
    use raw outputs z of the student. The teacher's outputs for the classes of the previous task are
    first corrected by that task's bias.

    `calibrate` then fits z' = alpha z + beta for the new classes, on held-out images of every
    class. It minimises class-balanced cross-entropy + beta_decay beta^2 / 2 in fp64 with the frozen
    network in evaluation mode. The served logits are z' for the last task and z for older tasks.
    `bias_mode: all` corrects each task by its bias, in student, teacher and served logits.

    Each class has n images in the memory. floor(val_share n) images, at least one, are held out:
    the bias is fitted on them, and they are never used for training. The held-out images of a new
    class are drawn before `train` by a hash of seed and key; a new class has as many as an old
    class. `herd` selects exemplars from the other images. `calibrate` and `herd` both follow
    `train` and run in parallel: `calibrate` carries the biases, `herd` the network and the memory.

    Differences from the paper: exemplars of old classes are not selected again, but their lists are
    shortened from the end; weight decay does not decrease from task to task; the held-out images of
    a base task were used to train the backbone.
    """

    name = "bic"
    has_constant_step = True
    family = "rehearsal"
    keeps = "two numbers"
    paper = "Large Scale Incremental Learning, CVPR 2019"
    train_defaults = TrainDefaults(
        lr=1e-4,
        scratch_lr=1e-3,
        source="measured on 25 classes of CIFAR-100 at 64 px: configs/RESULTS.md",
    )
    steps = (
        Step("train"),
        # later: skipped at the first task, which has no old classes; measured: then validated
        Step("calibrate", trains=False, measured=True, after=("train",), later=True),
        Step("herd", trains=False, after=("train",)),
    )
    distills = True
    Settings = BicSettings
    training_only = (*Rehearsal.training_only, VALIDATION)
    per_task = Rehearsal.per_task | {"tau", "val_share", "beta_decay"}
    later_settings = frozenset({"tau"})

    @classmethod
    def check_backbone(
        cls, settings: BicSettings, backbone: nn.Module, tasks: tuple[Task, ...] = ()
    ) -> None:
        super().check_backbone(settings, backbone, tasks)
        classes = sum(task.num_classes for task in tasks)
        if classes and quota(settings.memory, settings.per_class, classes) < 2:
            raise UserError(
                "bic keeps two exemplars of each class or more, one to train on and one to fit "
                f"the bias on, and the stream has {classes} classes; "
                f"give it memory {2 * classes} or more, or per_class 2 or more"
            )

    @classmethod
    def ignored_settings(cls, step: str) -> frozenset[str]:
        """Return no setting: `train` also depends on the memory settings.

        They determine how many images are held out.
        """
        return frozenset()

    def __init__(self, backbone: nn.Module, settings: BicSettings, seed: int):
        super().__init__(backbone, settings, seed)
        self.validation: Memory = {}
        # task -> (alpha, beta), fp64
        self.biases: dict[str, Tensor] = {}

    # ---- which images are trained on -------------------------------------------------------------
    def memory(self, context: StepContext) -> dict[str, list[str]]:
        """Return task -> keys: held-out images for `calibrate`, otherwise training images."""
        keys = context.data.keys(context.task)
        held_out = self.held_out(context.task, keys)
        if context.step == "calibrate":
            return self.find_validation_keys(context, held_out)
        training_keys = []
        for name, class_keys in keys.items():
            training_keys += [key for key in class_keys if key not in held_out[name]]
        return super().memory(context) | {context.task.name: training_keys}

    def find_validation_keys(
        self, context: StepContext, held_out: dict[str, list[str]]
    ) -> dict[str, list[str]]:
        """Return the keys of each task's held-out images; `held_out` is for the current task."""
        validation: Memory = {}
        if context.carried is not None:
            validation = context.carried.meta[VALIDATION]
        by_task = {}
        for name, classes in (validation | {context.task.name: held_out}).items():
            by_task[name] = list(chain.from_iterable(classes.values()))
        return by_task

    def held_out(self, task: Task, keys: dict[str, list[str]]) -> dict[str, list[str]]:
        """Return class -> keys of the images that are held out of training to fit the bias.

        A new class has as many held-out images as an old class has during this task, while only
        old classes share the memory (in the first task: the classes of the task). At least one
        image of a class is left for training.

        Args:
            task: The task.
            keys: Class -> keys of all images of the task.
        """
        num_old_classes = sum(t.num_classes for t in self.stream[: self.stream.index(task)])
        max_exemplars = super().share(num_old_classes or task.num_classes)
        held_out = {}
        for name, class_keys in keys.items():
            num_exemplars = min(max_exemplars, len(class_keys))
            count = min(self.num_held_out(num_exemplars), len(class_keys) - 1)
            shuffled = sorted(class_keys, key=lambda key: derive_seed(self.seed, "validation", key))
            held_out[name] = shuffled[:count]
        return held_out

    def num_held_out(self, exemplars: int) -> int:
        """Return how many of the `exemplars` of a class are held out to fit the bias."""
        # 1e-9, because the product can be slightly below a whole number
        return max(1, math.floor(self.settings.val_share * exemplars + 1e-9))

    def share(self, classes: int) -> int:
        """Return the number of exemplars of each class to train on, without held-out images."""
        num_exemplars = super().share(classes)
        return num_exemplars - self.num_held_out(num_exemplars)

    # ---- training --------------------------------------------------------------------------------
    def begin(self, context: StepContext) -> list[ParamGroup]:
        groups = super().begin(context)
        if context.step == "calibrate":
            self.calibrate(context.task)
        return groups

    def loss(self, batch: Batch, progress: Progress) -> tuple[Tensor, dict[str, Tensor]]:
        features = self.features(batch.images)
        ce = self.classification_loss(features, batch)
        if self.teacher is None:
            return ce, {"ce": ce.detach()}
        teacher_logits = self.corrected(self.teacher.joined(batch.images), self.old)
        student_logits = self.all_logits(features)[:, : teacher_logits.shape[1]]
        kd = kd_ce(student_logits, teacher_logits, self.settings.tau)
        a = self.old_share
        return (1 - a) * ce + a * kd, {"ce": ce.detach(), "kd": kd.detach()}

    @torch.no_grad()
    def calibrate(self, task: Task) -> None:
        """Fit the task's bias on all held-out images. The result is the same on every rank."""
        features, labels, tasks, _ = self.extract_features()
        slices = self.class_slices()
        starts = torch.tensor([slices[t.name].start for t in self.training_tasks])
        logits = self.all_logits(features.to(self.heads[task.name].weight.device)).cpu()
        self.biases[task.name] = fit_bias(
            logits, labels + starts[tasks], slices[task.name], self.settings.beta_decay
        )

    def herd(self, task: Task, sharers: int = 0) -> None:
        """Select exemplars, add the task's held-out images, and shorten all held-out lists.

        Args:
            task: The task.
            sharers: See `Rehearsal.herd`.
        """
        super().herd(task, sharers)
        num_classes = max(task_slice.stop for task_slice in self.class_slices().values())
        count = self.num_held_out(super().share(sharers or num_classes))
        held_out = self.held_out(task, self.context.data.keys(task))
        shortened: Memory = {}
        for name, classes in (self.validation | {task.name: held_out}).items():
            shortened[name] = {c: keys[:count] for c, keys in classes.items()}
        self.validation = shortened

    def metrics(self) -> dict[str, float]:
        """Return alpha and beta; alpha < 1 shrinks and beta < 0 lowers outputs of new classes."""
        if self.task is None or self.task.name not in self.biases:
            return {}
        alpha, beta = self.biases[self.task.name].tolist()
        return {"alpha": alpha, "beta": beta}

    def finish(self) -> tuple[TaskState, Carried]:
        biases = {f"{BIAS}{name}": bias.clone() for name, bias in self.biases.items()}
        if self.step == "calibrate":
            return self.state(), Carried(biases)
        state, carried = super().finish()
        if self.step == "train":
            carried.tensors |= biases
        if self.validation:
            carried.meta[VALIDATION] = self.validation
        return state, carried

    # ---- serving ---------------------------------------------------------------------------------
    def corrected(self, logits: Tensor, names: list[str]) -> Tensor:
        """Return logits with the outputs of the last task corrected by the task's bias.

        With `bias_mode: all`, the outputs of each task are corrected by its bias. Outputs of a task
        without calibration are not corrected.

        Args:
            logits: Outputs (b, classes) for the classes of the tasks `names`, in order.
            names: Names of the tasks.
        """
        slices = self.class_slices()
        corrected_names = names if self.settings.bias_mode == "all" else names[-1:]
        for name in corrected_names:
            if name in self.biases:
                bias = self.biases[name].to(logits.device, torch.float32)
                logits = apply_bias(logits.float(), slices[name], bias)
        return logits

    def all_logits(self, features: Tensor) -> Tensor:
        return self.corrected(super().all_logits(features), list(self.class_slices()))

    def load_carried(self, carried: Carried) -> None:
        biases = {}
        network = {}
        for name, tensor in carried.tensors.items():
            if name.startswith(BIAS):
                biases[name.removeprefix(BIAS)] = tensor
            else:
                network[name] = tensor
        super().load_carried(Carried(network, carried.meta))
        self.biases = biases
        self.validation = carried.meta.get(VALIDATION, {})
