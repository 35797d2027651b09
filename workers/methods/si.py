"""SI: synaptic intelligence. A weight is important if its steps lowered the loss.

Zenke, Poole, Ganguli: Continual Learning Through Synaptic Intelligence, ICML 2017.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat

from workers.methods.base import MethodSettings, ParamGroup, Progress, StepContext
from workers.methods.bases.importance import IMPORTANCE, OneAnchor, copy_with_prefix
from workers.methods.train_defaults import TrainDefaults
from workers.model.anchors import flatten, unflatten
from workers.storage.taskstate import Carried, TaskState


class SiSettings(MethodSettings):
    """Settings of `si`."""

    c: NonNegativeFloat = Field(0.1, description="weight of the penalty")
    xi: PositiveFloat = Field(
        1e-3, description="added to the squared distance that a weight moved in a task"
    )


class Si(OneAnchor[SiSettings]):
    """L = CE + c * sum over weights i of Omega_i (theta_i - theta*_i)^2.

    theta*_i is the value of the weight at the start of the task. omega_i is 0 at this time. In each
    step omega_i grows by -g_i times the change of theta_i: g is the gradient of the cross-entropy
    without the penalty, and the change is that of the optimizer's step. At the end of the task
    Omega_i = max(0, Omega_i + omega_i / (Delta_i^2 + xi)), with Delta_i = theta_i - theta*_i.

    A base task is not protected, because the path of the weights in its training is not known.

    Differences from the paper: Omega is clamped at 0 after the sum over tasks, as in the authors'
    code. A negative Omega would push weights away from the anchor.
    """

    name = "si"
    has_constant_step = True
    paper = "Continual Learning Through Synaptic Intelligence, ICML 2017"
    train_defaults = TrainDefaults(
        lr=1e-4,
        scratch_lr=1e-3,
        weight_decay=0.0,
        source="the rate of finetune; weight decay would be part of the path",
    )
    Settings = SiSettings
    penalty_terms: ClassVar[Mapping[str, str]] = {"penalty": "c"}
    per_task = frozenset({"c", "xi"})
    later_settings = frozenset({"c"})

    def weight(self) -> float:
        return self.settings.c

    def begin(self, context: StepContext) -> list[ParamGroup]:
        groups = super().begin(context)
        # omega, as buffers, so that they are saved in checkpoints and with the best epoch.
        weights = [*self.protected().values()]
        self.total = torch.zeros_like(flatten(weights))
        self.path = torch.nn.Module()
        for index, part in enumerate(unflatten(self.total, weights)):
            self.path.register_buffer(str(index), part)
        # Overwritten in each step: gradients, weights before the step, and changes of the weights.
        self.gradient, self.start, self.moved = self.total.new_empty(3, len(self.total))
        return groups

    def after_backward(self) -> None:
        # The gradients are copied before `super` adds the gradient of the penalty.
        weights = self.protected().values()
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        assert len(gradients) == len(weights)
        flatten(gradients, out=self.gradient)
        flatten(weights, out=self.start)
        super().after_backward()

    @torch.no_grad()
    def after_step(self, progress: Progress) -> None:
        moved = flatten(self.protected().values(), out=self.moved).sub_(self.start)
        self.total.addcmul_(self.gradient, moved, value=-1)

    @torch.no_grad()
    def finish(self) -> tuple[TaskState, Carried]:
        """Return the task's state, and the carried state with the importance for the next task.

        `self.importance` is not changed, because `warnings` reports on this task.
        """
        grown = {}
        paths = self.path.buffers()
        for (name, weight), path in zip(self.protected().items(), paths, strict=True):
            moved = weight - self.anchors[name]
            gained = path / (moved.square() + self.settings.xi)
            old = self.importance.get(name, torch.zeros_like(weight))
            grown[name] = (old + gained).relu()
        state, carried = super().finish()
        carried.tensors |= copy_with_prefix(IMPORTANCE, grown)
        return state, carried
