"""Tests of methods on other families of timm models: old answers stay bit-identical if promised,
and a method that does not support a family is refused in one sentence before anything runs."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from families import COMMAND, PAGE, SMALL, page

from pipeline.testing.lab import OPTIMIZERS, Lab, Run, compute_task_logits
from pipeline.testing.promises import old_answers_stay
from workers.errors import UserError
from workers.job import BackboneSettings
from workers.methods import METHODS
from workers.model import vit
from workers.model.vit import compute_digest

FAST_FAMILIES = ("ConvNeXt", "ResNet", "MobileNetV3", "EVA-02", "Swin", "BEiT")
FAST_METHODS = ("piggyback", "packnet", "finetune")
# methods that need blocks and tokens, and vision transformers with non-standard blocks
FAST_ON_BLOCKS = ("vpt", "ctr_tsm", "toast", "hat", "meat")
BLOCK_FAMILIES = ("EVA-02", "BEiT", "DINOv3")


def is_fast(family: str, method: str) -> bool:
    """Return whether a case is one of the fast tests."""
    if method in FAST_ON_BLOCKS:
        return family in BLOCK_FAMILIES
    return family in FAST_FAMILIES and method in FAST_METHODS


CASES = [
    pytest.param(family, method, marks=() if is_fast(family, method) else pytest.mark.slow)
    for family, method in product(SMALL, METHODS)
]


def fits(method: str, family: str) -> bool:
    """Return whether a method with default settings accepts the family's small backbone."""
    cls = METHODS[method]
    try:
        cls.check_backbone(cls.Settings(), vit.outline(BackboneSettings(**SMALL[family])))
    except UserError:
        return False
    return True


def run_of(lab: Lab, method: str, family: str) -> Run:
    backbone = {"crop_pct": 1.0, **SMALL[family]}
    settings: dict[str, Any] = {**OPTIMIZERS["adamw"], "epochs": 1}
    return lab.run_of(method, settings, backbone=backbone)


@pytest.mark.few(6)
@pytest.mark.parametrize(("family", "method"), CASES)
def test_method_works_on_family_or_explains_refusal(lab: Lab, family: str, method: str) -> None:
    if not fits(method, family):
        with pytest.raises(UserError, match=f"methods.{method}: .*such as ") as refused:
            run_of(lab, method, family)
        assert "\n" not in str(refused.value)
        return
    run = run_of(lab, method, family)
    for task in (0, 1):
        logits = compute_task_logits(run.served(1), run.images(task), run.order[task])
        assert logits.shape == (len(run.images(task)), 2 + task)
        assert logits.isfinite().all()
        assert torch.allclose(
            compute_task_logits(run.live(task), run.images(task), run.order[task]),
            compute_task_logits(run.served(task), run.images(task), run.order[task]),
            atol=1e-4,
        ), "the stored task must equal the trained one"
    live = run.live(1)
    if live.freezes_backbone:
        assert compute_digest(live.backbone) == live.backbone_digest
    if not live.may_forget:
        old_answers_stay(run)


@pytest.mark.parametrize("family", BLOCK_FAMILIES)
def test_methods_limited_to_plain_vits_explain_refusal(family: str) -> None:
    outline = vit.outline(BackboneSettings(**SMALL[family]))
    for cls in METHODS.values():
        if not cls.needs_vit or isinstance(outline, cls.vits):
            continue
        with pytest.raises(UserError) as refused:
            cls.check_backbone(cls.Settings(), outline)
        assert cls.why_no_other_vit
        assert cls.why_no_other_vit in str(refused.value)


@pytest.mark.slow
def test_the_page_on_methods_and_families_is_current() -> None:
    assert PAGE.read_text() == page(), f"run {COMMAND}"
