"""CSV files for people: no cell is a formula to the spreadsheet that opens them.

Names of files, classes and tasks may come from a stranger. A spreadsheet executes text that begins
with =, +, -, @, a tab or a line break; such text gets an apostrophe in front, which spreadsheets
take for "this is text". Numbers stay numbers.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from typing import Any

# the last four are the same signs in full width
FORMULA = re.compile(r"[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")
# a number as text, and the sign for "nothing here"
HARMLESS = re.compile(r"-|[-+]?[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]+)?")


def as_cell(value: Any) -> Any:
    """Return a value as a cell; text that a spreadsheet would execute gets an apostrophe."""
    if isinstance(value, str) and FORMULA.match(value) and not HARMLESS.fullmatch(value):
        return "'" + value
    return value


def to_csv(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> bytes:
    """Return a table as CSV (RFC 4180, UTF-8); invalid UTF-8 in names becomes escape sequences."""
    sink = io.StringIO(newline="")
    writer = csv.writer(sink)  # ends lines by \r\n, so that a cell with either is in quotes
    for row in (header, *rows):
        writer.writerow([as_cell(value) for value in row])
    return sink.getvalue().encode("utf-8", "backslashreplace")
