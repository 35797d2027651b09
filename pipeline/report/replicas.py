"""Compare the replicas of a run: the same methods with different seeds or class orders."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.config.text import table_text
from pipeline.report.comparison import ComparedMethod, Comparison, RunGroup, describe_unfinished
from pipeline.report.comparison_files import format_plain
from pipeline.results.metrics import metrics_for
from pipeline.results.tables import RunTables, merge_warnings
from pipeline.shell.console import warning_lines


def compare_replicas(name: str, tables: Mapping[str, RunTables]) -> Comparison:
    """Compare the methods of a run, each with all replicas.

    With several class orders, a task is a position in the stream, and its classes differ between
    replicas.

    Args:
        name: Name of the run.
        tables: Name of the replica -> its results.
    """
    group = RunGroup(name, dict(tables))
    labels = group.first.labels
    tasks = group.first.tasks(labels[0])
    for label in labels:
        tasks = [task for task in tasks if task in group.first.tasks(label)]
    entries = [ComparedMethod(label, group, label, tasks) for label in labels]
    notes = describe_unfinished(entries)
    if len({_read_task_classes(run) for run in tables.values()}) > 1:
        notes.insert(
            0,
            "The replicas take the classes in different orders: a task is a position in the "
            "stream, with other classes in each order.",
        )
    return Comparison([group], entries, tasks, notes)


def _read_task_classes(run: RunTables) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(task["classes"]) for task in run.record["tasks"])


def comparison_text(name: str, tables: Mapping[str, RunTables]) -> str:
    """Return a table of means and deviations over the replicas, and warnings, as plain text."""
    comparison = compare_replicas(name, tables)
    metrics = metrics_for("replicas_text")
    body = []
    for entry in comparison.entries:
        cells = [entry.label, str(len(entry.group.runs))]
        cells += [format_plain(entry.spread(metric.name), metric.unit) for metric in metrics]
        body.append(cells)
    heading = ["method", "n", *(metric.title for metric in metrics)]
    lines = [*comparison.notes, table_text(heading, body)]
    return "\n".join([*lines, *warning_lines(merge_warnings(tables))])
