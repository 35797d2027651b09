"""Search over streams with Ray Tune: a trial is a graph in the shared store, equal prefixes are computed once, and records decide, not Tune's state."""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from pipeline import config as configs
from pipeline import space as spaces
from pipeline.report.trials import best, pareto
from pipeline.report.trials import load as load_trials
from pipeline.space import Params, Space
from pipeline.trial import ENDED, Plan, folder, now, with_history
from workers.artefact import exists, join, write_bytes
from workers.errors import UserError
from workers.job import Frozen

FREE = ("budget", "seeds", "tolerance", "concurrent")  # what may change when a search goes on


class Budget(Frozen):
    """When no further trial begins; at least one of them. The hours are of the clock, over all sessions of the search."""

    trials: PositiveInt | None = None
    hours: PositiveFloat | None = Field(None, description="at their end trials under way are stopped, too")
    stages: PositiveInt | None = Field(None, description="stages that were run, and not found in the store")

    @model_validator(mode="after")
    def _bounded(self) -> Budget:
        if self.trials is None and self.hours is None and self.stages is None:
            raise ValueError("it has no bound; give trials, hours or stages")
        return self


class SearchSettings(Frozen):
    """A search: where to look, how, for how long, and on what the winner is measured."""

    name: str = Field(pattern=configs.NAME)
    base: str = Field(description="config that is searched, relative to this file")
    set: dict[str, Any] = Field(default_factory=dict, description="changes of the base, by dotted key")
    space: dict[str, spaces.Dimension] = Field(min_length=1)
    protocol: Literal["end_of_stream", "first_k_tasks", "per_task", "two_streams"] = "end_of_stream"
    first_tasks: PositiveInt | None = Field(None, description="first_k_tasks: on how many tasks trials are judged")
    stream: dict[str, Any] | None = Field(None, description="two_streams: the stream that is searched on, in place of the base's")
    algorithm: Literal["random", "grid", "tpe"] = "random"
    scheduler: Literal["none", "asha", "pbt"] = "none"
    grace: PositiveInt = Field(1, description="asha: tasks that every trial learns")
    reduction: int = Field(2, ge=2, description="asha: of so many trials one goes on at each rung")
    objectives: tuple[Literal["accuracy", "bytes"], ...] = Field(("accuracy",), min_length=1)
    tolerance: NonNegativeFloat = Field(0.0, description="accuracy (0 to 1) below the best that a trial may have and win with fewer bytes")
    budget: Budget = Budget(trials=16)
    seed: NonNegativeInt = Field(0, description="of the points; what is trained has the base's seed")
    seeds: tuple[NonNegativeInt, ...] = Field((0, 1, 2), description="with which the winner is trained and measured on test data")
    concurrent: NonNegativeInt = Field(0, description="most trials side by side; 0 means as many as there is room for")

    @model_validator(mode="after")
    def _consistent(self) -> SearchSettings:
        for name, wanted, protocol in (("first_tasks", self.first_tasks, "first_k_tasks"), ("stream", self.stream, "two_streams")):
            if (wanted is not None) != (self.protocol == protocol):
                remedy = "leave it out" if wanted is not None else f"give {name}"
                raise ValueError(f"{name} belongs to protocol {protocol}, and the protocol is {self.protocol}; {remedy}")
        if self.objectives not in (("accuracy",), ("accuracy", "bytes")):
            raise ValueError(f"objectives are {list(self.objectives)}; write [accuracy], or [accuracy, bytes]")
        if self.scheduler == "pbt" and (self.algorithm != "random" or self.budget.trials is None):
            raise ValueError("scheduler pbt changes a population of random points, as many as budget.trials; use algorithm random, and give budget.trials")
        if self.protocol == "per_task" and self.algorithm != "grid" and self.budget.trials is None:
            raise ValueError("protocol per_task has a number of trials for each task; give budget.trials")
        if self.protocol == "per_task" and self.scheduler != "none":
            raise ValueError(f"protocol per_task judges trials once, so scheduler {self.scheduler} has nothing to stop; use scheduler none")
        if self.scheduler != "none" and len(self.objectives) > 1:
            raise ValueError(f"scheduler {self.scheduler} judges by accuracy alone; use scheduler none, or objectives [accuracy]")
        if self.algorithm == "grid" and "budget" in self.model_fields_set and self.budget.trials is not None:
            raise ValueError("a grid has as many trials as points; leave budget.trials out (hours and stages bound a grid), or use algorithm random")
        return self


