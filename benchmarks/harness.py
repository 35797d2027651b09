"""How every benchmark compares: one process, one thread, rounds in random order, medians of process
CPU time."""

from __future__ import annotations

import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

HIGHEST_LOAD = float(os.environ.get("ACCRETE_BENCH_LOAD", 4.0))


@dataclass(frozen=True)
class Timing:
    """CPU seconds of every round, by variant."""

    seconds: dict[str, list[float]]

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def ratio(self, slow: str, fast: str) -> float:
        """How many times less CPU time `fast` takes than `slow`."""
        return self.median(slow) / self.median(fast)


def start(highest_load: float = HIGHEST_LOAD) -> None:
    """One thread from here on; ends with a message and status 0 where the machine is too busy to
    measure."""
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    if load > highest_load:
        print(
            f"skipped: the 1-minute load is {load:.1f}, above {highest_load:.1f}; run it again "
            "on a quieter machine, "
            "or set ACCRETE_BENCH_LOAD"
        )
        sys.exit(0)


def interleave(
    variants: dict[str, Callable[[], object]], rounds: int = 9, warmup: int = 1, seed: int = 0
) -> Timing:
    """Calls each variant once per round, in a new random order each round: slow spells of the
    machine hit all alike."""
    order, shuffle = list(variants), random.Random(seed)
    seconds: dict[str, list[float]] = {name: [] for name in order}
    for turn in range(warmup + rounds):
        shuffle.shuffle(order)
        for name in order:
            began = time.process_time()
            variants[name]()
            if turn >= warmup:
                seconds[name].append(time.process_time() - began)
    return Timing(seconds)


class Report:
    """Prints what was measured beside what is demanded, and remembers whether all of it held."""

    def __init__(self) -> None:
        self.failed = 0

    def equal(self, what: str, got: Tensor, want: Tensor, atol: float) -> None:
        """Goes before the timing of the same two things: a fast wrong answer is worth nothing."""
        difference = float((got.double() - want.double()).abs().max())
        self._line(difference <= atol, what, f"differs by {difference:.1e}", f"at most {atol:.0e}")

    def at_least(self, what: str, ratio: float, demand: float) -> None:
        self._line(ratio >= demand, what, f"{ratio:.2f}x", f"at least {demand:.2f}x")

    def at_most(self, what: str, ratio: float, demand: float) -> None:
        self._line(ratio <= demand, what, f"{ratio:.2f}x", f"at most {demand:.2f}x")

    def below(self, what: str, seconds: float, demand: float) -> None:
        self._line(
            seconds <= demand, what, f"{seconds * 1000:.1f} ms", f"at most {demand * 1000:.0f} ms"
        )

    def note(self, what: str, value: str) -> None:
        print(f"      {what}: {value}")

    def exit(self) -> None:
        """Ends the process: status 1 where a demand was missed."""
        sys.exit(1 if self.failed else 0)

    def _line(self, held: bool, what: str, measured: str, demand: str) -> None:
        self.failed += not held
        print(f"{'ok  ' if held else 'MISS'}  {what}: {measured} (demanded: {demand})", flush=True)
