"""Helpers that train and serve one method on a tiny ViT, without stages, files or data sets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from step_contexts import step_context
from torch import Tensor, nn

from workers.data.batch import Batch
from workers.job import BackboneSettings, Task, TrainSettings
from workers.loop import freeze_others
from workers.methods.base import Method, OptimPlan, Progress, StepData
from workers.model.vit import build
from workers.rng import StepRng
from workers.storage.taskstate import Carried, TaskState

TINY = BackboneSettings(
    img_size=16, options={"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
)
TASKS = [
    Task("one", "card", "", ("one0", "one1")),
    Task("two", "card", "", ("two0", "two1", "two2")),
    Task("three", "card", "", ("three0", "three1", "three2", "three3")),
    Task("four", "card", "", ("four0", "four1", "four2", "four3", "four4")),
]
ONE, TWO, THREE = TASKS[:3]
BASE = Task("base", "card", "", ("x", "y"), "base")
SIZE = 8  # images in a batch
PROGRESS = Progress(0, 0, 1, 6)
# Name -> function that makes an optimizer from parameter groups. `adam` has no weight decay, so it
# changes only parameters that have a gradient.
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.05),
    "adam": lambda groups: torch.optim.Adam([g | {"weight_decay": 0.0} for g in groups], lr=1e-2),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
}
TRAININGS = {
    "sgd": TrainSettings(optimizer="sgd", lr=0.1, momentum=0.9, weight_decay=0.05),
    "adam": TrainSettings(lr=1e-2, weight_decay=0.0),
    "adamw": TrainSettings(lr=1e-2, weight_decay=0.05),
}
# ViTs other than timm's VisionTransformer; the names describe their position embeddings.
OTHER_VITS: dict[str, dict[str, Any]] = {
    "EVA-02, rotary": {"name": "eva02_tiny_patch14_224"},
    "EVA-02, rotary, q k v apart": {"name": "eva02_base_patch14_224"},
    "DINOv3, rotary, registers": {"name": "vit_small_patch16_dinov3"},
    "rotary of each head and block": {"name": "vit_small_patch16_rope_mixed_224"},
    "BEiT, bias in each block": {"name": "beit_base_patch16_224"},
    "BEiT, one bias for all blocks": {
        "name": "beit_base_patch16_224",
        "options": {"use_shared_rel_pos_bias": True, "use_rel_pos_bias": False},
    },
    "BEiT, both": {"name": "beit_base_patch16_224", "options": {"use_shared_rel_pos_bias": True}},
}
AnyMethod = TypeVar("AnyMethod", bound=Method)
Left = tuple[TaskState, Carried]  # the return value of `Method.finish`


def vit(std: float = 0.2, img_size: int = 16, **options: Any) -> Any:
    """Return a tiny ViT with all parameters drawn from a normal distribution.

    timm initializes biases to zero and norms to one, which would hide errors in handling them.
    """
    torch.manual_seed(0)
    model = build(TINY.model_copy(update={"img_size": img_size, "options": TINY.options | options}))
    for p in model.parameters():
        nn.init.normal_(p, std=std)
    return model.eval()


def other_vit(name: str, options: dict[str, Any] | None = None) -> Any:
    """Return a tiny backbone of another family, with parameters drawn as in `vit`."""
    small = {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
    torch.manual_seed(0)
    model = build(BackboneSettings(name=name, img_size=16, options=small | (options or {})))
    for p in model.parameters():
        nn.init.normal_(p, std=0.2)
    return model.eval()


def images(count: int = SIZE, img_size: int = 16) -> Tensor:
    """Return the same random images at each call, (count, 3, img_size, img_size)."""
    return torch.randn(count, 3, img_size, img_size, generator=torch.Generator().manual_seed(5))


def batch(step: int = 0, classes: int = 2, epoch: int = 0) -> Batch:
    """Return a batch of one task: `images` plus the number of the step."""
    rows = torch.arange(SIZE)
    labels = rows % classes
    tasks = torch.zeros(SIZE, dtype=torch.long)
    rng = StepRng(7, epoch, step, rows, SIZE, torch.device("cpu"))
    return Batch(images() + step, labels, tasks, rng)


def rates(steps: float, train: TrainSettings = TRAININGS["adamw"]) -> OptimPlan:
    """Return an optimization plan with `steps` full-rate steps and these settings."""
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
    """Begin a step of a task, and return the parameter groups that it trains.

    As in the training loop, no other parameter requires a gradient afterwards.
    """
    context = step_context(task, step, carried, rates, (task,), data)
    groups = [group for group in method.begin(context) if group["params"]]
    freeze_others(method, groups)
    return groups


def each_step(
    method: Method,
    optimizer: torch.optim.Optimizer,
    batch_of: Task | Callable[[Progress], Batch],
    steps: int = 6,
    epochs: int = 1,
) -> Iterator[int]:
    """Train as the training loop does; yield 2 i before optimizer step i, and 2 i + 1 after it.

    batch_of: a function from progress to a batch, or a task, for which `batch` makes the batches.
    steps: steps per epoch.
    """
    method.train()
    for i in range(epochs * steps):
        progress = Progress(i // steps, i % steps, epochs, steps)
        optimizer.zero_grad()
        if isinstance(batch_of, Task):
            step_batch = batch(progress.step, batch_of.num_classes, progress.epoch)
        else:
            step_batch = batch_of(progress)
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
    """Train as the training loop does; the arguments are those of `each_step`."""
    for _ in each_step(method, optimizer, batch_of, steps, epochs):
        pass


def trained(method: Method, task: Task = ONE, optimizer: str = "adamw") -> TaskState:
    """Train a task for six steps on one batch, and return its state."""
    groups = begun(method, task)
    train(method, OPTIMIZERS[optimizer](groups), lambda _: batch(classes=task.num_classes))
    return method.eval().finish()[0]


def in_turn(tasks: Iterable[Task], learn: Callable[[Task, Carried | None], Left]) -> list[Left]:
    """Learn the tasks of a chain in order, and return the results of `learn`.

    `learn` takes a task and the carried state of the previous task, read from its bytes.
    """
    results: list[Left] = []
    carried = None
    for task in tasks:
        state, new_carried = learn(task, carried)
        results.append((state, new_carried))
        carried = Carried.from_bytes(new_carried.to_bytes())
    return results


# ---- serving -------------------------------------------------------------------------------------
def load_base_head(method: Method) -> None:
    """Load the state of the base task: a head of ones on the plain backbone."""
    head = {"weight": torch.ones(2, 32), "bias": torch.zeros(2)}
    digest = method.backbone_digest
    method.load_task(TaskState(BASE.name, BASE.classes, "base", digest, head=head))


def serving(
    method: AnyMethod, states: Iterable[TaskState], carried: Carried | None = None
) -> AnyMethod:
    """Load states and the carried state into a method from their bytes, as `evaluate` does."""
    for state in states:
        method.load_task(TaskState.from_bytes(state.to_bytes()))
    if carried is not None:
        method.load_carried(Carried.from_bytes(carried.to_bytes()))
    return method.eval()


@torch.no_grad()
def answers(method: Method, task: Task = ONE) -> Tensor:
    """Return the logits of a task for `images` in serving, (SIZE, classes)."""
    return method.eval().logits(images(), task.name).clone()
