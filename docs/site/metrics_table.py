"""Writes the tables of docs/metrics.md from METRICS: `python -m docs.site.metrics_table`."""

from __future__ import annotations

import re

from docs.site.pages import REPOSITORY
from pipeline.results.metrics import METRICS

PAGE = REPOSITORY / "docs" / "metrics.md"
FORMULAS = ("name", "formula", "also called")
SIZES = ("name", "meaning", "unit")


def replace_tables(text: str) -> str:
    """Return the page with the tables of the present metrics."""
    formulas = [(m.name, m.formula, m.also_called) for m in METRICS.values() if m.formula]
    sizes = [
        (metric.name, metric.meaning, metric.unit)
        for metric in METRICS.values()
        if metric.unit != "rate"
    ]
    for heading, rows in ((FORMULAS, formulas), (SIZES, sizes)):
        first_line = f"| {' | '.join(heading)} |"
        lines = [first_line, f"|{'---|' * len(heading)}"]
        lines += [" ".join(f"| `{name}` | {text} | {last} |".split()) for name, text, last in rows]
        pattern = re.compile(rf"^{re.escape(first_line)}\n(\|.*\n)+", re.MULTILINE)
        if len(pattern.findall(text)) != 1:
            raise ValueError(f"{PAGE} must have one table with the heading {first_line}")
        start, end = pattern.split(text)[0], pattern.split(text)[-1]
        text = start + "\n".join([*lines, ""]) + end
    return text


if __name__ == "__main__":
    PAGE.write_text(replace_tables(PAGE.read_text()))
