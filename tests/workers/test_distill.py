"""Distillation: worked values, gradients, and a teacher that stays what the network was."""

from __future__ import annotations

import pytest
import torch
from timm.layers import DropPath
from torch import Tensor, nn
from torch.nn import functional as F

from workers.job import BackboneSettings
from workers.model.distill import Teacher, kd_ce
from workers.model.vit import build, digest_of

Y = torch.tensor([[2.0, 0.0, -1.0], [0.5, 0.5, 0.0]], dtype=torch.float64)
Z = torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, -1.0]], dtype=torch.float64)


@pytest.mark.parametrize(("tau", "expected"), [(1.0, 1.08032782), (2.0, 1.08430537)])
def test_distillation_has_the_worked_values(tau: float, expected: float):
    assert float(kd_ce(Z, Y, tau)) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("tau", [1.0, 2.0])
def test_distillation_has_the_gradient_of_the_divergence(tau: float):
    """KL(softmax(y / tau) || softmax(z / tau)), a mean over the batch: what the two differ by does not depend on z."""
    student = [Z.clone().requires_grad_() for _ in range(2)]
    kd_ce(student[0], Y, tau).backward()
    F.kl_div((student[1] / tau).log_softmax(1), (Y / tau).softmax(1), reduction="batchmean").backward()
    assert torch.allclose(student[0].grad, student[1].grad, atol=1e-7)  # type: ignore[arg-type]
    assert student[0].grad.abs().max() > 0.01  # type: ignore[union-attr]


def test_a_student_that_answers_as_its_teacher_gets_no_gradient():
    student = Y.clone().requires_grad_()
    kd_ce(student, Y, 2.0).backward()
    assert student.grad is not None
    assert student.grad.abs().max() < 1e-7


def test_low_precision_logits_are_distilled_in_full_precision():
    low = Z.bfloat16(), Y.bfloat16()
    assert torch.equal(kd_ce(*low, 3.0), kd_ce(low[0].float(), low[1].float(), 3.0))


# ---- the teacher ---------------------------------------------------------------------------------------------------------
def network() -> tuple[nn.Module, dict[str, nn.Linear]]:
    torch.manual_seed(0)
    options = {"patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2, "weight_init": "jax"}
    backbone = build(BackboneSettings(img_size=16, options=options, drop_path=0.5))
    return backbone, {"one": nn.Linear(32, 2), "two": nn.Linear(32, 3)}


def images() -> Tensor:
    return torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def test_the_teacher_answers_what_the_network_answered_whatever_becomes_of_it():
    backbone, heads = network()
    expected = {task: head(backbone.eval()(images())).detach() for task, head in heads.items()}
    teacher, before = Teacher(backbone.train(), heads), digest_of(backbone)
    assert not any(m.training for m in teacher.backbone.modules() if isinstance(m, DropPath))
    with torch.no_grad():
        for p in (*backbone.parameters(), *heads["one"].parameters()):
            p.add_(1.0)
    for task, logits in teacher.logits(images()).items():
        assert torch.equal(logits, expected[task])
    assert digest_of(teacher.backbone) == before


def test_the_teacher_costs_one_forward_for_all_heads_and_no_gradient():
    teacher = Teacher(*network())
    passes: list[bool] = []
    teacher.backbone.register_forward_hook(lambda module, given, found: passes.append(torch.is_grad_enabled()))
    found = teacher.logits(images().requires_grad_())
    assert passes == [False]
    assert {task: (tuple(t.shape), t.requires_grad) for task, t in found.items()} == {"one": ((4, 2), False), "two": ((4, 3), False)}
    assert not any(p.requires_grad for module in (teacher.backbone, *teacher.heads.values()) for p in module.parameters())
