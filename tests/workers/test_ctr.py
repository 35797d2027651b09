"""Tests of CTR: forgetting, locks, masks and sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from method_steps import (
    BASE,
    ONE,
    OPTIMIZERS,
    THREE,
    TWO,
    Left,
    answers,
    batch,
    begun,
    images,
    in_turn,
    rates,
    serving,
    train,
    vit,
)
from step_contexts import step_context

from workers.errors import UserError
from workers.job import BackboneSettings, DataSettings, Task, TrainSettings
from workers.methods.base import OptimPlan, Progress
from workers.methods.ctr import CtrSettings, CtrTsm, masked_bottleneck
from workers.methods.ctr_full import CtrFull
from workers.model.masks import compute_annealed_scale
from workers.model.protect import Protector
from workers.model.vit import build, compute_digest
from workers.storage.taskstate import Carried, TaskState

RATES = rates(8.0)
STEPS = 4  # per epoch
SMALL: dict[type[CtrTsm], dict[str, Any]] = {
    CtrTsm: {"width": 8},
    CtrFull: {"width": 8, "max_tasks": 3, "filters": 5},
}


def ctr(cls: type[CtrTsm] = CtrTsm, **settings: Any) -> Any:
    return cls(vit(patch_size=4), cls.Settings(**(SMALL[cls] | settings)), seed=1)


def started(
    method: CtrTsm, task: Task, carried: Carried | None = None, optimizer: str = "adamw"
) -> torch.optim.Optimizer:
    groups = begun(method, task, carried, rates=RATES)
    method.train()
    made: torch.optim.Optimizer = OPTIMIZERS[optimizer](groups)
    return made


def stepped(method: CtrTsm, optimizer: torch.optim.Optimizer) -> None:
    assert method.task is not None
    train(method, optimizer, method.task, STEPS, epochs=2)


def stream(
    cls: type[CtrTsm] = CtrTsm, optimizer: str = "adamw", tasks: tuple[Task, ...] = (ONE, TWO)
) -> list[Left]:
    """Train each task with a new method and backbone, as stages do."""

    def learn(task: Task, carried: Carried | None) -> Left:
        method: CtrTsm = ctr(cls, mask_lr=0.05)
        stepped(method, started(method, task, carried, optimizer))
        return method.finish()

    results: list[Left] = in_turn(tasks, learn)
    return results


def served(done: list[Left], cls: type[CtrTsm] = CtrTsm) -> Any:
    """Return the method that serves after the last task of `done`."""
    return serving(ctr(cls), [state for state, _ in done], done[-1][1])


# ---- forgetting ----------------------------------------------------------------------------------
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_answers_stay_bit_for_bit_through_later_tasks(optimizer: str) -> None:
    done = stream(optimizer=optimizer, tasks=(ONE, TWO, THREE))
    first, second = answers(served(done[:1])), answers(served(done[:2]), TWO)
    assert torch.equal(answers(served(done[:2])), first)
    assert torch.equal(answers(served(done)), first)
    assert torch.equal(answers(served(done), TWO), second)
    assert second.shape == (8, 3)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_without_restoring_locked_entries_weight_decay_changes_answers(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Protector, "restore", lambda self: None)
    done = stream(optimizer=optimizer)
    assert not torch.equal(answers(served(done)), answers(served(done[:1])))


def test_without_gate_and_restore_the_first_task_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Protector, "restore", lambda self: None)
    monkeypatch.setattr(Protector, "gate", lambda self: None)
    done = stream(optimizer="adam")
    assert (answers(served(done)) - answers(served(done[:1]))).abs().max() > 1e-3


def test_locked_entries_get_no_gradient_and_stay_while_others_move() -> None:
    """Entries that no earlier task uses can still be trained."""
    carried, method = stream(tasks=(ONE,))[0][1], ctr(mask_lr=0.05)
    optimizer = started(method, TWO, carried)
    locks = method.locks()
    assert {
        name: (n, n < p.numel())
        for name, (p, lock) in locks.items()
        if (n := int(lock.expand_as(p).sum()))
    }.keys() == locks.keys()
    method.loss(batch(1, 3), Progress(0, 1, 1, STEPS))[0].backward()
    assert all((p.grad[lock.expand_as(p)] != 0).any() for p, lock in locks.values()), (
        "locked entries must have a gradient before it is removed"
    )
    method.after_backward()
    assert all((p.grad[lock.expand_as(p)] == 0).all() for p, lock in locks.values())
    stepped(method, optimizer)
    for name, (p, lock) in locks.items():
        before, wide = carried.tensors[f"adapters.{name}"], lock.expand_as(p)
        assert torch.equal(p[wide], before[wide])
        assert (p[~wide] != before[~wide]).any()


def test_weight_is_locked_if_both_its_units_are_used() -> None:
    """HAT's rule, 1 - min(out, in): out = (1, 0), in = (1, 0, 1)."""
    method = ctr(width=3)
    method.used = torch.zeros(4, 3 + 32, dtype=torch.bool)
    method.used[1, :3], method.used[1, 3] = torch.tensor([True, False, True]), True
    locks = {name: lock.expand_as(p) for name, (p, lock) in method.locks().items()}
    assert locks["up"][1, :2].tolist() == [[True, False, True], [False, False, False]]
    assert (
        locks["down"][1].all(1).tolist() == [True, False, True] == locks["down"][1].any(1).tolist()
    )
    assert locks["down_bias"][1].tolist() == [True, False, True]
    assert locks["up_bias"][1].tolist() == [True] + [False] * 31
    assert not any(lock[[0, 2, 3]].any() for lock in locks.values()), (
        "other sites must stay unlocked"
    )


