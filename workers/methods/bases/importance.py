"""Penalties that keep weights near an anchor, weighted by their importance for earlier tasks."""

from __future__ import annotations

import heapq
from abc import abstractmethod
from collections.abc import Callable
from itertools import chain
from typing import ClassVar

import torch
from torch import Tensor, nn

from workers.data.batch import Batch
from workers.methods.base import ParamGroup, Progress, S, StepContext
from workers.methods.bases.class_incremental import ClassIncremental
from workers.methods.finetune import restore_network, save_network, weight_groups
from workers.model.anchors import AnchoredWeights, unflatten
from workers.rng import derive_seed
from workers.storage.taskstate import Carried, TaskState, select_with_prefix

IMPORTANCE = "importance/"  # prefix of names in the carried state; a name of `save_network` follows


class WeightImportance(ClassIncremental[S]):
    """A chain that carries the network and the importance of each weight for earlier tasks.

    All weights of the backbone are protected. So are the heads of earlier tasks, except in scenario
    `task`, where they are no longer trained.
    """

    family = "regularization"
    keeps = "a head"
    carries: ClassVar[tuple[str, ...]] = ("weights", "heads", "importance")
    training_only: ClassVar[tuple[str, ...]] = (f"{IMPORTANCE}*",)
    needs_states = True  # for the head of a base task
    scenarios = frozenset({"task", "class", "domain"})
    shares_head = True
    freezes_backbone = False
    may_forget = True
    # The formula of `curvature()`, as a text for warnings. In a step of plain SGD, the penalty
    # moves a weight towards its anchor by lr * curvature * importance times their distance.
    stiffness: ClassVar[str] = "lambda"

    def __init__(self, backbone: nn.Module, settings: S, seed: int):
        super().__init__(backbone, settings, seed)
        # Name in `protected` -> importance. `begin` takes the tensors from the carried state, which
        # is on the device. They are constant while a step trains.
        self.importance: dict[str, Tensor] = {}

    @abstractmethod
    def curvature(self) -> float:
        """Return the second derivative of the penalty with respect to a weight of importance 1."""

    def protected(self) -> dict[str, nn.Parameter]:
        """Return the protected parameters, by their names in `save_network`."""
        parameters = {}
        for name, parameter in self.backbone.named_parameters():
            parameters[f"backbone/{name}"] = parameter
        if self.scenario != "task":
            for task in self.head_names():
                for name, parameter in self.heads[task].named_parameters():
                    parameters[f"heads/{task}/{name}"] = parameter
        return parameters

    def choose_image_keys(self, count: int, tag: str) -> set[str]:
        """Return the keys of `count` random images of the task, the same on all ranks."""
        assert self.task is not None
        keys = chain(*self.context.data.keys(self.task).values())
        chosen = heapq.nsmallest(count, keys, lambda key: derive_seed(self.seed, tag, key))
        return set(chosen)

    @torch.enable_grad()
    def average_over_images(
        self, keys: set[str], add: Callable[[list[Tensor], list[nn.Parameter], Batch, str], None]
    ) -> dict[str, Tensor]:
        """Return the mean over images of a value per protected weight, by parameter name.

        The network is in evaluation mode, and images are not augmented. Each rank adds the values
        for its part of the images.

        Args:
            keys: Keys of the images.
            add: Function (sums, parameters, batch, key) that adds the values of one image to the
                sums, in place. The batch has only this image, and `key` is its key.
        """
        self.eval()
        parameters = self.protected()
        for parameter in parameters.values():
            parameter.requires_grad_(True)
        sums = [torch.zeros_like(parameter) for parameter in parameters.values()]
        feed = self.context.data.feed("train")
        for batch in feed.evaluate():
            for row, key in enumerate(batch.keys or []):
                if key in keys:
                    one = slice(row, row + 1)
                    image = Batch(
                        batch.images[one], batch.labels[one], batch.tasks[one], batch.draw
                    )
                    add(sums, list(parameters.values()), image, key)
        means = [feed.group.sum(total) / len(keys) for total in sums]
        return dict(zip(parameters, means, strict=True))

    def task_logits(self, images: Tensor) -> Tensor:
        """Return fp32 logits (b, K) of images (b, 3, H, W), over the classes that the loss uses."""
        assert self.task is not None
        features = self.features(images)
        logits = self.heads[self.task.name](features)
        if self.scenario != "task":
            logits = self.all_logits(features)
        return logits.float()  # type: ignore[no-any-return]

    def finish(self) -> tuple[TaskState, Carried]:
        """Return the task's state and the carried state.

        After the last step the task's head is only in the task's state, before that also in the
        carried state. Older heads are carried if they are still trained (in all scenarios but
        `task`).
        """
        assert self.task is not None
        heads = []
        if self.scenario != "task":
            heads = [name for name in self.head_names() if name != self.task.name]
        if self.context.step != self.steps[-1].name:
            heads.append(self.task.name)
        tensors = save_network(self, heads) | copy_with_prefix(IMPORTANCE, self.importance)
        return self.state(), Carried(tensors)

    def warnings(self) -> list[str]:
        optim = self.context.optim
        if self.context.step != "train" or not self.importance or optim.optimizer != "sgd":
            return []
        largest = max(float(importance.max()) for importance in self.importance.values())
        stiffness = optim.lr * self.curvature() * largest
        if stiffness <= 1:
            return []
        (setting,) = self.penalty_terms.values()
        return [
            f"lr * {self.stiffness} * largest importance is {stiffness:.2g}: plain SGD diverges "
            f"above 2; lower {setting} or train.lr, or use adamw"
        ]

    # ---- serving ---------------------------------------------------------------------------------
    def load_carried(self, carried: Carried) -> None:
        """Load the carried weights, and carried heads in place of those in the tasks' states."""
        super().load_carried(carried)
        owners = ("backbone/", "heads/")
        restore_network(self, {n: t for n, t in carried.tensors.items() if n.startswith(owners)})


