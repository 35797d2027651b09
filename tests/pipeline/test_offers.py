"""Promises of the queue between driver and worker groups, stepped by hand."""

from pipeline.graph import Stage
from pipeline.offers import Offer, Queue, take
from pipeline.run import Event


def stage(name: str, *parents: str) -> Stage:
    return Stage(name, "train", f"key-{name}", {}, parents)


def test_the_deepest_stage_goes_first_and_a_chain_keeps_its_group():
    a, b, child = stage("a"), stage("b"), stage("child", "last")
    assert take([Offer(1, a), Offer(3, b), Offer(2, child)]) is b
    assert take([Offer(2, a), Offer(2, child)], stage("last")) is child


def test_each_stage_is_given_to_one_group():
    queue = Queue()
    queue.offer([Offer(0, stage("a")), Offer(0, stage("b"))])
    assert {queue.next(0).id, queue.next(1).id} == {"a", "b"}
    assert queue.next(2) is None


def test_a_group_that_asks_again_has_lost_what_it_held():
    queue = Queue()
    queue.offer([Offer(0, stage("a"))])
    queue.next(0)
    assert queue.next(0) is None
    events, _ = queue.offer([])
    assert [(e.kind, e.stage) for e in events] == [("lost", "a")]


def test_what_ended_is_not_lost():
    queue = Queue()
    queue.offer([Offer(0, stage("a"))])
    queue.next(0)
    queue.post(0, Event("done", "a"))
    queue.next(0)
    events, _ = queue.offer([])
    assert [e.kind for e in events] == ["done"]


def test_of_several_ranks_that_fail_together_one_is_heard():
    queue = Queue()
    queue.offer([Offer(0, stage("a"))])
    queue.next(0)
    queue.post(0, Event("progress", "a"))
    queue.post(0, Event("failed", "a", "rank 1"))
    queue.post(0, Event("failed", "a", "rank 0"))
    events, _ = queue.offer([])
    assert [(e.kind, e.message) for e in events] == [("progress", ""), ("failed", "rank 1")]


def test_a_group_that_is_gone_gives_back_its_stage_and_counts_as_not_up():
    queue = Queue()
    queue.offer([Offer(0, stage("a"))])
    queue.next(4)
    assert queue.offer([])[1] == [4]
    queue.abandon(4, "node lost")
    events, asked = queue.offer([])
    assert [(e.kind, e.message) for e in events] == [("lost", "node lost")]
    assert asked == []


def test_a_closed_queue_stops_every_group():
    queue = Queue()
    queue.offer([Offer(0, stage("a"))])
    queue.close()
    assert queue.next(0) == "stop"
