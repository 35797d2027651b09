"""Tests of ambiguous layouts: they are read correctly or refused with a remedy.

`RIGHT` in a case means that `init` and `ingest` store the correct images. Any other text is part of
the error message of `init`.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config.yaml_files import parse_yaml
from pipeline.data.detection.data_set import DataSet, Request
from pipeline.data.detection.detect import MAX_TABLES, detect
from tests.random_layouts import Layout, Maker, Picture
from tests.test_random_layouts import RIGHT, read_layout
from workers.errors import UserError

NAMES = ("ant", "bee", "cow")
NO_COLUMNS: Mapping[str, Callable[[int], Any]] = {}


class Tree(Maker):
    """Builds one data set below a folder and records the true label and split of each image."""

    def __init__(self, folder: Path):
        super().__init__(folder, 0)
        self.truth: list[Picture] = []

    def image(self, path: str, label: str = "", split: str = "train") -> str:
        """Write an image; it belongs to the data set if it has a label."""
        data = self.png()
        self.write(path, data)
        if label:
            self.truth.append(Picture(split, label, path, data))
        return path

    def classes(self, folder: str = "", split: str = "train", number: int = 4) -> None:
        """Write class folders."""
        for name in NAMES:
            for index in range(number):
                self.image(f"{folder}{name}/{split}{name}{index}.png", name, split)

    def flat(self, folder: str, split: str = "train", number: int = 12) -> list[list[str]]:
        """Write images without class folders; return their rows (name, label)."""
        rows = []
        for index in range(number):
            name = f"{split}{folder.strip('/').replace('/', '_')}{index:03d}.png"
            self.image(folder + name, NAMES[index % 3], split)
            rows.append([name, NAMES[index % 3]])
        return rows

    def csv(self, path: str, columns: str, rows: Sequence[Sequence[object]]) -> None:
        """Write a table. columns: the header, separated by commas."""
        self.write(path, "\n".join([columns, *(",".join(map(str, row)) for row in rows)]) + "\n")

    def samples(
        self,
        path: str,
        splits: Sequence[str] = ("train",),
        extra: Callable[[str, int, str], list[tuple[str, bytes]]] = lambda *_: [],
        label: str = "cls",
        key: str = "{split}/{index:04d}",
        ending: str = "png",
    ) -> None:
        """Write a tar of samples.

        Args:
            path: Path of the tar.
            splits: Splits of the samples; each has 12.
            extra: Returns more members of a sample, from its label, number and split.
            label: Extension of the label member, or "" for none.
            key: Pattern of the keys.
            ending: Extension of the images.
        """
        members: list[tuple[str, bytes]] = []
        for split in splits:
            for index in range(12):
                name = NAMES[index % 3]
                data = self.png()
                stem = key.format(split=split, index=index + 100 * len(self.truth))
                self.truth.append(Picture(split, name, stem, data))
                members.append((f"{stem}.{ending}", data))
                if label:
                    members.append((f"{stem}.{label}", name.encode()))
                members += [(f"{stem}.{end}", text) for end, text in extra(name, index, split)]
        self.tar(path, members)

    def columns(
        self, path: str, split: str = "train", more: Mapping[str, Callable[[int], Any]] = NO_COLUMNS
    ) -> None:
        """Write a Parquet file of images and labels.

        Args:
            path: Path of the file.
            split: Split of the rows.
            more: Further column -> its value by row number.
        """
        rows = [(self.png(), NAMES[index % 3]) for index in range(12)]
        self.truth += [Picture(split, label, path, data) for data, label in rows]
        table = {"image": [data for data, _ in rows], "label": [label for _, label in rows]}
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        values = {name: [make(index) for index in range(12)] for name, make in more.items()}
        pq.write_table(pa.table({**table, **values}), self.folder / path)


Case = tuple[Callable[[Tree], Any], str]


# ---- folders -------------------------------------------------------------------------------------
def masks_beside(tree: Tree) -> None:
    tree.classes()
    for index in range(6):
        tree.image(f"masks/m{index}.png")


def thumbs_in_classes(tree: Tree) -> None:
    tree.classes()
    for name in NAMES:
        tree.image(f"{name}/thumbs/{name}.png")


def mask_files(tree: Tree) -> None:
    tree.classes()
    for picture in [*tree.truth]:
        tree.image(picture.name.replace(".png", "_mask.png"))


def unsorted_beside(tree: Tree) -> None:
    tree.classes()
    tree.image("unlabeled/x.png")


def splits_below_a_wrapper(tree: Tree) -> None:
    tree.classes("images/tr/")
    tree.classes("images/tst/", "test", 2)


def holdout_below_a_wrapper(tree: Tree) -> None:
    tree.classes("photos/learn/")
    tree.classes("photos/holdout/", "test", 2)


def eval_beside_test(tree: Tree) -> None:
    tree.classes("train/")
    tree.classes("test/", "test", 2)
    tree.classes("eval/", "val", 2)


def splits_of_each_class(tree: Tree) -> None:
    for name in NAMES:
        for split, number in (("train", 4), ("test", 2)):
            for index in range(number):
                tree.image(f"{name}_{split}/{split}{index}{name}.png", name, split)


def split_in_file_names(tree: Tree) -> None:
    for name in NAMES:
        for index in range(6):
            split = "test" if index > 3 else "train"
            tree.image(f"{name}/{name}{index}_{split}.png", name, split)


def folders_of_the_same_names(tree: Tree) -> None:
    tree.classes("farm one/")
    tree.classes("farm two/")


def images_in_one_wrapper(tree: Tree) -> None:
    for index in range(6):
        tree.image(f"images/{index}.png")


def numbered_classes_with_other_names(tree: Tree) -> None:
    for name in NAMES[:2]:
        for index in range(20):
            tree.image(f"{name}/{index}.png", name)
        tree.image(f"{name}/{name}.png", name)


def more_tables_than_are_compared(tree: Tree) -> None:
    tree.classes("photos/")
    for index in range(MAX_TABLES + 1):
        tree.csv(f"table{index}.csv", "file,score", [[tree.truth[index % 12].name, index]])


def parts_of_images(tree: Tree) -> None:
    for index in range(12):
        tree.image(f"part_{index % 2}/{index}.png")


def signs_of_patterns(tree: Tree) -> None:
    tree.classes("data [v2]/train/")
    tree.classes("data [v2]/test/", "test", 2)


def class_called_train(tree: Tree) -> None:
    for name in ("bus", "car", "train"):
        for index in range(4):
            tree.image(f"{name}/{name}{index}.png", name)


# ---- tables --------------------------------------------------------------------------------------
def predictions_beside_folders(tree: Tree) -> None:
    tree.classes()
    rows = [[picture.name, NAMES[0]] for picture in tree.truth]
    tree.csv("predictions.csv", "file,prediction", rows)


def attributes_beside_a_table(tree: Tree) -> None:
    rows = tree.flat("images/")
    tree.csv("labels.csv", "filename,label", rows)
    tree.csv("attributes.csv", "filename,colour", [[name, "red"] for name, _ in rows])


def two_columns_of_labels(tree: Tree) -> None:
    rows = tree.flat("images/")
    tree.csv(
        "t.csv", "filename,breed,owner", [[n, c, "xyz"[i % 2]] for i, (n, c) in enumerate(rows)]
    )


def flag(column: str, yes: str, no: str) -> Callable[[Tree], None]:
    """Return a function that writes a table with a flag column of test or train images."""

    def build(tree: Tree) -> None:
        is_test = "test" in column
        rows = [[*row, no if is_test else yes] for row in tree.flat("images/")]
        rows += [[*row, yes if is_test else no] for row in tree.flat("images/", "test", 6)]
        tree.csv("labels.csv", f"filename,label,{column}", rows)

    return build


def split_column(words: dict[str, str], column: str = "split") -> Callable[[Tree], None]:
    """Return a function that writes a table with a split column."""

    def build(tree: Tree) -> None:
        rows: list[list[str]] = []
        for split, word in words.items():
            rows += [[*row, word] for row in tree.flat("images/", split.strip("2"), 9)]
        tree.csv("labels.csv", f"filename,label,{column}", rows)

    return build


def blank_split(tree: Tree) -> None:
    rows = [[*row, "train"] for row in tree.flat("images/")]
    rows += [[*row, "test"] for row in tree.flat("images/", "test", 6)]
    rows[3][2] = ""
    tree.csv("labels.csv", "filename,label,split", rows)


def split_columns(**splits_of_table: str) -> Callable[[Tree], None]:
    """Return a function that writes tables with a column of splits, such as `train="train,val"`."""

    def build(tree: Tree) -> None:
        for table, splits in splits_of_table.items():
            rows: list[list[str]] = []
            for split in splits.split(","):
                rows += [[*row, split] for row in tree.flat(f"images/{table}", split, 9)]
            rows = [[f"{table}{name}", *rest] for name, *rest in rows]
            tree.csv(f"{table}.csv", "filename,label,split", rows)

    return build


def val_in_another_table(tree: Tree) -> None:
    for split in ("train", "test"):
        rows = tree.flat(f"{split}/", split)
        lines = [json.dumps({"file_name": name, "label": label}) for name, label in rows]
        tree.write(f"{split}/metadata.jsonl", "\n".join(lines))
    tree.csv("validation/metadata.csv", "file_name,label", tree.flat("validation/", "val", 6))


def val_in_class_folders(tree: Tree) -> None:
    for split in ("train", "test"):
        tree.csv(f"{split}.csv", "filename,label", tree.flat(f"{split}/", split))
    tree.classes("val/", "val")


def spaces_before_quotes(tree: Tree) -> None:
    lines = [f'"{name}", "{label}"' for name, label in tree.flat("images/")]
    tree.write("labels.csv", "\n".join(['"filename", "label"', *lines]))


def tables_of_two_kinds(
    column: str = "label", extra: str = "", latin: bool = False
) -> Callable[[Tree], None]:
    """Return a function that writes two tables of different images; `summer.csv` is unusual."""

    def build(tree: Tree) -> None:
        tree.csv("spring.csv", "filename,label", tree.flat("a/"))
        rows: list[list[str]] = tree.flat("b/")
        header = f"filename,{column}"
        if extra:
            rows = [[*row, extra[i % 2]] for i, row in enumerate(rows)]
            header += ",split"
        tree.csv("summer.csv", header, rows)
        if latin:
            text = (tree.folder / "summer.csv").read_text().replace("ant", "fourmi à miel")
            (tree.folder / "summer.csv").write_bytes(text.encode("latin-1"))

    return build


def table_of_splits(tree: Tree) -> None:
    rows = tree.flat("images/")
    tree.csv("labels.csv", "filename,label", rows)
    splits = [[name, "train" if i < 8 else "test"] for i, (name, _) in enumerate(rows)]
    tree.csv("info.csv", "filename,split", splits)


def table_of_folds(tree: Tree) -> None:
    rows = tree.flat("images/")
    tree.csv("labels.csv", "filename,label", rows)
    tree.csv("cv.csv", "filename,fold", [[name, i % 3] for i, (name, _) in enumerate(rows)])


def sites_below_splits(tree: Tree) -> None:
    for split in ("train", "test"):
        for site in ("berlin", "paris"):
            tree.classes(f"{split}/{site}/", f"{split}{site}")


def images_below_classes(tree: Tree) -> None:
    for split in ("train", "test"):
        for name in NAMES:
            for index in range(4):
                tree.image(f"{split}/{name}/images/{split}{name}{index}.png", name, split)


def elsewhere(name: str) -> Callable[[Tree], None]:
    """Return a function that writes class folders below train, and an unread file or link."""

    def build(tree: Tree) -> None:
        tree.classes("train/")
        if name == "link":
            (tree.folder.parent / "elsewhere").mkdir()
            (tree.folder / "test").symlink_to(tree.folder.parent / "elsewhere")
        else:
            tree.write(name, b"x" * 100)

    return build


def labels_of_folders(tree: Tree) -> None:
    rows = []
    for number in range(9):
        label = NAMES[number % 3]
        for index in range(3):
            tree.image(f"P{number:02d}/{index}.png", label)
        rows.append([f"P{number:02d}", label])
    tree.csv("labels.csv", "patient,label", rows)


def other_table(
    header: str, make: Callable[[int], Sequence[Sequence[object]]], name: str = "metadata.csv"
) -> Callable[[Tree], None]:
    """Return a function that writes a label table and another table about the same images."""

    def build(tree: Tree) -> None:
        rows = tree.flat("images/")
        tree.csv("labels.csv", "filename,label", rows)
        lines = [[file, *more] for i, (file, _) in enumerate(rows) for more in make(i)]
        tree.csv(name, f"filename,{header}", lines)

    return build


def notes_in_latin_1(tree: Tree) -> None:
    tree.csv("labels.csv", "filename,label", tree.flat("images/"))
    (tree.folder / "notes.csv").write_bytes("who,what\nn\u00e9,\u00e9t\u00e9".encode("latin-1"))


def groups_of_classes(tree: Tree) -> None:
    tree.classes()
    groups = [["ant", "insect"], ["bee", "insect"], ["cow", "mammal"], ["dog", "mammal"]]
    tree.csv("species.csv", "name,category", groups)
    tree.csv("plants.csv", "species,usage", [["oak", "wood"], ["elm", "wood"]])


def videos_of_classes(tree: Tree) -> None:
    for number, split in enumerate(("train", "test")):
        for label in ("fake", "real"):
            for index in range(6):
                video = f"{number}{label[0]}{index // 2:03d}"
                tree.image(f"{split}/{label}/{video}/{index}.png", label, split)


def zip_beside_its_folder(tree: Tree) -> None:
    tree.classes("train/")
    for index in range(6):
        tree.image(f"test/{index}.png")
    tree.write("test.zip", b"PK")


def labels_of_unknown_ids(tree: Tree) -> None:
    for number in range(12):
        tree.image(f"{('berlin', 'paris')[number % 2]}/{number}.png")
    tree.csv("labels.csv", "id,label", [[f"x{100 + i}", NAMES[i % 3]] for i in range(12)])


def names_of_folders(tree: Tree) -> None:
    tree.classes()
    tree.csv("labels.csv", "label,name", [[name, name.upper()] for name in NAMES])


def labels_in_quotes(tree: Tree) -> None:
    rows = tree.flat("images/")
    rows[0][1] = f"'{rows[0][1]}'"
    tree.csv("labels.csv", "filename,label", rows)


def wide_letters(tree: Tree) -> None:
    rows = tree.flat("images/")
    rows[0][1] = "\uff41\uff4e\uff54"
    tree.csv("labels.csv", "filename,label", rows)


def numbered_tables(tree: Tree) -> None:
    for number, name in enumerate(("train_1", "train_2", "test")):
        split = name.partition("_")[0]
        tree.csv(f"{name}.csv", "filename,label", tree.flat(f"part{number}/", split))


def list_of_nested_folders(tree: Tree) -> None:
    for split in ("train", "test"):
        lines = []
        for number in range(12):
            name = NAMES[number % 3]
            path = f"{name}/day{number % 2}/{split}{number}.png"
            lines.append(tree.image(path, name, split))
        tree.write(f"{split}.txt", "\n".join(lines))


def headers_in_two_cases(tree: Tree) -> None:
    tree.csv("train.csv", "filename,label", tree.flat("images/"))
    tree.csv("test.csv", "filename,Label", tree.flat("images/", "test"))


def split_column_of_one_table(tree: Tree) -> None:
    split_columns(train="train,test")(tree)
    tree.csv("test.csv", "filename,label", tree.flat("more/", "test", 9))


def tables_without_headers(tree: Tree) -> None:
    for split in ("train", "test"):
        rows = [[n.removesuffix(".png"), c, "x"] for n, c in tree.flat("images/", split)]
        tree.write(f"{split}.csv", "\n".join(",".join(row) for row in rows))


def table_in_a_folder_beside_images(tree: Tree) -> None:
    tree.csv("a/lists/train.csv", "filename,label", tree.flat("a/images/"))
    tree.write("readme.md", b"x")


def table_in_a_folder(tree: Tree) -> None:
    tree.csv("meta/labels.csv", "filename,label", tree.flat("images/"))
    tree.write("notes.pdf", b"x")


def masks_of_the_same_names(tree: Tree) -> None:
    rows = tree.flat("images/")
    for name, _ in rows:
        tree.image(f"masks/{name}")
    tree.csv("labels.csv", "filename,label", rows)


def names_in_class_folders(tree: Tree) -> None:
    rows = []
    for label in NAMES:
        for index in range(4):
            tree.image(f"photos/{label}/{index}.png", label)
            rows.append([f"{index}.png", label])
    tree.csv("labels.csv", "filename,label", rows)


def table_against_folders(tree: Tree) -> None:
    tree.classes()
    rows = [[p.name, NAMES[(NAMES.index(p.label) + i % 2) % 3]] for i, p in enumerate(tree.truth)]
    tree.csv("labels.csv", "filename,label", rows)


def two_labels_of_a_file(tree: Tree) -> None:
    rows = tree.flat("images/")
    tree.csv("labels.csv", "filename,label", [*rows, [rows[0][0], rows[1][1]]])


def labels_that_say_none(tree: Tree) -> None:
    rows = tree.flat("images/")
    rows += [[tree.image(f"images/x{index}.png")[7:], "N/A"] for index in range(3)]
    tree.csv("labels.csv", "filename,label", rows)


def several_labels(tree: Tree) -> None:
    rows = tree.flat("images/")
    rows[0][1] = "ant|bee"
    tree.csv("labels.csv", "filename,label", rows)


def folds(tree: Tree) -> None:
    rows = tree.flat("images/")
    for fold in range(3):
        held = {name for index, (name, _) in enumerate(rows) if index // 4 == fold}
        parts = {
            "train": [r for r in rows if r[0] not in held],
            "test": [r for r in rows if r[0] in held],
        }
        for split, of_split in parts.items():
            tree.csv(f"fold{fold}_{split}.csv", "filename,label", of_split)


def batches(tree: Tree) -> None:
    for batch in ("batch1", "batch2"):
        tree.csv(f"{batch}/labels.csv", "filename,label", tree.flat(f"{batch}/"))


def trainval(tree: Tree) -> None:
    train = tree.flat("images/")
    val = tree.flat("images/", "val", 6)
    for name, rows in (("train", train), ("val", val), ("trainval", train + val)):
        tree.csv(f"{name}.csv", "filename,label", rows)


def unnamed_rows(tree: Tree) -> None:
    tree.write("labels.csv", "\n".join(f"{n},{i % 2}" for i, n in enumerate(range(24))))
    for number in range(24):
        tree.image(f"images/{number}.png", str(number % 2))


def unread_test(tree: Tree) -> None:
    tree.csv("train.csv", "filename,label", tree.flat("train/"))
    for index in range(4):
        tree.image(f"test/e{index}.png")


def list_of_a_split(tree: Tree) -> None:
    tree.classes()
    tree.write("test_list.txt", "\n".join(p.name for p in tree.truth[:4]))


def split_of_folders(tree: Tree) -> None:
    tree.classes()
    rows = [
        [p.name, "AB"[i % 2], "test" if i % 4 > 2 else "train"] for i, p in enumerate(tree.truth)
    ]
    tree.csv("info.csv", "filename,camera,split", rows)


def hub_lines(tree: Tree) -> None:
    for split in ("train", "test"):
        rows = tree.flat(f"{split}/", split)
        lines = [json.dumps({"file_name": name, "label": label}) for name, label in rows]
        tree.write(f"{split}/metadata.jsonl", "\n".join(lines))


# ---- Parquet -------------------------------------------------------------------------------------
def parquet_files(*names: str) -> Callable[[Tree], None]:
    """Return a function that writes Parquet files. names: for example `test=a.parquet`."""

    def build(tree: Tree) -> None:
        for name in names:
            split, _, path = name.partition("=")
            tree.columns(path, split)

    return build


def class_labels(
    declared: Mapping[str, tuple[str, ...]], label: str = ""
) -> Callable[[Tree], None]:
    """Return a function that writes a Parquet file with `ClassLabel` columns of Hugging Face.

    declared: column -> its classes, which alternate over the rows. label: the label column, for
    layouts that are read.
    """

    def build(tree: Tree) -> None:
        number = 12
        data = [tree.png() for _ in range(number)]
        values = {name: [i % len(names) for i in range(number)] for name, names in declared.items()}
        features = {name: {"_type": "ClassLabel", "names": [*n]} for name, n in declared.items()}
        if label:
            names = [declared[label][value] for value in values[label]]
            tree.truth += [
                Picture("train", name, "a.parquet", image)
                for name, image in zip(names, data, strict=True)
            ]
        table = pa.table({"image": data, **values})
        info = {"info": {"features": {"image": {"_type": "Image"}, **features}}}
        table = table.replace_schema_metadata({"huggingface": json.dumps(info)})
        tree.folder.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, tree.folder / "a.parquet")

    return build


def parquet_nested(name: str, make: Callable[[int], Any]) -> Callable[[Tree], None]:
    """Return a function that writes a Parquet file with a nested column and a column `source`."""

    def build(tree: Tree) -> None:
        table = {
            "image": [tree.png() for _ in range(12)],
            name: [make(i) for i in range(12)],
            "source": ["xy"[i % 2] for i in range(12)],
        }
        tree.folder.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(table), tree.folder / "a.parquet")

    return build


def tags_beside_labels(tree: Tree) -> None:
    tree.columns("a.parquet", more={"labels": lambda i: [f"t{i}"], "bbox": lambda i: {"y": i}})


def parquet_sorted(tree: Tree) -> None:
    """Write rows sorted by class, more per class than are sampled, with two possible labels."""
    tree.folder.mkdir(parents=True, exist_ok=True)
    images = [tree.png() for _ in range(3)]
    rows = [i // 2500 for i in range(7500)]
    table = {"image": [images[i] for i in rows], "class": rows, "target": [i // 2 for i in rows]}
    pq.write_table(pa.table(table), tree.folder / "a.parquet")


def every_fourth_is_test(tree: Tree) -> None:
    for number in range(0, len(tree.truth), 4):
        tree.truth[number] = tree.truth[number]._replace(split="test")


def parquet_flag(tree: Tree) -> None:
    tree.columns("a.parquet", more={"is_train": lambda index: index % 4 != 0})
    every_fourth_is_test(tree)


def parquet_paths(tree: Tree) -> None:
    tree.columns("a.parquet", more={"path": lambda i: f"{'train' if i % 4 else 'test'}/{i}"})
    every_fourth_is_test(tree)


def parquet_configs(tree: Tree) -> None:
    tree.columns("full/train.parquet")
    tree.columns("small/train.parquet")


def parquet_column_in_one(tree: Tree) -> None:
    tree.columns("a.parquet")
    tree.columns("b.parquet", more={"split": lambda index: "test"})


# ---- tars ----------------------------------------------------------------------------------------
def json_member(**fields: Callable[[str, int, str], Any]) -> Callable[[str, int, str], Any]:
    """Return a function that makes the JSON member of a sample."""
    return lambda label, index, split: [
        ("json", json.dumps({n: make(label, index, split) for n, make in fields.items()}).encode())
    ]


def shards_by_word(tree: Tree) -> None:
    for path, split in (("learn-000.tar", "train"), ("tst.tar", "test")):
        tree.samples(path, (split,), key="{index:04d}")


def samples_with_splits(tree: Tree) -> None:
    tree.samples("a.tar", ("train", "test"), json_member(split=lambda _, i, s: s), key="k{index}")


def samples_in_split_folders(tree: Tree) -> None:
    tree.samples("a.tar", ("train", "test"))


def samples_with_two_images(tree: Tree) -> None:
    tree.samples("a.tar", extra=lambda *_: [("bmp", b"BM")], key="k{index}")


def labels_that_differ(tree: Tree) -> None:
    wrong = json_member(label=lambda label, i, s: NAMES[(NAMES.index(label) + 1) % 3])
    tree.samples("a.tar", extra=wrong, key="k{index}")


def captions_beside_labels(tree: Tree) -> None:
    caption = [("txt", b"a photo")]
    tree.samples("a.tar", extra=lambda label, *_: caption, key="k{index}")


def numbers_beside_names(tree: Tree) -> None:
    def members(label: str, index: int, split: str) -> list[tuple[str, bytes]]:
        number = str(NAMES.index(label)).encode()
        return [("cls", number), ("json", json.dumps({"label": label}).encode())]

    tree.samples("a.tar", extra=members, label="", key="k{index}")


def folders_against_labels(tree: Tree) -> None:
    tree.samples("a.tar", key="bee/k{index}")


CASES: dict[str, Case] = {
    "masks beside classes": (masks_beside, "ignore: [masks]"),
    "thumbnails in classes": (thumbs_in_classes, "folders 'thumbs'"),
    "files called mask": (mask_files, "'mask'"),
    "unlabeled beside classes": (unsorted_beside, RIGHT),
    "splits below a wrapper": (splits_below_a_wrapper, RIGHT),
    "holdout below a wrapper": (holdout_below_a_wrapper, RIGHT),
    "test and eval": (eval_beside_test, "can be validation images or more test images"),
    "splits of each class": (splits_of_each_class, RIGHT),
    "split in names of files": (split_in_file_names, "{label}/*test*"),
    "folders of the same names": (folders_of_the_same_names, "folders of the same names"),
    "images in one wrapper": (images_in_one_wrapper, "not a data set of images with labels"),
    "numbered classes": (numbered_classes_with_other_names, RIGHT),
    "many tables": (more_tables_than_are_compared, f"at most {MAX_TABLES} are compared"),
    "parts": (parts_of_images, "other than classes"),
    "signs of patterns": (signs_of_patterns, "rename it"),
    "a class called train": (class_called_train, RIGHT),
    "predictions beside folders": (predictions_beside_folders, RIGHT),
    "attributes beside a table": (attributes_beside_a_table, RIGHT),
    "two columns of labels": (two_columns_of_labels, "which is the label is not clear"),
    "is_test": (flag("is_test", "1", "0"), RIGHT),
    "istrain": (flag("istrain", "True", "False"), RIGHT),
    "a test of the patient": (flag("pcr_test", "1", "0"), "source.split=null"),
    "test_passed": (flag("test_passed", "yes", "no"), "source.split=null"),
    "is_test_image": (flag("is_test_image", "1", "0"), RIGHT),
    "holdout in a column": (split_column({"train": "learn", "test": "holdout"}), RIGHT),
    "three words": (split_column({"train": "tr", "val": "dev", "test": "tst"}, "subset"), RIGHT),
    "words that say nothing": (
        split_column({"train": "A", "test": "B"}),
        "source.splits={train: [A, B]",
    ),
    "a part that is unknown": (
        split_column({"train": "train", "test": "test", "train2": "extra"}),
        "'extra'",
    ),
    "tables and columns that agree": (split_columns(train="train", test="test"), RIGHT),
    "tables and columns that differ": (
        split_columns(train="train,val", test="test"),
        "column 'split' of train.csv has 'train', 'val', which does not follow from the names",
    ),
    "parts with a split column": (
        split_columns(part1="train,test", part2="train,test"),
        "join them into one table",
    ),
    "validation images of another table": (val_in_another_table, "'validation'"),
    "tables of other images, one in latin-1": (
        tables_of_two_kinds(latin=True),
        "not text in UTF-8",
    ),
    "tables of other images, one by species": (
        tables_of_two_kinds(column="species"),
        "name different images",
    ),
    "tables of other images, one with parts": (
        tables_of_two_kinds(extra="AB"),
        "looks like a split",
    ),
    "a table of splits beside labels": (table_of_splits, "source.split=null"),
    "a table of folds beside labels": (table_of_folds, "source.split=null"),
    "sites below splits": (sites_below_splits, "train/*/{label}"),
    "wrappers below classes": (images_below_classes, RIGHT),
    "a link to test images": (elsewhere("link"), "looks like the images of a split"),
    "test images in a zip": (elsewhere("test.zip"), "looks like the images of a split"),
    "validation images in a tar": (elsewhere("val/all.tar.gz"), "looks like the images of a split"),
    "an archive of other things": (elsewhere("masks.zip"), RIGHT),
    "labels of folders": (labels_of_folders, "source.format=folder"),
    "labels of unknown ids": (labels_of_unknown_ids, "source.format=folder"),
    "names of folders": (names_of_folders, RIGHT),
    "sizes of images": (other_table("width,height", lambda i: [(640 + i % 3, 480)]), RIGHT),
    "attributes of images": (
        other_table("Bald,Young", lambda i: [(i % 2, i // 2 % 2)], "list_attr.csv"),
        RIGHT,
    ),
    "boxes of images": (
        other_table("xmin,xmax,class", lambda i: [(1, 5, "head"), (1, 5, "tail")], "boxes.csv"),
        RIGHT,
    ),
    "notes in latin-1": (notes_in_latin_1, RIGHT),
    "groups of classes": (groups_of_classes, RIGHT),
    "videos of classes": (videos_of_classes, RIGHT),
    "a zip beside its folder": (zip_beside_its_folder, RIGHT),
    "validation images in class folders": (val_in_class_folders, "looks like a val image"),
    "spaces before quotes": (spaces_before_quotes, RIGHT),
    "labels in quotes": (labels_in_quotes, "written in two ways"),
    "wide letters": (wide_letters, "written in two ways"),
    "numbered tables of train beside test": (
        numbered_tables,
        "source.splits={train: [train_1.csv, train_2.csv], test: [test.csv]}",
    ),
    "a list of paths with two folders": (list_of_nested_folders, "is the label is not clear"),
    "headers in two cases": (headers_in_two_cases, "write them alike"),
    "a split column of one table": (split_column_of_one_table, "source.split=null"),
    "tables without headers": (tables_without_headers, RIGHT),
    "a table in a folder beside images": (table_in_a_folder_beside_images, RIGHT),
    "a blank split": (blank_split, "(row 4) is not one"),
    "a table in a folder": (table_in_a_folder, RIGHT),
    "masks of the same names": (masks_of_the_same_names, "source.files"),
    "names in class folders": (names_in_class_folders, RIGHT),
    "a table against folders": (table_against_folders, "source.format=folder"),
    "two labels of a file": (two_labels_of_a_file, "have two labels"),
    "labels that say none": (labels_that_say_none, "'N/A'"),
    "several labels": (several_labels, "'ant|bee'"),
    "folds": (folds, "source.splits={train: [fold0_train.csv], test: [fold0_test.csv]}"),
    "batches": (batches, "source.splits={train: [batch1/labels.csv, batch2/labels.csv]}"),
    "trainval": (trainval, "'trainval' beside 'train'"),
    "rows without a header": (unnamed_rows, "can be a header or an image"),
    "test images that no row names": (unread_test, "source.split=null"),
    "a list of a split": (list_of_a_split, "looks like a list of a split"),
    "splits of a table, classes of folders": (split_of_folders, "source.label=filename"),
    "metadata.jsonl": (hub_lines, RIGHT),
    "hive folders": (
        parquet_files("train=split=train/0.parquet", "test=split=test/0.parquet"),
        RIGHT,
    ),
    "prefixed folders": (
        parquet_files("train=my_train/0.parquet", "test=my_test/0.parquet"),
        RIGHT,
    ),
    "words inside names": (
        parquet_files("train=Xtrain.parquet", "test=Xtest.parquet"),
        "'Xtrain.parquet' may be the train files",
    ),
    "none of train": (parquet_files("train=a.parquet", "test=test.parquet"), "none of train"),
    "two splits in a name": (
        parquet_files("train=train.parquet", "test=train_test.parquet"),
        "the name of 'train_test.parquet' contains several splits",
    ),
    "capital extension": (parquet_files("train=A.PARQUET", "train=b.parquet"), RIGHT),
    "fine and coarse classes": (
        class_labels({"fine": ("a", "b", "c", "d"), "coarse": ("x", "y")}, "fine"),
        RIGHT,
    ),
    "two kinds of classes": (
        class_labels({"species": NAMES, "country": ("a", "b", "c", "d")}),
        "which is the label is not clear",
    ),
    "classes and scenes": (
        class_labels({"class": NAMES, "scene": ("a", "b", "c", "d")}),
        "which is the label is not clear",
    ),
    "splits as classes": (
        class_labels({"animal": ("a", "b"), "split": ("train", "val", "test")}),
        "looks like a split",
    ),
    "classes and sexes": (
        class_labels({"diagnosis": NAMES, "sex": ("f", "m", "x", "y")}, "diagnosis"),
        RIGHT,
    ),
    "tags beside labels": (tags_beside_labels, RIGHT),
    "labels in a struct": (
        parquet_nested("meta", lambda i: {"label": NAMES[i % 3]}),
        "not read from lists or structs",
    ),
    "labels in a list": (
        parquet_nested("labels", lambda i: [i % 3]),
        "not read from lists or structs",
    ),
    "rows sorted by class": (parquet_sorted, "which is the label is not clear"),
    "a flag in Parquet": (parquet_flag, RIGHT),
    "paths in Parquet": (parquet_paths, RIGHT),
    "two versions in Parquet": (parquet_configs, "hold files of the same names"),
    "a column in one file": (parquet_column_in_one, "'split'"),
    "words of shards": (shards_by_word, RIGHT),
    "splits in JSON": (samples_with_splits, "json:split"),
    "splits in folders of a tar": (samples_in_split_folders, "looks like a split"),
    "two images of a sample": (samples_with_two_images, "source.image="),
    "labels that differ": (labels_that_differ, "contradict each other"),
    "captions": (captions_beside_labels, RIGHT),
    "numbers beside names in JSON": (numbers_beside_names, RIGHT),
    "folders against labels": (folders_against_labels, "in folder 'bee'"),
}


def test_printed_remedy_reads_splits_from_a_json_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = Tree(tmp_path / "zoo")
    flag = json_member(train=lambda _, i, split: split == "train")
    tree.samples("a.tar", ("train", "test"), flag, key="k{index}")
    splits = {"train": ["True"], "test": ["False"]}
    given = {"format": "tar", "split": "json:train", "splits": splits}
    with pytest.raises(UserError, match=r"looks like a split .*json:train"):
        detect(Request(str(tree.folder)))
    (data_set,) = detect(Request(str(tree.folder), given=given))
    assert data_set.counts == {"train": 12, "test": 12}


def test_printed_patterns_read_class_folders_below_sites(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "zoo")
    sites_below_splits(tree)
    splits = {"train": ["train/*/{label}"], "test": ["test/*/{label}"]}
    (data_set,) = detect(Request(str(tree.folder), given={"splits": splits}))
    assert data_set.classes == NAMES
    assert data_set.counts == {"train": 24, "test": 24}


def follow(folder: Path) -> DataSet:
    """Return the data set that the first command in the folder's error message reads."""
    with pytest.raises(UserError) as caught:
        detect(Request(str(folder)))
    command = re.findall(r"`([^`]*)`", str(caught.value))[0]
    words = shlex.split(command)
    settings = [
        words[index + 1].split("=", 1) for index, word in enumerate(words) if word == "--set"
    ]
    given = {key.removeprefix("source."): parse_yaml(value, "") for key, value in settings}
    (data_set,) = detect(Request(str(folder), given=given))
    return data_set


