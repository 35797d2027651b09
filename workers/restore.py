"""Restore methods from stored results: backbone, states of finished tasks, carried state.

`new_method`, `load_states` and `load_carried` are the parts for a training step;
`restore_finished_method` combines them for evaluation.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Mapping

import torch

from workers import dist
from workers.errors import UserError
from workers.job import BackboneSettings, StageJob
from workers.methods.base import Method, MethodSettings
from workers.methods.registration import load_method
from workers.model import vit
from workers.rng import derive_seed
from workers.storage.artifact import Artifact
from workers.storage.taskstate import Carried, TaskState


def load_settings(job: StageJob) -> MethodSettings:
    """Return the method's settings, validated."""
    return load_method(job).Settings.model_validate(job.settings)


def load_backbone(job: StageJob) -> torch.nn.Module:
    """Return a new copy of the backbone that the job's backbone stage stored.

    A process keeps the last backbone, so that it is read and verified only once.

    Raises:
        UserError: If the weights do not have the digest in the stage's manifest.
    """
    assert job.backbone is not None
    manifest = json.dumps(Artifact.need(job.root, job.backbone).manifest)
    settings = job.backbone_settings.model_dump_json()
    return copy.deepcopy(_verified_backbone(job.root, job.backbone, manifest, settings))


@functools.lru_cache(maxsize=1)
def _verified_backbone(root: str, key: str, manifest: str, settings: str) -> torch.nn.Module:
    # This takes more than a second of CPU time for a ViT-B, half of that time for random weights,
    # which are then replaced. A worker process that runs several stages does it once.
    artifact = Artifact(root, key, json.loads(manifest))
    backbone = vit.build(BackboneSettings.model_validate_json(settings))
    vit.from_bytes(backbone, artifact.read("state.safetensors"), f"backbone {key}")
    digest = vit.compute_digest(backbone)
    if digest != artifact.manifest["digest"]:
        raise UserError(
            f"the backbone in {key} has digest {digest[:12]}, its manifest says "
            f"{artifact.manifest['digest'][:12]}; masks mean nothing on other weights, remove "
            "that folder and run the same command again"
        )
    return backbone


def new_method(job: StageJob) -> Method:
    """Create the stage's method on a new copy of the backbone.

    The constructor and `begin` of the method can draw from torch's default generator. It is seeded
    here, so that the numbers are equal on every rank and in every retry.
    """
    # Load the backbone before seeding: if it is not cached, it is first built with random weights.
    backbone = load_backbone(job)
    task_name = job.task.name if job.task else ""
    torch.manual_seed(derive_seed(job.seed, "begin", task_name, job.step))
    method: Method = load_method(job)(backbone, load_settings(job), job.seed)
    method.join_stream(job.scenario, job.tasks)
    return method


def load_states(job: StageJob, method: Method) -> None:
    """Load the states of the job's finished tasks into `method`, in stream order."""
    for task, key in job.states.items():
        data = Artifact.need(job.root, key).read("task.safetensors")
        method.load_task(TaskState.from_bytes(data, f"state of task {task!r} in {key}"))


def load_carried(job: StageJob) -> Carried | None:
    """Return the merged carried states of the previous stages, or None without previous stages."""
    if not job.previous:
        return None
    parts = {}
    for step, key in job.previous.items():
        data = Artifact.need(job.root, key).read("carried.safetensors")
        parts[step] = Carried.from_bytes(data, f"carried state of {key}")
    return merge_carried(f"stage {job.id}", job.method, parts)


def merge_carried(where: str, method: str, parts: Mapping[str, Carried]) -> Carried:
    """Merge the carried states of several steps into one.

    There are several if a task ends in several steps that do not wait for each other.

    Args:
        where: Description of the states, for errors.
        method: Name of the method.
        parts: The states by step.

    Raises:
        UserError: If two steps carry a tensor or a value with the same name.
    """
    merged = Carried()
    step_by_name: dict[str, str] = {}
    for step, part in parts.items():
        for name in [*part.tensors, *part.meta]:
            first_step = step_by_name.setdefault(name, step)
            if first_step != step:
                raise UserError(
                    f"{where}: steps {first_step!r} and {step!r} of method {method!r} both hand "
                    f"on {name!r}; side by side they must hand on different names"
                )
        merged.tensors |= part.tensors
        merged.meta |= part.meta
    return merged


def restore_finished_method(job: StageJob, group: dist.Group) -> Method:
    """Restore the method in evaluation mode, with its carried state and all finished tasks."""
    method = new_method(job).to(group.device)
    load_states(job, method)
    carried = load_carried(job)
    if carried is not None:
        method.load_carried(carried.to(group.device))
    return method.to(group.device).eval()
