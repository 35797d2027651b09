"""Run a stage with the ranks of a worker group, from its job to its stored result.

A stage is a node of the graph: one step of one task, for example `train`, `herd` or `evaluate`. An
update of the weights is called an optimizer step. Read this file from the top: `run_stage` looks up
the result or computes it with `train_task`, `train_backbone`, `evaluate_task` (evaluate.py) or
`compute_features` (feature_stage.py). The first two call `fit`, which calls `train_epochs`, which
calls `train_step`.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from workers import dist, host_memory, optim, preemption
from workers.capture import StepCapture, find_obstacle
from workers.data import accelerator
from workers.data.batch import Batch
from workers.data.feed import Feed, ReplayFeed, open_cache
from workers.data.rows import has_validation, list_keys, select
from workers.errors import UserError
from workers.evaluate import accuracy, evaluate_task
from workers.feature_stage import compute_features, load_features
from workers.job import StageJob
from workers.methods import METHODS
from workers.methods.base import (
    Method,
    OptimPlan,
    ParamGroup,
    Progress,
    StepContext,
    StepData,
)
from workers.methods.protocols import (
    CombinesGradients,
    PrecomputesFeatures,
    RemembersSamples,
    ReplaysSamples,
    UsesSharpness,
)
from workers.methods.symptoms import (
    describe_divergence_remedy,
    find_mask_symptoms,
    find_training_symptoms,
)
from workers.model import frozen, noise, vit
from workers.model.recompute import recompute_blocks
from workers.restore import load_carried, load_settings, load_states, new_method
from workers.rng import derive_seed
from workers.storage import checkpoint
from workers.storage.artifact import Artifact, Attempt, cache_artifacts, compute_content_digest
from workers.storage.checkpoint import Checkpoint
from workers.storage.lock import stage_lock
from workers.storage.taskstate import Carried, TaskState

Report = Callable[[dict[str, Any]], None]
# Contents of files by name, and the manifest.
StageResult = tuple[dict[str, bytes], dict[str, Any]]
Runner = Callable[[StageJob, dist.Group, Report], StageResult]
# Function that returns the loss of a batch and its detached terms by name, like `Method.loss`.
LossFunction = Callable[[Batch, Progress], tuple[torch.Tensor, dict[str, torch.Tensor]]]
# Part of the keys of trained results. Increase it if a change to this loop, the optimizer, the
# feed, the augmentation, stochastic depth or the heads changes the result of training.
TRAIN_REVISION = 6
REPORT_S = 1.0  # minimum seconds between two progress reports of a stage
CHECKPOINT_REPORT_S = 30.0  # minimum seconds between two reports of a stage's checkpoints
# Report of a stage that another process computes, for example another driver of the same run.
WAITING = {"waiting_for": "another process, which computes this stage"}
# With several ranks, rank 0 broadcasts whether a checkpoint is due, once per this many steps.
AGREE_STEPS = 8


def run_stage(job: StageJob, group: dist.Group, report: Report) -> dict[str, Any]:
    """Return the manifest of a stage's result. Run the stage if the store has no result yet.

    Call it on all ranks. The manifest is complete on rank 0 only.
    """
    manifest = read_stored_manifest(job, group)
    if manifest is not None:
        return manifest
    with stage_lock(job.root, job.key, group, on_wait=lambda: report(dict(WAITING))):
        # Another run may have computed the result while this one waited for the lock.
        manifest = read_stored_manifest(job, group)
        if manifest is None:
            try:
                with host_memory.keep_freed_memory():
                    manifest = _run_stage(job, group, report)
            finally:
                accelerator.release_memory(group.device)
        return manifest


def read_stored_manifest(job: StageJob, group: dist.Group) -> dict[str, Any] | None:
    """Return the manifest of the stage's stored result, with the added entry `reused: True`.

    Return None if the store has no result. Call it on all ranks: rank 0 reads the manifest and
    broadcasts it.
    """
    manifest: dict[str, Any] | None = None
    if group.rank == 0:
        artifact = Artifact.open(job.root, job.key)
        if artifact is not None:
            manifest = {**artifact.manifest, "reused": True}
    shared: dict[str, Any] | None = group.broadcast(manifest)
    return shared


def read_cpu_clock() -> float:
    """Return the CPU time of this process and its ended children in seconds."""
    return sum(os.times()[:4])


def _run_stage(job: StageJob, group: dist.Group, report: Report) -> dict[str, Any]:
    started = time.perf_counter()
    cpu_started = read_cpu_clock()
    runners: dict[str, Runner] = {
        "backbone": train_backbone,
        "evaluate": evaluate_task,
        "features": compute_features,
    }
    run = runners.get(job.step, train_task)
    accelerator.use_fp32(tf32=run is not evaluate_task and job.train.precision == "tf32")
    with cache_artifacts(job.root, job.parents) as parent_digests:
        files, manifest = run(job, group, report)
    manifest |= {
        "stage": job.id,
        "step": job.step,
        "method": job.method,
        "task": job.task.name if job.task else None,
        "wall_s": round(time.perf_counter() - started, 3),
        "cpu_s": round(read_cpu_clock() - cpu_started, 2),
        "workers": group.world,
        "made_of": parent_digests,
        "provenance": {
            **job.provenance,
            "seed": job.seed,
            "device": accelerator.describe_device(group.device),
            "threads": torch.get_num_threads(),
        },
    }
    if group.rank == 0:
        return publish_result(job, files, manifest)
    return manifest


def publish_result(
    job: StageJob, files: dict[str, bytes], manifest: dict[str, Any]
) -> dict[str, Any]:
    """Write a result to the store, and return the manifest that is in the store afterwards.

    If another process has published a result first, its result is kept and its manifest returned,
    with an added `note` if the two results differ.
    """
    attempt = Attempt(job.root, job.key)
    for name, data in files.items():
        attempt.write(name, data)
    is_first = attempt.commit(manifest)
    checkpoint.drop(job.root, job.key)
    computed_digest = compute_content_digest({**manifest, "files": attempt.files})
    stored: dict[str, Any] = {**Artifact.need(job.root, job.key).manifest}
    if not is_first and compute_content_digest(stored) != computed_digest:
        note = "another process published a different result first, and that one is kept"
        return {**stored, "note": note}
    return stored


def train_task(job: StageJob, group: dist.Group, report: Report) -> StageResult:
    """Run one step of one task with the job's method, on a fresh copy of the backbone.

    The method starts from the carried states of the previous stages (`StageJob.previous`), if any.

    Returns:
        Files with the task's state, the carried state for the next stage and the metrics of each
        epoch; and the manifest.
    """
    assert job.task is not None
    method = new_method(job).to(group.device)
    if method.loads_states(job.scenario):
        load_states(job, method)
    history, length, notes = fit(job, method, load_carried(job), group, report)
    symptoms = find_training_symptoms(job, method, history, length)
    state, carried = method.finish()
    # A step that does not train may have one row without a loss: see `fit`.
    epochs = sum("loss" in row for row in history)
    trained_parameters = 0
    if epochs:
        trained_parameters = sum(p.numel() for p in method.parameters() if p.requires_grad)
    manifest = {
        "kind": "train",
        "sizes": state.sizes(),
        "trained_parameters": trained_parameters,
        "carried_bytes": sum(t.numel() * t.element_size() for t in carried.tensors.values()),
        "flops_share": method.flops_share(state),
        "warnings": [*method.warnings(), *find_mask_symptoms(state), *symptoms, *notes],
        "backbone_digest": method.backbone_digest,
        "epochs": epochs,
        "length": length,
    }
    files = {
        "task.safetensors": state.to_bytes(),
        "carried.safetensors": carried.to_bytes(),
        "history.parquet": to_parquet(history),
    }
    return files, manifest


def train_backbone(job: StageJob, group: dist.Group, report: Report) -> StageResult:
    """Create the backbone that all tasks use. Train it if the stream starts with a base task.

    The initial weights are pretrained weights of timm or of the Hugging Face Hub, weights from a
    file, or random and dependent on the seed. Training on the base task fine-tunes all weights. A
    task that the backbone has learned already (`Task.has_own_head`) takes its head from the
    weights.
    """
    torch.manual_seed(derive_seed(job.seed, "backbone"))
    backbone = vit.build(job.backbone_settings)
    if job.backbone_settings.weights == "none":
        vit.measure_statistics(backbone, job.backbone_settings.img_size)
    warnings = vit.load_weights(backbone, job.backbone_settings)
    files: dict[str, bytes] = {}
    sizes: dict[str, int] = {}
    length: dict[str, int] = {}
    if job.task is not None:
        if job.task.has_own_head:
            warnings = []  # they say that the classifier is ignored, but here it becomes the head
            head = vit.load_head(backbone, job.backbone_settings, job.task)
        else:
            method = METHODS["finetune"](backbone, load_settings(job), job.seed)
            history, length, notes = fit(job, method, None, group, report)
            files["history.parquet"] = to_parquet(history)
            warnings = [*warnings, *find_training_symptoms(job, method, history, length), *notes]
            head = method.heads.export(job.task.name)
        digest = vit.compute_digest(backbone)
        state = TaskState(
            job.task.name, job.task.classes, method="base", backbone_digest=digest, head=head
        )
        files["task.safetensors"] = state.to_bytes()
        sizes = state.sizes()
    else:
        digest = vit.compute_digest(backbone)
    files["state.safetensors"] = vit.to_bytes(backbone)
    manifest = {
        "kind": "backbone",
        "warnings": warnings,
        "sizes": sizes,
        "length": length,
        "digest": digest,
        "parameters": sum(p.numel() for p in backbone.parameters()),
        "bytes": sum(t.numel() * t.element_size() for t in backbone.state_dict().values()),
    }
    return files, manifest


class Training(NamedTuple):
    """Outcome of the training of a step.

    Attributes:
        history: Metrics of each epoch, one row per epoch.
        length: Length of the training from `optim.describe_length`. With replay, it also has
            `replayed`, the number of images in all replay batches. Empty for a step without
            training.
        warnings: Sentences for the user.
    """

    history: list[dict[str, Any]]
    length: dict[str, int]
    warnings: tuple[str, ...] = ()


def fit(
    job: StageJob, method: Method, carried: Carried | None, group: dist.Group, report: Report
) -> Training:
    """Run a step of a task and return its metrics, length and warnings.

    Training resumes from the stage's checkpoint if there is one. For a step without training
    (`Step.trains` is False, or no epochs) only `Method.begin` runs. If such a step is `measured`,
    one row without a loss is returned: metrics and validation counts. Otherwise no row is returned.

    Args:
        job: The stage.
        method: The method.
        carried: Merged carried states of the previous stages. None without previous stages.
        group: The rank.
        report: Called with the progress.
    """
    assert job.task is not None
    # None for the training of the backbone, which is not a step of a method.
    step = next((step for step in method.steps if step.name == job.step), None)
    trains = step is None or step.trains
    if not trains:  # the key does not contain `train`, so `train.precision` must have no effect
        accelerator.use_fp32()
    method.to(group.device)
    job, context, feed = prepare_step_inputs(job, method, carried, group, trains)
    param_groups = method.begin(context)
    method.to(group.device)  # `begin` may have added modules, on the CPU
    val = context.data.feed("val") if context.data.has_validation else None
    if feed is None:  # the step does not train
        if step is None or not step.measured:
            return Training([], {})
        row = {"epoch": 0, **method.metrics(), **count_validation(method, val, group)}
        return Training([row], {})
    feed.memory_format = accelerator.choose_memory_format(
        method.backbone, group.device, job.train.precision
    )
    if feed.replay is not None:
        feed.replay.memory_format = feed.memory_format
    freeze_others(method, param_groups)
    warnings: list[str] = []
    if job.train.compile is True:
        vit.compile_blocks(method.backbone)
    if job.train.recompute:
        blocks = vit.list_blocks(method.backbone)
        if not blocks or not method.can_recompute:
            owner = f"method {method.name!r}"
            if not blocks:
                owner = f"a backbone of class {type(method.backbone).__name__}"
            warnings.append(f"train.recompute is true, but {owner} keeps its activations")
        else:
            recompute_blocks(blocks)
    optimizer = optim.build_optimizer(param_groups, job.train)
    method.train()
    if isinstance(method, PrecomputesFeatures):
        with autocast_context(job, group):
            method.precompute(feed)
        if val is not None:  # validation is computed in fp32
            method.precompute(val)
    with cast_frozen_layers(job, method):
        history = train_epochs(job, method, optimizer, feed, val, group, report)
    length = optim.describe_length(job.train, feed.num_samples)
    if feed.replay is not None:
        length["replayed"] = length["steps"] * feed.replay.images_per_step
    if job.train.compile == "step":
        obstacle = find_obstacle(method, group)
        if obstacle is not None:
            warnings.append(f"train.compile is 'step', but {obstacle}; steps ran uncaptured")
    return Training(history, length, tuple(warnings))


def freeze_others(method: Method, param_groups: list[ParamGroup]) -> None:
    """Let only the parameters in `param_groups` require gradients."""
    trained_ids = {id(p) for param_group in param_groups for p in param_group["params"]}
    for p in method.parameters():
        p.requires_grad_(id(p) in trained_ids)


class StepInputs(NamedTuple):
    """Inputs of a step.

    Attributes:
        job: The job, with batch size and epochs fitted to the number of images (`fit_to_images`).
        context: Context for `Method.begin`.
        feed: Feed of the training batches. None for a step without training.
    """

    job: StageJob
    context: StepContext
    feed: Feed | None


def prepare_step_inputs(
    job: StageJob, method: Method, carried: Carried | None, group: dist.Group, trains: bool
) -> StepInputs:
    """Prepare the inputs of a step.

    A preliminary context is passed to `RemembersSamples.memory`, which returns the keys of the
    exemplars. The final context adds the values that depend on them: the training data and the
    number of optimizer steps. The exemplars are part of the training feed, or are replayed in
    batches of their own (`ReplaysSamples`).

    Args:
        job: The stage.
        method: The method.
        carried: Merged carried states of the previous stages. None without previous stages.
        group: The rank.
        trains: Whether the step trains.
    """
    assert job.task is not None
    # Tasks whose samples are all used for training, unless `memory` selects a subset. (The
    # tasks in `job.tasks` are those up to this task.)
    full_tasks = job.tasks if method.trains_on == "seen" else (job.task,)
    train = job.train
    validated_tasks = tuple(
        task for task in full_tasks if has_validation(job.root, task, job.data.val_fraction)
    )
    context = StepContext(
        task=job.task,
        optim=OptimPlan(train.lr, train.weight_decay, train.batch_size, 0.0, train.optimizer),
        step=job.step,
        scenario=job.scenario,
        stream=job.tasks,
        training_tasks=full_tasks,
        carried=carried,
        data=StepData(
            make_feed=lambda split, training: Feed(job, full_tasks, split, group, training),
            task_keys=lambda task: list_keys(job.root, task, job.data.val_fraction),
            has_validation=bool(validated_tasks),
            load_features=partial(load_features, job) if job.features else None,
        ),
    )
    exemplars = exemplar_keys(method, context)
    replays: dict[str, list[str]] = {}
    if trains and isinstance(method, ReplaysSamples):
        replays = exemplars
    training_tasks = tuple(
        task for task in job.tasks if task in full_tasks or task.name in exemplars
    )
    if replays:
        # The feed's own batches have no exemplars: an empty list selects no image of a task.
        exemplars = {task.name: [] for task in training_tasks if task not in full_tasks}
    fitted_job = job
    if trains and train.min_steps:
        samples = select(
            job.root, training_tasks, "train", job.data.val_fraction, exemplars, open_cache(job)
        )
        train = optim.fit_to_images(job.train, len(samples))
        fitted_job = replace(job, train=train)

    def make_feed(split: str, training: bool) -> Feed:
        if split == "train":
            return Feed(fitted_job, training_tasks, split, group, training, exemplars)
        return Feed(fitted_job, validated_tasks, split, group, training)

    feed = make_feed("train", True) if trains and train.epochs else None
    steps_per_epoch = feed.steps_per_epoch if feed else 0
    if feed is not None and isinstance(method, ReplaysSamples) and replays:
        draws = method.replay_draws()
        feed.replay = ReplayFeed(fitted_job, training_tasks, group, replays, draws, steps_per_epoch)
    rate_steps = optim.full_rate_steps(train.epochs * steps_per_epoch, steps_per_epoch, train)
    context = replace(
        context,
        training_tasks=training_tasks,
        carried=carried and carried.to(group.device),
        optim=replace(context.optim, batch_size=train.batch_size, full_rate_steps=rate_steps),
        data=replace(context.data, make_feed=make_feed),
    )
    return StepInputs(fitted_job, context, feed)


def exemplar_keys(method: Method, context: StepContext) -> dict[str, list[str]]:
    """Return the keys of the images that `RemembersSamples.memory` selects for the step, by task.

    These are mostly exemplars of earlier tasks, but a method can also select from the current task.
    Tasks with an empty selection are omitted. A method without a memory selects nothing.
    """
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
    group: dist.Group,
    report: Report,
) -> list[dict[str, Any]]:
    """Train from the stage's checkpoint, or from the start, to the last epoch.

    Return one row of metrics per epoch, including the epochs before the checkpoint. With
    `train.keep: best`, the method then has the weights of the best epoch.
    """
    epochs = job.train.epochs
    # Rank 0 alone reads the checkpoint, so that all ranks start from the same one.
    stored = checkpoint.load_checkpoint(job.root, job.key) if group.rank == 0 else None
    start = group.broadcast(stored) or Checkpoint(0, 0, [], {}, {})
    best_tensors: dict[str, torch.Tensor] = {}
    if start.tensors:  # otherwise there is no checkpoint
        best_tensors = start.restore(method, optimizer)
    best = BestEpoch(start.best, best_tensors)
    checkpoints = CheckpointSaver(job, method, optimizer, best, group, report)
    meter = ProgressMeter(job, method, epochs, report if group.rank == 0 else None)
    capture = None
    if job.train.compile == "step" and find_obstacle(method, group) is None:
        capture = StepCapture(method, optimizer, group.device)
    history = list(start.history)
    steps = feed.steps_per_epoch
    for epoch in range(start.epoch, epochs):
        is_resumed = epoch == start.epoch and bool(start.tensors)
        first_step = start.step if is_resumed else 0
        losses = LossMeter(start.sums if is_resumed else {}, group)
        method.train()
        epoch_batches = meter.timed(feed.epoch(epoch, first_step))
        for step, batches in enumerate(epoch_batches, first_step):
            progress = Progress(epoch, step, epochs, steps)
            seed = derive_seed(job.seed, "step", epoch, step, group.rank)
            accelerator.seed_generators(seed, group.device)
            terms = train_step(method, optimizer, batches, progress, job, group, capture)
            num_images = batches[0].draw.size  # samples of the global batch
            losses.add(terms, num_images)
            meter.add_step(progress, num_images, losses)
            if step + 1 < steps and checkpoints.is_due(step):
                checkpoints.save(epoch, step + 1, history, losses.total())
        row = {
            "epoch": epoch,
            # rate of the first group in the last step
            "lr": float(optimizer.param_groups[0]["lr"]),
            **losses.means(job, method),
            **method.metrics(),
            **count_validation(method, val, group),
        }
        if job.train.keep == "best":
            best.update(method, row)
        history.append(row)
        meter.add_epoch(row)
        if epoch + 1 < epochs and checkpoints.is_due():
            checkpoints.save(epoch + 1, 0, history, {})
    best.restore(method)
    return history


def count_validation(method: Method, val: Feed | None, group: dist.Group) -> dict[str, int]:
    """Return the number of correctly classified validation images and of all validation images.

    The names are `val_correct` and `val_total`. Without validation images, the result is {}.
    """
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
    capture: StepCapture | None = None,
) -> dict[str, torch.Tensor]:
    """Take one optimizer step over the global batch.

    Args:
        method: The method.
        optimizer: The optimizer.
        batches: This rank's micro-batches.
        progress: The position in the training.
        job: The stage.
        group: The rank.
        capture: Captures the computation of the step, and repeats it. None: it runs normally.

    Returns:
        This rank's parts of the loss and of the loss terms, by name. The sum of a value over all
        ranks is its mean over the global batch.
    """
    lr_factor = optim.compute_lr_factor(
        progress.global_step, progress.total, progress.steps_per_epoch, job.train
    )
    optim.scale_rates(optimizer, lr_factor)

    def update(batches: list[Batch], progress: Progress) -> dict[str, torch.Tensor]:
        return update_weights(method, optimizer, batches, progress, job, group)

    if capture is None:
        terms = update(batches, progress)
    else:
        terms = capture.run(update, batches, progress)
    method.after_step(progress)
    return terms


def update_weights(
    method: Method,
    optimizer: torch.optim.Optimizer,
    batches: list[Batch],
    progress: Progress,
    job: StageJob,
    group: dist.Group,
) -> dict[str, torch.Tensor]:
    """Compute the gradients and update the weights.

    This is the part of `train_step` that computes on the device, and that `StepCapture` repeats.
    """
    parameters = list_parameters(optimizer)
    terms = compute_gradients(method, optimizer, batches, progress, job, group)
    # Sharpness-aware minimisation: compute the gradients again at perturbed weights. Then the
    # weights are restored.
    rho = method.sam_radius() if isinstance(method, UsesSharpness) else 0.0
    if rho:
        with optim.ascend(parameters, rho):
            compute_gradients(method, optimizer, batches, progress, job, group)
    if isinstance(method, CombinesGradients) and batches[0].replay is not None:
        terms |= combine_gradients(method, parameters, batches, progress, job, group)
    method.after_backward()
    if job.train.clip:
        torch.nn.utils.clip_grad_norm_(parameters, job.train.clip)
    optimizer.step()
    return terms


def compute_gradients(
    method: Method,
    optimizer: torch.optim.Optimizer,
    batches: list[Batch],
    progress: Progress,
    job: StageJob,
    group: dist.Group,
) -> dict[str, torch.Tensor]:
    """Set the gradient of each parameter to the gradient of the mean loss over the global batch.

    A micro-batch has the share `Batch.weight` of the global batch. The weighted gradients are
    summed over micro-batches and ranks. Those of the replay loss are added, unless the method is
    `CombinesGradients`.

    Returns:
        The loss and its terms, as in `train_step`.
    """
    optimizer.zero_grad(set_to_none=True)
    replays = isinstance(method, ReplaysSamples) and not isinstance(method, CombinesGradients)
    losses: list[tuple[LossFunction, Batch, Batch]] = []
    for batch in batches:
        losses.append((method.loss, batch, batch))
        if batch.replay is not None and replays:
            replay_loss: LossFunction = method.replay_loss  # type: ignore[assignment]
            losses.append((replay_loss, batch, batch.replay))
    terms: dict[str, torch.Tensor] = {}
    parameters = list_parameters(optimizer)
    if group.world > 1:
        parameters = sort_parameters(method, parameters)
    sums = dist.GradientSum(group, parameters)
    for index, (compute, batch, samples) in enumerate(losses):
        sending = sums.overlap() if index == len(losses) - 1 else contextlib.nullcontext()
        add_gradients(method, compute, batch, samples, terms, progress, job, group, sending)
    sums.finish()
    return terms


def add_gradients(
    method: Method,
    compute: LossFunction,
    batch: Batch,
    samples: Batch,
    terms: dict[str, torch.Tensor],
    progress: Progress,
    job: StageJob,
    group: dist.Group,
    sending: contextlib.AbstractContextManager[None] | None = None,
) -> None:
    """Add the gradients of a loss to the parameters, and the loss and its terms to `terms`.

    Args:
        method: The method.
        compute: The loss as a function of `batch`.
        batch: Micro-batch of the step.
        samples: The samples of the loss, with their weight: `batch`, or its replay batch.
        terms: Sums of the weighted terms by name.
        progress: The position in the training.
        job: The stage.
        group: The rank.
        sending: Context manager around the backward pass, which sends gradients to the other ranks
            (`GradientSum.overlap`). None: nothing is sent yet.
    """
    noise.draw_paths(method, samples.draw)
    with autocast_context(job, group):
        loss, parts = compute(batch, progress)
    weight = samples.weight
    with sending or contextlib.nullcontext():
        (loss if weight == 1 else loss * weight).backward()
    for name, value in {"loss": loss.detach(), **parts}.items():
        weighted = value if weight == 1 else value * weight
        terms[name] = terms[name] + weighted if name in terms else weighted


def combine_gradients(
    method: CombinesGradients,
    parameters: list[torch.Tensor],
    batches: list[Batch],
    progress: Progress,
    job: StageJob,
    group: dist.Group,
) -> dict[str, torch.Tensor]:
    """Replace each parameter's gradient by the method's combination of several gradients.

    These are the current gradient, and the gradient of `replay_loss` on each part of the replay
    batch.

    Returns:
        The terms of `replay_loss`, as means over the parts. Its loss itself is omitted, because it
        is not part of the reported loss.
    """
    assert isinstance(method, Method)
    gradient = flatten_gradients(parameters)
    parts = method.replay_parts(
        [batch.replay for batch in batches if batch.replay is not None], group
    )
    terms: dict[str, torch.Tensor] = {}
    replayed: list[torch.Tensor] = []
    for part in parts:
        for parameter in parameters:
            parameter.grad = None
        for batch, replay in zip(batches, part, strict=True):
            own = replace(batch, replay=replay)
            add_gradients(method, method.replay_loss, own, replay, terms, progress, job, group)
        dist.GradientSum(group, parameters).finish()
        replayed.append(flatten_gradients(parameters))
    with torch.no_grad():
        combined = method.combine(gradient, torch.stack(replayed))
    sizes = [parameter.numel() for parameter in parameters]
    for parameter, values in zip(parameters, combined.split(sizes), strict=True):
        assert parameter.grad is not None
        parameter.grad.copy_(values.view_as(parameter))
    return {name: value / len(parts) for name, value in terms.items() if name != "loss"}


def flatten_gradients(parameters: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate the gradients of parameters, which must all have a gradient, to one vector."""
    return torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])


