"""The `evaluate` stage of a task: counts of correct predictions, and a digest of all logits.

It measures one row of the accuracy matrix: start reading at `evaluate_task`. Evaluation reads the
test split, or in a search the validation split (`StageJob.split`). Training does not read the test
split; it validates after each epoch with `accuracy`.
"""

from __future__ import annotations

import hashlib
import io
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from workers import dist
from workers.data.feed import Feed
from workers.errors import DamagedArtifact, SourceChanged, UserError
from workers.job import StageJob, Task
from workers.methods.base import Method
from workers.methods.bases.class_incremental import ClassIncremental
from workers.methods.protocols import InfersTask, list_candidates
from workers.restore import restore_finished_method

# Part of the keys of these stages. Increase it if evaluation gives different numbers.
EVALUATE_REVISION = 1
TOP = 5  # k of the top-k accuracy `correct_top5`


class Answers(NamedTuple):
    """Outputs of a method for n images of one task, on the CPU.

    Attributes:
        keys: Keys of the images in their split.
        labels: Positions in the class list of the task, (n,).
        logits: Float32 (n, outputs) of the competing outputs (see `answers`).
        picks: Tensors (n,) by name, from `compute_logits_and_picks`: `choice`, `confidence` and
            `task_aware`, if the method has them.
    """

    keys: list[str]
    labels: list[int]
    logits: Tensor
    picks: dict[str, Tensor]


@torch.no_grad()
def accuracy(method: Method, feed: Feed, group: dist.Group) -> tuple[int, int]:
    """Return the number of correct predictions and the number of images in `feed`, over all ranks.

    A prediction is the largest output of `answers`. The training mode of the method is restored
    afterwards.
    """
    was_training = method.training
    method.eval()
    counts = torch.zeros(2, dtype=torch.int64, device=group.device)
    for batch in feed.evaluate():
        for index in batch.tasks.unique().tolist():
            rows = batch.tasks == index
            task = feed.tasks[index].name
            labels = batch.labels[rows] + first_column(method, task)
            is_correct = answers(method, batch.images[rows], task).argmax(1) == labels
            counts += torch.stack([is_correct.sum(), rows.sum()])
    method.train(was_training)
    correct, total = group.sum(counts).tolist()
    return correct, total


def answers(method: Method, images: Tensor, task: str) -> Tensor:
    """Return the logits over the outputs that compete in the method's scenario.

    In scenario `class` the outputs are all classes so far, in scenario `domain` the classes that
    all tasks share, and in scenario `task` the classes of `task`.
    """
    if method.scenario == "task":
        return method.logits(images, task)
    return merge_domains(method, method.logits(images, None))


def merge_domains(method: Method, logits: Tensor) -> Tensor:
    """In scenario `domain` return the largest output of each class: (b, tasks * K) -> (b, K).

    In other scenarios, and with one head for all tasks, the logits are returned unchanged.
    """
    if method.scenario != "domain":
        return logits
    num_classes = method.heads[method.heads.names[0]].out_features
    merged: Tensor = logits.unflatten(1, (-1, num_classes)).amax(1)
    return merged


def first_column(method: Method, task: str) -> int:
    """Return the column of the first class of `task` in the logits of `answers`."""
    if method.scenario != "class":
        return 0
    first: int = task_slice(method, task).start
    return first


def task_slice(method: Method, task: str) -> slice:
    """Return the positions of the classes of `task` in the output space of all tasks."""
    assert isinstance(method, ClassIncremental)
    return method.class_slices()[task]


