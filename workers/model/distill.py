"""Distillation: the network as it was before a task, and the losses that hold the new one to its
answers."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Teacher:
    """Frozen copies of a backbone and of heads, by task. Not a module, on purpose: as a part of the
    method it would be put into training mode, draw drop paths and go into checkpoints, where it is
    the carried state of the task before, word for word."""

    def __init__(self, backbone: nn.Module, heads: dict[str, nn.Linear]):
        self.backbone = _frozen(backbone)
        self.heads = {task: _frozen(head) for task, head in heads.items()}

    @torch.no_grad()
    def logits(self, images: Tensor) -> dict[str, Tensor]:
        """Images (b, 3, H, W) -> task -> logits (b, classes): one pass of the backbone for all
        heads."""
        features = self.backbone(images)
        return {task: head(features) for task, head in self.heads.items()}

    def joined(self, images: Tensor) -> Tensor:
        """The same as (b, old classes), in the order in which the heads were given."""
        return torch.cat([*self.logits(images).values()], 1)


def _frozen(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module).eval().requires_grad_(False)


def kd_ce(student: Tensor, teacher: Tensor, tau: float) -> Tensor:
    """-mean_b sum_c softmax(y / tau)_c log softmax(z / tau)_c over logits z, y (b, classes), in
    fp32; no factor tau^2. Its gradient is that of the divergence KL(softmax(y / tau) || softmax(z /
    tau)), a mean over the batch."""
    return F.cross_entropy(student.float() / tau, (teacher.float() / tau).softmax(1))


def kd_kl(student: Tensor, teacher: Tensor, tau: float = 1.0) -> Tensor:
    """tau^2 KL(softmax(y / tau) || softmax(z / tau)), a mean over all b * classes entries, in fp32:
    of tau = 1 as many times weaker than `kd_ce` as there are classes."""
    log_q = (student.float() / tau).log_softmax(1)
    p = (teacher.float() / tau).softmax(1)
    divergence = F.kl_div(log_q, p, reduction="batchmean")
    return tau**2 * divergence / student.shape[1]


def kd_sig(student: Tensor, teacher: Tensor) -> Tensor:
    """Binary cross-entropy of each logit of z (b, classes) to sigmoid(y), a mean over all entries,
    in fp32."""
    return F.binary_cross_entropy_with_logits(student.float(), teacher.float().sigmoid())


def kd_bce(student: Tensor, teacher: Tensor, tau: float) -> Tensor:
    """Binary cross-entropy of each of q = softmax(z / tau) to p = softmax(y / tau), a mean over all
    entries, in fp32."""
    scores = student.float() / tau
    p = (teacher.float() / tau).softmax(1)
    q = scores.softmax(1).clamp(max=1 - torch.finfo(torch.float32).eps)  # log(1 - q) stays finite
    log_likelihood = p * scores.log_softmax(1) + (1 - p) * torch.log1p(-q)
    return -log_likelihood.mean()
