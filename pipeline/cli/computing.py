"""The commands init, run, plan, search, launch, ingest and shards."""

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
        "run", run, "run the stages of a config that have no result, then report", **CONFIG_OR_DATA
    )
    add_method_option(run_parser)
    for option, text in (
        ("only", "run only this stage"),
        ("from", "run this stage and all stages that depend on it"),
        ("until", "run this stage and its dependencies"),
        (
            "force",
            "run this stage even if it has a result, and compare the contents of both results",
        ),
    ):
        run_parser.add_argument(
            f"--{option}",
            dest=f"{option}_stages",
            action="append",
            default=[],
            metavar="STAGE",
            help=f"{text}; STAGE: an id of `plan` or its beginning, a step, or a pattern with *; "
            "may be repeated",
        )
    plan_parser = add_command(
        "plan",
        plan,
        "print for each stage whether it would run (miss, with the reason) or not (hit); "
        "run nothing",
        **CONFIG_OR_DATA,
    )
    add_method_option(plan_parser)
    plan_parser.add_argument("--svg", metavar="FILE", help="also write the graph as an SVG file")
    plan_parser.add_argument(
        "--cost",
        action="store_true",
        help="also forecast device-hours and wall time, from measurements in the storage, else "
        "from the floating-point operations of the backbone",
    )
    plan_parser.add_argument(
        "--calibrate",
        action="store_true",
        help="like --cost; if the storage has no measurements, measure this machine for a few "
        "seconds",
    )
    plan_parser.add_argument(
        "--memory",
        action="store_true",
        help="also forecast the memory of a training step of each method, by a dry run that "
        "computes shapes only: 4 to 10 s for each method",
    )
    search_parser = add_command(
        "search",
        search,
        "search settings of a config by the accuracy on validation images, "
        "and measure the best ones on test images",
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
        "print the URLs of the shards of cards, such as part-{000..007}.tar for WebDataset",
        config=False,
    )
    shards_parser.add_argument(
        "card", metavar="CARD", help="name or path of a card, or path of a config for all its cards"
    )
    shards_parser.add_argument(
        "--split",
        choices=("train", "val", "test"),
        help="print only the URLs of this split",
    )
    shards_parser.add_argument(
        "--storage",
        help="storage with the ingested card (default: that of the config, else `storage`)",
    )
    _add_launch_command(add_command)


def _add_init_command(add_command: AddCommand) -> None:
    init_parser = add_command(
        "init", init, "inspect images and write a card and a config for them", config=False
    )
    init_parser.add_argument("paths", nargs="+", metavar="PATH", help=DATA_HELP)
    init_parser.add_argument(
        "--name", default="", help="name of the run and its files (default: from PATH)"
    )
    init_parser.add_argument(
        "--label", metavar="COLUMN", help="column of the label in a table, if several are possible"
    )
    init_parser.add_argument(
        "--image", metavar="COLUMN", help="column of the image in a table, if several are possible"
    )
    init_parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of the card if the data can be read in several ways, such as "
        "source.split=fold, source.splits={train: [a], test: [b]}, source.files=images/{} or "
        "classes=[cat, dog]; may be repeated",
    )


