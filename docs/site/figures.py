"""The figures of a method: the rows of the tables of `configs/RESULTS.md` that are its own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from docs.site.pages import text_of

RESULTS = "configs/RESULTS.md"
HEADING = re.compile(r"^#+ (.*)$")


class Figures(NamedTuple):
    """Rows of one table. section: the heading that it stands below; cells are Markdown."""

    section: str
    headings: list[str]
    rows: list[list[str]]


def anchor_of(heading: str) -> str:
    """Return the fragment by which a heading is linked to."""
    words = re.sub(r"[^\w\s-]", "", heading.lower())
    return re.sub(r"\s", "-", words.strip())


def figures_of(method: str) -> list[Figures]:
    """Return the measured rows of a method, by table; empty where nothing is measured yet.

    A row is of the method where its first cell begins with its name, in backticks.
    """
    selected = []
    for table in _tables():
        rows = [row for row in table.rows if row[0].startswith(f"`{method}`")]
        measured = [row for row in rows if "not measured yet" not in row]
        if measured:
            selected.append(table._replace(rows=measured))
    return selected


def _tables() -> Iterator[Figures]:
    """Yield every table of the page."""
    section = ""
    lines: list[str] = []
    for line in [*text_of(RESULTS).splitlines(), ""]:
        if line.startswith("|"):
            lines.append(line)
            continue
        if len(lines) > 2:
            headings, _, *rows = lines
            yield Figures(section, _cells(headings), [_cells(row) for row in rows])
        lines = []
        match = HEADING.match(line)
        if match:
            section = match.group(1)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]
