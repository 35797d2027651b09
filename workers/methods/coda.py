"""CODA-Prompt: prefixes that are sums of components, weighted by the query of an image.

Smith, Karlinsky, Gutta, Cascante-Bonilla, Kim, Arbelle, Panda, Feris, Kira: CODA-Prompt: COntinual
Decomposed Attention-based Prompting for Rehearsal-Free Continual Learning, CVPR 2023.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field, NonNegativeFloat, PositiveInt
from torch import Tensor, nn

from workers.data.batch import Batch
from workers.errors import UserError
from workers.job import Task
from workers.methods.base import MethodSettings, ParamGroup, Progress, StepContext
from workers.methods.bases.prompt_bank import PromptBank, check_shapes
from workers.methods.train_defaults import TrainDefaults
from workers.model.prefixes import PrefixSites
from workers.model.prompt_bank import orthogonality, orthonormalize, weigh_components
from workers.storage.taskstate import Carried, TaskState, select_with_prefix

PROMPT, KEY, ATTENTION = "prompt", "key", "attention"
COMPONENTS = "components/"  # prefix of the names of carried tensors
# P (L, M, 2, p, A), K (L, M, d) and a (L, M, d) by kind, for L blocks with prefixes, M components,
# p rows of keys and of values (2), width A of a block's keys, and width d of the features.
Components = dict[str, Tensor]


class CodaSettings(MethodSettings):
    """Settings of `coda`."""

    components: PositiveInt = Field(
        10,
        description="number of components that each task adds; the paper has 100 divided by the "
        "number of tasks",
    )
    length: PositiveInt = Field(4, description="p, number of keys, and of values, in a prefix")
    blocks: PositiveInt = Field(
        5,
        description="number of blocks, from the first on, that get prefixes, if there are so many",
    )
    mu: NonNegativeFloat = Field(
        0.0,
        description="weight of the penalty on components that are not orthonormal; 0 in the "
        "released code",
    )


class Coda(PromptBank[CodaSettings]):
    """A chain that carries the components of all tasks: prefix = sum_m alpha_m P_m.

    alpha_m = cos(q .* a_m, K_m) without softmax or top-k, for each of the first blocks. A task
    trains its own components and its head; the components of earlier tasks are also in the sum, but
    frozen. New rows of P, K and a start orthonormal, and orthogonal to all earlier rows. The loss
    is the cross-entropy over the classes of the task + mu * sum over Z in {P, K, a} and over blocks
    of mean((Z Z^T - I)^2), with the components as rows of Z.

    If the task is given, its own and earlier components serve it, as at the end of the task's
    training, so its logits never change. Otherwise all components serve all tasks, and later
    components change the outputs of earlier tasks. Stored per task: a head.
    """

    name = "coda"
    has_constant_step = True
    keeps = "a head"
    paper = (
        "CODA-Prompt: COntinual Decomposed Attention-based Prompting for Rehearsal-Free Continual "
        "Learning, CVPR 2023"
    )
    train_defaults = TrainDefaults(
        lr=1e-3,
        weight_decay=0.0,
        source="the rate and the decay of the paper",
    )
    carries = ("components",)
    Settings = CodaSettings
    per_task = frozenset({"mu"})

    @classmethod
    def check_backbone(
        cls, settings: CodaSettings, backbone: Any, tasks: tuple[Task, ...] = ()
    ) -> None:
        super().check_backbone(settings, backbone, tasks)
        find_prefix_sites(backbone, settings)
        count = settings.components * max(len(tasks), 1)
        if count > backbone.num_features:
            raise UserError(
                f"components is {settings.components} and the stream has {len(tasks)} tasks: "
                f"{count} components cannot be orthogonal in {backbone.num_features} dimensions; "
                "lower components or choose a wider backbone"
            )

    def __init__(self, backbone: Any, settings: CodaSettings, seed: int):
        super().__init__(backbone, settings, seed)
        self.sites = find_prefix_sites(backbone, settings)
        self.bank: dict[str, Components] = {}  # finished task -> its components, in order
        self.own = nn.ParameterDict()  # components of the task in training

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the components of one task, by kind."""
        blocks, count = len(self.sites), self.settings.components
        key = (blocks, count, self.heads.width)
        prompt = (blocks, count, 2, self.settings.length, self.sites.width)
        return {PROMPT: prompt, KEY: key, ATTENTION: key}

    # ---- training --------------------------------------------------------------------------------
    def begin(self, context: StepContext) -> list[ParamGroup]:
        if context.carried is not None:
            self.load_carried(context.carried)
        groups = super().begin(context)
        self.bank.pop(context.task.name, None)
        # No weight decay on K and a: the cosine does not depend on their norms.
        decay = {PROMPT: context.optim.weight_decay, KEY: 0.0, ATTENTION: 0.0}
        self.own = nn.ParameterDict()
        for kind, weight_decay in decay.items():
            self.own[kind] = nn.Parameter(self.draw(kind).to(self.device))
            groups.append({"name": kind, "params": [self.own[kind]], "weight_decay": weight_decay})
        return groups

    def draw(self, kind: str) -> Tensor:
        """Return new components of a kind on the CPU, orthogonal to those of earlier tasks."""
        raw = torch.randn(self.shapes()[kind])
        count = self.settings.components * (len(self.bank) + 1)
        if count > self.heads.width:
            raise UserError(
                f"components is {self.settings.components}, and with this task there are {count} "
                f"components, which cannot be orthogonal in {self.heads.width} dimensions; lower "
                "components or choose a wider backbone"
            )
        earlier = [tensors[kind].flatten(2) for tensors in self.bank.values()]
        started: list[Tensor] = []
        for block, rows in enumerate(raw.flatten(2)):
            old = [tensor[block] for tensor in earlier] or [rows[:0]]
            started.append(orthonormalize(rows, torch.cat(old)))
        return torch.stack(started).view_as(raw)

    def training_weights(self, batch: Batch, progress: Progress) -> dict[str, Tensor]:
        return self.join([*self.bank.values(), dict(self.own.items())])

    def join(self, parts: list[Components]) -> Components:
        """Concatenate the components of several tasks along M, on the device."""
        return {
            kind: torch.cat([part[kind].to(self.device) for part in parts], 1)
            for kind in self.shapes()
        }

    def match(self, query: Tensor) -> Tensor | None:
        """Return the penalty on components that are not orthonormal, a term of the loss.

        It is mu * sum over Z in {P, K, a} and over blocks of mean((Z Z^T - I)^2), with the
        components as rows of Z. The query is not used.
        """
        if not self.settings.mu:
            return None
        penalties = [orthogonality(rows.flatten(2)) for rows in self.weight_overrides.values()]
        return self.settings.mu * torch.stack(penalties).sum()

    def finish(self) -> tuple[TaskState, Carried]:
        assert self.task is not None
        bank = {**self.bank, self.task.name: dict(self.own.items())}
        tensors: dict[str, Tensor] = {}
        for task, components in bank.items():
            for kind, tensor in components.items():
                tensors[f"{COMPONENTS}{task}/{kind}"] = tensor.detach().clone()
        return self.state(), Carried(tensors, {"tasks": list(bank)})

    # ---- serving ---------------------------------------------------------------------------------
    def load_carried(self, carried: Carried) -> None:
        super().load_carried(carried)
        self.bank = {}
        expected = self.shapes()
        for task in carried.meta.get("tasks", []):
            components = select_with_prefix(carried.tensors, f"{COMPONENTS}{task}/")
            check_shapes(f"task {task!r}: the carried state", components, expected)
            self.bank[task] = components

    def serving_weights(self, task: str) -> dict[str, Tensor]:
        """Return the components of `task` and of the tasks before it."""
        parts: list[Components] = []
        for name, components in self.bank.items():
            parts.append(components)
            if name == task:
                return self.join(parts)
        if self.task is None or self.task.name != task:
            raise UserError(
                f"task {task!r}: the carried state lacks its components; write a new model folder "
                "with `accrete bundle`"
            )
        return self.join([*parts, dict(self.own.items())])

    def logits(self, images: Tensor, task: str | None) -> Tensor:
        if task is None:
            # The newest task is served with its own and all earlier components: these are all.
            self.activate_task(self.task.name if self.task else [*self.bank][-1])
        return super().logits(images, task)

    def prompted(self, images: Tensor, query: Tensor) -> Tensor:
        components = self.weight_overrides
        alpha = weigh_components(query, components[KEY], components[ATTENTION])  # (L, B, M)
        prompts = components[PROMPT]
        prefixes = (alpha @ prompts.flatten(2)).unflatten(2, prompts.shape[2:])
        with self.sites.using(prefixes.unbind()):
            return self.backbone(images)  # type: ignore[no-any-return]

    def flops_share(self, state: TaskState) -> float:
        """Return the FLOPs of two forward passes, one with prefixes, divided by the backbone's."""
        return 2 + self.prefix_share([self.settings.length] * len(self.sites))


def find_prefix_sites(backbone: Any, settings: CodaSettings) -> PrefixSites:
    """Return the blocks of a ViT that get prefixes."""
    return PrefixSites(backbone, range(min(settings.blocks, len(backbone.blocks))))
