"""Compare runs: metrics on the tasks that all runs share, and settings that differ.

Runs whose settings are equal, except for the seed and the other IGNORED_SETTINGS, form a group. The
runs of a group are replicas, so each metric of a method has a mean and a deviation. Start with
`compare_runs`.
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
)
from pipeline.report.files import Row, nan_to_none
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

# Settings that may differ between the runs of a group: the name, the seed, and settings that change
# results at most by rounding.
IGNORED_SETTINGS = ("name", "seed", "storage", "cluster", "tracking", "plugins")


@dataclass(frozen=True)
class Spread:
    """Mean and spread of several values.

    Attributes:
        mean: The mean; NaN if it is unknown.
        deviation: Sample standard deviation; NaN for fewer than two values.
        n: Number of known values.
        paired: For a difference: whether runs with the same seed were subtracted.
    """

    mean: float
    deviation: float
    n: int
    paired: bool = True

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of values. The mean is NaN without values or if a value is NaN."""
        known = [value for value in values if not math.isnan(value)]
        if len(known) < len(values) or not known:  # a mean over only some of the runs would mislead
            return cls(math.nan, math.nan, len(known))
        deviation = statistics.stdev(known) if len(known) > 1 else math.nan
        return cls(statistics.fmean(known), deviation, len(known))


@dataclass
class RunGroup:
    """Runs to compare as replicas of each other.

    Their settings are equal, except for IGNORED_SETTINGS and, for the replicas of one run, the
    class order.

    Attributes:
        name: Name of the group in tables.
        runs: Seed, or name of the replica -> results of the run.
    """

    name: str
    runs: dict[Any, RunTables]

    @property
    def first(self) -> RunTables:
        """The first run, whose settings represent the group."""
        return next(iter(self.runs.values()))

    @property
    def settings(self) -> dict[str, Any]:
        """Dotted key -> value of the settings, without IGNORED_SETTINGS and empty mappings."""
        config = dict(self.first.record["config"])
        for name in IGNORED_SETTINGS:
            config.pop(name, None)
        settings = flatten(index_lists(config))
        return {name: value for name, value in settings.items() if value != {}}


