"""Tests of adapters of all kinds: initial output, position, stored size, and independent tasks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import method_steps
import pytest
import torch
from method_steps import BASE, ONE, OPTIMIZERS, TWO, answers, batch, begun, images, vit
from timm.models.vision_transformer import ParallelThingsBlock, ResPostBlock
from torch import Tensor
from torch.nn import functional as F

from workers.errors import UserError
from workers.job import BackboneSettings, Task, key_inputs
from workers.methods.adapter import Adapter, AdapterSettings
from workers.model.vit import build, compute_digest
from workers.storage.taskstate import TaskState


def adapter(**settings: Any) -> Adapter:
    return Adapter(vit(), AdapterSettings(**settings), seed=1)


def trained(method: Adapter, task: Task = ONE, steps: int = 6) -> TaskState:
    method_steps.train(method, OPTIMIZERS["adamw"](begun(method, task)), task, steps)
    return method.finish()[0]


def test_new_adapter_keeps_the_features_of_backbone() -> None:
    method = adapter()
    begun(method)
    assert torch.equal(answers(method), method.heads["one"](vit()(images())))


def test_training_changes_answers_but_not_the_backbone() -> None:
    method = adapter()
    trained(method)
    assert compute_digest(method.backbone) == method.backbone_digest == compute_digest(vit())
    assert not torch.allclose(
        answers(method),
        vit()(images()) @ method.heads["one"].weight.T + method.heads["one"].bias,
        atol=1e-2,
    )


def test_training_another_task_keeps_earlier_answers() -> None:
    method = adapter()
    state, before = trained(method), answers(method)
    method.load_task(TaskState.from_bytes(state.to_bytes()))
    assert torch.equal(answers(method), before)
    other = trained(method, TWO)
    method.load_task(other)
    for _ in range(2):
        assert answers(method, TWO).shape == (8, 3)
        assert torch.equal(answers(method), before)


def test_a_base_task_is_served_by_the_backbone() -> None:
    method = adapter()
    head = {"weight": torch.ones(2, 32), "bias": torch.zeros(2)}
    method.load_task(trained(method))
    method.load_task(TaskState("base", BASE.classes, "base", method.backbone_digest, head=head))
    assert torch.equal(answers(method, BASE), vit()(images()) @ head["weight"].T)


@pytest.mark.parametrize("width", [24, 48])
def test_stored_size_matches_formula(width: int) -> None:
    """Two adapters per block have 2 L (2 d m + d + m) floats. The ViT has a realistic size."""
    torch.manual_seed(0)
    method = Adapter(build(BackboneSettings()), AdapterSettings(width=width), seed=1)
    begun(method, TWO)
    sizes = method.finish()[0].sizes()
    assert sizes == {
        "masks": 0,
        "tokens": 0,
        "copies": 4 * 2 * 12 * (2 * 192 * width + 192 + width),
        "head": 4 * 3 * 193,
    }
    assert sizes["copies"] == 4 * sum(p.numel() for p in method.adapters.parameters())


def six_tasks_bytes(width: int, bottleneck: int) -> int:
    """Return the bytes of the six tasks of MEAT's Table 1: adapters in 12 blocks, and heads."""
    classes = (200, 196, 100, 195, 250, 100)
    adapters = 2 * 12 * (2 * width * bottleneck + width + bottleneck)
    return 4 * sum(adapters + c * (width + 1) for c in classes)


@pytest.mark.parametrize(
    ("width", "classifier_mb", "total_mb"), [(192, 23, 29.2), (384, 86, 98.5), (256, 27, 35.3)]
)
def test_six_task_totals_match_published_totals_with_24_units(
    width: int, classifier_mb: int, total_mb: float
) -> None:
    """Totals for the column Adaptor-B as inferred for 24 units: the table's rounded sizes of
    DeiT-Ti, DeiT-S and T2T-ViT-12, plus the six tasks."""
    assert classifier_mb + six_tasks_bytes(width, AdapterSettings().width) / 1e6 == pytest.approx(
        total_mb, abs=0.06
    )


