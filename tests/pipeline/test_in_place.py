"""Tests of shards used in place: index, refusals, changed sources, forged results, and runs."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import re
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import webdataset
import yaml
from PIL import Image

from pipeline import cli
from pipeline.data.card_files import load_card_file
from pipeline.data.cards import Card
from pipeline.data.formats import fingerprint, units
from pipeline.data.formats import webdataset as webdataset_format
from pipeline.data.in_place import get_shard_urls, index_shards
from pipeline.graph import graph_cache
from pipeline.graph.stage import Graph
from pipeline.graph.store import Store
from tests import small_run
from tests.ingest_sources import replace_file, to_parquet
from workers.data import in_place
from workers.data.rows import select
from workers.data.shards import Shards
from workers.errors import DamagedArtifact, SourceChanged, UserError
from workers.job import ShardUrls, Task
from workers.storage.artifact import Artifact, Manifest

CLASSES = ("cat", "dog")


def picture(seed: int, form: str = "PNG") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (9, 11, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, form)
    return buffer.getvalue()


def sample(number: int) -> dict[str, Any]:
    """Return a sample that has its class in the three common members."""
    label = number % 2
    return {
        "__key__": f"{number:05d}",
        "png": picture(number),
        "cls": label,
        "json": {"label": label, "name": CLASSES[label], "width": 11},
        "txt": CLASSES[label],
    }


def write_shards(folder: Path, name: str, numbers: range, per_shard: int = 4) -> list[Path]:
    """Write shards with the writer of the package `webdataset`; return their paths."""
    folder.mkdir(exist_ok=True)
    paths = []
    for number, start in enumerate(range(0, len(numbers), per_shard)):
        paths.append(folder / f"{name}-{number:04d}.tar")
        with webdataset.TarWriter(str(paths[-1])) as writer:
            for sample_number in numbers[start : start + per_shard]:
                writer.write(sample(sample_number))
    return paths


@pytest.fixture
def shards_folder(tmp_path: Path) -> Path:
    """Return a folder of three training shards (12 images) and one test shard (4 images)."""
    write_shards(tmp_path / "wds", "tiny-train", range(12))
    write_shards(tmp_path / "wds", "tiny-val", range(100, 104))
    return tmp_path / "wds"


SPLITS = {"train": "tiny-train-{0000..0002}.tar", "test": "tiny-val-0000.tar"}


def card_of(path: Path | str, splits: Any = SPLITS, **changes: Any) -> Card:
    source = {"format": "webdataset", "path": str(path), "splits": splits, "numbers": "places"}
    source |= changes.pop("source", {})
    body = {"name": "tiny", "licence": "MIT", "classes": CLASSES, "source": source, **changes}
    return Card.model_validate(body)


def serial(fn: Any, items: Any) -> Any:
    return [fn(item) for item in items]


def threads(fn: Any, items: Any) -> Any:
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(fn, items))


def run(
    card: Card, root: Path, key: str = "k", map_fn: Any = serial, previous: str = ""
) -> tuple[Manifest, Shards]:
    manifest = index_shards(card, str(root), key, map_fn, {"step": "ingest"}, previous=previous)
    return manifest, Shards.open(str(root), key, get_shard_urls(card))


def note_opened_shards(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that collects the name of each shard opened for ingest."""
    opened: list[str] = []
    open_range_file = vars(webdataset_format)["open_range_file"]

    def counted(url: str) -> Any:
        opened.append(Path(url).name)
        return open_range_file(url)

    monkeypatch.setattr(webdataset_format, "open_range_file", counted)
    return opened


# ---- the index -----------------------------------------------------------------------------------
def test_shards_are_indexed_in_place_without_a_copy(shards_folder: Path, tmp_path: Path) -> None:
    manifest, shards = run(card_of(shards_folder), tmp_path / "store")
    assert manifest["wall_s"] > 0, "the report shows the duration"
    assert manifest["counts"] == {"train": 12, "test": 4}
    assert set(manifest["files"]) == {
        "index.parquet",
        "shards.parquet",
        "rejected.csv",
        "account.json",
        "preview.html",
        "source.parquet",
    }
    rows = shards.read_index().to_pylist()
    paths = sorted(shards_folder.glob("*-train-*")) + sorted(shards_folder.glob("*-val-*"))
    assert [shards.uri(name) for name in shards.files] == list(map(str, paths))
    for name, path in zip(shards.files, paths, strict=True):
        assert shards.digest(name) == hashlib.sha256(path.read_bytes()).hexdigest()
    for row, number in zip(rows, [*range(12), *range(100, 104)], strict=True):
        assert shards.read(row["shard"], row["offset"], row["bytes"]) == picture(number)
        assert row["class"] == CLASSES[number % 2]
        assert row["sha256"] == hashlib.sha256(picture(number)).hexdigest()
        assert row["key"] == f"{row['split']}/{row['class']}/{number:05d}"


