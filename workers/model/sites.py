"""The masks that a backbone can have, by architecture.

For each architecture, a class defines the names and shapes of the masks, their use in the forward
pass, and the multiply-adds that they save. A method only knows the names and shapes. There are two
kinds of masks: `gates` are sampled for each image, `entries` once per forward pass. Both are
boolean in serving, and 0/1 floats with a gradient in training.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, Protocol

import torch
from timm.layers import GluMlp, SwiGLU
from timm.models.beit import Beit
from timm.models.eva import Eva
from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from workers.errors import UserError
from workers.model.compact import CompactVit, count_multiply_adds, cut_channels, flops, plan_blocks
from workers.model.context import PLAIN, count_uniform_multiply_adds
from workers.model.masked import (
    BlockMasks,
    GatedConv2d,
    GatedLinear,
    effective_mask,
    make_maskable,
    mask_keys,
)
from workers.model.vit import geometry

Masks = dict[str, Tensor]
Shapes = dict[str, tuple[int, ...]]
Blocks = Literal["all"] | tuple[int, ...]
Entries = Literal["weight", "neuron", "off"]


class Sites(Protocol):
    """The masks of one architecture.

    Attributes:
        kinds: Words for a gate and for an entry, used in names of metrics and in messages.
        gates: Shapes of the gates by name; the last axis is the number of gates in one layer.
        entries: Shapes of the entries by name.
        meta: Fields of a task's state in addition to its masks. The field `token_blocks` lists the
            indices of the blocks with gates.
    """

    kinds: tuple[str, str]
    gates: Shapes
    entries: Shapes
    meta: dict[str, Any]

    def sampled(self, masks: Masks) -> AbstractContextManager[None]:
        """Apply gates inside the context, for training; neuron masks of an FFN are applied, too.

        The forward pass is differentiable in the masks. Masks of weights have no effect here; they
        are applied by `weights`.

        Args:
            masks: Masks by name; gates are (b, *shape).
        """

    def weights(self, masks: Masks) -> Masks:
        """Return M .* W for each weight W with a mask M, by parameter name."""

    def folded(self, masks: Masks) -> Masks:
        """Apply gates and return the masked weights by parameter name, for serving.

        The gates stay in effect after the call, or are part of the returned weights. With masks
        that keep everything, the outputs are bit for bit those of timm's forward pass.

        Args:
            masks: Masks by name; gates have no batch axis.
        """

    def compact(self, masks: Masks, head: nn.Module) -> nn.Module:
        """Return a network images -> logits that computes only the kept parts.

        The logits equal those of the masked dense forward pass up to the order of summation.
        """

    def flops_share(self, masks: Masks) -> float:
        """Return the multiply-adds of `compact`, divided by the multiply-adds without masks."""


def find_sites(
    backbone: nn.Module, gated: Blocks, entries: Entries, self_loop: bool = False
) -> Sites:
    """Return the sites of a backbone. The modules of the backbone become maskable in place.

    Args:
        backbone: The backbone.
        gated: Indices of the blocks with gates, from 0, or `all`.
        entries: Entries to mask: `weight`, `neuron`, or `off` for no entries.
        self_loop: See `KeyMasks`.

    Raises:
        UserError: If the architecture does not support these masks.
    """
    if isinstance(backbone, (VisionTransformer, Eva, Beit)):
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
    """The masks of a ViT.

    Gates mask patch tokens as keys and values of attention. Entries mask the FFN's weights, or its
    hidden neurons. Context Broadcasting (see context.py) reads all tokens, so a block with it
    computes masked tokens, too.
    """

    kinds = ("token", "FFN")

    def __init__(self, vit: Any, gated: Blocks, entries: Entries, self_loop: bool):
        shape = geometry(vit)
        if count_uniform_multiply_adds(vit):
            raise UserError(
                "the backbone has uniform heads beside its attention (backbone.context), which "
                "would see the tokens that masks take from "
                "attention; use kind `cb`, `cbs` or `replace`"
            )
        self.vit, self.prefix = vit, shape["prefix"]
        self.blocks = _list_gated_blocks(gated, shape["depth"])
        self.attention: list[Any] = []  # attention modules with `KeyMasks`
        self.fc2: list[GatedLinear] = []
        self.entries: Shapes = {}
        for index, block in enumerate(vit.blocks):
            name = f"block {index}"
            attn = getattr(block, "attn", None)
            mlp = getattr(block, "mlp", None)
            attn = mask_keys(attn, name, PLAIN)
            attn.self_loop = self_loop
            if isinstance(mlp, SwiGLU):
                raise UserError(
                    f"{name} of the backbone has an FFN of three layers, and masks are those of "
                    "two, fc1 and fc2; choose a model such as vit_tiny_patch16_224, "
                    "eva02_tiny_patch14_224 or vit_small_patch16_dinov3"
                )
            fc1 = getattr(mlp, "fc1", None)
            # only a check of the class: fc1 needs no gate, because neurons are masked at fc2
            fc1 = make_maskable(nn.Linear, nn.Linear, fc1, name, PLAIN)
            fc2 = getattr(mlp, "fc2", None)
            fc2 = make_maskable(GatedLinear, nn.Linear, fc2, name, PLAIN)
            self.attention.append(attn)
            self.fc2.append(fc2)
            if entries == "weight":
                self.entries[f"blocks.{index}.fc1"] = tuple(fc1.weight.shape)
                self.entries[f"blocks.{index}.fc2"] = tuple(fc2.weight.shape)
            elif entries == "neuron":
                self.entries[f"blocks.{index}.neurons"] = (fc2.in_features,)
        self.gates: Shapes = {}
        if self.blocks:
            self.gates["tokens"] = (len(self.blocks), shape["tokens"])
        self.meta = {"token_blocks": list(self.blocks), "grid": list(shape["grid"])}

    def by_block(self, masks: Masks) -> list[BlockMasks]:
        """Return the masks of each block; the mask of tokens is (b or 1, n)."""
        block_masks: list[BlockMasks] = []
        for index in range(len(self.vit.blocks)):
            fc1 = masks.get(f"blocks.{index}.fc1")
            fc2 = masks.get(f"blocks.{index}.fc2")
            neurons = masks.get(f"blocks.{index}.neurons")
            block_masks.append(BlockMasks(fc1=fc1, fc2=fc2, neurons=neurons))
        if "tokens" in masks:
            tokens = masks["tokens"]  # (b, blocks with gates, n) or (blocks with gates, n)
            for position, block in enumerate(self.blocks):
                of_block = tokens[..., position, :]
                block_masks[block].tokens = of_block.reshape(-1, tokens.shape[-1])
        return block_masks

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
                attention.keys = self._with_prefix(tokens.to(attention.proj.weight.device))
        return self._ffn_weights([mask.folded() for mask in blocks])

    def compact(self, masks: Masks, head: nn.Module) -> nn.Module:
        if not self._can_be_compact():
            raise UserError(
                "inference without the masked parts needs timm's VisionTransformer with an FFN "
                f"that is not gated, and the backbone is a {type(self.vit).__name__}; serve it "
                f"with its masks, or choose {PLAIN}"
            )
        return CompactVit(self.vit, self.by_block(masks), head)

    def flops_share(self, masks: Masks) -> float:
        if not self._can_be_compact():
            return 1.0  # the masked parts are computed, too
        masked = flops(self.vit, plan_blocks(self.vit, self.by_block(masks)))
        return masked / flops(self.vit, plan_blocks(self.vit, self.by_block({})))

    def _can_be_compact(self) -> bool:
        """Return whether `CompactVit` supports the backbone."""
        is_gated = any(isinstance(block.mlp, GluMlp) for block in self.vit.blocks)
        return isinstance(self.vit, VisionTransformer) and not is_gated

    def _ffn_weights(self, blocks: list[BlockMasks]) -> Masks:
        weights: Masks = {}
        for index, masks in enumerate(blocks):
            mlp = self.vit.blocks[index].mlp
            if masks.fc1 is not None:
                fc1 = mlp.fc1.weight
                weights[f"blocks.{index}.mlp.fc1.weight"] = fc1 * masks.fc1.to(fc1.device)
            if masks.fc2 is not None:
                fc2 = mlp.fc2.weight
                weights[f"blocks.{index}.mlp.fc2.weight"] = fc2 * masks.fc2.to(fc2.device)
        return weights

    def _clear(self) -> None:
        for attention, fc2 in zip(self.attention, self.fc2, strict=True):
            attention.keys, fc2.gate = None, None

    def _with_prefix(self, tokens: Tensor) -> Tensor:
        """Add the prefix tokens, which are always kept, to a mask: (b, n) -> (b, prefix + n)."""
        return torch.cat([tokens.new_ones((tokens.shape[0], self.prefix)), tokens], dim=1)


class ChannelSites:
    """The masks of a ResNet. Blocks are counted over all stages.

    Gates mask the output channels of each convolution of a residual block except the last, after
    norm and activation (`channels1`; in a bottleneck also `channels2`). They are applied to the
    inputs of the next convolution. The residual stream is never masked, and neither are the outputs
    that are added to it: those of the stem, the last convolution of a block, and the shortcut.
    Entries mask the weights of all convolutions of the blocks (`conv1`, ...), but not those of the
    stem and the shortcuts.
    """

    kinds = ("channel", "convolution")

    def __init__(self, cnn: ResNet, gated: Blocks, entries: Entries):
        self.cnn = cnn
        self.gates: Shapes = {}
        self.entries: Shapes = {}
        # name of a gate -> path of the weight of the next convolution, and this convolution
        self.followers: dict[str, tuple[str, GatedConv2d]] = {}
        # name of an entry -> path of the weight, and its convolution
        self.convolutions: dict[str, tuple[str, GatedConv2d]] = {}
        residual_blocks = [
            (path, m) for path, m in cnn.named_modules() if isinstance(m, (BasicBlock, Bottleneck))
        ]
        self.blocks = _list_gated_blocks(gated, len(residual_blocks))
        for index, (path, block) in enumerate(residual_blocks):
            for k, conv in enumerate(_make_convolutions_maskable(block, index), 1):
                name = f"blocks.{index}.conv{k}"
                self.convolutions[name] = (f"{path}.conv{k}.weight", conv)
                if k > 1 and index in self.blocks:
                    gate = f"blocks.{index}.channels{k - 1}"
                    self.followers[gate] = self.convolutions[name]
                    self.gates[gate] = (conv.in_channels,)
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
        weights: Masks = {}
        for name, (path, conv) in self.convolutions.items():
            if name in masks:
                weights[path] = conv.weight * masks[name].to(conv.weight.device)
        return weights

    @torch.no_grad()
    def folded(self, masks: Masks) -> Masks:
        """Return the masked weights by parameter name.

        A dropped channel becomes a column of zeros in the weight of the next convolution. Therefore
        no gates are applied in the forward pass.
        """
        effective = {name: m for name, m in masks.items() if effective_mask(m) is not None}
        weights = self.weights(effective)
        for name, (path, conv) in self.followers.items():
            gate = effective_mask(masks.get(name))
            if gate is not None:
                columns = gate.to(conv.weight.device)[:, None, None]  # (C, 1, 1)
                weights[path] = weights.get(path, conv.weight) * columns
        return weights

    def compact(self, masks: Masks, head: nn.Module) -> nn.Module:
        thinned = copy.deepcopy(self.cnn).requires_grad_(False)
        thinned.load_state_dict(self.folded(masks), strict=False)
        cut_channels(thinned)
        return nn.Sequential(thinned, head).eval()

    def flops_share(self, masks: Masks) -> float:
        """Return the share for images of 224 pixels; the share hardly depends on the size."""
        compact = self.compact(masks, nn.Identity())
        return count_multiply_adds(compact, 3, 224, 224) / count_multiply_adds(
            self.cnn, 3, 224, 224
        )


def _make_convolutions_maskable(block: nn.Module, index: int) -> list[GatedConv2d]:
    """Make the convolutions of a residual block maskable; return them in order."""
    block_name = f"residual block {index}"
    remedy = "a plain ResNet such as resnet18 or resnet50"
    convs: list[GatedConv2d] = []
    for name, conv in block.named_children():
        if name.startswith("conv"):
            convs.append(make_maskable(GatedConv2d, nn.Conv2d, conv, block_name, remedy))
    most_groups = max(conv.groups for conv in convs)
    if most_groups != 1:
        raise UserError(
            f"{block_name} of the backbone has a convolution in {most_groups} "
            f"groups where masks need a full one; choose {remedy}"
        )
    return convs


def _list_gated_blocks(gated: Blocks, depth: int) -> tuple[int, ...]:
    """Return the indices of the blocks with gates in ascending order.

    Args:
        gated: Indices of blocks, or `all`.
        depth: Number of blocks.

    Raises:
        UserError: If a block does not exist.
    """
    if gated == "all":
        return tuple(range(depth))
    blocks = tuple(sorted(set(gated)))
    if any(not 0 <= block < depth for block in blocks):
        raise UserError(
            f"token_mask_blocks is {list(blocks)}, but the backbone has blocks 0 to "
            f"{depth - 1}; name some of those, or `all`"
        )
    return blocks
