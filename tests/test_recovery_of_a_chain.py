"""Tests of a class-incremental chain killed inside each step, and of deleted evaluations.

Exemplars, weights and correct answers must be those of an uninterrupted run.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline import cli
from tests import small_run
from tests.recovery import Reference, check_recovered, published_attempts, steps

# Calls that make a checkpoint durable: a write and a move of the tensors, then a write and a move
# of the file that names them.
CALLS = 4
# Calls before the first checkpoint: a write and a move of each file of decoded images, and the
# lock's deletion.
CACHES = {
    "train": 2 * 3,
    "herd": 1 * 3,
    "finetune": 1 * 3,
}
TRAINING = {
    "train": 2 * 3,
    "finetune": 4 * 1,
}  # epochs * batches of 16. An epoch has 36 images and 8 exemplars, or 8 images.


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("step", "done", "call"),
    [
        ("train", 0, 1),
        ("train", 2, 1),
        ("train", 3, 3),
        ("train", 5, 1),
        ("herd", 0, 1),
        ("herd", 0, 8),
        ("finetune", 0, 1),
        ("finetune", 2, 1),
    ],
)
def test_chain_killed_inside_a_step_ends_with_equal_digests(
    step: str,
    done: int,
    call: int,
    chain: Reference,
    tmp_path: Path,
    quick: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """done: number of training steps with a checkpoint.

    The next training step is lost, before its checkpoint was written or named. For herding, the
    result is lost, before its first file or before its manifest.
    """
    stage, config = f"dytox/b/{step}", chain.config(tmp_path)
    process = small_run.start(
        ["run", config],
        tmp_path / "killed.txt",
        kill_before=CACHES[step] + CALLS * done + call,
        within=stage,
    )
    process.join(900)
    assert process.exitcode == -9
    before = published_attempts(tmp_path)
    assert stage not in before
    assert {"dytox/a/train", "dytox/a/herd"} < {*before}
    assert bool([*(tmp_path / "storage" / "checkpoints").rglob("latest.json")]) == (done > 0)
    with steps(monkeypatch) as made:
        assert cli.main(["run", config]) == 0
    assert made.count(stage) == TRAINING.get(step, 0) - done
    check_recovered(chain, tmp_path, before, capsys.readouterr().out)


def test_only_deleted_evaluations_run_again_with_equal_results(
    chain: Reference, tmp_path: Path, quick: Any
) -> None:
    """Evaluations are leaves of the graph: no other stage depends on them."""
    config, storage = chain.copy(tmp_path), tmp_path / "storage"
    before = small_run.attempts(storage)
    for stage_id, manifest in small_run.manifests(storage).items():
        if stage_id.endswith("/evaluate"):
            shutil.rmtree(storage / "stages" / manifest["key"])
    assert cli.main(["run", config]) == 0
    after = small_run.attempts(storage)
    assert {i for i in after if after[i] != before[i]} == {"dytox/a/evaluate", "dytox/b/evaluate"}
    assert small_run.results(storage) == chain.expected
