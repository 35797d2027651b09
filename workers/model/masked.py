"""Masked attention, gated neurons and gated channels: timm's modules with another `forward`.

`make_maskable` changes the class of a module of an existing backbone; no tensor is copied. The
parameters, their names, the hooks and the digest of the backbone stay the same. Without a mask, the
forward pass is that of timm.

MEAT is Xue, Zhang, Song, Song: Meta-attention for ViT-backed Continual Learning, CVPR 2022. Axes:
B images, H heads, N tokens (prefix tokens first), D head width, C channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import Attention, AttentionRope
from timm.models.beit import Attention as BeitAttention
from timm.models.eva import EvaAttention
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from workers.errors import UserError
from workers.model.key_masks import attend


class KeyMasks:
    """Attention with maskable keys and values.

    Attributes:
        keys: Mask of the tokens as keys. None: timm's forward pass. Bool (1 or B, N), True = kept,
            for evaluation: timm's forward pass with an attention mask. Float 0/1 (B, N), for
            training: `attend`, with a gradient for the mask and without attention dropout.
        self_loop: Every token attends to itself even if it is masked, as in the released MEAT code.
            The paper has no such term.
    """

    keys: Tensor | None = None
    self_loop: bool = False

    def policy(self) -> Tensor:
        """Return the mask of keys, (B, 1, 1, N), or (B, 1, N, N) if `self_loop`."""
        assert self.keys is not None
        policy = self.keys[:, None, None, :]
        if not self.self_loop:
            return policy
        itself = torch.eye(policy.shape[-1], dtype=policy.dtype, device=policy.device)
        if policy.dtype == torch.bool:
            return policy | itself
        return policy + (1 - policy) * itself


class MaskedAttention(KeyMasks, Attention):
    """timm's Attention of a VisionTransformer with `KeyMasks`."""

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        if self.keys is None:
            return super().forward(x, attn_mask=attn_mask, is_causal=is_causal)
        if self.keys.dtype == torch.bool:
            return super().forward(x, attn_mask=self.policy())
        batch, tokens, _ = x.shape
        gate = self.gate(x).sigmoid() if self.gate is not None else None
        split = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, self.head_dim)
        qkv = split.permute(2, 0, 3, 1, 4)  # (3, B, H, N, D)
        q, k, v = qkv.unbind(0)
        normed_q, normed_k = self.q_norm(q), self.k_norm(k)
        is_normed = normed_q is not q or normed_k is not k
        parts = (normed_q, normed_k, v) if is_normed else (qkv,)
        mixed = attend(self.policy(), self.scale, None, *parts).transpose(1, 2)  # (B, N, H, D)
        x = self.norm(mixed.reshape(batch, tokens, self.attn_dim))
        if gate is not None:
            x = x * gate
        projected: Tensor = self.proj_drop(self.proj(x))
        return projected


class Multiplicative(TorchFunctionMode):
    """Context manager that computes scaled dot-product attention with `attend`.

    All other operations stay those of the module, such as rotary embeddings and position biases.

    Args:
        policy: Mask of keys, as in `KeyMasks.policy`.
    """

    def __init__(self, policy: Tensor):
        super().__init__()
        self.policy = policy

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **options)
        q, k, v = args  # (B, H, N, D) each
        return attend(self.policy, q.shape[-1] ** -0.5, options.get("attn_mask"), q, k, v)


