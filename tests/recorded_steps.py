"""An external method that records the images of each training step."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from pathlib import Path

from pydantic import Field
from torch import Tensor, distributed

import pipeline
from pipeline import Batch, Method, MethodSettings, Progress, TrainDefaults
from tests import small_run

PAUSE = 0.03


class RecordedSettings(MethodSettings):
    """Settings of `recorded`."""

    folder: str = Field("", description="folder of the records")


class Recorded(Method[RecordedSettings]):
    """Trains a head on a frozen backbone, which converges for any order of sums.

    A step takes at least PAUSE seconds, so that a test can kill a process in the middle of a task.
    Each process appends one line per step to a file per task. A line has the time, the number of
    ranks, the step number, and a digest of each augmented image by position in the global batch.
    """

    name = "recorded"
    Settings = RecordedSettings
    train_defaults = TrainDefaults(lr=1e-3, source="a test")

    def loss(self, batch: Batch, progress: Progress) -> tuple[Tensor, dict[str, Tensor]]:
        digests = {}
        if batch.weight:
            for position, image in zip(batch.draw.positions.tolist(), batch.images, strict=True):
                digests[position] = hashlib.sha256(image.numpy().tobytes()).hexdigest()[:16]
        time.sleep(PAUSE)
        world = distributed.get_world_size() if distributed.is_initialized() else 1
        task = self.stream[-1].name
        record = Path(self.settings.folder) / f"{task}-{os.getpid()}.jsonl"
        with record.open("a") as file:
            file.write(json.dumps([time.time(), world, progress.global_step, digests]) + "\n")
        return super().loss(batch, progress)


pipeline.register(Recorded)


def run_into(argv: list[str], out: str) -> None:
    """Run the command line in this process like `small_run.main_into`, with this method."""
    small_run.main_into(argv, out, 0, signal.SIGKILL, "")
