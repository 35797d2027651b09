"""Which stage goes next, and the queue between the driver and the worker groups: plain Python,
stepped by hand in tests."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush
from typing import NamedTuple

from pipeline.graph.stage import Stage
from pipeline.graph.walk import Event, EventKind


class ReadyStage(NamedTuple):
    """A stage that may run; the deepest one, with most stages behind it, goes first."""

    depth: int
    stage: Stage


class ReadyQueue:
    """Stages that wait for a group, by depth, and below it by what they wait for: adding and taking
    one cost the same among any number.

    A chain keeps its group: the first child of a group's last stage is kept for it while it is
    idle. It will ask again within moments; should it not, as its workers may be gone, others get
    the stage after each idle group could have asked twice.
    """

    def __init__(self, offers: Iterable[ReadyStage] = ()) -> None:
        self.waiting: dict[
            int, dict[str, Stage]
        ] = {}  # depth -> stages by id, in the order in which they came
        self.children: dict[
            tuple[int, str], dict[str, None]
        ] = {}  # (depth, parent) -> ids of those that have it
        self.depths: list[int] = []  # a heap of the depths there are, negative
        self.idle: set[str] = set()  # last stages of the groups that asked in vain
        self.kept: dict[
            str, tuple[ReadyStage, int]
        ] = {}  # last stage of a group -> what is kept for it, until so many asked
        self.asked = 0
        self += offers

    def __iadd__(self, offers: Iterable[ReadyStage]) -> ReadyQueue:
        for offer in offers:
            self.append(offer)
        return self

    def __len__(self) -> int:
        return sum(map(len, self.waiting.values())) + len(self.kept)

    def append(self, offer: ReadyStage) -> None:
        home = next((p for p in offer.stage.parents if p in self.idle and p not in self.kept), None)
        if home is None:
            self._add(offer)
        else:
            self.kept[home] = offer, self.asked + 2 * len(self.idle)

    def take(self, last: Stage | None = None) -> Stage | None:
        """Removes and returns the next stage for a group whose last one was `last`: what is kept
        for it; else the deepest, among equals a child of `last`. None where there is none for
        it."""
        self.asked += 1
        before = last.id if last else ""
        self.idle.discard(before)
        if before in self.kept:
            return self.kept.pop(before)[0].stage
        while self.kept and self.kept[first := next(iter(self.kept))][1] < self.asked:
            self.release(first)
        if not self.depths:
            self.idle |= {before} - {""}
            return None
        depth = -self.depths[0]
        return self._remove(
            depth, next(iter(self.children.get((depth, before)) or self.waiting[depth]))
        )

    def release(self, last: str) -> None:
        """The group whose last stage was `last` will not ask again soon: what is kept for it is for
        all."""
        self.idle.discard(last)
        if last in self.kept:
            self._add(self.kept.pop(last)[0])

    def _add(self, offer: ReadyStage) -> None:
        if offer.depth not in self.waiting:
            self.waiting[offer.depth] = {}
            heappush(self.depths, -offer.depth)
        self.waiting[offer.depth][offer.stage.id] = offer.stage
        for parent in offer.stage.parents:
            self.children.setdefault((offer.depth, parent), {})[offer.stage.id] = None

    def _remove(self, depth: int, stage_id: str) -> Stage:
        stage = self.waiting[depth].pop(stage_id)
        for parent in {*stage.parents}:
            others = self.children[depth, parent]
            del others[stage_id]
            if not others:
                del self.children[depth, parent]
        if not self.waiting[depth]:
            del self.waiting[-heappop(self.depths)]
        return stage


class Queue:
    """The actor between the driver and the worker groups: stages out, events in."""

    def __init__(self) -> None:
        self.offers = ReadyQueue()
        self.held: dict[int, Stage] = {}  # group -> the stage it runs
        self.last: dict[int, Stage] = {}  # group -> the stage it ran last
        self.events: list[Event] = []
        self.places: dict[
            int, list[str]
        ] = {}  # group whose workers have come up -> the nodes of its ranks
        # groups that were given up and have not come up again: what is left of one gets no stage
        self.gone: set[int] = set()
        self.going: dict[
            int, bool
        ] = {}  # group that is to end -> whether at once; else when it has done what it holds
        self.closed = False

    def offer(self, offers: list[ReadyStage]) -> tuple[list[Event], dict[int, list[str]]]:
        """From the driver: new stages. Returns what happened since, and the groups that are up,
        each with the nodes of its ranks."""
        self.offers += offers
        events, self.events = self.events, []
        return events, dict(self.places)

    def joined(self, group: int, places: list[str]) -> None:
        """From rank 0 of a group that has come up: the nodes of its ranks. What the group held is
        lost: its workers died."""
        self._lose(group, "its workers died")
        self.places[group] = places
        self.gone.discard(group)

    def dismiss(self, groups: list[int], at_once: bool) -> None:
        """From the driver: these groups are to end, when they have done what they hold, or when
        they have saved it."""
        for group in groups:
            self.going[group] = at_once or self.going.get(group, False)

    def next(self, group: int) -> Stage | str | None:
        """From rank 0 of a group: a stage, None for nothing yet, `stop`. A group that asks while it
        holds a stage was started anew: its workers died."""
        self._lose(group, "its workers died")
        if self.closed or group in self.going:
            return "stop"
        if group in self.gone:
            return None
        chosen = self.offers.take(self.last.get(group))
        if chosen is not None:
            self.held[group] = self.last[group] = chosen
        return chosen

    def post(self, group: int, event: Event) -> bool:
        """From a rank: how a stage goes or ended. Of several ranks that fail together the first one
        is heard. Returns whether it is to leave."""
        held = self.held.get(group)
        if event.kind is EventKind.PROGRESS:
            self.events.append(event)
        elif held is None or held.id != event.stage:
            pass  # of a group that was given up, and is not quite gone
        elif event.kind is EventKind.LOST:
            self._lose(group, event.message)
        else:
            del self.held[group]
            self.events.append(event)
        return self.going.get(group, False)

    def abandon(self, group: int, message: str, moved: bool = False) -> None:
        """From the driver: the group itself is gone, and is started anew. moved: through no fault
        of what it did."""
        self._lose(group, message, moved)
        if group in self.last:
            self.offers.release(self.last[group].id)
        self.places.pop(group, None)
        self.going.pop(group, None)
        self.gone.add(group)

    def _lose(self, group: int, message: str, moved: bool = False) -> None:
        held = self.held.pop(group, None)
        if held is not None:
            self.events.append(
                Event(
                    EventKind.LOST,
                    held.id,
                    message,
                    body={"nodes": self.places.get(group, []), "moved": moved},
                )
            )

    def close(self) -> None:
        self.closed = True
