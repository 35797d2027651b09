"""Tests of parsing requests as forms and as arrays, and of the errors for malformed ones."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

from pipeline.serving.client import encode_form, encode_npy
from pipeline.serving.requests import (
    ARRAY,
    FORM,
    MAX_FIELDS,
    MAX_PARTS,
    RawRequest,
    parse_npy,
    parse_request,
)
from workers.errors import UserError

PIXELS = np.arange(2 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 4, 5, 3)
HEADER = f"{FORM}; boundary=B"


def part(name: str, content: bytes) -> bytes:
    return b'--B\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n' % (
        name.encode(),
        content,
    )


def parse_form(*parts: bytes, end: bytes = b"--B--\r\n", header: str = HEADER) -> Any:
    return parse_request(RawRequest(b"".join(parts) + end, header))


def parse_array(data: bytes, query: str = "") -> Any:
    return parse_request(RawRequest(data, ARRAY, query))


def saved(array: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def test_form_with_images_and_fields_is_parsed() -> None:
    hard = b"\r\n\r\n--A\r\n\x00\xff--B\r"  # resembles delimiters but contains none
    request = parse_form(part("images", hard), part("tasks", b"two"), part("images", b""))
    assert request.images == [hard, b""]
    assert (request.tasks, request.rule, request.top) == ("two", "refuse", 0)
    request = parse_form(
        part("images", b"a"),
        part("tasks", "f\u00fcnf".encode()),
        part("tasks", b""),
        part("rule", b"confident"),
        part("top", b"3"),
    )
    assert (request.tasks, request.rule, request.top) == (["f\u00fcnf", None], "confident", 3)
    assert parse_form(part("images", b"a"), part("tasks", b"")).tasks is None


def test_server_parses_requests_of_the_client() -> None:
    body, content_type = encode_form([("tasks", "two"), ("top", "2")], [b"\x89PNG", b"\r\n"])
    request = parse_request(RawRequest(body, content_type))
    assert (request.images, request.tasks, request.top) == ([b"\x89PNG", b"\r\n"], "two", 2)
    request = parse_array(encode_npy(PIXELS.transpose(0, 3, 1, 2)), "tasks=two&tasks=&top=1")
    assert np.array_equal(request.images, PIXELS)
    assert (request.tasks, request.top) == (["two", None], 1)


def test_maximum_number_of_images_is_accepted() -> None:
    assert len(parse_form(*[part("images", b"a")] * MAX_PARTS).images) == MAX_PARTS
    images = np.zeros((MAX_PARTS, 1, 1, 3), np.uint8)
    query = "rule=entropy&top=1" + "&tasks=two" * MAX_PARTS
    assert parse_array(saved(images), query).tasks == ["two"] * MAX_PARTS


@pytest.mark.parametrize(
    ("parts", "more", "message"),
    [
        ([], {}, "has no file `images`"),
        ([part("tasks", b"two")], {}, "has no file `images`"),
        ([part("images", b"a"), part("taks", b"")], {}, "has a field 'taks'"),
        ([part("images", b"a")], {"end": b""}, "has no end"),
        ([b"--B\r\n\r\nimage\r\n"], {}, "has no head|has a field ''"),
        ([b"--B\r\nno head"], {"end": b"\r\n--B--"}, "has no head"),
        ([part("x" * 5000, b"a")], {}, "has no head"),
        ([part("images", b"a")], {"header": FORM}, "has no boundary"),
        ([part("images", b"a")] * (MAX_PARTS + 1), {}, f"more than {MAX_PARTS} parts"),
        ([part("images", b"a"), part("top", b"-1")], {}, "top is '-1'"),
        ([part("images", b"a"), part("top", b"9" * 99)], {}, "top is '9999"),
        ([part("images", b"a"), part("tasks", b"\xff")], {}, "not UTF-8"),
    ],
)
def test_malformed_form_is_refused(parts: Any, more: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_form(*parts, **more)


@pytest.mark.parametrize(
    ("data", "query", "message"),
    [
        (b"", "", "the body is not an array"),
        (b"\x93NUMPY", "", "the body is not an array"),
        (saved(PIXELS)[:-1], "", r"has 119 bytes, but shape \(2, 4, 5, 3\) needs another"),
        (saved(PIXELS.astype(np.float32)), "", r"is float32 \(2, 4, 5, 3\); send uint8"),
        (saved(PIXELS[0]), "", r"is uint8 \(4, 5, 3\)"),
        (saved(PIXELS[:0]), "", r"is uint8 \(0, 4, 5, 3\)"),
        (saved(np.asfortranarray(PIXELS)), "", "is uint8"),
        (saved(np.zeros((MAX_PARTS + 1, 1, 1, 3), np.uint8)), "", "257 images in one request"),
        (saved(PIXELS), "taks=two", "has a field 'taks'"),
        (saved(PIXELS), "tasks=" + "&tasks=" * MAX_FIELDS, "more than 258 fields"),
    ],
)
def test_malformed_array_is_refused(data: bytes, query: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_array(data, query)


def test_objects_are_never_unpickled() -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (pytest.fail, ("it was unpickled",))

    array = np.empty(1, object)
    array[0] = Trap()
    with pytest.raises(UserError, match="is object"):
        parse_npy(saved(array))


@pytest.mark.parametrize("shape", [(True, 8, 8, 3), (1, True, 8, 3), (1, 8, 8, True)])
def test_array_with_boolean_in_shape_is_refused(shape: tuple[int, ...]) -> None:
    stream = io.BytesIO()
    header = {"descr": "|u1", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, header)
    with pytest.raises(UserError, match=r"the array is uint8 \("):
        parse_npy(stream.getvalue() + bytes(192))


@pytest.mark.parametrize("shape", [(2, 99_999, 99_999, 3), (2, 10**30, 10**30, 3)])
def test_claimed_array_shape_is_checked_before_allocation(shape: tuple[int, ...]) -> None:
    stream = io.BytesIO()
    header = {"descr": "|u1", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, header)
    with pytest.raises(UserError, match=r"has 1 bytes, but shape .* needs another number"):
        parse_npy(stream.getvalue() + b"x")
