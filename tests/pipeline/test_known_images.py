"""Tests of repeated ingest: known images are not read again, and the results stay equal."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.data import image_checks, known_images, packs
from pipeline.data.account import ACCOUNT, Account
from pipeline.data.cards import Card
from pipeline.data.formats import base
from pipeline.data.ingest import ingest
from pipeline.data.known_images import SOURCE
from pipeline.data.preview import PREVIEW
from tests.ingest_sources import (
    card_of,
    make_folder,
    make_tars,
    picture,
    replace_file,
    serial,
    to_parquet,
)
from workers.storage.artifact import Artifact, Manifest


class Decoded:
    """A counter of decoded images; `take` returns the number since the last call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.number = 0
        check = image_checks.check_image

        def counting(*args: Any) -> Any:
            self.number += 1
            return check(*args)

        monkeypatch.setattr(packs, "check_image", counting)

    def take(self) -> int:
        number, self.number = self.number, 0
        return number


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Decoded:
    return Decoded(monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "images")


def run(card: Card, root: Path, key: str, previous: str = "") -> Manifest:
    return ingest(card, str(root), key, serial, {"step": "ingest"}, previous=previous)


def whole(manifest: Manifest) -> dict[str, Any]:
    """Return everything that must not depend on how the images were read."""
    return {"counts": manifest["counts"], "content": manifest["content"], **data_files(manifest)}


def data_files(manifest: Manifest) -> dict[str, Any]:
    """Return the shards, the index and the rows of the source, without account and preview."""
    names = manifest["files"].keys() - {ACCOUNT, PREVIEW}
    return {name: manifest["files"][name] for name in sorted(names)}


def add_image(folder: Path) -> int:
    (folder / "train" / "dog" / "new.png").write_bytes(picture(9000))
    return 1


def change_image(folder: Path) -> int:
    (folder / "train" / "dog" / "001.png").write_bytes(picture(9001))
    return 1


def remove_image(folder: Path) -> int:
    (folder / "train" / "dog" / "001.png").unlink()
    return 0


def remove_class(folder: Path) -> int:
    for split in ("train", "test"):
        for path in (folder / split / "dog").iterdir():
            if path.name != "000.png":
                path.unlink()
    return 0


def move_image(folder: Path) -> int:
    (folder / "train" / "dog" / "001.png").rename(folder / "train" / "cat" / "from-dog.png")
    return 0  # it is read, but its bytes are known from the removed image


def copy_image_over_a_removed_one(folder: Path) -> int:
    path = folder / "train" / "dog" / "001.png"
    (folder / "train" / "cat" / "from-dog.png").write_bytes(path.read_bytes())
    path.unlink()
    return 0  # the same bytes with another modification time


def rewrite_image(folder: Path) -> int:
    path = folder / "train" / "dog" / "001.png"
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 10**9))
    return 0  # it is read, but its bytes are the same


@pytest.mark.few(7)
@pytest.mark.parametrize(
    "change",
    [
        add_image,
        change_image,
        remove_image,
        remove_class,
        move_image,
        copy_image_over_a_removed_one,
        rewrite_image,
    ],
)
@pytest.mark.parametrize("duplicates", ["keep", "drop"])
def test_only_changed_images_are_decoded_and_results_match_fresh_ingest(
    change: Callable[[Path], int], duplicates: str, folder: Path, tmp_path: Path, decoded: Decoded
) -> None:
    card = card_of(folder, "folder", duplicates=duplicates)
    run(card, tmp_path / "storage", "old")
    decoded.take()
    expected = change(folder)
    grown = run(card, tmp_path / "storage", "new", previous="old")
    assert decoded.take() == expected
    assert whole(grown) == whole(run(card, tmp_path / "fresh", "new"))


