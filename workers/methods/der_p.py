"""DER with pruning: masks on a new extractor's units are trained with it, and what they switch off
is cut before it is stored. A reconstruction.

Yan, Xie, He: DER: Dynamically Expandable Representation for Class Incremental Learning, CVPR 2021.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor
from typing_extensions import TypeVar

from workers.data.batch import Batch
from workers.errors import UserError
from workers.job import DataSettings, Task, TrainSettings
from workers.methods.base import (
    ParamGroup,
    Progress,
    StepContext,
    needs_adamw,
)
from workers.methods.der import Der, DerSettings, Parts
from workers.model.compact import multiply_adds
from workers.model.masks import AnnealedSigmoid, annealed_scale, initial_embedding
from workers.model.units import cut_units, masked_weights, pack, unit_sites, unpack
from workers.rng import derive_seed
from workers.storage.taskstate import TaskState

S = TypeVar("S", bound=DerSettings, default=Any)


class PrunedDer(Der[S]):
    """DER on a ViT whose extractors lose units (`workers.model.units`). While an extractor is
    trained its units are masked; after `train` the masks are those of `hard`, so that `finetune`
    and `herd` meet the network that is served. Stored are masks, as bits, and the entries of kept
    units alone; the network that is run is cut to them. The next extractor starts from the entries
    of kept units, and for the others from those of the backbone: it has all its units again. A base
    task's extractor, the backbone, is not pruned.
    """

    needs_vit = True

    @classmethod
    def check_backbone(cls, settings: S, backbone: Any, tasks: tuple[Task, ...] = ()) -> None:
        super().check_backbone(settings, backbone, tasks)
        unit_sites(backbone)

    def __init__(self, backbone: Any, settings: S, seed: int):
        super().__init__(backbone, settings, seed)
        self.sites = unit_sites(backbone)
        self.shape = 3, *backbone.patch_embed.img_size
        self.whole = multiply_adds(backbone, *self.shape)

    def by_site(self, units: Tensor) -> dict[str, Tensor]:
        """(all units,) -> site -> (units of the site,)."""
        return dict(zip(self.sites, units.split(list(self.sites.values())), strict=True))

    def hard(self) -> Tensor:
        """(all units,) bool: which units the extractor in training would keep if training ended
        here."""
        raise NotImplementedError

    def logits(self, images: Tensor, task: str | None) -> Tensor:
        if self.task is not None:
            self.activate_task(self.task.name)
        return super().logits(images, task)

    def serving_weights(self, task: str) -> dict[str, Tensor]:
        """Those of the extractor in training under its hard masks; what was trained before is cut
        already."""
        return (
            masked_weights(self.backbone, self.by_site(self.hard())) if self.step == "train" else {}
        )

    def metrics(self) -> dict[str, float]:
        """Share of units that are kept."""
        return {"density": float(self.hard().float().mean())} if self.step == "train" else {}

    # ---- what is kept ----------------------------------------------------------------------------
    def inherit(self) -> None:
        if self.stored.get("copies"):
            self.backbone.load_state_dict(
                unpack(self.backbone, self.stored["copies"], self.stored["masks"], fill=True),
                strict=False,
            )

    def trained(self) -> Parts:
        masks = self.by_site(self.hard())
        return {"copies": pack(self.backbone, masks), "masks": masks}

    def extractor(self, task: str, parts: Parts) -> Any:
        if not parts["copies"]:
            return super().extractor(task, parts)
        network = super().extractor(task, {"copies": {}, "masks": {}})
        try:
            network.load_state_dict(
                unpack(network, parts["copies"], parts["masks"], fill=False), strict=False
            )
        except UserError as error:
            raise UserError(f"task {task!r}: {error}") from None
        cut_units(network, parts["masks"])
        return network

    def flops_share(self, state: TaskState) -> float:
        """Every image passes through all extractors, as far as they are left."""
        return (
            sum(
                multiply_adds(network, *self.shape) for network in [*self.finished(), self.backbone]
            )
            / self.whole
        )


class DerPSettings(DerSettings):
    s_max: float = Field(
        100.0,
        gt=1,
        description="scale of the masks when they are hardest, at the end of each epoch",
    )
    sparsity: NonNegativeFloat = Field(
        0.1, description="weight of L_S, the share of weights that the masks leave"
    )
    mask_lr: PositiveFloat | Literal["auto"] = Field(
        "auto", description="peak learning rate of the embeddings; auto: by mask_travel"
    )
    mask_travel: PositiveFloat = Field(
        4.0,
        description="for mask_lr auto: how far an embedding can go over all steps; they start up "
        "to 2 from 0",
    )


class DerP(PrunedDer[DerPSettings]):
    """While an extractor is trained, its units are multiplied by m = sigmoid(s e), s rising from 1
    / s_max to s_max within every epoch, and sparsity * L_S is added to the loss. L_S = sum_l K_l
    |m_{l-1}| |m_l| / sum_l K_l c_{l-1} c_l over layers l of weights between two groups of units;
    here K_l is 1, the residual stream counts as all there, so that every unit stands for 2 D
    weights (a row and a column; queries and keys a row each) and L_S is the mean of m. Units with e
    <= 0 are cut.

    A reconstruction: no code of the masks was published, and the paper has channels of convolutions
    where a ViT has units. Where it differs: masks become 0 or 1 after `train`, so that the
    classifier is tuned on what is served; the first task, which has no `finetune`, is served under
    hard masks and trained under those of s_max. The compensated gradient of e has HAT's factor
    s_max besides, which Adam divides out. Embeddings start in (0, 2], all units on; s_max, the
    weight of L_S and the rate are our choice.
    """

    name = "der_p"
    paper = (
        "DER: Dynamically Expandable Representation for Class Incremental Learning, CVPR 2021 "
        "(with pruning: a reconstruction)"
    )
    Settings = DerPSettings
    per_task = PrunedDer.per_task | {"s_max", "sparsity", "mask_lr", "mask_travel"}
    mask: AnnealedSigmoid

    @classmethod
    def validate(
        cls, settings: DerPSettings, train: TrainSettings, data: DataSettings, scenario: str
    ) -> None:
        needs_adamw(settings.mask_lr, train)

    @classmethod
    def ignored_settings(cls, step: str) -> frozenset[str]:
        own = frozenset({"s_max", "sparsity", "mask_lr", "mask_travel"})
        return super().ignored_settings(step) | (
            own if step in ("finetune", "herd") else frozenset()
        )

    # ---- training --------------------------------------------------------------------------------
    def begin(self, context: StepContext) -> list[ParamGroup]:
        groups = super().begin(context)
        if context.step != "train":
            return groups
        start = initial_embedding(
            (sum(self.sites.values()),),
            "uniform",
            torch.Generator().manual_seed(derive_seed(self.seed, "der", context.task.name)),
        )
        self.mask = AnnealedSigmoid(start, self.settings.s_max)
        mask_lr = (
            self.settings.mask_travel / max(context.optim.mean_rate_steps, 1e-9)
            if self.settings.mask_lr == "auto"
            else self.settings.mask_lr
        )
        return [
            *groups,
            {"name": "masks", "params": [self.mask.embedding], "lr": mask_lr, "weight_decay": 0.0},
        ]

    def hard(self) -> Tensor:
        return self.mask.hard()

    def training_weights(self, batch: Batch, progress: Progress) -> dict[str, Tensor]:
        if self.step != "train":
            return {}
        if progress.steps_per_epoch == 1:
            raise UserError(
                f"task {self.training_tasks[0].name!r} has one step per epoch, and der_p "
                "hardens its masks from step to step of an epoch; lower "
                "train.batch_size until an epoch has several"
            )
        self.soft = self.mask.sample(
            annealed_scale(progress.step, progress.steps_per_epoch, self.settings.s_max)
        )
        return masked_weights(self.backbone, self.by_site(self.soft))

    def terms(self, u: Tensor, z: Tensor, batch: Batch) -> dict[str, tuple[float, Tensor]]:
        return super().terms(u, z, batch) | {"sparsity": (self.settings.sparsity, self.soft.mean())}

    def after_step(self, progress: Progress) -> None:
        super().after_step(progress)
        if self.step == "train":
            self.mask.clamp()
