"""Every figure of a run by file name, each with the sentence that explains it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from pipeline.report import mask_plots, plots
from pipeline.report.samples import sample_image
from pipeline.results.masks import MaskView
from pipeline.results.tables import RunTables
from workers.methods import METHODS
from workers.methods.base import Method

# tasks in one mask picture; a longer stream shows some of them, the first and the last among them
MOST_ROWS = 8


@dataclass(frozen=True)
class Picture:
    """A PNG and what it says."""

    name: str
    title: str
    says: str
    png: bytes

    @property
    def width(self) -> int:
        """Pixels on the page: 100 for an inch of the figure."""
        return int.from_bytes(self.png[16:20], "big") * 100 // plots.DPI


def run_pictures(tables: RunTables) -> list[Picture]:
    """Methods side by side. Empty while no row of any matrix is complete."""
    matrices = [tables.matrix(label) for label in tables.labels]
    if not any(m.finished for m in matrices):
        return []
    summary = tables.summary()
    found = [
        Picture(
            "comparison.png",
            "Methods side by side",
            "Three numbers per method after its last finished task: accuracy averaged over "
            "tasks, the same averaged over the whole way there, "
            "and how much accuracy old tasks have lost since their best moment.",
            plots.to_png(plots.draw_comparison(summary)),
        ),
        Picture(
            "averages.png",
            "Along the stream",
            "What the averages were after each task: a falling line on the left means that new "
            "tasks are harder or old ones are lost; a line that "
            "rises on the right means forgetting.",
            plots.to_png(plots.draw_averages(matrices)),
        ),
    ]
    if any(row["growth"] for row in summary):
        found.append(
            Picture(
                "size_accuracy.png",
                "Size against accuracy",
                "What a method keeps besides the shared backbone (masks as packed bits, tokens, "
                "heads, copies, and what it carries to the next "
                "task) against its average accuracy; the best place is top left.",
                plots.to_png(plots.draw_size_accuracy(summary)),
            )
        )
    return found


def method_pictures(tables: RunTables, label: str, views: list[MaskView]) -> list[Picture]:
    """One method: matrix, training curves, masks, tokens. views: the masks of its finished
    tasks."""
    matrix = tables.matrix(label)
    says = (
        "Each row is the model after learning one more task, each column is a task it is tested "
        "on; read down a column to see whether that task "
        "is kept."
    )
    if "follows" in matrix.source:
        says += (
            " Bold numbers were measured; plain ones follow from them, since nothing that this "
            "method does later can change the answers "
            "on an earlier task."
        )
    if "missing" in matrix.source:
        says += " Hatched cells are not finished yet."
    found = [
        Picture(
            f"matrix-{label}.png", "Accuracy matrix", says, plots.to_png(plots.draw_matrix(matrix))
        )
    ]
    aware = tables.matrix(label, "correct_task_aware")
    if "measured" in aware.source:
        found.append(
            Picture(
                f"matrix-{label}-task-aware.png",
                "Accuracy matrix, task given",
                "The same model, when it is told which task an image belongs to and answers "
                "among that task's classes only.",
                plots.to_png(plots.draw_matrix(aware)),
            )
        )
    picked = tables.pick_counts(label)
    if picked is not None:
        found.append(
            Picture(
                f"picked-{label}.png",
                "What images were taken for",
                "Rows: the task that images are of. Columns: what the method, which was not "
                "told, took them for before it answered.",
                plots.to_png(draw_picks(label, *picked)),
            )
        )
    curves = plots.draw_curves(training_histories(tables, label))
    if curves is not None:
        found.append(
            Picture(
                f"curves-{label}.png",
                "Training",
                "Loss and accuracy on held-out validation images over the epochs of one task "
                "after the other; grey bands tell the tasks apart.",
                plots.to_png(curves),
            )
        )
    return found + mask_pictures(tables, label, views)


def draw_picks(
    label: str, counts: NDArray[np.int64], tasks: list[str], candidates: list[str]
) -> Figure:
    return plots.draw_confusion(
        counts, tasks, f"{label}: taken for", candidates, ("taken for", "images of")
    )


def mask_pictures(tables: RunTables, label: str, views: list[MaskView]) -> list[Picture]:
    found = []
    sighted = [v for v in views if v.tokens is not None]
    if sighted:
        chosen = [sighted[i] for i in mask_plots.spaced_indices(len(sighted), MOST_ROWS)]
        found.append(
            Picture(
                f"masks-{label}.png",
                "What each block looks at",
                "Patches that a block may attend to, over one test image of each task; darkened "
                "patches are masked out for every image of "
                "that task, in this block only.",
                token_mask_png(tables, chosen),
            )
        )
    for name, title, figure, says in (
        (
            "density",
            "How much is kept, by depth",
            mask_plots.draw_density(views),
            "Share of entries that each mask keeps, from the first block to the last.",
        ),
        (
            "overlap",
            "What tasks have in common",
            mask_plots.draw_overlaps(views),
            "Jaccard index of each pair of tasks: entries that both keep, divided by entries "
            "that at least one keeps; 1 means the same mask.",
        ),
        (
            "capacity",
            "Capacity used",
            mask_plots.draw_capacity(views),
            "Of all entries that can be masked: those that a task uses and earlier ones used "
            "already, those it is the first to use, and the line "
            "of all that some task uses by then.",
        ),
        (
            "layers",
            f"Where the mask of {views[-1].task if views else ''} keeps what",
            mask_plots.draw_layers(views[-1]) if views else None,
            "Each line is a block, each column an output unit of its layer: dark is kept, light "
            "is masked.",
        ),
        (
            "tokens",
            "Learned tokens",
            mask_plots.draw_prompts(views),
            "Left: the token values of the newest task. Right: how much the tokens of all tasks "
            "point the same way.",
        ),
    ):
        if figure is not None:
            found.append(Picture(f"{name}-{label}.png", title, says, plots.to_png(figure)))
    return found


def token_mask_png(tables: RunTables, views: list[MaskView], most_blocks: int = 6) -> bytes:
    entries = [(v.task, np.asarray(v.tokens), sample_image(tables, v.task)) for v in views]
    return plots.to_png(mask_plots.draw_token_masks(entries, most_blocks))


def load_mask_views(tables: RunTables, label: str) -> list[MaskView]:
    """The masks and tokens of every finished task of a method that has any, in stream order."""
    return [
        view
        for task in tables.tasks(label)
        if (view := load_mask_view(tables, label, task)) is not None
    ]


def load_mask_view(tables: RunTables, label: str, task: str) -> MaskView | None:
    """None where the task is not finished or has neither masks nor tokens. What a mask is, the
    method says."""
    state = tables.state(label, task)
    if state is None:
        return None
    masks = METHODS.get(state.method, Method).display_masks(state, tables.carried(label, task))
    view = MaskView.of(label, state, masks)
    return view if view.bits or view.prompts else None


def training_histories(tables: RunTables, label: str) -> list[tuple[str, list[dict[str, object]]]]:
    """(name, epochs) of every training stage of a method, in order; the step is named where a task
    has several."""
    found = []
    for task in tables.tasks(label):
        stages = [
            (s, rows)
            for s in tables.stages(label, task)
            if s["label"] and (rows := tables.history(s["id"]))
        ]
        found += [(task if len(stages) == 1 else f"{task}/{s['step']}", rows) for s, rows in stages]
    return found
