"""The commands that show results: report, analyse, compare, runs, status, logs and ui."""

from __future__ import annotations

import argparse
import os

from pipeline.cli.arguments import AddCommand, add_method_option, add_storage_option
from pipeline.tracking import ui as mlflow_ui
from workers.errors import UserError
from workers.storage import secrets
from workers.storage.regular_file import write_named_file


def add_commands(add_command: AddCommand) -> None:
    """Add the commands of this module to the command line."""
    report_parser = add_command(
        "report",
        report,
        "write the report of a config's run again, from the store; of a model folder in place of "
        "the config: show its inputs by day",
    )
    add_method_option(report_parser)
    report_parser.add_argument(
        "--json",
        metavar="FILE",
        help="also write the results as one file that `compare` reads, on any machine; of a model "
        "folder, the numbers of its inputs",
    )
    _add_analyse_command(add_command)
    _add_compare_command(add_command)
    _add_ui_command(add_command)
    _add_state_commands(add_command)


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
        help="at most so many test images of each task (default: 256)",
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
    add_storage_option(compare_parser, "storage folder of runs that are given by name")
    compare_parser.add_argument("--out", metavar="FILE", help="also write the page here")


def _add_ui_command(add_command: AddCommand) -> None:
    ui_parser = add_command(
        "ui", ui, "serve MLflow on this machine and print links to the runs", config=False
    )
    add_storage_option(ui_parser, "storage folder of the runs")
    mlflow_ui.add_address_options(ui_parser)


def _add_state_commands(add_command: AddCommand) -> None:
    """Add the commands that print the state of runs: runs, status, logs."""
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
        "print the events of a run or a stage, with the traceback of each failure",
        config=False,
    )
    for sub in (status_parser, logs_parser):
        sub.add_argument(
            "run", metavar="RUN", help="name of a run in the storage, or path of its config"
        )
    logs_parser.add_argument("stage", nargs="?", default="", metavar="STAGE", help="id of a stage")
    logs_parser.add_argument(
        "--all", action="store_true", help="print every event and failure, however old"
    )
    for sub in (runs_parser, status_parser, logs_parser):
        add_storage_option(sub, "storage folder of the runs")


def report(args: argparse.Namespace) -> int:
    """Write the report and the MLflow record of a run or a search again, from stored results.

    For a model folder, print the inputs that it counted.
    """
    if os.path.isdir(args.config) or "://" in args.config:  # a model folder; configs are files
        return _report_inputs(args)
    from pipeline.app import reports
    from pipeline.app import runs as app
    from pipeline.app.prepared import read_run_tables
    from pipeline.search import run as searches  # imports torch
    from pipeline.search.spec import prepare_search

    if searches.is_search(args.config):
        if args.json:
            raise UserError(
                f"--json needs the config of a run, and {args.config!r} is a search; name a run"
            )
        search = prepare_search(args.config, args.overrides)
        print("\n".join(searches.report(search).lines))
        return 0
    prepared = app.prepare(args.config, args.overrides, allow_replicas=True)
    written = reports.report(prepared, app.format_command("report", args.config, args.overrides))
    print("\n".join(written.lines))
    if args.json:
        from pipeline.results.results_file import write_results  # imports pyarrow

        write_results("--json", args.json, [*read_run_tables(prepared).values()])
        print(f"results: {args.json}")
    return 0


def _report_inputs(args: argparse.Namespace) -> int:
    """Print the counted inputs of a model folder by day."""
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
    from pipeline.app import runs as app  # imports pyarrow
    from pipeline.shell import console

    options = [*args.config[1:], "--images", str(args.images), "--maps", str(args.maps)]
    options += ["--robustness"] * args.robustness
    if args.on:
        options += ["--on", *args.on]
    result = analysis.analyse(
        (app.prepare(config, args.overrides) for config in args.config),
        console.Console,
        app.format_command("analyse", args.config[0], args.overrides, options),
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
    """Compare finished runs: print tables and write a page."""
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
    """Print the progress of a run once, or with `--watch` until the run ends."""
    from pipeline.report import run_text
    from pipeline.results import runs

    name, storage = runs.resolve_run(args.run, args.storage)
    if args.svg:
        write_named_file("--svg", args.svg, run_text.run_picture(storage, name).encode())
    if not args.watch:
        text = run_text.status_text(runs.run_status(storage, name), args.all)
        print(secrets.printable(text))
        return 0
    try:
        run_text.watch(name, storage, args.all)
    except KeyboardInterrupt:  # ends only the display; the run continues
        print()
    return 0


def logs(args: argparse.Namespace) -> int:
    """Print the events of a run or a stage."""
    from pipeline.report.log_text import log_text
    from pipeline.results.runs import resolve_run

    name, storage = resolve_run(args.run, args.storage)
    print(log_text(storage, name, args.stage, args.all))
    return 0


def ui(args: argparse.Namespace) -> int:
    """Serve MLflow on this machine, and print links to the runs of a storage folder."""
    from pipeline.config.yaml_files import absolute
    from pipeline.graph.live_status import check_readable

    storage = absolute(args.storage)
    check_readable(storage)
    return mlflow_ui.serve_ui(storage, args.host, args.port)
