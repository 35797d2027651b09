"""The checks of `benchmarks.gpu`: stages against the CPU, serving, a normal run, and resuming.

Every stage runs on the CPU, and then again on the device with the parent stages' CPU results
as inputs. Therefore a failed stage does not affect later stages, and differences do not accumulate.
The results must agree as follows:

    batches      labels and tasks are equal, images agree up to rounding, because the host decides
                 on order and augmentation
    losses       the first one agrees up to rounding, the last one roughly, because training
                 amplifies rounding differences
    masks        equal bit for bit in steps without training (prune), else except for a small share
    tensors      agree up to rounding in steps without training, else roughly
    metadata     (for example, references to exemplars) equal except for near-ties
    decisions    the predicted classes of `evaluate` and of a served bundle are equal except for
                 near-ties

Only for this comparison, the random numbers that training draws on the device are drawn on the CPU
and moved. The normal run that follows (config, graph, executor in this process) draws them on the
device. It is repeated with an interruption in each training step of the last task, and must end
with the same bytes.
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
    find_frame,
    format_error,
    history,
    largest,
    predictions,
    relative,
    share_of_other_values,
    stage_metadata,
    stage_tensors,
    unpack_bits,
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

# Tolerances between two devices. In a rehearsal on the CPU, a different rounding of linear layers
# changes tensors by at most 3e-4, the loss by at most 1e-6, and no bit of a mask.
LAST_LOSS = 0.05  # relative
TRAINED_TENSORS = 0.1  # |a - b| / |b| over all tensors of a state
TRAINED_MASKS = 0.02  # share of the bits
METADATA = 0.1  # share of the values
DECISIONS = 0.05  # share of the images; these are near-ties


def list_shapes(tensors: dict[str, Tensor]) -> dict[str, tuple[Any, Any]]:
    """Return dtype and shape of each tensor. The shape of a sparse tensor is None (any length)."""
    shapes = {}
    for name, tensor in tensors.items():
        shapes[name] = (tensor.dtype, None if name.endswith(SPARSE) else tensor.shape)
    return shapes


@dataclass(frozen=True)
class Contents:
    """The results of a training step."""

    tensors: dict[str, Tensor]
    metadata: dict[str, Any]
    history: list[dict[str, Any]]

    def is_equal(self, other: Contents) -> bool:
        """Return whether both are equal bit for bit."""
        if self.tensors.keys() != other.tensors.keys():
            return False
        if self.metadata != other.metadata or self.history != other.history:
            return False
        return all(
            torch.equal(tensor, other.tensors[name]) for name, tensor in self.tensors.items()
        )


def load_contents(artifact: Artifact) -> Contents:
    """Load the results of a training step."""
    return Contents(stage_tensors(artifact), stage_metadata(artifact), history(artifact))


def check_case(setup: Setup, case: Case, send: Callable[[str, Any], None]) -> bool:
    """Run all checks of a case.

    A failed check skips only the checks that need its result.

    Args:
        setup: Shared by all cases.
        case: The case.
        send: Called with a kind and a value: `stage` and the id of the stage that starts, `failure`
            and a Failure, and at the end `measured` and a text per column of the table.

    Returns:
        Whether all checks passed.
    """
    torch.set_num_threads(1)
    accelerator.use_fp32()  # no tf32, because results in fp32 are compared
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
        self.measured: dict[str, float] = {}  # largest difference per compared quantity
        self.digest = hashlib.sha256()  # of all masks, as packed bits
        self.resumed = ""
        self.is_device_lost = False  # after a CUDA error every later call fails too

    # ---- failures --------------------------------------------------------------------------------
    def fail(self, stage: str, sentence: str, frame: str = "") -> None:
        """Send a failure. A repeated failure is sent once."""
        if (stage, sentence) not in self.failures:
            self.failures.add((stage, sentence))
            self.send("failure", Failure(stage, sentence, frame))

    def report_error(self, stage: str, error: Exception) -> None:
        """Send an exception as a failure, unless the device is already lost."""
        if not self.is_device_lost:
            self.fail(stage, format_error(error), find_frame(error))
        self.is_device_lost |= "CUDA error" in str(error)

    def attempt(self, stage: str, check: Callable[[], bool]) -> bool:
        """Run a check and return its result.

        An exception is a failure of the current stage, and gives False.
        """
        if self.is_device_lost:
            return False
        self.enter(stage)
        try:
            return check()
        except Exception as error:
            self.report_error(self.stage, error)
            return False

    def enter(self, stage: str) -> None:
        """Send the id of the stage that starts."""
        self.stage = stage
        self.send("stage", stage)

    def demand(self, is_met: bool, sentence: str) -> None:
        """Record a failure of the current stage if the condition is not met."""
        if not is_met:
            self.fail(self.stage, sentence)

    def measure(self, what: str, difference: float, limit: float) -> None:
        """Record a difference between CPU and device. It fails if above the limit or NaN."""
        self.measured[what] = largest([self.measured.get(what, 0.0), difference])
        sentence = f"{what} differ by {difference:.2g}, at most {limit:g} is rounding"
        self.demand(difference <= limit, sentence)

    def table_row(self) -> dict[str, str]:
        """Return the largest differences as a text per column."""
        row = {what: f"{difference:.1g}" for what, difference in self.measured.items()}
        if self.measured.get("masks") == 0.0:
            row["masks"] = f"= {self.digest.hexdigest()[:8]}"
        return row | {"resumed": self.resumed}

    # ---- runs ------------------------------------------------------------------------------------
    def run(self, store: Store, graph: Graph, config: Config) -> bool:
        """Run the missing stages like the command `run` with `cluster.workers: 0`.

        Returns:
            Whether all stages succeeded.
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
                self.report_error(stage, error)
        return not outcome.failures

    def run_on_cpu(self) -> bool:
        """Run the whole graph on the CPU, as the reference for all comparisons."""
        with host_draws(), recorded_steps() as self.cpu_steps:
            self.store, self.graph, config = plan(self.setup, self.case, "reference", CPU)
            return self.run(self.store, self.graph, config)

    # ---- stage by stage --------------------------------------------------------------------------
    def compare_stages(self) -> None:
        """Compare every stage of the method on CPU and device."""
        for stage in self.graph:
            if stage.method and isinstance(stage.job, StageJob):
                self.attempt(stage.id, partial(self.compare_stage, stage.job))

    def compare_stage(self, job: StageJob) -> bool:
        """Run the same job on the device under another key, and compare the results."""
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
        """Compare the inputs and the loss of each optimizer step on CPU and device."""
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
        """Compare the task state and carried state of one step on CPU and device."""
        tensors = stage_tensors(on_device)
        reference = stage_tensors(on_cpu)
        shapes = list_shapes(tensors)
        expected_shapes = list_shapes(reference)
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
            bits = unpack_bits(tensors[name])
            count += bits.size
            different += int((bits != unpack_bits(reference[name])).sum())
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
        # Where the confidences agree, a different class is a near-tie.
        self.measure("decisions", different / max(1, len(gaps)), DECISIONS)

    # ---- serving ---------------------------------------------------------------------------------
    def compare_served(self) -> bool:
        """Compare the answers of one bundle on CPU and device for a batch with images of all tasks.

        The request is sent with the task of each image and without tasks.
        """
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

    # ---- normal run ------------------------------------------------------------------------------
    def run_as_users_do(self) -> bool:
        """Run the whole graph on the device like a user."""
        self.nondeterministic: set[str] = set()
        with deterministic(self.nondeterministic):
            self.users = plan(self.setup, self.case, "users", self.setup.device)
            if not self.run(*self.users):
                return False
        self.check_canaries()
        return True

    def check_canaries(self) -> None:
        """Check that later tasks do not change the logits of earlier tasks.

        They must be equal bit for bit. Methods that may forget are skipped.
        """
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
        """Repeat every training step of the last task with an interruption.

        Each step is interrupted in the middle and resumed, and its results are compared with those
        of the uninterrupted step.
        """
        store, graph, config = self.users
        stages = [s for s in graph if s.task == LAST_TASK and s.method and s.step != "evaluate"]
        uninterrupted = {s.id: load_contents(Artifact.need(store.root, s.key)) for s in stages}
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
            self.compare_resumed(load_contents(Artifact.need(store.root, stage.key)), expected)
        return True

    def compare_resumed(self, resumed: Contents, expected: Contents) -> None:
        """Compare the result of a resumed step with that of the uninterrupted step."""
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
