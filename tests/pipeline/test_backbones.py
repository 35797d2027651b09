"""Tests of backbone settings: defaults from timm or the hub, and their part in stage keys.

No test here opens a connection.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch

from pipeline import cli
from pipeline.config.settings import BackboneChoice, Config
from pipeline.config.settings import check as check_config
from pipeline.config.yaml_files import CARDS
from pipeline.graph.backbone import resolve_backbone
from pipeline.graph.store import Store
from tests import small_run
from workers.errors import UserError
from workers.job import key_inputs
from workers.model import pretrained, vit
from workers.storage import hub

OPTIONS: dict[str, Any] = {"patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2}
ARCHITECTURE = "vit_tiny_patch16_224"
COMMIT = "0" * 39 + "1"
WEIGHTS = "hf-hub:somebody/painted"
CONFIG: dict[str, Any] = {
    "architecture": ARCHITECTURE,
    "num_classes": 7,
    "model_args": {**OPTIONS, "img_size": 16},
    "pretrained_cfg": {
        "tag": "painted",
        "input_size": [3, 16, 16],
        "mean": [0.1, 0.2, 0.3],
        "std": [0.4, 0.5, 0.6],
        "crop_pct": 1.0,
        "classifier": "head",
    },
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return an empty cache of the hub's client; the hub itself refuses connections."""
    from huggingface_hub import constants

    folder = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    hub.check_reachable.cache_clear()
    yield folder
    hub.check_reachable.cache_clear()


def put_model(cache: Path, config: Any = CONFIG, commit: str = COMMIT, seed: int = 0) -> Any:
    """Store a small model with 7 classes in the cache as the hub's client does, and return it."""
    torch.manual_seed(seed)
    model = timm.create_model(ARCHITECTURE, num_classes=7, img_size=16, **OPTIONS)
    folder = cache / "models--somebody--painted"
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True, exist_ok=True)
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / "main").write_text(commit)
    text = config if isinstance(config, str) else json.dumps(config)
    (snapshot / "config.json").write_text(text)
    safetensors.torch.save_file(model.state_dict(), str(snapshot / "model.safetensors"))
    return model


def config_of(folder: Path, **backbone: Any) -> str:
    card = small_run.make_card(folder, "a", "23")
    body = small_run.make_body(folder, {"a": card}, ["linear"])
    body["backbone"] = backbone
    body["train"]["epochs"] = 1
    return small_run.write_config(folder / "config.yaml", body)


def resolved(folder: Path, **backbone: Any) -> Any:
    """Resolve the backbone of a config without a connection."""
    body = small_run.make_body(folder, {"a": "none.yaml"}, ["linear"])
    body["backbone"] = backbone
    config: Config = check_config(body, "test", with_methods=False)
    return resolve_backbone(config, Store(str(folder / "storage")), may_connect=False)


# ---- missing files -------------------------------------------------------------------------------
def test_missing_weights_error_names_the_environment_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = "${ACCRETE_DATA:-../shared/data}/weights/no.safetensors"
    monkeypatch.delenv("ACCRETE_DATA", raising=False)
    with pytest.raises(UserError, match=r"set the environment variable ACCRETE_DATA .*not set"):
        resolved(tmp_path, weights=path)
    monkeypatch.setenv("ACCRETE_DATA", "/nowhere")
    with pytest.raises(UserError, match=r"set .* ACCRETE_DATA .*\(it is '/nowhere'\), or give"):
        resolved(tmp_path, weights=path)


def test_missing_weights_error_names_base_of_relative_path(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"a relative path starts at {CARDS.parent};"):
        resolved(tmp_path, weights="no.safetensors")
    with pytest.raises(UserError, match=r"does not exist; give a \.safetensors file"):
        resolved(tmp_path, weights=str(tmp_path / "no.safetensors"))


# ---- the model's own configuration ---------------------------------------------------------------
def test_input_settings_default_to_those_of_the_pretrained_model(
    tmp_path: Path,
) -> None:
    settings = resolved(tmp_path, name="convnext_atto.d2_in1k").settings
    assert settings.img_size == 224
    assert settings.mean == (0.485, 0.456, 0.406)
    assert settings.std == (0.229, 0.224, 0.225)
    assert settings.crop_pct == 0.875
    assert resolved(tmp_path, name="vit_base_patch16_384").settings.img_size == 384
    clip = resolved(tmp_path, name="vit_base_patch32_clip_224.openai").settings
    assert clip.mean == (0.48145466, 0.4578275, 0.40821073)


