"""The commands that compute: init, run, plan, search, launch, ingest and shards."""

from __future__ import annotations

import argparse
import shlex
from typing import TYPE_CHECKING

from pipeline.cli.arguments import CONFIG_OR_DATA, DATA_HELP, AddCommand, add_method_option
from pipeline.config import invocation
from pipeline.graph import diagram
from workers.storage.regular_file import write_named_file

if TYPE_CHECKING:
    from pipeline.graph.stage import Stage
    from pipeline.graph.store import Lookup
    from pipeline.launch.cost import Forecast


def add_commands(add_command: AddCommand) -> None:
    """Add the commands of this module to the command line."""
    _add_init_command(add_command)
    run_parser = add_command(
        "run", run, "run what is missing of a config's graph, then report", **CONFIG_OR_DATA
    )
    add_method_option(run_parser)
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
    add_method_option(plan_parser)
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
    add_method_option(search_parser)
    ingest_parser = add_command(
        "ingest",
        ingest,
        "ingest a config's raw data into the store, and train nothing",
        **CONFIG_OR_DATA,
    )
    add_method_option(ingest_parser)
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
    _add_launch_command(add_command)


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
    add_method_option(launch_parser)
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


def note(stage: Stage, lookups: dict[str, Lookup], stages_to_run: set[str]) -> str:
    """Return the note of `plan` about a stage: why it will run, or what is missing."""
    lookup = lookups[stage.id]
    text = ""
    if stage.id in stages_to_run:
        text = lookup.reason
    elif not lookup.hit:
        text = "the result was deleted, and no missing stage needs it"
    return "; ".join(filter(None, (text, stage.note)))


def launch(args: argparse.Namespace) -> int:
    """Write the files by which a config runs on a cluster."""
    from pipeline.app import runs as app
    from pipeline.launch import command  # imports torch

    def forecast(config: str, overrides: list[str]) -> Forecast:
        return app.plan(app.prepare(config, overrides, several=True)).forecast()

    return command.launch(args, forecast)


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
