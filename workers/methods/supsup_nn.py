"""SupSup without task identities, neither in training nor at test time.

It trains one mask after the other, and starts a new one when images fit none so far.

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
from workers.model.superposition import Judge, Weights, shares
from workers.rng import derive_seed
from workers.storage.taskstate import Carried, TaskState, pack, unpack

# entries of `counter`
KNOWN = 0  # how many masks there are
CURRENT = 1  # which one is in training, -1 for none
TINY = 1e-8  # a score that was 0 keeps its side of 0


class SupSupNNSettings(SupSupSettings):
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
    """A chain that carries all masks so far, a bit per weight and mask. Before the first step of a
    task, and every `every` steps, it looks at the coming batch under the superposition of k masks:
    the known ones, filled up with untrained ones. It goes on with the mask whose share nu =
    softmax(-dH / dalpha) is the largest, or takes a new one where even that is below (1 + eps) / k,
    or where an untrained one is the largest. Labels are positions in the task's class list, so that
    all tasks share them. At test time each image gets the mask with the largest nu; of the task
    nothing is used but its number of classes.

    Where it differs from the released code: a mask that is trained again starts from its bits, with
    scores as large as a mask's first ones, since scores would be 32 times as much to carry; the
    optimizer is not told of a change of masks in the middle of a task; an untrained mask that wins
    counts as new (there it is trained and forgotten); with all masks taken the best known one goes
    on (there training stops). An old mask that is trained further answers otherwise than before:
    nothing is promised.
    """

    name = "supsup_nn"
    carries = ("masks",)
    scenarios = frozenset({"task"})
    may_forget = True
    Settings = SupSupNNSettings
    # untrained masks, by density and start, serve too
    per_task = frozenset({"mask_lr", "mask_travel", "outputs_travel", "every", "look", "eps"})
    bank: Tensor
    counter: Tensor
    trained: Tensor

    @classmethod
    def ignored_settings(cls, step: str) -> frozenset[str]:
        """None: its training decides by all of them."""
        return frozenset()

    def __init__(self, backbone: nn.Module, settings: SupSupNNSettings, seed: int):
        super().__init__(backbone, settings, seed)
        # packed bits, a row per mask
        self.register_buffer(
            "bank", torch.zeros(settings.most, -(-self.entries // 8), dtype=torch.uint8)
        )
        self.register_buffer("counter", torch.tensor([0, -1]))
        # steps of this task, by mask
        self.register_buffer("trained", torch.zeros(settings.most, dtype=torch.int64))
        self.used: dict[str, int] = {}  # task -> the mask that it ended with
        self.spare: dict[int, Weights] = {}  # untrained masks, which only the seed decides

    @property
    def entries(self) -> int:
        """Number of weights under a mask, over all sites."""
        return sum(weight.numel() for weight in self.sites.values())

    # ---- masks -----------------------------------------------------------------------------------
    def first_scores(self, mask: int) -> dict[str, Tensor]:
        """Return the initial scores of a mask by site, on the CPU, drawn from its number alone."""
        scores: dict[str, Tensor] = {}
        for site in self.sites:
            generator = torch.Generator().manual_seed(derive_seed(self.seed, "mask", mask, site))
            scores[site] = self.start_of(site, generator)
        return scores

    def bits(self, mask: int) -> Weights:
        """Return a known mask by site, or the untrained one of that number."""
        known, current = self.counter.tolist()
        if mask == current:
            return self.hard()
        if mask < known:
            shapes = {site: tuple(weight.shape) for site, weight in self.sites.items()}
            return by_site(self.bank[mask], shapes)
        if mask not in self.spare:
            first_scores = self.first_scores(mask)
            self.spare[mask] = {site: scores >= 0 for site, scores in first_scores.items()}
        return self.spare[mask]

    def together(self) -> list[Weights]:
        """Return the superposed masks: all known ones, and untrained ones up to `least`."""
        count = max(int(self.counter[KNOWN]), self.settings.least)
        return [self.bits(mask) for mask in range(count)]

    def keep(self) -> None:
        """Put the mask in training into the bank."""
        current = int(self.counter[CURRENT])
        if current >= 0:
            bits = torch.cat([mask.flatten() for mask in self.hard().values()])
            self.bank[current] = pack(bits).to(self.bank.device)

    # ---- training --------------------------------------------------------------------------------
    def begin(self, context: StepContext) -> list[ParamGroup]:
        if context.carried is not None:
            self.load_carried(context.carried)
        groups = super().begin(context)
        self.feed = context.data.feed("train")
        # Every rank reads the whole batch for a decision, and all take that of the first rank.
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
        """Train the mask that fits the batch of that step from here on, or a new one."""
        known, current = self.counter.tolist()
        mask = 0
        if known:
            batch = next(self.feed.epoch(epoch, step))[0]
            mask = self.choice(batch.images[: self.settings.look])
        mask = self.ranks.broadcast(mask)
        if mask == current:
            return
        scores = self.first_scores(mask)
        if mask < known:
            for site, bits in self.bits(mask).items():
                signs = torch.where(bits.cpu(), 1, -1)
                scores[site] = signs * scores[site].abs().clamp(min=TINY)
        self.keep()
        self.counter.copy_(torch.tensor([max(known, mask + 1), mask]))
        for site, start in scores.items():
            self.masks[site].get_parameter("scores").copy_(start)

    def choice(self, images: Tensor) -> int:
        """Return the mask that these images are trained with: a known one, or the next new one."""
        masks = self.together()
        known = int(self.counter[KNOWN])
        nu = shares(self.judge(masks, range(len(masks)), images[None]))[0]  # (masks,)
        best = int(nu.argmax())
        fits = best < known and len(masks) * float(nu[best]) >= 1 + self.settings.eps
        if not fits and known < self.settings.most:
            return known
        return int(nu[:known].argmax())

    def metrics(self) -> dict[str, float]:
        """Also how many masks there are, and which of them is in training."""
        known, current = self.counter.tolist()
        return super().metrics() | {"masks": known, "mask": current}

    def warnings(self) -> list[str]:
        warnings = super().warnings()
        if int(self.counter[KNOWN]) == self.settings.most:
            warnings.append(
                f"all {self.settings.most} masks are taken, so that new images go to old ones; "
                "raise `most`"
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
        """The mask that the task ended with, as it was then."""
        shapes = {site: tuple(shape) for site, shape in state.meta["shapes"].items()}
        return by_site(carried.tensors["masks"][state.meta["mask"]], shapes)

    def logits(self, images: Tensor, task: str | None) -> Tensor:
        """With task None as many logits as any task has classes."""
        return self.answer(images, self.infer(images)[0], task)

    def candidates(self) -> dict[str, tuple[str, ...]]:
        """The known masks; right for the tasks that ended with them."""
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
        """How sure: the mask's share nu among all that are superposed."""
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
            with torch.no_grad():
                bits = self.bits(mask)
                overrides: dict[str, Tensor] = {}
                for site, weight in self.sites.items():
                    overrides[f"{site}.weight"] = weight * bits[site].to(images.device)
            self.active_task = None
            self.weight_overrides = overrides | self.fixed
            logits[rows] = self.features(images[rows])[:, :classes].to(logits.dtype)
        return logits


def by_site(row: Tensor, shapes: dict[str, tuple[int, ...]]) -> Weights:
    """Packed bits -> boolean masks of these shapes, one after the other."""
    sizes = [math.prod(shape) for shape in shapes.values()]
    parts = unpack(row, (sum(sizes),)).split(sizes)
    masks: Weights = {}
    for (site, shape), part in zip(shapes.items(), parts, strict=True):
        masks[site] = part.view(shape)
    return masks
