"""Tests of ingest: results, rejected images, names and links, checks of a card, and formats."""

from __future__ import annotations

import csv
import hashlib
import io
import os
import socket
import tarfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import webdataset
from PIL import Image

from pipeline.data import formats
from pipeline.data.card_files import load_card_file
from pipeline.data.cards import Card, SourceFormat
from pipeline.data.formats import fingerprint
from pipeline.data.formats.base import Format
from pipeline.data.ingest import ingest
from pipeline.graph import raw_data
from pipeline.graph.store import Store
from tests import s3
from tests.shard_names import shard_name
from workers.data.decoding import decode
from workers.data.rows import select
from workers.data.shards import Shards
from workers.errors import DamagedArtifact, UserError
from workers.job import Task
from workers.storage.artifact import Artifact, Manifest

CLASSES = ("cat", "dog")
DATA = Path(
    os.environ.get("ACCRETE_DATA", Path(__file__).resolve().parents[2] / ".." / "shared" / "data")
)


def picture(seed: int, mode: str = "RGB", form: str = "PNG", side: int = 9) -> bytes:
    channels = {"RGB": (3,), "RGBA": (4,), "L": ()}[mode]
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side + 2, *channels), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, form)
    return buffer.getvalue()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return a folder with ten train and four test images of each class."""
    for c, name in enumerate(CLASSES):
        for split, count in (("train", 10), ("test", 4)):
            folder = tmp_path / "source" / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                (folder / f"{i:02d}.png").write_bytes(
                    picture(1000 * c + 100 * (split == "test") + i)
                )
    return tmp_path / "source"


def card_of(path: Path | str, form: str = "folder", **changes: Any) -> Card:
    source = {"format": form, "path": str(path), **changes.pop("source", {})}
    if form in ("parquet", "tar"):
        source = {"numbers": "places", **source}
    return Card.model_validate(
        {
            "name": "tiny",
            "licence": "MIT",
            "classes": CLASSES,
            "shard_images": 7,
            "source": source,
            **changes,
        }
    )


def serial(fn: Any, items: Any) -> Any:
    return [fn(item) for item in items]


def threads(fn: Any, items: Any) -> Any:
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(fn, items))


def run(card: Card, root: Path, key: str = "k", map_fn: Any = serial) -> tuple[Manifest, Shards]:
    manifest = ingest(card, str(root), key, map_fn, {"step": "ingest"})
    return manifest, Shards.open(str(root), key)


def listed(root: Path, key: str = "k") -> list[dict[str, str]]:
    return list(
        csv.DictReader(io.StringIO(Artifact.need(str(root), key).read("rejected.csv").decode()))
    )


# ---- the result ----------------------------------------------------------------------------------
def test_every_image_is_stored_byte_for_byte(source: Any, tmp_path: Path) -> None:
    manifest, shards = run(card_of(source), tmp_path)
    assert manifest["counts"] == {"train": 20, "test": 8}
    assert manifest["step"] == "ingest"
    assert manifest["wall_s"] > 0, "the report shows how long it took"
    rows = shards.read_index().to_pylist()
    expected = {shard_name(split, name) for split in ("train", "test") for name in CLASSES}
    expected |= {shard_name("train", name, 1) for name in CLASSES}
    assert {r["shard"] for r in rows} == expected
    for row in rows:
        split, name, stem = row["key"].split("/")
        assert (split, name) == (row["split"], row["class"])
        data = shards.read(row["shard"], row["offset"], row["bytes"])
        assert data == (source / split / name / f"{stem}.png").read_bytes()
        assert hashlib.sha256(data).hexdigest() == row["sha256"]


def text_of(tar: tarfile.TarFile, name: str) -> str:
    stream = tar.extractfile(name)
    assert stream is not None
    return stream.read().decode()


def test_shards_are_webdataset_of_one_class_each(source: Any, tmp_path: Path) -> None:
    _, shards = run(card_of(source), tmp_path)
    for name in CLASSES:
        uri = shards.uri(shard_name("train", name))
        with tarfile.open(uri) as tar:
            members = tar.getnames()
            assert [n.rsplit(".", 1)[1] for n in members] == ["png", "txt"] * 7
            assert all(member.mtime == 0 for member in tar.getmembers())
            assert {text_of(tar, n) for n in members if n.endswith(".txt")} == {name}
        records = webdataset.WebDataset(uri, shardshuffle=False)
        keys = [record["__key__"] for record in records]
        assert keys == [n[:-4] for n in members if n[-3:] == "png"]


def test_the_index_is_sorted_by_split_class_and_image(source: Any, tmp_path: Path) -> None:
    """The images of a shard are stored in the same order."""
    (source / "train" / "dog" / "again.png").write_bytes(
        (source / "train" / "dog" / "00.png").read_bytes()
    )
    _, shards = run(card_of(source), tmp_path)
    rows = shards.read_index().to_pylist()
    order = [(r["split"] == "test", r["class"], r["sha256"], r["key"]) for r in rows]
    assert order == sorted(order)
    places = [(r["split"] == "test", r["class"], r["shard"], r["offset"]) for r in rows]
    assert places == sorted(places)


def test_the_package_webdataset_decodes_the_shards(source: Any, tmp_path: Path) -> None:
    card = card_of(source, class_order_seed=0)
    assert card.order() != CLASSES
    _, shards = run(card, tmp_path)
    urls = [shards.uri(shard_name("train", name, number)) for name in CLASSES for number in (0, 1)]
    records = webdataset.WebDataset(urls, shardshuffle=False)
    decoded = records.decode("pil").to_tuple("jpg;png;webp", "txt", "__key__")
    num_images = 0
    for image, name, key in decoded:
        assert key.split("/")[1] == name
        pixels = np.asarray(Image.open(source / "train" / name / f"{key.split('/')[2]}.png"))
        assert np.array_equal(np.asarray(image), pixels)
        num_images += 1
    assert num_images == 20


def test_parallel_work_gives_the_same_bytes_as_serial_work(source: Any, tmp_path: Path) -> None:
    one, _ = run(card_of(source), tmp_path, "one", serial)
    two, _ = run(card_of(source), tmp_path, "two", threads)
    assert one["files"] == two["files"]
    assert one["content"] == two["content"]
    assert len(one["files"]) == 11


def test_only_the_published_attempt_remains(source: Any, tmp_path: Path) -> None:
    manifest, _ = run(parquet_card(tmp_path, source), tmp_path, map_fn=threads)
    assert sorted(os.listdir(tmp_path / "k")) == sorted([manifest["attempt"], "manifest.json"])


def test_additional_class_keeps_keys_and_shards_of_other_classes(
    source: Any, tmp_path: Path
) -> None:
    manifest, all_of_it = run(card_of(source), tmp_path, "all")
    card = card_of(source, classes=["dog"], max_bad_fraction=1)
    manifest_of_part, part = run(card, tmp_path, "part")
    names = [shard_name("train", "dog"), shard_name("train", "dog", 1), shard_name("test", "dog")]
    assert {n for n in manifest_of_part["files"] if n.endswith(".tar")} == {*names}
    for name in names:
        assert manifest_of_part["files"][name] == manifest["files"][name]
    assert (
        all_of_it.select("train", ["dog"])["key"].to_pylist()
        == part.select("train", ["dog"])["key"].to_pylist()
    )


# ---- bad images ----------------------------------------------------------------------------------
def test_corrupt_unlabelled_and_other_files_are_listed_with_a_reason(
    source: Any, tmp_path: Path
) -> None:
    whole = (source / "train" / "cat" / "00.png").read_bytes()
    (source / "train" / "cat" / "cut.png").write_bytes(whole[: len(whole) // 2])
    (source / "train" / "cat" / "text.jpg").write_text("no image")
    (source / "train" / "cat" / "notes.txt").write_text("notes")
    (source / "train" / "cat" / "huge.png").write_bytes(picture(1, side=40))
    (source / "train" / "stray.png").write_bytes(whole)
    (source / "train" / "bird").mkdir()
    (source / "train" / "bird" / "a.png").write_bytes(whole)
    manifest, shards = run(card_of(source, max_bad_fraction=0.5, max_pixels=1000), tmp_path)
    assert manifest["rejected"] == {"corrupt": 3, "unlabelled": 2, "other file": 1}
    assert shards.read_index().num_rows == 28
    reasons = {r["source"]: r["reason"] for r in listed(tmp_path)}
    assert reasons["train/cat/text.jpg"] == "corrupt: not an image"
    assert "truncated" in reasons["train/cat/cut.png"].lower()
    assert "max_pixels" in reasons["train/cat/huge.png"]
    assert "bird" in reasons["train/bird/a.png"]
    assert "no label" in reasons["train/stray.png"]
    assert all(r["kept"] == "no" for r in listed(tmp_path))


def test_too_many_bad_images_stop_the_stage_and_publish_nothing(
    source: Any, tmp_path: Path
) -> None:
    (source / "train" / "cat" / "bad.png").write_bytes(b"no image")
    with pytest.raises(
        UserError, match=r"1 of 29 images.*0\.01.*train/cat/bad\.png \(corrupt: not an image\)"
    ):
        run(card_of(source), tmp_path)
    assert Artifact.open(str(tmp_path), "k") is None
    assert run(card_of(source, max_bad_fraction=0.1), tmp_path)[0]["rejected"] == {"corrupt": 1}


def test_subset_keeps_images_with_the_lowest_key_hashes(source: Any, tmp_path: Path) -> None:
    manifest, shards = run(card_of(source, per_class={"train": 3, "test": 1}), tmp_path)
    assert manifest["counts"] == {"train": 6, "test": 2}
    assert manifest["rejected"] == {"left out": 20}
    rows = shards.read_index().to_pylist()
    for split, count in (("train", 3), ("test", 1)):
        for name in CLASSES:
            keys = sorted(
                (f"{split}/{name}/{i:02d}" for i in range(10 if split == "train" else 4)),
                key=lambda key: hashlib.sha256(key.encode()).digest(),
            )
            assert {r["key"] for r in rows if (r["split"], r["class"]) == (split, name)} == set(
                keys[:count]
            )


@pytest.mark.parametrize(("duplicates", "train"), [("keep", 22), ("drop", 21)])
def test_duplicates_are_listed_and_dropped_only_if_configured(
    source: Any, tmp_path: Path, duplicates: str, train: int
) -> None:
    (source / "train" / "cat" / "again.png").write_bytes(
        (source / "train" / "cat" / "00.png").read_bytes()
    )
    (source / "train" / "cat" / "leak.png").write_bytes(
        (source / "test" / "cat" / "00.png").read_bytes()
    )
    manifest, _ = run(card_of(source, duplicates=duplicates, leaks="allow"), tmp_path)
    assert manifest["rejected"] == {"duplicate": 1, "in train too": 1}
    assert manifest["counts"] == {"train": train, "test": 8}
    rows = {r["reason"].split(":")[0]: r for r in listed(tmp_path)}
    assert rows["duplicate"]["key"] == "train/cat/again"
    assert rows["duplicate"]["kept"] == ("yes" if duplicates == "keep" else "no")
    assert (rows["in train too"]["key"], rows["in train too"]["kept"]) == ("test/cat/00", "yes")


# ---- names and links -----------------------------------------------------------------------------
def reasons(root: Path, key: str = "k") -> dict[str, str]:
    return {row["source"]: row["reason"] for row in listed(root, key)}


def test_non_utf8_images_are_read_and_classes_listed(source: Any, tmp_path: Path) -> None:
    cat, odd = (os.fsencode(source / "train" / name) for name in ("cat", "caf"))
    os.mkdir(odd + b"\xe9")
    for path in (cat + b"/caf\xe9.png", cat + b"/caf\xe8.png", odd + b"\xe9/a.png"):
        with open(path, "wb") as stream:
            stream.write(picture(sum(path)))
    assert fingerprint(card_of(source))
    manifest, shards = run(card_of(source, max_bad_fraction=0.1), tmp_path)
    assert manifest["counts"] == {"train": 22, "test": 8}
    keys = [
        key for key in shards.read_index()["key"].to_pylist() if key.startswith("train/cat/caf_")
    ]
    assert len(set(keys)) == 2
    assert reasons(tmp_path) == {
        "train/caf\\xe9/a.png": "unlabelled: class 'caf\\\\xe9' is not on the card"
    }
    text = (
        f"name: mine\nlicence: MIT\nclasses: from_source\nnum_classes: 3\nsource: {{format: "
        f"folder, path: {source}}}\n"
    )
    (tmp_path / "card.yaml").write_text(text)
    with pytest.raises(UserError, match=r"class 'caf\\udce9' is empty, too long or not printable"):
        load_card_file(str(tmp_path / "card.yaml"))


def test_line_break_in_file_name_is_escaped_in_rejected_list(source: Any, tmp_path: Path) -> None:
    (source / "train" / "cat" / "a\nb.png").write_bytes(b"no image")
    run(card_of(source, max_bad_fraction=0.1), tmp_path)
    assert reasons(tmp_path) == {"train/cat/a\\nb.png": "corrupt: not an image"}


def test_special_files_and_dangling_links_are_listed_but_not_opened(
    source: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cat = source / "train" / "cat"
    os.mkfifo(cat / "fifo.png")
    monkeypatch.chdir(cat)  # the path of a socket must be short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket.png")
    (cat / "zero.png").symlink_to("/dev/zero")
    (cat / "gone.png").symlink_to("nowhere.png")
    (cat / "loop.png").symlink_to("loop.png")
    (cat / "gone.txt").symlink_to("nowhere.txt")
    manifest, _ = run(card_of(source, max_bad_fraction=0.1), tmp_path)
    assert manifest["counts"] == {"train": 20, "test": 8}
    assert manifest["rejected"] == {"link": 2, "other file": 4}
    assert reasons(tmp_path) == {
        "train/cat/fifo.png": "other file: a named pipe",
        "train/cat/socket.png": "other file: a socket",
        "train/cat/zero.png": "other file: a device",
        "train/cat/gone.png": "link: to nothing",
        "train/cat/loop.png": "link: to itself",
        "train/cat/gone.txt": "other file: a link to nothing",
    }


def test_dangling_image_link_counts_as_bad_image(source: Any, tmp_path: Path) -> None:
    (source / "train" / "cat" / "gone.png").symlink_to("nowhere.png")
    with pytest.raises(UserError, match=r"1 of 29 images.*gone\.png \(link: to nothing\)"):
        run(card_of(source), tmp_path)


def test_linked_folders_are_read_once_and_never_outside_the_source(
    source: Any, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.png").write_bytes(picture(7))
    (source / "more" / "cats").mkdir(parents=True)
    (source / "more" / "cats" / "new.png").write_bytes(picture(88))
    (source / "more" / "cats" / "up").symlink_to("../..")
    cat, dog = source / "train" / "cat", source / "train" / "dog"
    for link_path, target in (
        (cat / "up", ".."),
        (cat / "top", "../.."),
        (dog / "cat", "../cat"),
        (cat / "out", outside),
        (cat / "root", "/"),
        (source / "train" / "slash", "../../.."),
        (cat / "more", "../../more/cats"),
        (dog / "more", "../../more/cats"),
        (cat / "self", "self"),
    ):
        link_path.symlink_to(target)
    manifest, shards = run(card_of(source, max_bad_fraction=0.2), tmp_path)
    assert manifest["counts"] == {"train": 21, "test": 8}
    assert "train/cat/new" in shards.read_index()["key"].to_pylist()
    reason_by_name = {name: reason.split(";")[0] for name, reason in reasons(tmp_path).items()}
    again, out = "other file: a link to {} read anyway", "link: to a folder outside the source"
    holds = again.format("a folder that holds others which are")
    assert reason_by_name == {
        "train/cat/up": again.format("train, which is"),
        "train/cat/top": holds,
        "train/dog/cat": again.format("train/cat, which is"),
        "train/cat/out": out,
        "train/cat/root": holds,
        "train/slash": holds,
        "train/cat/more/up": holds,
        "train/dog/more": again.format("train/cat/more, which is"),
        "train/cat/self": "other file: a link to itself",
    }


def test_source_of_only_outside_folder_links_is_refused(source: Any, tmp_path: Path) -> None:
    """If a data set consists of links to folders, the error names the remedy."""
    linked = tmp_path / "linked"
    linked.mkdir()
    for split in ("train", "test"):
        (linked / split).symlink_to(source / split)
    store = Store(str(tmp_path / "storage"))
    with pytest.raises(
        UserError,
        match=r"\(left out: test, train, link: to a folder outside the source; move .* holds "
        r"both\)",
    ):
        raw_data.find_source(store, card_of(linked))


def test_linked_file_outside_the_source_is_read(source: Any, tmp_path: Path) -> None:
    """Caches of model hubs and data versioning tools use such links."""
    blob = tmp_path / "blob"
    (source / "train" / "cat" / "00.png").rename(blob)
    expected = (tmp_path / "blob").read_bytes()
    (source / "train" / "cat" / "00.png").symlink_to(blob)
    manifest, shards = run(card_of(source), tmp_path)
    assert manifest["counts"] == {"train": 20, "test": 8}
    assert hashlib.sha256(expected).hexdigest() in shards.read_index()["sha256"].to_pylist()


@pytest.mark.parametrize(
    ("split", "says"),
    [
        (
            "test",
            r"there are no test images in .* \(left out: test, other file: a link to train, which",
        ),
        ("train", r"1 of 9 images .* train \(link: to a folder outside the source"),
    ],
)
def test_unfollowed_split_link_is_named_in_the_error(
    split: str, says: str, source: Any, tmp_path: Path
) -> None:
    (source / split).rename(tmp_path / "elsewhere")
    (source / split).symlink_to(source / "train" if split == "test" else tmp_path / "elsewhere")
    with pytest.raises(UserError, match=says):
        run(card_of(source), tmp_path)
    (source / split).unlink()
    (tmp_path / "elsewhere").rename(source / "kept")
    (source / split).symlink_to("kept")  # inside the source, and not read under another name
    assert run(card_of(source), tmp_path)[0]["counts"] == {"train": 20, "test": 8}


@pytest.mark.parametrize("form", ["tar", "parquet"])
def test_dangling_shard_is_error_and_other_files_are_listed(
    form: str, source: Any, tmp_path: Path
) -> None:
    card = tar_card(tmp_path, source) if form == "tar" else parquet_card(tmp_path, source)
    source_folder = Path(card.source.path)
    (source_folder / "train-notes.md").write_text("notes")
    os.mkfifo(source_folder / f"train-pipe.{form}")
    (source_folder / "README.md").write_text("of no split")
    run(card, tmp_path)
    assert reasons(tmp_path) == {
        "train-notes.md": "other file: .md",
        f"train-pipe.{form}": "other file: a named pipe",
    }
    (source_folder / f"train-gone.{form}").symlink_to(f"nowhere.{form}")
    with pytest.raises(UserError, match=rf"train-gone\.{form} .* is left out \(link: to nothing\)"):
        run(card, tmp_path, "other")


@pytest.mark.parametrize("form", ["tar", "parquet"])
def test_shards_and_members_with_non_utf8_names_are_read(
    form: str, source: Any, tmp_path: Path
) -> None:
    card = tar_card(tmp_path, source) if form == "tar" else parquet_card(tmp_path, source)
    source_folder = Path(card.source.path)
    old = next(source_folder.glob("train*"))
    if form == "tar":
        with tarfile.open(old, "a") as tar:
            for suffix, data in (("png", picture(99)), ("cls", b"cat")):
                member = tarfile.TarInfo(f"caf\udce9.{suffix}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    os.rename(old, os.fsencode(source_folder) + b"/train-caf\xe9." + form.encode())
    manifest, shards = run(card, tmp_path)
    assert manifest["counts"]["train"] == 20 + (form == "tar")
    assert ("train/cat/caf_" in shards.read_index()["key"].to_pylist()) == (form == "tar")


def strings(*values: bytes) -> pa.Array:
    """Return a string array with any bytes, as a damaged file may hold."""
    ends = np.cumsum([0, *map(len, values)]).astype(np.int32)
    return pa.Array.from_buffers(
        pa.string(), len(values), [None, pa.py_buffer(ends), pa.py_buffer(b"".join(values))]
    )


def test_non_utf8_parquet_label_is_rejected_and_path_is_ignored(
    source: Any, tmp_path: Path
) -> None:
    images = pa.array([picture(i) for i in range(3)])
    paths = pa.StructArray.from_arrays(
        [images, strings(b"a.png", b"caf\xe9.png", b"b.png")], ["bytes", "path"]
    )
    (tmp_path / "pq").mkdir()
    for split in ("train", "test"):
        pq.write_table(
            pa.table({"image": paths, "label": strings(b"cat", b"dog", b"caf\xe9")}),
            tmp_path / "pq" / f"{split}.parquet",
        )
    card = card_of(tmp_path / "pq", "parquet", max_bad_fraction=0.5, leaks="allow")
    manifest, shards = run(card, tmp_path)
    assert manifest["rejected"] == {"unlabelled": 2, "in train too": 2}
    assert shards.read_index()["key"].to_pylist()[:2] in (
        ["train/cat/a", "train/dog/00000001"],
        ["train/dog/00000001", "train/cat/a"],
    )


def test_source_in_a_bucket_gives_same_index_as_on_disk(
    source: Any, tmp_path: Path, bucket: Any
) -> None:
    client = s3.client_of(bucket.upstream)
    card = card_of(f"s3://{bucket.bucket}/data?region=us-east-1", max_bad_fraction=0.1)
    for file in sorted(p for p in source.rglob("*") if p.is_file()):
        client.put_object(
            Bucket=bucket.bucket, Key=f"data/{file.relative_to(source)}", Body=file.read_bytes()
        )
    before = fingerprint(card)
    assert before == fingerprint(card_of(source))
    for name in ("README.md", "train/cat/notes.txt", "train/cat/a#1.png"):
        client.put_object(Bucket=bucket.bucket, Key=f"data/{name}", Body=picture(321))
    assert fingerprint(card) == before
    _, expected = run(card_of(source), tmp_path, "disk")
    manifest, shards = run(card, tmp_path, "bucket")
    assert shards.read_index().equals(expected.read_index())
    assert manifest["rejected"] == {"corrupt": 1, "other file": 1}
    assert "which no URI can hold; rename it" in reasons(tmp_path, "bucket")["train/cat/a#1.png"]


def test_equal_names_in_same_named_archives_get_separate_keys(source: Any, tmp_path: Path) -> None:
    card = tar_card(tmp_path, source)
    for split in ("train", "test"):
        for folder in "ab":
            (tmp_path / "tars" / split / folder).mkdir(parents=True)
        file = tmp_path / "tars" / f"{split}-0.tar"
        (tmp_path / "tars" / split / "b" / "0.tar").write_bytes(file.read_bytes())
        file.rename(tmp_path / "tars" / split / "a" / "0.tar")
    _, shards = run(card, tmp_path)
    keys = shards.read_index()["key"].to_pylist()
    assert len(keys) == len(set(keys)) == 56


# ---- Unicode forms -------------------------------------------------------------------------------
NFC, NFD = "caf\u00e9", "cafe\u0301"


@pytest.mark.parametrize("folder", [NFC, NFD])
@pytest.mark.parametrize("on_card", [NFC, NFD])
@pytest.mark.parametrize("form", ["folder", "parquet"])
def test_class_names_match_in_both_unicode_forms(
    folder: Any, on_card: Any, form: str, source: Any, tmp_path: Path
) -> None:
    for split in ("train", "test"):
        (source / split / "dog").rename(source / split / folder)
    (source / "train" / folder / "00.png").rename(source / "train" / folder / f"{folder}.png")
    card = card_of(source)
    if form == "parquet":
        rows = {
            split: [
                {"image": file.read_bytes(), "label": file.parent.name}
                for file in sorted((source / split).rglob("*.png"))
            ]
            for split in ("train", "test")
        }
        (tmp_path / "pq").mkdir()
        for split, table in rows.items():
            pq.write_table(pa.Table.from_pylist(table), tmp_path / "pq" / f"{split}.parquet")
        card = card_of(tmp_path / "pq", "parquet")
    manifest, shards = run(card.model_copy(update={"classes": ("cat", on_card)}), tmp_path)
    assert manifest["counts"] == {"train": 20, "test": 8}
    assert set(shards.read_index()["class"].to_pylist()) == {"cat", on_card}
    if form == "folder":
        assert f"train/{NFC}/{NFC}" in shards.read_index()["key"].to_pylist()
        assert fingerprint(card) == fingerprint_of_other_form(source, folder)


def fingerprint_of_other_form(source: Path, folder: str) -> str | None:
    for split in ("train", "test"):
        (source / split / folder).rename(source / split / (NFD if folder == NFC else NFC))
    return fingerprint(card_of(source))


@pytest.mark.parametrize("what", ["folders", "files"])
def test_names_differing_only_in_unicode_form_are_refused(
    what: str, source: Any, tmp_path: Path
) -> None:
    for name in (NFC, NFD):
        path = source / "train" / (f"{name}/a.png" if what == "folders" else f"cat/{name}.png")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(picture(len(name)))
    with pytest.raises(
        UserError, match=r"the same name in two Unicode forms \(NFC and NFD\)"
    ) as error:
        run(card_of(source), tmp_path)
    assert str(error.value).isascii()
    file = tmp_path / "card.yaml"
    text = (
        "name: mine\nlicence: MIT\nclasses: {}\nnum_classes: {}\nsource: {{format: folder, "
        "path: {}}}\n"
    )
    file.write_text(text.format("from_source", 4 if what == "folders" else 2, source))
    if what == "folders":
        with pytest.raises(UserError, match="two Unicode forms"):
            load_card_file(str(file))
    file.write_text(text.format(f"[{NFC}, {NFD}]", 2, source))
    with pytest.raises(UserError, match=rf"class '{NFC if NFC < NFD else NFD}' is listed twice"):
        load_card_file(str(file))


# ---- checks of a card ----------------------------------------------------------------------------
def test_missing_source_error_names_the_folder_and_remedy(tmp_path: Path) -> None:
    assert fingerprint(card_of(tmp_path / "nowhere")) is None
    with pytest.raises(UserError, match=r"nowhere does not exist; put the data there"):
        run(card_of(tmp_path / "nowhere"), tmp_path)


def test_fingerprint_changes_if_a_file_size_changes(source: Any) -> None:
    before = fingerprint(card_of(source))
    assert before == fingerprint(card_of(source))
    (source / "train" / "cat" / "00.png").write_bytes(picture(7, side=12))
    assert fingerprint(card_of(source)) != before


@pytest.mark.parametrize("form", ["folder", "tar", "parquet"])
def test_fingerprint_ignores_unrelated_files(form: str, source: Any, tmp_path: Path) -> None:
    makers: dict[str, Callable[[], Card]] = {
        "folder": lambda: card_of(source),
        "tar": lambda: tar_card(tmp_path, source),
        "parquet": lambda: parquet_card(tmp_path, source),
    }
    card = makers[form]()
    source_folder = Path(card.source.path)
    names = ["README.txt", "Thumbs.db", "notes/more.png", "notes/more.tar", "train-notes.txt"]
    if form == "folder":
        names += ["train/Thumbs.db", "train/cat/notes.txt"]
    before = fingerprint(card)
    files = sorted(p for p in source_folder.rglob("*") if p.is_file())
    text = "\n".join(f"{p.relative_to(source_folder)}\t{p.stat().st_size}" for p in files)
    assert before == hashlib.sha256(text.encode()).hexdigest(), (
        "the definition of the fingerprint must not change"
    )
    for name in names:
        (source_folder / name).parent.mkdir(exist_ok=True)
        (source_folder / name).write_text("a note")
    assert fingerprint(card) == before
    for file in files:
        file.unlink()
    assert fingerprint(card) is None, "a note alone is not a source"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"counts": {"train": 21, "test": 8}}, "promises 21 train"),
        ({"content": "0" * 64}, "promises content 0000"),
        ({"classes": ["cat", "dog", "fox"]}, "class 'fox' has no train images"),
        ({"source": {"splits": {"train": "train", "test": "exam"}}}, "no test images"),
        ({"source": {"splits": {"train": "lesson", "test": "exam"}}}, "has no files for its"),
    ],
)
def test_source_that_breaks_card_promises_is_refused(
    source: Any, tmp_path: Path, changes: Any, sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        run(card_of(source, **changes), tmp_path)
    assert os.listdir(tmp_path) == ["source"] or os.listdir(tmp_path / "k") == []


def test_content_digest_depends_on_images_but_not_on_shards(source: Any, tmp_path: Path) -> None:
    content = run(card_of(source), tmp_path, "a")[0]["content"]
    assert (
        run(card_of(source, shard_images=3, content=content), tmp_path, "b")[0]["content"]
        == content
    )
    (source / "train" / "cat" / "00.png").write_bytes(picture(7))
    assert run(card_of(source), tmp_path, "c")[0]["content"] != content


def test_missing_test_images_are_held_out_from_train_per_class(source: Any, tmp_path: Path) -> None:
    splits = {"splits": {"train": "train"}}
    manifest, shards = run(card_of(source, source=splits, test_fraction=0.3), tmp_path)
    assert manifest["counts"] == {"train": 14, "test": 6}
    assert all(shards.select("test", [name]).num_rows == 3 for name in CLASSES)
    _, again = run(
        card_of(source, source=splits, test_fraction=0.3, classes=["dog"], max_bad_fraction=1),
        tmp_path,
        "dogs",
    )
    assert (
        again.select("test", ["dog"])["key"].to_pylist()
        == shards.select("test", ["dog"])["key"].to_pylist()
    )


def test_classes_from_source_are_folders_and_must_match_num_classes(
    source: Any, tmp_path: Path
) -> None:
    text = (
        f"name: mine\nlicence: MIT\nclasses: from_source\nnum_classes: {{}}\nsource: "
        f"{{{{format: folder, path: {source}}}}}\n"
    )
    file = tmp_path / "card.yaml"
    file.write_text(text.format(2))
    assert load_card_file(str(file)).classes == CLASSES
    file.write_text(text.format(3))
    with pytest.raises(UserError, match="num_classes is 3, but there are 2"):
        load_card_file(str(file))


# ---- formats -------------------------------------------------------------------------------------
def parquet_card(folder: Path, source: Path, as_struct: bool = True, numbers: bool = True) -> Card:
    for split in ("train", "test"):
        rows = []
        for file in sorted((source / split).rglob("*.png")):
            label = CLASSES.index(file.parent.name) if numbers else file.parent.name
            data = file.read_bytes()
            rows.append(
                {
                    "img": {"bytes": data, "path": file.name} if as_struct else data,
                    "fine_label": label,
                }
            )
        (folder / "pq").mkdir(exist_ok=True)
        pq.write_table(
            pa.Table.from_pylist(rows),
            folder / "pq" / f"{split}-00000-of-00001.parquet",
            row_group_size=6,
        )
    return card_of(folder / "pq", "parquet", source={"image": "img", "label": "fine_label"})


def digests(shards: Shards) -> set[tuple[str, str, str]]:
    return {(r["split"], r["class"], r["sha256"]) for r in shards.read_index().to_pylist()}


@pytest.mark.parametrize("as_struct", [True, False])
@pytest.mark.parametrize("numbers", [True, False])
def test_parquet_gives_same_images_as_class_folders(
    source: Any, tmp_path: Path, as_struct: bool, numbers: bool
) -> None:
    _, folder = run(card_of(source), tmp_path, "folder")
    _, parquet = run(
        parquet_card(tmp_path, source, as_struct, numbers), tmp_path, "parquet", threads
    )
    assert digests(parquet) == digests(folder)
    assert len(digests(parquet)) == 28


def test_parquet_rows_without_image_or_label_are_listed(source: Any, tmp_path: Path) -> None:
    card = parquet_card(tmp_path, source, as_struct=False)
    table = pq.read_table(tmp_path / "pq" / "train-00000-of-00001.parquet").to_pylist()
    table += [
        {"img": None, "fine_label": 0},
        {"img": picture(1), "fine_label": None},
        {"img": picture(1), "fine_label": 9},
    ]
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "pq" / "train-00000-of-00001.parquet")
    manifest, _ = run(card.model_copy(update={"max_bad_fraction": 0.2}), tmp_path)
    assert manifest["rejected"] == {"corrupt": 1, "unlabelled": 2}


def test_parquet_without_the_named_column_is_refused(source: Any, tmp_path: Path) -> None:
    card = parquet_card(tmp_path, source)
    wrong = card.model_copy(update={"source": card.source.model_copy(update={"label": "coarse"})})
    with pytest.raises(UserError, match="no column 'coarse', only img, fine_label"):
        run(wrong, tmp_path)


def tar_card(folder: Path, source: Path, **extra: bytes) -> Card:
    (folder / "tars").mkdir(exist_ok=True)
    for split in ("train", "test"):
        with tarfile.open(folder / "tars" / f"{split}-0.tar", "w") as tar:
            for n, file in enumerate(sorted((source / split).rglob("*.png"))):
                for suffix, data in (
                    ("png", file.read_bytes()),
                    ("cls", str(CLASSES.index(file.parent.name)).encode()),
                ):
                    member = tarfile.TarInfo(f"{n:04d}.{suffix}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    return card_of(folder / "tars", "tar")


def test_tars_give_same_images_as_class_folders(source: Any, tmp_path: Path) -> None:
    _, folder = run(card_of(source), tmp_path, "folder")
    _, tars = run(tar_card(tmp_path, source), tmp_path, "tars", threads)
    assert digests(tars) == digests(folder)


@pytest.mark.parametrize("less", [0, 300, 512 * 3])  # bytes missing in addition to the end mark
def test_truncated_tar_is_refused(source: Any, tmp_path: Path, less: Any) -> None:
    card, file = tar_card(tmp_path, source), tmp_path / "tars" / "train-0.tar"
    with tarfile.open(file) as tar:
        end = max(m.offset_data + -(-m.size // 512) * 512 for m in tar)
    file.write_bytes(file.read_bytes()[: end - less])
    with pytest.raises(UserError, match="cannot be read as an uncompressed tar"):
        run(card, tmp_path)


@pytest.mark.parametrize("name", ["/etc/a.png", "../a.png", "x/../../a.png"])
def test_tar_with_member_paths_outside_is_refused(source: Any, tmp_path: Path, name: str) -> None:
    card = tar_card(tmp_path, source)
    with tarfile.open(tmp_path / "tars" / "train-0.tar", "a") as tar:
        tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    with pytest.raises(UserError, match="points outside"):
        run(card, tmp_path)


def test_rare_formats_become_png_and_keep_their_pixels(source: Any, tmp_path: Path) -> None:
    (source / "train" / "cat" / "00.png").unlink()
    (source / "train" / "cat" / "00.bmp").write_bytes(picture(3, form="BMP"))
    _, shards = run(card_of(source), tmp_path)
    row = next(r for r in shards.read_index().to_pylist() if r["key"] == "train/cat/00")
    assert row["ext"] == "png"
    stored = shards.read(row["shard"], row["offset"], row["bytes"])
    assert np.array_equal(decode(stored, 9), decode(picture(3), 9))


def test_equal_names_in_a_class_get_separate_keys(source: Any, tmp_path: Path) -> None:
    (source / "train" / "cat" / "00.jpg").write_bytes(picture(5, form="JPEG"))
    (source / "train" / "cat" / "a.b.png").write_bytes(picture(6))
    _, shards = run(card_of(source), tmp_path)
    keys = shards.read_index()["key"].to_pylist()
    assert len(set(keys)) == 30
    assert "train/cat/a_b" in keys
    assert not any("." in key for key in keys)


def test_digits_need_no_network(tmp_path: Path) -> None:
    manifest, shards = run(load_card_file("digits"), tmp_path)
    assert manifest["counts"] == {"train": 1438, "test": 359}
    assert len(set(shards.read_index()["class"].to_pylist())) == 10


def test_torchvision_data_is_read_with_its_own_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchvision import datasets

    class Fake:
        def __init__(self, root: Any, train: Any = True, download: Any = False) -> None:
            self.count, self.shift = (6, 0) if train else (4, 50)

        def __len__(self) -> Any:
            return self.count

        def __getitem__(self, i: Any) -> Any:
            return Image.open(io.BytesIO(picture(self.shift + i))), i % 2

    monkeypatch.setattr(datasets, "Fake", Fake, raising=False)
    manifest, shards = run(card_of(tmp_path, "torchvision", source={"name": "Fake"}), tmp_path)
    assert manifest["counts"] == {"train": 6, "test": 4}
    row = next(r for r in shards.read_index().to_pylist() if r["key"] == "test/dog/00000003")
    stored = shards.read(row["shard"], row["offset"], row["bytes"])
    assert np.array_equal(decode(stored, 9), decode(picture(53), 9))


def test_torchvision_splits_can_be_combined_and_unknown_split_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchvision import datasets

    class Words:
        sizes: ClassVar = {"train-standard": 6, "val": 4, "test": 2}

        def __init__(self, root: str, split: str = "train-standard", download: bool = False):
            if split not in self.sizes:
                raise ValueError(f"Unknown value '{split}' for argument split. Valid values are x.")
            self.split = split

        def __len__(self) -> int:
            return self.sizes[self.split]

        def __getitem__(self, row: int) -> Any:
            return Image.open(io.BytesIO(picture(len(self.split) * 100 + row))), row % 2

    monkeypatch.setattr(datasets, "Words", Words, raising=False)
    splits = {"train": "train-standard+val", "test": "test"}
    source = {"name": "Words", "splits": splits}
    manifest, shards = run(card_of(tmp_path, "torchvision", source=source), tmp_path)
    assert manifest["counts"] == {"train": 10, "test": 2}
    row = next(r for r in shards.read_index().to_pylist() if r["key"] == "train/dog/00000007")
    stored = shards.read(row["shard"], row["offset"], row["bytes"])
    assert np.array_equal(decode(stored, 9), decode(picture(301), 9)), "second image of val"
    wrong = card_of(tmp_path, "torchvision", source={**source, "splits": {"train": "train"}})
    with pytest.raises(UserError, match=r"no split 'train'.*source.splits of the card"):
        run(wrong, tmp_path, "wrong")


def test_a_flipped_bit_in_a_shard_is_detected(source: Any, tmp_path: Path) -> None:
    _, shards = run(card_of(source), tmp_path)
    row = shards.read_index().to_pylist()[3]
    path = Path(shards.uri(row["shard"]))
    data = bytearray(path.read_bytes())
    data[row["offset"] + row["bytes"] // 2] ^= 1
    path.write_bytes(data)
    samples = select(str(tmp_path), (Task("t", "tiny", "k", tuple(CLASSES)),), "train", 0.0)
    with pytest.raises(DamagedArtifact, match=row["key"]):
        samples.read_bytes(3)


@pytest.mark.skipif(
    not (DATA / "real7").exists(), reason=f"no real data in {DATA}; set ACCRETE_DATA"
)
def test_real_data_set_matches_its_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCRETE_DATA", str(DATA))
    card = load_card_file("real7-scripts")
    manifest, shards = run(card, tmp_path, map_fn=threads)
    assert manifest["rejected"] == {}
    assert hashlib.sha256(
        shards.read(*(shards.read_index()[n][0].as_py() for n in ("shard", "offset", "bytes")))
    ).hexdigest() == (shards.read_index()["sha256"][0].as_py())


# ---- images without labels -----------------------------------------------------------------------
def without_labels(card: Card) -> Card:
    return card.model_copy(
        update={"classes": ("image",), "source": card.source.model_copy(update={"label": None})}
    )


@pytest.mark.parametrize("form", ["folder", "parquet", "tar"])
def test_unlabelled_images_belong_to_the_only_class_of_the_card(
    source: Any, tmp_path: Path, form: str
) -> None:
    card = {
        "folder": lambda: card_of(source),
        "parquet": lambda: parquet_card(tmp_path, source),
        "tar": lambda: tar_card(tmp_path, source),
    }[form]()
    expected = digests(run(card, tmp_path, "labelled")[1])
    if form == "folder":  # images directly in the split folder, and no test images
        for split in ("train", "test"):
            for file in sorted((source / split).rglob("*.png")):
                file.rename(source / split / f"{file.parent.name}{file.name}")
        (source / "test").rename(tmp_path / "elsewhere")
        expected = {row for row in expected if row[0] == "train"}
    if form == "parquet":
        for file in (tmp_path / "pq").iterdir():
            pq.write_table(pq.read_table(file).drop(["fine_label"]), file)
    manifest, shards = run(without_labels(card), tmp_path, "images")
    assert digests(shards) == {(split, "image", digest) for split, _, digest in expected}
    assert manifest["classes"] == ["image"]
    assert manifest["rejected"] == {}


def test_card_without_labels_must_have_one_class(source: Any, tmp_path: Path) -> None:
    file = tmp_path / "card.yaml"
    body = (
        "name: pictures\nlicence: MIT\nsource: {format: folder, path: %s, label: "
        "null}\nclasses: %s\n"
    )
    file.write_text(body % (source, "[image]"))
    assert load_card_file(str(file)).source.label is None
    file.write_text((body % (source, "[image]")).replace("null", "''"))
    with pytest.raises(UserError, match=r"source\.label is ''"):
        load_card_file(str(file))
    file.write_text(body % (source, "[cat, dog]"))
    with pytest.raises(
        UserError,
        match=r"source\.label is null, so all images are of one class, but 2 classes are "
        r"listed",
    ):
        load_card_file(str(file))


def test_formats_of_cards_and_modules_agree() -> None:
    names = {*get_args(SourceFormat)}
    modules = {path.stem for path in Path(formats.__file__).parent.glob("*.py")}
    assert modules == names | {"__init__", "base"}
    for name in names:
        module = import_module(f"pipeline.data.formats.{name}")
        assert isinstance(module.FORMAT, Format)
