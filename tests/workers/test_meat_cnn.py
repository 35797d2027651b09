"""Tests of MEAT on a ResNet (masks of channels and convolutions), and of CNNs as backbones."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from method_steps import PROGRESS
from step_contexts import step_context
from test_meat import (
    OTHER,
    RATES,
    TASK,
    batch,
    gradient_of,
    images,
    trained,
    with_random_masks,
)
from torch import Tensor, nn

from pipeline.testing import lab as stage_lab
from pipeline.testing.lab import OPTIMIZERS, Lab, compute_task_logits
from pipeline.testing.promises import PROMISES
from workers.errors import UserError
from workers.job import BackboneSettings
from workers.methods import METHODS
from workers.methods.finetune import FineTune
from workers.methods.meat import Meat, MeatSettings, drop_control
from workers.model import vit
from workers.model.compact import count_multiply_adds
from workers.model.masked import GatedConv2d
from workers.model.sites import find_sites
from workers.storage.taskstate import TaskState

BASIC = BackboneSettings(
    name="resnet18", img_size=32, options={"layers": [1, 1, 1, 1], "channels": [8, 8, 16, 16]}
)
BOTTLENECK = BASIC.model_copy(update={"name": "resnet50"})
GROUPS = {"norm_layer": "groupnorm1"}
BOTH = pytest.mark.parametrize("settings", [BASIC, BOTTLENECK], ids=["basic", "bottleneck"])


def resnet(settings: BackboneSettings = BASIC, **options: Any) -> Any:
    """Return a ResNet with random statistics and norm weights, because zeros could hide errors."""
    torch.manual_seed(0)
    model = vit.build(settings.model_copy(update={"options": settings.options | options}))
    for name, tensor in model.state_dict().items():
        if name.endswith("running_var") or (tensor.ndim == 1 and name.endswith("weight")):
            nn.init.uniform_(tensor, 0.5, 1.5)
        elif tensor.ndim == 1:
            nn.init.normal_(tensor, std=0.2)
    return model.eval()


def meat(backbone: nn.Module | None = None, **settings: Any) -> Meat:
    return Meat(backbone or resnet(), MeatSettings(**settings), seed=1)


def begun(method: Meat) -> Meat:
    method.begin(step_context(TASK, "train", None, RATES, (TASK,)))
    return method


def served(method: Meat, state: TaskState) -> Tensor:
    method.load_task(state)
    return method.eval().logits(images(), state.task)


# ---- positions of the masks ----------------------------------------------------------------------
def test_resnet_mask_sizes_follow_from_widths() -> None:
    def bits(name: str, entries: Any) -> int:
        sites = find_sites(vit.outline(BackboneSettings(name=name, weights="hub")), "all", entries)
        return (
            TaskState(
                "t",
                (),
                "meat",
                "",
                masks={n: torch.ones(s) > 0 for n, s in (sites.gates | sites.entries).items()},
            ).sizes()["masks"]
            * 8
        )

    channels = 2 * (64 + 128 + 256 + 512)
    assert bits("resnet18", "off") == channels
    assert (
        bits("resnet18", "weight")
        == channels
        + 4 * 9 * (64**2 + 128**2 + 256**2 + 512**2)
        - 9 * (128**2 + 256**2 + 512**2) // 2
    )
    assert bits("resnet50", "off") == 2 * (3 * 64 + 4 * 128 + 6 * 256 + 3 * 512)


def test_gates_sit_inside_blocks_and_never_on_the_residual_stream() -> None:
    for settings, inner in ((BASIC, ["channels1"]), (BOTTLENECK, ["channels1", "channels2"])):
        method = meat(resnet(settings))
        assert [*method.sites.gates] == [f"blocks.{i}.{kind}" for i in range(4) for kind in inner]
        convs = len(inner) + 1
        assert [*method.sites.entries] == [
            f"blocks.{i}.conv{k}" for i in range(4) for k in range(1, convs + 1)
        ]
        gated = {
            name
            for name, module in method.backbone.named_modules()
            if isinstance(module, GatedConv2d)
        }
        assert gated == {f"layer{i}.0.conv{k}" for i in range(1, 5) for k in range(1, convs + 1)}
        with method.sites.sampled(
            {name: torch.zeros(8, *shape) for name, shape in method.sites.gates.items()}
        ):
            for module in (m for m in method.backbone.modules() if isinstance(m, GatedConv2d)):
                reads_the_stream = any(
                    module is getattr(method.backbone, f"layer{i}")[0].conv1 for i in range(1, 5)
                )
                assert (module.gate is None) == reads_the_stream
        state = with_random_masks(method)
        state.masks = {name: torch.zeros_like(mask) for name, mask in state.masks.items()}
        assert bool(served(method, state).std(dim=0).gt(1e-3).any()), (
            "with every inner channel dropped, images still pass through the shortcuts"
        )


def test_masks_sit_only_in_the_configured_blocks() -> None:
    method = meat(token_mask_blocks=[2, 0], ffn_masks="off")
    assert method.mask_shapes() == {"blocks.0.channels1": (8,), "blocks.2.channels1": (16,)}
    with pytest.raises(
        UserError, match=r"token_mask_blocks is \[4\], but the backbone has blocks 0 to 3"
    ):
        meat(token_mask_blocks=[4])
    with pytest.raises(UserError, match=r"token_masks is 'nested'.* masks of channels.* `free`"):
        meat(token_masks="nested")
    with pytest.raises(UserError, match="has blocks"):
        meat(token_mask_blocks=[0, 1], ffn_masks="off").load_task(with_random_masks(method))


# ---- effects of the masks ------------------------------------------------------------------------
@BOTH
def test_untouched_masks_keep_backbone_logits_bit_identical(settings: Any) -> None:
    method, plain = begun(meat(resnet(settings))).eval(), resnet(settings)
    with torch.no_grad():
        want = method.heads["one"](plain(images()))
    assert torch.equal(method.logits(images(), "one"), want)
    assert torch.equal(served(meat(resnet(settings)), method.finish()[0]), want)
    with method.sites.sampled(
        {name: torch.ones(8, *shape) for name, shape in method.sites.gates.items()}
    ):
        assert torch.equal(method.heads["one"](method.features(images())), want)


@BOTH
def test_dropped_channel_has_no_influence_for_any_weights(
    settings: Any,
) -> None:
    first, second = (meat(resnet(settings), ffn_masks="off") for _ in range(2))
    state = with_random_masks(first)
    before = served(first, state)
    for name, mask in state.masks.items():
        sites: Any = second.sites
        path, follower = sites.followers[name]
        k = int(name[-1])
        block = second.backbone.get_submodule(path.removesuffix(f".conv{k + 1}.weight"))
        with torch.no_grad():
            getattr(block, f"conv{k}").weight[~mask] += 1.0
            getattr(block, f"bn{k}").bias[~mask] += 1.0
            follower.weight[:, ~mask] -= 1.0
    second.backbone_digest = first.backbone_digest
    assert torch.equal(served(second, state), before)
    state.masks = {name: torch.ones_like(mask) for name, mask in state.masks.items()}
    assert not torch.allclose(served(second, state), before, atol=1e-2)


@BOTH
@pytest.mark.parametrize("ffn", ["weight", "off"])
def test_served_logits_equal_training_form_with_hard_masks(settings: Any, ffn: str) -> None:
    method = meat(resnet(settings), ffn_masks=ffn)
    state = with_random_masks(method)
    want = served(method, state)
    masks = {
        name: mask.float().expand(8, *mask.shape) if name in method.sites.gates else mask.float()
        for name, mask in state.masks.items()
    }
    method.active_task, method.weight_overrides = None, method.sites.weights(masks)
    with method.sites.sampled(masks), torch.no_grad():
        logits = method.heads["one"](method.features(images()))
    assert torch.allclose(logits, want, atol=1e-5)
    assert not torch.allclose(
        want,
        served(
            meat(resnet(settings), token_masks=False, ffn_masks="off"),
            TaskState(
                "one",
                TASK.classes,
                "meat",
                method.backbone_digest,
                head=state.head,
                meta={"token_blocks": []},
            ),
        ),
        atol=1e-3,
    )


def test_dropped_channels_get_gradients_per_image() -> None:
    method = begun(meat(gamma=0.2))
    gates = method.sample_gates(batch().draw)
    assert {name: tuple(gate.shape) for name, gate in gates.items()} == {
        f"blocks.{i}.channels1": (8, w) for i, w in enumerate((8, 8, 16, 16))
    }
    first, seen = gates["blocks.0.channels1"], list[Tensor]()
    assert not torch.equal(first[0], first[1])
    sites: Any = method.sites
    conv = sites.followers["blocks.0.channels1"][1]
    hook = conv.register_forward_pre_hook(lambda module, _: seen.append(module.gate))
    method.loss(batch(0, range(5, 8)), PROGRESS)
    hook.remove()
    assert torch.equal(seen[0], first[5:8])
    masks = {name: gate.detach().requires_grad_() for name, gate in gates.items()}
    with method.sites.sampled(masks):
        method.classification_loss(method.features(batch().images), batch()).backward()
    for mask in masks.values():
        gradient = mask.grad
        assert gradient is not None
        assert bool((gradient[mask == 0] != 0).any()), "a dropped channel must be able to come back"
    method.loss(batch(), PROGRESS)[0].backward()
    assert all(bool((gradient_of(m.logits) != 0).any()) for m in method.masks.values())


def test_drop_control_is_a_mean_over_layers_of_any_width() -> None:
    gates = [
        torch.tensor([[1.0, 0.0, 1.0]], requires_grad=True),
        torch.tensor([[1.0, 1.0, 1.0, 1.0, 0.0]]),
    ]
    loss = drop_control(gates, 0.9)
    loss.backward()
    assert loss.item() == pytest.approx(((0.9 - 2 / 3) ** 2 + 0.1**2) / 2)
    assert torch.allclose(gradient_of(gates[0]), torch.full((1, 3), 2 / (2 * 3) * (2 / 3 - 0.9)))
    method = begun(meat(gamma=0.2))
    _, terms = method.loss(batch(), PROGRESS)
    shares = [gate.mean() for gate in method.sample_gates(batch().draw).values()]
    assert terms["drop_control"].item() == pytest.approx(
        sum((0.9 - s.item()) ** 2 for s in shares) / 4
    )


def test_ranks_sample_what_one_process_samples() -> None:
    def gradients(parts: list[range]) -> list[Tensor]:
        method = begun(meat(gamma=0.5))
        for rows in parts:
            part = batch(0, rows)
            (method.loss(part, PROGRESS)[0] * part.weight).backward()
        return [gradient_of(m.logits) for m in method.masks.values()]

    for one, two in zip(gradients([range(8)]), gradients([range(5), range(5, 8)]), strict=True):
        assert torch.allclose(one, two, atol=1e-6)


# ---- training and serving ------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("settings", "kinds"),
    [
        ({}, {"channels1", "conv1", "conv2"}),
        ({"ffn_masks": "off"}, {"channels1"}),
        ({"token_masks": False}, {"conv1", "conv2"}),
        ({"token_masks": False, "ffn_masks": "off"}, set()),
    ],
)
def test_training_changes_masks_and_head_but_not_the_backbone(settings: Any, kinds: Any) -> None:
    method = meat(**settings)
    before = copy.deepcopy(method.backbone.state_dict())
    state = trained(method)
    assert {name.rsplit(".", 1)[-1] for name in state.masks} == kinds
    assert all(
        n.startswith(("heads.", "mask_modules."))
        for n, p in method.named_parameters()
        if p.requires_grad
    )
    assert vit.compute_digest(method.backbone) == method.backbone_digest
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in method.backbone.state_dict().items()
    )
    shares = {"channels1": "channel_keep", "conv1": "convolution_density"}
    assert method.metrics().keys() == {name for kind, name in shares.items() if kind in kinds} | (
        {"flipped"} if kinds else set()
    )


def test_old_cnn_task_is_served_bit_for_bit() -> None:
    method = meat(mask_travel=20)
    answers = {}
    for task in (TASK, OTHER):
        state = trained(method, task)
        assert any(not mask.all() for mask in state.masks.values())
        answers[task.name] = served(method, TaskState.from_bytes(state.to_bytes()))
    fresh = meat()
    for task in (OTHER, TASK):
        fresh.load_task(trained(meat(mask_travel=20), task))
    for name in ("one", "two", "one"):
        assert torch.equal(method.eval().logits(images(), name), answers[name])
        assert torch.equal(fresh.eval().logits(images(), name), answers[name])


def test_masks_that_never_flip_are_reported_by_their_names() -> None:
    method = meat(mask_lr=1e-6)
    trained(method)
    assert [sentence.split("no ")[1].split(" mask")[0] for sentence in method.warnings()] == [
        "channel",
        "convolution",
    ]


# ---- physically pruned inference -----------------------------------------------------------------
@pytest.mark.few(2)
@BOTH
@pytest.mark.parametrize("ffn", ["weight", "off"])
def test_compact_inference_equals_dense_with_only_kept_channels(settings: Any, ffn: str) -> None:
    method = meat(resnet(settings), ffn_masks=ffn)
    state = with_random_masks(method)
    state.masks["blocks.2.channels1"][:] = False
    dense = served(method, state)
    pruned: Any = method.compact("one")
    assert torch.allclose(pruned(images()), dense, atol=1e-5, rtol=1e-5)
    assert pruned[0].layer1[0].conv2.weight.shape[1] == state.masks["blocks.0.channels1"].sum()
    assert vit.compute_digest(method.backbone) == method.backbone_digest
    assert (
        count_multiply_adds(pruned[0], 3, 224, 224)
        / count_multiply_adds(resnet(settings), 3, 224, 224)
        == method.flops_share(state)
        < 0.99
    )
    assert method.flops_share(TaskState("base", (), "base", method.backbone_digest)) == 1


def test_channel_feeding_only_cut_channels_is_also_cut() -> None:
    method = meat(resnet(BOTTLENECK))
    state = with_random_masks(method, keep=1.0)
    state.masks["blocks.0.channels2"][1:] = False
    state.masks["blocks.0.conv2"][0, [0, 2]] = False
    dense, block = served(method, state), method.compact("one")[0].layer1[0]  # type: ignore[index]
    assert [tuple(c.weight.shape[:2]) for c in (block.conv1, block.conv2, block.conv3)] == [
        (6, 64),
        (1, 6),
        (32, 1),
    ]
    assert torch.allclose(method.compact("one")(images()), dense, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "changes", [GROUPS, {"aa_layer": nn.AvgPool2d}], ids=["group-norm", "anti-aliasing"]
)
def test_dependent_channels_are_not_cut(changes: Any) -> None:
    method = meat(resnet(**changes))
    state = with_random_masks(method)
    assert torch.allclose(served(method, state), method.compact("one")(images()), atol=1e-5)
    # only blocks with a stride have anti-aliasing
    assert (method.flops_share(state) == 1) == (changes is GROUPS)


def test_multiply_adds_equal_a_count_by_hand() -> None:
    assert (
        count_multiply_adds(
            nn.Sequential(
                nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.Flatten(), nn.Linear(8 * 16, 5)
            ),
            3,
            8,
            8,
        )
        == 27 * 8 * 16 + 8 * 16 * 5
    )


# ---- a CNN as a backbone -------------------------------------------------------------------------
def test_batch_norm_never_uses_or_updates_batch_statistics() -> None:
    assert not any(
        m.training for m in vit.build(BASIC).modules() if isinstance(m, nn.BatchNorm2d)
    ), "as built, before train() or eval() is called"
    model = resnet().train()
    buffers_before = {name: tensor.clone() for name, tensor in model.named_buffers()}
    one, all_ = model(images()[:1]), model(images())
    assert torch.allclose(one, all_[:1], atol=1e-4)
    method = FineTune(model, FineTune.Settings(), seed=0)
    optimizer = torch.optim.SGD(
        method.begin(step_context(TASK, "train", None, RATES, (TASK,))), lr=0.1
    )
    method.train()
    method.loss(batch(), PROGRESS)[0].backward()
    optimizer.step()
    assert all(torch.equal(tensor, buffers_before[name]) for name, tensor in model.named_buffers())
    assert vit.compute_digest(model) != method.backbone_digest, (
        "its weights and biases are still trained"
    )


def test_running_statistics_are_in_digest_and_stored_weights() -> None:
    one, two = resnet(), resnet()
    assert vit.compute_digest(one) == vit.compute_digest(two)
    two.layer1[0].bn1.running_var[0] += 1e-3
    assert vit.compute_digest(one) != vit.compute_digest(two)
    vit.from_bytes(two, vit.to_bytes(one), "weights")
    assert vit.compute_digest(one) == vit.compute_digest(two)


def test_published_weights_are_read_without_their_classifier(tmp_path: Path) -> None:
    source, path = resnet(), str(tmp_path / "resnet.safetensors")
    safetensors.torch.save_file(
        source.state_dict() | {"fc.weight": torch.zeros(9, 16), "fc.bias": torch.zeros(9)}, path
    )
    settings = BASIC.model_copy(update={"weights": path})
    vit.outline(settings)
    model = vit.build(settings)
    vit.load_weights(model, settings)
    assert torch.equal(model.eval()(images()), source(images()))
    deeper = settings.model_copy(update={"options": {**BASIC.options, "layers": [2, 1, 1, 1]}})
    with pytest.raises(
        UserError, match=r"do not fit 'resnet18' .*missing.*give weights of the same architecture"
    ):
        vit.load_weights(vit.build(deeper), deeper)


def test_random_backbone_gets_fixed_batch_norm_statistics() -> None:
    torch.manual_seed(0)
    model: Any = vit.build(BASIC)
    vit.measure_statistics(model, 32)
    assert not any(module.training for module in model.modules())
    again = copy.deepcopy(model)
    vit.measure_statistics(again, 32)
    assert vit.compute_digest(model) == vit.compute_digest(again), "the noise is always the same"
    noise = torch.randn((64, 3, 32, 32), generator=torch.Generator().manual_seed(1))
    first = model.bn1(model.conv1(noise))
    deviation = first.transpose(0, 1).flatten(1).std(1)
    assert torch.allclose(deviation, torch.ones_like(deviation), atol=0.1)
    before = vit.compute_digest(model)
    model.train()(noise)
    assert vit.compute_digest(model) == before


def test_dropout_that_depends_on_ranks_is_refused() -> None:
    with pytest.raises(UserError, match=r"drop_block_rate is 0\.1; timm draws"):
        vit.outline(BASIC.model_copy(update={"options": {"drop_block_rate": 0.1}}))


def test_settings_unsuitable_for_a_resnet_are_refused() -> None:
    for settings, says in (
        ({"ffn_masks": "neuron"}, "ffn_masks is 'neuron', but a convolutional backbone has no FFN"),
        ({"self_loop": True}, "self_loop is true, but a convolutional backbone has no attention"),
    ):
        with pytest.raises(UserError, match=says):
            Meat.check_backbone(MeatSettings(**settings), resnet())
    grouped = vit.outline(BackboneSettings(name="resnext50_32x4d", weights="hub"))
    with pytest.raises(
        UserError,
        match="residual block 0 of the backbone has a convolution in 32 groups where masks need a "
        "full one",
    ):
        Meat.check_backbone(MeatSettings(), grouped)
    method = meat()
    state = with_random_masks(method)
    state.masks["blocks.1.channels1"] = torch.ones(9) > 0
    with pytest.raises(
        UserError,
        match=r"has blocks\.1\.channels1 of shape \(9,\), this backbone and these settings need "
        r"\(8,\)",
    ):
        method.load_task(state)


@pytest.mark.few(4)
@pytest.mark.parametrize("name", METHODS)
def test_cnn_works_or_is_refused_before_run(lab: Lab, name: str) -> None:
    backbone = {
        "name": "resnet18",
        "img_size": 16,
        "crop_pct": 1.0,
        "options": BASIC.options | GROUPS,
    }
    if METHODS[name].needs_vit:
        with pytest.raises(
            UserError,
            match=f"methods.{name}: '{name}' works on the blocks of a vision transformer.*, and "
            "the backbone is a ResNet",
        ):
            lab.run_of(name, {}, backbone=backbone)
    elif name == "aper":  # its default adapts blocks
        with pytest.raises(UserError, match=r"methods\.aper: .*set first_session to finetune"):
            lab.run_of(name, {}, backbone=backbone)
    elif name == "lora":
        with pytest.raises(UserError, match=r"methods\.lora: .*no layer to update.*target=linear"):
            lab.run_of(name, {}, backbone=backbone)
    else:
        run = lab.run_of(name, {**OPTIMIZERS["adamw"], "epochs": 1}, backbone=backbone)
        assert compute_task_logits(run.served(0), run.images(0), run.order[0]).shape == (
            len(run.images(0)),
            2,
        )


CNN_PROMISES = [
    "the_backbone_stays_frozen",
    "old_answers_stay",
    "the_stored_bytes_are_the_method",
    "it_starts_as_the_backbone",
    "whatever_is_stored_has_a_part_in_the_answers",
    "an_interrupted_stage_ends_as_if_it_had_not_been",
    "it_learns",
]


@pytest.mark.few(3)
@pytest.mark.parametrize("promise", CNN_PROMISES)
def test_meat_keeps_the_promises_on_a_cnn(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, promise: str
) -> None:
    monkeypatch.setattr(stage_lab, "TINY", tiny(lab))
    PROMISES[promise].check(lab, "meat", "adamw")


def tiny(lab: Lab) -> dict[str, Any]:
    """Return settings of a small ResNet with batch norm and a file of weights and statistics."""
    path = lab.folder / "resnet.safetensors"
    if not path.exists():
        path.write_bytes(vit.to_bytes(resnet()))
    return {
        "name": "resnet18",
        "img_size": 32,
        "crop_pct": 1.0,
        "options": BASIC.options,
        "weights": str(path),
    }
