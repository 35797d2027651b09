"""Population-based training in rounds: between tasks, poor trials continue from better trials.

The algorithm is that of Jaderberg et al. (arXiv 1711.09846), with truncation selection of a
quarter. A round is one task: all trials learn a task before any trial starts the next task.
Therefore the exchange depends only on the records of the trials, and not on the number of parallel
trials. `tune.run_population` runs the rounds.
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
    """Start of a trial in a round.

    Attributes:
        params: Parameters of the trial in this round.
        parent: Number of the trial from which this trial continues; it can be the trial itself.
    """

    params: Params
    parent: int


def choose_start(
    number: int, position: int, records: Sequence[Trial], space: Space, seed: int
) -> Start:
    """Decide how a trial starts a task.

    For each trial in the lower quarter by accuracy, a trial in the upper quarter is drawn. If the
    drawn trial is better by more than a rounding error, the poor trial continues from it, with
    perturbed parameters. All other trials continue unchanged.

    Args:
        number: Number of the trial, which has learned tasks 0 to `position` - 1.
        position: Index of the task to start, at least 1.
        records: Records of all trials.
        space: Search space.
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
    """Results of the first tasks of a trial, and the parameters with which they were trained."""

    results: list[TrialResult]
    history: dict[str, Params]


def lineage(record: Trial, tasks: Sequence[str]) -> Lineage:
    """Return the lineage of a trial for `tasks`, which are the first tasks of the stream."""
    history = {task: params for task, params in record["history"].items() if task in tasks}
    return {"results": record["results"][: len(tasks)], "history": history}
