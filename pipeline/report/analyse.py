"""Measure attention and robustness of the methods of finished runs, as tables and pictures.

Models are loaded from the store. This module trains nothing. Start reading at `analyse_runs`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from pipeline.config.settings import Config
from pipeline.config.text import table_text
from pipeline.graph.run_record import RunRecord
from pipeline.graph.stage import Graph, Stage
from pipeline.graph.store import Store
from pipeline.report import files, plots
from pipeline.report.analysis_section import AnalysisPart
from pipeline.report.attention import describe_level, draw_attention, draw_heads, draw_robustness
from pipeline.report.figures import FigureFile
from pipeline.report.files import Row
from pipeline.report.maps import draw_maps
from pipeline.results.tables import RunTables
from workers.analysis import (
    attention_rows,
    compute_attention_maps,
    covers,
    measure_robustness,
    measure_shifted_accuracy,
)
from workers.dist import Group
from workers.errors import DamagedArtifact, UserError
from workers.job import StageJob, Task
from workers.methods.base import Method
from workers.restore import restore_finished_method
from workers.storage.artifact import Artifact

Measure = Callable[[Method, StageJob, Task], list[Row]]  # measures one method on one task


@dataclass(frozen=True)
class FinishedRun:
    """A run whose evaluations all have results.

    Attributes:
        config: The config of the run.
        graph: The stages of the run.
        store: The store with the results.
        record: The record of the run, as `RunTables.load` needs it.
    """

    config: Config
    graph: Graph
    store: Store
    record: RunRecord

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.graph.name

    @property
    def labels(self) -> list[str]:
        """Labels of the evaluated methods, in the order of the stages."""
        stages = list_evaluations(self)
        return list(dict.fromkeys(stage.method for stage in stages if stage.method))

    @cached_property
    def accuracy(self) -> dict[str, float]:
        """Label -> average accuracy over all tasks after the last task; NaN if unknown."""
        tables = RunTables.load(self.store.storage, self.record)
        accuracy = {}
        for label in self.labels:
            final = tables.matrix(label).final
            accuracy[label] = final.get("average_accuracy", math.nan)
        return accuracy


@dataclass
class Analysis:
    """The results of an analysis.

    Attributes:
        parts: Name -> part of the analysis section of the report.
        attention: Rows of `attention_rows` for all methods and tasks.
        robustness: Rows of `measure_robustness` and `measure_shifted_accuracy` for all methods and
            tasks.
        notes: Sentences about measurements that a method does not support.
    """

    parts: dict[str, AnalysisPart] = field(default_factory=dict)
    attention: list[Row] = field(default_factory=list)
    robustness: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All tables as text, followed by the notes."""
        blocks = []
        for part in self.parts.values():
            blocks += [table_text(heading, body) for heading, body in part.tables]
        if self.notes:
            blocks.append("\n".join(self.notes))
        return "\n\n".join(blocks)


