"""Tests of the notebooks in examples/: they run, use only public names, and have no outputs."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import pipeline
from tests.notebook_runner import code_cells

REPOSITORY = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted(path.name for path in (REPOSITORY / "examples").glob("*.ipynb"))
ALLOWED = {"PIL", "matplotlib", "numpy", "pandas", "pathlib", "pipeline", "sklearn", "torch"}


def read(name: str) -> dict[str, Any]:
    """Return the JSON of a notebook."""
    body: dict[str, Any] = json.loads((REPOSITORY / "examples" / name).read_text(encoding="utf-8"))
    return body


def run(name: str, folder: Path) -> str:
    """Run a notebook in an empty folder, in a new process with one thread. Return its output."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "MPLBACKEND": "agg",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.notebook_runner", str(REPOSITORY / "examples" / name)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_first_hour_notebook_is_found() -> None:
    assert "first_hour.ipynb" in NOTEBOOKS


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_has_format_4_5_and_no_outputs(name: str) -> None:
    body = read(name)
    assert (body["nbformat"], body["nbformat_minor"]) == (4, 5)
    assert body.keys() == {"cells", "metadata", "nbformat", "nbformat_minor"}
    ids = [cell["id"] for cell in body["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in body["cells"]:
        assert re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", cell["id"])
        assert isinstance(cell["source"], list)
        assert cell["metadata"] == {}
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
        else:
            assert cell.keys() == {"cell_type", "id", "metadata", "source"}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_uses_only_public_names(name: str) -> None:
    tree = ast.parse("\n".join(code_cells(REPOSITORY / "examples" / name)))
    for node in ast.walk(tree):
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        for module in modules:
            assert module.partition(".")[0] in ALLOWED, module
            assert not module.startswith("pipeline."), f"{module} is not public"
        if isinstance(node, ast.ImportFrom):
            assert node.module != "pipeline", "write `pipeline.NAME` instead"
        if isinstance(node, ast.Attribute):
            is_private = node.attr.startswith("_") and node.attr != "__init__"
            assert not is_private, f"{node.attr} is not public"
            if isinstance(node.value, ast.Name) and node.value.id == "pipeline":
                assert node.attr in pipeline.__all__


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_listed_for_readers(name: str) -> None:
    assert f"({name})" in (REPOSITORY / "examples" / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_first_hour_notebook_ends_with_a_working_model(tmp_path: Path) -> None:
    output = run("first_hour.ipynb", tmp_path)
    assert re.search(r"^meat +0\.\d+ +0\.0+$|^\d +meat +0\.\d+ +0\.0+$", output, re.MULTILINE)
    assert "four-five" in output
    assert (tmp_path / "model" / "model.json").exists()
    assert (tmp_path / "accuracies.png").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NOTEBOOKS if name != "first_hour.ipynb"])
def test_a_notebook_runs(name: str, tmp_path: Path) -> None:
    run(name, tmp_path)
    assert list(tmp_path.glob("*.png"))
