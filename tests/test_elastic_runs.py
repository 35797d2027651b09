"""Tests of runs of two ranks that lose a node during a task, and get another node later."""

from __future__ import annotations

import itertools
import json
import random
import time
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from rank_runs import on_ranks

from pipeline.config.settings import check
from pipeline.graph import build
from pipeline.graph.store import Store
from pipeline.testing.lab import again, history
from tests import small_run
from tests.recovery import MOMENTS
from tests.several_nodes import Nodes, nodes_up, wait_for
from workers.job import StageJob
from workers.storage.artifact import Artifact

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(5400),
    pytest.mark.usefixtures("clean_registry"),
]
TRIES = 20
# Pairs of digits. There are more pairs than TRIES, because one rank alone trains some of the tasks
# while a node joins.
TASKS = ["".join(pair) for pair in itertools.combinations("0123456789", 2)]
EPOCHS = 24
STEPS = EPOCHS * 8  # 2 classes of 64 images in batches of 16


class Step(NamedTuple):
    """The record of one rank about a training step. images: position in the batch -> digest."""

    time: float
    world: int
    number: int
    images: dict[str, str]


class Segment(NamedTuple):
    """Steps of one group of `world` ranks. start: number of the first step; began: its time."""

    start: int
    world: int
    began: float


class Loss(NamedTuple):
    """The loss of a node during the training of a task. killed, joined: times."""

    task: str
    killed: float
    joined: float


@dataclass
class Stream:
    """A stream of tasks of two digits each. The method records its training steps."""

    folder: Path
    tasks: list[str]

    @property
    def module(self) -> ModuleType:
        """The module of the method. Its first import registers the method in this process."""
        return import_module("tests.recorded_steps")

    @property
    def records(self) -> Path:
        """Folder with the records of the last started run."""
        return self.folder / "records"

    def body(self, folder: Path, **cluster: Any) -> dict[str, Any]:
        """Return the config of a run with its storage below `folder`."""
        card = str(self.folder / "cards" / "digits.yaml")
        tasks = [{"name": f"t{pair}", "card": card, "classes": list(pair)} for pair in self.tasks]
        return small_run.make_body(
            folder,
            {},
            {"recorded": {"folder": str(self.records)}},
            stream={"scenario": "task", "tasks": tasks},
            train={"epochs": EPOCHS, "lr": 3e-3},
            cluster={"workers": 2, "groups": 1, "retries": 1, **cluster},
        )

    def start(self, nodes: Nodes, folder: Path, **cluster: Any) -> Any:
        """Start a run of two ranks on the cluster, and return its process."""
        self.records.mkdir(exist_ok=True)
        for path in self.records.iterdir():
            path.unlink()
        body = self.body(folder, address=nodes.address, **cluster)
        config = small_run.write_config(folder / "config.yaml", body)
        arguments = (["run", config], str(folder / "out.txt"))
        process = small_run.processes().Process(target=self.module.run_into, args=arguments)
        process.start()
        return process

    def steps(self, task: str) -> list[Step]:
        """Return the recorded steps of all ranks in the training of a task, sorted by time."""
        steps = []
        for path in self.records.glob(f"{task}-*.jsonl"):
            # the last line of a killed process may be incomplete
            lines = path.read_text().splitlines(keepends=True)
            steps += [Step(*json.loads(line)) for line in lines if line.endswith("\n")]
        return sorted(steps, key=attrgetter("time"))

    def images(self, task: str) -> list[dict[str, str]]:
        """Return for each step: position in the global batch -> digest of the image.

        Groups that made the same step must have used the same images.
        """
        images: list[dict[str, str]] = [{} for _ in range(STEPS)]
        for step in self.steps(task):
            for position, digest in step.images.items():
                assert images[step.number].setdefault(position, digest) == digest
        assert all(images)
        return images

    def resumed_after(self, moment: float) -> float:
        """Return the time of the earliest first step of a process after `moment`."""
        starts: dict[str, float] = {}
        for path in self.records.iterdir():
            process = path.stem.rpartition("-")[2]
            line, end, _ = path.read_text().partition("\n")
            if end:  # the only line of a killed process may be incomplete
                first = json.loads(line)[0]
                starts[process] = min(first, starts.get(process, first))
        return min(start for start in starts.values() if start > moment)

    def segments(self, task: str) -> list[Segment]:
        """Return the segments of the training of a task, in order."""
        segments: list[Segment] = []
        last = 0
        for step in self.steps(task):
            if not segments or step.world != segments[-1].world or step.number < last:
                segments.append(Segment(step.number, step.world, step.time))
            last = step.number
        return segments

    def current_task(self) -> str:
        """Return the name of the task with the newest record."""
        newest = max(self.records.iterdir(), key=lambda path: path.stat().st_mtime)
        return newest.name.partition("-")[0]

    def jobs(self, folder: Path) -> dict[str, StageJob]:
        """Return the training stages of a run by task."""
        graph, _ = build.build_graph(
            check(self.body(folder), "test"), Store(str(folder / "storage"))
        )
        return {
            stage.job.task.name: stage.job
            for stage in graph
            if isinstance(stage.job, StageJob) and stage.step == "train" and stage.job.task
        }


@pytest.fixture(autouse=True)
def find_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the module of the method importable on the nodes that a test starts."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[1]))


def make_stream(folder: Path, tasks: list[str]) -> Stream:
    small_run.make_card(folder, "digits", "0123456789", train=64, test=100)
    return Stream(folder, tasks)