def test_shards_of_unchanged_classes_are_hard_linked(folder: Path, tmp_path: Path) -> None:
    card = card_of(folder, "folder")
    run(card, tmp_path / "storage", "old")
    add_image(folder)
    run(card, tmp_path / "storage", "new", previous="old")
    new = Artifact.need(str(tmp_path / "storage"), "new")
    links = {
        name: os.stat(new.uri(name)).st_nlink for name in new.manifest["files"] if ".tar" in name
    }
    rewritten = [name for name, number in links.items() if number == 1]
    assert len({name.rpartition("-")[0] for name in rewritten}) == 1
    assert len(links) > 5
    assert set(links.values()) == {1, 2}


def test_class_added_to_the_card_is_read(folder: Path, tmp_path: Path, decoded: Decoded) -> None:
    small = card_of(folder, "folder", classes=["cat", "dog"], max_bad_fraction=1.0)
    run(small, tmp_path / "storage", "old")
    decoded.take()
    card = card_of(folder, "folder")
    grown = run(card, tmp_path / "storage", "new", previous="old")
    assert 0 < decoded.take() < 40
    assert whole(grown) == whole(run(card, tmp_path / "fresh", "new"))
    decoded.take()
    again = run(small, tmp_path / "storage", "again", previous="new")
    assert decoded.take() == 0
    assert whole(again)["counts"] == whole(run(small, tmp_path / "fresh", "again"))["counts"]


def test_members_of_unchanged_tars_are_not_decoded_again(
    folder: Path, tmp_path: Path, decoded: Decoded
) -> None:
    tars = make_tars(tmp_path / "tars", folder)
    card = card_of(tars, "tar", source={"splits": {"train": "train-*.tar"}}, test_fraction=0.2)
    run(card, tmp_path / "storage", "old")
    assert decoded.take() > 20
    grown = run(card, tmp_path / "storage", "new", previous="old")
    assert decoded.take() == 0
    assert whole(grown) == whole(run(card, tmp_path / "fresh", "new"))
    first = tars / "train-0.tar"
    os.utime(first, ns=(1, first.stat().st_mtime_ns + 10**9))
    decoded.take()
    newer = run(card, tmp_path / "storage", "newer", previous="new")
    corrupt = newer["rejected"]["corrupt"]
    assert decoded.take() <= corrupt < 10, "only corrupt images may be decoded again"
    assert whole(newer) == whole(run(card, tmp_path / "fresh", "newer"))


