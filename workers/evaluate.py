"""Accuracy of a finished task from integer counts, on test data that nothing else reads; for a
search on validation data."""

from __future__ import annotations

import hashlib
import io
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from workers import dist
from workers.data.feed import Feed
from workers.errors import DamagedArtifact, UserError
from workers.job import StageJob, Task
from workers.methods.base import Method
from workers.methods.bases.class_incremental import ClassIncremental
from workers.methods.protocols import InfersTask, candidates_of
from workers.restore import finished_method

EVALUATE_REVISION = 1  # raise it when measuring gives other numbers
TOP = 5
Answers = tuple[
    list[str], list[int], Tensor, dict[str, Tensor]
]  # of one batch: keys, labels inside the task, logits, picks


@torch.no_grad()
def accuracy(method: Method, feed: Feed, group: dist.Group) -> tuple[int, int]:
    """Correct and total over all ranks; the method's mode is put back afterwards. In scenario
    `class` all outputs compete."""
    was_training = method.training
    method.eval()
    counts = torch.zeros(2, dtype=torch.int64, device=group.device)
    for batch in feed.evaluate():
        for index in batch.tasks.unique().tolist():
            rows, task = batch.tasks == index, feed.tasks[index].name
            right = answers(method, batch.images[rows], task).argmax(1) == batch.labels[
                rows
            ] + first_column(method, task)
            counts += torch.stack([right.sum(), rows.sum()])
    method.train(was_training)
    correct, total = group.sum(counts).tolist()
    return correct, total


def answers(method: Method, images: Tensor, task: str) -> Tensor:
    """Logits as the scenario asks for them: over the classes of `task`, or over all classes so
    far."""
    return method.logits(images, None if method.scenario == "class" else task)


def first_column(method: Method, task: str) -> int:
    """Where the classes of `task` begin among those logits."""
    return task_slice(method, task).start if method.scenario == "class" else 0


def task_slice(method: Method, task: str) -> slice:
    """Return the positions of the classes of `task` in the output space of scenario `class`."""
    assert isinstance(method, ClassIncremental)
    return method.class_slices()[task]


def evaluate_task(
    job: StageJob, group: dist.Group, report: Any
) -> tuple[dict[str, bytes], dict[str, Any]]:
    """A row of the matrix: every task that this stage may have changed. For a method that changes
    none, this task, and the one before as a canary: measured again beside the new one, its logits
    must have the digest that they had."""
    assert job.task is not None
    method = finished_method(job, group)
    rewrites = method.changes_past_predictions(job.scenario)
    tasks = [t for t in job.tasks if t.name in job.measured]
    before = [] if rewrites else [t for t in tasks if t != job.task]
    rows: list[dict[str, Any]] = []
    tables: list[pa.Table] = []
    for task in tasks if rewrites else [job.task]:
        report({"stage": job.id, "task": task.name, "done": len(rows), "of": len(tasks)})
        row, table = result(
            method, task, in_order(group.gather(logits_of(job, method, task, group)))
        )
        rows.append(row)
        tables.append(table)
    buffer = io.BytesIO()
    pq.write_table(pa.concat_tables(tables), buffer)
    found = {
        "rewrites": rewrites,
        "rows": rows,
        "canary": canary(job, method, before[-1], group) if before else None,
    }
    return {"predictions.parquet": buffer.getvalue()}, {"kind": "evaluate", "result": found}


@torch.no_grad()
def logits_of(job: StageJob, method: Method, task: Task, group: dist.Group) -> list[Answers]:
    """What the method answers on this rank's share of the task's images of the job's split, batch
    by batch."""
    feed = Feed(job, (task,), job.split, group, training=False)
    found = []
    for batch in feed.evaluate():
        logits, picks = with_picks(method, batch.images, task.name)
        found.append(
            (
                list(batch.keys or []),
                batch.labels.tolist(),
                logits.float().cpu(),
                {name: t.cpu() for name, t in picks.items()},
            )
        )
    return found


