"""Completion of the command line in bash and zsh: commands, options, files and names of runs.

The script is generated once. Completion does not start Accrete, so it is fast.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from pipeline.cli.help import list_subparsers
from workers.errors import require_package

SHELLS = ("bash", "zsh")
# The names of runs are the folders below `storage/runs`. A run can also be given by its config.
PREAMBLE = {
    "bash": """
_accrete_config_files() {
  compgen -f -X '!*.yaml' -- "$1"
  compgen -f -X '!*.yml' -- "$1"
  compgen -d -- "$1"
}
_accrete_run_files() {
  local folder
  for folder in storage/runs/*/; do
    [ -d "$folder" ] && folder="${folder%/}" && compgen -W "${folder##*/}" -- "$1"
  done
  _accrete_config_files "$1"
}
""",
    "zsh": """
_accrete_config_files() { _files -g '*.(yaml|yml)(-.) *(-/)' }
_accrete_run_files() {
  local -a runs
  runs=(storage/runs/*(-/N:t))
  compadd -a runs
  _accrete_config_files
}
""",
}
# Format of shtab: shell -> function of PREAMBLE that completes the value of an argument.
CONFIGS = {"bash": "_accrete_config_files", "zsh": "_accrete_config_files"}
RUNS = {"bash": "_accrete_run_files", "zsh": "_accrete_run_files"}
FOLDERS = ("storage", "out", "model")  # names (`dest`) of arguments whose values are folders
FILES = ("FILE", "IMAGE")  # metavars of arguments whose values are files


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the completion script for a shell.

    Args:
        parser: Parser of the whole command line.
        shell: An item of SHELLS.

    Raises:
        UserError: If the package shtab is not installed.
    """
    require_package("shtab", "completion", "type the commands in full")
    import shtab  # imported here, so that other commands start fast

    for action in list_actions(parser):
        if action.dest == "config":
            action.complete = CONFIGS  # type: ignore[attr-defined]
        elif action.metavar == "RUN":
            action.complete = RUNS  # type: ignore[attr-defined]
        elif action.metavar in FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.dest in FOLDERS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    return str(shtab.complete(parser, shell, preamble=PREAMBLE[shell]))


def list_actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the arguments and options of every command.

    Arguments of nested commands, such as `tasks MODEL_DIR import FILE`, are not included, so their
    values are not completed.
    """
    for subparser in list_subparsers(parser).choices.values():
        yield from subparser._actions
