"""Formats: a folder, Parquet, tars, scikit-learn and torchvision data, listed and read as one
thing, items with a label."""

from __future__ import annotations

import errno
import hashlib
import inspect
import io
import os
import posixpath
import re
import stat
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
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

from pipeline.data.cards import CARDS, Card, Split, nfc
from workers.errors import UserError
from workers.storage import hub
from workers.storage.artifact import is_local, join, resolve
from workers.storage.filesystem import access_remedy

MapFn = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]
IMAGES = {
    ".jpg",
    ".jpeg",
    ".jpe",
    ".png",
    ".webp",
    ".bmp",
    ".gif",
    ".tif",
    ".tiff",
    ".ppm",
    ".pgm",
    ".pbm",
}
SUFFIXES = {"folder": IMAGES, "tar": {".tar"}, "parquet": {".parquet"}}
SPECIAL = {
    stat.S_ISFIFO: "a named pipe",
    stat.S_ISSOCK: "a socket",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
}
SPLITS: tuple[Split, ...] = ("train", "test")
MOST_NAMED = 3  # reasons that an error gives for what is left out, and names of each
CHUNK = 256  # files, members or images per unit
LABEL_MEMBER = "cls"
LONGEST_LABEL = 4096  # bytes of a class name in a source
# of one encoded image: without compression, 16 bits a channel, they are 400 MB at the default
# max_pixels
MOST_BYTES = 512 << 20
LONGEST_KEY = 255  # characters of a part of a key, as many as a file system gives a name
MOST_HEADER = 1 << 20  # of one header in a tar


@dataclass(frozen=True)
class Item:
    """One image of a source.

    name: what people know it by (path or row). stem: the name without folder and extension. label:
    its class as the source has it, None where there is none. problem: why it cannot be used, known
    without its pixels. uri, offset, size: where its bytes lie, if they can be read at random; uri
    "" otherwise, size None for a whole file.
    """

    split: str
    name: str
    stem: str
    label: str | None
    problem: str | None = None
    uri: str = ""
    offset: int = 0
    size: int | None = None


class Entry(NamedTuple):
    """One thing below a source. name: its path below the source. size, modified: bytes and
    modification time of a file (nanoseconds, 0 where it is not known). problem: why it is not
    used."""

    name: str
    size: int
    modified: int = 0
    problem: str | None = None


class Unit(NamedTuple):
    """A part of a source that one task reads: `read(*args)` gives (item, image bytes or None)."""

    read: Callable[..., Iterator[tuple[Item, bytes | None]]]
    args: tuple[Any, ...]


# ---- where a source lies -------------------------------------------------------------------------
def place(card: Card) -> str:
    """The path or URI of the source; relative paths are meant from the folder that holds
    `datasets/`."""
    return absolute(card.source.path)


def absolute(path: str) -> str:
    return path if "://" in path else os.path.normpath(os.path.join(CARDS.parent, path))


def folders(path: str, split: str) -> tuple[str, list[str]]:
    """(the place of a split, the sorted names of the folders in it); no names where it does not
    exist."""
    where = join(absolute(path).rstrip("/"), split)
    system, inside = open_fs(where)
    if isinstance(system, fs.LocalFileSystem):
        names = [e.name for e in os.scandir(inside) if e.is_dir()] if os.path.isdir(inside) else []
    else:
        infos = system.get_file_info(fs.FileSelector(inside, allow_not_found=True))
        names = [i.base_name for i in infos if i.type == fs.FileType.Directory]
    return where, sorted(name for name in names if not name.startswith("."))


def open_fs(uri: str) -> tuple[fs.FileSystem, str]:
    """As `workers.storage.artifact.resolve`, and through fsspec what pyarrow does not know (`hf://`).
    Raises StorageUnavailable where the hub cannot be reached."""
    if not uri.startswith("hf://"):
        return resolve(uri)
    try:
        import fsspec

        hub.check_reachable()
        system, path = fsspec.core.url_to_fs(uri)
    except UserError as error:
        raise type(error)(f"source {uri!r}: {error}") from None
    except (ImportError, ValueError) as error:
        raise UserError(
            f"source {uri!r} cannot be opened ({error}); install huggingface_hub or download "
            "the files"
        ) from None
    return fs.PyFileSystem(fs.FSSpecHandler(system)), path


