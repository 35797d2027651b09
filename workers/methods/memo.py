"""MEMO: extractors of tasks differ only in their last blocks; one classifier reads all features.

Zhou, Wang, Ye, Zhan: A Model or 603 Exemplars: Towards Memory-Efficient Class-Incremental Learning,
ICLR 2023.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from workers.errors import UserError
from workers.job import Task
from workers.methods.base import BLOCK_VITS, OptimPlan, ParamGroup
from workers.methods.der import Der, DerSettings, Parts
from workers.model.tokens import Arguments, enter_blocks, make_block_arguments
from workers.storage.taskstate import TaskState


class MemoSettings(DerSettings):
    """Settings of `memo`."""

    blocks: PositiveInt = Field(
        1,
        description="number of last blocks that each task has for itself; earlier ones are shared",
    )


class Memo(Der[MemoSettings]):
    """`der` with extractors that share their first blocks, which only the first task trains.

    The own part of a task consists of the last `blocks` blocks and the final norm. It starts as a
    copy of the previous task's part, and is trained with the loss of `der` while embeddings and
    shared blocks are frozen. An image passes through the shared blocks once, and then through the
    last blocks of every task.

    Stored per task: its own part; the first task also stores the shared part. With a base task the
    shared blocks are those of the backbone, and stay frozen.

    Differences from the authors' code: in each task the classifier is initialised again, and a step
    `finetune` tunes it on the same number of images of each class, as in `der`. In the code the
    classifier keeps the rows of old classes, and the weights of new classes are scaled. The paper
    shares all but the last stage of a convolutional network; this method shares all but the last
    blocks of a ViT.
    """

    name = "memo"
    has_constant_step = True
    family = "expansion"
    keeps = "its last blocks"
    paper = (
        "A Model or 603 Exemplars: Towards Memory-Efficient Class-Incremental Learning, ICLR 2023"
    )
    train_defaults = replace(
        Der.train_defaults, source="the rates of `der`; not measured for this method"
    )
    needs_vit = True
    vits = BLOCK_VITS
    Settings = MemoSettings

    @classmethod
    def check_backbone(
        cls, settings: MemoSettings, backbone: Any, tasks: tuple[Task, ...] = ()
    ) -> None:
        super().check_backbone(settings, backbone, tasks)
        depth = len(backbone.blocks)
        if settings.blocks >= depth:
            raise UserError(
                f"blocks is {settings.blocks}, and the backbone has {depth}, so that tasks would "
                f"share none; {f'give it {depth - 1} or less, or ' * (depth > 1)}use der"
            )

    def __init__(self, backbone: Any, settings: MemoSettings, seed: int):
        super().__init__(backbone, settings, seed)
        own = {id(p) for module in self.list_own_modules() for p in module.parameters()}
        self.own = frozenset(name for name, p in backbone.named_parameters() if id(p) in own)

    def list_own_modules(self) -> list[nn.Module]:
        """Return the modules of the backbone that belong to one task only: its own part."""
        vit: Any = self.backbone
        modules = [vit.norm, vit.fc_norm, getattr(vit, "attn_pool", None)]
        return [*vit.blocks[self.num_shared :], *(m for m in modules if m is not None)]

    @property
    def num_shared(self) -> int:
        """Return the number of blocks that all tasks share."""
        vit: Any = self.backbone
        return len(vit.blocks) - self.settings.blocks

    def is_own(self, parameter: str) -> bool:
        return parameter in self.own

    # ---- training --------------------------------------------------------------------------------
    def extractor_groups(self, optim: OptimPlan) -> list[ParamGroup]:
        groups = super().extractor_groups(optim)
        if self.old:
            own = {id(p) for name, p in self.backbone.named_parameters() if name in self.own}
            for group in groups:
                group["params"] = [p for p in group["params"] if id(p) in own]
        return groups

    def train(self, mode: bool = True) -> Memo:
        super().train(mode)
        if self.step == "train" and self.old:
            self.backbone.eval()
            for module in self.list_own_modules():
                module.train(mode)
        return self

    def features(self, images: Tensor) -> Tensor:
        """Return u (b, (t + 1) D) of images (b, 3, H, W), in the order of `class_slices`."""
        vit: Any = self.backbone
        is_shared_frozen = self.task is None or bool(self.old)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not is_shared_frozen):
            arguments = make_block_arguments(vit)
            tokens = enter_blocks(vit, images)
            for block, extra in zip(vit.blocks[: self.num_shared], arguments, strict=False):
                tokens = block(tokens, **extra)
        with torch.no_grad():
            parts = [self.own_features(part, tokens, arguments) for part in self.finished()]
        if self.task is not None:
            parts.append(self.own_features(vit, tokens, arguments))
        return torch.cat(parts, 1)

    def own_features(self, vit: Any, tokens: Tensor, arguments: list[Arguments]) -> Tensor:
        """Run the last blocks of one task: tokens (b, N, D) -> features (b, D)."""
        first = self.num_shared
        for block, extra in zip(vit.blocks[first:], arguments[first:], strict=True):
            tokens = block(tokens, **extra)
        features: Tensor = vit.forward_head(vit.norm(tokens))
        return features

    # ---- state -----------------------------------------------------------------------------------
    def trained(self) -> Parts:
        parameters = dict(self.backbone.named_parameters())
        if self.old:
            parameters = {name: parameters[name] for name in parameters if name in self.own}
        return {"copies": parameters}  # type: ignore[dict-item]

    def copy_backbone(self) -> nn.Module:
        """Return a network that shares all tensors but those of the own part with the backbone."""
        # `deepcopy` keeps the objects in its memo (id -> object) instead of copying them.
        named = chain(self.backbone.named_parameters(), self.backbone.named_buffers())
        shared = {id(tensor): tensor for name, tensor in named if name not in self.own}
        return copy.deepcopy(self.backbone, shared)

    def flops_share(self, state: TaskState) -> float:
        """Return the number of blocks, shared and of all tasks, relative to the backbone's."""
        own = self.settings.blocks * len(self.class_slices())
        return (self.num_shared + own) / (self.num_shared + self.settings.blocks)
