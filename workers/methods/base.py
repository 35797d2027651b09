"""The contract of every continual-learning method: pure PyTorch, usable without Ray.

    class Mine(Method):
        name = "mine"
        ...
The life of a method during one step of one task (`workers/loop.py` drives it):

    Mine.validate(settings, train, data, scenario)  # when the config is read, before anything runs
    Mine.check_backbone(settings, backbone, tasks)  # when the graph is built, before anything runs
    method = Mine(backbone, settings, seed)          # backbone: a fresh copy, never shared with
        another task
    method.scenario, method.stream = "task", tasks   # the loop says where the method is
    for state in earlier_states:  # a chain with `needs_states`, or in scenario `class`
        method.load_task(state)
    memory = method.memory(task, step, carried)      # the earlier samples that the feed gives
        beside the task's own
    groups = method.begin(task, step, carried, rates, tasks)
    method.precompute(feed)                          # this and what follows not where the step does
        not train
    for batch in feed:
        loss, terms = method.loss(batch, progress)
        loss.backward(); method.after_backward(); optimizer.step(); method.after_step(progress)
    state, carried = method.finish()

and while it serves: `method.load_task(state)` for each task, `method.load_carried(carried)` for a
chain, then `method.logits(images, task)`. The process's own generator is seeded from
(seed, task, step) before `Mine(...)`, so that a module may start from PyTorch's defaults and is the
same on all ranks and in every retry. Noise while training comes from `Batch.draw`, and from nowhere
else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, Literal

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from workers.data.batch import Batch
from workers.errors import UserError
from workers.job import DataSettings, Frozen, Task, TrainSettings
from workers.model.heads import Heads
from workers.model.vit import digest_of
from workers.storage.taskstate import Carried, TaskState


@dataclass(frozen=True)
class Step:
    """One step of a task. `trains=False`: no epochs, `begin` and `finish` do it all (herding,
    pruning); `measured`: such a step is validated, so that one sees what it did to the accuracy.
    `after`: the steps of the same task that it waits for, and whose carried states it gets, merged;
    None means the one before it in the list, () none: it starts where the first step does. What no
    step waits for, the next task waits for. The last in the list leaves the task's state. `later`:
    the first task of the stream, a base task too, goes without it: there are no earlier classes."""

    name: str
    trains: bool = True
    measured: bool = False
    after: tuple[str, ...] | None = None
    later: bool = False


@dataclass(frozen=True)
class Progress:
    """Where training stands: epoch and step counted from 0, step inside the epoch, and how many
    there are of each."""

    epoch: int
    step: int
    epochs: int
    steps_per_epoch: int

    @property
    def total(self) -> int:
        return self.epochs * self.steps_per_epoch

    @property
    def global_step(self) -> int:
        return self.epoch * self.steps_per_epoch + self.step


@dataclass(frozen=True)
class OptimPlan:
    """What `begin` may need to choose learning rates: the configured peak and decay, the global
    batch size, and `mean_rate_steps` = sum over all steps of the schedule's factor (so lr *
    mean_rate_steps = the way one entry can go)."""

    lr: float
    weight_decay: float
    batch_size: int
    mean_rate_steps: float


class MethodSettings(Frozen):
    """Base of a method's own settings; a subclass lists its hyper-parameters with ranges and
    defaults."""

    largest_whole: ClassVar[int] = 1_000_000


def needs_adamw(mask_lr: float | str, train: TrainSettings) -> None:
    """Raises UserError for `mask_lr: auto` under SGD: how far that goes in a step depends on the
    gradients, Adam's way does not."""
    if mask_lr == "auto" and train.optimizer != "adamw":
        raise UserError(
            f"mask_lr is 'auto' with train.optimizer {train.optimizer!r}: the rate is derived "
            "for adamw; use that, or give mask_lr a number"
        )


