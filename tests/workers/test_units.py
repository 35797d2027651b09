"""Tests of unit masks: masked weights, locks, the annealed sigmoid, and HAT's sparsity term R."""

from __future__ import annotations

import copy
import math
from typing import Any

import method_steps
import pytest
import torch
from method_steps import OTHER_VITS, images, other_vit
from torch import Tensor, nn
from torch.func import functional_call

from workers.errors import UserError
from workers.job import BackboneSettings
from workers.methods.hat import Hat, HatSettings
from workers.model.masks import AnnealedSigmoid, compute_annealed_scale, draw_initial_embedding
from workers.model.penalties import newly_used
from workers.model.units import masked_weights, spread_unit_values, sum_by_site, unit_sites
from workers.model.vit import build


def vit(**options: Any) -> Any:
    return method_steps.vit(std=0.3, embed_dim=16, **options)


def some_units(model: nn.Module, share: float = 0.5) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {
        site: torch.rand(size, generator=generator) < share
        for site, size in unit_sites(model).items()
    }


@pytest.mark.parametrize(
    ("name", "units"),
    [("deit_tiny_patch16_224", 13_824), ("deit_small_patch16_224", 27_648), ("t2t_vit_12", 12_288)],
)
def test_unit_counts_match_the_size_table(name: str, units: int) -> None:
    with torch.device("meta"):
        sites = unit_sites(build(BackboneSettings(name=name, img_size=224)))
    assert len(sites) == 36
    assert sum(sites.values()) == units


@pytest.mark.parametrize("qkv_bias", [True, False])
def test_masked_weights_equal_masked_activations(qkv_bias: bool) -> None:
    """The masks apply to queries after their bias, to the output of attention before proj, and to
    hidden neurons before fc2. Values and gradients must agree."""
    model = vit(qkv_bias=qkv_bias)
    masks = {site: torch.rand(size, requires_grad=True) for site, size in unit_sites(model).items()}
    logits = functional_call(model, masked_weights(model, masks), (images(),))
    gradients = torch.autograd.grad(logits.square().sum(), list(masks.values()))
    for i, block in enumerate(model.blocks):
        qk, v, ff = (masks[f"blocks.{i}.{kind}"] for kind in ("qk", "v", "ff"))
        block.attn.qkv.register_forward_hook(
            lambda module, x, y, qk=qk: torch.cat([y[..., :16] * qk, y[..., 16:]], -1)
        )
        block.attn.proj.register_forward_pre_hook(lambda module, x, v=v: (x[0] * v,))
        block.mlp.fc2.register_forward_pre_hook(lambda module, x, ff=ff: (x[0] * ff,))
    gated = model(images())
    assert torch.allclose(logits, gated, atol=1e-5)
    for a, b in zip(
        gradients, torch.autograd.grad(gated.square().sum(), list(masks.values())), strict=True
    ):
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-3)


def test_all_units_on_leave_the_weights_unchanged() -> None:
    model = vit()
    known = dict(model.named_parameters())
    for name, tensor in masked_weights(model, some_units(model, 1.1)).items():
        assert torch.equal(tensor, known[name])


def test_removing_unused_units_keeps_the_answers() -> None:
    """Rows of fc1 and columns of fc2 of unused units can be removed."""
    model = vit()
    masks = some_units(model)
    logits = functional_call(model, masked_weights(model, masks), (images(),))
    cut = copy.deepcopy(model)
    cut.load_state_dict(model.state_dict() | masked_weights(model, masks))
    for i, block in enumerate(cut.blocks):
        left = masks[f"blocks.{i}.ff"]
        block.mlp.fc1.weight.data, block.mlp.fc1.bias.data = (
            block.mlp.fc1.weight[left].detach(),
            block.mlp.fc1.bias[left].detach(),
        )
        block.mlp.fc2.weight.data = block.mlp.fc2.weight[:, left].detach()
    assert cut.blocks[0].mlp.fc1.weight.shape[0] == int(masks["blocks.0.ff"].sum()) < 64
    assert torch.allclose(cut(images()), logits, atol=1e-5)


