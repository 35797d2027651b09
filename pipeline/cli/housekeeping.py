"""The command that deletes results: gc."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeline.cli.arguments import AddCommand, add_storage_option, parse_age, parse_gigabytes
from pipeline.cli.question import is_confirmed

if TYPE_CHECKING:
    from pipeline.graph.store import Garbage


def add_commands(add_command: AddCommand) -> None:
    """Add the commands of this module to the command line."""
    gc_parser = add_command(
        "gc",
        collect_garbage,
        "delete stage results that no named run needs; asks first",
        config=False,
    )
    gc_parser.add_argument(
        "--earlier",
        action="store_true",
        help="also those that runs needed only before their config files or images were changed",
    )
    add_storage_option(gc_parser, "storage folder")
    gc_parser.add_argument(
        "--older-than",
        type=parse_age,
        default=0.0,
        metavar="AGE",
        help="only results older than AGE, as in 30d, 12h or 90m",
    )
    gc_parser.add_argument(
        "--keep-gb",
        type=parse_gigabytes,
        default=0.0,
        metavar="N",
        help="keep the newest ones, N GB of them",
    )
    gc_parser.add_argument(
        "--dry-run", action="store_true", help="list them with their ages, and delete nothing"
    )
    gc_parser.add_argument("--yes", action="store_true", help="do not ask")


def collect_garbage(args: argparse.Namespace) -> int:
    """Delete stage results that no named run needs, after confirmation."""
    from pipeline.app.garbage import delete_garbage, find_garbage
    from pipeline.config.yaml_files import absolute
    from pipeline.graph.store import Store

    store = Store(absolute(args.storage))
    changed = store.earlier_names()
    let_go = changed if args.earlier else []
    garbage = find_garbage(store, let_go, args.older_than, args.keep_gb * 1e9)
    if changed and not args.earlier:
        print(
            "results of earlier versions of config files or images are kept "
            f"({', '.join(changed)}); --earlier includes them"
        )
    size = sum(folder.size_bytes for folder in garbage)
    if not garbage:
        reason = "every result belongs to a named run"
        if args.older_than or args.keep_gb:
            reason += ", is younger than --older-than or within --keep-gb"
        print(f"nothing to delete: {reason}")
        return 0
    size_text = f"{size / 1e6:.1f} MB"
    if len(garbage) == 1:
        print(f"1 result or remains of an interrupted one, {size_text}, belongs to no named run")
    else:
        print(
            f"{len(garbage)} results and remains of interrupted ones, {size_text}, "
            "belong to no named run"
        )
    if args.dry_run:
        print(format_garbage(garbage))
        return 0
    if not args.yes and not is_confirmed("delete them?"):
        print("nothing was deleted")
        return 0
    paths = [folder.path for folder in garbage]
    needed_again, busy = delete_garbage(store, paths, let_go)
    if needed_again:
        print(describe_kept_folders(len(needed_again), "a new run needs"))
    if busy:
        print(describe_kept_folders(len(busy), "a process is computing"))
    if len(paths) > len(needed_again) + len(busy):
        print("deleted")
    return 0


def describe_kept_folders(count: int, reason: str) -> str:
    """Describe how many of the listed folders are kept, and why.

    Args:
        count: Number of kept folders.
        reason: Subject and verb of the reason, for example "a new run needs".
    """
    if count == 1:
        return f"1 of them is kept: {reason} it"
    return f"{count} of them are kept: {reason} them"


def format_garbage(garbage: Sequence[Garbage]) -> str:
    """Format a table of the folders: path, time of writing, size in megabytes."""
    from pipeline.config.text import table_text

    rows = []
    for folder in garbage:
        written = time.strftime("%Y-%m-%d %H:%M", time.localtime(folder.written))
        rows.append([folder.path, written, f"{folder.size_bytes / 1e6:.1f}"])
    return table_text(["folder", "written", "MB"], rows)
