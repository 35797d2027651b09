"""Tests of the words that name train, validation and test images."""

from __future__ import annotations

import pytest

from pipeline.data.cards import Card
from pipeline.data.formats import folder
from pipeline.data.listing import Entry
from pipeline.data.splits import (
    SplitUnclear,
    find_role,
    parse_flag_column,
    parse_flag_values,
    parse_role,
    parse_split_words,
)


@pytest.mark.parametrize(
    ("word", "role"),
    [
        ("train", "train"),
        ("Training", "train"),
        ("train_set", "train"),
        ("trainval", "train"),
        ("tr", "train"),
        ("learn", "train"),
        ("valid", "val"),
        ("dev", "val"),
        ("Tune", "val"),
        ("tst", "test"),
        ("TEST", "test"),
        ("holdout", "held out"),
        ("eval", "held out"),
        ("trains", None),
        ("contest", None),
        ("valley", None),
        ("2", None),
    ],
)
def test_split_word_is_parsed_to_its_role(word: str, role: str | None) -> None:
    assert parse_role(word) == role


@pytest.mark.parametrize(
    ("name", "role"),
    [("seg_train", "train"), ("TestImages", "test"), ("train_or_test", None), ("cats", None)],
)
def test_one_split_word_in_a_name_gives_its_role(name: str, role: str | None) -> None:
    assert find_role(name) == role


def test_validation_split_serves_as_test_split_if_none_exists() -> None:
    assert parse_split_words(["train", "val"]).splits == {"train": ["train"], "test": ["val"]}
    found = parse_split_words(["train", "val", "test"]).splits
    assert found == {"train": ["train"], "val": ["val"], "test": ["test"]}


def test_held_out_split_serves_as_test_unless_test_exists() -> None:
    assert parse_split_words(["train", "eval"]).splits == {"train": ["train"], "test": ["eval"]}
    found = parse_split_words(["train", "valid", "holdout"]).splits
    assert found == {"train": ["train"], "val": ["valid"], "test": ["holdout"]}
    with pytest.raises(SplitUnclear, match="'eval' beside 'test'"):
        parse_split_words(["train", "test", "eval"])


def test_unknown_split_words_are_listed() -> None:
    assert parse_split_words(["train", "extra", "test"]).unknown == ["extra"]


@pytest.mark.parametrize(
    ("column", "values", "splits"),
    [
        ("is_train", ["0", "1"], {"train": ["1"], "test": ["0"]}),
        ("isTest", ["False", "True"], {"train": ["False"], "test": ["True"]}),
        ("is_train", ["yes", "no", "maybe"], None),
    ],
)
def test_flag_column_is_parsed_into_train_and_test_splits(
    column: str, values: list[str], splits: dict[str, list[str]] | None
) -> None:
    role = parse_flag_column(column)
    assert role is not None
    found = parse_flag_values(role, values)
    assert (found.splits if found else None) == splits


def test_split_may_select_files_of_a_folder_by_pattern() -> None:
    """The files of one folder can then have different splits."""
    names = ["cat/other.png", "cat/train-1.png", "cat/other-2.png", "cat/train-3.png"]
    source = {"format": "folder", "path": "raw", "splits": {"train": "*/train*"}}
    body = {"name": "a", "licence": "MIT", "classes": ["cat", "dog"], "source": source}
    found = folder.labelled_entries(Card.model_validate(body), [Entry(name, 10) for name in names])
    assert [one.entry.name for one in found] == ["cat/train-1.png", "cat/train-3.png"]
