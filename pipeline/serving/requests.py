"""Bodies of POST /predict: JSON, a form with files, or an array. Each is checked before it is used.

Nothing in a body runs code: arrays are read without pickle.
"""

from __future__ import annotations

import io
import json
import math
import urllib.parse
from dataclasses import dataclass
from email.message import Message
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from workers.errors import UserError

# Most lists and objects in JSON: each takes memory before the body can be checked.
PARTS = 1 << 22
FORM_PARTS = 256  # most in a form, where each image and each task is one, and in an array
HEAD_BYTES = 4096  # of a part of a form
FIELDS = {"images", "tasks", "rule", "top"}
FORM = "multipart/form-data"
ARRAY = "application/x-npy"


class RawRequest(NamedTuple):
    """A request as it arrived. content_type: the header. query: what follows `?` in the address."""

    body: bytes
    content_type: str = ""
    query: str = ""


@dataclass(frozen=True)
class ParsedRequest:
    """A request whose fields have their types.

    images: base64 or nested lists of JSON, bytes of files, or an array uint8 (N, H, W, 3).
    tasks: a name, or a name or None for each image. rule, top: as `Predictor` checks them.
    """

    images: list[Any] | NDArray[np.uint8]
    tasks: str | list[str | None] | None
    rule: Any
    top: Any


def parse_request(request: RawRequest) -> ParsedRequest:
    """Return what a request asks. Raise `UserError` when its body is none that can be read."""
    kind = request.content_type.partition(";")[0].strip().lower()
    if kind == FORM:
        return parse_form(request.body, request.content_type)
    if kind == ARRAY:
        return parse_array(request.body, request.query)
    return parse_json(request.body)


# ---- JSON ----------------------------------------------------------------------------------------
def parse_json(data: bytes) -> ParsedRequest:
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
    check_fields(body)
    if not has_valid_tasks(body.get("tasks")):
        raise UserError("tasks must be a name, or a list with a name or null for each image")
    return ParsedRequest(
        body["images"], body.get("tasks"), body.get("rule", "refuse"), body.get("top", 0)
    )


def has_valid_tasks(tasks: object) -> bool:
    """Return whether `tasks` of a request is a name, null, or a list of these."""
    if tasks is None or isinstance(tasks, str):
        return True
    return isinstance(tasks, list) and all(task is None or isinstance(task, str) for task in tasks)


def check_fields(fields: Any) -> None:
    """Raise `UserError` when a request has a field that there is not."""
    unknown = sorted(set(fields) - FIELDS)
    if unknown:
        raise UserError(
            f"the body has a field {unknown[0][:80]!r}; it may have {', '.join(sorted(FIELDS))}"
        )


def _refuse_constant(name: str) -> Any:
    raise UserError(f"the body holds {name}, which is not JSON; send finite numbers")


# ---- forms ---------------------------------------------------------------------------------------
def parse_form(data: bytes, content_type: str) -> ParsedRequest:
    """Parse a form: a file `images` for each image, and fields `tasks`, `rule` and `top`.

    `tasks` stands once for all images, or once for each, empty where the task is not known. Raise
    `UserError` when the body is no such form.
    """
    fields: dict[str, list[bytes]] = {}
    for name, content in form_parts(data, content_type):
        fields.setdefault(name, []).append(content)
    check_fields(fields)
    if "images" not in fields:
        raise UserError("the form has no file `images`; send one for each image")
    values = {"rule": [], "top": [], "tasks": [], **fields}
    texts = {name: [text_of(value) for value in values[name]] for name in ("tasks", "rule", "top")}
    return ParsedRequest(fields["images"], *typed_fields(texts))


def form_parts(data: bytes, content_type: str) -> list[tuple[str, bytes]]:
    """Return name and content of each part of a form. Raise `UserError` when it is none."""
    boundary = parameter("content-type", content_type, "boundary")
    delimiter = b"\r\n--" + boundary.encode()
    if not boundary or (b"\r\n" + data).count(delimiter) > FORM_PARTS:
        raise UserError(
            f"the form has no boundary in its Content-Type, or more than {FORM_PARTS} parts; "
            "send several requests"
        )
    _, *parts = (b"\r\n" + data).split(delimiter)
    if not parts or not parts[-1].startswith(b"--"):
        raise UserError("the form has no end; send a whole one")
    named_parts = []
    for part in parts[:-1]:
        head, separator, content = part.partition(b"\r\n\r\n")
        if not separator or len(head) > HEAD_BYTES:
            raise UserError("a part of the form has no head; give each a Content-Disposition")
        named_parts.append((part_name(head), content))
    return named_parts


