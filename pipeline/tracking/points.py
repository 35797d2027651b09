"""Points of metric curves, and files such as pictures and tables, that are logged to MLflow.

The functions only compute; `RunWriter` and `Recorder` log the results. Functions whose names end in
`_files` return name -> content of artifacts.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from pipeline.report import figures, files, mask_plots, plots
from pipeline.results.masks import MaskView, overlap_rows
from pipeline.results.metrics import metrics_for
from pipeline.results.results_file import to_nested_lists
from pipeline.results.tables import EXTRA_COUNTS, NOT_BYTES, Matrix, Row, RunTables, matrix_rows
from pipeline.tracking.mlflow_client import Point, key_name

ROUNDING = 1e-12  # tolerance of equality, because means of equal numbers can differ by rounding
# Columns of a training history not logged as curves.
NOT_CURVES = ("epoch", "val_correct", "val_total", "images")


# ---- use of machines -----------------------------------------------------------------------------
def machine_points(
    samples: Iterable[tuple[float, Mapping[str, Any]]], start_s: float
) -> list[Point]:
    """Convert samples of workers' machines to points.

    The names are those of MLflow's system metrics, with the name of the machine:
    `system/NODE/cpu_utilization_percentage`, ... The step is in seconds since the start of the run.

    Args:
        samples: Pairs of a Unix time in seconds and a `MachineSample`.
        start_s: Start of the run, as a Unix time in seconds.
    """
    points = []
    for time_s, sample in samples:
        values = {}
        if "cpu" in sample:
            values["cpu_utilization_percentage"] = 100 * sample["cpu"]
            values["system_memory_usage_megabytes"] = sample["memory_bytes"] / 1e6
        for gpu, use in sample["gpus"].items():
            values[f"gpu_{gpu}_memory_usage_megabytes"] = use["memory_bytes"] / 1e6
            if "utilization" in use:
                values[f"gpu_{gpu}_utilization_percentage"] = 100 * use["utilization"]
        after_s = max(time_s - start_s, 0.0)
        for name, value in values.items():
            metric = key_name(f"system/{sample['node']}/{name}")
            points.append(Point(metric, value, int(after_s), after_s))
    return points


# ---- points of curves ----------------------------------------------------------------------------
def history_points(rows: Sequence[Row], step: str) -> list[Point]:
    """Return the points of the curves of a training stage, over epochs counted from 1.

    Args:
        rows: Training history, one row for each epoch.
        step: Step of the stage, for example `train`. The names of the curves begin with it:
            `train/loss`, `train/val_accuracy`.
    """
    points = []
    seconds = 0.0
    for epoch, row in enumerate(rows, 1):
        seconds += float(row.get("seconds") or 0)
        values = {name: value for name, value in row.items() if name not in NOT_CURVES}
        if row.get("val_total"):
            values["val_accuracy"] = row["val_correct"] / row["val_total"]
        for name, value in values.items():
            if value is not None and math.isfinite(value):
                points.append(Point(key_name(f"{step}/{name}"), float(value), epoch, seconds))
    return points


def matrix_points(matrix: Matrix) -> list[Point]:
    """Return `acc/TASK` for every known entry, and the averages of every complete row.

    The step of a point is the number of tasks that were learned before the task of the matrix row.
    The curve of a task begins with the evaluation directly after this task was learned. The caller
    drops further points of constant curves, see `drop_constant_curves`.
    """
    points = []
    for after, on_task in np.ndindex(matrix.source.shape):
        has_begun = matrix.source[on_task, on_task] == "measured"
        if has_begun and matrix.source[after, on_task] in ("measured", "follows"):
            name = key_name(f"acc/{matrix.tasks[on_task]}")
            points.append(Point(name, float(matrix.rates[after, on_task]), after, after))
    names = [metric.name for metric in metrics_for("mlflow")]
    for prefix, metric in product(EXTRA_COUNTS, metrics_for("variants")):
        names.append(f"{prefix}_{metric.name}")
    for after, row in enumerate(matrix.over_time[: matrix.finished]):
        for name in names:
            value = row.get(name, math.nan)
            if math.isfinite(value):
                points.append(Point(name, value, after, after))
    return points


def drop_constant_curves(points: Sequence[Point]) -> list[Point]:
    """Keep only the first point of each curve that is constant up to rounding.

    MLflow shows a metric with one point as a number, and other metrics as charts.
    """
    first_values: dict[str, float] = {}
    varying_names = set()
    for point in points:
        first = first_values.setdefault(point.name, point.value)
        if not math.isclose(point.value, first, rel_tol=ROUNDING, abs_tol=ROUNDING):
            varying_names.add(point.name)
    names: set[str] = set()
    chosen_points = []
    for point in points:
        if point.name not in names or point.name in varying_names:
            chosen_points.append(point)
        names.add(point.name)
    return chosen_points


def size_points(rows: Sequence[Row]) -> list[Point]:
    """Return the points `size/KIND` in bytes, and `growth`, after each finished task.

    Growth is the size of everything that must be kept, relative to the size of the backbone.

    Args:
        rows: Rows of `RunTables.sizes`.
    """
    points = []
    for row in rows:
        after = row["after_index"]
        for kind, value in row.items():
            if kind not in NOT_BYTES:
                points.append(Point(f"size/{kind}", float(value), after, after))
        if row["growth"]:
            points.append(Point("growth", row["growth"], after, after))
    return points


def pick_points(rows: Sequence[Row]) -> list[Point]:
    """Return the points `picked_right/TASK` after each task.

    The value is the share of images whose task was inferred correctly. A curve begins at the same
    step as the curve `acc/TASK`.

    Args:
        rows: Rows of `RunTables.picks`.
    """
    begun_tasks = {row["task"] for row in rows if row["images"] and row["task"] == row["after"]}
    points = []
    for row in rows:
        if row["images"] and row["task"] in begun_tasks:
            after = row["after_index"]
            name = key_name(f"picked_right/{row['task']}")
            points.append(Point(name, row["share_right"], after, after))
    return points


def mask_points(view: MaskView | None) -> list[Point]:
    """Return the points `keep/KIND`: share of the entries that the masks of a kind keep.

    The entries of all blocks count together. Without masks (None), the result is empty.
    """
    if view is None:
        return []
    kept_entries: Counter[str] = Counter()
    all_entries: Counter[str] = Counter()
    for row in view.rows():
        kept_entries[row["kind"]] += row["kept"]
        all_entries[row["kind"]] += row["size"]
    points = []
    for kind, entries in all_entries.items():
        share = kept_entries[kind] / entries
        points.append(Point(key_name(f"keep/{kind}"), share, 0, 0))
    return points


def analysis_points(
    run: str, attention: Sequence[Row], robustness: Sequence[Row], images: int
) -> dict[str, list[Point]]:
    """Return the measurements of the command `analyse`: label of a method -> points.

    For attention, a value is the mean over tasks and heads, and the step is the block. For
    robustness, a value is the mean accuracy over tasks, and the step is the level of the
    disturbance: the occluded share in per cent, epsilon of the attack (pixels from 0 to 255), or 0
    for another data source. Measurements with more images get a later time, so MLflow shows these
    if a run was analysed twice.

    Args:
        run: Name of the run.
        attention: Rows of the table `attention`.
        robustness: Rows of the table `robustness`.
        images: Number of images per task.
    """
    values: dict[tuple[str, str, int], list[float]] = {}
    for row in [*attention, *robustness]:
        if row["run"] == run:
            for name, value, step in _analysis_values(row):
                values.setdefault((row["label"], name, step), []).append(value)
    points: dict[str, list[Point]] = {}
    for (label, name, step), samples in values.items():
        mean = sum(samples) / len(samples)
        points.setdefault(label, []).append(Point(key_name(name), mean, step, images / 1000))
    return points


def _analysis_values(row: Row) -> list[tuple[str, float, int]]:
    """Return (name, value, step) of a row of the table `attention` or `robustness`.

    For `shifted` images, only the rows of the other data source are used. The rows for comparison,
    with images of the task's own source, give no points.
    """
    if "block" in row:
        values = (
            ("attention_entropy", row["entropy"]),
            ("attention_distance", row["distance"]),
            # rows of earlier versions lack it
            ("attention_distance_to_others", row.get("distance_to_others")),
            ("context_scale", row["scale"]),
        )
        return [(name, value, row["block"]) for name, value in values if value is not None]
    if row["kind"] == "shifted":
        if row["images"] != row["card"]:
            return []
        return [(f"accuracy_shifted/{row['card']}", row["accuracy"], 0)]
    if row["kind"] == "occlusion":
        percent = round(100 * row["level"])
        return [("accuracy_occluded", row["accuracy"], percent)]
    return [("accuracy_fgsm", row["accuracy"], round(row["level"]))]


# ---- files of a method and of a task -------------------------------------------------------------
def method_files(tables: RunTables, label: str, with_pictures: bool = True) -> dict[str, bytes]:
    """Return the files of a method that are written again after every task.

    The files are the accuracy matrix as a heat map, JSON, CSV and Parquet, and tables of averages,
    sizes and inferred tasks.
    """
    matrix = tables.matrix(label)
    rows = matrix_rows(matrix)
    body = {
        "tasks": matrix.tasks,
        "rows": "after learning",
        "columns": "accuracy on task",
        "correct": to_nested_lists(matrix.correct, is_count=True),
        "total": to_nested_lists(matrix.total, is_count=True),
        "accuracy": to_nested_lists(matrix.rates),
        "source": matrix.source.tolist(),
    }
    contents = {
        "accuracy_matrix.json": json.dumps(body, indent=1).encode(),
        "accuracy_matrix.csv": files.as_csv(percent_rows(matrix)),
        "accuracy_matrix.parquet": files.as_parquet(rows),
    }
    if with_pictures:
        contents["accuracy_matrix.png"] = plots.to_png(plots.draw_matrix(matrix))
    if matrix.finished:
        averages = []
        for index, row in enumerate(matrix.over_time[: matrix.finished]):
            averages.append({"after": matrix.tasks[index], **row})
        contents["averages.csv"] = files.as_csv(averages)
    sizes = tables.sizes(label)
    if sizes:
        contents["sizes.csv"] = files.as_csv(sizes)
    picks = tables.picks(label)
    if picks:
        contents["picks.csv"] = files.as_csv(picks)
    picked = tables.pick_counts(label)
    if picked is not None:
        picked_rows = count_rows("images of", picked.tasks, picked.candidates, picked.counts)
        if with_pictures:
            contents["picked.png"] = plots.to_png(figures.draw_picks(label, picked))
        contents["picked.csv"] = files.as_csv(picked_rows)
    return contents


def count_rows(
    name: str, row_names: Sequence[str], column_names: Sequence[str], counts: NDArray[np.int64]
) -> list[Row]:
    """Convert a matrix of counts to rows of a table. `name` is the column with the row names."""
    rows: list[Row] = []
    for row_name, row_counts in zip(row_names, counts.tolist(), strict=True):
        columns = dict(zip(column_names, row_counts, strict=True))
        rows.append({name: row_name, **columns})
    return rows


def percent_rows(matrix: Matrix) -> list[Row]:
    """Return the accuracy matrix in per cent: one row per learned task, one column per task."""
    rows: list[Row] = []
    for after, accuracies in zip(matrix.tasks, matrix.rates.tolist(), strict=True):
        row: Row = {"after learning": after}
        for task, accuracy in zip(matrix.tasks, accuracies, strict=True):
            row[task] = None
            if not math.isnan(accuracy):
                row[task] = round(100 * accuracy, 2)
        rows.append(row)
    return rows


def task_files(
    tables: RunTables, label: str, task: str, views: Sequence[MaskView]
) -> dict[str, bytes]:
    """Return pictures and tables of the masks and tokens of a task.

    Pictures of all tasks together are in the report. The result is empty if `views` does not end
    with this task.

    Args:
        tables: Tables of the run.
        label: Label of the method.
        task: Name of the task.
        views: Masks of the tasks so far; the masks of this task are last.
    """
    if not views or views[-1].task != task:
        return {}
    view = views[-1]
    pictures: dict[str, Figure | None] = {
        "density": mask_plots.draw_density([view]),
        "mask_layers": mask_plots.draw_layers(view),
        "tokens": mask_plots.draw_prompts(views),
    }
    contents: dict[str, bytes] = {}
    if view.tokens is not None:
        tokens = figures.draw_run_token_masks(tables, [view], most_blocks=12)
        contents["token_masks.png"] = plots.to_png(tokens)
    if view.bits:
        contents["masks.csv"] = files.as_csv(view.rows())
    if view.prompts:
        contents["tokens.csv"] = files.as_csv(token_rows(view))
    for name, figure in pictures.items():
        if figure is not None:
            contents[f"{name}.png"] = plots.to_png(figure)
    overlaps = overlap_rows(list(views))
    if overlaps:
        rows = [row for row in overlaps if task in (row["task"], row["other"])]
        contents["overlap.csv"] = files.as_csv(rows)
    return contents


def token_rows(view: MaskView) -> list[Row]:
    """Return one row for each learned token of a task: name, number and values."""
    rows: list[Row] = []
    for name, tokens in view.prompts.items():
        for number, values in enumerate(tokens.tolist()):
            row: Row = {"task": view.task, "name": name, "token": number}
            row |= {f"value_{index}": value for index, value in enumerate(values)}
            rows.append(row)
    return rows


def confusion_files(tables: RunTables, label: str, task: str) -> dict[str, bytes]:
    """Return files of the confusion matrix of a task, measured directly after it was learned.

    The result is empty if the matrix was not measured.
    """
    confusion = tables.confusion(label, task, task)
    if confusion is None:
        return {}
    counts, names = confusion
    figure = plots.draw_confusion(counts, names, f"{label}: {task}")
    rows = count_rows("true class", names, names, counts)
    return {"confusion.png": plots.to_png(figure), "confusion.csv": files.as_csv(rows)}


# ---- files of a finished report ------------------------------------------------------------------
def method_report_files(report: Mapping[str, bytes], label: str) -> dict[str, bytes]:
    """Return the pictures of one method from a finished report.

    In the returned names, the label is left out, and the folder is `report/`.

    Args:
        report: Name -> content of the files of the report.
        label: Label of the method.
    """
    contents = {}
    for template in figures.METHOD_FIGURES:
        picture = report.get(template.format(label=label))
        if picture is not None:
            contents[f"report/{template.replace('-{label}', '')}"] = picture
    return contents


def run_report_files(report: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the files of a finished report that belong to the run as a whole.

    These are the page, the graph, the comparisons, the files for a paper, and the tables. The
    tables are returned with the folder `tables/` in their names.
    """
    contents = {}
    for name, data in report.items():
        if name in (*figures.RUN_FIGURES, "report.html", "graph.svg"):
            contents[name] = data
        elif name.endswith((".csv", ".parquet")):
            contents[f"tables/{name}"] = data
        elif name.endswith((".tex", ".md", ".pdf", ".svg")):
            contents[name] = data
    return contents
