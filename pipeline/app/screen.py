"""The screen on which a run shows its progress."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from pipeline.graph.run import Watcher
from pipeline.graph.stage import Graph
from pipeline.graph.store import Lookup

if TYPE_CHECKING:
    from pipeline.graph.walk import Event


class Screen(Watcher, Protocol):
    """Shows the progress of a run to the user. `pipeline.shell.console.Console` implements it."""

    def progress(self, event: Event) -> None:
        """Show the progress of a stage."""

    def say(self, text: str) -> None:
        """Show one line of text."""

    def activity(self, describe: Callable[[], str]) -> AbstractContextManager[None]:
        """Context manager that shows the text of `describe` after a while without output."""


# creates the screen of a run from its graph and the look-up of each stage
OpenScreen = Callable[[Graph, dict[str, Lookup]], Screen]
