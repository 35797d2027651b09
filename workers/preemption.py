"""Preemption: on SIGTERM a process saves its training state at the next possible step."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

requested = threading.Event()  # set if this process must stop; rank 0 tells its group


class Preempted(Exception):
    """A stage stops because of a preemption, after its training state was saved."""


def listen() -> Callable[[], None]:
    """Install a handler that sets `requested` on SIGTERM. A second SIGTERM ends the process.

    Only the main thread can install signal handlers. In other threads this function does nothing.

    Returns:
        A function that restores the former handler and clears `requested`.
    """
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
