"""Optional protocols for abilities that only some methods have, checked with `isinstance`.

A method takes part by defining the functions of a protocol; it does not inherit from it. The loop
(`workers/loop.py`), the evaluation and the server use them.
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
    """A rehearsal memory: the feed contains samples of earlier tasks besides the task's own."""

    def memory(self, context: StepContext) -> dict[str, list[str]]:
        """Return task -> keys of the images in its train split that this step reads.

        If the result has no keys of the current task, the step reads all images of this task; with
        `trains_on: seen` the same holds for each earlier task. The class must set `reads` or
        `trains_on` to `seen`, so that the stage waits for the data of earlier tasks. The loop calls
        this method before `begin`.
        """


@runtime_checkable
class ReplaysSamples(RemembersSamples, Protocol):
    """Each training step has a second batch, drawn from the memory: `Batch.replay`.

    In a step that trains, `memory` then selects only the samples of the replay batch. The batch
    itself has all samples of the task and no others, even if `memory` selects a subset.
    """

    def replay_draws(self) -> tuple[int, ...]:
        """Return the number of samples in each independent draw from the memory.

        A replay batch has the samples of all draws, one draw after the other. If there are no
        draws, the result of `memory` must be empty, too. The loop calls this method before `begin`,
        and only if `memory` returns keys.
        """

    def replay_loss(self, batch: Batch, progress: Progress) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the scalar that `batch.replay` adds to the loss, and its detached terms by name.

        The scalar is a mean over the replay batch, as `Method.loss` is a mean over `batch`.
        """


@runtime_checkable
class CombinesGradients(ReplaysSamples, Protocol):
    """The gradients of `replay_loss` and `loss` are separate, and the method combines them.

    All trained parameters together are one vector of P entries. A step without a replay batch uses
    the gradient of `loss` alone.
    """

    def replay_parts(self, replays: list[Batch], group: Group) -> list[list[Batch]]:
        """Split the replay batch into parts, each of which gets its own gradient.

        When this method is called, the parameters have the gradient of `loss` over the global
        batch.

        Args:
            replays: This rank's micro-batches of the replay batch.
            group: Group of this rank, for collective calls. All ranks make the same calls.

        Returns:
            For each part, this rank's micro-batches of the part, as many as `replays`. The number
            of parts is the same on all ranks. The weights (`Batch.weight`) of a part add up to 1
            over all its micro-batches on all ranks.
        """

    def combine(self, gradient: Tensor, replayed: Tensor) -> Tensor:
        """Return the gradient of the step, (P,); the same on all ranks.

        Args:
            gradient: Gradient of `loss` over the global batch, (P,).
            replayed: Gradients of `replay_loss` over each part, (parts, P).
        """


@runtime_checkable
class PrecomputesFeatures(Protocol):
    """A part of the forward pass is the same in every epoch and can be cached."""

    def precompute(self, feed: Feed) -> None:
        """Cache constant values in the feed (`Feed.cache_features`, `Feed.add_features`).

        The loop calls this method before the first optimizer step, also in a resumed stage: once
        with the training feed, and once with the validation feed, if there is one. By then
        `requires_grad` is set only on the parameters that the step trains.
        """


@runtime_checkable
class UsesSharpness(Protocol):
    """Sharpness-aware steps: the gradient is computed after the weights were moved uphill."""

    def sam_radius(self) -> float:
        """Return rho of adaptive sharpness-aware steps (`optim.ascend`); 0 for a plain step."""


@runtime_checkable
class InfersTask(Protocol):
    """The method infers the task of an image, and then predicts as if the task were given.

    `logits` returns `answer` for the choices of `infer`, at least if the task is not given. The
    evaluation records the choices.
    """

    def candidates(self) -> dict[str, tuple[str, ...]]:
        """Return the candidates of `infer`, each with the tasks for which it is the right choice.

        The result is empty if, under the method's settings, the task is given or the outputs of all
        tasks compete.
        """

    def infer(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the index in `candidates` and a confidence in [0, 1] for each image, (b,) each."""

    def answer(self, images: Tensor, choices: Tensor, task: str | None) -> Tensor:
        """Return the logits of each image under its candidate.

        Args:
            images: Images (b, 3, H, W).
            choices: Index of each image's candidate in `candidates`, (b,).
            task: The task if it is given, else None.
        """


@runtime_checkable
class SharesForward(Protocol):
    """Tasks share a part of the forward pass, so that a mixed batch computes it once."""

    def grouped_logits(
        self, images: Tensor, rows: Mapping[str, Tensor | slice]
    ) -> dict[str, Tensor]:
        """Return task -> logits of the images that are served with this task.

        They equal those of `logits` up to the order of summation.

        Args:
            images: Images (b, 3, H, W) of all tasks.
            rows: Task -> its rows in `images`.
        """


def grouped_logits(
    method: Method, images: Tensor, rows: Mapping[str, Tensor | slice]
) -> dict[str, Tensor]:
    """Return task -> logits of the images that are served with this task.

    Parts of the forward pass that tasks share are computed once. The logits equal those of
    `Method.logits` up to the order of summation.

    Args:
        method: The method.
        images: Images (b, 3, H, W) of all tasks.
        rows: Task -> its rows in `images`.
    """
    if isinstance(method, SharesForward):
        return method.grouped_logits(images, rows)
    cls = type(method)
    has_plain_logits = cls.logits in (Method.logits, ClassIncremental.logits)
    if has_plain_logits and cls.serving_weights is Method.serving_weights:
        features = method.features(images)  # tasks differ only in their heads
        return {task: method.heads[task](features[index]) for task, index in rows.items()}
    return {task: method.logits(images[index], task) for task, index in rows.items()}


def list_candidates(method: Method) -> dict[str, tuple[str, ...]]:
    """Return the candidates for the task inference of `method` (`InfersTask.candidates`), or {}."""
    return method.candidates() if isinstance(method, InfersTask) else {}
