"""Stages and the graph of stages of a run. Both are immutable values.

A stage is one step of work with one stored result, for example the training of one task with one
method. The parents of a stage are the stages whose results it reads; it is their child.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Any

from workers.errors import UserError

if TYPE_CHECKING:
    from pipeline.data.cards import Card  # importing pyarrow takes time


UNKNOWN = "unknown until ingest"  # prefix of the placeholder for the digest of missing images


@dataclass(frozen=True)
class IngestJob:
    """The data set to ingest.

    Attributes:
        card: The card (description) of the data set.
        files: Number and digest of the files of each class. See `raw_data.fingerprint_classes`.
        previous: Key of the last ingest of a card with this name.
    """

    card: Card
    files: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    previous: str = ""


@dataclass(frozen=True)
class Stage:
    """A node of the graph: a step of a task with a method, or a stage that methods share.

    Attributes:
        id: Readable id, unique in the graph: `label/task/step` for a step of a method, `data/CARD`
            for an ingest, `features/TASK`, `backbone` or `report`. It starts with `replica/` if
            `replica` is set.
        step: Kind of the stage.
        key: Content address of the result.
        inputs: Inputs of the key, besides the keys of the parents. They also explain a miss. The
            key of a parent that is an ingest stage does not enter the key; digests of the images
            that the stage uses are inputs instead.
        parents: Ids of the parents.
        method: Label of the method, which is its key in `methods` of the config. None for a stage
            that methods share.
        task: Name of the task. None for a stage that belongs to no task.
        job: Instructions for a worker: a `StageJob` or an `IngestJob`. None if the graph is only
            for display, and for the report.
        note: Text that `plan` prints in addition to hit or miss.
        replica: In a graph of several replicas, the first replica with this stage. Empty if all
            replicas share it.
        is_provisional: Whether the stage, or an ancestor, needs images that are not ingested yet.
            If so, its key is a placeholder, and no result has this key.
    """

    id: str
    step: str
    key: str
    inputs: Mapping[str, Any]
    parents: tuple[str, ...] = ()
    method: str | None = None
    task: str | None = None
    job: Any = None
    note: str = ""
    replica: str = ""
    is_provisional: bool = False


@dataclass(frozen=True)
class Graph:
    """Stages in topological order.

    Attributes:
        name: Name of the run.
        stages: Stages by id.
    """

    name: str
    stages: dict[str, Stage] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, stages: list[Stage]) -> Graph:
        """Return the graph of the given stages, sorted topologically.

        Args:
            name: Name of the run.
            stages: The stages, in any order.

        Raises:
            UserError: If two stages have the same id, or if the graph has a cycle.
        """
        by_id = {s.id: s for s in stages}
        if len(by_id) != len(stages):
            raise UserError(
                f"run {name!r}: two stages have the same id; give tasks and methods different names"
            )
        try:
            order = list(TopologicalSorter({s.id: s.parents for s in stages}).static_order())
        except CycleError as error:
            raise UserError(
                f"run {name!r}: the stages wait for each other in a circle: "
                f"{' -> '.join(error.args[1])}"
            ) from None
        return cls(name, {i: by_id[i] for i in order})

    def __iter__(self) -> Iterator[Stage]:
        return iter(self.stages.values())

    def __len__(self) -> int:
        return len(self.stages)

    def __getitem__(self, stage_id: str) -> Stage:
        return self.stages[stage_id]

    @property
    def has_outside_code(self) -> bool:
        """Whether a stage runs an external method, for example from `pipeline.register`."""
        return any("code" in stage.inputs for stage in self)

    def with_ancestors(self, stage_ids: Iterable[str]) -> set[str]:
        """Return the ids of stages and all their ancestors."""
        needed = set(stage_ids)
        for stage in reversed(self.stages.values()):
            if stage.id in needed:
                needed.update(stage.parents)
        return needed

    def children(self, stage_id: str) -> list[Stage]:
        """Return the stages that have the given stage as a parent."""
        return self._children[stage_id]

    @cached_property
    def _children(self) -> dict[str, list[Stage]]:
        children: dict[str, list[Stage]] = {stage_id: [] for stage_id in self.stages}
        for stage in self:
            for parent in dict.fromkeys(stage.parents):
                children[parent].append(stage)
        return children

    @cached_property
    def depths(self) -> dict[str, int]:
        """Stage id -> number of stages on the longest path of descendants."""
        depths = dict.fromkeys(self.stages, 0)
        for stage in reversed(self.stages.values()):
            for parent in stage.parents:
                depths[parent] = max(depths[parent], depths[stage.id] + 1)
        return depths
