"""VPT: each task trains tokens between the class token and the patches of a frozen ViT.

They are inserted before the first block (shallow) or before every block (deep).

Jia et al.: Visual Prompt Tuning, ECCV 2022.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from pydantic import Field, PositiveInt
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from workers.data.batch import Batch
from workers.errors import UserError
from workers.job import Task
from workers.methods.base import (
    BLOCK_VITS,
    Method,
    MethodSettings,
    ParamGroup,
    Progress,
    StepContext,
)
from workers.methods.train_defaults import TrainDefaults
from workers.model.compact import count_multiply_adds, flops, plan_blocks
from workers.model.masked import BlockMasks
from workers.model.prompts import Depth, PromptSites, draw_initial_prompts
from workers.storage.taskstate import Carried, TaskState

PROMPTS = "prompts"


class VptSettings(MethodSettings):
    """Settings of `vpt`."""

    prompts: PositiveInt = Field(5, description="p, number of prompt tokens that a block gets")
    depth: Depth = Field(
        "shallow",
        description="which blocks get prompts: `shallow`: the first block only; the outputs at "
        "its prompts go on through all blocks; `deep`: each block has its own prompts",
    )


class Vpt(Method[VptSettings]):
    """A star: p prompts after the class token and before the patches, without position embeddings.

    Stored per task: p d floats (shallow) or L p d (deep), for L blocks of width d, and a head.

    Differences from the paper: prompts have neither a projection nor dropout, which are options
    in the paper; learning rate and weight decay are those of the head. If a backbone pools its
    patches, prompts are not pooled.
    """

    name = "vpt"
    has_constant_step = True
    family = "parameter-efficient"
    keeps = "tokens, head"
    paper = "Visual Prompt Tuning, ECCV 2022"
    train_defaults = TrainDefaults(
        lr=3e-3,
        scratch_lr=1e-2,
        source="measured on seven real tasks at 64 px: configs/RESULTS.md",
    )
    needs_vit = True
    vits = BLOCK_VITS
    starts_as_backbone = False  # prompts change the features before the first optimizer step
    Settings = VptSettings

    @classmethod
    def check_backbone(
        cls, settings: VptSettings, backbone: nn.Module, tasks: tuple[Task, ...] = ()
    ) -> None:
        super().check_backbone(settings, backbone, tasks)
        PromptSites(backbone, settings.depth)  # raises `UserError` if blocks cannot get prompts

    def __init__(self, backbone: nn.Module, settings: VptSettings, seed: int):
        super().__init__(backbone, settings, seed)
        self.sites = PromptSites(backbone, settings.depth)
        # task -> its prompts (L or 1, p, d); the base task has none
        self.loaded: dict[str, Tensor | None] = {}

    def begin(self, context: StepContext) -> list[ParamGroup]:
        groups = super().begin(context)
        # a loaded state of this task is replaced by the prompts in training
        self.loaded.pop(context.task.name, None)
        prompts = draw_initial_prompts(len(self.sites), self.settings.prompts, self.backbone)
        self.prompts = nn.Parameter(prompts.to(self.device))
        return [
            *groups,
            {
                "name": "prompts",
                "params": [self.prompts],
                "weight_decay": context.optim.weight_decay,
            },
        ]

    def training_weights(self, batch: Batch, progress: Progress) -> dict[str, Tensor]:
        """Return the prompts, which replace no parameter of the backbone; `features` uses them."""
        return {PROMPTS: self.prompts}

    def features(self, images: Tensor) -> Tensor:
        with self.sites.using(self.weight_overrides.get(PROMPTS)):
            return self.backbone(images)  # type: ignore[no-any-return]

    def finish(self) -> tuple[TaskState, Carried]:
        tokens = {f"blocks.{i}": t.clone() for i, t in enumerate(self.prompts.detach())}
        return self.state(tokens=tokens), Carried()

    def load_task(self, state: TaskState) -> None:
        """Load the prompts of a finished task."""
        super().load_task(state)
        shapes = {name: tuple(t.shape) for name, t in state.tokens.items()}
        shape = (self.settings.prompts, self.sites.width)
        expected_shapes = {f"blocks.{i}": shape for i in range(len(self.sites))}
        # the state of a base task has the method "base" and no prompts
        if state.method == self.name and shapes != expected_shapes:
            raise UserError(
                f"task {state.task!r}: its state has prompts of shapes {shapes}, these settings "
                f"have {expected_shapes}; use the backbone and the method's settings of its run"
            )
        self.loaded[state.task] = None
        if shapes:
            prompts = [state.tokens[name] for name in expected_shapes]
            self.loaded[state.task] = torch.stack(prompts)

    def serving_weights(self, task: str) -> dict[str, Tensor]:
        if task not in self.loaded:
            return {PROMPTS: self.prompts}
        prompts = self.loaded[task]
        return {} if prompts is None else {PROMPTS: prompts.to(self.device)}

    def flops_share(self, state: TaskState) -> float:
        return compute_prompted_share(self.backbone, self.sites, self.settings.prompts)


def compute_prompted_share(vit: Any, sites: PromptSites, count: int) -> float:
    """Return the multiply-adds of a forward pass with prompts, divided by those without.

    In a VisionTransformer there are `count` more keys in every block, and as many more queries in
    every block except the last.

    Args:
        vit: The backbone.
        sites: Its prompt sites.
        count: Number p of prompts per block.
    """
    if not isinstance(vit, VisionTransformer):
        image = (3, *vit.patch_embed.img_size)
        with sites.using(torch.zeros(1, count, sites.width)):
            prompted = count_multiply_adds(vit, *image)
        return prompted / count_multiply_adds(vit, *image)
    blocks: Any = vit.blocks
    plans = plan_blocks(vit, [BlockMasks()] * len(blocks))
    prompts = torch.arange(count)  # any indices: `flops` uses only their number
    with_keys = [replace(plan, keys=torch.cat([plan.keys, prompts])) for plan in plans]
    for i, plan in enumerate(with_keys[:-1]):
        with_keys[i] = replace(plan, queries=torch.cat([plan.queries, prompts]))
    return flops(vit, with_keys) / flops(vit, plans)
