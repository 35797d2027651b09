"""A server under load: answers, latency, memory, and a replica that is killed.

`python -m benchmarks.serve_load MODEL_DIR` starts `serve` with two replicas on a free port of
127.0.0.1, asks it, and ends it; some minutes. MODEL_DIR is a folder that `bundle` wrote.
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
    """What a load gave.

    statuses: of good and bad requests, repeated ones alike. unanswered: good requests that got no
    200, and bad ones without a sentence. seconds: from the first try of a good request to its 200.
    resident: bytes of the server's own process, at each tenth of the load.
    """

    good: Counter[int] = field(default_factory=Counter)
    bad: Counter[int] = field(default_factory=Counter)
    unanswered: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)
    wall_s: float = 0.0

    def quantile(self, share: float) -> float:
        """Return the seconds within which this share of good requests was answered."""
        return sorted(self.seconds)[int(share * (len(self.seconds) - 1))]


def picture() -> bytes:
    """Return a PNG of 32 x 32 pixels."""
    stream = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def body_of(images: list[str], task: str) -> bytes:
    """Return the body of a request."""
    return json.dumps({"images": images, "tasks": task}).encode()


def bad_bodies(image: str, task: str) -> list[bytes]:
    """Return requests that are to be refused with a sentence."""
    return [
        b"{",
        b"[" * 10_000,
        body_of([], task),
        body_of([image[:-40]], task),
        body_of(["/etc/passwd"], task),
        body_of([image] * 65, task),
        body_of([image], f"{task}-x"),
        body_of([image], task).replace(b'"tasks"', b'"taks"'),
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
    """Send requests, so many at once, of which `BAD_SHARE` are bad if there are bad ones.

    process: whose memory is read. halfway: called when half of them are sent.
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
    """Send a request that can be answered, and repeat it where the server says so."""
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
    """Send a request that is to be refused in one sentence."""
    async with session.post(url, data=body) as answer:
        figures.bad[answer.status] += 1
        text = await answer.text()
    sentence = json.loads(text).get("error", "")
    if not 400 <= answer.status < 500 or not sentence or "\n" in sentence:
        figures.unanswered.append(text[:300])


def kill_replica(server: int) -> None:
    """End one replica of a server at once, as a crash would."""
    for process in psutil.Process(server).children(recursive=True):
        if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::ServeReplica"):
            process.kill()
            return
    raise AssertionError("the server has no replica")


@contextmanager
def server(model: str, *options: str) -> Iterator[tuple[str, int]]:
    """Inside, serve a model folder; yield the server's address and process."""
    port = ui.find_port("127.0.0.1")
    command = [sys.executable, "-m", "pipeline", "serve", model, "--port", str(port), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()  # it is printed when the server answers
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
    """Return how many times as much CPU single images take one by one as in batches."""
    # Ray reads its environment at import, which tests set after that of this module.
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
    """Measure a quiet server, a busy one, and one that loses a replica."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", metavar="MODEL_DIR")
    model = parser.parse_args().model
    start()
    report = Report()
    task = Predictor.open(model).tasks[0].name
    image = base64.b64encode(picture()).decode()
    good, bad = body_of([image], task), bad_bodies(image, task)
    report.at_least("single images one by one / in batches of requests, CPU", batching(model), 1.5)
    with server(model, "--replicas", "2") as (address, process):
        url = f"{address}/predict"
        asyncio.run(load(url, good, [], 200))  # warms both replicas
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
