"""A queue of actions on a server: a thread does them in order, and waits while the server does not
answer."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from workers.storage.secrets import redact

# pauses between tries: each is twice as long as the one before
FIRST_S = 1.0
LONGEST_S = 30.0
TRIES = 5  # of an action that fails although the server answers

Action = Callable[[], None]


class Outbox:
    """`put` never waits. Actions are done one after the other. Each is done again after it failed
    half-way, so it must allow that.

    name: of the server, in messages.
    answers: returns whether the server answers.
    forget: is called after a failure, before the next try: what is known of the server may be old.
    transient: returns whether an action may succeed later after an error. After any other error the
    action is left out, and a sentence is added to `warnings`.
    log: is called with a line for people when the server stops answering and when it answers again.
    refusal: returns a sentence for an error that every action would have, such as a wrong password,
    and else "". The sentence is logged and warned of once.
    """

    def __init__(
        self,
        name: str,
        answers: Callable[[], bool],
        forget: Action,
        transient: Callable[[Exception], bool],
        log: Callable[[str], None],
        refusal: Callable[[Exception], str] = lambda error: "",
    ):
        self.name = name
        self.answers = answers
        self.forget = forget
        self.transient = transient
        self.log = log
        self.refusal = refusal
        self.warnings: list[str] = []
        self.waiting: deque[Action] = deque()
        self.news = threading.Condition()
        self.away_since: float | None = None
        self.given_up = False
        self.hurried = False
        self.thread: threading.Thread | None = None

    def put(self, action: Action) -> None:
        """Queue an action."""
        with self.news:
            self.waiting.append(action)
            if self.thread is None:
                self.thread = threading.Thread(target=self._work, name="record", daemon=True)
                self.thread.start()
            self.news.notify_all()

    def close(self, patience_s: float) -> int:
        """Wait until all actions are done; return how many were not done.

        For a server that does not answer, wait at most `patience_s`.
        """
        closing = time.monotonic()
        with self.news:
            self.hurried = True  # a pause ends at once
            self.news.notify_all()
            try:
                while self.waiting:
                    left_s = None
                    if self.away_since is not None:
                        give_up_at = max(closing, self.away_since) + patience_s
                        left_s = give_up_at - time.monotonic()
                        if left_s <= 0:
                            break
                    self.news.wait(left_s)
                return len(self.waiting)
            finally:
                self.given_up = True
                self.news.notify_all()

    def warn(self, sentence: str) -> None:
        """Add a sentence to `warnings`, once."""
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
        """Do an action, again after an error that may pass; return False if it was given up."""
        tries = 0
        while not self.given_up:
            try:
                action()
                return True
            except Exception as error:  # whatever it is, it is never worth more than this action
                self.forget()
                # MLflow repeats its address
                reason = f"{type(error).__name__}: {' '.join(redact(str(error)).split())[:300]}"
                refusal = self.refusal(error)
                if refusal:
                    if refusal not in self.warnings:
                        self.log(refusal)
                    self.warn(refusal)
                    return True
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
            f"{self.name} does not answer ({reason[:120]}); "
            "the run goes on, and what it should hear of is kept until it does"
        )
        pause = FIRST_S
        while not self.given_up:
            self._pause(pause)
            if not self.given_up and self.answers():
                self.log(
                    f"{self.name} answers "
                    f"again after {time.monotonic() - (self.away_since or 0):.0f} s; "
                    "it is told what it has missed"
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
