"""Random data sets with known labels and splits, in common layouts: folders, tables, Parquet files
and tars, next to unrelated files.

Each image is different noise, so that its digest identifies it in the ingested index.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

NAMES = ["ant", "bee", "cow", "Dog", "eel fish", "fox-2", "gnu.x", "härte", "7", "10"]
WORDS = {
    "train": ["train", "Train", "training", "tr", "learn", "TRAINING", "trn"],
    "val": ["val", "valid", "validation", "dev", "tune", "Val"],
    "test": ["test", "Test", "testing", "tst", "te", "TEST"],
}
UNCLEAR = {"val": ["eval", "holdout"], "test": ["eval", "holdout"]}


class Picture(NamedTuple):
    """One image; `name` has no extension and is unique in its class and split."""

    split: str
    label: str
    name: str
    data: bytes

    @property
    def sha256(self) -> str:
        """The digest of the file, as in the index."""
        return hashlib.sha256(self.data).hexdigest()


@dataclass
class Layout:
    """A folder with a data set.

    Attributes:
        kind: Name of the layout, for the statistics.
        is_unusual: Whether few programs read this layout.
        folder: The folder to pass to `init`.
        pictures: All images of the data set.
        has_splits: Whether the layout names the splits; if not, all images are train.
    """

    kind: str
    is_unusual: bool
    folder: Path
    pictures: list[Picture]
    has_splits: bool
    notes: list[str] = field(default_factory=list)


class Maker:
    """A generator of random data sets below a folder."""

    def __init__(self, folder: Path, seed: int):
        self.folder = folder
        self.random = np.random.default_rng(seed)
        self.count = 0
        folder.mkdir(parents=True)

    def pick(self, values: Any) -> Any:
        """Return one of the values at random."""
        return values[int(self.random.integers(len(values)))]

    def chance(self, share: float) -> bool:
        """Return True with probability `share`."""
        return bool(self.random.random() < share)

    def png(self) -> bytes:
        """Return a new image."""
        pixels = self.random.integers(0, 256, (6, 6, 3), np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG")
        return buffer.getvalue()

    def pictures(self, splits: list[str], names: str = "unique") -> list[Picture]:
        """Return images of some classes.

        Args:
            names: `unique`, or `again` to use the same names in each class and split.
        """
        classes = list(self.random.permutation(NAMES)[: int(self.random.integers(2, 5))])
        made: list[Picture] = []
        for split in splits:
            for label in classes:
                for number in range(int(self.random.integers(3, 6))):
                    self.count += 1
                    name = f"im{self.count:04d}" if names == "unique" else f"{number:03d}"
                    made.append(Picture(split, str(label), name, self.png()))
        return made

    def splits(self) -> list[str]:
        """Return random splits of a data set."""
        splits: list[str] = self.pick(
            [["train"], ["train", "test"], ["train", "val", "test"], ["train", "val"]]
        )
        return splits

    def words(self, splits: list[str], unclear: bool = False) -> dict[str, str]:
        """Return a random name for each split."""
        words = {split: self.pick(WORDS[split]) for split in splits}
        last = splits[-1]
        if unclear and last != "train" and self.chance(0.3):
            words[last] = self.pick(UNCLEAR[last])
        return words

    def write(self, path: str, data: bytes | str) -> None:
        """Write a file below the folder."""
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data.encode() if isinstance(data, str) else data)

    def litter(self) -> None:
        """Write other files that people and programs leave in such folders."""
        others: list[tuple[str, bytes | str]] = [
            ("README.md", "about these images"),
            (".DS_Store", b"\0\1"),
            ("notes.pdf", b"%PDF"),
            ("Thumbs.db", b"\0"),
            (".hidden/a.png", b"no image"),
            ("LICENSE", "text"),
            ("old.zip", b"PK"),
            ("__MACOSX/._x.png", b"\0"),
            ("docs/guide.txt", "read me"),
        ]
        for path, data in others:
            if self.chance(0.25):
                self.write(path, data)

    def table(self, path: str, columns: list[str], rows: list[list[str]]) -> None:
        """Write a CSV file with a random separator, line end and byte order mark."""
        sign = self.pick([",", ";", "\t"])
        lines = [sign.join(map(quoted(sign), row)) for row in [columns, *rows]]
        end = self.pick(["\n", "\r\n"])
        text = end.join(lines) + (end if self.chance(0.8) else "")
        if self.chance(0.2):
            text = "\ufeff" + text
        self.write(path, text)

    def tar(self, path: str, members: list[tuple[str, bytes]]) -> None:
        """Write a tar."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            for name, data in members:
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        self.write(path, buffer.getvalue())


