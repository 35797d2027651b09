"""Record a search in MLflow: a run per search, trial, method and task, nested in this order.

The record in MLflow is written from the search's files in the storage
(`searches/NAME/search.json`, `trials/NNNN.json`, `winner.json`), which are also called records.
Therefore it can be written again (`SearchRecorder.rebuild`), and nothing is added twice.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from pyarrow import fs

from pipeline.config.invocation import this_command
from pipeline.config.settings import flatten
from pipeline.config.yaml_files import dump_yaml
from pipeline.graph.run_record import KEY_VERSION, RunRecord
from pipeline.results import trials
from pipeline.results.trials import Trial, Winner, as_number, score
from pipeline.shell.console import print_to_stderr
from pipeline.tracking.mlflow_client import (
    MlflowClientAdapter,
    Point,
    describe_login_refusal,
    key_name,
    transient,
)
from pipeline.tracking.outbox import Outbox
from pipeline.tracking.recorder import Log, close, is_answering
from pipeline.tracking.run_writer import (
    MAX_TAG,
    OPENED,
    RunIdentity,
    RunWriter,
    make_key_tags,
    make_tags,
)
from pipeline.tracking.ui import format_record_line, get_server_url
from workers.errors import UserError, require_package
from workers.storage.artifact import join, read_bytes, read_json, resolve

if TYPE_CHECKING:
    from mlflow.entities import Run

    from pipeline.config.settings import TrackingSettings

# status of an ended trial -> status of the MLflow run
RUN_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
# options of `dump_yaml` for one line of ASCII characters
ONE_LINE_YAML = {
    "default_flow_style": True,
    "width": 10_000,
    "sort_keys": True,
    "allow_unicode": False,
}


class SearchLocation(NamedTuple):
    """Location of the record of a search in MLflow. `run` is the id of the search's run."""

    uri: str
    experiment: str
    run: str


def search_identity(search: Mapping[str, Any]) -> str:
    """Return the identity of a search: its name and a digest of the base config and space."""
    body = json.dumps([search["config"], search["space"]], sort_keys=True, default=str)
    return f"{search['name']}-{hashlib.sha256(body.encode()).hexdigest()[:16]}"


