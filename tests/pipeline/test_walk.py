"""Tests of `Walk`, which decides which stages run, without cluster, store or clock."""

import itertools
import random
from typing import Any

import pytest

from pipeline.graph.retries import MAX_MOVES
from pipeline.graph.run import GraphRun, run_graph, stages_to_run
from pipeline.graph.stage import Graph, Stage
from pipeline.graph.store import Lookup
from pipeline.graph.walk import ENDED, Decision, DecisionKind, Event, EventKind, State, Walk
from workers.errors import UserError


def graph(edges: dict[str, tuple[str, ...]]) -> Graph:
    """Return a graph of training stages and the ingest stage `data`. edges: stage -> parents."""
    stages = []
    for stage_id, parents in edges.items():
        step = "ingest" if stage_id == "data" else "train"
        stages.append(Stage(stage_id, step, f"key-{stage_id}", {}, parents))
    return Graph.of("g", stages)


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
    """Return the stages that the walk decides to launch; they are not launched."""
    return [d.stage for d in walk.decide() if d.kind is DecisionKind.LAUNCH]


def launch_all(walk: Walk) -> list[str]:
    """Carry out every decision of the walk, and return the launched stages."""
    decisions = walk.decide()
    for decision in decisions:
        walk.record(decision)
    return [d.stage for d in decisions if d.kind is DecisionKind.LAUNCH]


def reaction(walk: Walk, event: Event) -> DecisionKind:
    """Apply an event, and return the kind of the decision that the walk takes."""
    decision = walk.apply(event)
    assert decision is not None
    return decision.kind


def test_star_runs_in_parallel_and_chain_in_order() -> None:
    star = Walk.over(graph(STAR), ["data", "base"], 0)
    assert sorted(launches(star)) == ["a", "b", "c"]
    chain = Walk.over(graph(CHAIN), ["data", "base"], 0)
    assert launches(chain) == ["a"]


def test_stage_with_the_longest_remaining_path_is_launched_first() -> None:
    walk = Walk.over(graph(CHAIN), ["data", "base", "a"], 0)
    assert launches(walk) == ["b", "ea"]


def test_a_running_stage_is_not_launched_again() -> None:
    walk = Walk.over(graph(STAR), [], 0)
    assert launch_all(walk) == ["data"]
    assert launch_all(walk) == []


def test_lost_stage_fails_after_allowed_retries() -> None:
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


def test_stage_on_lost_node_moves_until_limit() -> None:
    walk = Walk.over(graph(STAR), ["data"], 0)
    for _ in range(MAX_MOVES):
        assert launch_all(walk) == ["base"]
        assert walk.apply(Event(EventKind.MOVED, "base", "node n was lost")) == Decision(
            DecisionKind.MOVE, "base", "node n was lost"
        )
    assert launch_all(walk) == ["base"]
    assert reaction(walk, Event(EventKind.MOVED, "base", "node n was lost")) is DecisionKind.FAIL


def test_a_final_error_is_not_retried() -> None:
    walk = Walk.over(graph(STAR), ["data"], 5)
    launch_all(walk)
    event = Event(EventKind.FAILED, "base", "bad config", final=True)
    assert reaction(walk, event) is DecisionKind.FAIL
    assert walk.tries == {"base": 1}, "it counts as a failed try all the same"


def test_failure_in_one_branch_does_not_stop_other_branches() -> None:
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


def test_damaged_result_is_recomputed_by_its_stage() -> None:
    walk = Walk.over(graph(CHAIN), ["data", "base", "a"], 1)
    assert "b" in launch_all(walk)
    decision = walk.apply(Event(EventKind.DAMAGED, "b", "state is damaged", key="key-a"))
    assert decision == Decision(DecisionKind.RECOMPUTE, "a", "state is damaged")
    assert launch_all(walk) == ["a"]
    walk.apply(Event(EventKind.DONE, "a"))
    assert "b" in launch_all(walk)


