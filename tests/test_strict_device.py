"""What a GPU would refuse, refused without one: every method in every stage on the strict device, and what its steps cost there."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from tests import on_strict_device, small_run
from tests.on_strict_device import Case
from workers.methods import METHODS

EVERY = [(method, scenario) for method, cls in METHODS.items() for scenario in sorted(cls.scenarios)]


@pytest.fixture(scope="module")
def device() -> Iterator[ProcessPoolExecutor]:
    """A process that has the strict device; it stays in there."""
    with ProcessPoolExecutor(1, small_run.processes(), on_strict_device.start) as process:
        yield process


@pytest.mark.parametrize(("method", "scenario"), EVERY)
def test_every_stage_of_every_method_runs_there_with_the_results_of_the_cpu(device: Any, method: str, scenario: str):
    """train, herd, finetune, prune, ..., `finish`, evaluation, canary, resuming from a checkpoint, serving."""
    device.submit(on_strict_device.check, Case(method, scenario)).result()
