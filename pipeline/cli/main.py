"""The command line.

The commands are init, data, run, plan, add, remove, launch, search, ingest, shards, report,
analyse, compare, predict, bundle, serve, tasks, runs, status, logs, ui, gc, methods, schema and
completion. There are few flags; `--set key=value` sets everything else.

Help, version and a mistyped command need only the standard library. Each command imports the
packages that it needs.
"""

from __future__ import annotations

import argparse
import atexit
import errno
import json
import os
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from pipeline.cli import data as data_commands
from pipeline.cli import growing as growing_commands
from pipeline.cli import serving as serving_commands
from pipeline.cli.arguments import parse_amount
from pipeline.cli.completion import SHELLS
from pipeline.cli.help import GroupedParser, HelpFormatter, Parser, example_text
from pipeline.cli.question import is_confirmed
from pipeline.config import invocation
from pipeline.data.errors import UnfitSource
from pipeline.graph import diagram, run_log
from pipeline.tracking import ui as mlflow_ui
from workers import preemption
from workers.errors import UserError
from workers.storage import secrets
from workers.storage.regular_file import write_named_file

if TYPE_CHECKING:
    from pipeline.graph.stage import Stage
    from pipeline.graph.store import Garbage, Lookup
    from pipeline.launch.cost import Forecast

BUCKET = re.compile(r"in bucket '([^']+)'")  # names the bucket in an error of pyarrow
AGE = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>[dhm])")
AGE_UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0}  # in seconds
LONGEST_ERROR = (
    4000  # largest number of printed characters of an error; errors of workers can be long
)


def leave(code: int) -> NoReturn:
    """End this process as Python does, up to the point where libraries could change its exit code.

    A thread of pyarrow that still runs when the interpreter is taken down aborts the process.
    """
    try:
        vars(threading)["_shutdown"]()  # waits for threads that Python started
        atexit._run_exitfuncs()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def main(argv: list[str] | None = None) -> int:
    """Run one command and return the exit code.

    Returns:
        0: success. 2: the input is invalid; one sentence on stderr gives the reason. 130: ended by
            Ctrl-C. 143: ended by SIGTERM.
    """
    try:
        args = parser().parse_args(argv)
        run_log.log_to_stderr(args.log_level)
        return args.command(args) or 0
    except UnfitSource as error:
        from pipeline.data.source_advice import describe_source  # start-up time: imports pyarrow

        advice = describe_source(error.card, invocation.this_command())
        print(f"accrete: {one_line(f'{error}{advice}')}", file=sys.stderr)
        return 2
    except UserError as error:
        print(f"accrete: {one_line(str(error))}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of our output has closed it, e.g. `| head`
        sys.stderr.close()
        return 0
    except ConnectionError as error:  # an OSError that names no file
        reason = one_line(str(error)) or type(error).__name__
        print(
            f"accrete: a connection was lost or refused ({reason}); "
            "finished stages are kept, run the same command again when the other side answers",
            file=sys.stderr,
        )
        return 2
    except OSError as error:
        print(f"accrete: {file_sentence(error)}", file=sys.stderr)
        return 2
    except preemption.Preempted:
        print(
            "accrete: stopped on request; running stages are saved at their last checkpoint; run "
            "the same command again to resume",
            file=sys.stderr,
        )
        return 143
    except KeyboardInterrupt:
        print(
            "accrete: interrupted; finished stages are kept; run the same command again to resume",
            file=sys.stderr,
        )
        return 130


def file_sentence(error: OSError) -> str:
    """Return the sentence about a file, or an object in a bucket, that cannot be used."""
    text = one_line(str(error.strerror or error))
    file_name = error.filename or "a file"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"{file_name} cannot be written ({text}); free some space there "
            "and run the same command again"
        )
    is_aws_error = "AWS Error" in text
    if is_aws_error or "google::cloud" in text:
        from workers.storage.filesystem import access_remedy  # imports pyarrow

        scheme = "s3" if is_aws_error else "gs"
        match = BUCKET.search(str(error))
        bucket = match.group(1) if match else ""
        return f"the storage refuses ({text}); {access_remedy(f'{scheme}://{bucket}')}"
    return (
        f"{file_name} cannot be used ({text}); fix its path or permissions "
        "and run the same command again"
    )


