"""Build links to MLflow's pages, and run `mlflow server` on this machine."""

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
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

from pipeline.config.invocation import this_command
from workers.errors import UserError
from workers.storage.secrets import redact

if TYPE_CHECKING:
    from mlflow import MlflowClient

LOOPBACK = "127.0.0.1"
NOTICE_S = 10.0  # seconds between two notices while the server starts
LAST_LINES = 30  # last lines of a server's log that may explain its end
TRAINING_PAGES = "?workflowType=machine_learning"  # MLflow's default pages are for GenAI
VIEW = "accrete"  # name of the view that `share_view` stores
# Columns of the list of methods -> widths in pixels. The first five columns fit on a page with a
# width of 1,400 pixels if MLflow's assistant is open.
COLUMNS = {
    "attributes.`Run Name`": 190,
    "runDateAndNestInfo": 130,  # time of creation
    "metrics.`average_accuracy`": 130,
    "metrics.`forgetting`": 95,
    "metrics.`size/task_bytes`": 110,
    "metrics.`growth`": 75,  # all bytes to keep, relative to the backbone
    "duration": 75,
    "tags.`method`": 100,
    "tags.`run`": 120,
    "tags.`stream`": 160,
    "tags.`scenario`": 80,
    "tags.`seed`": 60,
}
# Shared view of MLflow that lists the methods of all runs. It is sorted by accuracy, because MLflow
# nests the methods under their runs if the list is sorted by time.
METHODS_VIEW = {
    "searchFilter": "tags.`accrete.kind` = 'method'",
    "orderByKey": "metrics.`average_accuracy`",
    "orderByAsc": False,
    "startTime": "ALL",
    "lifecycleFilter": "Active",
    "datasetsFilter": [],
    "modelVersionFilter": "All Runs",
    "selectedColumns": [name for name in COLUMNS if name.startswith(("metrics.", "tags."))],
    "columnOrder": [*COLUMNS],
    "columnWidths": COLUMNS,
}


class RecordedRun(NamedTuple):
    """A run in MLflow and the ids of the child runs: methods of a run, or trials of a search."""

    name: str
    run_id: str
    child_ids: list[str]


def make_runs_link(base: str, experiment_id: str) -> str:
    """Return the link to the list of the methods of all runs. `share_view` must store the view."""
    return f"{base}/#/experiments/{experiment_id}/runs{TRAINING_PAGES}&viewStateShareKey={VIEW}"


def share_view(client: MlflowClient, experiment_id: str) -> None:
    """Store the view that `make_runs_link` opens, as a tag of the experiment.

    MLflow keeps shared views in tags `mlflow.sharedViewState.KEY`. Versions of MLflow without
    shared views show all runs instead.
    """
    from pipeline.tracking.mlflow_client import tag_experiment  # imported here for fast start-up

    key = f"mlflow.sharedViewState.{VIEW}"
    tag_experiment(client, experiment_id, key, json.dumps(METHODS_VIEW))


def make_run_link(base: str, experiment_id: str, run_id: str) -> str:
    """Return the link to the page of a run."""
    return f"{base}/#/experiments/{experiment_id}/runs/{run_id}{TRAINING_PAGES}"


def make_artifact_links(experiment_id: str, run_id: str, names: Iterable[str]) -> str:
    """Return Markdown links to the pages and pictures among the artifacts of a run.

    Args:
        experiment_id: Id of the experiment.
        run_id: Id of the run.
        names: Paths of artifacts, for example `report/masks.png`.
    """
    links = []
    for name in names:
        path = PurePosixPath(name)
        if path.suffix in (".html", ".png"):
            # relative to the page, so that the link works at any address of the server
            root = f"#/experiments/{experiment_id}/runs/{run_id}/artifacts"
            address = f"{root}/{quote(name)}{TRAINING_PAGES}"
            links.append(f"[{path.stem}]({address})")
    return " | ".join(links)


def make_compare_link(base: str, experiment_id: str, run_ids: Sequence[str]) -> str:
    """Return the link to the page that compares runs."""
    runs = _as_query(list(run_ids))
    experiments = _as_query([experiment_id])
    query = f"runs={runs}&experiments={experiments}&workflowType=machine_learning"
    return f"{base}/#/compare-runs?{query}"


