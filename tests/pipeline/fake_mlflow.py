"""MLflow in memory, with the calls that a record needs; it can go away before or in the middle of
any of them, and refuse what is asked."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

Fault = Callable[
    [int, str], str
]  # (number of the call, its name) -> "", "before", "after", or "refuse"
URI = "http://mlflow.test"


class Page(list[Any]):
    token = None


class Info:
    """Of a run, as a client gets it."""

    start_time = 1000

    def __init__(self, key: str, name: str, status: str) -> None:
        self.run_id, self.run_name, self._status = key, name, status

    @property
    def status(self) -> str:
        return self._status


class Away(ConnectionError):
    """What a client sees of a server that is not there."""


class Refused(Exception):
    """A call that is wrong in itself."""


class FakeMlflow:
    """The client and the server in one. A call that fails `after` was done all the same: only its
    answer was lost."""

    def __init__(self, fault: Fault = lambda number, name: "") -> None:
        self.fault = fault
        self.count = itertools.count(1)
        self.runs: dict[str, Any] = {}
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        do = object.__getattribute__(self, f"do_{name}")

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            fault = self.fault(next(self.count), name)
            if fault == "before":
                raise Away(f"{name}: connection refused")
            if fault == "refuse":
                raise Refused(f"{name}: bad request")
            answer = do(*args, **kwargs)
            if fault == "after":
                raise Away(f"{name}: connection reset")
            return answer

        return call

    def open_store(self, *_: Any) -> tuple[FakeMlflow, str, str]:
        self.get_experiment()
        return self, URI, "1"

    # ---- what the server does --------------------------------------------------------------------
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
        """A copy, as a client gets it."""
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
        return Page(
            self.view(k)
            for k, r in self.runs.items()
            if all(r.tags.get(n) == v for n, v in expected_tags.items())
        )

    def do_log_batch(self, key: str, metrics: Any = (), params: Any = (), tags: Any = ()) -> None:
        run = self.runs[key]
        for param in params:
            assert run.params.setdefault(param.key, param.value) == param.value, (
                "a parameter never changes"
            )
        for m in metrics:
            # in the order in which they first came
            run.points.setdefault(m.key, {})[m.step, m.timestamp, m.value] = None
        run.tags.update({t.key: t.value for t in tags})

    def do_log_inputs(self, key: str, datasets: Any) -> None:
        for d in datasets:
            self.runs[key].inputs.setdefault((d.dataset.name, d.dataset.digest), d.tags[0].value)

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

    # ---- what tests look at ----------------------------------------------------------------------
    def run_named(self, name: str, **tags: str) -> Any:
        """The one run with this name and these tags."""
        runs = [
            r
            for r in self.runs.values()
            if r.name == name and all(r.tags.get(k) == v for k, v in tags.items())
        ]
        assert len(runs) == 1, [r.name for r in runs]
        return runs[0]

    def contents(self) -> dict[tuple[str, ...], Any]:
        """Everything that was written, by the names on the way down to a run; AssertionError where
        two runs have the same."""
        body = {}
        for run in self.runs.values():
            way, above = [run.name], run
            while (parent := above.tags.get("mlflow.parentRunId", "")) in self.runs:
                above = self.runs[parent]
                way.insert(0, above.name)
            assert tuple(way) not in body, f"{way} is there twice"
            tags = {
                k: v for k, v in run.tags.items() if k not in ("mlflow.parentRunId", "winner_run")
            }
            body[tuple(way)] = (
                run.status,
                tags,
                run.params,
                {k: list(v) for k, v in run.points.items()},
                run.inputs,
                run.files,
            )
        return body
