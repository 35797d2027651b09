"""Tests of InfLoRA: golden values of subspaces, and properties of updates."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest import mock

import method_steps
import pytest
import torch
from method_steps import BASE, ONE, PROGRESS, TASKS, THREE, TWO, batch, begun, images, vit
from pixel_feeds import data_of, learn_all, make, pixels_of, serve
from serving import finished
from torch import Tensor
from torch.nn import functional as F

from pipeline.testing.lab import Lab
from workers.errors import UserError
from workers.job import BackboneSettings
from workers.methods import base
from workers.methods.inflora import InfLora, InfLoraSettings
from workers.model.lowrank import expand_key_value_factor
from workers.model.subspaces import (
    InputMoments,
    Subspace,
    decompose,
    extend_subspace,
    find_directions,
    keep_smaller,
)
from workers.model.vit import build, compute_digest
from workers.serving.server import Predictor
from workers.serving.single_tasks import remove_task
from workers.storage.taskstate import Carried, TaskState

STREAM = (TWO, ONE, THREE)  # with 3, 2 and 4 classes
RANK = {"rank": 4}


def close(*expected: float) -> Any:
    return pytest.approx(list(expected), abs=1e-6)


@pytest.fixture(scope="module")
def learned() -> Any:
    return learn_all("inflora", STREAM, **RANK)


@pytest.fixture(scope="module")
def first() -> Any:
    """Return the state of the first task and its carried state."""
    return learn_all("inflora", STREAM[:1], **RANK)


# ---- golden values -------------------------------------------------------------------------------
@pytest.mark.parametrize(("threshold", "kept"), [(0.9, 1), (0.95, 2), (0.98, 2)])
def test_first_subspace_size_follows_share_of_squared_eigenvalues(
    threshold: float, kept: int
) -> None:
    moments = torch.diag(torch.tensor([4, 2, 1, 0.5])).double()
    subspace = extend_subspace(None, moments, threshold)
    assert not subspace.is_free
    assert torch.allclose(subspace.basis, torch.eye(4)[:, :kept].double())


F12 = Subspace(torch.eye(4)[:, :2].double())
R = torch.tensor([[2.0, 0, 1, 0], [0, 1, 0, 0], [1, 0, 3, 1], [0, 0, 1, 2]]).double()


def test_directions_are_the_leading_ones_outside_the_subspace() -> None:
    _, values = decompose(F12.project(R))
    assert values[:2].tolist() == close(3.71899878, 1.47276886)
    direction = find_directions(R, F12, 1)
    assert direction[0].tolist() == close(0, 0, 0.50241015, 0.28445979)


def test_a_subspace_takes_in_directions_up_to_the_threshold() -> None:
    """Its share is 0.27272727 at the start, then 0.90140690, then 1."""
    assert float(R.square().sum()) == 22
    shares = decompose(F12.project(R))[1].square() / 22
    assert shares[:2].tolist() == close(0.62867963, 0.09859310)
    for threshold, kept in ((0.27, 2), (0.28, 3), (0.90, 3)):
        subspace = extend_subspace(F12, R, threshold)
        grown = Subspace(subspace.basis, subspace.is_free)
        assert torch.allclose(grown.basis.T @ grown.basis, torch.eye(grown.basis.shape[1]).double())
        assert (4 - grown.basis.shape[1] if grown.is_free else grown.basis.shape[1]) == kept
    full = extend_subspace(F12, R, 0.95)
    assert full.is_free
    assert full.basis.shape == (4, 0)
    assert not find_directions(R, full, 2).any()


def random_moments(seed: int, rows: int = 40, width: int = 8) -> Tensor:
    inputs = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).double()
    return inputs.T @ inputs / rows


@pytest.mark.parametrize("threshold", [0.5, 0.8, 0.95, 1.0])
def test_basis_and_complement_describe_the_same_subspace(threshold: float) -> None:
    """A subspace given by its complement takes in the same directions."""
    used = decompose(random_moments(0))[0][:, :3]
    complement = torch.linalg.svd(used)[0][:, 3:]
    first, second = Subspace(used), Subspace(complement, is_free=True)
    moments = random_moments(1)
    assert torch.allclose(first.project(moments), second.project(moments))
    assert torch.allclose(
        find_directions(moments, first, 2), find_directions(moments, second, 2), atol=1e-9
    )
    grown, shrunk = (extend_subspace(each, moments, threshold) for each in (first, second))
    assert torch.allclose(grown.project(moments), shrunk.project(moments), atol=1e-9)
    for each in (grown, shrunk):
        gram = each.basis.T @ each.basis
        assert torch.allclose(gram, torch.eye(len(gram)).double(), atol=1e-9)


def test_the_smaller_basis_is_kept() -> None:
    basis = decompose(random_moments(0))[0]
    assert not keep_smaller(basis[:, :4]).is_free
    large = keep_smaller(basis[:, :5])
    assert large.is_free
    assert large.basis.shape == (8, 3)
    assert torch.allclose(large.basis.T @ basis[:, :5], torch.zeros(3, 5).double(), atol=1e-9)


def test_directions_are_outside_the_subspace_and_have_one_length() -> None:
    subspace = Subspace(decompose(random_moments(0))[0][:, :4])
    directions = find_directions(random_moments(1), subspace, 4)
    assert (directions @ subspace.basis).abs().max() < 1e-9
    assert directions.norm(dim=1).tolist() == close(*[1 / math.sqrt(3)] * 4)
    more = find_directions(random_moments(1), subspace, 6)  # two more than are left
    assert torch.equal(more[:4], directions)
    assert not more[4:].any()


# ---- inputs --------------------------------------------------------------------------------------
def test_moments_are_taken_from_attention_inputs() -> None:
    model = vit()
    moments = InputMoments([block.attn.qkv for block in model.blocks])
    with moments.recording(), torch.no_grad():
        model(images(5))
        model(images(3))
    assert int(moments.count) == 8 * 5  # tokens
    block = model.blocks[0]
    x = torch.cat([images(5), images(3)])
    with torch.no_grad():
        tokens = block.norm1(model.norm_pre(model._pos_embed(model.patch_embed(x))))
    flat = tokens.flatten(0, 1).double()
    assert torch.allclose(moments.sums[0], flat.T @ flat, rtol=1e-5)
    model(images(2))
    assert int(moments.count) == 8 * 5


def test_queries_get_no_update() -> None:
    b = torch.arange(1.0, 13).view(1, 2, 3, 2)
    rows = expand_key_value_factor(b)
    assert not rows[:, :3].any()
    assert torch.equal(rows[:, 3:].flatten(), b.flatten())


# ---- training ------------------------------------------------------------------------------------
def second_task(first: Any) -> tuple[Any, list[Any]]:
    """Return a method at the start of the second task, and its groups."""
    (state,), carried = first
    method = make("inflora", STREAM[:2], **RANK)
    method.load_task(state)
    return method, begun(method, ONE, carried, data=data_of(ONE))


def test_an_update_changes_no_output_for_inputs_in_the_subspace(first: Any) -> None:
    method, groups = second_task(first)
    carried = first[1]
    a = method.update.a.clone()
    method_steps.train(method, method_steps.OPTIMIZERS["adam"](groups), ONE)
    assert torch.equal(method.update.a, a)
    assert method.update.b.abs().max() > 1e-3
    for block, rows in enumerate(a):
        subspace = Subspace(carried.tensors[f"subspace/{block}"], carried.meta["free"][block])
        earlier = subspace.basis
        if subspace.is_free:
            earlier = torch.linalg.svd(earlier)[0][:, earlier.shape[1] :]
        change = expand_key_value_factor(method.update.b)[block] @ rows
        assert (rows @ earlier).abs().max() < 1e-5
        assert (change @ earlier).abs().max() < 1e-5
        assert rows.norm(dim=1).tolist() == close(*[1 / math.sqrt(3)] * 4)
    trained = {name for name, p in method.named_parameters() if p.requires_grad}
    head = f"heads.layers.{method.heads.names.index('one')}."
    assert trained == {"update.b", f"{head}weight", f"{head}bias"}
    assert compute_digest(method.backbone) == method.backbone_digest


def test_a_task_starts_where_the_last_one_ended(first: Any) -> None:
    method, _ = second_task(first)
    before = serve("inflora", *first, **RANK)
    with torch.no_grad():
        expected = before.logits(images(), "two")
        method.eval().logits(images(), "one")  # activates the task in training
        assert torch.allclose(method.heads["two"](method.features(images())), expected, atol=1e-5)


def test_training_loss_covers_only_the_tasks_own_classes(first: Any) -> None:
    method, _ = second_task(first)
    loss, _ = method.loss(batch(), PROGRESS)
    with torch.no_grad():
        logits = method.eval().logits(images(), "one")
    assert loss.item() == pytest.approx(F.cross_entropy(logits, batch().labels).item(), abs=1e-5)
    assert method.competing_outputs() == 2


def test_a_step_and_serving_compute_the_same_features(first: Any) -> None:
    """Training adds a branch to the weights, and serving merges it into the weights."""
    method, _ = second_task(first)
    with torch.no_grad():
        method.update.b.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
        loss = method.loss(batch(), PROGRESS)[0]
        logits = method.eval().logits(images(), "one")
    assert loss.item() == pytest.approx(F.cross_entropy(logits, batch().labels).item(), abs=1e-5)


@pytest.mark.parametrize(("tasks", "eps"), [(0, 0.5), (1, 0.6), (4, 0.9), (9, 0.9)])
def test_threshold_rises_until_the_last_expected_task(tasks: int, eps: float) -> None:
    settings = {"threshold": 0.5, "final_threshold": 1.0, "expected_tasks": 5}
    method = make("inflora", **RANK, **settings)
    method.loaded = {str(index): {} for index in range(tasks + 1)}
    with mock.patch("workers.methods.inflora.extend_subspace") as extending:
        method.extend_subspaces([torch.eye(32).double()])
    assert extending.call_args[0][2] == pytest.approx(eps)


def test_subspaces_are_computed_from_the_images_of_each_task(first: Any) -> None:
    carried = first[1]
    method = serve("inflora", *first, **RANK)
    moments = InputMoments([block.attn.qkv for block in method.backbone.blocks])
    with moments.recording(), torch.no_grad():
        method.logits(pixels_of(TWO)[0], "two")
    for block, is_free in enumerate(carried.meta["free"]):
        expected = extend_subspace(None, moments.sums[block] / moments.count, 0.95)
        assert expected.is_free == is_free
        basis = carried.tensors[f"subspace/{block}"].double()
        projections = (basis @ basis.T, expected.basis @ expected.basis.T)
        assert torch.allclose(*projections, atol=1e-5)


# ---- answers -------------------------------------------------------------------------------------
def test_served_weights_sum_the_updates_of_all_tasks(learned: Any) -> None:
    states, carried = learned
    method = serve("inflora", states, carried, **RANK)
    weights = {}
    for block in range(2):
        weight = vit().blocks[block].attn.qkv.weight.detach().clone()
        for state in states:
            for part in range(2):
                rows = slice(32 * (part + 1), 32 * (part + 2))
                weight[rows] += state.copies["b"][block, part] @ state.copies["a"][block]
        weights[f"blocks.{block}.attn.qkv.weight"] = weight
    with torch.no_grad():
        features = torch.func.functional_call(vit(), weights, (images(),))
        expected = torch.cat([method.heads[t.name](features) for t in STREAM], 1)
        assert torch.allclose(method.logits(images(), None), expected, atol=1e-4)
        assert torch.allclose(method.logits(images(), "three"), expected[:, 5:], atol=1e-4)


def test_logits_given_the_task_do_not_change_later(learned: Any) -> None:
    states, carried = learned
    late = serve("inflora", states, carried, **RANK)
    early = serve("inflora", states[:2], carried, **RANK)
    with torch.no_grad():
        for task in ("two", "one"):
            assert torch.equal(late.logits(images(), task), early.logits(images(), task))
        moved = late.logits(images(), None)[:, :5] - early.logits(images(), None)
    assert moved.abs().max() > 1e-4


def test_inference_changes_no_tensor_and_ignores_other_images(learned: Any) -> None:
    states, carried = learned
    method = serve("inflora", states, carried, **RANK)
    before = {name: tensor.clone() for name, tensor in method.state_dict().items()}
    with torch.no_grad():
        whole = method.logits(images(), None)
        method.logits(images(), "one")
        alone = torch.cat([method.logits(images()[row : row + 1], None) for row in range(8)])
    assert torch.allclose(alone, whole, atol=1e-5)
    assert all(torch.equal(tensor, before[name]) for name, tensor in method.state_dict().items())


# ---- states --------------------------------------------------------------------------------------
def test_a_task_stores_as_many_floats_as_published() -> None:
    with torch.device("meta"), mock.patch.object(base, "compute_digest", return_value=""):
        method = InfLora(build(BackboneSettings(name="vit_base_patch16_224")), InfLoraSettings(), 0)
    blocks, rank, width = len(method.sites), 10, method.sites.width
    assert blocks * (rank * width + 2 * method.rows * rank) == 276_480


def test_later_tasks_leave_stored_updates_and_heads(learned: Any) -> None:
    states, _ = learned
    early, _ = learn_all("inflora", STREAM[:2], **RANK)
    assert [a.to_bytes() for a in early] == [b.to_bytes() for b in states[:2]]


def test_too_large_rank_and_base_task_are_refused() -> None:
    with pytest.raises(UserError, match=r"rank is 17, and .* give at most 16"):
        InfLora.check_backbone(InfLoraSettings(rank=17), vit(), TASKS)
    with pytest.raises(UserError, match=r"base task 'base'.*inputs.*role `task`"):
        InfLora.check_backbone(InfLoraSettings(), vit(), (BASE, ONE))
    InfLora.check_backbone(InfLoraSettings(), vit(), (ONE, TWO))


def test_a_damaged_state_is_refused(learned: Any) -> None:
    states, carried = learned
    state = TaskState.from_bytes(states[1].to_bytes())
    with pytest.raises(UserError, match=r"task 'two': its state has updates of shapes"):
        serve("inflora", states, carried, rank=5)
    for tensors in (state.copies, carried.tensors):
        for key, tensor in [*tensors.items()]:
            del tensors[key]
            with pytest.raises(UserError):
                serve("inflora", [states[0], state], carried, **RANK)
            tensors[key] = tensor[:1]
            with pytest.raises(UserError):
                serve("inflora", [states[0], state], carried, **RANK)
            tensors[key] = tensor
    cut = Carried(carried.tensors, {"free": carried.meta["free"][:1]})
    with pytest.raises(UserError, match="subspaces of 1 blocks, and the backbone has 2"):
        serve("inflora", states, cut, **RANK)
    serve("inflora", states, carried, **RANK)


def test_a_task_without_the_updates_of_earlier_tasks_is_refused(learned: Any) -> None:
    states, carried = learned
    method = serve("inflora", [states[0], states[2]], carried, **RANK)
    with pytest.raises(UserError, match=r"task 'three': .* the update of task 'one', which is not"):
        method.logits(images(), "three")
    with pytest.raises(UserError, match=r"task 'three': it was trained beside"):
        method.logits(images(), None)


@pytest.mark.slow
def test_removal_of_a_task_that_others_need_is_refused(lab: Lab, tmp_path: Path) -> None:
    run = finished(lab, "inflora", "task", epochs=1)
    folder = str(tmp_path / "model")
    run.bundle.write(folder)
    with pytest.raises(UserError, match="'two' cannot be removed, because other tasks of method"):
        remove_task(folder, "two")
    pixels, _ = run.images("two")
    before = [answer.row() for answer in Predictor.open(folder).predict(pixels[:6], "two")]
    remove_task(folder, "three")
    left = Predictor.open(folder)
    assert [answer.row() for answer in left.predict(pixels[:6], "two")] == before
