"""Tests of APD: shared and task-specific weights, anchored earlier tasks, and sparse storage."""

from __future__ import annotations

import copy
import functools
import itertools
from dataclasses import replace
from typing import Any

import method_steps
import pytest
import torch
from method_steps import PROGRESS, images, rates, serving
from step_contexts import step_context
from torch import Tensor
from torch.nn import functional as F

from workers.data.batch import Batch
from workers.errors import UserError
from workers.job import BackboneSettings, DataSettings, Task, TrainSettings
from workers.methods.apd import Apd, ApdSettings, Decomposed, Sparse
from workers.model.vit import build
from workers.rng import StepRng
from workers.storage.taskstate import Carried, TaskState

TASKS = [
    Task("one", "card", "", ("a", "b", "c")),
    Task("two", "card", "", ("d", "e", "f", "g")),
    Task("three", "card", "", ("h", "i")),
]
RATES = rates(12.0)
SITE = "blocks.1.mlp.fc1"
OPTIMIZERS: dict[str, Any] = {
    "sgd with momentum and decay": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "adam": lambda groups: torch.optim.AdamW([{**g, "weight_decay": 0.0} for g in groups], lr=1e-2),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.05),
}
VIT = method_steps.vit(std=0.1, embed_dim=16)


def apd(**settings: Any) -> Apd:
    return Apd(copy.deepcopy(VIT), ApdSettings(**settings), seed=1)


def find_anchor(method: Apd, site: str) -> tuple[Tensor, Tensor]:
    """Return the penalty on earlier tasks at a site, and its gradient."""
    group = next(group for group in method.groups if site in group.sites)
    values, gradients = method.anchor(group)
    assert gradients is not None
    position = group.sites.index(site)
    return values[position], gradients[position]


def batch(step: int = 0, rows: range = range(8), size: int = 8, classes: int = 2) -> Batch:
    at = torch.tensor(list(rows))
    data = torch.randn(size, 3, 16, 16, generator=torch.Generator().manual_seed(step))
    labels = (data.mean((1, 2, 3)) > 0).long() % classes
    return Batch(
        data[at],
        labels[at],
        torch.zeros(len(at), dtype=torch.long),
        StepRng(7, 0, step, at, size, torch.device("cpu")),
        weight=len(at) / size,
    )


def begun(
    tasks: int = 1, before: tuple[list[TaskState], Carried] | None = None, **settings: Any
) -> Apd:
    """Return the method at the first step of the last of `tasks` tasks.

    before: task states and carried state of the earlier tasks; None: train them.
    """
    method = apd(**settings)
    states: list[TaskState] = []
    carried: Carried | None = None
    if before is not None:
        states, carried = before
    elif tasks > 1:
        states, carried = left_by(tasks - 1, **settings)
    for state in states:
        method.load_task(state)
    method.begin(step_context(TASKS[tasks - 1], "train", carried, RATES, (TASKS[tasks - 1],)))
    method.train()
    return method


def trained(method: Apd, steps: int = 12, optimizer: str = "adamw", freeze: str = "") -> Apd:
    """Train the task, and return the method. freeze: a parameter group that is not trained."""
    groups = [g for g in groups_of(method) if g["name"] != freeze]
    method_steps.train(
        method, OPTIMIZERS[optimizer](groups), lambda progress: batch(progress.step), steps
    )
    return method.eval()


def groups_of(method: Apd) -> list[dict[str, Any]]:
    head = method.heads[str(method.task_name)]
    copies: list[Any] = [*method.own_copies.values]
    return [
        {"name": "head", "params": [*head.parameters()]},
        {"name": "sigma", "params": [*method.sigma.values()], "weight_decay": 0.0},
        {"name": "v", "params": [*method.own_v.values()], "weight_decay": 0.0},
        {"name": "tau", "params": [*method.own_tau.values()], "weight_decay": 0.05},
        {"name": "copies", "params": copies, "weight_decay": 0.0},
    ]


def left_by(tasks: int, **settings: Any) -> tuple[list[TaskState], Carried]:
    """Return the states of a stream's first tasks, and the carried state of the last one."""
    return _left_by(tasks, tuple(settings.items()))


