"""Mask parametrisations: modules that compute masks from trained scores, logits or embeddings.

Each `nn.Module` has a trained tensor (fp32), a method `sample(...)` that returns the mask as floats
with a gradient, for training, and a method `hard()` that returns the mask without a gradient, for
storage and serving. The gradient is a straight-through gradient, except in `AnnealedSigmoid`.

`GumbelHard` belongs to MEAT, `Threshold` to Piggyback and SupSup, `SoftBinary` to KSM, `TopK` to
SupSup and WSN, `AnnealedSigmoid` to HAT. Equation numbers are those of the papers, which the module
of each method cites (workers/methods/).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from workers.data import torch_internals


class GumbelHard(nn.Module):
    """Hard two-class Gumbel-softmax (MEAT, Eq. 6, 7) with one logit u = t1 - t2 per entry.

    MEAT trains a pair of logits (t1, t2). The difference of two Gumbel draws is logistic, so m =
    1[u + logistic > 0] has the same distribution as the mask of the pair, and sigmoid((u +
    logistic) / tau) is the pair's first softmax output. The gradient on u equals that on t1, with
    half as many parameters. u starts at 2 gamma, because the pair starts at (+gamma, -gamma).
    Under Adam, u moves by lr per step while t1 - t2 moves by 2 lr. Therefore the learning rate of u
    must be twice that of the pair.

    Args:
        shape: Shape of the mask.
        gamma: Initial value of t1 and of -t2.
        tau: Temperature.
        device: Device of the logits.
    """

    def __init__(
        self, shape: tuple[int, ...], gamma: float, tau: float, device: torch.device | None = None
    ):
        super().__init__()
        self.logits = nn.Parameter(
            torch.full(shape, 2.0 * gamma, dtype=torch.float32, device=device)
        )
        self.tau = tau

    def sample(self, uniform: Tensor) -> Tensor:
        """Sample a 0/1 float mask with a straight-through gradient.

        Args:
            uniform: Random numbers from U[0, 1) of shape (..., *shape), which is also the shape of
                the returned mask.
        """
        mask: Tensor = HardSample.apply(self.logits, torch.logit(uniform.float()), self.tau)
        return mask

    @torch.no_grad()
    def hard(self) -> Tensor:
        """Return the boolean mask without noise; an entry with u = 0 is off (Eq. 7)."""
        return self.logits > 0


class HardSample(torch.autograd.Function):
    """m = 1[u + logit(U) > 0], with the gradient of sigmoid((u + logit(U)) / tau).

    `noise` is the logistic noise logit(U), with U uniform in [0, 1).
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, noise: Tensor, tau: float) -> Tensor:
        noisy = noise + logits
        # `out` makes the comparison write floats, so that no booleans are converted.
        mask = torch.gt(noisy, 0, out=torch.empty_like(noisy))
        soft = (noisy if tau == 1 else noisy.div_(tau)).sigmoid_()
        ctx.save_for_backward(soft)
        ctx.tau, ctx.shape, ctx.dtype = tau, logits.shape, logits.dtype
        return mask

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (soft,) = ctx.saved_tensors
        # soft (1 - soft) gradient / tau
        slope = torch.addcmul(soft, soft, soft, value=-1)
        is_same = slope.dtype == ctx.dtype
        into = slope if is_same else slope.new_empty(slope.shape, dtype=ctx.dtype)
        slope = torch.mul(slope, gradient, out=into)
        if ctx.tau != 1:
            slope.div_(ctx.tau)
        return slope.sum_to_size(ctx.shape), None, None


