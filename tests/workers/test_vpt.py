"""Tests of VPT: the position of prompts, their training, size and compute cost, and switches
between tasks."""

from __future__ import annotations

import copy
import math
from typing import Any

import method_steps
import pytest
import torch
from method_steps import (
    BASE,
    ONE,
    OTHER_VITS,
    TWO,
    answers,
    batch,
    begun,
    images,
    other_vit,
    vit,
)
from torch import Tensor

from workers.errors import UserError
from workers.job import BackboneSettings
from workers.methods.vpt import Vpt, VptSettings
from workers.model.prompts import PromptSites, draw_initial_prompts, leave_unbiased
from workers.model.vit import build, compile_blocks, compute_digest
from workers.storage.taskstate import TaskState

DEPTHS = ("shallow", "deep")
IMAGES = images(3)
BACKBONES: dict[
    str, dict[str, Any]
] = {  # ways in which prompts could affect answers other than through attention
    "class token": {},
    "mean of patches": {"class_token": False, "global_pool": "avg"},
    "mean beside a class token": {"global_pool": "avg"},
    "registers": {"reg_tokens": 2},
    "positions of patches alone": {"no_embed_class": True},
    "norm before the blocks": {"pre_norm": True},
    "mean of all": {"global_pool": "avg", "pool_include_prefix": True},
    "attention pool": {"global_pool": "map"},
}


def vpt(**settings: Any) -> Vpt:
    return Vpt(vit(), VptSettings(**settings), seed=1)


def drawn(blocks: int, prompts: int = 3) -> Tensor:
    return torch.randn(blocks, prompts, 32, generator=torch.Generator().manual_seed(2))


def by_hand(
    model: Any, prompts: Tensor, images: Tensor = IMAGES, passed_on: bool = False
) -> Tensor:
    """Return the features from a written-out forward pass.

    passed_on: pass the prompts of the first block on to later blocks, instead of replacing them.
    """
    prefix, count = model.num_prefix_tokens, prompts.shape[1]
    x = model.norm_pre(model._pos_embed(model.patch_embed(images)))
    front, patches, p = x[:, :prefix], x[:, prefix:], prompts[0].expand(len(x), -1, -1)
    for i, block in enumerate(model.blocks):
        if i and len(prompts) > 1 and not passed_on:
            p = prompts[i].expand(len(x), -1, -1)
        front, p, patches = block(torch.cat([front, p, patches], 1)).split(
            [prefix, count, patches.shape[1]], 1
        )
    features: Tensor = model.forward_head(model.norm(torch.cat([front, patches], 1)))
    return features


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("options", BACKBONES.values(), ids=BACKBONES.keys())
def test_prompts_follow_the_prefix_and_are_not_pooled(options: dict[str, Any], depth: Any) -> None:
    model = vit(**options)
    sites = PromptSites(model, depth)
    prompts, plain = drawn(len(sites)), model(IMAGES)
    with sites.using(prompts):
        logits, tokens = model(IMAGES), model.forward_features(IMAGES)
    assert torch.allclose(logits, by_hand(model, prompts), atol=1e-6)
    assert not torch.allclose(logits, plain, atol=1e-2)
    assert (
        tokens.shape == model.forward_features(IMAGES).shape == (3, model.num_prefix_tokens + 4, 32)
    )
    assert torch.equal(model(IMAGES), plain)


@pytest.mark.parametrize("depth", DEPTHS)
def test_backbone_without_prompts_is_unchanged(depth: Any) -> None:
    model = vit()
    sites = PromptSites(model, depth)
    plain = model(IMAGES)
    for none in (None, drawn(len(sites), 0)):
        with sites.using(none):
            assert torch.equal(model(IMAGES), plain)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("form", OTHER_VITS.values(), ids=OTHER_VITS.keys())
def test_prompts_of_other_families_have_no_position(form: dict[str, Any], depth: Any) -> None:
    """The order of prompts does not matter, and without prompts the backbone is unchanged."""
    model = other_vit(**form)
    plain, tokens = model(IMAGES), model.forward_features(IMAGES)
    sites = PromptSites(model, depth)
    prompts = drawn(len(sites))
    assert torch.equal(model(IMAGES), plain)
    with sites.using(prompts):
        logits, prompted = model(IMAGES), model.forward_features(IMAGES)
        assert torch.equal(copy.deepcopy(model)(IMAGES), plain)
    with sites.using(prompts.flip(1)):
        assert torch.allclose(model(IMAGES), logits, atol=1e-5)
    with sites.using(drawn(len(sites), 0)):
        assert torch.equal(model(IMAGES), plain)
    assert not torch.allclose(logits, plain, atol=1e-4)
    assert prompted.shape == tokens.shape
    assert torch.equal(model(IMAGES), plain)


