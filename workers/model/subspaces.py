"""Subspaces spanned by the inputs of layers, and directions outside these subspaces.

Liang, Li: InfLoRA: Interference-Free Low-Rank Adaptation for Continual Learning, CVPR 2024.
Subspaces are updated as in DualGPM (Liang, Li: Adaptive Plasticity Improvement for Continual
Learning, CVPR 2023).

Axes: d inputs of a layer, g dimensions of a subspace, r rank. R (d, d) is the second moment of the
inputs, a mean of x x^T. Subspaces are computed in fp64 on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# singular vectors are ignored if their singular value, divided by the largest of R, is smaller
NEGLIGIBLE = 1e-6


class Subspace(NamedTuple):
    """The subspace of the earlier inputs of a layer, given by its basis or the complement's basis.

    The smaller basis is stored.

    Attributes:
        basis: F, orthonormal columns (d, g).
        is_free: F spans the orthogonal complement of the earlier inputs. Otherwise F spans the
            earlier inputs.
    """

    basis: Tensor
    is_free: bool = False

    def project(self, moments: Tensor) -> Tensor:
        """Return the part of R outside the subspace of earlier inputs, (d, d)."""
        inside = self.basis @ (self.basis.T @ moments)
        return inside if self.is_free else moments - inside


class InputMoments:
    """The sums of x x^T over the inputs x (b, N, d) of linear layers of equal width.

    Attributes:
        sums: Sums on the device, (layers, d, d) in fp64.
        count: Number of tokens in each sum, a scalar tensor on the device.
    """

    def __init__(self, layers: Sequence[nn.Linear]):
        self.layers = layers
        width, device = layers[0].in_features, layers[0].weight.device
        shape = (len(layers), width, width)
        self.sums = torch.zeros(shape, dtype=torch.float64, device=device)
        self.count = torch.zeros((), dtype=torch.float64, device=device)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Add the inputs of every forward pass inside the context to the sums."""
        hooks = [
            layer.register_forward_pre_hook(partial(self._add, index))
            for index, layer in enumerate(self.layers)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _add(self, index: int, module: nn.Module, inputs: Any) -> None:
        tokens = inputs[0].detach().flatten(0, -2).double()  # (b N, d)
        self.sums[index] += tokens.T @ tokens
        if index == 0:
            self.count += len(tokens)


def find_directions(moments: Tensor, subspace: Subspace | None, rank: int) -> Tensor:
    """Return A (r, d): the leading directions of new inputs outside the subspace of earlier ones.

    Rows have length 1 / sqrt(3), as in InfLoRA's released code. If there are fewer than r such
    directions, the other rows are zero, because an update along another direction would change the
    outputs for earlier inputs.

    Args:
        moments: R of the new inputs.
        subspace: The subspace of earlier inputs. None: no earlier inputs.
        rank: r.
    """
    outside = moments if subspace is None else subspace.project(moments)
    vectors, values = decompose(outside)
    directions = vectors[:, :rank].T / math.sqrt(3)
    found = values[:rank] > NEGLIGIBLE * torch.linalg.matrix_norm(moments, 2)
    return torch.where(found[:, None], directions, torch.zeros(()).double())


def extend_subspace(subspace: Subspace | None, moments: Tensor, threshold: float) -> Subspace:
    """Extend a subspace by the leading directions of new inputs, as in DualGPM.

    Directions are added until the subspace holds a share `threshold` of |R|_F^2. A first subspace
    (`subspace` is None) leaves out the direction that reaches the threshold, but has at least one
    direction. The singular values of R are the squares of those of the inputs, so the share is one
    of the sum of their fourth powers.

    Args:
        subspace: The subspace of earlier inputs. None: no earlier inputs.
        moments: R of the new inputs.
        threshold: eps, in (0, 1].
    """
    outside = moments if subspace is None else subspace.project(moments)
    vectors, values = decompose(outside)
    shares = values.square() / moments.square().sum()
    # for each direction: the share outside the subspace before this direction is added
    missing = shares.sum() - (shares.cumsum(0) - shares)
    if subspace is None:
        count = max(int((shares.cumsum(0) < threshold).sum()), 1)
    elif subspace.is_free:
        count = int((missing >= 1 - threshold).sum())
    else:
        count = int((1 - missing < threshold).sum())
    count = min(count, int((values > NEGLIGIBLE * torch.linalg.matrix_norm(moments, 2)).sum()))
    added = vectors[:, :count]
    if subspace is None:
        return keep_smaller(added)
    basis = subspace.basis
    if not subspace.is_free:
        return keep_smaller(torch.cat([basis, added], 1))
    # F spans the complement: remove the added directions from it
    left, _ = decompose(basis - added @ (added.T @ basis))
    return Subspace(left[:, : basis.shape[1] - count], is_free=True)


def keep_smaller(basis: Tensor) -> Subspace:
    """Return the subspace with this basis (d, g); store its complement if g > d / 2."""
    width, size = basis.shape
    if size <= width / 2:
        return Subspace(basis)
    vectors, _, _ = torch.linalg.svd(basis)
    return Subspace(vectors[:, size:], is_free=True)


def decompose(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return left singular vectors (d, n) and singular values (n,), in descending order.

    Signs are chosen so that the entry with the largest magnitude of each vector is positive.
    Otherwise signs would depend on the machine.
    """
    vectors, values, _ = torch.linalg.svd(matrix, full_matrices=False)
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    return vectors * largest.sign(), values
