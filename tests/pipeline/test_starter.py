"""Tests of `init` and of commands on data: the written files, overwriting, and printed commands."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

from pipeline import cli
from pipeline.config import settings as configs
from pipeline.data import card_files, starter
from pipeline.data.proposal import task_sizes
from tests.image_data import class_folders, make_image
from workers.errors import UserError

NAMES = ("ant", "bee", "cow", "dog", "eel")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty current folder; tests put data next to it."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def init(*paths: str, name: str = "") -> list[str]:
    """Write a card and a config, and return the printed lines."""
    lines: list[str] = []
    starter.start(paths, "accrete", lines.append, name=name)
    return "\n".join(lines).splitlines()


def test_init_writes_a_valid_config_and_card(here: Path) -> None:
    class_folders(here.parent / "zoo", NAMES, 4)
    lines = init("../zoo")
    config = configs.load("zoo.yaml")
    assert [entry.classes for entry in config.stream.tasks] == [NAMES[:3], NAMES[3:]]
    assert [entry.role for entry in config.stream.tasks] == ["base", "task"]
    card = card_files.load_card_file("zoo-card.yaml")
    assert card.classes == NAMES
    assert card.source.path == str(here.parent / "zoo")
    assert card.test_fraction == 0.2
    assert lines[0] == "zoo: class folders"
    assert "5 classes: ant, bee, cow, dog, eel" in lines[1]
    assert lines[-2:] == ["wrote zoo-card.yaml and zoo.yaml", "preview: zoo-preview.html"]
    assert "<html" in Path("zoo-preview.html").read_text()


def test_written_files_have_comments_and_short_lines(here: Path) -> None:
    class_folders(here.parent / "zoo", NAMES, 4)
    init("../zoo")
    for file in ("zoo-card.yaml", "zoo.yaml"):
        lines = Path(file).read_text().splitlines()
        assert all(len(line) <= 110 for line in lines)
        assert sum("#" in line for line in lines) >= 5
    assert "classes: from_source" in Path("zoo-card.yaml").read_text()


def test_relative_paths_are_resolved_from_the_file_naming_them(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class_folders(here.parent / "zoo", NAMES, 4)
    init("../zoo")
    monkeypatch.chdir(here.parent)
    config = configs.load("here/zoo.yaml")
    card = card_files.load_card_file(config.stream.tasks[0].card)
    assert card.source.path == str(here.parent / "zoo")


def test_card_next_to_data_and_path_entries_work(here: Path) -> None:
    class_folders(here / "zoo" / "train", NAMES)
    class_folders(here / "zoo" / "test", NAMES)
    (here / "zoo" / "card.yaml").write_text(
        "name: zoo\nlicence: none\nclasses: from_source\nnum_classes: 5\n"
        "source: {format: folder, path: .}\n"
    )
    (here / "run.yaml").write_text(
        "name: x\nstream: {tasks: [./zoo, {card: zoo/card.yaml, name: y}]}\nmethods: {linear: {}}\n"
    )
    config = configs.load("run.yaml", with_methods=False)
    assert [card_files.load_card_file(entry.card).source.path for entry in config.stream.tasks] == [
        str(here / "zoo")
    ] * 2


def test_each_of_several_data_sets_becomes_a_task(here: Path) -> None:
    class_folders(here.parent / "zoo", NAMES, 4)
    class_folders(here.parent / "b" / "zoo", ("x", "y"), 4)
    init("../zoo", "../b/zoo")
    tasks = configs.load("zoo.yaml").stream.tasks
    assert [task.name for task in tasks] == ["zoo", "zoo-2"]
    assert [task.role for task in tasks] == ["base", "task"]
    assert card_files.load_card_file(tasks[1].card).classes == ("x", "y")


def test_data_sets_with_the_same_classes_are_domains(here: Path) -> None:
    for domain in ("photo", "art", "sketch"):
        class_folders(here.parent / "animals" / domain, NAMES, 4)
    lines = init(*(f"../animals/{domain}" for domain in ("art", "photo", "sketch")))
    assert any("all have the same classes, so they are domains" in line for line in lines)
    config = configs.load("art.yaml")
    assert config.stream.scenario == "domain"
    assert [(task.name, task.role) for task in config.stream.tasks] == [
        ("art", "task"),
        ("photo", "task"),
        ("sketch", "task"),
    ]
    assert {*config.methods} == {"finetune", "replay", "joint", "ranpac"}
    assert "5 classes in 3 tasks" in Path("art.yaml").read_text()


def test_data_sets_with_the_same_numeric_classes_become_tasks(here: Path) -> None:
    """The same number can mean different things in each data set."""
    for name in ("a", "b"):
        class_folders(here.parent / name, ("0", "1", "2"), 4)
    init("../a", "../b")
    assert configs.load("a.yaml").stream.scenario == "task"


def test_files_for_several_data_sets_are_named_after_their_folder(here: Path) -> None:
    class_folders(here.parent / "zoos" / "a", NAMES)
    class_folders(here.parent / "zoos" / "b", ("elk", "fly", "gnu"))
    lines = init("../zoos")
    assert lines[-2:] == [
        "wrote zoos-a-card.yaml, zoos-b-card.yaml and zoos.yaml",
        "preview: zoos-preview.html",
    ]


def test_names_that_yaml_would_misread_are_quoted(here: Path) -> None:
    names = ("#1", "010", "1e3", "a: b", "no", "null", "true", "x'\"y", "- z", "${HOME}", "größe")
    class_folders(here.parent / "zoo # 1", names)
    init("../zoo # 1")
    config = configs.load("zoo-1.yaml")
    written = [name for task in config.stream.tasks for name in task.classes or ()]
    assert written == sorted(names)
    assert card_files.load_card_file("zoo-1-card.yaml").classes == tuple(sorted(names))


@pytest.mark.parametrize("file", ["zoo.yaml", "zoo-card.yaml"])
def test_existing_file_with_other_content_is_not_overwritten(file: str, here: Path) -> None:
    class_folders(here.parent / "zoo", NAMES)
    Path(file).write_text("mine")
    with pytest.raises(UserError, match=f"{file} is in the current folder with another content"):
        init("../zoo")
    assert os.listdir() == [file]
    assert Path(file).read_text() == "mine"


def test_dangling_link_is_not_written_through(here: Path) -> None:
    class_folders(here.parent / "zoo", NAMES)
    os.symlink(here.parent / "target", "zoo.yaml")
    with pytest.raises(UserError, match=r"zoo.yaml is in the current folder"):
        init("../zoo")
    assert not (here.parent / "target").exists()


def test_repeated_init_changes_nothing(here: Path) -> None:
    class_folders(here.parent / "zoo", NAMES)
    init("../zoo")
    before = [Path(file).read_bytes() for file in sorted(os.listdir())]
    assert init("../zoo")[-2:] == [
        "unchanged: zoo-card.yaml and zoo.yaml",
        "preview: zoo-preview.html",
    ]
    assert [Path(file).read_bytes() for file in sorted(os.listdir())] == before


def test_command_on_data_uses_the_edited_config(here: Path) -> None:
    class_folders(here.parent / "zoo", NAMES)
    init("../zoo")
    edited = Path("zoo.yaml").read_text().replace("seed: 0", "seed: 7")
    Path("zoo.yaml").write_text(edited)
    lines: list[str] = []
    assert starter.find_or_write_config(["../zoo"], "accrete", lines.append) == "zoo.yaml"
    assert lines[-1] == "zoo.yaml exists and is used unchanged"
    assert Path("zoo.yaml").read_text() == edited


def test_path_of_a_file_is_taken_as_config(here: Path) -> None:
    said: list[str] = []
    assert (
        starter.find_or_write_config(["configs/demo.yaml"], "accrete", said.append)
        == "configs/demo.yaml"
    )
    Path("plain").write_text("x")
    assert starter.find_or_write_config(["plain"], "accrete", said.append) == "plain"
    assert said == []


def test_config_given_together_with_data_is_refused(here: Path) -> None:
    with pytest.raises(UserError, match=r"a.yaml is a config, given together with 1 other path"):
        starter.find_or_write_config(["a.yaml", "zoo"], "accrete", print)


@pytest.mark.parametrize("path", [".", "..", str(Path("..") / "zoo")])
def test_init_in_the_image_folder_is_refused_with_working_command(
    path: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zoo = class_folders(here.parent / "zoo", NAMES)
    below = zoo / "ant"
    monkeypatch.chdir(below if path == ".." else zoo)
    before = sorted(os.listdir())
    with pytest.raises(UserError, match="current folder is that of the images") as error:
        init(path)
    assert sorted(os.listdir()) == before
    command = str(error.value).split("`")[1]
    folder, _, rest = command.removeprefix("cd ").partition(" && ")
    monkeypatch.chdir(shlex.split(folder)[0])
    assert cli.main(shlex.split(rest)[1:]) == 0


def test_init_works_inside_a_folder_of_split_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class_folders(tmp_path / "zoo" / "train", NAMES)
    class_folders(tmp_path / "zoo" / "test", NAMES)
    monkeypatch.chdir(tmp_path / "zoo")
    init(".")
    assert card_files.load_card_file("zoo-card.yaml").source.path == str(tmp_path / "zoo")


@pytest.mark.parametrize("num_classes", [2, 3, 4, 5, 9, 10, 101, 1000])
def test_all_classes_are_in_tasks_of_at_least_two_classes(num_classes: int) -> None:
    sizes = task_sizes(num_classes)
    assert sum(sizes) == num_classes
    assert min(sizes) >= 2
    assert sizes[0] == max(sizes)
    assert len(sizes) <= 5


def test_init_plan_and_the_printed_command_work(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class_folders(here.parent / "my zoo", NAMES, 4)
    assert cli.main(["init", "../my zoo"]) == 0
    *_, next_line, last = capsys.readouterr().out.splitlines()
    assert last == "preview: my-zoo-preview.html"
    assert next_line.startswith("next: ")
    command = next_line.removeprefix("next: ")
    assert shlex.split(command)[-2:] == ["run", "my-zoo.yaml"]
    assert cli.main(["plan", *shlex.split(command)[-1:]]) == 0
    first = capsys.readouterr().out
    assert "miss  data/my-zoo" in first
    assert cli.main(["plan", "../my zoo"]) == 0
    assert capsys.readouterr().out.endswith(first)


def test_bad_data_gives_a_one_line_error_and_no_files(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_image(here.parent / "data" / "a.png", 1)
    for command in ("init", "run", "plan", "ingest"):
        assert cli.main([command, "../data"]) == 2
        error = capsys.readouterr().err
        assert re.fullmatch(r"accrete: .*1 image in no folder of a class.*\n", error)
    assert os.listdir() == []
