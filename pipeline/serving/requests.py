"""Parse the bodies of POST /predict: JSON, a form with files, or an array.

A body cannot run code, because arrays are read without pickle.
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

# Maximum number of lists and objects in JSON: each takes memory before the body can be validated.
MAX_JSON_PARTS = 1 << 22
MAX_PARTS = 256  # images of an array, or parts of a form: one for each image, task and other field
MAX_FIELDS = MAX_PARTS + 2  # fields of a query: a task for each image, `rule` and `top`
MAX_HEAD_BYTES = 4096  # maximum size of the headers of one part of a form
OPTIONS = ("tasks", "rule", "top")
FIELDS = {"images", *OPTIONS}
FORM = "multipart/form-data"
ARRAY = "application/x-npy"


class RawRequest(NamedTuple):
    """A request before it is parsed.

    Args:
        body: The bytes of the body.
        content_type: The header `Content-Type`.
        query: The part of the address after `?`.
    """

    body: bytes
    content_type: str = ""
    query: str = ""


@dataclass(frozen=True)
class ParsedRequest:
    """A parsed request.

    Args:
        images: Base64 strings or nested lists (JSON), bytes of files (form), or an array uint8
            (N, H, W, 3).
        tasks: One name for all images, or a name or None for each image. None: the task is unknown.
        rule: How to choose the task of an image without a task. Not checked yet: see
            `Predictor.check_request`.
        top: Number of probabilities per image. Not checked yet: see `Predictor.check_request`.
    """

    images: list[Any] | NDArray[np.uint8]
    tasks: str | list[str | None] | None
    rule: Any
    top: Any


def parse_request(request: RawRequest) -> ParsedRequest:
    """Parse a request in the format of the content type: form, array, or otherwise JSON.

    Raises:
        UserError: If the body cannot be parsed.
    """
    kind = request.content_type.partition(";")[0].strip().lower()
    if kind == FORM:
        return parse_form(request.body, request.content_type)
    if kind == ARRAY:
        return parse_array(request.body, request.query)
    return parse_json(request.body)


# ---- JSON ----------------------------------------------------------------------------------------
def parse_json(data: bytes) -> ParsedRequest:
    """Parse JSON with `images` and optionally `tasks`, `rule` and `top`.

    Raises:
        UserError: If the body is not JSON, has no list of images, or has an unknown field or
            invalid `tasks`. The other values are not checked.
    """
    shape = '{"images": [BASE64, ...], "tasks": NAME or [NAME, ...]}'
    if data.count(b"[") + data.count(b"{") > MAX_JSON_PARTS:
        raise UserError(
            f"the body holds more than {MAX_JSON_PARTS} lists and objects; send images as base64"
        )
    try:
        body = json.loads(data, parse_constant=_refuse_constant)
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        if "digits" in str(error):  # Python's limit for integers
            raise UserError(
                "the body holds a number of thousands of digits; send shorter numbers"
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
    """Return whether the field `tasks` is a name, null, or a list of names and nulls."""
    if tasks is None or isinstance(tasks, str):
        return True
    return isinstance(tasks, list) and all(task is None or isinstance(task, str) for task in tasks)


def check_fields(fields: Any) -> None:
    """Raise `UserError` if the request has an unknown field."""
    unknown = sorted(set(fields) - FIELDS)
    if unknown:
        raise UserError(
            f"the body has a field {unknown[0][:80]!r}; it may have {', '.join(sorted(FIELDS))}"
        )


def _refuse_constant(name: str) -> Any:
    """Raise `UserError` for NaN and infinities, which Python's parser accepts."""
    raise UserError(f"the body holds {name}, which is not JSON; send finite numbers")


# ---- forms ---------------------------------------------------------------------------------------
def parse_form(data: bytes, content_type: str) -> ParsedRequest:
    """Parse a form with a file `images` for each image, and fields `tasks`, `rule` and `top`.

    Args:
        data: The body. The field `tasks` occurs once for all images, or once for each image. An
            empty value means that the task is unknown.
        content_type: The header `Content-Type`, which contains the boundary.

    Raises:
        UserError: If the body is not such a form.
    """
    fields: dict[str, list[bytes]] = {}
    for name, content in split_form(data, content_type):
        fields.setdefault(name, []).append(content)
    check_fields(fields)
    if "images" not in fields:
        raise UserError("the form has no file `images`; send one for each image")
    texts = {name: [*map(decode_text, fields.get(name, []))] for name in OPTIONS}
    return ParsedRequest(fields["images"], *convert_fields(texts))


