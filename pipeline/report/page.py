"""The report of a run: one self-contained HTML page, and its tables and plots as files."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from urllib.parse import quote

from pipeline.config.settings import check
from pipeline.graph import diagram
from pipeline.graph.run_record import RunRecord, graph_of_record
from pipeline.report import figures, files, paper
from pipeline.report.comparison import Comparison
from pipeline.report.figures import Picture
from pipeline.report.html_parts import (
    format_seconds,
    format_value,
    format_yaml,
    plural,
    render_document,
    render_facts,
    render_failures,
    render_gpu_use,
    render_links,
    render_long_table,
    render_picture,
    render_table,
    render_warnings,
)
from pipeline.report.plots import format_bytes
from pipeline.report.replicas import comparison_of
from pipeline.report.table_section import render_table_of_tasks
from pipeline.results.masks import MaskView, capacity, kinds, overlap_rows
from pipeline.results.metrics import Metric, metrics_for
from pipeline.results.tables import Row, RunTables
from workers.errors import UserError

# a graph picture up to this many pixels wide is shrunk to the page, a wider one is scrolled
FITS = 1500
MOST_TASKS = 12  # named in the head of the page


def build(
    storage: str,
    record: RunRecord,
    failures: Mapping[str, str] | None = None,
    gpu_use: Sequence[str] = (),
) -> dict[str, bytes]:
    """Return all files of the report by name: the page, the graph, tables, pictures.

    Args:
        storage: Folder or URI of the results.
        record: The run record.
        failures: Id of a stage that failed -> why.
        gpu_use: Sentences on how busy each GPU was; empty without GPUs.
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
    page = render_page(tables, run_pictures, method_pictures, graph_svg, failures or {}, gpu_use)
    report_files["report.html"] = page.encode()
    if tables.labels:
        report_files |= paper.paper_files(one_run(tables))
    return report_files | files.csv_and_parquet(rows)


def one_run(tables: RunTables) -> Comparison:
    """Return the methods of a run beside each other, as those of a run of several seeds are."""
    return comparison_of(str(tables.record["name"]), {"": tables})


def mask_tables(views_by_method: Iterable[list[MaskView]]) -> dict[str, list[Row]]:
    """Return the tables of masks by name, without empty ones."""
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
    run_pictures: Sequence[Picture],
    method_pictures: Mapping[str, Sequence[Picture]],
    graph_svg: str,
    failures: Mapping[str, str],
    gpu_use: Sequence[str] = (),
) -> str:
    """Return the page as HTML. method_pictures: by label."""
    sections = [render_head(tables), render_failures(failures)]
    sections += [render_warnings(tables.warnings()), render_summary(tables)]
    if tables.labels:
        sections.append(render_table_of_tasks(one_run(tables)))
    sections += map(render_picture, run_pictures)
    for label, pictures in method_pictures.items():
        sections.append(f'<h2 id="method-{escape(label)}">Method {escape(label)}</h2>')
        sections.append(render_method(tables, label))
        sections += map(render_picture, pictures)
        sections.append(render_picks(tables, label))
    sections.append(render_sizes(tables))
    sections.append(render_graph(graph_svg))
    sections.append(render_stages(tables))
    sections.append(render_gpu_use(gpu_use))
    sections.append(render_training(tables))
    sections.append(render_settings(tables))
    return render_document(escape(str(tables.record["name"])), sections)