def test_used_units_are_the_union_of_stored_masks() -> None:
    done, union = stream(tasks=(ONE, TWO, THREE)), torch.zeros(4, 8 + 32, dtype=torch.bool)
    for position, (state, carried) in enumerate(done):
        union |= torch.cat([state.masks["inner"], state.masks["outer"]], 1)
        assert torch.equal(carried.tensors["used"], union)
        assert carried.meta == {"tasks": position + 1}


@pytest.mark.parametrize("cls", [CtrTsm, CtrFull])
def test_training_does_not_change_the_backbone(cls: type[CtrTsm]) -> None:
    method = ctr(cls)
    stepped(method, started(method, ONE))
    assert (
        compute_digest(method.backbone)
        == method.backbone_digest
        == compute_digest(vit(patch_size=4))
    )


# ---- masks ---------------------------------------------------------------------------------------
def test_without_output_units_the_adapters_are_the_identity() -> None:
    method = ctr()
    started(method, ONE)
    with torch.no_grad():
        method.split(method.mask.embedding)[1].fill_(-1.0)
    expected = vit(patch_size=4)(images()) @ method.heads["one"].weight.T
    assert torch.equal(answers(method.eval()), expected)
    with torch.no_grad():
        method.split(method.mask.embedding)[1].fill_(1.0)
    assert not torch.allclose(answers(method), expected, atol=1e-3)


def test_masked_weights_equal_masked_units() -> None:
    """The features are equal, and the gradient of an embedding is the published one:
    s_max sigmoid(e) sigmoid(-e) dL/dm."""
    method = ctr(s_max=10.0, width=3)
    started(method, ONE)
    a, x = method.adapters, torch.randn(2, 5, 32)
    inner, outer = (torch.rand(4, n, requires_grad=True) for n in (3, 32))
    masked = method.masked(inner, outer)
    output = masked_bottleneck(x, **{name: t[1] for name, t in masked.items()})
    hidden = (x @ a.down[1].T + a.down_bias[1]).relu() * inner[1]
    expected = x + (hidden @ a.up[1].T + a.up_bias[1]).relu() * outer[1]
    assert torch.allclose(output, expected, atol=1e-5)
    for gradient, other in zip(
        *(torch.autograd.grad(y.square().sum(), (inner, outer)) for y in (output, expected)),
        strict=True,
    ):
        assert torch.allclose(gradient, other, rtol=1e-4, atol=1e-4)
    scale = compute_annealed_scale(2, 4, 10.0)
    soft, worth, e = method.mask.sample(scale), torch.randn(4, 35), method.mask.embedding
    assert torch.allclose(soft, torch.sigmoid(scale * e))
    soft.backward(worth)
    assert torch.allclose(e.grad, 10.0 * torch.sigmoid(e) * torch.sigmoid(-e) * worth, rtol=1e-4)


def test_masks_harden_in_every_epoch() -> None:
    method = ctr()
    started(method, ONE)
    for epoch in (0, 1):
        spread = []
        for step in range(STEPS):
            method.training_weights(batch(step), Progress(epoch, step, 2, STEPS))
            spread.append(float((method.soft - 0.5).abs().mean().detach()))
        assert spread[0] < 0.01
        assert spread == sorted(spread)
        assert spread[-1] > 0.48