def quoted(sign: str) -> Callable[[str], str]:
    """Return a function that quotes a cell if needed."""
    return lambda cell: f'"{cell}"' if sign in cell or '"' in cell else cell


# ---- folders -------------------------------------------------------------------------------------
def class_folders(maker: Maker) -> Layout:
    pictures = maker.pictures(["train"], maker.pick(["unique", "again"]))
    for p in pictures:
        maker.write(f"{p.label}/{p.name}.png", p.data)
    return Layout("class folders", False, maker.folder, pictures, False)


def split_folders(maker: Maker) -> Layout:
    splits = maker.splits()
    words = {s: maker.pick([w for w in WORDS[s] if len(w) > 2][:3]) for s in splits}
    pictures = maker.pictures(splits, maker.pick(["unique", "again"]))
    for p in pictures:
        maker.write(f"{words[p.split]}/{p.label}/{p.name}.png", p.data)
    return Layout("split folders", False, maker.folder, pictures, True)


def odd_split_folders(maker: Maker) -> Layout:
    """Write split folders with odd names, inside another folder, or as part of a name."""
    splits = maker.splits()
    words = maker.words(splits, unclear=True)
    wrapper = maker.pick(["images/", "photos/", "data/", ""])
    form = maker.pick(["{}", "seg_{}", "{}_images", "{}/images"])
    pictures = maker.pictures(splits)
    for p in pictures:
        maker.write(f"{wrapper}{form.format(words[p.split])}/{p.label}/{p.name}.png", p.data)
    return Layout("odd split folders", True, maker.folder, pictures, True)


def splits_in_classes(maker: Maker) -> Layout:
    splits = maker.splits()
    words = maker.words(splits)
    pictures = maker.pictures(splits)
    forms = ["{label}/{word}/{name}.png", "{label}_{word}/{name}.png"]
    form = maker.pick(forms if len(splits) > 1 else forms[:1])
    for p in pictures:
        maker.write(form.format(label=p.label, word=words[p.split], name=p.name), p.data)
    return Layout("splits in classes", True, maker.folder, pictures, True)


def test_beside_classes(maker: Maker) -> Layout:
    pictures = maker.pictures(["train", "test"])
    word = maker.pick(["test", "Test", "testing"])
    for p in pictures:
        maker.write(f"{f'{word}/' * (p.split == 'test')}{p.label}/{p.name}.png", p.data)
    return Layout("test beside classes", True, maker.folder, pictures, True)


def classes_with_others(maker: Maker) -> Layout:
    """Write class folders next to masks, thumbnails or unlabelled images."""
    pictures = maker.pictures(["train"])
    for p in pictures:
        maker.write(f"{p.label}/{p.name}.png", p.data)
    other = maker.pick(["masks", "thumbnails", "unlabelled", "annotations", "backup", "unsorted"])
    for p in pictures:
        if other in ("unlabelled", "unsorted"):
            maker.write(f"{other}/x{p.name}.png", maker.png())
        elif maker.chance(0.5) or other == "backup":
            maker.write(f"{other}/{p.label}/{p.name}.png", maker.png())
        else:
            maker.write(f"{other}/{p.name}.png", maker.png())
    return Layout("classes with others", True, maker.folder, pictures, False)


def names_say_the_split(maker: Maker) -> Layout:
    splits = maker.pick([["train", "test"], ["train", "val", "test"]])
    pictures = maker.pictures(splits)
    for p in pictures:
        maker.write(f"{p.label}/{p.split}_{p.name}.png", p.data)
    return Layout("names say the split", True, maker.folder, pictures, True)


def folders_with_a_table(maker: Maker) -> Layout:
    """Write class folders and a table that does not hold the labels."""
    splits = maker.splits()
    pictures = maker.pictures(splits)
    top = maker.pick(["{split}/", "images/{split}/"]) if len(splits) > 1 else ""
    for p in pictures:
        maker.write(f"{top.format(split=p.split)}{p.label}/{p.name}.png", p.data)
    paths = [f"{top.format(split=p.split)}{p.label}/{p.name}.png" for p in pictures]
    values = [maker.pick(["ann", "bob"]) for _ in pictures]
    folder = maker.pick(["", "meta/"])
    match maker.pick(["photographers", "predictions", "classes", "sizes"]):
        case "photographers":
            rows = [[path, v] for path, v in zip(paths, values, strict=True)]
            maker.table(f"{folder}photographers.csv", ["file", "photographer"], rows)
        case "predictions":
            labels = sorted({p.label for p in pictures})
            rows = [[path, maker.pick(labels)] for path in paths]
            maker.table(f"{folder}predictions.csv", ["filename", "label"], rows)
        case "classes":
            labels = sorted({p.label for p in pictures})
            rows = [[str(i), label] for i, label in enumerate(labels)]
            maker.table(f"{folder}classes.csv", ["id", "name"], rows)
        case _:
            rows = [[path, str(maker.random.integers(9)), "3"] for path in paths]
            maker.table(f"{folder}sizes.csv", ["file", "width", "height"], rows)
    return Layout("folders with a table", True, maker.folder, pictures, len(splits) > 1)


