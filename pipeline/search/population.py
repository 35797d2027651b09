"""Population-based training in rounds: between two tasks, trials of low accuracy continue from what
better ones have learned.

All trials have learned a task before the next one begins. So what is exchanged depends on the
records alone, not on how many trials run side by side (Jaderberg et al., arXiv 1711.09846, with
truncation selection of a quarter).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from pipeline.results.trials import SLACK, Round, Trial, TrialResult
from pipeline.search.space import Params, Space
from workers.rng import derive_seed


@dataclass(frozen=True)
class Start:
    """How a trial begins a round: its parameters, and the number of the trial whose results it
    continues from."""

    params: Params
    parent: int


def start_of(
    number: int, position: int, records: Sequence[Trial], space: Space, seed: int
) -> Start:
    """Return how trial `number`, which has learned tasks 0 to `position` - 1, begins task
    `position`.

    Of the trials that have learned the task before, each in the lower quarter by accuracy continues
    from the results of one in the upper quarter, with parameters near its. The others continue
    unchanged. There is a round per task, so nothing is exchanged after the last one.
    """
    last_rounds: dict[int, Round] = {}
    for record in records:
        if len(record["rounds"]) >= position:
            last_rounds[record["number"]] = record["rounds"][position - 1]
    ranked = sorted(last_rounds, key=lambda other: (last_rounds[other]["accuracy"], -other))
    quarter = min(math.ceil(len(ranked) / 4), len(ranked) // 2)
    rng = random.Random(derive_seed(seed, "population", position, number))
    if number in ranked[:quarter]:
        parent = rng.choice(ranked[-quarter:])
        if last_rounds[parent]["accuracy"] > last_rounds[number]["accuracy"] + SLACK:
            return Start(space.perturb(last_rounds[parent]["params"], rng), parent)
    return Start(dict(last_rounds[number]["params"]), number)


class Lineage(TypedDict):
    """Results of the first tasks of a trial, and the parameters that they were trained with."""

    results: list[TrialResult]
    history: dict[str, Params]


def lineage(record: Trial, tasks: Sequence[str]) -> Lineage:
    """Return what a trial has learned of `tasks`, the first ones of the stream."""
    history = {task: params for task, params in record["history"].items() if task in tasks}
    return {"results": record["results"][: len(tasks)], "history": history}
