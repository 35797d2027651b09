"""Handle names from user data: Unicode forms, printable text, extensions, keys."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator

from workers.errors import UserError

MAX_KEY_PART = 255  # characters of a part of a key
MAX_NAME = 60  # characters of the name of a data set
MAX_NAMED = 3  # names that a sentence lists
MAX_QUOTED = 60  # characters of a name in a sentence


def words(text: str) -> frozenset[str]:
    """Return the words of a text, which are separated by whitespace."""
    return frozenset(text.split())


def nfc(name: str) -> str:
    """Return a name in Unicode form NFC. Some disks store names in NFD, which looks the same."""
    return name if name.isascii() else unicodedata.normalize("NFC", name)


def is_utf8(text: str) -> bool:
    """Return whether a file name is UTF-8. Python represents other bytes as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def printable(text: str) -> str:
    """Escape what terminals cannot print: bytes that are not UTF-8, control characters."""
    if text.isprintable():
        return text
    try:
        encoded = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # other lone surrogates, for example from JSON
        encoded = text.encode("utf-8", "backslashreplace")
    decoded = encoded.decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in decoded)


def quoted(name: str) -> str:
    """Return a name for a sentence: escaped, in quotes, cut to MAX_QUOTED characters."""
    text = printable(name)
    if len(text) > MAX_QUOTED:
        text = f"{text[: MAX_QUOTED - 3]}..."
    return f"'{text}'"


def listed(names: Iterable[str], most: int = MAX_NAMED) -> str:
    """Format the first `most` names of a list for a sentence: `'a', 'b', 'c' and 2 more`."""
    all_names = [*names]
    text = ", ".join(map(quoted, all_names[:most]))
    more = len(all_names) - most
    return f"{text} and {more} more" if more > 0 else text


def get_suffix(name: str) -> str:
    """Return the extension of a file name in lower case, with its dot; empty if it has none."""
    base = name.rpartition("/")[2]
    dot = base.rfind(".")
    return base[dot:].lower() if dot >= 0 else ""


def get_file_name(text: str, default: str = "data") -> str:
    """Convert any text to a valid name for cards, tasks and files."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", plain)
    name = re.sub(r"^[^A-Za-z0-9]+|[^A-Za-z0-9]+$", "", name)[:MAX_NAME]
    return name or default


def key_part(text: str) -> str:
    """Convert a text to a part of a WebDataset key: letters, digits, `_` and `-`, in NFC.

    Dots are replaced because a key ends at the first dot. The length is limited to MAX_KEY_PART.
    """
    return re.sub(r"[^\w\-]+", "_", nfc(text))[:MAX_KEY_PART] or "_"


def check_unicode_forms(where: str, names: Iterable[str]) -> None:
    """Raise UserError if two paths look the same because one is in NFC and the other is not."""
    names = [*names]
    if all(map(str.isascii, names)):
        return
    first: dict[str, str] = {}  # path in NFC -> first path with this form
    for name in names:
        for path in _path_prefixes(name):
            known = first.setdefault(nfc(path), path)
            if known != path:
                raise UserError(
                    f"{where}: {known!a} and {path!a} are the same name in two Unicode forms "
                    "(NFC and NFD); merge them, or rename one"
                )


def _path_prefixes(name: str) -> Iterator[str]:
    """Yield the folders above a path from the top down, then the path itself."""
    for index, character in enumerate(name):
        if character == "/":
            yield name[:index]
    yield name
