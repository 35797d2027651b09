"""Weight alignment: scale the weight vectors of new classes to the mean length of the old ones."""

from __future__ import annotations

from torch import Tensor


def compute_weight_ratio(old: Tensor, new: Tensor) -> Tensor:
    """Return gamma, the mean norm of the rows of `old` divided by the mean norm of those of `new`.

    `new` times gamma has rows with the same mean norm as `old`. The norms of single rows still
    differ.

    Args:
        old: Weight vectors of the old classes, (O, d).
        new: Weight vectors of the new classes, (K, d).
    """
    old_length: Tensor = old.norm(dim=1).mean()
    new_length: Tensor = new.norm(dim=1).mean()
    return old_length / new_length