def evaluate_task(
    job: StageJob, group: dist.Group, report: Any
) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Measure one row of the accuracy matrix.

    If a later stage can change the outputs on earlier tasks, the row has all tasks in
    `job.measured`. Otherwise it has only this task. The previous task is then measured again as a
    canary: its logits should have the same digest as in its own row. The report compares them.

    Args:
        job: The stage.
        group: The rank.
        report: Called with the progress.

    Returns:
        The file of the predictions by name, and the manifest.
    """
    assert job.task is not None
    method = restore_finished_method(job, group)
    rewrites = method.changes_past_predictions(job.scenario)
    tasks = [task for task in job.tasks if task.name in job.measured]
    measured_tasks = tasks if rewrites else [job.task]
    rows: list[dict[str, Any]] = []
    tables: list[pa.Table] = []
    for task in measured_tasks:
        report({"stage": job.id, "task": task.name, "done": len(rows), "of": len(measured_tasks)})
        shares = group.gather(compute_logits(job, method, task, group))
        row, table = result(method, task, in_order(shares))
        rows.append(row)
        tables.append(table)
    buffer = io.BytesIO()
    pq.write_table(pa.concat_tables(tables), buffer)
    earlier_tasks = [task for task in tasks if task != job.task]
    canary_row: dict[str, Any] | None = None
    if earlier_tasks and not rewrites:
        canary_row = canary(job, method, earlier_tasks[-1], group)
    matrix_row = {"rewrites": rewrites, "rows": rows, "canary": canary_row}
    if job.following is not None:
        matrix_row["next"] = measure_following(job, method, job.following, group)
    return {"predictions.parquet": buffer.getvalue()}, {"kind": "evaluate", "result": matrix_row}


@torch.no_grad()
def measure_following(
    job: StageJob, method: Method, task: Task, group: dist.Group
) -> dict[str, Any]:
    """Count the correct predictions on a task that the method has not learned.

    This is the entry R[j - 1, j] of the accuracy matrix (Lopez-Paz and Ranzato 2017). The scenario
    is `domain`, so all tasks have the same classes.

    Args:
        job: The stage.
        method: The method after the last task.
        task: The next task.
        group: The rank.
    """
    correct = total = torch.zeros((), dtype=torch.int64, device=group.device)
    for batch in Feed(job, (task,), job.split, group, training=False).evaluate():
        if isinstance(method, InfersTask) and method.candidates():
            choice, _ = method.infer(batch.images)
            logits = method.answer(batch.images, choice, None)
        else:
            logits = merge_domains(method, method.logits(batch.images, None))
        correct = correct + (logits.argmax(1) == batch.labels).sum()
        total = total + len(batch.labels)
    counts = group.sum(torch.stack([correct, total])).tolist()
    return {"task": task.name, "correct": counts[0], "total": counts[1]}


@torch.no_grad()
def compute_logits(job: StageJob, method: Method, task: Task, group: dist.Group) -> list[Answers]:
    """Return the method's outputs on this rank's share of a task's images, one entry per batch.

    The images are from `job.split`.
    """
    feed = Feed(job, (task,), job.split, group, training=False)
    batches: list[Answers] = []
    for batch in feed.evaluate():
        logits, picks = compute_logits_and_picks(method, batch.images, task.name)
        cpu_picks = {name: tensor.cpu() for name, tensor in picks.items()}
        keys = list(batch.keys or [])
        batches.append(Answers(keys, batch.labels.tolist(), logits.float().cpu(), cpu_picks))
    return batches


def compute_logits_and_picks(
    method: Method, images: Tensor, task: str
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the logits of `answers`, and further predictions for each image, by name.

    The further predictions are:

    - `choice` (b,) and `confidence` (b,), if the method infers the task: an index in
      `method.candidates()` (tasks, or groups of tasks), and the confidence in this choice;
    - `task_aware` (b,), the predicted class among the classes of `task` if the method is told the
      task: in the scenarios `class` and `domain` of a method that infers the task, and in scenario
      `domain` of any other method with a head per task.

    For all other methods the dict is empty.
    """
    if isinstance(method, InfersTask) and method.candidates():
        choice, confidence = method.infer(images)
        picks = {"choice": choice, "confidence": confidence}
        if method.scenario == "task":
            return method.answer(images, choice, task), picks
        picks["task_aware"] = method.logits(images, task).argmax(1)
        return method.answer(images, choice, None), picks
    if method.scenario == "domain" and not method.heads.is_shared:
        logits = method.logits(images, None)
        told = logits[:, task_slice(method, task)].argmax(1)
        return merge_domains(method, logits), {"task_aware": told}
    return answers(method, images, task), {}


def in_order(shares: list[list[Answers]]) -> Answers:
    """Join the outputs of all ranks in table order, which does not depend on the number of ranks.

    Args:
        shares: Outputs per rank, batch by batch. Rank j % world has computed batch j.
    """
    batches = dist.interleave(shares)
    keys: list[str] = []
    labels: list[int] = []
    for batch in batches:
        keys += batch.keys
        labels += batch.labels
    logits = torch.cat([batch.logits for batch in batches])
    picks: dict[str, Tensor] = {}
    for name in batches[0].picks:
        picks[name] = torch.cat([batch.picks[name] for batch in batches])
    return Answers(keys, labels, logits, picks)


