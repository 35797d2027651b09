"""The builder of a graph: collects stages, and gives every stage its key."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pipeline.config.settings import Config
from pipeline.data.digests import ClassDigests
from pipeline.graph.raw_data import KnownSource
from pipeline.graph.stage import UNKNOWN, Stage
from pipeline.graph.store import Store, compute_key
from workers.job import BackboneSettings, DataSettings, StageJob, Task, TrainSettings
from workers.methods import METHODS
from workers.methods.base import Method, MethodSettings
from workers.methods.registration import get_code_digest, method_module


@dataclass
class Builder:
    """Collects the stages of one graph.

    Attributes:
        config: The config of the run.
        store: Knows the data of the cards.
        provenance: Git commit and versions of packages, for manifests.
        split: Split that evaluations read.
        ask_sources: Ask a source on another machine for its fingerprint although its result exists.
        sources: Raw data that was looked at before, by card.
        backbone: Settings as workers get them; `add_backbone` sets them.
        stages: The stages so far.
        keys: Stage id -> key.
        images: Name of a card -> digests of the images; None before they are ingested.
        cards_without_data: Names of cards without source and without shards.
        code_digests: Name of a method -> digest of the code of an external method.
        provisional: Ids of the stages with keys that are unknown until an ingest has run.
    """

    config: Config
    store: Store
    provenance: dict[str, Any]
    split: Literal["test", "val"] = "test"
    ask_sources: bool = True
    sources: Mapping[str, KnownSource] = field(default_factory=dict)
    backbone: BackboneSettings = field(default_factory=BackboneSettings)
    stages: list[Stage] = field(default_factory=list)
    keys: dict[str, str] = field(default_factory=dict)
    images: dict[str, ClassDigests | None] = field(default_factory=dict)
    cards_without_data: set[str] = field(default_factory=set)
    code_digests: dict[str, str] = field(default_factory=dict)
    provisional: set[str] = field(default_factory=set)

    def add(
        self, stage_id: str, step: str, inputs: Mapping[str, Any], parents: list[str], **rest: Any
    ) -> Stage:
        """Make a stage, add it to the graph, and return it.

        Args:
            stage_id: Its id.
            step: Kind of the stage.
            inputs: Inputs of the key.
            parents: Ids of the parents.
            rest: Other attributes of `Stage`.
        """
        return self.append(self.make_stage(stage_id, step, inputs, parents, **rest))

    def make_stage(
        self, stage_id: str, step: str, inputs: Mapping[str, Any], parents: list[str], **rest: Any
    ) -> Stage:
        """Return a stage with its key. Its job gets the key and the parents' keys.

        Keys of ingest stages are not part of the key: the inputs contain the digests of the images
        that the stage uses (see `digest_images`). See `add` for the arguments.
        """
        parent_keys = [self.keys[parent] for parent in parents]
        is_ingest = [parent.startswith("data/") for parent in parents]
        trained = [key for key, is_data in zip(parent_keys, is_ingest, strict=True) if not is_data]
        key = compute_key({"step": step, **inputs}, trained)
        if isinstance(rest.get("job"), StageJob):
            rest["job"] = replace(rest["job"], key=key, parents=tuple(parent_keys))
        digests = inputs.get("images", {}).values()
        is_provisional = any(digest.startswith(UNKNOWN) for digest in digests) or any(
            parent in self.provisional for parent in parents
        )
        if is_provisional:
            self.provisional.add(stage_id)
        return Stage(
            stage_id, step, key, inputs, tuple(parents), is_provisional=is_provisional, **rest
        )

    def digest_images(self, tasks: Sequence[Task], splits: Sequence[str]) -> dict[str, str]:
        """Return the name of each task -> a digest of the images in some splits.

        Before a card is ingested its images are unknown. The digest of the source is used then, and
        the key of the stage is a placeholder that no result has.

        Args:
            tasks: The tasks.
            splits: Names of splits.
        """
        digests: dict[str, str] = {}
        for task in tasks:
            known = self.images[task.card]
            if known is None:
                digests[task.name] = f"{UNKNOWN} {task.data}"
                continue
            images = [[known.get(split, {}).get(name) for name in task.classes] for split in splits]
            parts = {} if task.parts is None else {"parts": task.parts}
            digests[task.name] = compute_key({"images": images, **parts}, ())
        return digests

    def append(self, stage: Stage) -> Stage:
        """Add a stage to the graph, and return it."""
        self.stages.append(stage)
        self.keys[stage.id] = stage.key
        return stage

    def get_keys(self, stage_ids: Mapping[str, str]) -> dict[str, str]:
        """Replace the stage ids of a mapping by the keys of these stages."""
        return {name: self.keys[stage_id] for name, stage_id in stage_ids.items()}

    def method(self, label: str) -> type[Method]:
        """Return the class of a method by its label in the config."""
        return METHODS[self.config.methods[label].method]

    def code(self, method: str) -> dict[str, str]:
        """Return the input for keys that stands for a method's code; empty for built-in methods."""
        if method not in self.code_digests:
            self.code_digests[method] = get_code_digest(method)
        digest = self.code_digests[method]
        return {"code": digest} if digest else {}

    def settings(self, label: str, task: Task | None = None) -> MethodSettings:
        """Return a method's settings for the steps of a task; None: for all tasks."""
        task_name = None if task is None else task.name
        entry = self.config.merge_entry(label, task_name)
        return METHODS[entry.method].Settings.model_validate(entry.settings)

    def train_and_data(
        self, label: str, step: str, task: Task | None
    ) -> tuple[TrainSettings, DataSettings]:
        """Return the training and data settings of a step of a method.

        Images without labels cannot validate anything: the step trains on all images, to the last
        epoch.

        Args:
            label: Label of the method.
            step: Kind of the stage.
            task: The task; None: settings for all tasks.
        """
        task_name = None if task is None else task.name
        train = self.config.merge_train(label, step, task=task_name)
        data = self.config.merge_data(label)
        if task is not None and task.role == "unlabelled":
            train = train.model_copy(update={"keep": "last"})
            data = data.model_copy(update={"val_fraction": 0.0})
        return train, data

    def backbone_job(self, base: Task | None) -> StageJob:
        """Return the job of the backbone stage.

        Args:
            base: The task that it is trained on, or None.
        """
        tasks = () if base is None else (base,)
        train = self.config.backbone_train()
        return self._job(
            id="backbone",
            step="backbone",
            method="finetune",
            settings={},
            data=self.config.data,
            train=train,
            task=base,
            tasks=tasks,
            backbone=None,
        )

    def features_job(self, task: Task) -> StageJob:
        """Return the job of the stage with the features of a task's train images."""
        data = DataSettings(val_fraction=0.0, resident_mb=self.config.data.resident_mb)
        return self._job(
            id=f"features/{task.name}",
            step="features",
            method="",
            settings={},
            data=data,
            train=TrainSettings(),
            task=task,
            tasks=(task,),
            backbone=self.keys["backbone"],
        )

    def method_job(
        self,
        stage_id: str,
        step: str,
        label: str,
        task: Task,
        tasks: tuple[Task, ...],
        **rest: Any,
    ) -> StageJob:
        """Return the job of a method's stage. It contains only settings that its step reads.

        Args:
            stage_id: Id of the stage.
            step: Kind of the stage.
            label: Label of the method.
            task: The task.
            tasks: The tasks so far.
            rest: Other attributes of `StageJob`.
        """
        # An evaluation serves all tasks, so it has no settings for one task.
        settings_task = None if step == "evaluate" else task
        task_name = None if settings_task is None else settings_task.name
        entry = self.config.merge_entry(label, task_name)
        train, data = self.train_and_data(label, step, settings_task)
        ignored = METHODS[entry.method].ignored_settings(step)
        if step == "evaluate":  # a bundle of its job has all settings
            ignored = frozenset()
        settings = {key: value for key, value in entry.settings.items() if key not in ignored}
        return self._job(
            id=stage_id,
            step=step,
            method=entry.method,
            method_module=method_module(entry.method),
            method_code=self.code(entry.method).get("code", ""),
            settings=settings,
            data=data,
            train=train,
            task=task,
            tasks=tasks,
            backbone=self.keys["backbone"],
            **rest,
        )

    def _job(self, **rest: Any) -> StageJob:
        """Return a job with the attributes that all jobs share; `make_stage` sets its key."""
        config = self.config
        return StageJob(
            key="",
            root=self.store.root,
            scenario=config.stream.scenario,
            seed=config.seed,
            backbone_settings=self.backbone,
            provenance=self.provenance,
            checkpoint_s=config.cluster.checkpoint_s,
            loader_workers=config.cluster.loader_workers,
            cache=cache_folder(config.cluster.cache, self.store.storage),
            cache_gb=config.cluster.cache_gb,
            **rest,
        )


def cache_folder(configured: str, storage: str) -> str:
    """Return the node-local folder for shards and decoded images.

    It is below the configured folder; else in the storage if that is on a disk; else below the
    temporary folder.

    Args:
        configured: `cluster.cache`; empty if it is not set.
        storage: URI of the storage.
    """
    if configured:
        # A subfolder, so that other files in the configured folder are never deleted.
        return os.path.join(os.path.abspath(os.path.expanduser(configured)), "accrete-cache")
    if "://" in storage:
        return os.path.join(tempfile.gettempdir(), f"accrete-cache-{os.getuid()}")
    folder = os.path.join(os.path.abspath(storage), "cache")
    # A cache belongs to one user: another user of the same storage gets another folder.
    if os.path.isdir(folder) and os.stat(folder).st_uid != os.getuid():
        return f"{folder}-{os.getuid()}"
    return folder
