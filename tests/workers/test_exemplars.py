"""Tests of exemplars: quotas, selection rules against plain loops, and nearest-mean answers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from workers.model import exemplars
from workers.model.exemplars import (
    SELECTIONS,
    at_random,
    class_means,
    closest,
    compute_nearest_mean_logits,
    herding,
    normalise,
    quota,
    rebuffi_herding,
)

ANGLES = (0, 10, -25, 50, 90)
TOY = torch.tensor(
    [(math.cos(math.radians(a)), math.sin(math.radians(a))) for a in ANGLES], dtype=torch.float64
)
BY_FEATURES = ["herding", "rebuffi", "closest"]


def noise(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def some_class(seed: int, n: int = 60, d: int = 16) -> Tensor:
    return torch.randn(n, d, generator=noise(seed)) + 0.5


def chosen(rule: str, features: Tensor, count: int, seed: int = 0) -> list[int]:
    return SELECTIONS[rule](features, count, noise(seed))


# ---- number of exemplars -------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (10, [200, 100, 66, 50, 40, 33, 28, 25, 22, 20]),
        (5, [400, 200, 133, 100, 80, 66, 57, 50, 44, 40]),
        (2, [1000, 500, 333, 250, 200, 166, 142, 125, 111, 100]),
    ],
)
def test_memory_budget_is_shared_by_the_classes_so_far(step: int, expected: list[int]) -> None:
    counts = [quota(2000, 0, seen) for seen in range(step, 101, step)]
    assert counts[:10] == expected
    assert counts[-1] == 2000 // 100 == 20
    assert all(seen * m <= 2000 for seen, m in zip(range(step, 101, step), counts, strict=True))


def test_class_with_fewer_images_than_quota_stores_all() -> None:
    """In the first of 50 tasks of CIFAR-100, the quota per class is 1000, but a class has 500."""
    assert len(herding(some_class(0, 500, 4), quota(2000, 0, 2), noise())) == 500


def test_per_class_quota_ignores_the_number_of_classes() -> None:
    assert [quota(2000, 20, seen) for seen in (1, 10, 1000)] == [20, 20, 20]


# ---- selection rules -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("rule", "expected"), [("herding", [1, 3, 0, 4, 2]), ("rebuffi", [1, 3, 0, 2, 4])]
)
@pytest.mark.parametrize(
    "scale",
    [torch.ones(5, 1), torch.tensor([[3.0], [0.1], [7.0], [1.0], [20.0]])],
    ids=["unit", "any length"],
)
def test_herding_matches_worked_order_for_any_feature_length(
    rule: str, expected: list[int], scale: Tensor
) -> None:
    assert chosen(rule, TOY * scale, 5) == expected


def by_distance(features: Tensor, count: int) -> list[int]:
    """Return the selection by a literal implementation of iCaRL's Algorithm 4."""
    unit = features.double() / (features.double().norm(dim=1, keepdim=True) + 1e-8)
    mean, chosen_indices = unit.mean(0), list[int]()
    for k in range(1, count + 1):
        distance = {
            i: float((mean - unit[[*chosen_indices, i]].sum(0) / k).norm())
            for i in range(len(unit))
            if i not in chosen_indices
        }
        chosen_indices.append(min(distance, key=distance.__getitem__))
    return chosen_indices


def with_replacement(features: Tensor, count: int) -> tuple[list[int], int]:
    """Return the selection of the released form, and its number of rounds."""
    unit = features.double() / (features.double().norm(dim=1, keepdim=True) + 1e-8)
    won = list[int]()
    while len(set(won)) < count:
        w = unit.mean(0) * (len(won) + 1) - unit[won].sum(0)
        won.append(int((unit @ w).argmax()))
    return list(dict.fromkeys(won)), len(won)


@pytest.mark.parametrize("seed", range(20))
def test_herding_matches_icarl_algorithm_4(seed: int) -> None:
    assert herding(some_class(seed), 20, noise()) == by_distance(some_class(seed), 20)


def test_rebuffi_herding_selects_with_replacement() -> None:
    assert with_replacement(TOY, 5) == ([1, 3, 0, 2, 4], 6)
    orders = [with_replacement(some_class(seed), 20) for seed in range(20)]
    assert [rebuffi_herding(some_class(seed), 20, noise()) for seed in range(20)] == [
        order for order, _ in orders
    ]
    assert max(rounds for _, rounds in orders) > 20
    assert any(order != by_distance(some_class(seed), 20) for seed, (order, _) in enumerate(orders))


def test_rebuffi_herding_fills_up_after_its_maximum_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert exemplars.MAX_REBUFFI_ROUNDS == 1000
    monkeypatch.setattr(exemplars, "MAX_REBUFFI_ROUNDS", 3)
    features = some_class(1)
    first = with_replacement(features, 3)[0]
    assert rebuffi_herding(features, 6, noise()) == [
        *first,
        *[i for i in range(60) if i not in first][:3],
    ]


