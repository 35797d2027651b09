"""How readable the source is, in figures: density, names, docstrings, rooms and their imports.

`python -m benchmarks.house [--by-file] [--worst N] [PATH ...]`; seconds, standard library only. It
exits with 1 where a goal is missed, and names the places. `--by-file` lists the figures of each
file, worst first; `--worst N` lists the first N of them. With paths, only files below them are
measured, every finding is listed, and rooms are left out.

Measured are `pipeline`, `workers` and `benchmarks`; beside them `tests`, which have no goal.

- file lines: all physical lines. Files without code, such as an `__init__.py` of one docstring,
  are left out.
- function lines: from `def` to the last line of the body, decorators not included. Methods and
  nested functions count each.
- lines over 100 columns: code, comments and docstrings alike.
- code line: a line on which a token of code starts. Comments, docstrings, indents and ends of
  lines are no tokens of code.
- comprehension: a list, set, dict or generator expression. It is nested where another one
  encloses it, or where it has more than one `for`; then it counts in both rows.
- conditional expression: `a if b else c`.
- local name: an argument, or a name bound inside a function (by assignment, loop, `with`, `except`,
  `case`, `:=` or a comprehension), once per function. `self`, `cls` and names that start with `_`
  are not counted. Those in `EMPTY_NAMES` say nothing.
- public function: its name, and that of its class, start without `_`; it is not nested in another
  function, overrides nothing, and is no setter and no overload. It overrides where a base class
  has an attribute of its name; bases are followed through the imports of this project.
- typed: arguments of `def` with an annotation, and functions with one for what they return.
- room: a module or a folder directly in `pipeline` or `workers`, but `__init__` and `__main__`.
- arrow: one room imports another. Every import counts, also inside functions, under
  `TYPE_CHECKING`, and by `import_module` with a literal name. What a package's `__init__` imports
  counts for that module alone.
- ring: modules, or rooms, that import each other, directly or through others.
- upward arrow: an import from a room to one that `FLOORS` lists above it, from `workers` to
  `pipeline`, or from one of both to `benchmarks` or `tests`.
- p95: the smallest value that at least 95 % of all values do not exceed.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from benchmarks.house_files import MAX_FUNCTION_LINES, FileFigures, Finding, measure_file
from benchmarks.house_imports import FLOORS, Project, RoomFigures, measure_rooms

REPOSITORY = Path(__file__).resolve().parent.parent
SOURCE_FOLDERS = ["pipeline", "workers", "benchmarks"]
TEST_FOLDER = "tests"

# The goals.
MAX_FILE_LINES_P95 = 600
MAX_FUNCTION_LINES_P95 = 40
MAX_TOKENS = 9.0
MAX_COMPREHENSIONS = 40.0
MAX_NESTED = 2.0
MAX_CONDITIONALS = 25.0
MAX_EMPTY_NAMES = 0.5
MIN_DOCUMENTED = 90.0
MAX_ROOMS = 15

MAX_PRINTED = 25  # lines for each goal that is missed


@dataclass(frozen=True)
class Row:
    """A line of the table: a figure as text, its goal, and what to mend where it is missed."""

    name: str
    value: str
    goal: str = ""
    is_met: bool = True
    findings: Sequence[object] = ()


def percentile(values: Sequence[float], share: float = 0.95) -> float:
    """Return the smallest value that at least this share of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0


def spread(values: Sequence[int]) -> str:
    """Return median, 95th percentile and maximum as text."""
    if not values:
        return "none"
    return f"{statistics.median(values):.0f} / {percentile(values):.0f} / {max(values)}"


def percent(part: int, whole: int) -> float:
    """Return a share in percent, 0 of nothing."""
    return 100 * part / whole if whole else 0.0


def per_thousand(count: int, lines: int) -> float:
    """Return how many there are in 1000 lines of code."""
    return 1000 * count / lines if lines else 0.0


def gather(files: list[FileFigures], kind: str) -> list[Finding]:
    """Return the findings of one kind in all files."""
    findings: list[Finding] = []
    for figures in files:
        findings += getattr(figures, kind)
    return findings


