"""Read small Parquet tables from memory in the calling thread."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq


def read_table(data: bytes, columns: Sequence[str] | None = None) -> pa.Table:
    """Read the table in a Parquet file.

    pyarrow's own threads are not used, because they can still run when the interpreter ends, and
    then abort the process (apache/arrow issues 34314 and 50482).

    Args:
        data: Bytes of the file.
        columns: Columns to read, or None for all.

    Raises:
        pa.ArrowException: If the data is not a Parquet file.
    """
    names = None if columns is None else [*columns]
    return pq.read_table(io.BytesIO(data), columns=names, use_threads=False)