def test_configured_values_override_defaults_and_null_means_default(tmp_path: Path) -> None:
    chosen = {"img_size": 64, "mean": [0.1, 0.1, 0.1], "std": None, "crop_pct": 1.0}
    settings = resolved(tmp_path, name="convnext_atto", **chosen).settings
    assert (settings.img_size, settings.mean, settings.crop_pct) == (64, (0.1, 0.1, 0.1), 1.0)
    assert settings.std == (0.229, 0.224, 0.225)


def test_project_model_keeps_its_earlier_input_defaults(tmp_path: Path) -> None:
    settings = resolved(tmp_path, name="t2t_vit_12").settings
    assert (settings.img_size, settings.mean, settings.crop_pct) == (224, (0.5, 0.5, 0.5), 0.9)


def test_resolved_and_configured_values_give_equal_keys(tmp_path: Path) -> None:
    unset = resolved(tmp_path, name="convnext_atto")
    values = key_inputs(unset.settings)
    assert "interpolation" not in values, "older results stay valid"
    spelled_out = {name: values[name] for name in ("img_size", "mean", "std", "crop_pct")}
    written = resolved(tmp_path, name="convnext_atto", **spelled_out)
    assert key_inputs(written.settings) == values
    assert values["mean"] == (0.485, 0.456, 0.406)


def test_interpolation_defaults_to_that_of_the_pretrained_model(tmp_path: Path) -> None:
    bilinear = resolved(tmp_path, name="resnet18.tv_in1k").settings
    assert bilinear.interpolation == "bilinear"
    assert key_inputs(bilinear)["interpolation"] == "bilinear"
    assert resolved(tmp_path, name="resnet18.a1_in1k").settings.interpolation == "bicubic"
    chosen = resolved(tmp_path, name="resnet18.tv_in1k", interpolation="bicubic").settings
    assert chosen.interpolation == "bicubic"
    with pytest.raises(UserError, match=r"backbone\.interpolation.*'bicubic' or 'bilinear'"):
        resolved(tmp_path, name="resnet18", interpolation="nearest")


@pytest.mark.slow
def test_input_settings_of_every_timm_model_can_be_read() -> None:
    for name in timm.list_models(pretrained=True):
        values = pretrained.own_input(name)
        assert 0 < values["crop_pct"] <= 1, name
        assert len(values["mean"]) == len(values["std"]) == 3, name


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("convnext_atto.d2", ["no weights of 'convnext_atto' with the tag 'd2'", "d2_in1k"]),
        ("convnext_atom.d2_in1k", ["which timm does not have", "convnext_atto"]),
        ("hf-hub:timm/resnet18", ["a model's name alone", "weights: hf-hub:OWNER/NAME"]),
        ("local-dir:/tmp", ["a model's name alone"]),
    ],
)
def test_unknown_timm_name_is_refused_with_a_hint(
    name: str, words: list[str], tmp_path: Path
) -> None:
    with pytest.raises(UserError) as raised:
        resolved(tmp_path, name=name)
    assert all(word in str(raised.value) for word in words), raised.value


@pytest.mark.parametrize("weights", ["local-dir:/tmp", "hf_hub:a/b", "https://a.b/c", "hf-hub:a"])
def test_weights_from_unsupported_sources_are_refused(weights: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"backbone\.weights is .*hf-hub:OWNER/NAME"):
        resolved(tmp_path, weights=weights)


# ---- a model on the hub --------------------------------------------------------------------------
def test_hub_model_provides_architecture_arguments_input_settings_and_weights(
    cache: Path, tmp_path: Path
) -> None:
    model = put_model(cache)
    backbone = resolved(tmp_path, weights=WEIGHTS)
    settings = backbone.settings
    assert (settings.name, settings.options, settings.img_size) == (ARCHITECTURE, OPTIONS, 16)
    assert (settings.mean, settings.crop_pct) == ((0.1, 0.2, 0.3), 1.0)
    assert settings.weights == f"{WEIGHTS}@{COMMIT}", "workers read the files of one commit"
    loaded = vit.build(settings)
    vit.load_weights(loaded, settings)
    expected = {k: v for k, v in model.state_dict().items() if not k.startswith("head.")}
    tensors = loaded.state_dict()
    assert tensors.keys() == expected.keys(), "the classifier of 7 classes is not loaded"
    assert all(torch.equal(tensors[name], value) for name, value in expected.items())


