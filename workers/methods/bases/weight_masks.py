"""Bases of the methods that learn one mask per weight matrix: Piggyback, KSM, SupSup, WSN."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor, nn
from typing_extensions import TypeVar

from workers.data.batch import Batch
from workers.errors import UserError
from workers.job import ActiveIf, DataSettings, Neutral, Task, TrainSettings, key_inputs
from workers.methods.base import (
    Method,
    MethodSettings,
    OptimPlan,
    ParamGroup,
    Progress,
    StepContext,
    require_adamw,
)
from workers.model.masks import compute_mask_digest, compute_share_of_ones
from workers.model.weights import Copies, weight_sites
from workers.storage.taskstate import Carried, TaskState


class WeightMaskSettings(MethodSettings):
    """Settings of masks of weights."""

    mask_lr: PositiveFloat = Field(
        1e-3, description="peak learning rate of the real values behind the masks"
    )
    sites: Annotated[Literal["all", "ffn"], Neutral("all")] = Field(
        "all",
        description="which weights have masks: those of `all` linear and convolution layers, or "
        "those of the `ffn` of each block, as in MEAT",
    )


S = TypeVar("S", bound=WeightMaskSettings, default=Any)


class WeightMasks(Method[S]):
    """Task t is served with M_t .* W, computed when the task changes.

    By default the tasks form a star, and W is frozen. A site is a layer whose weight W has a mask;
    sites have the names of their modules.

    A subclass defines a mask and, if the mask is not boolean, its storage format (`packed`,
    `unpacked`). The mask is a module from `new_mask`: `sample()` returns the mask as floats with a
    gradient, for training, and `hard()` returns the mask for storage and serving
    (workers/model/masks.py).
    """

    Settings = WeightMaskSettings
    per_task = frozenset({"mask_lr"})

    def __init__(self, backbone: nn.Module, settings: S, seed: int):
        super().__init__(backbone, settings, seed)
        self.sites = weight_sites(backbone, settings.sites)
        self.masks: dict[str, nn.Module] = {}  # site -> mask of the task in training
        self.first_masks = ""  # digest of the masks before the first step
        self.copies = Copies(backbone, [])  # of the task in training
        self.loaded: dict[
            str, dict[str, Tensor]
        ] = {}  # task -> masks by site, as `hard` gives them
        self.loaded_copies: dict[
            str, dict[str, Tensor]
        ] = {}  # task -> its copies by parameter name

    @classmethod
    def check_backbone(cls, settings: S, backbone: nn.Module, tasks: tuple[Task, ...] = ()) -> None:
        super().check_backbone(settings, backbone, tasks)
        if not weight_sites(backbone, settings.sites):
            raise UserError(
                f"sites is {settings.sites!r}, and the backbone is a {type(backbone).__name__}, "
                "whose blocks have no FFN; use sites=all, or a ViT such as vit_tiny_patch16_224"
            )

    def new_mask(self, site: str, weight: Tensor) -> nn.Module:
        """Return the initial mask of a weight matrix, on the weight's device."""
        raise NotImplementedError

    def mask_shape(self, site: str) -> tuple[int, ...]:
        """Return the shape of a mask: one value per weight, or per group of weights.

        The weights of a group are consecutive in memory, see `masked`.
        """
        return tuple(self.sites[site].shape)

    def rate(self, site: str, optim: OptimPlan) -> float:
        """Return the peak learning rate of the real values of a site's mask."""
        return self.settings.mask_lr

    def copied(self) -> list[str]:
        """Return the backbone parameters with a trained copy per task, besides the masks."""
        return []

    def in_use(self, mask: Tensor) -> Tensor:
        """Return the boolean mask of the entries that are on in a mask from `hard`."""
        return mask != 0

    # ---- training --------------------------------------------------------------------------------
    def begin(self, context: StepContext) -> list[ParamGroup]:
        groups = super().begin(context)
        self.loaded.pop(context.task.name, None)
        self.loaded_copies.pop(context.task.name, None)
        self.masks = {
            site: self.new_mask(site, weight.detach()) for site, weight in self.sites.items()
        }
        # Registers the masks for `state_dict` and `to`, which ignore the dict.
        self.mask_modules = nn.ModuleList(self.masks.values())
        self.first_masks = compute_mask_digest(self.hard())
        self.copies = Copies(self.backbone, self.copied())
        by_rate: dict[float, list[nn.Parameter]] = {}
        for site, mask in self.masks.items():
            by_rate.setdefault(self.rate(site, context.optim), []).extend(mask.parameters())
        groups += [
            {"name": "masks", "params": some, "lr": rate, "weight_decay": 0.0}
            for rate, some in by_rate.items()
        ]
        return (
            [*groups, {"name": "copies", "params": [*self.copies.values], "weight_decay": 0.0}]
            if self.copies.names
            else groups
        )

    def training_weights(self, batch: Batch, progress: Progress) -> dict[str, Tensor]:
        weights = {
            f"{site}.weight": masked(self.sites[site], mask)
            for site, mask in self.sample_masks().items()
        }
        return weights | self.copies.tensors()

    def sample_masks(self) -> dict[str, Tensor]:
        """Return the masks of the task in training as floats with a gradient, by site."""
        return {site: mask.sample() for site, mask in self.masks.items()}  # type: ignore[operator]

    def hard(self) -> dict[str, Tensor]:
        """Return the masks of the task in training, by site."""
        return {site: mask.hard() for site, mask in self.masks.items()}  # type: ignore[operator]

    def metrics(self) -> dict[str, float]:
        """Return the share of mask entries that are on."""
        return {
            "density": compute_share_of_ones([self.in_use(mask) for mask in self.hard().values()])
        }

    def warnings(self) -> list[str]:
        if self.task is None:
            return []
        masks = self.hard()
        symptom = ""
        if all(bool((mask == 1).all()) for mask in masks.values()):
            symptom = "no mask entry was switched off"
        elif compute_mask_digest(masks) == self.first_masks:
            symptom = "no mask entry changed"
        if not symptom:
            return []
        return [
            f"task {self.task.name!r}: {symptom}, so the masks do nothing; raise mask_lr or "
            "mask_travel, or train for more steps"
        ]

    def finish(self) -> tuple[TaskState, Carried]:
        masks, floats = self.packed({site: mask.cpu() for site, mask in self.hard().items()})
        copies = {name: t.detach().clone() for name, t in self.copies.tensors().items()}
        return self.state(
            masks=masks, copies=floats | copies, meta={"settings": key_inputs(self.settings)}
        ), Carried()

    def packed(self, masks: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Convert masks by site to the boolean masks and the float tensors that a state stores.

        Their names are `SITE` or `SITE.SUFFIX`.
        """
        return masks, {}

    # ---- serving ---------------------------------------------------------------------------------
    def unpacked(self, state: TaskState) -> dict[str, Tensor]:
        """Invert `packed`: return masks by site, in the shapes of `mask_shape`."""
        return dict(state.masks)

    def load_task(self, state: TaskState) -> None:
        """Load the masks and copies of a finished task. A base task has none."""
        super().load_task(state)
        own = dict(self.backbone.named_parameters())
        for name, mask in state.masks.items():
            site = name if name in self.sites else name.rpartition(".")[0]
            shape = self.mask_shape(site) if site in self.sites else None
            if tuple(mask.shape) != shape:
                raise UserError(
                    f"task {state.task!r}: its state has a mask {name} of shape "
                    f"{tuple(mask.shape)}, this backbone has {shape} there; "
                    "use the backbone and the settings of its run"
                )
        self.loaded[state.task] = self.unpacked(state)
        self.loaded_copies[state.task] = {
            name: t for name, t in state.copies.items() if name in own
        }

    def serving_weights(self, task: str) -> dict[str, Tensor]:
        masks, copies = (
            (self.loaded[task], self.loaded_copies[task])
            if task in self.loaded
            else (self.hard(), self.copies.tensors())
        )
        weights = {
            f"{site}.weight": masked(self.sites[site], mask.to(self.sites[site].device))
            for site, mask in masks.items()
        }
        return weights | {name: t.to(self.device) for name, t in copies.items()}


class ThresholdSettings(WeightMaskSettings):
    """Settings of masks with entries that are on if a real value exceeds a threshold."""

    mask_lr: PositiveFloat | Literal["auto"] = Field(  # type: ignore[assignment]
        "auto",
        description="peak learning rate of the real values behind the masks; `auto`: derived "
        "from mask_travel and the number of steps",
    )
    mask_travel: Annotated[PositiveFloat, ActiveIf("mask_lr", ("auto",))] = Field(
        0.5,
        description="for `mask_lr: auto`: distance that a random walk of all Adam steps "
        "covers, in units of start - theta",
    )
    theta: float = Field(
        5e-3, gt=0, description="threshold of the real values; an entry above it is kept"
    )
    start: float = Field(1e-2, gt=0, description="initial real value of all entries")

    def is_start_on(self) -> bool:
        """Return whether the settings allow an entry to be on before the first step."""
        return self.start > self.theta


T = TypeVar("T", bound=ThresholdSettings, default=Any)


class ThresholdMasks(WeightMasks[T]):
    """Masks from real values: an entry is on if its value exceeds theta.

    The values start at `start`, unless a subclass overrides `choose_start`.
    """

    Settings = ThresholdSettings
    per_task = WeightMasks.per_task | {"mask_travel", "theta", "start"}

    @classmethod
    def validate(cls, settings: T, train: TrainSettings, data: DataSettings, scenario: str) -> None:
        require_adamw(settings.mask_lr, train)
        if not settings.is_start_on():
            raise UserError(
                f"start is {settings.start} with theta {settings.theta}: every entry would "
                "start switched off, and the network would be dead; "
                "raise start above theta"
            )

    def choose_start(self, site: str) -> float:
        """Return the initial real value of a site."""
        return self.settings.start

    def rate(self, site: str, optim: OptimPlan) -> float:
        """Return the learning rate of real values.

        A step of Adam moves a value by about the rate, so n steps in random directions move it by
        sqrt(n) rates. `auto` sets this distance to mask_travel * (start - theta) for any n. A much
        smaller rate flips no entry. With a much larger rate most entries reach the threshold in the
        same few steps, and the network collapses.
        """
        if self.settings.mask_lr == "auto":
            return (
                self.settings.mask_travel
                * (self.choose_start(site) - self.settings.theta)
                / math.sqrt(max(optim.full_rate_steps, 1e-9))
            )
        return self.settings.mask_lr


def masked(weight: Tensor, mask: Tensor) -> Tensor:
    """Return M .* W.

    A mask with fewer values than W has one value for each run of consecutive weights in memory: a
    group of input columns, a kernel, or an output row.
    """
    if mask.shape != weight.shape:
        return (weight.reshape(mask.numel(), -1) * mask.reshape(-1, 1)).view_as(weight)
    if mask.requires_grad and not weight.requires_grad:
        # In place, to save a pass over memory: `mask` is a temporary, and W needs no gradient.
        return mask.mul_(weight)
    return weight * mask


def full(weight: Tensor, value: float) -> Tensor:
    """Return an fp32 tensor in the shape of `weight`, filled with a value."""
    return torch.full_like(weight, value, dtype=torch.float32)