@functools.cache
def _left_by(tasks: int, settings: tuple[tuple[str, Any], ...]) -> tuple[list[TaskState], Carried]:
    before = _left_by(tasks - 1, settings) if tasks > 1 else None
    state, carried = trained(begun(tasks, before, **dict(settings))).finish()
    return [*(before[0] if before else []), state], carried


def served(states: list[TaskState], carried: Carried, **settings: Any) -> Apd:
    method: Apd = serving(apd(**settings), states, carried)
    return method


def theta(method: Apd, task: int) -> dict[str, Tensor]:
    """Return the serving weights of a task at each site."""
    with torch.no_grad():
        weights = method.serving_weights(TASKS[task].name)
    return {site: weights[f"{site}.weight"] for site in method.sites}


def furthest(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max(float((a[site] - b[site]).abs().max()) for site in a)


def moved(method: Apd) -> float:
    """Return how far training the second task moves the stored weights of the first."""
    before, (state, carried) = theta(served(*left_by(1)), 0), method.finish()
    return furthest(before, theta(served([*left_by(1)[0], state], carried), 0))


@pytest.fixture(scope="module")
def first() -> tuple[list[TaskState], Carried]:
    return left_by(1)


# ---- the weights ---------------------------------------------------------------------------------
def test_fused_weights_and_gradients_match_composed_operations() -> None:
    torch.manual_seed(0)
    shapes = ((2, 3, 4), (2, 3), (2, 3, 4))
    stacks = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    parameters = [p.requires_grad_() for stack in stacks for p in stack.clone().unbind()]
    sigma, v, tau = (stack.clone().requires_grad_() for stack in stacks)
    known, values = torch.randn(2, 3, 4, dtype=torch.float64), torch.tensor([2.0, 3.0])
    theta, size, value = Decomposed.apply(*stacks, values, known, *parameters)
    plain = sigma * v.sigmoid()[..., None] + tau
    assert torch.allclose(theta, plain)
    assert torch.allclose(size, tau.abs().sum((1, 2)))
    assert torch.equal(value, values)
    pull = torch.randn(2, 3, 4, dtype=torch.float64)
    pulls = torch.tensor([0.5, 0.7])
    gradients = torch.autograd.grad(
        (theta * pull).sum() + 0.3 * size.sum() + (pulls * value).sum(), parameters
    )
    penalty = 0.3 * tau.abs().sum() + (pulls[:, None, None] * sigma * known).sum()
    of_stacks = torch.autograd.grad((plain * pull).sum() + penalty, (sigma, v, tau))
    expected = [gradient for stack in of_stacks for gradient in stack]
    for got, want in zip(gradients, expected, strict=True):
        assert torch.allclose(got, want)


def test_full_scales_and_zero_tau_give_sigma() -> None:
    method = begun()
    with torch.no_grad():
        for v in method.own_v.values():
            v.fill_(torch.inf)
    effective = method.training_weights(batch(), PROGRESS)
    assert all(
        torch.equal(effective[f"{site}.weight"], sigma) for site, sigma in method.sigma.items()
    )


def test_apd_masks_linear_layers_of_blocks() -> None:
    method = begun()
    assert len(method.sites) == 8
    assert "patch_embed.proj" not in method.sites
    stays = {name for name, _ in method.backbone.named_parameters()} - set(
        method.training_weights(batch(), PROGRESS)
    )
    assert stays == {"cls_token", "pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias"}
    assert set(begun(copies=False).training_weights(batch(), PROGRESS)) == {
        f"{site}.weight" for site in method.sites
    }


def test_first_task_starts_at_backbone_weights_for_any_v() -> None:
    for start in (4.0, -1.0):
        assert furthest(theta(begun(v_start=start).eval(), 0), begun().sites) < 1e-6


def test_tau_may_start_from_sigma_as_in_the_released_code() -> None:
    method = begun(tau_start="sigma")
    m = torch.tensor(4.0).sigmoid()
    weight = method.training_weights(batch(), PROGRESS)[f"{SITE}.weight"]
    assert torch.allclose(weight, method.start[SITE] * (m + 1))
    assert method.own_tau[SITE].data_ptr() != method.start[SITE].data_ptr()


def test_sigma_decays_at_the_first_task_only(first: Any) -> None:
    method = apd()
    method.load_task(first[0][0])
    decays = [
        {
            g["name"]: g.get("weight_decay", "configured")
            for g in m.begin(step_context(t, "train", c, RATES, (t,)))
        }
        for m, t, c in ((apd(), TASKS[0], None), (method, TASKS[1], first[1]))
    ]
    assert [d["sigma"] for d in decays] == [0.05, 0.0]
    assert [(d["v"], d["tau"], d["copies"]) for d in decays] == 2 * [
        ("configured", "configured", 0.0)
    ]


# ---- the anchor of earlier tasks -----------------------------------------------------------------
def test_anchor_gradient_initially_vanishes_for_frozen_or_zero_tau(first: Any) -> None:
    """The residual theta_i* - (sigma .* M_i + tau_i) is exactly 0. With a frozen tau_i, the term
    and its gradient are therefore 0. If tau_i may move, the gradient is 0 wherever tau_i is 0."""
    method = begun(2, first, retro="frozen_tau")
    for site in method.sites:
        value, gradient = find_anchor(method, site)
        assert value == 0
        assert not gradient.any()
    method = begun(2, first)
    for site in method.sites:
        value, gradient = find_anchor(method, site)
        tau = method.before["one"][site]
        assert tau.any()
        assert torch.equal(gradient != 0, tau != 0)
        # the L1 price of tau, less the saving from shrinking tau
        price = (
            method.settings.lambda1 * tau.abs().sum()
            - tau.count_nonzero() * method.settings.lambda1**2 / 200
        )
        assert torch.allclose(value, price, rtol=1e-4)


@pytest.mark.parametrize("limit", [4e-6, 1e-2])
def test_earlier_tau_minimise_the_objective_for_any_sigma(limit: float) -> None:
    """The value and gradient are those of the Huber loss, and no other tau is better."""
    lambda1 = 4e-4
    method = begun(
        2, left_by(1, v_start=0.0), lambda1=lambda1, lambda2=lambda1 / limit, zeros="proximal"
    )
    torch.manual_seed(0)
    with torch.no_grad():
        method.sigma[SITE].add_(torch.randn_like(method.sigma[SITE]) * 0.01)
    m, start, tau0, s = (
        method.rows["one"][SITE],
        method.start[SITE],
        method.before["one"][SITE],
        method.settings,
    )
    target = (start * m + tau0).double()

    def objective(tau: Tensor, sigma: Tensor) -> Tensor:
        return (
            s.lambda1 * tau.double().abs()
            + s.lambda2 / 2 * (target - sigma.double() * m - tau).square()
        )

    sigma = method.sigma[SITE].detach().clone().requires_grad_()
    huber = s.lambda2 * F.huber_loss(
        sigma.double() * m, target, reduction="sum", delta=s.lambda1 / s.lambda2
    )
    value, gradient = find_anchor(method, SITE)
    assert torch.allclose(value.double(), huber, rtol=1e-3)
    assert torch.allclose(gradient, torch.autograd.grad(huber, sigma)[0], atol=2e-2 * lambda1)
    best = method.restore_tau("one", SITE)
    least = objective(best, sigma)
    assert least.sum().item() == pytest.approx(value.item(), rel=1e-3)
    for step in (1e-5, 1e-4, 1e-3, 1e-2):
        for sign in (-1, 1):
            assert bool((objective(best + sign * step, sigma) >= least - 1e-9).all())


def test_anchor_is_quadratic_in_sigma_shift_for_frozen_tau() -> None:
    states, carried = left_by(2, retro="frozen_tau", v_start=0.0)
    method = begun(3, (states, carried), retro="frozen_tau", lambda2=3.0)
    with torch.no_grad():
        method.sigma[SITE].add_(0.1)
    sigma = method.sigma[SITE].detach().clone().requires_grad_()
    plain = torch.zeros(())
    for old in ("one", "two"):
        moved = (method.start[SITE] - sigma) * method.rows[old][SITE]
        plain = plain + 1.5 * moved.square().sum()
    value, gradient = find_anchor(method, SITE)
    assert torch.allclose(value, plain)
    assert torch.allclose(gradient, torch.autograd.grad(plain, sigma)[0], atol=1e-6)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("zeros", "bound"), [("proximal", 4e-5), ("threshold", 4e-4 + 4e-5)])
