"""Read columns of Parquet files, and of Arrow files as written by `datasets.save_to_disk`."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.data.listing import open_file, remedy
from pipeline.data.names import get_suffix, printable
from workers.errors import UserError, describe_error

# A file is refused if a Parquet column in a row group, or a whole Arrow batch, decompresses to more
# than the larger of MAX_DECOMPRESSED_BYTES and MAX_DECOMPRESSION * file size.
MAX_DECOMPRESSED_BYTES = 256 << 20
MAX_DECOMPRESSION = 100
# It is also refused if it has more rows than the larger of MAX_ROWS and MAX_ROWS_PER_BYTE * file
# size.
MAX_ROWS = 1_000_000
MAX_ROWS_PER_BYTE = 2
PREFIX_BYTES = 8  # before an Arrow message: a marker and the length of the header
CONTINUES = 0xFFFFFFFF  # the marker before an Arrow message
DICTIONARY_BATCH = 2  # type of an Arrow message
RECORD_BATCH = 3  # type of an Arrow message
# fields of Arrow's flatbuffer tables, by their position in Message.fbs
HEADER_TYPE, HEADER, BODY_LENGTH = 1, 2, 3  # of Message
DICTIONARY_DATA = 1  # of DictionaryBatch: its RecordBatch
NUM_ROWS, BUFFERS, COMPRESSION = 0, 2, 3  # of RecordBatch
BUFFER_PREFIX_BYTES = 8  # before a compressed buffer: its decompressed size
MAX_COLUMNS = 1000
MAX_METADATA_BYTES = 16 << 20  # Hugging Face metadata, or the header of an Arrow message
BATCH_ROWS = 4096
ARROW_SUFFIX = ".arrow"
ARROW_END = b"\xff\xff\xff\xff\0\0\0\0"  # end of a stream
ARROW_FILE = b"ARROW1"  # start of the seekable file format; `save_to_disk` writes streams
ARROW_FILE_BYTES = 8  # ARROW_FILE with its padding


class Schema(NamedTuple):
    """The columns of a file.

    Attributes:
        names: Names of all columns.
        images: Columns of type Image in the hub's metadata; without such columns, all columns with
            bytes, or structs with a field `bytes`.
        classes: Label column -> class names, from the hub's metadata (ClassLabel).
        types: Column -> type.
    """

    names: tuple[str, ...]
    images: tuple[str, ...]
    classes: dict[str, tuple[str, ...]]
    types: dict[str, pa.DataType]


class RowGroup(NamedTuple):
    """Rows of a file to read together.

    Attributes:
        rows: Number of rows.
        size: Uncompressed bytes of all columns, from the metadata of the file; for Arrow, bytes of
            the file.
    """

    rows: int
    size: int


def read_schema(uri: str) -> Schema:
    """Read the columns of a file.

    Raises:
        UserError: If the file cannot be read or has too many columns.
    """
    with translate_read_errors(uri), open_file(uri) as stream:
        if get_suffix(uri) == ARROW_SUFFIX:
            with _open_arrow(stream) as reader:
                schema = reader.schema
        else:
            with pq.ParquetFile(stream) as file:
                schema = file.schema_arrow
    if len(schema.names) > MAX_COLUMNS:
        raise UserError(
            f"{printable(uri)} has {len(schema.names)} columns, but at most {MAX_COLUMNS} are "
            "read; write a file with the columns of the image and the label"
        )
    features = _parse_hub_features(schema.metadata or {})
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


def _parse_hub_features(metadata: Mapping[bytes, bytes]) -> dict[str, dict[str, Any]]:
    """Return column -> feature of the library `datasets`; {} without valid metadata."""
    text = metadata.get(b"huggingface", b"")
    if not 0 < len(text) <= MAX_METADATA_BYTES:
        return {}
    try:
        features = json.loads(text)["info"]["features"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    if not isinstance(features, dict):
        return {}
    return {name: value for name, value in features.items() if isinstance(value, dict)}


def holds_bytes(kind: pa.DataType) -> bool:
    """Return whether a column type can hold encoded images: bytes, or a struct with `bytes`."""
    if pa.types.is_dictionary(kind):
        return holds_bytes(kind.value_type)
    if pa.types.is_struct(kind):
        return "bytes" in [kind.field(index).name for index in range(kind.num_fields)]
    is_view = pa.types.is_binary_view(kind)
    is_fixed = pa.types.is_fixed_size_binary(kind)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or is_view or is_fixed)


def read_row_groups(uri: str) -> list[RowGroup]:
    """Read the row groups of a file; an Arrow file is one row group.

    Raises:
        UserError: If the file cannot be read.
    """
    with translate_read_errors(uri), open_file(uri) as stream:
        if get_suffix(uri) == ARROW_SUFFIX:
            check_arrow_messages(uri, stream)
            with _open_arrow(stream) as reader:
                return [
                    RowGroup(sum(len(batch) for batch in _iterate_batches(reader)), stream.size())
                ]
        groups: list[RowGroup] = []
        with pq.ParquetFile(stream) as file:
            for index in range(file.metadata.num_row_groups):
                group = file.metadata.row_group(index)
                groups.append(RowGroup(group.num_rows, max(group.total_byte_size, 0)))
        return groups


def read_batches(
    uri: str,
    columns: Sequence[str],
    num_rows: int = BATCH_ROWS,
    groups: Sequence[int] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file in order.

    Args:
        uri: Path or URI of the file.
        columns: Columns to read.
        num_rows: Maximum number of rows in a batch.
        groups: Indices of the row groups, or None for all. An Arrow file is always read whole.

    Raises:
        UserError: If the file cannot be read to its end, or its sizes are implausible.
    """
    names = list(dict.fromkeys(columns))
    with translate_read_errors(uri), open_file(uri) as stream:
        if get_suffix(uri) != ARROW_SUFFIX:
            with pq.ParquetFile(stream) as file:
                metadata = file.metadata
                # A batch of one row repeats no value, so it needs no dictionary.
                texts = _find_text_columns(file.schema_arrow, names) if num_rows > 1 else []
            _check_row_groups(uri, metadata, names, stream.size())
            with pq.ParquetFile(stream, metadata=metadata, read_dictionary=texts) as file:
                yield from file.iter_batches(num_rows, row_groups=groups, columns=names)
            return
        check_arrow_messages(uri, stream)
        stream.seek(0)
        with _open_arrow(stream) as reader:
            for batch in _iterate_batches(reader):
                for start in range(0, len(batch), num_rows):
                    yield batch.select(names).slice(start, num_rows)


