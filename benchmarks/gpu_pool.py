"""Processes that check cases side by side; one that hangs or dies costs its own case alone."""

from __future__ import annotations

import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

Send = Callable[[str, Any], None]
Check = Callable[[Any, Send], bool]
POLL_S = 0.5  # seconds between two looks at the time limit
# At once there, with all imports. The process that forks must not have touched CUDA.
FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Message:
    """What a worker sends of a case, by `kind`; the pool itself sends `ended` (why the process of
    the case came to an end) and `done` (seconds)."""

    case: Any
    kind: str
    value: Any


@dataclass
class Worker:
    """A process that is given one case after the other through a pipe. `is_fit`: it can check
    another one."""

    process: Any
    connection: Connection
    case: Any = None
    started: float = field(default_factory=time.monotonic)
    is_fit: bool = True

    @property
    def seconds(self) -> float:
        """Since its case began."""
        return time.monotonic() - self.started

    def give(self, case: Any) -> None:
        self.case = case
        self.started = time.monotonic()
        self.connection.send(case)

    def read(self) -> Iterator[Message]:
        """The next message of its case; where its process is gone, that."""
        try:
            kind, value = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            yield from self.end(f"its process died ({exit_text(self.process.exitcode)})")
            return
        if kind == "done":
            self.is_fit = value
            yield Message(self.case, "done", self.seconds)
            self.case = None
        else:
            yield Message(self.case, kind, value)

    def end(self, why: str) -> Iterator[Message]:
        """Gives its case up, and its process with it."""
        self.process.kill()
        self.is_fit = False
        yield Message(self.case, "ended", why)
        yield Message(self.case, "done", self.seconds)
        self.case = None

    def close(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.join()


def run(cases: Iterable[Any], check: Check, jobs: int, limit_s: float) -> Iterator[Message]:
    """Runs `check(case, send)` for each case in one of `jobs` processes and yields what it sends,
    as it comes.

    `check` returns whether its process is fit for a further case: after an error of CUDA none is. A
    case that takes longer
    than `limit_s` seconds is ended with its process.
    """
    pending = deque(cases)
    workers: list[Worker] = []
    try:
        while pending or workers:
            while pending and len(workers) < jobs:
                workers.append(start(check, workers))
                workers[-1].give(pending.popleft())
            by_connection: dict[Any, Worker] = {worker.connection: worker for worker in workers}
            for connection in wait(list(by_connection), POLL_S):
                yield from by_connection[connection].read()
            for worker in list(workers):
                if worker.case is not None and worker.seconds > limit_s:
                    yield from worker.end(f"it did not end within {limit_s:g} s and was stopped")
                if worker.case is None and worker.is_fit and pending:
                    worker.give(pending.popleft())
                elif worker.case is None:
                    workers.remove(worker)
                    worker.close()
    finally:
        for worker in workers:
            worker.close()


def exit_text(code: int | None) -> str:
    return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"


def start(check: Check, siblings: Sequence[Worker]) -> Worker:
    """A new process that waits for its first case."""
    connection, other_end = FORK.Pipe()
    inherited = [connection, *(worker.connection for worker in siblings)]
    process = FORK.Process(target=work, args=(other_end, inherited, check), daemon=True)
    process.start()
    other_end.close()
    return Worker(process, connection)


def work(connection: Connection, inherited: list[Connection], check: Check) -> None:
    """What a process does until its pipe is closed. `inherited`: ends of pipes that belong to the
    parent; held open here they would hide its end."""
    for other in inherited:
        other.close()

    def send(kind: str, value: Any) -> None:
        connection.send((kind, value))

    while True:
        try:
            case = connection.recv()
        except EOFError:
            return
        is_fit = check(case, send)
        send("done", is_fit)


def ask(question: Callable[[], Any]) -> Any:
    """The answer of a process that ends with it: what it loads (a driver, a context) does not stay
    in this one."""
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=lambda: sender.send(question()))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        return None
    finally:
        process.join()
