"""The feed: batches of the samples of tasks, the same for any number of ranks.

Start with `Feed.epoch` (training) and `Feed.evaluate`. Both use `_batches`, which connects the
order of the samples (order.py), the source of their pixels (sources.py) and augmentation
(augment.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from workers.data.accelerator import is_accelerator
from workers.data.ahead import make_ahead
from workers.data.augment import Augment
from workers.data.batch import Batch
from workers.data.cache import Cache
from workers.data.image_maker import ReadPicture
from workers.data.loaders import count_loaders
from workers.data.order import Deal, DrawnOrder, Ints, Order, TableOrder
from workers.data.pictures import KeptPictures, Pictures, StreamedPictures, are_small
from workers.data.reader import (
    Reader,
    make_random_reader,
    make_sequential_reader,
    make_shuffled_reader,
)
from workers.data.rows import select
from workers.data.sources import PictureSource, Pixels, PixelSource, Resident, StepSamples
from workers.data.upload import Pending, SideStream, to_device
from workers.dist import Group, interleave
from workers.job import StageJob, Task
from workers.rng import StepRng, derive_seed

EVAL_BATCH = 128  # images per evaluation batch
PREFETCH_THREADS = 2  # threads that make batches before they are needed
PREFETCH_BATCHES = 2  # maximum number of batches made before they are needed


class MicroBatch(NamedTuple):
    """The part of a global batch that one rank processes in one forward and backward pass.

    Attributes:
        positions: Positions in the global batch, (b,).
        weight: b / global batch size, or 0 for a placeholder sample (see `Feed.epoch`).
    """

    positions: Tensor
    weight: float


class Feed:
    """Batches of one split of `tasks`, with each sample once per epoch.

    Position p of a global batch belongs to rank p % world, and on this rank to micro-batch
    (p // world) % accumulate. Images stay decoded in memory or in a memory-mapped file if they fit
    into `data.resident_mb`; otherwise they are decoded again in every epoch. Both give the same
    batches. In each epoch the samples are distributed to shuffle streams
    (`workers/data/order.py`). A rank reads only its own shuffle streams if `world` divides their
    number; otherwise it reads more streams, up to all.

    With `data.repeats` = r > 1 (repeated augmentation, as in DeiT and DyTox) an epoch has the same
    number of samples, but only about ceil(n / r) images. Each image occurs r times, and every copy
    is augmented separately. There are two differences from the sampler of DeiT and DyTox. Copies of
    an image are usually on one rank, see `Deal`. And n is not rounded down to a multiple of 256,
    because an epoch of fewer than 256 images would then have no batch.

    Terms: a picture is a decoded image of any size. Pixels are crops (k, 3, S, S) of pictures.
    Images are inputs of the network, which augmentation makes from pixels.

    Args:
        job: The stage: its seed, storage, and settings of data, training and backbone.
        tasks: Tasks whose samples are used.
        split: `train`, `val` or `test`. `train` excludes the samples held out as `val`.
        group: The ranks of the stage.
        training: Whether to augment. `evaluate` needs deterministic augmentation.
        memory: Keys of the samples to use, by task name. Tasks without an entry use all samples;
            tasks with an empty entry use none. See `RemembersSamples.memory`.

    Attributes:
        replay: Feed of replayed samples. Each batch of `epoch` gets one replayed batch as
            `Batch.replay`.

    Raises:
        UserError: If the split of a task is empty, a class has no train image, or a key of `memory`
            is not in the split.
    """

    replay: ReplayFeed | None = None

    def __init__(
        self,
        job: StageJob,
        tasks: tuple[Task, ...],
        split: str,
        group: Group,
        training: bool,
        memory: Mapping[str, Collection[str]] | None = None,
    ):
        self.tasks = tasks
        self.group = group
        self.batch_size = job.train.batch_size
        self.accumulate = job.train.accumulate
        # Later steps over the same samples, such as `retrain`, use another order and other random
        # numbers.
        step = () if job.step in ("train", "backbone") else (job.step,)
        names = [task.name for task in tasks if not memory or memory.get(task.name, True)]
        self.seed = derive_seed(job.seed, "feed", *names, *step)
        self.augment = Augment(job.data, job.backbone_settings, training)
        self.memory_format = torch.contiguous_format  # memory format of images in batches
        # Features (n, ...) in table order. `cached_features` replace the images of the batches,
        # `features_beside` are added to the batches as `Batch.features`.
        self.cached_features: Tensor | None = None
        self.features_beside: Tensor | None = None
        cache = open_cache(job)
        self.samples = select(job.root, tasks, split, job.data.val_fraction, memory, cache)
        self._label_globally(job)
        self.deal = Deal(
            len(self.samples), self.samples.num_bytes, self.batch_size, self.seed, job.data.repeats
        )
        self.source, self.resident = self._make_source(job, cache)
        self.side_stream = SideStream(group.device)

    def _make_source(self, job: StageJob, cache: Cache | None) -> tuple[PixelSource, bool]:
        """Return the source of pixels, and whether it keeps decoded images."""
        view = self.augment.view
        num_loaders = count_loaders(job.loader_workers, self.group.cores)
        device = self.group.device
        max_bytes = job.data.resident_mb << 20
        pictures: Pictures
        normalisation = None
        # On a CPU, the process that cuts the crops also normalises them, while they are in its
        # cache. A GPU normalises the pixels itself (`Augment.normalise`).
        if self.augment.only_crops and not is_accelerator(device):
            normalisation = self.augment.normalisation
        if view.longest_side is None:
            if len(self.samples) * view.side**2 * 3 <= max_bytes:
                return Resident(self.samples, view, num_loaders, cache, device), True
        elif are_small(self.samples, view.longest_side, max_bytes):
            pictures = KeptPictures(self.samples, view.longest_side, num_loaders, cache)
            return PictureSource(pictures, view, num_loaders, normalisation), True
        reader = self._make_reader(cache)
        pictures = StreamedPictures(self.samples, reader, ReadPicture(view.longest_side))
        return PictureSource(pictures, view, num_loaders, normalisation), False

    def _make_reader(self, cache: Cache | None) -> Reader:
        if self.augment.training:
            return make_shuffled_reader(self.samples, self.deal, self.group.world, cache)
        return make_sequential_reader(self.samples, cache)

    def _label_globally(self, job: StageJob) -> None:
        """Set the output space of global labels: its size `num_classes`, and `first_labels`.

        A sample's global label is its label plus the first label of its task, an entry of the
        tensor `first_labels` (number of tasks,).

        - A single task has its own output space in every scenario.
        - Several tasks in scenario `class` use the space of all tasks so far.
        - Several tasks in scenario `domain` share one space, because they have the same classes.
        - Several tasks in scenario `task` have no common space: `num_classes` is None, and labels
          are neither mixed nor smoothed.
        """
        space = self.tasks if len(self.tasks) == 1 else job.tasks
        first_labels: dict[str, int] = {}
        total = 0
        for task in space:
            start = 0 if job.scenario == "domain" else total
            first_labels[task.name] = start
            total = start + task.num_classes
        is_shared = len(self.tasks) == 1 or job.scenario != "task"
        self.num_classes = total if is_shared else None
        self.first_labels = torch.tensor([first_labels[task.name] for task in self.tasks])

    @property
    def num_samples(self) -> int:
        """Number of samples of an epoch, over all ranks."""
        return len(self.samples)

    @property
    def steps_per_epoch(self) -> int:
        """Number of global batches of an epoch; the last one may be smaller."""
        return -(-self.num_samples // self.batch_size)

    @torch.no_grad()
    def cache_features(
        self, extract: Callable[[Tensor], Tensor], max_bytes: int | None = None
    ) -> None:
        """Replace images by `extract(images)` in all batches from now on.

        `extract` runs in this call, once per image, each rank on its share. The result is the same
        to the last bit for any number of ranks. If augmentation is random, or the features of all
        images have more than `max_bytes`, images are not replaced.

        Args:
            extract: Maps images (b, 3, H, W) to features (b, ...).
            max_bytes: Maximum size of the features on each rank. This call takes twice as much.
                None: no maximum.
        """
        if self.augment.is_deterministic:
            self.cached_features = self._extract(extract, max_bytes)

    @torch.no_grad()
    def add_features(self, extract: Callable[[Tensor], Tensor]) -> None:
        """Add `extract(images)` to all batches from now on, as `Batch.features`.

        As in `cache_features`, `extract` runs in this call, and nothing is added if augmentation is
        random.

        Args:
            extract: Maps images (b, 3, H, W) to features (b, ...).
        """
        if self.augment.is_deterministic:
            self.features_beside = self._extract(extract, None)

    def _extract(self, extract: Callable[[Tensor], Tensor], max_bytes: int | None) -> Tensor | None:
        """Return the features of all samples in table order, (n, ...), on the device.

        Return None if they have more than `max_bytes`.
        """
        parts: list[Tensor] = []
        with closing(self.evaluate(min(self.batch_size, EVAL_BATCH))) as batches:
            for batch in batches:
                part = extract(batch.images).cpu()
                if max_bytes is not None and part[0].nbytes * self.num_samples > max_bytes:
                    break  # every rank stops at its first batch, so `all_parts` is empty
                parts.append(part)
        all_parts = interleave(self.group.gather(parts))
        return torch.cat(all_parts).to(self.group.device) if all_parts else None

    def epoch(self, epoch: int, start_step: int = 0) -> Generator[list[Batch]]:
        """Yield this rank's micro-batches of each optimizer step, from `start_step` on.

        All ranks yield the same number of micro-batches. If the last batch is too small for all
        micro-batches, those without samples have one placeholder sample with weight 0.
        """
        order = self.deal.epoch(epoch)
        steps = range(start_step, order.num_steps)
        batches_by_step = self._batches(epoch, order, steps, self._micro_batches)
        if self.replay is None:
            yield from batches_by_step
            return
        with (
            closing(batches_by_step),
            closing(self.replay.replay_batches(epoch, steps)) as replayed,
        ):
            for batches, replays in zip(batches_by_step, replayed, strict=True):
                yield [
                    replace(batch, replay=replay)
                    for batch, replay in zip(batches, replays, strict=True)
                ]

    def evaluate(self, batch_size: int = EVAL_BATCH) -> Generator[Batch]:
        """Yield this rank's batches of all samples in table order, with their keys.

        Rank j % world computes the complete batch j. Therefore a sample is in the same batch, and
        gets bit-identical logits, for any number of ranks.
        """
        assert self.augment.is_deterministic, (
            "evaluate() needs deterministic augmentation; create the feed with training=False"
        )

        order = TableOrder(len(self.samples), batch_size)
        steps = range(self.group.rank, order.num_steps, self.group.world)

        with closing(self._batches(0, order, steps, whole_batch)) as batches_by_step:
            for step, (batch,) in zip(steps, batches_by_step, strict=True):
                keys = self.samples.keys(order.rows(step, np.arange(order.size(step))))
                yield replace(batch, keys=keys)

    def _batches(
        self,
        epoch: int,
        order: Order,
        steps: range,
        split_batch: Callable[[int], list[MicroBatch]],
    ) -> Generator[list[Batch]]:
        """Yield this rank's micro-batches of each step. Threads make them in advance.

        Args:
            epoch: The epoch.
            order: Order of the epoch.
            steps: The steps.
            split_batch: Function from the size of a global batch to this rank's micro-batches.
        """

        def make_rng(step: int) -> StepRng:
            size = order.size(step)
            positions = torch.cat([part.positions for part in split_batch(size)])
            return self._rng(epoch, step, positions, size)

        # Random numbers, rows and task counts of the steps that are made in advance. Only
        # `iterate_samples` reads `order`, step by step, because `order` keeps only its most recent
        # blocks.
        planned: deque[tuple[StepRng, Ints, tuple[int, ...]]] = deque()

        def iterate_samples() -> Generator[StepSamples]:
            for step in steps:
                rng = make_rng(step)
                samples = self._samples(order, rng)
                rows = self._rows(order, rng, samples)
                planned.append((rng, rows, self._task_counts(order, step)))
                yield samples

        pixels_of_steps = self.source.steps(iterate_samples())
        self.side_stream.fork()

        def prefetch_tasks() -> Generator[Callable[[], Pending[list[Batch]]]]:
            # Not a loop over `pixels_of_steps`, because that would exhaust this generator, and when
            # it ends, it cancels the pixels that are still being made.
            for _ in steps:
                pixels = next(pixels_of_steps)
                rng, rows, counts = planned.popleft()
                parts = split_batch(rng.size)
                make = partial(self._make_batches, rng, parts, rows, counts, pixels)
                yield partial(self.side_stream.run, make)

        batches_by_step = make_ahead(
            prefetch_tasks(), pixels_of_steps.close, PREFETCH_THREADS, PREFETCH_BATCHES
        )
        try:
            with closing(batches_by_step):
                for batches, event in batches_by_step:
                    for batch in batches:
                        self.side_stream.hand_over(event, batch.device_tensors())
                    yield batches
        finally:
            self.side_stream.join()  # after this, memory that its kernels read can be freed

    def _micro_batches(self, size: int) -> list[MicroBatch]:
        """Return this rank's micro-batches of a global batch of `size` samples.

        A micro-batch without samples gets the first sample as a placeholder, with weight 0.
        """
        stride = self.group.world * self.accumulate
        parts = []
        for first in range(self.group.rank, stride, self.group.world):
            positions = torch.arange(size)[first::stride]
            if len(positions):
                parts.append(MicroBatch(positions, len(positions) / size))
            else:
                parts.append(MicroBatch(torch.zeros(1, dtype=torch.int64), 0.0))
        return parts

    def _rng(self, epoch: int, step: int, positions: Tensor, size: int) -> StepRng:
        return StepRng(
            self.seed, epoch, step, positions, size, self.group.device, batch_size=self.batch_size
        )

    def _samples(self, order: Order, rng: StepRng) -> StepSamples:
        """Return the samples for which this rank needs pixels in a step."""
        if self.cached_features is not None:
            no_positions = np.zeros(0, np.int64)
            return StepSamples(no_positions, no_positions)
        positions = np.unique(self.augment.positions(rng, self.num_classes).numpy())
        rows = order.rows(rng.step, positions)
        return StepSamples(positions, rows, self.augment.draw_crops(rng, positions))

    def _rows(self, order: Order, rng: StepRng, samples: StepSamples) -> Ints:
        """Return rows (k,): those of the samples, followed by those of their mixing partners."""
        positions = self.augment.positions(rng, self.num_classes).numpy()
        if self.cached_features is not None:
            return order.rows(rng.step, positions)
        return samples.rows[np.searchsorted(samples.positions, positions)]

    def _make_batches(
        self,
        rng: StepRng,
        parts: list[MicroBatch],
        rows: Ints,
        counts: tuple[int, ...],
        pixels: Pixels,
    ) -> list[Batch]:
        """Make this rank's micro-batches of a step.

        Pixels are copied to the device in one transfer, all other tensors in another.

        Args:
            rng: Random numbers of the samples (b,) of all parts.
            parts: The micro-batches.
            rows: Rows of the sample table, (k,): the b samples, followed by their mixing partners.
            counts: Number of samples of each task in the global batch.
            pixels: Function that returns the pixels at positions in the global batch.
        """
        device = self.group.device
        num_samples = len(rng.positions)
        plan = self.augment.plan(rng, self.num_classes)
        sample_ids, own_labels, own_tasks = (
            torch.from_numpy(column.astype(np.int64))  # (k,)
            for column in (rows, self.samples.labels[rows], self.samples.tasks[rows])
        )
        numbers = [
            sample_ids,
            own_labels,
            own_tasks,
            own_labels + self.first_labels[own_tasks],
            rng.positions,
            *self._extra_numbers(sample_ids),
        ]
        copies = to_device([*numbers, *plan.tensors()], device)
        ids, labels, tasks, global_labels, positions, *extra = copies[: len(numbers)]
        plan = plan.with_tensors(copies[len(numbers) :])
        if self.cached_features is None:
            step_pixels = pixels(plan.positions.numpy())  # (k, 3, S, S)
            if step_pixels.device.type != device.type:
                (step_pixels,) = to_device([step_pixels], device)
            step_pixels = step_pixels.contiguous()
            images, targets = self.augment(step_pixels, global_labels, self.num_classes, rng, plan)
            images = images.contiguous(memory_format=self.memory_format)
        else:
            images = self.cached_features[ids[:num_samples]]
            targets = self.augment.targets(global_labels[:num_samples], self.num_classes)
        features: Tensor | None = None
        if self.features_beside is not None:
            features = self.features_beside[ids[:num_samples]]
        batches = []
        start = 0
        for part in parts:
            part_slice = slice(start, start + len(part.positions))
            start = part_slice.stop
            part_rng = replace(rng, positions=part.positions)
            part_rng.note_copy(positions[part_slice])
            part_targets = None if targets is None else targets[part_slice]
            batches.append(
                Batch(
                    images[part_slice],
                    labels[part_slice],
                    tasks[part_slice],
                    part_rng,
                    part_targets,
                    weight=part.weight,
                    counts=counts,
                    slots=extra[0][part_slice] if extra else None,
                    features=None if features is None else features[part_slice],
                )
            )
        return batches

    def _extra_numbers(self, sample_ids: Tensor) -> list[Tensor]:
        """Return further integers (k,) per sample: the slots in a replay feed, else nothing."""
        return []

    def _task_counts(self, order: Order, step: int) -> tuple[int, ...]:
        """Return the number of samples of each task in a global batch, over all ranks."""
        size = order.size(step)
        if len(self.tasks) == 1:
            return (size,)
        tasks = self.samples.tasks[order.rows(step, np.arange(size))]
        return tuple(np.bincount(tasks, minlength=len(self.tasks)).tolist())


class ReplayFeed(Feed):
    """Random samples of a memory: `Feed.replay` of another feed.

    Args:
        job: See `Feed`.
        tasks: See `Feed`.
        group: See `Feed`.
        memory: Keys of the memory by task name. The slot of a sample (`Batch.slots`) is its
            position in the concatenation of these lists. A task of `tasks` has no samples if its
            keys are empty or missing.
        draw_sizes: Number of samples in each independent draw of a step (`DrawnOrder`).
        num_steps: Number of steps of an epoch of the other feed.
    """

    def __init__(
        self,
        job: StageJob,
        tasks: tuple[Task, ...],
        group: Group,
        memory: Mapping[str, Collection[str]],
        draw_sizes: tuple[int, ...],
        num_steps: int,
    ):
        keys_by_task = {task.name: memory.get(task.name, ()) for task in tasks}
        super().__init__(job, tasks, "train", group, True, keys_by_task)
        # `self.deal` still has the seed from before this line, but a replay feed does not use it.
        self.seed = derive_seed(self.seed, "replay")
        self.draw_sizes = draw_sizes
        self.num_steps = num_steps
        slots: dict[tuple[str, str], int] = {}
        for task, keys in memory.items():
            for key in keys:
                slots[task, key] = len(slots)
        keys = self.samples.keys(np.arange(len(self.samples)))
        owners = [tasks[index].name for index in self.samples.tasks.tolist()]
        self.slots = torch.tensor([slots[pair] for pair in zip(owners, keys, strict=True)])

    @property
    def images_per_step(self) -> int:
        """Number of samples of a step, over all ranks."""
        return self._order(0).size(0)

    def _order(self, epoch: int) -> DrawnOrder:
        """Return the drawn rows of an epoch."""
        return DrawnOrder(len(self.samples), self.draw_sizes, self.num_steps, self.seed, epoch)

    def replay_batches(self, epoch: int, steps: range) -> Generator[list[Batch]]:
        """Yield the micro-batches of each step, as `epoch` does."""
        order = self._order(epoch)
        self.batch_size = order.size(0)  # size of a full replay batch, not `train.batch_size`
        yield from self._batches(epoch, order, steps, self._micro_batches)

    def _make_reader(self, cache: Cache | None) -> Reader:
        return make_random_reader(self.samples)

    def _extra_numbers(self, sample_ids: Tensor) -> list[Tensor]:
        return [self.slots[sample_ids]]


def open_cache(job: StageJob) -> Cache | None:
    """Return the cache of the node; None if the stage has no folder for it."""
    return Cache(job.cache, int(job.cache_gb * 2**30)) if job.cache else None


def whole_batch(size: int) -> list[MicroBatch]:
    """Return a global batch as a single micro-batch."""
    return [MicroBatch(torch.arange(size), 1.0)]
