"""`Lab` runs real stages (ingest, backbone, train, evaluate) of tiny streams in this process.

`Lab.run` returns a `Run`: a stream of two tasks of digits with one method. A stage runs when its
result is first used, and its result stays in the store of the lab.
"""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args, get_origin
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from PIL import Image
from pydantic import BaseModel, ValidationError
from torch import Tensor

from pipeline.config import settings as config
from pipeline.graph.build import build_graph
from pipeline.graph.stage import IngestJob
from pipeline.graph.store import Store
from pipeline.launch import attempt
from pipeline.launch.limits import Deadline
from workers import loop, restore
from workers.data.feed import Feed
from workers.data.shards import Shards
from workers.dist import Group
from workers.job import StageJob, find_idle
from workers.methods import METHODS
from workers.methods.base import Method
from workers.storage.artifact import Artifact
from workers.storage.taskstate import Carried, TaskState

# Task -> its classes. The second task has more classes than the first.
TASKS = {"two": ("0", "1"), "three": ("2", "3", "4")}
PER_CLASS = {"train": 40, "test": 20}  # images of each class
# `weight_init` is jax, because with timm's default the model does not learn to distinguish digits.
TINY: dict[str, Any] = {
    "name": "vit_tiny_patch16_224",
    "img_size": 16,
    "crop_pct": 1.0,
    "options": {"patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2, "weight_init": "jax"},
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.05},
    "adamw": {"optimizer": "adamw", "lr": 1e-2, "weight_decay": 0.05},
}
# (method, optimizer) -> settings, if the method's defaults do not suit this optimizer.
SETTINGS: dict[tuple[str, str], dict[str, Any]] = {
    ("ctr_tsm", "sgd"): {"mask_lr": 0.1},
    ("ctr_full", "sgd"): {"mask_lr": 0.1},
    ("der", "adamw"): {"train": {"lr": 3e-3}},
    ("der_p", "adamw"): {"train": {"lr": 3e-3}},
    ("der_p", "sgd"): {"mask_lr": 0.05},
    ("dytox", "adamw"): {"train": {"lr": 5e-3}},
    ("hat", "sgd"): {"mask_lr": 0.05},
    ("adahat", "sgd"): {"mask_lr": 0.05},
    ("ksm", "sgd"): {"mask_lr": 0.02},
    ("meat", "sgd"): {"mask_lr": 4.0},
    ("piggyback", "sgd"): {"mask_lr": 0.3},
    # Its logits are scaled by 10, so the learning rate of `OPTIMIZERS` is too high.
    ("podnet", "adamw"): {"train": {"lr": 3e-3}},
    # The default of 2000 features takes seconds, and the backbone has only 32 features.
    ("ranpac", "adamw"): {"projection": 100},
    # On some CPUs the learning rate of `OPTIMIZERS` is too high for so few steps.
    ("replay", "adamw"): {"train": {"lr": 3e-3}},
    # With `every: 1` the second task chooses among candidate paths too.
    ("rpsnet", "adamw"): {"every": 1, "train": {"lr": 3e-3}},
    # With `keep: 0.5` an inverted mask would keep as many units, and a test could not detect it.
    ("simple_der", "adamw"): {"keep": 0.4, "train": {"lr": 3e-3}},
    ("supsup", "sgd"): {"mask_lr": 1.0},
    ("supsup_nn", "sgd"): {"mask_lr": 1.0},
    ("ucir", "adamw"): {"train": {"lr": 3e-3}},
    ("wsn", "sgd"): {"mask_lr": 1.0},
}
# Method -> epochs of AdamW that it needs to learn both tasks, if three are not sufficient.
EPOCHS: dict[str, int] = {
    "bic": 6,  # each task initializes a new classifier twice
    "der": 10,
    "der_p": 10,
    "dytox": 10,  # at the start its task tokens attend only weakly to the image
    "foster": 10,
    "podnet": 6,
    "replay": 6,
    "rpsnet": 10,
    "simple_der": 10,
    "ucir": 6,
    "wa": 6,
}

