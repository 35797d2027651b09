"""The commands gc and convert: delete results, and convert checkpoints."""

from __future__ import annotations

import argparse
import shlex
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
        "delete stage results that no recorded run and no search needs; asks first",
        config=False,
    )
    gc_parser.add_argument(
        "--earlier",
        action="store_true",
        help="also results that runs needed only before their config files or images were changed",
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
        help="of these results, keep the newest, up to N GB",
    )
    gc_parser.add_argument(
        "--dry-run",
        action="store_true",
        help="list the results with the time of writing, and delete nothing",
    )
    gc_parser.add_argument("--yes", action="store_true", help="do not ask")
    parser = add_command(
        "convert",
        convert,
        "convert a pickled checkpoint (.pt, .pth) to safetensors, for backbone.weights; runs no "
        "code from the checkpoint",
        config=False,
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="file that `torch.save` wrote")
    parser.add_argument(
        "target",
        nargs="?",
        default="",
        metavar="FILE",
        help="file to write; default: CHECKPOINT with the suffix .safetensors",
    )
    parser.add_argument(
        "--key",
        default="",
        help="entry of the checkpoint to take, for example state_dict_ema; default: the only one "
        "with tensors",
    )


def convert(args: argparse.Namespace) -> int:
    """Convert a pickled checkpoint to safetensors."""
    from workers.model.checkpoint_files import convert_checkpoint  # lazy import: loads torch

    conversion = convert_checkpoint(args.checkpoint, args.target, args.key)
    entry = f" of {conversion.key}" if conversion.key else ""
    print(f"{conversion.tensors:,} tensors{entry}, {conversion.values:,} values")
    print(f"use them: --set backbone.weights={shlex.quote(conversion.target)}")
    return 0


def collect_garbage(args: argparse.Namespace) -> int:
    """Delete stage results that no recorded run and no search needs, after confirmation."""
    from pipeline.app.garbage import delete_garbage, find_garbage
    from pipeline.config.yaml_files import absolute
    from pipeline.graph.store import Store

    store = Store(absolute(args.storage))
    # runs with changed configs or images: records in the storage list what they needed before
    runs_with_earlier_configs = store.earlier_names()
    forgotten_runs = runs_with_earlier_configs if args.earlier else []
    garbage = find_garbage(store, forgotten_runs, args.older_than, args.keep_gb * 1e9)
    if runs_with_earlier_configs and not args.earlier:
        print(
            "results that runs needed before their config files or images were changed are kept "
            f"(runs: {', '.join(runs_with_earlier_configs)}); --earlier includes them"
        )
    size = sum(folder.size_bytes for folder in garbage)
    if not garbage:
        reason = "every result is needed by a run or a search"
        if args.older_than or args.keep_gb:
            reason += ", younger than --older-than, or within --keep-gb"
        print(f"nothing to delete: {reason}")
        return 0
    size_text = f"{size / 1e6:.1f} MB"
    if len(garbage) == 1:
        print(
            f"1 result or remains of an interrupted one, {size_text}, is needed by no run and no "
            "search"
        )
    else:
        print(
            f"{len(garbage)} results and remains of interrupted ones, {size_text}, "
            "are needed by no run and no search"
        )
    if args.dry_run:
        print(format_garbage(garbage))
        return 0
    if not args.yes and not is_confirmed("delete them?"):
        print("nothing was deleted")
        return 0
    paths = [folder.path for folder in garbage]
    no_longer_garbage, busy = delete_garbage(store, paths, forgotten_runs)
    if no_longer_garbage:
        state = "needed by a run or a search now, or already deleted"
        print(describe_undeleted_folders(len(no_longer_garbage), state))
    if busy:
        print(describe_undeleted_folders(len(busy), "in use by another process"))
    if len(paths) > len(no_longer_garbage) + len(busy):
        print("deleted")
    return 0


def describe_undeleted_folders(count: int, state: str) -> str:
    """Describe how many of the listed folders gc did not delete, and why.

    Args:
        count: Number of these folders.
        state: Their state, for example "in use by another process".
    """
    return f"{count} of them {'is' if count == 1 else 'are'} {state}"


def format_garbage(garbage: Sequence[Garbage]) -> str:
    """Format a table of the folders: path, time of writing, size in megabytes."""
    from pipeline.config.text import table_text

    rows = []
    for folder in garbage:
        written = time.strftime("%Y-%m-%d %H:%M", time.localtime(folder.written))
        rows.append([folder.path, written, f"{folder.size_bytes / 1e6:.1f}"])
    return table_text(["folder", "written", "MB"], rows)
