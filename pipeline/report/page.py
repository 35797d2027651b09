"""The report of a run: a self-contained HTML page, and its tables and figures as files."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from markupsafe import Markup, escape

from pipeline.config.settings import check
from pipeline.config.text import format_bytes, format_seconds
from pipeline.graph import diagram
from pipeline.graph.run_record import RunRecord, build_recorded_graph
from pipeline.report import figures, files, paper
from pipeline.report.comparison import Comparison
from pipeline.report.figures import FigureFile
from pipeline.report.html_parts import format_value, render_markup
from pipeline.report.replicas import compare_replicas
from pipeline.report.table_section import render_table_of_tasks
from pipeline.results.masks import MaskView, capacity, kinds, overlap_rows
from pipeline.results.metrics import Metric, metrics_for
from pipeline.results.tables import NOT_BYTES, Row, RunTables
from workers.errors import UserError
from workers.methods import METHODS

# a picture of the graph below this width in pixels is shrunk to the page; a wider one scrolls
MAX_FITTED_WIDTH = 1500
MAX_TASKS = 12  # maximum number of tasks that the head of the page lists


def build_run_report(
    storage: str,
    record: RunRecord,
    failures: Mapping[str, str] | None = None,
    gpu_use: Sequence[str] = (),
) -> dict[str, bytes]:
    """Build all files of the report: the page, the graph, tables and pictures.

    Args:
        storage: Folder or URI of the results.
        record: The run record.
        failures: Id of a failed stage -> reason.
        gpu_use: Sentences on the utilisation of each GPU; empty without GPUs.

    Returns:
        File name -> content.
    """
    tables = RunTables.load(storage, record)
    views = {label: figures.load_mask_views(tables, label) for label in tables.labels}
    run_pictures = figures.run_pictures(tables)
    method_pictures = {
        label: figures.method_pictures(tables, label, views[label]) for label in tables.labels
    }
    rows = tables.tables() | mask_tables(views.values())
    report_files = {}
    for picture in run_pictures:
        report_files[picture.name] = picture.png
    for pictures in method_pictures.values():
        report_files |= {picture.name: picture.png for picture in pictures}
    report_files["graph.svg"] = draw_graph(tables, "report.html").encode()
    graph_svg = draw_graph(tables, "")
    comparison = compare_methods(tables) if tables.labels else None
    page = render_page(
        tables, comparison, run_pictures, method_pictures, graph_svg, failures or {}, gpu_use
    )
    report_files["report.html"] = page.encode()
    if comparison is not None:
        report_files |= paper.paper_files(comparison)
    return report_files | files.csv_and_parquet(rows)


def compare_methods(tables: RunTables) -> Comparison:
    """Return the comparison of the methods of one run, as a run with a single replica."""
    seed = str(tables.record["config"].get("seed", ""))
    return compare_replicas(str(tables.record["name"]), {seed: tables})


def mask_tables(views_by_method: Iterable[list[MaskView]]) -> dict[str, list[Row]]:
    """Return name -> rows of the tables about masks, without empty tables."""
    tables: dict[str, list[Row]] = {"masks": [], "overlap": [], "capacity": []}
    for views in views_by_method:
        for view in views:
            tables["masks"] += view.rows()
        tables["overlap"] += overlap_rows(views)
        for kind in kinds(views):
            tables["capacity"] += capacity(views, kind)
    return {name: rows for name, rows in tables.items() if rows}


def render_page(
    tables: RunTables,
    comparison: Comparison | None,
    run_pictures: Sequence[FigureFile],
    method_pictures: Mapping[str, Sequence[FigureFile]],
    graph_svg: str,
    failures: Mapping[str, str],
    gpu_use: Sequence[str] = (),
) -> str:
    """Render the page.

    Args:
        tables: Results of the run.
        comparison: Comparison of the methods. None: the run has no method.
        run_pictures: Pictures of all methods together.
        method_pictures: Label -> pictures of the method.
        graph_svg: Picture of the graph as SVG; empty for no picture.
        failures: Id of a failed stage -> reason.
        gpu_use: Sentences on the utilisation of each GPU.
    """
    record = tables.record
    stages = [stage["id"] for stage in record["stages"] if stage["step"] != "report"]
    stage_rows = tables.stage_rows()
    size_heading, sizes = size_cells(tables)
    links = [("summary", "Summary"), ("table", "Methods and tasks")]
    links += [(f"method-{label}", label) for label in tables.labels]
    links += [("sizes", "Sizes"), ("graph", "Graph"), ("stages", "Stages")]
    links += [("training", "Training"), ("settings", "Settings")]
    return render_markup(
        "report.html",
        title=record["name"],
        config=record["config"],
        backbone=record["config"].get("backbone", {}),
        base_task=next((t["name"] for t in record["tasks"] if t["role"] == "base"), None),
        created=record.get("created", ""),
        scenario=tables.scenario,
        has_slices=any("shares" in task for task in tables.record["tasks"]),
        labels=tables.labels,
        tasks=[task["name"] for task in record["tasks"]],
        MAX_TASKS=MAX_TASKS,
        num_done=len([stage_id for stage_id in stages if stage_id in tables.artifacts]),
        num_stages=len(stages),
        page_links=links,
        failed=failures,
        warned=tables.warnings(),
        summary=render_summary(tables),
        table_of_tasks="" if comparison is None else render_table_of_tasks(comparison),
        run_pictures=run_pictures,
        methods=[
            {
                "label": label,
                "pictures": pictures,
                "picks": render_picks(tables, label),
                **get_method_summary(tables, label),
            }
            for label, pictures in method_pictures.items()
        ],
        size_heading=size_heading,
        sizes=sizes,
        graph=_fit_graph(graph_svg),
        stages=[_stage_cells(row) for row in stage_rows],
        wall_s=sum(row["wall_s"] or 0 for row in stage_rows),
        gpu_sentences=gpu_use,
        training=training_cells(tables),
        method_settings=list_method_settings(tables),
        backbone_settings=backbone_settings(tables),
        environment=[(name, ", ".join(values)) for name, values in tables.environment().items()],
    )


def render_summary(tables: RunTables) -> Markup:
    """Render the table with one row per method.

    The best sizes are bold only if all methods have finished the same number of tasks.
    """
    rows = tables.summary()
    keys: set[str] = set()
    for row in rows:
        keys.update(row)
    columns = [metric for metric in metrics_for("report") if metric.name in keys]
    is_comparable = len({(row["tasks_finished"], row["tasks"]) for row in rows}) == 1
    best = _best_values(rows, columns) if is_comparable else {}
    return render_markup(
        "summary.html", rows=rows, columns=columns, is_comparable=is_comparable, best=best
    )


def _best_values(rows: Sequence[Row], columns: Sequence[Metric]) -> dict[str, str]:
    """Return column -> best value, formatted as on the page.

    Columns whose `better` is None or that have fewer than two distinct values are omitted, and so
    are rates: the lead of an accuracy of one seed may be chance.
    """
    best = {}
    for column in columns:
        if column.better is None or column.unit == "rate":
            continue
        values = [row[column.name] for row in rows if row.get(column.name) is not None]
        values = [value for value in values if not math.isnan(value)]
        if len({format_value(value, column.unit) for value in values}) > 1:
            best[column.name] = format_value(column.better(values), column.unit)
    return best


# ---- one method ----------------------------------------------------------------------------------
def get_method_summary(tables: RunTables, label: str) -> dict[str, Any]:
    """Return `text` (a summary as HTML), and `carries` and `paper` (see `Method`) of a method.

    If the method is not installed, for example a method of a plugin, the result has only an empty
    `text`.
    """
    method = METHODS.get(tables.method(label))
    if method is None:
        return {"text": ""}
    first_paragraph = (method.__doc__ or "").strip().split("\n\n")[0]
    html = re.sub(r"`+([^`]+)`+", r"<code>\1</code>", escape(" ".join(first_paragraph.split())))
    return {"text": Markup(html), "carries": method.carries, "paper": method.paper}


def render_picks(tables: RunTables, label: str) -> Markup:
    """Render the table of inferred tasks after the last finished task.

    The last column is the task that was inferred most often. The result is empty for methods that
    do not infer the task.
    """
    picks = tables.pick_counts(label)
    if picks is None:
        return Markup()
    rows = tables.picks(label)
    last_rows = {row["task"]: row for row in rows if row["after_index"] == rows[-1]["after_index"]}
    cells = []
    for task, counts in zip(picks.tasks, picks.counts, strict=True):
        row = last_rows[task]
        names = ("share_right", "confidence_right", "confidence_wrong")
        shares = [format_value(row[name], "rate") for name in names]
        cells.append([task, row["images"], *shares, picks.candidates[int(counts.argmax())]])
    return render_markup("picks.html", after=rows[-1]["after"], rows=cells)


# ---- sizes, graph, stages, settings --------------------------------------------------------------
def size_cells(tables: RunTables) -> tuple[list[str], list[list[str]]]:
    """Return the heading and the cells of the table of stored bytes after each task.

    No cells are returned until the first task is finished.
    """
    rows: list[Row] = []
    for label in tables.labels:
        rows += tables.sizes(label)
    bytes_by_kind: dict[str, int] = {}
    for row in rows:
        for name, value in row.items():
            if name not in (*NOT_BYTES, "total", "task_bytes"):
                bytes_by_kind[name] = bytes_by_kind.get(name, 0) + (value or 0)
    byte_kinds = [kind for kind, size in bytes_by_kind.items() if size]
    heading = ["method", "after task", "this task", *byte_kinds]
    heading += ["total", "growth", "trained parameters", "FLOPs per image"]
    body = []
    for row in rows:
        cells = [row["label"], row["after"], format_bytes(row["task_bytes"])]
        cells += [format_bytes(row.get(kind)) for kind in byte_kinds]
        cells.append(format_bytes(row["total"]))
        cells.append(format_value(row["growth"], "times"))
        cells.append(format_value(row["trained_parameters"], "count"))
        cells.append(format_value(row["flops_share"], "rate"))
        body.append(cells)
    return heading, body


def draw_graph(tables: RunTables, page: str) -> str:
    """Return the picture of the graph as SVG, with the state and the time of each stage.

    Each box links to the row of the stage.

    Args:
        tables: Results of the run.
        page: Path of the page relative to the picture; "" if the picture is part of the page.
    """
    status = {}
    times = {}
    links = {}
    for row in tables.stage_rows():
        stage_id = row["stage"]
        status[stage_id] = row["state"]
        links[stage_id] = f"{page}#{quote(anchor(stage_id))}"
        if row["wall_s"] is not None:
            times[stage_id] = format_seconds(row["wall_s"])
    return diagram.to_svg(build_recorded_graph(tables.record), status, times, links)


def anchor(stage_id: str) -> str:
    """Return the HTML id of a stage's row on the page."""
    return f"stage-{stage_id}"


