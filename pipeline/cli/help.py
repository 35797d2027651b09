"""The help of the command line: groups of commands, and an example for each group and command."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import NamedTuple, NoReturn

from workers.errors import UserError

EXAMPLE = "e.g."  # prefix of the line with an example
HELP_POSITION = 16  # maximum column at which the description of a command begins


class CommandGroup(NamedTuple):
    """A group of commands in the general help.

    Attributes:
        title: Heading of the group.
        commands: Names of the commands, in the order of the help.
        example: The command whose example is shown below the group.
    """

    title: str
    commands: tuple[str, ...]
    example: str


GROUPS = (
    CommandGroup(
        "compute",
        (
            "run",
            "plan",
            "add",
            "remove",
            "launch",
            "search",
            "reproduce",
            "measure",
            "ingest",
            "shards",
        ),
        "run",
    ),
    CommandGroup("write configs", ("init", "data", "methods", "schema"), "init"),
    CommandGroup(
        "look at runs", ("runs", "status", "logs", "report", "compare", "analyse", "ui"), "status"
    ),
    CommandGroup("use trained models", ("predict", "bundle", "tasks", "serve"), "predict"),
    CommandGroup("keep house", ("gc", "convert", "completion"), "gc"),
)
# command -> example command line, without the name of the program
EXAMPLES: Mapping[str, str] = {
    "init": "init images/leaves",
    "data": "data list",
    "run": "run configs/demo.yaml --set train.epochs=3",
    "plan": "plan configs/demo.yaml --cost",
    "add": "add leaves.yaml images/leaves --model model",
    "remove": "remove leaves.yaml --class oak --model model",
    "launch": "launch configs/demo.yaml --on slurm --set cluster.workers=2",
    "search": "search configs/streams/digits.yaml --method meat",
    "reproduce": "reproduce meat-table-1 --scale small",
    "measure": "measure configs/demo.yaml",
    "ingest": "ingest configs/demo.yaml",
    "shards": "shards digits --split train",
    "runs": "runs --storage storage",
    "status": "status demo --watch",
    "logs": "logs demo meat/digits-45/train",
    "methods": "methods meat",
    "schema": "schema config > config.schema.json",
    "report": "report configs/demo.yaml",
    "compare": "compare demo demo-seed-1",
    "analyse": "analyse configs/demo.yaml --maps 2",
    "ui": "ui --storage storage",
    "predict": "predict configs/demo.yaml digit.png --method meat --task digits-45",
    "bundle": "bundle configs/demo.yaml --method meat --out model",
    "tasks": "tasks model list",
    "serve": "serve model --port 8000",
    "gc": "gc --storage storage",
    "convert": "convert checkpoint.pth --key model_ema",
    "completion": "completion bash > ~/.local/share/bash-completion/completions/accrete",
}


class HelpFormatter(argparse.HelpFormatter):
    """Formatter that does not wrap examples, because users copy them."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith(EXAMPLE):
            return indent + text
        return super()._fill_text(text, width, indent)


class Parser(argparse.ArgumentParser):
    """Argument parser that raises `UserError` if the command line is invalid."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


class GroupedParser(Parser):
    """The parser of all commands; its help lists them in groups.

    Commands that are in no group of GROUPS are listed under `more`.
    """

    def format_help(self) -> str:
        """Return the help: description, commands in groups, options."""
        formatter = HelpFormatter(self.prog, max_help_position=HELP_POSITION)
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        subparsers = list_subparsers(self)
        summaries = {action.dest: action for action in subparsers._choices_actions}
        for group in GROUPS:
            formatter.start_section(group.title)
            formatter.add_arguments([summaries.pop(name) for name in group.commands])
            formatter.add_text(example_text(self.prog, group.example))
            formatter.end_section()
        if summaries:
            formatter.start_section("more")
            formatter.add_arguments(summaries.values())
            formatter.end_section()
        formatter.start_section("options")
        formatter.add_arguments(action for action in self._actions if action.option_strings)
        formatter.end_section()
        formatter.add_text(f"Each command has more to say: {self.prog} run --help")
        return formatter.format_help()


def list_subparsers(parser: argparse.ArgumentParser) -> argparse._SubParsersAction[Parser]:
    """Return the argparse action that holds the parsers of all commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return action
    raise AssertionError(f"{parser.prog} has no commands")


def example_text(program: str, command: str) -> str:
    """Return the line with the example of a command, or "" for a command without an example."""
    if command not in EXAMPLES:
        return ""
    return f"{EXAMPLE} {program} {EXAMPLES[command]}"
