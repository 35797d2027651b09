"""The contract of every continual-learning method: pure PyTorch, usable without Ray.

    class Mine(Method[MineSettings]):
        name = "mine"
        Settings = MineSettings
        ...

The planner calls the class (`MethodPlan`) before anything runs:

    Mine.validate(settings, train, data, scenario)  # when the config is read
    Mine.steps_for(settings, position)              # when the graph is built
    Mine.check_backbone(settings, backbone, tasks)

The loop (`workers/loop.py`) runs one step of one task:

    method = Mine(backbone, settings, seed)  # the backbone is a copy that no other task shares
    method.join_stream("task", tasks)
    method.load_task(state)                  # for each earlier task, if `loads_states(scenario)`
    groups = method.begin(context)
    for batch in feed:                       # skipped if the step has `trains=False`
        loss, terms = method.loss(batch, progress)
        loss.backward()
        method.after_backward()
        optimizer.step()
        method.after_step(progress)
    state, carried = method.finish()

`state` is what one task needs to be served, `carried` is handed to later tasks. A method that
carries state forms a chain: each task starts from the carried state of the previous task. Without
carried state the tasks form a star: they are independent, and can be trained at the same time.

In serving, `load_task(state)` is called for each task, `load_carried(carried)` if there is carried
state, and then `logits(images, task)`.

Abilities that only some methods have are not part of the base class:
`workers/methods/protocols.py` lists the optional protocols (rehearsal memory, several gradients in
a step, cached features, sharpness-aware steps, inferred tasks, shared forward passes), and
`bases/class_incremental.py` has the output space of scenario `class`.

Random numbers: the loop seeds the process's generator from (seed, task, step) before it creates the
method. Therefore parameters drawn in the constructor or in `begin` are equal on all ranks and in
every retry. In training, random numbers must come from `Batch.draw` only.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal

import torch
from timm.models.beit import Beit
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from typing_extensions import TypeVar

from workers.data.batch import Batch
from workers.data.features import FeatureBatch
from workers.data.feed import Feed
from workers.errors import UserError
from workers.job import DataSettings, Frozen, Task, TrainSettings
from workers.methods.train_defaults import TrainDefaults
from workers.model.heads import Heads
from workers.model.vit import compute_digest
from workers.storage.taskstate import Carried, TaskState

Family = Literal[
    "masks",
    "parameter isolation",
    "parameter-efficient",
    "regularization",
    "rehearsal",
    "expansion",
    "class statistics",
    "baseline",
]
# An example model of each class of vision transformers, for error messages.
EXAMPLES: dict[type[nn.Module], str] = {
    VisionTransformer: "vit_tiny_patch16_224",
    Eva: "eva02_tiny_patch14_224",
    Beit: "beit_base_patch16_224",
}
BLOCK_VITS = tuple(EXAMPLES)  # classes with `attn` and `mlp` as modules of their blocks

ParamGroup = dict[str, Any]  # `params`, and optionally `name`, `lr`, `weight_decay`, `eps`


IGNORED = -100  # label that cross-entropy ignores


@dataclass(frozen=True)
class Step:
    """One step of a task. The last step in the list returns the task's state.

    Attributes:
        trains: False for a step without epochs: `begin` and `finish` do everything (herding,
            pruning).
        measured: Validate after a step without training, to see its effect on the accuracy.
        after: Steps of the same task; this step starts from their carried states, merged. None: the
            previous step in the list. (): no step; this step starts from the same state as the
            first step. The next task waits for the steps that no other step waits for.
        later: Skip the step at the first task of the stream (the base task, if there is one),
            because no earlier classes exist.
        reads_features: The step reads the features of the backbone instead of images. A stage that
            all methods share computes them once (`StepData.load_features`).
    """

    name: str
    trains: bool = True
    measured: bool = False
    after: tuple[str, ...] | None = None
    later: bool = False
    reads_features: bool = False


@dataclass(frozen=True)
class Progress:
    """Position in the training.

    Attributes:
        epoch: Epoch, from 0.
        step: Optimizer step within the epoch, from 0.
        epochs: Number of epochs.
        steps_per_epoch: Optimizer steps of an epoch.
    """

    epoch: int
    step: int
    epochs: int
    steps_per_epoch: int

    @property
    def total(self) -> int:
        """Number of optimizer steps in the whole training."""
        return self.epochs * self.steps_per_epoch

    @property
    def global_step(self) -> int:
        """Optimizer steps before this one, over all epochs."""
        return self.epoch * self.steps_per_epoch + self.step

    def number(self, name: str, compute: Callable[[Progress], float]) -> float | Tensor:
        """Return a number that depends on the progress only, for use in operators.

        In a captured step (`train.compile: step`) it is a tensor () that is written before each
        step, because the code of the step does not run again.

        Args:
            name: A name that is unique within the method.
            compute: Function of the progress that returns the number.
        """
        return compute(self)


@dataclass(frozen=True)
class OptimPlan:
    """Optimizer settings of a step, for the choice of learning rates in `begin`.

    Attributes:
        lr: The configured peak learning rate.
        weight_decay: The configured weight decay.
        batch_size: Global batch size, over all ranks.
        full_rate_steps: Sum over all optimizer steps of the learning rate relative to its peak.
            lr * full_rate_steps limits how far AdamW can move one entry.
        optimizer: `adamw` or `sgd`.
    """

    lr: float
    weight_decay: float
    batch_size: int
    full_rate_steps: float
    optimizer: str = "adamw"

    def mask_lr(self, setting: float | str, travel: float) -> float:
        """Return the peak learning rate of mask parameters.

        Args:
            setting: A rate, or `auto`: the rate at which Adam moves an entry by at most `travel`
                over all steps.
            travel: The largest distance, in units of the mask parameters.
        """
        if setting == "auto":
            return travel / max(self.full_rate_steps, 1e-9)
        return float(setting)


@dataclass(frozen=True)
class StepData:
    """Access to the images of a step, which are read on demand.

    `feed` and `keys` raise `LookupError` if their function is None.

    Attributes:
        make_feed: Maps (split, training) to a feed over the step's tasks. With split `train` the
            feed also contains the exemplars that `RemembersSamples.memory` returned, unless they
            are replayed in separate batches (`ReplaysSamples`).
        task_keys: Maps a task to the keys of the train split, by class.
        has_validation: Whether the split `val` has images, from the data set or held out of train.
        load_features: Returns the features of the task's train images, sorted by key. None if the
            step does not read features.
    """

    make_feed: Callable[[str, bool], Feed] | None = None
    task_keys: Callable[[Task], dict[str, list[str]]] | None = None
    load_features: Callable[[], FeatureBatch] | None = None
    has_validation: bool = False

    def feed(self, split: str, training: bool = False) -> Feed:
        """Return a feed over `split`, augmented and shuffled if `training`."""
        if self.make_feed is None:
            raise LookupError("this step was given no feed")
        return self.make_feed(split, training)

    def keys(self, task: Task) -> dict[str, list[str]]:
        """Return the keys of the images in the train split of `task`, by class."""
        if self.task_keys is None:
            raise LookupError("this step was given no keys of samples")
        return self.task_keys(task)


@dataclass(frozen=True)
class StepContext:
    """Inputs of a step of a task.

    Attributes:
        task: The task.
        optim: Optimizer settings of the step.
        step: Name of the step.
        scenario: `task`, `class` or `domain`.
        stream: Tasks so far in stream order, the base task first, `task` last.
        training_tasks: Tasks with samples in the feed or its replay batches. `Batch.tasks` are
            indices into them.
        carried: Merged carried states of the stages that this step starts from: earlier steps of
            the task (`Step.after`), or for a first step the previous task (chain) or the shared
            steps in `starts_from` (star). None if there are no such stages.
        data: Access to the images.
    """

    task: Task
    optim: OptimPlan
    step: str = "train"
    scenario: str = "task"
    stream: tuple[Task, ...] = ()
    training_tasks: tuple[Task, ...] = ()
    carried: Carried | None = None
    data: StepData = StepData()


class MethodSettings(Frozen):
    """Base of a method's own settings: a subclass lists hyper-parameters, ranges and defaults."""

    largest_whole: ClassVar[int] = 1_000_000  # largest magnitude of an integer setting


