"""Update the report of a running search periodically, so that a browser can follow it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LOOK_S = 0.5  # the thread checks for new results in this interval
CHANGED_S = 10.0  # shortest time between two pages
UNCHANGED_S = 60.0  # the page is written again after this time without a new result
MAX_LOAD = 0.05  # largest share of the time for writing, because a page grows with the search
LONGEST_S = 240.0  # longest time between two pages
log = logging.getLogger(__name__)


class LivePage:
    """A thread that writes a page immediately and after new results.

    The search does not wait for it. If the page cannot be written, the error is logged and the
    write is repeated later.

    Args:
        write: Writes the page.
    """

    def __init__(self, write: Callable[[], object]):
        self.write = write
        self.has_result = False
        self.ended = threading.Event()

    def on_result(self) -> None:
        """Note a new result."""
        self.has_result = True

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Context manager that keeps the page up to date."""
        thread = threading.Thread(target=self._keep_writing, name="live page", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.ended.set()
            thread.join()

    def _keep_writing(self) -> None:
        while not self.ended.is_set():
            self.has_result = False
            started = time.monotonic()
            try:
                self.write()
            except Exception as error:
                log.warning("the report of the search was not written: %s", error)
            now = time.monotonic()
            self._wait_until_due(now, pause_s(now - started))

    def _wait_until_due(self, written_at: float, pause: float) -> None:
        """Wait at least `pause` seconds for a result, at most UNCHANGED_S, or until the end."""
        while not self.ended.wait(LOOK_S):
            age = time.monotonic() - written_at
            if age >= pause and (self.has_result or age >= UNCHANGED_S):
                return


def pause_s(took_s: float) -> float:
    """Return the pause in seconds after a page that took `took_s` seconds to write."""
    return min(max(CHANGED_S, took_s / MAX_LOAD), LONGEST_S)
