"""Tests of dark replay: the worked values of DER and DER++, and the logits in the memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from class_incremental_steps import START
from reservoir_steps import H1, ONE, QUICK, Z1, Z2, Z, feed_of, identity, losses, rows, run_of
from torch import Tensor
from torch.nn import functional as F

from pipeline.testing.lab import Lab, Run, history
from workers import restore
from workers.data.batch import Batch
from workers.data.feed import Feed
from workers.dist import Group
from workers.errors import UserError
from workers.methods.bases.reservoir import list_slots
from workers.methods.dark_replay import LOGITS
from workers.storage.taskstate import Carried


# ---- the loss ------------------------------------------------------------------------------------
def dark(known: int = 3, scenario: str = "class", **settings: Any) -> tuple[Any, Batch]:
    """Return the method and batch of the worked value. The first `known` columns are compared."""
    method = identity("dark_replay", (ONE,), scenario, **settings)
    method.taught = torch.tensor(H1)
    method.known = (torch.arange(3) < known).expand(2, 3)
    both = rows([*Z1, *Z2], [0, 0, 0, 1], slots=torch.tensor([0, 1, 0, 1]))
    if not method.settings.beta:
        both = rows(Z1, [0, 0], slots=torch.tensor([0, 1]))
    return method, rows(Z, [0, 2], replay=both)


@pytest.mark.parametrize(("beta", "value"), [(0.0, 1.610953), (0.5, 2.076628)])
def test_dark_replay_loss_matches_worked_values(beta: float, value: float) -> None:
    method, images = dark(alpha=0.3, beta=beta)
    assert sum(losses(method, images)) == pytest.approx(value, abs=1e-6)
    _, terms = method.replay_loss(images, START)
    assert float(terms["mse"]) == pytest.approx(0.068333, abs=1e-6)
    if beta:
        assert float(terms["replay"]) == pytest.approx(0.931349, abs=1e-6)


def test_dark_replay_compares_the_outputs_that_were_stored() -> None:
    method, images = dark(known=2)
    assert float(method.replay_loss(images, START)[1]["mse"]) == pytest.approx(0.0775, abs=1e-6)


def test_replay_with_zero_alpha_is_weighted_cross_entropy() -> None:
    method, images = dark(alpha=0.0, beta=0.5)
    images.replay = rows(Z2, [0, 1], slots=torch.tensor([0, 1]))
    assert method.replay_draws() == (32,)
    assert losses(method, images)[1] == pytest.approx(0.5 * 0.931349, abs=1e-6)


def test_dark_replay_loss_does_not_depend_on_batch_split() -> None:
    method, images = dark()
    whole = images.replay
    assert whole is not None
    total = 0.0
    for positions in (torch.tensor([0, 1, 3]), torch.tensor([2])):
        part = replace(
            whole,
            images=whole.images[positions],
            labels=whole.labels[positions],
            tasks=whole.tasks[positions],
            slots=whole.slots[positions] if whole.slots is not None else None,
            draw=replace(whole.draw, positions=positions),
        )
        value = method.replay_loss(replace(images, replay=part), START)[0]
        total += float(value) * len(positions) / 4
    assert total == pytest.approx(losses(method, images)[1], abs=1e-6)


# ---- the logits of dark replay -------------------------------------------------------------------
def stored_logits(carried: Carried) -> dict[tuple[str, str], Tensor]:
    slots = list_slots(carried.meta["memory"])
    return dict(zip(slots, carried.tensors[LOGITS], strict=True))


@pytest.mark.parametrize("scenario", ["class", "task"])
def test_exemplars_keep_logits_from_end_of_their_task(lab: Lab, scenario: str) -> None:
    """Exemplars of earlier tasks keep their logits."""
    run = run_of(lab, "dark_replay", scenario, memory=20)
    first, second = stored_logits(run.carried(0)), stored_logits(run.carried(1))
    assert {*first} & {*second}
    for slot in {*first} & {*second}:
        assert torch.equal(second[slot], F.pad(first[slot], (0, 3)))
    train = run.stages(1)[0]
    handed = Carried.from_bytes(run.artifact(train).read("carried.safetensors"))
    assert torch.equal(handed.tensors[LOGITS], run.carried(0).tensors[LOGITS])
    served = run.served(1)
    new = [key for task, key in second if task == "three"]
    feed = Feed(train, (train.tasks[1],), "train", Group(), False, {"three": new})
    (found,) = feed.evaluate()
    columns = slice(0, 5) if scenario == "class" else slice(2, 5)
    with torch.no_grad():
        task = None if scenario == "class" else "three"
        logits = served.logits(found.images, task)
    for key, row in zip(found.keys or [], logits, strict=True):
        assert torch.allclose(second["three", key][columns], row, atol=1e-5)


def test_stored_logits_match_model_before_next_task_trains(lab: Lab) -> None:
    run = run_of(lab, "dark_replay", memory=20)
    job = run.stages(1)[0]
    run.trained(0)
    method: Any = restore.new_method(job)
    restore.load_states(job, method)
    context = loop_context(run)
    method.begin(context)
    method.eval()
    feed = feed_of(run, Group())
    assert feed.replay is not None
    first = next(feed.epoch(0))[0]
    _, terms = method.replay_loss(first, START)
    assert float(terms["mse"]) < 1e-10
    assert not method.known[:, 2:].any(), "new classes must not be compared"


def loop_context(run: Run) -> Any:
    """Return the context of the second task's training."""
    from workers import loop

    job = run.stages(1)[0]
    method = restore.new_method(job)
    return loop.prepare_step_inputs(job, method, restore.load_carried(job), Group(), True).context


def test_a_memory_without_its_logits_is_refused(lab: Lab) -> None:
    run = run_of(lab, "dark_replay", memory=20)
    carried = run.carried(0)
    for damaged in (
        {n: t for n, t in carried.tensors.items() if n != LOGITS},
        carried.tensors | {LOGITS: carried.tensors[LOGITS][1:]},
        carried.tensors | {LOGITS: carried.tensors[LOGITS].flatten()},
    ):
        method = run.served(0)
        with pytest.raises(UserError, match="each exemplar needs a row of logits"):
            method.load_carried(Carried(damaged, carried.meta))


# ---- stages --------------------------------------------------------------------------------------
def test_zero_replay_weights_equal_plain_fine_tuning_bit_for_bit(lab: Lab) -> None:
    for scenario in ("class", "task"):
        plain = lab.run_of("finetune", QUICK, scenario=scenario)
        run = run_of(lab, "dark_replay", scenario, memory=10, alpha=0.0, beta=0.0)
        for task in (0, 1):
            expected = plain.carried(task).tensors
            for name, tensor in run.carried(task).tensors.items():
                name = name if scenario == "class" else name.removeprefix("backbone/")
                if name in expected:
                    assert torch.equal(tensor, expected[name]), name
            assert torch.equal(run.state(task).head["weight"], plain.state(task).head["weight"])


def test_base_task_fills_replay_memory(lab: Lab) -> None:
    tasks = [
        {"card": str(lab.card), "name": "two", "classes": ["0", "1"], "role": "base"},
        {"card": str(lab.card), "name": "three", "classes": ["2", "3", "4"]},
    ]
    stream = {"scenario": "class", "tasks": tasks}
    run = lab.run_of("dark_replay", QUICK, methods={"dark_replay": {"memory": 8}}, stream=stream)
    assert [job.step for job in run.stages(0)] == ["herd"]
    assert run.carried(0).tensors[LOGITS].shape == (8, 2)
    assert history(run.artifact(run.stages(1)[0]))[0]["mse"] > 0
