"""Promises of the walk over the graph, stepped by hand: no cluster, no store, no clock."""

import itertools
import random
from typing import Any

import pytest

from pipeline.graph.retries import MAX_MOVES
from pipeline.graph.run import run_graph, stages_to_run
from pipeline.graph.stage import Graph, Stage
from pipeline.graph.store import Lookup
from pipeline.graph.walk import ENDED, Decision, DecisionKind, Event, EventKind, State, Walk
from workers.errors import UserError


def graph(edges: dict[str, tuple[str, ...]]) -> Graph:
    return Graph.of(
        "g",
        [
            Stage(i, "ingest" if i == "data" else "train", f"key-{i}", {}, parents)
            for i, parents in edges.items()
        ],
    )


CHAIN = {
    "data": (),
    "base": ("data",),
    "a": ("base",),
    "b": ("a",),
    "c": ("b",),
    "ea": ("a",),
    "eb": ("b",),
    "ec": ("c",),
    "report": ("ea", "eb", "ec"),
}
STAR = {
    "data": (),
    "base": ("data",),
    "a": ("base",),
    "b": ("base",),
    "c": ("base",),
    "report": ("a", "b", "c"),
}


def launches(walk: Walk) -> list[str]:
    return [d.stage for d in walk.decide() if d.kind is DecisionKind.LAUNCH]


def launch_all(walk: Walk) -> list[str]:
    decisions = walk.decide()
    for decision in decisions:
        walk.record(decision)
    return [d.stage for d in decisions if d.kind is DecisionKind.LAUNCH]


def reaction(walk: Walk, event: Event) -> DecisionKind:
    """The kind of the decision that an event calls for."""
    decision = walk.apply(event)
    assert decision is not None
    return decision.kind


def test_a_star_runs_side_by_side_and_a_chain_in_order() -> None:
    star = Walk.over(graph(STAR), ["data", "base"], 0)
    assert sorted(launches(star)) == ["a", "b", "c"]
    chain = Walk.over(graph(CHAIN), ["data", "base"], 0)
    assert launches(chain) == ["a"]


def test_what_has_most_work_behind_it_goes_first() -> None:
    walk = Walk.over(graph(CHAIN), ["data", "base", "a"], 0)
    assert launches(walk) == ["b", "ea"]


def test_nothing_is_launched_twice() -> None:
    walk = Walk.over(graph(STAR), [], 0)
    assert launch_all(walk) == ["data"]
    assert launch_all(walk) == []


def test_a_lost_stage_is_tried_again_as_often_as_allowed_and_then_fails_with_its_own_message() -> (
    None
):
    walk = Walk.over(graph(STAR), ["data"], 2)
    for attempt in range(3):
        assert launch_all(walk) == ["base"]
        expected = DecisionKind.RETRY if attempt < 2 else DecisionKind.FAIL
        assert reaction(walk, Event(EventKind.LOST, "base", "its workers died")) is expected
    assert walk.states["base"] is State.FAILED
    assert {d.kind for d in walk.decide()} == {DecisionKind.BLOCK}
    while not walk.ended:
        launch_all(walk)
    assert walk.count(State.BLOCKED) == 4
    assert walk.messages["base"] == "its workers died"


def test_a_stage_whose_node_is_lost_moves_and_has_used_no_try_unless_it_loses_node_after_node() -> (
    None
):
    walk = Walk.over(graph(STAR), ["data"], 0)
    for _ in range(MAX_MOVES):
        assert launch_all(walk) == ["base"]
        assert walk.apply(Event(EventKind.MOVED, "base", "node n was lost")) == Decision(
            DecisionKind.MOVE, "base", "node n was lost"
        )
    assert launch_all(walk) == ["base"]
    assert reaction(walk, Event(EventKind.MOVED, "base", "node n was lost")) is DecisionKind.FAIL


def test_an_error_that_cannot_pass_is_not_tried_again() -> None:
    walk = Walk.over(graph(STAR), ["data"], 5)
    launch_all(walk)
    event = Event(EventKind.FAILED, "base", "bad config", final=True)
    assert reaction(walk, event) is DecisionKind.FAIL


