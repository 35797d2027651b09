"""Data sets in tables of paths and labels: what the columns mean, and where the images lie."""

from __future__ import annotations

import posixpath
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

from pipeline.data.detection.data_set import DataSet, Request, read_as
from pipeline.data.detection.folders import yaml_text
from pipeline.data.detection.words import IMAGE_COLUMNS, LABEL_COLUMNS
from pipeline.data.file_index import FileIndex, NamedRow, Placement, parse_path, placements
from pipeline.data.file_kinds import IMAGE_SUFFIXES, TEXT_TABLES
from pipeline.data.formats.csv import images_of
from pipeline.data.labels import label_of
from pipeline.data.names import counted, listed, printable, quoted, suffix_of
from pipeline.data.source_classes import TooManyLabels
from pipeline.data.splits import (
    FALSE_WORDS,
    SPLIT_COLUMNS,
    SPLITS,
    TRUE_WORDS,
    UNSURE_COLUMNS,
    SplitUnclear,
    SplitWords,
    flag_role,
    flag_words,
    plain_word,
    read_words,
    role_in,
    role_of,
    tokens_of,
)
from pipeline.data.tables import column_names, read_rows
from workers.errors import UserError
from workers.storage.artifact import join

FIRST_ROWS = 200  # by which columns are told apart
MOST_PLACED = 20_000  # rows whose images are looked for
MOST_VALUES = 50  # of a column of splits
MOST_NAMED = 12  # columns that a sentence lists
MOST_ROWS_OF_AN_ID = 20  # on average; labels have more
SAMPLE = 40  # values of a column whose files are looked for
ONE = frozenset(("1", "1.0"))
NUMBER = re.compile(r"[-+]?[0-9.]+(e[-+]?[0-9]+)?", re.I)
ZERO_OR_ONE = ONE | {"0", "0.0"}

Values = Mapping[str, Sequence[str | None]]  # of rows, by column


class NoTable(UserError):
    """A file is not a table of images and labels: it names no images that are there."""


class LabelUnclear(UserError):
    """The images that a table names are there, and which column is the label is not clear.

    Attributes:
        has_split: Whether a column says the split of the images.
    """

    has_split = False


@dataclass(frozen=True)
class Tables:
    """One table, or one for each split.

    Attributes:
        request: What the person asked.
        base: Path or URI of the source.
        name: Of the data set.
        names: Name of each table below the source -> its split, empty if a column says it.
        index: Of the files that they may name.
        is_whole: Whether the source is the table itself, and not the folder that holds it.
    """

    request: Request
    base: str
    name: str
    names: Mapping[str, str]
    index: FileIndex
    is_whole: bool = False

    @property
    def first(self) -> str:
        """The table of train."""
        return next(iter(self.names))

    def uri(self, name: str) -> str:
        """Return the path or URI of a table."""
        return join(self.base, name)


class Found(NamedTuple):
    """What a table says.

    Attributes:
        data_set: The data set in it.
        is_strong: Whether its label column is called as one.
        files: The file of each row that was looked at -> its label.
    """

    data_set: DataSet
    is_strong: bool
    files: dict[str, str]


@dataclass(frozen=True)
class Columns:
    """What the columns of a table mean. has_header: as in `tables.read_rows`."""

    image: str
    label: str
    split: tuple[str, ...]
    words: SplitWords | None
    has_header: bool | None


