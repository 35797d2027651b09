"""Files from strangers cannot run code, cannot reach outside their place, and cannot eat the memory: each is refused with one sentence."""

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
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import safetensors.torch
import torch
from hostile import BACKBONES, Site, backbones, costs, member, parquet, png, source
from PIL import Image
from test_bad_inputs import sentence

from pipeline import cli, formats, ingest, plain_yaml
from tests import small_run
from workers.errors import UserError
from workers.job import BackboneSettings
from workers.model import vit
from workers.taskstate import TaskState, load_tensors

REPOSITORY = Path(__file__).resolve().parent.parent
MARK = "the-code-of-a-stranger-ran"


def test_the_mark_is_left_by_what_is_loaded(tmp_path):
    found = Site(tmp_path)
    pickle.loads(found.pickled())
    assert found.mark.exists()


def take(megabytes: int) -> str:
    return f"{len(bytearray(megabytes << 20))} bytes"


def test_what_a_process_takes_is_seen():
    assert costs(take, 300)[1] >= 290


# ---- tars ------------------------------------------------------------------------------------------------------------------
def archive(site: Site, *members: bytes) -> str:
    """A tar source of two good images, then these members; the path of its config."""
    good = [member(f"{label}{n}.{ext}", data) for n, label in enumerate("ab") for ext, data in (("png", png(n)), ("cls", label.encode()))]
    (site.own / "raw").mkdir()
    for split in ("train", "test"):
        (site.own / "raw" / f"{split}.tar").write_bytes(b"".join([*good, *members]) + bytes(2 * tarfile.BLOCKSIZE))
    return site.config(site.card(source={"format": "tar", "path": str(site.own / "raw")}))


def pax(text: str) -> bytes:
    return f"{len(text) + 4:02d} {text}\n".encode()


TARS: dict[str, tuple[list[bytes], str]] = {
    "symbolic link": ([member("x.png", kind=tarfile.SYMTYPE, link="../../outside/kept")], "is a link"),
    "hard link": ([member("x.png", kind=tarfile.LNKTYPE, link="/etc/passwd")], "is a link"),
    "absolute path": ([member("/x.png", png())], "points outside"),
    "path that climbs": ([member("a/../../outside/x.png", png())], "points outside"),
    "path that climbs, in a long name": ([member("././@LongLink", b"../" * 60 + b"x.png\0", tarfile.GNUTYPE_LONGNAME), member("x", png())], "points outside"),
    "device": ([member("x.png", kind=tarfile.CHRTYPE)], "is a link"),
    "sparse file": ([member("x.png", kind=tarfile.GNUTYPE_SPARSE)], "plain files"),
    "size below zero": ([member("x.png", size=-5)], "-5 bytes"),
    "size beyond the end": ([member("x.png", size=10**12)], "1000000000000 bytes"),
    "label beyond the end": ([member("x.cls", size=10**11)], "100000000000 bytes"),
    "header of 100 GB": ([member("p", size=10**11, kind=tarfile.XHDTYPE)], "a header of 100000000000 bytes"),
    "name of 100 GB": ([member("p", size=10**11, kind=tarfile.GNUTYPE_LONGNAME)], "a header of 100000000000 bytes"),
    "thousands of headers for one file": ([member("p", pax("a=b"), tarfile.XHDTYPE)] * 5000, "no uncompressed tar"),
}


@pytest.mark.parametrize("case", TARS)
def test_a_hostile_tar_is_refused(case, site, capfd):
    members, says = TARS[case]
    said = sentence(capfd, ["ingest", archive(site, *members)])
    assert says in said
    assert "train.tar" in said


def list_one(path: str) -> str:
    return str(formats.list_tar(("train", path, "cls", ("a", "b"))))


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.REGTYPE])
def test_sizes_in_a_tar_take_no_memory(kind, site):
    archive(site, member("x.cls", size=3 << 30, kind=kind))
    with open(site.own / "raw" / "train.tar", "ab") as stream:
        stream.truncate(4 << 30)  # a file of holes, so that the size is true
    said, megabytes = costs(list_one, str(site.own / "raw" / "train.tar"))
    assert not said.startswith("!!!")
    assert megabytes < 100