class SearchRecorder:
    """Records one search: call `start`, `trial` for each changed record of a trial, then `finish`.

    Only `finish` waits for MLflow. Nothing is written if tracking is off, or if `start` was not
    called.

    Args:
        settings: Settings of tracking.
        storage: Folder or URI of the storage.
        log: Function that prints a message, as in `Recorder`.
        remedy: Command that writes the record again, as in `Recorder`.
    """

    def __init__(
        self,
        settings: TrackingSettings,
        storage: str,
        log: Log = print_to_stderr,
        remedy: str = "",
    ):
        if settings.enabled:
            require_package("mlflow", "the record of a search", "set tracking=off")
        self.settings = settings
        self.storage = storage
        self.remedy = remedy or f"{this_command()} search CONFIG"
        self.search: Mapping[str, Any] = {}
        self.trials: dict[int, Trial] = {}  # number of a trial -> its latest record
        self.writers: dict[int, RunWriter] = {}
        self.client: MlflowClientAdapter | None = None
        self.run: Run | None = None
        self.location: SearchLocation | None = None
        self.trials_in_curves: set[int] = set()
        self.logged_inputs: set[tuple[str, str]] = set()  # (stage, context)
        self.outbox = Outbox(
            "MLflow", self._answers, self.forget, transient, log, describe_login_refusal
        )

    @property
    def warnings(self) -> list[str]:
        """Messages about missing parts of the record."""
        return self.outbox.warnings

    def start(self, search: Mapping[str, Any]) -> None:
        """Find or create the run of this search. `search` is the content of search.json."""
        if self.settings.enabled:
            self.search = copy.deepcopy(dict(search))
            self.outbox.put(self._open)

    def trial(self, trial: Trial) -> None:
        """Record the current state of a trial, given by its record."""
        if self.search:
            self.outbox.put(partial(self._record_trial, copy.deepcopy(trial)))

    def finish(
        self, files: Mapping[str, bytes], winner: Winner | None, status: str = "FINISHED"
    ) -> None:
        """Add report files and the winner, close the run and wait until everything is written.

        If the server does not answer, the wait is at most `tracking.patience_s` seconds.

        Args:
            files: Name -> content of the files of the report.
            winner: Content of winner.json, or None without a winner.
            status: MLflow's status of the run: FINISHED, FAILED or KILLED.
        """
        if self.search:
            self.outbox.put(partial(self._finish, dict(files), winner, status))
            content = f"the record of search {self.search['name']!r}"
            close(self.outbox, self.settings.patience_s, content, self.remedy)

    def links(self, base: str = "") -> list[str]:
        """Return lines with the location of the record; see `Recorder.links`."""
        location = self.location
        if location is None:
            return []
        base = base or get_server_url(location.uri)
        return [format_record_line(base, location.experiment, location.run, self.storage)]

    @classmethod
    def rebuild(
        cls,
        storage: str,
        name: str,
        settings: TrackingSettings | None = None,
        log: Log = print_to_stderr,
    ) -> SearchRecorder:
        """Write the whole record of a search again from the storage.

        Args:
            storage: Folder or URI of the storage.
            name: Name of the search.
            settings: Settings of tracking. None: the settings of the base config.
            log: Function that prints a message.

        Returns:
            The recorder, after `finish`.

        Raises:
            UserError: If the storage does not contain the search.
        """
        from pipeline.config.settings import TrackingSettings

        folder = join(storage, "searches", name)
        search = read_record(join(folder, "search.json"))
        if search is None:
            raise UserError(
                f"{join(folder, 'search.json')} is not there or not readable, so there "
                f"is no search {name!r} to record; give the name of a folder in searches/"
            )
        if settings is None:
            settings = TrackingSettings.model_validate(search["config"].get("tracking") or {})
        recorder = cls(settings, storage, log)
        recorder.start(search)
        stored = trials.load_search_record(storage, name)
        for trial in stored.trials:
            recorder.trial(trial)
        files = {path.rsplit("/", 1)[-1]: read_bytes(path) for path in list_report_files(folder)}
        recorder.finish(files, stored.winner, "FINISHED" if stored.winner else "KILLED")
        return recorder

    # ---- called by the outbox's thread -----------------------------------------------------------
    def forget(self) -> None:
        """Forget all cached data from MLflow."""
        self.client = None
        self.run = None
        self.trials_in_curves.clear()
        self.logged_inputs.clear()
        for writer in self.writers.values():
            writer.forget()

    def _answers(self) -> bool:
        return is_answering(self.settings, self.storage)

    def _open(self) -> None:
        self._ready()

    def _ready(self) -> tuple[MlflowClientAdapter, Run]:
        """Return the client and the run of the search. Find or create the run at the first call."""
        if self.client and self.run:
            return self.client, self.run
        client = self.client = MlflowClientAdapter(self.storage, self.settings)
        runs = client.find(
            {"accrete.search": search_identity(self.search), "accrete.kind": "search"}
        )
        run = self.run = runs[0] if runs else client.create(self.search["name"], self._tags())
        self.location = SearchLocation(client.uri, client.experiment, run.info.run_id)
        if run.info.status not in ("RUNNING", "FINISHED"):
            client.reopen(run)
        if OPENED not in run.data.tags:
            client.log_params(run, self._params())
        client.tag(run, {OPENED: "true", "mlflow.note.content": format_search_note(self.search)})
        return client, run

    def _params(self) -> dict[str, Any]:
        """Return the parameters of the search's run.

        They are the dimensions of the space, each as a line of YAML, and the settings.
        """
        params: dict[str, Any] = {}
        for key, dimension in self.search["space"].items():
            text = dump_yaml(dimension, **ONE_LINE_YAML)
            params[f"space.{key}"] = text.removesuffix("\n...\n").strip()
        return {**params, **flatten(self.search["settings"], "settings")}

    def _tags(self) -> dict[str, str]:
        settings = self.search["settings"]
        config = self.search["config"]
        entries = config.get("methods", {}).items()
        methods = [str((entry or {}).get("method", label)) for label, entry in entries]
        tasks = config.get("stream", {}).get("tasks", [])
        stream = [str(task.get("name") or task.get("card", "")) for task in tasks]
        return make_tags(self._record(None, self.search["name"])) | {
            "accrete.kind": "search",
            "accrete.search": search_identity(self.search),
            "mlflow.source.name": "python -m pipeline search",
            "protocol": str(settings.get("protocol", "")),
            "algorithm": str(settings.get("algorithm", "")),
            "methods": ", ".join(dict.fromkeys(methods))[:MAX_TAG],
            "stream": ", ".join(stream)[:MAX_TAG],
        }

    def _writer(self, trial: Trial) -> RunWriter:
        """Return the writer of a trial's runs.

        Until the trial has built its graph, the run record of the writer has no stages.
        """
        client, run = self._ready()
        number = trial["number"]
        if number not in self.writers:
            identity = self._trial_identity(trial, run.info.run_id)
            self.writers[number] = RunWriter(self.settings, self.storage, identity)
        writer = self.writers[number]
        writer.client = client
        writer.begin(self._record(trial.get("graph"), f"{self.search['name']}-{number:04d}"))
        return writer

    def _record(self, graph: RunRecord | None, name: str) -> RunRecord:
        """Return the run record `graph` with another name.

        Args:
            graph: Run record of a trial. None: the result has the base config and no stages.
            name: Name in the result.
        """
        record: RunRecord = {
            "name": name,
            "key_version": KEY_VERSION,
            "config": self.search["config"],
            "created": str(self.search.get("created", "")),
            "stages": [],
            "tasks": [],
            "provenance": self.search.get("provenance") or {},
        }
        if graph is None:
            return record
        provenance = graph.get("provenance") or record["provenance"]
        return {**graph, "name": name, "provenance": provenance}

    def _trial_identity(self, trial: Trial, search_run_id: str) -> RunIdentity:
        number = f"{trial['number']:04d}"
        search_tags = self._tags()
        tags = {
            "methods": search_tags["methods"],
            "stream": search_tags["stream"],
            "accrete.search": search_identity(self.search),
            "trial": number,
            "phase": trial.get("phase", ""),
            "protocol": f"validation, {self.search['settings'].get('protocol', '')}",
            "mlflow.source.name": "python -m pipeline search",
        }
        return RunIdentity(
            kind="trial",
            key=f"{search_identity(self.search)}/{number}",
            parent=search_run_id,
            tags={name: value for name, value in tags.items() if value},
            params=trial["params"],
            note=trial_note(self.search, trial),
            data="validation",
            pictures=False,
        )

    def _record_trial(self, trial: Trial) -> None:
        self.trials[trial["number"]] = trial
        writer = self._writer(trial)
        client = writer.ready()
        for stage in writer.record["stages"]:
            if stage["step"] != "report":
                writer.stage(stage["id"])
        client.log_points(writer.parent, _trial_points(trial))
        tags = {
            **make_key_tags(writer.record, ""),
            "status": trial["status"],
            "message": trial.get("message", "")[:MAX_TAG],
            "mlflow.note.content": trial_note(self.search, trial),
        }
        client.tag(writer.parent, tags)
        if trial["status"] in RUN_STATUS:
            writer.finish({}, RUN_STATUS[trial["status"]])
        self._share_inputs(writer)
        self._log_curves(is_complete=False)

    def _share_inputs(self, writer: RunWriter) -> None:
        """Log the data sets that a trial has read also as inputs of the search's run."""
        _, run = self._ready()
        for stage in writer.record["stages"]:
            if stage["label"] and stage["id"] in writer.recorded:
                context = "validation" if stage["step"] == "evaluate" else "train"
                pairs = [(parent, context) for parent in stage["parents"]]
                new = [pair for pair in pairs if pair not in self.logged_inputs]
                writer.inputs(run, [parent for parent, _ in new], context)
                self.logged_inputs.update(new)

    def _log_curves(self, is_complete: bool) -> None:
        """Log curves over the number of a trial: its accuracy, and the best so far in its phase.

        The curves end before the first unfinished trial, so that a point never changes. If
        `is_complete`, no trial will continue, and the curves contain all finished trials.
        """
        client, run = self._ready()
        best: dict[str, float] = {}
        points = []
        for number in range(max(self.trials, default=-1) + 1):
            trial = self.trials.get(number)
            has_ended = trial is not None and trial["status"] in RUN_STATUS
            if not is_complete and not has_ended:
                break
            if trial is None or trial["status"] != "finished":
                continue
            accuracy = score(trial)
            if math.isnan(accuracy):
                continue
            phase = f"/{trial['phase']}" if trial.get("phase") else ""
            best[phase] = max(accuracy, best.get(phase, -math.inf))
            if number not in self.trials_in_curves:
                accuracy_name = key_name(f"accuracy{phase}")
                best_name = key_name(f"best_accuracy{phase}")
                points.append(Point(accuracy_name, accuracy, number, number))
                points.append(Point(best_name, best[phase], number, number))
        client.log_points(run, points)
        self.trials_in_curves |= {point.step for point in points}

    def _finish(self, files: Mapping[str, bytes], winner: Winner | None, status: str) -> None:
        self._log_curves(is_complete=True)
        client, run = self._ready()
        client.log_files(run, files)
        winner_run = self._tag_winner(winner)
        accuracy = math.nan
        if winner is not None:
            accuracy = as_number(winner.get("accuracy"))
            points = []
            for test in winner.get("tests") or []:
                test_accuracy = as_number(test.get("average_accuracy"))
                if not math.isnan(test_accuracy):
                    points.append(Point("winner_test_accuracy", test_accuracy, test["seed"], 0))
            client.log_points(run, points)
        tags = {
            "winner_run": winner_run,
            "winner_accuracy": "" if math.isnan(accuracy) else f"{accuracy:.6f}",
            "mlflow.note.content": format_search_note(self.search, winner, self.trials),
        }
        client.tag(run, tags)
        if run.info.status != status:
            client.close(run, status)

    def _tag_winner(self, winner: Winner | None) -> str:
        """Set the tag `winner` only on the winner's run. Return the id of this run, or ""."""
        client, _ = self._ready()
        number = f"{winner['trial']:04d}" if winner else ""
        winner_run = ""
        runs = client.find(
            {"accrete.search": search_identity(self.search), "accrete.kind": "trial"}
        )
        for run in runs:
            is_winner = run.data.tags.get("trial") == number
            client.tag(run, {"winner": "true" if is_winner else ""})
            if is_winner:
                winner_run = run.info.run_id
        return winner_run


