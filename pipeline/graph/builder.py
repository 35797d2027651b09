"""Builder of a graph: collects stages and computes the key of each stage."""

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
        store: Store of the run. It also caches information about the data of the cards.
        provenance: Git commit and versions of packages, for manifests.
        split: Images for evaluations: `val` in a search, otherwise `test`.
        ask_sources: Contact the Hugging Face hub, and a data source on another machine even if its
            data was ingested.
        sources: Known state of the raw data (its fingerprint, and whether it exists), by name of
            the card. The raw data of other cards is looked up.
        backbone: Backbone settings as in a job; `add_backbone` sets them.
        stages: The stages so far.
        keys: Stage id -> key.
        images: Name of a card -> digests of the images by split and class; None if they are not
            ingested yet.
        cards_without_data: Names of cards with neither a source nor ingested shards.
        code_digests: Name of a method -> digest of the code; "" for a built-in method.
        provisional: Ids of stages with placeholder keys, because their images, or those of an
            ancestor, are not ingested yet.
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
        """Create a stage, add it to the graph, and return it.

        Args:
            stage_id: Id of the stage.
            step: Kind of the stage: `ingest`, `train` or `evaluate`, for example.
            inputs: Everything that enters the key, besides the keys of the parents.
            parents: Ids of the parents.
            rest: Other attributes of `Stage`.
        """
        return self.append(self.make_stage(stage_id, step, inputs, parents, **rest))

    def make_stage(
        self, stage_id: str, step: str, inputs: Mapping[str, Any], parents: list[str], **rest: Any
    ) -> Stage:
        """Return a stage with its key. Its job gets the key and the keys of the parents.

        The keys of parents that are ingest stages do not enter the key. Instead, the inputs contain
        the digests of the images that the stage uses (see `digest_images`). See `add` for the
        arguments.
        """
        parent_keys = [self.keys[parent] for parent in parents]
        is_ingest = [parent.startswith("data/") for parent in parents]
        # the keys of parents that enter the key
        trained = [key for key, is_data in zip(parent_keys, is_ingest, strict=True) if not is_data]
        key = compute_key({"step": step, **inputs}, trained)
        if isinstance(rest.get("job"), StageJob):
            rest["job"] = replace(rest["job"], key=key, parents=tuple(parent_keys))
        # an evaluation can also read the images of the next task
        next_images = inputs.get("next", {}).get("images", {})
        digests = [*inputs.get("images", {}).values(), *next_images.values()]
        is_provisional = any(digest.startswith(UNKNOWN) for digest in digests) or any(
            parent in self.provisional for parent in parents
        )
        if is_provisional:
            self.provisional.add(stage_id)
        return Stage(
            stage_id, step, key, inputs, tuple(parents), is_provisional=is_provisional, **rest
        )

    def digest_images(self, tasks: Sequence[Task], splits: Sequence[str]) -> dict[str, str]:
        """Return a digest of the images of each task in the given splits, by name of the task.

        The digest also covers the order of the task's classes, and its slices of the images
        (`Task.parts`).

        The images of a card are unknown before it is ingested. The digest then is a placeholder
        that contains the key of the ingest stage. The key of a stage with such a digest matches no
        stored result.

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
        """Replace the stage ids in the values of a mapping by the keys of the stages."""
        return {name: self.keys[stage_id] for name, stage_id in stage_ids.items()}

    def method(self, label: str) -> type[Method]:
        """Return the class of a method by its label in the config."""
        return METHODS[self.config.methods[label].method]

    def code(self, method: str) -> dict[str, str]:
        """Return the digest of a method's code as an input of keys; empty for built-in methods."""
        if method not in self.code_digests:
            self.code_digests[method] = get_code_digest(method)
        digest = self.code_digests[method]
        return {"code": digest} if digest else {}

    def settings(self, label: str, task: Task | None = None) -> MethodSettings:
        """Return the settings of a method.

        Args:
            label: Label of the method.
            task: Apply the settings that the config has only for this task. None: leave them out.
        """
        task_name = None if task is None else task.name
        entry = self.config.merge_entry(label, task_name)
        return METHODS[entry.method].Settings.model_validate(entry.settings)

    def train_and_data(
        self, label: str, step: str, task: Task | None
    ) -> tuple[TrainSettings, DataSettings]:
        """Return the training and data settings of a step of a method.

        A step on images without labels holds out no images for validation, which needs labels, and
        keeps the last epoch.

        Args:
            label: Label of the method.
            step: Kind of the stage.
            task: Apply the settings that the config has only for this task. None: leave them out.
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
            base: The task that the backbone has learned or is trained on, or None.
        """
        tasks = () if base is None else (base,)
        train = self.config.backbone_train()
        return self._job(
            id="backbone",
            step="backbone",
            method="finetune",  # the base task is trained like a task of this method
            settings={},
            data=self.config.data,
            train=train,
            task=base,
            tasks=tasks,
            backbone=None,
        )

    def features_job(self, task: Task) -> StageJob:
        """Return the job of the stage with the backbone's features of a task's train images."""
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
        ignored: frozenset[str] = frozenset(),
        **rest: Any,
    ) -> StageJob:
        """Return the job of a stage of a method.

        Args:
            stage_id: Id of the stage.
            step: Kind of the stage.
            label: Label of the method.
            task: The task.
            tasks: The tasks so far. For an evaluation, the tasks that the model serves.
            ignored: Names of settings that the step does not read; the job has their defaults. The
                job of an evaluation needs all settings, because bundles are made from it.
            rest: Other attributes of `StageJob`.
        """
        # an evaluation serves several tasks, so the settings for a single task do not apply
        settings_task = None if step == "evaluate" else task
        task_name = None if settings_task is None else settings_task.name
        entry = self.config.merge_entry(label, task_name)
        train, data = self.train_and_data(label, step, settings_task)
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
    """Return the cache folder for shards and decoded images on a node.

    It is a subfolder of the configured folder. If no folder is configured, it is in the storage, or
    in the temporary folder of the system if the storage is a bucket.

    Args:
        configured: `cluster.cache`; empty if it is not set.
        storage: Path or URI of the storage.
    """
    if configured:
        # a subfolder, so that other files in the configured folder are never deleted
        return os.path.join(os.path.abspath(os.path.expanduser(configured)), "accrete-cache")
    if "://" in storage:
        return os.path.join(tempfile.gettempdir(), f"accrete-cache-{os.getuid()}")
    folder = os.path.join(os.path.abspath(storage), "cache")
    # each user of a shared storage has a separate cache
    if os.path.isdir(folder) and os.stat(folder).st_uid != os.getuid():
        return f"{folder}-{os.getuid()}"
    return folder
