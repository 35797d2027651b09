"""Where the images of a table lie: beside it, or in folders, with an extension or without."""

from __future__ import annotations

import posixpath
import random
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from pyarrow import fs

from pipeline.data.detection.data_set import quoted, split_of
from pipeline.data.detection.tree import Folder
from pipeline.data.formats.csv import locate
from pipeline.data.listing import open_source, printable
from workers.errors import UserError
from workers.storage.artifact import join

LOOKED_UP = 20  # values of a column
MOST_FOLDERS = 200  # that images are looked for in
MOST_PATTERNS = 8  # of `Source.files`


class TableFile(NamedTuple):
    """A table. name: below its folder. folder: path or URI."""

    folder: str
    name: str

    @property
    def uri(self) -> str:
        """Path or URI of the table."""
        return join(self.folder, self.name)


def stem_word(name: str) -> str:
    """Return the name of a table without its extension."""
    return name.rpartition(".")[0]


def split_word(name: str) -> str | None:
    """Return the split that a table is called by: train.csv, labels_test.csv."""
    stem = stem_word(name).lower()
    for word in (stem, *stem.replace("-", "_").replace(".", "_").split("_")):
        if split_of(word):
            return split_of(word)
    return None


def some_texts(texts: Sequence[str | None]) -> list[str]:
    """Return some values of a column, from all over the rows, the same for the same column."""
    present = [text for text in texts if text]
    if len(present) <= LOOKED_UP:
        return present
    return random.Random(0).sample(present, LOOKED_UP)


def where_images_lie(file: TableFile, texts: Sequence[str], folder: Folder) -> tuple[str, ...]:
    """Return where images lie, as patterns of `Source.files`; several where in several folders.

    texts: values of some rows. Raise `UserError` where most of them are not there.
    """
    missing = set(texts)
    by_pattern: dict[str, set[str]] = {}
    for pattern in islice(_templates(folder, split_word(file.name)), MOST_FOLDERS):
        named = present_texts(file, texts, (pattern,))
        if named:
            by_pattern[pattern] = named
        if missing and missing <= named:
            return (pattern,)
    patterns: list[str] = []
    while by_pattern and len(patterns) < MOST_PATTERNS:
        sizes = {pattern: len(present & missing) for pattern, present in by_pattern.items()}
        best = max(sizes, key=lambda pattern: sizes[pattern])
        if not sizes[best]:
            break
        patterns.append(best)
        missing -= by_pattern.pop(best)
    if len(missing) * 2 < len(set(texts)):
        return tuple(patterns)
    example = quoted(texts[0]) if texts else "nothing"
    raise UserError(
        f"{printable(file.uri)} names images such as {example}, which are not below "
        f"{printable(file.folder)}; put them there, beside the table or in a folder"
    )


def _templates(folder: Folder, split: str | None) -> Iterator[str]:
    """Yield where images may lie: beside the table, in folders, without or with an extension.

    split: that of the table. Folders of other splits come last: they may have the same names.
    """
    yield "{}"
    last = "train" if split == "test" else "test"
    for below in sorted(folder.walk(), key=lambda below: last in _split_words(below.name)):
        name = below.name.removeprefix(folder.name).strip("/")
        prefix = f"{name}/" if name else ""
        suffixes = {sample[sample.rfind(".") :] for sample in below.samples}
        for suffix in ("", *sorted(suffixes)):
            if "{" not in prefix and prefix + suffix:
                yield f"{prefix}{{}}{suffix}"


def _split_words(path: str) -> set[str | None]:
    return {split_word(f"{part}.") for part in path.split("/")}


def present_texts(file: TableFile, texts: Sequence[str], patterns: Sequence[str]) -> set[str]:
    """Return those values of a table that name a file by one of some patterns."""
    names: list[tuple[str, str]] = []
    for text in set(texts):
        for pattern in patterns:
            name, problem = locate(text, posixpath.dirname(file.name), file.folder, pattern)
            if name is not None and problem is None:
                names.append((text, name))
    system, path = open_source(file.folder)
    infos = system.get_file_info([join(path, name) for _, name in names]) if names else []
    pairs = zip(names, infos, strict=True)
    return {text for (text, _), info in pairs if info.type == fs.FileType.File}
