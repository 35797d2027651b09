"""Tests of bad configs, cards, sources and backbones: a one-line error with exit code 2, and no
loss of existing results."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import yaml

from pipeline import cli
from pipeline.report import page
from tests import small_run
from workers.storage.artifact import FileInfo, compute_sha256, file_info

REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass
class Site:
    """A finished run and the changes of a test.

    folder: folder of the finished run. body: its config as plain values, which tests change.
    test_folder: folder for bad files.
    """

    folder: Path
    body: dict[str, Any]
    test_folder: Path

    def card(self, name: str = "a", **changes: Any) -> None:
        """Use a changed copy of a card for the last task."""
        card = yaml.safe_load((self.folder / "cards" / f"{name}.yaml").read_text())
        self.write_card(yaml.safe_dump({**card, "name": "bad", **changes}))

    def write_card(self, text: str) -> None:
        (self.test_folder / "bad.yaml").write_text(text)
        self.body["stream"]["tasks"][-1]["card"] = str(self.test_folder / "bad.yaml")

    def source(self, name: str = "a") -> Path:
        """Copy a card's raw data for the last task; return the folder, which a test may damage."""
        shutil.copytree(self.folder / "raw" / name, self.test_folder / "raw")
        self.card(name, source={"format": "folder", "path": str(self.test_folder / "raw")})
        return self.test_folder / "raw"

    def config(self) -> str:
        return small_run.write_config(self.test_folder / "config.yaml", self.body)

    def set(self, **changes: Any) -> None:
        for path, value in changes.items():
            *parents, last = path.split("__")
            section = self.body
            for part in parents:
                section = section.setdefault(part, {})
            section[last] = value


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Run two methods on two tasks. The report is a stub, because pictures take longer than
    everything else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "build_run_report", lambda *_: {"report.html": b"a page"})
        folder = tmp_path_factory.mktemp("finished")
        body = small_run.make_body(folder, small_run.make_cards(folder, ["a", "b"]))
        assert cli.main(["run", small_run.write_config(folder / "good.yaml", body)]) == 0
        yield Site(folder, body, folder)


@pytest.fixture
def site(finished: Site, tmp_path: Path) -> Iterator[Site]:
    """Provide a site, and check after the test that all earlier results are unchanged."""
    before = whole(finished.folder / "storage" / "stages")
    record = finished.folder / "storage" / "runs" / "small" / "run.json"
    record_bytes = record.read_bytes()
    yield Site(finished.folder, copy.deepcopy(finished.body), tmp_path)
    after = whole(finished.folder / "storage" / "stages")
    assert before.items() <= after.items()
    record.write_bytes(record_bytes)


def whole(folder: Path) -> dict[str, FileInfo]:
    return {
        str(p.relative_to(folder)): file_info(p.read_bytes())
        for p in folder.rglob("*")
        if p.is_file()
    }


def sentence(capfd: pytest.CaptureFixture[str], argv: list[str]) -> str:
    """Run a command that must be refused; return its error."""
    capfd.readouterr()
    code = cli.main(argv)
    out, err = capfd.readouterr()
    return judge(code, out, err)


def judge(code: int, out: str, err: str) -> str:
    assert code == 2, f"exit code {code}: {err}"
    assert "Traceback" not in out + err
    assert len(err.splitlines()) == 1, err
    assert err.startswith("accrete: ")
    assert len(err) < 900, "the error is too long"
    return err


Change = Callable[[Site], Any]


def entries(**values: Any) -> Change:
    return lambda site: site.set(**values)


def task(**values: Any) -> Change:
    return lambda site: site.body["stream"]["tasks"][-1].update(values)


def card(**values: Any) -> Change:
    return lambda site: site.card(**values)