def with_picks(method: Method, images: Tensor, task: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits as the scenario asks for them; of a method that finds out by itself what an image
    belongs to also `place` (b,) among its candidates and `confidence` (b,), and in scenario `class`
    what it answers when it is `told` (b,)."""
    if not isinstance(method, InfersTask) or not method.candidates():
        return answers(method, images, task), {}
    place, confidence = method.infer(images)
    picks = {"place": place, "confidence": confidence}
    if method.scenario == "class":
        return method.answer(images, place, None), picks | {
            "told": method.logits(images, task).argmax(1)
        }
    return method.answer(images, place, task), picks


def in_order(shares: list[list[Answers]]) -> Answers:
    """The answers of all ranks in test order: whole batches went round the ranks in turn."""
    batches = dist.interleave(shares)
    keys, labels = [k for b in batches for k in b[0]], [label for b in batches for label in b[1]]
    return (
        keys,
        labels,
        torch.cat([b[2] for b in batches]),
        {name: torch.cat([b[3][name] for b in batches]) for name in batches[0][3]},
    )


def result(method: Method, task: Task, found: Answers) -> tuple[dict[str, Any], pa.Table]:
    """Counts, a digest of all logits in test order, and one line per test image. In scenario
    `class` labels and predictions are positions in the one output space, and `correct_task_aware`
    counts what is right among the task's own classes."""
    keys, labels, logits, picks = found[0], torch.tensor(found[1]), found[2], found[3]
    row: dict[str, Any] = {
        "task": task.name,
        "total": len(keys),
        "logits_sha256": hashlib.sha256(logits.contiguous().numpy().tobytes()).hexdigest(),
    }
    if method.scenario == "class":
        own = task_slice(method, task.name)
        row["correct_task_aware"] = int(
            (picks.get("told", logits[:, own].argmax(1)) == labels).sum()
        )
        labels = labels + own.start
    if not bool(torch.isfinite(logits).all()):
        raise UserError(
            f"some answers on task {task.name!r} are not finite numbers; training went wrong, "
            "lower train.lr, set train.clip=1, or use "
            "train.precision=fp32"
        )
    confidence, predicted = logits.softmax(1).max(1)
    row["correct"] = int((predicted == labels).sum())
    row["correct_top5"] = int(
        (logits.topk(min(TOP, logits.shape[1])).indices == labels[:, None]).sum()
    )
    table = pa.table(
        {
            "task": [task.name] * len(keys),
            "key": keys,
            "label": labels.tolist(),
            "prediction": predicted.tolist(),
            "confidence": pa.array(confidence.tolist(), pa.float32()),
        }
    )
    if picks:
        row["picks"] = picks_of(
            candidates_of(method), task.name, picks["place"], picks["confidence"]
        )
        names = [*candidates_of(method)]
        table = table.append_column(
            "picked", pa.array([names[place] for place in picks["place"].tolist()])
        )
        table = table.append_column(
            "picked_confidence", pa.array(picks["confidence"].tolist(), pa.float32())
        )
    return row, table


def picks_of(
    candidates: dict[str, tuple[str, ...]], task: str, places: Tensor, confidence: Tensor
) -> dict[str, Any]:
    """What there was to pick from and how often each was picked for images of `task`, how many
    picks were right, and the mean confidence of right and of wrong ones, None where there are
    none."""
    right = torch.tensor([task in tasks for tasks in candidates.values()])[places]
    means = {
        name: float(some.double().mean()) if len(some) else None
        for name, some in (
            ("confidence_right", confidence[right]),
            ("confidence_wrong", confidence[~right]),
        )
    }
    return {
        "candidates": [*candidates],
        "picked": places.bincount(minlength=len(candidates)).tolist(),
        "right": int(right.sum()),
        **means,
    }


def canary(job: StageJob, method: Method, old: Task, group: dist.Group) -> dict[str, Any] | None:
    """The row of the task before, measured beside the new one; None where any rank finds its test
    data gone or damaged."""
    mine: list[Answers] | None
    try:
        mine = logits_of(job, method, old, group)
    except FileNotFoundError:
        mine = None
    except DamagedArtifact as error:
        if error.key != old.data:
            raise
        mine = None
    shares = group.gather(mine)  # no rank goes on alone
    there = [share for share in shares if share is not None]
    return result(method, old, in_order(there))[0] if len(there) == len(shares) else None
