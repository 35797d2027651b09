"""Tests of MOS: golden values, training, alignment, and the adapters that answer for an image."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from method_steps import BASE, ONE, PROGRESS, THREE, TWO, batch, begun, images, vit
from pixel_feeds import data_of, learn_all, make, pixels_of, serve
from torch.nn import functional as F

from workers.errors import UserError
from workers.job import BackboneSettings
from workers.methods import base
from workers.methods.mos import Mos, MosSettings, compute_mean_contrast
from workers.model.adapters import Bottlenecks
from workers.model.vit import build, compute_digest
from workers.storage.taskstate import Carried, TaskState

STREAM = (TWO, ONE, THREE)  # sizes 3, 2, 4


@pytest.fixture(scope="module")
def learned() -> Any:
    return learn_all("mos", STREAM, align_draws=16)


def served(learned: Any) -> Any:
    states, carried = learned
    return serve("mos", states, carried, align_draws=16)


def third_task(learned: Any, **settings: Any) -> Any:
    """Return the method during training of the third task."""
    states, _ = learned
    _, carried = learn_all("mos", STREAM[:2], align_draws=16)
    method = make("mos", STREAM, **settings)
    for state in states[:2]:
        method.load_task(state)
    torch.manual_seed(0)
    begun(method, THREE, carried)
    return method


# ---- golden values -------------------------------------------------------------------------------
def test_adapter_merging_matches_golden_values() -> None:
    method = make("mos")
    method.adapters = Bottlenecks(1, 2, 2)
    with torch.no_grad():
        method.adapters.up.fill_(1)
    method.merged = {"up": torch.full_like(method.adapters.up, 3)}
    method.after_step(PROGRESS)
    assert method.adapters.up.unique().tolist() == pytest.approx([1.2])
    for _ in range(11):
        method.after_step(PROGRESS)
    assert method.adapters.up.unique().tolist() == pytest.approx([2.43514093])


def test_contrast_loss_matches_golden_value() -> None:
    means = torch.tensor([[1.0, 0], [0, 1]])
    contrast = compute_mean_contrast(torch.tensor([[1.0, 1]]), means)
    assert contrast.item() == pytest.approx(0.70234648, abs=1e-6)


def test_contrast_loss_is_mean_of_independent_image_losses() -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(5, 4, generator=generator)
    means = torch.randn(3, 4, generator=generator)
    alone = []
    for row in features:
        matrix = torch.cat([means, row[None]])
        alone.append(F.cross_entropy(matrix @ matrix.T / 0.8, torch.arange(4)))
    assert torch.allclose(
        compute_mean_contrast(features, means), torch.stack(alone).mean(), atol=1e-6
    )


def test_ensemble_logits_match_golden_values() -> None:
    """There are two tasks. The prototypes are unit vectors, so the features are the cosines."""
    method = make("mos", (ONE, TWO))
    head = torch.tensor([[0.2, 1.5, 0.1, 0]])
    cosines = torch.tensor([[2.0, 1, 0, 0.5]])
    method.prototypes = {"one": torch.eye(4)[:2], "two": torch.eye(4)[2:]}
    method.firsts = {"one": "one", "two": "one"}
    slices = {"one": slice(0, 2), "two": slice(2, 4)}
    with (
        mock.patch.object(method, "class_slices", return_value=slices),
        mock.patch.object(method, "activate_task"),
        mock.patch.object(method, "features", return_value=cosines),
        mock.patch.object(method, "refine", return_value=head),
        mock.patch("workers.methods.mos.F.normalize", side_effect=lambda tensor: tensor),
    ):
        logits = method.logits(images(1), None)
    expected = [0.98737705, 0.68642472, 0.15675807, 0.16944016]
    assert (2 * logits.exp())[0].tolist() == pytest.approx(expected, abs=1e-6)
    assert logits.exp().sum().item() == pytest.approx(1, abs=1e-6)


# ---- training ------------------------------------------------------------------------------------
def test_adapters_start_from_those_of_previous_task(learned: Any) -> None:
    states, _ = learned
    method = third_task(learned)
    for name, tensor in method.adapters.tensors().items():
        assert torch.equal(tensor, states[1].copies[name])
        mean = (states[0].copies[name] + states[1].copies[name]) / 2
        assert torch.allclose(method.merged[name], mean)
    first = make("mos", (ONE,))
    begun(first, ONE)
    assert not first.adapters.up.any()
    assert not first.merged


def test_adapters_are_merged_once_in_a_step(learned: Any) -> None:
    method, plain = (third_task(learned, merge=merge) for merge in (0.3, 0.0))
    for each in (method, plain):
        each.settings = each.settings.model_copy(update={"dropout": 0.0})
        groups = [{"params": [*each.adapters.parameters()]}]
        loss, _ = each.loss(batch(classes=4), PROGRESS)
        loss.backward()
        torch.optim.SGD(groups, lr=0.1).step()
        each.after_step(PROGRESS)
    for name, tensor in method.adapters.tensors().items():
        expected = 0.7 * plain.adapters.tensors()[name] + 0.3 * method.merged[name]
        assert torch.allclose(tensor, expected, atol=1e-6)


def test_loss_is_cross_entropy_plus_weighted_contrast(learned: Any) -> None:
    method = third_task(learned, contrast=0.5, dropout=0.0)
    loss, terms = method.loss(batch(classes=4), PROGRESS)
    with torch.no_grad():
        features = method.adapted(images(), method.adapters.tensors())
        ce = F.cross_entropy(method.heads["three"](features), batch(classes=4).labels)
        means = torch.cat([method.gaussians[name].means for name in ("two", "one")])
        expected = ce + 0.5 * compute_mean_contrast(features, means)
    assert means.shape == (5, 32)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert terms["contrast"] > 0
    first = make("mos", (ONE,))
    begun(first, ONE)
    assert set(first.loss(batch(), PROGRESS)[1]) == {"ce"}


def test_only_the_new_head_trains_at_a_tenth_of_rate(learned: Any) -> None:
    method = third_task(learned)
    groups = method.head_groups(method.context.optim, [])
    assert [group["lr"] for group in groups] == [pytest.approx(1e-3)] * 2
    trained = {id(parameter) for group in groups for parameter in group["params"]}
    assert trained == {id(parameter) for parameter in method.heads["three"].parameters()}
    assert method.competing_outputs() == 4


def test_later_tasks_leave_stored_adapters_and_class_means(learned: Any) -> None:
    states, carried = learned
    early, early_carried = learn_all("mos", STREAM[:2], align_draws=16)
    assert early[0].to_bytes() == states[0].to_bytes()
    assert early[1].to_bytes() == states[1].to_bytes()
    for path, tensor in early_carried.tensors.items():
        if "aligned" not in path:
            assert torch.equal(carried.tensors[path], tensor)


# ---- statistics and alignment --------------------------------------------------------------------
def test_prototypes_use_first_tasks_adapters_and_means_own_adapters(learned: Any) -> None:
    states, carried = learned
    method = served(learned)
    for task, state in zip(STREAM, states, strict=True):
        pixels, labels = pixels_of(task)
        with torch.no_grad():
            first = method.adapted(pixels, method.find_adapters("two"))
            own = method.adapted(pixels, method.find_adapters(task.name))
        for label in range(task.num_classes):
            rows = labels == label
            prototype = state.copies["prototypes"][label]
            assert torch.allclose(prototype, first[rows].mean(0), atol=1e-5)
            mean = carried.tensors[f"heads/{task.name}/means"][label]
            assert torch.allclose(mean, own[rows].mean(0), atol=1e-5)
        assert state.meta == {"first": "two"}


def test_carried_state_holds_trained_and_aligned_heads(learned: Any) -> None:
    states, carried = learned
    method = served(learned)
    for task in ("two", "one"):
        for key in ("weight", "bias"):
            aligned = carried.tensors[f"heads/{task}/aligned.{key}"]
            assert torch.equal(getattr(method.heads[task], key), aligned)
            assert not torch.equal(aligned, carried.tensors[f"heads/{task}/{key}"])
    assert carried.meta == {"aligned": ["two", "one"]}
    assert not [path for path in carried.tensors if path.startswith("adapters/")]
    head = states[2].head
    assert not torch.equal(head["weight"], carried.tensors["heads/three/weight"])


# ---- answers -------------------------------------------------------------------------------------
def answer(method: Any, image: torch.Tensor) -> torch.Tensor:
    """Return the logits of one image according to the paper's algorithm."""
    slices = method.class_slices()
    owner = [name for name, columns in slices.items() for _ in range(columns.stop - columns.start)]
    features = {name: method.adapted(image, method.find_adapters(name)) for name in slices}
    prototypes = torch.cat([method.prototypes[name] for name in slices])
    cosines = F.cosine_similarity(features["two"], prototypes)
    task, rounds = owner[cosines.argmax()], 0
    while True:
        rounds += 1
        logits = torch.cat([method.heads[name](features[task]) for name in slices], 1)[0]
        named = owner[logits.argmax()]
        if rounds >= 4 or named == task:
            return ((logits.softmax(0) + (len(slices) * cosines).softmax(0)) / 2).log()
        task = named