def test_locks_of_used_units_match_the_table() -> None:
    model = vit()
    used = {site: torch.zeros(size, dtype=torch.bool) for site, size in unit_sites(model).items()}
    used["blocks.1.qk"][3], used["blocks.1.v"][5], used["blocks.1.ff"][7] = True, True, True
    known = dict(model.named_parameters())
    locked = {
        name: lock.expand(known[name].shape).nonzero().tolist()
        for name, lock in spread_unit_values(model, used).items()
    }
    rows = [3, 16 + 3, 32 + 5]
    expected = {
        "attn.qkv.weight": [[r, j] for r in rows for j in range(16)],
        "attn.qkv.bias": [[r] for r in rows],
        "attn.proj.weight": [[i, 5] for i in range(16)],
        "mlp.fc1.weight": [[7, j] for j in range(16)],
        "mlp.fc1.bias": [[7]],
        "mlp.fc2.weight": [[i, 7] for i in range(16)],
    }
    assert {name: entries for name, entries in locked.items() if entries} == {
        f"blocks.1.{name}": entries for name, entries in expected.items()
    }


def test_answers_depend_exactly_on_the_locked_entries() -> None:
    """Changes of unlocked entries keep every bit of the answers, and a change of a locked row or
    column changes them."""
    model = vit()
    masks = some_units(model)
    before = functional_call(model, masked_weights(model, masks), (images(),))
    known = dict(model.named_parameters())
    for name, lock in spread_unit_values(model, masks).items():
        held = lock.expand(known[name].shape)
        weight_before = known[name].detach().clone()
        known[name].data = torch.where(held, weight_before, torch.randn_like(weight_before) * 10)
        assert torch.equal(
            functional_call(model, masked_weights(model, masks), (images(),)), before
        ), name
        for group in lock.flatten().nonzero()[:, 0].tolist()[:40]:
            known[name].data = weight_before.clone()
            entries = (
                known[name].data if lock.ndim == 1 or lock.shape[1] == 1 else known[name].data.T
            )
            entries[group] += 1.0
            if "qkv.bias" in name and 16 <= group < 32:
                # A key bias adds the same to all keys, which softmax ignores up to rounding.
                continue
            assert not torch.equal(
                functional_call(model, masked_weights(model, masks), (images(),)), before
            ), (name, group)
        known[name].data = weight_before


SEPARATE = [form for name, form in OTHER_VITS.items() if name != "EVA-02, rotary, q k v apart"]


@pytest.mark.parametrize("form", SEPARATE, ids=lambda form: form["name"])
def test_answers_of_other_families_depend_exactly_on_locked_entries(form: dict[str, Any]) -> None:
    """Rotary embeddings mix the two channels of a pair, which may belong to different tasks."""
    model = other_vit(**form)
    masks = some_units(model)
    before = functional_call(model, masked_weights(model, masks), (images(),))
    known = dict(model.named_parameters())
    locks = spread_unit_values(model, masks)
    for name, lock in locks.items():
        held = lock.expand(known[name].shape)
        weight_before = known[name].detach().clone()
        for changes_held in (False, True):
            changed = torch.where(held == changes_held, 10 * weight_before + 1, weight_before)
            known[name].data = changed
            logits = functional_call(model, masked_weights(model, masks), (images(),))
            assert torch.equal(logits, before) != changes_held, name
        known[name].data = weight_before
    trained = {name.split(".", 2)[2] for name in locks}
    assert {"attn.proj.weight", "mlp.fc2.weight"} < trained
    assert not {name for name in trained if "norm" in name or "gamma" in name}


@pytest.mark.parametrize("form", SEPARATE, ids=lambda form: form["name"])
def test_all_units_on_leave_weights_of_other_families_unchanged(form: dict[str, Any]) -> None:
    model = other_vit(**form)
    known = dict(model.named_parameters())
    for name, tensor in masked_weights(model, some_units(model, 1.1)).items():
        assert torch.equal(tensor, known[name])


def test_neuron_of_a_gated_ffn_has_two_rows() -> None:
    model = other_vit("eva02_tiny_patch14_224")
    neurons = unit_sites(model)["blocks.0.ff"]
    used = {site: torch.zeros(size, dtype=torch.bool) for site, size in unit_sites(model).items()}
    used["blocks.0.ff"][3] = True
    lock = spread_unit_values(model, used)["blocks.0.mlp.fc1.weight"]
    assert lock.shape == (2 * neurons, 1)
    assert lock.flatten().nonzero().flatten().tolist() == [3, neurons + 3]


