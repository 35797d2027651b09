"""The building blocks of all pages: the document with its style, tables, pictures, values."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from pipeline.config.yaml_files import dump_yaml
from pipeline.report.figures import Picture
from pipeline.report.plots import format_bytes
from pipeline.results.tables import Row

NO_VALUE = "<span class=soft>-</span>"
MOST_WARNINGS = 5  # open from the start
MOST_ROWS = 40  # of a table that is open from the start
STYLE = """
:root {
  color-scheme: light dark;
  --paper: #ffffff; --ink: #1f2328; --soft: #59636e; --line: #d8dee4; --band: #f6f8fa;
  --blue: #0072B2; --green: #1a7f37; --amber: #9a6700; --red: #b3261e; --note: #fff8e8;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #15191e; --ink: #e6e9ed; --soft: #a3adb8; --line: #363d46; --band: #1e242b;
    --blue: #6cb6ef; --green: #56c271; --amber: #e0a93b; --red: #ff8a80; --note: #2e2614;
  }
  figure img { border-radius: 6px; }
}
* { box-sizing: border-box; }
body {
  margin: 0; color: var(--ink); background: var(--paper); overflow-wrap: break-word;
  font: 15px/1.55 system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
main { max-width: 1120px; margin: 0 auto; padding: 28px 32px 64px; }
h1 { font-size: 28px; margin: 0 0 2px; letter-spacing: -0.01em; }
h2 { font-size: 20px; margin: 44px 0 6px; padding-top: 18px; border-top: 1px solid var(--line); }
h3 { font-size: 16px; margin: 26px 0 2px; }
p { margin: 4px 0 10px; max-width: 86ch; }
.soft, figcaption { color: var(--soft); }
nav { margin: 14px 0 0; font-size: 14px; }
nav a { display: inline-block; margin-right: 16px; }
a { color: var(--blue); text-decoration: none; }
a:hover { text-decoration: underline; }
figure { margin: 22px 0 8px; }
figure .scroll { margin: 8px 0 0; }
figure img { width: var(--width); max-width: 100%; height: auto; display: block; }
.pictures { display: flex; flex-wrap: wrap; align-items: flex-end; column-gap: 32px; }
.pictures figure { width: max(var(--width), 300px); max-width: 100%; }
figcaption b { color: var(--ink); }
figcaption { max-width: 96ch; }
.scroll { overflow-x: auto; margin: 12px 0; }
.tall { overflow: auto; max-height: 85vh; }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td {
  padding: 6px 12px 6px 0; text-align: right; border-bottom: 1px solid var(--line);
  white-space: nowrap; vertical-align: bottom;
}
th { font-weight: 600; color: var(--soft); font-size: 13px; }
th.left, td.left { text-align: left; }
table.summary { width: 100%; }
table.summary td { padding-top: 9px; padding-bottom: 9px; vertical-align: top; }
td .soft { font-size: 13px; }
td .reason { white-space: normal; width: 26ch; }
td.best { font-weight: 650; }
th.left:first-child, td.left:first-child { position: sticky; left: 0; background: var(--paper); }
.note {
  border-left: 4px solid #E69F00; background: var(--note); padding: 8px 14px; margin: 14px 0;
}
.note ul { margin: 4px 0; padding-left: 20px; }
pre {
  background: var(--band); border: 1px solid var(--line); border-radius: 6px;
  padding: 12px 14px; overflow-x: auto; font-size: 12.5px; line-height: 1.45;
}
code { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: 12.5px; }
details { margin: 12px 0; }
summary { cursor: pointer; font-weight: 600; }
dl { columns: 2; margin: 8px 0; }
dt { float: left; color: var(--soft); margin-right: 8px; }
dd { margin: 0 0 3px; break-inside: avoid; overflow-wrap: anywhere; }
.done { color: var(--green); }
.pending { color: var(--amber); }
.bad { color: var(--red); }
svg .key { fill: var(--soft); }
@media screen and (max-width: 640px) {
  main { padding: 18px 16px 48px; }
  h1 { font-size: 23px; overflow-wrap: anywhere; }
  h2 { margin-top: 32px; }
  nav a { padding: 3px 0; }
  figure img { max-width: 720px; }
  dl { columns: 1; }
  .note ul { padding-left: 14px; }
}
@media print {
  .tall { max-height: none; }
  details { display: block; }
  main { max-width: none; padding: 0; }
  figure { break-inside: avoid; }
}
"""


def render_document(title: str, sections: Iterable[str], reload_s: int = 0) -> str:
    """Return the whole page.

    title: HTML of the browser's title, without the project's name. reload_s: seconds after which a
    browser loads the page again; 0: never.
    """
    reload = f'<meta http-equiv="refresh" content="{reload_s}">' if reload_s else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">{reload}'
        f"<title>{title} · Accrete</title><style>{STYLE}</style></head>"
        f"<body><main>{''.join(sections)}</main></body></html>"
    )


def render_links(links: Iterable[tuple[str, str]]) -> str:
    """Return the navigation bar. links: (anchor, text)."""
    items = [f'<a href="#{escape(anchor)}">{escape(text)}</a>' for anchor, text in links]
    return f"<nav>{''.join(items)}</nav>"


def render_table(
    heading: Sequence[str], rows: Sequence[Sequence[Any]], left: int, is_html: bool = False
) -> str:
    """Return a table whose first `left` columns are aligned to the left.

    is_html: the cells are HTML; otherwise every cell but NO_VALUE is escaped.
    """
    lines = [_render_row(list(map(escape, heading)), "th", left)]
    for row in rows:
        cells = row if is_html else [_escape_cell(cell) for cell in row]
        lines.append(_render_row(cells, "td", left))
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>'


def render_long_table(
    heading: Sequence[str],
    rows: Sequence[Sequence[Any]],
    left: int,
    noun: str,
    is_html: bool = False,
) -> str:
    """Return a table that a click opens where it is long. noun: what its rows are, in the plural.

    The other arguments are those of `render_table`.
    """
    table = render_table(heading, rows, left, is_html)
    if len(rows) <= MOST_ROWS:
        return table
    return render_folded(f"{len(rows)} {noun}", table)


def _escape_cell(cell: Any) -> str:
    return NO_VALUE if cell == NO_VALUE else escape(str(cell))


def _render_row(cells: Sequence[Any], tag: str, left: int) -> str:
    html = [f"<{tag} class=left>{cell}</{tag}>" for cell in cells[:left]]
    html += [f"<{tag}>{cell}</{tag}>" for cell in cells[left:]]
    return f"<tr>{''.join(html)}</tr>"


def render_picture(picture: Picture) -> str:
    """Return a picture with its caption; the PNG is embedded."""
    data = base64.b64encode(picture.png).decode()
    title = escape(picture.title)
    return (
        f'<figure style="--width:{picture.width}px"><figcaption><b>{title}.</b> '
        f'{escape(picture.caption)}</figcaption><div class="scroll"><img alt="{title}" '
        f'src="data:image/png;base64,{data}"></div></figure>'
    )


def render_pictures(pictures: Iterable[Picture]) -> str:
    """Return pictures with their captions side by side, as many in a row as the page is wide."""
    return f'<div class="pictures">{"".join(map(render_picture, pictures))}</div>'


def render_folded(text: str, html: str) -> str:
    """Return HTML that a click on `text` opens."""
    return f"<details><summary>{escape(text)}</summary>{html}</details>"


def render_facts(facts: Iterable[tuple[str, str]]) -> str:
    """Return a definition list of names and values."""
    items = [f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts]
    return f"<dl>{''.join(items)}</dl>"


def format_value(value: Any, kind: str) -> str:
    """Return a number in its unit as HTML. kind: rate, bytes, times, count or seconds."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return NO_VALUE
    match kind:
        case "rate":
            return f"{100 * value:z.1f} %"
        case "bytes":
            return format_bytes(value)
        case "times":
            return f"{value:.2f}x"
        case "count":
            return f"{value:,.0f}"
        case "seconds":
            return format_seconds(value)
    raise ValueError(f"kind {kind!r} is none of rate, bytes, times, count, seconds")


def format_seconds(value: float) -> str:
    """75 -> `1 min 15 s`."""
    if value < 60:
        return f"{value:.1f} s"
    minutes, seconds = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def format_yaml(value: Any) -> str:
    """Return plain values as YAML in HTML."""
    return escape(dump_yaml(_to_plain(value), default_flow_style=None, width=110))


def plural(count: float) -> str:
    """Return the `s` of a noun that follows `count`; empty for one."""
    return "" if count == 1 else "s"


def _to_plain(value: Any) -> Any:
    """Return the value with dicts and lists in place of other mappings and sequences."""
    if isinstance(value, Mapping):
        return {str(key): _to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_plain(item) for item in value]
    return value


def render_warnings(rows: Sequence[Row]) -> str:
    """Return a note with the first warnings, and the others folded; empty if there are none."""
    if not rows:
        return ""
    first = _render_list_of_warnings(rows[:MOST_WARNINGS])
    others = rows[MOST_WARNINGS:]
    if others:
        more = f"{len(others)} more warning{plural(len(others))}"
        first += render_folded(more, _render_list_of_warnings(others))
    return f'<div class="note"><b>{len(rows)} warning{plural(len(rows))}</b>{first}</div>'


def _render_list_of_warnings(rows: Sequence[Row]) -> str:
    items = ""
    for row in rows:
        stages = escape(row["stage"])
        if row["stages"] > 1:
            stages += f" and {row['stages'] - 1} more"
        items += f"<li>{escape(row['warning'])} <span class=soft>({stages})</span></li>"
    return f"<ul>{items}</ul>"


def render_gpu_use(sentences: Sequence[str]) -> str:
    """Return how busy the GPUs were; empty for a run without GPUs."""
    if not sentences:
        return ""
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f'<h3 id="gpus">Use of the GPUs</h3><ul>{items}</ul>'


def render_failures(failures: Mapping[str, str]) -> str:
    """Return a note on the stages that failed; empty if there are none.

    Args:
        failures: Id of a stage -> why it failed.
    """
    if not failures:
        return ""
    items = "".join(
        f"<li>{escape(message)} <span class=soft>({escape(stage)})</span></li>"
        for stage, message in failures.items()
    )
    heading = f"{len(failures)} stage{plural(len(failures))} failed"
    return (
        f'<div class="note"><b>{heading}</b>: the stages that need their results were not run, '
        f"and are missing below<ul>{items}</ul></div>"
    )
