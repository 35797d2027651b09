"""Variables of MATLAB's .mat files, version 5, within bounds; they hold values, and no code is run.

Source: MAT-File Format, MathWorks: a header of 128 bytes, then elements of a type and a size.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Sequence
from typing import Any

from workers.errors import UserError, require_package

MOST_FILE_BYTES = 64 << 20
MOST_BYTES = 256 << 20  # unpacked
HEADER_BYTES = 128
COMPRESSED = 15  # type of an element that is compressed by zlib
HDF5_START = b"\x89HDF\r\n\x1a\n"
STEP_BYTES = 1 << 20


def variables_of(data: bytes, where: str, names: Sequence[str]) -> dict[str, Any]:
    """Return variables of a .mat file as numpy arrays, structs with named fields, without axes of
    length one.

    where: for errors. Raise UserError where it is of version 7.3, too large, damaged, or lacks one.
    """
    require_package("scipy", "a .mat file", "prepare the data on a machine that has it")
    if HDF5_START in data[:1024] or b"MATLAB 7.3" in data[:HEADER_BYTES]:
        raise UserError(
            f"{where} is of MATLAB 7.3, which is not read, and the official file is of version 5; "
            "fetch that, or save it anew in MATLAB with save('-v7')"
        )
    from scipy.io import loadmat  # start-up time

    try:
        check_size(data)
        values = loadmat(io.BytesIO(data), squeeze_me=True, variable_names=list(names))
    except Exception as error:  # scipy raises almost anything on damaged files
        reason = str(error).splitlines()[0:1] or [type(error).__name__]
        raise UserError(
            f"{where} cannot be read as a .mat file ({reason[0]:.200}); fetch the official file "
            "again"
        ) from None
    missing = [name for name in names if name not in values]
    if missing:
        raise UserError(
            f"{where} has no variable {missing[0]!r}, which the official file has; fetch it again"
        )
    return {name: values[name] for name in names}


def check_size(data: bytes) -> None:
    """Raise ValueError where the elements of a file have more than MOST_BYTES when unpacked."""
    if len(data) < HEADER_BYTES:
        raise ValueError("it ends in its header")
    order = "<" if data[126:128] == b"IM" else ">"
    left = MOST_BYTES
    position = HEADER_BYTES
    while position + 8 <= len(data):
        kind, size = struct.unpack(f"{order}II", data[position : position + 8])
        body = data[position + 8 : position + 8 + size]
        left -= size
        if kind == COMPRESSED:
            left -= _unpacked_bytes(body, left)
        if left < 0:
            raise ValueError(f"it unpacks to more than {MOST_BYTES} bytes")
        position += 8 + size


def _unpacked_bytes(body: bytes, most: int) -> int:
    """Return how many bytes zlib makes of a body; it stops beyond `most`."""
    inflate = zlib.decompressobj()
    total = 0
    while body and not inflate.eof and total <= most:
        total += len(inflate.decompress(body, STEP_BYTES))
        body = inflate.unconsumed_tail
    return total
