"""`benchmarks.house` counts what its docstring defines, on samples that are counted by hand."""

from __future__ import annotations

from textwrap import dedent

import pytest

from benchmarks.house import main, percentile, rows_of_files, rows_of_rooms, spread
from benchmarks.house_files import FileFigures, measure_file
from benchmarks.house_imports import Project, measure_rooms, rings


def measure(text: str) -> FileFigures:
    """Return the figures of a module with this text."""
    source = dedent(text)
    return measure_file(Project({"pipeline/sample.py": source}), "pipeline/sample.py", source)


def undocumented(**modules: str) -> list[str]:
    """Return the public functions without a docstring in modules of `pipeline`, by name."""
    sources = {f"pipeline/{name}.py": dedent(text) for name, text in modules.items()}
    project = Project(sources)
    names: list[str] = []
    for path, text in sources.items():
        figures = measure_file(project, path, text)
        names += [finding.text.split("`")[1] for finding in figures.undocumented]
    return names


def rooms_with(**modules: str) -> list[str]:
    """Return what misses a goal of rooms, for modules by dotted name with `__` for each dot."""
    sources = {f"{name.replace('__', '/')}.py": text for name, text in modules.items()}
    findings: list[str] = []
    for row in rows_of_rooms(measure_rooms(Project(sources))):
        if not row.is_met:
            findings += [f"{row.name}: {finding}" for finding in row.findings]
    return findings


def test_a_line_of_code_has_the_tokens_that_start_on_it() -> None:
    figures = measure(
        '''
        """A docstring is no code."""

        x = f(1)  # nor is a comment
        y = """one
        token"""
        '''
    )
    assert figures.tokens == [6, 3]
    assert figures.lines == 6


def test_lines_over_100_columns_are_listed_in_code_and_in_prose() -> None:
    figures = measure(f"# {'a' * 98}\n# {'a' * 99}\nx = '{'b' * 96}'\n")
    assert [finding.line for finding in figures.long_lines] == [2, 3]


@pytest.mark.parametrize(
    ("expression", "comprehensions", "nested"),
    [
        ("[x for x in y]", 1, 0),
        ("{x: 1 for x in y if x}", 1, 0),
        ("sum(x for x in y)", 1, 0),
        ("[a for a in b] + [c for c in d]", 2, 0),
        ("[x for y in z for x in y]", 1, 1),
        ("[[a for a in b] for b in c]", 2, 1),
        ("[x for x in [a for a in b]]", 2, 1),
    ],
)
def test_a_comprehension_is_nested_in_another_one_or_by_a_second_for(
    expression: str, comprehensions: int, nested: int
) -> None:
    figures = measure(expression)
    assert len(figures.comprehensions) == comprehensions
    assert len(figures.nested) == nested


def test_conditional_expressions_are_counted_each() -> None:
    assert len(measure("x = 1 if a else 2 if b else 3").conditionals) == 2
    assert measure("if a:\n    x = 1\n").conditionals == []


def test_a_local_name_counts_once_for_each_function_that_binds_it() -> None:
    figures = measure(
        """
        found = 1

        class A:
            def f(self, place, *own, _hidden=0, **others):
                for here, there in place:
                    found = here
                    found = there
                with a as mine:
                    return [told for told in mine]
        """
    )
    names = [finding.text.split("`")[1] for finding in figures.empty_names]
    assert sorted(names) == ["found", "here", "mine", "others", "own", "place", "there", "told"]
    assert figures.num_names == 8


def test_docstrings_are_asked_of_public_functions_that_are_not_nested() -> None:
    text = '''
        def bare():
            def nested(): ...

        def documented():
            """Return nothing."""

        def _private(): ...

        class A:
            def __init__(self): ...
            def method(self): ...

        class _B:
            def method(self): ...
        '''
    assert undocumented(sample=text) == ["bare", "A.method"]


def test_an_override_needs_no_docstring_of_its_own_wherever_its_base_is() -> None:
    bases = """
        class Base:
            hook: int
            def method(self):
                "Return."
        """
    middle = """
        from pipeline import bases
        class Middle(bases.Base): ...
        """
    sample = """
        from torch import nn
        from pipeline.middle import Middle as M
        class A(M[int]):
            def method(self): ...
            def hook(self): ...
            def new(self): ...
        class B(nn.Module):
            def forward(self, x): ...
        """
    assert undocumented(bases=bases, middle=middle, sample=sample) == ["A.new"]


def test_types_are_counted_without_self() -> None:
    figures = measure("class A:\n    def f(self, a: int, *b, c=1) -> int: ...\n")
    assert figures.num_arguments == 3
    assert figures.num_typed_arguments == 1
    assert figures.num_typed_returns == 1


def test_rings_are_found_through_other_nodes() -> None:
    arrows = [("a", "b"), ("b", "c"), ("c", "a"), ("c", "d"), ("e", "e")]
    assert rings(arrows) == [["a", "b", "c"]]
    assert rings([("a", "b"), ("b", "c")]) == []


def test_imports_count_wherever_they_stand() -> None:
    ring = "rings of modules: pipeline.data.a <-> pipeline.data.b"
    for text in (
        "from pipeline.data import a",
        "def f():\n    import pipeline.data.a",
        "if TYPE_CHECKING:\n    from pipeline.data.a import x",
        "importlib.import_module('pipeline.data.a')",
    ):
        assert rooms_with(pipeline__data__a="import pipeline.data.b", pipeline__data__b=text) == [
            ring
        ]


def test_an_arrow_to_a_room_above_is_upward_and_so_is_one_out_of_the_packages() -> None:
    assert rooms_with(pipeline__cli="import pipeline.config", pipeline__config="") == []
    assert rooms_with(pipeline__cli="", pipeline__config="import pipeline.cli") == [
        "upward arrows: pipeline.config:1 imports pipeline.cli"
    ]
    assert rooms_with(workers__job="import pipeline.config", pipeline__config="") == [
        "upward arrows: workers.job:1 imports pipeline.config"
    ]
    assert rooms_with(workers__job="import benchmarks.feed", benchmarks__feed="") == [
        "upward arrows: workers.job:1 imports benchmarks.feed"
    ]
    assert rooms_with(benchmarks__feed="import workers.job", workers__job="") == []


def test_a_room_that_has_no_floor_yet_is_reported() -> None:
    assert rooms_with(pipeline__attic="") == ["rooms in no floor: pipeline.attic"]


def test_a_goal_that_is_missed_names_where() -> None:
    body = "    x = 1\n" * 100
    rows = rows_of_files([measure(f"def f():\n{body}")])
    missed = {
        row.name: [str(finding) for finding in row.findings] for row in rows if not row.is_met
    }
    assert missed == {
        "function lines, median / p95 / max": ["pipeline/sample.py:1: `f` has 101 lines"],
        "public functions with a docstring, %": ["pipeline/sample.py:1: `f` has no docstring"],
    }


def test_the_95th_percentile_is_a_value_that_was_measured() -> None:
    assert percentile(list(range(1, 101))) == 95
    assert percentile([7]) == 7
    assert spread([3, 1, 2]) == "2 / 3 / 3"


def test_this_project_meets_every_goal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0, capsys.readouterr().out
