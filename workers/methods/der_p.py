"""DER with pruning: the units of a new extractor are trained with masks. A reconstruction.

A unit is an attention channel or a neuron of an FFN (`workers.model.units`). Units that a mask
switches off are cut before the extractor is stored. `PrunedDer` is shared with `simple_der`.

Yan, Xie, He: DER: Dynamically Expandable Representation for Class Incremental Learning, CVPR 2021.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor
from typing_extensions import TypeVar

from workers.data.batch import Batch
from workers.errors import UserError
from workers.job import ActiveIf, DataSettings, Task, TrainSettings
from workers.methods.base import (
    ParamGroup,
    Progress,
    StepContext,
    require_adamw,
)
from workers.methods.der import Der, DerSettings, Parts
from workers.methods.train_defaults import TrainDefaults
from workers.model.compact import count_multiply_adds
from workers.model.masks import AnnealedSigmoid, compute_annealed_scale, draw_initial_embedding
from workers.model.units import cut_units, masked_weights, pack, unit_sites, unpack
from workers.rng import derive_seed
from workers.storage.taskstate import TaskState

S = TypeVar("S", bound=DerSettings, default=Any)


class PrunedDer(Der[S]):
    """DER on a ViT, with extractors whose units are pruned (`workers.model.units`).

    During the training of an extractor its units are masked. After `train` the masks are binary
    (`hard`), so that `finetune` and `herd` use the served network. The stored state has the masks
    as bits, and the parameters without the entries of units that are off. After loading, the
    network is cut to the remaining units.

    The next extractor has all units again: the remaining units of the previous extractor are
    copied, the other units start from the backbone. The extractor of a base task is the backbone,
    and is not pruned.
    """

    needs_vit = True
    why_no_other_vit = (
        "it cuts channels of attention, and other classes of timm rotate or reshape all of them"
    )

    @classmethod
    def check_backbone(cls, settings: S, backbone: Any, tasks: tuple[Task, ...] = ()) -> None:
        super().check_backbone(settings, backbone, tasks)
        unit_sites(backbone)

    def __init__(self, backbone: Any, settings: S, seed: int):
        super().__init__(backbone, settings, seed)
        # site, for example `blocks.0.qk` -> its number of units
        self.sites = unit_sites(backbone)
        # Shape of an image: (channels, height, width).
        self.shape = (3, *backbone.patch_embed.img_size)
        # Multiply-adds per image of the backbone with all units.
        self.whole = count_multiply_adds(backbone, *self.shape)

    def by_site(self, units: Tensor) -> dict[str, Tensor]:
        """Split a tensor (all units,) by site: site -> (units of the site,)."""
        parts = units.split(list(self.sites.values()))
        return dict(zip(self.sites, parts, strict=True))

    def hard(self) -> Tensor:
        """Return which units the extractor in training would keep now, as bool (all units,)."""
        raise NotImplementedError

    def logits(self, images: Tensor, task: str | None) -> Tensor:
        if self.task is not None:  # validation: apply the hard masks, also if `task` is None
            self.activate_task(self.task.name)
        return super().logits(images, task)

    def serving_weights(self, task: str) -> dict[str, Tensor]:
        """Mask the extractor in training; the extractors of earlier tasks are cut already."""
        if self.step != "train":
            return {}
        return masked_weights(self.backbone, self.by_site(self.hard()))

    def metrics(self) -> dict[str, float]:
        """Return the share of the extractor's units that remain."""
        if self.step != "train":
            return {}
        return {"density": float(self.hard().float().mean())}

    # ---- state -----------------------------------------------------------------------------------
    def inherit(self) -> None:
        if not self.stored.get("copies"):
            return
        parameters = unpack(self.backbone, self.stored["copies"], self.stored["masks"], fill=True)
        self.backbone.load_state_dict(parameters, strict=False)

    def trained(self) -> Parts:
        masks = self.by_site(self.hard())
        return {"copies": pack(self.backbone, masks), "masks": masks}

    def extractor(self, name: str, parts: Parts) -> Any:
        if not parts["copies"]:
            return super().extractor(name, parts)
        network = super().extractor(name, {"copies": {}, "masks": {}})
        try:
            parameters = unpack(network, parts["copies"], parts["masks"], fill=False)
            network.load_state_dict(parameters, strict=False)
        except UserError as error:
            raise UserError(f"{name}: {error}") from None
        cut_units(network, parts["masks"])
        return network

    def flops_share(self, state: TaskState) -> float:
        """Return the relative FLOPs of all extractors, each cut to its remaining units."""
        extractors = [*self.finished(), self.backbone]
        total = sum(count_multiply_adds(extractor, *self.shape) for extractor in extractors)
        return total / self.whole


