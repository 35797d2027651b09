"""Which Accrete this is: its version, the commit of its checkout, and where that lies."""

from __future__ import annotations

import os
import subprocess
import tomllib
from pathlib import Path
from typing import NamedTuple

CHECKOUT = Path(__file__).resolve().parents[2]
GIT_TIMEOUT_S = 5.0
COMMIT = "ACCRETE_COMMIT"  # variable that names the commit of a copy without git


class Version(NamedTuple):
    """number: of pyproject.toml. commit: as `git_commit` returns it."""

    number: str
    commit: str
    checkout: str

    def __str__(self) -> str:
        commit = f" (commit {self.commit})" if self.commit else ""
        return f"accrete {self.number}{commit} from {self.checkout}"


def get_version(checkout: Path = CHECKOUT) -> Version:
    """Return the version of a checkout, or of a copy of one without git."""
    project = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return Version(project["version"], git_commit(checkout), str(checkout))


def git_commit(checkout: Path = CHECKOUT) -> str:
    """Return the commit of a checkout, with `-dirty` where its files differ.

    Of a copy without git, such as an image or a job of Ray, it is what the variable ACCRETE_COMMIT
    says, else empty.
    """
    if not (checkout / ".git").exists():  # git would look in the folders above
        return os.environ.get(COMMIT, "")
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return process.stdout.strip()
