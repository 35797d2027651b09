"""S-Prompts: prompts and a head per task; the task with the nearest feature centre is used.

Wang, Huang, Hong: S-Prompts Learning with Pre-trained Transformers: An Occam's Razor for Domain
Incremental Learning, NeurIPS 2022. This is S-iPrompts, the form without a text encoder.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from workers.data.features import extract_features
from workers.errors import UserError
from workers.job import Task
from workers.methods.base import ParamGroup, StepContext, refuse_base_task
from workers.methods.bases.task_inference import NOT_GIVEN, ChoosesTask
from workers.methods.train_defaults import TrainDefaults
from workers.methods.vpt import Vpt, VptSettings
from workers.model.kmeans import find_centres
from workers.rng import derive_seed
from workers.storage.taskstate import Carried, TaskState

CENTRES = "centres"


class SPromptsSettings(VptSettings):
    """Settings of `s_prompts`."""

    prompts: PositiveInt = Field(10, description="p, number of prompt tokens that a block gets")
    centres: Annotated[PositiveInt, NOT_GIVEN] = Field(
        5, description="number of centres of the features of a task"
    )
    distance: Annotated[Literal["l1", "l2"], NOT_GIVEN] = Field(
        "l1",
        description="distance from features to centres: `l1`: the sum of absolute differences, as "
        "in the released code; `l2`: Euclidean",
    )


class SPrompts(Vpt, ChoosesTask[SPromptsSettings]):
    """A star: VPT, and for each task k-means centres of the backbone's unit-length features.

    The task of an image is inferred: it is that of the centre nearest to the image's features
    without prompts. The prompts and the head of this task then predict. Nothing is shared between
    tasks, so nothing is forgotten if the task is given. In scenario `task` this method is `vpt`,
    without centres.

    Differences from the paper: the centres are computed from images under the evaluation transform;
    the released code uses augmented images.
    """

    name = "s_prompts"
    has_constant_step = True
    keeps = "tokens, centres, head"
    paper = (
        "S-Prompts Learning with Pre-trained Transformers: An Occam's Razor for Domain Incremental "
        "Learning, NeurIPS 2022"
    )
    train_defaults = TrainDefaults(lr=3e-3, scratch_lr=1e-2, source="the rates of vpt")
    scenarios = frozenset({"task", "class", "domain"})
    Settings = SPromptsSettings
    settings: SPromptsSettings

    @classmethod
    def check_backbone(
        cls, settings: VptSettings, backbone: nn.Module, tasks: tuple[Task, ...] = ()
    ) -> None:
        super().check_backbone(settings, backbone, tasks)
        refuse_base_task(cls.name, tasks, "it has no prompts for that task")

    def __init__(self, backbone: nn.Module, settings: SPromptsSettings, seed: int):
        super().__init__(backbone, settings, seed)
        self.centres: dict[str, Tensor] = {}  # task -> (k, d); empty in scenario `task`

    # ---- training --------------------------------------------------------------------------------
    def begin(self, context: StepContext) -> list[ParamGroup]:
        if self.scenario != "task":
            self.eval()
            features = extract_features(self.query, context.data.feed("train")).features
            seed = derive_seed(self.seed, "centres", context.task.name)
            generator = torch.Generator().manual_seed(seed)
            centres = find_centres(features, self.settings.centres, generator)
            self.centres[context.task.name] = centres.float().to(self.device)
        return super().begin(context)

    @torch.no_grad()
    def query(self, images: Tensor) -> Tensor:
        """Return unit-length features (b, d) of images (b, 3, H, W) without prompts."""
        return F.normalize(self.backbone(images).float(), dim=1)

    def finish(self) -> tuple[TaskState, Carried]:
        assert self.task is not None
        state, carried = super().finish()
        if self.task.name in self.centres:
            state.copies[CENTRES] = self.centres[self.task.name].detach().clone()
        return state, carried

    # ---- serving ---------------------------------------------------------------------------------
    def load_task(self, state: TaskState) -> None:
        super().load_task(state)
        if self.scenario == "task":
            return
        centres = state.copies.get(CENTRES)
        if centres is None or centres.ndim != 2 or centres.shape[1] != self.heads.width:
            shape = None if centres is None else tuple(centres.shape)
            raise UserError(
                f"task {state.task!r}: its state has centres of shape {shape} for features of "
                f"width {self.heads.width}; export it again, or write a new model folder with "
                "`accrete bundle`"
            )
        self.centres[state.task] = centres.to(self.device)

    def flops_share(self, state: TaskState) -> float:
        """Return the relative FLOPs of a pass with prompts, and of a pass for the query.

        The query is not needed if the task is given.
        """
        return super().flops_share(state) + (self.scenario != "task")

    def infer(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the index of the task with the nearest centre, and a confidence, (b,) each.

        The confidence is the task's share of the inverse distances of all tasks.
        """
        query = self.query(images)
        norm = 1.0 if self.settings.distance == "l1" else 2.0
        nearest = [
            torch.cdist(query, self.centres[name].to(query.device), p=norm).amin(1)
            for name in self.class_slices()
        ]
        distances = torch.stack(nearest, 1)
        closeness = 1 / distances.clamp(min=1e-12)
        confidence = closeness.amax(1) / closeness.sum(1)
        return distances.argmin(1), confidence
