"""Templates are files that work as they are: those of `configs/cluster`, for the demo.

Values of a YAML file are replaced in its text, so that comments and layout stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import indent
from typing import Any

import yaml

from pipeline.config.yaml_files import CONFIGS, dump_yaml

FOLDER = CONFIGS / "cluster"
DIRECTIVE = "#SBATCH "

KeyPath = tuple[str | int, ...]  # keys of mappings and indices of lists that lead to a value


def read_template(name: str) -> str:
    """Return the text of a file of `configs/cluster`."""
    return (FOLDER / name).read_text(encoding="utf-8")


def with_values(text: str, values: Mapping[KeyPath, Any]) -> str:
    """Return a YAML text with other values.

    values: plain ones, each in place of the one at its path, which must be there; lists and
    mappings are written on one line, a text of several lines as a block. Raise `KeyError` or
    `IndexError` for a path that leads to nothing.
    """
    replaced = []
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    for path, value in values.items():
        node, column = _node_at(root, path)
        replaced.append((node.start_mark.index, node.end_mark.index, _text_of(value, column)))
    for start, end, new in sorted(
        replaced, reverse=True
    ):  # from the end: offsets before it stay valid
        text = text[:start] + new + text[end:]
    return text


def _node_at(root: Any, path: KeyPath) -> tuple[Any, int]:
    """Return the node of a value, and the column of its key."""
    node = root
    column = 0
    for key in path:
        if isinstance(key, int):
            node = node.value[key]
            continue
        pairs = {name.value: (name, value) for name, value in node.value}
        name, node = pairs[key]
        column = name.start_mark.column
    return node, column


def _text_of(value: Any, column: int) -> str:
    """Return a value as YAML. column: that of its key."""
    if isinstance(value, str) and "\n" in value:
        return "|\n" + indent(value, " " * (column + 2))
    text = dump_yaml(value, default_flow_style=True, width=1 << 20)
    return text.removesuffix("...\n").strip()


def with_directives(text: str, directives: list[str]) -> str:
    """Return a script for Slurm with these lines of `#SBATCH` in place of its own."""
    lines = text.splitlines(keepends=True)
    line_numbers = [index for index, line in enumerate(lines) if line.startswith(DIRECTIVE)]
    new = [f"{DIRECTIVE}{directive}\n" for directive in directives]
    return "".join([*lines[: line_numbers[0]], *new, *lines[line_numbers[-1] + 1 :]])
