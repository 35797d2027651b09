"""Protect parameter entries that earlier tasks need: zero their gradients, restore their values.

A zero gradient alone does not keep an entry constant, because decoupled weight decay and the
momentum of earlier steps still change it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from workers.model.anchors import flatten, unflatten


class Protector:
    """Zeroes the gradients of locked entries, and restores their values after a step.

    Call order in a step: backward, sum over ranks, `gate`, clip, optimizer step, `restore`. A
    boolean lock keeps the values that the entries have when this object is created.

    Args:
        locks: Pairs (parameter, lock) by name; a lock broadcasts to its parameter. Boolean: True
            entries do not change, bit for bit. Float in [0, 1]: this share of each change is
            undone. Under SGD without momentum and weight decay, this equals a factor on the
            gradient. With other optimizers a factor on the gradient would not work: Adam cancels
            it, and weight decay ignores it.
    """

    def __init__(self, locks: dict[str, tuple[nn.Parameter, Tensor]]):
        self.saved: dict[str, Tensor] = {}  # name -> values to restore
        self._soft: Tensor | None = None  # all values under float locks, as one vector
        self.replace_locks(locks)
        for name, (parameter, lock) in self.locks.items():
            if lock.dtype == torch.bool:
                self.saved[name] = parameter.detach().clone()

    def replace_locks(self, locks: dict[str, tuple[nn.Parameter, Tensor]]) -> None:
        """Replace the locks. The parameters under float locks must stay the same."""
        self.locks = {name: (p, lock.to(p.device)) for name, (p, lock) in locks.items()}

    @torch.no_grad()
    def gate(self) -> None:
        """Zero the gradients of entries with a boolean lock; store the values under a float lock.

        Call it before the optimizer step.
        """
        soft = {name: p for name, (p, lock) in self.locks.items() if lock.dtype != torch.bool}
        if soft and self._soft is None:
            self._soft = flatten(soft.values())
            self.saved |= zip(soft, unflatten(self._soft, [*soft.values()]), strict=True)
        elif soft:
            flatten(soft.values(), out=self._soft)
        for name, (p, lock) in self.locks.items():
            if name not in soft and p.grad is not None:
                p.grad.masked_fill_(lock, 0.0)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the values of locked entries, or undo a share of their last change.

        Call it after the optimizer step.
        """
        for name, values in self.saved.items():
            p, lock = self.locks[name]
            if lock.dtype == torch.bool:
                torch.where(lock, values, p, out=p.data)
            else:
                p.lerp_(values, lock)
