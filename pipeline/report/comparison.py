"""Runs side by side: groups of seeds, metrics on the tasks that all runs share, differing settings.

A group holds runs that differ in nothing but their seed and name.
"""

from __future__ import annotations

import math
import os
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.config.settings import flatten
from pipeline.report.fairness import (
    Conditions,
    count_exemplars,
    describe_backbone,
    describe_conditions,
    find_advantages,
    none_if_nan,
)
from pipeline.report.files import Row
from pipeline.results import answers
from pipeline.results.answers import RightAnswers
from pipeline.results.intervals import (
    NO_INTERVAL,
    Array,
    Interval,
    differ,
    percentile_interval,
    t_interval,
)
from pipeline.results.metrics import METRICS, metrics_for
from pipeline.results.tables import Matrix, RunTables
from workers.errors import UserError

# Settings that do not separate runs: identity and seed, and those that change only rounding.
IGNORED_SETTINGS = ("name", "seed", "storage", "cluster", "tracking", "plugins")


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation of n values; the deviation of fewer than two is NaN."""

    mean: float
    deviation: float
    n: int
    paired: bool = True

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of the values; NaN without values, or if one is NaN."""
        known = [value for value in values if not math.isnan(value)]
        if len(known) < len(values) or not known:  # never a mean over fewer runs than requested
            return cls(math.nan, math.nan, len(known))
        deviation = statistics.stdev(known) if len(known) > 1 else math.nan
        return cls(statistics.fmean(known), deviation, len(known))


@dataclass
class RunGroup:
    """Runs by seed that differ in nothing but seed and name."""

    name: str
    runs: dict[Any, RunTables]

    @property
    def first(self) -> RunTables:
        """The first run; all others have its settings."""
        return next(iter(self.runs.values()))

    @property
    def settings(self) -> dict[str, Any]:
        """Settings by dotted key, without IGNORED_SETTINGS."""
        config = dict(self.first.record["config"])
        for name in IGNORED_SETTINGS:
            config.pop(name, None)
        settings = flatten(index_lists(config))
        return {name: value for name, value in settings.items() if value != {}}


