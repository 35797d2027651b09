"""Print the progress of a run (`Console`) and its final tables (`summary`).

On a terminal, each running stage has a live line: a line at the end of the output, which is
rewritten. Elsewhere only plain lines are printed.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, TextIO

from pipeline.config.text import format_bytes, format_percent, format_seconds, table_text
from pipeline.graph.run import Outcome
from pipeline.graph.stage import Graph
from pipeline.graph.store import Lookup
from pipeline.graph.walk import ENDED, Decision, DecisionKind, Event, EventKind, State, Walk
from pipeline.results.metrics import metrics_for
from pipeline.results.tables import Matrix, Row, RunTables
from workers.storage.secrets import printable

# Seconds without output after which a line is printed. Because of the interval LOOK_S between two
# checks, the line is printed after at most 10 s.
QUIET_S = 9.0
LOOK_S = 1.0  # seconds between two checks whether a line is due
# Maximum width of a live line. A longer line could wrap, and a wrapped line cannot be rewritten. A
# wider matrix is not printed in full.
MAX_COLUMNS = 158
MAX_LIVE_LINES = 12  # lines of running stages; with more stages, the last line counts the others
MAX_TASKS = 20  # rows of the table that replaces a matrix that is too wide
MAX_EVALUATED = 6  # tasks in the result line of an evaluation
MAX_WARNINGS = 20  # printed warnings at the end of a run
# events that end the execution of a stage
ENDS = (EventKind.DONE, EventKind.FAILED, EventKind.LOST, EventKind.MOVED, EventKind.DAMAGED)
CLEAR_LINE = "\r\x1b[2K"
CLEAR_LINE_ABOVE = "\x1b[1A\x1b[2K"


def print_to_stderr(text: str) -> None:
    """Print a line on stderr."""
    print(text, file=sys.stderr, flush=True)


class Activity(NamedTuple):
    """The current activity of a command; `started` is on the monotonic clock."""

    describe: Callable[[], str]
    started: float


class Heartbeat:
    """During an activity, calls `show` if nothing was printed for QUIET_S seconds.

    Args:
        show: Function that prints the activity. It is called in a thread, with the description of
            the activity and the seconds since its start.
    """

    def __init__(self, show: Callable[[str, float], None]):
        self.show = show
        self.printed_at = time.monotonic()
        self.activities: list[Activity] = []  # nested activities, the innermost last

    def touch(self) -> None:
        """Record that a line was printed."""
        self.printed_at = time.monotonic()

    @contextmanager
    def activity(self, describe: Callable[[], str]) -> Iterator[None]:
        """Context manager for an activity with the text of `describe`. Activities can be nested."""
        self.activities.append(Activity(describe, time.monotonic()))
        if len(self.activities) > 1:
            try:
                yield
            finally:
                self.activities.pop()
            return
        ended = threading.Event()
        thread = threading.Thread(target=self._watch, args=(ended,), name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self.activities.pop()

    def _watch(self, ended: threading.Event) -> None:
        while not ended.wait(LOOK_S):
            self.beat()

    def beat(self) -> None:
        """Show the innermost activity if nothing was printed for QUIET_S seconds."""
        now = time.monotonic()
        if now - self.printed_at < QUIET_S:
            return
        activity = self.activities[-1]
        self.show(activity.describe(), now - activity.started)
        self.touch()


@contextmanager
def at_work(
    describe: Callable[[], str], say: Callable[[str], object] = print_to_stderr
) -> Iterator[None]:
    """Context manager that reports an otherwise silent activity every QUIET_S seconds.

    Args:
        describe: Function that returns a description of the activity.
        say: Function that prints a line.
    """

    def show(activity: str, seconds: float) -> None:
        say(f"{activity} ({format_seconds(seconds)} so far)")

    with Heartbeat(show).activity(describe):
        yield


class Console:
    """Prints the progress of a run. It is a `Watcher` of the run.

    Every stage prints a permanent line when it ends. On a terminal, each running stage also has a
    live line. Elsewhere, for example in the log of a CI job, a line is printed after QUIET_S
    seconds without output. It shows the progress of one of the running stages, in turn, or else how
    many stages wait for a worker, or the activity of the command.

    Args:
        graph: Graph of the run.
        lookups: Id of a stage -> its look-up before the run.
        stream: Output; None: stdout.
    """

    def __init__(self, graph: Graph, lookups: dict[str, Lookup], stream: TextIO | None = None):
        self.stream = stream or sys.stdout
        self.is_terminal = self.stream.isatty() and os.environ.get("TERM") != "dumb"
        self.guard = threading.Lock()  # ingest stages report from threads
        self.live: dict[str, str] = {}  # running stage -> its line; "" -> activity of the command
        self.num_drawn = 0  # live lines at the end of the output
        self.total = len(graph)
        self.ended = 0
        self.num_queued = 0  # stages that run or wait for a worker
        self.heartbeat = Heartbeat(self._show_activity)
        self.warnings: dict[str, Sequence[str]] = {}  # finished stage -> its warnings
        for stage_id, lookup in lookups.items():
            if lookup.hit and lookup.manifest:
                self.warnings[stage_id] = lookup.manifest.get("warnings") or []
            if lookup.must_withdraw:
                self.say(f"{stage_id}: {lookup.reason}")

    def activity(self, describe: Callable[[], str]) -> AbstractContextManager[None]:
        """Context manager that prints the text of `describe` after QUIET_S seconds without output.

        Activities can be nested.
        """
        return self.heartbeat.activity(describe)

    def on_decision(self, walk: Walk, decision: Decision) -> None:
        self._count(walk)
        stage = decision.stage
        if decision.kind is not DecisionKind.LAUNCH:
            self._forget(stage)
        reason = decision.reason
        match decision.kind:
            case DecisionKind.BLOCK:
                self.say(f"{stage}: not run, {reason}")
            case DecisionKind.RETRY:
                attempt = f"try {walk.tries[stage] + 1} of {walk.retries + 1}"
                self.say(f"{stage}: {reason}; tried again from its last checkpoint ({attempt})")
            case DecisionKind.MOVE:
                self.say(f"{stage}: {reason}; it continues from there")
            case DecisionKind.RECOMPUTE:
                self.say(f"{stage}: {reason}")
            case DecisionKind.FAIL:
                self.say(f"{stage}: failed: {reason}")
                needed = walk.graph.with_ancestors([stage])
                for earlier in filter(needed.__contains__, walk.graph.stages):
                    for warning in self.warnings.get(earlier, ()):
                        self.say(f"{stage}: warning of {earlier}, which it needs: {warning}")

    def on_event(self, walk: Walk, event: Event) -> None:
        self._count(walk)
        if event.kind in ENDS:
            self._forget(event.stage)
        match event.kind:
            case EventKind.STARTED | EventKind.PROGRESS:
                self.progress(event)
            case EventKind.DONE:
                duration = format_seconds(event.body.get("wall_s", 0.0))
                text = f"{_result_text(event.body)} in {duration}"
                if event.body.get("reused"):
                    text += ", by another process"
                self.say(f"{event.stage}: {text}")
                if event.body.get("note"):
                    self.say(f"{event.stage}: {event.body['note']}")
                self.warnings[event.stage] = event.body.get("warnings") or []
                for warning in self.warnings[event.stage]:
                    self.say(f"{event.stage}: warning: {warning}")

    def progress(self, event: Event) -> None:
        """Show the progress of a stage, or a note about the cluster; ignore other events.

        Executors pass events here that they do not return from `poll`, such as starts of stages.
        """
        if event.kind is EventKind.NOTE:
            self.say(event.message)
        if event.kind not in (EventKind.STARTED, EventKind.PROGRESS):
            return
        text = f"{event.stage} ..."
        if event.kind is EventKind.PROGRESS:
            text = f"{event.stage}: {progress_text(event.body)}"
        self._show_live(event.stage, text)

    def _count(self, walk: Walk) -> None:
        self.ended = walk.count(*ENDED)
        self.num_queued = walk.count(State.RUNNING)

    def _show_activity(self, activity: str, seconds: float) -> None:
        """Print the progress of a running stage, or the command's activity and its duration."""
        with self.guard:
            stage_ids = [stage_id for stage_id in self.live if stage_id]
        if self.is_terminal and stage_ids:
            return
        text = f"{activity} ({format_seconds(seconds)} so far)"
        if self.num_queued and not stage_ids:
            text = f"stages that wait for a worker: {self.num_queued}"
        if self.is_terminal:
            self._show_live("", text)
            return
        if stage_ids:
            with self.guard:
                if stage_ids[0] in self.live:  # the stage has not ended meanwhile
                    text = self.live.pop(stage_ids[0])
                    self.live[stage_ids[0]] = text  # moved to the end: another stage is next
        self.say(text)

    def say(self, text: str) -> None:
        """Print a permanent line, above the live lines."""
        text = " ".join(text.splitlines())
        line = f"[{self.ended}/{self.total}] {printable(text)}"
        with self.guard:
            self.live.pop("", None)
            erased = self._erase()
            live = self._live_block()
            print(f"{erased}{line}\n{live}", end="", file=self.stream, flush=True)
            self.heartbeat.touch()

    def _show_live(self, stage_id: str, text: str) -> None:
        """Store the line of a running stage, and show it if the output is a terminal."""
        with self.guard:
            self.live.pop("", None)
            self.live[stage_id] = printable(" ".join(text.splitlines()))
            if not self.is_terminal:
                return
            erased = self._erase()
            print(f"{erased}{self._live_block()}", end="", file=self.stream, flush=True)

    def _forget(self, stage_id: str) -> None:
        """Remove the line of an ended stage. It disappears when the next line is printed."""
        with self.guard:
            self.live.pop(stage_id, None)

    def _erase(self) -> str:
        """Return the control sequence that moves to the start of the live lines and clears them."""
        if not self.is_terminal:
            return ""
        return CLEAR_LINE + CLEAR_LINE_ABOVE * max(0, self.num_drawn - 1)

    def _live_block(self) -> str:
        """Return the live lines, cut to the width of the terminal.

        They are cut because a wrapped line cannot be rewritten.
        """
        texts = list(self.live.values())
        self.num_drawn = min(len(texts), MAX_LIVE_LINES)
        if not self.is_terminal or not texts:
            return ""
        if len(texts) > MAX_LIVE_LINES:
            num_hidden = len(texts) - MAX_LIVE_LINES + 1
            texts = [*texts[: MAX_LIVE_LINES - 1], f"and {num_hidden} more stages run"]
        columns = get_output_columns()
        return "\n".join(f"[{self.ended}/{self.total}] {text}"[:columns] for text in texts)


