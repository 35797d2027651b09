"""Tests of scenario `domain`: tasks with the same classes, and answers without the task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image
from serving import Finished
from sklearn.datasets import load_digits
from torch.nn import functional as F

from pipeline.testing.lab import OPTIMIZERS, SETTINGS, Lab, Run
from workers.data.feed import Feed
from workers.evaluate import answers
from workers.methods import METHODS
from workers.methods.ranpac import solve_ridge
from workers.serving.bundle import Bundle

CLASSES = ("0", "1", "2")
DOMAINS = [name for name, method in METHODS.items() if "domain" in method.scenarios]
SHARED = [name for name in DOMAINS if METHODS[name].shares_head]
NAMES = ("two", "three")  # the tasks: digits, and digits turned by 90 degrees


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("domains"))


def make_card(folder: Path, quarters: int) -> str:
    """Write a card of digits turned by `quarters` times 90 degrees; return its path."""
    root = folder / f"turned-{quarters}"
    pixels, labels = load_digits(return_X_y=True)
    for name in CLASSES:
        for i, row in enumerate(pixels[labels == int(name)][:30]):
            split = "train" if i < 20 else "test"
            target = root / split / name
            target.mkdir(parents=True, exist_ok=True)
            image = Image.fromarray((row.reshape(8, 8) * 15).astype("uint8"))
            image.rotate(90 * quarters).save(target / f"{i:03d}.png")
    path = folder / f"turned-{quarters}.yaml"
    # the second card lists the classes in another order
    classes = list(CLASSES if not quarters else reversed(CLASSES))
    source = {"format": "folder", "path": str(root)}
    body = {"name": root.name, "licence": "CC BY 4.0", "source": source, "classes": classes}
    path.write_text(yaml.safe_dump(body))
    return str(path)


def run_of(lab: Lab, method: str, measure_next: bool = False, **settings: Any) -> Run:
    """Return the run of a method on both domains, with one epoch each."""
    cards = [make_card(lab.folder, quarters) for quarters in (0, 1)]
    tasks = [{"card": card, "name": name} for card, name in zip(cards, NAMES, strict=True)]
    return lab.run_of(
        method,
        {**OPTIMIZERS["adamw"], "epochs": 1},
        settings={**SETTINGS.get((method, "adamw"), {}), **settings},
        stream={"scenario": "domain", "tasks": tasks, "measure_next": measure_next},
    )


def test_soft_targets_cover_the_classes_shared_by_all_tasks(lab: Lab) -> None:
    """Uses joint training, because its feed has both tasks."""
    cards = [make_card(lab.folder, quarters) for quarters in (0, 1)]
    tasks = [{"card": card, "name": name} for card, name in zip(cards, NAMES, strict=True)]
    run = lab.run_of(
        "joint",
        {**OPTIMIZERS["adamw"], "epochs": 1},
        settings={},
        data={"smoothing": 0.3},
        stream={"scenario": "domain", "tasks": tasks},
    )
    (job,) = run.stages(1)
    run.prepare(job)
    feed = Feed(job, job.tasks, "train", lab.group, training=True)
    (batch, *_) = next(iter(feed.epoch(0)))
    assert batch.targets is not None
    assert batch.targets.shape == (len(batch.images), 3)
    assert torch.allclose(batch.targets.amax(1), torch.tensor(0.8))
    assert torch.equal(batch.targets.argmax(1), batch.labels)
    assert {0, 1} == {*batch.tasks.tolist()}
    assert run.evaluated(1)["rows"]


@pytest.mark.few(4)
@pytest.mark.parametrize("name", DOMAINS)
def test_every_method_predicts_the_classes_shared_by_all_tasks(lab: Lab, name: str) -> None:
    run = run_of(lab, name)
    rows = run.evaluated(1)["rows"]
    assert [row["task"] for row in rows] == list(NAMES)
    assert ["correct_task_aware" in row for row in rows] == [name not in SHARED] * 2
    served = run.served(1)
    assert [task.classes for task in served.stream] == [CLASSES] * 2
    for task, row in enumerate(rows):
        images = run.images(task)
        with torch.no_grad():
            logits = answers(served, images, NAMES[task])
            told = served.logits(images, NAMES[task])
        assert logits.shape == told.shape == (30, 3)
        labels = torch.arange(3).repeat_interleave(10)
        assert row["total"] == 30
        assert row["correct"] == int((logits.argmax(1) == labels).sum())
        if name in SHARED:
            torch.testing.assert_close(logits, told, rtol=0, atol=0)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", SHARED)
def test_one_head_is_trained_on_all_domains(lab: Lab, name: str) -> None:
    served = run_of(lab, name).served(1)
    assert len(served.heads.layers) == 1 or name == "ranpac"
    heads = [served.heads[task] for task in NAMES]
    assert torch.equal(heads[0].weight, heads[1].weight)


@pytest.mark.parametrize("name", ["er", "simplecil", "s_prompts"])
def test_the_next_domain_is_measured_before_it_is_learned(lab: Lab, name: str) -> None:
    """Covers one head for all tasks, a head for each task, and a method that infers the task."""
    run = run_of(lab, name, measure_next=True)
    measured = run.evaluated(0)["next"]
    served = run.served(0)
    with torch.no_grad():
        logits = answers(served, run.images(1), NAMES[0])
    labels = torch.arange(3).repeat_interleave(10)
    correct = int((logits.argmax(1) == labels).sum())
    assert measured == {"task": "three", "correct": correct, "total": 30}
    assert "next" not in run.evaluated(1)
    without = run_of(lab, name)
    assert "next" not in without.evaluated(0)
    assert without.evaluated(1) == run.evaluated(1)


def test_separate_heads_are_combined_by_maximum_per_class(lab: Lab) -> None:
    run = run_of(lab, "simplecil")
    served: Any = run.served(1)
    images = run.images(0)
    with torch.no_grad():
        apart = torch.stack([served.logits(images, task) for task in NAMES])
        logits = answers(served, images, "two")
    assert torch.equal(logits, apart.amax(0))
    assert not torch.equal(logits, apart[0])


def test_ranpac_equals_ridge_regression_on_the_images_of_all_domains(lab: Lab) -> None:
    run = run_of(lab, "ranpac", projection=0, ridge=1.0)
    served: Any = run.served(1)
    gram = torch.zeros(32, 32, dtype=torch.float64)
    targets = torch.zeros(32, 3, dtype=torch.float64)
    for task in (0, 1):
        job = run.stages(task)[-1]
        features = run.artifact(job)  # runs the stage
        assert features is not None
        batch = served_features(run, task)
        gram += batch.features.double().T @ batch.features.double()
        targets += batch.features.double().T @ F.one_hot(batch.labels, 3).double()
    expected = solve_ridge(gram, targets, 1.0).float().T
    torch.testing.assert_close(served.heads["two"].weight, expected, rtol=1e-4, atol=1e-5)


def served_features(run: Run, task: int) -> Any:
    """Return the features of the train images of a task."""
    from workers.data.features import extract_features
    from workers.data.feed import Feed

    job = run.stages(task)[0]
    assert job.task is not None
    method: Any = run.fresh(task)
    feed = Feed(job, (job.task,), "train", run.lab.group, training=False)
    return extract_features(method.backbone, feed)


def test_a_memory_is_shared_by_the_classes_of_all_domains(lab: Lab) -> None:
    memory = run_of(lab, "replay", memory=12).carried(1).meta["memory"]
    counts = [len(keys) for classes in memory.values() for keys in classes.values()]
    assert counts == [2] * 6


def test_bundle_predicts_a_class_without_a_task(lab: Lab) -> None:
    for name in ("finetune", "ncm"):
        run = run_of(lab, name)
        job = run.evaluate_job(1)
        run.evaluated(1)
        finished = Finished(run, Bundle.of_job(job))
        images, classes = finished.images("three")
        found = finished.served.predict(images, None)
        assert {answer.task for answer in found} == {""}
        right = sum(answer.class_ == name for answer, name in zip(found, classes, strict=True))
        assert right == run.evaluated(1)["rows"][1]["correct"]
