"""Tests of APER: its logits, its variants, and its equality to SimpleCIL without adaptation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import method_steps
import pytest
import torch
from method_steps import ONE, THREE, TWO, images, vit
from torch import Tensor, nn

from pipeline.testing import lab as stage_lab
from pipeline.testing.lab import OPTIMIZERS, Lab
from pipeline.testing.promises import PROMISES
from workers.data.features import FeatureBatch
from workers.errors import UserError
from workers.job import Task
from workers.methods.aper import Aper, AperSettings
from workers.methods.base import MethodSettings, OptimPlan, StepContext, StepData
from workers.methods.bases.first_session import Variant
from workers.methods.simplecil import SimpleCil
from workers.storage.taskstate import Carried

VARIANTS = get_args(Variant)


def learn(method: Any, task: Task, pixels: Tensor, labels: Tensor) -> None:
    """Compute the statistics of a task from these images, with the method's own features."""
    with torch.no_grad():
        features = method.eval().features(pixels)
    keys = [f"{task.name}/{row}" for row in range(len(features))]
    batch = FeatureBatch(features, labels, torch.zeros_like(labels), keys)
    stream = (*method.stream, task)
    method.stream = stream
    plan = OptimPlan(1.0, 0.0, 1, 1.0)
    data = StepData(load_features=lambda: batch)
    method.begin(
        StepContext(task, plan, "statistics", stream=stream, training_tasks=(task,), data=data)
    )


def pixels_of(task: Task) -> tuple[Tensor, Tensor]:
    """Return images and labels of a task, four per class."""
    seed = torch.Generator().manual_seed(task.num_classes)
    labels = torch.arange(task.num_classes).repeat(4)
    return torch.randn(len(labels), 3, 16, 16, generator=seed), labels


class Halves(nn.Module):
    """A backbone that returns the first half of an image's numbers as features."""

    num_features = 2

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(1))

    def forward(self, images: Tensor) -> Tensor:
        return images[:, :2]


class SecondHalf(nn.Module):
    """An adaptation that returns the second half of an image's numbers as features."""

    def forward(self, backbone: nn.Module, images: Tensor, drawn: dict[str, Tensor]) -> Tensor:
        return images[:, 2:]

    def state_dict(self) -> dict[str, Tensor]:  # type: ignore[override]
        return {}


def test_logit_is_the_cosine_of_concatenated_features() -> None:
    """The second half has little weight, because its features are a fifth as long."""
    method = Aper(Halves(), AperSettings(first_session="finetune"), 0)
    method.adaptation = SecondHalf()  # type: ignore[assignment]
    prototypes = torch.tensor([[1, 0, 0, 0.1], [0, 1, 0.1, 0]])
    learn(method, ONE, prototypes, torch.tensor([0, 1]))
    scores = method.logits(torch.tensor([[3, 4, 0.6, 0.8]]), None)[0]
    assert scores.tolist() == pytest.approx([0.60103997, 0.79227996], abs=1e-6)


def test_class_mean_uses_unnormalised_features() -> None:
    method = Aper(Halves(), AperSettings(first_session="finetune"), 0)
    method.adaptation = SecondHalf()  # type: ignore[assignment]
    pixels = torch.tensor([[2.0, 1, 4, 0], [1, 2, 0, -1], [-2, 0, 0, 3]])
    learn(method, ONE, pixels, torch.tensor([0, 0, 1]))
    means = method.heads["one"].weight[:, 0]
    assert torch.equal(means, torch.tensor([[1.5, 1.5, 2, -0.5], [-2, 0, 0, 3]]))


@pytest.mark.parametrize("variant", ["adapter", "finetune", "ssf"])
def test_aper_without_adaptation_effect_equals_simplecil(variant: str) -> None:
    method = Aper(vit(), AperSettings(first_session=variant), 0)
    if variant == "ssf":
        adaptation: Any = method.adaptation
        nn.init.ones_(adaptation.values["scale"])
        nn.init.zeros_(adaptation.values["shift"])
    plain = SimpleCil(vit(), MethodSettings(), 0)
    for task in (ONE, TWO):
        learn(method, task, *pixels_of(task))
        learn(plain, task, *pixels_of(task))
    assert torch.allclose(method.logits(images(), None), plain.logits(images(), None), atol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_order_of_later_tasks_does_not_change_logits(variant: str) -> None:
    torch.manual_seed(0)
    method = Aper(vit(), AperSettings(first_session=variant), 0)
    assert method.adaptation is not None
    with torch.no_grad():
        for parameter in method.adaptation.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    other = Aper(vit(), AperSettings(first_session=variant), 0)
    other.load_carried(Carried(method.carried_tensors()))
    for task in (ONE, TWO, THREE):
        learn(method, task, *pixels_of(task))
    for task in (ONE, THREE, TWO):
        learn(other, task, *pixels_of(task))
    for task in (ONE, TWO, THREE):
        expected = method.logits(images(), task.name)
        assert torch.equal(other.logits(images(), task.name), expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_image_costs_two_forward_passes(variant: str) -> None:
    method = Aper(vit(), AperSettings(first_session=variant), 0)
    learn(method, ONE, *pixels_of(ONE))
    share = method.flops_share(method.state())
    assert share == pytest.approx(2) if variant in ("finetune", "ssf") else share > 2


def test_a_damaged_state_is_refused() -> None:
    method = Aper(vit(), AperSettings(), 0)
    learn(method, ONE, *pixels_of(ONE))
    state, carried = method.finish()
    other = Aper(vit(), AperSettings(), 0)
    with pytest.raises(UserError, match="does not match first_session 'adapter'"):
        other.load_carried(Carried({}))
    with pytest.raises(UserError, match="no class means"):
        other.load_task(replace(state, head={}))
    cut = {name: t[..., :1] if name == "weight" else t for name, t in state.head.items()}
    with pytest.raises((UserError, RuntimeError)):
        other.load_task(replace(state, head=cut))
    other.load_task(state)
    other.load_carried(carried)
    assert torch.equal(other.logits(images(), "one"), method.logits(images(), "one"))


def test_a_base_task_is_refused() -> None:
    expected = r"first_session 'adapter'.* base task 'base'.* role `task`"
    with pytest.raises(UserError, match=expected):
        Aper.check_backbone(AperSettings(), vit(), (method_steps.BASE, ONE))


# ---- stages --------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("promise", [name for name, p in PROMISES.items() if p.applies(Aper)])
@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if variant != "adapter"])
def test_every_variant_keeps_the_promises(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, variant: str, promise: str
) -> None:
    settings = {"first_session": variant}
    for optimizer in OPTIMIZERS:
        monkeypatch.setitem(stage_lab.SETTINGS, ("aper", optimizer), settings)
    PROMISES[promise].check(lab, "aper", PROMISES[promise].optimizers[0])
