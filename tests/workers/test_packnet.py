"""Tests of PackNet: worked numbers of the reference, owners of weights, and no forgetting."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import method_steps
import pytest
import torch
from method_steps import (
    BASE,
    ONE,
    TASKS,
    THREE,
    TRAININGS,
    TWO,
    Left,
    answers,
    each_step,
    images,
    in_turn,
    rates,
    serving,
    train,
    vit,
)
from torch import Tensor, nn

from pipeline.testing.lab import Lab, history
from workers import optim
from workers.errors import UserError
from workers.job import BackboneSettings, Task, TrainSettings
from workers.methods.packnet import FREE, MAX_OWNERS, PackNet, PackNetSettings, smallest, under
from workers.model.protect import Protector
from workers.model.vit import build, compute_digest
from workers.storage.taskstate import Carried, TaskState

OF_ANY = pytest.mark.parametrize("optimizer", TRAININGS)
STEPS = 4
BACKBONE = vit(embed_dim=16)


def packnet(**settings: Any) -> PackNet:
    return PackNet(copy.deepcopy(BACKBONE), PackNetSettings(**settings), seed=1)


def begun(
    method: PackNet,
    task: Task,
    step: str,
    carried: Carried | None,
    train: TrainSettings = TRAININGS["adamw"],
) -> torch.optim.Optimizer:
    return optim.build_optimizer(
        method_steps.begun(method, task, carried, step, rates(STEPS, train)), train
    )


def learn(
    task: Task,
    carried: Carried | None,
    optimizer: str = "adamw",
    base: TaskState | None = None,
    **settings: Any,
) -> Left:
    """Run all steps of a task, each with a new method."""
    method = packnet(**settings)
    task_index = -1 if task is BASE else TASKS.index(task)
    for step in method.steps_for(method.settings, task_index):
        method = packnet(**settings)
        if base is not None:
            method.load_task(base)
        going = begun(method, task, step.name, carried, TRAININGS[optimizer])
        if step.trains:
            train(method, going, task, STEPS)
        state, carried = method.finish()
    assert carried is not None
    return state, carried


def stream(
    tasks: list[Task], optimizer: str = "adamw", **settings: Any
) -> tuple[list[TaskState], list[Carried]]:
    done = in_turn(tasks, lambda task, carried: learn(task, carried, optimizer, **settings))
    return [state for state, _ in done], [carried for _, carried in done]


def served(states: list[TaskState], carried: Carried, **settings: Any) -> PackNet:
    method: PackNet = serving(packnet(**settings), states, carried)
    return method


def owners(carried: Carried) -> dict[str, Tensor]:
    return under("owners", carried)


def shares(carried: Carried) -> list[float]:
    """Return the share of all weights with owner 0 (free), 1, 2, ..."""
    every = torch.cat([owner.flatten() for owner in owners(carried).values()])
    return [float((every == number).float().mean()) for number in range(int(every.max()) + 1)]


# ---- pruning -------------------------------------------------------------------------------------
def test_worked_example_frees_the_two_smallest_weights() -> None:
    weight = torch.tensor([0.1, -0.5, 0.3, -0.2])
    assert smallest(weight, torch.ones(4, dtype=torch.bool), 0.5).tolist() == [0, 3]


def test_ties_are_freed_in_order_without_exceeding_the_share() -> None:
    weight = torch.full((2, 4), 0.1)
    weight[0, 1] = -0.1
    everyone = torch.ones(2, 4, dtype=torch.bool)
    assert smallest(weight, everyone, 0.25).tolist() == [0, 1]
    assert smallest(torch.zeros(8), torch.ones(8, dtype=torch.bool), 0.25).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("count", "share", "freed"),
    [(3, 0.1, 0), (4, 0.1, 0), (10, 0.75, 8), (7, 0.5, 4), (0, 0.5, 0), (1, 0.99, 1)],
)
def test_exactly_the_rounded_share_is_freed_even_if_zero(
    count: int, share: float, freed: int
) -> None:
    among = torch.zeros(12, dtype=torch.bool)
    among[:count] = True
    chosen = smallest(torch.randn(12), among, share)
    assert len(chosen) == len(set(chosen.tolist())) == freed
    assert all(bool(among[i]) for i in chosen.tolist())


def test_each_layer_frees_its_share_of_the_tasks_own_weights() -> None:
    _, (first,) = stream([ONE], prune=0.5)
    _, second = learn(TWO, first, prune=0.25)
    for site, before in owners(first).items():
        count = before.numel()
        num_kept, free = count - round(0.5 * count), round(0.5 * count)
        assert int((before == 1).sum()) == num_kept
        assert torch.equal(owners(second)[site] == 1, before == 1)
        assert int((owners(second)[site] == FREE).sum()) == round(0.25 * free)


def test_each_layer_keeps_its_largest_weights() -> None:
    method = packnet()
    begun(method, ONE, "train", None)
    before = {site: weight.detach().clone() for site, weight in method.sites.items()}
    method.give_back(0.75)
    for site, weight in method.sites.items():
        free = method.owners[site] == FREE
        assert before[site][free].abs().max() <= before[site][~free].abs().min()
        assert torch.equal(weight, before[site].masked_fill(free, 0))


def test_weight_shares_of_four_tasks_match_worked_example() -> None:
    _, carried = stream(TASKS, prune=[0.5, 0.75, 0.75, "none"])
    assert shares(carried[-1]) == pytest.approx([0, 0.5, 0.125, 0.0938, 0.2812], abs=2e-3)
    for at, free in enumerate([0.5, 0.375, 0.28125, 0.0]):
        assert shares(carried[at])[FREE] == pytest.approx(free, abs=2e-3)


def test_weight_shares_match_if_the_base_is_the_first_task() -> None:
    _, carried = stream(
        [ONE, TWO, THREE], base_mode="prune_only", base_prune=0.5, prune=[0.75, 0.75, None]
    )
    assert shares(carried[-1]) == pytest.approx([0, 0.5, 0.125, 0.0938, 0.2812], abs=2e-3)


def test_owners_of_weights_never_change_once_set() -> None:
    _, carried = stream([ONE, TWO, THREE], prune=0.5)
    for before, after in pairwise(carried):
        for site, owner in owners(before).items():
            assert torch.equal(owners(after)[site][owner != FREE], owner[owner != FREE])
            assert bool((owners(after)[site] <= after.meta["owner"]).all())


# ---- unchanged answers and weights ---------------------------------------------------------------
def forgotten(optimizer: str, **settings: Any) -> list[str]:
    """Return the tasks in a stream of three with answers that changed after any later task."""
    states, carried = stream([ONE, TWO, THREE], optimizer, **settings)
    right = [
        answers(served(states[: at + 1], carried[at], **settings), task)
        for at, task in enumerate([ONE, TWO, THREE])
    ]
    late = [
        (at, answers(served(states[: after + 1], carried[after], **settings), TASKS[at]))
        for after in (1, 2)
        for at in range(after)
    ]
    return [TASKS[at].name for at, answers_now in late if not torch.equal(answers_now, right[at])]


@pytest.mark.few(3)
@OF_ANY
@pytest.mark.parametrize(
    "settings",
    [{}, {"per_task_affine": True}, {"base_mode": "prune_only"}],
    ids=["plain", "affine", "base"],
)
def test_old_answers_stay_bit_identical_after_every_later_task(
    optimizer: str, settings: dict[str, Any]
) -> None:
    assert forgotten(optimizer, prune=0.5, **settings) == []


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_weight_decay_causes_forgetting_without_restoring_locked_weights(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Protector, "restore", lambda self: None)
    assert forgotten(optimizer, prune=0.5)


@OF_ANY
def test_without_locks_old_tasks_are_forgotten(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Protector, "restore", lambda self: None)
    monkeypatch.setattr(Protector, "gate", lambda self: None)
    assert forgotten(optimizer, prune=0.5)


def gradients_stay_inside(method: PackNet, task: Task, step: str, carried: Carried) -> bool:
    """Return whether the task's own weights have a gradient, and no other weights have one."""
    for at in each_step(method, begun(method, task, step, carried), task, STEPS):
        for site, weight in method.sites.items() if at % 2 == 0 else ():
            gradient = weight.grad
            is_owned = method.owners[site] == method.latest
            if gradient is None or gradient[~is_owned].any() or not gradient[is_owned].any():
                return False
    return True


