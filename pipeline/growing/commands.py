"""The commands for data that grow and shrink: add."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

from pipeline.shell import invocation
from workers.errors import UserError

MAX_DROP = 1.0  # points of accuracy


def commands(add_command: Callable[..., argparse.ArgumentParser]) -> None:
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
    parser.add_argument(
        "--model",
        default="",
        metavar="MODEL_DIR",
        help="the folder that serves the run, which gets a new version; a new one is written",
    )
    parser.add_argument(
        "--method", metavar="LABEL", help="label of the method, where the run has several"
    )
    parser.add_argument(
        "--max-drop",
        type=points,
        default=MAX_DROP,
        metavar="POINTS",
        help="the folder keeps its version if a task loses more accuracy on its test images "
        f"(default: {MAX_DROP:g})",
    )


def points(text: str) -> float:
    """Return a number of points of accuracy: finite, and at least 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise argparse.ArgumentTypeError(
            f"{text!r:.40} is no number of points; give a finite number of at least 0, as in 2"
        )
    return number


def add(args: argparse.Namespace) -> int:
    """Take new data into a run, and update the model that serves."""
    from pipeline import app, console  # imports torch
    from pipeline import config as configs
    from pipeline.growing import add as growing
    from pipeline.yaml_files import absolute
    from workers.storage.artifact import join
    from workers.storage.lock import stage_lock

    if args.method and not args.model:
        raise UserError("--method is of a model folder; give the folder with --model, or leave it")
    request = growing.AddRequest(
        args.config,
        args.data,
        args.kind,
        args.into,
        args.name,
        args.model,
        args.method,
        args.max_drop,
    )
    config = configs.load(args.config)
    label = ""
    if args.model:
        from pipeline.growing import publishing

        label = publishing.choose_method(config, args.model, args.method)
    root = join(absolute(config.storage), "stages")

    def say_waiting() -> None:
        print(f"another command adds to run {config.name}; waiting until it is done")

    with stage_lock(root, f"add-{config.name}", on_wait=say_waiting):
        result = growing.add(request, console.Console, invocation.this_command(), print)
        print(console.summary(result.tables, result.outcome, result.report.lines))
        if args.model:
            run = app.prepare(args.config)
            print(publishing.publish_run(run, label, args.model, args.max_drop))
    return 0
