"""A queue of actions on a server, which a thread executes in order.

While the server does not answer, the thread waits and the actions stay in the queue. Therefore the
process that queues the actions never waits, except in `Outbox.close`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from workers.storage.secrets import redact

# First and longest pause between attempts, in seconds. Each pause is twice as long as the previous.
FIRST_S = 1.0
LONGEST_S = 30.0
TRIES = 5  # attempts for an action that fails although the server answers

Action = Callable[[], None]


class Outbox:
    """Executes queued actions one after the other. `put` never waits.

    A failed action is executed again as a whole, so it must be safe to repeat.

    Args:
        name: Name of the server, for messages.
        answers: Function that returns whether the server answers.
        forget: Function to call after a failure, before the next attempt, because cached
            data of the server may be outdated.
        transient: Function that returns whether a retry after an error may succeed. After any other
            error, or `TRIES` attempts, the action is dropped and a sentence added to `warnings`.
        log: Function that prints a message, for example when the server stops answering.
        refusal: Function that returns a message for an error that every action would have, for
            example a wrong password, else "". The message is logged and added to `warnings` once.
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
        # Monotonic time at which the server stopped answering; None while it answers.
        self.away_since: float | None = None
        self.given_up = False  # `close` has ended: the thread must end
        self.hurried = False  # `close` has begun: the current or next pause ends
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
        """Wait until all actions are executed.

        Args:
            patience_s: Maximum wait in seconds for a server that does not answer, counted from this
                call or from when it stopped answering, whichever is later.

        Returns:
            The number of actions that are still queued.
        """
        closing = time.monotonic()
        with self.news:
            self.hurried = True  # ends a pause immediately
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
        """Add a sentence to `warnings`, unless it is there already."""
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
        """Execute an action, and repeat it after transient errors.

        Returns:
            True if the action was executed, or was dropped with a warning. False if `close` gave up
            first.
        """
        tries = 0
        while not self.given_up:
            try:
                action()
                return True
            except Exception as error:  # an error must not end the thread
                self.forget()
                # redacted, because errors of MLflow contain its address
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
            "the run continues, and its records are kept until then"
        )
        pause = FIRST_S
        while not self.given_up:
            self._pause(pause)
            if not self.given_up and self.answers():
                self.log(
                    f"{self.name} answers "
                    f"again after {time.monotonic() - (self.away_since or 0):.0f} s; "
                    "the kept records are sent"
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