def test_batched_answers_match_papers_algorithm(learned: Any) -> None:
    method = served(learned)
    probes = torch.cat([pixels_of(task)[0] for task in STREAM] + [3 * images()])
    with torch.no_grad():
        logits = method.logits(probes, None)
        expected = torch.stack([answer(method, image[None]) for image in probes])
    assert torch.allclose(logits, expected, atol=1e-4)
    assert logits.shape == (len(probes), 9)


def test_refinement_tries_at_most_four_adapters_per_image(learned: Any) -> None:
    """The heads always name the next task, so the search never converges."""
    method = served(learned)
    names = list(method.class_slices())
    following = {name: names[(index + 1) % 3] for index, name in enumerate(names)}
    tried = []

    def logits_of(features: torch.Tensor) -> torch.Tensor:
        task = names[int(features[0, 0])]
        tried.append(task)
        logits = torch.zeros(len(features), 9)
        logits[:, method.class_slices()[following[task]]] = 1
        return logits

    def features_of(pixels: torch.Tensor) -> torch.Tensor:
        return torch.full((len(pixels), 32), float(names.index(method.active_task[0])))

    cosines = torch.zeros(2, 9)
    cosines[:, 0] = 1
    with (
        mock.patch.object(method, "all_logits", logits_of),
        mock.patch.object(method, "features", features_of),
    ):
        method.refine(images(2), cosines, {})
    assert tried == [names[0], names[1], names[2], names[0]]