# ---- tables --------------------------------------------------------------------------------------
def plain_table(maker: Maker) -> Layout:
    """Write a table of paths and labels, with or without a split column."""
    splits = maker.splits()
    pictures = maker.pictures(splits)
    columns = [maker.pick(["filename", "image", "path", "file"]), maker.pick(["label", "class"])]
    rows = [[f"images/{p.name}.png", p.label] for p in pictures]
    if len(splits) > 1:
        columns.append(maker.pick(["split", "set", "subset"]))
        rows = [[*row, p.split] for row, p in zip(rows, pictures, strict=True)]
    for p in pictures:
        maker.write(f"images/{p.name}.png", p.data)
    order = maker.random.permutation(len(rows))
    maker.table("labels.csv", columns, [rows[i] for i in order])
    return Layout("plain table", False, maker.folder, pictures, len(splits) > 1)


def odd_table(maker: Maker) -> Layout:
    """Write a table of image ids, with images in class or split folders and splits in odd forms."""
    splits = maker.splits()
    where = maker.pick(["images/", "{split}/", "{label}/", "a/{split}/{label}/", ""])
    again = "{split}" in where or "{label}" in where
    pictures = maker.pictures(splits, maker.pick(["unique", "again"] if again else ["unique"]))
    if "{split}" not in where and "{label}" not in where:
        pictures = [p._replace(name=f"i{i:03d}") for i, p in enumerate(pictures)]
    elif "{split}" not in where:
        pictures = [p._replace(name=f"{p.split[:2]}{p.name}") for p in pictures]
    elif "{label}" not in where:
        pictures = [p._replace(name=f"{i}{p.name}") for i, p in enumerate(pictures)]
    extension = maker.pick(["", ".png", ".PNG"])
    columns = [maker.pick(["id", "image_id", "filename", "img"]), maker.pick(["label", "breed"])]
    rows = [[p.name + extension, p.label] for p in pictures]
    has_splits = len(splits) > 1
    if has_splits:
        match maker.pick(["column", "words", "is_train", "blank", "flags"]):
            case "column":
                columns.append("split")
                rows = [[*r, p.split] for r, p in zip(rows, pictures, strict=True)]
            case "words":
                words = maker.words(splits, unclear=True)
                columns.append(maker.pick(["split", "phase", "fold", "part of data"]))
                rows = [[*r, words[p.split]] for r, p in zip(rows, pictures, strict=True)]
            case "blank":
                columns.append("split")
                rows = [[*r, p.split] for r, p in zip(rows, pictures, strict=True)]
                rows[-1][-1] = ""
            case "is_train" if splits == ["train", "test"]:
                columns.append("is_train")
                rows = [
                    [*r, str(int(p.split == "train"))] for r, p in zip(rows, pictures, strict=True)
                ]
            case _:
                columns += [f"is_{split}" for split in splits]
                rows = [
                    [*r, *(str(p.split == split) for split in splits)]
                    for r, p in zip(rows, pictures, strict=True)
                ]
    for p in pictures:
        folder = where.format(split=p.split, label=p.label)
        maker.write(f"{folder}{p.name}.png", p.data)
    if maker.chance(0.3):
        columns.append("score")
        rows = [[*row, f"{maker.random.random():.3f}"] for row in rows]
    order = maker.random.permutation(len(rows))
    maker.table(
        maker.pick(["labels.csv", "all.csv", "meta/table.csv"]), columns, [rows[i] for i in order]
    )
    return Layout("odd table", True, maker.folder, pictures, has_splits)


