"""Rehearsal methods: one network trained on all tasks, one memory of exemplars, one output space.

The output space holds all classes so far.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveInt
from torch import Tensor, nn
from typing_extensions import TypeVar

from workers.data.features import FeatureBatch, extract_features
from workers.errors import UserError
from workers.job import ActiveIf, Task, count_classes
from workers.methods.base import MethodSettings, ParamGroup, Step, StepContext
from workers.methods.base import S as AnySettings
from workers.methods.bases.class_incremental import ClassIncremental
from workers.methods.finetune import restore_network, save_network, weight_groups
from workers.model.distill import Teacher
from workers.model.exemplars import SELECTIONS, class_means, quota
from workers.rng import derive_seed
from workers.storage.taskstate import Carried, TaskState

# task -> class -> keys of exemplars, in the order of choice
Memory = dict[str, dict[str, list[str]]]
MEMORY, MEANS = "memory", "means"


class RehearsalSettings(MethodSettings):
    """Settings of `replay`."""

    memory: Annotated[PositiveInt, ActiveIf("per_class", (0,))] = Field(
        2000, description="number of exemplars of all classes so far, which share them equally"
    )
    per_class: NonNegativeInt = Field(
        0,
        description="number of exemplars of each class, for any number of classes; 0: "
        "`memory` divided by the number of classes",
    )
    selection: Literal["herding", "rebuffi", "closest", "random"] = Field(
        "herding",
        description="how exemplars are chosen: `herding`: iCaRL's Algorithm 4; `rebuffi`: "
        "herding as in iCaRL's released code; `closest`: nearest to the class mean; `random`: "
        "uniformly",
    )


S = TypeVar("S", bound=RehearsalSettings, default=Any)


class CarriesMemory(ClassIncremental[AnySettings]):
    """One network for all tasks, and a memory of exemplars.

    Step `train` learns a task. Step `herd` chooses the exemplars; for a base task it is the only
    step. The chain carries weights, heads and the keys of exemplars, never their pixels. All ranks
    hold the same memory.
    """

    carries: ClassVar[tuple[str, ...]] = ("weights", "heads", "memory")
    training_only: ClassVar[tuple[str, ...]] = (MEMORY,)
    reads = "seen"
    steps: ClassVar[tuple[Step, ...]] = (Step("train"), Step("herd", trains=False))
    freezes_backbone = False
    may_forget = True

    @classmethod
    def steps_for(cls, settings: AnySettings, position: int) -> tuple[Step, ...]:
        if position >= 0:
            return cls.steps
        return tuple(replace(step, after=()) for step in cls.steps if step.name == "herd")

    def __init__(self, backbone: nn.Module, settings: AnySettings, seed: int):
        super().__init__(backbone, settings, seed)
        self.exemplars: Memory = {}

    def memory(self, context: StepContext) -> dict[str, list[str]]:
        """Return task -> keys of exemplars, without tasks that the step reads completely.

        See `RemembersSamples.memory`.
        """
        if context.carried is None:
            return {}
        exemplars: Memory = context.carried.meta.get(MEMORY, {})
        keys = list_task_keys(exemplars)
        if context.step in ("train", "herd"):
            keys.pop(context.task.name, None)  # the step reads all images of this task
        return keys

    def begin(self, context: StepContext) -> list[ParamGroup]:
        if context.carried is not None:
            self.load_carried(context.carried)
        self.step = context.step
        self.old = [name for name in self.head_names() if name != context.task.name]
        return super().begin(context) + weight_groups(self.backbone, context.optim)

    @property
    def num_classes(self) -> int:
        """Return the number of classes so far, the width of the output space."""
        last: int = max(task_slice.stop for task_slice in self.class_slices().values())
        return last

    @property
    def ends(self) -> bool:
        """Return whether this is the task's last step."""
        steps = self.steps_for(self.settings, 0)
        if not self.old:
            steps = tuple(step for step in steps if not step.later)
        return self.step == steps[-1].name

    def finish(self) -> tuple[TaskState, Carried]:
        """Return the task's state and the carried state.

        After the last step the task's head is in the task's state, and not in the carried state.
        """
        assert self.task is not None
        heads = self.head_names()
        if self.ends:
            heads = [name for name in heads if name != self.task.name]
        carried = Carried(self.network_tensors(heads))
        if self.exemplars:
            carried.meta[MEMORY] = self.exemplars
        return self.state(), carried

    def network_tensors(self, heads: list[str]) -> dict[str, Tensor]:
        """Return the network's tensors in the carried state, with the heads of these tasks."""
        return save_network(self, heads)

    def load_carried(self, carried: Carried) -> None:
        super().load_carried(carried)
        self.exemplars = carried.meta.get(MEMORY, {})
        restore_network(self, carried.tensors)


