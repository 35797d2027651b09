"""Tests of the garbage collector: it is suspended during a call and enabled afterwards."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.graph import build, run_record
from pipeline.graph.collector import without_collections
from pipeline.graph.store import Store


@without_collections
def read_state(error: bool = False) -> bool:
    """Return whether the collector is enabled."""
    if error:
        raise ValueError("stop")
    return gc.isenabled()


def test_collector_is_suspended_during_a_call() -> None:
    assert not read_state()
    assert gc.isenabled()
    with pytest.raises(ValueError, match="stop"):
        read_state(error=True)
    assert gc.isenabled()


def test_disabled_collector_stays_disabled() -> None:
    gc.disable()
    try:
        assert not read_state()
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "create",
    [
        lambda store, graph: build.build_graph(graph, store),
        lambda store, graph: run_record.make_record(graph, graph, [], {}),
        lambda store, graph: store.save_record(graph),
    ],
    ids=["graph", "record", "file"],
)
def test_graphs_and_records_are_created_without_collections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, create: Callable[[Store, Any], Any]
) -> None:
    def stop(*arguments: Any) -> Any:
        raise RuntimeError(f"enabled: {gc.isenabled()}")

    monkeypatch.setattr(build, "Builder", stop)
    monkeypatch.setattr(Store, "hold_gc_lock", stop)
    graph = type("Stopping", (), {"__iter__": stop})()
    with pytest.raises(RuntimeError, match="enabled: False"):
        create(Store(str(tmp_path)), graph)
