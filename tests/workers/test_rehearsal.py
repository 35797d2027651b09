"""Tests of rehearsal: the size of the memory, the choice of exemplars on any number of ranks, the
teacher, and the samples of a training step."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

import pytest
import torch
from class_incremental_steps import START, A, B, batch, begun, moved, wide
from rank_runs import on_ranks, small_batches
from step_contexts import step_context
from torch import Tensor
from torch.nn import functional as F

from pipeline.testing.lab import OPTIMIZERS, Lab, Run, again, history
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
    """Return the run of a method with these settings and one epoch per task."""
    return lab.run_of(method, QUICK, methods={method: settings})


def counts(carried: Carried) -> dict[str, list[int]]:
    """Return task -> number of exemplars per class."""
    counts_by_task = {}
    for name, classes in carried.meta["memory"].items():
        counts_by_task[name] = [len(keys) for keys in classes.values()]
    return counts_by_task


# ---- number of exemplars -------------------------------------------------------------------------
def test_memory_of_fixed_size_is_shared_equally_by_classes(lab: Lab) -> None:
    run = run_of(lab, memory=14)
    assert [counts(run.carried(task)) for task in (0, 1)] == [
        {"two": [7, 7]},
        {"two": [2, 2], "three": [2, 2, 2]},
    ]


def test_class_smaller_than_its_share_keeps_all_images(lab: Lab) -> None:
    assert counts(run_of(lab, memory=2000).carried(1)) == {"two": [36, 36], "three": [36, 36, 36]}


def test_per_class_setting_keeps_exemplar_counts_constant(lab: Lab) -> None:
    run = run_of(lab, per_class=3)
    assert [counts(run.carried(task)) for task in (0, 1)] == [
        {"two": [3, 3]},
        {"two": [3, 3], "three": [3, 3, 3]},
    ]


def three_tasks(lab: Lab, method: str, **settings: Any) -> Run:
    """Return the run of a method on tasks x, y and z, of 2, 2 and 1 classes."""
    tasks = [
        {"card": str(lab.card), "name": name, "classes": list(classes)}
        for name, classes in (("x", "01"), ("y", "23"), ("z", "4"))
    ]
    run = lab.run_of(
        method, QUICK, methods={method: settings}, stream={"scenario": "class", "tasks": tasks}
    )
    run.order = ("x", "y", "z")
    return run


@pytest.mark.few(2)
@pytest.mark.parametrize("method", REHEARSAL)
def test_memory_limit_drops_last_exemplars(lab: Lab, method: str) -> None:
    """Exemplars used for validation instead of training count, too."""
    settings = {"memory": 17, "per_class": 0}
    if method == "ucir":
        settings["top_k"] = 1
    run = three_tasks(lab, method, **settings)
    exemplars_after = [exemplar_keys(run.carried(task)) for task in range(3)]
    for task, num_classes in enumerate((2, 4, 5)):
        assert {*run.carried(task).meta["memory"]} == {*"xyz"[: task + 1]}
        all_keys = list(chain(*exemplars_after[task].values()))
        assert len({*all_keys}) == len(all_keys) <= 17
        assert len(all_keys) == 17 // num_classes * num_classes, "as many as fit"
    for before, after in pairwise(exemplars_after):
        for class_, keys in before.items():
            assert after[class_] == keys[: len(after[class_])]


def exemplar_keys(carried: Carried) -> dict[tuple[str, str, str], list[str]]:
    """Return (kind, task, class) -> keys of exemplars. kind: `memory` or `validation`."""
    keys_by_class = {}
    for kind in ("memory", "validation"):
        for task, classes in carried.meta.get(kind, {}).items():
            for name, keys in classes.items():
                keys_by_class[kind, task, name] = keys
    return keys_by_class


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


# ---- choice of exemplars -------------------------------------------------------------------------
@pytest.mark.parametrize("selection", SELECTIONS)
def test_exemplars_are_chosen_by_trained_features_without_augmentation(
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
    keys: list[str] = []
    for b in batches:
        keys += b.keys or []
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
    """Repeat the stages of three methods on 2 or 4 ranks; the processes start only once.

    Return method -> (its run on one rank, stages of this run, the same stages on ranks). For
    `replay`, this is only the last `herd` stage.
    """
    runs_by_method: dict[str, tuple[Run, list[StageJob], list[StageJob]]] = {}
    all_jobs: list[StageJob] = []
    for method in ("replay", "dytox", "icarl"):
        run = lab.run_of(
            method, {**OPTIMIZERS["sgd"], "epochs": 1}, methods={method: {"memory": 20}}
        )
        with small_batches():
            run.evaluated(1)
        stages = [*run.stages(0), *run.stages(1), run.evaluate_job(1)]
        if method == "replay":
            stages = stages[-2:-1]
        jobs: list[StageJob] = []
        new_keys: dict[str, str] = {}  # key of a stage on one rank -> its key on ranks
        for job in stages:
            previous = {step: new_keys.get(key, key) for step, key in job.previous.items()}
            states = {task: new_keys.get(key, key) for task, key in job.states.items()}
            new_job = again(job, f"{request.param} ranks", previous=previous, states=states)
            jobs.append(new_job)
            new_keys[job.key] = new_job.key
        runs_by_method[method] = (run, stages, jobs)
        all_jobs += jobs
    on_ranks(all_jobs, request.param, lab.folder / f"rehearsal-{request.param}")
    return runs_by_method


@pytest.mark.few(1)
def test_any_number_of_ranks_keeps_the_same_exemplars(
    ranked: dict[str, tuple[Run, list[StageJob], list[StageJob]]],
) -> None:
    """Each rank extracts features for its share of the images, and all ranks choose from the
    features of all images."""
    _, [alone], [many] = ranked["replay"]
    expected = Artifact.need(alone.root, alone.key).read("carried.safetensors")
    assert Artifact.need(many.root, many.key).read("carried.safetensors") == expected


@pytest.mark.parametrize("method", ["dytox", "icarl"])
def test_exemplars_and_answers_do_not_depend_on_rank_count(
    ranked: dict[str, Any], method: str
) -> None:
    """Compares all stages of both tasks, up to the order of summation."""
    run, alone, many = ranked[method]
    assert [job.step for job in many] == [job.step for job in alone]
    for one, other in zip(alone[:-1], many[:-1], strict=True):
        assert stored(one).meta == stored(other).meta, one.id
    images = torch.cat([run.images(task) for task in (0, 1)])
    alone_logits = restore.restore_finished_method(alone[-1], Group()).logits(images, None)
    many_logits = restore.restore_finished_method(many[-1], Group()).logits(images, None)
    assert torch.allclose(alone_logits, many_logits, atol=1e-3)
    rows = Artifact.need(many[-1].root, many[-1].key).manifest["result"]["rows"]
    for row, expected in zip(rows, run.evaluated(1)["rows"], strict=True):
        assert abs(row["correct"] - expected["correct"]) <= 1
        assert row["total"] == expected["total"]


def stored(job: StageJob) -> Carried:
    """Return the carried state that a stage stored."""
    return Carried.from_bytes(Artifact.need(job.root, job.key).read("carried.safetensors"))


@pytest.mark.parametrize("method", REHEARSAL)
def test_first_training_key_does_not_depend_on_the_memory(lab: Lab, method: str) -> None:
    """The memory is still empty. BiC is an exception: it holds out images for its bias correction
    from the first task on, and their number depends on the memory."""
    small = run_of(lab, method, memory=20, per_class=0)
    large = run_of(lab, method, memory=40, per_class=0)

    def keys_are_equal(task: int, step: str) -> bool:
        small_keys = [job.key for job in small.stages(task) if job.step == step]
        large_keys = [job.key for job in large.stages(task) if job.step == step]
        assert len(small_keys) == len(large_keys) == 1
        return small_keys == large_keys

    for task in (0, 1):
        steps = [job.step for job in small.stages(task)]
        assert [job.step for job in large.stages(task)] == steps
    assert keys_are_equal(0, "train") == (method != "bic")
    assert not keys_are_equal(0, "herd")
    assert not keys_are_equal(1, "train")


# ---- teacher and network -------------------------------------------------------------------------
def has_teacher(name: str) -> bool:
    """Return whether a method distills from the model of the task before."""
    cls: Any = METHODS[name]
    return bool(cls.distills)


@pytest.mark.few(4)
@pytest.mark.parametrize("method", [name for name in REHEARSAL if has_teacher(name)])
def test_teacher_is_the_unchanged_model_of_the_previous_task(lab: Lab, method: str) -> None:
    """Compares bit for bit after the training of the student."""
    run = run_of(lab, method, memory=20, per_class=0)
    run.trained(1)
    teacher: Any = lab.live[run.stages(1)[0].key].teacher
    modules = [teacher.backbone, *teacher.heads.values()]
    for module in modules:
        assert not any(part.training for part in module.modules())
        assert all(p.grad is None and not p.requires_grad for p in module.parameters())
    before = run.carried(0).tensors
    for name, tensor in teacher.backbone.state_dict().items():
        assert torch.equal(tensor, before[f"backbone/{name}"])
    assert {*teacher.heads} == {"two"}
    head = run.state(0).head
    for name, tensor in teacher.heads["two"].state_dict().items():
        assert torch.equal(tensor, head[name])


@pytest.mark.few(3)
@pytest.mark.parametrize("method", REHEARSAL)
def test_choosing_exemplars_does_not_change_the_network(lab: Lab, method: str) -> None:
    """Weights, biases and buffers are bit-identical to those of the step before. Only class means
    are new."""
    run = run_of(lab, method, memory=20, per_class=0)
    run.trained(1)
    by_key = {job.key: job for job in run.stages(1)}
    herd = next(job for job in run.stages(1) if job.step == "herd")
    [previous_key] = herd.previous.values()
    before = everything(run.artifact(by_key[previous_key]))
    after = everything(run.artifact(herd))
    state = run.state(0)
    head_names = set()
    for name in state.head | state.tokens:
        head_names |= {f"heads/two/{name}", f"heads/three/{name}"}
    assert {name for name in before if name.startswith("heads/")} == head_names
    assert any(name.endswith("norm1.weight") for name in before)
    assert {*before} <= {*after}
    assert all(torch.equal(after[name], before[name]) for name in before)


def everything(artifact: Artifact) -> dict[str, Tensor]:
    """Return name -> tensor of the network after a step of task `three`, from the carried state and
    the task's state."""
    carried = Carried.from_bytes(artifact.read("carried.safetensors"))
    state = TaskState.from_bytes(artifact.read("task.safetensors"), "state")
    tensors = {f"heads/three/{name}": t for name, t in (state.head | state.tokens).items()}
    tensors |= {f"copies/{name}": t for name, t in state.copies.items()}
    tensors |= {f"masks/{name}": t for name, t in state.masks.items()}
    # A path in training has another name in the carried state than a finished path.
    finished_kinds = {"path": "copies", "trunk": "copies/trunk"}
    for name, tensor in carried.tensors.items():
        kind, _, rest = name.partition("/")
        tensors[f"{finished_kinds.get(kind, kind)}/{rest}"] = tensor
    return tensors


