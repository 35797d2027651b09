"""Functions to run the blocks of timm's vision transformers one by one.

timm's classes differ in the modules before the blocks, in the arguments of a block in addition to
tokens (rotary embeddings, a bias of relative positions), and in the layer that computes the values
of attention. Axes: B images, N tokens (prefix tokens first), D width, A width of a block's values.
"""

from __future__ import annotations

from typing import Any

from timm.models.beit import Beit
from timm.models.eva import Eva
from torch import Tensor, cat, nn

Arguments = dict[str, Any]  # keyword arguments of a block in addition to its tokens


def count_block_tokens(vit: Any) -> int:
    """Return the number of tokens in a block: patches, class token and register tokens."""
    return int(vit.num_prefix_tokens + vit.patch_embed.num_patches)


def enter_blocks(vit: Any, images: Tensor) -> Tensor:
    """Return the tokens that enter the first block: (B, 3, H, W) -> (B, N, D)."""
    patches = vit.patch_embed(images)
    if isinstance(vit, Eva):
        tokens, _ = vit._pos_embed(patches)
        normed: Tensor = vit.norm_pre(tokens)
        return normed
    if isinstance(vit, Beit):
        return _with_class_token(vit, patches)
    x: Tensor = vit.norm_pre(vit.patch_drop(vit._pos_embed(patches)))
    return x


def _with_class_token(vit: Any, patches: Tensor) -> Tensor:
    """Return the tokens of a BEiT, with absolute position embeddings if the model has them."""
    tokens = cat([vit.cls_token.expand(patches.shape[0], -1, -1), patches], 1)
    if vit.pos_embed is not None:
        tokens = tokens + vit.pos_embed
    dropped: Tensor = vit.pos_drop(tokens)
    return dropped


def make_block_arguments(vit: Any) -> list[Arguments]:
    """Return the keyword arguments of each block in addition to its tokens.

    The arguments do not depend on the images.
    """
    depth = len(vit.blocks)
    if isinstance(vit, Eva) and vit.rope is not None:
        rope = _rotary_embedding(vit)
        if vit.rope_mixed:
            return [{"rope": of_block} for of_block in rope]  # each block has its own embedding
        return [{"rope": rope} for _ in range(depth)]
    if isinstance(vit, Beit) and vit.rel_pos_bias is not None:
        bias = vit.rel_pos_bias()
        return [{"shared_rel_pos_bias": bias} for _ in range(depth)]
    return [{} for _ in range(depth)]


def _rotary_embedding(vit: Any) -> Tensor:
    """Return the sines and cosines of the rotary embedding of n patches, (..., n, 2 d).

    d is the width of a head. With mixed embeddings, the first axis is that of the blocks.
    """
    if vit.dynamic_img_size or not hasattr(vit.rope, "feat_shape"):
        embedding: Tensor = vit.rope.get_embed(shape=vit.patch_embed.grid_size)
    else:
        embedding = vit.rope.get_embed()
    return embedding


def find_value_layer(attn: Any) -> nn.Linear | None:
    """Return the linear layer that has the values as its last A outputs.

    None: the module has no such layer.
    """
    for name in ("qkv", "v_proj"):
        layer = getattr(attn, name, None)
        if isinstance(layer, nn.Linear):
            return layer
    return None


def get_value_weight(attn: Any) -> Tensor:
    """Return W_v, (A, D), of an attention with a `find_value_layer`."""
    if isinstance(attn.qkv, nn.Linear):
        fused: Tensor = attn.qkv.weight
        return fused.chunk(3)[2]
    weight: Tensor = attn.v_proj.weight
    return weight


def value_bias(attn: Any) -> Tensor | None:
    """Return the bias of the values, (A,), of an attention with a `find_value_layer`."""
    separate: Tensor | None = getattr(attn, "v_bias", None)
    if separate is not None:
        return separate
    layer = find_value_layer(attn)
    assert layer is not None
    bias: Tensor | None = layer.bias
    if bias is None or layer is not attn.qkv:
        return bias
    return bias.chunk(3)[2]


def call_value_layer(attn: Any) -> None:
    """Make an attention module call its `find_value_layer`, so that hooks on this layer run.

    If the biases of queries and values are separate parameters, timm would otherwise read only the
    weight of the layer. With this setting, timm calls the layer and adds the biases afterwards.
    """
    if hasattr(attn, "qkv_bias_separate"):
        attn.qkv_bias_separate = True
