"""Digests of image keys, and of the rows of an index.

The key of an image is its WebDataset key, `split/class/stem`. Selection sorts images by the digest
of their keys. The digests of rows show whether the images of a source or of a class have changed.
"""

from __future__ import annotations

import hashlib

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

BATCH_ROWS = 1 << 16  # rows converted to Python objects at once
DIGEST_WORDS = 4  # 64-bit words in a sha256
DIGITS = 32  # hexadecimal digits of the digest of a class
ClassDigests = dict[str, dict[str, str]]  # split -> class -> digest of the images


def compute_key_digests(keys: pa.ChunkedArray) -> NDArray[np.uint64]:
    """Compute the sha256 of n keys: (n, DIGEST_WORDS) 64-bit words, the most significant first."""
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
    """Return row indices in stable order by `groups` (the first one is primary), then by digest."""
    words = [digests[:, word] for word in reversed(range(DIGEST_WORDS))]
    return np.lexsort((*words, *reversed(groups)))


def digest_rows(rows: pa.ChunkedArray) -> str:
    """Compute the sha256 of the sorted rows of a column of bytes, joined by newlines.

    The rows are sorted as text. Invalid UTF-8 becomes lone surrogates, which sort after most other
    characters.
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


def digest_classes(index: pa.Table, is_in_place: bool, salt: str = "") -> ClassDigests:
    """Compute a digest of the images of each class in each split.

    The digest covers the keys and the sha256 of the images. It depends neither on other classes nor
    on the division into shards. For shards used in place, the digest also covers the shard
    and the offset of each image, because images are read in this order.

    Args:
        index: Index of an ingest stage, see `workers.data.shards.Shards`.
        is_in_place: Whether the shards are used in place, without a copy.
        salt: Settings that affect which images are used, and how they are decoded.

    Returns:
        Split -> class -> the first DIGITS hexadecimal digits of a sha256.
    """
    names = ["split", "class", "sha256", "key"]
    if is_in_place:
        names = ["split", "class", "shard", "offset", "sha256", "key"]
    ordered = index.select(names).sort_by([(name, "ascending") for name in names])
    columns = [ordered[name].cast(pa.string()) for name in names[2:]]
    lines = pc.binary_join_element_wise(*columns, "\t").combine_chunks()
    groups = index.group_by(["split", "class"]).aggregate([([], "count_all")])
    digests: ClassDigests = {}
    start = 0
    for group in groups.sort_by([("split", "ascending"), ("class", "ascending")]).to_pylist():
        body = hashlib.sha256(salt.encode())
        stop = start + group["count_all"]
        while start < stop:
            part = lines.slice(start, min(BATCH_ROWS, stop - start)).to_pylist()
            body.update("\n".join([*part, ""]).encode())
            start += len(part)
        digests.setdefault(group["split"], {})[group["class"]] = body.hexdigest()[:DIGITS]
    return digests


def digest_index(index: pa.Table) -> str:
    """Compute the sha256 of the sorted rows (split, key, class, sha256).

    It does not depend on the division into shards.
    """
    names = ("split", "key", "class", "sha256")
    columns = [index[name].cast(pa.large_string()) for name in names]
    rows = pc.binary_join_element_wise(*columns, pa.scalar("\t", pa.large_string()))
    return digest_rows(rows)
