"""Tests of stored results: damage, a repeated command, a longer stream, and deleted data."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline import cli
from pipeline.app import runs as app
from pipeline.graph.run import look_up_all
from tests import small_run
from tests.recovery import damage_file
from tests.shard_names import shard_name

# ---- damage --------------------------------------------------------------------------------------
FILES = [
    ("backbone", "state.safetensors"),
    ("backbone", "task.safetensors"),
    ("finetune/a/train", "task.safetensors"),
    ("finetune/a/train", "carried.safetensors"),
    ("meat/b/train", "history.parquet"),
    ("finetune/b/evaluate", "predictions.parquet"),
]
DATA = [
    ("data/a", shard_name("train", "2")),
    ("data/a", shard_name("test", "3")),
    ("data/b", "index.parquet"),
    ("data/b", "rejected.csv"),
]


@pytest.mark.few(3)
@pytest.mark.parametrize(("stage_id", "file"), FILES)
@pytest.mark.parametrize("harm", ["flip", "truncate"])
def test_damaged_file_is_reported_and_only_its_stage_reruns(
    harm: str,
    stage_id: Any,
    file: Any,
    reference: Any,
    tmp_path: Path,
    quick: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = reference.copy(tmp_path)
    before = small_run.attempts(tmp_path / "storage")
    damage_file(small_run.artifact(tmp_path / "storage", stage_id, file), harm)
    assert cli.main(["run", config]) == 0
    output = capsys.readouterr().out
    assert (
        f"{stage_id}: damaged: {file} is {'damaged' if harm == 'flip' else 'truncated'}" in output
    )
    after = small_run.attempts(tmp_path / "storage")
    assert {i for i in after if after[i] != before[i]} == {stage_id}
    assert small_run.results(tmp_path / "storage") == reference.expected
    assert "1 stages run" in output


@pytest.mark.few(1)
@pytest.mark.parametrize(("stage_id", "file"), DATA)
@pytest.mark.parametrize("harm", ["flip", "truncate"])
def test_damaged_data_is_reingested_only_when_needed(
    harm: str,
    stage_id: Any,
    file: Any,
    reference: Any,
    tmp_path: Path,
    quick: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Unneeded damaged data is kept: its source may be gone, and it may be mostly intact."""
    config, storage = reference.copy(tmp_path), tmp_path / "storage"
    before = small_run.attempts(storage)
    damage_file(small_run.artifact(storage, stage_id, file), harm)
    assert cli.main(["run", config]) == 0
    output = capsys.readouterr().out
    assert f"{stage_id}: damaged: {file} is" in output
    assert "stage results are up to date" in output
    assert small_run.attempts(storage) == before
    shutil.rmtree(storage / "stages" / small_run.manifests(storage)["finetune/b/evaluate"]["key"])
    assert cli.main(["run", config]) == 0
    after = small_run.attempts(storage)
    assert {i for i in after if after[i] != before[i]} == {stage_id, "finetune/b/evaluate"}
    assert small_run.results(storage) == reference.expected


