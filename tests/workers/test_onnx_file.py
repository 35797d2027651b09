"""Tests of tasks as ONNX files: the logits are equal, or the export is refused with a reason."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from serving import Finished, finished

from pipeline.cli import serving as commands
from workers.errors import UserError
from workers.methods import METHODS
from workers.serving import onnx_file

HAS_EXTRA = all(importlib.util.find_spec(name) is not None for name in onnx_file.PACKAGES)
needs_extra = pytest.mark.skipif(not HAS_EXTRA, reason="the extra `onnx` is not installed")
# The computation of these methods depends on tensor values, which a trace cannot follow.
NOT_EXPORTED = ("supsup_nn",)


@pytest.fixture(scope="module")
def packnet(lab: Any) -> Finished:
    return finished(lab, "packnet", epochs=1)


def arguments(folder: Path, **values: Any) -> argparse.Namespace:
    """Return the arguments of `bundle` on a model folder."""
    names = ("out", "timm", "onnx", "task", "method")
    return argparse.Namespace(
        config=str(folder), overrides=[], **{**dict.fromkeys(names), **values}
    )


@pytest.mark.few(1)
@needs_extra
def test_onnxruntime_gives_the_logits_of_a_masked_task(packnet: Finished, tmp_path: Path) -> None:
    import onnxruntime

    path = tmp_path / "two.onnx"
    onnx_file.write_onnx_file(packnet.bundle, "two", str(path))
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    metadata = session.get_modelmeta().custom_metadata_map
    described = {name: json.loads(value) for name, value in metadata.items()}
    task = packnet.bundle.task("two")
    assert described["classes"] == list(task.classes)
    assert described["task"] == "two"
    assert described["opset"] == 18
    assert len(described["mean"]) == len(described["std"]) == 3
    side = described["crop"]
    (entry,) = session.get_inputs()
    assert entry.name == described["input"]
    assert entry.shape[1:] == [3, side, side]
    for count in (1, 3):  # the batch size is free
        images = torch.randn((count, 3, side, side), generator=torch.Generator().manual_seed(5))
        (answer,) = session.run([described["output"]], {described["input"]: images.numpy()})
        expected = packnet.served.method.logits(images, "two")
        torch.testing.assert_close(torch.from_numpy(answer), expected, rtol=1e-5, atol=1e-5)


@needs_extra
def test_a_model_that_differs_is_refused_and_nothing_is_written(
    packnet: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_file, "_trace_onnx", lambda *_: b"")
    monkeypatch.setattr(onnx_file, "_compute_onnx_difference", lambda *_: 3e-5)
    path = tmp_path / "two.onnx"
    with pytest.raises(UserError, match=r"'two' cannot be written as ONNX: .* differ by 3.0e-05;"):
        onnx_file.write_onnx_file(packnet.bundle, "two", str(path))
    assert not path.exists()


@needs_extra
def test_exporter_error_is_reported_in_one_sentence(
    packnet: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no\nsuch operator")

    monkeypatch.setattr(torch.onnx, "export", fail)
    with pytest.raises(UserError, match=r"RuntimeError: no such operator; leave out --onnx"):
        onnx_file.export_onnx(packnet.bundle, "two")


def test_missing_packages_error_names_the_install_command(
    packnet: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    command = r"-m pip install onnx onnxruntime onnxscript -c \S+constraints\.txt`$"
    with pytest.raises(UserError, match=command):
        onnx_file.export_onnx(packnet.bundle, "two")


def test_command_writes_onnx_file_with_or_without_model_folder(
    packnet: Finished,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(onnx_file, "export_onnx", lambda bundle, task: task.encode())
    folder = tmp_path / "model"
    packnet.bundle.write(str(folder))
    file = tmp_path / "x.onnx"
    assert commands.bundle(arguments(folder, onnx=str(file), task="three")) == 0
    assert file.read_bytes() == b"three"
    assert "task three" in capsys.readouterr().out
    assert (
        commands.bundle(arguments(folder, onnx=str(file), task="two", out=str(folder) + "2")) == 0
    )
    assert file.read_bytes() == b"two"
    assert (tmp_path / "model2" / "model.json").exists()


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({}, "--out is missing; add --out DIR"),
        ({"timm": "two", "onnx": "x"}, "--out is missing"),
        ({"onnx": "x"}, "choose one with --task: .*two, three"),
        ({"onnx": "x", "task": "nowhere"}, "task 'nowhere' is not in"),
        ({"onnx": "x", "task": "two", "timm": "three", "out": "y"}, "leave out --task, or write"),
        ({"out": "y", "task": "two"}, "leave out --task, or add --onnx FILE"),
    ],
)
def test_invalid_option_combinations_are_refused(
    packnet: Finished, tmp_path: Path, values: dict[str, str], sentence: str
) -> None:
    folder = tmp_path / "model"
    packnet.bundle.write(str(folder))
    files = {name: str(tmp_path / value) for name, value in values.items() if len(value) == 1}
    with pytest.raises(UserError, match=sentence):
        commands.bundle(arguments(folder, **{**values, **files}))
    assert not (tmp_path / "x").exists()
    assert not (tmp_path / "y").exists()


@needs_extra
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_task_of_every_method_is_exported_or_refused(lab: Any, name: str) -> None:
    run = finished(lab, name, epochs=1)
    if name in NOT_EXPORTED:
        with pytest.raises(UserError, match="cannot be written as ONNX"):
            onnx_file.export_onnx(run.bundle, "two")
    else:
        onnx_file.export_onnx(run.bundle, "two")
