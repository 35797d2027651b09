"""Compare updates of a growing data set over four months with runs from scratch.

Command: `python -m benchmarks.growing [--methods meat ewc]`. It takes about ten minutes. The data
are handwritten digits in class folders:

1. Five classes in two tasks are trained and written to a model folder.
2. Two new classes are added (`accrete add`).
3. A hundred new images of an old class are added, and three images are moved from the folder of a
   wrong class to the right one (`accrete add`).
4. A class is removed (`accrete remove`).

Each row shows the number of stages run, the number of decoded images and the CPU seconds of the
month's command and of a run from scratch on the same data. All results must be equal.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from PIL import Image

import pipeline
from pipeline import cli
from pipeline.app import runs as app
from pipeline.data.image_checks import check_image
from workers.storage.artifact import Artifact, compute_content_digest

SCENARIOS = {"meat": "task", "lora": "task", "linear": "task", "icarl": "class", "ewc": "task"}
MONTHS = ("five classes", "two new classes", "100 images, 3 labels", "a class removed")
CARD = """\
name: digits
source: {format: folder, path: raw, splits: {train: .}}
licence: CC BY 4.0
classes: from_source
num_classes: 5
test_fraction: 0.2
hold_out: threshold   # an image keeps its side
"""
CONFIG = """\
name: story
seed: 1
storage: STORAGE
tracking: off
stream:
  scenario: SCENARIO
  tasks:
    - {name: first, card: card.yaml, classes: ['0', '1'], role: base}
    - {name: second, card: card.yaml, classes: ['2', '3', '4']}
backbone:
  img_size: 16
  crop_pct: 1.0
  options: {patch_size: 4, embed_dim: 64, depth: 3, num_heads: 4}
train: {epochs: EPOCHS, batch_size: 32}
methods: {METHOD: {}}
cluster: {workers: 0, checkpoint_s: 0, loader_workers: 0, cpus_per_worker: 1}
"""
WRONG = 3  # images of digit 2 that are in the folder of digit 4 until month 3


@dataclass(frozen=True)
class Cost:
    """Cost of the commands of a month.

    Attributes:
        ran: Number of computed stages, without the report.
        stages: Number of all stages, without the report.
        decoded: Number of decoded images.
        cpu_s: CPU seconds of this process.
    """

    ran: int
    stages: int
    decoded: int
    cpu_s: float


@dataclass(frozen=True)
class Row:
    """Costs of a month.

    Attributes:
        month: Number of the month, from 1.
        grown: Cost of the month's commands.
        scratch: Cost of a run from scratch on the same data.
        is_equal: Whether all results equal those of the run from scratch.
    """

    month: int
    grown: Cost
    scratch: Cost
    is_equal: bool


class Story:
    """A run of one method with growing data, in its own folder.

    Args:
        folder: A new folder.
        method: Name of the method.
        epochs: Epochs per task.
    """

    def __init__(self, folder: Path, method: str, epochs: int = 12):
        self.folder = folder
        self.method = method
        self.raw = folder / "raw"
        self.config = folder / "story.yaml"
        self.model = folder / "model"
        folder.mkdir(parents=True)
        text = CONFIG.replace("SCENARIO", SCENARIOS[method]).replace("METHOD", method)
        text = text.replace("EPOCHS", str(epochs)).replace("STORAGE", str(folder / "storage"))
        self.config.write_text(text)
        (folder / "card.yaml").write_text(CARD)

    def put(self, digit: int, first: int, count: int, folder: str = "") -> None:
        """Write images of a digit to its class folder, or to another folder."""
        from sklearn.datasets import load_digits

        digits = load_digits()
        rows = np.flatnonzero(digits.target == digit)[first : first + count]
        target = self.raw / (folder or str(digit))
        target.mkdir(parents=True, exist_ok=True)
        for row in rows:
            pixels = (digits.images[row] * 255 / 16).round().astype(np.uint8)
            Image.fromarray(pixels).save(target / f"{row:05d}.png")

    def change_data(self, month: int) -> None:
        """Change the image folder to the data of a month."""
        if month == 1:
            for digit in range(5):
                self.put(digit, WRONG if digit == 2 else 0, 70)
            self.put(2, 0, WRONG, "4")
        elif month == 2:
            for digit in (5, 6):
                self.put(digit, 0, 70)
        elif month == 3:
            self.put(3, 70, 100)
            for path in sorted(self.raw.glob("4/*.png")):
                if is_digit(path, 2):
                    path.rename(self.raw / "2" / path.name)

    def commands(self, month: int) -> list[list[str]]:
        """Return the command lines of a month."""
        config, model = str(self.config), str(self.model)
        if month == 1:
            return [["run", config], ["bundle", config, "--out", model]]
        if month == 4:
            return [["remove", config, "--class", "4", "--model", model, "--yes"]]
        return [["add", config, str(self.raw), "--model", model, "--max-drop", "100"]]

    def live(self, month: int) -> Cost:
        """Change the data and run the commands of a month."""
        self.change_data(month)
        return self._measure(self.config, self.commands(month))

    def from_scratch(self) -> tuple[Cost, bool]:
        """Run the config in a new storage. Return its cost and whether all results are equal."""
        path = self.folder / "scratch.yaml"
        storage = self.folder / "scratch"
        shutil.rmtree(storage, ignore_errors=True)
        text = self.config.read_text()
        path.write_text(text.replace(str(self.folder / "storage"), str(storage)))
        cost = self._measure(path, [["run", str(path)]])
        return cost, read_contents(path) == read_contents(self.config)

    def served(self) -> list[str]:
        """Return the tasks that the model folder serves."""
        return pipeline.open_model(self.model).tasks

    def classes(self, task: str) -> tuple[str, ...]:
        """Return the classes of a task in the model folder."""
        return pipeline.open_model(self.model).classes(task)

    def attempts(self) -> dict[str, str]:
        """Return stage -> URI of the published result, or {} before the first run."""
        if not (self.folder / "storage").exists():
            return {}
        return {name: artifact.uri("") for name, artifact in read_artifacts(self.config).items()}

    def _measure(self, config: Path, commands: Sequence[Sequence[str]]) -> Cost:
        storage = self.folder / ("storage" if config == self.config else "scratch")
        before = set(storage.glob("stages/*/*/"))
        with counting_decodes() as count_decodes:
            began = time.process_time()
            for words in commands:
                call(words)
            cpu_s = time.process_time() - began
        attempts = {artifact.uri("") for artifact in read_artifacts(config).values()}
        known = {f"{path}/" for path in before}
        return Cost(len(attempts - known), len(attempts), count_decodes(), cpu_s)


def is_digit(path: Path, digit: int) -> bool:
    """Return whether an image shows a digit. The file name contains the row in the data set."""
    from sklearn.datasets import load_digits

    return int(load_digits().target[int(path.stem)]) == digit


@contextlib.contextmanager
def counting_decodes() -> Iterator[Callable[[], int]]:
    """Context manager that yields a function for the number of images decoded by ingest so far."""
    with mock.patch("pipeline.data.packs.check_image", wraps=check_image) as counting:
        yield lambda: counting.call_count


def call(words: Sequence[str]) -> str:
    """Run a command in this process and return its output."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = cli.main([*words])
    if code:
        raise SystemExit(f"accrete {' '.join(words)}: exit code {code}\n{output.getvalue()}")
    return output.getvalue()


