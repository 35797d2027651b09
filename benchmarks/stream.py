"""Generate a stream of images for benchmarks: image files, card, config and graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

from pipeline.config import settings as config
from pipeline.graph.build import build_graph
from pipeline.graph.stage import Graph, IngestJob
from pipeline.graph.store import Store
from pipeline.launch import attempt
from pipeline.launch.limits import Deadline
from workers.job import StageJob


def draw_images(
    folder: Path,
    classes: int,
    train: int,
    test: int,
    sides: Sequence[int],
    suffixes: Sequence[str] = (".png",),
) -> str:
    """Write images into folders per split and class; return the path of their card.

    The images are smooth with a little noise, so that their files are about as large as those of
    photographs. An image is the mean of a random pattern and its class pattern, so a network
    can learn the classes.

    Args:
        folder: Folder of the images and the card.
        classes: Number of classes.
        train: Training images per class.
        test: Test images per class.
        sides: Sides of the images in pixels, used in turn.
        suffixes: Suffixes of the files, used in turn.
    """
    generator = np.random.default_rng(0)
    names = [f"c{i:04d}" for i in range(classes)]
    patterns = {
        name: np.random.default_rng([1, i]).integers(0, 256, (6, 6, 3))
        for i, name in enumerate(names)
    }
    for name in names:
        for number in range(train + test):
            side = sides[number % len(sides)]
            split = "train" if number < train else "test"
            class_folder = folder / "raw" / split / name
            class_folder.mkdir(parents=True, exist_ok=True)
            mixed = (generator.integers(0, 256, (6, 6, 3)) + patterns[name]) // 2
            rough = Image.fromarray(mixed.astype(np.uint8)).resize(
                (side, side), Image.Resampling.BICUBIC
            )
            noise = generator.integers(-6, 7, (side, side, 3))
            pixels = (np.asarray(rough).astype(np.int64) + noise).clip(0, 255).astype(np.uint8)
            file_name = f"{number:05d}{suffixes[number % len(suffixes)]}"
            Image.fromarray(pixels).save(class_folder / file_name, quality=90)
    card = folder / "card.yaml"
    card.write_text(
        yaml.safe_dump(
            {
                "name": "generated",
                "licence": "none",
                "classes": names,
                "source": {"format": "folder", "path": str(folder / "raw")},
            }
        )
    )
    return str(card)


def plan(
    folder: Path, card: str, tasks: int, **sections: Any
) -> tuple[Store, Graph, config.Config]:
    """Return the store, graph and config of a stream that splits a card into `tasks` tasks.

    Args:
        folder: Folder of the storage.
        card: Path of the card.
        tasks: Number of tasks.
        **sections: Further sections of the config file, which replace the defaults.
    """
    body = {
        "name": "benchmark",
        "storage": str(folder / "storage"),
        "tracking": False,
        "stream": {"tasks": [{"card": card, "name": "t", "split": tasks}]},
        **sections,
    }
    checked = config.check(body, "the benchmark's config")
    store = Store(checked.storage)
    return store, build_graph(checked, store)[0], checked


def ingest(store: Store, graph: Graph) -> None:
    """Run all ingest stages of a graph."""
    for stage in graph:
        if isinstance(stage.job, IngestJob):
            deadline = Deadline(config.ClusterSettings(), "ingest")
            attempt.run_ingest(store, stage, map, lambda event: None, deadline)


def find_job(graph: Graph, stage_id: str) -> StageJob:
    """Return the job of a stage that runs on a worker."""
    job = graph[stage_id].job
    assert isinstance(job, StageJob)
    return job


def tiny(side: int = 16) -> Mapping[str, Any]:
    """Return the settings of a small backbone: one block of width 16 on 2 x 2 patches."""
    return {
        "img_size": side,
        "crop_pct": 1.0,
        "options": {"patch_size": side // 2, "embed_dim": 16, "depth": 1, "num_heads": 2},
    }