@pytest.mark.parametrize("label", ["cls", "txt", "json:label", "json:name", "label"])
def test_label_can_be_a_tar_member_or_json_field(
    label: str, shards_folder: Path, tmp_path: Path
) -> None:
    manifest, _ = run(card_of(shards_folder, source={"label": label}), tmp_path / "store")
    other, _ = run(card_of(shards_folder), tmp_path / "store", "other")
    assert manifest["content"] == other["content"]
    assert manifest["rejected"] == {}


def test_serial_and_threaded_indexing_give_equal_indexes(
    shards_folder: Path, tmp_path: Path
) -> None:
    first, one = run(card_of(shards_folder), tmp_path / "store", "one")
    second, many = run(card_of(shards_folder), tmp_path / "store", "many", threads)
    assert one.read_index().equals(many.read_index())
    assert first["files"] == second["files"]


def test_interrupted_indexing_resumes_with_unread_shards(
    shards_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = card_of(shards_folder)
    first, _ = run(card, tmp_path / "expected")
    opened = note_opened_shards(monkeypatch)

    def killed_after_two(fn: Any, items: Any) -> Any:
        for number, item in enumerate(items):
            if number == 2:
                raise KeyboardInterrupt
            yield fn(item)

    with pytest.raises(KeyboardInterrupt):
        run(card, tmp_path / "store", map_fn=killed_after_two)
    second, _ = run(card, tmp_path / "store")
    assert opened == [f"tiny-train-{number:04d}.tar" for number in range(3)] + ["tiny-val-0000.tar"]
    assert second["files"] == first["files"]
    assert {path.name for path in (tmp_path / "store" / "k").iterdir()} == {
        "manifest.json",
        second["attempt"],
    }


def files_but_account(manifest: Manifest) -> dict[str, Any]:
    """Return the files of an ingest, except those on the changes since the last ingest."""
    names = manifest["files"].keys() - {"account.json", "preview.html"}
    return {name: manifest["files"][name] for name in sorted(names)}


def test_only_new_and_changed_shards_are_read(
    shards_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(card_of(shards_folder), tmp_path / "store", "old")
    write_shards(shards_folder, "tiny-train", range(16))
    for number in (0, 2, 3):  # shard 1 gets another time below, with equal bytes
        os.utime(shards_folder / f"tiny-train-{number:04d}.tar", ns=(1, 10**18 + number))
    run(card_of(shards_folder), tmp_path / "store", "middle")
    path = shards_folder / "tiny-train-0001.tar"
    os.utime(path, ns=(1, 10**18 + 9))
    more = {**SPLITS, "train": ["tiny-train-0003.tar", "tiny-train-{0000..0002}.tar"]}
    opened = note_opened_shards(monkeypatch)
    grown, _ = run(card_of(shards_folder, more), tmp_path / "store", "new", previous="middle")
    assert opened == ["tiny-train-0003.tar", "tiny-train-0001.tar"]
    fresh, _ = run(card_of(shards_folder, more), tmp_path / "fresh", "new")
    assert files_but_account(grown) == files_but_account(fresh)
    page = (Path(Artifact.need(str(tmp_path / "store"), "new").uri("preview.html"))).read_text()
    assert page.count("<img") == 16 + 4
    note = Artifact.need(str(tmp_path / "store"), "new").read("account.json").decode()
    assert "4 images added, 0 changed, 0 removed, 0 moved" in note


@pytest.mark.parametrize(
    "change",
    [
        {"without_images": "tiny-train-0001.tar:00005"},
        {"without_images": hashlib.sha256(picture(5)).hexdigest()},
        {"per_class": {"train": 3, "test": 2}},
        {"duplicates": "drop"},
        {"max_pixels": 90, "max_bad_fraction": 1.0},
    ],
)
def test_incremental_index_equals_a_fresh_one_after_card_changes(
    change: dict[str, Any], shards_folder: Path, tmp_path: Path
) -> None:
    if "max_pixels" in change:
        write_shards(shards_folder, "tiny-train", range(8))
    splits = {**SPLITS, "train": "tiny-train-{0000..0001}.tar"}
    previous = ""
    for number, body in enumerate(({}, change, {})):
        card = card_of(shards_folder, splits, **body)
        key = f"k{number}"
        try:
            fresh, _ = run(card, tmp_path / f"fresh{number}", key)
        except UserError as error:
            with pytest.raises(UserError, match=re.escape(str(error)[:40])):
                run(card, tmp_path / "store", key, previous=previous)
            continue
        grown, _ = run(card, tmp_path / "store", key, previous=previous)
        assert files_but_account(grown) == files_but_account(fresh)
        assert grown["rejected"] == fresh["rejected"]
        previous = key


def test_shard_with_members_that_are_not_samples_is_reused(
    shards_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with webdataset.TarWriter(str(shards_folder / "tiny-train-0002.tar")) as writer:
        writer.write({"__key__": "notes", "md": b"no sample"})
        writer.write(sample(8))
        writer.write(sample(9))
    run(card_of(shards_folder), tmp_path / "store", "old")
    opened = note_opened_shards(monkeypatch)
    grown, _ = run(card_of(shards_folder), tmp_path / "store", "new", previous="old")
    assert opened == []
    fresh, _ = run(card_of(shards_folder), tmp_path / "fresh", "new")
    assert files_but_account(grown) == files_but_account(fresh)


def test_shard_at_another_url_is_read_again(tmp_path: Path) -> None:
    """A shard is also identified by its URL, because another folder may have other images."""
    for number, folder in enumerate(("one", "two")):
        (path,) = write_shards(tmp_path / folder, "tiny", range(4 * number, 4 * number + 4))
        os.utime(path, ns=(1, 10**18))
    cards = [card_of(tmp_path / name, {"train": "tiny-0000.tar"}, test_fraction=0.2)
             for name in ("one", "two")]  # fmt: skip
    old, _ = run(cards[0], tmp_path / "store", "old")
    grown, _ = run(cards[1], tmp_path / "store", "new", previous="old")
    assert grown["content"] != old["content"]
    assert files_but_account(grown) == files_but_account(
        run(cards[1], tmp_path / "fresh", "new")[0]
    )


def test_preview_of_a_removed_image_is_deleted(tmp_path: Path) -> None:
    for number, folder in enumerate(("one", "two")):  # equal names of shards and samples
        (tmp_path / folder).mkdir()
        with webdataset.TarWriter(str(tmp_path / folder / "tiny.tar")) as writer:
            for key in range(4):
                writer.write({**sample(key), "png": picture(10 * number + key)})
    splits = {"train": ["one/tiny.tar", "two/tiny.tar"]}
    for number, removed in enumerate(("", hashlib.sha256(picture(2)).hexdigest())):
        card = card_of(tmp_path, splits, test_fraction=0.2, without_images=removed)
        run(card, tmp_path / "store", f"k{number}")
        table = pq.read_table(
            Artifact.need(str(tmp_path / "store"), f"k{number}").uri("source.parquet")
        )
        pictures = json.loads(table.schema.metadata[b"pictures"]).values()
        assert sorted(map(len, pictures)) == ([3, 4] if removed else [4, 4])


@pytest.mark.parametrize(
    ("harm", "num_read"),
    [("nothing", 0), ("no row", 1), ("other shard", 4), ("negative", 4), ("numbers", 4),
     ("pictures", 4)],
)  # fmt: skip
def test_shards_of_a_forged_earlier_index_are_read_again(
    harm: str, num_read: int, shards_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = card_of(shards_folder)
    run(card, tmp_path / "store", "old")
    artifact = Artifact.need(str(tmp_path / "store"), "old")
    table = pq.read_table(artifact.uri("source.parquet"))
    metadata = dict(table.schema.metadata)
    if harm == "no row":
        table = table.slice(1)
    elif harm in ("other shard", "negative"):
        name, value = ("pack", "train-000009.tar") if harm == "other shard" else ("offset", -1)
        place = table.schema.get_field_index(name)
        column = pa.array([value] * len(table), table.schema.field(name).type)
        table = table.set_column(place, name, column)
    elif harm == "numbers":
        metadata[b"rows"] = b"[" * 5
    elif harm == "pictures":
        pictures = json.loads(metadata[b"pictures"])
        metadata[b"pictures"] = json.dumps({stamp: [[1]] for stamp in pictures}).encode()
    table = table.replace_schema_metadata(metadata)
    replace_file(artifact, "source.parquet", to_parquet(table))
    opened = note_opened_shards(monkeypatch)
    grown, _ = run(card, tmp_path / "store", "new", previous="old")
    assert len(opened) == num_read
    assert files_but_account(grown) == files_but_account(run(card, tmp_path / "fresh", "new")[0])


def test_index_unit_arguments_contain_no_sets(shards_folder: Path) -> None:
    """A name must not depend on the order of a set, which differs between processes."""
    card = card_of(shards_folder)
    for unit in units(card, serial):
        assert "set(" not in repr(unit.args)


def test_shards_can_be_listed_by_braces_names_or_absolute_paths(
    shards_folder: Path, tmp_path: Path
) -> None:
    _, braces = run(card_of(shards_folder), tmp_path / "store", "braces")
    relative = [f"tiny-train-{number:04d}.tar" for number in range(3)]
    absolute = [str(shards_folder / name) for name in relative]
    for key, train in (("relative", relative), ("absolute", absolute)):
        splits = {"train": train, "test": str(shards_folder / "tiny-val-0000.tar")}
        _, listed = run(card_of(shards_folder, splits), tmp_path / "store", key)
        assert listed.read_index().equals(braces.read_index())


def test_braces_in_the_source_folder_name_are_not_expanded(
    shards_folder: Path, tmp_path: Path
) -> None:
    folder = shards_folder.rename(tmp_path / "a{0..1},{b}")
    manifest, _ = run(card_of(folder), tmp_path / "store")
    assert manifest["counts"]["train"] == 12


def test_test_images_are_held_out_if_no_test_shards_exist(
    shards_folder: Path, tmp_path: Path
) -> None:
    card = card_of(shards_folder, {"train": SPLITS["train"]}, test_fraction=0.5)
    manifest, shards = run(card, tmp_path / "store")
    assert manifest["counts"] == {"train": 6, "test": 6}
    assert set(shards.read_index()["shard"].to_pylist()) == {
        f"train-00000{n}.tar" for n in range(3)
    }


def test_card_selects_the_image_extensions(tmp_path: Path) -> None:
    (tmp_path / "wds").mkdir()
    with webdataset.TarWriter(str(tmp_path / "wds" / "a.tar")) as writer:
        for number in range(8):
            images = {"img.png": picture(number), "mask.png": picture(100 + number)}
            writer.write({"__key__": f"{number}", "cls": number % 2, **images})
    card = card_of(
        tmp_path / "wds", {"train": "a.tar"}, test_fraction=0.5, source={"image": "jpg;img.png"}
    )
    _, shards = run(card, tmp_path / "store")
    expected = {hashlib.sha256(picture(number)).hexdigest() for number in range(8)}
    assert set(shards.read_index()["sha256"].to_pylist()) == expected


def test_rejected_samples_are_listed_with_reasons(tmp_path: Path) -> None:
    (tmp_path / "wds").mkdir()
    with tarfile.open(tmp_path / "wds" / "a.tar", "w") as tar:

        def add(name: str, data: bytes) -> None:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))

        for number in range(8):
            add(f"good{number}.jpg", picture(number, "JPEG"))
            add(f"good{number}.cls", b"%d" % (number % 2))
        add("__meta__/x.json", b"{}")
        add("two.jpg", picture(20, "JPEG"))
        add("two.png", picture(21))
        add("two.cls", b"0")
        add("labels.png", picture(22))
        add("labels.cls", b"0")
        add("labels.cls", b"1")
        add("none.png", picture(23))
        add("far.png", picture(24))
        add("far.cls", b"2")
        add("only.cls", b"1")
        add("gif.gif", picture(25, "GIF"))
        add("gif.cls", b"1")
        add("cut.png", picture(26)[:-30])
        add("cut.cls", b"1")
    card = card_of(tmp_path / "wds", {"train": "a.tar"}, test_fraction=0.5, max_bad_fraction=0.9)
    manifest, shards = run(card, tmp_path / "store")
    assert manifest["counts"] == {"train": 4, "test": 4}
    listed = csv.DictReader(io.StringIO(shards.artifact.read("rejected.csv").decode()))
    reasons = {row["source"]: row["reason"] for row in listed}
    assert reasons.pop("a.tar:cut").startswith("corrupt: ")
    assert reasons == {
        "a.tar:two": "corrupt: two images for one key",
        "a.tar:labels": "corrupt: two labels for one key",
        "a.tar:none": "unlabelled: it has no label",
        "a.tar:far": "unlabelled: class '2' is not on the card",
        "a.tar:only": "corrupt: no image in the sample",
        "a.tar:gif": "corrupt: not an image in JPEG, PNG or WebP",
    }


# ---- refusals ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("shards", "says"),
    [
        ("pipe:curl -s https://a/b-{0..9}.tar", "would run a program"),
        ("b-{0..9}.tar.gz", "is compressed"),
        ("b-{0..9}.tgz", "is compressed"),
        ("b-{0..9}.tar.zst", "is compressed"),
        (["a.tar", "b.tar.xz"], "is compressed"),
    ],
)
def test_pipe_urls_and_compressed_shards_are_refused(shards: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        card_of("x", {"train": shards})


@pytest.mark.parametrize(
    ("shards", "says"),
    [
        ("b-{0..99999999999}.tar", "are more than 200000"),
        ("b-{0..999}{0..999}.tar", "are more than 200000"),
        ("b-{0..99999999999999999999999}.tar", "are more than 200000"),
        ("b-{0..3000000..10}.tar", "are more than 200000"),
        ("b-{0..9.tar", "cannot be expanded"),
        (["a.tar", "a.tar"], "is listed twice"),
    ],
)
def test_invalid_braces_and_duplicate_shards_are_refused(
    shards: Any, says: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=says):
        run(card_of(tmp_path, {"train": shards}), tmp_path / "store")


def test_image_of_another_kind_before_the_image_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "wds").mkdir()
    with tarfile.open(tmp_path / "wds" / "a.tar", "w") as tar:
        for number in range(8):
            for suffix, data in (
                ("depth.tiff", picture(number, "TIFF")),
                ("jpg", picture(number, "JPEG")),
                ("cls", b"%d" % (number % 2)),
            ):
                member = tarfile.TarInfo(f"{number:05d}.{suffix}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    card = card_of(tmp_path / "wds", {"train": "a.tar"}, test_fraction=0.5)
    manifest, _ = run(card, tmp_path / "store")
    assert sum(manifest["counts"].values()) == 8


def test_braces_with_a_step_count_their_results() -> None:
    urls = in_place.expand_patterns(("b-{0..3000000..100}.tar",))
    assert (len(urls), urls[-1]) == (30_001, "b-3000000.tar")


@pytest.mark.parametrize("form", ["folder", "csv", "parquet", "tar", "webdataset"])
def test_every_format_accepts_a_list_of_split_parts(form: str) -> None:
    card = card_of("x", {"train": ["a.tar", "b.tar"]}, source={"format": form})
    assert card.source.list_parts("train") == ("a.tar", "b.tar")


def test_missing_shard_and_missing_source_are_reported(shards_folder: Path, tmp_path: Path) -> None:
    card = card_of(shards_folder)
    (shards_folder / "tiny-train-0001.tar").unlink()
    with pytest.raises(UserError, match=r"1 of its 4 shards are missing.*tiny-train-0001\.tar"):
        fingerprint(card)
    assert fingerprint(card_of(tmp_path / "nowhere")) is None
    with pytest.raises(UserError, match=r"nowhere with .* tiny-train.* does not exist"):
        run(card_of(tmp_path / "nowhere"), tmp_path / "store")


def test_invalid_tar_header_is_not_taken_as_the_end(shards_folder: Path, tmp_path: Path) -> None:
    path = shards_folder / "tiny-train-0001.tar"
    with tarfile.open(path) as tar:
        offset = tar.getmembers()[6].offset
    data = bytearray(path.read_bytes())
    data[offset : offset + 100] = b"\xff" * 100
    path.write_bytes(data)
    with pytest.raises(UserError, match=rf"tiny-train-0001.*no end mark at byte {offset}"):
        run(card_of(shards_folder), tmp_path / "store")


# ---- a source that changed -----------------------------------------------------------------------
def test_shards_changed_or_deleted_after_indexing_raise_source_changed(
    shards_folder: Path, tmp_path: Path
) -> None:
    card = card_of(shards_folder)
    run(card, tmp_path / "store")
    path = shards_folder / "tiny-train-0001.tar"
    before = path.read_bytes()
    task = Task("t", "tiny", "k", CLASSES, shard_urls=get_shard_urls(card))

    def read(row: int) -> bytes:
        return select(str(tmp_path / "store"), (task,), "train", 0.0).read_bytes(row)

    altered = bytearray(before)
    altered[before.index(picture(5)) + 60] ^= 1
    path.write_bytes(altered)
    assert read(4) == picture(4)
    with pytest.raises(SourceChanged, match=r"tiny-train-0001\.tar changed after .* other bytes"):
        read(5)
    with pytest.raises(DamagedArtifact, match="is missing"):  # the next run indexes it again
        read(4)
    path.write_bytes(before)
    run(card, tmp_path / "store")
    path.write_bytes(before + bytes(512))
    with pytest.raises(
        SourceChanged, match=r"tiny-train-0001\.tar changed after .* were indexed\)"
    ):
        read(4)
    path.unlink()
    with pytest.raises(
        SourceChanged, match=r"tiny-train-0001\.tar.* \(it is missing\); put it back"
    ):
        read(4)
    assert read(0) == picture(0)


def test_fingerprint_depends_on_sizes_but_not_on_the_folder(
    shards_folder: Path, tmp_path: Path
) -> None:
    before = fingerprint(card_of(shards_folder))
    moved = shards_folder.rename(tmp_path / "moved")
    assert fingerprint(card_of(moved)) == before
    assert card_of(moved).identity() == card_of(shards_folder).identity()
    with open(moved / "tiny-train-0002.tar", "ab") as stream:
        stream.write(bytes(512))
    assert fingerprint(card_of(moved)) != before


# ---- forged results ------------------------------------------------------------------------------
def forged(root: Path, **columns: Any) -> None:
    """Replace the list of shards in the result `k`, and correct all digests."""
    artifact = Artifact.need(str(root), "k")
    table = pq.read_table(artifact.uri("shards.parquet"))
    for name, values in columns.items():
        column = pa.array([values] * table.num_rows, table.schema.field(name).type)
        table = table.set_column(table.schema.get_field_index(name), name, column)
    replace_file(artifact, "shards.parquet", to_parquet(table))


@pytest.mark.parametrize(
    "columns",
    [
        {"sha256": "../../../outside"},
        {"sha256": "0" * 63},
        {"sha256": None},
        {"bytes": -1},
        {"shard": None},
        {"shard": "https://127.0.0.1/x.tar"},
        {"shard": "../../etc/passwd"},
    ],
)
def test_forged_list_of_shards_is_reported_as_damage(
    columns: dict[str, Any], shards_folder: Path, tmp_path: Path
) -> None:
    run(card_of(shards_folder), tmp_path / "store")
    forged(tmp_path / "store", **columns)
    with pytest.raises(DamagedArtifact, match="is not readable as"):
        Shards.open(str(tmp_path / "store"), "k").read_index()


def test_shards_in_place_cannot_be_read_without_card_urls(
    shards_folder: Path, tmp_path: Path
) -> None:
    run(card_of(shards_folder), tmp_path / "store")
    for urls in (None, ShardUrls(test=("a.tar",))):
        shards = Shards.open(str(tmp_path / "store"), "k", urls)
        assert shards.read_index().num_rows == 16
        with pytest.raises(SourceChanged, match="no card says where it lies"):
            shards.read("train-000000.tar", 512, 10)


# ---- whole runs ----------------------------------------------------------------------------------
def digit_shards(folder: Path, name: str, classes: str) -> str:
    """Write the images of a small card as shards, and a card for them; return the card's path."""
    small_run.make_card(folder, name, classes)
    splits = {}
    for split in ("train", "test"):
        files = sorted((folder / "raw" / name / split).glob("*/*.png"))
        with webdataset.TarWriter(str(folder / f"{name}-{split}-0.tar")) as writer:
            for file in files:
                label = classes.index(file.parent.name)
                writer.write({"__key__": file.stem, "png": file.read_bytes(), "cls": label})
        splits[split] = f"{name}-{split}-{{0..0}}.tar"
    body = {
        "name": name,
        "licence": "CC BY 4.0",
        "classes": list(classes),
        "source": {
            "format": "webdataset",
            "path": str(folder),
            "splits": splits,
            "numbers": "places",
        },
    }
    path = folder / "cards" / f"{name}.yaml"
    path.write_text(yaml.safe_dump(body))
    return str(path)


@pytest.mark.slow
def test_results_from_in_place_shards_survive_moved_and_deleted_shards(tmp_path: Path) -> None:
    cards = {"a": digit_shards(tmp_path, "a", "23")}
    body = small_run.make_body(tmp_path, cards, ["finetune"], data={"val_fraction": 0.2})
    config = small_run.write_config(tmp_path / "config.yaml", body)
    small_run.run(["run", config], tmp_path / "out.txt")
    assert not list((tmp_path / "storage" / "stages").glob("**/*.tar"))
    before = small_run.attempts(tmp_path / "storage")
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in tmp_path.glob("*.tar"):
        path.rename(moved / path.name)
    card = Path(cards["a"])
    card.write_text(card.read_text().replace(str(tmp_path), str(moved)))
    small_run.run(["run", config], tmp_path / "out.txt")
    assert small_run.attempts(tmp_path / "storage") == before
    for path in moved.glob("a-*.tar"):
        path.unlink()
    cards["b"] = digit_shards(tmp_path, "b", "45")
    body["stream"]["tasks"].append({"name": "b", "card": cards["b"]})
    small_run.write_config(tmp_path / "config.yaml", body)
    small_run.run(["run", config], tmp_path / "out.txt")
    after = small_run.attempts(tmp_path / "storage")
    assert {name for name in before if after[name] != before[name]} == {"report"}
    assert "finetune/b/evaluate" in after


def test_silently_replaced_shard_is_indexed_by_the_second_run(tmp_path: Path) -> None:
    """Size and modification time are unchanged, so that the change can only be found by reading."""
    cards = {"base": digit_shards(tmp_path, "base", "01")}
    body = small_run.make_body(tmp_path, cards, ["linear"])
    config = small_run.write_config(tmp_path / "config.yaml", body)
    assert cli.main(["ingest", config]) == 0
    shard = tmp_path / "base-train-0.tar"
    before = shard.stat()
    data = bytearray(shard.read_bytes())
    # swap two images of equal size
    with tarfile.open(shard) as tar:
        images = [member for member in tar if member.name.endswith(".png")]
    first, second = next(
        (a, b) for a in images for b in images if a.offset < b.offset and a.size == b.size
    )
    one, two = (slice(m.offset_data, m.offset_data + m.size) for m in (first, second))
    data[one], data[two] = data[two], data[one]
    shard.write_bytes(data)
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert cli.main(["run", config]) == 2
    assert cli.main(["run", config]) == 0


def test_cached_graph_contains_no_shard_urls(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    inputs = graph_cache.BuildInputs("d" * 64, {})
    task = Task("t", "tiny", "k", CLASSES, shard_urls=ShardUrls(("train.tar",)))
    graph_cache.write_graph(store, inputs, Graph.of("small", []), [task])
    kept = graph_cache.read_graph(store, inputs, "small")
    assert kept is not None
    assert kept.tasks == [Task("t", "tiny", "k", CLASSES)]
    path = next((tmp_path / "graphs").glob("*.json"))
    content = json.loads(path.read_text())["content"]
    content["tasks"][0]["shard_urls"] = {"train": ["https://example.org/x.tar"], "test": []}
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    path.write_text(json.dumps({"sha256": digest, "content": content}))
    assert graph_cache.read_graph(store, inputs, "small") is None


def test_cards_of_shards_load_from_yaml(tmp_path: Path) -> None:
    card = load_card_file(digit_shards(tmp_path, "a", "23"))
    urls = get_shard_urls(card)
    assert urls is not None
    assert in_place.expand_patterns(urls.train) == [os.path.join(str(tmp_path), "a-train-0.tar")]
