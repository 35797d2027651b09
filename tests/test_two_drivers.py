"""Two drivers that start at the same moment on the same config and store: each stage stands once,
as one driver alone would have made it."""

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
    """between_s: how much later the second one starts."""
    config = reference.config(storage_folder)
    first = small_run.start(["run", config], storage_folder / "first.txt")
    time.sleep(between_s)
    second = small_run.start(["run", config], storage_folder / "second.txt")
    for process in (first, second):
        process.join(240)
    assert (first.exitcode, second.exitcode) == (0, 0), [
        (storage_folder / f"{name}.txt").read_text() for name in ("first", "second")
    ]
    storage = storage_folder / "storage"
    assert small_run.results(storage) == reference.expected
    for folder in (storage / "stages").iterdir():
        standing = json.loads((folder / "manifest.json").read_text())["attempt"]
        assert [path.name for path in folder.iterdir() if path.is_dir()] == [standing], (
            "what the slower one wrote is dropped"
        )
    assert not [
        path
        for path in storage.rglob("*")
        if path.suffix == ".part" or path.parent.name == "claims"
    ]


@pytest.mark.parametrize("race", range(2))
def test_two_drivers_at_the_same_moment_make_what_one_makes(
    race: Any, reference: Any, tmp_path: Path
) -> None:
    raced(reference, tmp_path, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("race", range(20))
def test_two_drivers_close_to_each_other_make_what_one_makes(
    race: Any, reference: Any, tmp_path: Path
) -> None:
    raced(
        reference,
        tmp_path,
        random.Random(f"{MOMENTS}-race-{race}").uniform(0, 0.5) * reference.seconds,
    )
