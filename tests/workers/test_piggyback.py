"""Tests of Piggyback: worked numbers and invariants, and masks as trained, stored and served."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from method_steps import (
    BASE,
    ONE,
    OPTIMIZERS,
    PROGRESS,
    RATES,
    TWO,
    answers,
    batch,
    begun,
    images,
    trained,
    vit,
)
from pydantic import ValidationError
from torch import Tensor, nn

from workers.errors import UserError
from workers.job import BackboneSettings, DataSettings, TrainSettings
from workers.methods.base import OptimPlan
from workers.methods.bases import weight_masks
from workers.methods.piggyback import Piggyback, PiggybackSettings
from workers.model.masks import Threshold
from workers.model.vit import build, compute_digest
from workers.storage.taskstate import TaskState


def piggyback(**settings: Any) -> Piggyback:
    return Piggyback(vit(), PiggybackSettings(**settings), seed=1)


def scores(method: Piggyback, site: str) -> nn.Parameter:
    """Return the real values that are thresholded to a mask."""
    return method.masks[site].get_parameter("scores")


def gradient_of(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def gradients(method: Piggyback) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the gradients of one step by site: of the masked weights, and of the real values."""
    begun(method)
    loss, _ = method.loss(batch(), PROGRESS)
    for weight in method.weight_overrides.values():
        weight.retain_grad()
    loss.backward()
    overrides = method.weight_overrides
    weight_gradients = {site: gradient_of(overrides[f"{site}.weight"]) for site in method.masks}
    score_gradients = {site: gradient_of(scores(method, site)).clone() for site in method.masks}
    return weight_gradients, score_gradients


# ---- the equations -------------------------------------------------------------------------------
def test_threshold_keeps_entries_above_theta_and_ternary_negates_negative_ones() -> None:
    values = torch.tensor([-0.3, 0.0, 5e-3, 5.1e-3, -1e-9, 0.2])
    assert Threshold(values, 5e-3).hard().tolist() == [False, False, False, True, False, True]
    assert Threshold(values, 5e-3, ternary=True).hard().tolist() == [-1, 0, 0, 1, -1, 1]
    assert Threshold(values, 5e-3, inclusive=True).hard().tolist() == [
        False,
        False,
        True,
        True,
        False,
        True,
    ]
    for mask in (Threshold(values, 5e-3), Threshold(values, 5e-3, ternary=True)):
        assert torch.equal(mask.sample().detach(), mask.hard().float())


def test_score_gradient_equals_mask_entry_gradient() -> None:
    """dL/dM = (delta x^T) .* W, for entries that are on or off. Computed by hand for y = (M .* W) x
    and L = delta . y."""
    weight, x, delta = (
        torch.tensor([[1.0, -2.0], [3.0, 0.5]]),
        torch.tensor([2.0, -1.0]),
        torch.tensor([1.0, 10.0]),
    )
    mask = Threshold(torch.tensor([[1.0, -1.0], [0.0, 1.0]]), 5e-3)
    (weight_masks.masked(weight, mask.sample()) @ x @ delta).backward()
    assert torch.equal(gradient_of(mask.scores), torch.tensor([[2.0, 2.0], [60.0, -5.0]]))


@pytest.mark.parametrize("ternary", [False, True])
def test_piggyback_gradient_is_masked_gradient_times_weight(
    ternary: bool,
) -> None:
    method = piggyback(ternary=ternary)
    effective, real = gradients(method)
    assert len(real) == 9  # patch embedding, and four layers in each of two blocks
    for site, gradient in real.items():
        assert torch.equal(gradient, effective[site] * method.sites[site])
        assert bool((gradient != 0).any()), site


