"""What the methods of finished runs attend to, and how robust they are: tables and pictures from
what the store holds; nothing is trained."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from pipeline.config import Config
from pipeline.console import table_text
from pipeline.graph.stage import Graph
from pipeline.graph.store import Store
from pipeline.report import files, plots
from pipeline.report.analysis_section import Part
from pipeline.report.attention import draw_attention, draw_heads, draw_robustness, level_text
from pipeline.report.figures import Picture
from pipeline.report.files import Row
from pipeline.report.maps import draw_maps
from pipeline.results.tables import RunTables
from workers.analysis import attention_rows, covers, maps, robustness_rows, shifted_rows
from workers.dist import Group
from workers.errors import DamagedArtifact, UserError
from workers.job import StageJob, Task
from workers.methods.base import Method
from workers.restore import finished_method
from workers.storage.artifact import Artifact

Measure = Callable[[Method, StageJob, Task], list[Row]]


@dataclass(frozen=True)
class FinishedRun:
    """A run, and where its results are."""

    config: Config
    graph: Graph
    store: Store
    record: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.graph.name

    @property
    def labels(self) -> list[str]:
        return list(
            dict.fromkeys(
                stage.method for stage in self.graph if stage.step == "evaluate" and stage.method
            )
        )

    @cached_property
    def accuracy(self) -> dict[str, float]:
        """Of each method, the average over tasks after the last one, as it was evaluated."""
        tables = RunTables.load(self.store.storage, self.record)
        return {
            label: tables.matrix(label).final.get("average_accuracy", math.nan)
            for label in self.labels
        }


@dataclass
class Analysis:
    """What was found: parts for the page, rows for the record, and sentences on what could not be
    looked at."""

    parts: dict[str, Part] = field(default_factory=dict)
    attention: list[Row] = field(default_factory=list)
    robustness: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "\n\n".join(
            [
                *(table_text(*table) for part in self.parts.values() for table in part.tables),
                *(["\n".join(self.notes)] if self.notes else []),
            ]
        )


def analyse_runs(
    runs: Sequence[FinishedRun], images: int, drawn: int, robustness: bool, others: Sequence[Task]
) -> Analysis:
    """images: test images of each task that are measured, about. drawn: those over which maps are
    drawn. others: cards that finished models are tested on, too."""
    found = Analysis()
    found.attention = measure_tasks(
        runs, lambda method, job, task: attention_rows(method, job, task, images)
    )
    if found.attention:
        found.parts["attention"] = attention_part(runs, found.attention)
        heads = heads_rows(runs, found.attention)
        found.parts |= (
            {"heads": heads_part(heads)} if len({row["heads"] for row in heads}) > 1 else {}
        )
    elif robustness or others:
        found.notes.append(
            "attention: none of these methods has any, as their backbones are no vision "
            "transformers"
        )
    else:
        raise UserError(
            "no method of this run has attention to look at; its backbone must be a vision "
            "transformer"
        )
    if drawn:
        pictures, without = map_pictures(runs, drawn)
        found.parts |= {"maps": Part(pictures)} if pictures else {}
        found.notes += [
            f"maps: none of {name}, whose backbone has no class token that looks at patches"
            for name in without
        ]
    if robustness:
        found.robustness += measure_tasks(
            runs, lambda method, job, task: robustness_rows(method, job, task, images)
        )
        attacked = {row["name"] for row in found.robustness if row["kind"] == "fgsm"}
        found.notes += [
            f"fgsm: none of {name}, whose answers have no gradient in the image"
            for _, _, name in named_methods(runs)
            if name not in attacked
        ]
        found.parts["robustness"] = robustness_part("robustness", found.robustness)
    if others:
        rows = measure_tasks(
            runs, lambda method, job, task: shifted_rows(method, job, task, others)
        )
        found.parts["shifted"] = robustness_part("shifted", rows)
        found.robustness += rows
    return found


def named_methods(runs: Sequence[FinishedRun]) -> Iterator[tuple[FinishedRun, str, str]]:
    """(run, label, what a line in a picture is called)."""
    for run in runs:
        for label in run.labels:
            yield (
                run,
                label,
                label
                if len(runs) == 1
                else run.name
                if len(run.labels) == 1
                else f"{run.name}: {label}",
            )


def measure_tasks(runs: Sequence[FinishedRun], measure: Measure) -> list[Row]:
    """Rows of `measure` for each task of each method, as the last stage that serves the task has
    it. name: what a line in a picture is called."""
    return [
        {"run": run.name, "label": label, "name": name, "task": task.name, **row}
        for run, label, name in named_methods(runs)
        for method, job, task in load_methods(run, label)
        for row in measure(method, job, task)
    ]


def check_finished(run: FinishedRun) -> None:
    """Raises UserError where an evaluation has no result."""
    for stage in run.graph:
        if stage.step == "evaluate" and Artifact.open(run.store.root, stage.key) is None:
            raise UserError(
                f"run {run.name!r}: stage {stage.id} has no result yet; finish the run with "
                "`python -m pipeline run` first"
            )


def load_methods(run: FinishedRun, label: str) -> Iterator[tuple[Method, StageJob, Task]]:
    """The tasks of one method in stream order, each with the method that serves it. Raises
    UserError where what it is made of is gone or damaged."""
    owner: dict[Task, StageJob] = {}
    for stage in run.graph:
        if stage.step == "evaluate" and stage.method == label:
            assert isinstance(stage.job, StageJob)
            owner |= dict.fromkeys(stage.job.tasks, stage.job)
    for job in {job.id: job for job in owner.values()}.values():
        try:
            method = finished_method(job, Group())
        except DamagedArtifact as error:
            lost = next((stage.id for stage in run.graph if stage.key == error.key), error.key)
            raise UserError(
                f"run {run.name!r}: the result of stage {lost} is missing or damaged; `python "
                "-m pipeline run` computes it anew"
            ) from None
        yield from ((method, job, task) for task, last in owner.items() if last is job)


# ---- attention -----------------------------------------------------------------------------------
def attention_part(runs: Sequence[FinishedRun], rows: list[Row]) -> Part:
    """Means over tasks, heads and images, one line per method, beside its accuracy."""
    body = []
    for run, label, name in named_methods(runs):
        own = [row for row in rows if (row["run"], row["label"]) == (run.name, label)]
        if own:
            ends = [
                [row for row in own if row["block"] == block]
                for block in (0, max(row["block"] for row in own))
            ]
            scales = [row["scale"] for row in own if row["scale"] is not None]
            uniform = np.mean([math.log(row["tokens"]) for row in own])
            body.append(
                [
                    name,
                    _percent(run.accuracy[label]),
                    *(f"{_mean(part, 'entropy'):.3f}" for part in (own, *ends)),
                    f"{uniform:.3f}",
                    *(f"{_mean(part, 'distance'):.3f}" for part in (own, *ends)),
                    f"{np.mean(scales):.4f}" if scales else "-",
                ]
            )
    heading = [
        "method",
        "accuracy",
        "entropy",
        "first block",
        "last block",
        "uniform",
        "distance",
        "first block",
        "last block",
        "scale",
    ]
    picture = Picture(
        "analysis.png",
        "Attention by depth",
        "How evenly heads attend (entropy, at most that of uniform attention) and how far "
        "patches look, "
        "block by block: means over heads and test images (TOAST: over both looks). Faint lines "
        "are tasks.",
        plots.to_png(draw_attention(rows)),
    )
    return Part([picture], files.csv_and_parquet({"analysis": rows}), [(heading, body)])


def heads_rows(runs: Sequence[FinishedRun], rows: Sequence[Row]) -> list[Row]:
    """One for each method: how many heads its attention was seen to have, and its accuracy. family:
    methods that differ in nothing else that counts."""
    found = []
    for run, label, name in named_methods(runs):
        seen = [row["head"] for row in rows if (row["run"], row["label"]) == (run.name, label)]
        context = run.config.backbone.context
        family = f"{label}, {context.kind}" if context else label
        found += (
            [
                {
                    "run": run.name,
                    "label": label,
                    "name": name,
                    "family": family,
                    "heads": 1 + max(seen),
                    "accuracy": run.accuracy[label],
                }
            ]
            if seen
            else []
        )
    return found


def heads_part(rows: list[Row]) -> Part:
    body = [
        [row["family"], str(row["heads"]), _percent(row["accuracy"]), row["name"]]
        for row in sorted(rows, key=lambda r: (r["family"], r["heads"]))
    ]
    picture = Picture(
        "heads.png",
        "Heads against accuracy",
        "Accuracy, an average over tasks, of networks that differ in the number of heads; a "
        "line joins "
        "the same method with the same kind of context.",
        plots.to_png(draw_heads(rows)),
    )
    return Part(
        [picture],
        files.csv_and_parquet({"heads": rows}),
        [(["family", "heads", "accuracy", "run"], body)],
    )


def map_pictures(runs: Sequence[FinishedRun], drawn: int) -> tuple[list[Picture], list[str]]:
    """A picture per method, and the names of those without maps."""
    pictures, without = [], []
    for run, label, name in named_methods(runs):
        entries = [
            (task.name, found)
            for method, job, task in load_methods(run, label)
            if (found := maps(method, job, task, drawn)) is not None
        ]
        if not entries:
            without.append(name)
            continue
        selects = any(found.selected is not None for _, found in entries)
        says = (
            "Test images, and over each what the class token looks at, a mean over heads; 1 is "
            "what uniform attention gives to a patch."
        )
        says += (
            " A first look selects patches by their likeness to what the task learned to seek; "
            "fed back from the top, they steer the second look." * selects
        )
        pictures.append(
            Picture(
                f"maps-{name.replace(': ', '~')}.png",
                f"Maps of {name}",
                says,
                plots.to_png(draw_maps(name, entries)),
            )
        )
    return pictures, without


# ---- robustness ----------------------------------------------------------------------------------
def robustness_part(part: str, rows: list[Row]) -> Part:
    """Accuracy in per cent at each level, one line per method, one table per kind. part: what its
    files are called."""
    kinds, tables = list(dict.fromkeys(row["kind"] for row in rows)), []
    for kind in kinds:
        own = [row for row in rows if row["kind"] == kind]
        levels, names = (
            dict.fromkeys(map(level_text, own)),
            dict.fromkeys(row["name"] for row in own),
        )
        body = [
            [
                name,
                *(
                    _percent(
                        _mean(
                            [r for r in own if r["name"] == name and level_text(r) == level],
                            "accuracy",
                        )
                    )
                    for level in levels
                ),
            ]
            for name in names
        ]
        tables.append(([kind, *levels], body))
    says = {
        "occlusion": "Accuracy when the centre of images is hidden.",
        "fgsm": "Accuracy when every pixel goes a step uphill in the loss, "
        "of methods whose answers have a gradient in the image.",
        "shifted": "Accuracy on the test images of another card, answers chosen among its classes "
        "alone, beside that on the task's own images of these "
        "classes.",
    }
    title = "Images of another card" if part == "shifted" else "Robustness"
    return Part(
        [
            Picture(
                f"{part}.png",
                title,
                " ".join(says[kind] for kind in kinds),
                plots.to_png(draw_robustness(rows)),
            )
        ],
        files.csv_and_parquet({part: rows}),
        tables,
    )


def check_covered(runs: Sequence[FinishedRun], others: Sequence[Task]) -> None:
    """Raises UserError where a run has no task with all classes of a card."""
    for run in runs:
        tasks = list(
            dict.fromkeys(
                t for stage in run.graph if stage.step == "evaluate" for t in stage.job.tasks
            )
        )
        for other in (o for o in others if not any(covers(task, o) for task in tasks)):
            nearest = max(tasks, key=lambda task: len(set(other.classes) & set(task.classes)))
            lost = sorted(set(other.classes) - set(nearest.classes))[0]
            close = difflib.get_close_matches(lost, nearest.classes, 1)
            hint = f" (it has {close[0]!r})" if close else ""
            raise UserError(
                f"--on {other.card!r}: no task of run {run.name!r} has all its "
                f"{len(other.classes)} classes; {nearest.name!r}, which has most, "
                f"lacks {lost!r}{hint}; name a card whose classes are among those of one task"
            )


def _mean(rows: list[Row], value: str) -> float:
    return float(np.mean([row[value] for row in rows]))


def _percent(value: float) -> str:
    return "-" if math.isnan(value) else f"{100 * value:.1f}"
