"""The modules of the project for `benchmarks.house`: classes and bases, imports, rooms, rings."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch

# The order of rooms in each package, from the top down: a room imports only those after it.
FLOORS = {
    "pipeline": [
        "cli",
        "serving",
        "search",
        "experiment",
        "growing",
        "app",
        "tracking",
        "report",
        "launch",
        "shell",
        "results",
        "graph",
        "data",
        "config",
        "yaml_files",
    ],
    "workers": [
        "serving",
        "analysis",
        "loop",
        "evaluate",
        "restore",
        "methods",
        "model",
        "data",
        "optim",
        "preemption",
        "storage",
        "job",
        "rng",
        "dist",
        "errors",
    ],
}

PACKAGES = list(FLOORS)

# What classes of this project override of bases that are not of it, by the name of the base.
OVERRIDES_OF_LIBRARIES = {
    "Module": ["forward", "extra_repr"],
    "Function": ["forward", "backward"],
    "Handler": ["emit"],
    "Formatter": ["format"],
    "NodeVisitor": ["visit_*", "generic_visit"],
}

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def module_name(path: str) -> str:
    """Return the dotted name of a module, from its path below the repository."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@dataclass
class ClassFacts:
    """What the body of a class defines, and what its bases are called in its module."""

    attributes: set[str]
    bases: list[str]


class Project:
    """The syntax trees of all modules, by name, with their classes and imports."""

    def __init__(self, sources: dict[str, str]) -> None:
        self.trees = {module_name(path): ast.parse(text) for path, text in sources.items()}
        self.classes: dict[str, ClassFacts] = {}  # by `module.Class`
        self.imports: dict[str, dict[str, str]] = {}  # module -> local name -> full name
        for module, tree in self.trees.items():
            self.imports[module] = dict(imported_names(tree))
            for node in tree.body:
                if isinstance(node, ast.ClassDef):
                    self.classes[f"{module}.{node.name}"] = class_facts(node)

    def resolve(self, module: str, name: str) -> str:
        """Return the full name of a class, from the name that a module uses for it."""
        first, _, rest = name.partition(".")
        full_name = self.imports[module].get(first, f"{module}.{first}")
        if rest:
            full_name = f"{full_name}.{rest}"
        # A package may re-export what one of its modules defines.
        package, _, symbol = full_name.rpartition(".")
        return self.imports.get(package, {}).get(symbol, full_name)

    def is_override(self, class_name: str, attribute: str) -> bool:
        """Return whether a base of a class, at any distance, has the attribute."""
        if class_name not in self.classes:
            return False
        module = class_name.rpartition(".")[0]
        for base in self.classes[class_name].bases:
            base_name = self.resolve(module, base)
            base_facts = self.classes.get(base_name)
            if base_facts is None:
                patterns = OVERRIDES_OF_LIBRARIES.get(base_name.rpartition(".")[2], [])
                if any(fnmatch(attribute, pattern) for pattern in patterns):
                    return True
            elif attribute in base_facts.attributes or self.is_override(base_name, attribute):
                return True
        return False


