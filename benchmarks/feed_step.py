"""Compare a training step on batches from the feed with the same step on precomputed batches.

Command: `python -m benchmarks.feed_step`. It takes about a minute on idle cores, with ViT-Ti at
64 px, batches of 32 from generated JPEG images of 72 to 128 px, fp32, one rank, one PyTorch thread
and one decoding thread.

The benchmark checks whether training waits for the feed, so it measures wall time. It needs two
idle cores, one for training and one for the feed. `streamed` decodes images in every epoch; `kept`
crops images that are already decoded. Both augment with random resized crops, flips, RandAugment,
mixup, cutmix and erasing. The clock starts when the second batch of an epoch is ready.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks import stream
from benchmarks.harness import Report, start
from benchmarks.train_step import GROUP, TrainLoop
from workers import loop
from workers.data.batch import Batch
from workers.data.feed import Feed
from workers.job import StageJob

SIDE, BATCH, STEPS, ROUNDS = 64, 32, 10, 5
DEMAND = 1.03  # wall time of a step with the feed / with precomputed batches
RECIPE = {
    "crop": "resized",
    "flip": 0.5,
    "randaugment": 2,
    "mixup": 0.8,
    "cutmix": 1.0,
    "erase": 0.25,
    "smoothing": 0.1,
    "val_fraction": 0.0,
}


def seconds_per_step(training: TrainLoop, batches: Iterator[list[Batch]]) -> float:
    """Train on all batches and return the mean wall time per step, without the first step."""
    began = 0.0
    num_steps = 0
    for micro_batches in batches:
        if num_steps == 1:
            began = time.perf_counter()
        num_steps += 1
        progress = next(training.positions)
        loop.train_step(
            training.method, training.optimizer, micro_batches, progress, training.job, GROUP
        )
    return (time.perf_counter() - began) / (num_steps - 1)


def compare(name: str, job: StageJob, report: Report) -> None:
    """Alternate epochs with the feed and with precomputed batches, and compare the steps."""
    assert job.task is not None
    feed = Feed(job, (job.task,), "train", GROUP, training=True)
    held = list(feed.epoch(0))
    training = TrainLoop(job, [batches[0] for batches in held])
    training.build_optimizer()
    ratios = []
    held_seconds = []
    for turn in range(ROUNDS + 1):
        with_feed = seconds_per_step(training, feed.epoch(turn))
        with_held = seconds_per_step(training, iter(held))
        if turn:  # the first round warms up
            ratios.append(with_feed / with_held)
            held_seconds.append(with_held)
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    report.at_most(f"{name}, a step with the feed", statistics.median(ratios), DEMAND)
    report.note(f"{name}, over {ROUNDS} rounds", spread)
    report.note(f"{name}, a step", f"{statistics.median(held_seconds) * 1000:.0f} ms")


def main() -> None:
    """Compare with images that are decoded once and with images decoded in every epoch."""
    start()
    report = Report()
    report.note("1-minute load before", f"{os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        card = stream.draw_images(
            folder,
            classes=8,
            train=BATCH * STEPS // 8,
            test=1,
            sides=(72, 96, 128),
            suffixes=(".jpg",),
        )
        store, graph, _ = stream.plan(
            folder,
            card,
            1,
            backbone={"name": "vit_tiny_patch16_224", "img_size": SIDE, "crop_pct": 1.0},
            methods={"finetune": {}},
            data=RECIPE,
            train={"epochs": 1, "batch_size": BATCH},
            cluster={"loader_workers": 1},
        )
        stream.ingest(store, graph)
        loop.run_stage(stream.find_job(graph, "backbone"), GROUP, lambda event: None)
        job = stream.find_job(graph, "finetune/t-0/train")
        compare("kept", job, report)
        never_kept = job.data.model_copy(update={"resident_mb": 0})
        compare("streamed", replace(job, data=never_kept), report)
    report.note("1-minute load after", f"{os.getloadavg()[0]:.1f}")
    report.exit()


if __name__ == "__main__":
    main()
