"""How benchmarks compare: one process, one thread, rounds in random order, medians of CPU time."""

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
    """CPU seconds of every round, by variant."""

    seconds: dict[str, list[float]]

    def median(self, name: str) -> float:
        """Return the median CPU seconds of a variant."""
        return statistics.median(self.seconds[name])

    def ratio(self, slow: str, fast: str) -> float:
        """Return how many times as much CPU time `slow` takes as `fast`."""
        return self.median(slow) / self.median(fast)


def start(highest_load: float = HIGHEST_LOAD) -> None:
    """Use one thread from now on.

    Exit with a message and status 0 when the machine is too busy to measure.
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

    Each round has a new random order, so that slow spells of the machine hit all variants alike.

    prepare: by variant, what is called before it and not measured.
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
    """Prints what was measured beside what is demanded, and counts the demands that were missed."""

    def __init__(self) -> None:
        self.failed = 0

    def equal(self, what: str, actual: Tensor, expected: Tensor, atol: float) -> None:
        """Demand that two results are equal up to `atol`."""
        difference = float((actual.double() - expected.double()).abs().max())
        self._line(difference <= atol, what, f"differs by {difference:.1e}", f"at most {atol:.0e}")

    def at_least(self, what: str, ratio: float, demand: float) -> None:
        """Demand a lower bound of a ratio."""
        self._line(ratio >= demand, what, f"{ratio:.2f}x", f"at least {demand:.2f}x")

    def at_most(self, what: str, ratio: float, demand: float) -> None:
        """Demand an upper bound of a ratio."""
        self._line(ratio <= demand, what, f"{ratio:.2f}x", f"at most {demand:.2f}x")

    def below(self, what: str, seconds: float, demand: float) -> None:
        """Demand an upper bound of a duration."""
        limit = f"at most {demand * 1000:.0f} ms"
        self._line(seconds <= demand, what, f"{seconds * 1000:.1f} ms", limit)

    def note(self, what: str, value: str) -> None:
        """Print a value that has no demand."""
        print(f"      {what}: {value}")

    def exit(self) -> None:
        """Exit with status 1 when a demand was missed, else with 0."""
        sys.exit(1 if self.failed else 0)

    def _line(self, is_met: bool, what: str, measured: str, demand: str) -> None:
        mark = "ok  "
        if not is_met:
            mark = "MISS"
            self.failed += 1
        print(f"{mark}  {what}: {measured} (demanded: {demand})", flush=True)
