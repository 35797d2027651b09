"""A search as it is asked for: its YAML file, the checks before anything runs, and what is written
of it for going on."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from pipeline import config as configs
from pipeline import yaml_files
from pipeline.results.trials import Trial
from pipeline.results.trials import load as load_trials
from pipeline.search import space as spaces
from pipeline.search.space import Params, Space
from pipeline.search.trial import folder, now, with_history
from workers.errors import UserError
from workers.job import Frozen, key_inputs
from workers.storage.artifact import exists, join, read_json, write_bytes

MOST_POINTS = 10_000  # of a grid
FREE = ("budget", "seeds", "tolerance", "concurrent")  # what may change when a search goes on
# the same of the base: it changes no result
FREE_OF_BASE = (
    "name",
    "storage",
    "cluster",
    "tracking",
)


class Budget(Frozen):
    """When no further trial begins; at least one of them. The hours are of the clock, over all
    sessions of the search."""

    trials: PositiveInt | None = None
    hours: float | None = Field(
        None, gt=0, le=1e6, description="at their end trials under way are stopped, too"
    )
    stages: PositiveInt | None = Field(
        None, description="stages that were run, and not found in the store"
    )

    @model_validator(mode="after")
    def _bounded(self) -> Budget:
        if self.trials is None and self.hours is None and self.stages is None:
            raise ValueError("it has no bound; give trials, hours or stages")
        return self


class SearchSettings(Frozen):
    """A search: where to look, how, for how long, and on what the winner is measured."""

    name: str = Field(pattern=configs.NAME)
    base: str = Field(description="config that is searched, relative to this file")
    set: dict[str, Any] = Field(
        default_factory=dict, description="changes of the base, by dotted key"
    )
    space: dict[str, spaces.Dimension] = Field(min_length=1)
    protocol: Literal["end_of_stream", "first_k_tasks", "per_task", "two_streams"] = "end_of_stream"
    first_tasks: PositiveInt | None = Field(
        None, description="first_k_tasks: on how many tasks trials are judged"
    )
    stream: dict[str, Any] | None = Field(
        None, description="two_streams: the stream that is searched on, in place of the base's"
    )
    algorithm: Literal["random", "grid", "tpe"] = "random"
    scheduler: Literal["none", "asha", "pbt"] = "none"
    grace: PositiveInt = Field(1, description="asha: tasks that every trial learns")
    reduction: int = Field(2, ge=2, description="asha: of so many trials one goes on at each rung")
    objectives: tuple[Literal["accuracy", "bytes"], ...] = Field(("accuracy",), min_length=1)
    tolerance: NonNegativeFloat = Field(
        0.0,
        description="accuracy (0 to 1) below the best that a trial may have and win with fewer "
        "bytes",
    )
    budget: Budget = Budget(trials=16)
    seed: NonNegativeInt = Field(
        0, description="of the points; what is trained has the base's seed"
    )
    seeds: tuple[NonNegativeInt, ...] = Field(
        (0, 1, 2), description="with which the winner is trained and measured on test data"
    )
    concurrent: NonNegativeInt = Field(
        0, description="most trials side by side; 0 means as many as there is room for"
    )

    @model_validator(mode="after")
    def _consistent(self) -> SearchSettings:
        for name, wanted, protocol in (
            ("first_tasks", self.first_tasks, "first_k_tasks"),
            ("stream", self.stream, "two_streams"),
        ):
            if (wanted is not None) != (self.protocol == protocol):
                remedy = "leave it out" if wanted is not None else f"give {name}"
                raise ValueError(
                    f"{name} belongs to protocol {protocol}, and the protocol is "
                    f"{self.protocol}; {remedy}"
                    + (" (set.stream changes that of the base)" if name == "stream" else "")
                )
        if self.objectives not in (("accuracy",), ("accuracy", "bytes")):
            raise ValueError(
                f"objectives are {list(self.objectives)}; write [accuracy], or [accuracy, bytes]"
            )
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
        if self.protocol == "per_task" and self.algorithm != "grid" and self.budget.trials is None:
            raise ValueError(
                "protocol per_task has a number of trials for each task; give budget.trials"
            )
        if self.protocol == "per_task" and self.scheduler != "none":
            raise ValueError(
                f"protocol per_task judges trials once, so scheduler {self.scheduler} has "
                "nothing to stop; use scheduler none"
            )
        if self.scheduler != "none" and len(self.objectives) > 1:
            raise ValueError(
                f"scheduler {self.scheduler} judges by accuracy alone; use scheduler none, or "
                "objectives [accuracy]"
            )
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds are {list(self.seeds)}; list each once")
        if (
            self.algorithm == "grid"
            and "budget" in self.model_fields_set
            and self.budget.trials is not None
        ):
            raise ValueError(
                "a grid has as many trials as points; leave budget.trials out (hours and stages "
                "bound a grid), or use algorithm random"
            )
        return self


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
    own: tuple[
        str, ...
    ]  # those of them that have steps of the method's own: not a base task that it leaves as it is
    note: str = ""  # on what the settings mean for this stream
    digest: str = ""
    sessions: list[dict[str, Any]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def cluster(self) -> configs.ClusterSettings:
        return configs.ClusterSettings.model_validate(self.body.get("cluster") or {})

    def records(self, phase: str | None = None) -> list[Trial]:
        """Of all trials that began, in order; of one phase if asked."""
        if not exists(join(folder(self.storage, self.name), "search.json")):
            return []
        return [
            record
            for record in load_trials(self.storage, self.name).trials
            if phase is None or record["phase"] == phase
        ]

    @property
    def tracking(self) -> configs.TrackingSettings:
        return configs.check(
            spaces.with_params(self.body, next(self.space.corners())), self.name
        ).tracking

    @property
    def worked_s(self) -> float:
        return float(sum(session["wall_s"] for session in self.sessions))

    @property
    def spent(self) -> bool:
        """Whether the budget of stages or hours is used up."""
        budget = self.settings.budget
        if budget.hours is not None and self.worked_s >= 3600 * budget.hours:
            return True
        return (
            budget.stages is not None
            and sum(record["stages"]["run"] for record in self.records()) >= budget.stages
        )


# ---- reading -------------------------------------------------------------------------------------
def load(path: str, overrides: list[str]) -> tuple[SearchSettings, dict[str, Any], dict[str, Any]]:
    """Settings of a search, the plain values that its trials start from, and those that its winner
    is measured with. Raises UserError."""
    file = Path(path)
    if not file.exists():
        near = (
            difflib.get_close_matches(file.name, [p.name for p in file.parent.glob("*.yaml")], 1)
            if file.parent.exists()
            else []
        )
        raise UserError(
            f"search {path!r} does not exist"
            + (
                f"; did you mean {str(file.parent / near[0])!r}?"
                if near
                else "; give the path of a .yaml file"
            )
        )
    raw = yaml_files.read_yaml(file, "a search")
    for override in overrides:
        apply_override(raw, override)
    if "space" not in raw and "methods" in raw:
        raise UserError(
            f"{path}: this is a config to run, with no `space`; use `python -m pipeline run`, "
            "or write a search that has it as `base`"
        )
    settings = configs.checked(SearchSettings, {"name": file.stem, **raw}, "", path)
    base = file.parent / settings.base
    if not base.exists():
        raise UserError(f"{path}: base {settings.base!r} does not exist beside it; mend the path")
    body = yaml_files.read_with_bases(base)
    for key, value in settings.set.items():
        yaml_files.put(body, key, value, f"{path}: set.{key}")
    own = body.get("stream")
    searched = (
        {**body, "stream": {**(own if isinstance(own, dict) else {}), **settings.stream}}
        if settings.stream is not None
        else body
    )
    return settings, searched, body


def apply_override(raw: dict[str, Any], override: str) -> None:
    """`key=value` into the plain values of a search file: a key of the file itself, else one of the
    base config, which goes into its `set`.

    `set.KEY` means the base's KEY too, also where the file has a key of that name (`name`, `seed`,
    `stream`). Raises UserError.
    """
    path, value = yaml_files.parse_override(override)
    top, _, rest = path.partition(".")
    if top in configs.Config.model_fields and top not in SearchSettings.model_fields:
        rest = path
    elif top not in SearchSettings.model_fields:
        known = [*SearchSettings.model_fields, *configs.Config.model_fields]
        near = difflib.get_close_matches(top, known, 1)
        remedy = (
            f"did you mean {near[0]!r}?" if near else f"there are {', '.join(dict.fromkeys(known))}"
        )
        raise UserError(
            f"--set {override!r}: {top!r} is a key neither of a search nor of its base config; "
            f"{remedy}"
        )
    elif top != "set" or not rest:
        yaml_files.put(raw, path, value, f"--set {override!r}")
        return
    changes = raw.get("set") or {}
    if not isinstance(changes, dict):
        raise UserError(
            f"--set {override!r}: `set` of the search file is {changes!r:.80}, not a mapping; "
            "mend the file"
        )
    raw["set"] = {
        **{key: old for key, old in changes.items() if key != rest},
        rest: value,
    }  # the last one counts


def prepare(path: str, overrides: list[str], provenance: dict[str, Any]) -> Search:
    """Checks all that can be checked before anything runs. Raises UserError."""
    from pipeline.graph import build, raw_data
    from pipeline.graph.store import Store

    settings, body, report_body = load(path, overrides)
    space = Space(settings.space)
    spaces.check(space, body, path)
    if settings.protocol == "per_task" or settings.scheduler == "pbt":
        spaces.searched_per_task([key for key in settings.space if key != spaces.METHOD], path)
        if spaces.METHOD in settings.space:
            raise UserError(
                f"{path}: space.method cannot change within a stream, as protocol per_task or "
                "scheduler pbt would have it; search it end_of_stream"
            )
    if settings.algorithm == "grid" and space.size > MOST_POINTS:
        raise UserError(
            f"{path}: the grid has up to {space.size} points, more than {MOST_POINTS}; give "
            "fewer values, or use algorithm random"
        )
    points = [*space.corners()]
    config = configs.check(spaces.with_params(body, points[0]), path)
    storage = yaml_files.absolute(config.storage)
    for params in points:
        point = configs.check(spaces.with_params(body, params), path)
        label = next(iter(point.methods))
        if not point.data_of(label).val_fraction:
            raise UserError(
                f"{path}: a search is judged on validation images, and data.val_fraction of "
                f"method {label!r} is 0; hold some out, as in "
                "set: {data.val_fraction: 0.1}"
            )
    store = Store(storage)
    store.check_writable()
    for plain in [body] if settings.stream is None else [body, report_body]:
        raw_data.read_sources_again(
            configs.check(spaces.with_params(plain, points[0]), path), store, print
        )
    graph, tasks = build.graph_of(config, store, provenance, "val")
    names = tuple(
        task.name
        for task in tasks
        if f"{next(iter(config.methods))}/{task.name}/evaluate" in graph.stages
    )
    if settings.first_tasks is not None and settings.first_tasks >= len(names):
        raise UserError(
            f"{path}: first_tasks is {settings.first_tasks}, and the stream has {len(names)} "
            "tasks; give fewer, or use protocol end_of_stream"
        )
    if settings.stream is not None:
        build.graph_of(
            configs.check(spaces.with_params(report_body, points[0]), path), store, provenance
        )
    _check_rungs(settings, min(settings.first_tasks or len(names), len(names)), path)
    asked = key_inputs(settings, (*FREE, "set"))  # the body has what is set
    if settings.protocol == "per_task":
        # of each task: a number of a trial says which task it is for
        asked["trials"] = settings.budget.trials
    searched = {key: value for key, value in body.items() if key not in FREE_OF_BASE}
    digest = hashlib.sha256(
        json.dumps([asked, searched, [s.key for s in graph]], sort_keys=True, default=str).encode()
    ).hexdigest()
    names = names[: settings.first_tasks]
    own = tuple(
        name
        for name in names
        if any(s.task == name and s.method and s.step != "evaluate" for s in graph)
    )
    if settings.protocol == "per_task" or settings.scheduler == "pbt":
        for params in points:
            configs.check(with_history(body, params, {own[0]: params}), path)
    search = Search(
        settings,
        body,
        report_body,
        space,
        storage,
        provenance,
        names,
        own,
        _note(settings, points, body),
        digest,
    )
    _check_same(search)
    return search


def _check_rungs(settings: SearchSettings, count: int, path: str) -> None:
    """Raises UserError where a scheduler has nothing to decide between the first and the last of
    `count` tasks."""
    if settings.scheduler == "asha" and settings.grace >= count:
        raise UserError(
            f"{path}: grace is {settings.grace}, and trials learn {count} tasks, so asha would "
            "stop none of them early; "
            "give a smaller grace, or use scheduler none"
        )
    if settings.scheduler == "pbt" and count < 2:
        raise UserError(
            f"{path}: scheduler pbt lets trials take over from each other between tasks, and "
            f"they learn {count}; use scheduler none"
        )


def _note(settings: SearchSettings, points: Sequence[Params], body: dict[str, Any]) -> str:
    """What asha's first rung cannot say where tasks are learned independently of each other; empty
    where it can."""
    # imports torch, so it comes after what can be checked without
    from workers.methods import METHODS

    if settings.scheduler != "asha":
        return ""
    independent: set[str] = set()
    for params in points:
        entries = configs.check(spaces.with_params(body, params), settings.name).methods.values()
        independent.update(entry.method for entry in entries if not METHODS[entry.method].carries)
    if not independent:
        return ""
    verb = "learns" if len(independent) == 1 else "learn"
    first = "the first task" if settings.grace == 1 else f"the first {settings.grace} tasks"
    return (
        f"{', '.join(sorted(independent))} {verb} every task by itself, so asha's first rung "
        f"compares trials on {first} alone, "
        "which says nothing of the others; a larger `grace` compares them on more"
    )


def _check_same(search: Search) -> None:
    """Raises UserError where a search of this name stands in the storage that was another one."""
    place = folder(search.storage, search.name)
    try:
        found = read_json(join(place, "search.json"))
    except (FileNotFoundError, ValueError):
        return
    if not isinstance(found, dict) or found.get("digest") != search.digest:
        raise UserError(
            f"search {search.name!r} stands in {search.storage} with another space, base, data "
            "or code, so its trials cannot be gone on with; "
            f"give this one another name with --set name=NAME, or remove {place} (stages in the "
            "store are reused all the same)"
        )
    search.sessions = [session for session in found.get("sessions", []) if "wall_s" in session]


def write_state(search: Search) -> None:
    """Writes search.json."""
    write_bytes(
        join(folder(search.storage, search.name), "search.json"),
        json.dumps(state_of(search), indent=1, default=str).encode(),
    )


def state_of(search: Search) -> dict[str, Any]:
    """search.json: what the search is, for whoever reads its trials, and for going on."""
    settings = search.settings.model_dump(mode="json", exclude={"space", "base", "set", "stream"})
    if search.settings.algorithm == "grid":
        settings["budget"]["trials"] = len(search.space.grid())
    return {
        "name": search.name,
        "digest": search.digest,
        "base": search.settings.base,
        "set": search.settings.set,
        "config": search.body,
        "tasks": list(search.tasks),
        "space": {key: d.model_dump(mode="json") for key, d in search.settings.space.items()},
        "settings": settings,
        "provenance": search.provenance,
        "sessions": search.sessions,
        "note": search.note,
        "created": search.sessions[0]["started"] if search.sessions else now(),
    }
