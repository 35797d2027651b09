"""Accuracy of a finished task from integer counts, on test data that nothing else reads."""

from __future__ import annotations

import hashlib
import io
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from workers import dist
from workers.artefact import Artefact
from workers.data.feed import Feed
from workers.errors import DamagedArtefact
from workers.job import StageJob, Task
from workers.methods import METHODS
from workers.methods.base import Method
from workers.taskstate import Carried, TaskState

CANARY_BATCHES = 2


@torch.no_grad()
def accuracy(method: Method, feed: Feed, group: dist.Group) -> tuple[int, int]:
    """Correct and total over all ranks; the method's mode is put back afterwards."""
    was_training = method.training
    method.eval()
    counts = torch.zeros(2, dtype=torch.int64, device=group.device)
    for batch in feed.evaluate():
        for index in batch.tasks.unique().tolist():
            rows = batch.tasks == index
            right = method.logits(batch.images[rows], feed.tasks[index].name).argmax(1) == batch.labels[rows]
            counts += torch.stack([right.sum(), rows.sum()])
    method.train(was_training)
    correct, total = group.sum(counts).tolist()
    return correct, total


def evaluate_task(job: StageJob, group: dist.Group, report: Any) -> tuple[dict[str, bytes], dict[str, Any]]:
    """A row of the matrix: every task that this stage may have changed, and for methods that change none, this task and a
    check that loading it leaves the answers on the one before as they were."""
    assert job.task is not None
    method = served(job, group)
    rows: list[dict[str, Any]] = []
    tables: list[pa.Table] = []
    tasks = job.tasks if method.rewrites() else (job.task,)
    for done, task in enumerate(tasks):
        report({"stage": job.id, "task": task.name, "done": done, "of": len(tasks)})
        row, table = predictions(job, method, task, group)
        rows.append(row)
        tables.append(table)
    buffer = io.BytesIO()
    pq.write_table(pa.concat_tables(tables), buffer)
    return {"predictions.parquet": buffer.getvalue()}, {"kind": "evaluate", "result": {"rows": rows, "canary": canary(job, method, group)}}


def served(job: StageJob, group: dist.Group, only: str | None = None) -> Method:
    """The method with its finished tasks loaded, as it stands after this job's stage; `only` one of them if named."""
    from workers.loop import load_backbone, settings_of

    method = METHODS[job.method](load_backbone(job), settings_of(job), job.seed)
    for task, key in job.states.items():
        if only in (None, task):
            artefact = Artefact.need(job.root, key)
            method.load(TaskState.from_bytes(artefact.read("task.safetensors"), f"state of task {task!r} in {key}"))
    if job.previous is not None:
        artefact = Artefact.need(job.root, job.previous)
        method.attach(Carried.from_bytes(artefact.read("carried.safetensors"), f"carried state of {job.previous}"))
    return method.to(group.device).eval()


@torch.no_grad()
def predictions(job: StageJob, method: Method, task: Task, group: dist.Group) -> tuple[dict[str, Any], pa.Table]:
    """Counts, a digest of all logits in test order, and one line per test image."""
    feed = Feed(job, (task,), "test", group, training=False)
    mine: list[tuple[list[str], list[int], torch.Tensor]] = []
    for batch in feed.evaluate():
        mine.append((list(batch.keys or []), batch.labels.tolist(), method.logits(batch.images, task.name).float().cpu()))
    gathered = group.gather(mine)  # whole batches went round the ranks in turn
    batches = [gathered[i % group.world][i // group.world] for i in range(sum(map(len, gathered)))]
    keys = [k for b in batches for k in b[0]]
    labels = torch.tensor([label for b in batches for label in b[1]])
    logits = torch.cat([b[2] for b in batches])
    confidence, predicted = logits.softmax(1).max(1)
    row = {"task": task.name, "correct": int((predicted == labels).sum()), "total": len(labels),
           "logits_sha256": hashlib.sha256(logits.contiguous().numpy().tobytes()).hexdigest()}
    table = pa.table({"task": [task.name] * len(keys), "key": keys, "label": labels.tolist(), "prediction": predicted.tolist(),
                      "confidence": pa.array(confidence.tolist(), pa.float32())})
    return row, table


@torch.no_grad()
def canary(job: StageJob, method: Method, group: dist.Group) -> dict[str, Any] | None:
    """For methods that never change an old answer: the logits of the task before, alone and beside this task, compared
    bit by bit on a few batches. None where there is no task before, or its test data is gone."""
    if method.rewrites() or len(job.tasks) < 2:
        return None
    old = job.tasks[0]
    try:
        feed = Feed(job, (old,), "test", group, training=False)
        alone, equal = served(job, group, only=old.name), True
        for count, batch in enumerate(feed.evaluate()):
            if count == CANARY_BATCHES:
                break
            equal = equal and torch.equal(alone.logits(batch.images, old.name), method.logits(batch.images, old.name))
    except (FileNotFoundError, DamagedArtefact):
        return None
    return {"task": old.name, "equal": all(group.gather(equal))}
