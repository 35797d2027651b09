"""Prefetching: threads run jobs, for example make batches, before their results are needed."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


def make_ahead(
    jobs: Iterator[Callable[[], T]], stop: Callable[[], None], num_threads: int, num_ahead: int
) -> Generator[T]:
    """Yield the results of jobs in order. At most `num_ahead` jobs start before they are needed.

    One thread at a time advances the iterator `jobs`. An error of a job, or of the iterator, is
    raised at the position of the job. When the generator ends or is closed, it calls `stop` and
    joins the threads.

    Args:
        jobs: The jobs, functions without arguments.
        stop: Function that makes waiting jobs return or raise, so that the threads can end.
        num_threads: Number of threads. With 0, each job runs when its result is requested, in the
            thread that requests it.
        num_ahead: Maximum number of jobs that are running or finished before they are requested.
    """
    if not num_threads:
        try:
            for job in jobs:
                yield job()
        finally:
            stop()
        return
    line = _Line(jobs, stop, num_ahead)
    threads = [
        threading.Thread(target=line.work, name=f"batches-{number}", daemon=True)
        for number in range(num_threads)
    ]
    try:
        for thread in threads:
            thread.start()
        while (outcome := line.take()) is not None:
            if outcome.error is not None:
                try:
                    raise outcome.error
                finally:
                    del outcome  # it would form a reference cycle with the error's traceback
            yield outcome.value  # type: ignore[misc]  # the value is None only if a job returned it
            del outcome
    finally:
        # When the interpreter ends, daemon threads have stopped, and still hold their locks.
        if not sys.is_finalizing():
            line.close()
            for thread in threads:
                if thread.ident is not None and thread is not threading.current_thread():
                    thread.join()


class _JobResult(NamedTuple, Generic[T]):
    """Result of a job, or the error that it raised."""

    value: T | None = None
    error: BaseException | None = None


class _Line(Generic[T]):
    """Queue of jobs for several threads. It returns the outcomes in the order of the jobs."""

    def __init__(self, jobs: Iterator[Callable[[], T]], stop: Callable[[], None], num_ahead: int):
        self.jobs = jobs
        self.stop = stop
        self.num_ahead = num_ahead
        self._outcomes: dict[int, _JobResult[T]] = {}
        self._num_begun = 0
        self._num_taken = 0
        self._has_ended = False  # `jobs` is exhausted, or the results are not needed
        self._turn = threading.Lock()  # held while a thread advances `jobs`
        self._changed = threading.Condition()

    def work(self) -> None:
        """Run jobs until none is left. Each thread runs this method."""
        while (number := self._begin()) is not None:
            index, job = number
            try:
                outcome = _JobResult(job())
            except BaseException as error:
                outcome = _JobResult(error=error)
            self._put(index, outcome)
            del job, outcome, number

    def _begin(self) -> tuple[int, Callable[[], T]] | None:
        with self._turn:
            with self._changed:
                self._changed.wait_for(self._has_room)
                if self._has_ended:
                    return None
                number = self._num_begun
            try:
                job = next(self.jobs)
            except StopIteration:
                self._end()
                return None
            except BaseException as error:
                self._put(number, _JobResult(error=error))
                self._end()
                return None
            self._num_begun += 1
            return number, job

    def _has_room(self) -> bool:
        return self._has_ended or self._num_begun - self._num_taken < self.num_ahead

    def _put(self, number: int, outcome: _JobResult[T]) -> None:
        with self._changed:
            self._outcomes[number] = outcome
            self._changed.notify_all()

    def _end(self) -> None:
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def take(self) -> _JobResult[T] | None:
        """Wait for the next outcome in the order of the jobs; return None after the last one."""
        with self._changed:
            self._changed.wait_for(self._can_take)
            outcome = self._outcomes.pop(self._num_taken, None)
            self._num_taken += 1
            self._changed.notify_all()
            return outcome

    def _can_take(self) -> bool:
        has_finished = self._has_ended and self._num_taken >= self._num_begun
        return self._num_taken in self._outcomes or has_finished

    def close(self) -> None:
        """Start no more jobs, and call `stop` for the running jobs.

        `stop` is called while no thread advances the iterator `jobs`.
        """
        self._end()
        with self._turn:
            self.stop()