# Method -> settings that replace the method's defaults in the check of `per_task`, so that every
# setting of `per_task` can be changed. For example, `dropout` of an adapter needs `adaptformer`.
BESIDE: dict[str, dict[str, Any]] = {
    "adapter": {"kind": "adaptformer"},
    "piggyback": {"mask_lr": 0.3, "train": OPTIMIZERS["sgd"]},
    "supsup": {"scores": "threshold"},
}
# Method -> values that `other_values` returns, because twice or half the usual value would mask
# nothing, or everything. None: the setting is left out.
FIXED_OTHER_VALUES: dict[str, dict[str, Any]] = {
    "meat": {"gamma": 0.5, "alpha": 0.1, "mask_lr": 0.5},
    "simple_der": {"keep": 0.2},
    "supsup": {"density": 0.4, "budget": None},
}


@dataclass(repr=False)
class Lab:
    """A store in a folder, and recorded objects of the stages that ran in this process."""

    folder: Path
    # The group of one rank that runs every stage.
    group: Group = field(default_factory=Group)
    # Stage key -> the method object at the end of training.
    live: dict[str, Any] = field(default_factory=dict)
    # Stage key -> the result of `Method.finish`.
    finished: dict[str, tuple[TaskState, Carried]] = field(default_factory=dict)
    # Stage key -> the splits from which the stage selected images.
    opened: dict[str, set[str]] = field(default_factory=dict)
    # Stage key -> the classes from which the stage selected images.
    looked_up: dict[str, set[str]] = field(default_factory=dict)
    # Text of a config -> its run.
    runs: dict[str, Run] = field(default_factory=dict)

    def forget(self) -> None:
        """Delete the method objects, which refer to images. Results stay in the store.

        After this, `Run.live` and `Run.finished` raise KeyError for stages that ran before.
        """
        self.live.clear()
        self.finished.clear()

    @cached_property
    def store(self) -> Store:
        """The store in the folder."""
        return Store(str(self.folder / "storage"))

    @cached_property
    def card(self) -> Path:
        """Path of the card of a data set, which is written when it is first used.

        The data set has `PER_CLASS` images of each class from scikit-learn's digits, as PNG files.
        """
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
        for name in sorted(chain(*TASKS.values())):
            class_pixels = iter(pixels[labels == int(name)])
            for split, count in PER_CLASS.items():
                folder = self.folder / "raw" / split / name
                folder.mkdir(parents=True)
                for i in range(count):
                    image = (next(class_pixels).reshape(8, 8) * 15).astype("uint8")
                    Image.fromarray(image).save(folder / f"{i:03d}.png")
        path = self.folder / "card.yaml"
        source = {"format": "folder", "path": str(self.folder / "raw")}
        body = {
            "name": "digits",
            "licence": "CC BY 4.0",
            "source": source,
            "classes": ["0", "1", "2", "3", "4"],
        }
        path.write_text(yaml.safe_dump(body))
        return path

    def run(
        self,
        method: str,
        optimizer: str = "adamw",
        order: tuple[str, ...] = tuple(TASKS),
        **train: Any,
    ) -> Run:
        """Return the run of a stream with one method.

        Ingest stages run immediately. Any other stage runs when its result is first used.

        Args:
            method: Name of the method.
            optimizer: `adamw` or `sgd`.
            order: Names of the tasks, in stream order.
            train: Further training settings. The default is two epochs, which are too few for some
                methods to learn.
        """
        return self.run_of(method, {**OPTIMIZERS[optimizer], "epochs": 2, **train}, order)

    def run_of(
        self,
        method: str,
        train: dict[str, Any],
        order: tuple[str, ...] = tuple(TASKS),
        settings: dict[str, Any] | None = None,
        scenario: str = "",
        **rest: Any,
    ) -> Run:
        """Return the run of a config with these sections. As in `run`, stages run when needed.

        Args:
            method: Name of the method.
            train: Section `train`. The default of `epochs` is the number that the method needs to
                learn.
            order: Names of the tasks, in stream order. If `rest` has a stream, the tasks of that
                stream.
            settings: Settings of the method, in place of those in `SETTINGS` and `EPOCHS`.
            scenario: The scenario. "": `task` if the method supports it, else `class`.
            rest: Other sections, such as `data`. They replace the sections made here.
        """
        epochs = 3
        if settings is None:
            optimizer = str(train.get("optimizer"))
            settings = SETTINGS.get((method, optimizer), {})
            if optimizer == "adamw":
                epochs = EPOCHS.get(method, 3)
        scenarios = METHODS[method].scenarios
        scenario = scenario or ("task" if "task" in scenarios else min(scenarios - {"domain"}))
        tasks = [
            {"card": str(self.card), "name": name, "classes": list(TASKS.get(name, ()))}
            for name in order
        ]
        body = {
            "name": "lab",
            "storage": self.store.storage,
            "tracking": False,
            "backbone": TINY,
            "train": {"epochs": epochs, "batch_size": 16, **train},
            "methods": {method: settings},
            "stream": {"scenario": scenario, "tasks": tasks},
            **rest,
        }
        config_text = repr(body)
        if config_text not in self.runs:
            checked = config.check(body, "lab")
            graph, _ = build_graph(checked, self.store)
            ingests = [stage for stage in graph if isinstance(stage.job, IngestJob)]
            for stage in ingests:
                if Artifact.open(self.store.root, stage.key) is None:
                    deadline = Deadline(config.ClusterSettings(), "ingest")
                    attempt.run_ingest(self.store, stage, map, lambda event: None, deadline)
                    graph, _ = build_graph(checked, self.store)  # keys depend on ingested images
            jobs = {}
            for stage in graph:
                if isinstance(stage.job, StageJob) and stage.step != "report":
                    jobs[stage.id] = stage.job
            self.runs[config_text] = Run(self, method, order, jobs)
        return self.runs[config_text]

    def stage(self, job: StageJob, group: Group | None = None) -> Artifact:
        """Run a stage, unless the store has its result, and return its artifact.

        The stage is recorded in `live`, `finished`, `opened` and `looked_up`.
        """
        fit = loop.fit
        select = Shards.select

        def recording_fit(job: StageJob, method: Method, *rest: Any) -> Any:
            self.live[job.key] = method
            finish = method.finish

            def recording_finish() -> tuple[TaskState, Carried]:
                self.finished[job.key] = finish()
                return self.finished[job.key]

            method.finish = recording_finish  # type: ignore[method-assign]
            return fit(job, method, *rest)

        def recording_select(shards: Shards, split: str, classes: Any) -> pa.Table:
            self.opened.setdefault(job.key, set()).add(split)
            self.looked_up.setdefault(job.key, set()).update(classes)
            return select(shards, split, classes)

        with (
            mock.patch.object(loop, "fit", recording_fit),
            mock.patch.object(Shards, "select", recording_select),
        ):
            loop.run_stage(job, group or self.group, lambda event: None)
        return Artifact.need(job.root, job.key)


