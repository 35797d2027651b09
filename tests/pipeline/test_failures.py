"""Tests of failure reports: the stored traceback with host, rank and log, and the message with the
line of code and the path of the traceback."""

from __future__ import annotations

import os
import platform
import re
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from pipeline import cli
from pipeline.app import runs as app
from pipeline.app.garbage import find_garbage
from pipeline.graph import failures
from pipeline.graph.stage import Stage
from pipeline.graph.store import Store
from pipeline.launch import attempt, local
from tests import small_run
from workers import dist
from workers.errors import UserError
from workers.storage.artifact import Attempt


def stage_of(key: str = "k1") -> Stage:
    return Stage("meat/a/train", "train", key, {}, ())


def break_in_torch() -> dict[str, object]:
    """Raise an error with its innermost frame in a file of torch."""
    return {
        "x": torch.nn.functional.pad(torch.zeros(2, 2), (1, 1, 1, 1, 1, 1, 1, 1), mode="reflect")
    }


def traceback_files(storage: Path, key: str = "k1") -> list[Path]:
    return sorted((storage / failures.FOLDER / key).glob("*.txt"))


def test_failure_file_has_full_traceback_host_rank_and_log(tmp_path: Path) -> None:
    def run() -> dict[str, object]:
        torch.zeros(2) + torch.zeros(3)
        return {}

    event = attempt.attempt_stage(stage_of(), run, str(tmp_path), dist.Group(1, 4))
    (path,) = traceback_files(tmp_path)
    assert event.kind == "failed"
    assert f"traceback: {path}" in event.message
    text = path.read_text()
    assert "Traceback (most recent call last):" in text
    assert "torch.zeros(2) + torch.zeros(3)" in text
    assert [line for line in text.splitlines() if re.match("stage|key|host|rank", line)] == [
        "stage: meat/a/train",
        "key: k1",
        f"host: {platform.node()}",
        "rank: 1 of 4",
    ]
    assert f"process: {os.getpid()}" in text
    assert re.search(r"^log: .+", text, re.MULTILINE)


def test_error_names_innermost_own_line_instead_of_library_line(tmp_path: Path) -> None:
    from workers.data.decoding import open_image

    run = partial(open_image, b"no image", 100)
    event = attempt.attempt_stage(stage_of(), cast(Any, run), str(tmp_path))
    assert re.search(r"\(at workers/data/decoding\.py:\d+ in open_image\)", event.message)


def test_error_names_the_users_line_before_project_lines(tmp_path: Path) -> None:
    from workers.data.decoding import open_image

    def misuse() -> Any:
        return open_image(b"no image", 100)

    for run in (misuse, break_in_torch):
        event = attempt.attempt_stage(stage_of(), run, str(tmp_path))
        assert re.search(rf"\(at {__file__}:\d+ in {run.__name__}\)", event.message)


def test_error_from_another_process_names_its_line_there(tmp_path: Path) -> None:
    def run() -> dict[str, object]:
        cause = KeyError("x")
        cause.__cause__ = RuntimeError()
        cause.__cause__.traceback_str = (  # type: ignore[attr-defined]
            "ray::examine() (pid=1)\n"
            '  File "/tmp/r/_ray_pkg_1/pipeline/data/ingest.py", line 12, in examine\n'
            '  File "/env/site-packages/ray/_private/workers/x.py", line 9, in y\nKeyError: x'
        )
        raise cause

    assert (
        "(at pipeline/data/ingest.py:12 in examine)"
        in attempt.attempt_stage(stage_of(), run, str(tmp_path)).message
    )


def test_error_from_another_process_names_the_users_line(tmp_path: Path) -> None:
    def run() -> dict[str, object]:
        cause = KeyError("x")
        cause.__cause__ = RuntimeError()
        cause.__cause__.traceback_str = (  # type: ignore[attr-defined]
            '  File "/tmp/r/_ray_pkg_1/workers/loop.py", line 12, in train_step\n'
            '  File "/tmp/r/_ray_pkg_2/mine.py", line 7, in loss\n'
            '  File "/env/site-packages/torch/nn/module.py", line 9, in y\nKeyError: x'
        )
        raise cause

    message = attempt.attempt_stage(stage_of(), run, str(tmp_path)).message
    assert "(at /tmp/r/_ray_pkg_2/mine.py:7 in loss)" in message


def test_quick_failures_have_separate_ordered_files(
    tmp_path: Path,
) -> None:
    for count in range(5):

        def run(count: int = count) -> dict[str, object]:
            raise ValueError(f"try {count}")

        attempt.attempt_stage(stage_of(), run, str(tmp_path))
    last_lines = [path.read_text().splitlines() for path in traceback_files(tmp_path)]
    tries = [line for lines in last_lines for line in lines if line.startswith("ValueError")]
    assert tries == [f"ValueError: try {count}" for count in range(5)]


