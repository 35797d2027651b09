"""HAT: all tasks share one network whose weights are trained; per task, hard masks choose its
units, and units in use are locked.

Serra, Suris, Miron, Karatzoglou: Overcoming Catastrophic Forgetting with Hard Attention to the
Task, ICML 2018. Equation numbers are the paper's. AdaHAT: Wang et al., ECML PKDD 2024.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor
from typing_extensions import TypeVar

from workers.data.batch import Batch
from workers.errors import UserError
from workers.job import DataSettings, Task, TrainSettings
from workers.methods.base import (
    Method,
    MethodSettings,
    ParamGroup,
    Progress,
    Step,
    StepContext,
    needs_adamw,
)
from workers.model.compact import flops, plan_blocks
from workers.model.masked import BlockMasks
from workers.model.masks import AnnealedSigmoid, Start, annealed_scale, initial_embedding
from workers.model.penalties import newly_used
from workers.model.protect import Protector
from workers.model.units import masked_weights, unit_sites, unit_values
from workers.model.weights import Copies, norm_names
from workers.rng import derive_seed
from workers.storage.taskstate import Carried, TaskState

FEW = 0.01  # share of free units below which a task learns little but its head


class HatSettings(MethodSettings):
    """Defaults are for a pretrained ViT and few epochs. The paper's, for 200 epochs of plain SGD
    from random weights: s_max 400, c 0.75, price absolute, schedule linear, s_min null, start
    normal, mask_lr that of the weights (0.05)."""

    s_max: float = Field(
        100.0, gt=1, description="scale of the masks when they are hardest; useful from 25 to 800"
    )
    c: NonNegativeFloat = Field(
        0.1,
        description="weight of R, what units cost that no earlier task uses (Eq. 5); useful: 0.03 "
        "to 1, absolute: 0.1 to 2.5",
    )
    price: Literal["relative", "absolute"] = Field(
        "relative",
        description="relative: c counts in what a typical unit is worth to CE; absolute: as the "
        "paper",
    )
    schedule: Literal["linear", "official", "cosine"] = Field(
        "cosine", description="of the scale within an epoch; see `annealed_scale`"
    )
    s_min: PositiveFloat | None = Field(
        1.0,
        description="scale of the masks when they are softest; null: 1 / s_max, where all masks "
        "are 0.5",
    )
    compensation: Literal["exact", "official"] = Field(
        "exact", description="of the embeddings' gradient; see `AnnealedSigmoid`"
    )
    start: Start = Field(
        "uniform",
        description="where embeddings start; uniform and dense have all units on, so that training "
        "starts from the backbone",
    )
    expected_tasks: int = Field(
        10, ge=2, description="for start sparse: of how many tasks one should use a unit"
    )
    mask_lr: PositiveFloat | Literal["auto"] = Field(
        "auto", description="peak learning rate of the embeddings; auto: by mask_travel"
    )
    mask_travel: PositiveFloat = Field(
        4.0,
        description="for mask_lr auto: how far an embedding can go over all steps; they start up "
        "to 2 from 0",
    )
    per_task_affine: bool = Field(
        False, description="each task trains its own norms, class token and biases of proj and fc2"
    )


S = TypeVar("S", bound=HatSettings, default=Any)


class Hat(Method[S]):
    """A chain: h' = a .* h with a = sigmoid(s e) (Eq. 1), s annealed in every epoch; stored are
    hard masks 1[e > 0] per unit, and the weights hand on how many tasks use each unit. The base
    task, if there is one, is learned as a first task.

    Frozen from the start, because every task sees them: patch and position embedding, class token,
    norms, biases of proj and fc2; with `per_task_affine` the last four are copied for each task.

    Where it differs from the paper: masks of finished tasks are hard in test, lock and R, since
    soft ones leak; entries are put back after each step, since decay and momentum move them. Two
    things are for pretrained weights and few epochs. An epoch begins and ends with hard masks and
    never halves the network (cosine, s_min 1). And c has a `price`: a unit's share of R is c / N,
    on a pretrained ViT a hundredth of the noise of its gradient from CE, so that no unit would be
    let go before the paper's 200 epochs.
    """

    name = "hat"
    paper = "Overcoming Catastrophic Forgetting with Hard Attention to the Task, ICML 2018"
    needs_vit = True
    carries = ("weights", "uses")
    freezes_backbone = False
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
        needs_adamw(settings.mask_lr, train)
        if settings.s_min is not None and settings.s_min >= settings.s_max:
            raise UserError(
                f"s_min is {settings.s_min}, and s_max {settings.s_max}; masks harden from "
                "s_min to s_max, so s_min must be the smaller"
            )

    @classmethod
    def check_backbone(cls, settings: S, backbone: Any, tasks: tuple[Task, ...] = ()) -> None:
        super().check_backbone(settings, backbone, tasks)
        unit_sites(backbone)

    @classmethod
    def changes_past_predictions(cls, scenario: str) -> bool:
        return cls.may_forget

    @classmethod
    def steps_for(cls, settings: S, position: int) -> tuple[Step, ...]:
        return cls.steps

    def __init__(self, backbone: Any, settings: S, seed: int):
        super().__init__(backbone, settings, seed)
        self.sites = unit_sites(backbone)
        self.shared = dict(backbone.named_parameters())
        # unit, in order of sites -> tasks that use it
        self.uses = torch.zeros(sum(self.sites.values()), dtype=torch.int16)
        self.register_buffer("price", torch.ones(()))  # what c is multiplied by in the next step
        self.loaded: dict[
            str, tuple[dict[str, Tensor], dict[str, Tensor]]
        ] = {}  # task -> masks by site, copies

    def by_site(self, units: Tensor) -> dict[str, Tensor]:
        """(all units,) -> site -> (units of the site,)."""
        return dict(zip(self.sites, units.split(list(self.sites.values())), strict=True))

    # ---- training --------------------------------------------------------------------------------
    def begin(self, context: StepContext) -> list[ParamGroup]:
        if context.carried is not None:
            self.load_carried(context.carried)
        groups = super().begin(context)
        self.loaded.pop(context.task.name, None)
        device = self.device
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "hat", context.task.name))
        start = initial_embedding(
            tuple(self.uses.shape), self.settings.start, generator, self.settings.expected_tasks
        )
        self.mask = AnnealedSigmoid(
            start.to(device), self.settings.s_max, self.settings.compensation
        )
        self.uses = self.uses.to(device)
        self.price.fill_(self.settings.price == "absolute")
        self.copies = Copies(
            self.backbone, affine_names(self.backbone) if self.settings.per_task_affine else []
        )
        units = unit_values(self.backbone, self.by_site(self.uses))
        self.protector = Protector(
            {name: (self.shared[name], n > 0) for name, n in units.items() if bool(n.any())}
        )
        mask_lr = (
            self.settings.mask_travel / max(context.optim.mean_rate_steps, 1e-9)
            if self.settings.mask_lr == "auto"
            else self.settings.mask_lr
        )
        return [
            *groups,
            {
                "name": "weights",
                "params": [self.shared[n] for n in units if n.endswith("weight")],
                "weight_decay": context.optim.weight_decay,
            },
            {
                "name": "biases",
                "params": [self.shared[n] for n in units if n.endswith("bias")],
                "weight_decay": 0.0,
            },
            {"name": "masks", "params": [self.mask.embedding], "lr": mask_lr, "weight_decay": 0.0},
            {"name": "copies", "params": [*self.copies.values], "weight_decay": 0.0},
        ]

    def training_weights(self, batch: Batch, progress: Progress) -> dict[str, Tensor]:
        s = self.settings
        if progress.steps_per_epoch == 1:
            raise UserError(
                f"task {self.training_tasks[0].name!r} has one step per epoch, and HAT hardens "
                "its masks from step to step of an epoch; lower "
                "train.batch_size until an epoch has several"
            )
        self.scale = annealed_scale(
            progress.step, progress.steps_per_epoch, s.s_max, s.schedule, s.s_min
        )
        self.soft = self.mask.sample(self.scale)
        return self.copies.tensors() | masked_weights(self.backbone, self.by_site(self.soft))

    def loss(self, batch: Batch, progress: Progress) -> tuple[Tensor, dict[str, Tensor]]:
        """CE + c R (Eq. 5), R over the masks of this step (Eq. 4)."""
        ce, terms = super().loss(batch, progress)
        new = newly_used([self.soft], [self.uses > 0])
        return ce + self.settings.c * self.price * new, terms | {"newly_used": new.detach()}

    def after_backward(self) -> None:
        self.protector.gate()
        if self.settings.price == "relative":
            self.price.copy_(self.influence())

    @torch.no_grad()
    def influence(self) -> Tensor:
        """The root mean square over units of dCE / da in this step, times the number of free units:
        with this price, c = 1 makes R pull each unit down as much as CE typically pulls units to
        and fro."""
        slope, gradient = self.mask.slope(self.scale), self.mask.embedding.grad
        assert gradient is not None
        free = self.uses == 0
        count, seen = free.sum().clamp(min=1), (gradient != 0) & (slope > 0)
        of_ce = torch.where(seen, gradient / slope - self.settings.c * self.price / count * free, 0)
        return torch.where(
            seen.any(), count * (of_ce.square().sum() / seen.sum().clamp(min=1)).sqrt(), self.price
        )

    def after_step(self, progress: Progress) -> None:
        self.protector.restore()
        self.mask.clamp()

    def metrics(self) -> dict[str, float]:
        """Shares of units: this task's, those of all tasks with it, those that stay free."""
        own, earlier = self.mask.hard(), self.uses > 0
        capacity = float((own | earlier).float().mean())
        return {"density": float(own.float().mean()), "capacity": capacity, "free": 1 - capacity}

    def warnings(self) -> list[str]:
        assert self.task is not None
        free, left = float((self.uses == 0).float().mean()), self.metrics()["free"]
        said = []
        if free < FEW:
            said.append(
                f"task {self.task.name!r}: only {free:.2%} of the units were free, so it "
                "learned little but its head and the choice of "
                "units; raise c so that tasks use fewer units"
            )
        elif left < FEW:
            said.append(
                f"task {self.task.name!r}: {left:.2%} of the units are left for later tasks; "
                "raise c or mask_travel, or train for more steps"
            )
        return said

    def finish(self) -> tuple[TaskState, Carried]:
        own = self.mask.hard()
        weights = {
            name: self.shared[name].detach().clone()
            for name in unit_values(self.backbone, self.by_site(own))
        }
        state = self.state(
            masks={site: m.clone() for site, m in self.by_site(own.cpu()).items()},
            copies={name: t.detach().clone() for name, t in self.copies.tensors().items()},
        )
        return state, Carried(weights | {"uses": (self.uses + own).cpu()})

    # ---- serving ---------------------------------------------------------------------------------
    def load_carried(self, carried: Carried) -> None:
        super().load_carried(carried)
        with torch.no_grad():
            for name, tensor in carried.tensors.items():
                if name in self.shared:
                    self.shared[name].copy_(tensor)
        self.uses = carried.tensors["uses"].to(self.uses.device, copy=True)

    def load_task(self, state: TaskState) -> None:
        """Keeps the task's masks and copies beside those of other tasks."""
        super().load_task(state)
        for site, size in self.sites.items():
            found = tuple(state.masks[site].shape) if site in state.masks else None
            if found != (size,):
                raise UserError(
                    f"task {state.task!r}: its state has a mask {site} of shape {found}, this "
                    f"backbone has {size} units there; "
                    "use the backbone of its run"
                )
        self.loaded[state.task] = dict(state.masks), dict(state.copies)

    def serving_weights(self, task: str) -> dict[str, Tensor]:
        masks, copies = (
            self.loaded[task]
            if task in self.loaded
            else (self.by_site(self.mask.hard()), self.copies.tensors())
        )
        device = self.device
        return {n: t.to(device) for n, t in copies.items()} | masked_weights(
            self.backbone, {n: m.to(device) for n, m in masks.items()}
        )

    def flops_share(self, state: TaskState) -> float:
        """With the FFN neurons cut that the task does not use; channels of attention are zeros that
        are computed."""
        masks = [
            BlockMasks(neurons=state.masks[f"blocks.{i}.ff"])
            for i in range(len(self.backbone.blocks))  # type: ignore[arg-type]
        ]
        return flops(self.backbone, plan_blocks(self.backbone, masks)) / flops(
            self.backbone, plan_blocks(self.backbone, [BlockMasks()] * len(masks))
        )


