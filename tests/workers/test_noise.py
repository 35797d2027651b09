"""Tests of stochastic depth: the drops depend on the sample and the step, not on the rank."""

from __future__ import annotations

import pytest
import torch

from pipeline.testing.lab import TINY, Lab, again
from workers.job import BackboneSettings
from workers.model import noise, vit
from workers.model.noise import DrawnDropPath, draw_paths
from workers.rng import StepRng

CPU = torch.device("cpu")


def draw(rows: torch.Tensor, size: int, step: int = 0) -> StepRng:
    return StepRng(1, 0, step, rows, size, CPU)


def path(probability: float) -> DrawnDropPath:
    return DrawnDropPath(probability).train()


def test_drop_path_keeps_the_mean() -> None:
    layer, x = path(0.25), torch.ones(20_000, 2, 3)
    draw_paths(layer, draw(torch.arange(len(x)), len(x)))
    out = layer(x)
    assert out[:, 0, 0].unique().tolist() == pytest.approx([0, 1 / 0.75])
    assert torch.equal(out, out[:, :1, :1].expand_as(out)), "a sample is dropped as a whole"
    assert float(out.mean()) == pytest.approx(1, abs=0.02)


def test_drops_of_a_sample_do_not_depend_on_its_rank() -> None:
    layer, x = path(0.5), torch.ones(64, 1)
    draw_paths(layer, draw(torch.arange(64), 64))
    whole = layer(x)
    for rank in range(3):
        rows = torch.arange(64)[rank::3]
        draw_paths(layer, draw(rows, 64))
        assert torch.equal(layer(x[rows]), whole[rows])
    draw_paths(layer, draw(torch.arange(64), 64, step=1))
    assert not torch.equal(layer(x), whole)


def test_blocks_are_dropped_independently_and_only_while_training() -> None:
    model = vit.build(BackboneSettings.model_validate({**TINY, "drop_path": 0.5}))
    paths = [m for m in model.modules() if isinstance(m, DrawnDropPath)]
    assert paths
    draw_paths(model.train(), draw(torch.arange(256), 256))
    drawn = [p(torch.ones(256, 1)) for p in paths]
    assert not any(torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])
    assert all(torch.equal(p.eval()(torch.ones(9, 1)), torch.ones(9, 1)) for p in paths)


def test_draws_for_another_batch_are_refused() -> None:
    layer = path(0.5)
    draw_paths(layer, draw(torch.zeros(1, dtype=torch.int64), 8))
    with pytest.raises(AssertionError, match="another batch"):
        layer(torch.ones(8, 1))


def test_train_loop_draws_drops_before_each_step(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    run = lab.run_of("finetune", {"epochs": 1}, backbone={**TINY, "drop_path": 0.5})
    with_it = run.trained(0)
    monkeypatch.setattr(noise, "draw_paths", lambda *arguments: None)
    without = lab.stage(again(run.stages(0)[0], "undrawn"))
    assert with_it.read("carried.safetensors") != without.read("carried.safetensors")