S = TypeVar("S", bound=MethodSettings, default=Any)


def require_adamw(mask_lr: float | str, train: TrainSettings) -> None:
    """Raise `UserError` for `mask_lr: auto` with SGD.

    The automatic rate is derived from the distance that masks should move. This works only for
    Adam, because the length of an SGD step depends on the size of the gradients.
    """
    if mask_lr == "auto" and train.optimizer != "adamw":
        raise UserError(
            f"mask_lr is 'auto' with train.optimizer {train.optimizer!r}: the rate is derived "
            "for adamw; use that, or give mask_lr a number"
        )


def refuse_base_task(method: str, tasks: tuple[Task, ...], reason: str) -> None:
    """Raise `UserError` if the stream has a base task.

    Args:
        method: Name of the method, for the message.
        tasks: Tasks of the stream.
        reason: Why the method cannot serve the base task, for the message.
    """
    base = next((task.name for task in tasks if task.role == "base"), None)
    if base is not None:
        raise UserError(
            f"{method!r} does not support the base task {base!r}, whose head comes with the "
            f"backbone: {reason}; give the task the role `task`, and the backbone pretrained "
            "weights (backbone.weights)"
        )


class MethodPlan(Generic[S]):
    """The part of a method that the planner uses before anything runs; `S`: its settings type."""

    # The name in configs, records and keys.
    name: ClassVar[str]
    # The family of the method, in the terms of the literature.
    family: ClassVar[Family] = "baseline"
    # The stored state per task, in a few words.
    keeps: ClassVar[str] = "a head"
    # Title, venue and year.
    paper: ClassVar[str] = ""
    # The type of `settings`.
    Settings: ClassVar[type[MethodSettings]] = MethodSettings
    # Training settings that apply if a config does not set them, with the source of the numbers.
    train_defaults: ClassVar[TrainDefaults] = TrainDefaults(lr=1e-3, source="none: set `train.lr`")
    # Name of a loss term that protects earlier tasks -> the setting with its weight.
    penalty_terms: ClassVar[Mapping[str, str]] = {}
    # Increase this number if the method's results change: it is part of the keys of the stages.
    revision: ClassVar[int] = 1

    # The steps of a task, in order.
    steps: ClassVar[tuple[Step, ...]] = (Step("train"),)
    # State that a task carries to the next task. Empty: the tasks form a star and run in parallel.
    carries: ClassVar[tuple[str, ...]] = ()
    # `fnmatch` patterns of carried tensors and values of `meta` that only training needs. Bundles
    # omit them, and `load_carried` must work without them.
    training_only: ClassVar[tuple[str, ...]] = ()
    # For a star: shared steps, which are trained on images without labels if the stream has any,
    # else on the base task. All tasks start from the carried states of these steps and are served
    # with them.
    starts_from: ClassVar[tuple[str, ...]] = ()
    # `task`: the task is given at test time (TIL). `class`: it is not (CIL). `domain`: it is not,
    # and all tasks have the same classes (DIL).
    scenarios: ClassVar[frozenset[str]] = frozenset({"task"})
    # True: in scenario `domain` one head serves all tasks. False: each task has its own head, and
    # the largest of the outputs of a class counts.
    shares_head: ClassVar[bool] = False
    # Training data of a step. `task`: of this task; `seen`: of all tasks so far (joint training).
    trains_on: ClassVar[Literal["task", "seen"]] = "task"
    # Data that a stage needs before it can start. None: the training data. A rehearsal memory needs
    # `seen`.
    reads: ClassVar[Literal["task", "seen"] | None] = None
    # For a chain: whether the states of all earlier tasks are loaded before `begin` in scenario
    # `task`, too (`loads_states`).
    needs_states: ClassVar[bool] = False
    # Whether the method works on the blocks or tokens of a vision transformer, not on parameters by
    # name.
    needs_vit: ClassVar[bool] = False
    # The supported classes of vision transformers, if `needs_vit`.
    vits: ClassVar[tuple[type[nn.Module], ...]] = (VisionTransformer,)
    # The reason, for error messages, why other vision transformers with blocks are not supported.
    why_no_other_vit: ClassVar[str] = ""
    # Whether the backbone is not trained and stays in evaluation mode.
    freezes_backbone: ClassVar[bool] = True
    # Whether later tasks can change the logits of a finished task. False is a promise that these
    # logits never change, bit for bit.
    may_forget: ClassVar[bool] = False
    # Whether `loss`, `replay_loss` and `after_backward` run the same operators with the same
    # numbers in all steps with equal `program`, and read no values on the host. Then
    # `train.compile: step` can capture the step. Numbers that change come from `Progress.number`,
    # random numbers from `Batch.draw`. A subclass does not inherit the value, because it can change
    # the step.
    has_constant_step: ClassVar[bool] = False
    # Whether the backward pass can compute a block of the backbone again with the same result
    # (`train.recompute`): the result depends only on the block's input, and on the attributes of
    # its modules and hooks.
    can_recompute: ClassVar[bool] = True
    # Whether a task has the features of the backbone before its first optimizer step.
    starts_as_backbone: ClassVar[bool] = True
    # Settings, by their names in a config, that a single task may override. The steps of other
    # tasks, serving and `check_backbone` must not depend on their values.
    per_task: ClassVar[frozenset[str]] = frozenset()
    # For a chain: settings, by their names in a config, that the step `train` does not read before
    # an earlier task was trained, such as the weight of a penalty on changes. They are not part of
    # the key of the first task, so a search over them trains it once. A subclass does not inherit
    # the value, because it can read them.
    later_settings: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def validate(cls, settings: S, train: TrainSettings, data: DataSettings, scenario: str) -> None:
        """Raise `UserError` if these settings cannot work together."""

    @classmethod
    def check_backbone(cls, settings: S, backbone: nn.Module, tasks: tuple[Task, ...] = ()) -> None:
        """Raise `UserError` if the method cannot work on this backbone or these tasks.

        The backbone has shapes but no weights: its parameters are on device `meta`.
        """
        if cls.needs_vit and not isinstance(backbone, cls.vits):
            examples = ", ".join(EXAMPLES[kind] for kind in cls.vits)
            classes = ", ".join(kind.__name__ for kind in cls.vits)
            reason = ""
            if isinstance(backbone, BLOCK_VITS) and cls.why_no_other_vit:
                reason = f" ({cls.why_no_other_vit})"
            raise UserError(
                f"{cls.name!r} works on the blocks of a vision transformer (of class {classes} in "
                f"timm), and the backbone is a {type(backbone).__name__}{reason}; choose another "
                f"method, or a backbone such as {examples}"
            )

    @classmethod
    def steps_for(cls, settings: S, position: int) -> tuple[Step, ...]:
        """Return the steps of the task at `position`, which counts from 0.

        Position -1 is the base task, on which the backbone was trained, or the images without
        labels (`starts_from`): most methods have no step for it.
        """
        return cls.steps if position >= 0 else ()

    @classmethod
    def has_training(cls) -> bool:
        """Return whether the first two tasks have a step with epochs, under default settings."""
        settings: Any = cls.Settings()
        steps = (*cls.steps_for(settings, 0), *cls.steps_for(settings, 1))
        return any(step.trains for step in steps)

    @classmethod
    def ignored_settings(cls, step: str) -> frozenset[str]:
        """Return the names of the settings that a step does not read.

        They are not part of the step's key, and the step gets their default values.
        """
        return frozenset()

    @classmethod
    def unused_train_settings(cls, settings: S) -> Mapping[str, str]:
        """Return name -> reason of the settings of `train` that have no effect on this method."""
        return {}

    @classmethod
    def needs_base(cls, settings: S) -> bool:
        """Return whether these settings need a base task in the stream."""
        return False

    @classmethod
    def loads_states(cls, scenario: str) -> bool:
        """Return whether a step of a chain needs the states of all earlier tasks."""
        return bool(cls.carries) and (cls.needs_states or scenario != "task")

    @classmethod
    def changes_past_predictions(cls, scenario: str) -> bool:
        """Return whether a later stage can change the predictions on earlier tasks.

        If so, each row of the accuracy matrix is measured on all tasks so far. Unless the task of
        an image is given, the outputs of a new task always compete with older outputs.
        """
        return bool(cls.carries) or cls.trains_on == "seen" or scenario != "task"