def list_parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters that the optimizer trains, in order."""
    parameters: list[torch.Tensor] = []
    for param_group in optimizer.param_groups:
        parameters += param_group["params"]
    return parameters


def sort_parameters(method: Method, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """Sort parameters by their order in the method's modules, as `GradientSum` expects them."""
    positions = {id(parameter): index for index, parameter in enumerate(method.parameters())}
    return sorted(parameters, key=lambda parameter: positions.get(id(parameter), -1))


def autocast_context(job: StageJob, group: dist.Group) -> contextlib.AbstractContextManager[Any]:
    """Return the context manager of the forward pass and the loss: autocast for bf16."""
    if job.train.precision == "bf16":
        return torch.autocast(group.device.type, torch.bfloat16)
    return contextlib.nullcontext()


def cast_frozen_layers(job: StageJob, method: Method) -> contextlib.AbstractContextManager[Any]:
    """Return the context manager of the training: for bf16, frozen layers cast weights once.

    With `train.compile: true` nothing is replaced: compiled blocks cast weights in the kernels that
    use them.
    """
    if job.train.precision == "bf16" and job.train.compile is not True:
        return frozen.cast_once(method)
    return contextlib.nullcontext()


class BestEpoch:
    """The weights of the epoch with the most correct validation images (`train.keep: best`).

    Attributes:
        record: `epoch` and `val_correct` of the best epoch, as stored in checkpoints. Empty before
            the first update, and always with `train.keep: last`.
        tensors: Copies of the tensors of `checkpoint.trained_state` after the best epoch, by name.
    """

    def __init__(self, record: dict[str, Any], tensors: dict[str, torch.Tensor]):
        self.record = record
        self.tensors = tensors

    def update(self, method: Method, row: dict[str, Any]) -> None:
        """Store the epoch of `row` if it is the best so far. In a tie, the earlier epoch is kept.

        Without validation images no epoch is stored, so the result is the last epoch.
        """
        val_correct = row.get("val_correct", -1)
        if val_correct <= self.record.get("val_correct", -1):
            return
        self.record = {"epoch": row["epoch"], "val_correct": val_correct}
        live = checkpoint.trained_state(method)
        self.tensors = {name: tensor.detach().clone() for name, tensor in live.items()}

    @torch.no_grad()
    def restore(self, method: Method) -> None:
        """Copy the best epoch's tensors into the method, if an epoch was stored."""
        if not self.tensors:
            return
        live = checkpoint.trained_state(method)
        for name, tensor in self.tensors.items():
            live[name].copy_(tensor)


