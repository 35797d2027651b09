"""The record of a search in MLflow: one run for the search, below it one per trial, below that the
trial's methods and tasks.

Everything is written from the records in the store (`searches/NAME/search.json`,
`trials/NNNN.json`, `winner.json`), so it can be written anew, and twice adds nothing twice.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from pyarrow import fs

from pipeline.config import flatten
from pipeline.results import trials
from pipeline.tracking.mlflow_client import MlflowClientAdapter, transient
from pipeline.tracking.outbox import Outbox
from pipeline.tracking.points import Point, key_name
from pipeline.tracking.recorder import Log, answers, close, log_to_stderr
from pipeline.tracking.run_writer import OPENED, RunIdentity, RunWriter, keys_of, tags_of
from pipeline.tracking.ui import page_base, run_link, this_python
from pipeline.yaml_files import dump_yaml
from workers.errors import UserError, require_package
from workers.storage.artifact import join, read_bytes, read_json, resolve

if TYPE_CHECKING:
    from mlflow.entities import Run

    from pipeline.config import TrackingSettings

ENDS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


def search_identity(search: Mapping[str, Any]) -> str:
    """What makes two searches the same: the name, the base config and the space."""
    body = json.dumps([search["config"], search["space"]], sort_keys=True, default=str)
    return f"{search['name']}-{hashlib.sha256(body.encode()).hexdigest()[:16]}"


class SearchRecorder:
    """Writes the record of one search. `start` first, `trial` whenever the record of a trial has
    changed, `finish` at the end; only `finish` waits.

    log, remedy: as for a Recorder. Without `start`, and with tracking off, nothing is written.
    """

    def __init__(
        self, settings: TrackingSettings, storage: str, log: Log = log_to_stderr, remedy: str = ""
    ):
        self.settings, self.storage = settings, storage
        self.remedy = remedy or f"{this_python()} -m pipeline search CONFIG"
        if settings.enabled:
            require_package("mlflow", "the record of a search", "set tracking=off")
        self.search: Mapping[str, Any] = {}
        self.trials: dict[int, Mapping[str, Any]] = {}  # the newest record of each
        self.writers: dict[int, RunWriter] = {}
        self.calls: MlflowClientAdapter | None = None
        self.run: Run | None = None
        # tracking URI, experiment, id of the search's run
        self.where: tuple[str, str, str] | None = None
        self.drawn: set[int] = set()  # trials whose points are in the curves
        self.read: set[tuple[str, str]] = set()  # (stage, context)
        self.outbox = Outbox("MLflow", self._answers, self.forget, transient, log)

    @property
    def warnings(self) -> list[str]:
        return self.outbox.warnings

    def start(self, search: Mapping[str, Any]) -> None:
        """Opens the run of this search, or finds it. search: its record."""
        if self.settings.enabled:
            self.search = copy.deepcopy(dict(search))
            self.outbox.put(self._open)

    def trial(self, trial: Mapping[str, Any]) -> None:
        """Records a trial as far as it is. trial: its record."""
        if self.search:
            self.outbox.put(partial(self._trial, copy.deepcopy(dict(trial))))

    def finish(
        self, files: Mapping[str, bytes], winner: Mapping[str, Any] | None, status: str = "FINISHED"
    ) -> None:
        """Adds report files and the winner (its record), closes the run and waits, of a server that
        is away for `tracking.patience_s`."""
        if self.search:
            self.outbox.put(partial(self._finish, dict(files), winner, status))
            close(
                self.outbox,
                self.settings.patience_s,
                f"the record of search {self.search['name']!r}",
                self.remedy,
            )

    def links(self, base: str = "") -> list[str]:
        """Where to look at the record of this search; `base` is the address of a running `mlflow
        server`."""
        if self.where is None:
            return []
        uri, experiment, run = self.where
        base = base or (page_base(uri) if uri.startswith("http") else "")
        return [
            f"record: {run_link(base, experiment, run)}"
            if base
            else f"record: {this_python()} -m pipeline ui --storage {self.storage}"
        ]

    @classmethod
    def rebuild(
        cls,
        storage: str,
        name: str,
        settings: TrackingSettings | None = None,
        log: Log = log_to_stderr,
    ) -> SearchRecorder:
        """Writes the whole record of a search from what the store holds of it. settings: by default
        those of its base config. Raises UserError where the storage has no such search."""
        from pipeline.config import TrackingSettings

        folder = join(storage, "searches", name)
        search = read_record(join(folder, "search.json"))
        if search is None:
            raise UserError(
                f"{join(folder, 'search.json')} is not there or not readable, so there is no "
                f"search {name!r} to record; give the name of "
                "a folder in searches/"
            )
        recorder = cls(
            settings or TrackingSettings.model_validate(search["config"].get("tracking") or {}),
            storage,
            log,
        )
        recorder.start(search)
        found = trials.load(storage, name)
        for trial in found.trials:
            recorder.trial(trial)
        recorder.finish(
            {path.rsplit("/", 1)[-1]: read_bytes(path) for path in files_in(folder)}, found.winner
        )
        return recorder

    # ---- written by the outbox's thread ----------------------------------------------------------
    def forget(self) -> None:
        self.calls = self.run = None
        self.drawn.clear()
        self.read.clear()
        for writer in self.writers.values():
            writer.forget()

    def _answers(self) -> bool:
        return answers(self.settings, self.storage)

    def _open(self) -> None:
        self._ready()

    def _ready(self) -> tuple[MlflowClientAdapter, Run]:
        if self.calls and self.run:
            return self.calls, self.run
        calls = self.calls = MlflowClientAdapter(self.storage, self.settings)
        found = calls.find(
            {"accrete.search": search_identity(self.search), "accrete.kind": "search"}
        )
        run = self.run = found[0] if found else calls.create(self.search["name"], self._tags())
        self.where = (calls.uri, calls.experiment, run.info.run_id)
        if run.info.status not in ("RUNNING", "FINISHED"):
            calls.open(run)
        if OPENED not in run.data.tags:
            style = {
                "default_flow_style": True,
                "width": 10_000,
                "sort_keys": True,
                "allow_unicode": False,
            }
            space = {
                f"space.{key}": dump_yaml(dimension, **style).removesuffix("\n...\n").strip()
                for key, dimension in self.search["space"].items()
            }
            calls.params(run, {**space, **flatten(self.search["settings"], "settings")})
        calls.tag(run, {OPENED: "true", "mlflow.note.content": note_of(self.search)})
        return calls, run

    def _tags(self) -> dict[str, str]:
        settings, config = self.search["settings"], self.search["config"]
        record = {
            "config": config,
            "provenance": self.search.get("provenance"),
            "stages": [],
            "tasks": [],
        }
        methods = [
            str((entry or {}).get("method", label))
            for label, entry in config.get("methods", {}).items()
        ]
        stream = [
            str(task.get("name") or task.get("card", ""))
            for task in config.get("stream", {}).get("tasks", [])
        ]
        return tags_of(record) | {
            "accrete.kind": "search",
            "accrete.search": search_identity(self.search),
            "mlflow.source.name": "python -m pipeline search",
            "protocol": str(settings.get("protocol", "")),
            "algorithm": str(settings.get("algorithm", "")),
            "methods": ", ".join(dict.fromkeys(methods))[:4000],
            "stream": ", ".join(stream)[:4000],
        }

    def _writer(self, trial: Mapping[str, Any]) -> RunWriter:
        """What writes the runs of a trial: one without a graph is a graph without stages."""
        calls, run = self._ready()
        number = trial["number"]
        name = f"{self.search['name']}-{number:04d}"
        if number not in self.writers:
            shared = {
                name: value for name, value in self._tags().items() if name in ("methods", "stream")
            }
            tags = shared | {
                "accrete.search": search_identity(self.search),
                "trial": f"{number:04d}",
                "phase": trial.get("phase", ""),
                "protocol": f"validation, {self.search['settings'].get('protocol', '')}",
                "mlflow.source.name": "python -m pipeline search",
            }
            place = RunIdentity(
                "trial",
                f"{search_identity(self.search)}/{number:04d}",
                run.info.run_id,
                {k: v for k, v in tags.items() if v},
                trial["params"],
                trial_note(self.search, trial),
                "validation",
                pictures=False,
            )
            self.writers[number] = RunWriter(self.settings, self.storage, place)
        writer = self.writers[number]
        writer.calls = calls
        graph = trial.get("graph") or {"config": self.search["config"], "stages": [], "tasks": []}
        writer.begin(
            {
                **graph,
                "name": name,
                "provenance": graph.get("provenance") or self.search.get("provenance"),
            }
        )
        return writer

    def _trial(self, trial: Mapping[str, Any]) -> None:
        self.trials[trial["number"]] = trial
        writer = self._writer(trial)
        calls = writer.ready()
        for stage in writer.record["stages"]:
            if stage["step"] != "report":
                writer.stage(stage["id"])
        points = [
            Point(name, float(result[name]), result["position"] + 1, result["position"] + 1)
            for result in trial["results"]
            for name in ("accuracy", "bytes")
            if finite(result.get(name))
        ]
        points += [
            Point(name, float(value), 0, 0)
            for name, value in (
                ("device_s", trial.get("device_s")),
                ("wall_s", trial.get("wall_s")),
                *((f"stages_{k}", v) for k, v in (trial.get("stages") or {}).items()),
            )
            if finite(value) and trial["status"] in ENDS
        ]
        calls.points(writer.parent, points)
        calls.tag(
            writer.parent,
            {
                **keys_of(writer.record, ""),
                "status": trial["status"],
                "message": trial.get("message", "")[:4000],
                "mlflow.note.content": trial_note(self.search, trial),
            },
        )
        if trial["status"] in ENDS:
            writer.finish({}, ENDS[trial["status"]])
        self._share_inputs(writer)
        self._curves(whole=False)

    def _share_inputs(self, writer: RunWriter) -> None:
        """The search has read what its trials have read."""
        _, run = self._ready()
        for stage in writer.record["stages"]:
            if stage["label"] and stage["id"] in writer.recorded:
                context = "validation" if stage["step"] == "evaluate" else "train"
                new = [p for p in stage["parents"] if (p, context) not in self.read]
                writer.inputs(run, new, context)
                self.read |= {(p, context) for p in new}

    def _curves(self, whole: bool) -> None:
        """Accuracy by number of trial, and the best so far, of trials that went to their end, phase
        by phase; only as far as all trials before have ended, so that a point never changes. whole:
        those that have not ended never will."""
        calls, run = self._ready()
        best: dict[str, float] = {}
        points = []
        for number in range(max(self.trials, default=-1) + 1):
            trial = self.trials.get(number)
            if not whole and (trial is None or trial["status"] not in ENDS):
                break
            if (
                trial is None
                or trial["status"] != "finished"
                or not trial["results"]
                or not finite(value := trial["results"][-1]["accuracy"])
            ):
                continue
            phase = f"/{trial['phase']}" if trial.get("phase") else ""
            best[phase] = max(value, best.get(phase, -math.inf))
            if number not in self.drawn:
                points += [
                    Point(key_name(f"accuracy{phase}"), value, number, number),
                    Point(key_name(f"best_accuracy{phase}"), best[phase], number, number),
                ]
        calls.points(run, points)
        self.drawn |= {p.step for p in points}

    def _finish(
        self, files: Mapping[str, bytes], winner: Mapping[str, Any] | None, status: str
    ) -> None:
        self._curves(whole=True)
        calls, run = self._ready()
        calls.files(run, files)
        chosen = self._crown(winner)
        if winner is not None:
            tests = [
                Point("winner_test_accuracy", float(t["average_accuracy"]), t["seed"], 0)
                for t in winner.get("tests") or []
                if finite(t.get("average_accuracy"))
            ]
            calls.points(run, tests)
        accuracy = winner.get("accuracy") if winner else None
        calls.tag(
            run,
            {
                "winner_run": chosen,
                "winner_accuracy": f"{accuracy:.6f}"
                if finite(accuracy) and accuracy is not None
                else "",
                "mlflow.note.content": note_of(self.search, winner, self.trials),
            },
        )
        if run.info.status != status:
            calls.close(run, status)

    def _crown(self, winner: Mapping[str, Any] | None) -> str:
        """The tag `winner` on the winner's run and on no other one. Returns the id of that run, or
        nothing."""
        calls, _ = self._ready()
        number = f"{winner['trial']:04d}" if winner else ""
        chosen = ""
        for run in calls.find(
            {"accrete.search": search_identity(self.search), "accrete.kind": "trial"}
        ):
            wins = run.data.tags.get("trial") == number
            calls.tag(run, {"winner": "true" if wins else ""})
            chosen = run.info.run_id if wins else chosen
        return chosen


# ---- records and words ---------------------------------------------------------------------------
def read_record(path: str) -> dict[str, Any] | None:
    """A record in the store; None where it is absent or damaged."""
    try:
        found = read_json(path)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def files_in(folder: str) -> list[str]:
    """Paths of the files that lie directly in a folder, in order."""
    system, path = resolve(folder)
    found = system.get_file_info(fs.FileSelector(path, allow_not_found=True))
    return sorted(join(folder, info.base_name) for info in found if info.type == fs.FileType.File)


def finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def note_of(
    search: Mapping[str, Any],
    winner: Mapping[str, Any] | None = None,
    trials: Mapping[int, Mapping[str, Any]] | None = None,
) -> str:
    """What MLflow shows as the description of a search (Markdown)."""
    settings = search["settings"]
    budget = ", ".join(
        f"{value} {name}" for name, value in (settings.get("budget") or {}).items() if value
    )
    text = (
        f"Search **{search['name']}** over {', '.join(f'`{key}`' for key in search['space'])}, "
        f"by {settings.get('algorithm', '')} search"
        + (f" with {settings['scheduler']}" if settings.get("scheduler", "none") != "none" else "")
        + (f", at most {budget}" if budget else "")
        + ". Each child run is a trial: a whole graph, judged on validation images alone "
        f"(protocol `{settings.get('protocol', '')}`). "
        "`best_accuracy` has step = number of the trial."
    )
    if trials:
        counts = {
            status: sum(t["status"] == status for t in trials.values())
            for status in (*ENDS, "running")
        }
        text += " " + ", ".join(f"{n} {status}" for status, n in counts.items() if n) + "."
    if winner:
        values = ", ".join(f"`{key}` = {value}" for key, value in winner.get("params", {}).items())
        text += f" The winner is trial {winner['trial']}: {values or 'the base config'}."
    return text


def trial_note(search: Mapping[str, Any], trial: Mapping[str, Any]) -> str:
    values = ", ".join(f"`{key}` = {value}" for key, value in trial["params"].items())
    says = {
        "stopped": " It was stopped early.",
        "failed": f" It failed: {trial.get('message', '')}",
    }.get(trial["status"], "")
    phase = f", which looks for settings of task **{trial['phase']}**" if trial.get("phase") else ""
    return (
        f"Trial {trial['number']} of search **{search['name']}**{phase}: "
        f"{values or 'the base config'}. `accuracy` is measured on validation images, "
        f"on average over the tasks so far; step = tasks completed.{says}"
    )
