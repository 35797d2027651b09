"""Rehearsal: one memory for any number of ranks, which samples a step trains on, and what of the past it can look at."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from laboratory import OPTIMIZERS, TASKS, Lab, Run, again, on_ranks, small_batches
from torch.nn import functional as F

from workers.artefact import Artefact
from workers.data.feed import Feed
from workers.dist import Group
from workers.errors import UserError
from workers.job import Task
from workers.methods import METHODS
from workers.methods.rehearsal import Rehearsal, RehearsalSettings
from workers.model.exemplars import SELECTIONS
from workers.taskstate import Carried

REHEARSAL = sorted(name for name, cls in METHODS.items() if issubclass(cls, Rehearsal))
QUICK = {**OPTIMIZERS["adamw"], "epochs": 1}


def run_of(lab: Lab, method: str = "replay", **settings: Any) -> Run:
    return lab.run_of(method, QUICK, methods={method: settings})


def counts(carried: Carried) -> dict[str, list[int]]:
    return {name: [len(keys) for keys in classes.values()] for name, classes in carried.meta["memory"].items()}


# ---- how many --------------------------------------------------------------------------------------------------------------------
def test_a_memory_is_shared_equally_and_never_grows_beyond_its_size(lab: Lab):
    run = run_of(lab, memory=14)
    assert [counts(run.carried(task)) for task in (0, 1)] == [{"two": [7, 7]}, {"two": [2, 2], "three": [2, 2, 2]}]


def test_a_class_with_fewer_images_than_its_share_keeps_them_all(lab: Lab):
    assert counts(run_of(lab, memory=2000).carried(1)) == {"two": [36, 36], "three": [36, 36, 36]}


def test_a_share_for_each_class_does_not_shrink(lab: Lab):
    run = run_of(lab, per_class=3, memory=1)
    assert [counts(run.carried(task)) for task in (0, 1)] == [{"two": [3, 3]}, {"two": [3, 3], "three": [3, 3, 3]}]


@pytest.mark.parametrize("method", REHEARSAL)
def test_every_method_keeps_to_its_memory_and_shortens_lists_from_the_end(lab: Lab, method: str):
    run = run_of(lab, method, memory=17, per_class=0)
    first, second = (run.carried(task).meta["memory"] for task in (0, 1))
    assert sum(len(keys) for classes in first.values() for keys in classes.values()) <= 17
    assert sum(len(keys) for classes in second.values() for keys in classes.values()) <= 17
    assert {*second} == {*TASKS}
    for name, keys in second["two"].items():
        assert keys == first["two"][name][: len(keys)]


def test_a_memory_without_room_for_each_class_is_refused():
    tasks = (Task("a", "card", "", ("x", "y")), Task("b", "card", "", ("z",)))
    with pytest.raises(UserError, match="memory is 2, and the stream has 3 classes, so that none would keep an exemplar; give it 3 or more, or set per_class"):
        METHODS["replay"].fits(RehearsalSettings(memory=2), torch.nn.Identity(), tasks)
    METHODS["replay"].fits(RehearsalSettings(memory=2, per_class=1), torch.nn.Identity(), tasks)
    METHODS["replay"].fits(RehearsalSettings(memory=3), torch.nn.Identity(), tasks)


# ---- which -----------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("selection", SELECTIONS)
def test_exemplars_are_what_the_rule_chooses_by_the_trained_networks_features_without_augmentation(lab: Lab, selection: str):
    run = lab.run_of("replay", QUICK, data={"crop": "pad", "flip": 0.5}, methods={"replay": {"memory": 10, "selection": selection}})
    chosen = run.carried(0).meta["memory"]["two"]
    method = run.served(0)
    train, herd = run.stages(0)
    assert herd.task is not None
    batches = list(Feed(train, (herd.task,), "train", Group(), training=False).evaluate())
    keys = [key for b in batches for key in b.keys or []]
    labels = torch.cat([b.labels for b in batches])
    with torch.no_grad():
        features = torch.cat([method.features(b.images) for b in batches])
    for label, name in enumerate(herd.task.classes):
        rows = sorted((labels == label).nonzero().squeeze(1).tolist(), key=keys.__getitem__)
        if selection == "random":
            assert len({*chosen[name]}) == 5
            assert {*chosen[name]} < {keys[row] for row in rows}
            assert chosen[name] != sorted(chosen[name])
        else:
            picked = SELECTIONS[selection](features[rows], 5, torch.Generator())
            assert chosen[name] == [keys[rows[place]] for place in picked]


@pytest.mark.parametrize("world", [2, 4])
def test_any_number_of_ranks_keeps_the_same_exemplars(lab: Lab, tmp_path: Path, world: int):
    """By the same weights: every rank looks at its share of the images, and all choose from all (C13)."""
    run = run_of(lab, "icarl", memory=20)
    run.trained(1)
    herd = run.stages(1)[-1]
    with small_batches():
        alone = run.lab.stage(again(herd, f"alone {world}"))
    on_ranks([again(herd, f"ranks {world}")], world, tmp_path / "ranks")
    assert Artefact.need(herd.root, f"{herd.key}-ranks {world}").read("carried.safetensors") == alone.read("carried.safetensors")


def test_a_whole_task_on_several_ranks_ends_with_the_same_exemplars_and_as_many_right(lab: Lab, tmp_path: Path):
    run = run_of(lab, "replay", memory=20)
    train, herd = run.stages(1)
    evaluate = run.evaluate_job(1)
    before = run.evaluated(1)["rows"]
    jobs = [again(train, "many")]
    jobs.append(again(herd, "many", previous={"train": jobs[0].key}))
    jobs.append(again(evaluate, "many", previous={"herd": jobs[1].key}, states={**evaluate.states, "three": jobs[1].key}))
    on_ranks(jobs, 2, tmp_path / "ranks")
    memory = Carried.from_bytes(Artefact.need(herd.root, jobs[1].key).read("carried.safetensors")).meta["memory"]
    assert memory == run.carried(1).meta["memory"]
    rows = Artefact.need(evaluate.root, jobs[2].key).manifest["result"]["rows"]
    for row, old in zip(rows, before, strict=True):
        assert abs(row["correct"] - old["correct"]) <= 1


def test_the_size_of_the_memory_is_not_in_the_first_tasks_training(lab: Lab):
    """C17: nothing is remembered yet."""
    small, large = (run_of(lab, memory=memory) for memory in (10, 20))
    first, second = ([[job.key for job in run.stages(task)] for run in (small, large)] for task in (0, 1))
    assert first[0][0] == first[1][0]
    assert first[0][1] != first[1][1]
    assert second[0][0] != second[1][0]


# ---- what a step trains on ---------------------------------------------------------------------------------------------------------
def test_training_sees_the_task_whole_and_of_earlier_ones_the_exemplars_alone(lab: Lab):
    run = run_of(lab, memory=10)
    kept = run.carried(0)
    train = run.stages(1)[0]
    assert train.task is not None
    remembered = run.fresh(1).memory(train.task, "train", kept)
    assert {name: len(keys) for name, keys in remembered.items()} == {"two": 10}
    rows = run.trained(1)
    assert rows is not None
    epochs = [row for row in history_of(run, 1) if "images" in row]
    assert epochs[0]["images"] == 10 + 3 * 36


def history_of(run: Run, task: int) -> list[dict[str, Any]]:
    from laboratory import history

    return history(run.artefact(run.stages(task)[0]))


def test_the_loss_of_replay_is_cross_entropy_over_all_classes(lab: Lab):
    run = run_of(lab, memory=10)
    run.trained(1)
    method = run.live(1) if run.stages(1)[0].key in run.lab.live else run.lab.live[run.stages(1)[-1].key]
    assert method.scenario == "class"
    assert list(method.columns()) == ["two", "three"]


def test_targets_that_are_mixed_lie_over_all_classes_of_the_stream(lab: Lab):
    """A batch of a task and of exemplars has one output space, in which samples of different tasks are mixed."""
    run = lab.run_of("replay", QUICK, data={"mixup": 0.8, "smoothing": 0.1}, methods={"replay": {"memory": 10}})
    train = run.stages(1)[0]
    kept = run.carried(0).meta["memory"]["two"]
    assert train.task is not None
    feed = Feed(train, train.tasks, "train", Group(), True, {"two": [key for keys in kept.values() for key in keys]})
    (first,) = next(feed.epoch(0))
    assert first.targets is not None
    assert first.targets.shape == (16, 5)
    assert torch.allclose(first.targets.sum(1), torch.ones(16))
    assert (first.tasks == 0).any()
    places = first.labels + 2 * first.tasks
    heavy = first.targets.argsort(dim=1, descending=True)[:, :2]
    assert ((heavy == places[:, None]).any(1)).all(), "each sample's own class is one of the two that it is made of"
    other = Feed(replace(train, scenario="task"), train.tasks, "train", Group(), True, {"two": [key for keys in kept.values() for key in keys]})
    assert next(other.epoch(0))[0].targets is None
    assert F.one_hot(places, 5).shape == first.targets.shape