class CheckpointSaver:
    """Saves a stage's checkpoint every `job.checkpoint_s` seconds, and before a preemption."""

    def __init__(
        self,
        job: StageJob,
        method: Method,
        optimizer: torch.optim.Optimizer,
        best: BestEpoch,
        group: dist.Group,
        report: Report,
    ):
        self.job = job
        self.method = method
        self.optimizer = optimizer
        self.best = best
        self.group = group
        self.report = report
        self.reported_at = -math.inf
        self.period_s = job.checkpoint_s or math.inf
        self.saved_at = time.monotonic()

    def is_due(self, step: int | None = None) -> bool:
        """Return whether to save now. All ranks return the same: rank 0 decides and broadcasts.

        A checkpoint is due if the period is over, or if rank 0 has a preemption notice. With
        several ranks, rank 0 decides inside an epoch only every `AGREE_STEPS` steps; after other
        steps the result is False.

        Args:
            step: Index in the epoch of the optimizer step that has just ended. None at the end of
                an epoch.
        """
        if step is not None and self.group.world > 1 and (step + 1) % AGREE_STEPS:
            return False
        is_period_over = time.monotonic() > self.saved_at + self.period_s
        return bool(self.group.broadcast(is_period_over or preemption.requested.is_set()))

    def save(
        self, epoch: int, step: int, history: list[dict[str, Any]], sums: dict[str, float]
    ) -> None:
        """Save a checkpoint from which training resumes at optimizer step `step` of `epoch`.

        Args:
            epoch: Epoch of the next step.
            step: Next step within the epoch.
            history: Metrics of the finished epochs.
            sums: Sums of the loss terms over the images of this epoch so far (`LossMeter.total`).

        Raises:
            Preempted: On all ranks, after saving, if rank 0 has a preemption notice.
        """
        job = self.job
        if self.group.rank == 0:
            state = Checkpoint(epoch, step, history, sums, self.best.record)
            checkpoint.save_checkpoint(
                job.root, job.key, self.method, self.optimizer, self.best.tensors, state
            )
            self._report_saved(epoch, step)
        self.saved_at = time.monotonic()
        if self.group.broadcast(preemption.requested.is_set()):
            raise preemption.Preempted(f"{job.id} is saved")

    def _report_saved(self, epoch: int, step: int) -> None:
        """Report a checkpoint, at most once per CHECKPOINT_REPORT_S seconds."""
        now = time.monotonic()
        if now - self.reported_at >= CHECKPOINT_REPORT_S:
            self.reported_at = now
            self.report({"checkpoint": {"epoch": epoch, "step": step}})