class OneAnchor(WeightImportance[S]):
    """Adds w * sum over weights i of Omega_i (theta_i - theta*_i)^2 to the loss.

    theta* are the weights at the start of the task, so only Omega must be carried. The gradient of
    the penalty is added once in each optimizer step, after the sum over ranks, in closed form.
    """

    stiffness = "2 * weight of the penalty"

    @abstractmethod
    def weight(self) -> float:
        """Return w, the weight of the penalty."""

    def curvature(self) -> float:
        return 2 * self.weight()

    def begin(self, context: StepContext) -> list[ParamGroup]:
        if context.carried is not None:
            self.load_carried(context.carried)
            self.importance = select_with_prefix(context.carried.tensors, IMPORTANCE)
        groups = super().begin(context) + weight_groups(self.backbone, context.optim)
        self.anchors = {name: p.detach().clone() for name, p in self.protected().items()}
        self.anchored: AnchoredWeights | None = None
        if context.step == "train" and self.importance and self.weight():
            self.anchored = AnchoredWeights(self.protected(), self.anchors, self.importance)
            # views of the vectors, so that the tensors exist once
            self.anchors |= self.anchored.by_name(self.anchored.anchors)
            self.importance = self.anchored.by_name(self.anchored.importance)
        return groups

    def loss(self, batch: Batch, progress: Progress) -> tuple[Tensor, dict[str, Tensor]]:
        loss, terms = super().loss(batch, progress)
        if self.anchored is None:
            return loss, terms
        penalty = self.penalty()
        return loss + penalty, {**terms, "penalty": penalty}

    @torch.no_grad()
    def penalty(self) -> Tensor:
        """Return the penalty, a scalar without a gradient. There must be earlier tasks."""
        assert self.anchored is not None
        return self.weight() * self.anchored.weighted_square()

    @torch.no_grad()
    def after_backward(self) -> None:
        """Add the gradient of the penalty."""
        if self.anchored is None:
            return
        weights = self.anchored.weights
        importance = unflatten(self.anchored.importance, weights)
        distance = unflatten(self.anchored.distance(), weights)
        for weight, factor, difference in zip(weights, importance, distance, strict=True):
            assert weight.grad is not None
            weight.grad.addcmul_(factor, difference, value=2 * self.weight())


def copy_with_prefix(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of tensors, with `prefix` before their names."""
    return {prefix + name: tensor.detach().clone() for name, tensor in tensors.items()}
