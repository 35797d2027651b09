"""Joint training on all tasks seen so far, from the common backbone: the upper bound with sharing, which keeps all data."""

from __future__ import annotations

from typing import Any

from workers.job import Task
from workers.methods.base import Method, Rates
from workers.methods.finetune import tensors_of, weight_groups
from workers.taskstate import Carried, TaskState


class Joint(Method):
    """Each stage trains one network and one head per task on the union of the data of all tasks so far."""

    name = "joint"
    trains_on = "seen"
    freezes_backbone = False
    forgets = True  # a later stage is another network: nothing binds its answers on old tasks

    def begin(self, task: Task, step: str, carried: Carried | None, rates: Rates, tasks: tuple[Task, ...]) -> list[dict[str, Any]]:
        return super().begin(task, step, carried, rates, tasks) + weight_groups(self.backbone, rates)

    def finish(self) -> tuple[TaskState, Carried]:
        heads = {f"heads/{t.name}/{k}": v for t in self.training_tasks for k, v in self.heads.export(t.name).items()}
        return self.state(), Carried({f"backbone/{k}": v for k, v in tensors_of(self.backbone).items()} | heads)

    def attach(self, carried: Carried) -> None:
        parts: dict[str, dict[str, Any]] = {}
        for name, tensor in carried.tensors.items():
            owner, leaf = name.split("/", 1) if name.startswith("backbone/") else name.rsplit("/", 1)
            parts.setdefault(owner, {})[leaf] = tensor
        self.backbone.load_state_dict(parts.pop("backbone"))
        for owner, tensors in parts.items():
            self.heads.restore(owner.split("/", 1)[1], tensors)
