"""GEM: the gradient of a step is projected so that it raises the loss of no earlier task.

Lopez-Paz, Ranzato: Gradient Episodic Memory for Continual Learning, NeurIPS 2017.
"""

from __future__ import annotations

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor

from workers.data.batch import Batch
from workers.dist import Group
from workers.methods.bases.reservoir import Reservoir, ReservoirSettings
from workers.methods.train_defaults import TrainDefaults


class GemSettings(ReservoirSettings):
    """Settings of `gem`."""

    replay_batch: PositiveInt = Field(
        500,
        description="number of exemplars of a step, over all earlier tasks; a smaller memory is "
        "replayed as a whole, as in the paper",
    )
    gamma: NonNegativeFloat = Field(
        0.5,
        description="smallest weight of the gradient of each earlier task in a step that is "
        "projected; above 0 a step also lowers the losses that it would not raise",
    )
    eps: PositiveFloat = Field(
        1e-3,
        description="added to the diagonal of the quadratic programme, relative to the largest "
        "squared norm of a gradient",
    )


class Gem(Reservoir[GemSettings]):
    """The optimizer gets g' = g + G^T v instead of the gradient g: equations 8 to 12 of the paper.

    g is the gradient of the cross-entropy on the task's images, and row k of G is its gradient on
    the exemplars of earlier task k. If G g >= 0, g is unchanged. Otherwise v minimises v^T (G G^T +
    eps I) v / 2 + (G g)^T v with v >= gamma. This quadratic programme has a variable for each
    earlier task; it is solved in fp64 on the CPU. Each row of G has an entry for every trained
    weight, so the method suits small networks and short streams. Each step also needs a forward and
    a backward pass of all replayed exemplars. As with `agem`, only plain SGD keeps the projected
    direction.

    Differences from the paper: the memory is a reservoir over all images; the paper keeps the last
    images of each task. eps is relative to the largest squared norm of a row of G, so that the
    programme is well conditioned for gradients of any size. A task may have several epochs.
    """

    name = "gem"
    paper = "Gradient Episodic Memory for Continual Learning, NeurIPS 2017"
    train_defaults = TrainDefaults(lr=1e-4, scratch_lr=1e-3, source="the rates of replay")
    Settings = GemSettings
    per_task = Reservoir.per_task | {"gamma", "eps"}
    later_settings = frozenset({"eps", "gamma"})

    def replay_parts(self, replays: list[Batch], group: Group) -> list[list[Batch]]:
        """Return one part per task with exemplars in the replay batch; see `CombinesGradients`."""
        counts = replays[0].counts
        assert counts is not None
        tasks = [replay.tasks.cpu() for replay in replays]
        parts = []
        for index, count in enumerate(counts):
            if count:
                rows = [(indices == index).nonzero().squeeze(1) for indices in tasks]
                pairs = zip(replays, rows, strict=True)
                parts.append([replay.take(chosen, count) for replay, chosen in pairs])
        return parts

    def combine(self, gradient: Tensor, replayed: Tensor) -> Tensor:
        """See `CombinesGradients`: (P,) and (earlier tasks, P) -> (P,), P trained weights."""
        settings = self.settings
        return project(gradient, replayed, settings.gamma, settings.eps)


def project(gradient: Tensor, references: Tensor, gamma: float, eps: float) -> Tensor:
    """Return g + G^T v, or g if no product of a row of G with g is negative.

    Args:
        gradient: g, (P,).
        references: G, (K, P).
        gamma: Lower bound of v.
        eps: See `solve_dual`; relative to the largest squared norm of a row of G.
    """
    products = references @ torch.cat([references, gradient[None]]).T  # (K, K + 1)
    products = products.cpu().double()
    gram, opposition = products[:, :-1], products[:, -1]
    scale = gram.diagonal().max()
    if not (opposition < 0).any() or not scale > 0:
        return gradient
    weights = solve_dual(gram / scale, opposition / scale, gamma, eps)
    return gradient + weights.to(gradient) @ references


def solve_dual(gram: Tensor, linear: Tensor, gamma: float, eps: float) -> Tensor:
    """Return v >= gamma that minimises v^T (gram + eps I) v / 2 + linear^T v.

    It uses the active-set method of Lawson and Hanson (1974) for u = v - gamma >= 0. A free
    variable is above its bound; the others are at the bound.

    Args:
        gram: Positive semidefinite, (K, K), fp64.
        linear: (K,), fp64.
        gamma: Lower bound.
        eps: Added to the diagonal; the sum must be positive definite.
    """
    matrix = gram + eps * torch.eye(len(gram), dtype=gram.dtype)
    vector = linear + gamma * matrix.sum(1)
    tolerance = 1e-12 * float(vector.abs().max() + matrix.abs().max())
    u = torch.zeros_like(vector)
    free = torch.zeros(len(u), dtype=torch.bool)
    for _ in range(10 * len(u)):  # each round frees a variable; the limit is a safeguard
        descent = (-(matrix @ u + vector)).masked_fill(free, -torch.inf)
        if float(descent.max()) <= tolerance:
            break
        free[descent.argmax()] = True
        while True:
            target = torch.zeros_like(u)
            rows = free.nonzero().squeeze(1)
            target[rows] = torch.linalg.solve(matrix[rows][:, rows], -vector[rows])
            blocked = free & (target <= 0)
            if not blocked.any():
                u = target
                break
            # Move until the first variable reaches its bound, and fix the variables at their
            # bounds.
            distances = (u - target)[blocked].clamp(min=torch.finfo(u.dtype).tiny)
            shares = u[blocked] / distances
            u = (u + shares.min() * (target - u)).clamp(min=0)
            free &= ~(blocked & (u <= tolerance))
            u[~free] = 0
    return u + gamma
