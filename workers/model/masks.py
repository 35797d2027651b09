"""Mask parametrisations: a trainable tensor that becomes a hard mask, differentiable by straight-through.

Every parametrisation has `logits` (the trained tensor, fp32), `sample(uniform)` (a 0/1 float mask with a gradient, for
training) and `hard()` (the boolean mask that is stored and served).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class GumbelHard(nn.Module):
    """Hard two-class Gumbel-softmax (MEAT, Eq. 6, 7) with one logit u = t1 - t2 per entry instead of the pair (t1, t2).

    The difference of two Gumbel draws is logistic, so m = 1[u + logistic > 0] has the law of the pair, and
    sigmoid((u + logistic) / tau) is the pair's first softmax output: same mask, same gradient on t1, half the numbers.
    u starts at 2 gamma (the pair at +gamma, -gamma). Under Adam, u moves by lr per step where t1 - t2 moves by 2 lr, so
    the rate on u must be twice the rate on the pair.
    """

    def __init__(self, shape: tuple[int, ...], gamma: float, tau: float, device: torch.device | None = None):
        super().__init__()
        self.logits = nn.Parameter(torch.full(shape, 2.0 * gamma, dtype=torch.float32, device=device))
        self.tau = tau

    def sample(self, uniform: Tensor) -> Tensor:
        """uniform: [0, 1) numbers of shape (..., *shape) -> 0/1 float mask of the same shape (straight-through)."""
        return HardSample.apply(self.logits, uniform, self.tau)

    @torch.no_grad()
    def hard(self) -> Tensor:
        """Boolean mask, no noise; a tie is masked (Eq. 7)."""
        return self.logits > 0


class HardSample(torch.autograd.Function):
    """m = 1[u + logit(U) > 0]; backward passes the gradient of sigmoid((u + logit(U)) / tau)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, uniform: Tensor, tau: float) -> Tensor:
        noisy = torch.logit(uniform.float()).add_(logits)
        mask = (noisy > 0).to(logits.dtype)
        soft = noisy.div_(tau).sigmoid_()
        ctx.save_for_backward(soft)
        ctx.tau, ctx.shape = tau, logits.shape
        return mask

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (soft,) = ctx.saved_tensors
        slope = torch.addcmul(soft, soft, soft, value=-1).mul_(gradient).div_(ctx.tau)  # s (1 - s) g / tau
        return slope.sum_to_size(ctx.shape), None, None
