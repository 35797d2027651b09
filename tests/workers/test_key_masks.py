"""Tests of attention with a differentiable mask of keys against plain autograd in float64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from workers.data import torch_internals
from workers.model import key_masks
from workers.model.key_masks import LARGEST_EXPONENT, attend


def compute_plain(policy: Tensor, scale: float, bias: Tensor | None, *qkv: Tensor) -> Tensor:
    """Return Psi v of MEAT's equations 4 and 5, in the order of the text."""
    q, k, v = qkv
    scores = scale * q @ k.transpose(2, 3)
    if bias is not None:
        scores = scores + bias
    top = scores.detach().masked_fill(policy.detach() == 0, -torch.inf).amax(-1, keepdim=True)
    weights = (scores - top).clamp(max=LARGEST_EXPONENT).exp() * policy
    return weights / weights.sum(-1, keepdim=True) @ v


def draw(
    batch: int,
    heads: int,
    tokens: int,
    width: int,
    *,
    shape: str = "per image",
    keep: float = 0.7,
    prefix: int = 1,
    spread: float = 1.0,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return a policy, a gradient of the output, and queries, keys and values, all float64.

    The policy is one row for each image, one row for all images (`shared`), or a matrix in which
    each token sees itself (`self loop`).
    """
    kept = torch.rand(1 if shape == "shared" else batch, 1, 1, tokens) < keep
    kept[..., :prefix] = True
    if shape == "self loop":
        kept = kept | torch.eye(tokens, dtype=torch.bool)
    qkv = [torch.randn(batch, tokens, heads, width).double().transpose(1, 2) for _ in range(3)]
    qkv[0] *= spread
    gradient = torch.randn(batch, heads, tokens, width).double()
    return kept.double(), gradient, qkv


def differentiate(form: Any, policy: Any, gradient: Any, *rest: Any) -> list[Tensor]:
    """Return the output of a form, and the gradients of the policy and of q, k and v."""
    scale, bias, *qkv = rest
    inputs = [t.detach().clone().requires_grad_() for t in (policy, *qkv)]
    output = form(inputs[0], scale, bias, *inputs[1:])
    return [output.detach(), *torch.autograd.grad(output, inputs, gradient)]


def assert_equal(got: list[Tensor], expected: list[Tensor], atol: float = 1e-11) -> None:
    for actual, want in zip(got, expected, strict=True):
        assert actual.shape == want.shape
        assert torch.allclose(actual, want, rtol=atol, atol=atol * (1 + float(want.abs().max())))


@pytest.fixture(params=["fused", "tiles of an image", "other devices"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Make `attend` use one implementation."""
    if request.param == "tiles of an image":
        monkeypatch.setattr(key_masks, "TILE_SCORES", 1)
    backends = [SDPBackend.MATH]
    if request.param != "other devices":
        backends.append(SDPBackend.FLASH_ATTENTION)
    with sdpa_kernel(backends):
        yield str(request.param)


def test_the_fused_kernel_is_used_if_it_is_enabled(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused = mock.Mock(side_effect=torch_internals.attend_on_cpu)
    monkeypatch.setattr(torch_internals, "attend_on_cpu", fused)
    policy, _, qkv = draw(1, 1, 3, 2)
    attend(policy, 1.0, None, *qkv)
    assert fused.called == (form != "other devices")


@pytest.mark.parametrize("shape", ["per image", "shared", "self loop"])
def test_gradients_equal_those_of_plain_attention(form: str, shape: str) -> None:
    torch.manual_seed(0)
    sizes = [(1, 1, 1, 1), (1, 3, 2, 4), (3, 2, 5, 8), (2, 4, 17, 16), (5, 1, 37, 3), (2, 3, 70, 8)]
    for size, keep in itertools.product(sizes, (0.0, 0.5, 0.9, 1.0)):
        policy, gradient, qkv = draw(*size, shape=shape, keep=keep)
        rest = policy, gradient, size[-1] ** -0.5, None, *qkv
        assert_equal(differentiate(attend, *rest), differentiate(compute_plain, *rest))


def test_gradients_equal_those_of_plain_attention_at_random_sizes(form: str) -> None:
    torch.manual_seed(1)
    for _ in range(40):
        batch, heads, width = (int(torch.randint(1, 6, ())) for _ in range(3))
        tokens = int(torch.randint(1, 71, ()))
        prefix = int(torch.randint(1, min(5, tokens) + 1, ()))
        keep, spread = float(torch.rand(())), float(torch.rand(()) * 5)
        policy, gradient, qkv = draw(
            batch, heads, tokens, width, keep=keep, prefix=prefix, spread=spread
        )
        rest = policy, gradient, 0.7, None, *qkv
        assert_equal(differentiate(attend, *rest), differentiate(compute_plain, *rest), 1e-9)


def test_incomplete_last_tile_gives_correct_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(key_masks, "TILE_SCORES", 2 * 3 * 9**2)
    policy, gradient, qkv = draw(5, 3, 9, 4)
    rest = policy, gradient, 0.5, None, *qkv
    assert_equal(differentiate(attend, *rest), differentiate(compute_plain, *rest))


def test_masked_key_far_above_kept_ones_gets_bounded_gradient(form: str) -> None:
    """The scores of masked keys exceed those of kept keys by up to 19, 20, 21 and 1,000."""
    torch.manual_seed(3)
    for height in (19.0, 20.0, 21.0, 1e3):
        policy, gradient, qkv = draw(2, 2, 6, 4, keep=0.5)
        dropped = (policy == 0).expand(-1, 2, -1, -1).transpose(2, 3)
        qkv[0].zero_()[..., 0] = 1
        qkv[1][..., 0] = torch.rand(2, 2, 6).double()
        qkv[1][..., 0][dropped[..., 0]] += height - 1
        rest = policy, gradient, 1.0, None, *qkv
        got, expected = differentiate(attend, *rest), differentiate(compute_plain, *rest)
        assert bool((expected[1][policy == 0] != 0).all())
        assert_equal(got, expected)


@pytest.mark.parametrize("shape", [(1, 3, 7, 7), (2, 3, 7, 7), (1, 1, 7, 7)])
def test_a_bias_is_added_to_the_scores(form: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(4)
    policy, gradient, qkv = draw(2, 3, 7, 4)
    rest = policy, gradient, 0.5, torch.randn(shape).double(), *qkv
    assert_equal(differentiate(attend, *rest), differentiate(compute_plain, *rest))


def test_a_bias_with_a_gradient_is_refused() -> None:
    policy, _, qkv = draw(2, 3, 7, 4)
    with pytest.raises(ValueError, match="bias of attention"):
        attend(policy, 1.0, torch.zeros(7, 7, requires_grad=True), *qkv)


def test_stacked_qkv_tensor_gives_the_same_gradients(form: str) -> None:
    torch.manual_seed(5)
    policy, gradient, qkv = draw(4, 3, 9, 4)
    stacked = torch.stack([part.transpose(1, 2) for part in qkv], 2)  # (B, N, 3, H, D)
    stacked = stacked.permute(2, 0, 3, 1, 4).requires_grad_()
    output = attend(policy, 0.5, None, stacked)
    (into,) = torch.autograd.grad(output, stacked, gradient)
    expected = differentiate(compute_plain, policy, gradient, 0.5, None, *qkv)
    assert_equal([output.detach(), *into.unbind(0)], [expected[0], *expected[2:]])


def test_frozen_queries_and_a_frozen_policy_get_no_gradient(form: str) -> None:
    torch.manual_seed(6)
    policy, gradient, qkv = draw(2, 3, 9, 4)
    expected = differentiate(compute_plain, policy, gradient, 0.5, None, *qkv)
    policy.requires_grad_()
    output = attend(policy, 0.5, None, *qkv)
    assert_equal([*torch.autograd.grad(output, policy, gradient)], expected[1:2])
    policy = policy.detach()
    qkv = [part.requires_grad_() for part in qkv]
    output = attend(policy, 0.5, None, *qkv)
    assert_equal([*torch.autograd.grad(output, qkv, gradient)], expected[2:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_gradients_agree_up_to_rounding(form: str, dtype: torch.dtype) -> None:
    torch.manual_seed(7)
    policy, gradient, qkv = draw(3, 3, 50, 16)
    gradient, *qkv = (t.to(dtype).double() for t in (gradient, *qkv))
    expected = differentiate(compute_plain, policy, gradient, 0.25, None, *qkv)
    gradient, *qkv = (t.to(dtype) for t in (gradient, *qkv))
    got = differentiate(attend, policy.float(), gradient, 0.25, None, *qkv)
    assert got[1].dtype == torch.float32
    assert all(tensor.dtype == dtype for tensor in (got[0], *got[2:]))
    atol = 0.02 if dtype == torch.bfloat16 else 1e-5
    for actual, want in zip(got, expected, strict=True):
        assert float((actual.double() - want).norm()) < atol * float(want.norm())


@contextmanager
def list_saved_sizes(sizes: list[int]) -> Iterator[None]:
    """Append the number of elements of each tensor saved for the backward pass."""

    def pack(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def test_no_attention_map_is_saved_for_backward(form: str) -> None:
    policy, _, qkv = draw(2, 3, 50, 4)
    sizes: list[int] = []
    with list_saved_sizes(sizes):
        attend(policy.requires_grad_(), 0.5, None, *(part.requires_grad_() for part in qkv))
    assert sizes
    assert max(sizes) == 2 * 3 * 50 * 4, "the maps have 2 * 3 * 50 * 50 elements"


def test_second_derivatives_raise(form: str) -> None:
    policy, gradient, qkv = draw(2, 3, 9, 4)
    policy.requires_grad_()
    output = attend(policy, 0.5, None, *qkv)
    gradient.requires_grad_()
    (first,) = torch.autograd.grad(output, policy, gradient, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        first.sum().backward()


def test_attention_compiles_without_a_graph_break() -> None:
    torch.manual_seed(8)
    policy, gradient, qkv = draw(2, 3, 9, 4)
    rest = policy, gradient, 0.5, None, *qkv
    expected = differentiate(compute_plain, *rest)
    torch.compiler.reset()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    assert_equal(differentiate(compiled, *rest), expected)
