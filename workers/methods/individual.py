"""One fully fine-tuned network per task: the upper bound without sharing, at the price of a
backbone for each task."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from workers.methods.base import Method, MethodSettings, ParamGroup, StepContext
from workers.methods.finetune import tensors_of, weight_groups
from workers.storage.taskstate import Carried, TaskState


class Individual(Method[MethodSettings]):
    """Starts every task from the common backbone and stores all trained weights in the task's
    state."""

    name = "individual"
    freezes_backbone = False

    def __init__(self, backbone: Any, settings: MethodSettings, seed: int):
        super().__init__(backbone, settings, seed)
        self.weights: dict[str, dict[str, Tensor]] = {}

    def begin(self, context: StepContext) -> list[ParamGroup]:
        return super().begin(context) + weight_groups(self.backbone, context.optim)

    def finish(self) -> tuple[TaskState, Carried]:
        return self.state(copies=tensors_of(self.backbone)), Carried()

    def load_task(self, state: TaskState) -> None:
        super().load_task(state)
        # none for the base task, which was trained into the common backbone
        self.weights[state.task] = state.copies

    def serving_weights(self, task: str) -> dict[str, Tensor]:
        device = self.device
        return {name: t.to(device) for name, t in self.weights.get(task, {}).items()}
