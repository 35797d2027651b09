"""Compare the feed with WebDataset, Pillow and torchvision's transforms over the same shards.

Command: `python -m benchmarks.feed --side 32`. Sides are 32 (from JPEG images of 32 px), 128 (from
128 px) and 224 (from 400 px); without `--side`, all three are measured, each in about a minute.

Both sides read generated images and yield normalised float batches of random resized crops (8 to
100 % of the area) with flips. One process runs on one CPU, with one PyTorch thread and one decoding
thread: threads on two hardware threads of a core would slow each other down, and the CPU time of
loader processes would not be counted (`benchmarks/feed_cores.py` measures them). With `--recipe`,
both sides also apply RandAugment, erasing, mixup and cutmix, with different random numbers.
torchvision's transforms are measured on Pillow images and on tensors, and the feed is compared with
the faster variant. Before the measurement, without the recipe, the benchmark checks that both sides
produce the same pixels for the same crop boxes.

In a streamed epoch and in a first epoch, the feed shuffles and verifies all records. A first epoch
also writes the decoded images to an empty cache. WebDataset shuffles in a buffer. Before each
measured first epoch, the cache of the previous one is deleted, so that the machine has memory pages
for the new file: on a virtual machine, the first use of a page costs several times as much as
writing to it. The deletion is not measured.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset
from PIL import Image
from torch import Tensor
from torchvision.io import decode_jpeg
from torchvision.transforms import v2

from benchmarks import stream
from benchmarks.harness import Report, interleave, start
from workers import dist
from workers.data.decoding import read_picture
from workers.data.feed import Feed
from workers.job import StageJob
from workers.storage.artifact import Artifact

CLASSES, SHUFFLE, DECODED = 10, 1000, 64
SCALE = (0.08, 1.0)
# further `data` settings with --recipe
RECIPE: dict[str, Any] = {"randaugment": 2, "erase": 0.25, "mixup": 0.8, "cutmix": 1.0}
SAME_PIXELS = 2 / 255  # maximum mean difference between crops with the same boxes


@dataclass(frozen=True)
class Case:
    """Sizes and required speedups at one input side.

    Attributes:
        source_side: Side of the images in the shards in pixels.
        images: Number of images per class.
        batch_size: Images per batch; at most 32 MB of floats, because above that every batch needs
            new memory pages on both sides.
        streamed: Required speedup of a streamed or first epoch over the hand-written pipeline.
        later: Required speedup of later epochs.
    """

    source_side: int
    images: int
    batch_size: int
    streamed: float
    later: float


CASES = {
    32: Case(32, 200, 128, 3.0, 20.0),
    128: Case(128, 80, 64, 2.0, 6.0),
    224: Case(400, 64, 32, 1.5, 2.5),
}


def by_hand(
    shards: list[str],
    classes: tuple[str, ...],
    transform: v2.Compose,
    batch_size: int,
    has_recipe: bool,
) -> Iterator[Tensor]:
    """Yield float batches (b, 3, side, side) from a pipeline as WebDataset users write it."""
    mixup = v2.MixUp(alpha=RECIPE["mixup"], num_classes=CLASSES)
    cutmix = v2.CutMix(alpha=RECIPE["cutmix"], num_classes=CLASSES)
    mix = v2.RandomChoice([mixup, cutmix])
    data = (
        webdataset.WebDataset(shards, shardshuffle=len(shards))
        .shuffle(SHUFFLE)
        .decode("pil")
        .to_tuple("jpg", "txt")
        .map_tuple(transform, classes.index)
        .batched(batch_size, collation_fn=collate)
    )
    for images, labels in data:
        if has_recipe:
            yield mix(images, labels)[0]
        else:
            yield images


def collate(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """Stack images and labels."""
    images, labels = zip(*samples, strict=True)
    return torch.stack(images), torch.tensor(labels)


def transforms(side: int, job: StageJob, has_recipe: bool) -> dict[str, v2.Compose]:
    """Return torchvision's transforms for Pillow images and for tensors."""
    crops = [v2.RandomResizedCrop(side, SCALE, antialias=True), v2.RandomHorizontalFlip()]
    if has_recipe:
        crops.append(v2.RandAugment(RECIPE["randaugment"], int(job.data.magnitude)))
    to_tensor = [v2.ToImage()]
    settings = job.backbone_settings
    to_floats = [
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(list(settings.mean), list(settings.std)),
    ]
    if has_recipe:
        to_floats.append(v2.RandomErasing(RECIPE["erase"], value="random"))
    return {
        "by hand, Pillow": v2.Compose([*crops, *to_tensor, *to_floats]),
        "by hand, tensors": v2.Compose([*to_tensor, *crops, *to_floats]),
    }


