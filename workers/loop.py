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
from dataclasses import replace
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
from workers.methods.base import Method, OptimPlan, Progress, StepContext, StepData
from workers.methods.protocols import PrecomputesFeatures, RemembersSamples, UsesSharpness
from workers.model import noise, vit
from workers.restore import load_carried, load_states, new_method, settings_of
from workers.rng import derive_seed
from workers.storage import checkpoint
from workers.storage.artifact import Artifact, Attempt, cached_artifacts, content_digest
from workers.storage.checkpoint import Checkpoint
from workers.storage.lock import stage_lock
from workers.storage.taskstate import Carried, TaskState

Report = Callable[[dict[str, Any]], None]
StageResult = tuple[dict[str, bytes], dict[str, Any]]  # files by name, and the manifest
Runner = Callable[[StageJob, dist.Group, Report], StageResult]
# raise it when training gives other numbers: this loop, optim, feed, augmentation, noise, heads
TRAIN_REVISION = 1
REPORT_S = 1.0  # seconds between two progress reports of a stage
AGREE_STEPS = 8  # steps between two moments at which several ranks ask whether a checkpoint is due


def run_stage(job: StageJob, group: dist.Group, report: Report) -> dict[str, Any]:
    """Run one stage and return its manifest; return the stored one if the result exists."""
    manifest = stored_manifest(job, group)
    if manifest is not None:
        return manifest
    with stage_lock(job.root, job.key, group):
        # another run may have computed it while this one waited
        return stored_manifest(job, group) or _run_stage(job, group, report)


def stored_manifest(job: StageJob, group: dist.Group) -> dict[str, Any] | None:
    """Return the manifest of a result that exists, marked as `reused`."""
    manifest: dict[str, Any] | None = None
    if group.rank == 0:
        artifact = Artifact.open(job.root, job.key)
        if artifact is not None:
            manifest = {**artifact.manifest, "reused": True}
    shared: dict[str, Any] | None = group.share(manifest)
    return shared


def _run_stage(job: StageJob, group: dist.Group, report: Report) -> dict[str, Any]:
    started = time.perf_counter()
    runners: dict[str, Runner] = {"backbone": train_backbone, "evaluate": evaluate_task}
    run = runners.get(job.step, train_task)
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
        return publish(job, files, manifest)
    return manifest


def publish(job: StageJob, files: dict[str, bytes], manifest: dict[str, Any]) -> dict[str, Any]:
    """Write a result to the store and return the manifest that stands there.

    Where another process was faster, its result stands.
    """
    attempt = Attempt(job.root, job.key)
    for name, data in files.items():
        attempt.write(name, data)
    is_first = attempt.commit(manifest)
    checkpoint.drop(job.root, job.key)
    computed = content_digest({**manifest, "files": attempt.files})
    stored: dict[str, Any] = {**Artifact.need(job.root, job.key).manifest}
    if not is_first and content_digest(stored) != computed:
        note = "another process was faster and got another content, which stands"
        return {**stored, "note": note}
    return stored


def train_task(job: StageJob, group: dist.Group, report: Report) -> StageResult:
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


def train_backbone(job: StageJob, group: dist.Group, report: Report) -> StageResult:
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
    """Train a step of a task, resumed from its checkpoint if there is one; return a row per epoch.

    A step that does not train (`Step.trains`) only begins; if it is `measured`, its one row has the
    validation counts.
    """
    assert job.task is not None
    step = next((step for step in method.steps if step.name == job.step), None)
    epochs = job.train.epochs if step is None or step.trains else 0
    method.to(group.device)
    context, feed = step_context(job, method, carried, group, epochs)
    groups = method.begin(context)
    method.to(group.device)
    val = context.data.feed("val") if context.data.has_validation else None
    if feed is None:
        if step is None or not step.measured:
            return []
        return [{"epoch": 0, **method.metrics(), **validated(method, val, group)}]
    trained = {id(p) for param_group in groups for p in param_group["params"]}
    for p in method.parameters():
        p.requires_grad_(id(p) in trained)
    if job.train.compile:
        vit.compile_blocks(method.backbone)
    optimizer = optim.build(groups, job.train)
    method.train()
    if isinstance(method, PrecomputesFeatures):
        with precision_of(job, group):
            method.precompute(feed)
        if val is not None:
            method.precompute(val)
    return train_epochs(job, method, optimizer, feed, val, epochs, group, report)