class DerPSettings(DerSettings):
    """Settings of `der_p`."""

    s_max: float = Field(
        100.0,
        gt=1,
        description="largest scale s of the masks sigmoid(s e), reached at the end of each epoch",
    )
    sparsity: NonNegativeFloat = Field(
        0.1, description="weight of the loss L_S, the share of weights that the masks keep"
    )
    mask_lr: PositiveFloat | Literal["auto"] = Field(
        "auto",
        description="peak learning rate of the mask embeddings; `auto`: derived from "
        "mask_travel and the number of steps",
    )
    mask_travel: Annotated[PositiveFloat, ActiveIf("mask_lr", ("auto",))] = Field(
        4.0,
        description="for `mask_lr: auto`: largest distance that Adam can move an embedding "
        "over all steps; embeddings start in (0, 2], and a unit is off at 0 and below",
    )


class DerP(PrunedDer[DerPSettings]):
    """The units of the current extractor are multiplied by m = sigmoid(s e).

    s rises from 1 / s_max to s_max within every epoch, and sparsity * L_S is added to the loss. L_S
    = sum_l K_l |m_{l-1}| |m_l| / sum_l K_l c_{l-1} c_l over layers l of weights between two groups
    of units, with kernel size K_l and c_l units after layer l. In a ViT K_l is 1, and no channel of
    the residual stream, of width D, is masked. Every unit then has 2 D weights (a row and a column;
    for queries and keys a row each), and L_S is the mean of m. Units with e <= 0 are cut.

    A reconstruction: no code of the masks was published, and the paper has channels of convolutions
    instead of units of a ViT. Differences from the paper: masks become 0 or 1 after `train`, so
    that `finetune` tunes the classifier on the served network. The first task has no `finetune`:
    its classifier is trained with soft masks and served with hard ones. The gradient of the
    embedding e is compensated as in HAT (`AnnealedSigmoid`), and also has HAT's factor s_max, which
    Adam cancels. Embeddings start in (0, 2], with all units on. s_max, the weight of L_S and the
    learning rate are our choice.
    """

    name = "der_p"
    has_constant_step = True
    family = "expansion"
    keeps = "a pruned extractor"
    paper = (
        "DER: Dynamically Expandable Representation for Class Incremental Learning, CVPR 2021 "
        "(with pruning: a reconstruction)"
    )
    train_defaults = TrainDefaults(
        lr=1e-4,
        scratch_lr=1e-3,
        steps={"finetune": {"epochs": 10, "lr": 1e-2, "scratch_lr": 5e-3}},
        source="measured on 25 classes of CIFAR-100 at 64 px: configs/RESULTS.md",
    )
    Settings = DerPSettings
    per_task = PrunedDer.per_task | {"s_max", "sparsity", "mask_lr", "mask_travel"}
    mask: AnnealedSigmoid

    @classmethod
    def validate(
        cls, settings: DerPSettings, train: TrainSettings, data: DataSettings, scenario: str
    ) -> None:
        require_adamw(settings.mask_lr, train)

    @classmethod
    def ignored_settings(cls, step: str) -> frozenset[str]:
        ignored = super().ignored_settings(step)
        if step in ("finetune", "herd"):
            ignored |= {"s_max", "sparsity", "mask_lr", "mask_travel"}
        return ignored

    # ---- training --------------------------------------------------------------------------------
    def begin(self, context: StepContext) -> list[ParamGroup]:
        groups = super().begin(context)
        if context.step != "train":
            return groups
        s = self.settings
        num_units = sum(self.sites.values())
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "der", context.task.name))
        embedding = draw_initial_embedding((num_units,), "uniform", generator)
        self.mask = AnnealedSigmoid(embedding, s.s_max)
        mask_group = {
            "name": "masks",
            "params": [self.mask.embedding],
            "lr": context.optim.mask_lr(s.mask_lr, s.mask_travel),
            "weight_decay": 0.0,
        }
        return [*groups, mask_group]

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
        s_max = self.settings.s_max
        scale = progress.number(
            "scale",
            lambda progress: compute_annealed_scale(progress.step, progress.steps_per_epoch, s_max),
        )
        self.soft = self.mask.sample(scale)
        return masked_weights(self.backbone, self.by_site(self.soft))

    def terms(self, u: Tensor, z: Tensor, batch: Batch) -> dict[str, tuple[float, Tensor]]:
        sparsity = (self.settings.sparsity, self.soft.mean())
        return super().terms(u, z, batch) | {"sparsity": sparsity}

    def after_step(self, progress: Progress) -> None:
        super().after_step(progress)
        if self.step == "train":
            self.mask.clamp()
