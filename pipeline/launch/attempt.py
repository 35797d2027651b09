"""Attempt a stage: run it, and turn its outcome or error into an event.

Both executors use this module. The walk (pipeline/graph/walk.py) decides from the kind of the event
whether the stage is tried again.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch

from pipeline.data import in_place, ingest
from pipeline.graph import failures, raw_data
from pipeline.graph.stage import Stage
from pipeline.graph.store import Store
from pipeline.graph.walk import Event, EventKind
from pipeline.launch.limits import Deadline, StageTimeout
from workers import dist, preemption
from workers.errors import DamagedArtifact, UserError
from workers.job import StageJob
from workers.loop import WAITING
from workers.storage.artifact import Artifact

Manifest = dict[str, Any]
Progress = Callable[[Event], None]  # called with events that do not change the state of a stage
RunOnDriver = Callable[[Stage], Manifest]  # runs a stage without a job: the report


def attempt_stage(
    stage: Stage, run: Callable[[], Manifest], storage: str, group: dist.Group | None = None
) -> Event:
    """Run a stage and return the event with its outcome. Errors of the stage become events, too.

    Args:
        stage: The stage.
        run: Runs the stage and returns its manifest.
        storage: URI of the storage. The traceback of an unexpected error is written into it.
        group: This rank and its group, for the report about a failure. None: there is one rank.
    """
    try:
        return Event(EventKind.DONE, stage.id, body=run())
    except preemption.Preempted:
        return Event(EventKind.MOVED, stage.id, "its group was asked to leave, its state is saved")
    except DamagedArtifact as error:
        return Event(EventKind.DAMAGED, stage.id, str(error), key=error.key)
    except StageTimeout as error:
        return Event(EventKind.FAILED, stage.id, str(error), body=describe_origin(group))
    except UserError as error:
        return Event(
            EventKind.FAILED, stage.id, str(error), final=True, body=describe_origin(group)
        )
    except dist.MissingRanks as error:
        return Event(EventKind.LOST, stage.id, str(error))
    except Exception as error:
        if "/gloo/" in str(error) or isinstance(error, torch.distributed.DistError):
            # A collective fails on all ranks if one rank is gone.
            return Event(EventKind.LOST, stage.id, "a worker of its group died")
        group = group or dist.Group()
        trace = failures.keep(storage, stage.id, stage.key, error, group.rank, group.world)
        reason = failures.describe_exception(error)
        if isinstance(error, torch.OutOfMemoryError):
            reason = explain_memory(stage, error)
        message = f"{reason}; traceback: {trace}"
        return Event(EventKind.FAILED, stage.id, message, body=describe_origin(group))


def explain_memory(stage: Stage, error: torch.OutOfMemoryError) -> str:
    """Return a message that a GPU has too little memory for a stage, with the remedies.

    Args:
        stage: The stage that failed.
        error: The error of torch. Its text contains the size of the failed allocation.
    """
    asked = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
    allocation = f" (an allocation of {asked[1]} failed)" if asked else ""
    if not stage.inputs.get("train") or not isinstance(stage.job, StageJob):
        return (
            f"the memory of the GPU does not suffice for {stage.id!r}{allocation}; give it "
            "a larger share of a GPU (cluster.gpus_per_worker, or cluster.stages)"
        )
    train = stage.job.train
    parts = f"in {train.accumulate} parts" if train.accumulate > 1 else "in one part"
    remedies = ["raise train.accumulate, which gives the same batches in more parts"]
    if train.precision != "bf16":
        remedies.append("set train.precision to bf16")
    remedies.append("lower train.batch_size")
    remedies.append("give it a larger share of a GPU (cluster.gpus_per_worker)")
    return (
        f"the memory of the GPU does not suffice for batches of {train.batch_size} images {parts}, "
        f"in {train.precision}{allocation}; {', '.join(remedies[:-1])}, or {remedies[-1]}"
    )


def describe_origin(group: dist.Group | None) -> dict[str, Any]:
    """Return where an attempt failed: host, rank and log file of this process."""
    rank = group.rank if group is not None else 0
    return {"host": platform.node(), "rank": rank, "log": failures.log_path()}


def progress_event(stage_id: str, body: dict[str, Any]) -> Event:
    """Return the event for a report of a worker: a checkpoint, or other progress."""
    if "checkpoint" in body:
        return Event(EventKind.CHECKPOINT, stage_id, body=body["checkpoint"])
    return Event(EventKind.PROGRESS, stage_id, body=body)


def run_ingest(
    store: Store,
    stage: Stage,
    map_fn: Callable[..., Iterable[Any]],
    progress: Progress,
    deadline: Deadline,
) -> Manifest:
    """Run an ingest stage and return its manifest.

    Args:
        store: Store of the result.
        stage: The ingest stage.
        map_fn: `map`, or a parallel function with the same signature.
        progress: Called with the progress events of the stage.
        deadline: Deadline of this attempt.

    Raises:
        StageTimeout: If the stage reports its progress after the deadline.
    """

    def report(body: dict[str, Any]) -> None:
        deadline.check()
        progress(Event(EventKind.PROGRESS, stage.id, body=body))

    def compute() -> Manifest:
        card = stage.job.card
        read = ingest.ingest if in_place.get_shard_urls(card) is None else in_place.index_shards
        labels = {"stage": stage.id, "step": "ingest"}
        manifest = read(card, store.root, stage.key, map_fn, labels, report, stage.job.previous)
        artifact = Artifact.need(store.root, stage.key)
        files = dict(stage.job.files)
        raw_data.record_ingest(store, card, stage.inputs["source"], artifact, files)
        return dict(manifest)

    return store.compute_once(stage.key, compute, on_wait=lambda: report(dict(WAITING)))
