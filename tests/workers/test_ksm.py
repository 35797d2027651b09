"""Tests of KSM: worked numbers and invariants, and masks and copies in training and serving."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from method_steps import (
    BASE,
    ONE,
    OPTIMIZERS,
    PROGRESS,
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
from workers.methods.bases.weight_masks import masked
from workers.methods.ksm import Ksm, KsmSettings
from workers.methods.piggyback import Piggyback, PiggybackSettings
from workers.model.masks import SoftBinary, Threshold, sample_together
from workers.model.vit import build, compute_digest
from workers.storage.taskstate import TaskState

WORKED = torch.tensor([0.01, 0.004, -0.002, 0.0])


def ksm(**settings: Any) -> Ksm:
    return Ksm(vit(), KsmSettings(**settings), seed=1)


def scores(count: int = 5000) -> Tensor:
    return 0.01 * torch.randn(count, generator=torch.Generator().manual_seed(0))


def gradient(mask: SoftBinary) -> Tensor:
    """Return the gradient of a mask's real values."""
    assert mask.scores.grad is not None
    return mask.scores.grad


# ---- the equations -------------------------------------------------------------------------------
def test_soft_mask_matches_worked_example() -> None:
    mask = SoftBinary(WORKED, 5e-3)
    assert mask.hard().tolist() == [1.0, 0.5, 0.0, 0.0]
    assert mask.sample().tolist() == [1.0, 0.5, 0.0, 0.0]
    assert SoftBinary(WORKED, 5e-3, soft=False).hard().tolist() == [True, False, False, False]


def test_soft_mask_values_are_one_or_at_most_one_half() -> None:
    values = scores()
    mask = SoftBinary(values, 5e-3).hard()
    assert torch.equal(mask == 1, values >= 5e-3)
    off = mask[mask != 1]
    assert off.min() == 0.0
    assert off.max() == 0.5
    assert torch.equal(off.argsort(), values[values < 5e-3].argsort()), (
        "a larger real value has a larger coefficient"
    )


@pytest.mark.parametrize(
    ("values", "want"),
    [
        ([0.004, 0.004, 0.004], [0, 0, 0]),
        ([0.02, 0.01], [1, 1]),
        ([-1.0, -2.0, -3.0], [0.5, 0.25, 0]),
        ([0.0, 0.0], [0, 0]),
        ([5e-3, 0.0], [1, 0]),
    ],
    ids=["all off and equal", "all on", "all off", "all at zero", "at the threshold"],
)
def test_soft_mask_edge_cases_have_expected_values_and_finite_gradients(
    values: Any, want: Any
) -> None:
    """Entries that are on count as zero in the minimum and maximum. An off entry at exactly zero
    has coefficient 0."""
    mask = SoftBinary(torch.tensor(values), torch.tensor(5e-3).item())
    assert mask.hard().tolist() == want
    mask.sample().sum().backward()
    assert bool(gradient(mask).isfinite().all())


def test_gradient_at_threshold_is_beta_over_four_temperatures() -> None:
    mask = SoftBinary(torch.tensor([5e-3]), 5e-3)
    mask.sample().backward()
    assert gradient(mask).item() == pytest.approx(3.0, abs=1e-6)
    steep = SoftBinary(torch.tensor([5e-3]), 5e-3, beta=600.0, temperature=10.0)
    steep.sample().backward()
    assert gradient(steep).item() == pytest.approx(600 / 40)


def test_no_gradient_goes_through_the_coefficients() -> None:
    """The soft mask's gradient is that of the bits: sigmoid' for entries that are on or off."""
    values, weights = scores(), torch.linspace(-1, 1, 5000)
    soft, bits = SoftBinary(values, 5e-3), SoftBinary(values, 5e-3, soft=False)
    for mask in (soft, bits):
        (mask.sample() * weights).sum().backward()
    s = torch.sigmoid(12 * (values.double() - 5e-3))
    assert torch.equal(gradient(soft), gradient(bits))
    assert torch.allclose(gradient(soft).double(), weights * 12 * s * (1 - s), rtol=1e-5)


