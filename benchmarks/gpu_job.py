"""Run complete jobs on a GPU, with Ray Train and MLflow.

Command: `python -m benchmarks.gpu --job`. It takes at most 5 minutes on one GPU.

It runs `accrete run` on a stream of seven tasks of generated images: four methods in parallel on
one GPU, interrupted by SIGTERM and resumed; two ranks that share the GPU; a stage that runs out of
GPU memory; and the first job on the CPU, to compare the accuracy. Rows are stored as in
`benchmarks/gpu_speed.py`. `--device cpu` rehearses all rows except the lack of memory.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks import stream
from benchmarks.gpu_speed import Bench, Row
from pipeline.graph.gpu_use import read_gpu_use
from workers.data import accelerator

TASKS = 7
METHODS = ("finetune", "linear", "individual", "meat")
LOOK_S = 0.1
LITTLE = 0.01  # share of a GPU's memory; too small for a ViT at 224 px with LARGE_BATCH
LARGE_BATCH = 400
REPOSITORY = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class JobSizes:
    """Sizes of a job.

    Attributes:
        backbone: Name of the backbone.
        side: Side of the images in pixels.
        images: Training images per class. A task has two classes.
        epochs: Epochs per task.
        methods: Methods to train.
        tasks: Number of tasks.
        stop_at: Number of finished training stages after which the run gets SIGTERM.
        limit_s: Time limit of a command in seconds.
    """

    backbone: str = "vit_tiny_patch16_224"
    side: int = 64
    images: int = 200
    epochs: int = 5
    methods: tuple[str, ...] = METHODS
    tasks: int = TASKS
    stop_at: int = 10
    limit_s: float = 200.0


REHEARSAL = JobSizes(
    side=32,
    images=4,
    epochs=1,
    methods=("finetune", "linear"),
    tasks=2,
    stop_at=1,
    limit_s=400.0,  # on busy cores Ray alone takes one or two minutes to start
)


class Job:
    """Runs `accrete run` on one stream. Each kind of run has its own storage."""

    def __init__(self, bench: Bench, folder: Path, sizes: JobSizes):
        self.bench = bench
        self.folder = folder
        self.sizes = sizes
        self.has_gpu = accelerator.is_accelerator(bench.device)
        self.card = stream.draw_images(
            folder, 2 * sizes.tasks, sizes.images, 10, sides=(sizes.side,), suffixes=(".jpg",)
        )

    def configure(self, name: str, **changes: Any) -> Path:
        """Write the config of a run, and return its path."""
        sizes = self.sizes
        body = {
            "name": name,
            "storage": str(self.folder / f"storage-{name}"),
            "stream": {"tasks": [{"card": self.card, "name": "t", "split": sizes.tasks}]},
            "backbone": {"name": sizes.backbone, "img_size": sizes.side, "crop_pct": 1.0},
            "data": {"crop": "resized", "flip": 0.5, "val_fraction": 0.0},
            "train": {"epochs": sizes.epochs, "batch_size": 32},
            "methods": {method: {} for method in sizes.methods},
            **changes,
        }
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(body))
        return path

    def start(self, config: Path) -> subprocess.Popen[str]:
        """Start `accrete run` with a config."""
        return subprocess.Popen(
            [sys.executable, "-m", "pipeline", "run", str(config)],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "COLUMNS": "200"},
        )

    def stages(self, name: str, event: str) -> list[str]:
        """Return the training stages with this event in the event log, over all starts of a run."""
        path = self.folder / f"storage-{name}" / "runs" / name / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        recorded = [json.loads(line) for line in lines]
        stages = [entry["stage"] for entry in recorded if entry["event"] == event]
        return [stage for stage in stages if stage.endswith("/train")]

    def wait_for(
        self, name: str, event: str, count: int, running: subprocess.Popen[str]
    ) -> float | None:
        """Wait until `count` training stages have this event, and return the seconds waited.

        Return None if the run succeeds first. On a busy machine, an interrupted run can finish all
        its training before it handles SIGTERM, and the resumed run then trains nothing.

        Raises:
            RuntimeError: If the run fails first.
        """
        began = time.monotonic()
        while True:
            exit_code = running.poll()  # before the events, so that the last ones are seen
            if len(self.stages(name, event)) >= count:
                return time.monotonic() - began
            if exit_code == 0:
                return None
            if exit_code is not None:
                raise RuntimeError(f"it ended with {exit_code}: {read_output(running)[-300:]}")
            time.sleep(LOOK_S)

    def finish(self, running: subprocess.Popen[str]) -> str:
        """Wait for a command and return its output.

        Raises:
            RuntimeError: If the command failed.
        """
        output = read_output(running, self.sizes.limit_s)
        if running.returncode:
            raise RuntimeError(f"it ended with {running.returncode}: {output[-300:]}")
        return output

    def accuracies(self, config: Path) -> Row:
        """Return the average accuracy of each method of a finished run, in percent."""
        out = self.folder / "results.json"
        command = [sys.executable, "-m", "pipeline", "report", str(config), "--json", str(out)]
        subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
        (run,) = json.loads(out.read_text())["runs"]
        return {
            method["label"]: 100 * method["metrics"]["average_accuracy"]
            for method in run["methods"]
        }

    def chains(self) -> Row:
        """Train all methods in parallel, interrupt the run once and resume it."""
        cluster: dict[str, Any] = {"workers": 1, "groups": 1}
        if self.has_gpu:
            cluster = {"workers": 1, "gpus_per_worker": 0.25, "groups": 4}
        config = self.configure("chains", cluster=cluster)
        began = time.monotonic()
        running = self.start(config)
        row: Row = {"first_step_s": self.wait_for("chains", "started", 1, running)}
        self.wait_for("chains", "done", self.sizes.stop_at, running)
        running.send_signal(signal.SIGTERM)
        read_output(running, self.sizes.limit_s)
        row["stopped_with"] = running.returncode
        row["before_s"] = time.monotonic() - began
        num_started = len(self.stages("chains", "started"))
        began = time.monotonic()
        running = self.start(config)
        row["first_step_again_s"] = self.wait_for("chains", "started", num_started + 1, running)
        output = self.finish(running)
        row["after_s"] = time.monotonic() - began
        counts = re.search(r"(\d+) stages run, (\d+) reused", output)
        assert counts is not None, output[-300:]
        row["stages"], row["reused"] = sum(map(int, counts.groups())), int(counts[2])
        for figure in read_gpu_use(str(self.folder / "storage-chains"), "chains"):
            row["busy"] = figure.get("busy", figure.get("reason"))
        return row | self.accuracies(config)

    def on_cpu(self) -> Row:
        """Run the same stream and methods on the CPU in one process."""
        config = self.configure(
            "cpu", cluster={"workers": 0, "cpus_per_worker": os.cpu_count() or 1}
        )
        began = time.monotonic()
        self.finish(self.start(config))
        return {"seconds": time.monotonic() - began} | self.accuracies(config)

    def two_ranks(self) -> Row:
        """Train one method on two ranks that share the GPU."""
        cluster = {"workers": 2, "gpus_per_worker": 0.5 if self.has_gpu else 0, "groups": 1}
        config = self.configure("ranks", cluster=cluster, methods={"finetune": {}})
        began = time.monotonic()
        self.finish(self.start(config))
        return {"seconds": time.monotonic() - began} | self.accuracies(config)

    def out_of_memory(self) -> Row:
        """Run out of GPU memory and return the exit code and the error message."""
        config = self.configure(
            "memory",
            cluster={"workers": 0, "gpus_per_worker": LITTLE, "retries": 0},
            train={"epochs": 1, "batch_size": LARGE_BATCH},
            backbone={"name": self.sizes.backbone, "img_size": 224, "crop_pct": 1.0},
            methods={"finetune": {}},
        )
        running = self.start(config)
        output = read_output(running, self.sizes.limit_s)
        lines = [line for line in output.splitlines() if "memory" in line]
        return {"exit_code": running.returncode, "sentence": lines[0] if lines else output[-300:]}


def read_output(running: subprocess.Popen[str], limit_s: float | None = None) -> str:
    """Wait for a command and return its output; send it SIGTERM after `limit_s`."""
    try:
        return running.communicate(timeout=limit_s)[0]
    except subprocess.TimeoutExpired:
        running.send_signal(signal.SIGTERM)
        return running.communicate()[0]


def measure_all(bench: Bench, folder: Path) -> None:
    """Measure all rows that the bench does not have yet."""
    has_gpu = accelerator.is_accelerator(bench.device)
    job = Job(bench, folder, JobSizes() if has_gpu else REHEARSAL)
    bench.measure("job", "four chains, stopped once", job.chains)
    bench.measure("job", "two ranks on one GPU", job.two_ranks)
    if has_gpu:
        bench.measure("job", "out of memory", job.out_of_memory)
    bench.measure("job", "the same on the CPU", job.on_cpu)
