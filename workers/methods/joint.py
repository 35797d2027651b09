"""Joint training on all tasks seen so far, from the common backbone: the upper bound with sharing,
which keeps all data."""

from __future__ import annotations

from workers.methods.base import MethodSettings, ParamGroup, StepContext
from workers.methods.bases.class_incremental import ClassIncremental
from workers.methods.finetune import network_of, restore_network, weight_groups
from workers.storage.taskstate import Carried, TaskState


class Joint(ClassIncremental[MethodSettings]):
    """Each stage trains one network and one head per task on the union of the data of all tasks so
    far."""

    name = "joint"
    trains_on = "seen"
    freezes_backbone = False
    revision = 2  # mixes and smooths in scenario `class`
    scenarios = frozenset({"task", "class"})
    may_forget = True  # a later stage is another network: nothing binds its answers on old tasks

    def begin(self, context: StepContext) -> list[ParamGroup]:
        return super().begin(context) + weight_groups(self.backbone, context.optim)

    def finish(self) -> tuple[TaskState, Carried]:
        return self.state(), Carried(network_of(self, [t.name for t in self.training_tasks]))

    def load_carried(self, carried: Carried) -> None:
        restore_network(self, carried.tensors)
