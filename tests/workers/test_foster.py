"""Tests of FOSTER: golden values, losses and trained parts of both steps, and constant size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from class_incremental_steps import RATES, SMALL, START, A, B, C, batch, stepped, stream, wide
from step_contexts import step_context
from torch.nn import functional as F

from pipeline.testing.lab import Lab, history
from workers import loop
from workers.job import Task
from workers.methods.base import StepData
from workers.methods.foster import Foster, FosterSettings, weigh_classes
from workers.model.distill import kd_ce
from workers.model.vit import build, compute_digest
from workers.storage.taskstate import Carried

D = 32
MEMORY = {"a": {"a1": ["k1", "k2"], "a2": ["k3"]}, "b": {name: ["k4", "k5"] for name in B.classes}}
KEYS = {"c1": [f"c1/{i}" for i in range(7)], "c2": [f"c2/{i}" for i in range(4)]}
COUNTS = [2, 1, 2, 2, 2, 7, 4]


def begun(
    step: str = "train", *tasks: Task, carried: Carried | None = None, **settings: Any
) -> Any:
    """Return the method at `step` of the last of `tasks` (default: A, B and C).

    The earlier tasks are finished. The batches have samples of all tasks.
    """
    tasks = tasks or (A, B, C)
    torch.manual_seed(0)
    method: Any = Foster(build(SMALL), FosterSettings(**settings), 0)
    method.join_stream("class", tasks)
    if carried is None and len(tasks) > 1:
        torch.manual_seed(1)
        tensors = {f"backbone/{n}": t + 0.1 for n, t in build(SMALL).state_dict().items()}
        for task in tasks[:-1]:
            tensors[f"heads/{task.name}/weight"] = torch.randn(task.num_classes, D)
            tensors[f"heads/{task.name}/bias"] = torch.randn(task.num_classes)
        carried = Carried(tensors, {"memory": MEMORY})
    data = StepData(task_keys=lambda task: KEYS)
    context = replace(step_context(tasks[-1], step, carried, RATES, tasks, data), stream=tasks)
    method.groups = method.begin(context)
    loop.freeze_others(method, method.groups)
    return method.train()


# ---- golden values -------------------------------------------------------------------------------
def test_class_weights_and_losses_match_golden_values() -> None:
    weights = weigh_classes([20, 20, 500], 0.96)
    assert weights.tolist() == pytest.approx([1.172792, 1.172792, 0.654415], abs=1e-6)
    z = torch.tensor([[1.0, 2.0, 3.0]])
    label = torch.tensor([0])
    assert F.cross_entropy(z / weights, label).item() == pytest.approx(3.80868, abs=1e-5)
    student = torch.tensor([[0.5, 0.5, 0.0]])
    assert kd_ce(student, z, 2.0, weights).item() == pytest.approx(1.113052, abs=1e-6)


def test_class_weights_without_balancing_and_for_empty_classes() -> None:
    assert weigh_classes([1, 20, 500], 0.0).tolist() == [1.0, 1.0, 1.0]
    assert torch.equal(weigh_classes([0, 5], 0.9), weigh_classes([1, 5], 0.9))


# ---- boosting ------------------------------------------------------------------------------------
def test_loss_of_first_task_is_only_cross_entropy() -> None:
    method = begun("train", A)
    b = batch(A)
    loss, terms = method.loss(b, START)
    assert terms.keys() == {"ce"}
    assert torch.equal(
        loss, F.cross_entropy(method.heads["a"](method.backbone(b.images)), b.labels)
    )


@pytest.mark.parametrize("soft", [False, True])
def test_boosting_loss_sums_its_three_terms(soft: bool) -> None:
    method = begun(beta=0.9, distillation=0.7, tau=3.0)
    stepped(method, A, B, C)
    targets = F.one_hot(wide(batch(A, B, C), A, B, C), 7).float()
    if soft:
        targets = torch.rand(6, 7, generator=torch.Generator().manual_seed(2)).softmax(1)
    b = batch(A, B, C, targets=targets if soft else None)
    loss, terms = method.loss(b, START)
    old = method.boosted.old(b.images)
    new = method.backbone.eval()(b.images)
    z = F.linear(torch.cat([old, new], 1), method.boosted.joint.weight, method.boosted.joint.bias)
    taught = torch.cat([method.heads[name](old) for name in "ab"], 1)
    expected = {
        "ce": F.cross_entropy(z / weigh_classes(COUNTS, 0.9), targets).item(),
        "branch": F.cross_entropy(method.branch(new), targets).item(),
        "kd": kd_ce(z[:, :5], taught, 3.0).item(),
    }
    assert {name: term.item() for name, term in terms.items()} == pytest.approx(expected, rel=1e-4)
    total = expected["ce"] + expected["branch"] + 0.7 * expected["kd"]
    assert loss.item() == pytest.approx(total, rel=1e-4)
    assert torch.allclose(method.eval().logits(b.images, None), z, atol=1e-5)
    assert torch.allclose(method.logits(b.images, "b"), z[:, 2:5], atol=1e-5)


def test_boosted_network_starts_from_old_network() -> None:
    method = begun()
    for name, p in method.boosted.old.named_parameters():
        assert torch.equal(p, method.backbone.get_parameter(name))
    joint = method.boosted.joint
    heads = torch.cat([method.heads[name].weight for name in "ab"])
    assert torch.equal(joint.weight[:5, :D], heads)
    assert torch.equal(joint.bias[:5], torch.cat([method.heads[name].bias for name in "ab"]))
    assert joint.weight.shape == (7, 2 * D)
    assert not joint.bias[5:].any()
    assert 0.01 < joint.weight[5:].std() < 0.03


def test_boosting_trains_only_new_extractor_joint_head_and_branch() -> None:
    method = begun()
    changed = stepped(method, A, B, C)
    assert {name.split(".")[0] for name in changed} == {"backbone", "boosted", "branch"}
    joint = {"boosted.joint.weight", "boosted.joint.bias"}
    assert {name for name in changed if name.startswith("boosted")} == joint
    assert not any(module.training for module in method.boosted.old.modules())
    assert method.backbone.training


# ---- compression ---------------------------------------------------------------------------------
def compressing(**settings: Any) -> tuple[Any, Any]:
    """Return the method at the start of `compress`, and the method after one step of `train`."""
    boosting = begun(**settings)
    stepped(boosting, A, B, C)
    _, carried = boosting.finish()
    carried = Carried.from_bytes(carried.to_bytes())
    carried.meta["memory"] = MEMORY
    return begun("compress", carried=carried, **settings), boosting


def test_compression_loss_is_only_balanced_distillation() -> None:
    method, boosting = compressing(compress_beta=0.8, tau=3.0)
    b = batch(A, B, C)
    teacher = boosting.eval().logits(b.images, None)
    student = method.logits(b.images, None)
    loss, terms = method.loss(b, START)
    assert terms.keys() == {"kd"}
    expected = kd_ce(student, teacher, 3.0, weigh_classes(COUNTS, 0.8))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)


def test_compression_starts_from_old_network_and_trains_only_student() -> None:
    method, boosting = compressing()
    for name, p in method.backbone.named_parameters():
        assert torch.equal(p, boosting.boosted.old.get_parameter(name))
        assert torch.equal(
            method.boosted.new.get_parameter(name), boosting.backbone.get_parameter(name)
        )
    for name in "ab":
        assert torch.equal(method.heads[name].weight, boosting.heads[name].weight)
    teacher = compute_digest(method.boosted)
    changed = stepped(method, A, B, C)
    assert {name.split(".")[0] for name in changed} == {"backbone", "heads"}
    assert compute_digest(method.boosted) == teacher
    assert not any(module.training for module in method.boosted.modules())
    _, carried = method.finish()
    assert not any(name.startswith("boosted") for name in carried.tensors)


# ---- in a stream ---------------------------------------------------------------------------------
@pytest.mark.few(1)
@pytest.mark.parametrize("base", [None, "two"])
def test_served_network_size_stays_constant(lab: Lab, base: str | None) -> None:
    run = stream(lab, "foster", base=base, memory=20)
    steps = [[job.step for job in run.stages(task)] for task in (0, 1)]
    assert steps == [["herd"] if base else ["train", "herd"], ["train", "compress", "herd"]]
    network = {f"backbone/{name}" for name in run.fresh().backbone.state_dict()}
    assert {n for n in run.carried(1).tensors if not n.startswith("heads/")} == network
    boosted = run.lab.finished[run.artifact(run.stages(1)[0]).key][1].tensors
    kinds = {name.split("/")[0] for name in boosted}
    assert kinds == {"backbone", "heads", "boosted"}
    served, images = run.served(1), run.images(0)
    with torch.no_grad():
        assert served.logits(images, None).shape == (len(images), 5)
        assert served.features(images).shape == (len(images), served.heads.width)
    assert run.state(1).sizes()["copies"] == 0
    (row,) = history(run.artifact(run.stages(1)[1]))
    assert row["kd"] > 0