@dataclass
class ComparedMethod:
    """A method of a group, evaluated on the tasks that all compared runs share.

    In this class, `seed` means a key of `RunGroup.runs`: the seed of a run, or a replica's name.

    Attributes:
        name: Name of this entry in tables.
        group: The group of runs.
        label: Label of the method in these runs.
        tasks: The shared tasks.
    """

    name: str
    group: RunGroup
    label: str
    tasks: Sequence[str]

    @cached_property
    def matrices(self) -> dict[Any, Matrix]:
        """Seed -> accuracy matrix on the shared tasks, in the task order of the run."""
        matrices = {}
        for seed, run in self.group.runs.items():
            matrices[seed] = restrict_matrix(run.matrix(self.label), self.tasks)
        return matrices

    @cached_property
    def numbers(self) -> dict[str, dict[Any, float]]:
        """Metric -> seed -> value; NaN if the value is unknown, as in an unfinished run."""
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
        """Return the metrics of one run.

        Metrics of the accuracy matrix are missing if the run has not finished all shared tasks.

        Args:
            matrix: Accuracy matrix on the shared tasks.
            sizes: Rows of `RunTables.sizes`.
        """
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
        """Return seed -> value of a metric; NaN if the value is unknown.

        Args:
            metric: Name of a metric, or `accuracy on N`: the accuracy after the last task on the
                task at position N.
        """
        if metric in self.numbers:
            return self.numbers[metric]
        for position, task in enumerate(self.tasks):
            if metric == answers.ACCURACY_ON.format(position):
                return self._final_rates(task)
        raise KeyError(metric)

    @cached_property
    def conditions(self) -> Conditions:
        """The training conditions of the method.

        `epochs` and `images` are means over replicas, and `seeds` lists all replicas. Other values
        come from the first run.
        """
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
            epochs=nan_to_none(statistics.fmean(budget.epochs for budget in budgets)),
            images=nan_to_none(statistics.fmean(budget.images for budget in budgets)),
            parameters=max((row["trained_parameters"] or 0 for row in rows), default=None),
        )

    def _final_rates(self, task: str) -> dict[Any, float]:
        """Return seed -> accuracy on a task after the last task."""
        values = {}
        for seed, matrix in self.matrices.items():
            values[seed] = float(matrix.rates[-1, matrix.tasks.index(task)])
        return values

    def spread(self, metric: str) -> Spread:
        """Return the spread of a metric over the seeds. See `values` for the argument."""
        return Spread.of(list(self.values(metric).values()))

    def difference(self, base: ComparedMethod, metric: str) -> Spread:
        """Return the difference of a metric (see `values`) between this entry and `base`.

        Runs with the same seed are subtracted in pairs. Without common seeds the means are
        subtracted. The deviation is then the root of the sum of both variances, as for independent
        runs.
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
        """Return the accuracy matrix (T, T) averaged over seeds, with the tasks in `order`.

        A cell is NaN if a run has no value for it.
        """
        matrices = []
        for matrix in self.matrices.values():
            index = [matrix.tasks.index(task) for task in order]
            matrices.append(matrix.rates[np.ix_(index, index)])
        mean: NDArray[np.float64] = np.mean(matrices, axis=0)
        return mean


@dataclass
class Comparison:
    """The comparison of several runs.

    Attributes:
        groups: Groups of runs, in the order of the command line.
        entries: The methods of the groups.
        tasks: The tasks that all runs share.
        notes: Sentences that a reader needs to interpret the numbers.
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
        """Entry -> metric -> values in bootstrap draws of test images and replicas.

        The result is empty if a run learns the shared tasks in another order, if the stored
        predictions of a run do not cover the tasks, or if runs with the same seed have different
        test images.
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
        """Return the 95 % interval of the mean of a metric.

        Args:
            entry: The entry.
            metric: Name of a metric, or another name in the result of `answers.draw_metrics`, such
                as `accuracy on 0`.

        Returns:
            The interval, or NO_INTERVAL if the metric has no draws.
        """
        draws = self.draws.get(entry.name, {})
        return percentile_interval(draws[metric]) if metric in draws else NO_INTERVAL

    def difference_interval(
        self, entry: ComparedMethod, other: ComparedMethod, metric: str
    ) -> Interval:
        """Return the 95 % interval of the mean difference of a metric, from paired draws.

        Without draws the result is NO_INTERVAL.
        """
        draws = self.draws
        if metric not in draws.get(entry.name, {}):
            return NO_INTERVAL
        return percentile_interval(draws[entry.name][metric] - draws[other.name][metric])

    def winner(self, metric: str, pick_best: Callable[..., float] | None) -> ComparedMethod | None:
        """Return the best entry for a metric, if a fair comparison supports the lead.

        Args:
            metric: Name of the metric, as in `interval`.
            pick_best: `max` or `min`; None if no value of the metric is better than another.

        Returns:
            The entry; None if its lead over another entry is within the noise, or, for accuracies,
            if it had an advantage in its conditions (see `find_advantages`).
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

        The conditions of the methods are not compared. See `winner` for the arguments.
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
        """Return whether the means of two entries differ by more than the noise.

        Only seeds that both entries have are compared. With bootstrap draws, `intervals.differ`
        decides. Otherwise, Student's t interval of the differences must exclude zero. If there is
        one seed, or all differences are equal, the noise is unknown: accuracies then never differ,
        and other metrics differ if the difference is not zero.
        """
        values = entry.values(metric)
        base = other.values(metric)
        differences = [values[seed] - base[seed] for seed in values if seed in base]
        if metric in self.draws.get(entry.name, {}):
            draws = self.draws[entry.name][metric] - self.draws[other.name][metric]
            return differ(draws, differences)
        if not differences or any(map(math.isnan, differences)):
            return False
        if len(set(differences)) == 1:
            # Sizes do not vary with the seed, so any difference of sizes is real, even with one.
            return differences[0] != 0 and not _is_rate(metric)
        return t_interval(differences).excludes_zero

    def t_interval(
        self, entry: ComparedMethod, other: ComparedMethod, metric: str = "average_accuracy"
    ) -> Interval:
        """Return Student's t interval of the mean difference over common seeds.

        With fewer than two common seeds the result is NO_INTERVAL.
        """
        values = entry.values(metric)
        base = other.values(metric)
        return t_interval([values[seed] - base[seed] for seed in values if seed in base])

    def base(self, entry: ComparedMethod) -> ComparedMethod | None:
        """Return the entry of the first group that `entry` is compared with.

        This is the entry of the first group with the same label, or else the only entry of the
        first group. The result is None if `entry` is in the first group, or if the first group has
        several methods and none with this label.
        """
        if entry.group is self.groups[0]:
            return None
        first_entries = [e for e in self.entries if e.group is self.groups[0]]
        for candidate in first_entries:
            if candidate.label == entry.label:
                return candidate
        return first_entries[0] if len(first_entries) == 1 else None

    def fairness_notes(self) -> list[str]:
        """Return sentences on the training conditions, and on a leader that is not set in bold."""
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
        """Return one row per entry and metric, with mean, deviation and interval."""
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
        """Return one row per entry and metric, with the difference from the first group."""
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
        """Return the mean accuracy matrices in long format, with differences from the first group.

        The difference is NaN for entries without a base (see `base`).
        """
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
        """Return one row per run and task, with average accuracy and forgetting after the task."""
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

        Groups with unknown settings have no column.
        """
        settings = {group.name: group.settings for group in self.groups}
        return find_differing_rows({name: values for name, values in settings.items() if values})

    def provenance_rows(self) -> list[Row]:
        """Return one row per property of the environment that differs between groups.

        Properties are, for example, the commit and the device. Groups with an unknown environment
        have no column.
        """
        facts = {group.name: collect_environment(group) for group in self.groups}
        return find_differing_rows({name: values for name, values in facts.items() if values})

    def stage_rows(self) -> list[Row]:
        """Return one row per stage result that several runs use, with the names of the runs."""
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
        """Return name -> rows of all tables that have rows."""
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
    """Compare runs. Raise `UserError` if the runs have no task in common."""
    groups = group_runs(runs)
    tasks, notes = find_common_tasks(runs)
    entries = []
    for group in groups:
        labels = group.first.labels
        for label in labels:
            name = f"{group.name}: {label}" if len(labels) > 1 else group.name
            entries.append(ComparedMethod(name, group, label, tasks))
    notes += describe_unfinished(entries)
    notes += describe_image_differences(runs, tasks)
    for run in runs:
        notes += [note for note in run.notes if note not in notes]
    return Comparison(groups, entries, tasks, notes)


def describe_unfinished(entries: Sequence[ComparedMethod]) -> list[str]:
    """Return one sentence per method and run that has not finished all tasks."""
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


def describe_image_differences(runs: Sequence[RunTables], tasks: Sequence[str]) -> list[str]:
    """Return a sentence that lists the tasks with different images in different runs, if any."""
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
    """Group runs with the same settings and different seeds.

    Runs from different results files, or from a file and a store, are never grouped together. Runs
    with the same settings and the same seed stay in separate groups, because they must differ in
    something else.
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
    """Make the names of groups unique, in place.

    If several groups have the same name, the name of the storage folder is added, and then a number
    if the names are still equal.
    """
    counts = Counter(group.name for group in groups)
    names: set[str] = set()
    for number, group in enumerate(groups, start=1):
        if counts[group.name] > 1:
            group.name = f"{group.name} [{os.path.basename(group.first.storage.rstrip('/'))}]"
        if group.name in names:
            group.name = f"{group.name} {number}"
        names.add(group.name)