# ---- head ----------------------------------------------------------------------------------------
def render_head(tables: RunTables) -> str:
    """Return title, state, introduction and links."""
    record = tables.record
    config = record["config"]
    backbone = config.get("backbone", {})
    tasks = [task["name"] for task in record["tasks"]]
    task_names = ", ".join(map(escape, tasks[:MOST_TASKS]))
    if len(tasks) > MOST_TASKS:
        task_names += f" and {len(tasks) - MOST_TASKS} more"
    test_protocol = "At test time the task of each image is given."
    if tables.scenario != "task":
        test_protocol = (
            "At test time the task of an image is not given: the model chooses among all classes "
            "learned so far."
        )
    links = [("summary", "Summary"), ("table", "Methods and tasks")]
    links += [(f"method-{label}", label) for label in tables.labels]
    links += [("sizes", "Sizes"), ("graph", "Graph"), ("stages", "Stages")]
    links += [("training", "Training"), ("settings", "Settings")]
    return (
        f"<h1>{escape(str(record['name']))}</h1>"
        f"<div class=soft>{len(tables.labels)} method{plural(len(tables.labels))} · "
        f"{len(tasks)} tasks · scenario {escape(tables.scenario)} · seed {config.get('seed', 0)} · "
        f"started {escape(str(record.get('created', '')))} · {_progress(tables)}</div>"
        "<p style='margin-top:14px'>One vision transformer "
        f"(<code>{escape(str(backbone.get('name', '')))}</code>; {_origin(tables)}) learns these "
        f"tasks one after the other: {task_names}. Each method below learns them in its own way. "
        "After every task the model is tested on all tasks learned so far, with test images that "
        f"are never used for training. {test_protocol}</p>{render_links(links)}"
    )


def _progress(tables: RunTables) -> str:
    stages = [stage["id"] for stage in tables.record["stages"] if stage["step"] != "report"]
    num_done = len([stage_id for stage_id in stages if stage_id in tables.artifacts])
    if num_done == len(stages):
        return "finished"
    return f'<span class="pending">{num_done} of {len(stages)} stages finished so far</span>'


def _origin(tables: RunTables) -> str:
    """Return where the backbone's weights come from."""
    for task in tables.record["tasks"]:
        if task["role"] == "base":
            return f"pretrained on <b>{escape(task['name'])}</b>"
    weights = str(tables.record["config"].get("backbone", {}).get("weights", "none"))
    return f"weights: {escape(weights.rsplit('/', 1)[-1])}"


# ---- summary -------------------------------------------------------------------------------------
VERDICTS = {
    "identical": '<span class="done">identical</span>',
    "changed": '<span class="bad">changed</span>',
    "not measured again": "-",
}


def render_summary(tables: RunTables) -> str:
    """Return the table with one row per method."""
    rows = tables.summary()
    keys: set[str] = set()
    for row in rows:
        keys.update(row)
    columns = [metric for metric in metrics_for("report") if metric.name in keys]
    is_comparable = len({(row["tasks_finished"], row["tasks"]) for row in rows}) == 1
    best = _best_values(rows, columns) if is_comparable else {}
    heading = "<th class=left>method</th>"
    for column in columns:
        heading += f'<th title="{escape(column.meaning)}">{_lines(column)}</th>'
    logits_meaning = "whether the logits on earlier tasks stayed bit-identical"
    heading += f'<th title="{logits_meaning}">earlier<br>logits</th>'
    body = "".join(_render_summary_row(row, columns, best) for row in rows)
    hint = ""
    if best:
        hint = (
            "; the best of a size is bold. Accuracies of one seed are not: without other seeds a "
            "lead may be chance"
        )
    elif not is_comparable:
        hint = "; the methods have not finished the same number of tasks yet"
    meanings = [f"<b>{c.heading or c.title}</b>: {c.meaning}" for c in columns]
    meanings.append(
        f"<b>earlier logits</b>: {logits_meaning}, for tasks that were tested again later "
        "(compared by sha256)"
    )
    return (
        f'<h2 id="summary">Summary</h2><p>One row per method{hint}.</p>'
        f'<div class="scroll"><table class="summary"><tr>{heading}</tr>{body}</table></div>'
        f"<details><summary>What the columns mean</summary><p>{'; '.join(meanings)}.</p></details>"
    )


def _lines(column: Metric) -> str:
    return escape(column.heading or column.title).replace("\n", "<br>")


def _best_values(rows: Sequence[Row], columns: Sequence[Metric]) -> dict[str, float]:
    """Return the best value of each size that has at least two values."""
    best = {}
    for column in columns:
        values = [row[column.name] for row in rows if row.get(column.name) is not None]
        values = [value for value in values if not math.isnan(value)]
        if column.better is not None and column.unit != "rate" and len(set(values)) > 1:
            best[column.name] = column.better(values)
    return best


