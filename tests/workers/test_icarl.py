"""Tests of iCaRL: the losses, answers by class means, and the exemplar memory."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from class_incremental_steps import START, A, B, C, batch, begun, moved, remembered, stream, wide
from rank_runs import on_ranks
from torch import Tensor
from torch.nn import functional as F

from pipeline.testing.lab import Lab, again
from workers.data.feed import Feed
from workers.dist import Group
from workers.errors import UserError
from workers.job import Task
from workers.methods import METHODS
from workers.methods.bases.rehearsal import MEANS, MEMORY
from workers.methods.icarl import Icarl, IcarlSettings
from workers.model.distill import kd_ce
from workers.storage.artifact import Artifact
from workers.storage.taskstate import Carried

CLASSES = {"two": ["0", "1"], "three": ["2", "3", "4"]}


# ---- the loss ------------------------------------------------------------------------------------
def test_the_loss_has_the_worked_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """The label of the second sample is an old class, so the teacher's output replaces it."""
    one = Task("c", "card", "", ("c1",))
    method, b = begun("icarl", A, one), batch(A, one, rows=slice(0, 2))
    b.labels, b.tasks = torch.tensor([0, 0]), torch.tensor([1, 0])  # class positions 2 and 0
    monkeypatch.setattr(
        method, "all_logits", lambda features: torch.tensor([[0.0, 1.0, 2.0], [1.0, 0.0, -1.0]])
    )
    method.teacher = SimpleNamespace(joined=lambda images: torch.tensor([[1.0, -1.0], [0.0, 2.0]]))
    assert float(method.loss(b, START)[0]) == pytest.approx(0.61401100, abs=1e-6)


def teaching(method: Icarl, images: Tensor, names: str) -> Tensor:
    """Return the outputs of the network for the tasks `names`, and then move its parameters."""
    taught = torch.cat([method.heads[name](method.backbone(images)) for name in names], 1).detach()
    moved(method)
    return taught


@pytest.mark.parametrize("soft", [False, True])
def test_icarl_loss_distils_old_and_fits_new_outputs(
    soft: bool,
) -> None:
    method = begun("icarl", A, B, C)
    b = batch(
        A,
        B,
        C,
        targets=torch.rand(6, 7, generator=torch.Generator().manual_seed(2)).softmax(1)
        if soft
        else None,
    )
    taught = teaching(method, b.images, "ab")
    loss, terms = method.loss(b, START)
    labels = b.targets if b.targets is not None else F.one_hot(wide(b, A, B, C), 7).float()
    targets = torch.cat([taught.sigmoid(), labels[:, 5:]], 1)
    assert torch.allclose(
        loss, F.binary_cross_entropy_with_logits(method.logits(b.images, None), targets), atol=1e-6
    )
    assert terms.keys() == {"bce", "kd"}


def test_exemplar_labels_do_not_affect_the_loss() -> None:
    method, b = begun("icarl", A, B), batch(A, B)
    moved(method)
    first = method.loss(b, START)[0]
    b.labels = torch.where(b.tasks == 0, 1 - b.labels, b.labels)
    assert torch.equal(method.loss(b, START)[0], first)
    b.labels = torch.where(b.tasks == 1, (b.labels + 1) % 3, b.labels)
    assert not torch.equal(method.loss(b, START)[0], first)


def test_ce_kd_loss_is_cross_entropy_plus_distillation() -> None:
    method, b = begun("icarl", A, B, loss="ce_kd", tau=3.0), batch(A, B)
    taught = teaching(method, b.images, "a")
    loss, terms = method.loss(b, START)
    logits = method.logits(b.images, None)
    assert torch.allclose(
        loss, F.cross_entropy(logits, wide(b, A, B)) + kd_ce(logits[:, :2], taught, 3.0), atol=1e-5
    )
    assert terms.keys() == {"ce", "kd"}


@pytest.mark.parametrize(("loss", "name"), [("bce", "bce"), ("ce_kd", "ce")])
def test_first_task_has_no_teacher(loss: Any, name: str) -> None:
    method, b = begun("icarl", A, loss=loss), batch(A)
    logits = method.logits(b.images, None)
    expected = (
        F.cross_entropy(logits, b.labels)
        if name == "ce"
        else F.binary_cross_entropy_with_logits(logits, F.one_hot(b.labels, 2).float())
    )
    loss_value, terms = method.loss(b, START)
    assert method.teacher is None
    assert torch.equal(loss_value, expected)
    assert terms.keys() == {name}


