"""A model folder behind Ray Serve.

Concurrent requests for many tasks share one batch, and limits bound what a request may cost.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import RayServeException, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle

from pipeline.serving.http_server import Bounds, Reply
from pipeline.serving.replicas import ReplicaSettings
from workers.errors import UserError
from workers.serving.bundle import Bundle
from workers.serving.images import Limits, PixelBudget
from workers.serving.server import Answer, Predictor, Rule

ONGOING = 64  # requests that a replica works on
BUSY = 16  # requests of a replica from which on more replicas are started, where they may be
HEALTH_S = 1.0  # between two looks at each replica: a dead one is replaced after this time
BATCH_REQUESTS = 32
BATCH_WAIT_S = 0.005  # how long the first request of a batch waits for others
IMAGES = 64  # most in one request
IMAGE_BYTES = 16 << 20
READERS = min(4, os.cpu_count() or 1)  # requests that are decoded in parallel
# Most lists and objects in a body: each takes memory before the body can be checked.
PARTS = 1 << 22
FIELDS = {"images", "tasks", "rule", "top"}


@dataclass(frozen=True)
class DecodedRequest:
    """One request. pixels: uint8 (n, 3, S, S). tasks: a task or None for each image."""

    pixels: NDArray[np.uint8]
    tasks: list[str | None]
    rule: Rule
    top: int


@serve.deployment(
    max_ongoing_requests=ONGOING,
    max_queued_requests=Bounds.requests,
    health_check_period_s=HEALTH_S,
    graceful_shutdown_timeout_s=Bounds.answer_s,
    graceful_shutdown_wait_loop_s=0.5,
    max_surge_percent=50,  # a replica of the next model is ready before one of the last ends
)
class Deployment:
    """One replica, which holds one backbone.

    open_model: returns the bundle. total_pixels: the most pixels of one request's images, and of
    all images that are decoded at the same moment. device: `cpu` or `cuda`.
    """

    def __init__(self, open_model: Callable[[], Bundle], total_pixels: int, device: str = "cpu"):
        self.served = Predictor(open_model(), device=torch.device(device))
        self.served.warm_up()
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
        """Return the body of the answer to GET /tasks."""
        body = self.served.bundle.body
        return {
            "method": body["method"],
            "scenario": body["scenario"],
            "infers": self.served.infers_task,
            "tasks": [{"name": t.name, "classes": list(t.classes)} for t in self.served.tasks],
            "limits": {
                "images": IMAGES,
                "pixels": self.limits.total_pixels,
                "bytes": Bounds.body_bytes,
            },
        }

    async def predict(self, data: bytes) -> Reply:
        """Answer the body of POST /predict."""
        loop = asyncio.get_running_loop()
        try:
            request = await loop.run_in_executor(self.readers, self.decode, data)
            answers = await self.answer_batch(request)
            if isinstance(answers, UserError):
                raise answers
        except UserError as error:
            return Reply(400, {"error": " ".join(str(error).split())})
        return Reply(200, {"predictions": [answer.row() for answer in answers]})

    def decode(self, data: bytes) -> DecodedRequest:
        """Decode the body of a request. Raise `UserError` when it cannot be answered."""
        body = parse_request(data)
        images = body["images"]
        rule = body.get("rule", "refuse")
        top = body.get("top", 0)
        tasks = self.served.check_request(len(images), body.get("tasks"), rule, top)
        pixels = self.served.pixels_of(images, self.limits, self.budget)
        return DecodedRequest(pixels, tasks, rule, self.served.limit_top(top))

    @serve.batch(max_batch_size=BATCH_REQUESTS, batch_wait_timeout_s=BATCH_WAIT_S)
    async def answer_batch(self, requests: list[DecodedRequest]) -> list[list[Answer] | UserError]:
        """Answer requests that arrived at the same moment, whatever their tasks."""
        return await asyncio.to_thread(answer_requests, self.served, requests)


def deployment_of(replicas: ReplicaSettings) -> Any:
    """Return the deployment with so many replicas."""
    number: dict[str, Any] = {"num_replicas": replicas.least}
    if replicas.is_scaled:
        limits = {"min_replicas": replicas.least, "max_replicas": replicas.most}
        number = {"autoscaling_config": {**limits, "target_ongoing_requests": BUSY}}
    resources = {"num_cpus": replicas.cpus, "num_gpus": replicas.gpus}
    return Deployment.options(ray_actor_options=resources, **number)  # type: ignore[attr-defined]


def predict_of(handle: DeploymentHandle[Any]) -> Callable[[bytes], Awaitable[Reply]]:
    """Return a function that asks a replica, and another one if that died meanwhile.

    Its reply has status 503 when the second one died too, or when there is no room.
    """

    async def predict(data: bytes) -> Reply:
        try:
            try:
                return await ask(handle, data)
            except (RayActorError, ReplicaUnavailableError):
                return await ask(handle, data)  # a prediction has no effect: it may run twice
        except (RayError, RayServeException) as error:
            return Reply(
                503,
                {
                    "error": f"the model cannot answer now ({type(error).__name__}); "
                    "send this request again later"
                },
            )

    return predict


async def ask(handle: DeploymentHandle[Any], data: bytes) -> Reply:
    """Return the reply of a replica, which drops the request when this is cancelled."""
    response = handle.predict.remote(data)
    try:
        reply: Reply = await response
        return reply
    except asyncio.CancelledError:
        response.cancel()  # type: ignore[no-untyped-call]
        raise


def answer_requests(
    served: Predictor, requests: Sequence[DecodedRequest]
) -> list[list[Answer] | UserError]:
    """Return the answers of each request, or the error that explains why there are none.

    Requests with the same rule go through the network together.
    """
    replies: list[list[Answer] | UserError] = [[] for _ in requests]
    for indices in batches_of(served, requests):
        batch = [requests[index] for index in indices]
        pixels = np.concatenate([request.pixels for request in batch])
        tasks = list(itertools.chain.from_iterable(request.tasks for request in batch))
        try:
            answers = served.answers(pixels, tasks, batch[0].rule, batch[0].top)
        except UserError as error:
            for index in indices:
                replies[index] = error
            continue
        start = 0
        for index in indices:
            end = start + len(requests[index].tasks)
            replies[index] = answers[start:end]
            start = end
    return replies


def batches_of(served: Predictor, requests: Sequence[DecodedRequest]) -> list[list[int]]:
    """Return the indices of the requests of each forward: those with equal rule and `top`.

    Each request is alone if the method infers one task from several images.
    """
    if not served.is_per_image:
        return [[index] for index in range(len(requests))]
    batches: dict[tuple[str, int], list[int]] = {}
    for index, request in enumerate(requests):
        batches.setdefault((request.rule, request.top), []).append(index)
    return list(batches.values())


def parse_request(data: bytes) -> dict[str, Any]:
    """Parse JSON with `images` and optionally `tasks`, `rule`, `top`. Raise `UserError` if not."""
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
    if not has_valid_tasks(body.get("tasks")):
        raise UserError("tasks must be a name, or a list with a name or null for each image")
    return body


def has_valid_tasks(tasks: object) -> bool:
    """Return whether `tasks` of a request is a name, null, or a list of these."""
    if tasks is None or isinstance(tasks, str):
        return True
    return isinstance(tasks, list) and all(task is None or isinstance(task, str) for task in tasks)


def _refuse_constant(name: str) -> Any:
    raise UserError(f"the body holds {name}, which is not JSON; send finite numbers")
