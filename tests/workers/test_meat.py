"""Tests of MEAT: worked numbers, invariants, and masks in training, serving and pruned
inference."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import method_steps
import pytest
import torch
from method_steps import OTHER_VITS, PROGRESS, other_vit, rates
from pydantic import ValidationError
from step_contexts import step_context
from torch import Tensor, nn
from torch.nn import functional as F

from workers.data.batch import Batch
from workers.errors import UserError
from workers.job import BackboneSettings, Task
from workers.methods.base import OptimPlan
from workers.methods.meat import Meat, MeatSettings, drop_control
from workers.model.key_masks import attend
from workers.model.masked import GatedLinear, MaskedAttention
from workers.model.masks import GumbelHard
from workers.model.sites import TokenSites
from workers.model.vit import build, compile_blocks, compute_digest
from workers.rng import StepRng
from workers.storage.taskstate import TaskState

TASK = Task("one", "card", "", ("a", "b", "c"))
OTHER = Task("two", "card", "", ("d", "e", "f", "g"))
RATES = rates(12.0)


def vit(**changes: Any) -> Any:
    return method_steps.vit(img_size=32, embed_dim=64, depth=3, num_heads=4, **changes)


def meat(backbone: nn.Module | None = None, **settings: Any) -> Meat:
    return Meat(backbone or vit(), MeatSettings(**settings), seed=1)


def images(count: int = 8) -> Tensor:
    pictures: Tensor = method_steps.images(count, img_size=32)
    return pictures


def gradient_of(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def batch(step: int = 0, rows: range = range(8), size: int = 8) -> Batch:
    at = torch.tensor(list(rows))
    labels = torch.arange(size) % 3
    return Batch(
        images(size)[at],
        labels[at],
        torch.zeros(len(at), dtype=torch.long),
        StepRng(7, 0, step, at, size, torch.device("cpu")),
        weight=len(at) / size,
    )


def trained(method: Meat, task: Task = TASK, steps: int = 12) -> TaskState:
    optimizer = torch.optim.AdamW(
        method.begin(step_context(task, "train", None, RATES, (task,))), lr=RATES.lr
    )
    method_steps.train(method, optimizer, lambda progress: batch(progress.step), steps)
    return method.finish()[0]


def with_random_masks(method: Meat, keep: float = 0.6, task: str = "one") -> TaskState:
    generator = torch.Generator().manual_seed(3)
    masks = {
        n: torch.rand(shape, generator=generator) < keep
        for n, shape in method.mask_shapes().items()
    }
    torch.manual_seed(4)
    head = nn.Linear(method.heads.width, 3).state_dict()
    return TaskState(
        task,
        TASK.classes,
        "meat",
        method.backbone_digest,
        masks=masks,
        head=head,
        meta=method.sites.meta,
    )


def masked_softmax(scores: Tensor, policy: Tensor) -> Tensor:
    """Return Psi of scores (B, H, N, N), or of one row (1, N) shared by all queries."""
    tokens = scores.shape[-1]
    queries = scores.expand(1, 1, tokens, tokens) if scores.dim() == 2 else scores
    identity = torch.eye(tokens, dtype=scores.dtype).expand_as(queries)
    if policy.dim() == 2:
        policy = policy[:, None, None, :]
    psi = attend(policy, 1.0, None, queries, identity, identity)
    return psi[0, 0, :1] if scores.dim() == 2 else psi


# ---- the equations -------------------------------------------------------------------------------
def test_masked_softmax_matches_worked_rows() -> None:
    policy = torch.tensor([[1.0, 0.0, 1.0]])
    row = masked_softmax(torch.tensor([[1.0, 2.0, 3.0]]), policy)
    assert torch.allclose(row, torch.tensor([[0.1192, 0.0, 0.8808]]), atol=5e-5)
    assert torch.equal(masked_softmax(torch.zeros(1, 3), policy), torch.tensor([[0.5, 0.0, 0.5]]))


def test_self_loop_lets_masked_token_attend_to_itself() -> None:
    attention = TokenSites(vit(), "all", "off", self_loop=True).attention[0]
    assert isinstance(attention, MaskedAttention)
    for keys in (torch.tensor([[1.0, 0.0, 1.0]]), torch.tensor([[True, False, True]])):
        attention.keys = keys
        psi = masked_softmax(torch.zeros(1, 1, 3, 3), attention.policy().float())[0, 0]
        assert torch.allclose(psi[1], torch.full((3,), 1 / 3))
        assert torch.allclose(psi[0], torch.tensor([0.5, 0.0, 0.5]))


def test_self_loop_mask_gradient_excludes_the_tokens_own_attention() -> None:
    """With scores of 0, row i of Psi is policy_i / sum policy_i, with policy = m + (1 - m) I:
    diagonal entries are 1 for any m. Rows 0 and 2 have two keys, so d Psi_1 / d m_1 = 1/2 each. Row
    1 has three, so d Psi_1 / d m_0 = d Psi_1 / d m_2 = -1/9, and d Psi_1 / d m_1 = 0."""
    attention = TokenSites(vit(), "all", "off", self_loop=True).attention[0]
    assert isinstance(attention, MaskedAttention)
    keys = torch.tensor([[1.0, 0.0, 1.0]], requires_grad=True)
    attention.keys = keys
    psi = masked_softmax(torch.zeros(1, 1, 3, 3), attention.policy())
    psi[..., 1].sum().backward()
    assert torch.allclose(gradient_of(keys), torch.tensor([[-1 / 9, 1.0, -1 / 9]]))


def test_high_score_of_masked_key_does_not_leak() -> None:
    for high in (16.0, 200.0, 1e4):
        row = masked_softmax(torch.tensor([[0.0, high, 1.0]]), torch.tensor([[1.0, 0.0, 1.0]]))
        assert row[0, 1] == 0
        assert torch.allclose(row, torch.tensor([[0.2689, 0.0, 0.7311]]), atol=5e-5)


def test_masked_softmax_has_the_gradients_of_the_composed_operations() -> None:
    torch.manual_seed(0)
    scores = torch.randn(2, 3, 5, 5, dtype=torch.float64, requires_grad=True)
    policy = (torch.rand(2, 1, 1, 5) < 0.6).double()
    policy[..., 0] = 1
    policy.requires_grad_()
    weights = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    gradients = torch.autograd.grad(
        (masked_softmax(scores, policy) * weights).sum(), (scores, policy)
    )
    exps = scores.exp() * policy
    plain = torch.autograd.grad(
        (exps / exps.sum(-1, keepdim=True) * weights).sum(), (scores, policy)
    )
    for got, want in zip(gradients, plain, strict=True):
        assert torch.allclose(got, want, atol=1e-12)
    assert bool((gradients[1][policy == 0] != 0).all()), (
        "a dropped token needs a gradient to be kept again"
    )


def test_masked_attention_rows_sum_to_one_with_zero_masked_keys() -> None:
    policy = (torch.rand(4, 1, 1, 17) < 0.5).float()
    policy[..., 0] = 1
    psi = masked_softmax(torch.randn(4, 2, 17, 17) * 5, policy)
    assert torch.allclose(psi.sum(-1), torch.ones(4, 2, 17))
    assert bool((psi[(policy == 0).expand_as(psi)] == 0).all())


def test_normed_queries_and_keys_train_in_bf16() -> None:
    """Autocast may compute the norms of queries and keys in fp32, but values are bf16."""
    method = meat(vit(qk_norm=True))
    method.begin(step_context(TASK, "train", None, RATES, (TASK,)))
    expected = method.loss(batch(), PROGRESS)[0]
    with torch.autocast("cpu", torch.bfloat16):
        loss = method.loss(batch(), PROGRESS)[0]
    assert torch.allclose(loss, expected, rtol=0.02)
    loss.backward()
    for name, mask in method.masks.items():
        assert gradient_of(mask.logits).isfinite().all(), name
        assert gradient_of(mask.logits).any(), name


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("is_frozen", [True, False])
def test_gated_linear_equals_gated_inputs_bit_for_bit(precision: str, is_frozen: bool) -> None:
    torch.manual_seed(0)
    layer = GatedLinear(7, 5).requires_grad_(not is_frozen)
    x = torch.randn(2, 3, 7, requires_grad=True)
    gate = torch.tensor([1.0, 0, 1, 1, 0, 0, 1], requires_grad=True)
    trained = (x, gate, *(() if is_frozen else layer.parameters()))
    results: list[tuple[Tensor, ...]] = []
    for is_gated in (True, False):
        layer.gate = gate if is_gated else None
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            hidden = torch.linalg.vecdot(x, x)[..., None] * x  # fp32
            hidden = hidden.to(torch.bfloat16) if precision == "bf16" else hidden
            output = layer(hidden if is_gated else hidden * gate.to(hidden.dtype))
        gradients = torch.autograd.grad(output.float().square().sum(), trained)
        results.append((output, *gradients))
    assert all(torch.equal(got, want) for got, want in zip(*results, strict=True))


def test_drop_control_matches_worked_example() -> None:
    tokens = torch.tensor([[[1.0, 0.0, 1.0], [1.0, 1.0, 1.0]]], requires_grad=True)
    loss = drop_control([tokens], 0.9)
    loss.backward()
    assert math.isclose(loss.item(), 0.0322222, abs_tol=1e-6)
    gradient = gradient_of(tokens)
    assert torch.allclose(gradient[0, 0], torch.full((3,), -0.077778), atol=1e-6)
    assert torch.allclose(gradient[0, 1], torch.full((3,), 0.033333), atol=1e-6)


def test_drop_control_uses_keep_share_over_whole_batch() -> None:
    """The images keep 2/3 and 3/3 in layer 1, and 3/3 and 1/3 in layer 2. The shares are 5/6 and
    2/3, with squared differences (1/15)^2 and (7/30)^2. With shares per image, the loss would be
    0.0988889."""
    tokens = torch.tensor(
        [[[1.0, 0.0, 1.0], [1.0, 1.0, 1.0]], [[1.0, 1.0, 1.0], [0.0, 0.0, 1.0]]],
        requires_grad=True,
    )
    loss = drop_control([tokens], 0.9)
    loss.backward()
    assert math.isclose(loss.item(), 0.0294444, abs_tol=1e-6)
    gradient = gradient_of(tokens)  # 2 (share - lambda) / (2 layers * 2 images * 3 tokens)
    assert torch.allclose(gradient[:, 0], torch.full((2, 3), -0.0111111), atol=1e-6)
    assert torch.allclose(gradient[:, 1], torch.full((2, 3), -0.0388889), atol=1e-6)


def test_the_loss_controls_the_share_of_tokens_over_the_batch() -> None:
    method = meat(gamma=0.2)
    method.begin(step_context(TASK, "train", None, RATES, (TASK,)))
    _, terms = method.loss(batch(), PROGRESS)
    gates = torch.cat([*method.sample_gates(batch().draw).values()])
    assert len(gates) > 1
    shares = gates.mean(dim=(0, 2))
    expected = (method.settings.lambda_ - shares).square().mean()
    assert terms["drop_control"].item() == pytest.approx(expected.item())


def test_new_mask_keeps_entry_with_probability_sigmoid_of_two_gamma() -> None:
    mask = GumbelHard((2000, 1000), gamma=4.0, tau=1.0)
    share = (
        mask.sample(torch.rand(2000, 1000, generator=torch.Generator().manual_seed(0)))
        .mean()
        .item()
    )
    assert math.isclose(share, 1 / (1 + math.exp(-8)), abs_tol=6e-5)
    assert bool(mask.hard().all())


@pytest.mark.parametrize("gap", [-1.5, 0.0, 2.0])
def test_single_logit_sampling_matches_gumbel_softmax_pair(gap: float) -> None:
    count, tau = 200_000, 0.7
    torch.manual_seed(0)
    mask = GumbelHard((count,), gamma=1.0, tau=tau)
    with torch.no_grad():
        mask.logits.fill_(gap)
    mask_values = mask.sample(torch.rand(count))
    mask_values.sum().backward()
    pair = torch.tensor([gap / 2, -gap / 2]).expand(count, 2).clone().requires_grad_()
    reference = nn.functional.gumbel_softmax(pair, tau=tau, hard=True)[:, 0]
    reference.sum().backward()
    assert math.isclose(mask_values.mean().item(), reference.mean().item(), abs_tol=5e-3)
    gradient = gradient_of(mask.logits)
    expected = gradient_of(pair)[:, 0]
    assert math.isclose(gradient.mean().item(), expected.mean().item(), rel_tol=2e-2)
    assert math.isclose(gradient.std().item(), expected.std().item(), rel_tol=2e-2)


def test_zero_logit_is_masked_and_zero_noise_has_finite_gradient() -> None:
    mask = GumbelHard((2,), gamma=4.0, tau=1.0)
    sampled = mask.sample(torch.tensor([0.0, 0.5]))
    sampled.sum().backward()
    assert sampled.tolist() == [0.0, 1.0]
    assert bool(gradient_of(mask.logits).isfinite().all())
    with torch.no_grad():
        mask.logits.zero_()
    assert not mask.hard().any()


# ---- training ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("settings", "groups"),
    [
        ({"token_masks": False, "ffn_masks": "off"}, set()),
        ({"ffn_masks": "off", "alpha": 0}, {"tokens"}),
        ({"ffn_masks": "off"}, {"tokens"}),
        ({"token_masks": False}, {"fc1", "fc2"}),
        ({}, {"tokens", "fc1", "fc2"}),
    ],
    ids=["M1-classifier", "M2-tokens", "M3-tokens-and-drop-control", "M4-ffn", "M5-all"],
)
def test_each_ablation_variant_trains_only_its_masks_and_head(settings: Any, groups: Any) -> None:
    method = meat(**settings)
    before = compute_digest(method.backbone)
    state = trained(method)
    assert {name.rsplit(".", 1)[-1] for name in state.masks} == groups
    learned = {n for n, p in method.named_parameters() if p.requires_grad}
    assert all(n.startswith(("heads.", "mask_modules.")) for n in learned)
    assert all(gradient_of(m.logits).abs().sum() > 0 for m in method.masks.values())
    assert compute_digest(method.backbone) == before
    terms = method.loss(batch(), PROGRESS)[1]
    assert ("drop_control" in terms) == ("tokens" in groups)


def test_without_drop_control_the_loss_is_the_cross_entropy() -> None:
    method = meat(alpha=0)
    method.begin(step_context(TASK, "train", None, RATES, (TASK,)))
    loss, terms = method.loss(batch(), PROGRESS)
    assert torch.equal(loss.detach(), terms["ce"])


def test_drop_control_alone_drives_the_keep_ratio_to_lambda() -> None:
    mask = GumbelHard((2, 50), gamma=1.0, tau=1.0)
    optimizer = torch.optim.Adam(mask.parameters(), lr=0.05)
    for step in range(150):
        optimizer.zero_grad()
        tokens = mask.sample(torch.rand(16, 2, 50, generator=torch.Generator().manual_seed(step)))
        drop_control([tokens], 0.7).backward()
        optimizer.step()
    assert torch.allclose(tokens.mean(dim=(0, 2)), torch.full((2,), 0.7), atol=0.03)


def test_ranks_sample_the_same_masks_as_one_process() -> None:
    def gradients(parts: list[range]) -> list[Tensor]:
        method = meat(gamma=0.5)
        method.begin(step_context(TASK, "train", None, RATES, (TASK,)))
        for rows in parts:
            part = batch(0, rows)
            (method.loss(part, PROGRESS)[0] * part.weight).backward()
        return [gradient_of(m.logits) for m in method.masks.values()]

    whole, split = gradients([range(8)]), gradients([range(5), range(5, 8)])
    for one, two in zip(whole, split, strict=True):
        assert torch.allclose(one, two, atol=1e-6)


def test_token_masks_are_sampled_per_image_and_ffn_masks_once() -> None:
    method = meat(gamma=0.5)
    method.begin(step_context(TASK, "train", None, RATES, (TASK,)))
    tokens = method.sample_gates(batch().draw)["tokens"]
    assert tokens.shape == (8, 3, 16)
    assert not torch.equal(tokens[0], tokens[1])
    seen = list[Tensor]()
    sites: Any = method.sites
    hook = sites.attention[2].register_forward_pre_hook(lambda module, _: seen.append(module.keys))
    method.loss(batch(0, range(5, 8)), PROGRESS)
    hook.remove()
    assert torch.equal(seen[0][:, 1:], tokens[5:8, 2])
    assert method.masks["blocks.0.fc1"].sample(batch().draw.shared("x", 256, 64)).shape == (256, 64)


@pytest.mark.parametrize("form", ["nested", "shared"])
def test_masks_of_tokens_can_be_tied_over_the_blocks(form: str) -> None:
    method = meat(token_masks=form, gamma=0.2, token_mask_blocks=[2, 0, 1])
    method.begin(step_context(TASK, "train", None, RATES, (TASK,)))
    logits = method.masks["tokens"].logits
    assert logits.shape == ((1, 16) if form == "shared" else (3, 16))
    with torch.no_grad():
        logits.copy_(torch.linspace(-0.6, 1.4, logits.numel()).view_as(logits).flip(-2))
    for tokens in (method.sample_gates(batch().draw)["tokens"], method.hard()["tokens"]):
        assert tokens.shape[-2:] == method.mask_shapes()["tokens"] == (3, 16)
        for block in (1, 2):
            before, after = tokens[..., block - 1, :], tokens[..., block, :]
            assert torch.equal(before, after) if form == "shared" else bool((after <= before).all())
    shares = method.hard()["tokens"].float().mean(dim=-1)
    assert 0 < shares[2] < 1
    assert shares[2] < shares[0] if form == "nested" else shares[2] == shares[0]


def test_nested_mask_is_product_of_masks_up_to_its_block() -> None:
    method = meat(token_masks="nested")
    one = torch.tensor([[1.0, 1, 0, 1], [1, 0, 1, 1], [1, 1, 1, 0]], requires_grad=True)
    tied = method.tie("tokens", one)
    assert tied.tolist() == [[1, 1, 0, 1], [1, 0, 0, 1], [1, 0, 0, 0]]
    (tied * torch.tensor([[1.0], [10.0], [100.0]])).sum().backward()
    # The gradient of a factor is the sum over this and later blocks with all other factors 1.
    expected = [[111.0, 1, 111, 11], [110, 110, 0, 10], [100, 0, 0, 100]]
    assert gradient_of(one).tolist() == expected
    assert method.tie("tokens", one > 0).tolist() == tied.bool().tolist()


def test_token_masks_free_is_an_alias_of_true() -> None:
    assert MeatSettings(token_masks="free") == MeatSettings(token_masks=True) == MeatSettings()


@pytest.mark.parametrize("form", ["nested", "shared"])
def test_tied_masks_are_served_and_skip_more_tokens(form: str) -> None:
    method = meat(token_masks=form, ffn_masks="off")
    method.begin(step_context(TASK, "train", None, RATES, (TASK,)))
    logits = method.masks["tokens"].logits
    with torch.no_grad():
        logits.copy_(torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)) + 0.5)
    state = method.finish()[0]
    tokens = state.masks["tokens"]
    assert tokens.shape == (3, 16)
    assert 0 < tokens.float().mean() < 1
    later = meat(token_masks=form, ffn_masks="off").eval()
    later.load_task(state)
    dense = later.logits(images(), "one")
    assert torch.allclose(later.compact("one")(images()), dense, atol=1e-5, rtol=1e-5)
    # Masks of the same size, but of other tokens in each block: a token is computed if a later
    # block reads it.
    free = dict(state.masks, tokens=torch.stack([row.roll(b) for b, row in enumerate(tokens)]))
    assert method.flops_share(state) < method.flops_share(
        TaskState("one", (), "meat", "", masks=free)
    )


def test_meat_auto_rate_is_independent_of_steps() -> None:
    method = meat(mask_travel=3.0, gamma=4.0)
    for steps in (10.0, 1000.0):
        assert math.isclose(method.rate(OptimPlan(1e-3, 0, 32, steps)) * steps, 3.0 * 8.0)
    assert math.isclose(
        meat(mask_lr="paper").rate(OptimPlan(1e-3, 0, 256, 10.0)), 2 * 0.1 * 256 / 1024
    )
    assert math.isclose(meat(mask_lr=0.4).rate(OptimPlan(1e-3, 0, 256, 10.0)), 0.8)


def test_mask_logits_are_neither_decayed_nor_starved_by_adams_epsilon() -> None:
    groups = {g["name"]: g for g in meat().begin(step_context(TASK, "train", None, RATES, (TASK,)))}
    assert set(groups) == {"head.weight", "head.bias", "masks"}
    assert groups["masks"]["weight_decay"] == 0
    assert groups["masks"]["eps"] < 1e-10


def test_masks_that_never_flip_are_reported() -> None:
    method = meat(mask_lr=1e-6)
    trained(method)
    warnings = method.warnings()
    assert len(warnings) == 2
    for kind, sentence in zip(("token", "FFN"), warnings, strict=True):
        assert f"no {kind} mask entry left its initial state" in sentence
    flipping = meat(mask_travel=30)
    trained(flipping)
    assert flipping.warnings() == []
    assert flipping.metrics()["flipped"] > 0
    assert meat(token_masks=False, ffn_masks="off").warnings() == []


def test_bf16_training_keeps_masks_and_their_gradients_in_fp32() -> None:
    method = meat()
    method.begin(step_context(TASK, "train", None, RATES, (TASK,)))
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = method.loss(batch(), PROGRESS)
    loss.backward()
    for mask in method.masks.values():
        gradient = gradient_of(mask.logits)
        assert gradient.dtype == torch.float32
        assert gradient.isfinite().all()


# ---- serving -------------------------------------------------------------------------------------
@pytest.mark.parametrize("ffn", ["weight", "neuron", "off"])
def test_untrained_masks_reproduce_plain_backbone_logits_bit_for_bit(ffn: str) -> None:
    plain = vit()
    method = meat(ffn_masks=ffn)
    method.begin(step_context(TASK, "train", None, RATES, (TASK,)))
    method.eval()
    with torch.no_grad():
        want = method.heads["one"](plain(images()))
    assert torch.equal(method.logits(images(), "one"), want)
    state = method.finish()[0]
    fresh = meat(ffn_masks=ffn)
    fresh.load_task(state)
    assert torch.equal(fresh.eval().logits(images(), "one"), want)


def test_a_base_task_is_served_without_masks_between_masked_ones() -> None:
    method = meat().eval()
    base = TaskState(
        "base", ("x", "y"), "base", method.backbone_digest, head=nn.Linear(64, 2).state_dict()
    )
    method.load_task(with_random_masks(method))
    method.load_task(base)
    masked = method.logits(images(), "one")
    with torch.no_grad():
        want = method.heads["base"](vit()(images()))
    assert torch.equal(method.logits(images(), "base"), want)
    assert torch.equal(method.logits(images(), "one"), masked)


def in_training_form(method: Any, masks: Any) -> Any:
    """Return the logits of task one from the differentiable forward of training."""
    method.active_task, method.weight_overrides = None, method.sites.weights(masks)
    with torch.no_grad(), method.sites.sampled(masks):
        return method.heads["one"](method.features(images()))


@pytest.mark.parametrize("ffn", ["weight", "neuron"])
def test_served_logits_match_training_form_with_hard_masks(ffn: str) -> None:
    method = meat(ffn_masks=ffn).eval()
    state = with_random_masks(method)
    method.load_task(state)
    served = method.logits(images(), "one")
    ffns = {n: m.float() for n, m in state.masks.items() if n != "tokens"}
    by_ffn = in_training_form(method, ffns)
    without = meat(ffn_masks=ffn, token_masks=False).eval()
    without.load_task(
        TaskState(
            "one",
            TASK.classes,
            "meat",
            method.backbone_digest,
            head=state.head,
            meta=without.sites.meta,
            masks={n: m for n, m in state.masks.items() if n != "tokens"},
        )
    )
    assert torch.equal(without.logits(images(), "one"), by_ffn), (
        "folded weights must not change a bit"
    )
    both = in_training_form(
        method, ffns | {"tokens": state.masks["tokens"].float().expand(8, -1, -1)}
    )
    assert torch.allclose(served, both, atol=1e-5)
    assert not torch.allclose(served, by_ffn, atol=1e-3)


def test_packed_state_reproduces_logits_for_any_task_order() -> None:
    states: dict[str, TaskState] = {}
    logits: dict[str, Tensor] = {}
    for order in ((TASK, OTHER), (OTHER, TASK)):
        for task in order:
            method = meat(copy.deepcopy(vit()))
            state = trained(method, task)
            again = states.setdefault(task.name, state)
            assert all(torch.equal(mask, again.masks[name]) for name, mask in state.masks.items())
            logits[task.name] = method.eval().logits(images(), task.name)
    server = meat().eval()
    for state in states.values():
        server.load_task(TaskState.from_bytes(state.to_bytes()))
    for name in ("one", "two", "one"):
        assert torch.equal(server.logits(images(), name), logits[name])


def test_training_another_task_keeps_logits_of_loaded_task() -> None:
    method = meat()
    first = trained(method)
    method.load_task(first)
    before = method.eval().logits(images(), "one")
    trained(method, OTHER)
    assert torch.equal(method.eval().logits(images(), "one"), before)


def test_validation_sees_masks_that_were_restored_from_a_checkpoint() -> None:
    method = meat()
    trained(method)
    method.eval()
    state_before = {name: t.clone() for name, t in method.state_dict().items()}
    before = method.logits(images(), "one")
    method.load_state_dict(
        {name: -t if name.startswith("mask_modules") else t for name, t in state_before.items()}
    )
    assert not torch.equal(method.logits(images(), "one"), before)
    method.load_state_dict(state_before)
    assert torch.equal(method.logits(images(), "one"), before)


def test_a_copy_of_a_serving_method_serves_the_same() -> None:
    method = meat().eval()
    method.load_task(with_random_masks(method))
    want = method.logits(images(), "one")
    assert torch.equal(copy.deepcopy(method).logits(images(), "one"), want)


def test_token_masks_exist_only_in_configured_blocks() -> None:
    method = meat(token_mask_blocks=[2, 0], ffn_masks="off").eval()
    assert method.mask_shapes() == {"tokens": (2, 16)}
    method.load_task(with_random_masks(method))
    method.logits(images(), "one")
    sites: Any = method.sites
    assert [attention.keys is None for attention in sites.attention] == [False, True, False]
    assert torch.equal(sites.attention[2].keys[0, 1:], method.loaded["one"]["tokens"][1])


def test_the_class_token_and_registers_are_never_masked() -> None:
    method = meat(vit(reg_tokens=2), ffn_masks="off").eval()
    state = with_random_masks(method)
    state.masks["tokens"][:] = False
    method.load_task(state)
    assert bool(method.logits(images(), "one").isfinite().all())
    sites: Any = method.sites
    class_tokens_alone = [True] * 3 + [False] * 16
    assert all(attention.keys[0].tolist() == class_tokens_alone for attention in sites.attention)


def test_stored_bits_match_the_papers_formula() -> None:
    method = Meat(build(BackboneSettings(name="deit_tiny_patch16_224")), MeatSettings(), seed=0)
    state = TaskState(
        "t", (), "meat", "", masks={n: torch.ones(s) > 0 for n, s in method.mask_shapes().items()}
    )
    assert state.sizes()["masks"] * 8 == 3_541_296


# ---- physically pruned inference -----------------------------------------------------------------
@pytest.mark.parametrize("ffn", ["weight", "neuron", "off"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"reg_tokens": 2},
        {"global_pool": "avg"},
        {"qk_norm": True, "init_values": 0.1},
        {"scale_mlp_norm": True, "scale_attn_norm": True},
    ],
    ids=["plain", "registers", "mean-pool", "qk-norm", "inner-norms"],
)
def test_compact_inference_equals_the_dense_one(ffn: str, changes: Any) -> None:
    method = meat(vit(**changes), ffn_masks=ffn).eval()
    method.load_task(with_random_masks(method))
    dense = method.logits(images(), "one")
    assert torch.allclose(method.compact("one")(images()), dense, atol=1e-5, rtol=1e-5)


def test_compact_inference_equals_the_dense_one_with_self_loops() -> None:
    method = meat(self_loop=True, ffn_masks="neuron").eval()
    method.load_task(with_random_masks(method, keep=0.3))
    assert torch.allclose(
        method.compact("one")(images()), method.logits(images(), "one"), atol=1e-5, rtol=1e-5
    )


def test_neurons_with_fully_masked_outputs_are_pruned() -> None:
    method = meat().eval()
    state = with_random_masks(method)
    state.masks["blocks.1.fc2"][:, :200] = False
    method.load_task(state)
    pruned: Any = method.compact("one")
    assert pruned.blocks[1].fc1_weight.shape == (56, 64)
    assert torch.allclose(pruned(images()), method.logits(images(), "one"), atol=1e-5, rtol=1e-5)


def test_flops_share_is_one_unmasked_and_falls_with_masks() -> None:
    method = meat(ffn_masks="neuron")
    shares = [method.flops_share(with_random_masks(method, keep)) for keep in (1.0, 0.8, 0.5)]
    assert shares[0] == 1.0
    assert 1.0 > shares[1] > shares[2] > 0.3
    base = TaskState("base", (), "base", method.backbone_digest)
    assert method.flops_share(base) == 1.0


# ---- other families ------------------------------------------------------------------------------
TWO_LAYERS = {n: f for n, f in OTHER_VITS.items() if n != "EVA-02, rotary, q k v apart"}


@contextmanager
def without_keys(keys_left: dict[int, Tensor]) -> Iterator[None]:
    """Context manager in which queries of block n attend only to keys in `keys_left[n]`, (N,)
    bool."""
    attention, calls = F.scaled_dot_product_attention, itertools.count()

    def masked(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if options.get("attn_mask") is not None:
            scores = scores + options["attn_mask"]
        mixed: Tensor = scores.masked_fill(~keys_left[next(calls)], -torch.inf).softmax(-1) @ v
        return mixed

    with mock.patch.object(F, "scaled_dot_product_attention", masked):
        yield
    assert F.scaled_dot_product_attention is attention


@torch.no_grad()
@pytest.mark.parametrize("form", TWO_LAYERS.values(), ids=TWO_LAYERS.keys())
def test_masks_of_other_families_are_served_as_they_are_trained(form: dict[str, Any]) -> None:
    """Both forms equal handwritten attention without the masked keys. Class token and registers are
    always kept."""
    method, pictures = meat(other_vit(**form)).eval(), method_steps.images()
    plain = other_vit(**form)
    assert torch.allclose(method.backbone(pictures), plain(pictures), atol=1e-5)
    state = with_random_masks(method)
    method.load_task(TaskState.from_bytes(state.to_bytes()))
    served = method.logits(pictures, "one")
    floats = {name: mask.float() for name, mask in state.masks.items()}
    floats["tokens"] = floats["tokens"].expand(8, -1, -1)
    method.active_task, method.weight_overrides = None, method.sites.weights(floats)
    with method.sites.sampled(floats):
        trained_form = method.heads["one"](method.features(pictures))
    assert torch.allclose(served, trained_form, atol=1e-5)

    prefix = torch.ones(plain.num_prefix_tokens, dtype=torch.bool)
    keys_left = {n: torch.cat([prefix, mask]) for n, mask in enumerate(state.masks["tokens"])}
    for index, block in enumerate(plain.blocks):
        block.mlp.fc1.weight *= state.masks[f"blocks.{index}.fc1"]
        block.mlp.fc2.weight *= state.masks[f"blocks.{index}.fc2"]
    with without_keys(keys_left):
        expected = plain(pictures) @ state.head["weight"].T + state.head["bias"]
    assert torch.allclose(served, expected, atol=1e-4)
    untouched = plain(pictures) @ state.head["weight"].T + state.head["bias"]
    assert not torch.allclose(served, untouched, atol=1e-6), "the token masks must have an effect"


@pytest.mark.parametrize("form", TWO_LAYERS.values(), ids=TWO_LAYERS.keys())
def test_each_mask_of_other_families_gets_a_gradient(form: dict[str, Any]) -> None:
    method = meat(other_vit(**form), ffn_masks="neuron")
    groups = method_steps.begun(method)
    method.loss(method_steps.batch(), PROGRESS)[0].backward()
    for name, mask in method.masks.items():
        assert gradient_of(mask.logits).isfinite().all(), name
        assert gradient_of(mask.logits).any(), name
    method_steps.train(method, method_steps.OPTIMIZERS["adamw"](groups), method_steps.ONE)
    state = method.eval().finish()[0]
    assert compute_digest(method.backbone) == method.backbone_digest
    logits = method_steps.answers(method)
    method.load_task(TaskState.from_bytes(state.to_bytes()))
    assert torch.equal(method_steps.answers(method), logits)


@pytest.mark.slow
def test_other_families_are_masked_in_compiled_blocks_too() -> None:
    method = meat(other_vit("eva02_tiny_patch14_224"), ffn_masks="neuron")
    method_steps.begun(method)
    expected = method.loss(method_steps.batch(), PROGRESS)[0]
    compile_blocks(method.backbone, backend="eager")
    for _ in range(2):
        assert torch.allclose(method.loss(method_steps.batch(), PROGRESS)[0], expected, atol=1e-6)


def test_an_ffn_of_three_layers_is_refused() -> None:
    with pytest.raises(UserError, match="block 0 of the backbone has an FFN of three layers"):
        meat(other_vit("eva02_base_patch14_224"))


@pytest.mark.parametrize("name", ["eva02_tiny_patch14_224", "vit_giant_patch14_dinov2"])
def test_compact_inference_needs_a_plain_ffn_and_vit(name: str) -> None:
    method = meat(other_vit(name))
    state = with_random_masks(method)
    method.load_task(state)
    assert method.flops_share(state) == 1
    with pytest.raises(UserError, match="needs timm's VisionTransformer with an FFN"):
        method.compact("one")


# ---- user errors ---------------------------------------------------------------------------------
def test_invalid_settings_states_and_backbones_are_refused() -> None:
    with pytest.raises(
        UserError, match=r"token_mask_blocks is \[1, 9\], but the backbone has blocks 0 to 2"
    ):
        meat(token_mask_blocks=(1, 9))
    method = meat()
    with pytest.raises(UserError, match="has tokens of shape"):
        method.load_task(
            TaskState(
                "t",
                ("a",),
                "meat",
                method.backbone_digest,
                masks={"tokens": torch.ones(3, 99) > 0},
                head=nn.Linear(64, 1).state_dict(),
                meta={"token_blocks": [0, 1, 2]},
            )
        )
    with pytest.raises(
        UserError,
        match=r"has token masks for blocks \[0, 2\], these settings have them in \[0, 1\]",
    ):
        meat(token_mask_blocks=(0, 1)).load_task(with_random_masks(meat(token_mask_blocks=(0, 2))))
    with pytest.raises(UserError, match=r"has blocks\.0\.fc1 of shape None"):
        meat().load_task(with_random_masks(meat(ffn_masks="off")))
    with pytest.raises(UserError, match="needs to be told the task"):
        method.logits(images(), None)
    with pytest.raises(ValidationError):
        MeatSettings(**{"lambda": 1.5})
    assert MeatSettings(**{"lambda": 0.7}).lambda_ == 0.7
    odd = vit()
    odd.blocks[1].attn = nn.MultiheadAttention(64, 4)
    with pytest.raises(UserError, match="block 1 of the backbone has a MultiheadAttention"):
        meat(odd)
