"""Tables as files: CSV for people, Parquet for machines."""

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
    """Rows -> Parquet; columns are `first` and the union of all keys, an absent value or NaN is
    null."""
    columns = _columns(rows, first)
    sink = io.BytesIO()
    pq.write_table(
        pa.table({name: pa.array([_plain(row.get(name)) for row in rows]) for name in columns}),
        sink,
    )
    return sink.getvalue()


def as_csv(rows: list[Row], first: Sequence[str] = ()) -> bytes:
    """Rows -> CSV with a header, columns as in `as_parquet`; absent values and NaN are empty."""
    columns = _columns(rows, first)
    return to_csv(columns, ([_plain(row.get(name)) for name in columns] for row in rows))


def csv_and_parquet(tables: Mapping[str, list[Row]]) -> dict[str, bytes]:
    """`NAME.csv` for people and `NAME.parquet` for machines, for every table."""
    return {
        f"{name}.{ending}": write(rows)
        for name, rows in tables.items()
        for ending, write in (("csv", as_csv), ("parquet", as_parquet))
    }


def _columns(rows: list[Row], first: Sequence[str]) -> list[str]:
    return list(dict.fromkeys([*first, *(name for row in rows for name in row)]))


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else value
