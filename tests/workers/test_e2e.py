"""Tests of the E2E method: its loss, the balanced set, and the exemplars."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from class_incremental_steps import START, A, B, C, batch, begun, moved, remembered, stream, wide
from torch import Tensor
from torch.nn import functional as F

from pipeline.testing.lab import Lab, Run, history
from workers.data.feed import Feed
from workers.dist import Group
from workers.job import StageJob
from workers.methods.base import Progress
from workers.methods.bases.rehearsal import MEMORY
from workers.methods.e2e import E2eSettings
from workers.model.exemplars import SELECTIONS
from workers.storage.taskstate import Carried


# ---- the loss ------------------------------------------------------------------------------------
def distillation_loss(kd: str, student: Tensor, teacher: Tensor, tau: float) -> Tensor:
    """Return the loss between the logits (samples, classes) of one task at temperature `tau`."""
    student_share = (student / tau).softmax(1)
    teacher_share = (teacher / tau).softmax(1)
    if kd == "bce":
        return F.binary_cross_entropy(student_share, teacher_share)
    return -(teacher_share * student_share.log()).sum(1).mean()


@pytest.mark.parametrize(
    ("kd", "tau", "over_tasks"),
    [("bce", 2.0, "mean"), ("bce", 1.0, "mean"), ("ce", 2.0, "mean"), ("ce", 2.0, "sum")],
)
@pytest.mark.parametrize(("step", "held"), [("train", "ab"), ("finetune", "abc")])
def test_loss_is_cross_entropy_plus_distillation_over_teacher_tasks(
    step: str, held: str, kd: str, tau: float, over_tasks: str
) -> None:
    """In `finetune`, the teacher also has the classes of the new task."""
    method = begun("e2e", A, B, C, step=step, kd=kd, tau=tau, over_tasks=over_tasks)
    mixed_batch = batch(A, B, C)
    images = mixed_batch.images
    teacher_logits = {name: method.heads[name](method.backbone(images)).detach() for name in held}
    moved(method)
    loss, terms = method.loss(mixed_batch, START)
    features = method.backbone(images)
    ce = F.cross_entropy(method.logits(images, None), wide(mixed_batch, A, B, C))
    distillations = []
    for name in held:
        student_logits = method.heads[name](features)
        distillations.append(distillation_loss(kd, student_logits, teacher_logits[name], tau))
    expected = torch.stack(distillations).sum()
    if over_tasks == "mean":
        expected = expected / len(held)
    assert {name: float(term) for name, term in terms.items()} == pytest.approx(
        {"ce": ce.item(), "kd": expected.item()}, abs=1e-5
    )
    assert torch.allclose(loss, ce + expected, atol=1e-5)


def test_the_loss_of_the_first_task_is_cross_entropy_alone() -> None:
    method = begun("e2e", A)
    loss, terms = method.loss(batch(A), START)
    assert terms.keys() == {"ce"}
    assert torch.equal(loss, F.cross_entropy(method.logits(batch(A).images, None), batch(A).labels))


def test_fine_tuning_starts_at_teacher_and_trains_all_weights() -> None:
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
    """Return parameter -> the noise that a step adds to a zero gradient."""
    method = begun("e2e", A, **settings)
    method.loss(batch(A, step=step, rows=rows), Progress(0, done, 1, 1000))
    for p in method.parameters():
        p.grad = torch.zeros_like(p)
    method.heads["a"].bias.grad = None
    method.after_backward()
    assert method.heads["a"].bias.grad is None
    return {name: p.grad for name, p in method.named_parameters() if p.grad is not None}


def test_noise_setting_adds_gradient_noise_of_decaying_variance() -> None:
    assert not any(bool(g.any()) for g in noisy().values())
    for done in (0, 99):
        drawn = noisy(noise=True, done=done)
        flat = torch.cat([g.flatten() for g in drawn.values()])
        assert len(flat) > 20000
        assert float(flat.var()) == pytest.approx(0.3 / (1 + done) ** 0.55, rel=0.05)
        assert abs(float(flat.mean())) < 0.01
        starts = [g.flatten()[:32] for g in drawn.values() if g.numel() >= 32]
        assert len({tuple(start.tolist()) for start in starts}) == len(starts), (
            "parameters must get different noise"
        )


def test_noise_is_equal_on_all_ranks_and_differs_between_steps() -> None:
    rank_0 = noisy(noise=True, rows=slice(0, 6, 2))
    rank_1 = noisy(noise=True, rows=slice(1, 6, 2))
    next_step = noisy(noise=True, step=1)
    for name, noise in rank_0.items():
        assert torch.equal(noise, rank_1[name])
        assert not torch.equal(noise, next_step[name])


# ---- the steps -----------------------------------------------------------------------------------
def stored(run: Run, job: StageJob) -> Carried:
    """Return the carried state that a stage stored."""
    return Carried.from_bytes(run.artifact(job).read("carried.safetensors"))


def exemplars_by_class(carried: Carried) -> dict[str, int]:
    """Return class -> number of exemplars."""
    counts = {}
    for classes in carried.meta[MEMORY].values():
        for name, keys in classes.items():
            counts[name] = len(keys)
    return counts


def test_fine_tuning_uses_balanced_exemplars_before_memory_is_reduced(lab: Lab) -> None:
    """A memory of 10 keeps 5 images of each of the first two classes.

    Fine-tuning uses 5 images of each of the five classes. After it, 2 of each are kept.
    """
    run = stream(lab, "e2e", memory=10)
    assert [[job.step for job in run.stages(task)] for task in (0, 1)] == [
        ["train", "herd"],
        ["train", "balance", "finetune", "herd"],
    ]
    run.trained(1)
    jobs = run.stages(1)
    train, balance, finetune, herd = [stored(run, job) for job in jobs]
    first = run.carried(0).meta[MEMORY]
    assert exemplars_by_class(train) == dict.fromkeys("01", 5)
    assert exemplars_by_class(balance) == dict.fromkeys("01234", 5)
    assert exemplars_by_class(finetune) == dict.fromkeys("01234", 5)
    assert exemplars_by_class(herd) == dict.fromkeys("01234", 2)
    assert first["two"] == train.meta[MEMORY]["two"] == balance.meta[MEMORY]["two"]
    assert herd.meta[MEMORY]["two"] == {c: keys[:2] for c, keys in first["two"].items()}
    finetuned = run.artifact(jobs[2])
    assert history(run.artifact(jobs[0]))[-1]["images"]
    assert history(finetuned)[-1]["images"] == 25
    num_parameters = sum(p.numel() for p in run.live(1).parameters())
    assert finetuned.manifest["trained_parameters"] == num_parameters
    before = balance.tensors["backbone/blocks.0.mlp.fc1.weight"]
    after = finetune.tensors["backbone/blocks.0.mlp.fc1.weight"]
    assert not torch.equal(before, after)


def test_exemplars_are_selected_with_fine_tuned_features(lab: Lab) -> None:
    """The exemplars are nearest to the mean of the unnormalized features of their class."""
    run = stream(lab, "e2e", memory=10)
    assert E2eSettings().selection == "closest"
    live = run.live(1).eval()
    job = run.stages(1)[0]
    assert job.task is not None
    batches = [*Feed(job, (job.task,), "train", Group(), training=False).evaluate()]
    with torch.no_grad():
        features = torch.cat([live.backbone(b.images) for b in batches])
    labels = torch.cat([b.labels for b in batches])
    keys: list[str] = []
    for b in batches:
        keys += b.keys or []
    exemplars = run.carried(1).meta[MEMORY]["three"]
    for label, name in enumerate("234"):
        rows = (labels == label).nonzero().squeeze(1).tolist()
        rows.sort(key=lambda row: keys[row])
        nearest = SELECTIONS["closest"](features[rows], 2, torch.Generator())
        assert exemplars[name] == [keys[rows[index]] for index in nearest]


def test_the_teacher_of_fine_tuning_is_the_network_after_training(lab: Lab) -> None:
    run = stream(lab, "e2e", memory=10)
    run.trained(1)
    _, balance, finetune, _ = run.stages(1)
    trained = stored(run, balance).tensors
    teacher: Any = lab.live[finetune.key].teacher
    for name, tensor in teacher.backbone.state_dict().items():
        assert torch.equal(tensor, trained[f"backbone/{name}"])
    head_tensors = {}
    for task, head in teacher.heads.items():
        for name, tensor in head.state_dict().items():
            head_tensors[f"heads/{task}/{name}"] = tensor
    assert head_tensors.keys() == {name for name in trained if name.startswith("heads/")}
    for name, tensor in head_tensors.items():
        assert torch.equal(tensor, trained[name])
    assert [*teacher.heads] == ["two", "three"]


def test_base_task_gets_exemplars_and_next_task_is_fine_tuned(lab: Lab) -> None:
    run = stream(lab, "e2e", base="two", memory=10)
    assert [[job.step for job in run.stages(task)] for task in (0, 1)] == [
        ["herd"],
        ["train", "balance", "finetune", "herd"],
    ]
    exemplars_of = remembered(run, 1, run.carried(1).meta[MEMORY])
    counts = {name: len(exemplars) for name, (_, exemplars) in exemplars_of.items()}
    assert counts == dict.fromkeys("01234", 2)
