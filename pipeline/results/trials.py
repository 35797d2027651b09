"""Records of a search in the store: its trials, their scores, and the rule to choose a winner.

A search has phases. With protocol `per_task`, the settings of each task are searched in a phase of
their own, named after the task. Any other search has one phase, named "". Scores of different
phases are averages over different tasks. `load_search_record` reads a search, `best` is the rule.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NotRequired, TypedDict, cast

from pyarrow import fs

from pipeline.graph.run_record import RunRecord
from workers.errors import UserError
from workers.storage.artifact import exists, join, read_json, resolve
from workers.storage.lock import is_locked

STATUSES = ("finished", "stopped", "running", "failed")
# Accuracies that differ by less than this are equal, so that rounding does not choose the winner.
SLACK = 1e-9
# field of a trial's record -> allowed types
TRIAL_TYPES: dict[str, tuple[type, ...]] = {
    "number": (int,),
    "phase": (str,),
    "params": (dict,),
    "status": (str,),
    "message": (str,),
    "results": (list,),
    "stages": (dict,),
    "device_s": (int, float),
    "gpu_s": (int, float),
    "rounds": (list,),
}
SEARCH_TYPES: dict[str, type] = {
    "space": dict,
    "settings": dict,
    "config": dict,
    "provenance": dict,
    "sessions": list,
    "tasks": list,
}


# ---- records -------------------------------------------------------------------------------------
class TrialResult(TypedDict):
    """The result of a trial after one task of the stream.

    Attributes:
        task: Name of the task.
        position: Position of the task in the stream.
        accuracy: Average validation accuracy over the tasks so far.
        bytes: Stored bytes per task, without the backbone.
        per_task: Task -> validation accuracy, for all tasks so far.
    """

    task: str
    position: int
    accuracy: float
    bytes: float
    per_task: dict[str, float]


class TrialRound(TypedDict):
    """One round of population-based training: the parameters, and the accuracy afterwards."""

    params: dict[str, Any]
    accuracy: float


class StageCounts(TypedDict):
    """Number of stages that a trial ran, and number of stages that it reused from the store."""

    run: int
    reused: int


class Trial(TypedDict):
    """The record of a trial: `trials/NNNN.json`.

    Attributes:
        number: Number of the trial.
        phase: Task whose settings are searched; "" in a search with one phase.
        params: Dotted key of the config -> value.
        status: One of STATUSES.
        message: Why the trial failed, or was stopped because of `max_forgetting`; else "".
        results: Results after each task.
        stages: Numbers of executed and reused stages.
        device_s: Seconds of executed stages and failed attempts times their number of workers.
        rounds: Rounds of population-based training.
        gpu_s: `device_s` with each term times the number of GPUs of a worker; missing in old
            records.
        wall_s: Wall-clock seconds of all sessions.
        started: Start time, in ISO 8601.
        ended: End time; None while the trial is running.
        graph: The stages of the trial, as a run record.
        history: Task -> parameters that the task was trained with, if they differ between tasks.
    """

    number: int
    phase: str
    params: dict[str, Any]
    status: str
    message: str
    results: list[TrialResult]
    stages: StageCounts
    device_s: float
    rounds: list[TrialRound]
    gpu_s: NotRequired[float]
    wall_s: NotRequired[float]
    started: NotRequired[str]
    ended: NotRequired[str | None]
    graph: NotRequired[RunRecord | None]
    history: NotRequired[dict[str, dict[str, Any]]]


class SeedTest(TypedDict):
    """The result of the winner on test images for one seed. `run` is the name of the run."""

    seed: int
    run: str
    average_accuracy: float
    forgetting: float
    bytes_per_task: float


class Winner(TypedDict):
    """The winner of a search: `winner.json`.

    Attributes:
        trial: Number of the trial.
        params: Parameters of the trial.
        tests: Results on test images, one per seed.
        accuracy: Validation accuracy.
        bytes: Stored bytes per task.
        config: Name of the file with the config of the winner.
        pareto: Numbers of the trials on the Pareto front of accuracy and size.
    """

    trial: int
    params: dict[str, Any]
    tests: list[SeedTest]
    accuracy: NotRequired[float]
    bytes: NotRequired[float]
    config: NotRequired[str]
    pareto: NotRequired[list[int]]


@dataclass(frozen=True)
class SearchRecord:
    """The records of a search.

    Attributes:
        name: Name of the search.
        record: Content of search.json.
        trials: Trials, sorted by number.
        winner: Content of winner.json; None until there is a winner.
        problems: Sentences on files that could not be read and are omitted.
        is_running: Whether a process runs the search; None if unknown, as in a bucket.
    """

    name: str
    record: dict[str, Any]
    trials: list[Trial]
    winner: Winner | None
    problems: list[str]
    is_running: bool | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the search file."""
        settings: dict[str, Any] = self.record["settings"]
        return settings

    @property
    def tolerance(self) -> float:
        """Maximum difference from the best accuracy at which a smaller trial still wins."""
        if "tolerance" not in self.settings:
            return 0.0
        return as_number(self.settings["tolerance"])

    @property
    def phases(self) -> list[str]:
        """Phases of the trials, in stream order; `[""]` in a search with one phase."""
        tasks = self.record["tasks"]
        phases = list(dict.fromkeys(trial["phase"] for trial in self.trials))
        return sorted(phases, key=lambda name: tasks.index(name) if name in tasks else len(tasks))

    def of(self, phase: str) -> list[Trial]:
        """Return the trials of a phase."""
        return [trial for trial in self.trials if trial["phase"] == phase]

    def trial(self, number: int | None) -> Trial | None:
        """Return the trial with a number; None if it does not exist."""
        return next((trial for trial in self.trials if trial["number"] == number), None)

    def origins(self) -> dict[int, str]:
        """Return number of a trial -> the trial of an earlier search that it repeats (`NAME 7`).

        The first trials repeat trials of an earlier search if the search was warm-started.
        """
        warm_start = self.record.get("warm_start")
        if not isinstance(warm_start, dict) or not isinstance(warm_start.get("points"), list):
            return {}
        points = warm_start["points"]
        numbers = [point.get("trial") for point in points if isinstance(point, dict)]
        name = warm_start.get("search")
        return {number: f"{name} {trial}" for number, trial in enumerate(numbers)}

    def chosen(self) -> dict[str, int]:
        """Return phase -> number of the chosen trial.

        This is the winner for its phase, and the best trial so far for any other phase.
        """
        numbers: dict[str, int] = {}
        for phase in self.phases:
            number = best(self.of(phase), self.tolerance)
            if number is not None:
                numbers[phase] = number
        if self.winner is not None:
            winner = self.trial(self.winner["trial"])
            if winner is not None:
                numbers[winner["phase"]] = winner["number"]
        return numbers

    def standing(self) -> dict[int, float]:
        """Return number of a trial -> score that is comparable across phases.

        In a search with several phases, scores average over different tasks. The best score of the
        phase is therefore subtracted. Failed trials and trials without a score are omitted.
        """
        judged = [trial for trial in self.trials if trial["status"] != "failed"]
        scored = [trial for trial in judged if not math.isnan(score(trial))]
        tops = dict.fromkeys(self.phases, 0.0)
        if len(tops) > 1:
            for phase in tops:
                scores = [score(trial) for trial in scored if trial["phase"] == phase]
                tops[phase] = max(scores, default=0.0)
        return {trial["number"]: score(trial) - tops[trial["phase"]] for trial in scored}


