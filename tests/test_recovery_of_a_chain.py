"""A class-incremental chain is killed inside each of its steps: exemplars, weights and correct
answers are those of an uninterrupted run; and deleted evaluations run again."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline import cli
from tests import small_run
from tests.recovery import Reference, check_recovered, published_attempts, steps

# that make a checkpoint durable: a write and a move of the tensors, a write and a move of what
# names them
CALLS = 4
# calls before: a write and a move of each file of decoded images, and the deletion of its lock
CACHES = {
    "train": 2 * 3,
    "herd": 1 * 3,
    "finetune": 1 * 3,
}
TRAINING = {
    "train": 2 * 3,
    "finetune": 4 * 1,
}  # epochs, each of so many batches of 16: of 36 images and 8 exemplars, and of 8


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
def test_a_chain_killed_inside_a_step_ends_with_the_same_digests(
    step: str,
    done: int,
    call: int,
    chain: Reference,
    tmp_path: Path,
    quick: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """done: of how many training steps there is a checkpoint. The one after them is lost, before
    its own checkpoint was written or named; of herding the result, before its first file and before
    its manifest."""
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


def test_deleted_evaluations_run_again_with_the_same_results_and_nothing_else_runs(
    chain: Reference, tmp_path: Path, quick: Any
) -> None:
    """C17: evaluations are leaves."""
    config, storage = chain.copy(tmp_path), tmp_path / "storage"
    before = small_run.attempts(storage)
    for stage_id, manifest in small_run.manifests(storage).items():
        if stage_id.endswith("/evaluate"):
            shutil.rmtree(storage / "stages" / manifest["key"])
    assert cli.main(["run", config]) == 0
    after = small_run.attempts(storage)
    assert {i for i in after if after[i] != before[i]} == {"dytox/a/evaluate", "dytox/b/evaluate"}
    assert small_run.results(storage) == chain.expected
