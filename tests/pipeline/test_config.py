"""Tests of configs: reading, refusals, and which settings change the keys of stages."""

from __future__ import annotations

import copy
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from pipeline import cli
from pipeline.config import yaml_files
from pipeline.config.settings import (
    NAME,
    ClusterSettings,
    Config,
    TrackingSettings,
    check,
    dump,
    load,
)
from pipeline.config.yaml_files import absolute, apply_override, expand, parse_override, parse_yaml
from pipeline.data import card_files, ingest
from pipeline.graph import build
from pipeline.graph.store import Store
from workers import evaluate, loop
from workers.data import decoding
from workers.errors import UserError
from workers.job import BackboneSettings, DataSettings, TrainSettings
from workers.methods import METHODS

BODY: dict[str, Any] = {
    "name": "r",
    "tracking": False,
    "methods": {"finetune": {}, "joint": {}, "meat": {"mask_lr": 0.05}},
    "stream": {
        "tasks": [
            {"name": "base", "card": "digits", "classes": ["0", "1"], "role": "base"},
            {"name": "a", "card": "digits", "classes": ["2", "3"]},
            {"name": "b", "card": "digits", "classes": ["4", "5"]},
        ]
    },
    "backbone": {
        "img_size": 16,
        "options": {"patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2},
    },
    "train": {"epochs": 2},
}


def config(*overrides: str, **changes: Any) -> Config:
    body = {**copy.deepcopy(BODY), **changes}
    for override in overrides:
        apply_override(body, override)
    return check(body, "test")


def without_base() -> Config:
    return config(stream={"tasks": copy.deepcopy(BODY["stream"]["tasks"][1:])})


# ---- reading -------------------------------------------------------------------------------------
def test_overrides_reach_every_depth_and_are_read_as_yaml(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(BODY))
    run_config = load(
        str(path),
        [
            "train.lr=1e-3",
            "stream.tasks.1.name=first",
            "methods.meat.lambda=0.75",
            "methods.meat.train.epochs=7",
            "backbone.options.depth=3",
            "data.crop=resized",
            "data.crop_scale=[0.2, 0.9]",
            "tracking=off",
            "cluster.workers=2",
            "name=other",
        ],
    )
    assert (
        run_config.train.lr,
        run_config.stream.tasks[1].name,
        run_config.methods["meat"].settings,
    ) == (
        1e-3,
        "first",
        {"mask_lr": 0.05, "lambda": 0.75},
    )
    assert (run_config.merge_train("meat").epochs, run_config.merge_train("finetune").epochs) == (
        7,
        2,
    )
    assert run_config.backbone.options["depth"] == 3
    assert run_config.backbone.options["embed_dim"] == 32
    assert run_config.data.crop_scale == (0.2, 0.9)
    assert (run_config.tracking.enabled, run_config.cluster.workers, run_config.name) == (
        False,
        2,
        "other",
    )


def test_later_overrides_win() -> None:
    assert config("train.epochs=3", "train.epochs=4").train.epochs == 4


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "+1e-3", "1.e-3", "0.001"])
def test_numbers_in_scientific_notation_are_numbers(text: str) -> None:
    assert parse_yaml(f"lr: {text}", "here") == {"lr": 0.001}


@pytest.mark.parametrize("text", ['"1e-3"', "e-3", "1e", "1e-3x", "v1e3"])
def test_words_that_look_like_numbers_stay_words(text: str) -> None:
    assert isinstance(parse_yaml(f"lr: {text}", "here")["lr"], str)


def test_duplicate_key_is_refused_at_any_depth() -> None:
    with pytest.raises(UserError, match=r"here, line 5, column 3: .*key 'epochs' occurs twice"):
        parse_yaml("name: r\ntrain:\n  epochs: 1\n  lr: 1\n  epochs: 2\n", "here")


def test_checked_settings_are_immutable() -> None:
    run_config = config()
    for target, key in (
        (run_config, "seed"),
        (run_config.train, "epochs"),
        (run_config.cluster, "workers"),
    ):
        with pytest.raises(ValidationError):
            setattr(target, key, 1)


def test_label_is_the_method_name_unless_the_entry_names_one() -> None:
    run_config = config(
        methods={
            "meat": {"lambda": 0.8},
            "meat-soft": {"method": "meat", "lambda": 0.9, "train": {"lr": 0.1}},
            "linear": None,
        }
    )
    assert {label: entry.method for label, entry in run_config.methods.items()} == {
        "meat": "meat",
        "meat-soft": "meat",
        "linear": "linear",
    }
    assert run_config.methods["meat-soft"].settings == {"lambda": 0.9}
    assert run_config.merge_train("meat-soft").lr == 0.1


