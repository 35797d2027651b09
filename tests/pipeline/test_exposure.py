"""Servers listen for this machine alone unless a person says otherwise, and then say what that means; the password of one that is used is never said."""

from __future__ import annotations

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from pipeline import browse, cli, predict, track_mlflow
from pipeline.config import TrackingSettings
from pipeline.track_outbox import Outbox


@pytest.mark.parametrize(("host", "alone"), [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False),
                                             ("192.168.0.4", False), ("example.org", False), ("localhost.example.org", False), ("", False)])
def test_one_line_is_said_where_other_machines_can_reach_a_server(host, alone, capfd):
    browse.warn_if_exposed(host, 5000, "read and delete every run: MLflow asks for no password")
    out, err = capfd.readouterr()
    assert out == ""
    assert len(err.splitlines()) == (0 if alone else 1)
    for words in () if alone else (f"anyone who reaches {host}:5000 can read and delete every run", "no password", "ssh -L 5000:127.0.0.1:5000"):
        assert words in err


@pytest.mark.parametrize("command", [["ui"], ["serve", "model"]])
def test_without_a_host_a_server_is_for_this_machine(command):
    assert cli.parser().parse_args(command).host == "127.0.0.1"
    assert cli.parser().parse_args([*command, "--host", "10.0.0.1", "--port", "5000"]).host == "10.0.0.1"


class Ended(Exception):
    pass


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_mlflow_is_started_where_it_was_asked_for_after_the_warning(host, tmp_path, capfd, monkeypatch):
    from pipeline import track_mlflow

    started: list[list[str]] = []

    def popen(command: list[str], **_: Any) -> Any:
        started.append(command)
        raise Ended

    monkeypatch.setattr(track_mlflow, "open_store", lambda *_: (None, "sqlite:///x", "0"))
    monkeypatch.setattr(browse.subprocess, "Popen", popen)
    monkeypatch.setattr(browse.signal, "signal", lambda *_: None)
    with pytest.raises(Ended):
        cli.main(["ui", "--storage", str(tmp_path), "--host", host])
    assert started[0][started[0].index("--host") + 1] == host
    assert ("anyone who reaches" in capfd.readouterr().err) == (host != "127.0.0.1")


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_model_is_served_where_it_was_asked_for_after_the_warning(host, capfd, monkeypatch):
    asked: list[str] = []

    def running(folder: str, port: int, host: str, *_: Any) -> Any:
        asked.append(host)
        raise Ended

    class Found:
        def write(self, place: str) -> None:
            pass

    monkeypatch.setattr(predict, "chosen", lambda args: Found())
    monkeypatch.setattr(predict, "running", running)
    with pytest.raises(Ended):
        cli.main(["serve", "model", "--host", host])
    assert asked == [host]
    assert ("anyone who reaches" in capfd.readouterr().err) == (host != "127.0.0.1")


# ---- a tracking server that asks for a password ---------------------------------------------------------------------------
RUN = {"info": {"run_id": "r1", "run_uuid": "r1", "run_name": "mine", "experiment_id": "1", "status": "RUNNING", "start_time": 1, "lifecycle_stage": "active",
                "artifact_uri": "mlflow-artifacts:/1/r1"}, "data": {}}
ANSWERS = {"experiments/get-by-name": {"experiment": {"experiment_id": "1", "name": "accrete", "lifecycle_stage": "active"}}, "runs/get": {"run": RUN},
           "runs/search": {"runs": [RUN]}, "runs/update": {"run_info": RUN["info"]}}


@pytest.fixture
def tracking_server(monkeypatch):
    """Its port, and the headers by which it was asked. The environment names it with its password."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            asked.append(self.headers.get("Authorization", ""))
            body = json.dumps(next((answer for path, answer in ANSWERS.items() if path in self.path), {})).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:hush@127.0.0.1:{server.server_port}")
        yield server.server_port, asked
        server.shutdown()
        thread.join()


def test_what_is_printed_of_a_tracking_server_has_no_password(tracking_server, tmp_path, capfd):
    port, asked = tracking_server
    calls = track_mlflow.Calls(str(tmp_path), TrackingSettings())
    calls.close(calls.find({})[0], "FINISHED")
    assert cli.main(["ui", "--storage", str(tmp_path)]) == 0
    said = "".join(capfd.readouterr())
    assert {*asked} == {f"Basic {base64.b64encode(b'me:hush').decode()}"}, "it is used"
    assert "hush" not in said, "and not shown"
    assert said.startswith(f"MLflow: http://127.0.0.1:{port}/#/experiments/1/runs"), "MLflow prints no links of its own"


def test_what_is_said_of_a_tracking_server_that_is_away_has_no_password(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:hush@127.0.0.1:1")
    assert cli.main(["ui", "--storage", str(tmp_path)]) == 2
    said = "".join(capfd.readouterr())
    assert said.startswith("accrete: MLflow at http://127.0.0.1:1 does not show its runs (API request to http://127.0.0.1:1/api/")
    assert said.count("\n") == 1
    assert "hush" not in said
    lines: list[str] = []
    told = threading.Event()
    away = Outbox("MLflow", lambda: False, lambda: None, track_mlflow.transient, lambda line: (lines.append(line), told.set()))
    away.put(lambda: track_mlflow.Calls(str(tmp_path), TrackingSettings()) and None)
    told.wait()
    away.close(0)
    assert "API request to http://127.0.0.1:1/api/" in lines[0]

    def refused() -> None:
        raise ValueError("https://me:hush@host:5000/api says no")

    angry = Outbox("MLflow", lambda: True, lambda: None, lambda error: False, lines.append)
    angry.put(refused)
    angry.close(60)
    assert "https://host:5000/api says no" in angry.warnings[0]
    assert "hush" not in "".join([*lines, *angry.warnings])