def read_tables(tables: Tables) -> Found:
    """Return the data set of one table, or of one for each split.

    Raises:
        NoTable: If it names no images that are there.
        LabelUnclear: If it does, and the label is not clear.
        UserError: If it can be read in several ways, or cannot be read.
    """
    request = tables.request
    columns = _columns_of(tables)
    tables, notes = _with_columns(tables, columns)
    rows = _rows_of(tables, columns)
    placement = _placement_of(tables, rows, columns)
    for split in SPLITS[1:]:
        of_split = [f for r, f in zip(rows, placement.files, strict=True) if r.split == split]
        if of_split and not any(of_split) and split in tables.names.values():
            tables, more = _without(tables, split, "names images that are not there")
            notes += more
            rows = _rows_of(tables, columns)
            placement = _placement_of(tables, rows, columns)
    source: dict[str, Any] = {"format": "csv", "image": columns.image, "label": columns.label}
    source |= _splits_of(tables, rows, placement, columns)
    if placement.patterns != ("{}",):
        source["files"] = list(placement.patterns)
    _reach_images(tables, placement, source)
    where = "" if placement.patterns == ("{}",) else f", at {listed(placement.patterns)}"
    label = quoted(columns.label)
    if columns.label == columns.image:
        label = "its folders"
    layout = f"a table, images in column {quoted(columns.image)}{where}, labels in {label}"
    if columns.split:
        layout += f", splits in {listed(columns.split)}"
    try:
        data_set = read_as(request, tables.name, layout, source, notes)
    except TooManyLabels as error:
        raise _other_label(tables, columns, error) from None
    files = {
        image.name: str(image.label)
        for image in images_of(data_set.card, [*data_set.entries])
        if image.name
    }
    is_strong = plain_word(columns.label) in LABEL_COLUMNS or columns.label == columns.image
    return Found(data_set, is_strong, files)


def _reach_images(tables: Tables, placement: Placement, source: dict[str, Any]) -> None:
    """Let the patterns of a table in a folder reach the images outside of that folder."""
    folder = posixpath.dirname(tables.first)
    if source["path"] == tables.base or not folder or tables.is_whole:
        return
    if placement.patterns == ("{}",) and not all(
        file is None or file.startswith(f"{folder}/") for file in placement.files
    ):
        up = "../" * (folder.count("/") + 1)
        source["files"] = [f"{up}{folder}/{{}}"]


def _with_columns(tables: Tables, columns: Columns) -> tuple[Tables, list[str]]:
    """Return the tables that have the columns of the first one, and notes on the others."""
    notes: list[str] = []
    for name, split in [*tables.names.items()]:
        names = column_names(tables.uri(name), columns.has_header)
        missing = [column for column in (columns.image, columns.label) if column not in names]
        if missing and split not in ("", "train"):
            tables, more = _without(tables, split, f"has no column {quoted(missing[0])}")
            notes += more
    return tables, notes


def _without(tables: Tables, split: str, reason: str) -> tuple[Tables, list[str]]:
    """Return the tables without those of a split, and a note; validation may then be the test."""
    kept = {name: of for name, of in tables.names.items() if of != split}
    if split == "test":
        kept = {name: "test" if of == "val" else of for name, of in kept.items()}
    left_out = [name for name in tables.names if name not in kept]
    return replace(tables, names=kept), [f"table {listed(left_out)} is not read: it {reason}"]


def _other_label(tables: Tables, columns: Columns, error: UserError) -> UserError:
    """Return the error of labels that are no classes, with another column to try."""
    uri = tables.uri(tables.first)
    names = column_names(uri, columns.has_header)
    values = _first_values(uri, names, columns.has_header)
    used = (columns.image, columns.label, *columns.split)
    others = _columns_of_classes({n: texts for n, texts in values.items() if n not in used})
    if not others:
        return error
    command = tables.request.command(f"source.label={yaml_text(others[-1])}")
    return LabelUnclear(f"{error}; if another column is meant: `{command}`")


