"""Parametrized tests of which `make test` runs a few cases, and `make test-all` all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """Return the cases of a parametrized test, all but some of them marked as slow."""
    return [
        case
        if case in kept
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]