@pytest.mark.parametrize("ternary", [False, True])
def test_new_mask_reproduces_plain_backbone_logits_bit_for_bit(ternary: bool) -> None:
    method = piggyback(ternary=ternary)
    begun(method)
    with torch.no_grad():
        want = method.heads["one"](vit()(images()))
        method.weight_overrides = method.training_weights(batch(), PROGRESS)
        assert torch.equal(method.heads["one"](method.features(images())), want)
    assert torch.equal(answers(method), want)
    assert method.metrics() == {"density": 1.0}
    fresh = piggyback()
    fresh.load_task(method.finish()[0])
    assert torch.equal(answers(fresh), want)


def test_scores_start_as_the_init_setting_says() -> None:
    ones, uniform, weights = (piggyback(init=init) for init in ("ones", "uniform", "weights"))
    for method in (ones, uniform, weights):
        begun(method)
    assert all(bool((scores(ones, site) == 1e-2).all()) for site in ones.masks)
    drawn = torch.cat([scores(uniform, site).detach().flatten() for site in uniform.masks])
    assert drawn.abs().max() <= 1e-2
    assert abs(drawn.mean()) < 1e-3
    assert uniform.metrics()["density"] == pytest.approx(0.25, abs=0.01)
    parameters = dict(vit().named_parameters())
    for site in weights.masks:
        weight = parameters[f"{site}.weight"]
        mean = weight.abs().mean().expand_as(weight)
        assert torch.allclose(scores(weights, site), mean)


# ---- training ------------------------------------------------------------------------------------
def test_piggyback_auto_rate_is_independent_of_steps() -> None:
    method = piggyback(mask_travel=3.0)
    for steps in (10.0, 1000.0):
        assert method.rate(
            "blocks.0.attn.qkv", OptimPlan(1e-3, 0, 32, steps)
        ) * steps**0.5 == pytest.approx(3.0 * 5e-3)
    assert piggyback(mask_lr=0.4).rate("blocks.0.attn.qkv", RATES) == 0.4
    weights = piggyback(init="weights", mask_travel=3.0)
    mean = vit().blocks[0].attn.qkv.weight.abs().mean().item()
    assert weights.rate("blocks.0.attn.qkv", OptimPlan(1e-3, 0, 32, 16.0)) * 4 == pytest.approx(
        3.0 * (mean - 5e-3)
    )


def test_piggyback_auto_rate_matches_paper() -> None:
    """The paper uses 1e-4 for 15 epochs of about 190 steps, and 1e-5 for 15 more."""
    assert 2e-5 < piggyback().rate("blocks.0.attn.qkv", OptimPlan(1e-3, 0, 32, 16.5 * 190)) < 1e-4


def test_only_undecayed_masks_and_head_are_trained() -> None:
    groups = begun(piggyback())
    assert [g["name"] for g in groups] == ["head.weight", "head.bias", "masks"]
    assert groups[2]["weight_decay"] == 0
    assert sum(p.numel() for p in groups[2]["params"]) == sum(
        w.numel() for w in piggyback().sites.values()
    )
    layers = [g for g in begun(piggyback(init="weights")) if g["name"] == "masks"]
    assert len({g["lr"] for g in layers}) == len(layers) == 9, (
        "with init `weights`, each layer has its own distance to the threshold"
    )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("ternary", [False, True])
def test_training_another_task_keeps_backbone_and_earlier_answers(
    optimizer: Any, ternary: bool
) -> None:
    method = piggyback(ternary=ternary, mask_lr=60.0 if optimizer == "sgd" else "auto")
    method.load_task(trained(method, ONE, optimizer))
    before = answers(method)
    trained(method, TWO, optimizer)
    assert method.metrics()["density"] < 0.98, "training without effect would also keep the answers"
    assert torch.equal(answers(method), before)
    assert compute_digest(method.backbone) == method.backbone_digest
    assert method.logits(images(), "two").shape == (8, 3)


