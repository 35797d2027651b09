"""The page of the command line: every command with its arguments, in the groups of its help."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from docs.site.markdown import Term, code, escape, term_list
from pipeline import cli
from pipeline.cli.help import EXAMPLES, GROUPS, list_subparsers

PROGRAM = "accrete"
INTRODUCTION = """`make setup` puts the command `accrete` into `.venv/bin`; `python -m pipeline` is
the same. `accrete COMMAND --help` says what stands below. The exit code is 0 after success, 2 where
the input cannot work (one sentence on stderr says why and what helps), 130 after Ctrl-C, and 143
after SIGTERM."""


def commands_page() -> str:
    """Return the page."""
    top = cli.parser(PROGRAM)
    commands = list_subparsers(top).choices
    blocks = ["# Command line", INTRODUCTION, "Options before the command:"]
    blocks.append(term_list(_terms_of(top)))
    for group in GROUPS:
        blocks.append(f"## {group.title.capitalize()}")
        for name in group.commands:
            blocks += _command_blocks(name, commands[name])
    return "\n\n".join(blocks) + "\n"


def _command_blocks(name: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield a command's description, example and arguments, and those of commands below it."""
    yield f"### `{name}`"
    if parser.description:
        yield escape(parser.description)
    if name in EXAMPLES:
        yield code(f"{PROGRAM} {EXAMPLES[name]}", "bash")
    terms = list(_terms_of(parser))
    if terms:
        yield term_list(terms)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner, inner_parser in action.choices.items():
                yield from _command_blocks(f"{name} {inner}", inner_parser)


def _terms_of(parser: argparse.ArgumentParser) -> Iterator[Term]:
    """Yield the arguments and options of a command, without `--help`."""
    for action in parser._actions:
        is_command = isinstance(action, argparse._SubParsersAction)
        if is_command or isinstance(action, argparse._HelpAction):
            continue
        name = ", ".join(action.option_strings) or str(action.metavar or action.dest)
        value = _value_of(action)
        if action.option_strings and value:
            name += f" {value}"
        facts = "required" if action.required and action.option_strings else ""
        yield Term(name, facts, (action.help or "") % _defaults_of(action))


def _value_of(action: argparse.Action) -> str:
    """Return what is written behind an option; empty for a switch."""
    if action.nargs == 0:
        return ""
    if action.choices:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return str(action.metavar or action.dest.upper())


def _defaults_of(action: argparse.Action) -> dict[str, object]:
    """Return what argparse puts into a help text."""
    return {"default": action.default, "prog": PROGRAM}
