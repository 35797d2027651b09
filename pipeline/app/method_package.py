"""Write a Python package for a new method, for `accrete methods new NAME`.

The package contains the method, a test, and an entry point that makes the method known to Accrete.
"""

from __future__ import annotations

import re
from pathlib import Path

from workers.errors import UserError

NAME = r"[A-Za-z]([A-Za-z0-9_.-]*[A-Za-z0-9])?"  # pattern of the names of methods
PYPROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{package}"
version = "0.1.0"
description = "The continual-learning method {name} for Accrete."
requires-python = ">=3.11"
dependencies = ["accrete"]

# by this entry point every command of Accrete knows the method
[project.entry-points."accrete.methods"]
"{name}" = "{module}:{class_name}"

[tool.setuptools]
packages = ["{module}"]
"""
METHOD = '''\
"""The continual-learning method {name}."""

from pipeline import Batch, Method, MethodSettings, Progress, TrainDefaults
from pydantic import Field
from torch import Tensor


class {class_name}Settings(MethodSettings):
    """Settings of `{name}`."""

    weight: float = Field(0.01, ge=0, description="weight of the penalty on large features")


class {class_name}(Method[{class_name}Settings]):
    """A head for each task on a frozen backbone, with a penalty on large features.

    Replace it by your method. The docstrings of `workers.methods.base` describe the life cycle of a
    method and all that a class can declare; `workers.methods.bases` has classes to start from.
    """

    name = "{name}"
    Settings = {class_name}Settings
    train_defaults = TrainDefaults(lr=1e-3, source="a guess")

    def loss(self, batch: Batch, progress: Progress) -> tuple[Tensor, dict[str, Tensor]]:
        features = self.features(batch.images)
        ce = self.classification_loss(features, batch)
        penalty = self.settings.weight * features.square().mean()
        return ce + penalty, {{"ce": ce.detach(), "penalty": penalty.detach()}}
'''
TEST = '''\
"""Check the promises of every method for `{name}`, on tiny tasks."""

import pytest
from pipeline.testing import PROMISES, Lab, list_cases


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    return Lab(tmp_path_factory.mktemp("lab"))


@pytest.mark.parametrize(("promise", "optimizer"), list_cases("{name}"))
def test_{slug}_keeps(lab, promise, optimizer):
    PROMISES[promise].check(lab, "{name}", optimizer)
'''
README = """\
# {name}

A continual-learning method for Accrete.

```bash
pip install -e .                # in the environment that has Accrete
pytest                          # checks the promises of every method
accrete methods {name}
accrete run configs/streams/digits.yaml --method {name}
```
"""


def write_method_package(name: str, folder: str) -> list[Path]:
    """Write a package with an executable example method.

    Args:
        name: Name of the method.
        folder: The folder to create. "": a folder with the name of the method.

    Returns:
        The written files.

    Raises:
        UserError: If the name is invalid or already in use, or the folder exists.
    """
    from workers.methods import METHODS  # imports torch

    if not re.fullmatch(NAME, name) or name == "new":
        raise UserError(
            f"{name!r:.80} cannot be the name of a method; give a letter first, then letters, "
            "digits, '_', '.' and '-', and a letter or digit last (not `new`, which is the command)"
        )
    if name in METHODS:
        raise UserError(f"there is a method {name!r} already; give the new one another name")
    root = Path(folder or name)
    if root.exists():
        raise UserError(f"{str(root)!r} exists already; give another folder with --out")
    slug = re.sub(r"\W", "_", name).lower()
    values = {
        "name": name,
        "slug": slug,
        "package": f"accrete-{slug.replace('_', '-')}",
        "module": f"accrete_{slug}",
        "class_name": "".join(part.capitalize() for part in slug.split("_") if part),
    }
    texts = {
        "pyproject.toml": PYPROJECT,
        "README.md": README,
        f"{values['module']}/__init__.py": METHOD,
        f"tests/test_{slug}.py": TEST,
    }
    for path, text in texts.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.format(**values))
    return [root / path for path in texts]