def make_accuracies_link(base: str, experiment_id: str, run_ids: Sequence[str]) -> str:
    """Return the link to the page that shows the average accuracy of methods after each task.

    Args:
        base: Base URL of the server.
        experiment_id: Id of the experiment.
        run_ids: Ids of the methods' runs in MLflow.
    """
    metric = "average_accuracy"
    parts = (
        f"runs={_as_query(list(run_ids))}",
        f"experiments={_as_query([experiment_id])}",
        f"metric={quote(json.dumps(metric))}",
        f"plot_metric_keys={_as_query([metric])}",
        "x_axis=step&y_axis_scale=linear&line_smoothness=1&show_point=true",
        "plot_layout=%7B%7D&deselected_curves=%5B%5D&last_linear_y_axis_range=%5B%5D",
        "workflowType=machine_learning",
    )
    return f"{base}/#/metric?{'&'.join(parts)}"


def _as_query(values: list[str]) -> str:
    return quote(json.dumps(values, separators=(",", ":")))


def list_recorded_runs(
    client: MlflowClient, experiment_id: str, kind: str = "run", max_results: int = 10
) -> list[RecordedRun]:
    """Return the last recorded runs, the newest first.

    Only the newest 1000 child runs of the experiment are considered.

    Args:
        client: Client of MLflow.
        experiment_id: Id of the experiment.
        kind: `run` for runs of the pipeline, or `search` for searches.
        max_results: Maximum number of runs.
    """
    child_kind = "trial" if kind == "search" else "method"
    newest = ["attributes.start_time DESC"]
    runs = client.search_runs(
        [experiment_id],
        f"tags.`accrete.kind` = '{kind}'",
        max_results=max_results,
        order_by=newest,
    )
    children = client.search_runs(
        [experiment_id], f"tags.`accrete.kind` = '{child_kind}'", max_results=1000, order_by=newest
    )
    child_ids: dict[str, list[str]] = {}
    for child in reversed(children):
        parent = child.data.tags.get("mlflow.parentRunId", "")
        child_ids.setdefault(parent, []).append(child.info.run_id)
    rows = []
    for run in runs:
        run_id = run.info.run_id
        rows.append(RecordedRun(run.info.run_name or "", run_id, child_ids.get(run_id, [])))
    return rows


def strip_credentials(address: str) -> str:
    """Return the address of a tracking server without user, password and query."""
    return redact(address).partition("?")[0].rstrip("/")


def get_server_url(uri: str) -> str:
    """Return the base URL of the pages of a tracking server, or "" for a database."""
    return strip_credentials(uri) if uri.startswith("http") else ""


def format_record_line(base: str, experiment_id: str, run_id: str, storage: str) -> str:
    """Return a line with the location of a record: a link, or the command that starts a UI.

    Args:
        base: Base URL of a server. "": the line contains the command.
        experiment_id: Id of the experiment.
        run_id: Id of the run.
        storage: Folder or URI of the storage.
    """
    if not base:
        return f"record: {this_command()} ui --storage {storage}"
    return f"record: {make_run_link(base, experiment_id, run_id)}"


def build_server_command(storage: str, host: str, port: int) -> list[str]:
    """Return the command of `mlflow server` with one worker process.

    The URI of the database is passed by `build_server_environment`, because all users of this
    machine can read the arguments of a process.
    """
    from workers.storage.artifact import join  # imported here for fast start-up: pyarrow

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


def build_server_environment(uri: str) -> dict[str, str]:
    """Return the environment variables of `mlflow server` for the database `uri`.

    They also turn off the server's job processes.
    """
    from pipeline.tracking.mlflow_client import ENVIRONMENT

    return {**os.environ, **ENVIRONMENT, "MLFLOW_BACKEND_STORE_URI": uri}


def add_address_options(parser: argparse.ArgumentParser) -> None:
    """Add --host and --port. By default only this machine can reach the server."""
    parser.add_argument(
        "--host",
        default=LOOPBACK,
        help=f"address to listen on (default: {LOOPBACK}, for this machine alone; "
        "nobody is asked for a password)",
    )
    parser.add_argument("--port", type=int, default=0, help="port (default: a free one)")


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def warn_if_exposed(host: str, port: int, what: str) -> None:
    """Print a warning on stderr if other machines can reach a server.

    Args:
        host: Address that the server listens on.
        port: Port that the server listens on.
        what: Verb phrase that completes "anyone who reaches HOST:PORT can ...".
    """
    if not is_loopback(host):
        print(
            f"accrete: anyone who reaches {host}:{port} can {what}; "
            "put it behind a proxy that asks for a password, or leave out --host and tunnel: "
            f"ssh -L {port}:{LOOPBACK}:{port} {socket.gethostname()}",
            file=sys.stderr,
            flush=True,
        )


