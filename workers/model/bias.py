"""Bias layer of BiC: alpha z + beta for the logits z of some classes, fitted on held-out images.

Wu, Chen, Wang, Ye, Liu, Guo, Fu: Large Scale Incremental Learning, CVPR 2019.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

IDENTITY = (1.0, 0.0)  # alpha and beta of the layer that changes nothing


def apply_bias(logits: Tensor, columns: slice, bias: Tensor) -> Tensor:
    """Return the logits, with alpha z + beta instead of z in some columns.

    Args:
        logits: Logits z, (b, classes).
        columns: Columns of the classes to change.
        bias: (alpha, beta).
    """
    before = logits[:, : columns.start]
    biased = bias[0] * logits[:, columns] + bias[1]
    behind = logits[:, columns.stop :]
    return torch.cat([before, biased, behind], 1)


@torch.enable_grad()
def fit_bias(logits: Tensor, labels: Tensor, columns: slice, decay: float) -> Tensor:
    """Return (alpha, beta) that minimise cross-entropy of the biased logits + decay beta^2 / 2.

    The optimizer is L-BFGS, started at (1, 0), in fp64. The cross-entropy is weighted so that every
    class has the same influence, whatever its number of images.

    Args:
        logits: Logits z, (n, classes).
        labels: Column of each row's class, (n,).
        columns: Columns of the classes with alpha z + beta.
        decay: Weight decay of beta.
    """
    logits = logits.detach().double()
    weight = 1 / labels.bincount().double()[labels]  # (n,)
    bias = torch.tensor(IDENTITY, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [bias],
        max_iter=200,
        tolerance_grad=1e-8,
        tolerance_change=1e-12,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        losses = F.cross_entropy(apply_bias(logits, columns, bias), labels, reduction="none")
        loss = (weight * losses).sum() / weight.sum() + decay * bias[1].square() / 2
        loss.backward()
        return loss

    optimizer.step(closure)
    return bias.detach()
