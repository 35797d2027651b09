"""One attempt at a stage: run it, and turn whatever happens into an event."""

from __future__ import annotations

import platform
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
from workers.loop import WAITING
from workers.storage.artifact import Artifact
from workers.storage.lock import stage_lock

Manifest = dict[str, Any]
Progress = Callable[[Event], None]
RunOnDriver = Callable[[Stage], Manifest]  # a stage without a job: the report


def attempt_stage(
    stage: Stage, run: Callable[[], Manifest], storage: str, group: dist.Group | None = None
) -> Event:
    """Run a stage and return the event that says how it ended.

    The traceback of an unexpected error is written below `storage`. group: the rank that runs the
    stage, for that file; None where there is one rank.
    """
    try:
        return Event(EventKind.DONE, stage.id, body=run())
    except preemption.Preempted:
        return Event(EventKind.MOVED, stage.id, "it is told to leave, its state is saved")
    except DamagedArtifact as error:
        return Event(EventKind.DAMAGED, stage.id, str(error), key=error.key)
    except StageTimeout as error:
        return Event(EventKind.FAILED, stage.id, str(error), body=origin_of(group))
    except UserError as error:
        return Event(EventKind.FAILED, stage.id, str(error), final=True, body=origin_of(group))
    except Exception as error:
        if "/gloo/" in str(error) or isinstance(error, torch.distributed.DistError):
            # A collective fails on all ranks when one of them is gone.
            return Event(EventKind.LOST, stage.id, "a worker of its group is gone")
        group = group or dist.Group()
        trace = failures.keep(storage, stage.id, stage.key, error, group.rank, group.world)
        message = f"{failures.describe(error)}; traceback: {trace}"
        return Event(EventKind.FAILED, stage.id, message, body=origin_of(group))


def origin_of(group: dist.Group | None) -> dict[str, Any]:
    """Return where a try failed: host, rank and log of this process."""
    rank = group.rank if group is not None else 0
    return {"host": platform.node(), "rank": rank, "log": failures.log_path()}


def progress_event(stage_id: str, body: dict[str, Any]) -> Event:
    """Return the event of what a worker reports: how far its stage is, or a checkpoint."""
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
    """Run an ingest stage and return its manifest. map_fn: `map`, or one that works in parallel.
    Raise `StageTimeout` when it reports its progress after the deadline."""

    def report(body: dict[str, Any]) -> None:
        deadline.check()
        progress(Event(EventKind.PROGRESS, stage.id, body=body))

    with stage_lock(store.root, stage.key, on_wait=lambda: report(dict(WAITING))):
        artifact = Artifact.open(store.root, stage.key)
        if artifact:  # another driver was faster
            return {**artifact.manifest, "reused": True}
        card = stage.job.card
        labels = {"stage": stage.id, "step": "ingest"}
        write = ingest.ingest
        if in_place.urls_of(card) is not None:
            write = in_place.index_shards
        manifest = write(card, store.root, stage.key, map_fn, labels, report)
        raw_data.ingested(store, card, stage.inputs["source"], manifest["raw_content"])
    return dict(manifest)
