"""Locations of the shards of a card, as URLs with braces for WebDataset.

A card describes a data set. Ingest reads the data set and writes shards, unless the card uses
existing shards in place.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

from pipeline.config import settings as configs
from pipeline.config.yaml_files import absolute, find_config, read_yaml
from pipeline.data import card_files, in_place
from pipeline.data.braces import format_braces
from pipeline.data.cards import Card
from pipeline.data.splits import SPLITS, Split
from pipeline.graph import raw_data
from pipeline.graph.store import Store, compute_key
from workers.errors import UserError
from workers.storage.artifact import Artifact, is_local


class ShardUrl(NamedTuple):
    """URL of a shard of a split, or of several shards if it contains braces."""

    card: str
    split: Split
    url: str


def find_requested(name: str, storage: str | None) -> list[ShardUrl]:
    """Return the shards of a card, or of all cards of a config.

    Args:
        name: Name of a card, or path of a card or a config.
        storage: Storage with the ingested data. None: the storage in the config, or the folder
            `storage` if `name` is a card.
    """
    names = [name]
    is_file = name.endswith((".yaml", ".yml"))
    if is_file and "source" not in read_yaml(find_config(name), "a card or a config"):
        config = configs.load(name, [], with_methods=False)
        names = list(dict.fromkeys(entry.card for entry in config.stream.tasks))
        storage = storage or config.storage
    store = Store(absolute(storage or "storage"))
    return [shard for card in names for shard in list_shard_urls(card, store)]


def list_shard_urls(name: str, store: Store) -> list[ShardUrl]:
    """Return the shards of a card.

    These are the shards that the card lists, if it uses existing shards in place, or else the
    shards that ingest wrote. Shards are not opened.

    Raises:
        UserError: If the card lists no shards and is not ingested yet.
    """
    card = card_files.load_card_file(name, store)
    urls = in_place.get_shard_urls(card)
    if urls is None:
        return [ShardUrl(card.name, split, url) for split, url in _stored_urls(card, store)]
    patterns: dict[Split, tuple[str, ...]] = {
        "train": urls.train,
        "val": urls.val,
        "test": urls.test,
    }
    return [ShardUrl(card.name, split, url) for split in SPLITS for url in patterns[split]]


def _stored_urls(card: Card, store: Store) -> Iterator[tuple[Split, str]]:
    artifact = None
    if not is_local(store.storage) or os.path.isdir(store.storage):
        source = raw_data.find_source(store, card, check_remote=False)
        artifact = Artifact.open(store.root, compute_key(raw_data.stage_inputs(card, source), ()))
    if artifact is None:
        raise UserError(
            f"card {card.name!r} has no shards in storage {store.storage!r}; ingest its data with "
            "`python -m pipeline ingest CONFIG`, or name another storage with --storage"
        )
    names = sorted(name for name in artifact.manifest["files"] if name.endswith(".tar"))
    for split in SPLITS:
        of_split = [artifact.uri(name) for name in names if name.startswith(f"{split}-")]
        for url in format_braces(of_split):
            yield split, url