# ---- rows of Parquet files -----------------------------------------------------------------------
def write_rows(path: Path, seeds: Sequence[int]) -> None:
    """Write images of two classes, in row groups of four."""
    rows: list[dict[str, Any]] = [
        {"image": picture(seed), "label": ("cat", "dog")[seed % 2]} for seed in seeds
    ]
    rows[2]["image"] = b"no image"
    rows[3] = {"image": None, "label": None}
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=4)


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with two Parquet files of ten rows; each file is read in three units."""
    monkeypatch.setattr(base, "UNIT_ITEMS", 4)
    folder = tmp_path / "tables"
    folder.mkdir()
    write_rows(folder / "a.parquet", range(10))
    write_rows(folder / "b.parquet", range(20, 30))
    return folder


def table_card(tables: Path, **changes: Any) -> Card:
    body = {"classes": ["cat", "dog"], "test_fraction": 0.2, "source": {"splits": {"train": "*"}}}
    return card_of(tables, "parquet", **{**body, **changes})


def touch(tables: Path) -> None:
    os.utime(tables / "a.parquet", ns=(1, 10**18))


def append_rows(tables: Path) -> None:
    write_rows(tables / "a.parquet", [*range(10), 50, 51])


def insert_a_row(tables: Path) -> None:
    write_rows(tables / "a.parquet", [*range(3), 50, *range(3, 10)])


def add_a_file(tables: Path) -> None:
    write_rows(tables / "c.parquet", range(40, 46))


def remove_a_file(tables: Path) -> None:
    (tables / "b.parquet").unlink()


@pytest.mark.parametrize(
    ("change", "num_read", "num_decoded"),
    [  # undecodable bytes are decoded again each time they are read
        (lambda tables: None, 0, 0),
        (touch, 10, 1),
        (append_rows, 12, 3),
        (insert_a_row, 11, 2),
        (add_a_file, 6, 5),
        (remove_a_file, 0, 0),
    ],
)
def test_only_rows_of_changed_files_are_read(
    change: Callable[[Path], None],
    num_read: int,
    num_decoded: int,
    tables: Path,
    tmp_path: Path,
    decoded: Decoded,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card = table_card(tables)
    run(card, tmp_path / "storage", "old")
    assert decoded.take() == 18
    change(tables)
    read: list[str] = []
    row = packs.ImageChecker.row

    def noting(checker: packs.ImageChecker, item: base.Item) -> dict[str, Any]:
        read.append(item.name)
        return row(checker, item)

    monkeypatch.setattr(packs.ImageChecker, "row", noting)
    grown = run(card, tmp_path / "storage", "new", previous="old")
    assert (len(read), decoded.take()) == (num_read, num_decoded)
    assert whole(grown) == whole(run(card, tmp_path / "fresh", "new"))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "change",
    [
        {"classes": ["cat"], "max_bad_fraction": 1.0},
        {"without_classes": ["dog"], "classes": ["cat"]},
        {"without_images": "a.parquet:5"},
        {"per_class": {"train": 3, "test": 1}},
        {"duplicates": "drop"},
    ],
)
def test_ingest_after_card_change_and_reversal_matches_fresh_ingest(
    change: dict[str, Any], tables: Path, tmp_path: Path
) -> None:
    cards = [table_card(tables), table_card(tables, **change), table_card(tables)]
    previous = ""
    for number, card in enumerate(cards):
        key = f"k{number}"
        grown = run(card, tmp_path / "storage", key, previous)
        fresh = run(card, tmp_path / f"fresh{number}", key)
        assert data_files(grown) == data_files(fresh)
        assert grown["rejected"] == fresh["rejected"]
        previous = key


def last_note(root: Path, key: str) -> str:
    artifact = Artifact.need(str(root), key)
    return Account.from_json(artifact.read(ACCOUNT)).lines()[-1]


def test_the_account_counts_new_rows(tables: Path, tmp_path: Path) -> None:
    card = table_card(tables)
    run(card, tmp_path / "storage", "old")
    append_rows(tables)
    run(card, tmp_path / "storage", "new", previous="old")
    assert last_note(tmp_path / "storage", "new") == (
        "note: since the last ingest: 2 images added, 0 changed, 0 removed, 0 moved"
    )


def test_account_distinguishes_files_with_the_same_name(tables: Path, tmp_path: Path) -> None:
    for number, split in enumerate(("train", "test")):
        (tables / split).mkdir()
        write_rows(tables / split / "part.parquet", range(10 * number, 10 * number + 8))
        (tables / ("a.parquet", "b.parquet")[number]).unlink()
    card = table_card(tables, source={}, test_fraction=0.0)
    run(card, tmp_path / "storage", "old")
    for number, split in enumerate(("train", "test")):
        seeds = [*range(10 * number, 10 * number + 8), 50 + number]
        write_rows(tables / split / "part.parquet", seeds)
    run(card, tmp_path / "storage", "new", previous="old")
    assert last_note(tmp_path / "storage", "new") == (
        "note: since the last ingest: 2 images added, 0 changed, 0 removed, 0 moved"
    )


def test_unchanged_files_with_ignored_rows_are_not_read(
    tables: Path, tmp_path: Path, decoded: Decoded, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in tables.iterdir():
        table = pq.read_table(path)
        parts = [("train", "test", "other")[row % 3] for row in range(len(table))]
        pq.write_table(table.append_column("part", [parts]), path, row_group_size=4)
    splits = {"train": "train", "test": "test", "ignore": "other"}
    card = table_card(tables, source={"split": "part", "splits": splits}, test_fraction=0.0)
    run(card, tmp_path / "storage", "old")
    monkeypatch.setattr(packs.ImageChecker, "row", None)
    grown = run(card, tmp_path / "storage", "new", previous="old")
    monkeypatch.undo()
    assert whole(grown) == whole(run(card, tmp_path / "fresh", "new"))


# ---- unusable earlier results --------------------------------------------------------------------
def test_changed_image_limits_reread_all_images(
    folder: Path, tmp_path: Path, decoded: Decoded
) -> None:
    run(card_of(folder, "folder"), tmp_path / "storage", "old")
    number = decoded.take()
    run(card_of(folder, "folder", max_pixels=200), tmp_path / "storage", "new", previous="old")
    assert decoded.take() == number


@pytest.mark.parametrize("in_bucket", [False, True])
def test_missing_earlier_shard_is_made_again(
    in_bucket: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_bucket:  # a small source has its packs in a temporary folder
        monkeypatch.setattr(sys.modules[ingest.__module__], "is_local", lambda uri: False)
    card = card_of(folder, "folder")
    run(card, tmp_path / "storage", "old")
    for path in (tmp_path / "storage" / "old").rglob("*.tar"):
        path.unlink()
    add_image(folder)
    grown = run(card, tmp_path / "storage", "new", previous="old")
    assert data_files(grown) == data_files(run(card, tmp_path / "fresh", "new"))


def test_damaged_earlier_shard_does_not_affect_new_results(folder: Path, tmp_path: Path) -> None:
    card = card_of(folder, "folder")
    run(card, tmp_path / "storage", "old")
    for path in (tmp_path / "storage" / "old").rglob("*.tar"):
        data = bytearray(path.read_bytes())
        data[600] ^= 1
        path.write_bytes(data)
    add_image(folder)
    grown = run(card, tmp_path / "storage", "new", previous="old")
    fresh = run(card, tmp_path / "fresh", "new")
    assert data_files(grown) == data_files(fresh)
    assert Artifact.need(str(tmp_path / "storage"), "new").damage() is None


@pytest.mark.few(2)
@pytest.mark.parametrize("harm", ["gone", "cut", "other columns", "leads out"])
def test_damaged_or_foreign_earlier_source_table_is_ignored(
    harm: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = card_of(folder, "folder")
    run(card, tmp_path / "storage", "old")
    artifact = Artifact.need(str(tmp_path / "storage"), "old")
    path = Path(artifact.uri(SOURCE))
    table = pq.read_table(path)
    if harm == "gone":
        path.unlink()
    elif harm == "cut":
        replace_file(artifact, SOURCE, path.read_bytes()[:50])
    elif harm == "other columns":
        replace_file(artifact, SOURCE, to_parquet(table.drop_columns("stamp")))
    else:
        index = table.schema.get_field_index("pack")
        names = pa.array(["../../../secret"] * len(table), pa.large_string())
        replace_file(artifact, SOURCE, to_parquet(table.set_column(index, "pack", names)))
    known = known_images.KnownImages.open(str(tmp_path / "storage"), "old", card)
    assert (known is not None) == (harm == "leads out")
    if known is not None:
        assert not any("secret" in (pack or "") for pack in known.rows["pack"].to_pylist())
    grown = run(card, tmp_path / "storage", "new", previous="old")
    assert whole(grown) == whole(run(card, tmp_path / "fresh", "new"))


def test_account_counts_added_changed_removed_and_moved_images(
    folder: Path, tmp_path: Path
) -> None:
    card = card_of(folder, "folder")
    run(card, tmp_path / "storage", "old")
    add_image(folder)
    move_image(folder)
    (folder / "train" / "dog" / "002.png").write_bytes(picture(9001))
    (folder / "train" / "dog" / "003.png").unlink()
    run(card, tmp_path / "storage", "new", previous="old")
    artifact = Artifact.need(str(tmp_path / "storage"), "new")
    lines = Account.from_json(artifact.read(ACCOUNT)).lines()
    assert lines[-1] == (
        "note: since the last ingest: 1 images added, 1 changed, 1 removed, 1 moved"
    )


def test_missing_earlier_result_rereads_all_images(
    folder: Path, tmp_path: Path, decoded: Decoded
) -> None:
    run(card_of(folder, "folder"), tmp_path / "storage", "old")
    number = decoded.take()
    shutil.rmtree(tmp_path / "storage" / "old")
    run(card_of(folder, "folder"), tmp_path / "storage", "new", previous="old")
    assert decoded.take() == number