def test_earlier_weights_move_within_the_bound_under_any_optimizer(
    first: Any, optimizer: Any, zeros: str, bound: Any
) -> None:
    """Sigma moves much further. tau_i compensates for this up to lambda1 / lambda2, plus lambda1 if
    an entry is cut."""
    before = theta(served(*first), 0)
    method = trained(begun(2, first, zeros=zeros, lambda2=10.0), optimizer=optimizer)
    state, carried = method.finish()
    assert furthest(before, theta(served([*first[0], state], carried), 0)) <= bound + 1e-6
    assert (
        furthest(method.start, {site: s.detach() for site, s in method.sigma.items()}) > 10 * bound
    )


def test_earlier_weights_stay_with_huge_lambda2_or_frozen_sigma(first: Any) -> None:
    before = theta(served(*first), 0)
    ways: list[tuple[str, dict[str, Any], float]] = [
        ("", {"zeros": "proximal", "lambda2": 1e9}, 1e-7),
        ("sigma", {"lambda2": 1e9}, 1e-7),
        ("sigma", {"retro": "frozen_tau"}, 0.0),
    ]
    for freeze, settings, bound in ways:
        state, carried = trained(begun(2, first, **settings), freeze=freeze).finish()
        assert furthest(before, theta(served([*first[0], state], carried), 0)) <= bound, settings


