"""A small finished run, written to a store without training.

It has a base task, three tasks and three methods.
"""

from __future__ import annotations

import hashlib
import io
import math
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
# Label -> method.
METHODS = {"meat": "meat", "hat-small": "hat", "finetune": "finetune"}
IMAGES = [200, 120, 150, 61]  # test images of each task
# Backbone: number of blocks, patches along one side of an image, width, hidden width of an MLP.
DEPTH, GRID, WIDTH, HIDDEN = 4, 8, 32, 128
BACKBONE_BYTES = 220_000
TRAINED_PARAMETERS = {"meat": 8_000, "hat-small": 12_000, "finetune": 55_000}


def accuracy(label: str, after: int, task: int) -> float:
    """Return the accuracy on `task` after the task `after`; both are positions in the stream.

    meat (a star) and hat-small (a chain) never forget; finetune (a chain) does.
    """
    best = [0.95, 0.84, 0.71, 0.9][task]
    if label == "finetune":
        return max(best + 0.02 - 0.19 * (after - task), 0.21)
    if label == "hat-small" and task:
        return best - 0.05
    return best


def stages() -> list[Stage]:
    """Return the stages of the graph, in topological order.

    The key of a stage is derived from its id alone.
    """
    cards = dict.fromkeys(task["card"] for task in TASKS)
    graph_stages = [_stage(f"data/{card}", "ingest") for card in cards]
    graph_stages.append(_stage("backbone", "backbone", ("data/shapes",), task="shapes"))
    for label, method in METHODS.items():
        graph_stages.append(
            _stage(f"{label}/shapes/evaluate", "evaluate", ("backbone",), label, "shapes")
        )
        previous: tuple[str, ...] = ()
        for task in TASKS[1:]:
            name = task["name"]
            train = f"{label}/{name}/train"
            data = f"data/{task['card']}"
            train_parents = ("backbone", data, *previous)
            graph_stages.append(_stage(train, "train", train_parents, label, name))
            if method != "meat":
                previous = (train,)
            evaluate_parents = ("backbone", data, train)
            graph_stages.append(
                _stage(f"{label}/{name}/evaluate", "evaluate", evaluate_parents, label, name)
            )
    report_parents = tuple(stage.id for stage in graph_stages if stage.step == "evaluate")
    graph_stages.append(_stage("report", "report", report_parents))
    return graph_stages


def _stage(
    stage_id: str,
    step: str,
    parents: tuple[str, ...] = (),
    label: str | None = None,
    task: str | None = None,
) -> Stage:
    key = hashlib.sha256(stage_id.encode()).hexdigest()[:32]
    inputs: dict[str, Any] = {"revision": 1}
    if step == "backbone":
        inputs["backbone"] = {"img_size": 32, "mean": [0.485, 0.456, 0.406]}
    if label:
        inputs = {
            "method": METHODS[label],
            "settings": {"lam": 0.75},
            "train": {"epochs": 6, "lr": 0.001},
        }
    return Stage(stage_id, step, key, inputs, parents, label, task)


def record(name: str = "tiny") -> Any:
    """Return the record of the run, as `run.json` holds it."""
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
        "data": {"val_fraction": 0.1},
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
    """Write the results of all stages except the report.

    Args:
        only: Ids of the stages to write; None writes all.

    Returns:
        Each written stage with its artifact's manifest.
    """
    write_files_of = {
        "ingest": _ingest,
        "backbone": _backbone,
        "train": _train,
        "evaluate": _evaluate,
    }
    written = []
    for stage in stages():
        if stage.step == "report":
            continue
        if only is not None and stage.id not in only:
            continue
        attempt = Attempt(join(storage, "stages"), stage.key)
        body = write_files_of[stage.step](attempt, stage)
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
        written.append((stage, Artifact.need(join(storage, "stages"), stage.key).manifest))
    return written


def parquet(columns: dict[str, list[Any]]) -> bytes:
    """Return a table of these columns as the bytes of a Parquet file."""
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue()


