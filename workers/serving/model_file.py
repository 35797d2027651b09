"""Schema, reading and writing of `model.json`, the description of a bundle.

This module does not import torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError

from workers.errors import UserError
from workers.job import BackboneSettings, Frozen, Task
from workers.plugins import MODULE_NAME
from workers.storage.artifact import compute_sha256, join, read_json, write_bytes

FORMAT = 1
MODEL, BACKBONE = "model.json", "backbone.safetensors"
REFERENCE = "reference.safetensors"  # see reference.py; optional
PLAIN = "[A-Za-z0-9][A-Za-z0-9_.-]*"  # names of tasks and steps, which are parts of file names
NAME = re.compile(PLAIN)
Plain = Annotated[str, Field(pattern=f"^{PLAIN}$")]
# without control characters, because these strings are printed to terminals
Shown = Annotated[str, Field(pattern=r"^[^\pC]{1,200}$")]
# FILE: names of files. PLACE: their paths, in which a part of the sha256 can follow the name (see
# versions.py). Both patterns allow only paths inside the folder.
FILE = rf"(backbone|reference|tasks/{PLAIN}|carried/{PLAIN})\.safetensors"
File = Annotated[str, Field(pattern=f"^{FILE}$")]
PLACE = rf"((backbone|reference)(-[0-9a-f]{{8,64}})?|tasks/{PLAIN}|carried/{PLAIN})\.safetensors"
Place = Annotated[str, Field(pattern=f"^{PLACE}$")]
ChoosingRule = Literal["confident", "entropy", "nearest", "ranpac"]  # see task_rules.py
Rule = Literal["refuse", "confident", "entropy", "nearest", "ranpac", "recommended"]
Rate = Annotated[float, Field(ge=0, le=1)]
Module = Annotated[str, Field(pattern=rf"^{MODULE_NAME}$", max_length=200)]
REMAKE = "write the folder again with `python -m pipeline bundle`"


class FileBody(Frozen):
    """Size and digest of a file. `at` is its path in the folder if the path is not its name."""

    bytes: NonNegativeInt
    sha256: str
    at: Place | None = None


class TaskBody(Frozen):
    """A served task. The fields are those of `Task`."""

    name: Plain
    classes: tuple[Shown, ...] = Field(min_length=1)
    card: str
    data: str
    role: Literal["task", "base"]


class RulesBody(Frozen):
    """Accuracy of each rule on images of `tasks`.

    Attributes:
        tasks: Names of the measured tasks.
        split: Split of the images.
        images: Number of images.
        with_task: Accuracy of the class if the task is given.
        accuracy: Rule -> accuracy of the class.
        task_accuracy: Rule -> accuracy of the task.
        recommended: The rule with the best accuracy of the class.
    """

    tasks: tuple[Plain, ...]
    split: Literal["val", "test"]
    images: PositiveInt
    with_task: Rate
    accuracy: dict[ChoosingRule, Rate]
    task_accuracy: dict[ChoosingRule, Rate]
    recommended: ChoosingRule


class Body(Frozen):
    """The schema of `model.json`. The file is validated because a folder may be untrusted.

    Attributes:
        carried: Step -> name of the file with its carried state.
        max_pixels: Maximum number of pixels of an image.
        range: Values of black and white, see `Bundle.value_range`.
        plugins: Modules that define the method.
        rules: Accuracy of the rules that choose a task. None: they were not measured.
        files: Name of a file -> its size, digest and path.
        sha256: Digest of all other fields.
    """

    format: int
    method: str
    settings: dict[str, Any]
    backbone: BackboneSettings
    backbone_digest: str
    scenario: Literal["task", "class", "domain"]
    seed: NonNegativeInt
    tasks: tuple[TaskBody, ...] = Field(min_length=1)
    carried: dict[Plain, File]
    preprocessing: dict[str, Any]
    max_pixels: PositiveInt
    range: tuple[float, float] | None = None
    provenance: dict[str, Any]
    plugins: tuple[Module, ...] = ()
    rules: RulesBody | None = None
    files: dict[File, FileBody]
    sha256: str


def read_model(uri: str, file: str = MODEL, remedy: str = REMAKE) -> dict[str, Any]:
    """Read and check `model.json`, or the file of an earlier version.

    Args:
        uri: The model folder.
        file: Path of the file, relative to `uri`.
        remedy: End of the error message if the file cannot be used.

    Returns:
        The content of the file.

    Raises:
        UserError: If the file is missing, changed or invalid.
    """
    model_uri = join(uri, file)
    try:
        body = read_json(model_uri)
    except UserError:  # the storage itself cannot be used
        raise
    except (OSError, ValueError) as error:
        reason = ""
        if not isinstance(error, FileNotFoundError):
            reason = f" ({getattr(error, 'strerror', None) or error})"
        raise UserError(
            f"{uri!r} is not a model folder: it has no readable {file}{reason}; make one with "
            "`python -m pipeline bundle`"
        ) from None
    if not isinstance(body, dict):
        raise UserError(f"{model_uri}: it was changed after it was written; {remedy}")
    version = body.get("format")
    if version not in (FORMAT, None):
        raise UserError(
            f"{model_uri}: its format is {version}, but this version reads {FORMAT}; {remedy}"
        )
    if version is None or body.get("sha256") != compute_sha256(body):
        raise UserError(f"{model_uri}: it was changed after it was written; {remedy}")
    try:
        Body.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        field_name = ".".join(map(str, first["loc"]))
        raise UserError(
            f"{model_uri}: {field_name} is {first['input']!r:.80} ({first['msg']}); {remedy}"
        ) from None
    expected = {BACKBONE, *body["carried"].values()}
    expected |= {state_file(task["name"]) for task in body["tasks"]}
    expected |= {REFERENCE} & body["files"].keys()
    difference = ", ".join(sorted(expected ^ body["files"].keys()))
    if difference:
        raise UserError(
            f"{model_uri}: its files do not match its tasks ({difference[:200]}); {remedy}"
        )
    return body


def task_body(task: Task) -> dict[str, Any]:
    """Return the entry of a task in `model.json`."""
    return {
        "name": task.name,
        "classes": list(task.classes),
        "card": task.card,
        "data": task.data,
        "role": task.role,
    }


def sealed(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a body as plain JSON values, with the sha256 of all other fields."""
    content = {name: value for name, value in body.items() if name != "sha256"}
    plain = json.loads(json.dumps(content, default=str))
    return {**plain, "sha256": compute_sha256(plain)}


