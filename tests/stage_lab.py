"""The laboratory: streams of tiny tasks through the real ingest, backbone, train and evaluate
stages, in this process."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args, get_origin
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from PIL import Image
from pydantic import ValidationError
from torch import Tensor
from torch.multiprocessing.spawn import start_processes

from pipeline import config
from pipeline.graph.build import graph_of
from pipeline.graph.stage import IngestJob
from pipeline.graph.store import Store
from pipeline.launch import attempt
from tests import small_run
from workers import loop, restore
from workers.data.feed import Feed
from workers.data.shards import Shards
from workers.dist import Group
from workers.job import StageJob
from workers.methods import METHODS
from workers.methods.base import Method
from workers.storage.artifact import Artifact
from workers.storage.taskstate import Carried, TaskState

TASKS = {"two": ("0", "1"), "three": ("2", "3", "4")}  # the later one has more classes
PER_CLASS = {"train": 40, "test": 20}
TINY: dict[str, Any] = {
    "name": "vit_tiny_patch16_224",
    "img_size": 16,
    "crop_pct": 1.0,
    "options": {"patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2, "weight_init": "jax"},
}  # timm's usual start is too faint to tell digits apart
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.05},
    "adamw": {"optimizer": "adamw", "lr": 1e-2, "weight_decay": 0.05},
}
SETTINGS: dict[
    tuple[str, str], dict[str, Any]
] = {  # what a method needs under an optimizer that its defaults are not for
    ("ctr_tsm", "sgd"): {"mask_lr": 0.1},
    ("ctr_full", "sgd"): {"mask_lr": 0.1},
    ("der", "adamw"): {"train": {"epochs": 10, "lr": 3e-3}},  # its classifier starts anew, twice
    ("der_p", "adamw"): {"train": {"epochs": 10, "lr": 3e-3}},
    ("der_p", "sgd"): {"mask_lr": 0.05},
    ("dytox", "adamw"): {
        "train": {"epochs": 10, "lr": 5e-3}
    },  # it starts with tokens that hardly see the image
    ("hat", "sgd"): {"mask_lr": 0.05},
    ("adahat", "sgd"): {"mask_lr": 0.05},
    ("ksm", "sgd"): {"mask_lr": 0.02},
    ("meat", "sgd"): {"mask_lr": 4.0},
    ("piggyback", "sgd"): {"mask_lr": 0.3},
    ("podnet", "adamw"): {
        "train": {"epochs": 6, "lr": 3e-3}
    },  # under a scale of 10 the usual rate is too high
    ("replay", "adamw"): {
        "train": {"epochs": 6, "lr": 3e-3}
    },  # the usual rate is too high for so few steps on some kinds of CPU
    ("rpsnet", "adamw"): {
        "every": 1,
        "train": {"epochs": 6, "lr": 3e-3},
    },  # the second task draws too, among candidates
    ("simple_der", "adamw"): {
        "keep": 0.4,
        "train": {"epochs": 10, "lr": 3e-3},
    },  # at one half its masks, turned round, would fit; no answer tells units apart
    ("supsup", "sgd"): {"mask_lr": 1.0},
    ("supsup_nn", "sgd"): {"mask_lr": 1.0},
    ("ucir", "adamw"): {"train": {"epochs": 6, "lr": 3e-3}},
    ("wsn", "sgd"): {"mask_lr": 1.0},
}

BESIDE: dict[
    str, dict[str, Any]
] = {  # under which every setting of `per_task` can be at another value
    "adapter": {"kind": "adaptformer"},
    "piggyback": {"mask_lr": 0.3, "train": OPTIMIZERS["sgd"]},
    "supsup": {"scores": "threshold"},
}
OWN: dict[str, dict[str, Any]] = {  # where twice or half the usual value would mask nothing, or all
    "meat": {"gamma": 0.5, "alpha": 0.1, "mask_lr": 0.5},
    "simple_der": {"keep": 0.2},
    "supsup": {"density": 0.4, "budget": 5.0},
}


@dataclass(repr=False)
class Lab:
    """A store, and what ran in it. By stage key: `live`, the method as training left it;
    `finished`, what it handed out at the end; `opened`, the splits whose images were looked up;
    `looked_up`, the classes whose images were."""

    folder: Path
    group: Group = field(default_factory=Group)  # whose one rank runs every stage
    live: dict[str, Method] = field(default_factory=dict)
    finished: dict[str, tuple[TaskState, Carried]] = field(default_factory=dict)
    opened: dict[str, set[str]] = field(default_factory=dict)
    looked_up: dict[str, set[str]] = field(default_factory=dict)
    runs: dict[str, Run] = field(default_factory=dict)

    @cached_property
    def store(self) -> Store:
        return Store(str(self.folder / "storage"))

    @cached_property
    def card(self) -> Path:
        """A card over PNG files of scikit-learn's digits, a few dozen per class."""
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
        for name in sorted({c for classes in TASKS.values() for c in classes}):
            class_pixels = iter(pixels[labels == int(name)])
            for split, count in PER_CLASS.items():
                folder = self.folder / "raw" / split / name
                folder.mkdir(parents=True)
                for i in range(count):
                    Image.fromarray((next(class_pixels).reshape(8, 8) * 15).astype("uint8")).save(
                        folder / f"{i:03d}.png"
                    )
        path = self.folder / "card.yaml"
        source = {"format": "folder", "path": str(self.folder / "raw")}
        path.write_text(
            yaml.safe_dump(
                {"name": "digits", "licence": "CC BY 4.0", "source": source, "classes": [*"01234"]}
            )
        )
        return path

    def run(
        self,
        method: str,
        optimizer: str = "adamw",
        order: tuple[str, ...] = tuple(TASKS),
        **train: Any,
    ) -> Run:
        """A stream of `order` under one method; its stages run when they are asked for."""
        return self.run_of(method, {**OPTIMIZERS[optimizer], **train}, order)

    def run_of(
        self, method: str, train: dict[str, Any], order: tuple[str, ...] = tuple(TASKS), **rest: Any
    ) -> Run:
        """The same with any sections of a config (`data`, `backbone`, `stream`)."""
        scenarios = METHODS[method].scenarios
        body = {
            "name": "lab",
            "storage": self.store.storage,
            "tracking": False,
            "backbone": TINY,
            "train": {"epochs": 3, "batch_size": 16, **train},
            "methods": {method: SETTINGS.get((method, str(train.get("optimizer"))), {})},
            "stream": {
                "scenario": "task" if "task" in scenarios else min(scenarios),
                "tasks": [
                    {"card": str(self.card), "name": name, "classes": list(TASKS[name])}
                    for name in order
                ],
            },
            **rest,
        }
        known = repr(body)
        if known not in self.runs:
            graph, _ = graph_of(config.check(body, "lab"), self.store)
            stages = {s.id: s.job for s in graph if s.step != "report"}
            for stage in graph:
                if (
                    isinstance(stage.job, IngestJob)
                    and Artifact.open(self.store.root, stage.key) is None
                ):
                    attempt.run_ingest(self.store, stage, map, lambda event: None)
            self.runs[known] = Run(
                self, method, order, {i: j for i, j in stages.items() if isinstance(j, StageJob)}
            )
        return self.runs[known]

    def stage(self, job: StageJob, group: Group | None = None) -> Artifact:
        """Runs a stage, unless its result stands, and looks over its shoulder."""
        fit, select = loop.fit, Shards.select

        def watched(job: StageJob, method: Method, *rest: Any) -> Any:
            self.live[job.key], finish = method, method.finish

            def finished() -> tuple[TaskState, Carried]:
                self.finished[job.key] = finish()
                return self.finished[job.key]

            method.finish = finished  # type: ignore[method-assign]
            return fit(job, method, *rest)

        def noted(shards: Shards, split: str, classes: Any) -> pa.Table:
            self.opened.setdefault(job.key, set()).add(split)
            self.looked_up.setdefault(job.key, set()).update(classes)
            return select(shards, split, classes)

        with mock.patch.object(loop, "fit", watched), mock.patch.object(Shards, "select", noted):
            loop.run_stage(job, group or self.group, lambda event: None)
        return Artifact.need(job.root, job.key)


