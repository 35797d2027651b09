"""Write CSV files in which a spreadsheet program finds no formulas.

Names of files, classes and tasks may come from untrusted sources. A spreadsheet program executes
text that begins with =, +, -, @, a tab or a line break. `as_cell` puts an apostrophe before such
text, which marks the cell as text. Numbers are not changed.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from typing import Any

# characters that begin a formula; the last four are full-width forms of =, +, - and @
FORMULA = re.compile(r"[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")
# unchanged text: numbers, and `-` for an empty value
HARMLESS = re.compile(r"-|[-+]?[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]+)?")


def as_cell(value: Any) -> Any:
    """Return a value for a cell. Text that a spreadsheet would execute gets an apostrophe."""
    if isinstance(value, str) and FORMULA.match(value) and not HARMLESS.fullmatch(value):
        return "'" + value
    return value


def to_csv(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> bytes:
    """Return a table as CSV (RFC 4180, UTF-8); invalid UTF-8 in names becomes escape sequences."""
    sink = io.StringIO(newline="")
    writer = csv.writer(sink)  # ends lines with \r\n, and quotes cells that contain \r or \n
    for row in (header, *rows):
        writer.writerow([as_cell(value) for value in row])
    return sink.getvalue().encode("utf-8", "backslashreplace")
