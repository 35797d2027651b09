"""Tests of `cluster.stages`: resources and a time limit for each kind of stage.

An attempt that takes too long is stopped and counted, and one sentence names stage, limit and
remedy.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_config import config

from pipeline.config.settings import ClusterSettings, dump
from pipeline.data import in_place, ingest
from pipeline.graph.stage import Graph, IngestJob, Stage
from pipeline.graph.store import Store
from pipeline.graph.walk import DecisionKind, Event, EventKind, Walk
from pipeline.launch import local
from pipeline.launch.groups import RayMap
from pipeline.launch.limits import Deadline, StageTimeout
from pipeline.launch.local import LocalExecutor
from pipeline.launch.pools import Pools, subtract_workers
from pipeline.launch.queue import STRIDE, ReadyStage
from tests import small_run
from tests.pipeline.nodes import nodes_of
from workers import preemption
from workers.errors import UserError
from workers.job import StageJob


class Clock:
    """A clock that shows `now` in seconds; only tests change it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def limited(**stages: dict[str, Any]) -> ClusterSettings:
    """Return cluster settings with limits by kind of stage."""
    return ClusterSettings.model_validate({"workers": 1, "stages": stages})


# ---- the settings --------------------------------------------------------------------------------
def test_stage_kind_limits_override_common_limits() -> None:
    cluster = limited(evaluate={"gpus": 0, "cpus": 4}, train={"timeout_s": 60})
    cluster = cluster.model_copy(update={"gpus_per_worker": 1.0, "memory_gb_per_worker": 8.0})
    evaluate = cluster.of_step("evaluate")
    assert (evaluate.gpus_per_worker, evaluate.cpus_per_worker) == (0, 4)
    assert evaluate.memory_gb_per_worker == 8
    assert cluster.of_step("train").gpus_per_worker == 1
    assert cluster.time_limit("train") == 60
    assert cluster.time_limit("evaluate") is None


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("trian.timeout_s=5", "cluster.stages.trian is not a kind of stage .* mean 'train'"),
        (
            "sleep.cpus=1",
            "cluster.stages.sleep is not a kind .*there are: ingest, backbone, features, train",
        ),
        ("report.timeout_s=5", "cluster.stages .* the report is made by the driver itself"),
        ("ingest.gpus=1", "cluster.stages .* ingest runs without a GPU"),
        ("train.timeout_s=-1", r"cluster.stages.train.timeout_s is -1: .* or equal to 0"),
        ("train.timeout=5", "cluster.stages.train.timeout is not .* mean 'timeout_s'"),
        ("train.cpus=0", "cluster.stages.train.cpus is 0: .*greater than 0"),
    ],
)
def test_invalid_limit_is_refused_in_one_sentence(setting: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as error:
        config(f"cluster.stages.{setting}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["ingest", "backbone", "train", "evaluate", "herd", "prune"])
def test_every_stage_kind_can_have_a_time_limit(kind: str) -> None:
    assert config(f"cluster.stages.{kind}.timeout_s=5").cluster.time_limit(kind) == 5


def test_dumped_config_without_limits_has_no_stages_entry() -> None:
    assert "stages" not in dump(config())["cluster"]


# ---- stages in this process ----------------------------------------------------------------------
def test_deadline_raises_after_its_time_limit() -> None:
    clock = Clock()
    deadline = Deadline(limited(train={"timeout_s": 60}), "train", clock)
    clock.now = 59.0
    deadline.check()
    assert deadline.left_s == 1
    clock.now = 61.0
    assert deadline.left_s == 0
    with pytest.raises(StageTimeout, match=r"'train' took longer than 60 s .*timeout_s=120, or"):
        deadline.check()
    unlimited = Deadline(limited(), "train", clock)
    clock.now = 1e9
    unlimited.check()
    assert unlimited.left_s is None


def executor_of(cluster: ClusterSettings, folder: Path, clock: Clock) -> LocalExecutor:
    """Return an executor that runs stages in this process."""
    return LocalExecutor(
        Store(str(folder)), cluster, lambda stage: {}, lambda event: None, clock=clock
    )


def test_executor_that_cannot_start_handles_no_signals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(cluster: ClusterSettings) -> None:
        raise UserError("this machine has no GPU")

    monkeypatch.setattr(local, "check_local_gpus", refuse)
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(UserError):
        executor_of(ClusterSettings(workers=0), tmp_path, Clock())
    assert signal.getsignal(signal.SIGTERM) is handler


def get_stage(step: str, job: Any) -> Stage:
    """Return a stage of this kind."""
    return Stage(f"meat/a/{step}", step, "k" * 32, {}, (), job=job)


def training(clock: Clock, seconds: float, devices: list[str]) -> Callable[..., dict[str, Any]]:
    """Return a stand-in for `run_stage` that reports every second and records its device."""

    def run_stage(job: Any, group: Any, report: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        devices.append(str(group.device))
        for _ in range(int(seconds)):
            clock.now += 1
            report({})
        return {"kind": "train"}

    return run_stage


def test_local_stage_ends_at_time_limit_and_retries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(local, "run_stage", training(clock, 100, []))
    executor = executor_of(limited(train={"timeout_s": 10}), tmp_path, clock)
    stage = get_stage("train", SimpleNamespace(spec=StageJob))
    executor.submit(stage, 0)
    [event] = executor.poll()
    executor.close()
    assert clock.now == 10
    assert (event.kind, event.final) == (EventKind.FAILED, False)
    assert "--set cluster.stages.train.timeout_s=20" in event.message
    assert not (tmp_path / "failures").exists(), "a timeout writes no traceback"


def test_a_task_is_evaluated_before_the_next_one_is_trained(tmp_path: Path) -> None:
    """The next training has a longer path of descendants, but accuracies should be shown early."""
    executor = executor_of(limited(), tmp_path, Clock())
    for step, depth in (("train", 3), ("evaluate", 1), ("herd", 5)):
        executor.submit(get_stage(step, None), depth)
    executor.close()
    ended = [executor.poll()[0].stage for _ in range(3)]
    assert ended == ["meat/a/evaluate", "meat/a/herd", "meat/a/train"]


def test_timed_out_stage_is_retried_and_then_fails() -> None:
    stage = get_stage("train", None)
    walk = Walk.over(Graph.of("g", [stage]), [], retries=1)
    late = Event(EventKind.FAILED, stage.id, "took longer")
    kinds = []
    for _ in range(2):
        walk.record(walk.decide()[0])
        decision = walk.apply(late)
        assert decision is not None
        kinds.append(decision.kind)
    assert kinds == [DecisionKind.RETRY, DecisionKind.FAIL]


def test_local_stage_within_its_time_limit_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(local, "run_stage", training(clock, 9, []))
    executor = executor_of(limited(train={"timeout_s": 10}), tmp_path, clock)
    for _ in range(2):
        executor.submit(get_stage("train", SimpleNamespace()), 0)
        assert executor.poll()[0].kind is EventKind.DONE
    executor.close()


def test_thread_count_follows_the_stage_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    devices: list[str] = []
    monkeypatch.setattr(local, "run_stage", training(Clock(), 0, devices))
    executor = executor_of(limited(evaluate={"cpus": 3}), tmp_path, Clock())
    for step in ("train", "evaluate"):
        executor.submit(get_stage(step, SimpleNamespace()), 0)
        executor.poll()
    executor.close()
    assert threads == [1, 3]
    assert devices == ["cpu", "cpu"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="it needs a machine without a GPU")
def test_missing_gpu_is_named_with_stage_kind(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cluster\.stages\.train\.gpus is 1\.0, but this machine"):
        executor_of(limited(train={"gpus": 1}), tmp_path, Clock())
    executor_of(limited(train={"gpus": 0}), tmp_path, Clock()).close()


def test_local_ingest_times_out_at_its_next_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    written: list[int] = []

    def slow_ingest(
        card: Any, root: str, key: str, map_fn: Any, labels: Any, report: Any, previous: str
    ) -> Any:
        for number in range(100):
            clock.now += 1
            report({"doing": "reading", "images": number})
            written.append(number)

    monkeypatch.setattr(ingest, "ingest", slow_ingest)
    monkeypatch.setattr(in_place, "get_shard_urls", lambda card: None)
    executor = executor_of(limited(ingest={"timeout_s": 5}), tmp_path, clock)
    job: Any = object.__new__(IngestJob)
    object.__setattr__(job, "card", SimpleNamespace())
    executor.submit(get_stage("ingest", job), 0)
    [event] = executor.poll()
    executor.close()
    assert event.kind is EventKind.FAILED
    assert "cluster.stages.ingest.timeout_s" in event.message
    assert len(written) == 4


# ---- ingest in Ray tasks -------------------------------------------------------------------------
class SlowRay:
    """A fake of the module `ray` with tasks that never end."""

    class exceptions:
        class GetTimeoutError(Exception):
            pass

        class RayTaskError(Exception):
            pass

    def __init__(self) -> None:
        self.cancelled: list[int] = []

    def remote(self, **options: Any) -> Callable[[Any], Any]:
        """Return a decorator that returns an object with a method `remote`, the identity."""
        return lambda function: SimpleNamespace(remote=lambda item: item)

    def get(self, task: int, timeout: float | None) -> Any:
        """Wait until the timeout, and raise GetTimeoutError."""
        time.sleep(60 if timeout is None else timeout)
        raise self.exceptions.GetTimeoutError

    def cancel(self, task: int, force: bool) -> None:
        """Record that a task was cancelled."""
        self.cancelled.append(task)

    def is_initialized(self) -> bool:
        """Return True, so that tasks can be cancelled."""
        return True


def test_ingest_tasks_end_at_deadline_and_free_slots() -> None:
    ray = SlowRay()
    ray_map = RayMap(ray, limit=2)
    deadline = Deadline(limited(ingest={"timeout_s": 0.05}), "ingest")
    with pytest.raises(StageTimeout, match=r"'ingest' took longer than 0\.05 s"):
        list(ray_map(str, range(5), deadline))
    assert ray.cancelled == [0, 1]
    assert ray_map.free.acquire(blocking=False)


def test_ingest_waiting_for_slots_keeps_its_deadline() -> None:
    ray_map = RayMap(SlowRay(), limit=1)
    assert ray_map.free.acquire()
    deadline = Deadline(limited(ingest={"timeout_s": 0.05}), "ingest")
    with pytest.raises(StageTimeout):
        list(ray_map(str, range(5), deadline))


def test_ingest_without_a_deadline_ends_when_its_executor_is_closed() -> None:
    """One thread waits for its task, and two wait for the slot."""
    ray = SlowRay()
    ray_map = RayMap(ray, limit=1)
    deadline = Deadline(limited(), "ingest")
    with ThreadPoolExecutor(3) as threads:
        users = [threads.submit(list, ray_map(str, range(5), deadline)) for _ in range(3)]
        while ray_map.free.acquire(blocking=False):  # until one thread has the slot
            ray_map.free.release()
            time.sleep(0.01)
        ray_map.close()
        for user in users:
            with pytest.raises(preemption.Preempted):
                user.result(timeout=20)
    assert ray.cancelled == [0]
    assert ray_map.free.acquire(blocking=False)


# ---- pools of worker groups ----------------------------------------------------------------------
GPU_NODE = {"CPU": 8.0, "GPU": 2.0}


def ready(name: str, depth: int, pool: int) -> ReadyStage:
    """Return a stage ready for a group of this pool."""
    return ReadyStage(depth, Stage(name, "train", name, {}, ()), pool)


def test_stage_kinds_with_equal_resources_share_a_pool() -> None:
    pools = Pools(
        limited(
            train={"timeout_s": 9},
            evaluate={"cpus": 2},
            herd={"cpus": 2},
            ingest={"cpus": 4},
            prune={"cpus": 1},
        )
    )
    assert len(pools.pools) == 2
    steps = ("train", "backbone", "evaluate", "herd", "prune")
    assert [pools.of_step(step) for step in steps] == [0, 0, 1, 1, 0]
    assert pools.describe_group(3) == "group 3"
    assert pools.describe_group(STRIDE + 1) == "group 1 for evaluate, herd"


def test_pool_with_deepest_stages_gets_room_first() -> None:
    cluster = limited(evaluate={"gpus": 0, "cpus": 3}).model_copy(update={"gpus_per_worker": 1.0})
    pools = Pools(cluster)
    state = nodes_of([GPU_NODE])
    stages = [ready("a", 5, 0), ready("b", 5, 0), ready("c", 5, 0)]
    stages += [ready("x", 1, 1), ready("y", 1, 1), ready("z", 1, 1)]
    sizes = pools.sizes(state, "01-a", 9, stages, {})
    assert sizes == {0: 1, 1: 1, STRIDE: 1, STRIDE + 1: 1}, "2 GPUs; 6 CPUs are left for evaluate"


def test_idle_group_makes_room_for_other_pool() -> None:
    pools = Pools(limited(evaluate={"cpus": 2}))
    groups = {0: 1, 1: 1}
    waiting = [ready("x", 1, 1)]
    assert pools.sizes(nodes_of([{"CPU": 2.0}]), "01-a", 9, waiting, groups) == {STRIDE: 1}
    assert pools.sizes(nodes_of([{"CPU": 3.0}]), "01-a", 9, waiting, groups) == {STRIDE: 1, 0: 1}
    assert pools.sizes(nodes_of([{"CPU": 4.0}]), "01-a", 9, waiting, groups) == {
        STRIDE: 1,
        **groups,
    }


def test_single_pool_gets_all_groups_of_the_cluster() -> None:
    pools = Pools(limited(train={"timeout_s": 9}))
    state = nodes_of([{"CPU": 3.0}])
    assert pools.sizes(state, "01-a", 9, [], {}) == {0: 1, 1: 1, 2: 1}


def test_unavailable_resources_are_refused_in_one_sentence() -> None:
    pools = Pools(limited(evaluate={"cpus": 16}))
    pools.check_fit(0, nodes_of([GPU_NODE]))
    with pytest.raises(UserError) as error:
        pools.check_fit(1, nodes_of([GPU_NODE]))
    assert str(error.value).startswith(
        "this cluster (8 CPUs) has no room for 1 worker for stages of kind evaluate with 16 CPUs "
        "each; lower cluster.workers or the resources of each (cluster.stages.evaluate), add nodes"
    )


def test_workers_are_subtracted_only_from_staying_nodes() -> None:
    state = nodes_of([{"CPU": 2.0}, {"CPU": 2.0}, {"CPU": 2.0}], lost=[0], leaving=[1])
    room = subtract_workers(state, limited(), 5)
    assert [node.resources["CPU"] for node in room.nodes.values()] == [2, 2, 0]


# ---- on Ray --------------------------------------------------------------------------------------
@pytest.mark.slow
def test_ray_run_stops_at_time_limit_and_next_run_succeeds(tmp_path: Path) -> None:
    """The first run trains without end; evaluation runs on workers of another size."""
    stages = {"train": {"timeout_s": 6}, "evaluate": {"cpus": 2}}
    cluster = {"workers": 1, "groups": 1, "address": "local", "retries": 1, "stages": stages}
    cards = small_run.make_cards(tmp_path, ["a"])
    body = small_run.make_body(tmp_path, cards, ["finetune"], cluster=cluster)
    path = small_run.write_config(tmp_path / "c.yaml", body)
    out = tmp_path / "out.txt"
    endless = small_run.start(["run", path, "--set", "train.epochs=100000"], out)
    endless.join(900)  # a busy machine takes minutes to start groups
    text = out.read_text()
    assert endless.exitcode == 2, text
    assert text.count("'train' took longer than 6 s") == 3, "once for each try, once at the end"
    assert "tried again from its last checkpoint (try 2 of 2)" in text
    assert "resume with: " in text
    assert "Traceback" not in text
    text = small_run.run(["run", path], out)
    assert "finetune/a/train: trained" in text
    assert "finetune/a/evaluate: a " in text