def _add_launch_command(add_command: AddCommand) -> None:
    launch_parser = add_command(
        "launch",
        launch,
        "write files that run a config on a cluster, for you to review and submit",
    )
    add_method_option(launch_parser)
    launch_parser.add_argument(
        "--on",
        required=True,
        choices=("slurm", "kuberay", "ray"),
        help="Slurm, Kubernetes by KubeRay, or a cloud by Ray's launcher",
    )
    launch_parser.add_argument(
        "--out", metavar="FOLDER", help="folder of the files (default: ./NAME-PLATFORM)"
    )
    launch_parser.add_argument(
        "--ranks-per-node",
        type=int,
        default=0,
        metavar="N",
        help="ranks on each node (default: as many as fit on one GPU if cluster.gpus_per_worker is "
        "a fraction, else 1)",
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
        "--array", action="store_true", help="one job for each of the config's `seeds`"
    )
    on_kubernetes = launch_parser.add_argument_group("Kubernetes")
    on_kubernetes.add_argument(
        "--image",
        default="",
        metavar="NAME",
        help="name and tag of the image of the pods, to which -gpu or -cpu is appended",
    )
    for option, text in (
        ("select", "put workers on nodes with this label, for example the label of spot nodes"),
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
        help="service account of the pods, which gives them a role of the cloud; with Ray's "
        "launcher: AWS instance profile, or e-mail of a Google Cloud service account",
    )
    on_kubernetes.add_argument(
        "--secret",
        default="",
        metavar="NAME",
        help="a Kubernetes Secret whose keys become environment variables",
    )
    on_cloud = launch_parser.add_argument_group("Ray's launcher")
    on_cloud.add_argument("--cloud", choices=("aws", "gcp"), default="", help="default: aws")
    on_cloud.add_argument("--spot", action="store_true", help="workers on spot machines")
    on_cloud.add_argument(
        "--machine-image",
        default="",
        metavar="ID",
        help="image of the workers' machines; required for GPUs, because it has their driver",
    )
    on_cloud.add_argument("--project", default="", metavar="ID", help="Google Cloud project")


def init(args: argparse.Namespace) -> int:
    """Write a card, a config and a preview for images, and print the detected layout."""
    from pipeline.data import starter  # lazy import: loads pyarrow

    lines: list[str] = []
    config = starter.start(
        args.paths,
        invocation.this_command(),
        lines.append,
        name=args.name,
        settings=starter.format_column_settings(args.image, args.label) + args.settings,
    )
    preview = lines.pop()  # `starter.start` reports the preview last
    print("\n".join(lines))
    print(f"next: {invocation.this_command()} run {shlex.quote(config)}")
    print(preview)
    return 0


def _resolve_config(args: argparse.Namespace) -> None:
    """Replace `args.config` by the path of a config; for data, write a card and a config first."""
    from pipeline.data import starter  # lazy import: loads pyarrow

    args.config = starter.find_or_write_config(args.config, invocation.this_command(), print)


def run(args: argparse.Namespace) -> int:
    """Run the missing stages of a config's graph, and print the results."""
    _resolve_config(args)
    from pipeline.app import runs as app  # lazy import: loads pyarrow; torch only if needed
    from pipeline.graph.selection import StageSelection
    from pipeline.shell import console

    prepared = app.prepare(
        args.config, args.overrides, to_run=True, say=print, with_jobs=False, allow_replicas=True
    )
    config = prepared.config
    if config.name != config.base_name:
        print(
            f"run {config.name}: "
            f"--set changes the settings of {config.base_name}, so this is a run of its own"
        )
    selection = StageSelection(
        args.only_stages, args.from_stages, args.until_stages, args.force_stages
    )
    resume_command = app.format_command(
        "run", args.config, args.overrides, selection.resume_options
    )
    report_command = app.format_command("report", args.config, args.overrides)
    result = app.execute(prepared, console.Console, resume_command, report_command, selection)
    if result.replicas:  # one replica for each seed or class order
        from pipeline.report.replicas import comparison_text  # lazy import: loads NumPy

        print(comparison_text(config.name, result.replicas))
        print("\n".join(["", *console.ending(result.outcome, result.report.lines)]))
        return 0
    print(console.summary(result.tables, result.outcome, result.report.lines))
    return 0


def search(args: argparse.Namespace) -> int:
    """Search settings of a config, and measure the best ones on test images."""
    from pipeline.app import runs as app
    from pipeline.search import run as searches  # lazy import: loads torch
    from pipeline.search.screen import SearchScreen
    from pipeline.search.spec import prepare_search

    prepared = prepare_search(args.config, args.overrides)
    searches.execute(
        prepared,
        SearchScreen(prepared),
        app.format_command("search", args.config, args.overrides),
        # For a plain config, `report` writes the report of the run, not of the search.
        app.format_command(
            "report" if searches.is_search(args.config) else "search", args.config, args.overrides
        ),
    )
    return 0


