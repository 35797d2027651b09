"""Measure the attention maps of a ViT with forward hooks.

The hooks read queries and keys; the model is neither changed nor copied.

Entropy and distance are defined as in Hyeon-Woo et al.: Scratching Visual Transformer's Back with
Uniform Attention, ICCV 2023. Axes: B images, H heads, N tokens (prefix tokens first), n patches.
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

RecordT = TypeVar("RecordT", "AttentionStatistics", "ClassAttention")


@dataclass
class AttentionStatistics:
    """Sums over images for one attention layer of one network.

    Attributes:
        network: Path of the ViT in the model, or "" for the model itself.
        block: Index of the block.
        patch_distances: Distances between patches, (n, n), in patches.
        scales: The block's learned modules for Context Broadcasting (see context.py).
        tokens: Number of tokens N in the last batch.
        images: Number of images so far.
        entropy: Sum over images of the entropy of each head, (H,).
        distance: Sum over images of the distance of each head, (H,).
        distance_to_others: Like `distance`, without the attention of a patch to itself, (H,).
        scale: Mean absolute scale Lambda of the block's Context Broadcasting (`ScaledContext`), or
            None if it has no scale.
    """

    network: str
    block: int
    patch_distances: Tensor
    scales: tuple[ScaledContext, ...] = ()
    tokens: int = 0
    images: int = 0
    entropy: Tensor | float = 0.0
    distance: Tensor | float = 0.0
    distance_to_others: Tensor | float = 0.0
    scale: float | None = None

    def add(self, attention: Tensor) -> None:
        """Add the attention maps of a batch.

        Args:
            attention: (B, H, N, N). Each row sums to 1.
        """
        self.tokens = attention.shape[-1]
        self.images += len(attention)
        self.entropy = self.entropy + compute_entropy(attention).sum(0).cpu()
        patches = len(self.patch_distances)  # patches are the last tokens, after any prefix tokens
        between_patches = attention[..., -patches:, -patches:]  # (B, H, n, n)
        distances = compute_distance(between_patches, self.patch_distances)  # (B, H)
        self.distance = self.distance + distances.sum(0).cpu()
        distances = compute_distance(between_patches, self.patch_distances, to_others=True)
        self.distance_to_others = self.distance_to_others + distances.sum(0).cpu()
        if self.scales:
            means = [context.scale.abs().mean() for context in self.scales]
            self.scale = float(torch.stack(means).mean())

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per head, with means over images and queries.

        The entropy is in nats; `entropy_share` is the entropy divided by its maximum ln N. Both
        distances are relative to their values under uniform attention.
        """
        if not self.images:
            return []
        entropies = torch.as_tensor(self.entropy).double() / self.images  # (H,)
        distances = torch.as_tensor(self.distance).double() / self.images  # (H,)
        to_others = torch.as_tensor(self.distance_to_others).double() / self.images  # (H,)
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
                "distance_to_others": float(to_others[head]),
                "scale": self.scale,
            }
            rows.append(row)
        return rows


@dataclass
class ClassAttention:
    """Attention of the class token to the patches, in one block of one network.

    Attributes:
        network: Path of the ViT in the model, or "" for the model itself.
        block: Index of the block.
        grid: Rows h and columns w of the grid of patches.
        passes: A map (B, h, w) over the grid of patches for each forward pass, averaged over heads.
            Values are relative to uniform attention over all N tokens, which is 1 everywhere.
            Attention to other tokens is ignored.
    """

    network: str
    block: int
    grid: tuple[int, int]
    passes: list[Tensor] = field(default_factory=list)

    def add(self, attention: Tensor) -> None:
        """Add the attention maps of a forward pass.

        Args:
            attention: (B, H, N, N). Each row sums to 1.
        """
        tokens = attention.shape[-1]
        patches = math.prod(self.grid)
        to_patches = attention[:, :, 0, -patches:].mean(1)  # (B, n)
        self.passes.append(tokens * to_patches.unflatten(1, self.grid).cpu())


def compute_entropy(attention: Tensor) -> Tensor:
    """Return - sum_j A_ij ln A_ij, averaged over queries i: (B, H, N, N) -> (B, H).

    The maximum is ln N, for uniform attention.
    """
    terms: Tensor = torch.special.entr(attention)
    return terms.sum(-1).mean(-1)


def compute_distance(attention: Tensor, patch_distances: Tensor, to_others: bool = False) -> Tensor:
    """Return the mean attention distance: (B, H, n, n) -> (B, H).

    The distance of patch i is sum_j A_ij d_ij / sum_j A_ij over patches j. The mean over i is
    divided by the mean distance under uniform attention. Class and register tokens have no position
    and are omitted.

    Args:
        attention: Attention A between patches.
        patch_distances: Distances d between patches, (n, n).
        to_others: Whether to leave out the attention of a patch to itself (j = i) in both means.
    """
    uniform = patch_distances.mean().to(attention)
    if to_others:
        patches = len(patch_distances)
        attention = attention.clone()
        attention.diagonal(dim1=-2, dim2=-1).zero_()
        uniform = uniform * patches / (patches - 1)
    weighted = (attention * patch_distances.to(attention)).sum(-1)  # (B, H, n)
    total = attention.sum(-1)
    distances = weighted / total.clamp(min=torch.finfo(attention.dtype).tiny)
    return distances.mean(-1) / uniform


