"""Tests of MEMO: shared blocks that only the first task trains, and own last blocks per task."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from class_incremental_steps import RATES, SMALL, START, A, B, C, batch, stepped, stream, wide
from step_contexts import step_context
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.testing.lab import Lab
from workers import loop
from workers.errors import UserError
from workers.job import BackboneSettings, Task
from workers.methods.memo import Memo, MemoSettings
from workers.model.vit import build, compute_digest
from workers.storage.taskstate import Carried, TaskState

D = 32
OWN = ("blocks.1.", "norm.")


def network(seed: int) -> nn.Module:
    """Return a backbone of two blocks with noise in all parameters."""
    torch.manual_seed(seed)
    model = build(SMALL)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    return model


def own_part(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach() for n, p in model.named_parameters() if n.startswith(OWN)}


def extractor(position: int) -> nn.Module:
    """Return the extractor of a finished task: the first task's shared blocks, and its own part."""
    model = network(10)
    model.load_state_dict(own_part(network(10 + position)), strict=False)
    return model.eval()


def state(task: Task, position: int) -> TaskState:
    """Return the state of a finished task. The first task's state also has the shared blocks."""
    model = extractor(position)
    copies = own_part(model) if position else {n: p.detach() for n, p in model.named_parameters()}
    head = {"weight": torch.randn(task.num_classes, D * (position + 1))}
    digest = compute_digest(network(0))
    return TaskState(task.name, task.classes, "memo", digest, head=head, copies=copies)


def begun(*tasks: Task, step: str = "train", order: int = 1, **settings: Any) -> Any:
    """Return the method at `step` of the last task. Batches have samples of all tasks.

    order: -1 to load the states of the earlier tasks in reverse.
    """
    method: Any = Memo(network(0), MemoSettings(**settings), 0)
    method.join_stream("class", tasks)
    for task_state in [state(task, i) for i, task in enumerate(tasks[:-1])][::order]:
        method.load_task(task_state)
    carried = None
    if len(tasks) > 1:
        torch.manual_seed(3)
        width = D * (len(tasks) - 1)
        heads = {f"heads/{t.name}/weight": torch.randn(t.num_classes, width) for t in tasks[:-1]}
        carried = Carried(heads, {"memory": {}})
    context = replace(step_context(tasks[-1], step, carried, RATES, tasks), stream=tasks)
    method.groups = method.begin(context)
    loop.freeze_others(method, method.groups)
    return method.train()


def test_features_equal_whole_extractors_and_loss_equals_der() -> None:
    method = begun(A, B, C, auxiliary=0.7)
    stepped(method, A, B, C)
    b = batch(A, B, C)
    new = extractor(0)
    new.load_state_dict(own_part(method.backbone), strict=False)
    u = torch.cat([model(b.images) for model in (extractor(0), extractor(1), new)], 1)
    assert torch.allclose(method.features(b.images), u, atol=1e-5)
    z = u @ torch.cat([method.heads[name].weight for name in "abc"]).T
    labels = wide(b, A, B, C)
    auxiliary = F.cross_entropy(method.auxiliary(u[:, 2 * D :]), (labels - 4).clamp(min=0))
    loss, terms = method.loss(b, START)
    assert terms["auxiliary"].item() == pytest.approx(auxiliary.item(), rel=1e-4)
    expected = F.cross_entropy(z, labels) + 0.7 * auxiliary
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)


def test_only_the_first_task_trains_the_shared_blocks() -> None:
    changed = stepped(first := begun(A), A)
    assert {n for n in changed if n.startswith("backbone.")} == {
        f"backbone.{n}" for n, p in first.backbone.named_parameters() if p.grad is not None
    }
    assert "backbone.blocks.0.attn.qkv.weight" in changed
    method = begun(A, B)
    extractors = compute_digest(method.extractors)
    changed = stepped(method, A, B)
    moved = {n.removeprefix("backbone.") for n in changed if n.startswith("backbone.")}
    assert moved == {*own_part(method.backbone)}
    assert compute_digest(method.extractors) == extractors
    shared = [method.backbone.blocks[0], method.backbone.patch_embed]
    assert not any(module.training for part in shared for module in part.modules())
    assert method.backbone.blocks[1].training
    assert method.backbone.patch_embed.proj.weight.grad is None


def test_task_starts_from_the_last_blocks_of_the_previous_task() -> None:
    method = begun(A, B, C)
    expected = dict(extractor(1).named_parameters())
    assert all(torch.equal(p, expected[n]) for n, p in method.backbone.named_parameters())


def test_states_can_be_loaded_in_any_order() -> None:
    images = batch(A).images
    methods = [Memo(network(0), MemoSettings(), 0) for _ in range(2)]
    for method, order in zip(methods, (1, -1), strict=True):
        method.join_stream("class", (A, B, C))
        for task_state in [state(task, i) for i, task in enumerate((A, B, C))][::order]:
            method.load_task(task_state)
        method.eval()
    u = torch.cat([extractor(i)(images) for i in range(3)], 1)
    for method in methods:
        assert torch.allclose(method.features(images), u, atol=1e-5)


def test_shared_blocks_are_held_in_memory_once() -> None:
    method = begun(A, B, C)
    num_own = sum(t.numel() for t in own_part(method.backbone).values())
    num_whole = sum(p.numel() for p in method.backbone.parameters())
    distinct = {
        id(p): p for part in (method.backbone, method.extractors) for p in part.parameters()
    }
    assert sum(p.numel() for p in distinct.values()) == num_whole + 2 * num_own


@pytest.mark.few(1)
@pytest.mark.parametrize("base", [None, "two"])
def test_later_tasks_store_only_their_own_blocks(lab: Lab, base: str | None) -> None:
    run = stream(lab, "memo", base=base, memory=20)
    steps = [[job.step for job in run.stages(task)] for task in (0, 1)]
    assert steps == [["herd"] if base else ["train", "herd"], ["train", "finetune", "herd"]]
    fresh = run.fresh()
    assert {*run.state(1).copies} == fresh.own
    names = {name for name, _ in fresh.backbone.named_parameters()}
    assert {*run.state(0).copies} == (set() if base else names)
    served, images = run.served(1), run.images(0)
    shared = copy.deepcopy(fresh.backbone)
    shared.load_state_dict(run.state(0).copies, strict=False)
    whole = copy.deepcopy(shared)
    whole.load_state_dict(run.state(1).copies, strict=False)
    with torch.no_grad():
        u = torch.cat([shared.eval()(images), whole.eval()(images)], 1)
        assert torch.allclose(served.features(images), u, atol=1e-5)
    depth = len(fresh.backbone.blocks)
    assert run.trained(1).manifest["flops_share"] == pytest.approx((depth + 1) / depth)


def test_unsupported_backbones_and_states_are_refused() -> None:
    with pytest.raises(UserError, match=r"blocks is 2, and the backbone has 2.*give it 1 or less"):
        Memo.check_backbone(MemoSettings(blocks=2), build(SMALL), (A,))
    with pytest.raises(UserError, match="vision transformer"):
        Memo.check_backbone(MemoSettings(), build(BackboneSettings(name="resnet18")), (A,))
    method = Memo(network(0), MemoSettings(), 0)
    with pytest.raises(UserError, match="the extractor of task 'b' does not fit"):
        method.load_task(replace(state(B, 1), copies={"norm.weight": torch.ones(D)}))