# ---- columns -------------------------------------------------------------------------------------
def _columns_of(tables: Tables) -> Columns:
    """Return what the columns mean, by their names, their values, and the files that are there."""
    uri = tables.uri(tables.first)
    where = printable(uri)
    given = tables.request.given
    has_header: bool | None = None
    names = column_names(uri)
    values = _first_values(uri, names, has_header)
    if not any(values.values()):
        raise NoTable(f"{where} has no rows; give a table of images and labels")
    images = _image_columns(tables, values)
    if suffix_of(uri) in TEXT_TABLES and _is_first_row(tables, images):
        has_header = False
        names = column_names(uri, has_header)
        values = _first_values(uri, names, has_header)
        images = _image_columns(tables, values)
    image = _choose_image(tables, names, values, images)
    split, words = _split_columns(tables, names, has_header, image)
    label = given.get("label")
    if label is None:
        others = {
            name: texts
            for name, texts in values.items()
            if name not in (image, *split) and name not in images
        }
        try:
            label = _label_column(tables, names, image, others, values)
        except LabelUnclear as error:
            error.has_split = bool(split)
            raise
    _check_asked(where, names, label)
    return Columns(image, str(label), split, words, has_header)


def _first_values(uri: str, names: Sequence[str], has_header: bool | None) -> Values:
    rows = [row.values for row in islice(read_rows(uri, names, has_header), FIRST_ROWS)]
    return {name: [row[index] for row in rows] for index, name in enumerate(names)}


def _is_first_row(tables: Tables, images: Sequence[str]) -> bool:
    """Whether the first row of a table, taken for its header, names an image as the others do."""
    return any(_has_file(tables, name) and plain_word(name) not in IMAGE_COLUMNS for name in images)


def _resolves(tables: Tables, column: str, values: Values) -> bool:
    """Whether most values of a column name files."""
    present = [text for text in values[column] if text]
    texts = sample(present)
    found = sum(_has_file(tables, text) for text in texts)
    are_ids = not any(suffix_of(text) in IMAGE_SUFFIXES for text in texts)
    are_few = len(set(present)) * MOST_ROWS_OF_AN_ID < len(present)  # as labels are
    return found * 2 > len(texts) and not (are_ids and are_few)


def _has_file(tables: Tables, text: str) -> bool:
    path = parse_path(text, tables.base)
    if path is None or "\0" in text:
        return False
    name = posixpath.normpath(path.text.removeprefix("/")).removeprefix("../")
    base = name.rpartition("/")[2]  # of a path of another machine
    return bool(tables.index.ending_with(name) or (base != name and tables.index.ending_with(base)))


def sample(values: Sequence[str]) -> list[str]:
    """Return some values of a column, from all over the rows, the same for the same column."""
    if len(values) <= SAMPLE:
        return [*values]
    return random.Random(0).sample(values, SAMPLE)


def _image_columns(tables: Tables, values: Values) -> list[str]:
    """Return the columns that name files: those of file names, else those of bare ids."""
    resolved = [name for name in values if _resolves(tables, name, values)]
    named = [name for name in _columns_of_paths(values) if name in resolved]
    return named or resolved


def _columns_of_paths(values: Values) -> list[str]:
    """Return the columns most of whose values are called like images."""
    columns: list[str] = []
    for column, texts in values.items():
        count = sum(suffix_of(text or "") in IMAGE_SUFFIXES for text in texts)
        if count * 2 > len(texts):
            columns.append(column)
    return columns


def _choose_image(
    tables: Tables, names: Sequence[str], values: Values, images: Sequence[str]
) -> str:
    """Return the column of images. Raise UserError if that is not clear, or none names files."""
    where = printable(tables.uri(tables.first))
    asked = tables.request.given.get("image")
    if asked is not None:
        _check_asked(where, names, asked)
        return str(asked)
    if len(images) == 1:
        return images[0]
    if images:
        known = [name for name in images if plain_word(name) in IMAGE_COLUMNS]
        are_paths = all(name in _columns_of_paths(values) for name in images)
        if len(known) == 1 and are_paths:
            return known[0]
        raise _unclear(tables, "image", names, images)
    likely = _columns_of_paths(values)
    likely = likely or [name for name in names if plain_word(name) in IMAGE_COLUMNS]
    addresses = [name for name in names if any("://" in (text or "") for text in values[name])]
    if addresses and not likely:
        likely = addresses
    if not likely:
        raise NoTable(
            f"{where} has the columns {_listed(names)}, and none of them names images that are "
            f"below {printable(tables.base)}; put the images there, or name the column of images "
            f"as in `{tables.request.command(f'source.image={yaml_text(names[0])}')}`"
        )
    raise _not_there(tables, next(filter(None, values[likely[0]]), ""))


