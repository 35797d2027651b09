"""Tests of attention measures and maps, and of accuracy on shifted, occluded or attacked images."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from test_context import LOCAL, built, images
from torch import Tensor, nn

from pipeline.testing.lab import OPTIMIZERS, TINY, Lab
from workers import analysis
from workers.analysis import (
    attacked,
    attention_rows,
    logits_with_task,
    measure_robustness,
    measure_shifted_accuracy,
    occluded,
    slope,
)
from workers.job import BackboneSettings, Task
from workers.methods.base import MethodSettings
from workers.methods.linear import Linear
from workers.model import top_down
from workers.model.attention import (
    AttentionStatistics,
    compute_distance,
    compute_entropy,
    compute_patch_distances,
    record_attention,
    record_class_attention,
)
from workers.model.sites import TokenSites


def maps(model: nn.Module, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Return the attention of each block, (B, H, N, N)."""
    attention_maps: list[Tensor] = []
    monkeypatch.setattr(
        AttentionStatistics, "add", lambda layer, attention: attention_maps.append(attention)
    )
    with record_attention(model), torch.no_grad():
        model(x)
    return attention_maps


# ---- measures ------------------------------------------------------------------------------------
def test_entropy_and_distance_of_known_attention() -> None:
    uniform, identity = torch.full((1, 1, 4, 4), 0.25), torch.eye(4)[None, None]
    apart = compute_patch_distances((2, 2))
    assert apart.tolist()[0] == pytest.approx([0, 1, 1, math.sqrt(2)])
    assert compute_entropy(uniform).item() == pytest.approx(math.log(4))
    assert compute_entropy(identity).item() == 0
    assert compute_distance(uniform, apart).item() == pytest.approx(1)
    assert compute_distance(identity, apart).item() == 0
    some = torch.tensor([[[[0.25, 0.75], [0.5, 0.5]]]])
    assert compute_entropy(some).item() == pytest.approx(
        (-0.25 * math.log(0.25) - 0.75 * math.log(0.75) + math.log(2)) / 2
    )
    row_distances = compute_patch_distances((1, 2))
    assert compute_distance(some, row_distances).item() == pytest.approx(1.25)
    assert compute_distance(some * 0.3, row_distances).item() == pytest.approx(1.25), (
        "attention to the class token is ignored"
    )
    assert compute_distance(torch.zeros(1, 1, 2, 2), row_distances).item() == 0


def test_distance_to_others_excludes_the_patch_itself() -> None:
    # Three patches in a row: the ends are 1 and 2 away from the others, the middle one 1 and 1.
    distances = compute_patch_distances((1, 3))
    attention = torch.tensor([[0.5, 0.25, 0.25], [0.0, 0.9, 0.1], [0.8, 0.0, 0.2]])[None, None]
    uniform = (1.5 + 1 + 1.5) / 3
    to_others = compute_distance(attention, distances, to_others=True)
    assert to_others.item() == pytest.approx((1.5 + 1 + 2) / 3 / uniform)
    even = torch.full((1, 1, 3, 3), 1 / 3)
    assert compute_distance(even, distances, to_others=True).item() == pytest.approx(1)
    assert compute_distance(torch.eye(3)[None, None], distances, to_others=True).item() == 0
    # attention to the patch itself, 1 up to rounding
    sharp = (torch.eye(3) * 25).softmax(-1)[None, None]
    assert compute_distance(sharp, distances, to_others=True).item() == pytest.approx(1)


def test_class_token_counts_for_entropy_but_not_distance() -> None:
    identity = torch.eye(5)[None, None]
    identity[..., 0, :] = 0.2
    layer = AttentionStatistics("", 0, compute_patch_distances((2, 2)))
    layer.add(identity)
    assert layer.rows()[0]["distance"] == 0
    assert layer.rows()[0]["entropy"] == pytest.approx(math.log(5) / 5)


@pytest.mark.parametrize("kind", [None, "cb", "replace", "parallel"])
@pytest.mark.parametrize(
    "options", [{}, {"qk_norm": True, "reg_tokens": 2}], ids=["plain", "norms-and-registers"]
)
def test_recorded_attention_matches_unfused_timm_attention(
    kind: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = built(kind, options=options)
    fused = maps(model, images(), monkeypatch)
    seen: list[Tensor] = []
    for block in model.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_pre_hook(
            lambda module, inputs: seen.append(inputs[0])
        )
    model(images())
    assert len(fused) == len(seen) == 3
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(fused, seen, strict=True))


def test_masked_keys_get_no_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built(None)
    sites = TokenSites(model, "all", "off", self_loop=False)
    sites.folded({"tokens": torch.tensor([[True, False, True, False]] * 3)})
    attention_maps = maps(model, images(), monkeypatch)
    assert all(bool((a[..., [2, 4]] == 0).all()) for a in attention_maps)
    assert all(torch.allclose(a.sum(-1), torch.ones(())) for a in attention_maps)


