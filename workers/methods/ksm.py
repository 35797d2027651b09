"""KSM: one mask value per task and kernel of a frozen backbone.

The value is 1 if the kernel is on, else a soft coefficient of at most one half.

Yang, He, Zhang, Fan: KSM: Fast Multiple Task Adaption via Kernel-wise Soft Mask Learning, CVPR
2021.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor, nn

from workers.errors import UserError
from workers.job import ActiveIf, Task
from workers.methods.bases.weight_masks import ThresholdMasks, ThresholdSettings
from workers.methods.train_defaults import TrainDefaults
from workers.model.masks import SoftBinary, sample_together
from workers.model.norms import norm_parameter_names
from workers.model.weights import weight_sites
from workers.storage.taskstate import TaskState


class KsmSettings(ThresholdSettings):
    """Settings of `ksm`."""

    granularity: Literal["kernel", "channel", "element"] = Field(
        "kernel",
        description="which weights share a mask value: `kernel`: those of a kernel; "
        "`channel`: those of an output channel; `element`: none",
    )
    group: Annotated[PositiveInt, ActiveIf("granularity", ("kernel",))] = Field(
        8,
        description="for `granularity: kernel`: number of consecutive input columns of a "
        "Linear layer that form a kernel; in a layer whose columns it does not divide, the largest "
        "number that divides both",
    )
    soft: bool = Field(
        True,
        description="whether kernels that are off keep a coefficient of at most one half, as "
        "in the paper; false: 0",
    )
    norms: bool = Field(
        True, description="whether each task trains its own copies of the norms' weights and biases"
    )
    # The default is larger than Piggyback's, because kernels that are off keep a part of their
    # weights.
    mask_travel: Annotated[PositiveFloat, ActiveIf("mask_lr", ("auto",))] = Field(
        2.0,
        description="for `mask_lr: auto`: distance that a random walk of all Adam steps "
        "covers, in units of start - theta",
    )
    beta: PositiveFloat = Field(
        1200.0, description="steepness of the sigmoid that gives the mask its gradient"
    )
    temperature: PositiveFloat = Field(
        100.0,
        description="divisor of that sigmoid's logit; the gradient at theta is beta / (4 "
        "temperature)",
    )


class Ksm(ThresholdMasks[KsmSettings]):
    """W' = (b + 0.5 a) .* W, with one b and one a per kernel, see `SoftBinary`.

    Each kernel has a trained real value. b = 1 if the value is at least the threshold `theta`; then
    a = 0. For a kernel that is off, a in [0, 1] is its value, scaled by the smallest and the
    largest value of the layer. All values start above theta, so that training starts from the
    backbone.

    Stored: the bits b, the coefficients 0.5 a of kernels that are off (as `SITE.soft`, in order),
    and copies of norms. The real values are not needed in serving.

    Differences from the paper: a Linear has no kernels, so `group` consecutive input columns of an
    output row form a kernel; the patch embedding has true kernels. The learning rate of real values
    follows from the number of steps (see `rate`); copies of norms have the learning rate of heads.
    For the smallest and the largest value of a layer, a kernel that is on counts as exactly 0; in
    the released code this 0 has a rounding error.
    """

    name = "ksm"
    has_constant_step = True
    family = "masks"
    keeps = "bits, coefficients, norms, head"
    paper = "KSM: Fast Multiple Task Adaption via Kernel-wise Soft Mask Learning, CVPR 2021"
    train_defaults = TrainDefaults(
        lr=2e-3,
        source="measured on seven real tasks at 64 px: configs/RESULTS.md",
    )
    revision = 2
    Settings = KsmSettings
    per_task = ThresholdMasks.per_task | {"soft", "norms", "beta", "temperature"}

    @classmethod
    def check_backbone(
        cls, settings: KsmSettings, backbone: nn.Module, tasks: tuple[Task, ...] = ()
    ) -> None:
        super().check_backbone(settings, backbone, tasks)
        columns = {}  # site -> input columns of linear layers
        for site, weight in weight_sites(backbone, settings.sites).items():
            if weight.ndim == 2:
                columns[site] = weight.shape[1]
        divisors = [math.gcd(count, settings.group) for count in columns.values()]
        is_single = settings.group > 1 and max(divisors, default=2) == 1
        if settings.granularity == "kernel" and is_single:
            site = next(iter(columns))
            raise UserError(
                f"group is {settings.group}, but {site} has {columns[site]} input columns, which "
                "do not fall into such groups, nor do those of any other linear layer; choose a "
                "divisor, or granularity=element"
            )

    def mask_shape(self, site: str) -> tuple[int, ...]:
        """Return the shape of a mask, by `granularity`.

        `kernel`: (out, in / group), for a convolution (out, in). `channel`: (out,). `element`: that
        of the weight.
        """
        shape = tuple(self.sites[site].shape)
        if self.settings.granularity == "element":
            return shape
        if self.settings.granularity == "channel":
            return shape[:1]
        if len(shape) > 2:
            return shape[:2]
        return (shape[0], shape[1] // math.gcd(shape[1], self.settings.group))

    def new_mask(self, site: str, weight: Tensor) -> nn.Module:
        s = self.settings
        start = torch.full(self.mask_shape(site), s.start, device=weight.device)
        return SoftBinary(start, s.theta, s.beta, s.temperature, s.soft)

    def sample_masks(self) -> dict[str, Tensor]:
        # `masked` multiplies a mask with the shape of its weight in place. Such a mask must not be
        # a view, which `sample_together` returns, so it is sampled on its own.
        small = [site for site in self.masks if self.mask_shape(site) != self.sites[site].shape]
        masks: list[Any] = [self.masks[site] for site in small]
        samples = dict(zip(small, sample_together(masks), strict=True))
        for site, mask in self.masks.items():
            if site not in samples:
                samples[site] = mask.sample()  # type: ignore[operator]
        return samples

    def copied(self) -> list[str]:
        return norm_parameter_names(self.backbone) if self.settings.norms else []

    def in_use(self, mask: Tensor) -> Tensor:
        return mask == 1

    # ---- state -----------------------------------------------------------------------------------
    def packed(self, masks: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        on = {site: self.in_use(mask) for site, mask in masks.items()}
        if not self.settings.soft:
            return on, {}
        coefficients = {}
        for site, mask in masks.items():
            off_values = mask[~on[site]]
            if len(off_values):
                coefficients[f"{site}.soft"] = off_values
        return on, coefficients

    def unpacked(self, state: TaskState) -> dict[str, Tensor]:
        """Return the masks of a state, with soft coefficients if the state has them."""
        return {site: self._build_soft_mask(site, on, state) for site, on in state.masks.items()}

    def _build_soft_mask(self, site: str, on: Tensor, state: TaskState) -> Tensor:
        values = state.copies.get(f"{site}.soft")
        if values is None:
            return on
        num_off = int((~on).sum())
        if len(values) != num_off:
            raise UserError(
                f"task {state.task!r}: its state has {len(values)} soft values for the "
                f"{num_off} kernels of {site} that are off; "
                "the file is damaged, remove it and run the same command again"
            )
        return on.to(values.dtype).masked_scatter_(~on, values)
