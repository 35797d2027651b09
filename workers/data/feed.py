"""The feed: every sample of some tasks exactly once per epoch, or some of them repeatedly; the same
for any number of ranks and loader threads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.data.augment import Augment, partner_positions
from workers.data.batch import Batch
from workers.data.cache import Cache
from workers.data.rows import select
from workers.data.sources import Pixels, Resident, Source, Streamed
from workers.dist import Group, interleave
from workers.job import StageJob, Task
from workers.rng import StepRng, derive_seed

EVAL_BATCH = 128  # images of a batch that is measured


class Feed:
    """Batches of one split of `tasks`.

    `train` is what validation leaves of it. training=True augments; `epoch` is for training,
    `evaluate` for measuring. Position p of a global batch goes to rank p % world, and there to
    micro-batch (p // world) % accumulate. Images are kept decoded where they fit into
    `data.resident_mb`, else they are streamed. memory: task name -> the sample keys that are all it
    gives of that task (see `Method.memory`). Raises UserError where a split is empty.

    With `data.repeats` r above 1 (repeated augmentation, as DeiT and DyTox have it) an epoch has as
    many samples as without: the first ceil(n / r) images of its shuffle, each r times, one copy
    right after the other and each augmented on its own. Where it differs from their sampler: n is
    not rounded down to a multiple of 256, which leaves an epoch over fewer images without a batch.
    """

    def __init__(
        self,
        job: StageJob,
        tasks: tuple[Task, ...],
        split: str,
        group: Group,
        training: bool,
        memory: Mapping[str, Collection[str]] | None = None,
    ):
        self.tasks, self.group = tasks, group
        self.batch_size, self.accumulate = job.train.batch_size, job.train.accumulate
        # A second step on the same samples (`retrain`) meets them in another order and under other
        # noise than the first.
        step = () if job.step in ("train", "backbone") else (job.step,)
        self.seed = derive_seed(job.seed, "feed", *(task.name for task in tasks), *step)
        self.augment = Augment(job.data, job.backbone_settings, training)
        # (n, ...): what batches hold in place of images, in table order
        self.cached: Tensor | None = None
        # Several tasks share an output space in scenario `class` alone, that of all tasks so far;
        # else nothing is mixed or smoothed.
        space = tasks if len(tasks) == 1 else job.tasks
        self.num_classes = (
            sum(task.num_classes for task in space)
            if len(tasks) == 1 or job.scenario == "class"
            else None
        )
        self.first = torch.tensor(
            [sum(t.num_classes for t in space[: space.index(task)]) for task in tasks]
        )
        cache = Cache(job.cache, int(job.cache_gb * 2**30)) if job.cache else None
        self.samples = select(job.root, tasks, split, job.data.val_fraction, memory or {}, cache)
        side = self.augment.size_in
        self.resident = len(self.samples) * side * side * 3 <= job.data.resident_mb << 20
        self.source: Source
        if self.resident:
            self.source = Resident(
                self.samples,
                side,
                self.seed,
                job.loader_workers,
                cache,
                group.device,
                job.data.repeats,
            )
        else:
            self.source = Streamed(
                self.samples, side, self.seed, job.loader_workers, group.device, job.data.repeats
            )

    @property
    def num_samples(self) -> int:
        return len(self.samples)

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_samples // self.batch_size)

    @torch.no_grad()
    def cache_features(self, made_of: Callable[[Tensor], Tensor]) -> None:
        """From now on batches hold what `made_of` makes of images (b, 3, H, W), computed here once,
        each rank its share; no image is looked at again. Does nothing where augmentation makes each
        time another image. The same to the last bit for any number of ranks."""
        if self.augment.repeats_itself:
            mine = [
                made_of(batch.images).cpu()
                for batch in self.evaluate(min(self.batch_size, EVAL_BATCH))
            ]
            self.cached = torch.cat(interleave(self.group.gather(mine))).to(self.group.device)

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[list[Batch]]:
        """From `start_step` on, the micro-batches of each optimizer step: as many on every rank.
        Those that got no sample of a ragged last batch hold a stand-in of weight 0."""

        def wanted(step: int, size: int) -> Iterable[int]:
            if self.cached is not None:
                return ()
            draws = [self._draw(epoch, step, positions, size) for positions, _ in self._deal(size)]
            return torch.cat(
                [part for draw in draws for part in (draw.positions, self._partners(draw))]
            ).tolist()

        steps = self.source.steps(epoch, self.batch_size, start_step, wanted)
        for step, (rows, pixels) in enumerate(steps, start_step):
            yield [
                self._batch(self._draw(epoch, step, positions, len(rows)), rows, pixels, share)
                for positions, share in self._deal(len(rows))
            ]

    def evaluate(self, batch: int = EVAL_BATCH) -> Iterator[Batch]:
        """This rank's share of all samples in table order: batch j goes whole to rank j % world, so
        that a sample meets the same neighbours, and gets the same logits to the last bit, for any
        number of ranks."""
        assert self.augment.repeats_itself, (
            "this feed for training augments; make one with training=False to measure"
        )

        def mine(step: int) -> bool:
            return step % self.group.world == self.group.rank

        steps = self.source.steps(
            None,
            batch,
            0,
            lambda step, size: range(size) if self.cached is None and mine(step) else (),
        )
        for step, (rows, pixels) in enumerate(steps):
            if mine(step):
                draw = self._draw(0, step, torch.arange(len(rows)), len(rows))
                yield replace(self._batch(draw, rows, pixels, 1.0), keys=self.samples.keys(rows))

    def _deal(self, size: int) -> list[tuple[Tensor, float]]:
        """What of a global batch each of this rank's micro-batches holds: positions, and their
        share of the batch. Where nothing is left, the first sample stands in with a share of 0."""
        step = self.group.world * self.accumulate
        parts = [
            torch.arange(size)[first::step]
            for first in range(self.group.rank, step, self.group.world)
        ]
        return [
            (part, len(part) / size) if len(part) else (torch.zeros(1, dtype=torch.int64), 0.0)
            for part in parts
        ]

    def _draw(self, epoch: int, step: int, positions: Tensor, size: int) -> StepRng:
        return StepRng(self.seed, epoch, step, positions, size, self.group.device)

    def _partners(self, draw: StepRng) -> Tensor:
        """The positions that the samples of `draw` are mixed with; none where nothing is mixed."""
        return (
            partner_positions(draw)[draw.positions]
            if self.augment.needs_partner and self.num_classes
            else draw.positions[:0]
        )

    def _batch(
        self, draw: StepRng, rows: NDArray[np.int64], pixels: Pixels, weight: float
    ) -> Batch:
        device = self.group.device
        here = torch.from_numpy(rows)
        places = self.samples.labels + self.first[self.samples.tasks]  # in the common output space
        mine, others = here[draw.positions], self._partners(draw)
        # one copy
        columns = torch.stack(
            [self.samples.labels[mine], self.samples.tasks[mine], places[mine]]
        ).to(device)
        if self.cached is None:
            partner = (
                (pixels(others), places[here[others]].to(device)) if len(others) else (None, None)
            )
            images, targets = self.augment(
                pixels(draw.positions), columns[2], self.num_classes, draw, *partner
            )
        else:
            images, targets = (
                self.cached[mine.to(device)],
                self.augment.targets(columns[2], self.num_classes),
            )
        labels, tasks = columns[0], columns[1]
        counts = self.samples.tasks[here].bincount(minlength=len(self.tasks)).tolist()
        return Batch(images, labels, tasks, draw, targets, weight=weight, counts=tuple(counts))