def test_only_the_tasks_own_weights_have_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    _, (first,) = stream([ONE], prune=0.5)
    assert gradients_stay_inside(packnet(), TWO, "train", first)
    monkeypatch.setattr(Protector, "gate", lambda self: None)
    assert not gradients_stay_inside(packnet(), TWO, "train", first)


@OF_ANY
def test_foreign_weights_stay_fixed_and_free_weights_stay_zero(optimizer: str) -> None:
    _, (first,) = stream([ONE], optimizer, prune=0.5)
    carried = first
    for step in ("train", "prune", "retrain"):
        method = packnet(prune=0.5)
        going = begun(method, TWO, step, carried, TRAININGS[optimizer])
        weights_before = {site: weight.detach().clone() for site, weight in method.sites.items()}
        for _ in each_step(method, going, TWO, STEPS) if step != "prune" else ():
            for site, weight in method.sites.items():
                old = owners(first)[site] == 1
                assert torch.equal(weight[old], weights_before[site][old])
                assert not bool(weight[method.owners[site] == FREE].any())
        if step != "prune":
            assert all(
                not torch.equal(weight, weights_before[site])
                for site, weight in method.sites.items()
            ), "the task's own weights must be trained"
        carried = method.finish()[1]


def test_biases_norms_and_embeddings_stay_those_of_the_backbone() -> None:
    _, carried = stream([ONE, TWO], prune=0.5)
    start, now = BACKBONE.state_dict(), under("backbone", carried[-1])
    other_tensors = packnet().others
    assert len(other_tensors) + len(owners(carried[-1])) == len(start) == len(now)
    assert {
        "cls_token",
        "pos_embed",
        "norm.weight",
        "blocks.0.attn.qkv.bias",
        "patch_embed.proj.bias",
    } <= set(other_tensors)
    assert all(torch.equal(start[name], now[name]) for name in other_tensors)