def get_output_columns() -> int:
    """Return the maximum number of characters in a line that does not wrap."""
    terminal = shutil.get_terminal_size((MAX_COLUMNS + 1, 24))
    return min(MAX_COLUMNS, terminal.columns - 1)


def progress_text(body: Mapping[str, Any]) -> str:
    """Format the progress of a stage.

    Args:
        body: Body of a PROGRESS event from the worker. Its entries depend on the kind of stage.
    """
    if "waiting_for" in body:
        return f"waits for {body['waiting_for']}"
    if "doing" in body:  # ingest
        images = str(body.get("images", 0))
        if body.get("of"):
            images += f"/{body['of']}"
        speed = ""
        if "left_s" in body:
            left = format_seconds(body["left_s"])
            speed = f", {body['images_per_s']:.0f} images/s, {left} left"
        return f"{body['doing']} {images} images{speed}"
    if "epoch" not in body:  # evaluate
        return f"{body.get('task', '')} {body.get('done', 0)}/{body.get('of', 1)}"
    validation = ""
    if body.get("accuracy") is not None:
        validation = f", validation {body['accuracy']:.3f}"
    return (
        f"epoch {body['epoch']}/{body['epochs']}, loss {body['loss']:.4f}{validation}, "
        f"{body['images_per_s']:.0f} images/s, {format_seconds(body['left_s'])} left"
    )


