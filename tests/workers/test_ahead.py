"""Tests of `make_ahead`: the order of results, errors, and the end of the threads."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from workers.data.ahead import make_ahead


def nothing() -> None:
    """Do nothing: the argument `stop` if no job waits."""


def numbers(count: int, begun: list[int] | None = None) -> Iterator[Callable[[], int]]:
    for number in range(count):
        if begun is not None:
            begun.append(number)
        yield partial(int, number)


@pytest.mark.parametrize("num_threads", [0, 1, 2, 5])
def test_results_come_in_the_order_of_the_jobs(num_threads: int) -> None:
    assert list(make_ahead(numbers(50), nothing, num_threads, 3)) == list(range(50))
    assert list(make_ahead(numbers(0), nothing, num_threads, 3)) == []


def test_slow_job_does_not_block_other_threads() -> None:
    """Two jobs run at the same time, and the first waits for the second."""
    second_is_done = threading.Event()

    def jobs() -> Iterator[Callable[[], Any]]:
        yield partial(second_is_done.wait, 10)
        yield second_is_done.set

    assert list(make_ahead(jobs(), nothing, 2, 2)) == [True, None]


def test_number_of_jobs_begun_ahead_is_limited() -> None:
    begun: list[int] = []
    results = make_ahead(numbers(50, begun), nothing, 2, 3)
    for number in range(4):
        assert next(results) == number
        assert len(begun) <= number + 1 + 3
    results.close()
    assert len(begun) <= 3 + 1 + 3


class OurError(Exception):
    """An error that only these tests raise."""


def fail() -> int:
    raise OurError("job 2")


@pytest.mark.parametrize("num_threads", [0, 2])
def test_job_error_is_raised_in_place_of_its_result(num_threads: int) -> None:
    def jobs() -> Iterator[Callable[[], int]]:
        yield from numbers(2)
        yield fail
        yield from numbers(9)

    results = make_ahead(jobs(), nothing, num_threads, 4)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(OurError, match="job 2"):
        next(results)
    assert not preparing_threads()


@pytest.mark.parametrize("num_threads", [0, 2])
def test_iterator_error_is_raised_after_earlier_results(num_threads: int) -> None:
    def jobs() -> Iterator[Callable[[], int]]:
        yield from numbers(2)
        raise OurError("no third job")

    results = make_ahead(jobs(), nothing, num_threads, 4)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(OurError, match="no third job"):
        next(results)


def test_dropped_generator_stops_its_jobs_and_threads() -> None:
    is_stopped = threading.Event()

    def jobs() -> Iterator[Callable[[], Any]]:
        yield partial(int, 0)
        while True:
            yield is_stopped.wait

    results = make_ahead(jobs(), is_stopped.set, 2, 4)
    assert next(results) == 0
    del results
    assert is_stopped.is_set()
    assert not preparing_threads()


def preparing_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("batches-")]


def test_process_can_exit_while_threads_make_results() -> None:
    """The traceback of an error can keep the generator alive until the interpreter ends."""
    program = """
        import sys, time
        from workers.data.ahead import make_ahead

        def jobs():
            yield int
            while True:
                time.sleep(0.01)

        sys.results = make_ahead(jobs(), int, 1, 2)
        next(sys.results)
        time.sleep(0.1)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=60)