def analyse_runs(
    runs: Sequence[FinishedRun],
    images: int,
    drawn: int,
    robustness: bool,
    other_tasks: Sequence[Task],
) -> Analysis:
    """Measure the methods of finished runs on test images.

    Args:
        runs: The finished runs.
        images: Maximum number of test images per task, except for `other_tasks`.
        drawn: Maximum number of images per task with attention maps; 0 for no maps.
        robustness: Whether to measure the accuracy on occluded and adversarial images.
        other_tasks: Tasks of other cards. The models are also tested on all their test images.

    Raises:
        UserError: If no method has attention, and neither `robustness` nor `other_tasks` is given.
    """
    analysis = Analysis()
    analysis.attention = measure_tasks(
        runs, lambda method, job, task: attention_rows(method, job, task, images)
    )
    if analysis.attention:
        analysis.parts["attention"] = build_attention_part(runs, analysis.attention)
        heads = make_heads_rows(runs, analysis.attention)
        if len({row["heads"] for row in heads}) > 1:
            analysis.parts["heads"] = build_heads_part(heads)
    elif robustness or other_tasks:
        analysis.notes.append(
            "attention: none of these methods has any, "
            "as their backbones are not vision transformers"
        )
    else:
        raise UserError(
            "no method of this run has attention to look at; "
            "its backbone must be a vision transformer"
        )
    if drawn:
        pictures, names_without_maps = draw_map_pictures(runs, drawn)
        if pictures:
            analysis.parts["maps"] = AnalysisPart(pictures)
        for name in names_without_maps:
            analysis.notes.append(
                f"maps: none of {name}, whose backbone has no class token that looks at patches"
            )
    if robustness:
        analysis.robustness += measure_tasks(
            runs, lambda method, job, task: measure_robustness(method, job, task, images)
        )
        attacked = {row["name"] for row in analysis.robustness if row["kind"] == "fgsm"}
        for _, _, name in named_methods(runs):
            if name not in attacked:
                analysis.notes.append(
                    f"fgsm: none of {name}, whose answers have no gradient in the image"
                )
        analysis.parts["robustness"] = build_robustness_part("robustness", analysis.robustness)
    if other_tasks:
        rows = measure_tasks(
            runs, lambda method, job, task: measure_shifted_accuracy(method, job, task, other_tasks)
        )
        analysis.parts["shifted"] = build_robustness_part("shifted", rows)
        analysis.robustness += rows
    return analysis


def list_evaluations(run: FinishedRun) -> list[Stage]:
    """Return the evaluation stages of a run, in the order of the graph."""
    return [stage for stage in run.graph if stage.step == "evaluate"]


def named_methods(runs: Sequence[FinishedRun]) -> Iterator[tuple[FinishedRun, str, str]]:
    """Yield (run, label of the method, name of the method in pictures) for all methods.

    The name contains the run and the label only as far as they are needed to tell methods apart.
    """
    for run in runs:
        for label in run.labels:
            if len(runs) == 1:
                name = label
            elif len(run.labels) == 1:
                name = run.name
            else:
                name = f"{run.name}: {label}"
            yield run, label, name


def measure_tasks(runs: Sequence[FinishedRun], measure: Measure) -> list[Row]:
    """Call `measure` for each task of each method and return the rows.

    Each task is measured with the model of the last evaluation that tests the task. The columns
    `run`, `label`, `name` (the method's name in pictures) and `task` are added to each row.
    """
    rows = []
    for run, label, name in named_methods(runs):
        for method, job, task in load_methods(run, label):
            for row in measure(method, job, task):
                origin = {"run": run.name, "label": label, "name": name, "task": task.name}
                rows.append({**origin, **row})
    return rows


def check_finished(run: FinishedRun) -> None:
    """Raise `UserError` if an evaluation of the run has no result."""
    for stage in list_evaluations(run):
        if Artifact.open(run.store.root, stage.key) is None:
            raise UserError(
                f"run {run.name!r}: stage {stage.id} has no result yet; "
                "finish the run with `python -m pipeline run` first"
            )


def load_methods(run: FinishedRun, label: str) -> Iterator[tuple[Method, StageJob, Task]]:
    """Yield (method, job, task) for each task of one method.

    `method` is the model of the last evaluation that tests the task. Each model is loaded once.

    Raises:
        UserError: If a stored result needed to build a model is missing or damaged.
    """
    job_by_task: dict[Task, StageJob] = {}
    for stage in list_evaluations(run):
        if stage.method == label:
            assert isinstance(stage.job, StageJob)
            job_by_task |= dict.fromkeys(stage.job.tasks, stage.job)
    jobs = {job.id: job for job in job_by_task.values()}
    for job in jobs.values():
        try:
            method = restore_finished_method(job, Group())
        except DamagedArtifact as error:
            lost = next((stage.id for stage in run.graph if stage.key == error.key), error.key)
            raise UserError(
                f"run {run.name!r}: the result of stage {lost} is missing or damaged; "
                "`python -m pipeline run` computes it again"
            ) from None
        for task, last_job in job_by_task.items():
            if last_job is job:
                yield method, job, task


