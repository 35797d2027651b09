"""Tests of evaluation and step inputs: competing outputs, canaries, memory, and carried states."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from pipeline.testing.lab import OPTIMIZERS, TASKS, Lab, Run, again, history
from workers import loop, optim, restore
from workers.data.batch import Batch
from workers.data.feed import Feed
from workers.dist import Group
from workers.errors import DamagedArtifact, UserError
from workers.evaluate import Answers, accuracy, canary, result
from workers.job import BackboneSettings, Task
from workers.methods import METHODS
from workers.methods.base import Method, ParamGroup, Step, StepContext
from workers.methods.finetune import FineTune
from workers.methods.linear import Linear
from workers.model import vit
from workers.storage.artifact import Artifact, Attempt
from workers.storage.taskstate import Carried, TaskState

SIZES = [len(classes) for classes in TASKS.values()]


def in_class_scenario(lab: Lab, method: str, base: bool = False) -> Run:
    stream = [
        {"card": str(lab.card), "name": name, "classes": list(classes)}
        for name, classes in TASKS.items()
    ]
    if base:
        stream[0]["role"] = "base"
    return lab.run_of(
        method, OPTIMIZERS["adamw"] | {"epochs": 3}, stream={"scenario": "class", "tasks": stream}
    )


def predictions(artifact: Artifact) -> list[dict[str, Any]]:
    table = pq.read_table(pa.BufferReader(artifact.read("predictions.parquet")))
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


# ---- scenario `class` ----------------------------------------------------------------------------
@pytest.mark.parametrize("method", ["finetune", "joint"])
def test_all_outputs_compete_in_class_incremental_evaluation(lab: Lab, method: str) -> None:
    run = in_class_scenario(lab, method)
    evaluation, served = run.evaluated(1), run.served(1)
    assert evaluation["rewrites"] is True
    assert evaluation["canary"] is None
    assert [row["task"] for row in evaluation["rows"]] == [*TASKS]
    lines = predictions(run.artifact(run.evaluate_job(1)))
    for task_index, row in enumerate(evaluation["rows"]):
        with torch.no_grad():
            logits = served.logits(run.images(task_index), None)
        first = sum(SIZES[:task_index])
        labels = torch.tensor([line["label"] for line in lines if line["task"] == row["task"]])
        assert logits.shape[1] == sum(SIZES)
        assert set(labels.tolist()) == set(range(first, first + SIZES[task_index]))
        assert [
            line["prediction"] for line in lines if line["task"] == row["task"]
        ] == logits.argmax(1).tolist()
        assert row["correct"] == int((logits.argmax(1) == labels).sum())
        assert row["correct_task_aware"] == int(
            (logits[:, first : first + SIZES[task_index]].argmax(1) + first == labels).sum()
        )
        assert row["correct_top5"] == row["total"] == len(labels), "there are only five classes"
        assert row["correct"] <= row["correct_task_aware"]


@pytest.mark.parametrize("classes", [1, 3, 4, 5, 7])
def test_top5_counts_class_among_first_five(
    classes: int,
) -> None:
    """Evaluate the second of two tasks. The first has two classes, the second has `classes`."""
    method, tasks = (
        tiny(FineTune),
        (Task("a", "c", "k", ("x", "y")), Task("b", "c", "k", tuple("0123456"[:classes]))),
    )
    method.scenario, method.stream = "class", tasks
    for task in tasks:
        method.heads.add(task.name, task.num_classes, 0)
    labels = [i % classes for i in range(40)]
    logits = torch.rand(40, 2 + classes, generator=torch.Generator().manual_seed(classes))
    keys = [str(i) for i in range(40)]
    row, _ = result(method, tasks[1], Answers(keys, labels, logits, {}))
    ranks = [
        int((line > line[2 + label]).sum()) for line, label in zip(logits, labels, strict=True)
    ]
    assert row["correct"] == ranks.count(0)
    assert row["correct_top5"] == sum(rank < 5 for rank in ranks)
    assert (row["correct_top5"] == 40) == (classes <= 3)


def test_fine_tuning_forgets_first_task_and_joint_training_does_not(lab: Lab) -> None:
    """`finetune` trains old heads on new samples only. If outputs compete, it loses the first task.
    After three epochs, `joint` is at 20 to 75 %, depending on the seed."""
    old = {
        method: in_class_scenario(lab, method).evaluated(1)["rows"][0]
        for method in ("finetune", "joint")
    }
    assert old["finetune"]["correct"] < 0.1 * old["finetune"]["total"]
    assert old["joint"]["correct"] > 0.4 * old["joint"]["total"]


def test_all_outputs_compete_in_class_incremental_validation(lab: Lab) -> None:
    run = in_class_scenario(lab, "joint")
    live, job = run.live(1), run.stages(1)[0]
    correct, aware, total = 0, 0, 0
    for task, first in zip(job.tasks, (0, SIZES[0]), strict=True):
        for batch in Feed(job, (task,), "val", Group(), training=False).evaluate():
            with torch.no_grad():
                correct += int(
                    (live.eval().logits(batch.images, None).argmax(1) == batch.labels + first).sum()
                )
                aware += int((live.logits(batch.images, task.name).argmax(1) == batch.labels).sum())
            total += len(batch)
    assert accuracy(live, Feed(job, job.tasks, "val", Group(), training=False), Group()) == (
        correct,
        total,
    )
    last = history(run.trained(1))[-1]
    assert (last["val_correct"], last["val_total"]) == (correct, total)
    assert correct < aware, "the two accuracies must differ for this test"


def test_base_task_head_competes_and_is_trained_further(lab: Lab) -> None:
    run = in_class_scenario(lab, "finetune", base=True)
    job = run.jobs["finetune/three/train"]
    assert list(job.states) == ["two"]
    stored = Carried.from_bytes(run.artifact(job).read("carried.safetensors"))
    assert {name for name in stored.tensors if name.startswith("heads/")} == {
        f"heads/{t}/{n}" for t in TASKS for n in ("weight", "bias")
    }
    base = TaskState.from_bytes(Artifact.need(job.root, job.states["two"]).read("task.safetensors"))
    assert not torch.equal(stored.tensors["heads/two/bias"], base.head["bias"]), (
        "the head is trained further, because its outputs compete"
    )


@pytest.mark.parametrize("soft", [True, False])
def test_the_loss_is_the_cross_entropy_over_all_outputs(soft: bool) -> None:
    method, draw = tiny(FineTune), object()
    tasks = tuple(Task(name, "c", "k", classes) for name, classes in TASKS.items())
    method.scenario, method.stream, method.training_tasks = (
        "class",
        tasks,
        tasks[1:] if soft else tasks,
    )
    for task in reversed(tasks):  # outputs have stream order, whatever the load order
        method.heads.add(task.name, task.num_classes, 0)
    features = torch.randn(4, 32)
    labels, which = (
        (torch.tensor([0, 1, 2, 2]), torch.zeros(4, dtype=torch.long))
        if soft
        else (torch.tensor([0, 1, 2, 0]), torch.tensor([0, 0, 1, 1]))
    )
    targets = torch.nn.functional.one_hot(labels, SIZES[1]).float() if soft else None
    batch = Batch(torch.zeros(4, 3, 16, 16), labels, which, draw, targets)  # type: ignore[arg-type]
    logits = torch.cat([method.heads[name](features) for name in TASKS], 1)
    expected = torch.nn.functional.cross_entropy(
        logits, torch.tensor([2, 3, 4, 4]) if soft else torch.tensor([0, 1, 4, 2])
    )
    assert torch.allclose(method.classification_loss(features, batch), expected)
    assert method.class_slices() == {"two": slice(0, 2), "three": slice(2, 5)}


def test_task_incremental_method_refuses_images_without_a_task() -> None:
    method = tiny(Linear)
    method.heads.add("a", 2, 0)
    with pytest.raises(UserError, match=r"'linear' needs to be told the task; give one of \['a'\]"):
        method.logits(torch.zeros(1, 3, 16, 16), None)


M = TypeVar("M", bound=Method)


def tiny(cls: type[M]) -> M:
    options = {"patch_size": 4, "embed_dim": 32, "depth": 1, "num_heads": 2}
    return cls(vit.build(BackboneSettings(img_size=16, options=options)), cls.Settings(), 0)


# ---- canaries ------------------------------------------------------------------------------------
def test_evaluation_repeats_previous_task_as_canary(lab: Lab) -> None:
    run = lab.run("meat")
    first, second = run.evaluated(0), run.evaluated(1)
    assert first["rewrites"] is second["rewrites"] is False
    assert first["canary"] is None
    assert [row["task"] for row in second["rows"]] == [run.order[1]]
    assert second["canary"] == first["rows"][0]


def test_canary_detects_changed_logits_of_previous_task(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Drifts(Linear):
        name = "drifts"

        def logits(self, images: Tensor, task: str | None) -> Tensor:
            return super().logits(images, task) + 1e-6 * len(self.heads.names)

    monkeypatch.setitem(METHODS, "drifts", Drifts)
    run = lab.run("drifts")
    assert (
        run.evaluated(1)["canary"]["logits_sha256"] != run.evaluated(0)["rows"][0]["logits_sha256"]
    )


def test_missing_test_data_skips_canary_only(
    lab: Lab,
) -> None:
    run = lab.run("linear")
    run.evaluated(1)
    job = run.evaluate_job(1)
    gone = tuple(replace(t, data="0" * 32) if t.name == run.order[0] else t for t in job.tasks)
    evaluation = lab.stage(again(job, "gone", tasks=gone)).manifest["result"]
    assert evaluation["canary"] is None
    assert evaluation["rows"] == run.evaluated(1)["rows"]
    with pytest.raises(DamagedArtifact) as caught:
        lab.stage(again(job, "no-state", states={**job.states, run.order[0]: "1" * 32}))
    assert caught.value.key == "1" * 32


def test_canary_is_skipped_if_any_rank_lacks_data(lab: Lab) -> None:
    class Beside(Group):
        """A group in which the other rank did not find the test data."""

        def gather(self, value: Any) -> list[Any]:
            return [value, None]

    job = lab.run("linear").evaluate_job(1)
    lab.run("linear").evaluated(1)
    method = restore.restore_finished_method(job, Group())
    alone = canary(job, method, job.tasks[0], Group())
    assert alone is not None
    assert alone["task"] == job.tasks[0].name
    assert canary(job, method, job.tasks[0], Beside()) is None


# ---- inputs of a step ----------------------------------------------------------------------------
def carrying(root: str, key: str, carried: Carried) -> str:
    attempt = Attempt(root, key)
    attempt.write("carried.safetensors", carried.to_bytes())
    attempt.commit({"kind": "train"})
    return key


def test_parallel_steps_merge_carried_state_and_refuse_name_clash(lab: Lab, tmp_path: Path) -> None:
    herd = carrying(
        str(tmp_path), "herd", Carried({"means": torch.ones(2)}, {"memory": {"two": ["a"]}})
    )
    bias = carrying(str(tmp_path), "bias", Carried({"bias": torch.zeros(3)}, {"steps": 5}))
    clash = carrying(str(tmp_path), "clash", Carried({}, {"memory": {}}))
    job = replace(
        lab.run("finetune").stages(1)[0],
        root=str(tmp_path),
        previous={"herd": herd, "calibrate": bias},
    )
    carried = restore.load_carried(job)
    assert carried is not None
    assert {name: t.tolist() for name, t in carried.tensors.items()} == {
        "means": [1, 1],
        "bias": [0, 0, 0],
    }
    assert carried.meta == {"memory": {"two": ["a"]}, "steps": 5}
    with pytest.raises(
        UserError, match="steps 'herd' and 'align' of method 'finetune' both hand on 'memory'"
    ):
        restore.load_carried(replace(job, previous={"herd": herd, "align": clash}))
    assert restore.load_carried(replace(job, previous={})) is None


class Rehearses(FineTune):
    """Keeps four samples of each task. `train` adds those of earlier tasks, and `balance` uses only
    kept samples."""

    name = "rehearses"
    reads = "seen"
    needs_states = True
    steps = (Step("train"), Step("balance"))
    KEPT = 4

    def memory(self, context: StepContext) -> dict[str, list[str]]:
        memory_keys = dict(context.carried.meta["memory"]) if context.carried else {}
        return {
            name: keys
            for name, keys in memory_keys.items()
            if context.step == "balance" or name != context.task.name
        }

    def begin(self, context: StepContext) -> list[ParamGroup]:
        self.loaded, self.rates = list(self.heads.names), context.optim
        memory = dict(context.carried.meta["memory"]) if context.carried else {}
        if context.step == "train":
            memory[context.task.name] = sorted(
                k
                for b in context.data.feed("train").evaluate()
                for k in b.keys or []
                if f"/{context.task.classes[0]}/" in k
            )[: self.KEPT]
        self.memory_keys = memory
        return super().begin(context)

    def finish(self) -> Any:
        state, carried = super().finish()
        carried.meta["memory"] = self.memory_keys
        return state, carried


def test_memory_samples_are_trained_with_task_samples_and_counted(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHODS, Rehearses.name, Rehearses)
    run = lab.run(Rehearses.name)
    train, balance = run.stages(1)
    own_images = history(run.artifact(run.stages(0)[0]))[0]["images"] // SIZES[0] * SIZES[1]
    assert history(run.artifact(train))[0]["images"] == own_images + Rehearses.KEPT
    assert history(run.artifact(balance))[0]["images"] == 2 * Rehearses.KEPT, (
        "only kept samples may be used, also of the current task"
    )
    live = lab.live[train.key]
    assert isinstance(live, Rehearses)
    assert [t.name for t in live.training_tasks] == [*TASKS]
    assert live.loaded == ["two"], "states of earlier tasks must be loaded before `begin`"
    feed = Feed(train, train.tasks, "train", Group(), True, {"two": live.memory_keys["two"]})
    assert live.rates.full_rate_steps == optim.full_rate_steps(
        train.train.epochs * feed.steps_per_epoch, feed.steps_per_epoch, train.train
    )
    first = feed.samples.tasks == 0
    assert sorted(feed.samples.keys(np.flatnonzero(first))) == live.memory_keys["two"]
    assert len(live.memory_keys["two"]) == Rehearses.KEPT
    assert set(feed.samples.labels[first].tolist()) == {0}


def test_error_names_memory_sample_missing_from_train_split(lab: Lab) -> None:
    job = lab.run("finetune").stages(1)[0]
    with pytest.raises(
        UserError, match="task 'two': sample 'lost' is in the memory and not in its train split"
    ):
        Feed(job, job.tasks, "train", Group(), True, {"two": ["lost"]})


def test_second_training_step_uses_a_different_sample_order(lab: Lab) -> None:
    job = lab.run("finetune").stages(0)[0]
    feeds = [
        Feed(replace(job, step=step), job.tasks, "train", Group(), True)
        for step in ("train", "backbone", "retrain")
    ]
    assert feeds[0].seed == feeds[1].seed != feeds[2].seed


# ---- records -------------------------------------------------------------------------------------
def test_history_keeps_column_that_first_appears_in_later_epoch() -> None:
    table = pq.read_table(
        pa.BufferReader(
            loop.to_parquet([{"epoch": 0, "loss": 1.0}, {"epoch": 1, "loss": 0.5, "kept": 0.9}])
        )
    )
    assert table.to_pylist() == [
        {"epoch": 0, "loss": 1.0, "kept": None},
        {"epoch": 1, "loss": 0.5, "kept": 0.9},
    ]


def test_a_step_that_does_not_train_has_no_trained_parameters(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Prunes(FineTune):
        name = "prunes"
        steps = (Step("train"), Step("prune", trains=False))

    monkeypatch.setitem(METHODS, "prunes", Prunes)
    run = lab.run("prunes")
    train, prune = (run.artifact(job).manifest["trained_parameters"] for job in run.stages(0))
    assert train > 0
    assert prune == 0


@pytest.mark.parametrize("name", vit.DROPOUTS)
def test_dropout_that_depends_on_the_number_of_ranks_is_refused(name: str) -> None:
    with pytest.raises(
        UserError, match=rf"^backbone\.options\.{name} is 0\.1; .*use backbone\.drop_path"
    ):
        vit.outline(BackboneSettings(img_size=224, options={name: 0.1}))
    vit.outline(BackboneSettings(img_size=224, options={name: 0.0, "depth": 1}, drop_path=0.1))
