"""Measure the attention of the heads of a ViT during any forward pass.

Hooks read queries and keys; nothing of the model is copied.

Entropy and distance as in Hyeon-Woo et al.: Scratching Visual Transformer's Back with Uniform
Attention, ICCV 2023. Axes: B images, H heads, N tokens (prefix first), n patches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from timm.layers import Attention
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from workers.model.context import ScaledContext
from workers.model.convit import GatedAttention

L = TypeVar("L", "AttentionStatistics", "ClassAttention")


@dataclass
class AttentionStatistics:
    """Sums over images for one attention layer of one network.

    Attributes:
        apart: Distances between patches.
        entropy: One sum per head, (H,).
        distance: One sum per head, (H,).
        scale: Mean |Lambda| of the block's context, or None.
    """

    network: str
    block: int
    apart: Tensor  # (n, n), from patch to patch
    context: nn.Module | None = None
    tokens: int = 0
    images: int = 0
    entropy: Tensor | float = 0.0
    distance: Tensor | float = 0.0
    scale: float | None = None

    def add(self, attention: Tensor) -> None:
        """Add a batch. attention: (B, H, N, N), rows sum to 1."""
        self.tokens = attention.shape[-1]
        self.images += len(attention)
        self.entropy = self.entropy + entropy(attention).sum(0).cpu()
        patches = len(self.apart)  # the last tokens, after any prefix
        between_patches = attention[..., -patches:, -patches:]  # (B, H, n, n)
        self.distance = self.distance + distance(between_patches, self.apart).sum(0).cpu()
        if isinstance(self.context, ScaledContext):
            self.scale = float(self.context.scale.abs().mean())

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per head, with means over images and queries.

        Entropy is in nats, and relative to its maximum ln N. Distance is relative to that of
        uniform attention.
        """
        if not self.images:
            return []
        entropies = torch.as_tensor(self.entropy).double() / self.images  # (H,)
        distances = torch.as_tensor(self.distance).double() / self.images  # (H,)
        rows: list[dict[str, Any]] = []
        for head, mean_entropy in enumerate(entropies.tolist()):
            row = {
                "network": self.network,
                "block": self.block,
                "head": head,
                "tokens": self.tokens,
                "entropy": mean_entropy,
                "entropy_share": mean_entropy / math.log(self.tokens),
                "distance": float(distances[head]),
                "scale": self.scale,
            }
            rows.append(row)
        return rows


@dataclass
class ClassAttention:
    """Attention of the class token to the patches, in one block of one network.

    Attributes:
        passes: For each forward pass a map (B, h, w) over the grid of patches, averaged over heads.
            Values are relative to uniform attention, which is 1 everywhere. Attention to other
            tokens is ignored.
    """

    network: str
    block: int
    grid: tuple[int, int]
    passes: list[Tensor] = field(default_factory=list)

    def add(self, attention: Tensor) -> None:
        """Add a forward. attention: (B, H, N, N)."""
        tokens = attention.shape[-1]
        patches = math.prod(self.grid)
        to_patches = attention[:, :, 0, -patches:].mean(1)  # (B, n)
        self.passes.append(tokens * to_patches.unflatten(1, self.grid).cpu())


def entropy(attention: Tensor) -> Tensor:
    """Return - sum_j A_ij ln A_ij, averaged over queries i: (B, H, N, N) -> (B, H).

    The maximum is ln N, for uniform attention.
    """
    terms: Tensor = torch.special.entr(attention)
    return terms.sum(-1).mean(-1)


def distance(attention: Tensor, apart: Tensor) -> Tensor:
    """Return the mean distance of attention between patches: (B, H, n, n) -> (B, H).

    For a patch i it is sum_j A_ij d_ij / sum_j A_ij over patches j. The mean over i is relative to
    uniform attention, which has 1. Class and register tokens have no position and are left out.
    """
    seen = attention.sum(-1).clamp(min=torch.finfo(attention.dtype).tiny)
    far = (attention * apart.to(attention)).sum(-1) / seen
    return far.mean(-1) / apart.mean().to(attention)


