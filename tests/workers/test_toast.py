"""Tests of TOAST: the two passes against a plain version, trained parameters, and pretuning."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import method_steps
import pytest
import safetensors.torch
import torch
from method_steps import BASE, ONE, OTHER_VITS, PROGRESS, TWO, begun, images, other_vit, vit
from timm.models.vision_transformer import ParallelThingsBlock
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.testing.lab import (
    OPTIMIZERS,
    TASKS,
    TINY,
    Lab,
    again,
    compute_task_logits,
    history,
)
from workers.errors import UserError
from workers.job import BackboneSettings, StageJob
from workers.methods import METHODS, toast
from workers.methods.base import Method
from workers.methods.toast import Toast, ToastLite
from workers.model.top_down import TopDown, select_tokens, selection, variational
from workers.model.vit import build, compute_digest
from workers.storage.taskstate import Carried, TaskState

BOTH = ["toast", "toast_lite"]
RANGES = [(0, 4), (0, 2), (1, 4), (1, 3), (3, 4)]  # full; early; late; both; one block alone


def method_of(name: str = "toast", backbone: Any = None, **settings: Any) -> Any:
    method = METHODS[name]
    return method(vit() if backbone is None else backbone, method.Settings(**settings), seed=1)


def moved(method: Any) -> None:
    """Change all parameters of the current task, as training would.

    The feedback layers become large enough to affect every block or stage. The prior has a positive
    cosine with some tokens and a negative one with others.
    """
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in method.own.values():
            p += torch.randn(p.shape, generator=generator, dtype=p.dtype) * 2 * p.shape[-1] ** -0.5
        if method.settings.select_tokens:
            method.own["prior"].copy_(
                torch.randn(method.width, generator=torch.Generator().manual_seed(6))
            )


def in_double(name: str = "toast", **settings: Any) -> Any:
    method = method_of(name, vit(depth=4).double(), **settings)
    method.start = {n: t.double() for n, t in method.start.items()}
    begun(method)
    moved(method.double())
    return method


def layers_of(method: Any) -> tuple[Tensor, Tensor]:
    layers = method.layers({**method.start, **dict(method.own.items())})
    return layers["w1"], layers["w2"]


def by_hand(method: Any, pictures: Tensor) -> Tensor:
    """Return the features of a plain version of the two passes.

    It writes attention out, applies the whole qkv layer to the feedback, and computes the feedback
    layer by layer.
    """
    model, parameters_by_name, s = method.backbone, dict(method.own.items()), method.settings
    top = s.feedback_from or len(model.blocks)

    def run(fed_back: dict[int, Tensor]) -> list[Tensor]:
        x = model.norm_pre(model._pos_embed(model.patch_embed(pictures)))
        block_outputs = [x]
        for index, block in enumerate(model.blocks):

            def heads(qkv: Tensor, attn: Any = block.attn) -> Tensor:
                heads: Tensor = qkv.unflatten(2, (3, attn.num_heads, -1))
                return heads.permute(2, 0, 3, 1, 4)

            q, k, v = heads(block.attn.qkv(block.norm1(x)))
            if index in fed_back:
                bias = block.attn.qkv.bias if s.td_value_bias else None
                v = v + heads(F.linear(fed_back[index], block.attn.qkv.weight, bias))[2]
            a = (q @ k.mT * block.attn.head_dim**-0.5).softmax(-1)
            x = x + block.attn.proj((a @ v).transpose(1, 2).flatten(2))
            x = x + block.mlp(block.norm2(x))
            block_outputs.append(x)
        return [*block_outputs, model.norm(x)]

    seen = run({})[-1 if top == len(model.blocks) else top]
    selected = seen
    if s.select_tokens:
        cosine = F.cosine_similarity(seen, parameters_by_name["prior"].expand_as(seen), dim=-1)
        selected = seen * cosine.clamp(0, 1)[..., None]
    r = selected @ parameters_by_name.get("transform", torch.eye(32, dtype=seen.dtype))
    fed_back = {}
    for layer in reversed(range(top - s.feedback_to)):
        w1, w2 = (w[layer] for w in layers_of(method))
        r = r @ w1.T
        fed_back[layer + s.feedback_to] = r @ w2.T
    return run(fed_back)[-1][:, 0]


def steered(method: Any, pictures: Tensor) -> Tensor:
    method.weight_overrides = method.training_weights(None, PROGRESS)
    features: Tensor = method.features(pictures)
    return features


# ---- the two passes ------------------------------------------------------------------------------
def test_token_selection_matches_the_golden_mask() -> None:
    x, prior = torch.tensor([[[3.0, 4.0], [-1.0, 0.0], [0.0, 2.0]]]), torch.tensor([1.0, 0.0])
    assert torch.allclose(
        select_tokens(x, prior), torch.tensor([[[1.8, 2.4], [0.0, 0.0], [0.0, 0.0]]])
    )


def test_toast_mask_depends_on_direction_of_prior() -> None:
    x, prior = (
        torch.randn(4, 9, 6, generator=torch.Generator().manual_seed(0)).double(),
        torch.linspace(-1, 2, 6).double(),
    )

    def mask(prior: Tensor) -> Tensor:
        return (select_tokens(x, prior) / x)[..., 0]

    assert ((mask(prior) >= 0) & (mask(prior) <= 1)).all()
    assert torch.allclose(mask(7.5 * prior), mask(prior))
    assert torch.equal(mask(prior) > 0, mask(-prior) == 0)
    assert (mask(prior) > 0).any()
    assert (mask(-prior) > 0).any()


@pytest.mark.parametrize(
    "settings",
    [
        *({"feedback_to": to, "feedback_from": top} for to, top in RANGES),
        {"td_value_bias": True},
        {"train_P": False},
        {"select_tokens": False},
        {"td_value_bias": True, "feedback_to": 1, "feedback_from": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", BOTH)
def test_two_passes_with_feedback_match_reference(name: str, settings: dict[str, Any]) -> None:
    method, pictures = in_double(name, **settings), images().double()
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
        assert torch.allclose(gradient, expected_gradient, rtol=1e-9, atol=1e-10)
    assert (features - method.backbone(pictures)).abs().max() > 0.01


@pytest.mark.parametrize(("to", "top"), RANGES)
def test_only_steered_blocks_run_twice(to: int, top: int) -> None:
    method, ran = in_double(feedback_to=to, feedback_from=top), list[int]()
    for index, block in enumerate(method.backbone.blocks):
        block.register_forward_hook(lambda *_, index=index: ran.append(index))
    steered(method, images().double())
    assert [ran.count(index) for index in range(4)] == [1] * to + [2] * (top - to) + [1] * (4 - top)


def test_image_gradients_include_both_passes() -> None:
    method, pictures, weight = (
        in_double(),
        images().double().requires_grad_(),
        torch.linspace(-1, 2, 32).double(),
    )
    gradient, expected_gradient = (
        torch.autograd.grad((f @ weight).sum(), pictures)[0]
        for f in (steered(method, pictures), by_hand(method, pictures))
    )
    assert expected_gradient.abs().max() > 1e-3
    assert torch.allclose(gradient, expected_gradient, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(("to", "top"), RANGES)
def test_folded_feedback_is_linear_and_equals_the_layer_chain(to: int, top: int) -> None:
    method = in_double(feedback_to=to, feedback_from=top)
    w1, w2 = layers_of(method)
    transform = method.own["transform"]
    matrix = method.top_down.folded({"w1": w1, "w2": w2}, transform)["matrix"]
    u = torch.randn(5, 32, generator=torch.Generator().manual_seed(2)).double()
    r = u @ transform
    chain: list[Tensor] = []
    for layer in reversed(range(top - to)):
        r = r @ w1[layer].T
        chain.insert(0, r @ w2[layer].T @ method.backbone.blocks[to + layer].attn.qkv.weight[64:].T)
    assert torch.allclose(u @ matrix.T, torch.cat(chain, 1), rtol=1e-12, atol=1e-11)
    assert torch.allclose(
        (u + u.flip(0)) @ matrix.T,
        torch.cat(chain, 1) + torch.cat(chain, 1).flip(0),
        rtol=1e-12,
        atol=1e-11,
    )


@torch.no_grad()
def test_features_without_feedback_equal_the_backbone_bit_for_bit() -> None:
    method, plain = method_of(), vit()(images())
    begun(method)
    moved(method)
    assert not torch.allclose(steered(method, images()), plain, atol=1e-2)
    entered, _ = method.top_down.first_pass(images())
    away = -method.own["prior"].expand(8, 5, 32)  # no token has a positive cosine with the prior
    assert torch.equal(method.top_down.second_pass(entered, away, method.weight_overrides), plain)
    method.own["transform"].zero_()
    assert torch.equal(steered(method, images()), plain)


@contextmanager
def added_to_values(by_block: dict[int, Tensor]) -> Iterator[None]:
    """Context manager that adds `by_block[n]` (B, N, A) to the values of the n-th block to run."""
    attention, calls = F.scaled_dot_product_attention, itertools.count()

    def adding(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        added = by_block.get(next(calls))
        if added is not None:
            v = v + added.unflatten(2, (v.shape[1], -1)).transpose(1, 2)
        return attention(q, k, v, **options)

    with mock.patch.object(F, "scaled_dot_product_attention", adding):
        yield


@torch.no_grad()
@pytest.mark.parametrize("form", OTHER_VITS.values(), ids=OTHER_VITS.keys())
def test_feedback_steers_values_of_other_backbone_families(form: dict[str, Any]) -> None:
    """The reference runs two full passes and adds W_v of the feedback of each layer to v."""
    method = method_of(backbone=other_vit(**form))
    begun(method)
    moved(method)
    model, tensors, plain = method.backbone, dict(method.own.items()), other_vit(**form)
    seen = plain.forward_features(images())
    cosine = F.cosine_similarity(seen, tensors["prior"].expand_as(seen), dim=-1)
    r = seen * cosine.clamp(0, 1)[..., None] @ tensors["transform"]
    fed_back = {}
    for layer in (1, 0):
        w1, w2 = (w[layer] for w in layers_of(method))
        r = r @ w1.T
        attn = plain.blocks[layer].attn
        weight = attn.qkv.weight[-32:] if attn.qkv is not None else attn.v_proj.weight
        fed_back[layer] = r @ w2.T @ weight.T
    with added_to_values(fed_back):
        expected = plain(images())
    features = steered(method, images())
    assert torch.allclose(features, expected, atol=1e-4)
    assert not torch.allclose(features, plain(images()), atol=1e-4)
    assert torch.allclose(model(images()), plain(images()), atol=1e-5)
    tensors["transform"].zero_()
    assert torch.equal(steered(method, images()), model(images()))


@pytest.mark.few(4)
@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("form", OTHER_VITS.values(), ids=OTHER_VITS.keys())
def test_feedback_of_other_families_learns_and_is_stored(name: str, form: dict[str, Any]) -> None:
    method = method_of(name, other_vit(**form))
    groups = begun(method)
    start = {n: p.detach().clone() for n, p in method.own.items()}
    method_steps.train(method, method_steps.OPTIMIZERS["sgd"](groups), ONE)
    start.pop("prior")  # it has a gradient only after the feedback has changed
    for n, value in start.items():
        assert not torch.equal(method.own[n], value), n
    state = method.eval().finish()[0]
    assert compute_digest(method.backbone) == method.backbone_digest
    assert 1.5 < method.flops_share(state) < 3
    logits = method_steps.answers(method)
    method.load_task(TaskState.from_bytes(state.to_bytes()))
    assert torch.equal(method_steps.answers(method), logits)


@torch.no_grad()
def test_separate_value_biases_are_added_a_second_time() -> None:
    form = OTHER_VITS["EVA-02, rotary"]
    method, doubled = method_of(backbone=other_vit(**form), td_value_bias=True), other_vit(**form)
    begun(method)
    method.own["transform"].zero_()
    for block in doubled.blocks:
        block.attn.v_bias *= 2
    assert torch.allclose(steered(method, images()), doubled(images()), atol=1e-4)
    assert not torch.allclose(steered(method, images()), other_vit(**form)(images()), atol=1e-3)


@torch.no_grad()
def test_the_released_code_adds_the_value_bias_a_second_time() -> None:
    method, doubled = method_of(td_value_bias=True), vit()
    begun(method)
    method.own["transform"].zero_()
    for block in doubled.blocks:
        block.attn.qkv.bias[64:] *= 2
    assert torch.allclose(steered(method, images()), doubled(images()), atol=1e-5)
    assert not torch.allclose(steered(method, images()), vit()(images()), atol=1e-2)


@pytest.mark.parametrize("value_bias", [False, True])
def test_a_backbone_without_qkv_biases_is_steered_too(value_bias: bool) -> None:
    method = method_of(backbone=vit(qkv_bias=False), td_value_bias=value_bias)
    begun(method)
    moved(method)
    assert torch.allclose(steered(method, images()), by_hand_without_bias(method), atol=1e-4)


def by_hand_without_bias(method: Any) -> Tensor:
    method = copy.copy(method)
    method.settings = method.settings.model_copy(update={"td_value_bias": False})
    return by_hand(method, images())


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


def test_backbone_is_plain_outside_second_pass() -> None:
    method, plain = method_of(), vit()(images())
    begun(method)
    moved(method)
    steered(method, images())
    assert torch.equal(method.backbone(images()), plain)
    with method.top_down.adding([torch.ones(8, 5, 32)] * 2):
        assert torch.equal(copy.deepcopy(method.backbone)(images()), plain)
        assert not torch.allclose(method.backbone(images()), plain, atol=1e-2)
    with pytest.raises(ZeroDivisionError), method.top_down.adding([torch.ones(8, 5, 32)] * 2):
        raise ZeroDivisionError
    assert torch.equal(method.backbone(images()), plain)


def test_a_compiled_backbone_is_steered_too() -> None:
    method = method_of()
    begun(method)
    moved(method)
    expected = steered(method, images())
    for block in method.backbone.blocks:
        block.compile(backend="eager")
    for _ in range(2):
        assert torch.equal(steered(method, images()), expected)
        assert torch.equal(method.backbone(images()), vit()(images()))


# ---- the kept first pass -------------------------------------------------------------------------
@pytest.mark.parametrize(("to", "top"), RANGES)
def test_kept_first_pass_gives_same_features(to: int, top: int) -> None:
    method = in_double(feedback_to=to, feedback_from=top)
    rows = method.top_down.pack(*method.top_down.first_pass(images().double()))
    assert rows.shape == (8, 2 * 5 * 32)
    with mock.patch.object(TopDown, "first_pass") as first_pass:
        features = steered(method, rows)
    first_pass.assert_not_called()
    assert torch.equal(features, steered(method, images().double()))
    assert torch.allclose(features, by_hand(method, images().double()), rtol=0, atol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize("form", OTHER_VITS.values(), ids=OTHER_VITS.keys())
def test_kept_first_pass_gives_same_features_for_other_families(form: dict[str, Any]) -> None:
    method = method_of(backbone=other_vit(**form))
    begun(method)
    moved(method)
    rows = method.top_down.pack(*method.top_down.first_pass(images()))
    assert torch.equal(steered(method, rows), steered(method, images()))


@contextmanager
def counted_first_passes() -> Iterator[list[int]]:
    """Yield a list that gets the number of images in each first pass."""
    sizes: list[int] = []
    first_pass = TopDown.first_pass

    def counted(self: TopDown, x: Tensor) -> Any:
        sizes.append(len(x))
        return first_pass(self, x)

    with mock.patch.object(TopDown, "first_pass", counted):
        yield sizes


def train_job(lab: Lab, name: str, step: str = "train", **data: Any) -> StageJob:
    """Return a stage of three epochs; its batch size does not divide the number of images."""
    base, task = ({"card": str(lab.card), "classes": list(TASKS[t]), "name": t} for t in TASKS)
    run = lab.run_of(
        name,
        {**OPTIMIZERS["sgd"], "lr": 0.01, "epochs": 3, "batch_size": 23},
        ("two", "three"),
        stream={"scenario": "task", "tasks": [{**base, "role": "base"}, task]},
        methods={name: {}},
        data={"val_fraction": 0.125, **data},
        backbone={**TINY, "drop_path": 0.3},
    )
    job = run.stages(step == "train")[0]
    assert job.step == step
    run.prepare(job)
    return job


def plain_passes() -> Any:
    return mock.patch.object(Toast, "precompute", return_value=None)


@pytest.mark.few(2)
@pytest.mark.parametrize("step", ["pretune", "train"])
@pytest.mark.parametrize("name", BOTH)
def test_stage_passes_images_once_and_trains_the_same(lab: Lab, name: str, step: str) -> None:
    """Results are equal up to rounding, because the kept pass uses other batches of images."""
    job = train_job(lab, name, step)
    with counted_first_passes() as sizes:
        kept = lab.stage(again(job, "kept"))
    row = history(kept)[0]
    noise = [1] if step == "pretune" else []  # for the first prior
    assert sum(sizes) == sum([row["images"], row["val_total"], *noise])
    with counted_first_passes() as sizes, plain_passes():
        plain = lab.stage(again(job, "plain"))
    assert sum(sizes) == sum([3 * (row["images"] + row["val_total"]), *noise])
    for kept_row, plain_row in zip(history(kept), history(plain), strict=True):
        assert kept_row == pytest.approx(plain_row, rel=1e-5)
    file = "carried.safetensors" if step == "pretune" else "task.safetensors"
    kept_tensors, plain_tensors = (safetensors.torch.load(a.read(file)) for a in (kept, plain))
    assert kept_tensors.keys() == plain_tensors.keys()
    for tensor_name, tensor in kept_tensors.items():
        assert torch.allclose(tensor, plain_tensors[tensor_name], atol=1e-5), tensor_name


@pytest.mark.parametrize("data", [{"flip": 0.5}, {"mixup": 0.2}], ids=repr)
def test_first_pass_is_repeated_under_augmentation(lab: Lab, data: dict[str, Any]) -> None:
    job = train_job(lab, "toast", **data)
    with counted_first_passes() as sizes:
        rows = history(lab.stage(again(job, "kept")))
    assert sum(sizes) == 3 * rows[0]["images"] + rows[0]["val_total"]
    with plain_passes():
        assert rows == history(lab.stage(again(job, "plain"))), "bit for bit"


def test_first_pass_is_repeated_if_it_does_not_fit(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = train_job(lab, "toast")
    images = history(lab.stage(again(job, "fits")))[0]["images"]
    num_bytes = 4 * 2 * 17 * 32 * images
    passes: dict[int, int] = {}
    for limit in (num_bytes - 1, num_bytes):
        monkeypatch.setattr(toast, "MAX_FIRST_PASS_BYTES", limit)
        with counted_first_passes() as sizes:
            rows = history(lab.stage(again(job, f"limit-{limit}")))
        passes[limit] = sum(sizes) - rows[0]["val_total"]
    # The first batch is passed once more, to find that the pass does not fit.
    assert passes == {num_bytes - 1: 3 * images + 23, num_bytes: images}


# ---- trained and stored parameters ---------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "settings", "step", "names"),
    [
        ("toast", {}, "train", {"w1", "w2", "prior", "transform"}),
        ("toast", {"train_P": False}, "train", {"w1", "w2", "prior"}),
        ("toast", {"select_tokens": False}, "train", {"w1", "w2", "transform"}),
        ("toast", {}, "pretune", {"w1", "w2", "prior"}),
        ("toast", {"select_tokens": False}, "pretune", {"w1", "w2"}),
        ("toast_lite", {}, "train", {"w1_down", "w1_up", "w2_down", "w2_up", "prior", "transform"}),
        (
            "toast_lite",
            {"train_P": False},
            "train",
            {"w1_down", "w1_up", "w2_down", "w2_up", "prior"},
        ),
        ("toast_lite", {}, "pretune", {"w1", "w2", "prior"}),
    ],
)
def test_each_step_trains_the_expected_parameters(
    name: str, settings: dict[str, Any], step: str, names: set[str]
) -> None:
    method = method_of(name, **settings)
    groups = begun(method, step=step)
    assert {g["name"] for g in groups} == {"head.weight", "head.bias"} | names
    assert {n.removeprefix("own.") for n, p in method.named_parameters() if p.requires_grad} == {
        "heads.layers.0.weight",
        "heads.layers.0.bias",
    } | names
    without_decay = {g["name"] for g in groups if not g["weight_decay"]}
    assert without_decay == {"head.bias", "prior"} & {g["name"] for g in groups}


def test_trained_parameter_shares_of_a_vit_b_match_reference() -> None:
    """The exact counts give 14.08 % of all parameters, 14.67 % with P, and 0.73 % for lite, always
    without heads."""

    def trained(name: str, **settings: Any) -> int:
        method = method_of(name, backbone, **settings)
        method.start = {
            n: torch.empty(shape, device="meta")
            for n, shape in {"w1": (12, 768, 768), "w2": (12, 768, 768), "prior": (768,)}.items()
        }
        begun(method)
        return sum(p.numel() for p in method.own.values())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("workers.methods.base.compute_digest", lambda backbone: "")
        with torch.device("meta"):
            backbone = build(BackboneSettings(name="vit_base_patch16_224"))
        size = sum(p.numel() for p in backbone.parameters())
        full, without, lite = (
            trained("toast"),
            trained("toast", train_P=False),
            trained("toast_lite"),
        )
    assert size == 85_798_656
    assert (full, without, lite) == (
        14_155_776 + 589_824 + 768,
        14_155_776 + 768,
        147_456 + 589_824 + 768,
    )
    assert lite == 738_048
    assert [
        round(100 * share, 2) for share in (without / (size + without), full / (size + full))
    ] == [14.16, 14.67]
    # The share in the reference omits xi and counts P only in the total.
    assert 14_155_776 / (size + 14_155_776 + 589_824) == pytest.approx(0.1408, abs=5e-5)
    assert round(100 * lite / 100e6, 2) == 0.74
    assert lite / (size + full) == pytest.approx(0.0073, abs=5e-5)


@pytest.mark.parametrize(
    ("name", "copies"),
    [("toast", 2 * 2 * 32 * 32 + 32 * 32), ("toast_lite", 2 * 2 * 2 * 4 * 32 + 32 * 32)],
)
def test_stored_bytes_of_a_task_match_the_formula(name: str, copies: int) -> None:
    state = method_steps.trained(method_of(name))
    assert state.sizes() == {"masks": 0, "tokens": 4 * 32, "copies": 4 * copies, "head": 4 * 2 * 33}


def test_toast_lite_starts_equal_to_toast_and_shares_feedback_layers() -> None:
    """The low-rank parts start with B = 0, so that at first B has a gradient and A has none."""
    full, lite = method_of(), method_of("toast_lite")
    for method in (full, lite):
        # as if pretuned
        method.start["w2"] = 0.2 * torch.randn(
            2, 32, 32, generator=torch.Generator().manual_seed(4)
        )
        begun(method)
    assert torch.equal(method_steps.answers(full), method_steps.answers(lite))
    assert not torch.allclose(
        method_steps.answers(full), method_steps.answers(begun_anew("toast")), atol=1e-3
    )
    lite.loss(method_steps.batch(), PROGRESS)[0].backward()
    assert lite.own["w1_up"].grad.any()
    assert not lite.own["w1_down"].grad.any()
    assert 0.9 < float(lite.own["w2_down"].detach().abs().max() * 32**0.5) <= 1
    drawn = lite.own["w1_down"].detach().clone()
    begun(lite, TWO)
    assert not torch.equal(lite.own["w1_down"], drawn), "each task draws its own"
    moved(lite)
    layer = lite.start["w2"][1] + 0.25 * lite.own["w2_up"][1] @ lite.own["w2_down"][1]
    assert torch.equal(layers_of(lite)[1][1], layer)


@torch.no_grad()
@pytest.mark.parametrize("name", BOTH)
def test_several_tasks_share_the_first_pass(name: str) -> None:
    learner, method = method_of(name), method_of(name)
    for task in (ONE, TWO):
        with torch.enable_grad():
            method.load_task(TaskState.from_bytes(method_steps.trained(learner, task).to_bytes()))
    method_steps.load_base_head(method)
    alone = {task.name: method_steps.answers(method, task) for task in (ONE, TWO, BASE)}
    assert torch.equal(
        alone["base"], F.linear(vit()(images()), torch.ones(2, 32), torch.zeros(2))
    ), "the backbone must serve the base task without feedback"
    with counted_first_passes() as sizes:
        for order in (["one", "two", "base"], ["two", "one", "two"]):
            logits = method.grouped_logits(images(), dict.fromkeys(order, slice(None)))
            assert set(logits) == set(order)
            assert all(torch.equal(logits[task], alone[task]) for task in order)
    assert sizes == [8, 8]


def begun_anew(name: str) -> Any:
    method = method_of(name)
    begun(method)
    return method


@pytest.mark.parametrize("name", BOTH)
def test_task_without_pretuning_starts_as_the_backbone_and_learns(name: str) -> None:
    """W1 = I passes the selected tokens on. W2 = 0 adds no feedback at first, and is the first to
    get a gradient."""
    method = begun_anew(name)
    assert torch.equal(steered(method, images()), vit()(images()))
    method.loss(method_steps.batch(), PROGRESS)[0].backward()
    first = {"toast": {"w2"}, "toast_lite": {"w2_up"}}[name]
    assert {n for n, p in method.own.items() if p.grad.any()} == first
    method_steps.train(method, method_steps.OPTIMIZERS["adamw"](begun(method)), ONE, steps=3)
    method.loss(method_steps.batch(), PROGRESS)[0].backward()
    assert all(p.grad.any() for p in method.own.values())


@pytest.mark.parametrize("top", [2, 4])
def test_fresh_prior_selects_most_tokens_of_any_image(top: int) -> None:
    top_down = TopDown(vit(depth=4), 0, top)
    prior = top_down.prior(torch.Generator().manual_seed(3))
    assert torch.equal(prior, top_down.prior(torch.Generator().manual_seed(3)))
    assert not torch.equal(prior, top_down.prior(torch.Generator().manual_seed(4)))
    assert (selection(top_down.first_pass(images())[1], prior) > 0).float().mean() > 0.75


def test_feedback_of_another_shape_is_refused() -> None:
    state = method_steps.trained(method_of("toast_lite", rank=2))
    with pytest.raises(
        UserError,
        match=r"its state has feedback .*'w1_down': \(2, 2, 32\).*, these settings have "
        r".*'w1_down': \(2, 4, 32\)",
    ):
        method_of("toast_lite").load_task(state)
    with pytest.raises(UserError, match="use the backbone and the method's settings of its run"):
        method_of(train_P=False).load_task(method_steps.trained(method_of()))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"feedback_from": 3},
            r"from block 3 down to block 0, and the backbone has 2; keep 0 <= feedback_to < "
            r"feedback_from <= 2",
        ),
        ({"feedback_to": 2}, r"from block 2 down to block 2"),
        ({"feedback_from": 1, "feedback_to": 1}, r"from block 1 down to block 1"),
    ],
)
def test_invalid_feedback_range_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        Toast.check_backbone(Toast.Settings(**settings), vit())


def test_backbones_that_cannot_be_steered_are_refused() -> None:
    for backbone in (
        vit(block_fn=ParallelThingsBlock),
        build(BackboneSettings(name="convit_local", img_size=32)),
    ):
        with pytest.raises(UserError, match=r"block 0 of the backbone has no 'attn\.qkv'"):
            Toast.check_backbone(Toast.Settings(), backbone)
    with pytest.raises(
        UserError,
        match="works on the blocks of a vision transformer or the stages of a ConvNeXt, and the "
        "backbone is a ResNet",
    ):
        Toast.check_backbone(Toast.Settings(), build(BackboneSettings(name="resnet18")))


@pytest.mark.parametrize("name", BOTH)
def test_the_work_per_image_counts_both_passes_and_the_feedback(name: str) -> None:
    method = method_of(name, vit(depth=4), feedback_to=1, feedback_from=3)
    tokens, width = 5, 32
    block = tokens * (12 * width * width + 2 * tokens * width)
    # Of the last block, only the class token is read.
    last = 2 * width * width * (1 + tokens) + 2 * tokens * width + 8 * width * width
    share = method.flops_share(method_steps.trained(method))
    assert share == pytest.approx(
        1 + 2 * (block + tokens * width * width) / (4 * 3 * 64 * width + 3 * block + last)
    )


# ---- pretuning -----------------------------------------------------------------------------------
def test_variational_loss_is_zero_for_inverse_layer() -> None:
    generator = torch.Generator().manual_seed(0)
    undo = torch.randn(2, 6, 6, generator=generator, dtype=torch.float64)
    stream = [torch.randn(3, 5, 6, generator=generator, dtype=torch.float64)]
    for layer in undo:
        stream.append(torch.linalg.solve(layer, stream[-1].mT).mT)
    stream = [t.detach().requires_grad_() for t in stream]
    w1 = nn.Parameter(undo.clone())
    assert variational(stream, w1).item() == pytest.approx(0, abs=1e-20)
    loss = variational(stream, w1 + 0.1)
    errors = [((stream[i + 1] @ (undo[i] + 0.1).T - stream[i]) ** 2).mean() for i in range(2)]
    assert torch.allclose(loss, torch.stack(errors).sum())
    loss.backward()
    assert w1.grad is not None
    assert all(t.grad is None for t in stream)


@pytest.mark.parametrize("name", BOTH)
def test_pretuning_loss_adds_inversion_of_second_pass_blocks(name: str) -> None:
    method = method_of(name, vit(depth=3), feedback_to=1, variational=0.3)
    begun(method, BASE, step="pretune")
    moved(method)
    loss, terms = method.loss(method_steps.batch(), PROGRESS)
    inner: list[tuple[Tensor, Tensor]] = []
    hooks = [
        block.register_forward_hook(lambda block, x, y: inner.append((x[0].detach(), y.detach())))
        for block in method.backbone.blocks[1:]
    ]
    features = steered(method, method_steps.batch().images)
    for hook in hooks:
        hook.remove()
    errors = [
        F.mse_loss(after @ w.T, before)
        for (before, after), w in zip(inner[-2:], method.own["w1"], strict=True)
    ]
    assert torch.allclose(terms["variational"], torch.stack(errors).sum())
    assert torch.allclose(
        terms["ce"], F.cross_entropy(method.heads["base"](features), method_steps.batch().labels)
    )
    assert torch.allclose(loss, terms["ce"] + 0.3 * terms["variational"])
    both = dict(zip(method.own, torch.autograd.grad(loss, [*method.own.values()]), strict=True))
    without = method_of(name, vit(depth=3), feedback_to=1, variational=0.0)
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
    assert {n for n in both if not torch.equal(both[n], plain[n])} == {"w1"}


@pytest.mark.parametrize("name", BOTH)
def test_every_task_starts_from_the_pretuned_parameters(name: str) -> None:
    method = method_of(name)
    optimizer = method_steps.OPTIMIZERS["adamw"](begun(method, BASE, step="pretune"))
    fresh = {n: t.clone() for n, t in method.start.items()}
    method_steps.train(method, optimizer, BASE)
    moved(method)
    state, carried = method.finish()
    assert state.sizes() == {"masks": 0, "tokens": 0, "copies": 0, "head": 4 * 2 * 33}, (
        "the common start must not count as part of the base task"
    )
    assert (
        carried.tensors.keys()
        == {"w1", "w2", "prior"}
        == {n for n, t in carried.tensors.items() if not torch.equal(t, fresh[n])}
    )
    learner, handed = method_of(name), Carried.from_bytes(carried.to_bytes())
    begun(learner, ONE, handed)
    assert torch.equal(layers_of(learner)[0], carried.tensors["w1"])
    assert torch.equal(learner.own["prior"], carried.tensors["prior"])
    direct = method_steps.answers(method, BASE)
    assert torch.equal(
        method_steps.answers(method_steps.serving(method_of(name), [state], carried), BASE), direct
    )
    assert not torch.allclose(direct, method.heads["base"](vit()(images())), atol=1e-3), (
        "the feedback must change the answers"
    )


@pytest.mark.parametrize("name", BOTH)
def test_pretuning_without_labels_trains_only_the_block_inversion(name: str) -> None:
    method, pictures = method_of(name), replace(BASE, name="pictures", role="unlabelled")
    groups = begun(method, pictures, step="pretune")
    assert [(g["name"], [*g["params"]]) for g in groups] == [("w1", [method.own["w1"]])]
    method_steps.train(method, method_steps.OPTIMIZERS["adamw"](groups), pictures)
    loss, terms = method.loss(method_steps.batch(), PROGRESS)
    stream = [method_steps.batch().images]
    hooks = [
        block.register_forward_hook(lambda block, x, y: stream.append(y.detach()))
        for block in method.backbone.blocks
    ]
    method.backbone.blocks[0].register_forward_pre_hook(
        lambda block, x: stream.__setitem__(0, x[0].detach())
    )
    method.backbone(method_steps.batch().images)
    for hook in hooks:
        hook.remove()
    assert terms.keys() == {"variational"}
    errors = [
        F.mse_loss(after @ w.T, before)
        for before, after, w in zip(stream, stream[1:], method.own["w1"], strict=False)
    ]
    assert torch.allclose(loss, torch.stack(errors).sum())
    carried, fresh = method.finish()[1], begun_anew(name).start
    assert {n for n in fresh if not torch.equal(carried.tensors[n], fresh[n])} == {"w1"}
    assert carried.tensors.keys() == fresh.keys()


@pytest.mark.few(1)
@pytest.mark.parametrize("name", BOTH)
def test_unlabelled_images_pretune_a_complete_run(lab: Lab, name: str) -> None:
    stream = {
        "scenario": "task",
        "tasks": [
            {"card": str(lab.card), "name": "pictures", "role": "unlabelled"},
            *(
                {"card": str(lab.card), "name": task, "classes": list(TASKS[task])}
                for task in ("two", "three")
            ),
        ],
    }
    run = lab.run_of(
        name,
        {"optimizer": "adamw", "lr": 1e-2, "epochs": 6},
        ("two", "three"),
        stream=stream,
        methods={name: {}},
    )
    assert run.stages(0)[0].previous.keys() == {"pretune"}
    layers = run.live(0).start
    assert layers["w2"].count_nonzero() == 0
    assert not torch.equal(layers["w1"], method_of(name, vit(depth=2)).start["w1"])
    assert all(
        row["correct"] > 1.2 * row["total"] / len(TASKS[row["task"]])
        for i in range(2)
        for row in run.evaluated(i)["rows"]
    )


def base_first(lab: Lab, name: str, **method: Any) -> Any:
    tasks = [
        {"card": str(lab.card), "name": task, "classes": list(TASKS[task])}
        for task in ("two", "three")
    ]
    stream = {
        "scenario": "task",
        "tasks": [{**tasks[0], "role": "base"}, tasks[1], {**tasks[0], "name": "again"}],
    }
    run = lab.run_of(
        name,
        {"optimizer": "adamw", "lr": 3e-3, "epochs": 5},
        ("two", "three"),
        stream=stream,
        methods={name: method},
    )
    return replace(run, order=("two", "three", "again"))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", BOTH)
def test_star_with_a_base_task_is_pretuned_once(lab: Lab, name: str) -> None:
    run = base_first(lab, name, steps={"pretune": {"epochs": 2}})
    assert [[job.step for job in run.stages(i)] for i in range(3)] == [
        ["pretune"],
        ["train"],
        ["train"],
    ]
    pretune = {"pretune": run.stages(0)[0].key}
    assert run.stages(0)[0].previous == {}
    for i in range(3):
        assert run.evaluate_job(i).previous == pretune
        assert i == 0 or (run.stages(i)[0].previous, run.stages(i)[0].states) == (pretune, {})
    assert run.trained(0).manifest["epochs"] == 2
    rows = [
        next(r for r in run.evaluated(i)["rows"] if r["task"] == run.order[i]) for i in range(3)
    ]
    assert all(
        row["correct"] > 1.2 * row["total"] / len(TASKS.get(row["task"], TASKS["two"]))
        for row in rows
    )
    assert torch.equal(
        compute_task_logits(run.served(1), run.images(0), "two"),
        compute_task_logits(run.served(0), run.images(0), "two"),
    )
    start = run.carried(0).tensors
    assert torch.equal(run.live(1).start["w1"], start["w1"])
    assert not torch.equal(method_of(name, vit(depth=2)).start["w1"], start["w1"])
    assert all(
        run.evaluated(i)["canary"]["logits_sha256"] == rows[i - 1]["logits_sha256"] for i in (1, 2)
    )


def test_nothing_is_pretuned_without_request(lab: Lab) -> None:
    run = base_first(lab, "toast", pretune=False)
    assert [[job.step for job in run.stages(i)] for i in range(3)] == [[], ["train"], ["train"]]
    assert run.evaluate_job(2).previous == run.stages(1)[0].previous == {}
    alone = lab.run("toast")
    assert [job.step for i in range(2) for job in alone.stages(i)] == ["train", "train"]
    assert alone.stages(0)[0].previous == {}


def test_setting_of_one_step_keeps_the_other_steps_key(lab: Lab) -> None:
    runs = [
        base_first(lab, "toast_lite", **settings)
        for settings in ({}, {"rank": 2}, {"train_P": False}, {"variational": 0.2})
    ]
    pretuned, tuned = ([run.stages(i)[0].key for run in runs] for i in (0, 1))
    assert pretuned[0] == pretuned[1] == pretuned[2] != pretuned[3]
    assert len(set(tuned)) == 4
    assert [METHODS["toast"].steps_for(Toast.Settings(), p)[0].name for p in (-1, 0, 5)] == [
        "pretune",
        "train",
        "train",
    ]


def test_only_toast_methods_start_from_a_pretuned_state() -> None:
    assert {name for name, method in METHODS.items() if method.starts_from} == set(BOTH)
    assert all(not (method.starts_from and method.carries) for method in METHODS.values())
    assert issubclass(ToastLite, Toast)
    assert issubclass(Toast, Method)
