"""DualPrompt: prefixes that all tasks share in the first blocks, and prefixes per task after them.

Wang, Zhang, Ebrahimi, Sun, Zhang, Lee, Ren, Su, Perot, Dy, Pfister: DualPrompt: Complementary
Prompting for Rehearsal-free Continual Learning, ECCV 2022.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveInt
from torch import Tensor, nn

from workers.data.batch import Batch
from workers.job import Task
from workers.methods.base import MethodSettings, ParamGroup, Progress, StepContext
from workers.methods.bases.prompt_bank import PromptBank, check_shapes
from workers.methods.train_defaults import TrainDefaults
from workers.model.prefixes import PrefixSites
from workers.model.prompt_bank import choose_largest, cosines
from workers.storage.taskstate import Carried, TaskState

# Names of stored and carried tensors: G-prompts, E-prompts and the key of a task.
GENERAL, EXPERT, KEY = "general", "expert", "key"


class DualPromptSettings(MethodSettings):
    """Settings of `dualprompt`."""

    model_config = ConfigDict(populate_by_name=True)

    general_length: PositiveInt = Field(
        5,
        description="number of rows in a prefix that all tasks share, each an attention key and a "
        "value",
    )
    length: PositiveInt = Field(
        5,
        description="number of rows in a prefix of a task, each an attention key and a value",
    )
    general_blocks: NonNegativeInt = Field(
        2,
        description="number of blocks, from the first on, with shared prefixes; at least one block "
        "is left for the prefixes of tasks",
    )
    blocks: PositiveInt = Field(
        3,
        description="number of blocks with prefixes of tasks, after the blocks with shared "
        "prefixes; fewer if the ViT has fewer",
    )
    lambda_: NonNegativeFloat = Field(
        1.0,
        alias="lambda",
        description="weight of the cosine between queries and the task's key, by which a task is "
        "chosen",
    )


class DualPrompt(PromptBank[DualPromptSettings]):
    """A chain that carries the G-prompts; L = CE - lambda cos(q, k_t).

    G-prompts are the shared prefixes, E-prompts the prefixes of a task. q is the query of an image:
    its features by the frozen backbone without prefixes. k_t is the key of task t.

    All tasks train the G-prompts, so answers on earlier tasks change. Each task trains its
    E-prompts, one key k_t and a head, which are frozen afterwards. In scenarios `class` and
    `domain` each image gets the E-prompts of the task with the largest cos(q, k_t); the first of
    equal tasks is taken. The choice is made per image, not per batch. If the task is given, its
    E-prompts are used without a query.
    """

    name = "dualprompt"
    has_constant_step = True
    keeps = "prefixes, a key, a head"
    paper = "DualPrompt: Complementary Prompting for Rehearsal-free Continual Learning, ECCV 2022"
    train_defaults = TrainDefaults(
        lr=3e-3,
        weight_decay=0.0,
        clip=1.0,
        source="rate, decay and clipping of the released PyTorch code at batches of 24",
    )
    carries = ("prompts",)
    may_forget = True  # later tasks train the G-prompts
    Settings = DualPromptSettings
    per_task = frozenset({"lambda"})

    @classmethod
    def check_backbone(
        cls, settings: DualPromptSettings, backbone: Any, tasks: tuple[Task, ...] = ()
    ) -> None:
        super().check_backbone(settings, backbone, tasks)
        find_prompted_blocks(
            backbone, settings
        )  # raises `UserError` if a block cannot get a prefix

    def __init__(self, backbone: Any, settings: DualPromptSettings, seed: int):
        super().__init__(backbone, settings, seed)
        self.sites, num_general = find_prompted_blocks(backbone, settings)
        width = self.sites.width
        # Prefixes are (blocks, 2, rows, width): attention keys and values.
        general = (num_general, 2, settings.general_length, width)
        self.general = nn.Parameter(torch.empty(general).uniform_(-1, 1))
        expert = (len(self.sites) - num_general, 2, settings.length, width)
        self.shapes: dict[str, tuple[int, ...]] = {EXPERT: expert, KEY: (self.heads.width,)}
        self.own = nn.ParameterDict()  # E-prompts and key of the task in training
        self.loaded: dict[str, dict[str, Tensor]] = {}  # finished task -> its E-prompts and key

    # ---- training --------------------------------------------------------------------------------
    def begin(self, context: StepContext) -> list[ParamGroup]:
        if context.carried is not None:
            self.load_carried(context.carried)
        groups = super().begin(context)
        # a loaded state of this task is replaced by the tensors in training
        self.loaded.pop(context.task.name, None)
        self.own = nn.ParameterDict()
        for name, shape in self.shapes.items():
            self.own[name] = nn.Parameter(torch.empty(shape).uniform_(-1, 1).to(self.device))
        prompts = [self.general, self.own[EXPERT]]
        weight_decay = context.optim.weight_decay
        return [
            *groups,
            {"name": "prompts", "params": prompts, "weight_decay": weight_decay},
            # no weight decay: only the direction of a key has an effect
            {"name": "key", "params": [self.own[KEY]], "weight_decay": 0.0},
        ]

    def training_weights(self, batch: Batch, progress: Progress) -> dict[str, Tensor]:
        return {EXPERT: self.own[EXPERT][:, None]}

    def match(self, query: Tensor) -> Tensor | None:
        """Return - lambda cos(q, k_t), a mean over the batch."""
        return -self.settings.lambda_ * cosines(query, self.own[KEY][None]).mean()

    def finish(self) -> tuple[TaskState, Carried]:
        tokens = {name: p.detach().clone() for name, p in self.own.items()}
        return self.state(tokens=tokens), Carried({GENERAL: self.general.detach().clone()})

    # ---- serving ---------------------------------------------------------------------------------
    @torch.no_grad()
    def load_carried(self, carried: Carried) -> None:
        super().load_carried(carried)
        check_shapes("the carried state", carried.tensors, {GENERAL: tuple(self.general.shape)})
        self.general.copy_(carried.tensors[GENERAL])

    def load_task(self, state: TaskState) -> None:
        super().load_task(state)
        check_shapes(f"task {state.task!r}: its state", state.tokens, self.shapes)
        self.loaded[state.task] = dict(state.tokens)

    def find_prompts(self, task: str) -> dict[str, Tensor]:
        """Return E-prompts and key of a task, on the device."""
        own = self.loaded[task] if task in self.loaded else dict(self.own.items())
        return {name: tensor.to(self.device) for name, tensor in own.items()}

    def serving_weights(self, task: str) -> dict[str, Tensor]:
        return {EXPERT: self.find_prompts(task)[EXPERT][:, None]}

    def logits(self, images: Tensor, task: str | None) -> Tensor:
        if task is None:
            self.active_task = None
            self.weight_overrides = {}  # the prompts are chosen for each image
        return super().logits(images, task)

    def features(self, images: Tensor) -> Tensor:
        """Return features with the E-prompts of the active task, or of each image's best key."""
        if EXPERT in self.weight_overrides:
            return self.prefixed(images, self.weight_overrides[EXPERT])
        return super().features(images)

    def prompted(self, images: Tensor, query: Tensor) -> Tensor:
        """Return features with the E-prompts of one task, or of each image's best key.

        The E-prompts of one task are in `weight_overrides`: in training, those of the task in
        training; in serving, those of the given task.
        """
        if EXPERT in self.weight_overrides:
            return self.prefixed(images, self.weight_overrides[EXPERT])
        tasks = [self.find_prompts(task) for task in self.class_slices()]
        keys = torch.stack([tensors[KEY] for tensors in tasks])
        choice = choose_largest(cosines(query, keys), 1)[:, 0]
        experts = torch.stack([tensors[EXPERT] for tensors in tasks], 1)
        return self.prefixed(images, experts[:, choice])

    def prefixed(self, images: Tensor, expert: Tensor) -> Tensor:
        """Return features with the G-prompts and these E-prompts.

        Args:
            images: Images (b, 3, H, W).
            expert: E-prompts (blocks, b or 1, 2, p, A): keys and values, p rows, A width of a row.
        """
        with self.sites.using([*self.general[:, None], *expert]):
            return self.backbone(images)  # type: ignore[no-any-return]

    def flops_share(self, state: TaskState) -> float:
        """Return the FLOPs relative to the backbone.

        They are those of a pass with prefixes and, unless the task is given, of a second pass for
        the query.
        """
        general = [self.settings.general_length] * len(self.general)
        expert = [self.settings.length] * (len(self.sites) - len(self.general))
        return (1 if self.scenario == "task" else 2) + self.prefix_share([*general, *expert])


def find_prompted_blocks(backbone: Any, settings: DualPromptSettings) -> tuple[PrefixSites, int]:
    """Return the blocks of a ViT that get prefixes, and how many get shared prefixes.

    The blocks with shared prefixes come first.
    """
    depth = len(backbone.blocks)
    general = min(settings.general_blocks, depth - 1)
    return PrefixSites(backbone, range(min(general + settings.blocks, depth))), general