class Method(nn.Module, MethodPlan[S], Generic[S]):
    """One backbone, and one head per task. Subclasses override the parts that differ.

    Args:
        backbone: A copy of the backbone that this object may change.
        settings: The method's own settings.
        seed: Seed of the run.
    """

    def __init__(self, backbone: nn.Module, settings: S, seed: int):
        super().__init__()
        self.backbone = backbone
        self.settings: S = settings
        self.seed = seed
        self.backbone_digest = compute_digest(backbone)
        self.heads = Heads(backbone.num_features)  # type: ignore[arg-type]
        # Set by `join_stream`: the tasks so far in stream order, with the one in training.
        self.scenario = "task"
        self.stream: tuple[Task, ...] = ()
        # Set by `begin`; None and empty while the method only serves.
        self.task: Task | None = None
        self.training_tasks: tuple[Task, ...] = ()
        self.context: StepContext
        # Replacement tensors for parameters of the backbone, by name.
        self.weight_overrides: dict[str, Tensor] = {}
        # The task and the device of the current `serving_weights`.
        self.active_task: tuple[str, torch.device] | None = None
        # Set by a server of many tasks: a cache in front of `serving_weights`.
        self.override_cache: Callable[[str], dict[str, Tensor]] | None = None
        if self.freezes_backbone:
            self.backbone.requires_grad_(False)

    @property
    def device(self) -> torch.device:
        """The device of the backbone, on which the whole method computes."""
        return next(self.backbone.parameters()).device

    def join_stream(self, scenario: str, stream: tuple[Task, ...]) -> None:
        """Set the scenario and the tasks so far, before any state is loaded."""
        self.scenario, self.stream = scenario, stream
        self.heads.is_shared = self.shares_head and scenario == "domain"

    # ---- training --------------------------------------------------------------------------------
    def begin(self, context: StepContext) -> list[ParamGroup]:
        """Prepare for a step of a task and return the optimizer's parameter groups.

        Parameters in no group are not trained.
        """
        self.context = context
        self.task = context.task
        self.training_tasks = context.training_tasks
        self.active_task = None
        self.weight_overrides = {}
        for task in context.training_tasks:
            self.heads.add(task.name, task.num_classes, self.seed)
        return self.head_groups(context.optim, [task.name for task in context.training_tasks])

    def head_groups(self, optim: OptimPlan, names: list[str]) -> list[ParamGroup]:
        """Return the parameter groups of the heads of these tasks."""
        heads = [self.heads[name] for name in names]
        weights = [head.weight for head in heads]
        biases = [head.bias for head in heads]
        return [
            {"name": "head.weight", "params": weights, "weight_decay": optim.weight_decay},
            {"name": "head.bias", "params": biases, "weight_decay": 0.0},
        ]

    def loss(self, batch: Batch, progress: Progress) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the scalar to minimise, a mean over the batch, and its detached terms by name."""
        self.active_task = None
        self.weight_overrides = self.training_weights(batch, progress)
        loss = self.classification_loss(self.features(batch.images), batch)
        return loss, {"ce": loss.detach()}

    def training_weights(self, batch: Batch, progress: Progress) -> dict[str, Tensor]:
        """Return the tensors, with gradients, that replace parameters of the backbone in this step.

        The result maps parameter names to tensors, for example W_eff = f(mask) .* W. The backbone's
        own parameters are not changed.
        """
        return {}

    def features(self, images: Tensor) -> Tensor:
        """Return the backbone's features (b, d) of images (b, 3, H, W), with `weight_overrides`.

        Pooling is that of the timm model: class token in a plain ViT, mean in EVA-02 and BEiT.
        """
        if self.weight_overrides:
            output: Tensor = functional_call(self.backbone, self.weight_overrides, (images,))
            return output
        return self.backbone(images)  # type: ignore[no-any-return]

    def classification_loss(self, features: Tensor, batch: Batch) -> Tensor:
        """Return the mean cross-entropy of the samples, each with its own task's head."""
        if len(self.training_tasks) == 1:
            logits = self.heads[self.training_tasks[0].name](features).float()
            targets = batch.labels if batch.targets is None else batch.targets
            return F.cross_entropy(logits, targets)
        total = features.new_zeros((), dtype=torch.float32)
        for index, task in enumerate(self.training_tasks):
            logits = self.heads[task.name](features).float()
            # Rows of other tasks are ignored, not removed: to select rows, the host would have to
            # wait for the device.
            labels = batch.labels.masked_fill(batch.tasks != index, IGNORED)
            total = total + F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
        return total / len(batch)

    def after_backward(self) -> None:
        """Change gradients before the optimizer's step, for example gate or project them."""

    def program(self, progress: Progress) -> Hashable:
        """Return a value that differs between steps with different operators or constants.

        It is used only with `has_constant_step`.
        """
        return None

    def after_step(self, progress: Progress) -> None:
        """Change parameters after the optimizer's step, for example restore locked entries."""

    def competing_outputs(self) -> int:
        """Return the number of outputs over which the current step's cross-entropy is computed."""
        return max(task.num_classes for task in self.training_tasks)

    def metrics(self) -> dict[str, float]:
        """Return named numbers for curves over epochs, for example the density of masks."""
        return {}

    def warnings(self) -> list[str]:
        """Return sentences for the user about the finished step; called after `finish`."""
        return []

    def finish(self) -> tuple[TaskState, Carried]:
        """Return the task's state, and the state for the next task."""
        return self.state(), Carried()

    def state(self, **parts: Any) -> TaskState:
        """Return the state of the task in training: its head and these parts of a `TaskState`."""
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
        """Load the carried state of the newest task.

        In a star it is that of the shared steps (`starts_from`), unless `trains_on` is `seen`.
        """
        self.active_task = None

    def load_task(self, state: TaskState) -> None:
        """Load the state of a finished task, so that the task can be served.

        Raises:
            UserError: If the state was written by another method or on another backbone.
        """
        if state.method not in (self.name, "base"):
            raise UserError(
                f"task {state.task!r}: its state was written by method {state.method!r}, this "
                f"is {self.name!r}; load it with the method that wrote it"
            )
        if state.backbone_digest != self.backbone_digest:
            raise UserError(
                f"task {state.task!r}: its state belongs to backbone "
                f"{state.backbone_digest[:12]}, this backbone is "
                f"{self.backbone_digest[:12]}; masks mean nothing on other weights, use the "
                "backbone of its run"
            )
        rows = len(state.head["weight"]) if "weight" in state.head else len(state.classes)
        if rows != len(state.classes):
            raise UserError(
                f"task {state.task!r}: its head has {rows} outputs for {len(state.classes)} "
                "classes; export it again, or write a new model folder with `accrete bundle`"
            )
        self.heads.restore(state.task, state.head)
        self.active_task = None

    def serving_weights(self, task: str) -> dict[str, Tensor]:
        """Return the replacements of backbone parameters for serving `task`, by name.

        `task` is a loaded task, or the task in training, served as it would be stored now (for
        example with hard masks).
        """
        return {}

    def activate_task(self, task: str) -> None:
        """Apply the serving weights of `task`.

        They are computed only when the active task changes. For the task in training, whose weights
        change in every step, they are computed at each call.
        """
        key = (task, self.device)
        if self.active_task == key:
            return
        serving_weights = self.override_cache or self.serving_weights
        with torch.no_grad():
            self.weight_overrides = serving_weights(task)
        is_training_it = self.task is not None and self.task.name == task
        self.active_task = None if is_training_it else key

    def logits(self, images: Tensor, task: str | None) -> Tensor:
        """Return the logits (b, classes of `task`) of images (b, 3, H, W).

        This also works for the current task during training: the loop validates after every epoch.

        Raises:
            UserError: If `task` is None and the method needs the task.
        """
        if task is None:
            raise UserError(
                f"method {self.name!r} needs to be told the task; give one of "
                f"{sorted(self.heads.names)}"
            )
        head = self.heads[task]
        self.activate_task(task)
        return head(self.features(images))  # type: ignore[no-any-return]

    # ---- bookkeeping -----------------------------------------------------------------------------
    @classmethod
    def display_masks(cls, state: TaskState, carried: Carried) -> dict[str, Tensor]:
        """Return boolean masks by name: True for entries that the task uses."""
        return {name: mask for name, mask in state.masks.items() if mask.dtype == torch.bool}

    def flops_share(self, state: TaskState) -> float:
        """Return the FLOPs per image when this task is served, divided by the backbone's."""
        return 1.0

    def train(self, mode: bool = True) -> Method[S]:
        """Set the mode, but keep a frozen backbone in evaluation mode.

        The frozen backbone then has no dropout and does not update running statistics.
        """
        super().train(mode)
        if self.freezes_backbone:
            self.backbone.eval()
        return self
