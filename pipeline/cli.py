"""The command line: run, plan, search, ingest, report, analyse, compare, predict, bundle, serve,
tasks, ui, gc. Few flags, else `--set key=value`."""

from __future__ import annotations

import argparse
import errno
import math
import os
import re
import shlex
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from pipeline.graph import diagram
from pipeline.serving import commands as predict
from pipeline.tracking import ui as browse
from workers import preemption
from workers.errors import UserError
from workers.storage import secrets

if TYPE_CHECKING:
    from pipeline.config import Config
    from pipeline.graph.run import Executor
    from pipeline.graph.stage import Graph, Stage
    from pipeline.graph.store import Lookup, Store
    from pipeline.results.tables import RunTables
    from workers.job import Task

BUCKET = re.compile(r"in bucket '([^']+)'")  # in what pyarrow says of an object
MOST_SAID = 4000  # characters of an error; a worker's own may be long
MOST_MAPS = 32  # test images of a task over which maps are drawn; a page shows no more


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


def prepare(
    args: argparse.Namespace, to_run: bool = False
) -> tuple[Config, Store, Graph, list[Task]]:
    """Config, store and graph; paths are absolute from here on. to_run: raw data that was
    written again in place is read first; else sources on other machines whose results stand are
    not asked."""
    from pipeline import config as config_module
    from pipeline.graph.store import Store
    from pipeline.launch.cluster import is_submitted_job
    from pipeline.yaml_files import absolute

    config = config_module.load(args.config, args.overrides)
    store = Store(absolute(config.storage))
    if is_submitted_job() and not (os.path.isabs(config.storage) or "://" in config.storage):
        raise UserError(
            f"storage {config.storage!r} is relative, and the folder of a submitted job goes "
            "when it ends; give a place that all nodes share "
            "with --set storage=PLACE"
        )
    store.check_writable()
    store.sweep()
    from pipeline.graph import build

    if to_run:
        build.read_sources_again(config, store, print)
    graph, tasks = build.graph_of(config, store, provenance(), ask_sources=to_run)
    return config, store, graph, tasks


def run(args: argparse.Namespace) -> int:
    """The main path: config -> graph -> stages -> records."""
    prepared = prepare(args, to_run=True)
    config = prepared[0]
    if config.name != config.base_name:
        print(
            f"run {config.name}: --set changes what {config.base_name} computes, so this is a "
            "run of its own"
        )
    execute(*prepared, command_of(args), command_of(args, "report"))
    return 0


def execute(
    config: Config, store: Store, graph: Graph, tasks: list[Task], command: str, remedy: str
) -> RunTables:
    """Runs a graph, records it and says what came out. command: what a person types to go on with
    it; remedy: to have its record written anew."""
    from pipeline import console
    from pipeline.graph.run import look_up_all, raise_failures, run_graph
    from pipeline.graph.store import record_of
    from pipeline.launch import executor as launch
    from pipeline.report import analysis_section
    from pipeline.results.tables import RunTables
    from pipeline.tracking import recorder as track

    previous = previous_record(store, config)
    record = record_of(graph, config, tasks, provenance())
    store.save_record(record)  # before it is looked up what stands: `gc` may be at work
    lookups = look_up_all(graph, store, previous)
    screen = console.Console(graph, lookups)
    recorder = track.Recorder(config.tracking, store.storage, screen.say, remedy)
    recording = track.RecordingObserver(recorder, graph, record, diagram.to_svg(graph, {}))
    files: dict[str, bytes] = {}
    status = "KILLED"

    def executor(todo: set[str]) -> Executor:
        return launch.executor(
            store,
            config.cluster,
            graph,
            todo,
            screen.progress,
            lambda stage: make_report(store, graph, record, stage),
        )

    try:
        outcome = run_graph(
            graph, store, executor, config.cluster.retries, [screen, recording], lookups
        )
        status = "FAILED" if outcome.failures else "FINISHED"
        raise_failures(outcome, command)
        files = analysis_section.add_section(report_files(store, graph), record, store)
        recorder.models(graph)
    finally:
        recording.finish(files, status)
        if status != "FINISHED" and recorder.warnings:
            print("\n".join(recorder.warnings), file=sys.stderr)
    page = export(store, config.name, files)
    tables = RunTables.load(store.storage, record)
    print(
        console.summary(tables, outcome, [*recorder.warnings, f"report: {page}", *recorder.links()])
    )
    return tables


