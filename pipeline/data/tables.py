"""Tables of paths and labels, CSV or Parquet, read row by row in bounds."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.data.formats.base import IMAGE_SUFFIXES
from pipeline.data.listing import open_file, printable, remedy, suffix_of
from workers.errors import UserError

TEXT_SUFFIXES = frozenset((".csv", ".tsv", ".txt"))
TABLE_SUFFIXES = TEXT_SUFFIXES | {".parquet"}
DELIMITERS = (",", ";", "\t", "|")
MOST_LINE = 1 << 20  # characters of a line, and of a row in quotes over several lines
MOST_COLUMNS = 1000
ROWS_AT_ONCE = 4096  # of a Parquet file
BYTE_ORDER_MARKS = {b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}


class Row(NamedTuple):
    """One row of a table. number: as a person counts them, from 1, without the header. values: of
    the columns that were asked for; None where there is none."""

    number: int
    values: tuple[str | None, ...]


def column_names(uri: str) -> list[str]:
    """Return the names of a table's columns; `0`, `1`, ... for a CSV without a header.

    Raise `UserError` where it cannot be read as a table.
    """
    if suffix_of(uri) == ".parquet":
        with _reading(uri), open_file(uri) as stream, pq.ParquetFile(stream) as file:
            return list(file.schema_arrow.names)
    with _reading(uri), open_file(uri) as stream:
        first = next(_csv_rows(uri, stream), [])
    return _names_of(first)


def read_rows(uri: str, columns: Sequence[str]) -> Iterator[Row]:
    """Yield the values of some columns of a table as text.

    Raise `UserError` where it cannot be read to its end, or lacks a column.
    """
    if suffix_of(uri) == ".parquet":
        yield from _parquet_rows(uri, columns)
        return
    with _reading(uri), open_file(uri) as stream:
        rows = _csv_rows(uri, stream)
        first = next(rows, [])
        names = _names_of(first)
        check_columns(uri, names, columns)
        indices = [names.index(column) for column in columns]
        number = 0
        if not _is_header(first):
            number = 1
            yield Row(number, _values_at(first, indices))
        for cells in rows:
            if cells:
                number += 1
                yield Row(number, _values_at(cells, indices))


def check_columns(uri: str, names: Sequence[str], columns: Sequence[str]) -> None:
    """Raise `UserError` where a table lacks a column."""
    for column in columns:
        if column not in names:
            raise UserError(
                f"{printable(uri)} has no column {column!r}; its columns are "
                f"{', '.join(map(printable, names[:20]))}"
            )


def _values_at(cells: Sequence[str], indices: Sequence[int]) -> tuple[str | None, ...]:
    values: list[str | None] = []
    for index in indices:
        text = cells[index].strip() if index < len(cells) else ""
        values.append(text or None)
    return tuple(values)


def _is_header(cells: Sequence[str]) -> bool:
    """Whether a first row holds names: one that names an image is a row like the others."""
    return not any(suffix_of(cell.strip()) in IMAGE_SUFFIXES for cell in cells)


def _names_of(first: Sequence[str]) -> list[str]:
    if _is_header(first):
        return [cell.strip() for cell in first]
    return [str(index) for index in range(len(first))]


def _csv_rows(uri: str, stream: pa.NativeFile) -> Iterator[list[str]]:
    encoding = BYTE_ORDER_MARKS.get(stream.read(2), "utf-8-sig")
    stream.seek(0)
    raw: Any = stream
    with io.TextIOWrapper(raw, encoding, newline="") as text:
        first = text.readline(MOST_LINE)
        text.seek(0)
        reader = csv.reader(_lines(uri, text), delimiter=_delimiter(uri, first))
        for cells in reader:
            if len(cells) > MOST_COLUMNS:
                raise UserError(
                    f"{printable(uri)} has {len(cells)} columns in line {reader.line_num}, more "
                    f"than {MOST_COLUMNS}; give a table of paths and labels"
                )
            yield cells


def _delimiter(uri: str, first: str) -> str:
    if suffix_of(uri) == ".tsv":
        return "\t"
    counts = {delimiter: first.count(delimiter) for delimiter in DELIMITERS}
    best = max(DELIMITERS, key=lambda delimiter: counts[delimiter])
    if not counts[best] and suffix_of(uri) == ".txt":
        return " "
    return best


def _lines(uri: str, text: io.TextIOWrapper) -> Iterator[str]:
    while line := text.readline(MOST_LINE):
        if len(line) == MOST_LINE:
            raise UserError(
                f"{printable(uri)} has a line of more than {MOST_LINE} characters and is no table "
                "of paths and labels; fetch or write it again"
            )
        yield line


def _parquet_rows(uri: str, columns: Sequence[str]) -> Iterator[Row]:
    number = 0
    with _reading(uri), open_file(uri) as stream, pq.ParquetFile(stream) as file:
        check_columns(uri, file.schema_arrow.names, columns)
        for batch in file.iter_batches(ROWS_AT_ONCE, columns=list(columns)):
            values = [batch[column].to_pylist() for column in columns]
            for row in zip(*values, strict=True):
                number += 1
                yield Row(number, tuple(map(_text_of, row)))


def _text_of(value: Any) -> str | None:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value is None or isinstance(value, (bytes, dict, list)):
        return None
    return str(value).strip() or None


class _reading:
    """Turns errors of reading a table into one sentence."""

    def __init__(self, uri: str):
        self.uri = uri

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: Any) -> None:
        where = printable(self.uri)
        if isinstance(error, UnicodeError):
            raise UserError(f"{where} is not text in UTF-8; save it as UTF-8") from None
        if isinstance(error, csv.Error):
            raise UserError(f"{where} is not readable as CSV ({error}); mend or write it again")
        if isinstance(error, pa.ArrowInvalid):
            reason = printable(str(error).splitlines()[0])
            raise UserError(f"{where} is not readable as Parquet ({reason}); fetch it again")
        if isinstance(error, OSError):
            reason = printable(str(error.strerror or error).splitlines()[0])
            raise UserError(f"{where} cannot be read ({reason}); {remedy(self.uri)}") from None
