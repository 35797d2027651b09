"""The command `serve`: its options, and the server from start to end."""

from __future__ import annotations

import argparse
import os
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.serving.replicas import ReplicaSettings
from pipeline.tracking import ui
from workers.errors import UserError
from workers.storage.regular_file import read_regular

if TYPE_CHECKING:
    from pipeline.serving.model_source import ModelSource
    from workers.serving.bundle import Bundle

# Most pixels of one request's images, and of all images that are decoded at the same moment.
MAX_PIXELS = 1 << 26
TOKEN = "ACCRETE_SERVE_TOKEN"  # the name of the environment variable
LONGEST_TOKEN = 4096  # bytes of a file with a token


def options(start: argparse.ArgumentParser) -> None:
    """Add the options of `serve`."""
    ui.address_options(start)
    start.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name under which clients may ask, "
        "beside the address and localhost; may be repeated",
    )
    start.add_argument(
        "--max-pixels",
        type=int,
        default=MAX_PIXELS,
        metavar="N",
        help=f"most pixels of all images of a request together (default: {MAX_PIXELS})",
    )
    start.add_argument(
        "--storage",
        default="storage",
        help="storage folder whose MLflow has models:/NAME@ALIAS, unless MLFLOW_TRACKING_URI is "
        "set (default: storage)",
    )
    start.add_argument(
        "--token-file",
        default="",
        metavar="FILE",
        help="file with the token that every request but GET /health must send as "
        f"`Authorization: Bearer TOKEN` (default: {TOKEN}; without both, none is asked for)",
    )
    start.add_argument(
        "--replicas",
        default="1",
        metavar="N",
        help="replicas of the model, or MIN:MAX, whose number follows the load (default: 1)",
    )
    start.add_argument(
        "--cpus", type=int, default=1, metavar="N", help="CPU cores of a replica (default: 1)"
    )
    start.add_argument(
        "--gpus",
        type=float,
        default=0.0,
        metavar="FRACTION",
        help="GPUs of a replica, also a fraction of one (default: 0)",
    )
    start.add_argument(
        "--address",
        default="",
        metavar="HOST:PORT",
        help="the Ray cluster to run on, from one of its nodes, or `auto` "
        "(default: RAY_ADDRESS if set, else a private one)",
    )


@dataclass(frozen=True)
class ServerSettings:
    """What `serve` is asked for.

    port, host: to listen on. names: hosts under which clients may ask, beside the address and
    localhost. max_pixels: of all images of a request. address: of a cluster that is there. token:
    that clients must send; empty: none. record_in: the model folder in which inputs are counted;
    empty: none are.
    """

    port: int
    host: str
    names: Sequence[str]
    max_pixels: int
    replicas: ReplicaSettings
    address: str = ""
    token: str = ""
    record_in: str = ""


def settings_of(args: argparse.Namespace) -> ServerSettings:
    """Return the settings that options mean. Raise `UserError` when they mean nothing."""
    if args.max_pixels < 1:
        raise UserError(
            f"--max-pixels is {args.max_pixels}; "
            "give the most pixels that all images of a request may have together, at least 1"
        )
    replicas = ReplicaSettings.of(args.replicas, args.cpus, args.gpus)
    token = token_of(args.token_file)
    port = ui.free_port(args.host, args.port)
    if not token:
        ui.warn_if_exposed(args.host, port, "ask it, at your expense: it asks for no token")
    return ServerSettings(
        port, args.host, args.allow_host, args.max_pixels, replicas, args.address, token
    )


def serve(source: ModelSource, settings: ServerSettings) -> int:
    """Answer requests over HTTP until interrupted."""
    with running(source, settings) as address:
        stop = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):  # replaces the handlers of Ray
            signal.signal(number, lambda *_: stop.set())
        print(
            f"serving on {address}: POST /predict, "
            "GET /tasks, GET /health, GET /metrics, and GET / for people; stop with Ctrl-C",
            flush=True,
        )
        stop.wait()
    return 0


def token_of(path: str) -> str:
    """Return the token of a file, or of the environment without one; empty where there is none.

    Raise `UserError` when it cannot be read, or cannot be sent in a header.
    """
    where, text = TOKEN, os.environ.get(TOKEN, "")
    if path:
        where = f"--token-file {path}"
        try:
            text = read_regular(path, LONGEST_TOKEN).decode("ascii", "replace")
        except OSError as error:
            raise UserError(
                f"{where} cannot be read ({error.strerror or error}); "
                "name a file with the token as its only line"
            ) from None
    token = text.strip()
    if (path or text) and not re.fullmatch(r"[!-~]{16,}", token):
        raise UserError(
            f"the token of {where} has {len(token)} characters; "
            "give at least 16 letters, digits and signs of ASCII, without a space"
        )
    return token


@contextmanager
def running(source: ModelSource, settings: ServerSettings) -> Iterator[str]:
    """Inside, serve what a source has by Ray Serve; yield the server's address."""
    from pipeline.serving.application import started

    version = source.version()
    bundle = source.open()
    with started(
        settings.address, settings.replicas, settings.max_pixels, settings.record_in
    ) as application:
        # Imports Ray Serve, which reads at import what `started` has set.
        from pipeline.serving.deployment import ONGOING, predict_of
        from pipeline.serving.http_server import Bounds, Front, Hosts, listening
        from pipeline.serving.updates import Updates, following

        tasks = application.deploy(bundle)
        requests = Bounds.requests + ONGOING * (settings.replicas.most - 1)
        front = Front(
            predict_of(application.handle),
            tasks,
            Hosts(settings.host, settings.names),
            application.count_replicas,
            Bounds(requests=requests),
            settings.token,
        )

        def update(bundle: Bundle) -> None:
            front.tasks = application.deploy(bundle)

        with (
            listening(front, settings.host, settings.port),
            following(Updates(source, version, update)),
        ):
            host = settings.host
            if ":" in host:
                host = f"[{host}]"
            yield f"http://{host}:{settings.port}"
