"""Classifier alignment: heads are trained on features drawn from a Gaussian of each class.

No images of earlier tasks are needed. Zhang, Wang, Kang, Chen, Wei: SLCA: Slow Learner with
Classifier Alignment for Continual Learning on a Pre-trained Model, ICCV 2023.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workers.data.features import extract_features
from workers.errors import UserError
from workers.methods.base import ParamGroup, S, StepContext
from workers.methods.bases.class_incremental import SeparateHeads
from workers.methods.bases.statistics import class_means
from workers.rng import derive_seed
from workers.storage.taskstate import Carried

# `align` is a step. The other names are parts of the names of carried tensors: heads/TASK/KEY is a
# head as it was trained, heads/TASK/aligned.KEY the aligned head, heads/TASK/means and
# heads/TASK/factors are the Gaussians of its classes.
ALIGN, HEADS, ALIGNED, MEANS, FACTORS = "align", "heads", "aligned", "means", "factors"
RIDGE = 1e-4  # added to the diagonal of a covariance
EPS = 1e-7  # added to the norm of a task's logits
MOMENTUM, WEIGHT_DECAY = 0.9, 5e-4  # SGD settings of the alignment


class ClassGaussians(NamedTuple):
    """Gaussians of the features of a task's classes: N(mu_c, L_c L_c^T), in fp32 on the CPU.

    Attributes:
        means: mu_c, (K, d).
        factors: L_c, the lower Cholesky factor of Sigma_c + 1e-4 I, (K, d, d). Sigma_c is the
            unbiased covariance.
    """

    means: Tensor
    factors: Tensor

    def draw(self, count: int, seeds: Sequence[int], shrink: float = 1.0) -> Tensor:
        """Draw features (K, count, d) from N(shrink mu_c, Sigma_c + 1e-4 I).

        Args:
            count: Number of draws per class.
            seeds: A seed for each class, (K,).
            shrink: Factor of the means.
        """
        draws = []
        for mean, factor, seed in zip(self.means, self.factors, seeds, strict=True):
            generator = torch.Generator().manual_seed(seed)
            noise = torch.randn(count, len(mean), generator=generator)
            draws.append(shrink * mean + noise @ factor.T)
        return torch.stack(draws)


def fit_gaussians(features: Tensor, labels: Tensor, num_classes: int) -> ClassGaussians:
    """Return the Gaussians of classes, computed in fp64.

    Args:
        features: Features, (n, d).
        labels: Labels from 0 to K - 1, (n,).
        num_classes: K.
    """
    means = class_means(features, labels, num_classes)
    identity = torch.eye(features.shape[1], dtype=torch.float64)
    factors = []
    for label in range(num_classes):
        centred = features[labels == label].double() - means[label]
        covariance = centred.T @ centred / max(len(centred) - 1, 1)
        factors.append(torch.linalg.cholesky(covariance + RIDGE * identity))
    return ClassGaussians(means.float(), torch.stack(factors).float())


@dataclass(frozen=True)
class AlignmentPlan:
    """Settings of an alignment.

    Attributes:
        epochs: Number of epochs. Each epoch draws new features.
        draws: Number of features drawn per class and epoch.
        batch_size: Number of features per step.
        lr: Initial learning rate of SGD. It follows a cosine schedule over the epochs.
        tau: Temperature of normalised logits (`compute_normalised_loss`). None: plain
            cross-entropy.
        shrinks: Whether to multiply class means by the factors of `list_shrink_factors`.
    """

    epochs: int
    draws: int
    batch_size: int
    lr: float
    tau: float | None = None
    shrinks: bool = False


@torch.enable_grad()
def align_heads(
    heads: Mapping[str, tuple[Tensor, Tensor]],
    gaussians: Mapping[str, ClassGaussians],
    plan: AlignmentPlan,
    seed: int,
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return new weights and biases of linear heads, trained together on drawn features.

    The result depends only on the arguments. It is computed on the device of the heads. The noise
    is drawn on the CPU with a seed per class, so all ranks draw the same noise.

    Args:
        heads: Weight (K, d) and bias (K,) of each task, in stream order. They are not changed.
        gaussians: Gaussians of each task's classes.
        plan: The settings.
        seed: The seed of the run.
    """
    counts = [len(bias) for _, bias in heads.values()]
    weight = torch.cat([weight.detach() for weight, _ in heads.values()]).requires_grad_(True)
    bias = torch.cat([bias.detach() for _, bias in heads.values()]).requires_grad_(True)
    optimizer = torch.optim.SGD(
        [weight, bias], plan.lr, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY
    )
    labels = torch.arange(sum(counts)).repeat_interleave(plan.draws)
    shrinks = list_shrink_factors(len(heads)) if plan.shrinks else [1.0] * len(heads)
    for epoch in range(plan.epochs):
        optimizer.param_groups[0]["lr"] = (
            plan.lr * (1 + math.cos(math.pi * epoch / plan.epochs)) / 2
        )
        parts = []
        for name, count, shrink in zip(heads, counts, shrinks, strict=True):
            seeds = [derive_seed(seed, "align", name, label, epoch) for label in range(count)]
            parts.append(gaussians[name].draw(plan.draws, seeds, shrink).flatten(0, 1))
        features = torch.cat(parts)
        shuffle = torch.Generator().manual_seed(derive_seed(seed, "align", epoch))
        order = torch.randperm(len(features), generator=shuffle)
        for rows in order.split(plan.batch_size):
            drawn, targets = features[rows].to(weight.device), labels[rows].to(weight.device)
            logits = F.linear(drawn, weight, bias).split(counts, 1)
            if plan.tau is None:
                loss = F.cross_entropy(torch.cat(logits, 1), targets)
            else:
                loss = compute_normalised_loss(logits, targets, plan.tau)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    weights, biases = weight.detach().split(counts), bias.detach().split(counts)
    return dict(zip(heads, zip(weights, biases, strict=True), strict=True))


