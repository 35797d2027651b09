"""Tests of streams in which classes return: slices of images, one head, and shared exemplars."""

from __future__ import annotations

import dataclasses
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import torch
import yaml
from PIL import Image
from sklearn.datasets import load_digits

from pipeline.testing.lab import OPTIMIZERS, SETTINGS, Lab, Run
from workers.data.rows import _select_own, select
from workers.errors import UserError
from workers.job import Task
from workers.methods import METHODS
from workers.methods.bases.rehearsal import MEMORY
from workers.methods.gdumb import GdumbSettings
from workers.serving.bundle import Bundle
from workers.serving.measuring import with_measurements
from workers.serving.reference import load_reference
from workers.storage.taskstate import Carried

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


def run_of(
    lab: Lab, card: str, method: str, settings: dict[str, Any] | None = None, **slices: Any
) -> Run:
    slices = slices or {"kind": "repeating", "tasks": 3, "classes": 3}
    return lab.run_of(
        method,
        {**OPTIMIZERS["adamw"], "epochs": 2},
        order=NAMES,
        settings=SETTINGS.get((method, "adamw"), {}) | (settings or {}),
        stream={"scenario": "domain", "tasks": [{"card": card, "slices": slices}]},
    )


@pytest.mark.few(3)
@pytest.mark.parametrize("name", SHARED)
def test_method_learns_slices_with_returning_classes(lab: Lab, card: str, name: str) -> None:
    run = run_of(lab, card, name)
    rows = run.evaluated(2)["rows"]
    assert [row["task"] for row in rows] == list(NAMES)
    assert sum(row["total"] for row in rows) == 40
    images = run.images(0)
    with torch.no_grad():
        assert run.served(2).logits(images, NAMES[0]).shape == (len(images), 4)


@pytest.mark.parametrize("splits", [("train", "val"), ("test",)])
@pytest.mark.parametrize("kind", [{"kind": "repeating", "classes": 3}, {"kind": "blurry"}])
def test_each_image_is_in_exactly_one_slice(lab: Lab, card: str, kind: Any, splits: Any) -> None:
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
    empty = dataclasses.replace(task, parts=tuple((name, 0.0, 0.01) for name in task.shares))
    with pytest.raises(UserError, match=r"'cut-0' has no train images.*make fewer slices"):
        select(str(lab.store.root), (empty,), "train", 0.0)


def test_bundle_of_a_sliced_stream_has_reference_measurements(lab: Lab, card: str) -> None:
    """A slice that lacks a class has no mean of that class."""
    run = run_of(lab, card, "er")
    last = run.evaluate_job(2)
    run.evaluated(2)
    bundle = with_measurements(Bundle.of_job(last))
    reference = load_reference(bundle)
    assert not reference.missing
    assert [len(task.means) for task in reference.tasks.values()] == [3] * 3
    assert len({*last.tasks}) == 3, "tasks are hashable"


def test_validation_split_is_made_per_whole_class(lab: Lab, card: str) -> None:
    """The split is made per whole class, so that a small part of a class is not halved."""
    slices: dict[str, Any] = {"kind": "blurry", "tasks": 3, "blur": 0.5, "disjoint": 0.0}
    tasks = run_of(lab, card, "finetune", **slices).stages(2)[0].tasks
    whole = dataclasses.replace(tasks[0], parts=None)
    held_out = [key for key, _ in rows_of(lab, whole, ("val",))]
    found = []
    for task in tasks:
        rows = rows_of(lab, task, ("train", "val"))
        found += [key for key, _ in rows if key in held_out]
        assert {key for key, _ in rows_of(lab, task, ("train",))}.isdisjoint(held_out)
    assert sorted(found) == sorted(held_out)