def open_file(uri: str) -> pa.NativeFile:
    """A file of a source, open for reading. pyarrow takes names in UTF-8 alone; a disk holds others
    too."""
    system, path = open_fs(uri)
    if isinstance(system, fs.LocalFileSystem) and not is_utf8(path):
        return pa.PythonFile(open(path, "rb"), "r")
    return system.open_input_file(path)


def listing(card: Card) -> list[Entry] | None:
    """What lies in the source of a card, or in the folders of its splits, sorted, hidden files left
    out; None where it does not exist. A single file is listed under its own name. Raises UserError
    where it cannot be listed."""
    uri, below = place(card), [""]
    if card.source.format == "folder":
        below = [
            name for name in card.source.splits.values() if name and ".." not in name.split("/")
        ]
    system, path = open_fs(uri)
    try:
        if isinstance(system, fs.LocalFileSystem):
            if not os.path.exists(path):
                return None
            if os.path.isdir(path):
                return walk(path, below, SUFFIXES[card.source.format])
            info = os.stat(path)
            return [Entry(os.path.basename(path), info.st_size, info.st_mtime_ns)]
        found = system.get_file_info(path)
        if found.type == fs.FileType.File:
            return [Entry(found.base_name, found.size, found.mtime_ns or 0)]
        if found.type == fs.FileType.NotFound:
            return None
        infos = [
            i
            for part in below
            for i in system.get_file_info(
                fs.FileSelector(
                    posixpath.join(path, part).rstrip("/"), allow_not_found=True, recursive=True
                )
            )
        ]
    except UserError:
        raise
    except Exception as error:  # the hub's HTTP client raises kinds of its own
        if not isinstance(error, OSError) and not uri.startswith("hf://"):
            raise
        reason = printable((str(error).strip() or type(error).__name__).splitlines()[0])
        raise UserError(f"source {uri!r} cannot be listed ({reason}); {_remedy(uri)}") from None
    base = path.rstrip("/") + "/"
    odd = "corrupt: `?` or `#` in its name, which no URI can hold; rename it"
    files = {
        (i.path.removeprefix(base), i.size, i.mtime_ns or 0)
        for i in infos
        if i.type == fs.FileType.File
    }
    return [
        Entry(name, size, time, odd if set(name) & set("?#") else None)
        for name, size, time in sorted(files)
        if not any(part.startswith(".") for part in name.split("/"))
    ]


def walk(root: str, below: Sequence[str], kinds: set[str]) -> list[Entry]:
    """`listing` of a folder on a disk. kinds: suffixes of the files that it is listed for.

    A link to a file stands for the file. A link to a folder is followed where it leads to a folder
    of the source that is not read anyway, and each folder is read once: else its images would come
    again, under the label of the place where the link stands.
    """
    base = os.path.realpath(root)
    read: dict[str, str] = {}  # real path of each folder -> its name below the source
    above: set[str] = set()  # real paths of the folders that hold those
    entries: list[Entry] = []
    links: list[str] = []

    def visit(start: str) -> None:
        waiting = [(start, os.path.realpath(os.path.join(root, start)))]
        while waiting:
            name, real = waiting.pop()
            read[real] = name
            higher = os.path.dirname(real)
            while higher not in above:
                above.add(higher)
                higher = os.path.dirname(higher)
            for found in sorted(os.scandir(real), key=lambda found: found.name):
                child = f"{name}/{found.name}" if name else found.name
                if found.name.startswith("."):
                    pass
                elif found.is_dir(follow_symlinks=False):
                    waiting.append((child, found.path))
                elif found.is_symlink() and os.path.isdir(found.path):
                    links.append(child)
                else:
                    entries.append(_entry(child, found, kinds))

    for name in sorted(set(below)):
        real = os.path.realpath(os.path.join(root, name))
        if os.path.isdir(real) and real not in read:
            if real == os.path.join(base, name).rstrip("/"):
                visit(name)
            else:
                links.append(name)  # read after the others
    links.sort()
    for name in links:  # it grows
        real = os.path.realpath(os.path.join(root, name))
        if real in read or real in above:
            here = (
                f"{read[real]}, which is"
                if real in read
                else "a folder that holds others which are"
            )
            entries.append(Entry(name, 0, 0, f"other file: a link to {here} read anyway"))
        elif not real.startswith(base.rstrip("/") + "/"):
            entries.append(
                Entry(
                    name,
                    0,
                    0,
                    "link: to a folder outside the source; move that folder into the source, or "
                    "let source.path name one that "
                    "holds both",
                )
            )
        else:
            visit(name)
    return sorted(entries)


