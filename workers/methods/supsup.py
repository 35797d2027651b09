"""SupSup: one binary mask per task over the weights of a frozen network.

If the task of an image is not given, it is inferred by comparing the outputs under all masks.

Wortsman et al.: Supermasks in Superposition, NeurIPS 2020. Scenario `task` is the paper's GG (the
task is given in training and at test time). Scenario `class` is its GN (the task is given only in
training), with labels that the tasks do not share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from typing_extensions import TypeVar

from workers.data.batch import Batch
from workers.errors import UserError
from workers.job import ActiveIf, DataSettings, Task, TrainSettings
from workers.methods.base import OptimPlan, ParamGroup, Progress, Step, require_adamw
from workers.methods.bases.task_inference import NOT_GIVEN, ChoosesTask
from workers.methods.bases.weight_masks import WeightMasks, WeightMaskSettings
from workers.methods.train_defaults import TrainDefaults
from workers.model.heads import Heads
from workers.model.masks import Threshold, TopK
from workers.model.norms import find_norms_with_statistics, norm_parameter_names
from workers.model.superposition import (
    Objective,
    Rule,
    Weights,
    compute_superfluous_share,
    entropy,
    infer_at_once,
    infer_by_halves,
    slopes,
    superfluous,
    values,
)
from workers.rng import derive_seed
from workers.storage.taskstate import TaskState

OUTPUTS = "outputs"  # the site of the output layer that tasks share


class SupSupSettings(WeightMaskSettings):
    """Settings of SupSup; by default masks of a pretrained backbone.

    The paper's random network is weights=signed_constant, start=kaiming, density=0.5,
    mask_travel=8.
    """

    mask_lr: PositiveFloat | Literal["auto"] = Field(  # type: ignore[assignment]
        "auto",
        description="peak learning rate of the scores; `auto`: derived from mask_travel and "
        "the number of steps",
    )
    mask_travel: Annotated[PositiveFloat, ActiveIf("mask_lr", ("auto",))] = Field(
        1.0,
        description="for `mask_lr: auto`: largest distance that Adam can move a score over "
        "all steps, in units of 1 / sqrt(inputs of the layer)",
    )
    outputs_travel: Annotated[PositiveFloat, ActiveIf("outputs", but=(0,))] = Field(
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
    budget: Annotated[PositiveFloat | None, ActiveIf("scores", ("topk",))] = Field(
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
    infer: Annotated[Literal["one_shot", "binary", "brute_force"], NOT_GIVEN] = Field(
        "brute_force",
        description="how the task is inferred if it is not given: `brute_force`: one forward pass "
        "per mask; `one_shot`: one pass through all masks superposed; `binary`: a binary "
        "search of log2(masks) passes through superposed masks",
    )
    objective: Annotated[Literal["entropy", "superfluous"], NOT_GIVEN] = Field(
        "superfluous",
        description="what the mask of the right task minimises: `entropy`: H of the softmax; "
        "`superfluous`: outputs beyond the task's classes, as G, or under `brute_force` as "
        "their share of the softmax",
    )
    infer_images: Annotated[PositiveInt, NOT_GIVEN] = Field(
        1, description="number of consecutive images of one task whose task is inferred together"
    )


S = TypeVar("S", bound=SupSupSettings, default=Any)


class SupSup(WeightMasks[S], ChoosesTask[S]):
    """A star: W is frozen, and each task stores one bit per weight.

    Unless `outputs` is 0, there are no heads per task. All tasks share a last layer with random
    signs, which is masked like the other layers. The classes of a task are the layer's first
    outputs; the other outputs are superfluous, and training lowers them.

    If the task of an image is not given, it is inferred. By default it is the task whose mask gives
    the superfluous outputs the smallest share of the softmax. `infer` and `objective` also offer
    the paper's rules: all masks are superposed with equal weights alpha, and the mask is chosen
    whose weight would lower the entropy H of the outputs fastest if it grew.

    Differences from the paper:
    - By default each mask is tried on its own. Masks that keep nine tenths of a pretrained ViT
      cannot be distinguished in a superposition of five or more.
    - W is the pretrained backbone by default. Masks then start without its smallest weights,
      because a random half of the weights of a pretrained ViT has lost its knowledge.
    - Biases, norms, class token and position embedding are the backbone's. With signed constants
      biases are 0 and norms have no affine part.
    - Tasks are inferred in evaluation mode; the released code stays in training mode.
    - Scores have no weight decay, and their learning rate follows from the number of steps.
    - Scores never start from the scores of earlier tasks, and there is no Hopfield memory.
    """

    name = "supsup"
    has_constant_step = True
    family = "masks"
    keeps = "bits"
    paper = "Supermasks in Superposition, NeurIPS 2020"
    train_defaults = TrainDefaults(
        lr=2e-3,
        source="measured on seven real tasks at 64 px: configs/RESULTS.md",
    )
    scenarios = frozenset({"task", "class", "domain"})
    starts_as_backbone = False
    revision = 2
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
        require_adamw(settings.mask_lr, train)
        if settings.weights == "signed_constant" and settings.start == "weights":
            raise UserError(
                "start is 'weights' with weights 'signed_constant': in each layer these are all "
                "of one size; set start=kaiming"
            )
        if settings.weights == "signed_constant" and settings.sites != "all":
            raise UserError(
                f"sites is {settings.sites!r} with weights 'signed_constant', which replaces the "
                "weights of all layers; set weights=pretrained"
            )
        decides_density = settings.start == "weights"
        if settings.scores == "topk":
            decides_density = settings.budget is None
        if "density" in settings.model_fields_set and not decides_density:
            decider = "budget" if settings.scores == "topk" else "scores threshold and start"
            raise UserError(
                f"density is {settings.density}, and has no effect with {decider} "
                f"{settings.budget or settings.start}; leave it out"
            )
        if scenario != "task" and not settings.outputs:
            raise UserError(
                f"outputs is 0 with stream.scenario {scenario!r}: masks are distinguished by a "
                "shared output layer; give it more outputs than any task has classes"
            )

    @classmethod
    def check_backbone(cls, settings: S, backbone: nn.Module, tasks: tuple[Task, ...] = ()) -> None:
        super().check_backbone(settings, backbone, tasks)
        if settings.weights == "signed_constant" and find_norms_with_statistics(backbone):
            raise UserError(
                "weights is 'signed_constant', but the backbone has batch norms, whose statistics "
                "are those of its own weights; use weights=pretrained, or a backbone without "
                "batch norm such as vit_tiny_patch16_224 or convnext_atto"
            )
        for task in tasks:
            needed = task.num_classes
            if settings.objective == "superfluous":
                needed += 1
            if 0 < settings.outputs < needed:
                raise UserError(
                    f"task {task.name!r} has {task.num_classes} classes, and method "
                    f"{cls.name!r} has outputs = {settings.outputs} for them to share; set outputs "
                    f"to {needed} or more"
                )

    @classmethod
    def unused_train_settings(cls, settings: S) -> Mapping[str, str]:
        if not settings.outputs:
            return {}
        reason = "no head is trained: scores follow mask_lr and do not decay"
        return {"lr": reason, "weight_decay": reason}

    @classmethod
    def ignored_settings(cls, step: str) -> frozenset[str]:
        if step == "train":
            return frozenset({"infer", "objective", "infer_images"})
        return frozenset()

    @classmethod
    def steps_for(cls, settings: S, position: int) -> tuple[Step, ...]:
        """Return the steps. A base task is trained only if tasks share an output layer.

        The base task then needs a mask of that layer, too. Otherwise the backbone serves it.
        """
        if position >= 0 or settings.outputs:
            return cls.steps
        return ()

    def __init__(self, backbone: nn.Module, settings: S, seed: int):
        super().__init__(backbone, settings, seed)
        # Untrained weights. They are not stored, because they are derived from the seed.
        self.constants = nn.ParameterList()
        # Replacements of backbone parameters that have no mask, by name; see `replace_weights`.
        self.fixed: Weights = {}
        if settings.weights == "signed_constant":
            self.replace_weights()
        if settings.outputs:
            self.heads = SharedOutputs(self.heads.width)
            shape = torch.Size((settings.outputs, self.heads.width))
            self.sites[OUTPUTS] = self.signed_constant(OUTPUTS, shape)

    def replace_weights(self) -> None:
        """Replace the weights of all sites by signed constants, biases by 0, norm weights by 1."""
        for site, weight in self.sites.items():
            self.sites[site] = self.signed_constant(site, weight.shape)
        norms = norm_parameter_names(self.backbone)
        for name, parameter in self.backbone.named_parameters():
            is_norm_weight = name in norms and name.endswith("weight")
            if name in norms or name.removesuffix(".bias") in self.sites:
                values = torch.full(parameter.shape, float(is_norm_weight))
                self.fixed[name] = self.constant(values)

    def constant(self, values: Tensor) -> nn.Parameter:
        """Register values as an untrained parameter, and return it."""
        parameter = nn.Parameter(values, requires_grad=False)
        self.constants.append(parameter)
        return parameter

    def signed_constant(self, site: str, shape: torch.Size) -> nn.Parameter:
        """Return weights +-sqrt(2 / inputs) with signs drawn by seed and site, on the CPU."""
        seed = derive_seed(self.seed, "signed constant", site)
        bits = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed))
        signs = 2.0 * bits - 1
        return self.constant(signs * math.sqrt(2 / shape[1:].numel()))

    # ---- masks -----------------------------------------------------------------------------------
    def new_mask(self, site: str, weight: Tensor) -> nn.Module:
        start = self.choose_start(site).to(weight.device)
        if self.settings.scores == "topk":
            return TopK(start, self.density(site))
        return Threshold(start, 0.0, inclusive=True)

    def choose_start(self, site: str, generator: torch.Generator | None = None) -> Tensor:
        """Return the scores before the first step, on the CPU.

        They are uniform in +-1 / sqrt(inputs), or proportional to |W| with the same mean magnitude.
        With `scores: threshold`, scores from |W| are shifted so that the share `density` of the
        scores is at least 0.
        """
        weight = self.sites[site].detach().cpu()
        bound = self.width(site)
        if self.settings.start == "kaiming" or site == OUTPUTS:
            return torch.empty(weight.shape).uniform_(-bound, bound, generator=generator)
        scores = weight.abs() / weight.abs().mean() * bound / 2
        if self.settings.scores == "topk":
            return scores
        is_on = TopK(scores, self.settings.density).hard()
        return scores - scores[is_on].min()

    def width(self, site: str) -> float:
        """Return 1 / sqrt(inputs), the bound of a site's random initial scores."""
        return 1 / math.sqrt(self.sites[site].shape[1:].numel())

    def density(self, site: str) -> float:
        """Return the share of a site's weights that topk keeps.

        For the output layer it is at most one half: all its weights have the same size, so no
        weight is a natural candidate to be dropped.
        """
        shape = self.sites[site].shape
        if self.settings.budget is not None:
            return min(0.5, self.settings.budget * (shape[0] + shape[1]) / shape.numel())
        if site == OUTPUTS:
            return min(0.5, self.settings.density)
        return self.settings.density

    def rate(self, site: str, optim: OptimPlan) -> float:
        """Return the peak learning rate of a site's scores.

        In a step Adam moves a score by at most the rate. `auto` therefore sets
        rate * full_rate_steps = travel / sqrt(inputs).
        """
        if self.settings.mask_lr != "auto":
            return self.settings.mask_lr
        travel = self.settings.mask_travel
        if site == OUTPUTS:
            travel = self.settings.outputs_travel
        return travel * self.width(site) / max(optim.full_rate_steps, 1e-9)

    # ---- training --------------------------------------------------------------------------------
    def head_groups(self, optim: OptimPlan, names: list[str]) -> list[ParamGroup]:
        if self.settings.outputs:
            return []
        return super().head_groups(optim, names)

    def training_weights(self, batch: Batch, progress: Progress) -> dict[str, Tensor]:
        return super().training_weights(batch, progress) | self.fixed

    def classification_loss(self, features: Tensor, batch: Batch) -> Tensor:
        """Return the cross-entropy, over all shared outputs if there are any.

        This lowers the superfluous outputs.
        """
        if not self.settings.outputs:
            return super().classification_loss(features, batch)
        targets = batch.labels
        if batch.targets is not None:
            superfluous_outputs = features.shape[1] - batch.targets.shape[1]
            targets = F.pad(batch.targets, (0, superfluous_outputs))
        return F.cross_entropy(features.float(), targets)

    def competing_outputs(self) -> int:
        return self.settings.outputs or super().competing_outputs()

    # ---- serving ---------------------------------------------------------------------------------
    def load_task(self, state: TaskState) -> None:
        super().load_task(state)
        # With shared outputs the state has no head. Otherwise `super` has loaded the head.
        self.heads.add(state.task, len(state.classes), self.seed)

    def serving_weights(self, task: str) -> dict[str, Tensor]:
        weights = super().serving_weights(task)
        if not weights:  # a base task without a mask is served by the backbone
            return {}
        return weights | self.fixed

    def features(self, images: Tensor) -> Tensor:
        """Return the input of heads: class-token features (b, d), or the shared outputs (b, s).

        Args:
            images: Images (b, 3, H, W).
        """
        return self.network(self.weight_overrides, images)

    def network(self, weights: Weights, images: Tensor) -> Tensor:
        """Return the output of the network with these weights, given by parameter name.

        The output consists of the shared outputs if `weights` has their layer, else of the
        features.
        """
        backbone_weights = dict(weights)
        output_weights = backbone_weights.pop(f"{OUTPUTS}.weight", None)
        features: Tensor = functional_call(self.backbone, backbone_weights, (images,))
        if output_weights is None:
            return features
        return F.linear(features, output_weights)

    def logits(self, images: Tensor, task: str | None) -> Tensor:
        """Return the logits. If `task` is None, infer the tasks first, in any scenario."""
        if task is None and not self.settings.outputs:
            raise UserError(
                f"method {self.name!r} needs to be told the task where each has a head of its "
                f"own (outputs is 0); give one of {sorted(self.heads.names)}"
            )
        return super().logits(images, task)

    # ---- task inference --------------------------------------------------------------------------
    def infer(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the index of the inferred task and a confidence for each image, (b,) each.

        The confidence depends on the setting `infer`. `one_shot`: nu = softmax(-dH / dalpha) at the
        inferred task, with H the objective. `brute_force`: the softmax of the negative objectives
        at the inferred task. `binary`: the product, over all rounds, of the share of nu in the kept
        half.
        """
        masks: list[Weights] = []
        for name in self.class_slices():
            if name in self.loaded:
                masks.append(self.loaded[name])
            else:  # the task in training
                masks.append(self.hard())
        rule: Rule = infer_at_once
        if self.settings.infer == "binary":
            rule = infer_by_halves
        return self.by_group(images, masks, rule)

    def by_group(
        self, images: Tensor, masks: Sequence[Weights], rule: Rule
    ) -> tuple[Tensor, Tensor]:
        """Return the index of the mask that `rule` chooses, and its confidence, (b,) each.

        Args:
            images: Images (b, 3, H, W).
            masks: The masks to choose from, each by site.
            rule: Chooses a mask for each group of `infer_images` consecutive images; the last group
                can be smaller.
        """
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
        """Return a score of each mask for each group of images, (g, k); low for a mask that fits.

        Args:
            masks: All masks, each by site.
            alive: Indices of the k masks to compare.
            groups: Images (g, n, 3, H, W).
        """
        weights = {f"{site}.weight": weight.detach() for site, weight in self.sites.items()}
        alive_masks: list[Weights] = []  # each by parameter name
        for index in alive:
            named: Weights = {}
            for site, mask in masks[index].items():
                named[f"{site}.weight"] = mask.to(groups.device)
            alive_masks.append(named)

        def network(inner: Weights, images: Tensor) -> Tensor:
            return self.network(inner | self.fixed, images)

        by_entropy = self.settings.objective == "entropy"
        if self.settings.infer == "brute_force":
            objectives: list[Objective] = [entropy] * len(alive)
            if not by_entropy:
                slices = [*self.class_slices().values()]
                objectives = []
                for index in alive:
                    num_classes = slices[index].stop - slices[index].start
                    objectives.append(partial(compute_superfluous_share, real=num_classes))
            return values(network, weights, alive_masks, groups, objectives)
        objective: Objective = entropy
        if not by_entropy:
            widest = max(self.heads[name].out_features for name in self.heads.names)
            objective = partial(superfluous, real=widest)
        alphas = groups.new_full((len(alive_masks),), 1 / len(alive_masks))
        return slopes(network, weights, alive_masks, alphas, groups, objective)


class SharedOutputs(Heads):
    """Replaces the heads: the classes of a task are the first outputs of the shared layer."""

    def add(self, task: str, classes: int, seed: int) -> Any:
        if task not in self.names:
            self._append(task, First(classes))  # type: ignore[arg-type]
        return self[task]

    def restore(self, task: str, tensors: dict[str, Tensor]) -> None:
        """Do nothing: no head is stored."""


class First(nn.Module):
    """Select the first `classes` outputs: (b, s) -> (b, classes)."""

    def __init__(self, classes: int):
        super().__init__()
        self.out_features = classes

    def forward(self, outputs: Tensor) -> Tensor:
        return outputs[:, : self.out_features]
