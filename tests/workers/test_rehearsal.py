"""Rehearsal: one memory for any number of ranks, which samples a step trains on, and what of the
past it can look at."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from class_incremental_steps import START, A, B, batch, begun, moved, wide
from stage_lab import OPTIMIZERS, Lab, Run, again, history, on_ranks, small_batches
from step_contexts import step_context
from torch import Tensor
from torch.nn import functional as F

from workers import restore
from workers.data.feed import Feed
from workers.dist import Group
from workers.errors import UserError
from workers.job import StageJob, Task
from workers.methods import METHODS
from workers.methods.bases.rehearsal import Rehearsal, RehearsalSettings
from workers.model.exemplars import SELECTIONS
from workers.storage.artifact import Artifact
from workers.storage.taskstate import Carried, TaskState

REHEARSAL = sorted(name for name, cls in METHODS.items() if issubclass(cls, Rehearsal))
QUICK = {**OPTIMIZERS["adamw"], "epochs": 1}


def run_of(lab: Lab, method: str = "replay", **settings: Any) -> Run:
    return lab.run_of(method, QUICK, methods={method: settings})


def counts(carried: Carried) -> dict[str, list[int]]:
    return {
        name: [len(keys) for keys in classes.values()]
        for name, classes in carried.meta["memory"].items()
    }


# ---- how many ------------------------------------------------------------------------------------
def test_a_memory_is_shared_equally_and_never_grows_beyond_its_size(lab: Lab) -> None:
    run = run_of(lab, memory=14)
    assert [counts(run.carried(task)) for task in (0, 1)] == [
        {"two": [7, 7]},
        {"two": [2, 2], "three": [2, 2, 2]},
    ]


def test_a_class_with_fewer_images_than_its_share_keeps_them_all(lab: Lab) -> None:
    assert counts(run_of(lab, memory=2000).carried(1)) == {"two": [36, 36], "three": [36, 36, 36]}


def test_a_share_for_each_class_does_not_shrink(lab: Lab) -> None:
    run = run_of(lab, per_class=3, memory=1)
    assert [counts(run.carried(task)) for task in (0, 1)] == [
        {"two": [3, 3]},
        {"two": [3, 3], "three": [3, 3, 3]},
    ]


def three_tasks(lab: Lab, method: str, **settings: Any) -> Run:
    tasks = [
        {"card": str(lab.card), "name": name, "classes": list(classes)}
        for name, classes in (("x", "01"), ("y", "23"), ("z", "4"))
    ]
    run = lab.run_of(
        method, QUICK, methods={method: settings}, stream={"scenario": "class", "tasks": tasks}
    )
    run.order = ("x", "y", "z")
    return run


@pytest.mark.parametrize("method", REHEARSAL)
def test_every_method_keeps_to_its_memory_and_shortens_lists_from_the_end(
    lab: Lab, method: str
) -> None:
    """All that a task hands on counts, also what is remembered for another purpose than
    training."""
    run = three_tasks(
        lab, method, memory=17, per_class=0, **({"top_k": 1} if method == "ucir" else {})
    )
    memory_sizes = [
        {
            kind: memory
            for kind, memory in run.carried(task).meta.items()
            if kind in ("memory", "validation")
        }
        for task in range(3)
    ]
    for task, meta in enumerate(memory_sizes):
        assert {*meta["memory"]} == {*"xyz"[: task + 1]}
        every = [
            key
            for memory in meta.values()
            for classes in memory.values()
            for keys in classes.values()
            for key in keys
        ]
        assert len({*every}) == len(every) <= 17
        classes = (2, 4, 5)[task]
        assert len(every) == 17 // classes * classes, "as many as fit"
    for before, after in pairwise(memory_sizes):
        for kind, memory in before.items():
            assert all(
                after[kind][name][c] == keys[: len(after[kind][name][c])]
                for name, classes in memory.items()
                for c, keys in classes.items()
            )


def test_a_memory_without_room_for_each_class_is_refused() -> None:
    tasks = (Task("a", "card", "", ("x", "y")), Task("b", "card", "", ("z",)))
    with pytest.raises(
        UserError,
        match="memory is 2, and the stream has 3 classes, so that none would keep an exemplar; "
        "give it 3 or more, or set per_class",
    ):
        METHODS["replay"].check_backbone(RehearsalSettings(memory=2), torch.nn.Identity(), tasks)
    METHODS["replay"].check_backbone(
        RehearsalSettings(memory=2, per_class=1), torch.nn.Identity(), tasks
    )
    METHODS["replay"].check_backbone(RehearsalSettings(memory=3), torch.nn.Identity(), tasks)


# ---- which ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("selection", SELECTIONS)
def test_exemplars_are_what_the_rule_chooses_by_the_trained_networks_features_without_augmentation(
    lab: Lab, selection: str
) -> None:
    run = lab.run_of(
        "replay",
        QUICK,
        data={"crop": "pad", "flip": 0.5},
        methods={"replay": {"memory": 10, "selection": selection}},
    )
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
            assert chosen[name] == [keys[rows[index]] for index in picked]


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def ranked(
    lab: Lab, request: pytest.FixtureRequest
) -> dict[str, tuple[Run, list[StageJob], list[StageJob]]]:
    """All that is asked of so many ranks, in one start: method -> run, its stages, the same on
    ranks. Of `replay` the last herding alone."""
    runs_by_method: dict[str, tuple[Run, list[StageJob], list[StageJob]]] = {}
    for method in ("replay", "dytox", "icarl"):
        run = lab.run_of(
            method, {**OPTIMIZERS["sgd"], "epochs": 1}, methods={method: {"memory": 20}}
        )
        with small_batches():
            run.evaluated(1)
        stages, keys, jobs = (
            [*run.stages(0), *run.stages(1), run.evaluate_job(1)],
            dict[str, str](),
            list[StageJob](),
        )
        for job in stages if method != "replay" else stages[-2:-1]:
            parts = {
                name: {step: keys.get(key, key) for step, key in getattr(job, name).items()}
                for name in ("previous", "states")
            }
            jobs.append(again(job, f"{request.param} ranks", **parts))
            keys[job.key] = jobs[-1].key
        runs_by_method[method] = (
            run,
            stages[-1 - len(jobs) : -1] if method == "replay" else stages,
            jobs,
        )
    on_ranks(
        [job for _, _, jobs in runs_by_method.values() for job in jobs],
        request.param,
        lab.folder / f"rehearsal-{request.param}",
    )
    return runs_by_method


def test_any_number_of_ranks_keeps_the_same_exemplars(
    ranked: dict[str, tuple[Run, list[StageJob], list[StageJob]]],
) -> None:
    """By the same weights: every rank looks at its share of the images, and all choose from all
    (C13)."""
    _, (alone,), (many,) = ranked["replay"]
    assert Artifact.need(many.root, many.key).read("carried.safetensors") == Artifact.need(
        alone.root, alone.key
    ).read("carried.safetensors")


@pytest.mark.parametrize("method", ["dytox", "icarl"])
def test_a_stream_on_several_ranks_ends_with_the_same_exemplars_and_answers(
    ranked: dict[str, Any], method: str
) -> None:
    """All stages of both tasks, up to the order of summation (C13)."""
    run, alone, many = ranked[method]
    assert [job.step for job in many] == [job.step for job in alone]
    for one, other in zip(alone[:-1], many[:-1], strict=True):
        stage_results = [
            Carried.from_bytes(Artifact.need(job.root, job.key).read("carried.safetensors")).meta
            for job in (one, other)
        ]
        assert stage_results[0] == stage_results[1], one.id
    images = torch.cat([run.images(task) for task in (0, 1)])
    one, other = (
        restore.finished_method(job, Group()).logits(images, None) for job in (alone[-1], many[-1])
    )
    assert torch.allclose(one, other, atol=1e-3)
    for row, old in zip(
        Artifact.need(many[-1].root, many[-1].key).manifest["result"]["rows"],
        run.evaluated(1)["rows"],
        strict=True,
    ):
        assert abs(row["correct"] - old["correct"]) <= 1
        assert row["total"] == old["total"]


@pytest.mark.parametrize("method", REHEARSAL)
def test_the_size_of_the_memory_is_not_in_the_first_tasks_training(lab: Lab, method: str) -> None:
    """C17: nothing is remembered yet. With BiC as many as will be remembered to fit the bias are
    held out from the start."""
    runs = [run_of(lab, method, memory=memory, per_class=0) for memory in (20, 40)]
    steps = [[job.step for job in runs[0].stages(task)] for task in (0, 1)]
    small, large = (
        [
            dict(zip(steps[task], (job.key for job in run.stages(task)), strict=True))
            for task in (0, 1)
        ]
        for run in runs
    )
    assert (small[0]["train"] == large[0]["train"]) == (method != "bic")
    assert small[0]["herd"] != large[0]["herd"]
    assert small[1]["train"] != large[1]["train"]


# ---- what a task starts from and leaves ----------------------------------------------------------
@pytest.mark.parametrize("method", [name for name in REHEARSAL if METHODS[name].distills])  # type: ignore[attr-defined]
def test_the_teacher_is_what_the_task_before_handed_on_and_stays_so(lab: Lab, method: str) -> None:
    """To the last bit, after a whole training beside it (C10)."""
    run = run_of(lab, method, memory=20)
    run.trained(1)
    teacher: Any = lab.live[run.stages(1)[0].key].teacher
    modules = [teacher.backbone, *teacher.heads.values()]
    assert not any(part.training for module in modules for part in module.modules())
    assert all(
        p.grad is None and not p.requires_grad for module in modules for p in module.parameters()
    )
    before = run.carried(0).tensors
    assert all(
        torch.equal(t, before[f"backbone/{name}"])
        for name, t in teacher.backbone.state_dict().items()
    )
    assert {*teacher.heads} == {"two"}
    assert all(
        torch.equal(t, run.state(0).head[name])
        for name, t in teacher.heads["two"].state_dict().items()
    )


@pytest.mark.parametrize("method", REHEARSAL)
def test_choosing_exemplars_changes_nothing_of_the_network(lab: Lab, method: str) -> None:
    """Weights, biases and buffers are what the step before handed on, to the last bit (C8); class
    means are new."""
    run = run_of(lab, method, memory=20)
    run.trained(1)
    by_key = {job.key: job for job in run.stages(1)}
    herd = next(job for job in run.stages(1) if job.step == "herd")
    before, after = (
        everything(run.artifact(by_key[key])) for key in (*herd.previous.values(), herd.key)
    )
    one = run.state(0)
    assert {name for name in before if name.startswith("heads/")} == {
        f"heads/{task}/{name}" for task in ("two", "three") for name in one.head | one.tokens
    }
    assert any(name.endswith("blocks.0.norm1.weight") for name in before)
    assert {*before} <= {*after}
    assert all(torch.equal(after[name], before[name]) for name in before)


def everything(artifact: Artifact) -> dict[str, Tensor]:
    """What a step of task `three` left of the network, by name, wherever it is kept: carried on, or
    in the task's state."""
    carried, state = (
        Carried.from_bytes(artifact.read("carried.safetensors")),
        TaskState.from_bytes(artifact.read("task.safetensors"), "state"),
    )
    task_tensors = {f"heads/three/{name}": t for name, t in (state.head | state.tokens).items()}
    memory_tensors = {
        f"{kind}/{name}": t
        for kind in ("copies", "masks")
        for name, t in getattr(state, kind).items()
    }
    elsewhere = {"path": "copies", "trunk": "copies/trunk"}  # while a path goes on learning
    handed = {
        "/".join([elsewhere.get(name.split("/")[0], name.split("/")[0]), name.partition("/")[2]]): t
        for name, t in carried.tensors.items()
    }
    return task_tensors | memory_tensors | handed


