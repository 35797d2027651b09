"""A model folder behind HTTP, by Ray Serve: concurrent requests for many tasks meet in one batch, and a stranger's request costs little."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse

from workers.data.images import Limits, pixels_of
from workers.errors import UserError
from workers.serve import Answer, Rule, Served

ONGOING, QUEUED = 64, 256  # requests that are worked on, and that wait; more are told at once to come back later (503)
TOGETHER, WAIT_S = 32, 0.005  # requests in a batch, and how long the first waits for others
IMAGES, IMAGE_BYTES, BODY_BYTES = 64, 16 << 20, 32 << 20
LISTS = 1 << 22  # in the body: each takes memory before anything else is known of it
FIELDS = {"images", "tasks", "rule", "top"}


class Refused(UserError):
    """A request that cannot be answered, with its HTTP status."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Asked:
    """One request, decoded."""

    pixels: NDArray[np.uint8]
    tasks: list[str | None]
    rule: Rule
    top: int


@serve.deployment(max_ongoing_requests=ONGOING, max_queued_requests=QUEUED)
class Deployment:
    """One replica: one backbone. folder: of the bundle."""

    def __init__(self, folder: str):
        self.served = Served.open(folder)
        self.limits = Limits(self.served.bundle.body["max_pixels"], images=IMAGES, image_bytes=IMAGE_BYTES, body_bytes=BODY_BYTES)

    async def __call__(self, request: Request) -> JSONResponse:
        try:
            return JSONResponse(await self.answer(request))
        except UserError as error:
            return JSONResponse({"error": " ".join(str(error).split())}, error.status if isinstance(error, Refused) else 400)

    async def answer(self, request: Request) -> dict[str, Any]:
        """Raises UserError where the request cannot be answered."""
        wanted = request.method, request.url.path
        if wanted == ("GET", "/health"):
            return {"status": "ok"}
        if wanted == ("GET", "/tasks"):
            body = self.served.bundle.body
            return {"method": body["method"], "scenario": body["scenario"], "infers": self.served.infers,
                    "tasks": [{"name": t.name, "classes": list(t.classes)} for t in self.served.tasks]}
        if wanted != ("POST", "/predict"):
            raise Refused(404, f"there is no {wanted[0]} {wanted[1][:80]}; there are POST /predict, GET /tasks and GET /health")
        found = await self.together(await asyncio.to_thread(self.read, await body_of(request)))
        if isinstance(found, UserError):
            raise found
        return {"predictions": [answer.row() for answer in found]}

    def read(self, data: bytes) -> Asked:
        """Raises UserError where it is no request that can be answered."""
        body = request_of(data)
        tasks = self.served.checked(len(body["images"]), body.get("tasks"), body.get("rule", "refuse"), body.get("top", 0))
        return Asked(pixels_of(body["images"], self.served.augment.size_in, self.limits), tasks, body.get("rule", "refuse"), body.get("top", 0))

    @serve.batch(max_batch_size=TOGETHER, batch_wait_timeout_s=WAIT_S)
    async def together(self, asked: list[Asked]) -> list[list[Answer] | UserError]:
        """Requests of the same moment, whatever their tasks."""
        return await asyncio.to_thread(answered, self.served, asked)


def answered(served: Served, asked: Sequence[Asked]) -> list[list[Answer] | UserError]:
    """The answers of each request, or why there are none. Requests with the same rule go through the network together."""
    found: list[list[Answer] | UserError] = [[] for _ in asked]
    parts: dict[Any, list[int]] = {}
    for place, one in enumerate(asked):
        parts.setdefault((one.rule, one.top) if served.mixes else place, []).append(place)
    for places in parts.values():
        first = asked[places[0]]
        try:
            answers = served.answers(np.concatenate([asked[p].pixels for p in places]), [t for p in places for t in asked[p].tasks], first.rule, first.top)
        except UserError as error:
            for place in places:
                found[place] = error
            continue
        start = 0
        for place in places:
            found[place] = answers[start : start + len(asked[place].tasks)]
            start += len(asked[place].tasks)
    return found


async def body_of(request: Request) -> bytes:
    """Raises Refused as soon as there is too much."""
    large = Refused(413, f"the body takes more than {BODY_BYTES} bytes; send fewer or smaller images")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > BODY_BYTES:
        raise large
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > BODY_BYTES:
            raise large
    return bytes(data)


def request_of(data: bytes) -> dict[str, Any]:
    """JSON with `images`, and if wanted `tasks`, `rule`, `top`. Raises UserError."""
    shape = '{"images": [BASE64, ...], "tasks": NAME or [NAME, ...]}'
    if data.count(b"[") > LISTS:
        raise UserError(f"the body holds more than {LISTS} lists; send images as base64")
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        raise UserError(f"the body is not JSON; send {shape}") from None
    if not isinstance(body, dict) or not isinstance(body.get("images"), list) or not body["images"]:
        raise UserError(f"the body has no list of images; send {shape}")
    unknown = sorted(set(body) - FIELDS)
    if unknown:
        raise UserError(f"the body has a field {unknown[0][:80]!r}; it may have {', '.join(sorted(FIELDS))}")
    tasks = body.get("tasks")
    if not isinstance(tasks, (str, list, type(None))) or not all(isinstance(t, (str, type(None))) for t in tasks or ()):
        raise UserError("tasks must be a name, or a list with a name or null for each image")
    return body
