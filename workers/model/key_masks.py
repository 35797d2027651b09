"""Attention with a multiplicative mask of keys, differentiable in the mask.

The maps of attention (B, H, N, N) are not kept for the backward pass, which computes them again.
Axes: B images, H heads, N tokens, D head width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from workers.data import torch_internals

# upper bound of the difference score - (largest score of a kept key), which is positive for some
# masked keys; exp(20) is far from overflow in fp32
LARGEST_EXPONENT = 20.0
# On a CPU, the backward pass computes the maps of as many images at once as have at most this
# number of scores per thread. Two maps (fp32) then fit in 1 MiB of cache.
TILE_SCORES = 128 * 1024


def attend(policy: Tensor, scale: float, bias: Tensor | None, *qkv: Tensor) -> Tensor:
    """Return Psi v with Psi = policy * exp(s) / sum(policy * exp(s)), MEAT Eq. 4 and 5.

    s = scale q k^T + bias. Psi is computed in fp32, or in fp64 if all inputs are fp64. Unlike with
    masked_fill(-inf), the gradient of the policy is also nonzero for masked keys: d Psi_i / d
    policy_j = exp(s_j) / sum * (delta_ij - Psi_i).

    Args:
        policy: 0/1, (1 or B, 1, 1 or N, N), with at least one kept key per row.
        scale: Factor of the scores.
        bias: Bias of the scores without a gradient, broadcastable to (B, H, N, N). None: 0.
        qkv: Queries, keys and values, (B, H, N, D) each, or a single tensor (3, B, H, N, D).

    Returns:
        The mixed values, (B, H, N, D), in the dtype of the values.

    Raises:
        ValueError: If the bias needs a gradient.
    """
    batch, heads, tokens, _ = qkv[-1].shape[-4:]
    dtype = qkv[-1].dtype
    if len(policy) != batch:
        policy = policy.expand(batch, -1, -1, -1)
    if bias is not None:
        if bias.requires_grad:
            raise ValueError("the bias of attention with a mask of keys cannot be trained")
        bias = bias.to(dtype).expand(batch, heads, tokens, tokens)
    output: Tensor = Attend.apply(policy, scale, bias, *(part.to(dtype) for part in qkv))
    return output


class Attend(torch.autograd.Function):
    """`attend` with one policy per image. The gradients are not differentiable."""

    @staticmethod
    def forward(
        ctx: Any, policy: Tensor, scale: float, bias: Tensor | None, *qkv: Tensor
    ) -> Tensor:
        ctx.scale, ctx.images = scale, _count_images(qkv[-1])
        if ctx.images > 1:
            qkv = tuple(part.contiguous() for part in qkv)
        q, k, v = _unpack(qkv)
        log_policy = policy.log()  # 0 or -inf
        mask = log_policy if bias is None else log_policy + bias
        mask = mask.to(q.dtype)
        if _is_fused_on_cpu(q):
            output, log_total = torch_internals.attend_on_cpu(q, k, v, mask, scale)
        else:
            output, log_total = F.scaled_dot_product_attention(q, k, v, mask, scale=scale), None
        ctx.save_for_backward(policy, log_policy, bias, output, log_total, *qkv)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        policy, log_policy, bias, output, log_total, *qkv = ctx.saved_tensors
        _, heads, tokens, _ = gradient.shape
        is_qkv_trained = any(ctx.needs_input_grad[3:])
        into_policy = policy.new_empty(policy.shape)
        into_qkv = [torch.empty_like(part) for part in qkv]
        shared = (1, 2) if policy.shape[2] == 1 else (1,)  # axes of a policy: heads, queries
        # sum_j Psi_ij dPsi_ij, with the gradient dPsi of the attention weights Psi
        mean = (gradient * output).sum(-1, keepdim=True, dtype=policy.dtype)
        start = bias
        if log_total is not None:
            start = -log_total if bias is None else bias - log_total
        by_image = policy, log_policy, mean, into_policy
        by_map = gradient, *_unpack(qkv), *_unpack(into_qkv), *([] if start is None else [start])
        for images, maps in _list_tiles(ctx.images, by_image, by_map):
            keep, log_keep, mean_t, dp = images
            g, q, k, v, dq, dk, dv, *start_t = maps
            scores = _multiply(q, k, ctx.scale, policy.dtype, *start_t)
            weights = scores.unflatten(0, (-1, heads))  # (b, H, N, N)
            if log_total is None:
                top = (weights + log_keep).amax(-1, keepdim=True)  # largest score of a kept key
                weights.sub_(top).clamp_(max=LARGEST_EXPONENT).exp_()
                weights.div_((weights * keep).sum(-1, keepdim=True))
            else:
                # Here weights = score - log_total. The largest one of a kept key is >= -log N.
                if float(weights.max()) > LARGEST_EXPONENT - math.log(tokens):
                    top = (weights + log_keep).amax(-1, keepdim=True)
                    weights.clamp_(max=top + LARGEST_EXPONENT)
                weights.exp_()
            # Psi = weights * keep; pull (b, H, N, N) is the policy's gradient before summation
            pull = _multiply(g, v, 1.0, policy.dtype).unflatten(0, (-1, heads))
            pull.sub_(mean_t).mul_(weights)
            torch.sum(pull, shared, keepdim=True, out=dp)
            if is_qkv_trained:
                psi = _mask(weights, keep, g.dtype).flatten(0, 1)
                pull = _mask(pull, keep, g.dtype).flatten(0, 1)
                dv.baddbmm_(psi.transpose(1, 2), g, beta=0)
                dq.baddbmm_(pull, k, beta=0, alpha=ctx.scale)
                dk.baddbmm_(pull.transpose(1, 2), q, beta=0, alpha=ctx.scale)
        return into_policy, None, None, *(into_qkv if is_qkv_trained else [None] * len(qkv))


def _is_fused_on_cpu(tensor: Tensor) -> bool:
    """Return whether to use the CPU's fused attention; `sdpa_kernel` can disable it."""
    if tensor.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return bool(torch.backends.cuda.flash_sdp_enabled())  # the flag also applies to CPUs