class StraightThrough(torch.autograd.Function):
    """Return `hard` in the forward pass; the gradient of the result is passed on to `scores`.

    The result is the tensor `hard` itself and not a copy, so in-place operations on the result
    change `hard`.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, hard: Tensor) -> Tensor:
        ctx.mark_dirty(hard)
        return hard

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Threshold(nn.Module):
    """M = 1[scores > theta] (Piggyback), or 1[scores >= theta] (SupSup with `scores: threshold`).

    Args:
        start: Initial scores.
        theta: The threshold.
        ternary: The mask is -1 for scores below 0, 1 for scores above theta, and 0 otherwise.
        inclusive: Compare with >=.
    """

    def __init__(self, start: Tensor, theta: float, ternary: bool = False, inclusive: bool = False):
        super().__init__()
        self.scores = nn.Parameter(start.detach().clone().float())
        self.theta, self.ternary, self.inclusive = theta, ternary, inclusive

    def sample(self) -> Tensor:
        """Return the mask as floats, with a straight-through gradient."""
        mask: Tensor = StraightThrough.apply(self.scores, self._floats())
        return mask

    @torch.no_grad()
    def hard(self) -> Tensor:
        """Return the mask as booleans, or as int8 (-1, 0, 1) if it is ternary."""
        return self._floats().to(torch.int8 if self.ternary else torch.bool)

    @torch.no_grad()
    def _floats(self) -> Tensor:
        """Return the mask as floats.

        `out` makes the comparison write floats, which is several times faster than converting
        booleans.
        """
        compare = torch.ge if self.inclusive else torch.gt
        mask = compare(self.scores, self.theta, out=torch.empty_like(self.scores))
        return (
            mask.sub_(torch.lt(self.scores, 0, out=torch.empty_like(self.scores)))
            if self.ternary
            else mask
        )


class SoftBinary(nn.Module):
    """M = b + 0.5 a (KSM) with b = 1[scores >= theta].

    An entry is on if b = 1, and then a = 0. For an entry that is off, a is its score, scaled to
    [0, 1] by the minimum and maximum over the whole tensor. In this minimum and maximum, entries
    that are on count as 0. An off entry with a score of exactly 0 has a = 0. The gradient of b is
    that of sigmoid(beta (scores - theta) / temperature); a has no gradient.

    Args:
        start: Initial scores.
        theta: The threshold.
        beta: Steepness of the sigmoid for the gradient.
        temperature: Divisor of `beta`.
        soft: If false, the mask is b.
    """

    def __init__(
        self,
        start: Tensor,
        theta: float,
        beta: float = 1200.0,
        temperature: float = 100.0,
        soft: bool = True,
    ):
        super().__init__()
        self.scores = nn.Parameter(start.detach().clone().float())
        self.theta, self.steepness, self.soft = theta, beta / temperature, soft

    def sample(self) -> Tensor:
        """Return the mask as floats, with a straight-through gradient."""
        return self.sample_scores(self.scores)

    def sample_scores(self, scores: Tensor, is_stack: bool = False) -> Tensor:
        """Return the mask of these scores, or the masks of a stack of scores (masks, ...)."""
        probabilities = torch.sigmoid((scores - self.theta) * self.steepness)
        mask: Tensor = StraightThrough.apply(probabilities, self._floats(scores, is_stack))
        return mask

    @torch.no_grad()
    def hard(self) -> Tensor:
        """Return the mask: floats (1, or a value in [0, 0.5]) if `soft`, otherwise booleans."""
        mask = self._floats(self.scores)
        return mask if self.soft else mask.bool()

    @torch.no_grad()
    def _floats(self, scores: Tensor, is_stack: bool = False) -> Tensor:
        on = torch.ge(scores, self.theta, out=torch.empty_like(scores))
        if not self.soft:
            return on
        off = torch.addcmul(scores, scores, on, value=-1)  # 0 for entries that are on
        if is_stack:
            low, high = off.flatten(1).aminmax(dim=1)
            low, high = (t.view(-1, *[1] * (off.ndim - 1)) for t in (low, high))
        else:
            low, high = off.aminmax()
        # high - low is 0 if all entries are on, or if all are off and equal
        width = (high - low).clamp_(min=torch.finfo(off.dtype).tiny)
        scaled = torch.ne(off, 0, out=torch.empty_like(off))
        off.addcmul_(scaled, low, value=-1)
        return on.addcdiv_(off, width, value=0.5)


def sample_together(masks: Sequence[SoftBinary]) -> list[Tensor]:
    """Return `sample()` of each mask. All masks must have the same settings.

    Masks of the same shape are computed together; their results are views of a common tensor.
    """
    by_shape: dict[torch.Size, list[int]] = {}
    for index, mask in enumerate(masks):
        by_shape.setdefault(mask.scores.shape, []).append(index)
    samples: dict[int, Tensor] = {}
    for indices in by_shape.values():
        scores = torch.stack([masks[index].scores for index in indices])
        samples |= zip(indices, masks[0].sample_scores(scores, is_stack=True).unbind(), strict=True)
    return [samples[index] for index in range(len(masks))]


class TopK(nn.Module):
    """M = 1 for the share `density` of entries with the largest |score| (edge-popup).

    Exactly n - int((1 - density) n) of the n entries are 1. Among entries with equal |score|, the
    first entries are 1. The gradient of M is passed unchanged to |score|, so its sign is reversed
    for negative scores.
    """

    def __init__(self, start: Tensor, density: float):
        super().__init__()
        self.scores = nn.Parameter(start.detach().clone().float())
        self.density = density

    def sample(self) -> Tensor:
        """Return the mask as floats, with a straight-through gradient."""
        size = self.scores.abs()
        mask: Tensor = StraightThrough.apply(size, self._floats(size))
        return mask

    @torch.no_grad()
    def hard(self) -> Tensor:
        """Return the boolean mask."""
        return self._floats(self.scores.abs()).bool()

    @torch.no_grad()
    def _floats(self, size: Tensor) -> Tensor:
        """Return the mask of |scores| as floats."""
        count = size.numel()
        dropped = int((1 - self.density) * count)
        if dropped == 0:
            return torch.ones_like(size)
        if dropped == count:
            return torch.zeros_like(size)
        mask = torch.empty_like(size)
        flat = size.detach().flatten()
        if not _reads_on_host(flat):
            return mask.copy_(keep_largest(flat, dropped).view_as(size))
        parts = np.partition(flat.numpy(), dropped - 1)
        cut = parts[dropped - 1]
        torch.gt(size, float(cut), out=mask)
        missing = np.count_nonzero(parts[dropped:] == cut)  # entries equal to `cut` that are kept
        if missing:
            mask.view(-1)[(flat == float(cut)).nonzero()[:missing, 0]] = 1.0
        return mask


def _reads_on_host(size: Tensor) -> bool:
    """Return whether to use NumPy's partition, which is 20 times as fast as `kthvalue` on a CPU."""
    return size.device.type == "cpu" and not torch_internals.has_no_values(size)