def test_closest_sorts_by_distance_of_unnormalized_features() -> None:
    # The mean is (3, 1). By direction, the last feature would be farthest, not the first.
    features = torch.tensor([[9.0, 0.0], [2.0, 1.0], [1.0, 1.0], [0.0, 2.0]])
    assert closest(features, 4, noise()) == [1, 2, 3, 0]
    class_features = some_class(3)
    distances = (class_features - class_features.mean(0)).norm(dim=1)[
        closest(class_features, 60, noise())
    ]
    assert bool((distances.diff() >= 0).all())


def test_random_draws_without_replacement_and_only_from_its_generator() -> None:
    features = some_class(0)
    indices = at_random(features, 40, noise(1))
    assert len(set(indices)) == 40
    assert indices == at_random(torch.zeros(60, 2), 40, noise(1))
    assert indices != at_random(features, 40, noise(2))
    assert sorted(at_random(features, 60, noise(1))) == [*range(60)]


@pytest.mark.parametrize("rule", SELECTIONS)
def test_smaller_selection_is_prefix_of_larger(rule: str) -> None:
    most = chosen(rule, some_class(5), 40)
    assert len(set(most)) == 40
    for count in (1, 2, 7, 20, 39):
        assert chosen(rule, some_class(5), count) == most[:count]


@pytest.mark.parametrize("rule", SELECTIONS)
@pytest.mark.parametrize("n", [1, 2, 5])
def test_all_images_are_chosen_once_if_too_few(rule: str, n: int) -> None:
    assert sorted(chosen(rule, some_class(6, n), 10)) == [*range(n)]


@pytest.mark.parametrize("rule", BY_FEATURES)
def test_selection_does_not_depend_on_image_order(rule: str) -> None:
    features = some_class(7)
    order = torch.randperm(60, generator=noise(8))
    assert [int(order[i]) for i in chosen(rule, features[order], 20)] == chosen(rule, features, 20)


@pytest.mark.parametrize("rule", BY_FEATURES)
def test_first_of_two_equal_images_is_chosen_first(rule: str) -> None:
    one = some_class(9, 6, 4)
    twice = torch.cat([one, one])
    indices = chosen(rule, twice, 12)
    assert indices[0] < 6
    assert all(indices.index(i) < indices.index(i + 6) for i in range(6))


@pytest.mark.parametrize("rule", SELECTIONS)
def test_zero_feature_does_not_break_the_selection(rule: str) -> None:
    features = some_class(10, 8, 4)
    features[3] = 0
    assert sorted(chosen(rule, features, 8)) == [*range(8)]


# ---- nearest-mean answers ------------------------------------------------------------------------
FEATURES, LABELS = some_class(11, 30, 8), torch.arange(30) % 4


def test_class_mean_is_the_normalized_mean_of_unit_vectors() -> None:
    means = class_means(FEATURES, LABELS, 4)
    for c in range(4):
        mean = F.normalize(FEATURES[c == LABELS], dim=1).mean(0)
        assert torch.allclose(means[c], mean / mean.norm(), atol=1e-6)
    assert means.dtype == FEATURES.dtype
    assert class_means(FEATURES.double(), LABELS, 4).dtype == torch.float64


def test_logits_are_negative_squared_distances_of_unit_vectors() -> None:
    means, images = class_means(FEATURES, LABELS, 4), some_class(12, 9, 8)
    expected = -(F.normalize(images, dim=1)[:, None] - means).square().sum(2)
    assert torch.allclose(compute_nearest_mean_logits(images, means), expected, atol=1e-6)


def test_one_exemplar_per_class_gives_nearest_cosine_answers() -> None:
    images, stored = some_class(13, 50, 8) - 0.5, some_class(14, 5, 8) - 0.5
    by_cosine = F.cosine_similarity(images[:, None], stored, dim=2).argmax(1)
    assert torch.equal(
        compute_nearest_mean_logits(images, class_means(stored, torch.arange(5), 5)).argmax(1),
        by_cosine,
    )
    assert len(by_cosine.unique()) == 5


def test_answers_do_not_depend_on_feature_length() -> None:
    means, images = class_means(FEATURES, LABELS, 4), some_class(15, 9, 8)
    lengths = torch.rand(39, 1, generator=noise(16)) * 20 + 0.1
    assert torch.allclose(class_means(FEATURES * lengths[:30], LABELS, 4), means, atol=1e-6)
    assert torch.allclose(
        compute_nearest_mean_logits(images * lengths[30:], means),
        compute_nearest_mean_logits(images, means),
        atol=1e-6,
    )


def test_zero_feature_normalizes_to_zero_and_gives_finite_logits() -> None:
    assert torch.equal(normalise(torch.zeros(2, 3)), torch.zeros(2, 3, dtype=torch.float64))
    assert torch.isfinite(
        compute_nearest_mean_logits(torch.zeros(2, 8), class_means(FEATURES, LABELS, 4))
    ).all()
