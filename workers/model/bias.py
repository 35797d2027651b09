"""Bias layer: alpha z + beta for the logits of some classes, fitted on held-out images."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

IDENTITY = (1.0, 0.0)


def apply_bias(logits: Tensor, columns: slice, bias: Tensor) -> Tensor:
    """z (b, classes), bias (alpha, beta) -> the same with alpha z + beta in `columns`; the others
    stay as they are."""
    return torch.cat(
        [
            logits[:, : columns.start],
            bias[0] * logits[:, columns] + bias[1],
            logits[:, columns.stop :],
        ],
        1,
    )


@torch.enable_grad()
def fit_bias(logits: Tensor, labels: Tensor, columns: slice, decay: float) -> Tensor:
    """(alpha, beta) that minimise cross-entropy of the biased logits + decay beta^2 / 2, by L-BFGS
    from (1, 0) in fp64. Every class counts the same, also where some have fewer images. logits (n,
    classes), labels (n,)."""
    logits, weight = logits.detach().double(), 1 / labels.bincount().double()[labels]
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
