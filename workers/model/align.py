"""Weight alignment: new classes get weight vectors as long, on average, as those of old ones."""

from __future__ import annotations

from torch import Tensor


def weight_ratio(old: Tensor, new: Tensor) -> Tensor:
    """gamma = mean_c ||w_c|| over rows of `old` (O, d) / the same over rows of `new` (K, d): the
    factor that makes the mean norms equal, not each norm."""
    old_length: Tensor = old.norm(dim=1).mean()
    new_length: Tensor = new.norm(dim=1).mean()
    return old_length / new_length
