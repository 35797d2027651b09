"""Distillation of features (UCIR), and of the pooled outputs of the blocks of a ViT (PODNet).

Hou et al.: Learning a Unified Classifier Incrementally via Rebalancing, CVPR 2019; Douillard et
al.: PODNet, ECCV 2020. Axes: b images, d width, h x w grid of patches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def cosine_distance(student: Tensor, teacher: Tensor) -> Tensor:
    """Return 1 - the cosine of the features (b, d) of student and teacher, in fp32.

    The result is averaged over the batch.
    """
    return 1 - F.cosine_similarity(student.float(), teacher.float(), dim=1).mean()


def pool_axes(maps: Tensor) -> Tensor:
    """Pool maps (b, d, h, w) to unit vectors (b, d (w + h)).

    The squared values are summed over the height, which gives d w numbers, and separately over the
    width, which gives d h numbers.
    """
    squares = maps.float().square()
    columns = squares.sum(2).flatten(1)  # (b, d w)
    rows = squares.sum(3).flatten(1)  # (b, d h)
    return F.normalize(torch.cat([columns, rows], 1), dim=1)


def pod(student: list[Tensor], teacher: list[Tensor]) -> Tensor:
    """Return the POD loss: the distance of pooled maps, averaged over the batch and over blocks.

    Args:
        student: A map (b, d, h, w) for each block.
        teacher: Maps of the same blocks.
    """
    return torch.stack(
        [
            (pool_axes(a) - pool_axes(b)).norm(dim=1).mean()
            for a, b in zip(student, teacher, strict=True)
        ]
    ).mean()


def compute_features_and_maps(vit: Any, images: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the features (b, d) of a ViT, and the patch tokens after each block but the last.

    The patch tokens have the shape of maps (b, d, h, w); prefix tokens are left out. The features
    equal `vit(images)`.
    """
    tokens, blocks = vit.forward_intermediates(
        images, indices=[*range(len(vit.blocks) - 1)], output_fmt="NLC"
    )
    return vit.forward_head(tokens), [
        patches.transpose(1, 2).unflatten(2, vit.patch_embed.grid_size) for patches in blocks
    ]
