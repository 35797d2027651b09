"""The commands on data sets by name: data list."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from pipeline.shell import invocation
from workers.errors import UserError


def commands(add_command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the commands of this module to the command line."""
    data_parser = add_command(
        "data", data, "list the data sets that have a card: sizes, licences, sources", config=False
    )
    actions = data_parser.add_subparsers(required=True, metavar="ACTION", dest="action")
    list_parser = actions.add_parser(
        "list",
        help="the cards of datasets/: classes, images, licence, how each is obtained, whether it "
        "was verified",
    )
    list_parser.add_argument(
        "cards", nargs="*", metavar="CARD", help="tell all about these; by default a line on each"
    )


def data(args: argparse.Namespace) -> int:
    """Run an action on data sets."""
    return list_cards(args)


def list_cards(args: argparse.Namespace) -> int:
    """Print a line for each card, or all that is known of some.

    Raise `UserError` where a card cannot be read, after what can be.
    """
    from pipeline.console import table_text  # imports pyarrow
    from pipeline.data import catalogue

    if args.cards:
        print("\n\n".join(map(catalogue.describe, args.cards)))
        return 0
    rows, problems = catalogue.read_catalogue()
    for line in table_text(catalogue.HEADING, rows, catalogue.LEFT).splitlines():
        print(line.rstrip())
    print(f"\n{catalogue.note(invocation.this_command())}")
    if problems:
        raise UserError("; ".join(problems))
    return 0
