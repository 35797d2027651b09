"""Serve the metrics of a run or a search in Prometheus' format over HTTP, from the driver.

The metrics are computed only on request. docs/tracking.md lists their names and units.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pipeline.config.settings import ADDRESS_RULE, parse_address
from pipeline.graph.live_status import STAGE_STATES, LiveStatus
from pipeline.graph.stage import Graph
from pipeline.results.trials import STATUSES, Trial, best, gpu_hours, score
from workers.errors import UserError, require_package

if TYPE_CHECKING:
    from prometheus_client import Metric


def run_metrics(status: LiveStatus, graph: Graph) -> Iterator[Metric]:
    """Yield the metrics of a run from its status and stage graph."""
    from prometheus_client.metrics_core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        SummaryMetricFamily,
    )

    run = status["name"]
    stages = status["stages"]
    by_state = GaugeMetricFamily(
        "accrete_run_stages", "Stages of the run by state", labels=["run", "state"]
    )
    counts = Counter(stage["state"] for stage in stages.values())
    for state in STAGE_STATES:
        by_state.add_metric([run, state], counts[state])
    yield by_state
    failed_tries = CounterMetricFamily(
        "accrete_run_failed_tries", "Tries of stages that failed", labels=["run"]
    )
    failed_tries.add_metric([run], sum(stage.get("tries", 0) for stage in stages.values()))
    yield failed_tries
    started = GaugeMetricFamily(
        "accrete_run_start_time_seconds", "When the driver began, in Unix time", labels=["run"]
    )
    started.add_metric([run], status["started"])
    yield started
    left = GaugeMetricFamily(
        "accrete_run_left_seconds", "Estimated time until the end of the run", labels=["run"]
    )
    if status["left_s"] is not None:
        left.add_metric([run], status["left_s"])
    yield left
    durations = SummaryMetricFamily(
        "accrete_stage_duration_seconds", "Time of finished stages", labels=["run", "step"]
    )
    seconds: dict[str, list[float]] = {}
    for stage_id, stage in stages.items():
        if stage["state"] == "done":
            seconds.setdefault(graph[stage_id].step, []).append(stage.get("wall_s", 0.0))
    for step, values in seconds.items():
        durations.add_metric([run, step], len(values), sum(values))
    yield durations
    groups = GaugeMetricFamily(
        "accrete_run_groups", "Worker groups by state", labels=["run", "state"]
    )
    for group_state, count in status.get("groups", {}).items():
        groups.add_metric([run, group_state], count)
    yield groups
    yield from _running_metrics(status)
    yield from _machine_metrics(status)


def _running_metrics(status: LiveStatus) -> Iterator[Metric]:
    """Yield the metrics of the running stages: duration, speed, and share of waiting for data."""
    from prometheus_client.metrics_core import GaugeMetricFamily

    labels = ["run", "stage", "where"]
    running = GaugeMetricFamily(
        "accrete_stage_running_seconds", "Time since a stage began", labels=labels
    )
    speed = GaugeMetricFamily(
        "accrete_stage_images_per_second", "Images that a stage processes", labels=labels
    )
    wait = GaugeMetricFamily(
        "accrete_stage_data_wait_ratio",
        "Share of its time that training waits for the next batch",
        labels=labels,
    )
    for stage_id, stage in status["stages"].items():
        if stage["state"] != "running":
            continue
        values = [status["name"], stage_id, stage.get("where", "")]
        running.add_metric(values, time.time() - stage.get("since", time.time()))
        progress = stage.get("progress", {})
        for family, key in ((speed, "images_per_s"), (wait, "data_wait")):
            if key in progress:
                family.add_metric(values, progress[key])
    yield from (running, speed, wait)


def _machine_metrics(status: LiveStatus) -> Iterator[Metric]:
    """Yield the utilisation of the workers' machines, from the last sample of each machine."""
    from prometheus_client.metrics_core import GaugeMetricFamily

    node_labels = ["run", "node"]
    gpu_labels = [*node_labels, "gpu"]
    cpu = GaugeMetricFamily(
        "accrete_node_cpu_ratio", "Share of all cores in use", labels=node_labels
    )
    memory = GaugeMetricFamily(
        "accrete_node_memory_bytes", "Memory in use by all processes", labels=node_labels
    )
    gpu_memory = GaugeMetricFamily(
        "accrete_gpu_memory_bytes", "Memory of a GPU in use by all processes", labels=gpu_labels
    )
    gpu_use = GaugeMetricFamily(
        "accrete_gpu_utilization_ratio", "Share of the time a GPU computes", labels=gpu_labels
    )
    for node, sample in status.get("machines", {}).items():
        values = [status["name"], node]
        if "cpu" in sample:
            cpu.add_metric(values, sample["cpu"])
            memory.add_metric(values, sample["memory_bytes"])
        for gpu, use in sample["gpus"].items():
            gpu_memory.add_metric([*values, gpu], use["memory_bytes"])
            if "utilization" in use:
                gpu_use.add_metric([*values, gpu], use["utilization"])
    yield from (cpu, memory, gpu_memory, gpu_use)