def test_elementwise_hard_ksm_equals_piggyback() -> None:
    values = scores()
    assert torch.equal(SoftBinary(values, 5e-3, soft=False).hard(), Threshold(values, 5e-3).hard())
    tie = torch.tensor([5e-3])
    assert SoftBinary(tie, 5e-3, soft=False).hard().item() is True
    assert Threshold(tie, 5e-3).hard().item() is False
    plain_ksm = ksm(granularity="element", soft=False, norms=False)
    piggyback = Piggyback(vit(), PiggybackSettings(), seed=1)
    for method in (plain_ksm, piggyback):
        begun(method)
        for i, (site, mask) in enumerate(method.masks.items()):
            weight = method.sites[site]
            with torch.no_grad():
                mask.get_parameter("scores").copy_(scores(weight.numel() + i)[i:].view_as(weight))
    assert torch.equal(answers(plain_ksm), answers(piggyback))
    ksm_weights = plain_ksm.training_weights(batch(), PROGRESS)
    piggyback_weights = piggyback.training_weights(batch(), PROGRESS)
    assert ksm_weights.keys() == piggyback_weights.keys()
    for name, weight in ksm_weights.items():
        assert torch.equal(weight, piggyback_weights[name])


def test_masks_apply_to_kernel_groups_channels_and_conv_kernels() -> None:
    weight = torch.arange(1.0, 17.0).view(2, 8)
    assert masked(weight, torch.tensor([[1.0, 0.5], [0.0, 2.0]])).tolist() == [
        [1, 2, 3, 4, 2.5, 3, 3.5, 4],
        [0, 0, 0, 0, 26, 28, 30, 32],
    ]
    assert masked(weight, torch.tensor([0.0, 1.0])).tolist() == [[0.0] * 8, weight[1].tolist()]
    conv = weight.view(2, 2, 2, 2)
    assert torch.equal(
        masked(conv, torch.tensor([[True, False], [False, True]])),
        conv * torch.eye(2)[:, :, None, None],
    )
    values = torch.tensor([[1.0, 0.5], [0.0, 2.0]], requires_grad=True)
    (masked(weight, values) * weight).sum().backward()
    assert values.grad is not None
    assert torch.equal(values.grad, weight.square().view(2, 2, 4).sum(2))


@pytest.mark.parametrize(
    ("settings", "shapes"),
    [
        (
            {},
            {
                "patch_embed.proj": (32, 3),
                "blocks.0.attn.qkv": (96, 4),
                "blocks.1.mlp.fc2": (32, 16),
            },
        ),
        (
            {"group": 32},
            {
                "patch_embed.proj": (32, 3),
                "blocks.0.attn.qkv": (96, 1),
                "blocks.1.mlp.fc2": (32, 4),
            },
        ),
        (
            {"granularity": "channel"},
            {"patch_embed.proj": (32,), "blocks.0.attn.qkv": (96,), "blocks.1.mlp.fc2": (32,)},
        ),
        (
            {"granularity": "element"},
            {
                "patch_embed.proj": (32, 3, 8, 8),
                "blocks.0.attn.qkv": (96, 32),
                "blocks.1.mlp.fc2": (32, 128),
            },
        ),
    ],
)
def test_each_granularity_trains_and_serves_masks_of_its_shape(settings: Any, shapes: Any) -> None:
    method = ksm(mask_travel=20.0, **settings)
    state = trained(method)
    assert {site: tuple(state.masks[site].shape) for site in shapes} == shapes
    assert 0.05 < method.metrics()["density"] < 0.98
    server = ksm(**settings)
    server.load_task(TaskState.from_bytes(state.to_bytes()))
    assert torch.equal(answers(server), answers(method))


