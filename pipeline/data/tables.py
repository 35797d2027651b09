"""Read tables of paths and labels row by row, with size limits: CSV, JSON lines, Parquet, Arrow."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import pyarrow as pa

from pipeline.data.column_files import read_batches, read_schema, to_python_list
from pipeline.data.file_kinds import COLUMN_FILES, IMAGE_SUFFIXES, JSON_TABLES
from pipeline.data.listing import open_file, remedy
from pipeline.data.names import get_suffix, printable
from workers.errors import UserError

DELIMITERS = (",", ";", "\t", "|")
MAX_LINE = 1 << 20  # characters of a line
MAX_COLUMNS = 1000
MAX_TEXT = 1 << 16  # characters that are kept of a cell, except in CSV
MAX_COMMENTS = 100  # comment lines before the header
BYTE_ORDER_MARKS = {b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
END = "\x03\x04\x03"  # line added after the last one; it becomes part of a cell with an open quote
SEPARATOR_LINE = "sep="  # start of Excel's line with the delimiter, before the header


class Row(NamedTuple):
    """One row of a table.

    Attributes:
        number: Number of the row, from 1, without the header and blank lines.
        values: Values of the requested columns; None for a missing value.
    """

    number: int
    values: tuple[str | None, ...]


def column_names(uri: str, has_header: bool | None = None) -> list[str]:
    """Return the names of a table's columns; `0`, `1`, ... for a CSV without a header.

    Args:
        uri: URI of the table.
        has_header: Whether the first row of a CSV is a header. None: true if no cell looks like
            the name of an image.

    Raises:
        UserError: If the file cannot be read as a table.
    """
    suffix = get_suffix(uri)
    if suffix in COLUMN_FILES:
        return list(read_schema(uri).names)
    with _reading(uri), open_file(uri) as stream:
        if suffix in JSON_TABLES:
            return _json_fields(uri, stream)
        first = next(_csv_rows(uri, stream), Cells(0, []))
    return _name_columns(first.texts, has_header)


def read_rows(uri: str, columns: Sequence[str], has_header: bool | None = None) -> Iterator[Row]:
    """Yield the values of some columns of a table as text.

    Args:
        uri: URI of the table.
        columns: Names as returned by `column_names`.
        has_header: As in `column_names`. None: true if the first row has all these columns, and no
            cell that looks like an image name.

    Raises:
        UserError: If the table cannot be read completely, or lacks a column.
    """
    suffix = get_suffix(uri)
    if suffix in COLUMN_FILES:
        yield from _column_rows(uri, columns)
        return
    with _reading(uri), open_file(uri) as stream:
        if suffix in JSON_TABLES:
            check_columns(uri, _json_fields(uri, stream), columns)
            stream.seek(0)
            yield from _json_rows(uri, stream, columns)
        else:
            yield from _csv_values(uri, stream, columns, has_header)


def check_columns(uri: str, names: Sequence[str], columns: Sequence[str]) -> None:
    """Raise `UserError` if a table lacks a column."""
    for column in columns:
        if column not in names:
            raise UserError(
                f"{printable(uri)} has no column {column!r}; its columns are "
                f"{', '.join(map(printable, names[:20]))}"
            )


# ---- CSV -----------------------------------------------------------------------------------------
class Cells(NamedTuple):
    """A row of a CSV. `line` is the number of the first line, from 1."""

    line: int
    texts: list[str]


def _csv_values(
    uri: str, stream: pa.NativeFile, columns: Sequence[str], has_header: bool | None
) -> Iterator[Row]:
    rows = _csv_rows(uri, stream)
    first = next(rows, Cells(0, []))
    # the columns can be positions, which are the names of columns without a header
    if has_header is None and set(columns) <= {str(n) for n in range(len(first.texts))}:
        has_header = _is_header(first.texts) and set(columns) <= set(
            _name_columns(first.texts, True)
        )
    names = _name_columns(first.texts, has_header)
    check_columns(uri, names, columns)
    indices = [names.index(column) for column in columns]
    number = 0
    if names != _name_columns(first.texts, True):  # the first row is not a header
        number = 1
        yield Row(number, _select_values(first.texts, indices))
    for line, cells in rows:
        if len(cells) > len(first.texts) and any(cells[len(first.texts) :]):
            raise _wrong_number(uri, line, cells, first.texts)
        if cells:
            number += 1
            yield Row(number, _select_values(cells, indices))


def _unclosed(uri: str, line: int) -> UserError:
    return UserError(
        f"{printable(uri)}: a quote that is opened in line {line} is not closed; close it, or "
        "remove it"
    )


def _wrong_number(uri: str, line: int, cells: Sequence[str], first: Sequence[str]) -> UserError:
    if any("\n" in cell for cell in cells):
        return _unclosed(uri, line)
    return UserError(
        f"{printable(uri)}: line {line} has {len(cells)} cells, and the first row has "
        f"{len(first)}; put a cell that holds the delimiter into quotes"
    )


def _select_values(cells: Sequence[str], indices: Sequence[int]) -> tuple[str | None, ...]:
    values: list[str | None] = []
    for index in indices:
        text = cells[index].strip() if index < len(cells) else ""
        values.append(text or None)
    return tuple(values)


def _is_header(cells: Sequence[str]) -> bool:
    """Return whether the first row is a header: no cell looks like the name of an image."""
    return not any(get_suffix(cell.strip()) in IMAGE_SUFFIXES for cell in cells)


def _name_columns(first: Sequence[str], has_header: bool | None) -> list[str]:
    """Return the cells of the first row if it is a header, otherwise `0`, `1`, ..."""
    if _is_header(first) if has_header is None else has_header:
        return [cell.strip() for cell in first]
    return [str(index) for index in range(len(first))]


def _csv_rows(uri: str, stream: pa.NativeFile) -> Iterator[Cells]:
    """Yield all rows after leading comments, with the header; `texts` of a blank line is empty.

    Raises:
        UserError: If a quote is not closed, or a line or row is too long.
    """
    encoding = BYTE_ORDER_MARKS.get(stream.read(2), "utf-8-sig")
    stream.seek(0)
    raw: Any = stream
    with io.TextIOWrapper(raw, encoding, newline="") as text:
        start = _CsvStart.of(uri, _lines(uri, text))
        text.seek(0)
        lines = _lines(uri, text)
        for _ in range(start.num_lines):
            next(lines)
        # Skip spaces after a delimiter: in `"a.png", "ant"`, the second pair of quotes would
        # otherwise be a part of the cell.
        skips = start.delimiter != " "
        reader = csv.reader(chain(lines, (END,)), delimiter=start.delimiter, skipinitialspace=skips)
        line = start.num_lines + 1
        for cells in reader:
            if cells == [END]:
                return
            if cells and cells[-1].endswith(END):
                raise _unclosed(uri, line)
            if len(cells) > MAX_COLUMNS:
                raise UserError(
                    f"{printable(uri)} has {len(cells)} columns in line {line}, more "
                    f"than {MAX_COLUMNS}; give a table of paths and labels"
                )
            yield Cells(line, cells)
            line = start.num_lines + reader.line_num + 1


class _CsvStart(NamedTuple):
    """The lines before the header of a CSV, and its delimiter."""

    num_lines: int
    delimiter: str

    @classmethod
    def of(cls, uri: str, lines: Iterator[str]) -> _CsvStart:
        """Count the lines before the header (empty, `# ...`, `sep=;`), and find the delimiter."""
        delimiter = ""
        for number, line in enumerate(lines):
            first = line.strip()
            if number == 0 and first.lower().startswith(SEPARATOR_LINE) and len(first) == 5:
                delimiter = first[-1]
            elif number == 0 and first.lower() == SEPARATOR_LINE:  # `strip` removed a tab
                delimiter = "\t"
            elif number >= MAX_COMMENTS or (
                first and (not first.startswith("#") or _has_cells(uri, first))
            ):
                return cls(number, delimiter or _delimiter(uri, line))
        return cls(0, delimiter or ",")


def _has_cells(uri: str, line: str) -> bool:
    """Return whether a line with `#` has several cells: then it is a header, not a comment."""
    return any(delimiter in line for delimiter in DELIMITERS)


def _delimiter(uri: str, first: str) -> str:
    """Return the first row's most frequent delimiter; a tab in .tsv; a space in .txt with none."""
    if get_suffix(uri) == ".tsv":
        return "\t"
    counts = {delimiter: first.count(delimiter) for delimiter in DELIMITERS}
    best = max(DELIMITERS, key=lambda delimiter: counts[delimiter])
    if not counts[best] and get_suffix(uri) == ".txt":
        return " "
    return best