@dataclass
class ComparedMethod:
    """A method of a group, on the tasks that all entries share."""

    name: str
    group: RunGroup
    label: str
    tasks: Sequence[str]

    @cached_property
    def matrices(self) -> dict[Any, Matrix]:
        """Accuracy matrices by seed on the shared tasks, in the order of this stream."""
        matrices = {}
        for seed, run in self.group.runs.items():
            matrices[seed] = restrict_matrix(run.matrix(self.label), self.tasks)
        return matrices

    @cached_property
    def numbers(self) -> dict[str, dict[Any, float]]:
        """The values of each metric by seed; NaN if a run is not finished."""
        numbers: dict[str, dict[Any, float]] = {
            metric.name: {} for metric in metrics_for("comparison")
        }
        for seed, run in self.group.runs.items():
            values = self._values(self.matrices[seed], run.sizes(self.label))
            for name, by_seed in numbers.items():
                value = values.get(name)
                by_seed[seed] = math.nan if value is None else float(value)
        return numbers

    def _values(self, matrix: Matrix, sizes: list[Row]) -> dict[str, float | None]:
        """Return the metrics of one run; without accuracies if it is not finished."""
        values: dict[str, float | None] = {}
        if matrix.finished == len(matrix.tasks):
            values |= matrix.final
        last_sizes = sizes[-1] if sizes else {}
        values["total_bytes"] = last_sizes.get("total")
        values["growth"] = last_sizes.get("growth")
        task_bytes = []
        trained = 0
        for row in sizes:
            if row["after"] in self.tasks and row["role"] != "base":
                task_bytes.append(row["task_bytes"])
                trained = max(trained, row["trained_parameters"] or 0)
        values["bytes_per_task"] = statistics.fmean(task_bytes) if task_bytes else None
        values["trained_parameters"] = trained or None
        return values

    def values(self, metric: str) -> dict[Any, float]:
        """Return the values of a metric by seed; NaN when a run is not finished.

        metric: name of a metric, or `accuracy on N`, after the last task on the one at position N.
        """
        if metric in self.numbers:
            return self.numbers[metric]
        for position, task in enumerate(self.tasks):
            if metric == answers.ACCURACY_ON.format(position):
                return self._final_rates(task)
        raise KeyError(metric)

    @cached_property
    def conditions(self) -> Conditions:
        """The conditions of the training; numbers are means over replicas."""
        run = self.group.first
        settings = self.group.settings
        budgets = [each.budget(self.label) for each in self.group.runs.values()]
        rows = [row for row in run.sizes(self.label) if row["role"] != "base"]
        classes = {task["name"]: tuple(task["classes"]) for task in run.record["tasks"]}
        matrix = next(iter(self.matrices.values()))
        weights = settings.get("backbone.weights")
        validation = settings.get("data.val_fraction")
        return Conditions(
            backbone=describe_backbone(settings),
            weights=None if weights is None else str(weights),
            order=tuple((task, classes.get(task, ())) for task in matrix.tasks),
            validation=None if validation is None else float(validation),
            seeds=tuple(map(str, self.group.runs)),
            exemplars=count_exemplars(run, self.label),
            epochs=none_if_nan(statistics.fmean(budget.epochs for budget in budgets)),
            images=none_if_nan(statistics.fmean(budget.images for budget in budgets)),
            parameters=max((row["trained_parameters"] or 0 for row in rows), default=None),
        )

    def _final_rates(self, task: str) -> dict[Any, float]:
        """Return the accuracy on a task after the last one, by seed."""
        values = {}
        for seed, matrix in self.matrices.items():
            values[seed] = float(matrix.rates[-1, matrix.tasks.index(task)])
        return values

    def spread(self, metric: str) -> Spread:
        """Return the spread of a metric over the seeds. metric: as `values` takes it."""
        return Spread.of(list(self.values(metric).values()))

    def difference(self, base: ComparedMethod, metric: str) -> Spread:
        """Return a metric minus that of `base`.

        Runs with the same seed are subtracted in pairs. Without common seeds the means are
        subtracted, and their deviations add up as those of independent runs.
        """
        values = self.values(metric)
        base_values = base.values(metric)
        seeds = [seed for seed in values if seed in base_values]
        if seeds:
            return Spread.of([values[seed] - base_values[seed] for seed in seeds])
        spread = self.spread(metric)
        base_spread = base.spread(metric)
        deviation = math.hypot(spread.deviation, base_spread.deviation)
        n = min(spread.n, base_spread.n)
        return Spread(spread.mean - base_spread.mean, deviation, n, paired=False)

    def rates(self, order: Sequence[str]) -> NDArray[np.float64]:
        """Return the mean accuracy over seeds, (T, T), tasks in `order`; NaN if a run has none."""
        matrices = []
        for matrix in self.matrices.values():
            index = [matrix.tasks.index(task) for task in order]
            matrices.append(matrix.rates[np.ix_(index, index)])
        mean: NDArray[np.float64] = np.mean(matrices, axis=0)
        return mean


