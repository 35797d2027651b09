"""Runs side by side: groups of runs that differ in their seed alone, numbers on the tasks that all
have, and what else differs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.config import flatten
from pipeline.report.files import Row
from pipeline.results.tables import Matrix, RunTables
from workers.errors import UserError

# settings that make no other run, or change no result but in its rounding number: what it says, how
# it is written, which end is best
ELSEWHERE = (
    "name",
    "seed",
    "storage",
    "cluster",
    "tracking",
)
NUMBERS: dict[str, tuple[str, str, Callable[..., float] | None]] = {
    "average_accuracy": ("accuracy, averaged over the tasks, after the last one", "rate", max),
    "average_incremental_accuracy": (
        "accuracy over all images so far, averaged over the way",
        "rate",
        max,
    ),
    "forgetting": ("accuracy that old tasks have lost since their best moment", "rate", min),
    "learning_accuracy": ("accuracy of each task when it was new", "rate", max),
    "bytes_per_task": ("masks, tokens, head and copies of one task", "bytes", min),
    "total_bytes": ("everything kept at the end, with the backbone", "bytes", min),
    "growth": ("that, divided by the backbone", "times", None),
    "trained_parameters": (
        "numbers that the optimizer changes for one task, at most",
        "count",
        None,
    ),
}


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation (NaN for fewer than two) of n values."""

    mean: float
    deviation: float
    n: int
    paired: bool = True

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        there = [v for v in values if not math.isnan(v)]
        if (
            len(there) < len(values) or not there
        ):  # never a mean over fewer runs than one was asked for
            return cls(math.nan, math.nan, len(there))
        return cls(
            statistics.fmean(there),
            statistics.stdev(there) if len(there) > 1 else math.nan,
            len(there),
        )


@dataclass
class Group:
    """Runs that differ in nothing but seed and name, by seed."""

    name: str
    runs: dict[Any, RunTables]

    @property
    def first(self) -> RunTables:
        return next(iter(self.runs.values()))

    @property
    def settings(self) -> dict[str, Any]:
        found = flatten(
            index_lists(
                {k: v for k, v in self.first.record["config"].items() if k not in ELSEWHERE}
            )
        )
        return {name: value for name, value in found.items() if value != {}}


@dataclass
class Entry:
    """A method of a group. tasks: those that all entries have."""

    name: str
    group: Group
    label: str
    tasks: Sequence[str]

    @cached_property
    def matrices(self) -> dict[Any, Matrix]:
        """By seed, on the common tasks alone, in the order of this stream."""
        return {
            seed: restrict_matrix(run.matrix(self.label), self.tasks)
            for seed, run in self.group.runs.items()
        }

    @cached_property
    def numbers(self) -> dict[str, dict[Any, float]]:
        """Each of NUMBERS by seed; NaN where a run is not finished."""
        found: dict[str, dict[Any, float]] = {name: {} for name in NUMBERS}
        for seed, run in self.group.runs.items():
            matrix, sizes = self.matrices[seed], run.sizes(self.label)
            own = [r for r in sizes if r["after"] in self.tasks and r["role"] != "base"]
            last = sizes[-1] if sizes else {}
            values = {
                **(matrix.final if matrix.finished == len(matrix.tasks) else {}),
                "bytes_per_task": mean([r["task_bytes"] for r in own]),
                "total_bytes": last.get("total"),
                "growth": last.get("growth"),
                "trained_parameters": max((r["trained_parameters"] or 0 for r in own), default=0)
                or None,
            }
            for name, column in found.items():
                value = values.get(name)
                column[seed] = math.nan if value is None else float(value)
        return found

    def spread(self, name: str) -> Spread:
        return Spread.of(list(self.numbers[name].values()))

    def against(self, base: Entry, name: str) -> Spread:
        """Differences from `base`: of runs with the same seed where there are such, else of the
        means, whose spreads add up as those of independent runs."""
        own, other = self.numbers[name], base.numbers[name]
        if pairs := [seed for seed in own if seed in other]:
            return Spread.of([own[seed] - other[seed] for seed in pairs])
        here, there = self.spread(name), base.spread(name)
        return Spread(
            here.mean - there.mean,
            math.hypot(here.deviation, there.deviation),
            min(here.n, there.n),
            paired=False,
        )

    def rates(self, order: Sequence[str]) -> NDArray[np.float64]:
        """Mean accuracy over the seeds, (T, T), rows and columns in the given order; NaN where one
        has none."""
        found = []
        for matrix in self.matrices.values():
            at = [matrix.tasks.index(task) for task in order]
            found.append(matrix.rates[np.ix_(at, at)])
        return np.mean(found, axis=0)


