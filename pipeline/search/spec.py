"""The specification of a search: its YAML file, the checks before it starts, and search.json.

`prepare_search` reads and checks the search file (`SearchSettings`), and returns a `Search`. The
search space names settings by dotted config keys. A point has values for these keys, and a trial
trains with the config of one point.

The file `searches/NAME/search.json` in the storage contains what is needed to resume a search and
to read its trials. A session is one execution of the search command; a resumed search has several.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from pipeline.app.prepared import provenance
from pipeline.config import settings as configs
from pipeline.config import yaml_files
from pipeline.graph import build, raw_data
from pipeline.graph.replica_configs import make_replica_configs
from pipeline.graph.stage import Graph
from pipeline.graph.store import Store
from pipeline.results.trials import Trial
from pipeline.results.trials import load_search_record as load_trials
from pipeline.search import space as spaces
from pipeline.search.space import Params, Space
from pipeline.search.trial import folder, now, with_history
from pipeline.search.warm_start import WarmStart, WarmStartSettings, choose_warm_start
from workers.errors import UserError, did_you_mean
from workers.job import Frozen, Neutral, key_inputs
from workers.methods import METHODS
from workers.methods.registration import describe_unknown, explain_not_importable
from workers.storage.artifact import exists, join, read_json, write_bytes

MAX_GRID_POINTS = 10_000
# A search without a limit on the number of trials ends after this many trials in a row that have
# executed no stage.
IDLE_TRIALS = 32
# Settings of a search file that may change when the search is resumed.
FREE = ("budget", "seeds", "tolerance", "concurrent")
# Keys of the base config that may change when the search is resumed. They do not change results,
# except by rounding (`cluster`).
RESUMABLE_BASE_KEYS = ("name", "storage", "cluster", "tracking")


class Budget(Frozen):
    """Limits of a search. After a limit is reached, no new trial starts.

    Attributes:
        hours: Wall-clock hours, summed over all sessions of the search.
        gpu_hours: Hours of executed stages and failed attempts, times the number of their GPUs.
    """

    trials: PositiveInt | None = Field(None, description="trials in all")
    hours: float | None = Field(
        None, gt=0, le=1e6, description="when they are over, running trials are stopped, too"
    )
    stages: PositiveInt | None = Field(
        None, description="stages that were run, not counting those found in the store"
    )
    gpu_hours: float | None = Field(
        None,
        gt=0,
        le=1e9,
        description="time of stages times their GPUs; when they are over, running trials are "
        "stopped at their next result, too",
    )

    @model_validator(mode="after")
    def _bounded(self) -> Budget:
        bounds = (self.trials, self.hours, self.stages, self.gpu_hours)
        if all(bound is None for bound in bounds):
            raise ValueError("it has no bound; give trials, hours, stages or gpu_hours")
        return self


class SearchSettings(Frozen):
    """The search file: space, algorithm, budget, and measurement of the winner."""

    name: str = Field(
        pattern=configs.NAME, description="name of the search and its files; default: the file's"
    )
    base: str = Field(
        description="config to search, relative to this file, or configs/... of Accrete"
    )
    set: dict[str, Any] = Field(
        default_factory=dict, description="changes to the base, by dotted key"
    )
    space: dict[str, spaces.Dimension] = Field(
        min_length=1,
        description="dotted key of the base -> a distribution (`dist`) of its values",
    )
    protocol: Literal["end_of_stream", "first_k_tasks", "per_task", "two_streams"] = Field(
        "end_of_stream",
        description="data that trials are judged on: the whole stream, its first tasks, each task "
        "in turn, or another stream",
    )
    first_tasks: PositiveInt | None = Field(
        None, description="first_k_tasks: number of tasks that trials are judged on"
    )
    stream: dict[str, Any] | None = Field(
        None, description="two_streams: the stream that trials learn, instead of the base's"
    )
    algorithm: Literal["random", "grid", "tpe"] = Field(
        "random", description="how points are chosen; `tpe` needs optuna"
    )
    scheduler: Literal["none", "asha", "pbt"] = Field(
        "none",
        description="`asha` stops poor trials between tasks; in `pbt` they take over from better "
        "ones",
    )
    grace: PositiveInt = Field(1, description="asha: tasks that every trial learns")
    reduction: int = Field(2, ge=2, description="asha: one of this many trials passes each rung")
    max_forgetting: Annotated[float | None, Neutral(None)] = Field(
        None,
        ge=0,
        le=1,
        description="average forgetting (0 to 1) of validation accuracy beyond which a trial is "
        "stopped after a task, and does not win",
    )
    warm_start: Annotated[str | None, Neutral(None)] = Field(
        None,
        pattern=configs.NAME,
        description="an earlier search of the storage, whose best points are tried first; tpe also "
        "learns from its other trials where the same data, stream and settings judged them",
    )
    warm_points: Annotated[PositiveInt, Neutral(4)] = Field(
        4, description="warm_start: how many points are tried first"
    )
    objectives: tuple[Literal["accuracy", "bytes"], ...] = Field(
        ("accuracy",),
        min_length=1,
        description="objective: accuracy alone, or also few bytes per task",
    )
    tolerance: NonNegativeFloat = Field(
        0.0,
        description="how far below the best accuracy (0 to 1) "
        "a trial may be and win with fewer bytes",
    )
    budget: Budget = Field(
        Budget(trials=16), description="when the search ends: trials, hours, stages or gpu_hours"
    )
    seed: NonNegativeInt = Field(0, description="draws the points; training uses the base's seed")
    seeds: tuple[NonNegativeInt, ...] = Field(
        (0, 1, 2), description="seeds to train the winner with, and to measure it on test data"
    )
    concurrent: NonNegativeInt = Field(
        0, description="most trials at a time; 0: as many as fit into the cluster"
    )

    @model_validator(mode="after")
    def _check_protocol(self) -> SearchSettings:
        self._check_field("first_k_tasks", "first_tasks", self.first_tasks is not None)
        self._check_field(
            "two_streams",
            "stream",
            self.stream is not None,
            hint=" (set.stream changes that of the base)",
        )
        if self.protocol == "per_task" and self.algorithm != "grid" and self.budget.trials is None:
            raise ValueError(
                "protocol per_task has a number of trials for each task; give budget.trials"
            )
        return self

    def _check_field(self, protocol: str, name: str, is_set: bool, hint: str = "") -> None:
        """Raise `ValueError` if the protocol needs the field but it is missing, or vice versa."""
        if is_set == (self.protocol == protocol):
            return
        remedy = "leave it out" if is_set else f"give {name}"
        raise ValueError(
            f"{name} belongs to protocol {protocol}, and the protocol is {self.protocol}; "
            f"{remedy}{hint}"
        )

    @model_validator(mode="after")
    def _check_objectives(self) -> SearchSettings:
        if self.objectives not in (("accuracy",), ("accuracy", "bytes")):
            raise ValueError(
                f"objectives are {list(self.objectives)}; write [accuracy], or [accuracy, bytes]"
            )
        return self

    @model_validator(mode="after")
    def _check_scheduler(self) -> SearchSettings:
        if self.scheduler == "none":
            return self
        if self.scheduler == "pbt" and (self.algorithm != "random" or self.budget.trials is None):
            raise ValueError(
                "scheduler pbt changes a population of random points, as many as budget.trials; "
                "use algorithm random, and give budget.trials"
            )
        if self.scheduler == "pbt" and self.budget.trials == 1:
            raise ValueError(
                "scheduler pbt lets trials take over from each other, and budget.trials is 1; "
                "give 2 or more, or use scheduler none"
            )
        if self.protocol == "per_task":
            raise ValueError(
                f"protocol per_task judges trials once, so scheduler {self.scheduler} has "
                "nothing to stop; use scheduler none"
            )
        if len(self.objectives) > 1:
            raise ValueError(
                f"scheduler {self.scheduler} uses only accuracy; "
                "use scheduler none, or objectives [accuracy]"
            )
        return self

    @model_validator(mode="after")
    def _check_forgetting(self) -> SearchSettings:
        if self.max_forgetting is None:
            return self
        if self.protocol == "per_task":
            raise ValueError(
                "protocol per_task judges trials once, which tells nothing of forgetting; "
                "leave max_forgetting out, or use protocol end_of_stream"
            )
        if self.scheduler == "pbt":
            raise ValueError(
                "in scheduler pbt a trial takes over what others have learned, and none is "
                "stopped; leave max_forgetting out, or use scheduler asha or none"
            )
        return self

    @model_validator(mode="after")
    def _check_warm_start(self) -> SearchSettings:
        if self.warm_start is None:
            if "warm_points" in self.model_fields_set:
                raise ValueError(
                    f"warm_points is {self.warm_points}, and no warm_start names an earlier "
                    "search; name one, or leave warm_points out"
                )
            return self
        if self.warm_start == self.name:
            raise ValueError(
                f"warm_start is {self.warm_start!r}, the name of this search itself; name an "
                "earlier search, or give this one another name"
            )
        if self.algorithm == "grid" or self.protocol == "per_task":
            kind = "algorithm grid" if self.algorithm == "grid" else "protocol per_task"
            raise ValueError(
                f"{kind} tries no points of another search; leave warm_start out, or use "
                "algorithm random or tpe and protocol end_of_stream"
            )
        return self

    @model_validator(mode="after")
    def _check_counts(self) -> SearchSettings:
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds are {list(self.seeds)}; list each once")
        has_trials = "budget" in self.model_fields_set and self.budget.trials is not None
        if self.algorithm == "grid" and has_trials:
            raise ValueError(
                "a grid has as many trials as points; "
                "leave budget.trials out (hours and stages bound a grid), or use algorithm random"
            )
        return self

    @property
    def has_params_per_task(self) -> bool:
        """Whether the tasks of one stream may be trained with different parameters."""
        return self.protocol == "per_task" or self.scheduler == "pbt"


class TrialCost(NamedTuple):
    """Cost of a trial.

    Attributes:
        stages: Number of executed stages.
        gpu_s: Seconds of executed stages and failed attempts, times the number of their GPUs.
    """

    stages: int
    gpu_s: float

    @classmethod
    def of(cls, record: Trial) -> TrialCost:
        """Return the cost of the trial with this record."""
        return cls(record["stages"]["run"], record.get("gpu_s", 0.0))


@dataclass
class Search:
    """A search with a parsed and validated file.

    Attributes:
        settings: Settings of the search file.
        body: Plain values (from YAML, not validated) of the base config, with the changes in `set`
            and the stream that trials learn. The config of each trial is built from them.
        report_body: The same values with the stream of the base config, on which the winner is
            measured. They differ from `body` only with protocol `two_streams`.
        space: Search space.
        storage: Folder or URI of the storage.
        provenance: Provenance of results: code and package versions.
        tasks: Names of the tasks that trials learn, in stream order.
        method_tasks: The tasks for which the method has a stage besides `evaluate`. A base task
            (the backbone was trained on it) has no such stage if the method leaves the backbone
            unchanged.
        note: Note for the user about the first rung of asha (see `_explain_first_rung`), or "".
        digest: Digest of everything that must not change when the search is resumed.
        sessions: Start time (`started`) and seconds (`wall_s`) of each session.
        warm_start: Points and observations from an earlier search, or None.
        costs: Number of a trial -> its cost; None if the records have not been read yet.
    """

    settings: SearchSettings
    body: dict[str, Any]
    report_body: dict[str, Any]
    space: Space
    storage: str
    provenance: dict[str, Any]
    tasks: tuple[str, ...]
    method_tasks: tuple[str, ...]
    note: str = ""
    digest: str = ""
    sessions: list[dict[str, Any]] = field(default_factory=list)
    warm_start: WarmStart | None = None
    costs: dict[int, TrialCost] | None = None

    @property
    def name(self) -> str:
        """Name of the search."""
        return self.settings.name

    @property
    def cluster(self) -> configs.ClusterSettings:
        """Cluster settings of the base config."""
        return configs.ClusterSettings.model_validate(self.body.get("cluster") or {})

    @property
    def tracking(self) -> configs.TrackingSettings:
        """Tracking settings of the base config, read from an arbitrary point's config."""
        params = next(self.space.corners())
        return _build_config(self.body, params, self.name).tracking

    def records(self, phase: str | None = None) -> list[Trial]:
        """Return the stored records of trials, sorted by number.

        Args:
            phase: Phase of the trials (see `trial.PhasePlan`); None: all phases.
        """
        if not exists(join(folder(self.storage, self.name), "search.json")):
            return []
        stored = load_trials(self.storage, self.name)
        return stored.trials if phase is None else stored.of(phase)

    @property
    def elapsed_s(self) -> float:
        """Wall-clock seconds of all sessions."""
        return float(sum(session["wall_s"] for session in self.sessions))

    def budget_used(self) -> dict[str, float]:
        """Return the used share of each limit of the budget; from 1 on, the limit is reached.

        The number of trials is not included: `AskingSearcher` enforces this limit.
        """
        budget = self.settings.budget
        shares: dict[str, float] = {}
        if budget.hours is not None:
            shares["hours"] = self.elapsed_s / 3600 / budget.hours
        if budget.stages is None and budget.gpu_hours is None:
            return shares
        costs = list(self._costs_of_trials().values())
        if budget.stages is not None:
            shares["stages"] = sum(cost.stages for cost in costs) / budget.stages
        if budget.gpu_hours is not None:
            shares["gpu_hours"] = sum(cost.gpu_s for cost in costs) / 3600 / budget.gpu_hours
        return shares

    def _costs_of_trials(self) -> dict[int, TrialCost]:
        """Return number -> cost of each trial. Only the first call reads the records."""
        if self.costs is None:
            self.costs = {record["number"]: TrialCost.of(record) for record in self.records()}
        return self.costs

    def add_cost(self, record: Trial) -> None:
        """Add the cost of a trial from its new record, or replace its earlier cost."""
        self._costs_of_trials()[record["number"]] = TrialCost.of(record)

    @property
    def is_budget_used(self) -> bool:
        """Whether the budget of hours, stages or GPU-hours is used up."""
        return any(share >= 1 for share in self.budget_used().values())

    @property
    def is_idle(self) -> bool:
        """Whether the last IDLE_TRIALS trials have executed no stage.

        This happens if they failed immediately, or if all points of the space have been tried.
        """
        costs = self._costs_of_trials()
        last = sorted(costs)[-IDLE_TRIALS:]
        return len(last) == IDLE_TRIALS and not any(costs[number].stages for number in last)

    @property
    def is_gpu_budget_used(self) -> bool:
        """Whether the budget of GPU-hours is used up."""
        return self.budget_used().get("gpu_hours", 0.0) >= 1