@dataclass
class Run:
    """A stream under one method. Tasks are named by their place in the stream, from 0."""

    lab: Lab
    method: str
    order: tuple[str, ...]
    jobs: dict[str, StageJob]

    def stages(self, task: int) -> list[StageJob]:
        """The training steps of a task, in order."""
        head = f"{self.method}/{self.order[task]}/"
        return [
            job
            for i, job in self.jobs.items()
            if i.startswith(head) and not i.endswith("/evaluate")
        ]

    def artifact(self, job: StageJob) -> Artifact:
        """The result of a stage; whatever it needs runs first."""
        if Artifact.open(job.root, job.key) is None:
            self.prepare(job)
            return self.lab.stage(job)
        return Artifact.need(job.root, job.key)

    def prepare(self, job: StageJob) -> None:
        """Runs what a stage needs."""
        for other in self.jobs.values():
            if other.key in (job.backbone, *job.previous.values(), *job.states.values()):
                self.artifact(other)

    def trained(self, task: int) -> Artifact:
        """The result of the last training step of a task."""
        return self.artifact(self.stages(task)[-1])

    def live(self, task: int) -> Method:
        """The method as the last step of a task left it."""
        self.trained(task)
        return self.lab.live[self.stages(task)[-1].key]

    def finished(self, task: int) -> tuple[TaskState, Carried]:
        """What the last step of a task handed out, before it became bytes."""
        self.trained(task)
        return self.lab.finished[self.stages(task)[-1].key]

    def evaluated(self, task: int) -> dict[str, Any]:
        return self.artifact(self.evaluate_job(task)).manifest["result"]

    def evaluate_job(self, task: int) -> StageJob:
        return self.jobs[f"{self.method}/{self.order[task]}/evaluate"]

    def state(self, task: int) -> TaskState:
        return TaskState.from_bytes(self.trained(task).read("task.safetensors"))

    def carried(self, task: int) -> Carried:
        return Carried.from_bytes(self.trained(task).read("carried.safetensors"))

    def served(self, after: int) -> Method:
        """The method as it stands after a task, with all tasks up to it loaded, as `evaluate` and
        `predict` load it."""
        self.prepare(self.evaluate_job(after))
        return restore.finished_method(self.evaluate_job(after), self.lab.group)

    def fresh(self, task: int = 0) -> Method:
        """A method as a stage of `task` starts with it: the common backbone and nothing else."""
        job = self.stages(task)[0]
        self.artifact(next(j for j in self.jobs.values() if j.key == job.backbone))
        return restore.new_method(job)

    def images(self, task: int) -> Tensor:
        """Test images of a task (n, 3, 16, 16)."""
        job = self.stages(task)[0]
        assert job.task is not None
        return next(
            iter(Feed(job, (job.task,), "test", self.lab.group, training=False).evaluate())
        ).images


