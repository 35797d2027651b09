"""Dark experience replay (DER and DER++): old images are replayed with the logits they once had.

Buzzega et al.: Dark Experience for General Continual Learning: a Strong, Simple Baseline, NeurIPS
2020. Not to be confused with `der`, the method of Yan et al.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor, nn
from torch.nn import functional as F

from workers.data.batch import Batch
from workers.data.features import extract_features
from workers.errors import UserError
from workers.methods.base import ParamGroup, Progress, StepContext
from workers.methods.bases.rehearsal import Memory, list_task_keys
from workers.methods.bases.reservoir import Reservoir, ReservoirSettings, list_slots
from workers.methods.train_defaults import TrainDefaults
from workers.storage.taskstate import Carried, TaskState

# Tensor in the carried state, (M, classes): a row for each of the M exemplars, as in `list_slots`.
LOGITS = "replay/logits"


class DarkReplaySettings(ReservoirSettings):
    """Settings of `dark_replay`."""

    alpha: NonNegativeFloat = Field(
        0.3, description="weight of the squared distance to the stored logits"
    )
    beta: NonNegativeFloat = Field(
        0.5, description="weight of the cross-entropy of exemplars; 0: DER, else DER++"
    )


class DarkReplay(Reservoir[DarkReplaySettings]):
    """L = CE(z(x), y) + alpha mean (z(x') - h')^2 + beta CE(z(x''), y'').

    z are the logits. x' and x'' are independent draws of `replay_batch` exemplars, h' the stored
    logits of x'. The squared distance is a mean over exemplars and over the outputs that h' has:
    outputs of later heads are not compared. In scenario `task` both terms use only the outputs of
    an exemplar's task.

    The step `herd` stores the logits of new exemplars, under the evaluation transform. The stored
    logits of older exemplars stay unchanged.

    Differences from the paper: the stored logits are those at the end of a task. In the paper they
    are the outputs for an augmented view, in the training step in which the image enters the
    memory. Exemplars are those of earlier tasks only, and the head grows.
    """

    name = "dark_replay"
    has_constant_step = True
    paper = (
        "Dark Experience for General Continual Learning: a Strong, Simple Baseline, NeurIPS 2020"
    )
    train_defaults = TrainDefaults(lr=1e-4, scratch_lr=1e-3, source="the rates of replay")
    Settings = DarkReplaySettings
    per_task = Reservoir.per_task | {"alpha", "beta"}
    training_only = (*Reservoir.training_only, LOGITS)  # bundles omit outputs on private images
    penalty_terms: ClassVar[Mapping[str, str]] = {"mse": "alpha", "replay": "beta"}

    def __init__(self, backbone: nn.Module, settings: DarkReplaySettings, seed: int):
        super().__init__(backbone, settings, seed)
        # Stored logits (M, classes). `begin` takes them from the carried state; they are constant
        # while a step trains.
        self.stored = torch.zeros(0, 0)
        self.taught = self.stored  # `stored`, padded to a column for each class so far
        # In the shape of `taught`: True for the outputs that an exemplar's h' has.
        self.known = torch.zeros(0, 0, dtype=torch.bool)

    def replay_draws(self) -> tuple[int, ...]:
        weights = (self.settings.alpha, self.settings.beta)
        return tuple(self.settings.replay_batch for weight in weights if weight)

    def memory(self, context: StepContext) -> dict[str, list[str]]:
        """Return the exemplars as `Reservoir` does; in `herd`, those of the task itself.

        `remember` computes the logits of the latter.
        """
        if context.step != "herd":
            return super().memory(context)
        keys = list_task_keys(self.next_memory(context)).get(context.task.name, [])
        return {context.task.name: keys}

    def begin(self, context: StepContext) -> list[ParamGroup]:
        groups = super().begin(context)
        slots = list_slots(self.exemplars)
        slices = self.class_slices()
        known = torch.zeros(len(slots), self.num_classes, dtype=torch.bool)
        for row, (task, _) in enumerate(slots):
            start = slices[task].start if self.scenario == "task" else 0
            known[row, start : slices[task].stop] = True
        self.known = known.to(self.device)
        self.taught = self.widen(self.stored).to(self.device)
        return groups

    # ---- training --------------------------------------------------------------------------------
    def replay_loss(self, batch: Batch, progress: Progress) -> tuple[Tensor, dict[str, Tensor]]:
        replay = batch.replay
        assert replay is not None
        assert replay.slots is not None
        logits = self.all_logits(self.features(replay.images)).float()
        known = self.known[replay.slots]
        distances = (logits - self.taught[replay.slots]).square() * known
        mse = distances.sum(1) / known.sum(1)
        if self.scenario == "task":
            logits = logits.masked_fill(~known, -torch.inf)
        ce = F.cross_entropy(logits, self.global_labels(replay), reduction="none")
        alpha, beta = self.settings.alpha, self.settings.beta
        # If a weight is 0, its term is left out and the replay batch is a single draw.
        if not beta:
            return alpha * mse.mean(), {"mse": mse.mean().detach()}
        if not alpha:
            return beta * ce.mean(), {"replay": ce.mean().detach()}
        # x' and x'' are the first and the second half of the global replay batch. A mean over one
        # half is twice the mean over the batch with zeros in the other half. This also holds for
        # the part of the batch that a rank has.
        is_first = replay.draw.positions_on_device < replay.draw.size // 2
        mse = 2 * torch.where(is_first, mse, 0.0).mean()
        ce = 2 * torch.where(is_first, 0.0, ce).mean()
        return alpha * mse + beta * ce, {"mse": mse.detach(), "replay": ce.detach()}

    # ---- the memory ------------------------------------------------------------------------------
    @torch.no_grad()
    def remember(self, memory: Memory) -> None:
        """Replace the memory. The logits of new exemplars are computed, other logits are kept."""
        assert self.task is not None
        task = self.task.name
        rows = dict(zip(list_slots(self.exemplars), self.widen(self.stored), strict=True))
        if task in memory:
            self.eval()
            batch = extract_features(self.features, self.context.data.feed("train"))
            logits = self.all_logits(batch.features.to(self.device)).float()
            rows |= {(task, key): row for key, row in zip(batch.keys, logits, strict=True)}
        super().remember(memory)
        kept = [rows[slot] for slot in list_slots(memory)]
        self.stored = torch.stack(kept) if kept else torch.zeros(0, self.num_classes)

    def widen(self, logits: Tensor) -> Tensor:
        """Extend logits (M, earlier number of classes) to (M, classes so far) with zeros."""
        return F.pad(logits, (0, self.num_classes - logits.shape[1]))

    def finish(self) -> tuple[TaskState, Carried]:
        state, carried = super().finish()
        if len(self.stored):
            carried.tensors[LOGITS] = self.stored.detach().clone()
        return state, carried

    def load_carried(self, carried: Carried) -> None:
        tensors = dict(carried.tensors)
        self.stored = tensors.pop(LOGITS, torch.zeros(0, 0))
        super().load_carried(Carried(tensors, carried.meta))
        num_slots = len(list_slots(self.exemplars))
        if self.stored.ndim != 2 or len(self.stored) != num_slots:
            raise UserError(
                f"the carried state has a memory of {num_slots} exemplars and {LOGITS} of shape "
                f"{tuple(self.stored.shape)}; each exemplar needs a row of logits: take the file "
                "that the run wrote"
            )
