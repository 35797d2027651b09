"""Tests of replay from a reservoir: the kept images, the batches on any number of ranks, and the
loss of `er`."""

from __future__ import annotations

from itertools import chain, combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from rank_runs import on_ranks
from reservoir_steps import ONE, Z2, Z, feed_of, identity, losses, rows, run_of
from torch.nn import functional as F

from pipeline.results.training import sum_budget
from pipeline.testing.lab import OPTIMIZERS, Lab, history
from workers.data.order import DrawnOrder
from workers.dist import Group
from workers.errors import UserError
from workers.job import DataSettings, TrainSettings
from workers.methods import METHODS
from workers.methods.bases.reservoir import Reservoir, keep_reservoir, list_slots
from workers.storage.artifact import Artifact
from workers.storage.taskstate import Carried

RESERVOIR = sorted(name for name, cls in METHODS.items() if issubclass(cls, Reservoir))
SGD = {**OPTIMIZERS["sgd"], "epochs": 1}


# ---- the reservoir -------------------------------------------------------------------------------
def reservoir(count: int, size: int, seed: int) -> list[str]:
    memory = keep_reservoir({"t": {"c": [str(i) for i in range(count)]}}, size, seed)
    return list(chain(*memory["t"].values()))


def test_reservoir_keeps_each_subset_with_equal_probability() -> None:
    """With six images and three slots, each of the 20 subsets has probability 1/20, and each image
    1/2. An off-by-one error would give 2/5 or 3/5."""
    draws = [frozenset(reservoir(6, 3, seed)) for seed in range(4000)]
    shares = [draws.count(frozenset(s)) / len(draws) for s in combinations("012345", 3)]
    assert shares == pytest.approx([1 / 20] * 20, abs=0.014), "four standard deviations"
    kept = [sum(name in draw for draw in draws) / len(draws) for name in "012345"]
    assert kept == pytest.approx([1 / 2] * 6, abs=0.032)


def test_incremental_reservoir_equals_reservoir_of_all_images() -> None:
    keys = [str(i) for i in range(40)]
    whole = keep_reservoir({"b": {"x": keys[:10], "w": keys[10:20]}, "a": {"y": keys[20:]}}, 7, 3)
    first = keep_reservoir({"b": {"x": keys[:10], "w": keys[10:20]}}, 7, 3)
    assert keep_reservoir(first | {"a": {"y": keys[20:]}}, 7, 3) == whole
    assert [*whole] == sorted(whole)
    assert len(list_slots(whole)) == 7
    assert {*list_slots(keep_reservoir(whole, 4, 3))} <= {*list_slots(whole)}
    assert keep_reservoir({"a": {"y": keys}}, 99, 3)["a"]["y"] != keys, "sorted by priority"


def test_training_budget_counts_replayed_images(lab: Lab) -> None:
    run = run_of(lab, replay_batch=7)
    first, second = (run.artifact(run.stages(task)[0]).manifest for task in (0, 1))
    assert "replayed" not in first["length"]
    assert second["length"]["replayed"] == 7 * second["length"]["steps"]
    own = second["length"]["images"] * second["length"]["epochs"]
    assert sum_budget([second], 1, 0.0).images == own + second["length"]["replayed"]


# ---- the batches ---------------------------------------------------------------------------------
def test_draws_are_uniform_and_without_replacement() -> None:
    order = DrawnOrder(10, (4, 4), 50, seed=1, epoch=0)
    assert order.size(0) == 8
    everything = np.arange(8)
    rows = np.stack([order.rows(step, everything) for step in range(50)])
    assert all(len({*row[:4]}) == len({*row[4:]}) == 4 for row in rows.tolist())
    assert any({*row[:4]} & {*row[4:]} for row in rows.tolist()), "draws are independent"
    assert np.array_equal(order.rows(7, np.array([5, 2])), rows[7][[5, 2]])
    counts = np.bincount(rows.flatten(), minlength=10)
    assert counts == pytest.approx(np.full(10, 40), abs=20)
    other = DrawnOrder(10, (4, 4), 50, seed=1, epoch=1)
    assert not np.array_equal(other.rows(0, everything), rows[0])
    assert DrawnOrder(3, (4, 4), 50, seed=1, epoch=0).size(0) == 6, (
        "a small memory is drawn completely"
    )