def _lines(uri: str, text: io.TextIOWrapper) -> Iterator[str]:
    while line := text.readline(MAX_LINE):
        if len(line) == MAX_LINE:
            raise UserError(
                f"{printable(uri)} has a line of more than {MAX_LINE} characters and is not a "
                "table of paths and labels; fetch or write it again"
            )
        yield line


# ---- JSON lines, Parquet and Arrow ---------------------------------------------------------------
def _json_objects(uri: str, stream: pa.NativeFile) -> Iterator[dict[str, Any]]:
    raw: Any = stream
    text = io.TextIOWrapper(raw, "utf-8-sig")
    try:
        for number, line in enumerate(_lines(uri, text), 1):
            if not line.strip():
                continue
            try:
                body = json.loads(line)
            except (ValueError, RecursionError):
                body = None
            if not isinstance(body, dict):
                raise UserError(f"{printable(uri)}: line {number} is not a JSON object; fix it")
            yield body
    finally:
        text.detach()  # so that the end of `text` does not close the stream, which is used again


def _json_fields(uri: str, stream: pa.NativeFile) -> list[str]:
    """Return the fields of all objects, because an object need not have every field."""
    names: dict[str, None] = {}
    for body in _json_objects(uri, stream):
        if len(names) > MAX_COLUMNS:
            break
        names.update(dict.fromkeys(body))
    return [*names]