def test_step_settings_override_method_and_general_settings() -> None:
    run_config = config(
        methods={"meat": {"train": {"epochs": 5, "lr": 0.5}, "steps": {"train": {"epochs": 9}}}},
        train={"epochs": 1, "clip": 0.5},
    )
    train = run_config.merge_train("meat", "train")
    assert (train.epochs, train.lr, train.clip) == (9, 0.5, 0.5)


def test_task_settings_override_method_and_step_overrides_both() -> None:
    body = {
        "lambda": 0.9,
        "alpha": 3,
        "train": {"epochs": 5, "lr": 0.5},
        "steps": {"train": {"clip": 1.0}},
        "tasks": {
            "a": {
                "lambda": 0.7,
                "train": {"lr": 0.1, "clip": 2.0},
                "steps": {"train": {"warmup": 0.5}},
            },
            "b": None,
        },
    }
    run_config = config(methods={"meat": body})
    task_train, common = run_config.merge_train("meat", task="a"), run_config.merge_train("meat")
    assert (task_train.epochs, task_train.lr, task_train.clip, task_train.warmup) == (
        5,
        0.1,
        1.0,
        0.5,
    )
    assert (common.epochs, common.lr, common.clip, common.warmup) == (
        5,
        0.5,
        1.0,
        TrainSettings().warmup,
    )
    assert run_config.merge_entry("meat", "a").settings == {"lambda": 0.7, "alpha": 3}
    for other in (None, "b", "elsewhere"):
        assert run_config.merge_entry("meat", other).settings == {"lambda": 0.9, "alpha": 3}
        assert run_config.merge_train("meat", task=other) == common


def test_overrides_and_extended_configs_set_task_settings(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        low=STREAM,
        middle="methods: {meat: {tasks: {digits: {lambda: 0.5, train: {lr: 0.25}}}}}\n",
        top="extends: [low.yaml, middle.yaml]\nname: top\nmethods: {meat: {tasks: {digits: "
        "{alpha: 3}}}}\n",
    )
    run_config = load(
        path,
        [
            "methods.meat.tasks.digits.train.lr=1e-2",
            "methods.meat.tasks.digits.tau=2",
            "methods.linear.tasks.digits.train.epochs=7",
        ],
    )
    assert run_config.merge_entry("meat", "digits").settings == {
        "lambda": 0.5,
        "alpha": 3,
        "tau": 2,
    }
    assert run_config.merge_train("meat", task="digits").lr == 0.01
    assert (
        run_config.merge_train("linear", task="digits").epochs,
        run_config.merge_train("linear").epochs,
    ) == (
        7,
        3,
    )


@pytest.mark.parametrize("method", METHODS)
def test_task_settings_must_be_known_and_not_change_plan(
    method: Any,
) -> None:
    cls = METHODS[method]
    assert cls.per_task <= {info.alias or name for name, info in cls.Settings.model_fields.items()}
    assert not cls.per_task & {"memory", "per_class", "pretune", "base_mode"}, (
        "these settings apply to the whole stream"
    )


@pytest.mark.parametrize(
    ("text", "enabled"), [("off", False), ("false", False), ("on", True), ("{experiment: x}", True)]
)
def test_tracking_accepts_on_and_off(text: str, enabled: bool) -> None:
    assert config(f"tracking={text}").tracking.enabled is enabled


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tracking": {"uri": "sqlite:///x.db"}},
        {
            "methods": {
                "m": {
                    "method": "meat",
                    "lambda": 0.7,
                    "data": {"flip": 0.5},
                    "steps": {"train": {"lr": 0.1}},
                }
            }
        },
        {
            "methods": {
                "meat": {
                    "lambda": 0.7,
                    "tasks": {
                        "a": {
                            "lambda": 0.6,
                            "train": {"lr": 0.1},
                            "steps": {"train": {"epochs": 1}},
                        },
                        "b": {"tau": 2},
                    },
                }
            }
        },
        {"stream": {"tasks": [{"card": "digits", "split": 5}]}},
        {"train": {"lr": 1e-5, "precision": "bf16"}},
    ],
)
def test_dumped_config_reads_back_equal(changes: Any) -> None:
    run_config = config(**changes)
    again = check(parse_yaml(yaml.safe_dump(dump(run_config)), "dumped"), "dumped")
    assert again == run_config
    assert dump(again) == dump(run_config)


