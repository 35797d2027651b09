"""Tests of the commands that read runs, on damaged or hostile records of runs.

A command gives a one-sentence error or skips the record. It prints no terminal control characters,
and its output has a limited length.
"""

from __future__ import annotations

import copy
import io
import itertools
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline import cli
from pipeline.graph.stage import Graph, Stage
from pipeline.graph.walk import Event, EventKind
from pipeline.shell.console import Console
from tests import small_run
from workers.storage.secrets import REPLACEMENT

ESCAPE = "\x1b]0;title\x07 \x1b[2Jtext"
NESTED: Any = [[]]
for _ in range(200):
    NESTED = [NESTED]
HOSTILE: list[Any] = [
    float("inf"),
    float("nan"),
    10**400,
    -1,
    True,
    None,
    "",
    ESCAPE,
    "x" * 100_000,
    [1, 2],
    ["no", "such"],
    {"a": 1},
    {},
    NESTED,
]
MAX_PRINTED = 100_000  # characters
PARTS = 4  # of the pairs of path and value; each part has all paths and all values
DELETED = object()


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The storage of the finished run `small`."""
    folder = tmp_path_factory.mktemp("records")
    body = small_run.make_body(folder, small_run.make_cards(folder, "ab"), ["linear"])
    config = small_run.write_config(folder / "config.yaml", body)
    small_run.run(["run", config], folder / "out.txt")
    return folder / "storage"


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    """The folder of the run, in a copy of the storage."""
    shutil.copytree(original, tmp_path / "storage")
    return tmp_path / "storage" / "runs" / "small"


def check_commands(run: Path, capsys: pytest.CaptureFixture[str], case: object) -> None:
    """Check the output of every command that reads a run."""
    storage = str(run.parents[1])
    for words in (
        ["runs"],
        ["status", "small"],
        ["status", "small", "--svg", str(run / "graph.svg")],
        ["logs", "small"],
        ["logs", "small", "linear/a/train"],
    ):
        capsys.readouterr()
        try:
            code = cli.main([*words, "--storage", storage])
        except Exception as error:
            raise AssertionError(f"{words} of {str(case)[:200]}") from error
        output = capsys.readouterr()
        text = output.out + output.err
        assert code in (0, 2), (words, case)
        assert len(text) < MAX_PRINTED, (words, case)
        assert all(c.isprintable() or c == "\n" for c in text), (words, case)
        if code == 2:
            assert len(output.err.splitlines()) == 1, (words, case)


def changed(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return a copy of `body` with the value at `path` replaced or, for `DELETED`, removed."""
    whole = copy.deepcopy(body)
    node = whole
    for key in path[:-1]:
        node = node[key]
    if value is DELETED:
        node.pop(path[-1], None)
    else:
        node[path[-1]] = value
    return whole


