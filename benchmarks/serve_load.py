"""Measure a server under load: answers, latency, memory, and the loss of a replica.

Command: `python -m benchmarks.serve_load MODEL_DIR`. It takes some minutes. It starts `serve` with
two replicas on a free port of 127.0.0.1, sends requests, kills a replica, and stops the server.
MODEL_DIR is a folder that `bundle` wrote.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import aiohttp
import numpy as np
import psutil
from PIL import Image

from benchmarks.harness import Report, interleave, start
from pipeline.tracking import ui
from workers.serving.server import Predictor

REQUESTS, AT_ONCE, BAD_SHARE = 10_000, 200, 0.4
QUIET_REQUESTS, QUIET_AT_ONCE = 1000, 2
START_S, PATIENCE_S = 300.0, 120.0


@dataclass
class Figures:
    """Results of a load.

    Attributes:
        good: HTTP status -> number of good requests, including repeated ones.
        bad: HTTP status -> number of bad requests.
        unanswered: Responses to good requests that never got status 200, and to bad requests
            without a proper error message.
        seconds: Seconds from the first try of each good request to its status 200.
        resident: Resident bytes of the server's main process, at each tenth of the load.
        wall_s: Wall time of the load in seconds.
    """

    good: Counter[int] = field(default_factory=Counter)
    bad: Counter[int] = field(default_factory=Counter)
    unanswered: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)
    wall_s: float = 0.0

    def quantile(self, share: float) -> float:
        """Return a quantile of the seconds until a good request was answered."""
        return sorted(self.seconds)[int(share * (len(self.seconds) - 1))]


def picture() -> bytes:
    """Return a PNG image of 32 x 32 pixels."""
    stream = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def build_body(images: list[str], task: str) -> bytes:
    """Return the body of a request."""
    return json.dumps({"images": images, "tasks": task}).encode()


def bad_bodies(image: str, task: str) -> list[bytes]:
    """Return bodies of requests that the server must refuse with an error message."""
    return [
        b"{",
        b"[" * 10_000,
        build_body([], task),
        build_body([image[:-40]], task),
        build_body(["/etc/passwd"], task),
        build_body([image] * 65, task),
        build_body([image], f"{task}-x"),
        build_body([image], task).replace(b'"tasks"', b'"taks"'),
    ]


async def load(
    url: str,
    good: bytes,
    bad: list[bytes],
    requests: int = REQUESTS,
    at_once: int = AT_ONCE,
    process: int = 0,
    halfway: Callable[[], object] = lambda: None,
) -> Figures:
    """Send requests to a server.

    Args:
        url: Address of the server.
        good: Body of good requests.
        bad: Bodies of bad requests, which are BAD_SHARE of all requests; [] for none.
        requests: Number of requests.
        at_once: Number of concurrent requests.
        process: Id of the process to record the memory of; 0 for none.
        halfway: Called after half of the requests were sent.
    """
    figures = Figures()
    numbers = iter(range(requests))

    async def client(session: aiohttp.ClientSession) -> None:
        for number in numbers:
            if number == requests // 2:
                halfway()
            if process and number % max(1, requests // 10) == 0:
                figures.resident.append(psutil.Process(process).memory_info().rss)
            if bad and number % 10 < 10 * BAD_SHARE:
                await send_bad(session, url, bad[number % len(bad)], figures)
            else:
                await send_good(session, url, good, figures)

    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    connector = aiohttp.TCPConnector(limit=0)
    started = time.monotonic()
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        await asyncio.gather(*(client(session) for _ in range(at_once)))
    figures.wall_s = time.monotonic() - started
    return figures


async def send_good(
    session: aiohttp.ClientSession, url: str, body: bytes, figures: Figures
) -> None:
    """Send a good request, and repeat it if the server asks to retry."""
    started = time.monotonic()
    while time.monotonic() - started < PATIENCE_S:
        async with session.post(url, data=body) as answer:
            figures.good[answer.status] += 1
            text = await answer.text()
        if answer.status == 200:
            figures.seconds.append(time.monotonic() - started)
            return
        if answer.status != 503 or "Retry-After" not in answer.headers:
            break
        await asyncio.sleep(float(answer.headers["Retry-After"]))
    figures.unanswered.append(text[:300])


async def send_bad(session: aiohttp.ClientSession, url: str, body: bytes, figures: Figures) -> None:
    """Send a bad request and check that it is refused with a message of one line."""
    async with session.post(url, data=body) as answer:
        figures.bad[answer.status] += 1
        text = await answer.text()
    sentence = json.loads(text).get("error", "")
    if not 400 <= answer.status < 500 or not sentence or "\n" in sentence:
        figures.unanswered.append(text[:300])


def kill_replica(server: int) -> None:
    """Kill one replica of a server, like a crash."""
    for process in psutil.Process(server).children(recursive=True):
        if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::ServeReplica"):
            process.kill()
            return
    raise AssertionError("the server has no replica")


@contextmanager
def server(model: str, *options: str) -> Iterator[tuple[str, int]]:
    """Context manager that serves a model folder and yields the address and process id."""
    port = ui.find_port("127.0.0.1")
    command = [sys.executable, "-m", "pipeline", "serve", model, "--port", str(port), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()  # printed when the server is ready
        assert line.startswith(b"serving on "), line
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def batching(model: str) -> float:
    """Return the ratio of CPU times of single-image requests: one by one / in batches."""
    # Imported late: Ray reads environment variables at import, and tests set them after they
    # import this module.
    from pipeline.serving.deployment import MAX_BATCH_IMAGES, DecodedRequest, answer_requests

    predictor = Predictor.open(model)
    side = predictor.augment.size_in
    pixels = np.zeros((1, 3, side, side), np.uint8)
    names = [predictor.tasks[0].name]
    requests = [DecodedRequest(pixels, [*names], "refuse", 0)] * MAX_BATCH_IMAGES

    def alone() -> None:
        for request in requests:
            answer_requests(predictor, [request])

    together = partial(answer_requests, predictor, requests)
    return interleave({"alone": alone, "together": together}, rounds=5).ratio("alone", "together")


def main() -> None:
    """Measure a server with few requests, and one with many requests that loses a replica."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", metavar="MODEL_DIR")
    model = parser.parse_args().model
    start()
    report = Report()
    task = Predictor.open(model).tasks[0].name
    image = base64.b64encode(picture()).decode()
    good, bad = build_body([image], task), bad_bodies(image, task)
    report.at_least("single images one by one / in batches of requests, CPU", batching(model), 1.5)
    with server(model, "--replicas", "2") as (address, process):
        url = f"{address}/predict"
        asyncio.run(load(url, good, [], 200))  # warms up both replicas
        quiet = asyncio.run(load(url, good, [], QUIET_REQUESTS, QUIET_AT_ONCE))
        p50, p99 = quiet.quantile(0.5), quiet.quantile(0.99)
        report.note("2 at once", f"p50 {p50 * 1000:.1f} ms, p99 {p99 * 1000:.1f} ms")
        report.at_most("p99 / p50 below saturation", p99 / p50, 5.0)
        killing = partial(kill_replica, process)
        busy = asyncio.run(load(url, good, bad, process=process, halfway=killing))
    rate = sum((busy.good + busy.bad).values()) / busy.wall_s
    report.note(f"{REQUESTS} requests, {AT_ONCE} at once", f"{rate:.0f} requests/s")
    report.note("good requests by status", f"{dict(busy.good)}")
    report.note("bad requests by status", f"{dict(busy.bad)}")
    median = statistics.median(busy.seconds)
    report.note("good requests, from first try to 200", f"median {median:.2f} s")
    report.note("longest", f"{max(busy.seconds):.2f} s")
    report.at_most("requests without an answer", len(busy.unanswered), 0)
    growth = busy.resident[-1] / busy.resident[2]
    report.at_most("memory of the server, at the end / after a fifth", growth, 1.15)
    report.exit()


if __name__ == "__main__":
    main()
