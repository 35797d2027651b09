"""The records of a search as they lie in the store: its trials, what each is worth, and the rule
that chooses among them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pyarrow import fs

from workers.errors import UserError
from workers.storage.artifact import exists, join, read_json, resolve

Trial = dict[str, Any]
STATUSES = ("finished", "stopped", "running", "failed")
# accuracies closer than this are equal: the order of a summation must not choose a winner
SLACK = 1e-9
FIELDS: dict[str, tuple[type, ...]] = {
    "number": (int,),
    "phase": (str,),
    "params": (dict,),
    "status": (str,),
    "message": (str,),
    "results": (list,),
    "stages": (dict,),
    "device_s": (int, float),
    "rounds": (list,),
}
RECORD: dict[str, type] = {
    "space": dict,
    "settings": dict,
    "config": dict,
    "provenance": dict,
    "sessions": list,
    "tasks": list,
}


@dataclass(frozen=True)
class Search:
    """What is recorded of a search.

    record: its search.json. trials: sorted by number. winner: its winner.json, None before there is
    one. problems: sentences on files that could not be used and are left out.
    """

    name: str
    record: dict[str, Any]
    trials: list[Trial]
    winner: dict[str, Any] | None
    problems: list[str]

    @property
    def settings(self) -> dict[str, Any]:
        return self.record["settings"]

    @property
    def tolerance(self) -> float:
        return number(self.settings.get("tolerance")) if "tolerance" in self.settings else 0.0

    @property
    def phases(self) -> list[str]:
        """The phases that trials belong to, in the order of the stream; `[""]` where trials are of
        one kind."""
        names = self.record["tasks"]
        met = list(dict.fromkeys(t["phase"] for t in self.trials))
        return sorted(met, key=lambda phase: names.index(phase) if phase in names else len(names))

    def of(self, phase: str) -> list[Trial]:
        return [t for t in self.trials if t["phase"] == phase]

    def trial(self, number: int | None) -> Trial | None:
        return next((t for t in self.trials if t["number"] == number), None)

    def chosen(self) -> dict[str, int]:
        """The trial that each phase chose: what winner.json says of the phase that its trial
        belongs to, else `best`, so far."""
        found = {phase: best(self.of(phase), self.tolerance) for phase in self.phases}
        if self.winner is not None and (trial := self.trial(self.winner["trial"])) is not None:
            found[trial["phase"]] = trial["number"]
        return {phase: trial for phase, trial in found.items() if trial is not None}

    def standing(self) -> dict[int, float]:
        """What compares trials, by number: their score, or in a search of several phases (whose
        scores are of different tasks) their score less the best of their phase. Failed trials and
        those without a score are not among them."""
        scored = [t for t in self.trials if t["status"] != "failed" and not math.isnan(score(t))]
        tops = dict.fromkeys(self.phases, 0.0)
        if len(tops) > 1:
            tops |= {
                phase: max(score(t) for t in scored if t["phase"] == phase)
                for phase in {t["phase"] for t in scored}
            }
        return {t["number"]: score(t) - tops[t["phase"]] for t in scored}


# ---- what a trial is worth -----------------------------------------------------------------------
def number(value: Any) -> float:
    """A finite number as a float; NaN for anything else."""
    return (
        float(value)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        else math.nan
    )


def score(trial: Mapping[str, Any]) -> float:
    """The accuracy after the last task that the trial completed; NaN where it completed none."""
    return number(trial["results"][-1].get("accuracy")) if trial["results"] else math.nan


def size(trial: Mapping[str, Any]) -> float:
    """Bytes kept per task after the last task that the trial completed; NaN where they are not
    known."""
    return number(trial["results"][-1].get("bytes")) if trial["results"] else math.nan


def completed(trial: Mapping[str, Any]) -> int:
    """How many tasks the trial has learned; the ones before the first that it was judged on count
    too."""
    return trial["results"][-1]["position"] + 1 if trial["results"] else 0


def pareto(trials: Iterable[Trial]) -> list[int]:
    """Numbers, in ascending order, of the finished trials than which no other finished one is
    better in accuracy or bytes and not worse in the other. Trials that are equal in both stand or
    fall together; one of unknown size counts as larger than all."""
    points = _finished(trials)
    return sorted(
        n
        for n, a, b in points
        if not any(x >= a and y <= b and (x > a or y < b) for _, x, y in points)
    )


def best(trials: Iterable[Trial], tolerance: float = 0.0) -> int | None:
    """The number of the trial that wins: of the finished ones whose score is at most `tolerance`
    below the best score the one with the fewest bytes, of these the lowest number. None where none
    has finished. Trials must be of one phase."""
    points = _finished(trials)
    top = max((a for _, a, _ in points), default=math.nan)
    return min(
        ((b, n) for n, a, b in points if a >= top - tolerance - SLACK), default=(math.nan, None)
    )[1]


def _finished(trials: Iterable[Trial]) -> list[tuple[int, float, float]]:
    """(number, accuracy, bytes) of finished trials that have a score; unknown bytes are
    infinite."""
    return [
        (t["number"], score(t), math.inf if math.isnan(size(t)) else size(t))
        for t in trials
        if t["status"] == "finished" and not math.isnan(score(t))
    ]


# ---- reading -------------------------------------------------------------------------------------
def load(storage: str, name: str) -> Search:
    """Reads `<storage>/searches/NAME`. Files that are damaged or do not belong there are named in
    `problems` and left out. Raises UserError where there is no such search."""
    folder, problems = join(storage, "searches", name), list[str]()
    names = _names(join(folder, "trials"))
    if not names and not exists(join(folder, "search.json")):
        known = _names(join(storage, "searches"))
        raise UserError(
            f"there is no search {name!r} in {storage!r}; "
            + (f"it has {', '.join(known)}" if known else "no search was started there")
        )
    record: dict[str, Any] = {"name": name, **(_read(join(folder, "search.json"), problems) or {})}
    for key, kind in RECORD.items():
        if not isinstance(record.setdefault(key, kind()), kind):
            problems.append(f"{join(folder, 'search.json')}: {key} is not readable and is left out")
            record[key] = kind()
    trials = [
        t for file in names if (t := _trial(join(folder, "trials"), file, problems)) is not None
    ]
    return Search(
        name,
        record,
        sorted(trials, key=lambda t: t["number"]),
        _winner(join(folder, "winner.json"), problems),
        problems,
    )


def _names(folder: str) -> list[str]:
    """What lies in a folder, in order; nothing where there is none. Files that are being written
    are not among it."""
    system, path = resolve(folder)
    return sorted(
        i.base_name
        for i in system.get_file_info(fs.FileSelector(path, allow_not_found=True))
        if not i.base_name.endswith(".part")
    )


def _read(path: str, problems: list[str]) -> dict[str, Any] | None:
    """A JSON object; None, with a sentence among the problems, where it cannot be read."""
    try:
        body = read_json(path)
    except (OSError, ValueError) as error:
        problems.append(f"{path} cannot be read ({' '.join(str(error).split())}); it is left out")
        return None
    if not isinstance(body, dict):
        problems.append(f"{path} holds no JSON object; it is left out")
        return None
    return body


def _trial(folder: str, file: str, problems: list[str]) -> Trial | None:
    path = join(folder, file)
    if not re.fullmatch(r"\d{4,}\.json", file):
        problems.append(f"{path} is not the record of a trial; it is left out")
        return None
    body = _read(path, problems)
    if body is None:
        return None
    trial: Trial = {
        "phase": "",
        "params": {},
        "message": "",
        "results": [],
        "stages": {},
        "device_s": 0.0,
        "rounds": [],
        **body,
    }
    wrong = next(
        (
            f"{key} is {trial.get(key)!r:.60}"
            for key, kinds in FIELDS.items()
            if not isinstance(trial.get(key), kinds)
        ),
        "",
    )
    if not wrong and trial["number"] != int(file[:-5]):
        wrong = f"its number is {trial['number']}"
    if not wrong and trial["status"] not in STATUSES:
        wrong = f"its status is {trial['status']!r:.60}, not one of {', '.join(STATUSES)}"
    if not wrong and not all(
        isinstance(r, dict) and isinstance(r.get("position"), int) for r in trial["results"]
    ):
        wrong = "its results are not readable"
    if wrong:
        problems.append(
            f"{path} is not a record of trial {int(file[:-5])} ({wrong}); it is left out"
        )
        return None
    trial["stages"] = {
        kind: count if isinstance(count := trial["stages"].get(kind), int) else 0
        for kind in ("run", "reused")
    }
    return trial


def _winner(path: str, problems: list[str]) -> dict[str, Any] | None:
    body = _read(path, problems) if exists(path) else None
    if body is None:
        return None
    winner = {"tests": [], "params": {}, **body}
    if (
        not isinstance(winner.get("trial"), int)
        or not isinstance(winner["tests"], list)
        or not all(isinstance(t, dict) for t in winner["tests"])
    ):
        problems.append(f"{path} names no trial; it is left out")
        return None
    return winner
