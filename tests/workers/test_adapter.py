"""Adapter-B: it starts as the backbone, its sizes are the formula's, and no task touches another."""

from __future__ import annotations

from typing import Any

import pytest
import tabletop
import torch
from tabletop import BASE, ONE, OPTIMIZERS, TWO, answers, begun, images, vit

from workers.errors import UserError
from workers.job import BackboneSettings, Task
from workers.methods.adapter import Adapter, AdapterSettings
from workers.model.vit import build, digest_of
from workers.taskstate import TaskState


def adapter(**settings: Any) -> Adapter:
    return Adapter(vit(), AdapterSettings(**settings), seed=1)


def trained(method: Adapter, task: Task = ONE, steps: int = 6) -> TaskState:
    tabletop.train(method, OPTIMIZERS["adamw"](begun(method, task)), task, steps)
    return method.finish()[0]


def test_a_task_starts_as_the_backbone_whatever_it_draws():
    method = adapter()
    begun(method)
    assert torch.equal(answers(method), method.heads["one"](vit()(images())))


def test_the_backbone_is_not_touched_and_the_answers_are_the_adapters():
    method = adapter()
    trained(method)
    assert digest_of(method.backbone) == method.backbone_digest == digest_of(vit())
    assert not torch.allclose(answers(method), vit()(images()) @ method.heads["one"].weight.T + method.heads["one"].bias, atol=1e-2)


def test_answers_stay_when_another_task_is_trained_beside():
    method = adapter()
    state, before = trained(method), answers(method)
    method.load(TaskState.from_bytes(state.to_bytes()))
    assert torch.equal(answers(method), before)
    other = trained(method, TWO)
    method.load(other)
    for _ in range(2):
        assert answers(method, TWO).shape == (8, 3)
        assert torch.equal(answers(method), before)


def test_a_base_task_is_served_by_the_backbone():
    method = adapter()
    head = {"weight": torch.ones(2, 32), "bias": torch.zeros(2)}
    method.load(trained(method))
    method.load(TaskState("base", BASE.classes, "base", method.backbone_digest, head=head))
    assert torch.equal(answers(method, BASE), vit()(images()) @ head["weight"].T)


@pytest.mark.parametrize("width", [24, 48])
def test_the_stored_size_is_the_formula(width: int):
    """Two adapters per block: 2 L (2 d m + d + m) floats, at the size of a real ViT."""
    torch.manual_seed(0)
    method = Adapter(build(BackboneSettings()), AdapterSettings(width=width), seed=1)
    begun(method, TWO)
    sizes = method.finish()[0].sizes()
    assert sizes == {"masks": 0, "tokens": 0, "copies": 4 * 2 * 12 * (2 * 192 * width + 192 + width), "head": 4 * 3 * 193}
    assert sizes["copies"] == 4 * sum(p.numel() for p in method.adapters.parameters())


def six_tasks_bytes(width: int, bottleneck: int) -> int:
    """What the six tasks of MEAT's Table 1 store: adapters in 12 blocks, and heads."""
    classes = (200, 196, 100, 195, 250, 100)
    adapters = 2 * 12 * (2 * width * bottleneck + width + bottleneck)
    return 4 * sum(adapters + c * (width + 1) for c in classes)


@pytest.mark.parametrize(("width", "classifier_mb", "total_mb"), [(192, 23, 29.2), (384, 86, 98.5), (256, 27, 35.3)])
def test_the_totals_of_six_tasks(width: int, classifier_mb: int, total_mb: float):
    """The column Adaptor-B as it was inferred for 24 units: on top of the table's rounded sizes of DeiT-Ti, DeiT-S and T2T-ViT-12."""
    assert classifier_mb + six_tasks_bytes(width, AdapterSettings().width) / 1e6 == pytest.approx(total_mb, abs=0.06)


@pytest.mark.parametrize(("width", "parameters", "table"), [(192, 5_717_416, 29), (384, 22_050_664, 99), (256, 6_886_000, 36)])
def test_the_totals_of_the_table_itself_are_those_of_32_units(width: int, parameters: int, table: int):
    """Those sizes have the heads in them already, so the totals above count heads twice. Counted once, from the parameters of the
    backbones with their ImageNet heads and in units of 2^20 bytes as for the table's other columns, 32 units give the table."""
    assert round((4 * parameters + six_tasks_bytes(width, 32)) / 2**20) == table
    assert round((4 * parameters + six_tasks_bytes(width, 24)) / 2**20) < table


def test_adapters_of_another_width_are_refused():
    state = trained(adapter(width=8), steps=1)
    with pytest.raises(UserError, match=r"adapters of shape \(4, 8, 32\), these settings have \(4, 24, 32\)"):
        adapter().load(state)


def test_the_work_per_image_counts_the_adapters():
    method = adapter()
    share = method.flops_share(trained(method, steps=1))
    tokens, width, hidden = 5, 32, 24
    added = 2 * 2 * tokens * 2 * width * hidden
    block = tokens * (12 * width * width + 2 * tokens * width)
    last = 2 * width * width * (1 + tokens) + 2 * tokens * width + 8 * width * width  # its class token alone is read
    assert share == pytest.approx(1 + added / (4 * 3 * 64 * width + block + last))