def keep_largest(size: Tensor, dropped: int) -> Tensor:
    """Return a bool mask (n,) of all but the `dropped` smallest entries of `size` (n,).

    `dropped` is at least 1. Among equal entries the first entries are kept. The host does not wait
    for the device.
    """
    cut = size.kthvalue(dropped).values
    larger, equal = size > cut, size == cut
    missing = size.numel() - dropped - larger.sum()  # number of entries equal to `cut` to keep
    return larger | (equal & (equal.cumsum(0) <= missing))


Start = Literal["normal", "dense", "sparse", "uniform"]


class AnnealedSigmoid(nn.Module):
    """a = sigmoid(s e) of an embedding e (HAT, Eq. 1).

    The mask is soft at a small scale s, and close to the step 1[e > 0] at a large scale. See
    `compute_annealed_scale` for s. Because of HAT's gradient compensation (Sec. 2.5), the gradient
    of e is s_max sigmoid(e) sigmoid(-e) times the gradient of a, for any s; it is 0 if |s e| > 50.

    With compensation `official`, the gradient is computed in two steps as in the released code.
    If s e > 17, the sigmoid is exactly 1 in fp32 and the gradient is 0. Therefore a unit that is on
    cannot be switched off late in an epoch, when s is large. A unit that is off has a gradient as
    long as s e > -88.

    Args:
        start: Initial embedding e, one number per unit.
        s_max: Largest scale.
        compensation: `exact` or `official`.
    """

    limit = 6.0  # maximum of |e| after a step of the optimizer
    # bound on |s e|: beyond it the gradient is 0; `official`: the cosh argument is clamped to it
    largest_exponent = 50.0

    def __init__(
        self, start: Tensor, s_max: float, compensation: Literal["exact", "official"] = "exact"
    ):
        super().__init__()
        self.embedding = nn.Parameter(start.detach().clone().float())
        self.s_max, self.official = s_max, compensation == "official"

    def sample(self, scale: float | Tensor) -> Tensor:
        """Return the mask at scale s, in [1e-12, 1], with the compensated gradient.

        Args:
            scale: The scale, a number or a tensor ().
        """
        mask: Tensor = AnnealedGate.apply(
            self.embedding, scale, self.s_max, self.largest_exponent, self.official
        )
        return mask

    @torch.no_grad()
    def hard(self) -> Tensor:
        """Return the boolean mask; a unit with e = 0 is off."""
        return self.embedding > 0

    @torch.no_grad()
    def slope(self, scale: float | Tensor) -> Tensor:
        """Return the compensated d mask / d embedding at a scale.

        The gradient of the embedding is the gradient of the mask, multiplied by this factor.
        """
        return compute_compensated_slope(
            self.embedding, scale, self.s_max, self.largest_exponent, self.official
        )

    @torch.no_grad()
    def clamp(self) -> None:
        """Clamp e to [-6, 6]. Call it after each optimizer step.

        The gradient of e has the factor sigmoid(e) sigmoid(-e), which goes to 0 for large |e|.
        """
        self.embedding.clamp_(-self.limit, self.limit)