def compute_patch_distances(grid: tuple[int, int]) -> Tensor:
    """Return the Euclidean distances between the patches of a grid, (n, n), in patches."""
    rows, columns = grid
    positions = torch.cartesian_prod(torch.arange(float(rows)), torch.arange(float(columns)))
    return torch.cdist(positions, positions)


def record_attention(model: nn.Module) -> AbstractContextManager[list[AttentionStatistics]]:
    """Record attention statistics of every forward pass inside the context.

    Args:
        model: A ViT, or a module that contains ViTs.

    Yields:
        The records of all attention layers, measured with the weights and masks of each pass.
    """

    def create_record(name: str, index: int, vit: Any) -> AttentionStatistics:
        distances = compute_patch_distances(tuple(vit.patch_embed.grid_size))
        modules = vit.blocks[index].modules()
        scales = tuple(module for module in modules if isinstance(module, ScaledContext))
        return AttentionStatistics(name, index, distances, scales)

    return _record_layers(model, create_record)


def record_class_attention(model: nn.Module) -> AbstractContextManager[list[ClassAttention]]:
    """Record the attention of class tokens in every forward pass inside the context.

    Args:
        model: A ViT, or a module that contains ViTs. ViTs without a class token are skipped.

    Yields:
        The records of all attention layers.
    """

    def create_record(name: str, index: int, vit: Any) -> ClassAttention | None:
        if not vit.has_class_token:
            return None
        return ClassAttention(name, index, tuple(vit.patch_embed.grid_size))

    return _record_layers(model, create_record)


@contextmanager
def _record_layers(
    model: nn.Module, create_record: Callable[[str, int, Any], RecordT | None]
) -> Iterator[list[RecordT]]:
    """Add the attention maps of each forward pass to the records of the layers.

    Args:
        model: A ViT, or a module that contains ViTs.
        create_record: Called with the path of the ViT, the index of the block and the ViT. Returns
            the record of the layer, or None to skip it.

    Yields:
        The records of all layers that are not skipped.
    """
    records: list[RecordT] = []
    handles: list[Any] = []
    for name, vit in model.named_modules():
        if not isinstance(vit, VisionTransformer):
            continue
        for index, block in enumerate(vit.blocks):
            if not isinstance(getattr(block, "attn", None), (Attention, GatedAttention)):
                continue
            record = create_record(name, index, vit)
            if record is not None:
                records.append(record)
                handles += _register_hooks(block.attn, record.add)
    try:
        yield records
    finally:
        for handle in handles:
            handle.remove()


def _register_hooks(attn: Any, add: Callable[[Tensor], None]) -> list[Any]:
    """Register hooks that call `add` with the attention (B, H, N, N) of each forward pass.

    Returns:
        The handles of the hooks.
    """
    outputs: dict[str, Tensor] = {}
    if isinstance(attn, GatedAttention):
        sources = {"qk": attn.qk}
    else:
        # timm passes queries and keys through these modules, even if they are `Identity`.
        sources = {"q": attn.q_norm, "k": attn.k_norm}

    def keep(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            outputs[name] = output.detach().float()

        return hook

    @torch.no_grad()
    def measure(module: nn.Module, inputs: Any, output: Tensor) -> None:
        if "qk" in outputs:
            add(_compute_gated_attention(attn, outputs["qk"]))
        else:
            add(_compute_attention(attn, outputs["q"], outputs["k"]))
        outputs.clear()

    handles = [source.register_forward_hook(keep(name)) for name, source in sources.items()]
    handles.append(attn.register_forward_hook(measure))
    return handles


def _compute_attention(attn: Any, q: Tensor, k: Tensor) -> Tensor:
    """Return softmax(scale q k^T), (B, H, N, N), of `q` and `k` (B, H, N, d).

    If the layer masks keys (see `KeyMasks`), keys with policy 0 get no attention.
    """
    scores: Tensor = (q * attn.scale) @ k.transpose(-2, -1)
    if getattr(attn, "keys", None) is not None:
        scores = scores.masked_fill(attn.policy() == 0, -torch.inf)
    return scores.softmax(-1)


def _compute_gated_attention(attn: GatedAttention, qk: Tensor) -> Tensor:
    """Return the attention of a ConViT layer: content and position attention, mixed by its gate.

    Args:
        attn: The layer.
        qk: Queries and keys (B, N, 2 D).

    Returns:
        Attention (B, H, N, N).
    """
    q, k = attn.split(qk)
    gate = attn.gate.sigmoid().view(-1, 1, 1)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return (1 - gate) * scores.softmax(-1) + gate * attn.positions()