@pytest.mark.parametrize("method", ["bic", "e2e", "icarl", "podnet", "replay", "ucir", "wa"])
def test_adding_classes_keeps_the_logits_of_old_classes(
    method: str,
) -> None:
    """Compares bit for bit."""
    grown = begun(method, A, B).eval()
    images = batch(A, B).images
    with torch.no_grad():
        if grown.teacher:
            expected = grown.teacher.joined(images)
        else:
            expected = grown.heads["a"](grown.backbone(images))
        assert torch.equal(grown.logits(images, None)[:, :2], expected)


def test_old_share_is_the_fraction_of_old_classes() -> None:
    """The share is old classes / all classes. All these tasks have two classes each."""
    tasks = tuple(Task(name, "card", "", (name + "1", name + "2")) for name in "abcdefghij")
    shares = [begun("replay", *tasks[: count + 1]).old_share for count in range(10)]
    assert shares == pytest.approx([count / (count + 1) for count in range(10)])
    assert begun("replay", A, B).old_share == pytest.approx(2 / 5)


# ---- samples of a step ---------------------------------------------------------------------------
def test_training_uses_the_task_images_and_earlier_exemplars(lab: Lab) -> None:
    run = run_of(lab, memory=10)
    carried_state = run.carried(0)
    train = run.stages(1)[0]
    assert train.task is not None
    remembered = run.fresh(1).memory(step_context(train.task, "train", carried_state))
    assert {name: len(keys) for name, keys in remembered.items()} == {"two": 10}
    run.trained(1)
    assert history(run.artifact(train))[0]["images"] == 10 + 3 * 36


