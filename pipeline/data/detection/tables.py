"""Data sets in tables of paths and labels: what the columns mean, and where the images lie."""

from __future__ import annotations

import posixpath
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pipeline.data.detection.columns import (
    MOST_VALUES,
    Columns,
    LabelUnclear,
    Values,
    label_column,
    listed_columns,
    split_columns,
    tokens_in_lower_case,
)
from pipeline.data.detection.data_set import DataSet, Request, read_labelled, yaml_text
from pipeline.data.detection.words import (
    IMAGE_COLUMNS,
    LABEL_COLUMNS,
    NO_IMAGE_TOKENS,
    NO_LABEL_COLUMNS,
)
from pipeline.data.file_index import (
    ANYWHERE,
    FileIndex,
    NamedRow,
    Placement,
    parse_path,
    placements,
)
from pipeline.data.file_kinds import IMAGE_SUFFIXES, TEXT_TABLES
from pipeline.data.formats.csv import images_of, tables_of
from pipeline.data.labels import WHOLE, label_of
from pipeline.data.names import counted, listed, printable, quoted, suffix_of
from pipeline.data.source_classes import TooManyLabels
from pipeline.data.splits import (
    SPLITS,
    SplitUnclear,
    SplitWords,
    is_no,
    is_yes,
    plain_word,
    read_words,
    role_in,
    role_of,
    tokens_of,
)
from pipeline.data.tables import column_names, read_rows
from workers.errors import UserError
from workers.storage.artifact import join

SAMPLED = 2000  # rows by which columns are told apart
MOST_PLACED = 20_000  # rows whose images are looked for
MOST_ROWS_OF_AN_ID = 20  # on average; labels have more
MOST_IMAGES_OF_AN_ID = 20  # on average; a table of fewer ids, such as one of classes, names others
SAMPLE = 40  # values of a column whose files are looked for


