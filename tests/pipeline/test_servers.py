"""Tests of the Ray Serve and MLflow servers: mixed requests get the same answers as in this
process, bad requests get a one-sentence error, and the servers survive a storm of requests."""

from __future__ import annotations

import asyncio
import base64
import collections
import concurrent.futures
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
import pytest
import requests
from serving import Finished, finished

from pipeline.tracking import publish, ui
from pipeline.tracking.mlflow_client import open_store
from workers.errors import UserError
from workers.serving.server import Answer

STORM, MORE_BYTES = 10_000, 1 << 30


@pytest.fixture(scope="module")
def run(lab: Any) -> Finished:
    return finished(lab, "meat", epochs=1)


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def post(url: str, data: bytes, **headers: str) -> tuple[int, str]:
    """Post with a client that can read a response sent before the request is complete."""
    headers["Content-Type"] = "application/json"
    answer = requests.post(url, data=data, headers=headers, timeout=120)
    return answer.status_code, answer.text


def bad_images(run: Finished) -> dict[str, tuple[Any, str]]:
    from tests.workers.test_images import bomb, encoded

    return {
        "truncated": (b64(encoded("JPEG")[:-60]), "is damaged"),
        "no image": (b64(b"hello"), "is not an image"),
        "bomb": (b64(bomb(60_000)), "is too large"),
        "path": ("/etc/passwd", "no files are read here"),
        "shape": ([[1, 2]], "has shape (1, 2)"),
        "dtype": ([[[0.5, 0, 0]]], "float64 values"),
        "number": (3, "is a int"),
    }


async def storm(url: str, data: bytes) -> collections.Counter[int | str]:
    """Send STORM requests at once; return the number of each status or connection error."""
    status_counts: collections.Counter[int | str] = collections.Counter()

    async def one(session: aiohttp.ClientSession) -> None:
        try:
            async with session.post(
                url, data=data, headers={"Content-Type": "application/json"}
            ) as answer:
                await answer.read()
                status_counts[answer.status] += 1
        except aiohttp.ClientError as error:
            status_counts[type(error).__name__] += 1

    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=400)
    ) as session:
        await asyncio.gather(*(one(session) for _ in range(STORM)))
    return status_counts


def memory(root: int) -> int:
    """Return the resident bytes of a process and its descendants."""
    total_bytes = 0
    for process in [psutil.Process(root), *psutil.Process(root).children(recursive=True)]:
        try:
            total_bytes += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total_bytes


def started(command: list[str], log: Path, cwd: str, **env: str) -> subprocess.Popen[bytes]:
    with open(log, "wb") as stream:
        return subprocess.Popen(
            command,
            stdout=stream,
            stderr=stream,
            cwd=cwd,
            env={**os.environ, **env},
            start_new_session=True,
        )


def until_up(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Request `url` until it answers. A connection may wait in the kernel's queue meanwhile."""
    for _ in range(600):
        assert process.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(url, timeout=60):
                return
        except (urllib.error.URLError, ConnectionError):
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.2)
    raise AssertionError(log.read_text())