def _count_images(qkv: Tensor) -> int:
    """Return the number of images that the backward pass processes at once (a tile)."""
    batch, heads, tokens, _ = qkv.shape[-4:]
    if not _is_fused_on_cpu(qkv):
        return batch
    most = TILE_SCORES * torch.get_num_threads() // (heads * tokens**2)
    return min(batch, max(1, most))


def _unpack(qkv: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values, (B, H, N, D) each."""
    q, k, v = qkv if len(qkv) == 3 else qkv[0].unbind(0)
    return q, k, v


def _list_tiles(
    images: int, by_image: Sequence[Tensor], by_map: Sequence[Tensor]
) -> Iterable[tuple[Sequence[Tensor], Sequence[Tensor]]]:
    """Split tensors into tiles of b images.

    Args:
        images: The number b; the last tile can have fewer images.
        by_image: Tensors (B, ...).
        by_map: Tensors (B, H, ...), contiguous unless b = 1.

    Returns:
        For each tile, tensors (b, ...) and (b H, ...).
    """
    batch, heads = by_map[0].shape[:2]
    if images == 1:
        maps = [part.unbind(0) for part in by_map]
    else:
        flat = [part.flatten(0, 1) for part in by_map]
        if images == batch:
            return [(by_image, flat)]
        maps = [torch.split(part, images * heads) for part in flat]
    split = [torch.split(part, images) for part in by_image]
    return zip(zip(*split, strict=True), zip(*maps, strict=True), strict=True)


def _multiply(
    left: Tensor, right: Tensor, scale: float, dtype: torch.dtype, start: Tensor | None = None
) -> Tensor:
    """Return start + scale * left right^T, (t, N, D) x (t, N, D) -> (t, N, N), in `dtype`."""
    right = right.transpose(1, 2)
    if start is None:
        product = torch.bmm(left, right).to(dtype)
        return product if scale == 1 else product.mul_(scale)
    if left.dtype == dtype:
        return torch.baddbmm(start, left, right, alpha=scale)
    return torch.add(start, torch.bmm(left, right), alpha=scale)


def _mask(values: Tensor, keep: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values * keep in `dtype`; in place if `values` already has it."""
    out = values if values.dtype == dtype else torch.empty_like(values, dtype=dtype)
    return torch.mul(values, keep, out=out)
