"""Tests of the Prometheus metrics: values, addresses, samples, and the documented queries."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import fake_search
import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest

import pipeline
from docs.site.pages import text_of
from pipeline.config.settings import parse_address
from pipeline.graph.live_status import LiveStatus, MachineSample
from pipeline.graph.stage import Graph, Stage
from pipeline.launch import machine
from pipeline.launch.machine import sample_machine, sampling
from pipeline.results.trials import Trial
from pipeline.serving.http_server import Front, Hosts, Reply, listening
from pipeline.serving.requests import RawRequest
from pipeline.tracking import prometheus, ui
from pipeline.tracking.points import machine_points
from pipeline.tracking.prometheus import run_metrics, search_metrics, serve_metrics
from tests import small_run
from workers.errors import UserError

PROMETHEUS = shutil.which("prometheus")
STEPS = ("ingest", "train", "train", "evaluate", "evaluate")
GRAPH = Graph.of(
    "two-tasks", [Stage(f"s{number}", step, f"k{number}", {}) for number, step in enumerate(STEPS)]
)
SAMPLE: MachineSample = {
    "node": "gpu-1",
    "cpu": 0.25,
    "memory_bytes": 3_000_000_000,
    "gpus": {"0": {"memory_bytes": 2_000_000, "utilization": 0.5}, "1": {"memory_bytes": 1}},
}


def status() -> LiveStatus:
    return {
        "name": "two-tasks",
        "state": "running",
        "host": "host",
        "pid": 1,
        "started": 100.0,
        "updated": 101.0,
        "command": "accrete run",
        "left_s": 42.0,
        "left_without": 0,
        "stages": {
            "s0": {"state": "reused"},
            "s1": {"state": "done", "wall_s": 2.0},
            "s2": {
                "state": "running",
                "since": time.time() - 5,
                "where": "group 0 on 10.0.0.1",
                "tries": 2,
                "progress": {"images_per_s": 640.0, "data_wait": 0.125},
            },
            "s3": {"state": "done", "wall_s": 0.5},
            "s4": {"state": "queued", "tries": 1},
        },
        "machines": {"gpu-1": SAMPLE},
        "groups": {"up": 2, "starting": 1},
    }


def metrics() -> Iterator[Any]:
    return run_metrics(status(), GRAPH)


def metrics_of_a_search() -> Iterator[Any]:
    return search_metrics("meat", [cast(Trial, fake_search.trial(0))], {})


def text_of_run(of: LiveStatus) -> str:
    class Collector:
        def collect(self) -> Any:
            return run_metrics(of, GRAPH)

    registry = CollectorRegistry()
    registry.register(Collector())
    return generate_latest(registry).decode()


def test_metrics_match_the_status() -> None:
    lines = text_of_run(status()).splitlines()
    samples = [line for line in lines if not line.startswith("#")]
    labels = 'run="two-tasks",stage="s2",where="group 0 on 10.0.0.1"'
    running = [line for line in samples if line.startswith("accrete_stage_running_seconds")]
    assert 5 <= float(running[0].rpartition(" ")[2]) < 60
    assert set(samples) - set(running) == {
        'accrete_run_stages{run="two-tasks",state="waiting"} 0.0',
        'accrete_run_stages{run="two-tasks",state="queued"} 1.0',
        'accrete_run_stages{run="two-tasks",state="running"} 1.0',
        'accrete_run_stages{run="two-tasks",state="reused"} 1.0',
        'accrete_run_stages{run="two-tasks",state="done"} 2.0',
        'accrete_run_stages{run="two-tasks",state="failed"} 0.0',
        'accrete_run_stages{run="two-tasks",state="blocked"} 0.0',
        'accrete_run_failed_tries_total{run="two-tasks"} 3.0',
        'accrete_run_start_time_seconds{run="two-tasks"} 100.0',
        'accrete_run_left_seconds{run="two-tasks"} 42.0',
        'accrete_stage_duration_seconds_count{run="two-tasks",step="train"} 1.0',
        'accrete_stage_duration_seconds_sum{run="two-tasks",step="train"} 2.0',
        'accrete_stage_duration_seconds_count{run="two-tasks",step="evaluate"} 1.0',
        'accrete_stage_duration_seconds_sum{run="two-tasks",step="evaluate"} 0.5',
        'accrete_run_groups{run="two-tasks",state="up"} 2.0',
        'accrete_run_groups{run="two-tasks",state="starting"} 1.0',
        f"accrete_stage_images_per_second{{{labels}}} 640.0",
        f"accrete_stage_data_wait_ratio{{{labels}}} 0.125",
        'accrete_node_cpu_ratio{node="gpu-1",run="two-tasks"} 0.25',
        'accrete_node_memory_bytes{node="gpu-1",run="two-tasks"} 3e+09',
        'accrete_gpu_memory_bytes{gpu="0",node="gpu-1",run="two-tasks"} 2e+06',
        'accrete_gpu_memory_bytes{gpu="1",node="gpu-1",run="two-tasks"} 1.0',
        'accrete_gpu_utilization_ratio{gpu="0",node="gpu-1",run="two-tasks"} 0.5',
    }


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("9464", ("127.0.0.1", 9464)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),
        ("[::1]:80", ("::1", 80)),
        ("head-node:9464", ("head-node", 9464)),
    ],
)
def test_address_is_parsed_into_host_and_port(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize("value", ["here", "host:", "host:99999", "host:http", "a:b:80", True, -1])
def test_invalid_address_is_refused_when_the_config_is_loaded(value: Any, tmp_path: Path) -> None:
    body = small_run.make_body(tmp_path, small_run.make_cards(tmp_path, "a"), ["linear"])
    body["tracking"] = {"prometheus": value}
    with pytest.raises(UserError, match=r"tracking\.prometheus"):
        pipeline.load(small_run.write_config(tmp_path / "config.yaml", body))


def test_address_in_use_gives_a_user_error() -> None:
    with (
        serve_metrics("0", metrics) as url,
        pytest.raises(UserError, match=r"^tracking\.prometheus is .*nothing can listen there"),
        serve_metrics(str(urllib.parse.urlsplit(url).port), metrics),
    ):
        raise AssertionError


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        text: str = answer.read().decode()
    return text


@pytest.mark.slow
def test_metrics_are_served_only_while_the_run_is_active(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "SAMPLE_S", 0.01)
    urls = []
    texts = []
    serve = prometheus.serve_metrics

    @contextmanager
    def serve_and_read(*args: Any) -> Iterator[str]:
        with serve(*args) as url:
            urls.append(url)
            texts.append(read(url))
            yield url
            texts.append(read(url))

    monkeypatch.setattr(prometheus, "serve_metrics", serve_and_read)
    body = small_run.make_body(tmp_path, small_run.make_cards(tmp_path, "ab"), ["linear"])
    body["tracking"] = {"enabled": False, "prometheus": 0}
    pipeline.load(small_run.write_config(tmp_path / "config.yaml", body)).run()
    assert f"metrics for Prometheus: {urls[0]}" in capsys.readouterr().out
    assert re.search(r'stages\{run="small",state="done"\} 0\.0', texts[0])
    assert re.search(r'stages\{run="small",state="waiting"\} 0\.0', texts[1])
    assert re.search(r'duration_seconds_count\{run="small",step="train"\} 2\.0', texts[1])
    assert "accrete_node_cpu_ratio{" in texts[1]
    with pytest.raises(OSError, match="refused"):
        read(urls[0])


def test_machine_is_sampled_and_points_have_mlflow_names() -> None:
    sample = sample_machine(torch.device("cpu"))
    assert 0 <= sample["cpu"] <= 1
    assert sample["memory_bytes"] > 1_000_000
    assert sample["gpus"] == {}
    points = machine_points([(107.0, SAMPLE)], 100.0)
    assert {(point.name, point.value, point.step) for point in points} == {
        ("system/gpu-1/cpu_utilization_percentage", 25.0, 7),
        ("system/gpu-1/system_memory_usage_megabytes", 3000.0, 7),
        ("system/gpu-1/gpu_0_memory_usage_megabytes", 2.0, 7),
        ("system/gpu-1/gpu_0_utilization_percentage", 50.0, 7),
        ("system/gpu-1/gpu_1_memory_usage_megabytes", 1e-6, 7),
    }


def test_gpu_without_utilization_does_not_stop_sampling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A MIG partition of a GPU does not report its utilization."""

    class NVMLError(Exception):
        """An error that derives directly from Exception, as in nvidia-ml-py."""

    def refuse(device: torch.device) -> int:
        raise NVMLError("Not Supported")

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30, 100))
    monkeypatch.setattr(torch.cuda, "utilization", refuse)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    samples: list[MachineSample] = []
    with sampling(torch.device("cuda", 1), samples.append, 0.01):
        wait_until = time.monotonic() + 900
        while len(samples) < 2 and time.monotonic() < wait_until:
            time.sleep(0.01)
    assert len(samples) >= 2
    gpu = {"memory_bytes": 70, "total_bytes": 100, "reason": "its driver says Not Supported"}
    assert all(sample["gpus"] == {"1": gpu} for sample in samples)


