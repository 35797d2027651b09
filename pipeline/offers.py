"""Which stage goes next, and the queue between the driver and the worker groups: plain Python, stepped by hand in tests."""

from __future__ import annotations

from typing import NamedTuple

from pipeline.graph import Stage
from pipeline.run import Event


class Offer(NamedTuple):
    """A stage that may run; the deepest one, with most stages behind it, goes first."""

    depth: int
    stage: Stage


def take(offers: list[Offer], last: Stage | None = None) -> Stage:
    """Removes and returns the next stage: the deepest; among equals a child of `last`, so that a chain keeps its group."""
    best = max(offers, key=lambda o: (o.depth, last is not None and last.id in o.stage.parents))
    offers.remove(best)
    return best.stage


class Queue:
    """The actor between the driver and the worker groups: stages out, events in."""

    def __init__(self) -> None:
        self.offers: list[Offer] = []
        self.held: dict[int, Stage] = {}  # group -> the stage it runs
        self.last: dict[int, Stage] = {}  # group -> the stage it ran last
        self.events: list[Event] = []
        self.asked: set[int] = set()  # groups whose workers have come up
        self.closed = False

    def offer(self, offers: list[Offer]) -> tuple[list[Event], list[int]]:
        """From the driver: new stages. Returns what happened since, and the groups that have asked for a stage."""
        self.offers += offers
        events, self.events = self.events, []
        return events, sorted(self.asked)

    def next(self, group: int) -> Stage | str | None:
        """From rank 0 of a group: a stage, None for nothing yet, `stop`. A group that asks while it holds a stage was
        started anew: its workers died."""
        self.asked.add(group)
        held = self.held.pop(group, None)
        if held is not None:
            self.events.append(Event("lost", held.id, "its workers died"))
        if self.closed:
            return "stop"
        if not self.offers:
            return None
        chosen = self.held[group] = self.last[group] = take(self.offers, self.last.get(group))
        return chosen

    def post(self, group: int, event: Event) -> None:
        """From a rank: how a stage goes or ended. Of several ranks that fail together the first one is heard."""
        if event.kind == "progress" or self.held.pop(group, None) is not None:
            self.events.append(event)

    def abandon(self, group: int, message: str) -> None:
        """From the driver: the group itself is gone, and is started anew."""
        self.asked.discard(group)
        held = self.held.pop(group, None)
        if held is not None:
            self.events.append(Event("lost", held.id, message))

    def close(self) -> None:
        self.closed = True
