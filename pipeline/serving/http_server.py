"""The HTTP server in front of a model, with host checks, deadlines and limits.

`listening` starts uvicorn with `Front` as the ASGI application and `Connection` as the protocol.

A request enters the queue of predictions only after it has arrived completely, so slow clients do
not delay others. If there are too many connections, the server closes the connection that has
waited longest for the head of a request.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import re
import resource
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from pipeline.serving.openapi import build_document
from pipeline.serving.requests import RawRequest
from pipeline.serving.server_metrics import CONTENT_TYPE, ServerMetrics
from workers.errors import UserError

MAX_CONNECTIONS = 16_384
RESERVED_FILES = 512  # file descriptors for the rest of the process
MB = 1 << 20
START_TIMEOUT_S = 30.0  # seconds until the server must listen
COUNT_INTERVAL_S = 1.0  # minimum seconds between two counts of the replicas
NO_REPLICA = "no replica of the model can answer, one is being started; send this again later"
# HTTP status of an answer -> additional headers.
HEADERS = {401: {"www-authenticate": "Bearer"}, 503: {"retry-after": "1"}}
HOST = re.compile(r"(?:\[(?P<address>[0-9a-f:.]+)\]|(?P<name>[^\s:/@\[\]]+))(?::\d{1,5})?")


class Refused(UserError):
    """Error for a request that the server refuses. `status` is the HTTP status of the answer."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class Reply(NamedTuple):
    """An HTTP status and a body: either JSON values, or bytes with a content type."""

    status: int
    body: dict[str, Any] | bytes
    content_type: str = ""


@dataclass(frozen=True)
class Bounds:
    """Limits for clients.

    Args:
        head_s: Seconds for the head of a request to arrive.
        body_s: Seconds after the head for the body to arrive.
        answer_s: Seconds after the body for the model to answer.
        idle_s: Seconds that a connection stays open between two requests.
        connections: Maximum number of open connections.
        requests: Maximum number of predictions that run or wait.
        body_bytes: Maximum size of one body.
        held_bytes: Maximum size of all bodies in memory: bodies that are being received, and bodies
            of requests that wait for an answer.
    """

    head_s: float = 60.0
    body_s: float = 60.0
    answer_s: float = 60.0
    idle_s: int = 60
    connections: int = MAX_CONNECTIONS
    requests: int = 320
    body_bytes: int = 32 * MB
    held_bytes: int = 512 * MB

    @property
    def request_s(self) -> float:
        """Seconds from the head of a request after which an unfinished response is aborted."""
        return self.body_s + self.answer_s + self.idle_s


@dataclass(eq=False)
class Upload:
    """A request body during its transfer.

    Args:
        timeout: Timeout that ends the transfer.
        refusal: Error to raise after the timeout.
        data: The bytes that have arrived.
    """

    timeout: asyncio.Timeout
    refusal: Refused
    data: bytearray = field(default_factory=bytearray)


class Hosts:
    """The host names that clients may use to reach the server.

    With DNS rebinding, a page of another site lets the site's name resolve to this machine. The
    header `Host` of the requests then contains the name of that site. IP addresses cannot be
    rebound, so a server that listens on all interfaces accepts every IP address.

    Args:
        listen: The address to listen on. It is allowed, like localhost.
        names: Other allowed names.
    """

    def __init__(self, listen: str, names: Iterable[str] = ()):
        self.names = {"localhost", "127.0.0.1", "::1"}
        for name in (listen, *names):
            self.names.add(name.lower().strip("[]"))
        self.names.discard("")
        self.any_address = not listen or (
            is_address(listen) and ipaddress.ip_address(listen).is_unspecified
        )

    def allow(self, host: str) -> bool:
        """Return whether the value of a header `Host`, with or without a port, is allowed."""
        parts = HOST.fullmatch(host.lower())
        if parts is None:
            return False
        name = (parts["address"] or parts["name"]).removesuffix(".")
        return name in self.names or (self.any_address and is_address(name))