def test_sampling_period_of_zero_disables_sampling() -> None:
    samples: list[MachineSample] = []
    with sampling(torch.device("cpu"), samples.append, 0.0):
        time.sleep(0.05)
    assert samples == []


# ---- a real Prometheus server --------------------------------------------------------------------
def queries() -> list[str]:
    """Return the queries in docs/tracking.md."""
    blocks = re.findall(r"```promql\n(.*?)```", text_of("docs/tracking.md"), re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


@contextmanager
def running_prometheus(folder: Path, targets: list[str]) -> Iterator[str]:
    """Run a Prometheus that reads `targets` every 0.5 s, and yield the query API's URL."""
    config = folder / "prometheus.yml"
    jobs = [{"job_name": "accrete", "static_configs": [{"targets": targets}]}]
    body = {"global": {"scrape_interval": "500ms"}, "scrape_configs": jobs}
    config.write_text(json.dumps(body))  # JSON is YAML
    address = f"127.0.0.1:{ui.find_port('127.0.0.1', 0)}"
    command = [
        str(PROMETHEUS),
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
        "--log.level=error",
    ]
    with subprocess.Popen(command) as process:
        try:
            yield f"http://{address}/api/v1/query?query="
        finally:
            process.terminate()


def ask(url: str, query: str) -> list[Any]:
    """Return the results of a query, or an empty list while Prometheus starts."""
    try:
        answer = json.loads(read(url + urllib.parse.quote(query)))
    except OSError:
        return []
    results: list[Any] = answer["data"]["result"]
    return results


async def answer_at_once(request: RawRequest) -> Reply:
    return Reply(200, {})


@pytest.mark.skipif(PROMETHEUS is None, reason="Prometheus is not installed (Debian: prometheus)")
def test_prometheus_answers_documented_queries(
    tmp_path: Path,
) -> None:
    front = Front(answer_at_once, {}, Hosts("127.0.0.1"))
    with (
        serve_metrics("0", metrics) as run_url,
        serve_metrics("0", metrics_of_a_search) as search_url,
        listening(front, "127.0.0.1", ui.find_port("127.0.0.1", 0)) as port,
    ):
        server_url = f"http://127.0.0.1:{port}"
        targets = [urllib.parse.urlsplit(run_url).netloc, f"127.0.0.1:{port}"]
        targets.append(urllib.parse.urlsplit(search_url).netloc)
        with running_prometheus(tmp_path, targets) as url:
            deadline = time.monotonic() + 900
            missing = ["up == 1", *queries()]
            assert len(missing) > 5
            while missing:
                assert time.monotonic() < deadline, f"no answer to {missing}"
                request = urllib.request.Request(f"{server_url}/predict", b"{}", method="POST")
                urllib.request.urlopen(request, timeout=60).close()
                time.sleep(0.3)
                missing = [query for query in missing if not ask(url, query)]
            assert len(ask(url, "up == 1")) == 3
            [stages] = ask(url, 'accrete_run_stages{state="done"}')
            assert stages["value"][1] == "2"
