"""Tests of hostile files. Each is refused with one sentence.

A hostile file must not run code, reach files outside its folder, or exhaust the memory.
"""

from __future__ import annotations

import csv
import functools
import io
import json
import os
import pickle
import socket
import struct
import tarfile
import tracemalloc
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch
import yaml
from PIL import Image
from test_bad_inputs import sentence

from pipeline import cli
from pipeline.config import settings as configs
from pipeline.config import yaml_files
from pipeline.data import image_checks
from pipeline.data.cards import MAX_PIXELS_PER_BYTE, Card
from pipeline.data.column_files import read_batches, to_python_list
from pipeline.data.detection.data_set import Request
from pipeline.data.detection.detect import detect
from pipeline.data.formats import parquet as parquet_format
from pipeline.data.formats import tar as tar_format
from pipeline.data.formats import torchvision as torchvision_format
from pipeline.data.formats import webdataset as webdataset_format
from pipeline.data.packs import ImageChecker
from pipeline.report import files as csv_files
from tests import small_run
from tests.hostile import BACKBONES, Site, backbones, costs, member, parquet, png, source
from workers.data.decoding import ImageLimits
from workers.errors import UserError
from workers.job import BackboneSettings
from workers.model import vit
from workers.serving.model_file import sealed
from workers.storage.artifact import file_info
from workers.storage.taskstate import TaskState, load_tensors

REPOSITORY = Path(__file__).resolve().parent.parent
MARK = "the-code-of-a-stranger-ran"


def test_loading_the_hostile_pickle_creates_the_marker_file(tmp_path: Path) -> None:
    new_site = Site(tmp_path)
    pickle.loads(new_site.pickled())
    assert new_site.mark.exists()


def take(megabytes: int) -> str:
    return f"{len(bytearray(megabytes << 20))} bytes"


@pytest.mark.slow
def test_peak_memory_of_a_process_is_measured() -> None:
    assert costs(take, 300)[1] >= 290


# ---- tars ----------------------------------------------------------------------------------------
def archive(site: Site, *members: bytes, form: str = "tar") -> str:
    """Write a tar source with two good images per split and these members; return its config."""
    (site.own_folder / "raw").mkdir()
    for color, split in ((0, "train"), (2, "test")):
        good = [
            member(f"{label}{n}.{ext}", data)
            for n, label in enumerate("ab")
            for ext, data in (("png", png(color + n)), ("cls", label.encode()))
        ]
        (site.own_folder / "raw" / f"{split}.tar").write_bytes(
            b"".join([*good, *members]) + bytes(2 * tarfile.BLOCKSIZE)
        )
    source: dict[str, Any] = {"format": form, "path": str(site.own_folder / "raw")}
    if form == "webdataset":
        source["splits"] = {"train": "train.tar", "test": "test.tar"}
    return site.config(site.card(source=source))


def pax(text: str) -> bytes:
    return f"{len(text) + 4:02d} {text}\n".encode()


TARS: dict[str, tuple[list[bytes], str]] = {
    "symbolic link": (
        [member("x.png", kind=tarfile.SYMTYPE, link="../../outside/kept")],
        "is not a plain file",
    ),
    "hard link": ([member("x.png", kind=tarfile.LNKTYPE, link="/etc/passwd")], "not a plain file"),
    "absolute path": ([member("/x.png", png())], "points outside"),
    "path that climbs": ([member("a/../../outside/x.png", png())], "points outside"),
    "path that climbs, in a long name": (
        [
            member("././@LongLink", b"../" * 60 + b"x.png\0", tarfile.GNUTYPE_LONGNAME),
            member("x", png()),
        ],
        "points outside",
    ),
    "device": ([member("x.png", kind=tarfile.CHRTYPE)], "is not a plain file"),
    "sparse file": ([member("x.png", kind=tarfile.GNUTYPE_SPARSE)], "is not a plain file"),
    "size below zero": ([member("x.png", size=-5)], "-5 bytes"),
    "size beyond the end": ([member("x.png", size=10**12)], "1000000000000 bytes"),
    "label beyond the end": ([member("x.cls", size=10**11)], "100000000000 bytes"),
    "header of 100 GB": (
        [member("p", size=10**11, kind=tarfile.XHDTYPE)],
        "a header of 100000000000 bytes",
    ),
    "name of 100 GB": (
        [member("p", size=10**11, kind=tarfile.GNUTYPE_LONGNAME)],
        "a header of 100000000000 bytes",
    ),
    "thousands of headers for one file": (
        [member("p", pax("a=b"), tarfile.XHDTYPE)] * 5000,
        "cannot be read as an uncompressed tar",
    ),
}


@pytest.mark.parametrize("form", ["tar", "webdataset"])
@pytest.mark.parametrize("case", TARS)
def test_a_hostile_tar_is_refused(
    case: Any, form: str, site: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    members, says = TARS[case]
    message = sentence(capfd, ["ingest", archive(site, *members, form=form)])
    assert says in message
    assert "train.tar" in message


def card_of(form: str, label: str = "label") -> Card:
    """Return a card of two classes. Labels may also be the positions of classes."""
    source = {"format": form, "label": label, "numbers": "places", "splits": {"train": "x.tar"}}
    body = {"name": "bad", "licence": "none", "classes": ["a", "b"], "source": source}
    return Card.model_validate(body)


def list_one(path: str) -> str:
    return str(tar_format.list_tar(tar_format.TarJob(card_of("tar"), "train", path)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.REGTYPE])
def test_huge_header_sizes_of_a_tar_take_no_memory(kind: Any, site: Any) -> None:
    archive(site, member("x.cls", size=3 << 30, kind=kind))
    with open(site.own_folder / "raw" / "train.tar", "ab") as stream:
        stream.truncate(4 << 30)  # a sparse file that has the claimed size
    outcome, megabytes = costs(list_one, str(site.own_folder / "raw" / "train.tar"))
    assert not outcome.startswith("!!!")
    assert megabytes < 100


def read_in_place(path: str, label: str = "cls") -> str:
    """Read a shard; return the names and labels of the samples without a problem, as text."""
    card = card_of("webdataset", label)
    checker = ImageChecker(card)
    job = webdataset_format.ReadJob(card, "train", path, ("png",), label)
    good = []
    for item, _ in webdataset_format.read_shard(job):
        if item.problem is None:
            good.append((item.name, checker.label(item)))
    return str(good)


def write_shard(site: Site, *parts: bytes) -> str:
    path = site.own_folder / "shard.tar"
    path.write_bytes(b"".join([*parts, bytes(2 * tarfile.BLOCKSIZE)]))
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.REGTYPE])
def test_huge_header_sizes_of_in_place_shards_take_no_memory(kind: Any, site: Any) -> None:
    path = write_shard(site, member("x.png", size=600 << 20, kind=kind))
    with open(path, "ab") as stream:
        stream.truncate(700 << 20)  # a sparse file that has the claimed size
    outcome, megabytes = costs(read_in_place, path)
    assert not outcome.startswith("!!!")
    assert megabytes < 100


