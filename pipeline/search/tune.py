"""Run the trials of a search with Ray Tune.

`run_phase` runs the trials of one phase. Tune asks `AskingSearcher` for the parameters of each
trial, runs `trainable` in a process, and calls `RecordCallback` with the results.

A killed search is resumed from the trial records, and not from the state of Tune.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ray import tune
from ray.tune.progress_reporter import TrialProgressCallback
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search import Searcher

from pipeline.config.settings import ClusterSettings
from pipeline.graph.retries import RetryPolicy
from pipeline.launch.cluster import (
    ClusterState,
    DriverRegistration,
    make_actor_name,
    make_ray_storage_arguments,
    register_actor,
)
from pipeline.launch.shares import check_fits, compute_group_sizes, resources_per_worker
from pipeline.results.trials import Trial, TrialResult
from pipeline.search.population import choose_start
from pipeline.search.space import Params
from pipeline.search.spec import Search
from pipeline.search.trial import (
    PhasePlan,
    TrialFailed,
    now,
    read_trial_record,
    run_trial,
    write_record,
)
from workers.plugins import add_plugin, import_plugins
from workers.rng import derive_seed
from workers.storage.artifact import delete_dir, join

if TYPE_CHECKING:
    from ray.tune.experiment import Trial as TuneTrial

TrialObserver = Callable[[Trial], None]


# ---- points of the space -------------------------------------------------------------------------
def draw_point(search: Search, number: int, first: int) -> Params | None:
    """Return the point of a trial in a random search or a grid, or None after a grid's last point.

    The point depends only on the settings and the arguments, so a resumed search draws it again.

    Args:
        search: The search.
        number: Number of the trial.
        first: Number of the first trial of the phase.
    """
    settings = search.settings
    if settings.algorithm != "grid":
        return search.space.draw_point(settings.seed, number)
    grid = search.space.grid()
    return grid[number - first] if number - first < len(grid) else None


class Optuna:
    """Suggests points with Optuna's tree-structured Parzen estimator, for one or two objectives.

    A suggestion depends on the number of the trial, from which its seed is derived, and on the
    results reported so far.
    """

    def __init__(self, search: Search):
        import optuna  # optional dependency of algorithm `tpe`

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.optuna = optuna
        self.search = search
        self.asked: dict[int, Any] = {}
        direction = optuna.study.StudyDirection
        directions = {"accuracy": direction.MAXIMIZE, "bytes": direction.MINIMIZE}
        self.study = optuna.create_study(
            directions=[directions[name] for name in search.settings.objectives]
        )
        if search.warm_start is not None:
            for index, point in enumerate(search.warm_start.observations):
                number = -1 - index  # no trial of this search has a negative number
                self.ask(number, point.params)
                self.tell(number, {"accuracy": point.accuracy, "bytes": point.bytes})

    def ask(self, number: int, known: Mapping[str, Any] | None) -> Params:
        """Return the parameters of a trial.

        Args:
            number: Number of the trial.
            known: Parameters that the trial must have, for example from an earlier session; None:
                Optuna chooses.
        """
        seed = derive_seed(self.search.settings.seed, "tpe", number) % 2**32
        self.study.sampler = self.optuna.samplers.TPESampler(seed=seed)
        if known is not None:
            self.study.enqueue_trial(self.search.space.to_optuna(known))
        trial = self.study.ask()
        self.asked[number] = trial
        return self.search.space.suggest(trial)

    def tell(self, number: int, result: Mapping[str, Any] | None, is_finished: bool = True) -> None:
        """Report the last result of a trial to Optuna.

        Args:
            number: Number of the trial.
            result: Last result of the trial; None: the trial is reported as failed.
            is_finished: Whether the trial has learned all tasks. Otherwise, it is reported as
                pruned, because its accuracy covers fewer tasks, or it forgets too much.
        """
        last_result = result or {}
        objectives = self.search.settings.objectives
        values = [float(last_result.get(name, math.nan)) for name in objectives]
        trial = self.asked.pop(number)
        states = self.optuna.trial.TrialState
        if any(math.isnan(value) for value in values):
            self.study.tell(trial, state=states.FAIL)
        elif is_finished:
            self.study.tell(trial, values)
        else:
            if len(values) == 1:  # Optuna accepts no intermediate values for two objectives
                trial.report(values[0], last_result["position"] + 1)
            self.study.tell(trial, state=states.PRUNED)


# ---- Ray Tune ------------------------------------------------------------------------------------
def run_population(search: Search, plan: PhasePlan, first: int, notify: TrialObserver) -> None:
    """Run population-based training (`pbt`): one round per task. See `run_phase` for the arguments.

    A round starts after every trial has learned the previous task or has ended. Between rounds,
    `choose_start` decides which trials continue from better ones.
    """
    for position in range(len(plan.tasks)):
        run_phase(search, replace(plan, until=position + 1), first, notify)
        records = search.records(plan.phase)
        unfinished = [
            record
            for record in records
            if record["status"] == "running" and len(record["rounds"]) <= position
        ]
        if unfinished or not records or search.is_gpu_budget_used:
            return  # the budget is used up; the round may be incomplete


def run_phase(search: Search, plan: PhasePlan, first: int, notify: TrialObserver) -> None:
    """Run the trials of one phase.

    Args:
        search: The search.
        plan: Common data of the trials.
        first: Number of the first trial.
        notify: Called with the record of each trial that has a new result or has ended.
    """
    import ray

    settings = search.settings
    name = make_actor_name(ray, search=True)
    driver = register_actor(ray, DriverRegistration, name)
    cluster_state = ray.get(driver.get_cluster_state.remote())
    max_parallel = count_parallel_trials(cluster_state, search.cluster, name)
    budget_s = None
    end = math.inf
    if settings.budget.hours is not None:
        budget_s = max(1.0, 3600 * settings.budget.hours - search.elapsed_s)
        # One second before Tune's deadline, so that each trial that Tune stops then counts as
        # interrupted.
        end = time.monotonic() + budget_s - 1
    tune_folder = join(search.storage, "ray", get_tune_folder(search))
    delete_dir(tune_folder)  # may have files of a killed session
    tuner = build_tuner(
        search,
        plan,
        AskingSearcher(search, plan, first),
        RecordCallback(search, plan, notify, end),
        min(settings.concurrent or max_parallel, max_parallel),
        budget_s,
    )
    try:
        tuner.fit()
    finally:
        delete_dir(tune_folder)  # not needed to resume


def get_tune_folder(search: Search) -> str:
    """Return the name of the folder for Tune's own files, in the folder `ray` of the storage."""
    return f"search-{search.name}"


