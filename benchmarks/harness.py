"""Time variants in one process and one thread, in rounds of random order, by median CPU time."""

from __future__ import annotations

import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

HIGHEST_LOAD = float(os.environ.get("ACCRETE_BENCH_LOAD", 4.0))


@dataclass(frozen=True)
class Timing:
    """CPU seconds of each round, by variant."""

    seconds: dict[str, list[float]]

    def median(self, name: str) -> float:
        """Return the median CPU seconds of a variant."""
        return statistics.median(self.seconds[name])

    def ratio(self, slow: str, fast: str) -> float:
        """Return how many times as much CPU time `slow` takes as `fast`."""
        return self.median(slow) / self.median(fast)


def start(highest_load: float = HIGHEST_LOAD) -> None:
    """Limit PyTorch to one thread.

    Exit with a message and status 0 if the machine is too busy to measure.
    """
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    if load > highest_load:
        print(
            f"skipped: the 1-minute load is {load:.1f}, above {highest_load:.1f}; run it again "
            "on a quieter machine, or set ACCRETE_BENCH_LOAD"
        )
        sys.exit(0)


def interleave(
    variants: Mapping[str, Callable[[], object]],
    rounds: int = 9,
    warmup: int = 1,
    seed: int = 0,
    prepare: Mapping[str, Callable[[], object]] | None = None,
) -> Timing:
    """Call each variant once per round and measure its CPU time.

    Each round has a new random order, so that slow phases of the machine affect all variants alike.

    Args:
        variants: Functions to time, by name.
        rounds: Number of measured rounds.
        warmup: Number of rounds before them that are not measured.
        seed: Seed of the random order.
        prepare: Functions to call before a variant, by name of the variant. They are not measured.
    """
    order = list(variants)
    shuffle = random.Random(seed)
    seconds: dict[str, list[float]] = {name: [] for name in order}
    for turn in range(warmup + rounds):
        shuffle.shuffle(order)
        for name in order:
            if prepare and name in prepare:
                prepare[name]()
            began = time.process_time()
            variants[name]()
            if turn >= warmup:
                seconds[name].append(time.process_time() - began)
    return Timing(seconds)


class Report:
    """Prints measured values with their required bounds, and counts the failed requirements."""

    def __init__(self) -> None:
        self.failed = 0

    def equal(self, what: str, actual: Tensor, expected: Tensor, atol: float) -> None:
        """Require that two results differ by at most `atol`."""
        difference = float((actual.double() - expected.double()).abs().max())
        self._line(difference <= atol, what, f"differs by {difference:.1e}", f"at most {atol:.0e}")

    def at_least(self, what: str, ratio: float, demand: float) -> None:
        """Require a ratio of at least `demand`."""
        self._line(ratio >= demand, what, f"{ratio:.2f}x", f"at least {demand:.2f}x")

    def at_most(self, what: str, ratio: float, demand: float) -> None:
        """Require a ratio of at most `demand`."""
        self._line(ratio <= demand, what, f"{ratio:.2f}x", f"at most {demand:.2f}x")

    def below(self, what: str, seconds: float, demand: float) -> None:
        """Require a duration of at most `demand` seconds."""
        limit = f"at most {demand * 1000:.0f} ms"
        self._line(seconds <= demand, what, f"{seconds * 1000:.1f} ms", limit)

    def note(self, what: str, value: str) -> None:
        """Print a value without a requirement."""
        print(f"      {what}: {value}")

    def exit(self) -> None:
        """Exit with status 1 if a requirement failed, else with 0."""
        sys.exit(1 if self.failed else 0)

    def _line(self, is_met: bool, what: str, measured: str, demand: str) -> None:
        mark = "ok  "
        if not is_met:
            mark = "MISS"
            self.failed += 1
        print(f"{mark}  {what}: {measured} (demanded: {demand})", flush=True)
