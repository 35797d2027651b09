"""Tests of hostile run folders: irregular files, and text that imitates lines of our output.

Such a run does not affect the output about other runs.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline import cli
from pipeline.graph import failures
from pipeline.graph.store import Store

BREAK = "text\nrun ok: finished"
SURROGATE = "\ud800"


def stage(id: str, step: str, key: str, parents: list[str], label: str | None = None) -> Any:
    entry = {"id": id, "step": step, "key": key, "parents": parents}
    return {**entry, "label": label, "task": "a", "method": label, "inputs": {}}


def record(name: str) -> Any:
    """Return the record of a run with three stages."""
    stages = [
        stage("data/a", "ingest", "k1", []),
        stage("m/a/train", "train", "k2", ["data/a"], "m"),
        stage("m/a/evaluate", "evaluate", "k3", ["m/a/train"], "m"),
    ]
    body = {"name": name, "key_version": 1, "config": {}, "tasks": [], "stages": stages}
    return {**body, "created": "2026-01-02T03:04:05+0000"}


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    """Return a storage with the runs `r` and `whole`, which have no results."""
    for name in ("r", "whole"):
        write(tmp_path, record(name), name)
    (tmp_path / "stages").mkdir()
    return tmp_path


def write(storage: Path, body: Any, folder: str = "r") -> None:
    """Write the record of a run."""
    (storage / "runs" / folder).mkdir(parents=True, exist_ok=True)
    (storage / "runs" / folder / "run.json").write_text(json.dumps(body))


def printed(capsys: pytest.CaptureFixture[str], storage: Path, *words: str, code: int = 0) -> str:
    """Run a command, and return its output."""
    capsys.readouterr()
    assert cli.main([*words, "--storage", str(storage)]) == code
    output = capsys.readouterr()
    return output.out + output.err


def states(capsys: pytest.CaptureFixture[str], storage: Path) -> dict[str, str]:
    """Return the state of each listed run."""
    lines = printed(capsys, storage, "runs").splitlines()[1:]
    return {line.split()[0]: line.split()[1] for line in lines}


def make_folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def make_fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


@pytest.mark.parametrize("make", [make_folder, make_fifo])
def test_irregular_run_record_is_listed_as_damaged(
    make: Callable[[Path], None], storage: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(storage / "runs" / "r" / "run.json")
    assert states(capsys, storage) == {"r": "damaged", "whole": "unfinished"}
    for words in (["status", "r"], ["logs", "r"]):
        assert len(printed(capsys, storage, *words, code=2).splitlines()) == 1


@pytest.mark.parametrize("make", [make_folder, make_fifo])
def test_irregular_status_file_is_ignored(
    make: Callable[[Path], None], storage: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(storage / "runs" / "r" / "status.json")
    assert states(capsys, storage) == {"r": "unfinished", "whole": "unfinished"}
    assert "run r: unfinished" in printed(capsys, storage, "status", "r")


def test_folder_with_invalid_run_name_is_not_listed(
    storage: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(storage, record(BREAK), BREAK)
    assert set(states(capsys, storage)) == {"r", "whole"}


def test_run_with_malformed_settings_is_still_listed(
    storage: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(storage, {**record("r"), "config": {"stream": [1]}})
    assert states(capsys, storage) == {"r": "unfinished", "whole": "unfinished"}


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.update(stages=[]),
        lambda body: [entry.update(parents=["nowhere"]) for entry in body["stages"]],
        lambda body: body["stages"][1].update(id=SURROGATE),
        lambda body: body["stages"][1].update(label=SURROGATE),
        lambda body: body["stages"][1].update(label="\x1b[2J"),
    ],
    ids=["no stage", "unknown parents", "an id", "a label", "an escape sequence"],
)
def test_graph_is_drawn_for_malformed_stages(
    change: Callable[[Any], None], storage: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = record("r")
    change(body)
    write(storage, body)
    picture = storage / "graph.svg"
    printed(capsys, storage, "status", "r", "--svg", str(picture))
    assert picture.read_text().isprintable()


def test_repeated_parents_and_replicas_are_read_once(
    storage: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    body = record("r")
    body["stages"][1]["parents"] = ["data/a"] * 100
    body["replicas"] = {f"seed-{number}": "r" for number in range(100)}
    write(storage, body)
    picture = storage / "graph.svg"
    printed(capsys, storage, "status", "r", "--svg", str(picture))
    assert picture.read_text().count("<path") == 2
    assert len(Store(str(storage)).records(body)) == 1


def test_line_breaks_in_untrusted_text_cannot_forge_output_lines(
    storage: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = {**record("r"), "created": "20\n26"}
    body["stages"][1]["label"] = BREAK
    body["stages"][2]["id"] = BREAK
    write(storage, body)
    now = time.time()
    status: dict[str, Any] = {"name": "r", "host": BREAK, "pid": 1, "started": now, "updated": now}
    status |= {"command": BREAK, "left_s": None, "left_without": 0, "state": "running"}
    status["stages"] = {"m/a/train": {"state": "running", "where": BREAK}}
    event = {"time": "2026\n", "event": "note", "stage": BREAK, "message": BREAK}
    (storage / "runs" / "r" / "events.jsonl").write_text(json.dumps(event))
    for state in ("running", "failed", "interrupted", BREAK):
        text = json.dumps({**status, "state": state, "message": BREAK})
        (storage / "runs" / "r" / "status.json").write_text(text)
        for words in (["runs"], ["status", "r"], ["logs", "r"]):
            assert "\nrun ok" not in printed(capsys, storage, *words)


def test_error_description_has_no_terminal_escape_sequences() -> None:
    text = failures.describe_exception(
        ValueError("file \x1b[31m\x1b]0;title\x07 \x1b[2Jx\nsecond line")
    )
    assert text.isprintable()
    assert text.endswith("[2Jx second line")