class NoTable(UserError):
    """A file is not a table of images and labels: it names no images that are there."""


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
        is_weak: Whether it is called as something else, such as a photographer.
        files: The file of each row, below the place that was asked for -> its label.
        splits: The same -> its split.
    """

    data_set: DataSet
    is_strong: bool
    is_weak: bool
    files: dict[str, str]
    splits: dict[str, str]


@dataclass(frozen=True)
class Meaning:
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
    meaning = _meaning_of(tables)
    tables, notes = _with_columns(tables, meaning)
    rows = _rows_of(tables, meaning)
    placement = _placement_of(tables, rows, meaning)
    for split in SPLITS[1:]:
        of_split = [f for r, f in zip(rows, placement.files, strict=True) if r.split == split]
        if of_split and not any(of_split) and split in tables.names.values():
            tables, more = _without(tables, split, "names images that are not there")
            notes += more
            rows = _rows_of(tables, meaning)
            placement = _placement_of(tables, rows, meaning)
    source: dict[str, Any] = {"format": "csv", "image": meaning.image, "label": meaning.label}
    source |= _splits_of(tables, placement, meaning)
    if placement.patterns != ("{}",):
        source["files"] = list(placement.patterns)
    _reach_images(tables, placement, source)
    where = "" if placement.patterns == ("{}",) else f", at {listed(placement.patterns)}"
    label = quoted(meaning.label)
    if meaning.label == meaning.image:
        label = "its folders"
    layout = f"a table, images in column {quoted(meaning.image)}{where}, labels in {label}"
    if meaning.split:
        layout += f", splits in {listed(meaning.split)}"
    try:
        data_set = read_labelled(request, tables.name, layout, source, notes)
    except TooManyLabels as error:
        raise _other_label(tables, meaning, error) from None
    base, _ = tables_of(data_set.card)
    below = posixpath.relpath(base.rstrip("/"), tables.base.rstrip("/"))
    files: dict[str, str] = {}
    splits: dict[str, str] = {}
    for one in images_of(data_set.card, [*data_set.entries]):
        if one.name:
            name = posixpath.normpath(posixpath.join(below, one.name))
            files[name] = str(one.label)
            splits[name] = one.split
    is_strong = plain_word(meaning.label) in LABEL_COLUMNS or meaning.label == meaning.image
    is_weak = plain_word(meaning.label) in NO_LABEL_COLUMNS
    return Found(data_set, is_strong, is_weak, files, splits)


def _reach_images(tables: Tables, placement: Placement, source: dict[str, Any]) -> None:
    """Let the patterns of a table in a folder reach all files of the place that was asked for."""
    folder = posixpath.dirname(tables.first)
    if source["path"] == tables.base or not folder or tables.is_whole:
        return
    up = "../" * (folder.count("/") + 1)
    if not any(pattern.startswith((up, ANYWHERE)) for pattern in placement.patterns):
        source["files"] = [f"{up}{folder}/{pattern}" for pattern in placement.patterns]


def _with_columns(tables: Tables, meaning: Meaning) -> tuple[Tables, list[str]]:
    """Return the tables that have the columns of the first one, and notes on the others."""
    notes: list[str] = []
    for name, split in [*tables.names.items()]:
        names = column_names(tables.uri(name), meaning.has_header)
        missing = [column for column in (meaning.image, meaning.label) if column not in names]
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


def _other_label(tables: Tables, meaning: Meaning, error: UserError) -> UserError:
    """Return the error of labels that are no classes, with another column to try."""
    scan = Scan(tables, meaning.has_header)
    taken = (meaning.image, meaning.label, *meaning.split)
    try:
        other = label_column(scan.columns(), taken)
    except LabelUnclear as unclear:
        return LabelUnclear(f"{error}; {unclear}")
    if other is None:
        return error
    command = tables.request.command(f"source.label={yaml_text(other)}")
    return LabelUnclear(f"{error}; if another column is meant: `{command}`")


# ---- columns -------------------------------------------------------------------------------------
class Scan:
    """What the rows of tables say, read once.

    Attributes:
        names: Of all columns.
        sample: Values of some rows from all over the tables, by column.
    """

    def __init__(self, tables: Tables, has_header: bool | None):
        self.tables = tables
        self.has_header = has_header
        uri = tables.uri(tables.first)
        self.names = column_names(uri, has_header)
        chosen: dict[int, tuple[str | None, ...]] = {}
        generator = random.Random(0)
        columns = [*dict.fromkeys(self.names)]
        self._distinct: dict[str, set[str] | None] = {name: set() for name in columns}
        for index, row in enumerate(read_rows(uri, columns, has_header)):
            for name, text in zip(columns, row.values, strict=True):
                self._add(name, text or "")
            place = index if index < SAMPLED else generator.randrange(index + 1)
            if place < SAMPLED:
                chosen[place] = row.values
        rows = chosen.values()
        self.sample = {name: [row[i] for row in rows] for i, name in enumerate(columns)}
        for name in [*tables.names][1:]:
            shared = [column for column in columns if column in column_names(tables.uri(name))]
            for row in read_rows(tables.uri(name), shared, has_header):
                for column, text in zip(shared, row.values, strict=True):
                    self._add(column, text or "")

    def _add(self, column: str, text: str) -> None:
        values = self._distinct[column]
        if values is not None:
            values.add(text)
            if len(values) > MOST_VALUES:
                self._distinct[column] = None

    def row_with(self, column: str, value: str) -> int:
        """Return the number of the first row of the first table with a value."""
        uri = self.tables.uri(self.tables.first)
        rows = read_rows(uri, [column], self.has_header)
        return next((row.number for row in rows if (row.values[0] or "") == value), 0)

    def columns(self) -> Columns:
        """Return the columns as `label_column` and `split_columns` need them."""
        where = printable(self.tables.uri(self.tables.first))
        return Columns(
            self.tables.request,
            where,
            self.names,
            self.sample,
            lambda column: self._distinct[column],
            self.row_with,
        )


def _meaning_of(tables: Tables) -> Meaning:
    """Return what the columns mean, by their names, their values, and the files that are there."""
    uri = tables.uri(tables.first)
    where = printable(uri)
    has_header: bool | None = None
    scan = Scan(tables, has_header)
    if suffix_of(uri) in TEXT_TABLES and _is_first_row(tables, scan):
        first = column_names(uri, True)
        is_taken_for_header = scan.names == first
        has_header = False
        scan = Scan(tables, has_header)
        if is_taken_for_header and {*scan.names} & {*first}:  # the card cannot say which is meant
            raise LabelUnclear(
                f"{where}: its first row ({listed_columns(first)}) can be a header or an image; "
                "add a header, such as image,label"
            )
    if not any(scan.sample.values()):
        raise NoTable(f"{where} has no rows; give a table of images and labels")
    columns = scan.columns()
    images = _image_columns(tables, scan.sample)
    image = _choose_image(tables, columns, images)
    split: tuple[str, ...] = ()
    words: SplitWords | None = None
    given = tables.request.given
    if "splits" not in given or given.get("split"):
        split, words = split_columns(columns, [image, *images])
    taken = [image, *split, *images]
    one_hot = _one_hot_columns({n: texts for n, texts in scan.sample.items() if n not in taken})
    try:
        label = label_column(columns, taken)
    except LabelUnclear:
        if one_hot:
            raise _one_hot_error(columns, one_hot) from None
        raise
    if label in one_hot and "label" not in tables.request.given:
        raise _one_hot_error(columns, one_hot)
    if label is None:
        label = _label_of_others(tables, columns, image, taken)
    return Meaning(image, label, split, words, has_header)


def _is_first_row(tables: Tables, scan: Scan) -> bool:
    """Whether the first row of a table, taken for its header, is a row as the others are."""
    names = scan.names
    are_numbers = bool(names) and all(WHOLE.fullmatch(name) for name in names)
    if are_numbers and names != [*map(str, range(len(names)))]:
        return True
    if are_numbers and all(_has_file(tables, text or "") for text in scan.sample[names[0]]):
        return _has_file(tables, names[0])
    images = _image_columns(tables, scan.sample)
    return any(_has_file(tables, name) and plain_word(name) not in IMAGE_COLUMNS for name in images)


def _resolves(tables: Tables, texts: Sequence[str | None]) -> bool:
    """Whether most values of a column name files."""
    present = [text for text in texts if text]
    some = present if len(present) <= SAMPLE else random.Random(0).sample(present, SAMPLE)
    found = sum(_has_file(tables, text) for text in some)
    are_ids = not any(suffix_of(text) in IMAGE_SUFFIXES for text in some)
    are_few = len(set(present)) * MOST_ROWS_OF_AN_ID < len(present)  # as labels are
    are_few = are_few or len(set(present)) * MOST_IMAGES_OF_AN_ID < len(tables.index)
    return found * 2 > len(some) and not (are_ids and are_few)


def _has_file(tables: Tables, text: str) -> bool:
    path = parse_path(text, tables.base)
    if path is None or "\0" in text:
        return False
    name = posixpath.normpath(path.text.removeprefix("/")).removeprefix("../")
    base = name.rpartition("/")[2]  # of a path of another machine
    return bool(tables.index.ending_with(name) or (base != name and tables.index.ending_with(base)))


def _image_columns(tables: Tables, sample: Values) -> list[str]:
    """Return the columns that name files: those of file names, else those of bare ids."""
    resolved = [name for name, texts in sample.items() if _resolves(tables, texts)]
    return [name for name in _columns_of_paths(sample) if name in resolved] or resolved


def _columns_of_paths(sample: Values) -> list[str]:
    """Return the columns most of whose values are called like images."""
    columns: list[str] = []
    for column, texts in sample.items():
        count = sum(suffix_of(text or "") in IMAGE_SUFFIXES for text in texts)
        if count * 2 > len(texts):
            columns.append(column)
    return columns


def _choose_image(tables: Tables, columns: Columns, images: Sequence[str]) -> str:
    """Return the column of images. Raise UserError if that is not clear, or none names files."""
    asked = tables.request.given.get("image")
    if asked is not None:
        return columns.check(asked)
    names = columns.names
    known = [name for name in names if plain_word(name) in IMAGE_COLUMNS]
    if images:
        likely = [name for name in images if name in known] or [*images]
        paths = _columns_of_paths(columns.sample)
        are_alike = all(name in paths for name in images) or len(images) == 1
        others = [name for name in known if name not in images]
        are_masks = set(tokens_in_lower_case(likely[0])) & NO_IMAGE_TOKENS
        if len(likely) == 1 and are_alike and not (are_masks and others):
            return columns.check(likely[0])
        if are_masks and others:
            raise _not_there(tables, next(filter(None, columns.sample[others[0]]), ""))
        raise columns.unclear("image", images)
    likely = _columns_of_paths(columns.sample) or known
    addresses = [n for n in names if any("://" in (text or "") for text in columns.sample[n])]
    if addresses and not likely:
        likely = addresses
    if not likely:
        raise NoTable(
            f"{columns.where} has the columns {listed_columns(names)}, and none of them names "
            f"images that are below {printable(tables.base)}; put the images there, or name the "
            f"column of images as in "
            f"`{tables.request.command(f'source.image={yaml_text(names[0])}')}`"
        )
    raise _not_there(tables, next(filter(None, columns.sample[likely[0]]), ""))


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


def _label_of_others(tables: Tables, columns: Columns, image: str, taken: Sequence[str]) -> str:
    """Return the column whose folders are the labels, if no column is a label by itself.

    Raises:
        LabelUnclear: If there is none.
    """
    others = {name: texts for name, texts in columns.sample.items() if name not in taken}
    paths = filter(None, columns.sample[image])
    folders = {posixpath.dirname(text.replace("\\", "/")) for text in paths}
    if not others and len(folders - {""}) > 1:
        return image  # a list of paths, whose folders are the classes
    if len(others) > 1:
        raise columns.unclear("label", [*others])
    raise NoTable(f"{columns.where} has no column of labels; give a table of images and labels")


def _one_hot_error(columns: Columns, one_hot: Sequence[str]) -> LabelUnclear:
    return LabelUnclear(
        f"{columns.where} has a column for each class ({listed_columns(one_hot)}) with a 1 in one "
        "of them, and labels are read from one column; add a column `label` with the name of the "
        "class"
    )


def _one_hot_columns(values: Values) -> list[str]:
    """Return the columns that are a class each: in every row, one of them is 1 and all others 0."""
    names = [name for name, texts in values.items() if all(is_yes(t) or is_no(t) for t in texts)]
    if len(names) < 2:
        return []
    for row in zip(*(values[name] for name in names), strict=True):
        if sum(map(is_yes, row)) != 1:
            return []
    return names


# ---- splits --------------------------------------------------------------------------------------
def _splits_of(tables: Tables, placement: Placement, meaning: Meaning) -> dict[str, Any]:
    """Return the settings of the source that say its path, its splits and what says them."""
    given = tables.request.given
    uri = tables.uri(tables.first)
    if "splits" in given and "split" in given:
        return {"path": uri}
    if meaning.words is not None:
        splits = {split: list(values) for split, values in meaning.words.splits.items()}
        return {"path": uri, "split": list(meaning.split), "splits": splits}
    if len(tables.names) > 1 or (not tables.is_whole and any(tables.names.values())):
        by_split: dict[str, list[str]] = {}
        for name, split in tables.names.items():
            by_split.setdefault(split or "train", []).append(name)
        return {"path": tables.base, "splits": by_split}
    words = None if "split" in given else _words_in_paths(tables, placement)
    if words is None:
        return {"path": uri, "splits": {"train": "train"}}
    return {"path": uri, "split": meaning.image, "splits": words.splits}


def _words_in_paths(tables: Tables, placement: Placement) -> SplitWords | None:
    """Return the splits that the folders, or the names, of the images say; None if they say none.

    Raises:
        SplitUnclear: If they say it for some images only, or none is of train.
    """
    where = printable(tables.uri(tables.first))
    found = [file for file in placement.files if file is not None]
    for find in (_word_of_folder, _part_of_folder, _word_of_name):
        words = {find(file) for file in found} - {""}
        roles = set(map(role_in, words))
        if not words or (roles == {"train"} and find is not _word_of_name):
            continue
        if find is not _word_of_folder and (len(roles) < 2 or "train" not in roles):
            continue
        none = tables.request.command("source.split=null")
        unread = [file for file in found if not find(file)]
        if unread or "train" not in roles:
            problem = f"{quoted(unread[0])} is in none of them" if unread else "none is of train"
            raise SplitUnclear(
                f"{where}: its images lie in {listed(sorted(words))}, which looks like a split, "
                f"and {problem}; add a column `split`, or say that it is none: `{none}`"
            )
        return read_words(words, exact=False)
    return None


def _word_of_folder(path: str) -> str:
    return next((part for part in path.split("/")[:-1] if role_of(part)), "")


def _part_of_folder(path: str) -> str:
    return next((part for part in path.split("/")[:-1] if role_in(part)), "")


def _word_of_name(path: str) -> str:
    name = path.rpartition("/")[2]
    for sign in "_-. ":
        first = name.partition(sign)[0]
        if first != name and role_of(first):
            return first
    return ""


# ---- rows and files ------------------------------------------------------------------------------
def _rows_of(tables: Tables, meaning: Meaning) -> list[NamedRow]:
    """Return rows from all over the tables, with their labels and splits."""
    rows: list[NamedRow] = []
    wanted = [meaning.image, meaning.label, *meaning.split[:1]]
    shared = _folder_of(tables)
    for name, split in tables.names.items():
        folder = posixpath.dirname(name)
        for row in read_rows(tables.uri(name), wanted, meaning.has_header):
            text = row.values[0] or ""
            if folder != shared and text and not text.startswith("/"):
                text = posixpath.join(posixpath.relpath(folder or ".", shared or "."), text)
            label = label_of(row.values[1])
            word = (row.values[2] or "") if meaning.split else split
            rows.append(NamedRow(text, "" if label is None else str(label), word))
    if len(rows) <= MOST_PLACED:
        return rows
    chosen = sorted(random.Random(0).sample(range(len(rows)), MOST_PLACED))
    return [rows[index] for index in chosen]


def _folder_of(tables: Tables) -> str:
    """Return the folder of all tables; of tables in several folders, the source."""
    folders = {posixpath.dirname(name) for name in tables.names}
    return folders.pop() if len(folders) == 1 else ""


def _placement_of(tables: Tables, rows: Sequence[NamedRow], meaning: Meaning) -> Placement:
    """Return where the images of rows lie.

    Raises:
        NoTable: If most of them are not there.
        SplitUnclear: If there are several ways to read their paths.
    """
    where = printable(tables.uri(tables.first))
    if meaning.label == meaning.image:
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
