"""Masked attention, gated neurons and gated channels: timm's modules with a replaced forward.

`make_maskable` changes the class of a module of a built backbone; nothing is copied. Parameters,
names, hooks and digest stay, and without a mask the forward is timm's. Axes: B images, H heads, N
tokens (prefix first), D head width, C channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import Attention, AttentionRope
from timm.models.beit import Attention as BeitAttention
from timm.models.eva import EvaAttention
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from workers.errors import UserError

LARGEST_EXPONENT = 20.0  # a masked key may exceed all kept keys; exp(20) stays finite in fp32


class MaskedSoftmax(torch.autograd.Function):
    """Psi = policy * exp(scores) / sum(policy * exp(scores)), MEAT Eq. 4 and 5.

    It is computed in the dtype of `scores` (use fp32). `policy` is 0/1, broadcastable to scores,
    with at least one kept key per row. The gradient of the policy is nonzero for masked keys too,
    unlike with masked_fill(-inf): d Psi / d policy_j = exp(a_j) / sum * (delta - Psi).
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, policy: Tensor) -> Tensor:
        top = scores.masked_fill(policy == 0, -torch.inf).amax(-1, keepdim=True)
        # unmasked keys' weights, later / sum over kept keys
        share = (scores - top).clamp_(max=LARGEST_EXPONENT).exp_()
        psi = share * policy
        total = psi.sum(-1, keepdim=True)
        share.div_(total)
        ctx.save_for_backward(share, policy)
        return psi.div_(total)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        share, policy = ctx.saved_tensors
        psi = share * policy
        pull = gradient - (gradient * psi).sum(-1, keepdim=True)
        into_policy = (share * pull).sum_to_size(policy.shape) if ctx.needs_input_grad[1] else None
        return psi.mul_(pull), into_policy


class KeyMasks:
    """Attention with maskable keys and values.

    Attributes:
        keys: None: timm's forward. Bool (1 or B, N), True = kept, for evaluation: timm's forward
            with a boolean mask. Float 0/1 (B, N), for training: the multiplicative form in fp32,
            with a gradient for the mask.
        self_loop: Every query also attends to itself (the released MEAT code; the paper has no such
            term).
    """

    keys: Tensor | None = None
    self_loop: bool = False

    def policy(self) -> Tensor:
        """Return the mask of keys, (B, 1, 1, N), or (B, 1, N, N) with the self loop."""
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
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # (B, H, N, D)
        q = self.q_norm(q)
        k = self.k_norm(k)
        scores = (q * self.scale) @ k.transpose(-2, -1)  # (B, H, N, N)
        psi = MaskedSoftmax.apply(scores.float(), self.policy()).to(v.dtype)
        mixed = (self.attn_drop(psi) @ v).transpose(1, 2)  # (B, N, H, D)
        x = self.norm(mixed.reshape(batch, tokens, self.attn_dim))
        if gate is not None:
            x = x * gate
        projected: Tensor = self.proj_drop(self.proj(x))
        return projected


class Multiplicative(TorchFunctionMode):
    """Context manager that computes attention with `MaskedSoftmax` and one policy.

    It replaces scaled dot-product attention. The rest of the forward pass, which rotates and biases
    queries and keys, stays that of the module.
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
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)  # (B, H, N, N)
        bias = options.get("attn_mask")
        if bias is not None:
            scores = scores + bias
        return MaskedSoftmax.apply(scores.float(), self.policy).to(v.dtype) @ v


class RotaryKeyMasks(KeyMasks):
    """The forward of Eva's two classes of attention with `KeyMasks`."""

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
    """timm's attention of BEiT with `KeyMasks`, in addition to its bias of relative positions."""

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


# Class of attention -> the same with `KeyMasks`.
MASKED: dict[type[nn.Module], type[nn.Module]] = {
    Attention: MaskedAttention,
    EvaAttention: MaskedEvaAttention,
    AttentionRope: MaskedRopeAttention,
    BeitAttention: MaskedBeitAttention,
}


def mask_keys(attn: Any, where: str, instead: str) -> Any:
    """Give an attention `KeyMasks`; raise `UserError` if its class is not one of timm's."""
    plain = next((kind for kind, masked in MASKED.items() if type(attn) in (kind, masked)), None)
    if plain is None:
        plain = Attention
    elif plain is not Attention:
        attn.fused_attn = True  # `Multiplicative` replaces the fused form
    return make_maskable(MASKED[plain], plain, attn, where, instead)


class GatedLinear(nn.Linear):
    """nn.Linear with gated inputs: the mask of the neurons before it.

    A frozen weight then needs no gradient, in contrast to a masked weight.

    Attributes:
        gate: 0/1 per feature.
    """

    gate: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is not None:
            x = x * self.gate.to(x.dtype)
        return super().forward(x)


class GatedConv2d(nn.Conv2d):
    """nn.Conv2d with gated input channels; `gate` is 0/1, (C,) or (B, C)."""

    gate: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is not None:
            x = x * self.gate[..., None, None].to(x.dtype)
        return super().forward(x)


@dataclass
class BlockMasks:
    """The masks of one block of a ViT; None means no mask.

    They are boolean in serving, and 0/1 floats with a gradient in training.

    Attributes:
        tokens: Mask of tokens without the prefix, (1 or B, n).
        fc1: Mask of the weight.
        fc2: Mask of the weight.
        neurons: Mask of the hidden neurons, (hidden,).
    """

    tokens: Tensor | None = None
    fc1: Tensor | None = None
    fc2: Tensor | None = None
    neurons: Tensor | None = None

    def folded(self) -> BlockMasks:
        """Return masks of weights alone for serving: neurons become columns of fc2.

        A mask that keeps everything becomes None.
        """
        fc2 = self.fc2 if self.neurons is None else self.neurons[None]
        return BlockMasks(fc1=effective_mask(self.fc1), fc2=effective_mask(fc2))


def effective_mask(mask: Tensor | None) -> Tensor | None:
    """Return the mask, or None when it keeps everything.

    Without a mask the forward is timm's own, bit for bit.
    """
    if mask is None or bool(mask.all()):
        return None
    return mask


def make_maskable(
    masked: type[Any], plain: type[nn.Module], module: Any, where: str, instead: str
) -> Any:
    """Give `module` the class `masked`, which restates the forward of `plain`.

    Args:
        masked: The new class.
        plain: The required class.
        module: The module.
        where: Name of the module in the message.
        instead: Remedy in the message.

    Raises:
        UserError: If its class is not exactly `plain`.
    """
    if type(module) not in (plain, masked):
        raise UserError(
            f"{where} of the backbone has a {type(module).__name__} where masks need a "
            f"{plain.__name__}; choose {instead}"
        )
    module.__class__ = masked
    return module
