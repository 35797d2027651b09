"""MAS: memory aware synapses, importance from the sensitivity of the outputs, without labels.

Aljundi, Babiloni, Elhoseiny, Rohrbach, Tuytelaars: Memory Aware Synapses: Learning What (not) to
Forget, ECCV 2018.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import ConfigDict, Field, NonNegativeFloat, PositiveInt
from torch import Tensor, nn

from workers.data.batch import Batch
from workers.methods.base import MethodSettings, ParamGroup, Step, StepContext
from workers.methods.bases.importance import OneAnchor
from workers.methods.train_defaults import TrainDefaults


class MasSettings(MethodSettings):
    """Settings of `mas`."""

    model_config = ConfigDict(populate_by_name=True)

    lambda_: NonNegativeFloat = Field(1.0, alias="lambda", description="weight of the penalty")
    samples: PositiveInt = Field(
        512, description="images of a task over which importance is averaged, chosen at random"
    )


class Mas(OneAnchor[MasSettings]):
    """L = CE + lambda * sum over weights i of Omega_i (theta_i - theta*_i)^2.

    theta*_i is the value of the weight at the start of the task. After a task, the step
    `importance` adds the mean over images of |d ||z||^2 / d theta_i| to Omega_i. z are the logits
    of the task, in scenario `class` those of all classes so far. The mean is computed image by
    image, with the evaluation transform, in fp32. A base task has this step, too.

    Differences from the paper: Omega uses at most `samples` images of a task. The absolute value is
    that of each image's gradient; in the released code it is that of a batch's gradient, in which
    the gradients of images cancel each other.
    """

    name = "mas"
    has_constant_step = True
    paper = "Memory Aware Synapses: Learning What (not) to Forget, ECCV 2018"
    train_defaults = TrainDefaults(
        lr=1e-4,
        scratch_lr=1e-3,
        weight_decay=0.0,
        source="the rate of finetune; weight decay would pull protected weights to 0",
    )
    Settings = MasSettings
    steps = (Step("train"), Step("importance", trains=False))
    penalty_terms: ClassVar[Mapping[str, str]] = {"penalty": "lambda"}
    per_task = frozenset({"lambda", "samples"})
    later_settings = frozenset({"lambda"})

    @classmethod
    def steps_for(cls, settings: MasSettings, position: int) -> tuple[Step, ...]:
        return cls.steps if position >= 0 else cls.steps[1:]

    @classmethod
    def ignored_settings(cls, step: str) -> frozenset[str]:
        return frozenset({"samples"}) if step == "train" else frozenset({"lambda"})

    def weight(self) -> float:
        return self.settings.lambda_

    def begin(self, context: StepContext) -> list[ParamGroup]:
        groups = super().begin(context)
        if context.step == "importance":
            image_keys = self.choose_image_keys(self.settings.samples, "mas")
            sensitivity = self.average_over_images(image_keys, self.add_sensitivity)
            for name, values in sensitivity.items():
                old = self.importance.get(name, torch.zeros_like(values))
                self.importance[name] = old + values
        return groups

    def add_sensitivity(
        self, sums: list[Tensor], parameters: list[nn.Parameter], image: Batch, image_key: str
    ) -> None:
        """Add |d ||z||^2 / d theta| of one image to `sums`."""
        norm = self.task_logits(image.images).square().sum()
        gradients = torch.autograd.grad(norm, parameters, materialize_grads=True)
        for total, gradient in zip(sums, gradients, strict=True):
            total.add_(gradient.abs())