class AdaHatSettings(HatSettings):
    intensity: PositiveFloat = Field(
        0.01, description="A: how much units of earlier tasks may move"
    )
    eps: PositiveFloat = Field(0.1, description="added to a site's share of R")


class AdaHat(Hat[AdaHatSettings]):
    """HAT whose locks give way: entries of a unit that n earlier tasks use move by r / (n + r), r =
    A / (eps + R of the unit's site). It forgets a little to go on learning where HAT runs out of
    units. The rate acts on the step and not on the gradient (see Protector).
    """

    name = "adahat"
    paper = (
        "AdaHAT: Adaptive Hard Attention to the Task in Task-Incremental Learning, ECML PKDD 2024"
    )
    may_forget: ClassVar[bool] = True
    Settings = AdaHatSettings
    per_task = Hat.per_task | {"intensity", "eps"}

    def after_backward(self) -> None:
        soft, uses = self.by_site(self.soft.detach()), self.by_site(self.uses)
        held = {}
        for site, n in uses.items():
            rate = self.settings.intensity / (self.settings.eps + newly_used([soft[site]], [n > 0]))
            held[site] = n / (n + rate)
        self.protector = Protector(
            {
                name: (self.shared[name], lock)
                for name, lock in unit_values(self.backbone, held).items()
            }
        )
        super().after_backward()

    def warnings(self) -> list[str]:
        return []  # it goes on learning without free units


def affine_names(backbone: Any) -> list[str]:
    """Parameters that write to the residual stream and are no weights: norms, class token, biases
    of proj and fc2, scales of context."""
    known = dict(backbone.named_parameters())
    ends = ("attn.proj.bias", "mlp.fc2.bias", "mlp.context.scale")
    wanted = [
        "cls_token",
        *norm_names(backbone),
        *(f"blocks.{i}.{end}" for i in range(len(backbone.blocks)) for end in ends),
    ]
    return [name for name in wanted if name in known]