def test_copies_of_an_image_are_in_one_slice() -> None:
    rows = pa.table(
        {
            "class": ["a"] * 6 + ["b"],
            "sha256": ["1", "2", "2", "2", "3", "4", "2"],
            "key": [*"uvwxyzq"],
        }
    )
    shards: Any = SimpleNamespace(select=lambda split, classes: rows)
    parts = [(("a", 0.0, 0.5), ("b", 0.0, 1.0)), (("a", 0.5, 1.0),)]
    keys = []
    for part in parts:
        task = Task("t", "c", "d", ("a", "b"), parts=part)
        keys.append("".join(_select_own(shards, task, "test")["key"].to_pylist()))
    assert keys == ["uvwxq", "yz"]


# ---- methods -------------------------------------------------------------------------------------
def memory_of(run: Run, task: int) -> dict[str, dict[str, list[str]]]:
    """Return the exemplars after a task, by task and class."""
    artifact = run.artifact(next(job for job in run.stages(task) if job.step == "herd"))
    assert artifact is not None
    carried = Carried.from_bytes(artifact.read("carried.safetensors"))
    memory: dict[str, dict[str, list[str]]] = carried.meta[MEMORY]
    return memory


def test_slices_share_the_exemplars_of_a_class(lab: Lab, card: str) -> None:
    slices = {"kind": "blurry", "tasks": 3, "blur": 0.4, "disjoint": 0.0}
    run = run_of(lab, card, "replay", {"memory": 40}, **slices)
    for task in (1, 2):
        counts: Counter[str] = Counter()
        for classes in memory_of(run, task).values():
            counts.update({name: len(keys) for name, keys in classes.items()})
        assert counts.keys() == {*"0123"}
        assert all(8 <= count <= 10 for count in counts.values()), counts
    # after two tasks, no room is left unused for later parts of a class
    assert (
        sum(len(keys) for classes in memory_of(run, 1).values() for keys in classes.values()) > 33
    )


def test_gdumb_balances_classes_over_slices() -> None:
    keys = {"x": {"a": 100, "b": 90}, "y": {"b": 5, "c": 100}, "z": {"b": 5, "d": 100}}
    tasks = tuple(
        Task(name, "c", "d", (*"abcd",), parts=tuple((label, 0.0, 1.0) for label in labels))
        for name, labels in keys.items()
    )
    method = METHODS["gdumb"].__new__(METHODS["gdumb"])
    vars(method).update(settings=GdumbSettings(memory=60), seed=0)
    data = SimpleNamespace(
        keys=lambda task: {
            label: [f"{task.name}/{label}/{i}" for i in range(count)]
            for label, count in keys[task.name].items()
        }
    )
    context: Any = SimpleNamespace(stream=tasks, data=data)
    memory: Any = method
    kept = [key for names in memory.memory(context).values() for key in names]
    assert Counter(key.split("/")[1] for key in kept) == dict.fromkeys("abcd", 15)


def test_memory_counts_a_class_of_several_slices_once(lab: Lab, card: str) -> None:
    run_of(lab, card, "replay", {"memory": 4})
    with pytest.raises(UserError, match="memory is 3, and the stream has 4 classes"):
        run_of(lab, card, "replay", {"memory": 3})


def test_er_ace_gives_absent_classes_no_gradient(lab: Lab, card: str) -> None:
    """The first term of the loss compares only the classes in the slice."""
    run = run_of(lab, card, "er_ace")
    job = run.stages(2)[0]
    assert job.task is not None
    method: Any = run.live(2)
    absent = [name not in job.task.shares for name in job.task.classes]
    assert sum(absent) == 1
    features = torch.randn(5, method.heads.width)
    labels = torch.tensor([absent.index(False)] * 5)
    method.features = lambda images: features
    batch: Any = SimpleNamespace(images=None, labels=labels)
    method.requires_grad_(True).zero_grad()
    loss, _ = method.loss(batch, None)
    loss.backward()
    gradient = method.heads[job.task.name].weight.grad
    assert (gradient[torch.tensor(absent)] == 0).all()
    assert (gradient[~torch.tensor(absent)] != 0).any(1).all()
    assert method.competing_outputs() == 3
