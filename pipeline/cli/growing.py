"""The commands that add data to a run and remove data from it: add, remove."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from pipeline.cli.arguments import AddCommand, parse_amount
from pipeline.cli.question import is_confirmed
from pipeline.config import invocation
from workers.errors import UserError

if TYPE_CHECKING:
    from pipeline.app.runs import RunResult

DEFAULT_MAX_DROP = 1.0  # percentage points of accuracy


def add_commands(add_command: AddCommand) -> None:
    """Add the commands of this module to the command line."""
    parser = add_command(
        "add",
        add,
        "add new classes or images to a run: change its config, run the affected stages, and "
        "update the served model",
        config=False,
    )
    parser.add_argument("config", help="path of a config, which is changed")
    parser.add_argument(
        "data",
        metavar="DATA",
        help="new data (a file, folder or URI), or the source of a card of the config if new files "
        "were added to it",
    )
    parser.add_argument(
        "--as",
        dest="kind",
        choices=("task", "classes", "images"),
        help="how to use DATA if it is ambiguous. task: as a separate task; classes: as classes: "
        "new ones are added, and known ones get more images; images: as images of known classes "
        "only",
    )
    parser.add_argument("--into", default="", metavar="TASK", help="the task that new classes join")
    parser.add_argument(
        "--name",
        default="",
        help="name of the new task (default: the card's name with the next free number, such as "
        "birds-3)",
    )
    _add_model_options(
        parser, "model folder to update: it gets a new version, or is created if it does not exist"
    )
    parser.add_argument(
        "--max-drop",
        type=parse_max_drop,
        metavar="POINTS",
        help="do not update the model folder if the test accuracy of a task drops by more than "
        f"this (in percentage points; default: {DEFAULT_MAX_DROP:g})",
    )
    _add_remove_command(add_command)


def _add_model_options(parser: argparse.ArgumentParser, help_text: str) -> None:
    """Add the options that name a model folder. `help_text` is the help of --model."""
    parser.add_argument(
        "--model",
        default="",
        metavar="MODEL_DIR",
        help=help_text,
    )
    parser.add_argument(
        "--method", metavar="LABEL", help="label of the method, if the run has several"
    )


def _add_remove_command(add_command: AddCommand) -> None:
    parser = add_command(
        "remove",
        remove,
        "remove a task, a class or images from a run: change its config and cards, train the "
        "affected stages again, and delete the results that were trained on the removed data; asks "
        "before it deletes, except if it removes a task from a model folder",
        config=False,
    )
    parser.add_argument(
        "config",
        metavar="CONFIG|MODEL_DIR",
        help="path of a config, which is changed; or a model folder that loses the task",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--task", default="", metavar="NAME", help="the task")
    what.add_argument(
        "--class",
        dest="class_",
        default="",
        metavar="NAME",
        help="the class, out of every task that has it",
    )
    what.add_argument(
        "--images",
        default="",
        metavar="FILE",
        help="text file that names the images, one per line: the path below the source, as in "
        "rejected.csv of the ingest stage, or the sha256 of the file",
    )
    _add_model_options(
        parser, "model folder to update: it gets a new version, and all earlier ones are deleted"
    )
    parser.add_argument("--yes", action="store_true", help="do not ask before deleting")


def parse_max_drop(text: str) -> float:
    """Parse a drop in accuracy: a finite number of percentage points, at least 0."""
    return parse_amount(text, "number of points")


def add(args: argparse.Namespace) -> int:
    """Add new data to a run, and update the served model."""
    from pipeline.growing import add as add_module  # imported here for a fast start: needs torch
    from pipeline.shell import console

    _check_method_has_model(args)
    if args.max_drop is not None and not args.model:
        raise UserError("--max-drop needs a model folder; give one with --model, or leave it out")
    request = add_module.AddRequest(
        args.config,
        args.data,
        args.kind,
        args.into,
        args.name,
        args.model,
        args.method,
        DEFAULT_MAX_DROP if args.max_drop is None else args.max_drop,
    )

    def show(result: RunResult) -> None:
        print(console.summary(result.tables, result.outcome, result.report.lines))

    add_module.add(request, console.Console, invocation.this_command(), print, show)
    return 0


def remove(args: argparse.Namespace) -> int:
    """Remove a task, a class or images from a run, or a task from a model folder."""
    from pipeline.results import bundles  # imported here for a fast start: needs torch

    if bundles.is_model_folder(args.config):
        _remove_from_folder(args)
        return 0
    from pipeline.config import settings as configs
    from pipeline.growing import remove as remove_module
    from pipeline.growing.add import change_lock
    from pipeline.growing.removals import Target
    from pipeline.shell import console

    _check_method_has_model(args)
    target = Target(args.task, args.class_, args.images)
    request = remove_module.RemoveRequest(args.config, target, args.model, args.method)

    def confirm(question: str) -> bool:
        return args.yes or is_confirmed(question)

    with change_lock(configs.load(args.config), print):
        remove_module.remove(request, console.Console, invocation.this_command(), print, confirm)
    return 0


def _remove_from_folder(args: argparse.Namespace) -> None:
    """Remove a task from a model folder."""
    from pipeline.results import bundles

    if not args.task or args.model or args.method:
        raise UserError(
            f"{args.config} is a model folder, from which only whole tasks can be removed (--task "
            "NAME); to remove a class or images, give the config of its run and --model "
            f"{args.config}"
        )
    note = bundles.remove_task(args.config, args.task)
    print(f"{args.config} no longer serves {args.task}{f'; {note}' if note else ''}")


def _check_method_has_model(args: argparse.Namespace) -> None:
    if args.method and not args.model:
        raise UserError("--method needs a model folder; give one with --model, or leave it out")
