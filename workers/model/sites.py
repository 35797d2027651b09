"""Where a backbone is masked, by architecture: names and shapes of the masks, their way into the
forward, what they save.

A method knows masks by name alone. `gates` are sampled for each image, `entries` once per forward;
both are boolean when serving, 0/1 floats with a gradient when training.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, Protocol

import torch
from timm.layers import Attention
from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from workers.errors import UserError
from workers.model.compact import CompactVit, cut_channels, flops, multiply_adds, plan_blocks
from workers.model.context import uniform_multiply_adds
from workers.model.masked import (
    BlockMasks,
    GatedConv2d,
    GatedLinear,
    MaskedAttention,
    effective_mask,
    make_maskable,
)
from workers.model.vit import geometry

Masks = dict[str, Tensor]
Shapes = dict[str, tuple[int, ...]]
Blocks = Literal["all"] | tuple[int, ...]
Entries = Literal["weight", "neuron", "off"]


class Sites(Protocol):
    """The masks of one architecture. kinds: what people call gates and entries. gates: name ->
    shape, whose last axis is what the gates of one layer are. meta: what a task's state says beside
    its masks; `token_blocks` are the blocks with gates."""

    kinds: tuple[str, str]
    gates: Shapes
    entries: Shapes
    meta: dict[str, Any]

    def sampled(self, masks: Masks) -> AbstractContextManager[None]:
        """Training: the forward inside sees these masks, gates (b, *shape), and can be
        differentiated with respect to them; where they mask weights, see `weights`."""

    def weights(self, masks: Masks) -> Masks:
        """M .* W of the masked weights, by parameter name."""

    def folded(self, masks: Masks) -> Masks:
        """Serving: puts gates, of their bare shape, in effect and returns the weights in effect, by
        parameter name. What masks nothing leaves timm's plain path, bit for bit."""

    def compact(self, masks: Masks, head: nn.Module) -> nn.Module:
        """images -> logits by what the masks leave alone, equal to the masked dense forward up to
        the order of summation."""

    def flops_share(self, masks: Masks) -> float:
        """Multiply-adds of `compact` relative to those without masks."""


def sites_of(
    backbone: nn.Module, gated: Blocks, entries: Entries, self_loop: bool = False
) -> Sites:
    """The sites of a backbone, whose modules become maskable in place. gated: the blocks with
    gates, from 0. Raises UserError where an architecture has no such masks."""
    if isinstance(backbone, VisionTransformer):
        return TokenSites(backbone, gated, entries, self_loop)
    if not isinstance(backbone, ResNet):
        raise UserError(
            f"the backbone is a {type(backbone).__name__}, which has neither image tokens nor "
            "inner channels of residual convolutions to mask; "
            "choose a ViT such as vit_tiny_patch16_224, or a ResNet such as resnet18"
        )
    if entries == "neuron":
        raise UserError(
            "ffn_masks is 'neuron', but a convolutional backbone has no FFN; its channels are "
            "masked by token_masks: choose `weight` or `off`"
        )
    if self_loop:
        raise UserError(
            "self_loop is true, but a convolutional backbone has no attention; leave it out"
        )
    return ChannelSites(backbone, gated, entries)


