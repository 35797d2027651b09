"""Tests of SLCA and head alignment: values of the equations, training, and use of the heads."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import method_steps
import pytest
import torch
from method_steps import ONE, TWO, rates, vit
from torch import Tensor
from torch.nn import functional as F

from pipeline.testing.lab import OPTIMIZERS, Lab, Run, again, compute_task_logits
from workers import loop
from workers.errors import UserError
from workers.methods.bases.alignment import (
    AlignmentPlan,
    ClassGaussians,
    align_heads,
    compute_normalised_loss,
    fit_gaussians,
    list_shrink_factors,
)
from workers.methods.slca import Slca, SlcaSettings
from workers.model.vit import compute_digest
from workers.rng import derive_seed
from workers.storage.taskstate import Carried

PLAN = AlignmentPlan(2, 16, 16, 0.1, 0.1, shrinks=True)


# ---- alignment -----------------------------------------------------------------------------------
def test_normalised_loss_matches_worked_value() -> None:
    logits = [torch.tensor([[3.0, 4]]), torch.tensor([[0.0, 1]])]
    loss = compute_normalised_loss(logits, torch.tensor([0]), 0.1)
    assert float(loss) == pytest.approx(3.36843104, abs=1e-5)
    scaled = compute_normalised_loss([7 * part for part in logits], torch.tensor([0]), 0.1)
    assert float(scaled) == pytest.approx(float(loss), abs=1e-5)


def test_means_of_earlier_tasks_are_shrunk() -> None:
    assert list_shrink_factors(4) == pytest.approx([0.925, 0.95, 0.975, 1])
    assert list_shrink_factors(1) == pytest.approx([1])


def test_fitted_gaussians_match_feature_means_and_covariances() -> None:
    features = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(40) % 2
    gaussians = fit_gaussians(features, labels, 2)
    for label in range(2):
        rows = features[labels == label]
        covariance = torch.cov(rows.T) + 1e-4 * torch.eye(3)
        factor = gaussians.factors[label]
        assert torch.allclose(gaussians.means[label], rows.mean(0), atol=1e-6)
        assert torch.allclose(factor @ factor.T, covariance, atol=1e-5)
        assert torch.equal(factor, factor.tril())


def test_a_class_of_one_image_has_a_narrow_gaussian() -> None:
    gaussians = fit_gaussians(torch.ones(1, 2), torch.tensor([0]), 1)
    assert torch.allclose(gaussians.factors[0], 0.01 * torch.eye(2))


def test_drawn_features_have_the_mean_and_covariance_of_their_class() -> None:
    factors = torch.tensor([[[1.0, 0], [0.5, 2]], [[0.1, 0], [0, 0.1]]])
    gaussians = ClassGaussians(torch.tensor([[1.0, -2], [3, 0]]), factors)
    drawn = gaussians.draw(20_000, [5, 6], shrink=0.9)
    assert drawn.shape == (2, 20_000, 2)
    assert torch.allclose(drawn.mean(1), 0.9 * gaussians.means, atol=0.05)
    assert torch.allclose(torch.cov(drawn[0].T), factors[0] @ factors[0].T, atol=0.1)
    other = gaussians.draw(20_000, [7, 6], shrink=0.9)
    assert torch.equal(drawn[1], other[1])
    assert not torch.equal(drawn[0], other[0])


def gaussians_of(seed: int, classes: int) -> ClassGaussians:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(20 * classes, 4, generator=generator)
    labels = torch.arange(classes).repeat(20)
    return fit_gaussians(features + 3 * F.one_hot(labels, 4) + seed, labels, classes)


def toy() -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, ClassGaussians]]:
    generator = torch.Generator().manual_seed(9)
    heads = {}
    for name, classes in (("one", 2), ("two", 3)):
        heads[name] = (torch.randn(classes, 4, generator=generator), torch.zeros(classes))
    return heads, {"one": gaussians_of(0, 2), "two": gaussians_of(1, 3)}


def test_first_alignment_step_equals_sgd_on_the_loss() -> None:
    heads, gaussians = toy()
    plan = AlignmentPlan(1, 16, 80, 0.1, 0.1, shrinks=True)
    aligned = align_heads(heads, gaussians, plan, seed=3)
    weight = torch.cat([w for w, _ in heads.values()]).requires_grad_(True)
    features = []
    for name, classes, rho in (("one", 2, 0.95), ("two", 3, 1.0)):
        seeds = [derive_seed(3, "align", name, label, 0) for label in range(classes)]
        features.append(gaussians[name].draw(16, seeds, rho).flatten(0, 1))
    logits = (torch.cat(features) @ weight.T).split([2, 3], 1)
    labels = torch.arange(5).repeat_interleave(16)
    compute_normalised_loss(logits, labels, 0.1).backward()
    assert weight.grad is not None
    expected = weight - 0.1 * (weight.grad + 5e-4 * weight)
    assert torch.allclose(torch.cat([w for w, _ in aligned.values()]), expected, atol=1e-6)


def test_the_rate_falls_along_a_cosine_over_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    step = torch.optim.SGD.step

    def recording(self: torch.optim.SGD, *arguments: Any) -> Any:
        seen.append(self.param_groups[0]["lr"])
        return step(self, *arguments)

    monkeypatch.setattr(torch.optim.SGD, "step", recording)
    heads, gaussians = toy()
    align_heads(heads, gaussians, AlignmentPlan(5, 16, 16, 0.01), seed=0)
    expected = [0.005 * (1 + math.cos(math.pi * epoch / 5)) for epoch in range(5)]
    assert seen == pytest.approx([rate for rate in expected for _ in range(5)])


def test_alignment_is_deterministic_for_its_arguments() -> None:
    heads, gaussians = toy()
    first, second = (align_heads(heads, gaussians, PLAN, seed=0) for _ in range(2))
    other = align_heads(heads, gaussians, PLAN, seed=1)
    for name, (weight, bias) in first.items():
        assert torch.equal(weight, second[name][0])
        assert torch.equal(bias, second[name][1])
        assert not torch.equal(weight, other[name][0])
    untouched, _ = toy()
    assert all(torch.equal(heads[name][0], untouched[name][0]) for name in heads)


def test_alignment_tells_the_classes_of_all_tasks_apart() -> None:
    heads, gaussians = toy()
    aligned = align_heads(
        heads, gaussians, AlignmentPlan(30, 64, 64, 0.3, 0.1, shrinks=True), seed=0
    )
    probes = torch.cat([gaussians["one"].means, gaussians["two"].means])
    logits = torch.cat([probes @ w.T + b for w, b in aligned.values()], 1)
    assert logits.argmax(1).tolist() == [0, 1, 2, 3, 4]
    plain = align_heads(heads, gaussians, AlignmentPlan(30, 64, 64, 0.3), seed=0)
    logits = torch.cat([probes @ w.T + b for w, b in plain.values()], 1)
    assert logits.argmax(1).tolist() == [0, 1, 2, 3, 4]


# ---- training ------------------------------------------------------------------------------------
def test_the_backbone_learns_at_a_lower_rate() -> None:
    method = Slca(vit(), SlcaSettings(backbone_rate=0.02), 0)
    method.scenario = "class"
    groups = method_steps.begun(method, rates=rates(6.0))
    by_name = {group["name"]: group.get("lr") for group in groups}
    assert (by_name.pop("head.weight"), by_name.pop("head.bias")) == (None, None)
    assert by_name == {name: pytest.approx(0.02 * 1e-2) for name in by_name}
    assert set(by_name) == {"backbone", "backbone.exempt"}


def test_training_changes_no_head_of_an_earlier_task() -> None:
    method = Slca(vit(), SlcaSettings(), 0)
    method.scenario = "class"
    method.stream = (ONE, TWO)
    method_steps.begun(method, ONE)
    state, carried = method.finish()
    method = Slca(vit(), SlcaSettings(), 0)
    method.scenario, method.stream = "class", (ONE, TWO)
    method.load_task(state)
    groups = method_steps.begun(method, TWO, carried)
    trained = {id(p) for group in groups for p in group["params"]}
    assert not trained & {id(p) for p in method.heads["one"].parameters()}
    loss, _ = method.loss(method_steps.batch(classes=3), method_steps.PROGRESS)
    features = method.features(method_steps.images())
    labels = method_steps.batch(classes=3).labels
    assert torch.allclose(loss, F.cross_entropy(method.heads["two"](features), labels), atol=1e-6)
    assert method.competing_outputs() == 3


# ---- stages --------------------------------------------------------------------------------------
def run_of(lab: Lab, **settings: Any) -> Run:
    return lab.run_of("slca", {**OPTIMIZERS["adamw"], "epochs": 1}, settings=settings)


def carried_of(run: Run, task: int, step: str) -> dict[str, Tensor]:
    (job,) = [job for job in run.stages(task) if job.step == step]
    return Carried.from_bytes(run.artifact(job).read("carried.safetensors")).tensors


def test_the_first_task_is_not_aligned(lab: Lab) -> None:
    run = run_of(lab)
    assert [job.step for job in run.stages(0)] == ["train", "statistics"]
    assert [job.step for job in run.stages(1)] == ["train", "statistics", "align"]
    assert [step.name for step in Slca.steps_for(SlcaSettings(), -1)] == ["statistics"]


def test_unaligned_heads_are_carried_and_aligned_heads_served(lab: Lab) -> None:
    run = run_of(lab)
    trained, aligned = (carried_of(run, 1, step) for step in ("train", "align"))
    first = run.state(0).head
    for key in ("weight", "bias"):
        for name in ("two", "three"):
            assert torch.equal(trained[f"heads/{name}/{key}"], aligned[f"heads/{name}/{key}"])
        assert torch.equal(trained[f"heads/two/{key}"], first[key])
        served = run.served(1).heads
        assert torch.equal(getattr(served["two"], key), aligned[f"heads/two/aligned.{key}"])
        assert torch.equal(getattr(served["three"], key), run.state(1).head[key])
        assert not torch.equal(getattr(served["two"], key), first[key])
        assert not torch.equal(run.state(1).head[key], aligned[f"heads/three/{key}"])


def test_alignment_and_statistics_leave_the_backbone(lab: Lab) -> None:
    run = run_of(lab)
    steps = [carried_of(run, 1, step) for step in ("train", "statistics", "align")]
    for name in [name for name in steps[0] if name.startswith("backbone/")]:
        assert torch.equal(steps[0][name], steps[1][name])
        assert torch.equal(steps[0][name], steps[2][name])
    assert compute_digest(run.served(1).backbone) != run.served(1).backbone_digest


def test_statistics_are_computed_once_and_never_updated(lab: Lab) -> None:
    run = run_of(lab)
    first, last = carried_of(run, 0, "statistics"), carried_of(run, 1, "align")
    for key in ("means", "factors"):
        assert torch.equal(first[f"heads/two/{key}"], last[f"heads/two/{key}"])
    assert last["heads/three/factors"].shape == (3, 32, 32)


def test_without_alignment_heads_stay_as_they_were_trained(lab: Lab) -> None:
    run = run_of(lab, align_epochs=0)
    trained = carried_of(run, 1, "train")
    for name, task in (("two", 0), ("three", 1)):
        images = run.images(task)
        with torch.no_grad():
            features = run.served(1).backbone(images)
        expected = F.linear(
            features, trained[f"heads/{name}/weight"], trained[f"heads/{name}/bias"]
        )
        assert torch.allclose(compute_task_logits(run.served(1), images, name), expected, atol=1e-5)


def test_the_alignment_takes_tasks_in_stream_order(lab: Lab) -> None:
    """Alphabetical order would be different."""
    run = run_of(lab)
    job = run.stages(1)[-1]
    with mock.patch("workers.methods.bases.alignment.align_heads", wraps=align_heads) as aligning:
        lab.stage(again(job, "watched"))
    (heads, _, plan, _), _ = aligning.call_args
    assert [*heads] == ["two", "three"]
    assert plan == AlignmentPlan(5, 256, 256, 0.01, 0.1, shrinks=True)


def test_an_alignment_without_gaussians_is_refused(lab: Lab) -> None:
    run = run_of(lab)
    tensors = carried_of(run, 1, "statistics")
    kept = {k: t for k, t in tensors.items() if not k.startswith("heads/two/")}
    job = again(run.stages(1)[-1], "damaged")
    with (
        mock.patch.object(loop, "load_carried", return_value=Carried(kept, {"aligned": []})),
        pytest.raises(UserError, match="task 'two': the carried state lacks the Gaussians"),
    ):
        lab.stage(job)


def test_carried_state_without_aligned_head_is_refused(lab: Lab) -> None:
    run = run_of(lab)
    carried, method = run.carried(1), run.fresh(1)
    method.load_task(run.state(0))
    kept = {k: t for k, t in carried.tensors.items() if "aligned" not in k}
    with pytest.raises(UserError, match="task 'two': the carried state lacks its aligned head"):
        method.load_carried(Carried(kept, carried.meta))
    method.load_carried(carried)
