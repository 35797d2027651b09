"""The HTTP server in front of a model: it checks hosts, deadlines and limits of requests.

A request enters the queue of predictions after it has arrived, so slow clients delay nobody. When
there are too many connections, the one that has been incomplete for longest is closed.
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

CONNECTIONS = 16_384
FILES = 512  # file descriptors that the rest of the process needs
MB = 1 << 20
START_S = 30.0
# Headers of answers by their status.
HEADERS = {401: {"www-authenticate": "Bearer"}, 503: {"retry-after": "1"}}
HOST = re.compile(r"(?:\[(?P<address>[0-9a-f:.]+)\]|(?P<name>[^\s:/@\[\]]+))(?::\d{1,5})?")


class Refused(UserError):
    """A request is not answered; the error has the HTTP status."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class Reply(NamedTuple):
    """An HTTP status and the body: values of JSON, or bytes of a content type."""

    status: int
    body: dict[str, Any] | bytes
    content_type: str = ""


COUNT_S = 1.0  # shortest time between two counts of the replicas
NO_REPLICA = "no replica of the model can answer, one is being started; send this again later"


@dataclass(frozen=True)
class Bounds:
    """Limits for clients.

    head_s, body_s, answer_s: seconds until a request's head has arrived, then its body, then until
    it is answered. idle_s: seconds that a connection stays open between requests. requests:
    predictions that run or wait. body_bytes: of one body. held_bytes: of all bodies that are being
    received or wait for their answers.
    """

    head_s: float = 60.0
    body_s: float = 60.0
    answer_s: float = 60.0
    idle_s: int = 60
    connections: int = CONNECTIONS
    requests: int = 320
    body_bytes: int = 32 * MB
    held_bytes: int = 512 * MB

    @property
    def request_s(self) -> float:
        """Seconds after which a connection is cut, whatever its request is waiting for."""
        return self.body_s + self.answer_s + self.idle_s


@dataclass(eq=False)
class Upload:
    """A body that is being received. timeout: ends the reading. refusal: the answer then."""

    timeout: asyncio.Timeout
    refusal: Refused
    data: bytearray = field(default_factory=bytearray)