class LossMeter:
    """This rank's sums of loss terms over the images of an epoch.

    The sums stay on the device, so that the host does not wait for the device in each step.

    Attributes:
        images: Number of images so far, over all ranks.

    Args:
        start: Sums over all ranks from a checkpoint; {} without a checkpoint. Only rank 0 starts
            from them, so that they count once in the sum over ranks.
        group: The rank.
    """

    def __init__(self, start: dict[str, float], group: dist.Group):
        self.group = group
        self.start_loss = start.get("loss", 0.0)
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
        """Add the terms of a step with a global batch of `images` images."""
        for name, value in terms.items():
            self.values[name] = self.values.get(name, 0.0) + value.double() * images
        self.images += images

    def total(self) -> dict[str, float]:
        """Return the sums over all ranks by name, and under `images` the number of images.

        Call it on all ranks.
        """
        sums = {name: float(self.group.sum(value.clone())) for name, value in self.values.items()}
        return {"images": self.images, **sums}

    def means(self, job: StageJob, method: Method) -> dict[str, float]:
        """Return the epoch's mean loss and terms, its images, and the seconds since its start.

        In a resumed epoch, the seconds count from the resume. Call it on all ranks.

        Raises:
            UserError: If the mean loss is not finite.
        """
        total = self.total()
        del total["images"]
        means = {name: value / self.images for name, value in total.items()}
        check_finite(means["loss"], job, method)
        seconds = round(time.perf_counter() - self.started, 3)
        return {**means, "images": self.images, "seconds": seconds}

    def estimate(self) -> float:
        """Return the mean loss of the epoch so far. Call it on rank 0.

        With several ranks, the mean is estimated from the images of rank 0, without a collective.
        """
        own_sum = float(self.values["loss"]) - self.start_loss
        return (self.start_loss + own_sum * self.group.world) / self.images


