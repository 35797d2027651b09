"""Infer the mask that fits some images, among several masks of the same weights.

Wortsman et al.: Supermasks in Superposition, NeurIPS 2020. The outputs of a network with weights
W .* sum_i alpha_i M^i, for masks M^i with shares alpha_i, have a high entropy if the masks do not
fit the images. The mask that fits best is the one with the most negative derivative of the entropy
with respect to its alpha_i: more of this mask would lower the entropy most (Eq. 3 and 4). Other
objectives than the entropy can be used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

Weights = dict[str, Tensor]
# arguments: weights by name, images (n, ...); result: outputs (n, s)
Network = Callable[[Weights, Tensor], Tensor]
# argument: outputs (n, s); result: (n,), small for images that fit the weights
Objective = Callable[[Tensor], Tensor]
# arguments: indices of k masks, groups of images (g, n, ...); result: scores (g, k), low for a mask
# that fits
Judge = Callable[[Sequence[int], Tensor], Tensor]
# arguments: judge, groups, number of masks; result: index of the mask of each group (g,), and its
# confidence (g,)
Rule = Callable[[Judge, Tensor, int], tuple[Tensor, Tensor]]

MAX_GRADIENT_BYTES = (
    256 << 20
)  # maximum bytes of weight gradients of groups that are judged together


def entropy(outputs: Tensor) -> Tensor:
    """Return the entropy H of the softmax over all outputs, in nats: (n, s) -> (n,)."""
    logs = outputs.float().log_softmax(1)
    return -(logs.exp() * logs).sum(1)


def superfluous(outputs: Tensor, real: int) -> Tensor:
    """Return the paper's objective G, the logsumexp of the outputs: (n, s) -> (n,).

    Only the superfluous outputs get a gradient. These are the outputs after the first `real`
    outputs; they belong to no class.
    """
    outputs = outputs.float()
    return torch.cat([outputs[:, :real].detach(), outputs[:, real:]], 1).logsumexp(1)


def compute_superfluous_share(outputs: Tensor, real: int) -> Tensor:
    """Return the log of the softmax share of the outputs after the first `real`, (n, s) -> (n,)."""
    outputs = outputs.float()
    return outputs[:, real:].logsumexp(1) - outputs.logsumexp(1)


def superpose(weights: Weights, masks: Sequence[Weights], alpha: Tensor) -> Weights:
    """Return W .* sum_i alpha_i M^i by name, differentiable in alpha (k,).

    Args:
        weights: The weights W.
        masks: k dictionaries with the names of `weights`.
        alpha: Shares of the masks, (k,).
    """
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
    """Return the derivative of the mean objective of each group with respect to alpha, (g, k).

    For each group, the gradient with respect to the superposed weights is computed once. The
    derivative for a mask M^i is then the sum of gradient .* W .* M^i over all entries. The function
    also works if gradients are disabled outside.

    Args:
        network: The network.
        weights: The weights W.
        masks: k masks.
        alpha: Shares of the masks, (k,).
        groups: Groups of images, (g, n, ...).
        objective: Maps outputs (n, s) to an objective per image, (n,).
    """
    superposed = superpose(weights, masks, alpha)

    def loss(values: Weights, images: Tensor) -> Tensor:
        return objective(network(values, images)).mean()

    gradients_of = vmap(grad(loss), in_dims=(None, 0))
    weight_bytes = 4 * sum(weight.numel() for weight in weights.values())
    groups_at_once = max(1, MAX_GRADIENT_BYTES // weight_bytes)
    slopes_of_groups = []
    for part in groups.split(groups_at_once):
        with sdpa_kernel(SDPBackend.MATH):  # fused attention does not support vmap
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
    """Return the mean objective of each group under each single mask, (g, k).

    There is one forward pass per mask.

    Args:
        network: The network.
        weights: The weights W.
        masks: k masks.
        groups: Groups of images, (g, n, ...).
        objectives: The objective for each mask.
    """
    means = []
    for mask, objective in zip(masks, objectives, strict=True):
        masked = {name: weight * mask[name] for name, weight in weights.items()}
        outputs = network(masked, groups.flatten(0, 1))  # (g n, outputs)
        means.append(objective(outputs).view(len(groups), -1).mean(1))
    return torch.stack(means, 1)


def shares(scores: Tensor) -> Tensor:
    """Return nu, the softmax of the negative scores (g, k)."""
    return (-scores).softmax(1)


def infer_at_once(judge: Judge, groups: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Find the mask of each group by one comparison of all masks.

    Args:
        judge: Scores masks.
        groups: Groups of images, (g, n, ...).
        count: Number of masks.

    Returns:
        The mask with the lowest score for each group, (g,), and its share nu (see `shares`), (g,).
    """
    best = shares(judge(range(count), groups)).max(1)
    return best.indices, best.values


def infer_by_halves(judge: Judge, groups: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Find the mask of each group by binary search.

    Each round judges the remaining masks and keeps the better half (rounded up; among equal scores,
    the first masks are kept). One mask is left after ceil(log2 count) rounds.

    Args:
        judge: Scores masks.
        groups: Groups of images, (g, n, ...).
        count: Number of masks.

    Returns:
        The mask of each group, (g,), and its confidence, (g,): the product of the shares of the
        better halves.
    """
    device = groups.device
    best_masks = torch.zeros(len(groups), dtype=torch.int64, device=device)
    sure = torch.ones(len(groups), device=device)
    # pairs: remaining masks, indices of the groups with these remaining masks
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
