"""The tabletop: one method on a tiny ViT, taken step by step, without stages or files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from step_contexts import step_context
from torch import Tensor, nn

from workers.data.batch import Batch
from workers.job import BackboneSettings, Task, TrainSettings
from workers.methods.base import Method, OptimPlan, Progress, StepData
from workers.model.vit import build
from workers.rng import StepRng
from workers.storage.taskstate import Carried, TaskState

TINY = BackboneSettings(
    img_size=16, options={"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
)
TASKS = [
    Task(name, "card", "", tuple(f"{name}{i}" for i in range(2 + place)))
    for place, name in enumerate(("one", "two", "three", "four"))
]
ONE, TWO, THREE = TASKS[:3]  # each has more classes than the one before
BASE = Task("base", "card", "", ("x", "y"), "base")
SIZE = 8  # of a batch
PROGRESS = Progress(0, 0, 1, 6)
OPTIMIZERS: dict[
    str, Any
] = {  # by parameter groups; adam decays nothing, so that what it moves has a gradient
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.05),
    "adam": lambda groups: torch.optim.Adam([g | {"weight_decay": 0.0} for g in groups], lr=1e-2),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
}
TRAININGS = {
    "sgd": TrainSettings(optimizer="sgd", lr=0.1, momentum=0.9, weight_decay=0.05),
    "adam": TrainSettings(lr=1e-2, weight_decay=0.0),
    "adamw": TrainSettings(lr=1e-2, weight_decay=0.05),
}
AnyMethod = TypeVar("AnyMethod", bound=Method)
Left = tuple[TaskState, Carried]  # what a task leaves


def vit(std: float = 0.2, img_size: int = 16, **options: Any) -> Any:
    """All its parameters are drawn: timm starts biases at zero and norms at one, where wrong
    treatment of them would not show."""
    torch.manual_seed(0)
    model = build(TINY.model_copy(update={"img_size": img_size, "options": TINY.options | options}))
    for p in model.parameters():
        nn.init.normal_(p, std=std)
    return model.eval()


def images(count: int = SIZE, img_size: int = 16) -> Tensor:
    return torch.randn(count, 3, img_size, img_size, generator=torch.Generator().manual_seed(5))


def batch(step: int = 0, classes: int = 2, epoch: int = 0) -> Batch:
    """The same images, brighter with every step."""
    rows = torch.arange(SIZE)
    return Batch(
        images() + step,
        rows % classes,
        torch.zeros(SIZE, dtype=torch.long),
        StepRng(7, epoch, step, rows, SIZE, torch.device("cpu")),
    )


def rates(steps: float, train: TrainSettings = TRAININGS["adamw"]) -> OptimPlan:
    return OptimPlan(train.lr, train.weight_decay, SIZE, steps)


RATES = rates(6.0)


# ---- training ------------------------------------------------------------------------------------
def begun(
    method: Method,
    task: Task = ONE,
    carried: Carried | None = None,
    step: str = "train",
    rates: OptimPlan = RATES,
    data: StepData = StepData(),  # noqa: B008 (frozen)
) -> list[dict[str, Any]]:
    """The parameter groups of a task that begins; nothing else has a gradient from then on, as in
    the loop."""
    context = step_context(task, step, carried, rates, (task,), data)
    groups = [g for g in method.begin(context) if g["params"]]
    trained = {id(p) for g in groups for p in g["params"]}
    for p in method.parameters():
        p.requires_grad_(id(p) in trained)
    return groups


def each_step(
    method: Method,
    optimizer: torch.optim.Optimizer,
    batch_of: Task | Callable[[Progress], Batch],
    steps: int = 6,
    epochs: int = 1,
) -> Iterator[int]:
    """Trains as the loop does; stops for a look before and after the optimizer's step: at 2 i and
    at 2 i + 1.

    batch_of: the batch where training stands, or the task whose `batch` it is. steps: of an epoch.
    """
    method.train()
    for i in range(epochs * steps):
        progress = Progress(i // steps, i % steps, epochs, steps)
        optimizer.zero_grad()
        step_batch = (
            batch(progress.step, batch_of.num_classes, progress.epoch)
            if isinstance(batch_of, Task)
            else batch_of(progress)
        )
        method.loss(step_batch, progress)[0].backward()
        method.after_backward()
        yield 2 * i
        optimizer.step()
        method.after_step(progress)
        yield 2 * i + 1


def train(
    method: Method,
    optimizer: torch.optim.Optimizer,
    batch_of: Task | Callable[[Progress], Batch],
    steps: int = 6,
    epochs: int = 1,
) -> None:
    for _ in each_step(method, optimizer, batch_of, steps, epochs):
        pass


def trained(method: Method, task: Task = ONE, optimizer: str = "adamw") -> TaskState:
    """The state that six steps on one batch of a task leave."""
    train(
        method,
        OPTIMIZERS[optimizer](begun(method, task)),
        lambda progress: batch(classes=task.num_classes),
    )
    return method.eval().finish()[0]


def in_turn(tasks: Iterable[Task], learn: Callable[[Task, Carried | None], Left]) -> list[Left]:
    """What each task of a chain leaves, given what the one before it left, from bytes."""
    done: list[Left] = []
    for task in tasks:
        done.append(learn(task, Carried.from_bytes(done[-1][1].to_bytes()) if done else None))
    return done


# ---- serving -------------------------------------------------------------------------------------
def serving(
    method: AnyMethod, states: Iterable[TaskState], carried: Carried | None = None
) -> AnyMethod:
    """As `evaluate` has it: from bytes."""
    for state in states:
        method.load_task(TaskState.from_bytes(state.to_bytes()))
    if carried is not None:
        method.load_carried(Carried.from_bytes(carried.to_bytes()))
    return method.eval()


@torch.no_grad()
def answers(method: Method, task: Task = ONE) -> Tensor:
    """Logits on `images`, as they are served."""
    return method.eval().logits(images(), task.name).clone()