def _find_text_columns(schema: pa.Schema, names: Sequence[str]) -> list[str]:
    """Return the columns to read as dictionaries: text, bytes, and fields of structs.

    A dictionary stores repeated values in memory only once.
    """
    kinds = (pa.string(), pa.binary())
    return [name for name in names if "." in name or schema.field(name).type in kinds]


def _check_row_groups(uri: str, metadata: pq.FileMetaData, names: Sequence[str], size: int) -> None:
    """Raise UserError if the rows or the decompressed size are implausible for a file of `size`."""
    _check_rows(uri, metadata.num_rows, size)
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        for number in range(group.num_columns):
            column = group.column(number)
            if any(column.path_in_schema.split(".")[0] == name.split(".")[0] for name in names):
                _check_bytes(uri, column.total_uncompressed_size, size)


def _check_rows(uri: str, rows: int, size: int) -> None:
    if rows > max(MAX_ROWS, MAX_ROWS_PER_BYTE * size):
        raise UserError(
            f"{printable(uri)} says that it has {rows} rows in {size} bytes, more than a file of "
            "images or labels can have; fetch it again"
        )


def _check_bytes(uri: str, decompressed: int, size: int) -> None:
    if decompressed > max(MAX_DECOMPRESSED_BYTES, MAX_DECOMPRESSION * size):
        raise UserError(
            f"{printable(uri)} is implausible: it has {size} bytes, and a part of it decompresses "
            f"to {decompressed} bytes; fetch it again, or write it without compression"
        )


def check_arrow_messages(uri: str, stream: pa.NativeFile) -> None:
    """Check the rows and the decompressed size of an Arrow file, before its data is read.

    Only message headers, and the decompressed sizes before compressed buffers, are read.

    Source: Arrow columnar format, "Encapsulated message format" and "Buffer compression".

    Raises:
        UserError: If there are too many rows, the decompressed size is implausible, or the headers
            cannot be checked.
    """
    size = stream.size()
    position = ARROW_FILE_BYTES if stream.read_at(len(ARROW_FILE), 0) == ARROW_FILE else 0
    rows = 0
    while position + PREFIX_BYTES <= size:
        mark, length = struct.unpack("<Ii", stream.read_at(PREFIX_BYTES, position))
        if mark == CONTINUES and length == 0:
            return  # the end of the messages
        if mark != CONTINUES or not 0 < length <= min(MAX_METADATA_BYTES, size - position):
            raise UserError(
                f"{printable(uri)} has no valid Arrow message at byte {position}; fetch it again, "
                "or write it again with Arrow 0.15 or newer"
            )
        start = position + PREFIX_BYTES
        head = stream.read_at(length, start)
        try:
            batch_rows, decompressed, body = _parse_message(head, stream, start + length)
            if body < 0:
                raise IndexError("the body of a message has a negative size")
        except (struct.error, IndexError):
            raise UserError(f"{printable(uri)} is not readable as Arrow; fetch it again") from None
        rows += batch_rows
        _check_rows(uri, rows, size)
        _check_bytes(uri, decompressed, size)
        position = start + length + body


