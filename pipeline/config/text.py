"""Text for users: formatters of durations, sizes, rates, counts and tables.

Console, report, MLflow notes and error messages share them, for a uniform format.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

NO_VALUE = "-"
MAX_VALUE = 999.5  # this and larger values would round to four digits: the next unit is used
BYTE_UNITS = ("B", "kB", "MB", "GB")


def format_seconds(seconds: float) -> str:
    """Format a duration: seconds below one minute, else two units.

    Example:
        >>> format_seconds(7.25), format_seconds(59.96), format_seconds(75), format_seconds(3700)
        ('7.2 s', '1 min 00 s', '1 min 15 s', '1 h 01 min')
    """
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def format_bytes(count: float | None) -> str:
    """Format a size with up to three significant digits, in powers of 1000; `-` for None and NaN.

    The largest unit is GB, so from 1000 GB there are more digits.

    Example:
        >>> format_bytes(980), format_bytes(1_234_567), format_bytes(2.5e12), format_bytes(None)
        ('980 B', '1.23 MB', '2500 GB', '-')
    """
    if count is None or math.isnan(count):
        return NO_VALUE
    value: float = count
    unit, *larger_units = BYTE_UNITS
    for larger in larger_units:
        if abs(value) < MAX_VALUE:
            break
        value, unit = value / 1000, larger
    if unit == BYTE_UNITS[0] or abs(value) >= 100:
        return f"{value:.0f} {unit}"
    return f"{value:.3g} {unit}"


def format_percent(rate: float | None, digits: int = 2) -> str:
    """Format a rate in per cent; `-` for None and NaN.

    Args:
        rate: A share between 0 and 1.
        digits: Number of digits after the decimal point.

    Example:
        >>> format_percent(0.98765), format_percent(-1e-9, digits=1), format_percent(None)
        ('98.77 %', '0.0 %', '-')
    """
    if rate is None or math.isnan(rate):
        return NO_VALUE
    return f"{100 * rate:z.{digits}f} %"


def plural(count: float) -> str:
    """Return the ending of a regular noun after `count`: "" for 1, else "s"."""
    return "" if count == 1 else "s"


def format_count(count: float, noun: str, is_exact: bool = True) -> str:
    """Format a number with its noun.

    Args:
        count: The number.
        noun: A regular noun in the singular.
        is_exact: False if the true number is larger than `count`.

    Example:
        >>> format_count(1, "image"), format_count(2, "class", is_exact=False)
        ('1 image', 'more than 2 classes')
    """
    ending = plural(count)
    if ending and noun.endswith("s"):
        ending = "es"
    return f"{'' if is_exact else 'more than '}{count} {noun}{ending}"


def table_text(
    heading: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[str] | None = None
) -> str:
    """Format a table with aligned columns.

    Args:
        heading: Names of the columns.
        rows: Cells of each row, one per column.
        left: Names of the left-aligned columns. None: the first column.

    Example:
        >>> print(table_text(["task", "images"], [["digits", "9"], ["a", "1200"]]))
        task    images
        digits       9
        a         1200
    """
    left = heading[:1] if left is None else left
    table = [heading, *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        cells = []
        for name, cell, width in zip(heading, row, widths, strict=True):
            cells.append(cell.ljust(width) if name in left else cell.rjust(width))
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
