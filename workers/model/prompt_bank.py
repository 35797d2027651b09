"""A bank of prompts with keys: images select prompts by the cosines of their queries to the keys.

The prompts of an image depend only on this image, never on other images of the batch. All functions
compute in fp32 or fp64. Axes: B images, L blocks, M prompts in the bank, d width of queries and
keys.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def cosines(query: Tensor, keys: Tensor) -> Tensor:
    """Return the cosines of queries (B, d) to keys (M, d): (B, M)."""
    with torch.autocast(query.device.type, enabled=False):
        return F.normalize(query.float(), dim=-1) @ F.normalize(keys.float(), dim=-1).T


def choose_largest(similarity: Tensor, count: int) -> Tensor:
    """Return the `count` most similar prompts of each image.

    Among prompts with equal similarity, the prompt with the lowest index is chosen.

    Args:
        similarity: (B, M).
        count: N, at most M.

    Returns:
        Indices (B, N), the most similar prompt first.
    """
    rest = similarity.detach()
    chosen: list[Tensor] = []
    for _ in range(count):  # argmax takes the first of equal values; ONNX has no stable sort
        chosen.append(rest.argmax(1, keepdim=True))
        rest = rest.scatter(1, chosen[-1], -torch.inf)
    return torch.cat(chosen, 1)


def weigh_components(query: Tensor, keys: Tensor, attention: Tensor) -> Tensor:
    """Return alpha_m = cos(q .* a_m, K_m), from -1 to 1 (Smith et al., CODA-Prompt).

    Args:
        query: q, (B, d).
        keys: K, (L, M, d).
        attention: a, (L, M, d).

    Returns:
        (L, B, M).
    """
    with torch.autocast(query.device.type, enabled=False):
        unit = F.normalize(query.float(), dim=-1)
        products = unit @ (attention * F.normalize(keys, dim=-1)).mT
        squares = unit.square() @ attention.square().mT  # squared lengths of q .* a_m
        alpha: Tensor = products / squares.clamp(min=torch.finfo(squares.dtype).tiny).sqrt()
        return alpha


def orthonormalize(raw: Tensor, earlier: Tensor) -> Tensor:
    """Return unit vectors from `raw`, orthogonal to one another and to all rows of `earlier`.

    Args:
        raw: (m, w), with m + n at most w.
        earlier: (n, w). The rows may have any length, and need not be orthogonal to one another.

    Returns:
        (m, w), fp32, on the CPU. Row i has the direction of the component of row i of `raw` that is
        orthogonal to `earlier` and to the rows of `raw` before it.
    """
    rows = torch.cat([earlier.cpu(), raw.cpu()]).double()
    basis, triangle = torch.linalg.qr(rows.T)
    signed: Tensor = basis * triangle.diagonal().sign()
    return signed.T[len(earlier) :].float()


def orthogonality(rows: Tensor) -> Tensor:
    """Return mean((Z Z^T - I)^2) of matrices Z (L, M, w), summed over L."""
    with torch.autocast(rows.device.type, enabled=False):
        gram = rows @ rows.mT
        identity = torch.eye(rows.shape[1], device=rows.device)
        penalty: Tensor = (gram - identity).square().mean((1, 2)).sum()
        return penalty