def test_rotary_attention_masks_keys_too() -> None:
    model = other_vit("vit_small_patch16_dinov3")
    masks = some_units(model)
    weight = masked_weights(model, masks)["blocks.0.attn.qkv.weight"]
    off = ~masks["blocks.0.qk"]
    queries, keys, values = weight.chunk(3)
    assert not queries[off].any()
    assert not keys[off].any()
    assert values.any(1).all()


def test_norms_over_all_neurons_or_channels_are_refused() -> None:
    with pytest.raises(UserError, match="block 0 of the backbone has no separate units"):
        unit_sites(other_vit("eva02_base_patch14_224"))


@pytest.mark.parametrize(
    "options", [{"qk_norm": True}, {"scale_attn_norm": True}, {"scale_mlp_norm": True}]
)
def test_block_with_dependent_units_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="block 0 of the backbone has no separate units"):
        unit_sites(vit(**options))


def test_a_fused_block_is_refused_before_anything_runs() -> None:
    from timm.models.vision_transformer import ParallelScalingBlock

    with pytest.raises(UserError, match="use a plain timm ViT"):
        Hat.check_backbone(HatSettings(), vit(block_fn=ParallelScalingBlock))
    with pytest.raises(UserError, match="backbone is a Sequential"):
        Hat.check_backbone(HatSettings(), nn.Sequential())
    Hat.check_backbone(HatSettings(), vit())


# ---- the annealed sigmoid ------------------------------------------------------------------------
def test_unit_mask_approaches_step_with_scale() -> None:
    e = torch.tensor([-2.0, -0.1, 0.1, 3.0])
    mask = AnnealedSigmoid(e, s_max=400)
    assert mask.sample(0.0).tolist() == [0.5] * 4
    assert torch.allclose(mask.sample(1e4), (e > 0).float())
    assert mask.hard().tolist() == [False, False, True, True]
    assert not AnnealedSigmoid(torch.zeros(1), 400).hard(), "a unit at 0 is off"


def test_soft_mask_at_full_scale_is_not_binary() -> None:
    """Evaluation, locks and R of finished tasks use hard masks for this reason."""
    soft = AnnealedSigmoid(torch.tensor([0.01, 0.005, 0.001]), 400).sample(400.0)
    assert torch.allclose(soft, torch.tensor([0.982, 0.881, 0.599]), atol=5e-4)


def slopes(e: Tensor, scale: float, s_max: float, compensation: Any) -> Tensor:
    mask = AnnealedSigmoid(e, s_max, compensation)
    mask.sample(scale).sum().backward()
    assert mask.embedding.grad is not None
    return mask.embedding.grad


def test_compensated_gradients_match_the_worked_example() -> None:
    e = torch.tensor([0.1, -0.1])
    assert torch.allclose(slopes(e, 400.0, 400.0, "exact"), torch.tensor([99.75, 99.75]), atol=5e-3)
    official = slopes(e, 400.0, 400.0, "official")
    assert official[0] == 0, "saturated in fp32"
    assert math.isclose(float(official[1]), 99.75, abs_tol=5e-3)


@pytest.mark.parametrize("scale", [0.0025, 1.0, 7.0])
def test_official_and_exact_compensation_agree_where_nothing_saturates(scale: float) -> None:
    e = torch.linspace(-9.9, 9.9, 67) / max(scale, 1.65)
    assert torch.allclose(
        slopes(e, scale, 400.0, "official"), slopes(e, scale, 400.0, "exact"), rtol=1e-2
    )


def test_compensation_matches_the_papers_formula() -> None:
    """q' = s_max (cosh(s e) + 1) / (s (cosh(e) + 1)) q, in float64."""
    e = torch.linspace(-3, 3, 13, dtype=torch.float64).requires_grad_()
    scale, s_max = 5.0, 400.0
    torch.sigmoid(scale * e).sum().backward()
    assert e.grad is not None
    paper = s_max * (torch.cosh(scale * e) + 1) / (scale * (torch.cosh(e) + 1)) * e.grad
    assert torch.allclose(
        slopes(e.detach().float(), scale, s_max, "exact").double(), paper.detach(), rtol=1e-4
    )