@dataclass
class Comparison:
    """groups in the order in which they were named; entries: their methods. notes: what a reader
    has to know before the numbers."""

    groups: list[Group]
    entries: list[Entry]
    tasks: list[str]
    notes: list[str]

    @property
    def one_order(self) -> bool:
        """Whether all runs learn the common tasks in the same order."""
        return all(list(m.tasks) == self.tasks for e in self.entries for m in e.matrices.values())

    def base(self, entry: Entry) -> Entry | None:
        """What an entry is compared with: the same method of the first group, or its only method;
        None for those of the first group."""
        if entry.group is self.groups[0]:
            return None
        first = [e for e in self.entries if e.group is self.groups[0]]
        same = [e for e in first if e.label == entry.label]
        return same[0] if same else first[0] if len(first) == 1 else None

    # ---- tables ----------------------------------------------------------------------------------
    def summary_rows(self) -> list[Row]:
        return [
            {
                "entry": e.name,
                "run": e.group.name,
                "label": e.label,
                "number": name,
                "n": s.n,
                "mean": s.mean,
                "deviation": s.deviation,
                "seeds": ", ".join(map(str, e.group.runs)),
            }
            for e in self.entries
            for name in NUMBERS
            for s in [e.spread(name)]
        ]

    def difference_rows(self) -> list[Row]:
        return [
            {
                "entry": e.name,
                "against": base.name,
                "number": name,
                "n": s.n,
                "mean": s.mean,
                "deviation": s.deviation,
                "paired": s.paired,
            }
            for e in self.entries
            if (base := self.base(e))
            for name in NUMBERS
            for s in [e.against(base, name)]
        ]

    def matrix_rows(self) -> list[Row]:
        rows = []
        for e in self.entries:
            rates = e.rates(self.tasks)
            base = self.base(e)
            less = rates - base.rates(self.tasks) if base else np.full_like(rates, np.nan)
            rows += [
                {
                    "entry": e.name,
                    "after": after,
                    "task": task,
                    "accuracy": float(rates[t, i]),
                    "difference": float(less[t, i]),
                }
                for t, after in enumerate(self.tasks)
                for i, task in enumerate(self.tasks)
                if not math.isnan(rates[t, i])
            ]
        return rows

    def curve_rows(self) -> list[Row]:
        """Averages after each common task, by run."""
        return [
            {
                "entry": e.name,
                "seed": seed,
                "after_index": t,
                "after": m.tasks[t],
                **{name: m.over_time[t][name] for name in ("average_accuracy", "forgetting")},
            }
            for e in self.entries
            for seed, m in e.matrices.items()
            for t in range(m.finished)
        ]

    def setting_rows(self) -> list[Row]:
        """Settings that are not the same in all groups: one row for each, a column for each
        group."""
        return differing_rows({g.name: g.settings for g in self.groups})

    def provenance_rows(self) -> list[Row]:
        """The same of what the stages of the groups were made with."""
        return differing_rows({g.name: environment(g) for g in self.groups})

    def stage_rows(self) -> list[Row]:
        """Stage results that more than one run uses, with the runs."""
        users: dict[str, list[str]] = {}
        ids: dict[str, str] = {}
        for run in (run for group in self.groups for run in group.runs.values()):
            for stage in run.record["stages"]:
                if stage["step"] != "report":
                    users.setdefault(stage["key"], []).append(run.record["name"])
                    ids.setdefault(stage["key"], stage["id"])
        return [
            {"stage": ids[key], "key": key, "runs": ", ".join(names)}
            for key, names in users.items()
            if len(names) > 1
        ]

    def tables(self) -> dict[str, list[Row]]:
        found = {
            "summary": self.summary_rows(),
            "differences": self.difference_rows(),
            "matrices": self.matrix_rows(),
            "curves": self.curve_rows(),
            "settings": self.setting_rows(),
            "provenance": self.provenance_rows(),
            "stages": self.stage_rows(),
        }
        return {name: rows for name, rows in found.items() if rows}


