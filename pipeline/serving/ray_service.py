"""A bundle behind Ray Serve's own proxy, on a cluster that is there: what a RayService imports.

Limits and checks of requests are those of `accrete serve`.
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

from pipeline.serving.application import count_running
from pipeline.serving.deployment import Deployment, predict_of
from pipeline.serving.http_server import Bounds, Front, Hosts
from pipeline.serving.serve_command import MAX_PIXELS, token_of
from workers.data.accelerator import DeviceName
from workers.serving.bundle import Bundle


class ServiceArguments(BaseModel):
    """The `args` of the application.

    bundle: folder or URI that `accrete bundle --out` wrote. hosts: names under which clients ask,
    beside addresses and localhost. max_pixels: of all images of a request together. device: of the
    replicas.
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
        count_replicas = partial(count_running, serve.get_replica_context().app_name)
        # Serve listens on all addresses of its node.
        hosts_allowed = Hosts("", hosts)
        token = token_of("")  # of the environment
        self.front = Front(predict_of(model), tasks, hosts_allowed, count_replicas, token=token)

    async def __call__(self, request: Request) -> Response:
        """Return the answer to a request; an empty one to a client that has left."""
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
    """Return the application that serves a bundle. args: values of `ServiceArguments`.

    Serve makes no model of them: it knows no annotation that is a text, as all of this module are.
    """
    arguments = ServiceArguments.model_validate(args)
    open_model = partial(Bundle.open, arguments.bundle)
    model = Deployment.bind(  # type: ignore[attr-defined]
        open_model, arguments.max_pixels, arguments.device
    )
    ingress: Application = Ingress.bind(model, arguments.hosts)  # type: ignore[attr-defined]
    return ingress
