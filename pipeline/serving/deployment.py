"""A model folder behind Ray Serve.

Concurrent requests for many tasks share one batch, and limits bound what a request may cost.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import RayServeException, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle

from pipeline.serving.http_server import Bounds, Reply
from pipeline.serving.replicas import ReplicaSettings
from pipeline.serving.requests import RawRequest, parse_request
from workers.data import accelerator
from workers.errors import UserError
from workers.serving.bundle import Bundle
from workers.serving.images import Limits, PixelBudget
from workers.serving.input_counts import find_obstacle
from workers.serving.recorder import Recorder
from workers.serving.server import Answer, Predictor, Rule

ONGOING = 64  # requests that a replica works on
BUSY = 16  # requests of a replica from which on more replicas are started, where they may be
HEALTH_S = 1.0  # between two looks at each replica: a dead one is replaced after this time
BATCH_IMAGES = 64  # most that are computed together, of several requests
BATCH_WAIT_S = 0.005  # how long the first request of a batch waits for others
IMAGES = 64  # most in one request
IMAGE_BYTES = 16 << 20
READERS = min(4, os.cpu_count() or 1)  # requests that are decoded in parallel

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DecodedRequest:
    """One request. pixels: uint8 (n, 3, S, S). tasks: a task or None for each image."""

    pixels: NDArray[np.uint8]
    tasks: list[str | None]
    rule: Rule
    top: int


def assigned_gpus() -> float:
    """Return the number of GPUs, or the fraction of one, that Ray has assigned to this process.

    It is 1 if nothing is assigned, as without Ray.
    """
    if not ray.is_initialized():
        return 1.0
    return float(ray.get_runtime_context().get_assigned_resources().get("GPU") or 1.0)


def count_images(requests: Sequence[DecodedRequest]) -> int:
    """Return how many images some requests have together."""
    return sum(len(request.tasks) for request in requests)


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
    all images that are decoded at the same moment. device: `cpu` or `cuda`. record_in: the model
    folder in which inputs are counted; empty: none are.
    """

    def __init__(
        self,
        open_model: Callable[[], Bundle],
        total_pixels: int,
        device: accelerator.DeviceName = "cpu",
        record_in: str = "",
    ):
        chosen = accelerator.named_device(device)
        accelerator.limit_memory(chosen, assigned_gpus())
        accelerator.use_fp32()
        self.served = Predictor(open_model(), device=chosen)
        self.served.warm_up()
        self.limits = Limits(
            self.served.bundle.body["max_pixels"],
            total_pixels,
            self.served.bundle.value_range,
            images=IMAGES,
            image_bytes=IMAGE_BYTES,
            body_bytes=Bounds.body_bytes,
        )
        self.budget = PixelBudget(total_pixels)
        self.readers = ThreadPoolExecutor(READERS, "read")
        self.recorder: Recorder | None = None
        if record_in:
            obstacle = find_obstacle(record_in)  # the replica may be on another node
            if obstacle:
                logger.warning("inputs are not counted: %s", obstacle)
            else:
                self.recorder = Recorder(self.served, record_in)

    def __del__(self) -> None:
        """Write the last counts: Ray Serve calls this when a replica has answered its requests."""
        recorder: Recorder | None = getattr(self, "recorder", None)
        if recorder is not None:
            recorder.close()

    def tasks(self) -> dict[str, Any]:
        """Return the body of the answer to GET /tasks."""
        body = self.served.bundle.body
        return {
            "model": body["sha256"],
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

    async def predict(self, raw: RawRequest) -> Reply:
        """Answer POST /predict."""
        loop = asyncio.get_running_loop()
        is_cancelled = threading.Event()
        try:
            request = await loop.run_in_executor(self.readers, self.decode, raw, is_cancelled)
            answers = await self.answer_batch(request)
            if isinstance(answers, UserError):
                raise answers
        except asyncio.CancelledError:
            is_cancelled.set()
            raise
        except UserError as error:
            return Reply(400, {"error": " ".join(str(error).split())})
        return Reply(200, {"predictions": [answer.row() for answer in answers]})

    def decode(self, raw: RawRequest, is_cancelled: threading.Event) -> DecodedRequest:
        """Decode the images of a request. Raise `UserError` when it cannot be answered."""
        request = parse_request(raw)
        images = [*request.images]
        tasks = self.served.check_request(len(images), request.tasks, request.rule, request.top)
        pixels = self.served.pixels_of(images, self.limits, self.budget, is_cancelled.is_set)
        return DecodedRequest(pixels, tasks, request.rule, self.served.limit_top(request.top))

    @serve.batch(
        max_batch_size=BATCH_IMAGES,
        batch_wait_timeout_s=BATCH_WAIT_S,
        batch_size_fn=count_images,
    )
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


def predict_of(handle: DeploymentHandle[Any]) -> Callable[[RawRequest], Awaitable[Reply]]:
    """Return a function that asks a replica, and another one if that died meanwhile.

    Its reply has status 503 when the second one died too, or when there is no room.
    """

    async def predict(request: RawRequest) -> Reply:
        try:
            try:
                return await ask(handle, request)
            except (RayActorError, ReplicaUnavailableError):
                return await ask(handle, request)  # a prediction has no effect: it may run twice
        except (RayError, RayServeException) as error:
            return Reply(
                503,
                {
                    "error": f"the model cannot answer now ({type(error).__name__}); "
                    "send this request again later"
                },
            )

    return predict


async def ask(handle: DeploymentHandle[Any], request: RawRequest) -> Reply:
    """Return the reply of a replica, which drops the request when this is cancelled."""
    response = handle.predict.remote(request)
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