class Method(nn.Module):
    """Base class: one backbone, one head per task. Subclasses override what differs."""

    name: ClassVar[str]
    paper: ClassVar[str] = ""
    carries: ClassVar[tuple[str, ...]] = ()  # nothing carried: the tasks form a star
    steps: ClassVar[tuple[Step, ...]] = (Step("train"),)
    starts_from: ClassVar[
        tuple[str, ...]
        # of a star: steps on the base task, or on images without labels, whose carried states all
        # tasks start from and
    ] = ()
    # are served with
    scenarios: ClassVar[frozenset[str]] = frozenset({"task"})
    revision: ClassVar[int] = 1  # raise it when results change
    # "seen": all tasks so far, as joint training does
    trains_on: ClassVar[Literal["task", "seen"]] = "task"
    # whose data the stages wait for; None: what it trains on; memory needs "seen"
    reads: ClassVar[Literal["task", "seen"] | None] = None
    # a chain that loads the states of all earlier tasks before `begin`
    needs_states: ClassVar[bool] = False
    needs_vit: ClassVar[bool] = (
        # it works on the blocks or tokens of a VisionTransformer; False: on parameters by name
        False
    )
    freezes_backbone: ClassVar[bool] = True
    may_forget: ClassVar[bool] = False  # False is a promise: bit-exact logits for ever
    # before its first step a task's features are those of the backbone
    starts_as_backbone: ClassVar[bool] = True
    Settings: ClassVar[type[MethodSettings]] = MethodSettings
    # settings, by their names in a config, that a task may have of its own: no other task's steps,
    # no serving and no `check_backbone` needs to know with which value a state was trained
    per_task: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def validate(
        cls, settings: MethodSettings, train: TrainSettings, data: DataSettings, scenario: str
    ) -> None:
        """Raises UserError where these settings cannot work together; asked before anything
        runs."""

    @classmethod
    def check_backbone(
        cls, settings: MethodSettings, backbone: nn.Module, tasks: tuple[Task, ...] = ()
    ) -> None:
        """Raises UserError where the method cannot work on this backbone, which has shapes but no
        weights (device `meta`), or on these tasks; asked before anything runs."""
        if cls.needs_vit and not isinstance(backbone, VisionTransformer):
            raise UserError(
                f"{cls.name!r} works on the blocks of a vision transformer, and the backbone is "
                f"a {type(backbone).__name__}; choose another "
                "method, or a backbone such as vit_tiny_patch16_224"
            )

    @classmethod
    def changes_past_predictions(cls, scenario: str) -> bool:
        """True where a later stage can change the answers on earlier tasks, so that each row of the
        matrix is measured. In scenario `class` a new task's outputs compete with the old ones,
        whatever the method."""
        return bool(cls.carries) or cls.trains_on == "seen" or scenario == "class"

    @classmethod
    def loads_states(cls, scenario: str) -> bool:
        """True where a chain's step gets the states of all earlier tasks: on demand, and for one
        growing output space."""
        return bool(cls.carries) and (cls.needs_states or scenario == "class")

    @classmethod
    def steps_for(cls, settings: MethodSettings, position: int) -> tuple[Step, ...]:
        """Which of `steps` the task at `position` goes through: tasks count from 0; -1 is the base
        task, which the backbone was trained on, and which most methods leave as it is."""
        return cls.steps if position >= 0 else ()

    @classmethod
    def ignored_settings(cls, step: str) -> frozenset[str]:
        """Settings that a training step does not read: it is told their defaults, and no change of
        them runs it again."""
        return frozenset()

    @classmethod
    def needs_base(cls, settings: MethodSettings) -> bool:
        """True where these settings cannot do without a base task in the stream."""
        return False

    def __init__(self, backbone: nn.Module, settings: MethodSettings, seed: int):
        super().__init__()
        self.backbone = backbone
        self.settings = settings
        self.seed = seed
        self.backbone_digest = digest_of(backbone)
        self.heads = Heads(backbone.num_features)  # type: ignore[arg-type]
        self.weight_overrides: dict[
            str, Tensor
        ] = {}  # parameter of the backbone -> the tensor that stands in for it
        # whose `serving_weights` are in effect
        self.active_task: tuple[str, torch.device] | None = None
        # set by whoever serves many tasks: a cache of `serving_weights`
        self.override_cache: Callable[[str], dict[str, Tensor]] | None = None
        self.task: Task | None = None
        self.scenario = "task"  # set by the loop, before anything else is called
        self.stream: tuple[
            Task, ...
        ] = ()  # set by the loop: the tasks so far in stream order, with the one in training
        self.feed_of: Callable[
            [str, bool], Any
        ]  # set by the loop: (split, training) -> Feed over what this step trains on
        self.keys_of: Callable[
            [Task], dict[str, list[str]]
        ]  # set by the loop, for `memory` too: class -> its keys in the task's train split
        self.holds_out = False  # set by the loop: whether the feed has a `val` split
        if self.freezes_backbone:
            self.backbone.requires_grad_(False)

    @property
    def device(self) -> torch.device:
        """Where the backbone is, and with it all that computes."""
        return next(self.backbone.parameters()).device

    # ---- training --------------------------------------------------------------------------------
    def memory(self, task: Task, step: str, carried: Carried | None) -> dict[str, list[str]]:
        """Which remembered samples `step` of `task` trains on: task name -> keys in its train
        split. Earlier tasks are added to the feed; where `task` itself is named, of it too the feed
        gives these keys alone. Needs `reads = "seen"`."""
        return {}

    def begin(
        self,
        task: Task,
        step: str,
        carried: Carried | None,
        rates: OptimPlan,
        tasks: tuple[Task, ...],
    ) -> list[dict[str, Any]]:
        """Prepares for `step` of `task` and returns the optimizer's parameter groups (`params`,
        optional `lr`, `weight_decay`, `name`). `tasks`: all whose samples the feed will give, in
        the order of `Batch.tasks`. In scenario `class` all heads are trained, since they answer
        together."""
        self.task, self.training_tasks, self.active_task, self.weight_overrides = (
            task,
            tasks,
            None,
            {},
        )
        for each in tasks:
            self.heads.add(each.name, each.num_classes, self.seed)
        return self.head_groups(
            rates,
            list(self.class_slices()) if self.scenario == "class" else [t.name for t in tasks],
        )

    def head_groups(self, rates: OptimPlan, names: list[str]) -> list[dict[str, Any]]:
        heads = [self.heads[name] for name in names]
        return [
            {
                "name": "head.weight",
                "params": [h.weight for h in heads],
                "weight_decay": rates.weight_decay,
            },
            {"name": "head.bias", "params": [h.bias for h in heads], "weight_decay": 0.0},
        ]

    def precompute(self, feed: Any) -> None:
        """Before the first step, also of a resumed stage, when it is settled what is trained: of
        the feed of the epochs, and of the one that they are validated on, what can be computed once
        instead of in every epoch (`Feed.cache_features`)."""

    def loss(self, batch: Batch, progress: Progress) -> tuple[Tensor, dict[str, Tensor]]:
        """The scalar to minimise (a mean over the batch) and its named terms, detached."""
        self.active_task, self.weight_overrides = None, self.training_weights(batch, progress)
        loss = self.classification_loss(self.features(batch.images), batch)
        return loss, {"ce": loss.detach()}

    def training_weights(self, batch: Batch, progress: Progress) -> dict[str, Tensor]:
        """Tensors that stand in for parameters of the backbone in this step, by parameter name,
        with gradients: W_eff = f(mask) .* W and the like. The backbone's own parameters are never
        written to."""
        return {}

    def features(self, images: Tensor) -> Tensor:
        """images (b, 3, H, W) -> the backbone's features (b, d) (of a ViT those of the class token
        after the final norm), with `weight_overrides` in place."""
        return (
            functional_call(self.backbone, self.weight_overrides, (images,))
            if self.weight_overrides
            else self.backbone(images)
        )

    def classification_loss(self, features: Tensor, batch: Batch) -> Tensor:
        """Cross-entropy of each sample, a mean over the batch: under the head of its own task, or
        in scenario `class` over the outputs of all tasks so far."""
        if self.scenario == "class":
            return self._cross_entropy_over_all(features, batch)
        if len(self.training_tasks) == 1:
            logits = self.heads[self.training_tasks[0].name](features)
            return F.cross_entropy(
                logits.float(), batch.labels if batch.targets is None else batch.targets
            )
        total = features.new_zeros((), dtype=torch.float32)
        for index, task in enumerate(self.training_tasks):
            rows = (batch.tasks == index).nonzero().squeeze(1)
            if len(rows):
                logits = self.heads[task.name](features[rows]).float()
                total = total + F.cross_entropy(logits, batch.labels[rows], reduction="sum")
        return total / len(batch)

    def _cross_entropy_over_all(self, features: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(
            self.all_logits(features).float(),
            self.global_labels(batch) if batch.targets is None else self.global_targets(batch),
        )

    def global_labels(self, batch: Batch) -> Tensor:
        """(b,) scenario `class`: each sample's class among all so far, in the order of
        `class_slices`."""
        columns = self.class_slices()
        first = torch.tensor(
            [columns[t.name].start for t in self.training_tasks], device=batch.tasks.device
        )
        return batch.labels + first[batch.tasks]

    def global_targets(self, batch: Batch) -> Tensor:
        """(b, classes so far) scenario `class`: what each sample should be, one-hot or soft, in the
        order of `class_slices`."""
        columns = self.class_slices()
        classes = max(own.stop for own in columns.values())
        if batch.targets is None:
            return F.one_hot(self.global_labels(batch), classes).float()
        own = columns[
            self.training_tasks[0].name
        ]  # targets over one task's classes leave the others at 0
        return (
            F.pad(batch.targets, (own.start, classes - own.stop))
            if len(self.training_tasks) == 1
            else batch.targets
        )

    def sharpness(self) -> float:
        """rho of adaptive sharpness-aware steps (`optim.ascend`): the gradient is taken a way
        uphill of where a step starts. 0: none."""
        return 0.0

    def after_backward(self) -> None:
        """Between backward and the optimizer's step: gate gradients."""

    def after_step(self, progress: Progress) -> None:
        """After the optimizer's step: restore locked entries, clamp, anneal."""

    def metrics(self) -> dict[str, float]:
        """Named numbers worth a curve per epoch (mask densities, capacity)."""
        return {}

    def warnings(self) -> list[str]:
        """Sentences about what a person should know at the end of a step; asked for after
        `finish`."""
        return []

    def finish(self) -> tuple[TaskState, Carried]:
        """The task's state and what the next task starts from."""
        return self.state(), Carried()

    def state(self, **parts: Any) -> TaskState:
        assert self.task is not None
        return TaskState(
            self.task.name,
            self.task.classes,
            self.name,
            self.backbone_digest,
            head=self.heads.export(self.task.name),
            **parts,
        )

    # ---- serving ---------------------------------------------------------------------------------
    def load_carried(self, carried: Carried) -> None:
        """Makes the carried state of a chain, or what a star `starts_from`, the one that `logits`
        uses."""
        self.active_task = None

    def load_task(self, state: TaskState) -> None:
        """Makes a finished task servable. Raises UserError where the state belongs to another
        method or backbone."""
        if state.method not in (self.name, "base"):
            raise UserError(
                f"task {state.task!r}: its state was written by method {state.method!r}, this "
                f"is {self.name!r}; "
                "load it with the method that wrote it"
            )
        if state.backbone_digest != self.backbone_digest:
            raise UserError(
                f"task {state.task!r}: its state belongs to backbone "
                f"{state.backbone_digest[:12]}, this backbone is "
                f"{self.backbone_digest[:12]}; masks mean nothing on other weights, use the "
                "backbone of its run"
            )
        self.heads.restore(state.task, state.head)
        self.active_task = None

    def serving_weights(self, task: str) -> dict[str, Tensor]:
        """What stands in for parameters of the backbone while `task` is served: a loaded one, or
        the one in training as it stands, with the hard masks that will be stored."""
        return {}

    def activate_task(self, task: str) -> None:
        """Puts the weights of `task` in effect: folded once per switch, but each time for the task
        in training."""
        wanted = task, self.device
        if self.active_task != wanted:
            with torch.no_grad():
                self.weight_overrides = (self.override_cache or self.serving_weights)(task)
            self.active_task = None if self.task is not None and self.task.name == task else wanted

    def logits(self, images: Tensor, task: str | None) -> Tensor:
        """images (b, 3, H, W) -> logits (b, classes of `task`). With task None (scenario `class`):
        over all classes seen, in the order of `class_slices`. Also serves the task that is being
        trained, as it stands (the loop validates after every epoch). Raises UserError where the
        method cannot do without the task."""
        if task is not None:
            head = self.heads[task]
            self.activate_task(task)
            return head(self.features(images))
        if "class" not in self.scenarios:
            raise UserError(
                f"method {self.name!r} needs to be told the task; give one of "
                f"{sorted(self.heads.names)}"
            )
        return self.all_logits(self.features(images))

    def grouped_logits(
        self, images: Tensor, rows: Mapping[str, Tensor | slice]
    ) -> dict[str, Tensor]:
        """Task -> what `logits` gives for it and its rows of images (b, 3, H, W); the same up to
        the order of summation, with what tasks share computed once."""
        if (type(self).logits, type(self).serving_weights) == (
            Method.logits,
            Method.serving_weights,
        ):  # tasks differ in heads alone
            features = self.features(images)
            return {task: self.heads[task](features[mine]) for task, mine in rows.items()}
        return {task: self.logits(images[mine], task) for task, mine in rows.items()}

    def all_logits(self, features: Tensor) -> Tensor:
        """features (b, d) -> (b, classes so far), in the order of `class_slices`."""
        return torch.cat([self.heads[name](features) for name in self.class_slices()], 1)

    def class_slices(self) -> dict[str, slice]:
        """Where each task's classes stand in the one output space of scenario `class`: tasks in
        stream order, those that are loaded or in training."""
        names = [t.name for t in self.stream if t.name in self.heads.names] or self.heads.names
        ends = list(accumulate(self.heads[name].out_features for name in names))
        return {
            name: slice(end - self.heads[name].out_features, end)
            for name, end in zip(names, ends, strict=True)
        }

    @classmethod
    def display_masks(cls, state: TaskState, carried: Carried) -> dict[str, Tensor]:
        """Boolean masks by name for pictures, overlaps and used capacity: True where the task uses
        an entry. A chain whose masks follow from what it carries on (an owner map) derives them
        here; `carried` is what the task's own last step left."""
        return {name: mask for name, mask in state.masks.items() if mask.dtype == torch.bool}

    # ---- finding out what an image belongs to ----------------------------------------------------
    def candidates(self) -> dict[str, tuple[str, ...]]:
        """What `infer` chooses among, by name in order, each with the tasks that it is right for.
        Empty: the method is told the task, or lets all outputs compete. Else `logits` is `answer`
        with what `infer` picks, and measuring records the picks."""
        return {}

    def infer(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """images (b, 3, H, W) -> place among `candidates` (b,), and how sure the method is of it,
        in [0, 1] (b,)."""
        raise NotImplementedError

    def answer(self, images: Tensor, places: Tensor, task: str | None) -> Tensor:
        """What `logits` gives, had each image been of the candidate at its place. places: (b,)."""
        raise NotImplementedError

    # ---- bookkeeping -----------------------------------------------------------------------------
    def train(self, mode: bool = True) -> Method:
        """A frozen backbone stays in evaluation mode: no dropout, no statistics."""
        super().train(mode)
        if self.freezes_backbone:
            self.backbone.eval()
        return self

    def flops_share(self, state: TaskState) -> float:
        """Floating-point operations of one image with this task's masks applied, relative to the
        plain backbone."""
        return 1.0
