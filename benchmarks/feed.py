"""Compare the feed with reading the same tars by hand: tarfile, Pillow, one batch after the other.

`python -m benchmarks.feed`; 2000 generated PNG and JPEG images of 32 to 64 px, batches of 64 at 48
px, one thread of PyTorch, one decoding thread, about a minute. Both sides end with normalised float
batches; that they hold the same pixels is checked first. By hand nothing is shuffled, verified or
augmented; the feed shuffles and verifies digests in all cases.
"""

from __future__ import annotations

import io
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from benchmarks import stream
from benchmarks.harness import Report, interleave, start
from workers import dist
from workers.data.feed import Feed
from workers.job import StageJob
from workers.storage.artifact import Artifact

CLASSES, TRAIN, SIDE, BATCH = 10, 200, 48, 64
RESIDENT_DEMAND = 10.0  # later epochs, from decoded pixels: by hand / feed
FIRST_DEMAND = 0.7  # the first epoch, which decodes, verifies and keeps all pixels
STREAMED_DEMAND = 0.6  # every epoch of what does not fit: decoded, verified, shuffled


def by_hand(shards: list[str], job: StageJob) -> Iterator[Tensor]:
    """Float batches (BATCH, 3, SIDE, SIDE) in the order of the tars."""
    pixels: list[np.ndarray] = []
    for shard in shards:
        with tarfile.open(shard) as tar:
            for member in tar:
                if member.name.endswith((".cls", ".txt")):
                    continue
                file = tar.extractfile(member)
                assert file is not None
                image = Image.open(io.BytesIO(file.read())).convert("RGB")
                pixels.append(np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BICUBIC)))
                if len(pixels) == BATCH:
                    yield batch_of(pixels, job)
                    pixels = []
    if pixels:
        yield batch_of(pixels, job)


def batch_of(pixels: list[np.ndarray], job: StageJob) -> Tensor:
    """Return images as a normalised float batch, (B, 3, SIDE, SIDE)."""
    stacked = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).contiguous()
    mean = torch.tensor(job.backbone_settings.mean).view(1, 3, 1, 1)
    std = torch.tensor(job.backbone_settings.std).view(1, 3, 1, 1)
    return (stacked.float().div_(255) - mean) / std


def epoch(feed: Feed) -> Iterator[Tensor]:
    """Yield the image batches of an epoch."""
    for batches in feed.epoch(0):
        yield batches[0].images


def exhaust(batches: Iterable[Tensor]) -> int:
    """Read all batches; return the number of their images."""
    return sum(len(batch) for batch in batches)


def decoding_epoch(job: StageJob) -> int:
    """Read a first epoch that decodes every image, as there is no cache folder."""
    return exhaust(epoch(make_feed(replace(job, cache=""))))


def make_feed(job: StageJob) -> Feed:
    """Return the training feed of a job."""
    assert job.task is not None
    return Feed(job, (job.task,), "train", dist.Group(), training=True)


def sorted_images(batches: Iterable[Tensor]) -> Tensor:
    """Return all images in an order that depends on their pixels alone."""
    images = torch.cat(list(batches)).flatten(1).double()
    weights = torch.rand(
        images.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    return images[(images @ weights).argsort()]


def main() -> None:
    """Compare pixels, then times, of the resident and the streamed feed."""
    start()
    report = Report()
    with tempfile.TemporaryDirectory() as folder:
        card = stream.draw_images(
            Path(folder), CLASSES, TRAIN, 1, sides=(32, 40, 48, 64), suffixes=(".png", ".jpg")
        )
        store, graph, _ = stream.plan(
            Path(folder),
            card,
            1,
            backbone={**stream.tiny(SIDE)},
            methods={"linear": {}},
            data={"val_fraction": 0.0},
            train={"batch_size": BATCH},
            cluster={"loader_workers": 1},
        )
        stream.ingest(store, graph)
        job = stream.job_of(graph, "linear/t-0/train")
        data = Artifact.need(job.root, graph["data/generated"].key)
        shards = [
            data.uri(name) for name in sorted(data.manifest["files"]) if name.startswith("train")
        ]
        resident = make_feed(job)
        never_resident = job.data.model_copy(update={"resident_mb": 0})
        streamed = make_feed(replace(job, data=never_resident))
        assert (resident.resident, streamed.resident) == (True, False)
        expected = sorted_images(by_hand(shards, job))
        for name, feed in (("resident", resident), ("streamed", streamed)):
            report.equal(
                f"{name}, pixels of an epoch", sorted_images(epoch(feed)), expected, atol=1e-5
            )

        timing = interleave(
            {
                "by hand": lambda: exhaust(by_hand(shards, job)),
                "resident": lambda: exhaust(epoch(resident)),
                "first": partial(decoding_epoch, job),
                "streamed": lambda: exhaust(epoch(streamed)),
            },
            rounds=7,
        )
        report.at_least(
            "resident feed, later epochs, against tarfile + Pillow",
            timing.ratio("by hand", "resident"),
            RESIDENT_DEMAND,
        )
        report.at_least(
            "resident feed, first epoch, against tarfile + Pillow",
            timing.ratio("by hand", "first"),
            FIRST_DEMAND,
        )
        report.at_least(
            "streamed feed against tarfile + Pillow",
            timing.ratio("by hand", "streamed"),
            STREAMED_DEMAND,
        )
        for name in timing.seconds:
            report.note(
                f"{name}, images per second of CPU", f"{CLASSES * TRAIN / timing.median(name):,.0f}"
            )
    report.exit()


if __name__ == "__main__":
    main()
