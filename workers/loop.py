"""The train loop. THE file to read: what a worker does with a stage, from the job to the published
result."""

from __future__ import annotations

import contextlib
import io
import math
import os
import platform
import time
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from workers import dist, optim, preemption
from workers.data.batch import Batch
from workers.data.feed import Feed
from workers.data.rows import keys_of
from workers.errors import UserError
from workers.evaluate import accuracy, evaluate_task
from workers.job import StageJob
from workers.methods import METHODS
from workers.methods.base import Method, OptimPlan, Progress
from workers.model import noise, vit
from workers.restore import load_carried, load_states, new_method, settings_of
from workers.rng import derive_seed
from workers.storage import checkpoint
from workers.storage.artifact import Artifact, Attempt, cached_artifacts, content_digest
from workers.storage.checkpoint import Checkpoint
from workers.storage.lock import stage_lock
from workers.storage.taskstate import Carried, TaskState

Report = Callable[[dict[str, Any]], None]
# raise it when training gives other numbers: this loop, optim, feed, augmentation, noise, heads
TRAIN_REVISION = 1
REPORT_S = 1.0  # seconds between two progress reports of a stage
AGREE_STEPS = 8  # steps between two moments at which several ranks ask whether a checkpoint is due


def run_stage(job: StageJob, group: dist.Group, report: Report) -> dict[str, Any]:
    """Runs one stage and returns its manifest. A stage whose result stands already is not run
    again."""
    if found := standing(job, group):
        return found
    with stage_lock(job.root, job.key, group):  # another run may compute it, or have done so by now
        return standing(job, group) or _run_stage(job, group, report)


def standing(job: StageJob, group: dist.Group) -> dict[str, Any] | None:
    """The manifest of a result that is there already, marked as such."""
    found = Artifact.open(job.root, job.key) if group.rank == 0 else None
    return group.share({**found.manifest, "reused": True} if found else None)


def _run_stage(job: StageJob, group: dist.Group, report: Report) -> dict[str, Any]:
    started = time.perf_counter()
    run = {"backbone": train_backbone, "evaluate": evaluate_task}.get(job.step, train_task)
    with cached_artifacts(job.root, job.parents) as made_of:
        files, manifest = run(job, group, report)
    manifest |= {
        "stage": job.id,
        "step": job.step,
        "method": job.method,
        "task": job.task.name if job.task else None,
        "wall_s": round(time.perf_counter() - started, 3),
        "workers": group.world,
        "made_of": made_of,
        "provenance": {
            **job.provenance,
            "seed": job.seed,
            "device": device_name(group.device),
            "threads": torch.get_num_threads(),
        },
    }
    if group.rank == 0:
        attempt = Attempt(job.root, job.key)
        for name, data in files.items():
            attempt.write(name, data)
        is_first = attempt.commit(manifest)
        checkpoint.drop(job.root, job.key)
        own_content = content_digest({**manifest, "files": attempt.files})
        manifest = Artifact.need(job.root, job.key).manifest  # of two attempts, the one that stands
        if not is_first and content_digest(manifest) != own_content:
            manifest = {
                **manifest,
                "note": "another process was faster and got another content, which stands",
            }
    return manifest


def train_task(
    job: StageJob, group: dist.Group, report: Report
) -> tuple[dict[str, bytes], dict[str, Any]]:
    """One step of one task: the method on a fresh copy of the backbone, from the state that the
    step before carried on."""
    assert job.task is not None
    method = new_method(job).to(group.device)
    if method.loads_states(job.scenario):
        load_states(job, method)
    history = fit(job, method, load_carried(job), group, report)
    state, handed_on = method.finish()
    epochs = sum("loss" in row for row in history)
    trained = sum(p.numel() for p in method.parameters() if p.requires_grad) if epochs else 0
    manifest = {
        "kind": "train",
        "sizes": state.sizes(),
        "trained_parameters": trained,
        "carried_bytes": sum(t.numel() * t.element_size() for t in handed_on.tensors.values()),
        "flops_share": method.flops_share(state),
        "warnings": method.warnings(),
        "backbone_digest": method.backbone_digest,
        "epochs": epochs,
    }
    return {
        "task.safetensors": state.to_bytes(),
        "carried.safetensors": handed_on.to_bytes(),
        "history.parquet": parquet(history),
    }, manifest


