"""An S3-compatible server on loopback, in a separate process, and a proxy for it.

The proxy records requests and can make them fail.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests import small_run

KEY, SECRET = "AKIATESTKEYOFNOBODY", "thissecretmustnotappearanywhere"
# Arguments: a port (0 for a free one) and a state file (or ""). The server loads the file at the
# start. When standard input ends, it waits for the current request and writes its buckets to the
# file, so that the effect of every answered request is kept.
SERVER = """
import logging, os, pickle, sys, threading
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from moto.s3.models import s3_backends
from werkzeug.serving import make_server
logging.getLogger("werkzeug").setLevel(logging.ERROR)
port, path = int(sys.argv[1]), sys.argv[2]
account, partition = "123456789012", "aws"
buckets = s3_backends[account][partition].buckets
if path and os.path.exists(path):
    with open(path, "rb") as stream:
        buckets.update(pickle.load(stream))
    for name in buckets:
        s3_backends.bucket_accounts[name] = (partition, account)
application = DomainDispatcherApplication(create_backend_app)
turn = threading.Lock()
def answer(*request):
    with turn:
        return application(*request)
server = make_server("127.0.0.1", port, answer, threaded=True)
threading.Thread(target=server.serve_forever, daemon=True).start()
print(server.port, flush=True)
sys.stdin.read()
turn.acquire()
if path:
    with open(path, "wb") as stream:
        pickle.dump(dict(buckets), stream)
os._exit(0)
"""
BODY = (
    b"<?xml version='1.0'?><Error><Code>%s</Code><Message>a fault of the "
    b"test</Message><RequestId>0</RequestId></Error>"
)
# fault kind -> status and S3 error code of the answer
ANSWERS = {
    "503": (503, "SlowDown"),
    "500": (500, "InternalError"),
    "429": (429, "TooManyRequests"),
    "403": (403, "AccessDenied"),
}
# headers that the proxy does not forward
REQUEST_HEADERS_OF_ONE_HOP = ("transfer-encoding", "connection", "expect", "content-length")
RESPONSE_HEADERS_OF_ONE_HOP = (
    "transfer-encoding",
    "connection",
    "content-length",
    "date",
    "server",
)


@dataclass
class Fault:
    """A failure of the next `times` requests that match `method` and `path`.

    kind is a key of `ANSWERS`, or one of these:
    - `cut upload`, `cut download`: the connection is closed in the middle of the body;
    - `done, unsaid`: the server executes the request, but the client gets no answer;
    - `slow`: the answer arrives in five pieces with pauses;
    - `silent`: no answer until `Proxy.hold` is set.
    """

    kind: str
    method: str = ""  # the beginning of the request's method
    path: str = ""  # a part of the request's path
    times: int = 1_000_000


@dataclass
class Proxy:
    """An HTTP proxy that passes requests to the server, and makes some fail."""

    upstream: int  # port of the server
    share: float = 0.0  # fraction of requests that fail at random
    kinds: tuple[str, ...] = ("503", "500", "cut upload", "cut download", "slow")  # at random
    faults: list[Fault] = field(default_factory=list)
    # One entry per request: method, path with query, and the fault kind or "".
    seen: list[tuple[str, str, str]] = field(default_factory=list)
    # Requests with the fault `silent` wait for this event.
    hold: threading.Event = field(default_factory=threading.Event)
    draw: random.Random = field(default_factory=lambda: random.Random(7))
    lock: threading.Lock = field(default_factory=threading.Lock)
    port: int = 0
    bucket: str = "bucket"

    @property
    def uri(self) -> str:
        """The URI of a storage folder in the bucket."""
        return f"s3://{self.bucket}/storage"

    def choose(self, method: str, path: str) -> str:
        """Record a request, and return its fault kind, or "" if it must not fail."""
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
        """Return method -> number of requests whose path contains `part`."""
        return Counter(method for method, path, _ in self.seen if part in path)

    @contextlib.contextmanager
    def served(self) -> Iterator[Proxy]:
        """Run the proxy on a free port, `port`, inside the context."""
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, *_: Any) -> None:
                """Print nothing."""

            def passed(self) -> None:
                relay(self, proxy)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = passed

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False
            request_queue_size = 128

            def handle_error(self, *_: Any) -> None:
                """Ignore closed connections: the faults close them on purpose."""

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
    """Return the body of a request.

    part: the fraction to read, from the start. A chunked body is read completely.
    """
    if "chunked" in request.headers.get("Transfer-Encoding", "").lower():
        body = b""
        while size := int(request.rfile.readline().split(b";")[0], 16):
            body += request.rfile.read(size)
            request.rfile.readline()
        request.rfile.readline()
        return body
    length = int(request.headers.get("Content-Length", 0))
    return request.rfile.read(int(length * part))


def relay(request: BaseHTTPRequestHandler, proxy: Proxy) -> None:
    """Forward a request to the server and return its response, unless the proxy makes it fail."""
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
            name: value
            for name, value in request.headers.items()
            if name.lower() not in REQUEST_HEADERS_OF_ONE_HOP
        }
        upstream.request(method, request.path, body, {**headers, "Content-Length": str(len(body))})
        response = upstream.getresponse()
        data = response.read()
        response_headers = [
            (name, value)
            for name, value in response.getheaders()
            if name.lower() not in RESPONSE_HEADERS_OF_ONE_HOP
        ]
        length = None
        if method == "HEAD":
            length = response.getheader("Content-Length")
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
    """Send a response, with the fault `cut download` or `slow` if given.

    length: the Content-Length; by default, the length of `data`.
    """
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
        piece_bytes = max(math.ceil(len(data) / 5), 1)
        for start in range(0, len(data), piece_bytes):
            request.wfile.write(data[start : start + piece_bytes])
            request.wfile.flush()
            time.sleep(0.02)
    else:
        request.wfile.write(data)


@dataclass
class Server:
    """An S3 server process that can be stopped and started again.

    state: file that keeps the buckets between a stop and the next start; "": they are lost. port:
    if 0, the first start chooses a free port.
    """

    state: str = ""
    port: int = 0
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process, and wait until it listens."""
        command = [sys.executable, "-c", SERVER, str(self.port), self.state]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout
        self.port = int(self.process.stdout.readline())

    def stop(self) -> None:
        """End the process, if there is one."""
        if self.process:
            self.process.communicate(timeout=900)
            self.process = None


