"""Compare a linear probe of 20 epochs on features that are computed once with one that computes
them in every epoch; images are not augmented.

`python -m benchmarks.linear_probe`; ViT-Ti at 224 px, 128 generated images, a tenth of them to
validate on, batches of 64, fp32, one rank, one thread, one round, about two minutes. All of a
stage's training is timed, extraction included; images are decoded beforehand for both.
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
        """Train on features that are computed once."""
        self.history = loop.fit(self.job, self.method, None, GROUP, lambda event: None).history

    def every_epoch(self) -> None:
        """Train with features that are computed in every epoch."""
        with mock.patch.object(Linear, "precompute", return_value=None):
            self.once()

    def numbers(self) -> dict[str, Tensor]:
        """Return the trained head and the columns of the history, each in one row."""
        assert self.job.task is not None
        head = self.method.heads.export(self.job.task.name)
        numbers = {name: tensor.flatten() for name, tensor in head.items()}
        for column in HISTORY_COLUMNS:
            numbers[column] = torch.tensor([row[column] for row in self.history])
        return numbers


def main() -> None:
    """Compare heads and histories of both probes, and their times."""
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
        loop.run_stage(stream.job_of(graph, "backbone"), GROUP, lambda event: None)
        job = stream.job_of(graph, "linear/t-0/train")
        # decodes all images before either probe is timed
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
