"""Piggyback: one bit per task for every weight of a frozen backbone.

Training updates a real value for each weight; the bit is 1 if it exceeds a threshold.

Mallya, Davis, Lazebnik: Piggyback: Adapting a Single Network to Multiple Tasks by Learning to Mask
Weights, ECCV 2018.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from workers.errors import UserError
from workers.job import DataSettings, TrainSettings
from workers.methods.base import ParamGroup, StepContext
from workers.methods.bases.weight_masks import ThresholdMasks, ThresholdSettings, full
from workers.methods.train_defaults import TrainDefaults
from workers.model.masks import Threshold
from workers.storage.taskstate import TaskState


class PiggybackSettings(ThresholdSettings):
    """Settings of `piggyback`."""

    ternary: bool = Field(
        False,
        description="whether masks have values -1, 0 and 1, at 2 bits per weight; false: 0 and 1",
    )
    init: Literal["ones", "uniform", "weights"] = Field(
        "ones",
        description="initial real values: `ones`: the setting `start`; `uniform`: U(-start, "
        "start); `weights`: the mean |W| of the layer",
    )
    scale_gradients: Literal["none", "layer", "entry"] = Field(
        "none",
        description="divisor of the real values' gradients, for SGD: `none`; `layer`: the "
        "mean |W| of the layer; `entry`: |W| of each entry",
    )

    def is_start_on(self) -> bool:
        return self.init == "weights" or super().is_start_on()


class Piggyback(ThresholdMasks[PiggybackSettings]):
    """M = 1[M^r > theta], y = (M .* W) x + b; the gradient of M is passed unchanged to M^r.

    M^r are the trained real values, M is the mask. By default all real values start above theta, so
    that training starts from the backbone. A state has one bit per weight. With `ternary`, M is -1
    where M^r < 0, and a state has two: `SITE` for nonzero values, `SITE.minus` for -1.

    Differences from the paper: the Linear and Conv weights of a ViT are masked. Biases, norms,
    class token and position embedding stay frozen. The rate of M^r follows from the number of steps
    (see `rate`): the paper's 1e-4 is for its 30 epochs and flips no entry in a short training.
    Weight decay never acts on M^r, because it would switch all entries off.
    """

    name = "piggyback"
    has_constant_step = True
    family = "masks"
    keeps = "bits, head"
    paper = (
        "Piggyback: Adapting a Single Network to Multiple Tasks by Learning to Mask Weights, "
        "ECCV 2018"
    )
    train_defaults = TrainDefaults(
        lr=2e-3,
        source="measured on seven real tasks at 64 px: configs/RESULTS.md",
    )
    Settings = PiggybackSettings
    per_task = ThresholdMasks.per_task | {"ternary", "init", "scale_gradients"}

    @classmethod
    def validate(
        cls, settings: PiggybackSettings, train: TrainSettings, data: DataSettings, scenario: str
    ) -> None:
        super().validate(settings, train, data, scenario)
        is_scaled = settings.mask_lr == "auto" and settings.init == "ones" and not settings.ternary
        for name in sorted({"start", "theta"} & settings.model_fields_set):
            # The rate is proportional to start - theta, so that a binary mask depends on neither.
            if is_scaled:
                raise UserError(
                    f"{name} is {getattr(settings, name)}, and has no effect with mask_lr auto "
                    "and init ones, where rates are relative to start - theta; leave it out, or "
                    "set mask_travel or mask_lr"
                )
        if settings.scale_gradients != "none" and train.optimizer == "adamw":
            raise UserError(
                f"scale_gradients is {settings.scale_gradients!r} with train.optimizer 'adamw': "
                "it divides every gradient by its own size, so "
                "that a constant factor changes nothing; use sgd, or set scale_gradients=none"
            )

    # ---- training --------------------------------------------------------------------------------
    def choose_start(self, site: str) -> float:
        if self.settings.init != "weights":
            return self.settings.start
        mean = float(self.sites[site].detach().abs().mean())
        if mean <= self.settings.theta:
            raise UserError(
                f"init is 'weights' with theta {self.settings.theta}, but the mean |W| of "
                f"{site} is {mean:.2g}: the layer would start switched "
                "off; lower theta below that, or set init=ones"
            )
        return mean

    def new_mask(self, site: str, weight: Tensor) -> nn.Module:
        start = self.choose_start(site)
        if self.settings.init == "uniform":
            # Drawn on the CPU, so that the values are the same on every device.
            values = torch.empty(weight.shape).uniform_(-start, start).to(weight.device)
        else:
            values = full(weight, start)
        return Threshold(values, self.settings.theta, self.settings.ternary)

    def begin(self, context: StepContext) -> list[ParamGroup]:
        groups = super().begin(context)
        self.divisors: dict[str, Tensor] = {}
        if self.settings.scale_gradients == "none":
            return groups
        for site, weight in self.sites.items():
            size = weight.detach().abs()
            if self.settings.scale_gradients == "layer":
                size = size.mean()
            self.divisors[site] = size.clamp(min=1e-12)  # where W = 0, the gradient is 0, too
        return groups

    def after_backward(self) -> None:
        for site, divisor in self.divisors.items():
            scores: Any = self.masks[site].scores
            if scores.grad is not None:
                scores.grad.div_(divisor)

    # ---- state -----------------------------------------------------------------------------------
    def packed(self, masks: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        if not self.settings.ternary:
            return masks, {}
        nonzero = {site: mask != 0 for site, mask in masks.items()}
        negative = {f"{site}.minus": mask < 0 for site, mask in masks.items()}
        return nonzero | negative, {}

    def unpacked(self, state: TaskState) -> dict[str, Tensor]:
        """Return masks of 0 and 1, or of -1, 0 and 1 if the state has entries `SITE.minus`."""
        masks: dict[str, Tensor] = {}
        for name, mask in state.masks.items():
            if name not in self.sites:
                continue
            negative = state.masks.get(f"{name}.minus")
            if negative is None:
                masks[name] = mask
            else:
                masks[name] = mask.to(torch.int8) * (1 - 2 * negative.to(torch.int8))
        return masks
