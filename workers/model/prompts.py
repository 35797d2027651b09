"""Prompts: trained tokens among those of a frozen ViT, put in and taken out by hooks from outside.

Axes: B images, T tokens of the backbone (prefix and patches), p prompts, d width, L blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from timm.layers import Attention
from torch import Tensor

from workers.errors import UserError
from workers.model.adapters import Hook

Depth = Literal["shallow", "deep"]


def insert(x: Tensor, prompts: Tensor, prefix: int) -> Tensor:
    """(B, T, d), (p, d) -> (B, T + p, d): prompts stand between prefix tokens and patches, without
    a position."""
    return torch.cat([x[:, :prefix], prompts.expand(len(x), -1, -1), x[:, prefix:]], 1)


def remove(x: Tensor, prompts: Tensor, prefix: int) -> Tensor:
    """(B, T + p, d), (p, d) -> (B, T, d)."""
    return torch.cat([x[:, :prefix], x[:, prefix + len(prompts) :]], 1)


def replace(x: Tensor, prompts: Tensor, prefix: int) -> Tensor:
    """Replace the prompts among tokens: (B, T + p, d), (p, d) -> (B, T + p, d)."""
    return insert(remove(x, prompts, prefix), prompts, prefix)


class PromptSites:
    """A ViT whose blocks read p more tokens, the prompts.

    They are inserted behind the norm before the blocks and removed behind the last block, so that
    the final norm and pooling see the usual tokens. `deep`: behind each block but the last they are
    replaced by those of the next.
    """

    def __init__(self, vit: Any, depth: Depth):
        for index, block in enumerate(vit.blocks):
            if not isinstance(getattr(block, "attn", None), Attention):
                raise UserError(
                    f"block {index} of the backbone has no plain attention, which takes any number "
                    "of tokens and so prompts too; choose a ViT with "
                    "plain blocks such as vit_tiny_patch16_224 or deit_small_patch16_224"
                )
        self.width: int = vit.embed_dim
        self.hooks = [self._behind(vit.norm_pre, insert, vit)]
        if depth == "deep":
            self.hooks += [self._behind(block, replace, vit) for block in vit.blocks[:-1]]
        self.out = self._behind(vit.blocks[-1], remove, vit)

    @staticmethod
    def _behind(module: Any, form: Callable[..., Tensor], vit: Any) -> Hook:
        hook = Hook(partial(form, prefix=vit.num_prefix_tokens))
        module.register_forward_hook(hook)
        return hook

    def __len__(self) -> int:
        """Return how many blocks have separate prompts."""
        return len(self.hooks)

    @contextmanager
    def using(self, prompts: Tensor | None) -> Iterator[None]:
        """Inside, the blocks read these prompts, (L or 1, p, d), and are differentiable in them.

        None: no prompts.
        """
        try:
            for index, hook in enumerate([*self.hooks, self.out]):
                hook.tensors = None
                if prompts is not None:
                    hook.tensors = {"prompts": prompts[min(index, len(prompts) - 1)]}
            yield
        finally:
            for hook in [*self.hooks, self.out]:
                hook.tensors = None


def initial_prompts(blocks: int, prompts: int, vit: Any) -> Tensor:
    """(blocks, p, d), uniform within sqrt(6 / (3 h w + d)) for patches of h x w pixels: Xavier's
    range of the patch embedding."""
    height, width = vit.patch_embed.patch_size
    reach = math.sqrt(6 / (3 * height * width + vit.embed_dim))
    return torch.empty(blocks, prompts, vit.embed_dim).uniform_(-reach, reach)