def find_port(host: str, port: int = 0) -> int:
    """Return `port`, or a free port for 0.

    Raises:
        UserError: If the port cannot be bound, for example because it is in use.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(
                f"port {port} on {host} cannot be used ({reason}); "
                "give another with --port, or none for a free one"
            ) from None
        free: int = probe.getsockname()[1]
        return free


def serve_ui(
    storage: str, host: str = LOOPBACK, port: int = 0, uri: str = "", experiment: str = "accrete"
) -> int:
    """Print links to the runs, and run `mlflow server` until it is interrupted.

    If the tracking store is itself a server, only print links to its pages.

    Args:
        storage: Folder or URI of the storage.
        host: Address to listen on.
        port: Port, or 0 for a free one.
        uri: The setting `tracking.uri`.
        experiment: Name of the experiment.

    Returns:
        The exit code of `mlflow server`; 0 after Ctrl-C, or if only links are printed.

    Raises:
        UserError: If the tracking store cannot be opened, the port cannot be used, or the server
            ends before it answers.
    """
    from pipeline.tracking.mlflow_client import explain_refusals, open_store

    with explain_refusals(storage, uri):
        client, address, experiment_id = open_store(storage, uri, experiment)
        if address.startswith(("http://", "https://")):
            print_links(client, strip_credentials(address), experiment_id)
            return 0
    port = find_port(host, port)
    warn_if_exposed(host, port, "read and delete every run: MLflow asks for no password")
    # SIGTERM raises KeyboardInterrupt, so that the server also ends if this process is terminated
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    server = subprocess.Popen(
        build_server_command(storage, host, port),
        env=build_server_environment(address),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    log: deque[str] = deque(maxlen=LAST_LINES)
    # the pipe must be read, because a full pipe would block the server
    reader = threading.Thread(target=log.extend, args=(server.stderr or (),), daemon=True)
    reader.start()
    try:
        if not wait_until_up(server, host, port):
            reader.join(5)
            raise UserError(explain_server_exit(server, log, host, port))
        print_links(client, f"http://{host}:{port}", experiment_id)
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


def print_links(client: MlflowClient, base: str, experiment_id: str) -> None:
    """Print links to the last runs and searches, and to comparisons of their methods or trials."""
    share_view(client, experiment_id)
    print(f"MLflow: {make_runs_link(base, experiment_id)}")
    kinds = (("run", "methods", make_accuracies_link), ("search", "trials", make_compare_link))
    for kind, parts, make_link in kinds:
        for row in list_recorded_runs(client, experiment_id, kind):
            print(f"  {row.name}: {make_run_link(base, experiment_id, row.run_id)}")
            if len(row.child_ids) > 1:
                indent = " " * len(row.name)
                link = make_link(base, experiment_id, row.child_ids)
                print(f"  {indent}  its {parts} side by side: {link}")
    sys.stdout.flush()


def explain_server_exit(
    server: subprocess.Popen[str], log: Iterable[str], host: str, port: int
) -> str:
    """Explain why a server ended before it answered, with the last line of the log."""
    lines = [" ".join(redact(line).split()) for line in log if line.strip()]
    last = lines[-1][:300] if lines else "no output"
    remedy = "fix the reported problem and try again"
    if any("ddress already in use" in line for line in lines):
        remedy = "another program uses the port by now: try another --port, or none for a free one"
    return (
        f"mlflow server ended with exit code {server.returncode} before "
        f"it answered on {host}:{port} ({last}); {remedy}"
    )


def wait_until_up(server: subprocess.Popen[str], host: str, port: int) -> bool:
    """Wait without a time limit until the port answers. Print a notice every `NOTICE_S` seconds.

    Returns:
        True if the port answers, False if the server ended before it answered.
    """
    start = time.monotonic()
    last_notice = start
    while server.poll() is None:
        try:
            socket.create_connection((host, port), timeout=1).close()
            return True
        except OSError:
            time.sleep(0.2)
        if time.monotonic() - last_notice > NOTICE_S:
            last_notice = time.monotonic()
            print(
                f"accrete: still waiting for mlflow server ({last_notice - start:.0f} s); "
                "stop with Ctrl-C",
                file=sys.stderr,
                flush=True,
            )
    return False
