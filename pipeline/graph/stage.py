"""Stages and their graph: plain values, checked for order and cycles, drawn as text and as SVG."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Any

from workers.errors import UserError

if TYPE_CHECKING:
    from pipeline.data.cards import Card  # start-up time: imports pyarrow


UNKNOWN = "unknown until ingest"  # in place of the digest of images that are not ingested yet


@dataclass(frozen=True)
class IngestJob:
    """The data set to ingest.

    files: number and digest of the files of each class, see `raw_data.list_classes`. previous: key
    of the last ingest of a card of this name.
    """

    card: Card
    files: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    previous: str = ""


@dataclass(frozen=True)
class Stage:
    """A node: one step of one task under one method.

    id: readable and unique inside the graph, `label/task/step` (`data/CARD` for ingest, `backbone`,
    `report`). key: content address of its result. inputs: what the key was made of, flat, for
    explaining a miss. job: what a worker is told (a StageJob, or ingest's own job). note: what
    `plan` says of it beside hit or miss. replica: in a graph of several replicas, the first one
    that has this stage; empty for a stage that all share. is_provisional:
    whether images that the stage needs are not ingested yet. Its key is then a placeholder, which
    no result ever has.
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
    """Stages in topological order, by id."""

    name: str
    stages: dict[str, Stage] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, stages: list[Stage]) -> Graph:
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
        """Whether a method of it is defined outside of this project: `pipeline.register`."""
        return any("code" in stage.inputs for stage in self)

    def with_ancestors(self, stage_ids: Iterable[str]) -> set[str]:
        """Return the ids of stages and of all stages that they depend on."""
        needed = set(stage_ids)
        for stage in reversed(self.stages.values()):
            if stage.id in needed:
                needed.update(stage.parents)
        return needed

    def children(self, stage_id: str) -> list[Stage]:
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
        """Stage id -> number of stages on the longest path of its descendants."""
        depths = dict.fromkeys(self.stages, 0)
        for stage in reversed(self.stages.values()):
            for parent in stage.parents:
                depths[parent] = max(depths[parent], depths[stage.id] + 1)
        return depths
