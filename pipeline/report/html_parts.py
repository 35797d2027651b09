"""Formats of values on HTML pages, and the Jinja environment for the templates of the pages."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from functools import cache
from typing import Any

from jinja2 import Environment
from markupsafe import Markup, escape

from pipeline import templates
from pipeline.config.text import format_bytes, format_count, format_seconds
from pipeline.config.yaml_files import dump_yaml
from pipeline.report.comparison import Spread
from pipeline.report.parameters import format_setting
from pipeline.results.intervals import Interval

NO_VALUE = Markup("<span class=soft>-</span>")
MAX_OPEN_WARNINGS = 5  # further warnings are collapsed
MAX_OPEN_ROWS = 40  # a longer table is collapsed


@cache
def make_report_environment() -> Environment:
    """Return the Jinja environment with the constants and filters of this module."""
    environment = templates.make_environment()
    environment.globals |= {
        "MAX_OPEN_WARNINGS": MAX_OPEN_WARNINGS,
        "MAX_OPEN_ROWS": MAX_OPEN_ROWS,
        "NO_VALUE": NO_VALUE,
    }
    environment.filters |= {
        "base64": lambda data: base64.b64encode(data).decode(),
        "bytes": format_bytes,
        "code": mark_code,
        "counted": format_count,
        "interval": format_interval,
        "lines": format_lines,
        "rate": format_rate,
        "seconds": format_seconds,
        "setting": format_setting,
        "spread": format_spread,
        "value": format_value,
        "yaml": format_yaml,
    }
    return environment


def mark_code(text: str) -> Markup:
    """Convert a sentence to HTML, with the texts between backticks as code.

    If a backtick has no partner, all backticks are kept as text.
    """
    parts = text.split("`")
    marked = [
        Markup("<code>{}</code>").format(part) if index % 2 else escape(part)
        for index, part in enumerate(parts)
    ]
    return Markup("").join(marked) if len(parts) % 2 else escape(text)


def render_markup(template: str, **values: Any) -> Markup:
    """Render a template with values by name."""
    return Markup(make_report_environment().get_template(template).render(values))


def render_macro(name: str, *arguments: Any, **options: Any) -> Markup:
    """Render a macro of `macros.html` with its positional and keyword arguments."""
    html: Markup = getattr(make_report_environment().get_template("macros.html").module, name)(
        *arguments, **options
    )
    return html


def format_value(value: Any, kind: str) -> str:
    """Return a number as HTML.

    Args:
        value: The number. None and NaN give NO_VALUE.
        kind: Unit of the number: `rate`, `bytes`, `times` (a factor), `count` or `seconds`.
    """
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
    raise ValueError(f"kind {kind!r} is not one of rate, bytes, times, count, seconds")


def format_rate(value: float) -> str:
    """Format a rate such as 0.612 as `61.2 %`, with a non-breaking space."""
    return f"{100 * value:.1f}\u00a0%"


def format_spread(spread: Spread, kind: str, is_difference: bool = False) -> str:
    """Format a spread as `61.2 ± 0.4 %`.

    Args:
        spread: The mean and its deviation.
        kind: Unit of the values, as for `format_value`.
        is_difference: Whether to write the sign, and differences of rates in percentage points
            (`pp`).
    """
    if math.isnan(spread.mean):
        return NO_VALUE
    sign = "+" if is_difference and spread.mean >= 0 else ""
    if kind != "rate":
        text = f"{sign}{format_value(spread.mean, kind)}"
        if math.isnan(spread.deviation) or spread.deviation == 0:
            return text
        return f"{text} ± {format_value(spread.deviation, kind)}"
    text = f"{sign}{100 * spread.mean:.1f}"
    if not math.isnan(spread.deviation):
        text += f" ± {100 * spread.deviation:.1f}"
    text += " pp" if is_difference else " %"
    # Write 0.0 for -0.0 and for negative values that round to it.
    return text.replace("+-0.0", "+0.0").replace("-0.0 ", "0.0 ")


def format_interval(interval: Interval) -> Markup:
    """Return the 95 % interval of an accuracy on a separate line; empty without an interval."""
    if math.isnan(interval.low):
        return Markup()
    text = f"{100 * interval.low:z.1f} to {100 * interval.high:z.1f}"
    return Markup("<br><span class=soft>{}</span>").format(text)


def format_yaml(value: Any) -> str:
    """Return a value of mappings, sequences and scalars as YAML."""
    return dump_yaml(_to_plain(value), default_flow_style=None, width=110)


def format_lines(text: str) -> Markup:
    """Return text as HTML, with `<br>` for each line break."""
    return Markup("<br>").join(text.split("\n"))


def _to_plain(value: Any) -> Any:
    """Return a copy with a dict for each mapping, and a list for each list or tuple."""
    if isinstance(value, Mapping):
        return {str(key): _to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_plain(item) for item in value]
    return value
