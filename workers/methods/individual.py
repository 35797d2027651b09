"""One fully fine-tuned network per task: the upper bound for methods that share no weights.

It stores a whole backbone for each task.
"""

from __future__ import annotations

from torch import Tensor, nn

from workers.methods.base import Method, MethodSettings, ParamGroup, StepContext
from workers.methods.finetune import collect_tensors, weight_groups
from workers.methods.train_defaults import TrainDefaults
from workers.storage.taskstate import Carried, TaskState


class Individual(Method[MethodSettings]):
    """Every task trains a copy of the common backbone, and its state has all weights."""

    name = "individual"
    has_constant_step = True
    family = "baseline"
    keeps = "a network"
    train_defaults = TrainDefaults(
        lr=1e-4,
        scratch_lr=1e-3,
        source="measured on seven real tasks at 64 px: configs/RESULTS.md",
    )
    freezes_backbone = False

    def __init__(self, backbone: nn.Module, settings: MethodSettings, seed: int):
        super().__init__(backbone, settings, seed)
        # task -> parameters and buffers by name
        self.weights: dict[str, dict[str, Tensor]] = {}

    def begin(self, context: StepContext) -> list[ParamGroup]:
        return super().begin(context) + weight_groups(self.backbone, context.optim)

    def finish(self) -> tuple[TaskState, Carried]:
        return self.state(copies=collect_tensors(self.backbone)), Carried()

    def load_task(self, state: TaskState) -> None:
        super().load_task(state)
        # Empty for the base task, which has the weights of the common backbone.
        self.weights[state.task] = state.copies

    def serving_weights(self, task: str) -> dict[str, Tensor]:
        device = self.device
        weights = self.weights.get(task, {})
        return {name: tensor.to(device) for name, tensor in weights.items()}
