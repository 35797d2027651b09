"""Tests of TOAST on a ConvNeXt: the two passes against a plain version with transposed
convolutions, trained parameters, and pretuning."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import method_steps
import pytest
import torch
from method_steps import BASE, ONE, PROGRESS, TWO, begun, images
from test_convnext import SMALL, convnext
from test_toast import moved
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.testing import lab as stage_lab
from pipeline.testing.lab import TASKS, Lab, compute_task_logits
from pipeline.testing.promises import PROMISES
from workers.errors import UserError
from workers.job import BackboneSettings
from workers.methods import METHODS
from workers.methods.toast import Toast
from workers.model.compact import count_multiply_adds
from workers.model.top_down_conv import StageTopDown, upsample
from workers.model.vit import build, compile_blocks, compute_digest
from workers.storage.taskstate import Carried, TaskState

BOTH = ["toast", "toast_lite"]
RANGES = [
    (0, 4),
    (0, 2),
    (1, 4),
    (1, 3),
    (3, 4),
    (0, 1),
]  # full; early; late; both; one stage alone
FORMS: list[dict[str, Any]] = [
    {},
    {"head_norm_first": True},
    {"patch_size": 2, "output_stride": 16},
]  # in the last form, stage 1 has a stride and stage 4 a dilation


def method_of(name: str = "toast", backbone: Any = None, **settings: Any) -> Any:
    method = METHODS[name]
    return method(convnext() if backbone is None else backbone, method.Settings(**settings), seed=1)


def in_double(name: str = "toast", options: dict[str, Any] | None = None, **settings: Any) -> Any:
    method = method_of(name, convnext(**(options or {})).double(), **settings)
    method.start = {n: t.double() for n, t in method.start.items()}
    begun(method)
    moved(method.double())
    return method


def layers_of(method: Any) -> dict[str, Tensor]:
    layers: dict[str, Tensor] = method.layers({**method.start, **dict(method.own.items())})
    return layers


def run(model: Any, pictures: Tensor, fed_back: dict[int, Tensor]) -> list[Tensor]:
    """Run a full pass, and return the maps before the first stage and after each stage."""
    stage_outputs = [model.stem(pictures)]
    for index, stage in enumerate(model.stages):
        stage_outputs.append(stage(stage_outputs[-1] + fed_back.get(index, 0)))
    return stage_outputs


def transposed(x: Tensor, matrix: Tensor, front: int) -> Tensor:
    kernel = round((matrix.shape[0] / front) ** 0.5)
    return F.conv_transpose2d(x, matrix.T.reshape(x.shape[1], front, kernel, kernel), stride=kernel)


def by_hand(method: Any, pictures: Tensor) -> Tensor:
    """Return the features of a plain version of the two passes, with feedback stage by stage."""
    model, parameters_by_name, s = method.backbone, dict(method.own.items()), method.settings
    top = s.feedback_from or 4
    seen = run(model, pictures, {})[top]
    normed = seen
    if top == 4:
        norm = model.head.norm if hasattr(model.head, "norm") else model.norm_pre
        normed = F.layer_norm(
            seen.movedim(1, -1), seen.shape[1:2], norm.weight, norm.bias, norm.eps
        ).movedim(-1, 1)
    selected = seen
    if s.select_tokens:
        cosine = F.cosine_similarity(
            normed, parameters_by_name["prior"][None, :, None, None].expand_as(normed), dim=1
        )
        selected = seen * cosine.clamp(0, 1)[:, None]
    r = torch.einsum(
        "bchw,cd->bdhw",
        selected,
        parameters_by_name.get("transform", torch.eye(seen.shape[1], dtype=seen.dtype)),
    )
    fed_back, layers = {}, layers_of(method)
    widths = [SMALL["dims"][0], *SMALL["dims"]]
    for index in reversed(range(s.feedback_to, top)):
        r = transposed(r, layers[f"w1_{index}"], widths[index])
        fed_back[index] = F.conv2d(r, layers[f"w2_{index}"][:, :, None, None])
    features: Tensor = model.forward_head(model.norm_pre(run(model, pictures, fed_back)[-1]))
    return features


def steered(method: Any, pictures: Tensor) -> Tensor:
    method.weight_overrides = method.training_weights(None, PROGRESS)
    features: Tensor = method.features(pictures)
    return features


# ---- the two passes ------------------------------------------------------------------------------
def test_position_selection_matches_the_golden_mask() -> None:
    """The positions (3, 4), (-1, 0), (0, 2) and the prior (1, 0) have cosines 0.6, -1, 0. The
    feedback uses the position before the norm."""
    method = method_of(feedback_from=1)  # there is no norm after an early stage
    x = torch.tensor([[3.0, -1.0, 0.0], [4.0, 0.0, 2.0]])[None, :, None]
    assert torch.allclose(
        method.top_down.select_positions(x, torch.tensor([2.0, 0.0])),
        torch.tensor([[1.8, 0.0, 0.0], [2.4, 0.0, 0.0]])[None, :, None],
    )
    last = method_of()
    maps = torch.randn(2, 32, 2, 2, generator=torch.Generator().manual_seed(0))
    prior = last.backbone.head.norm(maps)[1, :, 0, 1]  # one position after the norm
    assert torch.allclose(last.top_down.select_positions(maps, prior)[1, :, 0, 1], maps[1, :, 0, 1])


def test_conv_mask_depends_on_direction_of_prior() -> None:
    top_down, x = (
        method_of().top_down,
        torch.randn(4, 32, 2, 2, generator=torch.Generator().manual_seed(0)),
    )
    prior = torch.randn(32, generator=torch.Generator().manual_seed(1))

    def mask(prior: Tensor) -> Tensor:
        scales: Tensor = top_down.select_positions(x, prior) / x
        return scales[:, 0]

    assert ((mask(prior) >= 0) & (mask(prior) <= 1)).all()
    assert torch.allclose(mask(7.5 * prior), mask(prior), atol=1e-6)
    assert torch.equal(mask(prior) > 0, mask(-prior) == 0)
    assert (mask(prior) > 0).any()
    assert (mask(-prior) > 0).any()


@pytest.mark.parametrize("kernel", [1, 2, 3])
def test_a_feedback_layer_is_a_transposed_convolution(kernel: int) -> None:
    generator = torch.Generator().manual_seed(0)
    layer = nn.ConvTranspose2d(6, 4, kernel, kernel, bias=False).double()
    x = torch.randn(2, 6, 3, 5, generator=generator, dtype=torch.float64)
    assert torch.allclose(
        upsample(x, layer.weight.flatten(1).T, kernel), layer(x), rtol=0, atol=1e-12
    )


@pytest.mark.few(8)
@pytest.mark.parametrize(
    ("name", "settings", "options"),
    [
        *[
            (name, {"feedback_to": to, "feedback_from": top}, {})
            for name in BOTH
            for to, top in RANGES
        ],
        *[(name, {}, options) for name in BOTH for options in FORMS[1:]],
        ("toast", {"train_P": False}, {}),
        ("toast", {"select_tokens": False}, {}),
        ("toast_lite", {"alpha": 2.0, "rank": 3}, {}),
    ],
    ids=str,
)
def test_two_passes_with_feedback_match_reference(
    name: str, settings: dict[str, Any], options: dict[str, Any]
) -> None:
    method, pictures = in_double(name, options, **settings), images().double()
    weight = torch.linspace(-1, 2, 32).double()
    parameters = [*method.own.values()]
    features, expected = steered(method, pictures), by_hand(method, pictures)
    assert torch.allclose(features, expected, rtol=0, atol=1e-10)
    for gradient, expected_gradient in zip(
        *(
            torch.autograd.grad(f @ weight @ torch.arange(8.0).double(), parameters)
            for f in (features, expected)
        ),
        strict=True,
    ):
        assert expected_gradient.abs().max() > 1e-6
        assert torch.allclose(gradient, expected_gradient, rtol=1e-8, atol=1e-10)
    assert (features - method.backbone(pictures)).abs().max() > 0.01


@pytest.mark.parametrize("options", FORMS, ids=str)
def test_feedback_maps_have_input_shape_of_stage(
    options: dict[str, Any],
) -> None:
    method = in_double(options=options)
    stage_inputs: list[Tensor] = []
    for stage in method.backbone.stages:
        stage.register_forward_pre_hook(lambda stage, x: stage_inputs.append(x[0]))
    entered, seen = method.top_down.first_pass(images().double())
    assert torch.equal(entered, stage_inputs[0])
    layers = method.top_down.folded(layers_of(method), method.own["transform"])
    u = torch.randn(seen.shape, generator=torch.Generator().manual_seed(2)).double()
    one, two, both = (
        method.top_down.propagate_feedback(r, layers) for r in (u, u.flip(0) + 1, u + u.flip(0) + 1)
    )
    assert [t.shape for t in one] == [t.shape for t in stage_inputs]
    assert all(
        torch.allclose(a + b, c, rtol=1e-12, atol=1e-11)
        for a, b, c in zip(one, two, both, strict=True)
    )
    assert not any(t.any() for t in method.top_down.propagate_feedback(0 * u, layers))


@torch.no_grad()
@pytest.mark.parametrize("options", FORMS, ids=str)
@pytest.mark.parametrize(("to", "top"), RANGES)
def test_kept_first_pass_gives_same_features(to: int, top: int, options: dict[str, Any]) -> None:
    """The kept maps are channels-last in memory, like the computed ones."""
    method = method_of(backbone=convnext(**options), feedback_to=to, feedback_from=top)
    begun(method)
    moved(method)
    computed = method.top_down.first_pass(images())
    rows = method.top_down.pack(*computed)
    assert rows.shape == (8, sum(t[0].numel() for t in computed))
    for kept, expected in zip(method.first_pass(rows), computed, strict=True):
        assert torch.equal(kept, expected)
        for t in (kept[:1], expected[:1]):
            assert t.is_contiguous(memory_format=torch.channels_last)
    with mock.patch.object(StageTopDown, "first_pass") as first_pass:
        features = steered(method, rows)
    first_pass.assert_not_called()
    assert torch.equal(features, steered(method, images()))


@torch.no_grad()
@pytest.mark.parametrize(("to", "top"), RANGES)
def test_features_without_feedback_equal_the_backbone_bit_for_bit(to: int, top: int) -> None:
    method, plain = method_of(feedback_to=to, feedback_from=top), convnext()(images())
    begun(method)
    assert torch.equal(steered(method, images()), plain), (
        "a fresh method must not change the features"
    )
    moved(method)
    assert not torch.allclose(steered(method, images()), plain, atol=1e-2)
    method.own["transform"].zero_()
    assert torch.equal(steered(method, images()), plain)


@torch.no_grad()
def test_positions_opposite_to_the_prior_feed_nothing_back() -> None:
    method, plain = method_of(feedback_from=3), convnext()(images())
    begun(method)
    moved(method)
    entered, seen = method.top_down.first_pass(images())
    away = -method.own["prior"][:, None, None].expand_as(seen)
    assert torch.equal(
        method.top_down.second_pass(entered, away, method.training_weights(None, PROGRESS)), plain
    )


def test_first_pass_builds_no_graph_and_backbone_gets_no_gradient() -> None:
    method = method_of()
    begun(method)
    moved(method)
    method.backbone.requires_grad_(True)  # otherwise there could be no graph
    assert all(not t.requires_grad for t in method.top_down.first_pass(images()))
    method.backbone.requires_grad_(False)
    method.loss(method_steps.batch(), PROGRESS)[0].backward()
    assert all(p.grad is None for p in method.backbone.parameters())
    assert all(p.grad is not None and p.grad.any() for p in method.own.values())
    assert compute_digest(method.backbone) == method.backbone_digest
    assert torch.equal(method.backbone(images()), convnext()(images()))


def test_only_needed_stages_run_in_each_pass() -> None:
    method, ran = in_double(feedback_to=1, feedback_from=2), []
    for index, stage in enumerate(method.backbone.stages):
        stage.register_forward_hook(lambda *_, index=index: ran.append(index))
    seen = method.top_down.first_pass(images().double())
    assert ran == [0, 1]
    method.top_down.second_pass(*seen, method.training_weights(None, PROGRESS))
    assert ran == [0, 1, 1, 2, 3]


@pytest.mark.slow
def test_a_compiled_backbone_is_steered_too() -> None:
    method = method_of()
    begun(method)
    moved(method)
    expected = steered(method, images())
    compile_blocks(method.backbone, backend="eager")
    for _ in range(2):
        assert torch.equal(steered(method, images()), expected)
        assert torch.equal(method.backbone(images()), convnext()(images()))


# ---- trained and stored parameters ---------------------------------------------------------------
def test_feedback_layers_have_the_shapes_of_their_stages() -> None:
    assert method_of().top_down.shapes() == {
        "w1_0": (8, 8),
        "w2_0": (8, 8),
        "w1_1": (8 * 4, 16),
        "w2_1": (8, 8),
        "w1_2": (16 * 4, 16),
        "w2_2": (16, 16),
        "w1_3": (16 * 4, 32),
        "w2_3": (16, 16),
    }
    assert method_of("toast_lite", rank=3, feedback_to=3).shapes() == {
        "w1_3_down": (3, 32),
        "w1_3_up": (64, 3),
        "w2_3_down": (3, 16),
        "w2_3_up": (16, 3),
    }
    assert method_of(feedback_to=1, feedback_from=2).top_down.shapes() == {
        "w1_1": (32, 16),
        "w2_1": (8, 8),
    }
    assert method_of(feedback_to=1, feedback_from=2).top_down.prior(torch.Generator()).shape == (
        16,
    )


def test_fresh_feedback_repeats_channels_and_adds_nothing() -> None:
    method = method_of()
    assert torch.equal(method.start["w1_0"], torch.eye(8))
    assert not any(t.any() for name, t in method.start.items() if name.startswith("w2"))
    x = torch.randn(2, 32, 3, 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(
        upsample(x, method.start["w1_3"], 2),
        x[:, :16].repeat_interleave(2, 2).repeat_interleave(2, 3),
    )
    assert all(torch.equal(t, method_of().start[name]) for name, t in method.start.items())
    begun(method)
    method.loss(method_steps.batch(), PROGRESS)[0].backward()
    assert all(
        p.grad is not None and bool(p.grad.any()) == name.startswith("w2")
        for name, p in method.own.items()
    ), "only W2 may have a gradient at first"


@pytest.mark.parametrize(
    ("name", "step", "parts"),
    [
        ("toast", "train", {""}),
        ("toast", "pretune", {""}),
        ("toast_lite", "train", {"_down", "_up"}),
        ("toast_lite", "pretune", {""}),
    ],
)
def test_each_step_trains_the_expected_parameters(name: str, step: str, parts: set[str]) -> None:
    method = method_of(name)
    groups = begun(method, step=step)
    names = (
        {f"{w}_{i}{part}" for w in ("w1", "w2") for i in range(4) for part in parts}
        | {"prior"}
        | ({"transform"} if step == "train" else set())
    )
    assert {g["name"] for g in groups} == {"head.weight", "head.bias"} | names
    assert {g["name"] for g in groups if not g["weight_decay"]} == {"head.bias", "prior"}


def test_toast_lite_starts_equal_to_toast_and_shares_feedback_layers() -> None:
    full, lite = method_of(), method_of("toast_lite")
    # as after `pretune`: no entry is zero
    handed = Carried({n: t + 0.1 for n, t in full.start.items()})
    for method in (full, lite):
        begun(method, ONE, handed)
    assert torch.equal(method_steps.answers(full), method_steps.answers(lite))
    assert not torch.allclose(
        method_steps.answers(lite), lite.heads["one"](convnext()(images())), atol=1e-3
    )
    lite.loss(method_steps.batch(), PROGRESS)[0].backward()
    assert all(bool(p.grad.any()) == (not name.endswith("_down")) for name, p in lite.own.items())
    assert 0.9 < float(lite.own["w1_3_down"].detach().abs().max() * 32**0.5) <= 1
    drawn = lite.own["w1_3_down"].detach().clone()
    begun(lite, TWO)
    assert not torch.equal(lite.own["w1_3_down"], drawn), "each task draws its own"
    moved(lite)
    assert torch.equal(
        layers_of(lite)["w1_2"],
        lite.start["w1_2"] + 0.25 * lite.own["w1_2_up"] @ lite.own["w1_2_down"],
    )


@torch.no_grad()
@pytest.mark.parametrize("name", BOTH)
def test_stored_tasks_share_one_first_pass_with_unchanged_answers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, method, direct = method_of(name), method_of(name), {}
    for task in (ONE, TWO):
        with torch.enable_grad():
            state = method_steps.trained(learner, task)
        direct[task.name] = method_steps.answers(learner, task)
        assert state.tokens.keys() == {"prior"}
        assert state.copies.keys() == {*method.shapes(), "transform"}
        method.load_task(TaskState.from_bytes(state.to_bytes()))
    method_steps.load_base_head(method)
    direct["base"] = F.linear(convnext()(images()), torch.ones(2, 32), torch.zeros(2))
    passes: list[int] = []
    first_pass = StageTopDown.first_pass

    def counted(self: StageTopDown, x: Tensor) -> Any:
        passes.append(len(x))
        return first_pass(self, x)

    monkeypatch.setattr(StageTopDown, "first_pass", counted)
    logits = method.grouped_logits(images(), dict.fromkeys(["one", "two", "base"], slice(None)))
    assert passes == [8]
    assert all(
        torch.equal(logits[task], direct[task])
        and torch.equal(method_steps.answers(method, replace(ONE, name=task)), direct[task])
        for task in direct
    )


def test_feedback_of_another_shape_is_refused() -> None:
    state = method_steps.trained(method_of(feedback_to=1))
    with pytest.raises(
        UserError,
        match=r"its state has feedback .*'w1_1': \(32, 16\).*, these settings have .*'w1_0': \(8, "
        r"8\)",
    ):
        method_of().load_task(state)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"feedback_from": 5},
            r"from stage 5 down to stage 0, and the backbone has 4; keep 0 <= feedback_to < "
            r"feedback_from <= 4",
        ),
        ({"feedback_to": 4}, r"from stage 4 down to stage 4"),
        ({"td_value_bias": True}, "td_value_bias is true, but the backbone is a ConvNeXt"),
    ],
)
@pytest.mark.parametrize("name", BOTH)
def test_unsupported_convnext_settings_are_refused(
    name: str, settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError, match=says):
        METHODS[name].check_backbone(METHODS[name].Settings(**settings), convnext())


@pytest.mark.slow
@pytest.mark.parametrize(("to", "top"), [(0, 4), (1, 3)])
def test_the_work_per_image_counts_both_passes_and_the_feedback(to: int, top: int) -> None:
    with torch.device("meta"):
        model: Any = build(BackboneSettings(name="convnext_tiny"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("workers.methods.base.compute_digest", lambda backbone: "")
        share = method_of(backbone=model, feedback_to=to, feedback_from=top).top_down.flops_share()
    front = [
        (96, 96, 1, 56),
        (96, 192, 2, 56),
        (192, 384, 2, 28),
        (384, 768, 2, 14),
    ]  # c, C, k and the input side of each stage
    stages = sum(
        count_multiply_adds(model.stages[i], front[i][0], front[i][3], front[i][3])
        for i in range(to, top)
    )
    feedback = sum(
        c * k * k * behind * (side // k) ** 2 + c * c * side**2
        for c, behind, k, side in front[to:top]
    )
    assert share == pytest.approx(1 + (stages + feedback) / count_multiply_adds(model, 3, 224, 224))
    assert count_multiply_adds(model, 3, 224, 224) == pytest.approx(4.45e9, rel=0.01)
    assert to or feedback == pytest.approx(318e6, rel=0.01)


# ---- pretuning -----------------------------------------------------------------------------------
def test_variational_loss_is_zero_for_inverse_stage() -> None:
    method, generator = in_double(), torch.Generator().manual_seed(0)
    layers = {name: nn.Parameter(p.detach().clone()) for name, p in method.own.items()}
    left = [
        torch.randn(3, c, 2, 2, generator=generator, dtype=torch.float64, requires_grad=True)
        for c in SMALL["dims"]
    ]
    stage_inputs = [
        transposed(x.detach(), layers[f"w1_{i}"].detach(), c).requires_grad_()
        for i, (x, c) in enumerate(zip(left, (8, 8, 16, 16), strict=True))
    ]
    stream = [*zip(stage_inputs, left, strict=True)]
    assert method.top_down.inversion(stream, layers).item() == pytest.approx(0, abs=1e-20)
    further = [(x + i + 1, y) for i, (x, y) in enumerate(stream)]
    loss = method.top_down.inversion(further, layers)
    assert loss.item() == pytest.approx(1 + 4 + 9 + 16)
    loss.backward()
    assert {name for name, p in layers.items() if p.grad is not None} == {
        "w1_0",
        "w1_1",
        "w1_2",
        "w1_3",
    }
    assert all(t.grad is None for pair in stream for t in pair)


@pytest.mark.parametrize("name", BOTH)
def test_pretuning_loss_adds_inversion_of_second_pass_stages(name: str) -> None:
    method = method_of(name, feedback_to=1, variational=0.3)
    begun(method, BASE, step="pretune")
    moved(method)
    loss, terms = method.loss(method_steps.batch(), PROGRESS)
    inner: list[tuple[Tensor, Tensor]] = []
    hooks = [
        stage.register_forward_hook(lambda stage, x, y: inner.append((x[0].detach(), y.detach())))
        for stage in method.backbone.stages[1:]
    ]
    features = steered(method, method_steps.batch().images)
    for hook in hooks:
        hook.remove()
    errors = [
        F.mse_loss(transposed(after, method.own[f"w1_{i}"], c), before)
        for i, c, (before, after) in zip((1, 2, 3), (8, 16, 16), inner[-3:], strict=True)
    ]
    assert torch.allclose(terms["variational"], torch.stack(errors).sum())
    assert torch.allclose(
        terms["ce"], F.cross_entropy(method.heads["base"](features), method_steps.batch().labels)
    )
    assert torch.allclose(loss, terms["ce"] + 0.3 * terms["variational"])
    both = dict(zip(method.own, torch.autograd.grad(loss, [*method.own.values()]), strict=True))
    without = method_of(name, feedback_to=1, variational=0.0)
    begun(without, BASE, step="pretune")
    moved(without)
    plain = dict(
        zip(
            without.own,
            torch.autograd.grad(
                without.loss(method_steps.batch(), PROGRESS)[0], [*without.own.values()]
            ),
            strict=True,
        )
    )
    assert {n for n in both if not torch.equal(both[n], plain[n])} == {"w1_1", "w1_2", "w1_3"}


@pytest.mark.parametrize("name", BOTH)
def test_every_task_starts_from_the_pretuned_parameters(name: str) -> None:
    method = method_of(name)
    optimizer = method_steps.OPTIMIZERS["adamw"](begun(method, BASE, step="pretune"))
    method_steps.train(method, optimizer, BASE)
    moved(method)
    state, carried = method.finish()
    assert not state.copies
    assert carried.tensors.keys() == {*method.top_down.shapes(), "prior"}
    learner, handed = method_of(name), Carried.from_bytes(carried.to_bytes())
    begun(learner, ONE, handed)
    assert all(torch.equal(layer, carried.tensors[n]) for n, layer in layers_of(learner).items())
    direct = method_steps.answers(method, BASE)
    assert torch.equal(
        method_steps.answers(method_steps.serving(method_of(name), [state], carried), BASE), direct
    )
    assert not torch.allclose(direct, method.heads["base"](convnext()(images())), atol=1e-3), (
        "the feedback must change the answers"
    )


# ---- runs of real stages -------------------------------------------------------------------------
ON_LAB = {
    "name": "convnext_atto",
    "img_size": 16,
    "crop_pct": 1.0,
    "options": {**SMALL, "ls_init_value": 1.0},
}


@pytest.mark.few(1)
@pytest.mark.parametrize("promise", [name for name, p in PROMISES.items() if p.applies(Toast)])
@pytest.mark.parametrize("name", BOTH)
def test_toast_on_convnext_keeps_all_method_promises(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, name: str, promise: str
) -> None:
    monkeypatch.setattr(stage_lab, "TINY", ON_LAB)
    PROMISES[promise].check(lab, name, PROMISES[promise].optimizers[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", BOTH)
def test_a_stream_with_a_base_task_is_pretuned_once(lab: Lab, name: str) -> None:
    tasks = [
        {"card": str(lab.card), "name": task, "classes": list(TASKS[task])}
        for task in ("two", "three")
    ]
    run = lab.run_of(
        name,
        {"optimizer": "adamw", "lr": 1e-2, "epochs": 3},
        ("two", "three"),
        backbone=ON_LAB,
        methods={name: {"variational": 0.01}},
        stream={"scenario": "task", "tasks": [{**tasks[0], "role": "base"}, tasks[1]]},
    )
    assert [[job.step for job in run.stages(i)] for i in range(2)] == [["pretune"], ["train"]]
    start = run.carried(0).tensors
    assert start["w2_0"].any()
    assert all(torch.equal(run.live(1).start[n], start[n]) for n in start)
    assert torch.equal(
        compute_task_logits(run.served(1), run.images(0), "two"),
        compute_task_logits(run.served(0), run.images(0), "two"),
    )


def test_fresh_prior_selects_most_positions_of_any_image() -> None:
    top_down = method_of().top_down
    prior = top_down.prior(torch.Generator().manual_seed(3))
    assert not torch.equal(prior, top_down.prior(torch.Generator().manual_seed(4)))
    chosen = top_down.select_positions(top_down.first_pass(images())[1], prior)
    assert (chosen.abs().sum(1) > 0).float().mean() > 0.9
