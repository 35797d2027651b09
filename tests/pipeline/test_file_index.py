"""Tests of the file index, which finds the one file that a row of a table names."""

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


def test_exact_paths_take_precedence() -> None:
    files = ["images/1.png", "images/2.png", "copy/images/1.png"]
    rows = rows_of(("images/1.png", "a"), ("images/2.png", "b"))
    assert patterns(rows, files) == [("{}",)]


def test_file_names_are_found_in_their_common_folder() -> None:
    rows = rows_of(("1", "a"), ("2", "b"))
    assert patterns(rows, ["images/1.png", "images/2.png"]) == [("images/{}.png",)]


def test_ambiguous_names_are_resolved_by_the_label_folder() -> None:
    files = ["cat/1.png", "dog/1.png", "dog/2.png"]
    rows = rows_of(("1.png", "cat"), ("1.png", "dog"), ("2.png", "dog"))
    assert patterns(rows, files) == [("{label}/{}",)]


def test_ambiguous_names_are_resolved_by_the_split_folder() -> None:
    files = ["train/1.png", "test/1.png"]
    rows = rows_of(("1.png", "cat", "train"), ("1.png", "dog", "test"))
    assert patterns(rows, files) == [("{split}/{}",)]
    (found,) = find_placements(rows, FileIndex(files), "", BASE)
    assert found.files == ("train/1.png", "test/1.png")


def test_all_folders_that_contain_every_name_are_returned() -> None:
    files = [f"{folder}/{name}.png" for folder in ("left", "right") for name in "12"]
    assert len(patterns(rows_of(("1.png", "a"), ("2.png", "b")), files)) == 2


def test_ambiguous_names_without_a_distinguishing_column_match_nothing() -> None:
    files = ["x/1.png", "y/1.png"]
    assert patterns(rows_of(("1.png", "a"), ("1.png", "b")), files) == []


def test_table_can_be_in_a_different_folder_than_the_images() -> None:
    rows = rows_of(("1.png", "a"), ("2.png", "b"))
    assert patterns(rows, ["img/1.png", "img/2.png"], "meta") == [("../img/{}",)]


@pytest.mark.parametrize(
    "text", ["C:\\Users\\me\\set\\img\\1.png", "/home/me/set/img/1.png", "set/img/1.png"]
)
def test_paths_from_another_machine_are_mapped_to_the_source(text: str) -> None:
    finder = FileFinder(FileIndex(["img/1.png", "img/2.png"]), "", BASE, ["{}"])
    rows = rows_of((text, "a"), (text.replace("1.", "2."), "b"))
    finder.find_moved_folders(rows)
    assert [finder.find(row)[0] for row in rows] == [["img/1.png"], ["img/2.png"]]


def test_ambiguous_paths_from_another_machine_are_not_mapped() -> None:
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
def test_each_path_resolves_to_a_source_file_or_a_problem(
    text: str, names: list[str], problem: str | None
) -> None:
    finder = FileFinder(FileIndex(["a/1.png", "b/2.png"]), "", BASE, ["{}"])
    assert finder.find(NamedRow(text, "x", "")) == (names, problem)


def test_several_patterns_return_all_matching_files() -> None:
    finder = FileFinder(FileIndex(["a/1.png", "b/1.png"]), "", BASE, ["a/{}", "b/{}"])
    assert finder.find(NamedRow("1.png", "x", "")) == (["a/1.png", "b/1.png"], None)


def test_recursive_pattern_finds_a_name_in_any_folder() -> None:
    finder = FileFinder(FileIndex(["a/x/1.png", "b/2.png"]), "", BASE, ["**/{}"])
    assert finder.find(NamedRow("1.png", "x", ""))[0] == ["a/x/1.png"]


def test_paths_that_differ_in_case_are_distinguished() -> None:
    index = FileIndex(["a/1.png", "A/1.png"])
    assert index.find_path("A/1.png") == ["A/1.png"]
