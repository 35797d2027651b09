"""The training step of every method that is told the task against full fine-tuning of the same ViT, and serving with folded masks against the plain backbone.

`python -m benchmarks.methods [NAME ...]`; ViT-Ti at 96 px, batches of 16 random images, fp32, one rank, one thread, a few minutes. A chain is
timed on its second task, with the first task's entries locked or kept by whatever the method does for that. Weights are random, which does
not change the amount of work.
"""

from __future__ import annotations

import copy
import sys

import torch
from torch import Tensor

from benchmarks.harness import Report, interleave, start
from workers import dist, loop, optim
from workers.data.draw import Draw
from workers.job import BackboneSettings, DataSettings, StageJob, Task, TrainSettings
from workers.methods import METHODS
from workers.methods.base import Batch, Method, Progress, Rates
from workers.model import vit

SIDE, BATCH, CLASSES, ROUNDS = 96, 16, 20, 7
STEPS = 100  # in an epoch of the schedule; a timed step is one of its first
SERVING_DEMAND = 1.10  # a served task with folded masks / the plain backbone with a head
ADDING = ("adapter", "ctr_tsm", "ctr_full", "tfm")  # these compute more than the backbone by design: only measured
TRAINING_DEMANDS = {  # a step / a step of full fine-tuning, both in CPU time; methods that are not named are only measured
    "linear": 0.45, "adapter": 0.95, "piggyback": 1.2, "ksm": 1.25, "meat": 1.3, "supsup": 1.4, "hat": 1.2, "adahat": 1.25, "packnet": 1.15, "wsn": 1.75,
    "tfm": 1.35, "apd": 1.45, "ctr_tsm": 1.05, "ctr_full": 2.1, "lwf": 1.45}
TASKS = tuple(Task(f"t{i}", "none", "none", tuple(map(str, range(CLASSES)))) for i in range(2))
GROUP = dist.Group()
TRAIN = TrainSettings(epochs=10, batch_size=BATCH)


class Training:
    """A method in the middle of a stage: of its second task, where it is a chain."""

    def __init__(self, name: str, backbone: torch.nn.Module):
        cls = METHODS[name]
        settings = cls.Settings()
        self.job = StageJob("benchmark", "", "train", "", name, {}, BackboneSettings(), DataSettings(), TRAIN, "task", 0, TASKS[0], TASKS[:1])
        state, carried, step = None, None, cls.planned(settings, 0)[0].name
        for position in range(1 + bool(cls.carries)):
            torch.manual_seed(0)
            self.method: Method = cls(copy.deepcopy(backbone), settings, seed=0)
            self.method.stream = TASKS[: position + 1]
            if state is not None and cls.needs_states:
                self.method.load(state)
            rates = Rates(TRAIN.lr, TRAIN.weight_decay, BATCH, optim.mean_rate_steps(10 * STEPS, TRAIN))
            tasks = self.method.stream if cls.trains_on == "seen" else TASKS[position : position + 1]
            groups = self.method.begin(TASKS[position], step, carried, rates, tasks)
            trained = {id(p) for g in groups for p in g["params"]}
            for p in self.method.parameters():
                p.requires_grad_(id(p) in trained)
            if position < bool(cls.carries):
                state, carried = self.method.finish()
        self.optimizer = optim.build(groups, TRAIN)
        self.method.train()
        generator = torch.Generator().manual_seed(1)
        self.images = torch.randn(BATCH, 3, SIDE, SIDE, generator=generator)
        self.labels = torch.randint(0, CLASSES, (BATCH,), generator=generator)
        self.steps = 0

    def step(self) -> Tensor:
        draw = Draw(0, 0, self.steps, torch.arange(BATCH), BATCH, torch.device("cpu"))
        batch = Batch(self.images, self.labels, torch.zeros_like(self.labels), draw)
        progress = Progress(self.steps // STEPS, self.steps % STEPS, 10, STEPS)
        self.steps += 1
        return loop.train_step(self.method, self.optimizer, [batch], progress, self.job, GROUP)["loss"]

    @torch.no_grad()
    def served(self) -> Method:
        """The method on another copy of the backbone, with the finished task loaded."""
        state, carried = self.method.finish()
        method = type(self.method)(copy.deepcopy(BACKBONE), self.method.settings, seed=0)
        method.stream = self.method.stream
        method.load(state)
        if method.carries or method.trains_on == "seen":
            method.attach(carried)
        return method.eval()


BACKBONE = vit.build(BackboneSettings(img_size=SIDE))


def main(names: list[str]) -> None:
    start()
    report = Report()
    full = Training("finetune", BACKBONE)
    for name in names:
        training = Training(name, BACKBONE)
        training.step()
        timing = interleave({"full": full.step, name: training.step}, ROUNDS)
        ratio, what = timing.ratio(name, "full"), f"{name}, a training step against full fine-tuning"
        if name in TRAINING_DEMANDS:
            report.at_most(what, ratio, TRAINING_DEMANDS[name])
        else:
            report.note(what, f"{ratio:.2f}x")
        serve(name, training, report)
    report.exit()


@torch.no_grad()
def serve(name: str, training: Training, report: Report) -> None:
    method, task = training.served(), training.method.task
    assert task is not None
    plain, images = copy.deepcopy(BACKBONE).eval(), training.images
    method.logits(images, task.name)  # folds
    head = method.heads[task.name] if task.name in method.heads.names else torch.nn.Linear(192, CLASSES)
    timing = interleave({"plain": lambda: head(plain(images)), name: lambda: method.logits(images, task.name)}, 3 * ROUNDS)
    ratio, what = timing.ratio(name, "plain"), f"{name}, serving a task against the plain backbone"
    if name in ADDING:
        report.note(what, f"{ratio:.2f}x")
    else:
        report.at_most(what, ratio, SERVING_DEMAND)


if __name__ == "__main__":
    told = [name for name, cls in METHODS.items() if "task" in cls.scenarios]
    main(sys.argv[1:] or [name for name in told if name != "supsup_nn"])  # that one decides on images of a feed; its step is supsup's
