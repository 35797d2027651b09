"""Looking at the record of runs: links into MLflow's pages, and a server for this machine."""

from __future__ import annotations

import argparse
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING
from urllib.parse import quote

from workers.errors import UserError
from workers.storage.artifact import join
from workers.storage.secrets import redact

if TYPE_CHECKING:
    from mlflow import MlflowClient

LOOPBACK = "127.0.0.1"
SAY_S = 10.0  # how often a person is told that the server is still starting
LAST_LINES = 30  # of a server's log, to say why it ended
MODE = "?workflowType=machine_learning"  # else MLflow opens on its pages for language models


def this_python() -> str:
    """This interpreter as one would type it here."""
    short = os.path.relpath(sys.executable)
    return sys.executable if short.startswith("..") else short


def runs_link(base: str, experiment: str) -> str:
    return f"{base}/#/experiments/{experiment}/runs{MODE}"


def run_link(base: str, experiment: str, run: str) -> str:
    return f"{base}/#/experiments/{experiment}/runs/{run}{MODE}"


def compare_link(base: str, experiment: str, runs: Sequence[str]) -> str:
    """The page that lays the methods of a run side by side."""
    lists = (quote(json.dumps(v, separators=(",", ":"))) for v in (list(runs), [experiment]))
    return f"{base}/#/compare-runs?runs={next(lists)}&experiments={next(lists)}&workflowType=machine_learning"


def recorded(
    client: MlflowClient, experiment: str, kind: str = "run", most: int = 10
) -> list[tuple[str, str, list[str]]]:
    """(name, run id, run ids of its methods) of the graphs recorded last, the newest first. kind:
    `search` for searches, with the ids of their trials."""
    newest = ["attributes.start_time DESC"]
    found = client.search_runs(
        [experiment], f"tags.`accrete.kind` = '{kind}'", max_results=most, order_by=newest
    )
    below = client.search_runs(
        [experiment],
        f"tags.`accrete.kind` = '{'trial' if kind == 'search' else 'method'}'",
        max_results=1000,
        order_by=newest,
    )
    return [
        (
            r.info.run_name or "",
            r.info.run_id,
            [
                m.info.run_id
                for m in reversed(below)
                if m.data.tags.get("mlflow.parentRunId") == r.info.run_id
            ],
        )
        for r in found
    ]


def page_base(address: str) -> str:
    """The address of a tracking server as the start of links for people: without user, password and
    query."""
    return redact(address).partition("?")[0].rstrip("/")


def server_command(storage: str, host: str, port: int) -> list[str]:
    """`mlflow server` with one process that serves and none that works on jobs. Its database is
    named by `server_environment`: everybody on this machine can read the arguments of a process."""
    return [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--default-artifact-root",
        join(storage, "mlartifacts"),
        "--host",
        host,
        "--port",
        str(port),
        "--workers",
        "1",
    ]


def server_environment(uri: str) -> dict[str, str]:
    """The environment of `mlflow server` over the database `uri`."""
    from pipeline.tracking.mlflow_client import ENVIRONMENT

    return {**os.environ, **ENVIRONMENT, "MLFLOW_BACKEND_STORE_URI": uri}


def address_options(parser: argparse.ArgumentParser) -> None:
    """Where a server listens: for this machine alone unless a person says otherwise."""
    parser.add_argument(
        "--host",
        default=LOOPBACK,
        help=f"address to listen on (default: {LOOPBACK}, for this machine alone; nobody is "
        "asked for a password)",
    )
    parser.add_argument("--port", type=int, default=0, help="port (default: a free one)")


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def warn_if_exposed(host: str, port: int, what: str) -> None:
    """One line on stderr where other machines can reach a server. what: what whoever reaches it can
    do, and that nothing stops them."""
    if not is_loopback(host):
        print(
            f"accrete: anyone who reaches {host}:{port} can {what}; put it behind a proxy that "
            "asks for a password, or leave out --host and tunnel: "
            f"ssh -L {port}:{LOOPBACK}:{port} {socket.gethostname()}",
            file=sys.stderr,
            flush=True,
        )


def free_port(host: str, port: int = 0) -> int:
    """`port`, or a free one for 0. Raises UserError where it is taken."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            said = getattr(error, "strerror", None) or error
            raise UserError(
                f"port {port} on {host} cannot be used ({said}); give another with --port, or "
                "none for a free one"
            ) from None
        return probe.getsockname()[1]


def serve(
    storage: str, host: str = LOOPBACK, port: int = 0, uri: str = "", experiment: str = "accrete"
) -> int:
    """Runs `mlflow server` over the storage until it is interrupted and prints links to the runs.
    Returns its exit code."""
    from pipeline.tracking.mlflow_client import open_store, refusals_told

    with refusals_told(storage, uri):
        client, address, number = open_store(storage, uri, experiment)
        if address.startswith(("http://", "https://")):
            print_links(client, page_base(address), number)
            return 0
    port = free_port(host, port)
    warn_if_exposed(host, port, "read and delete every run: MLflow asks for no password")
    # a terminated `ui` takes its server with it
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    server = subprocess.Popen(
        server_command(storage, host, port),
        env=server_environment(address),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    log: deque[str] = deque(maxlen=LAST_LINES)
    # a full pipe would stop the server
    reader = threading.Thread(target=log.extend, args=(server.stderr or (),), daemon=True)
    reader.start()
    try:
        if not wait_until_up(server, host, port):
            reader.join(5)
            raise UserError(why_it_ended(server, log, host, port))
        print_links(client, f"http://{host}:{port}", number)
        print("stop with Ctrl-C", flush=True)
        return server.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        if server.poll() is None:
            server.terminate()
            server.wait(timeout=20)
        reader.join(5)
        if server.stderr and not reader.is_alive():
            server.stderr.close()


def print_links(client: MlflowClient, base: str, experiment: str) -> None:
    print(f"MLflow: {runs_link(base, experiment)}")
    for kind, parts in (("run", "methods"), ("search", "trials")):
        for name, run, below in recorded(client, experiment, kind):
            print(f"  {name}: {run_link(base, experiment, run)}")
            if len(below) > 1:
                print(
                    f"  {' ' * len(name)}  its {parts} side by side: "
                    f"{compare_link(base, experiment, below)}"
                )
    sys.stdout.flush()


def why_it_ended(server: subprocess.Popen[str], log: Iterable[str], host: str, port: int) -> str:
    """A sentence from the last lines of a server that ended before it answered."""
    lines = [" ".join(redact(line).split()) for line in log if line.strip()]
    last = lines[-1][:300] if lines else "it said nothing"
    taken = any("ddress already in use" in line for line in lines)
    remedy = (
        "another program took the port meanwhile: try another --port, or none for a free one"
        if taken
        else "mend what it says and try again"
    )
    return (
        f"mlflow server ended with exit code {server.returncode} before it answered on "
        f"{host}:{port} ({last}); {remedy}"
    )


def wait_until_up(server: subprocess.Popen[str], host: str, port: int) -> bool:
    """True once the port answers, however long that takes; False when the server has ended. Says
    now and then that it waits."""
    started = told = time.monotonic()
    while server.poll() is None:
        try:
            socket.create_connection((host, port), timeout=1).close()
            return True
        except OSError:
            time.sleep(0.2)
        if time.monotonic() - told > SAY_S:
            told = time.monotonic()
            print(
                f"accrete: mlflow server is starting, for {told - started:.0f} s now; Ctrl-C "
                "ends it",
                file=sys.stderr,
                flush=True,
            )
    return False
