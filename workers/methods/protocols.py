"""Small protocols for features of only some methods, checked with `isinstance` where they are used.

A method takes part by defining the functions of a protocol; it does not inherit from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from torch import Tensor

from workers.data.batch import Batch
from workers.data.feed import Feed
from workers.dist import Group
from workers.methods.base import Method, Progress, StepContext
from workers.methods.bases.class_incremental import ClassIncremental


@runtime_checkable
class RemembersSamples(Protocol):
    """A rehearsal memory: the feed gives samples of earlier tasks in addition to the task's own."""

    def memory(self, context: StepContext) -> dict[str, list[str]]:
        """Return the keys in the train split of each task that this step trains on.

        If the current task is named, the feed gives only these keys of it. The class needs `reads =
        "seen"`. It is called before `begin`.
        """


@runtime_checkable
class ReplaysSamples(RemembersSamples, Protocol):
    """Each training step has a second batch, drawn from the memory: `Batch.replay`.

    The batch of the step then has the task's own samples only.
    """

    def replay_draws(self) -> tuple[int, ...]:
        """Return the number of samples in each independent draw from the memory.

        A replay batch has the samples of all draws, one draw after the other. It is called before
        `begin`. The result is empty if nothing is replayed; `memory` is then empty, too.
        """

    def replay_loss(self, batch: Batch, progress: Progress) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the scalar that `batch.replay` adds to the loss, and its detached terms by name.

        It is a mean over the replay batch, as `Method.loss` is over `batch`.
        """


@runtime_checkable
class CombinesGradients(ReplaysSamples, Protocol):
    """The gradients of `replay_loss` are kept apart from that of `loss`; the method combines them.

    All trained parameters together are one vector of P entries. A step without a replay batch uses
    the gradient of `loss` alone.
    """

    def replay_parts(self, replays: list[Batch], group: Group) -> list[list[Batch]]:
        """Return the parts of the replay batch that have a gradient each.

        It is called when parameters have the gradient of `loss` over the global batch.

        Args:
            replays: This rank's micro-batches of the replay batch.
            group: The rank. All ranks make the same calls.

        Returns:
            For each part this rank's micro-batches of it, as many as `replays`. The number of parts
            is the same on all ranks. The weights of a part add up to 1 over all ranks.
        """

    def combine(self, gradient: Tensor, replayed: Tensor) -> Tensor:
        """Return the gradient of the step, (P,); the same on all ranks.

        Args:
            gradient: Gradient of `loss` over the global batch, (P,).
            replayed: Gradients of `replay_loss` over each part, (parts, P).
        """


@runtime_checkable
class PrecomputesFeatures(Protocol):
    """Some of the forward pass is the same in every epoch."""

    def precompute(self, feed: Feed) -> None:
        """Cache constant values in the feed (`Feed.cache_features`).

        It is called before the first step, also of a resumed stage, with the feed of the epochs and
        with that of validation, when the trained parameters are known.
        """


@runtime_checkable
class UsesSharpness(Protocol):
    """Sharpness-aware steps: the gradient is taken uphill of where a step starts."""

    def sam_radius(self) -> float:
        """Return rho of adaptive sharpness-aware steps (`optim.ascended`); 0 for a plain step."""


@runtime_checkable
class InfersTask(Protocol):
    """The method infers the task of an image, and then predicts as if the task were given.

    `logits` is `answer` with the picks of `infer`; evaluation records the picks.
    """

    def candidates(self) -> dict[str, tuple[str, ...]]:
        """Return the candidates of `infer`, each with the tasks for which it is right.

        The result is empty if the method, with its settings, is given the task or lets all outputs
        compete.
        """

    def infer(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Images (b, 3, H, W) -> index among `candidates` (b,), and confidence in [0, 1] (b,)."""

    def answer(self, images: Tensor, choices: Tensor, task: str | None) -> Tensor:
        """Return the logits, had each image been of the candidate at its index in `choices`."""


@runtime_checkable
class SharesForward(Protocol):
    """Tasks share a part of the forward pass, so that a mixed batch computes it once."""

    def grouped_logits(
        self, images: Tensor, rows: Mapping[str, Tensor | slice]
    ) -> dict[str, Tensor]:
        """Return the logits of each task on its rows of images (b, 3, H, W).

        They equal those of `logits` up to the order of summation.
        """


def grouped_logits(
    method: Method, images: Tensor, rows: Mapping[str, Tensor | slice]
) -> dict[str, Tensor]:
    """Return the logits of each task on its rows of images (b, 3, H, W).

    Parts that tasks share are computed once. The logits equal those of `Method.logits` up to the
    order of summation.
    """
    if isinstance(method, SharesForward):
        return method.grouped_logits(images, rows)
    cls = type(method)
    has_plain_logits = cls.logits in (Method.logits, ClassIncremental.logits)
    if has_plain_logits and cls.serving_weights is Method.serving_weights:
        features = method.features(images)  # tasks differ in heads alone
        return {task: method.heads[task](features[index]) for task, index in rows.items()}
    return {task: method.logits(images[index], task) for task, index in rows.items()}


def list_candidates(method: Method) -> dict[str, tuple[str, ...]]:
    """Return the candidates for the task inference of `method` (`InfersTask.candidates`), or {}."""
    return method.candidates() if isinstance(method, InfersTask) else {}
