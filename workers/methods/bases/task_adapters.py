"""The base class of EASE and MOS: a frozen ViT, and a set of AdaptFormer's adapters for each task.

Chen, Ge, Tong, Wang, Song, Wang, Luo: AdaptFormer: Adapting Vision Transformers for Scalable Visual
Recognition, NeurIPS 2022.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn
from typing_extensions import TypeVar

from workers.data.batch import Batch
from workers.errors import UserError
from workers.job import Task
from workers.methods.adapter import compute_added_share, draw_dropout, find_adapter_sites
from workers.methods.base import (
    BLOCK_VITS,
    MethodSettings,
    ParamGroup,
    Progress,
    StepContext,
    refuse_base_task,
)
from workers.methods.bases.class_incremental import SeparateHeads
from workers.model.adapters import Bottlenecks
from workers.storage.taskstate import TaskState, select_with_prefix

TRAIN, ADAPTERS = "train", "adapters"
# tensors of the adapters of one task by name, stacked over the sites (one in each block)
Adapters = dict[str, Tensor]


class TaskAdapterSettings(MethodSettings):
    """Settings of methods with adapters for each task."""

    width: PositiveInt = Field(64, description="m, number of hidden units of an adapter")
    dropout: float = Field(
        0.1, ge=0, lt=1, description="dropout rate of an adapter's hidden units in training"
    )


S = TypeVar("S", bound=TaskAdapterSettings, default=Any)


class TaskAdapters(SeparateHeads[S]):
    """A chain in which each task stores a set of adapters parallel to the FFNs.

    The step `train` trains the adapters and the head of the task, with the cross-entropy over its
    own classes. Later steps of the task get its adapters from the carried state. The states of all
    earlier tasks are loaded in each step.
    """

    family = "parameter-efficient"
    needs_vit = True
    vits = BLOCK_VITS
    needs_states = True
    carries: ClassVar[tuple[str, ...]] = (ADAPTERS,)

    @classmethod
    def check_backbone(cls, settings: S, backbone: nn.Module, tasks: tuple[Task, ...] = ()) -> None:
        super().check_backbone(settings, backbone, tasks)
        refuse_base_task(cls.name, tasks, "it has no adapters for that task")
        # raises `UserError` if the backbone has no place for adapters
        find_adapter_sites(backbone, "adaptformer")

    def __init__(self, backbone: nn.Module, settings: S, seed: int):
        super().__init__(backbone, settings, seed)
        self.sites = find_adapter_sites(backbone, "adaptformer")
        self.loaded: dict[str, Adapters] = {}  # task -> its adapters after training
        self.is_learning = False  # True in step `train`

    # ---- training --------------------------------------------------------------------------------
    def begin(self, context: StepContext) -> list[ParamGroup]:
        groups = super().begin(context)
        self.is_learning = context.step == TRAIN
        # a loaded state of this task is replaced by what is trained now
        self.loaded.pop(context.task.name, None)
        if not self.is_learning:
            assert context.carried is not None
            self.loaded[context.task.name] = select_with_prefix(
                context.carried.tensors, f"{ADAPTERS}/"
            )
            return []
        self.adapters = Bottlenecks(
            len(self.sites), self.sites.width, self.settings.width, device=self.device
        )
        return groups + self.adapters.groups(context.optim.weight_decay)

    def training_weights(self, batch: Batch, progress: Progress) -> dict[str, Tensor]:
        """Return adapters and dropout factors; the `features` of the subclass applies both."""
        rate, bottleneck = self.settings.dropout, self.settings.width
        dropout = draw_dropout(self.backbone, batch, len(self.sites), bottleneck, rate)
        return self.adapters.tensors() | dropout

    def export_adapters(self) -> Adapters:
        """Return copies of the adapters of the current task."""
        assert self.task is not None
        own = self.adapters.tensors() if self.is_learning else self.loaded[self.task.name]
        return {name: tensor.detach().clone() for name, tensor in own.items()}

    # ---- serving ---------------------------------------------------------------------------------
    def load_task(self, state: TaskState) -> None:
        super().load_task(state)
        feature_width, bottleneck = self.sites.width, self.settings.width
        blank = Bottlenecks(len(self.sites), feature_width, bottleneck, device=torch.device("meta"))
        expected = {name: tuple(tensor.shape) for name, tensor in blank.tensors().items()}
        shapes = {name: tuple(tensor.shape) for name, tensor in state.copies.items()}
        if {name: shapes.get(name) for name in expected} != expected:
            raise UserError(
                f"task {state.task!r}: its state has tensors of shapes {shapes}, these settings "
                f"have adapters of shapes {expected}; use the backbone and the method's settings "
                "of its run"
            )
        self.loaded[state.task] = {name: state.copies[name] for name in expected}

    def find_adapters(self, task: str) -> Adapters:
        """Return the adapters of a task, on the device."""
        own = self.loaded[task] if task in self.loaded else self.adapters.tensors()
        return {name: tensor.to(self.device) for name, tensor in own.items()}

    def adapted(self, images: Tensor, adapters: Mapping[str, Tensor]) -> Tensor:
        """Return features (b, d) of images (b, 3, H, W) with these adapters."""
        with self.sites.using(adapters):
            return self.backbone(images)  # type: ignore[no-any-return]

    def compute_relative_flops(self) -> float:
        """Return the FLOPs of a forward pass with adapters, divided by those without: 1 or more."""
        entries = 2 * len(self.sites) * self.settings.width * self.sites.width
        return 1 + compute_added_share(self.backbone, entries)