# ---- reading -------------------------------------------------------------------------------------
class SearchFile(NamedTuple):
    """A search file with its base config. See `Search` for `body` and `report_body`."""

    settings: SearchSettings
    body: dict[str, Any]
    report_body: dict[str, Any]


def load_search_file(path: str, overrides: list[str]) -> SearchFile:
    """Read a search file and its base config.

    Args:
        path: Path of the search file, or of a config. For a config, an override must name the
            method (`methods=NAME`), and the predefined search of this method is used. It is in
            `configs/methods/NAME.yaml`.
        overrides: Changes `KEY=VALUE`, as given to `--set`; see `apply_search_override`.

    Raises:
        UserError: If one of the files is missing or invalid.
    """
    file = yaml_files.find_config(path)
    if not file.exists():
        raise UserError(f"search {path!r} does not exist; {yaml_files.suggest_file(file)}")
    raw = yaml_files.read_yaml(file, "a search")
    if "space" not in raw and ("stream" in raw or "extends" in raw):
        raw = _build_search(path, file, overrides)
        overrides = [override for override in overrides if not override.startswith("methods=")]
    for override in overrides:
        apply_search_override(raw, override)
    settings = configs.checked(SearchSettings, {"name": file.stem, **raw}, "", path)
    base = yaml_files.find_base(file.parent, settings.base)
    if not base.exists():
        raise UserError(
            f"{path}: base {settings.base!r} does not exist beside it; correct the path"
        )
    report_body = yaml_files.read_with_bases(base)
    for key, value in settings.set.items():
        yaml_files.put(report_body, key, value, f"{path}: set.{key}")
        if key == "methods":
            report_body = configs.set_named_methods(report_body, str(base))
    body = report_body
    if settings.stream is not None:
        base_stream = body.get("stream")
        if not isinstance(base_stream, dict):
            base_stream = {}
        body = {**body, "stream": {**base_stream, **settings.stream}}
    return SearchFile(settings, body, report_body)