def _not_there(tables: Tables, text: str) -> NoTable:
    where = printable(tables.uri(tables.first))
    if "://" in text:
        return NoTable(
            f"{where} names images by addresses such as {quoted(text)}, which are not fetched; "
            "download them, with img2dataset for instance, and name the files"
        )
    return NoTable(
        f"{where} names images such as {quoted(text)}, which are not below "
        f"{printable(tables.base)}; put them there, beside the table or in a folder"
    )


def _label_column(
    tables: Tables, names: Sequence[str], image: str, others: Values, values: Values
) -> str:
    """Return the column of labels.

    Args:
        tables: That are read.
        names: Of all columns.
        image: The column of images.
        others: Values of the columns that can be the label.
        values: Of all columns.

    Raises:
        LabelUnclear: If it is not clear.
    """
    where = printable(tables.uri(tables.first))
    exact = [name for name in others if plain_word(name) == LABEL_COLUMNS[0]]
    if len(exact) == 1:
        return exact[0]
    candidates = [name for name in others if plain_word(name) in LABEL_COLUMNS]
    if not candidates and len(others) == 1:
        candidates = [*others]
    for find in (_as_folders, _like_classes):
        if len(candidates) != 1:
            candidates = find(tables, values[image], others) or candidates
    if len(candidates) == 1:
        return candidates[0]
    folders = {posixpath.dirname(text.replace("\\", "/")) for text in filter(None, values[image])}
    if not others and len(folders - {""}) > 1:
        return image  # a list of paths, whose folders are the classes
    one_hot = _one_hot_columns(others)
    if one_hot:
        raise LabelUnclear(
            f"{where} has a column for each class ({_listed(one_hot)}) with a 1 in one of them, "
            "and labels are read from one column; add a column `label` with the name of the class"
        )
    if not others:
        raise LabelUnclear(f"{where} has no column of labels; give a table of images and labels")
    likely = candidates or _columns_of_classes(others) or [*others]
    raise LabelUnclear(str(_unclear(tables, "label", names, likely)))


def _as_folders(tables: Tables, images: Sequence[str | None], others: Values) -> list[str]:
    """Return the columns whose values are folders of the images in every row."""
    parts: list[set[str]] = []
    for text in images:
        path = parse_path(text or "", tables.base)
        names = tables.index.ending_with(path.text.lstrip("/")) if path and path.text else []
        parts.append({part for name in names for part in name.split("/")[:-1]})
    columns: list[str] = []
    for name, texts in others.items():
        if all((text or "") in folders for text, folders in zip(texts, parts, strict=True)):
            columns.append(name)
    return columns


def _like_classes(tables: Tables, images: Sequence[str | None], others: Values) -> list[str]:
    """Return the columns whose values repeat as classes do, and are not all numbers."""
    columns: list[str] = []
    for name, texts in others.items():
        distinct = set(filter(None, texts))
        are_numbers = all(NUMBER.fullmatch(text) for text in distinct)
        if len(distinct) > 1 and len(distinct) * 2 <= len(texts) and not are_numbers:
            columns.append(name)
    return columns


def _columns_of_classes(values: Values) -> list[str]:
    """Return the columns whose values repeat, as labels do: those with the fewest come last."""
    counts: dict[str, int] = {}
    for name, texts in values.items():
        distinct = set(filter(None, texts))
        if 2 <= len(distinct) < max(len(texts), 3):
            counts[name] = len(distinct)
    return sorted(counts, key=lambda name: -counts[name])