def _render_summary_row(row: Row, columns: Sequence[Metric], best: Mapping[str, float]) -> str:
    label = escape(row["label"])
    name = f'<a href="#method-{label}"><b>{label}</b></a>'
    if row["method"] != row["label"]:
        name += f" <span class=soft>{escape(row['method'])}</span>"
    if row["tasks_finished"] != row["tasks"]:
        progress = f"after {row['tasks_finished']} of {row['tasks']} tasks"
        name += f'<br><span class="pending">{progress}</span>'
    cells = f"<td class=left>{name}</td>"
    for column in columns:
        value = row.get(column.name)
        is_best = column.name in best and value == best[column.name]
        start = "<td class=best>" if is_best else "<td>"
        cells += f"{start}{format_value(value, column.unit)}</td>"
    return f"<tr>{cells}<td>{VERDICTS[row['answers']]}</td></tr>"


# ---- one method ----------------------------------------------------------------------------------
def render_method(tables: RunTables, label: str) -> str:
    """Return the description of a method; empty when this installation does not have it."""
    from workers.methods import METHODS  # heavy: imports torch

    method = METHODS.get(tables.method(label))
    if method is None:
        return ""
    first_paragraph = (method.__doc__ or "").strip().split("\n\n")[0]
    text = escape(" ".join(first_paragraph.split()))
    text = re.sub(r"`+([^`]+)`+", r"<code>\1</code>", text)
    order = "Its tasks do not depend on each other (a star)."
    if method.carries:
        carried = ", ".join(method.carries)
        order = f"Each task starts from what the previous task carries: {carried} (a chain)."
    return f"<p>{text} {escape(order)} <span class=soft>{escape(method.paper)}</span></p>"


def render_picks(tables: RunTables, label: str) -> str:
    """Return how well a method infers the task after the last finished one; empty for others."""
    picks = tables.pick_counts(label)
    if picks is None:
        return ""
    rows = tables.picks(label)
    last_rows = {row["task"]: row for row in rows if row["after_index"] == rows[-1]["after_index"]}
    body = []
    for task, counts in zip(picks.tasks, picks.counts, strict=True):
        row = last_rows[task]
        body.append(
            [
                task,
                row["images"],
                format_value(row["share_right"], "rate"),
                format_value(row["confidence_right"], "rate"),
                format_value(row["confidence_wrong"], "rate"),
                picks.candidates[int(counts.argmax())],
            ]
        )
    heading = [
        "images of",
        "images",
        "inferred right",
        "confidence when right",
        "when wrong",
        "most often inferred",
    ]
    return (
        f"<h3>Task inference</h3><p>After {escape(rows[-1]['after'])}: the task of an image is not "
        f"given; the method infers it.</p>{render_table(heading, body, 1)}"
    )


# ---- sizes, graph, stages, settings --------------------------------------------------------------
SIZE_COLUMNS = {  # of a row of sizes that are no kind of stored bytes
    "label",
    "after_index",
    "after",
    "role",
    "total",
    "growth",
    "trained_parameters",
    "flops_share",
    "task_bytes",
}


def render_sizes(tables: RunTables) -> str:
    """Return the table of stored bytes after each task; empty before the first one."""
    rows: list[Row] = []
    for label in tables.labels:
        rows += tables.sizes(label)
    if not rows:
        return ""
    bytes_by_kind: dict[str, int] = {}
    for row in rows:
        for name, value in row.items():
            if name not in SIZE_COLUMNS:
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
    return (
        '<h2 id="sizes">Sizes</h2><p>What has to be stored after each task, summed over the tasks '
        "so far: masks as packed bits, everything else as it is in the store. <b>carried</b> is "
        "the state carried to the next task; a method that retrains the whole backbone carries a "
        "changed copy of it. <b>growth</b> is the total divided by the backbone.</p>"
        f"{render_long_table(heading, body, 2, 'rows')}"
    )


def draw_graph(tables: RunTables, page: str) -> str:
    """Return the picture of the graph as SVG, with the state and the time of each stage; a box
    leads to the row of its stage.

    page: path of the page from the picture; empty inside the page.
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
    return diagram.to_svg(graph_of_record(tables.record), status, times, links)


def anchor(stage_id: str) -> str:
    """Return the name of a stage's row in the page."""
    return f"stage-{stage_id}"


