"""The commands for data that grow and shrink: add, remove."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from pipeline.cli.arguments import AddCommand, parse_amount
from pipeline.cli.question import is_confirmed
from pipeline.config import invocation
from workers.errors import UserError

if TYPE_CHECKING:
    from pipeline.app.runs import RunResult

MAX_DROP = 1.0  # points of accuracy


def add_commands(add_command: AddCommand) -> None:
    """Add the commands of this module to the command line."""
    parser = add_command(
        "add",
        add,
        "take new classes or images into a run: write the change into its config, run what "
        "follows from it, and update the model that serves",
        config=False,
    )
    parser.add_argument("config", help="path of a config, which is changed")
    parser.add_argument(
        "data",
        metavar="DATA",
        help="the new data, or the data of a card of the config, which have grown",
    )
    parser.add_argument(
        "--as",
        dest="kind",
        choices=("task", "classes", "images"),
        help="what the data are, where they leave a doubt: a task of their own; classes, of which "
        "those that the stream has get the images; images of known classes alone",
    )
    parser.add_argument("--into", default="", metavar="TASK", help="the task that new classes join")
    parser.add_argument(
        "--name", default="", help="name of the new task (default: the next free one)"
    )
    _add_model_options(parser, "which gets a new version; a new one is written")
    parser.add_argument(
        "--max-drop",
        type=points,
        metavar="POINTS",
        help="the folder keeps its version if a task loses more accuracy on its test images "
        f"(default: {MAX_DROP:g})",
    )
    _add_remove_command(add_command)


def _add_model_options(parser: argparse.ArgumentParser, change: str) -> None:
    """Add the options that name a model folder; `change` describes the effect on it."""
    parser.add_argument(
        "--model",
        default="",
        metavar="MODEL_DIR",
        help=f"the folder that serves the run, {change}",
    )
    parser.add_argument(
        "--method", metavar="LABEL", help="label of the method, where the run has several"
    )


def _add_remove_command(add_command: Callable[..., argparse.ArgumentParser]) -> None:
    parser = add_command(
        "remove",
        remove,
        "take a task, a class or images out of a run: write the change into its config and cards, "
        "train what follows, and delete what was learned from them; asks first",
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
        help="the images that a text file names, one a line: a path below the source as "
        "rejected.csv writes it, or the sha256 of the image",
    )
    _add_model_options(parser, "which gets a new version and loses all earlier ones")
    parser.add_argument("--yes", action="store_true", help="do not ask before deleting")


def points(text: str) -> float:
    """Return a number of points of accuracy: finite, and at least 0."""
    return parse_amount(text, "number of points")


def add(args: argparse.Namespace) -> int:
    """Take new data into a run, and update the model that serves."""
    from pipeline.growing import add as growing  # imports torch
    from pipeline.shell import console

    _check_method(args)
    if args.max_drop is not None and not args.model:
        raise UserError("--max-drop needs a model folder; give one with --model, or leave it out")
    request = growing.AddRequest(
        args.config,
        args.data,
        args.kind,
        args.into,
        args.name,
        args.model,
        args.method,
        MAX_DROP if args.max_drop is None else args.max_drop,
    )

    def show(result: RunResult) -> None:
        print(console.summary(result.tables, result.outcome, result.report.lines))

    growing.add(request, console.Console, invocation.this_command(), print, show)
    return 0


def remove(args: argparse.Namespace) -> int:
    """Take a task, a class or images out of a run, or a task out of a model folder."""
    from pipeline.results import bundles  # imports torch

    if bundles.is_model_folder(args.config):
        _remove_from_folder(args)
        return 0
    from pipeline.config import settings as configs
    from pipeline.growing import remove as growing
    from pipeline.growing.add import changing
    from pipeline.growing.removals import Target
    from pipeline.shell import console

    _check_method(args)
    target = Target(args.task, args.class_, args.images)
    request = growing.RemoveRequest(args.config, target, args.model, args.method)

    def confirm(question: str) -> bool:
        return args.yes or is_confirmed(question)

    with changing(configs.load(args.config), print):
        growing.remove(request, console.Console, invocation.this_command(), print, confirm)
    return 0


def _remove_from_folder(args: argparse.Namespace) -> None:
    """Remove a task from a model folder."""
    from pipeline.results import bundles

    if not args.task or args.model or args.method:
        raise UserError(
            f"{args.config} is a model folder, from which only whole tasks can be removed (--task "
            f"NAME); for more, name the config of its run, with --model {args.config}"
        )
    note = bundles.remove_task(args.config, args.task)
    print(f"{args.config} no longer serves {args.task}{f'; {note}' if note else ''}")


def _check_method(args: argparse.Namespace) -> None:
    if args.method and not args.model:
        raise UserError("--method needs a model folder; give one with --model, or leave it out")
