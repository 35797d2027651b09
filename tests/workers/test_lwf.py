"""Tests of LwF: the loss, the phase that trains only the new head, and the carried state."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from method_steps import begun
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.testing.lab import TASKS, Lab
from workers import loop, optim
from workers.data.batch import Batch
from workers.dist import Group
from workers.job import BackboneSettings, Task, TrainSettings
from workers.methods.base import Progress
from workers.methods.lwf import Lwf, LwfSettings
from workers.model.vit import build
from workers.rng import StepRng
from workers.storage.taskstate import Carried

TINY = BackboneSettings(
    img_size=16,
    options={"patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2, "weight_init": "jax"},
)
A, B, C = (
    Task(name, "card", "", tuple(name + c for c in "123"[:count]))
    for name, count in (("a", 2), ("b", 3), ("c", 2))
)
LATER = Progress(0, 9, 1, 10)


def lwf(*tasks: Task, scenario: str = "task", **settings: Any) -> Any:
    """Return a method with heads for all tasks but the last, ready to train on the last one."""
    torch.manual_seed(0)
    method: Any = Lwf(build(TINY), LwfSettings(**settings), 0)
    method.scenario, method.stream = scenario, tasks
    for task in tasks[:-1]:
        head = nn.Linear(32, task.num_classes)
        method.heads.restore(task.name, head.state_dict())
    method.groups = begun(method, tasks[-1])
    return method.train()


def batch(classes: int, step: int = 0) -> Batch:
    draw = StepRng(7, 0, step, torch.arange(6), 6, torch.device("cpu"))
    pictures = torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(step))
    return Batch(pictures, torch.arange(6) % classes, torch.zeros(6, dtype=torch.long), draw)


def moved(method: Lwf) -> None:
    """Change the student as training would, so that it differs from the teacher."""
    with torch.no_grad():
        for p in method.parameters():
            p.add_(
                torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())), alpha=0.05
            )


def divergence(z: Tensor, y: Tensor, tau: float) -> Tensor:
    return -((y / tau).softmax(1) * (z / tau).log_softmax(1)).sum(1).mean()


# ---- the loss ------------------------------------------------------------------------------------
@pytest.mark.parametrize("tau", [1.0, 2.0])
def test_lwf_loss_distils_each_old_head(
    tau: float,
) -> None:
    settings: dict[str, Any] = {"lambda": 0.7, "tau": tau}
    method = lwf(A, B, C, **settings)
    taught = {name: method.heads[name](method.backbone(batch(2).images)).detach() for name in "ab"}
    moved(method)
    loss, terms = method.loss(batch(2), LATER)
    features = method.backbone(batch(2).images)
    ce = F.cross_entropy(method.heads["c"](features), batch(2).labels)
    kd = sum(divergence(method.heads[name](features), taught[name], tau) for name in "ab")
    assert torch.allclose(loss, ce + 0.7 * kd, atol=1e-5)
    assert terms.keys() == {"ce", "kd"}
    assert torch.allclose(terms["kd"], torch.as_tensor(kd), atol=1e-5)


def test_lwf_class_scenario_separates_old_and_new_softmax() -> None:
    method = lwf(A, B, C, scenario="class", **{"lambda": 3.0})
    taught = torch.cat(
        [method.heads[name](method.backbone(batch(2).images)) for name in "ab"], 1
    ).detach()
    moved(method)
    logits = method.logits(batch(2).images, None)  # (6, 2 + 3 + 2)
    expected = F.cross_entropy(logits[:, 5:], batch(2).labels) + 3 * divergence(
        logits[:, :5], taught, 2.0
    )
    assert torch.allclose(method.loss(batch(2), LATER)[0], expected, atol=1e-5)


def test_first_task_is_plain_fine_tuning() -> None:
    method = lwf(A)
    loss, terms = method.loss(batch(2), LATER)
    assert method.teacher is None
    assert terms.keys() == {"ce"}
    assert torch.equal(
        loss, F.cross_entropy(method.heads["a"](method.backbone(batch(2).images)), batch(2).labels)
    )


def test_student_and_teacher_pass_once_for_all_old_heads() -> None:
    method = lwf(A, B, C, head_first=0.5)
    passes: list[tuple[str, bool]] = []
    assert method.teacher is not None
    for name, module in (("student", method.backbone), ("teacher", method.teacher.backbone)):
        module.register_forward_hook(
            lambda m, inputs, output, name=name: passes.append((name, torch.is_grad_enabled()))
        )
    method.loss(batch(2), LATER)
    assert sorted(passes) == [("student", True), ("teacher", False)]
    passes.clear()
    method.loss(batch(2), Progress(0, 0, 1, 10))
    assert passes == [("student", False)], (
        "while only the new head is trained, there is no distillation and no backbone gradient"
    )


def test_teacher_is_not_stored_and_stays_in_eval_mode() -> None:
    method = lwf(A, B)
    assert not any("teacher" in name for name in method.state_dict())
    assert method.train().teacher is not None
    assert not method.teacher.backbone.training
    assert method.backbone.training


def test_old_heads_are_trained_without_weight_decay_on_biases() -> None:
    method = lwf(A, B)
    groups = {id(p): g for g in method.groups for p in g["params"]}
    for name in "ab":
        assert groups[id(method.heads[name].weight)]["weight_decay"] == 0.05
        assert groups[id(method.heads[name].bias)]["weight_decay"] == 0
    assert sum(len(g["params"]) for g in method.groups) == len(groups)
    assert len(groups) == len([*method.parameters()])
    moved(method)
    method.loss(batch(3), LATER)[0].backward()
    assert method.heads["a"].weight.grad.abs().max() > 1e-6


@pytest.mark.parametrize("number", range(3))
def test_distillation_keeps_the_old_answers_on_new_images(number: int) -> None:
    """A larger weight keeps the old head's softmax closer to the teacher's on the training images.

    Args:
        number: Number of the training batch.
    """
    train = TrainSettings(optimizer="sgd", lr=0.01, momentum=0.0)
    divergences = []
    for weight in (0.0, 1.0, 3.0, 10.0):
        settings: dict[str, Any] = {"lambda": weight}
        method = lwf(A, B, **settings)
        assert method.teacher is not None
        images = batch(3, number).images
        teacher_logits = method.teacher.logits(images)["a"]
        optimizer = optim.build_optimizer(method.groups, train)
        for step in range(20):
            job: Any = SimpleNamespace(train=train)
            progress = Progress(0, step, 1, 20)
            loop.train_step(method, optimizer, [batch(3, number)], progress, job, Group())
        student_logits = method.heads["a"](method.backbone(images)).detach()
        entropy = divergence(teacher_logits, teacher_logits, 1.0)
        divergences.append(float(divergence(student_logits, teacher_logits, 1.0) - entropy))
    without, one, three, ten = divergences
    assert without > one > three > ten > 0
    assert three < 0.5 * without


# ---- training of the new head alone --------------------------------------------------------------
def steps(
    method: Lwf, train: TrainSettings, which: range, optimizer: torch.optim.Optimizer
) -> None:
    for step in which:
        job: Any = SimpleNamespace(train=train)
        loop.train_step(method, optimizer, [batch(3, step)], Progress(0, step, 1, 10), job, Group())


@pytest.mark.parametrize(
    "train",
    [
        TrainSettings(optimizer="sgd", lr=0.1, momentum=0.9),
        TrainSettings(lr=1e-2),
        TrainSettings(lr=1e-2, clip=1.0),
    ],
    ids=["sgd", "adamw", "clipped"],
)
def test_new_head_is_trained_alone_before_all_parameters(
    train: TrainSettings,
) -> None:
    """Neither weight decay nor momentum changes the parameters that are not trained yet."""
    method = lwf(A, B, head_first=0.4)
    optimizer = optim.build_optimizer(method.groups, train)
    before = {n: p.detach().clone() for n, p in method.named_parameters()}
    new = {id(p) for p in method.heads["b"].parameters()}
    steps(method, train, range(4), optimizer)
    assert {id(p) for n, p in method.named_parameters() if not torch.equal(p, before[n])} == new
    assert {id(p) for p in optimizer.state} == new
    steps(method, train, range(4, 6), optimizer)
    assert not any(
        torch.equal(p, before[n]) for n, p in method.named_parameters() if p.abs().sum() > 0
    )


def test_head_first_phase_ends_after_its_share_of_steps() -> None:
    method = lwf(A, B, head_first=0.5)
    has_distillation = [
        method.loss(batch(3), Progress(epoch, step, 2, 3))[1].keys() >= {"kd"}
        for epoch in range(2)
        for step in range(3)
    ]
    assert has_distillation == [False] * 3 + [True] * 3
    assert lwf(A, B).loss(batch(3), Progress(0, 0, 1, 1))[1].keys() >= {"kd"}, (
        "the phase must be off by default"
    )


# ---- carried state -------------------------------------------------------------------------------
def test_lwf_carries_weights_and_old_heads() -> None:
    method = lwf(A, B, C)
    state, carried = method.finish()
    assert state.sizes() == {"masks": 0, "tokens": 0, "copies": 0, "head": 4 * 2 * (32 + 1)}
    assert {n.split("/")[1] for n in carried.tensors if n.startswith("heads/")} == {"a", "b"}
    assert {n.split("/")[1] for n in carried.tensors if n.startswith("backbone/")} == {
        n for n, _ in method.backbone.named_parameters()
    }


def test_teacher_is_the_network_of_the_previous_task(lab: Lab) -> None:
    run = lab.run("lwf")
    carried, second = run.carried(0), run.live(1)
    assert isinstance(second, Lwf)
    assert second.teacher is not None
    assert {
        f"backbone/{n}": t for n, t in second.teacher.backbone.state_dict().items()
    }.keys() == carried.tensors.keys()
    assert all(
        torch.equal(t, carried.tensors[f"backbone/{n}"])
        for n, t in second.teacher.backbone.state_dict().items()
    )
    assert all(
        torch.equal(t, run.state(0).head[n])
        for n, t in second.teacher.heads[run.order[0]].state_dict().items()
    )


def test_old_task_is_served_with_its_updated_head(lab: Lab) -> None:
    run = lab.run("lwf")
    served, name = run.served(1), run.order[0]
    carried = run.carried(1).tensors
    assert all(
        torch.equal(t, carried[f"heads/{name}/{n}"]) for n, t in served.heads.export(name).items()
    )
    assert not torch.equal(served.heads[name].weight, run.state(0).head["weight"])
    assert not any(p.requires_grad for p in served.heads.parameters())


def test_the_head_of_a_base_task_is_distilled_too(lab: Lab) -> None:
    """The teacher of the first task in the chain is the backbone with its own trained head."""
    tasks = [
        {"card": str(lab.card), "name": name, "classes": list(TASKS[name]), "role": role}
        for name, role in (("two", "base"), ("three", "task"))
    ]
    run = lab.run_of(
        "lwf", {"optimizer": "adamw", "lr": 1e-3, "epochs": 1}, stream={"tasks": tasks}
    )
    live = run.live(1)
    assert isinstance(live, Lwf)
    assert live.old == ["two"]
    assert {n for n in run.carried(1).tensors if n.startswith("heads/")} == {
        "heads/two/weight",
        "heads/two/bias",
    }


def test_lwf_runs_in_the_class_incremental_scenario(lab: Lab) -> None:
    tasks = [
        {"card": str(lab.card), "name": name, "classes": list(classes)}
        for name, classes in TASKS.items()
    ]
    run = lab.run_of(
        "lwf",
        {"optimizer": "adamw", "lr": 1e-3, "epochs": 1},
        stream={"scenario": "class", "tasks": tasks},
    )
    logits = run.served(1).logits(run.images(1), None)
    assert logits.shape == (len(run.images(1)), 5)
    assert [row["task"] for row in run.evaluated(1)["rows"]] == ["two", "three"]


def test_training_does_not_change_the_loaded_carried_state() -> None:
    method = lwf(A, B)
    carried = Carried.from_bytes(method.finish()[1].to_bytes())
    before = carried.to_bytes()
    other = lwf(A)
    other.load_carried(carried)
    moved(other)
    assert carried.to_bytes() == before