def test_in_place_masking_changes_earlier_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutation that the test above must find: masks are multiplied into the shared weights."""

    def in_place(weight: Tensor, mask: Tensor) -> Tensor:
        return weight.data.mul_(mask) if not mask.requires_grad else weight * mask

    monkeypatch.setattr(weight_masks, "masked", in_place)
    method = piggyback()
    method.load_task(trained(method))
    before = answers(method)
    trained(method, TWO)
    answers(method, TWO)
    assert not torch.equal(answers(method), before)
    assert compute_digest(method.backbone) != method.backbone_digest


def test_gradients_are_divided_by_weights_per_layer_or_entry() -> None:
    plain, layer, entry = (piggyback(scale_gradients=how) for how in ("none", "layer", "entry"))
    for method in (plain, layer, entry):
        with torch.no_grad():
            method.sites["blocks.0.mlp.fc1"][0, 0] = 0.0
        gradients(method)
        method.after_backward()
    for site, weight in plain.sites.items():
        gradient = gradient_of(scores(plain, site))
        by_layer = gradient_of(scores(layer, site))
        by_entry = gradient_of(scores(entry, site))
        nonzero = weight != 0
        assert torch.allclose(by_layer, gradient / weight.abs().mean())
        assert torch.allclose(by_entry[nonzero], (gradient / weight.abs())[nonzero])
        assert bool((by_entry[~nonzero] == 0).all()), "0 / 0 must not become nan"


def test_accumulated_gradients_are_divided_once() -> None:
    once, twice = piggyback(scale_gradients="layer"), piggyback(scale_gradients="layer")
    for method, parts in ((once, 1), (twice, 2)):
        begun(method)
        for _ in range(parts):
            (method.loss(batch(), PROGRESS)[0] / parts).backward()
        method.after_backward()
    for site in once.masks:
        in_one = gradient_of(scores(once, site))
        in_two = gradient_of(scores(twice, site))
        assert torch.allclose(in_one, in_two, rtol=1e-4)


def test_bf16_training_keeps_real_values_and_their_gradients_in_fp32() -> None:
    method = piggyback()
    begun(method)
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = method.loss(batch(), PROGRESS)
    loss.backward()
    for site in method.masks:
        gradient = gradient_of(scores(method, site))
        assert gradient.dtype == torch.float32
        assert gradient.isfinite().all()


def test_masks_without_switched_off_entries_are_reported() -> None:
    still = piggyback(mask_lr=1e-9)
    trained(still)
    assert "no mask entry was switched off" in still.warnings()[0]
    with torch.no_grad():
        scores(still, "blocks.1.mlp.fc2")[0, 0] = 0.0
    assert still.warnings() == [], "one switched-off entry is enough"


def test_retrained_task_is_served_with_current_training_masks() -> None:
    method = piggyback()
    method.load_task(trained(method))
    begun(method)
    with torch.no_grad():
        assert torch.equal(answers(method), method.heads["one"](vit()(images())))


# ---- storage and serving -------------------------------------------------------------------------
@pytest.mark.parametrize("ternary", [False, True])
def test_stored_masks_reproduce_answers_of_trained_scores(ternary: bool) -> None:
    method = piggyback(ternary=ternary, mask_travel=10.0)
    state = trained(method)
    assert 0.1 < method.metrics()["density"] < 0.98
    minus = sum(int(m.sum()) for name, m in state.masks.items() if name.endswith(".minus"))
    assert (minus > 100) == ternary
    server = piggyback()  # binary settings: the state determines its kind
    server.load_task(TaskState.from_bytes(state.to_bytes()))
    assert torch.equal(answers(server), answers(method))
    with torch.no_grad():
        method.weight_overrides = method.training_weights(batch(), PROGRESS)
        trained_form = method.heads["one"](method.features(images()))
    assert torch.equal(answers(server), trained_form)


def test_task_state_does_not_depend_on_earlier_tasks() -> None:
    alone, after = piggyback(), piggyback()
    trained(after, TWO)
    assert trained(alone).to_bytes() == trained(after).to_bytes()
    server = piggyback()
    for state in (trained(piggyback(), TWO), trained(piggyback())):
        server.load_task(state)
    for task in (ONE, TWO, ONE):
        fresh = piggyback()
        fresh.load_task(trained(piggyback(), task))
        assert torch.equal(answers(server, task), answers(fresh, task))


def test_plain_backbone_serves_base_task_between_masked_tasks() -> None:
    method = piggyback()
    method.load_task(trained(method))
    method.load_task(
        TaskState(
            "base", BASE.classes, "base", method.backbone_digest, head=nn.Linear(32, 2).state_dict()
        )
    )
    masked = answers(method)
    with torch.no_grad():
        want = method.heads["base"](vit()(images()))
    assert torch.equal(answers(method, BASE), want)
    assert torch.equal(answers(method), masked)
    assert not torch.equal(method.heads["one"](vit()(images())), masked)


def test_validation_sees_masks_that_were_restored_from_a_checkpoint() -> None:
    method = piggyback()
    trained(method)
    state_before = {name: t.clone() for name, t in method.state_dict().items()}
    before = answers(method)
    method.load_state_dict(
        {name: -t if name.startswith("mask_modules") else t for name, t in state_before.items()}
    )
    assert not torch.equal(answers(method), before)
    method.load_state_dict(state_before)
    assert torch.equal(answers(method), before)


@pytest.mark.parametrize(("ternary", "bits"), [(False, 1), (True, 2)])
def test_the_stored_size_is_a_bit_per_weight_or_two(ternary: bool, bits: int) -> None:
    method = Piggyback(build(BackboneSettings()), PiggybackSettings(ternary=ternary), seed=1)
    begun(method, TWO)
    sizes = method.finish()[0].sizes()
    assert sizes == {
        "masks": bits * 5_455_872 // 8,
        "tokens": 0,
        "copies": 0,
        "head": 4 * 3 * (192 + 1),
    }


# ---- user errors ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("settings", "train", "message"),
    [
        (
            {"start": 5e-3},
            {},
            r"start is 0.005 with theta 0.005: every entry would start switched off.*raise "
            r"start above theta",
        ),
        ({"init": "uniform", "start": 1e-3}, {}, "start is 0.001 with theta 0.005"),
        (
            {},
            {"optimizer": "sgd"},
            "mask_lr is 'auto' with train.optimizer 'sgd'.*give mask_lr a number",
        ),
        (
            {"scale_gradients": "entry"},
            {},
            "scale_gradients is 'entry' with train.optimizer 'adamw'.*changes nothing",
        ),
    ],
)
def test_conflicting_settings_are_refused_with_reason(
    settings: Any, train: Any, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        Piggyback.validate(
            PiggybackSettings(**settings), TrainSettings(**train), DataSettings(), "task"
        )


def test_compatible_settings_are_accepted() -> None:
    for settings, train in (
        ({}, {}),
        ({"mask_lr": 1e-4, "scale_gradients": "layer"}, {"optimizer": "sgd"}),
        ({"init": "weights", "start": 1e-4}, {}),
        ({"ternary": True, "start": 2e-2}, {}),
    ):
        Piggyback.validate(
            PiggybackSettings(**settings), TrainSettings(**train), DataSettings(), "task"
        )


def test_invalid_theta_and_mismatched_states_are_refused() -> None:
    with pytest.raises(
        UserError,
        match=r"init is 'weights' with theta 0.5, but the mean \|W\| of patch_embed.proj is 0.16: "
        r".* lower theta",
    ):
        begun(piggyback(init="weights", theta=0.5))
    with pytest.raises(ValidationError):
        PiggybackSettings(theta=0)
    method = piggyback()
    for name, shape in (
        ("blocks.0.attn.qkv", (3, 3)),
        ("nowhere", (3, 3)),
        ("blocks.0.attn.qkv.minus", (1,)),
    ):
        state = TaskState(
            "t",
            ("a",),
            "piggyback",
            method.backbone_digest,
            masks={name: torch.ones(shape) > 0},
            head=nn.Linear(32, 1).state_dict(),
        )
        with pytest.raises(UserError, match=f"its state has a mask {name} of shape"):
            method.load_task(state)
