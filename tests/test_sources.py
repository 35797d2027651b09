"""No source of this project loads a file in a way that could run code from it, or listens to
everybody unless it is told to."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
LOADS = {"pickle", "dill", "joblib", "shelve", "marshal", "cPickle", "jsonpickle"}


def dangers(source: str) -> list[str]:
    """Calls by which a file could run code, as `line: what`."""
    found = []
    tree = ast.parse(source)
    safe = {
        name.id
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for base in node.bases
        if ast.unparse(base).endswith("SafeLoader")
        for name in [ast.Name(node.name)]
    } | {"yaml.SafeLoader", "yaml.CSafeLoader"}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = (
                {alias.name.split(".")[0] for alias in node.names}
                if isinstance(node, ast.Import)
                else {(node.module or "").split(".")[0]}
            )
            found += [f"{node.lineno}: import {name}" for name in names & LOADS]
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        given = {k.arg: k.value for k in node.keywords}
        value = {key: v.value for key, v in given.items() if isinstance(v, ast.Constant)}
        if (
            name in ("eval", "exec", "compile", "__import__", "os.system", "os.popen")
            or name.split(".")[0] in LOADS
        ):
            found.append(f"{node.lineno}: {name}")
        if name == "torch.load" and value.get("weights_only") is not True:
            found.append(f"{node.lineno}: torch.load")
        if name in ("np.load", "numpy.load") and value.get("allow_pickle") not in (None, False):
            found.append(f"{node.lineno}: np.load")
        if (
            name in ("np.load", "numpy.load")
            and "allow_pickle" in given
            and "allow_pickle" not in value
        ):
            found.append(f"{node.lineno}: np.load")
        loader = (
            ast.unparse(given["Loader"])
            if "Loader" in given
            else ast.unparse(node.args[1])
            if len(node.args) > 1
            else ""
        )
        if name in ("yaml.load", "yaml.load_all") and loader not in safe:
            found.append(f"{node.lineno}: yaml.load")
        if name in (
            "yaml.unsafe_load",
            "yaml.full_load",
            "yaml.unsafe_load_all",
            "yaml.full_load_all",
        ):
            found.append(f"{node.lineno}: {name}")
        if "shell" in given and value.get("shell", True):
            found.append(f"{node.lineno}: shell=True")
        if name.endswith(("extractall", ".extract")):
            found.append(f"{node.lineno}: {name}")
    return found


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("import pickle", 1),
        ("from pickle import loads", 1),
        ("import dill as p", 1),
        ("torch.load(f)", 1),
        ("torch.load(f, weights_only=False)", 1),
        ("torch.load(f, weights_only=True)", 0),
        ("np.load(f, allow_pickle=True)", 1),
        ("np.load(f, allow_pickle=x)", 1),
        ("np.load(f)", 0),
        ("yaml.load(t, yaml.Loader)", 1),
        ("yaml.load(t)", 1),
        ("yaml.unsafe_load(t)", 1),
        ("yaml.load(t, yaml.SafeLoader)", 0),
        ("class L(yaml.SafeLoader): ...\nyaml.load(t, L)", 0),
        ("class L(yaml.Loader): ...\nyaml.load(t, L)", 1),
        ("subprocess.run(c, shell=True)", 1),
        ("subprocess.run(c, shell=x)", 1),
        ("subprocess.run(c, shell=False)", 0),
        ("eval(t)", 1),
        ("model.eval()", 0),
        ("exec(t)", 1),
        ("os.system(t)", 1),
        ("tar.extractall(p)", 1),
        ("block.compile()", 0),
    ],
)
def test_the_scan_sees_what_could_run_code(line: str, found: int) -> None:
    assert len(dangers(line)) == found


@pytest.mark.parametrize(
    "path",
    [*(REPOSITORY / "pipeline").rglob("*.py"), *(REPOSITORY / "workers").rglob("*.py")],
    ids=lambda path: str(path.relative_to(REPOSITORY)),
)
def test_no_source_loads_what_could_run_code(path: Any) -> None:
    assert dangers(path.read_text()) == []


def test_nothing_listens_to_everybody_by_default() -> None:
    files = subprocess.run(
        ["git", "-C", str(REPOSITORY), "ls-files", "-co", "--exclude-standard"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    names = [
        name
        for name in files.splitlines()
        if name.endswith((".py", ".yaml", ".sh", ".toml", "Makefile", "Dockerfile"))
        and not name.startswith("tests/")
    ]
    assert len(names) > 100
    for name in names:
        text = (REPOSITORY / name).read_text() if (REPOSITORY / name).exists() else ""
        assert "0.0.0.0" not in text, name
        assert '"::"' not in text, name
