"""The version of Accrete, the commit of the checkout, and its location.

They are printed by `--version`, and the commit is part of the provenance of results.
"""

from __future__ import annotations

import os
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

CHECKOUT = Path(__file__).resolve().parents[2]  # for a wheel: site-packages
GIT_TIMEOUT_S = 5.0
CODE = ("pipeline", "workers", "pyproject.toml", "constraints.txt")  # files that results depend on
COMMIT = "ACCRETE_COMMIT"  # environment variable with the commit of a copy without git


class AccreteVersion(NamedTuple):
    """The version of Accrete.

    Attributes:
        number: Version in pyproject.toml, or of the installed wheel.
        commit: Commit as returned by `git_commit`; "" for an installed wheel.
        checkout: Folder of the code.
    """

    number: str
    commit: str
    checkout: str

    def __str__(self) -> str:
        commit = f" (commit {self.commit})" if self.commit else ""
        return f"accrete {self.number}{commit} from {self.checkout}"


def get_version(checkout: Path = CHECKOUT) -> AccreteVersion:
    """Return the version of a checkout, of a copy of a checkout without git, or of a wheel."""
    if not (checkout / "pyproject.toml").exists():
        return AccreteVersion(metadata.version("accrete"), "", str(checkout))
    project = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return AccreteVersion(project["version"], git_commit(checkout), str(checkout))


def git_commit(checkout: Path = CHECKOUT) -> str:
    """Return the commit of a checkout.

    The suffix `-dirty` is added if files in CODE differ from the commit or are new.

    For a copy without git, for example a container image or the working directory of a Ray job,
    return the value of the environment variable ACCRETE_COMMIT. Return "" if the variable is not
    set, or if git fails.
    """
    if not (checkout / ".git").exists():  # git would search the parent folders
        return os.environ.get(COMMIT, "")
    try:
        commit = _ask_git(checkout, "rev-parse", "--short=12", "HEAD")
        changes = _ask_git(
            checkout, "status", "--porcelain", "--untracked-files=normal", "--", *CODE
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return f"{commit}-dirty" if changes else commit


def _ask_git(checkout: Path, *arguments: str) -> str:
    """Return the output of git; raise SubprocessError if it fails or takes too long."""
    # no locks: other processes may use the checkout, and it may be read-only
    command = ["git", "--no-optional-locks", "-C", str(checkout), *arguments]
    process = subprocess.run(
        command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=True
    )
    return process.stdout.strip()
