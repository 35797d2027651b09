"""Serving mixed batches of many tasks: images grouped by task against one by one, against every
task's network over the batch, and against full models.

`python -m benchmarks.serve`; a ViT of width 192 and 6 blocks at 96 px, 64 images, one thread, about
three minutes. MEAT, tokens and neurons half kept.
"""

from __future__ import annotations

import copy
import gc
from functools import partial
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from benchmarks.harness import Report, interleave, start
from benchmarks.meat_inference import random_mask
from workers.job import BackboneSettings
from workers.methods.meat import Meat, MeatSettings
from workers.model.vit import build
from workers.serving.server import LruCache
from workers.storage.taskstate import TaskState

TASKS, BATCH, CLASSES = (2, 5, 10, 20), 64, 10
SETTINGS = BackboneSettings(name="vit_tiny_patch16_224", img_size=96, options={"depth": 6})
ALONE = {
    2: 2.5,
    5: 2.2,
    10: 1.8,
    20: 1.1,
}  # number of tasks -> least ratio of the loop over images to groups
EVERY = {2: 1.5, 5: 3.0, 10: 5.5, 20: 9.0}  # of every task's network over the batch


def meat(tasks: int) -> Meat:
    """Tasks with random masks, which does not change the amount of work."""
    method = Meat(build(SETTINGS), MeatSettings(ffn_masks="neuron"), seed=0)
    generator = torch.Generator().manual_seed(0)
    for task in range(tasks):
        masks = {
            name: random_mask(generator, *shape, keep=0.5)
            for name, shape in method.mask_shapes().items()
        }
        head = nn.Linear(method.heads.width, CLASSES).state_dict()
        names = tuple(map(str, range(CLASSES)))
        method.load_task(
            TaskState(
                f"t{task}",
                names,
                "meat",
                method.backbone_digest,
                masks=masks,
                head=head,
                meta=method.sites.meta,
            )
        )
    return method.requires_grad_(False).eval()


def bytes_of(*modules: nn.Module) -> int:
    """Of all tensors, each once."""
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for m in modules
        for t in (*m.parameters(), *m.buffers())
    }
    return sum(storages.values())


def rows_of(tasks: list[str]) -> dict[str, Tensor]:
    return {
        name: torch.tensor([i for i, task in enumerate(tasks) if task == name])
        for name in dict.fromkeys(tasks)
    }


@torch.no_grad()
def grouped(networks: Any, images: Tensor, tasks: list[str]) -> Tensor:
    """As `Predictor.logits_with_task` does it: a forward for each task over its own images."""
    out = images.new_empty(len(images), CLASSES)
    for name, rows in rows_of(tasks).items():
        out[rows] = networks(name)(images[rows])
    return out


@torch.no_grad()
def one_by_one(networks: Any, images: Tensor, tasks: list[str]) -> Tensor:
    return torch.cat(
        [networks(task)(image[None]) for image, task in zip(images, tasks, strict=True)]
    )


@torch.no_grad()
def every_network(networks: Any, images: Tensor, tasks: list[str], names: list[str]) -> Tensor:
    """All tasks' networks over all images; each image keeps one answer."""
    everything = {name: networks(name)(images) for name in names}
    return torch.stack([everything[task][row] for row, task in enumerate(tasks)])


def full_models(method: Meat, names: list[str]) -> dict[str, nn.Module]:
    """What serving without a shared backbone keeps: a whole network per task, its masks folded into
    the weights."""
    models: dict[str, nn.Module] = {}
    for name in names:
        method.activate_task(name)
        backbone = copy.deepcopy(method.backbone)
        backbone.load_state_dict(method.weight_overrides, strict=False)
        models[name] = nn.Sequential(backbone, copy.deepcopy(method.heads[name])).eval()
    return models


def main() -> None:
    start()
    torch.manual_seed(0)
    report, process = Report(), psutil.Process()
    for count in TASKS:
        method, names = meat(count), [f"t{i}" for i in range(count)]
        images, tasks = (
            torch.randn(BATCH, 3, 96, 96),
            [names[i] for i in torch.randint(count, (BATCH,)).tolist()],
        )
        kept = LruCache(1 << 30, {p.untyped_storage().data_ptr() for p in method.parameters()})
        networks = partial(kept.get, make=method.compact)
        before = process.memory_info().rss
        answers = grouped(networks, images, tasks)
        shared = bytes_of(method) + kept.nbytes, process.memory_info().rss - before
        before = process.memory_info().rss
        models = full_models(method, names)
        full = grouped(models.__getitem__, images, tasks)
        separate = bytes_of(*models.values()), process.memory_info().rss - before
        report.equal(
            f"{count} tasks, logits grouped and one by one",
            answers,
            one_by_one(networks, images, tasks),
            1e-5,
        )
        report.equal(f"{count} tasks, logits grouped and of full models", answers, full, 1e-5)
        timing = interleave(
            {
                "grouped": partial(grouped, networks, images, tasks),
                "alone": partial(one_by_one, networks, images, tasks),
                "every": partial(every_network, networks, images, tasks, names),
                "full": partial(grouped, models.__getitem__, images, tasks),
            },
            rounds=3,
        )
        report.at_least(
            f"{count} tasks, image by image / grouped",
            timing.ratio("alone", "grouped"),
            ALONE[count],
        )
        report.at_least(
            f"{count} tasks, every task's network over the batch / grouped",
            timing.ratio("every", "grouped"),
            EVERY[count],
        )
        report.note(
            f"{count} tasks, a full model per task, grouped too / ours",
            f"{timing.ratio('full', 'grouped'):.2f}x",
        )
        report.note(
            f"{count} tasks, images per second grouped", f"{BATCH / timing.median('grouped'):.0f}"
        )
        tensors = f"{separate[0] / 1e6:.1f} / {shared[0] / 1e6:.1f} MB"
        report.note(
            f"{count} tasks, memory of full models / ours",
            f"{separate[0] / shared[0]:.2f}x in tensors ({tensors}), "
            f"resident +{separate[1] / 1e6:.0f} / +{shared[1] / 1e6:.0f} MB",
        )
        del models, method, kept, networks, timing
        gc.collect()
    report.exit()


if __name__ == "__main__":
    main()