def train_backbone(
    job: StageJob, group: dist.Group, report: Report
) -> tuple[dict[str, bytes], dict[str, Any]]:
    """The shared backbone: weights from the hub, a file or random, and trained on the base task
    where the stream has one."""
    torch.manual_seed(derive_seed(job.seed, "backbone"))
    backbone = vit.build(job.backbone_settings)
    vit.load_weights(backbone, job.backbone_settings)
    files: dict[str, bytes] = {}
    if job.task is not None:
        method = METHODS["finetune"](backbone, settings_of(job), job.seed)
        files["history.parquet"] = parquet(fit(job, method, None, group, report))
        digest = vit.digest_of(backbone)
        state = TaskState(
            job.task.name, job.task.classes, "base", digest, head=method.heads.export(job.task.name)
        )
        files["task.safetensors"] = state.to_bytes()
    else:
        digest = vit.digest_of(backbone)
    files["state.safetensors"] = vit.to_bytes(backbone)
    return files, {
        "kind": "backbone",
        "digest": digest,
        "parameters": sum(p.numel() for p in backbone.parameters()),
        "bytes": sum(t.numel() * t.element_size() for t in backbone.state_dict().values()),
    }


def fit(
    job: StageJob, method: Method, carried: Carried | None, group: dist.Group, report: Report
) -> list[dict[str, Any]]:
    """Epochs over the task's training data, resumed from the stage's checkpoint if there is one; a
    row per epoch."""
    assert job.task is not None
    own = job.tasks if method.trains_on == "seen" else (job.task,)
    method.keys_of = lambda task: keys_of(job.root, task, job.data.val_fraction)
    memory = {
        name: keys for name, keys in method.memory(job.task, job.step, carried).items() if keys
    }
    assert not memory or "seen" in (method.reads, method.trains_on), (
        f"{method.name} has a memory, so it must say reads = 'seen'"
    )
    tasks = tuple(t for t in job.tasks if t in own or t.name in memory)
    step = next((s for s in method.steps if s.name == job.step), None)
    epochs = job.train.epochs if step is None or step.trains else 0

    def feed_of(split: str, training: bool) -> Feed:
        return (
            Feed(job, tasks, split, group, training, memory)
            if split == "train"
            else Feed(job, own, split, group, training)
        )

    method.feed_of, method.holds_out = feed_of, bool(job.data.val_fraction)
    feed = feed_of("train", True) if epochs else None
    per_epoch = feed.steps_per_epoch if feed else 0
    total = epochs * per_epoch
    method.to(group.device)
    carried = carried and carried.to(group.device)
    rates = OptimPlan(
        job.train.lr,
        job.train.weight_decay,
        job.train.batch_size,
        optim.mean_rate_steps(total, per_epoch, job.train),
    )
    groups = method.begin(job.task, job.step, carried, rates, tasks)
    method.to(group.device)
    val = feed_of("val", False) if job.data.val_fraction else None
    if feed is None:
        return (
            [{"epoch": 0, **method.metrics(), **validated(method, val, group)}]
            if step is not None and step.measured
            else []
        )
    trained = {id(p) for g in groups for p in g["params"]}
    for p in method.parameters():
        p.requires_grad_(id(p) in trained)
    if job.train.compile:
        vit.compile_blocks(method.backbone)
    optimizer = optim.build(groups, job.train)
    method.train()
    with precision_of(job, group):
        method.precompute(feed)
    if val is not None:
        method.precompute(val)
    return _epochs(job, method, optimizer, feed, val, epochs, group, report)