def _parse_message(head: bytes, stream: pa.NativeFile, start: int) -> tuple[int, int, int]:
    """Parse a message, and return its rows, its decompressed bytes and the bytes of the body.

    Args:
        head: Header of the message.
        stream: The file.
        start: Position of the body in the file.
    """
    message = _FlatbufferTable(head, struct.unpack_from("<I", head)[0])
    body = message.read_number(BODY_LENGTH, "<q")
    batch = message.read_table_field(HEADER)
    kind = message.read_number(HEADER_TYPE, "<B")
    if kind == DICTIONARY_BATCH:
        batch = batch.read_table_field(DICTIONARY_DATA)
    if kind not in (DICTIONARY_BATCH, RECORD_BATCH):
        return 0, 0, body
    decompressed = 0
    if batch.locate(COMPRESSION):
        for offset, length in batch.read_pairs(BUFFERS):
            if length >= BUFFER_PREFIX_BYTES:
                prefix = stream.read_at(BUFFER_PREFIX_BYTES, start + offset)
                decompressed += max(struct.unpack("<q", prefix)[0], 0)  # -1: stored uncompressed
    return batch.read_number(NUM_ROWS, "<q"), decompressed, body


class _FlatbufferTable:
    """A flatbuffer table. Fields are numbered by their position in the schema."""

    def __init__(self, data: bytes, start: int):
        self.data = data
        self.start = start
        # position of the vtable, which lists the offsets of the fields
        self.vtable = start - struct.unpack_from("<i", data, start)[0]

    def locate(self, field: int) -> int:
        """Return the position of a field in `data`, or 0 if it has its default."""
        size = struct.unpack_from("<H", self.data, self.vtable)[0]
        slot = 4 + 2 * field
        offset = struct.unpack_from("<H", self.data, self.vtable + slot)[0] if slot < size else 0
        return self.start + offset if offset else 0

    def read_number(self, field: int, form: str) -> int:
        """Read a number in the `struct` format `form`, or 0 if it has its default."""
        start = self.locate(field)
        return int(struct.unpack_from(form, self.data, start)[0]) if start else 0

    def read_table_field(self, field: int) -> _FlatbufferTable:
        """Read the table in a field."""
        start = self.locate(field)
        return _FlatbufferTable(self.data, start + struct.unpack_from("<I", self.data, start)[0])

    def read_pairs(self, field: int) -> Iterator[tuple[int, int]]:
        """Yield the pairs of 64-bit integers in a vector of structs, for example `Buffer`."""
        start = self.locate(field)
        if start:
            start += struct.unpack_from("<I", self.data, start)[0]
            for index in range(struct.unpack_from("<I", self.data, start)[0]):
                yield struct.unpack_from("<qq", self.data, start + 4 + 16 * index)


@contextmanager
def _open_arrow(stream: pa.NativeFile) -> Iterator[Any]:
    """Context manager that yields the reader of an Arrow file or stream.

    A stream without the end mark is refused: it was probably truncated.
    """
    is_file = stream.read(len(ARROW_FILE)) == ARROW_FILE
    size = stream.size()
    if not is_file and stream.read_at(min(len(ARROW_END), size), max(size - len(ARROW_END), 0)) != (
        ARROW_END
    ):
        raise pa.ArrowInvalid("it ends without an end mark")
    stream.seek(0)
    with pa.ipc.open_file(stream) if is_file else pa.ipc.open_stream(stream) as reader:
        yield reader


def _iterate_batches(reader: Any) -> Iterator[pa.RecordBatch]:
    """Yield the batches of an Arrow file, validated.

    pyarrow does not check offsets when it reads, and those of a malicious file can be out of
    bounds.
    """
    if isinstance(reader, pa.ipc.RecordBatchFileReader):
        batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
    else:
        batches = iter(reader)
    for batch in batches:
        batch.validate(full=True)
        yield batch


def to_python_list(column: pa.Array) -> list[Any]:
    """Convert a column to Python values, and invalid UTF-8 to bytes.

    Equal values of a dictionary column share one object.
    """
    if not pa.types.is_dictionary(column.type):
        try:
            return list(column.to_pylist())
        except UnicodeDecodeError:
            return [to_python_value(value) for value in column]
    indices = column.indices.to_pylist()
    values = {index: to_python_value(column.dictionary[index]) for index in {*indices} - {None}}
    return [values.get(index) for index in indices]


def to_python_value(scalar: pa.Scalar) -> Any:
    """Convert a scalar to a Python value; invalid UTF-8 becomes bytes."""
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        if isinstance(scalar, pa.StructScalar):
            return {name: to_python_value(scalar[name]) for name in scalar}
        return scalar.as_buffer().to_pybytes()


@contextmanager
def translate_read_errors(uri: str) -> Iterator[None]:
    """Context manager that translates errors of pyarrow into a UserError."""
    try:
        yield
    except UserError:
        raise
    except (pa.ArrowException, OSError, ValueError, LookupError) as error:
        reason = printable(describe_error(error, only_first_line=True))
        advice = "fetch it again" if isinstance(error, pa.ArrowInvalid) else remedy(uri)
        kind = "Arrow" if get_suffix(uri) == ARROW_SUFFIX else "Parquet"
        raise UserError(
            f"{printable(uri)} is not readable as {kind} ({reason}); {advice}"
        ) from None
