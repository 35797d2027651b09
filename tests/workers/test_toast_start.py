"""The initial feedback layers of TOAST: identity or random."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.testing.lab import OPTIMIZERS, Lab, Run, compute_task_logits
from workers.job import BackboneSettings
from workers.methods import METHODS
from workers.model import vit

SMALL = BackboneSettings(
    img_size=16, options={"patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 4}
)
CONVNEXT = BackboneSettings(
    name="convnext_atto", img_size=32, options={"depths": [1, 1, 1, 1], "dims": [8, 16, 16, 32]}
)


def make_start(
    name: str, seed: int = 0, backbone: BackboneSettings = SMALL, **settings: Any
) -> dict[str, Tensor]:
    """Return the tensors from which every task of a new method starts."""
    method_class = METHODS[name]
    parsed = method_class.Settings.model_validate(settings)
    method: Any = method_class(vit.build(backbone), parsed, seed)
    start: dict[str, Tensor] = method.start
    return start


@pytest.mark.parametrize("backbone", [SMALL, CONVNEXT], ids=["vit", "convnext"])
@pytest.mark.parametrize("name", ["toast", "toast_lite"])
def test_random_layers_have_the_deviation_of_the_released_code(
    name: str, backbone: BackboneSettings
) -> None:
    identity = make_start(name, backbone=backbone)
    drawn = make_start(name, backbone=backbone, start="random")
    assert {n: t.shape for n, t in drawn.items()} == {n: t.shape for n, t in identity.items()}
    values = torch.cat([tensor.flatten() for tensor in drawn.values()])
    assert float(values.std()) == pytest.approx(0.02, rel=0.05)
    assert abs(float(values.mean())) < 0.002
    again = make_start(name, backbone=backbone, start="random")
    other = make_start(name, 1, backbone, start="random")
    for tensor_name, tensor in drawn.items():
        assert torch.equal(tensor, again[tensor_name])
        assert not torch.equal(tensor, other[tensor_name])


@pytest.mark.parametrize("name", ["toast", "toast_lite"])
def test_a_task_is_served_with_the_layers_from_which_it_started(lab: Lab, name: str) -> None:
    """The state of `toast_lite` has updates only; the random layers are drawn again."""

    def run_with(start: str) -> Run:
        return lab.run_of(name, OPTIMIZERS["adamw"], settings={"start": start})

    run = run_with("random")
    images = run.images(0)
    before = compute_task_logits(run.served(0), images, "two")
    assert torch.equal(compute_task_logits(run.served(1), images, "two"), before)
    other = compute_task_logits(run_with("identity").served(0), images, "two")
    assert not torch.allclose(other, before, atol=1e-3)