class Hosts:
    """The names under which clients may ask.

    A page of another site can make a browser resolve the site's name to this machine (DNS
    rebinding); such requests carry that name as their host. names: beside the address that is
    listened on, and localhost. An address cannot be rebound, so a server that listens on all
    interfaces answers to every address.
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
        """Return whether requests to `host` are answered: the header `Host`, a port is optional."""
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


def ends_twice(request: Request) -> bool:
    """Whether a request says in two ways where its body ends (RFC 9112, section 6.3)."""
    return "content-length" in request.headers and "transfer-encoding" in request.headers


class Front:
    """The ASGI application.

    predict: answers POST /predict; it is cancelled when nobody waits for the answer.
    tasks: what GET /tasks answers. count_replicas: how many replicas can answer, called in a thread
    at most once a second. token: that every route but /health asks for; empty: none does.
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
        # Connections that wait for a request's head, the oldest first.
        self.incomplete: dict[Connection, None] = {}
        self.uploads: dict[Upload, None] = {}  # the oldest first
        self.connections = self.bounds.connections
        self.held = 0  # bytes of bodies
        self.predictions = 0  # that run or wait
        # That could answer when they were counted last; None where that is not known.
        self.replicas: int | None = None
        self.counted_until = 0.0
        self.counting = asyncio.Lock()
        self.metrics = ServerMetrics(
            lambda: self.predictions, lambda: self.held, lambda: self.replicas or 0
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        started = time.monotonic()
        try:
            reply = await self.reply(request)
        except Refused as error:
            reply = Reply(error.status, {"error": str(error)})
        except ClientDisconnect:
            return
        except Exception as error:  # one request ends no other
            print(
                f"accrete: a request failed: {type(error).__name__}: {error}",
                file=sys.stderr,
                flush=True,
            )
            reply = Reply(500, {"error": "the server failed; its output says why"})
        headers = dict(HEADERS.get(reply.status, {}))
        if ends_twice(request):
            headers["connection"] = "close"  # what follows may be a body, or a request of others
        if isinstance(reply.body, bytes):
            response = Response(reply.body, reply.status, headers, reply.content_type)
        else:
            response = JSONResponse(reply.body, reply.status, headers)
        self.metrics.count(request.url.path, reply.status, time.monotonic() - started)
        await response(scope, receive, send)

    async def reply(self, request: Request) -> Reply:
        """Return the reply to a request. Raise `Refused` when it is not answered."""
        if ends_twice(request):
            raise Refused(
                400, "the request has both Content-Length and Transfer-Encoding; send one of them"
            )
        self.check_host(request)
        route = f"{request.method} {request.url.path}"
        if route == "GET /health":
            return await self.health_reply()
        self.check_token(request)
        if route == "GET /tasks":
            return Reply(200, dict(self.tasks))
        if route == "GET /metrics":
            await self.update_replicas()
            return Reply(200, self.metrics.text(), CONTENT_TYPE)
        if route == "GET /openapi.json":
            return Reply(200, build_document())
        if route == "GET /":
            return page_reply(request.headers["host"])
        if route != "POST /predict":
            raise Refused(
                404,
                f"there is no {route[:100]}; there are POST /predict, "
                "GET /tasks, GET /health, GET /metrics, GET /openapi.json and GET /",
            )
        self.check_room()
        upload = await self.receive(request)
        try:
            self.check_room()
            self.predictions += 1
            try:
                return await self.answer(request, raw_request(request, bytes(upload.data)))
            finally:
                self.predictions -= 1
        finally:
            self.release(upload)

    def check_host(self, request: Request) -> None:
        """Raise `Refused` when the host, or the site of the asking page, is not allowed."""
        host = request.headers.get("host", "")
        if not self.hosts.allow(host):
            raise Refused(
                421,
                f"host {host[:80]!r} is not served here; "
                "ask under the server's own address, or start it with --allow-host NAME",
            )
        origin = request.headers.get("origin")
        if origin is not None and not self.hosts.allow(origin.partition("://")[2]):
            raise Refused(
                403,
                f"pages of {origin[:80]!r} may not ask here; "
                "start the server with --allow-host NAME to allow those of NAME",
            )

    def check_token(self, request: Request) -> None:
        """Raise `Refused` when the request does not have the token."""
        expected = b"bearer " + self.token
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        credentials = f"{scheme.lower()} {token.strip()}".encode("latin-1", "replace")
        if self.token and not hmac.compare_digest(credentials, expected):
            raise Refused(
                401,
                "this server asks for its token; send it in the header Authorization: Bearer TOKEN",
            )

    def check_room(self) -> None:
        """Raise `Refused` when too many predictions run or wait."""
        if self.predictions >= self.bounds.requests:
            raise Refused(
                503, f"{self.predictions} requests are being answered; send this one again later"
            )

    async def health_reply(self) -> Reply:
        """Return whether a replica can answer."""
        await self.update_replicas()
        if self.replicas:
            return Reply(200, {"status": "ok"})
        return Reply(503, {"error": NO_REPLICA})

    async def until_no_replica(self) -> None:
        """Return when it is known that no replica can answer, after COUNT_S at least."""
        while True:
            await asyncio.sleep(COUNT_S)
            await self.update_replicas()
            if self.replicas == 0:
                return

    async def update_replicas(self) -> None:
        """Count the replicas that can answer, unless that was done within the last second."""
        async with self.counting:
            if time.monotonic() < self.counted_until:
                return
            try:
                count = asyncio.to_thread(self.count_replicas)
                self.replicas = await asyncio.wait_for(count, self.bounds.head_s)
            except Exception:  # whoever knows cannot be asked
                self.replicas = None
            self.counted_until = time.monotonic() + COUNT_S

    # ---- bodies ----------------------------------------------------------------------------------
    async def receive(self, request: Request) -> Upload:
        """Receive a body. Raise `Refused` when it is too large or slow, or gives way to others."""
        large = Refused(
            413,
            f"the body takes more than {self.bounds.body_bytes} bytes; "
            "send fewer or smaller images",
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
                    self.hold(upload, chunk)
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

    def hold(self, upload: Upload, chunk: bytes) -> None:
        """Add a chunk to a body.

        When all bodies together take too many bytes, the oldest incomplete ones are dropped. Raise
        `Refused` when this one is dropped, or was dropped before: a chunk may arrive before the
        deadline wakes its reader.
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
        """Drop a body and free its bytes."""
        self.held -= len(upload.data)
        upload.data = bytearray()
        self.uploads.pop(upload, None)

    async def answer(self, request: Request, raw: RawRequest) -> Reply:
        """Return the model's reply.

        Raise `Refused` when it takes too long, or when no replica can answer: the request would
        wait for the start of the next one. Raise `ClientDisconnect` when the client has left.
        """
        if self.replicas == 0 and time.monotonic() < self.counted_until:
            raise Refused(503, NO_REPLICA)
        work = asyncio.ensure_future(self.predict(raw))
        left = asyncio.ensure_future(disconnected(request.receive))
        no_replica = asyncio.ensure_future(self.until_no_replica())
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


def raw_request(request: Request, body: bytes) -> RawRequest:
    """Return what the model needs of a request."""
    return RawRequest(body, request.headers.get("content-type", ""), request.url.query)


def page_reply(host: str) -> Reply:
    """Return the page for people, with the address of the request in its examples."""
    text = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
    page = text.replace("ADDRESS", f"http://{escape(host)}")
    return Reply(200, page.encode(), "text/html; charset=utf-8")


async def disconnected(receive: Callable[[], Awaitable[Message]]) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Connection(H11Protocol):
    """uvicorn's connection with deadlines.

    uvicorn has none for heads, nor for clients that do not read their answers. One timer runs from
    the opening to the close: for the head of a request, then for the request, then for the next
    head.
    """

    front: Front
    timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        assert isinstance(self.config.app, Front)
        self.front = self.config.app
        if len(self.connections) > self.front.connections:
            oldest = next(iter(self.front.incomplete), self)
            self.front.incomplete.pop(oldest, None)
            oldest.transport.abort()
        self.await_head(self.front.bounds.head_s)

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before and not self.cycle.response_complete:
            self.front.incomplete.pop(self, None)
            self.cut_in(self.front.bounds.request_s)

    def on_response_complete(self) -> None:
        bounds = self.front.bounds
        unread = self.transport.get_write_buffer_size() > 0
        self.await_head(bounds.answer_s if unread else bounds.idle_s + bounds.head_s)
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.timer is not None:
            self.timer.cancel()
        self.front.incomplete.pop(self, None)
        super().connection_lost(exc)

    def await_head(self, seconds: float) -> None:
        """Abort the connection if the head of a request does not arrive in time."""
        if not self.transport.is_closing():
            self.front.incomplete[self] = None
        self.cut_in(seconds)

    def cut_in(self, seconds: float) -> None:
        """Abort the connection after so many seconds, in place of an earlier deadline."""
        if self.timer is not None:
            self.timer.cancel()
        self.timer = self.loop.call_later(seconds, self.transport.abort)


@contextmanager
def listening(front: Front, host: str, port: int) -> Iterator[int]:
    """Inside, serve `front` from a thread; yield the port.

    Raise `UserError` when host and port cannot be used.
    """
    front.connections = connections_allowed(front.bounds.connections)
    config = uvicorn.Config(
        front,
        http=Connection,
        ws="none",
        interface="asgi3",
        lifespan="off",
        loop="asyncio",
        log_config=None,
        log_level="critical",  # a stranger's bad request is no line in the log
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=front.bounds.idle_s,
        timeout_graceful_shutdown=5,
    )
    server = uvicorn.Server(config)
    with bound(host, port) as sock:
        thread = threading.Thread(
            target=server.run, kwargs={"sockets": [sock]}, daemon=True, name="http"
        )
        thread.start()
        try:
            deadline = time.monotonic() + START_S
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


def bound(host: str, port: int) -> socket.socket:
    """Return a bound socket of the address's family. Raise `UserError` when it cannot be bound."""
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
            "give another with --port, or none for a free one"
        ) from None
    return sock


def connections_allowed(count: int) -> int:
    """Raise this process's limit of open files for `count` connections.

    Return how many connections the system allows, at most `count`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return count if soft == resource.RLIM_INFINITY else max(1, min(count, soft - FILES))
