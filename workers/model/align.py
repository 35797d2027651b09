"""Weight alignment: weight vectors of new classes become as long, on average, as those of old."""

from __future__ import annotations

from torch import Tensor


def weight_ratio(old: Tensor, new: Tensor) -> Tensor:
    """Return gamma, the mean norm of the rows of `old` (O, d) over that of `new` (K, d).

    The factor makes the mean norms equal, not each norm.
    """
    old_length: Tensor = old.norm(dim=1).mean()
    new_length: Tensor = new.norm(dim=1).mean()
    return old_length / new_length
