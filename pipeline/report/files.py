"""Write tables as CSV (for people) and as Parquet (for programs)."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.data.csv_text import to_csv

Row = dict[str, Any]


def as_parquet(rows: list[Row], first: Sequence[str] = ()) -> bytes:
    """Return rows as a Parquet file. Missing values and NaN become null.

    The columns are `first`, followed by all other keys in order of appearance.
    """
    columns = {}
    for name in _merge_column_names(rows, first):
        columns[name] = pa.array([nan_to_none(row.get(name)) for row in rows])
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue()


def as_csv(rows: list[Row], first: Sequence[str] = ()) -> bytes:
    """Return rows as CSV with a header. Missing values and NaN become empty cells.

    The order of the columns is that of `as_parquet`.
    """
    names = _merge_column_names(rows, first)
    return to_csv(names, (_cells(row, names) for row in rows))


def csv_and_parquet(tables: Mapping[str, list[Row]]) -> dict[str, bytes]:
    """Return file name -> content of the files `NAME.csv` and `NAME.parquet` of each table."""
    files = {}
    for name, rows in tables.items():
        files[f"{name}.csv"] = as_csv(rows)
        files[f"{name}.parquet"] = as_parquet(rows)
    return files


def _merge_column_names(rows: list[Row], first: Sequence[str]) -> list[str]:
    names = dict.fromkeys(first)
    for row in rows:
        names |= dict.fromkeys(row)
    return list(names)


def _cells(row: Row, names: Sequence[str]) -> list[Any]:
    return [nan_to_none(row.get(name)) for name in names]


def nan_to_none(value: Any) -> Any:
    """Return the value, or None if it is NaN."""
    return None if isinstance(value, float) and math.isnan(value) else value