def mutations(
    body: Any, paths: list[tuple[Any, ...]], part: int
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield ((path, hostile value), changed body) for one part of all pairs."""
    pairs = itertools.product(paths, [*HOSTILE, DELETED])
    for path, value in itertools.islice(pairs, part, None, PARTS):
        yield (path, value), changed(body, path, value)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("state", ["running", "failed"])
def test_commands_handle_hostile_status_values(
    run: Path, capsys: pytest.CaptureFixture[str], state: str, part: int
) -> None:
    status = json.loads((run / "status.json").read_text())
    stage = "linear/a/train"
    status |= {"state": state, "host": "elsewhere", "updated": time.time()}
    status["stages"][stage] |= {"state": "running", "since": 1.0, "where": "w"}
    status["stages"][stage]["progress"] = {
        "epoch": 1,
        "epochs": 2,
        "loss": 0.5,
        "images_per_s": 10.0,
        "left_s": 5.0,
    }
    of_run = [(key,) for key in (*status, "message", "machines", "groups")]
    of_stage = [("stages", stage, key) for key in ("state", "since", "tries", "where", "wall_s")]
    progress = status["stages"][stage]["progress"]
    of_progress = [("stages", stage, "progress", key) for key in progress]
    doing = [("stages", stage, "progress", key) for key in ("doing", "task", "waiting_for")]
    for case, body in mutations(status, [*of_run, *of_stage, *of_progress, *doing], part):
        (run / "status.json").write_text(json.dumps(body))
        check_one(run, capsys, case)
    (run / "status.json").write_text("[" * 100_000)
    check_commands(run, capsys, "deep")


def check_one(run: Path, capsys: pytest.CaptureFixture[str], case: object) -> None:
    """Check only the commands that read the status."""
    for words in (["runs"], ["status", "small"]):
        capsys.readouterr()
        code = cli.main([*words, "--storage", str(run.parents[1])])
        output = capsys.readouterr()
        text = output.out + output.err
        assert code in (0, 2), case
        assert len(text) < 4 * MAX_PRINTED, case
        assert all(c.isprintable() or c == "\n" for c in text), case


def test_commands_handle_hostile_event_values(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = "linear/a/train"
    base = {"time": "2026-01-02T03:04:05+0000", "stage": stage}
    kinds = {
        "run_started": ["run", "stages", "to_run", "host", "pid"],
        "run_ended": ["state", "message"],
        "started": ["where", "nodes", "gpus"],
        "checkpoint": ["epoch", "step"],
        "done": ["wall_s"],
        "failed": ["message", "host", "rank", "log"],
        "decision_retry": ["reason"],
        "note": ["message", "time", "event", "stage"],
        "progress": ["progress"],
    }
    lines = []
    for kind, keys in kinds.items():
        for key, value in itertools.product(keys, HOSTILE):
            lines.append(json.dumps({**base, "event": kind, "host": "h", key: value}))
    progress = {"epoch": 1, "epochs": 2, "loss": 1.0, "images_per_s": 1.0, "left_s": 1.0}
    for key, value in itertools.product(progress, HOSTILE):
        body = {**progress, key: value}
        lines.append(json.dumps({**base, "event": "progress", "progress": body}))
    for start in range(0, len(lines), 20):
        (run / "events.jsonl").write_text("\n".join(lines[start : start + 20]) + "\n")
        for words in (["logs", "small", "--all"], ["logs", "small", stage, "--all"]):
            capsys.readouterr()
            assert cli.main([*words, "--storage", str(run.parents[1])]) == 0
            text = capsys.readouterr().out
            assert len(text) < MAX_PRINTED
            assert all(c.isprintable() or c == "\n" for c in text)


@pytest.mark.few(1)
@pytest.mark.parametrize("part", range(PARTS))
def test_commands_handle_hostile_run_records(
    run: Path, capsys: pytest.CaptureFixture[str], part: int
) -> None:
    """This includes the records of stages. Another run must still be listed."""
    whole = run.with_name("whole")
    shutil.copytree(run, whole)
    record = json.loads((run / "run.json").read_text())
    (whole / "run.json").write_text(json.dumps({**record, "name": "whole"}))
    number = next(n for n, s in enumerate(record["stages"]) if s["id"] == "linear/a/evaluate")
    of_run = [(key,) for key in (*record, "replicas")]
    of_stage = [("stages", number, key) for key in (*record["stages"][number], "replica")]
    for case, body in mutations(record, [*of_run, *of_stage], part):
        (run / "run.json").write_text(json.dumps(body))
        check_commands(run, capsys, case)
    (run / "run.json").write_text("{")
    capsys.readouterr()
    assert cli.main(["runs", "--storage", str(run.parents[1])]) == 0
    listed = {line.split()[0]: line.split()[1] for line in capsys.readouterr().out.splitlines()}
    assert (listed["small"], listed["whole"]) == ("damaged", "finished")


@pytest.mark.parametrize(
    "report",
    [
        lambda screen: screen.say(f"a/train: failed: {ESCAPE}\nsecond line"),
        lambda screen: screen.progress(
            Event(EventKind.PROGRESS, "a/train", body={"task": f"{ESCAPE}\nsecond line"})
        ),
    ],
    ids=["a line", "a live line"],
)
def test_a_message_of_a_stage_is_one_printable_line(report: Callable[[Console], None]) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    screen = Console(Graph.of("g", [Stage("a/train", "train", "k", {})]), {}, stream)
    report(screen)
    text = stream.getvalue()
    assert f"{REPLACEMENT}]0;title{REPLACEMENT} {REPLACEMENT}[2Jtext second line" in text
