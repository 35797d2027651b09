"""Kill anything at any moment: what was persisted stays, the same command goes on, and the numbers come out the same."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import safetensors.torch
import torch

from pipeline import cli
from pipeline import run as walk
from pipeline.report import page
from tests import small_run
from workers import loop
from workers.artefact import Artefact

MOMENTS = 20260101  # seed of the moments at which things are killed


@dataclass
class Lab:
    """Cards, and an uninterrupted run on them: what it left behind, what it said, and how long it took."""

    folder: Path
    cards: dict[str, str]
    body: dict[str, Any]
    expected: dict[str, Any]
    seconds: float

    def config(self, place: Path, **changes: Any) -> str:
        """The same run in a storage of its own."""
        return small_run.write_config(place / "config.yaml", small_run.make_body(place, self.cards, **changes))

    def copy(self, place: Path, **changes: Any) -> str:
        """The same with everything done."""
        shutil.copytree(self.folder / "storage", place / "storage")
        return self.config(place, **changes)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    folder = tmp_path_factory.mktemp("reference")
    cards = small_run.make_cards(folder, ["base", "a", "b"])
    body = small_run.make_body(folder, cards)
    small_run.run(["plan", small_run.write_config(folder / "warm.yaml", body)], folder / "warm.txt")  # the fork server is up after it
    started = time.monotonic()
    small_run.run(["run", small_run.write_config(folder / "config.yaml", body)], folder / "out.txt")
    return Lab(folder, cards, body, small_run.results(folder / "storage"), time.monotonic() - started)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in this process make a report without pictures."""
    monkeypatch.setattr(page, "build", lambda *_: {"report.html": b"a page"})


def judge(lab: Lab, place: Path, before: dict[str, str], said: str) -> None:
    """What must hold after the command was given again."""
    storage = place / "storage"
    after = small_run.attempts(storage)
    assert before.items() <= after.items(), "a result that stood was computed again"
    assert not before or f"{len(after) - len(before)} stages run, {len(before)} reused" in said or len(after) == len(before)
    assert small_run.results(storage) == lab.expected
    for stage_id, manifest in small_run.manifests(storage).items():
        found = Artefact.need(str(storage / "stages"), manifest["key"])
        assert found.damage() is None, stage_id
        assert not any(name.endswith(".part") for name in manifest["files"])


def standing(place: Path) -> dict[str, str]:
    """The attempts that are published, also where the run died before it wrote its record."""
    return small_run.attempts(place / "storage") if (place / "storage" / "runs" / "small" / "run.json").exists() else {}


# ---- SIGKILL of the driver -----------------------------------------------------------------------------------------------
def killed_at_a_moment(lab: Lab, place: Path, moment: float) -> None:
    process = small_run.start(["run", lab.config(place)], place / "killed.txt")
    process.join(moment)
    process.kill()
    process.join()
    before = standing(place)
    judge(lab, place, before, small_run.run(["run", lab.config(place)], place / "again.txt"))


def killed_at_a_call(lab: Lab, place: Path, call: int) -> bool:
    """Returns whether the process lived to make so many calls."""
    process = small_run.start(["run", lab.config(place)], place / "killed.txt", kill_before=call)
    process.join(240)
    assert process.exitcode in (-9, 0)
    before = standing(place)
    judge(lab, place, before, small_run.run(["run", lab.config(place)], place / "again.txt"))
    return process.exitcode == -9


@pytest.mark.parametrize("trial", range(3))
def test_a_run_killed_at_a_random_moment_ends_with_the_same_numbers(trial, lab, tmp_path):
    killed_at_a_moment(lab, tmp_path, random.Random(f"{MOMENTS}-{trial}").uniform(0.1, 0.95) * lab.seconds)


@pytest.mark.parametrize("trial", range(3))
def test_a_run_killed_between_two_writes_ends_with_the_same_numbers(trial, lab, tmp_path):
    assert killed_at_a_call(lab, tmp_path, random.Random(f"{MOMENTS}-call-{trial}").randrange(5, 120))