def _common_name(group: RunGroup) -> str:
    """Return the run names without `-seed-N`: `table` for table-seed-0 and table-seed-1.

    If these names differ, return the name of the group.
    """
    stems = set()
    for seed, run in group.runs.items():
        stems.add(str(run.record["name"]).removesuffix(f"-seed-{seed}"))
    return stems.pop() if len(stems) == 1 else group.name


def find_common_tasks(runs: Sequence[RunTables]) -> tuple[list[str], list[str]]:
    """Find the tasks that all runs share, in the order of the first run.

    A shared task has the same name and classes in all runs, and all methods are evaluated on it.

    Returns:
        The shared tasks, and notes about omitted tasks and different orders.

    Raises:
        UserError: If the runs have no task in common.
    """
    streams = [_evaluated_tasks(run) for run in runs]
    tasks = []
    for name in streams[0]:
        if all(name in stream for stream in streams):
            known = {stream[name] for stream in streams if stream[name]}
            # Unknown classes fit any classes: an imported accuracy matrix may have none.
            if len(known) <= 1:
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
    """Return task -> classes, for the tasks on which every method of the run is evaluated."""
    tasks_by_method = [run.tasks(label) for label in run.labels]
    classes = {}
    for task in run.record["tasks"]:
        if all(task["name"] in tasks for tasks in tasks_by_method):
            classes[task["name"]] = frozenset(task["classes"])
    return classes


def restrict_matrix(matrix: Matrix, tasks: Sequence[str]) -> Matrix:
    """Return a matrix with only the rows and columns of `tasks`, in the order of the matrix."""
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


def collect_environment(group: RunGroup) -> dict[str, Any]:
    """Return commit, packages, device, Python and platform of a group.

    A value lists all distinct values of the runs, separated by commas.
    """
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


def find_differing_rows(columns: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Return one row per name whose value is not the same in all columns.

    Args:
        columns: Title of the column -> name -> value. A missing value is shown as `absent`.
    """
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
    """Replace lists of mappings by mappings from index to item, because `flatten` keeps lists."""
    if isinstance(value, Mapping):
        return {name: index_lists(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], Mapping):
        return {str(index): item for index, item in enumerate(value)}
    return value
