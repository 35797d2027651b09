"""Prints what pip is to install, from pyproject.toml: `python pipeline/shell/requirements.py`.

It needs the standard library alone, and no other file: images and new machines run it before
anything is installed.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from pathlib import Path

DEVELOPMENT = "dev"  # the extra that tests need, and a run does not


def requirements_of(pyproject: Path, with_development: bool) -> list[str]:
    """Return the dependencies of a project with those of its extras, in the order of the file."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    requirements = list(project["dependencies"])
    for extra, packages in project["optional-dependencies"].items():
        if with_development or extra != DEVELOPMENT:
            requirements += packages
    return requirements


def main(argv: list[str] | None = None) -> int:
    """Print one requirement a line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "pyproject", nargs="?", default="pyproject.toml", help="default: the current folder's"
    )
    parser.add_argument(
        f"--{DEVELOPMENT}", action="store_true", dest="development", help="also what tests need"
    )
    args = parser.parse_args(argv)
    print("\n".join(requirements_of(Path(args.pyproject), args.development)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
