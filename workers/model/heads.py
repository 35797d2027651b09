"""Task heads: one linear layer per task, initialised equally on all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from workers.errors import UserError
from workers.rng import derive_seed


class Heads(nn.Module):
    """A layer Linear(width, classes) for each task, or one layer for all tasks if `is_shared`.

    Initial values depend only on the seed and the name of the task, so they are equal on all ranks
    and for any order of tasks. As in DeiT's head, weights are truncated normal with std 0.02 and
    biases are zero.
    """

    def __init__(self, width: int):
        super().__init__()
        self.width = width
        self.layers = nn.ModuleList()
        self.names: list[str] = []
        self.device = torch.device("cpu")
        self.is_shared = False  # True: all tasks use the first layer

    def _apply(self, fn: Any, recurse: bool = True) -> Heads:
        """Store the target device of `to`, because heads that are added later are moved there."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.device = fn(torch.empty(0, device=self.device)).device
        return self

    def __getitem__(self, task: str) -> nn.Linear:
        if task not in self.names:
            raise UserError(f"no task {task!r} is loaded; there are {self.names}")
        return self.layers[self._index(task)]  # type: ignore[return-value]

    def _index(self, task: str) -> int:
        return 0 if self.is_shared else self.names.index(task)

    def add(self, task: str, classes: int, seed: int) -> nn.Linear:
        """Return the head of a task; create it first if it does not exist.

        Args:
            task: Name of the task.
            classes: Number of classes of a new head.
            seed: Seed of the run, for the initial values.
        """
        if self.is_shared and self.names:
            if task not in self.names:
                self.names.append(task)
        elif task not in self.names:
            layer = self.layer(classes)
            self.start(layer, torch.Generator().manual_seed(derive_seed(seed, "head", task)))
            self._append(task, layer)
        return self[task]

    def layer(self, classes: int) -> Any:
        """Return a new head for `classes` classes that `start` must initialise."""
        return nn.Linear(self.width, classes)

    def start(self, layer: Any, generator: torch.Generator) -> None:
        """Initialise a new head."""
        nn.init.trunc_normal_(layer.weight, std=0.02, generator=generator)
        nn.init.zeros_(layer.bias)

    def export(self, task: str) -> dict[str, Tensor]:
        """Return a copy of a head's tensors for storage."""
        return {name: t.detach().clone() for name, t in self[task].state_dict().items()}

    def restore(self, task: str, tensors: dict[str, Tensor]) -> None:
        """Add or replace the head of a finished task. The head is frozen."""
        layer = self.layer(tensors["weight"].shape[0])
        layer.load_state_dict(tensors)
        layer.requires_grad_(False)
        self._append(task, layer)

    def _append(self, task: str, layer: nn.Linear) -> None:
        layer = layer.to(self.device)
        is_new = task not in self.names
        if is_new:
            self.names.append(task)
        if is_new and not (self.is_shared and len(self.layers)):
            self.layers.append(layer)
        else:
            self.layers[self._index(task)] = layer


class JointHeads(Heads):
    """One linear layer without bias for the classes of all tasks; each task's rows are one head.

    `renew` replaces all rows when the number of features grows. A head that is restored with a
    bias, such as that of a base task, keeps the bias until `renew`.
    """

    def layer(self, classes: int) -> Any:
        return nn.Linear(self.width, classes, bias=False)

    @torch.no_grad()
    def start(self, layer: Any, generator: torch.Generator) -> None:
        """Initialise a head. Its values are drawn on the CPU for any device of the layer."""
        layer.weight.copy_(
            nn.init.trunc_normal_(torch.empty(layer.weight.shape), std=0.02, generator=generator)
        )

    def renew(self, width: int) -> None:
        """Replace all heads by heads for `width` features that `start` must initialise."""
        self.width = width
        for name in self.names:
            self._append(name, self.layer(self[name].out_features))

    def restore(self, task: str, tensors: dict[str, Tensor]) -> None:
        classes, self.width = tensors["weight"].shape
        layer = nn.Linear(self.width, classes, bias="bias" in tensors)
        layer.load_state_dict(tensors)
        layer.requires_grad_(False)
        self._append(task, layer)


def sum_old_targets(targets: Tensor, old: int) -> Tensor:
    """Return targets (b, 1 + new): first the sum over all old classes, then each new class.

    Args:
        targets: Targets, (b, classes so far).
        old: Number of old classes, which come first.
    """
    return torch.cat([targets[:, :old].sum(1, keepdim=True), targets[:, old:]], 1)