def plan(args: argparse.Namespace) -> int:
    """Print for each stage whether it would run (miss, with the reason) or not (hit)."""
    _resolve_config(args)
    from pipeline.app import runs as app
    from pipeline.launch import training_plan

    with_cost = args.cost or args.calibrate
    with_jobs = with_cost or args.memory
    prepared = app.prepare(args.config, args.overrides, with_jobs=with_jobs, allow_replicas=True)
    run_plan = app.plan(prepared)
    graph = prepared.graph
    status = run_plan.status
    width = max(len(stage_id) for stage_id in graph.stages)
    for stage in graph:
        text = _describe_status(stage, run_plan.lookups, run_plan.stages_to_run)
        print(f"{status[stage.id]:4}  {stage.id:<{width}}  {stage.key[:12]}  {text}")
    count = len(run_plan.stages_to_run)
    print(
        f"\n{len(graph)} stages: {len(graph) - count} up to date, {count} to run (marked * below)\n"
    )
    for line in run_plan.notes:
        print(f"{line}\n")
    validated = [task.name for task in prepared.tasks if task.has_val]
    if validated:
        is_used = len(validated) < len(prepared.tasks)
        print(
            f"tasks with validation images in their data: {', '.join(validated)}; "
            "data.val_fraction "
            f"{'applies only to the other tasks' if is_used else 'has no effect'}\n"
        )
    print(diagram.to_text(graph, status))
    settings_text = training_plan.format_training(run_plan.training())
    if settings_text:
        print(f"\n{settings_text}")
    if 0 < count < len(graph):
        from pipeline.growing.training import describe_training  # lazy import: loads torch

        tasks_to_train = describe_training(run_plan)
        print("\n" + "\n".join(tasks_to_train))
    if with_cost:
        from pipeline.launch import cost  # lazy import: loads torch

        print("\n" + cost.format_forecast(run_plan.forecast(args.calibrate)))
    if args.memory:
        from pipeline.launch import step_memory  # lazy import: loads torch

        print("\n" + step_memory.format_memory(run_plan.forecast_memory()))
    if args.svg:
        write_named_file("--svg", args.svg, diagram.to_svg(graph, status).encode())
        print(f"\npicture: {args.svg}")
    return 0


def _describe_status(stage: Stage, lookups: dict[str, Lookup], stages_to_run: set[str]) -> str:
    """Return the text of `plan` for a stage: the reason for the status, and the note.

    A stage that would not run has a reason only if its result was deleted and is not needed.
    """
    lookup = lookups[stage.id]
    text = ""
    if stage.id in stages_to_run:
        text = lookup.reason
    elif not lookup.hit:
        text = "the result was deleted, and no missing stage needs it"
    return "; ".join(filter(None, (text, stage.note)))


def launch(args: argparse.Namespace) -> int:
    """Write the files that run a config on a cluster."""
    from pipeline.app import runs as app
    from pipeline.launch import command  # lazy import: loads torch

    def forecast(config: str, overrides: list[str]) -> Forecast:
        return app.plan(app.prepare(config, overrides, allow_replicas=True)).forecast()

    return command.launch(args, forecast)


def ingest(args: argparse.Namespace) -> int:
    """Ingest the raw data of a config, and print the numbers of read and rejected images."""
    _resolve_config(args)
    from pipeline.app import runs as app  # lazy import: loads pyarrow
    from pipeline.shell import console

    prepared = app.prepare(args.config, args.overrides, to_run=True, say=print, allow_replicas=True)
    resume_command = app.format_command("ingest", args.config, args.overrides)
    for data in app.ingest(prepared, console.Console, resume_command):
        rejected = data.rejected_text or "none rejected"
        print(f"{data.stage}: {app.format_counts(data.counts)}; {rejected}")
        for line in data.account:
            print(f"  {line}")
        if data.preview:
            print(f"  preview: {data.preview}")
    return 0


def shards(args: argparse.Namespace) -> int:
    """Print the URLs of the shards of a card, or of all cards of a config."""
    from pipeline.results import shard_urls  # lazy import: loads pyarrow

    for shard in shard_urls.find_requested(args.card, args.storage):
        if args.split is None:
            print(f"{shard.card}\t{shard.split}\t{shard.url}")
        elif args.split == shard.split:
            print(shard.url)
    return 0
