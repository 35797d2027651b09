"""Every stage of a short stream on the strict device, and what a training step costs it; run in a
process of its own.

export PYTHONPATH=tests
.venv/bin/python -m tests.on_strict_device             # counts per step of every method; those that
    rose since they were recorded
.venv/bin/python -m tests.on_strict_device meat hat    # of some
.venv/bin/python -m tests.on_strict_device --record    # lowers what became lower, adds what is new;
    see `recorded`
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import math
import re
import statistics
import sys
import tempfile
import traceback
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import astuple, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from checks import Interrupted, interrupted_after
from stage_lab import SETTINGS, TASKS, TINY, Lab, Run, again
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests import strict_device
from tests.strict_device import Counts
from workers import loop
from workers.data.rows import select
from workers.dist import Group
from workers.methods import METHODS
from workers.methods.bases.rehearsal import Rehearsal
from workers.serving.bundle import Bundle
from workers.serving.server import Predictor

TABLE = Path(__file__).parents[1] / "benchmarks" / "README.md"
ROW = re.compile(r"^\| `(\w+)` \| `(\w+)` \| `(\w+)` \| (\d+) \| (\d+) \| (\d+) \|$", re.M)
TRAIN = {"optimizer": "adamw", "lr": 1e-2, "weight_decay": 0.05, "epochs": 1, "batch_size": 32}
BACKBONES: dict[str, dict[str, Any]] = {
    "vit": TINY,
    "t2t": {
        "name": "t2t_vit_12",
        "img_size": 32,
        "crop_pct": 1.0,
        "options": {"embed_dim": 32, "depth": 2, "num_heads": 2},
    },
    "convnext": {
        "name": "convnext_atto",
        "img_size": 16,
        "crop_pct": 1.0,
        "options": {"depths": [1, 1, 1, 1], "dims": [8, 8, 16, 16], "patch_size": 1},
    },
    "resnet": {
        "name": "resnet18",
        "img_size": 16,
        "crop_pct": 1.0,
        "options": {"layers": [1, 1, 1, 1], "channels": [8, 8, 16, 16], "norm_layer": "groupnorm1"},
    },
}
MORE_STEPS: dict[str, dict[str, Any]] = {
    "apd": {"consolidate_every": 2},
    "ucir": {"finetune": True},
}  # than by default
Step = tuple[str, str, str]  # method, scenario, training step


@dataclass(frozen=True)
class Case:
    """Two tasks under one method. base: the first is the one that the backbone is trained on. data,
    train: sections of a config beside what all cases have."""

    method: str
    scenario: str
    backbone: str = "vit"
    data: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    base: bool = False

    def run_in(self, lab: Lab) -> Run:
        settings = {
            name: value
            for name, value in SETTINGS.get((self.method, "adamw"), {}).items()
            if name != "train"
        }
        if issubclass(METHODS[self.method], Rehearsal):
            settings["memory"] = 60  # several steps on them alone, and not all images of a class
        tasks = [
            {"card": str(lab.card), "name": name, "classes": list(classes)}
            for name, classes in TASKS.items()
        ]
        if self.base:
            tasks[0]["role"] = "base"
        settings |= MORE_STEPS.get(self.method, {})
        stream = {"scenario": self.scenario, "tasks": tasks}
        rest = {
            "stream": stream,
            "backbone": BACKBONES[self.backbone],
            "data": self.data,
            "methods": {self.method: settings},
        }
        return lab.run_of(self.method, {**TRAIN, **self.train}, **rest)


folders: list[Path] = []  # of this process, given by `start`


@cache
def lab_on(device: str) -> Lab:
    """One for each device for as long as this process lives."""
    return Lab(folders[0] / device, Group(device=torch.device(device)))


# ---- what is done on the device ------------------------------------------------------------------
def results(case: Case, device: str) -> dict[str, Any]:
    """Every stage of both tasks, evaluations with their canaries among them, and answers of the
    served model."""
    run = case.run_in(lab_on(device))
    results_by_name: dict[str, Any] = {}
    for task in range(len(run.order)):
        results_by_name[f"evaluation {task}"] = run.evaluated(task)
        for job in run.stages(task):
            artifact = run.artifact(job)
            results_by_name[f"{job.id} state"] = artifact.read("task.safetensors")
            results_by_name[f"{job.id} carried"] = artifact.read("carried.safetensors")
    return results_by_name | served(run)


def served(run: Run) -> dict[str, Any]:
    """What the finished tasks answer where they are served: told the task in mixed batches, and
    where the task is to be found out."""
    last = run.evaluate_job(len(run.order) - 1)
    jobs = [run.evaluate_job(task) for task in range(len(run.order))]
    tasks = tuple(dict.fromkeys(task for job in jobs for task in job.tasks))
    states = {name: key for job in jobs for name, key in job.states.items()}
    model = Predictor(
        Bundle.of_job(replace(last, tasks=tasks, states=states)), device=run.lab.group.device
    )
    rows = {task.name: select(run.lab.store.root, (task,), "test", 0.1) for task in model.tasks}
    images = [rows[name].bytes_of(row) for row in range(6) for name in rows]
    names = [name for _ in range(6) for name in rows]
    rows_with_task = [a.row() for a in model.predict(images, names)]
    return {
        "answers, told": rows_with_task,
        "answers, not told": [a.row() for a in model.predict(images, None, rule="confident")],
    }


def resumed(case: Case, device: str) -> None:
    """A stage that is interrupted, and goes on from its checkpoint, leaves what it leaves
    uninterrupted. Raises AssertionError."""
    run = case.run_in(lab_on(device))
    for job in run.stages(len(run.order) - 1):
        expected = run.artifact(job)
        if not expected.manifest["epochs"]:
            continue
        repeated = again(job, "resumed", checkpoint_s=1e-9)
        with contextlib.suppress(Interrupted), interrupted_after(1):
            run.lab.stage(repeated)
        with interrupted_after(1000) as steps:
            artifact = run.lab.stage(repeated)
        assert steps[0].global_step == 1, f"{job.id}: it started anew after an interruption"
        for name in ("task.safetensors", "carried.safetensors"):
            assert artifact.read(name) == expected.read(name), (
                f"{job.id}: {name} differs after an interruption"
            )


@contextlib.contextmanager
def counted(device: strict_device.StrictDevice) -> Iterator[dict[str, list[Counts]]]:
    """Inside, what each step costs by stage id: from the end of one step to the end of the next of
    the same epoch, the feed's part too."""
    counts_by_stage: dict[str, list[Counts]] = defaultdict(list)
    train_step, before = loop.train_step, [Counts()]

    def watched(*arguments: Any) -> Any:
        terms = train_step(*arguments)
        if arguments[3].step:
            counts_by_stage[arguments[4].id].append(device.counts - before[0])
        before[0] = device.counts
        return terms

    # A step that a clock finds late is reported, for which the host reads the loss.
    with (
        mock.patch.object(loop, "train_step", watched),
        mock.patch.object(loop, "REPORT_S", math.inf),
    ):
        yield counts_by_stage


