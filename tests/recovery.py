"""Helpers for recovery tests.

They provide an uninterrupted run as reference, a check after a restart, damage to files, and a
crash before a training step.
"""

from __future__ import annotations

import contextlib
import re
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

MOMENTS = 20260101  # seed of the times at which processes are killed


@dataclass
class Reference:
    """An uninterrupted run to compare interrupted runs with.

    Attributes:
        cards: Paths of the cards by name.
        body: The config as plain values.
        expected: The results, see `small_run.results`.
        seconds: Duration of the run.
        changes: Changes of the config, see `small_run.make_body`.
    """

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
        """Run the tasks `names` without interruption. changes: see `small_run.make_body`."""
        cards = small_run.make_cards(folder, names)
        body = small_run.make_body(folder, cards, **changes)
        # start the fork server before the time is measured
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
        """Write the config of the same run in a new storage below `folder`, and return its path."""
        return small_run.write_config(
            folder / "config.yaml",
            small_run.make_body(folder, self.cards, **self.changes | changes),
        )

    def copy(self, folder: Path, **changes: Any) -> str:
        """Write the same config in a copy of the finished storage, and return its path."""
        shutil.copytree(self.folder / "storage", folder / "storage")
        return self.config(folder, **changes)


def check_recovered(
    reference: Reference, folder: Path, before: dict[str, str], output: str
) -> None:
    """Check the storage after an interrupted command was run again.

    No published result may be computed again, results must equal those of the reference, and no
    file may be damaged. More than `before` may be reused, because a worker that outlives its driver
    publishes its current stage.

    Args:
        before: The published attempts before the command was run again.
        output: The output of the second run.
    """
    storage = folder / "storage"
    after = small_run.attempts(storage)
    assert before.items() <= after.items(), "a published result was computed again"
    if before and len(after) > len(before):
        summary = re.search(r"(\d+) stages run, (\d+) reused", output)
        if summary:
            num_run, num_reused = map(int, summary.groups())
            assert num_run + num_reused == len(after), output
            assert num_reused >= len(before), output
        else:
            assert f"nothing to do: all {len(after)} stage results are up to date" in output, output
    assert small_run.results(storage) == reference.expected
    for stage_id, manifest in small_run.manifests(storage).items():
        artifact = Artifact.need(str(storage / "stages"), manifest["key"])
        assert artifact.damage() is None, stage_id
        assert not any(name.endswith(".part") for name in manifest["files"])


def published_attempts(folder: Path) -> dict[str, str]:
    """Return the published attempts, or none if the run died before it wrote its record."""
    record = folder / "storage" / "runs" / "small" / "run.json"
    return small_run.attempts(folder / "storage") if record.exists() else {}


def damage_file(path: Path, harm: str) -> None:
    """Damage a file: `remove` it, `truncate` it to half, or flip a bit for any other `harm`."""
    data = bytearray(path.read_bytes())
    if harm == "remove":
        path.unlink()
    elif harm == "truncate":
        path.write_bytes(data[: len(data) // 2])
    else:
        # In a tar, damage an image and not the padding.
        data[data.find(b"IDAT") + 9 if path.suffix == ".tar" else len(data) // 2] ^= 1
        path.write_bytes(data)


class Crash(BaseException):
    """A crash that no `except Exception` catches, like the end of a process."""


@contextlib.contextmanager
def steps(patch: pytest.MonkeyPatch, crash_at: int = 0) -> Iterator[list[str]]:
    """Yield the list of the stage ids of all training steps so far.

    Args:
        crash_at: Raise Crash before this step, counted from 1 (0: never).
    """
    made: list[str] = []
    step = loop.train_step

    def recording_step(
        method: Any, optimizer: Any, batches: Any, progress: Any, job: Any, *rest: Any
    ) -> Any:
        if crash_at and len(made) + 1 == crash_at:
            raise Crash
        made.append(job.id)
        return step(method, optimizer, batches, progress, job, *rest)

    with patch.context() as inner:
        inner.setattr(loop, "train_step", recording_step)
        yield made
