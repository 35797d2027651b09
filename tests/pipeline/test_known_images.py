"""Ingest of data that grew: what an earlier ingest read is not read again, and nothing differs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from pipeline.data import image_checks, known_images, packs
from pipeline.data.account import ACCOUNT, Account
from pipeline.data.cards import Card
from pipeline.data.ingest import ingest
from pipeline.data.known_images import SOURCE
from pipeline.data.preview import PREVIEW
from tests.ingest_sources import card_of, make_folder, make_tars, picture, serial
from workers.storage.artifact import Artifact, Manifest


class Decoded:
    """The number of images that were decoded since it was last asked."""

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
    """Everything that must be independent of how the images were read."""
    return {"counts": manifest["counts"], "content": manifest["content"], **data_files(manifest)}


def data_files(manifest: Manifest) -> dict[str, Any]:
    """Shards, index and the rows of the source, and not the pages for people."""
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
    return 1


def rewrite_image(folder: Path) -> int:
    path = folder / "train" / "dog" / "001.png"
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 10**9))
    return 0  # it is read, and its bytes are the same


@pytest.mark.parametrize(
    "change", [add_image, change_image, remove_image, remove_class, move_image, rewrite_image]
)
@pytest.mark.parametrize("duplicates", ["keep", "drop"])
def test_only_new_and_changed_images_are_decoded_and_shards_are_equal(
    change: Callable[[Path], int], duplicates: str, folder: Path, tmp_path: Path, decoded: Decoded
) -> None:
    card = card_of(folder, "folder", duplicates=duplicates)
    run(card, tmp_path / "storage", "old")
    decoded.take()
    expected = change(folder)
    grown = run(card, tmp_path / "storage", "new", previous="old")
    assert decoded.take() == expected
    assert whole(grown) == whole(run(card, tmp_path / "fresh", "new"))


def test_shards_of_classes_that_did_not_change_are_linked(folder: Path, tmp_path: Path) -> None:
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


def test_a_class_that_comes_onto_the_card_is_read_then(
    folder: Path, tmp_path: Path, decoded: Decoded
) -> None:
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


def test_members_of_tars_are_known_by_their_tar(
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
    assert decoded.take() <= corrupt < 10, "all others have the same bytes"
    assert whole(newer) == whole(run(card, tmp_path / "fresh", "newer"))


def test_other_limits_of_an_image_read_everything_again(
    folder: Path, tmp_path: Path, decoded: Decoded
) -> None:
    run(card_of(folder, "folder"), tmp_path / "storage", "old")
    number = decoded.take()
    run(card_of(folder, "folder", max_pixels=200), tmp_path / "storage", "new", previous="old")
    assert decoded.take() == number


def test_a_damaged_shard_of_before_is_no_harm(folder: Path, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("harm", ["gone", "cut", "other columns", "leads out"])
def test_a_table_of_before_that_is_not_ours_is_ignored(
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
        path.write_bytes(path.read_bytes()[:50])
    elif harm == "other columns":
        pq.write_table(table.drop_columns("stamp"), path)
    else:
        index = table.schema.get_field_index("pack")
        names = ["../../../secret"] * len(table)
        pq.write_table(table.set_column(index, "pack", [names]).cast(table.schema), path)
    known = known_images.KnownImages.open(str(tmp_path / "storage"), "old", card)
    if known is not None:
        assert not any("secret" in (pack or "") for pack in known.rows["pack"].to_pylist())
    grown = run(card, tmp_path / "storage", "new", previous="old")
    assert whole(grown) == whole(run(card, tmp_path / "fresh", "new"))


def test_the_account_says_what_became_of_the_images(folder: Path, tmp_path: Path) -> None:
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


def test_a_storage_without_the_earlier_result_reads_everything(
    folder: Path, tmp_path: Path, decoded: Decoded
) -> None:
    run(card_of(folder, "folder"), tmp_path / "storage", "old")
    number = decoded.take()
    shutil.rmtree(tmp_path / "storage" / "old")
    run(card_of(folder, "folder"), tmp_path / "storage", "new", previous="old")
    assert decoded.take() == number
