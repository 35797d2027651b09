"""What `benchmarks.gpu` checks of one method in one scenario: its stages against the CPU, serving, the users' path, resumption.

Every stage is first run on the CPU, and then once more on the device *from the same parents*. So a stage that fails does not
hide those that follow it, differences do not add up from stage to stage, and it is known what must agree:

    batches      labels and tasks are equal, images up to rounding: order and augmentation are decided on the host
    losses       the first one up to rounding; the last one loosely, because training enlarges rounding
    masks        equal, bit for bit, where a step does not train (prune, consolidate); else but for a small share
    tensors      up to rounding where a step does not train; else loosely
    metadata     such as references of exemplars: equal but for near-ties
    decisions    predicted classes are equal but for near-ties, those of `evaluate` and those of a served bundle

For this comparison alone, random numbers that training draws on the device are drawn on the CPU and moved. The users' path
that follows (config, graph, executor in this process) draws where it always does. It is interrupted inside each training
step of the last task and must end with the same bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
import shutil
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow.parquet as pq
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks import stream
from pipeline.config import ClusterSettings, Config
from pipeline.graph import Graph, Stage
from pipeline.launch import InProcess
from pipeline.predict import bundle_of
from pipeline.run import look_up_all, run_graph
from pipeline.store import Store, flatten
from workers import loop, notice
from workers.artefact import Artefact
from workers.data.draw import Draw
from workers.dist import Group
from workers.errors import UserError
from workers.job import StageJob
from workers.methods import METHODS
from workers.serve import Answer, Served
from workers.taskstate import Carried, TaskState

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
SIDE = 16
TASKS = {"base": (0, 2), "one": (2, 4), "two": (4, 7)}  # name -> its range of classes; the first trains the backbone
LAST_TASK = "two"
CLASSES = [f"c{i:04d}" for i in range(7)]  # as `stream.draw_images` names them
BACKBONE = {"img_size": SIDE, "crop_pct": 1.0, "drop_path": 0.1,
            "options": {"patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2, "weight_init": "jax"}}
DATA = {"crop": "pad", "flip": 0.5}
TRAIN = {"epochs": 2, "batch_size": 16, "lr": 3e-3}
MEMORY = 28  # exemplars, of methods that keep some
SETTINGS: dict[str, dict[str, Any]] = {  # so that in a stream this short every part of a method has work
    "rpsnet": {"every": 1},
    "supsup_nn": {"every": 3, "look": 16, "most": 8},
}
WITHOUT_BASE = ("dytox",)  # its encoder learns the stream itself: there the first task is one like the others
SPARSE = "/sparse"  # at the end of the name of what was stored as positions and values
LONGEST_SENTENCE = 240

# How far two devices may be apart: of a step that does not train, and of a trained one.
FIRST_LOSS, LAST_LOSS = 1e-4, 0.05  # relative
EXACT_TENSORS, TRAINED_TENSORS = 1e-4, 0.1  # |a - b| / |b| over all tensors of a state
TRAINED_MASKS = 0.02  # share of the bits
METADATA = 0.1  # share of the values
PROBABILITY = 1e-3
DECISIONS = 0.05  # share of the images, each of them a near-tie
RESUMED = 1e-3  # |a - b| / |b|, where PyTorch says that an operation is not deterministic on this device


@dataclass(frozen=True)
class Case:
    """One method in one scenario."""

    method: str
    scenario: str
    precision: str = "fp32"

    def __str__(self) -> str:
        return f"{self.method} {self.scenario} {self.precision}"


@dataclass(frozen=True)
class Failure:
    """`frame`: the deepest line of this project in the traceback, as FILE:LINE; empty where nothing was raised."""

    stage: str
    sentence: str
    frame: str = ""


@dataclass(frozen=True)
class Setup:
    """What all cases share: the device, and a folder with the images, their card and a storage for each side."""

    device: torch.device
    folder: Path
    card: str


@dataclass(frozen=True)
class Step:
    """What one optimizer step saw, and its loss."""

    loss: float
    labels: Tensor  # (b,)
    tasks: Tensor  # (b,)
    images: Tensor  # (b, 3, H, W), or what the feed holds in their place


def prepare(folder: Path, device: str) -> Setup:
    """Draws the images of all cases: the same on every machine."""
    card = stream.draw_images(folder, len(CLASSES), train=20, test=8, sides=(24,))
    return Setup(torch.device(device), folder, card)


def check_case(setup: Setup, case: Case, send: Callable[[str, Any], None]) -> bool:
    """Makes all checks of a case; one that fails ends only those that need its result.

    Sends `stage` (the id of what begins), `failure` (a Failure) and at the end `measured` (text by column of the table).
    Returns whether nothing failed.
    """
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # fp32 is compared with fp32
    checks = CaseChecks(setup, case, send)
    is_sound = True
    if case.precision == "fp32":
        is_sound = checks.attempt("cpu", checks.run_on_cpu)
        if is_sound:
            checks.compare_stages()
            checks.attempt("serve", checks.compare_served)
    if is_sound and checks.attempt("run", checks.run_as_users_do):
        checks.attempt("resume", checks.resume)
    send("measured", checks.table_row())
    shutil.rmtree(checks.folder, ignore_errors=True)
    return not checks.failures


class CaseChecks:
    """The checks of one case, in the order of `check_case`."""

    def __init__(self, setup: Setup, case: Case, send: Callable[[str, Any], None]):
        self.setup = setup
        self.case = case
        self.send = send
        self.name = str(case).replace(" ", "-")
        self.folder = setup.folder / self.name
        self.stage = ""
        self.failures: set[tuple[str, str]] = set()  # stage, sentence
        self.measured: dict[str, float] = {}  # largest difference by what is compared
        self.digest = hashlib.sha256()  # of all masks, as packed bits
        self.resumed = ""

    # ---- failures ----------------------------------------------------------------------------------------------------
    def fail(self, stage: str, sentence: str, frame: str = "") -> None:
        """One line for a failure that two checks meet."""
        if (stage, sentence) not in self.failures:
            self.failures.add((stage, sentence))
            self.send("failure", Failure(stage, sentence, frame))

    def attempt(self, stage: str, check: Callable[[], bool]) -> bool:
        """What the check returns; False where it raises, which is a failure of the stage that was under way."""
        self.enter(stage)
        try:
            return check()
        except Exception as error:
            self.fail(self.stage, sentence_of(error), frame_of(error))
            return False

    def enter(self, stage: str) -> None:
        self.stage = stage
        self.send("stage", stage)

    def demand(self, is_met: bool, sentence: str) -> None:
        if not is_met:
            self.fail(self.stage, sentence)

    def measure(self, what: str, difference: float, limit: float) -> None:
        """Notes a difference between both sides; a failure where it is above the limit, or no number."""
        self.measured[what] = max(self.measured.get(what, 0.0), difference)
        self.demand(difference <= limit, f"{what} differ by {difference:.2g}, at most {limit:g} is rounding")

    def table_row(self) -> dict[str, str]:
        """Text by column of what was compared."""
        row = {what: f"{difference:.1g}" for what, difference in self.measured.items()}
        if self.measured.get("masks") == 0.0:
            row["masks"] = f"= {self.digest.hexdigest()[:8]}"
        return row | {"resumed": self.resumed}

    # ---- runs --------------------------------------------------------------------------------------------------------
    def plan(self, storage: str, device: torch.device) -> tuple[Store, Graph, Config]:
        """The graph of the case on a device, above a storage that all cases share."""
        settings = dict(SETTINGS.get(self.case.method, {}))
        if "memory" in METHODS[self.case.method].Settings.model_fields:
            settings["memory"] = MEMORY
        tasks = []
        for name, (start, end) in TASKS.items():
            role = "base" if name == "base" and self.case.method not in WITHOUT_BASE else "task"
            tasks.append({"card": self.setup.card, "name": name, "classes": CLASSES[start:end], "role": role})
        cluster = {"workers": 0, "gpus_per_worker": int(device.type == "cuda"), "checkpoint_s": 0, "loader_workers": 1}
        return stream.plan(
            self.setup.folder / storage, self.setup.card, len(TASKS), name=self.name, backbone=BACKBONE, data=DATA, train=TRAIN,
            methods={self.case.method: {**settings, "train": {"precision": self.case.precision}}},
            stream={"scenario": self.case.scenario, "tasks": tasks}, cluster=cluster)

    def run(self, store: Store, graph: Graph, config: Config) -> bool:
        """Runs what is missing as `accrete run` does where `cluster.workers` is 0. Every stage that failed is a failure."""
        errors: dict[str, Exception] = {}
        outcome = run_graph(graph, store, lambda todo: WatchedExecutor(store, config.cluster, self.enter, errors), retries=0,
                            watchers=[], lookups=look_up_all(graph, store, None))
        for stage, message in outcome.failures.items():
            error = errors.get(stage)
            if error is None:
                self.fail(stage, message)
            else:
                self.fail(stage, sentence_of(error), frame_of(error))
        return not outcome.failures

    def run_on_cpu(self) -> bool:
        with host_draws(), recorded_steps() as self.cpu_steps:
            self.store, self.graph, config = self.plan("reference", CPU)
            return self.run(self.store, self.graph, config)

    # ---- stage by stage ----------------------------------------------------------------------------------------------
    def compare_stages(self) -> None:
        for stage in self.graph:
            if stage.method and isinstance(stage.job, StageJob):
                self.attempt(stage.id, partial(self.compare_stage, stage.job))

    def compare_stage(self, job: StageJob) -> bool:
        """The same job again on the device, under another key."""
        device = self.setup.device
        again = replace(job, key=f"{job.key}-again")
        with host_draws(), recorded_steps() as steps, another_rounding(device):
            loop.run_stage(again, Group(0, 1, device), lambda event: None)
        on_cpu, on_device = Artefact.need(job.root, job.key), Artefact.need(job.root, again.key)
        if job.step == "evaluate":
            self.compare_predictions(on_cpu, on_device)
        else:
            self.compare_steps(self.cpu_steps[job.id], steps[job.id])
            self.compare_results(on_cpu, on_device, is_trained=bool(steps[job.id]))
        return True

    def compare_steps(self, on_cpu: list[Step], on_device: list[Step]) -> None:
        self.demand(len(on_cpu) == len(on_device), f"it took {len(on_device)} steps, on the CPU {len(on_cpu)}")
        for a, b in zip(on_device, on_cpu, strict=False):
            is_same_order = torch.equal(a.labels, b.labels) and torch.equal(a.tasks, b.tasks)
            self.demand(is_same_order, "its batches hold other samples than on the CPU")
            self.measure("images", relative({"": a.images}, {"": b.images}), EXACT_TENSORS)
        losses = [abs(a.loss - b.loss) / (1 + abs(b.loss)) for a, b in zip(on_device, on_cpu, strict=False)]
        if losses:
            self.measure("first loss", losses[0], FIRST_LOSS)
            self.measure("last loss", losses[-1], LAST_LOSS)

    def compare_results(self, on_cpu: Artefact, on_device: Artefact, is_trained: bool) -> None:
        """State and carried state of one step on both sides."""
        ours, theirs = stage_tensors(on_device), stage_tensors(on_cpu)
        shapes = [{name: (t.dtype, name.endswith(SPARSE) or t.shape) for name, t in tensors.items()} for tensors in (ours, theirs)]
        if shapes[0] != shapes[1]:
            names = [name for name in {**shapes[0], **shapes[1]} if shapes[0].get(name) != shapes[1].get(name)]
            self.demand(False, f"it leaves other tensors than on the CPU: {', '.join(sorted(names))[:100]}")
            return
        bits = {name: (bits_of(t), bits_of(theirs[name])) for name, t in ours.items() if not t.is_floating_point()}
        if bits:
            count = sum(a.size for a, _ in bits.values())
            different = sum(int((a != b).sum()) for a, b in bits.values())
            self.measure("masks", different / max(1, count), TRAINED_MASKS if is_trained else 0.0)
            for name in sorted(bits):
                self.digest.update(np.packbits(bits[name][0].astype(bool)).tobytes())
        numbers = [{name: t for name, t in tensors.items() if t.is_floating_point()} for tensors in (ours, theirs)]
        self.measure("tensors", relative(*numbers), TRAINED_TENSORS if is_trained else EXACT_TENSORS)
        self.measure("metadata", other_values(stage_metadata(on_device), stage_metadata(on_cpu)), METADATA)

    def compare_predictions(self, on_cpu: Artefact, on_device: Artefact) -> None:
        """Of `evaluate`, image by image."""
        ours, theirs = predictions(on_device), predictions(on_cpu)
        self.demand([row["key"] for row in ours] == [row["key"] for row in theirs], "it measured other images than on the CPU")
        different = 0
        for a, b in zip(ours, theirs, strict=False):
            self.measure("confidences", abs(a["confidence"] - b["confidence"]), PROBABILITY)
            different += a["prediction"] != b["prediction"]  # with equal confidences, as just demanded: a near-tie
        self.measure("decisions", different / max(1, len(theirs)), DECISIONS)

    # ---- serving -----------------------------------------------------------------------------------------------------
    def compare_served(self) -> bool:
        """One bundle on both sides; one batch of images of all tasks, with their tasks told and not told."""
        folder = str(self.folder / "bundle")
        bundle_of(self.graph, self.store, self.case.method).write(folder)
        on_cpu = Served.open(folder)
        with another_rounding(self.setup.device):
            on_device = Served.open(folder, device=str(self.setup.device))
        images, tasks = self.mixed_batch()
        untold = "refuse" if on_cpu.infers else "confident"
        for told, rule in ((tasks, "refuse"), (None, untold)):
            expected = on_cpu.predict(images, told, rule)  # type: ignore[arg-type]
            with another_rounding(self.setup.device):
                answers = on_device.predict(images, told, rule)  # type: ignore[arg-type]
            self.compare_answers(answers, expected)
        return True

    def mixed_batch(self) -> tuple[list[bytes], list[str]]:
        """Files of test images, tasks in turn, and the task of each."""
        images: list[bytes] = []
        tasks: list[str] = []
        for number in range(8):
            for task, (start, end) in TASKS.items():
                folder = self.setup.folder / "raw" / "test" / CLASSES[start + number % (end - start)]
                files = sorted(folder.iterdir())
                images.append(files[number % len(files)].read_bytes())
                tasks.append(task)
        return images, tasks

    def compare_answers(self, answers: list[Answer], expected: list[Answer]) -> None:
        others = 0
        for a, b in zip(answers, expected, strict=True):
            is_near_tie = a.probabilities.keys() != b.probabilities.keys()  # of tasks: the method picked another one
            if not is_near_tie:
                gaps = [abs(p - b.probabilities[name]) for name, p in a.probabilities.items()]
                self.measure("probabilities", max(gaps), PROBABILITY)
            others += (a.task, a.class_) != (b.task, b.class_)
        self.measure("answers", others / len(expected), DECISIONS)

    # ---- the users' path ---------------------------------------------------------------------------------------------
    def run_as_users_do(self) -> bool:
        """The graph on the device from its ingest on, twice: nothing is left to do the second time."""
        self.nondeterministic: set[str] = set()
        with deterministic(self.nondeterministic):
            self.users = self.plan("users", self.setup.device)
            if not self.run(*self.users):
                return False
        self.check_canaries()
        return True

    def check_canaries(self) -> None:
        """Of a method that forgets nothing, the answers on a task beside the next one are bit for bit what they were."""
        store, graph, _ = self.users
        if METHODS[self.case.method].forgets:
            return
        digests: dict[str, str] = {}
        for stage in graph:
            if stage.step == "evaluate":
                result = Artefact.need(store.root, stage.key).manifest["result"]
                canary = result["canary"]
                if canary is not None:
                    self.enter(stage.id)
                    self.demand(canary["logits_sha256"] == digests[canary["task"]], f"it changed the answers of task {canary['task']!r}")
                digests |= {row["task"]: row["logits_sha256"] for row in result["rows"]}

    def resume(self) -> bool:
        """Every training step of the last task once more, told to leave in its middle, resumed by the next run."""
        store, graph, config = self.users
        stages = [s for s in graph if s.task == LAST_TASK and s.method and s.step != "evaluate"]
        before = {stage.id: Artefact.need(store.root, stage.key) for stage in stages}
        contents = {stage: ({**stage_tensors(artefact)}, stage_metadata(artefact), history(artefact)) for stage, artefact in before.items()}
        for stage in stages:
            store.withdraw(stage.key)
        with deterministic(self.nondeterministic), interrupted_steps() as steps:
            for _ in range(len(stages) + 1):
                with contextlib.suppress(notice.Leaving):
                    if not self.run(store, graph, config):
                        return False
                    break
        for stage in stages:
            self.enter(stage.id)
            if any("loss" in row for row in contents[stage.id][2]):
                self.demand(stage.id in steps.interrupted, "it was not interrupted")
                self.demand(steps.taken[stage.id] == steps.total[stage.id], f"interrupted, it took {steps.taken[stage.id]} steps in all; "
                            f"without interruption it takes {steps.total[stage.id]}")
            self.compare_resumed(Artefact.need(store.root, stage.key), *contents[stage.id])
        return True

    def compare_resumed(self, artefact: Artefact, tensors: dict[str, Tensor], metadata: Any, rows: list[dict[str, Any]]) -> None:
        again = stage_tensors(artefact)
        is_same = again.keys() == tensors.keys() and all(torch.equal(t, tensors[name]) for name, t in again.items())
        if is_same and stage_metadata(artefact) == metadata and history(artefact) == rows:
            self.resumed = self.resumed or "bits"
            return
        difference = relative(again, tensors) if again.keys() == tensors.keys() else float("inf")
        self.resumed = f"{difference:.1g}"
        why = f" ({', '.join(sorted(self.nondeterministic))} is not deterministic here)" if self.nondeterministic else ""
        limit = RESUMED if self.nondeterministic else 0.0
        self.demand(difference <= limit and bool(self.nondeterministic),
                    f"interrupted and resumed, it ends with another result: it differs by {difference:.2g}{why}")


class WatchedExecutor(InProcess):
    """The executor of `cluster.workers: 0`, which tells what it begins and keeps what was raised. The report is left out."""

    def __init__(self, store: Store, cluster: ClusterSettings, enter: Callable[[str], None], errors: dict[str, Exception]):
        super().__init__(store, cluster, lambda stage: {}, lambda event: None)
        self.enter = enter
        self.errors = errors

    def _run(self, stage: Stage) -> dict[str, Any]:
        self.enter(stage.id)
        try:
            return super()._run(stage)
        except notice.Leaving:
            raise
        except Exception as error:
            self.errors[stage.id] = error
            raise


# ---- what is different while comparing -----------------------------------------------------------------------------------
@contextlib.contextmanager
def host_draws() -> Iterator[None]:
    """A step's random numbers come from the CPU's generator, whatever the device: two devices get the same."""
    def on_host(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def draw(self: Draw, tag: str, *shape: int, device: torch.device | None = None) -> Tensor:
            return method(replace(self, device=CPU), tag, *shape).to(device or self.device)

        return draw

    with mock.patch.object(Draw, "per_sample", on_host(Draw.per_sample)), mock.patch.object(Draw, "shared", on_host(Draw.shared)):
        yield


def another_rounding(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Where the device is the CPU too, linear layers are computed in double precision: what rounding does can be rehearsed."""
    if device.type != "cpu":
        return contextlib.nullcontext()
    linear = functional.linear

    def in_double(images: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = linear(images.double(), weight.double(), None if bias is None else bias.double())
        return out.to(images.dtype)

    return mock.patch.object(functional, "linear", in_double)


@contextlib.contextmanager
def deterministic(exceptions: set[str]) -> Iterator[None]:
    """PyTorch takes the deterministic form of every operation that has one; names of those that have none go to `exceptions`."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        torch.use_deterministic_algorithms(False)
    for warning in caught:
        if match := re.match(r"(\S+) does not have a deterministic implementation", str(warning.message)):
            exceptions.add(match[1])


@contextlib.contextmanager
def recorded_steps() -> Iterator[defaultdict[str, list[Step]]]:
    """Stage id -> its steps of the train loop, as they are taken."""
    steps: defaultdict[str, list[Step]] = defaultdict(list)
    train_step = loop.train_step

    def record(method: Any, optimizer: Any, batches: Any, progress: Any, job: StageJob, group: Group) -> Any:
        columns = [torch.cat([getattr(batch, name) for batch in batches]).cpu() for name in ("labels", "tasks", "images")]
        terms = train_step(method, optimizer, batches, progress, job, group)
        steps[job.id].append(Step(float(terms["loss"]), *columns))
        return terms

    with mock.patch.object(loop, "train_step", record):
        yield steps


@dataclass
class Interruptions:
    """By stage id: the steps that were taken over all tries, and how many there are; which stages were told to leave."""

    taken: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    total: dict[str, int] = field(default_factory=dict)
    interrupted: set[str] = field(default_factory=set)


@contextlib.contextmanager
def interrupted_steps() -> Iterator[Interruptions]:
    """Tells every training stage once to leave, as SIGTERM does, in the middle of its steps."""
    steps = Interruptions()
    train_step = loop.train_step

    def interrupt(method: Any, optimizer: Any, batches: Any, progress: Any, job: StageJob, group: Group) -> Any:
        terms = train_step(method, optimizer, batches, progress, job, group)
        steps.taken[job.id] += 1
        steps.total[job.id] = progress.total
        if progress.done == progress.total // 2 and job.id not in steps.interrupted:
            steps.interrupted.add(job.id)
            notice.given.set()
        return terms

    with mock.patch.object(loop, "train_step", interrupt):
        yield steps


# ---- results as values ---------------------------------------------------------------------------------------------------
def stage_tensors(artefact: Artefact) -> dict[str, Tensor]:
    """All tensors that a training step left, by kind and name: masks as booleans, sparse tensors as vectors without their
    last zeros."""
    state = TaskState.from_bytes(artefact.read("task.safetensors"))
    tensors = {f"carried/{name}": t for name, t in Carried.from_bytes(artefact.read("carried.safetensors")).tensors.items()}
    for kind in ("masks", "tokens", "head", "copies"):
        tensors |= {f"{kind}/{name}": t for name, t in getattr(state, kind).items()}
    for name in [name for name in tensors if name.endswith("/values")]:
        prefix = name.removesuffix("/values")
        values = tensors.pop(name)
        at = tensors.pop(f"{prefix}/at", None)
        places = torch.from_numpy(bits_of(tensors.pop(f"{prefix}/bits"))).nonzero().squeeze(1)[: len(values)] if at is None else at.long()
        tensors[f"{prefix}{SPARSE}"] = torch.zeros(int(places.max()) + 1 if len(places) else 0).index_put_((places,), values)
    return tensors


def stage_metadata(artefact: Artefact) -> dict[str, Any]:
    """Metadata of state and carried state, as values by dotted key."""
    state = TaskState.from_bytes(artefact.read("task.safetensors"))
    carried = Carried.from_bytes(artefact.read("carried.safetensors"))
    return flatten({"state": state.meta, "carried": carried.meta})


def history(artefact: Artefact) -> list[dict[str, Any]]:
    """A row per epoch, without its seconds."""
    rows = pq.read_table(io.BytesIO(artefact.read("history.parquet"))).to_pylist()
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def predictions(artefact: Artefact) -> list[dict[str, Any]]:
    """A row per test image."""
    return pq.read_table(io.BytesIO(artefact.read("predictions.parquet"))).to_pylist()


def bits_of(tensor: Tensor) -> np.ndarray:
    """Booleans and other integers as they are; bytes as their bits, because masks are packed."""
    values = tensor.numpy()
    return np.unpackbits(values.reshape(-1)) if values.dtype == np.uint8 else values.reshape(-1)


def relative(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """|a - b| / |b|, over all tensors together. Vectors may end in zeros that the other side lacks."""
    difference = size = 0.0
    for name, a in ours.items():
        b = theirs[name]
        if a.shape != b.shape:
            length = max(len(a), len(b))
            a, b = (functional.pad(t, (0, length - len(t))) for t in (a, b))
        difference += float((a.double() - b.double()).square().sum())
        size += float(b.double().square().sum())
    return (difference / size) ** 0.5 if size else difference**0.5


def other_values(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> float:
    """Share of the values that the other side has not. Numbers may differ by rounding; other lists are compared as sets."""
    different = count = 0.0
    for name in {**ours, **theirs}:
        a, b = (values if isinstance(values, list) else [values] for values in (ours.get(name), theirs.get(name)))
        count += max(len(a), len(b))
        if len(a) == len(b) and all(isinstance(value, float) for value in [*a, *b]):
            different += sum(abs(x - y) > EXACT_TENSORS * (1 + abs(y)) for x, y in zip(a, b, strict=True))
        else:
            different += len({str(value) for value in a} ^ {str(value) for value in b}) / 2
    return different / count if count else 0.0


# ---- errors --------------------------------------------------------------------------------------------------------------
def sentence_of(error: BaseException) -> str:
    """The first sentence of an error, in one line."""
    lines = str(error).strip().splitlines() or [""]
    sentence = lines[0] if isinstance(error, UserError) else f"{type(error).__name__}: {lines[0].split('. ')[0]}"
    return sentence if len(sentence) <= LONGEST_SENTENCE else f"{sentence[: LONGEST_SENTENCE - 4]} ..."


def frame_of(error: BaseException) -> str:
    """The deepest line of this project that the error went through, as FILE:LINE below the checkout."""
    frame = ""
    for entry in traceback.extract_tb(error.__traceback__):
        path = Path(entry.filename)
        if path.is_relative_to(ROOT) and "site-packages" not in path.parts:
            frame = f"{path.relative_to(ROOT)}:{entry.lineno}"
    return frame