@pytest.mark.parametrize("compensation", ["exact", "official"])
@pytest.mark.parametrize("scale", [0.04, 1.0, 3.0])
def test_compensated_gradients_match_the_equation(scale: float, compensation: Any) -> None:
    """s_max (cosh(s e) + 1) / (s (cosh(e) + 1)) s a (1 - a) = s_max / (2 (cosh(e) + 1))."""
    e = torch.tensor([0.0, -1.0, 2.0])
    golden = torch.tensor([0.25, 0.1966119, 0.1049936])
    for s_max in (25.0, 400.0, 800.0):
        assert torch.allclose(slopes(e, scale, s_max, compensation), s_max * golden, rtol=1e-4)


def test_gradient_is_zero_beyond_the_clamp() -> None:
    assert slopes(torch.tensor([0.124, 0.126, -0.126]), 400.0, 400.0, "exact")[1:].tolist() == [
        0,
        0,
    ]
    assert slopes(torch.tensor([0.124]), 400.0, 400.0, "exact") > 0


def test_embeddings_are_clamped() -> None:
    mask = AnnealedSigmoid(torch.tensor([-7.0, 5.0, 9.0]), 400)
    mask.clamp()
    assert mask.embedding.tolist() == [-6, 5, 6]


@pytest.mark.parametrize("schedule", ["linear", "official"])
def test_scale_rises_from_the_inverse_of_its_maximum(schedule: Any) -> None:
    scales = [compute_annealed_scale(step, 100, 400.0, schedule) for step in range(100)]
    assert scales[0] == 1 / 400
    assert scales == sorted(scales)
    assert math.isclose(scales[-1], 400.0 if schedule == "linear" else 396.0, abs_tol=1e-3)


def test_cosine_schedule_and_single_step_epoch_give_expected_scales() -> None:
    assert [
        round(compute_annealed_scale(step, 5, 100.0, "cosine", 1.0), 1) for step in range(5)
    ] == [
        100,
        50.5,
        1,
        50.5,
        100,
    ]
    assert compute_annealed_scale(0, 3, 100.0, "linear", 1.0) == 1.0
    assert (
        compute_annealed_scale(0, 1, 400.0)
        == compute_annealed_scale(0, 1, 400.0, "cosine")
        == 400.0
    )


def test_initial_embeddings_follow_the_chosen_distribution() -> None:
    def start(how: Any, tasks: int = 10) -> Tensor:
        return draw_initial_embedding((50_000,), how, torch.Generator().manual_seed(0), tasks)

    assert start("dense").unique().tolist() == [1]
    assert 0 < float(start("uniform").min()) < float(start("uniform").max()) <= 2
    assert math.isclose(float(start("uniform").mean()), 1, abs_tol=0.01)
    assert math.isclose(float((start("normal") > 0).float().mean()), 0.5, abs_tol=0.01)
    for tasks in (2, 5, 20):  # T p (1 - p)^(T - 1) is largest at p = 1 / T
        assert math.isclose(
            float((start("sparse", tasks) > 0).float().mean()), 1 / tasks, abs_tol=0.01
        )
    assert math.isclose(float(start("sparse").std()), 1, abs_tol=0.01)


# ---- the sparsity term R -------------------------------------------------------------------------
def test_sparsity_term_matches_the_worked_example() -> None:
    past = torch.tensor([True, False, False, False])
    assert newly_used([torch.tensor([1, 1, 0, 0.5])], [past]) == 0.5
    assert newly_used([torch.rand(4)], [torch.ones(4, dtype=torch.bool)]) == 0


def test_sparsity_term_is_ratio_over_all_sites() -> None:
    one, two = torch.rand(3, requires_grad=True), torch.rand(9)
    share = newly_used(
        [one, two], [torch.zeros(3, dtype=torch.bool), torch.zeros(9, dtype=torch.bool)]
    )
    assert torch.isclose(share, torch.cat([one, two]).mean())
    share.backward()
    assert torch.allclose(one.grad, torch.full((3,), 1 / 12))  # type: ignore[arg-type]


@pytest.mark.parametrize("sizes", [[192, 192, 768] * 3, [40, 40, 100, 40, 40, 60], [5, 7]])
def test_sums_by_site_equal_separate_sums_bit_for_bit(sizes: list[int]) -> None:
    values = torch.rand(sum(sizes), generator=torch.Generator().manual_seed(3))
    expected = torch.stack([part.sum() for part in values.split(sizes)])
    assert torch.equal(sum_by_site(values, sizes), expected)
