"""Tests of the shipped configs and searches: they are valid, complete, and match the papers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from docs.site.config_header import header_of
from pipeline.config import settings as config
from pipeline.config import yaml_files
from pipeline.search import spec
from pipeline.search.space import Space, check_against_config
from pipeline.search.trial import with_history
from workers.methods import METHODS
from workers.methods.base import Method

CONFIGS = Path(__file__).parent.parent / "configs"
RUNNABLE = sorted(
    p
    for p in CONFIGS.rglob("*.yaml")
    if p.parent.name not in ("streams", "search", "cluster", "papers")
)
SPACES = sorted((CONFIGS / "search").glob("*.yaml"))
STEPS = "docs/new-method.md says what it holds; start from those of finetune"
HEADER = ("command", "machine", "time", "expected")
PAPERS = [
    p
    for p in RUNNABLE
    if p.parent.name == "methods" or p.stem.endswith("-table1") or "imagenet" in p.stem
]
CLASS_INCREMENTAL = [p for p in PAPERS if "-class-" in p.read_text()]
# DyTox's recipe, which the configs of all rehearsal methods use.
DYTOX = {
    "epochs": 500,
    "batch_size": 256,
    "lr": 2.5e-4,
    "weight_decay": 1e-6,
    "schedule": "epoch",
    "warmup": 0.01,
    "warmup_start": 0.004,
    "floor": 0.04,
}
REHEARSAL = sorted(
    p.stem
    for p in PAPERS
    if p.parent.name == "methods" and "cifar100-class-10.yaml" in p.read_text()
)
# The released code of these methods herds like that of iCaRL.
HERD_AGAIN = ("der", "der_p", "dytox", "podnet", "ucir")
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225), "crop_pct": 0.875}
CIFAR = {"mean": (0.5071, 0.4867, 0.4408), "std": (0.2675, 0.2565, 0.2761)}
NO_START = {"warmup": 0.0}
# Settings in the papers and their released code, by config and label: settings of the method, then
# of `train`, `data` and `backbone`. The `differs` line of a config has the settings that differ.
NAMED: dict[tuple[str, str], tuple[dict[str, Any], ...]] = {
    ("adahat", "adahat"): (
        {"mask_lr": 0.05},
        {"optimizer": "sgd", "lr": 0.05, "momentum": 0.0, **NO_START},
        {},
        CIFAR,
    ),
    ("apd", "apd"): (
        {
            "lambda1": 4e-4,
            "lambda2": 100.0,
            "tau_start": "sigma",
            "v_start": 0.0,
            "consolidate_every": 5,
            "clusters": 2,
        },
        {"epochs": 20, "batch_size": 100, "lr": 1e-3, "weight_decay": 1e-4, **NO_START},
        {"val_fraction": 0.2, "crop": "none", "flip": 0.0},
        {},
    ),
    ("ctr_full", "ctr_full"): (
        {"width": 2000, "mask_lr": 5e-5},
        {"lr": 5e-5, "batch_size": 32, "warmup": 0.1, "floor": 0.0},
        {},
        {},
    ),
    ("ctr_tsm", "ctr_tsm"): (
        {"width": 2000, "mask_lr": 5e-5},
        {"lr": 5e-5, "batch_size": 32, "warmup": 0.1, "floor": 0.0},
        {},
        {},
    ),
    ("dytox-imagenet100", "dytox"): (
        {"memory": 2000},
        {"epochs": 500, "batch_size": 512, "lr": 5e-4},
        {"crop_scale": (0.08, 1.0)},
        IMAGENET,
    ),
    ("dytox-imagenet1000", "dytox"): (
        {"memory": 20000},
        {"epochs": 500, "batch_size": 512, "lr": 5e-4},
        {"crop_scale": (0.08, 1.0)},
        IMAGENET,
    ),
    ("dytox", "dytox"): (
        {"memory": 2000},
        {"epochs": 500, "batch_size": 256, "lr": 2.5e-4},
        {"repeats": 3},
        CIFAR,
    ),
    ("hat", "hat"): (
        {"s_max": 400.0, "c": 0.75, "price": "absolute", "start": "normal", "mask_lr": 0.05},
        {
            "optimizer": "sgd",
            "lr": 0.05,
            "momentum": 0.0,
            "weight_decay": 0.0,
            "batch_size": 64,
            "epochs": 200,
            **NO_START,
        },
        {"val_fraction": 0.1, "crop": "none", "flip": 0.0},
        {},
    ),
    ("ksm", "ksm"): (
        {"mask_lr": 2e-4},
        {"epochs": 30, "batch_size": 32, "lr": 2e-4, "floor": 0.0, **NO_START},
        {},
        IMAGENET,
    ),
    ("lora", "lora"): (
        {"rank": 4},
        {"optimizer": "sgd", "epochs": 100, "batch_size": 32},
        {},
        {"name": "deit_base_patch16_224"},
    ),
    ("meat", "meat"): (
        {"lambda_": 0.9, "alpha": 2.0, "mask_lr": "paper"},
        {"epochs": 30, "batch_size": 256, "schedule": "epoch"},
        {},
        IMAGENET,
    ),
    ("packnet", "packnet"): (
        {},
        {"optimizer": "sgd", "lr": 1e-3, "batch_size": 32, "epochs": 20, **NO_START},
        {},
        IMAGENET,
    ),
    ("piggyback", "piggyback"): (
        {"mask_lr": 1e-4},
        {"epochs": 30, "batch_size": 32, "lr": 1e-4, **NO_START},
        {},
        IMAGENET,
    ),
    ("supsup", "supsup"): (
        # one output more than in the released code, because `check_backbone` requires it
        {"budget": 8.0, "mask_lr": 1e-3, "outputs": 6},
        {"batch_size": 128, "floor": 0.0, **NO_START},
        {"val_fraction": 0.0},
        {},
    ),
    ("supsup_nn", "supsup_nn"): (
        {"scores": "threshold", "mask_lr": 1e-4},
        {"floor": 1.0, **NO_START},
        {"val_fraction": 0.0},
        {},
    ),
    ("toast", "toast"): (
        {},
        {"optimizer": "sgd", "lr": 0.01, "clip": 1.0, "batch_size": 32, "epochs": 100},
        {},
        IMAGENET,
    ),
    ("toast_lite", "toast_lite"): (
        {"rank": 4},
        {"optimizer": "sgd", "lr": 0.01, "clip": 1.0, "batch_size": 32},
        {},
        IMAGENET,
    ),
    ("wsn", "wsn"): (
        {"density": 0.5, "mask_lr": 1e-3},
        {"batch_size": 64, "lr": 1e-3, **NO_START},
        {"val_fraction": 0.05, "crop": "none", "flip": 0.0},
        {},
    ),
}


# The scripts of PackNet and Piggyback, and later those of KSM, use data sets cropped to boxes.
CROPPED = ("cub200-cropped", "stanford-cars-cropped", "flowers102", "wikiart", "sketches")


def method_class(name: str) -> type[Method]:
    return METHODS[name]


@pytest.mark.parametrize("path", RUNNABLE, ids=lambda p: str(p.relative_to(CONFIGS)))
def test_shipped_config_is_valid_and_contains_its_command(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCRETE_DATA", "nowhere")
    run_config = config.load(str(path))
    assert run_config.name == path.stem
    header = [
        line.split(maxsplit=2)[1]
        for line in path.read_text().splitlines()
        if line.startswith("# ") and len(line.split()) > 2
    ]
    assert set(HEADER) <= set(header), f"{path.name} lacks {set(HEADER) - set(header)}"
    assert f"configs/{path.relative_to(CONFIGS)}" in path.read_text(), "no command with the file"


@pytest.mark.parametrize("path", PAPERS, ids=lambda p: p.stem)
def test_paper_config_documents_its_differences(path: Path) -> None:
    differs = header_of(path).get("differs", "")
    assert len(differs.split()) > 2, (
        f"{path.name} has no line `# differs`; a config of a paper always differs"
    )


@pytest.mark.parametrize("path", CLASS_INCREMENTAL, ids=lambda p: p.stem)
def test_class_incremental_paper_config_holds_out_no_images(path: Path) -> None:
    """The papers hold out no images. BiC itself holds out exemplars."""
    loaded = config.load(str(path))
    assert loaded.stream.scenario == "class"
    assert {loaded.merge_data(label).val_fraction for label in loaded.methods} == {0.0}


def test_enough_class_incremental_paper_configs_exist() -> None:
    assert len(CLASS_INCREMENTAL) >= 14


@pytest.mark.parametrize(("name", "label"), NAMED, ids=lambda part: part)
def test_paper_config_has_the_settings_of_the_paper(name: str, label: str) -> None:
    method, train, data, backbone = NAMED[name, label]
    (path,) = (p for p in PAPERS if p.stem == name)
    loaded = config.load(str(path))
    entry = loaded.methods[label]
    settings = METHODS[entry.method].Settings.model_validate(entry.settings)
    pairs = (
        (method, settings),
        (train, loaded.merge_train(label)),
        (data, loaded.merge_data(label)),
        (backbone, loaded.backbone),
    )
    for named, model in pairs:
        assert {key: getattr(model, key) for key in named} == named


@pytest.mark.parametrize("name", REHEARSAL)
def test_every_rehearsal_config_uses_the_dytox_recipe(name: str) -> None:
    loaded = config.load(str(CONFIGS / "methods" / f"{name}.yaml"))
    (label,) = loaded.methods
    train = loaded.merge_train(label)
    assert {key: getattr(train, key) for key in DYTOX} == DYTOX
    assert loaded.backbone.drop_path == 0.1


def test_enough_rehearsal_configs_exist() -> None:
    assert len(REHEARSAL) >= 12


@pytest.mark.parametrize("method", HERD_AGAIN)
def test_paper_config_uses_the_herding_of_the_released_code(method: str) -> None:
    loaded = config.load(str(CONFIGS / "methods" / f"{method}.yaml"))
    settings = METHODS[method].Settings.model_validate(loaded.methods[method].settings)
    assert settings.model_dump()["selection"] == "rebuffi"


@pytest.mark.parametrize("name", ["packnet", "piggyback", "ksm"])
def test_packnet_piggyback_and_ksm_use_the_cropped_data_sets(name: str) -> None:
    loaded = config.load(str(CONFIGS / "methods" / f"{name}.yaml"))
    assert tuple(task.card for task in loaded.stream.tasks) == CROPPED


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_settings_for_digits_and_real_tasks(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCRETE_DATA", "nowhere")
    path = CONFIGS / "methods" / f"{method}.yaml"
    assert path.exists(), f"write {path.relative_to(CONFIGS.parent)}: {STEPS}"
    assert method in {entry.method for entry in config.load(str(path)).methods.values()}
    recommended = yaml_files.read_recommended(method)
    assert {stream.partition("-")[0] for stream in recommended} >= {"digits", "real7"}
    for stream, settings in recommended.items():
        loaded = config.load(str(CONFIGS / "streams" / f"{stream}.yaml"), [f"methods={method}"])
        assert loaded.name == f"{stream}-{method}"
        (entry,) = config.dump(loaded)["methods"].values()
        for key in settings.keys() - {"backbone", "train", "steps"}:
            assert entry[key] == settings[key]


def test_registered_methods_match_the_method_configs() -> None:
    """The methods are found by a scan of `workers/methods`."""
    assert [*METHODS] == sorted(path.stem for path in (CONFIGS / "methods").glob("*.yaml"))
    assert all(name == method.name for name, method in METHODS.items())


def has_something_to_search(cls: type[Method]) -> bool:
    """Return whether a method has settings or is trained."""
    return bool(cls.Settings.model_fields) or cls.has_training()


@pytest.mark.parametrize(
    "method", [name for name, cls in METHODS.items() if has_something_to_search(cls)]
)
def test_generated_search_of_every_method_is_valid_and_finite(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCRETE_DATA", "nowhere")
    for stream in yaml_files.read_recommended(method):
        path = CONFIGS / "streams" / f"{stream}.yaml"
        settings, body, _ = spec.load_search_file(str(path), [f"methods=[{method}]"])
        assert settings.name == f"{stream}-{method}"
        check_against_config(Space(settings.space), body, path.name)
        assert settings.algorithm == "grid" or settings.budget.trials or settings.budget.hours


@pytest.mark.parametrize("path", SPACES, ids=lambda p: p.stem)
def test_shipped_search_is_runnable_and_finite(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCRETE_DATA", "nowhere")
    settings, body, _ = spec.load_search_file(str(path), [])
    space = Space(settings.space)
    check_against_config(space, body, path.name)
    if settings.protocol == "per_task":
        for params in space.corners():
            config.check(with_history(body, params, {"any": params}), path.name)
    assert settings.algorithm == "grid" or settings.budget.trials or settings.budget.hours
    assert f"configs/search/{path.name}" in path.read_text(), "no command with the file"
    assert "# ranges    " in path.read_text()