def test_serving_an_earlier_task_does_not_change_the_weights() -> None:
    states, carried = stream([ONE, TWO], prune=0.5)
    method = served(states, carried[-1])
    before, last = compute_digest(method.backbone), answers(method, TWO)
    first = answers(method, ONE)
    assert compute_digest(method.backbone) == before
    assert torch.equal(answers(method, TWO), last)
    whole = {f"{site}.weight": weight for site, weight in method.sites.items()}
    method.active_task, method.weight_overrides = None, whole
    assert not torch.equal(first, method.heads["one"](method.features(images())).detach()), (
        "the first task must not be served with all weights"
    )


def test_steps_do_not_change_the_carried_state_they_receive() -> None:
    _, (first,) = stream([ONE], prune=0.5)
    before = first.to_bytes()
    learn(TWO, first, prune=0.5)
    assert first.to_bytes() == before


# ---- start of tasks ------------------------------------------------------------------------------
def test_later_packnet_tasks_start_from_zeros() -> None:
    method = packnet()
    begun(method, ONE, "train", None)
    assert compute_digest(method.backbone) == compute_digest(BACKBONE)
    assert method.metrics() == {"own": 1, "used": 1, "free": 0}
    _, (first,) = stream([ONE], prune=0.5)
    method = packnet()
    begun(method, TWO, "train", first)
    for site, weight in method.sites.items():
        assert torch.equal(weight, under("backbone", first)[f"{site}.weight"])
        assert not bool(weight[method.owners[site] == 2].any())
    assert method.metrics() == pytest.approx({"own": 0.5, "used": 1, "free": 0}, abs=2e-3)