@pytest.mark.parametrize("seed", range(50))
def test_every_walk_ends_and_runs_parents_first(
    seed: Any,
) -> None:
    rng = random.Random(seed)
    names = [f"s{i}" for i in range(12)]
    edges: dict[str, tuple[str, ...]] = {}
    for index, name in enumerate(names):
        edges[name] = tuple(parent for parent in names[:index] if rng.random() < 0.25)
    walk = Walk.over(graph(edges), [], 1)
    running: list[str] = []
    for _ in range(500):
        for stage in launch_all(walk):
            assert all(walk.states[p] in (State.DONE, State.REUSED) for p in edges[stage])
            running.append(stage)
        if not running:
            break
        stage = running.pop(rng.randrange(len(running)))
        done = Event(EventKind.DONE, stage)
        lost = Event(EventKind.LOST, stage, "x")
        failed = Event(EventKind.FAILED, stage, "y", final=True)
        walk.apply(rng.choice([done] * 6 + [lost, failed]))
    assert walk.ended
    assert all(s in ENDED for s in walk.states.values())


def decisions_from_scratch(walk: Walk) -> list[tuple[str, str]]:
    """Return (kind, stage) of the decisions that follow from the states of all stages.

    `Walk.decide` must take the same decisions from the changes only.
    """
    states = dict(walk.states)
    blocked = []
    ready = []
    busy_keys = {stage.key for stage in walk.graph if states[stage.id] is State.RUNNING}
    for stage in walk.graph:
        if states[stage.id] is not State.WAITING:
            continue
        parent_states = {states[parent] for parent in stage.parents}
        if parent_states & {State.FAILED, State.BLOCKED}:
            states[stage.id] = State.BLOCKED
            blocked.append(("block", stage.id))
        elif parent_states <= {State.DONE, State.REUSED} and stage.key not in busy_keys:
            busy_keys.add(stage.key)
            ready.append(stage)
    # Stage -> length of the longest path to a stage that depends on it.
    depth: dict[str, int] = {}
    for stage in reversed(list(walk.graph)):
        child_depths = [depth[child.id] for child in walk.graph if stage.id in child.parents]
        depth[stage.id] = 1 + max(child_depths, default=-1)
    ready.sort(key=lambda stage: -depth[stage.id])
    return blocked + [("launch", stage.id) for stage in ready]


@pytest.mark.parametrize("seed", range(60))
def test_incremental_decisions_equal_decisions_from_scratch(
    seed: Any,
) -> None:
    """Events include losses, failures and damaged results in any order; some stages share a key."""
    rng = random.Random(seed)
    names = [f"s{i}" for i in range(14)]
    stages = []
    for index, name in enumerate(names):
        key = f"key-{rng.randrange(10)}"
        parents = tuple(parent for parent in names[:index] if rng.random() < 0.2)
        stages.append(Stage(name, "train", key, {}, parents))
    walk = Walk.over(Graph.of("g", stages), rng.sample(names, 2), 2)
    for _ in range(300):
        decisions = walk.decide()
        assert [(d.kind, d.stage) for d in decisions] == decisions_from_scratch(walk)
        assert walk.decide() == decisions, "`decide` must change nothing"
        for decision in decisions:
            walk.record(decision)
        running = [i for i, s in walk.states.items() if s is State.RUNNING]
        if not running:
            break
        stage = rng.choice(running)
        damaged_stage = walk.graph[rng.choice(walk.graph[stage].parents or (stage,))]
        done = Event(EventKind.DONE, stage)
        lost = Event(EventKind.LOST, stage, "x")
        damaged = Event(EventKind.DAMAGED, stage, "z", key=damaged_stage.key)
        failed = Event(EventKind.FAILED, stage, "y", final=True)
        walk.apply(rng.choice([done] * 5 + [lost, damaged, damaged, failed]))
        states = list(walk.states.values())
        assert {state: walk.count(state) for state in State} == {
            state: states.count(state) for state in State
        }
    assert walk.ended


def look_up(edges: Any, hits: Any) -> Any:
    """Return stage -> whether the store has its result. hits: the stages with a stored result."""
    return {stage_id: Lookup(stage_id in hits, "") for stage_id in edges}


