"""What a trial of a search costs beside its stages, and how many stage runs equal prefixes save.

`python -m benchmarks.search`; about two minutes on Ray Tune. 100 trials of PackNet on two tasks of
four images each, one epoch of one step, a backbone of one block: random points of a space of
twelve, so that trials share a prefix, or all of their stages. `overhead` is the time of the clock,
from the end of the first trial to the end of the last, that no stage took, per trial and place side
by side.
"""

from __future__ import annotations

import io
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path

import yaml

from benchmarks import stream
from benchmarks.harness import Report, start
from pipeline.results.trials import Trial
from pipeline.search import run as search
from pipeline.search import spec

TRIALS = 100
SIDE_BY_SIDE = 2
OVERHEAD_DEMAND = 1.0  # seconds
SPACE = {
    "methods.packnet.prune": {"dist": "choice", "values": [0.4, 0.5, 0.6, 0.7]},
    "methods.packnet.steps.retrain.epochs": {"dist": "choice", "values": [1, 2, 3]},
}


def prepared(folder: Path) -> spec.Search:
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
    asked = {
        "base": "base.yaml",
        "space": SPACE,
        "budget": {"trials": TRIALS},
        "seeds": [],
        "concurrent": SIDE_BY_SIDE,
    }
    (folder / "trials.yaml").write_text(yaml.safe_dump(asked))
    return spec.prepare(str(folder / "trials.yaml"), [], {})


def main() -> None:
    start()
    report = Report()
    ended: list[
        tuple[float, float]
    ] = []  # of each trial: when it was heard to have ended, and the seconds of its stages

    def notify(record: Trial) -> None:
        if record["status"] == "finished" and record["number"] not in said:
            said.add(record["number"])
            ended.append((time.monotonic(), record["device_s"]))

    said: set[int] = set()
    with tempfile.TemporaryDirectory() as folder:
        found = prepared(Path(folder))
        began = time.monotonic()
        with redirect_stdout(io.StringIO()):
            search.run_search(found, "", notify)
        records = found.records()
    report.note("start of Ray, ingest and the first trial, wall", f"{ended[0][0] - began:.1f} s")
    wall, work = ended[-1][0] - ended[0][0], sum(seconds for _, seconds in ended[1:])
    report.below(
        f"{TRIALS} trials: overhead per trial, {SIDE_BY_SIDE} side by side",
        (SIDE_BY_SIDE * wall - work) / (TRIALS - 1),
        OVERHEAD_DEMAND,
    )
    run, reused = (sum(record["stages"][kind] for record in records) for kind in ("run", "reused"))
    points = len({str(sorted(record["params"].items())) for record in records})
    report.note(
        f"{TRIALS} trials of {points} points",
        f"{run} stages run, {reused} found in the store: {reused / (run + reused):.1%} of all "
        "saved",
    )
    report.exit()


if __name__ == "__main__":
    main()