def ended(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(900)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


# ---- Ray Serve -----------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def ray_serve(run: Finished, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    folder, port = tmp_path_factory.mktemp("ray"), ui.find_port("127.0.0.1")
    run.bundle.write(str(folder / "model"))
    root = str(Path(__file__).parents[2])
    process = started(
        [sys.executable, "-m", "pipeline", "serve", str(folder / "model"), "--port", str(port)],
        folder / "log",
        root,
    )
    try:
        until_up(process, f"http://127.0.0.1:{port}/health", folder / "log")
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        ended(process)


@pytest.mark.slow
def test_ray_serve_answers_mixed_requests_and_refuses_bad_ones(run: Any, ray_serve: Any) -> None:
    url, _ = ray_serve
    images, tasks = [run.images(t)[0][0] for t in run.names], run.names
    status, text = post(
        f"{url}/predict", json.dumps({"images": [b64(i) for i in images], "tasks": tasks}).encode()
    )
    assert status == 200
    for answer, expected in zip(
        json.loads(text)["predictions"], run.served.predict(images, tasks), strict=True
    ):
        assert (answer["class"], answer["task"]) == (expected.class_, expected.task)
        assert answer["probability"] == pytest.approx(expected.probability, abs=1e-5)
    bodies: dict[str, tuple[dict[str, Any], str]] = {
        name: ({"images": [image], "tasks": "two"}, message)
        for name, (image, message) in bad_images(run).items()
    }
    bodies |= {
        "task": ({"images": [b64(images[0])], "tasks": "tow"}, "did you mean two"),
        "none": ({"images": []}, "no list of images"),
        "many": ({"images": [b64(images[0])] * 65, "tasks": "two"}, "more than 64"),
        "field": ({"images": ["x"], "taks": 1}, "'taks'"),
        "tasks": ({"images": ["x"], "tasks": [[]]}, "tasks must be"),
    }
    for name, (body, message) in bodies.items():
        status, text = post(f"{url}/predict", json.dumps(body).encode())
        assert status == 400, name
        assert message in json.loads(text)["error"], name
        assert "\n" not in json.loads(text)["error"]
    assert post(f"{url}/predict", b"{")[0] == 400
    assert post(f"{url}/predict", b"x" * (33 << 20))[0] == 413
    assert post(f"{url}/nowhere", b"{}")[0] == 404


SECRET = "a-token-of-a-service"
SERVICE = """
import sys, time
from pipeline.config.settings import ClusterSettings
from pipeline.launch.cluster import connect
connect(ClusterSettings(address="local"))
from ray import serve
from pipeline.serving.ray_service import application
arguments = {"bundle": sys.argv[1], "hosts": ["accrete-serve-svc"]}
serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[2])})
serve.run(application(arguments), name="accrete", route_prefix="/")
time.sleep(600)
"""


@pytest.mark.slow
def test_rayservice_answers_like_the_serve_command(run: Any, tmp_path: Path) -> None:
    """The application starts as in a RayService: behind Serve's own proxy, with the limits of
    `serve`, and with the token of a Secret in the environment."""
    with_token = {"Authorization": f"Bearer {SECRET}"}
    port = ui.find_port("127.0.0.1")
    url = f"http://127.0.0.1:{port}"
    run.bundle.write(str(tmp_path / "model"))
    command = [sys.executable, "-c", SERVICE, str(tmp_path / "model"), str(port)]
    root = str(Path(__file__).parents[2])
    process = started(command, tmp_path / "log", root, PYTHONPATH=root, ACCRETE_SERVE_TOKEN=SECRET)
    try:
        until_up(process, f"{url}/health", tmp_path / "log")
        images = [run.images(name)[0][0] for name in run.names]
        body = {"images": [b64(image) for image in images], "tasks": run.names}
        data = json.dumps(body).encode()
        assert post(f"{url}/predict", data)[0] == 401
        status, text = post(f"{url}/predict", data, **with_token)
        assert status == 200, text
        answers = json.loads(text)["predictions"]
        expected = run.served.predict(images, run.names)
        assert [answer["class"] for answer in answers] == [each.class_ for each in expected]
        listed = requests.get(f"{url}/tasks", headers=with_token, timeout=60).json()
        assert [task["name"] for task in listed["tasks"]] == run.names
        assert post(f"{url}/predict", b"{", **with_token)[0] == 400
        assert post(f"{url}/predict", b"x" * (33 << 20), **with_token)[0] == 413
        assert post(f"{url}/nowhere", b"{}", **with_token)[0] == 404
        for host, status in (("accrete-serve-svc", 200), ("elsewhere.example", 421)):
            answer = requests.get(f"{url}/tasks", headers={"Host": host, **with_token}, timeout=60)
            assert answer.status_code == status
    finally:
        ended(process)


@pytest.mark.slow
def test_ray_serve_survives_a_request_storm(run: Any, ray_serve: Any) -> None:
    url, process = ray_serve
    data = json.dumps({"images": [b64(run.images("two")[0][0])], "tasks": "two"}).encode()
    assert post(f"{url}/predict", data)[0] == 200
    before = memory(process)
    status_counts = asyncio.run(storm(f"{url}/predict", data))
    assert set(status_counts) <= {200, 429, 503}, status_counts
    assert status_counts[200] >= 64
    assert sum(status_counts.values()) == STORM
    assert memory(process) - before < MORE_BYTES
    assert post(f"{url}/predict", data)[0] == 200


@pytest.mark.slow
def test_ray_serve_answers_despite_slow_or_large_requests(run: Any, ray_serve: Any) -> None:
    from tests.pipeline.test_http_server import HALF_BODY, HALF_HEAD, MANY, one_bit

    url, process = ray_serve
    port = int(url.rpartition(":")[2])
    data = json.dumps({"images": [b64(run.images("two")[0][0])], "tasks": "two"}).encode()
    assert post(f"{url}/predict", data)[0] == 200
    before = memory(process)
    large = json.dumps({"images": [b64(one_bit(7000))] * 64, "tasks": "two"}).encode()
    with contextlib.ExitStack() as stack:
        for half in [HALF_HEAD, HALF_BODY] * MANY:
            stack.enter_context(socket.create_connection(("127.0.0.1", port))).sendall(half)
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(6))
        refused = [pool.submit(post, f"{url}/predict", large) for _ in range(6)]
        assert post(f"{url}/predict", data)[0] == 200
        assert (
            requests.get(f"{url}/health", timeout=30).status_code
            == requests.get(f"{url}/tasks", timeout=30).status_code
            == 200
        )
        for answer in refused:
            status, text = answer.result()
            assert (status, "pixels together, more than" in text) == (400, True)
    assert memory(process) - before < MORE_BYTES
    foreign = requests.get(f"{url}/tasks", headers={"Host": f"evil.example:{port}"}, timeout=30)
    assert (foreign.status_code, "is not served here" in foreign.text) == (421, True)
    status, text = post(
        f"{url}/predict", data.replace(b'"tasks"', b'"top": 1' + b"0" * 400 + b', "tasks"')
    )
    assert (status, len(json.loads(text)["predictions"][0]["probabilities"])) == (200, 2)