# ---- answers -------------------------------------------------------------------------------------
def test_icarl_answers_by_nearest_current_exemplar_mean(
    lab: Lab,
) -> None:
    run = stream(lab, "icarl", memory=10)
    served, images, carried = run.served(1), run.images(1), run.carried(1)
    exemplars = remembered(run, 1, carried.meta[MEMORY])
    with torch.no_grad():
        units = [F.normalize(served.backbone(exemplars[c][0]), dim=1) for c in "01234"]
        means = F.normalize(torch.stack([unit.mean(0) for unit in units]), dim=1)
        expected = -(F.normalize(served.backbone(images), dim=1)[:, None] - means).square().sum(2)
        logits = served.logits(images, None)
        task_logits = served.logits(images, "three")
    assert torch.allclose(carried.tensors[MEANS], means, atol=1e-5)
    assert torch.allclose(logits, expected, atol=1e-5)
    assert torch.equal(task_logits, logits[:, 2:])
    job = run.stages(1)[0]
    assert job.task is not None
    (test,) = Feed(job, (job.task,), "test", Group(), training=False).evaluate()
    assert run.evaluated(1)["rows"][1]["correct"] == int(
        (logits.argmax(1) - 2 == test.labels).sum()
    )


def test_argmax_inference_uses_outputs_and_changes_only_evaluation_keys(lab: Lab) -> None:
    by_means, by_outputs = (
        stream(lab, "icarl", memory=10, infer=infer) for infer in ("nme", "argmax")
    )
    for task in (0, 1):
        assert [job.key for job in by_means.stages(task)] == [
            job.key for job in by_outputs.stages(task)
        ]
        assert by_means.evaluate_job(task).key != by_outputs.evaluate_job(task).key
    by_outputs.trained(1)
    served, images = by_outputs.served(1), by_outputs.images(1)
    with torch.no_grad():
        expected = torch.cat(
            [served.heads[name](served.backbone(images)) for name in ("two", "three")], 1
        )
        assert torch.equal(served.logits(images, None), expected)
        assert torch.equal(served.logits(images, "three"), expected[:, 2:])


def test_outputs_answer_until_class_means_exist(lab: Lab) -> None:
    """In `train`, the means belong to the previous network; they are not used or handed on."""
    run = stream(lab, "icarl", memory=10)
    run.trained(1)
    live, images = lab.live[run.stages(1)[0].key].eval(), run.images(1)
    with torch.no_grad():
        assert torch.equal(live.logits(images, None), live.all_logits(live.features(images)))
    handed = Carried.from_bytes(run.artifact(run.stages(1)[0]).read("carried.safetensors"))
    assert MEANS not in handed.tensors
    assert "heads/three/weight" in handed.tensors


def test_mean_based_logits_depend_on_backbone_not_heads() -> None:
    method = begun("icarl", A, B)
    method.means = F.normalize(
        torch.randn(5, 32, generator=torch.Generator().manual_seed(3)), dim=1
    )
    images, before = batch(A).images, method.logits(batch(A).images, None)
    with torch.no_grad():
        method.heads["a"].weight.add_(1.0)
    assert torch.equal(method.logits(images, None), before)
    moved(method)
    assert not torch.equal(method.logits(images, None), before)


# ---- the memory ----------------------------------------------------------------------------------
def test_exemplar_lists_are_truncated_to_share_the_memory(lab: Lab) -> None:
    run = stream(lab, "icarl", memory=11)
    first, second = (run.carried(task).meta[MEMORY] for task in (0, 1))
    assert {c: len(keys) for c, keys in first["two"].items()} == {"0": 5, "1": 5}
    assert {
        c: len(keys) for classes in second.values() for c, keys in classes.items()
    } == dict.fromkeys("01234", 2)
    assert all(second["two"][c] == first["two"][c][:2] for c in "01")
    assert {task: [*classes] for task, classes in second.items()} == CLASSES


def test_a_base_task_gets_exemplars_and_means_by_the_backbone(lab: Lab) -> None:
    run = stream(lab, "icarl", base="two", memory=10)
    assert [[job.step for job in run.stages(task)] for task in (0, 1)] == [
        ["herd"],
        ["train", "herd"],
    ]
    assert run.carried(0).tensors[MEANS].shape == (2, 32)
    assert run.carried(1).tensors[MEANS].shape == (5, 32)


def test_two_ranks_choose_the_same_exemplars_and_means(lab: Lab) -> None:
    run = stream(lab, "icarl", memory=10)
    run.trained(1)
    herd = run.stages(1)[-1]
    job = again(herd, f"ranks-{os.getpid()}")
    on_ranks([job], 2, lab.folder / "icarl-ranks")
    assert [
        Artifact.need(job.root, job.key).read(n)
        for n in ("task.safetensors", "carried.safetensors")
    ] == [run.artifact(herd).read(n) for n in ("task.safetensors", "carried.safetensors")]


def test_memory_smaller_than_class_count_is_refused() -> None:
    with pytest.raises(UserError, match="memory is 4, and the stream has 5 classes"):
        METHODS["icarl"].check_backbone(IcarlSettings(memory=4), begun("icarl", A).backbone, (A, B))
    METHODS["icarl"].check_backbone(
        IcarlSettings(memory=4, per_class=1), begun("icarl", A).backbone, (A, B)
    )
