"""Measure the overhead of a search trial, and the stage runs saved by shared prefixes.

Command: `python -m benchmarks.search`. It takes about two minutes on Ray Tune, with 100 trials of
PackNet on two small tasks, one epoch, and a backbone of one block. Trials are random points of a
space of twelve points, so many trials share some or all of their stages.

The overhead is the time without running stages between the end of the first and of the last trial:
SIDE_BY_SIDE times the wall time, minus the seconds of all stages, per trial.
"""

from __future__ import annotations

import io
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import NamedTuple

import yaml

from benchmarks import stream
from benchmarks.harness import Report, start
from pipeline.results.trials import Trial
from pipeline.search import run as search
from pipeline.search import spec
from pipeline.search.screen import SearchScreen

TRIALS = 100
SIDE_BY_SIDE = 2
OVERHEAD_DEMAND = 1.0  # seconds
SPACE = {
    "methods.packnet.prune": {"dist": "choice", "values": [0.4, 0.5, 0.6, 0.7]},
    "methods.packnet.steps.retrain.epochs": {"dist": "choice", "values": [1, 2, 3]},
}


def prepare(folder: Path) -> spec.Search:
    """Write a base config and a search file into a folder, and prepare the search."""
    card = stream.draw_images(folder, 4, train=8, test=2, sides=(16,))
    body = {
        "name": "base",
        "storage": str(folder / "storage"),
        "tracking": False,
        "stream": {"tasks": [{"card": card, "split": 2}]},
        "backbone": stream.tiny(),
        "train": {"epochs": 1},
        "data": {"val_fraction": 0.4},
        "methods": {"packnet": {}},
        "cluster": {"loader_workers": 1},
    }
    (folder / "base.yaml").write_text(yaml.safe_dump(body))
    search_body = {
        "base": "base.yaml",
        "space": SPACE,
        "budget": {"trials": TRIALS},
        "seeds": [],
        "concurrent": SIDE_BY_SIDE,
    }
    (folder / "trials.yaml").write_text(yaml.safe_dump(search_body))
    return spec.prepare_search(str(folder / "trials.yaml"), [])


class EndedTrial(NamedTuple):
    """A finished trial."""

    at: float  # time of the report, by the monotonic clock
    stages_s: float  # seconds of the stages


def main() -> None:
    """Run a search and report its overhead and the stages that trials share."""
    start()
    report = Report()
    ended: dict[int, EndedTrial] = {}  # by trial number, in the order in which they ended

    def notify(record: Trial) -> None:
        if record["status"] == "finished" and record["number"] not in ended:
            ended[record["number"]] = EndedTrial(time.monotonic(), record["device_s"])

    with tempfile.TemporaryDirectory() as folder:
        prepared = prepare(Path(folder))
        began = time.monotonic()
        with redirect_stdout(io.StringIO()):
            search.run_search(prepared, "", notify, SearchScreen(prepared))
        records = prepared.records()
    first, *further = ended.values()
    report.note("start of Ray, ingest and the first trial, wall", f"{first.at - began:.1f} s")
    wall = further[-1].at - first.at
    work = sum(trial.stages_s for trial in further)
    report.below(
        f"{TRIALS} trials: overhead per trial, {SIDE_BY_SIDE} side by side",
        (SIDE_BY_SIDE * wall - work) / (TRIALS - 1),
        OVERHEAD_DEMAND,
    )
    run = sum(record["stages"]["run"] for record in records)
    reused = sum(record["stages"]["reused"] for record in records)
    points = len({str(sorted(record["params"].items())) for record in records})
    report.note(
        f"{TRIALS} trials of {points} points",
        f"{run} stages run, {reused} found in the store: {reused / (run + reused):.1%} of all "
        "saved",
    )
    report.exit()


if __name__ == "__main__":
    main()
