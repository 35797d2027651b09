"""Inference of the mask that fits some images, among several masks of the same weights: from how
the outputs' entropy changes with each mask's share.

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
# weights by name, images (n, ...) -> outputs (n, s)
Network = Callable[[Weights, Tensor], Tensor]
# outputs (n, s) -> (n,), small where the weights fit
Objective = Callable[[Tensor], Tensor]
# k masks, groups of images (g, n, ...) -> (g, k), the smaller the better a mask fits
Judge = Callable[[Sequence[int], Tensor], Tensor]
# judge, groups, number of masks -> the mask of each group (g,), how sure it is (g,)
Rule = Callable[[Judge, Tensor, int], tuple[Tensor, Tensor]]

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
    superposed = {}
    for name, weight in weights.items():
        scaled = [share * mask[name] for share, mask in zip(alpha, masks, strict=True)]
        superposed[name] = weight * torch.stack(scaled).sum(0)
    return superposed


@torch.no_grad()
def slopes(
    network: Network,
    weights: Weights,
    masks: Sequence[Weights],
    alpha: Tensor,
    groups: Tensor,
    objective: Objective,
) -> Tensor:
    """D mean objective / d alpha of each group, (g, k), also where gradients are switched off.

    groups: (g, n, ...). The gradient of the superposed weights is computed per group, and summed
    over what each mask keeps of W.
    """
    superposed = superpose(weights, masks, alpha)

    def loss(values: Weights, images: Tensor) -> Tensor:
        return objective(network(values, images)).mean()

    gradients_of = vmap(grad(loss), in_dims=(None, 0))
    weight_bytes = 4 * sum(weight.numel() for weight in weights.values())
    groups_at_once = max(1, GRADIENT_BYTES // weight_bytes)
    slopes_of_groups = []
    for part in groups.split(groups_at_once):
        with sdpa_kernel(SDPBackend.MATH):  # fused attention knows no vmap
            gradients = gradients_of(superposed, part)
        by_name = []
        for name, gradient in gradients.items():
            masked = [(weights[name] * mask[name]).flatten() for mask in masks]
            by_name.append(gradient.flatten(1) @ torch.stack(masked).T)  # (part of g, k)
        slopes_of_groups.append(torch.stack(by_name).sum(0))
    return torch.cat(slopes_of_groups)


@torch.no_grad()
def values(
    network: Network,
    weights: Weights,
    masks: Sequence[Weights],
    groups: Tensor,
    objectives: Sequence[Objective],
) -> Tensor:
    """The mean of each mask's objective over each group under that mask alone, (g, k); one forward
    per mask."""
    means = []
    for mask, objective in zip(masks, objectives, strict=True):
        masked = {name: weight * mask[name] for name, weight in weights.items()}
        outputs = network(masked, groups.flatten(0, 1))  # (g n, outputs)
        means.append(objective(outputs).view(len(groups), -1).mean(1))
    return torch.stack(means, 1)


def shares(scores: Tensor) -> Tensor:
    """nu: softmax of minus the scores (g, k)."""
    return (-scores).softmax(1)


def infer_at_once(judge: Judge, groups: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The mask with the lowest score for each group, (g,), and its share nu among all, (g,)."""
    best = shares(judge(range(count), groups)).max(1)
    return best.indices, best.values


def infer_by_halves(judge: Judge, groups: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The mask for each group by binary search, (g,), and how sure it is, (g,).

    Judge all masks, go on with the better half (rounded up; the first among equals), until one is
    left after ceil(log2 count) rounds. How sure: the product of the shares of the better halves.
    """
    device = groups.device
    best_masks = torch.zeros(len(groups), dtype=torch.int64, device=device)
    sure = torch.ones(len(groups), device=device)
    # (masks that are left, rows of the groups for which they are)
    pending: list[tuple[tuple[int, ...], Tensor]] = [
        (tuple(range(count)), torch.arange(len(groups), device=device))
    ]
    while pending:
        masks, rows = pending.pop()
        if len(masks) == 1:
            best_masks[rows] = masks[0]
            continue
        scores = judge(masks, groups[rows])  # (rows, masks)
        order = scores.argsort(dim=1, stable=True)
        better = order[:, : (len(masks) + 1) // 2].sort(1).values  # (rows, half of masks)
        sure[rows] *= shares(scores).gather(1, better).sum(1)
        for half in better.unique(dim=0):
            rows_of_half = rows[(better == half).all(1)]
            pending.append((tuple(masks[i] for i in half.tolist()), rows_of_half))
    return best_masks, sure