# ---- cases in a process of their own -------------------------------------------------------------
def start(folder: Path) -> None:
    """Before a process takes cases, whose results go to `folder`."""
    folders.append(folder)
    torch.set_num_threads(1)
    strict_device.register()


def check(case: Case, compare: bool = True, resume: bool = True) -> dict[Step, Counts]:
    """Everything of a case on the strict device. Returns the counts of a typical step of the last
    task by training step. Raises whatever the device refuses, and AssertionError where the results
    are not those of the CPU."""
    with strict_device.strict_device() as device:
        with counted(device) as steps:
            try:
                device_results = results(case, strict_device.NAME)
            except (strict_device.DeviceError, TypeError) as error:
                raise type(error)(stopped(case, error)) from error
        if resume:
            resumed(case, strict_device.NAME)
    if compare:
        with sdpa_kernel(
            SDPBackend.MATH
        ):  # the strict device has none of the CPU's fused attention
            expected = results(case, "cpu")
        differing = [name for name in expected if device_results[name] != expected[name]]
        assert not differing, f"{case}: not what the CPU makes: {', '.join(differing)}"
    costs: dict[Step, Counts] = {}
    for job_id, each in steps.items():
        if job_id.startswith(f"{case.method}/"):
            # those of a later task stand
            costs[case.method, case.scenario, job_id.rsplit("/", 1)[1]] = typical(each)
    return costs