@pytest.mark.parametrize("name", ["{}/x{}_mask.png", "{}/thumbs/x{}.png"])
@pytest.mark.parametrize("splits", [("train", "test"), ("",)])
def test_the_printed_command_leaves_masks_out_of_all_splits(
    splits: Sequence[str], name: str, tmp_path: Path
) -> None:
    tree = Tree(tmp_path / "zoo")
    for split in splits:
        for label in NAMES:
            for index in range(4):
                folder = f"{split}/{label}".strip("/")
                tree.image(f"{folder}/x{index}.png", label, split or "train")
                tree.image(name.format(folder, index))
    counts = {split or "train": 12 for split in splits}
    assert follow(tree.folder).counts == counts


@pytest.mark.parametrize("doubtful", [("unknown",), ("masks", "previews")])
@pytest.mark.parametrize("splits", [("train", "test"), ("", "test"), ("",)])
def test_the_printed_command_leaves_folders_out_of_all_splits(
    splits: Sequence[str], doubtful: Sequence[str], tmp_path: Path
) -> None:
    tree = Tree(tmp_path / "zoo")
    for split in splits:
        folder = f"{split}/" if split else ""
        tree.classes(folder, split or "train")
        for name in doubtful if split != "test" or "" not in splits else ():
            for index in range(3):
                tree.image(f"{folder}{name}/{split}{index}.png")
    read = follow(tree.folder)
    assert read.classes == NAMES
    assert read.counts == {split or "train": 12 for split in splits}


