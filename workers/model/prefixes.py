"""Prefix tuning: trained keys and values before the keys and values of the tokens of a ViT.

A prefix adds no queries, so the number of tokens does not grow. Axes: B images, H heads, N tokens,
p rows of a prefix, A width of a block's keys (the width of the backbone in most ViTs).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from timm.layers import Attention
from torch import Tensor
from torch.nn import functional as F

from workers.errors import UserError


class PrefixedAttention(Attention):
    """timm's Attention of a VisionTransformer with a prefix.

    It computes softmax(q [P_k; K]^T / sqrt(A / H)) [P_v; V]. A norm of keys (`k_norm`) is applied
    to K only.

    Attributes:
        prefix: Keys P_k and values P_v, (B or 1, p, A) each. None: timm's forward pass.
    """

    prefix: tuple[Tensor, Tensor] | None = None

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        if self.prefix is None:
            return super().forward(x, attn_mask=attn_mask, is_causal=is_causal)
        batch, tokens, _ = x.shape
        gate = self.gate(x).sigmoid() if self.gate is not None else None
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # (B, H, N, A / H)
        prefix_keys, prefix_values = (
            self._split(rows.expand(batch, -1, -1)).to(v.dtype) for rows in self.prefix
        )
        k = torch.cat([prefix_keys, self.k_norm(k)], 2)
        v = torch.cat([prefix_values, v], 2)
        mixed = F.scaled_dot_product_attention(self.q_norm(q), k, v, scale=self.scale)
        x = self.norm(mixed.transpose(1, 2).reshape(batch, tokens, self.attn_dim))
        if gate is not None:
            x = x * gate
        projected: Tensor = self.proj_drop(self.proj(x))
        return projected

    def _split(self, rows: Tensor) -> Tensor:
        """(B, p, A) -> (B, H, p, A / H)."""
        split: Tensor = rows.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
        return split


class PrefixSites:
    """The blocks of a ViT that get prefixes. The class of their attention is changed in place.

    Args:
        vit: A timm VisionTransformer.
        blocks: Indices of the blocks, from 0.

    Attributes:
        width: A, the width of keys and values.

    Raises:
        UserError: If a block has no plain attention.
    """

    def __init__(self, vit: Any, blocks: Iterable[int]):
        self.attention: list[Any] = []
        for index in blocks:
            attn = getattr(vit.blocks[index], "attn", None)
            if type(attn) not in (Attention, PrefixedAttention):
                raise UserError(
                    f"block {index} of the backbone has no plain attention, whose keys and values "
                    "could get a prefix; choose a ViT with plain blocks such as "
                    "vit_tiny_patch16_224 or deit_small_patch16_224"
                )
            attn.__class__ = PrefixedAttention
            self.attention.append(attn)
        self.width: int = vit.blocks[0].attn.attn_dim

    def __len__(self) -> int:
        return len(self.attention)

    @contextmanager
    def using(self, prefixes: Sequence[Tensor]) -> Iterator[None]:
        """Apply prefixes inside the context. The forward pass is differentiable in them.

        Args:
            prefixes: Keys and values for each block, (B, 2, p, A), or (1, 2, p, A) if all images
                have the same prefix.
        """
        try:
            for attn, prefix in zip(self.attention, prefixes, strict=True):
                attn.prefix = prefix.unbind(1)
            yield
        finally:
            for attn in self.attention:
                attn.prefix = None