def test_only_missing_stages_and_their_missing_dependencies_run() -> None:
    assert stages_to_run(graph(CHAIN), look_up(CHAIN, [])) == set(CHAIN)
    assert stages_to_run(graph(CHAIN), look_up(CHAIN, list(CHAIN))) == set()
    assert stages_to_run(graph(CHAIN), look_up(CHAIN, ["data", "base", "a", "b", "ea", "eb"])) == {
        "c",
        "ec",
        "report",
    }


def test_missing_ingest_stage_runs_only_if_needed() -> None:
    """A task's raw data and shards may be deleted once the task is trained."""
    hits = set(CHAIN) - {"data"}
    assert stages_to_run(graph(CHAIN), look_up(CHAIN, hits)) == set()


def test_missing_training_stage_runs_although_its_evaluation_is_stored() -> None:
    hits = set(CHAIN) - {"b"}
    assert stages_to_run(graph(CHAIN), look_up(CHAIN, hits)) == {"b"}
    hits = set(CHAIN) - {"data", "base"}
    assert stages_to_run(graph(CHAIN), look_up(CHAIN, hits)) == {"data", "base"}


def test_cycles_and_duplicate_stage_ids_are_refused() -> None:
    with pytest.raises(UserError, match="circle"):
        graph({"a": ("b",), "b": ("a",)})
    with pytest.raises(UserError, match="same id"):
        Graph.of("g", [Stage("a", "train", "k", {}), Stage("a", "train", "k2", {})])


def test_the_order_in_which_stages_are_listed_does_not_matter() -> None:
    for order in itertools.islice(itertools.permutations(STAR.items()), 0, 700, 37):
        assert stages_to_run(graph(dict(order)), look_up(STAR, ["data", "base"])) == {
            "a",
            "b",
            "c",
            "report",
        }


def test_a_parent_that_is_listed_twice_counts_once() -> None:
    walk = Walk.over(graph({"data": (), "a": ("data", "data")}), [], 0)
    launch_all(walk)
    walk.apply(Event(EventKind.DONE, "data"))
    assert launch_all(walk) == ["a"]


def test_a_damaged_result_that_two_stages_report_is_recomputed_once() -> None:
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


def test_stages_with_equal_keys_never_run_concurrently() -> None:
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


# ---- recomputed results with other content -------------------------------------------------------
class ScriptedExecutor:
    """An executor that ends stages in a given order, with given contents.

    contents: stage -> its new result's content, "new" by default. order: the first running stage in
    this list ends at the next poll.
    """

    def __init__(self, graph: Graph, contents: dict[str, str], order: list[str]) -> None:
        self.graph = graph
        self.contents = contents
        self.order = order
        # Key -> content of the stored result.
        self.results = {f"key-{stage_id}": f"old {stage_id}" for stage_id in graph.stages}
        # Running stage -> {parent key: content of that result at the start}.
        self.running: dict[str, dict[str, str]] = {}
        self.ran: list[str] = []

    def submit(self, stage: Stage, depth: int) -> None:
        """Start a stage: read its parents' results."""
        parent_keys = [f"key-{parent}" for parent in stage.parents]
        self.running[stage.id] = {key: self.results[key] for key in parent_keys}

    def poll(self) -> list[Event]:
        """End one running stage, if any is in `order`, and return its event."""
        for stage_id in self.order:
            if stage_id in self.running:
                self.ran.append(stage_id)
                made_of = self.running.pop(stage_id)
                content = self.contents.get(stage_id, "new")
                self.results[f"key-{stage_id}"] = content
                body = {"content": content, "made_of": made_of}
                return [Event(EventKind.DONE, stage_id, body=body)]
        return []

    def close(self) -> None:
        """Do nothing."""


class WithdrawalRecorder:
    """A store that records the keys of withdrawn results."""

    def __init__(self) -> None:
        self.keys: list[str] = []

    def withdraw(self, key: str) -> None:
        """Record the key."""
        self.keys.append(key)


