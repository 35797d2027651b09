"""The OpenAPI document of the HTTP server: pydantic models of requests and answers, and the routes.

The models are only a description: `pipeline.serving.requests.parse_request` parses requests, and
`http_server.Front` answers them. FastAPI is not used: with its routing and middleware, a request
took 1.2 to 1.5 times as much CPU time, and its OpenAPI documents declare error responses with the
content type of the successful response.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import models_json_schema

from pipeline.serving.requests import ARRAY, FORM, OPTIONS
from workers.serving.model_file import Rule

FILE = "A JPEG, PNG or WebP file."


# ---- requests ------------------------------------------------------------------------------------
class RequestFields(BaseModel):
    """Fields of every kind of request."""

    model_config = ConfigDict(extra="forbid")

    rule: Rule = Field(
        "refuse",
        description="For images without a task if the model cannot infer it: refuse them, or take "
        "the task with the most probable class (confident), the least entropy (entropy), the "
        "nearest class mean (nearest), or the best class of a ridge regression on the frozen "
        "backbone (ranpac); recommended: the rule that was right most often.",
    )
    top: int = Field(0, ge=0, description="Number of classes in `probabilities`; 0: all.")


class JsonBody(RequestFields):
    """A request as JSON."""

    images: list[
        Annotated[str, Field(description=FILE, json_schema_extra={"contentEncoding": "base64"})]
    ] = Field(min_length=1)
    tasks: str | list[str | None] | None = Field(
        None, description="A task for all images, or one for each; null or empty if it is unknown."
    )


class FormBody(RequestFields):
    """A request as a form with files."""

    images: list[
        Annotated[str, Field(description=FILE, json_schema_extra={"format": "binary"})]
    ] = Field(min_length=1)
    tasks: list[str] = Field([], description="Once for all images, or once for each.")


# ---- answers -------------------------------------------------------------------------------------
class Prediction(BaseModel):
    """The answer to one image."""

    class_: str = Field(alias="class")
    probability: float = Field(ge=0, le=1)
    task: str = Field(
        description="The task of that class; empty if the inferred mask belongs to no task."
    )
    confidence: float = Field(
        ge=0, le=1, description="How certain the task is; 1 if the request named it."
    )
    probabilities: dict[str, float] = Field(description="By class, the largest first.")


class Predictions(BaseModel):
    """The answer of POST /predict."""

    predictions: list[Prediction]


class Task(BaseModel):
    """A served task."""

    name: str
    classes: list[str]


class RequestLimits(BaseModel):
    """Limits of one request."""

    images: int
    pixels: int
    bytes: int


class Tasks(BaseModel):
    """The answer of GET /tasks."""

    model: str = Field(description="A digest that changes with the model.")
    method: str
    scenario: Literal["task", "class", "domain"]
    infers: bool = Field(description="Whether a request may leave out tasks.")
    tasks: list[Task]
    limits: RequestLimits


class Health(BaseModel):
    """The answer of GET /health."""

    status: Literal["ok"]


class Error(BaseModel):
    """The answer to a refused request."""

    error: str


# ---- routes --------------------------------------------------------------------------------------
REFUSALS = {
    400: "The request cannot be answered as it is.",
    401: "The token is missing or wrong.",
    403: "A page of another site sent the request.",
    408: "The body arrives too slowly.",
    413: "The body is too large.",
    421: "The host is not served here.",
    503: "There is no room, or no replica can answer; repeat the request after Retry-After.",
    504: "There was no answer in time.",
}


@cache
def build_document() -> dict[str, Any]:
    """Return the OpenAPI document, which is the answer to GET /openapi.json."""
    models = (Predictions, Tasks, Health, Error)
    references, schemas = models_json_schema(
        [(model, "serialization") for model in models], ref_template="#/components/schemas/{model}"
    )
    predictions, tasks, health, error = (references[model, "serialization"] for model in models)
    text = {"type": "string"}

    def describe(
        operation: str,
        summary: str,
        answer: str,
        schema: dict[str, Any],
        kind: str = "application/json",
        refusals: Iterable[int] = (401, 403, 421),
        **more: Any,
    ) -> dict[str, Any]:
        """Return the OpenAPI operation of a route. `kind` is the content type of the answer."""
        responses = {"200": {"description": answer, "content": {kind: {"schema": schema}}}}
        for status in refusals:
            content = {"application/json": {"schema": error}}
            responses[str(status)] = {"description": REFUSALS[status], "content": content}
        return {"operationId": operation, "summary": summary, "responses": responses, **more}

    get = {
        "/tasks": describe("tasks", "Tasks, classes and limits", "The served model.", tasks),
        "/health": describe(
            "health",
            "Whether a replica can answer",
            "A replica can answer.",
            health,
            refusals=(403, 421, 503),
            security=[{}],
        ),
        "/metrics": describe("metrics", "Metrics for Prometheus", "Metrics.", text, "text/plain"),
        "/openapi.json": describe("openapi", "This description", "OpenAPI.", {"type": "object"}),
        "/": describe("page", "A page for people", "HTML.", text, "text/html"),
    }
    predict = describe(
        "predict",
        "Classify images",
        "A prediction for each image.",
        predictions,
        refusals=REFUSALS,
        **describe_requests(),
    )
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Accrete: a served model",
            "version": "1",
            "description": "One model that answers for several tasks of image classification.",
        },
        "security": [{}, {"token": []}],  # a server without a token requires none
        "paths": {
            "/predict": {"post": predict},
            **{path: {"get": operation} for path, operation in get.items()},
        },
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "schemas": schemas["$defs"],
        },
    }


def describe_requests() -> dict[str, Any]:
    """Return the parameters and bodies of POST /predict, which `parse_request` parses."""
    form = FormBody.model_json_schema()
    query = {"in": "query", "description": "Only for an array.", "explode": True}
    parameters = [{"name": name, "schema": form["properties"][name], **query} for name in OPTIONS]
    array = {
        "type": "string",
        "format": "binary",
        "description": "An array uint8 (N, H, W, 3) or (N, 3, H, W), as numpy.save writes it.",
    }
    bodies = {"application/json": JsonBody.model_json_schema(), FORM: form, ARRAY: array}
    content = {kind: {"schema": schema} for kind, schema in bodies.items()}
    return {"parameters": parameters, "requestBody": {"required": True, "content": content}}