@pytest.mark.parametrize("name", ["eva02_tiny_patch14_224", "vit_small_patch16_dinov3"])
def test_rotary_attention_does_not_rotate_prompts(name: str) -> None:
    """timm's rotary attention does not rotate the prefix; the expected value includes prompts in
    the prefix."""
    model, prompts = other_vit(name), drawn(1)
    with PromptSites(model, "shallow").using(prompts):
        logits = model(IMAGES)
    twin = other_vit(name)
    prefix = twin.num_prefix_tokens
    x, rope = twin._pos_embed(twin.patch_embed(IMAGES))
    x = torch.cat([x[:, :prefix], prompts[0].expand(len(x), -1, -1), x[:, prefix:]], 1)
    for block in twin.blocks:
        block.attn.num_prefix_tokens = prefix + 3
        x = block(x, rope=rope)
    x = torch.cat([x[:, :prefix], x[:, prefix + 3 :]], 1)
    assert torch.allclose(logits, twin.forward_head(twin.norm(x)), atol=1e-5)


def test_relative_position_bias_does_not_apply_to_prompts() -> None:
    """BEiT's bias between tokens is unchanged; between prompts and tokens it is 0."""
    bias = torch.randn(1, 2, 5, 5, generator=torch.Generator().manual_seed(3))
    wide = leave_unbiased(bias, drawn(1)[0], prefix=1)
    old = [0, 4, 5, 6, 7]
    assert wide.shape == (1, 2, 8, 8)
    assert torch.equal(wide[:, :, old][..., old], bias)
    assert not wide[:, :, 1:4].any()
    assert not wide[..., 1:4].any()


@pytest.mark.few(4)
@pytest.mark.parametrize("form", OTHER_VITS.values(), ids=OTHER_VITS.keys())
def test_every_prompt_is_trained_in_other_backbone_families(form: dict[str, Any]) -> None:
    method = Vpt(other_vit(**form), VptSettings(depth="deep"), seed=1)
    groups = begun(method)
    start = method.prompts.detach().clone()
    method_steps.train(method, method_steps.OPTIMIZERS["sgd"](groups), ONE)
    assert (method.prompts != start).any(2).all()
    assert compute_digest(method.backbone) == method.backbone_digest
    state = method.eval().finish()[0]
    assert 1 < method.flops_share(state) < 3
    logits = answers(method)
    method.load_task(TaskState.from_bytes(state.to_bytes()))
    assert torch.equal(answers(method), logits)


def test_deep_prompts_are_replaced_and_not_passed_on() -> None:
    model, prompts = vit(), drawn(2)
    passed_on = by_hand(vit(), prompts, passed_on=True)
    with PromptSites(model, "deep").using(prompts):
        assert not torch.allclose(model(IMAGES), passed_on, atol=1e-3)
    shallow = vit()
    with PromptSites(shallow, "shallow").using(prompts[:1]):
        assert torch.allclose(shallow(IMAGES), passed_on, atol=1e-6)


@pytest.mark.parametrize("depth", DEPTHS)
def test_every_block_receives_p_additional_tokens(depth: Any) -> None:
    model, seen = vit(), list[tuple[int, ...]]()
    sites = PromptSites(model, depth)
    for block in model.blocks:
        block.register_forward_pre_hook(lambda module, inputs: seen.append(tuple(inputs[0].shape)))
    with sites.using(drawn(len(sites))):
        model(IMAGES)
    assert seen == [(3, 1 + 3 + 4, 32)] * 2


@pytest.mark.parametrize("depth", DEPTHS)
def test_every_prompt_learns_and_the_backbone_does_not(depth: Any) -> None:
    method = vpt(depth=depth, prompts=4)
    groups = begun(method)
    start = method.prompts.detach().clone()
    method_steps.train(method, method_steps.OPTIMIZERS["sgd"](groups), ONE)
    assert (method.prompts != start).all(2).all()
    assert compute_digest(method.backbone) == method.backbone_digest == compute_digest(vit())
    state = method.eval().finish()[0]
    prompts = torch.stack([*state.tokens.values()])
    expected = by_hand(vit(), prompts, images()) @ state.head["weight"].T + state.head["bias"]
    assert torch.allclose(answers(method), expected, atol=1e-6)