def read_artifacts(config: Path) -> dict[str, Artifact]:
    """Return stage -> its artifact, without the report."""
    run = app.prepare(str(config))
    return {
        stage.id: Artifact.need(run.store.root, stage.key)
        for stage in run.graph
        if stage.id != "report"
    }


def read_contents(config: Path) -> dict[str, str]:
    """Return stage -> digest of the result."""
    artifacts = read_artifacts(config)
    return {
        stage: compute_content_digest(artifact.manifest) for stage, artifact in artifacts.items()
    }


def tell(folder: Path, method: str) -> Iterator[Row]:
    """Run all months with a method, and yield a row per month."""
    story = Story(folder, method)
    for month in range(1, len(MONTHS) + 1):
        grown = story.live(month)
        scratch, is_equal = story.from_scratch()
        yield Row(month, grown, scratch, is_equal)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--methods", nargs="+", default=[*SCENARIOS], choices=[*SCENARIOS])
    methods = parser.parse_args().methods
    torch.set_num_threads(1)
    print("| method | month | stages run | images decoded | CPU seconds | results |")
    print("|---|---|---|---|---|---|")
    unequal: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for method in methods:
            for row in tell(Path(folder) / method, method):
                grown, scratch = row.grown, row.scratch
                print(
                    f"| {method} | {row.month} {MONTHS[row.month - 1]} "
                    f"| {grown.ran} of {scratch.ran} | {grown.decoded} of {scratch.decoded} "
                    f"| {grown.cpu_s:.1f} against {scratch.cpu_s:.1f} "
                    f"| {'equal' if row.is_equal else 'DIFFERENT'} |",
                    flush=True,
                )
                if not row.is_equal:
                    unequal.append(f"{method}, month {row.month}")
    if unequal:
        sys.exit(f"MISS  results differ from those of a run from scratch: {'; '.join(unequal)}")
    print("ok    all results equal those of a run from scratch")


if __name__ == "__main__":
    main()