# ---- configs -------------------------------------------------------------------------------------
CONFIGS: dict[str, tuple[Change, list[str]]] = {
    "unknown key": (entries(trian={}), ["trian is not a known key", "did you mean 'train'"]),
    "unknown key below": (
        entries(train__epoch=3),
        ["train.epoch is not a known key (value 3)", "did you mean 'epochs'"],
    ),
    "unknown key of a task": (
        task(clases=["2"]),
        ["stream.tasks.1.clases", "did you mean 'classes'"],
    ),
    "unknown key below a method": (
        entries(methods__meat={"train": {"ephocs": 3}}),
        ["config.yaml: methods.meat.train.ephocs", "did you mean 'epochs'"],
    ),
    "unknown key far from any": (
        entries(zzz=1),
        ["zzz is not a known key", "valid keys are: backbone, cluster"],
    ),
    "missing key": (lambda site: site.body.pop("name"), ["name is missing", "add it"]),
    "wrong type": (entries(train__epochs="many"), ["train.epochs is 'many'", "valid integer"]),
    "section that is a value": (entries(train=5), ["train is 5", "a mapping of keys to values"]),
    "out of range": (entries(data={"flip": 2.0}), ["data.flip is 2.0", "less than or equal to 1"]),
    "negative rate": (entries(train__lr=-0.1), ["train.lr is -0.1", "greater than 0"]),
    "infinite rate": (entries(train__lr=float("inf")), ["train.lr is inf", "finite"]),
    "batch of nothing": (entries(train__batch_size=0), ["train.batch_size is 0", "greater than 0"]),
    "name with a slash": (entries(name="my/run"), ["name is 'my/run'", "match"]),
    "no methods": (entries(methods={}), ["methods is {}", "should have at least 1 item"]),
    "methods as a list of numbers": (entries(methods=[3]), ["methods is [3]", "a mapping"]),
    "an unknown method in a list": (entries(methods=["mete"]), ["methods.mete", "'meat'"]),
    "method that is a number": (entries(methods={"meat": 3}), ["methods.meat is 3", "mapping"]),
    "method's training that is a number": (
        entries(methods={"meat": {"train": 3}}),
        ["methods.meat.train is 3", "a mapping"],
    ),
    "label with a slash": (
        entries(methods={"a/b": {"method": "meat"}}),
        ["methods.a/b", "letters, digits"],
    ),
    "unknown method": (
        entries(methods={"maet": {}}),
        ["methods.maet", "'maet', which does not exist", "did you mean 'meat'"],
    ),
    "unknown method far from any": (
        entries(methods={"x": {"method": "qqq"}}),
        ["'qqq'", "there are: ", "finetune"],
    ),
    "unknown method setting": (
        entries(methods={"meat": {"lamda": 0.5}}),
        ["methods.meat.lamda is not a known key", "did you mean 'lambda'"],
    ),
    "method setting out of range": (
        entries(methods={"meat": {"lambda": 7}}),
        ["methods.meat.lambda is 7", "less than or equal to 1"],
    ),
    "tasks of a method that are a list": (
        entries(methods={"meat": {"tasks": ["a"]}}),
        ["methods.meat.tasks is ['a']", "a mapping of keys"],
    ),
    "task's own that is a number": (
        entries(methods={"meat": {"tasks": {"a": 3}}}),
        ["methods.meat.tasks.a is 3", "mapping of settings"],
    ),
    "unknown setting of a task": (
        entries(methods={"meat": {"tasks": {"a": {"lamda": 0.5}}}}),
        ["methods.meat.tasks.a.lamda is not a known key", "'lambda'"],
    ),
    "unknown setting of a task far from any": (
        entries(methods={"lora": {"tasks": {"a": {"qqq": 1}}}}),
        ["methods.lora.tasks.a.qqq", "keys are: steps, train"],
    ),
    "unknown section of a task": (
        entries(methods={"meat": {"tasks": {"a": {"trian": {"lr": 0.5}}}}}),
        ["methods.meat.tasks.a.trian", "'train'"],
    ),
    "setting of a task out of range": (
        entries(methods={"meat": {"tasks": {"a": {"lambda": 7}}}}),
        ["methods.meat.tasks.a.lambda is 7", "or equal to 1"],
    ),
    "training key of a task": (
        entries(methods={"meat": {"tasks": {"a": {"train": {"ephocs": 3}}}}}),
        ["methods.meat.tasks.a.train.ephocs", "'epochs'"],
    ),
    "training of a task": (
        entries(methods={"meat": {"tasks": {"a": {"train": {"lr": 0}}}}}),
        ["methods.meat.tasks.a.train.lr is 0", "greater than 0"],
    ),
    "setting of a task that serving reads": (
        entries(methods={"lora": {"tasks": {"a": {"alpha": 2}}}}),
        [
            "methods.lora.tasks.a.alpha is 2",
            "one for all tasks of 'lora'",
            "at methods.lora.alpha",
            "steps, train",
        ],
    ),
    "data of a task": (
        entries(methods={"meat": {"tasks": {"a": {"data": {"flip": 0.5}}}}}),
        ["methods.meat.tasks.a.data", "set it at methods.meat.data"],
    ),
    "step of a task that is none": (
        entries(methods={"meat": {"tasks": {"a": {"steps": {"prune": {}}}}}}),
        ["methods.meat.tasks.a.steps.prune is not a step"],
    ),
    "settings of a task that do not go together": (
        entries(methods={"meat": {"tasks": {"a": {"train": {"optimizer": "sgd"}}}}}),
        ["methods.meat.tasks.a: mask_lr is 'auto'", "'sgd'"],
    ),
    "best epoch of a task without validation": (
        entries(
            methods={"meat": {"tasks": {"a": {"train": {"keep": "best"}}}}}, data__val_fraction=0.0
        ),
        ["methods.meat.tasks.a.train.keep is 'best'", "hold some out"],
    ),
    "task that is not in the stream": (
        entries(methods={"meat": {"tasks": {"aa": {"lambda": 0.5}}}}),
        ["methods.meat.tasks.aa", "did you mean 'a'"],
    ),
    "masks by a rate derived for another optimizer": (
        entries(train__optimizer="sgd"),
        ["methods.meat: mask_lr is 'auto'", "'sgd'", "a number"],
    ),
    "best epoch without validation": (
        entries(train__keep="best", data__val_fraction=0.0),
        ["train.keep is 'best'", "hold some out"],
    ),
    "unknown step": (
        entries(methods={"meat": {"steps": {"prune": {"epochs": 1}}}}),
        ["methods.meat.steps.prune is not a step of 'meat'", "train"],
    ),
    "bad setting of a step": (
        entries(methods={"meat": {"steps": {"train": {"epochs": -1}}}}),
        ["methods.meat", "epochs is -1", "greater than or equal to 0"],
    ),
    "scenario not served": (
        entries(stream__scenario="class"),
        ["cannot serve stream.scenario 'class'", "'meat' serves task"],
    ),
    "dropout of timm": (
        entries(backbone__options__proj_drop_rate=0.1),
        ["backbone.options.proj_drop_rate is 0.1", "use backbone.drop_path"],
    ),
    "unknown scenario": (
        entries(stream__scenario="domains"),
        ["stream.scenario is 'domains'", "'task', 'class' or 'domain'"],
    ),
    "domains with other classes": (
        entries(stream__scenario="domain", methods={"finetune": {}}),
        ["task 'b' has class '4', unlike task 'a'", "scenario `domain`", "the same `classes`"],
    ),
    "mixed targets with a head for each domain": (
        entries(stream__scenario="domain", methods={"icarl": {}}, data__mixup=0.5),
        ["methods.icarl", "data.mixup", "a head for each task", "set all three to 0"],
    ),
    "empty stream": (entries(stream__tasks=[]), ["stream.tasks is []", "at least 1"]),
    "two tasks of one name": (task(name="a"), ["two tasks are called 'a'", "its own `name`"]),
    "two base tasks": (
        lambda site: [t.update(role="base") for t in site.body["stream"]["tasks"]],
        ["'a' and 'b' both have role `base`", "one base"],
    ),
    "images without labels that nobody uses": (
        task(role="unlabelled"),
        ["'b' has role `unlabelled`, and no method of this run", "add one", "toast"],
    ),
    "images without labels twice": (
        lambda site: [t.update(role="unlabelled") for t in site.body["stream"]["tasks"]],
        ["'a' and 'b' both have role `unlabelled`", "one card"],
    ),
    "images without labels alone": (
        lambda site: site.body["stream"].update(
            tasks=[{**site.body["stream"]["tasks"][0], "role": "unlabelled"}]
        ),
        ["'a' has role `unlabelled`, and there is no other task", "add one"],
    ),
    "best epoch of a step without validation": (
        entries(
            methods={"toast": {"steps": {"pretune": {"keep": "best"}}}}, data__val_fraction=0.0
        ),
        ["methods.toast.steps.pretune.keep is 'best'", "hold some out"],
    ),
    "context in a block before the first": (
        entries(backbone__context={"blocks": [-1]}),
        ["backbone.context.blocks is [-1]", "count from 0"],
    ),
    "rank beyond the width": (
        entries(methods={"lora": {"rank": 5000}}),
        ["methods.lora: rank is 5000", "give at most"],
    ),
    "images of one colour": (
        entries(backbone__options__in_chans=1),
        ["backbone.options.in_chans is 1", "three colours"],
    ),
    "split that does not divide": (
        task(split=3),
        ["2 classes of 'b' cannot be split into 3", "divisor"],
    ),
    "class not on the card": (
        task(classes=["4", "77"]),
        ["class '77' is not on card 'b'", "its classes are 4, 5"],
    ),
    "class twice in a task": (task(classes=["4", "4"]), ["task 'b' lists a class twice", "once"]),
    "no class in a task": (task(classes=[]), ["stream.tasks.1.classes is []", "at least 1"]),
    "crop of no size": (
        entries(data={"crop": "resized", "crop_scale": [0.9, 0.1]}),
        ["data.crop_scale is [0.9, 0.1]", "low <= high"],
    ),
    "block that is not there": (
        entries(methods={"meat": {"token_mask_blocks": [7]}}),
        ["token_mask_blocks is [7]", "blocks 0 to 1"],
    ),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_bad_setting_is_named_with_its_rule_and_remedy(
    case: Any, site: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    change, says = CONFIGS[case]
    change(site)
    message = sentence(capfd, ["run", site.config()])
    for words in says:
        assert words in message


FILES: dict[str, tuple[bytes | None, list[str]]] = {
    "no file": (None, ["does not exist", "did you mean", "confog.yaml"]),
    "no yaml": (b"name: [1, 2\ntrain: {", ["not readable as YAML", "line 2", "fix"]),
    "a tab": (b"train:\n\tepochs: 1\n", ["not readable as YAML", "fix"]),
    "key twice": (b"name: r\nseed: 1\nseed: 2\n", ["line 3", "key 'seed' occurs twice", "fix"]),
    "nothing": (b"", ["mapping of keys to values", "this is None"]),
    "a list": (b"- name\n", ["mapping of keys to values", "['name']"]),
    "no text": (b"\x89PNG\r\n\xff\xfe", ["not readable as text", ".yaml"]),
}


@pytest.mark.parametrize("case", FILES)
def test_a_file_that_is_no_config_is_refused(
    case: Any, site: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    data, says = FILES[case]
    (site.test_folder / "confog.yaml").write_bytes(data or b"")
    message = sentence(
        capfd, ["run", str(site.test_folder / ("config.yaml" if data is None else "confog.yaml"))]
    )
    for words in says:
        assert words in message


def test_empty_folder_is_refused_as_config_or_data(
    site: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    message = sentence(capfd, ["plan", str(site.test_folder)])
    assert "is empty, which is not a data set of images" in message
    assert "CSV file of paths and labels" in message


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.epochs", ["'train.epochs' is not of the form key=value", "for example"]),
        ("=3", ["not of the form key=value"]),
        ("seed.x=1", ["'seed' holds the value 5 and has no keys below it", "check the path"]),
        ("stream.tasks.9.name=x", ["'9' is not a position in a list of 2", "count from 0"]),
        ("stream.tasks.first.name=x", ["'first' is not a position", "count from 0"]),
        ("train.epochs=[1", ["--set", "not readable as YAML"]),
        ("train.epoch=3", ["train.epoch is not a known key", "did you mean 'epochs'"]),
        ("data=", ["data is None", "a mapping"]),
        ("cluster.gpus_per_worker=1.5", ["is 1.5", "a part of one GPU, or whole GPUs"]),
        ("cluster.stages.train.gpus=2.5", ["is 2.5", "a part of one GPU, or whole GPUs"]),
    ],
)
def test_a_bad_override_is_refused(
    override: str, says: Any, site: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    message = sentence(capfd, ["run", site.config(), "--set", override])
    for words in says:
        assert words in message


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], ["COMMAND"]),
        (["rnu", "x.yaml"], ["'rnu'", "run"]),
        (["run"], ["config"]),
        (["run", "x.yaml", "--sett", "a=1"], ["--sett"]),
    ],
)
def test_a_bad_command_line_is_refused(
    argv: Any, says: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    message = sentence(capfd, argv)
    for words in [*says, "--help"]:
        assert words in message


# ---- cards ---------------------------------------------------------------------------------------
CARDS: dict[str, tuple[Change, list[str]]] = {
    "missing": (task(card="digitz"), ["card 'digitz' does not exist", "did you mean 'digits'"]),
    "missing file": (task(card="nowhere/card.yaml"), ["card 'nowhere/card.yaml' does not exist"]),
    "unknown key": (card(clases=["2"]), ["clases is not a known key", "did you mean 'classes'"]),
    "unknown key of the source": (
        card(source={"format": "folder", "pathh": "x"}),
        ["source.pathh is not a known key", "did you mean 'path'"],
    ),
    "unknown format": (
        card(source={"format": "floppy"}),
        ["source.format is 'floppy'", "'folder'"],
    ),
    "class twice": (
        card(classes=["2", "3", "2"]),
        ["class '2' is listed twice", "list each class once"],
    ),
    "number of classes": (
        card(num_classes=3),
        ["num_classes is 3, but there are 2 classes", "correct `num_classes`"],
    ),
    "classes that are numbers": (card(classes=[2, 3]), ["classes.0 is 2", "write it in quotes"]),
    "no yaml": (
        lambda site: site.write_card("classes: ["),
        ["not readable as YAML", "bad.yaml", "fix"],
    ),
    "key twice": (
        lambda site: site.write_card("name: x\nname: y\n"),
        ["key 'name' occurs twice", "bad.yaml"],
    ),
    "no mapping": (lambda site: site.write_card("- x\n"), ["a card is a mapping", "bad.yaml"]),
    "no licence": (
        lambda site: site.write_card("name: x\nclasses: ['1']\nsource: {format: sklearn}\n"),
        ["licence is missing", "bad.yaml"],
    ),
    "one name for two": (
        lambda site: (
            site.card(name="b"),  # type: ignore[func-returns-value]
            site.body["stream"]["tasks"].append(
                {"name": "c", "card": str(site.test_folder / "bad.yaml")}
            ),
            site.body["stream"]["tasks"].append(
                {"name": "d", "card": small_run.make_card(site.test_folder, "bad", "8")}
            ),
        ),
        ["have the same name 'bad'", "rename one"],
    ),
    "variable not set": (
        card(source={"format": "folder", "path": "${ACCRETE_NOT_SET}/x"}),
        ["environment variable ACCRETE_NOT_SET", "export it"],
    ),
    "source that is not there": (
        card(source={"format": "folder", "path": "/nowhere/at/all"}),
        ["card 'bad'", "/nowhere/at/all", "does not exist"],
    ),
    "split outside the source": (
        lambda site: site.card(
            source={
                "format": "folder",
                "path": str(site.test_folder),
                "splits": {"train": "../a", "test": "test"},
            }
        ),
        ["source.splits.train is '../a'", "only folders below source.path", "source.more"],
    ),
    "classes from a source that is not there": (
        card(
            classes="from_source",
            num_classes=2,
            source={"format": "folder", "path": "/nowhere/at/all"},
        ),
        ["/nowhere/at/all", "there are none"],
    ),
    "classes from a source that has none": (
        card(classes="from_source", source={"format": "sklearn"}),
        ["source.name is ''", "`digits`"],
    ),
    "classes from images without labels": (
        card(classes="from_source", source={"format": "folder", "path": "x", "label": None}),
        ["source.label is null", "classes: [image]"],
    ),
    "class without images": (
        card(classes=["2", "3", "9"]),
        ["class '9' has no train images", "raw/a"],
    ),
    "count": (
        card(counts={"train": 41, "test": 20}),
        ["promises 41 train and 20 test images", "40 and 20"],
    ),
    "content": (card(content="00ff"), ["promises content 00ff", "fix `content`"]),
    "unknown data set of scikit-learn": (
        card(source={"format": "sklearn", "name": "iris"}),
        ["source.name is 'iris'", "`digits`"],
    ),
    "unknown data set of torchvision": (
        card(source={"format": "torchvision", "name": "Nothing", "path": "x"}),
        ["'Nothing'", "CIFAR10"],
    ),
}


@pytest.mark.parametrize("case", CARDS)
def test_a_bad_card_is_named_with_its_rule_and_remedy(
    case: Any, site: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    change, says = CARDS[case]
    change(site)
    message = sentence(capfd, ["run", site.config()])
    for words in says:
        assert words in message


# ---- sources -------------------------------------------------------------------------------------
def test_truncated_tar_is_refused(site: Any, capfd: pytest.CaptureFixture[str]) -> None:
    tar = next((site.folder / "storage" / "stages").glob("*/*/train-*-00000.tar"))
    (site.test_folder / "train.tar").write_bytes(tar.read_bytes()[:5000])
    (site.test_folder / "test.tar").write_bytes(tar.read_bytes())
    site.card(source={"format": "tar", "path": str(site.test_folder)})
    message = sentence(capfd, ["run", site.config()])
    assert "stage data/bad failed" in message
    assert "train.tar cannot be read as an uncompressed tar (unexpected end of data)" in message
    assert re.search(r"resume with: \S+ -m pipeline run \S+config.yaml", message)


def test_too_many_corrupt_images_are_refused_with_example_names(
    site: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    for path in (site.source() / "train" / "2").iterdir():
        path.write_bytes(b"no image")
    message = sentence(capfd, ["run", site.config()])
    for words in ("20 of 60 images are corrupt", "max_bad_fraction", "train/2/", "not an image"):
        assert words in message


def test_source_with_only_corrupt_images_is_refused(
    site: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    for path in site.source().rglob("*.png"):
        path.write_bytes(b"")
    assert "60 of 60 images are corrupt" in sentence(capfd, ["run", site.config()])


def test_empty_validation_split_is_refused(site: Any, capfd: pytest.CaptureFixture[str]) -> None:
    raw = site.source()
    for label in "23":
        for path in sorted((raw / "train" / label).iterdir())[1:]:
            path.unlink()
    message = sentence(capfd, ["run", site.config()])
    for words in ("task 'b' has no validation images", "data.val_fraction = 0.1", "set it to 0"):
        assert words in message
    assert cli.main(["ingest", site.config()]) == 0, "the ingested data are valid"


# ---- backbones -----------------------------------------------------------------------------------
def saved(site: Site, tensors: dict[str, torch.Tensor]) -> str:
    path = site.test_folder / "weights.safetensors"
    safetensors.torch.save_file(tensors, path)
    return str(path)


def state_of(site: Site) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(
        small_run.artifact(site.folder / "storage", "backbone", "state.safetensors")
    )


def text_as_weights(site: Site) -> str:
    (site.test_folder / "weights.safetensors").write_text("no weights")
    return str(site.test_folder / "weights.safetensors")


BACKBONES: dict[str, tuple[Callable[[Site], dict[str, Any]], list[str]]] = {
    "image no multiple of the patch": (
        lambda _: {"img_size": 18},
        ["backbone.img_size is 18", "multiple of the patch size 4"],
    ),
    "unknown name": (
        lambda _: {"name": "vit_tiny_patch17_224"},
        [
            "backbone.name is 'vit_tiny_patch17_224', which timm does not have",
            "vit_tiny_patch16_224",
        ],
    ),
    "neither transformer nor ResNet": (
        lambda _: {"name": "mixer_b16_224", "img_size": 224, "options": {}},
        ["methods.meat: the backbone is a MlpMixer", "a ViT such as", "a ResNet such as"],
    ),
    "image no multiple of the soft splits": (
        lambda _: {"name": "t2t_vit_12", "img_size": 24, "options": {}},
        ["'t2t_vit_12'", "img_size must be a multiple of 16"],
    ),
    "unknown option": (
        lambda site: {"options": {**site.body["backbone"]["options"], "patchsize": 4}},
        ["backbone", "patchsize"],
    ),
    "heads that do not divide": (
        lambda site: {"options": {**site.body["backbone"]["options"], "num_heads": 5}},
        ["backbone", "num_heads"],
    ),
    "weights that are not there": (
        lambda _: {"weights": "nowhere.safetensors"},
        ["backbone.weights", "nowhere.safetensors", "does not exist"],
    ),
    "weights that are a folder": (
        lambda site: {"weights": str(site.test_folder)},
        ["backbone.weights", "folder", ".safetensors file"],
    ),
    "weights that are not weights": (
        lambda site: {"weights": text_as_weights(site)},
        ["backbone.weights", "not readable as safetensors", "`hub` or `none`"],
    ),
    "weights of a deeper one": (
        lambda site: {
            "weights": saved(site, state_of(site)),
            "options": {**site.body["backbone"]["options"], "depth": 3},
        },
        ["do not fit 'vit_tiny_patch16_224'", "missing", "blocks.2", "same architecture"],
    ),
    "weights of a wider one": (
        lambda site: {
            "weights": saved(site, state_of(site)),
            "options": {**site.body["backbone"]["options"], "embed_dim": 64},
        },
        ["do not fit 'vit_tiny_patch16_224'", "same architecture"],
    ),
    "weights of something else": (
        lambda site: {"weights": saved(site, {"conv1.weight": torch.zeros(3)})},
        ["do not fit", "same architecture"],
    ),
}


@pytest.mark.parametrize("case", BACKBONES)
def test_a_bad_backbone_is_refused(case: Any, site: Any, capfd: pytest.CaptureFixture[str]) -> None:
    change, says = BACKBONES[case]
    site.set(backbone={**site.body["backbone"], **change(site)})
    message = sentence(capfd, ["run", site.config()])
    for words in says:
        assert words in message


def test_backbone_whose_weights_mismatch_its_digest_is_refused(
    site: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """The digests of the files are correct, but the weights do not match the digest of the weights
    in the manifest."""
    storage = site.test_folder / "storage"
    shutil.copytree(site.folder / "storage", storage)
    state = small_run.artifact(storage, "backbone", "state.safetensors")
    tensors = safetensors.torch.load_file(state)
    tensors["cls_token"] += 1
    safetensors.torch.save_file(tensors, state)
    manifest = state.parents[1] / "manifest.json"
    body = json.loads(manifest.read_text())
    body["files"]["state.safetensors"] = file_info(state.read_bytes())
    manifest.write_text(json.dumps({**body, "sha256": compute_sha256(body)}))
    site.set(storage=str(storage), train__epochs=1)
    message = sentence(capfd, ["run", site.config()])
    assert "masks mean nothing on other weights" in message
    assert "digest" in message


# ---- training, storage, cluster ------------------------------------------------------------------
@pytest.mark.parametrize("method", ["finetune", "meat"])
def test_non_finite_loss_ends_stage_with_remedy(
    method: str, site: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    site.set(methods={method: {}}, train__lr=1e30, train__epochs=3)
    message = sentence(capfd, ["run", site.config()])
    remedy = f"lower methods.{method}.train.lr"
    for words in (f"stage {method}/", "the loss became", remedy, "resume with"):
        assert words in message


def test_evaluation_refuses_non_finite_outputs(
    site: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """With a single training step, the weights can diverge after the loss was checked."""
    site.set(methods={"finetune": {}}, train__lr=1e30, train__epochs=1, train__batch_size=64)
    message = sentence(capfd, ["run", site.config()])
    for words in ("/evaluate failed", "not finite", "lower train.lr"):
        assert words in message


def test_a_storage_that_is_a_file_is_refused(site: Any, capfd: pytest.CaptureFixture[str]) -> None:
    (site.test_folder / "file").write_text("x")
    for storage_path in ("file", "file/below"):
        site.set(storage=str(site.test_folder / storage_path))
        message = sentence(capfd, ["run", site.config()])
        assert "cannot be written" in message
        assert "--set storage=" in message
        assert (site.test_folder / "file").read_text() == "x"


def test_storage_with_unknown_scheme_is_refused(
    site: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    site.set(storage="ftp://host/there")
    assert "storage 'ftp://host/" in sentence(capfd, ["run", site.config()])


def test_plan_works_with_a_damaged_run_record(site: Any, capfd: pytest.CaptureFixture[str]) -> None:
    storage = site.test_folder / "storage"
    shutil.copytree(site.folder / "storage", storage)
    site.set(storage=str(storage))
    for text in ("{}", "[]", "{", "\udcff"):
        (storage / "runs" / "small" / "run.json").write_bytes(
            text.encode("utf-8", "surrogateescape")
        )
        assert cli.main(["plan", site.config()]) == 0
        assert "0 to run" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("127.0.0.1:1", ["no Ray cluster answers at '127.0.0.1:1'", "cluster.address=local"]),
        ("nonsense", ["'nonsense' is not of the form host:port", "RAY_ADDRESS"]),
    ],
)
@pytest.mark.parametrize("through", ["config", "environment"])
def test_unreachable_or_malformed_cluster_address_is_reported(
    address: str,
    says: Any,
    through: str,
    site: Any,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if through == "config":
        site.set(cluster__address=address)
    else:
        monkeypatch.setenv("RAY_ADDRESS", address)
    site.set(cluster__workers=1, train__epochs=1)
    message = sentence(capfd, ["run", site.config()])
    for words in says:
        assert words in message


@pytest.mark.slow
def test_cluster_without_the_requested_gpus_is_refused(site: Any) -> None:
    site.set(cluster__workers=1, cluster__gpus_per_worker=64, train__epochs=1)
    message = in_a_process(["run", site.config()])
    assert "has no room for" in message
    assert "lower cluster.workers or the resources of each, add nodes" in message


# ---- in a separate process -----------------------------------------------------------------------
def in_a_process(argv: list[str]) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", *argv],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    return judge(done.returncode, done.stdout, done.stderr)


@pytest.mark.slow
def test_failed_process_prints_one_line_and_exits_with_2(site: Any) -> None:
    for path in (site.source() / "train" / "2").iterdir():
        path.write_bytes(b"no image")
    message = in_a_process(["run", site.config()])
    assert "stage data/bad failed" in message