def rows_of_lengths(files: list[FileFigures]) -> list[Row]:
    """Return the rows on the lengths of files, functions, and lines."""
    file_lines = [figures.lines for figures in files if figures.code_lines]
    functions = list(chain.from_iterable(figures.functions for figures in files))
    tokens = list(chain.from_iterable(figures.tokens for figures in files))
    long_lines = gather(files, "long_lines")
    long_functions = gather(files, "long_functions")
    long_files = [f.path for f in files if f.lines > MAX_FILE_LINES_P95]
    file_p95 = percentile(file_lines)
    function_p95 = percentile(functions)
    tokens_a_line = statistics.mean(tokens or [0])
    return [
        Row("files; lines of code", f"{len(file_lines)}; {len(tokens)}"),
        Row(
            "file lines, median / p95 / max",
            spread(file_lines),
            f"p95 <= {MAX_FILE_LINES_P95}",
            file_p95 <= MAX_FILE_LINES_P95,
            long_files,
        ),
        Row(
            "function lines, median / p95 / max",
            spread(functions),
            f"p95 <= {MAX_FUNCTION_LINES_P95}, max <= {MAX_FUNCTION_LINES}",
            function_p95 <= MAX_FUNCTION_LINES_P95 and not long_functions,
            long_functions,
        ),
        Row("lines over 100 columns", str(len(long_lines)), "0", not long_lines, long_lines),
        Row(
            "tokens in a code line, mean / p95",
            f"{tokens_a_line:.2f} / {percentile(tokens)}",
            f"mean <= {MAX_TOKENS:g}",
            tokens_a_line <= MAX_TOKENS,
        ),
    ]


def rate_row(name: str, findings: list[Finding], code_lines: int, most: float) -> Row:
    """Return the row of something that is counted in 1000 lines of code, worst files first."""
    rate = per_thousand(len(findings), code_lines)
    worst = Counter(finding.path for finding in findings).most_common()
    texts = [f"{path}: {count}" for path, count in worst]
    return Row(name, f"{rate:.1f}", f"<= {most:g}", rate <= most, texts)


def rows_of_expressions(files: list[FileFigures]) -> list[Row]:
    """Return the rows on comprehensions and conditional expressions."""
    code_lines = sum(figures.code_lines for figures in files)
    comprehensions = gather(files, "comprehensions")
    nested = gather(files, "nested")
    conditionals = gather(files, "conditionals")
    return [
        rate_row(
            "comprehensions per 1000 code lines", comprehensions, code_lines, MAX_COMPREHENSIONS
        ),
        rate_row("nested ones", nested, code_lines, MAX_NESTED),
        rate_row("conditional expressions", conditionals, code_lines, MAX_CONDITIONALS),
    ]


def rows_of_names(files: list[FileFigures]) -> list[Row]:
    """Return the rows on names, docstrings and types."""
    empty_names = gather(files, "empty_names")
    undocumented = gather(files, "undocumented")
    num_names = sum(figures.num_names for figures in files)
    num_public = sum(figures.num_public for figures in files)
    num_arguments = sum(figures.num_arguments for figures in files)
    num_functions = sum(len(figures.functions) for figures in files)
    empty_share = percent(len(empty_names), num_names)
    documented = 100 - percent(len(undocumented), num_public)
    arguments = percent(sum(figures.num_typed_arguments for figures in files), num_arguments)
    returns = percent(sum(figures.num_typed_returns for figures in files), num_functions)
    return [
        Row(
            "local names that say nothing, %",
            f"{empty_share:.2f}",
            f"< {MAX_EMPTY_NAMES}",
            empty_share < MAX_EMPTY_NAMES,
            empty_names,
        ),
        Row(
            "public functions with a docstring, %",
            f"{documented:.1f}",
            f">= {MIN_DOCUMENTED:g}",
            documented >= MIN_DOCUMENTED,
            undocumented,
        ),
        Row("arguments / returns typed, %", f"{arguments:.1f} / {returns:.1f}"),
    ]


def rows_of_files(files: list[FileFigures]) -> list[Row]:
    """Return the rows of the table that files make up."""
    return [*rows_of_lengths(files), *rows_of_expressions(files), *rows_of_names(files)]


def none_row(name: str, findings: Sequence[object]) -> Row:
    """Return the row of something of which there is to be none."""
    return Row(name, str(len(findings)), "0", not findings, findings)


def rows_of_rooms(figures: RoomFigures) -> list[Row]:
    """Return the rows of the table that rooms make up."""
    rows = []
    for package in FLOORS:
        rooms = [room for room in figures.rooms if room.startswith(f"{package}.")]
        is_met = len(rooms) <= MAX_ROOMS
        rows.append(Row(f"rooms in {package}", str(len(rooms)), f"<= {MAX_ROOMS}", is_met, rooms))
    return [
        *rows,
        Row("arrows between rooms", str(len(figures.arrows))),
        none_row("rings of modules", [" <-> ".join(ring) for ring in figures.module_rings]),
        none_row("rings of rooms", [" <-> ".join(ring) for ring in figures.room_rings]),
        none_row("upward arrows", figures.upward),
        none_row("rooms in no floor", figures.without_floor),
    ]


