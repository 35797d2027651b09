"""EASE: an adapter set for each task, and class prototypes in the feature spaces of all sets.

Zhou, Sun, Ye, Zhan: Expandable Subspace Ensemble for Pre-Trained Model-Based Class-Incremental
Learning, CVPR 2024.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor, nn
from torch.nn import functional as F

from workers.data.features import extract_features
from workers.errors import UserError
from workers.job import Neutral
from workers.methods.base import OptimPlan, ParamGroup, Step, StepContext
from workers.methods.bases.statistics import class_means
from workers.methods.bases.task_adapters import (
    ADAPTERS,
    TRAIN,
    TaskAdapters,
    TaskAdapterSettings,
)
from workers.methods.train_defaults import TrainDefaults
from workers.model.cosine import CosineHeads
from workers.storage.taskstate import Carried, TaskState

SUBSPACES = "subspaces"


class EaseSettings(TaskAdapterSettings):
    """Settings of `ease`."""

    alpha: NonNegativeFloat = Field(
        0.1,
        description="weight of the cosines in the subspaces of other tasks, divided by their "
        "number; 0: a class is scored in the subspace of its own task alone",
    )
    head_scale: Annotated[PositiveFloat, Neutral(1.0)] = Field(
        1.0,
        description="initial factor of the cosines in the loss; 1 in the released code, which lets "
        "the loss fall only little; 16 or more lets it fall",
    )


class PrototypeHead(nn.Module):
    """Prototypes (K, J, d) of K classes in J subspaces."""

    def __init__(self, classes: int, subspaces: int, width: int):
        super().__init__()
        self.out_features = classes
        self.weight = nn.Parameter(torch.zeros(classes, subspaces, width))


class PrototypeHeads(CosineHeads):
    """The prototypes of finished tasks, and a cosine head for the task in training."""

    def restore(self, task: str, tensors: dict[str, Tensor]) -> None:
        layer = PrototypeHead(*tensors["weight"].shape)
        layer.load_state_dict(tensors)
        layer.requires_grad_(False)
        self._append(task, layer)  # type: ignore[arg-type]


class Ease(TaskAdapters[EaseSettings]):
    """A chain of two steps: `train`, `statistics`. f_j is the backbone with the adapters of task j.

    - `train` trains the task's adapters from their initial values, and a cosine head that is
      discarded afterwards.
    - `statistics` computes the prototypes W[c, j], the means of f_j over the images of class c, for
      each class of the task and each j up to the task itself. Prototypes are never updated.

    W[i, j] are the prototypes of all classes of task i in the subspace of f_j. If j > i, the images
    of task i are no longer available when f_j exists. Then W[i, j] = softmax(cos(W[i, i], W[N, i]))
    W[N, j], where N are the classes of the tasks from j on. These prototypes are computed when they
    are needed, and not stored. The logit of class c of task i is sum_j w_ij cos(f_j, W[c, j]), with
    w_ij = 1 for j = i, else alpha divided by the number of the other tasks.

    If the task is given, only its own and earlier subspaces score its classes, as at the end of
    the task's training, so its logits never change. Stored for task t = 0, 1, ...: adapters, and
    (t + 1) d floats per class, with feature width d. An image costs a forward pass for each
    subspace.
    """

    name = "ease"
    has_constant_step = True
    keeps = "adapters, class means"
    paper = (
        "Expandable Subspace Ensemble for Pre-Trained Model-Based Class-Incremental Learning, "
        "CVPR 2024"
    )
    Settings = EaseSettings
    train_defaults = TrainDefaults(
        lr=0.025,
        optimizer="sgd",
        weight_decay=5e-4,
        warmup=0.0,
        floor=0.0,
        epochs=20,
        batch_size=48,
        source="released code of EASE on CIFAR-100",
    )
    steps = (Step(TRAIN), Step("statistics", trains=False))
    scenarios = frozenset({"task", "class", "domain"})
    per_task = frozenset({"dropout", "head_scale"})

    @classmethod
    def ignored_settings(cls, step: str) -> frozenset[str]:
        return frozenset({"alpha"}) if step == TRAIN else cls.per_task | {"alpha"}

    def __init__(self, backbone: nn.Module, settings: EaseSettings, seed: int):
        super().__init__(backbone, settings, seed)
        self.heads = PrototypeHeads(self.heads.width, scale=settings.head_scale)
        self.subspaces: dict[str, tuple[str, ...]] = {}  # task -> it and all earlier tasks
        self.competing: tuple[torch.device, Tensor] | None = None  # cache of `join_classifiers`

    # ---- training --------------------------------------------------------------------------------
    def begin(self, context: StepContext) -> list[ParamGroup]:
        groups = super().begin(context)
        name = context.task.name
        self.subspaces.pop(name, None)
        self.competing = None
        if not self.is_learning:
            self.subspaces[name] = tuple(self.loaded)
            self.read_prototypes(context)
        return groups

    def head_groups(self, optim: OptimPlan, names: list[str]) -> list[ParamGroup]:
        assert self.task is not None
        weight = self.heads[self.task.name].weight
        return [
            {"name": "head", "params": [weight], "weight_decay": optim.weight_decay},
            {"name": "head.scale", "params": [self.heads.scale], "weight_decay": 0.0},
        ]

    def read_prototypes(self, context: StepContext) -> None:
        """Replace the head of the task by the class means in all subspaces so far."""
        self.eval()
        name = context.task.name
        self.activate_task(name)
        batch = extract_features(self.features, context.data.feed("train"))
        means = class_means(batch.features, batch.labels, context.task.num_classes)
        prototypes = means.float().unflatten(1, (-1, self.heads.width))
        self.heads.restore(name, {"weight": prototypes})

    def finish(self) -> tuple[TaskState, Carried]:
        assert self.task is not None
        own = self.export_adapters()
        if self.is_learning:
            return self.state(), Carried({f"{ADAPTERS}/{key}": t for key, t in own.items()})
        meta = {SUBSPACES: list(self.subspaces[self.task.name])}
        return self.state(copies=own, meta=meta), Carried()

    # ---- serving ---------------------------------------------------------------------------------
    def load_task(self, state: TaskState) -> None:
        names = state.meta.get(SUBSPACES, [])
        shape = tuple(state.head["weight"].shape) if "weight" in state.head else ()
        expected = (len(state.classes), len(names), self.heads.width)
        if state.method == self.name and (not names or shape != expected):
            raise UserError(
                f"task {state.task!r}: its state has prototypes of shape {shape} and names "
                f"{len(names)} subspaces on a backbone of width {self.heads.width}; export it "
                "again, or write a new model folder with `accrete bundle`"
            )
        super().load_task(state)
        self.subspaces[state.task] = tuple(names)
        self.competing = None

    def serving_weights(self, task: str) -> dict[str, Tensor]:
        """Return the adapters of the subspaces of `task`, (J, S, ...) by name."""
        if self.is_learning and self.task is not None and self.task.name == task:
            return self.find_adapters(task)
        names = self.subspaces[task]
        missing = [name for name in names if name not in self.loaded]
        if missing:
            raise UserError(
                f"task {task!r}: its prototypes need the adapters of task {missing[0]!r}, which is "
                "not loaded; load that task, too"
            )
        sets = [self.find_adapters(name) for name in names]
        return {key: torch.stack([tensors[key] for tensors in sets]) for key in sets[0]}

    def features(self, images: Tensor) -> Tensor:
        """Return [f_0 .. f_t] (b, (t + 1) d) of images (b, 3, H, W); only f_t in training."""
        adapters = self.weight_overrides
        if not adapters or adapters["down"].dim() == 3:  # (S, m, d): one set, of the current task
            return self.adapted(images, adapters)
        parts = []
        for subspace in range(len(adapters["down"])):
            own = {name: tensor[subspace] for name, tensor in adapters.items()}
            parts.append(self.adapted(images, own))
        return torch.cat(parts, 1)

    def logits(self, images: Tensor, task: str | None) -> Tensor:
        own = self.task.name if self.task is not None and self.is_learning else None
        if task is None:
            return self.compute_all_answers(images, own)
        if task == own:
            return super().logits(images, task)
        self.heads[task]  # raises `UserError` if the task is not loaded
        self.activate_task(task)
        units = normalise_parts(self.features(images), len(self.subspaces[task]))
        return F.linear(units, self.weigh(self.heads[task].weight, -1))

    def compute_all_answers(self, images: Tensor, own: str | None) -> Tensor:
        """Return logits of all classes so far, (b, A).

        Args:
            images: Images (b, 3, H, W).
            own: The task in training, which has no prototypes yet; its cosine head is used.
        """
        names = [name for name in self.class_slices() if name != own]
        parts = []
        if names:
            self.activate_task(names[-1])
            classifier = self.join_classifiers(names)
            parts.append(F.linear(normalise_parts(self.features(images), len(names)), classifier))
        if own is not None:
            self.activate_task(own)
            head: nn.Module = self.heads[own]
            parts.append(head.similarity(self.features(images)))  # type: ignore[operator]
        return torch.cat(parts, 1)

    @torch.no_grad()
    def join_classifiers(self, names: Sequence[str]) -> Tensor:
        """Return weights (A, T d) of all A classes over unit-length features of all T subspaces."""
        if self.competing is None or self.competing[0] != self.device:
            for index, name in enumerate(names):
                if self.subspaces[name] != tuple(names[: index + 1]):
                    raise UserError(
                        f"task {name!r}: its prototypes were computed in the subspaces of "
                        f"{list(self.subspaces[name])}, and here the tasks are {list(names)}; load "
                        "the tasks of one run, all of them up to the last"
                    )
            prototypes = complete_prototypes([self.heads[name].weight for name in names])
            weights = [self.weigh(part, index) for index, part in enumerate(prototypes)]
            self.competing = (self.device, torch.cat(weights))
        return self.competing[1]

    def weigh(self, prototypes: Tensor, own: int) -> Tensor:
        """Return the weights of a task's classes over unit-length features, (K, J d).

        Args:
            prototypes: Prototypes in J subspaces, (K, J, d).
            own: Position of the task's own subspace, which has weight 1.
        """
        factors = torch.full_like(prototypes[0, :, :1], self.settings.alpha)  # (J, 1)
        factors = factors / max(len(factors) - 1, 1)
        factors[own] = 1
        return (factors * F.normalize(prototypes, dim=2)).flatten(1)

    def flops_share(self, state: TaskState) -> float:
        return len(state.meta.get(SUBSPACES, [""])) * self.compute_relative_flops()


def normalise_parts(features: Tensor, parts: int) -> Tensor:
    """Scale each of the J parts of features (b, J d) to unit length."""
    return F.normalize(features.float().unflatten(1, (parts, -1)), dim=2).flatten(1)


def complete_prototypes(stored: Sequence[Tensor]) -> list[Tensor]:
    """Return the prototypes of all tasks in all subspaces, T tensors (K, T, d).

    The prototypes of task i in the subspace of a later task j are weighted sums over the classes of
    the tasks from j on. The weights are a softmax of cosines in the subspace of i.

    Args:
        stored: Prototypes of each task in its own and earlier subspaces, (K, t + 1, d) for task t.
    """
    completed = []
    for task, prototypes in enumerate(stored):
        blocks = [prototypes]
        for later in range(task + 1, len(stored)):
            known = torch.cat([other[:, task] for other in stored[later:]])  # (N, d)
            target = torch.cat([other[:, later] for other in stored[later:]])  # (N, d)
            cosines = F.normalize(prototypes[:, task], dim=1) @ F.normalize(known, dim=1).T
            blocks.append((cosines.softmax(1) @ target)[:, None])
        completed.append(torch.cat(blocks, 1))
    return completed
