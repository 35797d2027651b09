"""Runs of a few seconds on handwritten digits: cards, configs, the command line in fresh processes,
what must be equal."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterable, Mapping
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
    "pipeline.console",
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
    from sklearn.datasets import load_digits

    data = load_digits()
    return (data.images * 255 / 16).round().astype(np.uint8), data.target


def make_card(
    folder: Path, name: str, classes: Iterable[str], train: int = 20, test: int = 10, **card: Any
) -> str:
    """Images of some digits in a folder of their own, and a card beside them. Returns the path of
    the card."""
    images, labels = digits()
    for label in classes:
        rows = np.flatnonzero(labels == int(label))[: train + test]
        for number, row in enumerate(rows):
            image_folder = folder / "raw" / name / ("train" if number < train else "test") / label
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
    return {name: make_card(folder, name, TASKS[name]) for name in names}


def make_body(
    folder: Path,
    cards: Mapping[str, str],
    methods: Iterable[str] = ("finetune", "meat"),
    scenario: str = "task",
    **changes: Any,
) -> dict[str, Any]:
    """A config as plain values: a task per card (one that is called `base` trains the backbone),
    two epochs, in process. methods: labels, or their settings by label."""
    tasks = [
        {"name": name, "card": card, "role": "base" if name == "base" else "task"}
        for name, card in cards.items()
    ]
    body: dict[str, Any] = {
        "name": "small",
        "seed": 5,
        "storage": str(folder / "storage"),
        "tracking": False,
        "stream": {"scenario": scenario, "tasks": tasks},
        "backbone": BACKBONE,
        "train": {"epochs": 2, "batch_size": 16, "lr": 2e-3},
        "methods": dict(methods)
        if isinstance(methods, Mapping)
        else {label: {} for label in methods},
        "cluster": {"workers": 0, "checkpoint_s": 1e-6, "loader_workers": 1},
    }
    return {
        key: {**value, **changes[key]}
        if isinstance(changes.get(key), dict) and key not in ("methods", "stream")
        else changes.get(key, value)
        for key, value in body.items()
    }


def write_config(path: Path, body: Mapping[str, Any]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(dict(body)))
    return str(path)


# ---- processes -----------------------------------------------------------------------------------
def processes() -> Any:
    """What starts processes forked from one that has imported everything: they are there at
    once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def start(
    argv: list[str], out: Path, kill_before: int = 0, by: int = signal.SIGKILL, within: str = ""
) -> Any:
    """`python -m pipeline ARGV` in a process of its own (see `processes`). What it says goes to the
    file `out`; the report has no pictures, which take longer than all the rest.

    kill_before: the process sends itself the signal `by` before its n-th system call that makes
    something durable. within: the id of a stage; only calls while this process runs that stage are
    counted. Returns a multiprocessing.Process, whose `kill` is SIGKILL.
    """
    process = processes().Process(target=main_into, args=(argv, str(out), kill_before, by, within))
    process.start()
    return process


def main_into(argv: list[str], out: str, kill_before: int, by: int, within: str) -> None:
    import torch

    from pipeline import cli
    from pipeline.report import page

    torch.set_num_threads(1)
    # a shell ignores it for what it starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
    page.build = lambda *_: {"report.html": b"a page"}
    if kill_before:
        doom(kill_before, by, within)
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


def doom(calls: int, by: int, within: str) -> None:
    """The signal `by` to this process before its `calls`-th fsync, rename, link or deletion of a
    file, within a stage if one is named."""
    from pipeline.launch import local

    left, counted = itertools.count(calls, -1), [not within]
    run_stage: Callable[..., Any] = vars(local)["run_stage"]

    def deadly(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if counted[0] and next(left) == 1:
                os.kill(os.getpid(), by)
            return function(*args, **kwargs)

        return call

    for name in ("fsync", "replace", "link", "unlink"):
        setattr(os, name, deadly(getattr(os, name)))

    def watched(job: Any, *rest: Any) -> Any:
        counted[0] = within in ("", job.id)
        try:
            return run_stage(job, *rest)
        finally:
            counted[0] = not within

    vars(local)["run_stage"] = watched


def run(argv: list[str], out: Path, timeout: float = 240) -> str:
    """The same, to its end. Returns what it said; AssertionError where its exit code is not 0."""
    process = start(argv, out)
    process.join(timeout)
    output = out.read_text()
    assert process.exitcode == 0, f"exit code {process.exitcode}: {output}"
    return output


# ---- what must be equal --------------------------------------------------------------------------
def manifests(storage: Path | str, name: str = "small") -> dict[str, dict[str, Any]]:
    """Stage id -> manifest, of the stages of a run whose result stands; read without the code under
    test."""
    record = json.loads((Path(storage) / "runs" / name / "run.json").read_text())
    paths = {
        s["id"]: Path(storage) / "stages" / s["key"] / "manifest.json" for s in record["stages"]
    }
    return {
        stage_id: json.loads(path.read_text()) for stage_id, path in paths.items() if path.exists()
    }


def results(storage: Path | str, name: str = "small") -> dict[str, Any]:
    """Stage id -> what may not depend on interruptions: integer counts and logits digests of
    evaluations, digests of states, shards and index, the history without its seconds; not the
    report, which is made of these."""
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
    """Stage id -> name of the attempt that was published: it changes when a stage is run again."""
    return {
        stage_id: manifest["attempt"] for stage_id, manifest in manifests(storage, name).items()
    }


def artifact(storage: Path | str, stage_id: str, file: str, name: str = "small") -> Path:
    manifest = manifests(storage, name)[stage_id]
    return Path(storage) / "stages" / str(manifest["key"]) / str(manifest["attempt"]) / file
