"""What a person sees while a run goes on and at its end: one live line on a terminal, plain lines
everywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO

from pipeline.graph.run import Outcome
from pipeline.graph.stage import Graph
from pipeline.graph.store import Lookup
from pipeline.graph.walk import ENDED, Decision, DecisionKind, Event, EventKind, Walk
from pipeline.results.tables import RunTables
from workers.storage.secrets import redact

QUIET_S = 30.0  # where output is not a terminal: seconds between two progress lines of a stage


class Console:
    """Watches a walk. On a terminal the last line is rewritten; elsewhere a stage prints when it
    ends, and rarely between."""

    def __init__(self, graph: Graph, lookups: dict[str, Lookup], stream: TextIO | None = None):
        self.stream = stream or sys.stdout
        self.live = self.stream.isatty()
        self.total = len(graph)
        self.done = 0
        self.said: dict[str, float] = {}
        for stage_id, lookup in lookups.items():
            if lookup.damaged:
                self.say(f"{stage_id}: {lookup.reason}")

    def decision(self, walk: Walk, decision: Decision) -> None:
        self.done = walk.count(*ENDED)
        text = f"{decision.stage}: {decision.reason}"
        match decision.kind:
            case DecisionKind.LAUNCH:
                self._live(f"{decision.stage} ...")
            case DecisionKind.BLOCK:
                self.say(f"{decision.stage}: not run, {decision.reason}")
            case DecisionKind.RETRY:
                count = f"try {walk.tries[decision.stage] + 1} of {walk.retries + 1}"
                self.say(f"{text}; tried again from its last checkpoint ({count})")
            case DecisionKind.MOVE:
                self.say(f"{text}; it goes on from there")
            case DecisionKind.RECOMPUTE:
                self.say(text)
            case DecisionKind.FAIL:
                self.say(f"{decision.stage}: failed: {decision.reason}")

    def event(self, walk: Walk, event: Event) -> None:
        self.done = walk.count(*ENDED)
        match event.kind:
            case EventKind.PROGRESS:
                self.progress(event)
            case EventKind.DONE:
                seconds = _seconds(event.body.get("wall_s", 0.0))
                self.say(f"{event.stage}: {_gist(event.body)} in {seconds}")
                if event.body.get("note"):
                    self.say(f"{event.stage}: {event.body['note']}")

    def progress(self, event: Event) -> None:
        """Show how far a stage is, or a note about the cluster."""
        if event.kind is EventKind.NOTE:
            self.say(event.message)
            return
        text = f"{event.stage}: {_progress(event.body)}"
        if self.live:
            self._live(text)
            return
        now = time.monotonic()
        if now - self.said.setdefault(event.stage, now) > QUIET_S:
            self.said[event.stage] = now
            self.say(text)

    def say(self, text: str) -> None:
        """One line of its own."""
        print(
            f"{self._clear()}[{self.done}/{self.total}] {redact(text)}",
            file=self.stream,
            flush=True,
        )

    def _live(self, text: str) -> None:
        if self.live:
            print(
                f"{self._clear()}[{self.done}/{self.total}] {text}"[:158],
                end="",
                file=self.stream,
                flush=True,
            )

    def _clear(self) -> str:
        return "\r\x1b[2K" if self.live else ""


def _progress(body: dict[str, Any]) -> str:
    if "doing" in body:
        return (
            f"{body['doing']} {body.get('images', 0)}"
            + (f"/{body['of']}" if body.get("of") else "")
            + " images"
        )
    if "epoch" not in body:
        return f"{body.get('task', '')} {body.get('done', 0)}/{body.get('of', 1)}"
    accuracy = f", validation {body['accuracy']:.3f}" if body.get("accuracy") is not None else ""
    return (
        f"epoch {body['epoch']}/{body['epochs']}, loss {body['loss']:.4f}{accuracy}, "
        f"{body['images_per_s']:.0f} images/s, {_seconds(body['left_s'])} left"
    )


def _gist(manifest: dict[str, Any]) -> str:
    """What came out of a stage, in a few words."""
    kind = manifest.get("kind")
    if kind == "evaluate":
        return ", ".join(
            f"{r['task']} {r['correct'] / r['total']:.3f}" for r in manifest["result"]["rows"]
        )
    if kind == "train":
        return f"trained, {_bytes(sum(manifest['sizes'].values()))} for the task"
    if kind == "ingest":
        return ", ".join(f"{n} {split}" for split, n in manifest["counts"].items())
    if kind == "backbone":
        return f"backbone of {manifest['parameters']:,} parameters"
    return "done"


def summary(tables: RunTables, outcome: Outcome, links: Sequence[str]) -> str:
    """The end of a run: matrices, forgetting, sizes, and where to look."""
    lines: list[str] = []
    for label in tables.labels:
        lines += ["", matrix_text(tables, label)]
    lines += [
        "",
        table_text(
            [
                "method",
                "average accuracy",
                "forgetting",
                "bytes per task",
                "all bytes / backbone",
                "trained parameters",
            ],
            [
                [
                    row["label"],
                    _rate(row.get("average_accuracy")),
                    _rate(row.get("forgetting")),
                    _bytes(row.get("bytes_per_task")),
                    _number(row.get("growth"), ".2f"),
                    _number(row.get("trained_parameters"), ","),
                ]
                for row in tables.summary()
            ],
        ),
    ]
    warnings = tables.warnings()
    lines += [""] + [f"warning: {w['stage']}: {w['warning']}" for w in warnings] if warnings else []
    if outcome.ran == 0:
        lines += [
            "",
            f"nothing to do: all {outcome.reused} stage results stand, no stage was run "
            f"({_seconds(outcome.seconds)})",
        ]
    else:
        lines += [
            "",
            f"{outcome.ran} stages run, {outcome.reused} reused, {_seconds(outcome.seconds)}",
        ]
    return "\n".join([*lines, *links])


def matrix_text(tables: RunTables, label: str) -> str:
    """R of one method: rows = after task, columns = on task, in per cent."""
    matrix = tables.matrix(label)
    width = max(6, *(len(t) for t in matrix.tasks)) + 1
    head = f"{label}: accuracy in %, row = after task, column = on task"
    lines = [head, " " * width + "".join(f"{t:>{width}}" for t in matrix.tasks)]
    for name, row in zip(matrix.tasks, matrix.rates, strict=True):
        lines.append(
            f"{name:>{width}}"
            + "".join(f"{'.' if v != v else f'{100 * v:.1f}':>{width}}" for v in row.tolist())
        )
    return "\n".join(lines)


def table_text(head: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(r[i]) for r in [head, *rows]) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            f"{cell:<{w}}" if i == 0 else f"{cell:>{w}}"
            for i, (cell, w) in enumerate(zip(r, widths, strict=True))
        )
        for r in [head, *rows]
    )


def _rate(value: Any) -> str:
    return "-" if value is None or value != value else f"{100 * value:z.2f} %"


def _number(value: Any, spec: str) -> str:
    return "-" if value is None or value != value else format(value, spec)


def _bytes(value: Any) -> str:
    if value is None or value != value:
        return "-"
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.0f} B"


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 60 else f"{int(value // 60)} min {int(value % 60):02d} s"
