"""SupSup: per task one bit for every weight of a frozen network; where the task is not told,
superposed masks tell it.

Wortsman et al.: Supermasks in Superposition, NeurIPS 2020. Scenario `task` is the paper's GG,
scenario `class` its GN with labels that the tasks do not share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from typing_extensions import TypeVar

from workers.data.batch import Batch
from workers.errors import UserError
from workers.job import DataSettings, Task, TrainSettings
from workers.methods.base import OptimPlan, ParamGroup, Progress, Step, needs_adamw
from workers.methods.bases.class_incremental import ClassIncremental
from workers.methods.bases.weight_masks import WeightMasks, WeightMaskSettings
from workers.model.heads import Heads
from workers.model.masks import Threshold, TopK
from workers.model.superposition import (
    Objective,
    Rule,
    Weights,
    entropy,
    infer_at_once,
    infer_by_halves,
    slopes,
    superfluous,
    superfluous_share,
    values,
)
from workers.model.torch_internals import BatchNormBase
from workers.model.weights import norm_names
from workers.rng import derive_seed
from workers.storage.taskstate import TaskState

OUTPUTS = "outputs"  # the site of the output layer that tasks share
# how far the classes of other tasks stand below those of the task that was picked: a softmax leaves
# them nothing
BELOW = 100.0


class SupSupSettings(WeightMaskSettings):
    """The paper's random network: weights signed_constant, start kaiming, density 0.5, mask_travel
    8."""

    mask_lr: PositiveFloat | Literal["auto"] = Field(  # type: ignore[assignment]
        "auto",
        description="peak learning rate of the scores; `auto`: derived from mask_travel and "
        "the number of steps",
    )
    mask_travel: PositiveFloat = Field(
        1.0,
        description="for `mask_lr: auto`: largest distance that Adam can move a score over "
        "all steps, in units of 1 / sqrt(inputs of the layer)",
    )
    outputs_travel: PositiveFloat = Field(
        8.0, description="mask_travel of the shared output layer, whose scores start at random"
    )
    scores: Literal["topk", "threshold"] = Field(
        "topk",
        description="which weights a mask keeps: `topk`: those with the largest |score| of a "
        "layer; `threshold`: those with a score of at least 0",
    )
    density: float = Field(
        0.9,
        gt=0,
        le=1,
        description="share of a layer's weights that `topk` KEEPS; for `threshold` the share "
        "at the start under `start: weights`",
    )
    budget: PositiveFloat | None = Field(
        None,
        description="for `topk`, S0 in the share of weights kept in a layer, min(.5, S0 "
        "(outputs + inputs) / weights), which replaces density; null: density",
    )
    start: Literal["weights", "kaiming"] = Field(
        "weights",
        description="initial scores: `weights`: in the order of |W|; `kaiming`: random, as in "
        "the paper",
    )
    weights: Literal["pretrained", "signed_constant"] = Field(
        "pretrained",
        description="frozen weights W: `pretrained`: the backbone's; `signed_constant`: one "
        "magnitude per layer with random signs, as in the paper",
    )
    outputs: NonNegativeInt = Field(
        100,
        description="width of the masked output layer that all tasks share; 0: each task "
        "trains a head",
    )
    infer: Literal["one_shot", "binary", "brute_force"] = Field(
        "brute_force",
        description="how scenario `class` infers the task: `brute_force`: one forward pass "
        "per mask; `one_shot`: one pass through all masks superposed; `binary`: a binary "
        "search of log2(masks) passes through superposed masks",
    )
    objective: Literal["entropy", "superfluous"] = Field(
        "superfluous",
        description="what the mask of the right task minimises: `entropy`: H of the softmax; "
        "`superfluous`: outputs beyond the task's classes, as G, or under `brute_force` as "
        "their share of the softmax",
    )
    infer_images: PositiveInt = Field(
        1, description="number of consecutive images of one task whose task is inferred together"
    )


S = TypeVar("S", bound=SupSupSettings, default=Any)


class SupSup(WeightMasks[S], ClassIncremental[S]):
    """A star: W is frozen, a task leaves a bit per weight. All tasks share a last layer of random
    signs, masked like the others: a task's classes are its first outputs, the superfluous ones are
    trained to be low, and no task has a head. Where the task is not told it is inferred: the mask
    that leaves the least to outputs beyond its task's classes (`infer` and `objective` name the
    paper's ways too: the mask whose share in a superposition of all would lower the entropy
    fastest).

    Where it differs from the paper: superposed masks of a pretrained ViT, each of nine tenths of
    its weights, are told apart no better than by chance once there are five, so each mask is tried.
    W is the pretrained backbone unless settings say otherwise, and then masks start by dropping its
    smallest weights, because a random half of a pretrained ViT knows nothing. Biases, norms, class
    token and position embedding are the backbone's; with signed constants biases are 0 and norms
    have no affine part. Images are judged in evaluation mode (the released code leaves training
    mode on). No weight decay on scores. The rate of scores follows from the number of steps. No
    start from earlier tasks' scores, no Hopfield memory.
    """

    name = "supsup"
    paper = "Supermasks in Superposition, NeurIPS 2020"
    scenarios = frozenset({"task", "class"})
    starts_as_backbone = False
    Settings = SupSupSettings
    per_task = WeightMasks.per_task | {
        "mask_travel",
        "outputs_travel",
        "scores",
        "density",
        "budget",
        "start",
    }

    @classmethod
    def validate(cls, settings: S, train: TrainSettings, data: DataSettings, scenario: str) -> None:
        needs_adamw(settings.mask_lr, train)
        if settings.weights == "signed_constant" and settings.start == "weights":
            raise UserError(
                "start is 'weights' with weights 'signed_constant': in each layer these are all "
                "of one size; set start=kaiming"
            )
        if settings.budget is not None and settings.scores != "topk":
            raise UserError(
                f"budget is {settings.budget} with scores {settings.scores!r}: it says how many "
                "entries topk keeps; use topk, or leave budget out"
            )
        if scenario == "class" and not settings.outputs:
            raise UserError(
                "outputs is 0 with stream.scenario 'class': masks are told apart by an output "
                "layer that they share; give it more outputs than "
                "any task has classes"
            )

    @classmethod
    def check_backbone(cls, settings: S, backbone: nn.Module, tasks: tuple[Task, ...] = ()) -> None:
        super().check_backbone(settings, backbone, tasks)
        for task in tasks:
            needed = task.num_classes + (settings.objective == "superfluous")
            if 0 < settings.outputs < needed:
                raise UserError(
                    f"task {task.name!r} has {task.num_classes} classes, and method "
                    f"{cls.name!r} has outputs = {settings.outputs} for them to "
                    f"share; set outputs to {needed} or more"
                )

    @classmethod
    def ignored_settings(cls, step: str) -> frozenset[str]:
        return frozenset({"infer", "objective", "infer_images"}) if step == "train" else frozenset()

    @classmethod
    def steps_for(cls, settings: S, position: int) -> tuple[Step, ...]:
        """A base task goes through the same where it has to share the output layer."""
        return cls.steps if position >= 0 or settings.outputs else ()

    def __init__(self, backbone: nn.Module, settings: S, seed: int):
        super().__init__(backbone, settings, seed)
        self.constants = nn.ParameterList()  # not trained and not stored: the seed gives them
        # what stands in for parameters of the backbone that have no mask, by name
        self.fixed: Weights = {}
        if settings.weights == "signed_constant":
            if any(isinstance(module, BatchNormBase) for module in backbone.modules()):
                raise UserError(
                    "weights is 'signed_constant', but the backbone has batch norms, whose "
                    "statistics are those of its own weights; use "
                    "weights=pretrained, or a vision transformer"
                )
            self.sites = {
                site: self.signed_constant(site, weight.shape)
                for site, weight in self.sites.items()
            }
            norms = norm_names(backbone)
            self.fixed = {
                name: self.constant(
                    torch.full(p.shape, float(name in norms and name.endswith("weight")))
                )
                for name, p in backbone.named_parameters()
                if name in norms or name.removesuffix(".bias") in self.sites
            }
        if settings.outputs:
            self.heads = SharedOutputs(self.heads.width)
            self.sites[OUTPUTS] = self.signed_constant(
                OUTPUTS, torch.Size((settings.outputs, self.heads.width))
            )

    def constant(self, values: Tensor) -> nn.Parameter:
        parameter = nn.Parameter(values, requires_grad=False)
        self.constants.append(parameter)
        return parameter

    def signed_constant(self, site: str, shape: torch.Size) -> nn.Parameter:
        """+-sqrt(2 / inputs), signs by (seed, site): the same on every machine."""
        signs = torch.randint(
            0,
            2,
            shape,
            generator=torch.Generator().manual_seed(
                derive_seed(self.seed, "signed constant", site)
            ),
        )
        return self.constant((2.0 * signs - 1) * math.sqrt(2 / shape[1:].numel()))

    # ---- masks -----------------------------------------------------------------------------------
    def new_mask(self, site: str, weight: Tensor) -> nn.Module:
        start = self.start_of(site).to(weight.device)
        return (
            TopK(start, self.density(site))
            if self.settings.scores == "topk"
            else Threshold(start, 0.0, inclusive=True)
        )

    def start_of(self, site: str, generator: torch.Generator | None = None) -> Tensor:
        """Scores before the first step, on the CPU: uniform in +-1 / sqrt(inputs); or as large as
        such on average, in the order of |W|, for threshold with the wanted share above 0."""
        weight = self.sites[site].detach().cpu()
        if self.settings.start == "kaiming" or site == OUTPUTS:
            return torch.empty(weight.shape).uniform_(
                -self.width(site), self.width(site), generator=generator
            )
        size = weight.abs() / weight.abs().mean() * self.width(site) / 2
        if self.settings.scores == "topk":
            return size
        return size - size[TopK(size, self.settings.density).hard()].min()

    def width(self, site: str) -> float:
        """Of the scores' start: 1 / sqrt(inputs)."""
        return 1 / math.sqrt(self.sites[site].shape[1:].numel())

    def density(self, site: str) -> float:
        """Share of a site's weights that topk keeps. The output layer has no small weights to
        spare: half of it, at most."""
        shape = self.sites[site].shape
        if self.settings.budget is not None:
            return min(0.5, self.settings.budget * (shape[0] + shape[1]) / shape.numel())
        return min(0.5, self.settings.density) if site == OUTPUTS else self.settings.density

    def rate(self, site: str, optim: OptimPlan) -> float:
        """Adam moves a score by at most the rate in a step, so `auto` sets rate * full_rate_steps =
        travel / sqrt(inputs)."""
        if self.settings.mask_lr != "auto":
            return self.settings.mask_lr
        travel = self.settings.outputs_travel if site == OUTPUTS else self.settings.mask_travel
        return travel * self.width(site) / max(optim.full_rate_steps, 1e-9)

    # ---- training --------------------------------------------------------------------------------
    def head_groups(self, optim: OptimPlan, names: list[str]) -> list[ParamGroup]:
        return [] if self.settings.outputs else super().head_groups(optim, names)

    def training_weights(self, batch: Batch, progress: Progress) -> dict[str, Tensor]:
        return super().training_weights(batch, progress) | self.fixed

    def classification_loss(self, features: Tensor, batch: Batch) -> Tensor:
        """With shared outputs: the cross-entropy over all of them, so that the superfluous ones are
        pushed down."""
        if not self.settings.outputs:
            return super().classification_loss(features, batch)
        targets = (
            batch.labels
            if batch.targets is None
            else F.pad(batch.targets, (0, features.shape[1] - batch.targets.shape[1]))
        )
        return F.cross_entropy(features.float(), targets)

    # ---- serving ---------------------------------------------------------------------------------
    def load_task(self, state: TaskState) -> None:
        super().load_task(state)
        # where its outputs are shared, nothing is stored of a head
        self.heads.add(state.task, len(state.classes), self.seed)

    def serving_weights(self, task: str) -> dict[str, Tensor]:
        weights = super().serving_weights(task)
        # a base task without a mask is the backbone's
        return weights | self.fixed if weights else {}

    def features(self, images: Tensor) -> Tensor:
        """images (b, 3, H, W) -> what heads see: class-token features (b, d), or the shared outputs
        (b, s)."""
        return self.network(self.weight_overrides, images)

    def network(self, weights: Weights, images: Tensor) -> Tensor:
        """The network with these weights by parameter name, up to the shared outputs where there
        are weights for them."""
        inner, last = dict(weights), weights.get(f"{OUTPUTS}.weight")
        inner.pop(f"{OUTPUTS}.weight", None)
        features = functional_call(self.backbone, inner, (images,))
        return features if last is None else F.linear(features, last)

    def logits(self, images: Tensor, task: str | None) -> Tensor:
        """With task None it is inferred first, in any scenario."""
        if task is not None:
            return super().logits(images, task)
        if not self.settings.outputs:
            raise UserError(
                f"method {self.name!r} needs to be told the task where each has a head of its "
                "own (outputs is 0); give one of "
                f"{sorted(self.heads.names)}"
            )
        return self.answer(images, self.infer(images)[0], None)

    # ---- which task an image is of ---------------------------------------------------------------
    def candidates(self) -> dict[str, tuple[str, ...]]:
        """In scenario `class` the tasks, in the order of `class_slices`."""
        return {name: (name,) for name in self.class_slices()} if self.scenario == "class" else {}

    def infer(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """How sure: nu = softmax(-dH / dalpha) at the task that was picked, of brute force the
        softmax of what is compared; of binary search the product over its rounds of what the kept
        half had of nu."""
        masks = [
            self.loaded[name] if name in self.loaded else self.hard()
            for name in self.class_slices()
        ]
        return self.by_group(
            images, masks, infer_by_halves if self.settings.infer == "binary" else infer_at_once
        )

    def by_group(
        self, images: Tensor, masks: Sequence[Weights], rule: Rule
    ) -> tuple[Tensor, Tensor]:
        """What `rule` picks among masks by site, and how sure it is, for each image (b,): in groups
        of infer_images, of which the last may be smaller."""
        if len(masks) == 1:
            return images.new_zeros(len(images), dtype=torch.int64), images.new_ones(len(images))
        size = min(self.settings.infer_images, len(images))
        whole = len(images) // size * size
        parts = [images[:whole].unflatten(0, (-1, size)), images[whole:][None]]
        picked_parts: list[Tensor] = []
        confidence_parts: list[Tensor] = []
        for part in parts:
            if part.numel():
                picked, confidence = rule(partial(self.judge, masks), part, len(masks))
                picked_parts.append(picked)
                confidence_parts.append(confidence)
        picked = torch.cat(picked_parts).repeat_interleave(size)[: len(images)]
        confidence = torch.cat(confidence_parts).repeat_interleave(size)[: len(images)]
        return picked, confidence

    def judge(self, masks: Sequence[Weights], alive: Sequence[int], groups: Tensor) -> Tensor:
        """How badly each mask in `alive` fits each group (g, n, 3, H, W) -> (g, k). masks: by
        site."""
        weights = {f"{site}.weight": weight.detach() for site, weight in self.sites.items()}
        alive_masks: list[Weights] = []  # by parameter name
        for index in alive:
            site_masks = masks[index].items()
            alive_masks.append({f"{site}.weight": m.to(groups.device) for site, m in site_masks})

        def network(inner: Weights, images: Tensor) -> Tensor:
            return self.network(inner | self.fixed, images)

        by_entropy = self.settings.objective == "entropy"
        if self.settings.infer == "brute_force":
            objectives: list[Objective] = [entropy] * len(alive)
            if not by_entropy:
                slices = [*self.class_slices().values()]
                classes = [slices[index].stop - slices[index].start for index in alive]
                objectives = [partial(superfluous_share, real=count) for count in classes]
            return values(network, weights, alive_masks, groups, objectives)
        objective: Objective = entropy
        if not by_entropy:
            widest = max(self.heads[name].out_features for name in self.heads.names)
            objective = partial(superfluous, real=widest)
        alphas = groups.new_full((len(alive_masks),), 1 / len(alive_masks))
        return slopes(network, weights, alive_masks, alphas, groups, objective)

    def answer(self, images: Tensor, choices: Tensor, task: str | None) -> Tensor:
        """Return each image's logits (b, classes so far) under the task inferred for it.

        All columns but those of that task are lower.
        """
        slices = self.class_slices()
        width = max(columns.stop for columns in slices.values())
        logits = images.new_empty((len(images), width))
        for index, (name, columns) in enumerate(slices.items()):
            rows = (choices == index).nonzero().squeeze(1)
            if len(rows):
                task_logits = self.logits(images[rows], name).to(logits.dtype)
                logits[rows] = task_logits.amin(1, keepdim=True) - BELOW
                logits[rows, columns] = task_logits
        return logits


class SharedOutputs(Heads):
    """Stands where other methods have heads: a task's are the first outputs of a layer that is not
    its own."""

    def add(self, task: str, classes: int, seed: int) -> Any:
        if task not in self.names:
            self._append(task, First(classes))  # type: ignore[arg-type]
        return self[task]

    def restore(self, task: str, tensors: dict[str, Tensor]) -> None:
        """Nothing is stored."""


class First(nn.Module):
    """outputs (b, s) -> the first ones (b, classes)."""

    def __init__(self, classes: int):
        super().__init__()
        self.out_features = classes

    def forward(self, outputs: Tensor) -> Tensor:
        return outputs[:, : self.out_features]