def step_context(
    job: StageJob, method: Method, carried: Carried | None, group: dist.Group, epochs: int
) -> tuple[StepContext, Feed | None]:
    """Return what the step starts from, and the feed of its epochs; None where it has none."""
    assert job.task is not None
    own_tasks = job.tasks if method.trains_on == "seen" else (job.task,)
    train = job.train
    context = StepContext(
        job.task,
        OptimPlan(train.lr, train.weight_decay, train.batch_size, 0.0),
        job.step,
        job.scenario,
        job.tasks,
        own_tasks,
        carried,
        StepData(
            lambda split, training: Feed(job, own_tasks, split, group, training),
            lambda task: keys_of(job.root, task, job.data.val_fraction),
            bool(job.data.val_fraction),
        ),
    )
    exemplars = remembered_samples(method, context)
    tasks = tuple(task for task in job.tasks if task in own_tasks or task.name in exemplars)

    def make_feed(split: str, training: bool) -> Feed:
        if split == "train":
            return Feed(job, tasks, split, group, training, exemplars)
        return Feed(job, own_tasks, split, group, training)

    feed = make_feed("train", True) if epochs else None
    steps_per_epoch = feed.steps_per_epoch if feed else 0
    rate_steps = optim.mean_rate_steps(epochs * steps_per_epoch, steps_per_epoch, train)
    context = replace(
        context,
        training_tasks=tasks,
        carried=carried and carried.to(group.device),
        optim=replace(context.optim, mean_rate_steps=rate_steps),
        data=replace(context.data, make_feed=make_feed),
    )
    return context, feed


def remembered_samples(method: Method, context: StepContext) -> dict[str, list[str]]:
    """Return task -> keys of the earlier samples that the step trains on, without empty lists."""
    if not isinstance(method, RemembersSamples):
        return {}
    memory = method.memory(context)
    exemplars = {name: keys for name, keys in memory.items() if keys}
    assert not exemplars or "seen" in (method.reads, method.trains_on), (
        f"method {method.name!r} trains on samples of earlier tasks, but declares reads = "
        f"{method.reads!r}: the stage would not wait for their data; set reads = 'seen'"
    )
    return exemplars


def train_epochs(
    job: StageJob,
    method: Method,
    optimizer: torch.optim.Optimizer,
    feed: Feed,
    val: Feed | None,
    epochs: int,
    group: dist.Group,
    report: Report,
) -> list[dict[str, Any]]:
    """Run all epochs that the stage's checkpoint does not have yet; return a row per epoch."""
    # one rank reads it, so that no rank starts somewhere else
    stored = checkpoint.load(job.root, job.key) if group.rank == 0 else None
    start = group.share(stored) or Checkpoint(0, 0, [], {}, {})
    best = BestEpoch(start.best, start.restore(method, optimizer) if start.tensors else {})
    checkpoints = Checkpoints(job, method, optimizer, best, group)
    meter = ProgressMeter(job, epochs, report if group.rank == 0 else None)
    history = list(start.history)
    steps = feed.steps_per_epoch
    for epoch in range(start.epoch, epochs):
        is_resumed = epoch == start.epoch and bool(start.tensors)
        first_step = start.step if is_resumed else 0
        losses = LossMeter(start.sums if is_resumed else {}, group)
        method.train()
        for step, batches in enumerate(feed.epoch(epoch, first_step), first_step):
            progress = Progress(epoch, step, epochs, steps)
            torch.manual_seed(derive_seed(job.seed, "step", epoch, step, group.rank))
            terms = train_step(method, optimizer, batches, progress, job, group)
            images = batches[0].draw.size  # of the global batch
            losses.add(terms, images)
            meter.add_step(progress, images, losses)
            if step + 1 < steps and checkpoints.is_due(step):
                checkpoints.save(epoch, step + 1, history, losses.total())
        row = {
            "epoch": epoch,
            "lr": optimizer.param_groups[0]["lr"],
            **losses.means(job.id),
            **method.metrics(),
            **validated(method, val, group),
        }
        if job.train.keep == "best":
            best.update(method, row)
        history.append(row)
        meter.add_epoch(row)
        if epoch + 1 < epochs and checkpoints.is_due():
            checkpoints.save(epoch + 1, 0, history, {})
    best.restore(method)
    return history


def validated(method: Method, val: Feed | None, group: dist.Group) -> dict[str, int]:
    """Return the counts on the held-out part of train; empty where nothing is held out."""
    if val is None:
        return {}
    correct, total = accuracy(method, val, group)
    return {"val_correct": correct, "val_total": total}