# ---- training ------------------------------------------------------------------------------------
@pytest.mark.parametrize("soft", [True, False])
def test_new_mask_reproduces_plain_backbone_logits_bit_for_bit(soft: bool) -> None:
    method = ksm(soft=soft)
    begun(method)
    for mask in method.masks.values():
        assert bool((mask.get_parameter("scores") == 1e-2).all())
    with torch.no_grad():
        want = method.heads["one"](vit()(images()))
        method.weight_overrides = method.training_weights(batch(), PROGRESS)
        assert torch.equal(method.heads["one"](method.features(images())), want)
    assert torch.equal(answers(method), want)
    state = method.finish()[0]
    assert not any(name.endswith(".soft") for name in state.copies), (
        "entries that are on have no coefficient"
    )
    fresh = ksm()
    fresh.load_task(state)
    assert torch.equal(answers(fresh), want)


def test_only_masks_norm_copies_and_head_are_trained() -> None:
    method = ksm()
    groups = {g["name"]: g for g in begun(method)}
    assert groups.keys() == {"head.weight", "head.bias", "masks", "copies"}
    assert groups["masks"]["weight_decay"] == groups["copies"]["weight_decay"] == 0
    assert groups["masks"]["lr"] == pytest.approx(2.0 * 5e-3 / 6**0.5)
    assert "lr" not in groups["copies"], "copies must train at the configured rate"
    assert sum(p.numel() for p in groups["copies"]["params"]) == 2 * 32 * (2 * 2 + 1)
    assert "copies" not in {g["name"] for g in begun(ksm(norms=False))}
    method.loss(batch(), PROGRESS)[0].backward()
    assert all(bool((p.grad != 0).any()) for g in groups.values() for p in g["params"])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("soft", [True, False])
def test_training_another_task_keeps_backbone_and_earlier_answers(
    optimizer: Any, soft: bool
) -> None:
    method = ksm(soft=soft, **({"mask_lr": 5.0} if optimizer == "sgd" else {}))
    method.load_task(trained(method, ONE, optimizer))
    before = answers(method)
    trained(method, TWO, optimizer)
    assert method.metrics()["density"] < 0.98, "training without effect would also keep the answers"
    assert any(
        not torch.equal(t, dict(vit().named_parameters())[name])
        for name, t in method.copies.tensors().items()
    )
    assert torch.equal(answers(method), before)
    assert compute_digest(method.backbone) == method.backbone_digest
    assert method.logits(images(), "two").shape == (8, 3)


