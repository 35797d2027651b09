"""Links into MLflow's pages, and `mlflow server` for this machine."""

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
NOTICE_S = 10.0  # seconds between two lines that say that the server is still starting
LAST_LINES = 30  # last lines of a server's log that may explain its end
TRAINING_PAGES = "?workflowType=machine_learning"  # else MLflow shows those for language models
VIEW = "accrete"  # name of the view that `share_view` stores
# Columns of the list of methods with their widths in pixels: the first five fit on a page of 1,400
# pixels with MLflow's assistant open.
COLUMNS = {
    "attributes.`Run Name`": 190,
    "runDateAndNestInfo": 130,  # when it was created
    "metrics.`average_accuracy`": 130,
    "metrics.`forgetting`": 95,
    "metrics.`size/task_bytes`": 110,
    "duration": 75,
    "tags.`method`": 100,
    "tags.`run`": 120,
    "tags.`stream`": 160,
    "tags.`scenario`": 80,
    "tags.`seed`": 60,
}
METHODS_VIEW = {
    "searchFilter": "tags.`accrete.kind` = 'method'",
    "orderByKey": "metrics.`average_accuracy`",  # by time MLflow would fold methods into runs
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
    """A run in MLflow and the ids of the child runs: methods of a run, trials of a search."""

    name: str
    run: str
    children: list[str]


def runs_link(base: str, experiment: str) -> str:
    """Return the link to the methods of all runs of an experiment, with the main columns first."""
    return f"{base}/#/experiments/{experiment}/runs{TRAINING_PAGES}&viewStateShareKey={VIEW}"


def share_view(client: MlflowClient, experiment: str) -> None:
    """Store the view that `runs_link` opens in the experiment, unless it exists.

    MLflow keeps a shared view in such a tag. Pages that do not know it show all runs.
    """
    from pipeline.tracking.mlflow_client import tag_experiment  # start-up time

    tag_experiment(client, experiment, f"mlflow.sharedViewState.{VIEW}", json.dumps(METHODS_VIEW))


def run_link(base: str, experiment: str, run: str) -> str:
    """Return the link to the page of a run."""
    return f"{base}/#/experiments/{experiment}/runs/{run}{TRAINING_PAGES}"


def artifact_links(experiment: str, run_id: str, names: Iterable[str]) -> str:
    """Return Markdown links to the pages and pictures among the artifacts of a run.

    Args:
        experiment: Id of the experiment.
        run_id: Id of the run.
        names: Paths of artifacts, for example `report/masks.png`.
    """
    links = []
    for name in names:
        path = PurePosixPath(name)
        if path.suffix in (".html", ".png"):
            # relative to the page, so that it holds at any address of the server
            root = f"#/experiments/{experiment}/runs/{run_id}/artifacts"
            address = f"{root}/{quote(name)}{TRAINING_PAGES}"
            links.append(f"[{path.stem}]({address})")
    return " | ".join(links)


def compare_link(base: str, experiment: str, runs: Sequence[str]) -> str:
    """Return the link to the page that shows runs side by side."""
    run_list = _as_query(list(runs))
    experiments = _as_query([experiment])
    query = f"runs={run_list}&experiments={experiments}&workflowType=machine_learning"
    return f"{base}/#/compare-runs?{query}"


def accuracies_link(base: str, experiment: str, methods: Sequence[str]) -> str:
    """Return the link to the page that shows the average accuracy of methods after each task."""
    metric = "average_accuracy"
    parts = (
        f"runs={_as_query(list(methods))}",
        f"experiments={_as_query([experiment])}",
        f"metric={quote(json.dumps(metric))}",
        f"plot_metric_keys={_as_query([metric])}",
        "x_axis=step&y_axis_scale=linear&line_smoothness=1&show_point=true",
        "plot_layout=%7B%7D&deselected_curves=%5B%5D&last_linear_y_axis_range=%5B%5D",
        "workflowType=machine_learning",
    )
    return f"{base}/#/metric?{'&'.join(parts)}"


def _as_query(values: list[str]) -> str:
    return quote(json.dumps(values, separators=(",", ":")))


def recorded(
    client: MlflowClient, experiment: str, kind: str = "run", most: int = 10
) -> list[RecordedRun]:
    """Return the last recorded runs, the newest first. kind: `run`, or `search` for searches."""
    child_kind = "trial" if kind == "search" else "method"
    newest = ["attributes.start_time DESC"]
    runs = client.search_runs(
        [experiment], f"tags.`accrete.kind` = '{kind}'", max_results=most, order_by=newest
    )
    children = client.search_runs(
        [experiment], f"tags.`accrete.kind` = '{child_kind}'", max_results=1000, order_by=newest
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


def page_base(address: str) -> str:
    """Return the address of a tracking server without user, password and query, to begin links."""
    return redact(address).partition("?")[0].rstrip("/")


def web_base(uri: str) -> str:
    """Return the address that links to a tracking server begin with; "" for a database."""
    return page_base(uri) if uri.startswith("http") else ""


def record_line(base: str, experiment: str, run: str, storage: str) -> str:
    """Return a line with the location of a record.

    Args:
        base: Address of a server. "": the line has the command that starts one.
        experiment: Id of the experiment.
        run: Id of the run.
        storage: Folder or URI of the storage.
    """
    if not base:
        return f"record: {this_command()} ui --storage {storage}"
    return f"record: {run_link(base, experiment, run)}"


def server_command(storage: str, host: str, port: int) -> list[str]:
    """Return the command of `mlflow server` with one worker and no processes for jobs.

    Its database is in `server_environment`, because everybody on this machine can read the
    arguments of a process.
    """
    from workers.storage.artifact import join  # start-up time: imports pyarrow

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
    """Return the environment of `mlflow server` over the database `uri`."""
    from pipeline.tracking.mlflow_client import ENVIRONMENT

    return {**os.environ, **ENVIRONMENT, "MLFLOW_BACKEND_STORE_URI": uri}


def address_options(parser: argparse.ArgumentParser) -> None:
    """Add --host and --port. By default a server listens for this machine alone."""
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
    """Print a warning on stderr if other machines can reach a server; `what` names their rights."""
    if not is_loopback(host):
        print(
            f"accrete: anyone who reaches {host}:{port} can {what}; "
            "put it behind a proxy that asks for a password, or leave out --host and tunnel: "
            f"ssh -L {port}:{LOOPBACK}:{port} {socket.gethostname()}",
            file=sys.stderr,
            flush=True,
        )


def free_port(host: str, port: int = 0) -> int:
    """Return `port`, or a free port for 0.

    Raises:
        UserError: If the port is in use.
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


def serve(
    storage: str, host: str = LOOPBACK, port: int = 0, uri: str = "", experiment: str = "accrete"
) -> int:
    """Run `mlflow server` over the storage until it is interrupted, and print links to the runs.

    Args:
        storage: Folder or URI of the storage.
        host: Address to listen on.
        port: Port, or 0 for a free one.
        uri: The setting `tracking.uri`.
        experiment: Name of the experiment.

    Returns:
        The exit code of the server.
    """
    from pipeline.tracking.mlflow_client import explain_refusals, open_store

    with explain_refusals(storage, uri):
        client, address, experiment_id = open_store(storage, uri, experiment)
        if address.startswith(("http://", "https://")):
            print_links(client, page_base(address), experiment_id)
            return 0
    port = free_port(host, port)
    warn_if_exposed(host, port, "read and delete every run: MLflow asks for no password")
    # so that the server ends when `ui` is terminated
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


def print_links(client: MlflowClient, base: str, experiment: str) -> None:
    """Print links to the last runs and searches, and to their methods and trials side by side."""
    share_view(client, experiment)
    print(f"MLflow: {runs_link(base, experiment)}")
    kinds = (("run", "methods", accuracies_link), ("search", "trials", compare_link))
    for kind, parts, link_to in kinds:
        for row in recorded(client, experiment, kind):
            print(f"  {row.name}: {run_link(base, experiment, row.run)}")
            if len(row.children) > 1:
                indent = " " * len(row.name)
                link = link_to(base, experiment, row.children)
                print(f"  {indent}  its {parts} side by side: {link}")
    sys.stdout.flush()


def why_it_ended(server: subprocess.Popen[str], log: Iterable[str], host: str, port: int) -> str:
    """Explain from the end of the log why a server ended before it answered."""
    lines = [" ".join(redact(line).split()) for line in log if line.strip()]
    last = lines[-1][:300] if lines else "it said nothing"
    remedy = "fix what it says and try again"
    if any("ddress already in use" in line for line in lines):
        remedy = "another program uses the port by now: try another --port, or none for a free one"
    return (
        f"mlflow server ended with exit code {server.returncode} before "
        f"it answered on {host}:{port} ({last}); {remedy}"
    )


def wait_until_up(server: subprocess.Popen[str], host: str, port: int) -> bool:
    """Wait until the port answers, however long that takes; return False if the server ends.

    Print a line on stderr every `NOTICE_S` seconds.
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
                "accrete: mlflow server is starting, "
                f"for {last_notice - start:.0f} s now; Ctrl-C ends it",
                file=sys.stderr,
                flush=True,
            )
    return False
