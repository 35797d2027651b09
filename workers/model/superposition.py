"""Which of several masks of the same weights fits some images: by how the outputs' entropy changes
with each mask's share.

Wortsman et al.: Supermasks in Superposition, NeurIPS 2020. A network with weights W .* sum_i
alpha_i M^i is as unsure as its masks are unfit, and the derivative in alpha_i says which mask would
make it surer (Eq. 3 and 4: the entropy is minimised).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

Weights = dict[str, Tensor]
Network = Callable[[Weights, Tensor], Tensor]  # weights by name, images (n, ...) -> outputs (n, s)
Objective = Callable[[Tensor], Tensor]  # outputs (n, s) -> (n,), small where the weights fit
Judge = Callable[
    [Sequence[int], Tensor], Tensor
]  # k masks, groups of images (g, n, ...) -> (g, k), the smaller the better a mask fits
Rule = Callable[
    [Judge, Tensor, int], tuple[Tensor, Tensor]
]  # judge, groups, number of masks -> the mask for each group, how sure (g,)

GRADIENT_BYTES = 256 << 20  # of all weights, for the groups that are judged at once


def entropy(outputs: Tensor) -> Tensor:
    """H of the softmax over all outputs, in nats. (n, s) -> (n,)."""
    logs = outputs.float().log_softmax(1)
    return -(logs.exp() * logs).sum(1)


def superfluous(outputs: Tensor, real: int) -> Tensor:
    """G: logsumexp of the outputs, of which the first `real` get no gradient. (n, s) -> (n,). What
    is left are outputs that no class stands behind: a mask that fits keeps them down."""
    outputs = outputs.float()
    return torch.cat([outputs[:, :real].detach(), outputs[:, real:]], 1).logsumexp(1)


def superfluous_share(outputs: Tensor, real: int) -> Tensor:
    """The log of the share of the softmax that outputs beyond the first `real` have: what a single
    mask leaves to superfluous ones. (n, s) -> (n,)."""
    outputs = outputs.float()
    return outputs[:, real:].logsumexp(1) - outputs.logsumexp(1)


def superpose(weights: Weights, masks: Sequence[Weights], alpha: Tensor) -> Weights:
    """W .* sum_i alpha_i M^i by name, differentiable in alpha (k,). masks: k dictionaries with the
    names of `weights`."""
    return {
        name: weight
        * torch.stack([a * mask[name] for a, mask in zip(alpha, masks, strict=True)]).sum(0)
        for name, weight in weights.items()
    }


@torch.no_grad()
def slopes(
    network: Network,
    weights: Weights,
    masks: Sequence[Weights],
    alpha: Tensor,
    groups: Tensor,
    objective: Objective,
) -> Tensor:
    """groups (g, n, ...), each judged as a whole -> d mean objective / d alpha, (g, k), also where
    gradients are switched off: the gradient of the superposed weights, one for each group, summed
    over what each mask keeps of W."""
    mixed = superpose(weights, masks, alpha)
    of_groups = vmap(
        grad(lambda some, images: objective(network(some, images)).mean()), in_dims=(None, 0)
    )
    together = max(1, GRADIENT_BYTES // (4 * sum(weight.numel() for weight in weights.values())))
    found = []
    for some in groups.split(together):
        with sdpa_kernel(SDPBackend.MATH):  # fused attention knows no vmap
            gradients = of_groups(mixed, some)
        parts = [
            gradient.flatten(1)
            @ torch.stack([(weights[name] * mask[name]).flatten() for mask in masks]).T
            for name, gradient in gradients.items()
        ]
        found.append(torch.stack(parts).sum(0))
    return torch.cat(found)


@torch.no_grad()
def values(
    network: Network,
    weights: Weights,
    masks: Sequence[Weights],
    groups: Tensor,
    objectives: Sequence[Objective],
) -> Tensor:
    """The mean of each mask's objective over each group under that mask alone, (g, k): a forward
    for each mask."""
    found = []
    for mask, objective in zip(masks, objectives, strict=True):
        outputs = network(
            {name: weight * mask[name] for name, weight in weights.items()}, groups.flatten(0, 1)
        )
        found.append(objective(outputs).view(len(groups), -1).mean(1))
    return torch.stack(found, 1)


def shares(scores: Tensor) -> Tensor:
    """nu: softmax of minus the scores (g, k)."""
    return (-scores).softmax(1)


def infer_at_once(judge: Judge, groups: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The mask with the lowest score for each group, (g,), and its share nu among all, (g,)."""
    best = shares(judge(range(count), groups)).max(1)
    return best.indices, best.values


def infer_by_halves(judge: Judge, groups: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The same by binary search: judge all, keep the better half (rounded up; the first among
    equals), judge those, ... until one is left, after ceil(log2 count) rounds. How sure: the
    product of the shares that the kept halves had."""
    places, sure = (
        torch.zeros(len(groups), dtype=torch.int64, device=groups.device),
        torch.ones(len(groups), device=groups.device),
    )
    alive: list[tuple[tuple[int, ...], Tensor]] = [
        (tuple(range(count)), torch.arange(len(groups), device=groups.device))
    ]
    while alive:
        masks, rows = alive.pop()
        if len(masks) == 1:
            places[rows] = masks[0]
            continue
        scores = judge(masks, groups[rows])
        kept = scores.argsort(dim=1, stable=True)[:, : (len(masks) + 1) // 2].sort(1).values
        sure[rows] *= shares(scores).gather(1, kept).sum(1)
        alive.extend(
            (tuple(masks[i] for i in half.tolist()), rows[(kept == half).all(1)])
            for half in kept.unique(dim=0)
        )
    return places, sure
