"""Tests of `Queue`, which hands ready stages to worker groups and their events to the driver."""

import random
from typing import Any

import pytest

from pipeline.graph.stage import Stage
from pipeline.graph.walk import Event, EventKind
from pipeline.launch.queue import STRIDE, Queue, QueueNews, Rank, ReadyQueue, ReadyStage


def stage(name: str, *parents: str) -> Stage:
    """Return a training stage with these parents."""
    return Stage(name, "train", f"key-{name}", {}, parents)


def take(queue: Queue, group: int) -> Stage:
    """Return the next stage of a group, and check that there is one."""
    taken = queue.next_stage(group)
    assert isinstance(taken, Stage)
    return taken


def taken_id(queue: Queue, group: int) -> str:
    """Return the id of the next stage of a group."""
    return take(queue, group).id


def news_of(queue: Queue) -> QueueNews:
    """Return the news since the last call, without `started` events."""
    events, rank_nodes = queue.offer([])
    ends = [event for event in events if event.kind is not EventKind.STARTED]
    return QueueNews(ends, rank_nodes)


def test_deepest_stage_is_taken_first_then_child_of_last_stage() -> None:
    a = stage("a")
    b = stage("b")
    child = stage("child", "last")
    by_depth = ReadyQueue()
    for ready in (ReadyStage(1, a), ReadyStage(3, b), ReadyStage(2, child)):
        by_depth.append(ready)
    assert by_depth.take() is b
    equal = ReadyQueue()
    equal.append(ReadyStage(2, a))
    equal.append(ReadyStage(2, child))
    assert equal.take(stage("last")) is child


def test_each_stage_is_given_to_one_group() -> None:
    queue = Queue()
    queue.offer([ReadyStage(0, stage("a")), ReadyStage(0, stage("b"))])
    assert {taken_id(queue, 0), taken_id(queue, 1)} == {"a", "b"}
    assert queue.next_stage(2) is None


def test_group_asking_early_has_lost_its_stage() -> None:
    queue = Queue()
    queue.offer([ReadyStage(0, stage("a"))])
    queue.next_stage(0)
    assert queue.next_stage(0) is None
    events, _ = news_of(queue)
    assert [(e.kind, e.stage) for e in events] == [("lost", "a")]


def test_finished_stage_is_not_reported_lost() -> None:
    queue = Queue()
    queue.offer([ReadyStage(0, stage("a"))])
    queue.next_stage(0)
    queue.post(0, Event(EventKind.DONE, "a"))
    queue.next_stage(0)
    events, _ = news_of(queue)
    assert [e.kind for e in events] == ["done"]


def test_first_failure_report_of_several_ranks_counts() -> None:
    queue = Queue()
    queue.offer([ReadyStage(0, stage("a"))])
    queue.next_stage(0)
    queue.post(0, Event(EventKind.PROGRESS, "a"))
    queue.post(0, Event(EventKind.FAILED, "a", "rank 1"))
    queue.post(0, Event(EventKind.FAILED, "a", "rank 0"))
    events, _ = news_of(queue)
    assert [(e.kind, e.message) for e in events] == [("progress", ""), ("failed", "rank 1")]


def test_abandoned_group_loses_stage_and_is_down() -> None:
    queue = Queue()
    queue.offer([ReadyStage(0, stage("a"))])
    queue.join(4, [Rank("node-1")])
    queue.next_stage(4)
    assert news_of(queue)[1] == {4: ["node-1"]}
    queue.abandon(4, "node lost", True)
    events, up = news_of(queue)
    assert [(e.kind, e.message, e.body) for e in events] == [
        ("lost", "node lost", {"nodes": ["node-1"], "moved": True})
    ]
    assert up == {}


def test_rejoining_group_has_lost_its_stage() -> None:
    queue = Queue()
    queue.offer([ReadyStage(0, stage("a"))])
    queue.join(0, [Rank("node-1"), Rank("node-2")])
    queue.next_stage(0)
    queue.join(0, [Rank("node-2"), Rank("node-3")])
    events, up = news_of(queue)
    assert [(e.kind, e.body) for e in events] == [
        ("lost", {"nodes": ["node-1", "node-2"], "moved": False})
    ]
    assert up == {0: ["node-2", "node-3"]}


def test_a_dismissed_group_stops_after_its_stage_or_at_once() -> None:
    queue = Queue()
    queue.offer([ReadyStage(0, stage(name)) for name in "abc"])
    first = take(queue, 0)
    second = take(queue, 1)
    queue.dismiss([0], at_once=False)
    queue.dismiss([1], at_once=True)
    queue.dismiss([1], at_once=False)
    assert queue.post(0, Event(EventKind.PROGRESS, first.id)) is False
    assert queue.post(1, Event(EventKind.PROGRESS, second.id)) is True, (
        "the first dismissal must hold"
    )
    queue.post(0, Event(EventKind.DONE, first.id))
    queue.post(1, Event(EventKind.MOVED, second.id))
    assert queue.next_stage(0) == queue.next_stage(1) == "stop"
    queue.abandon(1, "")
    assert queue.next_stage(1) is None, "workers of an abandoned group get no stage"
    queue.join(1, [Rank("node-1")])
    assert taken_id(queue, 1) == "c", "a group that joins again is not dismissed"


def test_events_of_a_stage_taken_from_a_group_are_ignored() -> None:
    queue = Queue()
    queue.offer([ReadyStage(1, stage("a")), ReadyStage(0, stage("b"))])
    queue.next_stage(0)
    queue.abandon(0, "given up")
    queue.join(0, [Rank("node-1")])
    assert taken_id(queue, 0) == "b"
    for kind in (EventKind.DONE, EventKind.LOST, EventKind.FAILED):
        queue.post(0, Event(kind, "a"))
    queue.post(0, Event(EventKind.DONE, "b"))
    assert [(e.kind, e.stage) for e in news_of(queue)[0]] == [("lost", "a"), ("done", "b")]


