"""Tests of image tables, Parquet files, shards and library sets: detection and ingest."""

from __future__ import annotations

import os
import shlex
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.data import card_files, in_place, ingest, starter
from pipeline.data.cards import Card
from pipeline.data.detection.data_set import DataSet, Request
from pipeline.data.detection.detect import detect
from pipeline.data.file_index import FileFinder, FileIndex, NamedRow
from pipeline.data.formats import csv, get_format, require_entries
from tests import image_sources as sources
from tests.image_data import make_image
from tests.image_sources import (
    NAMES,
    hub_parquet,
    ids_beside_a_folder,
    no_header,
    numbers_in_parquet,
    paths_in_parquet,
    plain_csv,
    shards,
    shards_with_splits,
    splits_in_a_column,
    table_for_each_split,
    write_table,
)
from workers.errors import UserError


def found(path: Path | str, **columns: str) -> DataSet:
    (data_set,) = detect(Request(str(path), given=columns))
    return data_set


CASES: dict[str, tuple[Callable[[Path], Path], str, dict[str, int]]] = {
    "csv": (plain_csv, "csv", {"train": 24}),
    "ids": (ids_beside_a_folder, "csv", {"train": 24}),
    "split column": (splits_in_a_column, "csv", {"train": 16, "test": 8}),
    "no header": (no_header, "csv", {"train": 24}),
    "two tables": (table_for_each_split, "csv", {"train": 12, "test": 12}),
    "paths in parquet": (paths_in_parquet, "csv", {"train": 24}),
    "hub": (hub_parquet, "parquet", {"train": 24, "test": 12}),
    "numbers": (numbers_in_parquet, "parquet", {"train": 20}),
    "shards": (shards, "webdataset", {"train": 24}),
    "shards with splits": (shards_with_splits, "webdataset", {"train": 16, "test": 8}),
}


