"""The command line: run, plan, ingest, report, analyse, ui, gc. Few flags; everything else is `--set key=value`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn

from pipeline import browse, draw
from workers.errors import UserError

if TYPE_CHECKING:
    from pipeline.config import Config
    from pipeline.graph import Graph, Stage
    from pipeline.run import Executor
    from pipeline.store import Lookup, Store
    from workers.job import Task


def main(argv: list[str] | None = None) -> int:
    """Runs one command. Returns the exit code: 0, or 2 with one sentence on stderr where the input cannot work."""
    try:
        args = parser().parse_args(argv)
        return args.command(args) or 0
    except UserError as error:
        print(f"accrete: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever read our output has seen enough
        sys.stderr.close()
        return 0
    except OSError as error:
        print(f"accrete: {error.filename or 'a file'} cannot be used ({error.strerror or error}); mend its path or permissions and run the same "
              "command again", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("accrete: interrupted; what finished is kept, run the same command again to go on", file=sys.stderr)
        return 130


class Parser(argparse.ArgumentParser):
    """Says in one sentence what is wrong with the command line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


def parser() -> argparse.ArgumentParser:
    top = Parser(prog="python -m pipeline", description="Grow one vision transformer by one task at a time.")
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, function: Any, text: str, config: bool = True, **several: Any) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(command=function)
        if config:
            sub.add_argument("config", help="path of a config, e.g. configs/demo.yaml", **several)
            sub.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help="override a setting, e.g. --set train.epochs=3")
        return sub

    command("run", run, "run what is missing of a config's graph, then report")
    plan_parser = command("plan", plan, "print every stage as hit or miss, with the reason of each miss; run nothing")
    plan_parser.add_argument("--svg", metavar="FILE", help="also write the picture of the graph")
    command("ingest", ingest, "bring a config's raw data into the store, and train nothing")
    command("report", report, "write the report of a config's run again, from the store")
    analyse_parser = command("analyse", analyse, "measure the attention of finished runs, from the store; several configs are compared", nargs="+")
    analyse_parser.add_argument("--images", type=int, default=256, metavar="N", help="test images of each task, about (default: 256)")
    analyse_parser.add_argument("--robustness", action="store_true", help="also hide the centre of images, and attack them")
    ui_parser = command("ui", ui, "serve MLflow on this machine and print links to the runs", config=False)
    ui_parser.add_argument("--storage", default="storage", help="storage folder of the runs (default: storage)")
    ui_parser.add_argument("--port", type=int, default=0, help="port on 127.0.0.1 (default: a free one)")
    gc = command("gc", collect_garbage, "delete stage results that no named run needs; asks first", config=False)
    gc.add_argument("--storage", default="storage", help="storage folder (default: storage)")
    gc.add_argument("--yes", action="store_true", help="do not ask")
    return top


def prepare(args: argparse.Namespace) -> tuple[Config, Store, Graph, list[Task]]:
    """Config, store and graph; paths are absolute from here on."""
    from pipeline import config as config_module
    from pipeline.store import Store

    config = config_module.load(args.config, args.overrides)
    store = Store(config_module.absolute(config.storage))
    store.check_writable()
    from pipeline import build

    graph, tasks = build.graph_of(config, store, provenance())
    return config, store, graph, tasks


def run(args: argparse.Namespace) -> int:
    """The main path: config -> graph -> stages -> records."""
    from pipeline import console, launch, track
    from pipeline.report.tables import RunTables
    from pipeline.run import look_up_all, raise_failures, run_graph
    from pipeline.store import record_of

    config, store, graph, tasks = prepare(args)
    lookups = look_up_all(graph, store, store.record(config.name))
    record = record_of(graph, config, tasks, provenance())
    store.save_record(record)
    screen = console.Console(graph, lookups)
    recording = track.Background(track.Recorder(config.tracking, store.storage), graph, record, draw.to_svg(graph, {}))
    files: dict[str, bytes] = {}
    status = "KILLED"

    def executor(todo: set[str]) -> Executor:
        return launch.executor(store, config.cluster, graph, todo, screen.progress, lambda stage: make_report(store, graph, record, stage))

    try:
        outcome = run_graph(graph, store, executor, config.cluster.retries, [screen, recording], lookups)
        status = "FAILED" if outcome.failures else "FINISHED"
        raise_failures(outcome, command_of(args))
        files = report_files(store, graph)
    finally:
        recorder = recording.finish(files, status)
    page = export(store, config.name, files)
    print(console.summary(RunTables.load(store.storage, record), outcome, [*recorder.warnings, f"report: {page}", *recorder.links()]))
    return 0


