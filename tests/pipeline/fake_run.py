"""A small finished run in a store, written without training anything: a base task, three tasks,
three methods."""

from __future__ import annotations

import hashlib
import io
import tarfile
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

from pipeline.graph.stage import Stage
from workers.storage.artifact import Artifact, Attempt, Manifest, join
from workers.storage.taskstate import Carried, TaskState

TASKS: list[dict[str, Any]] = [
    {
        "name": "shapes",
        "card": "shapes",
        "role": "base",
        "classes": ["disc", "square", "star", "ring"],
    },
    {"name": "birds", "card": "birds", "role": "task", "classes": ["wren", "owl", "crow"]},
    {
        "name": "leaves",
        "card": "plants",
        "role": "task",
        "classes": ["oak", "ash", "elm", "fir", "yew"],
    },
    {"name": "roots", "card": "plants", "role": "task", "classes": ["beet", "leek"]},
]
METHODS = {"meat": "meat", "hat-small": "hat", "finetune": "finetune"}
IMAGES = [200, 120, 150, 61]
DEPTH, GRID, WIDTH, HIDDEN = 4, 8, 32, 128
BACKBONE_BYTES = 220_000


def accuracy(label: str, after: int, task: int) -> float:
    """meat is a star, hat-small a chain that keeps what it promised, finetune a chain that
    forgets."""
    best = [0.95, 0.84, 0.71, 0.9][task]
    if label == "finetune":
        return max(best + 0.02 - 0.19 * (after - task), 0.21)
    return best - (0.05 if label == "hat-small" and task else 0)


def stages() -> list[Stage]:
    """The graph, in topological order; a stage's key depends on its id alone."""

    def stage(
        name: str,
        step: str,
        parents: tuple[str, ...] = (),
        label: str | None = None,
        task: str | None = None,
    ) -> Stage:
        inputs = (
            {
                "method": METHODS[label],
                "settings": {"lam": 0.75},
                "train": {"epochs": 6, "lr": 0.001},
            }
            if label
            else {"revision": 1}
        )
        return Stage(
            name, step, hashlib.sha256(name.encode()).hexdigest()[:32], inputs, parents, label, task
        )

    graph_stages = [
        stage(f"data/{card}", "ingest") for card in dict.fromkeys(t["card"] for t in TASKS)
    ]
    graph_stages.append(stage("backbone", "backbone", ("data/shapes",), task="shapes"))
    for label, method in METHODS.items():
        graph_stages.append(
            stage(f"{label}/shapes/evaluate", "evaluate", ("backbone",), label, "shapes")
        )
        before: tuple[str, ...] = ()
        for task in TASKS[1:]:
            train, data = f"{label}/{task['name']}/train", f"data/{task['card']}"
            graph_stages.append(
                stage(
                    train,
                    "train",
                    ("backbone", data, *(before if method != "meat" else ())),
                    label,
                    task["name"],
                )
            )
            before = (train,)
            graph_stages.append(
                stage(
                    f"{label}/{task['name']}/evaluate",
                    "evaluate",
                    ("backbone", data, train),
                    label,
                    task["name"],
                )
            )
    graph_stages.append(
        stage("report", "report", tuple(s.id for s in graph_stages if s.step == "evaluate"))
    )
    return graph_stages


def record(name: str = "tiny") -> Any:
    config = {
        "name": name,
        "seed": 3,
        "storage": "storage",
        "stream": {
            "tasks": [{"card": t["card"], "name": t["name"]} for t in TASKS],
            "scenario": "task",
        },
        "backbone": {
            "name": "vit_tiny_patch16_224",
            "img_size": 32,
            "weights": "none",
            "options": {"patch_size": 4},
        },
        "train": {"epochs": 6, "lr": 0.001},
        "methods": {label: {"method": m} for label, m in METHODS.items()},
    }
    rows = [
        {
            "id": s.id,
            "key": s.key,
            "step": s.step,
            "label": s.method,
            "method": METHODS.get(s.method or ""),
            "task": s.task,
            "parents": list(s.parents),
            "inputs": dict(s.inputs),
        }
        for s in stages()
    ]
    return {
        "name": name,
        "config": config,
        "created": "2026-01-02T03:04:05+0000",
        "stages": rows,
        "tasks": TASKS,
        "provenance": {},
    }


