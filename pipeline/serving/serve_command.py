"""The command `serve`: parse its options, and start and stop the server.

`running` connects the parts: the model source, the application on Ray Serve, the HTTP server and
the thread that watches for new versions of the model.
"""

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

# Default maximum number of pixels of all images of a request, and of all images that a replica
# decodes at a time.
MAX_PIXELS = 1 << 26
TOKEN = "ACCRETE_SERVE_TOKEN"  # name of the environment variable with the token
MAX_TOKEN_BYTES = 4096  # maximum size of a token file


def add_options(start: argparse.ArgumentParser) -> None:
    """Add the options of `serve` to its parser."""
    ui.add_address_options(start)
    start.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a host name that clients may use, in addition to the address and localhost; "
        "may be repeated",
    )
    start.add_argument(
        "--max-pixels",
        type=int,
        default=MAX_PIXELS,
        metavar="N",
        help=f"maximum number of pixels of all images of a request (default: {MAX_PIXELS})",
    )
    start.add_argument(
        "--storage",
        default="storage",
        help="storage folder with the MLflow database of models:/NAME@ALIAS, unless "
        "MLFLOW_TRACKING_URI is set (default: storage)",
    )
    start.add_argument(
        "--token-file",
        default="",
        metavar="FILE",
        help="file with the token that every request except GET /health must send as "
        f"`Authorization: Bearer TOKEN` (default: {TOKEN}; without both, no token is required)",
    )
    start.add_argument(
        "--replicas",
        default="1",
        metavar="N",
        help="number of replicas of the model, or MIN:MAX: the number follows the load "
        "(default: 1)",
    )
    start.add_argument(
        "--cpus", type=int, default=1, metavar="N", help="CPU cores of a replica (default: 1)"
    )
    start.add_argument(
        "--gpus",
        type=float,
        default=0.0,
        metavar="FRACTION",
        help="GPUs of a replica, for example 0.25 (default: 0)",
    )
    start.add_argument(
        "--address",
        default="",
        metavar="HOST:PORT",
        help="the Ray cluster to run on, or `auto`; use it on a node of the cluster "
        "(default: RAY_ADDRESS if set, else a private Ray)",
    )


@dataclass(frozen=True)
class ServerSettings:
    """Settings of a server.

    Args:
        port: Port to listen on.
        host: Address to listen on.
        names: Host names that clients may use, in addition to `host` and localhost.
        max_pixels: Maximum number of pixels of all images of a request.
        replicas: Number and resources of the replicas.
        address: Address of an existing Ray cluster; see `application.started`.
        token: Token that clients must send; "": no token is required.
        record_in: Model folder in which inputs are counted; "": inputs are not counted.
    """

    port: int
    host: str
    names: Sequence[str]
    max_pixels: int
    replicas: ReplicaSettings
    address: str = ""
    token: str = ""
    record_in: str = ""


def parse_settings(args: argparse.Namespace) -> ServerSettings:
    """Return the settings from parsed options. Raise `UserError` if an option is invalid."""
    if args.max_pixels < 1:
        raise UserError(
            f"--max-pixels is {args.max_pixels}; "
            "give the maximum number of pixels of all images of a request, at least 1"
        )
    replicas = ReplicaSettings.parse(args.replicas, args.cpus, args.gpus)
    token = read_token(args.token_file)
    port = ui.find_port(args.host, args.port)
    if not token:
        ui.warn_if_exposed(args.host, port, "ask it, at your expense: it requires no token")
    return ServerSettings(
        port, args.host, args.allow_host, args.max_pixels, replicas, args.address, token
    )


def serve(source: ModelSource, settings: ServerSettings) -> int:
    """Answer requests over HTTP until the process gets SIGINT or SIGTERM.

    Args:
        source: The source of the model.
        settings: Settings of the server.

    Returns:
        The exit code 0.
    """
    with running(source, settings) as address:
        stop = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):  # replace the handlers that Ray installed
            signal.signal(number, lambda *_: stop.set())
        print(
            f"serving on {address}: POST /predict, "
            "GET /tasks, GET /health, GET /metrics, and GET / for people; stop with Ctrl-C",
            flush=True,
        )
        stop.wait()
    return 0


def read_token(path: str) -> str:
    """Return the token of the server.

    Args:
        path: File with the token; "": read the environment variable ACCRETE_SERVE_TOKEN.

    Returns:
        The token, or "" if neither a file nor the environment variable gives one.

    Raises:
        UserError: If the file cannot be read, if the token has fewer than 16 characters, or if it
            contains characters other than visible ASCII.
    """
    where, text = TOKEN, os.environ.get(TOKEN, "")
    if path:
        where = f"--token-file {path}"
        try:
            text = read_regular(path, MAX_TOKEN_BYTES).decode("ascii", "replace")
        except OSError as error:
            raise UserError(
                f"{where} cannot be read ({error.strerror or error}); "
                "give a file with the token as its only line"
            ) from None
    token = text.strip()
    if (path or text) and not re.fullmatch(r"[!-~]{16,}", token):
        raise UserError(
            f"the token of {where} has {len(token)} characters; "
            "give at least 16 letters, digits or signs of ASCII, without spaces"
        )
    return token


@contextmanager
def running(source: ModelSource, settings: ServerSettings) -> Iterator[str]:
    """Context manager that serves the model of a source, and replaces it by each later version.

    Args:
        source: The source of the model.
        settings: Settings of the server.

    Yields:
        The URL of the server.

    Raises:
        UserError: If the model, the cluster or the port cannot be used.
    """
    from pipeline.serving.application import started

    version = source.version()
    bundle = source.open()
    with started(
        settings.address, settings.replicas, settings.max_pixels, settings.record_in
    ) as application:
        # Imported after `started` has set the environment variables that Ray Serve reads at import.
        from pipeline.serving.deployment import MAX_ONGOING_REQUESTS, make_predict
        from pipeline.serving.http_server import Bounds, Front, Hosts, listening
        from pipeline.serving.updates import Updates, following

        tasks = application.deploy(bundle)
        # `Bounds.requests` is for one replica; each further replica runs more requests at a time.
        requests = Bounds.requests + MAX_ONGOING_REQUESTS * (settings.replicas.maximum - 1)
        front = Front(
            make_predict(application.handle),
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
