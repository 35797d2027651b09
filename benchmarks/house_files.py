"""The figures of one file for `benchmarks.house`: lines, tokens, expressions, names, docstrings."""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain

from benchmarks.house_imports import (
    FUNCTIONS,
    FunctionNode,
    Project,
    module_name,
    public_functions,
)

MAX_COLUMNS = 100
MAX_FUNCTION_LINES = 100

# Values are noun phrases: these say nothing of what a value is.
EMPTY_NAMES = {
    "found",
    "place",
    "places",
    "own",
    "mine",
    "said",
    "told",
    "wanted",
    "here",
    "there",
    "shown",
    "settled",
    "kept",
    "given",
    "others",
    "theirs",
    "ours",
    "looked",
    "meant",
    "crowned",
}

NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


@dataclass(frozen=True)
class Finding:
    """One thing to mend: where it is, and what it is."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


@dataclass
class FileFigures:
    """What was counted in one file."""

    path: str
    lines: int
    tokens: list[int]  # of each line of code
    functions: list[int] = field(default_factory=list)  # lines of each function
    num_names: int = 0
    num_public: int = 0
    num_arguments: int = 0
    num_typed_arguments: int = 0
    num_typed_returns: int = 0
    comprehensions: list[Finding] = field(default_factory=list)
    nested: list[Finding] = field(default_factory=list)
    conditionals: list[Finding] = field(default_factory=list)
    long_lines: list[Finding] = field(default_factory=list)
    long_functions: list[Finding] = field(default_factory=list)
    empty_names: list[Finding] = field(default_factory=list)
    undocumented: list[Finding] = field(default_factory=list)

    @property
    def code_lines(self) -> int:
        """How many lines hold code."""
        return len(self.tokens)

    @property
    def findings(self) -> list[Finding]:
        """All that a reader may want to mend, in order of lines."""
        kinds = (
            self.comprehensions,
            self.nested,
            self.conditionals,
            self.long_lines,
            self.long_functions,
            self.empty_names,
            self.undocumented,
        )
        return sorted(chain.from_iterable(kinds), key=lambda finding: finding.line)


def all_arguments(arguments: ast.arguments) -> list[ast.arg]:
    """Return the arguments of a function, of every kind, but `self` and `cls`."""
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    if arguments.vararg:
        named.append(arguments.vararg)
    if arguments.kwarg:
        named.append(arguments.kwarg)
    return [argument for argument in named if argument.arg not in ("self", "cls")]


class Measure(ast.NodeVisitor):
    """Counts expressions, functions, types and local names of a module."""

    def __init__(self, figures: FileFigures) -> None:
        self.figures = figures
        self.comprehension_depth = 0
        self.scopes: list[dict[str, int]] = []  # line of each name, for each enclosing function

    def finding(self, node: ast.expr | ast.stmt, text: str) -> Finding:
        """Return a finding at a node."""
        return Finding(self.figures.path, node.lineno, text)

    def bind(self, name: str | None, line: int) -> None:
        """Note a name that the innermost function binds."""
        if name and self.scopes and not name.startswith("_"):
            self.scopes[-1].setdefault(name, line)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self.bind(node.id, node.lineno)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        self.bind(node.name, node.lineno)
        self.generic_visit(node)

    def visit_MatchAs(self, node: ast.MatchAs) -> None:
        self.bind(node.name, node.lineno)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.figures.conditionals.append(self.finding(node, "conditional expression"))
        self.generic_visit(node)

    def visit_comprehension_expression(self, node: Comprehension) -> None:
        """Count a comprehension, and once more where it is nested."""
        self.figures.comprehensions.append(self.finding(node, "comprehension"))
        if self.comprehension_depth:
            text = "comprehension inside another one"
            self.figures.nested.append(self.finding(node, text))
        elif len(node.generators) > 1:
            text = "comprehension with more than one `for`"
            self.figures.nested.append(self.finding(node, text))
        self.comprehension_depth += 1
        self.generic_visit(node)
        self.comprehension_depth -= 1

    visit_ListComp = visit_comprehension_expression
    visit_SetComp = visit_comprehension_expression
    visit_DictComp = visit_comprehension_expression
    visit_GeneratorExp = visit_comprehension_expression

    def visit_Lambda(self, node: ast.Lambda) -> None:
        for argument in all_arguments(node.args):
            self.bind(argument.arg, node.lineno)
        self.generic_visit(node)

    def visit_function(self, node: FunctionNode) -> None:
        """Count a function, its arguments, and the names that it binds."""
        self.count_lines_and_types(node)
        self.scopes.append({})
        for argument in all_arguments(node.args):
            self.bind(argument.arg, node.lineno)
        self.generic_visit(node)
        scope = self.scopes.pop()
        self.figures.num_names += len(scope)
        for name, line in scope.items():
            if name in EMPTY_NAMES:
                text = f"the name `{name}` says nothing"
                self.figures.empty_names.append(Finding(self.figures.path, line, text))

    visit_FunctionDef = visit_function
    visit_AsyncFunctionDef = visit_function

    def count_lines_and_types(self, node: FunctionNode) -> None:
        """Count the lines of a function, and what of its signature is typed."""
        assert node.end_lineno is not None
        lines = node.end_lineno - node.lineno + 1
        self.figures.functions.append(lines)
        if lines > MAX_FUNCTION_LINES:
            finding = self.finding(node, f"`{node.name}` has {lines} lines")
            self.figures.long_functions.append(finding)
        if node.returns is not None:
            self.figures.num_typed_returns += 1
        for argument in all_arguments(node.args):
            self.figures.num_arguments += 1
            if argument.annotation is not None:
                self.figures.num_typed_arguments += 1


def docstring_lines(tree: ast.Module) -> set[int]:
    """Return the lines of all docstrings of a module."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            assert docstring.end_lineno is not None
            lines.update(range(docstring.lineno, docstring.end_lineno + 1))
    return lines


def tokens_by_line(text: str, tree: ast.Module) -> list[int]:
    """Return how many tokens of code start on each line that has one.

    A formatted string is one token, also from Python 3.12 on, which splits it.
    """
    docstrings = docstring_lines(tree)
    counts: Counter[int] = Counter()
    depth = 0  # of formatted strings
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        line = token.start[0]
        name = tokenize.tok_name[token.type]
        if depth == 0 and token.type not in NO_CODE and line not in docstrings:
            counts[line] += 1
        if name == "FSTRING_START":
            depth += 1
        elif name == "FSTRING_END":
            depth -= 1
    return list(counts.values())


def measure_file(project: Project, path: str, text: str) -> FileFigures:
    """Return the figures of one file of the project."""
    module = module_name(path)
    tree = project.trees[module]
    lines = text.splitlines()
    figures = FileFigures(path, len(lines), tokens_by_line(text, tree))
    for number, line in enumerate(lines, start=1):
        if len(line) > MAX_COLUMNS:
            figures.long_lines.append(Finding(path, number, f"{len(line)} columns"))
    Measure(figures).visit(tree)
    for name, node in public_functions(project, module):
        figures.num_public += 1
        if ast.get_docstring(node) is None:
            finding = Finding(path, node.lineno, f"`{name}` has no docstring")
            figures.undocumented.append(finding)
    return figures
