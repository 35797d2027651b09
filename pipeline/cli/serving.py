"""The commands that use a finished run as one model: predict, bundle, tasks and serve."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pipeline.cli.arguments import AddCommand
from pipeline.data.csv_text import to_csv
from pipeline.serving import serve_command
from workers.errors import UserError
from workers.storage.regular_file import write_named_file

if TYPE_CHECKING:
    from pipeline.serving.model_source import ModelSource
    from workers.serving.bundle import Bundle
    from workers.serving.versions import Version

DEFAULT_TOP = 3  # printed probabilities per image
DIGEST_CHARACTERS = 12  # printed characters of a sha256


def add_commands(add_command: AddCommand) -> None:
    """Add the commands of this module to the command line."""
    ask = add_command(
        "predict",
        predict,
        "classify images with the tasks of a finished run; the config may be a model folder",
    )
    ask.add_argument("images", nargs="+", metavar="IMAGE", help="path of a JPEG, PNG or WebP file")
    ask.add_argument(
        "--task", metavar="NAME", help="the task of the images, if the method cannot infer it"
    )
    ask.add_argument(
        "--rule",
        default="refuse",
        help="for images without a task: `refuse`, or a rule that chooses one: `confident` (the "
        "most probable class), `entropy` (the least), `nearest` (the nearest class mean), `ranpac` "
        "(ridge regression on the frozen backbone), or `recommended` (of these, the one that was "
        "right most often when the model was written)",
    )
    ask.add_argument(
        "--top",
        type=int,
        default=DEFAULT_TOP,
        metavar="K",
        help=f"probabilities to show (default: {DEFAULT_TOP}; 0: all)",
    )
    ask.add_argument("--csv", metavar="FILE", help="also write the table as CSV")
    make = add_command(
        "bundle",
        bundle,
        "write a method of a finished run into a folder that can be served on its own",
    )
    make.add_argument(
        "--out",
        metavar="DIR",
        help="a new folder, or a URI, for example s3://bucket/model",
    )
    make.add_argument(
        "--timm",
        metavar="TASK",
        help="write only this task, as weights and config for plain timm",
    )
    make.add_argument(
        "--onnx",
        metavar="FILE",
        help="also write one task as an ONNX file (without --out: only this file); needs the "
        "packages of the extra `onnx`",
    )
    make.add_argument("--task", metavar="NAME", help="the task of --onnx, if there are several")
    start = add_command(
        "serve",
        serve,
        "answer requests over HTTP with Ray Serve; the config may be a model folder, or "
        "models:/NAME@ALIAS of MLflow",
    )
    serve_command.add_options(start)
    for each in (ask, start):
        each.add_argument(
            "--no-record",
            action="store_true",
            help="do not count the inputs of a model folder, which `report MODEL_DIR` shows",
        )
    for each in (ask, make, start):
        each.add_argument(
            "--method", metavar="LABEL", help="label of the method, if the run has several"
        )
    states = add_command(
        "tasks",
        tasks,
        "list, export or import tasks of a model folder; list its versions, or go back to one",
        config=False,
    )
    states.add_argument("model", metavar="MODEL_DIR", help="a folder that `bundle` wrote")
    actions = states.add_subparsers(required=True, metavar="ACTION", dest="action")
    actions.add_parser("list", help="list the served tasks")
    actions.add_parser("versions", help="list the kept versions, the current one last")
    actions.add_parser("rollback", help="serve the previous version, and drop the current one")
    for action, arguments, text in (
        ("export", ("name", "file"), "write a task into a file"),
        ("import", ("file",), "add an exported task"),
    ):
        sub = actions.add_parser(action, help=text)
        for argument in arguments:
            sub.add_argument(argument, metavar=argument.upper())
        if action == "import":
            sub.add_argument(
                "--replace", action="store_true", help="replace a task of the same name"
            )


def open_bundle(args: argparse.Namespace) -> Bundle:
    """Return the bundle that `args.config` names: a model folder, or a config's finished run.

    Raises:
        UserError: If the run is not finished, if it has several methods and `--method` names none,
            or if `--method` or `--set` is given with a model folder.
    """
    from pipeline.results import bundles

    if bundles.is_model_folder(args.config):
        refuse_run_options(args, "a model folder")
        return bundles.open_folder(args.config)
    from pipeline.app import runs as app
    from pipeline.results.frames import choose_label

    run = app.prepare(args.config, args.overrides)
    label = choose_label(run.config.name, [*run.config.methods], args.method, "--method")
    return bundles.build_run_bundle(run.graph, run.store, label)


def refuse_run_options(args: argparse.Namespace, kind: str) -> None:
    """Raise `UserError` if `--method` or `--set` is given with a model. `kind` describes it."""
    if args.method or args.overrides:
        raise UserError(
            f"{args.config!r} is {kind} with one method and fixed settings; leave out --method "
            "and --set"
        )


def find_record_folder(args: argparse.Namespace) -> str:
    """Return the model folder in which inputs are counted, or "" if they are not counted.

    If a model folder cannot store the counts, the reason is printed to stderr.
    """
    from pipeline.config.yaml_files import absolute
    from pipeline.results import bundles
    from pipeline.serving.updates import notify
    from workers.serving.input_counts import find_obstacle

    if args.no_record or not bundles.is_model_folder(args.config):
        return ""
    folder = absolute(args.config)
    obstacle = find_obstacle(folder)
    if obstacle:
        notify(f"inputs are not counted: {obstacle}; --no-record leaves out this line")
        return ""
    return folder


# ---- commands ------------------------------------------------------------------------------------
def predict(args: argparse.Namespace) -> int:
    """Classify images and print a table with a row for each. Return the exit code."""
    from pipeline.config.text import table_text
    from pipeline.results.model import predict_in_chunks
    from workers.serving.recorder import recording
    from workers.serving.server import Predictor

    served = Predictor(open_bundle(args))
    paths = [os.fspath(path) for path in args.images]
    with recording(served, find_record_folder(args)):
        answers = [*predict_in_chunks(served, paths, args.task, args.rule, args.top)]
    heading = ["image", "task", "confidence", "class", "probability", "probabilities"]
    rows = []
    for path, answer in zip(args.images, answers, strict=True):
        listed = [f"{name} {value:.3f}" for name, value in answer.probabilities.items()]
        confidence = f"{answer.confidence:.3f}"
        probability = f"{answer.probability:.3f}"
        rows.append([path, answer.task, confidence, answer.class_, probability, ", ".join(listed)])
    print(table_text(heading, rows))
    if args.csv:
        write_named_file("--csv", args.csv, to_csv(heading, rows))
    return 0


def bundle(args: argparse.Namespace) -> int:
    """Write a bundle, or a single task for timm or as an ONNX file. Return the exit code."""
    if not args.out and (args.timm or not args.onnx):
        raise UserError("bundle: --out is missing; add --out DIR, a new folder to write into")
    if args.task and not args.onnx:
        raise UserError(
            f"bundle: --task is {args.task!r}, but a bundle contains all tasks; leave out --task, "
            "or add --onnx FILE"
        )
    from pipeline.shell.console import at_work  # lazy import, for a fast start

    with at_work(lambda: "writing the model"):
        source = open_bundle(args)
        if args.onnx:  # first: if it fails, no model folder must be left behind
            _write_onnx(source, args)
        if args.out:
            _write_model_folder(source, args)
    return 0


def _write_onnx(source: Bundle, args: argparse.Namespace) -> None:
    """Write one task of a bundle as an ONNX file."""
    from pipeline.config.yaml_files import absolute
    from workers.serving import onnx_file

    names = [task.name for task in source.tasks]
    if args.timm and args.task not in (None, args.timm):
        raise UserError(
            f"bundle: --timm is {args.timm!r} and --task is {args.task!r}; leave out --task, or "
            "write the two tasks with two commands"
        )
    task_name = args.task or args.timm
    if task_name is None and len(names) > 1:
        raise UserError(
            f"bundle: --onnx writes one task, but there are several; choose one with --task: "
            f"{', '.join(names)}"
        )
    task_name = task_name or names[0]
    onnx_file.write_onnx_file(source, task_name, absolute(args.onnx))
    print(
        f"{args.onnx}: task {task_name}; {onnx_file.INPUT} (N, 3, H, W), normalised, give "
        f"{onnx_file.OUTPUT} (N, {source.task(task_name).num_classes})"
    )


def _write_model_folder(source: Bundle, args: argparse.Namespace) -> None:
    """Write a bundle, or a single task for plain timm, into a new folder."""
    from pipeline.config.yaml_files import absolute
    from pipeline.results import bundles

    out = absolute(args.out)
    if args.timm:
        from workers.serving import timm_model

        timm_model.write_timm_folder(source, args.timm, out)
        folder = f"local-dir:{out}"
        print(f"{out}: task {args.timm}; timm.create_model({folder!r}, pretrained=True)")
        return
    source = bundles.write_folder(source, out)
    print(
        f"{out}: method {source.body['method']}, {len(source.tasks)} tasks, "
        f"{source.nbytes / 1e6:.1f} MB"
    )
    if "rules" in source.body:
        print(describe_rules(source.body["rules"]))


def describe_rules(rules: Mapping[str, Any]) -> str:
    """Describe the accuracy of each rule that chooses the task of an image.

    Args:
        rules: Entry `rules` of the model file: the accuracies as shares, and what they were
            measured on.
    """
    from pipeline.config.text import format_percent

    parts = [f"{rule} {format_percent(share)}" for rule, share in rules["accuracy"].items()]
    split = {"val": "validation", "test": "test"}[rules["split"]]
    return (
        f"images without a task: --rule {rules['recommended']} is right most often, on "
        f"{rules['images']} {split} images ({', '.join(parts)}; if the task is given "
        f"{format_percent(rules['with_task'])})"
    )


def tasks(args: argparse.Namespace) -> int:
    """List, export or import tasks of a model folder; list its versions, or go back to one."""
    from pipeline.config.yaml_files import absolute

    if args.action == "list":
        from pipeline.config.text import table_text
        from workers.serving.model_file import read_model, task_rows

        body = read_model(absolute(args.model))
        rows = [[*map(str, row.values())] for row in task_rows(body)]
        print(table_text(["task", "classes", "bytes"], rows))
    elif args.action == "versions":
        from workers.serving.versions import list_versions

        print(format_versions(list_versions(absolute(args.model))))
    elif args.action == "rollback":
        from workers.serving.versions import rollback

        version = rollback(absolute(args.model))
        print(f"{args.model} serves version {version.number} again: {', '.join(version.tasks)}")
    else:
        _change_task(args)
    return 0


def format_versions(versions: Sequence[Version]) -> str:
    """Format the versions of a model folder as a table."""
    from pipeline.config.text import table_text

    rows: list[list[str]] = []
    for version in versions:
        written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(version.written))
        state = "current" if version.is_current else ""
        tasks = ", ".join(version.tasks)
        rows.append(
            [str(version.number), written, version.sha256[:DIGEST_CHARACTERS], state, tasks]
        )
    heading = ["version", "written", "sha256", "state", "tasks"]
    return table_text(heading, rows, left=heading[1:])


def _change_task(args: argparse.Namespace) -> None:
    """Export or import a task of a model folder."""
    from pipeline.results import bundles  # imports torch

    if args.action == "export":
        size = bundles.export_task(bundles.open_folder(args.model), args.name, args.file)
        print(f"{args.file}: task {args.name}, {size} bytes")
    else:
        task = bundles.import_task(args.model, args.file, args.replace)
        print(f"{args.model} serves {task.name} too, {task.num_classes} classes")


def serve(args: argparse.Namespace) -> int:
    """Answer requests over HTTP until the process is interrupted. Return the exit code."""
    settings = serve_command.parse_settings(args)
    source = open_model_source(args)
    return serve_command.serve(source, replace(settings, record_in=find_record_folder(args)))


def open_model_source(args: argparse.Namespace) -> ModelSource:
    """Return the source of the model that `args.config` names.

    It is a registered model of MLflow (`models:/...`), a model folder, or a config. The model of a
    config, or of a fixed version (`models:/NAME/VERSION`), does not change while it is served.
    """
    from pipeline.config.yaml_files import absolute
    from pipeline.results import bundles
    from pipeline.serving.model_source import FixedModel, FolderModel, RegisteredModel

    if args.config.startswith("models:/"):
        refuse_run_options(args, "a registered model")
        return RegisteredModel(args.config, args.storage)
    bundle = open_bundle(args)
    if bundles.is_model_folder(args.config):
        return FolderModel(absolute(args.config))
    return FixedModel(bundle)