def _entry(name: str, found: os.DirEntry[str], kinds: set[str]) -> Entry:
    """What is no folder."""
    try:
        info = found.stat()
    except OSError as error:
        why = {errno.ENOENT: "to nothing", errno.ELOOP: "to itself"}.get(
            error.errno or 0, f"that cannot be followed ({error.strerror})"
        )
        return Entry(
            name, 0, 0, f"link: {why}" if suffix_of(name) in kinds else f"other file: a link {why}"
        )
    if stat.S_ISREG(info.st_mode):
        return Entry(name, info.st_size, info.st_mtime_ns)
    return Entry(
        name,
        0,
        0,
        "other file: "
        f"{next((kind for test, kind in SPECIAL.items() if test(info.st_mode)), 'no plain file')}",
    )


def is_utf8(text: str) -> bool:
    """False for the name of a file whose bytes are no UTF-8; Python keeps them as lone
    surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def printable(text: str) -> str:
    """The same with what no terminal and no table can show as `\\x..`: bytes that are no UTF-8,
    line ends, control characters."""
    shown = text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)


def check_forms(where: str, names: Iterable[str]) -> None:
    """Raises UserError where two paths look the same, as one is in NFC and one is not."""
    names = [*names]
    first: dict[str, str] = {}
    for name in () if all(map(str.isascii, names)) else names:
        for end in (*(n for n, c in enumerate(name) if c == "/"), len(name)):
            path = name[:end]
            other = first.setdefault(nfc(path), path)
            if other != path:
                raise UserError(
                    f"{where}: {other!a} and {path!a} are the same name in two Unicode forms "
                    "(NFC and NFD); merge "
                    "them, or rename one"
                )


def _remedy(uri: str) -> str:
    """What to check where a source cannot be read."""
    if is_local(uri) or uri.startswith("hf://"):
        return "check the path, the network and your permissions"
    return access_remedy(uri)


def left_out(problems: Iterable[tuple[str, str | None]]) -> str:
    """The first of what is not used, by reason, as a part of a sentence; empty where there is
    nothing."""
    names: dict[str, list[str]] = {}
    for name, problem in problems:
        if problem:
            names.setdefault(problem, []).append(printable(name))
    parts = [
        f"{', '.join(some[:MOST_NAMED])}{' ...' if len(some) > MOST_NAMED else ''}, {problem}"
        for problem, some in names.items()
    ]
    return f" (left out: {'; '.join(parts[:MOST_NAMED])})" if parts else ""


def need_listing(card: Card) -> list[Entry]:
    """What the splits of a card hold. Raises UserError where that is nothing."""
    files = listing(card)
    if not files:
        state = (
            "does not exist"
            if files is None
            else f"holds no images in its splits ({dict(card.source.splits)})"
        )
        raise UserError(
            f"card {card.name!r}: its source {place(card)} {state}; put the data there, or "
            "point source.path of the "
            "card (or the environment variable in it) to where it is"
        )
    return files


def of_split(card: Card, split: Split, files: Sequence[Entry]) -> list[Entry]:
    """What belongs to a split: `source.splits[split]` is a sub-folder, a file, a glob, or how file
    names begin."""
    pattern = card.source.splits.get(split, "")
    if not pattern:
        return []
    if card.source.format == "folder":
        return [
            entry
            for entry in files
            if entry.name == pattern or entry.name.startswith(f"{pattern}/")
        ]
    if is_one_file(card, files):  # all of it is train
        return [*files] if split == "train" else []
    globs = (pattern, f"{pattern}/*", f"{pattern}-*", f"{pattern}_*", f"{pattern}.*")
    return [entry for entry in files if any(fnmatch(entry.name, glob) for glob in globs)]


def is_one_file(card: Card, files: Sequence[Entry]) -> bool:
    """Whether the source of a card is no folder."""
    return len(files) == 1 and files[0].name == posixpath.basename(open_fs(place(card))[1])


def suffix_of(name: str) -> str:
    dot = name.rfind(".")
    return name[dot:].lower() if dot >= 0 else ""


def base_of(card: Card) -> str:
    """What files of a source are opened below: a path on a disk, a URI elsewhere."""
    system, path = open_fs(place(card))
    return path if isinstance(system, fs.LocalFileSystem) else place(card).rstrip("/")


def archives(card: Card, split: Split, files: Sequence[Entry]) -> tuple[list[str], list[Item]]:
    """(URIs of the files of a split that hold many images, what else is there). Raises UserError
    where one of those cannot be opened."""
    uris, rest, base = [], [], base_of(card)
    for entry in of_split(card, split, files):
        if entry.problem and not entry.problem.startswith("other file"):
            raise UserError(
                f"card {card.name!r}: {printable(entry.name)} in its source {place(card)} is "
                f"left out ({entry.problem}), and it may hold many "
                "images; mend or remove it"
            )
        if entry.problem or suffix_of(entry.name) not in SUFFIXES[card.source.format]:
            rest.append(Item(split, entry.name, "", None, entry.problem or other_file(entry.name)))
        else:
            uris.append(base if is_one_file(card, files) else join(base, entry.name))
    return uris, rest


def other_file(name: str) -> str:
    return f"other file: {os.path.splitext(name)[1] or 'no extension'}"


# ---- the formats ---------------------------------------------------------------------------------
def units(card: Card, map_fn: MapFn) -> list[Unit]:
    """The whole source, in an order that depends on the source alone. Raises UserError where it is
    missing or unreadable."""
    return {
        "folder": _folder,
        "tar": _tar,
        "parquet": _parquet,
        "sklearn": _sklearn,
        "torchvision": _torchvision,
    }[card.source.format](card, map_fn)


def fingerprint(card: Card) -> str | None:
    """The first part of `look`."""
    found = look(card)
    return found[0] if found else None


def look(card: Card) -> tuple[str, str] | None:
    """Of the files that the splits of a card take images from, and of nothing beside them: a cheap
    hash that changes when they do, of paths and sizes, and a digest of their modification times: a
    hint that they may have been edited in place, and no more. None where there are none."""
    if card.source.format in ("sklearn", "torchvision"):
        return f"{card.source.format}:{card.source.name}", "-"
    files = listing(card) or []
    used = sorted(
        {
            (nfc(entry.name), entry.size, entry.modified)
            for split in SPLITS
            for entry in of_split(card, split, files)
            if not entry.problem and suffix_of(entry.name) in SUFFIXES[card.source.format]
        }
    )
    sizes = "\n".join(f"{name}\t{size}" for name, size, _ in used).encode(
        "utf-8", "surrogateescape"
    )
    times = "\n".join(str(time) for *_, time in used).encode()
    return (
        (hashlib.sha256(sizes).hexdigest(), hashlib.sha256(times).hexdigest()[:32])
        if used
        else None
    )


def _folder(card: Card, map_fn: MapFn) -> list[Unit]:
    """`<split>/<class>/**/<image>`."""
    items, files, base = [], need_listing(card), base_of(card)
    check_forms(f"source of card {card.name!r}", [entry.name for entry in files])
    for split in SPLITS:
        for entry in of_split(card, split, files):
            parts = PurePosixPath(entry.name).relative_to(card.source.splits[split]).parts
            stem, suffix = os.path.splitext(entry.name.rpartition("/")[2])
            problem = entry.problem or (
                too_large(entry.size) if suffix.lower() in IMAGES else other_file(entry.name)
            )
            label = parts[0] if len(parts) > 1 else None
            items.append(
                Item(split, entry.name, stem, label, problem, join(base, entry.name), 0, entry.size)
            )
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
    try:
        with open_file(uri) as stream:
            return stream.read_at(stream.size() if size is None else size, offset)
    except OSError as error:
        remedy = (
            "check that it is there and readable for every worker"
            if is_local(uri)
            else _remedy(uri)
        )
        raise UserError(
            f"{printable(uri)} cannot be read ({printable(str(error).splitlines()[0])}); "
            f"{remedy}, then run the same command "
            "again"
        ) from None


def _tar(card: Card, map_fn: MapFn) -> list[Unit]:
    """WebDataset's layout: `key.jpg` beside `key.cls`, which holds the class, as a name or as its
    place on the card."""
    files, jobs, items = need_listing(card), [], []
    # `label` is the default of a column's name in Parquet and no extension that anybody uses.
    extension = LABEL_MEMBER if card.source.label == "label" else card.source.label
    for split in SPLITS:
        uris, rest = archives(card, split, files)
        jobs += [(split, uri, extension, card.classes) for uri in uris]
        items += rest
    for found in map_fn(list_tar, jobs):
        check_forms(f"source of card {card.name!r}", [item.name for item in found])
        items += found
    return _chunks(items)


def list_tar(job: tuple[str, str, str | None, tuple[str, ...]]) -> list[Item]:
    """The samples of one tar. Raises UserError where it is cut short or has members that do not
    belong into a data set."""
    split, uri, extension, classes = job
    samples: dict[str, dict[str, tarfile.TarInfo]] = {}
    labels: dict[str, str] = {}
    try:
        with open_file(uri) as stream, tarfile.open(fileobj=_Headers(stream), mode="r:") as tar:  # type: ignore[call-overload]
            for member in tar:
                if member.isdir():
                    continue
                key, suffix = _key_of(uri, member)
                samples.setdefault(key, {})[suffix] = member
                if not 0 <= member.size <= stream.size() - member.offset_data:
                    raise tarfile.ReadError(
                        f"member {member.name!r:.80} has {member.size} bytes, and so many do "
                        "not follow"
                    )
                if suffix == extension:
                    labels[key] = (
                        stream.read_at(min(member.size, LONGEST_LABEL), member.offset_data)
                        .decode("utf-8", "replace")
                        .strip()
                    )
            if stream.size() < tar.offset + tarfile.BLOCKSIZE:
                raise tarfile.ReadError("it ends without an end mark")
    except UserError:
        raise
    except (
        tarfile.TarError,
        EOFError,
        ValueError,
        RecursionError,
    ) as error:  # the last two from headers that no program writes
        raise UserError(
            f"{printable(uri)} is cut short or no uncompressed tar ({error}); fetch it again, "
            "or unpack its compression"
        ) from None
    items = []
    for key, members in samples.items():
        image = next((m for suffix, m in members.items() if f".{suffix}" in IMAGES), None)
        label, stem = _name_of(labels.get(key), classes), key.rsplit("/", 1)[-1]
        where = f"{posixpath.basename(open_fs(uri)[1])}:{key}"
        items.append(
            Item(split, where, stem, label, "corrupt: no image in the sample")
            if image is None
            else Item(
                split, where, stem, label, too_large(image.size), uri, image.offset_data, image.size
            )
        )
    return items


class _Headers:
    """A file as `tarfile` reads headers from it; one that says that it is huge would be given so
    much memory."""

    def __init__(self, stream: pa.NativeFile):
        self.stream, self.seek, self.tell = stream, stream.seek, stream.tell

    def read(self, size: int) -> bytes:
        if size > MOST_HEADER:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return self.stream.read(size)


def _key_of(uri: str, member: tarfile.TarInfo) -> tuple[str, str]:
    """WebDataset's key (all up to the first dot of the file name) and extension of a member."""
    if (
        member.name.startswith("/")
        or ".." in member.name.split("/")
        or not member.isreg()
        or member.issparse()
    ):
        raise UserError(
            f"{printable(uri)}: member {member.name!r:.200} is a link, or points outside the "
            "archive; shards hold plain files with "
            "relative names, write this one anew"
        )
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
    files, columns = (
        need_listing(card),
        (card.source.image, *([] if card.source.label is None else [card.source.label])),
    )
    found = []
    for split in SPLITS:
        uris, rest = archives(card, split, files)
        found += _chunks(rest)
        for uri in uris:
            try:
                with _parquet_file(uri) as file:
                    groups, names = file.metadata.num_row_groups, file.schema_arrow.names
                    first = np.cumsum(
                        [0, *(file.metadata.row_group(g).num_rows for g in range(groups))]
                    ).tolist()
            except (pa.ArrowInvalid, OSError) as error:
                raise UserError(
                    f"{printable(uri)} is not readable as Parquet "
                    f"({str(error).splitlines()[0]}); fetch it again"
                ) from None
            missing = [column for column in columns if column not in names]
            if missing:
                raise UserError(
                    f"{printable(uri)} has no column {missing[0]!r}, only {', '.join(names)}; "
                    "name the columns in source.image "
                    f"and source.label of card {card.name!r}"
                )
            found += [
                Unit(read_parquet, (split, uri, g, first[g], columns, card.classes))
                for g in range(groups)
            ]
    return found