@pytest.mark.parametrize("cls", [CtrTsm, CtrFull])
def test_adapter_hat_loss_penalises_newly_used_units(
    cls: type[CtrTsm],
) -> None:
    """For the first task, R is the mean over its masks, and for a later task over unused units.
    It never includes masks of other tasks."""
    method, progress = ctr(cls, c=0.5), Progress(0, 1, 1, STEPS)
    started(method, ONE)
    loss, terms = method.loss(batch(), progress)
    assert torch.isclose(terms["newly_used"], method.soft.mean())
    assert torch.isclose(loss, terms["ce"] + 0.5 * terms["newly_used"])
    later = ctr(cls)
    started(later, TWO, stream(cls, tasks=(ONE,))[0][1])
    assert later.used.any()
    assert torch.isclose(
        later.loss(batch(1, 3), progress)[1]["newly_used"], later.soft[~later.used].mean()
    )


def test_embeddings_can_cross_zero_within_the_schedule() -> None:
    """Learning rate times steps is 4, and nearly all N(0, 1) starts lie within this range."""
    for steps in (12.0, 3000.0):
        method = ctr()
        groups = method.begin(
            step_context(ONE, "train", None, OptimPlan(1e-3, 0.05, 32, steps), (ONE,))
        )
        rate = next(g["lr"] for g in groups if g["name"] == "masks")
        assert rate * steps == pytest.approx(4)
        assert float((method.mask.embedding.abs() < rate * steps).float().mean()) > 0.999


def test_embeddings_stay_within_six() -> None:
    method = ctr()
    started(method, ONE)
    with torch.no_grad():
        method.mask.embedding.mul_(100)
    method.after_step(Progress(0, 0, 1, STEPS))
    assert method.mask.embedding.abs().max() == 6


def test_stored_size_matches_the_formula() -> None:
    """The masks take (A + d) 2 L bits: 768 bytes for a ViT-Ti with 64 units."""
    torch.manual_seed(0)
    method = CtrTsm(build(BackboneSettings()), CtrSettings(), seed=1)
    method.begin(step_context(TWO, "train", None, RATES, (TWO,)))
    sizes = method.finish()[0].sizes()
    assert sizes == {
        "masks": (64 + 192) * 2 * 12 // 8,
        "tokens": 0,
        "copies": 0,
        "head": 4 * 3 * 193,
    }
    assert sizes["masks"] == 768


@pytest.mark.parametrize("cls", [CtrTsm, CtrFull])
def test_a_base_task_is_served_by_the_backbone(cls: type[CtrTsm]) -> None:
    method, head = (
        served(stream(cls, tasks=(ONE,)), cls),
        {"weight": torch.ones(2, 32), "bias": torch.zeros(2)},
    )
    method.load_task(TaskState("base", BASE.classes, "base", method.backbone_digest, head=head))
    assert torch.equal(answers(method, BASE), vit(patch_size=4)(images()) @ head["weight"].T)


def test_invalid_settings_and_states_are_refused() -> None:
    with pytest.raises(UserError, match=r"mask_lr is 'auto' with train.optimizer 'sgd'"):
        CtrTsm.validate(CtrSettings(), TrainSettings(optimizer="sgd"), DataSettings(), "task")
    CtrTsm.validate(
        CtrSettings(mask_lr=0.1), TrainSettings(optimizer="sgd"), DataSettings(), "task"
    )
    with pytest.raises(
        UserError, match=r"inner masks of shape \(4, 8\), these settings have \(4, 9\)"
    ):
        ctr(width=9).load_task(stream(tasks=(ONE,))[0][0])
    method = ctr()
    started(method, ONE)
    with pytest.raises(UserError, match="one step per epoch"):
        method.loss(batch(), Progress(0, 0, 3, 1))


def test_warning_is_given_when_units_run_out() -> None:
    method = ctr()
    started(method, ONE)
    assert not method.warnings()
    method.used[:] = True
    assert "only 0.00% of the adapters' units were free" in method.warnings()[0]
    method.used[:] = False
    with torch.no_grad():
        method.mask.embedding.fill_(1.0)
    assert "0.00% of the adapters' units are left" in method.warnings()[0]
