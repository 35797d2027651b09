"""Digests of many rows: of each key, and of all rows whatever their order."""

from __future__ import annotations

import hashlib

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

BATCH_ROWS = 1 << 16  # of a column that are Python objects at the same time
DIGEST_WORDS = 4  # of 64 bits, in a sha256


def compute_key_digests(keys: pa.ChunkedArray) -> NDArray[np.uint64]:
    """Return the sha256 of n strings as (n, DIGEST_WORDS) numbers, the highest first."""
    digests = np.empty((len(keys), DIGEST_WORDS), np.uint64)
    for start in range(0, len(keys), BATCH_ROWS):
        part = keys.slice(start, BATCH_ROWS).to_pylist()
        data = b"".join([hashlib.sha256(key.encode()).digest() for key in part])
        words = np.frombuffer(data, ">u8").reshape(-1, DIGEST_WORDS)
        digests[start : start + len(part)] = words
    return digests


def sort_by_digest(
    digests: NDArray[np.uint64], *groups: NDArray[np.integer]
) -> NDArray[np.integer]:
    """Return the stable order of rows by `groups`, the first counting most, then by digest."""
    words = [digests[:, word] for word in reversed(range(DIGEST_WORDS))]
    return np.lexsort((*words, *reversed(groups)))


def digest_rows(rows: pa.ChunkedArray) -> str:
    """Return the sha256 of the sorted lines of a column of bytes, whatever their order.

    Lines are sorted as text is; Python keeps what is no UTF-8 as lone surrogates, which come after
    most other characters.
    """
    rows = rows.cast(pa.large_binary())
    try:
        rows.cast(pa.large_string())
    except pa.ArrowInvalid:
        lines = [line.decode("utf-8", "surrogateescape") for line in rows.to_pylist()]
        text = "\n".join(sorted(lines))
        return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
    body = hashlib.sha256()
    order = pc.sort_indices(rows)
    for start in range(0, len(rows), BATCH_ROWS):
        part = rows.take(order.slice(start, BATCH_ROWS)).to_pylist()
        body.update(b"\n" * bool(start) + b"\n".join(part))
    return body.hexdigest()


def digest_index(index: pa.Table) -> str:
    """Return the sha256 of the sorted rows (split, key, class, sha256), whatever their shards."""
    names = ("split", "key", "class", "sha256")
    columns = [index[name].cast(pa.large_string()) for name in names]
    rows = pc.binary_join_element_wise(*columns, pa.scalar("\t", pa.large_string()))
    return digest_rows(rows)
