"""A local web server that serves ranges of files, records requests, and can be hostile."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Server(ThreadingHTTPServer):
    """A server for the files of a folder.

    mode: "ranges": serve the requested range; "whole": serve complete files; "lies": name a wrong
    range in the answer; "endless": send more bytes than requested; "redirects": redirect to
    `target`. num_failures: number of requests that first get status 503.
    """

    daemon_threads = True

    def __init__(self, folder: Path):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.mode = "ranges"
        self.target = ""
        self.num_failures = 0
        self.requests: list[tuple[str, str]] = []  # path and range
        self.num_connections = 0
        self.url = f"http://127.0.0.1:{self.server_port}"

    def get_request(self):  # type: ignore[no-untyped-def]
        self.num_connections += 1
        return super().get_request()


class Handler(BaseHTTPRequestHandler):
    """Handler of one request."""

    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        asked = self.headers.get("Range", "")
        self.server.requests.append((self.path, asked))
        path = self.server.folder / self.path.lstrip("/")
        if self.server.num_failures > 0:
            self.server.num_failures -= 1
            self.answer(503, b"")
        elif self.server.mode == "redirects":
            self.answer(302, b"", Location=self.server.target + self.path)
        elif not path.is_file():
            self.answer(404, b"")
        elif self.server.mode == "whole":
            self.answer(200, path.read_bytes())
        else:
            self.answer_part(path.read_bytes(), asked)

    def answer_part(self, data: bytes, asked: str) -> None:
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", asked)
        assert match is not None
        first, last = int(match[1]), min(int(match[2]), len(data) - 1)
        part = data[first : last + 1]
        if self.server.mode == "lies":
            first += 1
        if self.server.mode == "endless":
            part += bytes(64 << 20)
        etag = hashlib.sha256(data).hexdigest()
        self.answer(206, part, **{"Content-Range": f"bytes {first}-{last}/{len(data)}"}, ETag=etag)

    def answer(self, status: int, data: bytes, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        try:
            self.wfile.write(data)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True


@contextmanager
def serve(folder: Path) -> Iterator[Server]:
    """Serve the files of a folder inside the block."""
    server = Server(folder)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
