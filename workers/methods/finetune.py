"""Sequential fine-tuning: everything is trained on each task in turn, nothing is protected. The lower bound: it forgets."""

from __future__ import annotations

from typing import Any

from workers.job import Task
from workers.methods.base import Method, Rates
from workers.taskstate import Carried, TaskState


class FineTune(Method):
    """All backbone weights and the task's own head; old heads stay as they were while the backbone moves under them."""

    name = "finetune"
    carries = ("weights",)
    freezes_backbone = False
    forgets = True

    def begin(self, task: Task, step: str, carried: Carried | None, rates: Rates, tasks: tuple[Task, ...]) -> list[dict[str, Any]]:
        groups = super().begin(task, step, carried, rates, tasks)
        if carried is not None:
            self.attach(carried)
        return groups + weight_groups(self.backbone, rates)

    def finish(self) -> tuple[TaskState, Carried]:
        return self.state(), Carried(tensors_of(self.backbone))

    def attach(self, carried: Carried) -> None:
        if carried.tensors:
            self.backbone.load_state_dict(carried.tensors)


def weight_groups(module: Any, rates: Rates) -> list[dict[str, Any]]:
    """Parameter groups as DeiT has them: no weight decay on biases, norms, class token and position embedding."""
    plain = [p for n, p in module.named_parameters() if p.ndim > 1 and n not in ("cls_token", "pos_embed")]
    exempt = [p for n, p in module.named_parameters() if p.ndim <= 1 or n in ("cls_token", "pos_embed")]
    return [{"name": "backbone", "params": plain, "weight_decay": rates.weight_decay},
            {"name": "backbone.exempt", "params": exempt, "weight_decay": 0.0}]


def tensors_of(module: Any) -> dict[str, Any]:
    return {name: t.detach().clone() for name, t in module.state_dict().items()}