def previous_record(store: Store, config: Config) -> dict[str, Any] | None:
    """What the reasons of misses are told from: the run as it was last, else the one of the file
    without `--set`."""
    return store.record(config.name) or store.record(config.base_name)


def search(args: argparse.Namespace) -> int:
    from pipeline.search import run as module

    return module.command(args)


def make_report(store: Store, graph: Graph, record: dict[str, Any], stage: Stage) -> dict[str, Any]:
    """The report stage: pages, pictures and tables of the whole run, from the store alone."""
    from pipeline.report import page
    from workers.storage.artifact import Attempt, cached_artifacts

    started = time.monotonic()
    attempt = Attempt(store.root, stage.key)
    with cached_artifacts(store.root, [graph[parent].key for parent in stage.parents]) as made_of:
        files = page.build(store.storage, record, diagram.to_svg(graph, {}))
    for name, data in files.items():
        attempt.write(name, data)
    manifest = {
        "kind": "report",
        "stage": stage.id,
        "step": "report",
        "wall_s": round(time.monotonic() - started, 3),
        "made_of": made_of,
    }
    attempt.commit(manifest)
    return manifest


def report_files(store: Store, graph: Graph) -> dict[str, bytes]:
    from workers.storage.artifact import Artifact

    artifact = Artifact.need(store.root, graph["report"].key)
    return {name: artifact.read(name) for name in artifact.manifest["files"]}


def export(store: Store, name: str, files: dict[str, bytes]) -> str:
    """Copies the report's files to where people look, `runs/NAME/`; returns the place of the
    page."""
    from workers.storage.artifact import join, write_bytes

    folder = join(store.storage, "runs", name)
    for file, data in files.items():
        write_bytes(join(folder, file), data)
    return join(folder, "report.html")


def plan(args: argparse.Namespace) -> int:
    from pipeline.graph.run import look_up_all, needed
    from pipeline.graph.store import version_notes

    config, store, graph, tasks = prepare(args)
    previous = previous_record(store, config)
    lookups = look_up_all(graph, store, previous, verify=False)
    todo = needed(graph, lookups)
    status = {s.id: "miss" if s.id in todo else "hit" for s in graph}
    width = max(len(s.id) for s in graph)
    for stage in graph:
        print(
            f"{status[stage.id]:4}  {stage.id:<{width}}  {stage.key[:12]}  "
            f"{note(stage, lookups, todo)}"
        )
    print(
        f"\n{len(graph)} stages: {len(graph) - len(todo)} stand, {len(todo)} to run (marked * "
        "below)\n"
    )
    for line in version_notes(lookups, previous, provenance()):
        print(f"{line}\n")
    print(diagram.to_text(graph, status))
    if args.cost:
        from pipeline.launch import cost

        print("\n" + cost.text(cost.forecast(graph, config, store, todo, tasks)))
    if args.svg:
        try:
            with open(args.svg, "w", encoding="utf-8") as stream:
                stream.write(diagram.to_svg(graph, status))
        except OSError as error:
            raise UserError(
                f"--svg {args.svg!r} cannot be written ({error.strerror}); name a file in a "
                "folder that is there"
            ) from None
        print(f"\npicture: {args.svg}")
    return 0


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
    from pipeline.graph.stage import Graph

    config, store, graph, _ = prepare(args, to_run=True)
    part = Graph.of(graph.name, [s for s in graph if s.step == "ingest"])
    bring(part, config, store, command_of(args))
    for stage in part:
        manifest = store.look_up(stage, verify=False).manifest or {}
        counts = ", ".join(f"{n} {split}" for split, n in manifest.get("counts", {}).items())
        rejected = (
            ", ".join(f"{n} {reason}" for reason, n in manifest.get("rejected", {}).items())
            or "none rejected"
        )
        print(f"{stage.id}: {counts}; {rejected}")
    return 0


