"""Tests of the training length: few images get smaller batches, then more epochs, within limits."""

from __future__ import annotations

import pytest

from workers.job import TrainSettings, key_inputs
from workers.optim import describe_length, fit_to_images

RULE = TrainSettings(epochs=5, batch_size=64, min_steps=300, min_batch_size=16, max_epochs=100)


@pytest.mark.parametrize(
    ("num_images", "batch_size", "epochs"),
    [
        (50_000, 64, 5),  # 3910 steps
        (3800, 64, 5),  # 300 steps
        (3700, 32, 5),  # 580 steps; 290 with batches of 64
        (1000, 16, 5),  # 315 steps; 160 with batches of 32
        (600, 16, 8),  # 304 steps; 190 in 5 epochs
        (40, 16, 100),  # 3 steps per epoch, and at most 100 epochs
    ],
)
def test_small_task_halves_batches_then_adds_epochs(
    num_images: int, batch_size: int, epochs: int
) -> None:
    fitted = fit_to_images(RULE, num_images)
    assert (fitted.batch_size, fitted.epochs) == (batch_size, epochs)
    steps = describe_length(fitted, num_images)["steps"]
    assert steps >= 300 or epochs == 100


def test_without_min_steps_the_training_length_is_unchanged() -> None:
    train = TrainSettings(epochs=3, batch_size=64)
    assert fit_to_images(train, 10) is train
    assert not {"min_steps", "min_batch_size", "max_epochs"} & key_inputs(train).keys()


def test_batch_size_stays_at_least_the_number_of_micro_batches() -> None:
    train = RULE.model_copy(update={"accumulate": 48})
    assert fit_to_images(train, 600).batch_size == 64


def test_only_epochs_grow_without_min_batch_size() -> None:
    train = TrainSettings(epochs=2, batch_size=32, min_steps=50)
    fitted = fit_to_images(train, 320)
    assert (fitted.batch_size, fitted.epochs) == (32, 5)


def test_max_epochs_limits_the_configured_epochs() -> None:
    train = RULE.model_copy(update={"max_epochs": 2})
    assert fit_to_images(train, 50_000).epochs == 2
