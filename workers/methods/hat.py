"""HAT: all tasks share one trained network. Each task has a binary mask over its units.

A unit is a query or value channel of attention, or a neuron of the feed-forward network. The
weights of units that earlier tasks use are locked: training cannot change them.

Serra, Suris, Miron, Karatzoglou: Overcoming Catastrophic Forgetting with Hard Attention to the
Task, ICML 2018. Equation numbers are the paper's. AdaHAT: Wang et al., ECML PKDD 2024.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from typing_extensions import TypeVar

from workers.data.batch import Batch
from workers.errors import UserError
from workers.job import ActiveIf, DataSettings, Task, TrainSettings
from workers.methods.base import (
    BLOCK_VITS,
    Method,
    MethodSettings,
    ParamGroup,
    Progress,
    Step,
    StepContext,
    require_adamw,
)
from workers.methods.train_defaults import TrainDefaults
from workers.model.compact import count_multiply_adds, flops, plan_blocks
from workers.model.context import Context, context_modules
from workers.model.masked import BlockMasks
from workers.model.masks import (
    AnnealedSigmoid,
    Start,
    compute_annealed_scale,
    draw_initial_embedding,
)
from workers.model.norms import norm_parameter_names
from workers.model.penalties import newly_used
from workers.model.protect import Protector
from workers.model.tokens import count_block_tokens
from workers.model.units import masked_weights, spread_unit_values, sum_by_site, unit_sites
from workers.model.weights import Copies
from workers.rng import derive_seed
from workers.storage.taskstate import Carried, TaskState

MIN_FREE_SHARE = 0.01  # free units / all units; below it a task trains little more than its head


class HatSettings(MethodSettings):
    """Settings of HAT. The defaults are for a pretrained ViT and few epochs.

    The paper's values, for 200 epochs of plain SGD from random weights: s_max 400, c 0.75, price
    absolute, schedule linear, s_min null, start normal, mask_lr that of the weights (0.05).
    """

    s_max: float = Field(100.0, gt=1, description="largest s of sigmoid(s e); useful: 25 to 800")
    c: NonNegativeFloat = Field(
        0.1,
        description="weight of the regulariser R (Eq. 5), which penalises the use of units that no "
        "earlier task uses; useful: 0.03 to 1, and 0.1 to 2.5 with price absolute",
    )
    price: Literal["relative", "absolute"] = Field(
        "relative",
        description="factor of c; relative: root mean square gradient of the cross "
        "entropy with respect to a mask value, times the number of free units; absolute: 1, as "
        "in the paper",
    )
    schedule: Literal["linear", "official", "cosine"] = Field(
        "cosine",
        description="s over the steps of an epoch; linear: from s_min to s_max; official: "
        "as the authors' code, one step short of s_max; cosine: from s_max to s_min and back",
    )
    s_min: PositiveFloat | None = Field(
        1.0,
        description="smallest s of sigmoid(s e); null: 1 / s_max as in the paper, where all mask "
        "values are about 0.5",
    )
    compensation: Literal["exact", "official"] = Field(
        "exact",
        description="how the gradient of the embeddings makes up for s (Sec. 2.5); exact: as the "
        "paper's formula; official: as the authors' code; see `AnnealedSigmoid`",
    )
    start: Start = Field(
        "uniform",
        description="initialisation of the embeddings e: normal N(0, 1), uniform (0, 2], dense 1, "
        "sparse N(m, 1); with uniform and dense all units are on, so that training starts from the "
        "backbone",
    )
    expected_tasks: Annotated[int, ActiveIf("start", ("sparse",))] = Field(
        10,
        ge=2,
        description="for start sparse: a unit starts on with probability 1 / expected_tasks",
    )
    mask_lr: PositiveFloat | Literal["auto"] = Field(
        "auto", description="peak learning rate of the embeddings; auto: from mask_travel"
    )
    mask_travel: Annotated[PositiveFloat, ActiveIf("mask_lr", ("auto",))] = Field(
        4.0,
        description="for mask_lr auto: the most by which AdamW can change an embedding over all "
        "optimizer steps; with start uniform they begin in (0, 2]",
    )
    per_task_affine: bool = Field(
        False, description="each task trains its own norms, class token and biases of proj and fc2"
    )


S = TypeVar("S", bound=HatSettings, default=Any)


class Hat(Method[S]):
    """Tasks are learned in sequence: each starts from the weights of the previous one.

    A unit's output h is multiplied by a = sigmoid(s e) (Eq. 1). e is the unit's trained embedding,
    and the scale s is annealed in every epoch. This code multiplies the weights of the unit by a
    instead, which is equivalent. The binary masks 1[e > 0] are stored. The chain carries the
    weights and, for each unit, the number of tasks that use it. A base task, on which the backbone
    was fine-tuned, is trained once more with masks, as a first task.

    Parameters that every task uses are frozen from the start: embeddings of patches and positions
    (also relative position biases), class token, norms, layer scales, biases of proj and fc2. With
    `per_task_affine` each task trains its own copies of class token, norms and these two biases.

    Differences from the paper:
    - Masks of finished tasks are binary in inference, in locking and in R: soft masks let training
      change weights that earlier tasks use.
    - Locked entries of weights are restored after each optimizer step, because weight decay and
      momentum move them.
    - For pretrained weights and few epochs, s decreases from s_max to `s_min` and rises again in an
      epoch (cosine). So an epoch begins and ends with hard masks, and with the default `s_min` of 1
      it never scales all outputs by 0.5.
    - Rotary embeddings mix two channels of queries, and of keys. On backbones with rotary
      embeddings a mask acts on the keys of a unit too, so that a unit that is off does not
      contribute to the scores.
    - c is multiplied by `price`. The gradient of c R with respect to a mask value is c / N, with N
      free units. On a pretrained ViT that is a hundredth of the noise of the gradient of the cross
      entropy: no unit would be turned off before the paper's 200 epochs.
    """

    name = "hat"
    has_constant_step = True
    family = "parameter isolation"
    keeps = "bits, head"
    paper = "Overcoming Catastrophic Forgetting with Hard Attention to the Task, ICML 2018"
    train_defaults = TrainDefaults(
        lr=5e-4,
        scratch_lr=1e-3,
        source="measured on seven real tasks at 64 px: configs/RESULTS.md",
    )
    needs_vit = True
    vits = BLOCK_VITS
    carries = ("weights", "uses")
    freezes_backbone = False
    revision = 2
    Settings = HatSettings
    per_task = frozenset(
        {
            "s_max",
            "c",
            "price",
            "schedule",
            "s_min",
            "compensation",
            "start",
            "expected_tasks",
            "mask_lr",
            "mask_travel",
            "per_task_affine",
        }
    )
    price: Tensor

    @classmethod
    def validate(cls, settings: S, train: TrainSettings, data: DataSettings, scenario: str) -> None:
        require_adamw(settings.mask_lr, train)
        if settings.s_min is not None and settings.s_min >= settings.s_max:
            raise UserError(
                f"s_min is {settings.s_min} and s_max is {settings.s_max}; the scale of the masks "
                "stays between them, so give an s_min below s_max"
            )

    @classmethod
    def check_backbone(cls, settings: S, backbone: Any, tasks: tuple[Task, ...] = ()) -> None:
        super().check_backbone(settings, backbone, tasks)
        unit_sites(backbone)  # raises UserError on other backbones

    @classmethod
    def changes_past_predictions(cls, scenario: str) -> bool:
        return cls.may_forget

    @classmethod
    def steps_for(cls, settings: S, position: int) -> tuple[Step, ...]:
        return cls.steps  # also for the base task

    def __init__(self, backbone: Any, settings: S, seed: int):
        super().__init__(backbone, settings, seed)
        self.sites = unit_sites(backbone)  # site, e.g. `blocks.0.qk` -> its number of units
        self.shared = dict(backbone.named_parameters())
        # (units,) in order of sites: how many finished tasks use each unit
        self.uses = torch.zeros(sum(self.sites.values()), dtype=torch.int16)
        self.register_buffer("price", torch.ones(()))  # factor of c in the next step
        # finished task -> its masks by site, and its copies of parameters by name
        self.loaded: dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]] = {}

    def by_site(self, units: Tensor) -> dict[str, Tensor]:
        """Split a tensor (all units,) into one tensor (units of the site,) for each site."""
        return dict(zip(self.sites, units.split(list(self.sites.values())), strict=True))

    # ---- training --------------------------------------------------------------------------------
    def begin(self, context: StepContext) -> list[ParamGroup]:
        if context.carried is not None:
            self.load_carried(context.carried)
        groups = super().begin(context)
        self.loaded.pop(context.task.name, None)  # else its stored mask would be used
        device = self.device
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "hat", context.task.name))
        start = draw_initial_embedding(
            tuple(self.uses.shape), self.settings.start, generator, self.settings.expected_tasks
        )
        self.mask = AnnealedSigmoid(
            start.to(device), self.settings.s_max, self.settings.compensation
        )
        self.uses = self.uses.to(device)
        # With `price: relative` it is 0 until the first gradient has been measured.
        self.price.fill_(1.0 if self.settings.price == "absolute" else 0.0)
        self.copies = Copies(
            self.backbone, find_affine_names(self.backbone) if self.settings.per_task_affine else []
        )
        # number of finished tasks that use each entry, by parameter
        uses_by_name = spread_unit_values(self.backbone, self.by_site(self.uses))
        locks = {}
        for name, count in uses_by_name.items():
            if bool(count.any()):
                locks[name] = (self.shared[name], count > 0)
        self.protector = Protector(locks)
        mask_lr = context.optim.mask_lr(self.settings.mask_lr, self.settings.mask_travel)
        return [
            *groups,
            {
                "name": "weights",
                "params": [self.shared[n] for n in uses_by_name if n.endswith("weight")],
                "weight_decay": context.optim.weight_decay,
            },
            {
                "name": "biases",
                "params": [self.shared[n] for n in uses_by_name if n.endswith("bias")],
                "weight_decay": 0.0,
            },
            {"name": "masks", "params": [self.mask.embedding], "lr": mask_lr, "weight_decay": 0.0},
            {"name": "copies", "params": [*self.copies.values], "weight_decay": 0.0},
        ]

    def training_weights(self, batch: Batch, progress: Progress) -> dict[str, Tensor]:
        settings = self.settings
        if progress.steps_per_epoch == 1:
            raise UserError(
                f"task {self.training_tasks[0].name!r} has one optimizer step per epoch, and HAT "
                "changes the scale of its masks from step to step of an epoch; lower "
                "train.batch_size until an epoch has several steps"
            )
        self.scale = progress.number(
            "scale",
            lambda progress: compute_annealed_scale(
                progress.step,
                progress.steps_per_epoch,
                settings.s_max,
                settings.schedule,
                settings.s_min,
            ),
        )
        self.soft = self.mask.sample(self.scale)
        return self.copies.tensors() | masked_weights(self.backbone, self.by_site(self.soft))

    def loss(self, batch: Batch, progress: Progress) -> tuple[Tensor, dict[str, Tensor]]:
        """Return CE + c price R (Eq. 5), with R over the masks of this step (Eq. 4)."""
        ce, terms = super().loss(batch, progress)
        regularizer = newly_used([self.soft], [self.uses > 0])
        loss = ce + self.settings.c * self.price * regularizer
        return loss, terms | {"newly_used": regularizer.detach()}

    def after_backward(self) -> None:
        self.protector.gate()
        if self.settings.price == "relative":
            self.price.copy_(self.measure_relative_price())

    @torch.no_grad()
    def measure_relative_price(self) -> Tensor:
        """Return the root mean square of dCE / da in this step, times the number of free units.

        With c = 1, the gradient of price * R with respect to a mask value then has the typical size
        of the gradient of the cross entropy. Units with a zero gradient are ignored. If all
        gradients are zero, the price is unchanged.
        """
        slope = self.mask.slope(self.scale)  # (units,) d(loss) / d(e) = slope * d(loss) / d(a)
        gradient = self.mask.embedding.grad
        assert gradient is not None
        is_free = self.uses == 0
        num_free = is_free.sum().clamp(min=1)
        is_measured = (gradient != 0) & (slope > 0)
        of_regularizer = self.settings.c * self.price / num_free * is_free
        ce_gradient = torch.where(is_measured, gradient / slope - of_regularizer, 0)
        mean_square = ce_gradient.square().sum() / is_measured.sum().clamp(min=1)
        return torch.where(is_measured.any(), num_free * mean_square.sqrt(), self.price)

    def after_step(self, progress: Progress) -> None:
        self.protector.restore()
        self.mask.clamp()

    def metrics(self) -> dict[str, float]:
        """Return shares of all units: used by this task, by this or earlier tasks, and free."""
        task_mask = self.mask.hard()
        used = float((task_mask | (self.uses > 0)).float().mean())
        return {"density": float(task_mask.float().mean()), "capacity": used, "free": 1 - used}

    def warnings(self) -> list[str]:
        assert self.task is not None
        free_before = float((self.uses == 0).float().mean())
        free_after = self.metrics()["free"]
        warnings = []
        if free_before < MIN_FREE_SHARE:
            warnings.append(
                f"task {self.task.name!r}: only {free_before:.2%} of the units were free, so it "
                "learned little but its head and the choice of units; raise c, from the first task "
                "on, so that tasks use fewer units"
            )
        elif free_after < MIN_FREE_SHARE:
            warnings.append(
                f"task {self.task.name!r}: {free_after:.2%} of the units are left for later tasks; "
                "raise c or mask_travel, or train for more steps"
            )
        return warnings

    def finish(self) -> tuple[TaskState, Carried]:
        task_mask = self.mask.hard()
        weights = {}
        # all weights and biases with entries of units
        for name in spread_unit_values(self.backbone, self.by_site(task_mask)):
            weights[name] = self.shared[name].detach().clone()
        state = self.state(
            masks={site: m.clone() for site, m in self.by_site(task_mask.cpu()).items()},
            copies={name: t.detach().clone() for name, t in self.copies.tensors().items()},
        )
        return state, Carried(weights | {"uses": (self.uses + task_mask).cpu()})

    # ---- stored states, inference ----------------------------------------------------------------
    def load_carried(self, carried: Carried) -> None:
        super().load_carried(carried)
        with torch.no_grad():
            for name, tensor in carried.tensors.items():
                if name in self.shared:
                    self.shared[name].copy_(tensor)
        self.uses = carried.tensors["uses"].to(self.uses.device, copy=True)

    def load_task(self, state: TaskState) -> None:
        """Load the masks and copies of a finished task; several tasks can be loaded."""
        super().load_task(state)
        for site, size in self.sites.items():
            mask = state.masks.get(site)
            if mask is None or tuple(mask.shape) != (size,):
                stored = "no mask" if mask is None else f"a mask of shape {tuple(mask.shape)}"
                raise UserError(
                    f"task {state.task!r}: its state has {stored} for {site}, this backbone has "
                    f"{size} units there; use the backbone that the task was trained with"
                )
        self.loaded[state.task] = dict(state.masks), dict(state.copies)

    def serving_weights(self, task: str) -> dict[str, Tensor]:
        if task in self.loaded:
            masks, copies = self.loaded[task]
        else:  # the task in training
            masks = self.by_site(self.mask.hard())
            copies = self.copies.tensors()
        device = self.device
        return {n: t.to(device) for n, t in copies.items()} | masked_weights(
            self.backbone, {n: m.to(device) for n, m in masks.items()}
        )

    def flops_share(self, state: TaskState) -> float:
        """Return the relative FLOPs of a forward pass without the unused neurons.

        Attention channels that the task does not use are still computed, and count.
        """
        if not isinstance(self.backbone, VisionTransformer):
            return self.measured_share(state)
        masks = [
            BlockMasks(neurons=state.masks[f"blocks.{i}.ff"])
            for i in range(len(self.backbone.blocks))
        ]
        return flops(self.backbone, plan_blocks(self.backbone, masks)) / flops(
            self.backbone, plan_blocks(self.backbone, [BlockMasks()] * len(masks))
        )

    def measured_share(self, state: TaskState) -> float:
        """Return `flops_share` from measured multiply-adds and the weights of unused neurons."""
        vit: Any = self.backbone
        off = {site: ~mask.to(self.device) for site, mask in state.masks.items()}
        removed = 0
        for name, is_off in spread_unit_values(vit, off).items():
            parameter = self.shared[name]
            if ".mlp." in name and parameter.ndim == 2:
                removed += int(is_off.expand_as(parameter).sum())
        whole = count_multiply_adds(vit, 3, *vit.patch_embed.img_size)
        return 1 - count_block_tokens(vit) * removed / whole


class AdaHatSettings(HatSettings):
    """Settings of `adahat`."""

    intensity: PositiveFloat = Field(
        0.01, description="A: how far weights of units that earlier tasks use may move"
    )
    eps: PositiveFloat = Field(0.1, description="added to R of a site")


class AdaHat(Hat[AdaHatSettings]):
    """HAT with soft locks, which continues to learn without free units, and forgets a little.

    The optimizer's step of an entry of a unit that n earlier tasks use is multiplied by r / (n +
    r). r = A / (eps + R), with `intensity` A and HAT's regulariser R over the unit's site only. The
    factor acts on the step, not on the gradient, for the reasons in `Protector`.
    """

    name = "adahat"
    has_constant_step = True
    family = "parameter isolation"
    keeps = "bits, head"
    paper = (
        "AdaHAT: Adaptive Hard Attention to the Task in Task-Incremental Learning, ECML PKDD 2024"
    )
    train_defaults = TrainDefaults(
        lr=5e-4,
        scratch_lr=1e-3,
        source="measured on seven real tasks at 64 px: configs/RESULTS.md",
    )
    may_forget: ClassVar[bool] = True
    Settings = AdaHatSettings
    per_task = Hat.per_task | {"intensity", "eps"}

    def begin(self, context: StepContext) -> list[ParamGroup]:
        groups = super().begin(context)
        self.protector = Protector({})
        sizes = [*self.sites.values()]
        site = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        self.site_of_unit = site.to(self.device)  # (units,), an index in `sites`
        self.is_free = self.uses == 0
        self.num_free = sum_by_site(self.is_free, sizes).clamp(min=1)  # (sites,)
        return groups

    @torch.no_grad()
    def after_backward(self) -> None:
        # R changes with the masks, so the locks are new in every step.
        taken = sum_by_site(self.soft * self.is_free, [*self.sites.values()])
        rate = self.settings.intensity / (self.settings.eps + taken / self.num_free)  # (sites,)
        # part of the optimizer step that is undone, in [0, 1), by unit
        blocked = self.uses / (self.uses + rate[self.site_of_unit])
        self.locks = {}
        for name, lock in spread_unit_values(self.backbone, self.by_site(blocked)).items():
            self.locks[name] = (self.shared[name], lock)
        self.protector.replace_locks(self.locks)
        super().after_backward()

    def after_step(self, progress: Progress) -> None:
        # Again, because `after_backward` does not run in steps that a CUDA graph repeats
        # (`train.compile: step`).
        self.protector.replace_locks(self.locks)
        super().after_step(progress)

    def warnings(self) -> list[str]:
        return []  # it continues to learn without free units


def find_affine_names(backbone: Any) -> list[str]:
    """Return the names of the parameters that each task copies with `per_task_affine`.

    They belong to no unit: the class token, norms, biases of proj and fc2, and the parameters of
    Context Broadcasting in the MLP and attention branches (see context.py).
    """
    names = ["cls_token", *norm_parameter_names(backbone)]
    for index in range(len(backbone.blocks)):
        ends = ["attn.proj.bias", "mlp.fc2.bias"]
        for path, module in context_modules(backbone.blocks[index]):
            if isinstance(module, Context):
                ends += [f"{path}.{name}" for name, _ in module.named_parameters()]
        names += [f"blocks.{index}.{end}" for end in ends]
    existing = dict(backbone.named_parameters())
    return [name for name in names if name in existing]
