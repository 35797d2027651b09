"""Tests of the reader of .mat files: values, byte order, and errors for damaged files."""

from __future__ import annotations

import random
import struct
import time
from pathlib import Path

import numpy as np
import pytest

from pipeline.data.preparation.matlab import (
    Value,
    read_variables,
    require_integer,
    require_integers,
    require_structs,
    require_text,
    require_texts,
)
from tests.official_files import cells, structs, write_mat
from workers.errors import UserError

NAMES = ("rows", "paths", "labels", "word")


def sample(path: Path, compressed: bool = True) -> bytes:
    """Write a file with structs, cells, numbers and a text; return its content."""
    rows = [{"class": number, "fname": f"{number}.jpg"} for number in range(5)]
    labels = np.array([[1, 2, 300]], np.uint16)
    paths = cells(["a/ü.jpg", "b"])
    write_mat(path, compressed, rows=structs(rows), paths=paths, labels=labels, word="x")
    return path.read_bytes()


def variable(data: bytes, name: str) -> Value:
    """Return a variable of a file."""
    return read_variables(data, "a.mat", [name])[name]


@pytest.mark.parametrize("compressed", [True, False])
def test_read_values_equal_written_values(tmp_path: Path, compressed: bool) -> None:
    values = read_variables(sample(tmp_path / "a.mat", compressed), "a.mat", NAMES)
    rows = require_structs(values["rows"], "a.mat", ["class", "fname"])
    assert [require_integer(row["class"], "") for row in rows] == [0, 1, 2, 3, 4]
    assert [require_text(row["fname"], "") for row in rows][-1] == "4.jpg"
    assert require_texts(values["paths"], "") == ["a/ü.jpg", "b"]
    assert require_integers(values["labels"], "") == [1, 2, 300]
    assert values["word"] == "x"


def test_big_endian_file_is_read() -> None:
    def element(kind: int, body: bytes) -> bytes:
        return struct.pack(">II", kind, len(body)) + body + bytes(-len(body) % 8)

    text = "n01440764".encode("utf-16-be")
    matrix = (
        element(6, struct.pack(">II", 4, 0))
        + element(5, struct.pack(">ii", 1, 9))
        + struct.pack(">HH4s", 4, 1, b"WNID")  # a short element: its data are in its tag
        + element(4, text)
    )
    header = b"MATLAB 5.0".ljust(124) + b"\x01\x00MI"
    assert variable(header + element(14, matrix), "WNID") == "n01440764"


def test_values_of_the_wrong_kind_are_refused(tmp_path: Path) -> None:
    values = read_variables(sample(tmp_path / "a.mat"), "a.mat", NAMES)
    for name, check in (
        ("word", require_integers),
        ("labels", require_text),
        ("labels", require_texts),
        ("rows", require_texts),
        ("labels", require_integer),
    ):
        with pytest.raises(UserError, match=r"a\.mat"):
            check(values[name], "a.mat")
    with pytest.raises(UserError, match="has no field 'test'"):
        require_structs(values["rows"], "a.mat", ["test"])
    with pytest.raises(UserError, match="has no list of structs"):
        require_structs(values["paths"], "a.mat", ["test"])
    write_mat(tmp_path / "b.mat", labels=np.array([1.5, np.inf]))
    with pytest.raises(UserError, match="has no whole numbers"):
        require_integers(variable((tmp_path / "b.mat").read_bytes(), "labels"), "b.mat")


def test_too_deeply_nested_cells_are_refused(tmp_path: Path) -> None:
    value = cells(["x"])
    for _ in range(20):
        outer = np.empty((1, 1), object)
        outer[0, 0] = value
        value = outer
    write_mat(tmp_path / "a.mat", word=value)
    with pytest.raises(UserError, match="too deep"):
        variable((tmp_path / "a.mat").read_bytes(), "word")


@pytest.mark.parametrize("compressed", [True, False])
def test_damaged_mat_file_is_refused_quickly(tmp_path: Path, compressed: bool) -> None:
    sound = sample(tmp_path / "a.mat", compressed)
    generator = random.Random(1)
    start = time.monotonic()
    refused = 0
    for _ in range(300):
        data = bytearray(sound)
        for _ in range(generator.randint(1, 4)):
            data[generator.randrange(124, len(data))] = generator.choice((0, 1, 14, 15, 127, 255))
        try:
            read_variables(bytes(data[: generator.choice((len(data), 300))]), "a.mat", NAMES)
        except UserError:
            refused += 1
    assert refused > 100
    assert time.monotonic() - start < 20