def make_feed(job: StageJob, **data: Any) -> Feed:
    """Return the training feed of a job with changed `data` settings."""
    assert job.task is not None
    changed = replace(job, data=job.data.model_copy(update=data))
    return Feed(changed, (job.task,), "train", dist.Group(), training=True)


def epoch(feed: Feed) -> Iterator[Tensor]:
    """Yield the image batches of an epoch."""
    for batches in feed.epoch(0):
        yield batches[0].images


def exhaust(batches: Iterable[Tensor]) -> int:
    """Read all batches and return the number of images."""
    return sum(len(batch) for batch in batches)


def expected_batch(feed: Feed) -> Tensor:
    """Return the first batch of an epoch, computed by Pillow and torchvision with the feed's crop
    boxes."""
    order = feed.deal.epoch(0)
    positions = np.arange(order.size(0))
    rng = feed._rng(0, 0, torch.from_numpy(positions), order.size(0))
    crops = feed.augment.draw_crops(rng, positions)
    assert crops is not None
    side = feed.augment.side
    images = []
    for position, row in zip(positions.tolist(), order.rows(0, positions).tolist(), strict=True):
        image = Image.open(io.BytesIO(feed.samples.read_bytes(row))).convert("RGB")
        box = crops.box(position, image.height, image.width)
        planes = v2.functional.pil_to_tensor(image)
        crop = v2.functional.resized_crop(planes, *box, size=[side, side], antialias=True)
        images.append(crop.flip(-1) if crops.flips[position] else crop)
    return feed.augment.normalise(torch.stack(images))


def check_pixels(report: Report, feeds: dict[str, Feed]) -> None:
    """Check that both feeds yield identical pixels, close to torchvision's for the same boxes."""
    expected = expected_batch(feeds["streamed"])
    batches = {name: next(epoch(feed)) for name, feed in feeds.items()}
    report.equal("resident and streamed", batches["resident"], batches["streamed"], atol=0)
    spread = float(feeds["streamed"].augment.normalisation.scale.max()) * 255
    difference = float((batches["streamed"] - expected).abs().mean()) / spread
    what = "mean difference from torchvision's pixels of the same boxes"
    report.equal(what, torch.tensor(difference), torch.tensor(0.0), atol=SAME_PIXELS)


