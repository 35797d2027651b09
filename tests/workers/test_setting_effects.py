"""Tests that every setting has an effect, is refused if it has none, or is listed with a reason.

Each test changes one setting of a run of two toy tasks, and compares the stored results.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from pydantic import BaseModel

from pipeline.testing.lab import SETTINGS, Lab, Run, other_value
from workers.errors import UserError
from workers.job import ActiveIf, DataSettings, StageJob, TrainSettings
from workers.methods import METHODS
from workers.storage.artifact import Artifact
from workers.storage.taskstate import load_tensors

TRAIN = {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.05, "epochs": 1, "batch_size": 32}
# Methods in `make test`. `make test-all` tests all methods.
QUICK = ("adapter", "ewc", "hat", "meat")


@dataclass(frozen=True)
class Change:
    """Another value of a setting, and other settings that it needs to have an effect.

    Attributes:
        value: The value. None: any other value that the type allows.
        beside: Other settings of the same section.
        train: Settings of the section `train`.
        scenario: The scenario. "": the method's first scenario.
    """

    value: Any = None
    beside: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)
    scenario: str = ""


# (method, or `*` for all methods with the setting; setting) -> a change that has an effect
CHANGES: dict[tuple[str, str], Change] = {
    ("*", "expected_tasks"): Change(20, {"start": "sparse"}),
    ("*", "memory"): Change(10, {"per_class": 0}),
    ("*", "selection"): Change(
        beside={"memory": 20, "per_class": 0}
    ),  # the choice matters if few are kept
    ("*", "adapter_width"): Change(beside={"first_session": "adapter"}),
    ("*", "adapter_dropout"): Change(0.5, {"first_session": "adapter"}),
    ("*", "head_scale"): Change(beside={"first_session": "adapter"}),
    ("adapter", "dropout"): Change(0.5, {"kind": "adaptformer"}),
    ("aper", "prompts"): Change(beside={"first_session": "vpt-deep"}),
    ("apd", "consolidate_every"): Change(2, {"clusters": 1, "gap": 100}),
    ("apd", "clusters"): Change(1, {"consolidate_every": 2, "gap": 100}),
    ("apd", "gap"): Change(100, {"consolidate_every": 2, "clusters": 1}),
    ("agem", "memory"): Change(10),
    ("coda", "blocks"): Change(1),
    ("coda", "components"): Change(5),
    ("dualprompt", "blocks"): Change(1, {"general_blocks": 0}),
    ("dualprompt", "general_blocks"): Change(0),
    ("dark_replay", "memory"): Change(10),
    ("ease", "head_scale"): Change(16.0),
    ("er", "memory"): Change(10),
    ("er_ace", "memory"): Change(10),
    ("ewc", "samples"): Change(20),
    ("ewc", "gamma"): Change(0.5, {"online": True}),
    ("foster", "beta"): Change(0.5, {"memory": 20}),  # so that classes differ in size
    ("foster", "compress_beta"): Change(0.5, {"memory": 20}),
    ("gdumb", "memory"): Change(10),
    ("gem", "gamma"): Change(5.0),
    ("gem", "eps"): Change(1.0, {"gamma": 0.0}),
    ("gem", "memory"): Change(10),
    ("gem", "replay_batch"): Change(10),
    ("icarl", "tau"): Change(4.0, {"loss": "ce_kd"}),
    ("inflora", "final_threshold"): Change(0.5, {"threshold": 0.9999, "expected_tasks": 2}),
    ("inflora", "rank"): Change(4),
    ("inflora", "threshold"): Change(0.9999),
    ("ksm", "theta"): Change(0.002),
    ("mas", "samples"): Change(20),
    ("mir", "candidates"): Change(10, {"replay_batch": 5}),
    ("mir", "memory"): Change(10, {"replay_batch": 5}),
    ("mir", "replay_batch"): Change(5),
    ("mir", "virtual_lr"): Change(10.0, {"replay_batch": 5}),
    ("l2p", "pool"): Change(20),
    ("l2p", "top"): Change(2),
    ("meat", "alpha"): Change(4.0, {"lambda": 1.0}, {"epochs": 8}),
    ("meat", "lambda"): Change(1.0),
    ("meat", "token_mask_blocks"): Change([0]),
    ("packnet", "base_prune"): Change(0.2, {"base_mode": "prune_only"}),
    ("piggyback", "start"): Change(0.02, {"mask_lr": 0.01}),
    ("piggyback", "theta"): Change(0.002, {"mask_lr": 0.01}),
    ("piggyback", "scale_gradients"): Change(
        "layer", {"mask_lr": 0.3}, {"optimizer": "sgd", "lr": 0.1}
    ),
    ("podnet", "hinge"): Change(False, {"delta": 0.01}),
    ("podnet", "clamp"): Change(0.01),
    ("ranpac", "prompts"): Change(beside={"first_session": "vpt-deep"}),
    ("rpsnet", "modules"): Change(4),
    ("rpsnet", "path_lr"): Change(0.1, {"every": 1}),
    ("s_prompts", "centres"): Change(1, scenario="class"),
    ("s_prompts", "distance"): Change("l2", scenario="class"),
    ("supsup", "budget"): Change(0.5),
    ("supsup", "weights"): Change("signed_constant", {"start": "kaiming"}),
    ("supsup", "infer"): Change("one_shot", {"objective": "entropy"}, scenario="class"),
    ("supsup", "objective"): Change("entropy", scenario="class"),
    ("supsup", "infer_images"): Change(5, scenario="class"),
    ("supsup_nn", "weights"): Change("signed_constant", {"start": "kaiming"}),
    ("supsup_nn", "every"): Change(1),
    ("supsup_nn", "eps"): Change(3.0),
    ("supsup_nn", "most"): Change(2, {"every": 1, "least": 2, "eps": 3.0}),
    ("*", "feedback_from"): Change(1),
    ("*", "feedback_to"): Change(1),
    ("ucir", "margin"): Change(0.0),
    ("ucir", "top_k"): Change(1),
}
# (method, setting) -> why two toy tasks do not show its effect
NOT_SEEN = {
    ("bic", "bias_mode"): "from the third task on: the first has no correction",
    ("inflora", "expected_tasks"): "the second task's step is too small to add a direction",
    ("memo", "blocks"): "the backbone has two blocks, and tasks share one",
    ("*", "td_value_bias"): "the biases of an untrained backbone are 0",
    ("*", "pretune"): "acts in streams with a base task or images without labels",
    ("*", "variational"): "acts in streams with a base task or images without labels",
    ("rpsnet", "phi"): "from the third task on: until then the factor is 1",
    ("supsup_nn", "scores"): "one value is allowed",
    ("supsup_nn", "budget"): "refused: for scores topk only",
    ("supsup_nn", "look"): "each image of a toy batch chooses the same mask",
    ("supsup_nn", "infer"): "one value is allowed",
    ("supsup_nn", "infer_images"): "refused: for scenario class only",
}


def named_fields(settings: type[BaseModel]) -> dict[str, Any]:
    """Return name in a config -> field."""
    return {info.alias or name: info for name, info in settings.model_fields.items()}


def method_run(lab: Lab, method: str, change: Change, settings: Mapping[str, Any]) -> Run:
    """Return the run of two tasks with these settings of the method."""
    usual = {k: v for k, v in SETTINGS.get((method, "adamw"), {}).items() if k != "train"}
    return lab.run_of(
        method,
        {**TRAIN, **change.train},
        settings={**usual, **change.beside, **settings},
        scenario=change.scenario,
    )


def jobs_in_order(run: Run) -> list[StageJob]:
    return [job for task in range(2) for job in (*run.stages(task), run.evaluate_job(task))]


def is_equal(first: Artifact, second: Artifact) -> bool:
    """Return whether two results have the same tensors and the same figures."""
    if first.manifest.get("result") != second.manifest.get("result"):
        return False
    for name in ("task.safetensors", "carried.safetensors"):
        if (name in first.manifest["files"]) != (name in second.manifest["files"]):
            return False
        if name in first.manifest["files"]:
            tensors, others = (load_tensors(a.read(name), name)[0] for a in (first, second))
            if tensors.keys() != others.keys():
                return False
            if any(not torch.equal(tensors[key], others[key]) for key in tensors):
                return False
    return True


def changed_stage(run: Run, other: Run) -> str | None:
    """Return the first stage with different results; None if all results are equal."""
    for job, changed in zip(jobs_in_order(run), jobs_in_order(other), strict=True):
        if job.key != changed.key and not is_equal(run.artifact(job), other.artifact(changed)):
            return job.id
    return None


def changed_value(settings: type[BaseModel], name: str, change: Change) -> Any:
    if change.value is not None:
        return change.value
    field = {info.alias or key: key for key, info in settings.model_fields.items()}[name]
    usual = getattr(settings.model_validate(dict(change.beside)), field)
    return other_value(settings, name, usual)


def settings_without_effect(lab: Lab, method: str) -> dict[str, Any]:
    """Return setting -> tried value, for the settings of a method that change no result."""
    settings = METHODS[method].Settings
    without_effect = {}
    for name in named_fields(settings):
        change = CHANGES.get((method, name), CHANGES.get(("*", name), Change()))
        if not {(method, name), ("*", name)} & NOT_SEEN.keys():
            value = changed_value(settings, name, change)
            run = method_run(lab, method, change, {})
            if changed_stage(run, method_run(lab, method, change, {name: value})) is None:
                without_effect[name] = value
    return without_effect


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "method", [m if m in QUICK else pytest.param(m, marks=pytest.mark.slow) for m in METHODS]
)
def test_each_setting_of_a_method_changes_a_result(lab: Lab, method: str) -> None:
    assert settings_without_effect(lab, method) == {}


LATER = {name: cls for name, cls in METHODS.items() if vars(cls).get("later_settings")}


@pytest.mark.parametrize(
    "method", [m if m in QUICK else pytest.param(m, marks=pytest.mark.slow) for m in LATER]
)
def test_later_settings_do_not_change_the_first_task(
    lab: Lab, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls = LATER[method]
    values: dict[str, Any] = {}
    beside: dict[str, Any] = {}
    for name in sorted(cls.later_settings):
        change = CHANGES.get((method, name), Change())
        values[name] = changed_value(cls.Settings, name, change)
        beside |= change.beside
    usual, changed = (method_run(lab, method, Change(beside=beside), v) for v in ({}, values))
    (first, *_), (first_changed, *_) = usual.stages(0), changed.stages(0)
    assert first.step == "train"
    assert first.key == first_changed.key
    assert usual.stages(1)[0].key != changed.stages(1)[0].key
    # Trained with the changed values, the first task has the same results.
    monkeypatch.delattr(cls, "later_settings")
    monkeypatch.setattr(lab, "runs", {})  # the cached runs have older keys
    usual, changed = (method_run(lab, method, Change(beside=beside), v) for v in ({}, values))
    (first, *_), (first_changed, *_) = usual.stages(0), changed.stages(0)
    assert first.key != first_changed.key
    assert is_equal(usual.artifact(first), changed.artifact(first_changed))


ALWAYS_ACTIVE = {("supsup_nn", "outputs")}  # `outputs` is at least 1 there
MARKED = [
    (method, name, mark)
    for method, cls in METHODS.items()
    for name, info in named_fields(cls.Settings).items()
    for mark in info.metadata
    if isinstance(mark, ActiveIf) and (method, mark.name) not in ALWAYS_ACTIVE
]


@pytest.mark.parametrize(("method", "name", "mark"), MARKED)
def test_a_setting_without_effect_is_refused(
    lab: Lab, method: str, name: str, mark: ActiveIf
) -> None:
    cls = METHODS[method]
    usual = cls.Settings().model_dump(by_alias=True)
    if mark.name == "scenario":
        idle: dict[str, Any] = {}
        decider = "stream.scenario task"
    else:
        values = [usual[mark.name], *mark.but]
        values += [other_value(cls.Settings, mark.name, v) for v in mark.values]
        idle = {mark.name: next(v for v in values if not mark.holds(v))}
        decider = f"{mark.name} "
    with pytest.raises(
        UserError, match=rf"methods\.{method}\.{name} .* has no effect with {decider}"
    ):
        lab.run_of(method, dict(TRAIN), settings={**idle, name: usual[name]})


@pytest.mark.parametrize(
    ("method", "settings", "text"),
    [
        ("supsup", {"train": {"lr": 0.1}}, "train.lr .* no head is trained"),
        ("toast", {"pretune": True}, "pretune .* without a task of role base or unlabelled"),
        ("toast", {"variational": 0.1}, "variational .* without a task of role base"),
        ("piggyback", {"theta": 0.002}, "theta .* mask_lr auto and init ones"),
        ("supsup", {"density": 0.5, "budget": 5.0}, "density .* budget 5.0"),
        (
            "supsup",
            {"density": 0.5, "scores": "threshold", "start": "kaiming"},
            "density .* scores threshold and start kaiming",
        ),
    ],
)
def test_setting_made_ineffective_by_other_settings_is_refused(
    lab: Lab, method: str, settings: dict[str, Any], text: str
) -> None:
    with pytest.raises(UserError, match=text):
        lab.run_of(method, dict(TRAIN), settings=settings)


# ---- the sections `train` and `data` -------------------------------------------------------------
SECTIONS: dict[str, type[BaseModel]] = {"data": DataSettings, "train": TrainSettings}
RESIZED = {"crop": "resized"}
IN_SECTIONS: dict[tuple[str, str], Change] = {
    ("data", "val_fraction"): Change(0.3),
    ("data", "crop"): Change("pad"),
    ("data", "crop_scale"): Change([0.1, 0.2], RESIZED),
    ("data", "longest_side"): Change(5, RESIZED),
    ("data", "randaugment"): Change(2),
    ("data", "magnitude"): Change(2.0, {"randaugment": 2}),
    ("train", "min_steps"): Change(60),
    ("train", "min_batch_size"): Change(4, {"min_steps": 60}),
    ("train", "max_epochs"): Change(3, {"min_steps": 100}),
    ("train", "momentum"): Change(0.5, {"optimizer": "sgd", "lr": 0.1}),
    ("train", "warmup"): Change(0.3),
    ("train", "warmup_start"): Change(0.5, {"warmup": 0.5}),
    ("train", "clip"): Change(0.001),
    ("train", "precision"): Change("bf16"),  # a CPU has no TF32
    ("train", "keep"): Change("best", {"epochs": 4, "lr": 0.1}),
}
KEEPS_RESULTS = {
    ("data", "resident_mb"): "in no key: decoded images come from memory or are decoded again",
    ("train", "recompute"): "in no key: the activations of a block are computed again",
    ("train", "compile"): "compiled blocks compute the same, up to rounding",
}


@pytest.mark.few(7)
@pytest.mark.parametrize(
    ("section", "name"),
    [
        (s, n)
        for s, cls in SECTIONS.items()
        for n in cls.model_fields
        if (s, n) not in KEEPS_RESULTS
    ],
)
def test_each_setting_of_training_and_data_changes_a_result(
    lab: Lab, section: str, name: str
) -> None:
    change = IN_SECTIONS.get((section, name), Change())
    value = changed_value(SECTIONS[section], name, change)
    runs = []
    for settings in (change.beside, {**change.beside, name: value}):
        sections: dict[str, dict[str, Any]] = {"train": {**TRAIN, "epochs": 2}, "data": {}}
        sections[section] |= settings
        runs.append(lab.run_of("finetune", sections["train"], data=sections["data"]))
    assert changed_stage(*runs) is not None


@pytest.mark.parametrize(
    ("section", "name", "value", "decider"),
    [
        ("data", "crop_scale", [0.1, 1.0], "crop none"),
        ("data", "longest_side", 100, "crop none"),
        ("data", "magnitude", 5.0, "randaugment 0"),
        ("train", "min_batch_size", 4, "min_steps 0"),
        ("train", "max_epochs", 4, "min_steps 0"),
        ("train", "momentum", 0.5, "optimizer adamw"),
        ("train", "warmup_start", 0.1, "warmup 0.0"),
    ],
)
def test_a_setting_of_training_or_data_without_effect_is_refused(
    lab: Lab, section: str, name: str, value: Any, decider: str
) -> None:
    train = {**TRAIN, "warmup": 0}
    sections = {"train": train, "data": {}} | {section: {name: value}}
    sections["train"] = {**train, **sections["train"]}
    text = rf"lab: {section}\.{name} .* has no effect with {decider}; leave it out, or set"
    with pytest.raises(UserError, match=text):
        lab.run_of("finetune", sections["train"], data=sections["data"])


def test_setting_used_by_at_least_one_method_is_accepted(lab: Lab) -> None:
    methods = {"linear": {}, "finetune": {"train": {"optimizer": "sgd"}}}
    run = lab.run_of("finetune", {**TRAIN, "momentum": 0.5}, methods=methods)
    assert run.jobs
