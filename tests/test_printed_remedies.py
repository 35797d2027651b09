"""Tests that the commands proposed in errors about data work when they are pasted."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from pipeline import cli
from pipeline.config.invocation import this_command
from tests.image_data import class_folders, make_image
from tests.image_sources import NAMES, plain_csv, png, write_table


def commands_in(sentence: str) -> list[str]:
    """Return the commands in a sentence: the texts in backticks that have several words."""
    return [text for text in re.findall("`([^`]*)`", sentence) if " " in text]


def paste(command: str) -> None:
    """Run a shell command. Split it at `&&`; parts that call Accrete run in this process."""
    program = shlex.split(this_command())
    for part in command.split(" && "):
        words = shlex.split(part)
        if words[: len(program)] == program:
            assert cli.main(words[len(program) :]) == 0, part
        elif words[0] == "cd":
            os.chdir(words[1])
        else:
            subprocess.run(words, check=True)


def refusal(argv: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    capfd.readouterr()
    assert cli.main(argv) == 2
    error = capfd.readouterr().err
    assert len(error.splitlines()) == 1
    return error


def config_written(capfd: pytest.CaptureFixture[str]) -> str:
    """Return the config in the `next:` line, the second-to-last line of the output."""
    *_, next_line, last = capfd.readouterr().out.splitlines()
    assert next_line.startswith("next: ")
    assert last.startswith("preview: ")
    return shlex.split(next_line)[-1]


@pytest.fixture
def current(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with a name that must be quoted in a shell."""
    folder = tmp_path / "current folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


# ---- data ----------------------------------------------------------------------------------------
def zip_file(current: Path) -> str:
    class_folders(current / "my zoo", NAMES)
    shutil.make_archive(str(current / "all images"), "zip", current, "my zoo")
    shutil.rmtree(current / "my zoo")
    return "all images.zip"


def tar_gz(current: Path) -> str:
    class_folders(current / "zoo", NAMES)
    with tarfile.open(current / "Zoo.TAR.GZ", "w:gz") as tar:
        tar.add(current / "zoo", "zoo")
    shutil.rmtree(current / "zoo")
    return "Zoo.TAR.GZ"


def folder_of_zips(current: Path) -> str:
    for split in ("train", "test"):
        class_folders(current / "tmp" / split, NAMES)
        with zipfile.ZipFile(current / f"{split}.zip", "w") as archive:
            for path in sorted((current / "tmp" / split).rglob("*.png")):
                archive.write(path, path.relative_to(current / "tmp" / split))
    shutil.rmtree(current / "tmp")
    (current / "down loads").mkdir()
    for split in ("train", "test"):
        (current / f"{split}.zip").rename(current / "down loads" / f"{split}.zip")
    return "down loads"


def tar_of_folders(current: Path) -> str:
    class_folders(current / "zoo", NAMES)
    with tarfile.open(current / "images.tar", "w") as tar:
        tar.add(current / "zoo", "zoo")
    shutil.rmtree(current / "zoo")
    return "images.tar"


def links_to_folders(current: Path) -> str:
    class_folders(current.parent / "the real", NAMES)
    (current / "links").mkdir()
    for name in NAMES:
        (current / "links" / name).symlink_to(current.parent / "the real" / name)
    return "links"


def unclear_label(current: Path) -> str:
    table = plain_csv(current / "my data")
    lines = table.read_text().splitlines()
    rows = [f"{line},{NAMES[number % 3]},{number}" for number, line in enumerate(lines[1:])]
    write_table(table, ["file,kind,sort,number", *rows])
    return "my data/labels.csv"


def unclear_label_of_ids(current: Path) -> str:
    lines = ["lesion,image_id,dx,site,age"]
    for number in range(24):
        make_image(current / "ham" / "part" / f"im{number}.jpg", number)
        site = ("back", "scalp")[number % 2]
        lines.append(f"{number},im{number},{NAMES[number % 4]},{site},{number * 2}.5")
    write_table(current / "ham" / "meta.csv", lines)
    return "ham"


def too_many_labels(current: Path) -> str:
    lines = ["image,label,kind"]
    for number in range(120):
        make_image(current / "t" / f"{number}.png", number)
        lines.append(f"{number}.png,{number},{NAMES[number % 4]}")
    write_table(current / "t" / "t.csv", lines)
    return "t/t.csv"


def unclear_label_in_parquet(current: Path) -> str:
    columns = {
        "image": [png(number) for number in range(24)],
        "sort": ["xyz"[number % 3] for number in range(24)],
        "kind": [NAMES[number % 4] for number in range(24)],
    }
    pq.write_table(pa.table(columns), current / "p.parquet")
    return "p.parquet"


def name_that_is_taken(current: Path) -> str:
    class_folders(current / "zoo", NAMES)
    Path("zoo.yaml").write_text("other: true")
    Path("zoo-2.yaml").write_text("other: true")
    return "zoo"


