"""What ingest writes of a source does not change: shards, index and rejected.csv, byte for byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import ingest_sources


@pytest.fixture(scope="module")
def cards(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return ingest_sources.make_cards(tmp_path_factory.mktemp("sources"))


@pytest.mark.parametrize("case", json.loads(ingest_sources.GOLDEN.read_text()))
def test_a_source_gives_the_same_bytes_as_ever(case: str, cards: Any, tmp_path: Path) -> None:
    """A change of images or keys raises ingest.REVISION; then `python -m tests.ingest_sources`."""
    golden = json.loads(ingest_sources.GOLDEN.read_text())[case]
    assert ingest_sources.result_of(cards[case], tmp_path, ingest_sources.serial) == golden
