"""Helpers for runs of a few seconds on handwritten digits.

They make cards and configs, run the command line in separate processes, and collect the results
that must be equal after an interruption.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import multiprocessing
import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterable, Mapping
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import yaml
from PIL import Image

PRELOAD = [
    "torch",
    "timm",
    "sklearn.datasets",
    "matplotlib.figure",
    "pipeline.cli",
    "pipeline.graph.build",
    "pipeline.launch.executor",
    "pipeline.shell.console",
    "pipeline.tracking.recorder",
    "pipeline.report.page",
    "tests.small_run",
]
BACKBONE: dict[str, Any] = {
    "img_size": 16,
    "crop_pct": 1.0,
    "options": {"patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2},
}
TASKS = {"base": "01", "a": "23", "b": "45", "c": "67"}


@functools.cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    """Return scikit-learn's digits: images (n, 8, 8) as uint8, and labels (n,)."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return (data.images * 255 / 16).round().astype(np.uint8), data.target


def make_card(
    folder: Path, name: str, classes: Iterable[str], train: int = 20, test: int = 10, **card: Any
) -> str:
    """Write images of some digits below `folder`, and a card for them. Return the card's path."""
    images, labels = digits()
    for label in classes:
        rows = np.flatnonzero(labels == int(label))[: train + test]
        for number, row in enumerate(rows):
            split = "train" if number < train else "test"
            image_folder = folder / "raw" / name / split / label
            image_folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(images[row]).save(image_folder / f"{row:05d}.png")
    body = {
        "name": name,
        "licence": "CC BY 4.0",
        "classes": list(classes),
        "source": {"format": "folder", "path": str(folder / "raw" / name)},
        **card,
    }
    path = folder / "cards" / f"{name}.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump(body))
    return str(path)


def make_cards(folder: Path, names: Iterable[str] = TASKS) -> dict[str, str]:
    """Write a card for each task in `names`, and return their paths by name."""
    return {name: make_card(folder, name, TASKS[name]) for name in names}


def make_body(
    folder: Path,
    cards: Mapping[str, str],
    methods: Iterable[str] = ("finetune", "meat"),
    scenario: str = "task",
    **changes: Any,
) -> dict[str, Any]:
    """Return a config as plain values: one task per card, two epochs, stages in the driver process.

    The task `base` trains the backbone. methods: labels, or settings by label. changes: new values
    of config sections; mappings are merged into a section, but `methods` and `stream` are replaced.
    """
    tasks = []
    for name, card in cards.items():
        role = "base" if name == "base" else "task"
        tasks.append({"name": name, "card": card, "role": role})
    if not isinstance(methods, Mapping):
        methods = {label: {} for label in methods}
    body: dict[str, Any] = {
        "name": "small",
        "seed": 5,
        "storage": str(folder / "storage"),
        "tracking": False,
        "stream": {"scenario": scenario, "tasks": tasks},
        "backbone": BACKBONE,
        "train": {"epochs": 2, "batch_size": 16, "lr": 2e-3},
        "methods": dict(methods),
        "cluster": {"workers": 0, "checkpoint_s": 1e-6, "loader_workers": 1},
    }
    for key in body:
        change = changes.get(key, body[key])
        if isinstance(change, dict) and key not in ("methods", "stream"):
            body[key] = {**body[key], **change}
        else:
            body[key] = change
    return body


def write_config(path: Path, body: Mapping[str, Any]) -> str:
    """Write a config as YAML, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(dict(body)))
    return str(path)


# ---- processes -----------------------------------------------------------------------------------
def processes() -> Any:
    """Return a context that forks processes from a server with all heavy imports done.

    Such processes start quickly.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def start_server() -> None:
    """Start the server of `processes` now, because it keeps its initial environment."""
    processes()
    forkserver.ensure_running()


def start(
    argv: list[str],
    out: Path,
    kill_before: int = 0,
    by: int = signal.SIGKILL,
    within: str = "",
    temporary: str = "",
) -> Any:
    """Start `python -m pipeline ARGV` in a new process, and return it (see `processes`).

    Its output goes to the file `out`. Its report has no pictures, because they take longer than the
    rest of the run. kill_before: the process sends itself the signal `by` before durable system
    call number `kill_before` (0: never; see `kill_before_call`). within: a stage id; only calls
    during this stage are counted. temporary: the folder for temporary files.
    """
    arguments = (argv, str(out), kill_before, by, within, temporary)
    process = processes().Process(target=main_into, args=arguments)
    process.start()
    return process