class RotaryKeyMasks(KeyMasks):
    """Forward pass with `KeyMasks` for the two attention classes that timm's Eva models use."""

    def forward(
        self,
        x: Tensor,
        rope: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        plain: Any = super().forward  # type: ignore[misc]
        output: Tensor
        if self.keys is None:
            output = plain(x, rope=rope, attn_mask=attn_mask, is_causal=is_causal)
        elif self.keys.dtype == torch.bool:
            output = plain(x, rope=rope, attn_mask=self.policy())
        else:
            with Multiplicative(self.policy()):
                output = plain(x, rope=rope)
        return output


class MaskedEvaAttention(RotaryKeyMasks, EvaAttention):
    """timm's EvaAttention with `KeyMasks`."""


class MaskedRopeAttention(RotaryKeyMasks, AttentionRope):
    """timm's AttentionRope with `KeyMasks`."""


class MaskedBeitAttention(KeyMasks, BeitAttention):
    """timm's attention of BEiT with `KeyMasks`. The bias of relative positions is kept."""

    def forward(self, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        output: Tensor
        if self.keys is None:
            output = super().forward(x, shared_rel_pos_bias)
        elif self.keys.dtype == torch.bool:
            policy = self.policy()
            bias = torch.zeros(policy.shape, dtype=x.dtype, device=x.device)
            bias = bias.masked_fill(~policy, -torch.inf)
            if shared_rel_pos_bias is not None:
                bias = bias + shared_rel_pos_bias
            output = super().forward(x, bias)
        else:
            with Multiplicative(self.policy()):
                output = super().forward(x, shared_rel_pos_bias)
        return output


# class of attention -> its subclass with `KeyMasks`
MASKED: dict[type[nn.Module], type[nn.Module]] = {
    Attention: MaskedAttention,
    EvaAttention: MaskedEvaAttention,
    AttentionRope: MaskedRopeAttention,
    BeitAttention: MaskedBeitAttention,
}


def mask_keys(attn: Any, where: str, instead: str) -> Any:
    """Change the class of an attention module to its subclass with `KeyMasks`; return the module.

    Args:
        attn: The module.
        where: Name of the module in the error message.
        instead: Replacement for the backbone that the error message suggests.

    Raises:
        UserError: If `MASKED` does not contain the class of the module.
    """
    plain = next((kind for kind, masked in MASKED.items() if type(attn) in (kind, masked)), None)
    if plain is None:
        plain = Attention  # `make_maskable` raises the error
    elif plain is not Attention:
        attn.fused_attn = True  # the module must call the function that `Multiplicative` replaces
    return make_maskable(MASKED[plain], plain, attn, where, instead)


class GatedLinear(nn.Linear):
    """nn.Linear with gated inputs, which masks the neurons before the layer.

    Training a gate does not compute the gradient of the frozen weight. A mask on the columns of the
    weight would be equivalent, but would need the gradient of the whole masked weight.

    Attributes:
        gate: 0/1 per input feature. None: no gate.
    """

    gate: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return super().forward(x)
        gate = self.gate.to(x.dtype)
        if self.weight.requires_grad:
            return super().forward(x * gate)
        output: Tensor = GatedProduct.apply(x, gate, self.weight, self.bias)
        return output


class GatedProduct(torch.autograd.Function):
    """`F.linear(x * gate, weight, bias)` with a 0/1 gate and a frozen layer.

    The result is bitwise equal to that of the composed operations. The forward pass masks the
    weight instead of the inputs, because the weight is smaller.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, gate, weight)
        return F.linear(x, weight * gate, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, gate, weight = ctx.saved_tensors
        into_gated = gradient @ weight.to(gradient.dtype)
        into_gate = (x * into_gated).sum_to_size(gate.shape)
        return into_gated.mul_(gate), into_gate, None, None


class GatedConv2d(nn.Conv2d):
    """nn.Conv2d with gated input channels.

    Attributes:
        gate: 0/1 per input channel, (C,) or (B, C). None: no gate.
    """

    gate: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is not None:
            x = x * self.gate[..., None, None].to(x.dtype)
        return super().forward(x)


@dataclass
class BlockMasks:
    """The masks of one block of a ViT; None means no mask.

    Masks are boolean in serving, and 0/1 floats with a gradient in training.

    Attributes:
        tokens: Mask of the patch tokens, (1 or B, n).
        fc1: Mask of the weight of the FFN's first layer.
        fc2: Mask of the weight of the FFN's second layer.
        neurons: Mask of the FFN's hidden neurons, (hidden,).
    """

    tokens: Tensor | None = None
    fc1: Tensor | None = None
    fc2: Tensor | None = None
    neurons: Tensor | None = None

    def folded(self) -> BlockMasks:
        """Return the masks of weights, for serving: masked neurons become masked columns of fc2.

        The mask of tokens is left out. A mask that keeps everything becomes None.
        """
        fc2 = self.fc2 if self.neurons is None else self.neurons[None]
        return BlockMasks(fc1=effective_mask(self.fc1), fc2=effective_mask(fc2))


def effective_mask(mask: Tensor | None) -> Tensor | None:
    """Return the mask, or None if it keeps everything.

    Without a mask, the outputs are bit for bit those of timm's forward pass.
    """
    if mask is None or bool(mask.all()):
        return None
    return mask


def make_maskable(
    masked: type[Any], plain: type[nn.Module], module: Any, where: str, instead: str
) -> Any:
    """Change the class of a module from `plain` to `masked` in place; return the module.

    Args:
        masked: The new class. Its `forward` reimplements that of `plain`.
        plain: The required class.
        module: The module.
        where: Name of the module in the error message.
        instead: Replacement for the backbone that the error message suggests.

    Raises:
        UserError: If the class of the module is neither `plain` nor `masked`. A subclass of `plain`
            is not accepted, because it may have another `forward`.
    """
    if type(module) not in (plain, masked):
        raise UserError(
            f"{where} of the backbone has a {type(module).__name__} where masks need a "
            f"{plain.__name__}; choose {instead}"
        )
    module.__class__ = masked
    return module