# ---- scores of trials ----------------------------------------------------------------------------
def as_number(value: Any) -> float:
    """Return a finite number as a float, and NaN for any other value."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    return float(value) if math.isfinite(value) else math.nan


def score(trial: Trial) -> float:
    """Return the average accuracy after the last completed task; NaN without results."""
    return as_number(trial["results"][-1].get("accuracy")) if trial["results"] else math.nan


def has_score(trial: Trial) -> bool:
    """Return whether a trial has finished with an accuracy."""
    return trial["status"] == "finished" and not math.isnan(score(trial))


def size(trial: Trial) -> float:
    """Return the bytes per task after the last completed task; NaN if unknown."""
    return as_number(trial["results"][-1].get("bytes")) if trial["results"] else math.nan


def completed(trial: Trial) -> int:
    """Return the number of learned tasks, including tasks before the first result."""
    return trial["results"][-1]["position"] + 1 if trial["results"] else 0


def gpu_hours(trials: Iterable[Trial]) -> float:
    """Return the GPU time of the executed stages and failed attempts of trials, in hours."""
    return sum(trial.get("gpu_s", 0.0) for trial in trials) / 3600


def compute_trial_forgetting(results: Sequence[TrialResult]) -> float:
    """Compute the forgetting after the last result, averaged over the earlier tasks.

    The forgetting of a task is its best earlier accuracy minus its accuracy now (Chaudhry et al.,
    arXiv 1801.10112), as in `metrics.forgetting`. The result is 0 for one task, and NaN if an
    accuracy is missing.
    """
    if not results:
        return math.nan
    if len(results) < results[-1]["position"] + 1:
        return math.nan  # some tasks have no result
    losses = []
    for index, learned in enumerate(results[:-1]):
        task = learned["task"]
        rates = [as_number(result["per_task"].get(task)) for result in results[index:]]
        if any(math.isnan(rate) for rate in rates):
            return math.nan
        losses.append(max(rates[:-1]) - rates[-1])
    return sum(losses) / len(losses) if losses else 0.0


class _Scored(NamedTuple):
    """A finished trial with a score. `bytes` is infinite if the size is unknown."""

    number: int
    accuracy: float
    bytes: float


def pareto(trials: Iterable[Trial]) -> list[int]:
    """Return the sorted numbers of the finished trials on the Pareto front of accuracy and bytes.

    If trials are equal in both, all or none are on the front. An unknown size counts as
    infinite.
    """
    front: list[int] = []
    smallest: float | None = None  # bytes of the more accurate trials
    by_accuracy = sorted(_scored(trials), key=lambda trial: -trial.accuracy)
    for _, group in itertools.groupby(by_accuracy, key=lambda trial: trial.accuracy):
        equal = list(group)
        least = min(trial.bytes for trial in equal)
        if smallest is None or least < smallest:
            front += [trial.number for trial in equal if trial.bytes == least]
            smallest = least
    return sorted(front)


def best(trials: Iterable[Trial], tolerance: float = 0.0) -> int | None:
    """Return the number of the winning trial; None if no trial has finished.

    The candidates are the finished trials whose score is at most `tolerance` below the best score.
    Of these, the trial with the fewest bytes wins, and then the lowest number. All trials must be
    of the same phase.
    """
    scored = _scored(trials)
    top = max((trial.accuracy for trial in scored), default=math.nan)
    good = [trial for trial in scored if trial.accuracy >= top - tolerance - SLACK]
    if not good:
        return None
    return min(good, key=lambda trial: (trial.bytes, trial.number)).number


def _scored(trials: Iterable[Trial]) -> list[_Scored]:
    scored = []
    for trial in trials:
        if has_score(trial):
            size_or_inf = math.inf if math.isnan(size(trial)) else size(trial)
            scored.append(_Scored(trial["number"], score(trial), size_or_inf))
    return scored


# ---- reading -------------------------------------------------------------------------------------
def load_search_record(storage: str, name: str) -> SearchRecord:
    """Read `<storage>/searches/NAME`.

    Damaged or unexpected files are omitted and listed in `problems`.

    Raises:
        UserError: If the search does not exist.
    """
    folder = join(storage, "searches", name)
    trials_folder = join(folder, "trials")
    problems: list[str] = []
    names = _names(trials_folder)
    if not names and not exists(join(folder, "search.json")):
        known = _names(join(storage, "searches"))
        known_text = f"it has {', '.join(known)}" if known else "no search was started there"
        raise UserError(f"there is no search {name!r} in {storage!r}; {known_text}")
    trials = []
    record = _read_search_file(join(folder, "search.json"), name, problems)
    for file_name in names:
        trial = _read_trial_file(trials_folder, file_name, problems)
        if trial is not None:
            trials.append(trial)
    trials.sort(key=lambda trial: trial["number"])
    winner = _read_winner(join(folder, "winner.json"), problems)
    is_running = is_locked(join(storage, "searches"), get_search_lock_key(name))
    return SearchRecord(name, record, trials, winner, problems, is_running)


def get_search_lock_key(name: str) -> str:
    """Return the key of the lock held by the process that runs a search."""
    return f"search-{name}"


def collect_search_keys(storage: str) -> set[str]:
    """Return the keys of all stages of the trials of all searches in a storage.

    Raises:
        UserError: If a record cannot be read.
    """
    keys: set[str] = set()
    folder = join(storage, "searches")
    for name in _names(folder, fs.FileType.Directory):
        search = load_search_record(storage, name)
        if search.problems:
            raise UserError(
                f"search {name!r}: {search.problems[0]}; so its stages are not known: "
                f"start the search again, or remove {join(folder, name)}"
            )
        for trial in search.trials:
            graph = trial.get("graph")
            if graph:
                keys |= {stage["key"] for stage in graph["stages"]}
    return keys


def _names(folder: str, kind: fs.FileType | None = None) -> list[str]:
    """Return the sorted names in a folder, without unfinished files.

    The result is empty if the folder does not exist.

    Args:
        folder: Folder or URI.
        kind: Type of the entries; None for all types.
    """
    system, path = resolve(folder)
    entries = system.get_file_info(fs.FileSelector(path, allow_not_found=True))
    names = [entry.base_name for entry in entries if kind in (None, entry.type)]
    return sorted(name for name in names if not name.endswith(".part"))


def _read_json_object(path: str, problems: list[str]) -> dict[str, Any] | None:
    """Read a JSON object. If it cannot be read, return None and add a sentence to `problems`."""
    try:
        body = read_json(path)
    except (OSError, ValueError) as error:
        problems.append(f"{path} cannot be read ({' '.join(str(error).split())}); it is left out")
        return None
    if not isinstance(body, dict):
        problems.append(f"{path} holds no JSON object; it is left out")
        return None
    return body


def _read_search_file(path: str, name: str, problems: list[str]) -> dict[str, Any]:
    record: dict[str, Any] = {"name": name, **(_read_json_object(path, problems) or {})}
    for key, kind in SEARCH_TYPES.items():
        if not isinstance(record.setdefault(key, kind()), kind):
            problems.append(f"{path}: {key} is not readable and is left out")
            record[key] = kind()
    return record


def _read_trial_file(folder: str, file_name: str, problems: list[str]) -> Trial | None:
    path = join(folder, file_name)
    if not re.fullmatch(r"\d{4,}\.json", file_name):
        problems.append(f"{path} is not the record of a trial; it is left out")
        return None
    body = _read_json_object(path, problems)
    if body is None:
        return None
    trial: dict[str, Any] = {
        "phase": "",
        "params": {},
        "message": "",
        "results": [],
        "stages": {},
        "device_s": 0.0,
        "gpu_s": 0.0,
        "rounds": [],
        **body,
    }
    number = int(file_name.removesuffix(".json"))
    mistake = _find_mistake(trial, number)
    if mistake:
        problems.append(f"{path} is not a record of trial {number} ({mistake}); it is left out")
        return None
    counts = {"run": 0, "reused": 0}
    for kind in counts:
        count = trial["stages"].get(kind)
        if isinstance(count, int):
            counts[kind] = count
    trial["stages"] = counts
    return cast(Trial, trial)


def _find_mistake(trial: Mapping[str, Any], number: int) -> str:
    """Return the mistake in the record of a trial; "" if the record is valid."""
    for key, kinds in TRIAL_TYPES.items():
        if not isinstance(trial.get(key), kinds):
            return f"{key} is {trial.get(key)!r:.60}"
    if trial["number"] != number:
        return f"its number is {trial['number']}"
    if trial["status"] not in STATUSES:
        return f"its status is {trial['status']!r:.60}, not one of {', '.join(STATUSES)}"
    for result in trial["results"]:
        if not isinstance(result, dict) or not isinstance(result.get("position"), int):
            return "its results are not readable"
    return ""


def _read_winner(path: str, problems: list[str]) -> Winner | None:
    body = _read_json_object(path, problems) if exists(path) else None
    if body is None:
        return None
    winner = {"tests": [], "params": {}, **body}
    tests = winner["tests"]
    has_tests = isinstance(tests, list) and all(isinstance(test, dict) for test in tests)
    if not isinstance(winner.get("trial"), int) or not has_tests:
        problems.append(f"{path} names no trial; it is left out")
        return None
    return cast(Winner, winner)