@contextmanager
def _parquet_file(uri: str) -> Iterator[pq.ParquetFile]:
    with open_file(uri) as stream, pq.ParquetFile(stream) as file:
        yield file


def read_parquet(
    split: str, uri: str, group: int, first: int, columns: tuple[str, ...], classes: tuple[str, ...]
) -> Iterator[tuple[Item, bytes | None]]:
    """One row group, read once and row after row, so that a group of any size needs little memory,
    and so do rows that all say the same huge value, which a file holds once. columns: of the image,
    and of the label if there is one. Raises UserError where it cannot be read to its end."""
    row = first
    try:
        with _parquet_file(uri) as file:
            for batch in file.iter_batches(1, row_groups=[group], columns=list(columns)):
                image, *label = (_value(batch[column][0]) for column in columns)
                if label and isinstance(label[0], (str, bytes)) and len(label[0]) > LONGEST_LABEL:
                    raise UserError(
                        f"{printable(uri)}: the label of row {row} has {len(label[0])} "
                        "characters, and no class has a name of more than "
                        f"{LONGEST_LABEL}; fetch the file again, or name another column in "
                        "source.label"
                    )
                path = image.get("path") if isinstance(image, dict) else None
                data = image.get("bytes") if isinstance(image, dict) else image
                problem = (
                    too_large(len(data))
                    if isinstance(data, bytes)
                    else "corrupt: the row holds no bytes"
                )
                stem = PurePosixPath(path).stem if isinstance(path, str) and path else f"{row:08d}"
                yield (
                    Item(
                        split,
                        f"{uri.rsplit('/', 1)[-1]}:{row}",
                        stem,
                        _name_of(label[0] if label else None, classes),
                        problem,
                    ),
                    data,
                )
                row += 1
    except (pa.ArrowException, OSError) as error:
        raise UserError(
            f"{printable(uri)} is not readable as Parquet beyond row {row} "
            f"({str(error).splitlines()[0]}); fetch it again"
        ) from None