def _one_hot_columns(values: Values) -> list[str]:
    """Return the columns that are a class each: in every row, one of them is 1 and all others 0."""
    names = [name for name, texts in values.items() if set(texts) <= ZERO_OR_ONE]
    if len(names) < 2:
        return []
    for row in zip(*(values[name] for name in names), strict=True):
        if sum(text in ONE for text in row) != 1:
            return []
    return names


def _check_asked(where: str, names: Sequence[str], column: Any) -> None:
    if column not in names:
        raise UserError(
            f"{where} has no column {column!r}; its columns are {_listed(names)}; name one of these"
        )


def _unclear(
    tables: Tables, kind: str, names: Sequence[str], candidates: Sequence[str]
) -> UserError:
    where = printable(tables.uri(tables.first))
    example = tables.request.command(f"source.{kind}={yaml_text(candidates[-1])}")
    return UserError(
        f"{where} has the columns {_listed(names)}, and which is the {kind} is not clear; it can "
        f"be {listed(candidates)}: say it, as in `{example}`"
    )


def _listed(names: Sequence[str]) -> str:
    text = ", ".join(quoted(name) for name in names[:MOST_NAMED])
    return f"{text}, ..." if len(names) > MOST_NAMED else text


# ---- splits --------------------------------------------------------------------------------------
def _split_columns(
    tables: Tables, names: Sequence[str], has_header: bool | None, image: str
) -> tuple[tuple[str, ...], SplitWords | None]:
    """Return the columns of the split, and what their values mean; none without such a column.

    A column that is called as a split must be understood; another one is a split if all its values
    say so.

    Raises:
        SplitUnclear: If it is not understood for every row.
    """
    given = tables.request.given
    where = printable(tables.uri(tables.first))
    if "split" in given:
        asked = given["split"]
        columns = [asked] if isinstance(asked, str) else list(asked or ())
        for column in columns:
            _check_asked(where, names, column)
        if not columns or "splits" in given:
            return tuple(columns), None
        asked_values = _all_values(tables, columns[0], has_header) or set()
        return tuple(columns), _understood(tables, columns[0], asked_values)
    found: dict[str, SplitWords] = {}
    flags: list[str] = []
    for column in names:
        if column in (image, given.get("label")) or plain_word(column) in LABEL_COLUMNS:
            continue
        values = _all_values(tables, column, has_header)
        if values is None:
            if _is_called_split(column) and plain_word(column) not in UNSURE_COLUMNS:
                found[column] = _understood(tables, column, ())
            continue
        role = flag_role(column)
        is_flag = role is not None and {v.lower() for v in values} <= TRUE_WORDS | FALSE_WORDS
        if is_flag and values:
            flags.append(column)
        elif _is_called_split(column) or (values and all(map(role_of, values))):
            if plain_word(column) in UNSURE_COLUMNS and not any(map(role_of, values)):
                continue
            found[column] = _understood(tables, column, values)
    if flags:
        flag_columns, flag_meaning = _of_flags(tables, flags, has_header)
        found[flag_columns[0]] = flag_meaning
        if len(flag_columns) > 1:
            return flag_columns, flag_meaning
    if len(found) > 1:
        raise SplitUnclear(
            f"{where} has columns {listed(found)} that say a split; say which, as in "
            f"`{tables.request.command(f'source.split={yaml_text(next(iter(found)))}')}`"
        )
    for column, words in found.items():
        return (column,), words
    return (), None


def _is_called_split(column: str) -> bool:
    return plain_word(column) in SPLIT_COLUMNS


def _all_values(tables: Tables, column: str, has_header: bool | None) -> set[str] | None:
    """Return the different values of a column in all tables; None if they are many."""
    values: set[str] = set()
    for name in tables.names:
        uri = tables.uri(name)
        if column not in column_names(uri, has_header):
            continue
        for row in read_rows(uri, [column], has_header):
            values.add(row.values[0] or "")
            if len(values) > MOST_VALUES:
                return None
    return values