def write(storage: str, only: set[str] | None = None) -> list[tuple[Stage, Manifest]]:
    """Writes the results of all stages, or of those whose id is in `only`; the report stage has
    none."""
    done = []
    for stage in stages():
        if stage.step == "report" or (only is not None and stage.id not in only):
            continue
        attempt = Attempt(join(storage, "stages"), stage.key)
        body = {"ingest": _ingest, "backbone": _backbone, "train": _train, "evaluate": _evaluate}[
            stage.step
        ](attempt, stage)
        attempt.commit(
            {
                "stage": stage.id,
                "step": stage.step,
                "label": stage.method,
                "method": METHODS.get(stage.method or ""),
                "task": stage.task,
                "wall_s": 1.5 + len(stage.id),
                **body,
                "provenance": {
                    "git_commit": "0123456789abcdef",
                    "seed": 3,
                    "device": "cpu",
                    "packages": {"torch": "2.14.1", "timm": "1.0.31"},
                },
            }
        )
        done.append((stage, Artifact.need(join(storage, "stages"), stage.key).manifest))
    return done


def parquet(columns: dict[str, list[Any]]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue()


def _index(name: str | None) -> int:
    return next(i for i, t in enumerate(TASKS) if t["name"] == name)


def _ingest(attempt: Attempt, stage: Stage) -> dict[str, Any]:
    """One test image per class, a gradient with a bright spot, in one shard."""
    classes = [c for t in TASKS if f"data/{t['card']}" == stage.id for c in t["classes"]]
    shard, rows = io.BytesIO(), []
    with tarfile.open(fileobj=shard, mode="w") as tar:
        for index, name in enumerate(classes):
            y, x = np.mgrid[0:40, 0:60]
            spot = 180 * np.exp(-((y - 20) ** 2 + (x - 20 - 4 * index) ** 2) / 90)
            pixels = np.stack([60 + 3 * x, 90 + 2 * y, 200 - 2 * x], 2) * 0.6 + spot[..., None]
            image = io.BytesIO()
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(image, "PNG")
            info = tarfile.TarInfo(f"{index:06d}.png")
            info.size = len(image.getvalue())
            tar.addfile(info, io.BytesIO(image.getvalue()))
            rows.append(
                {
                    "split": "test",
                    "key": f"{index:06d}",
                    "class": name,
                    "shard": "test-00000.tar",
                    "offset": tar.offset - -(-info.size // 512) * 512,
                    "bytes": info.size,
                    "sha256": hashlib.sha256(image.getvalue()).hexdigest(),
                    "ext": "png",
                }
            )
    attempt.write("test-00000.tar", shard.getvalue())
    attempt.write("index.parquet", parquet({name: [r[name] for r in rows] for name in rows[0]}))
    return {
        "kind": "ingest",
        "classes": classes,
        "counts": {"train": 900, "test": 211},
        "rejected": {"truncated": 2},
        "content": stage.key * 2,
    }


def _history(attempt: Attempt, stage: Stage, terms: dict[str, float]) -> None:
    epochs = 6
    decay = [0.65**e for e in range(epochs)]
    columns: dict[str, list[Any]] = {
        "epoch": list(range(epochs)),
        "lr": [1e-3 * d for d in decay],
        "loss": [0.3 + sum(terms.values()) * d for d in decay],
        **{t: [v * d for d in decay] for t, v in terms.items()},
        "images": [810] * epochs,
        "seconds": [2.0 + e % 2 for e in range(epochs)],
        **(
            {"token_keep": [1 - 0.02 * e for e in range(epochs)]} if "drop_control" in terms else {}
        ),
        "val_correct": [int(90 * (0.9 - 0.6 * d)) for d in decay],
        "val_total": [90] * epochs,
    }
    attempt.write("history.parquet", parquet(columns))


def _head(task: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {
        "weight": torch.zeros(len(task["classes"]), WIDTH),
        "bias": torch.zeros(len(task["classes"])),
    }


def _backbone(attempt: Attempt, stage: Stage) -> dict[str, Any]:
    attempt.write("state.safetensors", b"\0" * BACKBONE_BYTES)
    attempt.write(
        "task.safetensors",
        TaskState(
            "shapes", tuple(TASKS[0]["classes"]), "base", "d" * 64, head=_head(TASKS[0])
        ).to_bytes(),
    )
    _history(attempt, stage, {"ce": 1.4})
    return {"digest": "d" * 64, "parameters": BACKBONE_BYTES // 4, "bytes": BACKBONE_BYTES}


def _masks(label: str, index: int) -> dict[str, torch.Tensor]:
    """Half of each mask belongs to the task, half is common to all tasks."""
    task_rng, common = torch.Generator().manual_seed(index), torch.Generator().manual_seed(99)

    def mask(keep: float, *shape: int) -> torch.Tensor:
        halves = torch.rand(shape, generator=task_rng), torch.rand(shape, generator=common)
        return torch.where(torch.arange(shape[-1]) % 2 == 0, *halves) < keep

    if label == "meat":
        rows = torch.arange(GRID * GRID) // GRID
        centre = ((rows - 3.5).abs() + (torch.arange(GRID * GRID) % GRID - 3.5).abs()) < 6
        tokens = torch.stack(
            [centre & mask(1 - 0.04 * (b + index), GRID * GRID) for b in range(DEPTH)]
        )
        weights = {
            f"blocks.{b}.{fc}": mask(0.9 - 0.1 * b, *shape)
            for b in range(DEPTH)
            for fc, shape in (("fc1", (HIDDEN, WIDTH)), ("fc2", (WIDTH, HIDDEN)))
        }
        return {"tokens": tokens, **weights}
    return (
        {f"blocks.{b}.neurons": mask(0.15 + 0.1 * index, HIDDEN) for b in range(DEPTH)}
        if label == "hat-small"
        else {}
    )


def _train(attempt: Attempt, stage: Stage) -> dict[str, Any]:
    index, label = _index(stage.task), str(stage.method)
    tokens = (
        {"prompt": torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(index))}
        if label == "hat-small"
        else {}
    )
    state = TaskState(
        TASKS[index]["name"],
        tuple(TASKS[index]["classes"]),
        METHODS[label],
        "d" * 64,
        masks=_masks(label, index),
        tokens=tokens,
        head=_head(TASKS[index]),
    )
    attempt.write("task.safetensors", state.to_bytes())
    carried = Carried(
        {"weights": torch.zeros(1000 if label == "hat-small" else BACKBONE_BYTES // 4)}
        if label != "meat"
        else {}
    ).to_bytes()
    attempt.write("carried.safetensors", carried)
    _history(
        attempt,
        stage,
        {"ce": 1.1 + 0.2 * index, **({"drop_control": 0.2} if label == "meat" else {})},
    )
    warnings = (
        ["train.batch_size 64 is larger than the last task's train split; each epoch has one step"]
        if stage.task == "roots"
        else []
    )
    return {
        "sizes": state.sizes(),
        "trained_parameters": {"meat": 8_000, "hat-small": 12_000, "finetune": 55_000}[label],
        "carried_bytes": len(carried) if label != "meat" else 0,
        "flops_share": 0.83 if label == "meat" else 1.0,
        "warnings": warnings,
        "backbone_digest": "d" * 64,
    }


def _evaluate(attempt: Attempt, stage: Stage) -> dict[str, Any]:
    after, label = _index(stage.task), str(stage.method)
    rows: list[dict[str, Any]] = []
    names = ("task", "key", "label", "prediction", "confidence")
    columns: dict[str, list[Any]] = {name: [] for name in names}
    for task in [after] if label == "meat" else range(after + 1):
        row = _row(label, after, task)
        rows.append(row)
        total, correct, classes = row["total"], row["correct"], len(TASKS[task]["classes"])
        truth = np.arange(total) % classes
        guess = np.where(np.arange(total) < correct, truth, (truth + 1) % classes)
        for name, values in zip(
            columns,
            (
                [TASKS[task]["name"]] * total,
                [f"{task}-{i:05d}" for i in range(total)],
                truth.tolist(),
                guess.tolist(),
                [0.5] * total,
            ),
            strict=True,
        ):
            columns[name] += values
    attempt.write("predictions.parquet", parquet(columns))
    star = label == "meat"
    return {
        "result": {
            "rewrites": not star,
            "rows": rows,
            "canary": _row(label, after, after - 1) if star and after else None,
        }
    }


def _row(label: str, after: int, task: int) -> dict[str, Any]:
    drift = after if label == "finetune" else task
    return {
        "task": TASKS[task]["name"],
        "correct": round(IMAGES[task] * accuracy(label, after, task)),
        "total": IMAGES[task],
        "logits_sha256": hashlib.sha256(f"{label}{task}{drift}".encode()).hexdigest(),
    }
