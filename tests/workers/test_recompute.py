"""Tests of `train.recompute`: the backward pass computes the activations of blocks again."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import method_steps
import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from pipeline.testing.lab import TINY, Lab
from workers.errors import UserError
from workers.methods.adapter import find_adapter_sites
from workers.model.adapters import Bottlenecks
from workers.model.recompute import Recomputing, recompute_blocks

TRAIN = {"optimizer": "adamw", "lr": 1e-2, "weight_decay": 0.05, "epochs": 1}


def vit(**changes: Any) -> Any:
    torch.manual_seed(0)
    return method_steps.vit(img_size=32, embed_dim=64, depth=4, num_heads=4, **changes)


def bytes_kept(model: Any, images: Tensor) -> int:
    """Return the bytes that a forward pass keeps for its backward pass, without parameters."""
    kept: dict[int, int] = {}
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(images).sum()
    output.backward()
    return sum(kept.values())


def test_recomputed_block_keeps_only_its_input() -> None:
    model, images = vit(), method_steps.images(8, img_size=32)
    kept = bytes_kept(model, images)
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    recompute_blocks([*model.blocks])
    recompute_blocks([*model.blocks])
    assert bytes_kept(model, images) < kept / 4
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_copy_of_a_recomputed_block_uses_its_own_weights() -> None:
    model, images = vit(), method_steps.images(2, img_size=32)
    recompute_blocks([*model.blocks])
    teacher = copy.deepcopy(model)
    before = teacher(images)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    assert torch.equal(teacher(images), before)
    assert isinstance(teacher.blocks[0], Recomputing)


def test_adapter_gradients_are_equal_with_recomputed_blocks() -> None:
    """AdaptFormer's adapters add to the output of a block, and read the FFN's input."""
    gradients = []
    for recompute in (False, True):
        model, images = vit(), method_steps.images(2, img_size=32)
        sites = find_adapter_sites(model, "adaptformer")
        bottlenecks = Bottlenecks(len(sites), sites.width, 8, up_std=0.1)
        if recompute:
            recompute_blocks([*model.blocks])
        with sites.using(bottlenecks.tensors()):
            loss = model(images).sum()
        loss.backward()
        parameters = [*model.parameters(), *bottlenecks.parameters()]
        gradients.append([parameter.grad for parameter in parameters])
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.equal(plain, recomputed)


def results(lab: Lab, method: str, settings: Any, recompute: bool, **rest: Any) -> Any:
    train = TRAIN | rest.pop("train", {}) | {"recompute": recompute}
    run = lab.run_of(method, train, settings=settings, **rest)
    return [(run.state(task).to_bytes(), run.carried(task).to_bytes()) for task in range(2)]


@pytest.mark.parametrize(
    ("method", "settings", "rest"),
    [
        ("meat", {}, {"train": {"precision": "bf16", "accumulate": 2}}),
        ("finetune", {}, {"backbone": TINY | {"drop_path": 0.3}}),
        ("lora", {}, {"train": {"precision": "bf16", "clip": 0.1}}),
        ("dytox", {"rho": 0.05}, {}),
    ],
)
def test_recomputed_activations_give_the_same_bits(
    method: str, settings: Any, rest: Any, tmp_path: Path
) -> None:
    plain, recomputed = (
        results(Lab(tmp_path / str(recompute)), method, settings, recompute, **copy.deepcopy(rest))
        for recompute in (False, True)
    )
    assert plain == recomputed


def test_recompute_does_not_change_the_stage_key(lab: Lab) -> None:
    keys = [
        lab.run_of("finetune", TRAIN | {"recompute": recompute}).stages(0)[0].key
        for recompute in (False, True)
    ]
    assert keys[0] == keys[1]


@pytest.mark.parametrize(
    ("method", "backbone", "reason"),
    [
        ("supsup_nn", TINY, "method 'supsup_nn' keeps its activations"),
        ("finetune", {"name": "resnet10t", "img_size": 32}, "class ResNet keeps its activations"),
    ],
)
def test_unsupported_recompute_gives_a_warning(
    method: str, backbone: Any, reason: str, tmp_path: Path
) -> None:
    run = Lab(tmp_path).run_of(method, TRAIN | {"recompute": True}, backbone=backbone)
    warnings = run.trained(0).manifest["warnings"]
    assert any(reason in warning for warning in warnings), warnings


def test_recompute_with_compile_is_refused(lab: Lab) -> None:
    with pytest.raises(UserError, match=r"train\.recompute .* has no effect with compile"):
        lab.run_of("finetune", TRAIN | {"compile": True, "recompute": True})
