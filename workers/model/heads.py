"""Task heads: one linear layer per task, made the same on every rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from workers.errors import UserError
from workers.rng import derive_seed


class Heads(nn.Module):
    """Linear(width, classes) by task name; one for all tasks if `is_shared`.

    The initial values depend on (seed, task name): they are equal on all ranks, for any order of
    tasks. Weights are truncated normal with std 0.02, biases zero, as in DeiT's head.
    """

    def __init__(self, width: int):
        super().__init__()
        self.width = width
        self.layers = nn.ModuleList()
        self.names: list[str] = []
        self.device = torch.device("cpu")
        self.is_shared = False  # all names lead to the first layer

    def _apply(self, fn: Any, recurse: bool = True) -> Heads:
        """Remember the device of `to`, so that heads that are added later are created there."""
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
        """Return the head of a task; create it first if it does not exist."""
        if self.is_shared and self.names:
            if task not in self.names:
                self.names.append(task)
        elif task not in self.names:
            layer = self.layer(classes)
            self.start(layer, torch.Generator().manual_seed(derive_seed(seed, "head", task)))
            self._append(task, layer)
        return self[task]

    def layer(self, classes: int) -> Any:
        """A new head for `classes` classes, not initialised yet."""
        return nn.Linear(self.width, classes)

    def start(self, layer: Any, generator: torch.Generator) -> None:
        """Initialise a new head."""
        nn.init.trunc_normal_(layer.weight, std=0.02, generator=generator)
        nn.init.zeros_(layer.bias)

    def export(self, task: str) -> dict[str, Tensor]:
        """A copy of a head's tensors, to be stored."""
        return {name: t.detach().clone() for name, t in self[task].state_dict().items()}

    def restore(self, task: str, tensors: dict[str, Tensor]) -> None:
        """Add or replace the head of a finished task; it is not trained any more."""
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
    """One linear layer without bias over all tasks, as rows by task.

    All rows are replaced together when the number of features grows. The bias of an added head
    stays until then.
    """

    def layer(self, classes: int) -> Any:
        return nn.Linear(self.width, classes, bias=False)

    @torch.no_grad()
    def start(self, layer: Any, generator: torch.Generator) -> None:
        """Values are drawn on the CPU, wherever the layer is."""
        layer.weight.copy_(
            nn.init.trunc_normal_(torch.empty(layer.weight.shape), std=0.02, generator=generator)
        )

    def renew(self, width: int) -> None:
        """Replace the layers by new ones for `width` features; their values must be initialised."""
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
    """Targets (b, classes so far) -> (b, 1 + new): the old ones' sum, then the new ones."""
    return torch.cat([targets[:, :old].sum(1, keepdim=True), targets[:, old:]], 1)
