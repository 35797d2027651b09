"""Tasks whose classes come back: each image is in one task, and one head learns them all."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import yaml
from PIL import Image
from sklearn.datasets import load_digits

from pipeline.testing.lab import OPTIMIZERS, SETTINGS, Lab, Run
from workers.data.rows import select
from workers.errors import UserError
from workers.job import Task
from workers.methods import METHODS

SHARED = [name for name, method in METHODS.items() if method.shares_head]
NAMES = ("cut-0", "cut-1", "cut-2")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("slices"))


@pytest.fixture(scope="module")
def card(lab: Lab) -> str:
    """Write a card with four digits, 20 train and 10 test images each, and return its path."""
    pixels, labels = load_digits(return_X_y=True)
    for name in "0123":
        for i, row in enumerate(pixels[labels == int(name)][:30]):
            target = lab.folder / "cut" / ("train" if i < 20 else "test") / name
            target.mkdir(parents=True, exist_ok=True)
            Image.fromarray((row.reshape(8, 8) * 15).astype("uint8")).save(target / f"{i:03d}.png")
    path = lab.folder / "cut.yaml"
    source = {"format": "folder", "path": str(lab.folder / "cut")}
    body = {"name": "cut", "licence": "CC BY 4.0", "source": source, "classes": [*"0123"]}
    path.write_text(yaml.safe_dump(body))
    return str(path)


def run_of(lab: Lab, card: str, method: str, **slices: Any) -> Run:
    slices = slices or {"kind": "repeating", "tasks": 3, "classes": 3}
    return lab.run_of(
        method,
        {**OPTIMIZERS["adamw"], "epochs": 2},
        order=NAMES,
        settings=SETTINGS.get((method, "adamw"), {}),
        stream={"scenario": "domain", "tasks": [{"card": card, "slices": slices}]},
    )


@pytest.mark.few(3)
@pytest.mark.parametrize("name", SHARED)
def test_a_method_learns_slices_with_classes_that_come_back(lab: Lab, card: str, name: str) -> None:
    run = run_of(lab, card, name)
    rows = run.evaluated(2)["rows"]
    assert [row["task"] for row in rows] == list(NAMES)
    assert sum(row["total"] for row in rows) == 40
    images = run.images(0)
    with torch.no_grad():
        assert run.served(2).logits(images, NAMES[0]).shape == (len(images), 4)


@pytest.mark.parametrize("splits", [("train", "val"), ("test",)])
@pytest.mark.parametrize("kind", [{"kind": "repeating", "classes": 3}, {"kind": "blurry"}])
def test_each_image_is_in_one_slice(lab: Lab, card: str, kind: Any, splits: Any) -> None:
    run = run_of(lab, card, "finetune", tasks=3, **kind)
    tasks = run.stages(2)[0].tasks
    whole = dataclasses.replace(tasks[0], parts=None)
    expected = rows_of(lab, whole, splits)
    assert len(expected) == (40 if splits == ("test",) else 80)
    rows = [row for task in tasks for row in rows_of(lab, task, splits)]
    assert sorted(rows) == sorted(expected)
    for task in tasks:
        assert {label for _, label in rows_of(lab, task, splits)} <= {*task.shares}


def rows_of(lab: Lab, task: Task, splits: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return the key and the class of each image of a task in some splits."""
    tables = [select(str(lab.store.root), (task,), split, 0.1) for split in splits]
    return [
        (key, task.classes[label])
        for table in tables
        for key, label in zip(table.table["key"].to_pylist(), table.labels, strict=True)
    ]


def test_a_slice_without_images_is_refused(lab: Lab, card: str) -> None:
    task = run_of(lab, card, "finetune").stages(2)[0].tasks[0]
    empty = dataclasses.replace(task, parts=dict.fromkeys(task.shares, (0.0, 0.01)))
    with pytest.raises(UserError, match=r"'cut-0' has no train images.*make fewer slices"):
        select(str(lab.store.root), (empty,), "train", 0.0)