def bring(part: Graph, config: Config, store: Store, command: str) -> None:
    """Runs the ingest stages in `part` that are missing."""
    from pipeline.console import Console
    from pipeline.graph.run import look_up_all, raise_failures, run_graph
    from pipeline.launch import executor as launch

    lookups = look_up_all(part, store, previous_record(store, config))
    console = Console(part, lookups)
    outcome = run_graph(
        part,
        store,
        lambda todo: launch.executor(
            store, config.cluster, part, todo, console.progress, lambda stage: {}
        ),
        config.cluster.retries,
        [console],
        lookups,
    )
    raise_failures(outcome, command)


def report(args: argparse.Namespace) -> int:
    """Writes the report and the MLflow record anew from what the store holds, also of an unfinished
    run; of a search its own."""
    from pipeline.graph.store import record_of
    from pipeline.report import analysis_section, page
    from pipeline.search import run as searches
    from pipeline.tracking import recorder as track
    from workers.storage.artifact import Artifact

    if searches.is_search(args.config):
        return searches.report(args)
    config, store, graph, tasks = prepare(args)
    record = store.record(config.name) or record_of(graph, config, tasks, provenance())
    picture = diagram.to_svg(graph, {})
    files = analysis_section.add_section(page.build(store.storage, record, picture), record, store)
    recorder = track.Recorder(config.tracking, store.storage, remedy=command_of(args, "report"))
    recorder.start(record, picture)
    if all(Artifact.open(store.root, stage.key) for stage in graph if stage.step == "evaluate"):
        recorder.models(graph)
    recorder.finish(files)
    print(
        "\n".join(
            [*recorder.warnings, f"report: {export(store, config.name, files)}", *recorder.links()]
        )
    )
    return 0


def analyse(args: argparse.Namespace) -> int:
    """Tables and pictures in the report and in the record: of several runs, in those of the first;
    numbers of a method in its own record."""
    from pipeline.graph import build
    from pipeline.report import analyse as analysis
    from pipeline.report import analysis_section
    from pipeline.tracking import points
    from pipeline.tracking import recorder as track

    for option, least, most in (("images", 1, math.inf), ("maps", 0, MOST_MAPS)):
        if not least <= (given := getattr(args, option)) <= most:
            bounds = f"at least {least}" if most == math.inf else f"{least} to {most}"
            raise UserError(
                f"--{option} is {given}; give the number of test images of a task, {bounds}"
            )
    runs: list[analysis.FinishedRun] = []
    others: list[Task] = []
    for path in args.config:
        config, store, graph, tasks = prepare(
            argparse.Namespace(config=path, overrides=args.overrides)
        )
        if config.name in {run.name for run in runs}:
            raise UserError(
                f"analyse: two of these configs are runs called {config.name!r}, so that their "
                "numbers could not be told apart; give each once, "
                "with a `name` of its own (--set goes into all of them)"
            )
        runs.append(
            analysis.FinishedRun(config, graph, store, record_for(store, graph, config, tasks))
        )
        analysis.check_finished(runs[-1])
        part, others = build.cards_graph(config, store, args.on)
        analysis.check_covered(runs[-1:], others)
        bring(
            part,
            config,
            store,
            " ".join([browse.this_python(), "-m pipeline analyse", *args.config, "--on", *args.on]),
        )
    found = analysis.analyse_runs(runs, args.images, args.maps, args.robustness, others)
    first, pages, said = runs[0], "", list[str]()
    made = analysis_section.analysis_files(found.parts, [run.record for run in runs], first.store)
    folder = os.path.dirname(export(first.store, first.name, made))
    for run in runs:
        picture = diagram.to_svg(run.graph, {})
        files = analysis_section.add_section(
            report_of(run.store, run.graph, run.record, picture), run.record, run.store
        )
        recorder = track.Recorder(run.config.tracking, run.store.storage, remedy="the same command")
        recorder.start(run.record, picture)
        recorder.analysed(
            made if run is first else {},
            points.analysis_points(run.name, found.attention, found.robustness, args.images),
        )
        recorder.finish(files)
        pages = pages or export(run.store, run.name, files)
        said += [*recorder.warnings, *(recorder.links() if run is first else [])]
    pictures = [f"{name}: {folder}/{part.pictures[0].name}" for name, part in found.parts.items()]
    print("\n".join([found.text, "", *pictures, f"report: {pages}", *said]))
    return 0