def test_dump_omits_task_settings_that_are_not_set() -> None:
    assert all("tasks" not in entry for entry in dump(config())["methods"].values())
    assert (
        dump(config(methods={"meat": {"tasks": {"a": {"lambda": 0.6}}}}))["methods"]["meat"][
            "tasks"
        ]["a"]["lambda"]
        == 0.6
    )


def test_numeric_class_names_become_strings() -> None:
    assert config("stream.tasks.1.classes=[2, 3]").stream.tasks[1].classes == ("2", "3")


def test_variables_are_replaced_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCRETE_TEST", "/there")
    monkeypatch.delenv("ACCRETE_OTHER", raising=False)
    assert expand("${ACCRETE_TEST}/x") == "/there/x"
    assert expand("${ACCRETE_OTHER:-../data}/x") == "../data/x"
    with pytest.raises(UserError, match="ACCRETE_OTHER, which is not set"):
        expand("${ACCRETE_OTHER}/x")
    monkeypatch.setenv("ACCRETE_OTHER", "")
    assert expand("${ACCRETE_OTHER:-../data}/x") == "../data/x"


def test_relative_paths_become_absolute_and_uris_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute("storage") == str(tmp_path / "storage")
    assert absolute("s3://bucket/x") == "s3://bucket/x"


# ---- keys ----------------------------------------------------------------------------------------
def keys_of(run_config: Config, folder: Any) -> dict[str, str]:
    graph, _ = build.build_graph(run_config, Store(str(folder)))
    return {stage.id: stage.key for stage in graph}


def changed(before: dict[str, str], after: dict[str, str]) -> set[str]:
    assert before.keys() == after.keys()
    return {i for i in before if before[i] != after[i]}


def matching(keys: dict[str, str], *patterns: str) -> set[str]:
    return {i for i in keys if any(fnmatch(i, p) for p in patterns)}


FREE = {
    "cluster": {
        "workers": 3,
        "min_workers": 2,
        "groups": 2,
        "cpus_per_worker": 4,
        "gpus_per_worker": 1.0,
        "memory_gb_per_worker": 2.0,
        "resources": {"disk": 1},
        "placement": "SPREAD",
        "address": "host:1",
        "stages": {"train": {"cpus": 2, "timeout_s": 60.0}},
        "retries": 7,
        "checkpoint_s": 5.0,
        "loader_workers": 9,
        "cache": "/elsewhere",
        "cache_gb": 0.5,
    },
    "tracking": {
        "enabled": True,
        "uri": "sqlite:///x.db",
        "experiment": "y",
        "patience_s": 5.0,
        "models": False,
        "system_metrics": True,
        "prometheus": "127.0.0.1:9464",
    },
}


@pytest.mark.parametrize(
    ("section", "model"), [("cluster", ClusterSettings), ("tracking", TrackingSettings)]
)
def test_cluster_tracking_and_storage_settings_do_not_change_keys(
    section: str, model: Any, tmp_path: Path
) -> None:
    assert FREE[section].keys() == model.model_fields.keys(), (
        "add the new setting to FREE if it changes at most the rounding of results"
    )
    before = keys_of(config(), tmp_path)
    changes: dict[str, Any] = {}
    for name, value in FREE[section].items():
        changes[name] = value
        assert not changed(before, keys_of(config(**{section: changes}), tmp_path)), name
    assert not changed(before, keys_of(config(storage="elsewhere"), tmp_path / "elsewhere"))


