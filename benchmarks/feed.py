"""Compare the feed with WebDataset, Pillow and torchvision's transforms over the same shards.

`python -m benchmarks.feed --side 32`; sides 32 (from JPEG of 32 px), 128 (from 128) and 224 (from
400), all three without an option; about a minute each. Generated images, random resized crops of 8
to 100 % of the area, flips, normalised float batches in one process on one CPU, with one thread of
PyTorch and one that decodes: threads on two hardware threads of a core would slow each other, and
the CPU time of loader processes would not be counted (`benchmarks/feed_cores.py` has them). With
`--recipe` both sides also apply RandAugment, erasing, mixup and cutmix, with other random numbers.
Of torchvision's transforms, those on Pillow images and those on tensors are measured, and the
faster ones compared with. That both sides give the same pixels of the same boxes is checked first,
without the recipe.

The feed shuffles and verifies all records in a streamed and in a first epoch, which also writes the
decoded images to a fresh cache; WebDataset shuffles in a buffer. The cache of the first epoch
before is deleted first, which is not measured, so that the machine has pages of memory for the new
file: on a virtual machine the first use of a page costs several times as much as writing to it.
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
# settings of `data` beside the crop, with --recipe
RECIPE: dict[str, Any] = {"randaugment": 2, "erase": 0.25, "mixup": 0.8, "cutmix": 1.0}
SAME_PIXELS = 2 / 255  # mean difference of crops with the same boxes


@dataclass(frozen=True)
class Case:
    """source_side: of the images in the shards, in pixels. images: of each class. batch_size: no
    more than 32 MB of floats, above which every batch costs both sides new pages of memory.
    streamed, later: how many times as fast as by hand a streamed or first epoch, and later ones,
    must be."""

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
    """Yield float batches (b, 3, side, side) as a user of WebDataset writes it."""
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
    """Return torchvision's transforms on Pillow images, and on tensors."""
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
    """Return the training feed of a job with some settings of `data`."""
    assert job.task is not None
    changed = replace(job, data=job.data.model_copy(update=data))
    return Feed(changed, (job.task,), "train", dist.Group(), training=True)


def epoch(feed: Feed) -> Iterator[Tensor]:
    """Yield the image batches of an epoch."""
    for batches in feed.epoch(0):
        yield batches[0].images


def exhaust(batches: Iterable[Tensor]) -> int:
    """Read all batches; return the number of their images."""
    return sum(len(batch) for batch in batches)


def expected_batch(feed: Feed) -> Tensor:
    """Return the first batch of an epoch by Pillow and torchvision, with the feed's boxes."""
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
    """Demand torchvision's pixels of the same boxes, and the same bits from both feeds."""
    expected = expected_batch(feeds["streamed"])
    batches = {name: next(epoch(feed)) for name, feed in feeds.items()}
    report.equal("resident and streamed", batches["resident"], batches["streamed"], atol=0)
    spread = float(feeds["streamed"].augment.normalisation.scale.max()) * 255
    difference = float((batches["streamed"] - expected).abs().mean()) / spread
    what = "mean difference from torchvision's pixels of the same boxes"
    report.equal(what, torch.tensor(difference), torch.tensor(0.0), atol=SAME_PIXELS)


def compare_decoders(report: Report, feed: Feed, source_side: int) -> None:
    """Print how long decoders of JPEG take, whole and at half and a quarter of the sides."""
    records = [feed.samples.read_bytes(row) for row in range(DECODED)]
    buffers = [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in records]

    def simplejpeg_at(scale: int) -> None:
        for data in records:
            read_picture(data, source_side // scale)

    def pillow_at(scale: int) -> None:
        for data in records:
            image = Image.open(io.BytesIO(data))
            image.draft(None, (source_side // scale, source_side // scale))
            np.asarray(image.convert("RGB"))

    def torchvision_whole() -> None:
        for buffer in buffers:
            decode_jpeg(buffer)

    variants: dict[str, Callable[[], None]] = {"torchvision.io 1": torchvision_whole}
    for scale in (1, 2, 4):
        variants[f"simplejpeg {scale}"] = partial(simplejpeg_at, scale)
        variants[f"Pillow {scale}"] = partial(pillow_at, scale)
    timing = interleave(variants, rounds=5)
    for slow in ("torchvision.io 1", "Pillow 1", "Pillow 2", "Pillow 4"):
        name, part = slow.split(" ")
        ratio = timing.ratio(slow, f"simplejpeg {part}")
        report.note(f"{source_side} px at 1/{part}, {name} / simplejpeg", f"{ratio:.1f}")


def measure(side: int, case: Case, report: Report, folder: Path, has_recipe: bool) -> None:
    """Compare pixels, then times, at one side."""
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
    job = stream.job_of(graph, "linear/t-0/train")
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
        if has_recipe and name.startswith("later"):  # nothing is demanded
            report.note(f"{name}, {what}", f"{timing.ratio(best, name):.2f}x")
            continue
        demand = case.later if name.startswith("later") else case.streamed
        report.at_least(f"{name}, {what}", timing.ratio(best, name), demand)
    for name in timing.seconds:
        rate = CLASSES * case.images / timing.median(name)
        report.note(f"{name}, images per second of CPU", f"{rate:,.0f}")


def main() -> None:
    """Measure one side, or all of them."""
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
