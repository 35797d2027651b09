"""Tests of content checks: raw images edited in place, and recomputed results that differ."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from PIL import Image, ImageOps

from pipeline import cli
from pipeline.config import settings as config
from pipeline.graph import build
from pipeline.graph.store import Store
from pipeline.launch import local
from tests import small_run
from tests.recovery import damage_file
from tests.shard_names import shard_name
from workers import loop
from workers.dist import Group
from workers.job import StageJob
from workers.storage.artifact import compute_content_digest, compute_sha256


class Finished(NamedTuple):
    """A folder with a finished run, and a copy."""

    folder: Path
    copy: Path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("contents") / "site"
    folder.mkdir()
    cards = {name: card_of_equal_sizes(folder, name) for name in "ab"}
    write(folder, cards, ["meat"])
    small_run.run(["run", str(folder / "config.yaml")], folder / "out.txt")
    return Finished(folder, Path(shutil.copytree(folder, folder.with_name("copy"))))


@pytest.fixture
def site(finished: Finished) -> Path:
    """Return the folder of a finished run of `meat`. The file size of an image does not depend on
    its content."""
    shutil.rmtree(finished.folder)
    shutil.copytree(finished.copy, finished.folder)
    return finished.folder


def card_of_equal_sizes(folder: Path, name: str) -> str:
    path = small_run.make_card(folder, name, small_run.TASKS[name], train=12, test=6)
    for file in (folder / "raw" / name).rglob("*.png"):
        Image.open(file).save(file, compress_level=0)
    return path


def write(folder: Path, cards: dict[str, str], methods: list[str]) -> None:
    small_run.write_config(folder / "config.yaml", small_run.make_body(folder, cards, methods))


def cards_of(folder: Path) -> dict[str, str]:
    return {name: str(folder / "cards" / f"{name}.yaml") for name in "ab"}


def edit(folder: Path, name: str, keep_times: bool = False) -> None:
    """Invert the images of a card. File names and sizes stay the same."""
    for file in (folder / "raw" / name).rglob("*.png"):
        info = file.stat()
        ImageOps.invert(Image.open(file)).save(file, compress_level=0)
        assert file.stat().st_size == info.st_size
        time = info.st_mtime_ns + (0 if keep_times else 10**9)
        os.utime(file, ns=(time, time))


def say(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    capsys.readouterr()
    assert cli.main([*argv]) == 0
    return capsys.readouterr().out


def keys(folder: Path) -> dict[str, str]:
    return {i: m["key"] for i, m in small_run.manifests(folder / "storage").items()}


B = {"data/b", "meat/b/train", "meat/b/evaluate", "report"}


# ---- raw data ------------------------------------------------------------------------------------
def test_images_edited_in_place_give_results_new_keys(
    site: Any, quick: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path, before = str(site / "config.yaml"), keys(site)
    old = small_run.results(site / "storage")
    edit(site, "b")
    plan = say(capsys, "plan", path)
    assert (
        "its raw files were written again since they were ingested (same paths and sizes)" in plan
    )
    assert keys(site) == before
    output = say(capsys, "run", path)
    assert "data/b: the images changed; their results get new keys" in output
    after = keys(site)
    assert {i for i in after if after[i] != before[i]} == B
    assert small_run.results(site / "storage")["data/b"] != old["data/b"]
    assert all(
        (site / "storage" / "stages" / key / "manifest.json").exists() for key in before.values()
    )
    assert "nothing to do" in say(capsys, "run", path)
    assert "written again" not in say(capsys, "plan", path)
    edit(site, "b")  # inverted twice: the original images
    assert "nothing to do" in say(capsys, "run", path)
    assert keys(site) == before
    assert small_run.results(site / "storage") == old


def test_rewritten_identical_files_run_no_stage(
    site: Any, quick: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in (site / "raw" / "b").rglob("*.png"):
        os.utime(file)
    output = say(capsys, "run", str(site / "config.yaml"))
    assert "data/b: they are the same images" in output
    assert "nothing to do" in output
    assert "written again" not in say(capsys, "run", str(site / "config.yaml"))


def test_changed_images_with_old_times_are_detected_at_reingest(
    site: Any, quick: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The modification times do not change. Then a shard is damaged, and a new method reads it."""
    storage, old = site / "storage", small_run.results(site / "storage")
    edit(site, "b", keep_times=True)
    assert "nothing to do" in say(capsys, "run", str(site / "config.yaml"))
    damage_file(small_run.artifact(storage, "data/b", shard_name("train", "4")), "flip")
    before = small_run.attempts(storage)
    write(site, cards_of(site), ["meat", "linear"])
    output = say(capsys, "run", str(site / "config.yaml"))
    assert "data/b: damaged: train-" in output
    after = small_run.attempts(storage)
    assert {i for i in before if after[i] != before[i]} == B
    assert small_run.results(storage)["meat/b/evaluate"] != old["meat/b/evaluate"]
    content = small_run.manifests(storage)["data/b"]["content"]
    for stage in ("meat/b/train", "meat/b/evaluate", "linear/b/train"):
        assert small_run.manifests(storage)[stage]["made_of"][keys(site)["data/b"]] == content
    assert "nothing to do" in say(capsys, "run", str(site / "config.yaml"))


