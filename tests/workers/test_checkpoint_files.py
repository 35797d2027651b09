"""Tests of `accrete convert`: from pickled checkpoints to safetensors, without running code."""

from __future__ import annotations

import argparse
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from pipeline import cli
from workers.errors import UserError
from workers.model.checkpoint_files import convert_checkpoint

STATE = {"a.weight": torch.arange(6.0).view(2, 3).t(), "a.bias": torch.ones(2)}


def saved(folder: Path, content: Any, name: str = "w.pth") -> str:
    """Pickle `content`, and return the path."""
    torch.save(content, folder / name)
    return str(folder / name)


@pytest.mark.parametrize(
    ("content", "key"),
    [
        (STATE, ""),
        ({"module." + name: tensor for name, tensor in STATE.items()}, ""),
        ({"_orig_mod.module." + name: tensor for name, tensor in STATE.items()}, ""),
        ({"model": STATE, "epoch": 3, "optimizer": {"state": {}, "param_groups": []}}, "model"),
        ({0: STATE}, "0"),
        ({"state_dict_ema": STATE, "args": argparse.Namespace(lr=0.1)}, "state_dict_ema"),
    ],
    ids=["state", "wrapped", "wrapped-twice", "entry", "entry-of-a-number", "entry-with-settings"],
)
def test_the_tensors_of_a_checkpoint_are_written(content: Any, key: str, tmp_path: Path) -> None:
    conversion = convert_checkpoint(saved(tmp_path, content))
    assert conversion == (str(tmp_path / "w.safetensors"), key, 2, 8)
    written = safetensors.torch.load_file(conversion.target)
    assert written.keys() == STATE.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in STATE.items())
    assert sorted(os.listdir(tmp_path)) == ["w.pth", "w.safetensors"]


def test_checkpoints_from_before_pytorch_1_6_are_converted(tmp_path: Path) -> None:
    path = str(tmp_path / "old.pth.tar")
    torch.save({"model": STATE}, path, _use_new_zipfile_serialization=False)
    conversion = convert_checkpoint(path)
    assert conversion == (str(tmp_path / "old.safetensors"), "model", 2, 8)


def test_tensors_that_share_memory_are_written(tmp_path: Path) -> None:
    shared = torch.randn(4)
    path = saved(tmp_path, {"one": shared, "two": shared[:2]})
    written = safetensors.torch.load_file(convert_checkpoint(path).target)
    assert torch.equal(written["two"], written["one"][:2])


def test_user_must_choose_among_several_entries(tmp_path: Path) -> None:
    other = {name: tensor + 1 for name, tensor in STATE.items()}
    path = saved(tmp_path, {"model": STATE, "model_ema": other})
    with pytest.raises(UserError, match=r"\(model, model_ema\); choose one with --key"):
        convert_checkpoint(path)
    with pytest.raises(UserError, match=r"no entry 'ema' .* those are: model, model_ema"):
        convert_checkpoint(path, key="ema")
    written = safetensors.torch.load_file(convert_checkpoint(path, key="model_ema").target)
    assert torch.equal(written["a.bias"], other["a.bias"])


class Dangerous:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_no_code_of_a_checkpoint_is_run(tmp_path: Path) -> None:
    path = saved(tmp_path, {"model": STATE, "extra": Dangerous(tmp_path / "ran")})
    with pytest.raises(UserError, match="could run code"):
        convert_checkpoint(path)
    with pytest.raises(UserError, match="could run code"):
        convert_checkpoint(saved(tmp_path, nn.Linear(2, 2), "module.pt"))
    assert sorted(os.listdir(tmp_path)) == ["module.pt", "w.pth"]


def test_invalid_files_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    text = tmp_path / "text.pth"
    text.write_text("not a checkpoint")
    packed = tmp_path / "packed.pth"
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(10_000))
    cut = tmp_path / "cut.pth"
    cut.write_bytes(Path(saved(tmp_path, STATE)).read_bytes()[:300])
    (tmp_path / "empty.pth").touch()
    for path, sentence in (
        (text, "text.pth"),
        (packed, "compressed entries"),
        (cut, "cut.pth"),
        (tmp_path / "empty.pth", "empty.pth"),
        (tmp_path / "none.pth", r"cannot be read \(No such file"),
        (tmp_path, "cannot be read"),
        (Path(saved(tmp_path, {"epoch": 3}, "numbers.pth")), "no entry of tensors"),
        (Path(saved(tmp_path, torch.zeros(2), "tensor.pth")), "no entry of tensors"),
    ):
        with pytest.raises(UserError, match=sentence):
            convert_checkpoint(str(path), str(tmp_path / "new.safetensors"))
    assert not (tmp_path / "new.safetensors").exists()


def test_existing_files_are_not_overwritten(tmp_path: Path) -> None:
    path = saved(tmp_path, STATE)
    (tmp_path / "w.safetensors").write_text("mine")
    with pytest.raises(UserError, match="exists already"):
        convert_checkpoint(path)
    assert (tmp_path / "w.safetensors").read_text() == "mine"
    with pytest.raises(UserError, match="cannot be written"):
        convert_checkpoint(path, str(tmp_path / "nowhere" / "w.safetensors"))


def test_command_prints_how_to_use_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["convert", saved(tmp_path, {"model": STATE, "epoch": 1})]) == 0
    assert capsys.readouterr().out == (
        "2 tensors of model, 8 values\n"
        f"use them: --set backbone.weights={tmp_path / 'w.safetensors'}\n"
    )
    assert cli.main(["convert", str(tmp_path / "none.pth")]) == 2


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"a": torch.zeros(1).expand(10**9)}, "more than 4 times the file"),
        ({"a": torch.zeros(2, dtype=torch.complex128)}, "safetensors cannot store"),
        ({"a": torch.zeros(2, device="meta")}, "cannot store|is not a checkpoint"),
        ({"a": torch.eye(2).to_sparse()}, "cannot store"),
        ({"a": torch.zeros(2), "epoch": 3}, "a value 'epoch'"),
        ({"model": {"a": torch.zeros(2), "_extra_state": None}}, "a value '_extra_state'"),
        (
            {"model": {"a": torch.zeros(2), "_extra_state": None}, "loss": {"b": torch.zeros(2)}},
            r"several entries of tensors by name \(model, loss\)",
        ),
    ],
)
def test_unusual_tensors_are_refused_in_one_sentence(
    content: Any, sentence: str, tmp_path: Path
) -> None:
    path = saved(tmp_path, content)
    with pytest.raises(UserError, match=sentence):
        convert_checkpoint(path)
    assert os.listdir(tmp_path) == ["w.pth"]


@pytest.mark.parametrize("first", "().KNQR]abeqrst}G0")
def test_text_files_are_not_checkpoints(first: str, tmp_path: Path) -> None:
    path = tmp_path / "text.pth"
    path.write_text(first + " hello, this is a text file that is long enough\n")
    with pytest.raises(UserError, match="is not a checkpoint of PyTorch"):
        convert_checkpoint(str(path))


def test_other_users_can_read_the_file(tmp_path: Path) -> None:
    target = Path(convert_checkpoint(saved(tmp_path, STATE)).target)
    plain = tmp_path / "plain"
    plain.touch()
    assert target.stat().st_mode == plain.stat().st_mode
