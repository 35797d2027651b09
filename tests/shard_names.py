"""Names of the shards that ingest writes."""

from __future__ import annotations

import hashlib


def shard_name(split: str, label: str, number: int = 0) -> str:
    """Return the name of shard `number` of a class."""
    return f"{split}-{hashlib.sha256(label.encode()).hexdigest()[:16]}-{number:05d}.tar"
