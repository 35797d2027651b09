"""Bottleneck adapters in every block of a frozen backbone, trained per task.

Three kinds: two adapters per block (Houlsby), one per block (Pfeiffer), or one parallel to the FFN
of a block (AdaptFormer).

Houlsby et al.: Parameter-Efficient Transfer Learning for NLP, ICML 2019 (column Adaptor-B in Table
1 of MEAT's paper). Pfeiffer et al.: AdapterFusion, EACL 2021. Chen et al.: AdaptFormer: Adapting
Vision Transformers for Scalable Visual Recognition, NeurIPS 2022.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt
from timm.models.eva import EvaBlockPostNorm
from timm.models.vision_transformer import ResPostBlock, VisionTransformer
from torch import Tensor, nn

from workers.data.batch import Batch
from workers.errors import UserError
from workers.job import ActiveIf, Neutral, Task, key_inputs
from workers.methods.base import (
    BLOCK_VITS,
    Method,
    MethodSettings,
    ParamGroup,
    Progress,
    StepContext,
)
from workers.methods.train_defaults import TrainDefaults
from workers.model.adapters import HOULSBY, AdapterSites, Bottlenecks, houlsby, parallel
from workers.model.compact import count_multiply_adds, flops, plan_blocks
from workers.model.masked import BlockMasks
from workers.model.tokens import count_block_tokens
from workers.storage.taskstate import Carried, TaskState

Kind = Literal["houlsby", "pfeiffer", "adaptformer"]


class AdapterSettings(MethodSettings):
    """Settings of `adapter`."""

    width: PositiveInt = Field(
        24, description="m, number of hidden units of an adapter; 64 in AdaptFormer's paper"
    )
    kind: Annotated[Kind, Neutral("houlsby")] = Field(
        "houlsby",
        description="position of adapters in a block: `houlsby`: one after attention and one "
        "after the FFN; `pfeiffer`: one after the FFN; `adaptformer`: one parallel to the FFN",
    )
    dropout: Annotated[float, Neutral(0.0), ActiveIf("kind", ("adaptformer",))] = Field(
        0.0,
        ge=0,
        lt=1,
        description="for kind `adaptformer`: dropout rate of an adapter's hidden units in "
        "training; 0.1 in the paper",
    )


class Adapter(Method[AdapterSettings]):
    """A star: every task trains its own adapters.

    - `houlsby`: a(x) = x + W_up gelu(W_down x), after attention and after the FFN, inside the
      residual branch;
    - `pfeiffer`: the same after the FFN only;
    - `adaptformer`: x' + FFN(LN x') + 0.1 W_up relu(W_down x'), with the residual stream x' before
      the FFN.

    Stored per task: 2 d m + d + m floats for each adapter (2 L for Houlsby, L for the others) and a
    head, with L blocks of width d and m hidden units.

    Differences from the papers: W_up starts at zero for every kind, so that a task starts from the
    backbone's features. (W_down does not start at zero: if both were zero, neither would get a
    gradient.) Layer norms stay frozen, like the rest of the backbone. Adapters have the learning
    rate and weight decay of the head.
    """

    name = "adapter"
    has_constant_step = True
    family = "parameter-efficient"
    keeps = "adapters, head"
    paper = "Parameter-Efficient Transfer Learning for NLP, ICML 2019"
    train_defaults = TrainDefaults(
        lr=3e-3,
        scratch_lr=1e-2,
        source="measured on seven real tasks at 64 px: configs/RESULTS.md",
    )
    needs_vit = True
    vits = BLOCK_VITS
    Settings = AdapterSettings
    per_task = frozenset({"dropout"})

    @classmethod
    def check_backbone(
        cls, settings: AdapterSettings, backbone: nn.Module, tasks: tuple[Task, ...] = ()
    ) -> None:
        super().check_backbone(settings, backbone, tasks)
        find_adapter_sites(backbone, settings.kind)

    def __init__(self, backbone: nn.Module, settings: AdapterSettings, seed: int):
        super().__init__(backbone, settings, seed)
        self.sites = find_adapter_sites(backbone, settings.kind)
        self.loaded: dict[str, dict[str, Tensor]] = {}  # task -> its adapters' tensors

    def begin(self, context: StepContext) -> list[ParamGroup]:
        groups = super().begin(context)
        self.loaded.pop(context.task.name, None)
        self.adapters = Bottlenecks(
            len(self.sites), self.sites.width, self.settings.width, device=self.device
        )
        return groups + self.adapters.groups(context.optim.weight_decay)

    def training_weights(self, batch: Batch, progress: Progress) -> dict[str, Tensor]:
        """Return the adapters' tensors, which `features` passes to the hooks of the backbone."""
        return self.adapters.tensors() | self.dropout_factors(batch)

    def dropout_factors(self, batch: Batch) -> dict[str, Tensor]:
        """Return the factors of dropout; see `draw_dropout`."""
        return draw_dropout(
            self.backbone, batch, len(self.sites), self.settings.width, self.settings.dropout
        )

    def features(self, images: Tensor) -> Tensor:
        with self.sites.using(self.weight_overrides):
            features: Tensor = self.backbone(images)
        return features

    def finish(self) -> tuple[TaskState, Carried]:
        copies = {name: t.detach().clone() for name, t in self.adapters.tensors().items()}
        meta = {}
        kind = key_inputs(self.settings).get("kind")  # None for the neutral value `houlsby`
        if kind:
            meta["kind"] = kind
        return self.state(copies=copies, meta=meta), Carried()

    def load_task(self, state: TaskState) -> None:
        """Load the adapters of a finished task. A base task has none."""
        super().load_task(state)
        if "down" in state.copies:
            self.check_adapters(state)
        self.loaded[state.task] = dict(state.copies)

    def check_adapters(self, state: TaskState) -> None:
        """Raise `UserError` if the state's adapters do not match these settings."""
        stored_shape = tuple(state.copies["down"].shape)
        expected_shape = (len(self.sites), self.settings.width, self.sites.width)
        if stored_shape != expected_shape:
            raise UserError(
                f"task {state.task!r}: its state has adapters of shape {stored_shape}, "
                f"these settings have {expected_shape}; use the backbone "
                "and the method's settings of its run"
            )
        kind = state.meta.get("kind", "houlsby")
        if kind != self.settings.kind:
            raise UserError(
                f"task {state.task!r}: its state has adapters of kind {kind!r}, these settings "
                f"have {self.settings.kind!r}; use the method's "
                "settings of its run"
            )

    def serving_weights(self, task: str) -> dict[str, Tensor]:
        device = self.device
        tensors = self.loaded[task] if task in self.loaded else self.adapters.tensors()
        return {name: tensor.to(device) for name, tensor in tensors.items()}

    def flops_share(self, state: TaskState) -> float:
        return 1 + compute_added_share(self.backbone, 2 * state.copies["down"].numel())


