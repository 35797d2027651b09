"""Protect parameter entries that earlier tasks need: zero their gradients, restore their values.

A zero gradient alone does not keep an entry constant, because decoupled weight decay and the
momentum of earlier steps still change it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


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
        self.locks = {name: (p, lock.to(p.device)) for name, (p, lock) in locks.items()}
        self.saved: dict[str, Tensor] = {}  # name -> values to restore
        for name, (parameter, lock) in self.locks.items():
            if lock.dtype == torch.bool:
                self.saved[name] = parameter.detach().clone()

    @torch.no_grad()
    def gate(self) -> None:
        """Zero the gradients of entries with a boolean lock; store the values under a float lock.

        Call it before the optimizer step.
        """
        for name, (p, lock) in self.locks.items():
            if lock.dtype != torch.bool:
                self.saved[name] = p.detach().clone()
            elif p.grad is not None:
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
                p.lerp_(values, lock.expand_as(p))
