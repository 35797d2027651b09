"""What recovery is measured by: an uninterrupted run, what must hold after the command was given
again, and damage to files."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests import small_run
from workers import loop
from workers.storage.artifact import Artifact

MOMENTS = 20260101  # seed of the moments at which things are killed


@dataclass
class Reference:
    """Cards, and an uninterrupted run on them: what it left behind, what it said, and how long it
    took."""

    folder: Path
    cards: dict[str, str]
    body: dict[str, Any]
    expected: dict[str, Any]
    seconds: float
    changes: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def made_in(
        cls, folder: Path, names: tuple[str, ...] = ("base", "a", "b"), **changes: Any
    ) -> Reference:
        """own: how its body differs from others."""
        cards = small_run.make_cards(folder, names)
        body = small_run.make_body(folder, cards, **changes)
        # the fork server is up after it
        small_run.run(
            ["plan", small_run.write_config(folder / "warm.yaml", body)], folder / "warm.txt"
        )
        started = time.monotonic()
        small_run.run(
            ["run", small_run.write_config(folder / "config.yaml", body)], folder / "out.txt"
        )
        return cls(
            folder,
            cards,
            body,
            small_run.results(folder / "storage"),
            time.monotonic() - started,
            changes,
        )

    def config(self, folder: Path, **changes: Any) -> str:
        """The same run in a storage of its own."""
        return small_run.write_config(
            folder / "config.yaml",
            small_run.make_body(folder, self.cards, **self.changes | changes),
        )

    def copy(self, folder: Path, **changes: Any) -> str:
        """The same with everything done."""
        shutil.copytree(self.folder / "storage", folder / "storage")
        return self.config(folder, **changes)


def judge(reference: Reference, folder: Path, before: dict[str, str], output: str) -> None:
    """What must hold after the command was given again."""
    storage = folder / "storage"
    after = small_run.attempts(storage)
    assert before.items() <= after.items(), "a result that stood was computed again"
    assert (
        not before
        or f"{len(after) - len(before)} stages run, {len(before)} reused" in output
        or len(after) == len(before)
    )
    assert small_run.results(storage) == reference.expected
    for stage_id, manifest in small_run.manifests(storage).items():
        artifact = Artifact.need(str(storage / "stages"), manifest["key"])
        assert artifact.damage() is None, stage_id
        assert not any(name.endswith(".part") for name in manifest["files"])


def standing(folder: Path) -> dict[str, str]:
    """The attempts that are published, also where the run died before it wrote its record."""
    return (
        small_run.attempts(folder / "storage")
        if (folder / "storage" / "runs" / "small" / "run.json").exists()
        else {}
    )


def spoil(path: Path, harm: str) -> None:
    data = bytearray(path.read_bytes())
    if harm == "remove":
        path.unlink()
    elif harm == "truncate":
        path.write_bytes(data[: len(data) // 2])
    else:
        # in a tar, a byte of an image and not of the padding
        data[data.find(b"IDAT") + 9 if path.suffix == ".tar" else len(data) // 2] ^= 1
        path.write_bytes(data)


class Crash(BaseException):
    """Passes all `except Exception`, like the end of a process."""


@contextlib.contextmanager
def steps(patch: pytest.MonkeyPatch, crash_at: int = 0) -> Iterator[list[str]]:
    """Notes the stage of every training step; crashes before the step of that number (from 1)."""
    made: list[str] = []
    step = loop.train_step

    def noted(
        method: Any, optimizer: Any, batches: Any, progress: Any, job: Any, group: Any
    ) -> Any:
        if crash_at and len(made) + 1 == crash_at:
            raise Crash
        made.append(job.id)
        return step(method, optimizer, batches, progress, job, group)

    with patch.context() as inner:
        inner.setattr(loop, "train_step", noted)
        yield made