@dataclass
class Run:
    """A run of a stream with one method. An argument `task` is a position in the stream, from 0."""

    lab: Lab
    method: str
    order: tuple[str, ...]  # names of the tasks
    jobs: dict[str, StageJob]  # stage id -> job; without stages of ingest and report

    def stages(self, task: int) -> list[StageJob]:
        """Return the jobs of the training steps of a task, in order."""
        prefix = f"{self.method}/{self.order[task]}/"
        return [
            job
            for stage_id, job in self.jobs.items()
            if stage_id.startswith(prefix) and not stage_id.endswith("/evaluate")
        ]

    def artifact(self, job: StageJob) -> Artifact:
        """Return the result of a stage. If it is missing, run the stage and its dependencies."""
        if Artifact.open(job.root, job.key) is None:
            self.prepare(job)
            return self.lab.stage(job)
        return Artifact.need(job.root, job.key)

    def prepare(self, job: StageJob) -> None:
        """Run the direct dependencies of a stage that have no results, and what these need."""
        keys = {job.backbone, job.features, *job.previous.values(), *job.states.values()}
        for parent in self.jobs.values():
            if parent.key in keys:
                self.artifact(parent)

    def trained(self, task: int) -> Artifact:
        """Return the result of the last training step of a task."""
        return self.artifact(self.stages(task)[-1])

    def live(self, task: int) -> Any:
        """Return the method object at the end of the last training step of a task."""
        self.trained(task)
        return self.lab.live[self.stages(task)[-1].key]

    def finished(self, task: int) -> tuple[TaskState, Carried]:
        """Return the result of `Method.finish` in the last training step of a task."""
        self.trained(task)
        return self.lab.finished[self.stages(task)[-1].key]

    def evaluated(self, task: int) -> dict[str, Any]:
        """Return the result of the `evaluate` stage after a task, from its manifest."""
        return self.artifact(self.evaluate_job(task)).manifest["result"]

    def evaluate_job(self, task: int) -> StageJob:
        """Return the job of the `evaluate` stage after a task."""
        return self.jobs[f"{self.method}/{self.order[task]}/evaluate"]

    def state(self, task: int) -> TaskState:
        """Return the stored state of a task."""
        return TaskState.from_bytes(self.trained(task).read("task.safetensors"))

    def carried(self, task: int) -> Carried:
        """Return the stored carried state after a task."""
        return Carried.from_bytes(self.trained(task).read("carried.safetensors"))

    def served(self, after: int) -> Any:
        """Return a method with all tasks up to `after`, loaded as in the `evaluate` stage."""
        self.prepare(self.evaluate_job(after))
        return restore.restore_finished_method(self.evaluate_job(after), self.lab.group)

    def fresh(self, task: int = 0) -> Any:
        """Return a new method as in the first stage of `task`: with a backbone, without tasks."""
        job = self.stages(task)[0]
        backbone_job = next(other for other in self.jobs.values() if other.key == job.backbone)
        self.artifact(backbone_job)
        return restore.new_method(job)

    def images(self, task: int) -> Tensor:
        """Return the first batch of test images of a task, (n, 3, 16, 16)."""
        job = self.stages(task)[0]
        assert job.task is not None
        feed = Feed(job, (job.task,), "test", self.lab.group, training=False)
        return next(iter(feed.evaluate())).images