def _build_search(path: str, file: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Build the values of a search file from a config and the predefined search of a method.

    Args:
        path: Path of the config as the user gave it, for error messages.
        file: Resolved path of the config, which becomes the base config.
        overrides: Overrides in the form of `--set`. One must name the method.

    Raises:
        UserError: If the overrides do not name exactly one method, or the method has no predefined
            search.
    """
    named = [yaml_files.parse_override(o)[1] for o in overrides if o.startswith("methods=")]
    method = named[-1] if named else None
    if isinstance(method, list) and len(method) == 1:
        (method,) = method
    if not isinstance(method, str):
        raise UserError(
            f"{path}: this is a config, with no `space`; name one method to search with "
            "--method NAME, write a search file that has the config as `base`, or use "
            "`python -m pipeline run`"
        )
    search = yaml_files.read_search(method)
    if not search:
        remedy = "write a search file that has the config as `base`"
        if method not in METHODS:
            remedy = describe_unknown(method)
        raise UserError(f"{path}: method {method!r:.60} has no predefined search; {remedy}")
    changes: dict[str, Any] = {"methods": method}
    cluster = yaml_files.read_with_bases(file).get("cluster") or {}
    if not cluster.get("workers"):
        changes["cluster.workers"] = 1
    return {"name": f"{file.stem}-{method}", "base": file.name, "set": changes, **search}


def apply_search_override(raw: dict[str, Any], override: str) -> None:
    """Apply `key=value` to the plain values of a search file.

    A key of search files is set directly. A key that only the base config can have is added to
    `set`. `set.KEY` always means KEY of the base config, even if both files can have this key
    (`name`, `seed`, `stream`).

    Raises:
        UserError: If neither a search file nor a config can have the key.
    """
    path, value = yaml_files.parse_override(override)
    top, _, base_key = path.partition(".")
    if top not in SearchSettings.model_fields:
        _check_base_key(top, override)
        base_key = path
    elif top != "set" or not base_key:
        yaml_files.put(raw, path, value, f"--set {override!r}")
        return
    changes = raw.get("set") or {}
    if not isinstance(changes, dict):
        raise UserError(
            f"--set {override!r}: `set` of the search file is {changes!r:.80}, not a mapping; "
            "correct the file"
        )
    changes = dict(changes)
    # The key moves to the end. Changes apply in order, so it also replaces earlier changes of keys
    # below it.
    changes.pop(base_key, None)
    changes[base_key] = value
    raw["set"] = changes


def _check_base_key(key: str, override: str) -> None:
    """Raise `UserError` if `key` is not a top-level key of a config."""
    if key in configs.Config.model_fields:
        return
    known = list(dict.fromkeys([*SearchSettings.model_fields, *configs.Config.model_fields]))
    remedy = did_you_mean(key, known, f"there are {', '.join(known)}")
    raise UserError(
        f"--set {override!r}: {key!r} is a key neither of a search nor of its base config; {remedy}"
    )


# ---- checks before anything runs -----------------------------------------------------------------
def prepare_search(
    path: str,
    overrides: list[str],
    say: Callable[[str], None] = print,
) -> Search:
    """Read a search file, and check as much as possible before the search starts.

    Args:
        path: Path of the search file, or of a config; see `load_search_file`.
        overrides: Overrides in the form of `--set`.
        say: Called with a line of text if raw data was rewritten in place.

    Raises:
        UserError: If the search cannot run, or the storage has another search with its name.
    """
    settings, body, report_body = load_search_file(path, overrides)
    space = Space(settings.space)
    _check_space(settings, space, body, path)
    # Check the configs at both ends of every range, and for every value of every choice.
    points = list(space.corners())
    point_configs = [_build_config(body, params, path) for params in points]
    config = point_configs[0]
    _check_gpu_budget(settings, config, path)
    if make_replica_configs(config):
        raise UserError(
            f"{path}: the config that it searches has `seeds` or `orders`, and a trial trains with "
            "one seed and one class order; search a config without them (`seeds` of the search are "
            "those of its winner)"
        )
    for entry in config.methods.values():
        reason = explain_not_importable(entry.method)
        if reason:
            raise UserError(
                f"{path}: method {entry.method!r} cannot be searched, because {reason}, and each "
                "trial has a process of its own; move the class to the top of a module"
            )
    if config.plugins:
        required = {"plugins": list(config.plugins)}
        body, report_body = body | required, report_body | required
    storage = yaml_files.absolute(config.storage)
    store = Store(storage)
    store.check_writable()
    raw_data.compare_rewritten_sources(config, store, say)
    report_config: configs.Config | None = None
    if settings.stream is not None:
        report_config = _build_config(report_body, points[0], path)
        raw_data.compare_rewritten_sources(report_config, store, say)

    made_by = provenance()
    try:
        graph, stream = build.build_graph(config, store, made_by, "val")
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    label = next(iter(config.methods))
    names = [task.name for task in stream if f"{label}/{task.name}/evaluate" in graph.stages]
    _check_first_tasks(settings, len(names), path)
    if report_config is not None:
        build.build_graph(report_config, store, made_by)  # only to raise its errors now
    tasks = tuple(names[: settings.first_tasks])
    _check_early_stops(settings, len(tasks), path)
    method_tasks = _find_method_tasks(graph, tasks)
    if settings.has_params_per_task:
        for params in points:
            configs.check(with_history(body, params, {method_tasks[0]: params}), path)
    search = Search(
        settings,
        body,
        report_body,
        space,
        storage,
        made_by,
        tasks,
        method_tasks,
        _explain_first_rung(settings, point_configs),
        _compute_search_digest(settings, body, graph),
    )
    state = _load_earlier_state(search)
    search.sessions = [session for session in state.get("sessions", []) if "wall_s" in session]
    search.warm_start = WarmStart.of_record(state.get("warm_start"))
    if settings.warm_start is not None and search.warm_start is None:
        search.warm_start = _warm_start(search, store, path)
    return search


def _warm_start(search: Search, store: Store, path: str) -> WarmStart:
    """Select the points and observations that a new search takes from an earlier one.

    Raises:
        UserError: If the earlier search does not exist, or has no suitable trial.
    """
    settings = search.settings
    assert settings.warm_start is not None

    def evaluate_key(params: Params) -> str:
        config = _build_config(search.body, params, path)
        graph, _ = build.build_graph(config, store, search.provenance, "val")
        return graph[f"{next(iter(config.methods))}/{search.tasks[-1]}/evaluate"].key

    try:
        earlier = load_trials(search.storage, settings.warm_start)
    except UserError as error:
        raise UserError(f"{path}: warm_start: {error}") from None
    return choose_warm_start(
        earlier,
        search.space,
        WarmStartSettings(settings.warm_points, settings.seed, settings.max_forgetting),
        evaluate_key if settings.algorithm == "tpe" else None,
        path,
    )


def _build_config(body: dict[str, Any], params: Params, where: str) -> configs.Config:
    """Return the validated config of a point.

    Args:
        body: Plain values of the base config.
        params: The point.
        where: Start of error messages.

    Raises:
        UserError: If the config is invalid.
    """
    return configs.check(spaces.with_params(body, params), where)


def _check_space(settings: SearchSettings, space: Space, body: dict[str, Any], path: str) -> None:
    """Raise `UserError` if the space does not fit the base config, protocol or algorithm."""
    spaces.check_against_config(space, body, path)
    if settings.has_params_per_task:
        spaces.check_per_task([key for key in settings.space if key != spaces.METHOD], path)
        if spaces.METHOD in settings.space:
            raise UserError(
                f"{path}: space.method cannot change within a stream, "
                "as protocol per_task or scheduler pbt would have it; search it end_of_stream"
            )
    if settings.algorithm == "grid" and space.size > MAX_GRID_POINTS:
        raise UserError(
            f"{path}: the grid has up to {space.size} points, more than {MAX_GRID_POINTS}; "
            "give fewer values, or use algorithm random"
        )


def _check_gpu_budget(settings: SearchSettings, config: configs.Config, path: str) -> None:
    """Raise `UserError` if there is a budget of GPU-hours, but trials use no GPU."""
    hours = settings.budget.gpu_hours
    if hours is not None and not config.cluster.of_any_step().gpus_per_worker:
        raise UserError(
            f"{path}: budget.gpu_hours is {hours:g}, and trials take no GPU "
            "(cluster.gpus_per_worker is 0), so they would never use it up; give them one with "
            "--set cluster.gpus_per_worker=1, or give a budget of trials, hours or stages"
        )


def _check_first_tasks(settings: SearchSettings, count: int, path: str) -> None:
    """Raise `UserError` if `first_tasks` is not less than the number of tasks, `count`."""
    if settings.first_tasks is not None and settings.first_tasks >= count:
        raise UserError(
            f"{path}: first_tasks is {settings.first_tasks}, and the stream has {count} tasks; "
            "give fewer, or use protocol end_of_stream"
        )


def _check_early_stops(settings: SearchSettings, count: int, path: str) -> None:
    """Raise `UserError` if trials learn too few tasks for asha, `max_forgetting` or pbt.

    Args:
        settings: Settings of the search.
        count: Number of tasks that trials learn.
        path: Path of the search file, for messages.
    """
    if settings.scheduler == "asha" and settings.grace >= count:
        raise UserError(
            f"{path}: grace is {settings.grace}, and trials learn {count} tasks, so asha would "
            "stop none of them early; give a smaller grace, or use scheduler none"
        )
    if settings.max_forgetting is not None and count < 2:
        raise UserError(
            f"{path}: max_forgetting stops trials that forget earlier tasks, and they learn "
            f"{count} task; leave it out"
        )
    if settings.scheduler == "pbt" and count < 2:
        raise UserError(
            f"{path}: scheduler pbt lets trials take over from each other between tasks, "
            f"and they learn {count}; use scheduler none"
        )


def _find_method_tasks(graph: Graph, tasks: Sequence[str]) -> tuple[str, ...]:
    """Return the tasks for which the method has a stage besides `evaluate`."""
    changed = {stage.task for stage in graph if stage.method and stage.step != "evaluate"}
    return tuple(task for task in tasks if task in changed)


def _explain_first_rung(settings: SearchSettings, point_configs: Sequence[configs.Config]) -> str:
    """Return a note about the first rung of asha, or "" if no note is needed.

    A rung is a number of learned tasks after which asha compares trials. If a method learns tasks
    independently of each other, the first rung does not say how well it learns later tasks.
    """
    if settings.scheduler != "asha":
        return ""
    methods: set[str] = set()
    for config in point_configs:
        methods.update(entry.method for entry in config.methods.values())
    independent = sorted(method for method in methods if not METHODS[method].carries)
    if not independent:
        return ""
    verb = "learns" if len(independent) == 1 else "learn"
    first = "the first task" if settings.grace == 1 else f"the first {settings.grace} tasks"
    return (
        f"{', '.join(independent)} {verb} every task by itself, "
        f"so asha's first rung compares trials on {first} alone, which says nothing about the "
        "others; a larger `grace` compares them on more"
    )


# ---- search.json ---------------------------------------------------------------------------------
def _compute_search_digest(settings: SearchSettings, body: dict[str, Any], graph: Graph) -> str:
    """Return the SHA-256 digest of everything that must be equal for trials to be comparable.

    These are the settings, the base config, the sources of the data, and the inputs of the stages.
    Settings in FREE and RESUMABLE_BASE_KEYS are left out.
    """
    search_inputs = key_inputs(settings, (*FREE, "set"))  # the body includes `set`
    if settings.protocol == "per_task":
        # Trials are numbered through all phases, so this limit determines the task of a trial.
        search_inputs["trials"] = settings.budget.trials
    base_inputs = {key: value for key, value in body.items() if key not in RESUMABLE_BASE_KEYS}
    stages: list[Any] = []
    # Before the data is ingested, only ingest stages have a final key. Without `images`, the inputs
    # of the other stages are the same before and after.
    for stage in graph:
        is_ingest = stage.step == "ingest"
        stages.append(stage.key if is_ingest else {**stage.inputs, "images": None})
    inputs = [search_inputs, base_inputs, stages]
    return hashlib.sha256(json.dumps(inputs, sort_keys=True, default=str).encode()).hexdigest()


def _load_earlier_state(search: Search) -> dict[str, Any]:
    """Return the content of search.json if a search is resumed, or {} for a new search.

    Raises:
        UserError: If the storage has a different search with this name, or if search.json is
            damaged, or is missing although there are trials. In the last two cases it is unknown
            whether the folder belongs to this search.
    """
    search_folder = folder(search.storage, search.name)
    path = join(search_folder, "search.json")
    problem = ""
    try:
        state = read_json(path)
    except FileNotFoundError:
        if not exists(join(search_folder, "trials")):
            return {}
        problem = "is missing"
    except ValueError as error:
        problem = f"cannot be read ({error})"
    if problem:
        raise UserError(
            f"{path} {problem}, so it is not known whether this folder belongs to this search; "
            "give the search another name with --set name=NAME, or remove the folder (stages in "
            "the store are reused all the same)"
        )
    if not isinstance(state, dict) or state.get("digest") != search.digest:
        raise UserError(
            f"search {search.name!r} is in {search.storage} with another space, base, data "
            "or code, so it cannot be continued; give this one another name with --set "
            f"name=NAME, or remove {search_folder} (stages in the store are reused all the same)"
        )
    return state


def write_state(search: Search) -> None:
    """Write search.json."""
    path = join(folder(search.storage, search.name), "search.json")
    write_bytes(path, json.dumps(build_state(search), indent=1, default=str).encode())


def build_state(search: Search) -> dict[str, Any]:
    """Return the content of search.json."""
    settings = search.settings.model_dump(mode="json", exclude={"space", "base", "set", "stream"})
    if search.settings.algorithm == "grid":
        settings["budget"]["trials"] = len(search.space.grid())
    dimensions = search.settings.space
    created = search.sessions[0]["started"] if search.sessions else now()
    warm_start = {}
    if search.warm_start is not None:
        warm_start = {"warm_start": search.warm_start.record()}
    return {
        "name": search.name,
        "digest": search.digest,
        "base": search.settings.base,
        "set": search.settings.set,
        "config": search.body,
        "tasks": list(search.tasks),
        "space": {key: value.model_dump(mode="json") for key, value in dimensions.items()},
        "settings": settings,
        "provenance": search.provenance,
        "sessions": search.sessions,
        "note": search.note,
        "created": created,
        **warm_start,
    }