def one_line(text: str) -> str:
    """Return a text as one line that is safe to print on a terminal.

    Secrets are redacted, escape sequences and other unprintable characters are replaced, and the
    middle of a very long text is removed.
    """
    line = secrets.printable(" ".join(text.split()))
    if len(line) <= LONGEST_ERROR:
        return line
    half = LONGEST_ERROR // 2
    return f"{line[:half]} ... {line[-half:]}"


class PrintVersion(argparse.Action):
    """Print which Accrete this is, and exit."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        from pipeline.config.version import get_version  # start-up time: asks git

        print(get_version())
        parser.exit()


DATA_HELP = (
    "a folder of class folders, with or without train and test, of Parquet files or WebDataset "
    "tars, a CSV file, hf://datasets/NAME, torchvision:NAME; several are a task each"
)
CONFIG_OR_DATA = {
    "nargs": "+",
    "metavar": "config|PATH",
    "help": "a config, e.g. configs/demo.yaml, or images, for which one is written: " + DATA_HELP,
}  # the argument of a command that takes either

# adds one command: (name, function, help text, config=True, ...) -> parser of the options
AddCommand = Callable[..., argparse.ArgumentParser]


def parser(program: str = "") -> argparse.ArgumentParser:
    """Return the parser of the whole command line; each command sets `command` to its function.

    Args:
        program: Name of the program. Default: the name with which this process was started.
    """
    program = program or invocation.program()
    top = GroupedParser(
        prog=program,
        usage=f"{program} [--version] [--log-level LEVEL] COMMAND ...",
        description="Grow one vision transformer by one task at a time.",
    )
    top.add_argument(
        "--version", action=PrintVersion, nargs=0, help="print version, commit and checkout"
    )
    top.add_argument(
        "--log-level",
        choices=run_log.LEVELS,
        default="warning",
        help="what is logged on stderr, before COMMAND (default: warning); a run logs at info into "
        "driver.log beside its record",
    )
    commands = top.add_subparsers(
        required=True, metavar="COMMAND", parser_class=Parser, prog=program
    )

    def add_command(
        name: str, function: Any, text: str, config: bool = True, **config_options: Any
    ) -> argparse.ArgumentParser:
        epilog = example_text(program, name)
        sub = commands.add_parser(
            name, help=text, description=text, epilog=epilog, formatter_class=HelpFormatter
        )
        sub.set_defaults(command=function)
        if config:
            _add_config_arguments(sub, **config_options)
        return sub

    _add_run_commands(add_command)
    _add_launch_command(add_command)
    _add_analyse_command(add_command)
    growing_commands.commands(add_command)
    data_commands.commands(add_command)
    serving_commands.commands(add_command)
    _add_compare_command(add_command)
    _add_storage_commands(add_command)
    _add_looking_commands(add_command)
    _add_reference_commands(add_command)
    _add_completion_command(add_command)
    return top


def _add_config_arguments(sub: argparse.ArgumentParser, **config_options: Any) -> None:
    """Add the path of a config and `--set`. config_options: for `add_argument` of the path."""
    options = {"help": "path of a config, e.g. configs/demo.yaml", **config_options}
    sub.add_argument("config", **options)
    sub.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="override a setting, e.g. --set train.epochs=3; a run that computes something else "
        "than its file says is a run of its own, NAME-train.epochs-3, unless --set name=NAME "
        "says otherwise",
    )


def _add_method_option(sub: argparse.ArgumentParser) -> None:
    """Add `--method`, which names the methods of a run."""
    sub.add_argument(
        "--method",
        action=AddMethod,
        metavar="NAME",
        help="a method that learns the stream of the config, with the settings that "
        "configs/methods/NAME.yaml recommends for it (search: with the ranges there); may be "
        "repeated. It replaces the methods of the config; a stream without methods becomes the run "
        "STREAM-NAME",
    )


class AddMethod(argparse.Action):
    """`--method NAME`: adds the method to the override of `methods`, which comes first."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        names = [*getattr(namespace, "method_names", []), values]
        rest = [*namespace.overrides][bool(len(names) > 1) :]
        namespace.method_names = names
        namespace.overrides = [f"methods=[{', '.join(names)}]", *rest]


