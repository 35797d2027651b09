"""Shards that are used in place: they are read at their source, and not copied to the store.

The store has their names, sizes and digests. Only the user's own card (the description of the data
set) has their locations. Therefore an index or manifest from someone else cannot make a run open a
connection or a file.
"""

from __future__ import annotations

import functools
import io
import re
from itertools import islice

import pyarrow as pa
import pyarrow.parquet as pq

from workers.errors import DamagedArtifact, UserError
from workers.job import ShardUrls
from workers.storage.artifact import Artifact, FileInfo
from workers.storage.parquet import read_table

SHARDS = "shards.parquet"
SCHEMA = pa.schema([("shard", pa.string()), ("bytes", pa.int64()), ("sha256", pa.string())])
MAX_SHARDS = 200_000  # maximum number of shards in a split
MAX_BRACES = 50  # maximum number of opening braces in a pattern; they can be nested
# {FIRST..LAST} or {FIRST..LAST..STEP}. Python refuses to convert more than 4300 digits.
NUMBER = r"(-?\d{1,4300})"
RANGE = re.compile(rf"\{{{NUMBER}\.\.{NUMBER}(?:\.\.{NUMBER})?\}}")


def expand_patterns(patterns: tuple[str, ...]) -> list[str]:
    """Expand patterns with braces to paths or URLs, like WebDataset.

    Raises:
        UserError: If braces are unbalanced or too many, or there are more than MAX_SHARDS results.
    """
    from braceexpand import braceexpand  # optional: needed only for shards used in place

    urls: list[str] = []
    for pattern in patterns:
        if pattern.count("{") > MAX_BRACES:
            raise UserError(
                f"shards {pattern!r:.300} have more than {MAX_BRACES} braces; write them as "
                "shard-{000000..000099}.tar, and a brace of a name as \\{"
            )
        # Checked first, because `braceexpand` builds the complete list of each range.
        for first, last, step in RANGE.findall(pattern):
            if abs(int(last) - int(first)) // max(1, abs(int(step or 1))) >= MAX_SHARDS:
                raise _too_many(pattern)
        try:
            urls += islice(braceexpand(pattern), MAX_SHARDS + 1)
        except ValueError as error:
            raise UserError(
                f"shards {pattern!r:.300} cannot be expanded ({error}); write them as "
                "shard-{000000..000099}.tar, and a brace of a name as \\{"
            ) from None
        if len(urls) > MAX_SHARDS:
            raise _too_many(pattern)
    return urls


def _too_many(pattern: str) -> UserError:
    return UserError(
        f"shards {pattern!r:.300} are more than {MAX_SHARDS}; give the numbers of the first and "
        "of the last shard that exist"
    )


def parse_shard_number(name: str) -> int:
    """Return the number in a shard name, the inverse of `shard_name`."""
    return int(name.rpartition("-")[2].removesuffix(".tar"))


def shard_name(split: str, number: int) -> str:
    """Return the name of a shard in the index. It does not change if the data are moved.

    Args:
        split: Split of the shard.
        number: Position in the card's list of shards of the split, from 0.
    """
    return f"{split}-{number:06d}.tar"


@functools.lru_cache(maxsize=32)
def urls_by_name(urls: ShardUrls) -> dict[str, str]:
    """Map the name of each shard of a card to its path or URL, in order of train, val, test.

    Raises:
        UserError: If a shard is listed twice.
    """
    by_name: dict[str, str] = {}
    names: dict[str, str] = {}
    for split, patterns in (("train", urls.train), ("val", urls.val), ("test", urls.test)):
        for number, url in enumerate(expand_patterns(patterns)):
            name = shard_name(split, number)
            if url in names:
                raise UserError(
                    f"shard {url} is listed twice, as {names[url]} and as {name}; list each once"
                )
            names[url] = name
            by_name[name] = url
    return by_name


def is_in_place(artifact: Artifact) -> bool:
    """Return whether an ingest stage uses its shards in place."""
    return SHARDS in artifact.manifest["files"]


def read_shard_list(artifact: Artifact) -> dict[str, FileInfo]:
    """Return the size and digest that each shard had at ingest, by shard name.

    Raises:
        DamagedArtifact: If the file SHARDS is missing or invalid.
    """
    try:
        table = read_table(artifact.read(SHARDS))
        if table.schema != SCHEMA:
            raise pa.ArrowInvalid("it has other columns")
        files: dict[str, FileInfo] = {}
        for row in table.to_pylist():
            # checked, because the digest becomes a part of a path in the cache of a node
            is_digest = re.fullmatch("[0-9a-f]{64}", row["sha256"] or "") is not None
            if not is_digest or not row["shard"] or (row["bytes"] or -1) < 0:
                raise pa.ArrowInvalid("a row is not that of a shard")
            files[row["shard"]] = {"bytes": row["bytes"], "sha256": row["sha256"]}
    except (pa.ArrowException, OSError) as error:
        raise DamagedArtifact(
            artifact.key,
            f"{artifact.uri(SHARDS)} is not readable as a list of shards "
            f"({str(error).splitlines()[0]}); run the same command again to repeat the ingest",
        ) from None
    return files


def encode_shard_list(files: dict[str, FileInfo]) -> bytes:
    """Return the bytes of the list of shards that `read_shard_list` reads."""
    rows = [{"shard": name, **info} for name, info in files.items()]
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), buffer, compression="zstd")
    return buffer.getvalue()
