"""Protection of entries that earlier tasks rely on: the gradient is gated, and what the optimizer
moves all the same is put back.

A zeroed gradient alone does not hold an entry still: decoupled weight decay and momentum of earlier
steps move it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Protector:
    """locks: (parameter, lock) by name; a lock has a shape that broadcasts to its parameter.
    Boolean: True must not change, bit for bit. Floating: the share of the step that is held back,
    in [0, 1]. Under SGD without momentum that is the share of the gradient; Adam would divide a
    factor on the gradient out again, and weight decay would pass it by.

    Call order inside a step: backward, sum over ranks, `gate`, clip, optimizer step, `restore`. A
    boolean lock keeps the values at the time of construction.
    """

    def __init__(self, locks: dict[str, tuple[nn.Parameter, Tensor]]):
        self.locks = {name: (p, lock.to(p.device)) for name, (p, lock) in locks.items()}
        self.saved: dict[str, Tensor] = {}  # name -> values to restore
        for name, (parameter, lock) in self.locks.items():
            if lock.dtype == torch.bool:
                self.saved[name] = parameter.detach().clone()

    @torch.no_grad()
    def gate(self) -> None:
        """Before the optimizer's step: zero the gradients of locked entries."""
        for name, (p, lock) in self.locks.items():
            if lock.dtype != torch.bool:
                self.saved[name] = p.detach().clone()
            elif p.grad is not None:
                p.grad.masked_fill_(lock, 0.0)

    @torch.no_grad()
    def restore(self) -> None:
        """After the optimizer's step: put locked entries back."""
        for name, values in self.saved.items():
            p, lock = self.locks[name]
            if lock.dtype == torch.bool:
                torch.where(lock, values, p, out=p.data)
            else:
                p.lerp_(values, lock.expand_as(p))