@pytest.mark.few("read_in_place")
@pytest.mark.parametrize("read", [list_one, read_in_place])
def test_global_tar_headers_take_no_memory(read: Any, site: Any) -> None:
    parts = []
    for number in range(150):
        text = f"{900_000} k{number}={'v' * 900_000}"[: 900_000 - 1] + "\n"
        parts.append(member("g", text.encode(), tarfile.XGLTYPE))
        parts.append(member(f"{number}.txt"))
    outcome, megabytes = costs(read, write_shard(site, *parts))
    assert outcome.startswith("[")
    assert megabytes < 80


@pytest.mark.parametrize("read", [list_one, read_in_place])
def test_many_long_names_of_one_member_take_no_memory(read: Any, site: Any) -> None:
    names = [member("n", b"a" * 900_000, tarfile.GNUTYPE_LONGNAME) for _ in range(150)]
    outcome, megabytes = costs(read, write_shard(site, *names, member("x.txt")))
    assert "headers of" in outcome
    assert megabytes < 80


def test_thousands_of_tar_members_take_no_memory(
    site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webdataset_format, "CHUNK_BYTES", 1 << 16)
    path = write_shard(site, *(member(f"{number}.txt") for number in range(5_000)))
    read_in_place(path)
    tracemalloc.start()
    try:
        assert read_in_place(path) == "[]"
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1_000_000


@pytest.mark.parametrize(
    "text",
    ["[" * 500_000, '{"label": ' * 100_000, '{"label": ' + "9" * 100_000 + "}", "\xff", "null"],
)
def test_hostile_json_in_a_shard_gives_no_label(text: str, site: Any) -> None:
    bad = [member("0.png", png()), member("0.json", text.encode("latin-1"))]
    good = [member("1.png", png()), member("1.json", b'{"label": 1}')]
    path = write_shard(site, *bad, *good)
    assert read_in_place(path, "json:label") == "[('shard.tar:0', None), ('shard.tar:1', 'b')]"