def test_unavailable_storage_does_not_hide_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> dict[str, object]:
        raise UserError("fix it")

    event = attempt.attempt_stage(stage_of(), refused, str(tmp_path), dist.Group(2, 4))
    assert event.message == "fix it"
    assert event.body["host"] == platform.node(), "it helps if the disk of this node is full"
    assert event.body["rank"] == 2
    assert not traceback_files(tmp_path)

    def away(*_: object) -> None:
        raise OSError("storage is away")

    monkeypatch.setattr(failures, "write_bytes", away)
    event = attempt.attempt_stage(stage_of(), break_in_torch, str(tmp_path))
    assert "traceback: not kept: storage is away" in event.message


def test_passwords_in_errors_are_removed(tmp_path: Path) -> None:
    address = "https://{}@host/x".format("me:hush")

    def run() -> dict[str, object]:
        raise RuntimeError(f"{address} says no")

    event = attempt.attempt_stage(stage_of(), run, str(tmp_path))
    text = traceback_files(tmp_path)[0].read_text()
    assert "https://host/x says no" in event.message
    assert "https://host/x says no" in text
    assert "hush" not in event.message + text


def test_failure_file_has_log_end_without_colours_and_secrets(tmp_path: Path) -> None:
    log = tmp_path / "worker.err"
    log.write_text("".join(f"line {number}\n" for number in range(500)) + "s3://me:hush@bucket/x\n")
    end = failures.read_last_log_lines(str(log))
    assert end.splitlines()[0] == f"line {501 - failures.LOG_LINES}"
    origin = failures.Origin("a/train", "k1", "fe80::1", 3, 4, 7, str(log))
    path = failures.write_failure(str(tmp_path), origin, "\x1b[36mred\x1b[39m\n", end)
    assert Path(path).name.endswith("-fe80__1-rank3-7.txt")
    text = Path(path).read_text()
    assert "host: fe80::1\nrank: 3 of 4\nprocess: 7\n" in text
    assert f"\n\nred\n\nthe end of its log ({log}):\nline " in text
    assert "hush" not in text
    log.write_bytes(b"\xff" * (failures.LOG_BYTES + 10))
    assert len(failures.read_last_log_lines(str(log))) <= failures.LOG_BYTES
    assert (
        failures.read_last_log_lines(str(tmp_path / "none"))
        == failures.read_last_log_lines("")
        == ""
    )


def test_gc_deletes_failures_of_finished_and_unneeded_stages(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    for key in ("k1", "k2", "k3"):
        attempt.attempt_stage(stage_of(key), break_in_torch, str(tmp_path))
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    Attempt(store.root, "k2").commit({})
    stages = [{"id": f"a/{key}", "key": key, "step": "train"} for key in ("k1", "k2")]
    store.save_record(cast(Any, {"name": "mine", "stages": stages}))
    assert [path for path, *_ in find_garbage(store)] == ["failures/k2", "failures/k3"]


@pytest.mark.parametrize("step", ["train", "ingest"])
def test_failed_run_prints_the_path_of_its_traceback(
    step: str,
    tmp_path: Path,
    quick: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def broken(*_: object, **__: object) -> dict[str, object]:
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr(local, "run_stage" if step == "train" else "run_ingest", broken)
    body = small_run.make_body(
        tmp_path, small_run.make_cards(tmp_path, ["a"]), ["finetune"], cluster={"retries": 1}
    )
    assert cli.main(["run", small_run.write_config(tmp_path / "c.yaml", body)]) == 2
    output = capsys.readouterr().err
    path = Path(output.split("traceback: ")[1].split(";")[0].split(" ")[0])
    assert output.count("\n") == 1
    assert f"ZeroDivisionError: by nothing (at {__file__}:" in output
    assert "by nothing" in path.read_text()
    assert path.is_relative_to(tmp_path / "storage" / "failures")


@pytest.mark.parametrize(
    ("stage_id", "overrides", "expected"),
    [
        (
            "finetune/a/train",
            ["train.accumulate=2"],
            "the memory of the GPU does not suffice for batches of 16 images in 2 parts, in fp32 "
            "(an allocation of 2.50 GiB failed); raise train.accumulate, which gives the same "
            "batches in more parts, set train.precision to bf16, lower train.batch_size, or give "
            "it a larger share of a GPU (cluster.gpus_per_worker); traceback: ",
        ),
        (
            "finetune/a/train",
            ["train.precision=bf16"],
            "16 images in one part, in bf16 (an allocation of 2.50 GiB failed); raise "
            "train.accumulate, which gives the same batches in more parts, lower train.batch_size, "
            "or give it a larger share",
        ),
        ("finetune/a/evaluate", [], "does not suffice for 'finetune/a/evaluate'"),
    ],
)
def test_out_of_gpu_memory_error_names_helpful_settings(
    tmp_path: Path, stage_id: str, overrides: list[str], expected: str
) -> None:
    cards = small_run.make_cards(tmp_path, ("base", "a"))
    body = small_run.make_body(tmp_path, cards, ("finetune",))
    path = small_run.write_config(tmp_path / "run.yaml", body)
    stage = app.prepare(path, overrides, with_jobs=True).graph[stage_id]

    def run() -> dict[str, object]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has")

    event = attempt.attempt_stage(stage, run, str(tmp_path))
    assert expected in event.message
    assert not event.final, "another process may have freed memory of the GPU meanwhile"
