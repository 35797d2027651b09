"""Tests of T2T-ViT: sizes, tokens-to-token module, attention, released weights, and MEAT on it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from method_steps import PROGRESS
from step_contexts import step_context
from test_meat import OTHER, RATES, TASK, batch, with_random_masks
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.testing import lab as stage_lab
from pipeline.testing.lab import Lab
from pipeline.testing.promises import PROMISES
from workers.errors import UserError
from workers.job import BackboneSettings
from workers.methods.finetune import FineTune
from workers.methods.meat import Meat, MeatSettings
from workers.methods.piggyback import Piggyback
from workers.methods.tfm import Tfm, TfmSettings
from workers.model import vit
from workers.model.compact import count_multiply_adds, flops, plan_blocks
from workers.model.t2t import Performer, TokensToToken, arrange_as_image, sinusoids, windows
from workers.model.weights import weight_sites
from workers.storage.taskstate import TaskState

TINY = BackboneSettings(name="t2t_vit_12", img_size=64, options={"embed_dim": 32, "depth": 3})
MIB = 2**20
CLASSES = (200, 196, 100, 195, 250, 100)  # the six tasks of the paper's Table 1


def t2t(settings: BackboneSettings = TINY) -> Any:
    torch.manual_seed(0)
    model = vit.build(settings)
    for p in model.parameters():
        nn.init.normal_(p, std=0.2)
    return model.eval()


def images(count: int = 8, side: int = 64) -> Tensor:
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(5))


def large(count: int = 8) -> Any:
    """Return a batch of images of 64 pixels."""
    small = batch(rows=range(count), size=count)
    small.images = images(count)
    return small


def saved(tensors: dict[str, Tensor], folder: Any) -> BackboneSettings:
    path = str(folder / "weights.safetensors")
    safetensors.torch.save_file({n: t.contiguous() for n, t in tensors.items()}, path)
    return TINY.model_copy(update={"weights": path})


# ---- sizes ---------------------------------------------------------------------------------------
def test_number_of_parameters_is_exact() -> None:
    sites = weight_sites(vit.outline(BackboneSettings(name="t2t_vit_12")))
    assert sum(w.numel() for w in sites.values()) == 6_602_304
    assert sum(w.numel() for name, w in sites.items() if name.startswith("patch_embed.")) == 310_848
    # biases, norms, class token
    assert (
        sum(p.numel() for p in vit.outline(BackboneSettings(name="t2t_vit_12")).parameters())
        == 6_602_304 + 28_070
    )


def test_meat_and_piggyback_sizes_match_the_table_of_the_paper() -> None:
    backbone = vit.build(BackboneSettings(name="t2t_vit_12"))
    # with random features and ImageNet's head
    weights = sum(p.numel() for p in backbone.parameters()) + 2 * 32 * 64 + 1000 * (256 + 1)
    initial = 4 * weights  # fixed positions need no bytes
    heads = sum(4 * c * (256 + 1) for c in CLASSES)
    meat, piggyback = (
        Meat(backbone, MeatSettings(), seed=0),
        Piggyback(backbone, Piggyback.Settings(), seed=0),
    )
    bits = 3_145_728 + 196 * 12
    state = TaskState(
        "t", (), "meat", "", masks={n: torch.ones(s) > 0 for n, s in meat.mask_shapes().items()}
    )
    assert state.sizes()["masks"] * 8 == bits
    assert round((initial + heads + 6 * bits / 8) / MIB, 1) == 29.6
    masks = {name: torch.ones_like(weight) > 0 for name, weight in piggyback.sites.items()}
    assert TaskState("t", (), "piggyback", "", masks=masks).sizes()["masks"] * 8 == 6_602_304
    assert round((initial + heads + 6 * 6_602_304 / 8) / MIB) == 32


@pytest.mark.parametrize("side", [32, 96, 224])
def test_image_size_can_be_any_multiple_of_sixteen(side: int) -> None:
    model = t2t(TINY.model_copy(update={"img_size": side}))
    grid = side // 16
    assert vit.geometry(model) == {
        "depth": 3,
        "grid": (grid, grid),
        "tokens": grid**2,
        "prefix": 1,
        "width": 32,
        "hidden": 64,
    }
    assert model.patch_embed(images(2, side)).shape == (2, grid**2, 32)
    assert model(images(2, side)).shape == (2, 32)


# ---- by hand -------------------------------------------------------------------------------------
def test_soft_splits_are_overlapping_windows() -> None:
    image = torch.arange(2 * 8 * 8, dtype=torch.float32).view(1, 2, 8, 8)
    first = windows(image, 7, 4, 2)[0]  # (2 * 2, 2 * 49)
    padded = F.pad(image[0], (2, 2, 2, 2))
    for row, column in ((0, 0), (0, 1), (1, 0), (1, 1)):
        assert torch.equal(
            first[2 * row + column],
            padded[:, 4 * row : 4 * row + 7, 4 * column : 4 * column + 7].flatten(),
        )
    second = windows(image, 3, 2, 1)[0]
    assert torch.equal(second[5].view(2, 3, 3), image[0, :, 1:4, 1:4])
    assert torch.equal(arrange_as_image(image.flatten(2).transpose(1, 2), 8, 8), image)


def test_module_with_linear_layers_equals_three_strided_convolutions() -> None:
    torch.manual_seed(0)
    module: Any = TokensToToken(64, 3, 32)
    module.attention1 = nn.Linear(3 * 49, 64, bias=False)
    module.attention2 = nn.Linear(64 * 9, 64, bias=False)
    layers = (module.attention1, module.attention2, module.project)
    sizes = (7, 3, 3)
    strides = (4, 2, 2)
    x = images()
    for layer, size, stride in zip(layers, sizes, strides, strict=True):
        x = F.conv2d(
            x,
            layer.weight.unflatten(1, (-1, size, size)),
            layer.bias,
            stride,
            padding=2 if size == 7 else 1,
        )
    assert torch.allclose(module(images()), x.flatten(2).transpose(1, 2), atol=1e-5)


def test_performer_equals_explicit_random_feature_attention() -> None:
    torch.manual_seed(0)
    one = Performer(6, 4)
    x = torch.randn(2, 5, 6)
    with torch.no_grad():
        k, q, v = one.kqv(one.norm1(x)).split(4, dim=-1)
        attention_output = torch.zeros(2, 5, 4)

        def phi(y: Tensor) -> Tensor:
            return torch.stack([torch.exp(w @ y - y @ y / 2) for w in one.w]) / math.sqrt(2)

        for b in range(2):
            for i in range(5):
                scores = torch.stack([phi(q[b, i]) @ phi(k[b, j]) for j in range(5)])
                attention_output[b, i] = (scores / scores.sum()) @ v[b]
        attention_output = v + one.proj(attention_output)
        attention_output = attention_output + one.mlp(one.norm2(attention_output))
        assert torch.allclose(one(x), attention_output, atol=1e-5)


def test_many_random_features_approximate_softmax_attention() -> None:
    torch.manual_seed(0)
    one = Performer(8, 8)
    one.w = torch.randn(50_000, 8)
    q, k, v = (0.3 * torch.randn(1, 6, 8) for _ in range(3))
    assert torch.allclose(
        one.attention(q, k, v), (q @ k.transpose(1, 2)).softmax(-1) @ v, atol=5e-3
    )


def test_random_features_are_orthogonal_with_norm_root_m() -> None:
    w = Performer(10, 64).w
    assert w.shape == (32, 64)
    assert torch.allclose(w @ w.T, 32 * torch.eye(32), atol=1e-3)


def by_hand(attention: Any, x: Tensor, keys: Tensor | None = None) -> Tensor:
    """Return attention with scores divided by the square root of the whole width.

    keys: bool mask of the kept keys.
    """
    width = x.shape[-1]
    q, k, v = (
        part.unflatten(2, (4, width // 4)).transpose(1, 2)
        for part in attention.qkv(x).split(width, dim=-1)
    )
    scores = q @ k.transpose(2, 3) / math.sqrt(width)
    if keys is not None:
        scores = scores.masked_fill(~keys[:, None, None, :], -torch.inf)
    mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
    output: Tensor = attention.proj(mixed)
    return output


@torch.no_grad()
def test_attention_scores_are_scaled_by_the_full_width() -> None:
    model = t2t()
    attention, x = model.blocks[1].attn, 3 * torch.randn(2, 17, 32)
    assert torch.allclose(attention(x), by_hand(attention, x), atol=1e-5)
    assert not torch.allclose(attention(2 * x), by_hand(attention, x), atol=1e-2)
    attention.fused_attn = False
    assert torch.allclose(attention(x), by_hand(attention, x), atol=1e-5)
    sites: Any = Meat(model, MeatSettings(), seed=0).sites
    masked = sites.attention[1]
    keys = torch.rand(2, 17, generator=torch.Generator().manual_seed(1)) < 0.6
    keys[:, 0] = True
    for form in (keys, keys.float()):
        masked.keys = form
        assert torch.allclose(masked(x), by_hand(attention, x, keys), atol=1e-5)


def test_position_embeddings_are_sinusoidal() -> None:
    table = sinusoids(5, 8)[0]
    assert torch.equal(table[0], torch.tensor([0.0, 1.0] * 4))
    assert torch.allclose(
        table[3],
        torch.tensor([f(3 / 10000 ** (2 * i / 8)) for i in range(4) for f in (math.sin, math.cos)]),
    )
    assert torch.equal(t2t().pos_embed, sinusoids(17, 32))


def test_layer_norm_epsilon_matches_the_released_model() -> None:
    assert {m.eps for m in t2t().modules() if isinstance(m, nn.LayerNorm)} == {1e-5}


def test_bf16_is_close_to_fp32() -> None:
    module = TokensToToken(64, 3, 32).eval()
    with torch.no_grad():
        exact = module(images())
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.allclose(module(images()).float(), exact, atol=0.05)


# ---- fixed weights -------------------------------------------------------------------------------
def test_positions_and_random_features_are_not_trained() -> None:
    model = t2t()
    fixed = {"pos_embed", "patch_embed.attention1.w", "patch_embed.attention2.w"}
    assert fixed == model.state_dict().keys() - dict(model.named_parameters()).keys()
    before = {name: model.state_dict()[name].clone() for name in fixed}
    method = FineTune(model, FineTune.Settings(), seed=0)
    optimizer = torch.optim.AdamW(
        method.begin(step_context(TASK, "train", None, RATES, (TASK,))), lr=0.1
    )
    method.loss(large(), PROGRESS)[0].backward()
    optimizer.step()
    assert vit.compute_digest(model) != method.backbone_digest
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())


def test_random_features_depend_on_the_seed_and_enter_the_digest() -> None:
    one, two = t2t(), t2t()
    assert vit.compute_digest(one) == vit.compute_digest(two)
    two.patch_embed.attention2.w[0, 0] += 1e-3
    assert vit.compute_digest(one) != vit.compute_digest(two)
    torch.manual_seed(9)
    other = vit.build(TINY).eval()
    vit.from_bytes(other, vit.to_bytes(one), "weights")
    assert vit.compute_digest(other) == vit.compute_digest(one)
    assert torch.equal(other(images()), one(images()))


# ---- released weights ----------------------------------------------------------------------------
@pytest.mark.parametrize("prefix", ["", "module."])
def test_released_weights_load_with_their_original_names(prefix: str, tmp_path: Path) -> None:
    source = t2t()
    released = {
        prefix + name.replace("patch_embed.", "tokens_to_token."): t
        for name, t in source.state_dict().items()
    }
    settings = saved(
        released
        | {f"{prefix}head.weight": torch.zeros(10, 32), f"{prefix}head.bias": torch.zeros(10)},
        tmp_path,
    )
    torch.manual_seed(1)
    model = vit.build(settings).eval()
    assert not torch.equal(model(images()), source(images()))
    vit.load_weights(model, settings)
    assert torch.equal(model(images()), source(images()))
    assert vit.compute_digest(model) == vit.compute_digest(source)


def test_weights_of_another_image_size_get_resampled_positions(tmp_path: Path) -> None:
    settings = saved(t2t().state_dict(), tmp_path).model_copy(update={"img_size": 96})
    model: Any = vit.build(settings)
    vit.load_weights(model, settings)
    assert model.pos_embed.shape == (1, 37, 32)
    assert torch.equal(model.pos_embed[:, 0], sinusoids(17, 32)[:, 0])


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    tensors = t2t().state_dict()
    for changed, says in (
        ({n: t for n, t in tensors.items() if n != "patch_embed.attention1.w"}, "missing"),
        (tensors | {"blocks.3.norm1.weight": torch.ones(32)}, "unexpected"),
        (tensors | {"norm.weight": torch.ones(33)}, "norm.weight"),
    ):
        settings = saved(changed, tmp_path)
        with pytest.raises(
            UserError,
            match=f"do not fit 't2t_vit_12' .*{says}.*give weights of the same architecture",
        ):
            vit.load_weights(vit.build(settings), settings)
    with pytest.raises(UserError, match="its authors publish files of their own"):
        vit.load_weights(t2t(), TINY.model_copy(update={"weights": "hub"}))


def test_invalid_image_and_patch_sizes_are_refused() -> None:
    with pytest.raises(UserError, match="img_size must be a multiple of 16"):
        vit.outline(TINY.model_copy(update={"img_size": 72}))
    with pytest.raises(UserError, match="patch_size"):
        vit.outline(TINY.model_copy(update={"options": {"patch_size": 8}}))


# ---- MEAT on it ----------------------------------------------------------------------------------
def meat(**settings: Any) -> Meat:
    return Meat(t2t(), MeatSettings(**settings), seed=1)


def test_meat_starts_as_backbone_and_does_not_mask_patch_embedding() -> None:
    method = meat()
    method.begin(step_context(TASK, "train", None, RATES, (TASK,)))
    with torch.no_grad():
        assert torch.equal(
            method.eval().logits(images(), "one"), method.heads["one"](t2t()(images()))
        )
    assert all(name == "tokens" or name.startswith("blocks.") for name in method.mask_shapes())
    assert method.mask_shapes()["tokens"] == (3, 16)


def test_meat_keeps_the_backbone_and_earlier_answers() -> None:
    method = meat()
    answers = {}
    for task in (TASK, OTHER):
        optimizer = torch.optim.AdamW(
            method.begin(step_context(task, "train", None, RATES, (task,))), lr=RATES.lr
        )
        for _ in range(4):
            optimizer.zero_grad()
            method.loss(large(), PROGRESS)[0].backward()
            optimizer.step()
        method.load_task(TaskState.from_bytes(method.finish()[0].to_bytes()))
        answers[task.name] = method.eval().logits(images(), task.name)
    assert all(
        torch.equal(method.logits(images(), name), logits_before)
        for name, logits_before in answers.items()
    )
    assert vit.compute_digest(method.backbone) == method.backbone_digest


def test_tfm_counts_the_operations_of_the_tokens_to_token_module() -> None:
    method = Tfm(t2t(), TfmSettings(growth=0.25, heads_every=1), seed=1)
    method.begin(step_context(TASK, "train", None, RATES, (TASK,)))
    state, _ = method.finish()
    embedding = method.backbone.get_submodule("patch_embed")
    block = 17 * 32 * (4 * 32 + 4 * 32) + 2 * 17 * 17 * 32
    backbone = count_multiply_adds(embedding, 3, 64, 64) + 3 * block
    used = {name: int(m.sum()) for name, m in state.masks.items() if name.endswith(".used")}
    new_channels = used["blocks.0.v.used"] - 32
    new_neurons = used["blocks.0.ff.used"] - 64
    assert new_channels > 0
    assert new_neurons > 0
    grown = 3 * (17 * 32 * (4 * new_channels + 2 * new_neurons) + 2 * 17 * 17 * new_channels)
    assert method.flops_share(state) == pytest.approx((backbone + grown) / backbone)


@pytest.mark.parametrize("ffn", ["weight", "neuron"])
def test_compact_inference_equals_dense_inference_and_costs_less(ffn: str) -> None:
    method = meat(ffn_masks=ffn).eval()
    state = with_random_masks(method)
    method.load_task(state)
    assert torch.allclose(
        method.compact("one")(images()), method.logits(images(), "one"), atol=1e-5, rtol=1e-5
    )
    # Linear layers
    embedding = (
        3 * 7 * 7 * 192 * 256
        + 3 * 64 * 64 * 256
        + 64 * 9 * 192 * 64
        + 3 * 64 * 64 * 64
        + 64 * 9 * 32 * 16
    )
    features = (4 * 64 * 32 + 2 * 32) * (256 + 64) - 2 * 32 * (256 + 64) + 32 * (256 + 64)
    block = 17 * (4 * 32 * 32 + 2 * 17 * 32 + 4 * 32 * 32)
    # the class token is the only query of the last block
    last = 16 * (2 * 32 * 32 + 17 * 32 * 2 + 4 * 32 * 32)
    sites: Any = method.sites
    plans = plan_blocks(method.backbone, sites.by_block({}))
    assert flops(method.backbone, plans) == embedding + features + 3 * block - last
    assert method.flops_share(state) < 1


def test_operations_are_counted_on_a_meta_device_backbone() -> None:
    """A forecast of the cost builds the backbone on the device `meta`, which autocast refuses."""
    outline = vit.outline(TINY)
    assert next(outline.parameters()).is_meta
    counted = count_multiply_adds(outline, 3, 64, 64)
    # some kernels of attention are not counted on the CPU
    assert counted == pytest.approx(count_multiply_adds(t2t(), 3, 64, 64), rel=0.01)


@pytest.mark.parametrize(
    "promise", ["old_answers_stay", "the_stored_bytes_are_the_method", "the_backbone_stays_frozen"]
)
def test_method_promises_hold_on_t2t_vit(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, promise: str
) -> None:
    tiny = {
        "name": "t2t_vit_12",
        "img_size": 32,
        "crop_pct": 1.0,
        "options": {"embed_dim": 32, "depth": 2, "num_heads": 2},
    }
    monkeypatch.setattr(stage_lab, "TINY", tiny)
    PROMISES[promise].check(lab, "meat", "adamw")
