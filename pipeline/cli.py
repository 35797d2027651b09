"""The command line: run, plan, search, ingest, report, analyse, compare, predict, bundle, serve,
tasks, ui, gc. Few flags, else `--set key=value`."""

from __future__ import annotations

import argparse
import errno
import os
import re
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from pipeline.graph import diagram
from pipeline.serving import commands as predict
from pipeline.tracking import ui as browse
from workers import preemption
from workers.errors import UserError
from workers.storage import secrets

if TYPE_CHECKING:
    from pipeline.graph.stage import Stage
    from pipeline.graph.store import Lookup

BUCKET = re.compile(r"in bucket '([^']+)'")  # in what pyarrow says of an object
MOST_SAID = 4000  # characters of an error; a worker's own may be long


def main(argv: list[str] | None = None) -> int:
    """Runs one command. Returns the exit code: 0, 2 with one sentence on stderr where the input
    cannot work, 130 or 143 where it was ended by Ctrl-C or SIGTERM."""
    try:
        args = parser().parse_args(argv)
        return args.command(args) or 0
    except UserError as error:
        print(f"accrete: {shown(str(error))}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever read our output has seen enough
        sys.stderr.close()
        return 0
    except ConnectionError as error:  # an OSError, but of no file
        reason = shown(str(error)) or type(error).__name__
        print(
            f"accrete: a connection was lost or refused ({reason}); what finished is kept, run "
            "the same command again when the other side answers",
            file=sys.stderr,
        )
        return 2
    except OSError as error:
        print(f"accrete: {file_sentence(error)}", file=sys.stderr)
        return 2
    except preemption.Preempted:
        print(
            "accrete: told to stop; what was under way is saved as far as its last checkpoint, "
            "run the same command again to go on",
            file=sys.stderr,
        )
        return 143
    except KeyboardInterrupt:
        print(
            "accrete: interrupted; what finished is kept, run the same command again to go on",
            file=sys.stderr,
        )
        return 130


def file_sentence(error: OSError) -> str:
    """What is said of a file, or of an object in a bucket, that cannot be used."""
    text = shown(str(error.strerror or error))
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"{error.filename or 'a file'} cannot be written ({text}); free some space there "
            "and run the same command again"
        )
    bucket = BUCKET.search(str(error))
    if "AWS Error" in text or "google::cloud" in text:
        from workers.storage.filesystem import access_remedy

        scheme = "s3" if "AWS Error" in text else "gs"
        return (
            f"the storage refuses ({text}); "
            f"{access_remedy(f'{scheme}://' + (bucket.group(1) if bucket else ''))}"
        )
    return (
        f"{error.filename or 'a file'} cannot be used ({text}); mend its path or permissions "
        "and run the same command again"
    )


def shown(text: str) -> str:
    """One line for a terminal, whatever names of files and classes are in it: no escape sequences,
    no page of one value."""
    line = "".join(
        c if c.isprintable() else "\N{REPLACEMENT CHARACTER}"
        for c in " ".join(secrets.redact(text).split())
    )
    return (
        line
        if len(line) <= MOST_SAID
        else f"{line[: MOST_SAID // 2]} ... {line[-MOST_SAID // 2 :]}"
    )


