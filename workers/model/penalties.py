"""HAT's regularisation term, which methods with unit masks add to the cross-entropy.

Serra, Suris, Miron, Karatzoglou: Overcoming Catastrophic Forgetting with Hard Attention to the
Task, ICML 2018.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def newly_used(masks: Iterable[Tensor], used: Iterable[Tensor]) -> Tensor:
    """Return HAT's regularisation term R (Eq. 4, 5): the mean mask of units that are still unused.

    R is the sum of a (1 - used) divided by the sum of (1 - used), both over all sites (groups of
    units). It is 0 if earlier tasks use all units.

    Args:
        masks: Masks a in [0, 1], one tensor per site, with gradients.
        used: Boolean tensors of the same shapes, True for units that earlier tasks use.
    """
    taken = []
    unused = []
    for mask, is_used in zip(masks, used, strict=True):
        is_free = ~is_used.to(mask.device)
        taken.append((mask * is_free).sum())
        unused.append(is_free.sum())
    return torch.stack(taken).sum() / torch.stack(unused).sum().clamp(min=1)
