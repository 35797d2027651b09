"""L2P: tokens from a pool that all tasks share, chosen by the query of an image.

Wang, Zhang, Lee, Zhang, Sun, Ren, Su, Perot, Dy, Pfister: Learning to Prompt for Continual
Learning, CVPR 2022.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from pydantic import ConfigDict, Field, NonNegativeFloat, PositiveInt
from torch import Tensor, nn

from workers.errors import UserError
from workers.job import DataSettings, Task, TrainSettings
from workers.methods.base import MethodSettings, ParamGroup, StepContext
from workers.methods.bases.prompt_bank import PromptBank, check_shapes
from workers.methods.train_defaults import TrainDefaults
from workers.model.compact import flops, plan_blocks
from workers.model.masked import BlockMasks
from workers.model.prompt_bank import choose_largest, cosines
from workers.model.prompts import check_attention, read_prompts
from workers.storage.taskstate import Carried, TaskState

PROMPTS, KEYS = "prompts", "keys"


class L2pSettings(MethodSettings):
    """Settings of `l2p`."""

    model_config = ConfigDict(populate_by_name=True)

    pool: PositiveInt = Field(10, description="M, number of prompts in the pool, each with a key")
    length: PositiveInt = Field(
        5, description="p, number of tokens of a prompt; 10 in the official code"
    )
    top: PositiveInt = Field(
        5, description="N, number of prompts that an image gets; 4 in the official code"
    )
    lambda_: NonNegativeFloat = Field(
        0.1,
        alias="lambda",
        description="weight of the cosines between queries and chosen keys; 1 in the official code",
    )


class L2p(PromptBank[L2pSettings]):
    """A chain that carries the pool; L = CE - lambda * sum over chosen keys of cos(q, k_m).

    q is the query of an image: its features by the frozen backbone without prompts. k_m is the key
    of prompt m. Each image gets the N prompts with the largest cos(q, k_m); of equal cosines, those
    with the lowest indices. The choice is made per image, not per batch. The prompts are inserted
    after the class token, without position embeddings, in front of the first block. The head reads
    the mean of their outputs. All tasks train the pool, so earlier answers change. Stored per task:
    a head.
    """

    name = "l2p"
    has_constant_step = True
    keeps = "a head"
    paper = "Learning to Prompt for Continual Learning, CVPR 2022"
    train_defaults = TrainDefaults(
        lr=3e-3,
        weight_decay=0.0,
        clip=1.0,
        source="decay and clipping of the released code; the rate is that of dualprompt",
    )
    carries = ("pool",)
    may_forget = True  # later tasks train the pool
    Settings = L2pSettings
    per_task = frozenset({"lambda"})

    @classmethod
    def validate(
        cls, settings: L2pSettings, train: TrainSettings, data: DataSettings, scenario: str
    ) -> None:
        super().validate(settings, train, data, scenario)
        if settings.top > settings.pool:
            raise UserError(
                f"top is {settings.top}, and the pool has {settings.pool} prompts to choose from; "
                "lower top or raise pool"
            )

    @classmethod
    def check_backbone(
        cls, settings: L2pSettings, backbone: Any, tasks: tuple[Task, ...] = ()
    ) -> None:
        super().check_backbone(settings, backbone, tasks)
        check_attention(backbone)

    def __init__(self, backbone: Any, settings: L2pSettings, seed: int):
        super().__init__(backbone, settings, seed)
        prompts = torch.empty(settings.pool, settings.length, backbone.embed_dim)
        self.prompts = nn.Parameter(prompts.uniform_(-1, 1))
        self.keys = nn.Parameter(torch.empty(settings.pool, self.heads.width).uniform_(-1, 1))

    # ---- training --------------------------------------------------------------------------------
    def begin(self, context: StepContext) -> list[ParamGroup]:
        if context.carried is not None:
            self.load_carried(context.carried)
        groups = super().begin(context)
        weight_decay = context.optim.weight_decay
        groups.append({"name": PROMPTS, "params": [self.prompts], "weight_decay": weight_decay})
        if self.settings.lambda_:  # otherwise the keys have no gradient
            groups.append({"name": KEYS, "params": [self.keys], "weight_decay": 0.0})
        return groups

    def match(self, query: Tensor) -> Tensor | None:
        """Return - lambda * the sum of cosines to the chosen keys, a mean over the batch."""
        if not self.settings.lambda_:
            return None
        similarity = cosines(query, self.keys)
        chosen = similarity.gather(1, choose_largest(similarity, self.settings.top))
        return -self.settings.lambda_ * chosen.sum(1).mean()

    def finish(self) -> tuple[TaskState, Carried]:
        return self.state(), Carried(
            {n: t.detach().clone() for n, t in self.carried_pool().items()}
        )

    # ---- serving ---------------------------------------------------------------------------------
    def carried_pool(self) -> dict[str, Tensor]:
        """Return the prompts (M, p, d) and the keys (M, d) by name."""
        return {PROMPTS: self.prompts, KEYS: self.keys}

    @torch.no_grad()
    def load_carried(self, carried: Carried) -> None:
        super().load_carried(carried)
        pool = self.carried_pool()
        expected = {name: tuple(tensor.shape) for name, tensor in pool.items()}
        check_shapes("the carried state", carried.tensors, expected)
        for name, tensor in pool.items():
            tensor.copy_(carried.tensors[name])

    def prompted(self, images: Tensor, query: Tensor) -> Tensor:
        choice = choose_largest(cosines(query, self.keys), self.settings.top)
        return read_prompts(self.backbone, images, self.prompts[choice].flatten(1, 2))

    def flops_share(self, state: TaskState) -> float:
        """Return the relative FLOPs of a plain pass and of a pass with N p more tokens.

        Of the second pass, only the outputs of these tokens are used.
        """
        vit: Any = self.backbone
        plans = plan_blocks(vit, [BlockMasks()] * len(vit.blocks))
        prompts = torch.arange(self.settings.top * self.settings.length)
        prompted = [
            replace(
                plan,
                keys=torch.cat([plan.keys, prompts]),
                queries=torch.cat([plan.queries, prompts]),
            )
            for plan in plans
        ]
        prompted[-1] = replace(prompted[-1], queries=prompts)
        return 1 + flops(vit, prompted) / flops(vit, plans)
