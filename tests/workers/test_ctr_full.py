"""Tests of the full CTR: the knowledge-sharing module against its equations, and earlier tasks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from method_steps import ONE, THREE, TWO, answers, batch, images, vit
from step_contexts import step_context
from test_ctr import RATES, STEPS, ctr, served, started, stepped, stream
from torch import Tensor
from torch.nn import functional as F

from workers.errors import UserError
from workers.methods.base import Progress
from workers.methods.ctr_full import (
    KERNELS,
    Capsules,
    CtrFull,
    CtrFullSettings,
    capsule_bottleneck,
    capsules,
    knowledge,
)
from workers.model.protect import Protector
from workers.model.routes import (
    find_maxima,
    find_maximum,
    join_kernels,
    mix_capsules,
    plain_join,
    plain_maxima,
    plain_mix,
    plain_squash,
    squash,
)
from workers.rng import StepRng
from workers.storage.taskstate import Carried, TaskState

Shapes = list[tuple[int, ...]]


# ---- the knowledge-sharing module ----------------------------------------------------------------
def module(tasks: int = 3, filters: int = 4) -> dict[str, Tensor]:
    torch.manual_seed(6)
    tensors = Capsules(1, 6, tasks, 3, filters).tensors(tasks)
    return {name: t[0].detach().clone() for name, t in Capsules.stack(tensors).items()}


def by_equations(x: Tensor, m: dict[str, Tensor], noise: Tensor | None) -> Tensor:
    """Compute the published module, with its intended order of indices, in loops over images, tasks
    and tokens."""

    def pooled(u: Tensor, kind: str, added: Tensor | float = 0.0) -> Tensor:  # u: (N, 9)
        maxima = []
        for k, bias in zip(KERNELS, m[f"{kind}_bias"], strict=True):
            signal = F.conv1d(u.T[None], m[f"{kind}{k}"].transpose(1, 2), bias)[0]
            maxima.append(
                F.relu(signal + (added[:, None] if isinstance(added, Tensor) else added)).amax(1)
            )
        return torch.cat(maxima)

    out = []
    for b, image in enumerate(x):
        u = []
        for c in range(len(m["p"])):
            z = image @ m["p"][c].T + m["p_bias"][c]
            length = z.norm(dim=1, keepdim=True)
            votes = length**2 / (1 + length**2) * z / length
            u.append(
                torch.cat([votes @ m["transfer"][c, 3 * j : 3 * j + 3].T for j in range(3)], 1)
            )
        asked = m["mix"] @ pooled(u[-1], "query") + m["mix_bias"]
        v = torch.zeros(len(image), 9)
        for c in range(len(u)):
            route = pooled(u[c], "key", asked)
            logit = (m["gate"] @ route + m["gate_bias"]).item()
            drawn = 0.0 if noise is None else math.log(noise[b, c] / (1 - noise[b, c]))
            if logit + drawn > 0:
                v = v + (m["similar"] @ route + m["similar_bias"]) * u[c]
        out.append(image + v @ m["spread"].T + m["spread_bias"])
    return torch.stack(out)


@pytest.mark.parametrize("noisy", [False, True])
def test_knowledge_sharing_matches_the_equations(noisy: bool) -> None:
    m, x = module(), torch.randn(6, 8, 6, generator=torch.Generator().manual_seed(1)) * 2
    noise = torch.rand(6, 3, generator=torch.Generator().manual_seed(2)) if noisy else None
    output = knowledge(x, **m, noise=None if noise is None else noise.logit())
    assert torch.allclose(output, by_equations(x, m, noise), atol=1e-5)
    assert not torch.allclose(output, by_equations(x, m, torch.full((6, 3), 1e-9)), atol=1e-3), (
        "at least one gate must be open"
    )
    assert not torch.allclose(
        output, by_equations(x, m, torch.full((6, 3), 1 - 1e-6)), atol=1e-3
    ), "at least one gate must be closed"


def test_bottleneck_transforms_shared_knowledge_and_adds_its_input() -> None:
    m, x = module(), torch.randn(2, 8, 6)
    down, down_bias, up, up_bias = (
        torch.randn(4, 6),
        torch.randn(4),
        torch.randn(6, 4),
        torch.randn(6),
    )
    h = knowledge(x, **m)
    expected = x + ((h @ down.T + down_bias).relu() @ up.T + up_bias).relu()
    assert torch.allclose(
        capsule_bottleneck(x, down, down_bias, up, up_bias, **m), expected, atol=1e-5
    )


def test_squash_shrinks_a_capsule_and_keeps_its_direction() -> None:
    z = torch.tensor([[3.0, 4.0], [0.0, 0.0]])[None, :, None].requires_grad_()  # (B, N, T, P)
    expected = torch.tensor([[0.6, 0.8], [0.0, 0.0]]) * 25 / 26
    assert torch.allclose(squash(z), expected[None, None])
    squash(z).sum().backward()
    assert z.grad is not None
    assert z.grad.isfinite().all()


def test_capsule_depends_only_on_its_own_task_and_token() -> None:
    """Later tasks do not change earlier capsules, and a token does not change other tokens."""
    m, x = module(), torch.randn(2, 8, 6)
    u = capsules(x, m["p"], m["p_bias"], m["transfer"])  # (B, T, N, 9)
    later = {
        name: m[name].index_fill(0, torch.tensor(2), 5.0) for name in ("p", "p_bias", "transfer")
    }
    other = capsules(x, **later)
    assert torch.equal(u[:, :2], other[:, :2])
    assert not torch.allclose(u[:, 2], other[:, 2])
    assert torch.allclose(
        capsules(x, m["p"][:2], m["p_bias"][:2], m["transfer"][:2]), u[:, :2], atol=1e-6
    ), "removing later tasks must not matter either"
    changed = capsules(x.index_fill(1, torch.tensor(3), 9.0), m["p"], m["p_bias"], m["transfer"])
    assert [not torch.equal(changed[:, :, n], u[:, :, n]) for n in range(8)] == [
        n == 3 for n in range(8)
    ]


@pytest.mark.parametrize("size", KERNELS)
def test_maximum_window_and_gradient_match_max_pooled_convolution(size: int) -> None:
    u, weight = (torch.randn(*shape, requires_grad=True) for shape in ((4, 9, 6), (5, size, 6)))
    maximum = find_maximum(u, weight, weight)
    expected = F.conv1d(u.transpose(1, 2), weight.transpose(1, 2)).amax(2)
    assert torch.allclose(maximum, expected, atol=1e-5)
    worth = torch.randn(4, 5)
    for gradient, other in zip(
        *(torch.autograd.grad((y * worth).sum(), (u, weight)) for y in (maximum, expected)),
        strict=True,
    ):
        assert torch.allclose(gradient, other, atol=1e-5)


FILTERS: Shapes = [(100, k, 9) for k in KERNELS for _ in ("key", "query")]
# name -> function, its plain expression, and its input shapes: those in the dtype of activations,
# and those in fp32 as under autocast
FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Shapes, Shapes]] = {
    "squash": (squash, plain_squash, [(4, 17, 3, 3)], []),
    "maxima": (find_maxima, plain_maxima, [(8, 3, 17, 9)], FILTERS),
    "maxima of one task": (find_maxima, plain_maxima, [(8, 1, 17, 9)], FILTERS),
    "routes": (join_kernels, plain_join, [(8, 100)], [(3, 24, 100), (3, 100)]),
    "query": (join_kernels, plain_join, [], [(3, 8, 100), (3, 100)]),
    "mix": (mix_capsules, plain_mix, [(8, 3, 9), (8, 3, 17, 9)], [(8, 3)]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_fused_functions_are_bit_identical_to_plain_expressions(
    name: str, dtype: torch.dtype
) -> None:
    function, plain, shapes, exact_shapes = FUNCTIONS[name]
    torch.manual_seed(2)
    inputs = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    exact = [torch.randn(shape).requires_grad_() for shape in exact_shapes]

    def results(compute: Callable[..., Any]) -> list[Tensor]:
        if name == "squash":
            outputs = [compute(*inputs)]
        elif name == "mix":
            outputs = [compute(inputs[0], exact[0], inputs[1], dtype)]
        elif name == "query":
            outputs = [compute(*exact, dtype)[0]]
        elif name == "routes":
            outputs = [*compute(*exact, dtype, *inputs)]
        else:
            u, *maxima = compute(*inputs, exact, [f.detach().to(dtype) for f in exact])
            outputs = [*maxima, u * 2]  # u has another use
        generator = torch.Generator().manual_seed(5)
        weights = [torch.randn(o.shape, generator=generator).to(o.dtype) for o in outputs]
        return [*outputs, *torch.autograd.grad(outputs, [*inputs, *exact], weights)]

    for got, want in zip(results(function), results(plain), strict=True):
        assert got.dtype == want.dtype
        assert torch.equal(got, want)


# ---- the whole of CTR ----------------------------------------------------------------------------
def test_capsules_of_later_tasks_get_no_gradient_or_update() -> None:
    method = ctr(CtrFull, mask_lr=0.05)
    optimizer = started(method, TWO, stream(CtrFull, tasks=(ONE,))[0][1])
    start = {name: t.detach().clone() for name, t in method.capsules.named_parameters()}
    method.loss(batch(1, 3), Progress(0, 1, 1, STEPS))[0].backward()
    per_task = [
        dict(method.capsules.named_parameters())[name] for name in ("p", "p_bias", "transfer")
    ]
    assert all((p.grad[:, 2:] == 0).all() for p in per_task)
    assert all((p.grad[:, c] != 0).any() for p in per_task for c in (0, 1)), (
        "capsules of earlier tasks must continue to learn"
    )
    stepped(method, optimizer)
    for name, tensor in method.capsules.named_parameters():
        moved = tensor != start[name]
        assert moved.any(), name
        if name in ("p", "p_bias", "transfer"):
            assert moved[:, 0].any()
            assert moved[:, 1].any()
            assert not moved[:, 2:].any()


def test_capsules_of_later_tasks_decay_without_protection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Protector, "restore", lambda self: None)
    method = ctr(CtrFull)
    optimizer, start = started(method, ONE), method.capsules.p.detach().clone()
    stepped(method, optimizer)
    assert (method.capsules.p != start)[:, 1:].any()


def test_later_tasks_change_routing_but_not_locked_weights() -> None:
    """As documented, CTR with knowledge sharing can change earlier answers, but only through shared
    weights."""
    done = stream(CtrFull)
    before, after = served(done[:1], CtrFull), served(done, CtrFull)
    weights = [method.serving_weights("one") for method in (before, after)]
    inner, outer = (done[0][0].masks[name] for name in ("inner", "outer"))
    for name, where in (
        ("down", inner[:, :, None]),
        ("down_bias", inner),
        ("up", outer[:, :, None] & inner[:, None]),
        ("up_bias", outer),
    ):
        assert torch.equal(weights[0][name] * where, weights[1][name] * where)
    assert weights[0]["p"].shape[1] == weights[1]["p"].shape[1] == 1, (
        "a task must use only the capsules that existed at its end"
    )
    assert not torch.equal(weights[0]["similar"], weights[1]["similar"])
    assert CtrFull.may_forget


def test_gates_draw_noise_in_training_only() -> None:
    done = stream(CtrFull)
    method = served(done, CtrFull)
    torch.manual_seed(1)
    first, state = answers(method, TWO), torch.get_rng_state()
    assert torch.equal(answers(method, TWO), first)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(answers(served(done, CtrFull), TWO), first)
    training = ctr(CtrFull)
    started(training, THREE, done[-1][1])

    def features(step: int) -> Tensor:
        training.weight_overrides = training.training_weights(batch(step), Progress(0, 1, 1, STEPS))
        features: Tensor = training.features(images())
        return features.detach()

    assert torch.equal(features(1), features(1))
    assert not torch.equal(features(1), features(2))


def test_gate_noise_of_a_sample_is_independent_of_rank() -> None:
    method, progress = ctr(CtrFull), Progress(0, 1, 1, STEPS)
    started(method, ONE)
    whole, part = batch(1), batch(1)
    part.draw = StepRng(7, 0, 1, torch.tensor([5, 2]), 8, torch.device("cpu"))
    noise = [method.training_weights(b, progress)["noise"] for b in (whole, part)]
    assert noise[0].shape == (4, 8, 1), "the dimensions must be site, sample, task"
    assert torch.equal(noise[0][:, [5, 2]], noise[1])


def test_flops_share_includes_adapters_and_routing() -> None:
    """Units that a task does not use are cut. Each task uses one capsule more than the previous."""
    (state, _), tsm, (second, _) = stream(tasks=(ONE,))[0], ctr(), stream(CtrFull)[1]
    tokens, inner, outer = 17, state.masks["inner"].sum(1), state.masks["outer"].sum(1)
    full = 1 - ctr(CtrFull).flops_share(
        TaskState(
            "x",
            (),
            "ctr_full",
            "",
            {n: m & False for n, m in second.masks.items()},
            meta={"position": 1},
        )
    )
    plain = tokens * int((inner * 32 + inner * outer).sum()) / (tsm.flops_share(state) - 1)
    assert -full * plain == pytest.approx(
        4 * tokens * (2 * (32 * 3 + 9 * 3) + 3 * 5 * 12 * 9 + 9 * 32)
    )


def test_stream_longer_than_max_tasks_is_refused() -> None:
    settings = CtrFullSettings(max_tasks=2)
    assert [s.name for s in CtrFull.steps_for(settings, 1)] == ["train"]
    with pytest.raises(
        UserError, match=r"capsules for max_tasks=2 tasks, and the stream has more; raise max_tasks"
    ):
        CtrFull.steps_for(settings, 2)
    with pytest.raises(UserError, match="max_tasks=3"):
        ctr(CtrFull).begin(
            step_context(
                ONE,
                "train",
                Carried(stream(CtrFull, tasks=(ONE,))[0][1].tensors, {"tasks": 3}),
                RATES,
                (ONE,),
            ),
        )


def test_backbone_with_fewer_tokens_than_filter_size_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"sees 2 tokens, and ctr_full routes by windows of up to 5"
    ):
        CtrFull(vit(patch_size=16), CtrFullSettings(), seed=1)
