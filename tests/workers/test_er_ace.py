"""Tests of ER-ACE: worked values, and no gradient from new images for outputs of old classes."""

from __future__ import annotations

import pytest
import torch
from class_incremental_steps import START, A, B, batch, begun, moved
from reservoir_steps import NEW, OLD, Z2, Z, identity, losses, rows


def test_er_ace_masks_old_classes_only_for_new_images() -> None:
    """Without the mask, the first term would be 1.940453."""
    method = identity("er_ace", (OLD, NEW))
    method.training_tasks = (OLD, NEW)
    replay = rows(Z2, [0, 0])
    replay.tasks = torch.tensor([0, 1])  # global labels 0 and 1
    images = rows(Z, [0, 1], replay=replay)
    ce, replayed = losses(method, images)
    assert ce == pytest.approx(1.083808, abs=1e-6)
    assert ce + replayed == pytest.approx(2.015158, abs=1e-5)


def test_er_ace_gives_old_outputs_no_gradient_from_new_images() -> None:
    method = begun("er_ace", A, B)
    moved(method)
    method.loss(batch(B), START)[0].backward()
    assert all(p.grad is None for p in method.heads["a"].parameters())
    assert method.heads["b"].weight.grad.abs().min() > 0