def python_files(folders: Iterable[str]) -> dict[str, str]:
    """Return the text of the Python files below folders, by path."""
    sources = {}
    for folder in folders:
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            sources[path.relative_to(REPOSITORY).as_posix()] = path.read_text(encoding="utf-8")
    return sources


def count_to_mend(figures: FileFigures) -> int:
    """Return how many occurrences a file has beyond what the goals allow for its length."""
    thousands = figures.code_lines / 1000
    excess = [
        len(figures.comprehensions) - MAX_COMPREHENSIONS * thousands,
        len(figures.conditionals) - MAX_CONDITIONALS * thousands,
        sum(figures.tokens) / MAX_TOKENS - figures.code_lines,
    ]
    forbidden = (
        figures.nested,
        figures.empty_names,
        figures.undocumented,
        figures.long_lines,
        figures.long_functions,
    )
    return round(sum(max(0.0, count) for count in excess)) + sum(map(len, forbidden))


COLUMNS = "mend lines longest tokens compr/1000 nested cond/1000 empty-names no-docstring over-100"


def print_files(files: list[FileFigures], worst: int | None) -> None:
    """Print the figures of each file, those with most to mend first."""
    titles = COLUMNS.split()
    print("", *titles, "file", sep="  ")
    for figures in sorted(files, key=count_to_mend, reverse=True)[:worst]:
        lines = figures.code_lines
        tokens = statistics.mean(figures.tokens or [0])
        cells = [
            count_to_mend(figures),
            figures.lines,
            max(figures.functions, default=0),
            f"{tokens:.1f}",
            round(per_thousand(len(figures.comprehensions), lines)),
            len(figures.nested),
            round(per_thousand(len(figures.conditionals), lines)),
            len(figures.empty_names),
            len(figures.undocumented),
            len(figures.long_lines),
        ]
        padded = [f"{cell:>{len(title)}}" for cell, title in zip(cells, titles, strict=True)]
        print("", *padded, figures.path, sep="  ")


def print_table(rows: list[Row], test_rows: list[Row]) -> None:
    """Print the table, with the figures of tests in a column of their own."""
    test_values = {row.name: row.value for row in test_rows}
    print(f"{'':6}{'':38}{'source':>18}  {'goal':22}{'tests':>18}")
    for row in rows:
        mark = ""
        if row.goal:
            mark = "ok" if row.is_met else "MISS"
        tests = test_values.get(row.name, "")
        print(f"{mark:6}{row.name:38}{row.value:>18}  {row.goal:22}{tests:>18}".rstrip())


def is_below(path: str, folders: Sequence[str]) -> bool:
    """Return whether a path is one of some files and folders, or lies in one of them."""
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


def main(arguments: list[str] | None = None) -> int:
    """Print the table, and return 1 where a goal is missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.house")
    parser.add_argument("paths", nargs="*", metavar="PATH", help="measure only files under these")
    parser.add_argument("--by-file", action="store_true", help="list the figures of each file")
    parser.add_argument("--worst", type=int, metavar="N", help="list the N worst files")
    options = parser.parse_args(arguments)
    folders = [path.rstrip("/") for path in options.paths]
    sources = python_files([*SOURCE_FOLDERS, TEST_FOLDER])
    project = Project(sources)
    all_files = [measure_file(project, path, text) for path, text in sources.items()]
    files = [figures for figures in all_files if is_below(figures.path, folders or SOURCE_FOLDERS)]
    tests = [figures for figures in all_files if is_below(figures.path, [TEST_FOLDER])]
    rows = rows_of_files(files)
    if not folders:
        rows += rows_of_rooms(measure_rooms(project))
    print_table(rows, rows_of_files(tests))
    if options.by_file or options.worst:
        print_files(files, options.worst)
    missed = [row for row in rows if not row.is_met]
    if folders:
        print_findings(files)
    else:
        print_missed(missed)
    return 1 if missed else 0


def print_findings(files: list[FileFigures]) -> None:
    """Print all that could be mended in some files."""
    for figures in files:
        for finding in figures.findings:
            print(finding)


def print_missed(rows: list[Row]) -> None:
    """Print what misses the goals of some rows."""
    for row in rows:
        for finding in row.findings[:MAX_PRINTED]:
            print(f"{row.name}: {finding}")
        if len(row.findings) > MAX_PRINTED:
            rest = len(row.findings) - MAX_PRINTED
            print(f"{row.name}: {rest} more; give paths to see those below them")


if __name__ == "__main__":
    sys.exit(main())