def select_method_rows(rows: Sequence[Row], run: FinishedRun, label: str) -> list[Row]:
    """Return the rows of one method of one run."""
    return [row for row in rows if row["run"] == run.name and row["label"] == label]


# ---- attention -----------------------------------------------------------------------------------
def build_attention_part(runs: Sequence[FinishedRun], rows: list[Row]) -> AnalysisPart:
    """Build the table and picture of attention.

    The table has one line per method: its accuracy, and the entropy, distance and scale of its
    attention (see `attention_rows`), averaged over tasks, heads and blocks; entropy and distance
    also for the first and the last block. `uniform` is the entropy of uniform attention.
    """
    body = []
    for run, label, name in named_methods(runs):
        all_blocks = select_method_rows(rows, run, label)
        if not all_blocks:
            continue
        last_index = max(row["block"] for row in all_blocks)
        first_block = [row for row in all_blocks if row["block"] == 0]
        last_block = [row for row in all_blocks if row["block"] == last_index]
        block_rows = (all_blocks, first_block, last_block)
        uniform = np.mean([math.log(row["tokens"]) for row in all_blocks])
        scales = [row["scale"] for row in all_blocks if row["scale"] is not None]
        cells = [name, _format_accuracy(run.accuracy[label])]
        cells += [f"{_average_column(part, 'entropy'):.3f}" for part in block_rows]
        cells.append(f"{uniform:.3f}")
        cells += [f"{_average_column(part, 'distance'):.3f}" for part in block_rows]
        scale = "-"
        if scales:
            scale = f"{np.mean(scales):.4f}"
        cells.append(scale)
        body.append(cells)
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
    picture = FigureFile(
        "analysis.png",
        "Attention by depth",
        "How evenly heads attend (entropy, at most that of uniform attention) and how far "
        "patches look, block by block: means over heads and test images (TOAST: over both looks). "
        "Faint lines are tasks.",
        plots.to_png(draw_attention(rows)),
    )
    return AnalysisPart([picture], files.csv_and_parquet({"analysis": rows}), [(heading, body)])


def make_heads_rows(runs: Sequence[FinishedRun], rows: Sequence[Row]) -> list[Row]:
    """Return one row per method with attention: its number of heads and its accuracy.

    Methods with the same `family` have the same label and the same kind of context (setting
    `backbone.context`).
    """
    heads = []
    for run, label, name in named_methods(runs):
        head_indices = [row["head"] for row in select_method_rows(rows, run, label)]
        if not head_indices:
            continue
        context = run.config.backbone.context
        family = label
        if context:
            family = f"{label}, {context.kind}"
        heads.append(
            {
                "run": run.name,
                "label": label,
                "name": name,
                "family": family,
                "heads": 1 + max(head_indices),
                "accuracy": run.accuracy[label],
            }
        )
    return heads


def build_heads_part(rows: list[Row]) -> AnalysisPart:
    """Build the table and picture of accuracy against the number of heads."""
    body = []
    for row in sorted(rows, key=lambda r: (r["family"], r["heads"])):
        accuracy = _format_accuracy(row["accuracy"])
        body.append([row["family"], str(row["heads"]), accuracy, row["name"]])
    picture = FigureFile(
        "heads.png",
        "Accuracy against number of heads",
        "Accuracy, an average over tasks, of networks that differ in the number of heads; "
        "a line joins the same method with the same kind of context.",
        plots.to_png(draw_heads(rows)),
    )
    return AnalysisPart(
        [picture],
        files.csv_and_parquet({"heads": rows}),
        [(["family", "heads", "accuracy", "run"], body)],
    )


