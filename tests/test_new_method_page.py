"""Tests of docs/new-method.md: its imports work, and its example keeps a method's promises."""

from __future__ import annotations

import re
from types import ModuleType

import pytest

from docs.site.pages import text_of
from pipeline.testing.lab import Lab
from pipeline.testing.promises import PROMISES
from workers.methods import METHODS
from workers.methods.base import Method

PAGE = text_of("docs/new-method.md")
PROMISED = (
    "old_answers_stay",
    "the_order_of_tasks_changes_nothing",
    "it_starts_as_the_backbone",
    "it_learns",
)


@pytest.fixture(scope="module")
def example() -> type[Method]:
    """Return the class that the first Python block of the page defines."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    module = ModuleType("norms")
    exec(compile(blocks[0], "docs/new-method.md", "exec", dont_inherit=True), module.__dict__)
    norms: type[Method] = module.Norms
    return norms


def test_the_imports_of_the_page_work() -> None:
    imports = re.findall(r"^from workers\S* import (?:\([^)]*\)|.+)$", PAGE, re.MULTILINE)
    assert any("workers.methods.bases import" in text for text in imports)
    for text in imports:
        exec(text, {})


@pytest.mark.parametrize("promise", PROMISED)
def test_example_method_keeps_promise(
    promise: str, example: type[Method], lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHODS, example.name, example)
    assert PROMISES[promise].applies(example)
    PROMISES[promise].check(lab, example.name, "adamw")