def test_prompts_start_uniformly_in_the_range_of_the_patch_embedding() -> None:
    """The limit is sqrt(6 / (3 * 16 * 16 + 192)) for a ViT-Ti. Each block has its own draws."""
    with torch.device("meta"):
        model: Any = build(BackboneSettings())
    prompts, reach = draw_initial_prompts(12, 100, model), math.sqrt(6 / 960)
    assert 0.99 * reach < prompts.max() <= reach
    assert -reach <= prompts.min() < -0.99 * reach
    assert float(prompts.std()) == pytest.approx(reach / math.sqrt(3), rel=0.01)
    assert len({float(t.sum()) for t in prompts}) == 12


@pytest.mark.parametrize(("depth", "count"), [("shallow", 100 * 768), ("deep", 921_600)])
def test_number_of_prompt_parameters_matches_the_paper(depth: Any, count: int) -> None:
    """A ViT-B with 100 prompts per block."""
    with torch.device("meta"):
        model = build(BackboneSettings(name="vit_base_patch16_224"))
        assert draw_initial_prompts(len(PromptSites(model, depth)), 100, model).numel() == count


@pytest.mark.parametrize(("depth", "blocks"), [("shallow", 1), ("deep", 2)])
def test_stored_size_is_that_of_prompts_and_head(depth: Any, blocks: int) -> None:
    method = vpt(depth=depth, prompts=7)
    begun(method)
    assert method.finish()[0].sizes() == {
        "masks": 0,
        "tokens": 4 * blocks * 7 * 32,
        "copies": 0,
        "head": 4 * 2 * 33,
    }


def test_compute_cost_includes_the_prompts() -> None:
    """Only the class token of the last block is read, so prompts are keys there, but not
    queries."""
    method, p, tokens, d = vpt(prompts=7), 7, 5, 32
    begun(method)

    def block(queries: int, keys: int) -> int:
        return d * (2 * queries * d + 2 * keys * d + 2 * queries * keys + 8 * queries * d)

    patches = 4 * 3 * 64 * d
    more, plain = (patches + block(n, n) + block(1, n) for n in (tokens + p, tokens))
    assert method.flops_share(method.finish()[0]) == pytest.approx(more / plain)


@pytest.mark.parametrize("depth", DEPTHS)
def test_switching_between_tasks_is_exact(depth: Any) -> None:
    method = vpt(depth=depth)
    method_steps.load_base_head(method)
    plain = answers(method, BASE)
    assert torch.allclose(plain, vit()(images()) @ torch.ones(32, 2), atol=1e-5)
    for task in (ONE, TWO):
        method.load_task(TaskState.from_bytes(method_steps.trained(method, task).to_bytes()))
    first, second = answers(method, ONE), answers(method, TWO)
    for _ in range(2):
        assert torch.equal(answers(method, TWO), second)
        assert torch.equal(answers(method, BASE), plain)
        assert torch.equal(answers(method, ONE), first)


@pytest.mark.parametrize("other", [{"prompts": 6}, {"depth": "deep"}])
def test_a_state_of_other_settings_is_refused(other: dict[str, Any]) -> None:
    state = method_steps.trained(vpt())
    with pytest.raises(
        UserError, match=r"its state has prompts of shapes .*\(5, 32\).*, these settings have"
    ):
        vpt(**other).load_task(state)


def test_backbone_without_plain_attention_is_refused() -> None:
    with torch.device("meta"):
        convit = build(BackboneSettings(name="convit_local", img_size=32))
    with pytest.raises(UserError, match="block 0 of the backbone has no plain attention"):
        Vpt.check_backbone(VptSettings(), convit)


def test_backbone_copy_has_no_prompts() -> None:
    model = vit()
    plain, sites = model(IMAGES), PromptSites(model, "deep")
    with sites.using(drawn(2)):
        twin = copy.deepcopy(model)
        assert torch.equal(twin(IMAGES), plain)


@pytest.mark.parametrize("depth", DEPTHS)
def test_compiled_blocks_work_with_and_without_prompts(depth: Any) -> None:
    method = vpt(depth=depth)
    begun(method)
    expected, plain = method.loss(batch(), method_steps.PROGRESS)[0], method.backbone(images())
    compile_blocks(method.backbone, backend="eager")
    for _ in range(2):
        assert torch.allclose(method.loss(batch(), method_steps.PROGRESS)[0], expected, atol=1e-6)
        assert torch.allclose(method.backbone(images()), plain, atol=1e-6)