def test_norms_trained_in_place_change_earlier_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutation that the test above must find: it trains the backbone's norms instead of
    copies."""
    monkeypatch.setattr(Ksm, "copied", lambda self: [])
    method = ksm()
    norms = [p for name, p in method.backbone.named_parameters() if "norm" in name]
    plain = method.begin
    monkeypatch.setattr(
        method, "begin", lambda *arguments: [*plain(*arguments), {"name": "norms", "params": norms}]
    )
    method.load_task(trained(method))
    before = answers(method)
    trained(method, TWO)
    assert not torch.equal(answers(method), before)
    assert compute_digest(method.backbone) != method.backbone_digest


def test_bf16_training_keeps_real_values_and_their_gradients_in_fp32() -> None:
    method = ksm()
    begun(method)
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = method.loss(batch(), PROGRESS)
    loss.backward()
    for mask in method.masks.values():
        assert isinstance(mask, SoftBinary)
        assert gradient(mask).dtype == torch.float32
        assert gradient(mask).isfinite().all()


# ---- storage and serving -------------------------------------------------------------------------
def test_stored_state_reproduces_training_answers() -> None:
    method = ksm()
    state = trained(method)
    server = ksm(soft=False)  # the state determines whether it is soft
    server.load_task(TaskState.from_bytes(state.to_bytes()))
    assert torch.equal(answers(server), answers(method))
    with torch.no_grad():
        method.weight_overrides = method.training_weights(batch(), PROGRESS)
        assert torch.equal(answers(server), method.heads["one"](method.features(images())))
    for name in ("blocks.0.norm1.weight", "blocks.0.mlp.fc1.soft"):
        moved = TaskState.from_bytes(state.to_bytes())
        moved.copies[name] += 0.1
        server.load_task(moved)
        assert not torch.equal(answers(server), answers(method)), name


def test_task_state_does_not_depend_on_earlier_tasks() -> None:
    alone, after = ksm(), ksm()
    trained(after, TWO)
    assert trained(alone).to_bytes() == trained(after).to_bytes()


def test_plain_backbone_serves_base_task_between_masked_tasks() -> None:
    method = ksm()
    method.load_task(trained(method))
    method.load_task(
        TaskState(
            "base", BASE.classes, "base", method.backbone_digest, head=nn.Linear(32, 2).state_dict()
        )
    )
    masked_answers = answers(method)
    with torch.no_grad():
        want = method.heads["base"](vit()(images()))
    assert torch.equal(answers(method, BASE), want)
    assert torch.equal(answers(method), masked_answers)
    assert not torch.equal(method.heads["one"](vit()(images())), masked_answers)


@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_stored_size_counts_bits_and_soft_values(share: float) -> None:
    """Masks take (N / g) (1 + 32 rho) bits, and norms 9,600 floats. The patch embedding has 576 of
    the kernels."""
    method = Ksm(build(BackboneSettings()), KsmSettings(), seed=1)
    begun(method, TWO)
    off = 0
    with torch.no_grad():
        for mask in method.masks.values():
            values = mask.get_parameter("scores")
            num_off = int(share * values.numel())
            values.view(-1)[:num_off] = -torch.arange(1.0, num_off + 1)
            off += num_off
    sizes, kernels = method.finish()[0].sizes(), 576 + (5_455_872 - 576 * 256) // 8
    assert sizes == {
        "masks": kernels // 8,
        "tokens": 0,
        "copies": 4 * (off + 9_600),
        "head": 4 * 3 * (192 + 1),
    }
    assert off == pytest.approx(share * kernels, abs=49)


# ---- user errors ---------------------------------------------------------------------------------
def test_invalid_settings_are_refused() -> None:
    check = partial(Ksm.validate, data=DataSettings(), scenario="task")
    check(KsmSettings(), TrainSettings())
    with pytest.raises(UserError, match=r"start is 0\.001 with theta 0\.005"):
        check(KsmSettings(start=1e-3), TrainSettings())
    with pytest.raises(UserError, match=r"mask_lr is 'auto' with train\.optimizer 'sgd'"):
        check(KsmSettings(), TrainSettings(optimizer="sgd"))
    with pytest.raises(
        UserError,
        match=r"group is 5, but blocks\.0\.attn\.qkv has 32 input columns.*choose a divisor",
    ):
        Ksm.check_backbone(KsmSettings(group=5), ksm().backbone)
    Ksm.check_backbone(KsmSettings(group=5, granularity="channel"), ksm().backbone)
    assert ksm(group=24).mask_shape("blocks.0.attn.qkv") == (96, 4), (
        "each group has 8 of 32 columns"
    )
    with pytest.raises(ValidationError):
        KsmSettings(granularity="layer")


def test_state_with_mismatched_masks_is_refused() -> None:
    state = trained(ksm())
    with pytest.raises(
        UserError, match=r"has a mask patch_embed\.proj of shape .*the settings of its run"
    ):
        ksm(granularity="channel").load_task(state)
    state.masks["blocks.0.mlp.fc1"] = ~state.masks["blocks.0.mlp.fc1"]
    with pytest.raises(
        UserError, match=r"soft values for the .* kernels of blocks\.0\.mlp\.fc1 that are off"
    ):
        ksm().load_task(state)


@pytest.mark.parametrize("soft", [True, False])
def test_batched_mask_sampling_equals_separate_sampling_bit_for_bit(soft: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    shapes = ((64, 6), (64, 6), (96, 3), (64, 6))
    starts = [torch.randn(shape, generator=generator) * 0.02 for shape in shapes]
    starts[1].fill_(1.0)  # all entries are on
    masks = [SoftBinary(start, 5e-3, soft=soft) for start in starts]
    worth = [torch.randn(shape, generator=generator) for shape in shapes]
    parameters = [mask.scores for mask in masks]
    together, each = sample_together(masks), [mask.sample() for mask in masks]
    for samples in (together, each):
        assert all(torch.equal(a, b) for a, b in zip(samples, each, strict=True))
    gradients = [torch.autograd.grad(s, parameters, worth) for s in (together, each)]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
