"""A model as a deployment of Ray Serve.

Concurrent requests, also for different tasks, share one batch. The time and memory of a request are
limited.
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
from workers.serving.model_file import Rule
from workers.serving.recorder import InputRecorder
from workers.serving.server import Answer, Predictor

MAX_ONGOING_REQUESTS = 64  # per replica
TARGET_ONGOING_REQUESTS = 16  # per replica; above this the autoscaler adds replicas
HEALTH_CHECK_S = 1.0  # seconds between two health checks of a replica
MAX_BATCH_IMAGES = 64  # in one forward pass, from several requests
BATCH_WAIT_S = 0.005  # seconds that the first request of a batch waits for other requests
MAX_IMAGES = 64  # per request
MAX_IMAGE_BYTES = 16 << 20  # per encoded image
DECODE_THREADS = min(4, os.cpu_count() or 1)  # each thread decodes the images of one request

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DecodedRequest:
    """A request with decoded images.

    Args:
        pixels: uint8 (n, 3, S, S), with the size S that the model reads.
        tasks: A task or None for each image.
        rule: Rule for images without a task.
        top: Number of probabilities per answer; 0: all.
    """

    pixels: NDArray[np.uint8]
    tasks: list[str | None]
    rule: Rule
    top: int


def get_assigned_gpus() -> float:
    """Return the number of GPUs, or the fraction of a GPU, that Ray assigned to this process.

    If no GPU is assigned, for example without Ray, the result is 1.0.
    """
    if not ray.is_initialized():
        return 1.0
    return float(ray.get_runtime_context().get_assigned_resources().get("GPU") or 1.0)


def count_images(requests: Sequence[DecodedRequest]) -> int:
    """Return the total number of images of some requests."""
    return sum(len(request.tasks) for request in requests)


@serve.deployment(
    max_ongoing_requests=MAX_ONGOING_REQUESTS,
    max_queued_requests=Bounds.requests,
    health_check_period_s=HEALTH_CHECK_S,
    graceful_shutdown_timeout_s=Bounds.answer_s,
    graceful_shutdown_wait_loop_s=0.5,
    max_surge_percent=50,  # start replicas of a new model before the previous ones end
)
class Deployment:
    """A replica of the model. It has one copy of the backbone.

    Args:
        open_model: Function that returns the bundle.
        total_pixels: Maximum number of pixels of all images of a request, and of all images that
            are decoded at a time.
        device: `cpu` or `cuda`.
        record_in: Model folder in which inputs are counted; "": inputs are not counted.
    """

    def __init__(
        self,
        open_model: Callable[[], Bundle],
        total_pixels: int,
        device: accelerator.DeviceName = "cpu",
        record_in: str = "",
    ):
        chosen = accelerator.make_named_device(device)
        accelerator.limit_memory(chosen, get_assigned_gpus())
        accelerator.use_fp32()
        self.served = Predictor(open_model(), device=chosen)
        self.served.warm_up()
        self.limits = Limits(
            self.served.bundle.body["max_pixels"],
            total_pixels,
            self.served.bundle.value_range,
            images=MAX_IMAGES,
            image_bytes=MAX_IMAGE_BYTES,
            body_bytes=Bounds.body_bytes,
        )
        self.budget = PixelBudget(total_pixels)
        self.decoders = ThreadPoolExecutor(DECODE_THREADS, "decode")
        self.recorder: InputRecorder | None = None
        if record_in:
            obstacle = find_obstacle(record_in)  # the replica may be on another node
            if obstacle:
                logger.warning("inputs are not counted: %s", obstacle)
            else:
                self.recorder = InputRecorder(self.served, record_in)

    def __del__(self) -> None:
        """Write the remaining counts. Ray Serve calls this after the last request of a replica."""
        recorder: InputRecorder | None = getattr(self, "recorder", None)
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
                "images": MAX_IMAGES,
                "pixels": self.limits.total_pixels,
                "bytes": Bounds.body_bytes,
            },
        }

    async def predict(self, raw: RawRequest) -> Reply:
        """Answer POST /predict, with status 400 if the request is invalid."""
        loop = asyncio.get_running_loop()
        is_cancelled = threading.Event()
        try:
            request = await loop.run_in_executor(self.decoders, self.decode, raw, is_cancelled)
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
        """Check a request and decode its images.

        Args:
            raw: The request.
            is_cancelled: Set if no client waits for the answer any longer. Then decoding stops.

        Raises:
            UserError: If the request is invalid or was cancelled.
        """
        request = parse_request(raw)
        images = [*request.images]
        tasks = self.served.check_request(len(images), request.tasks, request.rule, request.top)
        pixels = self.served.read_pixels(images, self.limits, self.budget, is_cancelled.is_set)
        return DecodedRequest(pixels, tasks, request.rule, self.served.limit_top(request.top))

    @serve.batch(
        max_batch_size=MAX_BATCH_IMAGES,
        batch_wait_timeout_s=BATCH_WAIT_S,
        batch_size_fn=count_images,
    )
    async def answer_batch(self, requests: list[DecodedRequest]) -> list[list[Answer] | UserError]:
        """Answer concurrent requests, which may be for different tasks."""
        return await asyncio.to_thread(answer_requests, self.served, requests)


def build_deployment(replicas: ReplicaSettings) -> Any:
    """Return `Deployment` with the given number and resources of replicas."""
    number: dict[str, Any] = {"num_replicas": replicas.minimum}
    if replicas.is_scaled:
        limits = {"min_replicas": replicas.minimum, "max_replicas": replicas.maximum}
        number = {
            "autoscaling_config": {**limits, "target_ongoing_requests": TARGET_ONGOING_REQUESTS}
        }
    resources = {"num_cpus": replicas.cpus, "num_gpus": replicas.gpus}
    return Deployment.options(ray_actor_options=resources, **number)  # type: ignore[attr-defined]


def make_predict(handle: DeploymentHandle[Any]) -> Callable[[RawRequest], Awaitable[Reply]]:
    """Return a function that sends a request to a replica, and sends it again if the replica dies.

    If the second replica dies too, or on any other error of Ray such as a full queue, the reply has
    status 503.
    """

    async def predict(request: RawRequest) -> Reply:
        try:
            try:
                return await ask(handle, request)
            except (RayActorError, ReplicaUnavailableError):
                return await ask(handle, request)  # predictions have no side effects
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
    """Return the reply of a replica. If this task is cancelled, cancel the request, too."""
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
    """Answer some requests. Requests with equal `rule` and `top` share forward passes.

    Args:
        served: The model.
        requests: Requests with decoded images.

    Returns:
        For each request, its answers, or an error of the forward passes that it shares.
    """
    replies: list[list[Answer] | UserError] = [[] for _ in requests]
    for indices in group_requests(served, requests):
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


def group_requests(served: Predictor, requests: Sequence[DecodedRequest]) -> list[list[int]]:
    """Group the indices of requests that can share forward passes: equal `rule` and `top`.

    If the method infers the task from all images of a request together, each request is a separate
    group.
    """
    if not served.is_per_image:
        return [[index] for index in range(len(requests))]
    batches: dict[tuple[str, int], list[int]] = {}
    for index, request in enumerate(requests):
        batches.setdefault((request.rule, request.top), []).append(index)
    return list(batches.values())
