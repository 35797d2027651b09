"""Adapter-B: two bottleneck adapters in every block of a frozen backbone, trained per task (MEAT's Table 1, column Adaptor-B).

Houlsby et al.: Parameter-Efficient Transfer Learning for NLP, ICML 2019.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, PositiveInt
from torch import Tensor, nn

from workers.errors import UserError
from workers.job import Task
from workers.methods.base import Batch, Method, MethodSettings, Progress, Rates
from workers.model.adapters import AdapterSites, Bottlenecks, houlsby
from workers.model.compact import flops, plan
from workers.model.masked import BlockMasks
from workers.taskstate import Carried, TaskState


class AdapterSettings(MethodSettings):
    width: PositiveInt = Field(24, description="m, units of a bottleneck")


class Adapter(Method):
    """A star: a(x) = x + W_up gelu(W_down x), behind attention and behind the FFN, inside the residual branch. Stored per task:
    2 L (2 d m + d + m) floats and a head.

    Where it differs from Houlsby et al.: W_up starts at zero, so that a task starts as the backbone itself; layer norms stay
    frozen with the rest. Learning rate and weight decay are those of the head.
    """

    name = "adapter"
    paper = "Parameter-Efficient Transfer Learning for NLP, ICML 2019"
    needs_vit = True
    Settings = AdapterSettings
    settings: AdapterSettings

    def __init__(self, backbone: nn.Module, settings: AdapterSettings, seed: int):
        super().__init__(backbone, settings, seed)
        self.sites = AdapterSites(backbone, houlsby)
        self.loaded: dict[str, dict[str, Tensor]] = {}  # task -> its adapters' tensors

    def begin(self, task: Task, step: str, carried: Carried | None, rates: Rates, tasks: tuple[Task, ...]) -> list[dict[str, Any]]:
        groups = super().begin(task, step, carried, rates, tasks)
        self.loaded.pop(task.name, None)
        device = next(self.backbone.parameters()).device
        self.adapters = Bottlenecks(len(self.sites), self.sites.width, self.settings.width, device=device)
        return groups + self.adapters.groups(rates.weight_decay)

    def training_weights(self, batch: Batch, progress: Progress) -> dict[str, Tensor]:
        """The adapters' tensors, not parameters of the backbone: `features` puts them in place."""
        return self.adapters.tensors()

    def features(self, images: Tensor) -> Tensor:
        with self.sites.using(self.effective):
            return self.backbone(images)

    def finish(self) -> tuple[TaskState, Carried]:
        return self.state(copies={name: t.detach().clone() for name, t in self.adapters.tensors().items()}), Carried()

    def load(self, state: TaskState) -> None:
        """Keeps the task's adapters beside those of other tasks. A base task has none."""
        super().load(state)
        found, sites = state.copies.get("down"), (len(self.sites), self.settings.width, self.sites.width)
        if found is not None and tuple(found.shape) != sites:
            raise UserError(f"task {state.task!r}: its state has adapters of shape {tuple(found.shape)}, these settings have {sites}; use the backbone "
                            "and the method's settings of its run")
        self.loaded[state.task] = dict(state.copies)

    def serving_weights(self, task: str) -> dict[str, Tensor]:
        device = next(self.backbone.parameters()).device
        return {name: t.to(device) for name, t in (self.loaded[task] if task in self.loaded else self.adapters.tensors()).items()}

    def flops_share(self, state: TaskState) -> float:
        return 1 + added_share(self.backbone, 2 * state.copies["down"].numel())


def added_share(backbone: Any, weights: int) -> float:
    """Multiply-adds of layers with `weights` entries in all that see every token, relative to those of the plain backbone."""
    tokens = backbone.num_prefix_tokens + backbone.patch_embed.num_patches
    return tokens * weights / flops(backbone, plan(backbone, [BlockMasks()] * len(backbone.blocks)))
