"""Tests of the export of a task to plain timm: equal logits, or a refusal with a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from serving import Finished, finished

from workers.errors import UserError
from workers.serving import timm_model


@pytest.fixture(scope="module")
def packnet(lab: Any) -> Finished:
    return finished(lab, "packnet", epochs=1)


def test_exported_masked_task_gives_equal_logits_in_timm(packnet: Finished, tmp_path: Path) -> None:
    folder = tmp_path / "timm"
    timm_model.write_timm_folder(packnet.bundle, "two", str(folder))
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"}
    config = json.loads((folder / "config.json").read_text())
    assert config["label_names"] == list(packnet.bundle.task("two").classes)
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    side = config["pretrained_cfg"]["input_size"][-1]
    images = torch.randn((3, 3, side, side), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = packnet.served.method.logits(images, "two")
        torch.testing.assert_close(model(images), expected, rtol=1e-5, atol=1e-5)


def test_non_empty_folder_is_refused(packnet: Finished, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(UserError, match="not an empty folder"):
        timm_model.write_timm_folder(packnet.bundle, "two", str(tmp_path))


def test_task_with_more_than_weights_is_refused(lab: Any, tmp_path: Path) -> None:
    run = finished(lab, "toast", epochs=1)
    with pytest.raises(UserError, match=r"cannot be written for plain timm: .*leave out --timm"):
        timm_model.write_timm_folder(run.bundle, "two", str(tmp_path / "timm"))
    assert not (tmp_path / "timm").exists()


def test_model_with_two_classifiers_is_refused(
    packnet: Finished, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in timm's distilled models."""
    network = timm.models.VisionTransformer
    monkeypatch.setattr(network, "get_classifier", lambda model: (model.head, model.head))
    with pytest.raises(UserError, match="several classifiers, or none"):
        timm_model.write_timm_folder(packnet.bundle, "two", str(tmp_path / "timm"))


def test_existing_file_is_refused(packnet: Finished, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(UserError, match="not an empty folder"):
        timm_model.write_timm_folder(packnet.bundle, "two", str(tmp_path / "mine"))


def test_export_with_different_logits_is_refused(
    packnet: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    collect = timm_model._collect_state_dict

    def other(*arguments: Any) -> dict[str, torch.Tensor]:
        tensors = collect(*arguments)
        return {name: tensor * 1.01 for name, tensor in tensors.items()}

    monkeypatch.setattr(timm_model, "_collect_state_dict", other)
    with pytest.raises(UserError, match="gives logits that differ by"):
        timm_model.export_timm_files(packnet.bundle, "two")
