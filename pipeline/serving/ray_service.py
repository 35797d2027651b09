"""Serve a bundle behind Ray Serve's own proxy on an existing cluster, as a RayService of KubeRay.

The manifest of the RayService names `application` as its import path. Requests have the same checks
and limits as with `accrete serve`, except that Ray Serve's proxy handles the connections.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from pydantic import BaseModel, Field
from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from pipeline.serving.application import count_running_replicas
from pipeline.serving.deployment import Deployment, make_predict
from pipeline.serving.http_server import Bounds, Front, Hosts
from pipeline.serving.serve_command import MAX_PIXELS, read_token
from workers.data.accelerator import DeviceName
from workers.serving.bundle import Bundle


class ServiceArguments(BaseModel):
    """The arguments (`args`) of the application.

    Args:
        bundle: Folder or URI that `accrete bundle --out` has written.
        hosts: Host names that clients may use, in addition to IP addresses and localhost.
        max_pixels: Maximum number of pixels of all images of a request.
        device: Device of the replicas.
    """

    bundle: str
    hosts: list[str] = Field(default_factory=list)
    max_pixels: int = Field(MAX_PIXELS, gt=0)
    device: DeviceName = "cpu"


@serve.deployment(max_ongoing_requests=Bounds.requests)
class Ingress:
    """Answers HTTP requests by asking the replicas of the model."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, model: DeploymentHandle[Any], hosts: list[str]
    ):
        tasks = await model.tasks.remote()
        count_replicas = partial(count_running_replicas, serve.get_replica_context().app_name)
        hosts_allowed = Hosts("", hosts)  # Ray Serve listens on all addresses of the node
        token = read_token("")  # from the environment
        self.front = Front(make_predict(model), tasks, hosts_allowed, count_replicas, token=token)

    async def __call__(self, request: Request) -> Response:
        """Return the answer to a request, with status 499 if the client has disconnected."""
        messages: list[Message] = []

        async def send(message: Message) -> None:
            messages.append(message)

        await self.front(request.scope, request.receive, send)
        if not messages:
            return Response(status_code=499)
        head, body = messages
        headers = {name.decode(): value.decode() for name, value in head["headers"]}
        return Response(body["body"], head["status"], headers)


def application(args: dict[str, Any]) -> Application:
    """Return the application that serves a bundle.

    Args:
        args: Values of `ServiceArguments`. Ray Serve does not validate them itself, because it does
            not evaluate string annotations, as in this module.
    """
    arguments = ServiceArguments.model_validate(args)
    open_model = partial(Bundle.open, arguments.bundle)
    model = Deployment.bind(  # type: ignore[attr-defined]
        open_model, arguments.max_pixels, arguments.device
    )
    ingress: Application = Ingress.bind(model, arguments.hosts)  # type: ignore[attr-defined]
    return ingress
