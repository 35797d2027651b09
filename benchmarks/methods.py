"""Compare the training step of every method with full fine-tuning of the same ViT, and serving a
task with the plain backbone.

Command: `python -m benchmarks.methods [NAME ...]`. It takes a few minutes, with ViT-Ti at 96 px,
batches of 16 random images, fp32, one rank and one thread. Methods that form a chain are timed on
the second task, with their protection of the first task. If a method has a memory, half of each
batch is from the first task. Weights are random, which does not change the amount of work.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.harness import Report, interleave, start
from workers import dist, loop, optim
from workers.capture import StepCapture
from workers.data.accelerator import CPU
from workers.data.batch import Batch
from workers.job import BackboneSettings, DataSettings, StageJob, Task, TrainSettings
from workers.loop import exemplar_keys
from workers.methods import METHODS
from workers.methods.base import (
    Method,
    OptimPlan,
    ParamGroup,
    Progress,
    StepContext,
    StepData,
)
from workers.methods.protocols import ReplaysSamples
from workers.model import vit
from workers.rng import StepRng
from workers.storage.taskstate import Carried, TaskState

SIDE, BATCH, CLASSES, ROUNDS = 96, 16, 20, 7
STEPS = 100  # per epoch of the schedule; the timed steps are the first ones
SERVING_DEMAND = 1.10  # a served task with folded masks / the plain backbone with a head
# Maximum CPU time of a training step, relative to full fine-tuning. Other methods are measured
# without a requirement.
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
TASKS = tuple(Task(f"t{i}", "none", "none", tuple(map(str, range(CLASSES)))) for i in range(3))
DATA = DataSettings()


@dataclass(frozen=True)
class Conditions:
    """Conditions of a measured training step.

    Attributes:
        side: Side of the images in pixels.
        batch: Images per step.
        position: Position of the task in the stream, from 0. Methods that do not form a chain
            always train the first task.
        precision: Precision of training.
        device: Device of training.
        is_captured: Train with `train.compile: step`.
    """

    side: int = SIDE
    batch: int = BATCH
    position: int = 1
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    device: torch.device = CPU
    is_captured: bool = False

    @property
    def train(self) -> TrainSettings:
        """The training settings."""
        return TrainSettings(
            epochs=10,
            batch_size=self.batch,
            precision=self.precision,
            compile="step" if self.is_captured else False,
        )


class Pictures:
    """A feed of random images of some tasks, for methods that read images before training."""

    def __init__(self, tasks: tuple[Task, ...], conditions: Conditions) -> None:
        self.tasks = tasks
        self.side = conditions.side
        self.group = dist.Group(device=conditions.device)

    def evaluate(self) -> Iterator[Batch]:
        """Yield one batch per task, with four images per class."""
        device = self.group.device
        for index, task in enumerate(self.tasks):
            images = torch.randn(4 * CLASSES, 3, self.side, self.side).to(device)
            labels = (torch.arange(4 * CLASSES) % CLASSES).to(device)
            rng = StepRng(0, 0, 0, torch.arange(len(labels)), len(labels), device)
            yield Batch(
                images, labels, torch.full_like(labels, index), rng, keys=list_task_keys(task)
            )

    def epoch(self, epoch: int, step: int = 0) -> Iterator[list[Batch]]:
        """Yield the same batches, one per step."""
        for batch in self.evaluate():
            yield [batch]


def list_task_keys(task: Task) -> list[str]:
    """Return the keys of a task's samples."""
    return [f"train/{task.name}/{i:03d}" for i in range(4 * CLASSES)]


def get_feed(pictures: Pictures, split: str, training: bool) -> Any:
    """Return the same feed for every split."""
    return pictures


def keys_by_class(task: Task) -> dict[str, list[str]]:
    """Return the keys of a task's samples by class name."""
    keys = list_task_keys(task)
    return {name: keys[i::CLASSES] for i, name in enumerate(task.classes)}


