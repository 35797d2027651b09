"""Ray Tune runs the trials of a search; what it goes on from after a kill are the records of
trials, never its own state."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from pipeline.config import ClusterSettings
from pipeline.launch.cluster import (
    ClusterState,
    DriverRegistration,
    actor_name,
    check_fits,
    register_actor,
    resources_per_worker,
    sizes_of_groups,
    where_ray_writes,
)
from pipeline.search.population import start_of
from pipeline.search.space import Params
from pipeline.search.spec import Search
from pipeline.search.trial import Plan, TrialFailed, now, read_record, run_trial, write_record
from workers.rng import derive_seed
from workers.storage.artifact import delete_dir, join


# ---- points --------------------------------------------------------------------------------------
def points_of(search: Search, number: int, first: int) -> Params | None:
    """Point `number` of a random search or a grid, a function of the settings alone; None behind
    the last one. first: number of the first trial of this phase."""
    settings = search.settings
    if settings.algorithm == "grid":
        grid = search.space.grid()
        return grid[number - first] if number - first < len(grid) else None
    return search.space.drawn(settings.seed, number)


class Optuna:
    """Suggestions of a tree-structured Parzen estimator, of several objectives if asked; suggestion
    n is drawn with a seed of its own, from what was told."""

    def __init__(self, search: Search):
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.optuna, self.search = optuna, search
        way = optuna.study.StudyDirection
        self.study = optuna.create_study(
            directions=[
                way.MAXIMIZE if name == "accuracy" else way.MINIMIZE
                for name in search.settings.objectives
            ]
        )
        self.asked: dict[int, Any] = {}

    def ask(self, number: int, known: Mapping[str, Any] | None) -> Params:
        """known: the parameters of this trial, where it began in an earlier session."""
        self.study.sampler = self.optuna.samplers.TPESampler(
            seed=derive_seed(self.search.settings.seed, "tpe", number) % 2**32
        )
        if known is not None:
            self.study.enqueue_trial(self.search.space.asked(known))
        trial = self.asked[number] = self.study.ask()
        return self.search.space.suggest(trial)

    def tell(self, number: int, result: Mapping[str, Any] | None) -> None:
        values = [
            float((result or {}).get(name, math.nan)) for name in self.search.settings.objectives
        ]
        if any(map(math.isnan, values)):
            self.study.tell(self.asked.pop(number), state=self.optuna.trial.TrialState.FAIL)
        else:
            self.study.tell(self.asked.pop(number), values)


# ---- Ray Tune ------------------------------------------------------------------------------------
def run_population(
    search: Search, plan: Plan, first: int, watch: Callable[[dict[str, Any]], None]
) -> None:
    """Population-based training: a round for each task, which begins when every trial has learned
    the one before."""
    for position in range(len(plan.tasks)):
        run_phase(search, replace(plan, until=position + 1), first, watch)
        records = search.records(plan.phase)
        if not records or any(
            record["status"] == "running" and len(record["rounds"]) <= position
            for record in records
        ):
            return  # the budget is used up


def run_phase(
    search: Search, plan: Plan, first: int, watch: Callable[[dict[str, Any]], None]
) -> None:
    """Runs the trials of one phase. first: the number of its first trial. watch: is told the record
    of each trial that has a new result or ended."""
    import ray
    from ray import tune
    from ray.tune.progress_reporter import TrialProgressCallback
    from ray.tune.search import Searcher

    settings, cluster = search.settings, search.cluster
    known = {record["number"]: record for record in search.records(plan.phase)}
    most = settings.budget.trials if settings.algorithm != "grid" else len(search.space.grid())
    optuna = Optuna(search) if settings.algorithm == "tpe" else None
    told = Unsaved(watch)

    class Asking(Searcher):
        """Numbers trials, and asks for points as long as the budget lasts. Trials of earlier
        sessions are asked for first, and tell again what they found."""

        def __init__(self) -> None:
            super().__init__(metric="accuracy", mode="max")
            self.next = first
            self.numbers: dict[str, int] = {}

        def suggest(self, trial_id: str) -> Any:
            number = self.next
            old = known.get(number)
            if (most is not None and number >= first + most) or (old is None and search.spent):
                return Searcher.FINISHED
            if (
                old is not None
                and plan.until is not None
                and len(old["rounds"]) == plan.until - 1 > 0
            ):
                start = start_of(
                    number, plan.until - 1, [*known.values()], search.space, settings.seed
                )
                self.next = number + 1
                return {"number": number, "params": start.params, "parent": start.parent}
            params = (
                optuna.ask(number, old and old["params"])
                if optuna
                else old["params"]
                if old
                else points_of(search, number, first)
            )
            if params is None:
                return Searcher.FINISHED
            self.next, self.numbers[trial_id] = number + 1, number
            return {"number": number, "params": params, "parent": None}

        def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
            if optuna and trial_id in self.numbers:
                record = read_record(search.storage, search.name, self.numbers[trial_id])
                optuna.tell(
                    self.numbers.pop(trial_id),
                    record["results"][-1]
                    if record and record["results"] and record["status"] != "failed"
                    else None,
                )

        def save(self, checkpoint_path: str) -> None:
            """Nothing: the records of trials are what a search goes on from."""

        def restore(self, checkpoint_path: str) -> None:
            """Nothing, too."""

    class Watch(TrialProgressCallback):
        """In place of what Tune would print: `watch` is told."""

        def on_trial_result(
            self, iteration: int, trials: Any, trial: Any, result: Any, **info: Any
        ) -> None:
            self._tell(trial)

        def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
            self._tell(trial, "stopped")

        def on_trial_error(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
            self._tell(trial, "failed")

        def _tell(self, trial: Any, ended: str = "") -> None:
            record = read_record(search.storage, search.name, trial.config["number"])
            if record is None:
                return
            if (
                ended == "stopped"
                and record["status"] == "running"
                and (time.monotonic() > until or not plan.is_last)
            ):
                return  # the hours are over, or the round is, and it goes on when there are more
            if ended and record["status"] == "running":  # its process was not there to write it
                message = (
                    "" if ended == "stopped" else "its process died; the search went on without it"
                )
                record |= {"status": ended, "message": message, "ended": now()}
                write_record(search.storage, search.name, record)
            told.held(record)

    name = actor_name(ray, search=True)
    presence = register_actor(ray, DriverRegistration, name)
    room = room_for(ray.get(presence.get_cluster_state.remote()), cluster, name)
    side_by_side = min(settings.concurrent or room, room)
    budget_s = (
        None
        if settings.budget.hours is None
        else max(1.0, 3600 * settings.budget.hours - search.worked_s)
    )
    until = math.inf if budget_s is None else time.monotonic() + budget_s - 1
    place = f"search-{search.name}"
    delete_dir(join(search.storage, "ray", place))  # of a session that was killed
    scheduler = scheduler_of(search)
    tuner = tune.Tuner(
        tune.with_resources(tune.with_parameters(trainable, plan=plan), resources_of(cluster)),
        tune_config=tune.TuneConfig(
            search_alg=Asking(),
            num_samples=most or -1,
            max_concurrent_trials=side_by_side,
            scheduler=scheduler,
            time_budget_s=budget_s,
            reuse_actors=True,
            metric=None if scheduler else "accuracy",
            mode=None if scheduler else "max",
        ),
        run_config=tune.RunConfig(
            name=place,
            **where_ray_writes(join(search.storage, "ray")),
            verbose=0,
            callbacks=[Watch(), tune.logger.JsonLoggerCallback()],
            failure_config=tune.FailureConfig(max_failures=cluster.retries),
        ),
    )
    try:
        tuner.fit()
    finally:
        # Tune's own bookkeeping; what counts are the records
        delete_dir(join(search.storage, "ray", place))


class Unsaved:
    """Holds what has no part in Tune's snapshots of itself."""

    def __init__(self, held: Any):
        self.held = held

    def __reduce__(self) -> tuple[Any, ...]:
        return Unsaved, (None,)