def imported_names(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the local name and the full name of each import of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname:
                    yield alias.asname, alias.name
                else:
                    package = alias.name.partition(".")[0]
                    yield package, package
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def class_facts(node: ast.ClassDef) -> ClassFacts:
    """Return the attributes that the body of a class defines, and its bases."""
    attributes: set[str] = set()
    for statement in node.body:
        if isinstance(statement, FUNCTIONS):
            attributes.add(statement.name)
        elif isinstance(statement, ast.AnnAssign):
            attributes.add(ast.unparse(statement.target))
        elif isinstance(statement, ast.Assign):
            attributes.update(ast.unparse(target) for target in statement.targets)
    bases = []
    for base in node.bases:
        plain = base.value if isinstance(base, ast.Subscript) else base  # `Base` of `Base[int]`
        bases.append(ast.unparse(plain))
    return ClassFacts(attributes, bases)


# ---- public functions ----------------------------------------------------------------------------
def is_public(node: FunctionNode | ast.ClassDef) -> bool:
    """Return whether a name is public, and the function no setter and no overload."""
    if node.name.startswith("_"):
        return False
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    return not any(name.endswith((".setter", ".deleter", "overload")) for name in decorators)


def public_functions(project: Project, module: str) -> Iterator[tuple[str, FunctionNode]]:
    """Yield the public functions of a module that override nothing, with the name of each."""
    for node in project.trees[module].body:
        if isinstance(node, FUNCTIONS) and is_public(node):
            yield node.name, node
        if isinstance(node, ast.ClassDef) and is_public(node):
            for member in node.body:
                if not isinstance(member, FUNCTIONS) or not is_public(member):
                    continue
                if not project.is_override(f"{module}.{node.name}", member.name):
                    yield f"{node.name}.{member.name}", member


# ---- imports and rooms ---------------------------------------------------------------------------
@dataclass(frozen=True)
class Arrow:
    """An import of one module by another one."""

    source: str
    target: str
    line: int

    def __str__(self) -> str:
        return f"{self.source}:{self.line} imports {self.target}"


def imports_of(project: Project, module: str) -> Iterator[Arrow]:
    """Yield what a module imports of this project, at whatever depth of its code."""
    for node in ast.walk(project.trees[module]):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names = [str(value.value) for value in node.args if isinstance(value, ast.Constant)]
        for name in names:
            target = name if name in project.trees else name.rpartition(".")[0]
            if target in project.trees and target != module:
                yield Arrow(module, target, getattr(node, "lineno", 0))


def room_of(module: str) -> str | None:
    """Return `package.room` of a module, None for one that stands in no room."""
    parts = module.split(".")
    if len(parts) < 2 or parts[0] not in FLOORS or parts[1] == "__main__":
        return None
    return f"{parts[0]}.{parts[1]}"


def rings(arrows: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Return the strongly connected components of two nodes and more, by Tarjan's algorithm."""
    targets: dict[str, list[str]] = defaultdict(list)
    for source, target in arrows:
        targets[source].append(target)
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    components: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = len(index)
        lowest[node] = index[node]
        stack.append(node)
        for target in targets.get(node, []):
            if target not in index:
                visit(target)
                lowest[node] = min(lowest[node], lowest[target])
            elif target in stack:
                lowest[node] = min(lowest[node], index[target])
        if lowest[node] == index[node]:
            start = stack.index(node)
            if len(stack) - start > 1:
                components.append(sorted(stack[start:]))
            del stack[start:]

    for node in list(targets):
        if node not in index:
            visit(node)
    return components


@dataclass
class RoomFigures:
    """The rooms of the project, and which of their imports go the wrong way."""

    rooms: list[str]
    without_floor: list[str]
    arrows: set[tuple[str, str]]
    upward: list[Arrow]
    room_rings: list[list[str]]
    module_rings: list[list[str]]


def has_floor(room: str) -> bool:
    """Return whether the order of rooms lists `package.room`."""
    package, name = room.split(".")
    return name in FLOORS[package]


def is_upward(source: str, target: str) -> bool:
    """Return whether an import leads from a room to one above it, or out of the packages."""
    source_room = room_of(source)
    target_room = room_of(target)
    if source_room is None or target_room is None:
        return source.split(".")[0] in FLOORS and target.split(".")[0] not in FLOORS
    source_package, source_name = source_room.split(".")
    target_package, target_name = target_room.split(".")
    if source_package != target_package:
        return PACKAGES.index(target_package) < PACKAGES.index(source_package)
    floors = FLOORS[source_package]
    if source_name not in floors or target_name not in floors:
        return False  # reported as a room in no floor
    return floors.index(target_name) < floors.index(source_name)


def measure_rooms(project: Project) -> RoomFigures:
    """Return the rooms, their rings and their upward arrows."""
    rooms: set[str] = set()
    arrows: list[Arrow] = []
    for module in project.trees:
        room = room_of(module)
        if room:
            rooms.add(room)
        arrows += imports_of(project, module)
    between_rooms: set[tuple[str, str]] = set()
    for arrow in arrows:
        source = room_of(arrow.source)
        target = room_of(arrow.target)
        if source and target and source != target:
            between_rooms.add((source, target))
    return RoomFigures(
        rooms=sorted(rooms),
        without_floor=sorted(room for room in rooms if not has_floor(room)),
        arrows=between_rooms,
        upward=[arrow for arrow in arrows if is_upward(arrow.source, arrow.target)],
        room_rings=rings(between_rooms),
        module_rings=rings((arrow.source, arrow.target) for arrow in arrows),
    )
