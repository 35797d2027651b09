"""Population-based training in rounds: between two tasks, trials that are behind take over what
better ones have learned.

Every trial has learned a task before the next one begins, however many run side by side, so what is
exchanged depends on the records alone (Jaderberg et al., arXiv 1711.09846, with truncation
selection of a quarter).
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.results.trials import SLACK
from pipeline.search.space import Params, Space
from workers.rng import derive_seed

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Start:
    """How a trial begins a round: its parameters, and the number of the trial whose results it goes
    on from."""

    params: Params
    parent: int


def start_of(
    number: int, position: int, records: Sequence[Record], space: Space, seed: int
) -> Start:
    """How trial `number`, which has learned tasks 0 to `position` - 1, begins task `position`.

    Of the trials that have learned the task before, those in the lower quarter by accuracy take the
    results of one in the upper quarter and parameters near its; the others go on as they are. There
    is a round per task, so nothing is taken over after the last one.
    """
    own = next(record for record in records if record["number"] == number)
    before = {
        record["number"]: record["rounds"][position - 1]
        for record in records
        if len(record["rounds"]) >= position
    }
    ranked = sorted(before, key=lambda other: (before[other]["accuracy"], -other))
    count = min(math.ceil(len(ranked) / 4), len(ranked) // 2)
    rng = random.Random(derive_seed(seed, "population", position, number))
    if number in ranked[:count]:
        parent = rng.choice(ranked[-count:])
        if before[parent]["accuracy"] > before[number]["accuracy"] + SLACK:
            return Start(space.near(before[parent]["params"], rng), parent)
    return Start(dict(own["rounds"][position - 1]["params"]), number)


def lineage(record: Record, tasks: Sequence[str]) -> dict[str, Any]:
    """What a record holds of `tasks`, the first ones of the stream: its results, and the parameters
    that they were trained with."""
    history = {task: params for task, params in record["history"].items() if task in tasks}
    return {"results": record["results"][: len(tasks)], "history": history}
