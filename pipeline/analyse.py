"""What the methods of finished runs attend to, and how robust they are: tables and pictures from what the store holds; nothing is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.console import table_text
from pipeline.graph import Graph
from pipeline.report import files, plots
from pipeline.report.attention import attention_figure, robustness_figure
from pipeline.report.files import Row
from pipeline.store import Store
from workers.artefact import Artefact
from workers.dist import Group
from workers.errors import UserError
from workers.evaluate import served
from workers.job import StageJob, Task
from workers.methods.base import Method

Measure = Callable[[Method, StageJob, Task, int], list[Row]]


@dataclass(frozen=True)
class Analysed:
    """A run, by name, and where its results are."""

    name: str
    graph: Graph
    store: Store


def measured(runs: Sequence[Analysed], measure: Measure, most: int) -> list[Row]:
    """Rows of `measure` for each task of each method, as the last stage that serves the task has it. name: what a line in a picture is
    called. most: test images of a task, about."""
    rows = []
    for run in runs:
        labels = list(dict.fromkeys(stage.method for stage in run.graph if stage.step == "evaluate" and stage.method))
        for label in labels:
            name = label if len(runs) == 1 else run.name if len(labels) == 1 else f"{run.name}: {label}"
            for method, job, task in finished(run, label):
                rows += [{"run": run.name, "label": label, "name": name, "task": task.name, **row} for row in measure(method, job, task, most)]
    return rows


def finished(run: Analysed, label: str) -> Iterator[tuple[Method, StageJob, Task]]:
    """The tasks of one method in stream order, each with the method that serves it. Raises UserError where a stage has no result."""
    owner: dict[Task, StageJob] = {}
    for stage in run.graph:
        if stage.step == "evaluate" and stage.method == label:
            assert isinstance(stage.job, StageJob)
            if Artefact.open(run.store.root, stage.key) is None:
                raise UserError(f"run {run.name!r}: stage {stage.id} has no result yet; finish the run with `python -m pipeline run` first")
            owner |= dict.fromkeys(stage.job.tasks, stage.job)
    for job in {job.id: job for job in owner.values()}.values():
        method = served(job, Group())
        yield from ((method, job, task) for task, last in owner.items() if last is job)


def attention_files(rows: list[Row]) -> dict[str, bytes]:
    if not rows:
        raise UserError("no method of this run has attention to look at; its backbone must be a vision transformer")
    return {**files.files({"analysis": rows}), "analysis.png": plots.png(attention_figure(rows))}


def robustness_files(rows: list[Row]) -> dict[str, bytes]:
    return {**files.files({"robustness": rows}), "robustness.png": plots.png(robustness_figure(rows))}


def attention_text(rows: list[Row]) -> str:
    """Means over tasks, heads and images, one line per method."""
    body = []
    for name in dict.fromkeys(row["name"] for row in rows):
        own = [row for row in rows if row["name"] == name]
        ends = [[row for row in own if row["block"] == block] for block in (0, max(row["block"] for row in own))]
        scales = [row["scale"] for row in own if row["scale"] is not None]
        body.append([name, *(f"{_mean(part, 'entropy'):.3f}" for part in (own, *ends)), f"{np.log(own[0]['tokens']):.3f}",
                     *(f"{_mean(part, 'distance'):.3f}" for part in (own, *ends)), f"{np.mean(scales):.4f}" if scales else "-"])
    return table_text(["method", "entropy", "first block", "last block", "uniform", "distance", "first block", "last block", "scale"], body)


def robustness_text(rows: list[Row]) -> str:
    """Accuracy in per cent at each level, one line per method and kind."""
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        levels = sorted({row["level"] for row in rows if row["kind"] == kind})
        names = dict.fromkeys(row["name"] for row in rows if row["kind"] == kind)
        body = [[name, *(f"{100 * _mean([r for r in rows if (r['name'], r['kind'], r['level']) == (name, kind, level)], 'accuracy'):.1f}"
                         for level in levels)] for name in names]
        lines.append(table_text([kind, *(f"{level:g}" for level in levels)], body))
    return "\n\n".join(lines)


def _mean(rows: list[Row], value: str) -> float:
    return float(np.mean([row[value] for row in rows]))