def record_for(store: Store, graph: Graph, config: Config, tasks: list[Task]) -> dict[str, Any]:
    """The record of this graph: the one in the store, unless the run of this name has changed
    since."""
    from pipeline.graph.store import record_of

    found = store.record(config.name)
    stands = found is not None and {s["id"]: s["key"] for s in found["stages"]} == {
        s.id: s.key for s in graph
    }
    return found if found is not None and stands else record_of(graph, config, tasks, provenance())


def report_of(
    store: Store, graph: Graph, record: Mapping[str, Any], picture: str
) -> dict[str, bytes]:
    """The files of the report stage; made anew where there are none."""
    from pipeline.report import page
    from workers.storage.artifact import Artifact

    return (
        report_files(store, graph)
        if Artifact.open(store.root, graph["report"].key)
        else page.build(store.storage, record, picture)
    )


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
    from pipeline.graph.store import Store
    from pipeline.yaml_files import absolute

    store = Store(absolute(args.storage))
    garbage = store.garbage(args.earlier)
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
    wanted, busy = delete_garbage(store, [path for path, _ in garbage], args.earlier)
    if wanted:
        print(f"{len(wanted)} of them are kept: a run has begun that needs them")
    if busy:
        print(f"{len(busy)} of them are kept: a process is at work on them")
    print("deleted")
    return 0


def delete_garbage(store: Store, paths: list[str], earlier: bool) -> tuple[list[str], list[str]]:
    """Deletes what was garbage when a person was asked and still is. Returns the paths that a run
    needs by now, and those that a process is computing."""
    from workers.storage.artifact import delete_dir, join
    from workers.storage.lock import stage_lock

    wanted, busy = [], []
    with store.claimed_by_gc():
        still = {path for path, _ in store.garbage(earlier)}
        for path in paths:
            if path not in still:
                wanted.append(path)
                continue
            try:
                with stage_lock(store.root, path.split("/")[1], wait=False):
                    delete_dir(join(store.storage, path))
            except BlockingIOError:
                busy.append(path)
        if earlier:
            store.forget_earlier()
    return wanted, busy


def ask(question: str) -> str:
    """A person's answer in small letters; empty where nobody is there."""
    try:
        return input(question).strip().lower()
    except EOFError:
        print()
        return ""


def command_of(args: argparse.Namespace, command: str = "run") -> str:
    return " ".join(
        [
            browse.this_python(),
            "-m pipeline",
            command,
            *map(
                shlex.quote, [args.config, *(part for o in args.overrides for part in ("--set", o))]
            ),
        ]
    )


def provenance() -> dict[str, Any]:
    """What a result was made with: git commit, package versions, Python, and when."""
    import importlib.metadata
    import platform
    import subprocess

    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    try:
        command = ["git", "-C", root, "describe", "--always", "--dirty", "--abbrev=12"]
        commit = subprocess.run(
            command, capture_output=True, text=True, timeout=5, check=False
        ).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        commit = ""
    packages = {}
    for name in (
        "torch",
        "torchvision",
        "timm",
        "ray",
        "mlflow",
        "webdataset",
        "pyarrow",
        "numpy",
        "pillow",
    ):
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "git_commit": commit,
        "packages": packages,
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
