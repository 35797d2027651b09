"""Tests of tracking while MLflow is unreachable or refuses calls: the run does not wait, and the
record is completed later, in order and without duplicates."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_run
import pytest
from fake_mlflow import Away, FakeMlflow, Refused
from mlflow.exceptions import MlflowException, get_error_code

from pipeline.config.invocation import this_command
from pipeline.config.settings import TrackingSettings
from pipeline.tracking import mlflow_client, outbox
from pipeline.tracking.recorder import Recorder
from pipeline.tracking.run_writer import RunIdentity
from tests import mlflow_server, small_run
from tests.mlflow_server import MlflowServer

IDS = [s.id for s in fake_run.stages() if s.step != "report"]
REPORT = {"report.html": b"a page", "summary.csv": b"a,b\n1,2\n"}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "FIRST_S", 0.001)
    monkeypatch.setattr(outbox, "LONGEST_S", 0.005)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def record_into(
    fake: Any,
    storage: Any,
    monkeypatch: pytest.MonkeyPatch,
    pictures: Any = False,
    settings: Any = None,
) -> Any:
    """Record a whole run into the fake. Return the recorder and the printed lines."""
    lines: list[str] = []
    monkeypatch.setattr(mlflow_client, "open_store", fake.open_store)
    recorder = Recorder(
        settings or TrackingSettings(),
        storage,
        lines.append,
        identity=RunIdentity(pictures=pictures),
    )
    recorder.start(fake_run.record(), "<svg>graph</svg>")
    recorder.finish(REPORT)
    return recorder, lines


# ---- the outbox ----------------------------------------------------------------------------------
class Server:
    """A server that answers calls while it is up."""

    def __init__(self) -> None:
        self.up = True
        self.received: list[Any] = []
        self.lines: list[str] = []
        self.tried = threading.Event()
        self.outbox = outbox.Outbox(
            "MLflow",
            lambda: self.up,
            lambda: None,
            lambda e: isinstance(e, ConnectionError),
            self.lines.append,
        )

    def tell(self, what: Any) -> None:
        def action() -> None:
            self.tried.set()
            if not self.up:
                raise Away("connection refused")
            if what == "nonsense":
                raise Refused("bad request")
            if what == "unlucky":
                raise Away("connection reset")
            self.received.append(what)

        self.outbox.put(action)


def test_missed_calls_are_sent_in_order_after_outage() -> None:
    server = Server()
    server.tell(1)
    server.up = False
    for number in range(2, 6):
        server.tell(number)  # returns immediately
    while not server.lines:
        time.sleep(0.001)
    server.up = True
    while len(server.received) < 5:
        time.sleep(0.001)
    assert server.outbox.close(0) == 0
    assert server.received == [1, 2, 3, 4, 5]
    assert ["does not answer" in line for line in server.lines] == [True, False]
    assert "answers again after" in server.lines[1]
    assert server.outbox.warnings == []


@pytest.mark.parametrize("status", [401, 403])
def test_refused_login_is_reported_once_with_the_environment_variables(status: int) -> None:
    lines: list[str] = []
    asked = outbox.Outbox(
        "MLflow",
        lambda: True,
        lambda: None,
        mlflow_client.transient,
        lines.append,
        mlflow_client.describe_login_refusal,
    )

    def refused() -> None:
        raise MlflowException("no", error_code=get_error_code(status))

    for _ in range(3):
        asked.put(refused)
    assert asked.close(0) == 0
    assert asked.warnings == lines
    result = "nothing is recorded" if status == 401 else "the record is not complete"
    assert f"(status {status}): {result}" in lines[0]
    for name in ("USERNAME", "PASSWORD", "TOKEN"):
        assert f"MLFLOW_TRACKING_{name}" in lines[0]
    assert mlflow_client.describe_login_refusal(ConnectionError("refused")) == ""


def test_each_of_two_outages_is_reported() -> None:
    server = Server()
    for times in (2, 4):
        server.up = False
        server.tell(times)
        while len(server.lines) < times - 1:
            time.sleep(0.001)
        server.up = True
        while len(server.lines) < times:
            time.sleep(0.001)
    assert server.outbox.close(60) == 0
    assert server.received == [2, 4]


def test_refused_calls_are_reported_and_later_calls_are_made() -> None:
    server = Server()
    for what in (1, "nonsense", 2, "unlucky", 3):
        server.tell(what)
    assert server.outbox.close(60) == 0
    assert server.received == [1, 2, 3]
    assert [w.split(";")[0] for w in server.outbox.warnings] == [
        "MLflow: Refused: bad request",
        "MLflow: Away: connection reset",
    ]
    assert server.lines == []


def test_closing_the_record_waits_no_longer_than_its_limit() -> None:
    server = Server()
    server.up = False
    server.tell(1)
    server.tell(2)
    server.tried.wait()
    assert server.outbox.close(0.01) == 2
    thread = server.outbox.thread
    assert thread is not None
    thread.join(10)
    assert not thread.is_alive()
    assert server.received == []


def test_closing_the_record_waits_for_a_slow_server_that_answers() -> None:
    server = Server()
    go = threading.Event()

    def answer_slowly() -> None:
        go.wait()
        server.received.append("slow")

    server.outbox.put(answer_slowly)
    threading.Timer(0.1, go.set).start()
    assert server.outbox.close(0) == 0
    assert server.received == ["slow"]


def test_pauses_grow_to_half_a_minute_and_closing_ends_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    server = Server()
    pauses: list[float] = []
    wait = outbox.Outbox._pause

    def note_pause(box: outbox.Outbox, seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) > 7:
            wait(box, seconds)

    monkeypatch.setattr(outbox.Outbox, "_pause", note_pause)
    server.up = False
    server.tell(1)
    while len(pauses) < 8:
        time.sleep(0.001)
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]
    server.up = True
    assert server.outbox.close(60) == 0  # does not wait for the pause of 30 s
    assert server.received == [1]


# ---- the record of a run -------------------------------------------------------------------------
@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("how", "stride"),
    [
        ("before", 17),
        ("after", 13),
        *(pytest.param(how, 1, marks=pytest.mark.slow) for how in ("before", "after")),
    ],
)
def test_outage_at_any_call_loses_and_duplicates_nothing(
    storage: Any, monkeypatch: pytest.MonkeyPatch, how: Any, stride: Any
) -> None:
    whole = FakeMlflow()
    record_into(whole, storage, monkeypatch)
    expected = whole.contents()
    calls = len(whole.calls)
    assert calls > 60
    for number in [
        *range(1, 12),
        *range(12, calls + 1, stride),
    ]:  # each of the first calls, which open runs, and then some calls
        # the next two calls fail as well
        fake = FakeMlflow(lambda n, name, at=number: how if at <= n < at + 3 else "")
        recorder, lines = record_into(fake, storage, monkeypatch)
        assert recorder.warnings == []
        assert len(lines) == 2, f"call {number}"
        assert fake.contents() == expected, f"call {number}"
        assert recorder.links() != []


def test_refused_call_loses_only_its_part_of_the_record(
    storage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, fake = FakeMlflow(), FakeMlflow()
    record_into(whole, storage, monkeypatch)
    # refuse the third data set
    fake.fault = lambda n, name: (
        "refuse" if name == "log_inputs" and fake.calls.count("log_inputs") == 3 else ""
    )
    recorder, lines = record_into(fake, storage, monkeypatch)
    assert lines == []
    assert recorder.warnings == [
        "MLflow: Refused: log_inputs: bad request; this part is not in the record, everything "
        "else is"
    ]
    expected = whole.contents()
    assert {data for data, _ in fake.run_named("tiny").inputs} == {"shapes", "birds"}
    assert {way: run for way, run in fake.contents().items() if way != ("tiny",)} == {
        way: run for way, run in expected.items() if way != ("tiny",)
    }


def test_refused_part_is_written_by_the_next_record(
    storage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = FakeMlflow()
    record_into(whole, storage, monkeypatch)
    fake = FakeMlflow(lambda n, name: "refuse" if 20 < n < 30 else "")
    recorder, _ = record_into(fake, storage, monkeypatch)
    assert recorder.warnings
    assert fake.contents() != whole.contents()
    fake.fault = lambda n, name: ""
    recorder, _ = record_into(fake, storage, monkeypatch)
    assert recorder.warnings == []
    for way, run in whole.contents().items():
        other = fake.contents()[way]
        assert {k: sorted(v) for k, v in other[3].items()} == {
            k: sorted(v) for k, v in run[3].items()
        }, way
        assert (*other[:3], *other[4:]) == (*run[:3], *run[4:]), way


def test_a_run_does_not_wait_for_a_server_that_hangs(
    storage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, fake = threading.Event(), FakeMlflow()
    fake.fault = lambda n, name: str(go.wait() or "")[4:]  # waits for `go`, then returns ""
    monkeypatch.setattr(mlflow_client, "open_store", fake.open_store)
    lines: list[str] = []
    recorder = Recorder(
        TrackingSettings(), storage, lines.append, identity=RunIdentity(pictures=False)
    )
    recorder.start(fake_run.record())
    for stage in fake_run.stages():
        recorder.stage(stage, {"stage": stage.id})
    assert fake.runs == {}  # the calls above did not wait for the server
    go.set()
    recorder.finish({})
    assert {r.status for r in fake.runs.values()} == {"FINISHED"}


@pytest.mark.slow
def test_only_listed_modules_import_mlflow() -> None:
    import ast

    def imports(path: Any) -> Any:
        tree = ast.parse(path.read_text())
        hidden = {
            id(n)
            for i in ast.walk(tree)
            if isinstance(i, ast.If) and "TYPE_CHECKING" in ast.dump(i.test)
            for n in ast.walk(i)
        }
        names = [
            (n.module or "") if isinstance(n, ast.ImportFrom) else n.names[0].name
            for n in ast.walk(tree)
            if isinstance(n, (ast.Import, ast.ImportFrom)) and id(n) not in hidden
        ]
        return any(name.split(".")[0] == "mlflow" for name in names)

    root = Path(mlflow_client.__file__).parents[2]
    importers = {
        p.relative_to(root).as_posix()
        for folder in ("pipeline", "workers", "benchmarks")
        for p in (root / folder).rglob("*.py")
        if imports(p)
    }
    assert importers == {
        "pipeline/tracking/mlflow_client.py",
        "pipeline/tracking/mlflow_internals.py",
        "pipeline/tracking/publish.py",
        "pipeline/serving/served_model.py",
        "pipeline/serving/model_source.py",
    }


def test_temporary_errors_are_told_apart_from_permanent_ones() -> None:
    import requests
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import (
        INVALID_PARAMETER_VALUE,
        RESOURCE_DOES_NOT_EXIST,
        TEMPORARILY_UNAVAILABLE,
    )
    from sqlalchemy.exc import OperationalError

    passing = [
        ConnectionRefusedError(),
        TimeoutError(),
        requests.ConnectionError("x"),
        MlflowException("API request failed with exception"),
        MlflowException("database is locked", TEMPORARILY_UNAVAILABLE),
        OperationalError("select 1", {}, Exception("gone")),
    ]
    staying = [
        MlflowException("x", INVALID_PARAMETER_VALUE),
        MlflowException("x", RESOURCE_DOES_NOT_EXIST),
        KeyError("x"),
        RuntimeError("x"),
    ]
    assert all(map(mlflow_client.transient, passing))
    assert not any(map(mlflow_client.transient, staying))


# ---- a real server -------------------------------------------------------------------------------
@pytest.fixture
def real(tmp_path: Path) -> Iterator[Any]:
    server = MlflowServer(tmp_path / "server")
    yield server
    server.kill()


@pytest.mark.slow
def test_record_is_complete_after_the_server_is_killed_and_restarted(
    real: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "FIRST_S", 0.2)
    monkeypatch.setattr(outbox, "LONGEST_S", 0.5)
    real.start()
    storage = str(tmp_path / "storage")
    lines: list[str] = []
    recorder = Recorder(
        TrackingSettings(uri=real.uri), storage, lines.append, identity=RunIdentity(pictures=False)
    )
    recorder.start(fake_run.record())
    for stage, manifest in fake_run.write(storage, set(IDS[:8])):
        recorder.stage(stage, manifest)
    while len(recorder.outbox.waiting) > 4:  # wait for the middle of the record
        time.sleep(0.01)
    real.kill()
    for stage, manifest in fake_run.write(storage, set(IDS[8:])):
        recorder.stage(stage, manifest)
    while not lines:
        time.sleep(0.01)
    real.start()
    recorder.finish(REPORT)
    assert recorder.warnings == []
    assert ["does not answer" in line for line in lines] == [True, False]
    contents = mlflow_server.contents(real.uri)
    assert len(contents) == 1 + 1 + 3 + 3 * 4
    assert {run.status for run in contents.values()} == {"FINISHED"}
    for label in fake_run.METHODS:
        metrics = contents[label, ""].metrics
        for position, task in enumerate(t["name"] for t in fake_run.TASKS):
            forgets = label == "finetune"  # others have one point per accuracy
            expected = list(range(position, 4 if forgets else position + 1))
            assert [step for step, _ in metrics[f"acc/{task}"]] == expected
        assert [step for step, _ in metrics["average_accuracy"]] == [0, 1, 2, 3]
        losses = contents[label, "leaves"].metrics["train/loss"]
        assert [step for step, _ in losses] == list(range(1, 7))
    assert contents["", ""].params["backbone.img_size"] == "32"


@pytest.mark.slow
def test_report_completes_a_record_that_the_run_could_not_send(real: Any, tmp_path: Path) -> None:
    card = small_run.make_cards(tmp_path, ["base", "a"])
    body = {
        **small_run.make_body(tmp_path, card, ["finetune"]),
        "tracking": {"uri": real.uri, "patience_s": 0.1},
    }
    config = small_run.write_config(tmp_path / "small.yaml", body)
    output = small_run.run(["run", config], tmp_path / "said.txt")
    assert output.count("MLflow does not answer") == 1
    assert (
        f"the record of run 'small' is incomplete; when MLflow is back, {this_command()} "
        f"report {config} writes it" in output
    )
    assert json.loads((tmp_path / "storage/runs/small/run.json").read_text())["name"] == "small"
    real.start()
    output = small_run.run(["report", config], tmp_path / "said.txt")
    assert "incomplete" not in output
    contents = mlflow_server.contents(real.uri)
    assert contents.keys() == {
        ("", ""),
        ("", "backbone"),
        ("finetune", ""),
        ("finetune", "base"),
        ("finetune", "a"),
    }
    assert {run.status for run in contents.values()} == {"FINISHED"}
    assert "report.html" in contents["", ""].files