def test_stage_reported_lost_by_several_ranks_counts_once() -> None:
    queue = Queue()
    queue.offer([ReadyStage(0, stage("a"))])
    queue.join(0, [Rank("node-1"), Rank("node-2")])
    queue.next_stage(0)
    queue.post(0, Event(EventKind.LOST, "a", "a worker of its group is gone"))
    queue.post(0, Event(EventKind.LOST, "a", "a worker of its group is gone"))
    assert [(e.kind, e.body["nodes"]) for e in news_of(queue)[0]] == [
        ("lost", ["node-1", "node-2"])
    ]


def test_a_closed_queue_stops_every_group() -> None:
    queue = Queue()
    queue.offer([ReadyStage(0, stage("a"))])
    queue.close()
    assert queue.next_stage(0) == "stop"


def idle_after(queue: Queue, *groups: tuple[int, str]) -> None:
    """Let each group finish its stage, and then ask for another one while none is ready."""
    for group, name in groups:
        queue.offer([ReadyStage(0, stage(name))])
        assert taken_id(queue, group) == name
        queue.post(group, Event(EventKind.DONE, name))
    assert not any(queue.next_stage(group) for group, _ in groups)


def test_child_stage_is_reserved_for_idle_group_of_its_parent() -> None:
    queue = Queue()
    idle_after(queue, (0, "a"), (1, "b"))
    queue.offer([ReadyStage(2, stage("after-a", "a")), ReadyStage(1, stage("evaluate-a", "a"))])
    assert taken_id(queue, 1) == "evaluate-a"
    assert taken_id(queue, 0) == "after-a"


def test_reserved_stage_goes_elsewhere_if_its_group_stops_asking() -> None:
    queue = Queue()
    idle_after(queue, (0, "a"), (1, "b"))
    queue.offer([ReadyStage(2, stage("after-a", "a"))])
    taken = [queue.next_stage(1) for _ in range(6)]
    assert taken[0] is None
    assert [t.id for t in taken if isinstance(t, Stage)] == ["after-a"]


def test_reserved_stage_is_released_at_once_if_group_is_abandoned() -> None:
    queue = Queue()
    idle_after(queue, (0, "a"), (1, "b"))
    queue.offer([ReadyStage(2, stage("after-a", "a"))])
    queue.abandon(0, "node lost")
    assert taken_id(queue, 1) == "after-a"


@pytest.mark.parametrize("seed", range(20))
def test_ready_queue_order_matches_exhaustive_search(seed: Any) -> None:
    rng = random.Random(seed)
    queue = ReadyQueue()
    ready_stages: list[ReadyStage] = []
    last: Stage | None = None

    def priority(ready: ReadyStage) -> tuple[int, bool]:
        is_child_of_last = last is not None and last.id in ready.stage.parents
        return ready.depth, is_child_of_last

    for number in range(200):
        if ready_stages and rng.random() < 0.5:
            best = max(ready_stages, key=priority)
            ready_stages.remove(best)
            last = queue.take(last)
            assert last is best.stage
        else:
            depth = rng.randrange(3)
            parents: list[str] = []
            if number:
                parents = [f"s{rng.randrange(number)}" for _ in range(3)]
            ready_stages.append(ReadyStage(depth, stage(f"s{number}", *parents)))
            queue.append(ready_stages[-1])
        assert len(queue) == len(ready_stages)


def test_group_takes_only_stages_of_its_pool() -> None:
    queue = Queue()
    queue.offer([ReadyStage(0, stage("a")), ReadyStage(9, stage("e"), pool=1)])
    assert taken_id(queue, 3) == "a"
    assert queue.next_stage(4) is None
    assert taken_id(queue, STRIDE) == "e"


def test_timed_out_stage_fails_and_its_group_is_abandoned() -> None:
    seconds = iter([10.0, 25.0])
    queue = Queue(clock=lambda: next(seconds))
    queue.offer([ReadyStage(0, stage("a"))])
    queue.join(0, [Rank("node")])
    queue.next_stage(0)
    running = queue.list_running_stages()
    assert (running[0].stage.id, running[0].seconds) == ("a", 15.0)
    assert not queue.time_out(0, "b", "late"), "the group runs another stage"
    assert queue.time_out(0, "a", "late")
    assert not queue.time_out(0, "a", "late")
    events, rank_nodes = news_of(queue)
    assert [(e.kind, e.stage, e.message) for e in events] == [("failed", "a", "late")]
    assert rank_nodes == {}
    assert queue.next_stage(0) is None, "remaining workers of the group must get no stage"


def test_taken_stage_posts_started_event_with_nodes_and_gpus() -> None:
    """The `started` event precedes the `done` event, even for a very short stage."""
    queue = Queue()
    queue.offer([ReadyStage(0, stage("a"))])
    queue.join(2, [Rank("node-1", "3"), Rank("node-2")])
    queue.next_stage(2)
    queue.post(2, Event(EventKind.CHECKPOINT, "a", body={"epoch": 1, "step": 0}))
    queue.post(2, Event(EventKind.DONE, "a"))
    started, saved, done = queue.offer([]).events
    assert (started.kind, started.stage) == ("started", "a")
    assert started.body == {"group": 2, "nodes": ["node-1", "node-2"], "gpus": ["3"]}
    assert (saved.kind, done.kind) == ("checkpoint", "done")
