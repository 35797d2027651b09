"""InfLoRA: low-rank updates in directions that the inputs of earlier tasks leave free.

Liang, Li: InfLoRA: Interference-Free Low-Rank Adaptation for Continual Learning, CVPR 2024.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from workers.data.batch import Batch
from workers.errors import UserError
from workers.job import Task
from workers.methods.base import (
    MethodSettings,
    ParamGroup,
    Progress,
    Step,
    StepContext,
    refuse_base_task,
)
from workers.methods.bases.class_incremental import SeparateHeads
from workers.methods.train_defaults import TrainDefaults
from workers.model.adapters import AdapterSites
from workers.model.lowrank import (
    PROJECTION,
    branch,
    expand_key_value_factor,
    get_projection_weight,
    merge_updates,
)
from workers.model.subspaces import InputMoments, Subspace, extend_subspace, find_directions
from workers.storage.taskstate import Carried, TaskState

# Names of the steps, and of entries in the stored and the carried state.
TRAIN, SUBSPACE, UPDATE, UPDATES, HEAD, FREE = (
    "train",
    "subspace",
    "update",
    "updates",
    "head",
    "free",
)
Share = Annotated[float, Field(gt=0, le=1)]
Factors = dict[str, Tensor]  # a: A (L, r, d), b: B (L, 2, d, r) of keys and values


class InfLoraSettings(MethodSettings):
    """Settings of `inflora`."""

    rank: PositiveInt = Field(10, description="r, rank of a task's update")
    threshold: Share = Field(
        0.95,
        description="eps of the first task: share of the inputs that their subspace holds; 0.98 in "
        "the released code for ImageNet-R",
    )
    final_threshold: Share = Field(
        1.0, description="eps that later tasks approach: a step towards it with each task"
    )
    expected_tasks: PositiveInt = Field(
        10,
        description="number of those steps, for which the paper has the length of the stream; the "
        "tasks after so many have the eps of the last of them",
    )


class Update(nn.Module):
    """A task's update: A (L, r, d) is fixed, B (L, 2, d, r) is trained from zero."""

    a: Tensor

    def __init__(self, a: Tensor, rows: int):
        super().__init__()
        blocks, rank, _ = a.shape
        self.register_buffer("a", a)
        self.b = nn.Parameter(torch.zeros(blocks, 2, rows, rank, device=a.device))


