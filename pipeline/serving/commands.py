"""A finished run -> one model that serves all its tasks: predict, bundle, tasks and serve on the
command line."""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from pipeline.data.csv_text import to_csv
from pipeline.tracking import ui
from workers.errors import UserError
from workers.storage.regular_file import read_regular

if TYPE_CHECKING:
    from workers.serving.bundle import Bundle
    from workers.serving.server import Answer

# of all images of a request that is served, and of all that are decoded at the same moment
MAX_PIXELS = 1 << 26
SHOWN = 3  # probabilities in a table, unless more are asked for


def commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds what this module does to the command line."""
    ask = command(
        "predict",
        predict,
        "what the tasks of a finished run say of images; the config may be a model folder",
    )
    ask.add_argument("images", nargs="+", metavar="IMAGE", help="path of a JPEG, PNG or WebP file")
    ask.add_argument(
        "--task", metavar="NAME", help="the task of the images, where the method cannot find it out"
    )
    ask.add_argument(
        "--rule",
        default="refuse",
        help="without a task: `refuse`, or `confident`: the task that answers with the highest "
        "probability",
    )
    ask.add_argument(
        "--top",
        type=int,
        default=SHOWN,
        metavar="K",
        help=f"probabilities to show (default: {SHOWN}; 0: all)",
    )
    ask.add_argument("--csv", metavar="FILE", help="also write the table as CSV")
    make = command(
        "bundle",
        bundle,
        "write all that serves a method of a finished run into a folder of its own",
    )
    make.add_argument(
        "--out",
        required=True,
        metavar="DIR",
        help="a new folder, or a URI such as s3://bucket/model",
    )
    start = command(
        "serve",
        serve,
        "answer requests over HTTP on this machine, by Ray Serve; the config may be a model folder",
    )
    ui.address_options(start)
    start.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name under which clients may ask, beside the address and localhost; may be "
        "repeated",
    )
    start.add_argument(
        "--max-pixels",
        type=int,
        default=MAX_PIXELS,
        metavar="N",
        help=f"most pixels of all images of a request together (default: {MAX_PIXELS})",
    )
    for each in (ask, make, start):
        each.add_argument(
            "--method", metavar="LABEL", help="label of the method, where the run has several"
        )
    states = command(
        "tasks", tasks, "list, export, import or remove the tasks of a model folder", config=False
    )
    states.add_argument("model", metavar="MODEL_DIR", help="a folder that `bundle` wrote")
    actions = states.add_subparsers(required=True, metavar="ACTION", dest="action")
    actions.add_parser("list", help="the tasks that it serves")
    for action, arguments, text in (
        ("export", ("name", "file"), "write a task into a file of its own"),
        ("import", ("file",), "serve an exported task too"),
        ("remove", ("name",), "serve a task no more"),
    ):
        sub = actions.add_parser(action, help=text)
        for argument in arguments:
            sub.add_argument(argument, metavar=argument.upper())


def chosen(args: argparse.Namespace) -> Bundle:
    """Of a model folder, or of a method of a config's run."""
    from workers.serving.bundle import MODEL, Bundle
    from workers.storage.artifact import exists, join

    if os.path.isdir(args.config) or ("://" in args.config and exists(join(args.config, MODEL))):
        if args.method or args.overrides:
            raise UserError(
                f"{args.config!r} is a model folder, which holds one method as it is; leave out "
                "--method and --set"
            )
        return Bundle.open(args.config)
    from pipeline import app
    from pipeline.results.bundles import bundle_of

    run = app.prepare(args.config, args.overrides)
    name, labels = run.config.name, [*run.config.methods]
    if args.method is None and len(labels) > 1:
        raise UserError(
            f"run {name!r} has several methods; choose one with --method: {', '.join(labels)}"
        )
    label = args.method or labels[0]
    if label not in labels:
        raise UserError(
            f"--method is {label!r}, which run {name!r} does not have; it has {', '.join(labels)}"
        )
    return bundle_of(run.graph, run.store, label)


# ---- commands ------------------------------------------------------------------------------------
def predict(args: argparse.Namespace) -> int:
    from pipeline.console import table_text
    from workers.serving.server import Predictor

    served = Predictor(chosen(args))
    served.check_request(len(args.images), args.task, args.rule, args.top)
    found: list[Answer] = []
    limits = limits_of(served.bundle)
    for start in range(0, len(args.images), limits.images):
        found += served.predict(
            [os.fspath(name) for name in args.images[start : start + limits.images]],
            args.task,
            args.rule,
            args.top,
            limits,
        )
    heading = ["image", "task", "confidence", "class", "probability", "probabilities"]
    rows = [
        [
            name,
            a.task,
            f"{a.confidence:.3f}",
            a.class_,
            f"{a.probability:.3f}",
            ", ".join(f"{c} {p:.3f}" for c, p in a.probabilities.items()),
        ]
        for name, a in zip(args.images, found, strict=True)
    ]
    print(table_text(heading, rows))
    if args.csv:
        with open(args.csv, "wb") as stream:
            stream.write(to_csv(heading, rows))
    return 0


