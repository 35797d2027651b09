"""CTR's task-specific module (TSM): adapters that all tasks share, with HAT's masks on their units.

Ke, Liu, Ma, Xu, Shu: Achieving Forgetting Prevention and Knowledge Transfer in Continual Learning,
NeurIPS 2021. HAT: see `hat`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import TypeVar

from workers.data.batch import Batch
from workers.errors import UserError
from workers.job import ActiveIf, DataSettings, TrainSettings
from workers.methods.adapter import compute_added_share
from workers.methods.base import (
    BLOCK_VITS,
    Method,
    MethodSettings,
    OptimPlan,
    ParamGroup,
    Progress,
    StepContext,
    require_adamw,
)
from workers.methods.train_defaults import TrainDefaults
from workers.model.adapters import AdapterSites, Bottlenecks
from workers.model.masks import (
    AnnealedSigmoid,
    Start,
    compute_annealed_scale,
    draw_initial_embedding,
)
from workers.model.penalties import newly_used
from workers.model.protect import Protector
from workers.rng import derive_seed
from workers.storage.taskstate import Carried, TaskState

# Share of free units below which a task can train little more than its head.
FEW_FREE_SHARE = 0.01


class CtrSettings(MethodSettings):
    """Settings of `ctr_tsm`."""

    width: PositiveInt = Field(
        64, description="A, number of hidden units of an adapter; all tasks share them"
    )
    s_max: float = Field(
        400.0,
        gt=1,
        description="largest scale s of the masks sigmoid(s e), reached at the end of each epoch",
    )
    c: NonNegativeFloat = Field(
        0.75, description="weight of the sparsity penalty R on units that no earlier task uses"
    )
    start: Start = Field(
        "normal",
        description="initial distribution of the mask embeddings e: `normal`: N(0, 1), half "
        "of the units on, as in the paper; `dense`: 1, all on; `uniform`: U(0, 2], all on; "
        "`sparse`: a normal with a unit on for 1 of expected_tasks tasks",
    )
    expected_tasks: Annotated[int, ActiveIf("start", ("sparse",))] = Field(
        10,
        ge=2,
        description="for `start: sparse`: expected number of tasks; a unit starts on for one "
        "of so many",
    )
    mask_lr: PositiveFloat | Literal["auto"] = Field(
        "auto",
        description="peak learning rate of the mask embeddings; `auto`: derived from "
        "mask_travel and the number of steps",
    )
    mask_travel: Annotated[PositiveFloat, ActiveIf("mask_lr", ("auto",))] = Field(
        4.0,
        description="for `mask_lr: auto`: largest distance that Adam can move an embedding "
        "over all steps; under `start: normal` half of them start within 0.7 of 0, where a "
        "unit switches",
    )


def masked_bottleneck(
    x: Tensor, down: Tensor, down_bias: Tensor, up: Tensor, up_bias: Tensor
) -> Tensor:
    """Return x + z2 with z1 = relu(fc1 x), z2 = relu(fc2 z1); x: (B, N, d).

    fc1 has the weight `down`, fc2 the weight `up`. Weights and biases are already multiplied by the
    masks. This equals masking the outputs, because m relu(v) = relu(m v) for m >= 0.
    """
    z1 = F.linear(x, down, down_bias).relu()
    z2 = F.linear(z1, up, up_bias).relu()
    return x + z2


S = TypeVar("S", bound=CtrSettings, default=Any)


class CtrTsm(Method[S]):
    """A chain: the tasks train the same adapters in turn, each with its own masks m1 and m2.

    An adapter computes x + z2 with z1 = m1 .* relu(fc1 x), z2 = m2 .* relu(fc2 z1). It follows
    attention and FFN in each of the L blocks of a frozen ViT. fc1 maps the width d to A hidden
    units, and fc2 maps them back. Each task trains embeddings e of its masks m = sigmoid(s e), with
    a scale s that grows within each epoch as in HAT, and stores the masks as 1[e > 0].
    Entries that earlier tasks use are locked: rows of fc1 and its bias by m1, entries of fc2 by the
    smaller of m2 (out) and m1 (in), the bias of fc2 by m2. Stored per task: (A + d) 2 L bits and a
    head. A base task is served by the plain backbone.

    Differences from the released code: all layer norms are frozen; masks are 0 or 1 in serving and
    in locks; locked entries are restored after each step, so that nothing is forgotten.
    """

    name = "ctr_tsm"
    has_constant_step = True
    family = "parameter isolation"
    keeps = "bits, head"
    paper = (
        "Achieving Forgetting Prevention and Knowledge Transfer in Continual Learning, NeurIPS 2021"
    )
    train_defaults = TrainDefaults(
        lr=3e-3,
        scratch_lr=1e-2,
        source="measured on seven real tasks at 64 px: configs/RESULTS.md",
    )
    needs_vit = True
    vits = BLOCK_VITS
    carries: ClassVar[tuple[str, ...]] = ("adapters", "used")
    starts_as_backbone = False
    # The function that computes an adapter, called at each site (see `AdapterSites`).
    form: ClassVar[Callable[..., Tensor]] = staticmethod(masked_bottleneck)
    Settings = CtrSettings
    per_task = frozenset({"s_max", "c", "start", "expected_tasks", "mask_lr", "mask_travel"})

    @classmethod
    def validate(cls, settings: S, train: TrainSettings, data: DataSettings, scenario: str) -> None:
        require_adamw(settings.mask_lr, train)

    @classmethod
    def changes_past_predictions(cls, scenario: str) -> bool:
        return cls.may_forget

    def __init__(self, backbone: nn.Module, settings: S, seed: int):
        super().__init__(backbone, settings, seed)
        self.sites = AdapterSites(backbone, self.form)
        # The up-projection has the standard deviation of PyTorch's Linear. It must not start at
        # zero, where relu has no gradient.
        self.adapters = Bottlenecks(
            len(self.sites),
            self.sites.width,
            settings.width,
            up_std=1 / math.sqrt(3 * settings.width),
        )
        # The modules that the chain carries from task to task.
        self.shared = nn.ModuleDict({"adapters": self.adapters})
        # (S, A + d): True for units that earlier tasks use, at the S = 2 L sites of adapters.
        self.used = torch.zeros(
            len(self.sites), settings.width + self.sites.width, dtype=torch.bool
        )
        # Number of earlier tasks.
        self.position = 0
        # task -> its masks `inner` (S, A) and `outer` (S, d)
        self.loaded: dict[str, dict[str, Tensor]] = {}

    def split(self, units: Tensor) -> tuple[Tensor, Tensor]:
        """Split units (S, A + d) into those of the bottleneck (S, A) and of the output (S, d)."""
        inner, outer = units.split([self.settings.width, self.sites.width], 1)
        return inner, outer

    # ---- training --------------------------------------------------------------------------------
    def begin(self, context: StepContext) -> list[ParamGroup]:
        if context.carried is not None:
            self.load_carried(context.carried)
        groups = super().begin(context)
        self.loaded.pop(context.task.name, None)
        device = self.device
        s = self.settings
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "ctr", context.task.name))
        embedding = draw_initial_embedding(
            tuple(self.used.shape), s.start, generator, s.expected_tasks
        )  # (S, A + d)
        self.mask = AnnealedSigmoid(embedding.to(device), s.s_max)
        self.shared.to(device)
        self.used = self.used.to(device)
        self.protector = Protector(self.locks())
        mask_group = {
            "name": "masks",
            "params": [self.mask.embedding],
            "lr": context.optim.mask_lr(s.mask_lr, s.mask_travel),
            "weight_decay": 0.0,
        }
        return [*groups, *self.shared_groups(context.optim), mask_group]

    def shared_groups(self, optim: OptimPlan) -> list[ParamGroup]:
        """Return the parameter groups of the shared modules."""
        return self.adapters.groups(optim.weight_decay)

    def locks(self) -> dict[str, tuple[nn.Parameter, Tensor]]:
        """Return the shared parameters by name, each with a mask: True for locked entries.

        By HAT's rule an entry is locked if earlier tasks use both its output and its input. Inputs
        of fc1 are always used.
        """
        inner, outer = self.split(self.used)
        a = self.adapters
        return {
            "down": (a.down, inner[:, :, None]),
            "down_bias": (a.down_bias, inner),
            "up": (a.up, outer[:, :, None] & inner[:, None, :]),
            "up_bias": (a.up_bias, outer),
        }

    def masked(self, inner: Tensor, outer: Tensor) -> dict[str, Tensor]:
        """Return the adapters' tensors, multiplied by m1 (S, A) and m2 (S, d).

        The masks are boolean or in [0, 1].
        """
        a = self.adapters
        return {
            "down": a.down * inner[:, :, None],
            "down_bias": a.down_bias * inner,
            "up": a.up * outer[:, :, None],
            "up_bias": a.up_bias * outer,
        }

    def training_weights(self, batch: Batch, progress: Progress) -> dict[str, Tensor]:
        if progress.steps_per_epoch == 1:
            raise UserError(
                f"task {self.training_tasks[0].name!r} has one step per epoch, and masks are "
                "hardened from step to step of an epoch; lower "
                "train.batch_size until an epoch has several"
            )
        s_max = self.settings.s_max
        scale = progress.number(
            "scale",
            lambda progress: compute_annealed_scale(progress.step, progress.steps_per_epoch, s_max),
        )
        self.soft = self.mask.sample(scale)
        return self.masked(*self.split(self.soft))

    def features(self, images: Tensor) -> Tensor:
        with self.sites.using(self.stack(self.weight_overrides)):
            features: Tensor = self.backbone(images)
        return features

    def stack(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the arguments of `form` for all sites (S, ...), from `weight_overrides`."""
        return dict(tensors)

    def loss(self, batch: Batch, progress: Progress) -> tuple[Tensor, dict[str, Tensor]]:
        """Return CE + c R, with R over the soft masks of this step."""
        ce, terms = super().loss(batch, progress)
        r = newly_used([self.soft], [self.used])
        return ce + self.settings.c * r, terms | {"newly_used": r.detach()}

    def after_backward(self) -> None:
        self.protector.gate()

    def after_step(self, progress: Progress) -> None:
        self.protector.restore()
        self.mask.clamp()

    def metrics(self) -> dict[str, float]:
        """Return the share of units that this task uses, and the share that no task uses so far."""
        task_units = self.mask.hard()
        return {
            "density": float(task_units.float().mean()),
            "free": 1 - float((task_units | self.used).float().mean()),
        }

    def warnings(self) -> list[str]:
        assert self.task is not None
        free_before = 1 - float(self.used.float().mean())
        free_after = self.metrics()["free"]
        if free_before < FEW_FREE_SHARE:
            return [
                f"task {self.task.name!r}: only {free_before:.2%} of the adapters' units were "
                "free, so it learned little but its head and the choice of units; raise width, or "
                "c so that tasks use fewer units"
            ]
        if free_after < FEW_FREE_SHARE:
            return [
                f"task {self.task.name!r}: {free_after:.2%} of the adapters' units are left for "
                "later tasks; raise width or c, or set start: sparse"
            ]
        return []

    def finish(self) -> tuple[TaskState, Carried]:
        task_units = self.mask.hard()
        inner, outer = self.split(task_units)
        masks = {"inner": inner.cpu().clone(), "outer": outer.cpu().clone()}
        tensors = {name: t.detach().clone() for name, t in self.shared.named_parameters()}
        tensors["used"] = self.used | task_units
        return self.state(masks=masks), Carried(tensors, {"tasks": self.position + 1})

    # ---- serving ---------------------------------------------------------------------------------
    def load_carried(self, carried: Carried) -> None:
        super().load_carried(carried)
        shared = {name: tensor for name, tensor in carried.tensors.items() if name != "used"}
        self.shared.load_state_dict(shared)
        self.used = carried.tensors["used"].to(self.used.device, copy=True)
        self.position = carried.meta["tasks"]

    def load_task(self, state: TaskState) -> None:
        """Load the masks of a finished task.

        A base task has no masks: the plain backbone serves it.
        """
        super().load_task(state)
        if state.masks:
            self.check_masks(state)
        self.loaded[state.task] = dict(state.masks)

    def check_masks(self, state: TaskState) -> None:
        """Raise `UserError` if the state's masks do not match these settings."""
        for name, size in (("inner", self.settings.width), ("outer", self.sites.width)):
            mask = state.masks.get(name)
            stored_shape = None if mask is None else tuple(mask.shape)
            expected_shape = (len(self.sites), size)
            if stored_shape != expected_shape:
                raise UserError(
                    f"task {state.task!r}: its state has {name} masks of shape {stored_shape}, "
                    f"these settings have {expected_shape}; use the backbone and the method's "
                    "settings of its run"
                )

    def serving_weights(self, task: str) -> dict[str, Tensor]:
        if task not in self.loaded:
            return self.masked(*self.split(self.mask.hard()))
        masks = self.loaded[task]
        if not masks:
            return {}
        device = self.adapters.down.device
        return self.masked(masks["inner"].to(device), masks["outer"].to(device))

    def flops_share(self, state: TaskState) -> float:
        """Return the relative FLOPs, without those of units that the task does not use."""
        inner = state.masks["inner"].sum(1)  # (S,)
        outer = state.masks["outer"].sum(1)  # (S,)
        weights = int((inner * (self.sites.width + outer)).sum())
        return 1 + compute_added_share(self.backbone, weights)
