"""Small tables: Parquet in memory -> a table, read by this thread alone."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq


def read_table(data: bytes, columns: Sequence[str] | None = None) -> pa.Table:
    """Return the table of a Parquet file.

    pyarrow would read it on threads of its own, which may still run when the interpreter ends, and
    then abort the process (apache/arrow 34314 and 50482).

    Args:
        data: Of the file.
        columns: That are read; None: all.

    Raises:
        pa.ArrowException: If it is no Parquet file.
    """
    names = None if columns is None else [*columns]
    return pq.read_table(io.BytesIO(data), columns=names, use_threads=False)