def test_deleted_data_does_not_invalidate_results(
    site: Any, quick: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    before = small_run.attempts(site / "storage")
    shutil.rmtree(site / "raw")
    for name in "ab":
        shutil.rmtree(site / "storage" / "stages" / keys(site)[f"data/{name}"])
        before.pop(f"data/{name}")
    assert "nothing to do" in say(capsys, "run", str(site / "config.yaml"))
    assert small_run.attempts(site / "storage") == before


def test_store_without_recorded_contents_treats_rewritten_images_as_same(
    site: Any, quick: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Older stores recorded neither the content of raw data nor the inputs of results."""
    strip(site / "storage", "made_of", "raw_content")
    shutil.rmtree(site / "storage" / "sources")
    path = str(site / "config.yaml")
    assert "nothing to do" in say(capsys, "run", path)
    edit(site, "b")
    output = say(capsys, "run", path)
    assert "data/b: its raw files were written again; they are treated as the same images" in output
    assert "nothing to do" in output
    assert "written again" not in say(capsys, "run", path)


def strip(storage: Path, *names: str) -> None:
    for path in (storage / "stages").glob("*/manifest.json"):
        body = {k: v for k, v in json.loads(path.read_text()).items() if k not in names}
        path.write_text(json.dumps({**body, "sha256": compute_sha256(body)}))


# ---- recomputed results --------------------------------------------------------------------------
def other_bits(monkeypatch: pytest.MonkeyPatch, stage_id: str) -> None:
    """Compute `stage_id` with another seed from now on, as if on a machine that rounds
    differently."""
    run_stage = loop.run_stage

    def run(job: Any, *rest: Any) -> Any:
        return run_stage(
            dataclasses.replace(job, seed=job.seed + 1) if job.id == stage_id else job, *rest
        )

    monkeypatch.setattr(local, "run_stage", run)


def test_changed_stage_result_reruns_its_dependents(
    site: Any, quick: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    storage, before = site / "storage", small_run.attempts(site / "storage")
    damage_file(small_run.artifact(storage, "meat/a/train", "task.safetensors"), "flip")
    other_bits(monkeypatch, "meat/a/train")
    output = say(capsys, "run", str(site / "config.yaml"))
    assert "meat/a/evaluate: made of another content of meat/a/train" in output
    after = small_run.attempts(storage)
    assert {i for i in after if after[i] != before[i]} >= {
        "meat/a/train",
        "meat/a/evaluate",
        "meat/b/evaluate",
    }
    assert "meat/b/train" not in {i for i in after if after[i] != before[i]}
    assert "nothing to do" in say(capsys, "run", str(site / "config.yaml"))


def test_lookup_detects_result_of_outdated_parent_content(
    site: Any, quick: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another process recomputed only the parent."""
    storage, stage = site / "storage", "meat/a/train"
    key = keys(site)[stage]
    shutil.rmtree(storage / "stages" / key)
    other_bits(monkeypatch, stage)
    vars(local)["run_stage"](job_of(site, stage), Group(), lambda body: None)
    plan = say(capsys, "plan", str(site / "config.yaml"))
    assert "made of another content of meat/a/train" in plan
    say(capsys, "run", str(site / "config.yaml"))
    made_of = small_run.manifests(storage)["meat/a/evaluate"]["made_of"]
    assert made_of[key] == compute_content_digest(small_run.manifests(storage)[stage])


def job_of(site: Path, stage_id: str) -> StageJob:
    settings = config.load(str(site / "config.yaml"))
    graph, _ = build.build_graph(settings, Store(settings.storage))
    job: StageJob = graph[stage_id].job
    return job


def test_second_attempt_with_different_content_reports_first_is_kept(
    site: Any, quick: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both compute the same stage at the same time, with different results."""
    job = job_of(site, "meat/a/train")
    first = loop._run_stage(job, Group(), lambda body: None)
    assert "note" not in first
    second = loop._run_stage(
        dataclasses.replace(job, seed=job.seed + 1), Group(), lambda body: None
    )
    assert second["note"] == (
        "another process published a different result first, and that one is kept"
    )
    assert second["attempt"] == first["attempt"]
