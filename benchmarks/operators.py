"""Count the operators that a training step dispatches, by method, at the first and third task.

Command: `python -m benchmarks.operators [METHOD ...]`. It takes about two minutes for all methods.
It needs only a CPU: no GPU and no data set. The weights of the network are random.

Steps run under bf16 autocast and are compared with a plain PyTorch loop that fine-tunes the same
network. An operator on a list of tensors (`_foreach_*`, `_fused_*`) counts once per tensor. Views
and empty tensors, which start no kernel on a GPU, and reads of a value by the host are counted
separately. Casts count as operators, and a column shows their number.
"""

from __future__ import annotations

import copy
import re
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.methods import CLASSES, Conditions, Training
from workers.data.torch_internals import DispatchMode
from workers.job import BackboneSettings
from workers.methods import METHODS
from workers.model import vit

SIDE, BATCH = 32, 8
POSITIONS = (0, 2)  # positions of the measured tasks in the stream
# Operators that return a view, or allocate memory without writing to it.
VIEWS = re.compile(
    "view|_unsafe_view|t|transpose|permute|expand|slice|select|unsqueeze|squeeze|alias|detach|"
    "as_strided|split|split_with_sizes|unbind|reshape|_reshape_alias|narrow|diagonal|unflatten|"
    "flatten|unfold|empty|empty_like|empty_strided|new_empty|new_empty_strided|chunk|lift_fresh|"
    "is_same_size|movedim|swapaxes"
)
HOST_READ = "_local_scalar_dense"
CAST = "_to_copy"


class OperatorCounter(DispatchMode):
    """Count dispatched operators by name.

    Attributes:
        operators: Number of calls of operators that compute, by name.
        views: Number of views.
        host_reads: Number of values that the host reads.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: Counter[str] = Counter()
        self.views = 0
        self.host_reads = 0

    @property
    def total(self) -> int:
        """Number of operators that compute."""
        return self.operators.total()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name == HOST_READ:
            self.host_reads += 1
        elif VIEWS.fullmatch(name):
            self.views += 1
        else:
            is_list = name.startswith(("_foreach_", "_fused_")) and isinstance(args[0], list)
            self.operators[name] += len(args[0]) if is_list else 1
        return func(*args, **(kwargs or {}))


def count(step: Callable[[], object]) -> OperatorCounter:
    """Count the operators of a step after two warm-up steps."""
    step()
    step()
    counter = OperatorCounter()
    with counter:
        step()
    return counter


def make_plain_step(backbone: torch.nn.Module) -> Callable[[], object]:
    """Return a training step of a plain PyTorch loop that fine-tunes the network and a head."""
    network = copy.deepcopy(backbone).train()
    head = torch.nn.Linear(network.num_features, CLASSES)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW([*network.parameters(), *head.parameters()], fused=True)
    images = torch.randn(BATCH, 3, SIDE, SIDE)
    labels = torch.arange(BATCH) % CLASSES

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(head(network(images)), labels)
        loss.backward()
        optimizer.step()

    return step


def main(names: list[str]) -> None:
    """Print a row for each method."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    backbone = vit.build(BackboneSettings(img_size=SIDE))
    plain = count(make_plain_step(backbone)).total
    print(f"plain loop: {plain} operators")
    columns = "of plain | casts | views | reads"
    print(f"| method | first task | {columns} | third task | {columns} | largest |")
    print("|" + 12 * "---|")
    for name in names:
        scenario = max(METHODS[name].scenarios - {"domain"})
        cells: list[str] = []
        counter = OperatorCounter()
        for position in POSITIONS:
            conditions = Conditions(SIDE, BATCH, position, "bf16")
            counter = count(Training(name, backbone, scenario, conditions).step)
            cells += [str(counter.total), f"{counter.total / plain:.2f}"]
            parts = (counter.operators[CAST], counter.views, counter.host_reads)
            cells += map(str, parts)
        largest = ", ".join(f"{op} {n}" for op, n in counter.operators.most_common(6))
        print(f"| {name} | {' | '.join(cells)} | {largest} |", flush=True)


if __name__ == "__main__":
    trained = [name for name, cls in METHODS.items() if cls.has_training()]
    main(sys.argv[1:] or [name for name in trained if name != "supsup_nn"])
