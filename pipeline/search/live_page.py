"""Update the report of a running search periodically, so that users can follow the search."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LOOK_S = 0.5  # seconds between two checks for new results
CHANGED_S = 10.0  # minimum seconds between two pages
UNCHANGED_S = 60.0  # seconds without a new result after which the page is written again
MAX_LOAD = 0.05  # maximum share of time to write pages, which takes longer as the search grows
LONGEST_S = 240.0  # upper limit of the pause that follows from MAX_LOAD, in seconds
log = logging.getLogger(__name__)


class LivePage:
    """Writes a page in a thread: immediately, and again after new results.

    The search does not wait for this thread, except at its end for a page that is being written. If
    the page cannot be written, the error is logged, and the page is written again later.

    Args:
        write: Writes the page. Called in the thread.
    """

    def __init__(self, write: Callable[[], object]):
        self.write = write
        self.has_result = False
        self.ended = threading.Event()

    def on_result(self) -> None:
        """Remember that there is a new result, so that the thread writes the page again."""
        self.has_result = True

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Context manager that keeps the page up to date from a thread."""
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
            self._wait_until_due(now, compute_pause_s(now - started))

    def _wait_until_due(self, written_at: float, pause: float) -> None:
        """Wait until the page must be written again, or until the end of the search.

        The page is due `pause` seconds after the last one if there is a new result, and else after
        the longer of `pause` and UNCHANGED_S.
        """
        while not self.ended.wait(LOOK_S):
            age = time.monotonic() - written_at
            if age >= pause and (self.has_result or age >= UNCHANGED_S):
                return


def compute_pause_s(took_s: float) -> float:
    """Return the seconds to pause after a page that took `took_s` seconds to write."""
    return min(max(CHANGED_S, took_s / MAX_LOAD), LONGEST_S)
