"""Compare a linear probe on features computed once with one that computes them in every epoch.

Command: `python -m benchmarks.linear_probe`. It takes about two minutes, with ViT-Ti at 224 px, 128
generated images (a tenth for validation) without augmentation, batches of 64, 20 epochs, fp32, one
rank, one thread and one round. The whole training of a stage is timed, including the computation of
features. Images are decoded before the measurement.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from benchmarks import stream
from benchmarks.harness import Report, interleave, start
from workers import dist, loop, restore
from workers.job import StageJob, TrainSettings
from workers.methods.linear import Linear

DEMAND = 17.0
SIDE, CLASSES, PER_CLASS, BATCH, EPOCHS = 224, 4, 32, 64, 20
GROUP = dist.Group()
HISTORY_COLUMNS = ("loss", "val_correct")


class Probe:
    """A training stage, from its method's `begin` to its last step."""

    def __init__(self, job: StageJob) -> None:
        self.job, self.method = job, restore.new_method(job)

    def once(self) -> None:
        """Train on features computed once."""
        self.history = loop.fit(self.job, self.method, None, GROUP, lambda event: None).history

    def every_epoch(self) -> None:
        """Train on features computed in every epoch."""
        with mock.patch.object(Linear, "precompute", return_value=None):
            self.once()

    def numbers(self) -> dict[str, Tensor]:
        """Return the flattened tensors of the trained head and the columns of the history."""
        assert self.job.task is not None
        head = self.method.heads.export(self.job.task.name)
        numbers = {name: tensor.flatten() for name, tensor in head.items()}
        for column in HISTORY_COLUMNS:
            numbers[column] = torch.tensor([row[column] for row in self.history])
        return numbers


def main() -> None:
    """Compare the heads, histories and times of both probes."""
    start()
    report = Report()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        card = stream.draw_images(folder, CLASSES, train=PER_CLASS, test=1, sides=(SIDE,))
        backbone = {"name": "vit_tiny_patch16_224", "img_size": SIDE, "crop_pct": 1.0}
        store, graph, _ = stream.plan(
            folder,
            card,
            1,
            backbone=backbone,
            methods={"linear": {}},
            data={"val_fraction": 0.1},
            train=TrainSettings(epochs=EPOCHS, batch_size=BATCH).model_dump(),
        )
        stream.ingest(store, graph)
        loop.run_stage(stream.find_job(graph, "backbone"), GROUP, lambda event: None)
        job = stream.find_job(graph, "linear/t-0/train")
        # decode all images before the probes are timed
        Probe(replace(job, train=job.train.model_copy(update={"epochs": 1}))).once()
        cached = Probe(job)
        uncached = Probe(job)
        timing = interleave(
            {"once": cached.once, "every epoch": uncached.every_epoch}, rounds=1, warmup=0
        )
        expected = uncached.numbers()
        for name, actual in cached.numbers().items():
            report.equal(
                f"{name} of {EPOCHS} epochs, features once and in every epoch",
                actual,
                expected[name],
                1e-6,
            )
    report.at_least(
        f"linear probe of {EPOCHS} epochs, features in every epoch / once",
        timing.ratio("every epoch", "once"),
        DEMAND,
    )
    report.note("with features computed once", f"{timing.median('once'):.2f} s of CPU")
    report.exit()


if __name__ == "__main__":
    main()