def _understood(tables: Tables, column: str, values: Any) -> SplitWords:
    """Return what the values of a column of splits mean.

    Raises:
        SplitUnclear: If one of them says no split, or none is train.
    """
    where = printable(tables.uri(tables.first))
    example = tables.request.command(
        f"source.split={yaml_text(column)}",
        "source.splits={train: [...], test: [...], ignore: [...]}",
    )
    none = tables.request.command("source.split=null")
    remedy = f"say what they mean, as in `{example}`, or that it is no split: `{none}`"
    try:
        words = read_words(values)
    except SplitUnclear as error:
        raise SplitUnclear(f"{where}: in column {quoted(column)}, {error}; {remedy}") from None
    if words.unknown or "train" not in words.splits:
        found = listed(sorted(values)) if values else "many different values"
        unread = ""
        if words.unknown and words.splits:
            row = _row_with(tables, column, words.unknown[0])
            unread = f"; {quoted(words.unknown[0])} (row {row}) is not understood"
        raise SplitUnclear(
            f"{where} has a column {quoted(column)}, which looks like a split and has the values "
            f"{found}{unread}; {remedy}"
        )
    return words


def _row_with(tables: Tables, column: str, value: str) -> int:
    for name in tables.names:
        for row in read_rows(tables.uri(name), [column]):
            if (row.values[0] or "") == value:
                return row.number
    return 0


def _of_flags(
    tables: Tables, flags: Sequence[str], has_header: bool | None
) -> tuple[tuple[str, ...], SplitWords]:
    """Return what columns such as `is_train` mean: the one, or each for its own split."""
    where = printable(tables.uri(tables.first))
    if len(flags) == 1:
        role = flag_role(flags[0])
        words = flag_words(role, _all_values(tables, flags[0], has_header) or ()) if role else None
        if words is None or "train" not in words.splits or role == "val":
            problem = "no row is of train"
            if role == "val":
                problem = "a 1 can mean a validation image, or a row without a fault"
            column = yaml_text(flags[0])
            example = tables.request.command(
                f"source.split={column}", "source.splits={train: ['0'], val: ['1']}"
            )
            raise SplitUnclear(
                f"{where}: column {quoted(flags[0])} looks like a split, and {problem}; say what "
                f"its values mean, as in `{example}`, or that it is no split: "
                f"`{tables.request.command('source.split=null')}`"
            )
        return (flags[0],), words
    for name in tables.names:
        for row in read_rows(tables.uri(name), flags, has_header):
            if sum((text or "").lower() in TRUE_WORDS for text in row.values) != 1:
                raise SplitUnclear(
                    f"{where}: of the columns {listed(flags)} not exactly one is 1 in row "
                    f"{row.number}; name the column of the split, as in "
                    f"`{tables.request.command(f'source.split={yaml_text(flags[0])}')}`"
                )
    names = {flag: str(flag_role(flag)) for flag in flags}
    roles = read_words(names.values())
    splits = {
        split: [flag for flag, role in names.items() if role in words]
        for split, words in roles.splits.items()
    }
    return tuple(flags), SplitWords({s: splits[s] for s in SPLITS if s in splits}, [])


def _splits_of(
    tables: Tables, rows: Sequence[NamedRow], placement: Placement, columns: Columns
) -> dict[str, Any]:
    """Return the settings of the source that say its path, its splits and what says them."""
    given = tables.request.given
    uri = tables.uri(tables.first)
    if "splits" in given and "split" in given:
        return {"path": uri}
    if columns.words is not None:
        splits = {split: list(values) for split, values in columns.words.splits.items()}
        _check_folders(tables, rows, placement, columns.words)
        return {"path": uri, "split": list(columns.split), "splits": splits}
    if len(tables.names) > 1 or (not tables.is_whole and any(tables.names.values())):
        by_split: dict[str, list[str]] = {}
        for name, split in tables.names.items():
            by_split.setdefault(split or "train", []).append(name)
        of_tables = SplitWords({split: [split] for split in SPLITS if split in by_split}, [])
        _check_folders(tables, rows, placement, of_tables)
        return {"path": tables.base, "splits": by_split}
    words = None if "split" in given else _words_in_paths(tables, placement)
    if words is None:
        return {"path": uri, "splits": {"train": "train"}}
    return {"path": uri, "split": columns.image, "splits": words.splits}


