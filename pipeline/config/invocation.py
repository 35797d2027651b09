"""The command that started this process, as a user types it. Printed commands begin with it."""

from __future__ import annotations

import os
import shlex
import shutil
import sys

from workers.plugins import list_plugins

SCRIPT = "accrete"  # installed by pip, see `project.scripts` of pyproject.toml


def this_python() -> str:
    """Return the path of this interpreter, relative if it is inside the current folder."""
    return shorten_path(sys.executable)


def this_command() -> str:
    """Return the command that starts Accrete in the same way as this process.

    If this process was started by the script `accrete`, the command is `accrete` or, if the shell
    finds another script of this name, its path. Otherwise it is `PYTHON -m pipeline`. A `--plugin`
    option for each plugin follows.
    """
    return " ".join([_find_program(), *(f"--plugin {name}" for name in list_plugins())])


def _find_program() -> str:
    script = sys.argv[0]
    if os.path.basename(script) != SCRIPT:
        return f"{shlex.quote(this_python())} -m pipeline"
    on_path = shutil.which(SCRIPT)
    if on_path is not None and os.path.realpath(on_path) == os.path.realpath(script):
        return SCRIPT
    return shlex.quote(shorten_path(os.path.abspath(script)))


def program() -> str:
    """Return the name of this program in its help: `accrete`, or `python -m pipeline`."""
    if os.path.basename(sys.argv[0]) == SCRIPT:
        return SCRIPT
    return "python -m pipeline"


def logs_command(storage: str, name: str) -> str:
    """Return the command that prints the log of a stage. The caller appends the stage's id.

    Args:
        storage: Storage of the run.
        name: Name of the run.
    """
    return f"{this_command()} logs --storage {shlex.quote(storage)} {name}"


def shorten_path(path: str) -> str:
    """Return a path inside the current folder as a relative path, and another path unchanged."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative
