"""Tests of training defaults: each method has its own, a config overrides them, and the keys of
complete configs do not depend on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.config.settings import Config, check, dump
from pipeline.graph import build
from pipeline.graph.store import Store
from workers.job import TrainSettings, key_inputs
from workers.methods import METHODS
from workers.methods.train_defaults import TrainDefaults

LENGTH = {"min_steps", "min_batch_size", "max_epochs"}


def config(weights: str = "hub", **changes: Any) -> Config:
    body: dict[str, Any] = {
        "name": "defaults",
        "stream": {"tasks": [{"card": "digits", "split": 2}]},
        "backbone": {"weights": weights},
        "methods": {"meat": {}},
        "tracking": "off",
        **changes,
    }
    return check(body, "test")


@pytest.mark.parametrize("name", [name for name, cls in METHODS.items() if cls.has_training()])
def test_every_method_class_declares_its_own_train_defaults(name: str) -> None:
    method = METHODS[name]
    assert "train_defaults" in vars(method), f"{name} inherits the defaults of another method"
    defaults = method.train_defaults
    assert len(defaults.source.split()) > 3, "say where the numbers come from"
    assert defaults.steps.keys() <= {step.name for step in method.steps if step.trains}


@pytest.mark.parametrize("weights", ["hub", "none"])
@pytest.mark.parametrize("name", METHODS)
def test_every_method_accepts_its_own_defaults(name: str, weights: str) -> None:
    method = METHODS[name]
    scenario = max(method.scenarios - {"domain"})
    run_config = config(
        weights,
        methods={name: {}},
        stream={"scenario": scenario, "tasks": [{"card": "digits", "split": 2}]},
    )
    for step in method.steps:
        train = run_config.merge_train(name, step.name)
        assert train.min_steps > 0
        assert train.max_epochs == 100


def test_method_defaults_fill_gaps_of_config() -> None:
    silent = config().merge_train("meat")
    declared = METHODS["meat"].train_defaults
    assert (silent.lr, silent.epochs, silent.min_steps) == (declared.lr, 5, 300)
    assert config(train={"lr": 0.5}).merge_train("meat").lr == 0.5
    assert config(methods={"meat": {"train": {"lr": 0.25}}}).merge_train("meat").lr == 0.25


def test_methods_of_one_run_have_their_own_learning_rates() -> None:
    run_config = config(methods={"finetune": {}, "linear": {}})
    assert run_config.merge_train("finetune").lr == 1e-4
    assert run_config.merge_train("linear").lr == 2e-3


def test_methods_may_declare_a_learning_rate_for_random_weights() -> None:
    run_config = config("none", methods={"finetune": {}, "linear": {}})
    assert run_config.merge_train("finetune").lr == 1e-3
    assert run_config.merge_train("linear").lr == 2e-3
    assert run_config.backbone_train().lr == 1e-3


def test_config_overrides_defaults_of_step() -> None:
    stream = {"scenario": "class", "tasks": [{"card": "digits", "split": 2}]}
    silent = config(methods={"der": {}}, stream=stream)
    assert silent.merge_train("der", "finetune").epochs == 10
    assert silent.merge_train("der", "finetune").min_steps == 600, "in proportion to the epochs"
    loud = config(methods={"der": {}}, stream=stream, train={"epochs": 4, "lr": 0.1})
    assert loud.merge_train("der", "finetune").epochs == 4
    assert loud.merge_train("der", "finetune").lr == 0.1


def test_default_learning_rate_is_not_applied_to_another_optimizer() -> None:
    train = config(train={"optimizer": "sgd"}, methods={"finetune": {}}).merge_train("finetune")
    assert (train.optimizer, train.lr) == ("sgd", TrainSettings().lr)


@pytest.mark.parametrize(
    ("settings", "left"),
    [
        ({}, LENGTH),
        ({"epochs": 3, "batch_size": 8}, set()),
        ({"batch_size": 8}, {"min_steps", "max_epochs"}),
        ({"epochs": 3}, LENGTH),
        ({"epochs": 3, "batch_size": 8, "min_steps": 50}, {"min_steps", "max_epochs"}),
    ],
)
def test_configured_training_length_is_not_changed_by_defaults(
    settings: dict[str, int], left: set[str]
) -> None:
    train = config(train=settings).merge_train("meat")
    assert LENGTH & key_inputs(train).keys() == left
    for name, value in settings.items():
        assert getattr(train, name) == value
    if "epochs" in settings and "min_steps" not in settings and train.max_epochs is not None:
        assert train.max_epochs == settings["epochs"], "smaller batches must not add epochs"


def test_complete_config_keeps_its_key() -> None:
    settings = {"epochs": 12, "batch_size": 32, "lr": 1e-3}
    train = config(train=settings).merge_train("meat")
    assert key_inputs(train) == key_inputs(TrainSettings(**settings))


def test_method_defaults_are_not_recorded_as_config() -> None:
    run_config = config(train={"clip": 1.0})
    assert dump(run_config)["train"] == {"clip": 1.0}
    again = check(dump(run_config), "dumped")
    assert again.merge_train("meat") == run_config.merge_train("meat")


def test_changed_default_changes_only_keys_of_configs_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keys(run_config: Config) -> dict[str, str]:
        graph, _ = build.build_graph(run_config, Store(str(tmp_path)))
        return {stage.id: stage.key for stage in graph if stage.step == "train"}

    silent, loud = config("none"), config("none", train={"lr": 0.5})
    before = keys(silent) | {"loud": str(keys(loud))}
    other = TrainDefaults(lr=0.125, source="a number for this test")
    monkeypatch.setattr(METHODS["meat"], "train_defaults", other)
    after = keys(silent) | {"loud": str(keys(loud))}
    assert {name for name in before if before[name] == after[name]} == {"loud"}