@pytest.mark.parametrize(
    ("width", "parameters", "table"),
    [(192, 5_717_416, 29), (384, 22_050_664, 99), (256, 6_886_000, 36)],
)
def test_published_table_totals_match_32_units(width: int, parameters: int, table: int) -> None:
    """The table's backbone sizes already include the heads, so the totals above count heads twice.
    If they are counted once, 32 units give the table. The size of a backbone is then computed from
    its parameters with the ImageNet head, in units of 2^20 bytes as in the other columns."""
    assert round((4 * parameters + six_tasks_bytes(width, 32)) / 2**20) == table
    assert round((4 * parameters + six_tasks_bytes(width, 24)) / 2**20) < table


# ---- kinds ---------------------------------------------------------------------------------------
KINDS = ("houlsby", "pfeiffer", "adaptformer")


def by_hand(model: Any, t: dict[str, Tensor], kind: str) -> Tensor:
    """Compute the features block by block.

    The adapter of `pfeiffer` follows the FFN, before the residual add. That of `adaptformer` is
    parallel to the FFN, and its input is the residual stream without the norm.
    """
    x = model.norm_pre(model._pos_embed(model.patch_embed(images())))
    for i, block in enumerate(model.blocks):
        x = x + block.attn(block.norm1(x))
        ffn, down, up = (
            block.mlp(block.norm2(x)),
            (t["down"][i], t["down_bias"][i]),
            (t["up"][i], t["up_bias"][i]),
        )
        if kind == "pfeiffer":
            x = x + ffn + F.linear(F.gelu(F.linear(ffn, *down)), *up)
        else:
            x = x + ffn + 0.1 * F.linear(F.relu(F.linear(x, *down)), *up)
    pooled: Tensor = model.forward_head(model.norm(x))
    return pooled


def spread(method: Adapter) -> Adapter:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in method.adapters.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    return method


