"""What the record of a run gets from each finished stage: points of curves, and files that a
browser can show."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pipeline.report import figures, files, mask_plots, plots
from pipeline.results.masks import MaskView, overlap_rows
from pipeline.results.tables import AVERAGES, EXTRA_COUNTS, Matrix, Row, RunTables, matrix_rows

SHOWN = (
    "average_accuracy",
    "micro_average_accuracy",
    "average_incremental_accuracy",
    "last_accuracy",
    "forgetting",
    "backward_transfer",
    "learning_accuracy",
    *(f"{prefix}_{name}" for prefix in EXTRA_COUNTS for name in AVERAGES),
)
# kinds of report pictures that belong to one method
OF_LABEL = (
    "matrix",
    "picked",
    "curves",
    "masks",
    "density",
    "overlap",
    "capacity",
    "layers",
    "tokens",
)
OF_RUN = ("comparison.png", "averages.png", "size_accuracy.png")


class Point(NamedTuple):
    """One value of a curve; `after_s`: seconds since the curve began."""

    name: str
    value: float
    step: int
    after_s: float


def key_name(text: str) -> str:
    """A name that MLflow accepts: letters, digits and `_-. :/`."""
    return re.sub(r"[^\w\-. :/]", "_", text)


def history_points(rows: Sequence[Row], step: str) -> list[Point]:
    """Curves of one training stage over its epochs, counted from 1: `train/loss`,
    `train/val_accuracy`, ..."""
    points, spent = [], 0.0
    for epoch, row in enumerate(rows, 1):
        spent += float(row.get("seconds") or 0)
        values = {
            name: value
            for name, value in row.items()
            if name not in ("epoch", "val_correct", "val_total", "images")
        }
        if row.get("val_total"):
            values["val_accuracy"] = row["val_correct"] / row["val_total"]
        points += [
            Point(key_name(f"{step}/{name}"), float(v), epoch, spent)
            for name, v in values.items()
            if v is not None and math.isfinite(v)
        ]
    return points


def matrix_points(matrix: Matrix) -> list[Point]:
    """`acc/TASK` for every entry there is, and the averages of every complete row; step = how many
    tasks were learned before."""
    points = [
        Point(key_name(f"acc/{matrix.tasks[i]}"), float(matrix.rates[t, i]), t, t)
        for t, i in np.ndindex(matrix.source.shape)
        if matrix.source[t, i] in ("measured", "follows")
    ]
    for t, row in enumerate(matrix.over_time[: matrix.finished]):
        points += [
            Point(name, row[name], t, t)
            for name in SHOWN
            if name in row and math.isfinite(row[name])
        ]
    return points


def size_points(rows: Sequence[Row]) -> list[Point]:
    """`size/KIND` in bytes and `growth` after each finished task."""
    skip = {"label", "after_index", "after", "role", "growth", "trained_parameters", "flops_share"}
    points = []
    for row in rows:
        points += [
            Point(f"size/{kind}", float(value), row["after_index"], row["after_index"])
            for kind, value in row.items()
            if kind not in skip
        ]
        if row["growth"]:
            points.append(Point("growth", row["growth"], row["after_index"], row["after_index"]))
    return points


def pick_points(rows: Sequence[Row]) -> list[Point]:
    """`picked_right/TASK`: share of its images that were taken for what they are, after each
    task."""
    return [
        Point(
            key_name(f"picked_right/{r['task']}"),
            r["share_right"],
            r["after_index"],
            r["after_index"],
        )
        for r in rows
        if r["images"]
    ]


def analysis_points(
    run: str, attention: Sequence[Row], robustness: Sequence[Row], images: int
) -> dict[str, list[Point]]:
    """What `analyse` found of each method of a run, by label: means over tasks and heads at each
    block, and accuracies over tasks at each level. images: of each task; points of more images are
    later ones, so that they are what a run shows when it was analysed twice."""
    values: dict[tuple[str, str, int], list[float]] = {}
    for row in (row for row in [*attention, *robustness] if row["run"] == run):
        for name, value, step in _measures(row):
            values.setdefault((row["label"], name, step), []).append(value)
    found: dict[str, list[Point]] = {}
    for (label, name, step), some in values.items():
        found.setdefault(label, []).append(
            Point(key_name(name), sum(some) / len(some), step, images / 1000)
        )
    return found


def _measures(row: Row) -> list[tuple[str, float, int]]:
    """(name, value, step) of a row of attention or robustness."""
    if "block" in row:
        values = (
            ("attention_entropy", row["entropy"]),
            ("attention_distance", row["distance"]),
            ("context_scale", row["scale"]),
        )
        return [(name, value, row["block"]) for name, value in values if value is not None]
    if row["kind"] == "shifted":
        return (
            [(f"accuracy_shifted/{row['card']}", row["accuracy"], 0)]
            if row["images"] == row["card"]
            else []
        )
    name, times = ("accuracy_occluded", 100) if row["kind"] == "occlusion" else ("accuracy_fgsm", 1)
    return [(name, row["accuracy"], round(times * row["level"]))]


def method_files(tables: RunTables, label: str) -> dict[str, bytes]:
    """The matrix as heat map, JSON, CSV and Parquet; averages; sizes. Made anew after every
    task."""
    matrix = tables.matrix(label)
    rows = matrix_rows(matrix)
    body = {
        "tasks": matrix.tasks,
        "rows": "after learning",
        "columns": "accuracy on task",
        "correct": listed(matrix.correct),
        "total": listed(matrix.total),
        "accuracy": listed(matrix.rates),
        "source": matrix.source.tolist(),
    }
    found = {
        "accuracy_matrix.png": plots.to_png(plots.draw_matrix(matrix)),
        "accuracy_matrix.json": json.dumps(body, indent=1).encode(),
        "accuracy_matrix.csv": files.as_csv(square(matrix)),
        "accuracy_matrix.parquet": files.as_parquet(rows),
    }
    if matrix.finished:
        found["averages.csv"] = files.as_csv(
            [{"after": matrix.tasks[t], **matrix.over_time[t]} for t in range(matrix.finished)]
        )
    if sizes := tables.sizes(label):
        found["sizes.csv"] = files.as_csv(sizes)
    if picks := tables.picks(label):
        found["picks.csv"] = files.as_csv(picks)
    if (picked := tables.pick_counts(label)) is not None:
        counts, tasks, candidates = picked
        found["picked.png"] = plots.to_png(figures.draw_picks(label, *picked))
        found["picked.csv"] = files.as_csv(
            [
                {"images of": task, **dict(zip(candidates, row, strict=True))}
                for task, row in zip(tasks, counts.tolist(), strict=True)
            ]
        )
    return found


def square(matrix: Matrix) -> list[Row]:
    """One row per stage, one column per task, in per cent: how a person reads it."""
    return [
        {
            "after learning": after,
            **{
                task: None if math.isnan(v) else round(100 * float(v), 2)
                for task, v in zip(matrix.tasks, row, strict=True)
            },
        }
        for after, row in zip(matrix.tasks, matrix.rates, strict=True)
    ]


def listed(values: Any) -> list[list[Any]]:
    return [
        [
            None
            if math.isnan(v)
            else int(v)
            if float(v).is_integer() and values.max(initial=0, where=~np.isnan(values)) > 1
            else float(v)
            for v in row
        ]
        for row in values
    ]


def task_files(
    tables: RunTables, label: str, task: str, views: Sequence[MaskView]
) -> dict[str, bytes]:
    """What a task left behind, as pictures and tables. views: masks of the tasks so far, this
    task's last."""
    found: dict[str, bytes] = {}
    if not views or views[-1].task != task:
        return found
    own = views[-1]
    if own.tokens is not None:
        found["token_masks.png"] = figures.token_mask_png(tables, [own], most_blocks=12)
    if own.bits:
        found["masks.csv"] = files.as_csv(own.rows())
    for name, figure in (
        ("density", mask_plots.draw_density([own])),
        ("mask_layers", mask_plots.draw_layers(own)),
        ("overlap", mask_plots.draw_overlaps(views)),
        ("capacity", mask_plots.draw_capacity(views)),
        ("tokens", mask_plots.draw_prompts(views)),
    ):
        if figure is not None:
            found[f"{name}.png"] = plots.to_png(figure)
    if shared := overlap_rows(list(views)):
        found["overlap.csv"] = files.as_csv(
            [row for row in shared if task in (row["task"], row["other"])]
        )
    return found