def main_into(
    argv: list[str], out: str, kill_before: int, by: int, within: str, temporary: str = ""
) -> None:
    """Run the command line in this process, write its output to the file `out`, and exit."""
    import torch

    from pipeline import cli
    from pipeline.report import page

    torch.set_num_threads(1)
    if temporary:
        os.environ["TMPDIR"] = temporary
        tempfile.tempdir = None  # discard the cached folder
    # a shell lets background processes ignore SIGINT; restore the default
    signal.signal(signal.SIGINT, signal.default_int_handler)
    page.build_run_report = lambda *_: {"report.html": b"a page"}
    if kill_before:
        kill_before_call(kill_before, by, within)
    code = 1
    with (
        open(out, "w") as stream,
        contextlib.redirect_stdout(stream),
        contextlib.redirect_stderr(stream),
    ):
        try:
            code = cli.main(argv)
        except Exception:
            traceback.print_exc()
    os._exit(code)


def kill_before_call(calls: int, by: int, within: str) -> None:
    """Patch `os` so that this process gets the signal `by` before durable system call `calls`.

    Durable calls are fsync, rename, link and unlink. With `within`, only calls during that stage
    count.
    """
    from pipeline.launch import local

    calls_left = itertools.count(calls, -1)
    is_counting = not within
    run_stage: Callable[..., Any] = vars(local)["run_stage"]

    def killing(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if is_counting and next(calls_left) == 1:
                os.kill(os.getpid(), by)
            return function(*args, **kwargs)

        return call

    for name in ("fsync", "replace", "link", "unlink"):
        setattr(os, name, killing(getattr(os, name)))

    def counting_run_stage(job: Any, *rest: Any) -> Any:
        nonlocal is_counting
        is_counting = within in ("", job.id)
        try:
            return run_stage(job, *rest)
        finally:
            is_counting = not within

    vars(local)["run_stage"] = counting_run_stage


def run(argv: list[str], out: Path, timeout: float = 900, temporary: str = "") -> str:
    """Run a command in a new process until it ends, and return its output.

    Raises:
        AssertionError: if its exit code is not 0.
    """
    process = start(argv, out, temporary=temporary)
    process.join(timeout)
    output = out.read_text()
    assert process.exitcode == 0, f"exit code {process.exitcode}: {output}"
    return output


# ---- results that must be equal ------------------------------------------------------------------
def manifests(storage: Path | str, name: str = "small") -> dict[str, dict[str, Any]]:
    """Return the manifests of the stages of a run that have a published result, by stage id.

    The code under test is not used to read them.
    """
    record = json.loads((Path(storage) / "runs" / name / "run.json").read_text())
    manifest_by_stage = {}
    for stage in record["stages"]:
        path = Path(storage) / "stages" / stage["key"] / "manifest.json"
        if path.exists():
            manifest_by_stage[stage["id"]] = json.loads(path.read_text())
    return manifest_by_stage


def results(storage: Path | str, name: str = "small") -> dict[str, Any]:
    """Return, by stage id, the results that interruptions must not change.

    These are the counts and logit digests of evaluations, the digests of states, shards and
    indexes, and the history without its seconds. The report is left out, because it is made from
    these.
    """
    values_by_stage = {}
    for stage_id, manifest in manifests(storage, name).items():
        if manifest["step"] != "report":
            body = {
                n: f["sha256"]
                for n, f in manifest["files"].items()
                if n.endswith((".safetensors", ".tar")) or n == "index.parquet"
            }
            if "history.parquet" in manifest["files"]:
                rows = pq.read_table(
                    artifact(storage, stage_id, "history.parquet", name)
                ).to_pylist()
                body["history"] = [{k: v for k, v in row.items() if k != "seconds"} for row in rows]
            values_by_stage[stage_id] = manifest.get("result") or body
    return values_by_stage


def attempts(storage: Path | str, name: str = "small") -> dict[str, str]:
    """Return the published attempt of each stage, by stage id; a new run has another one."""
    return {
        stage_id: manifest["attempt"] for stage_id, manifest in manifests(storage, name).items()
    }


def artifact(storage: Path | str, stage_id: str, file: str, name: str = "small") -> Path:
    """Return the path of a file in the published result of a stage."""
    manifest = manifests(storage, name)[stage_id]
    return Path(storage) / "stages" / str(manifest["key"]) / str(manifest["attempt"]) / file