def trainable(tuned: dict[str, Any], plan: Plan) -> None:
    """What Tune runs in a process of a trial: results are told as they come."""
    from ray import tune

    number = tuned["number"]

    def report(result: dict[str, Any]) -> None:
        tune.report(
            {
                "task": result["position"] + 1,
                "accuracy": result["accuracy"],
                "bytes": result["bytes"],
                "number": number,
            }
        )

    with suppress(
        TrialFailed
    ):  # its sentence stands in its record; Tune hears of what broke down, and tries that again
        run_trial(plan, number, tuned["params"], report, tuned["parent"])


def scheduler_of(search: Search) -> Any:
    """None, or successive halving over the tasks completed. It has no rung at the last task, as a
    trial that has learned that is finished."""
    from ray.tune.schedulers import ASHAScheduler

    settings, most = search.settings, len(search.tasks)
    if settings.scheduler != "asha":
        return None
    return ASHAScheduler(
        time_attr="task",
        metric="accuracy",
        mode="max",
        max_t=most - 1,
        grace_period=settings.grace,
        reduction_factor=settings.reduction,
        stop_last_trials=False,
    )


def resources_of(cluster: ClusterSettings) -> dict[str, float]:
    """Of one trial: with several workers they are its own groups', and the trial only waits."""
    # of some kind it must ask for
    return {"memory": 1 << 20} if cluster.workers > 1 else resources_per_worker(cluster)


def room_for(around: ClusterState, cluster: ClusterSettings, name: str) -> int:
    """How many trials may run side by side in this driver's share of the cluster. name: what it has
    registered. Raises UserError where none fits."""
    trial = cluster.model_copy(update={"workers": max(1, cluster.workers)})
    check_fits(around, trial)
    return len(sizes_of_groups(around, trial.model_copy(update={"groups": 0}), name, sys.maxsize))