class InfLora(SeparateHeads[InfLoraSettings]):
    """A chain: the weights of keys and values are W + the sum over tasks s of B_s A_s.

    A task has two steps:

    - `train`: R is the mean of x x^T over the inputs x of a block's attention, on the task's images
      under the updates so far. The rows of A_t are the leading singular vectors of R outside the
      subspace F of earlier inputs, divided by sqrt 3. A_t is fixed. B_t and the head of the task
      are trained with the cross-entropy over its own classes. For inputs in F the update is zero.
    - `subspace`: F is extended by the inputs of the task under the trained network (DualGPM), until
      it holds a share eps_t = threshold + (final_threshold - threshold) t / expected_tasks of the
      squared Frobenius norm of R. t counts from 0, and stays at expected_tasks - 1 in longer
      streams.

    In serving, updates are merged into the weights, so a forward pass costs no more than the
    backbone's. If the task is given, its own and earlier updates serve it, as at the end of the
    task's training, so its logits never change. Otherwise all updates serve all tasks, and later
    updates change earlier outputs. Stored per task: 3 L r d floats, for rank r and L blocks of
    width d, and a head.

    Differences from the released code: R is measured without augmentation; if no direction is left,
    rows of A are zero; a first subspace of more than d / 2 dimensions is replaced by its complement
    (the code keeps it, and later tasks mistake it for the complement).
    """

    name = "inflora"
    has_constant_step = True
    family = "parameter-efficient"
    keeps = "low-rank factors, head"
    paper = "InfLoRA: Interference-Free Low-Rank Adaptation for Continual Learning, CVPR 2024"
    Settings = InfLoraSettings
    train_defaults = TrainDefaults(
        lr=5e-4,
        weight_decay=0.0,
        schedule="epoch",
        warmup=0.0,
        floor=0.016,
        epochs=20,
        batch_size=128,
        source="released code of InfLoRA on CIFAR-100",
    )
    steps = (Step(TRAIN), Step(SUBSPACE, trains=False))
    carries = (SUBSPACE,)
    needs_states = True
    needs_vit = True
    why_no_other_vit = "it updates the fused projection of queries, keys and values of that class"
    scenarios = frozenset({"task", "class", "domain"})

    @classmethod
    def ignored_settings(cls, step: str) -> frozenset[str]:
        return frozenset(InfLoraSettings.model_fields.keys() - {"rank"} if step == TRAIN else ())

    @classmethod
    def check_backbone(
        cls, settings: InfLoraSettings, backbone: nn.Module, tasks: tuple[Task, ...] = ()
    ) -> None:
        super().check_backbone(settings, backbone, tasks)
        refuse_base_task(cls.name, tasks, "it does not know the inputs of that task")
        sites = AdapterSites(backbone, branch, (PROJECTION,), beside=PROJECTION)
        if settings.rank > sites.width // 2:
            raise UserError(
                f"rank is {settings.rank}, and the backbone's width is {sites.width}: an update "
                f"has at most half as many directions; give at most {sites.width // 2}"
            )

    def __init__(self, backbone: Any, settings: InfLoraSettings, seed: int):
        super().__init__(backbone, settings, seed)
        self.sites = AdapterSites(backbone, branch, (PROJECTION,), beside=PROJECTION)
        # Number of rows of the keys, and of the values, in the fused projection.
        self.rows = len(get_projection_weight(backbone.blocks[0])) // 3
        self.loaded: dict[str, Factors] = {}  # finished task -> its update
        self.orders: dict[str, tuple[str, ...]] = {}  # task -> it and all earlier tasks
        self.merged: dict[str, Tensor] = {}  # weights with the updates of earlier tasks
        self.subspaces: list[Subspace] = []  # one per block; empty before the first task

    # ---- training --------------------------------------------------------------------------------
    def begin(self, context: StepContext) -> list[ParamGroup]:
        name = context.task.name
        self.loaded.pop(name, None)
        self.orders.pop(name, None)
        self.merged = self.merge([*self.loaded.values()])
        if context.carried is not None:
            self.load_carried(context.carried)
        groups = super().begin(context)
        self.eval()
        if context.step == SUBSPACE:
            assert context.carried is not None
            tensors = context.carried.tensors
            self.loaded[name] = {key: tensors[f"{UPDATE}/{key}"] for key in ("a", "b")}
            self.orders[name] = tuple(self.loaded)
            self.heads.restore(name, {key: tensors[f"{HEAD}/{key}"] for key in ("weight", "bias")})
            self.activate_task(name)
            self.extend_subspaces(self.measure_inputs(context))
            return []
        self.weight_overrides = self.merged
        moments = self.measure_inputs(context)
        known: Sequence[Subspace | None] = self.subspaces or [None] * len(moments)
        directions = [
            find_directions(moment, subspace, self.settings.rank)
            for moment, subspace in zip(moments, known, strict=True)
        ]
        a = torch.stack(directions).float().to(self.device)
        self.update = Update(a, self.rows)
        decay = context.optim.weight_decay
        return [*groups, {"name": "lora", "params": [self.update.b], "weight_decay": decay}]

    @torch.no_grad()
    def measure_inputs(self, context: StepContext) -> list[Tensor]:
        """Return R of each block on the task's images, with `weight_overrides`, in fp64 on the CPU.

        Each rank reads a part of the images; the sums are added over ranks.
        """
        blocks: Any = self.backbone.blocks
        moments = InputMoments([block.get_submodule(PROJECTION) for block in blocks])
        feed = context.data.feed("train")
        with moments.recording():
            for batch in feed.evaluate():
                self.features(batch.images)
        return list((feed.group.sum(moments.sums) / feed.group.sum(moments.count)).cpu())

    def extend_subspaces(self, moments: list[Tensor]) -> None:
        """Extend the subspaces by the inputs of the current task, given as R of each block."""
        settings = self.settings
        done = min(len(self.loaded) - 1, settings.expected_tasks - 1) / settings.expected_tasks
        eps = settings.threshold + (settings.final_threshold - settings.threshold) * done
        known: Sequence[Subspace | None] = self.subspaces or [None] * len(moments)
        self.subspaces = [
            extend_subspace(subspace, moment, eps)
            for subspace, moment in zip(known, moments, strict=True)
        ]

    def training_weights(self, batch: Batch, progress: Progress) -> dict[str, Tensor]:
        return self.merged

    def loss(self, batch: Batch, progress: Progress) -> tuple[Tensor, dict[str, Tensor]]:
        with self.sites.using({"a": self.update.a, "b": expand_key_value_factor(self.update.b)}):
            return super().loss(batch, progress)

    def finish(self) -> tuple[TaskState, Carried]:
        assert self.task is not None
        name = self.task.name
        tensors = {f"{SUBSPACE}/{i}": s.basis.float() for i, s in enumerate(self.subspaces)}
        meta = {FREE: [subspace.is_free for subspace in self.subspaces]}
        own = self.find_update(name)
        factors = {key: tensor.detach().clone() for key, tensor in own.items()}
        if self.context.step == SUBSPACE:
            order = {UPDATES: list(self.orders[name])}
            return self.state(copies=factors, meta=order), Carried(tensors, meta)
        head = self.heads.export(name)
        tensors |= {f"{UPDATE}/{key}": tensor for key, tensor in factors.items()}
        tensors |= {f"{HEAD}/{key}": tensor for key, tensor in head.items()}
        return self.state(), Carried(tensors, meta)

    # ---- serving ---------------------------------------------------------------------------------
    def load_carried(self, carried: Carried) -> None:
        super().load_carried(carried)
        free = carried.meta.get(FREE, [])
        bases = [carried.tensors.get(f"{SUBSPACE}/{index}") for index in range(len(free))]
        width = self.sites.width
        self.subspaces = []
        for basis, is_free in zip(bases, free, strict=True):
            if basis is None or basis.dim() != 2 or len(basis) != width or basis.shape[1] > width:
                raise UserError(
                    "the carried state lacks the subspace of a block, or has one of another width; "
                    "use the backbone of its run, or write a new model folder with `accrete bundle`"
                )
            self.subspaces.append(Subspace(basis.cpu().double(), bool(is_free)))
        if len(free) not in (0, len(self.sites)):
            raise UserError(
                f"the carried state has subspaces of {len(free)} blocks, and the backbone has "
                f"{len(self.sites)}; use the backbone of its run"
            )

    def load_task(self, state: TaskState) -> None:
        super().load_task(state)
        blocks, width, rank = len(self.sites), self.sites.width, self.settings.rank
        expected = {"a": (blocks, rank, width), "b": (blocks, 2, self.rows, rank)}
        shapes = {name: tuple(tensor.shape) for name, tensor in state.copies.items()}
        order = tuple(state.meta.get(UPDATES, []))
        if shapes != expected or state.task not in order[-1:]:
            raise UserError(
                f"task {state.task!r}: its state has updates of shapes {shapes}, these settings "
                f"have {expected}; use the backbone and the method's settings of its run"
            )
        self.loaded[state.task] = dict(state.copies)
        self.orders[state.task] = order

    def find_update(self, task: str) -> Factors:
        """Return the factors of a task's update, on the device."""
        own = {"a": self.update.a, "b": self.update.b} if task not in self.loaded else {}
        return {key: t.to(self.device) for key, t in (own or self.loaded[task]).items()}

    @torch.no_grad()
    def merge(self, updates: Sequence[Factors]) -> dict[str, Tensor]:
        """Return the weights of the projections with these updates, by parameter name."""
        if not updates:
            return {}
        a = torch.cat([update["a"].to(self.device) for update in updates], 1)
        b = torch.cat(
            [expand_key_value_factor(update["b"].to(self.device)) for update in updates], 2
        )
        return merge_updates(self.backbone, a, b)

    def serving_weights(self, task: str) -> dict[str, Tensor]:
        """Return the weights with the updates of `task` and of the tasks before it."""
        is_own = self.task is not None and self.task.name == task
        if task not in self.orders and is_own:
            return self.merge([*self.loaded.values(), self.find_update(task)])
        missing = [name for name in self.orders[task] if name not in self.loaded]
        if missing:
            raise UserError(
                f"task {task!r}: it was trained beside the update of task {missing[0]!r}, which is "
                "not loaded; load that task, too"
            )
        return self.merge([self.loaded[name] for name in self.orders[task]])

    def logits(self, images: Tensor, task: str | None) -> Tensor:
        if task is not None:
            return super().logits(images, task)
        names = [*self.class_slices()]
        order = self.orders.get(names[-1], (*self.loaded, names[-1]))
        if set(order) != set(names):
            raise UserError(
                f"task {names[-1]!r}: it was trained beside the updates of {list(order)}, and here "
                f"the tasks are {names}; load the tasks of one run, all of them up to the last"
            )
        self.activate_task(names[-1])
        return self.all_logits(self.features(images))