def _add_run_commands(add_command: AddCommand) -> None:
    """Add the commands that create a config or compute its graph.

    They are init, run, plan, search, ingest, shards and report.
    """
    _add_init_command(add_command)
    run_parser = add_command(
        "run", run, "run what is missing of a config's graph, then report", **CONFIG_OR_DATA
    )
    _add_method_option(run_parser)
    for option, text in (
        ("only", "run nothing but this stage"),
        ("from", "run this stage and what follows from it"),
        ("until", "run this stage and what it needs"),
        ("force", "run this stage even if it has a result; contents are compared"),
    ):
        run_parser.add_argument(
            f"--{option}",
            dest=f"{option}_stages",
            action="append",
            default=[],
            metavar="STAGE",
            help=f"{text}; an id as `plan` prints it, its beginning, a step, or a pattern with *; "
            "may be repeated",
        )
    plan_parser = add_command(
        "plan",
        plan,
        "print every stage as hit or miss, with the reason of each miss; run nothing",
        **CONFIG_OR_DATA,
    )
    _add_method_option(plan_parser)
    plan_parser.add_argument("--svg", metavar="FILE", help="also write the picture of the graph")
    plan_parser.add_argument(
        "--cost",
        action="store_true",
        help="also forecast device-hours and wall time, from what the storage has measured, else "
        "from the operations of the backbone",
    )
    plan_parser.add_argument(
        "--calibrate",
        action="store_true",
        help="as --cost; where the storage has measured nothing, measure this machine for a few "
        "seconds",
    )
    search_parser = add_command(
        "search",
        search,
        "search the settings of a config, judged on validation images, "
        "and measure the winner on test data",
    )
    _add_method_option(search_parser)
    ingest_parser = add_command(
        "ingest",
        ingest,
        "ingest a config's raw data into the store, and train nothing",
        **CONFIG_OR_DATA,
    )
    _add_method_option(ingest_parser)
    shards_parser = add_command(
        "shards",
        shards,
        "print the URLs of the shards of cards, with braces, as WebDataset takes them",
        config=False,
    )
    shards_parser.add_argument(
        "card", metavar="CARD", help="name or path of a card, or path of a config: all its cards"
    )
    shards_parser.add_argument(
        "--split",
        choices=("train", "val", "test"),
        help="print the URLs of this split, and nothing else",
    )
    shards_parser.add_argument(
        "--storage", help="where a card was ingested (default: storage, or the config's)"
    )
    report_parser = add_command(
        "report",
        report,
        "write the report of a config's run again, from the store; of a model folder in place of "
        "the config: show its inputs by day",
    )
    _add_method_option(report_parser)
    report_parser.add_argument(
        "--json",
        metavar="FILE",
        help="also write the results as one file that `compare` reads, on any machine; of a model "
        "folder, the numbers of its inputs",
    )


def _add_init_command(add_command: AddCommand) -> None:
    init_parser = add_command(
        "init", init, "look at images and write a card and a config for them", config=False
    )
    init_parser.add_argument("paths", nargs="+", metavar="PATH", help=DATA_HELP)
    init_parser.add_argument(
        "--name", default="", help="name of the run and its files (default: that of PATH)"
    )
    init_parser.add_argument(
        "--label", metavar="COLUMN", help="column of the label in a table, where it is not clear"
    )
    init_parser.add_argument(
        "--image", metavar="COLUMN", help="column of the image in a table, where it is not clear"
    )
    init_parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of the card where the data can be read in several ways, such as "
        "source.split=fold, source.splits={train: [a], test: [b]}, source.files=images/{} or "
        "classes=[cat, dog]; may be repeated",
    )