def check_finite(loss: float, job: StageJob, method: Method) -> None:
    """Raise `UserError` if a loss is NaN or infinite."""
    if not math.isfinite(loss):
        raise UserError(
            f"stage {job.id}: the loss became {loss}, and training cannot continue; "
            f"{describe_divergence_remedy(job, method)}"
        )


class ProgressMeter:
    """Reports a stage's progress, speed and remaining time, at most every `REPORT_S` seconds.

    Args:
        report: Called with the progress. None on ranks other than 0, which do not report.
    """

    def __init__(self, job: StageJob, method: Method, epochs: int, report: Report | None):
        self.job = job
        self.method = method
        self.epochs = epochs
        self.report = report
        self.started = time.monotonic()
        self.reported_at = self.started
        self.images = 0
        self.steps = 0
        self.waited_s = 0.0  # seconds of waiting for batches since the last report
        self.accuracy: float | None = None  # validation accuracy of the last epoch

    def timed(self, batches: Iterable[list[Batch]]) -> Iterator[list[Batch]]:
        """Yield the batches of each step, and measure the time of waiting for them."""
        iterator = iter(batches)
        while True:
            started = time.monotonic()
            try:
                step_batches = next(iterator)
            except StopIteration:
                return
            self.waited_s += time.monotonic() - started
            yield step_batches

    def add_step(self, progress: Progress, images: int, losses: LossMeter) -> None:
        """Count a step, and report the progress if a report is due.

        Args:
            progress: The position in the training.
            images: Size of the step's global batch.
            losses: The losses of the epoch.

        Raises:
            UserError: If a report is due, there is one rank, and the mean loss of the epoch so far
                is not finite.
        """
        self.images += images
        self.steps += 1
        now = time.monotonic()
        if self.report is None or now - self.reported_at < REPORT_S:
            return
        data_wait = min(self.waited_s / (now - self.reported_at), 1.0)
        self.waited_s = 0.0
        self.reported_at = now
        spent_s = now - self.started
        steps_left = progress.total - progress.global_step - 1
        loss = losses.estimate()
        if losses.group.world == 1:
            check_finite(loss, self.job, self.method)
        self.report(
            {
                "stage": self.job.id,
                "epoch": progress.epoch + 1,
                "epochs": self.epochs,
                "loss": loss,
                "accuracy": self.accuracy,
                "images_per_s": self.images / spent_s,
                "left_s": steps_left * spent_s / self.steps,
                "data_wait": data_wait,
            }
        )

    def add_epoch(self, row: dict[str, Any]) -> None:
        """Store the validation accuracy of an epoch for the reports of the next epoch."""
        if row.get("val_total"):
            self.accuracy = row["val_correct"] / row["val_total"]


def to_parquet(rows: list[dict[str, Any]]) -> bytes:
    """Return a Parquet file with the columns of all rows. Missing values are null."""
    blank_row: dict[str, Any] = {}  # all columns in the order of their first appearance
    for row in rows:
        blank_row |= dict.fromkeys(row)
    complete_rows = [blank_row | row for row in rows]
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(complete_rows), buffer)
    return buffer.getvalue()