def test_a_pickle_in_a_tar_is_not_loaded(site, capfd):
    """WebDataset's decoders would load what is called so."""
    hidden = [member(f"a0.{ext}", site.pickled()) for ext in ("pkl", "pyd", "pickle", "pth", "npy")]
    assert cli.main(["ingest", archive(site, *hidden)]) == 0
    shard = next((site.own / "storage" / "stages").glob("*/*/train-00000.tar"))
    with tarfile.open(shard) as tar:
        assert [name.rpartition(".")[2] for name in tar.getnames()] == ["png", "cls"] * 2


# ---- images ----------------------------------------------------------------------------------------------------------------
def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def huge_png(width: int, height: int, extra: bytes = b"") -> bytes:
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + extra + chunk(b"IDAT", zlib.compress(bytes(25 * height))) + chunk(b"IEND", b"")


@functools.cache
def deflated(megabytes: int) -> bytes:
    packer = zlib.compressobj(9)
    return b"".join(packer.compress(bytes(1 << 20)) for _ in range(megabytes)) + packer.flush()


def saved(kind: str, side: int = 8, **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (side, side)).save(buffer, kind, **options)
    return buffer.getvalue()


def sized(kind: str, at: int, form: str) -> bytes:
    """A small image whose header says 50,000 x 50,000."""
    data = bytearray(saved(kind))
    data[at : at + struct.calcsize(form)] = struct.pack(form, 50_000, 50_000)
    return bytes(data)


def tiff(side: int, data: bytes = bytes(64), compression: int = 1, tile: int = 0) -> bytes:
    tags = {256: side, 257: side, 258: 8, 259: compression, 262: 1, 277: 1}
    place = (322, 323, 324, 325) if tile else (273, 278, 279)
    start = 8 + 2 + 12 * (len(tags) + len(place)) + 4
    tags |= dict(zip(place, (tile, tile, start, len(data)) if tile else (start, side, len(data)), strict=True))
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in sorted(tags.items()))
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + data


def webp(side: int) -> bytes:
    """An animation on a canvas of side x side with one small frame."""
    frame, three = saved("WEBP", 16, lossless=True)[12:], lambda n: struct.pack("<I", n)[:3]
    parts = [(b"VP8X", b"\2\0\0\0" + three(side - 1) * 2), (b"ANIM", bytes(6)), (b"ANMF", bytes(6) + three(15) * 2 + bytes(4) + frame)]
    body = b"WEBP" + b"".join(kind + struct.pack("<I", len(data)) + data for kind, data in parts)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def text_bomb(kind: bytes, head: bytes) -> bytes:
    return huge_png(8, 8, chunk(kind, head + deflated(100)))