def part_name(head: bytes) -> str:
    """Return the name of a part of a form from its head; empty where it has none."""
    for line in head.decode("utf-8", "replace").split("\r\n"):
        field, _, value = line.partition(":")
        if field.strip().lower() == "content-disposition":
            return parameter("content-disposition", value, "name")
    return ""


def parameter(field: str, value: str, name: str) -> str:
    """Return a parameter of a header, without its quotes; empty where there is none."""
    message = Message()
    message[field] = " ".join(value.split())
    text = message.get_param(name, "", field)
    if isinstance(text, str):
        return text
    return ""


def text_of(value: bytes) -> str:
    """Return a field of a form as text. Raise `UserError` when it is none."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise UserError("a field of the form is not UTF-8 text; send names as UTF-8") from None


def typed_fields(texts: dict[str, list[str]]) -> tuple[str | list[str | None] | None, str, int]:
    """Return tasks, rule and top from texts by field. Raise `UserError` when they are none."""
    tasks: str | list[str | None] | None = None
    if len(texts["tasks"]) == 1:
        tasks = texts["tasks"][0] or None
    elif texts["tasks"]:
        tasks = [name or None for name in texts["tasks"]]
    rule = [*texts["rule"], "refuse"][0]
    top = [*texts["top"], "0"][0]
    if not top.isascii() or not top.isdecimal() or len(top) > 18:
        raise UserError(f"top is {top!r:.80}; give how many probabilities you want, 0 for all")
    return tasks, rule, int(top)


# ---- arrays --------------------------------------------------------------------------------------
def parse_array(data: bytes, query: str) -> ParsedRequest:
    """Parse an array in NumPy's format: uint8 (N, H, W, 3) or (N, 3, H, W).

    query: `tasks`, `rule` and `top`, as in a form. Raise `UserError` when it is no such array.
    """
    try:
        fields = urllib.parse.parse_qs(query, keep_blank_values=True, max_num_fields=FORM_PARTS)
    except ValueError:
        raise UserError(f"the address has more than {FORM_PARTS} fields; send fewer") from None
    check_fields([*fields])
    texts = {name: fields.get(name, []) for name in ("tasks", "rule", "top")}
    return ParsedRequest(array_of(data), *typed_fields(texts))


def array_of(data: bytes) -> NDArray[np.uint8]:
    """Return the images of a `.npy` file as uint8 (N, H, W, 3).

    The header's shape is compared with the bytes that there are, before anything is allocated.
    """
    need = "uint8 (N, H, W, 3) or (N, 3, H, W), by numpy.save"
    stream = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(stream)
        read_header = np.lib.format.read_array_header_1_0
        if version != (1, 0):
            read_header = np.lib.format.read_array_header_2_0
        shape, is_fortran, dtype = read_header(stream)
    except Exception:  # a header is a literal of Python, which fails in many ways
        raise UserError(f"the body is no array; send {need}") from None
    pixels = memoryview(data)[stream.tell() :]
    are_numbers = all(type(side) is int for side in shape)  # True is 1 for numpy
    is_image = are_numbers and len(shape) == 4 and 3 in (shape[1], shape[3]) and min(shape) > 0
    if dtype != np.uint8 or is_fortran or not is_image:
        raise UserError(f"the array is {dtype} {shape!r:.80}; send {need}")
    if shape[0] > FORM_PARTS:  # each image becomes an object of Python
        raise UserError(
            f"{shape[0]} images in one request are more than {FORM_PARTS}; send several requests"
        )
    if math.prod(shape) != len(pixels):
        raise UserError(
            f"the array has {len(pixels)} bytes, and its shape {shape!r:.80} needs others; "
            "send it whole"
        )
    images = np.frombuffer(pixels, np.uint8).reshape(shape)
    if shape[3] != 3:
        images = images.transpose(0, 2, 3, 1)
    return images