def split_form(data: bytes, content_type: str) -> list[tuple[str, bytes]]:
    """Split a form into its parts.

    Returns:
        The name and the content of each part.

    Raises:
        UserError: If the body is not a complete form, or has too many parts.
    """
    boundary = get_parameter("content-type", content_type, "boundary")
    delimiter = b"\r\n--" + boundary.encode()
    # another delimiter is at the end of the form
    if not boundary or (b"\r\n" + data).count(delimiter) > MAX_PARTS + 1:
        raise UserError(
            f"the form has no boundary in its Content-Type, or more than {MAX_PARTS} parts; "
            "send several requests"
        )
    _, *parts = (b"\r\n" + data).split(delimiter)
    if not parts or not parts[-1].startswith(b"--"):
        raise UserError("the form has no end; send the complete form")
    named_parts = []
    for part in parts[:-1]:
        head, separator, content = part.partition(b"\r\n\r\n")
        if not separator or len(head) > MAX_HEAD_BYTES:
            raise UserError("a part of the form has no head; give each a Content-Disposition")
        named_parts.append((parse_part_name(head), content))
    return named_parts


def parse_part_name(head: bytes) -> str:
    """Return the name of a part of a form from its head, or "" if it has no name."""
    for line in head.decode("utf-8", "replace").split("\r\n"):
        field, _, value = line.partition(":")
        if field.strip().lower() == "content-disposition":
            return get_parameter("content-disposition", value, "name")
    return ""


def get_parameter(field: str, value: str, name: str) -> str:
    """Return the unquoted value of a parameter in a header, or "" without this parameter.

    Example:
        >>> get_parameter("content-type", 'multipart/form-data; boundary="B"', "boundary")
        'B'
    """
    message = Message()
    message[field] = " ".join(value.split())
    text = message.get_param(name, "", field)
    if isinstance(text, str):
        return text
    return ""


def decode_text(value: bytes) -> str:
    """Decode a field of a form. Raise `UserError` if it is not UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise UserError("a field of the form is not UTF-8 text; send names as UTF-8") from None


def convert_fields(texts: dict[str, list[str]]) -> tuple[str | list[str | None] | None, str, int]:
    """Convert the texts of the fields into tasks, rule and top.

    Args:
        texts: Name in OPTIONS -> texts of the field, one for each occurrence; [] if it is missing.

    Raises:
        UserError: If `top` is not a whole number of at most 18 digits.
    """
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
    """Parse an array in NumPy's format.

    Args:
        data: A `.npy` file with an array uint8 (N, H, W, 3) or (N, 3, H, W).
        query: `tasks`, `rule` and `top`, as in a form.

    Raises:
        UserError: If the body is not such an array, or the query has unknown fields.
    """
    try:
        fields = urllib.parse.parse_qs(query, keep_blank_values=True, max_num_fields=MAX_FIELDS)
    except ValueError:
        raise UserError(f"the address has more than {MAX_FIELDS} fields; send fewer") from None
    check_fields([*fields])
    texts = {name: fields.get(name, []) for name in OPTIONS}
    return ParsedRequest(parse_npy(data), *convert_fields(texts))


def parse_npy(data: bytes) -> NDArray[np.uint8]:
    """Return the images of a `.npy` file as uint8 (N, H, W, 3).

    The shape in the header is compared with the number of bytes before any memory is allocated.

    Raises:
        UserError: If the file has another type, shape or size, or more than MAX_PARTS images.
    """
    need = "uint8 (N, H, W, 3) or (N, 3, H, W), by numpy.save"
    stream = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(stream)
        read_header = np.lib.format.read_array_header_1_0
        if version != (1, 0):
            read_header = np.lib.format.read_array_header_2_0
        shape, is_fortran, dtype = read_header(stream)
    except Exception:  # the header is a Python literal, and parsing it raises many kinds of errors
        raise UserError(f"the body is not an array; send {need}") from None
    pixels = memoryview(data)[stream.tell() :]
    are_numbers = all(type(side) is int for side in shape)  # NumPy's parser accepts True as 1
    is_image = are_numbers and len(shape) == 4 and 3 in (shape[1], shape[3]) and min(shape) > 0
    if dtype != np.uint8 or is_fortran or not is_image:
        raise UserError(f"the array is {dtype} {shape!r:.80}; send {need}")
    if shape[0] > MAX_PARTS:  # each image becomes a Python object
        raise UserError(
            f"{shape[0]} images in one request are more than {MAX_PARTS}; send several requests"
        )
    if math.prod(shape) != len(pixels):
        raise UserError(
            f"the array has {len(pixels)} bytes, but shape {shape!r:.80} needs another number; "
            "send the complete array"
        )
    images = np.frombuffer(pixels, np.uint8).reshape(shape)
    if shape[3] != 3:
        images = images.transpose(0, 2, 3, 1)
    return images
