"""The commands reproduce and measure: tables of papers, and measured values in the documents."""

from __future__ import annotations

import argparse
import shlex

from pipeline.cli.arguments import AddCommand, add_method_option
from pipeline.config import invocation
from workers.errors import UserError


def add_commands(add_command: AddCommand) -> None:
    """Add the commands of this module to the command line."""
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
        "--record",
        action="store_true",
        help="record the runs in configs/measured.csv as `accrete measure` does",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="override a setting of all runs of the table, e.g. --set storage=FOLDER",
    )
    parser = add_command(
        "measure",
        measure,
        "run a config of this checkout, record the figures in configs/measured.csv, and write the "
        "tables of README, docs and configs again",
        nargs="?",
        default="",
        help="path of a config in configs; default: only write the tables again",
    )
    add_method_option(parser)


def reproduce(args: argparse.Namespace) -> int:
    """List the tables; or print, plan or compute one."""
    from pipeline.app import reproduction  # lazy import: loads torch
    from pipeline.config import paper_tables

    _check_options(args)
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
        args.table, args.scale, args.overrides, console.Console, command, args.record
    )
    print(f"\n{reproduction.format_reproduction(result)}")
    for path in reproduction.write_files(result):
        print(f"{'picture' if path.endswith('.png') else 'table'}: {path}")
    return 0


def _check_options(args: argparse.Namespace) -> None:
    """Raise UserError for options that would have no effect."""
    if not args.table and (args.scale or args.plan or args.record or args.overrides):
        raise UserError(
            "reproduce got options and no table; name one, as in: reproduce meat-table-1 --scale "
            "small; `reproduce` alone lists them"
        )
    if not args.scale and (args.plan or args.record):
        option = "--plan" if args.plan else "--record"
        raise UserError(f"{option} needs --scale paper, real or small")
    if args.plan and args.record:
        raise UserError("--plan runs nothing, so there is nothing for --record; leave one out")


def measure(args: argparse.Namespace) -> int:
    """Run and record a config if one is given, and write all generated tables again."""
    from pipeline.app import measuring  # lazy import: loads torch
    from pipeline.app.runs import format_command
    from pipeline.shell import console

    if args.config:
        command = format_command("measure", args.config, args.overrides)
        changed = measuring.measure(args.config, args.overrides, console.Console, command)
    else:
        changed = measuring.write_documents()
    for path in changed:
        print(f"written: {path}")
    if not changed:
        print("all figures were up to date")
    return 0
