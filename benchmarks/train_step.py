"""Compare the train loop with hand-written PyTorch: single steps, and an epoch with the feed and
bookkeeping.

Command: `python -m benchmarks.train_step`. It takes about two minutes, with ViT-Ti at 96 px,
batches of 16 generated images, fp32, one rank and one thread.

Both sides train the same network on the same batches. First, losses and weights are checked to be
equal bit for bit. In `fine-tuning`, which trains all weights, the hand-written loop has its own
loss. In `MEAT`, both sides use `Meat.loss`, so only the loop around it is compared.
"""

from __future__ import annotations

import copy
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from benchmarks import stream
from benchmarks.harness import Report, interleave, start
from workers import dist, loop, optim, restore
from workers.data.batch import Batch
from workers.data.feed import Feed
from workers.job import StageJob, TrainSettings
from workers.methods import METHODS
from workers.methods.base import Method, OptimPlan, Progress, StepContext

DEMAND = 1.05  # train loop / hand-written loop, CPU time
SIDE, BATCH, BATCHES = 96, 16, 8
EPOCHS = 1000  # of the schedule; the timed steps are the first ones
ROUNDS = 15
GROUP = dist.Group()
Loss = Callable[[Method, Batch, Progress], Tensor]


def meat_loss(method: Method, batch: Batch, progress: Progress) -> Tensor:
    """Return the loss of MEAT."""
    return method.loss(batch, progress)[0]


def plain_loss(method: Method, batch: Batch, progress: Progress) -> Tensor:
    """Return the cross-entropy of the backbone with a linear head."""
    head = method.heads.layers[0]
    return F.cross_entropy(head(method.backbone(batch.images)), batch.labels)


def new_method(job: StageJob) -> Method:
    """Return the method of a job before its first stage."""
    return METHODS[job.method](restore.load_backbone(job), restore.load_settings(job), job.seed)


class TrainLoop:
    """Trains a method with `loop.train_step`."""

    def __init__(self, job: StageJob, batches: list[Batch]) -> None:
        assert job.task is not None
        self.job, self.batches = job, batches
        self.method = new_method(job)
        steps = EPOCHS * len(batches)
        rates = OptimPlan(
            job.train.lr,
            job.train.weight_decay,
            job.train.batch_size,
            optim.full_rate_steps(steps, len(batches), job.train),
        )
        self.groups = self.method.begin(StepContext(job.task, rates, training_tasks=(job.task,)))
        self.method.train()
        self.positions = positions(len(batches))

    def build_optimizer(self) -> None:
        """Build the optimizer. Call this after `PlainLoop` has copied the parameters."""
        self.optimizer = optim.build_optimizer(self.groups, self.job.train)

    def step(self) -> Tensor:
        """Run one training step and return its loss."""
        progress = next(self.positions)
        batch = self.batches[progress.step]
        sums = loop.train_step(self.method, self.optimizer, [batch], progress, self.job, GROUP)
        return sums["loss"]


class PlainLoop:
    """Trains a copy of the same network with PyTorch's optimizer and schedule."""

    def __init__(self, train_loop: TrainLoop, loss: Loss) -> None:
        # copied together, so that the groups contain the parameters of the copy
        self.method, groups = copy.deepcopy((train_loop.method, train_loop.groups))
        self.loss = loss
        self.batches = train_loop.batches
        train = train_loop.job.train
        defaults = {"lr": train.lr, "weight_decay": train.weight_decay}
        self.optimizer = torch.optim.AdamW([{**defaults, **group} for group in groups], fused=True)
        steps = len(self.batches)
        factor = partial(
            optim.compute_lr_factor, total=EPOCHS * steps, per_epoch=steps, train=train
        )
        self.schedule = LambdaLR(self.optimizer, factor)
        self.positions = positions(steps)

    def step(self) -> Tensor:
        """Run one training step and return its loss."""
        progress = next(self.positions)
        self.optimizer.zero_grad()
        loss = self.loss(self.method, self.batches[progress.step], progress)
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return loss.detach()

    def epoch(self) -> None:
        """Train on every batch once."""
        for _ in self.batches:
            self.step()


def positions(steps: int) -> Iterator[Progress]:
    """Yield the progress of each step in a schedule of EPOCHS epochs, and start over at the end."""
    for epoch in cycle(range(EPOCHS)):
        for step in range(steps):
            yield Progress(epoch, step, EPOCHS, steps)


def flatten_weights(module: nn.Module) -> Tensor:
    """Return all parameters as one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def compare(name: str, job: StageJob, loss: Loss, report: Report) -> None:
    """Check that losses and weights are equal, then time one step and one epoch.

    For an epoch, `fit` with its feed, sums and reports is compared with the plain steps.
    """
    assert job.task is not None
    feed = Feed(job, (job.task,), "train", GROUP, training=True)
    batches = [micro_batches[0] for micro_batches in feed.epoch(0)]
    train_loop = TrainLoop(job, batches)
    plain_loop = PlainLoop(train_loop, loss)
    train_loop.build_optimizer()
    actual = torch.stack([train_loop.step() for _ in range(BATCHES)])
    expected = torch.stack([plain_loop.step() for _ in range(BATCHES)])
    report.equal(f"{name}, losses of {BATCHES} steps", actual, expected, atol=0)
    report.equal(
        f"{name}, weights after them",
        flatten_weights(train_loop.method),
        flatten_weights(plain_loop.method),
        atol=0,
    )
    timing = interleave({"train loop": train_loop.step, "plain": plain_loop.step}, ROUNDS)
    report.at_most(
        f"{name}, a step of the train loop against plain PyTorch",
        timing.ratio("train loop", "plain"),
        DEMAND,
    )
    report.note(f"{name}, a step", f"{timing.median('train loop') * 1000:.0f} ms of CPU")

    rounds = ROUNDS // 3
    warmup = 1
    # built before the timing, because `benchmarks.launch` measures the start of a stage
    methods = deque(new_method(job) for _ in range(rounds + warmup))
    timing = interleave(
        {
            "train loop": lambda: loop.fit(job, methods.popleft(), None, GROUP, lambda event: None),
            "plain": plain_loop.epoch,
        },
        rounds,
        warmup,
    )
    report.at_most(
        f"{name}, an epoch of {BATCHES} steps with feed and bookkeeping",
        timing.ratio("train loop", "plain"),
        DEMAND,
    )


def main() -> None:
    """Compare both loops on fine-tuning and on MEAT."""
    start()
    report = Report()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        card = stream.draw_images(
            folder, classes=8, train=BATCH * BATCHES // 8, test=1, sides=(SIDE,)
        )
        backbone = {"name": "vit_tiny_patch16_224", "img_size": SIDE, "crop_pct": 1.0}
        store, graph, _ = stream.plan(
            folder,
            card,
            1,
            backbone=backbone,
            methods={"finetune": {}, "meat": {}},
            data={"val_fraction": 0.0},
            train=TrainSettings(epochs=1, batch_size=BATCH).model_dump(),
        )
        stream.ingest(store, graph)
        loop.run_stage(stream.find_job(graph, "backbone"), GROUP, lambda event: None)
        compare("fine-tuning", stream.find_job(graph, "finetune/t-0/train"), plain_loss, report)
        compare("MEAT", stream.find_job(graph, "meat/t-0/train"), meat_loss, report)
    report.exit()


if __name__ == "__main__":
    main()