def compute_normalised_loss(logits: Sequence[Tensor], labels: Tensor, tau: float) -> Tensor:
    """Return the mean cross-entropy of z / (nu tau), nu = mean over tasks s of |z_s| + 1e-7.

    Args:
        logits: z_s of each task, (b, classes of the task).
        labels: Labels among all classes, (b,).
        tau: The temperature.
    """
    lengths = torch.stack([part.norm(dim=1) + EPS for part in logits], 1)  # (b, tasks)
    nu = lengths.mean(1, keepdim=True)
    return F.cross_entropy(torch.cat([*logits], 1) / (nu * tau), labels)


def list_shrink_factors(tasks: int) -> list[float]:
    """Return SLCA's factors rho of the class means of each task t = 0, 1, ..., tasks - 1.

    rho_t = 0.9 + 0.1 (t + 1) / tasks, which is 1 for the newest task.
    """
    return [0.9 + 0.1 * (task + 1) / tasks for task in range(tasks)]


class AlignsHeads(SeparateHeads[S]):
    """A chain with a step `align`, which trains the heads of all tasks on Gaussians of classes.

    Each task trains its own head, with the cross-entropy over its own classes. Each alignment
    starts from the heads as they were before any alignment, and training never uses an aligned
    head. Therefore the chain carries both versions of the heads, and the Gaussians, which are never
    updated.

    A subclass calls `fit_classes` after the training of a task, `align` in the step `align`, and
    `carry_heads` in `finish`.
    """

    carries: ClassVar[tuple[str, ...]] = (HEADS, "statistics")
    training_only = (f"{HEADS}/*/{MEANS}", f"{HEADS}/*/{FACTORS}")
    needs_states = True  # also in scenario `task`: they contain the heads
    may_forget = True

    def __init__(self, backbone: nn.Module, settings: S, seed: int):
        super().__init__(backbone, settings, seed)
        self.trained: dict[str, dict[str, Tensor]] = {}  # task -> its head before any alignment
        self.gaussians: dict[str, ClassGaussians] = {}

    def begin(self, context: StepContext) -> list[ParamGroup]:
        if context.carried is not None:
            self.load_carried(context.carried)
            for name, head in self.trained.items():
                self.heads.restore(name, head)
        return super().begin(context)

    def fit_classes(self, context: StepContext) -> None:
        """Fit Gaussians to the features of the task's images, by class."""
        self.eval()
        batch = extract_features(self.features, context.data.feed("train"))
        gaussians = fit_gaussians(batch.features, batch.labels, context.task.num_classes)
        self.gaussians[context.task.name] = gaussians

    def align(self, plan: AlignmentPlan) -> None:
        """Replace the heads of all tasks by aligned heads."""
        heads = {}
        for name in self.class_slices():  # in stream order, which rho depends on
            if name not in self.gaussians:
                raise UserError(
                    f"task {name!r}: the carried state lacks the Gaussians of its classes; run the "
                    "stream again in another storage"
                )
            heads[name] = (self.heads[name].weight, self.heads[name].bias)
        aligned = align_heads(heads, self.gaussians, plan, self.seed)
        for name, (weight, bias) in aligned.items():
            self.heads.restore(name, {"weight": weight, "bias": bias})

    def carry_heads(self) -> Carried:
        """Return the trained heads, the aligned heads of earlier tasks, and the Gaussians."""
        assert self.task is not None
        # Later steps of the task load its trained head from the carried state.
        self.trained.setdefault(self.task.name, self.heads.export(self.task.name))
        earlier = [name for name in self.trained if name != self.task.name]
        aligned = earlier if self.context.step == ALIGN else []
        tensors: dict[str, Tensor] = {}
        for name, head in self.trained.items():
            # Removing a task from a model folder deletes the tensors below heads/NAME/.
            tensors |= {f"{HEADS}/{name}/{key}": tensor.clone() for key, tensor in head.items()}
        for name in aligned:
            for key, tensor in self.heads.export(name).items():
                tensors[f"{HEADS}/{name}/{ALIGNED}.{key}"] = tensor
        for name, gaussians in self.gaussians.items():
            tensors[f"{HEADS}/{name}/{MEANS}"] = gaussians.means.clone()
            tensors[f"{HEADS}/{name}/{FACTORS}"] = gaussians.factors.clone()
        return Carried(tensors, {ALIGNED: aligned})

    def load_carried(self, carried: Carried) -> None:
        """Load the carried state, with aligned heads in use; `begin` restores trained heads."""
        super().load_carried(carried)
        parts: dict[str, dict[str, Tensor]] = {}  # task -> tensors by name
        for path, tensor in carried.tensors.items():
            owner, _, rest = path.partition("/")
            if owner == HEADS:
                name, _, key = rest.rpartition("/")
                parts.setdefault(name, {})[key] = tensor
        self.trained, self.gaussians = {}, {}
        for name, tensors in parts.items():
            if MEANS in tensors:
                means, factors = tensors.pop(MEANS).cpu(), tensors.pop(FACTORS).cpu()
                self.gaussians[name] = ClassGaussians(means, factors)
            self.trained[name] = {k: t for k, t in tensors.items() if not k.startswith(ALIGNED)}
        for name in carried.meta[ALIGNED]:
            keys = {f"{ALIGNED}.{key}": key for key in self.trained.get(name, {})}
            aligned = {key: parts[name][path] for path, key in keys.items() if path in parts[name]}
            if aligned:
                self.heads.restore(name, aligned)
            elif name in self.heads.names:
                raise UserError(
                    f"task {name!r}: the carried state lacks its aligned head; write a new model "
                    "folder with `accrete bundle`"
                )