def _json_rows(uri: str, stream: pa.NativeFile, columns: Sequence[str]) -> Iterator[Row]:
    for number, body in enumerate(_json_objects(uri, stream), 1):
        yield Row(number, tuple(_format_text(body.get(column)) for column in columns))


def _column_rows(uri: str, columns: Sequence[str]) -> Iterator[Row]:
    number = 0
    check_columns(uri, read_schema(uri).names, columns)
    for batch in read_batches(uri, columns):
        values = [to_python_list(batch[column]) for column in columns]
        for row in zip(*values, strict=True):
            number += 1
            yield Row(number, tuple(map(_format_text, row)))


def _format_text(value: Any) -> str | None:
    """Return a value as text (3.0 as `3`; the `path` of an object), or None for bytes and lists."""
    if isinstance(value, dict):  # an image of the Hugging Face hub with its bytes in a file
        value = value.get("path")
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value is None or isinstance(value, (bytes, dict, list)):
        return None
    return str(value)[:MAX_TEXT].strip() or None


class _reading:
    """Context manager that converts errors when reading a table to a UserError."""

    def __init__(self, uri: str):
        self.uri = uri

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: Any) -> None:
        where = printable(self.uri)
        if isinstance(error, UnicodeError):
            raise UserError(f"{where} is not text in UTF-8; save it as UTF-8") from None
        if isinstance(error, csv.Error):
            raise UserError(f"{where} is not readable as CSV ({error}); fix or write it again")
        if isinstance(error, OSError):
            reason = printable(str(error.strerror or error).splitlines()[0])
            raise UserError(f"{where} cannot be read ({reason}); {remedy(self.uri)}") from None
