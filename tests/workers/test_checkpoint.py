"""Tests of checkpoints: only complete ones are loaded, and a frozen backbone is left out."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workers.storage import artifact, checkpoint
from workers.storage.checkpoint import (
    Checkpoint,
    drop,
    load_checkpoint,
    save_checkpoint,
    trained_state,
)

KEY = "stage"


class Model(nn.Module):
    """A frozen backbone with buffers, a trained head, and a buffer of the method."""

    freezes_backbone = True
    counts: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.BatchNorm1d(3).requires_grad_(False)
        self.head = nn.Linear(3, 2)
        self.register_buffer("counts", torch.zeros(2, dtype=torch.int64))


def trained(steps: int, optimizer: str = "AdamW") -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model()
    kinds: dict[str, Any] = {
        "AdamW": torch.optim.AdamW,
        "SGD": partial(torch.optim.SGD, momentum=0.9),
    }
    chosen = kinds[optimizer](model.head.parameters(), lr=0.1)
    for _ in range(steps):
        step(model, chosen)
    return model, chosen


def step(model: Model, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model.head(torch.ones(1, 3)).square().sum().backward()
    optimizer.step()
    model.counts += 1


def mark(epoch: int = 1, step: int = 2) -> Checkpoint:
    return Checkpoint(
        epoch,
        step,
        [{"epoch": 0, "loss": 0.1 + 0.2}],
        {"images": 7, "loss": 1 / 3},
        {"epoch": 0, "val_correct": 5},
    )


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "stages")


def files(root: str) -> list[Path]:
    return sorted(Path(checkpoint.get_folder(root, KEY)).iterdir())


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_restored_training_continues_exactly(root: str, optimizer: str) -> None:
    model, trainer = trained(3, optimizer)
    save_checkpoint(root, KEY, model, trainer, {"head.bias": torch.tensor([1.0, 2.0])}, mark())
    step(model, trainer)
    fresh, other = trained(0, optimizer)
    checkpoint = load_checkpoint(root, KEY)
    assert checkpoint is not None
    best = checkpoint.restore(fresh, other)
    assert torch.equal(best["head.bias"], torch.tensor([1.0, 2.0]))
    assert (
        checkpoint.epoch,
        checkpoint.step,
        checkpoint.history,
        checkpoint.sums,
        checkpoint.best,
    ) == (
        mark().epoch,
        mark().step,
        mark().history,
        mark().sums,
        mark().best,
    ), "floats are restored exactly"
    step(fresh, other)
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.state_dict().values(), fresh.state_dict().values(), strict=True)
    )


def test_checkpoint_includes_the_backbone_only_if_it_is_trained() -> None:
    model = Model()
    assert trained_state(model).keys() == {"head.weight", "head.bias", "counts"}
    model.freezes_backbone = False
    model.backbone.requires_grad_(True)
    assert trained_state(model).keys() == {
        "head.weight",
        "head.bias",
        "counts",
        "backbone.weight",
        "backbone.bias",
        "backbone.running_mean",
        "backbone.running_var",
        "backbone.num_batches_tracked",
    }


def test_only_the_last_checkpoint_is_kept(root: str) -> None:
    model, trainer = trained(1)
    for at in range(3):
        save_checkpoint(root, KEY, model, trainer, {}, mark(0, at))
        step(model, trainer)
        assert len(files(root)) == 2
    checkpoint = load_checkpoint(root, KEY)
    assert checkpoint is not None
    assert checkpoint.step == 2


def test_interrupted_save_keeps_the_previous_checkpoint(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, trainer = trained(1)
    save_checkpoint(root, KEY, model, trainer, {}, mark(0, 1))
    write = artifact.write_bytes

    def killed(uri: str, data: bytes) -> None:
        if uri.endswith("latest.json"):
            raise KeyboardInterrupt
        write(uri, data)

    step(model, trainer)
    monkeypatch.setattr(checkpoint, "write_bytes", killed)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(root, KEY, model, trainer, {}, mark(0, 2))
    loaded_checkpoint = load_checkpoint(root, KEY)
    assert loaded_checkpoint is not None
    assert loaded_checkpoint.step == 1


def test_no_checkpoint_is_found_before_saving_or_after_dropping(root: str) -> None:
    assert load_checkpoint(root, KEY) is None
    save_checkpoint(root, KEY, *trained(1), {}, mark())
    drop(root, KEY)
    assert load_checkpoint(root, KEY) is None
    assert not Path(checkpoint.get_folder(root, KEY)).exists()
    drop(root, KEY)


def test_any_flipped_bit_is_detected(root: str) -> None:
    save_checkpoint(root, KEY, *trained(1), {}, mark())
    for path in files(root):
        data = path.read_bytes()
        for at in range(0, len(data), 1 if path.suffix == ".json" else 29):
            for bit in (0, 5):
                path.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
                assert load_checkpoint(root, KEY) is None, f"{path.name} byte {at} bit {bit}"
        path.write_bytes(data)
    assert load_checkpoint(root, KEY) is not None


def test_saving_works_after_a_damaged_checkpoint(root: str) -> None:
    model, trainer = trained(1)
    for harm in (
        Path.unlink,
        lambda path: path.write_bytes(b"{}"),
        lambda path: path.write_bytes(b"[1]"),
    ):
        for index in (0, 1):
            drop(root, KEY)
            save_checkpoint(root, KEY, model, trainer, {}, mark(0, 1))
            harm(files(root)[index])
            assert load_checkpoint(root, KEY) is None
            save_checkpoint(root, KEY, model, trainer, {}, mark(0, 5))
            checkpoint = load_checkpoint(root, KEY)
            assert checkpoint is not None
            assert checkpoint.step == 5


def test_a_checkpoint_holds_no_code(root: str) -> None:
    """It contains only tensors and JSON, so loading cannot run code."""
    save_checkpoint(root, KEY, *trained(1), {}, mark())
    tensors, pointer = files(root)
    assert (tensors.suffix, pointer.name) == (".safetensors", "latest.json")
    header = json.loads(
        tensors.read_bytes()[8 : 8 + int.from_bytes(tensors.read_bytes()[:8], "little")]
    )
    assert header.pop("__metadata__").keys() == {"accrete"}
    assert {entry["dtype"] for entry in header.values()} <= {"F32", "I64"}
