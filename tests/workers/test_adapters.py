"""Tests of adapters: position, exact activation and removal, and copies of the backbone."""

from __future__ import annotations

import copy
from typing import Any

import method_steps
import pytest
import torch
from timm.models.vision_transformer import ParallelThingsBlock
from torch import Tensor
from torch.nn import functional as F

from workers.errors import UserError
from workers.model.adapters import (
    HOULSBY,
    AdapterSites,
    Bottlenecks,
    cast_for_autocast,
    houlsby,
    parallel,
)
from workers.model.vit import compile_blocks, compute_digest


def vit(**options: Any) -> Any:
    return method_steps.vit(**options).requires_grad_(False)


def stacked(seed: int, sites: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(t.shape, generator=generator) * 0.2
        for name, t in Bottlenecks(sites, 32, 6).tensors().items()
    }


IMAGES = method_steps.images(3)


def by_hand(model: Any, tensors: dict[str, Tensor]) -> Tensor:
    """Return the features of the blocks written out, with adapters after attention and after the
    FFN. Both come before the residual add."""

    def adapt(x: Tensor, site: int) -> Tensor:
        hidden = F.gelu(x @ tensors["down"][site].T + tensors["down_bias"][site])
        return x + hidden @ tensors["up"][site].T + tensors["up_bias"][site]

    x = model.norm_pre(model._pos_embed(model.patch_embed(IMAGES)))
    for i, block in enumerate(model.blocks):
        x = x + adapt(block.attn(block.norm1(x)), 2 * i)
        x = x + adapt(block.mlp(block.norm2(x)), 2 * i + 1)
    pooled: Tensor = model.forward_head(model.norm(x))
    return pooled


def test_adapters_follow_attention_and_ffn_inside_residual_branch() -> None:
    model, tensors = vit(), stacked(1)
    expected = by_hand(vit(), tensors)
    with AdapterSites(model, houlsby).using(tensors):
        assert torch.allclose(model(IMAGES), expected, atol=1e-5)
    assert not torch.allclose(model(IMAGES), expected, atol=1e-2)


def test_adapting_only_the_ffn_gives_half_the_sites() -> None:
    model, tensors = vit(), stacked(1)
    sites = AdapterSites(model, houlsby, ("mlp",))
    every_other = {name: t[1::2] for name, t in tensors.items()}
    without = {
        name: t * (torch.arange(4) % 2).view(-1, *[1] * (t.ndim - 1)) for name, t in tensors.items()
    }  # no adapters after attention
    assert len(sites) == 2
    with sites.using(every_other):
        assert torch.allclose(model(IMAGES), by_hand(vit(), without), atol=1e-5)


def test_backbone_is_unchanged_outside_using_even_after_error() -> None:
    model = vit()
    plain, digest = model(IMAGES), compute_digest(model)
    sites = AdapterSites(model, houlsby)
    assert torch.equal(model(IMAGES), plain)
    with pytest.raises(ZeroDivisionError), sites.using(stacked(1)):
        raise ZeroDivisionError
    assert torch.equal(model(IMAGES), plain)
    with sites.using({}):
        assert torch.equal(model(IMAGES), plain), "without tensors there are no adapters"
    assert compute_digest(model) == digest


def test_switching_adapters_between_tasks_is_bit_exact() -> None:
    model, tasks = vit(), [stacked(1), stacked(2)]
    sites = AdapterSites(model, houlsby)
    outputs: list[list[Tensor]] = [[], []]
    for task in (0, 1, 0, 1, 1, 0):
        with sites.using(tasks[task]):
            outputs[task].append(model(IMAGES))
    alone = vit()
    with AdapterSites(alone, houlsby).using(tasks[1]):
        assert torch.equal(alone(IMAGES), outputs[1][0])
    assert all(torch.equal(each[0], other) for each in outputs for other in each)
    assert not torch.equal(outputs[0][0], outputs[1][0])


