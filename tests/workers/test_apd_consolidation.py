"""Tests of APD's consolidation: clusters, shared values, changes of weights, and promises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from step_contexts import step_context
from test_apd import (
    RATES,
    SITE,
    TASKS,
    apd,
    begun,
    furthest,
    left_by,
    served,
    size_of,
    theta,
    trained,
)
from torch import Tensor

from pipeline.testing.lab import SETTINGS
from pipeline.testing.promises import PROMISES
from workers.job import Task
from workers.methods.apd import Apd, ApdSettings, Sparse, cluster, compute_mean_magnitude


def test_every_kth_task_has_a_consolidation_step() -> None:
    def steps(every: int) -> list[list[str]]:
        return [
            [s.name for s in Apd.steps_for(ApdSettings(consolidate_every=every), position)]
            for position in range(-1, 4)
        ]

    alone, both = ["train"], ["train", "consolidate"]
    assert steps(2) == [[], alone, both, alone, both]
    assert steps(0) == [[], alone, alone, alone, alone]
    assert steps(1) == [[], both, both, both, both]


@pytest.mark.parametrize(
    ("points", "count", "expected"),
    [
        ([[0.0], [5.0], [0.1], [5.1]], 2, [0, 1, 0, 1]),
        ([[0.0], [1.0], [10.0], [4.0], [11.0]], 2, [0, 0, 1, 0, 1]),
        ([[0.0], [4.0], [2.0]], 2, [0, 1, 0]),  # a tie goes to the first
        ([[1.0], [1.0], [1.0]], 2, [0, 0, 0]),
        ([[1.0], [2.0]], 5, [0, 1]),
    ],
)
def test_clusters_equal_worked_examples(points: Any, count: int, expected: Any) -> None:
    assert cluster(torch.tensor(points).double(), count) == expected


def consolidating(taus: list[Tensor], **settings: Any) -> Apd:
    """Return the method after a consolidation of tasks.

    taus: the first values of each task's tau at SITE. All other values of tau are zero.
    """
    method: Apd = apd(**{"consolidate_every": len(taus), "gap": 0.1, "clusters": 1, **settings})
    method.sigma = {site: w.detach().clone() for site, w in method.sites.items()}
    for i, tau in enumerate(taus):
        full = torch.zeros(method.sites[SITE].numel())
        full[: len(tau)] = tau
        method.tau[TASKS[i].name] = {
            site: Sparse.of(full.view_as(w) if site == SITE else torch.zeros_like(w))
            for site, w in method.sites.items()
        }
    method.consolidate()
    return method


def test_consolidation_equals_a_worked_example() -> None:
    """The entries of both tasks are: near; far; in one task only; near, but with different signs;
    equal; exactly one gap apart; far. Their mean size is 0.5, so that a gap of 1/8 is 1/16.
    """
    one = torch.tensor([0.3125, 0.3125, 0.0625, -0.015625, 0.75, 0.5, 2.0])
    two = torch.tensor([0.34375, 0.625, 0.0, 0.03125, 0.75, 0.5625, 0.234375])
    assert float(compute_mean_magnitude(torch.stack([one, two]))) == 0.5
    method = consolidating([one, two], gap=0.125)
    shared = torch.tensor([0.328125, 0.0, 0.0, 0.0078125, 0.75, 0.53125, 0.0])
    for task, tau in (("one", one), ("two", two)):
        task_tau = method.restore_tau(task, SITE).flatten()[:7]
        assert torch.equal(method.restore_shared(task, SITE).flatten()[:7], shared)
        assert torch.equal(task_tau, torch.where(shared != 0, 0.0, tau))
    assert method.restore_shared("one", SITE).count_nonzero() == 4
    assert method.restore_shared("three", SITE).count_nonzero() == 0
    assert method.replaced == {"one": (7, 4), "two": (6, 4)}


@pytest.mark.parametrize("scale", [1e-3, 1.0, 64.0])
def test_shared_entries_do_not_depend_on_the_scale_of_tau(scale: float) -> None:
    torch.manual_seed(0)
    taus = [torch.randn(40), torch.randn(40)]
    expected = consolidating(taus).restore_shared("one", SITE) != 0
    is_shared = consolidating([scale * tau for tau in taus]).restore_shared("one", SITE) != 0
    assert 0 < int(expected.count_nonzero()) < 20
    assert torch.equal(is_shared, expected)


def test_consolidation_of_unrelated_tasks_replaces_few_entries() -> None:
    """The released code's absolute gap of 1e-2 would replace nearly all of these entries."""
    torch.manual_seed(0)
    method = consolidating([1e-3 * torch.randn(400) for _ in range(2)], gap=ApdSettings().gap)
    entries, replaced = method.replaced["one"]
    assert entries == 400
    assert 0 < replaced < 0.1 * entries


def test_warning_if_consolidation_replaces_most_of_a_tau() -> None:
    torch.manual_seed(0)
    tau = torch.randn(400)
    (sentence,) = consolidating([tau, tau + 1e-3], gap=0.1).warnings()
    dense = 400 / sum(w.numel() for w in apd().sites.values())
    assert f"of task 'one', whose tau is {dense:.0%} dense" in sentence
    assert "lower gap" in sentence
    assert consolidating([tau, torch.randn(400)], gap=0.1).warnings() == []
    assert consolidating([torch.zeros(4), torch.zeros(4)]).warnings() == []


def test_only_similar_tasks_share_values() -> None:
    near, far = torch.tensor([1.0, 1.0, 0.02]), torch.tensor([9.0, 9.0, 0.02])
    method = consolidating([near, far, near + 0.01], clusters=2)
    assert [*method.shared[SITE]] == [("one", "three")]
    assert torch.equal(method.restore_tau("two", SITE).flatten()[:3], far)