@dataclass
class Comparison:
    """Runs side by side.

    groups: in the order of the command line. entries: their methods. tasks: shared by all runs.
    notes: sentences to read before the numbers.
    """

    groups: list[RunGroup]
    entries: list[ComparedMethod]
    tasks: list[str]
    notes: list[str]

    @property
    def runs(self) -> list[RunTables]:
        """All runs, group by group."""
        runs: list[RunTables] = []
        for group in self.groups:
            runs += group.runs.values()
        return runs

    @property
    def has_one_order(self) -> bool:
        """Whether all runs learn the shared tasks in the same order."""
        for entry in self.entries:
            for matrix in entry.matrices.values():
                if list(matrix.tasks) != self.tasks:
                    return False
        return True

    # ---- intervals -------------------------------------------------------------------------------
    @cached_property
    def draws(self) -> dict[str, dict[str, Array]]:
        """Metrics of each entry in draws of test images and replicas, by name.

        Empty where the predictions of a run do not cover the tasks, or the runs test other images.
        """
        methods: dict[str, dict[str, RightAnswers]] = {}
        images: dict[str, Any] = {}
        for entry in self.entries:
            by_replica = {}
            for seed, run in entry.group.runs.items():
                if list(entry.matrices[seed].tasks) != self.tasks:
                    return {}
                right = answers.right_answers(run, entry.label, self.tasks)
                if right is None or images.setdefault(str(seed), right.images) != right.images:
                    return {}
                by_replica[str(seed)] = right
            methods[entry.name] = by_replica
        return answers.draw_metrics(methods)

    def interval(self, entry: ComparedMethod, metric: str) -> Interval:
        """Return the 95 % interval of the mean of a metric; none for a metric without draws.

        metric: name of a metric, or a name that `answers` gives to its draws.
        """
        draws = self.draws.get(entry.name, {})
        return percentile_interval(draws[metric]) if metric in draws else NO_INTERVAL

    def difference_interval(
        self, entry: ComparedMethod, other: ComparedMethod, metric: str
    ) -> Interval:
        """Return the 95 % interval of the mean difference of a metric, of paired draws."""
        draws = self.draws
        if metric not in draws.get(entry.name, {}):
            return NO_INTERVAL
        return percentile_interval(draws[entry.name][metric] - draws[other.name][metric])

    def winner(self, metric: str, pick_best: Callable[..., float] | None) -> ComparedMethod | None:
        """Return the entry with the best mean of a metric, if it differs from all others.

        None if its lead over another entry is within the noise, or its conditions were better
        (`find_advantages`; these do not matter for sizes). metric: as `interval` takes it.
        """
        leader = self.leader(metric, pick_best)
        if leader is None or not _is_rate(metric):
            return leader
        others = [entry for entry in self.entries if entry is not leader]
        if any(find_advantages(leader.conditions, other.conditions) for other in others):
            return None
        return leader

    def leader(self, metric: str, pick_best: Callable[..., float] | None) -> ComparedMethod | None:
        """Return the entry with the best mean, if its lead over all others exceeds the noise.

        Its conditions may have been better.
        """
        if pick_best is None or len(self.entries) < 2:
            return None
        means = {entry.name: entry.spread(metric).mean for entry in self.entries}
        known = [mean for mean in means.values() if not math.isnan(mean)]
        if len(known) < len(means):
            return None
        best = next(entry for entry in self.entries if means[entry.name] == pick_best(known))
        if all(self.differ(best, other, metric) for other in self.entries if other is not best):
            return best
        return None

    def differ(self, entry: ComparedMethod, other: ComparedMethod, metric: str) -> bool:
        """Return whether the means of two entries differ by more than the noise."""
        values = entry.values(metric)
        base = other.values(metric)
        differences = [values[seed] - base[seed] for seed in values if seed in base]
        if metric in self.draws.get(entry.name, {}):
            draws = self.draws[entry.name][metric] - self.draws[other.name][metric]
            return differ(draws, differences)
        if not differences or any(map(math.isnan, differences)):
            return False
        if len(set(differences)) == 1:  # sizes do not vary with the seed
            return differences[0] != 0 and not _is_rate(metric)
        return t_interval(differences).excludes_zero

    def t_interval(
        self, entry: ComparedMethod, other: ComparedMethod, metric: str = "average_accuracy"
    ) -> Interval:
        """Return Student's t interval of the mean difference over common seeds; none for one."""
        values = entry.values(metric)
        base = other.values(metric)
        return t_interval([values[seed] - base[seed] for seed in values if seed in base])

    def base(self, entry: ComparedMethod) -> ComparedMethod | None:
        """Return the entry that `entry` is compared with.

        It is the same method of the first group, or the first group's only method. None for
        entries of the first group, and when the first group has other methods only.
        """
        if entry.group is self.groups[0]:
            return None
        first_entries = [e for e in self.entries if e.group is self.groups[0]]
        for candidate in first_entries:
            if candidate.label == entry.label:
                return candidate
        return first_entries[0] if len(first_entries) == 1 else None

    def fairness_notes(self) -> list[str]:
        """Return sentences on the conditions of the methods, and on a lead that is not bold."""
        sentences = describe_conditions([entry.conditions for entry in self.entries])
        leader = self.leader("average_accuracy", max)
        if leader is None:
            return sentences
        advantages: dict[str, list[str]] = {}
        for other in self.entries:
            if other is leader:
                continue
            for title in find_advantages(leader.conditions, other.conditions):
                advantages.setdefault(title, []).append(other.name)
        if advantages:
            parts = [f"{title} ({', '.join(names)})" for title, names in advantages.items()]
            sentences.append(
                f"{leader.name} has the best average by more than the noise but is not bold: "
                f"its conditions were other ones, or better: {'; '.join(parts)}."
            )
        return sentences

    # ---- tables ----------------------------------------------------------------------------------
    def summary_rows(self) -> list[Row]:
        """Return mean and deviation of each metric of each entry."""
        rows = []
        for entry in self.entries:
            for metric in metrics_for("comparison"):
                spread = entry.spread(metric.name)
                interval = self.interval(entry, metric.name)
                rows.append(
                    {
                        "entry": entry.name,
                        "run": entry.group.name,
                        "label": entry.label,
                        "number": metric.name,
                        "n": spread.n,
                        "mean": spread.mean,
                        "deviation": spread.deviation,
                        "low": interval.low,
                        "high": interval.high,
                        "seeds": ", ".join(map(str, entry.group.runs)),
                    }
                )
        return rows

    def difference_rows(self) -> list[Row]:
        """Return the difference of each metric of each entry from the first group."""
        rows = []
        for entry in self.entries:
            base = self.base(entry)
            if base is None:
                continue
            for metric in metrics_for("comparison"):
                spread = entry.difference(base, metric.name)
                interval = self.difference_interval(entry, base, metric.name)
                rows.append(
                    {
                        "entry": entry.name,
                        "against": base.name,
                        "number": metric.name,
                        "n": spread.n,
                        "mean": spread.mean,
                        "deviation": spread.deviation,
                        "low": interval.low,
                        "high": interval.high,
                        "paired": spread.paired,
                    }
                )
        return rows

    def matrix_rows(self) -> list[Row]:
        """Return the mean accuracy matrices in long format, with differences."""
        rows = []
        for entry in self.entries:
            rates = entry.rates(self.tasks)
            base = self.base(entry)
            difference = np.full_like(rates, np.nan)
            if base is not None:
                difference = rates - base.rates(self.tasks)
            for t, i in zip(*np.nonzero(~np.isnan(rates)), strict=True):
                rows.append(
                    {
                        "entry": entry.name,
                        "after": self.tasks[t],
                        "task": self.tasks[i],
                        "accuracy": float(rates[t, i]),
                        "difference": float(difference[t, i]),
                    }
                )
        return rows

    def curve_rows(self) -> list[Row]:
        """Return the averages after each shared task, by run."""
        rows = []
        for entry in self.entries:
            for seed, matrix in entry.matrices.items():
                for t in range(matrix.finished):
                    averages = matrix.over_time[t]
                    rows.append(
                        {
                            "entry": entry.name,
                            "seed": seed,
                            "after_index": t,
                            "after": matrix.tasks[t],
                            "average_accuracy": averages["average_accuracy"],
                            "forgetting": averages["forgetting"],
                        }
                    )
        return rows

    def setting_rows(self) -> list[Row]:
        """Return one row per setting that differs between groups, with a column per group.

        Groups whose settings are not known have no column.
        """
        settings = {group.name: group.settings for group in self.groups}
        return differing_rows({name: values for name, values in settings.items() if values})

    def provenance_rows(self) -> list[Row]:
        """Return one row per fact of the stages' environment that differs between groups.

        Groups whose environment is not known have no column.
        """
        facts = {group.name: environment(group) for group in self.groups}
        return differing_rows({name: values for name, values in facts.items() if values})

    def stage_rows(self) -> list[Row]:
        """Return the stage results that more than one run uses, with the runs."""
        run_names: dict[str, list[str]] = {}
        stage_ids: dict[str, str] = {}
        for run in self.runs:
            for stage in run.record["stages"]:
                if stage["step"] != "report":
                    run_names.setdefault(stage["key"], []).append(run.record["name"])
                    stage_ids.setdefault(stage["key"], stage["id"])
        rows = []
        for key, names in run_names.items():
            if len(names) > 1:
                rows.append({"stage": stage_ids[key], "key": key, "runs": ", ".join(names)})
        return rows

    def tables(self) -> dict[str, list[Row]]:
        """Return all tables by name, without empty ones."""
        tables = {
            "summary": self.summary_rows(),
            "differences": self.difference_rows(),
            "matrices": self.matrix_rows(),
            "curves": self.curve_rows(),
            "settings": self.setting_rows(),
            "provenance": self.provenance_rows(),
            "stages": self.stage_rows(),
        }
        return {name: rows for name, rows in tables.items() if rows}


