"""What the heads of a ViT attend to, measured while any forward runs: hooks see queries and keys,
and nothing of the model is copied.

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
    """One attention of one network. entropy, distance: sums over images, (H,). scale: mean |Lambda|
    of the block's context, or None."""

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
        """attention: (B, H, N, N), rows sum to 1."""
        self.tokens, self.images = attention.shape[-1], self.images + len(attention)
        self.entropy = self.entropy + entropy(attention).sum(0).cpu()
        patches = len(self.apart)  # the last tokens, whatever stands before them
        self.distance = (
            self.distance + distance(attention[..., -patches:, -patches:], self.apart).sum(0).cpu()
        )
        if isinstance(self.context, ScaledContext):
            self.scale = float(self.context.scale.abs().mean())

    def rows(self) -> list[dict[str, Any]]:
        """One for each head: means over images and queries. Entropy in nats and relative to its
        maximum ln N; distance relative to that of uniform attention."""
        if not self.images:
            return []
        means = (
            torch.as_tensor(values).double() / self.images
            for values in (self.entropy, self.distance)
        )
        return [
            {
                "network": self.network,
                "block": self.block,
                "head": head,
                "tokens": self.tokens,
                "entropy": e,
                "entropy_share": e / math.log(self.tokens),
                "distance": d,
                "scale": self.scale,
            }
            for head, (e, d) in enumerate(zip(*(values.tolist() for values in means), strict=True))
        ]


@dataclass
class ClassAttention:
    """What the class token of one network looks at in one block: for each forward (B, h, w) over
    the grid of patches, a mean over heads. Values are relative to uniform attention, which has 1
    everywhere; what goes to other tokens than patches is not shown."""

    network: str
    block: int
    grid: tuple[int, int]
    passes: list[Tensor] = field(default_factory=list)

    def add(self, attention: Tensor) -> None:
        """attention: (B, H, N, N)."""
        patches = math.prod(self.grid)
        self.passes.append(
            attention.shape[-1]
            * attention[:, :, 0, -patches:].mean(1).unflatten(1, self.grid).cpu()
        )


def entropy(attention: Tensor) -> Tensor:
    """- sum_j A_ij ln A_ij, a mean over queries i: (B, H, N, N) -> (B, H). At most ln N, that of
    uniform attention."""
    terms: Tensor = torch.special.entr(attention)
    return terms.sum(-1).mean(-1)


def distance(attention: Tensor, apart: Tensor) -> Tensor:
    """How far a patch looks: sum_j A_ij d_ij / sum_j A_ij over patches j, a mean over patches i,
    relative to uniform attention, which has 1: (B, H, n, n) -> (B, H). Class and register tokens
    are nowhere, so they are left out."""
    seen = attention.sum(-1).clamp(min=torch.finfo(attention.dtype).tiny)
    far = (attention * apart.to(attention)).sum(-1) / seen
    return far.mean(-1) / apart.mean().to(attention)


def patch_distances(grid: tuple[int, int]) -> Tensor:
    """(n, n): Euclidean, in patches."""
    places = torch.cartesian_prod(*(torch.arange(float(side)) for side in grid))
    return torch.cdist(places, places)


def record_attention(model: nn.Module) -> AbstractContextManager[list[AttentionStatistics]]:
    """Inside, every forward of a ViT that is `model` or a part of it is measured, with the weights
    and masks that are then in effect."""
    return _heard(
        model,
        lambda name, index, vit: AttentionStatistics(
            name,
            index,
            patch_distances(tuple(vit.patch_embed.grid_size)),
            getattr(vit.blocks[index].mlp, "context", None),
        ),
    )


def record_class_attention(model: nn.Module) -> AbstractContextManager[list[ClassAttention]]:
    """The same for what class tokens look at; a ViT without one has none."""
    return _heard(
        model,
        lambda name, index, vit: (
            ClassAttention(name, index, tuple(vit.patch_embed.grid_size))
            if vit.has_class_token
            else None
        ),
    )


@contextmanager
def _heard(model: nn.Module, layer_of: Callable[[str, int, Any], L | None]) -> Iterator[list[L]]:
    """A listener for each attention of each ViT, unless `layer_of(network, block, vit)` wants
    none."""
    layers: list[L] = []
    handles: list[Any] = []
    for name, vit in model.named_modules():
        if isinstance(vit, VisionTransformer):
            for index, block in enumerate(vit.blocks):
                if (
                    isinstance(getattr(block, "attn", None), (Attention, GatedAttention))
                    and (layer := layer_of(name, index, vit)) is not None
                ):
                    layers.append(layer)
                    handles += _listen(block.attn, layer.add)
    try:
        yield layers
    finally:
        for handle in handles:
            handle.remove()


def _listen(attn: Any, add: Callable[[Tensor], None]) -> list[Any]:
    heard: dict[str, Tensor] = {}
    sources = (
        {"qk": attn.qk}
        if isinstance(attn, GatedAttention)
        else {"q": attn.q_norm, "k": attn.k_norm}
    )

    def keep(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            heard[name] = output.detach().float()

        return hook

    @torch.no_grad()
    def measure(module: nn.Module, inputs: Any, output: Tensor) -> None:
        add(_gated(attn, heard["qk"]) if "qk" in heard else _softmax(attn, heard["q"], heard["k"]))
        heard.clear()

    return [source.register_forward_hook(keep(name)) for name, source in sources.items()] + [
        attn.register_forward_hook(measure)
    ]


def _softmax(attn: Any, q: Tensor, k: Tensor) -> Tensor:
    """(B, H, N, d) each -> (B, H, N, N), without the keys that are masked."""
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