# smallest value of a soft mask: products of several smaller values can be subnormal numbers, which
# make CPU operations several times slower
MIN_MASK_VALUE = 1e-12


class AnnealedGate(torch.autograd.Function):
    """sigmoid(s e), with the gradient of `AnnealedSigmoid`."""

    @staticmethod
    def forward(
        ctx: Any,
        embedding: Tensor,
        scale: float | Tensor,
        s_max: float,
        bound: float,
        official: bool,
    ) -> Tensor:
        ctx.save_for_backward(embedding)
        ctx.how = scale, s_max, bound, official
        return torch.sigmoid(scale * embedding).clamp(min=MIN_MASK_VALUE)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (e,) = ctx.saved_tensors
        return gradient * compute_compensated_slope(e, *ctx.how), None, None, None, None


def compute_compensated_slope(
    e: Tensor, scale: float | Tensor, s_max: float, bound: float, official: bool
) -> Tensor:
    """Return HAT's compensated derivative da / de: the derivative of sigmoid(e), times s_max.

    Args:
        e: The embedding.
        scale: The scale s.
        s_max: Largest scale.
        bound: The result is 0 if |s e| exceeds the bound. If `official`, only the argument s e of
            the compensation's cosh is clamped to +-bound.
        official: Compute the derivative in two steps like the released code.
    """
    if official:
        mask = torch.sigmoid(scale * e)
        return (
            s_max
            * mask
            * (1 - mask)
            * (torch.cosh((scale * e).clamp(-bound, bound)) + 1)
            / (torch.cosh(e) + 1)
        )
    return s_max * torch.sigmoid(e) * torch.sigmoid(-e) * ((scale * e).abs() <= bound)


def compute_annealed_scale(
    step: int,
    steps: int,
    s_max: float,
    schedule: Literal["linear", "official", "cosine"] = "linear",
    s_min: float | None = None,
) -> float:
    """Return the scale s at a step of an epoch.

    If the epoch has one step, s is s_max, except for schedule `official`.

    Args:
        step: Index of the step in the epoch, from 0.
        steps: Number of steps of the epoch.
        s_max: Largest scale.
        schedule: `linear`: from s_min (default 1 / s_max) at the first step to s_max at the last
            (HAT, Eq. 3). `official`: the same, but s_max would be reached one step after the last,
            like in the released code. `cosine`: from s_max down to s_min and back, so that an epoch
            begins and ends with hard masks.
        s_min: Smallest scale. None: 1 / s_max.
    """
    low = 1 / s_max if s_min is None else s_min
    share = step / steps if schedule == "official" else step / (steps - 1) if steps > 1 else 1.0
    if schedule == "cosine":
        share = 0.5 * (1 + math.cos(2 * math.pi * share))
    return low + (s_max - low) * share


def draw_initial_embedding(
    shape: tuple[int, ...], how: Start, generator: torch.Generator, tasks: int = 10
) -> Tensor:
    """Return initial embeddings.

    Args:
        shape: Shape of the embeddings.
        how: `normal`: N(0, 1), so that half of the units are on (HAT, Sec. 4). `dense`: all values
            are 1. `uniform`: U(0, 2], so that all units are on (HAT's compression). `sparse`: N(m,
            1), with m such that a unit is on with probability 1 / `tasks`. This maximises the
            probability that exactly one task uses the unit.
        generator: Generator of the random numbers.
        tasks: Number of tasks for `sparse`, at least 2.
    """
    if how == "dense":
        return torch.ones(shape)
    if how == "uniform":
        # excludes 0, because a unit with e = 0 is off
        return 2 - 2 * torch.rand(shape, generator=generator)
    mean = NormalDist().inv_cdf(1 / tasks) if how == "sparse" else 0.0
    return torch.randn(shape, generator=generator) + mean


def compute_share_of_ones(masks: Sequence[Tensor]) -> float:
    """Return the share of ones in several masks."""
    return sum(int(mask.sum()) for mask in masks) / sum(mask.numel() for mask in masks)


def compute_mask_digest(masks: Mapping[str, Tensor]) -> str:
    """Return the sha256 of the values of masks, in the order of the mapping, without names."""
    digest = hashlib.sha256()
    for mask in masks.values():
        digest.update(mask.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