@pytest.mark.parametrize("case", CASES)
def test_detected_format_is_proposed_and_can_be_ingested(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, source_format, counts = CASES[case]
    path = make(tmp_path / "data")
    data_set = found(path)
    assert data_set.source["format"] == source_format
    assert data_set.counts == counts
    assert len(data_set.classes) == 4
    assert data_set.sizes
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    config = starter.start([os.path.relpath(path)], "accrete", lambda text: None)
    card = card_files.load_card_file(config.replace(".yaml", "-card.yaml"))
    function = in_place.index_shards if get_format(card).list_shards else ingest.ingest
    manifest = function(card, str(tmp_path / "store"), "k", map, {})
    assert sum(manifest["counts"].values()) == sum(counts.values())
    assert manifest["counts"]["test"] >= 4
    if "test" in counts:
        assert manifest["counts"] == counts
    assert manifest["rejected"] == {}


def test_class_names_come_from_hub_metadata_or_txt_entries(tmp_path: Path) -> None:
    assert found(hub_parquet(tmp_path / "hub")).classes == NAMES
    assert found(shards(tmp_path / "shards")).classes == NAMES


def test_numbers_not_counting_from_zero_are_class_names(tmp_path: Path) -> None:
    data_set = found(numbers_in_parquet(tmp_path / "data"))
    assert data_set.classes == ("3", "4", "5", "6")
    assert data_set.source["numbers"] == "names"


def test_torchvision_data_set_uses_its_own_class_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for prefix, count in (("train", 40), ("t10k", 20)):
        pixels = np.zeros((count, 28, 28), np.uint8).tobytes()
        labels = (np.arange(count) % 10).astype(np.uint8).tobytes()
        header = struct.pack(">IIII", 2051, count, 28, 28)
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(header + pixels)
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(
            struct.pack(">II", 2049, count) + labels
        )
    monkeypatch.setenv("ACCRETE_TORCHVISION", str(tmp_path))
    data_set = found("torchvision:MNIST")
    assert data_set.counts == {"train": 40, "test": 20}
    assert data_set.classes[0] == "0 - zero"


def test_ambiguous_label_column_error_suggests_a_working_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipeline import cli

    plain_csv(tmp_path / "my data")
    table = tmp_path / "my data" / "labels.csv"
    lines = table.read_text().splitlines()
    rows = [f"{line},{'xyz'[number % 3]}" for number, line in enumerate(lines[1:])]
    lines = ["file,category,class", *rows]
    table.write_text("\n".join(lines))
    with pytest.raises(UserError, match="which is the label is not clear") as error:
        found(table)
    command = str(error.value).split("`")[1]
    monkeypatch.chdir(tmp_path)
    assert cli.main(shlex.split(command)[1:]) == 0


def animals(folder: Path, header: str, num_images: int = 12) -> Path:
    """Write images, and a table with the columns of `header`."""
    columns = header.split(",")
    lines = [header]
    for number in range(num_images):
        make_image(folder / f"{number}.png", number)
        values = {
            "image": f"{number}.png",
            "species": NAMES[number % 4],
            "family": NAMES[number % 2],
            "camera": f"cam{number % 2}",
            "site": f"site{number // 2 % 2}",
        }
        lines.append(",".join(values[column] for column in columns))
    return write_table(folder / "labels.csv", lines)


@pytest.mark.parametrize(
    ("header", "num_images"),
    [
        ("image,species,site", 12),
        ("image,site,species", 12),
        ("image,species,camera", 4),
        ("image,camera,species", 4),
        ("image,family,species", 12),
    ],
)
def test_likelier_label_column_is_proposed_first(
    tmp_path: Path, header: str, num_images: int
) -> None:
    table = animals(tmp_path / "data", header, num_images)
    with pytest.raises(UserError, match="it can be 'species'") as error:
        found(table)
    assert "--set source.label=species`" in str(error.value)


@pytest.mark.parametrize(
    ("header", "note"),
    [
        ("image,camera,species", "column 'species' was taken as the label, and 'camera' not"),
        ("image,camera", "column 'camera' was taken as the label, because there is no other"),
    ],
)
def test_label_column_with_unusual_name_is_noted(tmp_path: Path, header: str, note: str) -> None:
    (told,) = found(animals(tmp_path / "data", header)).notes
    assert told.startswith(note)


def test_card_is_named_after_table_given_without_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    animals(tmp_path / "data", "image,species")
    monkeypatch.chdir(tmp_path / "data")
    assert found("labels.csv").name == "labels"
    monkeypatch.chdir(tmp_path)
    assert found("data/labels.csv").name == "data"


def test_columns_and_folders_of_contest_data_are_detected(tmp_path: Path) -> None:
    data_set = found(sources.ids_in_an_odd_column(tmp_path / "data"))
    source = data_set.source
    assert (source["image"], source["label"]) == ("id_code", "diagnosis")
    assert source["files"] == "train_images/{}.png"
    (note,) = data_set.notes
    assert note.startswith("table 'test.csv'")
    assert "'diagnosis'" in note
    assert data_set.counts == {"train": 24}
    assert data_set.account.not_read == {"image that no row names": 3, "table": 1}


def test_images_of_one_table_may_lie_in_several_folders(tmp_path: Path) -> None:
    data_set = found(sources.ids_over_two_folders(tmp_path / "data"))
    assert data_set.source["files"] == ["part_1/{}.jpg", "part_2/{}.jpg"]
    assert data_set.counts == {"train": 40}


def test_each_table_may_have_its_folder(tmp_path: Path) -> None:
    data_set = found(sources.folder_for_each_table(tmp_path / "data"))
    assert data_set.source["files"] == "{split}/{}"
    assert data_set.counts == {"train": 12, "test": 12}


def test_equal_file_names_in_train_and_test_are_distinguished(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    for split, start in (("train", 0), ("test", 50)):
        lines = ["filename,label"]
        for number in range(12):
            make_image(folder / split / f"{number}.png", start + number)
            lines.append(f"{number}.png,{'ab'[number % 2]}")
        write_table(folder / f"{split}.csv", lines)
    data_set = found(folder)
    assert data_set.source["files"] == "{split}/{}"
    assert data_set.notes == ()
    assert data_set.counts == {"train": 12, "test": 12}
    list_items = get_format(data_set.card).list_items
    assert list_items is not None
    for item in list_items(data_set.card, [*data_set.entries]):
        assert item.name.startswith(f"{item.split}/")


def test_split_tables_are_kept_if_file_pattern_is_given(tmp_path: Path) -> None:
    folder = sources.folder_for_each_table(tmp_path / "data")
    data_set = found(folder, files="{split}/{}")
    assert data_set.notes == ()
    assert data_set.counts == {"train": 12, "test": 12}


def test_proposed_patterns_are_relative_to_the_table(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    lines = ["filename,label"]
    for number in range(8):
        make_image(folder / "x" / NAMES[number % 4] / f"{number}.png", number)
        make_image(folder / "y" / str(number) / f"{number}.png", 50 + number)
        lines.append(f"{number}.png,{NAMES[number % 4]}")
    write_table(folder / "meta" / "labels.csv", lines)
    with pytest.raises(UserError, match="files of the same names in several folders") as error:
        found(folder)
    assert "'../x/{label}/{}'" in str(error.value)
    assert "'../y/0/{}'" in str(error.value)


def test_data_set_name_ignores_at_sign_in_parent_folder(tmp_path: Path) -> None:
    assert found(sources.plain_csv(tmp_path / "me@host" / "leaves").parent).name == "leaves"


def test_parquet_file_without_rows_is_refused(tmp_path: Path) -> None:
    columns: dict[str, Any] = {
        "image": pa.array([], pa.binary()),
        "label": pa.array([], pa.int64()),
    }
    columns["is_train"] = pa.array([], pa.bool_())
    pq.write_table(pa.table(columns), tmp_path / "data.parquet")
    with pytest.raises(UserError, match="has no train images"):
        found(tmp_path / "data.parquet")


def test_table_with_one_column_per_class_is_refused(tmp_path: Path) -> None:
    lines = ["filename,ant,bee"]
    for number in range(6):
        make_image(tmp_path / "data" / "im" / f"{number}.png", number)
        lines.append(f"{number}.png,{number % 2},{1 - number % 2}")
    write_table(tmp_path / "data" / "train.csv", lines)
    with pytest.raises(UserError, match=r"a column for each class \('ant', 'bee'\)"):
        found(tmp_path / "data")


def test_image_table_takes_precedence_over_folder_names(tmp_path: Path) -> None:
    """If a table lists the images, folders not named after classes are not classes."""
    lines = ["image_id,kind,sort"]
    for number in range(12):
        make_image(tmp_path / "data" / f"part{number % 2}" / f"im{number}.png", number)
        lines.append(f"im{number},{NAMES[number % 4]},{NAMES[number % 3]}")
    write_table(tmp_path / "data" / "meta.csv", lines)
    with pytest.raises(UserError, match="which is the label is not clear"):
        found(tmp_path / "data")


@pytest.mark.parametrize(
    ("text", "file"),
    [
        ("a/b.png", "lists/a/b.png"),
        ("../images/b.png", "images/b.png"),
        ("/data/images/b.png", "images/b.png"),
        ("a\\b.png", "lists/a/b.png"),
        ("../../etc/passwd", None),
        ("/etc/passwd", None),
        ("/data2/b.png", None),
        ("http://host/b.png", None),
        ("a\0.png", None),
        ("", None),
    ],
)
def test_paths_of_a_table_stay_inside_the_source(text: str, file: str | None) -> None:
    index = FileIndex(["lists/a/b.png", "images/b.png"])
    finder = FileFinder(index, "lists", "/data", ("{}",))
    names, problem = finder.find(NamedRow(text, "", ""))
    assert names == ([] if file is None else [file])
    assert (problem is None) == (file is not None)


def test_rows_below_a_link_outside_the_source_are_rejected(tmp_path: Path) -> None:
    make_image(tmp_path / "outside" / "x.png", 1)
    make_image(tmp_path / "data" / "in.png", 2)
    os.symlink(tmp_path / "outside", tmp_path / "data" / "link")
    os.symlink(tmp_path / "outside" / "x.png", tmp_path / "data" / "x.png")
    lines = ["image,label", "in.png,a", "link/x.png,a", "x.png,b", "no.png,b"]
    table = write_table(tmp_path / "data" / "t.csv", lines)
    source: dict[str, Any] = {"format": "csv", "path": str(table)}
    body = {"name": "x", "licence": "", "classes": ["a", "b"], "source": source}
    card = Card.model_validate(body)
    list_items = get_format(card).list_items
    assert list_items is not None
    items = list_items(card, require_entries(card))
    assert {item.name: item.problem for item in items} == {
        "in.png": None,
        "x.png": None,
        "row 2: link/x.png": "link: to a folder outside the source; move that folder into the "
        "source, or let source.path name one that holds both",
        "row 4: no.png": "corrupt: there is no such file",
    }


def test_row_below_a_link_inside_the_source_is_rejected(tmp_path: Path) -> None:
    make_image(tmp_path / "images" / "x.png", 1)
    os.symlink("images", tmp_path / "again")
    table = write_table(tmp_path / "t.csv", ["image,label", "images/x.png,a", "again/x.png,b"])
    source: dict[str, Any] = {"format": "csv", "path": str(table)}
    body = {"name": "x", "licence": "", "classes": ["a", "b"], "source": source}
    card = Card.model_validate(body)
    list_items = get_format(card).list_items
    assert list_items is not None
    assert [item.problem for item in list_items(card, require_entries(card))] == [
        None,
        "other file: a link to images, which is read anyway",
    ]


def test_conflicting_labels_are_counted_apart_from_conflicting_splits(tmp_path: Path) -> None:
    rows = ["image,label,split"]
    for index in range(3):
        make_image(tmp_path / f"{index}.png", index)
        rows.append(f"{index}.png,a,train")
    rows += ["0.png,a,test", "1.png,a,test", "2.png,b,train"]
    table = write_table(tmp_path / "t.csv", rows)
    source: dict[str, Any] = {
        "format": "csv",
        "path": str(table),
        "split": "split",
        "splits": {"train": "train", "test": "test"},
    }
    body = {"name": "x", "licence": "", "classes": ["a", "b"], "source": source}
    card = Card.model_validate(body)
    with pytest.raises(UserError, match=r"1 image has two labels.*'2.png'.*\(rows 3 and 6\)"):
        csv.list_images(card, require_entries(card))


BAD: dict[str, tuple[bytes, str, str]] = {
    "empty": (b"", "labels.csv", "no rows"),
    "header alone": (b"image,label", "labels.csv", "no rows"),
    "no utf-8": (b"image,label\n\xff\xfe\xfa.png,a", "labels.csv", "not text in UTF-8"),
    "no files": (b"image,label\na.png,x\nb.png,y", "labels.csv", "'a.png'"),
    "outside": (b"image,label\n/etc/a.png,x\n../../b.png,y", "labels.csv", "not below"),
    "one line": (b"x" * (1 << 21), "labels.csv", "line of more than"),
    "no parquet": (b"PAR1 and no more", "x.parquet", "not readable as Parquet"),
    "no tar": (b"not a tar" * 100, "x.tar", "cannot be read as an uncompressed tar"),
    "zip": (b"PK", "x.zip", "unpack it"),
}


@pytest.mark.parametrize("case", BAD)
def test_unusable_file_is_refused_in_one_sentence(case: str, tmp_path: Path) -> None:
    data, name, says = BAD[case]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=says) as error:
        found(tmp_path / name)
    message = str(error.value)
    assert name in message
    assert "\n" not in message
