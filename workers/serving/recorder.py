"""Count the inputs of a predictor and write the counts to its model folder, from a thread.

Counting an answer takes a few additions. Measuring a distance takes a second forward pass, so the
thread measures only as many batches as its share of the time allows.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import date
from typing import Any, NamedTuple

from numpy.typing import NDArray

from workers.errors import UserError
from workers.serving.input_counts import (
    INPUTS,
    DayCounts,
    merge_count_files,
    new_file,
    utc_day,
    write_counts,
)
from workers.serving.reference import Reference
from workers.serving.server import Answer, Predictor
from workers.storage.artifact import resolve

WRITE_S = 5.0  # seconds between two writes; a killed process loses the counts since the last write
SERVER_SHARE = 0.05  # maximum share of a server's time used to measure distances

logger = logging.getLogger(__name__)


class MeasuredBatch(NamedTuple):
    """Answered images whose distances are to be measured.

    Attributes:
        pixels: Decoded images, the result of `Predictor.read_pixels`.
        tasks: Task of each answer.
        day: Day of the answers, in UTC.
    """

    pixels: NDArray[Any]
    tasks: list[str]
    day: date


class InputRecorder:
    """Counts the answers of a predictor in files of its model folder; see `input_counts`.

    Args:
        predictor: The predictor. Its answers are counted until `close`.
        model_uri: The model folder, on a local disk.
        share: Maximum share of the time used to measure distances. 1: every image is
            measured, and answers wait for earlier measurements.
        today: Function that returns the current day in UTC.
    """

    def __init__(
        self,
        predictor: Predictor,
        model_uri: str,
        share: float = SERVER_SHARE,
        today: Callable[[], date] = utc_day,
    ):
        self.predictor = predictor
        self.folder = os.path.join(resolve(model_uri)[1], INPUTS)
        self.share = share
        self.today = today
        self.model = str(predictor.bundle.body["sha256"])
        self.reference = Reference({}, {})
        self.days: dict[date, DayCounts] = {}
        self.paths: dict[date, str] = {}  # day -> file
        self.lock = threading.Lock()  # protects the counts
        self.is_changed = False
        self.has_failed = False
        self.rest_until = 0.0  # monotonic time until which no batch is measured
        self.batches: queue.Queue[MeasuredBatch | None] = queue.Queue(1)
        try:
            self.reference = predictor.reference
        except UserError as error:
            logger.warning("distances of inputs are not measured: %s", error)
        self.thread = threading.Thread(target=self._run, daemon=True, name="inputs")
        self.thread.start()
        predictor.on_answers = self.add

    def add(
        self, pixels: NDArray[Any], tasks: Sequence[str | None], answers: Sequence[Answer]
    ) -> None:
        """Count answers.

        Args:
            pixels: Decoded images, the result of `Predictor.read_pixels`.
            tasks: The task of each image in the request, or None.
            answers: The answer to each image.
        """
        day = self.today()
        with self.lock:
            counts = self.days.setdefault(day, DayCounts(day=day))
            for task, answer in zip(tasks, answers, strict=True):
                task_counts = counts.task(self.model, answer.task)
                task_counts.add_answer(answer.class_, answer.probability, task is None)
            self.is_changed = True
        if not self.reference.tasks:
            return
        batch = MeasuredBatch(pixels, [answer.task for answer in answers], day)
        if self.share >= 1:
            self._put(batch)
        elif time.monotonic() >= self.rest_until:
            with suppress(queue.Full):
                self.batches.put_nowait(batch)

    def close(self) -> None:
        """Measure the waiting batches, write all counts, and stop counting."""
        self.predictor.on_answers = None
        self._put(None)
        self.thread.join()

    def _put(self, batch: MeasuredBatch | None) -> None:
        """Put a batch, or None to stop, into the queue of the thread. Wait while it is full."""
        while self.thread.is_alive():
            with suppress(queue.Full):
                self.batches.put(batch, timeout=1.0)
                return

    # ---- the thread ------------------------------------------------------------------------------
    def _run(self) -> None:
        """Measure batches, and write the counts every `WRITE_S` seconds, until `close`."""
        self._merge()
        next_write = time.monotonic() + WRITE_S
        is_open = True
        while is_open:
            with suppress(queue.Empty):
                batch = self.batches.get(timeout=max(0.0, next_write - time.monotonic()))
                is_open = batch is not None
                if batch is not None:
                    self._measure(batch)
            if time.monotonic() >= next_write:
                self._write()
                next_write = time.monotonic() + WRITE_S
        self._write()

    def _measure(self, batch: MeasuredBatch) -> None:
        """Measure the distances of a batch, and compute the pause that keeps the share of time."""
        start = time.monotonic()
        for name in dict.fromkeys(batch.tasks):
            reference = self.reference.tasks.get(name)
            if reference is None:
                continue
            rows = [row for row, task in enumerate(batch.tasks) if task == name]
            try:
                features = self.predictor.features(batch.pixels[rows], name)
                distances = reference.distances(features)
                if not distances.isfinite().all():
                    raise ValueError("a distance is not finite")
            except Exception as error:  # the server must continue
                logger.warning("distances of inputs are not measured: %s", error)
                self.reference = Reference({}, {})  # no later batch is measured
                return
            with self.lock:
                day_counts = self.days.setdefault(batch.day, DayCounts(day=batch.day))
                counts = day_counts.task(self.model, name)
                counts.test_images = reference.test_images
                for distance in distances.tolist():
                    counts.add_distance(distance, distance > reference.far)
                self.is_changed = True
        now = time.monotonic()
        self.rest_until = now + (now - start) * (1 / self.share - 1)

    def _write(self) -> None:
        """Write the counts of all days if a count changed. Then drop the past days."""
        with self.lock:
            if not self.is_changed:
                return
            self.is_changed = False
            days = {day: counts.model_copy(deep=True) for day, counts in self.days.items()}
        today = self.today()
        try:
            for day, counts in days.items():
                write_counts(self.paths.setdefault(day, new_file(self.folder, day)), counts)
        except OSError as error:
            self._fail(error)
            self.is_changed = True
            return
        past_days = [day for day in days if day < today]
        if past_days and not self._forget(past_days, days):
            self._merge()

    def _forget(self, past_days: Sequence[date], written: dict[date, DayCounts]) -> bool:
        """Drop past days, unless a count was added after the write.

        Args:
            past_days: The days to drop.
            written: Day -> written counts.

        Returns:
            Whether a count was added, so that no day was dropped.
        """
        with self.lock:
            has_changed = any(self.days[day] != written[day] for day in past_days)
            if not has_changed:
                for day in past_days:
                    del self.days[day], self.paths[day]  # a later count is written to a new file
        return has_changed

    def _merge(self) -> None:
        """Merge the files of past days."""
        try:
            merge_count_files(self.folder, self.today())
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        """Log, only once, that the folder cannot be written. The server continues."""
        if not self.has_failed:
            self.has_failed = True
            logger.warning("inputs are not counted: %s: %s", self.folder, error.strerror or error)


@contextmanager
def recording(predictor: Predictor, model_uri: str) -> Iterator[None]:
    """Context manager that counts and measures every answer of a predictor.

    Args:
        predictor: The predictor.
        model_uri: A model folder for which `find_obstacle` returns ""; "": count nothing.
    """
    if not model_uri:
        yield
        return
    recorder = InputRecorder(predictor, model_uri, share=1.0)
    try:
        yield
    finally:
        recorder.close()
