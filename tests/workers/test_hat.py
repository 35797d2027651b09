"""Tests of HAT and AdaHAT: loss, training, locked units, forgetting, and stored states."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import method_steps
import pytest
import torch
from method_steps import (
    ONE,
    OPTIMIZERS,
    TWO,
    Left,
    batch,
    begun,
    each_step,
    images,
    in_turn,
    rates,
    serving,
    vit,
)
from pydantic import ValidationError
from step_contexts import step_context
from torch import Tensor, nn

from workers.errors import UserError
from workers.job import BackboneSettings, DataSettings, Task, TrainSettings
from workers.methods.base import Progress
from workers.methods.hat import AdaHat, AdaHatSettings, Hat, HatSettings
from workers.model.protect import Protector
from workers.model.vit import build
from workers.storage.taskstate import Carried, TaskState

RATES = rates(12.0)
STEPS = 4  # steps per epoch


def trained(
    method: Hat,
    task: Task = ONE,
    carried: Carried | None = None,
    optimizer: str = "adamw",
    epochs: int = 3,
) -> Left:
    for _ in each_step(
        method,
        OPTIMIZERS[optimizer](begun(method, task, carried, rates=RATES)),
        task,
        STEPS,
        epochs,
    ):
        assert method.mask.embedding.abs().max() <= 6
    return method.finish()


def chain(optimizer: str = "adamw", cls: type[Hat] = Hat, **settings: Any) -> list[Left]:
    """Learn two tasks, each on a new backbone as in stages; half of the units start active."""
    hat_settings = cls.Settings(**{"start": "normal", "c": 0.1, "mask_lr": 0.05, **settings})

    def learn(task: Task, carried: Carried | None) -> Left:
        return trained(cls(vit(), hat_settings, 1), task, carried, optimizer)

    results: list[Left] = in_turn((ONE, TWO), learn)
    return results


def answers(done: list[Left], task: Task = ONE, cls: type[Hat] = Hat) -> Tensor:
    """Return the logits of a task in serving after the last of `done`."""
    states = [state for state, _ in done]
    _, carried = done[-1]
    method = serving(cls(vit(), cls.Settings(), 1), states, carried)
    logits: Tensor = method_steps.answers(method, task)
    return logits


# ---- the loss ------------------------------------------------------------------------------------
def test_loss_adds_c_times_the_mask_regulariser() -> None:
    method = Hat(vit(), HatSettings(c=0.5, price="absolute", schedule="linear", s_min=None), 1)
    method.begin(step_context(ONE, "train", None, RATES, (ONE,)))
    loss, terms = method.loss(batch(), Progress(0, 0, 1, STEPS))
    assert math.isclose(float(terms["newly_used"]), 0.5, abs_tol=0.01), (
        "at scale 1 / s_max every mask value is 0.5"
    )
    assert torch.isclose(loss, terms["ce"] + 0.5 * terms["newly_used"])
    loss.backward()
    method.after_backward()
    assert method.price == 1


@pytest.mark.parametrize("compensation", ["exact", "official"])
def test_relative_price_is_rms_gradient_times_free_units(compensation: Any) -> None:
    """The price is the RMS gradient of the cross-entropy times the number of free units.

    The RMS is over all units that have a gradient, in the previous step, without the term c R.
    """
    method = Hat(vit(), HatSettings(c=0.5, start="normal", compensation=compensation), 1)
    method.begin(step_context(ONE, "train", None, RATES, (ONE,)))
    method.uses = (torch.arange(384) % 3 == 0).short()
    for step in range(3):
        progress, before = Progress(0, step, 1, STEPS), method.price.clone()
        method.mask.embedding.grad = None
        loss, terms = method.loss(batch(step), progress)
        assert torch.isclose(loss, terms["ce"] + 0.5 * before * terms["newly_used"])
        loss.backward()
        method.after_backward()
        method.weight_overrides, seen = (
            method.training_weights(batch(step), progress),
            method.mask.embedding.grad != 0,
        )
        ce = method.classification_loss(method.features(batch(step).images), batch(step))
        worth = torch.autograd.grad(ce, method.soft)[0][seen].square().mean().sqrt()
        assert torch.isclose(method.price, 256 * worth, rtol=1e-3)
        assert (before == 0) == (step == 0), "there is no price before the first step"


def test_price_is_unchanged_if_no_unit_has_a_gradient() -> None:
    method = Hat(vit(), HatSettings(start="dense", schedule="linear"), 1)
    method.begin(step_context(ONE, "train", None, RATES, (ONE,)))
    method.price.fill_(7)
    method.loss(batch(), Progress(0, STEPS - 1, 1, STEPS))[0].backward()
    assert method.mask.embedding.grad is not None
    assert not method.mask.embedding.grad.any()
    method.after_backward()
    assert method.price == 7


# ---- training ------------------------------------------------------------------------------------
SHARED = ("qkv.weight", "qkv.bias", "attn.proj.weight", "fc1.weight", "fc1.bias", "fc2.weight")
AFFINE = ("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias", "attn.proj.bias", "fc2.bias")


def test_only_maskable_weights_are_trained() -> None:
    method, before = Hat(vit(), HatSettings(), 1), vit().state_dict()
    trained(method)
    moved = {
        name for name, p in method.backbone.named_parameters() if not torch.equal(p, before[name])
    }
    assert moved == {name for name in before if name.endswith(SHARED)}
    assert len(moved) == 2 * len(SHARED)


def test_affine_copies_are_trained_while_the_backbone_stays() -> None:
    method, before = Hat(vit(), HatSettings(per_task_affine=True), 1), vit().state_dict()
    state, _ = trained(method)
    assert set(state.copies) == {name for name in before if name.endswith(AFFINE)} | {
        "cls_token",
        "norm.weight",
        "norm.bias",
    }
    for name, value in state.copies.items():
        assert torch.equal(dict(method.backbone.named_parameters())[name], before[name])
        assert not torch.equal(value, before[name])
    served = method.serving_weights("one")
    assert all(torch.equal(served[name], value) for name, value in state.copies.items())


def test_embeddings_have_their_own_rate_and_no_decay() -> None:
    groups = {
        g["name"]: g
        for g in Hat(vit(), HatSettings(mask_travel=3.0), 1).begin(
            step_context(ONE, "train", None, RATES, (ONE,))
        )
    }
    assert groups["masks"]["weight_decay"] == 0
    assert math.isclose(groups["masks"]["lr"] * RATES.full_rate_steps, 3.0)
    assert groups["weights"]["weight_decay"] == RATES.weight_decay
    assert groups["biases"]["weight_decay"] == groups["copies"]["weight_decay"] == 0


def test_mask_scale_restarts_in_every_epoch() -> None:
    method = Hat(vit(), HatSettings(s_max=400, schedule="linear", s_min=None), 1)
    method.begin(step_context(ONE, "train", None, RATES, (ONE,)))
    for epoch in (0, 1):
        for step, scale in ((0, 1 / 400), (STEPS - 1, 400.0)):
            method.training_weights(batch(), Progress(epoch, step, 2, STEPS))
            assert torch.allclose(method.soft, torch.sigmoid(scale * method.mask.embedding))


@pytest.mark.parametrize("compensation", ["exact", "official"])
@pytest.mark.parametrize("s_max", [25.0, 400.0])
def test_embedding_gradient_is_compensated_by_s_max(s_max: float, compensation: Any) -> None:
    """Sec. 2.5: for any s, d sigmoid(s e) / de becomes s_max / (2 (cosh(e) + 1))."""
    method = Hat(vit(), HatSettings(s_max=s_max, start="normal", compensation=compensation), 1)
    method.begin(step_context(ONE, "train", None, RATES, (ONE,)))
    method.mask.sample(2.0).sum().backward()
    e = method.mask.embedding
    assert e.grad is not None
    expected = s_max / (2 * (torch.cosh(e.detach()) + 1))
    assert torch.allclose(e.grad, expected, rtol=1e-3)


def test_task_in_training_is_evaluated_with_its_final_masks() -> None:
    method = Hat(vit(), HatSettings(start="normal", per_task_affine=True), 1)
    done = trained(method)
    with torch.no_grad():
        assert torch.equal(method.eval().logits(images(), "one"), answers([done]))


def test_dense_start_is_backbone_and_normal_halves_units() -> None:
    for start, share in (("dense", 1.0), ("normal", 0.5)):
        method = Hat(vit(), HatSettings(start=start), 1)
        method.begin(step_context(ONE, "train", None, RATES, (ONE,)))
        assert math.isclose(method.metrics()["density"], share, abs_tol=0.05)


def test_retrained_task_is_evaluated_with_its_new_masks() -> None:
    method = Hat(vit(), HatSettings(start="normal"), 1)
    state = trained(method)[0]
    state.masks = {site: torch.zeros_like(mask) for site, mask in state.masks.items()}
    method.load_task(state)
    method.begin(step_context(ONE, "train", None, RATES, (ONE,)))
    assert method.serving_weights("one")["blocks.0.mlp.fc2.weight"].any()


def test_embeddings_are_clamped_after_each_step() -> None:
    method = Hat(vit(), HatSettings(mask_lr=50), 1)
    trained(method)
    assert method.mask.embedding.abs().max() == 6


def test_embeddings_differ_between_tasks_and_not_between_runs() -> None:
    def start(task: Task) -> Tensor:
        method = Hat(vit(), HatSettings(start="normal"), 1)
        method.begin(step_context(task, "train", None, RATES, (task,)))
        return method.mask.embedding.detach()

    assert torch.equal(start(ONE), start(ONE))
    assert not torch.equal(start(ONE), start(TWO))


# ---- zero forgetting -----------------------------------------------------------------------------
@pytest.mark.few(3)
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_answers_of_the_first_task_stay_bit_for_bit(optimizer: str, affine: bool) -> None:
    done = chain(optimizer, per_task_affine=affine)
    assert torch.equal(answers(done), answers(done[:1]))
    assert answers(done, TWO).shape == (8, 3)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_locked_entries_stay_and_free_ones_are_trained(optimizer: str) -> None:
    (state, before), (_, after) = chain(optimizer)
    for i in range(2):
        qk, v, ff = (state.masks[f"blocks.{i}.{kind}"] for kind in ("qk", "v", "ff"))
        for name, lock in (
            ("attn.qkv.weight", torch.cat([qk, qk, v])[:, None]),
            ("attn.qkv.bias", torch.cat([qk, qk, v])),
            ("attn.proj.weight", v[None]),
            ("mlp.fc1.weight", ff[:, None]),
            ("mlp.fc1.bias", ff),
            ("mlp.fc2.weight", ff[None]),
        ):
            old, new = before.tensors[f"blocks.{i}.{name}"], after.tensors[f"blocks.{i}.{name}"]
            held = lock.expand(old.shape)
            assert torch.equal(old[held], new[held]), name
            assert not torch.equal(old[~held], new[~held]), name


def test_weight_decay_causes_forgetting_without_restore(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Protector, "restore", lambda self: None)
    for optimizer in ("sgd", "adamw"):
        done = chain(optimizer)
        assert not torch.equal(answers(done), answers(done[:1]))
    done = chain("adam")  # without weight decay, a gradient that was always zero moves nothing
    assert torch.equal(answers(done), answers(done[:1]))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_forgets_without_the_protector(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Protector, "restore", lambda self: None)
    monkeypatch.setattr(Protector, "gate", lambda self: None)
    done = chain(optimizer)
    assert (answers(done) - answers(done[:1])).abs().max() > 1e-3


def test_soft_masks_give_other_answers_than_hard_masks() -> None:
    method = Hat(vit(), HatSettings(start="normal"), 1)
    trained(method)
    with torch.no_grad():
        hard = method.eval().logits(images(), "one")
        method.training_weights(batch(), Progress(0, STEPS - 1, 1, STEPS))
        method.weight_overrides, head = (
            method.training_weights(batch(), Progress(0, STEPS - 1, 1, STEPS)),
            method.heads["one"],
        )
        assert not torch.equal(head(method.features(images())), hard)


# ---- stored states -------------------------------------------------------------------------------
def test_cumulative_mask_is_the_union_of_stored_masks() -> None:
    done = chain()
    masks = [torch.cat(list(state.masks.values())) for state, _ in done]
    assert torch.equal(done[0][1].tensors["uses"], masks[0].short())
    assert torch.equal(done[1][1].tensors["uses"], masks[0].short() + masks[1].short())
    assert torch.equal(done[1][1].tensors["uses"] > 0, masks[0] | masks[1])


@cache
def real() -> nn.Module:
    torch.manual_seed(0)
    return build(BackboneSettings(img_size=224))


@pytest.mark.parametrize(("affine", "copies"), [(False, 0), (True, 4 * 14_400)])
def test_vit_tiny_task_takes_1728_bytes_plus_its_head(affine: bool, copies: int) -> None:
    method = Hat(real(), HatSettings(per_task_affine=affine), 1)
    method.begin(step_context(TWO, "train", None, RATES, (TWO,)))
    state = TaskState.from_bytes(method.finish()[0].to_bytes())
    assert sum(m.numel() for m in state.masks.values()) == 13_824
    assert state.sizes() == {"masks": 1_728, "tokens": 0, "head": 4 * 3 * 193, "copies": copies}


def test_a_state_of_another_width_is_refused() -> None:
    ((state, _),) = chain()[:1]
    state.masks["blocks.1.ff"] = state.masks["blocks.1.ff"][:-1]
    with pytest.raises(
        UserError, match=r"a mask of shape \(127,\) for blocks.1.ff, this backbone has 128 units"
    ):
        Hat(vit(), HatSettings(), 1).load_task(state)
    del state.masks["blocks.1.ff"]
    with pytest.raises(UserError, match=r"its state has no mask for blocks\.1\.ff"):
        Hat(vit(), HatSettings(), 1).load_task(state)


def test_metrics_and_flops_share_follow_the_masks() -> None:
    method = Hat(vit(), HatSettings(start="normal"), 1)
    method.begin(step_context(ONE, "train", None, RATES, (ONE,)))
    with torch.no_grad():
        # half of the first of two blocks with 32 + 32 + 128 units
        method.mask.embedding.copy_(torch.where(torch.arange(384) < 96, 1.0, -1.0))
    method.uses = (torch.arange(384) >= 288).short()
    assert method.metrics() == {"density": 0.25, "capacity": 0.5, "free": 0.5}
    work = [
        method.flops_share(method.state(masks=method.by_site(torch.rand(384) < share)))
        for share in (1.1, 0.5, 0.0)
    ]
    assert work[0] == 1
    assert work[0] > work[1] > work[2] > 0


# ---- refused settings and warnings ---------------------------------------------------------------
def refused(train: dict[str, Any], **settings: Any) -> None:
    Hat.validate(HatSettings(**settings), TrainSettings(**train), DataSettings(), "task")


def test_settings_that_cannot_work_are_refused() -> None:
    refused({})
    refused({"optimizer": "sgd"}, mask_lr=0.05)
    with pytest.raises(UserError, match=r"mask_lr is 'auto' with train.optimizer 'sgd'"):
        refused({"optimizer": "sgd"})
    with pytest.raises(UserError, match=r"s_min is 100.0 and s_max is 25.0"):
        refused({}, s_min=100, s_max=25)
    for bad in ({"s_max": 1}, {"c": -1}, {"start": "zeros"}, {"expected_tasks": 1}, {"mask_lr": 0}):
        with pytest.raises(ValidationError):
            HatSettings(**bad)


def test_an_epoch_of_one_step_is_refused() -> None:
    method = Hat(vit(), HatSettings(), 1)
    method.begin(step_context(ONE, "train", None, RATES, (ONE,)))
    with pytest.raises(UserError, match="'one' has one optimizer step per epoch"):
        method.loss(batch(), Progress(0, 0, 3, 1))


def test_a_full_network_is_reported() -> None:
    method = Hat(vit(), HatSettings(mask_lr=1e-6), 1)
    _, carried = trained(method)
    assert [
        "0.00% of the units are left for later tasks" in warning for warning in method.warnings()
    ] == [True]
    full = Hat(vit(), HatSettings(mask_lr=1e-6), 1)
    trained(full, TWO, carried)
    assert [
        "task 'two': only 0.00% of the units were free" in warning for warning in full.warnings()
    ] == [True]
    giving = AdaHat(vit(), AdaHatSettings(mask_lr=1e-6), 1)
    trained(giving, TWO, carried)
    assert giving.warnings() == []
    roomy = Hat(vit(), HatSettings(start="normal"), 1)
    trained(roomy)
    assert roomy.warnings() == []


def test_full_network_still_learns_head_and_unit_choice() -> None:
    full = Carried(trained(Hat(vit(), HatSettings(mask_lr=1e-6), 1))[1].tensors)
    method = Hat(vit(), HatSettings(start="normal"), 1)
    state, carried = trained(method, TWO, full)
    assert all(
        torch.equal(t, full.tensors[name]) for name, t in carried.tensors.items() if name != "uses"
    )
    assert method.loss(batch(), Progress(0, 0, 1, STEPS))[1]["newly_used"] == 0
    assert not all(bool(m.all()) for m in state.masks.values())


# ---- AdaHAT --------------------------------------------------------------------------------------
def test_adahat_moves_used_units_less_than_free_ones() -> None:
    """With plain SGD, the step of every entry is the unprotected step times r / (n + r)."""
    method = AdaHat(vit(), AdaHatSettings(start="normal", intensity=0.3, eps=0.1, mask_lr=0.05), 1)
    method.begin(step_context(ONE, "train", None, RATES, (ONE,)))
    method.uses = torch.arange(384, dtype=torch.int16) % 3  # tasks per unit: 0, 1, 2
    progress = Progress(0, 1, 1, STEPS)
    method.loss(batch(), progress)[0].backward()
    before = {name: p.detach().clone() for name, p in method.backbone.named_parameters()}
    method.after_backward()
    torch.optim.SGD(method.parameters(), lr=0.1).step()
    method.after_step(progress)
    uses, soft = (
        method.by_site(method.uses)["blocks.1.ff"],
        method.by_site(method.soft)["blocks.1.ff"],
    )
    free = uses == 0
    r = 0.3 / (0.1 + soft[free].mean())
    factor = -0.1 * r / (uses + r)
    factors = {"fc1.weight": factor[:, None], "fc1.bias": factor, "fc2.weight": factor}
    for name, parameter_factor in factors.items():
        parameter = method.backbone.get_parameter(f"blocks.1.mlp.{name}")
        assert parameter.grad is not None
        change = parameter - before[f"blocks.1.mlp.{name}"]
        assert torch.allclose(change, parameter_factor * parameter.grad, atol=1e-6)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_adahat_forgets_more_with_higher_intensity(optimizer: str) -> None:
    moved = []
    for intensity in (1e-3, 1.0):
        done = chain(optimizer, AdaHat, intensity=intensity)
        moved.append(float((answers(done, cls=AdaHat) - answers(done[:1], cls=AdaHat)).abs().max()))
    assert 0 < moved[0] < moved[1]


def test_adahat_declares_forgetting_and_hat_does_not() -> None:
    assert AdaHat.may_forget
    assert AdaHat.changes_past_predictions("task")
    assert not Hat.may_forget
    assert not Hat.changes_past_predictions("task")