OTHER = {
    "train": {
        "epochs": 3,
        "batch_size": 8,
        "accumulate": 2,
        "optimizer": "sgd",
        "lr": 0.5,
        "weight_decay": 0.5,
        "momentum": 0.5,
        "warmup": 0.5,
        "schedule": "epoch",
        "warmup_start": 0.5,
        "floor": 0.5,
        "clip": 0.5,
        "precision": "bf16",
        "compile": True,
        "keep": "best",
        "min_steps": 500,
        "min_batch_size": 4,
        "max_epochs": 7,
    },
    "data": {
        "val_fraction": 0.5,
        "crop": "pad",
        "crop_scale": [0.1, 0.2],
        "flip": 0.5,
        "randaugment": 1,
        "magnitude": 1.0,
        "mixup": 0.5,
        "cutmix": 0.5,
        "erase": 0.5,
        "smoothing": 0.5,
        "repeats": 3,
        "longest_side": 64,
    },
    "backbone": {
        "name": "vit_small_patch16_224",
        "img_size": 32,
        "weights": "hub",
        "mean": [0.1, 0.2, 0.3],
        "std": [0.1, 0.2, 0.3],
        "crop_pct": 0.5,
        "interpolation": "bilinear",
        "drop_path": 0.5,
        "options": {"depth": 3},
        "context": {"kind": "cb"},
    },
}
# setting -> another setting that it needs to have an effect
BESIDE = {
    "crop_scale": {"crop": "resized"},
    "longest_side": {"crop": "resized"},
    "magnitude": {"randaugment": 2},
    "min_batch_size": {"min_steps": 60},
    "max_epochs": {"min_steps": 60},
    "momentum": {"optimizer": "sgd"},
}
LEARNED = ("*/[ab]/train", "*/[ab]/evaluate", "report")


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("section", "model", "without", "patterns"),
    [
        ("train", TrainSettings, True, LEARNED),
        ("train", TrainSettings, False, (*LEARNED, "backbone", "*/base/evaluate")),
        ("data", DataSettings, True, LEARNED),
        ("data", DataSettings, False, (*LEARNED, "backbone", "*/base/evaluate")),
        ("backbone", BackboneSettings, True, (*LEARNED, "backbone")),
        ("backbone", BackboneSettings, False, (*LEARNED, "backbone", "*/base/evaluate")),
    ],
)
def test_settings_change_the_keys_of_exactly_the_affected_stages(
    section: str, model: Any, without: bool, patterns: Any, tmp_path: Path
) -> None:
    """Without a base task, the backbone is not trained, and training settings do not affect it.

    without: whether the stream has no base task.
    """
    assert OTHER[section].keys() == model.model_fields.keys() - {*build.NOT_IN_KEYS}, (
        "add another value of the new setting to OTHER"
    )
    start = without_base() if without else config()
    for name, value in OTHER[section].items():
        body = dump(start)
        body[section] |= BESIDE.get(name, {})
        before = keys_of(check(body, "test"), tmp_path)
        body[section][name] = value
        assert changed(before, keys_of(check(body, "test"), tmp_path)) == matching(
            before, *patterns
        ), name


def test_memory_saving_settings_do_not_change_keys(tmp_path: Path) -> None:
    assert build.NOT_IN_KEYS == ("resident_mb", "recompute")
    for start in (config, without_base):
        body = dump(start())
        body["data"]["resident_mb"] = 1
        body["train"]["recompute"] = True
        assert not changed(keys_of(start(), tmp_path), keys_of(check(body, "test"), tmp_path))


@pytest.mark.parametrize(
    ("override", "patterns"),
    [
        ("seed=9", ("backbone", "*/*/*", "report")),
        ("name=other", ("report",)),
        ("methods.meat.lambda=0.8", ("meat/*", "report")),
        ("methods.meat.train.epochs=3", ("meat/[ab]/*", "report")),
        ("methods.finetune.train.epochs=3", ("finetune/[ab]/*", "report")),
        ("methods.finetune.steps.train.lr=3", ("finetune/[ab]/*", "report")),
        ("methods.joint.data.flip=0.5", ("joint/[ab]/*", "report")),
        ("methods.meat.tasks.a.lambda=0.8", ("meat/a/*", "meat/b/evaluate", "report")),
        ("methods.meat.tasks.b.train.lr=0.5", ("meat/b/*", "report")),
        ("methods.meat.tasks.b.steps.train.epochs=9", ("meat/b/*", "report")),
        ("methods.finetune.tasks.a.train.lr=0.5", ("finetune/[ab]/*", "report")),
        ("methods.finetune.tasks.b.train.lr=0.5", ("finetune/b/*", "report")),
        ("methods.joint.tasks.a.train.lr=0.5", ("joint/a/*", "joint/b/evaluate", "report")),
        ("stream.tasks.0.classes=['1', '0']", ("backbone", "*/*/*", "report")),
        ("stream.tasks.0.name=root", None),
        (
            "stream.tasks.1.classes=['3', '2']",
            ("*/a/*", "finetune/b/*", "joint/b/*", "meat/b/evaluate", "report"),
        ),
        ("stream.tasks.2.classes=['5', '4']", ("*/b/*", "report")),
        ("stream.tasks.2.classes=['4', '5', '6']", ("*/b/*", "report")),
    ],
)
def test_override_changes_the_keys_of_exactly_the_affected_stages(
    override: str, patterns: Any, tmp_path: Path
) -> None:
    before = keys_of(config(), tmp_path)
    after = keys_of(config(override), tmp_path)
    if patterns is None:  # the ids of evaluations contain the base task's name
        assert {after[i] for i in after} & set(before.values()) == {before["data/digits"]}
    else:
        assert changed(before, after) == matching(before, *patterns)


