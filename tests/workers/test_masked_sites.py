"""Tests of the setting `sites: ffn` of methods that mask weight matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from method_steps import ONE, TWO, answers, begun, trained, vit

from workers.errors import UserError
from workers.job import BackboneSettings, DataSettings, TrainSettings
from workers.methods import METHODS
from workers.methods.piggyback import PiggybackSettings
from workers.methods.supsup import OUTPUTS, SupSupSettings
from workers.model.vit import build
from workers.model.weights import weight_sites

FFN = [f"blocks.{block}.mlp.{layer}" for block in range(2) for layer in ("fc1", "fc2")]


def method_of(name: str, **settings: Any) -> Any:
    return METHODS[name](vit(), METHODS[name].Settings(**settings), seed=1)


def test_ffn_sites_are_the_mlp_layers_of_timm() -> None:
    assert list(weight_sites(vit(), "ffn")) == FFN
    assert set(FFN) < set(weight_sites(vit()))
    convnext = build(BackboneSettings(name="convnext_atto", img_size=32))
    assert all(".mlp." in name for name in weight_sites(convnext, "ffn"))


@pytest.mark.parametrize("name", ["piggyback", "ksm", "supsup", "wsn"])
def test_only_ffn_layers_are_masked(name: str) -> None:
    method = method_of(name, sites="ffn")
    outputs = {OUTPUTS} & set(method.sites)  # SupSup also masks its output layer
    assert set(method.sites) - outputs == set(FFN)
    state = trained(method)
    assert {mask.removesuffix(".soft") for mask in state.masks} - outputs == set(FFN)
    begun(method)
    assert set(method.masks) - outputs == set(FFN)


@pytest.mark.parametrize("name", ["piggyback", "ksm", "supsup", "wsn"])
def test_served_tasks_mask_only_ffn_layers(name: str) -> None:
    """Other layers use the weights of the backbone."""
    learner = method_of(name, sites="ffn")
    state = trained(learner)
    served = method_of(name, sites="ffn")
    served.load_task(state)
    weights = served.serving_weights(state.task)
    masked = {key.removesuffix(".weight") for key in weights if key.endswith(".weight")}
    assert set(FFN) <= masked
    others = {site for site in weight_sites(vit()) if site not in FFN}
    assert not masked & others
    assert torch.isfinite(answers(served, ONE)).all()


def test_a_backbone_without_ffn_is_refused() -> None:
    settings = PiggybackSettings(sites="ffn")
    with torch.device("meta"):
        resnet = build(BackboneSettings(name="resnet18", img_size=32))
    with pytest.raises(UserError, match=r"sites is 'ffn'.*ResNet.*sites=all"):
        METHODS["piggyback"].check_backbone(settings, resnet, (ONE, TWO))


def test_signed_constants_are_refused_with_ffn_sites() -> None:
    settings = SupSupSettings(sites="ffn", weights="signed_constant", start="kaiming")
    with pytest.raises(UserError, match=r"sites is 'ffn'.*weights=pretrained"):
        METHODS["supsup"].validate(settings, TrainSettings(), DataSettings(), "task")