def _trial_points(trial: Trial) -> list[Point]:
    """Return the points of a trial: accuracy and bytes after each task, and its final costs."""
    points = []
    for result in trial["results"]:
        tasks = result["position"] + 1
        values = {"accuracy": result.get("accuracy"), "bytes": result.get("bytes")}
        for name, value in values.items():
            if not math.isnan(as_number(value)):
                points.append(Point(name, as_number(value), tasks, tasks))
    if trial["status"] not in RUN_STATUS:
        return points
    costs: dict[str, Any] = {"device_s": trial.get("device_s"), "wall_s": trial.get("wall_s")}
    if trial.get("gpu_s"):
        costs["gpu_s"] = trial["gpu_s"]
    for kind, count in (trial.get("stages") or {}).items():
        costs[f"stages_{kind}"] = count
    for name, value in costs.items():
        if not math.isnan(as_number(value)):
            points.append(Point(name, as_number(value), 0, 0))
    return points


# ---- records and descriptions --------------------------------------------------------------------
def read_record(path: str) -> dict[str, Any] | None:
    """Return the JSON object in a file of the storage, or None if it is missing or damaged."""
    try:
        record = read_json(path)
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def list_report_files(folder: str) -> list[str]:
    """Return the sorted paths of the files directly in a folder; [] if it does not exist."""
    system, path = resolve(folder)
    entries = system.get_file_info(fs.FileSelector(path, allow_not_found=True))
    names = [entry.base_name for entry in entries if entry.type == fs.FileType.File]
    return sorted(join(folder, name) for name in names)


