"""Tests of EASE: golden values, prototypes, answers and states."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from method_steps import BASE, ONE, PROGRESS, THREE, TWO, batch, begun, images, vit
from pixel_feeds import data_of, learn_all, make, pixels_of, serve
from serving import finished
from torch.nn import functional as F

from pipeline.testing.lab import Lab
from workers.errors import UserError
from workers.job import BackboneSettings
from workers.methods import base
from workers.methods.ease import Ease, EaseSettings, complete_prototypes, normalise_parts
from workers.model.adapters import Bottlenecks
from workers.model.vit import build, compute_digest
from workers.serving.server import Predictor
from workers.serving.single_tasks import remove_task
from workers.storage.taskstate import Carried, TaskState

STREAM = (TWO, ONE, THREE)  # sizes 3, 2, 4


def close(*expected: float) -> Any:
    return pytest.approx(list(expected), abs=1e-6)


@pytest.fixture(scope="module")
def learned() -> Any:
    return learn_all("ease", STREAM)


# ---- golden values -------------------------------------------------------------------------------
# Prototypes (K, subspaces, d) of classes a, b of task 0 and of classes c, d of task 1.
OLD = torch.tensor([[[1.0, 0]], [[0, 1]]])
NEW = torch.tensor([[[1.0, 1], [0, 1]], [[1, -1], [1, 1]]])


def test_prototypes_of_earlier_classes_are_synthesised_from_new_ones() -> None:
    old, new = complete_prototypes([OLD, NEW])
    assert torch.equal(new, NEW)
    assert torch.equal(old[:, :1], OLD)
    assert old[0, 1].tolist() == close(0.5, 1)
    assert old[1, 1].tolist() == close(0.19557032, 1)


def test_logits_equal_the_reference_values() -> None:
    features = normalise_parts(torch.tensor([[0.8, 0.6, 0.6, 0.8]]), 2)
    method = make("ease", alpha=0.1)
    weights = [method.weigh(part, own) for own, part in enumerate(complete_prototypes([OLD, NEW]))]
    logits = F.linear(features, torch.cat(weights))
    assert logits[0].tolist() == close(0.89838699, 0.69002868, 0.89899495, 1.00409163)


def test_synthesis_uses_the_classes_of_all_later_tasks() -> None:
    """The tasks have different sizes. The second task has prototypes in two subspaces."""
    generator = torch.Generator().manual_seed(0)
    stored = [torch.randn(k, j, 5, generator=generator) for k, j in ((3, 1), (2, 2), (4, 3))]
    first, second, third = complete_prototypes(stored)
    assert [tuple(part.shape) for part in (first, second, third)] == [
        (3, 3, 5),
        (2, 3, 5),
        (4, 3, 5),
    ]
    assert torch.equal(third, stored[2])
    for row in range(3):
        known = torch.cat([stored[1][:, 0], stored[2][:, 0]])
        shares = F.cosine_similarity(stored[0][row, :1], known).softmax(0)
        expected = shares @ torch.cat([stored[1][:, 1], stored[2][:, 1]])
        assert torch.allclose(first[row, 1], expected, atol=1e-6)
    shares = F.cosine_similarity(stored[1][:1, 1], stored[2][:, 1]).softmax(0)
    assert torch.allclose(second[0, 2], shares @ stored[2][:, 2], atol=1e-6)


# ---- prototypes ----------------------------------------------------------------------------------
def test_prototypes_are_class_means_in_all_subspaces_so_far(learned: Any) -> None:
    states, carried = learned
    method = serve("ease", states, carried)
    for position, (task, state) in enumerate(zip(STREAM, states, strict=True)):
        assert state.meta == {"subspaces": [t.name for t in STREAM[: position + 1]]}
        assert state.head["weight"].shape == (task.num_classes, position + 1, 32)
        pixels, labels = pixels_of(task)
        for subspace, name in enumerate(state.meta["subspaces"]):
            with torch.no_grad():
                features = method.adapted(pixels, method.find_adapters(name))
            for label in range(task.num_classes):
                mean = features[labels == label].mean(0)
                assert torch.allclose(state.head["weight"][label, subspace], mean, atol=1e-5)
    assert carried.tensors == {}


def test_later_tasks_do_not_change_earlier_states(learned: Any) -> None:
    states, _ = learned
    early, _ = learn_all("ease", STREAM[:2])
    for first, last in zip(early, states, strict=False):
        assert first.to_bytes() == last.to_bytes()


def test_each_task_trains_new_adapters(learned: Any) -> None:
    states, _ = learned
    method = make("ease", STREAM)
    for state in states[:2]:
        method.load_task(state)
    torch.manual_seed(0)
    begun(method, THREE, Carried())
    assert not method.adapters.up.any()
    assert not torch.equal(method.adapters.down, states[1].copies["down"])
    trained = {name for name, p in method.named_parameters() if p.requires_grad}
    own = f"heads.layers.{method.heads.names.index('three')}."
    assert trained == {
        *(f"adapters.{name}" for name in method.adapters.tensors()),
        f"{own}weight",
        "heads.scale",
    }


def test_training_loss_is_cross_entropy_over_cosines_of_task_classes() -> None:
    method = make("ease", STREAM, dropout=0.0, head_scale=4.0)
    begun(method, TWO)
    loss, _ = method.loss(batch(classes=3), PROGRESS)
    with torch.no_grad():
        features = vit()(images())
    cosines = F.cosine_similarity(features[:, None], method.heads["two"].weight[:, 0][None], dim=2)
    expected = F.cross_entropy(4 * cosines, batch(classes=3).labels)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    assert method.competing_outputs() == 3


# ---- answers -------------------------------------------------------------------------------------
def test_logits_follow_the_equation(learned: Any) -> None:
    states, carried = learned
    method = serve("ease", states, carried, alpha=0.3)
    full = complete_prototypes([state.head["weight"] for state in states])
    with torch.no_grad():
        logits = method.logits(images(), None)
        features = [method.adapted(images(), method.find_adapters(t.name)) for t in STREAM]
    columns = []
    for own, prototypes in enumerate(full):
        for row in prototypes:
            score = torch.zeros(len(images()))
            for subspace, subspace_features in enumerate(features):
                weight = 1 if subspace == own else 0.3 / 2
                score += weight * F.cosine_similarity(subspace_features, row[subspace][None])
            columns.append(score)
    assert torch.allclose(logits, torch.stack(columns, 1), atol=1e-5)
    assert logits.shape == (8, 9)


def test_alpha_zero_scores_classes_only_in_their_own_subspace(learned: Any) -> None:
    states, carried = learned
    method = serve("ease", states, carried, alpha=0.0)
    with torch.no_grad():
        logits = method.logits(images(), None)
        for task, columns in method.class_slices().items():
            features = method.adapted(images(), method.find_adapters(task))
            own = method.heads[task].weight[:, -1]
            expected = F.normalize(features, dim=1) @ F.normalize(own, dim=1).T
            assert torch.allclose(logits[:, columns], expected, atol=1e-5)


def test_answers_with_given_task_do_not_change_with_later_tasks(learned: Any) -> None:
    """The answers are bit-equal to those right after training. Without the task, they change."""
    states, carried = learned
    late, early = serve("ease", states, carried), serve("ease", states[:2], carried)
    with torch.no_grad():
        for task in ("two", "one"):
            assert torch.equal(late.logits(images(), task), early.logits(images(), task))
        newest = early.logits(images(), None)[:, 3:]
        assert torch.allclose(early.logits(images(), "one"), newest, atol=1e-6)
        moved = late.logits(images(), None)[:, :5] - early.logits(images(), None)
    assert moved.abs().max() > 1e-4


def test_logits_do_not_depend_on_the_batch(learned: Any) -> None:
    states, carried = learned
    method = serve("ease", states, carried)
    with torch.no_grad():
        for task in (None, "one", "three"):
            whole = method.logits(images(), task)
            alone = torch.cat([method.logits(images()[row : row + 1], task) for row in range(8)])
            assert torch.allclose(alone, whole, atol=1e-5)


def test_inference_changes_no_tensor(learned: Any) -> None:
    states, carried = learned
    method = serve("ease", states, carried)
    before = {name: tensor.clone() for name, tensor in method.state_dict().items()}
    with torch.no_grad():
        first = method.logits(images(), None)
        method.logits(images(), "one")
        assert torch.equal(method.logits(images(), None), first)
    assert all(torch.equal(tensor, before[name]) for name, tensor in method.state_dict().items())
    assert compute_digest(method.backbone) == method.backbone_digest


def test_validation_during_training_uses_the_cosine_head(learned: Any) -> None:
    states, _ = learned
    method = make("ease", STREAM)
    for state in states[:2]:
        method.load_task(state)
    begun(method, THREE, Carried())
    method.eval()
    early = serve("ease", states[:2], Carried())
    with torch.no_grad():
        logits = method.logits(images(), None)
        assert torch.equal(logits[:, :5], early.logits(images(), None))
        cosines = method.logits(images(), "three") / method.heads.scale
        assert torch.allclose(logits[:, 5:], cosines, atol=1e-6)


# ---- states --------------------------------------------------------------------------------------
def test_number_of_adapter_floats_matches_the_paper() -> None:
    with torch.device("meta"), mock.patch.object(base, "compute_digest", return_value=""):
        method = Ease(build(BackboneSettings(name="vit_base_patch16_224")), EaseSettings(), 0)
        method.is_learning, method.task = True, ONE
        method.adapters = Bottlenecks(len(method.sites), method.sites.width, 64)
    assert sum(t.numel() for t in method.export_adapters().values()) == 1_189_632
    one = method.flops_share(TaskState("one", (), "ease", "", meta={"subspaces": ["one"]}))
    two = method.flops_share(TaskState("two", (), "ease", "", meta={"subspaces": ["one", "two"]}))
    assert two == pytest.approx(2 * one)
    assert one == pytest.approx(1 + 12 * 2 * 768 * 64 / 85e6, rel=1e-2)


def test_a_base_task_is_refused() -> None:
    with pytest.raises(UserError, match=r"base task 'base'.*no adapters.*role `task`"):
        Ease.check_backbone(EaseSettings(), vit(), (BASE, ONE))
    Ease.check_backbone(EaseSettings(), vit(), (ONE, TWO))


def test_states_of_other_settings_are_refused(learned: Any) -> None:
    states, carried = learned
    with pytest.raises(UserError, match=r"task 'two': its state has tensors of shapes"):
        serve("ease", states, carried, width=8)


def test_a_damaged_state_is_refused(learned: Any) -> None:
    states, carried = learned
    state = TaskState.from_bytes(states[1].to_bytes())
    for tensors in (state.head, state.copies):
        for key, tensor in [*tensors.items()]:
            del tensors[key]
            with pytest.raises(UserError):
                serve("ease", [states[0], state], carried)
            tensors[key] = tensor[..., :1]
            with pytest.raises(UserError):
                serve("ease", [states[0], state], carried)
            tensors[key] = tensor
    state.meta["subspaces"] = ["two"]
    with pytest.raises(UserError, match="prototypes of shape"):
        serve("ease", [states[0], state], carried)


def test_a_task_without_the_adapters_of_earlier_tasks_is_refused(learned: Any) -> None:
    states, carried = learned
    method = serve("ease", [states[0], states[2]], carried)
    with pytest.raises(UserError, match=r"task 'three': its prototypes .* task 'one', which is"):
        method.logits(images(), "three")
    with pytest.raises(UserError, match=r"task 'three': its prototypes"):
        method.logits(images(), None)
    with torch.no_grad():
        method.logits(images(), "two")


@pytest.mark.slow
def test_removal_of_a_task_needed_by_later_tasks_is_refused(lab: Lab, tmp_path: Path) -> None:
    """The last task of a stream can be removed without a change of the other answers."""
    run = finished(lab, "ease", "task", epochs=1)
    folder = str(tmp_path / "model")
    run.bundle.write(folder)
    with pytest.raises(UserError, match="'two' cannot be removed, because other tasks of method"):
        remove_task(folder, "two")
    pixels, _ = run.images("two")
    before = [answer.row() for answer in Predictor.open(folder).predict(pixels[:6], "two")]
    remove_task(folder, "three")
    left = Predictor.open(folder)
    assert [answer.row() for answer in left.predict(pixels[:6], "two")] == before


def test_feature_extraction_reads_only_images_of_the_task() -> None:
    """`data_of` raises an error for any other split, and has no images of earlier tasks."""
    method = make("ease", (ONE,))
    torch.manual_seed(0)
    begun(method, ONE)
    _, carried = method.finish()
    again = make("ease", (ONE,))
    begun(again, ONE, carried, "statistics", data=data_of(ONE))
    assert again.heads["one"].weight.shape == (2, 1, 32)
    assert not again.training
