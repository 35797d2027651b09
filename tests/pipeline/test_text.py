"""Tests of text formatting: the examples in docstrings, and durations."""

from __future__ import annotations

import doctest

import pytest

from pipeline.config import text


def test_docstring_examples_of_formatters_pass() -> None:
    result = doctest.testmod(text)
    assert result.attempted >= 5
    assert result.failed == 0


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "0.0 s"),
        (59.94, "59.9 s"),
        (59.95, "1 min 00 s"),
        (119.6, "2 min 00 s"),
        (3599.6, "1 h 00 min"),
        (90_061, "25 h 01 min"),
    ],
)
def test_durations_carry_into_the_next_unit(seconds: float, expected: str) -> None:
    assert text.format_seconds(seconds) == expected