def test_a_failure_in_one_branch_leaves_the_others_running() -> None:
    walk = Walk.over(graph(STAR), ["data", "base"], 0)
    launch_all(walk)
    walk.apply(Event(EventKind.FAILED, "b", "boom", final=True))
    walk.apply(Event(EventKind.DONE, "a"))
    assert not walk.ended
    walk.apply(Event(EventKind.DONE, "c"))
    launch_all(walk)
    assert walk.ended
    assert walk.states["a"] is walk.states["c"] is State.DONE
    assert walk.states["report"] is State.BLOCKED


def test_damage_found_late_recomputes_the_stage_that_wrote_it() -> None:
    walk = Walk.over(graph(CHAIN), ["data", "base", "a"], 1)
    assert "b" in launch_all(walk)
    decision = walk.apply(Event(EventKind.DAMAGED, "b", "state is damaged", key="key-a"))
    assert decision == Decision(DecisionKind.RECOMPUTE, "a", "state is damaged")
    assert launch_all(walk) == ["a"]
    walk.apply(Event(EventKind.DONE, "a"))
    assert "b" in launch_all(walk)


@pytest.mark.parametrize("seed", range(50))
def test_every_walk_ends_whatever_happens_and_never_runs_a_stage_before_its_parents(
    seed: Any,
) -> None:
    rng = random.Random(seed)
    names = [f"s{i}" for i in range(12)]
    edges = {n: tuple(p for p in names[:i] if rng.random() < 0.25) for i, n in enumerate(names)}
    walk = Walk.over(graph(edges), [], 1)
    running: list[str] = []
    for _ in range(500):
        for stage in launch_all(walk):
            assert all(walk.states[p] in (State.DONE, State.REUSED) for p in edges[stage])
            running.append(stage)
        if not running:
            break
        stage = running.pop(rng.randrange(len(running)))
        walk.apply(
            rng.choice(
                [Event(EventKind.DONE, stage)] * 6
                + [
                    Event(EventKind.LOST, stage, "x"),
                    Event(EventKind.FAILED, stage, "y", final=True),
                ]
            )
        )
    assert walk.ended
    assert all(s in ENDED for s in walk.states.values())


def looked_over(walk: Walk) -> list[tuple[str, str]]:
    """What `decide` has to say, by a look at the whole graph."""
    states, blocked, ready = dict(walk.states), [], []
    busy = {s.key for s in walk.graph if states[s.id] is State.RUNNING}
    for stage in walk.graph:
        if states[stage.id] is not State.WAITING:
            continue
        if any(states[p] in (State.FAILED, State.BLOCKED) for p in stage.parents):
            states[stage.id] = State.BLOCKED
            blocked.append(("block", stage.id))
        elif (
            all(states[p] in (State.DONE, State.REUSED) for p in stage.parents)
            and stage.key not in busy
        ):
            busy.add(stage.key)
            ready.append(stage)
    depth: dict[str, int] = {}
    for stage in reversed(list(walk.graph)):
        depth[stage.id] = max(
            (depth[c.id] + 1 for c in walk.graph if stage.id in c.parents), default=0
        )
    return blocked + [("launch", s.id) for s in sorted(ready, key=lambda s: -depth[s.id])]


