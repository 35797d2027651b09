"""Every registered method keeps every promise that applies to it, and a method that breaks one is found out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checks import PROMISES
from laboratory import Lab, answers
from torch import Tensor

from workers.methods import METHODS
from workers.methods.base import Method
from workers.methods.finetune import FineTune, weight_groups
from workers.methods.linear import Linear

EVERY = [pytest.param(method, optimizer, promise, id=f"{method}-{optimizer}-{promise}")
         for method, cls in METHODS.items() for promise, p in PROMISES.items() if p.applies(cls) for optimizer in p.optimizers]


@pytest.mark.parametrize(("method", "optimizer", "promise"), EVERY)
def test_every_method_keeps(lab: Lab, method: str, optimizer: str, promise: str):
    PROMISES[promise].check(lab, method, optimizer)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_fine_tuning_forgets(lab: Lab, optimizer: str):
    """The measure of all others: had it kept its answers, the promise would say nothing."""
    run = lab.run("finetune", optimizer)
    images, task = run.images(0), run.order[0]
    before, after = answers(run.served(0), images, task), answers(run.served(1), images, task)
    assert (before - after).abs().max() > 0.1
