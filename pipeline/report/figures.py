"""The figures of a run that its report and MLflow show, with file name, title and caption.

To add a figure, write a function and add a line to RUN_FIGURES or METHOD_FIGURES.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from pipeline.report import mask_plots, plots
from pipeline.report.samples import sample_image
from pipeline.results.masks import MaskView, load_mask_view
from pipeline.results.tables import PickCounts, Row, RunTables

# Maximum number of tasks in a picture of token masks. Of longer streams, the first, the last and
# evenly spaced tasks are shown.
MAX_ROWS = 8


@dataclass(frozen=True)
class FigureFile:
    """A picture (PNG) with its file name, title and caption."""

    name: str
    title: str
    caption: str
    png: bytes

    @property
    def width(self) -> int:
        """Width on the page in pixels, at 100 pixels per inch of the figure."""
        # bytes 16 to 20 of a PNG are the width in its IHDR chunk
        return int.from_bytes(self.png[16:20], "big") * 100 // plots.DPI


class CaptionedFigure(NamedTuple):
    """A figure with its title and caption."""

    title: str
    caption: str
    figure: Figure


# ---- figures of a run: all methods together ------------------------------------------------------
def comparison_figure(tables: RunTables) -> CaptionedFigure:
    """Return the figure of the final metrics of each method."""
    caption = (
        "Final average accuracy, average incremental accuracy "
        "(the mean over all tasks so far, after each task), "
        "and forgetting (the accuracy that earlier tasks have lost since their best). "
        "The dotted line is the chance level."
    )
    figure = plots.draw_comparison(tables.summary())
    return CaptionedFigure("Methods side by side", caption, figure)


def averages_figure(tables: RunTables) -> CaptionedFigure:
    """Return the figure of average accuracy and forgetting after each task."""
    caption = (
        "Average accuracy and forgetting over the tasks learned so far, "
        "after each task. On the left, a falling line means that new tasks are harder "
        "or earlier ones are forgotten; the dotted line is the chance level. On the right, "
        "a rising line means forgetting."
    )
    matrices = [tables.matrix(label) for label in tables.labels]
    return CaptionedFigure("Along the stream", caption, plots.draw_averages(matrices))


def size_accuracy_figure(tables: RunTables) -> CaptionedFigure | None:
    """Return the figure of stored bytes against average accuracy; None if no size is known."""
    summary = tables.summary()
    if not any(row["growth"] for row in summary):
        return None
    caption = (
        "Bytes that a method stores besides the shared backbone "
        "(masks as packed bits, tokens, heads, copies, and the state carried to the next task) "
        "against its average accuracy. Best is top left."
    )
    return CaptionedFigure("Size against accuracy", caption, plots.draw_size_accuracy(summary))


RunFigure = Callable[[RunTables], CaptionedFigure | None]
RUN_FIGURES: dict[str, RunFigure] = {
    "comparison.png": comparison_figure,
    "averages.png": averages_figure,
    "size_accuracy.png": size_accuracy_figure,
}


def run_pictures(tables: RunTables) -> list[FigureFile]:
    """Return the pictures that show all methods together.

    The list is empty until a row of an accuracy matrix is complete.
    """
    if not any(tables.matrix(label).finished for label in tables.labels):
        return []
    pictures = []
    for name, make_figure in RUN_FIGURES.items():
        captioned = make_figure(tables)
        if captioned is not None:
            pictures.append(_to_picture(name, captioned))
    return pictures


def _to_picture(name: str, captioned: CaptionedFigure) -> FigureFile:
    return FigureFile(name, captioned.title, captioned.caption, plots.to_png(captioned.figure))


# ---- figures of one method -----------------------------------------------------------------------
def matrix_figure(tables: RunTables, label: str, views: list[MaskView]) -> CaptionedFigure:
    """Return the figure of the accuracy matrix."""
    matrix = tables.matrix(label)
    caption = (
        "Row: the model after learning one more task. "
        "Column: the task it is tested on, with its number of test images, and the accuracy of "
        "guessing after the last task. Read down a column to see whether a task is forgotten."
    )
    if "follows" in matrix.source:
        caption += (
            " Bold numbers were measured. The others equal the diagonal, because nothing that "
            "this method learns later can change its predictions on an earlier task."
        )
    if "missing" in matrix.source:
        caption += " Hatched cells are not finished yet."
    return CaptionedFigure("Accuracy matrix", caption, plots.draw_matrix(matrix))


def task_aware_matrix_figure(
    tables: RunTables, label: str, views: list[MaskView]
) -> CaptionedFigure | None:
    """Return the figure of the accuracy matrix with given tasks; None if it was not measured.

    In the scenarios `class` and `domain` the method is not given the task of an image. This second
    matrix shows the accuracy if it were given.
    """
    matrix = tables.matrix(label, "correct_task_aware")
    if "measured" not in matrix.source:
        return None
    caption = (
        "The same model when the task of each image is given: "
        "it chooses among the outputs of that task only."
    )
    return CaptionedFigure("Accuracy matrix, task given", caption, plots.draw_matrix(matrix))


def picks_figure(tables: RunTables, label: str, views: list[MaskView]) -> CaptionedFigure | None:
    """Return the figure of inferred tasks; None for methods that do not infer the task."""
    picks = tables.pick_counts(label)
    if picks is None:
        return None
    caption = (
        "Row: the task that images belong to. "
        "Column: the task that the method inferred before it chose a class."
    )
    return CaptionedFigure("Inferred tasks", caption, draw_picks(label, picks))


def draw_picks(label: str, picks: PickCounts) -> Figure:
    """Draw the confusion matrix of true and inferred tasks."""
    return plots.draw_confusion(
        picks.counts,
        picks.tasks,
        f"{label}: inferred task",
        picks.candidates,
        ("inferred task", "images of"),
    )


def training_curves_figure(
    tables: RunTables, label: str, views: list[MaskView]
) -> CaptionedFigure | None:
    """Return the figure of training curves; None if no stage has a history."""
    figure = plots.draw_training_curves(list_training_histories(tables, label))
    if figure is None:
        return None
    caption = (
        "Loss, and accuracy on held-out validation images, over the epochs of all tasks in order. "
        "Grey bands separate the tasks; a number above one is the task's position, from 0."
    )
    return CaptionedFigure("Training", caption, figure)


def token_masks_figure(
    tables: RunTables, label: str, views: list[MaskView]
) -> CaptionedFigure | None:
    """Return the figure of token masks over one test image per task; None without token masks."""
    masked_views = [view for view in views if view.tokens is not None]
    if not masked_views:
        return None
    indices = mask_plots.spaced_indices(len(masked_views), MAX_ROWS)
    caption = (
        "Patches that a block attends to, over one test image per task. Dark patches are masked "
        "out for every image of the task, in this block only."
    )
    figure = draw_run_token_masks(tables, [masked_views[i] for i in indices])
    return CaptionedFigure("Patches each block attends to", caption, figure)


def density_figure(tables: RunTables, label: str, views: list[MaskView]) -> CaptionedFigure | None:
    """Return the figure of the kept share of masks by depth; None if no mask belongs to a block."""
    figure = mask_plots.draw_density(views)
    if figure is None:
        return None
    caption = (
        "Share of entries that each mask keeps, from the first block to the last. "
        "A line per task, the first one dark."
    )
    return CaptionedFigure("Mask density by depth", caption, figure)


def overlap_figure(tables: RunTables, label: str, views: list[MaskView]) -> CaptionedFigure | None:
    """Return the figure of the Jaccard index of masks; None without masks or a second task."""
    figure = mask_plots.draw_overlaps(views)
    if figure is None:
        return None
    caption = (
        "Jaccard index of each pair of tasks: entries that both masks keep, divided by entries "
        "that at least one keeps. 1 means the same mask."
    )
    return CaptionedFigure("Mask overlap between tasks", caption, figure)


def capacity_figure(tables: RunTables, label: str, views: list[MaskView]) -> CaptionedFigure | None:
    """Return the figure of the share of used entries after each task; None without masks."""
    figure = mask_plots.draw_capacity(views)
    if figure is None:
        return None
    caption = (
        "Share of all maskable entries: those that the task reuses from earlier tasks, "
        "those that it is the first to use, and, as a line, those that any task uses so far."
    )
    return CaptionedFigure("Capacity used", caption, figure)


def layers_figure(tables: RunTables, label: str, views: list[MaskView]) -> CaptionedFigure | None:
    """Return the figure of the kept share of units in the newest mask; None without block masks."""
    if not views:
        return None
    figure = mask_plots.draw_layers(views[-1])
    if figure is None:
        return None
    caption = "Row: a block. Column: an output unit of its layer. Dark is kept, light is masked."
    return CaptionedFigure(f"Units kept by the mask of {views[-1].task}", caption, figure)


def tokens_figure(tables: RunTables, label: str, views: list[MaskView]) -> CaptionedFigure | None:
    """Return the figure of learned tokens and their similarity; None without learned tokens."""
    figure = mask_plots.draw_prompts(views)
    if figure is None:
        return None
    caption = (
        "Left: values of the learned tokens of the newest task. Right: cosine similarity between "
        "the tokens of all tasks."
    )
    return CaptionedFigure("Learned tokens", caption, figure)


MethodFigure = Callable[[RunTables, str, list[MaskView]], CaptionedFigure | None]
METHOD_FIGURES: dict[str, MethodFigure] = {  # in the order of the report
    "matrix-{label}.png": matrix_figure,
    "matrix-{label}-task-aware.png": task_aware_matrix_figure,
    "picked-{label}.png": picks_figure,
    "curves-{label}.png": training_curves_figure,
    "masks-{label}.png": token_masks_figure,
    "density-{label}.png": density_figure,
    "overlap-{label}.png": overlap_figure,
    "capacity-{label}.png": capacity_figure,
    "layers-{label}.png": layers_figure,
    "tokens-{label}.png": tokens_figure,
}


def method_pictures(tables: RunTables, label: str, views: list[MaskView]) -> list[FigureFile]:
    """Return the pictures of one method.

    Args:
        tables: Results of the run.
        label: Label of the method.
        views: Masks and tokens of the finished tasks (see `load_mask_views`).
    """
    pictures = []
    for name, make_figure in METHOD_FIGURES.items():
        captioned = make_figure(tables, label, views)
        if captioned is not None:
            pictures.append(_to_picture(name.format(label=label), captioned))
    return pictures


# ---- data of figures -----------------------------------------------------------------------------
def draw_run_token_masks(
    tables: RunTables, views: Sequence[MaskView], most_blocks: int = 6
) -> Figure:
    """Draw token masks over one test image per task, for at most `most_blocks` blocks."""
    entries = []
    for view in views:
        image = sample_image(tables, view.task)
        entries.append(mask_plots.TokenMasks(view.task, np.asarray(view.tokens), image))
    return mask_plots.draw_token_masks(entries, most_blocks)


def load_mask_views(tables: RunTables, label: str) -> list[MaskView]:
    """Load masks and tokens of the finished tasks of a method, in stream order."""
    views = []
    for task in tables.tasks(label):
        view = load_mask_view(tables, label, task)
        if view is not None:
            views.append(view)
    return views


def list_training_histories(tables: RunTables, label: str) -> list[tuple[str, list[Row]]]:
    """Return (name, rows of the epochs) for each training stage of a method, in order.

    The name is the task, or `TASK/STEP` if the task has several training stages. The shared
    backbone stage is omitted, because it belongs to no method.
    """
    histories = []
    for task in tables.tasks(label):
        stage_histories = []
        for stage in tables.stages(label, task):
            epochs = tables.history(stage["id"]) if stage["label"] else []
            if epochs:
                stage_histories.append((stage["step"], epochs))
        for step, epochs in stage_histories:
            name = task if len(stage_histories) == 1 else f"{task}/{step}"
            histories.append((name, epochs))
    return histories
