"""A row of a table names exactly one file, or the reading is refused."""

from __future__ import annotations

import pytest

from pipeline.data.file_index import (
    ADDRESS,
    NO_FILE,
    NO_PATH,
    FileFinder,
    FileIndex,
    NamedRow,
    find_placements,
)

BASE = "/data/set"


def rows_of(*cells: tuple[str, str] | tuple[str, str, str]) -> list[NamedRow]:
    return [NamedRow(cell[0], cell[1], cell[2] if len(cell) > 2 else "") for cell in cells]


def patterns(rows: list[NamedRow], files: list[str], folder: str = "") -> list[tuple[str, ...]]:
    return [found.patterns for found in find_placements(rows, FileIndex(files), folder, BASE)]


def test_paths_as_they_stand_go_before_all_else() -> None:
    files = ["images/1.png", "images/2.png", "copy/images/1.png"]
    rows = rows_of(("images/1.png", "a"), ("images/2.png", "b"))
    assert patterns(rows, files) == [("{}",)]


def test_names_in_one_folder_are_found_there() -> None:
    rows = rows_of(("1", "a"), ("2", "b"))
    assert patterns(rows, ["images/1.png", "images/2.png"]) == [("images/{}.png",)]


def test_names_in_folders_of_labels_need_the_label() -> None:
    files = ["cat/1.png", "dog/1.png", "dog/2.png"]
    rows = rows_of(("1.png", "cat"), ("1.png", "dog"), ("2.png", "dog"))
    assert patterns(rows, files) == [("{label}/{}",)]


def test_names_in_folders_of_splits_need_the_split() -> None:
    files = ["train/1.png", "test/1.png"]
    rows = rows_of(("1.png", "cat", "train"), ("1.png", "dog", "test"))
    assert patterns(rows, files) == [("{split}/{}",)]
    (found,) = find_placements(rows, FileIndex(files), "", BASE)
    assert found.files == ("train/1.png", "test/1.png")


def test_two_folders_that_could_hold_the_images_are_both_returned() -> None:
    files = [f"{folder}/{name}.png" for folder in ("left", "right") for name in "12"]
    assert len(patterns(rows_of(("1.png", "a"), ("2.png", "b")), files)) == 2


def test_a_name_in_two_folders_that_no_column_tells_apart_has_no_reading() -> None:
    files = ["x/1.png", "y/1.png"]
    assert patterns(rows_of(("1.png", "a"), ("1.png", "b")), files) == []


def test_the_table_may_lie_in_a_folder_of_its_own() -> None:
    rows = rows_of(("1.png", "a"), ("2.png", "b"))
    assert patterns(rows, ["img/1.png", "img/2.png"], "meta") == [("../img/{}",)]


@pytest.mark.parametrize(
    "text", ["C:\\Users\\me\\set\\img\\1.png", "/home/me/set/img/1.png", "set/img/1.png"]
)
def test_folders_of_another_machine_are_exchanged_for_one_of_the_source(text: str) -> None:
    finder = FileFinder(FileIndex(["img/1.png", "img/2.png"]), "", BASE, ["{}"])
    rows = rows_of((text, "a"), (text.replace("1.", "2."), "b"))
    finder.find_moved_folders(rows)
    assert [finder.find(row)[0] for row in rows] == [["img/1.png"], ["img/2.png"]]


def test_folders_of_another_machine_that_can_be_two_here_are_not_exchanged() -> None:
    finder = FileFinder(FileIndex(["a/img/1.png", "b/img/1.png"]), "", BASE, ["{}"])
    row = NamedRow("/home/me/img/1.png", "a", "")
    finder.find_moved_folders([row])
    assert finder.find(row) == ([], NO_FILE)


@pytest.mark.parametrize(
    ("text", "names", "problem"),
    [
        ("a/1.png", ["a/1.png"], None),
        ("./a/../a/1.png", ["a/1.png"], None),
        ("A/1.PNG", ["a/1.png"], None),
        ("a\\1.png", ["a/1.png"], None),
        ("../set/a/1.png", [], NO_FILE),
        ("/etc/a/1.png", [], NO_FILE),
        (f"{BASE}/a/1.png", ["a/1.png"], None),
        ("https://host/a/1.png", [], ADDRESS),
        ("", [], NO_PATH),
        ("a/1.png\0", [], NO_PATH),
    ],
)
def test_a_row_leads_to_a_file_of_the_source_or_to_a_problem(
    text: str, names: list[str], problem: str | None
) -> None:
    finder = FileFinder(FileIndex(["a/1.png", "b/2.png"]), "", BASE, ["{}"])
    assert finder.find(NamedRow(text, "x", "")) == (names, problem)


def test_a_list_of_patterns_finds_all_that_are_there() -> None:
    finder = FileFinder(FileIndex(["a/1.png", "b/1.png"]), "", BASE, ["a/{}", "b/{}"])
    assert finder.find(NamedRow("1.png", "x", "")) == (["a/1.png", "b/1.png"], None)


def test_anywhere_finds_a_name_in_any_folder() -> None:
    finder = FileFinder(FileIndex(["a/x/1.png", "b/2.png"]), "", BASE, ["**/{}"])
    assert finder.find(NamedRow("1.png", "x", ""))[0] == ["a/x/1.png"]


def test_capitals_tell_two_files_apart() -> None:
    index = FileIndex(["a/1.png", "A/1.png"])
    assert index.find_path("A/1.png") == ["A/1.png"]
