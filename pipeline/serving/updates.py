"""Follows the model that a server has been given: another one is served as soon as it is there."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pipeline.serving.model_source import ModelSource
from workers.errors import UserError
from workers.serving.bundle import Bundle

POLL_S = 2.0
REPEAT_S = 60.0  # after which a model that could not be served is tried again


class Updates:
    """Serves what a source has, whenever its version is another one.

    deploy: serves a bundle in place of the one before, and raises `UserError` when that cannot be;
    the one before is served then.
    """

    def __init__(self, source: ModelSource, version: str, deploy: Callable[[Bundle], object]):
        self.source = source
        self.version = version
        self.deploy = deploy
        self.problem = ""  # that was printed last
        self.paused_until = 0.0

    def look(self) -> None:
        """Look once, and serve what is new. Print what was done, or a new problem."""
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
            self.paused_until = time.monotonic() + REPEAT_S
            if str(error) != self.problem:
                self.problem = str(error)
                notify(f"the model before is still served: {error}")
            return
        self.version = version
        self.problem = ""
        notify(f"now serving {', '.join(task.name for task in bundle.tasks)}")

    def run(self, stop: threading.Event) -> None:
        """Look every `POLL_S` seconds until `stop` is set."""
        while not stop.wait(POLL_S):
            try:
                self.look()
            except Exception as error:  # requests are answered whatever is wrong here
                notify(f"the model was not looked for: {type(error).__name__}: {error}")


def notify(text: str) -> None:
    """Print a line on stderr."""
    print(f"accrete: {text}", file=sys.stderr, flush=True)


@contextmanager
def following(updates: Updates) -> Iterator[None]:
    """Inside, follow a source from a thread."""
    stop = threading.Event()
    thread = threading.Thread(target=updates.run, args=(stop,), daemon=True, name="updates")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(POLL_S)
