"""Work that waits for a server: done in order by a thread of its own, and kept while the server is
away."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from workers.storage.secrets import redact

FIRST_S, LONGEST_S = 1.0, 30.0  # pauses between tries: each is twice the one before
TRIES = 5  # of an action that fails although the server answers

Action = Callable[[], None]


class Outbox:
    """`put` never waits. Actions are done one after the other; each must be one that can be done
    again after it failed half-way.

    answers: whether the server is there. forget: called after a failure, so that the next try
    believes nothing that was learned before it. transient: whether an error may not be repeated;
    any other one costs its action and a sentence in `warnings`, and the rest goes on. log: a line
    for people, once when the server goes away and once when it is back. name: what the server is
    called in them.
    """

    def __init__(
        self,
        name: str,
        answers: Callable[[], bool],
        forget: Action,
        transient: Callable[[Exception], bool],
        log: Callable[[str], None],
    ):
        self.name, self.answers, self.forget, self.transient, self.log = (
            name,
            answers,
            forget,
            transient,
            log,
        )
        self.warnings: list[str] = []
        self.waiting: deque[Action] = deque()
        self.news = threading.Condition()
        self.away_since: float | None = None
        self.given_up = self.hurried = False
        self.thread: threading.Thread | None = None

    def put(self, action: Action) -> None:
        with self.news:
            self.waiting.append(action)
            if self.thread is None:
                self.thread = threading.Thread(target=self._work, name="record", daemon=True)
                self.thread.start()
            self.news.notify_all()

    def close(self, patience_s: float) -> int:
        """Waits until everything is done, at most `patience_s` for a server that is away. Returns
        how many actions were not done."""
        closing = time.monotonic()
        with self.news:
            self.hurried = True  # a pause ends at once
            self.news.notify_all()
            try:
                while self.waiting:
                    left = (
                        None
                        if self.away_since is None
                        else max(closing, self.away_since) + patience_s - time.monotonic()
                    )
                    if left is not None and left <= 0:
                        break
                    self.news.wait(left)
                return len(self.waiting)
            finally:
                self.given_up = True
                self.news.notify_all()

    def warn(self, sentence: str) -> None:
        if sentence not in self.warnings:
            self.warnings.append(sentence)

    def _work(self) -> None:
        while True:
            with self.news:
                self.news.wait_for(lambda: self.waiting or self.given_up)
                if self.given_up:
                    return
                action = self.waiting[0]
            if self._carry_out(action):
                with self.news:
                    self.waiting.popleft()
                    self.news.notify_all()

    def _carry_out(self, action: Action) -> bool:
        """False where it was given up."""
        tries = 0
        while not self.given_up:
            try:
                action()
                return True
            except Exception as error:  # whatever it is, it is never worth more than this action
                self.forget()
                # MLflow repeats its address
                reason = f"{type(error).__name__}: {' '.join(redact(str(error)).split())[:300]}"
                if self.transient(error) and not self.answers():
                    self._wait_for_answer(reason)
                    continue
                tries += 1
                if not self.transient(error) or tries == TRIES:
                    self.warn(
                        f"{self.name}: {reason}; this part is not in the record, everything else is"
                    )
                    return True
                self._pause(min(FIRST_S * 2 ** (tries - 1), LONGEST_S))
        return False

    def _wait_for_answer(self, reason: str) -> None:
        self._set_away(time.monotonic())
        self.log(
            f"{self.name} does not answer ({reason[:120]}); the run goes on, and what it should "
            "hear of is kept until it does"
        )
        pause = FIRST_S
        while not self.given_up:
            self._pause(pause)
            if not self.given_up and self.answers():
                self.log(
                    f"{self.name} answers again after "
                    f"{time.monotonic() - (self.away_since or 0):.0f} s; it is told what it has "
                    "missed"
                )
                self._set_away(None)
                return
            pause = min(2 * pause, LONGEST_S)

    def _set_away(self, since: float | None) -> None:
        with self.news:
            self.away_since = since
            self.news.notify_all()

    def _pause(self, seconds: float) -> None:
        with self.news:
            self.news.wait_for(lambda: self.given_up or self.hurried, seconds)
            self.hurried = False