@dataclass
class Steps:
    """What one rank did in one stage: rows of its micro-batches and bytes synchronised, step by
    step."""

    rows: list[list[int]] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    synchronised: list[int] = field(default_factory=list)
    trainable: int = 0


def on_ranks(
    jobs: list[StageJob], world: int, folder: Path, stop_after: dict[str, int] | None = None
) -> list[list[Steps]]:
    """Runs stages on `world` processes joined by gloo. Returns what each rank did in each stage;
    stop_after: stage key -> the number of steps after which all ranks break off."""
    folder.mkdir()
    small_run.processes()
    start_processes(
        _rank, (world, jobs, str(folder), stop_after or {}), nprocs=world, start_method="forkserver"
    )
    return [pickle.loads((folder / f"rank-{rank}").read_bytes()) for rank in range(world)]


def _rank(
    rank: int, world: int, jobs: list[StageJob], folder: str, stop_after: dict[str, int]
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", f"file://{folder}/meet", timeout=timedelta(seconds=120), rank=rank, world_size=world
    )
    done: list[Steps] = []
    step, add = loop.train_step, Group.sum_gradients

    def noted_step(method: Method, optimizer: Any, batches: Any, *rest: Any) -> Any:
        if len(done[-1].rows) == stop_after.get(rest[1].key):
            raise InterruptedError
        done[-1].rows.append(
            [row for batch in batches if batch.weight for row in batch.draw.positions.tolist()]
        )
        done[-1].weights.append(sum(batch.weight for batch in batches))
        done[-1].trainable = sum(p.numel() for p in method.parameters() if p.requires_grad)
        return step(method, optimizer, batches, *rest)

    def noted_sum(group: Group, parameters: list[Tensor]) -> int:
        done[-1].synchronised.append(add(group, parameters))
        return done[-1].synchronised[-1]

    with (
        mock.patch.object(loop, "train_step", noted_step),
        mock.patch.object(Group, "sum_gradients", noted_sum),
    ):
        for job in jobs:
            done.append(Steps())
            with contextlib.suppress(InterruptedError), small_batches():
                loop.run_stage(job, Group(rank, world), lambda event: None)
            torch.distributed.barrier()
    (Path(folder) / f"rank-{rank}").write_bytes(pickle.dumps(done))
    torch.distributed.destroy_process_group()


