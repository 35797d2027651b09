"""TOAST: two passes that share what they can and feedback folded into a matrix per block, against
two full passes of the network.

`python -m benchmarks.toast`; DeiT-Ti at 224 px, batch of 16, one thread, about three minutes.
"""

from __future__ import annotations

import copy
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
STEP, INFERENCE = 1.15, 1.75  # least ratio of two full passes to shared ones


class TwoFullPasses:
    """The form of the released code: the whole network twice, the whole qkv layer on what is fed
    back, a chain of feedback layers."""

    def __init__(self, backbone: Any) -> None:
        self.backbone = copy.deepcopy(backbone)
        self.fed_back: list[Tensor] = []  # by block
        for index, block in enumerate(self.backbone.blocks):
            block.attn.qkv.register_forward_hook(partial(self.steer, index))

    def steer(self, index: int, layer: Any, inputs: Any, qkv: Tensor) -> None:
        if self.fed_back:
            width = self.backbone.embed_dim
            qkv[..., 2 * width :] += F.linear(self.fed_back[index], layer.weight)[..., 2 * width :]

    def features(self, images: Tensor, own: dict[str, Tensor]) -> Tensor:
        x = select_tokens(self.backbone.forward_features(images), own["prior"]) @ own["transform"]
        fed_back: list[Tensor] = []
        for w1, w2 in zip(reversed(own["w1"].unbind()), reversed(own["w2"].unbind()), strict=True):
            x = F.linear(x, w1)
            fed_back.insert(0, F.linear(x, w2))
        self.fed_back = fed_back
        found = self.backbone(images)
        self.fed_back = []
        return found


def tuned(dtype: torch.dtype) -> tuple[Toast, list[str]]:
    """Tasks whose feedback reaches all blocks, as after some training; the last is the one in
    training."""
    torch.manual_seed(0)
    method = Toast(
        build(BackboneSettings(name="deit_tiny_patch16_224")).to(dtype), ToastSettings(), seed=0
    )
    tasks = [Task(f"task {i}", "card", "", tuple(map(str, range(CLASSES)))) for i in range(TASKS)]
    for task in tasks:
        method.begin(StepContext(task, OptimPlan(1e-3, 0.0, BATCH, 1.0), training_tasks=(task,)))
        method.to(dtype)
        for name in ("w1", "w2"):
            torch.nn.init.normal_(method.own[name], std=method.width**-0.5)
        method.load_task(method.finish()[0])
    method.to(dtype).eval()
    method.heads[tasks[-1].name].requires_grad_(True)
    return method, [t.name for t in tasks]


def step(method: Toast, features: Any, batch: Batch) -> Tensor:
    """Loss and gradients, which it returns in one row."""
    parameters = [
        *method.own.parameters(),
        *method.heads[method.training_tasks[0].name].parameters(),
    ]
    loss = method.classification_loss(features(batch), batch)
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])


def shared(method: Toast, batch: Batch) -> Tensor:
    method.weight_overrides = method.training_weights(batch, Progress(0, 0, 1, 1))
    return method.features(batch.images)


@torch.no_grad()
def answers(method: Toast, slow: TwoFullPasses, images: Tensor, tasks: list[str]) -> Tensor:
    """One task after the other."""
    return torch.stack(
        [method.heads[name](slow.features(images, method.loaded[name] or {})) for name in tasks]
    )


@torch.no_grad()
def together(method: Toast, images: Tensor, tasks: list[str]) -> Tensor:
    return torch.stack([*method.logits_of(images, tasks).values()])


def main() -> None:
    start()
    report, steps = Report(), dict[str, Any]()
    for dtype in (torch.float64, torch.float32):  # equality in double, then the clock
        method, tasks = tuned(dtype)
        slow, images = TwoFullPasses(method.backbone), torch.randn(BATCH, 3, 224, 224, dtype=dtype)
        rows = torch.arange(BATCH)
        batch = Batch(
            images,
            rows % CLASSES,
            torch.zeros_like(rows),
            StepRng(0, 0, 0, rows, BATCH, torch.device("cpu")),
        )
        in_full = partial(
            step,
            method,
            lambda batch, m=method, s=slow: s.features(batch.images, dict(m.own.items())),
        )
        steps = {
            "shared": partial(step, method, partial(shared, method), batch),
            "in full": partial(in_full, batch),
            f"{TASKS} shared": partial(together, method, images, tasks),
            f"{TASKS} in full": partial(answers, method, slow, images, tasks),
        }
        if dtype == torch.float64:
            wanted = steps["in full"]()
            report.equal(
                "gradients, relative to the largest",
                steps["shared"]() / wanted.abs().max(),
                wanted / wanted.abs().max(),
                1e-9,
            )
            report.equal(
                f"logits of {TASKS} tasks",
                steps[f"{TASKS} shared"](),
                steps[f"{TASKS} in full"](),
                1e-9,
            )
    timing = interleave(steps, rounds=5)
    report.at_least(
        "training step, two full passes / shared", timing.ratio("in full", "shared"), STEP
    )
    report.at_least(
        f"inference of {TASKS} tasks, two full passes each / the first pass shared",
        timing.ratio(f"{TASKS} in full", f"{TASKS} shared"),
        INFERENCE,
    )
    report.exit()


if __name__ == "__main__":
    main()