def tables_of_splits(maker: Maker) -> Layout:
    splits = maker.splits()
    inside = maker.chance(0.5)
    pictures = maker.pictures(splits)
    for split in splits:
        of_split = [p for p in pictures if p.split == split]
        for p in of_split:
            maker.write(f"{split}/{p.name}.png", p.data)
        path = f"{split}/metadata.csv" if inside else f"{split}.csv"
        prefix = "" if inside else f"{split}/"
        rows = [[f"{prefix}{p.name}.png", p.label] for p in of_split]
        maker.table(path, ["file_name", "label"], rows)
    return Layout("tables of splits", False, maker.folder, pictures, len(splits) > 1)


def metadata_jsonl(maker: Maker) -> Layout:
    splits = maker.splits()
    pictures = maker.pictures(splits)
    for split in splits:
        of_split = [p for p in pictures if p.split == split]
        for p in of_split:
            maker.write(f"{split}/{p.name}.png", p.data)
        lines = [json.dumps({"file_name": f"{p.name}.png", "label": p.label}) for p in of_split]
        maker.write(f"{split}/metadata.jsonl", "\n".join(lines))
    return Layout("metadata.jsonl", True, maker.folder, pictures, len(splits) > 1)


def paths_of_another_machine(maker: Maker) -> Layout:
    pictures = maker.pictures(["train"])
    prefix = maker.pick(["C:\\Users\\me\\d\\", "/home/other/d/", "\\\\server\\share\\", "d/"])
    sign = "\\" if "\\" in prefix else "/"
    folders = maker.chance(0.5)
    rows: list[list[str]] = []
    for p in pictures:
        path = f"images/{p.label}/{p.name}.png" if folders else f"images/{p.name}.png"
        maker.write(path, p.data)
        rows.append([prefix + path.replace("/", sign), p.label])
    maker.table("labels.csv", ["path", "label"], rows)
    return Layout("paths of another machine", True, maker.folder, pictures, False)


def lists_of_paths(maker: Maker) -> Layout:
    """Write a list of paths for each split, such as train.txt, with or without labels."""
    splits = maker.splits()
    pictures = maker.pictures(splits)
    pictures = [p._replace(label=p.label.replace(" ", "_")) for p in pictures]
    has_label = maker.chance(0.5)
    extension = maker.pick([".png", ""])
    folder = maker.pick(["", "meta/"])
    for split in splits:
        lines: list[str] = []
        for p in (one for one in pictures if one.split == split):
            maker.write(f"images/{p.label}/{p.name}.png", p.data)
            path = f"images/{p.label}/{p.name}" if not folder else f"{p.label}/{p.name}"
            lines.append(path + extension + (f" {p.label}" if has_label else ""))
        maker.write(f"{folder}{split}.txt", "\n".join(lines))
    return Layout("lists of paths", True, maker.folder, pictures, len(splits) > 1)


# ---- Parquet and tars ----------------------------------------------------------------------------
def parquet_files(maker: Maker) -> Layout:
    splits = maker.splits()
    pictures = maker.pictures(splits)
    for split in splits:
        of_split = [p for p in pictures if p.split == split]
        columns = {
            "image": [{"bytes": p.data, "path": f"{p.name}.png"} for p in of_split],
            "label": [p.label for p in of_split],
        }
        path = f"data/{split}-00000-of-00001.parquet" if maker.chance(0.5) else f"{split}.parquet"
        write_parquet(maker, path, columns)
    return Layout("Parquet files", False, maker.folder, pictures, len(splits) > 1)