@contextlib.contextmanager
def server() -> Iterator[int]:
    """Run an empty S3 server inside the context, and yield its port."""
    running = Server()
    try:
        running.start()
        yield running.port
    finally:
        running.stop()


def files(port: int, bucket: str) -> dict[str, bytes]:
    """Return name -> content of all objects of a bucket. port: of the server, not the proxy."""
    client = client_of(port)
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket)
    contents = {}
    for page in pages:
        for entry in page.get("Contents", []):
            name = entry["Key"]
            contents[name] = client.get_object(Bucket=bucket, Key=name)["Body"].read()
    return contents


def client_of(port: int) -> Any:
    """Return a boto3 client of the server at this port."""
    import boto3

    return boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{port}",
        region_name="us-east-1",
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
    )


def fetched(port: int, bucket: str, folder: Path) -> Path:
    """Write all objects of a bucket as files below `folder`, and return the folder."""
    for name, data in files(port, bucket).items():
        if not name.endswith("/"):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    return folder


def leaks(folder: Path, secrets: Iterable[str] = (KEY, SECRET)) -> list[str]:
    """Return the paths below `folder` of files that contain one of the secrets."""
    leaking = []
    for path in folder.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            if any(secret.encode() in data for secret in secrets):
                leaking.append(str(path))
    return leaking


def start(argv: list[str], out: Path, env: dict[str, str], stop_before: int = 0) -> Any:
    """Run the command line in a process, as `small_run.start` does, and return the process.

    env: variables to set. stop_before: n to kill the process before it writes its n-th object; 0:
    never.
    """
    process = small_run.processes().Process(
        target=main_into, args=(argv, str(out), env, stop_before)
    )
    process.start()
    return process


def main_into(argv: list[str], out: str, env: dict[str, str], stop_before: int) -> None:
    """Run the command line in this process, which `start` started with the same arguments.

    pyarrow sends each request once, so that the project's own retries are tested. The pauses
    between retries are short, also those of the tracking outbox.
    """
    from pipeline.tracking import outbox
    from workers.storage import filesystem

    os.environ.update(env)
    filesystem.TRIES = 1
    filesystem.FIRST_S = 0.01
    outbox.FIRST_S = 0.1
    outbox.LONGEST_S = 0.5
    if stop_before:
        writes = itertools.count(1)
        put = filesystem.RetryingFilesystem.put

        def put_or_die(self: Any, path: str, data: bytes) -> None:
            if next(writes) == stop_before:
                os.kill(os.getpid(), signal.SIGKILL)
            put(self, path, data)

        filesystem.RetryingFilesystem.put = put_or_die  # type: ignore[method-assign]
    small_run.main_into(argv, out, 0, signal.SIGKILL, "")


def environment(port: int) -> dict[str, str]:
    """Return environment variables that point pyarrow and boto3 to the server at this port."""
    return {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