def test_replay_batches_do_not_depend_on_ranks(lab: Lab) -> None:
    """They also do not depend on micro-batches or on the first step of an epoch."""
    run = run_of(lab, memory=12)
    slots = list_slots(run.carried(0).meta["memory"])
    whole = [step for (step,) in feed_of(run, Group()).epoch(0)]
    assert {int(task) for step in whole for task in step.tasks} == {1}, "the task's own images"
    parts = [[*feed_of(run, Group(rank, 2), 2).epoch(0, start_step=1)] for rank in range(2)]
    for number, step in enumerate(whole[1:]):
        assert step.replay is not None
        assert step.replay.slots is not None
        assert len(step.replay) == 10
        assert (step.replay.tasks == 0).all()
        replays = [b.replay for rank in parts for b in rank[number] if b.replay is not None]
        assert sum(replay.weight for replay in replays) == pytest.approx(1)
        for replay in replays:
            assert replay.slots is not None
            positions = replay.draw.positions
            assert torch.equal(replay.images, step.replay.images[positions])
            assert torch.equal(replay.slots, step.replay.slots[positions])
            assert torch.equal(replay.labels, step.replay.labels[positions])
    labels = {slot: ["0", "1"].index(slots[slot][1].split("/")[-2]) for slot in range(len(slots))}
    for step in whole:
        assert step.replay is not None
        assert step.replay.slots is not None
        assert step.replay.labels.tolist() == [labels[slot] for slot in step.replay.slots.tolist()]


@pytest.mark.slow
@pytest.mark.parametrize("method", RESERVOIR)
def test_two_ranks_train_like_one(lab: Lab, method: str, tmp_path: Path) -> None:
    """Tensors agree up to the order of summation, and the memory is equal. The last batches of both
    feeds are ragged or leave a rank without images."""
    settings = {"memory": 5, "replay_batch": 3}
    run = lab.run_of(method, SGD, settings=settings, scenario="class")
    run.trained(1)
    jobs = [*run.stages(0), *run.stages(1)]
    expected = [Artifact.need(job.root, job.key) for job in jobs]
    other = Lab(tmp_path / "two")
    other.folder.mkdir()
    other.__dict__["card"] = lab.card
    again = other.run_of(method, SGD, settings=settings, scenario="class")
    again.artifact(next(j for j in again.jobs.values() if j.step == "backbone"))
    on_ranks([*again.stages(0), *again.stages(1)], 2, tmp_path / "ranks")
    for job, artifact in zip([*again.stages(0), *again.stages(1)], expected, strict=True):
        assert job.key == jobs[[j.id for j in jobs].index(job.id)].key
        found = Carried.from_bytes(Artifact.need(job.root, job.key).read("carried.safetensors"))
        carried = Carried.from_bytes(artifact.read("carried.safetensors"))
        assert found.meta == carried.meta
        for name, tensor in carried.tensors.items():
            assert torch.allclose(found.tensors[name], tensor, atol=1e-3), name


# ---- stages --------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", RESERVOIR)
def test_a_stage_replays_old_images_beside_its_own(lab: Lab, method: str) -> None:
    run = run_of(lab, method, memory=10)
    first, second = (run.carried(task).meta["memory"] for task in (0, 1))
    assert len(list_slots(first)) == len(list_slots(second)) == 10
    assert {*list_slots(second)} & {*list_slots(first)}
    assert {*second} == {"two", "three"}
    row = history(run.artifact(run.stages(1)[0]))[0]
    assert row["images"] == 3 * 36, "exemplars are not in the epoch"
    assert {"replay", "mse"} & row.keys()
    replays_own = method == "er_ace"  # its other term does not compare new with old classes
    row = history(run.artifact(run.stages(0)[0]))[0]
    assert bool({"replay", "mse"} & row.keys()) == replays_own


@pytest.mark.parametrize("method", RESERVOIR)
def test_mixed_labels_are_refused(method: str) -> None:
    cls = METHODS[method]
    for data in ({"mixup": 0.8}, {"cutmix": 1.0}, {"smoothing": 0.1}):
        with pytest.raises(UserError, match="need images with one class each; set all three to 0"):
            cls.validate(cls.Settings(), TrainSettings(lr=1.0), DataSettings(**data), "class")


# ---- the loss ------------------------------------------------------------------------------------
def test_er_loss_is_one_mean_over_both_batches() -> None:
    method = identity("er", (ONE,))
    images = rows(Z, [0, 2], replay=rows(Z2, [0, 1]))
    together = torch.tensor([*Z, *Z2])
    expected = F.cross_entropy(together, torch.tensor([0, 2, 0, 1]))
    assert sum(losses(method, images)) == pytest.approx(float(expected), abs=1e-6)
    assert float(expected) == pytest.approx((1.590453 + 0.931349) / 2, abs=1e-6)
    three = rows([*Z2, Z2[0]], [0, 1, 0])
    expected = F.cross_entropy(torch.tensor([*Z, *Z2, Z2[0]]), torch.tensor([0, 2, 0, 1, 0]))
    three_replayed = rows(Z, [0, 2], replay=three)
    assert sum(losses(method, three_replayed)) == pytest.approx(float(expected), abs=1e-6)
