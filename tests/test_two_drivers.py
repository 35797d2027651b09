"""Tests of two concurrent drivers with one config and store: equal results, stored once."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from tests import small_run
from tests.recovery import MOMENTS, Reference


def raced(reference: Reference, storage_folder: Path, between_s: float) -> None:
    """Run two drivers at the same time, and check their exit codes and the store.

    between_s: seconds from the start of the first driver to that of the second.
    """
    config = reference.config(storage_folder)
    first = small_run.start(["run", config], storage_folder / "first.txt")
    time.sleep(between_s)
    second = small_run.start(["run", config], storage_folder / "second.txt")
    for process in (first, second):
        process.join(900)
    assert (first.exitcode, second.exitcode) == (0, 0), [
        (storage_folder / f"{name}.txt").read_text() for name in ("first", "second")
    ]
    storage = storage_folder / "storage"
    assert small_run.results(storage) == reference.expected
    for folder in (storage / "stages").iterdir():
        published = json.loads((folder / "manifest.json").read_text())["attempt"]
        attempts = [path.name for path in folder.iterdir() if path.is_dir()]
        assert attempts == [published], "the attempt of the slower driver must be deleted"
    assert not [*storage.rglob("*.part")]
    assert not [path for path in storage.rglob("*") if path.parent.name == "claims"]


@pytest.mark.few(1)
@pytest.mark.parametrize("race", range(2))
def test_two_simultaneous_drivers_store_results_of_one(
    race: Any, reference: Any, tmp_path: Path
) -> None:
    raced(reference, tmp_path, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("race", range(20))
def test_two_staggered_drivers_store_results_of_one(
    race: Any, reference: Any, tmp_path: Path
) -> None:
    share = random.Random(f"{MOMENTS}-race-{race}").uniform(0, 0.5)
    raced(reference, tmp_path, share * reference.seconds)