def compare_decoders(report: Report, feed: Feed, source_side: int) -> None:
    """Compare the time of JPEG decoders at the full, half and quarter side length."""
    records = [feed.samples.read_bytes(row) for row in range(DECODED)]
    buffers = [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in records]

    def decode_with_simplejpeg(scale: int) -> None:
        for data in records:
            read_picture(data, source_side // scale)

    def decode_with_pillow(scale: int) -> None:
        for data in records:
            image = Image.open(io.BytesIO(data))
            image.draft(None, (source_side // scale, source_side // scale))
            np.asarray(image.convert("RGB"))

    def torchvision_whole() -> None:
        for buffer in buffers:
            decode_jpeg(buffer)

    variants: dict[str, Callable[[], None]] = {"torchvision.io 1": torchvision_whole}
    for scale in (1, 2, 4):
        variants[f"simplejpeg {scale}"] = partial(decode_with_simplejpeg, scale)
        variants[f"Pillow {scale}"] = partial(decode_with_pillow, scale)
    timing = interleave(variants, rounds=5)
    for slow in ("torchvision.io 1", "Pillow 1", "Pillow 2", "Pillow 4"):
        name, part = slow.split(" ")
        ratio = timing.ratio(slow, f"simplejpeg {part}")
        report.note(f"{source_side} px at 1/{part}, {name} / simplejpeg", f"{ratio:.1f}")


def measure(side: int, case: Case, report: Report, folder: Path, has_recipe: bool) -> None:
    """Compare pixels and then times at one side."""
    card = stream.draw_images(
        folder, CLASSES, case.images, 1, sides=(case.source_side,), suffixes=(".jpg",)
    )
    store, graph, _ = stream.plan(
        folder,
        card,
        1,
        backbone={**stream.tiny(side)},
        methods={"linear": {}},
        data={"val_fraction": 0.0, "crop": "resized", "crop_scale": SCALE, "flip": 0.5},
        train={"batch_size": case.batch_size},
        cluster={"loader_workers": 0},
    )
    stream.ingest(store, graph)
    job = stream.find_job(graph, "linear/t-0/train")
    assert job.task is not None
    classes = job.task.classes
    data = Artifact.need(job.root, graph["data/generated"].key)
    names = sorted(name for name in data.manifest["files"] if name.startswith("train"))
    shards = [data.uri(name).removeprefix("file://") for name in names]
    resident = make_feed(job)
    streamed = make_feed(job, resident_mb=0)
    assert (resident.resident, streamed.resident) == (True, False)
    check_pixels(report, {"resident": resident, "streamed": streamed})
    recipe: dict[str, Any] = {}
    if has_recipe:
        recipe = RECIPE
        resident = make_feed(job, **recipe)
        streamed = make_feed(job, **recipe, resident_mb=0)
    else:
        compare_decoders(report, streamed, case.source_side)

    cache = str(folder / "cache")

    def delete_cache() -> None:
        shutil.rmtree(cache, ignore_errors=True)

    def first_epoch() -> None:
        exhaust(epoch(make_feed(replace(job, cache=cache), **recipe)))

    variants: dict[str, Any] = {
        "later epochs, resident": lambda: exhaust(epoch(resident)),
        "first epoch": first_epoch,
        "streamed": lambda: exhaust(epoch(streamed)),
    }
    hands = transforms(side, job, has_recipe)
    for name, transform in hands.items():
        variants[name] = lambda transform=transform: exhaust(
            by_hand(shards, classes, transform, case.batch_size, has_recipe)
        )
    timing = interleave(variants, rounds=5, prepare={"first epoch": delete_cache})
    best = min(hands, key=timing.median)
    what = f"{side} px from {case.source_side}, against WebDataset and {best.split(', ')[1]}"
    if has_recipe:
        what += ", RandAugment, erasing and mixing"
    for name in ("streamed", "first epoch", "later epochs, resident"):
        if has_recipe and name.startswith("later"):  # measured without a requirement
            report.note(f"{name}, {what}", f"{timing.ratio(best, name):.2f}x")
            continue
        demand = case.later if name.startswith("later") else case.streamed
        report.at_least(f"{name}, {what}", timing.ratio(best, name), demand)
    for name in timing.seconds:
        rate = CLASSES * case.images / timing.median(name)
        report.note(f"{name}, images per second of CPU", f"{rate:,.0f}")


def main() -> None:
    """Measure one side or all sides."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--side", type=int, choices=CASES, help="of the input, in pixels")
    parser.add_argument(
        "--recipe", action="store_true", help="with RandAugment, erasing, mixup and cutmix"
    )
    options = parser.parse_args()
    sides = [options.side] if options.side else list(CASES)
    start()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    report = Report()
    for side in sides:
        with tempfile.TemporaryDirectory() as folder:
            measure(side, CASES[side], report, Path(folder), options.recipe)
    report.exit()


if __name__ == "__main__":
    main()