Tell = Callable[[dict[str, Any]], None]  # is given the record of each trial that has a new result or ended


@dataclass(frozen=True)
class Outcome:
    """The trial that won, and the config that it is."""

    trial: int
    config: dict[str, Any]


@dataclass
class Search:
    """A search that is set up: its settings, the base's values, and the space."""

    settings: SearchSettings
    body: dict[str, Any]  # the base's plain values with `set`, as trials start from them
    report_body: dict[str, Any]  # the same with the base's own stream
    space: Space
    storage: str
    provenance: dict[str, Any]
    tasks: tuple[str, ...]  # of the stream that is searched on: those that trials learn
    own: tuple[str, ...]  # those of them that have steps of the method's own: not a base task that it leaves as it is
    digest: str = ""
    sessions: list[dict[str, Any]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def cluster(self) -> configs.ClusterSettings:
        return configs.ClusterSettings.model_validate(self.body.get("cluster") or {})

    def records(self, phase: str | None = None) -> list[dict[str, Any]]:
        """Of all trials that began, in order; of one phase if asked."""
        if not exists(join(folder(self.storage, self.name), "search.json")):
            return []
        return [record for record in load_trials(self.storage, self.name).trials if phase is None or record["phase"] == phase]

    @property
    def worked_s(self) -> float:
        return sum(session["wall_s"] for session in self.sessions)

    @property
    def spent(self) -> bool:
        """Whether the budget of stages or hours is used up."""
        budget = self.settings.budget
        if budget.hours is not None and self.worked_s >= 3600 * budget.hours:
            return True
        return budget.stages is not None and sum(record["stages"]["run"] for record in self.records()) >= budget.stages


# ---- reading -------------------------------------------------------------------------------------------------------------
def load(path: str, overrides: list[str]) -> tuple[SearchSettings, dict[str, Any], dict[str, Any]]:
    """Settings of a search, the plain values that its trials start from, and those that its winner is measured with. Raises UserError."""
    file = Path(path)
    if not file.exists():
        near = difflib.get_close_matches(file.name, [p.name for p in file.parent.glob("*.yaml")], 1) if file.parent.exists() else []
        raise UserError(f"search {path!r} does not exist" + (f"; did you mean {str(file.parent / near[0])!r}?" if near else "; give the path of a .yaml file"))
    raw = configs.read_yaml(file, "a search")
    for override in overrides:
        configs.apply_override(raw, override)
    if "space" not in raw and "methods" in raw:
        raise UserError(f"{path}: this is a config to run, with no `space`; use `python -m pipeline run`, or write a search that has it as `base`")
    settings = configs.checked(SearchSettings, {"name": file.stem, **raw}, "", path)
    base = file.parent / settings.base
    if not base.exists():
        raise UserError(f"{path}: base {settings.base!r} does not exist beside it; mend the path")
    body = configs.read_with_bases(base)
    for key, value in settings.set.items():
        configs.put(body, key, value, f"{path}: set.{key}")
    searched = {**body, "stream": {**(body.get("stream") or {}), **settings.stream}} if settings.stream is not None else body
    return settings, searched, body


def prepare(path: str, overrides: list[str], provenance: dict[str, Any]) -> Search:
    """Checks all that can be checked before anything runs. Raises UserError."""
    from pipeline import build
    from pipeline.store import Store

    settings, body, report_body = load(path, overrides)
    space = Space(settings.space)
    spaces.check(space, body, path)
    if settings.protocol == "per_task" or settings.scheduler == "pbt":
        spaces.searched_per_task([key for key in settings.space if key != spaces.METHOD], path)
        if spaces.METHOD in settings.space:
            raise UserError(f"{path}: space.method cannot change within a stream, as protocol per_task or scheduler pbt would have it; search it end_of_stream")
    points = [*space.corners()]
    config = configs.check(spaces.with_params(body, points[0]), path)
    storage = configs.absolute(config.storage)
    for params in points:
        point = configs.check(spaces.with_params(body, params), path)
        label = next(iter(point.methods))
        if not point.data_of(label).val_fraction:
            raise UserError(f"{path}: a search is judged on validation images, and data.val_fraction of method {label!r} is 0; hold some out, as in "
                            "set: {data.val_fraction: 0.1}")
    store = Store(storage)
    store.check_writable()
    graph, tasks = build.graph_of(config, store, provenance, "val")
    names = tuple(task.name for task in tasks if f"{next(iter(config.methods))}/{task.name}/evaluate" in graph.stages)
    if settings.first_tasks is not None and settings.first_tasks >= len(names):
        raise UserError(f"{path}: first_tasks is {settings.first_tasks}, and the stream has {len(names)} tasks; give fewer, or use protocol end_of_stream")
    if settings.stream is not None:
        build.graph_of(configs.check(spaces.with_params(report_body, points[0]), path), store, provenance)
    asked = {key: value for key, value in settings.model_dump(mode="json").items() if key not in FREE}
    digest = hashlib.sha256(json.dumps([asked, body, [s.key for s in graph]], sort_keys=True, default=str).encode()).hexdigest()
    names = names[: settings.first_tasks]
    own = tuple(name for name in names if any(s.task == name and s.method and s.step != "evaluate" for s in graph))
    if settings.protocol == "per_task" or settings.scheduler == "pbt":
        for params in points:
            configs.check(with_history(body, params, {own[0]: params}), path)
    search = Search(settings, body, report_body, space, storage, provenance, names, own, digest)
    _check_same(search)
    return search


def _check_same(search: Search) -> None:
    """Raises UserError where a search of this name stands in the storage that was another one."""
    from workers.artefact import read_bytes

    place = folder(search.storage, search.name)
    with suppress(FileNotFoundError, json.JSONDecodeError, UnicodeDecodeError):
        found = json.loads(read_bytes(join(place, "search.json")))
        if found.get("digest") != search.digest:
            raise UserError(f"search {search.name!r} stands in {search.storage} with another space, base, data or code, so its trials cannot be gone on with; "
                            f"give this one another name with --set name=NAME, or remove {place} (stages in the store are reused all the same)")
        search.sessions = [session for session in found.get("sessions", []) if "wall_s" in session]


def write_state(search: Search) -> None:
    """search.json: what the search is, for whoever reads its trials, and for going on."""
    settings = search.settings.model_dump(mode="json", exclude={"space", "base", "set", "stream"})
    body = {"name": search.name, "digest": search.digest, "base": search.settings.base, "set": search.settings.set, "config": search.body,
            "tasks": list(search.tasks), "space": {key: d.model_dump(mode="json", exclude_defaults=False) for key, d in search.settings.space.items()},
            "settings": settings, "provenance": search.provenance, "sessions": search.sessions,
            "created": search.sessions[0]["started"] if search.sessions else now()}
    write_bytes(join(folder(search.storage, search.name), "search.json"), json.dumps(body, indent=1, default=str).encode())


# ---- the search ----------------------------------------------------------------------------------------------------------
def run_search(search: Search, command: str, tell: Tell) -> Outcome:
    """All phases, then the winner. What was found before stands, and is told again. Raises UserError where there is no winner."""
    from pipeline import launch

    started = time.monotonic()
    session = {"started": now(), "wall_s": 0.0}
    search.sessions.append(session)

    def clocked(record: dict[str, Any]) -> None:
        session["wall_s"] = round(time.monotonic() - started, 3)
        tell(record)

    write_state(search)
    ray = launch.connect(search.cluster)
    os.environ |= {"TUNE_DISABLE_SIGINT_HANDLER": "1",  # Ctrl-C ends a search as it ends a run
                   "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # one of Tune's loggers is enough
                   "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1"}  # a trial may fail before its first result
    try:
        ingest(search, command)
        from pipeline import tuning

        settled: dict[str, Params] = {}
        chosen: int | None = None
        for first, plan in phases(search, settled):
            tuning.run_phase(search, plan, first, clocked)
            chosen = best(search.records(plan.phase), search.settings.tolerance)
            if chosen is None:
                raise UserError(no_winner(search, plan.phase, command))
            settled |= {plan.phase: record_of(search, chosen)["params"]} if plan.phase else {}
    finally:
        session["wall_s"] = round(time.monotonic() - started, 3)
        write_state(search)
        ray.shutdown()
    assert chosen is not None  # there is a phase
    return Outcome(chosen, crowned(search, chosen, settled))


def phases(search: Search, settled: Mapping[str, Params]) -> Iterator[tuple[int, Plan]]:
    """(number of the first trial, plan): one for all tasks, or one per task; `settled` is read when a phase begins."""
    settings = search.settings
    plan = Plan(search.name, search.storage, search.body, search.provenance, search.tasks, search.own, each=settings.scheduler == "pbt")
    if settings.protocol != "per_task":
        yield 0, plan
        return
    trials = len(search.space.grid()) if settings.algorithm == "grid" else settings.budget.trials or 0
    for index, task in enumerate(search.own):
        last = search.tasks.index(task) + 1
        yield index * trials, replace(plan, tasks=search.tasks[:last], only=True, phase=task, settled=dict(settled))


def ingest(search: Search, command: str) -> None:
    """The data of the tasks, once, by all of the cluster."""
    from pipeline import build, cli
    from pipeline.graph import Graph
    from pipeline.store import Store

    config = configs.check(spaces.with_params(search.body, next(search.space.corners())), search.name)
    store = Store(search.storage)
    graph, tasks = build.graph_of(config, store, search.provenance, "val")
    cards = {f"data/{task.card}" for task in tasks if task.name in search.tasks}
    cli.bring(Graph.of(graph.name, [stage for stage in graph if stage.id in cards]), config, store, command)


def record_of(search: Search, number: int) -> dict[str, Any]:
    return next(record for record in search.records() if record["number"] == number)


def no_winner(search: Search, phase: str, command: str) -> str:
    """Why no trial can win, in one sentence."""
    records = search.records(phase)
    said = [record["message"] for record in records if record["status"] == "failed"]
    if not records:
        reason = "its budget was used up before a trial began; raise it, as in --set budget.trials=N"
    elif said:
        reason = f"{len(said)} of {len(records)} trials failed, the first one so: {said[0]}"
    else:
        reason = "all trials were stopped before their last task; raise the budget of hours"
    return f"search {search.name!r} has no winner{f' for task {phase!r}' if phase else ''}: {reason}; what was found is kept, go on with: {command}"


def crowned(search: Search, number: int, settled: Mapping[str, Params]) -> dict[str, Any]:
    """Plain values of the config with what won in place, on the base's own stream."""
    winner = record_of(search, number)
    history = settled or winner["history"]
    return {**with_history(search.report_body, winner["params"], history), "name": f"{search.name}-winner", "storage": search.storage}


def write_winner(search: Search, outcome: Outcome, tests: Sequence[Mapping[str, Any]]) -> str:
    """winner.yaml, which `run` accepts, and winner.json; returns the path of the first."""
    record = record_of(search, outcome.trial)
    last = record["results"][-1]
    place = folder(search.storage, search.name)
    said = [f"# Winner of search {search.name}: trial {outcome.trial}, validation accuracy {100 * last['accuracy']:.2f} % after {last['position'] + 1} tasks",
            f"# ({search.settings.protocol}), {last['bytes']:.0f} bytes kept per task.", *(f"# {key}: {value}" for key, value in record["params"].items())]
    write_bytes(join(place, "winner.yaml"), ("\n".join(said) + "\n" + yaml.safe_dump(outcome.config, sort_keys=False, allow_unicode=True)).encode())
    body = {"trial": outcome.trial, "params": record["params"], "accuracy": last["accuracy"], "bytes": last["bytes"], "config": "winner.yaml",
            "tests": list(tests), "pareto": pareto(search.records(record["phase"]))}
    write_bytes(join(place, "winner.json"), json.dumps(body, indent=1).encode())
    return join(place, "winner.yaml")


# ---- the command ---------------------------------------------------------------------------------------------------------
def command(args: argparse.Namespace) -> int:
    """Searches, writes the winner's config, and measures it on test data."""
    from pipeline import cli

    said = cli.command_of(args, "search")
    search = prepare(args.config, args.overrides, cli.provenance())
    screen = Screen(search)
    print(screen.head(), flush=True)
    outcome = run_search(search, said, screen)
    path = write_winner(search, outcome, [])
    print(screen.won(outcome, path), flush=True)
    tests = [tested(search, outcome, seed, said) for seed in search.settings.seeds]
    write_winner(search, outcome, tests)
    print("\n".join([screen.tested(tests), f"report: {export(search)}"]))
    return 0


def is_search(path: str) -> bool:
    """Whether a file is a search, and no config to run."""
    return Path(path).exists() and "space" in configs.read_yaml(Path(path), "a config")


def report(args: argparse.Namespace) -> int:
    """The report of a search from its records, also of an unfinished one."""
    from pipeline import cli

    search = prepare(args.config, args.overrides, cli.provenance())
    print(f"report: {export(search)}")
    return 0


def export(search: Search) -> str:
    """Writes the report beside the records; returns the place of its page."""
    from pipeline.report import search as page

    place = folder(search.storage, search.name)
    for name, data in page.build(search.storage, search.name).items():
        write_bytes(join(place, name), data)
    return join(place, "search.html")


def tested(search: Search, outcome: Outcome, seed: int, said: str) -> dict[str, Any]:
    """The winner with one seed, trained (as far as the store has it not) and measured on test data."""
    from pipeline import build, cli
    from pipeline.store import Store

    name = f"{search.name}-winner-seed{seed}"
    config = configs.check({**outcome.config, "name": name, "seed": seed}, name)
    store = Store(search.storage)
    graph, tasks = build.graph_of(config, store, search.provenance)
    row = cli.execute(config, store, graph, tasks, said).summary()[0]
    return {"seed": seed, "run": name, **{key: row[key] for key in ("average_accuracy", "forgetting", "bytes_per_task")}}


class Screen:
    """What a person sees of a search: a line per trial that ended, and the end."""

    def __init__(self, search: Search):
        self.search, self.said = search, set[int]()

    def __call__(self, record: dict[str, Any]) -> None:
        number = record["number"]
        if record["status"] not in ENDED or number in self.said:
            return
        self.said.add(number)
        last = record["results"][-1] if record["results"] else None
        score = f"{100 * last['accuracy']:.2f} % after {last['position'] + 1} of {len(self.search.tasks)} tasks" if last else "no result"
        why = {"stopped": ", stopped early", "failed": f", failed: {record['message']}"}.get(record["status"], "")
        phase = f"{record['phase']}, " if record["phase"] else ""
        stages = f"{record['stages']['run']} stages run, {record['stages']['reused']} reused"
        print(f"{phase}trial {number}: {point_text(record['params'])}: {score}{why}; {stages}, {record['device_s']:.0f} s", flush=True)

    def head(self) -> str:
        settings = self.search.settings
        bounds = ", ".join(f"{value:g} {name}" for name, value in settings.budget.model_dump().items() if value is not None)
        known = len(self.search.records())
        again = f"; {known} trial{'s' * (known > 1)} known from before" if known else ""
        return (f"search {self.search.name}: {settings.algorithm}" + (f" with {settings.scheduler}" if settings.scheduler != "none" else "")
                + f", protocol {settings.protocol}, " + (f"{len(self.search.space.grid())} points" if settings.algorithm == "grid" else f"budget {bounds}")
                + f", judged on validation images of {len(self.search.tasks)} tasks{again}")

    def won(self, outcome: Outcome, path: str) -> str:
        records = self.search.records()
        run, reused = (sum(record["stages"][kind] for record in records) for kind in ("run", "reused"))
        hours = sum(record["device_s"] for record in records) / 3600
        winner = record_of(self.search, outcome.trial)
        return (f"\n{len(records)} trials, {run} stages run, {reused} reused, {hours:.3f} device-hours\n"
                f"winner: trial {outcome.trial}, {point_text(winner['params'])}: {100 * winner['results'][-1]['accuracy']:.2f} % on validation images\n"
                f"its config: {path}")

    def tested(self, tests: Sequence[Mapping[str, Any]]) -> str:
        if not tests:
            return "no seeds, so the winner was not measured on test data"
        rates = [100 * test["average_accuracy"] for test in tests]
        spread = f" +- {statistics.stdev(rates):.2f}" if len(rates) > 1 else ""
        return (f"\nwinner on test data, which the search has not seen: {statistics.mean(rates):.2f}{spread} % average accuracy with "
                f"seed{'s' * (len(rates) > 1)} {', '.join(str(test['seed']) for test in tests)} ({', '.join(f'{rate:.2f}' for rate in rates)})")


def point_text(params: Mapping[str, Any]) -> str:
    """A point in a line: the last part of each key, and numbers with four digits."""
    keys = {key: key.removeprefix(f"methods.{key.split('.')[1]}.") if key.startswith("methods.") else key for key in params}
    return ", ".join(f"{keys[key]}={value:.4g}" if isinstance(value, float) else f"{keys[key]}={value}" for key, value in params.items()) or "the base"
