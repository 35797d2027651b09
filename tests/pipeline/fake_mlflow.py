"""An in-memory MLflow server and client with the calls that the tracker makes.

Any call can fail before or after the server executes it, or because the server refuses it.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

# (number of the call from 1, its name) -> how the call fails: "" (it succeeds), "before" or "after"
# the server executes it, or "refuse".
Fault = Callable[[int, str], str]
URI = "http://mlflow.test"


class Page(list[Any]):
    """The only page of search results."""

    token = None


class Info:
    """The `info` of a run, as a client gets it."""

    start_time = 1000

    def __init__(self, key: str, name: str, status: str) -> None:
        self.run_id, self.run_name, self._status = key, name, status

    @property
    def status(self) -> str:
        """The status of the run, which cannot be assigned, as in MLflow."""
        return self._status


class Away(ConnectionError):
    """The error of a client that cannot reach the server."""


class Refused(Exception):
    """The error of a client if the server refuses its call."""


class FakeMlflow:
    """The client and the server in one object.

    The server executes a call that fails "after"; only the answer is lost.
    """

    def __init__(self, fault: Fault = lambda number, name: "") -> None:
        self.fault = fault
        self.count = itertools.count(1)
        self.runs: dict[str, Any] = {}
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        carry_out = object.__getattribute__(self, f"do_{name}")

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            fault = self.fault(next(self.count), name)
            if fault == "before":
                raise Away(f"{name}: connection refused")
            if fault == "refuse":
                raise Refused(f"{name}: bad request")
            answer = carry_out(*args, **kwargs)
            if fault == "after":
                raise Away(f"{name}: connection reset")
            return answer

        return call

    def open_store(self, *_: Any) -> tuple[FakeMlflow, str, str]:
        """Return the client, the tracking URI and the id of the experiment."""
        self.get_experiment()
        return self, URI, "1"

    # ---- server ----------------------------------------------------------------------------------
    def do_get_experiment(self) -> None:
        pass

    def do_create_run(self, experiment: str, tags: dict[str, str], run_name: str) -> Any:
        key = f"run{len(self.runs)}"
        self.runs[key] = SimpleNamespace(
            id=key,
            name=run_name,
            status="RUNNING",
            tags=dict(tags),
            params={},
            points={},
            inputs={},
            files={},
        )
        return self.view(key)

    def view(self, key: str) -> Any:
        """Return a copy of a run, as a client gets it."""
        run = self.runs[key]
        return SimpleNamespace(
            info=Info(key, run.name, run.status),
            data=SimpleNamespace(tags=dict(run.tags), params=dict(run.params)),
        )

    def do_search_runs(
        self, experiments: list[str], text: str, max_results: int, page_token: None
    ) -> Page:
        expected_tags = dict(re.findall(r"tags\.`([^`]+)` = '([^']*)'", text))
        assert expected_tags
        page = Page()
        for key, run in self.runs.items():
            if expected_tags.items() <= run.tags.items():
                page.append(self.view(key))
        return page

    def do_log_batch(self, key: str, metrics: Any = (), params: Any = (), tags: Any = ()) -> None:
        run = self.runs[key]
        for param in params:
            assert run.params.setdefault(param.key, param.value) == param.value, (
                "a parameter never changes"
            )
        for metric in metrics:
            # A dict as an ordered set: a repeated point keeps its position.
            points = run.points.setdefault(metric.key, {})
            points[metric.step, metric.timestamp, metric.value] = None
        run.tags.update({tag.key: tag.value for tag in tags})

    def do_log_inputs(self, key: str, datasets: Any) -> None:
        for entry in datasets:
            dataset = entry.dataset
            identity = (dataset.name, dataset.digest)
            self.runs[key].inputs.setdefault(identity, entry.tags[0].value)

    def do_set_tag(self, key: str, name: str, value: str) -> None:
        self.runs[key].tags[name] = value

    def do_delete_tag(self, key: str, name: str) -> None:
        del self.runs[key].tags[name]

    def do_update_run(self, key: str, status: str) -> None:
        self.runs[key].status = status

    def do_set_terminated(self, key: str, status: str) -> None:
        self.runs[key].status = status

    def do_log_artifacts(self, key: str, folder: str) -> None:
        for directory, _, names in os.walk(folder):
            for name in names:
                path = os.path.join(directory, name)
                with open(path, "rb") as stream:
                    self.runs[key].files[os.path.relpath(path, folder)] = stream.read()

    # ---- queries of tests ------------------------------------------------------------------------
    def run_named(self, name: str, **tags: str) -> Any:
        """Return the only run with this name and these tags."""
        runs = [
            run
            for run in self.runs.values()
            if run.name == name and tags.items() <= run.tags.items()
        ]
        assert len(runs) == 1, [run.name for run in runs]
        return runs[0]

    def contents(self) -> dict[tuple[str, ...], Any]:
        """Return the content of each run, keyed by its ancestors' names and its own.

        Tags with ids of runs are left out.

        Raises:
            AssertionError: if two runs have the same names.
        """
        contents = {}
        for run in self.runs.values():
            path = self._make_path(run)
            assert path not in contents, f"two runs are named {path}"
            tags = dict(run.tags)
            tags.pop("mlflow.parentRunId", None)
            tags.pop("winner_run", None)
            points = {name: list(points) for name, points in run.points.items()}
            contents[path] = (run.status, tags, run.params, points, run.inputs, run.files)
        return contents

    def _make_path(self, run: Any) -> tuple[str, ...]:
        """Return the names of a run's ancestors, from the root run down, and its own name."""
        names = [run.name]
        parent = self.runs.get(run.tags.get("mlflow.parentRunId", ""))
        while parent is not None:
            names.insert(0, parent.name)
            parent = self.runs.get(parent.tags.get("mlflow.parentRunId", ""))
        return tuple(names)
