"""Tests of ConvNeXt backbones: construction, loading, digests, compilation, and all methods."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch
from method_steps import images
from timm.models.convnext import ConvNeXt
from torch import nn

from pipeline.testing.lab import OPTIMIZERS, Lab, compute_task_logits
from workers.errors import UserError
from workers.job import BackboneSettings, ContextSettings
from workers.methods import METHODS
from workers.methods.toast import Toast
from workers.model import vit
from workers.model.noise import DrawnDropPath, draw_paths
from workers.model.norms import norm_parameter_names
from workers.rng import StepRng

SMALL = {"depths": [1, 2, 1, 1], "dims": [8, 16, 16, 32], "patch_size": 1}  # total stride 8
TINY = BackboneSettings(name="convnext_atto", img_size=16, options=SMALL)
REFUSED = {
    "aper": "first_session is 'adapter', which works on .*set first_session to finetune",
    "lora": "'lora' with target 'qkv' has no layer to update.*set target=linear",
    "meat": "the backbone is a ConvNeXt, which has neither image tokens nor inner channels of "
    "residual convolutions to mask",
}


def convnext(img_size: int = 16, **options: Any) -> Any:
    """Return a ConvNeXt with random parameters. timm's initial layer scale is too small for blocks
    to matter."""
    torch.manual_seed(0)
    model = vit.build(TINY.model_copy(update={"img_size": img_size, "options": SMALL | options}))
    for name, p in model.named_parameters():
        nn.init.normal_(p, std=0.1 if name.endswith("bias") else 0.4)
    return model.eval()


# ---- construction --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "name", ["convnext_atto", "convnext_tiny_hnf", "convnextv2_atto", "convnext_zepto_rms_ols"]
)
def test_convnext_variants_return_flat_features(name: str) -> None:
    settings = TINY.model_copy(update={"name": name, "img_size": 32})
    assert isinstance(vit.outline(settings), ConvNeXt)
    model: Any = vit.build(settings).eval()
    assert model.num_features == 32
    assert model(images(img_size=32)).shape == (8, 32)


@pytest.mark.parametrize(
    ("img_size", "options", "stride"),
    [
        (40, {"patch_size": 4}, 32),
        (16, {"patch_size": 4}, 32),
        (48, {"patch_size": 2}, 32),
        (40, {"patch_size": 4, "output_stride": 16}, 16),
        (12, {}, 8),
    ],
)
def test_image_size_not_divisible_by_total_stride_is_refused(
    img_size: int, options: dict[str, Any], stride: int
) -> None:
    settings = TINY.model_copy(update={"img_size": img_size, "options": SMALL | options})
    with pytest.raises(
        UserError,
        match=f"backbone.img_size is {img_size}, which is not a multiple of the total stride "
        f"{stride} of 'convnext_atto'",
    ):
        vit.build(settings)
    fitting = settings.model_copy(update={"img_size": 3 * stride})
    assert vit.build(fitting)(images(img_size=3 * stride)).shape == (8, 32)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"drop_rate": 0.1},
            r"backbone\.options\.drop_rate is 0\.1; timm draws who is dropped separately",
        ),
        (
            {"global_pool": ""},
            r"makes features of shape \(1, 32, 2, 2\) of an image, where heads read \(1, 32\); "
            r"leave out global_pool",
        ),
        (
            {"img_size": 16},
            r"backbone\.options\.img_size is 16, and 'convnext_atto' has no such option",
        ),
    ],
)
def test_unsupported_convnext_options_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        vit.outline(TINY.model_copy(update={"options": SMALL | options}))


@pytest.mark.parametrize("kind", ["cb", "cbs", "replace", "parallel"])
def test_context_broadcasting_is_refused_for_convnext(kind: Any) -> None:
    with pytest.raises(
        UserError,
        match=f"backbone.context.kind is '{kind}', and the backbone is a ConvNeXt, which has no "
        "tokens; leave",
    ):
        vit.outline(TINY.model_copy(update={"context": ContextSettings(kind=kind)}))


def test_stochastic_depth_is_drawn_per_sample() -> None:
    model = vit.build(TINY.model_copy(update={"drop_path": 0.5}))
    paths = [m for m in model.modules() if isinstance(m, DrawnDropPath)]
    assert [p.drop_prob for p in paths] == pytest.approx([0.125, 0.25, 0.375, 0.5])
    for p in model.parameters():
        nn.init.normal_(p, std=0.4)
    rows = torch.arange(8)
    draw_paths(model.train(), StepRng(7, 0, 0, rows, 8, torch.device("cpu")))
    whole = model(images())
    draw_paths(model, StepRng(7, 0, 0, rows[5:], 8, torch.device("cpu")))
    assert torch.allclose(model(images()[5:]), whole[5:], atol=1e-5)
    assert not torch.allclose(model.eval()(images()), whole, atol=1e-2)


# ---- loading -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "options", [{}, {"head_norm_first": True}, {"use_grn": True, "ls_init_value": None}]
)
def test_weight_file_loads_last_norm_and_ignores_classifier(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    source, path = convnext(**options), str(tmp_path / "convnext.safetensors")
    safetensors.torch.save_file(
        source.state_dict()
        | {"head.fc.weight": torch.zeros(9, 32), "head.fc.bias": torch.zeros(9)},
        path,
    )
    settings = TINY.model_copy(update={"weights": path, "options": SMALL | options})
    model = vit.build(settings)
    vit.load_weights(model, settings)
    assert torch.equal(model.eval()(images()), source(images()))
    assert vit.compute_digest(model) == vit.compute_digest(source)
    deeper = settings.model_copy(update={"options": {**SMALL, **options, "depths": [1, 3, 1, 1]}})
    with pytest.raises(
        UserError,
        match=r"do not fit 'convnext_atto' .*missing.*give weights of the same architecture",
    ):
        vit.load_weights(vit.build(deeper), deeper)


def test_weights_under_the_names_of_the_papers_code_are_read(tmp_path: Path) -> None:
    source, path = convnext(), str(tmp_path / "convnext.safetensors")
    safetensors.torch.save_file(
        as_released(source.state_dict())
        | {"head.weight": torch.zeros(9, 32), "head.bias": torch.zeros(9)},
        path,
    )
    settings = TINY.model_copy(update={"weights": path})
    model = vit.build(settings)
    vit.load_weights(model, settings)
    assert torch.equal(model.eval()(images()), source(images()))


def as_released(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    renamed_state = {}
    for name, tensor in tensors.items():
        parts = (
            name.replace("conv_dw", "dwconv")
            .replace("mlp.fc", "pwconv")
            .replace("head.norm", "norm")
            .split(".")
        )
        if parts[0] == "stem":
            parts[:1] = ["downsample_layers", "0"]
        elif parts[0] == "stages" and parts[2] == "downsample":
            parts[:3] = ["downsample_layers", parts[1]]
        elif parts[0] == "stages":
            parts.remove("blocks")
        renamed_state[".".join(parts)] = tensor
    return renamed_state


def test_timm_hub_weights_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    create = timm.create_model
    source: Any = create(
        "convnext_atto", num_classes=7, depths=(1, 2, 1, 1), dims=(8, 16, 16, 32), patch_size=1
    )
    monkeypatch.setattr(
        timm,
        "create_model",
        lambda name, pretrained=False, **rest: source if pretrained else create(name, **rest),
    )
    settings = TINY.model_copy(update={"weights": "hub"})
    model = vit.build(settings)
    vit.load_weights(model, settings)
    source.eval()
    expected = source.forward_head(source.forward_features(images()), pre_logits=True)
    assert torch.equal(model.eval()(images()), expected)


def test_convnext_round_trips_bytes_and_digest_includes_last_norm() -> None:
    one = convnext()
    two: Any = vit.build(TINY)
    vit.from_bytes(two, vit.to_bytes(one), "weights")
    assert vit.compute_digest(one) == vit.compute_digest(two)
    two.head.norm.weight.data[0] += 1e-3
    assert vit.compute_digest(one) != vit.compute_digest(two)
    assert {
        "stem.1.weight",
        "stages.1.downsample.0.bias",
        "stages.3.blocks.0.norm.weight",
        "head.norm.weight",
    } <= {*norm_parameter_names(one)}


@pytest.mark.slow
def test_each_convnext_block_compiles_with_and_without_gradients() -> None:
    model, plain = convnext(), convnext()
    torch.compiler.reset()
    vit.compile_blocks(model, backend="eager")
    assert sum(m._compiled_call_impl is not None for m in model.modules()) == 5
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for count in (8, 5, 3):
            model.train()(images(count)).sum().backward()
            with torch.no_grad():
                assert torch.equal(model.eval()(images(count)), plain(images(count)))
                assert torch.equal(
                    model.stages(model.stem(images(count))), plain.stages(plain.stem(images(count)))
                )


# ---- methods -------------------------------------------------------------------------------------
@pytest.mark.few(2)
@pytest.mark.parametrize("name", METHODS)
def test_convnext_works_or_is_refused_before_run(lab: Lab, name: str) -> None:
    backbone = {"name": "convnext_atto", "img_size": 16, "crop_pct": 1.0, "options": SMALL}
    if (METHODS[name].needs_vit and not issubclass(METHODS[name], Toast)) or name in REFUSED:
        says = REFUSED.get(
            name,
            f"'{name}' works on the blocks of a vision transformer .*, and the backbone is a "
            "ConvNeXt; choose another method, or",
        )
        with pytest.raises(UserError, match=f"methods.{name}: {says}") as refused:
            lab.run_of(name, {}, backbone=backbone)
        assert "\n" not in str(refused.value)
        return
    run = lab.run_of(name, {**OPTIMIZERS["adamw"], "epochs": 1}, backbone=backbone)
    for task in (0, 1):
        logits = compute_task_logits(run.served(1), run.images(task), run.order[task])
        assert logits.shape == (len(run.images(task)), 2 + task)
        assert logits.isfinite().all()
        assert run.evaluated(task)["rows"]
