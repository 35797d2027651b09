"""Tests of timm: a small model of each module trains one step and is evaluated, or is refused.

golden/timm_models.json holds the models, `timm_models.REFUSED` the reasons for a refusal.
"""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

from pipeline.testing import lab as stage_lab
from pipeline.testing.lab import OPTIMIZERS, Lab, compute_task_logits, history
from tests.timm_models import COMMAND, FILE, REFUSED, modules, pinned
from workers.errors import UserError
from workers.job import BackboneSettings
from workers.model import vit

METHODS = ("linear", "piggyback")  # one uses features, the other parameters by name
ONE_STEP: dict[str, Any] = {**OPTIMIZERS["adamw"], "epochs": 1, "batch_size": 8}
MAX_PARAMETERS = 200_000_000


@pytest.fixture
def tiny_lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    """Yield a lab with four training images of each class; delete its folder after the test."""
    monkeypatch.setattr(stage_lab, "PER_CLASS", {"train": 4, "test": 2})
    yield Lab(tmp_path)
    shutil.rmtree(tmp_path)
    gc.collect()


def test_each_timm_module_has_a_pinned_model() -> None:
    listed = set(modules())
    assert set(pinned()) == listed, f"run {COMMAND}"
    assert set(REFUSED) <= listed, f"{FILE.name} has no such module"


@pytest.mark.slow
@pytest.mark.parametrize("module", sorted(pinned()))
def test_timm_model_trains_or_is_refused(tiny_lab: Lab, module: str) -> None:
    backbone = {"crop_pct": 1.0, **pinned()[module]}
    assert backbone["name"] in timm.list_models(module=module), f"run {COMMAND}"
    if module in REFUSED:
        with pytest.raises(UserError, match=REFUSED[module]) as refused:
            tiny_lab.run_of("linear", ONE_STEP, ("two",), backbone=backbone)
        assert "\n" not in str(refused.value)
        assert "such as" in str(refused.value)
        return
    outline = vit.outline(BackboneSettings(**pinned()[module]))
    assert vit.count_elements(outline) <= MAX_PARAMETERS, "choose options of a smaller model"
    for method in METHODS:
        run = tiny_lab.run_of(
            method, ONE_STEP, ("two",), backbone=backbone, data={"val_fraction": 0.0}
        )
        (epoch,) = history(run.trained(0))
        assert epoch["images"] == 8
        (row,) = run.evaluated(0)["rows"]
        assert row["total"] == 4
        logits = compute_task_logits(run.served(0), run.images(0), "two")
        assert logits.shape == (4, 2)
        assert logits.isfinite().all()
        trained = compute_task_logits(run.live(0), run.images(0), "two")
        assert torch.allclose(trained, logits, atol=1e-4), (
            "the stored model must equal the trained one"
        )
        tiny_lab.live.clear()
