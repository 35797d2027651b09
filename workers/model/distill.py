"""Distillation: the network before a task, and losses that keep the new network close to it."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Teacher:
    """Frozen copies of a backbone and of heads, by task.

    It is intentionally not a module. As a part of the method it would be put into training mode,
    draw drop paths and be stored in checkpoints, although it equals the carried state of the
    previous task.
    """

    def __init__(self, backbone: nn.Module, heads: dict[str, nn.Linear]):
        self.backbone = _frozen(backbone)
        self.heads = {task: _frozen(head) for task, head in heads.items()}

    @torch.no_grad()
    def logits(self, images: Tensor) -> dict[str, Tensor]:
        """Return the logits (b, classes) of all heads by task, with one pass of the backbone."""
        features = self.backbone(images)
        return {task: head(features) for task, head in self.heads.items()}

    def joined(self, images: Tensor) -> Tensor:
        """The same as (b, old classes), in the order in which the heads were given."""
        return torch.cat([*self.logits(images).values()], 1)


def _frozen(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module).eval().requires_grad_(False)


def kd_ce(
    student: Tensor, teacher: Tensor, tau: float, class_weights: Tensor | None = None
) -> Tensor:
    """Return -mean_b sum_c softmax(y / tau)_c log softmax(z / tau)_c, in fp32 without tau^2.

    The gradient is that of KL(softmax(y / tau) || softmax(z / tau)), averaged over the batch.

    Args:
        student: The logits z, (b, classes).
        teacher: The logits y, (b, classes).
        tau: The temperature.
        class_weights: Factors (classes,) of the teacher's probabilities, which are then normalised.
    """
    target = (teacher.float() / tau).softmax(1)
    if class_weights is not None:
        target = target * class_weights
        target = target / target.sum(1, keepdim=True)
    return F.cross_entropy(student.float() / tau, target)


def kd_kl(student: Tensor, teacher: Tensor, tau: float = 1.0) -> Tensor:
    """Return tau^2 KL(softmax(y / tau) || softmax(z / tau)), averaged over all entries, in fp32.

    The mean is over b * classes entries. With tau = 1 it is `kd_ce` divided by the number of
    classes, up to a constant.
    """
    log_q = (student.float() / tau).log_softmax(1)
    p = (teacher.float() / tau).softmax(1)
    divergence = F.kl_div(log_q, p, reduction="batchmean")
    return tau**2 * divergence / student.shape[1]


def kd_sig(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the binary cross-entropy of logits z to sigmoid(y), averaged over entries, in fp32."""
    return F.binary_cross_entropy_with_logits(student.float(), teacher.float().sigmoid())


def kd_bce(student: Tensor, teacher: Tensor, tau: float) -> Tensor:
    """Return the binary cross-entropy of q = softmax(z / tau) to p = softmax(y / tau), in fp32.

    It is averaged over all entries.
    """
    scores = student.float() / tau
    p = (teacher.float() / tau).softmax(1)
    q = scores.softmax(1).clamp(max=1 - torch.finfo(torch.float32).eps)  # log(1 - q) stays finite
    log_likelihood = p * scores.log_softmax(1) + (1 - p) * torch.log1p(-q)
    return -log_likelihood.mean()
