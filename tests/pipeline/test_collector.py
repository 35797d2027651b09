"""The garbage collector is suspended during a call, and enabled afterwards."""

import gc

import pytest

from pipeline.graph.collector import without_collections


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
