"""MIR: replay of the exemplars whose loss the next optimizer step would increase most.

Aljundi et al.: Online Continual Learning with Maximally Interfered Retrieval, NeurIPS 2019.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor
from torch.nn import functional as F

from workers.data.batch import Batch
from workers.dist import Group
from workers.errors import UserError
from workers.job import DataSettings, TrainSettings
from workers.methods.base import ParamGroup, Progress, StepContext
from workers.methods.bases.reservoir import Reservoir, ReservoirSettings
from workers.methods.train_defaults import TrainDefaults


class MirSettings(ReservoirSettings):
    """Settings of `mir`."""

    candidates: PositiveInt = Field(
        160,
        description="number of random exemplars that are scored in each step; the `replay_batch` "
        "highest scores are replayed; a smaller memory is scored completely",
    )
    virtual_lr: Literal["auto"] | Annotated[PositiveFloat, Field(allow_inf_nan=False)] = Field(
        "auto",
        description="learning rate of the virtual step, plain SGD; `auto`: `train.lr`",
    )


class Mir(Reservoir[MirSettings]):
    """L = CE(task's images) + CE(chosen exemplars), each a mean.

    In each step `candidates` random exemplars x get the score l(x; theta') - l(x; theta). l is the
    cross-entropy, theta are the weights, theta' = theta - eta g the weights after a virtual step,
    with eta = `virtual_lr` and the gradient g of the first term. The `replay_batch` exemplars with
    the largest scores are replayed; of equal scores, the exemplar that is earlier in the memory
    comes first. Scores are computed in evaluation mode, in fp32, with the augmentation of training.
    In scenario `class` losses are over all classes so far, in scenario `task` over the classes of
    an image's task.

    Differences from the paper: exemplars are those of earlier tasks only, and their memory is a
    reservoir that is filled between tasks. A task may have several epochs.
    """

    name = "mir"
    paper = "Online Continual Learning with Maximally Interfered Retrieval, NeurIPS 2019"
    train_defaults = TrainDefaults(lr=1e-4, scratch_lr=1e-3, source="the rates of replay")
    Settings = MirSettings
    per_task = Reservoir.per_task | {"candidates", "virtual_lr"}

    @classmethod
    def validate(
        cls, settings: MirSettings, train: TrainSettings, data: DataSettings, scenario: str
    ) -> None:
        super().validate(settings, train, data, scenario)
        if settings.candidates < settings.replay_batch:
            raise UserError(
                f"candidates is {settings.candidates} and replay_batch {settings.replay_batch}, "
                "but the replayed exemplars are chosen among the candidates; raise candidates, or "
                "lower replay_batch"
            )

    def replay_draws(self) -> tuple[int, ...]:
        """See `ReplaysSamples`."""
        return (self.settings.candidates,)

    def begin(self, context: StepContext) -> list[ParamGroup]:
        groups = super().begin(context)
        # For each output, its task's index in `Batch.tasks`. -1: the step has no such samples.
        names = [task.name for task in context.training_tasks]
        output_tasks = []
        for name, outputs in self.class_slices().items():
            index = names.index(name) if name in names else -1
            output_tasks += [index] * (outputs.stop - outputs.start)
        self.output_tasks = torch.tensor(output_tasks, device=self.device)
        return groups

    def replay_loss(self, batch: Batch, progress: Progress) -> tuple[Tensor, dict[str, Tensor]]:
        assert batch.replay is not None
        ce = self.compute_sample_losses(batch.replay).mean()
        return ce, {"replay": ce.detach()}

    def compute_sample_losses(self, replay: Batch) -> Tensor:
        """Return the cross-entropy of each sample, (b,)."""
        logits = self.all_logits(self.features(replay.images)).float()
        if self.scenario == "task":
            logits = logits.masked_fill(self.output_tasks != replay.tasks[:, None], -torch.inf)
        return F.cross_entropy(logits, self.global_labels(replay), reduction="none")

    @torch.no_grad()
    def score_samples(self, replays: list[Batch]) -> list[Tensor]:
        """Return how much each sample's loss grows in a virtual step of SGD, (b,) for each batch.

        The step follows the current gradients of the parameters and is undone.
        """
        rate = self.settings.virtual_lr
        if rate == "auto":
            rate = self.context.optim.lr
        trained = [parameter for parameter in self.parameters() if parameter.grad is not None]
        originals = [parameter.clone() for parameter in trained]
        self.eval()
        before = [self.compute_sample_losses(replay) for replay in replays]
        for parameter in trained:
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=float(rate))
        after = [self.compute_sample_losses(replay) for replay in replays]
        for parameter, original in zip(trained, originals, strict=True):
            parameter.copy_(original)
        self.train()
        return [later - earlier for later, earlier in zip(after, before, strict=True)]

    def replay_parts(self, replays: list[Batch], group: Group) -> list[list[Batch]]:
        """Return one part with the exemplars of the highest scores; see `CombinesGradients`."""
        size = replays[0].draw.size
        # Scores and slots of all ranks: each rank fills its own columns, and the sum has all.
        table = torch.zeros(2, size, device=self.device)
        for replay, scores in zip(replays, self.score_samples(replays), strict=True):
            if replay.weight:  # 0: placeholder of a rank without samples
                assert replay.slots is not None
                positions = replay.draw.positions_on_device
                table[:, positions] = torch.stack([scores, replay.slots.to(scores)])
        scores, slots = group.sum(table).cpu()  # one copy to the host
        by_slot = slots.argsort()
        order = by_slot[scores[by_slot].argsort(descending=True, stable=True)]
        count = min(self.settings.replay_batch, size)
        is_chosen = torch.zeros(size, dtype=torch.bool)
        is_chosen[order[:count]] = True
        part = []
        for replay in replays:
            rows = is_chosen[replay.draw.positions].nonzero().squeeze(1)
            part.append(replay.take(rows, count))
        return [part]

    def combine(self, gradient: Tensor, replayed: Tensor) -> Tensor:
        """See `CombinesGradients`: (P,) and (1, P) -> (P,)."""
        return gradient + replayed[0]
