"""Formats: a folder, Parquet, tars, scikit-learn and torchvision data, listed and read as one thing, items with a label."""

from __future__ import annotations

import hashlib
import inspect
import io
import os
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from pyarrow import fs

from pipeline.cards import CARDS, Card, Split
from workers.artefact import resolve
from workers.errors import UserError

MapFn = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]
IMAGES = {".jpg", ".jpeg", ".jpe", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm"}
SPLITS: tuple[Split, ...] = ("train", "test")
CHUNK = 256  # files, members or images per unit
LABEL_MEMBER = "cls"
LONGEST_LABEL = 4096  # bytes of a class name in a source
MOST_BYTES = 512 << 20  # of one encoded image: without compression, 16 bits a channel, they are 400 MB at the default max_pixels
LONGEST_KEY = 255  # characters of a part of a key, as many as a file system gives a name
MOST_HEADER = 1 << 20  # of one header in a tar


@dataclass(frozen=True)
class Item:
    """One image of a source.

    name: what people know it by (path or row). stem: the name without folder and extension. label: its class as the source
    has it, None where there is none. problem: why it cannot be used, known without its pixels.
    uri, offset, size: where its bytes lie, if they can be read at random; uri "" otherwise, size None for a whole file.
    """

    split: str
    name: str
    stem: str
    label: str | None
    problem: str | None = None
    uri: str = ""
    offset: int = 0
    size: int | None = None


class Unit(NamedTuple):
    """A part of a source that one task reads: `read(*args)` gives (item, image bytes or None)."""

    read: Callable[..., Iterator[tuple[Item, bytes | None]]]
    args: tuple[Any, ...]


# ---- where a source lies -------------------------------------------------------------------------------------------------
def place(card: Card) -> str:
    """The path or URI of the source; relative paths are meant from the folder that holds `datasets/`."""
    return absolute(card.source.path)


def absolute(path: str) -> str:
    return path if "://" in path else os.path.normpath(os.path.join(CARDS.parent, path))


def folders(path: str, split: str) -> tuple[str, list[str]]:
    """(the place of a split, the sorted names of the folders in it); no names where it does not exist."""
    where = f"{absolute(path).rstrip('/')}/{split}"
    system, inside = open_fs(where)
    infos = system.get_file_info(fs.FileSelector(inside, allow_not_found=True))
    return where, sorted(i.base_name for i in infos if i.type == fs.FileType.Directory and not i.base_name.startswith("."))


def open_fs(uri: str) -> tuple[fs.FileSystem, str]:
    """As `workers.artefact.resolve`, and through fsspec what pyarrow does not know (`hf://`)."""
    if not uri.startswith("hf://"):
        return resolve(uri)
    import fsspec

    try:
        system, path = fsspec.core.url_to_fs(uri)
    except (ImportError, ValueError) as error:
        raise UserError(f"source {uri!r} cannot be opened ({error}); install huggingface_hub or download the files") from None
    return fs.PyFileSystem(fs.FSSpecHandler(system)), path


def listing(uri: str) -> list[tuple[str, int]] | None:
    """(path below `uri`, bytes) of all files, sorted, hidden ones left out; None where `uri` does not exist. A single file
    is listed under its own name."""
    files = listing_with_times(uri)
    return None if files is None else [(name, size) for name, size, _ in files]


def listing_with_times(uri: str) -> list[tuple[str, int, int]] | None:
    """The same with the modification time of each file in nanoseconds; 0 where it is not known."""
    system, path = open_fs(uri)
    try:
        found = system.get_file_info(path)
        if found.type == fs.FileType.File:
            return [(found.base_name, found.size, found.mtime_ns or 0)]
        if found.type == fs.FileType.NotFound:
            return None
        infos = system.get_file_info(fs.FileSelector(path, recursive=True))
    except OSError as error:
        raise UserError(f"source {uri!r} cannot be listed ({str(error).splitlines()[0]}); check the path, the network and your "
                        "permissions") from None
    base = path.rstrip("/") + "/"
    files = sorted((i.path.removeprefix(base), i.size, i.mtime_ns or 0) for i in infos if i.type == fs.FileType.File)
    return [file for file in files if not any(part.startswith(".") for part in file[0].split("/"))]


def need_listing(card: Card) -> list[tuple[str, int]]:
    files = listing(place(card))
    if not files:
        state = "is empty" if files is not None else "does not exist"
        raise UserError(f"card {card.name!r}: its source {place(card)} {state}; put the data there, or point source.path of the "
                        "card (or the environment variable in it) to where it is")
    return files


def files_of(card: Card, split: Split, files: Sequence[tuple[str, int]], suffix: str) -> list[str]:
    """URIs of the files of a split: `source.splits[split]` is a sub-folder, a file, a glob, or how file names begin."""
    pattern, base = card.source.splits.get(split, ""), place(card)
    if len(files) == 1 and base.endswith(suffix):  # the source is one file: all of it is train
        return [base] if split == "train" else []
    return [f"{base.rstrip('/')}/{name}" for name, _ in files if pattern and name.endswith(suffix)
            and any(fnmatch(name, glob) for glob in (pattern, f"{pattern}/*", f"{pattern}-*", f"{pattern}_*", f"{pattern}.*"))]


# ---- the formats ---------------------------------------------------------------------------------------------------------
def units(card: Card, map_fn: MapFn) -> list[Unit]:
    """The whole source, in an order that depends on the source alone. Raises UserError where it is missing or unreadable."""
    return {"folder": _folder, "tar": _tar, "parquet": _parquet, "sklearn": _sklearn, "torchvision": _torchvision}[
        card.source.format](card, map_fn)


def fingerprint(card: Card) -> str | None:
    """A cheap hash that changes when the source does: of paths and sizes. None where the source is absent."""
    found = look(card)
    return found[0] if found else None


def look(card: Card) -> tuple[str, str] | None:
    """The fingerprint of a source, and a digest of the modification times of its files: a hint that
    they may have been edited in place, and no more. None where the source is absent."""
    if card.source.format in ("sklearn", "torchvision"):
        return f"{card.source.format}:{card.source.name}", "-"
    files = listing_with_times(place(card))
    if not files:
        return None
    sizes = "\n".join(f"{name}\t{size}" for name, size, _ in files)
    times = "\n".join(str(time) for *_, time in files)
    return hashlib.sha256(sizes.encode()).hexdigest(), hashlib.sha256(times.encode()).hexdigest()[:32]


def _folder(card: Card, map_fn: MapFn) -> list[Unit]:
    """`<split>/<class>/**/<image>`."""
    items, base = [], place(card).rstrip("/")
    files = need_listing(card)
    for split in SPLITS:
        folder = card.source.splits.get(split)
        for name, size in files:
            parts = PurePosixPath(name).relative_to(folder).parts if folder and name.startswith(f"{folder}/") else ()
            if parts:
                stem, suffix = os.path.splitext(parts[-1])
                problem = too_large(size) if suffix.lower() in IMAGES else f"other file: {suffix or 'no extension'}"
                label = parts[0] if len(parts) > 1 else None
                items.append(Item(split, name, stem, label, problem, f"{base}/{name}", 0, size))
    return _chunks(items)


def too_large(size: int) -> str | None:
    """Why an image of so many bytes is not read."""
    return f"corrupt: {size} bytes are more than {MOST_BYTES}" if size > MOST_BYTES else None


def _chunks(items: list[Item]) -> list[Unit]:
    return [Unit(read_located, (items[i : i + CHUNK],)) for i in range(0, len(items), CHUNK)]


def read_located(items: list[Item]) -> Iterator[tuple[Item, bytes | None]]:
    for item in items:
        yield item, None if item.problem else read_at(item.uri, item.offset, item.size)


def read_at(uri: str, offset: int, size: int | None) -> bytes:
    system, path = open_fs(uri)
    try:
        with system.open_input_file(path) as stream:
            return stream.read_at(stream.size() if size is None else size, offset)
    except OSError as error:
        raise UserError(f"{uri} cannot be read ({str(error).splitlines()[0]}); check that it is there and readable for every "
                        "worker, then run the same command again") from None


def _tar(card: Card, map_fn: MapFn) -> list[Unit]:
    """WebDataset's layout: `key.jpg` beside `key.cls`, which holds the class, as a name or as its place on the card."""
    files = need_listing(card)
    # `label` is the default of a column's name in Parquet and no extension that anybody uses.
    extension = LABEL_MEMBER if card.source.label == "label" else card.source.label
    jobs = [(split, uri, extension, card.classes) for split in SPLITS for uri in files_of(card, split, files, ".tar")]
    return _chunks([item for items in map_fn(list_tar, jobs) for item in items])


def list_tar(job: tuple[str, str, str | None, tuple[str, ...]]) -> list[Item]:
    """The samples of one tar. Raises UserError where it is cut short or has members that do not belong into a data set."""
    split, uri, extension, classes = job
    system, path = open_fs(uri)
    samples: dict[str, dict[str, tarfile.TarInfo]] = {}
    labels: dict[str, str] = {}
    try:
        with system.open_input_file(path) as stream, tarfile.open(fileobj=_Headers(stream), mode="r:") as tar:  # type: ignore[call-overload]
            for member in tar:
                if member.isdir():
                    continue
                key, suffix = _key_of(uri, member)
                samples.setdefault(key, {})[suffix] = member
                if not 0 <= member.size <= stream.size() - member.offset_data:
                    raise tarfile.ReadError(f"member {member.name!r:.80} has {member.size} bytes, and so many do not follow")
                if suffix == extension:
                    labels[key] = stream.read_at(min(member.size, LONGEST_LABEL), member.offset_data).decode("utf-8", "replace").strip()
            if stream.size() < tar.offset + tarfile.BLOCKSIZE:
                raise tarfile.ReadError("it ends without an end mark")
    except UserError:
        raise
    except (tarfile.TarError, EOFError, ValueError, RecursionError) as error:  # the last two from headers that no program writes
        raise UserError(f"{uri} is cut short or no uncompressed tar ({error}); fetch it again, or unpack its compression") from None
    items = []
    for key, members in samples.items():
        image = next((m for suffix, m in members.items() if f".{suffix}" in IMAGES), None)
        label, stem = _name_of(labels.get(key), classes), key.rsplit("/", 1)[-1]
        where = f"{os.path.basename(path)}:{key}"
        items.append(Item(split, where, stem, label, "corrupt: no image in the sample") if image is None else
                     Item(split, where, stem, label, too_large(image.size), uri, image.offset_data, image.size))
    return items


class _Headers:
    """A file as `tarfile` reads headers from it; one that says that it is huge would be given so much memory."""

    def __init__(self, stream: pa.NativeFile):
        self.stream, self.seek, self.tell = stream, stream.seek, stream.tell

    def read(self, size: int) -> bytes:
        if size > MOST_HEADER:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return self.stream.read(size)


def _key_of(uri: str, member: tarfile.TarInfo) -> tuple[str, str]:
    """WebDataset's key (all up to the first dot of the file name) and extension of a member."""
    if member.name.startswith("/") or ".." in member.name.split("/") or not member.isreg() or member.issparse():
        raise UserError(f"{uri}: member {member.name!r:.200} is a link, or points outside the archive; shards hold plain files with "
                        "relative names, write this one anew")
    folder, _, name = member.name.removeprefix("./").rpartition("/")
    stem, _, suffix = name.partition(".")
    return f"{folder}/{stem}" if folder else stem, suffix.lower()


def _name_of(label: Any, classes: tuple[str, ...]) -> str | None:
    """The class that a label means: a name, or a place in the list as the card writes it."""
    if isinstance(label, bytes):
        label = label.decode("utf-8", "replace")
    if isinstance(label, float) and label.is_integer():
        label = int(label)
    if label is None or label in classes:
        return label
    if isinstance(label, str) and (not label.isdecimal() or len(label) > 18):
        return label[:LONGEST_LABEL] or None
    if not isinstance(label, (str, int)):
        return None
    return classes[int(label)] if 0 <= int(label) < len(classes) else f"number {label}"


def _parquet(card: Card, map_fn: MapFn) -> list[Unit]:
    files, columns = need_listing(card), (card.source.image, *([] if card.source.label is None else [card.source.label]))
    found = []
    for split in SPLITS:
        for uri in files_of(card, split, files, ".parquet"):
            try:
                with _parquet_file(uri) as file:
                    groups, names = file.metadata.num_row_groups, file.schema_arrow.names
                    first = np.cumsum([0, *(file.metadata.row_group(g).num_rows for g in range(groups))]).tolist()
            except (pa.ArrowInvalid, OSError) as error:
                raise UserError(f"{uri} is not readable as Parquet ({str(error).splitlines()[0]}); fetch it again") from None
            missing = [column for column in columns if column not in names]
            if missing:
                raise UserError(f"{uri} has no column {missing[0]!r}, only {', '.join(names)}; name the columns in source.image "
                                f"and source.label of card {card.name!r}")
            found += [Unit(read_parquet, (split, uri, g, first[g], columns, card.classes)) for g in range(groups)]
    return found


def _parquet_file(uri: str) -> pq.ParquetFile:
    system, path = open_fs(uri)
    return pq.ParquetFile(path, filesystem=system)


def read_parquet(split: str, uri: str, group: int, first: int, columns: tuple[str, ...],
                 classes: tuple[str, ...]) -> Iterator[tuple[Item, bytes | None]]:
    """One row group, read once and row after row, so that a group of any size needs little memory, and so do rows that all say the same huge value,
    which a file holds once. columns: of the image, and of the label if there is one. Raises UserError where it cannot be read to its end."""
    row = first
    try:
        with _parquet_file(uri) as file:
            for batch in file.iter_batches(1, row_groups=[group], columns=list(columns)):
                image, *label = (batch[column][0].as_py() for column in columns)
                if label and isinstance(label[0], (str, bytes)) and len(label[0]) > LONGEST_LABEL:
                    raise UserError(f"{uri}: the label of row {row} has {len(label[0])} characters, and no class has a name of more than {LONGEST_LABEL}; "
                                    "fetch the file again, or name another column in source.label")
                path = image.get("path") if isinstance(image, dict) else None
                data = image.get("bytes") if isinstance(image, dict) else image
                problem = too_large(len(data)) if isinstance(data, bytes) else "corrupt: the row holds no bytes"
                stem = PurePosixPath(path).stem if isinstance(path, str) and path else f"{row:08d}"
                yield Item(split, f"{uri.rsplit('/', 1)[-1]}:{row}", stem, _name_of(label[0] if label else None, classes), problem), data
                row += 1
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{uri} is not readable as Parquet beyond row {row} ({str(error).splitlines()[0]}); fetch it again") from None


def _sklearn(card: Card, map_fn: MapFn) -> list[Unit]:
    if card.source.name != "digits":
        raise UserError(f"card {card.name!r}: source.name is {card.source.name!r}; of scikit-learn's data sets `digits` is images")
    return [Unit(read_digits, (card.classes,))]


def read_digits(classes: tuple[str, ...]) -> Iterator[tuple[Item, bytes | None]]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    for row, (values, label) in enumerate(zip(digits.images, digits.target, strict=True)):  # (8, 8), 0 to 16
        image = Image.fromarray((values * 255 / 16).round().astype(np.uint8))
        yield Item("train", f"digits:{row}", f"{row:08d}", _name_of(int(label), classes)), png(image)


def _torchvision(card: Card, map_fn: MapFn) -> list[Unit]:
    path, name, found = place(card), card.source.name, []
    for split in SPLITS:
        size = len(torchvision_set(path, name, split, True))
        found += [Unit(read_torchvision, (path, name, split, i, min(i + 4 * CHUNK, size), card.classes))
                  for i in range(0, size, 4 * CHUNK)]
    return found


@lru_cache(maxsize=2)
def torchvision_set(path: str, name: str, split: str, download: bool) -> Any:
    from torchvision import datasets

    kind = getattr(datasets, name, None)
    options = inspect.signature(kind).parameters if inspect.isclass(kind) else {}
    if not {"root", "download"} <= options.keys() or not {"train", "split"} & options.keys():
        raise UserError(f"source.name is {name!r}, which is no data set of torchvision with train and test splits that can be "
                        "downloaded; some are CIFAR10, CIFAR100, MNIST, SVHN")
    chosen: dict[str, Any] = {"train": split == "train"} if "train" in options else {"split": split}
    try:
        return kind(root=path, download=download, **chosen)  # type: ignore[misc]
    except (OSError, RuntimeError) as error:
        raise UserError(f"torchvision's {name} is not below {path} and cannot be downloaded ({str(error).splitlines()[0]}); put "
                        "its files there, or run this once on a machine with a network") from None


def read_torchvision(path: str, name: str, split: str, start: int, stop: int,
                     classes: tuple[str, ...]) -> Iterator[tuple[Item, bytes | None]]:
    data = torchvision_set(path, name, split, False)
    for row in range(start, stop):
        image, label = data[row]
        yield Item(split, f"{split}:{row}", f"{row:08d}", _name_of(int(label), classes)), png(image)


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=6)
    return buffer.getvalue()


def safe(text: str) -> str:
    """A name without dots, slashes and blanks, and not without end: WebDataset ends a key at the first dot."""
    return re.sub(r"[^\w\-]+", "_", text)[:LONGEST_KEY] or "_"