def train_step(
    method: Method,
    optimizer: torch.optim.Optimizer,
    batches: list[Batch],
    progress: Progress,
    job: StageJob,
    group: dist.Group,
) -> dict[str, torch.Tensor]:
    """Take one optimizer step over the global batch; `batches` are this rank's micro-batches.

    Set the rate, compute gradients, gate, clip, step, restore. Return the loss and its terms, each
    this rank's share of the mean over the global batch.
    """
    rate = optim.factor(progress.global_step, progress.total, progress.steps_per_epoch, job.train)
    optim.set_rate(optimizer, rate)
    parameters = parameters_of(optimizer)
    terms = compute_gradients(method, optimizer, batches, progress, job, group)
    rho = method.sharpness() if isinstance(method, UsesSharpness) else 0.0
    if rho:
        with optim.ascend(parameters, rho):
            compute_gradients(method, optimizer, batches, progress, job, group)
    method.after_backward()
    if job.train.clip:
        torch.nn.utils.clip_grad_norm_(parameters, job.train.clip)
    optimizer.step()
    method.after_step(progress)
    return terms


def compute_gradients(
    method: Method,
    optimizer: torch.optim.Optimizer,
    batches: list[Batch],
    progress: Progress,
    job: StageJob,
    group: dist.Group,
) -> dict[str, torch.Tensor]:
    """Set the gradients of the global batch, summed over ranks; return the loss and its terms."""
    optimizer.zero_grad(set_to_none=True)
    terms: dict[str, torch.Tensor] = {}
    for batch in batches:
        noise.draw_paths(method, batch.draw)
        with precision_of(job, group):
            loss, parts = method.loss(batch, progress)
        (loss * batch.weight).backward()
        for name, value in {"loss": loss.detach(), **parts}.items():
            terms[name] = terms.get(name, 0.0) + value * batch.weight
    group.sum_gradients(parameters_of(optimizer))
    return terms


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters that the optimizer trains, in order."""
    return [p for param_group in optimizer.param_groups for p in param_group["params"]]


def precision_of(job: StageJob, group: dist.Group) -> contextlib.AbstractContextManager[Any]:
    """Return the autocast context that losses are computed in."""
    if job.train.precision == "bf16":
        return torch.autocast(group.device.type, torch.bfloat16)
    return contextlib.nullcontext()


class BestEpoch:
    """The trained tensors of the epoch with the most correct validation images (`keep: best`).

    record: `epoch` and `val_correct` of that epoch, as checkpoints store them; empty before the
        first update.
    """

    def __init__(self, record: dict[str, Any], tensors: dict[str, torch.Tensor]):
        self.record = record
        self.tensors = tensors

    def update(self, method: Method, row: dict[str, Any]) -> None:
        """Remember this epoch if it is better than all before."""
        val_correct = row.get("val_correct", -1)
        if val_correct <= self.record.get("val_correct", -1):
            return
        self.record = {"epoch": row["epoch"], "val_correct": val_correct}
        live = checkpoint.trained_state(method)
        self.tensors = {name: tensor.detach().clone() for name, tensor in live.items()}

    @torch.no_grad()
    def restore(self, method: Method) -> None:
        """Put the best epoch's tensors back, if one was remembered."""
        if not self.tensors:
            return
        live = checkpoint.trained_state(method)
        for name, tensor in self.tensors.items():
            live[name].copy_(tensor)


class Checkpoints:
    """Saves a stage's checkpoint every `checkpoint_s` seconds, and when it is preempted."""

    def __init__(
        self,
        job: StageJob,
        method: Method,
        optimizer: torch.optim.Optimizer,
        best: BestEpoch,
        group: dist.Group,
    ):
        self.job = job
        self.method = method
        self.optimizer = optimizer
        self.best = best
        self.group = group
        self.period_s = job.checkpoint_s or math.inf
        self.saved_at = time.monotonic()

    def is_due(self, step: int | None = None) -> bool:
        """Return whether to save now: rank 0's clock or its preemption notice decides for all.

        After a `step` inside an epoch several ranks ask each other only every `AGREE_STEPS` steps.
        """
        if step is not None and self.group.world > 1 and (step + 1) % AGREE_STEPS:
            return False
        is_late = time.monotonic() > self.saved_at + self.period_s
        return bool(self.group.share(is_late or preemption.requested.is_set()))

    def save(
        self, epoch: int, step: int, history: list[dict[str, Any]], sums: dict[str, float]
    ) -> None:
        """Save where training goes on. Raise `Preempted` on all ranks if rank 0 has a notice."""
        job = self.job
        if self.group.rank == 0:
            mark = Checkpoint(epoch, step, history, sums, self.best.record)
            checkpoint.save(job.root, job.key, self.method, self.optimizer, self.best.tensors, mark)
        self.saved_at = time.monotonic()
        if self.group.share(preemption.requested.is_set()):
            raise preemption.Preempted(f"{job.id} is saved")