def _is_rate(metric: str) -> bool:
    """Return whether a metric is an accuracy or a difference of accuracies."""
    return metric not in METRICS or METRICS[metric].unit == "rate"


# ---- from runs to a comparison -------------------------------------------------------------------
def compare_runs(runs: Sequence[RunTables]) -> Comparison:
    """Return the comparison of runs. Raise UserError when they have no task in common."""
    groups = group_runs(runs)
    tasks, notes = common_tasks(runs)
    entries = []
    for group in groups:
        labels = group.first.labels
        for label in labels:
            name = f"{group.name}: {label}" if len(labels) > 1 else group.name
            entries.append(ComparedMethod(name, group, label, tasks))
    notes += unfinished_notes(entries)
    notes += image_notes(runs, tasks)
    for run in runs:
        notes += [note for note in run.notes if note not in notes]
    return Comparison(groups, entries, tasks, notes)


def unfinished_notes(entries: Sequence[ComparedMethod]) -> list[str]:
    """Return a sentence on each method of a run that has not finished all tasks."""
    notes = []
    for entry in entries:
        for seed, matrix in entry.matrices.items():
            if matrix.finished < len(matrix.tasks):
                name = entry.group.runs[seed].record["name"]
                notes.append(
                    f"{entry.label} of run {name} has finished {matrix.finished} of these "
                    f"{len(matrix.tasks)} tasks, so its averages are left out."
                )
    return notes


