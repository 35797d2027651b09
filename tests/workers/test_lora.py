"""Tests of LoRA: its start, the equality of branch and merged weights, and the stored size."""

from __future__ import annotations

from typing import Any

import method_steps
import pytest
import torch
from families import SMALL
from method_steps import BASE, ONE, TWO, answers, batch, begun, images, vit
from torch import Tensor
from torch.nn import functional as F

from workers.errors import UserError
from workers.job import BackboneSettings
from workers.methods.base import Progress
from workers.methods.lora import Lora, LoraSettings
from workers.model.lowrank import Target, shapes
from workers.model.vit import build, compile_blocks, compute_digest, measure_statistics
from workers.storage.taskstate import TaskState

TARGETS = ("qkv", "qv")
PROGRESS = Progress(0, 0, 1, 6)


def lora(**settings: Any) -> Lora:
    return Lora(vit(), LoraSettings(**{"rank": 3, "alpha": 6.0, **settings}), seed=1)


def spread(method: Lora) -> Lora:
    """Set the update and the head of a method to random values, and return the method."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        factors = method.update.tensors()
        for p, std in (
            (method.heads["one"].weight, 1.0),
            (factors["a"], 0.2),
            (factors["b"], 0.2),
        ):
            p.copy_(torch.randn(p.shape, generator=generator) * std)
    return method


def by_hand(state: TaskState, target: str, scale: float) -> Tensor:
    """Return the logits of a ViT with the weights W + s B A, which are set part by part."""
    model, d = vit(), 32
    for i, block in enumerate(model.blocks):
        a, b = state.copies["a"][i], state.copies["b"][i]
        w = block.attn.qkv.weight.data
        if target == "qkv":
            w += scale * b[0] @ a[0]
        else:
            w[:d] += scale * b[0] @ a[0]
            w[2 * d :] += scale * b[1] @ a[1]
    with torch.no_grad():
        return F.linear(model(images()), state.head["weight"], state.head["bias"])


@pytest.mark.parametrize("target", TARGETS)
def test_new_task_starts_with_the_backbones_outputs(target: str) -> None:
    method = lora(target=target)
    begun(method)
    assert torch.equal(
        method.loss(batch(), PROGRESS)[0],
        F.cross_entropy(method.heads["one"](vit()(batch().images)), batch().labels),
    ), "training must start as the backbone"
    assert torch.equal(answers(method), method.heads["one"](vit()(images()))), "serving too"
    start = method.update.tensors()["a"].detach()
    assert start.abs().max() <= 32**-0.5
    assert float(start.std()) == pytest.approx((32 * 3) ** -0.5, rel=0.2)


@pytest.mark.parametrize("target", TARGETS)
def test_branch_and_merged_weights_give_equal_logits(target: str) -> None:
    method = lora(target=target)
    begun(method)
    served = answers(spread(method))
    assert method.sites is not None
    with method.sites.using(method.factors(method.update.tensors())):
        unmerged = method.heads["one"](method.backbone(images()))
    assert torch.allclose(served, unmerged, atol=1e-5), "equal up to rounding"
    assert torch.allclose(served, by_hand(method.finish()[0], target, 6.0 / 3), atol=1e-5)
    assert not torch.allclose(served, method.heads["one"](vit()(images())), atol=0.05)


@pytest.mark.parametrize("target", TARGETS)
def test_branch_and_merged_weights_have_equal_gradients(target: str) -> None:
    method, whole = lora(target=target), lora(target=target)
    for each in (method, whole):
        begun(each)
        spread(each)
    method.loss(batch(), PROGRESS)[0].backward()
    whole.weight_overrides = whole.serving_weights("one")
    whole.classification_loss(whole.features(batch().images), batch()).backward()
    for name in ("a", "b"):
        branch_gradient = method.update.get_parameter(name).grad
        merged_gradient = whole.update.get_parameter(name).grad
        assert branch_gradient is not None
        assert merged_gradient is not None
        assert torch.allclose(branch_gradient, merged_gradient, atol=1e-5)
        assert branch_gradient.flatten(1).any(1).all()


@pytest.mark.parametrize("target", TARGETS)
def test_switching_tasks_restores_the_weights_exactly(target: str) -> None:
    method = lora(target=target)
    method_steps.load_base_head(method)
    before = answers(method, BASE)
    states = []
    for task in (ONE, TWO):
        states.append(method_steps.trained(method, task))
        method.load_task(TaskState.from_bytes(states[-1].to_bytes()))
        assert not torch.equal(answers(method, task), before[:, :1].expand(-1, task.num_classes))
    first = answers(method, ONE)
    assert answers(method, TWO).shape == (8, 3)
    assert torch.equal(answers(method, BASE), before), "other tasks that are served change no bit"
    assert torch.equal(answers(method, ONE), first)
    assert compute_digest(method.backbone) == method.backbone_digest == compute_digest(vit())
    assert states[0].copies["b"].any()


@pytest.mark.parametrize("target", TARGETS)
def test_the_size_is_that_of_the_published_baseline(target: Target) -> None:
    """Rank 4 on a ViT-B has 147,456 values, 0.17 % of the network, for both targets."""
    with torch.device("meta"):
        model: Any = build(BackboneSettings(name="vit_base_patch16_224"))
    rows, width = model.blocks[0].attn.qkv.weight.shape
    tensor_shapes = shapes(len(model.blocks), rows, width, 4, target)
    size = sum(torch.Size(shape).numel() for shape in tensor_shapes.values())
    expected_sizes = {"qkv": 147_456, "qv": 12 * 2 * 2 * 4 * 768}
    assert size == expected_sizes[target]


def test_stored_state_holds_the_factors_and_head() -> None:
    method = lora()
    begun(method)
    state = method.finish()[0]
    assert state.sizes() == {
        "masks": 0,
        "tokens": 0,
        "copies": 4 * 2 * 3 * (32 + 96),
        "head": 4 * 2 * 33,
    }
    assert method.flops_share(state) == 1


@pytest.mark.parametrize("other", [{"rank": 4}, {"target": "qv"}, {"alpha": 3.0}])
def test_a_state_of_other_settings_is_refused(other: dict[str, Any]) -> None:
    state = method_steps.trained(lora())
    with pytest.raises(
        UserError, match=r"its state has updates of shapes .* with alpha 6.0, these settings have"
    ):
        lora(**other).load_task(state)


def test_a_backbone_without_a_fused_projection_is_refused() -> None:
    with torch.device("meta"):
        convit = build(BackboneSettings(name="convit_local", img_size=32))
    with pytest.raises(UserError, match=r"block 0 of the backbone has no module 'attn.qkv'"):
        Lora.check_backbone(LoraSettings(), convit)


@pytest.mark.slow
def test_compiled_blocks_switch_between_training_and_serving() -> None:
    method = lora()
    begun(method)
    spread(method)
    expected = method.loss(batch(), PROGRESS)[0], answers(method), method.loss(batch(), PROGRESS)[0]
    compile_blocks(method.backbone, backend="eager")
    compiled = method.loss(batch(), PROGRESS)[0], answers(method), method.loss(batch(), PROGRESS)[0]
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(compiled, expected, strict=True))


# ---- on other backbones --------------------------------------------------------------------------
def on_family(family: str, **settings: Any) -> Lora:
    torch.manual_seed(0)
    small = SMALL[family.removeprefix("split ")]
    if family.startswith("split "):
        small = {**small, "options": {**small["options"], "qkv_fused": False}}
    backbone = build(BackboneSettings(**small))
    measure_statistics(backbone, 32)
    chosen = LoraSettings(**{"rank": 3, "alpha": 6.0, **settings})
    Lora.check_backbone(chosen, backbone)
    return Lora(backbone.eval(), chosen, seed=1)


@pytest.mark.parametrize(
    ("family", "target", "sites"),
    [
        ("Swin", "qkv", 4),
        ("BEiT", "qv", 2),
        ("EVA-02", "qkv", 2),
        ("split EVA-02", "qkv", 6),
        ("split EVA-02", "qv", 4),
        ("ConvNeXt", "linear", 8),
        ("Swin", "linear", 17),
    ],
)
def test_linear_layers_of_other_backbones_are_updated_by_name(
    family: str, target: Target, sites: int
) -> None:
    method = on_family(family, target=target)
    assert len(method.linear_sites) == sites
    plain = on_family(family, target=target).backbone
    begun(method)
    side = images(img_size=32)
    expected = method.heads["one"](plain(side))
    assert torch.equal(method.logits(side, "one"), expected), "the method starts as the backbone"
    with torch.no_grad():
        for name, factor in method.update.tensors().items():
            if name.endswith(".b"):
                factor.normal_(std=0.3)
    method.active_task = None
    moved = method.logits(side, "one")
    assert not torch.equal(moved, expected)
    state = method.finish()[0]
    by_hand = on_family(family, target=target).backbone
    for site, parts in method.linear_sites.items():
        weight: Tensor = by_hand.get_submodule(site).weight.data  # type: ignore[assignment]
        a, b = state.copies[f"{site}.a"], state.copies[f"{site}.b"]
        weight.view(len(weight), -1)[: b.shape[1]] += 2.0 * b[0] @ a[0]
        if parts == 2:
            weight.view(len(weight), -1)[-b.shape[1] :] += 2.0 * b[1] @ a[1]
    answer = F.linear(by_hand(side), state.head["weight"], state.head["bias"])
    assert torch.allclose(moved, answer, atol=1e-5)
    served = on_family(family, target=target)
    served.load_task(TaskState.from_bytes(state.to_bytes()))
    assert torch.equal(served.logits(side, "one"), moved)


def test_backbone_without_attention_layers_is_refused_with_a_hint() -> None:
    with pytest.raises(UserError, match="set target=linear, or choose a backbone with attention"):
        on_family("ConvNeXt")
