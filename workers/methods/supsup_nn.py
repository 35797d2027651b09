"""SupSup without task identities, neither in training nor at test time.

It trains one mask after the other, and starts a new mask if the images fit no mask so far.

Wortsman et al.: Supermasks in Superposition, NeurIPS 2020, scenario NNs.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveInt
from torch import Tensor, nn

from workers.dist import Group
from workers.job import key_inputs
from workers.methods.base import ParamGroup, Progress, StepContext
from workers.methods.supsup import SupSup, SupSupSettings
from workers.methods.train_defaults import TrainDefaults
from workers.model.superposition import Judge, Weights, shares
from workers.rng import derive_seed
from workers.storage.taskstate import Carried, TaskState, pack_mask, unpack_mask

# Indices into the buffer `counter`.
KNOWN = 0  # the number of known masks
CURRENT = 1  # the index of the mask in training; -1 for none
# Smallest magnitude of a score that is restored from a bit of a known mask. The sign of the score
# is the bit, and a score of 0 would have no sign.
TINY = 1e-8


class SupSupNNSettings(SupSupSettings):
    """Settings of `supsup_nn`."""

    scores: Literal["threshold"] = Field(
        "threshold", description="which weights a mask keeps: those with a score of at least 0"
    )
    outputs: PositiveInt = Field(
        100,
        description="width of the masked output layer; class i of every task is output i. The "
        "best width is the number of classes of the largest task: trained masks keep further "
        "outputs low for any image, which hides that an image is new to a mask",
    )
    infer: Literal["one_shot"] = Field(
        "one_shot",
        description="how the mask of an image is inferred: one pass through all masks superposed",
    )
    objective: Literal["entropy", "superfluous"] = Field(
        "entropy",
        description="what the fitting mask minimises: `entropy`: H of the softmax; "
        "`superfluous`: G of the outputs beyond the task's classes",
    )
    every: PositiveInt = Field(
        100, description="number of optimizer steps between two choices of the mask to train"
    )
    look: PositiveInt = Field(
        128, description="largest number of images of the next batch that a choice is based on"
    )
    eps: NonNegativeFloat = Field(
        0.125,
        description="a new mask is started when the largest share nu of a mask is below (1 + "
        "eps) / k",
    )
    least: PositiveInt = Field(
        5, description="smallest number k of superposed masks; untrained masks fill up to it"
    )
    most: PositiveInt = Field(
        32, description="largest number of masks; after that the best one is trained further"
    )


class SupSupNN(SupSup[SupSupNNSettings]):
    """A chain that carries all masks so far, one bit per weight and mask.

    Before the first optimizer step of a task, and every `every` steps, it selects the mask to
    train. It runs the next batch through the superposition of k masks: the known masks, filled up
    to `least` by untrained masks. Each mask has a share nu = softmax(-dH / dalpha), with H the
    entropy of the outputs and alpha the weights of the masks. The known mask with the largest share
    is trained further. A new mask is started if that share is below (1 + eps) / k, or if an
    untrained mask has the largest share.

    Labels are positions in the task's class list, so that all tasks share the outputs. At test time
    each image gets the mask with the largest nu. Only the number of classes of the task is used.

    Differences from the released code:
    - A mask that is trained again starts from its bits, with magnitudes drawn like those of a new
      mask. Its scores are not carried, because they take 32 times the space.
    - The optimizer keeps its moments if the mask changes in the middle of a task.
    - If an untrained mask has the largest share, the next new mask is started. In the code that
      untrained mask is trained and then lost.
    - If all masks are taken, the best known mask is trained further. In the code training stops.

    Further training of an old mask changes earlier outputs, so forgetting is possible.
    """

    name = "supsup_nn"
    can_recompute = False  # `torch.func.grad` allows no hooks on saved tensors
    has_constant_step = True
    family = "masks"
    keeps = "bits"
    train_defaults = TrainDefaults(
        lr=2e-3,
        source="the rate of supsup, whose scores it trains",
    )
    carries = ("masks",)
    scenarios = frozenset({"task"})
    may_forget = True
    Settings = SupSupNNSettings
    # `density` and `start` are missing, because they determine the untrained masks, which take part
    # in serving all tasks.
    per_task = frozenset({"mask_lr", "mask_travel", "outputs_travel", "every", "look", "eps"})
    bank: Tensor
    counter: Tensor
    trained: Tensor

    @classmethod
    def ignored_settings(cls, step: str) -> frozenset[str]:
        """Return no setting: the choice of masks in training reads all settings."""
        return frozenset()

    def __init__(self, backbone: nn.Module, settings: SupSupNNSettings, seed: int):
        super().__init__(backbone, settings, seed)
        num_bytes = (self.entries + 7) // 8
        # (most, num_bytes): the packed bits of each known mask
        self.register_buffer("bank", torch.zeros(settings.most, num_bytes, dtype=torch.uint8))
        self.register_buffer("counter", torch.tensor([0, -1]))
        # (most,): number of optimizer steps of this task that trained each mask
        self.register_buffer("trained", torch.zeros(settings.most, dtype=torch.int64))
        self.used: dict[str, int] = {}  # task -> index of the mask that its last step trained
        self.spare: dict[int, Weights] = {}  # index -> untrained mask, derived from the seed

    @property
    def entries(self) -> int:
        """Return the number of weights under a mask, over all sites."""
        return sum(weight.numel() for weight in self.sites.values())

    # ---- masks -----------------------------------------------------------------------------------
    def draw_first_scores(self, mask: int) -> dict[str, Tensor]:
        """Return the initial scores of a mask by site, on the CPU, drawn by seed and index."""
        scores: dict[str, Tensor] = {}
        for site in self.sites:
            generator = torch.Generator().manual_seed(derive_seed(self.seed, "mask", mask, site))
            scores[site] = self.choose_start(site, generator)
        return scores

    def bits(self, mask: int) -> Weights:
        """Return the mask of this index by site, known or untrained."""
        known, current = self.counter.tolist()
        if mask == current:
            return self.hard()
        if mask < known:
            shapes = {site: tuple(weight.shape) for site, weight in self.sites.items()}
            return by_site(self.bank[mask], shapes)
        if mask not in self.spare:
            initial_scores = self.draw_first_scores(mask)
            self.spare[mask] = {site: scores >= 0 for site, scores in initial_scores.items()}
        return self.spare[mask]

    def together(self) -> list[Weights]:
        """Return the superposed masks: all known masks, plus untrained masks up to `least`."""
        count = max(int(self.counter[KNOWN]), self.settings.least)
        return [self.bits(mask) for mask in range(count)]

    def keep(self) -> None:
        """Store the mask in training in the bank."""
        current = int(self.counter[CURRENT])
        if current >= 0:
            bits = torch.cat([mask.flatten() for mask in self.hard().values()])
            self.bank[current] = pack_mask(bits).to(self.bank.device)

    # ---- training --------------------------------------------------------------------------------
    def begin(self, context: StepContext) -> list[ParamGroup]:
        if context.carried is not None:
            self.load_carried(context.carried)
        groups = super().begin(context)
        self.feed = context.data.feed("train")
        # To choose a mask, every rank reads whole batches: the feed of `decide` has one rank and no
        # micro-batches. All ranks use the choice of rank 0.
        self.ranks = self.feed.group
        self.feed.group = Group(device=self.ranks.device)
        self.feed.accumulate = 1
        self.decide(0, 0)
        return groups

    def after_step(self, progress: Progress) -> None:
        current = self.counter[CURRENT : CURRENT + 1]
        self.trained.index_add_(0, current, torch.ones_like(self.trained[:1]))
        next_step = progress.global_step + 1
        if next_step % self.settings.every == 0 and next_step < progress.total:
            epoch, step = divmod(next_step, progress.steps_per_epoch)
            self.decide(epoch, step)

    @torch.no_grad()
    def decide(self, epoch: int, step: int) -> None:
        """Choose the mask to train from this step on, by the step's batch, and set its scores."""
        known, current = self.counter.tolist()
        mask = 0
        if known:
            batch = next(self.feed.epoch(epoch, step))[0]
            mask = self.choice(batch.images[: self.settings.look])
        mask = self.ranks.broadcast(mask)
        if mask == current:
            return
        scores = self.draw_first_scores(mask)
        if mask < known:  # a known mask: its bits are stored, its scores are not
            for site, bits in self.bits(mask).items():
                signs = torch.where(bits.cpu(), 1, -1)
                scores[site] = signs * scores[site].abs().clamp(min=TINY)
        self.keep()
        self.counter.copy_(torch.tensor([max(known, mask + 1), mask]))
        for site, start in scores.items():
            self.masks[site].get_parameter("scores").copy_(start)

    def choice(self, images: Tensor) -> int:
        """Return the index of the mask to train on these images, known or new."""
        masks = self.together()
        known = int(self.counter[KNOWN])
        fit = self.judge(masks, range(len(masks)), images[None])
        nu = shares(fit)[0]  # (masks,)
        best = int(nu.argmax())
        is_known = best < known
        is_clear = len(masks) * float(nu[best]) >= 1 + self.settings.eps
        if is_known and is_clear:
            return best
        if known < self.settings.most:
            return known
        return int(nu[:known].argmax())

    def metrics(self) -> dict[str, float]:
        """Return the metrics of `supsup`, the number of masks and the index of the current mask."""
        known, current = self.counter.tolist()
        return super().metrics() | {"masks": known, "mask": current}

    def warnings(self) -> list[str]:
        warnings = super().warnings()
        if int(self.counter[KNOWN]) == self.settings.most:
            warnings.append(
                f"all {self.settings.most} masks are taken, so that images which fit none train an "
                "old mask; raise `most`"
            )
        return warnings

    def finish(self) -> tuple[TaskState, Carried]:
        self.keep()
        known, current = self.counter.tolist()
        steps = {str(mask): count for mask, count in enumerate(self.trained.tolist()) if count}
        meta = {
            "settings": key_inputs(self.settings),
            "mask": current,
            "masks": known,
            "steps": steps,
            "shapes": {site: list(weight.shape) for site, weight in self.sites.items()},
        }
        return self.state(meta=meta), Carried({"masks": self.bank[:known].cpu().clone()})

    # ---- serving ---------------------------------------------------------------------------------
    def load_carried(self, carried: Carried) -> None:
        super().load_carried(carried)
        masks = carried.tensors["masks"]
        self.bank[: len(masks)] = masks.to(self.bank.device)
        self.counter.copy_(torch.tensor([len(masks), -1]))

    def load_task(self, state: TaskState) -> None:
        super().load_task(state)
        self.used[state.task] = state.meta["mask"]

    @classmethod
    def display_masks(cls, state: TaskState, carried: Carried) -> dict[str, Tensor]:
        """Return the mask with which the task's training ended, in its state at that time."""
        shapes = {site: tuple(shape) for site, shape in state.meta["shapes"].items()}
        packed_bits = carried.tensors["masks"][state.meta["mask"]]
        return by_site(packed_bits, shapes)

    def logits(self, images: Tensor, task: str | None) -> Tensor:
        """Return the logits; without a task, as many as the largest task has classes."""
        choices, _ = self.infer(images)
        return self.answer(images, choices, task)

    def candidates(self) -> dict[str, tuple[str, ...]]:
        """Return the known masks; a mask is right for the tasks that ended training with it."""
        known, current = self.counter.tolist()
        mask_of_task = dict(self.used)
        if self.task is not None and current >= 0:
            mask_of_task[self.task.name] = current
        candidates: dict[str, tuple[str, ...]] = {}
        for mask in range(known):
            tasks = [task for task, last_mask in mask_of_task.items() if last_mask == mask]
            candidates[f"mask {mask}"] = tuple(tasks)
        return candidates

    def infer(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the index of the best known mask and its share nu, (b,) each.

        nu is the share among all superposed masks.
        """
        known = int(self.counter[KNOWN])

        def among_known(judge: Judge, groups: Tensor, count: int) -> tuple[Tensor, Tensor]:
            best = shares(judge(range(count), groups))[:, :known].max(1)
            return best.indices, best.values

        return self.by_group(images, self.together(), among_known)

    def answer(self, images: Tensor, choices: Tensor, task: str | None) -> Tensor:
        """Return each image's logits under its mask, cut to the task's number of classes."""
        names = self.heads.names if task is None else [task]
        classes = max(self.heads[name].out_features for name in names)
        logits = images.new_empty((len(images), classes))
        for mask in choices.unique().tolist():
            rows = (choices == mask).nonzero().squeeze(1)
            self.active_task = None
            self.weight_overrides = self.masked_weights(mask) | self.fixed
            logits[rows] = self.features(images[rows])[:, :classes].to(logits.dtype)
        return logits

    @torch.no_grad()
    def masked_weights(self, mask: int) -> dict[str, Tensor]:
        """Return the weights of all sites under a mask, by parameter name."""
        bits = self.bits(mask)
        weights: dict[str, Tensor] = {}
        for site, weight in self.sites.items():
            weights[f"{site}.weight"] = weight * bits[site].to(weight.device)
        return weights


def by_site(row: Tensor, shapes: dict[str, tuple[int, ...]]) -> Weights:
    """Return boolean masks of these shapes from packed bits in the same order."""
    sizes = [math.prod(shape) for shape in shapes.values()]
    bits = unpack_mask(row, (sum(sizes),))
    parts = bits.split(sizes)
    masks: Weights = {}
    for (site, shape), part in zip(shapes.items(), parts, strict=True):
        masks[site] = part.view(shape)
    return masks