class TokenSites:
    """A ViT. Gates: image tokens, as keys and values of attention. Entries: the FFN's weights, or
    its hidden neurons. Context behind an FFN is over all tokens, masked ones too, which are then
    computed where nothing else needs them."""

    kinds = ("token", "FFN")

    def __init__(self, vit: Any, gated: Blocks, entries: Entries, self_loop: bool):
        shape = geometry(vit)
        if uniform_multiply_adds(vit):
            raise UserError(
                "the backbone has uniform heads beside its attention (backbone.context), which "
                "would see the tokens that masks take from "
                "attention; use kind `cb`, `cbs` or `replace`"
            )
        self.vit, self.prefix = vit, shape["prefix"]
        self.blocks = _chosen(gated, shape["depth"])
        self.attention: list[MaskedAttention] = []
        self.fc2: list[GatedLinear] = []
        self.entries: Shapes = {}
        for index, block in enumerate(vit.blocks):
            mlp, at = (
                getattr(block, "mlp", None),
                (
                    f"block {index}",
                    "a plain ViT such as vit_tiny_patch16_224 or deit_small_patch16_224",
                ),
            )
            self.attention.append(
                make_maskable(MaskedAttention, Attention, getattr(block, "attn", None), *at)
            )
            self.attention[-1].self_loop = self_loop
            fc1 = make_maskable(nn.Linear, nn.Linear, getattr(mlp, "fc1", None), *at)
            self.fc2.append(make_maskable(GatedLinear, nn.Linear, getattr(mlp, "fc2", None), *at))
            if entries == "weight":
                self.entries |= {
                    f"blocks.{index}.fc1": tuple(fc1.weight.shape),
                    f"blocks.{index}.fc2": tuple(self.fc2[-1].weight.shape),
                }
            elif entries == "neuron":
                self.entries[f"blocks.{index}.neurons"] = (fc1.out_features,)
        self.gates: Shapes = {"tokens": (len(self.blocks), shape["tokens"])} if self.blocks else {}
        self.meta = {"token_blocks": list(self.blocks), "grid": list(shape["grid"])}

    def by_block(self, masks: Masks) -> list[BlockMasks]:
        found = [
            BlockMasks(
                **{kind: masks.get(f"blocks.{i}.{kind}") for kind in ("fc1", "fc2", "neurons")}
            )
            for i in range(len(self.vit.blocks))
        ]
        for position, block in enumerate(self.blocks if "tokens" in masks else ()):
            found[block].tokens = masks["tokens"][..., position, :].reshape(
                -1, masks["tokens"].shape[-1]
            )
        return found

    @contextmanager
    def sampled(self, masks: Masks) -> Iterator[None]:
        try:
            for attention, fc2, mask in zip(
                self.attention, self.fc2, self.by_block(masks), strict=True
            ):
                attention.keys = None if mask.tokens is None else self._with_prefix(mask.tokens)
                fc2.gate = mask.neurons
            yield
        finally:
            self._clear()

    def weights(self, masks: Masks) -> Masks:
        return self._ffn_weights(self.by_block(masks))

    @torch.no_grad()
    def folded(self, masks: Masks) -> Masks:
        self._clear()
        blocks = self.by_block(masks)
        for attention, mask in zip(self.attention, blocks, strict=True):
            tokens = effective_mask(mask.tokens)
            if tokens is not None:
                attention.keys = self._with_prefix(tokens.to(attention.qkv.weight.device))
        return self._ffn_weights([mask.folded() for mask in blocks])

    def compact(self, masks: Masks, head: nn.Module) -> nn.Module:
        return CompactVit(self.vit, self.by_block(masks), head)

    def flops_share(self, masks: Masks) -> float:
        counted = [
            flops(self.vit, plan_blocks(self.vit, self.by_block(some))) for some in (masks, {})
        ]
        return counted[0] / counted[1]

    def _ffn_weights(self, blocks: list[BlockMasks]) -> Masks:
        return {
            f"blocks.{i}.mlp.{kind}.weight": weight * mask.to(weight.device)
            for i, (block, m) in enumerate(zip(self.vit.blocks, blocks, strict=True))
            for kind, weight, mask in (
                ("fc1", block.mlp.fc1.weight, m.fc1),
                ("fc2", block.mlp.fc2.weight, m.fc2),
            )
            if mask is not None
        }

    def _clear(self) -> None:
        for attention, fc2 in zip(self.attention, self.fc2, strict=True):
            attention.keys, fc2.gate = None, None

    def _with_prefix(self, tokens: Tensor) -> Tensor:
        """(b, n) -> (b, prefix + n): class and register tokens are always kept."""
        return torch.cat([tokens.new_ones((tokens.shape[0], self.prefix)), tokens], dim=1)


