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
        self.places: dict[int, list[str]] = {}  # group whose workers have come up -> the nodes of its ranks
        self.going: dict[int, bool] = {}  # group that is to end -> whether at once; else when it has done what it holds
        self.closed = False

    def offer(self, offers: list[Offer]) -> tuple[list[Event], dict[int, list[str]]]:
        """From the driver: new stages. Returns what happened since, and the groups that are up, each with the nodes of its ranks."""
        self.offers += offers
        events, self.events = self.events, []
        return events, dict(self.places)

    def joined(self, group: int, places: list[str]) -> None:
        """From rank 0 of a group that has come up: the nodes of its ranks. What the group held is lost: its workers died."""
        self._lose(group, "its workers died")
        self.places[group] = places

    def dismiss(self, groups: list[int], at_once: bool) -> None:
        """From the driver: these groups are to end, when they have done what they hold, or when they have saved it."""
        for group in groups:
            self.going[group] = at_once or self.going.get(group, False)

    def next(self, group: int) -> Stage | str | None:
        """From rank 0 of a group: a stage, None for nothing yet, `stop`. A group that asks while it holds a stage was
        started anew: its workers died."""
        self._lose(group, "its workers died")
        if self.closed or group in self.going:
            return "stop"
        if not self.offers:
            return None
        chosen = self.held[group] = self.last[group] = take(self.offers, self.last.get(group))
        return chosen

    def post(self, group: int, event: Event) -> bool:
        """From a rank: how a stage goes or ended. Of several ranks that fail together the first one is heard. Returns whether it is to leave."""
        if event.kind == "progress" or self.held.pop(group, None) is not None:
            self.events.append(event)
        return self.going.get(group, False)

    def abandon(self, group: int, message: str, moved: bool = False) -> None:
        """From the driver: the group itself is gone, and is started anew. moved: through no fault of what it did."""
        self._lose(group, message, moved)
        self.places.pop(group, None)
        self.going.pop(group, None)

    def _lose(self, group: int, message: str, moved: bool = False) -> None:
        held = self.held.pop(group, None)
        if held is not None:
            self.events.append(Event("lost", held.id, message, body={"nodes": self.places.get(group, []), "moved": moved}))

    def close(self) -> None:
        self.closed = True
