"""LoRA: low-rank updates of the attention projections or all linear layers of a frozen backbone.

Each task trains its own updates, which are merged into the weights for serving.

Hu et al.: LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022.
"""

from __future__ import annotations

from pydantic import Field, PositiveFloat, PositiveInt
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from workers.data.batch import Batch
from workers.errors import UserError
from workers.job import Task
from workers.methods.base import (
    Method,
    MethodSettings,
    ParamGroup,
    Progress,
    StepContext,
)
from workers.methods.train_defaults import TrainDefaults
from workers.model.adapters import AdapterSites
from workers.model.lowrank import (
    PROJECTION,
    LinearUpdates,
    LowRank,
    Target,
    branch,
    compute_factor_shapes,
    compute_updated_weights,
    factors,
    get_projection_weight,
    linear_sites,
    merge_updates,
    shapes,
)
from workers.storage.taskstate import Carried, TaskState


class LoraSettings(MethodSettings):
    """Settings of `lora`."""

    target: Target = Field(
        "qkv",
        description="projections that are updated: `qkv`: the fused one, by one update; `qv`: "
        "queries and values, by one update each, as in the paper; `linear`: every linear layer of "
        "the backbone",
    )
    rank: PositiveInt = Field(4, description="r, rank of an update")
    alpha: PositiveFloat = Field(
        1.0, description="factor of an update, which is scaled by alpha / rank"
    )


class Lora(Method[LoraSettings]):
    """A star: each task trains its own A and B in W x + s B A x, s = alpha / r, with W frozen.

    B starts at zero, so a task starts from the backbone. Stored per task: A and B, unmerged, 4 r d
    floats per block of width d for `qkv` and `qv`, and a head.

    In training, a VisionTransformer computes s B A x in a branch parallel to W x, because W + s B A
    would need the gradient of a whole weight matrix in every block. Serving uses the merged
    weights, and costs no more than the backbone. On other backbones, and for `linear`, training
    uses the merged weights too. Biases and norms stay frozen.

    Differences from the paper: no dropout before A; learning rate and weight decay are those of the
    head.
    """

    name = "lora"
    has_constant_step = True
    family = "parameter-efficient"
    keeps = "low-rank factors, head"
    paper = "LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022"
    train_defaults = TrainDefaults(
        lr=3e-3,
        scratch_lr=1e-2,
        source="measured on seven real tasks at 64 px: configs/RESULTS.md",
    )
    Settings = LoraSettings

    @classmethod
    def check_backbone(
        cls, settings: LoraSettings, backbone: nn.Module, tasks: tuple[Task, ...] = ()
    ) -> None:
        super().check_backbone(settings, backbone, tasks)
        if not is_stacked(backbone, settings):
            if not linear_sites(backbone, settings.target):
                remedy = "choose" if settings.target == "linear" else "set target=linear, or choose"
                raise UserError(
                    f"'lora' with target {settings.target!r} has no layer to update, and the "
                    f"backbone is a {type(backbone).__name__}; {remedy} a backbone with attention "
                    "such as vit_tiny_patch16_224, eva02_tiny_patch14_224 or "
                    "swin_tiny_patch4_window7_224"
                )
            return
        sites = AdapterSites(backbone, branch, (PROJECTION,), beside=PROJECTION)
        if settings.rank > sites.width:
            raise UserError(
                f"rank is {settings.rank}, but the backbone's weights have at most rank "
                f"{sites.width}, so the update would be larger than the weights; give at most "
                f"{sites.width}"
            )

    def __init__(self, backbone: nn.Module, settings: LoraSettings, seed: int):
        super().__init__(backbone, settings, seed)
        # Only one of the two is set: sites of stacked updates, or layers with separate updates.
        self.sites: AdapterSites | None = None
        self.linear_sites: dict[str, int] = {}
        self.shapes: dict[str, tuple[int, ...]]
        if is_stacked(backbone, settings):
            self.sites = AdapterSites(backbone, branch, (PROJECTION,), beside=PROJECTION)
            first_block = backbone.blocks[0]  # type: ignore[index]
            self.rows, width = get_projection_weight(first_block).shape
            self.shapes = shapes(len(self.sites), self.rows, width, settings.rank, settings.target)
        else:
            self.linear_sites = linear_sites(backbone, settings.target)
            self.shapes = compute_factor_shapes(backbone, self.linear_sites, settings.rank)
        # task -> factors by name; empty for the base task
        self.loaded: dict[str, dict[str, Tensor]] = {}

    @property
    def scale(self) -> float:
        """Return s, the factor of B A."""
        return self.settings.alpha / self.settings.rank

    def factors(self, update: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return A and s B of a stacked update, in the form that `branch` takes for each block."""
        return factors(**update, rows=self.rows, scale=self.scale)

    def begin(self, context: StepContext) -> list[ParamGroup]:
        groups = super().begin(context)
        self.loaded.pop(context.task.name, None)
        self.update: LowRank | LinearUpdates
        if self.sites is not None:
            self.update = LowRank(**self.shapes).to(self.device)
        else:
            updates = LinearUpdates(self.backbone, self.linear_sites, self.settings.rank)
            self.update = updates.to(self.device)
        group = {
            "name": "lora",
            "params": list(self.update.parameters()),
            "weight_decay": context.optim.weight_decay,
        }
        return [*groups, group]

    def training_weights(self, batch: Batch, progress: Progress) -> dict[str, Tensor]:
        """Return W + s B A, or nothing for stacked updates, which are computed in a branch."""
        if self.sites is not None:
            return {}
        return compute_updated_weights(
            self.backbone, self.linear_sites, self.update.tensors(), self.scale
        )

    def loss(self, batch: Batch, progress: Progress) -> tuple[Tensor, dict[str, Tensor]]:
        if self.sites is None:
            return super().loss(batch, progress)
        with self.sites.using(self.factors(self.update.tensors())):
            return super().loss(batch, progress)

    def finish(self) -> tuple[TaskState, Carried]:
        copies = {name: t.detach().clone() for name, t in self.update.tensors().items()}
        return self.state(copies=copies, meta={"alpha": self.settings.alpha}), Carried()

    def load_task(self, state: TaskState) -> None:
        """Load the update of a finished task. A base task has none."""
        super().load_task(state)
        if state.method == self.name:
            self.check_update(state)
        self.loaded[state.task] = dict(state.copies)

    def check_update(self, state: TaskState) -> None:
        """Raise `UserError` if the state's update does not match these settings."""
        stored_shapes = {name: tuple(tensor.shape) for name, tensor in state.copies.items()}
        stored_alpha = state.meta.get("alpha")
        if stored_shapes != self.shapes or stored_alpha != self.settings.alpha:
            raise UserError(
                f"task {state.task!r}: its state has updates of shapes {stored_shapes} with alpha "
                f"{stored_alpha}, these settings have {self.shapes} with "
                f"alpha {self.settings.alpha}; use the backbone and the method's settings of its "
                "run"
            )

    def serving_weights(self, task: str) -> dict[str, Tensor]:
        update = self.loaded[task] if task in self.loaded else self.update.tensors()
        if not update:
            return {}
        device = self.device
        on_device = {name: tensor.to(device) for name, tensor in update.items()}
        if self.sites is None:
            return compute_updated_weights(self.backbone, self.linear_sites, on_device, self.scale)
        return merge_updates(self.backbone, **self.factors(on_device))


def is_stacked(backbone: nn.Module, settings: LoraSettings) -> bool:
    """Return whether the updates of all blocks are stacked (`LowRank`), not separate per layer."""
    return isinstance(backbone, VisionTransformer) and settings.target != "linear"