def test_prune_only_base_keeps_its_largest_weights() -> None:
    method = packnet(base_mode="prune_only", base_prune=0.5)
    base = TaskState(
        "base", BASE.classes, "base", method.backbone_digest, head=nn.Linear(16, 2).state_dict()
    )
    begun(method, ONE, "train", None)
    carried = method.finish()[1]
    for site, weight in BACKBONE.named_parameters():
        owner = owners(carried).get(site.removesuffix(".weight"))
        if owner is not None:
            assert int((owner == 1).sum()) == owner.numel() - round(0.5 * owner.numel())
            assert torch.equal(under("backbone", carried)[site][owner == 1], weight[owner == 1])
    for after in (carried, learn(ONE, None, base_mode="prune_only")[1]):
        base_answers = answers(served([base], after, base_mode="prune_only"), BASE)
        assert torch.equal(
            base_answers, answers(served([base], carried, base_mode="prune_only"), BASE)
        )
    assert not torch.equal(base_answers, answers_of_backbone(base)), (
        "pruning must change the answers"
    )


def answers_of_backbone(base: TaskState) -> Tensor:
    method = packnet()
    method.load_task(base)
    logits: Tensor = answers(method, BASE)
    return logits


@OF_ANY
def test_prune_retrain_base_trains_all_parameters_and_then_stays_fixed(optimizer: str) -> None:
    settings: dict[str, Any] = {"base_mode": "prune_retrain", "base_prune": 0.5, "prune": 0.75}
    assert [step.name for step in PackNet.steps_for(PackNetSettings(**settings), -1)] == [
        "prune",
        "retrain",
    ]
    torch.manual_seed(3)
    before = TaskState(
        "base", BASE.classes, "base", packnet().backbone_digest, head=nn.Linear(16, 2).state_dict()
    )
    base, carried = learn(BASE, None, optimizer, base=before, **settings)
    assert shares(carried) == pytest.approx([0.5, 0.5], abs=2e-3)
    assert all(
        not torch.equal(under("backbone", carried)[name], p)
        for name, p in BACKBONE.named_parameters()
    )
    assert not torch.equal(base.head["weight"], before.head["weight"])
    right = answers(served([base], carried, **settings), BASE)
    one, after = learn(ONE, carried, optimizer, base=base, **settings)
    assert shares(after) == pytest.approx([0.375, 0.5, 0.125], abs=2e-3)
    assert torch.equal(answers(served([base, one], after, **settings), BASE), right)
    other_tensors = packnet().others
    assert all(
        torch.equal(under("backbone", after)[name], under("backbone", carried)[name])
        for name in other_tensors
    )


def test_per_task_affine_copies_biases_norms_and_embeddings() -> None:
    states, carried = stream([ONE, TWO], prune=0.5, per_task_affine=True)
    names = packnet().others
    for state in states:
        assert sorted(state.copies) == sorted(names)
        assert all(
            not torch.equal(state.copies[name], BACKBONE.state_dict()[name]) for name in names
        )
    assert all(
        torch.equal(under("backbone", carried[-1])[name], BACKBONE.state_dict()[name])
        for name in names
    )
    method = packnet(per_task_affine=True)
    train(method, begun(method, THREE, "train", carried[-1]), THREE, STEPS)
    live, (state, after) = answers(method, THREE), method.finish()
    assert torch.equal(answers(served([state], after, per_task_affine=True), THREE), live)


# ---- steps, settings, sizes ----------------------------------------------------------------------
@pytest.mark.parametrize("step", ["prune", "retrain"])
def test_head_and_copies_continue_from_the_previous_step(step: str) -> None:
    method = packnet(per_task_affine=True)
    train(method, begun(method, ONE, "train", None), ONE, STEPS)
    state, carried = method.finish()
    if step == "retrain":
        method = packnet(per_task_affine=True)
        begun(method, ONE, "prune", carried)
        state, carried = method.finish()
    going = packnet(per_task_affine=True)
    begun(going, ONE, step, carried)
    resumed = going.finish()[0]
    for kind in ("head", "copies"):
        assert getattr(state, kind).keys() == getattr(resumed, kind).keys()
        assert all(
            torch.equal(t, getattr(resumed, kind)[name]) for name, t in getattr(state, kind).items()
        )