def finish(process: Any, folder: Path) -> None:
    """Wait until a run has ended successfully."""
    process.join(1800)
    output = (folder / "out.txt").read_text()
    assert process.exitcode == 0, output
    assert "Traceback" not in output


def disturb(nodes: Nodes, stream: Stream, process: Any, draws: random.Random) -> list[Loss]:
    """Kill a node at a random step of each task that two ranks train, and add another one later."""
    losses: list[Loss] = []
    wait_for(lambda: any(stream.records.iterdir()), 200, process)
    task, moment = "", 0
    while process.is_alive() and len(losses) < TRIES:
        time.sleep(0.05)
        if stream.current_task() != task:
            task, moment = stream.current_task(), draws.randrange(STEPS * 9 // 10)
        steps = stream.steps(task)
        if steps and steps[-1].world == 2 and steps[-1].number >= moment:
            nodes.kill(draws.choice(nodes.nodes_running("TrainWorker")))
            killed = time.time()
            time.sleep(draws.uniform(0, 10))
            nodes.add(1)
            losses.append(Loss(task, killed, time.time()))
            moment = STEPS  # at most one loss in a task
    return losses


def contents(job: StageJob) -> tuple[Any, ...]:
    """Return the digests of the states that a stage has trained, and its history."""
    artifact = Artifact.need(job.root, job.key)
    digests = {
        name: entry["sha256"]
        for name, entry in artifact.manifest["files"].items()
        if name.endswith(".safetensors")
    }
    return digests, history(artifact)


def repeat(job: StageJob, segments: list[Segment], folder: Path) -> StageJob:
    """Train a stage again with the same numbers of ranks, without Ray, and return its job."""
    repeated = again(job, "repeated")
    for number, segment in enumerate(segments):
        later = segments[number + 1 :]
        stops = {repeated.key: later[0].start - segment.start} if later else {}
        on_ranks([repeated], segment.world, folder / f"{job.key}-{number}", stops)
    return repeated


def count_correct(folder: Path) -> tuple[int, int]:
    """Return the numbers of correctly classified and of all test images, over all tasks."""
    correct = total = 0
    for stage_id, result in small_run.results(folder / "storage").items():
        if stage_id.endswith("/evaluate"):
            row = result["rows"][-1]
            assert row["task"] == stage_id.split("/")[1]
            correct += row["correct"]
            total += row["total"]
    return correct, total


def test_elastic_results_depend_only_on_the_numbers_of_ranks(tmp_path: Path) -> None:
    """Nodes are killed at random steps, and others join at random times.

    At the end, the test prints the cost of the loss of a node.
    """
    stream = make_stream(tmp_path, TASKS)
    whole, disturbed = tmp_path / "whole", tmp_path / "disturbed"
    with nodes_up([1, 1]) as nodes:
        finish(stream.start(nodes, whole, min_workers=1), whole)
        expected = {f"t{pair}": stream.images(f"t{pair}") for pair in TASKS}
        process = stream.start(nodes, disturbed, min_workers=1)
        losses = disturb(nodes, stream, process, random.Random(MOMENTS))
        finish(process, disturbed)
    assert len(losses) == TRIES
    for task, images in expected.items():
        assert stream.images(task) == images
    jobs = stream.jobs(disturbed)
    num_lost: list[int] = []
    seconds: list[float] = []
    for loss in losses:
        segments = stream.segments(loss.task)
        repeated = repeat(jobs[loss.task], segments, tmp_path)
        assert contents(repeated) == contents(jobs[loss.task]), (loss, segments)
        if len(segments) > 1:  # otherwise the training ended before the kill
            first, second, *_ = segments
            assert first.world == 2
            made = [step for step in stream.steps(loss.task) if step.time < second.began]
            num_lost.append(made[-1].number + 1 - second.start)
            seconds.append(stream.resumed_after(loss.killed) - loss.killed)
    assert len(seconds) > TRIES / 2, "most nodes must be lost during a training"
    correct, total = count_correct(disturbed)
    assert abs(correct - count_correct(whole)[0]) <= total / 100
    print(
        f"\n{len(seconds)} nodes lost in the training: {sum(num_lost) / len(num_lost):.1f} steps "
        f"made again (at most {max(num_lost)} of {STEPS}), after {sum(seconds) / len(seconds):.0f} "
        f"s (at most {max(seconds):.0f})"
    )


def test_run_with_fixed_ranks_waits_for_a_new_node(tmp_path: Path) -> None:
    stream = make_stream(tmp_path, ["23"])
    whole, interrupted = tmp_path / "whole", tmp_path / "interrupted"
    with nodes_up([1, 1]) as nodes:
        finish(stream.start(nodes, whole), whole)
        process = stream.start(nodes, interrupted)

        def is_in_the_middle() -> bool:
            return any(step.number >= STEPS // 2 for step in stream.steps("t23"))

        wait_for(is_in_the_middle, 200, process)
        nodes.kill(nodes.nodes_running("TrainWorker")[0])
        time.sleep(10)
        assert process.is_alive(), (interrupted / "out.txt").read_text()
        nodes.add(1)
        finish(process, interrupted)
    assert {step.world for step in stream.steps("t23")} == {2}
    # Not the segments: the second group can continue without repeating a step.
    assert len([*stream.records.glob("t23-*.jsonl")]) == 4, "two ranks of each group"
    assert small_run.results(interrupted / "storage") == small_run.results(whole / "storage")
