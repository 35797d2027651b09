"""The example of docs/new-method.md is a method that keeps its promises."""

from __future__ import annotations

import re
from types import ModuleType

import pytest
from checks import PROMISES
from stage_lab import Lab

from docs.site.pages import text_of
from workers.methods import METHODS
from workers.methods.base import Method

PROMISED = (
    "old_answers_stay",
    "the_order_of_tasks_changes_nothing",
    "it_starts_as_the_backbone",
    "it_learns",
)


@pytest.fixture(scope="module")
def example() -> type[Method]:
    """The class that the page's block of Python defines."""
    blocks = re.findall(r"```python\n(.*?)```", text_of("docs/new-method.md"), re.DOTALL)
    module = ModuleType("norms")
    exec(compile(blocks[0], "docs/new-method.md", "exec", dont_inherit=True), module.__dict__)
    norms: type[Method] = module.Norms
    return norms


@pytest.mark.parametrize("promise", PROMISED)
def test_the_example_keeps(
    promise: str, example: type[Method], lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHODS, example.name, example)
    assert PROMISES[promise].applies(example)
    PROMISES[promise].check(lab, example.name, "adamw")
