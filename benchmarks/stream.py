"""A stream of generated pictures in a folder of its own: raw images, a card, a config, and the
graph that follows from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

from pipeline import config
from pipeline.graph.build import graph_of
from pipeline.graph.stage import Graph, IngestJob
from pipeline.graph.store import Store
from pipeline.launch import attempt
from workers.job import StageJob


def draw_images(
    folder: Path,
    classes: int,
    train: int,
    test: int,
    sides: Sequence[int],
    suffixes: Sequence[str] = (".png",),
) -> str:
    """Smooth pictures with a little noise, about as large in bytes as photographs of their size, in
    folders per split and class; sides and suffixes take turns. Half of what a picture shows is the
    same in all of its class, so that there is something to learn. Returns the path of a card for
    them."""
    generator = np.random.default_rng(0)
    names = [f"c{i:04d}" for i in range(classes)]
    patterns = {
        name: np.random.default_rng([1, i]).integers(0, 256, (6, 6, 3))
        for i, name in enumerate(names)
    }
    for name in names:
        for number in range(train + test):
            side = sides[number % len(sides)]
            place = folder / "raw" / ("train" if number < train else "test") / name
            place.mkdir(parents=True, exist_ok=True)
            mixed = (generator.integers(0, 256, (6, 6, 3)) + patterns[name]) // 2
            rough = Image.fromarray(mixed.astype(np.uint8)).resize(
                (side, side), Image.Resampling.BICUBIC
            )
            noise = generator.integers(-6, 7, (side, side, 3))
            pixels = (np.asarray(rough).astype(np.int64) + noise).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(
                place / f"{number:05d}{suffixes[number % len(suffixes)]}", quality=90
            )
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
    """The graph of a stream that deals the card's classes to `tasks` tasks; `sections` are those of
    a config file."""
    body = {
        "name": "benchmark",
        "storage": str(folder / "storage"),
        "tracking": False,
        "stream": {"tasks": [{"card": card, "name": "t", "split": tasks}]},
        **sections,
    }
    checked = config.check(body, "the benchmark's config")
    store = Store(checked.storage)
    return store, graph_of(checked, store)[0], checked


def ingest(store: Store, graph: Graph) -> None:
    for stage in graph:
        if isinstance(stage.job, IngestJob):
            attempt.run_ingest(store, stage, map, lambda event: None)


def job_of(graph: Graph, stage_id: str) -> StageJob:
    job = graph[stage_id].job
    assert isinstance(job, StageJob)
    return job


def tiny(side: int = 16) -> Mapping[str, Any]:
    """A backbone that costs next to nothing: one block of width 16 on a 2 x 2 grid of patches."""
    return {
        "img_size": side,
        "crop_pct": 1.0,
        "options": {"patch_size": side // 2, "embed_dim": 16, "depth": 1, "num_heads": 2},
    }
