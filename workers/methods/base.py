"""The contract of every continual-learning method: pure PyTorch, usable without Ray.

    class Mine(Method):
        name = "mine"
        ...
The life of a method during one step of one task (`workers/loop.py` drives it):

    method = Mine(backbone, settings, seed)          # backbone: a fresh copy, never shared with another task
    for state in earlier_states: method.load(state)  # only what the method carries, see `carries`
    groups = method.begin(task, step, carried, rates)
    for batch in feed:
        loss, terms = method.loss(batch, progress)
        loss.backward(); method.after_backward(); optimizer.step(); method.after_step(progress)
    state, carried = method.finish()

and while it serves: `method.load(state)` for each task, then `method.logits(images, task)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workers.data.draw import Draw
from workers.errors import UserError
from workers.job import Frozen, Task
from workers.model.heads import Heads
from workers.model.vit import digest_of
from workers.taskstate import Carried, TaskState


@dataclass(frozen=True)
class Step:
    """One step of a task. `trains=False`: no epochs, `begin` and `finish` do it all (herding, pruning). `after`: the steps
    of the same task that it waits for; None means the one before it in the list."""

    name: str
    trains: bool = True
    after: tuple[str, ...] | None = None


@dataclass
class Batch:
    """What a rank holds of one global batch.

    images: float (b, 3, H, W), augmented and normalised. labels: (b,) positions in the class list of each sample's task.
    tasks: (b,) indices into the tasks being trained on. targets: soft targets (b, num_classes) under mixup, cutmix or
    smoothing, only where all samples belong to one task; else None. draw: the noise of this step.
    weight: this rank's (micro-batch's) share of the global batch; 0 where a rank got a stand-in sample in a ragged last
    batch. The loop multiplies the loss by it and sums gradients over micro-batches and ranks.
    """

    images: Tensor
    labels: Tensor
    tasks: Tensor
    draw: Draw
    targets: Tensor | None = None
    keys: list[str] | None = None
    weight: float = 1.0

    def __len__(self) -> int:
        return self.images.shape[0]


@dataclass(frozen=True)
class Progress:
    """Where training stands: epoch and step counted from 0, step inside the epoch, and how many there are of each."""

    epoch: int
    step: int
    epochs: int
    steps_per_epoch: int

    @property
    def total(self) -> int:
        return self.epochs * self.steps_per_epoch

    @property
    def done(self) -> int:
        return self.epoch * self.steps_per_epoch + self.step


@dataclass(frozen=True)
class Rates:
    """What `begin` may need to choose learning rates: the configured peak and decay, the global batch size, and
    `mean_rate_steps` = sum over all steps of the schedule's factor (so lr * mean_rate_steps = the way one entry can go)."""

    lr: float
    weight_decay: float
    batch_size: int
    mean_rate_steps: float


class MethodSettings(Frozen):
    """Base of a method's own settings; a subclass lists its hyper-parameters with ranges and defaults."""


