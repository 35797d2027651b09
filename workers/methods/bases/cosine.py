"""What UCIR and PODNet share: heads that compare directions, new class vectors imprinted, old ones
frozen, the classifier tuned at the end."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field, NonNegativeInt, PositiveFloat
from torch import Tensor, nn
from typing_extensions import TypeVar

from workers.job import Task
from workers.methods.base import OptimPlan, ParamGroup, Step, StepContext
from workers.methods.bases.rehearsal import Rehearsal, RehearsalSettings
from workers.model.cosine import CosineHeads, imprint
from workers.rng import derive_seed


class CosineSettings(RehearsalSettings):
    per_class: NonNegativeInt = Field(
        20, description="exemplars of each class, whatever their number; 0: `memory` counts"
    )
    scale: PositiveFloat = Field(
        10.0,
        description="where eta starts, the learnt scale of similarities; 1 in the papers, which "
        "train with SGD at large rates",
    )
    finetune: bool = Field(
        False,
        description="train the classifier alone once more, on as many exemplars of each class, new "
        "and old",
    )


S = TypeVar("S", bound=CosineSettings, default=Any)


class CosineRehearsal(Rehearsal[S]):
    """From the second task on a new class starts from where its images lie: its vectors are
    imprinted under the network before the task, as long as old ones are on average. `train` leaves
    the vectors of old classes as they are, and moves eta, the new ones and the network. With
    `finetune` all class vectors and eta are then trained on the memory, which is balanced, under
    the frozen network in evaluation mode.

    The linear head of a base task is left: `herd` imprints that task's vectors at length 1.

    eta starts at 10, where both papers have 1: AdamW moves it by no more than the rate in a step,
    and under a softmax of cosines themselves all classes stay about equally likely.
    """

    steps = (Step("train"), Step("herd", trains=False), Step("finetune", later=True))
    distills = True
    Settings = CosineSettings
    per_task = Rehearsal.per_task | {"finetune"}
    heads: CosineHeads
    step = ""

    @classmethod
    def steps_for(cls, settings: S, position: int) -> tuple[Step, ...]:
        return tuple(
            step
            for step in super().steps_for(settings, position)
            if step.name != "finetune" or settings.finetune
        )

    def __init__(self, backbone: nn.Module, settings: S, seed: int, proxies: int = 1):
        super().__init__(backbone, settings, seed)
        self.heads = CosineHeads(backbone.num_features, proxies, settings.scale)  # type: ignore[arg-type]

    # ---- training --------------------------------------------------------------------------------
    def begin(self, context: StepContext) -> list[ParamGroup]:
        groups = super().begin(context)
        if (context.step == "train" and self.old) or (
            context.step == "herd" and context.task.role == "base"
        ):
            self.imprint(context.task)
        return [
            group
            for group in groups
            if context.step != "finetune" or group["name"].startswith("head.")
        ]

    def head_groups(self, optim: OptimPlan, names: list[str]) -> list[ParamGroup]:
        """The task's own vectors, in `finetune` those of all, and eta."""
        assert self.task is not None
        weights = [
            self.heads[name].weight
            for name in names
            if self.step == "finetune" or name == self.task.name
        ]
        return [
            {"name": "head.weight", "params": weights, "weight_decay": optim.weight_decay},
            {"name": "head.scale", "params": [self.heads.scale], "weight_decay": 0.0},
        ]

    @torch.no_grad()
    def imprint(self, task: Task) -> None:
        """Class vectors from the features of the task's images under the evaluation transform;
        every rank looks at its share."""
        features, labels, tasks, _ = self.extract_features()
        mine = tasks == [t.name for t in self.training_tasks].index(task.name)
        lengths = [self.heads[name].weight.norm(dim=2).flatten() for name in self.old]
        length = float(torch.cat(lengths).mean()) if lengths else 1.0
        noise = derive_seed(self.seed, "imprint", task.name)
        self.heads[task.name].weight.copy_(
            imprint(
                features[mine], labels[mine], task.num_classes, self.heads.proxies, length, noise
            )
        )

    def similarity(self, features: Tensor) -> Tensor:
        """features (b, d) -> s (b, classes so far), without eta."""
        return torch.cat([self.heads[name].similarity(features) for name in self.class_slices()], 1)  # type: ignore[operator]

    def train(self, mode: bool = True) -> CosineRehearsal:
        super().train(mode)
        if self.step == "finetune":
            self.backbone.eval()
        return self