@pytest.mark.parametrize("seed", range(60))
def test_what_is_decided_from_changes_is_what_a_look_at_the_whole_graph_would_decide(
    seed: Any,
) -> None:
    """Losses, failures, damage found late, and stages that are the same work, in any order."""
    rng = random.Random(seed)
    names = [f"s{i}" for i in range(14)]
    stages = [
        Stage(
            n,
            "train",
            f"key-{rng.randrange(10)}",
            {},
            tuple(p for p in names[:i] if rng.random() < 0.2),
        )
        for i, n in enumerate(names)
    ]
    walk = Walk.over(Graph.of("g", stages), rng.sample(names, 2), 2)
    for _ in range(300):
        decisions = walk.decide()
        assert [(d.kind, d.stage) for d in decisions] == looked_over(walk)
        assert walk.decide() == decisions, "deciding changes nothing"
        for decision in decisions:
            walk.record(decision)
        running = [i for i, s in walk.states.items() if s is State.RUNNING]
        if not running:
            break
        stage = rng.choice(running)
        damaged = Event(
            EventKind.DAMAGED,
            stage,
            "z",
            key=walk.graph[rng.choice(walk.graph[stage].parents or (stage,))].key,
        )
        walk.apply(
            rng.choice(
                [
                    *[Event(EventKind.DONE, stage)] * 5,
                    Event(EventKind.LOST, stage, "x"),
                    damaged,
                    damaged,
                    Event(EventKind.FAILED, stage, "y", final=True),
                ]
            )
        )
        assert {s: walk.count(s) for s in State} == {
            s: [*walk.states.values()].count(s) for s in State
        }
    assert walk.ended


def look_up(edges: Any, hits: Any) -> Any:
    return {i: Lookup(i in hits, "") for i in edges}


def test_only_what_is_missing_and_waited_for_runs() -> None:
    assert stages_to_run(graph(CHAIN), look_up(CHAIN, [])) == set(CHAIN)
    assert stages_to_run(graph(CHAIN), look_up(CHAIN, list(CHAIN))) == set()
    assert stages_to_run(graph(CHAIN), look_up(CHAIN, ["data", "base", "a", "b", "ea", "eb"])) == {
        "c",
        "ec",
        "report",
    }


def test_data_that_is_gone_is_not_missed_when_nothing_waits_for_it() -> None:
    """The first task's raw data and shards may be deleted: what was learned from them stands."""
    assert stages_to_run(graph(CHAIN), look_up(CHAIN, [s for s in CHAIN if s != "data"])) == set()


def test_what_was_learned_is_a_result_of_its_own_and_missed_even_where_all_evaluations_stand() -> (
    None
):
    assert stages_to_run(graph(CHAIN), look_up(CHAIN, [s for s in CHAIN if s != "b"])) == {"b"}
    assert stages_to_run(
        graph(CHAIN), look_up(CHAIN, [s for s in CHAIN if s not in ("data", "base")])
    ) == {"data", "base"}


def test_a_circle_and_equal_names_are_refused_in_a_sentence() -> None:
    with pytest.raises(UserError, match="circle"):
        graph({"a": ("b",), "b": ("a",)})
    with pytest.raises(UserError, match="same id"):
        Graph.of("g", [Stage("a", "train", "k", {}), Stage("a", "train", "k2", {})])


def test_order_of_stages_given_does_not_matter() -> None:
    for order in itertools.islice(itertools.permutations(STAR.items()), 0, 700, 37):
        assert stages_to_run(graph(dict(order)), look_up(STAR, ["data", "base"])) == {
            "a",
            "b",
            "c",
            "report",
        }


def test_a_parent_that_is_named_twice_is_waited_for_once() -> None:
    walk = Walk.over(graph({"data": (), "a": ("data", "data")}), [], 0)
    launch_all(walk)
    walk.apply(Event(EventKind.DONE, "data"))
    assert launch_all(walk) == ["a"]


def test_two_readers_of_one_damaged_result_have_it_computed_once() -> None:
    walk = Walk.over(graph(STAR), ["data", "base"], 3)
    launch_all(walk)
    event = Event(EventKind.DAMAGED, "a", "base is damaged", key="key-base")
    assert reaction(walk, event) is DecisionKind.RECOMPUTE
    assert launch_all(walk) == ["base"]
    event = Event(EventKind.DAMAGED, "b", "base is damaged", key="key-base")
    assert reaction(walk, event) is DecisionKind.RETRY
    assert walk.states["base"] is State.RUNNING
    walk.apply(Event(EventKind.DONE, "base"))
    assert sorted(launch_all(walk)) == ["a", "b"]