def png_of(width: int, height: int, rows: int) -> bytes:
    """A black PNG of one bit a pixel, of which so many rows are there."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    body = zlib.compress(bytes((1 + -(-width // 8)) * rows), 9)
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def blank(kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.new("1" if kind == "TIFF" else "L", (7000, 7000), 1).save(buffer, kind, **options)
    return buffer.getvalue()


IMAGES: dict[str, tuple[Callable[[], bytes], str]] = {
    "png of one row": (lambda: png_of(7000, 7000, 1), "7000 x 7000 pixels in 74 bytes are more than max_pixels_per_byte = 2000"),
    "png of one colour": (lambda: png_of(7000, 7000, 7000), "are more than max_pixels_per_byte"),
    "png of half its rows": (lambda: png_of(900, 900, 450), "its data ends before its last row"),
    "webp of one colour": (lambda: blank("WEBP", lossless=True), "are more than max_pixels_per_byte"),
    "tiff of one colour": (lambda: blank("TIFF", compression="group4"), "are more than max_pixels_per_byte"),
    "png": (lambda: huge_png(50_000, 50_000), "50000 x 50000 is more than max_pixels"),
    "gif": (lambda: sized("GIF", 6, "<HH"), "50000 x 50000 is more than max_pixels"),
    "bmp": (lambda: sized("BMP", 18, "<ii"), "50000 x 50000 is more than max_pixels"),
    "ppm": (lambda: b"P6 50000 50000 255\n", "50000 x 50000 is more than max_pixels"),
    "tiff": (lambda: tiff(50_000), "50000 x 50000 is more than max_pixels"),
    "tile of a tiff": (lambda: tiff(64, deflated(400), 8, 20_000), "20000 x 20000 is more than max_pixels"),
    "webp": (lambda: webp(50_000), "50000 x 50000 is more than max_pixels"),
    "zTXt": (lambda: text_bomb(b"zTXt", b"k\0\0"), "Decompressed data too large"),
    "iTXt": (lambda: text_bomb(b"iTXt", b"k\0\1\0\0\0"), "Decompressed data too large"),
    "iCCP": (lambda: text_bomb(b"iCCP", b"k\0\0"), "Decompressed data too large"),
    "PostScript": (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n", "not an image"),
    "pickle": (lambda: b"\x80\x04cos\nsystem\n", "not an image"),
}


def ingest_quietly(path: str) -> int:
    warnings.simplefilter("ignore")
    return cli.main(["ingest", path])


def test_hostile_images_are_listed_with_their_reasons_and_take_no_memory(site, monkeypatch):
    monkeypatch.setenv("PATH", f"{site.own}:{os.environ['PATH']}")
    (site.own / "gs").write_text(f"#!/bin/sh\ntouch {site.mark}\n")  # what Pillow would give PostScript to
    (site.own / "gs").chmod(0o755)
    for split in ("train", "test"):
        for n, label in enumerate("ab"):
            (site.own / "raw" / split / label).mkdir(parents=True)
            (site.own / "raw" / split / label / "good.png").write_bytes(png(n))
    for name, (make, _) in IMAGES.items():
        (site.own / "raw" / "train" / "a" / f"{name}.png").write_bytes(make())
    code, megabytes = costs(ingest_quietly, site.config(site.card(source={"format": "folder", "path": str(site.own / "raw")})))
    assert code == 0
    assert megabytes < 300
    with open(next((site.own / "storage" / "stages").glob("*/*/rejected.csv"))) as stream:
        reasons = {row["source"].rsplit("/", 1)[-1].removesuffix(".png"): row["reason"] for row in csv.DictReader(stream)}
    assert reasons.keys() >= IMAGES.keys()
    for name, (_, says) in IMAGES.items():
        assert says in reasons[name], name


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
@pytest.mark.parametrize("size", [(1, 1), (9, 7), (31, 40)])
def test_whole_pngs_of_every_kind_are_taken(mode, size):
    buffer = io.BytesIO()
    Image.new(mode, size).save(buffer, "PNG", **({"bits": 4} if mode == "P" else {}))
    assert ingest.problem_of(buffer.getvalue(), 10**6) is None


@pytest.mark.parametrize(("bits", "color"), [(1, 0), (8, 2), (16, 6), (4, 3)])
@pytest.mark.parametrize("size", [(1, 1), (2, 5), (9, 7), (33, 40)])
def test_interlaced_pngs_are_taken_whole_and_refused_cut(bits, color, size):
    total = 0
    for x, y, across, down in ingest.ADAM7:
        columns, rows = len(range(x, size[0], across)), len(range(y, size[1], down))
        total += rows * (1 + -(-columns * bits * ingest.CHANNELS[color] // 8)) if columns else 0
    for missing in (0, 1):
        head = chunk(b"IHDR", struct.pack(">IIBBBBB", *size, bits, color, 0, 0, 1))
        palette = chunk(b"PLTE", bytes(48)) if color == 3 else b""
        body = chunk(b"IDAT", zlib.compress(bytes(total - missing)))
        data = b"\x89PNG\r\n\x1a\n" + head + palette + body + chunk(b"IEND", b"")
        assert (ingest.problem_of(data, 10**6) is None) == (not missing)


def test_a_blank_page_is_taken_where_the_card_says_so():
    assert ingest.problem_of(png_of(3000, 3000, 3000), 50_000_000) is not None
    assert ingest.problem_of(png_of(3000, 3000, 3000), 50_000_000, 10**6) is None
    assert ingest.problem_of(png_of(1000, 1000, 1000), 50_000_000) is None, "of small ones any"
    grey = io.BytesIO()
    Image.new("L", (7000, 7000)).save(grey, "PNG")
    assert ingest.problem_of(grey.getvalue(), 50_000_000) is None


def first_frame(data: bytes) -> int:
    assert ingest.problem_of(data, 50_000_000) is None
    return len(ingest.to_stored(data, 50_000_000)[0])


def test_of_thousands_of_frames_one_is_decoded():
    frames = [Image.new("L", (64, 64), n) for n in range(2)]
    buffer = io.BytesIO()
    frames[0].save(buffer, "GIF", save_all=True, append_images=[frames[n % 2] for n in range(1, 2000)], duration=[10 + n % 2 for n in range(2000)])
    size, megabytes = costs(first_frame, buffer.getvalue())
    assert 0 < size < 5000
    assert megabytes < 60


def test_an_image_file_of_a_terabyte_is_listed_and_not_read(site, capfd):
    for split in ("train", "test"):
        for label in "ab":
            (site.own / "raw" / split / label).mkdir(parents=True)
            (site.own / "raw" / split / label / "good.png").write_bytes(png(ord(label)))
    with open(site.own / "raw" / "train" / "a" / "huge.png", "wb") as stream:
        stream.truncate(1 << 40)
    assert cli.main(["ingest", site.config(site.card(source={"format": "folder", "path": str(site.own / "raw")}))]) == 0
    assert "1099511627776 bytes are more than" in next((site.own / "storage" / "stages").glob("*/*/rejected.csv")).read_text()


# ---- YAML ------------------------------------------------------------------------------------------------------------------
LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10))
MERGES = "a0: &a0 {x: 1, y: 2}\n" + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}\n" for n in range(1, 10))
YAMLS: dict[str, tuple[str, str]] = {
    "tag that calls": (f"name: !!python/object/apply:os.system ['touch {MARK}']", "could not determine a constructor"),
    "tag that makes": ("name: !!python/object/new:subprocess.Popen [[ls]]", "could not determine a constructor"),
    "tag that names": ("name: !!python/name:os.system", "could not determine a constructor"),
    "a billion laughs": (LAUGHS, "each alias counted in full"),
    "a billion merges": (MERGES, "each alias counted in full"),
    "alias of itself": ("name: &a [*a]", "stands inside what it stands for"),
    "deep lists": ("name: " + "[" * 20_000, "more than 50 levels"),
    "deep mappings": ("".join(" " * n + "a:\n" for n in range(2000)), "more than 50 levels"),
    "many values": ("name: [" + "1," * 3000 + "]", "more than 2000 values"),
    "month 13": ("name: 2024-13-01", "month must be in"),
    "number without end": ("name: " + "9" * 6000, "write the value in quotes"),
    "set of a list": ("name: !!set [1]", "expected a mapping"),
}


@pytest.mark.parametrize("kind", ["config", "card"])
@pytest.mark.parametrize("case", YAMLS)
def test_hostile_yaml_is_refused(case, kind, site, capfd, monkeypatch):
    monkeypatch.chdir(site.outside)
    monkeypatch.setattr(plain_yaml, "MOST_VALUES", 2000)
    text, says = YAMLS[case]
    (site.own / "bad.yaml").write_text(text)
    path = str(site.own / "bad.yaml") if kind == "config" else site.config(str(site.own / "bad.yaml"))
    said = sentence(capfd, ["plan", path])
    assert says in said
    assert "bad.yaml" in said


def whole(text: str) -> str:
    return str(len(repr(plain_yaml.parse_yaml(text, "x.yaml"))))


@pytest.mark.parametrize("text", [LAUGHS, MERGES, "[" * 1_000_000], ids=["laughs", "merges", "deep"])
def test_hostile_yaml_takes_no_memory(text):
    said, megabytes = costs(whole, text)
    assert "not readable as YAML" in said
    assert megabytes < 100


def test_aliases_that_people_write_are_read():
    assert plain_yaml.parse_yaml("a: &a {x: 1, y: [2]}\nb: {<<: *a, x: 3}\nc: [*a, *a]", "x")["b"] == {"x": 3, "y": [2]}


def test_a_text_of_many_megabytes_is_no_config(site, capfd):
    (site.own / "bad.yaml").write_text("#" * (17 << 20))
    assert "longer than 16777216 characters" in sentence(capfd, ["plan", str(site.own / "bad.yaml")])


# ---- backbones -------------------------------------------------------------------------------------------------------------
def no_connection(*arguments: Any, **_: Any) -> None:
    raise AssertionError(f"a connection was opened: {arguments[1:]}")


@pytest.mark.parametrize("case", BACKBONES)
def test_a_backbone_of_a_stranger_is_refused_by_plan_and_reaches_nothing(case, site, capfd, monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", no_connection)
    backbone, says = backbones(site.outside)[case]
    card = small_run.make_card(site.own, "good", "01", 3, 2)
    said = sentence(capfd, ["plan", written(site, card, backbone)])
    assert says in said


def written(site: Site, card: str, backbone: dict[str, Any]) -> str:
    """The path of a config with this backbone alone."""
    body = {**small_run.make_body(site.own, {"bad": card}, ["finetune"]), "backbone": backbone}
    return small_run.write_config(site.own / "config.yaml", body)


@pytest.mark.parametrize("options", [
    {"act_layer": "relu"}, {"norm_layer": "groupnorm1"}, {"norm_layer": "LayerNorm"}, {"patch_size": [4, 4]}, {"mlp_ratio": 2}, {"init_values": None},
    {"weight_init": "jax"}, {"qk_norm": True}, {"reg_tokens": 1}, {"in_chans": 3}, {"init_values": 1e-5}])
def test_what_a_model_itself_takes_is_an_option(options):
    settings = BackboneSettings(**{**small_run.BACKBONE, "options": small_run.BACKBONE["options"] | options})
    assert vit.size_of(vit.check(settings)) > 10_000


# ---- safetensors -----------------------------------------------------------------------------------------------------------
def tensors(header: Any, data: bytes = bytes(16), length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def one(**changes: Any) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **changes}}


TENSORS: dict[str, bytes] = {
    "truncated": tensors(one(), bytes(8)), "cut in the header": tensors(one())[:20], "empty": b"",
    "offsets below zero": tensors(one(data_offsets=[-16, 0])), "offsets beyond the end": tensors(one(data_offsets=[0, 160], shape=[40])),
    "offsets that overlap": tensors({**one(), "b": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]}}, bytes(24)),
    "header of 100 GB": tensors(one(), length=10**11), "header of 2^64": tensors(one(), length=2**64 - 1),
    "no such dtype": tensors(one(dtype="PICKLE")), "shape of NaN": tensors(b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,16]}}'),
    "shape of 2^64": tensors(one(shape=[2**62, 4])), "deep header": tensors(b"[" * 100_000), "a list": tensors(b"[]"),
    "deep words": tensors({"__metadata__": {"accrete": "[" * 100_000}}, b""), "pickle": pickle.dumps({"a": 1}), "old pickle": b"cos\nsystem\n(Vtrue\ntR.",
}


@pytest.mark.parametrize("case", TENSORS)
def test_hostile_tensors_are_refused(case):
    with pytest.raises(UserError, match="not readable as safetensors"):
        load_tensors(TENSORS[case], "a file")


@pytest.mark.parametrize("case", [*TENSORS, "torch.save"])
def test_hostile_weights_of_a_backbone_are_refused(case, site, capfd):
    path = site.own / "weights.pt"
    if case == "torch.save":
        class Evil:
            def __reduce__(self):
                return os.system, (f"touch {site.mark}",)
        torch.save({"cls_token": Evil()}, path)
    else:
        path.write_bytes(site.pickled() if case == "old pickle" else TENSORS[case])
    card = small_run.make_card(site.own, "good", "01", 3, 2)
    said = sentence(capfd, ["run", site.config(card, backbone={**small_run.BACKBONE, "weights": str(path)})])
    assert "not readable as safetensors" in said


def state(shape: Any, **changes: Any) -> bytes:
    header = {"task": "a", "classes": ["x"], "method": "m", "backbone_digest": "d", "meta": {}, "mask_shapes": {"m": shape}, **changes}
    return safetensors.torch.save({"masks/m": torch.zeros(1, dtype=torch.uint8)}, {"accrete": json.dumps(header)})


def state_said(data: bytes) -> str:
    TaskState.from_bytes(data)
    return "it is one"


@pytest.mark.parametrize("shape", [[2**33], [2**60], [2**32, 2**32], [-8], [9], [0], [8.5], "88", None, [[8]], {"x": 1}])
def test_a_mask_that_says_it_is_larger_than_its_bits_is_refused_and_takes_no_memory(shape):
    said, megabytes = costs(state_said, state(shape))
    assert "not a task state" in said
    assert megabytes < 50


# ---- Parquet sources -------------------------------------------------------------------------------------------------------
def good(**columns: Any) -> pa.Table:
    return pa.table({"image": [png(n) for n in range(4)], "label": ["a", "b", "a", "b"], **columns})


def damaged() -> bytes:
    data = bytearray(parquet(good(), use_dictionary=False, compression="none"))
    data[4:60] = b"\xff" * 56
    return bytes(data)


PARQUETS: dict[str, tuple[Callable[[], bytes], str]] = {
    "damaged page": (damaged, "not readable as Parquet"), "truncated": (lambda: parquet(good())[:-30], "not readable as Parquet"),
    "pickle": (lambda: pickle.dumps(good().to_pylist()), "not readable as Parquet"),
    "label of a kind that is none": (lambda: parquet(good(label=[[1], [2], [3], [4]])), "4 of 4 images are corrupt or unlabelled"),
    "label that is no number": (lambda: parquet(good(label=[float("nan"), float("inf"), 0.5, -0.5])), "4 of 4 images are corrupt or unlabelled"),
    "label of structs": (lambda: parquet(good(label=[{"a": 1}] * 4)), "4 of 4 images are corrupt or unlabelled"),
    "label of thousands of digits": (lambda: parquet(good(label=["9" * 4000] * 4)), "4 of 4 images are corrupt or unlabelled"),
    "huge label": (lambda: parquet(good(label=["a" * 5000] * 4)), "has 5000 characters"),
    "image that is a number": (lambda: parquet(good(image=[1, 2, 3, 4])), "8 of 8 images are corrupt or unlabelled"),
    "image that is a path": (lambda: parquet(good(image=["/etc/passwd"] * 4)), "the row holds no bytes"),
    "path that is a number": (lambda: parquet(good(image=[{"path": 5, "bytes": b"x"}] * 4)), "not an image"),
}


@pytest.mark.parametrize("case", PARQUETS)
def test_a_hostile_parquet_is_refused(case, site, capfd):
    make, says = PARQUETS[case]
    said = sentence(capfd, ["ingest", source(site, make())])
    assert says.replace("4 of 4", "8 of 8") in said


def test_pickled_objects_in_parquet_stay_bytes(site, capfd):
    evil = site.pickled()
    field = pa.field("label", pa.binary(), metadata={"ARROW:extension:name": "arrow.py_extension_type", "ARROW:extension:metadata": evil})
    table = pa.table([pa.array([png(n) for n in range(4)]), pa.array([evil] * 4)], pa.schema([pa.field("image", pa.binary()), field]))
    assert "8 of 8 images are corrupt or unlabelled" in sentence(capfd, ["ingest", source(site, parquet(table))])


def read_rows(path: str) -> str:
    return str(sum(1 for _ in formats.read_parquet("train", path, 0, 0, ("image", "label"), ("a", "b"))))


@pytest.mark.parametrize("column", ["label", "image"])
def test_rows_that_all_say_the_same_huge_value_take_the_memory_of_one(column, site):
    """A few kilobytes that hold 20 MB once, and mean 1.6 GB."""
    names = pa.DictionaryArray.from_arrays(pa.array([0] * 80, pa.int32()), pa.array([b"a" * (20 << 20)]))
    table = pa.table({"image": pa.array([png()] * 80), "label": pa.array([b"a"] * 80), column: names})
    (site.own / "x.parquet").write_bytes(parquet(table, compression="zstd"))
    assert (site.own / "x.parquet").stat().st_size < 20_000
    said, megabytes = costs(read_rows, str(site.own / "x.parquet"))
    assert ("20971520 characters" if column == "label" else "80") in said
    assert megabytes < 200


# ---- torchvision -----------------------------------------------------------------------------------------------------------
def test_pickles_of_cifar_that_are_not_the_published_ones_are_not_loaded(site, capfd, monkeypatch):
    from torchvision.datasets import cifar

    def away(*args: Any, **kwargs: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr(cifar, "download_and_extract_archive", away)
    folder = site.own / "cifar-10-batches-py"
    folder.mkdir()
    for name, _ in [*cifar.CIFAR10.train_list, *cifar.CIFAR10.test_list, [cifar.CIFAR10.meta["filename"], ""]]:
        (folder / name).write_bytes(site.pickled())
    formats.torchvision_set.cache_clear()
    said = sentence(capfd, ["ingest", site.config(site.card(source={"format": "torchvision", "name": "CIFAR10", "path": str(site.own)}))])
    assert "CIFAR10 is not below" in said
    with pytest.raises(UserError, match="CIFAR10 is not below"):
        formats.torchvision_set(str(site.own), "CIFAR10", "train", False)


