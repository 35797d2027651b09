"""Shared base of UCIR and PODNet: cosine classifiers with imprinted vectors for new classes.

Class vectors of earlier tasks are frozen. The classifier can be fine-tuned at the end of a task.
"""

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
    """Settings of methods with a cosine classifier."""

    per_class: NonNegativeInt = Field(
        20,
        description="number of exemplars of each class, for any number of classes; 0: "
        "`memory` divided by the number of classes",
    )
    scale: PositiveFloat = Field(
        10.0,
        description="initial value of eta, the learnt scale of cosines; 1 in the papers, "
        "which train by SGD at large learning rates",
    )
    finetune: bool = Field(
        False,
        description="whether step `finetune` trains the classifier once more, on equally many "
        "exemplars of each class, new and old",
    )


S = TypeVar("S", bound=CosineSettings, default=Any)


class CosineRehearsal(Rehearsal[S]):
    """From the second task on the vectors of new classes are imprinted: they start as class means.

    They are means of normalised features of the network before the task (cluster centres, if a
    class has several vectors). The new vectors get the average length of the old vectors. `train`
    trains eta, the new vectors and the network, and leaves the vectors of old classes unchanged.
    The step `finetune` then trains all class vectors and eta on the balanced memory, while the
    network is frozen and in evaluation mode.

    The linear head of a base task is not used: `herd` imprints that task's vectors at length 1.

    eta starts at 10; in both papers it starts at 1. AdamW moves eta by about the learning rate per
    step, and a softmax of cosines with eta = 1 leaves all classes about equally likely.

    The argument `proxies` is the number of vectors of a class.
    """

    steps = (Step("train"), Step("herd", trains=False), Step("finetune", later=True))
    distills = True
    Settings = CosineSettings
    per_task = Rehearsal.per_task | {"finetune"}
    heads: CosineHeads
    step = ""

    @classmethod
    def steps_for(cls, settings: S, position: int) -> tuple[Step, ...]:
        steps = super().steps_for(settings, position)
        if settings.finetune:
            return steps
        return tuple(step for step in steps if step.name != "finetune")

    def __init__(self, backbone: nn.Module, settings: S, seed: int, proxies: int = 1):
        super().__init__(backbone, settings, seed)
        self.heads = CosineHeads(self.heads.width, proxies, settings.scale)

    # ---- training --------------------------------------------------------------------------------
    def begin(self, context: StepContext) -> list[ParamGroup]:
        groups = super().begin(context)
        has_new_classes = context.step == "train" and bool(self.old)
        is_base_task = context.step == "herd" and context.task.role == "base"
        if has_new_classes or is_base_task:
            self.imprint(context.task)
        if context.step == "finetune":
            return [group for group in groups if group["name"].startswith("head.")]
        return groups

    def head_groups(self, optim: OptimPlan, names: list[str]) -> list[ParamGroup]:
        """Return the groups of the task's vectors (in `finetune`: of all tasks) and of eta."""
        assert self.task is not None
        trained_names = names if self.step == "finetune" else [self.task.name]
        weights = [self.heads[name].weight for name in names if name in trained_names]
        return [
            {"name": "head.weight", "params": weights, "weight_decay": optim.weight_decay},
            {"name": "head.scale", "params": [self.heads.scale], "weight_decay": 0.0},
        ]

    @torch.no_grad()
    def imprint(self, task: Task) -> None:
        """Set the task's class vectors from the features of the task's images.

        The features use the evaluation transform, and each rank computes a part.
        """
        features, labels, tasks, _ = self.extract_features()
        task_index = [t.name for t in self.training_tasks].index(task.name)
        is_of_task = tasks == task_index
        length = 1.0
        if self.old:
            lengths = [self.heads[name].weight.norm(dim=2).flatten() for name in self.old]
            length = float(torch.cat(lengths).mean())
        vectors = imprint(
            features[is_of_task],
            labels[is_of_task],
            task.num_classes,
            self.heads.proxies,
            length,
            derive_seed(self.seed, "imprint", task.name),
        )
        self.heads[task.name].weight.copy_(vectors)

    def similarity(self, features: Tensor) -> Tensor:
        """Return the cosines s (b, classes so far) of features (b, d), without the factor eta."""
        similarities = []
        for name in self.class_slices():
            head: Any = self.heads[name]
            similarities.append(head.similarity(features))
        return torch.cat(similarities, 1)

    def train(self, mode: bool = True) -> CosineRehearsal:
        super().train(mode)
        if self.step == "finetune":
            self.backbone.eval()
        return self
