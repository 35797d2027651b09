"""Writes the report of a search again and again while it runs, so that a browser can follow it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LOOK_S = 0.5  # how often the thread looks for a new result
CHANGED_S = 10.0  # shortest time between two pages
UNCHANGED_S = 60.0  # time after which a page is written again without a new result
MAX_LOAD = 0.05  # share of the time that writing may take: a page grows with the search
LONGEST_S = 240.0  # between two pages, however long one takes
log = logging.getLogger(__name__)


class LivePage:
    """Writes a page at once, and again after results, in a thread; the search waits for no write.

    write: writes the page. A page that cannot be written is noted in the log, and tried again.
    """

    def __init__(self, write: Callable[[], object]):
        self.write = write
        self.has_result = False
        self.ended = threading.Event()

    def on_result(self) -> None:
        """Note that there is a new result."""
        self.has_result = True

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Inside, the page is written."""
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
        """Wait for a result, `pause` seconds at least; without one, UNCHANGED_S; or for the end."""
        while not self.ended.wait(LOOK_S):
            age = time.monotonic() - written_at
            if age >= pause and (self.has_result or age >= UNCHANGED_S):
                return


def pause_s(took_s: float) -> float:
    """Return the seconds before the next page, after one that took `took_s` to write."""
    return min(max(CHANGED_S, took_s / MAX_LOAD), LONGEST_S)