class Rehearsal(CarriesMemory[S]):
    """A chain of tasks over one growing output space.

    `train` learns a task on its data and the exemplars of earlier tasks. `herd` chooses the task's
    exemplars by the features of the trained network under the evaluation transform. It also
    shortens the lists of older classes, from the end, because the keys of a class are in the order
    of choice.

    Subclasses define their loss, whether they distill from a teacher (`distills`), further steps
    (`later` if a step needs old classes), and how they predict.
    """

    scenarios = frozenset({"class", "domain"})
    # Whether `train` uses a copy of the network from before the task as the teacher.
    distills: ClassVar[bool] = False
    # Whether `herd` also stores the mean feature of each class's exemplars in the carried state.
    uses_class_means: ClassVar[bool] = False
    Settings = RehearsalSettings
    per_task = frozenset({"selection"})

    @classmethod
    def check_backbone(cls, settings: S, backbone: nn.Module, tasks: tuple[Task, ...] = ()) -> None:
        super().check_backbone(settings, backbone, tasks)
        classes = count_classes(tasks)
        if not settings.per_class and settings.memory < classes:
            raise UserError(
                f"memory is {settings.memory}, and the stream has {classes} classes, so that "
                f"none would keep an exemplar; give it {classes} or more, or set per_class"
            )

    @classmethod
    def ignored_settings(cls, step: str) -> frozenset[str]:
        if step == "train":
            return frozenset({"memory", "per_class", "selection"})
        return frozenset()

    def __init__(self, backbone: nn.Module, settings: S, seed: int):
        super().__init__(backbone, settings, seed)
        self.teacher: Teacher | None = None
        self.means: Tensor | None = None

    # ---- training --------------------------------------------------------------------------------
    def memory(self, context: StepContext) -> dict[str, list[str]]:
        """Return task -> keys of exemplars, without tasks that the step reads completely.

        `herd` reads exemplars of earlier tasks only to compute their means.
        """
        if context.step == "herd" and not self.uses_class_means:
            return {}
        return super().memory(context)

    def begin(self, context: StepContext) -> list[ParamGroup]:
        groups = super().begin(context)
        self.means = None  # the carried means belong to the network before this step
        if context.step == "train" and self.distills and self.old:
            self.teacher = Teacher(self.backbone, {name: self.heads[name] for name in self.old})
        if context.step == "herd":
            self.herd(context.task)
        return groups

    @property
    def old_share(self) -> float:
        """Return a = O / A, the number of old classes divided by that of all classes so far."""
        slices = self.class_slices()
        num_old: int = sum(slices[name].stop - slices[name].start for name in self.old)
        return num_old / self.num_classes

    # ---- the memory ------------------------------------------------------------------------------
    def share(self, classes: int) -> int:
        """Return the number of exemplars of each class if `classes` classes share the memory."""
        return quota(self.settings.memory, self.settings.per_class, classes)

    @torch.no_grad()
    def herd(self, task: Task, sharers: int = 0) -> None:
        """Select the exemplars of `task`, and shorten the lists of older classes.

        Each rank extracts the features of a part of the images. Every rank then selects from all
        images.

        Args:
            task: The task.
            sharers: Number of classes that share the memory. 0: all classes so far; then in
                scenario `domain` a class counts once per task, unless the tasks are slices of a
                stream.
        """
        counts = self.count_exemplars(sharers)
        batch = self.extract_features()
        memory: Memory = {}
        for name, classes in self.exemplars.items():
            memory[name] = {
                class_name: keys[: counts[name, class_name]] for class_name, keys in classes.items()
            }
        memory.setdefault(task.name, {})
        is_of_task = batch.tasks == self.task_names().index(task.name)
        select = SELECTIONS[self.settings.selection]
        for label, class_name in enumerate(task.classes):
            rows = (is_of_task & (batch.labels == label)).nonzero().squeeze(1)
            if not len(rows):  # a slice of a stream may lack images of a class
                continue
            seed = derive_seed(self.seed, "exemplars", task.name, class_name)
            generator = torch.Generator().manual_seed(seed)
            count = counts[task.name, class_name]
            positions = select(batch.features[rows], count, generator)
            keys = [batch.keys[rows[position]] for position in positions]
            memory[task.name][class_name] = keys
        self.exemplars = memory
        if self.uses_class_means:
            self.means = self.compute_exemplar_means(batch)

    def count_exemplars(self, sharers: int) -> dict[tuple[str, str], int]:
        """Return the number of exemplars of each task and class.

        If tasks are slices of a stream, the exemplars of a class are divided among them in
        proportion to its images.

        Args:
            sharers: See `herd`.
        """
        slices = self.class_slices()
        tasks = [task for task in self.stream if task.name in slices]
        if all(task.parts is None for task in tasks):
            count = self.share(sharers or sum(part.stop - part.start for part in slices.values()))
            return {(task.name, name): count for task in tasks for name in task.classes}
        totals: Counter[str] = Counter()
        for task in tasks:
            totals.update(task.shares)
        count = self.share(sharers or len(totals))
        return {
            (task.name, name): int(count * share / totals[name])
            for task in tasks
            for name, share in task.shares.items()
        }

    def compute_exemplar_means(self, batch: FeatureBatch) -> Tensor:
        """Return the unit-length mean feature of each class's exemplars, (classes so far, d)."""
        names = self.task_names()
        exemplar_keys: dict[str, set[str]] = {}  # by task
        for name, classes in self.exemplars.items():
            exemplar_keys[name] = set(chain(*classes.values()))
        exemplar_rows: list[int] = []
        task_indices = batch.tasks.tolist()
        for row, key in enumerate(batch.keys):
            task = names[task_indices[row]]
            if key in exemplar_keys.get(task, ()):
                exemplar_rows.append(row)
        rows = torch.tensor(exemplar_rows)
        slices = self.class_slices()
        offsets = torch.tensor([slices[name].start for name in names])
        global_labels = batch.labels[rows] + offsets[batch.tasks[rows]]
        return class_means(batch.features[rows], global_labels, self.num_classes)

    def task_names(self) -> list[str]:
        """Return the names of the tasks whose images this step reads, in order."""
        return [task.name for task in self.training_tasks]

    def extract_features(self) -> FeatureBatch:
        """Return the features of all images that this step reads (`features.extract_features`)."""
        self.eval()
        return extract_features(self.features, self.context.data.feed("train"))

    def finish(self) -> tuple[TaskState, Carried]:
        state, carried = super().finish()
        if self.means is not None:
            carried.tensors[MEANS] = self.means
        return state, carried

    # ---- serving ---------------------------------------------------------------------------------
    def load_carried(self, carried: Carried) -> None:
        tensors = dict(carried.tensors)
        self.means = tensors.pop(MEANS, None)
        super().load_carried(Carried(tensors, carried.meta))


def list_task_keys(memory: Memory) -> dict[str, list[str]]:
    """Return the keys of each task, class after class."""
    return {name: list(chain(*classes.values())) for name, classes in memory.items()}
