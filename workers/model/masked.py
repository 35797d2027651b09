"""Masked linear and masked attention: timm's own modules, given another forward from outside; nothing is copied.

`mask_sites` changes the class of the attention and FFN modules of a built ViT. Parameters, names, hooks and digest stay
as they are, and with no mask set the forward is timm's.
Axes: B images, H heads, N tokens (prefix first), D head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from timm.layers import Attention
from torch import Tensor, nn
from torch.nn import functional as F

from workers.errors import UserError

LARGEST_EXPONENT = 20.0  # a masked key may exceed all kept keys; exp(20) stays finite in fp32


class MaskedSoftmax(torch.autograd.Function):
    """Psi = policy * exp(scores) / sum(policy * exp(scores)), MEAT Eq. 4 and 5, in the dtype of `scores` (use fp32).

    policy: 0/1, broadcastable to scores, with at least one kept key per row. The gradient of the policy is nonzero for
    masked keys too, which masked_fill(-inf) would not give: d Psi / d policy_j = exp(a_j) / sum * (delta - Psi).
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, policy: Tensor) -> Tensor:
        top = scores.masked_fill(policy == 0, -torch.inf).amax(-1, keepdim=True)
        share = (scores - top).clamp_(max=LARGEST_EXPONENT).exp_()  # unmasked keys' weights, later / sum over kept keys
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


class MaskedAttention(Attention):
    """timm's Attention whose keys and values can be masked.

    keys: None (timm's forward); bool (1 or B, N), True = kept, for evaluation: timm's forward with a boolean mask; or
    float 0/1 (B, N) for training: the multiplicative form, in fp32, with a gradient for the mask.
    self_loop: every query also sees itself (the released MEAT code; the paper has no such term).
    """

    keys: Tensor | None = None
    self_loop: bool = False

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        if self.keys is None:
            return super().forward(x, attn_mask=attn_mask, is_causal=is_causal)
        if self.keys.dtype == torch.bool:
            return super().forward(x, attn_mask=self._policy())
        batch, tokens, _ = x.shape
        gate = self.gate(x).sigmoid() if self.gate is not None else None
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)  # (B, H, N, D)
        scores = (q * self.scale) @ k.transpose(-2, -1)
        psi = MaskedSoftmax.apply(scores.float(), self._policy()).to(v.dtype)
        x = self.norm((self.attn_drop(psi) @ v).transpose(1, 2).reshape(batch, tokens, self.attn_dim))
        return self.proj_drop(self.proj(x if gate is None else x * gate))

    def _policy(self) -> Tensor:
        """(B, 1, 1, N), or (B, 1, N, N) with the self loop."""
        assert self.keys is not None
        policy = self.keys[:, None, None, :]
        if not self.self_loop:
            return policy
        itself = torch.eye(policy.shape[-1], dtype=policy.dtype, device=policy.device)
        return policy | itself if policy.dtype == torch.bool else policy + (1 - policy) * itself


class MaskedLinear(nn.Linear):
    """nn.Linear that can use another weight of its shape (`effective`) and gate its inputs (`gate`, 0/1 per feature).

    The bias is never masked.
    """

    effective: Tensor | None = None
    gate: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.gate is None else x * self.gate.to(x.dtype)
        return F.linear(x, self.weight if self.effective is None else self.effective, self.bias)


@dataclass
class BlockMasks:
    """The masks of one block. None = nothing masked.

    tokens: (1 or B, n) without the prefix tokens. fc1, fc2: weight-shaped. neurons: (hidden,). Boolean when serving,
    0/1 floats with a gradient when training.
    """

    tokens: Tensor | None = None
    fc1: Tensor | None = None
    fc2: Tensor | None = None
    neurons: Tensor | None = None


@dataclass
class Sites:
    """The maskable modules of a ViT, in order of block."""

    prefix: int
    attention: list[MaskedAttention] = field(default_factory=list)
    fc1: list[MaskedLinear] = field(default_factory=list)
    fc2: list[MaskedLinear] = field(default_factory=list)

    @contextmanager
    def sampled(self, masks: list[BlockMasks]) -> Iterator[None]:
        """Training: the forward inside uses these sampled masks and can be differentiated with respect to them."""
        try:
            for attention, fc1, fc2, mask in zip(self.attention, self.fc1, self.fc2, masks, strict=True):
                attention.keys = None if mask.tokens is None else self._with_prefix(mask.tokens)
                fc1.effective = None if mask.fc1 is None else fc1.weight * mask.fc1
                fc2.effective = None if mask.fc2 is None else fc2.weight * mask.fc2
                fc2.gate = mask.neurons  # on the activations: needs no gradient of shape (out, hidden)
            yield
        finally:
            self.clear()

    @torch.no_grad()
    def fold(self, masks: list[BlockMasks]) -> None:
        """Serving: masked weights are multiplied once; whatever masks nothing takes timm's plain path, bit for bit."""
        self.clear()
        for attention, fc1, fc2, mask in zip(self.attention, self.fc1, self.fc2, masks, strict=True):
            if mask.tokens is not None and not bool(mask.tokens.all()):
                attention.keys = self._with_prefix(mask.tokens.to(attention.qkv.weight.device))
            columns = mask.fc2 if mask.neurons is None else mask.neurons
            fc1.effective, fc2.effective = _folded(fc1.weight, mask.fc1), _folded(fc2.weight, columns)

    def clear(self) -> None:
        for attention in self.attention:
            attention.keys = None
        for linear in self.fc1 + self.fc2:
            linear.effective = linear.gate = None

    def _with_prefix(self, tokens: Tensor) -> Tensor:
        """(b, n) -> (b, prefix + n): class and register tokens are always kept."""
        return torch.cat([tokens.new_ones((tokens.shape[0], self.prefix)), tokens], dim=1)


def _folded(weight: Tensor, mask: Tensor | None) -> Tensor | None:
    return None if mask is None or bool(mask.all()) else weight.detach() * mask.to(weight.device)


def mask_sites(vit: Any, self_loop: bool = False) -> Sites:
    """Makes the attention and FFN modules of all blocks maskable, in place. Raises UserError on other blocks."""
    sites = Sites(prefix=vit.num_prefix_tokens)
    for index, block in enumerate(vit.blocks):
        mlp = getattr(block, "mlp", None)
        attention = _become(MaskedAttention, Attention, getattr(block, "attn", None), index)
        attention.self_loop = self_loop
        sites.attention.append(attention)
        sites.fc1.append(_become(MaskedLinear, nn.Linear, getattr(mlp, "fc1", None), index))
        sites.fc2.append(_become(MaskedLinear, nn.Linear, getattr(mlp, "fc2", None), index))
    return sites


def _become(masked: type[Any], plain: type[nn.Module], module: Any, index: int) -> Any:
    """Gives `module` the class `masked`; only where it is exactly `plain`, whose forward `masked` restates."""
    if type(module) not in (plain, masked):
        raise UserError(f"block {index} of the backbone has a {type(module).__name__} where masks need a "
                        f"{plain.__name__}; choose a plain ViT such as vit_tiny_patch16_224 or deit_small_patch16_224")
    module.__class__ = masked
    return module