def test_override_with_the_current_value_changes_no_key(tmp_path: Path) -> None:
    default = METHODS["meat"].Settings().model_dump(by_alias=True)["lambda"]
    assert not changed(
        keys_of(config(), tmp_path),
        keys_of(config(f"methods.meat.lambda={default}", "methods.meat.train.epochs=2"), tmp_path),
    )
    with_override = config(
        f"methods.meat.tasks.a.lambda={default}",
        "methods.meat.tasks.a.train.epochs=2",
        "methods.meat.tasks.b={}",
    )
    assert not changed(keys_of(config(), tmp_path), keys_of(with_override, tmp_path))


def test_equal_task_and_method_settings_give_equal_training_keys(tmp_path: Path) -> None:
    per_task, common = (
        keys_of(config(override), tmp_path)
        for override in ("methods.meat.tasks.a.lambda=0.8", "methods.meat.lambda=0.8")
    )
    assert per_task["meat/a/train"] == common["meat/a/train"]
    assert per_task["meat/b/train"] == keys_of(config(), tmp_path)["meat/b/train"]
    assert per_task["meat/a/evaluate"] != common["meat/a/evaluate"], (
        "a task is evaluated under the common settings"
    )


def test_method_revision_changes_only_the_keys_of_that_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = keys_of(config(), tmp_path)
    monkeypatch.setattr(METHODS["meat"], "revision", 99)
    assert changed(before, keys_of(config(), tmp_path)) == matching(before, "meat/*", "report")


