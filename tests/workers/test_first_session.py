"""Tests of first-session adaptation: the first task adapts the features for all later tasks."""

from __future__ import annotations

from typing import Any, get_args

import method_steps
import pytest
import torch
from method_steps import images, other_vit, vit
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from pipeline.testing import lab as stage_lab
from pipeline.testing.lab import OPTIMIZERS, TASKS, Lab, Run, compute_task_logits
from pipeline.testing.promises import PROMISES
from workers.errors import UserError
from workers.job import find_idle, key_inputs
from workers.methods.bases.first_session import (
    Adapters,
    FineTuned,
    FirstSessionSettings,
    ScalesAndShifts,
    Variant,
    create_adaptation,
)
from workers.methods.ranpac import Ranpac, RanpacSettings
from workers.model.vit import compute_digest
from workers.storage.taskstate import Carried

VARIANTS = get_args(Variant)
RANPAC = {"projection": 20}


def adaptation_of(variant: str, backbone: nn.Module, **settings: Any) -> Any:
    return create_adaptation(backbone, FirstSessionSettings(first_session=variant, **settings))


def run_of(lab: Lab, variant: str, method: str = "ranpac", **rest: Any) -> Run:
    settings = {**(RANPAC if method == "ranpac" else {}), "first_session": variant}
    return lab.run_of(method, {**OPTIMIZERS["adamw"], "epochs": 1}, settings=settings, **rest)


