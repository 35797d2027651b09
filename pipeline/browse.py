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
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING
from urllib.parse import quote

from workers.artefact import join
from workers.errors import UserError
from workers.secrets import shown

if TYPE_CHECKING:
    from mlflow import MlflowClient

LOOPBACK = "127.0.0.1"
UP_S = 60.0  # a server that has not answered by then is given up
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


def recorded(client: MlflowClient, experiment: str, kind: str = "run", most: int = 10) -> list[tuple[str, str, list[str]]]:
    """(name, run id, run ids of its methods) of the graphs recorded last, the newest first. kind: `search` for searches, with the ids of their trials."""
    newest = ["attributes.start_time DESC"]
    found = client.search_runs([experiment], f"tags.`accrete.kind` = '{kind}'", max_results=most, order_by=newest)
    below = client.search_runs([experiment], f"tags.`accrete.kind` = '{'trial' if kind == 'search' else 'method'}'", max_results=1000, order_by=newest)
    return [(r.info.run_name or "", r.info.run_id, [m.info.run_id for m in reversed(below) if m.data.tags.get("mlflow.parentRunId") == r.info.run_id])
            for r in found]


def server_command(uri: str, storage: str, host: str, port: int) -> list[str]:
    """`mlflow server` with one process that serves and none that works on jobs."""
    return [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri, "--default-artifact-root", join(storage, "mlartifacts"),
            "--host", host, "--port", str(port), "--workers", "1"]


def address_options(parser: argparse.ArgumentParser) -> None:
    """Where a server listens: for this machine alone unless a person says otherwise."""
    parser.add_argument("--host", default=LOOPBACK, help=f"address to listen on (default: {LOOPBACK}, for this machine alone; nobody is asked for a password)")
    parser.add_argument("--port", type=int, default=0, help="port (default: a free one)")


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def warn_if_exposed(host: str, port: int, what: str) -> None:
    """One line on stderr where other machines can reach a server. what: what whoever reaches it can do, and that nothing stops them."""
    if not is_loopback(host):
        print(f"accrete: anyone who reaches {host}:{port} can {what}; put it behind a proxy that asks for a password, or leave out --host and tunnel: "
              f"ssh -L {port}:{LOOPBACK}:{port} {socket.gethostname()}", file=sys.stderr, flush=True)


def free_port(host: str, port: int = 0) -> int:
    """`port`, or a free one for 0. Raises UserError where it is taken."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            said = getattr(error, "strerror", None) or error
            raise UserError(f"port {port} on {host} cannot be used ({said}); give another with --port, or none for a free one") from None
        return probe.getsockname()[1]


def serve(storage: str, host: str = LOOPBACK, port: int = 0, uri: str = "", experiment: str = "accrete") -> int:
    """Runs `mlflow server` over the storage until it is interrupted and prints links to the runs. Returns its exit code."""
    from pipeline.track_mlflow import ENVIRONMENT, open_store, refusals_told

    with refusals_told(storage, uri):
        client, address, number = open_store(storage, uri, experiment)
        if address.startswith(("http://", "https://")):
            print_links(client, shown(address).rstrip("/"), number)
            return 0
    port = free_port(host, port)
    warn_if_exposed(host, port, "read and delete every run: MLflow asks for no password")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a terminated `ui` takes its server with it
    server = subprocess.Popen(server_command(address, storage, host, port), env={**os.environ, **ENVIRONMENT}, stdout=subprocess.DEVNULL,
                              stderr=subprocess.PIPE, text=True)
    try:
        if not wait_until_up(server, host, port):
            said = (server.communicate(timeout=5)[1] if server.poll() is not None else "").strip().splitlines()
            raise UserError(f"mlflow server did not start on {host}:{port}" + (f" ({said[-1]})" if said else "") + "; try another --port")
        print_links(client, f"http://{host}:{port}", number)
        print("stop with Ctrl-C", flush=True)
        for _ in server.stderr or ():  # its log is of no use here, but a full pipe would stop it
            pass
        return server.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        if server.poll() is None:
            server.terminate()
            server.wait(timeout=20)


def print_links(client: MlflowClient, base: str, experiment: str) -> None:
    print(f"MLflow: {runs_link(base, experiment)}")
    for kind, parts in (("run", "methods"), ("search", "trials")):
        for name, run, below in recorded(client, experiment, kind):
            print(f"  {name}: {run_link(base, experiment, run)}")
            if len(below) > 1:
                print(f"  {' ' * len(name)}  its {parts} side by side: {compare_link(base, experiment, below)}")
    sys.stdout.flush()


def wait_until_up(server: subprocess.Popen[str], host: str, port: int) -> bool:
    """True once the port answers; False when the server ended or took too long."""
    deadline = time.monotonic() + UP_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            socket.create_connection((host, port), timeout=1).close()
            return True
        except OSError:
            time.sleep(0.2)
    return False