@pytest.mark.parametrize("gap", [0.05, 0.5, 20.0])
def test_consolidation_bounds_weight_changes_and_reduces_stored_bytes(
    gap: float,
) -> None:
    settings = {"consolidate_every": 3, "clusters": 1, "gap": gap}
    states, carried = left_by(3, **settings | {"consolidate_every": 0})
    before, method = served(states, carried, **settings), served(states, carried, **settings)
    method.consolidate()
    after = served(states, method.carried(), **settings)
    moved = 0.0
    for site in method.sites:
        limit = (
            gap
            * float(
                compute_mean_magnitude(
                    torch.stack([before.restore_tau(task, site) for task in before.tau])
                )
            )
            / 2
        )
        way = max(
            float((theta(before, task)[site] - theta(after, task)[site]).abs().max())
            for task in range(3)
        )
        assert way <= limit + 1e-7
        moved = max(moved, way)
    assert moved > 0
    assert size_of(method.carried(), "tau/") + size_of(method.carried(), "shared/") < size_of(
        carried, "tau/"
    )
    assert all(
        theta(method, task)[site].equal(theta(after, task)[site])
        for task in range(3)
        for site in method.sites
    )
    for site in method.sites:
        for task in before.tau:  # no entry is both shared and in tau
            assert not bool(
                (
                    (method.restore_tau(task, site) != 0) & (method.restore_shared(task, site) != 0)
                ).any()
            )


def test_second_consolidation_starts_from_the_full_task_values() -> None:
    values = [torch.tensor([1.0, 2.0, 0.0]), torch.tensor([1.0, 2.05, 3.0])]
    method = consolidating(values)
    full = [method.restore_tau(t, SITE) + method.restore_shared(t, SITE) for t in ("one", "two")]
    method.consolidate()
    assert [*method.shared[SITE]] == [("one", "two")]
    for task, expected in zip(("one", "two"), full, strict=True):
        assert torch.equal(
            method.restore_tau(task, SITE) + method.restore_shared(task, SITE), expected
        )


def test_number_of_clusters_grows_with_every_consolidation() -> None:
    far = [torch.tensor([float(v)]) for v in (0, 5, 50)]
    # 0 and 5 are in one cluster, but share nothing
    assert (
        len(
            {
                tuple(m)
                for m in consolidating(
                    [
                        *far,
                    ],
                    clusters=2,
                ).shared[SITE]
            }
        )
        == 0
    )
    # three clusters for three tasks
    method = consolidating(
        [torch.tensor([v]) for v in (5.0, 5.05, 50.0)], consolidate_every=1, clusters=1
    )
    assert not method.shared[SITE]


def test_later_tasks_keep_shared_values_and_stay_within_the_bound() -> None:
    settings = {"consolidate_every": 2, "clusters": 1}
    states, carried = left_by(2, **settings | {"consolidate_every": 0})
    method = served(states, carried, **settings)
    method.consolidate()
    consolidated = method.carried()
    assert size_of(consolidated, "shared/") > 0
    last = trained(begun(3, (states, consolidated), **settings))
    state, after = last.finish()
    for name, tensor in consolidated.tensors.items():
        assert not name.startswith("shared/") or torch.equal(tensor, after.tensors[name])
    assert after.meta == consolidated.meta | {"tasks": ["one", "two", "three"]}
    now = served([*states, state], after, **settings)
    for task in range(2):
        assert furthest(theta(method, task), theta(now, task)) <= 4e-4 + 4e-6 + 1e-6
    assert all(
        torch.equal(theta(last, task)[site], theta(now, task)[site])
        for task in range(3)
        for site in now.sites
    )


def test_consolidation_keeps_the_trained_state() -> None:
    first = left_by(1)
    base = Task("zero", "card", "", ("x", "y"), role="base")
    alone = trained(begun(consolidate_every=2), steps=1)
    alone.stream = (base, TASKS[0])
    assert size_of(alone.finish()[1], "own/") == 0
    method, last = trained(begun(2, first, consolidate_every=2)), apd(consolidate_every=2)
    method.stream = last.stream = (base, *TASKS[:2])
    state, carried = method.finish()
    assert size_of(carried, "own/") == sum(state.sizes().values())
    last.load_task(first[0][0])
    assert last.begin(step_context(TASKS[1], "consolidate", carried, RATES, (TASKS[1],))) == []
    again, after = last.finish()
    assert again.to_bytes() == state.to_bytes()
    assert size_of(after, "own/") == 0
    assert not last.warnings()


@pytest.mark.parametrize(
    "promise",
    [
        "the_stored_bytes_are_the_method",
        "a_stage_tried_again_gives_the_same_bytes_and_leaves_its_parents_alone",
        "tasks_share_no_memory",
        "whatever_is_stored_has_a_part_in_the_answers",
        "the_recorded_size_is_the_size_of_the_file",
        "an_interrupted_stage_ends_as_if_it_had_not_been",
    ],
)
def test_promises_hold_with_a_consolidation_after_every_task(
    lab: Any, monkeypatch: pytest.MonkeyPatch, promise: str
) -> None:
    monkeypatch.setitem(
        SETTINGS, ("apd", "adamw"), {"consolidate_every": 1, "clusters": 1, "zeros": "proximal"}
    )
    assert [job.step for job in lab.run("apd").stages(1)] == ["train", "consolidate"]
    PROMISES[promise].check(lab, "apd", "adamw")
