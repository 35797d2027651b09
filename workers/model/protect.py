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
        self.kept = {
            name: p.detach().clone()
            for name, (p, lock) in self.locks.items()
            if lock.dtype == torch.bool
        }

    @torch.no_grad()
    def gate(self) -> None:
        for name, (p, lock) in self.locks.items():
            if lock.dtype != torch.bool:
                self.kept[name] = p.detach().clone()
            elif p.grad is not None:
                p.grad.masked_fill_(lock, 0.0)

    @torch.no_grad()
    def restore(self) -> None:
        for name, kept in self.kept.items():
            p, lock = self.locks[name]
            if lock.dtype == torch.bool:
                torch.where(lock, kept, p, out=p.data)
            else:
                p.lerp_(kept, lock.expand_as(p))
