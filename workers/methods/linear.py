"""Linear probe: the backbone is frozen, each task trains only its head. MEAT's `Classifier` column."""

from __future__ import annotations

from workers.methods.base import Method


class Linear(Method):
    """Everything is in the base class: a frozen backbone and one head per task (a star, zero forgetting)."""

    name = "linear"