# ---- MLflow --------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def mlflow_server(
    run: Finished, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, int]]:
    folder, port = tmp_path_factory.mktemp("mlflow"), ui.find_port("127.0.0.1")
    run.bundle.write(str(folder / "bundle"))
    publish.save(str(folder / "model"), run.bundle, str(folder / "bundle"))
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "models",
        "serve",
        "-m",
        str(folder / "model"),
        "--env-manager",
        "local",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    search_path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    process = started(
        command,
        folder / "log",
        str(folder),
        MLFLOW_DISABLE_TELEMETRY="true",
        UVICORN_LIMIT_CONCURRENCY="256",
        PATH=search_path,
    )
    try:
        until_up(process, f"http://127.0.0.1:{port}/ping", folder / "log")
        yield f"http://127.0.0.1:{port}/invocations", process.pid
    finally:
        ended(process)


def records(*rows: dict[str, Any], **params: Any) -> bytes:
    return json.dumps(
        {"dataframe_records": list(rows), **({"params": params} if params else {})}
    ).encode()


@pytest.mark.slow
def test_mlflow_answers_mixed_requests_and_refuses_bad_ones(run: Any, mlflow_server: Any) -> None:
    url, _ = mlflow_server
    images, tasks = [run.images(t)[0][0] for t in run.names], run.names
    status, text = post(
        url,
        records(*({"image": b64(i), "task": t} for i, t in zip(images, tasks, strict=True)), top=1),
    )
    assert status == 200, text
    for answer, expected in zip(
        json.loads(text)["predictions"], run.served.predict(images, tasks), strict=True
    ):
        assert (answer["class"], answer["task"]) == (expected.class_, expected.task)
        assert answer["probability"] == pytest.approx(expected.probability, abs=1e-5)
    for name, (image, message) in {**bad_images(run), "many": (None, "more than 1024")}.items():
        rows = (
            [{"image": image, "task": "two"}]
            if name != "many"
            else [{"image": "aa", "task": "two"}] * 1025
        )
        status, text = post(url, records(*rows))
        assert status == 400, (name, text)
        assert message in json.loads(text)["message"], name
        assert "\n" not in json.loads(text)["message"]
    status, text = post(url, records({"image": b64(images[0]), "task": "tow"}))
    assert (status, "did you mean two" in text) == (400, True)
    assert 400 <= post(url, b"{")[0] < 500


