"""Static checks of the sources: no loading of files that could run code, no server that listens on
all interfaces by default, and no private names of PyTorch outside one file."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
LOADS = {"pickle", "dill", "joblib", "shelve", "marshal", "cPickle", "jsonpickle"}


def dangers(source: str) -> list[str]:
    """Return imports and calls that could run code from a file, as `line: name`."""
    lines = []
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
            lines += [f"{node.lineno}: import {name}" for name in names & LOADS]
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        keywords = {k.arg: k.value for k in node.keywords}
        value = {key: v.value for key, v in keywords.items() if isinstance(v, ast.Constant)}
        if (
            name in ("eval", "exec", "compile", "__import__", "os.system", "os.popen")
            or name.split(".")[0] in LOADS
        ):
            lines.append(f"{node.lineno}: {name}")
        if name == "torch.load" and value.get("weights_only") is not True:
            lines.append(f"{node.lineno}: torch.load")
        if name in ("np.load", "numpy.load") and value.get("allow_pickle") not in (None, False):
            lines.append(f"{node.lineno}: np.load")
        if (
            name in ("np.load", "numpy.load")
            and "allow_pickle" in keywords
            and "allow_pickle" not in value
        ):
            lines.append(f"{node.lineno}: np.load")
        loader = (
            ast.unparse(keywords["Loader"])
            if "Loader" in keywords
            else ast.unparse(node.args[1])
            if len(node.args) > 1
            else ""
        )
        if name in ("yaml.load", "yaml.load_all") and loader not in safe:
            lines.append(f"{node.lineno}: yaml.load")
        if name in (
            "yaml.unsafe_load",
            "yaml.full_load",
            "yaml.unsafe_load_all",
            "yaml.full_load_all",
        ):
            lines.append(f"{node.lineno}: {name}")
        if "shell" in keywords and value.get("shell", True):
            lines.append(f"{node.lineno}: shell=True")
        if name.endswith(("extractall", ".extract")):
            lines.append(f"{node.lineno}: {name}")
    return lines


@pytest.mark.parametrize(
    ("line", "count"),
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
def test_scan_detects_source_lines_that_could_run_code(line: str, count: int) -> None:
    assert len(dangers(line)) == count


@pytest.mark.parametrize(
    "path",
    [*(REPOSITORY / "pipeline").rglob("*.py"), *(REPOSITORY / "workers").rglob("*.py")],
    ids=lambda path: str(path.relative_to(REPOSITORY)),
)
def test_no_source_loads_data_that_could_run_code(path: Any) -> None:
    assert dangers(path.read_text()) == []


def test_nothing_listens_on_all_interfaces_by_default() -> None:
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


# ---- private names of PyTorch --------------------------------------------------------------------
TORCH_INTERNALS = "workers/data/torch_internals.py"


def is_private_name_of_torch(name: str) -> bool:
    """Return whether a dotted name is in PyTorch and has a part with one leading underscore."""
    parts = name.split(".")
    is_private = any(part.startswith("_") and not part.startswith("__") for part in parts)
    return parts[0] == "torch" and is_private


def private_names_of_torch(source: str) -> set[str]:
    """Return the private modules and names of PyTorch that a source imports or looks up."""
    tree = ast.parse(source)
    full_names = {}  # local name -> full name
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names.append(alias.name)
                local_name = alias.asname or alias.name.split(".")[0]
                full_names[local_name] = alias.name if alias.asname else local_name
        if isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                names.append(name)
                full_names[alias.asname or alias.name] = name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            names.append(f"{full_names.get(first, first)}.{rest}")
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.append(node.value)  # e.g. for import_module or mock.patch
    return {name for name in names if is_private_name_of_torch(name)}


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import torch._dynamo", "torch._dynamo"),
        ("import torch\ntorch._utils.f(x)", "torch._utils.f"),
        ("from torch import _utils", "torch._utils"),
        ("def f():\n    from torch._dynamo import config", "torch._dynamo.config"),
        ("from torch import nn as n\nn.modules.b._B", "torch.nn.modules.b._B"),
        ("import torch.nn.functional as F\nF._f(x)", "torch.nn.functional._f"),
        ("importlib.import_module('torch._inductor')", "torch._inductor"),
        ("import torch\ntorch.__version__", None),
        ("import torch\nself._torch = torch.ones(_n)", None),
        ("from torch.nn import Module\nmodel._pos_embed(x)", None),
    ],
)
def test_scan_detects_private_names_of_pytorch(source: str, name: str | None) -> None:
    names = private_names_of_torch(source)
    if name is None:
        assert names == set()
    else:
        assert name in names


def test_private_names_of_pytorch_occur_in_one_file() -> None:
    users = {}
    for folder in ("pipeline", "workers", "benchmarks"):
        for path in (REPOSITORY / folder).rglob("*.py"):
            names = private_names_of_torch(path.read_text())
            if names:
                users[path.relative_to(REPOSITORY).as_posix()] = sorted(names)
    internals = users.pop(TORCH_INTERNALS)
    assert internals, "the scan finds no private names even in the file that may use them"
    assert users == {}, f"move these names into {TORCH_INTERNALS}, with a contract test each"