class ChannelSites:
    """A ResNet. Gates: in every residual block the output channels of each convolution but the
    last, after norm and activation (`channels1`; in a bottleneck `channels2` too): they gate the
    inputs of the convolution that follows. The stem, the last convolution of a block and the
    shortcut write to the residual stream, which is never gated. Entries: the weights of all
    convolutions of the block (`conv1`, ...), not those of stem and shortcuts. Blocks are counted
    through all stages.
    """

    kinds = ("channel", "convolution")

    def __init__(self, cnn: ResNet, gated: Blocks, entries: Entries):
        self.cnn = cnn
        self.gates: Shapes = {}
        self.entries: Shapes = {}
        self.followers: dict[
            str, tuple[str, GatedConv2d]
        ] = {}  # gate -> the convolution that it is in front of, and its path
        self.convolutions: dict[
            str, tuple[str, GatedConv2d]
        ] = {}  # the weights that may have entries, and their path
        found = [
            (path, m) for path, m in cnn.named_modules() if isinstance(m, (BasicBlock, Bottleneck))
        ]
        self.blocks = _chosen(gated, len(found))
        for index, (path, block) in enumerate(found):
            for k, conv in enumerate(_inner(block, index), 1):
                name = f"blocks.{index}.conv{k}"
                self.convolutions[name] = f"{path}.conv{k}.weight", conv
                if k > 1 and index in self.blocks:
                    gate = f"blocks.{index}.channels{k - 1}"
                    self.followers[gate], self.gates[gate] = (
                        self.convolutions[name],
                        (conv.in_channels,),
                    )
                if entries == "weight":
                    self.entries[name] = tuple(conv.weight.shape)
        self.meta = {"token_blocks": list(self.blocks)}

    @contextmanager
    def sampled(self, masks: Masks) -> Iterator[None]:
        try:
            for name, (_, conv) in self.followers.items():
                conv.gate = masks.get(name)
            yield
        finally:
            for _, conv in self.followers.values():
                conv.gate = None

    def weights(self, masks: Masks) -> Masks:
        return {
            path: conv.weight * masks[name].to(conv.weight.device)
            for name, (path, conv) in self.convolutions.items()
            if name in masks
        }

    @torch.no_grad()
    def folded(self, masks: Masks) -> Masks:
        """A channel that is dropped for good is a column of zeros in the convolution that follows:
        gates need no place in the forward."""
        folded = self.weights(
            {name: mask for name, mask in masks.items() if effective_mask(mask) is not None}
        )
        for name, (path, conv) in self.followers.items():
            gate = effective_mask(masks.get(name))
            if gate is not None:
                folded[path] = (
                    folded.get(path, conv.weight) * gate.to(conv.weight.device)[:, None, None]
                )
        return folded

    def compact(self, masks: Masks, head: nn.Module) -> nn.Module:
        thinned = copy.deepcopy(self.cnn).requires_grad_(False)
        thinned.load_state_dict(self.folded(masks), strict=False)
        cut_channels(thinned)
        return nn.Sequential(thinned, head).eval()

    def flops_share(self, masks: Masks) -> float:
        """Counted at 224 pixels: the share hardly depends on them."""
        counted = [
            multiply_adds(net, 3, 224, 224)
            for net in (self.compact(masks, nn.Identity()), self.cnn)
        ]
        return counted[0] / counted[1]


def _inner(block: nn.Module, index: int) -> list[GatedConv2d]:
    """The convolutions of a residual block in order, made maskable."""
    at = f"residual block {index}", "a plain ResNet such as resnet18 or resnet50"
    convs: list[GatedConv2d] = [
        make_maskable(GatedConv2d, nn.Conv2d, conv, *at)
        for name, conv in block.named_children()
        if name.startswith("conv")
    ]
    if any(conv.groups != 1 for conv in convs):
        raise UserError(
            f"{at[0]} of the backbone has a convolution in {max(c.groups for c in convs)} "
            f"groups where masks need a full one; choose {at[1]}"
        )
    return convs


def _chosen(gated: Blocks, depth: int) -> tuple[int, ...]:
    blocks = tuple(sorted(set(range(depth) if gated == "all" else gated)))
    if any(not 0 <= block < depth for block in blocks):
        raise UserError(
            f"token_mask_blocks is {list(blocks)}, but the backbone has blocks 0 to "
            f"{depth - 1}; name some of those, or `all`"
        )
    return blocks