def _index(name: str | None) -> int:
    return [task["name"] for task in TASKS].index(name)


def _ingest(attempt: Attempt, stage: Stage) -> dict[str, Any]:
    """Write one test image per class, a gradient with a bright spot, in one shard."""
    classes: list[str] = []
    for task in TASKS:
        if f"data/{task['card']}" == stage.id:
            classes += task["classes"]
    shard = io.BytesIO()
    rows = []
    with tarfile.open(fileobj=shard, mode="w") as tar:
        for index, name in enumerate(classes):
            image = _image(index)
            info = tarfile.TarInfo(f"{index:06d}.png")
            info.size = len(image)
            tar.addfile(info, io.BytesIO(image))
            padded_bytes = math.ceil(info.size / tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
            rows.append(
                {
                    "split": "test",
                    "key": f"{index:06d}",
                    "class": name,
                    "shard": "test-00000.tar",
                    "offset": tar.offset - padded_bytes,
                    "bytes": info.size,
                    "sha256": hashlib.sha256(image).hexdigest(),
                    "ext": "png",
                }
            )
    attempt.write("test-00000.tar", shard.getvalue())
    columns = {}
    for column in rows[0]:
        columns[column] = [row[column] for row in rows]
    attempt.write("index.parquet", parquet(columns))
    return {
        "kind": "ingest",
        "classes": classes,
        "counts": {"train": 900, "test": 211},
        "rejected": {"truncated": 2},
        "content": stage.key * 2,
    }


def _image(index: int) -> bytes:
    """Return a PNG of 60 x 40 pixels; a higher index moves the spot to the right."""
    y, x = np.mgrid[0:40, 0:60]
    spot = 180 * np.exp(-((y - 20) ** 2 + (x - 20 - 4 * index) ** 2) / 90)
    gradient = np.stack([60 + 3 * x, 90 + 2 * y, 200 - 2 * x], 2)  # (40, 60, 3)
    pixels = gradient * 0.6 + spot[..., None]
    file = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "PNG")
    return file.getvalue()


