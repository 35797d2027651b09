"""Inference that skips the tokens, neurons and channels that a task's masks drop.

ViT: a block computes keys and values of kept tokens only (with `self_loop` also of live tokens),
and queries of live tokens only. A token is live if a later block keeps it as a key, or if the
pooling or Context Broadcasting (see context.py) reads it. FFN neurons that cannot affect the output
are removed.

ResNet: inner channels of residual blocks that cannot affect the output are removed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from timm.models.resnet import BasicBlock, Bottleneck
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from workers.data.torch_internals import shapes_only
from workers.model.context import count_uniform_multiply_adds, find_context, mixes_all_tokens
from workers.model.masked import BlockMasks


@dataclass(frozen=True)
class BlockPlan:
    """The tokens and neurons that one block computes, as sorted indices.

    Prefix tokens have the first indices.

    Attributes:
        inputs: Tokens that enter the block.
        keys: Tokens with a key and a value.
        kept: (keys,) bool. False: the token is masked, and only its own query attends to it.
        queries: Tokens that leave the block.
        neurons: FFN neurons.
    """

    inputs: Tensor
    keys: Tensor
    kept: Tensor
    queries: Tensor
    neurons: Tensor


def plan_blocks(vit: Any, masks: list[BlockMasks]) -> list[BlockPlan]:
    """Return a plan per block.

    Live tokens are determined from the last block to the first. The tokens that enter a block are
    the tokens that leave the block before.
    """
    prefix = vit.num_prefix_tokens
    total = prefix + vit.patch_embed.num_patches
    live = torch.ones(total, dtype=torch.bool)  # tokens that must leave the last block
    if vit.global_pool == "token":
        live[1:] = False  # the pooling reads only the class token
    needed: list[tuple[Tensor, Tensor, Tensor]] = []  # (keys, kept, queries) of a block, (total,)
    for block, mask in zip(reversed(vit.blocks), reversed(masks), strict=True):
        kept = torch.ones(total, dtype=torch.bool)
        if mask.tokens is not None:
            kept[prefix:] = mask.tokens[0].cpu()
        if mixes_all_tokens(block):
            live = torch.ones_like(live)
        keys = kept
        if getattr(block.attn, "self_loop", False):
            keys = kept | live
        needed.append((keys, kept, live))
        live = live | keys
    plans = []
    inputs = live
    for block, mask, (keys, kept, queries) in zip(vit.blocks, masks, reversed(needed), strict=True):
        neurons = _live_neurons(block.mlp, mask)
        plan = BlockPlan(
            inputs=inputs.nonzero()[:, 0],
            keys=keys.nonzero()[:, 0],
            kept=kept[keys],
            queries=queries.nonzero()[:, 0],
            neurons=neurons.nonzero()[:, 0],
        )
        plans.append(plan)
        inputs = queries
    return plans


def _live_neurons(mlp: Any, mask: BlockMasks) -> Tensor:
    """Return the live neurons of an FFN, (hidden,) bool.

    A neuron is not live if it is masked, or if all its outgoing weights are masked.
    """
    live = torch.ones(mlp.fc1.out_features, dtype=torch.bool)
    if not isinstance(mlp.norm, nn.Identity):
        return live  # a norm over the neurons reads all neurons
    if mask.neurons is not None:
        live &= mask.neurons.cpu()
    if mask.fc2 is not None:
        live &= mask.fc2.any(dim=0).cpu()
    return live


def flops(vit: Any, plans: list[BlockPlan]) -> int:
    """Return the number of multiply-adds for one image in the patch embedding and the blocks.

    Norms, activations and means over tokens are not counted.
    """
    width = vit.embed_dim
    count = count_multiply_adds(vit.patch_embed, vit.in_chans, *vit.patch_embed.img_size)
    count += count_uniform_multiply_adds(vit)
    for plan in plans:
        queries = len(plan.queries)
        keys = len(plan.keys)
        # multiply-adds, divided by 2 * width; first term: queries and proj, second: keys and values
        linear = queries * width + keys * width
        attention = queries * keys  # scores, and the weighted sums of values
        ffn = queries * len(plan.neurons)
        count += 2 * width * (linear + attention + ffn)
    return count


@torch.no_grad()
def count_multiply_adds(model: nn.Module, *shape: int) -> int:
    """Count the multiply-adds for one input (*shape) with fake tensors: nothing is computed.

    Linear layers, convolutions and matrix products are counted.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()  # in training mode `DrawnDropPath` only accepts the batch for which it was drawn
    try:
        with shapes_only(), FlopCounterMode(display=False) as counter:
            model(torch.empty(1, *shape, device=next(model.parameters()).device))
    finally:
        for module in training:
            module.training = True
    total_flops: int = counter.get_total_flops()
    return total_flops // 2


