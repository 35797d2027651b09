"""The command reproduce: tables of papers."""

from __future__ import annotations

import argparse
import shlex

from pipeline.cli.arguments import AddCommand
from pipeline.config import invocation


def add_commands(add_command: AddCommand) -> None:
    """Add the command of this module to the command line."""
    parser = add_command(
        "reproduce",
        reproduce,
        "compute a table of a paper and print it beside the paper's values; without a table, list "
        "them",
        config=False,
    )
    parser.add_argument(
        "table", nargs="?", default="", metavar="TABLE", help="name of a table, or path of its file"
    )
    parser.add_argument(
        "--scale",
        choices=("paper", "real", "small"),
        help="paper: on the paper's data; real, small: the same methods on smaller data, to "
        "compare the order of the rows. Without it, nothing runs, and what is measured is printed",
    )
    parser.add_argument(
        "--plan",
        action="store_true",
        help="print the cost of what is missing, and run nothing",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="override a setting of all runs of the table, e.g. --set storage=FOLDER",
    )


def reproduce(args: argparse.Namespace) -> int:
    """List the tables, print one, or compute one."""
    from pipeline.app import reproduction  # start-up time: imports torch
    from pipeline.config import paper_tables

    if not args.table:
        names = paper_tables.list_paper_tables()
        for name in names:
            table = paper_tables.read_paper_table(paper_tables.find_paper_table(name))
            print(f"{name}: {table.title}; scales: {', '.join(table.scales)}")
        print(f"\ncompute one: {invocation.this_command()} reproduce {names[0]} --scale small")
        return 0
    if args.scale is None:
        print(reproduction.describe_table(args.table, args.overrides))
        return 0
    if args.plan:
        print(reproduction.describe_plan(args.table, args.scale, args.overrides))
        return 0
    from pipeline.shell import console

    words = ["reproduce", args.table, "--scale", args.scale]
    for override in args.overrides:
        words += ["--set", override]
    command = f"{invocation.this_command()} {shlex.join(words)}"
    result = reproduction.reproduce(
        args.table, args.scale, args.overrides, console.Console, command
    )
    print(f"\n{reproduction.format_reproduction(result)}")
    for path in reproduction.write_files(result):
        print(f"{'picture' if path.endswith('.png') else 'table'}: {path}")
    return 0