def run_scripted(
    edges: dict[str, tuple[str, ...]], missing: set[str], contents: dict[str, str], order: list[str]
) -> tuple[list[str], list[str]]:
    """Run a graph with `ScriptedExecutor`. missing: the stages without a stored result.

    Returns:
        The stages in the order in which they ended, and the keys of withdrawn results.
    """
    stages = graph(edges)
    lookups = {}
    for stage_id, parents in edges.items():
        manifest = None
        if stage_id not in missing:
            made_of = {f"key-{parent}": f"old {parent}" for parent in parents}
            manifest = {"content": f"old {stage_id}", "made_of": made_of}
        lookups[stage_id] = Lookup(stage_id not in missing, "", manifest)
    executor = ScriptedExecutor(stages, contents, order)
    store: Any = WithdrawalRecorder()
    outcome = run_graph(stages, store, lambda todo: executor, 0, [], lookups, poll_s=0)
    assert all(state in (State.DONE, State.REUSED) for state in outcome.states.values())
    return executor.ran, store.keys


def test_stages_that_failed_before_the_walk_count_as_failures() -> None:
    stages = graph({"data": (), "other": (), "a": ("data",), "b": ("other",)})
    stored = {"other"}
    lookups = {s.id: Lookup(s.id in stored, "", {} if s.id in stored else None) for s in stages}
    executor = ScriptedExecutor(stages, {}, ["b"])
    store: Any = WithdrawalRecorder()
    failed = {"data": "damaged"}
    outcome = run_graph(
        stages, store, lambda todo: executor, 0, [], lookups, poll_s=0, failed=failed
    )
    assert (executor.ran, outcome.failures) == (["b"], failed)
    assert (outcome.ran, outcome.reused, outcome.left_out) == (1, 1, frozenset())


EDGES = {"base": (), "a": ("base",), "b": ("a",), "ea": ("a",)}


def test_stage_is_reused_if_its_recomputed_parent_is_equal() -> None:
    assert run_scripted(EDGES, {"base"}, {"base": "old base"}, ["base"]) == (["base"], [])


def test_stage_runs_again_if_its_recomputed_parent_differs() -> None:
    ran, withdrawn = run_scripted(EDGES, {"base"}, {"a": "old a"}, ["base", "a"])
    assert (ran, withdrawn) == (["base", "a"], ["key-a"])
    ran, withdrawn = run_scripted(EDGES, {"base"}, {}, ["base", "a", "b", "ea"])
    assert (ran, withdrawn) == (["base", "a", "b", "ea"], ["key-a", "key-b", "key-ea"])


@pytest.mark.parametrize("order", [["base", "a", "b"], ["base", "b", "a"], ["b", "base", "a"]])
def test_stage_that_used_outdated_parent_content_runs_again(order: list[str]) -> None:
    """b runs in parallel to base, from a's old result; then a is computed again."""
    ran, _ = run_scripted({"base": (), "a": ("base",), "b": ("a",)}, {"base", "b"}, {}, order)
    assert ran[-1] == "b"
    assert sorted(ran) in (["a", "b", "base"], ["a", "b", "b", "base"])
    assert ran.index("a") > ran.index("base")


def test_running_child_is_not_relaunched_when_its_parent_changes() -> None:
    """Stage b runs, and the lookup found an outdated result of b.

    b must not be launched a second time while it runs.
    """
    stages = graph({"a": (), "b": ("a",)})
    outdated_manifest = {"content": "old b", "made_of": {"key-a": "old a"}}
    walk = Walk.over(stages, [], 0)
    store: Any = WithdrawalRecorder()
    run = GraphRun(store, walk, [], {"a": None, "b": outdated_manifest}, {})
    launched: list[str] = []
    polls = [
        Event(EventKind.DONE, "a", body={"content": "new a"}),
        Event(EventKind.DONE, "a", body={"content": "newer a"}),  # computed again meanwhile
        Event(EventKind.DONE, "b", body={"content": "b", "made_of": {"key-a": "newer a"}}),
    ]

    class Executor:
        def submit(self, stage: Stage, depth: int) -> None:
            launched.append(stage.id)

        def poll(self) -> list[Event]:
            return [polls.pop(0)]

        def close(self) -> None:
            """Do nothing."""

    run.run_to_end(Executor(), poll_s=0)
    assert launched == ["a", "b"]
    assert store.keys == []
