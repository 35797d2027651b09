"""Weight alignment: scale the weight vectors of new classes to the mean length of the old ones."""

from __future__ import annotations

from torch import Tensor


def weight_ratio(old: Tensor, new: Tensor) -> Tensor:
    """Return gamma, the mean norm of the rows of `old` (O, d) over that of `new` (K, d).

    The factor makes the mean norms equal, not each norm.
    """
    old_length: Tensor = old.norm(dim=1).mean()
    new_length: Tensor = new.norm(dim=1).mean()
    return old_length / new_length