@pytest.mark.parametrize("method", ["bic", "e2e", "icarl", "podnet", "replay", "ucir", "wa"])
def test_new_classes_leave_old_outputs_as_they_are_before_training(method: str) -> None:
    """C5, bit for bit."""
    grown, images = begun(method, A, B).eval(), batch(A, B).images
    with torch.no_grad():
        assert torch.equal(
            grown.logits(images, None)[:, :2],
            grown.teacher.joined(images)
            if grown.teacher
            else grown.heads["a"](grown.backbone(images)),
        )


def test_the_share_of_old_classes_rises_by_halves_thirds_and_quarters() -> None:
    """a = O_t / A_t, of tasks with as many classes each."""
    tasks = tuple(Task(name, "card", "", (name + "1", name + "2")) for name in "abcdefghij")
    shares = [begun("replay", *tasks[: count + 1]).old_share for count in range(10)]
    assert shares == pytest.approx([count / (count + 1) for count in range(10)])
    assert begun("replay", A, B).old_share == pytest.approx(2 / 5)


# ---- what a step trains on -----------------------------------------------------------------------
def test_training_sees_the_task_whole_and_of_earlier_ones_the_exemplars_alone(lab: Lab) -> None:
    run = run_of(lab, memory=10)
    carried_state = run.carried(0)
    train = run.stages(1)[0]
    assert train.task is not None
    remembered = run.fresh(1).memory(step_context(train.task, "train", carried_state))
    assert {name: len(keys) for name, keys in remembered.items()} == {"two": 10}
    run.trained(1)
    assert history(run.artifact(train))[0]["images"] == 10 + 3 * 36


