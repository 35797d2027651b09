"""Tests of images and classes that a card leaves out: they are not read, written or rejected."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.data import card_files, ingest
from pipeline.data.account import ACCOUNT, Account
from pipeline.data.cards import Card
from pipeline.data.formats import require_entries
from pipeline.data.selection import REJECTED_CSV
from pipeline.data.source_checks import check_source
from tests import small_run
from workers.data.shards import read_index
from workers.errors import UserError
from workers.storage.artifact import Artifact


def load(path: str, **changes: Any) -> Card:
    """Change the file of a card, and return the card."""
    body = yaml.safe_load(Path(path).read_text()) | changes
    Path(path).write_text(yaml.safe_dump(body))
    return card_files.load_card_file(path)


def ingest_card(card: Card, folder: Path, key: str, previous: str = "") -> Artifact:
    """Ingest a card, and return the result."""
    ingest.ingest(card, str(folder), key, map, {}, previous=previous)
    return Artifact.need(str(folder), key)


def names_of(artifact: Artifact) -> set[str]:
    """Return the keys of all images in an ingest result."""
    return {*read_index(artifact, artifact.manifest["files"])["key"].to_pylist()}


@pytest.fixture
def path(tmp_path: Path) -> str:
    return small_run.make_card(tmp_path, "digits", "123", train=6, test=3)


def test_images_are_left_out_by_name_and_by_digest(path: str, tmp_path: Path) -> None:
    before = ingest_card(load(path), tmp_path, "before")
    raw = tmp_path / "raw" / "digits"
    by_name, by_digest = sorted(raw.glob("train/1/*.png"))[:2]
    digest = hashlib.sha256(by_digest.read_bytes()).hexdigest()
    (tmp_path / "cards" / "out.txt").write_text(f"{by_name.relative_to(raw)}\n\n {digest}\n")
    card = load(path, without_images="out.txt", max_bad_fraction=0.0)
    for previous in ("", "before"):
        after = ingest_card(card, tmp_path, f"after-{previous}", previous)
        assert names_of(before) - names_of(after) == {
            f"train/1/{by_name.stem}",
            f"train/1/{by_digest.stem}",
        }
        account = Account.from_json(after.read(ACCOUNT))
        assert account.not_read == {"left out by the card": 2}
        assert by_name.name not in after.read(REJECTED_CSV).decode()
        assert ingest.raw_content(card, map) == after.manifest["raw_content"]
    check_source(card, require_entries(card))


def test_left_out_images_are_not_opened(path: str, tmp_path: Path) -> None:
    broken = next((tmp_path / "raw" / "digits").glob("train/1/*.png"))
    broken.write_bytes(b"no image")
    with pytest.raises(UserError, match="corrupt"):
        ingest_card(load(path), tmp_path, "before")
    name = broken.relative_to(tmp_path / "raw" / "digits").as_posix()
    (tmp_path / "cards" / "out.txt").write_text(name)
    ingest_card(load(path, without_images="out.txt"), tmp_path, "after")


@pytest.mark.parametrize("classes", ["from_source", ["1", "2", "3"]])
def test_left_out_class_is_neither_listed_nor_ingested(
    classes: Any, path: str, tmp_path: Path
) -> None:
    card = load(path, classes=classes, without_classes=["2"], class_order_seed=1, num_classes=3)
    assert sorted(card.order()) == ["1", "3"]
    after = ingest_card(card, tmp_path, "after")
    assert sorted(after.manifest["classes"]) == ["1", "3"]
    assert {name.split("/")[1] for name in names_of(after)} == {"1", "3"}
    assert Account.from_json(after.read(ACCOUNT)).not_read == {"left out by the card": 9}


def test_card_identity_depends_on_content_of_exclusion_list(path: str, tmp_path: Path) -> None:
    plain = load(path)
    listed = tmp_path / "cards" / "out.txt"
    listed.write_text("train/1/a.png\ntrain/2/b.png\n")
    first = load(path, without_images="out.txt").identity()
    listed.write_text("train/2/b.png\ntrain/1/a.png\n")
    assert load(path).identity() == first != plain.identity()
    listed.write_text("train/2/b.png\n")
    assert load(path).identity() != first
    assert load(path, without_images="", without_classes=[]).identity() == plain.identity()


def test_missing_list_or_leaving_out_all_classes_is_refused(path: str) -> None:
    with pytest.raises(UserError, match=r"out\.txt, which does not exist; put the list"):
        load(path, without_images="out.txt")
    with pytest.raises(UserError, match="leaves out all of its classes"):
        load(path, without_images="", without_classes=["1", "2", "3"])