def image_notes(runs: Sequence[RunTables], tasks: Sequence[str]) -> list[str]:
    """Return a sentence on the tasks whose images are not the same in all runs."""
    digests: dict[str, set[str]] = {task: set() for task in tasks}
    for run in runs:
        for task, digest in run.image_digests().items():
            if task in digests:
                digests[task].add(digest)
    differing = [task for task in tasks if len(digests[task]) > 1]
    if not differing:
        return []
    return [f"The images of {', '.join(differing)} are not the same in all runs."]


def group_runs(runs: Sequence[RunTables]) -> list[RunGroup]:
    """Group runs with the same settings and different seeds, those of a file among themselves.

    Runs with the same settings and the same seed differ in something else, and stay apart.
    """
    groups: list[RunGroup] = []
    for run in runs:
        seed = run.record["config"].get("seed", 0)
        new_group = RunGroup(run.record["name"], {seed: run})
        for group in groups:
            is_same = group.settings == new_group.settings
            if is_same and group.first.source == run.source and seed not in group.runs:
                group.runs[seed] = run
                break
        else:
            groups.append(new_group)
    for group in groups:
        if len(group.runs) > 1:
            group.name = f"{_common_name(group)} ({len(group.runs)} seeds)"
    _distinguish(groups)
    return groups


def _distinguish(groups: Sequence[RunGroup]) -> None:
    """Add to names that several groups have where each comes from, or else its number."""
    counts = Counter(group.name for group in groups)
    names: set[str] = set()
    for number, group in enumerate(groups, start=1):
        if counts[group.name] > 1:
            group.name = f"{group.name} [{os.path.basename(group.first.storage.rstrip('/'))}]"
        if group.name in names:
            group.name = f"{group.name} {number}"
        names.add(group.name)