@pytest.mark.slow
@pytest.mark.parametrize("trial", range(20))
def test_a_run_killed_at_any_moment_ends_with_the_same_numbers(trial, lab, tmp_path):
    killed_at_a_moment(lab, tmp_path, (trial + random.Random(f"{MOMENTS}-slow-{trial}").random()) / 20 * lab.seconds)


@pytest.mark.slow
def test_a_run_killed_before_each_of_its_writes_ends_with_the_same_numbers(lab, tmp_path):
    """Every seventh call that makes something durable; the last ones are beyond the end of the run."""
    call, lived = 1, True
    while lived:
        lived = killed_at_a_call(lab, tmp_path / str(call), call)
        call += 7
    assert call > 100


def test_a_run_killed_again_and_again_comes_to_its_end(lab, tmp_path):
    """Ten lives, each of which ends a few writes after the last."""
    config = lab.config(tmp_path)
    before: dict[str, str] = {}
    for life in range(10):
        process = small_run.start(["run", config], tmp_path / "out.txt", kill_before=8 + 3 * life)
        process.join(240)
        after = standing(tmp_path)
        assert before.items() <= after.items()
        before = after
    judge(lab, tmp_path, before, small_run.run(["run", config], tmp_path / "again.txt"))


@pytest.mark.parametrize("call", [20, 60])
def test_a_run_that_is_interrupted_says_one_sentence_and_goes_on(call, lab, tmp_path):
    process = small_run.start(["run", lab.config(tmp_path)], tmp_path / "out.txt", kill_before=call, by=signal.SIGINT)
    process.join(60)
    assert process.exitcode == 130
    last = (tmp_path / "out.txt").read_text().splitlines()[-1]
    assert last == "accrete: interrupted; what finished is kept, run the same command again to go on"
    judge(lab, tmp_path, standing(tmp_path), small_run.run(["run", lab.config(tmp_path)], tmp_path / "again.txt"))


@pytest.mark.parametrize("call", [1, 3, 4, 9, 40, 90])
def test_a_disk_that_fills_up_is_told_in_a_sentence_and_nothing_is_lost(call, lab, tmp_path, quick, monkeypatch, capfd):
    config, calls = lab.config(tmp_path), itertools.count(1)

    def full(descriptor: int) -> None:
        if next(calls) >= call:
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert cli.main(["run", config]) == 2
    said = capfd.readouterr().err
    assert len(said.splitlines()) == 1
    assert "No space left on device" in said
    assert not list((tmp_path / "storage").rglob("*.part")), "what was half written is removed"
    assert cli.main(["run", config]) == 0
    judge(lab, tmp_path, {}, capfd.readouterr().out)


# ---- checkpoints inside a stage ------------------------------------------------------------------------------------------
class Crash(BaseException):
    """Passes all `except Exception`, like the end of a process."""


@contextlib.contextmanager
def steps(patch: pytest.MonkeyPatch, crash_at: int = 0) -> Iterator[list[str]]:
    """Notes the stage of every training step; crashes before the step of that number (from 1)."""
    made: list[str] = []
    step = loop.train_step

    def noted(method: Any, optimizer: Any, batches: Any, progress: Any, job: Any, group: Any) -> Any:
        if crash_at and len(made) + 1 == crash_at:
            raise Crash
        made.append(job.id)
        return step(method, optimizer, batches, progress, job, group)

    with patch.context() as inner:
        inner.setattr(loop, "train_step", noted)
        yield made


