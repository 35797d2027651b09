"""The train loop against hand-written PyTorch: one step, and an epoch with everything around the
steps.

`python -m benchmarks.train_step`; ViT-Ti at 96 px, batches of 16 generated images, fp32, one rank,
one thread, about two minutes. Both sides do the same maths on the same batches; losses and weights
are compared bit by bit first. `fine-tuning` trains all weights, its hand-written loop uses nothing
of ours but the batches. `MEAT` shares `Meat.loss`: what is compared is the loop around it.
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
EPOCHS = 1000  # of the schedule; a timed step is one of its first
ROUNDS = 15
GROUP = dist.Group()
Loss = Callable[[Method, Batch, Progress], Tensor]


def meat_loss(method: Method, batch: Batch, progress: Progress) -> Tensor:
    return method.loss(batch, progress)[0]


def plain_loss(method: Method, batch: Batch, progress: Progress) -> Tensor:
    """Cross-entropy of a timm backbone and a linear layer, nothing else."""
    head = method.heads.layers[0]
    return F.cross_entropy(head(method.backbone(batch.images)), batch.labels)


def fresh(job: StageJob) -> Method:
    return METHODS[job.method](restore.load_backbone(job), restore.settings_of(job), job.seed)


class Ours:
    """A method that the train loop trains, step after step."""

    def __init__(self, job: StageJob, batches: list[Batch]) -> None:
        assert job.task is not None
        self.job, self.batches = job, batches
        self.method = fresh(job)
        steps = EPOCHS * len(batches)
        rates = OptimPlan(
            job.train.lr,
            job.train.weight_decay,
            job.train.batch_size,
            optim.mean_rate_steps(steps, len(batches), job.train),
        )
        self.groups = self.method.begin(StepContext(job.task, rates, training_tasks=(job.task,)))
        self.method.train()
        self.positions = positions(len(batches))

    def ready(self) -> Ours:
        self.optimizer = optim.build(self.groups, self.job.train)
        return self

    def step(self) -> Tensor:
        progress = next(self.positions)
        batch = self.batches[progress.step]
        return loop.train_step(self.method, self.optimizer, [batch], progress, self.job, GROUP)[
            "loss"
        ]


class Plain:
    """The same network in a straight-line loop: optimizer and schedule are PyTorch's own."""

    def __init__(self, ours: Ours, loss: Loss) -> None:
        # together, so that the groups hold the copy's parameters
        pairs = copy.deepcopy((ours.method, ours.groups))
        self.method, groups = pairs
        self.loss, self.batches, train = loss, ours.batches, ours.job.train
        defaults = [{"lr": train.lr, "weight_decay": train.weight_decay, **g} for g in groups]
        self.optimizer = torch.optim.AdamW(defaults, fused=True)
        self.schedule = LambdaLR(
            self.optimizer,
            partial(
                optim.factor,
                total=EPOCHS * len(self.batches),
                per_epoch=len(self.batches),
                train=train,
            ),
        )
        self.positions = positions(len(self.batches))

    def step(self) -> Tensor:
        progress = next(self.positions)
        self.optimizer.zero_grad()
        loss = self.loss(self.method, self.batches[progress.step], progress)
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return loss.detach()

    def epoch(self) -> None:
        for _ in self.batches:
            self.step()


def positions(steps: int) -> Iterator[Progress]:
    return (
        Progress(epoch, step, EPOCHS, steps)
        for epoch in cycle(range(EPOCHS))
        for step in range(steps)
    )


def weights_of(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def compare(name: str, job: StageJob, loss: Loss, report: Report) -> None:
    """Equality first, then one step, then one epoch: `fit` with its feed, sums and reports against
    the bare steps."""
    assert job.task is not None
    batches = [
        batches[0] for batches in Feed(job, (job.task,), "train", GROUP, training=True).epoch(0)
    ]
    ours = Ours(job, batches)
    plain = Plain(ours, loss)
    ours.ready()
    got, want = (torch.stack([side.step() for _ in range(BATCHES)]) for side in (ours, plain))
    report.equal(f"{name}, losses of {BATCHES} steps", got, want, atol=0)
    report.equal(
        f"{name}, weights after them", weights_of(ours.method), weights_of(plain.method), atol=0
    )
    timing = interleave({"ours": ours.step, "plain": plain.step}, ROUNDS)
    report.at_most(
        f"{name}, a step of the train loop against plain PyTorch",
        timing.ratio("ours", "plain"),
        DEMAND,
    )
    report.note(f"{name}, a step", f"{timing.median('ours') * 1000:.0f} ms of CPU")

    rounds, warmup = ROUNDS // 3, 1
    # made beforehand: a stage's start is `launch`'s subject
    methods = deque(fresh(job) for _ in range(rounds + warmup))
    timing = interleave(
        {
            "ours": lambda: loop.fit(job, methods.popleft(), None, GROUP, lambda event: None),
            "plain": plain.epoch,
        },
        rounds,
        warmup,
    )
    report.at_most(
        f"{name}, an epoch of {BATCHES} steps with feed and bookkeeping",
        timing.ratio("ours", "plain"),
        DEMAND,
    )


def main() -> None:
    start()
    report = Report()
    with tempfile.TemporaryDirectory() as folder:
        card = stream.draw_images(
            Path(folder), classes=8, train=BATCH * BATCHES // 8, test=1, sides=(SIDE,)
        )
        backbone = {"name": "vit_tiny_patch16_224", "img_size": SIDE, "crop_pct": 1.0}
        store, graph, _ = stream.plan(
            Path(folder),
            card,
            1,
            backbone=backbone,
            methods={"finetune": {}, "meat": {}},
            data={"val_fraction": 0.0},
            train=TrainSettings(epochs=1, batch_size=BATCH).model_dump(),
        )
        stream.ingest(store, graph)
        loop.run_stage(stream.job_of(graph, "backbone"), GROUP, lambda event: None)
        compare("fine-tuning", stream.job_of(graph, "finetune/t-0/train"), plain_loss, report)
        compare("MEAT", stream.job_of(graph, "meat/t-0/train"), meat_loss, report)
    report.exit()


if __name__ == "__main__":
    main()