def build_tuner(
    search: Search,
    plan: PhasePlan,
    searcher: AskingSearcher,
    callback: RecordCallback,
    side_by_side: int,
    budget_s: float | None,
) -> tune.Tuner:
    """Create the tuner of a phase.

    Args:
        search: The search.
        plan: Common data of the trials.
        searcher: Chooses the parameters of trials.
        callback: Called with the results of trials.
        side_by_side: Maximum number of parallel trials.
        budget_s: Remaining seconds of the budget; None: no limit.
    """
    scheduler = make_scheduler(search)
    trial_function = tune.with_parameters(trainable, plan=plan)
    return tune.Tuner(
        tune.with_resources(trial_function, compute_resources(search.cluster)),
        tune_config=tune.TuneConfig(
            search_alg=searcher,
            num_samples=searcher.max_trials or -1,
            max_concurrent_trials=side_by_side,
            scheduler=scheduler,
            time_budget_s=budget_s,
            reuse_actors=True,
            metric=None if scheduler else "accuracy",  # a scheduler has its own metric
            mode=None if scheduler else "max",
        ),
        run_config=tune.RunConfig(
            name=get_tune_folder(search),
            **make_ray_storage_arguments(join(search.storage, "ray")),
            stop=GpuBudgetStopper(search),
            verbose=0,
            callbacks=[callback, tune.logger.JsonLoggerCallback()],
            failure_config=tune.FailureConfig(max_failures=RetryPolicy.of(search.cluster).trial),
        ),
    )


