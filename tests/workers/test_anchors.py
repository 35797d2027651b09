"""Tests of penalties on all weights as one vector: the gradients equal the plain expression's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from workers.model.anchors import AnchoredWeights, flatten, unflatten

SHAPES = {"a": (5, 3), "b": (7,), "c": (2, 3, 4)}


def draw(scale: float = 1.0) -> dict[str, Tensor]:
    return {name: scale * torch.randn(shape) for name, shape in SHAPES.items()}


def test_flatten_and_unflatten_are_inverse() -> None:
    tensors = [*draw().values()]
    vector = flatten(tensors)
    assert vector.shape == (46,)
    parts = unflatten(vector, tensors)
    assert all(map(torch.equal, parts, tensors))
    parts[1].zero_()
    assert (vector[15:22] == 0).all()  # the parts are views


@pytest.mark.parametrize("seed", range(5))
def test_penalty_has_the_gradient_of_the_plain_expression(seed: int) -> None:
    torch.manual_seed(seed)
    weights = {name: nn.Parameter(tensor) for name, tensor in draw().items()}
    anchors = draw()
    importance = {name: tensor.square() for name, tensor in draw(1e3).items()}
    offset, factor = torch.tensor(0.25), 0.5 * 0.3
    anchored = AnchoredWeights(weights, anchors, importance)
    total = offset
    for name, weight in weights.items():
        total = total + (importance[name] * (weight - anchors[name]).square()).sum()
    plain = factor * total
    value = anchored.penalty(factor, offset)
    assert torch.allclose(value, plain, rtol=1e-6)
    share = 0.75  # weight of a micro-batch
    expected = torch.autograd.grad(plain * share, [*weights.values()])
    actual = torch.autograd.grad(value * share, [*weights.values()])
    assert all(map(torch.equal, actual, expected))


def test_weights_without_importance_are_left_out() -> None:
    weights = {name: nn.Parameter(tensor) for name, tensor in draw().items()}
    anchored = AnchoredWeights(weights, draw(), {"b": torch.ones(7)})
    assert anchored.distance().shape == (7,)
    assert [weight.shape for weight in anchored.weights] == [(7,)]
