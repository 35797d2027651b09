"""Protection of entries that earlier tasks rely on: gate gradients, and restore values.

A zeroed gradient alone does not keep an entry constant: decoupled weight decay and momentum of
earlier steps move it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Protector:
    """Gates the gradients of locked entries, and restores their values after a step.

    Call order in a step: backward, sum over ranks, `gate`, clip, optimizer step, `restore`. A
    boolean lock keeps the values at the time of construction.

    Args:
        locks: Pairs (parameter, lock) by name; a lock broadcasts to its parameter. Boolean: True
            entries must not change, bit for bit. Float in [0, 1]: the share of the step that is
            held back. Under SGD without momentum this equals the share of the gradient. Adam would
            cancel a factor on the gradient, and weight decay would ignore it.
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
