"""Tests of distillation: worked values, gradients, and a teacher that does not change."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from timm.layers import DropPath
from torch import Tensor, nn
from torch.nn import functional as F

from workers.job import BackboneSettings
from workers.model.distill import Teacher, kd_bce, kd_ce, kd_kl, kd_sig
from workers.model.vit import build, compute_digest

Y = torch.tensor([[2.0, 0.0, -1.0], [0.5, 0.5, 0.0]], dtype=torch.float64)
Z = torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, -1.0]], dtype=torch.float64)


@pytest.mark.parametrize(("tau", "expected"), [(1.0, 1.08032782), (2.0, 1.08430537)])
def test_distillation_has_the_worked_values(tau: float, expected: float) -> None:
    assert float(kd_ce(Z, Y, tau)) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("tau", [1.0, 2.0])
def test_distillation_has_the_gradient_of_kl_divergence(tau: float) -> None:
    """KD_ce and KL(softmax(y / tau) || softmax(z / tau)), averaged over the batch, differ by a term
    that does not depend on z."""
    student = [Z.clone().requires_grad_() for _ in range(2)]
    kd_ce(student[0], Y, tau).backward()
    F.kl_div(
        (student[1] / tau).log_softmax(1), (Y / tau).softmax(1), reduction="batchmean"
    ).backward()
    assert torch.allclose(student[0].grad, student[1].grad, atol=1e-7)  # type: ignore[arg-type]
    assert student[0].grad.abs().max() > 0.01  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("tau", "divergence", "mean"), [(1.0, 0.28101033, 0.09367011), (2.0, 0.08528288, 0.02842763)]
)
def test_kl_divergence_has_the_worked_values(tau: float, divergence: float, mean: float) -> None:
    """The divergence is KD_ce minus the teacher's entropy. `kd_kl` also averages over the three
    classes, which gives a third, and multiplies by tau^2."""
    assert float(kd_ce(Z, Y, tau) - kd_ce(Y, Y, tau)) == pytest.approx(divergence, abs=1e-6)
    assert float(kd_kl(Z, Y, tau)) == pytest.approx(tau**2 * mean, abs=1e-6)


def test_sigmoid_distillation_has_the_worked_value() -> None:
    assert float(kd_sig(Z, Y)) == pytest.approx(0.68934745, abs=1e-7)


@pytest.mark.parametrize("tau", [1.0, 2.0])
def test_bce_distillation_matches_binary_cross_entropy_of_probabilities(tau: float) -> None:
    expected = F.binary_cross_entropy((Z / tau).softmax(1), (Y / tau).softmax(1))
    assert float(kd_bce(Z, Y, tau)) == pytest.approx(float(expected), abs=1e-6)
    # second entries of softmax (0, -1) and (2, 2); with two classes, both entries cost the same
    p, q = (
        math.e**-1 / (1 + math.e**-1),
        0.5,
    )
    two = kd_bce(torch.tensor([[2.0, 2.0]]), torch.tensor([[0.0, -1.0]]), 1.0)
    assert float(two) == pytest.approx(-(p * math.log(q) + (1 - p) * math.log(1 - q)), abs=1e-6)


def test_bce_distillation_stays_finite_for_certain_student() -> None:
    student = torch.tensor([[1e4, 0.0, -1e4], [0.0, 0.0, 80.0]], requires_grad=True)
    loss = kd_bce(student, Y.float(), 2.0)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(student.grad).all()  # type: ignore[arg-type]
    assert float(kd_bce(torch.ones(3, 1), torch.zeros(3, 1), 2.0)) == pytest.approx(
        0.0, abs=1e-6
    ), "with one class there is nothing to distill"


KINDS = [
    pytest.param(lambda z, y: kd_ce(z, y, 2.0), id="ce"),
    pytest.param(lambda z, y: kd_kl(z, y, 2.0), id="kl"),
    pytest.param(lambda z, y: kd_bce(z, y, 2.0), id="bce"),
    pytest.param(kd_sig, id="sig"),
]


@pytest.mark.parametrize("kd", KINDS)
def test_student_equal_to_its_teacher_gets_no_gradient(
    kd: Callable[[Tensor, Tensor], Tensor],
) -> None:
    student, other = Y.clone().requires_grad_(), Z.clone().requires_grad_()
    kd(student, Y).backward()
    kd(other, Y).backward()
    assert student.grad.abs().max() < 1e-7  # type: ignore[union-attr]
    assert other.grad.abs().max() > 1e-3  # type: ignore[union-attr]


@pytest.mark.parametrize("kd", KINDS)
def test_low_precision_logits_are_distilled_in_full_precision(
    kd: Callable[[Tensor, Tensor], Tensor],
) -> None:
    low = Z.bfloat16(), Y.bfloat16()
    assert torch.equal(kd(*low), kd(low[0].float(), low[1].float()))


@pytest.mark.parametrize("kd", KINDS)
def test_distillation_works_in_mixed_precision(kd: Callable[[Tensor, Tensor], Tensor]) -> None:
    expected = kd(Z.float(), Y.float())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.allclose(kd(Z.float(), Y.float()), expected, atol=1e-6)


# ---- the teacher ---------------------------------------------------------------------------------
def network() -> tuple[nn.Module, dict[str, nn.Linear]]:
    torch.manual_seed(0)
    options = {"patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2, "weight_init": "jax"}
    backbone = build(BackboneSettings(img_size=16, options=options, drop_path=0.5))
    return backbone, {"one": nn.Linear(32, 2), "two": nn.Linear(32, 3)}


def images() -> Tensor:
    return torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def test_teacher_answers_do_not_change_with_the_network() -> None:
    backbone, heads = network()
    expected = {task: head(backbone.eval()(images())).detach() for task, head in heads.items()}
    teacher, before = Teacher(backbone.train(), heads), compute_digest(backbone)
    assert not any(m.training for m in teacher.backbone.modules() if isinstance(m, DropPath))
    with torch.no_grad():
        for p in (*backbone.parameters(), *heads["one"].parameters()):
            p.add_(1.0)
    for task, logits in teacher.logits(images()).items():
        assert torch.equal(logits, expected[task])
    assert compute_digest(teacher.backbone) == before


def test_teacher_uses_one_forward_for_all_heads_without_gradient() -> None:
    teacher = Teacher(*network())
    passes: list[bool] = []
    teacher.backbone.register_forward_hook(
        lambda module, inputs, output: passes.append(torch.is_grad_enabled())
    )
    logits = teacher.logits(images().requires_grad_())
    assert passes == [False]
    assert {task: (tuple(t.shape), t.requires_grad) for task, t in logits.items()} == {
        "one": ((4, 2), False),
        "two": ((4, 3), False),
    }
    assert not any(
        p.requires_grad
        for module in (teacher.backbone, *teacher.heads.values())
        for p in module.parameters()
    )