def draw_map_pictures(
    runs: Sequence[FinishedRun], drawn: int
) -> tuple[list[FigureFile], list[str]]:
    """Draw attention maps. Return one picture per method, and the names of methods without maps.

    Args:
        runs: The finished runs.
        drawn: Maximum number of images per task.
    """
    pictures = []
    names_without_maps = []
    for run, label, name in named_methods(runs):
        entries = []
        for method, job, task in load_methods(run, label):
            task_maps = compute_attention_maps(method, job, task, drawn)
            if task_maps is not None:
                entries.append((task.name, task_maps))
        if not entries:
            names_without_maps.append(name)
            continue
        caption = (
            "Test images with the attention of the class token to each patch, averaged over "
            "heads; 1 is the value of uniform attention."
        )
        if any(task_maps.selected is not None for _, task_maps in entries):
            caption += (
                " A first look selects patches by their likeness to what the task learned to seek; "
                "fed back from the top, they steer the second look."
            )
        pictures.append(
            FigureFile(
                f"maps-{name.replace(': ', '~')}.png",
                f"Maps of {name}",
                caption,
                plots.to_png(draw_maps(name, entries)),
            )
        )
    return pictures, names_without_maps


# ---- robustness ----------------------------------------------------------------------------------
def build_robustness_part(part: str, rows: list[Row]) -> AnalysisPart:
    """Build a picture, and one table for each kind of measurement.

    A table has one line per method, with the accuracy in per cent at each level.

    Args:
        part: Name of the part, which is also the name of the files.
        rows: Rows of `measure_robustness` or `measure_shifted_accuracy`.
    """
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    tables = []
    for kind in kinds:
        # (method, level) -> accuracy of each task
        accuracies: dict[tuple[str, str], list[float]] = {}
        for row in rows:
            if row["kind"] == kind:
                accuracies.setdefault((row["name"], describe_level(row)), []).append(
                    row["accuracy"]
                )
        names = dict.fromkeys(name for name, _ in accuracies)
        levels = dict.fromkeys(level for _, level in accuracies)
        body = []
        for name in names:
            means = [np.mean(accuracies.get((name, level), math.nan)) for level in levels]
            body.append([name, *(_format_accuracy(float(mean)) for mean in means)])
        tables.append(([kind, *levels], body))
    captions = {
        "occlusion": "Accuracy when the centre of images is hidden.",
        "fgsm": "Accuracy after a gradient step on the pixels that increases the loss, for methods "
        "whose predictions have a gradient with respect to the image.",
        "shifted": "Accuracy on the test images of another card, answers chosen among its classes "
        "alone, beside that on the task's own images of these classes.",
    }
    title = "Robustness"
    if part == "shifted":
        title = "Images of another card"
    caption = " ".join(captions[kind] for kind in kinds)
    picture = FigureFile(f"{part}.png", title, caption, plots.to_png(draw_robustness(rows)))
    return AnalysisPart([picture], files.csv_and_parquet({part: rows}), tables)


def check_covered(runs: Sequence[FinishedRun], other_tasks: Sequence[Task]) -> None:
    """Check that each run can be tested on `other_tasks`.

    The classes of each of the other tasks must all belong to one task of the run.

    Raises:
        UserError: If no single task of a run has all classes of one of the other tasks.
    """
    for run in runs:
        tasks: dict[Task, None] = {}
        for stage in list_evaluations(run):
            assert isinstance(stage.job, StageJob)
            tasks |= dict.fromkeys(stage.job.tasks)
        for other in other_tasks:
            if any(covers(task, other) for task in tasks):
                continue
            nearest = max(tasks, key=lambda task: len(set(other.classes) & set(task.classes)))
            lost = sorted(set(other.classes) - set(nearest.classes))[0]
            close = difflib.get_close_matches(lost, nearest.classes, 1)
            hint = ""
            if close:
                hint = f" (it has {close[0]!r})"
            raise UserError(
                f"--on {other.card!r}: no task of run {run.name!r} has "
                f"all its {len(other.classes)} classes; {nearest.name!r}, which has most, "
                f"lacks {lost!r}{hint}; name a card whose classes are among those of one task"
            )


def _average_column(rows: list[Row], value: str) -> float:
    return float(np.mean([row[value] for row in rows]))


def _format_accuracy(value: float) -> str:
    return "-" if math.isnan(value) else f"{100 * value:.1f}"
