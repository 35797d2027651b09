"""Run the code cells of a notebook in order, as Jupyter does, but without Jupyter.

    python -m tests.notebook_runner examples/NAME.ipynb

The value of a cell's last expression is printed. The number of each cell is printed before the
cell runs. The first error ends the program.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any


def code_cells(path: Path) -> list[str]:
    """Return the text of each code cell of a notebook."""
    body = json.loads(path.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in body["cells"] if cell["cell_type"] == "code"]


def run_cell(text: str, name: str, namespace: dict[str, Any]) -> None:
    """Run one cell in a namespace, and print its last expression's value.

    name: the name of the cell in tracebacks.
    """
    tree = ast.parse(text, name)
    last: ast.Expression | None = None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        last = ast.Expression(tree.body.pop().value)  # type: ignore[attr-defined]
    exec(compile(tree, name, "exec"), namespace)
    if last is not None:
        value = eval(compile(last, name, "eval"), namespace)
        if value is not None:
            print(value)


def main(path: str) -> None:
    """Run all cells of a notebook in this process, in the current folder."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for number, text in enumerate(code_cells(Path(path)), 1):
        print(f"--- cell {number}", flush=True)
        run_cell(text, f"<cell {number}>", namespace)


if __name__ == "__main__":
    main(sys.argv[1])
