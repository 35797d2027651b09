"""BiC: after training with distillation, two scalars on the outputs of new classes are fitted on
images that were held out for it.

Wu, Chen, Wang, Ye, Liu, Guo, Fu: Large Scale Incremental Learning, CVPR 2019.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor, nn

from workers.data.batch import Batch
from workers.errors import UserError
from workers.job import Task
from workers.methods.base import ParamGroup, Progress, Step, StepContext
from workers.methods.bases.rehearsal import Memory, Rehearsal, RehearsalSettings
from workers.model.bias import apply_bias, fit_bias
from workers.model.distill import kd_ce
from workers.model.exemplars import quota
from workers.rng import derive_seed
from workers.storage.taskstate import Carried, TaskState

VALIDATION, BIAS = "validation", "bias/"


class BicSettings(RehearsalSettings):
    tau: PositiveFloat = Field(
        2.0, description="temperature of both softmaxes in the distillation loss"
    )
    val_share: float = Field(
        0.1,
        gt=0,
        le=0.5,
        description="share of a class's exemplars that are never trained on and fit the bias",
    )
    beta_decay: NonNegativeFloat = Field(
        0.1, description="weight of beta^2 / 2 beside the cross-entropy that fits the bias"
    )
    bias_mode: Literal["newest", "all"] = Field(
        "newest",
        description="whose outputs are corrected: of the last task, or of every task by its own "
        "bias",
    )


class Bic(Rehearsal[BicSettings]):
    """L = (1 - a) CE over all classes + a KD_ce(tau) over the old ones, a = O_t / A_t, on raw
    outputs z; the teacher's for the classes of the task before are corrected first by that task's
    bias. Then `calibrate` fits z' = alpha z + beta for the new classes alone, on held-out images of
    every class: cross-entropy + beta_decay beta^2 / 2 of outputs in evaluation mode, which stand
    still, in fp64. It answers with z' for the last task and z for older ones. `bias_mode: all`
    corrects every task's classes by its own bias, in student, teacher and answers.

    Of each class's share of the memory floor(val_share share) images, at least one, fit the bias
    and are never trained on. Those of new classes, as many as old ones have left, are drawn before
    `train` by a hash of seed and key; `herd` chooses from the others. `calibrate` and `herd` both
    need `train` alone, and stand side by side: the one hands on biases, the other the network and
    the memory.

    Where it differs from the paper: old lists are shortened and not chosen anew; weight decay does
    not fall from task to task; a base task was trained on all its images before any could be held
    out.
    """

    name = "bic"
    paper = "Large Scale Incremental Learning, CVPR 2019"
    steps = (
        Step("train"),
        Step("calibrate", trains=False, measured=True, after=("train",), later=True),
        Step("herd", trains=False, after=("train",)),
    )
    distills = True
    Settings = BicSettings
    per_task = Rehearsal.per_task | {"tau", "val_share", "beta_decay"}

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
        """None: how many are held out of training follows from the memory."""
        return frozenset()

    def __init__(self, backbone: nn.Module, settings: BicSettings, seed: int):
        super().__init__(backbone, settings, seed)
        self.validation: Memory = {}
        self.biases: dict[str, Tensor] = {}  # task -> (alpha, beta), fp64

    # ---- who is trained on what ------------------------------------------------------------------
    def memory(self, context: StepContext) -> dict[str, list[str]]:
        """To `calibrate` what was held out of every class; else all but that."""
        keys = context.data.keys(context.task)
        held = self.held_out(context.task, keys)
        if context.step == "calibrate":
            kept: Memory = context.carried.meta[VALIDATION] if context.carried is not None else {}
            return {
                name: [key for keys in classes.values() for key in keys]
                for name, classes in (kept | {context.task.name: held}).items()
            }
        return super().memory(context) | {
            context.task.name: [key for name in keys for key in keys[name] if key not in held[name]]
        }

    def held_out(self, task: Task, keys: dict[str, list[str]]) -> dict[str, list[str]]:
        """Class -> keys that only fit the bias, as many as old classes have by then (under the
        first task: as it keeps itself)."""
        old = sum(t.num_classes for t in self.stream[: self.stream.index(task)])
        most = super().share(old or task.num_classes)
        counts = {
            name: min(self.reserved(min(most, len(own))), len(own) - 1)
            for name, own in keys.items()
        }
        return {
            name: sorted(own, key=lambda key: derive_seed(self.seed, "validation", key))[
                : counts[name]
            ]
            for name, own in keys.items()
        }

    def reserved(self, share: int) -> int:
        """How many of so many exemplars of a class fit the bias."""
        return max(1, math.floor(self.settings.val_share * share + 1e-9))

    def share(self, classes: int) -> int:
        whole = super().share(classes)
        return whole - self.reserved(whole)

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
        taught, a = self.corrected(self.teacher.joined(batch.images), self.old), self.old_share
        kd = kd_ce(self.all_logits(features)[:, : taught.shape[1]], taught, self.settings.tau)
        return (1 - a) * ce + a * kd, {"ce": ce.detach(), "kd": kd.detach()}

    @torch.no_grad()
    def calibrate(self, task: Task) -> None:
        """Every rank looks at its share of the images, all fit the bias on all."""
        features, labels, tasks, _ = self.extract_features()
        columns = self.class_slices()
        first = torch.tensor([columns[t.name].start for t in self.training_tasks])
        logits = self.all_logits(features.to(self.heads[task.name].weight.device)).cpu()
        self.biases[task.name] = fit_bias(
            logits, labels + first[tasks], columns[task.name], self.settings.beta_decay
        )

    def herd(self, task: Task, sharers: int = 0) -> None:
        super().herd(task, sharers)
        count = self.reserved(
            super().share(sharers or max(own.stop for own in self.class_slices().values()))
        )
        held = self.validation | {task.name: self.held_out(task, self.context.data.keys(task))}
        self.validation = {
            name: {c: keys[:count] for c, keys in classes.items()} for name, classes in held.items()
        }

    def metrics(self) -> dict[str, float]:
        """alpha, beta: below 1 and 0, outputs of the new classes had grown above those of old
        ones."""
        found = (
            self.biases[self.task.name].tolist()
            if self.task is not None and self.task.name in self.biases
            else ()
        )
        return dict(zip(("alpha", "beta"), found, strict=False))

    def finish(self) -> tuple[TaskState, Carried]:
        biases = {f"{BIAS}{name}": bias.clone() for name, bias in self.biases.items()}
        if self.step == "calibrate":
            return self.state(), Carried(biases)
        state, carried = super().finish()
        carried.tensors |= biases if self.step == "train" else {}
        carried.meta |= {VALIDATION: self.validation} if self.validation else {}
        return state, carried

    # ---- answers ---------------------------------------------------------------------------------
    def corrected(self, logits: Tensor, names: list[str]) -> Tensor:
        """Logits (b, classes) of so many tasks in order, with the biases that are in effect: that
        of the last task, or of all. A task that is in training has none yet."""
        columns = self.class_slices()
        for name in names if self.settings.bias_mode == "all" else names[-1:]:
            if name in self.biases:
                logits = apply_bias(
                    logits.float(),
                    columns[name],
                    self.biases[name].to(logits.device, torch.float32),
                )
        return logits

    def all_logits(self, features: Tensor) -> Tensor:
        return self.corrected(super().all_logits(features), [*self.class_slices()])

    def load_carried(self, carried: Carried) -> None:
        tensors = {name: t for name, t in carried.tensors.items() if not name.startswith(BIAS)}
        super().load_carried(Carried(tensors, carried.meta))
        self.biases = {
            name.removeprefix(BIAS): t
            for name, t in carried.tensors.items()
            if name.startswith(BIAS)
        }
        self.validation = carried.meta.get(VALIDATION, {})