def _fit_graph(svg: str) -> Markup:
    """Return the picture of the graph as HTML.

    A picture narrower than MAX_FITTED_WIDTH is shrunk to the width of the page.
    """
    body = svg[svg.index("<svg") :] if "<svg" in svg else ""
    width = re.search(r'<svg[^>]* width="([0-9.]+)', body)
    if width and float(width.group(1)) < MAX_FITTED_WIDTH:
        body = body.replace("<svg", '<svg style="max-width:100%;height:auto"', 1)
    return Markup(body)


def _stage_cells(row: Row) -> list[str]:
    code = Markup('<code id="{}">{}</code>')
    return [
        code.format(anchor(row["stage"]), row["stage"]),
        Markup('<span class="{0}">{0}</span>').format(row["state"]),
        format_value(row["wall_s"], "seconds"),
        format_bytes(row["bytes"]),
        str(row["device"] or "-"),
        Markup("<code>{}</code>").format(row["key"][:12]),
    ]


def training_cells(tables: RunTables) -> list[list[str]]:
    """Return the settings and the length of each training step."""
    cells = []
    for step in tables.training():
        counted = f"{len(step.lengths)} of {len(step.tasks)}"
        name = f"{step.label} {step.step}"
        cells.append([name, step.format_optimizer(), step.format_length(), counted])
    return cells


def list_method_settings(tables: RunTables) -> list[list[str]]:
    """Return one row per setting of each method: label, name, value, and `set` or `default`.

    The list is empty if the config in the record is not valid in this version of Accrete.
    """
    try:
        config = check(dict(tables.record["config"]), "the record")
    except (UserError, TypeError):
        return []
    cells = []
    for label in tables.labels:
        entry = config.methods[label]
        settings = METHODS[entry.method].Settings.model_validate(entry.settings)
        for name, value in settings.model_dump(mode="json", by_alias=True).items():
            origin = "set" if name in entry.settings else "default"
            cells.append([label, name, json.dumps(value), origin])
    return cells


def backbone_settings(tables: RunTables) -> list[tuple[str, str]] | None:
    """Return the effective settings of the backbone, including those of timm; None if unknown."""
    for stage in tables.record["stages"]:
        settings = stage["inputs"].get("backbone")
        if stage["step"] == "backbone" and isinstance(settings, dict):
            return [(name, json.dumps(value)) for name, value in settings.items()]
    return None
