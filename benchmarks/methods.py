"""The training step of every method against full fine-tuning of the same ViT, and serving a task
against the plain backbone.

`python -m benchmarks.methods [NAME ...]`; ViT-Ti at 96 px, batches of 16 random images, fp32, one
rank, one thread, a few minutes. A chain is timed on its second task, with the first task's entries
locked or kept by whatever the method does for that; with a memory, half of a batch is of the first
task. Weights are random, which does not change the amount of work.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Report, interleave, start
from workers import dist, loop, optim
from workers.data.batch import Batch
from workers.job import BackboneSettings, DataSettings, StageJob, Task, TrainSettings
from workers.loop import remembered_samples
from workers.methods import METHODS
from workers.methods.base import Method, OptimPlan, Progress, StepContext, StepData
from workers.model import vit
from workers.rng import StepRng

SIDE, BATCH, CLASSES, ROUNDS = 96, 16, 20, 7
STEPS = 100  # in an epoch of the schedule; a timed step is one of its first
SERVING_DEMAND = 1.10  # a served task with folded masks / the plain backbone with a head
# these compute more than the backbone by design: only measured a step / a step of full fine-tuning,
# both in CPU time; methods that are not named are only measured
ADDING = (
    "adapter",
    "vpt",
    "ctr_tsm",
    "ctr_full",
    "tfm",
    "toast",
    "toast_lite",
)
TRAINING_DEMANDS = {
    "linear": 0.45,
    "adapter": 0.95,
    "piggyback": 1.2,
    "ksm": 1.25,
    "meat": 1.3,
    "supsup": 1.4,
    "hat": 1.2,
    "adahat": 1.25,
    "packnet": 1.15,
    "wsn": 1.75,
    "tfm": 1.35,
    "apd": 1.45,
    "ctr_tsm": 1.05,
    "ctr_full": 2.1,
    "lwf": 1.45,
    "replay": 1.1,
    "icarl": 1.5,
    "e2e": 1.5,
    "ucir": 1.5,
    "bic": 1.5,
    "wa": 1.5,
    "podnet": 1.6,
    "dytox": 1.4,
}
TASKS = tuple(Task(f"t{i}", "none", "none", tuple(map(str, range(CLASSES)))) for i in range(2))
GROUP = dist.Group()
DATA = DataSettings()
TRAIN = TrainSettings(epochs=10, batch_size=BATCH)


class Pictures:
    """What a method sees where it looks at a feed: random images of the tasks, in equal parts."""

    group = GROUP

    def __init__(self, tasks: tuple[Task, ...]) -> None:
        self.tasks = tasks

    def evaluate(self) -> Iterator[Batch]:
        for place, task in enumerate(self.tasks):
            images, labels = (
                torch.randn(4 * CLASSES, 3, SIDE, SIDE),
                torch.arange(4 * CLASSES) % CLASSES,
            )
            draw = StepRng(0, 0, 0, torch.arange(len(labels)), len(labels), torch.device("cpu"))
            yield Batch(images, labels, torch.full_like(labels, place), draw, keys=keys_of(task))


def keys_of(task: Task) -> list[str]:
    return [f"train/{task.name}/{i:03d}" for i in range(4 * CLASSES)]


def feed_of(pictures: Pictures, split: str, training: bool) -> Any:
    return pictures


def keys_by_class(task: Task) -> dict[str, list[str]]:
    keys = keys_of(task)
    return {name: keys[i::CLASSES] for i, name in enumerate(task.classes)}


class Training:
    """A method in the middle of a stage: the training of its second task, where it is a chain; the
    first task's later steps are left out, but for the one that chooses exemplars."""

    def __init__(self, name: str, backbone: torch.nn.Module, scenario: str) -> None:
        cls = METHODS[name]
        settings = cls.Settings()
        self.job = StageJob(
            "benchmark",
            "",
            "train",
            "",
            name,
            {},
            BackboneSettings(),
            DATA,
            TRAIN,
            scenario,
            0,
            TASKS[0],
            TASKS[:1],
        )
        state, carried, first = None, None, cls.steps_for(settings, 0)[0].name
        herds = [step.name for step in cls.steps_for(settings, 0) if step.name == "herd"]
        for position, step in [(0, step) for step in (first, *herds)] * bool(cls.carries) + [
            (int(bool(cls.carries)), first)
        ]:
            rates = OptimPlan(
                TRAIN.lr, TRAIN.weight_decay, BATCH, optim.mean_rate_steps(10 * STEPS, STEPS, TRAIN)
            )
            torch.manual_seed(0)
            self.method: Method = cls(copy.deepcopy(backbone), settings, seed=0)
            self.method.scenario, self.method.stream = scenario, TASKS[: position + 1]
            if state is not None and cls.loads_states(scenario):
                self.method.load_task(state)
            context = StepContext(
                TASKS[position],
                rates,
                step,
                scenario,
                TASKS[: position + 1],
                carried=carried,
                data=StepData(task_keys=keys_by_class),
            )
            memory = remembered_samples(self.method, context)
            tasks = tuple(
                t
                for t in self.method.stream
                if cls.trains_on == "seen" or t == TASKS[position] or memory.get(t.name)
            )
            pictures = Pictures(tasks)
            data = StepData(partial(feed_of, pictures), keys_by_class)
            groups = self.method.begin(replace(context, training_tasks=tasks, data=data))
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
        self.tasks = torch.arange(BATCH) % len(tasks)
        self.steps = 0

    def step(self) -> Tensor:
        draw = StepRng(0, 0, self.steps, torch.arange(BATCH), BATCH, torch.device("cpu"))
        batch = Batch(
            self.images,
            self.labels,
            self.tasks,
            draw,
            counts=tuple(torch.bincount(self.tasks).tolist()),
        )
        progress = Progress(self.steps // STEPS, self.steps % STEPS, 10, STEPS)
        self.steps += 1
        return loop.train_step(self.method, self.optimizer, [batch], progress, self.job, GROUP)[
            "loss"
        ]

    @torch.no_grad()
    def served(self) -> Method:
        """The method on another copy of the backbone, with the finished task loaded."""
        state, carried = self.method.finish()
        method = type(self.method)(copy.deepcopy(BACKBONE), self.method.settings, seed=0)
        method.stream = self.method.stream
        method.load_task(state)
        if method.carries or method.trains_on == "seen":
            method.load_carried(carried)
        return method.eval()


BACKBONE = vit.build(BackboneSettings(img_size=SIDE))


def main(names: list[str]) -> None:
    start()
    report = Report()
    full = {scenario: Training("finetune", BACKBONE, scenario) for scenario in ("task", "class")}
    for name in names:
        scenario = max(METHODS[name].scenarios)
        training = Training(name, BACKBONE, scenario)
        training.step()
        timing = interleave({"full": full[scenario].step, name: training.step}, ROUNDS)
        ratio, what = (
            timing.ratio(name, "full"),
            f"{name}, a training step against full fine-tuning",
        )
        if name in TRAINING_DEMANDS:
            report.at_most(what, ratio, TRAINING_DEMANDS[name])
        else:
            report.note(what, f"{ratio:.2f}x")
        if scenario == "task":
            serve(name, training, report)
    report.exit()


@torch.no_grad()
def serve(name: str, training: Training, report: Report) -> None:
    method, task = training.served(), training.method.task
    assert task is not None
    plain, images = copy.deepcopy(BACKBONE).eval(), training.images
    method.logits(images, task.name)  # folds
    head = (
        method.heads[task.name]
        if task.name in method.heads.names
        else torch.nn.Linear(192, CLASSES)
    )
    timing = interleave(
        {"plain": lambda: head(plain(images)), name: lambda: method.logits(images, task.name)},
        3 * ROUNDS,
    )
    ratio, what = timing.ratio(name, "plain"), f"{name}, serving a task against the plain backbone"
    if name in ADDING:
        report.note(what, f"{ratio:.2f}x")
    else:
        report.at_most(what, ratio, SERVING_DEMAND)


if __name__ == "__main__":
    # that one decides on images of a feed; its step is supsup's
    main(sys.argv[1:] or [name for name in METHODS if name != "supsup_nn"])