def confusion_files(tables: RunTables, label: str, task: str) -> dict[str, bytes]:
    """The confusion matrix of a task just after it was learned."""
    found = tables.confusion(label, task, task)
    if found is None:
        return {}
    counts, names = found
    rows = [
        {"true class": name, **dict(zip(names, line, strict=True))}
        for name, line in zip(names, counts.tolist(), strict=True)
    ]
    return {
        "confusion.png": plots.to_png(plots.draw_confusion(counts, names, f"{label}: {task}")),
        "confusion.csv": files.as_csv(rows),
    }


def keep_points(view: MaskView | None) -> list[Point]:
    """`keep/KIND`: share of entries that the masks of a kind keep, over all blocks."""
    rows = view.rows() if view else []
    return [
        Point(
            key_name(f"keep/{kind}"),
            sum(r["kept"] for r in rows if r["kind"] == kind)
            / sum(r["size"] for r in rows if r["kind"] == kind),
            0,
            0,
        )
        for kind in dict.fromkeys(r["kind"] for r in rows)
    ]


def of_label(report: Mapping[str, bytes], label: str) -> dict[str, bytes]:
    """The pictures of a finished report that belong to one method, under names without it."""
    return {
        f"report/{kind}.png": report[f"{kind}-{label}.png"]
        for kind in OF_LABEL
        if f"{kind}-{label}.png" in report
    }


def of_run(report: Mapping[str, bytes]) -> dict[str, bytes]:
    """The page and the comparisons of a report, and its tables below `tables/`."""
    pictures = {name: data for name, data in report.items() if name in (*OF_RUN, "report.html")}
    return pictures | {
        f"tables/{name}": data
        for name, data in report.items()
        if name.endswith((".csv", ".parquet"))
    }