def test_larger_lambda2_moves_earlier_weights_less_with_frozen_tau(first: Any) -> None:
    ways = [
        moved(trained(begun(2, first, retro="frozen_tau", lambda2=weight), steps=30))
        for weight in (1e-6, 1.0, 1e2)
    ]
    assert ways[0] > 2 * ways[1] > 2 * ways[2]


def test_earlier_weights_drift_without_anchor_or_following_tau(
    first: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = moved(trained(begun(2, first)))
    with monkeypatch.context() as patched:
        patched.setattr(Apd, "anchor", lambda self, group: (torch.zeros(len(group.sites)), None))
        loose = moved(trained(begun(2, first, retro="frozen_tau")))
    follow = Apd.restore_tau
    with monkeypatch.context() as patched:
        patched.setattr(
            Apd,
            "restore_tau",
            lambda self, task, site: (
                self.before[task][site] if self.step and task == "one" else follow(self, task, site)
            ),
        )
        stale = moved(trained(begun(2, first)))
    assert min(loose, stale) > 10 * held


def test_earlier_task_is_served_with_its_updated_tau(first: Any) -> None:
    states, later = left_by(2)
    earlier = {n: t for n, t in first[1].tensors.items() if n.startswith("tau/one/")}
    stale = {n: t for n, t in later.tensors.items() if not n.startswith("tau/one/")} | earlier
    methods = served(*first), served(states, later), served(states, replace(later, tensors=stale))
    before, now, wrong = (m.logits(images(), "one") for m in methods)
    assert not torch.equal(before, now)
    assert (now - before).abs().max() < 0.1 * (wrong - before).abs().max()
    assert later.meta["tasks"] == ["one", "two"]


def test_penalty_gradient_is_independent_of_micro_batches(first: Any) -> None:
    def gradients(*parts: range) -> dict[str, Tensor]:
        method = begun(2, first, lambda1=0.1)
        with torch.no_grad():
            for p in [*method.sigma.values(), *method.own_tau.values()]:
                p.add_(0.01)
        for rows in parts:
            part = batch(rows=rows)
            (method.loss(part, PROGRESS)[0] * part.weight).backward()
        return {n: p.grad.clone() for n, p in method.named_parameters() if p.grad is not None}

    whole, parts = gradients(range(8)), gradients(range(2), range(2, 5), range(5, 8))
    assert whole.keys() == parts.keys()
    assert all(torch.allclose(whole[n], parts[n], rtol=1e-4, atol=1e-6) for n in whole)


def test_the_terms_add_up_to_the_loss(first: Any) -> None:
    loss, terms = trained(begun(2, first), steps=3).loss(batch(), PROGRESS)
    assert terms.keys() == {"ce", "sparsity", "anchor"}
    assert min(terms.values()) > 0
    assert loss.item() == pytest.approx(sum(t.item() for t in terms.values()))


def test_metrics_match_the_stored_tau_and_weights(first: Any) -> None:
    method = trained(begun(2, first))
    metrics, (state, carried) = method.metrics(), method.finish()
    now = served([*first[0], state], carried)
    taus = [now.restore_tau("two", site) for site in now.sites]
    assert metrics["tau_zeros"] == pytest.approx(
        float(torch.cat([(t == 0).flatten() for t in taus]).float().mean())
    )
    a, b = (torch.cat([t.flatten() for t in theta(m, 0).values()]) for m in (served(*first), now))
    assert metrics["drift"] == pytest.approx(float((a - b).norm() / a.norm()), rel=1e-3)
    assert "drift" not in begun().metrics()


# ---- zeros ---------------------------------------------------------------------------------------
def test_stored_tau_has_no_entries_below_threshold(
    first: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = trained(begun(2, first))
    carried = method.finish()[1]
    values = torch.cat(
        [t for n, t in carried.tensors.items() if n.startswith("tau/") and n.endswith("/values")]
    )
    assert float(values.abs().min()) > 4e-4
    monkeypatch.setattr(Apd, "with_zeros", lambda self, tau: tau)
    assert size_of(method.finish()[1], "tau/") > size_of(carried, "tau/")


def test_proximal_step_keeps_and_reaches_zeros() -> None:
    method = begun(zeros="proximal", lambda1=1.0)
    tau = method.own_tau[SITE]
    rows = tau.detach().flatten()
    rows[:6] = torch.tensor([0.0, 0.0, 0.0, 0.5, 0.5, -0.5])
    gradient = torch.zeros_like(rows)
    # where tau is not zero, the gradient includes the L1 price
    gradient[:6] = torch.tensor([0.9, 1.5, -3.0, 4.0, 9.0, -1.0])
    for p in method.own_tau.values():
        p.grad = torch.zeros_like(p)
    tau.grad = gradient.view_as(tau).clone()
    method.after_backward()
    assert tau.grad.flatten()[:6].tolist() == [0.0, 0.5, -2.0, 4.0, 9.0, -1.0]
    with torch.no_grad():
        tau.sub_(0.1 * tau.grad)
        tau.view(-1)[0] = 1e-3  # momentum moves a held entry
    method.after_step(PROGRESS)
    assert tau.detach().flatten()[:6].tolist() == pytest.approx([0.0, -0.05, 0.2, 0.1, 0.0, -0.4])


def test_proximal_training_stores_what_it_trains() -> None:
    method = trained(begun(zeros="proximal", lambda1=1e-4), optimizer="sgd with momentum and decay")
    assert 0.05 < method.metrics()["tau_zeros"] < 0.999
    assert all(
        torch.equal(method.restore_tau("one", site), tau) for site, tau in method.own_tau.items()
    )


@pytest.mark.parametrize("zeros", ["threshold", "proximal"])
def test_larger_lambda1_makes_tau_sparser(zeros: str) -> None:
    shares = [
        trained(begun(zeros=zeros, lambda1=price), steps=20).metrics()["tau_zeros"]
        for price in (1e-6, 1e-5, 1e-4, 1e-3)
    ]
    assert all(a < b for a, b in itertools.pairwise(shares)), shares


def test_served_logits_equal_logits_during_training() -> None:
    """This includes the copies that the task trained. Small entries of tau may be cut."""
    for settings, tolerance in (
        ({"zeros": "proximal"}, 1e-6),
        ({"copies": False, "zeros": "proximal"}, 1e-6),
        ({}, 0.05),
    ):
        method = trained(begun(**settings), steps=5)
        with torch.no_grad():
            method.weight_overrides = method.training_weights(batch(), PROGRESS)
            trained_for = method.heads["one"](method.features(images()))
        state, carried = method.finish()
        logits = served([state], carried, **settings).logits(images(), "one")
        assert torch.allclose(logits, trained_for, atol=tolerance)
        assert not torch.allclose(
            logits, begun().eval().logits(images(), "one"), atol=2 * tolerance
        )


def test_tau_that_stays_zero_causes_a_warning(first: Any) -> None:
    assert "its tau is zero everywhere" in trained(begun(lambda1=100.0), steps=2).warnings()[0]
    assert not trained(begun(2, first)).warnings()


# ---- storage -------------------------------------------------------------------------------------
@pytest.mark.parametrize("share", [0.0, 0.03, 0.04, 1.0])
def test_sparse_tensor_uses_smaller_form_and_restores_exactly(share: float) -> None:
    torch.manual_seed(0)
    tensor = torch.randn(13, 10).masked_fill_(
        torch.arange(130).view(13, 10) >= round(share * 130), 0.0
    )
    count = round(share * 130)
    sparse = Sparse.of(tensor)
    parts = sparse.named("x")
    assert sum(t.numel() * t.element_size() for t in parts.values()) == 4 * count + min(
        4 * count, 17
    )
    assert sparse.kind == ("bits" if count > 4 else "at")
    assert torch.equal(sparse.dense(tensor), tensor)
    assert torch.equal(sparse.support((13, 10)), tensor != 0)


def size_of(carried: Carried, prefix: str) -> int:
    return sum(
        t.numel() * t.element_size() for n, t in carried.tensors.items() if n.startswith(prefix)
    )


def test_apd_task_size_counts_row_masks_and_sparse_tau() -> None:
    torch.manual_seed(0)
    width, depth = 192, 12
    method = Apd(build(BackboneSettings()), ApdSettings(), seed=1)
    method.begin(step_context(TASKS[0], "train", None, RATES, TASKS[:1]))
    expected = 0
    for tau, share in zip(
        method.own_tau.values(), itertools.cycle((0.5, 0.2, 0.02, 0.0)), strict=False
    ):
        used = torch.rand_like(tau) < share
        with torch.no_grad():
            tau.copy_(used * 0.01)
        expected += 4 * int(used.sum()) + min(4 * int(used.sum()), tau.numel() // 8)
    state, carried = method.finish()
    scales, norms = (5 + 4) * width * depth, 2 * width * (2 * depth + 1)
    assert 32 * scales == 663_552
    assert state.sizes() == {
        "masks": 0,
        "tokens": 0,
        "head": 4 * 3 * (width + 1),
        "copies": 4 * (scales + norms + scales),
    }  # the last term: one bias per output feature
    assert size_of(carried, "tau/") == expected
    assert (
        size_of(carried, "sigma/")
        == 4 * (4 * width**2 + 8 * width**2) * depth
        == 4 * (5_455_872 - 768 * width)
    )
    assert size_of(carried, "") == size_of(carried, "tau/") + size_of(carried, "sigma/")
    display_masks = Apd.display_masks(state, carried)
    assert all(torch.equal(display_masks[site], tau != 0) for site, tau in method.own_tau.items())


def test_a_base_task_is_answered_by_the_backbone(first: Any) -> None:
    base = TaskState(
        "zero",
        ("x", "y"),
        "base",
        apd().backbone_digest,
        head={"weight": torch.randn(2, 16), "bias": torch.zeros(2)},
    )
    method = served([base, *first[0]], first[1])
    method.logits(images(), "one")
    assert torch.equal(
        method.logits(images(), "zero"), method.heads["zero"](method.backbone(images()))
    )


def test_a_state_of_another_width_is_refused(first: Any) -> None:
    state = first[0][0]
    with pytest.raises(
        UserError,
        match=r"scales blocks.0.attn.qkv.v of shape \(7,\), this backbone has 48 output features",
    ):
        apd().load_task(
            replace(state, copies=state.copies | {"blocks.0.attn.qkv.v": torch.zeros(7)})
        )


def test_an_anchor_that_sgd_would_overshoot_is_refused() -> None:
    settings, train = ApdSettings(retro="frozen_tau"), TrainSettings(optimizer="sgd", lr=0.1)
    with pytest.raises(UserError, match=r"train.lr \* lambda2 = 10"):
        Apd.validate(settings, train, DataSettings(), "task")
    for fine in (
        (settings, TrainSettings(lr=0.1)),
        (ApdSettings(), train),
        (ApdSettings(retro="frozen_tau", lambda2=10), train),
    ):
        Apd.validate(*fine, DataSettings(), "task")