class Parser(argparse.ArgumentParser):
    """Says in one sentence what is wrong with the command line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


def parser() -> argparse.ArgumentParser:
    top = Parser(
        prog="python -m pipeline", description="Grow one vision transformer by one task at a time."
    )
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    def command(
        name: str, function: Any, text: str, config: bool = True, **several: Any
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(command=function)
        if config:
            sub.add_argument("config", help="path of a config, e.g. configs/demo.yaml", **several)
            sub.add_argument(
                "--set",
                action="append",
                default=[],
                metavar="KEY=VALUE",
                dest="overrides",
                help="override a setting, e.g. --set train.epochs=3; a run that computes "
                "something else "
                "than its file says is a run of its own, NAME-train.epochs-3, unless --set "
                "name=NAME says otherwise",
            )
        return sub

    command("run", run, "run what is missing of a config's graph, then report")
    plan_parser = command(
        "plan", plan, "print every stage as hit or miss, with the reason of each miss; run nothing"
    )
    plan_parser.add_argument("--svg", metavar="FILE", help="also write the picture of the graph")
    plan_parser.add_argument(
        "--cost",
        action="store_true",
        help="also forecast device-hours and wall time, from what the storage has measured",
    )
    command(
        "search",
        search,
        "search the settings of a config, judged on validation images, and measure the winner "
        "on test data",
    )
    command("ingest", ingest, "bring a config's raw data into the store, and train nothing")
    command("report", report, "write the report of a config's run again, from the store")
    analyse_parser = command(
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
    predict.commands(command)
    compare_parser = command(
        "compare", compare, "lay finished runs side by side, from the store", config=False
    )
    compare_parser.add_argument(
        "run", nargs="+", metavar="RUN", help="name of a run in the storage, or path of its config"
    )
    compare_parser.add_argument(
        "--storage",
        default="storage",
        help="storage folder of runs that are given by name (default: storage)",
    )
    compare_parser.add_argument("--out", metavar="FILE", help="also write the page here")
    ui_parser = command(
        "ui", ui, "serve MLflow on this machine and print links to the runs", config=False
    )
    ui_parser.add_argument(
        "--storage", default="storage", help="storage folder of the runs (default: storage)"
    )
    browse.address_options(ui_parser)
    gc = command(
        "gc",
        collect_garbage,
        "delete stage results that no named run needs; asks first",
        config=False,
    )
    gc.add_argument(
        "--earlier",
        action="store_true",
        help="also those that runs needed only before their config files or images were changed",
    )
    gc.add_argument("--storage", default="storage", help="storage folder (default: storage)")
    gc.add_argument("--yes", action="store_true", help="do not ask")
    return top


def run(args: argparse.Namespace) -> int:
    """Run what is missing of a config's graph, and print what came out."""
    from pipeline import app, console  # imports torch

    prepared = app.prepare(args.config, args.overrides, to_run=True, say=print, with_jobs=False)
    config = prepared.config
    if config.name != config.base_name:
        print(
            f"run {config.name}: --set changes what {config.base_name} computes, so this is a "
            "run of its own"
        )
    resume_command = app.command_text("run", args.config, args.overrides)
    report_command = app.command_text("report", args.config, args.overrides)
    result = app.execute(prepared, console.Console, resume_command, report_command)
    print(console.summary(result.tables, result.outcome, result.published.lines))
    return 0


def search(args: argparse.Namespace) -> int:
    from pipeline.search import run as module

    return module.command(args)


def plan(args: argparse.Namespace) -> int:
    """Print every stage as hit or miss, with the reason of each miss; run nothing."""
    from pipeline import app

    prepared = app.prepare(args.config, args.overrides, with_jobs=args.cost)
    run_plan = app.plan(prepared)
    graph = prepared.graph
    status = run_plan.status
    width = max(len(stage_id) for stage_id in graph.stages)
    for stage in graph:
        text = note(stage, run_plan.lookups, run_plan.stages_to_run)
        print(f"{status[stage.id]:4}  {stage.id:<{width}}  {stage.key[:12]}  {text}")
    count = len(run_plan.stages_to_run)
    print(f"\n{len(graph)} stages: {len(graph) - count} stand, {count} to run (marked * below)\n")
    for line in run_plan.notes:
        print(f"{line}\n")
    print(diagram.to_text(graph, status))
    if args.cost:
        from pipeline.launch import cost  # imports torch

        forecast = cost.forecast(
            graph, prepared.config, prepared.store, run_plan.stages_to_run, prepared.tasks
        )
        print("\n" + cost.text(forecast))
    if args.svg:
        write_picture(args.svg, diagram.to_svg(graph, status))
        print(f"\npicture: {args.svg}")
    return 0


def write_picture(path: str, svg: str) -> None:
    """Write the picture of a graph. Raise `UserError` when the file cannot be written."""
    try:
        with open(path, "w", encoding="utf-8") as stream:
            stream.write(svg)
    except OSError as error:
        raise UserError(
            f"--svg {path!r} cannot be written ({error.strerror}); name a file in an existing "
            "folder"
        ) from None