def small_batches() -> Any:
    """Measuring takes several batches even of a tiny split, so that every rank gets some."""
    return mock.patch.object(Feed.evaluate, "__defaults__", (16,))


@torch.no_grad()
def answers(method: Method, images: Tensor, task: str) -> Tensor:
    """Logits as they are served."""
    return method.eval().logits(images, task).clone()


def other_values(method: str) -> dict[str, Any]:
    """Every setting that a task may have of its own, at another value than it has under `BESIDE`:
    that of `OWN`, or any."""
    cls = METHODS[method]
    fields = {info.alias or name: name for name, info in cls.Settings.model_fields.items()}
    usual = cls.Settings.model_validate(
        {name: value for name, value in BESIDE.get(method, {}).items() if name in fields}
    )
    values = {}
    for name in sorted(cls.per_task):
        value, annotation = (
            getattr(usual, fields[name]),
            cls.Settings.model_fields[fields[name]].annotation,
        )
        values[name] = next(
            other
            for other in _tries(value, annotation)
            if other != value and _accepted(cls, {name: other})
        )
    return values | OWN.get(method, {})


def _tries(usual: Any, annotation: Any) -> list[Any]:
    if isinstance(usual, bool):
        return [not usual]
    near = [2 * usual, usual / 2] if isinstance(usual, (int, float)) else []
    return [
        *near,
        0.5,
        3,
        *(
            word
            for part in (annotation, *get_args(annotation))
            if get_origin(part) is Literal
            for word in get_args(part)
        ),
    ]


def _accepted(cls: type[Method], settings: dict[str, Any]) -> bool:
    with contextlib.suppress(ValidationError):
        return bool(cls.Settings.model_validate(settings))
    return False


def again(job: StageJob, name: str, **changes: Any) -> StageJob:
    """The same stage under another key, so that it runs a second time."""
    return replace(job, key=f"{job.key}-{name}", **changes)


def contents(artifact: Artifact) -> dict[str, str]:
    """sha256 of every file that lies in an artifact's folder, whatever its manifest says."""
    folder = Path(artifact.root) / artifact.key
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


def history(artifact: Artifact) -> list[dict[str, Any]]:
    """A row per epoch, without what a clock decided."""
    rows = pq.read_table(pa.BufferReader(artifact.read("history.parquet"))).to_pylist()
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]