@pytest.mark.parametrize(
    ("module", "name", "with_base", "without"),
    [
        (loop, "TRAIN_REVISION", ("backbone", "*/*/*"), ("*/*/*",)),
        (decoding, "DECODING", ("backbone", "*/*/*"), ("*/*/*",)),
        (METHODS["finetune"], "revision", ("backbone", "*/*/*"), ("finetune/*/*",)),
        (evaluate, "EVALUATE_REVISION", ("*/*/evaluate",), ("*/*/evaluate",)),
    ],
)
def test_shared_revision_changes_all_dependent_keys(
    module: Any,
    name: str,
    with_base: Any,
    without: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The base task is always trained by fine-tuning, whichever methods follow."""
    before = [keys_of(config(), tmp_path), keys_of(without_base(), tmp_path)]
    monkeypatch.setattr(module, name, 99)
    after = [keys_of(config(), tmp_path), keys_of(without_base(), tmp_path)]
    assert changed(before[0], after[0]) == matching(before[0], *with_base, "report")
    assert changed(before[1], after[1]) == matching(before[1], *without, "report")


@pytest.mark.parametrize("change", ["shards", "revision"])
def test_shard_size_changes_the_keys_of_dependent_stages(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The positions of samples in the shards decide their order in training.

    The content digest does not show it: it is the same for equal images in other shards.
    """
    starts = (config(), without_base())
    before = [keys_of(start, tmp_path) for start in starts]
    if change == "revision":
        monkeypatch.setattr(ingest, "REVISION", 99)
    else:
        load = card_files.load_card_file
        other = {"shard_images": 7}
        monkeypatch.setattr(
            card_files, "load_card_file", lambda *args: load(*args).model_copy(update=other)
        )
    after = [keys_of(start, tmp_path) for start in starts]
    assert changed(before[0], after[0]) == set(before[0])
    assert changed(before[1], after[1]) == set(before[1]) - {"backbone"}, (
        "the backbone is not trained"
    )


def test_labels_with_equal_settings_share_keys(tmp_path: Path) -> None:
    """Labels are not part of keys: two labels with equal settings have the same keys."""
    keys = keys_of(
        config(
            methods={
                "meat": {},
                "again": {"method": "meat"},
                "other": {"method": "meat", "lambda": 0.8},
            }
        ),
        tmp_path,
    )
    assert keys["meat/b/train"] == keys["again/b/train"]
    assert keys["meat/b/train"] != keys["other/b/train"]


def test_another_method_in_the_config_changes_only_the_report_key(tmp_path: Path) -> None:
    alone, both = (
        keys_of(config(methods={"meat": BODY["methods"]["meat"]}), tmp_path),
        keys_of(config(), tmp_path),
    )
    assert {i for i in alone if alone[i] != both[i]} == {"report"}


@pytest.mark.parametrize("base", [True, False])
def test_appended_task_changes_only_the_report_key(base: bool, tmp_path: Path) -> None:
    start = config() if base else without_base()
    body = dump(start)
    body["stream"]["tasks"].append({"name": "c", "card": "digits", "classes": ["6", "7"]})
    before, after = keys_of(start, tmp_path), keys_of(check(body, "test"), tmp_path)
    assert {i for i in before if before[i] != after[i]} == {"report"}
    assert after.keys() - before.keys() == {
        f"{label}/c/{step}" for label in start.methods for step in ("train", "evaluate")
    }


def test_task_order_changes_keys_of_chains_only(
    tmp_path: Path,
) -> None:
    body = dump(config())
    tasks = body["stream"]["tasks"]
    before = keys_of(config(), tmp_path)
    tasks[1], tasks[2] = tasks[2], tasks[1]
    moved = changed(before, keys_of(check(body, "test"), tmp_path))
    assert not moved & matching(before, "meat/*/train", "backbone", "data/*", "*/base/*")
    assert moved >= matching(before, "finetune/*/train", "joint/*/train")


def test_position_of_the_base_task_does_not_change_keys(tmp_path: Path) -> None:
    body = dump(config())
    body["stream"]["tasks"].append(body["stream"]["tasks"].pop(0))
    assert not changed(keys_of(config(), tmp_path), keys_of(check(body, "test"), tmp_path))


def test_split_assigns_classes_in_card_order(tmp_path: Path) -> None:
    run_config = config(stream={"tasks": [{"name": "d", "card": "digits", "split": 5}]})
    _, tasks = build.build_graph(run_config, Store(str(tmp_path)))
    assert [(t.name, t.classes) for t in tasks] == [
        (f"d-{i}", (str(2 * i), str(2 * i + 1))) for i in range(5)
    ]


def test_split_accepts_a_list_of_task_sizes(tmp_path: Path) -> None:
    entry: dict[str, Any] = {"name": "d", "card": "digits", "split": [5, 3, 2]}
    _, tasks = build.build_graph(config(stream={"tasks": [entry]}), Store(str(tmp_path)))
    assert [(task.name, "".join(task.classes)) for task in tasks] == [
        ("d-0", "01234"),
        ("d-1", "567"),
        ("d-2", "89"),
    ]
    entry["split"] = [5, 2, 2]
    with pytest.raises(UserError, match=r"split of 'd' is \[5, 2, 2\], .* 9 classes, .* are 10"):
        build.build_graph(config(stream={"tasks": [entry]}), Store(str(tmp_path)))


@pytest.mark.parametrize("split", [[], [10], [9, 0, 1], [5, "half"], -1, 2.5, 10**12])
def test_invalid_split_is_refused(split: Any) -> None:
    with pytest.raises(
        UserError, match=r"stream\.tasks\.0\.split is .*: give the number of tasks, or"
    ):
        config(stream={"tasks": [{"name": "d", "card": "digits", "split": split}]})


# ---- configs that extend others ------------------------------------------------------------------
def written(folder: Any, **files: Any) -> Any:
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    return str(folder / "top.yaml")


STREAM = (
    "name: low\nstream: {tasks: [{card: digits}]}\ntrain: {epochs: 3, lr: 0.5}\nmethods: "
    "{linear: {}}\n"
)


def test_extended_configs_merge_recursively_and_the_last_value_wins(
    tmp_path: Path,
) -> None:
    path = written(
        tmp_path,
        low=STREAM,
        middle="name: middle\ntrain: {lr: 0.25}\nmethods: {meat: {lambda: 0.5}}\n",
        top="extends: [low.yaml, middle.yaml]\nname: top\ntrain: {batch_size: 7}\nmethods: "
        "{meat: {alpha: 3}}\n",
    )
    run_config = load(path, ["train.epochs=9"])
    assert (
        run_config.base_name,
        run_config.train.epochs,
        run_config.train.lr,
        run_config.train.batch_size,
    ) == (
        "top",
        9,
        0.25,
        7,
    )
    assert {label: entry.settings for label, entry in run_config.methods.items()} == {
        "linear": {},
        "meat": {"lambda": 0.5, "alpha": 3},
    }


@pytest.mark.parametrize(
    ("extends", "message"),
    [
        ("[top.yaml]", "extends this file in turn"),
        ("low.yaml", "extends this file in turn"),
        ("gone.yaml", "does not exist beside it"),
        ("{a: 1}", "name of a config file or a list"),
    ],
)
def test_invalid_extends_value_is_refused(tmp_path: Path, extends: str, message: str) -> None:
    path = written(
        tmp_path, low=f"extends: top.yaml\n{STREAM}", top=f"extends: {extends}\nname: top\n"
    )
    with pytest.raises(UserError, match=message):
        load(path)


def test_config_can_extend_a_shipped_config(tmp_path: Path) -> None:
    base = "configs/streams/digits.yaml"
    path = written(tmp_path, top=f"extends: {base}\nname: top\nmethods: [linear]\n")
    assert [task.name for task in load(path).stream.tasks][:2] == ["digits-0123", "digits-45"]
    assert yaml_files.find_stream(Path(path)) == "digits", "recommended settings must apply"
    (tmp_path / "configs" / "streams").mkdir(parents=True)
    (tmp_path / base).write_text(STREAM)
    assert [task.card for task in load(path).stream.tasks] == ["digits"]
    gone = written(tmp_path, top="extends: configs/streams/no.yaml\nname: top\n")
    with pytest.raises(UserError, match=r"configs/streams/no.yaml', which does not exist"):
        load(gone)


# ---- names of runs under --set -------------------------------------------------------------------
@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([], "digits"),
        (["seed=0"], "digits"),
        (["cluster.workers=3", "storage=there", "tracking=false"], "digits"),
        (["seed=1"], "digits-seed-1"),
        (["seed=1", "seed=0"], "digits"),
        (["seed=1", "name=mine"], "mine"),
        (["train.lr=1e-2", "seed=1"], "digits-seed-1-train.lr-0.01"),
        (["seed=1", "train.lr=0.01"], "digits-seed-1-train.lr-0.01"),
        (["methods.meat.lambda=0.8"], "digits-methods.meat.lambda-0.8"),
        (["backbone.context={kind: cb}"], None),
        (["stream.tasks.0.name=first"], None),
    ],
)
def test_overrides_that_change_results_change_run_name(
    tmp_path: Path, overrides: list[str], name: str | None
) -> None:
    path = tmp_path / "digits.yaml"
    path.write_text(
        "{name: digits, stream: {tasks: [{card: digits, classes: [0, 1]}]}, methods: {meat: {}}}"
    )
    config = load(str(path), overrides)
    assert config.base_name == (config.name if name == "mine" else "digits")
    assert re.fullmatch(NAME, config.name)
    if name is not None:
        assert config.name == name
    else:
        assert re.fullmatch(r"digits-[\w.-]{1,60}-[0-9a-f]{8}|digits-[\w.-]{1,60}", config.name)
        assert (
            load(str(path), overrides).name
            == config.name
            != load(str(path), [*overrides, "seed=2"]).name
        )