def test_equal_work_under_two_names_is_done_by_one_of_them_at_a_time() -> None:
    twins = Graph.of(
        "g",
        [
            Stage("a", "train", "same", {}),
            Stage("b", "train", "same", {}),
            Stage("c", "train", "other", {}),
        ],
    )
    walk = Walk.over(twins, [], 0)
    first = launch_all(walk)
    assert len(first) == 2
    assert "c" in first
    walk.apply(Event(EventKind.DONE, next(s for s in first if s != "c")))
    assert len(launch_all(walk)) == 1


# ---- contents ------------------------------------------------------------------------------------
class Scripted:
    """Runs stages whose results say what they were made of; ends them in the order it is told."""

    def __init__(self, graph: Graph, contents: dict[str, str], order: list[str]) -> None:
        self.graph, self.contents, self.order = graph, contents, order
        self.results = {f"key-{i}": f"old {i}" for i in graph.stages}  # key -> content that stands
        self.running: dict[str, dict[str, str]] = {}
        self.ran: list[str] = []

    def submit(self, stage: Stage, depth: int) -> None:
        self.running[stage.id] = {f"key-{p}": self.results[f"key-{p}"] for p in stage.parents}

    def poll(self) -> list[Event]:
        ready = [i for i in self.order if i in self.running]
        if not ready:
            return []
        self.ran.append(ready[0])
        made_of, content = self.running.pop(ready[0]), self.contents.get(ready[0], "new")
        self.results[f"key-{ready[0]}"] = content
        return [Event(EventKind.DONE, ready[0], body={"content": content, "made_of": made_of})]

    def close(self) -> None:
        pass


class Withdrawn:
    """A store that notes what is withdrawn."""

    def __init__(self) -> None:
        self.keys: list[str] = []

    def withdraw(self, key: str) -> None:
        self.keys.append(key)


def walked(
    edges: dict[str, tuple[str, ...]], missing: set[str], contents: dict[str, str], order: list[str]
) -> tuple[list[str], list[str]]:
    """The stages that were run, in turn, and the keys that were withdrawn."""
    stages = graph(edges)
    lookups = {
        i: Lookup(
            i not in missing,
            "",
            {"content": f"old {i}", "made_of": {f"key-{p}": f"old {p}" for p in edges[i]}}
            if i not in missing
            else None,
        )
        for i in edges
    }
    executor, store = Scripted(stages, contents, order), Withdrawn()
    outcome = run_graph(stages, store, lambda todo: executor, 0, [], lookups, poll_s=0)  # type: ignore[arg-type]
    assert all(state in (State.DONE, State.REUSED) for state in outcome.states.values())
    return executor.ran, store.keys


EDGES = {"base": (), "a": ("base",), "b": ("a",), "ea": ("a",)}


def test_what_was_made_of_the_same_content_stands() -> None:
    assert walked(EDGES, {"base"}, {"base": "old base"}, ["base"]) == (["base"], [])


def test_what_was_made_of_another_content_is_run_again_as_far_as_it_differs() -> None:
    ran, withdrawn = walked(EDGES, {"base"}, {"a": "old a"}, ["base", "a"])
    assert (ran, withdrawn) == (["base", "a"], ["key-a"])
    ran, withdrawn = walked(EDGES, {"base"}, {}, ["base", "a", "b", "ea"])
    assert (ran, withdrawn) == (["base", "a", "b", "ea"], ["key-a", "key-b", "key-ea"])


@pytest.mark.parametrize("order", [["base", "a", "b"], ["base", "b", "a"], ["b", "base", "a"]])
def test_what_was_under_way_on_an_older_content_is_run_again(order: list[str]) -> None:
    """b runs beside base, from a's old state; then a is made again."""
    ran, _ = walked({"base": (), "a": ("base",), "b": ("a",)}, {"base", "b"}, {}, order)
    assert ran[-1] == "b"
    assert sorted(ran) in (["a", "b", "base"], ["a", "b", "b", "base"])
    assert ran.index("a") > ran.index("base")
