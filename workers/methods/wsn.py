"""WSN: each task trains weights and scores together, and uses the weights with the highest scores.

Weights of earlier tasks do not change.

Kang, Mina, Madjid, Yoon, Hasegawa-Johnson, Hwang, Yoo: Forget-free Continual Learning with Winning
Subnetworks, ICML 2022.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from workers.methods.base import ParamGroup, Progress, StepContext
from workers.methods.bases.weight_masks import WeightMasks, WeightMaskSettings
from workers.methods.train_defaults import TrainDefaults
from workers.model.masks import TopK
from workers.model.protect import Protector
from workers.storage.taskstate import Carried, TaskState, pack_mask, unpack_mask


class WsnSettings(WeightMaskSettings):
    """Settings of `wsn`."""

    density: float = Field(
        0.5,
        gt=0,
        lt=1,
        description="share of each layer's weights that a task uses, c in the paper",
    )
    start: Literal["magnitude", "random"] = Field(
        "magnitude",
        description="initial scores of a task: `magnitude`: |W|, so that training starts from "
        "the largest weights; `random`: as in the paper",
    )


class Wsn(WeightMasks[WsnSettings]):
    """A mask m_t per task chooses a share of each layer's weights: W_eff = m_t .* W.

    m_t is 1 for the weights with the highest |score|, a share c (`density`) of each layer, else 0.
    The gradient of m_t is passed unchanged to |score|. The mask M = m_1 or ... or m_{t-1} (Eq. 4)
    marks the weights that earlier tasks use. Task t can use them, but changes only the others.

    Stored for a task: a bit per weight, and its head. Carried to the next task: the weights, and
    the updated M as bits. Biases, norms, class token and position embedding keep the values of the
    backbone. A base task in the stream has no mask: it is served by the current weights, so later
    tasks change its predictions.

    Differences from the paper: training starts from a pretrained backbone, and a random choice of
    its weights would destroy it, so scores start at |W|. Scores are initialised for each task,
    while the released code continues with the scores of the previous task.
    """

    name = "wsn"
    has_constant_step = True
    family = "parameter isolation"
    keeps = "bits, head"
    paper = "Forget-free Continual Learning with Winning Subnetworks, ICML 2022"
    train_defaults = TrainDefaults(
        lr=1e-4,
        scratch_lr=1e-3,
        source="measured on seven real tasks at 64 px: configs/RESULTS.md",
    )
    carries = ("weights", "union")
    freezes_backbone = False
    starts_as_backbone = False
    Settings = WsnSettings
    per_task = WeightMasks.per_task | {"density", "start"}

    def __init__(self, backbone: nn.Module, settings: WsnSettings, seed: int):
        super().__init__(backbone, settings, seed)
        self.union = {
            site: torch.zeros_like(weight, dtype=torch.bool) for site, weight in self.sites.items()
        }  # site (name of a layer) -> M

    def new_mask(self, site: str, weight: Tensor) -> nn.Module:
        if self.settings.start == "magnitude":
            return TopK(weight.abs(), self.settings.density)
        # Drawn on the CPU, so that the scores are the same on every device.
        scores = nn.init.kaiming_uniform_(torch.empty(weight.shape), a=math.sqrt(5))
        return TopK(scores.to(weight.device), self.settings.density)

    # ---- training --------------------------------------------------------------------------------
    def begin(self, context: StepContext) -> list[ParamGroup]:
        if context.carried is not None:
            self.load_carried(context.carried)
        groups = super().begin(context)
        weights: dict[str, Any] = self.sites
        self.protector = Protector(
            {site: (weights[site], used) for site, used in self.union.items()}
        )
        return [
            *groups,
            {
                "name": "weights",
                "params": [*weights.values()],
                "weight_decay": context.optim.weight_decay,
            },
        ]

    def after_backward(self) -> None:
        self.protector.gate()

    def after_step(self, progress: Progress) -> None:
        self.protector.restore()

    def metrics(self) -> dict[str, float]:
        """Return three shares of all weights.

        `density`: used by the task. `reused`: used by the task and an earlier one. `used`: used by
        the task or an earlier one.
        """
        total = sum(weight.numel() for weight in self.sites.values())
        # Counts stay on the device until the end: one copy to the host instead of three per layer.
        counts = torch.zeros(3, dtype=torch.int64, device=self.device)
        for site, mask in self.hard().items():
            earlier = self.union[site].to(mask.device)
            counts += torch.stack([mask.sum(), (mask & earlier).sum(), (mask | earlier).sum()])
        density, reused, used = counts.tolist()
        return {"density": density / total, "reused": reused / total, "used": used / total}

    def warnings(self) -> list[str]:
        if self.task is None:
            return []
        metrics = self.metrics()
        if metrics["reused"] < metrics["density"]:
            return []
        return [
            f"task {self.task.name!r}: all weights that it uses belong to earlier tasks, so "
            "only its mask and its head were trained; raise "
            "mask_lr or density, or train for more steps"
        ]

    def finish(self) -> tuple[TaskState, Carried]:
        state, _ = super().finish()
        tensors: dict[str, Tensor] = {}
        for site, weight in self.sites.items():
            tensors[f"weights/{site}"] = weight.detach().clone()
        for site, used in self.union.items():
            tensors[f"union/{site}"] = pack_mask(used.cpu() | state.masks[site])
        return state, Carried(tensors)

    # ---- serving ---------------------------------------------------------------------------------
    @torch.no_grad()
    def load_carried(self, carried: Carried) -> None:
        super().load_carried(carried)
        for site, weight in self.sites.items():
            weight.copy_(carried.tensors[f"weights/{site}"])
            union = unpack_mask(carried.tensors[f"union/{site}"], tuple(weight.shape))
            self.union[site] = union.to(weight.device)
