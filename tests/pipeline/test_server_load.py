"""Tests of a server under load: replicas that die or are added, changes of the model, and bad
requests."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import requests
from serving import Finished, finished

from benchmarks.serve_load import (
    BAD_SHARE,
    REQUESTS,
    bad_bodies,
    build_body,
    kill_replica,
    load,
    server,
)
from pipeline.serving.client import Client
from pipeline.serving.http_server import Bounds
from tests.several_nodes import nodes_up, wait_for
from workers.serving import single_tasks
from workers.serving.bundle import Bundle
from workers.serving.input_counts import read_counts
from workers.serving.measuring import with_measurements

PATIENCE_S = 300.0
MANY = 32  # concurrent requests; the autoscaler's target for one replica is at most half as many
MORE_BYTES = 64 << 20  # maximum memory growth of the server after the first fifth of the load


@pytest.fixture(scope="module")
def run(lab: Any) -> Finished:
    return finished(lab, "meat", epochs=1)


@pytest.fixture
def folder(run: Finished, tmp_path: Path) -> str:
    run.bundle.write(str(tmp_path / "model"))
    return str(tmp_path / "model")


@pytest.fixture
def address(folder: str) -> Iterator[tuple[str, int]]:
    with server(folder, "--replicas", "2") as started:
        yield started


@pytest.mark.slow
def test_all_requests_are_answered_when_a_replica_is_killed(
    run: Finished, address: tuple[str, int]
) -> None:
    url, process = address
    image = base64.b64encode(run.images("two")[0][0]).decode()
    figures = asyncio.run(
        load(
            f"{url}/predict",
            build_body([image], "two"),
            bad_bodies(image, "two"),
            process=process,
            halfway=partial(kill_replica, process),
        )
    )
    assert figures.unanswered == []
    assert figures.good[200] == len(figures.seconds) == round(REQUESTS * (1 - BAD_SHARE))
    assert set(figures.good) <= {200, 503}
    assert set(figures.bad) == {400}
    assert figures.resident[-1] - figures.resident[2] < MORE_BYTES
    wait_for_tasks(Client(url), 2)


@pytest.mark.slow
def test_tasks_are_added_and_removed_while_requests_are_answered(
    run: Finished, folder: str, address: tuple[str, int]
) -> None:
    client = Client(address[0])
    images = run.images("two")[0][:2]
    stop, answers, problems = threading.Event(), [0], []

    def keep_asking() -> None:
        expected = [answer.class_ for answer in run.served.predict(images, "two")]
        while not stop.is_set():
            try:
                predictions = Client(address[0], patience_s=0).predict(images, "two")
                assert [row["class"] for row in predictions] == expected
                answers[0] += 1
            except Exception as error:
                problems.append(repr(error))

    thread = threading.Thread(target=keep_asking)
    thread.start()
    try:
        data = single_tasks.export_task(run.bundle, "three")
        single_tasks.remove_task(folder, "three")
        wait_for_tasks(client, 1)
        with pytest.raises(ValueError, match="task 'three' is not served"):
            client.predict(images, "three")
        single_tasks.import_task(folder, data, "three.task")
        wait_for_tasks(client, 2)
        for _ in range(10):
            assert client.predict(images, "three")[0]["task"] == "three"
    finally:
        stop.set()
        thread.join(PATIENCE_S)
    assert problems == []
    assert answers[0] > 10


@pytest.mark.slow
def test_request_without_replica_is_refused_then_answered_by_the_next(
    run: Finished, folder: str
) -> None:
    """If the only replica dies, requests do not wait until the next one has started."""
    image = run.images("two")[0][0]
    body = build_body([base64.b64encode(image).decode()], "two")
    with server(folder) as (url, process):
        assert ask(url, body)[0] == 200
        kill_replica(process)
        statuses: dict[int, float] = {}  # status -> longest response time
        deadline = time.monotonic() + PATIENCE_S
        while 503 not in statuses or ask(url, body)[0] != 200:
            started = time.monotonic()
            status, answer = ask(url, body)
            statuses[status] = max(time.monotonic() - started, statuses.get(status, 0.0))
            assert status == 200 or "send this" in json.loads(answer)["error"]
            assert time.monotonic() < deadline, statuses
    assert set(statuses) <= {200, 503}
    assert statuses[503] < Bounds.answer_s / 3


@pytest.mark.slow
def test_replicas_count_every_input_until_they_end(run: Finished, tmp_path: Path) -> None:
    folder = str(tmp_path / "model")
    with_measurements(run.bundle).write(folder)
    images = run.images("three")[0][:5]
    with server(folder, "--replicas", "2") as (url, _):
        for _ in range(30):
            Client(url).predict(images, "three")
    files, damaged = read_counts(f"{folder}/inputs")
    assert damaged == []
    model = str(Bundle.open(folder).body["sha256"])
    counts = [file.models[model]["three"] for file in files.values()]
    assert sum(task.inputs for task in counts) == 150
    assert 0 < sum(task.measured for task in counts) <= 150


def ask(url: str, body: bytes) -> tuple[int, bytes]:
    """Return the status and the body of the answer to POST /predict."""
    answer = requests.post(f"{url}/predict", data=body, timeout=PATIENCE_S)
    return answer.status_code, answer.content


@pytest.mark.slow
def test_server_leaves_nothing_on_an_existing_cluster(run: Finished, folder: str) -> None:
    images = run.images("two")[0][:2]
    expected = [answer.class_ for answer in run.served.predict(images, "two")]
    with nodes_up([1, 1]) as nodes:
        with server(folder, "--address", nodes.address, "--replicas", "1:2") as (url, _):
            predictions = Client(url).predict(images, "two")
            assert [row["class"] for row in predictions] == expected
            assert len(nodes.nodes_running("ServeReplica")) == 1
        wait_for(lambda: not nodes.nodes_running("ServeReplica"), PATIENCE_S)
        assert not nodes.nodes_running("Guard")


@pytest.mark.slow
def test_killed_server_leaves_no_replica_on_the_cluster(run: Finished, folder: str) -> None:
    with (
        nodes_up([1, 1]) as nodes,
        server(folder, "--address", nodes.address) as (url, process),
    ):
        assert Client(url).is_ready()
        assert nodes.nodes_running("ServeReplica")
        os.kill(process, signal.SIGKILL)
        wait_for(lambda: not nodes.nodes_running("ServeReplica"), PATIENCE_S)
        wait_for(lambda: not nodes.nodes_running("Guard"), PATIENCE_S)


@pytest.mark.slow
def test_load_starts_a_second_replica_without_lost_requests(run: Finished, folder: str) -> None:
    images = run.images("two")[0][:1]
    expected = [answer.class_ for answer in run.served.predict(images, "two")]
    stop, problems = threading.Event(), list[str]()
    answers = Counter[int]()  # number of the thread -> answers

    def keep_asking(url: str, number: int) -> None:
        client = Client(url, patience_s=PATIENCE_S)
        while not stop.is_set():
            try:
                assert [row["class"] for row in client.predict(images, "two")] == expected
                answers[number] += 1
            except Exception as error:
                problems.append(repr(error))

    with server(folder, "--replicas", "1:2") as (url, _):
        assert num_replicas(url) == 1
        threads = [threading.Thread(target=keep_asking, args=(url, n)) for n in range(MANY)]
        for thread in threads:
            thread.start()
        try:
            wait_for(lambda: num_replicas(url) == 2, PATIENCE_S)
        finally:
            stop.set()
            for thread in threads:
                thread.join(PATIENCE_S)
        assert Client(url).is_ready()
    assert problems == []
    assert len(answers) == len(threads)


def num_replicas(url: str) -> int:
    """Return the number of ready replicas from the server's metrics."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
        text = response.read().decode()
    [line] = [line for line in text.splitlines() if line.startswith("accrete_replicas ")]
    return int(float(line.split()[1]))


def wait_for_tasks(client: Client, count: int) -> None:
    """Wait until the server is ready and serves `count` tasks."""
    deadline = time.monotonic() + PATIENCE_S
    while not client.is_ready() or len(client.tasks()["tasks"]) != count:
        assert time.monotonic() < deadline
        time.sleep(0.2)