@pytest.mark.parametrize("prune", [0.5, ["none"]], ids=["retrain", "train"])
def test_last_step_carries_only_weights_and_owners(prune: Any) -> None:
    state, carried = learn(ONE, None, prune=prune, per_task_affine=True)
    assert {name.split("/")[0] for name in carried.tensors} == {"backbone", "owners"}
    assert state.masks == state.tokens == {}


def test_packnet_without_pruning_has_one_step() -> None:
    settings = PackNetSettings(prune=[0.5, "none", 0.5])
    assert [[step.name for step in PackNet.steps_for(settings, at)] for at in range(3)] == [
        ["train", "prune", "retrain"],
        ["train"],
        ["train", "prune", "retrain"],
    ]
    _, carried = stream([ONE, TWO], prune=[0.5, "none", 0.5])
    method = packnet(prune=[0.5, "none", 0.5])
    begun(method, THREE, "train", carried[-1])
    assert method.metrics() == {"own": 0, "used": 1, "free": 0}
    assert "no weight was free" in method.warnings()[0]
    assert served([], carried[-1]).warnings() == []


def test_prune_list_shorter_than_the_stream_is_refused() -> None:
    with pytest.raises(
        UserError, match="`prune` has 2 shares and the stream a task 3; list one per task"
    ):
        PackNet.steps_for(PackNetSettings(prune=[0.5, 0.5]), 2)


@pytest.mark.parametrize("prune", [0, 1, 1.5, "none", True, [0.5, 2], ["all"], None])
def test_invalid_prune_share_is_refused(prune: Any) -> None:
    with pytest.raises(ValueError, match="lies between 0 and 1"):
        PackNetSettings(prune=prune)


def test_more_tasks_than_owner_numbers_are_refused() -> None:
    carried = learn(ONE, None)[1]
    carried.meta |= {"owner": MAX_OWNERS - 1}
    method = packnet()
    begun(method, TWO, "train", carried)
    assert method.latest == MAX_OWNERS == 255
    carried.meta |= {"owner": MAX_OWNERS}
    with pytest.raises(
        UserError, match="'two' would be owner 256, and one byte per weight has room for 255"
    ):
        begun(packnet(), TWO, "train", carried)


def test_display_masks_match_the_weights_that_serve_a_task() -> None:
    states, carried = stream([ONE, TWO], prune=0.5)
    first, second = (
        PackNet.display_masks(state, handed) for state, handed in zip(states, carried, strict=True)
    )
    again = PackNet.display_masks(states[0], carried[1])
    for site, owner in owners(carried[1]).items():
        assert torch.equal(first[site], owner == 1)
        assert torch.equal(again[site], owner == 1)
        assert torch.equal(second[site], (owner == 1) | (owner == 2))
    assert PackNet.display_masks(TaskState("base", BASE.classes, "base", ""), carried[0]) == {}


def test_stored_sizes_match_the_reference() -> None:
    """The owners take one byte per weight for all tasks together (5,455,872 on DeiT-Ti), and a task
    adds its head."""
    method = PackNet(
        build(BackboneSettings(options={"weight_init": "skip"})), PackNetSettings(), seed=0
    )
    begun(method, ONE, "train", None)
    method.give_back(0.75)
    state, carried = method.finish()
    assert sum(t.numel() * t.element_size() for t in owners(carried).values()) == 5_455_872
    assert state.sizes() == {"masks": 0, "tokens": 0, "head": 4 * 2 * (192 + 1), "copies": 0}
    assert sum(int((owner == FREE).sum()) for owner in owners(carried).values()) == sum(
        round(0.75 * o.numel()) for o in owners(carried).values()
    )


def test_accuracy_after_pruning_is_measured(lab: Lab) -> None:
    """`prune` measures held-out images after the last epoch of `train` and before `retrain`, and
    nothing counts as trained there."""
    run = lab.run("packnet")
    prune = run.artifact(run.stages(0)[1])
    (row,) = history(prune)
    assert 0 <= row["val_correct"] <= row["val_total"]
    assert row["val_total"] == history(run.artifact(run.stages(0)[0]))[-1]["val_total"]
    assert (prune.manifest["epochs"], prune.manifest["trained_parameters"]) == (0, 0)