def _add_launch_command(add_command: AddCommand) -> None:
    launch_parser = add_command(
        "launch",
        launch,
        "write the files by which a config runs on a cluster, for a person to read and submit",
    )
    _add_method_option(launch_parser)
    launch_parser.add_argument(
        "--on",
        required=True,
        choices=("slurm", "kuberay", "ray"),
        help="Slurm, Kubernetes by KubeRay, or a cloud by Ray's launcher",
    )
    launch_parser.add_argument(
        "--out", metavar="FOLDER", help="where to write them (default: NAME-PLATFORM, here)"
    )
    launch_parser.add_argument(
        "--ranks-per-node",
        type=int,
        default=0,
        metavar="N",
        help="ranks on each node (default: as many as share a GPU, else 1)",
    )
    launch_parser.add_argument(
        "--hours",
        type=int,
        default=0,
        metavar="N",
        help="time limit (default: twice the forecast of `plan --cost`)",
    )
    on_slurm = launch_parser.add_argument_group("Slurm")
    on_slurm.add_argument(
        "--array", action="store_true", help="a job for each of the config's `seeds`"
    )
    on_kubernetes = launch_parser.add_argument_group("Kubernetes")
    on_kubernetes.add_argument(
        "--image", default="", metavar="NAME", help="image of the pods, without -gpu or -cpu"
    )
    for option, text in (
        ("select", "put workers on nodes with this label, such as that of spot nodes"),
        ("tolerate", "put workers on nodes with this taint too"),
    ):
        on_kubernetes.add_argument(
            f"--{option}",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help=f"{text}; may be repeated",
        )
    on_kubernetes.add_argument(
        "--service-account",
        default="",
        metavar="NAME",
        help="stands for a role of the cloud; also on Ray's launcher: an instance profile of AWS, "
        "or the e-mail of a service account of Google Cloud",
    )
    on_kubernetes.add_argument(
        "--secret", default="", metavar="NAME", help="a Secret whose keys are environment variables"
    )
    on_cloud = launch_parser.add_argument_group("Ray's launcher")
    on_cloud.add_argument("--cloud", choices=("aws", "gcp"), default="", help="default: aws")
    on_cloud.add_argument("--spot", action="store_true", help="workers on spot machines")
    on_cloud.add_argument(
        "--machine-image",
        default="",
        metavar="ID",
        help="of the workers' machines; must be given for GPUs, for their driver",
    )
    on_cloud.add_argument("--project", default="", metavar="ID", help="of Google Cloud")


def _add_analyse_command(add_command: AddCommand) -> None:
    analyse_parser = add_command(
        "analyse",
        analyse,
        "measure the attention of finished runs, from the store; several configs are compared",
        nargs="+",
    )
    analyse_parser.add_argument(
        "--images",
        type=int,
        default=256,
        metavar="N",
        help="test images of each task, about (default: 256)",
    )
    analyse_parser.add_argument(
        "--maps",
        type=int,
        default=4,
        metavar="N",
        help="test images of each task over which maps are drawn (default: 4; 0: none)",
    )
    analyse_parser.add_argument(
        "--robustness", action="store_true", help="also hide the centre of images, and attack them"
    )
    analyse_parser.add_argument(
        "--on",
        nargs="+",
        default=[],
        metavar="CARD",
        help="also test on all test images of other cards, whose classes a task has",
    )


def _add_compare_command(add_command: AddCommand) -> None:
    compare_parser = add_command(
        "compare",
        compare,
        "lay finished runs side by side, from the store or from files of results",
        config=False,
    )
    compare_parser.add_argument(
        "run",
        nargs="+",
        metavar="RUN",
        help="name of a run in the storage, path of its config, a file of `report --json`, or an "
        "accuracy matrix as CSV or JSON",
    )
    compare_parser.add_argument(
        "--storage",
        type=storage_folder,
        default="storage",
        help="storage folder of runs that are given by name (default: storage)",
    )
    compare_parser.add_argument("--out", metavar="FILE", help="also write the page here")


def _add_storage_commands(add_command: AddCommand) -> None:
    """Add the commands that take a storage folder and no config: ui, gc."""
    ui_parser = add_command(
        "ui", ui, "serve MLflow on this machine and print links to the runs", config=False
    )
    ui_parser.add_argument(
        "--storage",
        type=storage_folder,
        default="storage",
        help="storage folder of the runs (default: storage)",
    )
    mlflow_ui.address_options(ui_parser)
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
    gc_parser.add_argument(
        "--storage",
        type=storage_folder,
        default="storage",
        help="storage folder (default: storage)",
    )
    gc_parser.add_argument(
        "--older-than",
        type=age_seconds,
        default=0.0,
        metavar="AGE",
        help="only results older than AGE, as in 30d, 12h or 90m",
    )
    gc_parser.add_argument(
        "--keep-gb",
        type=gigabytes,
        default=0.0,
        metavar="N",
        help="keep the newest ones, N GB of them",
    )
    gc_parser.add_argument(
        "--dry-run", action="store_true", help="list them with their ages, and delete nothing"
    )
    gc_parser.add_argument("--yes", action="store_true", help="do not ask")


