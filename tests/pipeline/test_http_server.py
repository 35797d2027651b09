"""Tests of the HTTP server: slow and half-sent requests, deadlines, hosts, tokens, large images,
and the client."""

from __future__ import annotations

import asyncio
import base64
import http.client
import io
import json
import re
import resource
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from PIL import Image
from serving import Finished, finished
from starlette.requests import Request

from pipeline.serving import http_server, requests, serve_command
from pipeline.serving.client import Client
from pipeline.serving.http_server import Bounds, Front, Hosts, Reply, listening
from pipeline.serving.requests import RawRequest
from pipeline.serving.server_metrics import ROUTES
from pipeline.tracking import ui
from workers.errors import UserError
from workers.serving.bundle import Bundle
from workers.serving.images import Limits, PixelBudget, read_pixels
from workers.serving.task_rules import RULES

HALF_HEAD = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nX-Half: "
HALF_BODY = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n{"
MANY = 300
SOON = Bounds(head_s=0.5, body_s=0.5, answer_s=0.5, idle_s=1)
PATIENCE_S = 60.0  # maximum wait of a test for a deadline


async def echo(request: RawRequest) -> Reply:
    return Reply(200, {"bytes": len(request.body)})


class Server:
    """A front on a free port, with methods to send requests to it."""

    def __init__(self, front: Front, port: int) -> None:
        self.front, self.port = front, port

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            client.request(
                method,
                path,
                body,
                {name.replace("_", "-"): value for name, value in headers.items()},
            )
            answer = client.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            client.close()

    def metrics(self) -> list[str]:
        """Return the lines of GET /metrics."""
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        client.request("GET", "/metrics")
        lines = client.getresponse().read().decode().splitlines()
        client.close()
        return lines

    def opened(self, data: bytes = b"") -> socket.socket:
        client = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)
        client.sendall(data)
        return client


@contextmanager
def serving(
    predict: Any = echo,
    count_replicas: Callable[[], int] = lambda: 1,
    bounds: Bounds | None = None,
    token: str = "",
) -> Iterator[Server]:
    front = Front(predict, {"tasks": []}, Hosts("127.0.0.1"), count_replicas, bounds, token)
    with listening(front, "127.0.0.1", 0) as port:
        yield Server(front, port)


