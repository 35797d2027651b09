"""E2E: its loss by hand, the balanced images that it is fine-tuned on, and the memory that
stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from class_incremental_steps import START, A, B, C, batch, begun, moved, remembered, stream, wide
from stage_lab import Lab, history
from torch import Tensor
from torch.nn import functional as F

from workers.data.feed import Feed
from workers.dist import Group
from workers.methods.base import Progress
from workers.methods.bases.rehearsal import MEMORY
from workers.methods.e2e import E2eSettings
from workers.model.exemplars import SELECTIONS
from workers.storage.taskstate import Carried


# ---- the loss ------------------------------------------------------------------------------------
def apart(kd: str, student: Tensor, teacher: Tensor, tau: float) -> Tensor:
    q, p = (student / tau).softmax(1), (teacher / tau).softmax(1)
    return F.binary_cross_entropy(q, p) if kd == "bce" else -(p * q.log()).sum(1).mean()


@pytest.mark.parametrize(("kd", "tau"), [("bce", 2.0), ("bce", 1.0), ("ce", 2.0)])
@pytest.mark.parametrize(("step", "held"), [("train", "ab"), ("finetune", "abc")])
def test_the_loss_is_cross_entropy_and_the_mean_distillation_of_each_task_that_was_there(
    step: str, held: str, kd: str, tau: float
) -> None:
    """In `finetune` the task's own classes were there too."""
    method, b = begun("e2e", A, B, C, step=step, kd=kd, tau=tau), batch(A, B, C)
    taught = {name: method.heads[name](method.backbone(b.images)).detach() for name in held}
    moved(method)
    loss, terms = method.loss(b, START)
    features = method.backbone(b.images)
    ce = F.cross_entropy(method.logits(b.images, None), wide(b, A, B, C))
    expected = torch.stack(
        [apart(kd, method.heads[name](features), taught[name], tau) for name in held]
    ).mean()
    assert {name: float(t) for name, t in terms.items()} == pytest.approx(
        {"ce": ce.item(), "kd": expected.item()}, abs=1e-5
    )
    assert torch.allclose(loss, ce + expected, atol=1e-5)


def test_the_first_task_of_all_is_plain_cross_entropy() -> None:
    method = begun("e2e", A)
    loss, terms = method.loss(batch(A), START)
    assert terms.keys() == {"ce"}
    assert torch.equal(loss, F.cross_entropy(method.logits(batch(A).images, None), batch(A).labels))


def test_fine_tuning_starts_where_its_teacher_is_and_trains_all_weights() -> None:
    method = begun("e2e", A, B, step="finetune")
    assert all(p.requires_grad for p in method.parameters())
    method.classification_loss = lambda features, batch: features.sum() * 0
    method.loss(batch(A, B), START)[0].backward()
    assert max(float(p.grad.abs().max()) for p in method.parameters() if p.grad is not None) < 1e-6
    assert not any(p.requires_grad for p in method.teacher.backbone.parameters())


# ---- noise ---------------------------------------------------------------------------------------
def noisy(
    step: int = 0, rows: slice = slice(None), done: int = 0, **settings: Any
) -> dict[str, Tensor]:
    """What is added to gradients of zero."""
    method = begun("e2e", A, **settings)
    method.loss(batch(A, step=step, rows=rows), Progress(0, done, 1, 1000))
    for p in method.parameters():
        p.grad = torch.zeros_like(p)
    method.heads["a"].bias.grad = None
    method.after_backward()
    assert method.heads["a"].bias.grad is None
    return {name: p.grad for name, p in method.named_parameters() if p.grad is not None}


def test_gradients_get_noise_where_that_is_asked_for() -> None:
    assert not any(bool(g.any()) for g in noisy().values())
    for done in (0, 99):
        drawn = noisy(noise=True, done=done)
        flat = torch.cat([g.flatten() for g in drawn.values()])
        assert len(flat) > 20000
        assert float(flat.var()) == pytest.approx(0.3 / (1 + done) ** 0.55, rel=0.05)
        assert abs(float(flat.mean())) < 0.01
        shapes = [g.flatten()[:32] for g in drawn.values() if g.numel() >= 32]
        assert len({tuple(t.tolist()) for t in shapes}) == len(shapes), (
            "no two parameters get the same"
        )