def _add_looking_commands(add_command: AddCommand) -> None:
    """Add the commands that tell of runs: runs, status, logs."""
    runs_parser = add_command(
        "runs", list_runs, "list the runs of a storage: state, stages, accuracy", config=False
    )
    status_parser = add_command(
        "status",
        status,
        "tell how far a run is, also while another process runs it",
        config=False,
    )
    status_parser.add_argument(
        "run", metavar="RUN", help="name of a run in the storage, or path of its config"
    )
    status_parser.add_argument(
        "--watch", action="store_true", help="tell it again and again until the run ends"
    )
    status_parser.add_argument(
        "--all", action="store_true", help="list every stage, however many there are"
    )
    status_parser.add_argument(
        "--svg", metavar="FILE", help="also write the picture of the graph, with states and times"
    )
    logs_parser = add_command(
        "logs",
        logs,
        "print what happened in a run or a stage, with the traceback of each failure",
        config=False,
    )
    logs_parser.add_argument(
        "run", metavar="RUN", help="name of a run in the storage, or path of its config"
    )
    logs_parser.add_argument("stage", nargs="?", default="", metavar="STAGE", help="id of a stage")
    logs_parser.add_argument(
        "--all", action="store_true", help="print every event and failure, however old"
    )
    for sub in (runs_parser, status_parser, logs_parser):
        sub.add_argument(
            "--storage",
            type=storage_folder,
            default="storage",
            help="storage folder of the runs (default: storage)",
        )


def _add_reference_commands(add_command: AddCommand) -> None:
    """Add the commands that document the content of files: methods, schema."""
    methods_parser = add_command(
        "methods", methods, "list the methods, or the settings of one", config=False
    )
    methods_parser.add_argument(
        "method", nargs="?", default="", help="name of a method, to see its settings"
    )
    schema_parser = add_command(
        "schema",
        schema,
        "print the JSON schema of configs, cards or searches, by which an editor completes and "
        "checks them",
        config=False,
    )
    schema_parser.add_argument(
        "kind", nargs="?", choices=("config", "card", "search"), default="config"
    )


def _add_completion_command(add_command: AddCommand) -> None:
    completion_parser = add_command(
        "completion",
        completion,
        "print a script by which the shell completes commands, options and names",
        config=False,
    )
    completion_parser.add_argument("shell", choices=SHELLS, help="the shell that reads it")


def init(args: argparse.Namespace) -> int:
    """Write a card, a config and a preview for images, and print the detected layout."""
    from pipeline.data import starter  # start-up time: imports pyarrow

    lines: list[str] = []
    config = starter.start(
        args.paths,
        invocation.this_command(),
        lines.append,
        name=args.name,
        settings=starter.column_settings(args.image, args.label) + args.settings,
    )
    preview = lines.pop()
    print("\n".join(lines))
    print(f"next: {invocation.this_command()} run {shlex.quote(config)}")
    print(preview)
    return 0


def _take_config(args: argparse.Namespace) -> None:
    """Let `args.config` be the path of a config, also where data is given: then one is written."""
    from pipeline.data import starter  # start-up time: imports pyarrow

    args.config = starter.find_config(args.config, invocation.this_command(), print)