class AskingSearcher(Searcher):
    """A searcher for Tune that numbers the trials and chooses their parameters.

    Trials with a record, from earlier sessions or earlier rounds, come first. Those of earlier
    sessions report their results again, so that the scheduler and Optuna know them. Then new trials
    start until the budget is used up.
    """

    def __init__(self, search: Search, plan: PhasePlan, first: int):
        super().__init__(metric="accuracy", mode="max")
        settings = search.settings
        self.search = search
        self.plan = plan
        self.first = first
        self.next = first
        # number -> record of a trial from an earlier session or round
        self.known = {record["number"]: record for record in search.records(plan.phase)}
        self.max_trials = settings.budget.trials
        if settings.algorithm == "grid":
            self.max_trials = len(search.space.grid())
        self.optuna = Optuna(search) if settings.algorithm == "tpe" else None
        self.numbers: dict[str, int] = {}  # Tune's id of a trial -> its number, as Optuna knows it

    def suggest(self, trial_id: str) -> Any:
        """Return the argument `tuned` of `trainable`, or FINISHED if no further trial starts."""
        number = self._next_number()
        known = self.known.get(number)
        if self.max_trials is not None and number >= self.first + self.max_trials:
            return Searcher.FINISHED
        if known is None and self._has_ended():
            return Searcher.FINISHED
        if known is not None and _is_in_later_round(known, self.plan):
            self.next = number + 1
            position = len(known["rounds"])  # index of the task that the trial learns next
            records = list(self.known.values())
            start = choose_start(
                number, position, records, self.search.space, self.search.settings.seed
            )
            return {"number": number, "params": start.params, "parent": start.parent}
        params = self._params(number, known)
        if params is None:
            return Searcher.FINISHED
        self.next = number + 1
        self.numbers[trial_id] = number
        return {"number": number, "params": params, "parent": None}

    def _next_number(self) -> int:
        """Return the number of the next trial.

        If the GPU-hours are used up, unfinished trials of earlier sessions are skipped.
        """
        number = self.next
        if self.search.is_gpu_budget_used:
            while number in self.known and self.known[number]["status"] == "running":
                number += 1
        return number

    def _has_ended(self) -> bool:
        """Return whether no new trial may start, for reasons other than the number of trials."""
        return self.search.is_budget_used or (self.max_trials is None and self.search.is_idle)

    def _params(self, number: int, known: Trial | None) -> Params | None:
        """Return the parameters of a trial, or None after the last point of a grid."""
        known_params = self._first_params(number)
        if known is not None:
            known_params = known["params"]
        if self.optuna is not None:
            return self.optuna.ask(number, known_params)
        if known_params is not None:
            return known_params
        return draw_point(self.search, number, self.first)

    def _first_params(self, number: int) -> Params | None:
        """Return the point of the warm start that a trial must try, or None."""
        warm_start = self.search.warm_start
        if warm_start is None or number - self.first >= len(warm_start.points):
            return None
        return dict(warm_start.points[number - self.first].params)

    def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
        """Report the last result of a trial to Optuna."""
        if self.optuna is None or trial_id not in self.numbers:
            return
        number = self.numbers.pop(trial_id)
        record = read_trial_record(self.search.storage, self.search.name, number)
        last = None
        is_finished = False
        if record and record["results"] and record["status"] != "failed":
            last = record["results"][-1]
            is_finished = record["status"] == "finished"
        self.optuna.tell(number, last, is_finished)

    def save(self, checkpoint_path: str) -> None:
        """Save nothing: a search resumes from the records of the trials."""

    def restore(self, checkpoint_path: str) -> None:
        """Restore nothing: a search resumes from the records of the trials."""


def _is_in_later_round(record: Trial, plan: PhasePlan) -> bool:
    """Return whether a trial has finished the previous round, but not this one.

    In the first round, and in phases without rounds, the result is False.
    """
    if plan.until is None or plan.until == 1:
        return False
    return len(record["rounds"]) == plan.until - 1