def find_place(body: Mapping[str, Any], name: str) -> str:
    """Return the path of a file, relative to the folder.

    Args:
        body: Content of `model.json`.
        name: Name of the file.
    """
    return str(body["files"][name].get("at") or name)


def remove_places(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a body without `at`, for a folder in which the path of each file is its name."""
    files: dict[str, Any] = {}
    for name, info in body["files"].items():
        files[name] = {"bytes": info["bytes"], "sha256": info["sha256"]}
    return sealed({**body, "files": files})


def write_model(uri: str, body: Mapping[str, Any], file: str = MODEL) -> None:
    """Write `model.json`, or the file of a version, atomically.

    Args:
        uri: The model folder.
        body: The content.
        file: Path of the file, relative to `uri`.
    """
    write_bytes(join(uri, file), json.dumps(body, indent=1, sort_keys=True).encode())


def state_file(task: str) -> str:
    """Return the name of the file with the state of a task."""
    return f"tasks/{task}.safetensors"


def task_rows(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each served task: its name, number of classes and state size in bytes."""
    rows: list[dict[str, Any]] = []
    for task in body["tasks"]:
        info = body["files"][state_file(task["name"])]
        rows.append({"task": task["name"], "classes": len(task["classes"]), "bytes": info["bytes"]})
    return rows