def make_report(store: Store, graph: Graph, record: dict[str, Any], stage: Stage) -> dict[str, Any]:
    """The report stage: pages, pictures and tables of the whole run, from the store alone."""
    from pipeline.report import page
    from workers.artefact import Attempt

    started = time.monotonic()
    attempt = Attempt(store.root, stage.key)
    for name, data in page.build(store.storage, record, draw.to_svg(graph, {})).items():
        attempt.write(name, data)
    manifest = {"kind": "report", "stage": stage.id, "step": "report", "wall_s": round(time.monotonic() - started, 3)}
    attempt.commit(manifest)
    return manifest


def report_files(store: Store, graph: Graph) -> dict[str, bytes]:
    from workers.artefact import Artefact

    artefact = Artefact.need(store.root, graph["report"].key)
    return {name: artefact.read(name) for name in artefact.manifest["files"]}


def export(store: Store, name: str, files: dict[str, bytes]) -> str:
    """Copies the report's files to where people look, `runs/NAME/`; returns the place of the page."""
    from workers.artefact import join, write_bytes

    folder = join(store.storage, "runs", name)
    for file, data in files.items():
        write_bytes(join(folder, file), data)
    return join(folder, "report.html")


def plan(args: argparse.Namespace) -> int:
    from pipeline.run import look_up_all, needed

    config, store, graph, _ = prepare(args)
    lookups = look_up_all(graph, store, store.record(config.name), verify=False)
    todo = needed(graph, lookups)
    status = {s.id: "miss" if s.id in todo else "hit" for s in graph}
    width = max(len(s.id) for s in graph)
    for stage in graph:
        print(f"{status[stage.id]:4}  {stage.id:<{width}}  {stage.key[:12]}  {note(stage.id, lookups, todo)}")
    print(f"\n{len(graph)} stages: {len(graph) - len(todo)} stand, {len(todo)} to run (marked * below)\n")
    print(draw.to_text(graph, status))
    if args.svg:
        try:
            with open(args.svg, "w", encoding="utf-8") as stream:
                stream.write(draw.to_svg(graph, status))
        except OSError as error:
            raise UserError(f"--svg {args.svg!r} cannot be written ({error.strerror}); name a file in a folder that is there") from None
        print(f"\npicture: {args.svg}")
    return 0


def note(stage_id: str, lookups: dict[str, Lookup], todo: set[str]) -> str:
    if stage_id in todo:
        return lookups[stage_id].reason
    return "" if lookups[stage_id].hit else "result is gone, and nothing that is missing waits for it"


def ingest(args: argparse.Namespace) -> int:
    from pipeline import launch
    from pipeline.console import Console
    from pipeline.graph import Graph
    from pipeline.run import look_up_all, raise_failures, run_graph

    config, store, graph, _ = prepare(args)
    part = Graph.of(graph.name, [s for s in graph if s.step == "ingest"])
    lookups = look_up_all(part, store, store.record(config.name))
    console = Console(part, lookups)
    outcome = run_graph(part, store, lambda todo: launch.executor(store, config.cluster, part, todo, console.progress, lambda stage: {}),
                        config.cluster.retries, [console], lookups)
    raise_failures(outcome, command_of(args))
    for stage in part:
        manifest = store.look_up(stage, verify=False).manifest or {}
        counts = ", ".join(f"{n} {split}" for split, n in manifest.get("counts", {}).items())
        rejected = ", ".join(f"{n} {reason}" for reason, n in manifest.get("rejected", {}).items()) or "none rejected"
        print(f"{stage.id}: {counts}; {rejected}")
    return 0