def test_config_without_methods_keeps_its_name(tmp_path: Path) -> None:
    path = tmp_path / "part.yaml"
    path.write_text("{name: part, stream: {tasks: [{card: digits}]}}")
    assert load(str(path), ["methods={meat: {}}"]).name == "part"


# ---- methods given by name only ------------------------------------------------------------------
DIGITS = "configs/streams/digits.yaml"
CLASSES = "configs/streams/digits-class.yaml"


def plain_methods(loaded: Config) -> Any:
    return dump(loaded)["methods"]


def test_named_method_gets_recommended_settings_of_the_stream() -> None:
    loaded = load(CLASSES, ["methods=icarl"])
    assert loaded.name == "digits-class-icarl"
    assert loaded.methods["icarl"].settings["memory"] == 50
    assert load("configs/streams/real7-class.yaml", ["methods=icarl"]).methods[
        "icarl"
    ].settings == {"memory": 450}


def test_recommended_backbone_does_not_replace_a_chosen_one(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(f"extends: {Path(CLASSES).resolve()}\nbackbone: {{name: convit_tiny}}\n")
    assert load(str(path), ["methods=[dytox]"]).backbone.name == "convit_tiny"
    overrides = ["backbone.name=convit_small", "methods=[dytox]"]
    assert load(CLASSES, overrides).backbone.name == "convit_small"


def test_recommended_backbone_replaces_the_backbone_of_the_stream() -> None:
    loaded = load(CLASSES, ["methods=[dytox]"])
    assert loaded.backbone.name == "convit_local"
    assert loaded.backbone.img_size == load(CLASSES, ["methods=joint"]).backbone.img_size
    with pytest.raises(UserError, match="'dytox' is recommended with another backbone on"):
        load(CLASSES, ["methods=[dytox, icarl]"])


def test_overrides_after_a_named_method_change_its_settings() -> None:
    loaded = load(CLASSES, ["methods=icarl", "methods.icarl.memory=20", "seed=1"])
    assert loaded.methods["icarl"].settings["memory"] == 20
    assert loaded.name == "digits-class-icarl-methods.icarl.memory-20-seed-1"
    assert loaded.base_name == "digits-class-icarl"


def test_extending_config_can_change_named_methods(tmp_path: Path) -> None:
    stream = (Path.cwd() / CLASSES).as_posix()
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text(f"extends: {stream}\nname: first\nmethods: [icarl, wa]\n")
    second.write_text("extends: first.yaml\nname: second\nmethods: {wa: {memory: 30}}\n")
    assert plain_methods(load(str(first)))["wa"]["memory"] == 50
    loaded = plain_methods(load(str(second)))
    assert (loaded["icarl"]["memory"], loaded["wa"]["memory"]) == (50, 30)
    assert loaded["wa"]["train"] == {"epochs": 20, "batch_size": 16}


def test_recommended_settings_apply_only_to_shipped_streams(tmp_path: Path) -> None:
    other = tmp_path / "digits-class.yaml"
    other.write_text(
        (Path.cwd() / CLASSES).read_text().replace("digits.yaml", str(Path.cwd() / DIGITS))
    )
    assert load(CLASSES, ["methods=replay"]).methods["replay"].settings == {"memory": 50}
    assert load(str(other), ["methods=replay"]).methods["replay"].settings == {}
    lone = tmp_path / "lone.yaml"
    lone.write_text(yaml.safe_dump({key: BODY[key] for key in ("name", "stream", "backbone")}))
    assert load(str(lone), ["methods=linear"]).methods["linear"].settings == {}
    body = {key: BODY[key] for key in ("name", "stream", "backbone")}
    assert load(body, ["methods=[linear]"]).name == "r"


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("[meat, meat]", "names 'meat' twice"),
        ("[nonsense]", "nonsense"),
        ("[]", "methods"),
        ("[3]", "methods"),
        ("../secret", "names '../secret', and no method is called so"),
    ],
)
def test_invalid_method_names_are_refused(value: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        load(DIGITS, [f"methods={value}"])


def test_repeated_method_option_selects_methods(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ["--set", f"storage={tmp_path}", "--method", "hat", "--set", "seed=3"]
    assert cli.main(["plan", DIGITS, *options, "--method", "linear"]) == 0
    out = capsys.readouterr().out
    assert "hat/digits-45/train" in out
    assert "linear/digits-45/train" in out
    parsed = cli.parser().parse_args(["run", DIGITS, *options, "--method", "linear"])
    assert parsed.overrides == ["methods=[hat, linear]", f"storage={tmp_path}", "seed=3"]


def test_shipped_config_is_used_if_the_folder_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shipped = Path.cwd() / DIGITS
    monkeypatch.chdir(tmp_path)
    yaml_files._notify_once.cache_clear()
    assert load(DIGITS, ["methods=linear"]).name == "digits-linear"
    sentence = f"{DIGITS} is the one that comes with Accrete, {shipped}"
    assert capsys.readouterr().err.splitlines() == [sentence]
    own = tmp_path / DIGITS
    own.parent.mkdir(parents=True)
    own.write_text(yaml.safe_dump({key: BODY[key] for key in ("name", "stream", "backbone")}))
    assert load(DIGITS, ["methods=linear"]).name == "r"
    for path in ("configs/../configs/demo.yaml", "configs/none.yaml", "other/demo.yaml"):
        with pytest.raises(UserError, match="does not exist"):
            load(path)


def test_stream_without_methods_reports_the_method_option(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["plan", DIGITS]) == 2
    assert "--method NAME" in capsys.readouterr().err


def test_all_errors_of_a_config_are_reported_together() -> None:
    body = {
        "name": "x",
        "seed": -3,
        "stream": {"tasks": [{"card": "digits"}], "scenario": "taks"},
        "train": {"epochs": "many", "lr": -1},
        "trian": {},
        "methods": {"linear": {}},
    }
    with pytest.raises(UserError) as error:
        check(body, "three.yaml")
    text = str(error.value)
    assert "\n" not in text
    for key in (
        "seed is -3",
        "stream.scenario is 'taks'",
        "train.epochs is 'many'",
        "train.lr is -1",
    ):
        assert text.count(key) == 1
    assert "trian is not a known key" in text
    body |= {f"key{number}": 1 for number in range(9)}
    with pytest.raises(UserError, match=r"; and \d+ more mistakes$") as error:
        check(body, "three.yaml")
    assert len(str(error.value)) < 700


def test_undecodable_override_reports_the_locale() -> None:
    with pytest.raises(UserError, match=r"set LC_ALL=C\.UTF-8"):
        parse_override("name=gr\udcc3\udcb6e")


@pytest.mark.parametrize("value", [5e-324, 1e-31, 1e31])
def test_extreme_numbers_are_refused(value: float) -> None:
    with pytest.raises(UserError, match="a number here is"):
        config(train={"lr": value})
    assert config(train={"lr": 1e-30}).train.lr == 1e-30
