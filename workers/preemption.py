"""A notice to leave: the machine is going to be taken away. Whoever trains saves its state at the
next step that it can, and goes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

requested = threading.Event()  # of this process; the ranks of a group hear of it from rank 0


class Preempted(Exception):
    """Raised where work stops because of a notice; what was done is saved."""


def listen() -> Callable[[], None]:
    """From now on SIGTERM is a notice; a second one ends the process at once. Returns what ends the
    listening. Only the main thread can listen; elsewhere nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        return lambda: None

    def note(number: int, frame: FrameType | None) -> None:
        if requested.is_set():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        requested.set()

    before = signal.signal(signal.SIGTERM, note)

    def end() -> None:
        signal.signal(signal.SIGTERM, before)
        requested.clear()

    return end