def patch_distances(grid: tuple[int, int]) -> Tensor:
    """Return the Euclidean distances between the patches of a grid, (n, n), in patches."""
    rows, columns = grid
    positions = torch.cartesian_prod(torch.arange(float(rows)), torch.arange(float(columns)))
    return torch.cdist(positions, positions)


def record_attention(model: nn.Module) -> AbstractContextManager[list[AttentionStatistics]]:
    """Context manager that measures every forward pass of a ViT that is, or is in, `model`.

    It uses the effective weights and masks of the forward pass.
    """

    def statistics_of(name: str, index: int, vit: Any) -> AttentionStatistics:
        apart = patch_distances(tuple(vit.patch_embed.grid_size))
        block_context = getattr(vit.blocks[index].mlp, "context", None)
        return AttentionStatistics(name, index, apart, block_context)

    return _listening(model, statistics_of)


def record_class_attention(model: nn.Module) -> AbstractContextManager[list[ClassAttention]]:
    """Inside, record the attention of class tokens; a ViT without a class token is left out."""

    def class_attention_of(name: str, index: int, vit: Any) -> ClassAttention | None:
        if not vit.has_class_token:
            return None
        return ClassAttention(name, index, tuple(vit.patch_embed.grid_size))

    return _listening(model, class_attention_of)


@contextmanager
def _listening(
    model: nn.Module, record_of: Callable[[str, int, Any], L | None]
) -> Iterator[list[L]]:
    """Context manager that passes each attention of each ViT to the record of the layer.

    It yields the records. `record_of(network, block, vit)` creates one, or returns None to skip the
    layer.
    """
    records: list[L] = []
    handles: list[Any] = []
    for name, vit in model.named_modules():
        if not isinstance(vit, VisionTransformer):
            continue
        for index, block in enumerate(vit.blocks):
            if not isinstance(getattr(block, "attn", None), (Attention, GatedAttention)):
                continue
            record = record_of(name, index, vit)
            if record is not None:
                records.append(record)
                handles += _listen(block.attn, record.add)
    try:
        yield records
    finally:
        for handle in handles:
            handle.remove()


def _listen(attn: Any, add: Callable[[Tensor], None]) -> list[Any]:
    """Call `add` with the attention (B, H, N, N) of each forward; return the hooks' handles."""
    outputs: dict[str, Tensor] = {}
    if isinstance(attn, GatedAttention):
        sources = {"qk": attn.qk}
    else:
        sources = {"q": attn.q_norm, "k": attn.k_norm}

    def keep(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            outputs[name] = output.detach().float()

        return hook

    @torch.no_grad()
    def measure(module: nn.Module, inputs: Any, output: Tensor) -> None:
        if "qk" in outputs:
            add(_gated(attn, outputs["qk"]))
        else:
            add(_softmax(attn, outputs["q"], outputs["k"]))
        outputs.clear()

    handles = [source.register_forward_hook(keep(name)) for name, source in sources.items()]
    handles.append(attn.register_forward_hook(measure))
    return handles


def _softmax(attn: Any, q: Tensor, k: Tensor) -> Tensor:
    """Compute the attention (B, H, N, N) of `q` and `k` (B, H, N, d), without masked keys."""
    scores: Tensor = (q * attn.scale) @ k.transpose(-2, -1)
    if getattr(attn, "keys", None) is not None:
        scores = scores.masked_fill(attn.policy() == 0, -torch.inf)
    return scores.softmax(-1)


def _gated(attn: GatedAttention, qk: Tensor) -> Tensor:
    """(B, N, 2 D) -> (B, H, N, N): content and positions, mixed by the gate."""
    q, k = attn.split(qk)
    gate = attn.gate.sigmoid().view(-1, 1, 1)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return (1 - gate) * scores.softmax(-1) + gate * attn.positions()
