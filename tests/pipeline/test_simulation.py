"""Tests of the scheduler on simulated clusters, with the real graph, walk and queue.

See tests/simulation.py.
"""

import gc
import tracemalloc
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pipeline.graph.run import Outcome, look_up_all, run_graph
from pipeline.graph.stage import Graph
from pipeline.graph.walk import State, Walk
from tests import simulation
from tests.simulation import Cluster, FailureModel, Span

SHAPES = {
    1_000: (10, 20, 20, 5),
    10_000: (50, 40, 40, 10),
}  # stages -> numbers of tasks, stars, chains, and chains with three steps per task
NODES_FAIL = FailureModel(life_s=3600, failing=0.02)
RETRIES = 6


def simulate(
    folder: Any,
    nodes: int,
    stages: int = 1_000,
    failures: FailureModel | None = None,
    seed: int = 0,
) -> tuple[Graph, Cluster, Outcome]:
    store, graph, _ = simulation.graph(folder, *SHAPES[stages])
    cluster = Cluster(
        nodes, simulation.draw_durations(graph, seed), seed, failures or FailureModel()
    )
    return (
        graph,
        cluster,
        run_graph(graph, store, lambda todo: cluster, RETRIES, [], look_up_all(graph, store, None)),
    )


def check_spans(graph: Graph, spans: list[Span]) -> None:
    """Check that stages run after their parents and once, and that no spans overlap.

    Spans of one stage or one group must not overlap.
    """
    done = {s.stage: s.end for s in spans if s.how == "done"}
    assert len(done) == sum(s.how == "done" for s in spans)
    for span in spans:
        assert all(done[p] <= span.begin for p in graph[span.stage].parents), span
        assert span.end <= done.get(span.stage, span.end), "the stage ran again after it was done"
    by_stage: dict[str, list[Span]] = {}
    by_group: dict[int, list[Span]] = {}
    for span in sorted(spans, key=lambda span: (span.begin, span.end)):
        by_stage.setdefault(span.stage, []).append(span)
        if span.group >= 0:  # stages that the driver runs have no group
            by_group.setdefault(span.group, []).append(span)
    for in_order in [*by_stage.values(), *by_group.values()]:
        for earlier, later in pairwise(in_order):
            assert earlier.end <= later.begin


def share_on_same_group(graph: Graph, spans: list[Span]) -> float:
    """Return the share of chain stages that ran on the group of the stage before them."""
    groups = {span.stage: span.group for span in spans if span.how == "done"}
    followers = 0
    on_same_group = 0
    for stage in graph:
        if not stage.method or stage.step == "evaluate":
            continue
        before = [parent for parent in stage.parents if graph[parent].method == stage.method]
        if before:
            followers += 1
            before_groups = [groups[parent] for parent in before]
            on_same_group += groups[stage.id] in before_groups
    return on_same_group / followers


@pytest.mark.parametrize(("nodes", "bound"), [(100, 1.01), (10, 1.02)])
def test_makespan_is_near_optimal_without_failures(
    tmp_path: Path, nodes: int, bound: float
) -> None:
    """With many nodes the longest chain sets the bound, with few nodes the total work."""
    graph, cluster, outcome = simulate(tmp_path, nodes)
    check_spans(graph, cluster.spans)
    assert outcome.ran == len(graph)
    assert cluster.now <= bound * simulation.makespan_bound(graph, cluster.seconds, nodes)


@pytest.mark.parametrize("nodes", [100, 10])
def test_all_stages_finish_despite_node_losses_and_failures(tmp_path: Path, nodes: int) -> None:
    graph, cluster, outcome = simulate(tmp_path, nodes, failures=NODES_FAIL)
    check_spans(graph, cluster.spans)
    how = Counter(s.how for s in cluster.spans)
    assert how["lost"] > 10
    assert how["failed"] > 10
    assert outcome.ran == len(graph)
    assert not outcome.failures
    assert cluster.now <= 1.15 * simulation.makespan_bound(graph, cluster.seconds, nodes)


def test_most_stages_of_a_chain_stay_on_one_group(tmp_path: Path) -> None:
    graph, cluster, _ = simulate(tmp_path, 100)
    assert share_on_same_group(graph, cluster.spans) > 0.7
    graph, cluster, _ = simulate(tmp_path / "storm", 100, failures=NODES_FAIL)
    assert share_on_same_group(graph, cluster.spans) > 0.6


def test_final_failure_blocks_only_dependent_stages(
    tmp_path: Path,
) -> None:
    doomed = "finetune-020/t-4/train"
    graph, cluster, outcome = simulate(
        tmp_path, 100, failures=FailureModel(life_s=3600, failing=0.02, doomed=frozenset({doomed}))
    )
    after = {doomed}
    for stage in graph:
        after |= {stage.id} if after & set(stage.parents) else set()
    assert outcome.failures == {doomed: "it broke"}
    assert outcome.states == {
        s.id: State.FAILED if s.id == doomed else State.BLOCKED if s.id in after else State.DONE
        for s in graph
    }
    assert {s.stage for s in cluster.spans} == {
        s.id for s in graph if s.id not in after or s.id == doomed
    }


def test_half_speed_nodes_at_most_double_the_makespan(tmp_path: Path) -> None:
    """A chain may stay on a slow group: at half the speed it takes at most twice as long."""
    graph, cluster, _ = simulate(tmp_path, 100, failures=FailureModel(slow=0.1))
    assert cluster.now <= 2.0 * simulation.makespan_bound(graph, cluster.seconds, 100)


def test_simulation_is_deterministic_for_a_seed(tmp_path: Path) -> None:
    first, second = (simulate(tmp_path / name, 10, failures=NODES_FAIL)[1].spans for name in "ab")
    assert first == second


@pytest.mark.slow
def test_memory_of_a_walk_grows_linearly_with_stages(tmp_path: Path) -> None:
    """Compare the bytes per stage of 90 and of 9 chains of ten tasks.

    Edges take memory too, because the report waits for every evaluation.
    """
    sizes = []
    for chains in (9, 90):
        _, graph, _ = simulation.graph(tmp_path / str(chains), 10, 0, chains, 0)
        assert graph.depths, graph.children("backbone")
        gc.collect()
        tracemalloc.start()
        walk = Walk.over(graph, [], 0)
        walk.decide()
        sizes.append(tracemalloc.get_traced_memory()[0] / len(graph))
        tracemalloc.stop()
        assert not walk.ended
    assert sizes[1] < 1.2 * sizes[0]
    assert sizes[1] < 2_000


@pytest.mark.slow
def test_ten_thousand_stages_finish_on_a_thousand_unreliable_nodes(tmp_path: Path) -> None:
    graph, cluster, outcome = simulate(tmp_path, 1_000, 10_000, NODES_FAIL)
    assert len(graph) > 10_000
    check_spans(graph, cluster.spans)
    assert outcome.ran == len(graph)
    assert Counter(s.how for s in cluster.spans)["lost"] > 100
    assert share_on_same_group(graph, cluster.spans) > 0.85
    assert cluster.now <= 1.15 * simulation.makespan_bound(graph, cluster.seconds, 1_000)
