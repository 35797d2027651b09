"""A small client of a server that `serve` started. It needs NumPy only for arrays."""

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
    """Asks a server for predictions.

    url: of the server, such as http://127.0.0.1:8000. token: what the server asks for, if it does.
    patience_s: how long a request is repeated while the server answers 503.
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
        """Return class, probability, task, confidence and probabilities of each image.

        images: paths or bytes of JPEG, PNG or WebP files, or an array uint8 (N, H, W, 3) or
        (N, 3, H, W). tasks, rule, top: as in a request. Raise `UserError` with the server's
        sentence when it does not answer, and `OSError` when it cannot be reached.
        """
        if tasks is None or isinstance(tasks, str):
            tasks = [tasks]
        fields = [("rule", rule), ("top", str(top))]
        fields += [("tasks", task or "") for task in tasks]
        if hasattr(images, "dtype"):
            body, query = npy_bytes(images), f"?{urllib.parse.urlencode(fields)}"
            content_type = "application/x-npy"
        else:
            query = ""
            body, content_type = form_bytes(fields, [file_bytes(image) for image in images])
        answer = self.ask(f"/predict{query}", body, content_type)
        predictions: list[dict[str, Any]] = answer["predictions"]
        return predictions

    def tasks(self) -> dict[str, Any]:
        """Return the tasks that are served, with their classes, and what a request may have."""
        return self.ask("/tasks")

    def is_ready(self) -> bool:
        """Return whether the server can answer now."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=self.timeout_s):
                return True
        except OSError:
            return False

    def ask(self, path: str, body: bytes | None = None, content_type: str = "") -> dict[str, Any]:
        """Return the answer of a route. Raise as `predict` does. body: None asks by GET."""
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
                    wait_s = float(error.headers.get("Retry-After", "1"))
                    if error.code != 503 or time.monotonic() + wait_s > deadline:
                        raise UserError(sentence_of(error)) from None
            time.sleep(wait_s)


def sentence_of(error: urllib.error.HTTPError) -> str:
    """Return the sentence of an answer with an error's status."""
    try:
        return str(json.load(error)["error"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered with status {error.code}; look at its output"


def file_bytes(image: str | os.PathLike[str] | bytes) -> bytes:
    """Return the bytes of an image file."""
    if isinstance(image, bytes):
        return image
    with open(image, "rb") as stream:
        return stream.read()


def npy_bytes(images: Any) -> bytes:
    """Return an array as a `.npy` file."""
    import numpy as np  # a client of files alone needs none

    stream = io.BytesIO()
    np.save(stream, np.ascontiguousarray(images), allow_pickle=False)
    return stream.getvalue()


def form_bytes(fields: Sequence[tuple[str, str]], images: Sequence[bytes]) -> tuple[bytes, str]:
    """Return a form with fields and image files, and its content type."""
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