def run(args: argparse.Namespace) -> int:
    """Run the missing stages of a config's graph, and print the results."""
    _take_config(args)
    from pipeline.app import runs as app  # imports torch
    from pipeline.graph.selection import StageSelection
    from pipeline.shell import console

    prepared = app.prepare(
        args.config, args.overrides, to_run=True, say=print, with_jobs=False, several=True
    )
    config = prepared.config
    if config.name != config.base_name:
        print(
            f"run {config.name}: "
            f"--set changes what {config.base_name} computes, so this is a run of its own"
        )
    selection = StageSelection(
        args.only_stages, args.from_stages, args.until_stages, args.force_stages
    )
    resume_command = app.command_text("run", args.config, args.overrides, selection.resume_options)
    report_command = app.command_text("report", args.config, args.overrides)
    result = app.execute(prepared, console.Console, resume_command, report_command, selection)
    if result.replicas:
        from pipeline.report.replicas import comparison_text  # imports torch and matplotlib

        print(comparison_text(config.name, result.replicas))
        print("\n".join(["", *console.ending(result.outcome, result.report.lines)]))
        return 0
    print(console.summary(result.tables, result.outcome, result.report.lines))
    return 0


def search(args: argparse.Namespace) -> int:
    """Search the settings of a config, and measure the winner on test data."""
    from pipeline.app import runs as app
    from pipeline.search import run as searches  # imports torch
    from pipeline.search.screen import SearchScreen
    from pipeline.search.spec import prepare

    prepared = prepare(args.config, args.overrides)
    searches.execute(
        prepared,
        SearchScreen(prepared),
        app.command_text("search", args.config, args.overrides),
        # with a config and a method, `report` is that of the run
        app.command_text(
            "report" if searches.is_search(args.config) else "search", args.config, args.overrides
        ),
    )
    return 0


def plan(args: argparse.Namespace) -> int:
    """Print every stage as hit or miss, with the reason of each miss; run nothing."""
    _take_config(args)
    from pipeline.app import runs as app
    from pipeline.launch import training_plan

    with_cost = args.cost or args.calibrate
    prepared = app.prepare(args.config, args.overrides, with_jobs=with_cost, several=True)
    run_plan = app.plan(prepared)
    graph = prepared.graph
    status = run_plan.status
    width = max(len(stage_id) for stage_id in graph.stages)
    for stage in graph:
        text = note(stage, run_plan.lookups, run_plan.stages_to_run)
        print(f"{status[stage.id]:4}  {stage.id:<{width}}  {stage.key[:12]}  {text}")
    count = len(run_plan.stages_to_run)
    print(
        f"\n{len(graph)} stages: {len(graph) - count} up to date, {count} to run (marked * below)\n"
    )
    for line in run_plan.notes:
        print(f"{line}\n")
    validated = [task.name for task in prepared.tasks if task.has_val]
    if validated:
        print(
            f"validation images of the data: {', '.join(validated)}; data.val_fraction is for the "
            f"{'other tasks' if len(validated) < len(prepared.tasks) else 'tasks without any'}\n"
        )
    print(diagram.to_text(graph, status))
    training = training_plan.text(run_plan.training())
    if training:
        print(f"\n{training}")
    if 0 < count < len(graph):
        from pipeline.growing.training import describe_training  # imports torch

        print("\n" + "\n".join(describe_training(run_plan)))
    if with_cost:
        from pipeline.launch import cost  # imports torch

        print("\n" + cost.text(run_plan.forecast(args.calibrate)))
    if args.svg:
        write_named_file("--svg", args.svg, diagram.to_svg(graph, status).encode())
        print(f"\npicture: {args.svg}")
    return 0


def launch(args: argparse.Namespace) -> int:
    """Write the files by which a config runs on a cluster."""
    from pipeline.app import runs as app
    from pipeline.launch import command  # imports torch

    def forecast(config: str, overrides: list[str]) -> Forecast:
        return app.plan(app.prepare(config, overrides, several=True)).forecast()

    return command.launch(args, forecast)


def note(stage: Stage, lookups: dict[str, Lookup], stages_to_run: set[str]) -> str:
    """Return the note of `plan` about a stage: why it will run, or what is missing."""
    lookup = lookups[stage.id]
    text = ""
    if stage.id in stages_to_run:
        text = lookup.reason
    elif not lookup.hit:
        text = "the result was deleted, and no missing stage needs it"
    return "; ".join(filter(None, (text, stage.note)))