def _words_in_paths(tables: Tables, placement: Placement) -> SplitWords | None:
    """Return the splits that the folders, or the names, of the images say; None if they say none.

    Raises:
        SplitUnclear: If they say it for some images only, or none is of train.
    """
    where = printable(tables.uri(tables.first))
    found = [file for file in placement.files if file is not None]
    for find in (_word_of_folder, _word_of_name):
        words = {find(file) for file in found} - {""}
        roles = set(map(role_of, words))
        if not words or (roles == {"train"} and find is _word_of_folder):
            continue
        if find is _word_of_name and (len(roles) < 2 or "train" not in roles):
            continue
        none = tables.request.command("source.split=null")
        unread = [file for file in found if not find(file)]
        if unread or "train" not in roles:
            problem = f"{quoted(unread[0])} is in none of them" if unread else "none is of train"
            raise SplitUnclear(
                f"{where}: its images lie in {listed(sorted(words))}, which looks like a split, "
                f"and {problem}; add a column `split`, or say that it is none: `{none}`"
            )
        return read_words(words)
    return None


def _word_of_folder(path: str) -> str:
    return next((part for part in path.split("/")[:-1] if role_of(part)), "")


def _word_of_name(path: str) -> str:
    name = path.rpartition("/")[2]
    for sign in "_-. ":
        first = name.partition(sign)[0]
        if first != name and role_of(first):
            return first
    return ""


def _check_folders(
    tables: Tables, rows: Sequence[NamedRow], placement: Placement, words: SplitWords
) -> None:
    """Raise SplitUnclear if folders say another split than the column."""
    split_of = {value: split for split, values in words.splits.items() for value in values}
    for row, file in zip(rows, placement.files, strict=True):
        folder = _word_of_folder(file or "")
        role = role_of(folder) if folder else None
        split = split_of.get(row.split)
        if role in (None, "held out") or split is None or role == split:
            continue
        if {role, split} == {"val", "test"} and "val" not in words.splits:
            continue  # validation images that serve as test
        raise SplitUnclear(
            f"{printable(tables.uri(tables.first))}: a row says {quoted(row.split)}, and its image "
            f"{quoted(file or '')} lies in {quoted(folder)}; say which counts: "
            f"`{tables.request.command('source.split=null')}` takes neither"
        )


# ---- rows and files ------------------------------------------------------------------------------
def _rows_of(tables: Tables, columns: Columns) -> list[NamedRow]:
    """Return rows from all over the tables, with their labels and splits."""
    rows: list[NamedRow] = []
    wanted = [columns.image, columns.label, *columns.split[:1]]
    shared = _folder_of(tables)
    for name, split in tables.names.items():
        folder = posixpath.dirname(name)
        for row in read_rows(tables.uri(name), wanted, columns.has_header):
            text = row.values[0] or ""
            if folder != shared and text and not text.startswith("/"):
                text = posixpath.join(posixpath.relpath(folder or ".", shared or "."), text)
            label = label_of(row.values[1])
            word = (row.values[2] or "") if columns.split else split
            rows.append(NamedRow(text, "" if label is None else str(label), word))
    if len(rows) <= MOST_PLACED:
        return rows
    chosen = sorted(random.Random(0).sample(range(len(rows)), MOST_PLACED))
    return [rows[index] for index in chosen]


def _folder_of(tables: Tables) -> str:
    """Return the folder of all tables; of tables in several folders, the source."""
    folders = {posixpath.dirname(name) for name in tables.names}
    return folders.pop() if len(folders) == 1 else ""