def is_address(name: str) -> bool:
    """Return whether a host is an IP address."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def has_two_lengths(request: Request) -> bool:
    """Return whether a request declares its body length in two ways (RFC 9112, section 6.3)."""
    return "content-length" in request.headers and "transfer-encoding" in request.headers


class Front:
    """The ASGI application: checks requests, receives bodies and asks the model.

    Args:
        predict: Answers POST /predict. It is cancelled if the client disconnects, if no replica
            can answer, or after the deadline for answers.
        tasks: The body of the answer to GET /tasks.
        hosts: The allowed host names.
        count_replicas: Returns the number of replicas that can answer. It is called in a thread,
            at most once per COUNT_INTERVAL_S.
        bounds: Limits for clients.
        token: Token that every route except /health requires; "": no route requires a token.
    """

    def __init__(
        self,
        predict: Callable[[RawRequest], Awaitable[Reply]],
        tasks: Mapping[str, Any],
        hosts: Hosts,
        count_replicas: Callable[[], int] = lambda: 1,
        bounds: Bounds | None = None,
        token: str = "",
    ):
        self.token = token.encode()
        self.predict = predict
        self.tasks = tasks
        self.hosts = hosts
        self.count_replicas = count_replicas
        self.bounds = bounds or Bounds()
        # Connections that wait for the head of a request, ordered from old to new.
        self.incomplete: dict[Connection, None] = {}
        self.uploads: dict[Upload, None] = {}  # ordered from old to new
        self.connections = self.bounds.connections
        self.held = 0  # total bytes of all bodies in memory
        self.predictions = 0  # number of predictions that run or wait
        # Result of the last count of replicas; None if the count failed.
        self.replicas: int | None = None
        self.counted_until = 0.0
        self.counting = asyncio.Lock()
        self.metrics = ServerMetrics(
            lambda: self.predictions, lambda: self.held, lambda: self.replicas or 0
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, as the ASGI specification defines it."""
        request = Request(scope, receive)
        started = time.monotonic()
        try:
            reply = await self.reply(request)
        except Refused as error:
            reply = Reply(error.status, {"error": str(error)})
        except ClientDisconnect:
            return
        except Exception as error:  # the server must continue
            print(
                f"accrete: a request failed: {type(error).__name__}: {error}",
                file=sys.stderr,
                flush=True,
            )
            reply = Reply(500, {"error": "the server failed; its output says why"})
        headers = dict(HEADERS.get(reply.status, {}))
        if has_two_lengths(request):
            headers["connection"] = "close"  # the start of the next request is ambiguous
        if isinstance(reply.body, bytes):
            response = Response(reply.body, reply.status, headers, reply.content_type)
        else:
            response = JSONResponse(reply.body, reply.status, headers)
        self.metrics.count(request.url.path, reply.status, time.monotonic() - started)
        await response(scope, receive, send)

    async def reply(self, request: Request) -> Reply:
        """Check a request, dispatch it to its route and return the reply.

        Raises:
            Refused: If the request is refused.
            ClientDisconnect: If the client has disconnected.
        """
        if has_two_lengths(request):
            raise Refused(
                400, "the request has both Content-Length and Transfer-Encoding; send one of them"
            )
        self.check_host(request)
        route = f"{request.method} {request.url.path}"
        if route == "GET /health":
            return await self.make_health_reply()
        self.check_token(request)
        if route == "GET /tasks":
            return Reply(200, dict(self.tasks))
        if route == "GET /metrics":
            await self.update_replicas()
            return Reply(200, self.metrics.text(), CONTENT_TYPE)
        if route == "GET /openapi.json":
            return Reply(200, build_document())
        if route == "GET /":
            return make_page_reply(request.headers["host"])
        if route != "POST /predict":
            raise Refused(
                404,
                f"there is no {route[:100]}; there are POST /predict, "
                "GET /tasks, GET /health, GET /metrics, GET /openapi.json and GET /",
            )
        self.check_room()
        upload = await self.receive_body(request)
        try:
            self.check_room()
            self.predictions += 1
            try:
                content_type = request.headers.get("content-type", "")
                raw = RawRequest(bytes(upload.data), content_type, request.url.query)
                return await self.answer(request, raw)
            finally:
                self.predictions -= 1
        finally:
            self.release(upload)

    def check_host(self, request: Request) -> None:
        """Raise `Refused` if the header `Host` or `Origin` contains a forbidden host."""
        host = request.headers.get("host", "")
        if not self.hosts.allow(host):
            raise Refused(
                421,
                f"host {host[:80]!r} is not served here; "
                "use the server's own address, or start it with --allow-host NAME",
            )
        origin = request.headers.get("origin")
        if origin is not None and not self.hosts.allow(origin.partition("://")[2]):
            raise Refused(
                403,
                f"pages of {origin[:80]!r} must not send requests to this server; "
                "start it with --allow-host NAME to allow pages of NAME",
            )

    def check_token(self, request: Request) -> None:
        """Raise `Refused` if the request does not contain the token."""
        expected = b"bearer " + self.token
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        credentials = f"{scheme.lower()} {token.strip()}".encode("latin-1", "replace")
        if self.token and not hmac.compare_digest(credentials, expected):
            raise Refused(
                401,
                "this server requires its token; send it in the header Authorization: Bearer TOKEN",
            )

    def check_room(self) -> None:
        """Raise `Refused` if too many predictions run or wait."""
        if self.predictions >= self.bounds.requests:
            raise Refused(
                503, f"{self.predictions} requests are being answered; send this one again later"
            )

    async def make_health_reply(self) -> Reply:
        """Return a reply with status 200 if a replica can answer, or else with status 503."""
        await self.update_replicas()
        if self.replicas:
            return Reply(200, {"status": "ok"})
        return Reply(503, {"error": NO_REPLICA})

    async def wait_for_no_replica(self) -> None:
        """Wait until a count finds no replica. The first count is after `COUNT_INTERVAL_S`."""
        while True:
            await asyncio.sleep(COUNT_INTERVAL_S)
            await self.update_replicas()
            if self.replicas == 0:
                return

    async def update_replicas(self) -> None:
        """Count the replicas that can answer, at most once per `COUNT_INTERVAL_S`."""
        async with self.counting:
            if time.monotonic() < self.counted_until:
                return
            try:
                count = asyncio.to_thread(self.count_replicas)
                self.replicas = await asyncio.wait_for(count, self.bounds.head_s)
            except Exception:  # Ray Serve's controller did not answer
                self.replicas = None
            self.counted_until = time.monotonic() + COUNT_INTERVAL_S

    # ---- bodies ----------------------------------------------------------------------------------
    async def receive_body(self, request: Request) -> Upload:
        """Receive the body of a request.

        Raises:
            Refused: If the body is too large, arrives too slowly, or is dropped to free memory.
        """
        large = Refused(
            413,
            f"the body has more than {self.bounds.body_bytes} bytes; send fewer or smaller images",
        )
        slow = Refused(
            408,
            f"the body did not arrive within {self.bounds.body_s:g} s; "
            "send fewer or smaller images",
        )
        length = request.headers.get("content-length", "").lstrip("0") or "0"
        if len(length) > len(str(self.bounds.body_bytes)) or int(length) > self.bounds.body_bytes:
            raise large
        timeout = asyncio.timeout(self.bounds.body_s)
        upload = Upload(timeout, slow)
        self.uploads[upload] = None
        try:
            async with timeout:
                async for chunk in request.stream():
                    self.add_chunk(upload, chunk)
                    if len(upload.data) > self.bounds.body_bytes:
                        raise large
        except TimeoutError:
            self.release(upload)
            raise upload.refusal from None
        except BaseException:
            self.release(upload)
            raise
        del self.uploads[upload]
        return upload

    def add_chunk(self, upload: Upload, chunk: bytes) -> None:
        """Append a chunk to a body.

        If the total size of all bodies is too large, the oldest incomplete bodies are dropped.

        Raises:
            Refused: If this body is dropped now, or was dropped before. In the second case, the
                chunk arrived before the timeout of the dropped body ended its transfer.
        """
        if upload not in self.uploads:
            raise upload.refusal
        upload.data += chunk
        self.held += len(chunk)
        while self.held > self.bounds.held_bytes:
            oldest = next(iter(self.uploads))
            refusal = Refused(
                503,
                f"bodies of more than {self.bounds.held_bytes} bytes are being received; "
                "send this one again later",
            )
            if oldest is upload:
                raise refusal
            self.release(oldest)
            oldest.refusal = refusal
            oldest.timeout.reschedule(asyncio.get_running_loop().time())

    def release(self, upload: Upload) -> None:
        """Drop a body and free its memory."""
        self.held -= len(upload.data)
        upload.data = bytearray()
        self.uploads.pop(upload, None)

    async def answer(self, request: Request, raw: RawRequest) -> Reply:
        """Return the model's reply.

        Args:
            request: The request, to notice if the client disconnects.
            raw: The same request in the form for the model.

        Raises:
            Refused: If the answer takes too long, or if no replica can answer. Without the second
                check, the request would wait until a new replica has started.
            ClientDisconnect: If the client has disconnected.
        """
        if self.replicas == 0 and time.monotonic() < self.counted_until:
            raise Refused(503, NO_REPLICA)
        work = asyncio.ensure_future(self.predict(raw))
        left = asyncio.ensure_future(wait_for_disconnect(request.receive))
        no_replica = asyncio.ensure_future(self.wait_for_no_replica())
        try:
            await asyncio.wait(
                {work, left, no_replica},
                timeout=self.bounds.answer_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if work.done():
                return work.result()
            if left.done():
                raise ClientDisconnect
            if no_replica.done():
                raise Refused(503, NO_REPLICA)
            raise Refused(
                504,
                f"there was no answer within {self.bounds.answer_s:g} s; "
                "send fewer images, or send this request again later",
            )
        finally:
            work.cancel()
            left.cancel()
            no_replica.cancel()


def make_page_reply(host: str) -> Reply:
    """Return the HTML page. Its examples contain the host of the request."""
    text = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
    page = text.replace("ADDRESS", f"http://{escape(host)}")
    return Reply(200, page.encode(), "text/html; charset=utf-8")


async def wait_for_disconnect(receive: Callable[[], Awaitable[Message]]) -> None:
    """Wait until the client closes the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Connection(H11Protocol):
    """A connection of uvicorn with deadlines.

    uvicorn (0.54) has no deadline for the head of a request, and none for clients that do not read
    their answers. Its `limit_concurrency` refuses new connections instead of closing the oldest
    incomplete connection. Therefore this class extends uvicorn's own protocol. While the connection
    is open, one timer limits in turn the time for the head of a request, the time for the rest of
    the request, and the time until the next head.
    """

    front: Front
    timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the deadline of the first head.

        If there are too many connections, abort the oldest one that waits for a head, or else this
        one.
        """
        super().connection_made(transport)
        assert isinstance(self.config.app, Front)
        self.front = self.config.app
        if len(self.connections) > self.front.connections:
            oldest = next(iter(self.front.incomplete), self)
            self.front.incomplete.pop(oldest, None)
            oldest.transport.abort()
        self.await_head(self.front.bounds.head_s)

    def handle_events(self) -> None:
        """Parse the received bytes. If a head is complete, start the deadline of the request."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not before and not self.cycle.response_complete:
            self.front.incomplete.pop(self, None)
            self.abort_after(self.front.bounds.request_s)

    def on_response_complete(self) -> None:
        """Start the deadline of the next head.

        If the client has not read the whole answer yet, it has only `Bounds.answer_s` seconds to
        read the rest and to send the next head.
        """
        bounds = self.front.bounds
        unread = self.transport.get_write_buffer_size() > 0
        self.await_head(bounds.answer_s if unread else bounds.idle_s + bounds.head_s)
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        if self.timer is not None:
            self.timer.cancel()
        self.front.incomplete.pop(self, None)
        super().connection_lost(exc)

    def await_head(self, seconds: float) -> None:
        """Abort the connection if the head of a request does not arrive in time."""
        if not self.transport.is_closing():
            self.front.incomplete[self] = None
        self.abort_after(seconds)

    def abort_after(self, seconds: float) -> None:
        """Abort the connection after `seconds`. This replaces the previous deadline."""
        if self.timer is not None:
            self.timer.cancel()
        self.timer = self.loop.call_later(seconds, self.transport.abort)


@contextmanager
def listening(front: Front, host: str, port: int) -> Iterator[int]:
    """Context manager that runs the HTTP server in a thread.

    Args:
        front: The ASGI application.
        host: Address to listen on.
        port: Port to listen on; 0: any free port.

    Yields:
        The port.

    Raises:
        UserError: If the server cannot listen on this host and port.
    """
    front.connections = raise_file_limit(front.bounds.connections)
    config = uvicorn.Config(
        front,
        http=Connection,
        ws="none",
        interface="asgi3",
        lifespan="off",
        loop="asyncio",
        log_config=None,
        log_level="critical",  # so that invalid requests are not logged
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=front.bounds.idle_s,
        timeout_graceful_shutdown=5,
    )
    server = uvicorn.Server(config)
    with bind_socket(host, port) as sock:
        thread = threading.Thread(
            target=server.run, kwargs={"sockets": [sock]}, daemon=True, name="http"
        )
        thread.start()
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not server.started:
                if not thread.is_alive() or time.monotonic() > deadline:
                    raise UserError(
                        f"the HTTP server did not start on {host}:{port}; try another --port"
                    )
                time.sleep(0.01)
            yield sock.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(30)


def bind_socket(host: str, port: int) -> socket.socket:
    """Bind a socket to an IPv4 or IPv6 address and return it.

    Raises:
        UserError: If the address cannot be bound.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
        except BaseException:
            sock.close()
            raise
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"port {port} on {host} cannot be used ({reason}); "
            "give another with --port, or leave it out for a free one"
        ) from None
    return sock


def raise_file_limit(count: int) -> int:
    """Raise the limit of open files of this process for `count` connections.

    Returns:
        The number of connections for which the limit suffices, at most `count`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + RESERVED_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return count if soft == resource.RLIM_INFINITY else max(1, min(count, soft - RESERVED_FILES))