class LossMeter:
    """This rank's sums of loss terms over an epoch, kept on the device so that no step waits.

    start: the totals of a checkpoint, which rank 0 continues. `images` counts those of all ranks.
    """

    def __init__(self, start: dict[str, float], group: dist.Group):
        self.group = group
        self.images = int(start.get("images", 0))
        self.values: dict[str, torch.Tensor] = {}
        self.started = time.perf_counter()
        if group.rank == 0:
            for name, value in start.items():
                if name != "images":
                    self.values[name] = torch.tensor(
                        value, dtype=torch.float64, device=group.device
                    )

    def add(self, terms: dict[str, torch.Tensor], images: int) -> None:
        """Add the terms of a step, whose global batch has so many images."""
        for name, value in terms.items():
            self.values[name] = self.values.get(name, 0.0) + value.double() * images
        self.images += images

    def total(self) -> dict[str, float]:
        """Return the sums over all ranks, and the number of images."""
        sums = {name: float(self.group.sum(value.clone())) for name, value in self.values.items()}
        return {"images": self.images, **sums}

    def means(self, where: str) -> dict[str, float]:
        """Return means over the epoch's images. Raise `UserError` when the loss is not finite."""
        total = self.total()
        del total["images"]
        means = {name: value / self.images for name, value in total.items()}
        check_finite(means["loss"], where)
        seconds = round(time.perf_counter() - self.started, 3)
        return {**means, "images": self.images, "seconds": seconds}


def check_finite(loss: float, where: str) -> None:
    """Raise `UserError` when a loss is NaN or infinite."""
    if not math.isfinite(loss):
        raise UserError(
            f"stage {where}: the loss became {loss}; training cannot go on from there, lower "
            "train.lr, set train.clip=1, or use train.precision=fp32"
        )


class ProgressMeter:
    """Reports at most once per `REPORT_S` where a stage is, how fast, and how long it will take.

    report: None on ranks that report nothing.
    """

    def __init__(self, job: StageJob, epochs: int, report: Report | None):
        self.job = job
        self.epochs = epochs
        self.report = report
        self.started = time.monotonic()
        self.reported = self.started
        self.images = 0
        self.steps = 0
        self.accuracy: float | None = None

    def add_step(self, progress: Progress, images: int, losses: LossMeter) -> None:
        """Count a step, whose global batch has so many images."""
        self.images += images
        self.steps += 1
        now = time.monotonic()
        if now - self.reported < REPORT_S:
            return
        self.reported = now
        spent_s = now - self.started
        steps_left = progress.total - progress.global_step - 1
        # of several ranks this is an estimate from the own share
        loss = float(losses.values["loss"]) / losses.images * losses.group.world
        if losses.group.world == 1:
            check_finite(loss, self.job.id)
        if self.report is None:
            return
        self.report(
            {
                "stage": self.job.id,
                "epoch": progress.epoch + 1,
                "epochs": self.epochs,
                "loss": loss,
                "accuracy": self.accuracy,
                "images_per_s": self.images / spent_s,
                "left_s": steps_left * spent_s / self.steps,
            }
        )

    def add_epoch(self, row: dict[str, Any]) -> None:
        """Remember the validation accuracy of an epoch."""
        if row.get("val_total"):
            self.accuracy = row["val_correct"] / row["val_total"]


def parquet(rows: list[dict[str, Any]]) -> bytes:
    """Return a Parquet table with the columns of all rows, null where a row lacks one."""
    columns: dict[str, None] = {}
    for row in rows:
        columns |= dict.fromkeys(row)
    complete = [{name: row.get(name) for name in columns} for row in rows]
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(complete), buffer)
    return buffer.getvalue()


def device_name(device: torch.device) -> str:
    """Return the name of the GPU, or the architecture and number of cores of the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({platform.machine()}, {os.cpu_count()} cores)"
