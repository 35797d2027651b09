"""Tests of labels: the class of a table cell, a tar member or a Parquet value."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.data.labels import ClassNames, check_spelling, normalize_label, sort_labels
from workers.errors import UserError


@pytest.mark.parametrize(
    ("value", "label"),
    [
        ("cat", "cat"),
        (" cat ", "cat"),
        (b"cat", "cat"),
        ("ha\u0308rte", "härte"),
        ("3", "3"),
        ("3.0", "3"),
        ("03", "03"),
        ("3.5", "3.5"),
        (3, 3),
        (3.0, 3),
        (3.5, "3.5"),
        (True, 1),
        ("", None),
        ("  ", None),
        ("NaN", None),
        ("null", None),
        ("<NA>", None),
        (float("nan"), None),
        (None, None),
        ("None", "None"),
        ("n/a", "n/a"),
        ([1], None),
    ],
)
def test_a_label_has_one_normal_form(value: Any, label: str | int | None) -> None:
    assert normalize_label(value) == label
    assert type(normalize_label(value)) is type(label)


def test_numeric_label_is_a_class_name_if_configured() -> None:
    names = ClassNames(["1", "2", "0"], "names", "card 'a'")
    assert names.find(1) == "1"
    assert names.find("0") == "0"
    assert names.find("cat") == "cat"


def test_numeric_label_is_a_class_index_if_configured() -> None:
    names = ClassNames(["ant", "bee"], "places", "card 'a'")
    assert names.find(1) == "bee"
    assert names.find("0") == "ant"
    assert names.find("bee") == "bee"
    assert names.find(2) not in ("ant", "bee"), "a number beyond the list is not a class"


@pytest.mark.parametrize("label", [0, "0", 1])
def test_ambiguous_label_number_needs_card_setting(
    label: str | int,
) -> None:
    with pytest.raises(UserError, match=r"source\.numbers"):
        ClassNames(["ant", "bee"], None, "card 'a'").find(label)


def test_numeric_name_equal_to_its_index_is_unambiguous() -> None:
    names = ClassNames(["0", "1"], None, "card 'a'")
    assert names.find(1) == "1"
    assert names.find("0") == "0"


def test_number_matching_two_classes_by_name_and_index_is_refused() -> None:
    with pytest.raises(UserError, match=r"label '1' can be the class '1', or place 1"):
        ClassNames(["1", "2"], None, "card 'a'").find(1)


def test_numeric_text_equal_to_a_class_name_is_that_class() -> None:
    assert ClassNames(["1", "2"], None, "card 'a'").find("1") == "1"


@pytest.mark.parametrize(
    ("labels", "reason"),
    [(["Cat", "cat"], "capitals"), (["1", "01"], "the same number"), (["0", "00"], "number")],
)
def test_two_spellings_of_one_label_are_refused(labels: list[str], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        check_spelling("table.csv", labels)


def test_single_letter_labels_may_differ_only_in_case() -> None:
    check_spelling("letters", ["A", "a", "B", "b"])


def test_numbers_are_sorted_by_value_and_names_by_text() -> None:
    assert sort_labels(["10", "9", "1"]) == ["1", "9", "10"]
    assert sort_labels(["10", "9", "a"]) == ["10", "9", "a"]