def format_search_note(
    search: Mapping[str, Any],
    winner: Winner | None = None,
    trials: Mapping[int, Trial] | None = None,
) -> str:
    """Return the description that MLflow shows for a search (Markdown)."""
    settings = search["settings"]
    keys = ", ".join(f"`{key}`" for key in search["space"])
    text = f"Search **{search['name']}** over {keys}, by {settings.get('algorithm', '')} search"
    if settings.get("scheduler", "none") != "none":
        text += f" with {settings['scheduler']}"
    bounds = (settings.get("budget") or {}).items()
    budget = ", ".join(f"{value} {name}" for name, value in bounds if value)
    if budget:
        text += f", at most {budget}"
    text += (
        ". Each child run is a trial: a complete run of the pipeline with settings of its own, "
        "whose accuracy is measured on validation images alone "
        f"(protocol `{settings.get('protocol', '')}`). "
        "The step of `best_accuracy` is the number of the trial."
    )
    if trials:
        statuses = [trial["status"] for trial in trials.values()]
        counts = {status: statuses.count(status) for status in (*RUN_STATUS, "running")}
        text += " " + ", ".join(f"{n} {status}" for status, n in counts.items() if n) + "."
    if winner:
        text += f" The winner is trial {winner['trial']}: {params_text(winner.get('params', {}))}."
    return text


def trial_note(search: Mapping[str, Any], trial: Trial) -> str:
    """Return the description that MLflow shows for a trial (Markdown)."""
    phase = ""
    if trial.get("phase"):
        phase = f", which searches settings for task **{trial['phase']}**"
    end = ""
    if trial["status"] == "stopped":
        end = " It was stopped early."
    elif trial["status"] == "failed":
        end = f" It failed: {trial.get('message', '')}"
    return (
        f"Trial {trial['number']} of search **{search['name']}**{phase}: "
        f"{params_text(trial['params'])}. `accuracy` is measured on validation images: "
        f"the average over the tasks so far. Its step is the number of tasks learned.{end}"
    )


def params_text(params: Mapping[str, Any]) -> str:
    """Format the parameters of a trial as one line (Markdown)."""
    values = [f"`{key}` = {value}" for key, value in params.items()]
    return ", ".join(values) or "the base config"
