"""What the heads of a ViT attend to, measured while any forward runs: hooks see queries and keys, and nothing of the model is copied.

Entropy and distance as in Hyeon-Woo et al.: Scratching Visual Transformer's Back with Uniform Attention, ICCV 2023.
Axes: B images, H heads, N tokens (prefix first), n patches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import Attention
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from workers.model.context import ScaledContext
from workers.model.convit import GatedAttention


@dataclass
class Layer:
    """One attention of one network. entropy, distance: sums over images, (H,). scale: mean |Lambda| of the block's context, or None."""

    network: str
    block: int
    prefix: int
    apart: Tensor  # (n, n), from patch to patch
    tokens: int = 0
    images: int = 0
    entropy: Tensor | float = 0.0
    distance: Tensor | float = 0.0
    scale: float | None = None

    def add(self, attention: Tensor) -> None:
        """attention: (B, H, N, N), rows sum to 1."""
        self.tokens, self.images = attention.shape[-1], self.images + len(attention)
        self.entropy = self.entropy + entropy(attention).sum(0).cpu()
        self.distance = self.distance + distance(attention[..., self.prefix :, self.prefix :], self.apart).sum(0).cpu()

    def rows(self) -> list[dict[str, Any]]:
        """One for each head: means over images and queries. Entropy in nats and relative to its maximum ln N; distance relative to that of
        uniform attention."""
        if not self.images:
            return []
        means = (torch.as_tensor(values).double() / self.images for values in (self.entropy, self.distance))
        return [{"network": self.network, "block": self.block, "head": head, "tokens": self.tokens, "entropy": e, "entropy_share": e / math.log(self.tokens),
                 "distance": d, "scale": self.scale} for head, (e, d) in enumerate(zip(*(values.tolist() for values in means), strict=True))]


def entropy(attention: Tensor) -> Tensor:
    """- sum_j A_ij ln A_ij, a mean over queries i: (B, H, N, N) -> (B, H). At most ln N, that of uniform attention."""
    return torch.special.entr(attention).sum(-1).mean(-1)


def distance(attention: Tensor, apart: Tensor) -> Tensor:
    """How far a patch looks: sum_j A_ij d_ij / sum_j A_ij over patches j, a mean over patches i, relative to uniform attention, which has 1:
    (B, H, n, n) -> (B, H). Class and register tokens are nowhere, so they are left out."""
    seen = attention.sum(-1).clamp(min=torch.finfo(attention.dtype).tiny)
    far = (attention * apart.to(attention)).sum(-1) / seen
    return far.mean(-1) / apart.mean().to(attention)


def distances(grid: tuple[int, int]) -> Tensor:
    """(n, n): Euclidean, in patches."""
    places = torch.cartesian_prod(*(torch.arange(float(side)) for side in grid))
    return torch.cdist(places, places)


@contextmanager
def watched(model: nn.Module) -> Iterator[list[Layer]]:
    """Inside, every forward of a ViT that is `model` or a part of it is measured, with the weights and masks that are then in effect."""
    layers, handles = [], []
    for name, vit in model.named_modules():
        if isinstance(vit, VisionTransformer):
            for index, block in enumerate(vit.blocks):
                if isinstance(getattr(block, "attn", None), (Attention, GatedAttention)):
                    layers.append(Layer(name, index, vit.num_prefix_tokens, distances(tuple(vit.patch_embed.grid_size))))
                    handles += _listen(block, layers[-1])
    try:
        yield layers
    finally:
        for handle in handles:
            handle.remove()


def _listen(block: Any, layer: Layer) -> list[Any]:
    heard: dict[str, Tensor] = {}
    attn = block.attn
    sources = {"qk": attn.qk} if isinstance(attn, GatedAttention) else {"q": attn.q_norm, "k": attn.k_norm}

    def keep(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            heard[name] = output.detach().float()
        return hook

    @torch.no_grad()
    def measure(module: nn.Module, inputs: Any, output: Tensor) -> None:
        layer.add(_gated(attn, heard["qk"]) if "qk" in heard else _softmax(attn, heard["q"], heard["k"]))
        context = getattr(block.mlp, "context", None)
        layer.scale = float(context.scale.abs().mean()) if isinstance(context, ScaledContext) else None
        heard.clear()

    return [source.register_forward_hook(keep(name)) for name, source in sources.items()] + [attn.register_forward_hook(measure)]


def _softmax(attn: Any, q: Tensor, k: Tensor) -> Tensor:
    """(B, H, N, d) each -> (B, H, N, N), without the keys that are masked."""
    scores = (q * attn.scale) @ k.transpose(-2, -1)
    if getattr(attn, "keys", None) is not None:
        scores = scores.masked_fill(attn.policy() == 0, -torch.inf)
    return scores.softmax(-1)


def _gated(attn: GatedAttention, qk: Tensor) -> Tensor:
    """(B, N, 2 D) -> (B, H, N, N): content and positions, mixed by the gate."""
    q, k = attn.split(qk)
    gate = attn.gate.sigmoid().view(-1, 1, 1)
    return (1 - gate) * (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(-1) + gate * attn.positions()