def _common_name(group: RunGroup) -> str:
    """Return `table` for the runs table-seed-0, table-seed-1, ...; else the name of the first."""
    stems = set()
    for seed, run in group.runs.items():
        stems.add(str(run.record["name"]).removesuffix(f"-seed-{seed}"))
    return stems.pop() if len(stems) == 1 else group.name


def common_tasks(runs: Sequence[RunTables]) -> tuple[list[str], list[str]]:
    """Return the tasks with the same name and classes in all runs, and notes about the others.

    Every method must be evaluated on a common task. The order is that of the first run. Raise
    UserError when there is none.
    """
    streams = [_evaluated_tasks(run) for run in runs]
    tasks = []
    for name in streams[0]:
        if all(name in stream for stream in streams):
            known = {stream[name] for stream in streams if stream[name]}
            if len(known) <= 1:  # a plain matrix names no classes
                tasks.append(name)
    if not tasks:
        run_names = dict.fromkeys(str(run.record["name"]) for run in runs)
        raise UserError(
            f"runs {' and '.join(run_names)} have no task in common "
            f"(the first has {', '.join(streams[0]) or 'none'}); compare runs on the same tasks"
        )
    notes = []
    left_out: dict[str, None] = {}
    has_one_order = True
    for stream in streams:
        left_out |= dict.fromkeys(name for name in stream if name not in tasks)
        has_one_order = has_one_order and [name for name in stream if name in tasks] == tasks
    if left_out:
        notes.append(
            "Only tasks that all runs share are compared: "
            f"{', '.join(tasks)}. Left out: {', '.join(left_out)}. The tasks that are left "
            "out still influence a run: total bytes and growth are those of its whole stream."
        )
    if not has_one_order:
        notes.append(
            "The runs learn these tasks in different orders. A cell of the matrices "
            "compares the same pair of tasks, not the same number of tasks learned."
        )
    return tasks, notes


def _evaluated_tasks(run: RunTables) -> dict[str, frozenset[str]]:
    """Return the classes of each task on which every method of the run is evaluated."""
    tasks_by_method = [run.tasks(label) for label in run.labels]
    classes = {}
    for task in run.record["tasks"]:
        if all(task["name"] in tasks for tasks in tasks_by_method):
            classes[task["name"]] = frozenset(task["classes"])
    return classes


def restrict_matrix(matrix: Matrix, tasks: Sequence[str]) -> Matrix:
    """Return the rows and columns of `tasks`, in the order of the matrix."""
    index = [i for i, task in enumerate(matrix.tasks) if task in tasks]
    part = np.ix_(index, index)
    return Matrix(
        matrix.label,
        tuple(matrix.tasks[i] for i in index),
        matrix.correct[part],
        matrix.total[part],
        matrix.source[part],
        chance=matrix.chance[part],
    )


def environment(group: RunGroup) -> dict[str, Any]:
    """Return commit, packages, device, Python and platform of a group; all values of each."""
    values: dict[str, dict[str, None]] = {}
    for run in group.runs.values():
        facts = run.environment()
        facts.pop("seed", None)
        provenance = run.record.get("provenance") or {}
        for name in ("python", "platform"):
            if provenance.get(name):
                facts[name] = [str(provenance[name])]
        for name, fact_values in facts.items():
            values.setdefault(name, {}).update(dict.fromkeys(fact_values))
    return {name: ", ".join(some_values) for name, some_values in values.items()}


def differing_rows(columns: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Return one row for each name whose value is not the same in all columns."""
    names: dict[str, None] = {}
    for column in columns.values():
        names |= dict.fromkeys(column)
    rows = []
    for name in names:
        row = {"name": name}
        for title, column in columns.items():
            row[title] = str(column[name]) if name in column else "absent"
        if len({row[title] for title in columns}) > 1:
            rows.append(row)
    return rows


def index_lists(value: Any) -> Any:
    """Return lists of mappings as mappings by index, so that `flatten` reaches inside them."""
    if isinstance(value, Mapping):
        return {name: index_lists(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], Mapping):
        return {str(index): item for index, item in enumerate(value)}
    return value
