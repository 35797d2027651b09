"""The commands for data sets: data list, data preview, data prepare."""

from __future__ import annotations

import argparse
import shlex
import webbrowser
from pathlib import Path

from pipeline.cli.arguments import AddCommand
from pipeline.config import invocation
from workers.errors import UserError


def add_commands(add_command: AddCommand) -> None:
    """Add the commands of this module to the command line."""
    data_parser = add_command(
        "data",
        data,
        "list data sets that have a card, preview their images, or sort official files into the "
        "class folders that a card reads",
        config=False,
    )
    actions = data_parser.add_subparsers(required=True, metavar="ACTION", dest="action")
    list_parser = actions.add_parser(
        "list",
        help="the cards of datasets/: classes, images, licence, how each is obtained, whether it "
        "was verified",
    )
    list_parser.add_argument(
        "cards",
        nargs="*",
        metavar="CARD",
        help="print everything about these cards; default: a line for each card",
    )

    preview_parser = actions.add_parser(
        "preview", help="open a page with images of each class and split, as the card reads them"
    )
    preview_parser.add_argument("card", metavar="CARD", help="name or path of a card")
    preview_parser.add_argument(
        "--no-open", action="store_true", help="write the page and print only its path"
    )

    prepare_parser = actions.add_parser(
        "prepare",
        help="sort official files that were fetched by hand into class folders, as links",
    )
    prepare_parser.add_argument("card", metavar="CARD", help="name or path of a card")
    prepare_parser.add_argument(
        "source", metavar="FROM", help="the folder of the unpacked official files"
    )
    prepare_parser.add_argument(
        "--to", metavar="FOLDER", help="the folder to fill (default: the one that the card reads)"
    )
    prepare_parser.add_argument(
        "--copy",
        action="store_true",
        help="write copies instead of links, so that FROM can be deleted afterwards",
    )


def data(args: argparse.Namespace) -> int:
    """Run the chosen action: list, preview or prepare."""
    if args.action == "prepare":
        return prepare_card(args)
    if args.action == "preview":
        return preview_card(args)
    return list_cards(args)


def prepare_card(args: argparse.Namespace) -> int:
    """Sort the official images of a card into class folders, and print the next step.

    With `--to`, the next step is `accrete init FOLDER`, which writes a card for this folder.
    Without `--to`, it is to name the card in a stream.
    """
    from pipeline.data import card_files, preparation  # imports pyarrow

    card = card_files.load_without_source(args.card)
    prepared = preparation.prepare(card, args.source, args.to, args.copy)
    print(
        f"{card.name}: {prepared.counts['train']} train and {prepared.counts['test']} test images "
        f"of {prepared.num_classes} classes, below {prepared.folder}"
    )
    if args.to:
        words = shlex.join(["init", prepared.folder])
        print(f"next: {invocation.this_command()} {words}")
    else:
        print(f"next: name it in a stream, {{card: {args.card}}}")
    return 0


def preview_card(args: argparse.Namespace) -> int:
    """Write the preview of a card, print its path and open it in a browser."""
    from pipeline.data import card_files, starter  # imports pyarrow

    path = starter.preview_card(card_files.load_card_file(args.card))
    if not args.no_open:
        webbrowser.open(Path(path).absolute().as_uri())
    print(f"preview: {path}")
    return 0


def list_cards(args: argparse.Namespace) -> int:
    """Print a line for each card, or all information about some cards.

    Raises:
        UserError: If a card cannot be read. Without names, the readable cards are printed first.
    """
    from pipeline.config.text import table_text
    from pipeline.data import catalogue

    if args.cards:
        program = invocation.this_command()
        print("\n\n".join(catalogue.describe_card(name, program) for name in args.cards))
        return 0
    entries, problems = catalogue.read_catalogue()
    rows = [entry.cells for entry in entries]
    for line in table_text(catalogue.HEADING, rows, catalogue.LEFT).splitlines():
        print(line.rstrip())
    print(f"\n{catalogue.note(invocation.this_command())}")
    if problems:
        raise UserError("; ".join(problems))
    return 0
