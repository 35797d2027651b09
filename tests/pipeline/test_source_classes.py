"""Tests of cards that take their classes from the source, for each format."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from pipeline.data import card_files
from pipeline.data.cards import FROM_SOURCE, Card
from pipeline.data.formats import count_labels, require_entries
from pipeline.data.in_place import index_shards
from pipeline.data.ingest import ingest
from tests import image_sources as sources
from tests.image_data import class_folders
from tests.image_sources import NAMES, png
from workers.errors import UserError


class Notes(dict[str, Any]):
    """The notes of a storage: identity -> value."""

    def remember(self, identity: str, value: Any) -> None:
        self[identity] = value

    def remembered(self, identity: str) -> Any:
        return self.get(identity)


def write_card(folder: Path, source: dict[str, Any], **changes: Any) -> str:
    """Write a card without facts that can be read from the data; return its path."""
    body = {"name": "zoo", "licence": "none", "classes": "from_source", "source": source}
    path = folder / "zoo.yaml"
    path.write_text(yaml.safe_dump({**body, "test_fraction": 0.2, **changes}))
    return str(path)


def folders(path: Path) -> dict[str, Any]:
    class_folders(path, NAMES, 4)
    (path / "__MACOSX").mkdir()
    return {"format": "folder", "splits": {"train": "."}}


def table(path: Path) -> dict[str, Any]:
    sources.plain_csv(path)
    return {"format": "csv", "path": "data/labels.csv", "image": "filename"}


def split_column(path: Path) -> dict[str, Any]:
    sources.splits_in_a_column(path)
    columns = {"image": "image_path", "label": "class", "split": "split"}
    splits = {"train": "Train", "test": "valid"}
    return {"format": "csv", "path": "data/all.tsv", "splits": splits, **columns}


def hub(path: Path) -> dict[str, Any]:
    sources.hub_parquet(path)
    return {"format": "parquet", "splits": {"train": "data/train", "test": "data/test"}}


def numbers(path: Path) -> dict[str, Any]:
    sources.numbers_in_parquet(path)
    columns = {"image": "img", "label": "target"}
    return {"format": "parquet", "path": "data/flowers.parquet", **columns}


def tars(path: Path) -> dict[str, Any]:
    sources.shards(path)
    return {"format": "tar", "splits": {"train": "shard"}, "label": "txt"}


def shards(path: Path) -> dict[str, Any]:
    sources.shards_with_splits(path)
    splits = {"train": "im-train-{0000..0001}.tar", "test": "im-val-0000.tar"}
    return {"format": "webdataset", "splits": splits, "label": "json:label"}


FORMS: dict[str, tuple[Callable[[Path], dict[str, Any]], tuple[str, ...]]] = {
    "folders": (folders, NAMES),
    "table": (table, NAMES),
    "split column": (split_column, ("1", "2", "3", "4")),
    "hub": (hub, NAMES),
    "numbers": (numbers, ("3", "4", "5", "6")),
    "tars": (tars, NAMES),
    "shards": (shards, NAMES),
}


@pytest.mark.parametrize("form", FORMS)
def test_classes_are_read_from_every_source_format(form: str, tmp_path: Path) -> None:
    make, classes = FORMS[form]
    path = write_card(tmp_path, {"path": "data", **make(tmp_path / "data")})
    card = card_files.load_card_file(path)
    assert card.classes == classes
    run = index_shards if card.source.format == "webdataset" else ingest
    manifest = run(card, str(tmp_path / "storage"), "k", map, {"step": "ingest"})
    assert manifest["classes"] == list(classes)
    assert manifest["rejected"] == {}
    assert all(manifest["counts"].values())


def test_digits_classes_are_read_from_scikit_learn(tmp_path: Path) -> None:
    path = write_card(tmp_path, {"format": "sklearn", "name": "digits"})
    assert card_files.load_card_file(path).classes == tuple("0123456789")


@pytest.mark.parametrize("form", ["folders", "table", "hub", "shards"])
def test_classes_are_remembered_if_the_source_is_missing(form: str, tmp_path: Path) -> None:
    make, classes = FORMS[form]
    path = write_card(tmp_path, {"path": "data", **make(tmp_path / "data")})
    notes = Notes()
    card_files.load_card_file(path, notes)
    (tmp_path / "data").rename(tmp_path / "away")
    assert card_files.load_card_file(path, notes).classes == classes
    with pytest.raises(UserError, match=r"its classes come from|cannot be read|does not exist"):
        card_files.load_card_file(path, Notes())


def test_labels_are_read_again_only_if_the_source_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_card(tmp_path, {"path": "data", **hub(tmp_path / "data")})
    notes = Notes()
    first = card_files.load_card_file(path, notes)
    counts: list[int] = []

    def count(*args: Any) -> Any:
        counts.append(1)
        return count_labels(*args)

    monkeypatch.setattr("pipeline.data.source_classes.count_labels", count)
    assert card_files.load_card_file(path, notes).classes == first.classes
    assert counts == []
    file = next((tmp_path / "data").rglob("train-00000*"))
    os.utime(file, ns=(1, 1))
    assert card_files.load_card_file(path, notes).classes == first.classes
    assert counts == [1]


def test_damaged_note_about_classes_is_ignored(tmp_path: Path) -> None:
    path = write_card(tmp_path, {"path": "data", **hub(tmp_path / "data")})
    notes = Notes()
    card_files.load_card_file(path, notes)
    for value in ("x", {"state": 1}, {"state": [], "numbers": "names", "classes": [1]}):
        for identity in notes:
            notes[identity] = value
        assert card_files.load_card_file(path, notes).classes == NAMES


def test_num_classes_of_a_card_is_checked(tmp_path: Path) -> None:
    source = {"path": "data", **table(tmp_path / "data")}
    assert card_files.load_card_file(write_card(tmp_path, source, num_classes=4)).num_classes == 4
    with pytest.raises(UserError, match="num_classes is 5, but there are 4"):
        card_files.load_card_file(write_card(tmp_path, source, num_classes=5))


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no files": ({"format": "parquet", "splits": {"train": "nothing"}}, "no images in its splits"),
    "no column": ({"format": "parquet", "splits": {"train": "data/train"}, "label": "x"}, "'x'"),
}


@pytest.mark.parametrize("case", BAD)
def test_unreadable_classes_are_refused_with_a_reason(case: str, tmp_path: Path) -> None:
    hub(tmp_path / "data")
    changes, says = BAD[case]
    with pytest.raises(UserError, match=says):
        card_files.load_card_file(write_card(tmp_path, {"path": "data", **changes}))


def test_label_values_that_are_not_classes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    columns = {"image": [png(0), png(1)], "label": [[1], [2]]}
    pq.write_table(pa.table(columns), tmp_path / "data" / "train.parquet")
    with pytest.raises(UserError, match="are not classes"):
        card_files.load_card_file(write_card(tmp_path, {"format": "parquet", "path": "data"}))


def test_card_loaded_without_its_source_keeps_the_from_source_marker(tmp_path: Path) -> None:
    path = write_card(tmp_path, {"format": "folder", "path": "data"})
    card = card_files.load_without_source(path)
    assert card.classes == (FROM_SOURCE,)
    assert isinstance(card, Card)
    with pytest.raises(UserError):
        require_entries(card)