def _epochs(
    job: StageJob,
    method: Method,
    optimizer: torch.optim.Optimizer,
    feed: Feed,
    val: Feed | None,
    epochs: int,
    group: dist.Group,
    report: Report,
) -> list[dict[str, Any]]:
    # one rank looks, so that none starts elsewhere
    found = checkpoint.load(job.root, job.key) if group.rank == 0 else None
    mark = group.share(found) or Checkpoint(0, 0, [], {}, {})
    best = mark.restore(method, optimizer) if mark.tensors else {}
    history, saved = list(mark.history), time.monotonic()
    meter = ProgressMeter(
        job, epochs, feed.steps_per_epoch, report if group.rank == 0 else (lambda event: None)
    )
    for epoch in range(mark.epoch, epochs):
        resumed = epoch == mark.epoch and mark.tensors
        sums = LossMeter(mark.sums if resumed else {}, group)
        first = mark.step if resumed else 0
        method.train()
        for step, batches in enumerate(feed.epoch(epoch, first), first):
            progress = Progress(epoch, step, epochs, feed.steps_per_epoch)
            torch.manual_seed(derive_seed(job.seed, "step", epoch, step, group.rank))
            sums.add(
                train_step(method, optimizer, batches, progress, job, group), batches[0].draw.size
            )
            meter.tick(progress, batches[0].draw.size, sums)
            if step + 1 < feed.steps_per_epoch and is_due(
                saved + (job.checkpoint_s or math.inf), step, group
            ):
                so_far = sums.total()
                if group.rank == 0:
                    checkpoint.save(
                        job.root,
                        job.key,
                        method,
                        optimizer,
                        best,
                        Checkpoint(epoch, step + 1, history, so_far, mark.best),
                    )
                saved = time.monotonic()
                exit_if_preempted(job, group)
        row = {
            "epoch": epoch,
            "lr": optimizer.param_groups[0]["lr"],
            **sums.means(job.id),
            **method.metrics(),
        }
        row |= validated(method, val, group)
        if job.train.keep == "best" and row.get("val_correct", -1) > mark.best.get(
            "val_correct", -1
        ):
            mark.best = {"epoch": epoch, "val_correct": row["val_correct"]}
            best = {n: t.detach().clone() for n, t in checkpoint.trained_state(method).items()}
        history.append(row)
        meter.epoch(row)
        if epoch + 1 < epochs and is_due(
            saved + (job.checkpoint_s or math.inf), AGREE_STEPS - 1, group
        ):
            if group.rank == 0:
                checkpoint.save(
                    job.root,
                    job.key,
                    method,
                    optimizer,
                    best,
                    Checkpoint(epoch + 1, 0, history, {}, mark.best),
                )
            saved = time.monotonic()
            exit_if_preempted(job, group)
    if best:
        live = checkpoint.trained_state(method)
        with torch.no_grad():
            for name, tensor in best.items():
                live[name].copy_(tensor)
    return history


def validated(method: Method, val: Feed | None, group: dist.Group) -> dict[str, int]:
    """Counts on the held-out part of train; empty where nothing is held out."""
    return (
        {}
        if val is None
        else dict(zip(("val_correct", "val_total"), accuracy(method, val, group), strict=True))
    )


def train_step(
    method: Method,
    optimizer: torch.optim.Optimizer,
    batches: list[Batch],
    progress: Progress,
    job: StageJob,
    group: dist.Group,
) -> dict[str, torch.Tensor]:
    """One optimizer step over the global batch: forward and backward on this rank's micro-batches,
    gradients summed over ranks, gate, clip, step, restore. Returns the loss and its terms, each
    this rank's share of the global mean."""
    optim.set_rate(
        optimizer,
        optim.factor(progress.global_step, progress.total, progress.steps_per_epoch, job.train),
    )
    parameters = [p for g in optimizer.param_groups for p in g["params"]]
    terms = gradients(method, optimizer, batches, progress, job, group)
    if method.sharpness():
        with optim.ascend(parameters, method.sharpness()):
            gradients(method, optimizer, batches, progress, job, group)
    method.after_backward()
    if job.train.clip:
        torch.nn.utils.clip_grad_norm_(parameters, job.train.clip)
    optimizer.step()
    method.after_step(progress)
    return terms


def gradients(
    method: Method,
    optimizer: torch.optim.Optimizer,
    batches: list[Batch],
    progress: Progress,
    job: StageJob,
    group: dist.Group,
) -> dict[str, torch.Tensor]:
    """Those of the global batch where the parameters stand, on every rank; returns the loss and its
    terms."""
    optimizer.zero_grad(set_to_none=True)
    terms: dict[str, torch.Tensor] = {}
    for batch in batches:
        noise.draw_paths(method, batch.draw)
        with precision_of(job, group):
            loss, parts = method.loss(batch, progress)
        (loss * batch.weight).backward()
        for name, value in {"loss": loss.detach(), **parts}.items():
            terms[name] = terms.get(name, 0.0) + value * batch.weight
    group.sum_gradients([p for g in optimizer.param_groups for p in g["params"]])
    return terms