def test_the_loss_of_replay_is_cross_entropy_over_all_classes() -> None:
    method = begun("replay", A, B)
    mixed_batch = batch(A, B)
    moved(method)
    features = method.backbone(mixed_batch.images)
    logits = torch.cat([method.heads["a"](features), method.heads["b"](features)], 1)
    expected = F.cross_entropy(logits, wide(mixed_batch, A, B))
    assert torch.allclose(method.loss(mixed_batch, START)[0], expected, atol=1e-6)


def test_mixed_targets_are_over_all_classes_of_the_stream(lab: Lab) -> None:
    """Mixup blends samples of the task with exemplars. Their targets share one output space."""
    run = lab.run_of(
        "replay", QUICK, data={"mixup": 0.8, "smoothing": 0.1}, methods={"replay": {"memory": 10}}
    )
    train = run.stages(1)[0]
    exemplars = {"two": list(chain(*run.carried(0).meta["memory"]["two"].values()))}
    assert train.task is not None
    feed = Feed(train, train.tasks, "train", Group(), True, exemplars)
    batches = [batch for (batch,) in feed.epoch(0) if len(batch) == 16]
    first = max(batches, key=lambda batch: int((batch.tasks == 0).sum()))
    assert first.targets is not None
    assert first.targets.shape == (16, 5)
    assert torch.allclose(first.targets.sum(1), torch.ones(16))
    assert (first.tasks == 0).any()
    labels_in_stream = first.labels + 2 * first.tasks
    heavy = first.targets.argsort(dim=1, descending=True)[:, :2]
    assert ((heavy == labels_in_stream[:, None]).any(1)).all(), (
        "a sample's class must be one of the two with the largest targets"
    )
    task_incremental = replace(train, scenario="task")
    other = Feed(task_incremental, train.tasks, "train", Group(), True, exemplars)
    assert next(other.epoch(0))[0].targets is None
    assert F.one_hot(labels_in_stream, 5).shape == first.targets.shape