@pytest.mark.parametrize("harm", ["flip", "truncate", "remove"])
def test_damaged_manifest_reruns_its_stage(
    harm: str, reference: Any, tmp_path: Path, quick: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    config = reference.copy(tmp_path)
    before = small_run.attempts(tmp_path / "storage")
    damage_file(
        small_run.artifact(tmp_path / "storage", "meat/a/evaluate", "x").parents[1]
        / "manifest.json",
        harm,
    )
    assert cli.main(["run", config]) == 0
    assert (
        harm == "remove"
        or "meat/a/evaluate: damaged: manifest.json is not as it was written"
        in capsys.readouterr().out
    )
    after = small_run.attempts(tmp_path / "storage")
    assert {i for i in after if after[i] != before[i]} == {"meat/a/evaluate"}
    assert small_run.results(tmp_path / "storage") == reference.expected


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("stage_id", "file"),
    [
        ("finetune/a/train", "carried.safetensors"),
        ("backbone", "state.safetensors"),
        ("data/b", shard_name("train", "5")),
        ("data/b", "index.parquet"),
    ],
)
def test_damage_found_by_a_worker_recomputes_the_damaged_stage(
    stage_id: str,
    file: str,
    reference: Any,
    tmp_path: Path,
    quick: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The file is damaged after the driver checked it. The stage that reads the file reports this,
    and the stage that wrote it runs again."""
    config = reference.copy(tmp_path)
    storage = tmp_path / "storage"
    for stage in ("finetune/b/train", "finetune/b/evaluate"):
        shutil.rmtree(storage / "stages" / small_run.manifests(storage)[stage]["key"])
    shutil.rmtree(storage / "cache")
    before = small_run.attempts(storage)

    def then_it_goes_bad(*arguments: Any) -> Any:
        lookups = look_up_all(*arguments)
        damage_file(small_run.artifact(storage, stage_id, file), "flip")
        return lookups

    monkeypatch.setattr(app, "look_up_all", then_it_goes_bad)
    assert cli.main(["run", config]) == 0
    after = small_run.attempts(storage)
    assert {i for i in after if after[i] != before.get(i)} == {
        stage_id,
        "finetune/b/train",
        "finetune/b/evaluate",
    }
    assert small_run.results(storage) == reference.expected
    assert file in capsys.readouterr().out or stage_id == "data/b"


# ---- the same command again, and a longer stream -------------------------------------------------
def test_repeated_command_runs_nothing_and_says_so(
    reference: Any, tmp_path: Path, quick: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    config = reference.copy(tmp_path)
    before = small_run.attempts(tmp_path / "storage")
    assert cli.main(["run", config]) == 0
    output = capsys.readouterr().out
    assert f"nothing to do: all {len(before)} stage results are up to date" in output
    assert small_run.attempts(tmp_path / "storage") == before


def without_data(storage: Path, folder: Path, names: str) -> None:
    """Delete the raw data and the shards of some cards."""
    for name in names:
        shutil.rmtree(folder / "raw" / name)
        shutil.rmtree(storage / "stages" / small_run.manifests(storage)[f"data/{name}"]["key"])
    shutil.rmtree(storage / "cache")


@pytest.mark.few(1)
@pytest.mark.parametrize("gone", ["", "a", "ab"])
def test_only_the_appended_task_runs_even_without_older_data(
    gone: str, tmp_path: Path, quick: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a star, tasks a and b are trained, their data may be deleted, and task c is appended."""
    cards = small_run.make_cards(tmp_path, "ab")
    config = small_run.write_config(
        tmp_path / "config.yaml", small_run.make_body(tmp_path, cards, ["meat"])
    )
    assert cli.main(["run", config]) == 0
    storage, before = tmp_path / "storage", small_run.attempts(tmp_path / "storage")
    results = small_run.results(storage)
    if gone:
        without_data(storage, tmp_path, gone)
    assert cli.main(["run", config]) == 0, "results must stay valid without their data"
    assert "nothing to do" in capsys.readouterr().out
    cards |= small_run.make_cards(tmp_path, "c")
    small_run.write_config(tmp_path / "config.yaml", small_run.make_body(tmp_path, cards, ["meat"]))
    assert cli.main(["run", config]) == 0
    after = small_run.attempts(storage)
    assert {i for i in after if after[i] != before.get(i)} == {
        "data/c",
        "meat/c/train",
        "meat/c/evaluate",
        "report",
    }
    for stage_id, result in small_run.results(storage).items():
        assert results.get(stage_id, result) == result
    assert cli.main(["run", config]) == 0
    assert "nothing to do" in capsys.readouterr().out


def test_classes_read_from_a_deleted_source_stay_known(
    tmp_path: Path, quick: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    card = small_run.make_card(tmp_path, "a", "23", num_classes=2)
    text = Path(card).read_text()
    assert "classes:\n- '2'\n- '3'\n" in text
    Path(card).write_text(text.replace("classes:\n- '2'\n- '3'\n", "classes: from_source\n"))
    config = small_run.write_config(
        tmp_path / "config.yaml", small_run.make_body(tmp_path, {"a": card}, ["meat"])
    )
    assert cli.main(["run", config]) == 0
    shutil.rmtree(tmp_path / "raw")
    capsys.readouterr()
    assert cli.main(["run", config]) == 0
    assert "nothing to do" in capsys.readouterr().out


def test_chain_continues_without_data_of_older_tasks(
    tmp_path: Path, quick: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    cards = small_run.make_cards(tmp_path, "ab")
    config = small_run.write_config(
        tmp_path / "config.yaml", small_run.make_body(tmp_path, cards, ["finetune"])
    )
    assert cli.main(["run", config]) == 0
    storage, before = tmp_path / "storage", small_run.attempts(tmp_path / "storage")
    shutil.copytree(tmp_path / "raw" / "a", tmp_path / "saved")
    without_data(storage, tmp_path, "a")
    cards |= small_run.make_cards(tmp_path, "c")
    small_run.write_config(
        tmp_path / "config.yaml", small_run.make_body(tmp_path, cards, ["finetune"])
    )
    capsys.readouterr()
    assert cli.main(["run", config]) == 0
    last = capsys.readouterr().out.splitlines()
    row = next(line.split() for line in last if line.split()[:1] == ["c"])
    assert row[1] == "."
    assert "." not in (row[2], row[3])
    after = small_run.attempts(storage)
    assert {i for i in after if after[i] != before.get(i)} == {
        "data/c",
        "finetune/c/train",
        "finetune/c/evaluate",
        "report",
    }
    assert [r["task"] for r in small_run.results(storage)["finetune/c/evaluate"]["rows"]] == [
        "b",
        "c",
    ]
    shutil.copytree(tmp_path / "saved", tmp_path / "raw" / "a")
    assert cli.main(["run", config]) == 0
    assert [r["task"] for r in small_run.results(storage)["finetune/c/evaluate"]["rows"]] == [
        "a",
        "b",
        "c",
    ], "the data is back"


def test_training_on_deleted_data_fails_with_one_line_error(
    tmp_path: Path, quick: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    cards = small_run.make_cards(tmp_path, "ab")
    config = small_run.write_config(
        tmp_path / "config.yaml", small_run.make_body(tmp_path, cards, ["joint"])
    )
    assert cli.main(["run", config]) == 0
    without_data(tmp_path / "storage", tmp_path, "a")
    cards |= small_run.make_cards(tmp_path, "c")
    small_run.write_config(
        tmp_path / "config.yaml", small_run.make_body(tmp_path, cards, ["joint"])
    )
    capsys.readouterr()
    assert cli.main(["run", config]) == 2
    output = capsys.readouterr().err
    assert "stage data/a failed: card 'a': its source" in output
    assert len(output.splitlines()) == 1


@pytest.mark.few(1)
@pytest.mark.parametrize("harm", ["flip", "truncate"])
def test_damaged_data_without_source_is_not_deleted(
    harm: str, tmp_path: Path, quick: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    cards = small_run.make_cards(tmp_path, "ab")
    config = small_run.write_config(
        tmp_path / "config.yaml", small_run.make_body(tmp_path, cards, ["finetune"])
    )
    assert cli.main(["run", config]) == 0
    storage = tmp_path / "storage"
    shard = small_run.artifact(storage, "data/a", shard_name("test", "2"))
    shutil.rmtree(tmp_path / "raw" / "a")
    damage_file(shard, harm)
    cards |= small_run.make_cards(tmp_path, "c")
    small_run.write_config(
        tmp_path / "config.yaml", small_run.make_body(tmp_path, cards, ["finetune"])
    )
    assert cli.main(["run", config]) == 2
    assert "its source" in capsys.readouterr().err
    assert shard.exists()
    assert cli.main(["run", config]) == 0, "after the failure, the data must count as missing"