def precision_of(job: StageJob, group: dist.Group) -> contextlib.AbstractContextManager[Any]:
    """The precision that losses are computed in."""
    return (
        torch.autocast(group.device.type, torch.bfloat16)
        if job.train.precision == "bf16"
        else contextlib.nullcontext()
    )


def is_due(when: float, step: int, group: dist.Group) -> bool:
    """Whether rank 0's clock has passed `when`, or it was told to leave; all ranks hear the same,
    and several ask each other only now and then."""
    if group.world > 1 and (step + 1) % AGREE_STEPS:
        return False
    return bool(group.share(time.monotonic() > when or preemption.requested.is_set()))


def exit_if_preempted(job: StageJob, group: dist.Group) -> None:
    """Right after a checkpoint. Raises Leaving, on all ranks, where rank 0 was told to go."""
    if group.share(preemption.requested.is_set()):
        raise preemption.Preempted(f"{job.id} is saved")


class LossMeter:
    """This rank's running sums of loss terms over an epoch, on the device so that no step waits for
    them; `images` counts those of all ranks. start: the totals of a checkpoint, which rank 0 goes
    on from."""

    def __init__(self, start: dict[str, float], group: dist.Group):
        mine = start if group.rank == 0 else {}
        self.values = {
            name: torch.tensor(v, dtype=torch.float64, device=group.device)
            for name, v in mine.items()
            if name != "images"
        }
        self.group, self.images = group, int(start.get("images", 0))
        self.started = time.perf_counter()

    def add(self, terms: dict[str, torch.Tensor], images: int) -> None:
        for name, value in terms.items():
            self.values[name] = self.values.get(name, 0.0) + value.double() * images
        self.images += images

    def total(self) -> dict[str, float]:
        """Sums over all ranks."""
        return {
            "images": self.images,
            **{name: float(self.group.sum(v.clone())) for name, v in self.values.items()},
        }

    def means(self, where: str) -> dict[str, float]:
        """Epoch means over the global batch. Raises UserError where the loss is not a finite
        number."""
        means = {
            name: value / self.images for name, value in self.total().items() if name != "images"
        }
        check_finite(means["loss"], where)
        return {
            **means,
            "images": self.images,
            "seconds": round(time.perf_counter() - self.started, 3),
        }


def check_finite(loss: float, where: str) -> None:
    if not math.isfinite(loss):
        raise UserError(
            f"stage {where}: the loss became {loss}; training cannot go on from there, lower "
            "train.lr, "
            "set train.clip=1, or use train.precision=fp32"
        )


class ProgressMeter:
    """Tells what a stage is doing: epoch, loss, accuracy, images per second, seconds left."""

    def __init__(self, job: StageJob, epochs: int, per_epoch: int, report: Report):
        self.job, self.epochs, self.per_epoch, self.report = job, epochs, per_epoch, report
        self.started = self.said = time.monotonic()
        self.images = self.steps = 0
        self.accuracy: float | None = None

    def tick(self, progress: Progress, images: int, sums: LossMeter) -> None:
        self.images, self.steps = self.images + images, self.steps + 1
        now = time.monotonic()
        if now - self.said < REPORT_S:
            return
        self.said, spent = now, now - self.started
        # of several ranks, what this one's share tells
        loss = float(sums.values["loss"]) / sums.images * sums.group.world
        if sums.group.world == 1:
            check_finite(loss, self.job.id)
        self.report(
            {
                "stage": self.job.id,
                "epoch": progress.epoch + 1,
                "epochs": self.epochs,
                "loss": loss,
                "accuracy": self.accuracy,
                "images_per_s": self.images / spent,
                "left_s": (progress.total - progress.global_step - 1) * spent / self.steps,
            }
        )

    def epoch(self, row: dict[str, Any]) -> None:
        if row.get("val_total"):
            self.accuracy = row["val_correct"] / row["val_total"]


def parquet(rows: list[dict[str, Any]]) -> bytes:
    """A table with the columns of all rows; a row that lacks one has null there."""
    columns = dict.fromkeys(name for row in rows for name in row)
    buffer = io.BytesIO()
    pq.write_table(
        pa.Table.from_pylist([{name: row.get(name) for name in columns} for row in rows]), buffer
    )
    return buffer.getvalue()


def device_name(device: torch.device) -> str:
    return (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"cpu ({platform.machine()}, {os.cpu_count()} cores)"
    )
