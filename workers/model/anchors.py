"""Quadratic penalties on the distance of weights from their anchors, on all weights as one vector.

Elastic weight consolidation, memory aware synapses and synaptic intelligence use such a penalty.
On vectors it takes a few operators per step instead of several per weight tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def flatten(tensors: Iterable[Tensor], out: Tensor | None = None) -> Tensor:
    """Concatenate the entries of tensors to one vector, without a gradient.

    Args:
        tensors: The tensors.
        out: Vector that gets the entries and is returned. None: a new vector.
    """
    with torch.no_grad():
        return torch.cat([tensor.reshape(-1) for tensor in tensors], out=out)


def unflatten(vector: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Split a vector into views with the shapes of `tensors`; invert `flatten`."""
    parts = vector.split([tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


class AnchoredWeights:
    """Weights with an anchor and an importance for each entry.

    Attributes:
        names: The names of the weights.
        weights: The weights theta.
        anchors: The anchors theta*, as one vector (n,).
        importance: The importance Omega of each entry, as one vector (n,).

    Args:
        weights: The weights by name.
        anchors: The anchors by name.
        importance: The importance by name. Weights without importance are left out.
    """

    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        anchors: Mapping[str, Tensor],
        importance: Mapping[str, Tensor],
    ):
        self.names = [*importance]
        self.weights = [weights[name] for name in importance]
        self.anchors = flatten(anchors[name] for name in importance)
        self.importance = flatten(importance.values())
        # All steps reuse these buffers: on a CPU the system clears the pages of new large tensors.
        self._distance = torch.empty_like(self.anchors)
        self._product = torch.empty_like(self.anchors)

    def by_name(self, vector: Tensor) -> dict[str, Tensor]:
        """Return views of a vector (n,) in the shapes of the weights, by name."""
        return dict(zip(self.names, unflatten(vector, self.weights), strict=True))

    def distance(self) -> Tensor:
        """Return theta - theta* as one vector (n,), without a gradient.

        The next call overwrites the vector.
        """
        return flatten(self.weights, out=self._distance).sub_(self.anchors)

    @torch.no_grad()
    def weighted_square(self) -> Tensor:
        """Return the sum of Omega (theta - theta*)^2, a scalar without a gradient."""
        distance = self.distance()
        product = torch.mul(self.importance, distance, out=self._product)
        return product.mul_(distance).sum()

    def penalty(self, factor: float, offset: Tensor) -> Tensor:
        """Return factor * (offset + sum of Omega (theta - theta*)^2), a scalar with a gradient.

        Call `backward` before the next call of a method of this object.
        """
        penalty: Tensor = QuadraticPenalty.apply(self, factor, offset, *self.weights)
        return penalty


class QuadraticPenalty(torch.autograd.Function):
    """See `AnchoredWeights.penalty`. The gradient is that of the plain expression, bit for bit."""

    @staticmethod
    def forward(
        ctx: Any, anchored: AnchoredWeights, factor: float, offset: Tensor, *weights: Tensor
    ) -> Tensor:
        ctx.anchored, ctx.factor = anchored, factor
        return factor * (offset + anchored.weighted_square())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        anchored = ctx.anchored
        # A new tensor, because autograd may use its parts as the gradients of the weights.
        slope = anchored.importance * (gradient * ctx.factor)
        slope.mul_(anchored._distance).mul_(2)
        return None, None, None, *unflatten(slope, anchored.weights)
