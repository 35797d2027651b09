"""Read variables of MATLAB's .mat files, version 5: numbers, texts, cells and structs.

The files may come from an untrusted source, and other readers crash on damaged files. This reader
checks and limits every size, and runs no code.

Source: MAT-File Format, MathWorks: a header of 128 bytes, then elements with a type and a size. A
matrix is an element that consists of elements: flags, dimensions (`sides`), name, and data.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from workers.errors import UserError

MAX_FILE_BYTES = 64 << 20
MAX_BYTES = 64 << 20  # decompressed bytes of one variable
MAX_VALUES = 4_000_000  # structs, cells and their fields in one file
MAX_LEVELS = 8  # nesting depth of cells and structs
HEADER_BYTES = 128
TAG_BYTES = 8
SHORT_BYTES = 4  # an element with at most this number of bytes has its data in its tag
# Types of elements.
MATRIX = 14
COMPRESSED = 15
# Classes of matrices.
CELL = 1
STRUCT = 2
CHAR = 4
NUMERIC = range(6, 16)
# type of an element -> numpy's code, without the byte order
NUMBERS = {
    1: "i1",
    2: "u1",
    3: "i2",
    4: "u2",
    5: "i4",
    6: "u4",
    7: "f4",
    9: "f8",
    12: "i8",
    13: "u8",
}
ENCODINGS = {1: "latin-1", 2: "latin-1", 4: "utf-16", 16: "utf-8", 17: "utf-16", 18: "utf-32"}
HDF5_START = b"\x89HDF\r\n\x1a\n"

Value = NDArray[np.generic] | str | list["Value"] | list[dict[str, "Value"]] | None


class MatError(ValueError):
    """A file is damaged, or contains unsupported data."""


class Element(NamedTuple):
    """One element of a file. `kind` is its type."""

    kind: int
    body: bytes


def read_variables(data: bytes, where: str, names: Sequence[str]) -> dict[str, Value]:
    """Return variables of a .mat file.

    A variable is a vector of numbers (in column order), a text, a list of cells, a list of structs,
    or None if its class is not supported. A struct is a dict from field to value.

    Args:
        data: Bytes of the file.
        where: Name of the file, for errors.
        names: Names of the variables.

    Raises:
        UserError: If the file has version 7.3, is too large or damaged, or lacks a variable.
    """
    if HDF5_START in data[:1024] or b"MATLAB 7.3" in data[:HEADER_BYTES]:
        raise UserError(
            f"{where} is of MATLAB 7.3, which is not read, and the official file is of version 5; "
            "fetch that, or save it again in MATLAB with save('-v7')"
        )
    try:
        values = MatReader(data).variables(names)
    except (MatError, zlib.error, UnicodeDecodeError) as error:
        raise UserError(
            f"{where} cannot be read as a .mat file of version 5 ({error}); fetch the official "
            "file again"
        ) from None
    missing = [name for name in names if name not in values]
    if missing:
        raise UserError(
            f"{where} has no variable {missing[0]!r}, which the official file has; fetch it again"
        )
    return values


class MatReader:
    """Reads the variables of a file. Methods raise MatError if the file is damaged."""

    def __init__(self, data: bytes):
        if len(data) < HEADER_BYTES or data[126:128] not in (b"IM", b"MI"):
            raise MatError("it has no header of version 5")
        self.data = data
        self.order = "<" if data[126:128] == b"IM" else ">"
        self.values_left = MAX_VALUES

    def variables(self, names: Collection[str]) -> dict[str, Value]:
        """Return the variables with these names; missing ones are left out."""
        values: dict[str, Value] = {}
        for element in self._elements(self.data[HEADER_BYTES:], is_padded=False):
            if element.kind == COMPRESSED:
                element = next(self._elements(unpacked(element.body)))
            if element.kind == MATRIX:
                parts = self._elements(element.body)
                code, sides, name = self._head(parts)
                if name in names:
                    values[name] = self._value(code, sides, parts, 1)
        return values

    def _elements(self, data: bytes, is_padded: bool = True) -> Iterator[Element]:
        """Yield consecutive elements. `is_padded`: each element is padded to a multiple of 8."""
        position = 0
        while position < len(data):
            if position + TAG_BYTES > len(data):
                raise MatError("it ends inside of an element")
            kind, size = struct.unpack_from(f"{self.order}II", data, position)
            start = position + TAG_BYTES
            # a short element: the upper half of its first word is the size, and the data follow
            if kind >> 16:
                size = kind >> 16
                kind &= 0xFFFF
                start = position + SHORT_BYTES
                if size > SHORT_BYTES:
                    raise MatError("a short element is too long")
            if start + size > len(data):
                raise MatError("it ends inside of an element")
            yield Element(kind, data[start : start + size])
            position = start + size
            if is_padded:
                position += -position % TAG_BYTES

    def _head(self, parts: Iterator[Element]) -> tuple[int, list[int], str]:
        """Return class, dimensions and name of a matrix from its first three parts."""
        flags = self._numbers(_next(parts))
        sides = [_to_integer(side) for side in self._numbers(_next(parts))]
        name = _next(parts).body.decode("latin-1")
        if len(flags) == 0 or min(sides, default=-1) < 0:
            raise MatError("a matrix has no class or sides")
        return _to_integer(flags[0]) & 0xFF, sides, name

    def _value(self, code: int, sides: list[int], parts: Iterator[Element], level: int) -> Value:
        """Return the value of a matrix from the parts after its name. `code` is its class."""
        count = math.prod(sides)
        self._spend(max(count, 1) if code in (CELL, STRUCT) else 1)
        if code in NUMERIC:
            numbers = self._numbers(_next(parts))
            if len(numbers) != count:
                raise MatError(f"a matrix has {len(numbers)} numbers in place of {count}")
            return numbers
        if code == CHAR:
            return self._text(_next(parts))
        if code == CELL:
            return [self._matrix(_next(parts), level) for _ in range(count)]
        if code == STRUCT:
            return self._structs(count, parts, level)
        return None  # sparse matrices, functions, objects

    def _spend(self, count: int) -> None:
        """Count values; raise `MatError` if the file has more than MAX_VALUES."""
        self.values_left -= count
        if self.values_left < 0:
            raise MatError(f"it has more than {MAX_VALUES} values")

    def _matrix(self, element: Element, level: int) -> Value:
        if level >= MAX_LEVELS or element.kind != MATRIX:
            raise MatError("its cells are nested too deep, or are empty")
        self._spend(1)
        if not element.body:
            return None
        parts = self._elements(element.body)
        code, sides, _ = self._head(parts)
        return self._value(code, sides, parts, level + 1)

    def _structs(self, count: int, parts: Iterator[Element], level: int) -> list[dict[str, Value]]:
        lengths = self._numbers(_next(parts))
        names = _next(parts).body
        if len(lengths) != 1 or lengths[0] <= 0:
            raise MatError("the fields of a struct have no names")
        length = _to_integer(lengths[0])
        starts = range(0, len(names), length)
        fields = [_decode_name(names[start : start + length]) for start in starts]
        rows: list[dict[str, Value]] = [{} for _ in range(count)]
        for row in rows:
            for field in fields:
                row[field] = self._matrix(_next(parts), level)
        return rows

    def _numbers(self, element: Element) -> NDArray[np.generic]:
        code = NUMBERS.get(element.kind)
        if code is None:
            raise MatError(f"numbers are of the unknown type {element.kind}")
        kind = np.dtype(self.order + code)
        if len(element.body) % kind.itemsize:
            raise MatError("it ends inside of a number")
        return np.frombuffer(element.body, kind)

    def _text(self, element: Element) -> str:
        encoding = ENCODINGS.get(element.kind)
        if encoding is None:
            raise MatError(f"a text is of the unknown type {element.kind}")
        if encoding in ("utf-16", "utf-32"):
            encoding += "-le" if self.order == "<" else "-be"
        return element.body.decode(encoding)


def _to_integer(number: float) -> int:
    """Return a number as an int; raise `MatError` if it is NaN or infinite."""
    try:
        return int(number)
    except (ValueError, OverflowError):
        raise MatError("a size is not a number") from None


def _decode_name(padded: bytes) -> str:
    return padded.split(b"\0")[0].decode("latin-1")


def _next(parts: Iterator[Element]) -> Element:
    element = next(parts, None)
    if element is None:
        raise MatError("a matrix lacks a part")
    return element


def unpacked(body: bytes) -> bytes:
    """Decompress a body; raise `MatError` if it is truncated or exceeds MAX_BYTES."""
    inflate = zlib.decompressobj()
    data = inflate.decompress(body, MAX_BYTES)
    if inflate.unconsumed_tail:
        raise MatError(f"it unpacks to more than {MAX_BYTES} bytes")
    if not inflate.eof or not data:
        raise MatError("it ends inside of compressed data")
    return data


# ---- expected values -----------------------------------------------------------------------------
def require_integers(value: Value, where: str) -> list[int]:
    """Return a vector of whole numbers as integers; raise `UserError` for another value."""
    if not isinstance(value, np.ndarray):
        raise _other_kind(where, "whole numbers")
    numbers = value.tolist()
    if not all(float(number).is_integer() for number in numbers):
        raise _other_kind(where, "whole numbers")
    return [int(number) for number in numbers]


def _other_kind(where: str, kind: str) -> UserError:
    return UserError(f"{where} has no {kind} where the official file has; fetch it again")


def require_integer(value: Value, where: str) -> int:
    """Return a value as a single integer; raise `UserError` for another value."""
    numbers = require_integers(value, where)
    if len(numbers) != 1:
        raise UserError(
            f"{where}: {len(numbers)} numbers where one is expected; fetch the official file again"
        )
    return numbers[0]


def require_text(value: Value, where: str) -> str:
    """Return a text value; raise `UserError` for another type."""
    if not isinstance(value, str):
        raise _other_kind(where, "text")
    return value


def require_texts(value: Value, where: str) -> list[str]:
    """Return a list of cells with texts; raise `UserError` for another type."""
    if not isinstance(value, list):
        raise _other_kind(where, "list of texts")
    return [require_text(cell, where) for cell in value]  # type: ignore[arg-type]


def require_structs(value: Value, where: str, fields: Sequence[str]) -> list[dict[str, Value]]:
    """Return a list of structs; raise `UserError` for another type or a missing field."""
    rows: list[dict[str, Value]] = []
    for row in value if isinstance(value, list) else [None]:
        if not isinstance(row, dict):
            raise _other_kind(where, "list of structs")
        missing = [field for field in fields if field not in row]
        if missing:
            raise UserError(
                f"{where} has no field {missing[0]!r}, which the official file with labels has; "
                "fetch that"
            )
        rows.append(row)
    return rows
