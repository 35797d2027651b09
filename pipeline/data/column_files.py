"""Parquet files, and the Arrow files that Hugging Face's `save_to_disk` writes: columns of rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.data.listing import open_file, remedy
from pipeline.data.names import printable, suffix_of
from workers.errors import UserError

MOST_METADATA = 16 << 20  # bytes of the hub's description of the columns
ROWS_AT_ONCE = 4096
ARROW_SUFFIX = ".arrow"
ARROW_END = b"\xff\xff\xff\xff\0\0\0\0"  # of a stream
ARROW_FILE = b"ARROW1"  # how the seekable form begins; `save_to_disk` writes the other one


class Schema(NamedTuple):
    """The columns of a file.

    Attributes:
        names: Of all columns.
        images: Of those that hold images: bytes, or a struct with `bytes`.
        classes: Names by label column, as the hub notes them (ClassLabel).
        types: By column.
    """

    names: tuple[str, ...]
    images: tuple[str, ...]
    classes: dict[str, tuple[str, ...]]
    types: dict[str, pa.DataType]


class RowGroup(NamedTuple):
    """Rows of a file that are read together. size: bytes of all columns, as the file says."""

    rows: int
    size: int


def schema_of(uri: str) -> Schema:
    """Return the columns of a file. Raise UserError if it cannot be read."""
    with reading_columns(uri), open_file(uri) as stream:
        if suffix_of(uri) == ARROW_SUFFIX:
            with _open_arrow(stream) as reader:
                schema = reader.schema
        else:
            with pq.ParquetFile(stream) as file:
                schema = file.schema_arrow
    features = _hub_features(schema.metadata or {})
    names = tuple(schema.names)
    types = {field.name: field.type for field in schema}
    images = [name for name, body in features.items() if body.get("_type") == "Image"]
    images = [name for name in images if name in names]
    images = images or [name for name, kind in types.items() if holds_bytes(kind)]
    classes: dict[str, tuple[str, ...]] = {}
    for name, body in features.items():
        class_names = body.get("names")
        if body.get("_type") != "ClassLabel" or not isinstance(class_names, list):
            continue
        if name in names and all(isinstance(class_name, str) for class_name in class_names):
            classes[name] = tuple(class_names)
    return Schema(names, tuple(images), classes, types)


def _hub_features(metadata: Mapping[bytes, bytes]) -> dict[str, dict[str, Any]]:
    text = metadata.get(b"huggingface", b"")
    if not 0 < len(text) <= MOST_METADATA:
        return {}
    try:
        features = json.loads(text)["info"]["features"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    if not isinstance(features, dict):
        return {}
    return {name: value for name, value in features.items() if isinstance(value, dict)}


def holds_bytes(kind: pa.DataType) -> bool:
    """Whether a column can hold encoded images."""
    if pa.types.is_dictionary(kind):
        return holds_bytes(kind.value_type)
    if pa.types.is_struct(kind):
        return "bytes" in [kind.field(index).name for index in range(kind.num_fields)]
    is_view = pa.types.is_binary_view(kind)
    is_fixed = pa.types.is_fixed_size_binary(kind)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or is_view or is_fixed)


def row_groups_of(uri: str) -> list[RowGroup]:
    """Return the row groups of a file; all of an Arrow file is one. Raise UserError as above."""
    with reading_columns(uri), open_file(uri) as stream:
        if suffix_of(uri) == ARROW_SUFFIX:
            with _open_arrow(stream) as reader:
                return [
                    RowGroup(sum(len(batch) for batch in _arrow_batches(reader)), stream.size())
                ]
        groups: list[RowGroup] = []
        with pq.ParquetFile(stream) as file:
            for index in range(file.metadata.num_row_groups):
                group = file.metadata.row_group(index)
                groups.append(RowGroup(group.num_rows, max(group.total_byte_size, 0)))
        return groups


def batches_of(
    uri: str,
    columns: Sequence[str],
    num_rows: int = ROWS_AT_ONCE,
    groups: Sequence[int] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file in order.

    Args:
        uri: Of the file.
        columns: That are read.
        num_rows: Most rows of a batch.
        groups: Numbers of the row groups; None: all.

    Raises:
        UserError: If the file cannot be read to its end.
    """
    names = list(dict.fromkeys(columns))
    with reading_columns(uri), open_file(uri) as stream:
        if suffix_of(uri) != ARROW_SUFFIX:
            with pq.ParquetFile(stream) as file:
                yield from file.iter_batches(num_rows, row_groups=groups, columns=names)
            return
        with _open_arrow(stream) as reader:
            for batch in _arrow_batches(reader):
                for start in range(0, len(batch), num_rows):
                    yield batch.select(names).slice(start, num_rows)


@contextmanager
def _open_arrow(stream: pa.NativeFile) -> Iterator[Any]:
    is_file = stream.read(len(ARROW_FILE)) == ARROW_FILE
    size = stream.size()
    if not is_file and stream.read_at(min(len(ARROW_END), size), max(size - len(ARROW_END), 0)) != (
        ARROW_END
    ):
        raise pa.ArrowInvalid("it ends without an end mark")
    stream.seek(0)
    with pa.ipc.open_file(stream) if is_file else pa.ipc.open_stream(stream) as reader:
        yield reader


def _arrow_batches(reader: Any) -> Iterator[pa.RecordBatch]:
    """Yield the batches of an Arrow file, validated: offsets may lead anywhere."""
    if isinstance(reader, pa.ipc.RecordBatchFileReader):
        batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
    else:
        batches = iter(reader)
    for batch in batches:
        batch.validate(full=True)
        yield batch


def python_value(scalar: pa.Scalar) -> Any:
    """Return a scalar as a Python value; text that is not UTF-8 becomes bytes."""
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        if isinstance(scalar, pa.StructScalar):
            return {name: python_value(scalar[name]) for name in scalar}
        return scalar.as_buffer().to_pybytes()


@contextmanager
def reading_columns(uri: str) -> Iterator[None]:
    """Turn errors of reading Parquet or Arrow into one sentence."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        reason = printable((str(error).strip() or type(error).__name__).splitlines()[0])
        advice = "fetch it again" if isinstance(error, pa.ArrowInvalid) else remedy(uri)
        kind = "Arrow" if suffix_of(uri) == ARROW_SUFFIX else "Parquet"
        raise UserError(
            f"{printable(uri)} is not readable as {kind} ({reason}); {advice}"
        ) from None