def report(args: argparse.Namespace) -> int:
    """Writes the report and the MLflow record anew from what the store holds, also of an unfinished run."""
    from pipeline import track
    from pipeline.report import page
    from pipeline.store import record_of

    config, store, graph, tasks = prepare(args)
    record = store.record(config.name) or record_of(graph, config, tasks, provenance())
    picture = draw.to_svg(graph, {})
    files = page.build(store.storage, record, picture)
    recorder = track.Recorder(config.tracking, store.storage)
    recorder.start(record, picture)
    recorder.finish(files)
    print("\n".join([*recorder.warnings, f"report: {export(store, config.name, files)}", *recorder.links()]))
    return 0


def analyse(args: argparse.Namespace) -> int:
    """Tables and pictures beside the report of the first run that is named."""
    from pipeline import analyse as analysis
    from workers.analysis import attention_rows, robustness_rows

    if args.images < 1:
        raise UserError(f"--images is {args.images}; give the number of test images of a task, at least 1")
    runs = []
    for path in args.config:
        config, store, graph, _ = prepare(argparse.Namespace(config=path, overrides=args.overrides))
        runs.append(analysis.Analysed(config.name, graph, store))
    rows = analysis.measured(runs, attention_rows, args.images)
    found, text = analysis.attention_files(rows), analysis.attention_text(rows)
    if args.robustness:
        rows = analysis.measured(runs, robustness_rows, args.images)
        found, text = found | analysis.robustness_files(rows), f"{text}\n\n{analysis.robustness_text(rows)}"
    folder = os.path.dirname(export(runs[0].store, runs[0].name, found))
    print(f"{text}\n\nanalysis: {folder}/analysis.png" + (f"\nrobustness: {folder}/robustness.png" if args.robustness else ""))
    return 0


def ui(args: argparse.Namespace) -> int:
    from pipeline import config

    storage = config.absolute(args.storage)
    if "://" not in storage and not os.path.isdir(storage):
        raise UserError(f"storage {args.storage!r} does not exist; give the folder that holds the runs with --storage")
    return browse.serve(storage, port=args.port)


def collect_garbage(args: argparse.Namespace) -> int:
    from pipeline.config import absolute
    from pipeline.store import Store
    from workers.artefact import delete_dir, join

    store = Store(absolute(args.storage))
    garbage = store.garbage()
    size = sum(b for _, b in garbage)
    if not garbage:
        print("nothing to delete: every result belongs to a named run")
        return 0
    print(f"{len(garbage)} results and remains of interrupted ones, {size / 1e6:.1f} MB, belong to no named run")
    if not args.yes and ask("delete them? [y/N] ") not in ("y", "yes"):
        print("nothing was deleted")
        return 0
    for path, _ in garbage:
        delete_dir(join(store.storage, path))
    print("deleted")
    return 0


def ask(question: str) -> str:
    """A person's answer in small letters; empty where nobody is there."""
    try:
        return input(question).strip().lower()
    except EOFError:
        print()
        return ""


def command_of(args: argparse.Namespace) -> str:
    sets = "".join(f" --set {o}" for o in args.overrides)
    return f"{browse.this_python()} -m pipeline run {args.config}{sets}"


def provenance() -> dict[str, Any]:
    """What a result was made with: git commit, package versions, Python, and when."""
    import importlib.metadata
    import platform
    import subprocess

    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    try:
        command = ["git", "-C", root, "describe", "--always", "--dirty", "--abbrev=12"]
        commit = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        commit = ""
    packages = {}
    for name in ("torch", "torchvision", "timm", "ray", "mlflow", "webdataset", "pyarrow", "numpy", "pillow"):
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"git_commit": commit, "packages": packages, "python": platform.python_version(), "platform": platform.platform(terse=True),
            "created": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