def test_plan_after_run_works_without_contacting_the_hub(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    put_model(cache)
    config = config_of(tmp_path, weights=WEIGHTS)
    assert cli.main(["run", config]) == 0, capsys.readouterr().err
    record = json.loads((tmp_path / "storage" / "runs" / "small" / "run.json").read_text())
    assert record["config"]["backbone"]["name"] == ARCHITECTURE
    assert record["config"]["backbone"]["mean"] == [0.1, 0.2, 0.3]
    assert record["config"]["backbone"]["weights"] == WEIGHTS

    def refuse(*args: Any) -> str:
        raise AssertionError("plan asked whether the hub can be reached")

    monkeypatch.setattr(hub, "find_connection_problem", refuse)
    for is_cached in (True, False):
        if not is_cached:
            shutil.rmtree(cache)
        capsys.readouterr()
        assert cli.main(["plan", config]) == 0
        assert "0 to run" in capsys.readouterr().out


def test_plan_of_unfetched_hub_model_suggests_run(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", config_of(tmp_path, weights=WEIGHTS)]) == 2
    error = capsys.readouterr().err
    assert "its config.json is not in the cache of this machine" in error
    assert "`run`" in error
    assert error.count("\n") == 1


def test_key_changes_only_if_the_hub_weights_change(cache: Path, tmp_path: Path) -> None:
    put_model(cache)
    before = resolved(tmp_path, weights=WEIGHTS)
    put_model(cache, commit="0" * 39 + "2")
    same = resolved(tmp_path, weights=WEIGHTS)
    put_model(cache, commit="0" * 39 + "3", seed=1)
    other = resolved(tmp_path, weights=WEIGHTS)
    assert before.weights == same.weights, "a commit that does not change the weights keeps the key"
    assert before.weights != other.weights
    assert resolved(tmp_path, weights=f"{WEIGHTS}@{COMMIT}").weights == before.weights


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_args": {"pretrained_cfg": "x"}}, "how timm loads or makes a model"),
        ({"model_args": {"block_fn": "os.system"}}, "how timm loads or makes a model"),
        ({"model_args": {"depth": 100_000}}, "at most 200"),
        ({"model_args": {"no_such": 3}}, "has no such option"),
        ({"model_args": {"embed_dim": 1e300}}, "at most 65536"),
        ({"model_args": [1]}, "not a mapping"),
        ({"architecture": "../../x"}, "backbone.name"),
        ({"architecture": 3}, "names no `architecture`"),
        ({"architecture": "resnet18"}, "has no such option"),
        ({"pretrained_cfg": {"input_size": [3, 1 << 20, 1 << 20]}, "model_args": OPTIONS}, "4096"),
        ({"pretrained_cfg": {"mean": ["a", 0, 0]}}, "backbone.mean"),
        ({"pretrained_cfg": {"std": [0, 0, 0]}}, "backbone.std"),
    ],
)
def test_hostile_hub_config_is_refused_in_one_sentence(
    change: dict[str, Any], words: str, cache: Path, tmp_path: Path
) -> None:
    put_model(cache, {**CONFIG, **change})
    with pytest.raises(UserError) as raised:
        resolved(tmp_path, weights=WEIGHTS)
    assert words in str(raised.value), raised.value
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, " " * (1 << 20) + "{}"])
def test_malformed_hub_config_is_refused(text: str, cache: Path, tmp_path: Path) -> None:
    put_model(cache, text)
    with pytest.raises(UserError, match=r"config\.json"):
        resolved(tmp_path, weights=WEIGHTS)


def test_backbone_name_must_match_the_hub_model(cache: Path, tmp_path: Path) -> None:
    put_model(cache)
    assert resolved(tmp_path, weights=WEIGHTS, name=ARCHITECTURE).settings.name == ARCHITECTURE
    with pytest.raises(UserError, match=r"leave backbone\.name out"):
        resolved(tmp_path, weights=WEIGHTS, name="resnet18")


def test_hub_model_with_only_pickled_weights_is_refused(cache: Path, tmp_path: Path) -> None:
    put_model(cache)
    snapshot = next((cache / "models--somebody--painted" / "snapshots").iterdir())
    (snapshot / "model.safetensors").rename(snapshot / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"model\.safetensors is not in the cache"):
        resolved(tmp_path, weights=WEIGHTS)


def test_backbone_choice_survives_a_json_round_trip() -> None:
    choice = BackboneChoice(name="convnext_atto.d2_in1k")
    assert BackboneChoice.model_validate(choice.model_dump(mode="json")) == choice
    assert BackboneChoice.model_validate(BackboneChoice().model_dump(mode="json")).name == ""
