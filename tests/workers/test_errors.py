"""Tests of error texts: one line, and never empty."""

from __future__ import annotations

import pytest

from workers.errors import describe_error


@pytest.mark.parametrize(
    ("error", "whole", "first_line"),
    [
        (ValueError("a\n  b\tc\n"), "a b c", "a"),
        (ValueError("\n a  b\nc"), "a b c", "a b"),
        (KeyError(), "KeyError", "KeyError"),
        (OSError(" \n "), "OSError", "OSError"),
    ],
)
def test_an_error_is_described_in_one_line(error: Exception, whole: str, first_line: str) -> None:
    assert describe_error(error) == whole
    assert describe_error(error, only_first_line=True) == first_line