def odd_parquet(maker: Maker) -> Layout:
    """Write Parquet files with a split column, different class lists, or paths instead of bytes."""
    splits = maker.splits()
    pictures = maker.pictures(splits)
    kind = maker.pick(["column", "lists", "paths", "view", "arrow"])
    if kind == "lists":
        for split in splits:
            of_split = [p for p in pictures if p.split == split]
            names = [str(n) for n in maker.random.permutation(sorted({p.label for p in pictures}))]
            features = {
                "image": {"_type": "Image"},
                "label": {"_type": "ClassLabel", "names": names},
            }
            columns = {
                "image": [p.data for p in of_split],
                "label": [names.index(p.label) for p in of_split],
            }
            write_parquet(maker, f"{split}.parquet", columns, features)
        return Layout("odd Parquet", True, maker.folder, pictures, len(splits) > 1)
    if kind == "arrow":
        for split in splits:
            of_split = [p for p in pictures if p.split == split]
            table = pa.table(
                {"image": [p.data for p in of_split], "label": [p.label for p in of_split]}
            )
            sink = io.BytesIO()
            with pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table, max_chunksize=5)
            maker.write(f"{split}/data-00000-of-00001.arrow", sink.getvalue())
            maker.write(f"{split}/state.json", "{}")
        maker.write("dataset_dict.json", json.dumps({"splits": splits}))
        return Layout("odd Parquet", True, maker.folder, pictures, len(splits) > 1)
    images: Any = [p.data for p in pictures]
    if kind == "paths":
        for p in pictures:
            maker.write(f"images/{p.name}.png", p.data)
        images = [{"bytes": None, "path": f"images/{p.name}.png"} for p in pictures]
        images = pa.array(images, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    if kind == "view":
        images = pa.array(images, pa.binary_view())
    columns = {"image": images, "label": [p.label for p in pictures]}
    if len(splits) > 1:
        words = maker.words(splits, unclear=True)
        columns["split"] = [words[p.split] for p in pictures]
    write_parquet(maker, "all.parquet", columns)
    return Layout("odd Parquet", True, maker.folder, pictures, len(splits) > 1)


def write_parquet(
    maker: Maker, path: str, columns: dict[str, Any], features: dict[str, Any] | None = None
) -> None:
    table = pa.table(columns)
    if features:
        metadata = {"huggingface": json.dumps({"info": {"features": features}})}
        table = table.replace_schema_metadata(metadata)
    sink = io.BytesIO()
    pq.write_table(table, sink)
    maker.write(path, sink.getvalue())


def tars(maker: Maker) -> Layout:
    splits = maker.splits()
    pictures = maker.pictures(splits)
    kind = maker.pick(["cls", "txt", "json"])
    for split in splits:
        members: list[tuple[str, bytes]] = []
        for p in (one for one in pictures if one.split == split):
            label = json.dumps({"label": p.label}) if kind == "json" else p.label
            members += [(f"{p.name}.png", p.data), (f"{p.name}.{kind}", label.encode())]
        maker.tar(f"{split}-000000.tar", members)
    return Layout("tars", False, maker.folder, pictures, len(splits) > 1)


def odd_tars(maker: Maker) -> Layout:
    """Write tars with odd split names, numbers and names as labels, dotted keys or macOS files."""
    splits = maker.splits()
    words = maker.words(splits, unclear=True)
    pictures = maker.pictures(splits)
    classes = [str(name) for name in maker.random.permutation(sorted({p.label for p in pictures}))]
    form = maker.pick(["{}-000.tar", "{}.tar", "im-{}-00.tar", "{}/000.tar"])
    kind = maker.pick(["numbers", "dots", "compound", "macos", "beside"])
    for split in splits:
        members: list[tuple[str, bytes]] = []
        for p in (one for one in pictures if one.split == split):
            key = f"img.{p.name}" if kind == "dots" else p.name
            image = f"{key}.image.png" if kind == "compound" else f"{key}.png"
            if kind == "macos":
                members.append((f"._{image}", b"\0\5\x16\7"))
            members.append((image, p.data))
            if kind == "numbers":
                members.append((f"{key}.cls", str(classes.index(p.label)).encode()))
                members.append((f"{key}.txt", p.label.encode()))
            else:
                members.append((f"{key}.cls", p.label.encode()))
        path = form.format(words[split])
        maker.tar(path, members)
        if kind == "beside":
            columns = {"url": ["u"], "key": ["k"]}
            write_parquet(maker, path.replace(".tar", ".parquet"), columns)
    return Layout("odd tars", True, maker.folder, pictures, len(splits) > 1)


MAKERS: tuple[Callable[[Maker], Layout], ...] = (
    class_folders,
    split_folders,
    odd_split_folders,
    splits_in_classes,
    test_beside_classes,
    classes_with_others,
    names_say_the_split,
    folders_with_a_table,
    plain_table,
    odd_table,
    odd_table,
    tables_of_splits,
    metadata_jsonl,
    paths_of_another_machine,
    lists_of_paths,
    parquet_files,
    odd_parquet,
    tars,
    odd_tars,
)


def make_layout(folder: Path, seed: int) -> Layout:
    """Write the random layout of a seed to a new folder below `folder`."""
    maker = Maker(folder / "data", seed)
    layout = MAKERS[seed % len(MAKERS)](maker)
    maker.litter()
    return layout


def expected_split(layout: Layout, picture: Picture) -> str | None:
    """Return the split that an image must get; None: train, or held out from train."""
    if not layout.has_splits:
        return None
    splits = {p.split for p in layout.pictures}
    if splits == {"train"}:
        return None
    if picture.split == "val" and "test" not in splits:
        return "test"
    return picture.split
