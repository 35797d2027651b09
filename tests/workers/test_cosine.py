"""Tests of cosine heads, initial class vectors, and the worked values of losses on similarities."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from workers.model.cosine import CosineHeads, imprint, k_means, margin_rank, nca
from workers.model.exemplars import normalise

D = 8


def heads(proxies: int = 1, scale: float = 3.0) -> CosineHeads:
    cosine_heads = CosineHeads(D, proxies, scale)
    cosine_heads.add("a", 3, 0)
    cosine_heads.add("b", 2, 0)
    return cosine_heads


def features(n: int = 6, seed: int = 0) -> Tensor:
    return torch.randn(n, D, generator=torch.Generator().manual_seed(seed))


# ---- heads ---------------------------------------------------------------------------------------
def test_an_output_is_the_scaled_cosine_with_the_class_vector() -> None:
    layer, h = heads()["a"], features()
    expected = torch.stack([F.cosine_similarity(h, w.expand_as(h)) for w in layer.weight[:, 0]], 1)
    assert layer(h).shape == (6, layer.out_features) == (6, 3)
    assert torch.allclose(layer(h), 3.0 * expected, atol=1e-6)
    assert torch.allclose(layer(7 * h), layer(h), atol=1e-6), (
        "the length of features must not matter"
    )


def test_proxies_are_weighted_by_softmax_of_their_cosines() -> None:
    layer, h = heads(proxies=4)["a"], features()
    expected = torch.zeros(6, 3)
    for i in range(6):
        for c in range(3):
            each = [float(F.cosine_similarity(h[i], w, dim=0)) for w in layer.weight[c].detach()]
            total = sum(map(math.exp, each))
            expected[i, c] = sum(math.exp(s) / total * s for s in each)
    assert torch.allclose(layer(h) / 3.0, expected, atol=1e-6)
    assert layer(h).abs().max() <= 3.0


def test_initial_vectors_are_uniform_and_independent_of_other_heads() -> None:
    one, other = heads(), CosineHeads(D)
    other.add("b", 2, 0)
    assert torch.equal(one["b"].weight, other["b"].weight)
    assert not torch.equal(one["a"].weight[:2], one["b"].weight)
    many = CosineHeads(D).add("many", 5000, 0).weight.detach() * math.sqrt(D)
    assert many.abs().max() <= 1
    assert many.abs().mean() == pytest.approx(0.5, abs=0.01)
    assert many.mean() == pytest.approx(0.0, abs=0.01)


@pytest.mark.parametrize("proxies", [1, 3])
def test_new_classes_do_not_change_old_outputs(proxies: int) -> None:
    cosine_heads, h = heads(proxies), features()
    before = cosine_heads["a"](h), cosine_heads["b"](h)
    cosine_heads.add("c", 4, 0)
    assert all(
        torch.equal(cosine_heads[name](h), old) for name, old in zip("ab", before, strict=True)
    )


def test_heads_share_one_scale_stored_with_each_head() -> None:
    cosine_heads, h = heads(), features()
    assert sum(name.endswith("scale") for name, _ in cosine_heads.named_parameters()) == 1
    with torch.no_grad():
        cosine_heads.scale.mul_(2.0)
    stored = {name: cosine_heads.export(name) for name in "ab"}
    assert all(
        set(tensors) == {"weight", "scale"} and float(tensors["scale"]) == 6.0
        for tensors in stored.values()
    )
    other = CosineHeads(D)
    for name, tensors in stored.items():
        other.restore(name, tensors)
        assert torch.equal(other[name](h), cosine_heads[name](h))
    with torch.no_grad():
        other.scale.fill_(1.0)
    assert all(
        torch.allclose(other[name](h), cosine_heads[name](h) / 6, atol=1e-6) for name in "ab"
    )
    assert float(stored["a"]["scale"]) == 6.0


def test_last_restored_scale_applies_to_all_heads() -> None:
    both_heads = heads(scale=3.0)
    later = {**both_heads.export("b"), "scale": torch.tensor(5.0)}
    both_heads.restore("b", later)
    exported_scales = [float(both_heads.export(name)["scale"]) for name in "ab"]
    assert exported_scales == [5.0, 5.0]


def test_a_copied_head_keeps_its_own_scale() -> None:
    cosine_heads, h = heads(), features()
    head_copy, before = copy.deepcopy(cosine_heads["a"]), cosine_heads["a"](h)
    with torch.no_grad():
        cosine_heads.scale.fill_(1.0)
    assert torch.equal(head_copy(h), before)


def test_linear_head_of_base_task_is_ignored() -> None:
    cosine_heads = CosineHeads(D)
    cosine_heads.restore("base", torch.nn.Linear(D, 3).state_dict())
    assert cosine_heads.names == []


def test_similarities_are_in_full_precision_under_autocast() -> None:
    layer, h = heads(2)["a"], features()
    expected = layer(h)
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = layer(h)
    assert under_autocast.dtype == torch.float32
    assert torch.equal(under_autocast, expected)


# ---- imprinting ----------------------------------------------------------------------------------
def test_imprinted_vector_is_scaled_mean_of_unit_vectors() -> None:
    h, labels = features(12) * torch.arange(1.0, 13)[:, None], torch.arange(12) % 3
    vectors = imprint(h, labels, 3, 1, 0.7, 0)
    assert vectors.shape == (3, 1, D)
    assert torch.allclose(vectors.norm(dim=2), torch.full((3, 1), 0.7), atol=1e-6)
    for label in range(3):
        mean = F.normalize(h[labels == label], dim=1).mean(0)
        assert F.cosine_similarity(vectors[label, 0], mean, dim=0) == pytest.approx(1.0, abs=1e-6)


def test_proxies_point_along_the_clusters_of_their_class() -> None:
    """Each class has two distant directions with a little noise. The proxies find both, for any
    lengths of features."""
    axes = torch.eye(D)[:4]
    noise = 0.01 * torch.randn(40, D, generator=torch.Generator().manual_seed(1))
    h = (axes[torch.arange(40) % 4] + noise) * torch.linspace(1, 9, 40)[:, None]
    labels = (torch.arange(40) % 4) // 2  # class 0: axes 0 and 1; class 1: axes 2 and 3
    vectors = imprint(h, labels, 2, 2, 2.0, 0)
    for label in range(2):
        near = vectors[label] @ axes[2 * label : 2 * label + 2].T / 2.0
        assert sorted(near.argmax(1).tolist()) == [0, 1]
        assert near.max(1).values.min() > 0.999
    assert torch.allclose(vectors.norm(dim=2), torch.full((2, 2), 2.0), atol=1e-6)


def test_k_means_centres_are_means_of_nearest_points() -> None:
    """Each centre is the mean of its nearest points, and the same seed gives the same centres."""
    points = normalise(features(60))
    centres = k_means(points, 5, torch.Generator().manual_seed(3))
    nearest = torch.cdist(points, centres).argmin(1)
    assert nearest.unique().tolist() == [0, 1, 2, 3, 4]
    assert all(
        torch.allclose(centres[i], points[nearest == i].mean(0), atol=1e-12) for i in range(5)
    )
    assert torch.equal(centres, k_means(points, 5, torch.Generator().manual_seed(3)))
    assert not torch.equal(centres, k_means(points, 5, torch.Generator().manual_seed(4)))


def test_single_k_means_centre_is_the_mean() -> None:
    points = normalise(features(7))
    assert torch.allclose(
        k_means(points, 1, torch.Generator().manual_seed(0)),
        points.mean(0, keepdim=True),
        atol=1e-15,
    )


@pytest.mark.parametrize("n", [1, 2, 5])
def test_k_means_returns_all_centres_for_few_or_equal_points(n: int) -> None:
    points = normalise(features(1)).expand(n, D) if n > 2 else normalise(features(n))
    centres = k_means(points, 4, torch.Generator().manual_seed(0))
    assert centres.shape == (4, D)
    assert torch.cdist(centres, points).amin(1).max() < 1e-6
    assert torch.isfinite(
        imprint(features(n), torch.zeros(n, dtype=torch.long), 1, 4, 1.0, 0)
    ).all()


# ---- losses --------------------------------------------------------------------------------------
S = torch.tensor([[0.8, 0.3, 0.6, 0.5], [0.1, 0.2, 0.9, 0.4]], dtype=torch.float64)


def test_margin_loss_has_the_worked_value() -> None:
    each = margin_rank(S, torch.tensor([0, 1]), 2, 2, 0.5)
    assert each.tolist() == pytest.approx([0.25, 0.95])
    assert float(each.mean()) == pytest.approx(0.6)


def test_margin_loss_uses_only_most_similar_new_classes() -> None:
    assert margin_rank(S, torch.tensor([0, 1]), 2, 1, 0.5).tolist() == pytest.approx([0.3, 1.2])
    other = S.clone()
    other[0, 1] = 5.0  # another old class
    assert torch.equal(
        margin_rank(other, torch.tensor([0, 1]), 2, 2, 0.5),
        margin_rank(S, torch.tensor([0, 1]), 2, 2, 0.5),
    )


def test_margin_loss_is_zero_for_samples_of_new_classes() -> None:
    assert margin_rank(S, torch.tensor([2, 3]), 2, 2, 0.5).tolist() == [0.0, 0.0]


def test_margin_loss_is_zero_beyond_the_margin() -> None:
    ahead = torch.tensor([[0.9, 0.0, 0.4, 0.1], [0.3, 0.75, 0.25, -0.2]], dtype=torch.float64)
    assert margin_rank(ahead, torch.tensor([0, 1]), 2, 2, 0.5).tolist() == [0.0, 0.0]
    assert (
        margin_rank(
            ahead - 1e-3 * F.one_hot(torch.tensor([0, 1]), 4), torch.tensor([0, 1]), 2, 2, 0.5
        ).min()
        > 0
    )


SIMS, LABELS = (
    torch.tensor([[0.9, 0.2, -0.1], [0.1, 0.3, 0.0]], dtype=torch.float64),
    torch.tensor([0, 2]),
)


def test_nca_loss_has_the_worked_value() -> None:
    assert float(nca(SIMS, LABELS, 2.0, 0.6, hinge=False)) == pytest.approx(1.27525160, abs=1e-8)
    one = [float(nca(SIMS[i : i + 1], LABELS[i : i + 1], 2.0, 0.6, hinge=False)) for i in range(2)]
    assert one == pytest.approx([0.2375, 2.3130], abs=1e-4)


def test_nca_sum_excludes_the_own_class() -> None:
    """If the similarity to the own class grows by 1, the loss falls by eta, without limit. With the
    own class in the sum, the loss would saturate."""
    further = SIMS + F.one_hot(LABELS, 3)
    assert float(
        nca(SIMS, LABELS, 2.0, 0.6, False) - nca(further, LABELS, 2.0, 0.6, False)
    ) == pytest.approx(2.0, abs=1e-12)


def test_nca_margin_adds_eta_times_margin_to_loss() -> None:
    assert float(
        nca(SIMS, LABELS, 2.0, 0.6, False) - nca(SIMS, LABELS, 2.0, 0.0, False)
    ) == pytest.approx(1.2, abs=1e-12)


def test_nca_hinge_ignores_clearly_correct_samples() -> None:
    sims = SIMS.clone()
    sims[0, 0] = 5.0
    sims.requires_grad_()
    loss = nca(sims, LABELS, 2.0, 0.6)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(2.3130 / 2, abs=1e-4)
    assert sims.grad is not None
    assert sims.grad[0].tolist() == [0.0, 0.0, 0.0]
    assert torch.isfinite(sims.grad).all()
