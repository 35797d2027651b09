"""Population-based training in rounds: between tasks, poor trials continue from better ones.

All trials learn a task before the next task starts. Therefore the exchange depends only on the
records and not on the number of parallel trials (Jaderberg et al., arXiv 1711.09846, with
truncation selection of a quarter).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from pipeline.results.trials import SLACK, Trial, TrialResult, TrialRound
from pipeline.search.space import Params, Space
from workers.rng import derive_seed


@dataclass(frozen=True)
class Start:
    """Start of a trial in a round: its parameters, and the number of the continued trial."""

    params: Params
    parent: int


def choose_start(
    number: int, position: int, records: Sequence[Trial], space: Space, seed: int
) -> Start:
    """Decide how a trial starts a task.

    Each trial in the lower quarter by accuracy continues from a trial in the upper quarter, with
    perturbed parameters. The other trials continue unchanged. There is one round per task, so there
    is no exchange after the last task.

    Args:
        number: The trial, which has learned tasks 0 to `position` - 1.
        position: The task to start.
        records: Records of all trials.
        space: The space of the search.
        seed: Seed of the search.
    """
    last_rounds: dict[int, TrialRound] = {}
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
    """Results of the first tasks of a trial, and the parameters of their training."""

    results: list[TrialResult]
    history: dict[str, Params]


def lineage(record: Trial, tasks: Sequence[str]) -> Lineage:
    """Return the results of a trial for `tasks`, the first tasks of the stream."""
    history = {task: params for task, params in record["history"].items() if task in tasks}
    return {"results": record["results"][: len(tasks)], "history": history}
