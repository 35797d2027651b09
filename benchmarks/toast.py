"""Compare TOAST's implementation with two full passes of the network.

TOAST's two passes share work, and the feedback is folded into a matrix per block. Training steps
are measured with two full passes, with shared passes, and with a first pass that the feed has
cached.

Command: `python -m benchmarks.toast`. It takes about three minutes, with DeiT-Ti at 224 px, a batch
of 16 and one thread.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.harness import Report, interleave, start
from workers.data.batch import Batch
from workers.job import BackboneSettings, Task
from workers.methods.base import OptimPlan, Progress, StepContext
from workers.methods.toast import Toast, ToastSettings
from workers.model.top_down import select_tokens
from workers.model.vit import build
from workers.rng import StepRng

BATCH, CLASSES, TASKS = 16, 10, 5
# Minimum ratio of the times of two full passes / shared passes.
STEP_DEMAND = 1.15
INFERENCE_DEMAND = 1.75
KEPT_DEMAND = (
    1.25  # minimum ratio of the times of a step with both passes / with a cached first pass
)


class TwoFullPasses:
    """TOAST as computed by its released code.

    It runs the whole network twice, applies the whole qkv layer to the feedback, and applies the
    feedback layers one after the other.
    """

    def __init__(self, backbone: Any) -> None:
        self.backbone = copy.deepcopy(backbone)
        self.feedback: list[Tensor] = []  # by block, (B, N, D) each
        for index, block in enumerate(self.backbone.blocks):
            block.attn.qkv.register_forward_hook(partial(self.add_feedback, index))

    def add_feedback(self, index: int, layer: Any, inputs: Any, qkv: Tensor) -> None:
        """Add the feedback of block `index` to its values, as a forward hook of the qkv layer."""
        if self.feedback:
            width = self.backbone.embed_dim
            added = F.linear(self.feedback[index], layer.weight)
            qkv[..., 2 * width :] += added[..., 2 * width :]

    def features(self, images: Tensor, tensors: dict[str, Tensor]) -> Tensor:
        """Return the features (B, D) of images with the tensors of one task."""
        tokens = self.backbone.forward_features(images)
        x = select_tokens(tokens, tensors["prior"]) @ tensors["transform"]
        feedback: list[Tensor] = []
        for w1, w2 in zip(tensors["w1"].flip(0), tensors["w2"].flip(0), strict=True):
            x = F.linear(x, w1)
            feedback.insert(0, F.linear(x, w2))
        self.feedback = feedback
        features: Tensor = self.backbone(images)
        self.feedback = []
        return features


def make_method(dtype: torch.dtype) -> tuple[Toast, list[str]]:
    """Return TOAST with TASKS tasks, and the names of the tasks. The last task is in training.

    The feedback layers have random weights, so that feedback reaches all blocks as after training.
    """
    torch.manual_seed(0)
    backbone = build(BackboneSettings(name="deit_tiny_patch16_224")).to(dtype)
    method = Toast(backbone, ToastSettings(), seed=0)
    tasks = [Task(f"task {i}", "card", "", tuple(map(str, range(CLASSES)))) for i in range(TASKS)]
    for task in tasks:
        method.begin(StepContext(task, OptimPlan(1e-3, 0.0, BATCH, 1.0), training_tasks=(task,)))
        method.to(dtype)
        for name in ("w1", "w2"):
            torch.nn.init.normal_(method.own[name], std=method.width**-0.5)
        method.load_task(method.finish()[0])
    method.to(dtype).eval()
    method.heads[tasks[-1].name].requires_grad_(True)
    return method, [task.name for task in tasks]


def step(method: Toast, features: Callable[[Batch], Tensor], batch: Batch) -> Tensor:
    """Compute the loss and return all gradients as one vector."""
    head = method.heads[method.training_tasks[0].name]
    parameters = [*method.own.parameters(), *head.parameters()]
    loss = method.classification_loss(features(batch), batch)
    gradients = torch.autograd.grad(loss, parameters)
    return torch.cat([gradient.flatten() for gradient in gradients])


def shared_features(method: Toast, batch: Batch) -> Tensor:
    """Return the features (B, D) of the task in training, computed by shared passes."""
    method.weight_overrides = method.training_weights(batch, Progress(0, 0, 1, 1))
    return method.features(batch.images)


def full_features(method: Toast, slow: TwoFullPasses, batch: Batch) -> Tensor:
    """Return the features (B, D) of the task in training, computed by two full passes."""
    return slow.features(batch.images, dict(method.own.items()))


@torch.no_grad()
def full_logits(method: Toast, slow: TwoFullPasses, images: Tensor, tasks: list[str]) -> Tensor:
    """Return the logits (tasks, B, classes), computed by two full passes per task."""
    logits: list[Tensor] = []
    for name in tasks:
        features = slow.features(images, method.loaded[name] or {})
        logits.append(method.heads[name](features))
    return torch.stack(logits)


@torch.no_grad()
def shared_logits(method: Toast, images: Tensor, tasks: list[str]) -> Tensor:
    """Return the logits (tasks, B, classes), with a first pass that all tasks share."""
    rows = dict.fromkeys(tasks, slice(None))
    return torch.stack([*method.grouped_logits(images, rows).values()])


def make_variants(dtype: torch.dtype) -> dict[str, Callable[[], Tensor]]:
    """Return functions for a training step and for inference of all tasks, each in both forms.

    The training step has a third form, `kept`, in which the feed has cached the first pass.
    """
    method, tasks = make_method(dtype)
    slow = TwoFullPasses(method.backbone)
    images = torch.randn(BATCH, 3, 224, 224, dtype=dtype)
    rows = torch.arange(BATCH)
    rng = StepRng(0, 0, 0, rows, BATCH, torch.device("cpu"))
    batch = Batch(images, rows % CLASSES, torch.zeros_like(rows), rng)
    top_down = method.top_down
    kept = replace(batch, images=top_down.pack(*top_down.first_pass(images)))
    return {
        "kept": partial(step, method, partial(shared_features, method), kept),
        "shared": partial(step, method, partial(shared_features, method), batch),
        "in full": partial(step, method, partial(full_features, method, slow), batch),
        f"{TASKS} shared": partial(shared_logits, method, images, tasks),
        f"{TASKS} in full": partial(full_logits, method, slow, images, tasks),
    }


def main() -> None:
    """Compare gradients and logits in double precision, then compare times in single precision."""
    start()
    report = Report()
    variants = make_variants(torch.float64)
    expected = variants["in full"]()
    largest = expected.abs().max()
    for name in ("shared", "kept"):
        report.equal(
            f"gradients with {name} passes, relative to the largest",
            variants[name]() / largest,
            expected / largest,
            1e-9,
        )
    report.equal(
        f"logits of {TASKS} tasks",
        variants[f"{TASKS} shared"](),
        variants[f"{TASKS} in full"](),
        1e-9,
    )
    timing = interleave(make_variants(torch.float32), rounds=5)
    report.at_least(
        "training step, two full passes / shared", timing.ratio("in full", "shared"), STEP_DEMAND
    )
    report.at_least(
        "training step, shared passes / the first pass kept",
        timing.ratio("shared", "kept"),
        KEPT_DEMAND,
    )
    report.note(
        "training step, two full passes / the first pass kept",
        f"{timing.ratio('in full', 'kept'):.2f}x",
    )
    report.at_least(
        f"inference of {TASKS} tasks, two full passes each / the first pass shared",
        timing.ratio(f"{TASKS} in full", f"{TASKS} shared"),
        INFERENCE_DEMAND,
    )
    report.exit()


if __name__ == "__main__":
    main()