class GpuBudgetStopper(tune.Stopper):
    """Stops each running trial at its next result after the GPU-hours are used up."""

    def __init__(self, search: Search):
        self.search = search

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Return whether a trial stops."""
        return self.search.is_gpu_budget_used

    def stop_all(self) -> bool:
        """Return False, because `__call__` stops each trial at its own next result."""
        return False


class RecordCallback(TrialProgressCallback):
    """Calls `notify` for each trial that has a new result or has ended.

    As a `TrialProgressCallback`, it replaces the callback that prints Tune's output.

    Attributes:
        search: The search.
        plan: Common data of the trials.
        notify: The function to call with the record of a trial, in an `Unsaved`.
        end: Time on the monotonic clock from which a stopped trial counts as interrupted, because
            the budget of hours ends. Infinity without this budget.
    """

    def __init__(self, search: Search, plan: PhasePlan, notify: TrialObserver, end: float):
        super().__init__()
        self.search = search
        self.plan = plan
        self.notify = Unsaved(notify)
        self.end = end

    def on_trial_result(
        self,
        iteration: int,
        trials: list[TuneTrial],
        trial: TuneTrial,
        result: dict[str, Any],
        **info: Any,
    ) -> None:
        self._notify(trial)

    def on_trial_complete(
        self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any
    ) -> None:
        self._notify(trial, "stopped")

    def on_trial_error(
        self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any
    ) -> None:
        self._notify(trial, "failed")

    def _notify(self, trial: TuneTrial, end_status: str = "") -> None:
        """Update the record of a trial if Tune has ended the trial, and call `notify` with it.

        If Tune has only interrupted the trial, neither is done, because the trial will continue.

        Args:
            trial: Tune's trial.
            end_status: Status to write if the trial has ended but its record still says `running`;
                "": the trial has not ended.
        """
        search = self.search
        record = read_trial_record(search.storage, search.name, trial.config["number"])
        if record is None:
            return
        search.add_cost(record)
        if end_status and record["status"] == "running":
            is_budget_used = time.monotonic() > self.end or search.is_gpu_budget_used
            if end_status == "stopped" and (is_budget_used or not self.plan.is_last):
                return  # the trial continues in the next round, or after the budget is raised
            record["status"] = end_status
            record["message"] = ""
            if end_status == "failed":
                record["message"] = "its process died; the search went on without it"
            record["ended"] = now()
            write_record(search.storage, search.name, record)
        self.notify.held(record)


class Unsaved:
    """Holds a value that is left out when Tune pickles its callbacks."""

    def __init__(self, held: Any):
        self.held = held

    def __reduce__(self) -> tuple[Any, ...]:
        return Unsaved, (None,)


def trainable(tuned: dict[str, Any], plan: PhasePlan) -> None:
    """Run a trial in a process that Tune starts, and report its results to Tune.

    Args:
        tuned: Number, parameters and parent of the trial, from `AskingSearcher.suggest`.
        plan: Common data of the trials.
    """
    number = tuned["number"]
    for module in plan.body.get("plugins", ()):
        add_plugin(module)
    import_plugins()

    def report(result: TrialResult) -> None:
        metrics = {
            "task": result["position"] + 1,
            "accuracy": result["accuracy"],
            "bytes": result["bytes"],
            "number": number,
        }
        tune.report(metrics)

    # `TrialFailed` is hidden from Tune, because the record has the message. After any other error,
    # Tune retries the trial.
    with suppress(TrialFailed):
        run_trial(plan, number, tuned["params"], report, tuned["parent"])


def make_scheduler(search: Search) -> ASHAScheduler | None:
    """Create the scheduler `asha`, with the number of learned tasks as time.

    A rung is a number of learned tasks after which trials are compared. The last task has no rung,
    because a trial that has learned the last task is finished.

    Returns:
        The scheduler; None for `none` and `pbt`, because `run_population` implements `pbt`.
    """
    settings = search.settings
    if settings.scheduler != "asha":
        return None
    return ASHAScheduler(
        time_attr="task",
        metric="accuracy",
        mode="max",
        max_t=len(search.tasks) - 1,
        grace_period=settings.grace,
        reduction_factor=settings.reduction,
        stop_last_trials=False,
    )


def compute_resources(cluster: ClusterSettings) -> dict[str, float]:
    """Return the resources that Tune reserves for the process of one trial.

    With at most one worker, the process runs the stages itself: each resource is the maximum over
    the kinds of stages. With several workers, the process only waits for its worker group, which
    reserves its own resources.
    """
    if cluster.workers > 1:
        return {"memory": 1 << 20}  # bytes; Tune requires at least one resource
    return resources_per_worker(cluster.of_any_step())


def count_parallel_trials(cluster_state: ClusterState, cluster: ClusterSettings, name: str) -> int:
    """Return the number of trials that can run in parallel in this driver's share of the cluster.

    Args:
        cluster_state: Nodes and drivers of the cluster.
        cluster: Settings of the cluster.
        name: Name of the actor that registers this driver.

    Raises:
        UserError: If no trial fits.
    """
    trial_cluster = cluster.of_any_step().model_copy(update={"workers": max(1, cluster.workers)})
    check_fits(cluster_state, trial_cluster)
    as_many_as_fit = trial_cluster.model_copy(update={"groups": 0})
    return len(compute_group_sizes(cluster_state, as_many_as_fit, name, sys.maxsize))
