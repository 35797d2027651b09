"""Compare four ways to serve a batch with images of several tasks.

Grouping the images by task is compared with serving image by image, with running every task's
network on the whole batch, and with a full model per task.

Command: `python -m benchmarks.serve`. It takes about three minutes, with a ViT of width 192 and 6
blocks at 96 px, 64 images and one thread. The method is MEAT, and its masks keep half of the tokens
and neurons.
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
# Number of tasks -> minimum ratio of the times of image by image / grouped.
ONE_BY_ONE_DEMANDS = {2: 2.5, 5: 2.2, 10: 1.8, 20: 1.1}
# Number of tasks -> minimum ratio of the times of every task's network on the batch / grouped.
EVERY_NETWORK_DEMANDS = {2: 1.5, 5: 3.0, 10: 5.5, 20: 9.0}


def meat(tasks: int) -> Meat:
    """Return MEAT with `tasks` tasks and random masks, which do not change the amount of work."""
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


def count_bytes(*modules: nn.Module) -> int:
    """Return the bytes of all tensors of modules. Shared storage counts once."""
    storages: dict[int, int] = {}
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def group_rows(tasks: list[str]) -> dict[str, Tensor]:
    """Return the row indices of each task's images.

    Args:
        tasks: The task of each image.
    """
    rows: dict[str, list[int]] = {}
    for row, task in enumerate(tasks):
        rows.setdefault(task, []).append(row)
    return {name: torch.tensor(task_rows) for name, task_rows in rows.items()}


@torch.no_grad()
def grouped(networks: Any, images: Tensor, tasks: list[str]) -> Tensor:
    """Return the logits as the server computes them, by one forward pass per task."""
    out = images.new_empty(len(images), CLASSES)
    for name, rows in group_rows(tasks).items():
        out[rows] = networks(name)(images[rows])
    return out


@torch.no_grad()
def one_by_one(networks: Any, images: Tensor, tasks: list[str]) -> Tensor:
    """Return the logits by one forward pass per image."""
    logits = [networks(task)(image[None]) for image, task in zip(images, tasks, strict=True)]
    return torch.cat(logits)


@torch.no_grad()
def every_network(networks: Any, images: Tensor, tasks: list[str], names: list[str]) -> Tensor:
    """Return the logits by running every task's network on all images and selecting rows."""
    logits = {name: networks(name)(images) for name in names}
    return torch.stack([logits[task][row] for row, task in enumerate(tasks)])


def full_models(method: Meat, names: list[str]) -> dict[str, nn.Module]:
    """Return a full network per task, with the masks folded into its weights.

    Without a shared backbone, a server holds them all in memory.
    """
    models: dict[str, nn.Module] = {}
    for name in names:
        method.activate_task(name)
        backbone = copy.deepcopy(method.backbone)
        backbone.load_state_dict(method.weight_overrides, strict=False)
        models[name] = nn.Sequential(backbone, copy.deepcopy(method.heads[name])).eval()
    return models


def main() -> None:
    """Compare logits, times and memory for each number of tasks."""
    start()
    torch.manual_seed(0)
    report = Report()
    process = psutil.Process()
    for count in TASKS:
        method = meat(count)
        names = [f"t{i}" for i in range(count)]
        images = torch.randn(BATCH, 3, 96, 96)
        tasks = [names[i] for i in torch.randint(count, (BATCH,)).tolist()]
        cache = LruCache(1 << 30, {p.untyped_storage().data_ptr() for p in method.parameters()})
        networks = partial(cache.get, make=method.compact)
        resident_before = process.memory_info().rss
        answers = grouped(networks, images, tasks)
        shared_bytes = count_bytes(method) + cache.nbytes
        shared_resident = process.memory_info().rss - resident_before
        resident_before = process.memory_info().rss
        models = full_models(method, names)
        full = grouped(models.__getitem__, images, tasks)
        full_bytes = count_bytes(*models.values())
        full_resident = process.memory_info().rss - resident_before
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
            ONE_BY_ONE_DEMANDS[count],
        )
        report.at_least(
            f"{count} tasks, every task's network over the batch / grouped",
            timing.ratio("every", "grouped"),
            EVERY_NETWORK_DEMANDS[count],
        )
        report.note(
            f"{count} tasks, a full model per task, grouped too / ours",
            f"{timing.ratio('full', 'grouped'):.2f}x",
        )
        report.note(
            f"{count} tasks, images per second grouped", f"{BATCH / timing.median('grouped'):.0f}"
        )
        tensors = f"{full_bytes / 1e6:.1f} / {shared_bytes / 1e6:.1f} MB"
        report.note(
            f"{count} tasks, memory of full models / ours",
            f"{full_bytes / shared_bytes:.2f}x in tensors ({tensors}), "
            f"resident +{full_resident / 1e6:.0f} / +{shared_resident / 1e6:.0f} MB",
        )
        del models, method, cache, networks, timing
        gc.collect()
    report.exit()


if __name__ == "__main__":
    main()