def test_a_pickle_in_a_tar_is_not_loaded(site: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """WebDataset's decoders would load a member with this extension."""
    hidden = [member(f"a0.{ext}", site.pickled()) for ext in ("pkl", "pyd", "pickle", "pth", "npy")]
    assert cli.main(["ingest", archive(site, *hidden)]) == 0
    shards = list((site.own_folder / "storage" / "stages").glob("*/*/train-*.tar"))
    assert len(shards) == 2, "one shard per class"
    for shard in shards:
        with tarfile.open(shard) as tar:
            assert [name.rpartition(".")[2] for name in tar.getnames()] == ["png", "txt"]


# ---- images --------------------------------------------------------------------------------------
def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def huge_png(width: int, height: int, extra: bytes = b"") -> bytes:
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return (
        b"\x89PNG\r\n\x1a\n"
        + head
        + extra
        + chunk(b"IDAT", zlib.compress(bytes(25 * height)))
        + chunk(b"IEND", b"")
    )


@functools.cache
def deflated(megabytes: int) -> bytes:
    packer = zlib.compressobj(9)
    return b"".join(packer.compress(bytes(1 << 20)) for _ in range(megabytes)) + packer.flush()


def saved(kind: str, side: int = 8, **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (side, side)).save(buffer, kind, **options)
    return buffer.getvalue()


def sized(kind: str, at: int, form: str) -> bytes:
    """Return a small image with a header that claims 50,000 x 50,000 pixels."""
    data = bytearray(saved(kind))
    data[at : at + struct.calcsize(form)] = struct.pack(form, 50_000, 50_000)
    return bytes(data)


def tiff(side: int, data: bytes = bytes(64), compression: int = 1, tile: int = 0) -> bytes:
    tags = {256: side, 257: side, 258: 8, 259: compression, 262: 1, 277: 1}
    layout_tags = (322, 323, 324, 325) if tile else (273, 278, 279)
    start = 8 + 2 + 12 * (len(tags) + len(layout_tags)) + 4
    tags |= dict(
        zip(
            layout_tags,
            (tile, tile, start, len(data)) if tile else (start, side, len(data)),
            strict=True,
        )
    )
    entries = b"".join(
        struct.pack("<HHII", tag, 4, 1, value) for tag, value in sorted(tags.items())
    )
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + data


def webp(side: int) -> bytes:
    """Return an animation on a canvas of side x side pixels with one small frame."""
    frame = saved("WEBP", 16, lossless=True)[12:]

    def three_bytes(number: int) -> bytes:
        return struct.pack("<I", number)[:3]

    parts = [
        (b"VP8X", b"\2\0\0\0" + three_bytes(side - 1) * 2),
        (b"ANIM", bytes(6)),
        (b"ANMF", bytes(6) + three_bytes(15) * 2 + bytes(4) + frame),
    ]
    body = b"WEBP" + b"".join(kind + struct.pack("<I", len(data)) + data for kind, data in parts)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def text_bomb(kind: bytes, head: bytes) -> bytes:
    return huge_png(8, 8, chunk(kind, head + deflated(100)))


def png_of(width: int, height: int, rows: int) -> bytes:
    """Return a black PNG of one bit per pixel that contains only the first `rows` rows."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    body = zlib.compress(bytes((1 + -(-width // 8)) * rows), 9)
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def blank(kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.new("1" if kind == "TIFF" else "L", (7000, 7000), 1).save(buffer, kind, **options)
    return buffer.getvalue()


IMAGES: dict[str, tuple[Callable[[], bytes], str]] = {
    "png of one row": (
        lambda: png_of(7000, 7000, 1),
        "7000 x 7000 pixels in 74 bytes are more than max_pixels_per_byte = 2000",
    ),
    "png of one colour": (lambda: png_of(7000, 7000, 7000), "are more than max_pixels_per_byte"),
    "png of half its rows": (lambda: png_of(900, 900, 450), "its data ends before its last row"),
    "webp of one colour": (
        lambda: blank("WEBP", lossless=True),
        "are more than max_pixels_per_byte",
    ),
    "tiff of one colour": (
        lambda: blank("TIFF", compression="group4"),
        "are more than max_pixels_per_byte",
    ),
    "png": (lambda: huge_png(50_000, 50_000), "50000 x 50000 is more than max_pixels"),
    "gif": (lambda: sized("GIF", 6, "<HH"), "50000 x 50000 is more than max_pixels"),
    "bmp": (lambda: sized("BMP", 18, "<ii"), "50000 x 50000 is more than max_pixels"),
    "ppm": (lambda: b"P6 50000 50000 255\n", "50000 x 50000 is more than max_pixels"),
    "tiff": (lambda: tiff(50_000), "50000 x 50000 is more than max_pixels"),
    "tile of a tiff": (
        lambda: tiff(64, deflated(400), 8, 20_000),
        "20000 x 20000 is more than max_pixels",
    ),
    "webp": (lambda: webp(50_000), "50000 x 50000 is more than max_pixels"),
    "zTXt": (lambda: text_bomb(b"zTXt", b"k\0\0"), "Decompressed data too large"),
    "iTXt": (lambda: text_bomb(b"iTXt", b"k\0\1\0\0\0"), "Decompressed data too large"),
    "iCCP": (lambda: text_bomb(b"iCCP", b"k\0\0"), "Decompressed data too large"),
    "PostScript": (
        lambda: (
            b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"
        ),
        "not an image",
    ),
    "pickle": (lambda: b"\x80\x04cos\nsystem\n", "not an image"),
}


def ingest_quietly(path: str) -> int:
    warnings.simplefilter("ignore")
    return cli.main(["ingest", path])


def test_hostile_images_are_rejected_with_reasons_and_bounded_memory(
    site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{site.own_folder}:{os.environ['PATH']}")
    # Pillow would pass PostScript to this program
    (site.own_folder / "gs").write_text(f"#!/bin/sh\ntouch {site.mark}\n")
    (site.own_folder / "gs").chmod(0o755)
    for color, split in ((0, "train"), (2, "test")):
        for n, label in enumerate("ab"):
            (site.own_folder / "raw" / split / label).mkdir(parents=True)
            (site.own_folder / "raw" / split / label / "good.png").write_bytes(png(color + n))
    for name, (make, _) in IMAGES.items():
        (site.own_folder / "raw" / "train" / "a" / f"{name}.png").write_bytes(make())
    code, megabytes = costs(
        ingest_quietly,
        site.config(site.card(source={"format": "folder", "path": str(site.own_folder / "raw")})),
    )
    assert code == 0
    assert megabytes < 300
    with open(next((site.own_folder / "storage" / "stages").glob("*/*/rejected.csv"))) as stream:
        reasons = {
            row["source"].rsplit("/", 1)[-1].removesuffix(".png"): row["reason"]
            for row in csv.DictReader(stream)
        }
    assert reasons.keys() >= IMAGES.keys()
    for name, (_, says) in IMAGES.items():
        assert says in reasons[name], name


def problem_of(data: bytes, max_pixels: int, per_byte: int = MAX_PIXELS_PER_BYTE) -> str | None:
    return image_checks.check_image(data, ImageLimits(max_pixels), per_byte).problem


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
@pytest.mark.parametrize("size", [(1, 1), (9, 7), (31, 40)])
def test_complete_pngs_of_every_kind_are_accepted(mode: str, size: Any) -> None:
    buffer = io.BytesIO()
    Image.new(mode, size).save(buffer, "PNG", **({"bits": 4} if mode == "P" else {}))
    assert problem_of(buffer.getvalue(), 10**6) is None


@pytest.mark.parametrize(("bits", "color"), [(1, 0), (8, 2), (16, 6), (4, 3)])
@pytest.mark.parametrize("size", [(1, 1), (2, 5), (9, 7), (33, 40)])
def test_complete_interlaced_pngs_are_accepted_and_truncated_ones_refused(
    bits: int, color: int, size: Any
) -> None:
    total = 0
    for x, y, across, down in image_checks.ADAM7:
        columns, rows = len(range(x, size[0], across)), len(range(y, size[1], down))
        total += (
            rows * (1 + -(-columns * bits * image_checks.CHANNELS[color] // 8)) if columns else 0
        )
    for missing in (0, 1):
        head = chunk(b"IHDR", struct.pack(">IIBBBBB", *size, bits, color, 0, 0, 1))
        palette = chunk(b"PLTE", bytes(48)) if color == 3 else b""
        body = chunk(b"IDAT", zlib.compress(bytes(total - missing)))
        data = b"\x89PNG\r\n\x1a\n" + head + palette + body + chunk(b"IEND", b"")
        assert (problem_of(data, 10**6) is None) == (not missing)


def test_a_blank_image_is_accepted_when_the_card_allows_it() -> None:
    assert problem_of(png_of(3000, 3000, 3000), 50_000_000) is not None
    assert problem_of(png_of(3000, 3000, 3000), 50_000_000, 10**6) is None
    assert problem_of(png_of(1000, 1000, 1000), 50_000_000) is None, (
        "a small blank image is always accepted"
    )
    grey = io.BytesIO()
    Image.new("L", (7000, 7000)).save(grey, "PNG")
    assert problem_of(grey.getvalue(), 50_000_000) is None


def first_frame(data: bytes) -> int:
    assert problem_of(data, 50_000_000) is None
    return len(image_checks.encode_for_storage(data, ImageLimits(50_000_000))[0])


def test_only_the_first_frame_of_an_animation_is_decoded() -> None:
    frames = [Image.new("L", (64, 64), n) for n in range(2)]
    buffer = io.BytesIO()
    frames[0].save(
        buffer,
        "GIF",
        save_all=True,
        append_images=[frames[n % 2] for n in range(1, 2000)],
        duration=[10 + n % 2 for n in range(2000)],
    )
    size, megabytes = costs(first_frame, buffer.getvalue())
    assert 0 < size < 5000
    assert megabytes < 60


def test_terabyte_image_file_is_rejected_without_reading(
    site: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    for color, split in ((0, "train"), (2, "test")):
        for n, label in enumerate("ab"):
            (site.own_folder / "raw" / split / label).mkdir(parents=True)
            (site.own_folder / "raw" / split / label / "good.png").write_bytes(png(color + n))
    with open(site.own_folder / "raw" / "train" / "a" / "huge.png", "wb") as stream:
        stream.truncate(1 << 40)
    assert (
        cli.main(
            [
                "ingest",
                site.config(
                    site.card(source={"format": "folder", "path": str(site.own_folder / "raw")})
                ),
            ]
        )
        == 0
    )
    assert (
        "1099511627776 bytes are more than"
        in next((site.own_folder / "storage" / "stages").glob("*/*/rejected.csv")).read_text()
    )


# ---- YAML ----------------------------------------------------------------------------------------
LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)
MERGES = "a0: &a0 {x: 1, y: 2}\n" + "".join(
    f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}\n" for n in range(1, 10)
)
YAMLS: dict[str, tuple[str, str]] = {
    "tag that calls": (
        f"name: !!python/object/apply:os.system ['touch {MARK}']",
        "could not determine a constructor",
    ),
    "tag that makes": (
        "name: !!python/object/new:subprocess.Popen [[ls]]",
        "could not determine a constructor",
    ),
    "tag that names": ("name: !!python/name:os.system", "could not determine a constructor"),
    "a billion laughs": (LAUGHS, "each alias counted in full"),
    "a billion merges": (MERGES, "each alias counted in full"),
    "alias of itself": ("name: &a [*a]", "refers to a value that contains it"),
    "deep lists": ("name: " + "[" * 20_000, "more than 50 levels"),
    "deep mappings": ("".join(" " * n + "a:\n" for n in range(2000)), "more than 50 levels"),
    "many values": ("name: [" + "1," * 3000 + "]", "more than 2000 values"),
    "month 13": ("name: !!timestamp 2024-13-01", "could not determine a constructor"),
    "bytes": ("name: !!binary aGk=", "could not determine a constructor"),
    "no number": ("name: !!int x", "'x' is not a valid int"),
    "no switch": ("name: !!bool on", "'on' is not a valid bool"),
    "NUL": ('name: "a\\0b"', "a character that no file can be named with"),
    "NUL in a key": ('"a\\0b": 1', "a character that no file can be named with"),
    "half a character": ('name: "\\ud800"', "a character that no file can be named with"),
    "one key in two ways": ("{01: a, 1: b}", "key '1' occurs twice"),
    "number without end": ("name: " + "9" * 6000, "write the value in quotes"),
    "set of a list": ("name: !!set [1]", "could not determine a constructor"),
}


@pytest.mark.few(15)
@pytest.mark.parametrize("kind", ["config", "card"])
@pytest.mark.parametrize("case", YAMLS)
def test_hostile_yaml_is_refused(
    case: Any,
    kind: str,
    site: Any,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(site.outside)
    monkeypatch.setattr(yaml_files, "MAX_VALUES", 2000)
    text, says = YAMLS[case]
    (site.own_folder / "bad.yaml").write_text(text)
    path = (
        str(site.own_folder / "bad.yaml")
        if kind == "config"
        else site.config(str(site.own_folder / "bad.yaml"))
    )
    message = sentence(capfd, ["plan", path])
    assert says in message
    assert "bad.yaml" in message


def whole(text: str) -> str:
    return str(len(repr(yaml_files.parse_yaml(text, "x.yaml"))))


@pytest.mark.parametrize(
    "text", [LAUGHS, MERGES, "[" * 1_000_000], ids=["laughs", "merges", "deep"]
)
def test_hostile_yaml_takes_no_memory(text: Any) -> None:
    outcome, megabytes = costs(whole, text)
    assert "not readable as YAML" in outcome
    assert megabytes < 100


def test_ordinary_yaml_aliases_are_read() -> None:
    assert yaml_files.parse_yaml("a: &a {x: 1, y: [2]}\nb: {<<: *a, x: 3}\nc: [*a, *a]", "x")[
        "b"
    ] == {"x": 3, "y": [2]}


MEANS: dict[str, Any] = {
    "010": 10,
    "08": 8,
    "-007": -7,
    "+5": 5,
    "0o10": 8,
    "0x1F": 31,
    "1e-3": 0.001,
    "1E3": 1000.0,
    ".5": 0.5,
    "5.": 5.0,
    "-.inf": float("-inf"),
    "1:30": "1:30",
    "1:30.5": "1:30.5",
    "1_000": "1_000",
    "0b11": "0b11",
    "0o9": "0o9",
    "2024-01-01": "2024-01-01",
    "=": "=",
    "no": "no",
    "yes": "yes",
    "on": "on",
    "off": "off",
    "y": "y",
    "No": "No",
    "true": True,
    "False": False,
    "TRUE": True,
    "tRUE": "tRUE",
    "null": None,
    "~": None,
    "": None,
    "none": "none",
    '"010"': "010",
    "'no'": "no",
}


@pytest.mark.parametrize("text", MEANS)
def test_plain_words_are_read_as_in_yaml_1_2(text: Any) -> None:
    value = yaml_files.parse_yaml(f"key: {text}", "x")["key"]
    assert (type(value), value) == (type(MEANS[text]), MEANS[text])


def test_written_yaml_reads_back_equal_in_both_yaml_versions() -> None:
    values = [
        *MEANS,
        *MEANS.values(),
        "<<",
        "-",
        "a: b",
        "#",
        "\u2028",
        "\u00e9",
        1e-5,
        1e300,
        10**30,
        -0.5,
        [],
        {},
    ]
    text = yaml_files.dump_yaml({"values": values, **dict.fromkeys(MEANS, 1)})
    for body in (yaml_files.parse_yaml(text, "x"), yaml.safe_load(text)):
        assert list(body) == ["values", *MEANS]
        assert [(type(value), value) for value in body["values"]] == [
            (type(value), value) for value in values
        ]


def config_of(site: Site, **changes: Any) -> str:
    return site.config(small_run.make_card(site.own_folder, "good", "01", 3, 2), **changes)


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("train.epochs=010", "epochs", 10),
        ("train.epochs=1_000", "epochs", 1000),
        ("train.epochs=1e2", "epochs", 100),
        ("train.lr=1e-3", "lr", 1e-3),
        ("train.compile=yes", "compile", True),
        ("train.compile=off", "compile", False),
        ("train.batch_size=0x10", "batch_size", 16),
    ],
)
def test_common_spellings_of_numbers_and_booleans_are_parsed(
    override: str, key: str, value: Any, site: Any
) -> None:
    assert getattr(configs.load(config_of(site), [override]).train, key) == value


def test_tracking_off_disables_tracking(site: Any) -> None:
    assert not configs.load(config_of(site), ["tracking=off"]).tracking.enabled


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.epochs=1:30", "train.epochs is '1:30'"),
        ("train.epochs=100000000000000000000", "less than or equal to 100000"),
        ("train.batch_size=1000000000000", "a whole number here is at most 1000000"),
        ("train.lr=1e300", "a number here is at most 1e+30"),
        ("seed=10000000000000000000000", "a whole number here is at most 9223372036854775807"),
        ("cluster.retries=1000000000", "less than or equal to 1000"),
        ("cluster.workers=1000000000", "at most 100000"),
        ("cluster.cache_gb=1e30", "less than or equal to 1000000000"),
        ("data.repeats=1000000", "less than or equal to 1000"),
        ("data.randaugment=1000000", "less than or equal to 100"),
        ("methods.finetune.train.epochs=1000000", "less than or equal to 100000"),
        ("stream.tasks.\u00b2.name=x", "'\u00b2' is not a position in a list of 1"),
        ("stream.tasks.\u0660.name=x", "is not a position in a list of 1"),
        ("stream.tasks." + "9" * 5000 + ".name=x", "is not a position in a list of 1"),
        ("stream.tasks.0.classes=[true]", "and True is neither; write it in quotes"),
        ("stream.tasks.0.classes=[1.0]", "and 1.0 is neither; write it in quotes"),
        ('storage="a\\0b"', "a character that no file can be named with"),
        ('backbone.weights="a\\0b"', "a character that no file can be named with"),
        ('methods={"finetune\\n": {method: finetune}}', "a label has letters"),
        ("methods={data: {method: finetune}}", "methods.data: stages that all methods share"),
        ("methods={features: {method: finetune}}", "choose another label"),
        ('stream.tasks.0.name="a\\n"', "stream.tasks.0.name is 'a\\n'"),
        ('name="a\\n"', "name is 'a\\n'"),
        ("methods={no: {}}", "methods.no names method 'no', which does not exist"),
        ("methods={null: {}}", "and None is neither; write it in quotes"),
        ("cluster={workers: 1, address: '127.0.0.1:99999999'}", "is not of the form host:port"),
    ],
)
def test_overflowing_and_ambiguous_overrides_are_refused(
    override: Any, says: str, site: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    message = sentence(
        capfd,
        ["run" if override.startswith("cluster={") else "plan", config_of(site), "--set", override],
    )
    assert says in message


def test_classes_can_be_named_no_and_on(site: Any) -> None:
    tasks = [{"card": small_run.make_card(site.own_folder, "good", "01", 3, 2)}]
    path = site.config(tasks[0]["card"], stream={"scenario": "task", "tasks": tasks})
    Path(path).write_text(
        Path(path).read_text().replace("- card:", "- classes: [no, on, 1, y]\n    card:")
    )
    assert configs.load(path).stream.tasks[0].classes == ("no", "on", "1", "y")


@pytest.mark.parametrize("seed", [-1, 2**32, 10**30])
def test_class_order_seed_out_of_range_is_refused(
    seed: Any, site: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    card = site.card(
        class_order_seed=seed, source={"format": "folder", "path": str(site.own_folder)}
    )
    assert "class_order_seed is" in sentence(capfd, ["plan", site.config(card)])


# ---- configs that extend configs -----------------------------------------------------------------
def test_exponentially_many_extended_files_are_refused(
    site: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    for number in range(1, 24):
        (site.own_folder / f"{number}.yaml").write_text(
            f"extends: [{number - 1}.yaml, {number - 1}.yaml]\n"
        )
    (site.own_folder / "0.yaml").write_text("seed: 1\n")
    assert "23.yaml: extends more than 100 files" in sentence(
        capfd, ["plan", str(site.own_folder / "23.yaml")]
    )


def test_chain_of_too_many_extended_files_is_refused(
    site: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    for number in range(1500):
        (site.own_folder / f"{number}.yaml").write_text(f"extends: {number + 1}.yaml\n")
    assert "0.yaml: extends more than 100 files" in sentence(
        capfd, ["plan", str(site.own_folder / "0.yaml")]
    )


def test_config_with_a_few_extended_files_is_read(site: Any) -> None:
    for number in range(1, 6):
        (site.own_folder / f"{number}.yaml").write_text(
            f"extends: [{number - 1}.yaml, 0.yaml]\nkey{number}: {number}\n"
        )
    (site.own_folder / "0.yaml").write_text("seed: 1\n")
    assert yaml_files.read_with_bases(site.own_folder / "5.yaml") == {
        "seed": 1,
        **{f"key{n}": n for n in range(1, 6)},
    }


def test_extended_file_in_a_symbolic_link_cycle_is_refused(
    site: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    (site.own_folder / "a.yaml").symlink_to("b.yaml")
    (site.own_folder / "b.yaml").symlink_to("a.yaml")
    (site.own_folder / "c.yaml").write_text("extends: a.yaml\n")
    assert "does not exist" in sentence(capfd, ["plan", str(site.own_folder / "c.yaml")])


# ---- endless files -------------------------------------------------------------------------------
def pipe(site: Site) -> str:
    os.mkfifo(site.own_folder / "pipe.yaml")
    return str(site.own_folder / "pipe.yaml")


def zeros(site: Site) -> str:
    (site.own_folder / "zeros.yaml").symlink_to("/dev/zero")
    return str(site.own_folder / "zeros.yaml")


def terabyte(site: Site) -> str:
    with open(site.own_folder / "large.yaml", "wb") as stream:
        stream.truncate(1 << 40)
    return str(site.own_folder / "large.yaml")


ENDLESS: dict[str, tuple[Callable[[Site], str], str]] = {
    "device": (zeros, "it is not a regular file"),
    "pipe": (pipe, "it is not a regular file"),
    "terabyte": (terabyte, "1099511627776 bytes, more than"),
}
AS: dict[str, Callable[[Site, str], list[str]]] = {
    "config": lambda site, path: ["plan", path],
    "base of a config": lambda site, path: ["plan", written_over(site, path)],
    "search": lambda site, path: ["search", path],
    "card": lambda site, path: ["plan", site.config(path)],
    "weights": lambda site, path: [
        "plan",
        config_of(site, backbone={**small_run.BACKBONE, "weights": path}),
    ],
    "image": lambda site, path: ["predict", served(site), path, "--task", "a"],
    "task to import": lambda site, path: ["tasks", served(site), "import", path],
    "model.json": lambda site, path: ["tasks", in_a_folder(site, path, "model.json"), "list"],
    "weights of a model folder": lambda site, path: [
        "predict",
        in_a_folder(site, path, "backbone.safetensors"),
        str(site.own_folder / "x.png"),
        "--task",
        "a",
    ],
}


def written_over(site: Site, path: str) -> str:
    (site.own_folder / "over.yaml").write_text(f"extends: {Path(path).name}\n")
    return str(site.own_folder / "over.yaml")


def served(site: Site) -> str:
    """Write a model folder with random weights and one task; return its path."""
    settings = BackboneSettings(**small_run.BACKBONE)
    backbone = vit.build(settings)
    classes = ("x", "y")
    task = TaskState(
        "a",
        classes,
        "individual",
        vit.compute_digest(backbone),
        head={"weight": torch.zeros(2, 32), "bias": torch.zeros(2)},
    )
    files = {"backbone.safetensors": vit.to_bytes(backbone), "tasks/a.safetensors": task.to_bytes()}
    (site.own_folder / "model" / "tasks").mkdir(parents=True)
    for name, data in files.items():
        (site.own_folder / "model" / name).write_bytes(data)
    body = {
        "format": 1,
        "method": "individual",
        "settings": {},
        "backbone": small_run.BACKBONE,
        "backbone_digest": vit.compute_digest(backbone),
        "scenario": "task",
        "seed": 0,
        "carried": {},
        "preprocessing": {},
        "max_pixels": 10**6,
        "provenance": {},
        "files": {name: file_info(data) for name, data in files.items()},
        "tasks": [{"name": "a", "classes": classes, "card": "c", "data": "d", "role": "task"}],
    }
    (site.own_folder / "model" / "model.json").write_text(json.dumps(sealed(body)))
    return str(site.own_folder / "model")


def in_a_folder(site: Site, path: str, name: str) -> str:
    folder = served(site)
    (site.own_folder / "x.png").write_bytes(png())
    (site.own_folder / "model" / name).unlink()
    (site.own_folder / "model" / name).symlink_to(path)
    return folder


@pytest.mark.parametrize("kind", AS)
@pytest.mark.parametrize("case", ENDLESS)
def test_endless_file_is_refused(
    case: Any, kind: Any, site: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    make, says = ENDLESS[case]
    path = make(site)
    message = sentence(capfd, AS[kind](site, path))
    other_kinds = {
        "config": "longer than 16777216",
        "card": "longer than 16777216",
        "base of a config": "longer than 16777216",
        "search": "longer than 16777216",
        "image": "takes more than",
        "model.json": "is not a model folder",
    }
    assert says in message or (case == "terabyte" and other_kinds.get(kind, says) in message)


# ---- cells ---------------------------------------------------------------------------------------
FORMULAS = [
    "=1+1",
    "+1+1",
    "-2+3",
    "@SUM(A1)",
    "\t=1",
    "\r=1",
    "=cmd|' /C calc'!A0",
    "\uff1d1+1",
    "-x",
    '=HYPERLINK("http://x")',
    "x\r=1",
    "a\n=1",
]


def test_csv_cells_are_not_spreadsheet_formulas() -> None:
    plain = {"number": -1.5, "count": -3, "text": "-1.5", "none": float("nan"), "nothing": "-"}
    rows = [{**plain, text: text} for text in FORMULAS]
    data = csv_files.as_csv(rows).decode()
    heading, *table_rows = csv.reader(io.StringIO(data, newline=""))
    for line in (heading, *table_rows):
        assert not [
            cell
            for cell in line
            if cell[:1] in set("=+@\t\r\uff1d")
            or (cell[:1] == "-" and cell not in ("-", "-1.5", "-3"))
        ]
        assert len(line) == len(plain) + len(FORMULAS)
    assert table_rows[0][: len(plain)] == ["-1.5", "-3", "-1.5", "", "-"]
    assert len(table_rows) == len(FORMULAS), "a cell of several lines must be in quotes"


def test_file_names_in_rejected_csv_are_not_formulas(site: Any) -> None:
    card = small_run.make_card(site.own_folder, "good", "01", 3, 2, max_bad_fraction=0.9)
    (site.own_folder / "raw" / "good" / "train" / "0" / "=cmd|' !A0.png").write_bytes(b"no image")
    assert cli.main(["ingest", site.config(card)]) == 0
    with open(
        next((site.own_folder / "storage" / "stages").glob("*/*/rejected.csv")), newline=""
    ) as stream:
        rows = list(csv.DictReader(stream))
    assert rows
    assert not [
        cell for row in rows for cell in row.values() if cell.startswith(("=", "+", "-", "@"))
    ]


def test_a_config_of_many_megabytes_is_refused(
    site: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    (site.own_folder / "bad.yaml").write_text("#" * (17 << 20))
    assert "longer than 16777216 characters" in sentence(
        capfd, ["plan", str(site.own_folder / "bad.yaml")]
    )


# ---- backbones -----------------------------------------------------------------------------------
def no_connection(*arguments: Any, **_: Any) -> None:
    raise AssertionError(f"a connection was opened: {arguments[1:]}")


@pytest.mark.parametrize("case", BACKBONES)
def test_plan_refuses_a_hostile_backbone_without_network_access(
    case: Any, site: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket.socket, "connect", no_connection)
    backbone, says = backbones(site.outside)[case]
    card = small_run.make_card(site.own_folder, "good", "01", 3, 2)
    message = sentence(capfd, ["plan", written(site, card, backbone)])
    assert says in message


def written(site: Site, card: str, backbone: dict[str, Any]) -> str:
    """Write a config with this backbone, and return its path."""
    body = {
        **small_run.make_body(site.own_folder, {"bad": card}, ["finetune"]),
        "backbone": backbone,
    }
    return small_run.write_config(site.own_folder / "config.yaml", body)


@pytest.mark.parametrize(
    "options",
    [
        {"act_layer": "relu"},
        {"norm_layer": "rmsnorm"},
        {"norm_layer": "LayerNorm"},
        {"patch_size": [4, 4]},
        {"mlp_ratio": 2},
        {"init_values": None},
        {"weight_init": "jax"},
        {"qk_norm": True},
        {"reg_tokens": 1},
        {"in_chans": 3},
        {"init_values": 1e-5},
    ],
)
def test_backbone_accepts_the_options_of_its_model(options: Any) -> None:
    settings = BackboneSettings(
        **{**small_run.BACKBONE, "options": small_run.BACKBONE["options"] | options}
    )
    assert vit.count_elements(vit.outline(settings)) > 10_000


# ---- safetensors ---------------------------------------------------------------------------------
def tensors(header: Any, data: bytes = bytes(16), length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def one(**changes: Any) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **changes}}


TENSORS: dict[str, bytes] = {
    "truncated": tensors(one(), bytes(8)),
    "cut in the header": tensors(one())[:20],
    "empty": b"",
    "offsets below zero": tensors(one(data_offsets=[-16, 0])),
    "offsets beyond the end": tensors(one(data_offsets=[0, 160], shape=[40])),
    "offsets that overlap": tensors(
        {**one(), "b": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]}}, bytes(24)
    ),
    "header of 100 GB": tensors(one(), length=10**11),
    "header of 2^64": tensors(one(), length=2**64 - 1),
    "no such dtype": tensors(one(dtype="PICKLE")),
    "shape of NaN": tensors(b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,16]}}'),
    "shape of 2^64": tensors(one(shape=[2**62, 4])),
    "deep header": tensors(b"[" * 100_000),
    "a list": tensors(b"[]"),
    "deep words": tensors({"__metadata__": {"accrete": "[" * 100_000}}, b""),
    "pickle": pickle.dumps({"a": 1}),
    "old pickle": b"cos\nsystem\n(Vtrue\ntR.",
}


@pytest.mark.parametrize("case", TENSORS)
def test_hostile_tensors_are_refused(case: Any) -> None:
    with pytest.raises(UserError, match="not readable as safetensors"):
        load_tensors(TENSORS[case], "a file")


@pytest.mark.few("torch.save")
@pytest.mark.parametrize("case", [*TENSORS, "torch.save"])
def test_hostile_weights_of_a_backbone_are_refused(
    case: Any, site: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    path = site.own_folder / "weights.pt"
    if case == "torch.save":

        class Evil:
            def __reduce__(self) -> Any:
                return os.system, (f"touch {site.mark}",)

        torch.save({"cls_token": Evil()}, path)
    else:
        path.write_bytes(site.pickled() if case == "old pickle" else TENSORS[case])
    card = small_run.make_card(site.own_folder, "good", "01", 3, 2)
    message = sentence(
        capfd, ["run", site.config(card, backbone={**small_run.BACKBONE, "weights": str(path)})]
    )
    assert "not readable as safetensors" in message


def state(shape: Any, **changes: Any) -> bytes:
    header = {
        "task": "a",
        "classes": ["x"],
        "method": "m",
        "backbone_digest": "d",
        "meta": {},
        "mask_shapes": {"m": shape},
        **changes,
    }
    return safetensors.torch.save(
        {"masks/m": torch.zeros(1, dtype=torch.uint8)}, {"accrete": json.dumps(header)}
    )


def state_said(data: bytes) -> str:
    TaskState.from_bytes(data)
    return "it is one"


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "shape", [[2**33], [2**60], [2**32, 2**32], [-8], [9], [0], [8.5], "88", None, [[8]], {"x": 1}]
)
def test_mask_with_an_invalid_shape_is_refused_without_memory_use(
    shape: Any,
) -> None:
    outcome, megabytes = costs(state_said, state(shape))
    assert "not a task state" in outcome
    assert megabytes < 50


# ---- Parquet sources -----------------------------------------------------------------------------
def good(**columns: Any) -> pa.Table:
    return pa.table({"image": [png(n) for n in range(4)], "label": ["a", "b", "a", "b"], **columns})


def damaged() -> bytes:
    data = bytearray(parquet(good(), use_dictionary=False, compression="none"))
    data[4:60] = b"\xff" * 56
    return bytes(data)


PARQUETS: dict[str, tuple[Callable[[], bytes], str]] = {
    "damaged page": (damaged, "not readable as Parquet"),
    "truncated": (lambda: parquet(good())[:-30], "not readable as Parquet"),
    "pickle": (lambda: pickle.dumps(good().to_pylist()), "not readable as Parquet"),
    "label of a kind that is none": (
        lambda: parquet(good(label=[[1], [2], [3], [4]])),
        "the values of column 'label' are not classes",
    ),
    "label that is not a number": (
        lambda: parquet(good(label=[float("nan"), float("inf"), 0.5, -0.5])),
        "4 of 4 images are corrupt or unlabelled",
    ),
    "label of structs": (
        lambda: parquet(good(label=[{"a": 1}] * 4)),
        "the values of column 'label' are not classes",
    ),
    "label of thousands of digits": (
        lambda: parquet(good(label=["9" * 4000] * 4)),
        "4 of 4 images are corrupt or unlabelled",
    ),
    "huge label": (lambda: parquet(good(label=["a" * 5000] * 4)), "has 5000 characters"),
    "image that is a number": (
        lambda: parquet(good(image=[1, 2, 3, 4])),
        "8 of 8 images are corrupt or unlabelled",
    ),
    "image that is a path": (
        lambda: parquet(good(image=["/etc/passwd"] * 4)),
        "the row holds no bytes",
    ),
    "path that is a number": (
        lambda: parquet(good(image=[{"path": 5, "bytes": b"x"}] * 4)),
        "not an image",
    ),
}


@pytest.mark.parametrize("case", PARQUETS)
def test_a_hostile_parquet_is_refused(
    case: Any, site: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    make, says = PARQUETS[case]
    message = sentence(capfd, ["ingest", source(site, make())])
    assert says.replace("4 of 4", "8 of 8") in message


def test_pickled_objects_in_parquet_stay_bytes(
    site: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    evil = site.pickled()
    field = pa.field(
        "label",
        pa.binary(),
        metadata={
            "ARROW:extension:name": "arrow.py_extension_type",
            "ARROW:extension:metadata": evil,
        },
    )
    table = pa.table(
        [pa.array([png(n) for n in range(4)]), pa.array([evil] * 4)],
        pa.schema([pa.field("image", pa.binary()), field]),
    )
    assert "8 of 8 images are corrupt or unlabelled" in sentence(
        capfd, ["ingest", source(site, parquet(table))]
    )


def read_rows(path: str) -> str:
    file = parquet_format.ParquetFile(card_of("parquet"), "train", path)
    rows = parquet_format.read_parquet(file, 0, 1, 0)
    return str(sum(1 for _ in rows))


@pytest.mark.parametrize("column", ["label", "image"])
def test_dictionary_encoded_rows_take_the_memory_of_one_value(column: str, site: Any) -> None:
    """The file takes a few kilobytes. It has 20 MB once, and all rows together have 1.6 GB."""
    names = pa.DictionaryArray.from_arrays(
        pa.array([0] * 80, pa.int32()), pa.array([b"a" * (20 << 20)])
    )
    table = pa.table(
        {"image": pa.array([png()] * 80), "label": pa.array([b"a"] * 80), column: names}
    )
    (site.own_folder / "x.parquet").write_bytes(parquet(table, compression="zstd"))
    assert (site.own_folder / "x.parquet").stat().st_size < 20_000
    outcome, megabytes = costs(read_rows, str(site.own_folder / "x.parquet"))
    assert ("20971520 characters" if column == "label" else "80") in outcome
    assert megabytes < 200


# ---- torchvision ---------------------------------------------------------------------------------
def test_cifar_pickles_with_unknown_digests_are_not_loaded(
    site: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchvision.datasets import cifar

    def away(*args: Any, **kwargs: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr(cifar, "download_and_extract_archive", away)
    folder = site.own_folder / "cifar-10-batches-py"
    folder.mkdir()
    for name, _ in [
        *cifar.CIFAR10.train_list,
        *cifar.CIFAR10.test_list,
        [cifar.CIFAR10.meta["filename"], ""],
    ]:
        (folder / name).write_bytes(site.pickled())
    torchvision_format.load_data_set.cache_clear()
    message = sentence(
        capfd,
        [
            "ingest",
            site.config(
                site.card(
                    source={
                        "format": "torchvision",
                        "name": "CIFAR10",
                        "path": str(site.own_folder),
                    }
                )
            ),
        ],
    )
    assert "cannot load torchvision's CIFAR10" in message
    assert "put its files there" in message
    with pytest.raises(UserError, match="cannot load torchvision's CIFAR10"):
        torchvision_format.load_data_set(str(site.own_folder), "CIFAR10", "train", False)


# ---- columns that expand -------------------------------------------------------------------------
def repeated(rows: int, size: int) -> pa.Array:
    """Return a column that alternates two texts of `size` bytes. Each text is stored once."""
    texts = pa.array(["a" * size, "b" * size], pa.large_string())
    return pa.DictionaryArray.from_arrays(pa.array([n % 2 for n in range(rows)], pa.int32()), texts)


def write_parquet(path: Path, **columns: Any) -> None:
    rows = len(next(iter(columns.values())))
    images = [png(number % 2) for number in range(rows)]
    labels = ["ab"[number % 2] for number in range(rows)]
    table = pa.table({"image": images, "label": labels, **columns})
    pq.write_table(table, path, compression="zstd", store_schema=False)


def write_arrow(path: Path, **columns: Any) -> None:
    rows = len(next(iter(columns.values())))
    table = pa.table({"image": [png(number % 2) for number in range(rows)], **columns})
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(str(path), table.schema, options=options) as writer:
        writer.write_table(table)


BOMBS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "a column beside": (
        "parquet",
        lambda path: write_parquet(path, note=repeated(400, 1 << 24)),
    ),
    "a label": ("parquet", lambda path: write_parquet(path, label=repeated(3000, 1 << 20))),
    "a split": ("parquet", lambda path: write_parquet(path, split=repeated(3000, 1 << 20))),
    "a compressed label": (
        "arrow",
        lambda path: write_arrow(path, label=pa.array(["a" * (1 << 28)] * 2 + ["b"])),
    ),
    "a compressed column beside": (
        "arrow",
        lambda path: write_arrow(path, label=["a", "b"], note=pa.array(["a" * (1 << 28)] * 2)),
    ),
}


def look_at(path: str) -> int:
    """Return the number of data sets at a path."""
    return len(detect(Request(path)))


@pytest.mark.few(2)
@pytest.mark.parametrize("case", BOMBS)
def test_decompression_bomb_takes_little_memory(case: str, tmp_path: Path) -> None:
    suffix, write = BOMBS[case]
    path = tmp_path / f"bomb.{suffix}"
    write(path)
    assert path.stat().st_size < 1_000_000
    outcome, megabytes = costs(look_at, str(path))
    assert not str(outcome).startswith("!!!")
    assert megabytes < 500


@pytest.mark.parametrize("form", ["arrow", "parquet"])
def test_implausible_row_count_is_refused(form: str, tmp_path: Path) -> None:
    rows = 20_000_000
    path = tmp_path / f"a.{form}"
    table = pa.table({"image": pa.nulls(rows), "label": pa.nulls(rows)})
    if form == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table)
    with pytest.raises(UserError, match=r"20000000 rows in .* bytes"):
        [*read_batches(str(path), ["label"])]


def test_legacy_and_oversized_arrow_messages_are_refused(tmp_path: Path) -> None:
    """Messages of Arrow before 0.15 have no marker. Metadata above the limit is not read."""
    old, large = tmp_path / "old.arrow", tmp_path / "large.arrow"
    table = pa.table({"label": ["a"]})
    with pa.ipc.new_stream(
        str(old), table.schema, options=pa.ipc.IpcWriteOptions(use_legacy_format=True)
    ) as writer:
        writer.write_table(table)
    write_arrow(large, label=["a"])
    schema = table.schema.with_metadata({"note": "a" * (17 << 20)})
    with pa.ipc.new_stream(str(large), schema) as writer:
        writer.write_table(table.cast(schema))
    for path in (old, large):
        assert pa.ipc.open_stream(str(path)).read_all().num_rows == 1
        with pytest.raises(UserError, match="has no valid Arrow message at byte 0"):
            [*read_batches(str(path), ["label"])]


def test_compressed_arrow_within_bounds_is_read(tmp_path: Path) -> None:
    write_arrow(tmp_path / "a.arrow", label=[*"abc" * 500])
    batches = [*read_batches(str(tmp_path / "a.arrow"), ["label"])]
    assert [value for batch in batches for value in to_python_list(batch["label"])] == [
        *"abc" * 500
    ]