def ingest(args: argparse.Namespace) -> int:
    """Ingest the raw data of a config, and print the read and rejected images."""
    _take_config(args)
    from pipeline.app import runs as app  # imports torch
    from pipeline.shell import console

    prepared = app.prepare(args.config, args.overrides, to_run=True, say=print, several=True)
    resume_command = app.command_text("run", args.config, args.overrides)
    for data in app.ingest(prepared, console.Console, resume_command):
        rejected = data.rejected_text or "none rejected"
        print(f"{data.stage}: {app.counts_text(data.counts)}; {rejected}")
        for line in data.account:
            print(f"  {line}")
        if data.preview:
            print(f"  preview: {data.preview}")
    return 0


def shards(args: argparse.Namespace) -> int:
    """Print where the shards of a card, or of all cards of a config, lie."""
    from pipeline.results import shard_urls  # imports pyarrow

    for shard in shard_urls.find_requested(args.card, args.storage):
        if args.split is None:
            print(f"{shard.card}\t{shard.split}\t{shard.url}")
        elif args.split == shard.split:
            print(shard.url)
    return 0


def report(args: argparse.Namespace) -> int:
    """Write the report and the MLflow record of a run, or of a search, again from the store.

    Of a model folder, show the inputs that it answered.
    """
    if os.path.isdir(args.config) or "://" in args.config:
        return _report_inputs(args)
    from pipeline.app import reports
    from pipeline.app import runs as app
    from pipeline.app.prepared import read_tables
    from pipeline.search import run as searches  # imports torch
    from pipeline.search.spec import prepare

    if searches.is_search(args.config):
        if args.json:
            raise UserError(
                f"--json needs the config of a run, and {args.config!r} is a search; name a run"
            )
        search = prepare(args.config, args.overrides)
        print("\n".join(searches.report(search).lines))
        return 0
    prepared = app.prepare(args.config, args.overrides, several=True)
    written = reports.report(prepared, app.command_text("report", args.config, args.overrides))
    print("\n".join(written.lines))
    if args.json:
        from pipeline.results.results_file import write_results  # imports pyarrow

        write_results("--json", args.json, [*read_tables(prepared).values()])
        print(f"results: {args.json}")
    return 0


def _report_inputs(args: argparse.Namespace) -> int:
    """Print the inputs of a model folder by day."""
    from pipeline.config.yaml_files import absolute
    from pipeline.report.inputs_text import format_inputs
    from pipeline.results import input_days

    if args.overrides:
        raise UserError(
            f"{args.config!r} is a model folder, which has no settings to change; leave out --set"
        )
    written = input_days.read_inputs(absolute(args.config))
    print(format_inputs(written))
    if args.json:
        input_days.write_report(written, args.json)
        print(f"inputs: {args.json}")
    return 0


def analyse(args: argparse.Namespace) -> int:
    """Measure the attention of finished runs, and print tables and paths of pictures."""
    from pipeline.app import analysis
    from pipeline.app import runs as app  # imports torch
    from pipeline.shell import console

    command = [invocation.this_command(), "analyse", *args.config, "--on", *args.on]
    result = analysis.analyse(
        (app.prepare(config, args.overrides) for config in args.config),
        console.Console,
        " ".join(command),
        images=args.images,
        map_images=args.maps,
        robustness=args.robustness,
        other_cards=args.on,
    )
    pictures = [f"{name}: {path}" for name, path in result.pictures.items()]
    written = result.report
    lines = [result.analysis.text, "", *pictures, f"report: {written.page}"]
    print("\n".join([*lines, *written.warnings, *written.links]))
    return 0


def compare(args: argparse.Namespace) -> int:
    """Write the page that lays finished runs side by side."""
    from pipeline.report import comparison_files
    from pipeline.shell.console import at_work

    with at_work(lambda: "comparing"):
        result = comparison_files.compare(args.run, args.storage, must_write=not args.out)
    page = result.page
    if args.out:
        write_named_file("--out", args.out, result.html)
        page = args.out
    text = comparison_files.format_comparison(result.comparison)
    print(f"{text}\n\npage: {page}")
    if result.folder:
        print(f"tables: {result.folder}")
    return 0


def list_runs(args: argparse.Namespace) -> int:
    """Print the runs of a storage."""
    from pipeline.app import runs as app
    from pipeline.config.yaml_files import absolute
    from pipeline.report import run_text

    text = run_text.runs_text(app.list_runs(args.storage), absolute(args.storage))
    print(secrets.printable(text))
    return 0


