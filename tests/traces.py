"""Find traces of images in files: names, keys, digests and pixels, also in packed files."""

from __future__ import annotations

import base64
import hashlib
import io
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image

INLINE = re.compile(rb"data:image/[a-z]+;base64,([A-Za-z0-9+/=]+)")
SIDE = 8  # of the compared copies, in pixels
LIKENESS = 0.9  # minimum correlation of two copies


@dataclass(frozen=True)
class Trace:
    """The traces of an image: texts, and a small copy of the pixels (SIDE, SIDE)."""

    texts: tuple[bytes, ...]
    pixels: NDArray[np.float64]

    @classmethod
    def of(cls, path: Path, source: Path) -> Trace:
        """Return the traces of an image file in a source of class folders."""
        name = path.relative_to(source).as_posix()
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        texts = [text.encode() for text in (name, name.rpartition(".")[0])]
        decoded = np.asarray(Image.open(path).convert("RGB"))[:2].tobytes()  # as in a cache
        return cls((*texts, digest.encode(), decoded), shrink(Image.open(path)))


def shrink(image: Image.Image) -> NDArray[np.float64]:
    """Return a small grey copy of an image with mean 0 and norm 1; zeros if it has one colour."""
    small = image.convert("L").resize((SIDE, SIDE), Image.Resampling.BOX)
    values = np.asarray(small, np.float64)
    values = values - values.mean()
    norm = float(np.linalg.norm(values))
    normalized: NDArray[np.float64] = values / (norm or 1.0)
    return normalized


def contents(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a file and of any packed contents."""
    data = path.read_bytes()
    yield data
    if data.startswith(b"PAR1"):
        table = pq.read_table(io.BytesIO(data))
        yield str(table.to_pylist()).encode()
    if tarfile.is_tarfile(path):
        with tarfile.open(path) as archive:
            for member in archive:
                stream = archive.extractfile(member)
                yield member.name.encode()
                yield stream.read() if stream is not None else b""
    for found in INLINE.finditer(data):
        yield base64.b64decode(found[1])


def pictures(data: bytes) -> Iterator[NDArray[np.float64]]:
    """Yield a small copy of the image that the bytes encode, if any."""
    try:
        image = Image.open(io.BytesIO(data))
        yield shrink(image)
    except OSError:
        return


def find_traces(folders: list[Path], traces: list[Trace]) -> list[str]:
    """Return a line for each file and each trace found in it."""
    found: list[str] = []
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                found += [f"{path}: {what}" for what in _traces_in(path, traces)]
    return found


def _traces_in(path: Path, traces: list[Trace]) -> set[str]:
    found: set[str] = set()
    for data in contents(path):
        small = [*pictures(data)]
        for trace in traces:
            found |= {text[:80].decode("ascii", "replace") for text in trace.texts if text in data}
            if any((copy * trace.pixels).sum() > LIKENESS for copy in small):
                found.add(f"pixels of {trace.texts[0].decode()}")
    return found