def test_an_answer_does_not_depend_on_the_batch(learned: Any) -> None:
    method = served(learned)
    with torch.no_grad():
        for task in (None, "one", "three"):
            whole = method.logits(images(), task)
            alone = torch.cat([method.logits(images()[row : row + 1], task) for row in range(8)])
            assert torch.allclose(alone, whole, atol=1e-5)


def test_answering_changes_no_tensor(learned: Any) -> None:
    """The released code differs: it merges adapters in forward passes."""
    method = served(learned)
    before = {name: tensor.clone() for name, tensor in method.state_dict().items()}
    adapters = {
        task: {name: t.clone() for name, t in method.find_adapters(task).items()}
        for task in method.class_slices()
    }
    with torch.no_grad():
        first = method.logits(images(), None)
        method.logits(images(), "one")
        assert torch.equal(method.logits(images(), None), first)
    assert all(torch.equal(tensor, before[name]) for name, tensor in method.state_dict().items())
    for task, tensors in adapters.items():
        assert all(torch.equal(method.find_adapters(task)[k], t) for k, t in tensors.items())
    assert compute_digest(method.backbone) == method.backbone_digest


def test_validation_during_training_uses_current_adapters(learned: Any) -> None:
    method = third_task(learned)
    method.eval()
    with torch.no_grad():
        features = method.adapted(images(), method.adapters.tensors())
        expected = torch.cat([method.heads[name](features) for name in ("two", "one", "three")], 1)
        assert torch.allclose(method.logits(images(), None), expected, atol=1e-6)


# ---- states --------------------------------------------------------------------------------------
def test_a_task_stores_as_many_floats_as_published() -> None:
    with torch.device("meta"), mock.patch.object(base, "compute_digest", return_value=""):
        method = Mos(build(BackboneSettings(name="vit_base_patch16_224")), MosSettings(), 0)
        method.is_learning, method.task = True, ONE
        method.adapters = Bottlenecks(len(method.sites), method.sites.width, 16)
    assert sum(t.numel() for t in method.export_adapters().values()) == 304_320
    own = method.flops_share(TaskState("one", (), "mos", "", meta={"first": "one"}))
    later = method.flops_share(TaskState("two", (), "mos", "", meta={"first": "one"}))
    assert later == pytest.approx(2 * own)


def test_a_base_task_is_refused() -> None:
    with pytest.raises(UserError, match=r"base task 'base'.*no adapters.*role `task`"):
        Mos.check_backbone(MosSettings(), vit(), (BASE, ONE))


def test_a_damaged_state_is_refused(learned: Any) -> None:
    states, carried = learned
    state = TaskState.from_bytes(states[1].to_bytes())
    for key, tensor in [*state.copies.items()]:
        del state.copies[key]
        with pytest.raises(UserError, match="task 'one'"):
            serve("mos", [states[0], state], carried)
        state.copies[key] = tensor[..., :1]
        with pytest.raises(UserError, match="task 'one'"):
            serve("mos", [states[0], state], carried)
        state.copies[key] = tensor
    del state.meta["first"]
    with pytest.raises(UserError, match="task 'one'"):
        serve("mos", [states[0], state], carried)


def test_without_the_first_task_answers_are_refused(learned: Any) -> None:
    states, carried = learned
    method = serve("mos", states[1:], carried)
    with pytest.raises(UserError, match=r"task 'one': its class means need .* of task 'two'"):
        method.logits(images(), None)
    with torch.no_grad():
        assert method.logits(images(), "three").shape == (8, 4)


def test_statistics_use_only_data_of_current_task() -> None:
    """`data_of` raises an error for any other split, and has no images of earlier tasks."""
    method = make("mos", (ONE,))
    begun(method, ONE)
    _, carried = method.finish()
    again = make("mos", (ONE,))
    begun(again, ONE, carried, "align", data=data_of(ONE))
    state, left = again.finish()
    assert state.copies["prototypes"].shape == (2, 32)
    assert left.meta == {"aligned": []}
    assert isinstance(left, Carried)
