"""Tests of data with their own validation images, which select the epoch and evaluate searches."""

from __future__ import annotations

import io
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from pipeline import cli
from pipeline.config.settings import load
from pipeline.graph.build import build_graph
from pipeline.graph.store import Store
from tests import small_run
from tests.small_run import make_body, write_config
from workers.data.rows import has_validation, select
from workers.errors import UserError
from workers.storage.artifact import Artifact

pytestmark = pytest.mark.usefixtures("quick")
LABELS = "0123"


def write_data(folder: Path, with_val: str = LABELS) -> str:
    """Write digits and a card; return its path. A class has 10 train, 4 val and 4 test images.

    Args:
        folder: Folder to write into.
        with_val: Classes that have validation images.
    """
    card = small_run.make_card(folder, "digits", LABELS, 14, 4)
    for label in LABELS:
        train = sorted((folder / "raw/digits/train" / label).iterdir())
        val = folder / "raw/digits/val" / label
        for path in train[10:]:
            if label in with_val:
                val.mkdir(parents=True, exist_ok=True)
                path.rename(val / path.name)
            else:
                path.unlink()
    body = yaml.safe_load(Path(card).read_text())
    body["source"]["splits"] = {"train": "train", "val": "val", "test": "test"}
    Path(card).write_text(yaml.safe_dump(body))
    return card


def write_run(folder: Path, card: str, val_fraction: float = 0.0, keep: str = "best") -> str:
    """Write a config with two tasks of two digits each; return its path."""
    tasks = [
        {"name": "low", "card": card, "classes": ["0", "1"], "role": "base"},
        {"name": "high", "card": card, "classes": ["2", "3"]},
    ]
    train = {"epochs": 2, "batch_size": 16, "keep": keep}
    body = make_body(folder, {}, {"linear": {}}, stream={"tasks": tasks}, train=train)
    body["data"] = {"val_fraction": val_fraction}
    return write_config(folder / "config.yaml", body)


def test_own_validation_selects_epoch_and_keeps_train_complete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_run(tmp_path, write_data(tmp_path))
    assert cli.main(["plan", config]) == 0
    assert "tasks with validation images in their data: low, high; " in capsys.readouterr().out
    assert cli.main(["run", config]) == 0
    root = Store(str(tmp_path / "storage")).root
    manifests = small_run.manifests(tmp_path / "storage")
    assert manifests["data/digits"]["counts"] == {"train": 40, "val": 16, "test": 16}
    for stage in ("backbone", "linear/high/train"):
        manifest = manifests[stage]
        assert manifest["length"]["images"] == 20
        history = Artifact.need(root, manifest["key"]).read("history.parquet")
        assert {row["val_total"] for row in pq.read_table(io.BytesIO(history)).to_pylist()} == {8}


def test_task_without_own_validation_holds_out_train_images(tmp_path: Path) -> None:
    config = write_run(tmp_path, write_data(tmp_path, "01"), 0.2)
    assert cli.main(["ingest", config]) == 0
    root = str(tmp_path / "storage")
    store = Store(root)
    root = store.root
    _, tasks = build_graph(load(config), store)
    sizes = {
        task.name: [len(select(root, (task,), split, 0.2)) for split in ("train", "val")]
        for task in tasks
    }
    assert sizes == {"low": [20, 8], "high": [16, 4]}
    assert [has_validation(root, task, 0.0) for task in tasks] == [True, False]


def test_task_without_validation_keeps_last_epoch(tmp_path: Path) -> None:
    config = write_run(tmp_path, write_data(tmp_path, "01"), keep="last")
    assert cli.main(["run", config]) == 0


def test_search_is_evaluated_on_own_validation(tmp_path: Path) -> None:
    card = write_data(tmp_path)
    config = load(write_run(tmp_path, card))
    graph, _ = build_graph(config, Store(str(tmp_path / "storage")), split="val")
    evaluations = [stage for stage in graph if stage.step == "evaluate"]
    assert evaluations
    body = yaml.safe_load(Path(card).read_text())
    del body["source"]["splits"]["val"]
    Path(card).write_text(yaml.safe_dump(body))
    without = load(write_run(tmp_path, card, keep="last"))
    with pytest.raises(UserError, match=r"data\.val_fraction of method 'linear' is 0"):
        build_graph(without, Store(str(tmp_path / "storage")), split="val")


def test_pretrained_task_needs_no_validation_images_for_the_best_epoch(tmp_path: Path) -> None:
    """No epoch is trained on it, unlike on a base task without validation images."""
    weights = tmp_path / "weights.safetensors"
    weights.touch()
    path = Path(write_run(tmp_path, write_data(tmp_path, "23")))
    body = yaml.safe_load(path.read_text())
    old = small_run.make_card(tmp_path, "old", "01", 4, 4)  # a card without validation images
    for role in ("base", "pretrained"):
        body["stream"]["tasks"][0] = {"name": "low", "card": old, "role": role}
        body["backbone"]["weights"] = str(weights)
        path.write_text(yaml.safe_dump(body))
        config, store = load(str(path)), Store(str(tmp_path / "storage"))
        if role == "base":
            with pytest.raises(UserError, match="the best epoch is chosen on validation images"):
                build_graph(config, store)
        else:
            build_graph(config, store)


def test_copies_of_train_images_in_val_are_refused(tmp_path: Path) -> None:
    card = write_data(tmp_path)
    for path in (tmp_path / "raw/digits/train/0").iterdir():
        (tmp_path / "raw/digits/val/0" / path.name).write_bytes(path.read_bytes())
    config = write_run(tmp_path, card)
    assert cli.main(["ingest", config]) == 2