def find_adapter_sites(backbone: Any, kind: Kind) -> AdapterSites:
    """Register the hooks for adapters of a kind in the backbone, and return their sites.

    AdaptFormer's adapter is hooked after the block, and therefore after the residual add of the
    FFN.

    Raises:
        UserError: If the backbone has no such sites.
    """
    if kind == "houlsby":
        return AdapterSites(backbone, houlsby, HOULSBY)
    if kind == "pfeiffer":
        return AdapterSites(backbone, houlsby, ("mlp",))
    if any(isinstance(block, (ResPostBlock, EvaBlockPostNorm)) for block in backbone.blocks):
        raise UserError(
            "kind is 'adaptformer' on blocks that have their norms behind attention and FFN, "
            "where nothing shows the residual stream before "
            "the FFN; choose kind=pfeiffer, or a ViT with plain blocks such as vit_tiny_patch16_224"
        )
    return AdapterSites(backbone, parallel, ("",), beside="norm2")


def draw_dropout(
    backbone: Any, batch: Batch, sites: int, width: int, rate: float
) -> dict[str, Tensor]:
    """Return the dropout factors of adapters under the name `kept`, (S, b, N, m).

    A factor is 0 or 1 / (1 - rate). The factors of a sample do not depend on its rank. Without
    dropout the result is empty.

    Args:
        backbone: A ViT with N tokens.
        batch: The b images of a step.
        sites: S, number of adapters.
        width: m, number of hidden units of an adapter.
        rate: The dropout rate.
    """
    if not rate:
        return {}
    # (b, N, S, m)
    uniform = batch.draw.per_sample("adapter.dropout", count_block_tokens(backbone), sites, width)
    return {"kept": (uniform >= rate).float().permute(2, 0, 1, 3) / (1 - rate)}


def compute_added_share(backbone: Any, weights: int) -> float:
    """Return the multiply-adds of added layers, divided by those of the plain backbone.

    Args:
        backbone: A ViT.
        weights: Number of weights of all added layers. Each is used once for every token.
    """
    if not isinstance(backbone, VisionTransformer):
        whole = count_multiply_adds(backbone, 3, *backbone.patch_embed.img_size)
        return count_block_tokens(backbone) * weights / whole
    whole_blocks = plan_blocks(backbone, [BlockMasks()] * len(backbone.blocks))
    return count_block_tokens(backbone) * weights / flops(backbone, whole_blocks)
