"""A local `mlflow server` that tests can kill and restart, and a reader of a tracking store."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.tracking import mlflow_client, ui


class RecordedRun(NamedTuple):
    """A run in MLflow.

    metrics: name -> (step, value) of each point. files: paths of artifacts. models: paths of the
    files of each complete model logged to the run.
    """

    status: str
    metrics: dict[str, list[tuple[int, float]]]
    params: dict[str, str]
    tags: dict[str, str]
    inputs: list[str]
    files: list[str]
    models: list[list[str]]


class MlflowServer:
    """A process of `mlflow server` on a free port.

    database: URI; the default is SQLite in `folder`, which is created. artifacts: URI of the folder
    into which the server writes artifacts; by default, clients write them below `folder`.
    """

    def __init__(self, folder: Path, database: str = "", artifacts: str = "") -> None:
        folder.mkdir()
        self.folder = folder
        self.database = database or f"sqlite:///{folder}/mlflow.db"
        self.artifacts = artifacts
        self.port = ui.find_port("127.0.0.1")
        self.uri = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start the process, and wait until its port answers."""
        command = ui.build_server_command(str(self.folder), "127.0.0.1", self.port)
        if self.artifacts:
            at = command.index("--default-artifact-root")
            command[at : at + 2] = ["--artifacts-destination", self.artifacts]
        self.process = subprocess.Popen(
            command,
            env=ui.build_server_environment(self.database),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        assert ui.wait_until_up(self.process, "127.0.0.1", self.port)

    def kill(self) -> None:
        """Send SIGKILL to the server and its child process."""
        if self.process:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


def contents(uri: str, experiment: str = "accrete") -> dict[tuple[str, str], RecordedRun]:
    """Return (label, task) -> run of an experiment.

    Raises:
        AssertionError: if two runs have the same label and task.
    """
    client, _, experiment_id = mlflow_client.open_store("", uri, experiment)
    runs = client.search_runs([experiment_id], max_results=1000)
    models = client.search_logged_models([experiment_id])
    recorded_runs: dict[tuple[str, str], RecordedRun] = {}
    for run in runs:
        run_id = run.info.run_id
        histories = {}
        for metric in run.data.metrics:
            points = client.get_metric_history(run_id, metric)
            histories[metric] = [(point.step, point.value) for point in points]
        datasets = []
        if run.inputs is not None:
            datasets = sorted(data.dataset.name for data in run.inputs.dataset_inputs)
        model_files = []
        for model in models:
            if model.source_run_id == run_id and model.status == "READY":
                files = client.list_logged_model_artifacts(model.model_id)
                model_files.append(sorted(file.path for file in files))
        name = (run.data.tags.get("label", ""), run.data.tags.get("task", ""))
        assert name not in recorded_runs, "two runs have the same label and task"
        recorded_runs[name] = RecordedRun(
            run.info.status,
            histories,
            run.data.params,
            run.data.tags,
            datasets,
            paths_below(client, run_id),
            model_files,
        )
    return recorded_runs


def paths_below(client: Any, run_id: str, folder: str = "") -> list[str]:
    """Return the paths of all artifacts of a run below a folder, in order."""
    paths = []
    for entry in client.list_artifacts(run_id, folder):
        if entry.is_dir:
            paths += paths_below(client, run_id, entry.path)
        else:
            paths.append(entry.path)
    return sorted(paths)
