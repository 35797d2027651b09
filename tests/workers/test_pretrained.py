"""Tests of pretrained weights of all families: from timm's hub, and own checkpoints with a head."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch
from families import SMALL
from torch import Tensor

from pipeline.testing.lab import Lab
from workers.errors import UserError
from workers.job import BackboneSettings, Task
from workers.model import pretrained, vit

CLASSES = 7
# crossvit has no filter function at module level; its weights are used without a conversion.
WITHOUT_FILTER = ("crossvit",)


def own_weights(family: str, folder: Path) -> tuple[str, dict[str, Tensor]]:
    """Write a checkpoint of a family's small model with a head, as a user's own training would.

    Return the path and the tensors.
    """
    settings = BackboneSettings(**SMALL[family])
    options: dict[str, Any] = dict(settings.options)
    if family not in ("ConvNeXt", "ResNet", "MobileNetV3", "EfficientNet"):
        options["img_size"] = settings.img_size
    torch.manual_seed(3)
    model = timm.create_model(settings.name, num_classes=CLASSES, **options)
    tensors = {name: t.contiguous() for name, t in model.state_dict().items()}
    path = folder / f"{family}.safetensors"
    safetensors.torch.save_file(tensors, str(path))
    return str(path), tensors


@pytest.mark.parametrize("family", SMALL)
def test_fine_tuned_checkpoint_loads_without_its_head(family: str, tmp_path: Path) -> None:
    path, tensors = own_weights(family, tmp_path)
    settings = BackboneSettings(**SMALL[family], weights=path)
    model = vit.build(settings)
    sentences = vit.load_weights(model, settings)
    own = model.state_dict()
    assert all(torch.equal(own[name], tensors[name]) for name in own)
    (head,) = {name.rpartition(".")[0] for name in tensors.keys() - own.keys()}
    assert sentences == [
        f"the classifier in backbone.weights ({head}, {CLASSES} classes) was left out: each task "
        "has a head of its own"
    ]


@pytest.mark.parametrize("family", SMALL)
def test_checkpoint_classifier_becomes_the_head_of_its_task(family: str, tmp_path: Path) -> None:
    path, tensors = own_weights(family, tmp_path)
    settings = BackboneSettings(**SMALL[family], weights=path)
    backbone = vit.build(settings)
    vit.load_weights(backbone, settings)
    task = Task("old", "card", "", tuple(f"class {number}" for number in range(CLASSES)))
    head = vit.load_head(backbone, settings, task)
    options: dict[str, Any] = dict(settings.options)
    if family not in ("ConvNeXt", "ResNet", "MobileNetV3", "EfficientNet"):
        options["img_size"] = settings.img_size
    own = timm.create_model(settings.name, num_classes=CLASSES, **options).eval()
    own.load_state_dict(tensors)
    x = torch.randn(2, 3, settings.img_size, settings.img_size)
    logits = torch.nn.functional.linear(backbone.eval()(x), head["weight"], head["bias"])
    assert torch.allclose(logits, own(x), atol=1e-5)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda tensors: {n: t for n, t in tensors.items() if "head" not in n}, "no classifier"),
        (
            lambda tensors: tensors | {"head_dist.weight": torch.zeros(CLASSES, 32)},
            r"several layers \(head, head_dist\)",
        ),
        (
            lambda tensors: tensors | {"head.weight": torch.zeros(3, 32)},
            r"shape \(3, 32\), where \(7, 32\)",
        ),
    ],
)
def test_unsuitable_checkpoint_classifier_is_refused(
    change: Any, sentence: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2}
    settings = BackboneSettings(img_size=16, options=options, weights=str(tmp_path / "w"))
    own = timm.create_model(settings.name, num_classes=CLASSES, img_size=16, **options)
    safetensors.torch.save_file(change(own.state_dict()), settings.weights)
    task = Task("old", "card", "", tuple(f"class {number}" for number in range(CLASSES)))
    with pytest.raises(UserError, match=sentence):
        vit.load_head(vit.build(settings), settings, task)


@pytest.mark.parametrize("family", ["Swin", "EVA-02", "BEiT", "DINOv3"])
def test_positions_are_resampled_to_another_size(family: str, tmp_path: Path) -> None:
    path, tensors = own_weights(family, tmp_path)
    settings = BackboneSettings(**{**SMALL[family], "img_size": 64}, weights=path)
    model = vit.build(settings)
    vit.load_weights(model, settings)
    assert model.eval()(torch.zeros(1, 3, 64, 64)).isfinite().all()
    own = model.state_dict()
    same = [n for n in own if own[n].shape == tensors[n].shape and torch.equal(own[n], tensors[n])]
    assert len(same) > len(own) / 2


def test_weights_of_another_architecture_are_refused(tmp_path: Path) -> None:
    path, _ = own_weights("Swin", tmp_path)
    settings = BackboneSettings(**SMALL["EfficientNet"], weights=path)
    with pytest.raises(UserError, match=r"do not fit 'test_efficientnet'.*same architecture"):
        vit.load_weights(vit.build(settings), settings)


def test_hub_weights_of_a_timm_tag_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "models--timm--lcnet_050.ra2_in1k"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    (folder / "snapshots" / ("0" * 40)).mkdir(parents=True)
    torch.manual_seed(3)
    published = timm.create_model("lcnet_050").state_dict()
    file = folder / "snapshots" / ("0" * 40) / "model.safetensors"
    safetensors.torch.save_file(published, str(file))
    settings = BackboneSettings(name="lcnet_050.ra2_in1k", img_size=32, weights="hub")
    model = vit.build(settings)
    assert vit.load_weights(model, settings) == [], (
        "no warning about the classifier of timm's weights"
    )
    own = model.state_dict()
    assert all(torch.equal(own[name], published[name]) for name in own)


def test_run_from_own_weights_warns_about_the_skipped_head(lab: Lab) -> None:
    path, _ = own_weights("ResNet", lab.folder)
    backbone = {"crop_pct": 1.0, **SMALL["ResNet"], "weights": path}
    run = lab.run_of("linear", {"epochs": 1}, backbone=backbone)
    warnings = run.artifact(run.jobs["backbone"]).manifest["warnings"]
    assert [f"{CLASSES} classes) was left out" in text for text in warnings] == [True]


def test_every_checkpoint_filter_of_timm_is_found() -> None:
    """Contract: timm keeps these functions in its model modules, under known names."""
    folder = Path(timm.__file__).parent / "models"
    for module in timm.list_modules():
        file = folder / f"{module}.py"
        text = file.read_text() if file.exists() else ""  # own modules are elsewhere
        if re.search(r"pretrained_filter_fn=\w", text) and module not in WITHOUT_FILTER:
            assert pretrained.find_filter(timm.list_models(module=module)[0]), module


def test_shared_layer_is_stored_under_each_of_its_names() -> None:
    """CoaT shares layers among its blocks."""

    def sharing() -> torch.nn.ModuleDict:
        layer = torch.nn.Linear(3, 2)
        return torch.nn.ModuleDict({"a": layer, "b": layer})

    model, other = sharing(), sharing()
    vit.from_bytes(other, vit.to_bytes(model), "weights")
    assert vit.compute_digest(other) == vit.compute_digest(model)
    assert other["a"] is other["b"]