def _result_text(manifest: dict[str, Any]) -> str:
    """Describe the result of a stage briefly; "done" for kinds without a description."""
    match manifest.get("kind"):
        case "evaluate":
            rows = manifest["result"]["rows"]
            return _accuracies_text(rows)
        case "train":
            task_bytes = sum(manifest["sizes"].values())
            return f"trained, {format_bytes(task_bytes)} for the task"
        case "ingest":
            counts = manifest["counts"].items()
            return ", ".join(f"{images} {split}" for split, images in counts)
        case "backbone":
            return f"backbone of {manifest['parameters']:,} parameters"
        case "features":
            return f"features of {manifest['images']:,} images"
    return "done"


def _accuracies_text(rows: Sequence[Row]) -> str:
    """Format the accuracy on each task; for many tasks, only their mean and the last accuracy."""
    accuracies = [row["correct"] / row["total"] for row in rows]
    if len(rows) <= MAX_EVALUATED:
        pairs = zip(rows, accuracies, strict=True)
        return ", ".join(f"{row['task']} {accuracy:.3f}" for row, accuracy in pairs)
    mean = sum(accuracies) / len(accuracies)
    return f"mean of {len(rows)} tasks {mean:.3f}, {rows[-1]['task']} {accuracies[-1]:.3f}"