def test_named_classes_decide_which_folders_are_classes(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "zoo")
    for split in ("train", "test"):
        tree.classes(f"{split}/", split)
        for index in range(3):
            tree.image(f"{split}/masks/{split}{index}.png", "masks", split)
            tree.image(f"{split}/previews/{split}{index}.png")
    classes = (*NAMES, "masks")
    (data_set,) = detect(Request(str(tree.folder), classes=classes))
    assert data_set.classes == classes
    assert data_set.counts == {"train": 15, "test": 15}


def test_placeholder_in_split_values_is_refused(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "zoo")
    split_column({"train": "0", "test": "1"}, "fold")(tree)
    splits = {"train": ["0", "1"], "test": ["..."]}
    with pytest.raises(UserError, match=r"names '\.\.\.' for test, and no row has this value"):
        detect(Request(str(tree.folder), given={"split": "fold", "splits": splits}))


def test_a_printed_command_repeats_the_settings_of_the_request(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "zoo")
    rows = [[*row, "xy"[i % 2], "AB"[i % 2]] for i, row in enumerate(tree.flat("images/"))]
    tree.csv("labels.csv", "filename,label,breed,split", rows)
    request = Request(str(tree.folder), given={"label": "breed", "image": "filename"})
    with pytest.raises(UserError) as caught:
        detect(request)
    command = "--set source.label=breed --set source.image=filename --set source.split=null"
    assert command in str(caught.value)