def stopped(case: Case, error: Exception) -> str:
    """Return where a method would stop on a GPU, and what its author can do."""
    source = inspect.getfile(METHODS[case.method])
    frames = traceback.extract_tb(error.__traceback__)
    project = [f for f in frames if Path(f.filename).is_relative_to(TABLE.parents[1] / "workers")]
    in_method = [frame for frame in frames if frame.filename == source]
    last = (in_method or project or frames)[-1]
    return (
        f"method {case.method!r} would stop on a GPU: {error}. At {last.filename}:{last.lineno} in "
        f"{last.name}: {last.line}. Take tensors from context.carried and batch, which are on the "
        "device; make others with device=self.device, or register them as a parameter, a buffer "
        "or a module, which `to` moves; draw from Batch.draw"
    )


def counts_of(method: str, scenario: str) -> dict[Step, Counts]:
    """Of each training step of a method; of one that starts from a base task those of its steps
    too."""
    counts = check(Case(method, scenario), compare=False, resume=False)
    return (
        counts | check(Case(method, scenario, base=True), compare=False, resume=False)
        if METHODS[method].starts_from
        else counts
    )


def typical(steps: list[Counts]) -> Counts:
    """The median of each count."""
    return Counts(
        *(statistics.median_low(column) for column in zip(*map(astuple, steps), strict=True))
    )


# ---- what is recorded ----------------------------------------------------------------------------
def recorded(text: str) -> dict[Step, Counts]:
    """The rows of the table in benchmarks/README.md: upper bounds, which may only go down."""
    return {(m, s, step): Counts(*map(int, counts)) for m, s, step, *counts in ROW.findall(text)}


def higher(step: Step, counts: Counts, bound: Counts) -> list[str]:
    """A sentence for each count that is above its bound."""
    names = {
        "ops": "operations",
        "copies": "copies from pageable memory",
        "reads": "reads that the host waits for",
    }
    comparisons = [
        (name, getattr(counts, field), getattr(bound, field)) for field, name in names.items()
    ]
    return [
        f"{'/'.join(step)}: a training step costs {count} {name}, and benchmarks/README.md "
        f"records {most}; these may only go down: "
        "take out what was added"
        for name, count, most in comparisons
        if count > most
    ]


def row_of(step: Step, counts: Counts) -> str:
    return (
        f"| {' | '.join(f'`{word}`' for word in step)} | {' | '.join(map(str, astuple(counts)))} |"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.on_strict_device",
        description="counts per training step on the strict device",
    )
    parser.add_argument(
        "methods", nargs="*", choices=[*METHODS, []], help="methods; all without one"
    )
    parser.add_argument(
        "--record", action="store_true", help="lower what became lower, add what is new"
    )
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        start(Path(folder))
        return measure(options.methods or [*METHODS], options.record)


def measure(methods: list[str], record: bool) -> int:
    """Prints the rows of these methods, and what rose; returns the exit code. record: the table's
    file is written anew."""
    text = TABLE.read_text()
    bounds, failed = recorded(text), False
    for method in methods:
        for scenario in sorted(METHODS[method].scenarios):
            for step, counts in counts_of(method, scenario).items():
                bound = bounds.get(step)
                for sentence in [] if bound is None else higher(step, counts, bound):
                    print(sentence, file=sys.stderr)
                    failed = True
                lower = Counts(*map(min, astuple(counts), astuple(bound or counts)))
                print(row_of(step, counts), flush=True)
                bounds[step] = lower
    if record:
        TABLE.write_text(with_rows(text, bounds))
    return int(failed)


def with_rows(text: str, bounds: dict[Step, Counts]) -> str:
    """The text of the table's file with these rows in place of those that it has."""
    head = "| method | scenario | step | operations | copies | reads |\n|---|---|---|---|---|---|\n"
    before, after = text.split(head)
    rest = ROW.sub("", after).lstrip("\n")
    return (
        before
        + head
        + "\n".join(row_of(step, bounds[step]) for step in sorted(bounds))
        + "\n\n"
        + rest
    )


if __name__ == "__main__":
    sys.exit(main())
