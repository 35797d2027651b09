"""Tests of WA: its loss, its weight alignment, and the steps of a stream that align."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from class_incremental_steps import START, A, B, C, batch, begun, moved, stream, wide
from torch.nn import functional as F

from pipeline.testing.lab import Lab, history
from workers import loop, optim
from workers.dist import Group
from workers.job import TrainSettings
from workers.model.align import compute_weight_ratio
from workers.model.distill import kd_ce

OLD = torch.tensor([[3.0, 4.0], [0.0, 5.0]], dtype=torch.float64)
NEW = torch.tensor([[6.0, 8.0], [0.0, 20.0]], dtype=torch.float64)


# ---- alignment -----------------------------------------------------------------------------------
def test_weight_ratio_has_the_worked_value() -> None:
    gamma = compute_weight_ratio(OLD, NEW)
    assert float(gamma) == pytest.approx(1 / 3, abs=1e-12)
    assert torch.allclose(
        gamma * NEW, torch.tensor([[2.0, 8 / 3], [0.0, 20 / 3]], dtype=torch.float64), atol=1e-12
    )


def aligned(**settings: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the method after `align` of the third task, and its heads before."""
    method = begun("wa", A, B, C, step="align", **settings)
    moved(method)
    with torch.no_grad():
        method.heads["c"].weight.mul_(4.0)
    before = {
        f"{name}.{part}": t for name in "abc" for part, t in method.heads.export(name).items()
    }
    method.align(C)
    return method, before


def test_alignment_equalises_mean_norms_by_scaling_only_new_weights() -> None:
    method, before = aligned()
    after = {f"{name}.{part}": t for name in "abc" for part, t in method.heads.export(name).items()}
    changed = {name for name, t in after.items() if not torch.equal(t, before[name])}
    assert changed == {"c.weight"}
    old = torch.cat([after["a.weight"], after["b.weight"]]).norm(dim=1)
    assert torch.allclose(after["c.weight"].norm(dim=1).mean(), old.mean(), rtol=1e-6)
    assert not torch.allclose(after["c.weight"].norm(dim=1), old.mean().expand(2), rtol=1e-3), (
        "only the mean must match, not each length"
    )
    assert torch.allclose(
        F.normalize(after["c.weight"], dim=1), F.normalize(before["c.weight"], dim=1), atol=1e-6
    )
    assert method.metrics()["gamma"] == pytest.approx(
        float(after["c.weight"].norm() / before["c.weight"].norm()), rel=1e-6
    )
    features = torch.randn(50, 32, generator=torch.Generator().manual_seed(1))
    assert torch.equal(
        (features @ after["c.weight"].T).argmax(1), (features @ before["c.weight"].T).argmax(1)
    ), "without biases, answers among new classes must not change"


def test_second_alignment_changes_nothing() -> None:
    method, _ = aligned()
    before = method.heads.export("c")["weight"]
    method.align(C)
    assert method.gamma == pytest.approx(1.0, abs=1e-6)
    assert torch.allclose(method.heads["c"].weight, before, rtol=1e-6)


def test_gamma_above_1_is_warned_about() -> None:
    method = begun("wa", A, B, C, step="align")
    with torch.no_grad():
        method.heads["c"].weight.mul_(0.25)
    method.align(C)
    assert method.gamma == pytest.approx(4.0)
    (sentence,) = method.warnings()
    assert "task 'c': gamma is 4, above 1" in sentence


def test_gamma_below_1_or_no_alignment_gives_no_warning() -> None:
    method, _ = aligned()
    assert method.gamma < 1
    assert method.warnings() == []
    assert begun("wa", A, B).warnings() == []


# ---- the loss ------------------------------------------------------------------------------------
@pytest.mark.parametrize("tau", [1.0, 2.0])
def test_loss_weights_follow_the_share_of_old_classes(
    tau: float,
) -> None:
    method, b = begun("wa", A, B, C, tau=tau), batch(A, B, C)
    taught = torch.cat([method.heads[name](method.backbone(b.images)) for name in "ab"], 1).detach()
    moved(method)
    loss, terms = method.loss(b, START)
    logits = method.logits(b.images, None)
    ce, kd = F.cross_entropy(logits, wide(b, A, B, C)), kd_ce(logits[:, :5], taught, tau)
    assert {name: float(t) for name, t in terms.items()} == pytest.approx(
        {"ce": ce.item(), "kd": kd.item()}, abs=1e-5
    )
    assert torch.allclose(loss, 2 / 7 * ce + 5 / 7 * kd, atol=1e-5)


def test_soft_targets_apply_to_all_classes() -> None:
    method, soft = (
        begun("wa", A, B),
        torch.rand(6, 5, generator=torch.Generator().manual_seed(2)).softmax(1),
    )
    moved(method)
    b = batch(A, B, targets=soft)
    assert torch.allclose(
        method.loss(b, START)[1]["ce"],
        F.cross_entropy(method.logits(b.images, None), soft),
        atol=1e-5,
    )


def test_first_task_uses_plain_cross_entropy() -> None:
    method = begun("wa", A)
    loss, terms = method.loss(batch(A), START)
    assert terms.keys() == {"ce"}
    assert torch.equal(loss, F.cross_entropy(method.logits(batch(A).images, None), batch(A).labels))


@pytest.mark.parametrize("nonnegative", [False, True])
def test_nonnegative_setting_clamps_weights_of_all_heads_at_zero(
    nonnegative: bool,
) -> None:
    method, train = (
        begun("wa", A, B, nonnegative=nonnegative),
        TrainSettings(optimizer="sgd", lr=0.1),
    )
    job: Any = type("Job", (), {"train": train})
    loop.train_step(
        method, optim.build_optimizer(method.groups, train), [batch(A, B)], START, job, Group()
    )
    least = [method.heads[name].weight.min().item() for name in "ab"]
    assert (min(least) == max(least) == 0) if nonnegative else max(least) < 0
    assert min(p.min().item() for p in method.backbone.parameters()) < 0


# ---- in a stream ---------------------------------------------------------------------------------
def test_later_tasks_are_aligned_before_exemplars_are_chosen(lab: Lab) -> None:
    run = stream(lab, "wa")
    assert [[job.step for job in run.stages(task)] for task in (0, 1)] == [
        ["train", "herd"],
        ["train", "align", "herd"],
    ]
    train, align, herd = (run.artifact(job) for job in run.stages(1))
    (row,) = history(align)
    assert row.keys() == {"epoch", "gamma", "val_correct", "val_total"}
    assert row["gamma"] != 1
    assert align.manifest["epochs"] == 0
    new, carried = run.state(1).head["weight"], run.carried(1).tensors
    assert torch.allclose(
        new.norm(dim=1).mean(), carried["heads/two/weight"].norm(dim=1).mean(), rtol=1e-5
    ), "the served head and the carried old head must have equal mean lengths"
    assert (
        train.read("task.safetensors")
        != align.read("task.safetensors")
        == herd.read("task.safetensors")
    )


def test_first_task_is_aligned_to_a_preceding_base_task(lab: Lab) -> None:
    run = stream(lab, "wa", base="two")
    assert [[job.step for job in run.stages(task)] for task in (0, 1)] == [
        ["herd"],
        ["train", "align", "herd"],
    ]
    new, carried = run.state(1).head["weight"], run.carried(1).tensors
    assert torch.allclose(
        new.norm(dim=1).mean(), carried["heads/two/weight"].norm(dim=1).mean(), rtol=1e-5
    )
