"""Run every stage of a short stream on the strict device, and count the cost of a training step.

Run it in a separate process:

export PYTHONPATH=tests
.venv/bin/python -m tests.on_strict_device             # print the counts per step of every method
.venv/bin/python -m tests.on_strict_device meat hat    # only of these methods
.venv/bin/python -m tests.on_strict_device --record    # also record lower and new counts

It names each count that rose above the recorded one: see `read_bounds`.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import json
import math
import queue
import statistics
import sys
import tempfile
import traceback
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import astuple, dataclass, field, replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from pipeline import cli
from pipeline.app import runs as app
from pipeline.graph.store import Store
from pipeline.growing import publishing
from pipeline.launch.local import LocalExecutor
from pipeline.report import page
from pipeline.results.bundles import build_run_bundle
from pipeline.testing.lab import SETTINGS, TASKS, TINY, Lab, Run, again
from pipeline.testing.promises import Interrupted, interrupted_after
from tests import golden_keys, small_run, strict_device
from tests.strict_device import Counts
from workers import loop
from workers.data import accelerator, feed
from workers.data.rows import select
from workers.dist import Group
from workers.job import Task
from workers.methods import METHODS
from workers.methods.bases.rehearsal import Rehearsal
from workers.serving.bundle import Bundle
from workers.serving.measuring import with_measurements
from workers.serving.reference import load_reference
from workers.serving.server import Predictor

WORKERS = Path(__file__).parents[1] / "workers"
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
    "context": {**TINY, "context": {"kind": "se", "place": "both"}},
}
# Method -> settings under which it has more training steps than by default.
MORE_STEPS: dict[str, dict[str, Any]] = {
    "apd": {"consolidate_every": 2},
    "ucir": {"finetune": True},
}
Step = tuple[str, str, str]  # method, scenario, training step


@dataclass(frozen=True)
class Case:
    """A stream of two tasks under one method.

    base: whether the backbone is trained on the first task. data, train: additions to these
    sections of the config.
    """

    method: str
    scenario: str
    backbone: str = "vit"
    data: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    base: bool = False

    def run_in(self, lab: Lab) -> Run:
        """Return the run of this stream in `lab`."""
        settings = dict(SETTINGS.get((self.method, "adamw"), {}))
        settings.pop("train", None)
        cls = METHODS[self.method]
        if issubclass(cls, Rehearsal) and not cls.Settings().per_class:
            # Enough for several steps on exemplars alone, and fewer than all images of a class.
            settings["memory"] = 60
        tasks = [
            {"card": str(lab.card), "name": name, "classes": list(classes)}
            for name, classes in TASKS.items()
        ]
        if self.scenario == "domain":
            tasks[0]["classes"] = tasks[1]["classes"]
        if self.base:
            tasks[0]["role"] = "base"
        settings |= MORE_STEPS.get(self.method, {})
        stream = {"scenario": self.scenario, "tasks": tasks}
        rest: dict[str, Any] = {
            "stream": stream,
            "backbone": BACKBONES[self.backbone],
            "data": self.data,
            "methods": {self.method: settings},
        }
        return lab.run_of(self.method, {**TRAIN, **self.train}, **rest)


folders: list[Path] = []  # one entry: the argument of `start`
numbers = count()  # for unique stage names, because a case may run twice in a process


@cache
def lab_on(device: str) -> Lab:
    """Return the `Lab` of a device, the same one at each call in this process."""
    chosen = accelerator.make_device(float(device == strict_device.NAME))
    return Lab(folders[0] / device, Group(device=chosen))


# ---- runs on the device --------------------------------------------------------------------------
def results(case: Case, device: str) -> dict[str, Any]:
    """Run every stage of a case on a device.

    Returns:
        By name: the bytes of the states, the results of the evaluations and the answers of the
        served model.
    """
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
    """Return the answers of the served model for six test images of each task, tasks interleaved.

    The model answers twice: with the task of each image given, and without it.
    """
    all_tasks: dict[Task, None] = {}  # an ordered set
    states = {}
    for index in range(len(run.order)):
        job = run.evaluate_job(index)
        all_tasks.update(dict.fromkeys(job.tasks))
        states.update(job.states)
    last = replace(run.evaluate_job(len(run.order) - 1), tasks=tuple(all_tasks), states=states)
    model = Predictor(Bundle.of_job(last), device=run.lab.group.device)
    rows = {task.name: select(run.lab.store.root, (task,), "test", 0.1) for task in model.tasks}
    images = []
    names = []
    for row in range(6):
        for name, task_rows in rows.items():
            images.append(task_rows.read_bytes(row))
            names.append(name)
    answers_with_task = model.predict(images, names)
    answers_without_task = model.predict(images, None, rule="confident")
    return {
        "answers with the task": [answer.row() for answer in answers_with_task],
        "answers without the task": [answer.row() for answer in answers_without_task],
    }


def resumed(case: Case, device: str) -> None:
    """Interrupt each stage of the last task after one step, and resume it from its checkpoint.

    Raises:
        AssertionError: if its states differ from those of the uninterrupted stage.
    """
    run = case.run_in(lab_on(device))
    for job in run.stages(len(run.order) - 1):
        expected = run.artifact(job)
        if not expected.manifest["epochs"]:
            continue
        repeated = again(job, f"resumed-{next(numbers)}", checkpoint_s=1e-9)
        with contextlib.suppress(Interrupted), interrupted_after(1):
            run.lab.stage(repeated)
        with interrupted_after(1000) as steps:
            artifact = run.lab.stage(repeated)
        assert steps[0].global_step == 1, f"{job.id}: it started over after an interruption"
        for name in ("task.safetensors", "carried.safetensors"):
            assert artifact.read(name) == expected.read(name), (
                f"{job.id}: {name} differs after an interruption"
            )


def run_main_job(path: str, storages: tuple[str, str]) -> list[dict[str, Any]]:
    """Run a config with the command line, first on the device, then on the CPU.

    A stub replaces the reports, because they are not compared.

    Args:
        path: The config file.
        storages: The storage of each run.

    Returns:
        The results of both runs, by stage id.
    """
    overrides = ["--set", "cluster.gpus_per_worker=1", "--set", f"storage={storages[0]}"]
    output = io.StringIO()
    with (
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
        mock.patch.object(page, "build_run_report", return_value={"report.html": b"a page"}),
    ):
        with strict_device.strict_device():
            code = cli.main(["run", path, *overrides])
        assert code == 0, output.getvalue()
        assert accelerator.functions().emptied, "no stage has returned its cached memory"
        with sdpa_kernel(SDPBackend.MATH):
            code = cli.main(["run", path, "--set", f"storage={storages[1]}"])
        assert code == 0, output.getvalue()
    return [small_run.results(storage) for storage in storages]


def measure_model(path: str) -> list[Any]:
    """Return a model's accuracies and the test distances per task.

    The first pair is measured on the device, the second on the CPU.
    """
    with contextlib.redirect_stdout(io.StringIO()):
        assert cli.main(["run", path]) == 0
    run = app.prepare(path)
    bundle = build_run_bundle(run.graph, run.store, "meat")
    job = publishing.find_last_evaluation(run.graph, "meat")

    def measured() -> Any:
        reference = load_reference(with_measurements(bundle))
        assert not reference.missing
        levels = {name: task.levels for name, task in reference.tasks.items()}
        return publishing.measure_accuracies(bundle, job, bundle.tasks), levels

    with strict_device.strict_device():
        ours = measured()
    cpu_alone = mock.patch.object(accelerator, "is_available", return_value=False)
    with cpu_alone, sdpa_kernel(SDPBackend.MATH):
        return [ours, measured()]


def first_sample(path: str, timeout_s: float = 20) -> Any:
    """Return the first machine sample that an executor posts on the strict device."""
    samples: queue.Queue[Any] = queue.Queue()
    config = app.prepare(path, ["cluster.gpus_per_worker=1"]).config
    with strict_device.strict_device():
        executor = LocalExecutor(
            Store(config.storage), config.cluster, lambda stage: {}, samples.put, sample_s=0.01
        )
        try:
            return samples.get(timeout=timeout_s).body
        finally:
            executor.close()


@contextlib.contextmanager
def counted(device: strict_device.StrictDevice) -> Iterator[dict[str, list[Counts]]]:
    """Yield stage id -> the counts of each training step that runs in the context.

    A step lasts from the end of the previous step to its own end. It includes the work of the feed,
    which has no prefetch threads here. The first step of an epoch is not counted.
    """
    counts_by_stage: dict[str, list[Counts]] = defaultdict(list)
    train_step = loop.train_step
    counts_before = Counts()

    def counting_step(*arguments: Any) -> Any:
        nonlocal counts_before
        terms = train_step(*arguments)
        progress, job = arguments[3:5]
        if progress.step:
            counts_by_stage[job.id].append(device.counts - counts_before)
        counts_before = device.counts
        return terms

    # Disable progress reports, because a report reads the loss on the host.
    with (
        mock.patch.object(loop, "train_step", counting_step),
        mock.patch.object(loop, "REPORT_S", math.inf),
        mock.patch.object(feed, "PREFETCH_THREADS", 0),
    ):
        yield counts_by_stage


# ---- cases, in a separate process ----------------------------------------------------------------
def start(folder: Path) -> None:
    """Prepare this process to run cases that write their results to `folder`."""
    folders.append(folder)
    torch.set_num_threads(1)
    strict_device.register()
    accelerator.TYPE = strict_device.NAME


def check(case: Case, compare: bool = True, resume: bool = True) -> dict[Step, Counts]:
    """Run a case on the strict device.

    Args:
        compare: Also compare the results with those of the CPU.
        resume: Also check interrupted stages, see `resumed`.

    Returns:
        The counts of each training step of the last task.

    Raises:
        DeviceError, TypeError: if the device refuses an operation.
        AssertionError: if a check fails.
    """
    with strict_device.strict_device() as device:
        with counted(device) as steps:
            try:
                device_results = results(case, strict_device.NAME)
            except (strict_device.DeviceError, TypeError) as error:
                raise type(error)(stopped(case, error)) from error
        if resume:
            resumed(case, strict_device.NAME)
    lab_on(strict_device.NAME).forget()
    if compare:
        # The strict device does not have the CPU's fused attention.
        with sdpa_kernel(SDPBackend.MATH):
            expected = results(case, "cpu")
        lab_on("cpu").forget()
        differing = [name for name in expected if device_results[name] != expected[name]]
        assert not differing, f"{case}: differs from the CPU: {', '.join(differing)}"
    costs: dict[Step, Counts] = {}
    for job_id, step_counts in steps.items():
        if job_id.startswith(f"{case.method}/"):
            step = job_id.rsplit("/", 1)[1]
            # The counts of a later task replace those of an earlier one.
            costs[case.method, case.scenario, step] = typical(step_counts)
    return costs


def stopped(case: Case, error: Exception) -> str:
    """Return a message that says where a method would stop on a GPU, and the remedy."""
    source = inspect.getfile(METHODS[case.method])
    frames = traceback.extract_tb(error.__traceback__)
    project = [f for f in frames if Path(f.filename).is_relative_to(WORKERS)]
    in_method = [frame for frame in frames if frame.filename == source]
    last = (in_method or project or frames)[-1]
    return (
        f"method {case.method!r} would stop on a GPU: {error}. At {last.filename}:{last.lineno} in "
        f"{last.name}: {last.line}. Take tensors from context.carried and batch, which are on the "
        "device; make others with device=self.device, or register them as a parameter, a buffer "
        "or a module, which `to` moves; draw from Batch.draw"
    )


def counts_of(method: str, scenario: str) -> dict[Step, Counts]:
    """Return the counts of each training step of a method.

    If the method can start from a base task, the counts of those steps are included.
    """
    counts = check(Case(method, scenario), compare=False, resume=False)
    if METHODS[method].starts_from:
        counts |= check(Case(method, scenario, base=True), compare=False, resume=False)
    return counts


def typical(steps: list[Counts]) -> Counts:
    """Return the median of each count."""
    columns = zip(*map(astuple, steps), strict=True)
    return Counts(*map(statistics.median_low, columns))


# ---- recorded counts -----------------------------------------------------------------------------
def read_bounds() -> dict[Step, Counts]:
    """Return the recorded counts of the steps of all methods; they must not rise."""
    bounds = {}
    for path in sorted(golden_keys.METHOD_FILES.glob("*.json")):
        for name, counts in json.loads(path.read_text()).get("steps", {}).items():
            scenario, step = name.split("/")
            bounds[path.stem, scenario, step] = Counts(**counts)
    return bounds


def write_bounds(bounds: dict[Step, Counts]) -> None:
    """Record these counts, and drop the other recorded steps of the same methods."""
    steps: dict[str, dict[str, Any]] = {method: {} for method, _, _ in bounds}
    for (method, scenario, step), counts in bounds.items():
        costs = {"ops": counts.ops, "copies": counts.copies, "reads": counts.reads}
        steps[method][f"{scenario}/{step}"] = costs
    for method, entries in steps.items():
        golden_keys.update(golden_keys.method_file(method), {"steps": entries})


def higher(step: Step, counts: Counts, bound: Counts) -> list[str]:
    """Return a sentence for each count above its bound."""
    names = {
        "ops": "operations",
        "copies": "copies from pageable memory",
        "reads": "reads that the host waits for",
    }
    comparisons = [
        (name, getattr(counts, field), getattr(bound, field)) for field, name in names.items()
    ]
    return [
        f"{'/'.join(step)}: a training step costs {count} {name}, and "
        f"{golden_keys.method_file(step[0]).name} records {most}; the counts must not rise: "
        "remove the added ones"
        for name, count, most in comparisons
        if count > most
    ]


def row_of(step: Step, counts: Counts) -> str:
    """Return a row of the table in Markdown."""
    cells = [f"`{word}`" for word in step]
    cells += [str(count) for count in (counts.ops, counts.copies, counts.reads)]
    return f"| {' | '.join(cells)} |"


def main(argv: list[str] | None = None) -> int:
    """Run the command line, and return its exit code."""
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
    """Print the rows of these methods, and a sentence for each count above its bound.

    Args:
        record: Record lower and new counts.

    Returns:
        The exit code: 1 if a count is above its bound, else 0.
    """
    bounds = read_bounds()
    failed = False
    for method in methods:
        for scenario in sorted(METHODS[method].scenarios - {"domain"}):
            for step, counts in counts_of(method, scenario).items():
                bound = bounds.get(step, counts)
                for sentence in higher(step, counts, bound):
                    print(sentence, file=sys.stderr)
                    failed = True
                print(row_of(step, counts), flush=True)
                bounds[step] = Counts(*map(min, astuple(counts), astuple(bound)))
    if record:
        write_bounds(bounds)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