class Method(nn.Module):
    """Base class: one backbone, one head per task. Subclasses override what differs."""

    name: ClassVar[str]
    paper: ClassVar[str] = ""
    carries: ClassVar[tuple[str, ...]] = ()  # nothing carried: the tasks form a star
    steps: ClassVar[tuple[Step, ...]] = (Step("train"),)
    scenarios: ClassVar[frozenset[str]] = frozenset({"task"})
    revision: ClassVar[int] = 1  # raise it when results change
    trains_on: ClassVar[Literal["task", "seen"]] = "task"  # "seen": all tasks so far, as joint training does
    freezes_backbone: ClassVar[bool] = True
    forgets: ClassVar[bool] = False  # False is a promise: bit-exact logits for ever
    starts_as_backbone: ClassVar[bool] = True  # before its first step a task's features are those of the backbone
    Settings: ClassVar[type[MethodSettings]] = MethodSettings

    @classmethod
    def rewrites(cls) -> bool:
        """True where a later stage can change the answers on earlier tasks, so that each row of the matrix is measured."""
        return bool(cls.carries) or cls.trains_on == "seen"

    def __init__(self, backbone: nn.Module, settings: MethodSettings, seed: int):
        super().__init__()
        self.backbone = backbone
        self.settings = settings
        self.seed = seed
        self.backbone_digest = digest_of(backbone)
        self.heads = Heads(backbone.num_features)  # type: ignore[arg-type]
        self.task: Task | None = None
        self.feed_of: Callable[[str, bool], Any]  # set by the loop: (split, training) -> Feed over this step's tasks
        if self.freezes_backbone:
            self.backbone.requires_grad_(False)

    # ---- training ----------------------------------------------------------------------------------------------------
    def begin(self, task: Task, step: str, carried: Carried | None, rates: Rates, tasks: tuple[Task, ...]) -> list[dict[str, Any]]:
        """Prepares for `step` of `task` and returns the optimizer's parameter groups (`params`, optional `lr`,
        `weight_decay`, `name`). `tasks`: all whose samples the feed will give, in the order of `Batch.tasks`."""
        self.task, self.training_tasks = task, tasks
        for each in tasks:
            self.heads.add(each.name, each.num_classes, self.seed)
        return self.head_groups(rates, [t.name for t in tasks])

    def head_groups(self, rates: Rates, names: list[str]) -> list[dict[str, Any]]:
        heads = [self.heads[name] for name in names]
        return [
            {"name": "head.weight", "params": [h.weight for h in heads], "weight_decay": rates.weight_decay},
            {"name": "head.bias", "params": [h.bias for h in heads], "weight_decay": 0.0},
        ]

    def loss(self, batch: Batch, progress: Progress) -> tuple[Tensor, dict[str, Tensor]]:
        """The scalar to minimise (a mean over the batch) and its named terms, detached."""
        loss = self.classification_loss(self.features(batch.images), batch)
        return loss, {"ce": loss.detach()}

    def features(self, images: Tensor) -> Tensor:
        """images (b, 3, H, W) -> class-token features after the final norm (b, d)."""
        return self.backbone(images)

    def classification_loss(self, features: Tensor, batch: Batch) -> Tensor:
        """Cross-entropy of each sample under the head of its own task, a mean over the batch."""
        if len(self.training_tasks) == 1:
            logits = self.heads[self.training_tasks[0].name](features)
            return F.cross_entropy(logits.float(), batch.labels if batch.targets is None else batch.targets)
        total = features.new_zeros((), dtype=torch.float32)
        for index, task in enumerate(self.training_tasks):
            rows = (batch.tasks == index).nonzero().squeeze(1)
            if len(rows):
                logits = self.heads[task.name](features[rows]).float()
                total = total + F.cross_entropy(logits, batch.labels[rows], reduction="sum")
        return total / len(batch)

    def after_backward(self) -> None:
        """Between backward and the optimizer's step: gate gradients."""

    def after_step(self, progress: Progress) -> None:
        """After the optimizer's step: restore locked entries, clamp, anneal."""

    def measures(self) -> dict[str, float]:
        """Named numbers worth a curve per epoch (mask densities, capacity)."""
        return {}

    def warnings(self) -> list[str]:
        """Sentences about what a person should know at the end of training; asked for before `finish`."""
        return []

    def finish(self) -> tuple[TaskState, Carried]:
        """The task's state and what the next task starts from."""
        return self.state(), Carried()

    def state(self, **parts: Any) -> TaskState:
        assert self.task is not None
        return TaskState(self.task.name, self.task.classes, self.name, self.backbone_digest,
                         head=self.heads.export(self.task.name), **parts)

    # ---- serving -----------------------------------------------------------------------------------------------------
    def attach(self, carried: Carried) -> None:
        """Makes the carried state of a chain the one that `logits` uses. Star methods carry nothing."""

    def load(self, state: TaskState) -> None:
        """Makes a finished task servable. Raises UserError where the state belongs to another method or backbone."""
        if state.method not in (self.name, "base"):
            raise UserError(f"task {state.task!r}: its state was written by method {state.method!r}, this is {self.name!r}; "
                            "load it with the method that wrote it")
        if state.backbone_digest != self.backbone_digest:
            raise UserError(f"task {state.task!r}: its state belongs to backbone {state.backbone_digest[:12]}, this backbone is "
                            f"{self.backbone_digest[:12]}; masks mean nothing on other weights, use the backbone of its run")
        self.heads.restore(state.task, state.head)

    def logits(self, images: Tensor, task: str | None) -> Tensor:
        """images (b, 3, H, W) -> logits (b, classes of `task`). With task None (scenario `class`): over all classes seen.
        Also serves the task that is being trained, as it stands (the loop validates after every epoch)."""
        if task is None:
            raise UserError(f"method {self.name!r} needs to be told the task; give one of {sorted(self.heads.names)}")
        return self.heads[task](self.features(images))

    # ---- bookkeeping -------------------------------------------------------------------------------------------------
    def train(self, mode: bool = True) -> Method:
        """A frozen backbone stays in evaluation mode: no dropout, no statistics."""
        super().train(mode)
        if self.freezes_backbone:
            self.backbone.eval()
        return self

    def flops_share(self, state: TaskState) -> float:
        """Floating-point operations of one image with this task's masks applied, relative to the plain backbone."""
        return 1.0
