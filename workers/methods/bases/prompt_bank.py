"""The base class of CODA-Prompt, DualPrompt and L2P: prompts chosen by a query of each image."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from workers.data.batch import Batch
from workers.data.feed import Feed
from workers.errors import UserError
from workers.job import Task
from workers.methods.base import Progress, S, refuse_base_task
from workers.methods.bases.class_incremental import SeparateHeads
from workers.model.compact import flops, plan_blocks
from workers.model.masked import BlockMasks


class PromptBank(SeparateHeads[S]):
    """A frozen ViT with prompts that depend on a query q = f(x): the features without prompts.

    The query costs a second forward pass, without gradients. Without random augmentation it is the
    same in every epoch, and a stage computes it once per image (`precompute`). In all scenarios the
    cross-entropy is over the classes of the task in training, and the heads of finished tasks are
    frozen.
    """

    family = "parameter-efficient"
    needs_vit = True
    why_no_other_vit = "its prompts are written for the attention of that class"
    starts_as_backbone = False
    scenarios = frozenset({"task", "class", "domain"})

    @classmethod
    def check_backbone(cls, settings: S, backbone: nn.Module, tasks: tuple[Task, ...] = ()) -> None:
        super().check_backbone(settings, backbone, tasks)
        refuse_base_task(cls.name, tasks, "it has no prompts for that task")

    @torch.no_grad()
    def query(self, images: Tensor) -> Tensor:
        """Return features (b, d) of images (b, 3, H, W) by the frozen backbone without prompts."""
        return self.backbone(images)  # type: ignore[no-any-return]

    @abstractmethod
    def prompted(self, images: Tensor, query: Tensor) -> Tensor:
        """Return the features (b, d) of images (b, 3, H, W) with the prompts of their queries."""

    def match(self, query: Tensor) -> Tensor | None:
        """Return a further term of the loss, a scalar, or None if the method has no such term.

        The term trains the keys with which queries choose prompts (L2P, DualPrompt), or regularises
        the components of prompts (CODA-Prompt).

        Args:
            query: Queries, (b, d).
        """
        return None

    # ---- training --------------------------------------------------------------------------------
    def precompute(self, feed: Feed) -> None:
        """Let the feed keep the queries of its images; see `PrecomputesFeatures`."""
        if feed.augment.training:  # validation predicts from images alone
            feed.add_features(self.query)

    def loss(self, batch: Batch, progress: Progress) -> tuple[Tensor, dict[str, Tensor]]:
        self.active_task = None
        self.weight_overrides = self.training_weights(batch, progress)
        query = self.query(batch.images) if batch.features is None else batch.features
        ce = self.classification_loss(self.prompted(batch.images, query), batch)
        match = self.match(query)
        if match is None:
            return ce, {"ce": ce.detach()}
        return ce + match, {"ce": ce.detach(), "match": match.detach()}

    # ---- serving ---------------------------------------------------------------------------------
    def features(self, images: Tensor) -> Tensor:
        return self.prompted(images, self.query(images))

    def prefix_share(self, rows: Sequence[int]) -> float:
        """Return the multiply-adds of attention to prefixes, divided by those of the backbone.

        Args:
            rows: Number of prefix rows of each block, starting with the first block.
        """
        vit: Any = self.backbone
        plans = plan_blocks(vit, [BlockMasks()] * len(vit.blocks))
        scores = sum(len(plan.queries) * count for plan, count in zip(plans, rows, strict=False))
        share: float = 2 * vit.embed_dim * scores / flops(vit, plans)
        return share


def check_shapes(
    where: str, tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise `UserError` if the stored prompts do not match the settings.

    Args:
        where: Owner of the prompts, for the message.
        tensors: Tensors by name.
        expected: Their shapes by name.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if shapes != dict(expected):
        raise UserError(
            f"{where} has prompts of shapes {shapes}, these settings have {dict(expected)}; use "
            "the backbone and the method's settings of its run"
        )