def limits_of(bundle: Bundle) -> Any:
    """On the command line files are named."""
    from workers.serving.images import Limits

    return Limits(bundle.body["max_pixels"], paths=True)


def bundle(args: argparse.Namespace) -> int:
    from pipeline.yaml_files import absolute

    found, out = chosen(args), absolute(args.out)
    found.write(out)
    print(
        f"{out}: method {found.body['method']}, {len(found.tasks)} tasks, "
        f"{found.nbytes / 1e6:.1f} MB"
    )
    return 0


def tasks(args: argparse.Namespace) -> int:
    from pipeline.console import table_text
    from pipeline.yaml_files import absolute
    from workers.serving import bundle as bundles

    model = absolute(args.model)
    found = bundles.Bundle.open(model)
    if args.action == "list":
        sizes = {
            t.name: found.body["files"][bundles.state_file(t.name)]["bytes"] for t in found.tasks
        }
        print(
            table_text(
                ["task", "classes", "bytes"],
                [[t.name, str(t.num_classes), str(sizes[t.name])] for t in found.tasks],
            )
        )
    elif args.action == "export":
        data = bundles.export_task(found, args.name)
        with open(args.file, "wb") as stream:
            stream.write(data)
        print(f"{args.file}: task {args.name}, {len(data)} bytes")
    elif args.action == "import":
        task = bundles.import_task(model, read_regular(args.file, found.most_task_bytes), args.file)
        print(f"{args.model} serves {task.name} too, {task.num_classes} classes")
    else:
        said = bundles.remove_task(model, args.name)
        print(f"{args.model} serves {args.name} no more" + (f"; {said}" if said else ""))
    return 0


def serve(args: argparse.Namespace) -> int:
    """Until it is interrupted."""
    if args.max_pixels < 1:
        raise UserError(
            f"--max-pixels is {args.max_pixels}; give the most pixels that all images of a "
            "request may have together, at least 1"
        )
    port = ui.free_port(args.host, args.port)
    ui.warn_if_exposed(args.host, port, "ask it, at your expense: it asks for no password")
    found = chosen(args)
    with tempfile.TemporaryDirectory(prefix="accrete-") as folder:
        place = os.path.join(folder, "model")
        found.write(place)  # the replica reads it, wherever it came from
        with running(place, port, args.host, args.allow_host, args.max_pixels) as address:
            stop = threading.Event()
            for number in (signal.SIGINT, signal.SIGTERM):  # Ray has put its own there
                signal.signal(number, lambda *_: stop.set())
            print(
                f"serving {', '.join(t.name for t in found.tasks)} on {address}: POST /predict, "
                "GET /tasks, GET /health; stop with Ctrl-C",
                flush=True,
            )
            stop.wait()
    return 0


@contextmanager
def running(
    folder: str, port: int, host: str, names: Sequence[str], max_pixels: int
) -> Iterator[str]:
    """Serves the bundle in `folder` while inside, on a Ray of its own; gives the address. names:
    hosts under which clients may ask."""
    from pipeline.config import ClusterSettings
    from pipeline.launch.cluster import connect

    # before Ray Serve is imported: it sets what Ray reads at import
    ray = connect(ClusterSettings(address="local"))
    try:
        from ray import serve as ray_serve
    except ImportError as error:
        ray.shutdown()
        raise UserError(f"`serve` needs Ray Serve ({error}); install ray[serve]") from None
    from pipeline.serving.deployment import APPLICATION, Deployment, is_running, predict_of
    from pipeline.serving.http_server import Front, Hosts, listening

    try:
        # its proxy has no deadline for heads and bodies
        ray_serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR"})
        application = Deployment.bind(folder, max_pixels)  # type: ignore[attr-defined]
        handle = ray_serve.run(application, name=APPLICATION, route_prefix=None)
        front = Front(
            predict_of(handle), handle.tasks.remote().result(), Hosts(host, names), is_running
        )
        with listening(front, host, port):
            yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    finally:
        with suppress(Exception):  # whatever it is, closing does not hide why serving ended
            ray_serve.shutdown()
        ray.shutdown()
