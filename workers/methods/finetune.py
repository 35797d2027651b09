"""Sequential fine-tuning: everything is trained on each task in turn, nothing is protected. The
lower bound: it forgets."""

from __future__ import annotations

from typing import Any

from workers.methods.base import Method, MethodSettings, OptimPlan, ParamGroup, StepContext
from workers.methods.bases.class_incremental import ClassIncremental
from workers.storage.taskstate import Carried, TaskState


class FineTune(ClassIncremental[MethodSettings]):
    """All backbone weights and the task's own head; old heads stay as they were while the backbone
    moves under them. In scenario `class` the old heads go on training too: their outputs compete
    with the new ones, and get no sample of their own.
    """

    name = "finetune"
    carries = ("weights",)
    freezes_backbone = False
    may_forget = True
    scenarios = frozenset({"task", "class"})

    def begin(self, context: StepContext) -> list[ParamGroup]:
        if context.carried is not None:
            self.load_carried(context.carried)
        return super().begin(context) + weight_groups(self.backbone, context.optim)

    def finish(self) -> tuple[TaskState, Carried]:
        return self.state(), Carried(
            network_of(self, list(self.class_slices()))
            if self.scenario == "class"
            else tensors_of(self.backbone)
        )

    def load_carried(self, carried: Carried) -> None:
        if self.scenario == "class":
            restore_network(self, carried.tensors)
        elif carried.tensors:
            self.backbone.load_state_dict(carried.tensors)


def weight_groups(module: Any, optim: OptimPlan) -> list[ParamGroup]:
    """Parameter groups as DeiT has them: no weight decay on biases, norms, class token and position
    embedding."""
    plain = [
        p
        for n, p in module.named_parameters()
        if p.ndim > 1 and n not in ("cls_token", "pos_embed")
    ]
    exempt = [
        p for n, p in module.named_parameters() if p.ndim <= 1 or n in ("cls_token", "pos_embed")
    ]
    return [
        {"name": "backbone", "params": plain, "weight_decay": optim.weight_decay},
        {"name": "backbone.exempt", "params": exempt, "weight_decay": 0.0},
    ]


def tensors_of(module: Any) -> dict[str, Any]:
    return {name: t.detach().clone() for name, t in module.state_dict().items()}


def network_of(method: Method, tasks: list[str]) -> dict[str, Any]:
    """Copies of the backbone's tensors and of the heads of `tasks`: `backbone/NAME`,
    `heads/TASK/NAME`."""
    return {f"backbone/{name}": t for name, t in tensors_of(method.backbone).items()} | heads_of(
        method, tasks
    )


def heads_of(method: Method, tasks: list[str]) -> dict[str, Any]:
    return {
        f"heads/{task}/{name}": t for task in tasks for name, t in method.heads.export(task).items()
    }


def restore_network(method: Method, tensors: dict[str, Any]) -> None:
    """The inverse of `network_of`, or of `heads_of`: what is not named stays."""
    parts: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        owner, leaf = name.split("/", 1) if name.startswith("backbone/") else name.rsplit("/", 1)
        parts.setdefault(owner, {})[leaf] = tensor
    if "backbone" in parts:
        method.backbone.load_state_dict(parts.pop("backbone"))
    for owner, head in parts.items():
        method.heads.restore(owner.split("/", 1)[1], head)
