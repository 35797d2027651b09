"""Tests of server exposure: bind addresses, warnings, and passwords that are never printed."""

from __future__ import annotations

import base64
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline import cli
from pipeline.cli import serving as commands
from pipeline.config.settings import TrackingSettings
from pipeline.serving import serve_command
from pipeline.tracking import mlflow_client, ui
from pipeline.tracking.outbox import Outbox


@pytest.mark.parametrize(
    ("host", "alone"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.0.4", False),
        ("example.org", False),
        ("localhost.example.org", False),
        ("", False),
    ],
)
def test_server_warns_if_other_machines_can_reach_it(
    host: str, alone: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    ui.warn_if_exposed(host, 5000, "read and delete every run: MLflow asks for no password")
    out, err = capfd.readouterr()
    assert out == ""
    assert len(err.splitlines()) == (0 if alone else 1)
    for words in (
        ()
        if alone
        else (
            f"anyone who reaches {host}:5000 can read and delete every run",
            "no password",
            "ssh -L 5000:127.0.0.1:5000",
        )
    ):
        assert words in err


@pytest.mark.parametrize("command", [["ui"], ["serve", "model"]])
def test_servers_bind_to_localhost_by_default(command: Any) -> None:
    assert cli.parser().parse_args(command).host == "127.0.0.1"
    assert (
        cli.parser().parse_args([*command, "--host", "10.0.0.1", "--port", "5000"]).host
        == "10.0.0.1"
    )


class Ended(Exception):
    pass


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_mlflow_ui_starts_on_requested_host_and_warns_if_exposed(
    host: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipeline.tracking import mlflow_client

    started: list[list[str]] = []

    def popen(command: list[str], env: dict[str, str], **_: Any) -> Any:
        started.append(command)
        assert env["MLFLOW_BACKEND_STORE_URI"] == "postgresql://me:hush@host/db"
        raise Ended

    monkeypatch.setattr(
        mlflow_client, "open_store", lambda *_: (None, "postgresql://me:hush@host/db", "0")
    )
    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(Ended):
        cli.main(["ui", "--storage", str(tmp_path), "--host", host])
    assert started[0][started[0].index("--host") + 1] == host
    assert "hush" not in " ".join(started[0]), (
        "all users of this machine can see the arguments of a process"
    )
    assert ("anyone who reaches" in capfd.readouterr().err) == (host != "127.0.0.1")


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_model_server_starts_on_requested_host_and_warns_if_exposed(
    host: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def running(source: Any, settings: serve_command.ServerSettings) -> Any:
        asked.append(settings.host)
        raise Ended

    monkeypatch.setattr(commands, "open_model_source", lambda args: None)
    monkeypatch.setattr(serve_command, "running", running)
    with pytest.raises(Ended):
        cli.main(["serve", "model", "--host", host])
    assert asked == [host]
    assert ("anyone who reaches" in capfd.readouterr().err) == (host != "127.0.0.1")


# ---- a tracking server that asks for a password --------------------------------------------------
RUN = {
    "info": {
        "run_id": "r1",
        "run_uuid": "r1",
        "run_name": "mine",
        "experiment_id": "1",
        "status": "RUNNING",
        "start_time": 1,
        "lifecycle_stage": "active",
        "artifact_uri": "mlflow-artifacts:/1/r1",
    },
    "data": {},
}
ANSWERS = {
    "experiments/get-by-name": {
        "experiment": {"experiment_id": "1", "name": "accrete", "lifecycle_stage": "active"}
    },
    "runs/get": {"run": RUN},
    "runs/search": {"runs": [RUN]},
    "runs/update": {"run_info": RUN["info"]},
}


@pytest.fixture
def tracking_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Run a tracking server, and yield its port and the Authorization headers that it receives.

    MLFLOW_TRACKING_URI contains its address and a password.
    """
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            asked.append(self.headers.get("Authorization", ""))
            body = json.dumps(
                next((answer for path, answer in ANSWERS.items() if path in self.path), {})
            ).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )
        thread.start()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:hush@127.0.0.1:{server.server_port}")
        yield server.server_port, asked
        server.shutdown()
        thread.join()


def test_password_of_tracking_server_is_not_printed(
    tracking_server: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    port, asked = tracking_server
    calls = mlflow_client.MlflowClientAdapter(str(tmp_path), TrackingSettings())
    calls.close(calls.find({})[0], "FINISHED")
    assert cli.main(["ui", "--storage", str(tmp_path)]) == 0
    output = "".join(capfd.readouterr())
    assert {*asked} == {f"Basic {base64.b64encode(b'me:hush').decode()}"}, "the password is sent"
    assert "hush" not in output, "the password is not printed"
    assert output.startswith(f"MLflow: http://127.0.0.1:{port}/#/experiments/1/runs"), (
        "MLflow prints no links of its own"
    )


def test_password_of_unreachable_tracking_server_is_not_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:hush@127.0.0.1:1")
    assert cli.main(["ui", "--storage", str(tmp_path)]) == 2
    output = "".join(capfd.readouterr())
    assert output.startswith(
        "accrete: MLflow at http://127.0.0.1:1 does not show its runs (API request to "
        "http://127.0.0.1:1/api/"
    )
    assert output.count("\n") == 1
    assert "hush" not in output
    lines: list[str] = []
    has_logged = threading.Event()

    def log(line: str) -> None:
        lines.append(line)
        has_logged.set()

    def connect() -> None:
        mlflow_client.MlflowClientAdapter(str(tmp_path), TrackingSettings())

    away = Outbox("MLflow", lambda: False, lambda: None, mlflow_client.transient, log)
    away.put(connect)
    has_logged.wait()
    away.close(0)
    assert "API request to http://127.0.0.1:1/api/" in lines[0]

    def refused() -> None:
        raise ValueError("https://me:hush@host:5000/api says no")

    angry = Outbox("MLflow", lambda: True, lambda: None, lambda error: False, lines.append)
    angry.put(refused)
    angry.close(60)
    assert "https://host:5000/api says no" in angry.warnings[0]
    assert "hush" not in "".join([*lines, *angry.warnings])


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        (
            "postgresql+psycopg2://me:hu/sh#w@host/db",
            "accrete: the database of postgresql+psycopg2://host/db needs the Python package "
            "'psycopg2', which is not installed; "
            "install it beside MLflow (pip install psycopg2-binary)",
        ),
        (
            "postgresql://me:hush@host/db",
            "accrete: the database of postgresql://host/db needs the Python package 'psycopg",
        ),
        (
            "mysql+pymysql://me:hush@host/db",
            "accrete: the database of mysql+pymysql://host/db needs the Python package 'pymysql'",
        ),
        (
            "http://me:hu/sh@host:5000",
            "accrete: the tracking URI (tracking.uri or MLFLOW_TRACKING_URI) has a password "
            "with `/`, `?` or `#` in it",
        ),
        (
            "https://me:hu#sh@host",
            "accrete: the tracking URI (tracking.uri or MLFLOW_TRACKING_URI) has a password with",
        ),
    ],
)
def test_missing_driver_or_broken_password_is_reported_in_one_sentence(
    uri: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for module in ("psycopg", "psycopg2", "pymysql"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert cli.main(["ui", "--storage", str(tmp_path)]) == 2
    output = "".join(capfd.readouterr())
    assert output.startswith(message)
    assert output.count("\n") == 1
    assert not {"hush", "hu/sh", "hu#sh"} & {
        word for word in ("hush", "hu/sh", "hu#sh") if word in output
    }


STARTING = """
import socket, sys, time
time.sleep({wait})
if {port}:
    listener = socket.create_server(("127.0.0.1", {port}))
    time.sleep(60)
print("a first line\\nno way: postgresql://me:hush@host/db", file=sys.stderr)
sys.exit(3)
"""


def starting(wait: float, port: int = 0) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", STARTING.format(wait=wait, port=port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_slow_server_is_awaited_with_progress_messages(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ui, "NOTICE_S", 0.2)
    port = ui.find_port("127.0.0.1")
    server = starting(1.0, port)
    try:
        assert ui.wait_until_up(server, "127.0.0.1", port)
    finally:
        server.kill()
        server.communicate()
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) >= 2
    assert all(line.startswith("accrete: still waiting for mlflow server (") for line in lines)


def test_failed_server_is_reported_without_another_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from pipeline.tracking import mlflow_client

    popen = subprocess.Popen
    command = [sys.executable, "-c", STARTING.format(wait=0, port=0)]
    monkeypatch.setattr(mlflow_client, "open_store", lambda *_: (None, "sqlite:///x", "0"))
    monkeypatch.setattr(subprocess, "Popen", lambda _, **options: popen(command, **options))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert cli.main(["ui", "--storage", str(tmp_path)]) == 2
    output = capfd.readouterr().err
    assert "mlflow server ended with exit code 3 before it answered on 127.0.0.1:" in output
    assert "(no way: postgresql://host/db)" in output
    assert "--port" not in output
    assert output.count("\n") == 1
    server: Any = SimpleNamespace(returncode=1)
    log = ["[Errno 98] Address already in use"]
    assert "another program uses the port" in ui.explain_server_exit(server, log, "h", 1)


PRIVATE = """
import ipaddress, time
import psutil
from pipeline.launch.cluster import connect
from pipeline.config.settings import ClusterSettings
ray = connect(ClusterSettings(workers=1, address="local"))
ray.get(ray.remote(lambda: 1).remote())
time.sleep(3)
driver = psutil.Process()
listeners = []
for process in [driver, *driver.children(recursive=True)]:
    for connection in process.net_connections("inet"):
        if connection.status == "LISTEN":
            address = ipaddress.ip_address(connection.laddr.ip.removeprefix("::ffff:"))
            listeners.append((process.name(), address))
ray.shutdown()
print(len(listeners), [name for name, address in listeners if not address.is_loopback])
"""


@pytest.mark.slow
def test_private_ray_listens_only_on_loopback_addresses() -> None:
    pytest.importorskip("psutil")
    process = subprocess.run(
        [sys.executable, "-c", PRIVATE], capture_output=True, text=True, timeout=900, check=True
    ).stdout.splitlines()[-1]
    count, open_to_all = process.split(" ", 1)
    assert int(count) > 5, "the listening sockets were found"
    assert open_to_all == "[]"


@pytest.mark.slow
def test_database_uri_is_absent_from_server_process_arguments(tmp_path: Path) -> None:
    psutil = pytest.importorskip("psutil")
    (tmp_path / "hush").mkdir()
    (tmp_path / "storage").mkdir()
    port = ui.find_port("127.0.0.1")
    server = subprocess.Popen(
        ui.build_server_command(str(tmp_path / "storage"), "127.0.0.1", port),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
        env=ui.build_server_environment(f"sqlite:///{tmp_path}/hush/mlflow.db"),
    )
    try:
        assert ui.wait_until_up(server, "127.0.0.1", port)
        processes = [
            psutil.Process(server.pid),
            *psutil.Process(server.pid).children(recursive=True),
        ]
        assert len(processes) >= 2, "the server and its worker"
        assert "hush" not in " ".join(part for process in processes for part in process.cmdline())
        assert (tmp_path / "hush" / "mlflow.db").exists(), "the server uses this database"
    finally:
        for process in psutil.Process(server.pid).children(recursive=True):
            process.kill()
        server.kill()
        server.wait()


@pytest.mark.parametrize("options", [["--method", "m"], ["--set", "seed=1"]])
def test_options_of_a_run_are_refused_with_a_registered_model(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", "models:/digits@champion", *options]) == 2
    assert "leave out --method and --set" in capsys.readouterr().err