def status(args: argparse.Namespace) -> int:
    """Print how far a run is."""
    from pipeline.report import run_text
    from pipeline.results import runs

    name, storage = runs.named_run(args.run, args.storage)
    if args.svg:
        write_named_file("--svg", args.svg, run_text.run_picture(storage, name).encode())
    if not args.watch:
        text = run_text.status_text(runs.run_status(storage, name), args.all)
        print(secrets.printable(text))
        return 0
    try:
        run_text.watch(name, storage, args.all)
    except KeyboardInterrupt:  # the run continues
        print()
    return 0


def logs(args: argparse.Namespace) -> int:
    """Print the events of a run or a stage."""
    from pipeline.report.log_text import log_text
    from pipeline.results.runs import named_run

    name, storage = named_run(args.run, args.storage)
    print(log_text(storage, name, args.stage, args.all))
    return 0


def ui(args: argparse.Namespace) -> int:
    """Serve MLflow on this machine, and print links to the runs of a storage folder."""
    from pipeline.config.yaml_files import absolute
    from pipeline.graph.live_status import check_readable

    storage = absolute(args.storage)
    check_readable(storage)
    return mlflow_ui.serve(storage, args.host, args.port)


def collect_garbage(args: argparse.Namespace) -> int:
    """Delete stage results that no named run needs, after asking."""
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
        print(garbage_text(garbage))
        return 0
    if not args.yes and not is_confirmed("delete them?"):
        print("nothing was deleted")
        return 0
    paths = [folder.path for folder in garbage]
    needed_again, busy = delete_garbage(store, paths, let_go)
    if needed_again:
        print(staying_sentence(len(needed_again), "a new run needs"))
    if busy:
        print(staying_sentence(len(busy), "a process is computing"))
    print("deleted")
    return 0


def staying_sentence(count: int, reason: str) -> str:
    """Return how many of the listed folders are kept. reason: ends before `it` or `them`."""
    if count == 1:
        return f"1 of them is kept: {reason} it"
    return f"{count} of them are kept: {reason} them"


def garbage_text(garbage: Sequence[Garbage]) -> str:
    """Return a line for each folder: its path, when it was written, its size."""
    from pipeline.config.text import table_text

    rows = []
    for folder in garbage:
        written = time.strftime("%Y-%m-%d %H:%M", time.localtime(folder.written))
        rows.append([folder.path, written, f"{folder.size_bytes / 1e6:.1f}"])
    return table_text(["folder", "written", "MB"], rows)


def age_seconds(text: str) -> float:
    """Parse an age, for example `30d`, `12h` or `90m`, into seconds."""
    match = AGE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r:.40} is not an age; give a number with d, h or m behind it, as in 30d"
        )
    return float(match["number"]) * AGE_UNITS[match["unit"]]


def gigabytes(text: str) -> float:
    """Return a number of gigabytes: finite, and at least 0."""
    return parse_amount(text, "number of gigabytes")


def storage_folder(text: str) -> str:
    """Return the path or URI of a storage as it is; an empty one is an error."""
    if not text.strip():
        raise argparse.ArgumentTypeError(
            "an empty text names no storage; give the folder that holds the runs"
        )
    return text


def methods(args: argparse.Namespace) -> int:
    """Print a line for each method, or the settings of one."""
    from pipeline.app import method_list  # imports pydantic and torch

    if args.method:
        print(method_list.describe_method(args.method))
    else:
        print(method_list.list_methods())
    return 0


def schema(args: argparse.Namespace) -> int:
    """Print the JSON schema of configs, cards or searches."""
    from pipeline.app.schema import card_schema, config_schema
    from pipeline.search.schema import search_schema  # imports pydantic and torch

    schemas = {"config": config_schema, "card": card_schema, "search": search_schema}
    print(json.dumps(schemas[args.kind](), indent=2))
    return 0


def completion(args: argparse.Namespace) -> int:
    """Print the script that completes the command line in a shell."""
    from pipeline.cli.completion import completion_script
    from pipeline.config.invocation import SCRIPT

    print(completion_script(parser(SCRIPT), args.shell))
    return 0