def _placement_of(tables: Tables, rows: Sequence[NamedRow], columns: Columns) -> Placement:
    """Return where the images of rows lie.

    Raises:
        NoTable: If most of them are not there.
        SplitUnclear: If there are several ways to read their paths.
    """
    where = printable(tables.uri(tables.first))
    if columns.label == columns.image:
        rows = [row._replace(label="") for row in rows]
    given = tables.request.given.get("files")
    if given is not None:
        given_patterns = (given,) if isinstance(given, str) else tuple(given)
        return Placement(given_patterns, (None,) * len(rows))
    found = placements(rows, tables.index, _folder_of(tables), tables.base)
    if not found:
        _check_labels(tables, rows)
        raise _not_there(tables, next((row.text for row in rows if row.text), ""))
    if len(found) > 1:
        ways = " or ".join(listed(placement.patterns) for placement in found[:4])
        example = yaml_text(found[0].patterns[0])
        raise SplitUnclear(
            f"{where}: its rows name files of the same names in several folders, and the images "
            f"can be at {ways}; say which with source.files, as in "
            f"`{tables.request.command(f'source.files={example}')}`"
        )
    placement = found[0]
    is_direct = placement.patterns == ("{}",)
    if not is_direct and len({posixpath.dirname(name) for name in tables.names}) > 1:
        raise SplitUnclear(
            f"{where} and {listed(tables.names)} lie in several folders and name images elsewhere; "
            "put the tables into one folder"
        )
    if placement.num_found * 2 < len(rows):
        lost = next(row.text for row, file in zip(rows, placement.files, strict=True) if not file)
        raise _not_there(tables, lost)
    return placement


def _check_labels(tables: Tables, rows: Sequence[NamedRow]) -> None:
    """Raise UserError if rows give one file two labels, whatever the folder."""
    labels: dict[str, str] = {}
    twice: dict[str, tuple[str, str]] = {}
    for row in rows:
        first = labels.setdefault(row.text, row.label)
        if first != row.label:
            twice.setdefault(row.text, (first, row.label))
    if not twice or not any(_has_file(tables, text) for text in [*twice][:SAMPLE]):
        return
    text, both = next(iter(twice.items()))
    raise LabelUnclear(
        f"{printable(tables.uri(tables.first))}: {counted(len(twice), 'image')} have two labels, "
        f"such as {quoted(text)} with {listed(both)}; an image needs one class, so name another "
        "column of labels, or mend the table"
    )


def table_groups(names: Sequence[str]) -> Iterator[dict[str, str]]:
    """Yield tables that belong together: one for each split, then each by itself.

    Tables belong together if their paths differ in the word of a split alone, as train.csv and
    test.csv, or train/metadata.csv and test/metadata.csv.
    """
    groups: dict[str, dict[str, list[str]]] = {}
    for name in names:
        rest, word = _table_word(name)
        if word:
            groups.setdefault(rest, {}).setdefault(word, []).append(name)
    taken: set[str] = set()
    for by_word in groups.values():
        words = read_words(by_word)
        if "train" not in words.splits:
            continue
        group: dict[str, str] = {}
        for split, of_split in words.splits.items():
            for word in of_split:
                group |= dict.fromkeys(by_word[word], split)
        taken |= group.keys()
        yield group
    for name in names:
        if name not in taken:
            yield {name: ""}


def _table_word(name: str) -> tuple[str, str]:
    """Return a table's path without the word of its split, and that word."""
    folder, _, base = name.rpartition("/")
    stem, _, suffix = base.rpartition(".")
    words = [word for word in ([stem] if role_of(stem) else tokens_of(stem)) if role_of(word)]
    if role_in(stem) and words:
        return f"{folder}/{stem.replace(words[0], '', 1).strip('_-. ')}.{suffix}", words[0]
    last = folder.rpartition("/")[2]
    if role_of(last):
        return f"{folder.rpartition('/')[0]}//{base}", last
    return name, ""