def result(method: Method, task: Task, measured: Answers) -> tuple[dict[str, Any], pa.Table]:
    """Summarise the outputs of a method on one task.

    In scenario `class`, labels and predictions are positions in the output space of all classes so
    far. `correct_task_aware` then counts the images whose prediction is correct among the classes
    of their own task. In scenario `domain` it counts correct predictions of the own task's head.

    Args:
        method: The method.
        task: The measured task.
        measured: The outputs on the task.

    Returns:
        Counts with a digest of the logits, and a table with one row per image.

    Raises:
        UserError: If a logit is not finite.
    """
    logits = measured.logits
    picks = measured.picks
    labels = torch.tensor(measured.labels)
    logit_bytes = logits.contiguous().numpy().tobytes()
    row: dict[str, Any] = {
        "task": task.name,
        "total": len(measured.keys),
        "logits_sha256": hashlib.sha256(logit_bytes).hexdigest(),
    }
    if method.scenario == "class":
        columns = task_slice(method, task.name)
        task_aware = picks.get("task_aware", logits[:, columns].argmax(1))
        row["correct_task_aware"] = int((task_aware == labels).sum())
        labels = labels + columns.start
    elif "task_aware" in picks:
        row["correct_task_aware"] = int((picks["task_aware"] == labels).sum())
    if not bool(torch.isfinite(logits).all()):
        raise UserError(
            f"some answers on task {task.name!r} are not finite numbers; training went wrong, "
            "lower train.lr, set train.clip=1, or use train.precision=fp32"
        )
    confidence, predicted = logits.softmax(1).max(1)
    top = logits.topk(min(TOP, logits.shape[1])).indices
    row["correct"] = int((predicted == labels).sum())
    row["correct_top5"] = int((top == labels[:, None]).sum())
    columns_by_name: dict[str, Any] = {
        "task": [task.name] * len(measured.keys),
        "key": measured.keys,
        "label": labels.tolist(),
        "prediction": predicted.tolist(),
        "confidence": pa.array(confidence.tolist(), pa.float32()),
    }
    if "choice" in picks:
        candidates = list_candidates(method)
        names = list(candidates)
        row["picks"] = count_picks(candidates, task.name, picks["choice"], picks["confidence"])
        columns_by_name["picked"] = [names[choice] for choice in picks["choice"].tolist()]
        columns_by_name["picked_confidence"] = pa.array(picks["confidence"].tolist(), pa.float32())
    return row, pa.table(columns_by_name)


def count_picks(
    candidates: dict[str, tuple[str, ...]], task: str, choices: Tensor, confidence: Tensor
) -> dict[str, Any]:
    """Summarise the candidates that a method picked for the images of `task`.

    Args:
        candidates: Candidate -> the tasks for which it is the right choice (see `InfersTask`).
        task: Name of the task.
        choices: Indices among `candidates`, (n,).
        confidence: Confidence of each pick, (n,).

    Returns:
        The names of the candidates, the number of picks of each, the number of correct picks, and
        the mean confidence of correct and of wrong picks (None if there are no such picks).
    """
    is_right_candidate = torch.tensor([task in tasks for tasks in candidates.values()])
    is_right = is_right_candidate[choices]
    return {
        "candidates": list(candidates),
        "picked": choices.bincount(minlength=len(candidates)).tolist(),
        "right": int(is_right.sum()),
        "confidence_right": _mean(confidence[is_right]),
        "confidence_wrong": _mean(confidence[~is_right]),
    }


def _mean(values: Tensor) -> float | None:
    if not len(values):
        return None
    return float(values.double().mean())


def canary(
    job: StageJob, method: Method, earlier_task: Task, group: dist.Group
) -> dict[str, Any] | None:
    """Return the counts and digest of an earlier task, measured with the current method.

    Return None on all ranks if any rank finds the task's data deleted or damaged.
    """
    share: list[Answers] | None = None
    try:
        share = compute_logits(job, method, earlier_task, group)
    except (FileNotFoundError, SourceChanged):
        pass
    except DamagedArtifact as error:
        if error.key != earlier_task.data:
            raise
    shares = group.gather(share)  # also without data, so that no other rank waits in vain
    complete_shares = [share for share in shares if share is not None]
    if len(complete_shares) < len(shares):
        return None
    row, _ = result(method, earlier_task, in_order(complete_shares))
    return row