@pytest.mark.parametrize("classes", [("Ant", "Bee", "Cow"), ("ant", "bee", "Cow")])
def test_classes_that_no_image_has_are_refused(classes: tuple[str, ...], tmp_path: Path) -> None:
    tree = Tree(tmp_path / "zoo")
    tree.csv("labels.csv", "filename,label", tree.flat("images/"))
    with pytest.raises(UserError, match=r"no train image has the label .*'Cow'; labels .*'cow'"):
        detect(Request(str(tree.folder), classes=classes))


def test_classes_for_numeric_labels_are_refused_with_remedy(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "zoo")
    rows = [[name, NAMES.index(label)] for name, label in tree.flat("images/")]
    tree.csv("labels.csv", "filename,label", rows)
    with pytest.raises(UserError, match=r"--set source\.numbers=places"):
        detect(Request(str(tree.folder), classes=NAMES))


def test_numbers_setting_is_refused_for_folder_labels(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "zoo")
    for index in range(9):
        tree.image(f"{index % 3}/{index}.png", str(index % 3))
    assert len(detect(Request(str(tree.folder)))) == 1
    with pytest.raises(UserError, match=r"source.numbers is set, but .* 'folder' has none"):
        detect(Request(str(tree.folder), given={"numbers": "places"}))


@pytest.mark.parametrize("case", CASES)
def test_doubtful_layout_is_read_correctly_or_refused_with_remedy(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, expected = CASES[case]
    tree = Tree(tmp_path / "zoo")
    build(tree)
    if expected == RIGHT:
        has_splits = any(picture.split != "train" for picture in tree.truth)
        layout = Layout(case, True, tree.folder, tree.truth, has_splits)
        assert read_layout(layout, tmp_path, monkeypatch) == RIGHT
        return
    with pytest.raises(UserError, match=re.escape(expected)):
        detect(Request(str(tree.folder)))