def _value(scalar: pa.Scalar) -> Any:
    """A scalar as Python's; text that is no UTF-8 as bytes."""
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        if isinstance(scalar, pa.StructScalar):
            return {name: _value(scalar[name]) for name in scalar}
        return scalar.as_buffer().to_pybytes()


def _sklearn(card: Card, map_fn: MapFn) -> list[Unit]:
    if card.source.name != "digits":
        raise UserError(
            f"card {card.name!r}: source.name is {card.source.name!r}; of scikit-learn's data "
            "sets `digits` is images"
        )
    return [Unit(read_digits, (card.classes,))]


def read_digits(classes: tuple[str, ...]) -> Iterator[tuple[Item, bytes | None]]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    for row, (values, label) in enumerate(
        zip(digits.images, digits.target, strict=True)
    ):  # (8, 8), 0 to 16
        image = Image.fromarray((values * 255 / 16).round().astype(np.uint8))
        yield (
            Item("train", f"digits:{row}", f"{row:08d}", _name_of(int(label), classes)),
            png(image),
        )


def _torchvision(card: Card, map_fn: MapFn) -> list[Unit]:
    path, name, found = place(card), card.source.name, []
    for split in SPLITS:
        size = len(torchvision_set(path, name, split, True))
        found += [
            Unit(read_torchvision, (path, name, split, i, min(i + 4 * CHUNK, size), card.classes))
            for i in range(0, size, 4 * CHUNK)
        ]
    return found