def summary(tables: RunTables, outcome: Outcome, links: Sequence[str]) -> str:
    """Format the final output of a run: matrices, metrics, warnings, and links."""
    lines: list[str] = []
    for label in tables.labels:
        lines += ["", matrix_text(tables, label)]
    metrics = metrics_for("console")
    heading = ["method", *(metric.plain_heading or metric.title for metric in metrics)]
    rows = []
    for row in tables.summary(with_classes=False):
        cells = [_format_metric(row.get(metric.name), metric.unit) for metric in metrics]
        rows.append([row["label"], *cells])
    lines += ["", table_text(heading, rows)]
    lines += warning_lines(tables.warnings())
    lines += ["", *ending(outcome, links)]
    return "\n".join(lines)


def warning_lines(rows: Sequence[Row]) -> list[str]:
    """Return an empty line and the first warnings; an empty list without warnings."""
    if not rows:
        return []
    first = rows[:MAX_WARNINGS]
    lines = ["", *(f"warning: {row['stage']}: {row['warning']}" for row in first)]
    if len(rows) > len(first):
        lines.append(f"{len(rows) - len(first)} more warnings: the report lists them")
    return lines


def ending(outcome: Outcome, links: Sequence[str]) -> list[str]:
    """Return the last lines of a run: number of executed stages, and links."""
    duration = format_seconds(outcome.seconds)
    if outcome.ran == 0:
        text = f"nothing to do: all {outcome.reused} stage results are up to date ({duration})"
    else:
        text = f"{outcome.ran} stages run, {outcome.reused} reused, {duration}"
    if outcome.left_out:
        text += f"; {len(outcome.left_out)} missing stages were not selected"
    return [text, *links]


def matrix_text(tables: RunTables, label: str) -> str:
    """Format the accuracy matrix of one method in per cent.

    A row is the state after learning a task, a column is the tested task. A dot is a missing entry.
    If the matrix is too wide for the output, only its diagonal and its last row are shown. For more
    than MAX_TASKS tasks, the text only refers to the report.
    """
    matrix = tables.matrix(label)
    width = 1 + max([len("test images"), *map(len, matrix.tasks)])
    if width * (1 + len(matrix.tasks)) > get_output_columns():
        return _narrow_matrix_text(matrix)
    lines = [
        f"{label}: accuracy in %, row = after task, column = on task",
        "".join(name.rjust(width) for name in ("", *matrix.tasks)),
    ]
    for task, rates in zip(matrix.tasks, matrix.rates.tolist(), strict=True):
        line = task.rjust(width)
        for rate in rates:
            line += _cell_text(rate).rjust(width)
        lines.append(line)
    chances = list(map(_cell_text, matrix.chance[-1:].flat))
    images = ["." if count is None else str(count) for count in matrix.test_images]
    for name, cells in (("chance", chances), ("test images", images)):
        lines.append("".join(cell.rjust(width) for cell in (name, *cells)))
    return "\n".join(lines)


def _narrow_matrix_text(matrix: Matrix) -> str:
    """Return a line per task: its accuracy when learned, and after the last finished task."""
    count = len(matrix.tasks)
    if count > MAX_TASKS:
        return f"{matrix.label}: the report has the accuracy matrix of its {count} tasks"
    last_row = max(matrix.finished - 1, 0)
    rows = []
    for index, task in enumerate(matrix.tasks):
        cells = [matrix.rates[index, index], matrix.rates[last_row, index]]
        cells += matrix.chance[-1:, index].tolist()
        images = matrix.test_images[index]
        rows.append([task, *map(_cell_text, cells), "." if images is None else str(images)])
    heading = ["task", "when learned", f"after {matrix.tasks[last_row]}"]
    if matrix.chance.size:
        heading.append("chance")
    heading.append("test images")
    return f"{matrix.label}: accuracy in %\n{table_text(heading, rows)}"


def _cell_text(rate: float) -> str:
    return "." if math.isnan(rate) else f"{100 * rate:.1f}"


def _format_metric(value: float | None, unit: str) -> str:
    """Format a metric value in its unit; `-` for a missing value."""
    if unit == "rate":
        return format_percent(value)
    if unit == "bytes":
        return format_bytes(value)
    if value is None or math.isnan(value):
        return "-"
    return format(value, ".2f" if unit == "times" else ",")