class CompactBlock(nn.Module):
    """A block that computes only the tokens and neurons in its plan.

    Norms, layer scale, gate, projection and activation are the backbone's own modules.

    Attributes:
        queries: Positions of the plan's queries among its inputs. None: all inputs are queries.
        keys: Positions of the plan's keys among its inputs. None: all inputs are keys.
        seen: Attention mask, (queries, keys) bool; True: the query attends to the key. None: no
            mask.
    """

    norm1: nn.Module
    ls1: nn.Module
    norm2: nn.Module
    ls2: nn.Module
    q_norm: nn.Module
    k_norm: nn.Module
    norm: nn.Module
    gate: nn.Module | None
    proj: nn.Module
    q_weight: Tensor
    q_bias: Tensor | None
    kv_weight: Tensor
    kv_bias: Tensor | None
    fc1_weight: Tensor
    fc1_bias: Tensor | None
    fc2_weight: Tensor
    fc2_bias: Tensor | None
    queries: Tensor | None
    keys: Tensor | None
    seen: Tensor | None

    def __init__(self, block: Any, plan: BlockPlan, mask: BlockMasks):
        super().__init__()
        attn = block.attn
        mlp = block.mlp
        self.heads = attn.num_heads
        self.head_dim = attn.head_dim
        self.scale = attn.scale
        for name in ("norm1", "ls1", "norm2", "ls2"):
            self.add_module(name, getattr(block, name))
        for name in ("q_norm", "k_norm", "norm", "gate", "proj"):
            self.add_module(name, getattr(attn, name))
        self.act = mlp.act
        self.mlp_norm = mlp.norm
        self.attention_context = find_context(attn)
        self.front = find_context(mlp, "front")
        self.context = find_context(mlp)
        rows = attn.attn_dim
        self._buffer("q_weight", attn.qkv.weight[:rows])
        self._buffer("q_bias", _rows(attn.qkv.bias, slice(rows)))
        self._buffer("kv_weight", attn.qkv.weight[rows:])
        self._buffer("kv_bias", _rows(attn.qkv.bias, slice(rows, None)))
        columns = mask.fc2 if mask.neurons is None else mask.neurons
        self._buffer("fc1_weight", _multiply_by_mask(mlp.fc1.weight, mask.fc1)[plan.neurons])
        self._buffer("fc1_bias", _rows(mlp.fc1.bias, plan.neurons))
        self._buffer("fc2_weight", _multiply_by_mask(mlp.fc2.weight, columns)[:, plan.neurons])
        self._buffer("fc2_bias", mlp.fc2.bias)
        self._buffer("queries", _positions(plan.queries, plan.inputs))
        self._buffer("keys", _positions(plan.keys, plan.inputs))
        seen = None
        if not plan.kept.all():
            itself = plan.queries[:, None] == plan.keys[None, :]
            seen = plan.kept[None, :] | itself  # (queries, keys)
        self._buffer("seen", seen)

    def _buffer(self, name: str, value: Tensor | None) -> None:
        if value is not None:
            value = value.detach().contiguous()
        self.register_buffer(name, value, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs, d) -> (B, queries, d)."""
        normed = self.norm1(x)
        at_queries = _take(normed, self.queries)
        q = self._split(F.linear(at_queries, self.q_weight, self.q_bias), 1)[0]
        at_keys = _take(normed, self.keys)
        k, v = self._split(F.linear(at_keys, self.kv_weight, self.kv_bias), 2)
        y = F.scaled_dot_product_attention(
            self.q_norm(q), self.k_norm(k), v, attn_mask=self.seen, scale=self.scale
        )
        y = self.norm(y.transpose(1, 2).flatten(2))
        if self.gate is not None:
            y = y * self.gate(at_queries).sigmoid()
        x = _take(x, self.queries) + self.ls1(self.attention_context(self.proj(y)))
        normed = self.front(self.norm2(x))
        hidden = self.act(F.linear(normed, self.fc1_weight, self.fc1_bias))
        hidden = self.mlp_norm(hidden)  # (B, queries, neurons)
        ffn = self.context(F.linear(hidden, self.fc2_weight, self.fc2_bias))
        update: Tensor = self.ls2(ffn)
        return x + update

    def _split(self, x: Tensor, parts: int) -> tuple[Tensor, ...]:
        """(B, N, parts * H * D) -> `parts` tensors (B, H, N, D)."""
        shaped = x.reshape(x.shape[0], x.shape[1], parts, self.heads, self.head_dim)
        return shaped.permute(2, 0, 3, 1, 4).unbind(0)


class CompactVit(nn.Module):
    """A ViT of `CompactBlock`s with the head of one task: images (b, 3, H, W) -> logits.

    The logits equal those of the masked dense forward pass up to the order of summation.
    """

    entering: Tensor | None

    def __init__(self, vit: Any, masks: list[BlockMasks], head: nn.Module):
        super().__init__()
        plans = plan_blocks(vit, masks)
        self.vit = vit
        self.head = head
        tokens = torch.arange(vit.num_prefix_tokens + vit.patch_embed.num_patches)
        self.register_buffer("entering", _positions(plans[0].inputs, tokens), persistent=False)
        self.blocks = nn.ModuleList(
            CompactBlock(*parts) for parts in zip(vit.blocks, plans, masks, strict=True)
        )
        self.to(vit.pos_embed.device)
        self.eval()

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        x = self.vit.norm_pre(self.vit._pos_embed(self.vit.patch_embed(images)))
        x = _take(x, self.entering)
        for block in self.blocks:
            x = block(x)
        features = self.vit.forward_head(self.vit.norm(x))
        logits: Tensor = self.head(features)
        return logits


@torch.no_grad()
def cut_channels(cnn: nn.Module) -> None:
    """Remove inner channels of residual blocks whose outgoing weights are all 0, in place.

    All channels stay if another layer between two convolutions mixes channels or pixels (group
    norm, anti-aliasing).
    """
    blocks: list[Any] = [m for m in cnn.modules() if isinstance(m, (BasicBlock, Bottleneck))]
    for block in blocks:
        inner = [(block.conv1, block.bn1, block.conv2)]
        if isinstance(block, Bottleneck):
            # The last convolution comes first: after outputs of conv2 are removed, more outputs of
            # conv1 can be without outgoing weights.
            inner.insert(0, (block.conv2, block.bn2, block.conv3))
        for before, norm, after in inner:
            live = after.weight.ne(0).any(dim=(0, 2, 3))
            live[0] |= not live.any()  # a convolution needs at least one channel
            if isinstance(norm, nn.BatchNorm2d) and isinstance(block.aa, nn.Identity):
                for tensor in (*before.parameters(), *norm.parameters(), *norm.buffers()):
                    if tensor.ndim:  # not the scalar `num_batches_tracked`
                        tensor.data = tensor[live]
                after.weight.data = after.weight[:, live].contiguous()


def _rows(bias: Tensor | None, rows: slice | Tensor) -> Tensor | None:
    if bias is None:
        return None
    return bias[rows]


def _multiply_by_mask(weight: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return weight
    return weight * mask.to(weight.device)


def _positions(tokens: Tensor, among: Tensor) -> Tensor | None:
    """Return the positions of `tokens` (sorted) in their sorted superset `among`.

    The result is None if both are equal, so that `_take` returns its input without a copy.
    """
    if len(tokens) == len(among):
        return None
    return torch.searchsorted(among, tokens)


def _take(x: Tensor, positions: Tensor | None) -> Tensor:
    """Select tokens: (B, N, d) -> (B, positions, d). None: all tokens."""
    if positions is None:
        return x
    return x.index_select(1, positions)