@lru_cache(maxsize=2)
def torchvision_set(path: str, name: str, split: str, download: bool) -> Any:
    from torchvision import datasets

    kind = getattr(datasets, name, None)
    options = inspect.signature(kind).parameters if inspect.isclass(kind) else {}
    if not {"root", "download"} <= options.keys() or not {"train", "split"} & options.keys():
        raise UserError(
            f"source.name is {name!r}, which is no data set of torchvision with train and test "
            "splits that can be "
            "downloaded; some are CIFAR10, CIFAR100, MNIST, SVHN"
        )
    chosen: dict[str, Any] = {"train": split == "train"} if "train" in options else {"split": split}
    try:
        return kind(root=path, download=download, **chosen)  # type: ignore[misc]
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"torchvision's {name} is not below {path} and cannot be downloaded "
            f"({str(error).splitlines()[0]}); put "
            "its files there, or run this once on a machine with a network"
        ) from None


def read_torchvision(
    path: str, name: str, split: str, start: int, stop: int, classes: tuple[str, ...]
) -> Iterator[tuple[Item, bytes | None]]:
    data = torchvision_set(path, name, split, False)
    for row in range(start, stop):
        image, label = data[row]
        yield Item(split, f"{split}:{row}", f"{row:08d}", _name_of(int(label), classes)), png(image)


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=6)
    return buffer.getvalue()


def safe(text: str) -> str:
    """A name without dots, slashes and blanks, not without end, and the same for both Unicode
    forms: WebDataset ends a key at the first dot."""
    return re.sub(r"[^\w\-]+", "_", nfc(text))[:LONGEST_KEY] or "_"
