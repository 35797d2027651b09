"""iCaRL: sigmoid outputs with distillation, and predictions by the nearest mean of exemplars.

Rebuffi, Kolesnikov, Sperl, Lampert: iCaRL: Incremental Classifier and Representation Learning, CVPR
2017.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat
from torch import Tensor
from torch.nn import functional as F

from workers.data.batch import Batch
from workers.job import ActiveIf
from workers.methods.base import Progress
from workers.methods.bases.rehearsal import Rehearsal, RehearsalSettings
from workers.methods.train_defaults import TrainDefaults
from workers.model.distill import kd_ce, kd_sig
from workers.model.exemplars import compute_nearest_mean_logits


class IcarlSettings(RehearsalSettings):
    """Settings of `icarl`."""

    loss: Literal["bce", "ce_kd"] = Field(
        "bce",
        description="training loss: `bce`: binary cross-entropy per class, for labels and "
        "distillation; `ce_kd`: softmax cross-entropy, and another one for distillation",
    )
    tau: Annotated[PositiveFloat, ActiveIf("loss", ("ce_kd",))] = Field(
        2.0,
        description="for `loss: ce_kd`: temperature of the softmax of student and teacher in "
        "the distillation loss",
    )
    infer: Literal["nme", "argmax"] = Field(
        "nme",
        description="classifier in evaluation and serving: `nme`: nearest mean of exemplars; "
        "`argmax`: largest logit; training does not depend on it",
    )


class Icarl(Rehearsal[IcarlSettings]):
    """L = (1 - a) BCE(new) + a KD_sig(old), with the share a of old classes (`loss: bce`).

    This is the binary cross-entropy, averaged over images and classes. The targets of the old
    classes are the teacher's sigmoid outputs, also for exemplars. The targets of the new classes
    are the labels. With `loss: ce_kd`, L = CE over all classes + KD_ce(tau) over the old classes,
    which is often reported under the name iCaRL.

    The step `herd` carries nu_c: the mean of the unit-length features of class c's exemplars under
    the current network, scaled to length 1. The prediction is the class with the nearest nu_c,
    within the task if it is given. Validation in the step `train` uses the logits instead, because
    the means do not exist yet.

    Differences from the paper: binary cross-entropies are averaged over classes instead of summed.
    """

    name = "icarl"
    has_constant_step = True
    family = "rehearsal"
    keeps = "class means"
    paper = "iCaRL: Incremental Classifier and Representation Learning, CVPR 2017"
    train_defaults = TrainDefaults(
        lr=1e-4,
        scratch_lr=1e-3,
        source="measured on 25 classes of CIFAR-100 at 64 px: configs/RESULTS.md",
    )
    distills = True
    uses_class_means = True
    Settings = IcarlSettings
    per_task = Rehearsal.per_task | {"loss", "tau"}
    later_settings = frozenset({"tau"})

    @classmethod
    def ignored_settings(cls, step: str) -> frozenset[str]:
        return super().ignored_settings(step) | (frozenset() if step == "evaluate" else {"infer"})

    def loss(self, batch: Batch, progress: Progress) -> tuple[Tensor, dict[str, Tensor]]:
        assert self.task is not None
        features, sigmoids = self.features(batch.images), self.settings.loss == "bce"
        logits, first = self.all_logits(features).float(), self.class_slices()[self.task.name].start
        if sigmoids:
            ce = F.binary_cross_entropy_with_logits(
                logits[:, first:], self.global_targets(batch)[:, first:]
            )
        else:
            ce = self.classification_loss(features, batch)
        terms = {"bce" if sigmoids else "ce": ce.detach()}
        if self.teacher is None:
            return ce, terms
        taught, a = self.teacher.joined(batch.images), self.old_share
        kd = (
            kd_sig(logits[:, :first], taught)
            if sigmoids
            else kd_ce(logits[:, :first], taught, self.settings.tau)
        )
        return (1 - a) * ce + a * kd if sigmoids else ce + kd, {**terms, "kd": kd.detach()}

    def logits(self, images: Tensor, task: str | None) -> Tensor:
        """Return the negative squared distances to the class means.

        Without class means, or if `infer` is `argmax`, return the network's logits.
        """
        if self.means is None or self.settings.infer == "argmax":
            return super().logits(images, task)
        scores = compute_nearest_mean_logits(self.features(images), self.means.to(images.device))
        return scores if task is None else scores[:, self.class_slices()[task]]