def card_that_is_taken(current: Path) -> str:
    class_folders(current / "zoo", NAMES)
    Path("zoo-card.yaml").write_text("other: true")
    return "zoo"


def data_around(current: Path) -> str:
    class_folders(current, NAMES)
    return "."


SOURCES: list[Callable[[Path], str]] = [
    zip_file,
    tar_gz,
    folder_of_zips,
    tar_of_folders,
    links_to_folders,
    unclear_label,
    unclear_label_of_ids,
    too_many_labels,
    unclear_label_in_parquet,
    name_that_is_taken,
    card_that_is_taken,
    data_around,
]


@pytest.mark.parametrize("make", SOURCES)
def test_printed_command_for_a_source_works_when_pasted(
    make: Callable[[Path], str], current: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = make(current)
    error = refusal(["run", path], capfd)
    commands = commands_in(error)
    assert commands, error
    for command in commands:
        paste(command)
    assert cli.main(["plan", config_written(capfd)]) == 0


def test_printed_remedy_works_when_pasted_twice(
    current: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    zip_file(current)
    for _ in range(2):  # the second time, the archive is already unpacked
        (command,) = commands_in(refusal(["run", "all images.zip"], capfd))
        paste(command)


# ---- cards ---------------------------------------------------------------------------------------
def folders_of_other_names(current: Path) -> dict[str, object]:
    class_folders(current / "raw" / "Training", NAMES)
    class_folders(current / "raw" / "Testing", NAMES)
    return {"classes": list(NAMES), "source": {"format": "folder", "path": "raw"}}


def no_test(current: Path) -> dict[str, object]:
    class_folders(current / "raw" / "train", NAMES)
    return {"classes": list(NAMES), "source": {"format": "folder", "path": "raw"}}


def class_is_missing(current: Path) -> dict[str, object]:
    for split in ("train", "test"):
        class_folders(current / "raw" / split, NAMES)
    return {"classes": [*NAMES, "yak"], "source": {"format": "folder", "path": "raw"}}


def number_of_classes(current: Path) -> dict[str, object]:
    for split in ("train", "test"):
        class_folders(current / "raw" / split, NAMES)
    source = {"format": "folder", "path": "raw"}
    return {"classes": "from_source", "num_classes": 7, "source": source}


def classes_in_no_train(current: Path) -> dict[str, object]:
    class_folders(current / "raw", NAMES)
    return {"classes": "from_source", "source": {"format": "folder", "path": "raw"}}


def column_is_missing(current: Path) -> dict[str, object]:
    plain_csv(current / "raw")
    source = {"format": "csv", "path": "raw/labels.csv", "image": "path"}
    return {"classes": list(NAMES), "test_fraction": 0.2, "source": source}


def other_format(current: Path) -> dict[str, object]:
    plain_csv(current / "raw")
    return {"classes": list(NAMES), "source": {"format": "parquet", "path": "raw"}}


CARDS: list[Callable[[Path], dict[str, object]]] = [
    folders_of_other_names,
    no_test,
    class_is_missing,
    number_of_classes,
    classes_in_no_train,
    column_is_missing,
    other_format,
]


@pytest.mark.parametrize("make", CARDS)
def test_mismatched_card_gets_working_command(
    make: Callable[[Path], dict[str, object]], current: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    card = {"name": "zoo", "licence": "none", **make(current)}
    Path("card.yaml").write_text(yaml.safe_dump(card))
    config = {
        "name": "zoo",
        "storage": "storage",
        "stream": {"scenario": "task", "tasks": [{"card": "card.yaml", "role": "base"}]},
        "backbone": {"weights": "none"},
        "methods": {"linear": {}},
    }
    Path("config.yaml").write_text(yaml.safe_dump(config))
    errors = {refusal([command, "config.yaml"], capfd) for command in ("plan", "run")}
    (error,) = errors
    assert " holds " in error
    assert len(error) < 900
    (command,) = [text for text in commands_in(error) if "init" in text]
    paste(command)
    assert cli.main(["plan", config_written(capfd)]) == 0


def test_error_for_missing_source_suggests_similar_path(
    current: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class_folders(current / "my-images", NAMES)
    card = {
        "name": "zoo",
        "licence": "none",
        "classes": list(NAMES),
        "source": {"format": "folder", "path": "my_images"},
    }
    Path("card.yaml").write_text(yaml.safe_dump(card))
    stream = {"scenario": "task", "tasks": [{"card": "card.yaml"}]}
    body = {"name": "zoo", "stream": stream, "methods": {"linear": {}}}
    Path("config.yaml").write_text(yaml.safe_dump(body))
    error = refusal(["plan", "config.yaml"], capfd)
    assert f"did you mean '{current / 'my-images'}'?" in error
