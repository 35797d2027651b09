"""Kinds of files in a source, recognised by their names and their first bytes."""

from __future__ import annotations

import re

from pipeline.data.names import get_suffix, words

IMAGE_SUFFIXES = words(
    """.jpg .jpeg .jpe .jfif .png .webp .bmp .gif .tif .tiff .ppm .pgm .pbm .heic .heif .avif"""
)
# Suffixes of image files in a listing. They include "": a listed file without an extension and
# without a problem is an image, because `listing` has checked its first bytes.
IMAGE_FILES = IMAGE_SUFFIXES | {""}
TEXT_TABLES = frozenset((".csv", ".tsv", ".txt"))
JSON_TABLES = frozenset((".jsonl", ".ndjson"))
COLUMN_FILES = frozenset((".parquet", ".arrow"))
TABLE_SUFFIXES = TEXT_TABLES | JSON_TABLES | COLUMN_FILES
# tables that are recognised, but not read
OTHER_TABLES = frozenset((".json", ".xls", ".xlsx", ".ods", ".xml", ".yaml", ".db", ".sqlite"))
TAR_SUFFIX = ".tar"
PACKED_SUFFIXES = (".zip", ".tgz", ".tbz2", ".txz", ".gz", ".bz2", ".xz", ".7z", ".rar", ".zst")
# files and folders that operating systems create, in lower case
LITTER = frozenset(
    [
        "__macosx",
        "$recycle.bin",
        "system volume information",
        "lost+found",
        "thumbs.db",
        "desktop.ini",
        ".ds_store",
    ]
)
IMAGE_START = re.compile(
    rb"\xff\xd8\xff|\x89PNG\r\n\x1a\n|GIF8|RIFF....WEBP|BM....\0\0\0\0|II\*\0|MM\0\*|P[1-6]\s"
    rb"|....ftyp(heic|heix|hevc|mif1|msf1|avif|avis)",
    re.DOTALL,
)
START_BYTES = 16  # bytes from the start of a file that IMAGE_START needs


def is_hidden(path: str) -> bool:
    """Return whether a file, or a folder in its path, is hidden or in LITTER (`__MACOSX`)."""
    return any(
        (part.startswith(".") and part not in (".", "..")) or part.lower() in LITTER
        for part in path.split("/")
    )


def is_packed(name: str) -> bool:
    """Return whether the name of a file is the name of a compressed archive."""
    return name.lower().endswith(PACKED_SUFFIXES)


def starts_as_image(data: bytes) -> bool:
    """Return whether the first bytes of a file belong to an image."""
    return IMAGE_START.match(data) is not None


def describe_kind(name: str) -> str:
    """Return the kind of an unread file: `table`, `archive`, `image` or `other file`.

    A `.txt` file counts as `other file`, although it can be a table.
    """
    suffix = get_suffix(name)
    if suffix in IMAGE_SUFFIXES:
        return "image"
    if suffix in (TABLE_SUFFIXES | OTHER_TABLES) - {".txt"}:
        return "table"
    if suffix == TAR_SUFFIX or is_packed(name):
        return "archive"
    return "other file"
