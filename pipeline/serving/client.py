"""A small client for the server that `accrete serve` starts. NumPy is needed only for arrays."""

from __future__ import annotations

import io
import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from workers.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Client:
    """A client that asks a server for predictions.

    Args:
        url: Address of the server, for example http://127.0.0.1:8000.
        token: The server's token; "" if the server requires none.
        timeout_s: Seconds without data from the server after which a request fails.
        patience_s: Seconds for which a request is retried while the server returns status 503.

    Example:
        >>> Client("http://127.0.0.1:8000").predict(["digit.png"], "digits-45")  # doctest: +SKIP
    """

    def __init__(
        self, url: str, token: str = "", timeout_s: float = 120.0, patience_s: float = 60.0
    ):
        self.url = url.rstrip("/")
        self.token = token
        self.timeout_s = timeout_s
        self.patience_s = patience_s

    def predict(
        self,
        images: Sequence[str | os.PathLike[str] | bytes] | NDArray[np.uint8],
        tasks: str | Sequence[str | None] | None = None,
        rule: str = "refuse",
        top: int = 0,
    ) -> list[dict[str, Any]]:
        """Return one dict per image: class, probability, task, confidence and probabilities.

        Args:
            images: Paths or bytes of JPEG, PNG or WebP files, or an array uint8 (N, H, W, 3) or
                (N, 3, H, W).
            tasks: One task for all images, or a task or None for each image. None: the task is
                unknown.
            rule: How to choose the task of images without a task, if the method cannot infer it:
                `refuse`, `confident`, `entropy`, `nearest`, `ranpac` or `recommended` (see
                docs/serving.md).
            top: Number of probabilities per image, the largest first; 0: all.

        Raises:
            UserError: If the server refuses the request, with the server's message.
            OSError: If the server cannot be reached, or an image cannot be read.
        """
        if tasks is None or isinstance(tasks, str):
            tasks = [tasks]
        fields = [("rule", rule), ("top", str(top))]
        fields += [("tasks", task or "") for task in tasks]
        if hasattr(images, "dtype"):
            body, query = encode_npy(images), f"?{urllib.parse.urlencode(fields)}"
            content_type = "application/x-npy"
        else:
            query = ""
            body, content_type = encode_form(fields, [read_image(image) for image in images])
        answer = self.ask(f"/predict{query}", body, content_type)
        predictions: list[dict[str, Any]] = answer["predictions"]
        return predictions

    def tasks(self) -> dict[str, Any]:
        """Return the served tasks with their classes, and the limits of a request."""
        return self.ask("/tasks")

    def is_ready(self) -> bool:
        """Return whether the server is ready to predict; False if it cannot be reached."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=self.timeout_s):
                return True
        except OSError:
            return False

    def ask(self, path: str, body: bytes | None = None, content_type: str = "") -> dict[str, Any]:
        """Send a request and return the JSON answer.

        Args:
            path: Path of the route, with the query if it has one, for example `/tasks`.
            body: Body of a POST request. None: a GET request is sent.
            content_type: Type of the body.

        Raises:
            UserError: If the server refuses the request, with the server's message.
            OSError: If the server cannot be reached.
        """
        headers = {"Content-Type": content_type} if content_type else {}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        request = urllib.request.Request(f"{self.url}{path}", body, headers)
        deadline = time.monotonic() + self.patience_s
        while True:
            try:
                with urllib.request.urlopen(request, timeout=self.timeout_s) as response:
                    answer: dict[str, Any] = json.load(response)
                    return answer
            except urllib.error.HTTPError as error:
                with error:
                    seconds = error.headers.get("Retry-After", "")  # a proxy can send a date
                    wait_s = float(seconds) if seconds.isascii() and seconds.isdecimal() else 1.0
                    if error.code != 503 or time.monotonic() + wait_s > deadline:
                        raise UserError(read_message(error)) from None
            time.sleep(wait_s)


def read_message(error: urllib.error.HTTPError) -> str:
    """Return the message of an error response."""
    try:
        return str(json.load(error)["error"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered with status {error.code}; read the server's output"


def read_image(image: str | os.PathLike[str] | bytes) -> bytes:
    """Return the bytes of an image file."""
    if isinstance(image, bytes):
        return image
    with open(image, "rb") as stream:
        return stream.read()


def encode_npy(images: Any) -> bytes:
    """Return an array in `.npy` format."""
    import numpy as np

    stream = io.BytesIO()
    np.save(stream, np.ascontiguousarray(images), allow_pickle=False)
    return stream.getvalue()


def encode_form(fields: Sequence[tuple[str, str]], images: Sequence[bytes]) -> tuple[bytes, str]:
    """Return a multipart form with text fields and image files, and its content type."""
    boundary = uuid.uuid4().hex
    lines: list[bytes] = []
    for name, value in fields:
        head = f'Content-Disposition: form-data; name="{name}"'
        lines += [f"--{boundary}".encode(), head.encode(), b"", value.encode()]
    for image in images:
        head = 'Content-Disposition: form-data; name="images"; filename="image"'
        lines += [f"--{boundary}".encode(), head.encode(), b"", image]
    lines += [f"--{boundary}--".encode(), b""]
    return b"\r\n".join(lines), f"multipart/form-data; boundary={boundary}"