def _history(attempt: Attempt, stage: Stage, terms: dict[str, float]) -> None:
    """Write the history of 6 epochs. terms: name of a loss term -> its value in the first epoch."""
    epochs = 6
    decay = [0.65**e for e in range(epochs)]
    loss_columns = {}
    for name, value in terms.items():
        loss_columns[name] = [value * d for d in decay]
    extra_columns = {}
    if "drop_control" in terms:
        extra_columns["token_keep"] = [1 - 0.02 * e for e in range(epochs)]
    columns: dict[str, list[Any]] = {
        "epoch": list(range(epochs)),
        "lr": [1e-3 * d for d in decay],
        "loss": [0.3 + sum(terms.values()) * d for d in decay],
        **loss_columns,
        "images": [810] * epochs,
        "seconds": [2.0 + e % 2 for e in range(epochs)],
        **extra_columns,
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
    classes = tuple(TASKS[0]["classes"])
    state = TaskState("shapes", classes, "base", "d" * 64, head=_head(TASKS[0]))
    attempt.write("task.safetensors", state.to_bytes())
    _history(attempt, stage, {"ce": 1.4})
    return {"digest": "d" * 64, "parameters": BACKBONE_BYTES // 4, "bytes": BACKBONE_BYTES}


def _masks(label: str, index: int) -> dict[str, torch.Tensor]:
    """Return the masks of a task by name.

    Even columns of each mask are drawn for the task, odd ones are common to all tasks.
    """
    task_rng = torch.Generator().manual_seed(index)
    common_rng = torch.Generator().manual_seed(99)

    def mask(keep: float, *shape: int) -> torch.Tensor:
        task_scores = torch.rand(shape, generator=task_rng)
        common_scores = torch.rand(shape, generator=common_rng)
        is_even = torch.arange(shape[-1]) % 2 == 0
        return torch.where(is_even, task_scores, common_scores) < keep

    masks: dict[str, torch.Tensor] = {}
    if label == "meat":
        patches = torch.arange(GRID * GRID)
        rows = patches // GRID
        columns = patches % GRID
        centre = ((rows - 3.5).abs() + (columns - 3.5).abs()) < 6
        token_masks = [centre & mask(1 - 0.04 * (b + index), GRID * GRID) for b in range(DEPTH)]
        masks["tokens"] = torch.stack(token_masks)  # (blocks, patches)
        for b in range(DEPTH):
            masks[f"blocks.{b}.fc1"] = mask(0.9 - 0.1 * b, HIDDEN, WIDTH)
            masks[f"blocks.{b}.fc2"] = mask(0.9 - 0.1 * b, WIDTH, HIDDEN)
    elif label == "hat-small":
        for b in range(DEPTH):
            masks[f"blocks.{b}.neurons"] = mask(0.15 + 0.1 * index, HIDDEN)
    return masks


def _train(attempt: Attempt, stage: Stage) -> dict[str, Any]:
    index = _index(stage.task)
    label = str(stage.method)
    tokens: dict[str, torch.Tensor] = {}
    carried_tensors: dict[str, torch.Tensor] = {}
    terms = {"ce": 1.1 + 0.2 * index}
    if label == "meat":
        terms["drop_control"] = 0.2
    elif label == "hat-small":
        rng = torch.Generator().manual_seed(index)
        tokens["prompt"] = torch.randn(4, WIDTH, generator=rng)
        carried_tensors["weights"] = torch.zeros(1000)
    else:
        carried_tensors["weights"] = torch.zeros(BACKBONE_BYTES // 4)
    carried = Carried(carried_tensors).to_bytes()
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
    attempt.write("carried.safetensors", carried)
    _history(attempt, stage, terms)
    warnings = []
    if stage.task == "roots":
        warnings.append(
            "train.batch_size 64 is larger than the last task's train split; "
            "each epoch has one step"
        )
    is_star = label == "meat"
    return {
        "sizes": state.sizes(),
        "trained_parameters": TRAINED_PARAMETERS.get(label, 20_000),
        "carried_bytes": 0 if is_star else len(carried),
        "flops_share": 0.83 if is_star else 1.0,
        "warnings": warnings,
        "backbone_digest": "d" * 64,
    }


def _evaluate(attempt: Attempt, stage: Stage) -> dict[str, Any]:
    after = _index(stage.task)
    label = str(stage.method)
    is_star = label == "meat"
    first_task = after if is_star else 0
    rows: list[dict[str, Any]] = []
    names = ("task", "key", "label", "prediction", "confidence")
    columns: dict[str, list[Any]] = {name: [] for name in names}
    for task in range(first_task, after + 1):
        row = _row(label, after, task)
        rows.append(row)
        total = row["total"]
        num_classes = len(TASKS[task]["classes"])
        images = np.arange(total)
        labels = images % num_classes
        predictions = np.where(images < row["correct"], labels, (labels + 1) % num_classes)
        columns["task"] += [TASKS[task]["name"]] * total
        columns["key"] += [f"{task}-{i:05d}" for i in range(total)]
        columns["label"] += labels.tolist()
        columns["prediction"] += predictions.tolist()
        columns["confidence"] += [0.5] * total
    attempt.write("predictions.parquet", parquet(columns))
    canary = None
    if is_star and after:
        canary = _row(label, after, after - 1)
    return {"result": {"rewrites": not is_star, "rows": rows, "canary": canary}}


def _row(label: str, after: int, task: int) -> dict[str, Any]:
    """Return the row of `task` in the result of the evaluation after the task `after`."""
    last_change = after if label == "finetune" else task  # the task that changed the logits last
    logits = f"{label}{task}{last_change}"
    return {
        "task": TASKS[task]["name"],
        "correct": round(IMAGES[task] * accuracy(label, after, task)),
        "total": IMAGES[task],
        "logits_sha256": hashlib.sha256(logits.encode()).hexdigest(),
    }
