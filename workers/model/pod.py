"""Distillation of features: their direction, and what the blocks of a ViT hand on, pooled over rows
and columns (POD).

Axes: b images, d width, h x w grid of patches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def cosine_distance(student: Tensor, teacher: Tensor) -> Tensor:
    """1 - cos of the angle between features (b, d) and those of the teacher, a mean over the batch,
    in fp32."""
    return 1 - F.cosine_similarity(student.float(), teacher.float(), dim=1).mean()


def pool_axes(maps: Tensor) -> Tensor:
    """(b, d, h, w) -> unit vectors (b, d (w + h)): squares, summed over the height, and over the
    width."""
    squares = maps.float().square()
    columns = squares.sum(2).flatten(1)  # (b, d w)
    rows = squares.sum(3).flatten(1)  # (b, d h)
    return F.normalize(torch.cat([columns, rows], 1), dim=1)


def pod(student: list[Tensor], teacher: list[Tensor]) -> Tensor:
    """Distance between pooled maps of student and teacher, a mean over the batch and over
    blocks."""
    return torch.stack(
        [
            (pool_axes(a) - pool_axes(b)).norm(dim=1).mean()
            for a, b in zip(student, teacher, strict=True)
        ]
    ).mean()


def features_and_maps(vit: Any, images: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Images (b, 3, H, W) -> features (b, d), as `vit` itself gives them, and the patch tokens that
    each block but the last hands on, as maps (b, d, h, w): class token and the like left out."""
    tokens, blocks = vit.forward_intermediates(
        images, indices=[*range(len(vit.blocks) - 1)], output_fmt="NLC"
    )
    return vit.forward_head(tokens), [
        patches.transpose(1, 2).unflatten(2, vit.patch_embed.grid_size) for patches in blocks
    ]