class Training:
    """A method in the middle of a training stage; in a chain, of a later task.

    Of the further steps of earlier tasks, only these are run: steps that choose exemplars and, if
    the method needs the states of earlier tasks, steps without training.
    """

    def __init__(
        self,
        name: str,
        backbone: torch.nn.Module,
        scenario: str,
        conditions: Conditions = Conditions(),
    ) -> None:
        cls = METHODS[name]
        device = conditions.device
        train = conditions.train
        self.group = dist.Group(device=device)
        self.cls, self.backbone, self.scenario = cls, backbone, scenario
        self.conditions = conditions
        self.settings = settings = cls.Settings()
        self.job = StageJob(
            "benchmark",
            "",
            "train",
            "",
            name,
            {},
            BackboneSettings(),
            DATA,
            train,
            scenario,
            0,
            TASKS[0],
            TASKS[:1],
        )
        self.states: dict[str, TaskState] = {}
        self.carried: Carried | None = None
        stages = [
            (0, cls.steps_for(settings, 0)[0].name)
        ]  # (position in the stream, name of the step)
        for position in range(conditions.position if cls.carries else 0):
            first, *_ = cls.steps_for(settings, position + 1)
            if not first.trains:  # only the first task trains
                break
            for later in cls.steps_for(settings, position)[1:]:
                is_needed = later.name == "herd" or (cls.needs_states and not later.trains)
                if is_needed and not (later.later and position == 0):
                    stages.append((position, later.name))
            stages.append((position + 1, first.name))
        timed = stages[-1]
        for position, step in stages:
            groups, tasks, memory = self._begin(position, step)
            if (position, step) != timed:
                self._finish()
        self.position = position
        self.optimizer = optim.build_optimizer(groups, train)
        self.capture: StepCapture | None = None
        if conditions.is_captured:
            self.capture = StepCapture(self.method, self.optimizer, device)
        self.casts = ExitStack()  # entered for the lifetime of the object
        self.casts.enter_context(loop.cast_frozen_layers(self.job, self.method))
        self.method.train()
        generator = torch.Generator().manual_seed(1)
        self.size = conditions.batch
        shape = (self.size, 3, conditions.side, conditions.side)
        self.images = torch.randn(shape, generator=generator).to(device)
        self.labels = torch.randint(0, CLASSES, (self.size,), generator=generator).to(device)
        tasks_of_images = torch.arange(self.size) % len(tasks)
        self.num_replayed = 0  # in addition to the images of the last task
        if isinstance(self.method, ReplaysSamples) and memory:
            tasks_of_images.fill_(len(tasks) - 1)
            self.num_slots = sum(map(len, memory.values()))
            self.num_replayed = sum(self.method.replay_draws())
        self.counts = tuple(torch.bincount(tasks_of_images).tolist())
        self.tasks = tasks_of_images.to(device)
        self.features: Tensor | None = (
            None  # cached features of the images, as from `Feed.add_features`
        )
        self.steps = 0

    def _begin(
        self, position: int, step: str
    ) -> tuple[list[ParamGroup], tuple[Task, ...], dict[str, list[str]]]:
        """Begin a step of a task with a new method.

        Returns:
            The parameter groups, the tasks with training images, and the keys of the exemplars.
        """
        conditions = self.conditions
        device, train = conditions.device, conditions.train
        full_rate = optim.full_rate_steps(10 * STEPS, STEPS, train)
        rates = OptimPlan(train.lr, train.weight_decay, conditions.batch, full_rate)
        torch.manual_seed(0)
        backbone = copy.deepcopy(self.backbone)
        self.method: Method = self.cls(backbone, self.settings, seed=0).to(device)
        self.method.scenario, self.method.stream = self.scenario, TASKS[: position + 1]
        if self.cls.loads_states(self.scenario):
            for task in TASKS[:position]:
                self.method.load_task(self.states[task.name])
        context = StepContext(
            TASKS[position],
            rates,
            step,
            self.scenario,
            TASKS[: position + 1],
            carried=self.carried and self.carried.to(device),
            data=StepData(task_keys=keys_by_class),
        )
        memory = exemplar_keys(self.method, context)
        tasks = tuple(
            task
            for task in self.method.stream
            if self.cls.trains_on == "seen" or task == TASKS[position] or memory.get(task.name)
        )
        pictures = Pictures(tasks, conditions)
        data = StepData(partial(get_feed, pictures), keys_by_class)
        groups = self.method.begin(replace(context, training_tasks=tasks, data=data))
        self.method.to(device)
        trained: set[int] = set()
        for group in groups:
            trained.update(id(parameter) for parameter in group["params"])
        for parameter in self.method.parameters():
            parameter.requires_grad_(id(parameter) in trained)
        return groups, tasks, memory

    def _finish(self) -> None:
        """Finish the current step and keep its results for the next step."""
        state, self.carried = self.method.finish()
        self.states[state.task] = state

    def step(self) -> Tensor:
        """Run one training step and return its loss."""
        positions = torch.arange(self.size)
        rng = StepRng(0, 0, self.steps, positions, self.size, self.group.device)
        batch = Batch(
            self.images, self.labels, self.tasks, rng, counts=self.counts, features=self.features
        )
        if self.num_replayed:
            batch.replay = self.replay_batch()
        progress = Progress(self.steps // STEPS, self.steps % STEPS, 10, STEPS)
        self.steps += 1
        sums = loop.train_step(
            self.method, self.optimizer, [batch], progress, self.job, self.group, self.capture
        )
        return sums["loss"].clone()  # the next captured step overwrites it

    def replay_batch(self) -> Batch:
        """Return a replay batch, which repeats the images of the step."""
        positions = torch.arange(self.num_replayed)
        rng = StepRng(1, 0, self.steps, positions, self.num_replayed, self.group.device)
        rows = rng.positions_on_device % self.size
        slots = rng.positions_on_device % self.num_slots
        batch = Batch(self.images[rows], self.labels[rows], torch.zeros_like(rows), rng)
        batch.counts = (self.num_replayed,)
        batch.slots = slots
        return batch

    @torch.no_grad()
    def served(self) -> Method:
        """Return the method on a new copy of the backbone, with the finished task loaded.

        The further steps of the task run first if none trains.
        """
        self._finish()
        later = self.cls.steps_for(self.settings, self.position)[1:]
        if not any(step.trains for step in later):
            for step in later:
                self._begin(self.position, step.name)
                self._finish()
        method = self.cls(copy.deepcopy(BACKBONE), self.settings, seed=0)
        method.stream = self.method.stream
        loaded = TASKS[: self.position + 1]
        if not self.cls.loads_states(self.scenario):
            loaded = loaded[-1:]
        for task in loaded:
            method.load_task(self.states[task.name])
        if method.carries or method.trains_on == "seen":
            assert self.carried is not None
            method.load_carried(self.carried)
        return method.eval()


BACKBONE = vit.build(BackboneSettings(img_size=SIDE))


def main(names: list[str]) -> None:
    """Measure the methods with these names."""
    start()
    report = Report()
    full = {scenario: Training("finetune", BACKBONE, scenario) for scenario in ("task", "class")}
    for name in names:
        scenario = max(METHODS[name].scenarios - {"domain"})
        training = Training(name, BACKBONE, scenario)
        training.step()
        timing = interleave({"full": full[scenario].step, name: training.step}, ROUNDS)
        ratio = timing.ratio(name, "full")
        what = f"{name}, a training step against full fine-tuning"
        if name in TRAINING_DEMANDS:
            report.at_most(what, ratio, TRAINING_DEMANDS[name])
        else:
            report.note(what, f"{ratio:.2f}x")
        if scenario == "task":
            serve(name, training, report)
    report.exit()


@torch.no_grad()
def serve(name: str, training: Training, report: Report) -> None:
    """Compare serving the finished task with the plain backbone and a linear head."""
    method = training.served()
    task = training.method.task
    assert task is not None
    plain = copy.deepcopy(BACKBONE).eval()
    images = training.images
    method.logits(images, task.name)  # the first call folds masks into the weights
    head = torch.nn.Linear(192, CLASSES)
    timing = interleave(
        {"plain": lambda: head(plain(images)), name: lambda: method.logits(images, task.name)},
        3 * ROUNDS,
    )
    ratio = timing.ratio(name, "plain")
    what = f"{name}, serving a task against the plain backbone"
    if (
        method.flops_share(training.states[task.name]) > 1
    ):  # needs more work than the backbone by design
        report.note(what, f"{ratio:.2f}x")
    else:
        report.at_most(what, ratio, SERVING_DEMAND)


if __name__ == "__main__":
    # supsup_nn is excluded: it chooses masks with images of a feed, and trains like supsup
    trained = [name for name, cls in METHODS.items() if cls.has_training()]
    main(sys.argv[1:] or [name for name in trained if name != "supsup_nn"])