@pytest.mark.parametrize("crash_at", [2, 5, 6, 7, 8, 12, 15])
def test_a_stage_goes_on_at_the_step_of_its_last_checkpoint(crash_at, lab, tmp_path, quick, monkeypatch):
    """Three steps per epoch, two epochs: after every step but the last of an epoch's end there is a checkpoint."""
    config = lab.config(tmp_path)
    with pytest.raises(Crash), steps(monkeypatch, crash_at) as first:
        cli.main(["run", config])
    with steps(monkeypatch) as second:
        assert cli.main(["run", config]) == 0
    together = [*first, *second]
    per_stage = 2 * -(-2 * (20 - 2) // 16)  # two classes of 20, of which 2 validate, in batches of 16
    assert all(together.count(stage) == per_stage for stage in together), "a step was made twice or left out"
    assert small_run.results(tmp_path / "storage") == lab.expected
    assert not list((tmp_path / "storage" / "checkpoints").rglob("*.safetensors")), "checkpoints go when the result stands"


def test_without_checkpoints_a_stage_starts_again(lab, tmp_path, quick, monkeypatch):
    config = lab.config(tmp_path, cluster={"checkpoint_s": 0.0})
    with pytest.raises(Crash), steps(monkeypatch, 5):
        cli.main(["run", config])
    with steps(monkeypatch) as second:
        assert cli.main(["run", config]) == 0
    assert second.count(second[0]) == 6
    assert small_run.results(tmp_path / "storage") == lab.expected


@pytest.mark.parametrize("harm", ["flip", "truncate", "remove", "meta"])
def test_a_damaged_checkpoint_is_not_believed(harm, lab, tmp_path, quick, monkeypatch):
    config = lab.config(tmp_path)
    with pytest.raises(Crash), steps(monkeypatch, 5):
        cli.main(["run", config])
    (tensors,) = (tmp_path / "storage" / "checkpoints").rglob("*.safetensors")
    spoil(tensors.with_name("latest.json") if harm == "meta" else tensors, "truncate" if harm == "meta" else harm)
    with steps(monkeypatch) as second:
        assert cli.main(["run", config]) == 0
    assert second.count(second[0]) == 6, "the stage starts anew"
    assert small_run.results(tmp_path / "storage") == lab.expected


# ---- damage --------------------------------------------------------------------------------------------------------------
def spoil(path: Path, harm: str) -> None:
    data = bytearray(path.read_bytes())
    if harm == "remove":
        path.unlink()
    elif harm == "truncate":
        path.write_bytes(data[: len(data) // 2])
    else:
        data[data.find(b"IDAT") + 9 if path.suffix == ".tar" else len(data) // 2] ^= 1  # in a tar, a byte of an image and not of the padding
        path.write_bytes(data)


FILES = [("backbone", "state.safetensors"), ("backbone", "task.safetensors"), ("finetune/a/train", "task.safetensors"),
         ("finetune/a/train", "carried.safetensors"), ("meat/b/train", "history.parquet"), ("finetune/b/evaluate", "predictions.parquet"),
]
DATA = [("data/a", "train-00000.tar"), ("data/a", "test-00000.tar"), ("data/b", "index.parquet"), ("data/b", "rejected.csv")]


@pytest.mark.parametrize(("stage_id", "file"), FILES)
@pytest.mark.parametrize("harm", ["flip", "truncate"])
def test_a_damaged_file_is_named_and_its_stage_alone_is_run_again(harm, stage_id, file, lab, tmp_path, quick, capsys):
    config = lab.copy(tmp_path)
    before = small_run.attempts(tmp_path / "storage")
    spoil(small_run.artefact(tmp_path / "storage", stage_id, file), harm)
    assert cli.main(["run", config]) == 0
    said = capsys.readouterr().out
    assert f"{stage_id}: damaged: {file} is {'damaged' if harm == 'flip' else 'truncated'}" in said
    after = small_run.attempts(tmp_path / "storage")
    assert {i for i in after if after[i] != before[i]} == {stage_id}
    assert small_run.results(tmp_path / "storage") == lab.expected
    assert "1 stages run" in said


@pytest.mark.parametrize(("stage_id", "file"), DATA)
@pytest.mark.parametrize("harm", ["flip", "truncate"])
def test_damaged_data_is_named_left_alone_while_nothing_needs_it_and_ingested_anew_when_something_does(
        harm, stage_id, file, lab, tmp_path, quick, capsys):
    """Its source may be gone, and most of it may be whole."""
    config, storage = lab.copy(tmp_path), tmp_path / "storage"
    before = small_run.attempts(storage)
    spoil(small_run.artefact(storage, stage_id, file), harm)
    assert cli.main(["run", config]) == 0
    said = capsys.readouterr().out
    assert f"{stage_id}: damaged: {file} is" in said
    assert "no stage was run" in said
    assert small_run.attempts(storage) == before
    shutil.rmtree(storage / "stages" / small_run.manifests(storage)["finetune/b/evaluate"]["key"])
    assert cli.main(["run", config]) == 0
    after = small_run.attempts(storage)
    assert {i for i in after if after[i] != before[i]} == {stage_id, "finetune/b/evaluate"}
    assert small_run.results(storage) == lab.expected


@pytest.mark.parametrize("harm", ["flip", "truncate", "remove"])
def test_a_damaged_manifest_is_no_result(harm, lab, tmp_path, quick, capsys):
    config = lab.copy(tmp_path)
    before = small_run.attempts(tmp_path / "storage")
    spoil(small_run.artefact(tmp_path / "storage", "meat/a/evaluate", "x").parents[1] / "manifest.json", harm)
    assert cli.main(["run", config]) == 0
    assert harm == "remove" or "meat/a/evaluate: damaged: manifest.json is not as it was written" in capsys.readouterr().out
    after = small_run.attempts(tmp_path / "storage")
    assert {i for i in after if after[i] != before[i]} == {"meat/a/evaluate"}
    assert small_run.results(tmp_path / "storage") == lab.expected


@pytest.mark.parametrize(("stage_id", "file"), [("finetune/a/train", "carried.safetensors"), ("backbone", "state.safetensors"),
                                                ("data/b", "train-00000.tar"), ("data/b", "index.parquet")])
def test_damage_that_is_found_by_a_worker_recomputes_what_is_damaged(stage_id, file, lab, tmp_path, quick, monkeypatch, capsys):
    """The file goes bad after the driver looked at it: the stage that reads it says so, and the one that wrote it is run."""
    config = lab.copy(tmp_path)
    storage = tmp_path / "storage"
    for stage in ("finetune/b/train", "finetune/b/evaluate"):
        shutil.rmtree(storage / "stages" / small_run.manifests(storage)[stage]["key"])
    shutil.rmtree(storage / "cache")
    before, look_up_all = small_run.attempts(storage), walk.look_up_all

    def then_it_goes_bad(*arguments: Any) -> Any:
        found = look_up_all(*arguments)
        spoil(small_run.artefact(storage, stage_id, file), "flip")
        return found

    monkeypatch.setattr(walk, "look_up_all", then_it_goes_bad)
    assert cli.main(["run", config]) == 0
    after = small_run.attempts(storage)
    assert {i for i in after if after[i] != before.get(i)} == {stage_id, "finetune/b/train", "finetune/b/evaluate"}
    assert small_run.results(storage) == lab.expected
    assert file in capsys.readouterr().out or stage_id == "data/b"


# ---- the same command again, and a longer stream -------------------------------------------------------------------------
def test_the_same_command_again_runs_nothing_and_says_so(lab, tmp_path, quick, capsys):
    config = lab.copy(tmp_path)
    before = small_run.attempts(tmp_path / "storage")
    assert cli.main(["run", config]) == 0
    said = capsys.readouterr().out
    assert f"nothing to do: all {len(before)} stage results stand, no stage was run" in said
    assert small_run.attempts(tmp_path / "storage") == before


def without_data(storage: Path, folder: Path, names: str) -> None:
    """Deletes the raw data and the shards of some cards."""
    for name in names:
        shutil.rmtree(folder / "raw" / name)
        shutil.rmtree(storage / "stages" / small_run.manifests(storage)[f"data/{name}"]["key"])
    shutil.rmtree(storage / "cache")


@pytest.mark.parametrize("gone", ["", "a", "ab"])
def test_an_appended_task_alone_is_run_also_when_older_data_is_gone(gone, tmp_path, quick, capsys):
    """A star: tasks a and b are learned and their data deleted; then c comes."""
    cards = small_run.make_cards(tmp_path, "ab")
    config = small_run.write_config(tmp_path / "config.yaml", small_run.make_body(tmp_path, cards, ["meat"]))
    assert cli.main(["run", config]) == 0
    storage, before = tmp_path / "storage", small_run.attempts(tmp_path / "storage")
    results = small_run.results(storage)
    if gone:
        without_data(storage, tmp_path, gone)
    assert cli.main(["run", config]) == 0, "what was learned stands without its data"
    assert "nothing to do" in capsys.readouterr().out
    cards |= small_run.make_cards(tmp_path, "c")
    small_run.write_config(tmp_path / "config.yaml", small_run.make_body(tmp_path, cards, ["meat"]))
    assert cli.main(["run", config]) == 0
    after = small_run.attempts(storage)
    assert {i for i in after if after[i] != before.get(i)} == {"data/c", "meat/c/train", "meat/c/evaluate", "report"}
    for stage_id, result in small_run.results(storage).items():
        assert results.get(stage_id, result) == result
    assert cli.main(["run", config]) == 0
    assert "nothing to do" in capsys.readouterr().out


def test_classes_that_were_read_from_a_source_are_known_when_it_is_gone(tmp_path, quick, capsys):
    card = small_run.make_card(tmp_path, "a", "23", num_classes=2)
    text = Path(card).read_text()
    assert "classes:\n- '2'\n- '3'\n" in text
    Path(card).write_text(text.replace("classes:\n- '2'\n- '3'\n", "classes: from_source\n"))
    config = small_run.write_config(tmp_path / "config.yaml", small_run.make_body(tmp_path, {"a": card}, ["meat"]))
    assert cli.main(["run", config]) == 0
    shutil.rmtree(tmp_path / "raw")
    capsys.readouterr()
    assert cli.main(["run", config]) == 0
    assert "nothing to do" in capsys.readouterr().out


def test_a_chain_goes_on_without_the_data_of_older_tasks_and_leaves_their_cells_empty(tmp_path, quick, capsys):
    cards = small_run.make_cards(tmp_path, "ab")
    config = small_run.write_config(tmp_path / "config.yaml", small_run.make_body(tmp_path, cards, ["finetune"]))
    assert cli.main(["run", config]) == 0
    storage, before = tmp_path / "storage", small_run.attempts(tmp_path / "storage")
    shutil.copytree(tmp_path / "raw" / "a", tmp_path / "saved")
    without_data(storage, tmp_path, "a")
    cards |= small_run.make_cards(tmp_path, "c")
    small_run.write_config(tmp_path / "config.yaml", small_run.make_body(tmp_path, cards, ["finetune"]))
    capsys.readouterr()
    assert cli.main(["run", config]) == 0
    last = capsys.readouterr().out.splitlines()
    row = next(line.split() for line in last if line.split()[:1] == ["c"])
    assert row[1] == "."
    assert "." not in (row[2], row[3])
    after = small_run.attempts(storage)
    assert {i for i in after if after[i] != before.get(i)} == {"data/c", "finetune/c/train", "finetune/c/evaluate", "report"}
    assert [r["task"] for r in small_run.results(storage)["finetune/c/evaluate"]["rows"]] == ["b", "c"]
    shutil.copytree(tmp_path / "saved", tmp_path / "raw" / "a")
    assert cli.main(["run", config]) == 0
    assert [r["task"] for r in small_run.results(storage)["finetune/c/evaluate"]["rows"]] == ["a", "b", "c"], "the data is back"


def test_what_has_to_learn_from_data_that_is_gone_says_so(tmp_path, quick, capsys):
    cards = small_run.make_cards(tmp_path, "ab")
    config = small_run.write_config(tmp_path / "config.yaml", small_run.make_body(tmp_path, cards, ["joint"]))
    assert cli.main(["run", config]) == 0
    without_data(tmp_path / "storage", tmp_path, "a")
    cards |= small_run.make_cards(tmp_path, "c")
    small_run.write_config(tmp_path / "config.yaml", small_run.make_body(tmp_path, cards, ["joint"]))
    capsys.readouterr()
    assert cli.main(["run", config]) == 2
    said = capsys.readouterr().err
    assert "stage data/a failed: card 'a': its source" in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("harm", ["flip", "truncate"])
def test_data_that_cannot_be_had_again_is_not_deleted_for_a_damaged_byte(harm, tmp_path, quick, capsys):
    cards = small_run.make_cards(tmp_path, "ab")
    config = small_run.write_config(tmp_path / "config.yaml", small_run.make_body(tmp_path, cards, ["finetune"]))
    assert cli.main(["run", config]) == 0
    storage = tmp_path / "storage"
    shard = small_run.artefact(storage, "data/a", "test-00000.tar")
    shutil.rmtree(tmp_path / "raw" / "a")
    spoil(shard, harm)
    cards |= small_run.make_cards(tmp_path, "c")
    small_run.write_config(tmp_path / "config.yaml", small_run.make_body(tmp_path, cards, ["finetune"]))
    assert cli.main(["run", config]) == 2
    assert "its source" in capsys.readouterr().err
    assert shard.exists()
    assert cli.main(["run", config]) == 0, "from now on it counts as gone"


# ---- two at once ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("trial", range(2))
def test_two_drivers_at_the_same_moment_publish_every_stage_once(trial, lab, tmp_path):
    configs = [lab.config(tmp_path), lab.config(tmp_path)]
    processes = [small_run.start(["run", config], tmp_path / f"out{i}.txt") for i, config in enumerate(configs)]
    for i, process in enumerate(processes):
        process.join(240)
        assert process.exitcode == 0, (tmp_path / f"out{i}.txt").read_text()
        assert "tried again" not in (tmp_path / f"out{i}.txt").read_text()
    storage = tmp_path / "storage"
    assert small_run.results(storage) == lab.expected
    for folder in (storage / "stages").iterdir():
        assert len(list(folder.iterdir())) == 2, f"{folder}: one attempt and its manifest"


# ---- on Ray --------------------------------------------------------------------------------------------------------------
def on_ray(lab: Lab, place: Path, workers: int = 1) -> str:
    return lab.config(place, cluster={"workers": workers, "groups": 1, "address": "local", "retries": 3})


def test_one_ray_worker_gives_what_this_process_gives(lab, tmp_path):
    small_run.run(["run", on_ray(lab, tmp_path)], tmp_path / "out.txt")
    assert small_run.results(tmp_path / "storage") == lab.expected
    assert all(m["workers"] == 1 for m in small_run.manifests(tmp_path / "storage").values() if "workers" in m)


@pytest.mark.slow
def test_two_ray_workers_give_the_same_up_to_the_order_of_sums(lab, tmp_path):
    """Gradients are summed in another order: weights differ in their last bits, predictions on few images."""
    small_run.run(["run", on_ray(lab, tmp_path, 2)], tmp_path / "out.txt")
    found = small_run.results(tmp_path / "storage")
    assert found.keys() == lab.expected.keys()
    for stage_id, expected in lab.expected.items():
        if stage_id.startswith("data/"):
            assert found[stage_id] == expected
        elif stage_id.endswith("/evaluate"):
            for one, two in zip(expected["rows"], found[stage_id]["rows"], strict=True):
                assert one["total"] == two["total"]
                assert abs(one["correct"] - two["correct"]) <= 2
        else:
            compare(lab.folder / "storage", tmp_path / "storage", stage_id)


def compare(one: Path, two: Path, stage_id: str) -> None:
    """Floating-point tensors of a stage's files nearly equal, and of all mask bits at most one in a hundred different."""
    for file in sorted(small_run.manifests(one)[stage_id]["files"]):
        if not file.endswith(".safetensors"):
            continue
        left, right = (safetensors.torch.load_file(small_run.artefact(storage, stage_id, file)) for storage in (one, two))
        assert left.keys() == right.keys()
        for name, tensor in left.items():
            if tensor.is_floating_point():
                torch.testing.assert_close(tensor, right[name], rtol=1e-3, atol=1e-4)
            else:
                assert (tensor != right[name]).float().mean() <= 0.01


def descendants(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def gone_within(processes: list[psutil.Process], seconds: float) -> list[str]:
    """Waits until none of them runs; the command lines of those that still do, which are then killed."""
    deadline = time.monotonic() + seconds
    while alive(processes) and time.monotonic() < deadline:
        time.sleep(0.2)
    left = []
    for process in alive(processes):
        with contextlib.suppress(psutil.NoSuchProcess):
            left.append(" ".join(process.cmdline())[:120])
            process.kill()
    return left


def train_workers(pid: int) -> list[psutil.Process]:
    found = []
    for process in descendants(pid):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if "TrainWorker" in " ".join(process.cmdline()):
                found.append(process)
    return found


def kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()


@pytest.fixture(scope="module")
def ray_seconds(lab, tmp_path_factory) -> float:
    """How long an uninterrupted run takes on Ray."""
    place = tmp_path_factory.mktemp("ray")
    started = time.monotonic()
    small_run.run(["run", on_ray(lab, place)], place / "out.txt")
    return time.monotonic() - started


VICTIMS = ["driver", "worker", "tree"]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("trial", range(4))
def test_whoever_is_killed_on_ray_the_run_ends_with_the_same_numbers(trial, victim, workers, lab, ray_seconds, tmp_path):
    """24 trials. The moments are drawn from the part of the run in which workers exist. With two workers the reference is
    what two workers give without interruption."""
    config = on_ray(lab, tmp_path, workers)
    moment = random.Random(f"{MOMENTS}-{victim}-{workers}-{trial}").uniform(0.4, 1.0) * ray_seconds
    process = small_run.start(["run", config], tmp_path / "killed.txt")
    started, family = time.monotonic(), []
    while time.monotonic() - started < moment and process.is_alive():
        family = descendants(process.pid) or family
        time.sleep(0.1)
    family = descendants(process.pid) or family
    if victim == "worker":
        found = train_workers(process.pid)
        if found:
            kill(random.Random(trial).choice(found))
        process.join(240)
        said = (tmp_path / "killed.txt").read_text()
        assert process.exitcode == 0, said
    else:
        process.kill()
        for child in family if victim == "tree" else []:
            kill(child)
        process.join()
    before = standing(tmp_path)
    said = small_run.run(["run", config], tmp_path / "again.txt")
    assert not gone_within(family, 100), "processes of the run are left behind"  # two agents of Ray look around once a minute
    after = small_run.attempts(tmp_path / "storage")
    assert before.items() <= after.items()
    assert victim != "worker" or "no stage was run" in said
    assert small_run.results(tmp_path / "storage") == (lab.expected if workers == 1 else two_workers(lab))


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["ray::Queue", "raylet/raylet"])
def test_where_ray_itself_is_killed_the_run_says_so_and_goes_on_by_the_same_command(victim, lab, tmp_path):
    config = on_ray(lab, tmp_path)
    process, killed = small_run.start(["run", config], tmp_path / "killed.txt"), False
    while process.is_alive() and not killed:
        if len(standing(tmp_path)) >= 4:  # the data and the backbone: a worker group is up
            for child in descendants(process.pid):
                with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                    if victim in " ".join(child.cmdline()):
                        child.kill()
                        killed = True
        time.sleep(0.05)
    process.join(120)
    said = (tmp_path / "killed.txt").read_text()
    assert killed
    assert "Traceback" not in said
    if process.exitcode:  # without a raylet the workers that are up may well finish
        assert process.exitcode == 2, said
        assert said.splitlines()[-1].startswith("accrete: Ray itself broke down")
    judge(lab, tmp_path, standing(tmp_path), small_run.run(["run", config], tmp_path / "again.txt"))


@functools.cache
def reference_of_two(folder: Path, config: str) -> dict[str, Any]:
    small_run.run(["run", config], folder / "two.txt")
    return small_run.results(folder / "two" / "storage")


def two_workers(lab: Lab) -> dict[str, Any]:
    return reference_of_two(lab.folder, on_ray(lab, lab.folder / "two", 2))
