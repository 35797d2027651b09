"""What rehearsal methods share: one network that goes on learning, one memory of exemplars, one
output space of all classes so far."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveInt
from torch import Tensor, nn
from typing_extensions import TypeVar

from workers.errors import UserError
from workers.job import Task
from workers.methods.base import MethodSettings, ParamGroup, Step, StepContext
from workers.methods.bases.class_incremental import ClassIncremental
from workers.methods.finetune import network_of, restore_network, weight_groups
from workers.model.distill import Teacher
from workers.model.exemplars import SELECTIONS, class_means, quota
from workers.rng import derive_seed
from workers.storage.taskstate import Carried, TaskState

Memory = dict[
    str, dict[str, list[str]]
]  # task -> class -> keys of exemplars, the first chosen first
MEMORY, MEANS = "memory", "means"


class RehearsalSettings(MethodSettings):
    memory: PositiveInt = Field(
        2000, description="exemplars in all, shared equally by all classes so far"
    )
    per_class: NonNegativeInt = Field(
        0, description="exemplars of each class, whatever their number; 0: `memory` counts"
    )
    selection: Literal["herding", "rebuffi", "closest", "random"] = Field(
        "herding", description="which images become exemplars"
    )


S = TypeVar("S", bound=RehearsalSettings, default=Any)


class Rehearsal(ClassIncremental[S]):
    """A chain over one growing output space. `train` learns a task on its data and the exemplars of
    earlier tasks; `herd` chooses the task's own exemplars by the features of the trained network
    under the evaluation transform, and shortens the older lists. The chain carries weights, heads
    and memory: references, never pixels. There is one memory, however many ranks there are.

    A base task has no step of its own but `herd`. Subclasses state their loss (`penalties`), what
    of the teacher they need, more steps (`later` ones where they need old classes), and how they
    answer.
    """

    carries: ClassVar[tuple[str, ...]] = ("weights", "heads", "memory")
    reads = "seen"
    steps: ClassVar[tuple[Step, ...]] = (Step("train"), Step("herd", trains=False))
    scenarios = frozenset({"class"})
    freezes_backbone = False
    may_forget = True
    distills: ClassVar[bool] = False  # `train` looks at the network before the task
    # `herd` also hands on the mean feature of each class's exemplars
    uses_class_means: ClassVar[bool] = False
    Settings = RehearsalSettings
    per_task = frozenset({"selection"})

    @classmethod
    def check_backbone(cls, settings: S, backbone: nn.Module, tasks: tuple[Task, ...] = ()) -> None:
        super().check_backbone(settings, backbone, tasks)
        classes = sum(task.num_classes for task in tasks)
        if not settings.per_class and settings.memory < classes:
            raise UserError(
                f"memory is {settings.memory}, and the stream has {classes} classes, so that "
                f"none would keep an exemplar; give it {classes} "
                "or more, or set per_class"
            )

    @classmethod
    def ignored_settings(cls, step: str) -> frozenset[str]:
        return frozenset({"memory", "per_class", "selection"}) if step == "train" else frozenset()

    @classmethod
    def steps_for(cls, settings: S, position: int) -> tuple[Step, ...]:
        return (
            cls.steps
            if position >= 0
            else tuple(replace(step, after=()) for step in cls.steps if step.name == "herd")
        )

    def __init__(self, backbone: nn.Module, settings: S, seed: int):
        super().__init__(backbone, settings, seed)
        self.exemplars: Memory = {}
        self.teacher: Teacher | None = None
        self.means: Tensor | None = None

    # ---- training --------------------------------------------------------------------------------
    def memory(self, context: StepContext) -> dict[str, list[str]]:
        """All exemplars of the classes that `step` has no other data of."""
        if context.step == "herd" and not self.uses_class_means:
            return {}
        kept: Memory = context.carried.meta.get(MEMORY, {}) if context.carried is not None else {}
        whole = context.task.name if context.step in ("train", "herd") else None
        return {
            name: [key for keys in classes.values() for key in keys]
            for name, classes in kept.items()
            if name != whole
        }

    def begin(self, context: StepContext) -> list[ParamGroup]:
        if context.carried is not None:
            self.load_carried(context.carried)
        self.step, self.means = context.step, None  # means were of the network before
        self.old = [name for name in self.class_slices() if name != context.task.name]
        if context.step == "train" and self.distills and self.old:
            self.teacher = Teacher(self.backbone, {name: self.heads[name] for name in self.old})
        groups = super().begin(context) + weight_groups(self.backbone, context.optim)
        if context.step == "herd":
            self.herd(context.task)
        return groups

    @property
    def num_classes(self) -> int:
        """Number of classes so far: the width of the one output space."""
        last: int = max(task_slice.stop for task_slice in self.class_slices().values())
        return last

    @property
    def old_share(self) -> float:
        """a = O_t / A_t: old classes among all."""
        slices = self.class_slices()
        num_old: int = sum(slices[name].stop - slices[name].start for name in self.old)
        return num_old / self.num_classes

    # ---- the memory ------------------------------------------------------------------------------
    def share(self, classes: int) -> int:
        """How many exemplars each of so many classes gets."""
        return quota(self.settings.memory, self.settings.per_class, classes)

    @torch.no_grad()
    def herd(self, task: Task, sharers: int = 0) -> None:
        """Choose the exemplars of `task`, and shorten the lists of older classes.

        Each rank extracts features of its share of the images; every rank chooses among all.
        sharers: number of classes that share the memory; 0: all so far.
        """
        count = self.share(sharers or self.num_classes)
        features, labels, tasks, keys = self.extract_features()
        chosen: Memory = {
            name: {c: kept[:count] for c, kept in classes.items()}
            for name, classes in self.exemplars.items()
        }
        mine = tasks == [t.name for t in self.training_tasks].index(task.name)
        for label, name in enumerate(task.classes):
            rows = (mine & (labels == label)).nonzero().squeeze(1)
            noise = torch.Generator().manual_seed(
                derive_seed(self.seed, "exemplars", task.name, name)
            )
            picked = SELECTIONS[self.settings.selection](features[rows], count, noise)
            chosen.setdefault(task.name, {})[name] = [keys[rows[place]] for place in picked]
        self.exemplars = chosen
        if self.uses_class_means:
            columns, names = self.class_slices(), [t.name for t in self.training_tasks]
            kept = {
                (name, key)
                for name, classes in chosen.items()
                for keys in classes.values()
                for key in keys
            }
            rows = torch.tensor(
                [
                    row
                    for row, (place, key) in enumerate(zip(tasks.tolist(), keys, strict=True))
                    if (names[place], key) in kept
                ]
            )
            first = torch.tensor([columns[name].start for name in names])
            self.means = class_means(
                features[rows],
                labels[rows] + first[tasks[rows]],
                max(own.stop for own in columns.values()),
            )

    def extract_features(self) -> tuple[Tensor, Tensor, Tensor, list[str]]:
        """Of all images of this step's feed, under the evaluation transform: features (n, d),
        labels (n,), places of their tasks (n,) and keys, on the CPU, by task and key in order, the
        same on every rank."""
        self.eval()
        feed = self.context.data.feed("train")
        mine = [
            (
                self.features(b.images).float().cpu(),
                b.labels.cpu(),
                b.tasks.cpu(),
                list(b.keys or []),
            )
            for b in feed.evaluate()
        ]
        parts = [part for share in feed.group.gather(mine) for part in share]
        keys, places = (
            [key for part in parts for key in part[3]],
            [place for part in parts for place in part[2].tolist()],
        )
        order = sorted(range(len(keys)), key=lambda row: (places[row], keys[row]))
        features, labels, tasks = (torch.cat([part[i] for part in parts])[order] for i in range(3))
        return features, labels, tasks, [keys[place] for place in order]

    @property
    def ends(self) -> bool:
        """Whether this is the task's last step."""
        return (
            self.step
            == [
                step.name for step in self.steps_for(self.settings, 0) if self.old or not step.later
            ][-1]
        )

    def finish(self) -> tuple[TaskState, Carried]:
        """After the last step the task's own head is in its state alone."""
        assert self.task is not None
        heads = [name for name in self.class_slices() if name != self.task.name or not self.ends]
        means = {} if self.means is None else {MEANS: self.means}
        return self.state(), Carried(
            self.network_tensors(heads) | means, {MEMORY: self.exemplars} if self.exemplars else {}
        )

    def network_tensors(self, heads: list[str]) -> dict[str, Tensor]:
        """What of the network is handed on beside the task's state: all of it, with the heads of
        these tasks."""
        return network_of(self, heads)

    # ---- serving ---------------------------------------------------------------------------------
    def load_carried(self, carried: Carried) -> None:
        super().load_carried(carried)
        tensors = dict(carried.tensors)
        self.means = tensors.pop(MEANS, None)
        self.exemplars = carried.meta.get(MEMORY, {})
        restore_network(self, tensors)
