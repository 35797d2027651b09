"""EWC: a quadratic penalty keeps weights that matter for earlier tasks near their old values.

Kirkpatrick et al.: Overcoming catastrophic forgetting in neural networks, PNAS 2017.
Schwarz et al.: Progress & Compress, ICML 2018, for online EWC.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import ConfigDict, Field, NonNegativeFloat, PositiveInt
from torch import Tensor, nn

from workers.data.batch import Batch
from workers.job import ActiveIf, Neutral
from workers.methods.base import MethodSettings, ParamGroup, Progress, Step, StepContext
from workers.methods.bases.importance import (
    IMPORTANCE,
    WeightImportance,
    copy_with_prefix,
)
from workers.methods.finetune import weight_groups
from workers.methods.train_defaults import TrainDefaults
from workers.model.anchors import AnchoredWeights
from workers.rng import derive_seed
from workers.storage.taskstate import Carried, TaskState, select_with_prefix

# Names in the carried state, in addition to those of `WeightImportance`.
ANCHORS = "anchors/"
OFFSET = "offset"  # constant term of the sum of the quadratic penalties


class EwcSettings(MethodSettings):
    """Settings of `ewc`."""

    model_config = ConfigDict(populate_by_name=True)

    lambda_: NonNegativeFloat = Field(1.0, alias="lambda", description="weight of the penalty")
    fisher: Literal["exact", "sampled", "empirical"] = Field(
        "exact",
        description="classes in the estimate of the Fisher information: `exact`: expectation over "
        "all classes; `sampled`: one class drawn from the softmax; `empirical`: the true class",
    )
    samples: PositiveInt = Field(
        512,
        description="number of random images per task for the estimate of the Fisher information",
    )
    scale: Annotated[Literal["mean", "none"], Neutral("none")] = Field(
        "mean",
        description="normalisation of a task's importance: `mean`: divide by its mean over all "
        "protected weights, so that lambda does not depend on the network; `none`: no division, as "
        "in the paper",
    )
    online: bool = Field(
        False,
        description="after each task make the latest weights the anchor of all tasks, instead of "
        "averaging the anchors of the tasks by importance",
    )
    gamma: Annotated[float, ActiveIf("online", (True,))] = Field(
        1.0, ge=0, le=1, description="decay factor of the earlier importance at each task"
    )


class Ewc(WeightImportance[EwcSettings]):
    """L = CE + lambda/2 * sum over earlier tasks k and weights i of F_k,i (theta_i - theta_k,i)^2.

    This is equation 3 of the paper. theta_k are the weights after task k, its anchor. F_k is the
    diagonal of the Fisher information: the mean over images of E_c[(d log p_c / d theta_i)^2], with
    c drawn from the network's own softmax. The step `importance` computes it image by image, with
    the evaluation transform, in fp32. `exact` takes the expectation over c, with one backward pass
    per image and class. `sampled` draws one c. `empirical` takes the true class: this is the
    empirical Fisher, a different matrix.

    A sum of quadratic functions is one quadratic function. Therefore the chain carries, for any
    number of tasks, one importance A = sum F_k and one anchor sum F_k theta_k / A per weight, and
    one constant, `offset`: the smallest value of the function, at the anchor.

    With `online`, A = gamma * A + F_k, and the latest weights are the anchor of all tasks.

    All weights of the backbone are protected. So are the heads of earlier tasks, except in scenario
    `task`, where they are no longer trained. The importance of a base task is computed, too.

    Differences from the paper: F uses at most `samples` images of a task, and is divided by its
    mean over all protected weights (unless `scale: none`). F of a trained network is small, so
    without this a lambda of about 100 would have no effect. Plain SGD diverges if lr * lambda *
    max(A) exceeds 2; `warnings` reports values above 1.
    """

    name = "ewc"
    has_constant_step = True
    paper = "Overcoming catastrophic forgetting in neural networks, PNAS 2017"
    train_defaults = TrainDefaults(
        lr=1e-4,
        scratch_lr=1e-3,
        source="the rate of finetune: EWC only adds a penalty to its loss",
    )
    Settings = EwcSettings
    steps = (Step("train"), Step("importance", trains=False))
    training_only = (*WeightImportance.training_only, f"{ANCHORS}*", OFFSET)
    penalty_terms: ClassVar[Mapping[str, str]] = {"penalty": "lambda"}
    per_task = frozenset({"lambda", "fisher", "samples"})
    later_settings = frozenset({"lambda"})

    def __init__(self, backbone: nn.Module, settings: EwcSettings, seed: int):
        super().__init__(backbone, settings, seed)
        self.anchors: dict[str, Tensor] = {}
        # The protected weights with their penalty, in `train` if there is a penalty.
        self.anchored: AnchoredWeights | None = None
        self.offset = torch.zeros(())

    @classmethod
    def steps_for(cls, settings: EwcSettings, position: int) -> tuple[Step, ...]:
        # position -1 is the base task: only its importance is computed
        return cls.steps if position >= 0 else cls.steps[1:]

    @classmethod
    def ignored_settings(cls, step: str) -> frozenset[str]:
        if step == "train":
            return frozenset({"fisher", "samples", "scale", "online", "gamma"})
        return frozenset({"lambda"})

    def curvature(self) -> float:
        return self.settings.lambda_

    # ---- training --------------------------------------------------------------------------------
    def begin(self, context: StepContext) -> list[ParamGroup]:
        self.offset = torch.zeros((), device=self.device)
        if context.carried is not None:
            self.load_carried(context.carried)
            self.load_penalty(context.carried)
        groups = super().begin(context) + weight_groups(self.backbone, context.optim)
        if context.step == "importance":
            self.consolidate(self.estimate_fisher())
        elif self.importance and self.settings.lambda_:
            self.anchored = AnchoredWeights(self.protected(), self.anchors, self.importance)
            # Replace the tensors by views of the vectors in `anchored`, to store the values once.
            self.anchors |= self.anchored.by_name(self.anchored.anchors)
            self.importance = self.anchored.by_name(self.anchored.importance)
        return groups

    def load_penalty(self, carried: Carried) -> None:
        """Load the penalty for earlier tasks from the carried state."""
        self.importance = select_with_prefix(carried.tensors, IMPORTANCE)
        self.anchors = select_with_prefix(carried.tensors, ANCHORS)
        self.offset = carried.tensors.get(OFFSET, self.offset)

    def loss(self, batch: Batch, progress: Progress) -> tuple[Tensor, dict[str, Tensor]]:
        loss, terms = super().loss(batch, progress)
        if self.anchored is None:
            return loss, terms
        penalty = self.penalty(self.anchored)
        return loss + penalty, {**terms, "penalty": penalty.detach()}

    def penalty(self, anchored: AnchoredWeights) -> Tensor:
        """Return lambda/2 * (offset + sum of A (theta - anchor)^2), a scalar."""
        return anchored.penalty(0.5 * self.settings.lambda_, self.offset)

    # ---- importance ------------------------------------------------------------------------------
    def estimate_fisher(self) -> dict[str, Tensor]:
        """Return the diagonal of the Fisher information on the task's images, by parameter.

        With `scale: mean` the values are divided by their mean. If all gradients are 0, the result
        is 0.
        """
        fisher = self.average_over_images(self.choose_fisher_keys(), self.add_squares)
        if self.settings.scale == "none":
            return fisher
        num_weights = sum(values.numel() for values in fisher.values())
        mean = torch.stack([values.sum() for values in fisher.values()]).sum() / num_weights
        return {name: (values / mean).nan_to_num(0.0) for name, values in fisher.items()}

    def choose_fisher_keys(self) -> set[str]:
        """Choose the images for `estimate_fisher`. Return their keys."""
        return self.choose_image_keys(self.settings.samples, "fisher")

    def add_squares(
        self, sums: list[Tensor], parameters: list[nn.Parameter], image: Batch, image_key: str
    ) -> None:
        """Add the squared gradients of one image's log-probabilities (K,) to `sums`."""
        assert self.task is not None
        log_p = self.task_logits(image.images)[0].log_softmax(0)
        label = int(image.labels)
        p = log_p.detach().exp().cpu()
        weights = {}  # class -> weight of the squared gradient
        if self.settings.fisher == "exact":
            weights = dict(enumerate(p.tolist()))
        elif self.settings.fisher == "sampled":
            seed = derive_seed(self.seed, "fisher label", image_key)
            drawn = p.multinomial(1, generator=torch.Generator().manual_seed(seed))
            weights = {int(drawn): 1.0}
        elif self.scenario != "task":
            weights = {self.class_slices()[self.task.name].start + label: 1.0}
        else:
            weights = {label: 1.0}
        for index, weight in weights.items():
            gradients = torch.autograd.grad(
                log_p[index], parameters, retain_graph=True, materialize_grads=True
            )
            for total, gradient in zip(sums, gradients, strict=True):
                total.addcmul_(gradient, gradient, value=weight)

    @torch.no_grad()
    def consolidate(self, fisher: dict[str, Tensor]) -> None:
        """Add the task's penalty at the current weights to the penalty of earlier tasks."""
        for name, parameter in self.protected().items():
            old = self.importance.get(name, torch.zeros_like(parameter))
            anchor = self.anchors.get(name, parameter)
            if self.settings.online:
                self.importance[name] = self.settings.gamma * old + fisher[name]
                self.anchors[name] = parameter.detach().clone()
                continue
            total = old + fisher[name]
            share = (fisher[name] / total).nan_to_num(0.0)  # 0 / 0: no task needs this weight
            moved = parameter - anchor
            self.offset = self.offset + (old * share * moved.square()).sum()
            self.importance[name] = total
            self.anchors[name] = torch.lerp(anchor, parameter, share)

    def finish(self) -> tuple[TaskState, Carried]:
        state, carried = super().finish()
        carried.tensors |= copy_with_prefix(ANCHORS, self.anchors)
        carried.tensors[OFFSET] = self.offset.detach().clone()
        return state, carried
