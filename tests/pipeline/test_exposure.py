"""Servers listen for this machine alone unless a person says otherwise, and then say what that means."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline import browse, cli, predict


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

    def running(folder: str, port: int, host: str) -> Any:
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
