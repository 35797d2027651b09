"""LoRA: low-rank updates of the attention's projections in every block of a frozen backbone.

Each task trains its own updates; a served task has them merged into the weights.

Hu et al.: LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022.
"""

from __future__ import annotations

from pydantic import Field, PositiveFloat, PositiveInt
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
    LowRank,
    Target,
    branch,
    factors,
    merged_weights,
    shapes,
    weight_of,
)
from workers.storage.taskstate import Carried, TaskState


class LoraSettings(MethodSettings):
    target: Target = Field(
        "qkv",
        description="projections that are updated: `qkv`: the fused one, by one update; `qv`: "
        "queries and values, by one update each, as in the paper",
    )
    rank: PositiveInt = Field(4, description="r, rank of an update")
    alpha: PositiveFloat = Field(
        1.0, description="factor of an update, which is scaled by alpha / rank"
    )


class Lora(Method[LoraSettings]):
    """A star: W x + (alpha / r) B A x. B starts at zero, so a task starts from the backbone.

    Stored per task: A and B, unmerged, 4 r d floats a block for either target, and a head.

    While training, B A x is a branch parallel to W x: W + s B A would cost the gradient of a whole
    weight matrix in every block. A served task uses the merged weights, and costs no more than the
    backbone.

    Where it differs from the paper: no dropout before A; biases and norms stay frozen; learning
    rate and weight decay are the head's.
    """

    name = "lora"
    family = "parameter-efficient"
    keeps = "low-rank factors, head"
    paper = "LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022"
    train_defaults = TrainDefaults(
        lr=3e-3,
        scratch_lr=1e-2,
        source="measured on seven real tasks at 64 px: configs/RESULTS.md",
    )
    needs_vit = True
    Settings = LoraSettings

    @classmethod
    def check_backbone(
        cls, settings: LoraSettings, backbone: nn.Module, tasks: tuple[Task, ...] = ()
    ) -> None:
        super().check_backbone(settings, backbone, tasks)
        sites = AdapterSites(backbone, branch, (PROJECTION,), beside=PROJECTION)
        if settings.rank > sites.width:
            raise UserError(
                f"rank is {settings.rank}, and the backbone's weights have no more than "
                f"{sites.width}: an update of low rank would be larger than "
                f"what it updates; give at most {sites.width}"
            )

    def __init__(self, backbone: nn.Module, settings: LoraSettings, seed: int):
        super().__init__(backbone, settings, seed)
        self.sites = AdapterSites(backbone, branch, (PROJECTION,), beside=PROJECTION)
        self.rows, width = weight_of(backbone.blocks[0]).shape  # type: ignore[index]
        self.shapes = shapes(len(self.sites), self.rows, width, settings.rank, settings.target)
        # task -> `a` and `b`; empty for the base task
        self.loaded: dict[str, dict[str, Tensor]] = {}

    def factors(self, update: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return A and s B of an update for the sites of the backbone."""
        return factors(**update, rows=self.rows, scale=self.settings.alpha / self.settings.rank)

    def begin(self, context: StepContext) -> list[ParamGroup]:
        groups = super().begin(context)
        self.loaded.pop(context.task.name, None)
        self.update = LowRank(**self.shapes).to(self.device)
        group = {
            "name": "lora",
            "params": list(self.update.parameters()),
            "weight_decay": context.optim.weight_decay,
        }
        return [*groups, group]

    def loss(self, batch: Batch, progress: Progress) -> tuple[Tensor, dict[str, Tensor]]:
        with self.sites.using(self.factors(self.update.tensors())):
            return super().loss(batch, progress)

    def finish(self) -> tuple[TaskState, Carried]:
        copies = {name: t.detach().clone() for name, t in self.update.tensors().items()}
        return self.state(copies=copies, meta={"alpha": self.settings.alpha}), Carried()

    def load_task(self, state: TaskState) -> None:
        """Load the task's update beside those of other tasks. A base task has none."""
        super().load_task(state)
        if state.method == self.name:
            self.check_update(state)
        self.loaded[state.task] = dict(state.copies)

    def check_update(self, state: TaskState) -> None:
        """Raise `UserError` when the state's update is not of these settings."""
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
        return merged_weights(self.backbone, **self.factors(on_device))