def test_copied_backbone_does_not_inherit_active_adapters() -> None:
    model = vit()
    plain, sites = model(IMAGES), AdapterSites(model, houlsby)
    with sites.using(stacked(1)):
        twin = copy.deepcopy(model)
        assert torch.equal(twin(IMAGES), plain)
    twin_sites = AdapterSites(twin, houlsby)
    with sites.using(stacked(1)), twin_sites.using(stacked(2)):
        original_features, twin_features = model(IMAGES), twin(IMAGES)
    with sites.using(stacked(1)):
        assert torch.equal(model(IMAGES), original_features)
        assert torch.equal(twin(IMAGES), plain)
    assert not torch.equal(original_features, twin_features)


@pytest.mark.slow
def test_compiled_backbone_switches_adapters() -> None:
    """Compiled code does not check which hooks exist, only the values that its known hooks read."""
    model, tasks = vit(depth=1), {0: {}, 1: stacked(1, 2), 2: stacked(2, 2)}
    sites = AdapterSites(model, houlsby)

    def answer(task: int) -> Tensor:
        with sites.using(tasks[task]):
            features: Tensor = model(IMAGES)
        return features

    expected = {task: answer(task) for task in tasks}
    model.compile(backend="eager")
    for task in (1, 2, 0, 1):
        assert torch.equal(answer(task), expected[task])


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "sites", [(houlsby, HOULSBY, None), (parallel, ("",), "norm2")], ids=["behind", "beside"]
)
def test_compiled_plain_blocks_are_not_reused_with_adapters(sites: Any) -> None:
    """A warm worker runs several stages in one process, and their blocks differ only in their
    hooks."""
    plain, model = vit(), vit()
    expected = plain(IMAGES)
    compile_blocks(plain, backend="eager")
    assert torch.equal(plain(IMAGES), expected)
    adapter_sites = AdapterSites(model, *sites)
    tensors = stacked(1, len(adapter_sites))
    with adapter_sites.using(tensors):
        adapted = model(IMAGES)
    compile_blocks(model, backend="eager")
    with adapter_sites.using(tensors):
        assert torch.allclose(model(IMAGES), adapted, atol=1e-6)
    assert not torch.allclose(adapted, expected, atol=1e-2)
    assert torch.equal(model(IMAGES), expected)


def test_adapters_start_as_the_identity_and_both_projections_learn() -> None:
    """If both projections were zero, neither would ever get a gradient."""
    model, adapters = vit(), Bottlenecks(4, 32, 6)
    plain, sites, start = (
        model(IMAGES),
        AdapterSites(model, houlsby),
        {n: t.detach().clone() for n, t in adapters.tensors().items()},
    )
    optimizer = torch.optim.SGD(adapters.parameters(), lr=0.1)
    for step in range(3):
        with sites.using(adapters.tensors()):
            features = model(IMAGES)
        assert torch.equal(features, plain) is (step == 0)
        optimizer.zero_grad()
        features.square().sum().backward()
        optimizer.step()
    for name, tensor in adapters.tensors().items():
        assert (tensor != start[name]).flatten(1).any(1).all(), f"{name} must change at every site"
    assert all(p.grad is None for p in model.parameters())


def test_blocks_without_one_attention_and_one_ffn_are_refused() -> None:
    with pytest.raises(
        UserError, match=r"block 0 .* no module 'attn', .* choose a ViT with plain blocks"
    ):
        AdapterSites(vit(block_fn=ParallelThingsBlock), houlsby)


def test_cast_for_autocast_equals_autocast_bit_for_bit() -> None:
    def results(forms: Any) -> tuple[Tensor, ...]:
        stack = stacked(3, sites=2)
        leaves = [t.requires_grad_() for t in stack.values()]
        x = torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(1))
        with torch.autocast("cpu", torch.bfloat16):
            for site in forms(dict(zip(stack, leaves, strict=True))):
                x = houlsby(x, **site)
        return x.detach(), *torch.autograd.grad(x.float().square().sum(), leaves)

    def by_site(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        return [{name: t[site] for name, t in tensors.items()} for site in range(2)]

    def cast_at_once(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        casts = {name: cast_for_autocast(t) for name, t in tensors.items()}
        assert all(t.dtype == torch.bfloat16 for t in casts.values())
        return by_site(casts)

    for got, want in zip(results(cast_at_once), results(by_site), strict=True):
        assert torch.equal(got, want)
    assert cast_for_autocast(torch.zeros(2)).dtype == torch.float32
