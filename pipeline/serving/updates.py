"""Watch the source of a model, and serve each new version."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pipeline.serving.model_source import ModelSource
from workers.errors import UserError
from workers.serving.bundle import Bundle

POLL_S = 2.0  # seconds between two checks for a new version
RETRY_S = 60.0  # seconds until the next check after an error


class Updates:
    """Deploys the model of a source each time the source's version changes.

    Args:
        source: The source of the model.
        version: The version served now.
        deploy: Serves a bundle instead of the previous bundle. If it raises `UserError`, the
            previous bundle must still be served.
    """

    def __init__(self, source: ModelSource, version: str, deploy: Callable[[Bundle], object]):
        self.source = source
        self.version = version
        self.deploy = deploy
        self.problem = ""  # the last printed error
        self.paused_until = 0.0  # no check before this time, on the monotonic clock

    def check(self) -> None:
        """Check the version once, and serve the model if the version is new.

        A change of the model is printed. A `UserError` pauses the checks for RETRY_S, and is
        printed if its text differs from the last printed error.
        """
        if time.monotonic() < self.paused_until:
            return
        try:
            version = self.source.version()
            if version == self.version:
                self.problem = ""
                return
            bundle = self.source.open()
            self.deploy(bundle)
        except UserError as error:
            self.paused_until = time.monotonic() + RETRY_S
            if str(error) != self.problem:
                self.problem = str(error)
                notify(f"the previous model is still served: {error}")
            return
        self.version = version
        self.problem = ""
        notify(f"now serving {', '.join(task.name for task in bundle.tasks)}")

    def run(self, stop: threading.Event) -> None:
        """Check the version every `POLL_S` seconds until `stop` is set."""
        while not stop.wait(POLL_S):
            try:
                self.check()
            except Exception as error:  # the server must continue
                notify(f"the check for a new model failed: {type(error).__name__}: {error}")


def notify(text: str) -> None:
    """Print a line to stderr."""
    print(f"accrete: {text}", file=sys.stderr, flush=True)


@contextmanager
def following(updates: Updates) -> Iterator[None]:
    """Context manager that watches the source of a model from a thread."""
    stop = threading.Event()
    thread = threading.Thread(target=updates.run, args=(stop,), daemon=True, name="updates")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(POLL_S)