# ---- features ------------------------------------------------------------------------------------
@pytest.mark.parametrize("variant", ["adapter", "finetune", "ssf"])
def test_neutral_adaptation_leaves_the_features_unchanged(variant: str) -> None:
    backbone = vit()
    adaptation = adaptation_of(variant, backbone)
    if variant == "ssf":
        nn.init.ones_(adaptation.values["scale"])
        nn.init.zeros_(adaptation.values["shift"])
    expected = vit()(images())
    assert torch.equal(adaptation(backbone, images(), {}), expected)
    assert torch.equal(backbone(images()), expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_adaptation_changes_the_features_and_not_the_backbone(variant: str) -> None:
    backbone = vit()
    adaptation = adaptation_of(variant, backbone)
    with torch.no_grad():
        for parameter in adaptation.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    expected = vit()(images())
    assert not torch.allclose(adaptation(backbone, images(), {}), expected, atol=1e-2)
    assert torch.equal(backbone(images()), expected)
    assert compute_digest(backbone) == compute_digest(vit())


@torch.no_grad()
def test_scales_and_shifts_fold_into_the_layers_before_them() -> None:
    backbone, folded = vit(), vit()
    adaptation = adaptation_of("ssf", backbone)
    assert isinstance(adaptation, ScalesAndShifts)
    for parameter in adaptation.parameters():
        parameter.add_(0.1 * torch.randn(parameter.shape))
    values = iter(
        zip(*adaptation.sites.split(dict(adaptation.values.items())).values(), strict=True)
    )
    layers = 0
    for name, module in folded.named_modules():
        is_embedding = name == "patch_embed.proj"
        if is_embedding or isinstance(module, (nn.Linear, nn.LayerNorm)):
            scale, shift = next(values)
            shape = (-1, *[1] * (module.weight.ndim - 1))
            module.weight.mul_(scale.reshape(shape))
            module.bias.mul_(scale).add_(shift)
            layers += 1
    # patch embedding, final norm, and per block qkv, proj, fc1, fc2 and two norms
    assert layers == len(adaptation.sites) == 2 + 6 * len(folded.blocks)
    assert torch.allclose(adaptation(backbone, images(), {}), folded(images()), atol=1e-5)


def test_scales_start_around_one_and_shifts_around_zero() -> None:
    torch.manual_seed(0)
    values = {k: t.detach() for k, t in adaptation_of("ssf", vit()).values.items()}
    assert float(values["scale"].mean()) == pytest.approx(1, abs=0.005)
    assert float(values["shift"].mean()) == pytest.approx(0, abs=0.005)
    for tensor in values.values():
        assert float(tensor.std()) == pytest.approx(0.02, rel=0.2)


def test_adaptformer_adapters_use_dropout_only_in_training() -> None:
    method = Ranpac(
        vit(), RanpacSettings(first_session="adapter", adapter_width=8, projection=0), 0
    )
    groups = method_steps.begun(method, step="adapt")
    assert isinstance(method.adaptation, Adapters)
    assert [group["name"] for group in groups] == [
        *("head", "head.scale", "adapters", "adapters.bias")
    ]
    nn.init.normal_(method.adaptation.bottlenecks.up)
    method.train()
    batch = method_steps.batch()
    dropped, _ = method.loss(batch, method_steps.PROGRESS)
    kept = method.weight_overrides["kept"]
    assert sorted(kept.unique().tolist()) == pytest.approx([0, 1 / 0.9])
    assert float((kept == 0).float().mean()) == pytest.approx(0.1, abs=0.05)
    method.adaptation.dropout = 0.0
    plain, _ = method.loss(batch, method_steps.PROGRESS)
    assert not torch.equal(dropped, plain)
    method.eval()
    method.adaptation.dropout = 0.1
    method.loss(batch, method_steps.PROGRESS)
    assert torch.equal(method.loss(batch, method_steps.PROGRESS)[0], plain)


def test_fine_tuning_trains_a_copy_of_all_weights() -> None:
    method = Ranpac(vit(), RanpacSettings(first_session="finetune", projection=0), 0)
    groups = method_steps.begun(method, step="adapt")
    assert isinstance(method.adaptation, FineTuned)
    trained = {id(p) for group in groups for p in group["params"]}
    assert {id(p) for p in method.adaptation.parameters()} < trained
    assert not trained & {id(p) for p in method.backbone.parameters()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_temporary_head_scores_by_scaled_cosines(variant: str) -> None:
    method = Ranpac(vit(), RanpacSettings(first_session=variant, head_scale=16.0), 0)
    method_steps.begun(method, step="adapt")
    method.eval()
    weight = method.heads["one"].weight[:, 0]
    assert method.adaptation is not None
    features = method.adaptation(method.backbone, images(), {})
    expected = 16 * nn.functional.cosine_similarity(features[:, None], weight, dim=2)
    assert torch.allclose(method.logits(images(), "one"), expected, atol=1e-5)
    method.scenario = "class"
    assert torch.allclose(method.logits(images(), None), expected, atol=1e-5)
    assert method.competing_outputs() == 2


# ---- backbones -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("variant", "name", "text"),
    [
        ("ssf", "eva02_tiny_patch14_224", "first_session is 'ssf'.* Eva; set first_session to"),
        ("adapter", "resnet18", "first_session is 'adapter'.*a ResNet"),
        ("vpt-deep", "convnext_atto", "first_session is 'vpt-deep'.*a ConvNeXt"),
    ],
)
def test_backbone_without_required_layers_is_refused(variant: str, name: str, text: str) -> None:
    backbone = (
        other_vit(name)
        if "eva" in name
        else method_steps.build(method_steps.BackboneSettings(name=name, img_size=32))
    )
    with pytest.raises(UserError, match=text):
        Ranpac.check_backbone(RanpacSettings(first_session=variant), backbone)
    Ranpac.check_backbone(RanpacSettings(first_session="finetune"), backbone)


def test_other_families_of_vits_are_adapted_too() -> None:
    backbone = other_vit("eva02_tiny_patch14_224")
    assert not isinstance(backbone, VisionTransformer)
    for variant in ("adapter", "vpt-shallow", "vpt-deep"):
        Ranpac.check_backbone(RanpacSettings(first_session=variant), backbone)
        assert adaptation_of(variant, backbone)(backbone, images(), {}).shape == (8, 32)


# ---- stages --------------------------------------------------------------------------------------
def test_only_the_first_task_adapts() -> None:
    settings = RanpacSettings(first_session="ssf")
    names = [[step.name for step in Ranpac.steps_for(settings, at)] for at in range(3)]
    assert names == [["adapt", "statistics"], ["statistics"], ["statistics"]]
    plain = Ranpac.steps_for(RanpacSettings(), 0)
    assert [step.name for step in plain] == ["statistics"]


def test_unused_first_session_settings_are_not_in_the_key() -> None:
    own = {"projection", "ridge"}
    assert key_inputs(RanpacSettings()).keys() == own
    assert key_inputs(RanpacSettings(first_session="adapter")).keys() == {*own, "first_session"}
    assert find_idle(RanpacSettings(first_session="ssf")).keys() == {
        *("adapter_width", "adapter_dropout", "prompts")
    }


def adapted(carried: Carried) -> dict[str, Tensor]:
    return {k: t for k, t in carried.tensors.items() if k.startswith("adaptation/")}


@pytest.mark.parametrize("variant", VARIANTS)
def test_later_tasks_carry_and_serve_the_adapted_features(lab: Lab, variant: str) -> None:
    run = run_of(lab, variant)
    adapt, *_ = run.stages(0)
    assert (adapt.step, [job.step for job in run.stages(1)]) == ("adapt", ["statistics"])
    trained = Carried.from_bytes(run.artifact(adapt).read("carried.safetensors"))
    start = run.fresh()
    assert isinstance(start, Ranpac)
    assert start.adaptation is not None
    assert adapted(trained).keys() == {f"adaptation/{k}" for k in start.adaptation.state_dict()}
    for task in (0, 1):
        carried, served = adapted(run.carried(task)), run.served(task)
        assert carried.keys() == adapted(trained).keys()
        assert all(torch.equal(carried[name], adapted(trained)[name]) for name in carried)
        assert isinstance(served, Ranpac)
        assert compute_digest(served.backbone) == served.backbone_digest
        assert served.adaptation is not None
        plain = served.backbone(run.images(task))
        features = served.adaptation(served.backbone, run.images(task), {})
        assert torch.equal(served.features(run.images(task)), features)
        assert not torch.allclose(features, plain, atol=1e-4)
        expected = served.heads[run.order[task]](served.project(features))
        assert torch.equal(compute_task_logits(served, run.images(task), run.order[task]), expected)


def test_the_first_session_lowers_its_loss(lab: Lab) -> None:
    settings = {**RANPAC, "first_session": "finetune", "head_scale": 16.0}
    run = lab.run_of("ranpac", {**OPTIMIZERS["adamw"], "lr": 1e-3, "epochs": 4}, settings=settings)
    losses = [row["loss"] for row in stage_lab.history(run.artifact(run.stages(0)[0]))]
    assert losses[-1] < 0.7 * losses[0]


def test_class_scenario_adapts_to_the_same_tensors_as_task_scenario(lab: Lab) -> None:
    """The first task has no other classes to compete with."""
    told, found = run_of(lab, "adapter"), run_of(lab, "adapter", scenario="class")
    tensors = adapted(told.carried(1))
    assert all(torch.equal(t, tensors[name]) for name, t in adapted(found.carried(1)).items())
    assert found.served(1).logits(found.images(0), None).shape[1] == len(sum(TASKS.values(), ()))


# ---- carried states of other settings ------------------------------------------------------------
@pytest.mark.parametrize(
    ("settings", "change"),
    [
        ({"first_session": "adapter", "adapter_width": 8}, {"adapter_width": 9}),
        ({"first_session": "vpt-deep"}, {"first_session": "vpt-shallow"}),
        ({"first_session": "ssf"}, {"first_session": "none"}),
        ({"first_session": "none"}, {"first_session": "ssf"}),
    ],
)
def test_a_carried_state_of_other_settings_is_refused(
    settings: dict[str, Any], change: dict[str, Any]
) -> None:
    method = Ranpac(vit(), RanpacSettings(**settings), 0)
    method_steps.begun(method, step="adapt") if method.adaptation else None
    tensors = {}
    if method.adaptation is not None:
        tensors = {f"adaptation/{k}": t for k, t in method.adaptation.state_dict().items()}
    carried = Carried({**tensors, "gram": torch.zeros(0)}, {"validated": 0})
    Ranpac(vit(), RanpacSettings(**settings), 0).load_carried(carried)
    other = Ranpac(vit(), RanpacSettings(**{**settings, **change}), 0)
    with pytest.raises(UserError, match="does not match first_session"):
        other.load_carried(carried)


# ---- promises ------------------------------------------------------------------------------------
TRAINED = (
    "the_backbone_stays_frozen",
    "training_draws_from_the_batch_alone",
    "an_interrupted_stage_ends_as_if_it_had_not_been",
    "a_chain_forgets_nothing_that_it_carries",
    "answers_are_the_same_twice_and_in_any_turn",
    "measuring_has_no_part_in_training",
)


@pytest.mark.few(2)
@pytest.mark.parametrize("promise", TRAINED)
@pytest.mark.parametrize("variant", VARIANTS)
def test_first_session_keeps_the_promises(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, variant: str, promise: str
) -> None:
    settings = {**RANPAC, "first_session": variant}
    monkeypatch.setitem(stage_lab.SETTINGS, ("ranpac", "adamw"), settings)
    PROMISES[promise].check(lab, "ranpac", "adamw")