def test_the_loss_of_replay_is_cross_entropy_over_all_classes() -> None:
    method, mixed_batch = begun("replay", A, B), batch(A, B)
    moved(method)
    z = torch.cat([method.heads[name](method.backbone(mixed_batch.images)) for name in "ab"], 1)
    assert torch.allclose(
        method.loss(mixed_batch, START)[0], F.cross_entropy(z, wide(mixed_batch, A, B)), atol=1e-6
    )


def test_targets_that_are_mixed_lie_over_all_classes_of_the_stream(lab: Lab) -> None:
    """A batch of a task and of exemplars has one output space, in which samples of different tasks
    are mixed."""
    run = lab.run_of(
        "replay", QUICK, data={"mixup": 0.8, "smoothing": 0.1}, methods={"replay": {"memory": 10}}
    )
    train = run.stages(1)[0]
    remembered_keys = run.carried(0).meta["memory"]["two"]
    assert train.task is not None
    feed = Feed(
        train,
        train.tasks,
        "train",
        Group(),
        True,
        {"two": [key for keys in remembered_keys.values() for key in keys]},
    )
    (first,) = next(feed.epoch(0))
    assert first.targets is not None
    assert first.targets.shape == (16, 5)
    assert torch.allclose(first.targets.sum(1), torch.ones(16))
    assert (first.tasks == 0).any()
    labels_in_stream = first.labels + 2 * first.tasks
    heavy = first.targets.argsort(dim=1, descending=True)[:, :2]
    assert ((heavy == labels_in_stream[:, None]).any(1)).all(), (
        "each sample's own class is one of the two that it is made of"
    )
    other = Feed(
        replace(train, scenario="task"),
        train.tasks,
        "train",
        Group(),
        True,
        {"two": [key for keys in remembered_keys.values() for key in keys]},
    )
    assert next(other.epoch(0))[0].targets is None
    assert F.one_hot(labels_in_stream, 5).shape == first.targets.shape