def received(client: socket.socket) -> bytes:
    """Return all data that the server sends until it closes the connection."""
    data = b""
    try:
        while chunk := client.recv(1 << 16):
            data += chunk
    except ConnectionError:
        pass
    return data


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def trickle(client: socket.socket) -> bool:
    """Send one byte at a time. Return whether the server closes the connection."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            client.sendall(b"1")
        except OSError:
            return True
        time.sleep(0.05)
    return False


# ---- slow clients --------------------------------------------------------------------------------
@pytest.mark.parametrize("half", [b"", HALF_HEAD, HALF_BODY], ids=["nothing", "head", "body"])
def test_half_sent_requests_do_not_block_other_requests(half: bytes) -> None:
    with serving(bounds=Bounds(requests=4)) as server, ExitStack() as stack:
        for _ in range(MANY):
            stack.enter_context(server.opened(half))
        assert server.ask("GET", "/health") == (200, {"status": "ok"})
        assert server.ask("GET", "/tasks") == (200, {"tasks": []})
        assert server.ask("POST", "/predict", b"x" * 1000) == (200, {"bytes": 1000})


@pytest.mark.parametrize(
    ("half", "status"),
    [(b"", b""), (HALF_HEAD, b""), (HALF_BODY, b"HTTP/1.1 408 ")],
    ids=["nothing", "head", "body"],
)
def test_a_half_sent_request_is_ended_at_its_deadline(half: bytes, status: bytes) -> None:
    with serving(bounds=SOON) as server, server.opened(half) as client:
        answer = received(client)
        assert answer.startswith(status)
        assert bool(answer) == bool(status)
        wait_for(lambda: not server.front.incomplete)
        assert (server.front.held, server.front.uploads, server.front.predictions) == (0, {}, 0)


@pytest.mark.parametrize("half", [HALF_HEAD, HALF_BODY], ids=["head", "body"])
def test_slowly_trickling_request_is_ended_at_its_deadline(half: bytes) -> None:
    with serving(bounds=SOON) as server, server.opened(half) as client:
        assert trickle(client)
        assert server.ask("POST", "/predict", b"abc") == (200, {"bytes": 3})


def test_second_head_on_a_connection_has_a_deadline() -> None:
    whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with serving(bounds=SOON) as server, server.opened(whole + whole + HALF_HEAD) as client:
        assert received(client).count(b"HTTP/1.1 200 ") == 2


def test_client_that_does_not_read_its_response_is_disconnected() -> None:
    async def much(request: RawRequest) -> Reply:
        return Reply(200, {"text": "x" * (32 << 20)})

    with serving(much, bounds=SOON) as server, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(PATIENCE_S)
        client.connect(("127.0.0.1", server.port))
        client.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}")
        client.recv(1)
        wait_for(lambda: not server.front.incomplete)
        assert len(received(client)) < 32 << 20


def test_longest_waiting_connection_makes_room_for_a_new_one() -> None:
    with serving(bounds=Bounds(connections=20)) as server, ExitStack() as stack:
        clients = [stack.enter_context(server.opened(HALF_HEAD)) for _ in range(60)]
        assert server.ask("POST", "/predict", b"abc") == (200, {"bytes": 3})
        assert received(clients[0]) == b""
        assert len(server.front.incomplete) <= 20


def test_stalled_upload_is_dropped_for_an_arriving_one() -> None:
    head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n"
    with (
        serving(bounds=Bounds(body_bytes=1 << 20, held_bytes=1 << 20)) as server,
        server.opened(head + b"x" * 900_000) as stalled,
    ):
        wait_for(lambda: server.front.held == 900_000)
        assert server.ask("POST", "/predict", b"x" * 500_000) == (200, {"bytes": 500_000})
        assert stalled.recv(100).startswith(b"HTTP/1.1 503 ")
        wait_for(lambda: server.front.held == 0)


def test_dropped_upload_accepts_no_further_chunk() -> None:
    """Its last chunk may arrive before the deadline wakes its reader."""

    async def main() -> tuple[int, int]:
        front = http_server.Front(
            echo, {}, http_server.Hosts("localhost"), bounds=Bounds(held_bytes=10)
        )
        parts = [b"x" * 8, b"y", b""]

        async def receive() -> dict[str, object]:
            part = parts.pop(0)
            if part == b"y":  # meanwhile, another body needs the room
                front.release(next(iter(front.uploads)))
            return {"type": "http.request", "body": part, "more_body": bool(parts)}

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/predict",
            "headers": [(b"host", b"localhost")],
        }
        with pytest.raises(http_server.Refused) as refused:
            await front.reply(Request(scope, receive))
        return refused.value.status, front.held

    assert asyncio.run(main()) == (408, 0)


def test_connection_limit_is_capped_by_the_system_file_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: made.append(limits))
    assert http_server.raise_file_limit(16_384) == 4096 - http_server.RESERVED_FILES
    assert made == [(4096, 4096)]


# ---- answers -------------------------------------------------------------------------------------
class Stuck:
    """A model that never answers."""

    def __init__(self) -> None:
        self.begun, self.cancelled = threading.Event(), threading.Event()

    async def __call__(self, request: RawRequest) -> Reply:
        self.begun.set()
        try:
            await asyncio.sleep(3600)
        finally:
            self.cancelled.set()
        raise AssertionError


def test_late_answer_is_cancelled_at_its_deadline() -> None:
    stuck = Stuck()
    with serving(stuck, bounds=Bounds(answer_s=0.2)) as server:
        status, body = server.ask("POST", "/predict", b"{}")
        assert (status, "no answer within 0.2 s" in body["error"]) == (504, True)
        assert stuck.cancelled.wait(PATIENCE_S)
        wait_for(lambda: server.front.predictions == 0)


@pytest.mark.parametrize("path", ["/predict", "/health"])
def test_body_with_length_and_chunked_encoding_closes_the_connection(path: str) -> None:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 6\r\n"
        "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nX"
    )
    hidden = "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with serving() as server, server.opened((head + hidden).encode()) as client:
        answer = received(client)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"connection: close" in answer.lower()
    assert answer.count(b"HTTP/1.1") == 1


def test_prediction_is_cancelled_if_its_client_disconnects() -> None:
    stuck = Stuck()
    with serving(stuck) as server:
        client = server.opened(
            b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}"
        )
        assert stuck.begun.wait(PATIENCE_S)
        client.close()
        assert stuck.cancelled.wait(PATIENCE_S)
        wait_for(lambda: server.front.predictions == 0)


def test_full_queue_refuses_only_predictions() -> None:
    stuck = Stuck()
    with (
        serving(stuck, bounds=Bounds(requests=1)) as server,
        server.opened(HALF_BODY.replace(b"100000", b"1")),
    ):
        assert stuck.begun.wait(PATIENCE_S)
        status, body = server.ask("POST", "/predict", b"{}")
        assert (status, "send this one again later" in body["error"]) == (503, True)
        assert server.ask("GET", "/health")[0] == server.ask("GET", "/tasks")[0] == 200


def test_failed_request_does_not_affect_other_requests(capfd: pytest.CaptureFixture[str]) -> None:
    async def broken(request: RawRequest) -> Reply:
        if request.body == b"bad":
            raise RuntimeError("a fault")
        return await echo(request)

    with serving(broken) as server:
        assert server.ask("POST", "/predict", b"bad")[0] == 500
        assert server.ask("POST", "/predict", b"good") == (200, {"bytes": 4})
    assert "RuntimeError: a fault" in capfd.readouterr().err


def test_server_without_answering_replica_is_not_ready() -> None:
    def broken() -> int:
        raise RuntimeError("no controller")

    for count in (lambda: 0, broken):
        with serving(count_replicas=count) as server:
            assert server.ask("GET", "/health")[0] == 503
            assert server.ask("GET", "/tasks")[0] == 200
            assert "accrete_replicas 0.0" in server.metrics()
    with serving(count_replicas=lambda: 2) as server:
        assert server.ask("GET", "/health") == (200, {"status": "ok"})
        assert "accrete_replicas 2.0" in server.metrics()


def test_requests_without_replica_are_refused_instead_of_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "COUNT_INTERVAL_S", 0.05)
    num_asked = 0

    async def hang(raw: RawRequest) -> Reply:
        nonlocal num_asked
        num_asked += 1
        await asyncio.sleep(3600)
        raise AssertionError

    with serving(hang, count_replicas=lambda: 0) as server:
        for _ in range(2):
            status, body = server.ask("POST", "/predict", b"x")
            assert (status, body["error"]) == (503, http_server.NO_REPLICA)
        assert server.front.predictions == 0
    assert num_asked >= 1


def test_requests_continue_if_the_replica_count_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "COUNT_INTERVAL_S", 0.01)
    counts = 0

    def broken() -> int:
        nonlocal counts
        counts += 1
        raise RuntimeError("no controller")

    async def answer_late(raw: RawRequest) -> Reply:
        while counts < 3:
            await asyncio.sleep(0.01)
        return await echo(raw)

    with serving(answer_late, count_replicas=broken) as server:
        assert server.ask("POST", "/predict", b"xy") == (200, {"bytes": 2})


@pytest.mark.parametrize("length", ["34000000", "9" * 15, "9" * 5000])
def test_too_large_body_is_refused_before_reading(length: str) -> None:
    head = f"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n".encode()
    with serving() as server, server.opened(head) as client:
        assert client.recv(13) in (b"HTTP/1.1 413 ", b"HTTP/1.1 400 ")


def test_body_of_unknown_length_has_a_limit() -> None:
    with serving(bounds=Bounds(body_bytes=1000)) as server:
        status, body = server.ask("POST", "/predict", iter([b"x" * 600, b"x" * 600]))
        assert (status, "more than 1000 bytes" in body["error"]) == (413, True)


# ---- hosts ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("listen", "names", "host", "is_allowed"),
    [
        ("127.0.0.1", [], "127.0.0.1:8000", True),
        ("127.0.0.1", [], "localhost", True),
        ("127.0.0.1", [], "LocalHost.:80", True),
        ("127.0.0.1", [], "[::1]:8000", True),
        ("::1", [], "[::1]", True),
        ("10.0.0.7", [], "10.0.0.7:1", True),
        ("127.0.0.1", ["model.example.org"], "Model.example.org:80", True),
        ("0.0.0.0", [], "192.168.0.4:80", True),
        ("::", [], "[fe80::1]", True),
        ("127.0.0.1", [], "evil.example", False),
        ("127.0.0.1", [], "192.168.0.4", False),
        ("0.0.0.0", [], "evil.example", False),
        ("127.0.0.1", [], "", False),
        ("", [], "", False),
        ("127.0.0.1", [], "localhost.evil.example", False),
        ("127.0.0.1", [], "evil@localhost", False),
        ("127.0.0.1", [], "localhost/evil", False),
        ("127.0.0.1", [], "localhost:evil", False),
        ("127.0.0.1", [], "[::1", False),
        ("127.0.0.1", [], "localhost evil", False),
    ],
)
def test_only_host_names_of_this_server_are_allowed(
    listen: str, names: list[str], host: str, is_allowed: bool
) -> None:
    assert Hosts(listen, names).allow(host) is is_allowed


@pytest.mark.few(7)
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 421),
        ({"Host": "evil.example:8000"}, 421),
        ({"Host": ""}, 421),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "localhost"}, 200),
        ({"Origin": "http://localhost:3000"}, 200),
    ],
)
@pytest.mark.parametrize("route", [("GET", "/health"), ("GET", "/tasks"), ("POST", "/predict")])
def test_requests_with_foreign_host_or_origin_are_refused(
    headers: dict[str, str], status: int, route: tuple[str, str]
) -> None:
    with serving() as server:
        assert server.ask(*route, b"" if route[0] == "POST" else None, **headers)[0] == status


def test_server_listens_on_an_ipv6_address() -> None:
    try:
        port = ui.find_port("::1")
    except UserError:
        pytest.skip("this machine has no IPv6")
    with listening(Front(echo, {}, Hosts("::1")), "::1", port):
        client = http.client.HTTPConnection("::1", port, timeout=PATIENCE_S)
        client.request("GET", "/health")
        assert client.getresponse().status == 200
        client.close()


def test_used_port_is_reported_in_one_sentence() -> None:
    with (
        serving() as server,
        pytest.raises(UserError, match=f"port {server.port} on 127.0.0.1 cannot be used"),
        listening(server.front, "127.0.0.1", server.port),
    ):
        pass


# ---- a token -------------------------------------------------------------------------------------
SECRET = "a-token-of-some-length"


@pytest.mark.few(12)
@pytest.mark.parametrize(
    "route",
    [
        ("POST", "/predict"),
        ("GET", "/tasks"),
        ("GET", "/metrics"),
        ("GET", "/"),
        ("GET", "/openapi.json"),
        ("GET", "/nowhere"),
    ],
)
@pytest.mark.parametrize(
    "credentials",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        f"Basic {SECRET}",
        f"Bearer {SECRET}x",
        f"Bearer {SECRET[:-1]}",
    ],
)
def test_every_route_except_health_requires_the_token(
    route: tuple[str, str], credentials: str | None
) -> None:
    headers = {"Authorization": credentials} if credentials is not None else {}
    with serving(token=SECRET) as server:
        status, body = server.ask(*route, b"{}" if route[0] == "POST" else None, **headers)
        assert (status, SECRET in body["error"]) == (401, False)
        assert "Authorization: Bearer TOKEN" in body["error"]
        assert server.ask("GET", "/health") == (200, {"status": "ok"})


@pytest.mark.parametrize("host", ["127.0.0.1:{port}", "localhost:{port}"])
def test_page_examples_have_the_address_of_the_request(host: str) -> None:
    with serving() as server:
        asked = host.format(port=server.port)
        with server.opened(f"GET / HTTP/1.1\r\nHost: {asked}\r\n\r\n".encode()) as client:
            client.shutdown(socket.SHUT_WR)
            text = received(client).decode()
    assert text.count(f"http://{asked}/predict") == 2
    assert "ADDRESS" not in text


@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_requests_with_the_token_are_answered(scheme: str) -> None:
    with serving(token=SECRET) as server:
        headers = {"Authorization": f"{scheme} {SECRET}"}
        assert server.ask("GET", "/tasks", **headers) == (200, {"tasks": []})
        assert server.ask("POST", "/predict", b"abc", **headers) == (200, {"bytes": 3})


def test_a_token_is_read_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(serve_command.TOKEN, raising=False)
    assert serve_command.read_token("") == ""
    monkeypatch.setenv(serve_command.TOKEN, f"{SECRET}-0")
    assert serve_command.read_token("") == f"{SECRET}-0"
    (tmp_path / "token").write_text(f"{SECRET}\n")
    assert serve_command.read_token(str(tmp_path / "token")) == SECRET
    for text in ("", "short", "with a space, and long enough", "\u00e4" * 20):
        (tmp_path / "token").write_text(text)
        with pytest.raises(UserError, match="give at least 16 letters") as raised:
            serve_command.read_token(str(tmp_path / "token"))
        assert text[:5] not in str(raised.value) or not text
    with pytest.raises(UserError, match=r"--token-file .*gone cannot be read \(No such file"):
        serve_command.read_token(str(tmp_path / "gone"))


# ---- images --------------------------------------------------------------------------------------
def one_bit(side: int) -> bytes:
    """Return a PNG of a few kB with side x side pixels."""
    stream = io.BytesIO()
    Image.new("1", (side, side)).save(stream, "PNG")
    return stream.getvalue()


@pytest.fixture(scope="module")
def model(lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Finished]]:
    """Serve the bundle of a run over HTTP, with the deployment in this process."""
    from pipeline.serving.deployment import Deployment, answer_requests

    class Alone(Deployment.func_or_class):  # type: ignore[misc, name-defined]
        """A deployment that answers requests one by one, because batching needs a replica of Ray
        Serve."""

        async def answer_batch(self, request: Any) -> Any:
            replies = await asyncio.to_thread(answer_requests, self.served, [request])
            return replies[0]

    run, folder = finished(lab, "meat", epochs=1), str(tmp_path_factory.mktemp("model") / "bundle")
    run.bundle.write(folder)
    deployment = Alone(partial(Bundle.open, folder), 10_000_000)
    front = Front(deployment.predict, deployment.tasks(), Hosts("127.0.0.1"))
    with listening(front, "127.0.0.1", 0) as port:
        yield Server(front, port), run


def asked(server: Server, images: list[bytes], **fields: Any) -> tuple[int, Any]:
    body = {
        "images": [base64.b64encode(image).decode() for image in images],
        "tasks": "two",
        **fields,
    }
    return server.ask("POST", "/predict", json.dumps(body))


def test_http_predictions_equal_those_of_the_model(model: tuple[Server, Finished]) -> None:
    server, run = model
    images = run.images("two")[0][:3]
    status, body = asked(server, images)
    assert status == 200
    assert [row["class"] for row in body["predictions"]] == [
        answer.class_ for answer in run.served.predict(images, "two")
    ]
    assert server.ask("GET", "/tasks")[1]["limits"]["pixels"] == 10_000_000


def test_client_gives_equal_predictions_for_files_bytes_and_arrays(
    model: tuple[Server, Finished], tmp_path: Path
) -> None:
    server, run = model
    images = run.images("two")[0][:3]
    expected = asked(server, images)[1]["predictions"]
    paths = [tmp_path / "a.png", tmp_path / "b.png"]
    for path, image in zip(paths, images, strict=False):
        path.write_bytes(image)
    client = Client(f"http://127.0.0.1:{server.port}/")
    assert client.is_ready()
    assert client.tasks() == server.ask("GET", "/tasks")[1]
    assert client.predict([*paths, images[2]], "two") == expected
    assert client.predict(images, ["two", "two", "two"]) == expected
    pictures = [Image.open(io.BytesIO(image)).convert("RGB") for image in images]
    pixels = np.stack([np.asarray(picture) for picture in pictures])
    assert client.predict(pixels, "two") == expected
    assert client.predict(pixels.transpose(0, 3, 1, 2), "two") == expected
    assert len(client.predict(pixels, "two", top=1)[0]["probabilities"]) == 1
    assert {row["task"] for row in client.predict(images, [None, "two", "two"], "confident")}


def test_client_raises_the_error_message_of_the_server(model: tuple[Server, Finished]) -> None:
    server, run = model
    client = Client(f"http://127.0.0.1:{server.port}")
    with pytest.raises(UserError, match="did you mean two"):
        client.predict(run.images("two")[0][:1], "tow")
    with pytest.raises(UserError, match=r"^there is no GET /nowhere"):
        client.ask("/nowhere")


def test_client_retries_requests_refused_with_503() -> None:
    replies = [Reply(503, {"error": "later"}), Reply(200, {"predictions": []})]

    async def predict(request: RawRequest) -> Reply:
        return replies.pop(0)

    with serving(predict, token=SECRET) as server:
        url = f"http://127.0.0.1:{server.port}"
        assert Client(url, SECRET).predict([b"x"]) == []
        replies.append(Reply(503, {"error": "later"}))
        with pytest.raises(UserError, match="later"):
            Client(url, SECRET, patience_s=0).predict([b"x"])
        with pytest.raises(UserError, match="requires its token"):
            Client(url).predict([b"x"])
    assert not Client(url).is_ready()


def test_client_ignores_a_retry_after_header_with_a_date() -> None:
    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(429)
            self.send_header("Retry-After", "Wed, 21 Oct 2026 07:28:00 GMT")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        with pytest.raises(UserError, match="answered with status 429"):
            Client(f"http://127.0.0.1:{proxy.server_port}").ask("/tasks")
        proxy.shutdown()


def test_responses_match_the_openapi_description(model: tuple[Server, Finished]) -> None:
    server, run = model
    description = server.ask("GET", "/openapi.json")[1]

    def check(answer: Any, name: str) -> None:
        jsonschema.validate(answer, {**description, "$ref": f"#/components/schemas/{name}"})

    check(asked(server, run.images("two")[0][:2])[1], "Predictions")
    check(server.ask("GET", "/tasks")[1], "Tasks")
    check(server.ask("GET", "/health")[1], "Health")
    check(asked(server, [])[1], "Error")
    with pytest.raises(jsonschema.ValidationError):
        check({"predictions": [{"class": "a"}]}, "Predictions")
    assert sorted(description["paths"]) == sorted(ROUTES)
    content = description["paths"]["/predict"]["post"]["requestBody"]["content"]
    assert {*content} == {"application/json", requests.FORM, requests.ARRAY}
    for kind in ("application/json", requests.FORM):
        fields = content[kind]["schema"]["properties"]
        assert set(fields) == requests.FIELDS
        assert fields["rule"]["enum"] == [*RULES]


def test_page_refers_to_no_other_server() -> None:
    with serving() as server, urllib.request.urlopen(f"http://127.0.0.1:{server.port}/") as answer:
        page = answer.read().decode()
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        links = re.findall(r"(?:href|src)=\"([^\"]*)\"", page)
        assert "://" not in page.replace(f"http://127.0.0.1:{server.port}/", "")
        assert {f"/{link}" for link in links} < set(ROUTES)
        for link in links:
            with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/{link}") as linked:
                assert linked.status == 200


def test_too_many_pixels_are_refused_before_decoding(
    model: tuple[Server, Finished], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _ = model
    decoded: list[Image.Image] = []

    def to_rgb(image: Image.Image, value_range: tuple[float, float] | None) -> Image.Image:
        assert value_range is None
        decoded.append(image)
        return image.convert("RGB")

    monkeypatch.setattr("workers.serving.images.to_rgb", to_rgb)
    for images in ([one_bit(7000)], [one_bit(2000)] * 3, [one_bit(1000)] * 64):
        status, body = asked(server, images)
        assert (status, "pixels together, more than 10000000" in body["error"]) == (400, True)
    assert not decoded
    assert asked(server, [one_bit(2000)] * 2)[0] == 200
    assert len(decoded) == 2


def test_images_as_number_lists_count_towards_the_pixel_limit() -> None:
    with pytest.raises(
        UserError, match="2 images of this request have 32 pixels together, more than 20"
    ):
        read_pixels([[[[0, 0, 0]] * 4] * 4, Image.new("RGB", (4, 4))], 4, Limits(total_pixels=20))


def test_cancelled_request_decodes_no_further_images() -> None:
    asked_for = iter([False, False, True])
    images = [Image.new("RGB", (4, 4))] * 4
    with pytest.raises(UserError, match="image 2 is not decoded: the request was cancelled"):
        read_pixels(images, 4, Limits(), is_cancelled=lambda: next(asked_for))


def test_images_are_decoded_in_parallel_within_a_pixel_budget() -> None:
    budget, most, lock = PixelBudget(100), [0], threading.Lock()
    inside: list[int] = []

    def decode(pixels: int) -> None:
        with budget.reserve(pixels):
            with lock:
                inside.append(min(pixels, 100))
                most[0] = max(most[0], sum(inside))
            time.sleep(0.01)
            with lock:
                inside.remove(min(pixels, 100))

    threads = [
        threading.Thread(target=decode, args=(pixels,))
        for pixels in (60, 30, 50, 100, 400, 10, 20) * 3
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert 60 <= most[0] <= 100
    assert budget.used == 0


@pytest.mark.parametrize("top", [1, 5, 10**9, 10**400])
def test_top_is_bounded_by_the_number_of_classes(model: tuple[Server, Finished], top: int) -> None:
    server, run = model
    status, body = asked(server, run.images("two")[0][:1], top=top)
    assert status == 200
    assert len(body["predictions"][0]["probabilities"]) == min(top, 2)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ('"top": 1' + "0" * 5000, "a number of thousands of digits"),
        ('"top": -1', "top is -1"),
        ('"top": 1e400', "top is inf"),
        ('"top": true', "top is True"),
        ('"top": "3"', "top is '3'"),
        ('"top": NaN', "holds NaN, which is not JSON"),
        ('"top": -Infinity', "holds -Infinity"),
        ('"top": null', "top is None"),
        ('"rule": []', "rule is []"),
        ('"rule": {"a": 1}', "rule is {'a': 1}"),
    ],
)
def test_invalid_field_value_is_refused_in_one_sentence(
    model: tuple[Server, Finished], field: str, message: str
) -> None:
    server, _ = model
    status, body = server.ask("POST", "/predict", f'{{"images": ["aa"], "tasks": "two", {field}}}')
    assert (status, message in body["error"], "\n" in body["error"]) == (400, True, False)


@pytest.mark.parametrize("part", ["[],", "{},"])
def test_body_of_millions_of_parts_is_refused_before_parsing(part: str) -> None:
    from pipeline.serving.requests import MAX_JSON_PARTS, parse_json

    with pytest.raises(UserError, match="lists and objects"):
        parse_json(f'{{"images": [{part * MAX_JSON_PARTS}0]}}'.encode())
