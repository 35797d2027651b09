"""Distillation losses between a trained network (student) and its frozen copy (teacher).

The copy is made before a task is trained.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workers.model.frozen import copy_frozen


class Teacher:
    """Frozen copies of a backbone and of the heads of some tasks.

    This class is intentionally not an `nn.Module`. As a submodule of a method it would be put into
    training mode, apply stochastic depth and be stored in checkpoints. Checkpoints do not need it,
    because it equals the carried state of the previous task.

    Args:
        backbone: The backbone to copy.
        heads: The heads to copy, by task name.
    """

    def __init__(self, backbone: nn.Module, heads: dict[str, nn.Linear]):
        self.backbone = copy_frozen(backbone)
        self.heads = {task: copy_frozen(head) for task, head in heads.items()}

    @torch.no_grad()
    def logits(self, images: Tensor) -> dict[str, Tensor]:
        """Return the logits (b, classes) of each head by task; the backbone runs once."""
        features = self.backbone(images)
        return {task: head(features) for task, head in self.heads.items()}

    def joined(self, images: Tensor) -> Tensor:
        """Return the logits of all heads as one tensor (b, old classes), in `heads` order."""
        return torch.cat([*self.logits(images).values()], 1)


def kd_ce(
    student: Tensor, teacher: Tensor, tau: float, class_weights: Tensor | None = None
) -> Tensor:
    """Return -mean_b sum_c softmax(y / tau)_c log softmax(z / tau)_c, in fp32.

    The loss is not multiplied by tau^2. Its gradient is that of KL(softmax(y / tau) || softmax(z /
    tau)), averaged over the batch.

    Args:
        student: The logits z, (b, classes).
        teacher: The logits y, (b, classes).
        tau: The temperature.
        class_weights: Factors (classes,) of the teacher's probabilities; the products are
            normalised. None: no factors.
    """
    target = (teacher.float() / tau).softmax(1)
    if class_weights is not None:
        target = target * class_weights
        target = target / target.sum(1, keepdim=True)
    return F.cross_entropy(student.float() / tau, target)


def kd_kl(student: Tensor, teacher: Tensor, tau: float = 1.0) -> Tensor:
    """Return tau^2 KL(softmax(y / tau) || softmax(z / tau)), averaged over all entries, in fp32.

    The mean is over b * classes entries. With tau = 1 the loss equals `kd_ce` divided by the number
    of classes, up to a constant.

    Args:
        student: The logits z, (b, classes).
        teacher: The logits y, (b, classes).
        tau: The temperature.
    """
    log_q = (student.float() / tau).log_softmax(1)
    p = (teacher.float() / tau).softmax(1)
    divergence = F.kl_div(log_q, p, reduction="batchmean")
    return tau**2 * divergence / student.shape[1]


def kd_sig(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the binary cross-entropy of sigmoid(z) with targets sigmoid(y), in fp32.

    The loss is averaged over all entries.

    Args:
        student: The logits z, (b, classes).
        teacher: The logits y, (b, classes).
    """
    return F.binary_cross_entropy_with_logits(student.float(), teacher.float().sigmoid())


def kd_bce(student: Tensor, teacher: Tensor, tau: float) -> Tensor:
    """Return the binary cross-entropy of q = softmax(z / tau) with targets p = softmax(y / tau).

    The loss is computed in fp32 and averaged over all entries.

    Args:
        student: The logits z, (b, classes).
        teacher: The logits y, (b, classes).
        tau: The temperature.
    """
    scores = student.float() / tau
    p = (teacher.float() / tau).softmax(1)
    q = scores.softmax(1).clamp(max=1 - torch.finfo(torch.float32).eps)  # keeps log(1 - q) finite
    log_likelihood = p * scores.log_softmax(1) + (1 - p) * torch.log1p(-q)
    return -log_likelihood.mean()
