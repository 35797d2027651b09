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
from dataclasses import replace
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
    other_values,
    predictions,
    relative,
    sentence_of,
    stage_metadata,
    stage_tensors,
)
from pipeline.config import Config
from pipeline.graph.run import look_up_all, run_graph
from pipeline.graph.stage import Graph
from pipeline.graph.store import Store
from pipeline.serving.commands import bundle_of
from workers import loop, preemption
from workers.dist import Group
from workers.job import StageJob
from workers.methods import METHODS
from workers.serving.server import Answer, Predictor
from workers.storage.artifact import Artifact

# How far two devices may be apart.
LAST_LOSS = 0.05  # relative
TRAINED_TENSORS = 0.1  # |a - b| / |b| over all tensors of a state
TRAINED_MASKS = 0.02  # share of the bits
METADATA = 0.1  # share of the values
DECISIONS = 0.05  # share of the images, each of them a near-tie


def check_case(setup: Setup, case: Case, send: Callable[[str, Any], None]) -> bool:
    """Makes all checks of a case; one that fails ends only those that need its result.

    Sends `stage` (the id of what begins), `failure` (a Failure) and at the end `measured` (text by
    column of the table). Returns whether nothing failed.
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
        """One line for a failure that two checks meet."""
        if (stage, sentence) not in self.failures:
            self.failures.add((stage, sentence))
            self.send("failure", Failure(stage, sentence, frame))

    def fail_by(self, stage: str, error: Exception) -> None:
        if not self.is_device_lost:
            self.fail(stage, sentence_of(error), frame_of(error))
        self.is_device_lost |= "CUDA error" in str(error)

    def attempt(self, stage: str, check: Callable[[], bool]) -> bool:
        """What the check returns; False where it raises, which is a failure of the stage that was
        under way."""
        if self.is_device_lost:
            return False
        self.enter(stage)
        try:
            return check()
        except Exception as error:
            self.fail_by(self.stage, error)
            return False

    def enter(self, stage: str) -> None:
        self.stage = stage
        self.send("stage", stage)

    def demand(self, is_met: bool, sentence: str) -> None:
        if not is_met:
            self.fail(self.stage, sentence)

    def measure(self, what: str, difference: float, limit: float) -> None:
        """Notes a difference between both sides; a failure where it is above the limit, or no
        number."""
        self.measured[what] = largest([self.measured.get(what, 0.0), difference])
        self.demand(
            difference <= limit, f"{what} differ by {difference:.2g}, at most {limit:g} is rounding"
        )

    def table_row(self) -> dict[str, str]:
        """Text by column of what was compared."""
        row = {what: f"{difference:.1g}" for what, difference in self.measured.items()}
        if self.measured.get("masks") == 0.0:
            row["masks"] = f"= {self.digest.hexdigest()[:8]}"
        return row | {"resumed": self.resumed}

    # ---- runs ------------------------------------------------------------------------------------
    def run(self, store: Store, graph: Graph, config: Config) -> bool:
        """Runs what is missing as `accrete run` does where `cluster.workers` is 0. Every stage that
        failed is a failure."""
        errors: dict[str, Exception] = {}
        outcome = run_graph(
            graph,
            store,
            lambda todo: WatchedExecutor(store, config.cluster, self.enter, errors),
            retries=0,
            watchers=[],
            lookups=look_up_all(graph, store, None),
        )
        for stage, message in outcome.failures.items():
            error = errors.get(stage)
            if error is None:
                self.fail(stage, message)
            else:
                self.fail_by(stage, error)
        return not outcome.failures

    def run_on_cpu(self) -> bool:
        with host_draws(), recorded_steps() as self.cpu_steps:
            self.store, self.graph, config = plan(self.setup, self.case, "reference", CPU)
            return self.run(self.store, self.graph, config)

    # ---- stage by stage --------------------------------------------------------------------------
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
        on_cpu, on_device = Artifact.need(job.root, job.key), Artifact.need(job.root, again.key)
        if job.step == "evaluate":
            self.compare_predictions(on_cpu, on_device)
        else:
            self.compare_steps(self.cpu_steps[job.id], steps[job.id])
            self.compare_results(on_cpu, on_device, is_trained=bool(steps[job.id]))
        return True

    def compare_steps(self, on_cpu: list[Step], on_device: list[Step]) -> None:
        self.demand(
            len(on_cpu) == len(on_device),
            f"it took {len(on_device)} steps, on the CPU {len(on_cpu)}",
        )
        pairs = list(zip(on_device, on_cpu, strict=False))
        if not pairs:
            return
        is_same_order = all(
            torch.equal(a.labels, b.labels) and torch.equal(a.tasks, b.tasks) for a, b in pairs
        )
        self.demand(is_same_order, "its batches hold other samples than on the CPU")
        self.measure(
            "images", largest(relative({"": a.images}, {"": b.images}) for a, b in pairs), ROUNDING
        )
        losses = [abs(a.loss - b.loss) / (1 + abs(b.loss)) for a, b in pairs]
        self.measure("first loss", losses[0], ROUNDING)
        self.measure("last loss", losses[-1], LAST_LOSS)

    def compare_results(self, on_cpu: Artifact, on_device: Artifact, is_trained: bool) -> None:
        """State and carried state of one step on both sides."""
        ours, theirs = stage_tensors(on_device), stage_tensors(on_cpu)
        shapes = [
            {name: (t.dtype, name.endswith(SPARSE) or t.shape) for name, t in tensors.items()}
            for tensors in (ours, theirs)
        ]
        if shapes[0] != shapes[1]:
            names = [
                name
                for name in {**shapes[0], **shapes[1]}
                if shapes[0].get(name) != shapes[1].get(name)
            ]
            self.demand(
                False, f"it leaves other tensors than on the CPU: {', '.join(sorted(names))[:100]}"
            )
            return
        bits = {
            name: (bits_of(t), bits_of(theirs[name]))
            for name, t in ours.items()
            if not t.is_floating_point()
        }
        if bits:
            count = sum(a.size for a, _ in bits.values())
            different = sum(int((a != b).sum()) for a, b in bits.values())
            self.measure("masks", different / max(1, count), TRAINED_MASKS if is_trained else 0.0)
            for name in sorted(bits):
                self.digest.update(np.packbits(bits[name][0].astype(bool)).tobytes())
        numbers = [
            {name: t for name, t in tensors.items() if t.is_floating_point()}
            for tensors in (ours, theirs)
        ]
        self.measure("tensors", relative(*numbers), TRAINED_TENSORS if is_trained else ROUNDING)
        self.measure(
            "metadata", other_values(stage_metadata(on_device), stage_metadata(on_cpu)), METADATA
        )

    def compare_predictions(self, on_cpu: Artifact, on_device: Artifact) -> None:
        """Of `evaluate`, image by image."""
        ours, theirs = predictions(on_device), predictions(on_cpu)
        self.demand(
            [row["key"] for row in ours] == [row["key"] for row in theirs],
            "it measured other images than on the CPU",
        )
        pairs = list(zip(ours, theirs, strict=False))
        self.measure(
            "confidences",
            largest(abs(a["confidence"] - b["confidence"]) for a, b in pairs),
            ROUNDING,
        )
        # with equal confidences: near-ties
        different = sum(a["prediction"] != b["prediction"] for a, b in pairs)
        self.measure("decisions", different / max(1, len(pairs)), DECISIONS)

    # ---- serving ---------------------------------------------------------------------------------
    def compare_served(self) -> bool:
        """One bundle on both sides; one batch of images of all tasks, with their tasks told and not
        told."""
        folder = str(self.folder / "bundle")
        bundle_of(self.graph, self.store, self.case.method).write(folder)
        on_cpu = Predictor.open(folder)
        with another_rounding(self.setup.device):
            on_device = Predictor.open(folder, device=str(self.setup.device))
        images, tasks = mixed_batch(self.setup)
        untold = "refuse" if on_cpu.infers else "confident"
        for told, rule in ((tasks, "refuse"), (None, untold)):
            expected = on_cpu.predict(images, told, rule)  # type: ignore[arg-type]
            with another_rounding(self.setup.device):
                answers = on_device.predict(images, told, rule)  # type: ignore[arg-type]
            self.compare_answers(answers, expected)
        return True

    def compare_answers(self, answers: list[Answer], expected: list[Answer]) -> None:
        gaps = []
        for a, b in zip(answers, expected, strict=True):
            if (
                a.probabilities.keys() == b.probabilities.keys()
            ):  # else the method picked another task
                gaps += [abs(p - b.probabilities[name]) for name, p in a.probabilities.items()]
        self.measure("probabilities", largest(gaps), ROUNDING)
        different = sum(
            (a.task, a.class_) != (b.task, b.class_) for a, b in zip(answers, expected, strict=True)
        )
        self.measure("answers", different / len(expected), DECISIONS)

    # ---- the users' path -------------------------------------------------------------------------
    def run_as_users_do(self) -> bool:
        """The graph on the device from its ingest on, twice: nothing is left to do the second
        time."""
        self.nondeterministic: set[str] = set()
        with deterministic(self.nondeterministic):
            self.users = plan(self.setup, self.case, "users", self.setup.device)
            if not self.run(*self.users):
                return False
        self.check_canaries()
        return True

    def check_canaries(self) -> None:
        """Of a method that forgets nothing, the answers on a task beside the next one are bit for
        bit what they were."""
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
        """Every training step of the last task once more, told to leave in its middle, resumed by
        the next run."""
        store, graph, config = self.users
        stages = [s for s in graph if s.task == LAST_TASK and s.method and s.step != "evaluate"]
        before = {stage.id: Artifact.need(store.root, stage.key) for stage in stages}
        contents = {
            stage: ({**stage_tensors(artifact)}, stage_metadata(artifact), history(artifact))
            for stage, artifact in before.items()
        }
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
            if any("loss" in row for row in contents[stage.id][2]):
                self.demand(stage.id in steps.interrupted, "it was not interrupted")
                self.demand(
                    steps.taken[stage.id] == steps.total[stage.id],
                    f"interrupted, it took {steps.taken[stage.id]} steps in all; "
                    f"without interruption it takes {steps.total[stage.id]}",
                )
            self.compare_resumed(Artifact.need(store.root, stage.key), *contents[stage.id])
        return True

    def compare_resumed(
        self,
        artifact: Artifact,
        tensors: dict[str, Tensor],
        metadata: Any,
        rows: list[dict[str, Any]],
    ) -> None:
        again = stage_tensors(artifact)
        is_same = again.keys() == tensors.keys() and all(
            torch.equal(t, tensors[name]) for name, t in again.items()
        )
        if is_same and stage_metadata(artifact) == metadata and history(artifact) == rows:
            self.resumed = self.resumed or "bits"
            return
        difference = relative(again, tensors) if again.keys() == tensors.keys() else float("inf")
        self.resumed = f"{difference:.1g}"
        why = (
            f" ({', '.join(sorted(self.nondeterministic))} is not deterministic here)"
            if self.nondeterministic
            else ""
        )
        limit = ROUNDING if self.nondeterministic else 0.0
        self.demand(
            difference <= limit and bool(self.nondeterministic),
            f"interrupted and resumed, it ends with another result, {difference:.2g} apart{why}",
        )
