"""A pool of processes that check cases in parallel. If one hangs or dies, only its case fails."""

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
POLL_S = 0.5  # seconds between two checks of the time limit
# Forked processes start at once, with all imports. The forking process must not have used CUDA.
FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Message:
    """A message of a worker about a case.

    Besides the kinds that a check sends, the pool sends `ended` (the reason why the process of the
    case ended) and `done` (seconds).
    """

    case: Any
    kind: str
    value: Any


@dataclass
class Worker:
    """A process that receives one case after the other through a pipe.

    Attributes:
        process: The process.
        connection: The parent's end of the pipe.
        case: The current case, or None.
        started: Time when the current case started.
        is_fit: Whether the process can check another case.
    """

    process: Any
    connection: Connection
    case: Any = None
    started: float = field(default_factory=time.monotonic)
    is_fit: bool = True

    @property
    def seconds(self) -> float:
        """Seconds since the current case started."""
        return time.monotonic() - self.started

    def give(self, case: Any) -> None:
        """Start the check of a case."""
        self.case = case
        self.started = time.monotonic()
        self.connection.send(case)

    def read(self) -> Iterator[Message]:
        """Yield the next message of the case, or the messages of a process that died."""
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
        """Kill the process and yield the reason why the case ended."""
        self.process.kill()
        self.is_fit = False
        yield Message(self.case, "ended", why)
        yield Message(self.case, "done", self.seconds)
        self.case = None

    def close(self) -> None:
        """Kill the process and close its pipe."""
        self.connection.close()
        self.process.kill()
        self.process.join()


def run(cases: Iterable[Any], check: Check, jobs: int, limit_s: float) -> Iterator[Message]:
    """Run `check(case, send)` for each case in one of `jobs` processes and yield the messages.

    Args:
        cases: The cases.
        check: Returns whether its process can check a further case; after a CUDA error, it cannot.
        jobs: Number of parallel processes.
        limit_s: Time limit of a case in seconds. After it, the process of the case is killed.

    Yields:
        The messages of all cases.
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
    """Return an exit code of `multiprocessing` as text. Negative codes are signals."""
    if code is not None and code < 0:
        return f"signal {-code}"
    return f"exit code {code}"


def start(check: Check, siblings: Sequence[Worker]) -> Worker:
    """Start a process that waits for its first case."""
    connection, other_end = FORK.Pipe()
    inherited = [connection, *(worker.connection for worker in siblings)]
    process = FORK.Process(target=work, args=(other_end, inherited, check), daemon=True)
    process.start()
    other_end.close()
    return Worker(process, connection)


def work(connection: Connection, inherited: list[Connection], check: Check) -> None:
    """Check cases in a worker process until the pipe is closed.

    Args:
        connection: The worker's end of the pipe.
        inherited: The parent's ends of pipes. They are closed here, because otherwise this process
            would not notice that the parent has ended.
        check: Checks a case.
    """
    for parent_end in inherited:
        parent_end.close()

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
    """Call a function in a new process and return its result, or None if the process dies.

    A CUDA driver or context that the function loads does not stay in this process.
    """
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