def test_recorded_gated_attention_reproduces_layer_output(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built(None, LOCAL)
    attn, heard = model.blocks[1].attn, []
    attn.register_forward_hook(lambda module, inputs, output: heard.append((inputs[0], output)))
    a = maps(model, images(), monkeypatch)[1]
    x, want = heard[0]
    v = attn.v(x).unflatten(2, (4, -1)).transpose(1, 2)
    assert torch.allclose(attn.proj((a @ v).transpose(1, 2).flatten(2)), want, atol=1e-5)


def test_a_uniform_head_has_the_largest_entropy_and_distance_one() -> None:
    model = built("replace")
    with record_attention(model) as layers:
        model(images())
        model(images() + 1)
    for layer in layers:
        first, *other_rows = layer.rows()
        assert layer.images == 8
        assert first["entropy"] == pytest.approx(math.log(5), abs=1e-5)
        shares = (first["entropy_share"], first["distance"], first["distance_to_others"])
        assert shares == (pytest.approx(1), pytest.approx(1), pytest.approx(1))
        assert all(row["entropy"] < math.log(5) - 1e-4 for row in other_rows)


def test_attention_means_are_independent_of_batch_size() -> None:
    model, x = built(None), images()
    with record_attention(model) as whole:
        model(x)
    with record_attention(model) as parts:
        model(x[:1])
        model(x[1:])
    for one, other in zip(
        (r for layer in whole for r in layer.rows()),
        (r for layer in parts for r in layer.rows()),
        strict=True,
    ):
        assert one == {
            name: pytest.approx(value, abs=1e-5) if isinstance(value, float) else value
            for name, value in other.items()
        }


def test_recording_attention_changes_no_output_and_removes_its_hooks() -> None:
    model, x = built("cbs"), images()
    want, hooks = model(x), [len(m._forward_hooks) for m in model.modules()]
    with record_attention(model) as layers:
        assert torch.equal(model(x), want)
    assert [len(m._forward_hooks) for m in model.modules()] == hooks
    assert [layer.scale for layer in layers] == [
        pytest.approx(float(b.mlp.context.scale.detach().abs().mean())) for b in model.blocks
    ]
    before = layers[0].images
    model(x)
    assert layers[0].images == before


# ---- methods -------------------------------------------------------------------------------------
def test_attention_is_measured_with_weights_of_each_task(lab: Lab) -> None:
    run = lab.run_of(
        "hat",
        OPTIMIZERS["adamw"],
        backbone={**TINY, "context": {"kind": "cbs"}},
        methods={"hat": {"per_task_affine": True}},
    )
    job = run.evaluate_job(1)
    method = run.served(1)
    for task_index in range(2):
        rows = attention_rows(method, job, job.tasks[task_index], 16)
        assert [(row["block"], row["head"]) for row in rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
        task_maps = [
            run.state(task_index).copies[f"blocks.{block}.mlp.context.scale"].abs().mean()
            for block in range(2)
        ]
        assert [rows[0]["scale"], rows[2]["scale"]] == pytest.approx(
            [float(scale) for scale in task_maps]
        )
        assert task_maps[0] > 0


@pytest.mark.few("vpt-1")
@pytest.mark.parametrize(
    ("method", "networks"), [("der", 2), ("dytox", 1), ("supsup_nn", 1), ("icarl", 1), ("vpt", 1)]
)
def test_attention_and_robustness_are_measured_for_varied_methods(
    lab: Lab, method: str, networks: int
) -> None:
    run = lab.run(method)
    job = run.evaluate_job(1)
    rows = attention_rows(run.served(1), job, job.tasks[0], 8)
    assert len({row["network"] for row in rows}) == networks
    assert all(0 < row["entropy_share"] <= 1 + 1e-6 and row["distance"] > 0 for row in rows)
    assert {row["kind"] for row in measure_robustness(run.served(1), job, job.tasks[0], 8)} >= {
        "occlusion"
    }


def test_logits_with_task_replace_inference_of_the_task(lab: Lab) -> None:
    run = lab.run("supsup_nn")
    method, x = run.served(1), run.images(1)
    candidate_index = next(
        p for p, tasks in enumerate(method.candidates().values()) if run.order[1] in tasks
    )
    assert torch.equal(
        logits_with_task(method, x, run.order[1]),
        method.answer(x, torch.full((len(x),), candidate_index), run.order[1]),
    )


# ---- maps over images ----------------------------------------------------------------------------
@pytest.mark.parametrize("options", [{}, {"reg_tokens": 2}], ids=["plain", "registers"])
def test_class_attention_equals_class_token_row_of_attention(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = built(None, options=options)
    with record_class_attention(model) as attention_rows, torch.no_grad():
        model(images())
        model(images()[:2])
    whole = maps(model, images(), monkeypatch)
    assert [(gaze.network, gaze.block, len(gaze.passes)) for gaze in attention_rows] == [
        ("", block, 2) for block in range(3)
    ]
    for gaze, attention in zip(attention_rows, whole, strict=True):
        tokens, (height, width) = attention.shape[-1], gaze.grid
        assert gaze.passes[0].shape == (4, height, width)
        assert torch.allclose(
            gaze.passes[0].flatten(1),
            tokens * attention[:, :, 0, -height * width :].mean(1),
            atol=1e-5,
        )


def test_model_without_class_token_records_no_class_attention() -> None:
    model = built(None, LOCAL)
    with record_class_attention(model) as attention_rows:
        model(images())
    assert attention_rows == []


def test_attention_maps_match_network_and_answers_of_method(lab: Lab) -> None:
    run = lab.run("finetune")
    job, method = run.evaluate_job(1), run.served(1)
    task = job.tasks[1]
    attention_maps = analysis.compute_attention_maps(method, job, task, 6)
    assert attention_maps is not None
    ((images_shown, labels),) = analysis.spread(job, task, 6)
    assert attention_maps.right == [task.classes[label] for label in labels]
    assert attention_maps.answered == [
        task.classes[answer] for answer in method.logits(images_shown, task.name).argmax(1)
    ]
    assert [*attention_maps.looks] == ["block 0", "block 1"]
    assert torch.allclose(
        attention_maps.images.permute(0, 3, 1, 2) * 2 - 1, images_shown, atol=1e-6
    ), "mean and std are 1/2"
    with record_class_attention(method) as heard, torch.no_grad():
        method.logits(images_shown, task.name)
    assert torch.equal(attention_maps.looks["block 1"], heard[1].passes[0])
    assert attention_maps.selected is None


@pytest.mark.parametrize("name", ["toast", "toast_lite"])
def test_two_pass_method_shows_both_passes_and_selected_tokens(
    lab: Lab, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = lab.run(name)
    job, method = run.evaluate_job(1), run.served(1)
    used: list[tuple[Tensor, Tensor]] = []
    selected = top_down.select_tokens

    def recording_select(x: Tensor, prior: Tensor) -> Tensor:
        tokens = selected(x, prior)
        used.append((x, tokens))
        return tokens

    monkeypatch.setattr(top_down, "select_tokens", recording_select)
    attention_maps = analysis.compute_attention_maps(method, job, job.tasks[1], 6)
    assert attention_maps is not None
    assert attention_maps.selected is not None
    assert [*attention_maps.looks] == ["block 1, first look", "block 1, second look"]
    first, second = attention_maps.looks.values()
    assert not torch.equal(first, second)
    x, selected_tokens = used[0]
    assert torch.allclose(
        attention_maps.selected.flatten(1)[..., None] * x[:, 1:], selected_tokens[:, 1:], atol=1e-6
    ), "`selected` must be the factor that steers the second look"
    ((images_shown, _),) = analysis.spread(job, job.tasks[1], 6)
    with record_class_attention(method.backbone) as plain, torch.no_grad():
        method.backbone(images_shown)
    assert torch.allclose(first, plain[1].passes[0], atol=1e-5), (
        "the first look must be that of the plain backbone"
    )


def test_early_feedback_shows_both_passes_of_last_repeated_block(lab: Lab) -> None:
    run = lab.run_of("toast", OPTIMIZERS["adamw"], methods={"toast": {"feedback_from": 1}})
    job = run.evaluate_job(1)
    attention_maps = analysis.compute_attention_maps(run.served(1), job, job.tasks[1], 2)
    assert attention_maps is not None
    assert [*attention_maps.looks] == ["block 0, first look", "block 0, second look", "block 1"]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("method", "looks"),
    [
        ("der", ["network 0, block 1", "network 1, block 1"]),
        ("vpt", ["block 0", "block 1"]),
        ("dytox", ["block 0"]),
    ],
)
def test_attention_maps_are_computed_for_varied_methods(
    lab: Lab, method: str, looks: list[str]
) -> None:
    run = lab.run(method)
    job = run.evaluate_job(1)
    attention_maps = analysis.compute_attention_maps(run.served(1), job, job.tasks[0], 4)
    assert attention_maps is not None
    assert [*attention_maps.looks] == looks
    assert all(
        look.shape == (len(attention_maps.images), 4, 4) for look in attention_maps.looks.values()
    )
    assert set(attention_maps.right) <= set(job.tasks[0].classes)
    assert set(attention_maps.answered) <= {name for task in job.tasks for name in task.classes}


# ---- another source ------------------------------------------------------------------------------
def test_shifted_accuracy_uses_only_classes_of_other_card(lab: Lab) -> None:
    run = lab.run("finetune")
    job, method = run.evaluate_job(1), run.served(1)
    task = job.tasks[1]
    one = Task("other", "other", task.data, task.classes[1:2])
    assert [row["accuracy"] for row in measure_shifted_accuracy(method, job, task, [one])] == [
        1,
        1,
    ], "with a single class, every answer is correct"
    turned = Task("other", "other", task.data, task.classes[::-1])
    want = next(row for row in run.evaluated(1)["rows"] if row["task"] == task.name)
    for row in measure_shifted_accuracy(method, job, task, [turned]):
        assert (row["correct"], row["total"]) == (want["correct"], want["total"]), (
            "the order of classes must not matter"
        )
    strange = Task("other", "other", task.data, (*task.classes, "9"))
    assert measure_shifted_accuracy(method, job, task, [strange]) == []


def test_shifted_accuracy_uses_only_outputs_of_the_task(lab: Lab) -> None:
    run = lab.run("icarl")
    job, method = run.evaluate_job(1), run.served(1)
    assert method.scenario == "class"
    want = {row["task"]: row["correct_task_aware"] for row in run.evaluated(1)["rows"]}
    for task in job.tasks:
        assert (
            measure_shifted_accuracy(
                method, job, task, [Task("other", "other", task.data, task.classes)]
            )[0]["correct"]
            == want[task.name]
        )


# ---- occluded and attacked images ----------------------------------------------------------------
def test_occlusion_hides_the_centre() -> None:
    x = torch.ones(2, 3, 10, 10)
    hidden = occluded(x, 0.36)
    assert (hidden[0, 0] == 0).sum() == 36
    assert bool((hidden[:, :, 2:8, 2:8] == 0).all())
    assert torch.equal(occluded(x, 0.0), x)


def test_attack_moves_pixels_by_epsilon_within_valid_range() -> None:
    backbone = BackboneSettings(mean=(0.5, 0.4, 0.3), std=(0.5, 0.2, 0.1))
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (backbone.mean, backbone.std))
    pixels = torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    uphill = torch.where(pixels > 0.5, 1.0, -1.0)
    attacked_pixels = attacked((pixels - mean) / std, uphill, 0.1, backbone) * std + mean
    assert torch.allclose(attacked_pixels, (pixels + 0.1 * uphill).clamp(0, 1), atol=1e-6)


@pytest.mark.parametrize("name", ["finetune", "toast"])
def test_attack_direction_increases_loss_or_is_none_without_gradient(lab: Lab, name: str) -> None:
    run = lab.run(name)
    method, x = run.served(0), run.images(0)
    targets = torch.zeros(len(x), dtype=torch.long)
    uphill = slope(method, x, targets, run.order[0])
    assert uphill is not None

    def loss(images: Tensor) -> float:
        return float(
            nn.functional.cross_entropy(method.logits(images, run.order[0]), targets).detach()
        )

    assert loss(x + 0.02 * uphill) > loss(x) > loss(x - 0.02 * uphill)

    class Blind(Linear):
        @torch.no_grad()
        def logits(self, images: Tensor, task: str | None) -> Tensor:
            return super().logits(images, task)

    blind = Blind(built(None), MethodSettings(), 0)
    blind.heads.add("one", 2, 0)
    assert slope(blind, images(), torch.zeros(4, dtype=torch.long), "one") is None


@pytest.mark.few("finetune")
@pytest.mark.parametrize("method", ["finetune", "dytox"])
def test_robustness_at_level_zero_equals_measured_accuracy(lab: Lab, method: str) -> None:
    run = lab.run(method)
    job = run.evaluate_job(1)
    want = {row["task"]: (row["correct"], row["total"]) for row in run.evaluated(1)["rows"]}
    for task in job.tasks:
        rows = measure_robustness(run.served(1), job, task, 10_000)
        assert [(row["correct"], row["total"]) for row in rows if row["level"] == 0] == [
            want[task.name]
        ] * 2
        assert [row["level"] for row in rows if row["kind"] == "fgsm"] == [*analysis.EPSILONS]


@pytest.mark.parametrize("most", [1, 7, 40, 1000])
def test_images_are_spread_over_all_classes(
    lab: Lab, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workers.data.feed import Feed

    monkeypatch.setattr(Feed.evaluate, "__defaults__", (16,))
    run = lab.run("finetune")
    job = run.evaluate_job(1)
    whole = torch.cat([images for images, _ in analysis.spread(job, job.tasks[1], 10_000)])
    assert len(whole) == 60
    parts = [*analysis.spread(job, job.tasks[1], most)]
    step = math.ceil(60 / most)
    assert torch.equal(torch.cat([images for images, _ in parts]), whole[::step])
    assert sum(len(labels) for _, labels in parts) == math.ceil(60 / step)
