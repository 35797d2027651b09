"""An S3-compatible server on loopback in a process of its own, behind a proxy that counts requests
and makes them fail."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests import small_run

KEY, SECRET = "AKIATESTKEYOFNOBODY", "thissecretmustnotappearanywhere"
SERVER = """
import logging, sys
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""
BODY = (
    b"<?xml version='1.0'?><Error><Code>%s</Code><Message>a fault of the "
    b"test</Message><RequestId>0</RequestId></Error>"
)
ANSWERS = {
    "503": (503, "SlowDown"),
    "500": (500, "InternalError"),
    "429": (429, "TooManyRequests"),
    "403": (403, "AccessDenied"),
}


@dataclass
class Fault:
    """kind: one of ANSWERS; `cut upload`, `cut download`: the connection ends in the middle of the
    body; `done, unsaid`: the server does it and nobody hears; `slow`: the answer comes in small
    pieces; `silent`: no answer, for `hold` seconds. method, path: which requests, by their
    beginning and a part of it; "" all. times: how often."""

    kind: str
    method: str = ""
    path: str = ""
    times: int = 1_000_000


@dataclass
class Proxy:
    """What goes to the server passes here. share: part of all requests that fail, in a way that
    `seed` draws. faults: those that surely fail."""

    upstream: int
    share: float = 0.0
    kinds: tuple[str, ...] = ("503", "500", "cut upload", "cut download", "slow")
    faults: list[Fault] = field(default_factory=list)
    # method, path with query, fault or ""
    seen: list[tuple[str, str, str]] = field(default_factory=list)
    hold: threading.Event = field(default_factory=threading.Event)
    draw: random.Random = field(default_factory=lambda: random.Random(7))
    lock: threading.Lock = field(default_factory=threading.Lock)
    port: int = 0
    bucket: str = "bucket"

    @property
    def uri(self) -> str:
        return f"s3://{self.bucket}/storage"

    def choose(self, method: str, path: str) -> str:
        with self.lock:
            kind = ""
            for fault in self.faults:
                if fault.times > 0 and method.startswith(fault.method) and fault.path in path:
                    fault.times -= 1
                    kind = fault.kind
                    break
            else:
                if self.draw.random() < self.share:
                    kind = self.draw.choice(self.kinds)
            self.seen.append((method, path, kind))
            return kind

    def counts(self, part: str = "") -> Counter[str]:
        """Requests by method, of those with `part` in their path."""
        return Counter(method for method, path, _ in self.seen if part in path)

    @contextlib.contextmanager
    def served(self) -> Iterator[Proxy]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, *_: Any) -> None:
                """Nothing."""

            def passed(self) -> None:
                relay(self, proxy)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = passed

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False
            request_queue_size = 128

            def handle_error(self, *_: Any) -> None:
                """A connection that was cut is what was wanted."""

        server = Server(("127.0.0.1", 0), Handler)
        self.port = server.server_port
        thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )
        thread.start()
        try:
            yield self
        finally:
            self.hold.set()
            server.shutdown()
            server.server_close()
            thread.join()


def body_of(request: BaseHTTPRequestHandler, part: float = 1.0) -> bytes:
    """The body of a request, or the first part of it."""
    if "chunked" in request.headers.get("Transfer-Encoding", "").lower():
        body = b""
        while size := int(request.rfile.readline().split(b";")[0], 16):
            body += request.rfile.read(size)
            request.rfile.readline()
        request.rfile.readline()
        return body
    return request.rfile.read(int(int(request.headers.get("Content-Length", 0)) * part))


def relay(request: BaseHTTPRequestHandler, proxy: Proxy) -> None:
    method = request.command
    fault = proxy.choose(method, request.path)
    if fault == "cut upload":
        body_of(request, 0.5)
        request.close_connection = True
        return
    body = body_of(request)
    if fault in ANSWERS:
        code, name = ANSWERS[fault]
        answer(request, code, [("Content-Type", "application/xml")], BODY % name.encode(), method)
        return
    if fault == "silent":
        proxy.hold.wait()
        request.close_connection = True
        return
    upstream = http.client.HTTPConnection("127.0.0.1", proxy.upstream)
    try:
        headers = {
            n: v
            for n, v in request.headers.items()
            if n.lower() not in ("transfer-encoding", "connection", "expect", "content-length")
        }
        upstream.request(method, request.path, body, {**headers, "Content-Length": str(len(body))})
        response = upstream.getresponse()
        data = response.read()
        response_headers = [
            (n, v)
            for n, v in response.getheaders()
            if n.lower()
            not in ("transfer-encoding", "connection", "content-length", "date", "server")
        ]
        length = response.getheader("Content-Length") if method == "HEAD" else None
    finally:
        upstream.close()
    if fault == "done, unsaid":
        request.close_connection = True
        return
    answer(request, response.status, response_headers, data, method, fault, length)


def answer(
    request: BaseHTTPRequestHandler,
    code: int,
    headers: list[tuple[str, str]],
    data: bytes,
    method: str,
    fault: str = "",
    length: str | None = None,
) -> None:
    request.send_response(code)
    for name, value in headers:
        request.send_header(name, value)
    request.send_header("Content-Length", length or str(len(data)))
    request.end_headers()
    if method == "HEAD":
        return
    if fault == "cut download":
        request.wfile.write(data[: len(data) // 2])
        request.close_connection = True
    elif fault == "slow":
        for start in range(0, len(data), -(-len(data) // 5) or 1):
            request.wfile.write(data[start : start + -(-len(data) // 5)])
            request.wfile.flush()
            time.sleep(0.02)
    else:
        request.wfile.write(data)


@contextlib.contextmanager
def server() -> Iterator[int]:
    """The port of a server with nothing in it."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def files(port: int, bucket: str) -> dict[str, bytes]:
    """All objects of a bucket, without the code under test and the proxy."""
    client = client_of(port)
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket)
    names = [entry["Key"] for page in pages for entry in page.get("Contents", [])]
    return {name: client.get_object(Bucket=bucket, Key=name)["Body"].read() for name in names}


def client_of(port: int) -> Any:
    import boto3

    return boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{port}",
        region_name="us-east-1",
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
    )


def fetched(port: int, bucket: str, folder: Path) -> Path:
    """The same as files below `folder`."""
    for name, data in files(port, bucket).items():
        if not name.endswith("/"):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    return folder


def leaks(folder: Path) -> list[str]:
    """Files that hold the key or the secret."""
    contents = ((path, path.read_bytes()) for path in folder.rglob("*") if path.is_file())
    return [str(path) for path, data in contents if KEY.encode() in data or SECRET.encode() in data]


def start(argv: list[str], out: Path, env: dict[str, str], stop_before: int = 0) -> Any:
    """As `small_run.start`, with these variables in the environment and short pauses between tries,
    all of them ours. stop_before: SIGKILL before the n-th object that it writes."""
    process = small_run.processes().Process(
        target=main_into, args=(argv, str(out), env, stop_before)
    )
    process.start()
    return process


def main_into(argv: list[str], out: str, env: dict[str, str], stop_before: int) -> None:
    from workers.storage import filesystem

    os.environ.update(env)
    filesystem.TRIES, filesystem.FIRST_S = 1, 0.01
    if stop_before:
        left, put = itertools.count(stop_before, -1), filesystem.RetryingFilesystem.put

        def deadly(self: Any, path: str, data: bytes) -> None:
            if next(left) == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            put(self, path, data)

        filesystem.RetryingFilesystem.put = deadly  # type: ignore[method-assign]
    small_run.main_into(argv, out, 0, signal.SIGKILL, "")


def environment(port: int) -> dict[str, str]:
    return {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