# ---- how runs become a comparison ----------------------------------------------------------------
def compare_runs(runs: Sequence[RunTables]) -> Comparison:
    """Raises UserError where the runs have no task in common."""
    groups = group_runs(runs)
    shared, notes = common_tasks(runs)
    entries = [
        Entry(f"{g.name}: {label}" if len(g.first.labels) > 1 else g.name, g, label, shared)
        for g in groups
        for label in g.first.labels
    ]
    for entry in entries:
        for seed, matrix in entry.matrices.items():
            if matrix.finished < len(matrix.tasks):
                name = entry.group.runs[seed].record["name"]
                notes.append(
                    f"{entry.label} of run {name} is finished up to {matrix.finished} of these "
                    f"{len(matrix.tasks)} tasks, so its averages are left "
                    "out."
                )
    return Comparison(groups, entries, shared, notes)


def group_runs(runs: Sequence[RunTables]) -> list[Group]:
    """Runs with the same settings are one group, unless they have the same seed too: then something
    else differs."""
    groups: list[Group] = []
    for run in runs:
        name, seed = run.record["name"], run.record["config"].get("seed", 0)
        alone = Group(name, {seed: run})
        home = next(
            (g for g in groups if g.settings == alone.settings and seed not in g.runs), None
        )
        if home is None:
            groups.append(alone)
        else:
            home.runs[seed] = run
    for group in groups:
        if len(group.runs) > 1:
            group.name = f"{group.name} ({len(group.runs)} seeds)"
    return groups


def common_tasks(runs: Sequence[RunTables]) -> tuple[list[str], list[str]]:
    """Tasks with the same name and classes that every method of every run is measured on, in the
    order of the first; and what there is to say."""
    streams = [
        {
            t["name"]: frozenset(t["classes"])
            for t in run.record["tasks"]
            if all(t["name"] in run.tasks(label) for label in run.labels)
        }
        for run in runs
    ]
    shared = [
        name for name, classes in streams[0].items() if all(s.get(name) == classes for s in streams)
    ]
    names = " and ".join(dict.fromkeys(str(run.record["name"]) for run in runs))
    if not shared:
        raise UserError(
            f"runs {names} have no task in common (the first has "
            f"{', '.join(streams[0]) or 'none'}); compare runs on the same tasks"
        )
    notes = []
    left = list(dict.fromkeys(name for s in streams for name in s if name not in shared))
    if left:
        notes.append(
            f"Only {', '.join(shared)} {'is a task' if len(shared) == 1 else 'are tasks'} of "
            "all runs, so everything is compared on "
            f"{'this one' if len(shared) == 1 else 'these'}; left out: {', '.join(left)}. What "
            "a run learned in between counts all the same: total "
            "bytes and growth are those of its whole stream."
        )
    if any([name for name in s if name in shared] != shared for s in streams):
        notes.append(
            "The runs learn these tasks in different orders: a cell of the matrices stands for "
            "the same pair of tasks, not for the same moment."
        )
    return shared, notes


def restrict_matrix(matrix: Matrix, tasks: Sequence[str]) -> Matrix:
    at = [i for i, task in enumerate(matrix.tasks) if task in tasks]
    part = np.ix_(at, at)
    return Matrix(
        matrix.label,
        tuple(matrix.tasks[i] for i in at),
        matrix.correct[part],
        matrix.total[part],
        matrix.source[part],
    )


def environment(group: Group) -> dict[str, Any]:
    """What the stages of a group were made with; several values where they differ."""
    found: dict[str, list[str]] = {}
    for run in group.runs.values():
        own = {name: values for name, values in run.environment().items() if name != "seed"}
        own |= {
            name: [str(value)]
            for name in ("python", "platform")
            if (value := (run.record.get("provenance") or {}).get(name))
        }
        for name, values in own.items():
            found[name] = list(dict.fromkeys([*found.get(name, []), *values]))
    return {name: ", ".join(values) for name, values in found.items()}


def differing_rows(columns: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """One row for each name whose value is not the same in all columns."""
    names = dict.fromkeys(name for column in columns.values() for name in column)
    rows = [
        {
            "name": name,
            **{
                title: "absent" if name not in column else str(column[name])
                for title, column in columns.items()
            },
        }
        for name in names
    ]
    return [row for row in rows if len({row[title] for title in columns}) > 1]


def index_lists(value: Any) -> Any:
    """Lists of mappings as mappings by position, so that they are flattened too."""
    if isinstance(value, Mapping):
        return {name: index_lists(sub) for name, sub in value.items()}
    return (
        {str(i): sub for i, sub in enumerate(value)}
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], Mapping)
        else value
    )


def mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
