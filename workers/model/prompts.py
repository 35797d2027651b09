"""Prompts: trained tokens in a frozen ViT, inserted and removed by forward hooks.

Prompts have no position: rotary embeddings do not rotate prompts, and a bias of relative positions
is 0 between a prompt and any token, as in the released code of VPT for Swin.

Axes: B images, T tokens of the backbone (prefix and patches), p prompts, d width, L blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any, Literal

import torch
from timm.layers import Attention, AttentionRope
from timm.models.beit import Attention as BeitAttention
from timm.models.eva import EvaAttention
from torch import Tensor

from workers.errors import UserError
from workers.model.adapters import Hook, KeywordHook, SwitchedForm
from workers.model.tokens import enter_blocks

Depth = Literal["shallow", "deep"]
# classes of attention that accept any number of tokens
PLAIN_ATTENTION = (Attention, AttentionRope, EvaAttention, BeitAttention)


def insert_prompts(x: Tensor, prompts: Tensor, prefix: int) -> Tensor:
    """Insert prompts after the prefix tokens: (B, T, d) -> (B, T + p, d).

    Args:
        x: Tokens, (B, T, d).
        prompts: Prompts for all images (p, d), or of each image (B, p, d).
        prefix: Number of prefix tokens.
    """
    return torch.cat([x[:, :prefix], prompts.expand(x.shape[0], -1, -1), x[:, prefix:]], 1)


def remove_prompts(x: Tensor, prompts: Tensor, prefix: int) -> Tensor:
    """Remove the prompts of `insert_prompts`: (B, T + p, d), (p, d) -> (B, T, d)."""
    return torch.cat([x[:, :prefix], x[:, prefix + len(prompts) :]], 1)


def replace_prompts(x: Tensor, prompts: Tensor, prefix: int) -> Tensor:
    """Replace the prompts of `insert_prompts`: (B, T + p, d), (p, d) -> (B, T + p, d)."""
    return insert_prompts(remove_prompts(x, prompts, prefix), prompts, prefix)


def leave_unrotated(rope: Tensor, prompts: Tensor) -> Tensor:
    """Prepend p rows that mean no rotation: (..., n, 2 d) -> (..., p + n, 2 d).

    timm does not rotate prefix tokens, and the prompts lie between these and the patches.

    Args:
        rope: Concatenated sines and cosines of the patches. In this function d is half the width of
            a row.
        prompts: The prompts; only their number p is used.
    """
    sines = rope.new_zeros(*rope.shape[:-2], len(prompts), rope.shape[-1] // 2)
    rows = torch.cat([sines, torch.ones_like(sines)], -1)
    return torch.cat([rows, rope], -2)


def leave_unbiased(bias: Tensor, prompts: Tensor, prefix: int) -> Tensor:
    """Insert zeros as the bias of prompts: (..., H, T, T) -> (..., H, T + p, T + p).

    Args:
        bias: Bias of relative positions, added to the attention scores of H heads.
        prompts: The prompts; only their number p is used.
        prefix: Number of prefix tokens.
    """
    rows = bias.new_zeros(*bias.shape[:-2], len(prompts), bias.shape[-1])
    bias = torch.cat([bias[..., :prefix, :], rows, bias[..., prefix:, :]], -2)
    columns = bias.new_zeros(*bias.shape[:-1], len(prompts))
    return torch.cat([bias[..., :prefix], columns, bias[..., prefix:]], -1)


class PromptedBeitAttention(BeitAttention):
    """timm's attention of BEiT; `bias_form` extends its bias of relative positions by the prompts.

    If `bias_form` is None, the bias is unchanged.
    """

    bias_form: SwitchedForm | None = None

    def _get_rel_pos_bias(self) -> Tensor:
        bias: Tensor = super()._get_rel_pos_bias()
        return bias if self.bias_form is None else self.bias_form.apply(bias)


class PromptSites:
    """The hooks of a ViT that insert and remove p additional tokens, the prompts.

    Prompts are inserted after the last module before the blocks, and removed after the last block.
    The final norm and pooling therefore get the usual tokens.

    Args:
        vit: The backbone.
        depth: `shallow`: the inserted prompts pass through all blocks. `deep`: each block has its
            own prompts, which replace the outputs of the previous block's prompts.

    Raises:
        UserError: If the attention of a block requires a fixed number of tokens.
    """

    def __init__(self, vit: Any, depth: Depth):
        check_attention(vit)
        self.width: int = vit.embed_dim
        before_blocks = getattr(vit, "norm_pre", vit.pos_drop)  # BEiT has no such norm
        self.hooks = [self._behind(before_blocks, insert_prompts, vit)]
        if depth == "deep":
            self.hooks += [self._behind(block, replace_prompts, vit) for block in vit.blocks[:-1]]
        self.out = self._behind(vit.blocks[-1], remove_prompts, vit)
        self.positions = [form for block in vit.blocks for form in _add_position_forms(block, vit)]

    @staticmethod
    def _behind(module: Any, form: Callable[..., Tensor], vit: Any) -> Hook:
        hook = Hook(partial(form, prefix=vit.num_prefix_tokens))
        module.register_forward_hook(hook)
        return hook

    def __len__(self) -> int:
        """Return the number of blocks with separate prompts: 1 if `depth` is `shallow`."""
        return len(self.hooks)

    @contextmanager
    def using(self, prompts: Tensor | None) -> Iterator[None]:
        """Apply prompts inside the context. The forward pass is differentiable in them.

        Args:
            prompts: (L, p, d), or (1, p, d) for `shallow`, or if all blocks have the same prompts.
                None: no prompts.
        """
        try:
            for index, hook in enumerate([*self.hooks, self.out]):
                hook.tensors = None
                if prompts is not None:
                    hook.tensors = {"prompts": prompts[min(index, len(prompts) - 1)]}
            for form in self.positions:
                form.tensors = None if prompts is None else {"prompts": prompts[0]}
            yield
        finally:
            for form in [*self.hooks, self.out, *self.positions]:
                form.tensors = None


def check_attention(vit: Any) -> None:
    """Check that the attention of every block accepts any number of tokens.

    Raises:
        UserError: If the attention of a block has another class.
    """
    for index, block in enumerate(vit.blocks):
        if not isinstance(getattr(block, "attn", None), PLAIN_ATTENTION):
            raise UserError(
                f"block {index} of the backbone has no plain attention, which takes any number "
                "of tokens and so prompts too; choose a ViT with "
                "plain blocks such as vit_tiny_patch16_224 or deit_small_patch16_224"
            )


def read_prompts(vit: Any, images: Tensor, prompts: Tensor) -> Tensor:
    """Return the mean of the outputs at prompts that are inserted before the first block.

    Args:
        vit: A VisionTransformer.
        images: (B, 3, H, W).
        prompts: Prompts of each image, (B, p, d).

    Returns:
        Features (B, d) after the final norm.
    """
    prefix = vit.num_prefix_tokens
    x = insert_prompts(enter_blocks(vit, images), prompts, prefix)
    for block in vit.blocks:
        x = block(x)
    outputs = vit.norm(x)[:, prefix : prefix + prompts.shape[1]]
    features: Tensor = vit.head_drop(vit.fc_norm(outputs.mean(1)))
    return features


def _add_position_forms(block: Any, vit: Any) -> list[SwitchedForm]:
    """Make a block extend its rotary embedding or position bias by the prompts.

    Returns:
        The added `SwitchedForm`s. The blocks of a VisionTransformer have neither a rotary embedding
        nor a position bias, so the list is empty for them.
    """
    unbiased = partial(leave_unbiased, prefix=vit.num_prefix_tokens)
    forms: list[SwitchedForm] = []
    for name, form in (("rope", leave_unrotated), ("shared_rel_pos_bias", unbiased)):
        if name in signature(block.forward).parameters:
            hook = KeywordHook(form, name)
            block.register_forward_pre_hook(hook, with_kwargs=True)
            forms.append(hook)
    if isinstance(block.attn, BeitAttention):
        bias_form = SwitchedForm(unbiased)
        block.attn.__class__ = PromptedBeitAttention
        block.attn.bias_form = bias_form  # type: ignore[assignment]
        forms.append(bias_form)
    return forms


def draw_initial_prompts(blocks: int, prompts: int, vit: Any) -> Tensor:
    """Return initial prompts (blocks, p, d), uniform within +-sqrt(6 / (3 h w + d)).

    The patches have h x w pixels. This is the range of Xavier's initialisation of the patch
    embedding.

    Args:
        blocks: Number of blocks with separate prompts.
        prompts: Number p of prompts.
        vit: The backbone.
    """
    height, width = vit.patch_embed.patch_size
    reach = math.sqrt(6 / (3 * height * width + vit.embed_dim))
    return torch.empty(blocks, prompts, vit.embed_dim).uniform_(-reach, reach)
