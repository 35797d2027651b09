"""Preemption: on SIGTERM a process saves its training state at the next possible step."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

requested = threading.Event()  # of this process; rank 0 tells the other ranks of a group


class Preempted(Exception):
    """Work stops because of a preemption; its state is saved."""


def listen() -> Callable[[], None]:
    """Set `requested` on SIGTERM; a second SIGTERM ends the process at once.

    Return a function that restores the former handler. Only the main thread can handle signals; in
    other threads nothing changes.
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
