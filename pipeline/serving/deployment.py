"""A model folder behind Ray Serve: concurrent requests for many tasks meet in one batch, and a
stranger's request costs little."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from pipeline.serving.http_server import Bounds, Reply
from workers.errors import UserError
from workers.serving.images import Limits, PixelBudget, pixels_of
from workers.serving.server import Answer, Predictor, Rule

APPLICATION = "accrete"
ONGOING = 64  # requests that the replica works on
TOGETHER, WAIT_S = 32, 0.005  # requests in a batch, and how long the first waits for others
IMAGES, IMAGE_BYTES = 64, 16 << 20
READERS = min(4, os.cpu_count() or 1)  # requests that are decoded side by side
# lists and objects in a body: each takes memory before anything else is known of it
PARTS = 1 << 22
FIELDS = {"images", "tasks", "rule", "top"}


@dataclass(frozen=True)
class Asked:
    """One request, decoded."""

    pixels: NDArray[np.uint8]
    tasks: list[str | None]
    rule: Rule
    top: int


@serve.deployment(max_ongoing_requests=ONGOING, max_queued_requests=Bounds.requests)
class Deployment:
    """One replica: one backbone. folder: of the bundle. total_pixels: most of all images of a
    request, and of all decoded at the same moment."""

    def __init__(self, folder: str, total_pixels: int):
        self.served = Predictor.open(folder)
        self.limits = Limits(
            self.served.bundle.body["max_pixels"],
            total_pixels,
            images=IMAGES,
            image_bytes=IMAGE_BYTES,
            body_bytes=Bounds.body_bytes,
        )
        self.budget = PixelBudget(total_pixels)
        self.readers = ThreadPoolExecutor(READERS, "read")

    def tasks(self) -> dict[str, Any]:
        """What GET /tasks answers."""
        body = self.served.bundle.body
        return {
            "method": body["method"],
            "scenario": body["scenario"],
            "infers": self.served.infers,
            "tasks": [{"name": t.name, "classes": list(t.classes)} for t in self.served.tasks],
            "limits": {
                "images": IMAGES,
                "pixels": self.limits.total_pixels,
                "bytes": Bounds.body_bytes,
            },
        }

    async def predict(self, data: bytes) -> Reply:
        """The answer to the body of POST /predict."""
        loop = asyncio.get_running_loop()
        try:
            found = await self.together(await loop.run_in_executor(self.readers, self.read, data))
            if isinstance(found, UserError):
                raise found
        except UserError as error:
            return Reply(400, {"error": " ".join(str(error).split())})
        return Reply(200, {"predictions": [answer.row() for answer in found]})

    def read(self, data: bytes) -> Asked:
        """Raises UserError where it is no request that can be answered."""
        body = request_of(data)
        rule, top = body.get("rule", "refuse"), body.get("top", 0)
        tasks = self.served.checked(len(body["images"]), body.get("tasks"), rule, top)
        return Asked(
            pixels_of(body["images"], self.served.augment.size_in, self.limits, self.budget),
            tasks,
            rule,
            self.served.bounded(top),
        )

    @serve.batch(max_batch_size=TOGETHER, batch_wait_timeout_s=WAIT_S)
    async def together(self, asked: list[Asked]) -> list[list[Answer] | UserError]:
        """Requests of the same moment, whatever their tasks."""
        return await asyncio.to_thread(answered, self.served, asked)


def predict_of(handle: DeploymentHandle[Any]) -> Callable[[bytes], Awaitable[Reply]]:
    """Asks the replica; one that died or has no room is no error of the server."""

    async def predict(data: bytes) -> Reply:
        response = handle.predict.remote(data)
        try:
            reply: Reply = await response
            return reply
        except asyncio.CancelledError:
            response.cancel()  # type: ignore[no-untyped-call]
            raise
        except (RayError, RayServeException) as error:
            return Reply(
                503,
                {
                    "error": f"the model cannot answer now ({type(error).__name__}); send this "
                    "request again later"
                },
            )

    return predict


def is_running() -> bool:
    """Whether there is a replica that answers."""
    application = serve.status().applications.get(APPLICATION)
    return application is not None and application.status == "RUNNING"


def answered(served: Predictor, asked: Sequence[Asked]) -> list[list[Answer] | UserError]:
    """The answers of each request, or why there are none. Requests with the same rule go through
    the network together."""
    found: list[list[Answer] | UserError] = [[] for _ in asked]
    parts: dict[Any, list[int]] = {}
    for place, one in enumerate(asked):
        parts.setdefault((one.rule, one.top) if served.mixes else place, []).append(place)
    for places in parts.values():
        first = asked[places[0]]
        try:
            answers = served.answers(
                np.concatenate([asked[p].pixels for p in places]),
                [t for p in places for t in asked[p].tasks],
                first.rule,
                first.top,
            )
        except UserError as error:
            for place in places:
                found[place] = error
            continue
        start = 0
        for place in places:
            found[place] = answers[start : start + len(asked[place].tasks)]
            start += len(asked[place].tasks)
    return found


def request_of(data: bytes) -> dict[str, Any]:
    """JSON with `images`, and if wanted `tasks`, `rule`, `top`. Raises UserError."""
    shape = '{"images": [BASE64, ...], "tasks": NAME or [NAME, ...]}'
    if data.count(b"[") + data.count(b"{") > PARTS:
        raise UserError(
            f"the body holds more than {PARTS} lists and objects; send images as base64"
        )
    try:
        body = json.loads(data, parse_constant=_refuse_constant)
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        if "digits" in str(error):  # of Python's limit for whole numbers
            raise UserError(
                "the body holds a number of thousands of digits; send none that long"
            ) from None
        raise UserError(f"the body is not JSON; send {shape}") from None
    if not isinstance(body, dict) or not isinstance(body.get("images"), list) or not body["images"]:
        raise UserError(f"the body has no list of images; send {shape}")
    unknown = sorted(set(body) - FIELDS)
    if unknown:
        raise UserError(
            f"the body has a field {unknown[0][:80]!r}; it may have {', '.join(sorted(FIELDS))}"
        )
    tasks = body.get("tasks")
    if not isinstance(tasks, (str, list, type(None))) or not all(
        isinstance(t, (str, type(None))) for t in tasks or ()
    ):
        raise UserError("tasks must be a name, or a list with a name or null for each image")
    return body


def _refuse_constant(name: str) -> Any:
    raise UserError(f"the body holds {name}, which is not JSON; send finite numbers")