@pytest.mark.slow
def test_mlflow_survives_a_request_storm(run: Any, mlflow_server: Any) -> None:
    url, process = mlflow_server
    data = records({"image": b64(run.images("two")[0][0]), "task": "two"})
    assert post(url, data)[0] == 200
    before = memory(process)
    status_counts = asyncio.run(storm(url, data))
    assert set(status_counts) <= {200, 503}, status_counts
    assert sum(status_counts.values()) == STORM
    assert memory(process) - before < MORE_BYTES
    assert post(url, data)[0] == 200


@pytest.mark.slow
def test_documented_mlflow_command_serves_registered_model(run: Finished, tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs" / "serving.md").read_text()
    command = re.search(r"```\n(export MLFLOW_TRACKING_URI=.*?)```", page, re.DOTALL)
    assert command is not None
    (tmp_path / ".venv").symlink_to(Path(sys.executable).parents[1])
    run.bundle.write(str(tmp_path / "bundle"))
    client, uri, experiment = open_store(str(tmp_path / "storage"))
    run_id = client.create_run(experiment).info.run_id
    published = publish.log(uri, run_id, str(tmp_path / "bundle"), "demo-meat")
    assert published.model == "models:/demo-meat@champion"
    port = ui.find_port("127.0.0.1")
    assert "--port 5001" in command[1]
    text = command[1].replace("--port 5001", f"--host 127.0.0.1 --port {port}")
    environment = {"PATH": "/usr/bin:/bin", "MLFLOW_DISABLE_TELEMETRY": "true"}
    process = started(["bash", "-c", text], tmp_path / "log", str(tmp_path), **environment)
    try:
        until_up(process, f"http://127.0.0.1:{port}/ping", tmp_path / "log")
        body = records({"image": b64(run.images("two")[0][0]), "task": "two"})
        status, answer = post(f"http://127.0.0.1:{port}/invocations", body)
        assert (status, json.loads(answer)["predictions"][0]["task"]) == (200, "two")
    finally:
        end_group(process)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and its process group."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(900)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


# ---- without a server ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"{", "the body is not JSON"),
        (b"[" * 100_000, "the body is not JSON"),
        (b"[]", "has no list of images"),
        (b'{"images": []}', "has no list of images"),
        (
            b'{"images": ["x"], "taks": 1}',
            "has a field 'taks'; it may have images, rule, tasks, top",
        ),
        (b'{"images": ["x"], "tasks": 3}', "tasks must be a name"),
        (b"\xff\xfe", "the body is not JSON"),
    ],
)
def test_malformed_json_request_is_refused(data: Any, message: str) -> None:
    from pipeline.serving.requests import parse_json

    with pytest.raises(UserError, match=message):
        parse_json(data)


def test_batched_requests_get_the_same_answers_as_single_requests(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipeline.serving.deployment import DecodedRequest, answer_requests

    pixels = np.random.default_rng(0).integers(0, 255, (6, 3, 16, 16)).astype(np.uint8)
    batch = [
        DecodedRequest(pixels[:1], ["two"], "refuse", 0),
        DecodedRequest(pixels[1:4], ["three", "two", "three"], "refuse", 0),
        DecodedRequest(pixels[4:], ["two"] * 2, "refuse", 1),
    ]
    alone = [run.served.answers(a.pixels, a.tasks, a.rule, a.top) for a in batch]
    batch_sizes: list[int] = []
    answers: Callable[..., list[Answer]] = run.served.answers

    def counted(pixels: Any, *rest: Any) -> list[Answer]:
        batch_sizes.append(len(pixels))
        return answers(pixels, *rest)

    monkeypatch.setattr(run.served, "answers", counted)
    together = answer_requests(run.served, batch)
    assert batch_sizes == [4, 2]
    for batched, single in zip(together, alone, strict=True):
        assert not isinstance(batched, UserError)
        assert [(a.task, a.class_, len(a.probabilities)) for a in batched] == [
            (a.task, a.class_, len(a.probabilities)) for a in single
        ]
        assert [a.probability for a in batched] == pytest.approx(
            [a.probability for a in single], abs=1e-5
        )