@pytest.mark.parametrize("kind", KINDS[1:])
def test_each_adapter_kind_is_placed_as_in_its_paper(kind: str) -> None:
    method = adapter(kind=kind, width=6)
    begun(method)
    served = answers(spread(method))
    state = method.finish()[0]
    features = by_hand(vit(), state.copies, kind)
    assert torch.allclose(served, features @ state.head["weight"].T + state.head["bias"], atol=1e-6)
    with torch.no_grad():
        method.activate_task("one")
        assert torch.allclose(method.features(images()), features, atol=1e-5)
    assert not torch.allclose(features, vit()(images()), atol=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_every_adapter_kind_starts_neutral_and_trains_all_weights(kind: str) -> None:
    """If both projections started at zero, neither would get a gradient, and only the last bias
    would be trained."""
    method = adapter(kind=kind)
    groups = begun(method)
    assert torch.equal(answers(method), method.heads["one"](vit()(images())))
    start = {name: t.detach().clone() for name, t in method.adapters.tensors().items()}
    assert start["down"].abs().max() <= 32**-0.5
    assert start["down"].flatten(1).any(1).all()
    assert not any(start[name].any() for name in ("up", "up_bias", "down_bias"))
    method_steps.train(
        method, torch.optim.SGD([g | {"weight_decay": 0.0} for g in groups], lr=0.1), ONE, steps=3
    )
    for name, t in method.adapters.tensors().items():
        assert (t != start[name]).flatten(1).any(1).all(), f"{name} of every adapter must change"


@pytest.mark.parametrize(("kind", "each"), [("houlsby", 2), ("pfeiffer", 1), ("adaptformer", 1)])
def test_size_of_each_adapter_kind_matches_formula(kind: str, each: int) -> None:
    """Each adapter has 2 d m + d + m floats. With 64 units, the 12 blocks of a ViT-B have
    12 * 99,136 = 1.19 M."""
    assert 12 * (2 * 768 * 64 + 768 + 64) == 12 * 99_136
    method = adapter(kind=kind, width=7)
    begun(method)
    state = method.finish()[0]
    assert state.sizes() == {
        "masks": 0,
        "tokens": 0,
        "copies": 4 * each * 2 * (2 * 32 * 7 + 32 + 7),
        "head": 4 * 2 * 33,
    }
    share = method.flops_share(state)
    plain = adapter(width=7)
    begun(plain)
    assert share - 1 == pytest.approx((plain.flops_share(plain.finish()[0]) - 1) * each / 2)


def test_later_settings_leave_houlsby_keys_and_state_unchanged() -> None:
    """Settings added later change neither its keys nor its stored state."""
    assert key_inputs(AdapterSettings()) == {"width": 24}
    assert key_inputs(AdapterSettings(kind="adaptformer", dropout=0.1)) == {
        "width": 24,
        "kind": "adaptformer",
        "dropout": 0.1,
    }
    method = adapter()
    begun(method)
    assert method.finish()[0].meta == {}


@pytest.mark.parametrize(
    ("kind", "other"),
    [("pfeiffer", "adaptformer"), ("adaptformer", "pfeiffer"), ("houlsby", "pfeiffer")],
)
def test_adapters_of_another_kind_are_refused(kind: str, other: str) -> None:
    state = TaskState.from_bytes(trained(adapter(kind=kind), steps=1).to_bytes())
    adapter(kind=kind).load_task(state)
    with pytest.raises(UserError, match="its state has adapters of"):
        adapter(kind=other).load_task(state)


def test_dropout_is_drawn_for_each_sample_and_only_while_training() -> None:
    """The dropout of a sample does not depend on its rank. Kept units are scaled by 1 / (1 - p)."""
    method = adapter(kind="adaptformer", dropout=0.25)
    begun(method)
    spread(method)
    whole = batch()
    factors = method.dropout_factors(whole)["kept"]
    assert factors.shape == (2, 8, 5, 24)
    assert factors.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert float((factors > 0).float().mean()) == pytest.approx(0.75, abs=0.03)
    rows = torch.tensor([1, 4, 6])
    part = replace(
        whole,
        images=whole.images[rows],
        labels=whole.labels[rows],
        tasks=whole.tasks[rows],
        draw=replace(whole.draw, positions=rows),
    )
    assert torch.equal(method.dropout_factors(part)["kept"], factors[:, rows])
    served, loss = answers(method), method.loss(whole, method_steps.PROGRESS)[0]
    assert torch.equal(loss, method.loss(whole, method_steps.PROGRESS)[0])
    assert not torch.equal(
        loss,
        method.loss(replace(whole, draw=replace(whole.draw, step=1)), method_steps.PROGRESS)[0],
    )
    assert torch.equal(answers(method), served)
    with torch.no_grad(), method.sites.using(method.adapters.tensors()):
        assert torch.equal(method.heads["one"](method.backbone(images())), served), (
            "serving must not use dropout"
        )


@pytest.mark.parametrize("kind", KINDS)
def test_backbone_without_adapter_position_is_refused(kind: str) -> None:
    with pytest.raises(UserError, match=r"has no module .* which the adapters need"):
        Adapter.check_backbone(AdapterSettings(kind=kind), vit(block_fn=ParallelThingsBlock))


def test_adaptformer_refuses_backbone_with_post_norm() -> None:
    Adapter.check_backbone(AdapterSettings(kind="pfeiffer"), vit(block_fn=ResPostBlock))
    with pytest.raises(UserError, match="norms behind attention and FFN"):
        Adapter.check_backbone(AdapterSettings(kind="adaptformer"), vit(block_fn=ResPostBlock))


# ---- sizes and work ------------------------------------------------------------------------------
def test_adapters_of_another_width_are_refused() -> None:
    state = trained(adapter(width=8), steps=1)
    with pytest.raises(
        UserError, match=r"adapters of shape \(4, 8, 32\), these settings have \(4, 24, 32\)"
    ):
        adapter().load_task(state)


def test_flops_share_includes_the_adapters() -> None:
    method = adapter()
    share = method.flops_share(trained(method, steps=1))
    tokens, width, hidden = 5, 32, 24
    added = 2 * 2 * tokens * 2 * width * hidden
    block = tokens * (12 * width * width + 2 * tokens * width)
    # of the last block, only the class token is read
    last = 2 * width * width * (1 + tokens) + 2 * tokens * width + 8 * width * width
    assert share == pytest.approx(1 + added / (4 * 3 * 64 * width + block + last))
