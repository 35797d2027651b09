"""Tests of captured steps (`train.compile: step`): they compute the same bits as normal steps.

On the CPU, `tests/step_recorder.py` replaces the CUDA graph.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.testing.lab import TINY, Lab
from tests.step_recorder import HostRead, OperatorRecorder, StepRecorder
from workers import capture
from workers.capture import StepCapture, TapedRng, find_obstacle
from workers.data.accelerator import CPU
from workers.data.batch import Batch
from workers.dist import Group
from workers.methods import METHODS
from workers.methods.base import Progress
from workers.methods.finetune import FineTune
from workers.model import key_masks, masks
from workers.rng import StepRng

# Methods with steps that are not captured, and the reason.
NOT_CONSTANT = {
    "gem": "solves a quadratic program on the host",
    "mir": "chooses samples on the host",
    "ranpac": "trains only in its first session, as `aper`",
}
CONSTANT = {name for name, cls in METHODS.items() if vars(cls).get("has_constant_step")}
# Methods with a fast test or special steps.
SELECTED = ("adahat", "er", "hat", "lora", "meat", "si", "toast")


@pytest.fixture(autouse=True)
def recorder(monkeypatch: pytest.MonkeyPatch) -> type[StepRecorder]:
    monkeypatch.setitem(capture.BACKENDS, "cpu", StepRecorder)
    # MEAT's attention for CPUs reads a value on the host, so use the form for GPUs.
    monkeypatch.setattr(key_masks, "_is_fused_on_cpu", lambda tensor: False)
    monkeypatch.setattr(masks, "_reads_on_host", lambda tensor: False)  # same for TopK masks
    monkeypatch.setattr(StepRecorder, "replays", 0)
    return StepRecorder


def results(lab: Lab, method: str, settings: dict[str, Any] | None = None, **train: Any) -> Any:
    """Return the bytes that a method stores for two tasks."""
    rest = {name: train.pop(name) for name in ("data", "backbone") if name in train}
    base = {"optimizer": "adamw", "lr": 1e-2, "weight_decay": 0.05, "epochs": 2}
    run = lab.run_of(method, base | train, settings=settings or {}, **rest)
    return [(run.state(task).to_bytes(), run.carried(task).to_bytes()) for task in range(2)]


def test_every_trained_method_is_captured_or_listed_as_exception() -> None:
    trained = {name for name, cls in METHODS.items() if cls.has_training()}
    assert trained == CONSTANT | (NOT_CONSTANT.keys() & trained)
    assert not CONSTANT & NOT_CONSTANT.keys()


@pytest.mark.parametrize(
    "method",
    [pytest.param(name, marks=pytest.mark.slow) for name in sorted(CONSTANT - {*SELECTED})]
    + [*SELECTED],
)
def test_captured_steps_compute_the_same_bits(method: str, lab: Lab) -> None:
    """Each epoch has a smaller last batch, which runs normally between captured steps."""
    settings = {"ranpac": {"projection": 100}}.get(method)
    plain = results(lab, method, settings)
    assert StepRecorder.replays == 0
    assert results(lab, method, settings, compile="step") == plain
    assert StepRecorder.replays >= 5  # few for `aper`, which trains only one task


@pytest.mark.parametrize(
    ("method", "settings", "train"),
    [
        ("meat", {}, {"accumulate": 2}),
        ("lora", {}, {"clip": 0.1}),
        ("hat", {}, {"precision": "bf16"}),
        ("er", {}, {"precision": "bf16", "accumulate": 2}),
        pytest.param("dytox", {"rho": 0.05}, {}, marks=pytest.mark.slow),
        ("lwf", {"head_first": 0.3}, {"epochs": 3}),
        pytest.param("simple_der", {"prune_after": 0.4}, {"epochs": 3}, marks=pytest.mark.slow),
        pytest.param("e2e", {"noise": True}, {}, marks=pytest.mark.slow),
        ("hat", {"schedule": "linear"}, {}),
        ("finetune", {}, {"optimizer": "sgd", "momentum": 0, "lr": 0.1}),
        ("finetune", {}, {"data": {"mixup": 0.8, "cutmix": 1.0, "erase": 0.2, "flip": 0.5}}),
        ("finetune", {}, {"backbone": TINY | {"drop_path": 0.3}}),
        ("finetune", {}, {"schedule": "epoch", "epochs": 3}),
    ],
)
def test_captured_steps_keep_bits_with_training_settings(
    method: str, settings: dict[str, Any], train: dict[str, Any], lab: Lab
) -> None:
    plain = results(lab, method, settings, **train)
    assert results(lab, method, settings, **train, compile="step") == plain
    assert StepRecorder.replays or settings.get("noise")  # with noise, no step is repeated


def test_sgd_with_momentum_differs_by_rounding_only(lab: Lab) -> None:
    """Only the fused SGD reads the learning rate from a tensor, and it rounds differently."""
    train = {"optimizer": "sgd", "lr": 0.1, "weight_decay": 0.0}
    run = lab.run_of("finetune", train | {"epochs": 2}, settings={})
    captured = lab.run_of("finetune", train | {"epochs": 2, "compile": "step"}, settings={})
    expected = run.carried(0).tensors
    for name, tensor in captured.carried(0).tensors.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-5)
    assert StepRecorder.replays


def test_a_resumed_stage_continues_with_equal_bits(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workers import loop

    plain = results(lab, "hat", compile="step")
    other = Lab(tmp_path / "other")
    calls = 0
    step = loop.train_step

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 8:
            raise KeyboardInterrupt
        return step(*args, **kwargs)

    monkeypatch.setattr(loop, "train_step", interrupted)
    monkeypatch.setattr(loop.CheckpointSaver, "is_due", lambda self, step=None: True)
    with pytest.raises(KeyboardInterrupt):
        results(other, "hat", compile="step")
    assert results(other, "hat", compile="step") == plain
    assert calls > 8


class ReadsProgress(FineTune):
    """Scales the loss by a Python number that changes between steps, which is an error."""

    name = "reads_progress"
    has_constant_step = True
    factor = staticmethod(lambda progress: 1.0 + progress.step)

    def loss(self, batch: Batch, progress: Progress) -> tuple[Tensor, dict[str, Tensor]]:
        loss, terms = super().loss(batch, progress)
        return loss * self.factor(progress), terms


class NumbersProgress(ReadsProgress):
    """Reads the same number from `Progress.number`, which is correct."""

    name = "numbers_progress"
    has_constant_step = True
    factor = staticmethod(
        lambda progress: progress.number("factor", lambda progress: 1.0 + progress.step)
    )


@pytest.mark.parametrize("cls", [ReadsProgress, NumbersProgress])
def test_captured_step_is_correct_only_with_progress_numbers(
    cls: type[FineTune], lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recorder finds a method that breaks the rule, so the tests above can fail."""
    monkeypatch.setitem(METHODS, cls.name, cls)
    plain = results(lab, cls.name)
    captured = results(lab, cls.name, compile="step")
    assert (captured == plain) == (cls is NumbersProgress)


