"""Joint training on the data of all tasks so far, from the common backbone.

It needs the data of all earlier tasks, and serves as the upper bound for methods that share weights
between tasks.
"""

from __future__ import annotations

from typing import ClassVar

from workers.methods.base import Family, MethodSettings, ParamGroup, StepContext
from workers.methods.bases.class_incremental import ClassIncremental
from workers.methods.finetune import restore_network, save_network, weight_groups
from workers.methods.train_defaults import TrainDefaults
from workers.storage.taskstate import Carried, TaskState


class Joint(ClassIncremental[MethodSettings]):
    """Each task trains a new network, with a head per task, on the data of all tasks so far.

    No task starts from the state of another one. The newest network, which is stored as carried
    state, serves all tasks. In scenario `domain` there is one head for all tasks.
    """

    name = "joint"
    has_constant_step = True
    family: ClassVar[Family] = "baseline"
    keeps = "a head"
    train_defaults = TrainDefaults(
        lr=1e-4,
        scratch_lr=1e-3,
        source="measured on 25 classes of CIFAR-100 at 64 px: configs/RESULTS.md",
    )
    trains_on = "seen"
    freezes_backbone = False
    # 2: mixup and label smoothing also in scenario `class`
    revision = 2
    scenarios = frozenset({"task", "class", "domain"})
    shares_head = True
    # A later stage trains another network: its answers on old tasks may differ.
    may_forget = True

    def begin(self, context: StepContext) -> list[ParamGroup]:
        return super().begin(context) + weight_groups(self.backbone, context.optim)

    def finish(self) -> tuple[TaskState, Carried]:
        names = [task.name for task in self.training_tasks]
        if self.scenario != "task":
            names = self.head_names()
        return self.state(), Carried(save_network(self, names))

    def load_carried(self, carried: Carried) -> None:
        restore_network(self, carried.tensors)