def search_metrics(
    name: str, trials: Sequence[Trial], budget_used: Mapping[str, float]
) -> Iterator[Metric]:
    """Yield the metrics of a search from the records of the trials.

    Args:
        name: Name of the search.
        trials: Records of the trials.
        budget_used: Used share of each limit of the budget.
    """
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

    by_status = GaugeMetricFamily(
        "accrete_search_trials", "Trials of the search by status", labels=["search", "status"]
    )
    counts = Counter(trial["status"] for trial in trials)
    for status in STATUSES:
        by_status.add_metric([name, status], counts[status])
    yield by_status
    accuracy = GaugeMetricFamily(
        "accrete_search_best_accuracy",
        "Highest validation accuracy of a finished trial",
        labels=["search", "task"],
    )
    for phase in dict.fromkeys(trial["phase"] for trial in trials):
        of_phase = [trial for trial in trials if trial["phase"] == phase]
        number = best(of_phase)
        if number is not None:
            winner = next(trial for trial in of_phase if trial["number"] == number)
            accuracy.add_metric([name, phase], score(winner))
    yield accuracy
    stages = CounterMetricFamily(
        "accrete_search_stages", "Stages that trials needed", labels=["search", "how"]
    )
    for how in ("run", "reused"):
        stages.add_metric([name, how], sum(trial["stages"][how] for trial in trials))
    yield stages
    device_s = CounterMetricFamily(
        "accrete_search_device_seconds", "Time of stages times their workers", labels=["search"]
    )
    device_s.add_metric([name], sum(trial["device_s"] for trial in trials))
    yield device_s
    gpu_s = CounterMetricFamily(
        "accrete_search_gpu_seconds", "Time of stages times their GPUs", labels=["search"]
    )
    gpu_s.add_metric([name], 3600 * gpu_hours(trials))
    yield gpu_s
    used = GaugeMetricFamily(
        "accrete_search_budget_used_ratio",
        "Used share of a bound of the budget",
        labels=["search", "bound"],
    )
    for bound, share in budget_used.items():
        used.add_metric([name, bound], share)
    yield used


@contextmanager
def serve_metrics(address: str, collect: Callable[[], Iterator[Metric]]) -> Iterator[str]:
    """Context manager that serves the metrics of `collect` to Prometheus, and yields the URL.

    Args:
        address: The setting `tracking.prometheus`.
        collect: Function that yields the metrics.

    Raises:
        UserError: If prometheus_client is not installed, or the address cannot be used.
    """
    require_package("prometheus_client", "tracking.prometheus", "leave the setting out")
    from prometheus_client import CollectorRegistry, start_http_server

    class LiveCollector:
        def collect(self) -> Iterator[Metric]:
            return collect()

    registry = CollectorRegistry()
    registry.register(LiveCollector())
    host, port = parse_address(address)
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise UserError(
            f"tracking.prometheus is {address!r}, and nothing can listen there "
            f"({error.strerror or error}); {ADDRESS_RULE}"
        ) from None
    url_host = f"[{host}]" if ":" in host else host
    try:
        yield f"http://{url_host}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def announce_metrics(
    address: str, collect: Callable[[], Iterator[Metric]], say: Callable[[str], None]
) -> Iterator[None]:
    """Context manager that serves metrics and prints their URL. It does nothing without an address.

    Args:
        address: The setting `tracking.prometheus`.
        collect: Function that yields the metrics.
        say: Function that prints a line.
    """
    if not address:
        yield
        return
    with serve_metrics(address, collect) as url:
        say(f"metrics for Prometheus: {url}")
        yield