def test_noise_is_the_same_on_all_ranks_and_another_in_each_step() -> None:
    one, other, later = (
        noisy(noise=True, rows=slice(0, 6, 2)),
        noisy(noise=True, rows=slice(1, 6, 2)),
        noisy(noise=True, step=1),
    )
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not any(torch.equal(one[name], later[name]) for name in one)


# ---- the steps -----------------------------------------------------------------------------------
def test_it_is_fine_tuned_on_as_many_images_of_each_class_and_keeps_fewer(lab: Lab) -> None:
    """A memory of 10: five of each of two classes, while fine-tuning five of each of five, and two
    of each in the end."""
    run = stream(lab, "e2e", memory=10)
    assert [[job.step for job in run.stages(task)] for task in (0, 1)] == [
        ["train", "herd"],
        ["train", "balance", "finetune", "herd"],
    ]
    run.trained(1)
    train, balance, finetune, herd = (
        Carried.from_bytes(run.artifact(job).read("carried.safetensors")) for job in run.stages(1)
    )
    first = run.carried(0).meta[MEMORY]
    sizes = [
        {c: len(keys) for classes in step.meta[MEMORY].values() for c, keys in classes.items()}
        for step in (train, balance, finetune, herd)
    ]
    assert sizes == [
        dict.fromkeys("01", 5),
        dict.fromkeys("01234", 5),
        dict.fromkeys("01234", 5),
        dict.fromkeys("01234", 2),
    ]
    assert first["two"] == train.meta[MEMORY]["two"] == balance.meta[MEMORY]["two"]
    assert herd.meta[MEMORY]["two"] == {c: keys[:2] for c, keys in first["two"].items()}
    images = [
        history(run.artifact(job))[-1]["images"] if job.step in ("train", "finetune") else None
        for job in run.stages(1)
    ]
    assert images == [images[0], None, 25, None]
    assert run.artifact(run.stages(1)[2]).manifest["trained_parameters"] == sum(
        p.numel() for p in run.live(1).parameters()
    )
    before, after = (
        step.tensors["backbone/blocks.0.mlp.fc1.weight"] for step in (balance, finetune)
    )
    assert not torch.equal(before, after)


def test_the_images_that_stay_are_chosen_by_the_network_after_fine_tuning(lab: Lab) -> None:
    """Nearest to the mean of the features as they are, of all images of the class."""
    run = stream(lab, "e2e", memory=10)
    assert E2eSettings().selection == "closest"
    live, job = run.live(1).eval(), run.stages(1)[0]
    assert job.task is not None
    batches = [*Feed(job, (job.task,), "train", Group(), training=False).evaluate()]
    with torch.no_grad():
        features = torch.cat([live.backbone(b.images) for b in batches])
    keys, labels = (
        [key for b in batches for key in b.keys or []],
        torch.cat([b.labels for b in batches]),
    )
    for label, c in enumerate("234"):
        rows = sorted((labels == label).nonzero().squeeze(1).tolist(), key=lambda row: keys[row])
        nearest = SELECTIONS["closest"](features[rows], 2, torch.Generator())
        assert run.carried(1).meta[MEMORY]["three"][c] == [keys[rows[index]] for index in nearest]


def test_the_teacher_of_fine_tuning_is_the_network_after_training(lab: Lab) -> None:
    run = stream(lab, "e2e", memory=10)
    run.trained(1)
    trained = Carried.from_bytes(run.artifact(run.stages(1)[1]).read("carried.safetensors")).tensors
    teacher = lab.live[run.stages(1)[2].key].teacher
    assert all(
        torch.equal(t, trained[f"backbone/{name}"])
        for name, t in teacher.backbone.state_dict().items()
    )
    assert {
        f"heads/{task}/{name}" for task, head in teacher.heads.items() for name in head.state_dict()
    } == {n for n in trained if n.startswith("heads/")}
    assert all(
        torch.equal(t, trained[f"heads/{task}/{name}"])
        for task, head in teacher.heads.items()
        for name, t in head.state_dict().items()
    )
    assert [*teacher.heads] == ["two", "three"]


def test_a_base_task_gets_exemplars_and_the_task_after_it_is_fine_tuned(lab: Lab) -> None:
    run = stream(lab, "e2e", base="two", memory=10)
    assert [[job.step for job in run.stages(task)] for task in (0, 1)] == [
        ["herd"],
        ["train", "balance", "finetune", "herd"],
    ]
    assert {
        c: len(exemplars)
        for c, (_, exemplars) in remembered(run, 1, run.carried(1).meta[MEMORY]).items()
    } == dict.fromkeys("01234", 2)