def note(stage: Stage, lookups: dict[str, Lookup], todo: set[str]) -> str:
    """What plan says beside a stage."""
    if stage.id in todo:
        text = lookups[stage.id].reason
    else:
        text = (
            ""
            if lookups[stage.id].hit
            else "result is gone, and nothing that is missing waits for it"
        )
    return "; ".join(filter(None, (text, stage.note)))


def ingest(args: argparse.Namespace) -> int:
    """Ingest the raw data of a config, and print what was read and what was rejected."""
    from pipeline import app, console  # imports torch

    prepared = app.prepare(args.config, args.overrides, to_run=True, say=print)
    resume_command = app.command_text("run", args.config, args.overrides)
    for stage in app.ingest(prepared, console.Console, resume_command):
        manifest = prepared.store.look_up(stage, verify=False).manifest or {}
        counts = _counts_text(manifest.get("counts", {}))
        rejected = _counts_text(manifest.get("rejected", {})) or "none rejected"
        print(f"{stage.id}: {counts}; {rejected}")
    return 0


def _counts_text(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def report(args: argparse.Namespace) -> int:
    """Write the report and the MLflow record of a run, or of a search, again from the store."""
    from pipeline import app
    from pipeline.search import run as searches  # imports torch

    if searches.is_search(args.config):
        return searches.report(args)
    prepared = app.prepare(args.config, args.overrides)
    published = app.report(prepared, app.command_text("report", args.config, args.overrides))
    print("\n".join(published.lines))
    return 0


def analyse(args: argparse.Namespace) -> int:
    """Measure the attention of finished runs, and print tables and paths of pictures."""
    from pipeline import app, console  # imports torch

    command = [browse.this_python(), "-m pipeline analyse", *args.config, "--on", *args.on]
    result = app.analyse(
        args.config,
        args.overrides,
        console.Console,
        " ".join(command),
        images=args.images,
        map_images=args.maps,
        robustness=args.robustness,
        other_cards=args.on,
    )
    pictures = [f"{name}: {path}" for name, path in result.pictures.items()]
    published = result.published
    lines = [result.analysis.text, "", *pictures, f"report: {published.page}"]
    print("\n".join([*lines, *published.warnings, *published.links]))
    return 0


def compare(args: argparse.Namespace) -> int:
    from pipeline.report import compare_command

    return compare_command.compare(args)


def ui(args: argparse.Namespace) -> int:
    from pipeline.yaml_files import absolute

    storage = absolute(args.storage)
    if "://" not in storage and not os.path.isdir(storage):
        raise UserError(
            f"storage {args.storage!r} does not exist; give the folder that holds the runs with "
            "--storage"
        )
    return browse.serve(storage, args.host, args.port)


def collect_garbage(args: argparse.Namespace) -> int:
    from pipeline import app
    from pipeline.graph.store import Store
    from pipeline.yaml_files import absolute

    store = Store(absolute(args.storage))
    garbage = app.find_garbage(store, args.earlier)
    changed = [] if args.earlier else store.earlier_names()
    if changed:
        print(
            "what runs needed before their config files or images were changed is kept "
            f"({', '.join(changed)}); --earlier lets go of it"
        )
    size = sum(b for _, b in garbage)
    if not garbage:
        print("nothing to delete: every result belongs to a named run")
        return 0
    print(
        f"{len(garbage)} results and remains of interrupted ones, {size / 1e6:.1f} MB, belong "
        "to no named run"
    )
    if not args.yes and ask("delete them? [y/N] ") not in ("y", "yes"):
        print("nothing was deleted")
        return 0
    paths = [path for path, _ in garbage]
    needed_again, busy = app.delete_garbage(store, paths, args.earlier)
    if needed_again:
        print(f"{len(needed_again)} of them are kept: a run has begun that needs them")
    if busy:
        print(f"{len(busy)} of them are kept: a process is at work on them")
    print("deleted")
    return 0


def ask(question: str) -> str:
    """A person's answer in small letters; empty where nobody is there."""
    try:
        return input(question).strip().lower()
    except EOFError:
        print()
        return ""
