"""Golden test of ingest: shards, index and rejected.csv must not change by a single byte."""

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
def test_ingest_result_matches_golden_file(case: str, cards: Any, tmp_path: Path) -> None:
    """If images or keys must change, raise ingest.REVISION and run `tests.ingest_sources`."""
    golden = json.loads(ingest_sources.GOLDEN.read_text())[case]
    assert ingest_sources.result_of(cards[case], tmp_path, ingest_sources.serial) == golden
