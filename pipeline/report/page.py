"""The report of a run: one HTML page that needs nothing else, and its tables and plots as files."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from pipeline.report import figures, files
from pipeline.report.figures import Picture
from pipeline.report.plots import format_bytes
from pipeline.results.masks import capacity, kinds, overlap_rows
from pipeline.results.tables import RunTables
from pipeline.yaml_files import dump_yaml

# a graph picture up to this many pixels wide is shrunk to the page, a wider one is scrolled
FITS = 1500
SOFT = "<span class=soft>-</span>"  # no value
STYLE = """
:root { color-scheme: light; --ink: #1f2328; --soft: #59636e; --line: #d8dee4; --band: #f6f8fa; --blue: #0072B2; }
* { box-sizing: border-box; }
body { margin: 0; font: 15px/1.55 system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; color: var(--ink); background: white; }
main { max-width: 1120px; margin: 0 auto; padding: 28px 32px 64px; }
h1 { font-size: 28px; margin: 0 0 2px; letter-spacing: -0.01em; }
h2 { font-size: 20px; margin: 44px 0 6px; padding-top: 18px; border-top: 1px solid var(--line); }
h3 { font-size: 16px; margin: 26px 0 2px; }
p { margin: 4px 0 10px; max-width: 86ch; }
.soft, figcaption { color: var(--soft); }
nav { margin: 14px 0 0; font-size: 14px; } nav a { margin-right: 16px; }
a { color: var(--blue); text-decoration: none; } a:hover { text-decoration: underline; }
figure { margin: 22px 0 8px; } figure img { max-width: 100%; height: auto; display: block; margin-top: 8px; }
figcaption b { color: var(--ink); } figcaption { max-width: 96ch; }
.scroll { overflow-x: auto; margin: 12px 0; }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { padding: 6px 12px 6px 0; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; vertical-align: bottom; }
th { font-weight: 600; color: var(--soft); font-size: 13px; } th.left, td.left { text-align: left; }
table.summary { width: 100%; } table.summary td { padding-top: 9px; padding-bottom: 9px; }
td .soft { font-size: 13px; } td.best { font-weight: 650; }
.note { border-left: 4px solid #E69F00; background: #fff8e8; padding: 8px 14px; margin: 14px 0; } .note ul { margin: 4px 0; padding-left: 20px; }
pre { background: var(--band); border: 1px solid var(--line); border-radius: 6px; padding: 12px 14px; overflow-x: auto; font-size: 12.5px; line-height: 1.45; }
code { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: 12.5px; }
details { margin: 12px 0; } summary { cursor: pointer; font-weight: 600; }
dl { columns: 2; margin: 8px 0; } dt { float: left; color: var(--soft); margin-right: 8px; }
dd { margin: 0 0 3px; break-inside: avoid; overflow-wrap: anywhere; } .done { color: #1a7f37; } .pending { color: #9a6700; } .bad { color: #b3261e; }
@media print { details { display: block; } main { max-width: none; padding: 0; } figure { break-inside: avoid; } }
"""


def build(storage: str, record: Mapping[str, Any], graph_svg: str = "") -> dict[str, bytes]:
    """All files of the report, by name: `report.html`, the tables as CSV and Parquet, the plots as
    PNG."""
    tables = RunTables.load(storage, record)
    views = {label: figures.load_mask_views(tables, label) for label in tables.labels}
    shared = figures.run_pictures(tables)
    own = {label: figures.method_pictures(tables, label, views[label]) for label in tables.labels}
    rows = tables.tables()
    rows |= {
        name: found
        for name, found in (
            ("masks", [row for some in views.values() for view in some for row in view.rows()]),
            ("overlap", [row for some in views.values() for row in overlap_rows(some)]),
            (
                "capacity",
                [
                    row
                    for some in views.values()
                    for kind in kinds(some)
                    for row in capacity(some, kind)
                ],
            ),
        )
        if found
    }
    pictures = {p.name: p.png for p in [*shared, *(p for some in own.values() for p in some)]}
    return {
        "report.html": render_page(tables, shared, own, graph_svg).encode(),
        **files.csv_and_parquet(rows),
        **pictures,
    }


def render_page(
    tables: RunTables,
    shared: Sequence[Picture],
    own: Mapping[str, Sequence[Picture]],
    graph_svg: str,
) -> str:
    """The page as text."""
    name = escape(str(tables.record["name"]))
    sections = [
        render_head(tables),
        render_warnings(tables),
        render_summary(tables),
        *map(render_picture, shared),
    ]
    for label, pictures in own.items():
        sections.append(
            f'<h2 id="method-{escape(label)}">Method {escape(label)}</h2>{render_method(tables, label)}'
        )
        sections += [*map(render_picture, pictures), render_picks(tables, label)]
    sections += [
        render_sizes(tables),
        render_graph(graph_svg),
        render_stages(tables),
        render_settings(tables),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        'content="width=device-width, initial-scale=1">'
        f"<title>{name} · "
        f"Accrete</title><style>{STYLE}</style></head><body><main>{''.join(sections)}</main></body></html>"
    )


def render_head(tables: RunTables) -> str:
    record, config = tables.record, tables.record["config"]
    done = sum(s["id"] in tables.artifacts for s in record["stages"] if s["step"] != "report")
    total = sum(s["step"] != "report" for s in record["stages"])
    state = (
        "finished"
        if done == total
        else f'<span class="pending">{done} of {total} stages finished so far</span>'
    )
    tasks = [t["name"] for t in record["tasks"]]
    shown = ", ".join(map(escape, tasks[:12])) + (
        f" and {len(tasks) - 12} more" if len(tasks) > 12 else ""
    )
    base = next((t["name"] for t in record["tasks"] if t["role"] == "base"), None)
    grew = (
        f"its first version was trained on <b>{escape(base)}</b>"
        if base
        else "its weights: "
        f"{escape(str(config.get('backbone', {}).get('weights', 'none')).rsplit('/', 1)[-1])}"
    )
    given = (
        "At test time the model is told which task an image belongs to."
        if tables.scenario == "task"
        else "At test time the model is not told which task an image belongs to: it chooses "
        "among all classes seen so far."
    )
    links = "".join(
        f'<a href="#{anchor}">{escape(text)}</a>'
        for anchor, text in [
            ("summary", "Summary"),
            *((f"method-{label}", label) for label in tables.labels),
            ("sizes", "Sizes"),
            ("graph", "Graph"),
            ("stages", "Stages"),
            ("settings", "Settings"),
        ]
    )
    return (
        f"<h1>{escape(str(record['name']))}</h1><div class=soft>{len(tables.labels)} "
        f"method{'s' * (len(tables.labels) != 1)} · {len(tasks)} tasks · "
        f"scenario {escape(tables.scenario)} · seed {config.get('seed', 0)} · started "
        f"{escape(str(record.get('created', '')))} · {state}</div>"
        "<p style='margin-top:14px'>One vision transformer "
        f"(<code>{escape(str(config.get('backbone', {}).get('name', '')))}</code>; {grew}) "
        "meets "
        f"these tasks one after the other: {shown}. Each method below adds the tasks in its own "
        "way. After every task the model is tested on all "
        f"tasks so far, with test images that training never sees. {given}</p><nav>{links}</nav>"
    )


def render_warnings(tables: RunTables) -> str:
    rows = tables.warnings()
    if not rows:
        return ""
    items = "".join(
        f"<li>{escape(r['warning'])} <span "
        f"class=soft>({escape(r['stage'])}{f' and {more} more' if (more := r['stages'] - 1) else ''})"
        "</span></li>"
        for r in rows
    )
    return (
        f'<div class="note"><b>{len(rows)} '
        f"warning{'s' * (len(rows) != 1)}</b><ul>{items}</ul></div>"
    )


# column of the summary: key, heading, what it says, how it is written, which end is best
COLUMNS: tuple[tuple[str, str, str, Any, Any], ...] = (
    (
        "average_accuracy",
        "average<br>accuracy",
        "mean accuracy over all tasks, after the last one",
        "rate",
        max,
    ),
    (
        "last_accuracy",
        "last<br>accuracy",
        "share of right answers over all test images together, after the last task",
        "rate",
        max,
    ),
    (
        "average_incremental_accuracy",
        "average<br>on the way",
        "mean of the last accuracy after the first, second, ... task",
        "rate",
        max,
    ),
    (
        "top5_last_accuracy",
        "top-5<br>last",
        "the same, where it is enough that the right class is among the first five",
        "rate",
        max,
    ),
    (
        "task_aware_average_accuracy",
        "average,<br>task given",
        "mean accuracy over all tasks, choosing among the task's own classes",
        "rate",
        max,
    ),
    (
        "forgetting",
        "forgetting",
        "mean loss of accuracy on old tasks since their best moment",
        "rate",
        min,
    ),
    (
        "bytes_per_task",
        "bytes<br>per task",
        "masks, tokens, head and copies of one task, on average",
        "bytes",
        min,
    ),
    (
        "carried_bytes",
        "carried<br>bytes",
        "what the last task would hand to a next one",
        "bytes",
        None,
    ),
    ("growth", "growth", "all bytes kept, divided by those of the backbone", "times", None),
    (
        "trained_parameters",
        "trained<br>parameters",
        "numbers that the optimizer changes for one task",
        "count",
        None,
    ),
    (
        "flops_share",
        "work per<br>image",
        "operations of one image with masks applied, relative to the plain backbone",
        "rate",
        None,
    ),
)
ANSWERS = {
    "identical": '<span class="done">identical</span>',
    "changed": '<span class="bad">changed</span>',
    "not measured again": "-",
}


def render_summary(tables: RunTables) -> str:
    rows = tables.summary()
    columns = [column for column in COLUMNS if any(column[0] in row for row in rows)]
    # else the methods are not at the same point
    even = len({(r["tasks_finished"], r["tasks"]) for r in rows}) == 1
    best = {
        key: pick(values)
        for key, _, _, _, pick in columns
        if even
        and pick
        and len(values := [v for r in rows if (v := r.get(key)) is not None and not math.isnan(v)])
        > 1
    }
    heading = "".join(f'<th title="{escape(says)}">{text}</th>' for _, text, says, _, _ in columns)
    body = ""
    for row in rows:
        other = (
            ""
            if row["method"] == row["label"]
            else f" <span class=soft>{escape(row['method'])}</span>"
        )
        unfinished = (
            ""
            if row["tasks_finished"] == row["tasks"]
            else f'<br><span class="pending">after {row["tasks_finished"]} of {row["tasks"]} '
            "tasks</span>"
        )
        cells = "".join(
            f"<td{' class=best' if key in best and row.get(key) == best[key] else ''}>{format_value(row.get(key), kind)}</td>"
            for key, _, _, kind, _ in columns
        )
        body += (
            "<tr><td class=left><a "
            f'href="#method-{escape(row["label"])}"><b>{escape(row["label"])}</b></a>{other}{unfinished}</td>{cells}'
            f"<td>{ANSWERS[row['answers']]}</td></tr>"
        )
    hint = (
        "; the best value of a column is bold"
        if best
        else "; not all are at the same point of the stream yet"
        if not even
        else ""
    )
    words = "; ".join(
        f"<b>{text.replace('<br>', ' ')}</b>: {says}" for _, text, says, _, _ in columns
    )
    return (
        f'<h2 id="summary">Summary</h2><p>One row per method{hint}.</p><div '
        'class="scroll"><table class="summary">'
        f'<tr><th class=left>method</th>{heading}<th title="whether the logits on old tasks '
        f'stayed the same, bit by bit">old<br>answers</th></tr>{body}'
        f"</table></div><details><summary>What the columns mean</summary><p>{words}; <b>old "
        "answers</b>: whether the logits on tasks that were tested "
        "again later are the same, bit by bit (compared by sha256).</p></details>"
    )


def format_value(value: Any, kind: str) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return SOFT
    if kind == "rate":
        return f"{100 * value:z.1f} %"
    return {
        "bytes": format_bytes,
        "times": lambda v: f"{v:.2f}x",
        "count": lambda v: f"{v:,.0f}",
        "seconds": format_seconds,
    }[kind](value)


def format_seconds(value: float) -> str:
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    return (
        f"{minutes} min {rest:02d} s"
        if minutes < 60
        else f"{minutes // 60} h {minutes % 60:02d} min"
    )


def render_picture(p: Picture) -> str:
    data = base64.b64encode(p.png).decode()
    return (
        f"<figure><figcaption><b>{escape(p.title)}.</b> {escape(p.says)}</figcaption>"
        f'<img alt="{escape(p.title)}" style="width:{p.width}px" '
        f'src="data:image/png;base64,{data}"></figure>'
    )


def render_method(tables: RunTables, label: str) -> str:
    """What the registry says about the method; nothing where this installation does not know it."""
    from workers.methods import METHODS

    method = METHODS.get(tables.method(label))
    if method is None:
        return ""
    says = (method.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")
    order = (
        "Its tasks do not depend on each other (a star)."
        if not method.carries
        else f"Each task starts from what the one before handed on: {', '.join(method.carries)} "
        "(a chain)."
    )
    told = re.sub(r"`+([^`]+)`+", r"<code>\1</code>", escape(" ".join(says.split())))
    return f"<p>{told} {escape(order)} <span class=soft>{escape(method.paper)}</span></p>"


def render_picks(tables: RunTables, label: str) -> str:
    """How a method that was not told the task found it, after the last finished one."""
    rows, picked = tables.picks(label), tables.pick_counts(label)
    if picked is None:
        return ""
    counts, tasks, candidates = picked
    last = {row["task"]: row for row in rows if row["after_index"] == rows[-1]["after_index"]}
    body = [
        [
            task,
            row["images"],
            format_value(row["share_right"], "rate"),
            *(format_value(row[f"confidence_{kind}"], "rate") for kind in ("right", "wrong")),
            candidates[int(line.argmax())],
        ]
        for task, line in zip(tasks, counts, strict=True)
        for row in [last[task]]
    ]
    table = render_table(
        [
            "images of",
            "images",
            "taken for it",
            "how sure when right",
            "when wrong",
            "most often taken for",
        ],
        body,
        1,
    )
    return (
        f"<h3>Finding out the task</h3><p>After {escape(rows[-1]['after'])}: the method is not "
        f"told what an image belongs to and picks by itself.</p>{table}"
    )


def render_sizes(tables: RunTables) -> str:
    rows = [row for label in tables.labels for row in tables.sizes(label)]
    if not rows:
        return ""
    fixed = {
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
    kinds = [
        k
        for k in dict.fromkeys(k for row in rows for k in row)
        if k not in fixed and any(row.get(k) for row in rows)
    ]
    table = render_table(
        [
            "method",
            "after task",
            "this task",
            *kinds,
            "total",
            "growth",
            "trained parameters",
            "work per image",
        ],
        [
            [
                row["label"],
                row["after"],
                format_bytes(row["task_bytes"]),
                *(format_bytes(row.get(k)) for k in kinds),
                format_bytes(row["total"]),
                format_value(row["growth"], "times"),
                format_value(row["trained_parameters"], "count"),
                format_value(row["flops_share"], "rate"),
            ]
            for row in rows
        ],
        2,
    )
    return (
        '<h2 id="sizes">Sizes</h2><p>What has to be kept after each task, summed over the '
        "tasks so far: masks as packed bits, everything else as stored. "
        "<b>carried</b> is what is handed to the next task; a method that retrains the whole "
        "backbone carries a changed copy of it. <b>growth</b> "
        f"is the total divided by the backbone.</p>{table}"
    )


def render_graph(svg: str) -> str:
    if not svg:
        return ""
    body = svg[svg.index("<svg") :] if "<svg" in svg else ""
    width = re.search(r'<svg[^>]* width="([0-9.]+)', body)
    if width and float(width.group(1)) < FITS:
        body = body.replace("<svg", '<svg style="max-width:100%;height:auto"', 1)
    return (
        '<h2 id="graph">Graph</h2><p>Every box is a stage whose result is stored on its own; a '
        "line means that the right one needs the left one. Boxes "
        f'without a path between them can run at the same time.</p><div class="scroll">{body}</div>'
    )


def render_stages(tables: RunTables) -> str:
    rows = tables.stage_rows()
    spent = sum(r["wall_s"] or 0 for r in rows)
    body = [
        [
            f"<code>{escape(r['stage'])}</code>",
            f'<span class="{r["state"]}">{r["state"]}</span>',
            format_value(r["wall_s"], "seconds"),
            format_bytes(r["bytes"]),
            escape(str(r["device"] or "-")),
            f"<code>{r['key'][:12]}</code>",
        ]
        for r in rows
    ]
    table = render_table(
        ["stage", "state", "wall time", "stored", "device", "key"], body, 1, safe=True
    )
    return (
        '<h2 id="stages">Stages</h2><p>The steps of the run and how long each took when it was '
        f"computed, {format_seconds(spent)} in all; a stage that is "
        "done is never run again while its inputs stay the "
        f"same.</p><details{' open' if len(rows) <= 40 else ''}><summary>{len(rows)} "
        "stages</summary>"
        f"{table}</details>"
    )


def render_settings(tables: RunTables) -> str:
    text = dump_yaml(to_plain(tables.record["config"]), default_flow_style=None, width=110)
    facts = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(', '.join(values))}</dd>"
        for name, values in tables.environment().items()
    )
    return (
        '<h2 id="settings">Settings and environment</h2><p>The complete config: saved as a '
        f"file, it runs this again.</p><pre><code>{escape(text)}"
        f"</code></pre><p>What the stages ran on:</p><dl>{facts}</dl>"
    )


def to_plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): to_plain(v) for k, v in value.items()}
    return [to_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def render_table(
    heading: Sequence[str], rows: Sequence[Sequence[Any]], left: int, safe: bool = False
) -> str:
    """A table whose first `left` columns are aligned to the left. safe: cells are HTML already;
    else only what stands for no value is."""

    def line(cells: Sequence[Any], tag: str) -> str:
        return (
            "<tr>"
            + "".join(
                f"<{tag}{' class=left' if i < left else ''}>{cell}</{tag}>"
                for i, cell in enumerate(cells)
            )
            + "</tr>"
        )

    body = "".join(
        line([cell if safe or cell == SOFT else escape(str(cell)) for cell in row], "td")
        for row in rows
    )
    return (
        f'<div class="scroll"><table>{line([escape(h) for h in heading], "th")}{body}</table></div>'
    )
