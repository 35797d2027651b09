"""What `benchmarks.gpu` checks of a case: stages against the CPU, serving, users' path, resuming.

Every stage is first run on the CPU, and then once more on the device *from the same parents*. So a
stage that fails does not hide those that follow it, differences do not add up from stage to stage,
and it is known what must agree:

    batches      labels and tasks are equal, images up to rounding: the host decides on order and
                 augmentation
    losses       the first one up to rounding; the last one loosely, as training enlarges rounding
    masks        bit for bit where a step does not train (prune); else but for a small share
    tensors      up to rounding where a step does not train; else loosely
    metadata     such as references of exemplars: equal but for near-ties
    decisions    predicted classes are equal but for near-ties, of `evaluate` and of a served bundle

For this comparison alone, random numbers that training draws on the device are drawn on the CPU and
moved. The users' path that follows (config, graph, executor in this process) draws where it always
does. It is interrupted inside each training step of the last task and must end with the same bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_cases import LAST_TASK, Case, Failure, Setup, mixed_batch, plan
from benchmarks.gpu_conditions import (
    CPU,
    Step,
    WatchedExecutor,
    another_rounding,
    deterministic,
    host_draws,
    interrupted_steps,
    recorded_steps,
)
from benchmarks.gpu_results import (
    ROUNDING,
    SPARSE,
    bits_of,
    frame_of,
    history,
    largest,
    predictions,
    relative,
    sentence_of,
    share_of_other_values,
    stage_metadata,
    stage_tensors,
)
from pipeline.config.settings import Config
from pipeline.graph.run import look_up_all, run_graph
from pipeline.graph.stage import Graph
from pipeline.graph.store import Store
from pipeline.results.bundles import build_run_bundle
from workers import loop, preemption
from workers.data import accelerator
from workers.dist import Group
from workers.job import StageJob
from workers.methods import METHODS
from workers.serving.model_file import Rule
from workers.serving.server import Answer, Predictor
from workers.storage.artifact import Artifact

# How far two devices may be apart. Another rounding of linear layers on the CPU (a rehearsal) moves
# the tensors of no method by more than 3e-4, the loss by 1e-6, and no bit of a mask.
LAST_LOSS = 0.05  # relative
TRAINED_TENSORS = 0.1  # |a - b| / |b| over all tensors of a state
TRAINED_MASKS = 0.02  # share of the bits
METADATA = 0.1  # share of the values
DECISIONS = 0.05  # share of the images, each of them a near-tie


def shapes_of(tensors: dict[str, Tensor]) -> dict[str, tuple[Any, Any]]:
    """Return type and shape of each tensor; sparse ones may have any length."""
    shapes = {}
    for name, tensor in tensors.items():
        shapes[name] = (tensor.dtype, None if name.endswith(SPARSE) else tensor.shape)
    return shapes


@dataclass(frozen=True)
class Contents:
    """All that a training step left behind."""

    tensors: dict[str, Tensor]
    metadata: dict[str, Any]
    history: list[dict[str, Any]]

    def is_equal(self, other: Contents) -> bool:
        """Return whether both are the same, bit for bit."""
        if self.tensors.keys() != other.tensors.keys():
            return False
        if self.metadata != other.metadata or self.history != other.history:
            return False
        return all(
            torch.equal(tensor, other.tensors[name]) for name, tensor in self.tensors.items()
        )


def contents_of(artifact: Artifact) -> Contents:
    """Return what a training step left behind."""
    return Contents(stage_tensors(artifact), stage_metadata(artifact), history(artifact))


def check_case(setup: Setup, case: Case, send: Callable[[str, Any], None]) -> bool:
    """Make all checks of a case, and return whether nothing failed.

    A check that fails ends only those that need its result. `send` gets `stage` (the id of what
    begins), `failure` (a Failure), and at the end `measured` (text by column of the table).
    """
    torch.set_num_threads(1)
    accelerator.use_fp32()  # with which fp32 is compared
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

    def __init__(self, setup: Setup, case: Case, send: Callable[[str, Any], None]) -> None:
        self.setup = setup
        self.case = case
        self.send = send
        self.folder = setup.folder / case.name
        self.stage = ""
        self.failures: set[tuple[str, str]] = set()  # stage, sentence
        self.measured: dict[str, float] = {}  # largest difference by what is compared
        self.digest = hashlib.sha256()  # of all masks, as packed bits
        self.resumed = ""
        self.is_device_lost = False  # after an error of CUDA every later call fails too

    # ---- failures --------------------------------------------------------------------------------
    def fail(self, stage: str, sentence: str, frame: str = "") -> None:
        """Send a failure, once where two checks meet it."""
        if (stage, sentence) not in self.failures:
            self.failures.add((stage, sentence))
            self.send("failure", Failure(stage, sentence, frame))

    def fail_by(self, stage: str, error: Exception) -> None:
        """Send what an exception says; nothing more once the device is lost."""
        if not self.is_device_lost:
            self.fail(stage, sentence_of(error), frame_of(error))
        self.is_device_lost |= "CUDA error" in str(error)

    def attempt(self, stage: str, check: Callable[[], bool]) -> bool:
        """Return what the check returns, and False where it raises: a failure of the stage that it
        had entered."""
        if self.is_device_lost:
            return False
        self.enter(stage)
        try:
            return check()
        except Exception as error:
            self.fail_by(self.stage, error)
            return False

    def enter(self, stage: str) -> None:
        """Send which stage begins."""
        self.stage = stage
        self.send("stage", stage)

    def demand(self, is_met: bool, sentence: str) -> None:
        """Fail the stage that was entered where a demand is not met."""
        if not is_met:
            self.fail(self.stage, sentence)

    def measure(self, what: str, difference: float, limit: float) -> None:
        """Note a difference between both sides; it fails where it is above the limit, or no
        number."""
        self.measured[what] = largest([self.measured.get(what, 0.0), difference])
        sentence = f"{what} differ by {difference:.2g}, at most {limit:g} is rounding"
        self.demand(difference <= limit, sentence)

    def table_row(self) -> dict[str, str]:
        """Return what was compared, as text by column."""
        row = {what: f"{difference:.1g}" for what, difference in self.measured.items()}
        if self.measured.get("masks") == 0.0:
            row["masks"] = f"= {self.digest.hexdigest()[:8]}"
        return row | {"resumed": self.resumed}

    # ---- runs ------------------------------------------------------------------------------------
    def run(self, store: Store, graph: Graph, config: Config) -> bool:
        """Run what is missing as the command `run` does where `cluster.workers` is 0.

        Return whether no stage failed.
        """
        errors: dict[str, Exception] = {}
        executor = WatchedExecutor(store, config.cluster, self.enter, errors)
        lookups = look_up_all(graph, store, None)
        outcome = run_graph(
            graph, store, lambda todo: executor, retries=0, watchers=[], lookups=lookups
        )
        for stage, message in outcome.failures.items():
            error = errors.get(stage)
            if error is None:
                self.fail(stage, message)
            else:
                self.fail_by(stage, error)
        return not outcome.failures

    def run_on_cpu(self) -> bool:
        """Run the whole graph on the CPU: the reference of all comparisons."""
        with host_draws(), recorded_steps() as self.cpu_steps:
            self.store, self.graph, config = plan(self.setup, self.case, "reference", CPU)
            return self.run(self.store, self.graph, config)

    # ---- stage by stage --------------------------------------------------------------------------
    def compare_stages(self) -> None:
        """Compare every stage of the method on both sides."""
        for stage in self.graph:
            if stage.method and isinstance(stage.job, StageJob):
                self.attempt(stage.id, partial(self.compare_stage, stage.job))

    def compare_stage(self, job: StageJob) -> bool:
        """Run the same job again on the device, under another key, and compare the results."""
        device = self.setup.device
        again = replace(job, key=f"{job.key}-again")
        with host_draws(), recorded_steps() as steps, another_rounding(device):
            loop.run_stage(again, Group(0, 1, device), lambda event: None)
        on_cpu = Artifact.need(job.root, job.key)
        on_device = Artifact.need(job.root, again.key)
        if job.step == "evaluate":
            self.compare_predictions(on_cpu, on_device)
        else:
            self.compare_steps(self.cpu_steps[job.id], steps[job.id])
            self.compare_results(on_cpu, on_device, is_trained=bool(steps[job.id]))
        return True

    def compare_steps(self, on_cpu: list[Step], on_device: list[Step]) -> None:
        """Compare what each optimizer step saw on both sides, and its loss."""
        sentence = f"it took {len(on_device)} steps, on the CPU {len(on_cpu)}"
        self.demand(len(on_cpu) == len(on_device), sentence)
        is_same_order = True
        image_gaps: list[float] = []
        loss_gaps: list[float] = []
        for ours, reference in zip(on_device, on_cpu, strict=False):
            if not torch.equal(ours.labels, reference.labels):
                is_same_order = False
            if not torch.equal(ours.tasks, reference.tasks):
                is_same_order = False
            image_gaps.append(relative({"": ours.images}, {"": reference.images}))
            loss_gaps.append(abs(ours.loss - reference.loss) / (1 + abs(reference.loss)))
        if not loss_gaps:
            return
        self.demand(is_same_order, "its batches hold other samples than on the CPU")
        self.measure("images", largest(image_gaps), ROUNDING)
        self.measure("first loss", loss_gaps[0], ROUNDING)
        self.measure("last loss", loss_gaps[-1], LAST_LOSS)

    def compare_results(self, on_cpu: Artifact, on_device: Artifact, is_trained: bool) -> None:
        """Compare state and carried state of one step on both sides."""
        tensors = stage_tensors(on_device)
        reference = stage_tensors(on_cpu)
        shapes = shapes_of(tensors)
        expected_shapes = shapes_of(reference)
        if shapes != expected_shapes:
            names = sorted(name for name, _ in shapes.items() ^ expected_shapes.items())
            listed = ", ".join(dict.fromkeys(names))[:100]
            self.demand(False, f"it leaves other tensors than on the CPU: {listed}")
            return
        self.compare_masks(tensors, reference, is_trained)
        numbers = {name: t for name, t in tensors.items() if t.is_floating_point()}
        self.measure(
            "tensors", relative(numbers, reference), TRAINED_TENSORS if is_trained else ROUNDING
        )
        metadata = share_of_other_values(stage_metadata(on_device), stage_metadata(on_cpu))
        self.measure("metadata", metadata, METADATA)

    def compare_masks(
        self, tensors: dict[str, Tensor], reference: dict[str, Tensor], is_trained: bool
    ) -> None:
        """Compare integers and packed bits, and add them to the digest of the case."""
        names = sorted(name for name, t in tensors.items() if not t.is_floating_point())
        if not names:
            return
        count = 0
        different = 0
        for name in names:
            bits = bits_of(tensors[name])
            count += bits.size
            different += int((bits != bits_of(reference[name])).sum())
            self.digest.update(np.packbits(bits.astype(bool)).tobytes())
        limit = TRAINED_MASKS if is_trained else 0.0
        self.measure("masks", different / max(1, count), limit)

    def compare_predictions(self, on_cpu: Artifact, on_device: Artifact) -> None:
        """Compare the predictions of `evaluate`, image by image."""
        rows = predictions(on_device)
        expected = predictions(on_cpu)
        is_same_order = [row["key"] for row in rows] == [row["key"] for row in expected]
        self.demand(is_same_order, "it measured other images than on the CPU")
        gaps: list[float] = []
        different = 0
        for row, reference in zip(rows, expected, strict=False):
            gaps.append(abs(row["confidence"] - reference["confidence"]))
            if row["prediction"] != reference["prediction"]:
                different += 1
        self.measure("confidences", largest(gaps), ROUNDING)
        # With equal confidences, other decisions are near-ties.
        self.measure("decisions", different / max(1, len(gaps)), DECISIONS)

    # ---- serving ---------------------------------------------------------------------------------
    def compare_served(self) -> bool:
        """Compare one bundle on both sides over one batch of images of all tasks: once with the
        task of each image, once without."""
        folder = str(self.folder / "bundle")
        build_run_bundle(self.graph, self.store, self.case.method).write(folder)
        on_cpu = Predictor.open(folder)
        with another_rounding(self.setup.device):
            on_device = Predictor.open(folder, device=self.setup.device)
        images, tasks = mixed_batch(self.setup)
        rule_without_task: Rule = "refuse" if on_cpu.infers_task else "confident"
        requests: list[tuple[list[str] | None, Rule]] = [
            (tasks, "refuse"),
            (None, rule_without_task),
        ]
        for tasks_of_images, rule in requests:
            expected = on_cpu.predict(images, tasks_of_images, rule)
            with another_rounding(self.setup.device):
                answers = on_device.predict(images, tasks_of_images, rule)
            self.compare_answers(answers, expected)
        return True

    def compare_answers(self, answers: list[Answer], expected: list[Answer]) -> None:
        """Compare probabilities and predicted classes of served images."""
        gaps: list[float] = []
        different = 0
        for ours, reference in zip(answers, expected, strict=True):
            if (ours.task, ours.class_) != (reference.task, reference.class_):
                different += 1
            if ours.probabilities.keys() != reference.probabilities.keys():
                continue  # the method inferred another task
            for name, probability in ours.probabilities.items():
                gaps.append(abs(probability - reference.probabilities[name]))
        self.measure("probabilities", largest(gaps), ROUNDING)
        self.measure("answers", different / len(expected), DECISIONS)

    # ---- the users' path -------------------------------------------------------------------------
    def run_as_users_do(self) -> bool:
        """Run the whole graph on the device, as a user would."""
        self.nondeterministic: set[str] = set()
        with deterministic(self.nondeterministic):
            self.users = plan(self.setup, self.case, "users", self.setup.device)
            if not self.run(*self.users):
                return False
        self.check_canaries()
        return True

    def check_canaries(self) -> None:
        """Check that a method that forgets nothing answers on each task as it did before the next
        one, bit for bit."""
        store, graph, _ = self.users
        if METHODS[self.case.method].may_forget:
            return
        digests: dict[str, str] = {}
        for stage in graph:
            if stage.step == "evaluate":
                result = Artifact.need(store.root, stage.key).manifest["result"]
                canary = result["canary"]
                if canary is not None:
                    self.enter(stage.id)
                    self.demand(
                        canary["logits_sha256"] == digests[canary["task"]],
                        f"it changed the answers of task {canary['task']!r}",
                    )
                digests |= {row["task"]: row["logits_sha256"] for row in result["rows"]}

    def resume(self) -> bool:
        """Run every training step of the last task again, interrupt each in its middle, and compare
        what the next run makes of it."""
        store, graph, config = self.users
        stages = [s for s in graph if s.task == LAST_TASK and s.method and s.step != "evaluate"]
        uninterrupted = {s.id: contents_of(Artifact.need(store.root, s.key)) for s in stages}
        for stage in stages:
            store.withdraw(stage.key)
        with deterministic(self.nondeterministic), interrupted_steps() as steps:
            for _ in range(len(stages) + 1):
                with contextlib.suppress(preemption.Preempted):
                    if not self.run(store, graph, config):
                        return False
                    break
        for stage in stages:
            self.enter(stage.id)
            expected = uninterrupted[stage.id]
            if any("loss" in row for row in expected.history):
                taken = steps.taken[stage.id]
                total = steps.total[stage.id]
                self.demand(stage.id in steps.interrupted, "it was not interrupted")
                sentence = (
                    f"interrupted, it took {taken} steps in all; without interruption it takes "
                    f"{total}"
                )
                self.demand(taken == total, sentence)
            self.compare_resumed(contents_of(Artifact.need(store.root, stage.key)), expected)
        return True

    def compare_resumed(self, resumed: Contents, expected: Contents) -> None:
        """Compare the result of a resumed step with that of the same step without interruption."""
        if resumed.is_equal(expected):
            self.resumed = self.resumed or "bits"
            return
        difference = float("inf")
        if resumed.tensors.keys() == expected.tensors.keys():
            difference = relative(resumed.tensors, expected.tensors)
        self.resumed = f"{difference:.1g}"
        sentence = f"interrupted and resumed, it ends with another result, {difference:.2g} apart"
        if not self.nondeterministic:
            self.demand(False, sentence)
            return
        names = ", ".join(sorted(self.nondeterministic))
        is_rounding = difference <= ROUNDING
        self.demand(is_rounding, f"{sentence} ({names} is not deterministic here)")
