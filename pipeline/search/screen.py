"""Print the progress of a search: one line per ended trial, and a summary of the winner."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TextIO

from pipeline.config.text import format_count, format_seconds, plural
from pipeline.graph.stage import Graph
from pipeline.graph.store import Lookup
from pipeline.results.trials import SeedTest, Trial, gpu_hours
from pipeline.search.spec import Search
from pipeline.shell.console import Console, Heartbeat
from workers.storage.secrets import printable

MAX_TRIALS = 4  # maximum number of trials in a line about running trials


class SearchScreen:
    """Prints a line for each ended trial, and formats the texts for the start and end of a search.

    Inside the context `activity`, a line shows the progress if there was no output for a while.

    Args:
        search: The search.
        stream: Output stream of the search and its runs. Default: standard output.
    """

    def __init__(self, search: Search, stream: TextIO | None = None):
        self.search = search
        self.stream = stream or sys.stdout
        self.printed: set[int] = set()  # numbers of printed trials
        self.records: dict[int, Trial] = {record["number"]: record for record in search.records()}
        self.heartbeat = Heartbeat(self._show_activity)

    def __call__(self, record: Trial) -> None:
        """Remember the record of a trial, and print a line if the trial has ended.

        A trial is printed only once.
        """
        number = record["number"]
        self.records[number] = record
        if record["status"] == "running" or number in self.printed:
            return
        self.printed.add(number)
        score = "no result"
        if record["results"]:
            last = record["results"][-1]
            learned = f"{last['position'] + 1} of {len(self.search.tasks)} tasks"
            score = f"{100 * last['accuracy']:.2f} % after {learned}"
        end = ""
        if record["status"] == "stopped":
            end = ", stopped early"
            if record["message"]:
                end += f": {record['message']}"
        elif record["status"] == "failed":
            end = f", failed: {record['message']}"
        phase = f"{record['phase']}, " if record["phase"] else ""
        stages = f"{record['stages']['run']} stages run, {record['stages']['reused']} reused"
        self.say(
            f"{phase}trial {number}: {point_text(record['params'])}: {score}{end}; "
            f"{stages}, {record['device_s']:.0f} s"
        )

    def say(self, text: str) -> None:
        """Print a text of one or several lines."""
        print(printable(text), file=self.stream, flush=True)
        self.heartbeat.touch()

    def activity(self, describe: Callable[[], str]) -> AbstractContextManager[None]:
        """Context manager that prints the text of `describe` after a while without output."""
        return self.heartbeat.activity(describe)

    def _show_activity(self, activity: str, seconds: float) -> None:
        self.say(f"{activity} ({format_seconds(seconds)} so far)")

    def describe(self) -> str:
        """Describe the number of ended trials and the progress of running trials."""
        # a copy, because the thread of the heartbeat calls this while records are added
        records = sorted(self.records.copy().values(), key=lambda record: record["number"])
        statuses = [record["status"] for record in records]
        num_ended = len(statuses) - statuses.count("running")
        text = f"trials: {num_ended} ended"
        learned = []
        for record in records:
            if record["status"] == "running" and record["results"]:
                num_learned = record["results"][-1]["position"] + 1
                tasks = f"{num_learned} of {len(self.search.tasks)} tasks"
                learned.append(f"trial {record['number']} has learned {tasks}")
        if len(learned) > MAX_TRIALS:
            learned = [*learned[:MAX_TRIALS], f"and {len(learned) - MAX_TRIALS} more"]
        return ", ".join([text, *learned])

    def open_console(self, graph: Graph, lookups: dict[str, Lookup]) -> Console:
        """Create the console for a run of the search. It has the same output stream."""
        return Console(graph, lookups, self.stream)

    def head(self) -> str:
        """Describe the search, and the trials known from earlier sessions and a warm start."""
        settings = self.search.settings
        text = f"search {self.search.name}: {settings.algorithm}"
        if settings.scheduler != "none":
            text += f" with {settings.scheduler}"
        text += f", protocol {settings.protocol}, "
        if settings.algorithm == "grid":
            text += f"{len(self.search.space.grid())} points"
        else:
            bounds = settings.budget.model_dump(exclude_none=True).items()
            texts = [f"{value:g} {name}" for name, value in bounds]
            text += f"budget {', '.join(texts)}".replace("gpu_hours", "GPU-hours")
        text += f", judged on validation images of {len(self.search.tasks)} tasks"
        known = len(self.search.records())
        if known:
            text += f"; {format_count(known, 'trial')} known from before"
        warm_start = self.search.warm_start
        if warm_start is not None:
            points = format_count(len(warm_start.points), "point")
            text += f"; {points} of search {warm_start.search} first"
            if settings.algorithm == "tpe":
                text += f", {len(warm_start.observations)} of its other trials known to tpe"
        if self.search.note:
            text += f"\nnote: {self.search.note}"
        return text

    def announce_winner(self, trial: int, path: str) -> str:
        """Describe the totals and the winner.

        Args:
            trial: Number of the winner.
            path: Path of the winner's config.
        """
        records = self.search.records()
        run = sum(record["stages"]["run"] for record in records)
        reused = sum(record["stages"]["reused"] for record in records)
        hours = sum(record["device_s"] for record in records) / 3600
        gpu_text = ""
        if gpu_hours(records):
            gpu_text = f", {gpu_hours(records):.3f} GPU-hours"
        winner = next(record for record in records if record["number"] == trial)
        accuracy = winner["results"][-1]["accuracy"]
        return (
            f"\n{len(records)} trials, {run} stages run, {reused} reused, {hours:.3f} "
            f"device-hours{gpu_text}\n"
            f"winner: trial {trial}, {point_text(winner['params'])}: "
            f"{100 * accuracy:.2f} % on validation images\n"
            f"its config: {path}"
        )

    def describe_tests(self, tests: Sequence[SeedTest]) -> str:
        """Describe the winner's accuracy on test data: mean and deviation, and value per seed."""
        if not tests:
            return "no seeds, so the winner was not measured on test data"
        rates = [100 * test["average_accuracy"] for test in tests]
        spread = f" +- {statistics.stdev(rates):.2f}" if len(rates) > 1 else ""
        seeds = ", ".join(str(test["seed"]) for test in tests)
        rates_text = ", ".join(f"{rate:.2f}" for rate in rates)
        return (
            "\nwinner on test data, which the search has not seen: "
            f"{statistics.mean(rates):.2f}{spread} % average accuracy with "
            f"seed{plural(len(rates))} {seeds} ({rates_text})"
        )


def point_text(params: Mapping[str, Any]) -> str:
    """Format a point of the space in one line.

    The prefix `methods.LABEL.` of keys is left out. Floats have four significant digits. A point
    without parameters is `the base`: the base config as it is.
    """
    parts = []
    for key, value in params.items():
        if key.startswith("methods."):
            label = key.split(".")[1]
            key = key.removeprefix(f"methods.{label}.")
        text = f"{value:.4g}" if isinstance(value, float) else str(value)
        parts.append(f"{key}={text}")
    return ", ".join(parts) or "the base"
