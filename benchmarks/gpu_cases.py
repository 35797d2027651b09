"""The cases of `benchmarks.gpu`. A case is a method in a scenario on a short stream."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import stream
from pipeline.config.settings import Config
from pipeline.graph.stage import Graph
from pipeline.graph.store import Store
from workers.data import accelerator
from workers.data.accelerator import CPU
from workers.methods import METHODS

# Name of a task -> its range of classes. The first task trains the backbone.
TASKS = {"base": (0, 2), "one": (2, 4), "two": (4, 7)}
LAST_TASK = "two"
CLASSES = [f"c{i:04d}" for i in range(7)]  # the names that `stream.draw_images` uses
# Methods that run without a base task: `dytox` trains its encoder on the stream; the others compute
# class statistics.
WITHOUT_BASE = ("aper", "dytox", "fecam", "ncm", "ranpac", "simplecil", "slda")
BACKBONE = {
    "img_size": 16,
    "crop_pct": 1.0,
    "drop_path": 0.1,
    "options": {"patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2, "weight_init": "jax"},
}
DATA = {"crop": "pad", "flip": 0.5}
TRAIN = {"epochs": 2, "batch_size": 16, "lr": 3e-3}
MEMORY = 28  # number of exemplars, for methods with a memory
SETTINGS: dict[str, dict[str, Any]] = {
    "rpsnet": {"every": 1},  # so that the second task also selects a path
    "supsup_nn": {"every": 3, "look": 16, "most": 8},  # so that it chooses a mask twice per task
}


@dataclass(frozen=True)
class Case:
    """One method in one scenario."""

    method: str
    scenario: str
    precision: str = "fp32"

    def __str__(self) -> str:
        return f"{self.method} {self.scenario} {self.precision}"

    @property
    def name(self) -> str:
        """The name of the case's run and folder."""
        return f"{self.method}-{self.scenario}-{self.precision}"


@dataclass(frozen=True)
class Failure:
    """A failure of a stage.

    Attributes:
        stage: Id of the stage, or name of the check.
        sentence: The error message.
        frame: Innermost line of this project in the traceback as FILE:LINE, or "".
    """

    stage: str
    sentence: str
    frame: str = ""


@dataclass(frozen=True)
class Setup:
    """Shared by all cases: the device, the card, and the folder with images and storages."""

    device: torch.device
    folder: Path
    card: str


def prepare(folder: Path, device: str) -> Setup:
    """Generate the images of all cases. They are the same on every machine."""
    card = stream.draw_images(folder, len(CLASSES), train=20, test=8, sides=(24,))
    # explicit index, because a process that forks must not query CUDA
    chosen = torch.device(device, 0) if device == accelerator.TYPE else CPU
    return Setup(chosen, folder, card)


def plan(
    setup: Setup, case: Case, storage: str, device: torch.device
) -> tuple[Store, Graph, Config]:
    """Return the graph of a case on a device. All cases share the storage."""
    settings = dict(SETTINGS.get(case.method, {}))
    fields = METHODS[case.method].Settings.model_fields
    settings |= {k: v for k, v in (("memory", MEMORY), ("per_class", 0)) if k in fields}
    if METHODS[case.method].has_training():
        settings |= {"train": {"precision": case.precision}}
    tasks = []
    for name, (start, end) in TASKS.items():
        role = "base" if name == "base" and case.method not in WITHOUT_BASE else "task"
        tasks.append(
            {"card": setup.card, "name": name, "classes": CLASSES[start:end], "role": role}
        )
    return stream.plan(
        setup.folder / storage,
        setup.card,
        len(TASKS),
        name=case.name,
        stream={"scenario": case.scenario, "tasks": tasks},
        backbone=BACKBONE,
        data=DATA,
        train=TRAIN,
        methods={case.method: settings},
        cluster={
            "workers": 0,
            "gpus_per_worker": int(accelerator.is_accelerator(device)),
            "checkpoint_s": 0,  # checkpoint only on preemption
            "loader_workers": 1,
        },
    )


def mixed_batch(setup: Setup, size: int = 24) -> tuple[list[bytes], list[str]]:
    """Return encoded test images of alternating tasks, and the task of each image."""
    images: list[bytes] = []
    tasks: list[str] = []
    names = list(TASKS)
    for number in range(size):
        task = names[number % len(names)]
        start, end = TASKS[task]
        folder = setup.folder / "raw" / "test" / CLASSES[start + number % (end - start)]
        files = sorted(folder.iterdir())
        images.append(files[number % len(files)].read_bytes())
        tasks.append(task)
    return images, tasks