def render_graph(svg: str) -> str:
    """Return the picture of the graph; empty without one."""
    if not svg:
        return ""
    body = svg[svg.index("<svg") :] if "<svg" in svg else ""
    width = re.search(r'<svg[^>]* width="([0-9.]+)', body)
    if width and float(width.group(1)) < FITS:
        body = body.replace("<svg", '<svg style="max-width:100%;height:auto"', 1)
    return (
        '<h2 id="graph">Graph</h2><p>Each box is a stage with a stored result of its own, and the '
        "time that it took. A line means that the stage on the right needs the one on the left. "
        "Stages without a path between them can run at the same time. A click leads to the stage's "
        f'row below.</p><div class="scroll tall">{body}</div>'
    )


def render_stages(tables: RunTables) -> str:
    """Return the table of stages."""
    rows = tables.stage_rows()
    wall_s = sum(row["wall_s"] or 0 for row in rows)
    body = [_stage_cells(row) for row in rows]
    heading = ["stage", "state", "wall time", "stored", "device", "key"]
    table = render_long_table(heading, body, 1, "stages", is_html=True)
    return (
        '<h2 id="stages">Stages</h2><p>The steps of the run, and how long each took when it was '
        f"computed: {format_seconds(wall_s)} in all. A finished stage is not run again while its "
        f"inputs stay the same.</p>{table}"
    )


def _stage_cells(row: Row) -> list[str]:
    return [
        f'<code id="{escape(anchor(row["stage"]))}">{escape(row["stage"])}</code>',
        f'<span class="{row["state"]}">{row["state"]}</span>',
        format_value(row["wall_s"], "seconds"),
        format_bytes(row["bytes"]),
        escape(str(row["device"] or "-")),
        f"<code>{row['key'][:12]}</code>",
    ]


def render_training(tables: RunTables) -> str:
    """Return the table of what each step trained with; empty without training."""
    steps = tables.training()
    if not steps:
        return ""
    body = []
    for step in steps:
        name = escape(f"{step.label} {step.step}")
        counted = f"{len(step.lengths)} of {len(step.tasks)}"
        body.append([name, escape(step.optimizer_text()), escape(step.length_text()), counted])
    heading = ["step", "optimizer", "length", "tasks finished"]
    return (
        '<h2 id="training">Training</h2><p>What each step trained with: the settings of the '
        "config, and the method's own defaults where the config says nothing. A task of few images "
        f"gets smaller batches and more epochs.</p>{render_table(heading, body, 3)}"
    )


def render_method_settings(tables: RunTables) -> str:
    """Return the settings that each method ran with, its own defaults included.

    Empty for a record of another version, whose settings are not those of today.
    """
    from workers.methods import METHODS  # heavy: imports torch

    try:
        config = check(dict(tables.record["config"]), "the record")
    except (UserError, TypeError):
        return ""
    body = []
    for label in tables.labels:
        entry = config.methods[label]
        settings = METHODS[entry.method].Settings.model_validate(entry.settings)
        for name, value in settings.model_dump(mode="json", by_alias=True).items():
            origin = "set" if name in entry.settings else "default"
            body.append([label, name, json.dumps(value), origin])
    if not body:
        return ""
    table = render_long_table(["method", "setting", "value", "from"], body, 4, "settings")
    return f"<p>The methods' own settings in effect:</p>{table}"


def render_backbone(tables: RunTables) -> str:
    """Return the settings of the backbone in effect, those of timm's configuration included; empty
    for a record without them."""
    for stage in tables.record["stages"]:
        settings = stage["inputs"].get("backbone")
        if stage["step"] == "backbone" and isinstance(settings, dict):
            facts = [(name, json.dumps(value)) for name, value in settings.items()]
            return f"<p>The backbone in effect:</p>{render_facts(facts)}"
    return ""


def render_settings(tables: RunTables) -> str:
    """Return the config of the run, and commit, device and package versions of its stages."""
    config = format_yaml(tables.record["config"])
    facts = [(name, ", ".join(values)) for name, values in tables.environment().items()]
    return (
        '<h2 id="settings">Settings and environment</h2><p>The complete config. Save it as a file '
        f"to run it again.</p><pre><code>{config}</code></pre>{render_method_settings(tables)}"
        f"{render_backbone(tables)}"
        f"<p>Environment of the stages:</p>{render_facts(facts)}"
    )
