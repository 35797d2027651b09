"""LoRA: a low-rank update of the attention's projections in every block of a frozen backbone,
trained per task, merged where it is served.

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
        description="`qkv`: one update of the fused projection; `qv`: one of queries and one of "
        "values, as in the paper",
    )
    rank: PositiveInt = Field(4, description="r")
    alpha: PositiveFloat = Field(1.0, description="the update is scaled by alpha / rank")


class Lora(Method[LoraSettings]):
    """A star: W x + (alpha / r) B A x, with B zero at the start, so that a task starts as the
    backbone itself. Stored per task: A and B, unmerged, 4 r d floats a block for either target, and
    a head.

    While training, B A x is a branch beside W x: forming W + s B A first would cost the gradient of
    a whole weight matrix in every block. A served task has the merged weights in effect, and does
    the backbone's work and no more.

    Where it differs from the paper: no dropout before A; biases and norms stay frozen; learning
    rate and weight decay are the head's.
    """

    name = "lora"
    paper = "LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022"
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
        self.loaded: dict[str, dict[str, Tensor]] = {}  # task -> a and b; nothing for the base task

    def factors(self, update: dict[str, Tensor]) -> dict[str, Tensor]:
        return factors(**update, rows=self.rows, scale=self.settings.alpha / self.settings.rank)

    def begin(self, context: StepContext) -> list[ParamGroup]:
        groups = super().begin(context)
        self.loaded.pop(context.task.name, None)
        self.update = LowRank(**self.shapes).to(self.device)
        return [
            *groups,
            {
                "name": "lora",
                "params": [*self.update.parameters()],
                "weight_decay": context.optim.weight_decay,
            },
        ]

    def loss(self, batch: Batch, progress: Progress) -> tuple[Tensor, dict[str, Tensor]]:
        with self.sites.using(self.factors(self.update.tensors())):
            return super().loss(batch, progress)

    def finish(self) -> tuple[TaskState, Carried]:
        return self.state(
            copies={name: t.detach().clone() for name, t in self.update.tensors().items()},
            meta={"alpha": self.settings.alpha},
        ), Carried()

    def load_task(self, state: TaskState) -> None:
        """Keeps the task's update beside those of other tasks. A base task has none."""
        super().load_task(state)
        found = {name: tuple(t.shape) for name, t in state.copies.items()}, state.meta.get("alpha")
        wanted = self.shapes, self.settings.alpha
        if state.method == self.name and found != wanted:
            raise UserError(
                f"task {state.task!r}: its state has updates of shapes {found[0]} with alpha "
                f"{found[1]}, these settings have {wanted[0]} with "
                f"alpha {wanted[1]}; use the backbone and the method's settings of its run"
            )
        self.loaded[state.task] = dict(state.copies)

    def serving_weights(self, task: str) -> dict[str, Tensor]:
        update = self.loaded[task] if task in self.loaded else self.update.tensors()
        device = self.device
        return (
            merged_weights(
                self.backbone, **self.factors({name: t.to(device) for name, t in update.items()})
            )
            if update
            else {}
        )
