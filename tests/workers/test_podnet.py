"""Tests of PODNet: POD and its invariances, the loss, and proxies in a stream."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from class_incremental_steps import SMALL, START, A, B, C, batch, moved, stream, wide
from cosine_head_steps import begun, counted, trained
from torch import Tensor
from torch.nn import functional as F

from pipeline.testing.lab import Lab
from workers.errors import UserError
from workers.job import BackboneSettings, DataSettings, Task, TrainSettings
from workers.methods.podnet import PodNet, PodNetSettings
from workers.model.cosine import nca
from workers.model.pod import compute_features_and_maps, pod, pool_axes
from workers.model.vit import build, compute_digest


# ---- POD -----------------------------------------------------------------------------------------
def some_maps(seed: int, height: int = 3, width: int = 3) -> Tensor:
    return torch.randn(
        2, 4, height, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


def test_pod_matches_worked_value_and_ignores_map_scale() -> None:
    a, b = torch.arange(1.0, 9).reshape(1, 2, 2, 2), torch.ones(1, 2, 2, 2)
    assert float(pod([a], [b])) == pytest.approx(0.64393019, abs=1e-6)
    assert float(pod([3 * a], [b])) == pytest.approx(0.64393019, abs=1e-6), (
        "the scale of a map has no effect"
    )


def test_pod_is_a_mean_over_blocks_and_images() -> None:
    a, b, c, d = (some_maps(seed) for seed in range(4))
    one = [
        float(pod([x[i : i + 1]], [y[i : i + 1]])) for x, y in ((a, b), (c, d)) for i in range(2)
    ]
    assert float(pod([a, c], [b, d])) == pytest.approx(sum(one) / 4, abs=1e-6)


def test_equal_maps_have_zero_distance_and_zero_gradient() -> None:
    a = some_maps(0).requires_grad_()
    distance = pod([a], [a.detach()])
    distance.backward()
    assert float(distance.detach()) == 0
    assert a.grad is not None
    assert a.grad.abs().max() == 0


def test_sums_over_rows_do_not_depend_on_row_order() -> None:
    a = some_maps(0, 3, 5)
    turned, pooled, pooled_turned = a[:, :, [2, 0, 1]], pool_axes(a), pool_axes(a[:, :, [2, 0, 1]])
    assert pooled.shape == (2, 4 * (3 + 5))
    assert torch.allclose(pooled[:, :20], pooled_turned[:, :20], atol=1e-7), (
        "sums over rows must not depend on their order"
    )
    assert not torch.allclose(pooled[:, 20:], pooled_turned[:, 20:], atol=1e-2)
    assert torch.allclose(pool_axes(-turned), pooled_turned, atol=1e-7), (
        "sums are of squares, so signs have no effect"
    )


POOLED = SMALL.model_copy(update={"options": {**SMALL.options, "global_pool": "avg", "depth": 3}})
T2T = BackboneSettings(
    name="t2t_vit_12", img_size=32, options={"embed_dim": 32, "depth": 3, "num_heads": 2}
)


@pytest.mark.parametrize("settings", [SMALL, POOLED, T2T], ids=["vit", "pooled", "t2t"])
def test_maps_are_patch_tokens_of_all_but_last_block(settings: BackboneSettings) -> None:
    torch.manual_seed(0)
    vit: Any = build(settings).eval()
    images = torch.randn(2, 3, settings.img_size, settings.img_size)
    seen: list[Tensor] = []
    for block in vit.blocks[:-1]:
        block.register_forward_hook(lambda module, inputs, tokens: seen.append(tokens))
    plain = vit(images)
    expected = [*seen]
    features, maps = compute_features_and_maps(vit, images)
    assert torch.equal(features, plain)
    side = vit.patch_embed.grid_size[0]
    assert [tuple(m.shape) for m in maps] == [(2, 32, side, side)] * (len(vit.blocks) - 1)
    for patch_map, tokens in zip(maps, expected, strict=True):
        patches = tokens[:, vit.num_prefix_tokens :]
        assert all(
            torch.equal(patch_map[:, :, row, column], patches[:, row * side + column])
            for row in range(side)
            for column in range(side)
        )


# ---- the loss ------------------------------------------------------------------------------------
def test_podnet_loss_is_nca_with_growing_distillation() -> None:
    method, b = (
        begun("podnet", A, B, C, lambda_c=2.0, lambda_f=0.5, scale=3.0, proxies=2),
        counted(batch(A, B, C), A, B, C),
    )
    with torch.no_grad():
        taught, taught_maps = compute_features_and_maps(method.backbone, b.images)
    moved(method)
    loss, terms = method.loss(b, START)
    features, maps = compute_features_and_maps(method.backbone, b.images)
    s = torch.cat([method.heads[name].similarity(features) for name in "abc"], 1)
    expected = {
        "nca": nca(s, wide(b, A, B, C), method.heads.scale.item(), 0.6).item(),
        "distance": (1 - F.cosine_similarity(features, taught)).mean().item(),
        "pod": pod(maps, taught_maps).item(),
    }
    assert {name: float(t) for name, t in terms.items()} == pytest.approx(expected, abs=1e-5)
    assert min(expected.values()) > 1e-3
    assert loss.item() == pytest.approx(
        expected["nca"] + math.sqrt(7 / 2) * (0.5 * expected["distance"] + 2 * expected["pod"]),
        abs=1e-5,
    )


def test_loss_of_first_task_is_only_nca() -> None:
    method = begun("podnet", A)
    loss, terms = method.loss(batch(A), START)
    assert terms.keys() == {"nca"}
    assert torch.equal(
        loss,
        nca(
            method.heads["a"].similarity(method.backbone(batch(A).images)),
            batch(A).labels,
            method.heads.scale,
            0.6,
        ),
    )


@pytest.mark.parametrize("hinge", [True, False])
def test_hinge_setting_keeps_loss_nonnegative(hinge: bool) -> None:
    method = begun("podnet", A, hinge=hinge, delta=0.0, scale=30.0)
    b = batch(A)
    b.labels = method.heads["a"].similarity(method.backbone(b.images)).argmax(1)
    assert (method.loss(b, START)[0].item() >= 0) == hinge


def test_initial_student_equals_teacher_and_gradients_are_finite() -> None:
    method = begun("podnet", A, B)
    loss, terms = method.loss(batch(A, B), START)
    loss.backward()
    assert float(terms["distance"]) == pytest.approx(0.0, abs=1e-6)
    assert float(terms["pod"]) == pytest.approx(0.0, abs=1e-6)
    assert all(torch.isfinite(p.grad).all() for p in method.parameters() if p.grad is not None)


def test_the_teacher_gets_no_gradient() -> None:
    method = begun("podnet", A, B)
    moved(method)
    before = compute_digest(method.teacher.backbone)
    trained(method, A, B)
    assert compute_digest(method.teacher.backbone) == before
    assert all(p.grad is None for p in method.teacher.backbone.parameters())


def test_entries_of_gradients_are_clamped() -> None:
    method = begun("podnet", A, B, clamp=1e-3)
    moved(method)
    method.loss(batch(A, B), START)[0].backward()
    gradients = {
        name: p.grad.clone() for name, p in method.named_parameters() if p.grad is not None
    }
    method.after_backward()
    assert any(g.abs().max() > 1e-3 for g in gradients.values())
    assert all(
        torch.equal(p.grad, gradients[name].clamp(-1e-3, 1e-3))
        for name, p in method.named_parameters()
        if p.grad is not None
    )


@pytest.mark.parametrize(
    ("step", "expected"), [("train", {"backbone", "scale", "b"}), ("finetune", {"scale", "a", "b"})]
)
def test_each_step_trains_only_its_parts(step: str, expected: set[str]) -> None:
    method = begun("podnet", A, B, step=step)

    def parts() -> dict[str, Any]:
        return {
            "backbone": compute_digest(method.backbone),
            "scale": method.heads.scale.item(),
            **{n: method.heads.export(n)["weight"] for n in "ab"},
        }

    before = parts()
    trained(method, A, B)
    assert {
        n
        for n, value in parts().items()
        if not (torch.equal(value, before[n]) if isinstance(value, Tensor) else value == before[n])
    } == expected


def test_loss_of_fine_tuning_is_only_nca() -> None:
    assert begun("podnet", A, B, step="finetune").loss(batch(A, B), START)[1].keys() == {"nca"}


# ---- in a stream ---------------------------------------------------------------------------------
def test_podnet_has_proxies_and_finetunes_from_second_task(
    lab: Lab,
) -> None:
    run = stream(lab, "podnet", proxies=3)
    assert [[job.step for job in run.stages(task)] for task in (0, 1)] == [
        ["train", "herd"],
        ["train", "herd", "finetune"],
    ]
    assert [tuple(run.state(task).head["weight"].shape) for task in (0, 1)] == [
        (2, 3, 32),
        (3, 3, 32),
    ]
    handed = [run.lab.finished[run.artifact(job).key][1].tensors for job in run.stages(1)]
    assert torch.equal(handed[0]["heads/two/weight"], run.state(0).head["weight"]), (
        "old proxies must be frozen in `train`"
    )
    assert not torch.equal(handed[2]["heads/two/weight"], run.state(0).head["weight"])


@pytest.mark.parametrize("base", [None, "two"])
def test_imprinted_proxies_have_the_mean_length_of_old_ones(lab: Lab, base: str | None) -> None:
    """After training with zero epochs, proxies have their initial values."""
    tasks = [
        {
            "card": str(lab.card),
            "name": name,
            "classes": list(classes),
            "role": "base" if name == base else "task",
        }
        for name, classes in (("two", "01"), ("three", "234"))
    ]
    run = lab.run_of(
        "podnet",
        {"epochs": 0},
        methods={"podnet": {"proxies": 3, "finetune": False}},
        stream={"scenario": "class", "tasks": tasks},
    )
    old, new = (run.state(task).head["weight"] for task in (0, 1))
    assert torch.allclose(new.norm(dim=2), old.norm(dim=2).mean().expand(3, 3), rtol=1e-5)
    assert len(new.flatten(0, 1).unique(dim=0)) == 9
    if base:
        assert torch.allclose(old.norm(dim=2), torch.ones(2, 3), rtol=1e-5)


# ---- user errors ---------------------------------------------------------------------------------
@pytest.mark.parametrize("data", [{"mixup": 0.8}, {"cutmix": 1.0}, {"smoothing": 0.1}])
def test_soft_targets_are_refused(data: dict[str, float]) -> None:
    with pytest.raises(UserError, match="set all three to 0"):
        PodNet.validate(PodNetSettings(), TrainSettings(), DataSettings(**data), "class")


def test_podnet_refuses_one_class_and_one_block() -> None:
    one = Task("one", "card", "", ("x",))
    with pytest.raises(UserError, match="the first task 'one' has one class"):
        PodNet.check_backbone(PodNetSettings(), build(SMALL), (one, A))
    PodNet.check_backbone(PodNetSettings(), build(SMALL), (A, one))
    with pytest.raises(UserError, match="one block"):
        PodNet.check_backbone(
            PodNetSettings(),
            build(SMALL.model_copy(update={"options": {**SMALL.options, "depth": 1}})),
            (A,),
        )
    with pytest.raises(UserError, match="vision transformer"):
        PodNet.check_backbone(PodNetSettings(), build(BackboneSettings(name="resnet18")), (A,))