def test_host_read_and_new_draw_in_captured_step_raise_errors() -> None:
    with pytest.raises(HostRead), OperatorRecorder():
        float(torch.ones(()))
    batch = capture.FixedBatch(make_batch(0))
    batch.batch.draw.shared("known", 2)
    batch.close()
    batch.batch.draw.shared("known", 2)
    with pytest.raises(AssertionError, match="draws"):
        batch.batch.draw.shared("new", 2)


def make_batch(step: int, size: int = 4) -> Batch:
    draw = StepRng(7, 0, step, torch.arange(size), size, CPU)
    return Batch(torch.full((size, 3), float(step)), torch.zeros(size), torch.zeros(size), draw)


def test_loading_a_fixed_batch_updates_images_and_draws_in_place() -> None:
    fixed = capture.FixedBatch(make_batch(0))
    assert isinstance(fixed.batch.draw, TapedRng)
    draws = (
        fixed.batch.draw.per_sample("a", 2),
        fixed.batch.draw.every_sample("b", 3),
        fixed.batch.draw.shared("c"),
    )
    images = fixed.batch.images
    fixed.load(make_batch(5))
    plain = make_batch(5).draw
    expected = plain.per_sample("a", 2), plain.every_sample("b", 3), plain.shared("c")
    assert all(map(torch.equal, draws, expected))
    assert fixed.batch.images is images
    assert bool((images == 5).all())
    assert fixed.batch.counts is None
    assert fixed.batch.keys is None


def test_uncapturable_step_runs_normally_with_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab(tmp_path)  # a lab without results of captured steps

    class Derived(FineTune):
        """A subclass can change the step, so it does not inherit `has_constant_step`."""

    plain = lab.run("finetune")
    two_ranks = Group(rank=0, world=2)
    assert "2 workers" in str(find_obstacle(plain.live(0), two_ranks))
    method = plain.live(0)
    assert find_obstacle(method, Group()) is None
    monkeypatch.setattr(method, "__class__", Derived)
    assert "differ" in str(find_obstacle(method, Group()))
    monkeypatch.delitem(capture.BACKENDS, "cpu")
    run = lab.run("finetune", compile="step")
    assert run.state(0).to_bytes() == plain.state(0).to_bytes()
    warnings = run.trained(0).manifest["warnings"]
    assert any("train.compile is 'step'" in text and "cpu" in text for text in warnings)


def test_step_capture_updates_learning_rate_tensors_in_place() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    optimizer.param_groups[0]["peak"] = 0.5
    StepCapture(FineTune.__new__(FineTune), optimizer, CPU)
    rate = optimizer.param_groups[0]["lr"]
    from workers.optim import scale_rates

    scale_rates(optimizer, 0.5)
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == 0.25