@torch.no_grad()
def compute_task_logits(method: Method, images: Tensor, task: str) -> Tensor:
    """Return the logits of a task for images, computed as in serving: (n, classes)."""
    return method.eval().logits(images, task).clone()


def other_values(method: str) -> dict[str, Any]:
    """Return a valid and unusual value for each setting that a task may override (`per_task`).

    The usual values are the defaults, replaced by the settings of `BESIDE`. Values of
    `FIXED_OTHER_VALUES` have priority over derived values. Settings that have no effect in
    combination with the other values are left out.
    """
    cls = METHODS[method]
    model_fields = cls.Settings.model_fields
    fields = {info.alias or name: name for name, info in model_fields.items()}
    usual = cls.Settings.model_validate(
        {name: value for name, value in BESIDE.get(method, {}).items() if name in fields}
    )
    values = {}
    for name in sorted(cls.per_task):
        values[name] = other_value(cls.Settings, name, getattr(usual, fields[name]))
    values |= FIXED_OTHER_VALUES.get(method, {})
    together = cls.Settings.model_validate(usual.model_dump(by_alias=True) | values)
    idle = find_idle(together, scenario="task")
    return {k: value for k, value in values.items() if value is not None and k not in idle}


def other_value(settings: type[BaseModel], name: str, usual: Any) -> Any:
    """Return a valid value of a setting, other than the usual one.

    Args:
        settings: Type of the settings.
        name: Name of the setting in a config.
        usual: Usual value of this setting.

    Raises:
        AssertionError: If no other value is found.
    """
    annotations = {i.alias or n: i.annotation for n, i in settings.model_fields.items()}
    for candidate in _candidates(usual, annotations[name]):
        if candidate != usual and _accepts_settings(settings, {name: candidate}):
            return candidate
    raise AssertionError(f"no other value for {name} of {settings.__name__} is known; add one")


def _candidates(usual: Any, annotation: Any) -> list[Any]:
    """Return possible values for a setting of a type: numbers, and the values of a `Literal`."""
    if isinstance(usual, bool):
        return [not usual]
    candidates: list[Any] = [0.5, 3]
    if isinstance(usual, (int, float)):
        candidates = [2 * usual, usual / 2, *candidates]
    for part in (annotation, *get_args(annotation)):
        if get_origin(part) is Literal:
            candidates += get_args(part)
    return candidates


def _accepts_settings(settings: type[BaseModel], values: dict[str, Any]) -> bool:
    with contextlib.suppress(ValidationError):
        return bool(settings.model_validate(values))
    return False


def again(job: StageJob, name: str, **changes: Any) -> StageJob:
    """Return a copy of a job with another key, so that the stage runs again."""
    return replace(job, key=f"{job.key}-{name}", **changes)


def contents(artifact: Artifact) -> dict[str, str]:
    """Return path -> sha256 of every file in an artifact's folder, also of unlisted files.

    Unlisted files are those that the artifact's manifest does not name.
    """
    folder = Path(artifact.root) / artifact.key
    digests = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            digests[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return digests


def history(artifact: Artifact) -> list[dict[str, Any]]:
    """Return the training history, one row per epoch, without the measured time `seconds`."""
    table = pq.read_table(pa.BufferReader(artifact.read("history.parquet")))
    rows: list[dict[str, Any]] = table.to_pylist()
    for row in rows:
        row.pop("seconds", None)
    return rows
