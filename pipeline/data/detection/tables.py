"""Detect a data set in tables of paths and labels.

`group_tables` finds the tables of one data set. `read_tables` reads them: it finds the roles of the
columns (image, label, split), and the patterns (`source.files`) that map rows to image files.
"""

from __future__ import annotations

import posixpath
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from operator import itemgetter
from typing import Any, NamedTuple

from pipeline.config.text import format_count
from pipeline.data.detection.columns import (
    MAX_SPLIT_VALUES,
    Columns,
    LabelUnclear,
    Values,
    find_label_column,
    find_split_columns,
    format_columns,
    note_label,
    sort_label_columns,
    tokenize_lower,
)
from pipeline.data.detection.data_set import DataSet, Request, read_labelled, to_yaml
from pipeline.data.detection.words import (
    IMAGE_COLUMNS,
    LABEL_COLUMNS,
    NO_IMAGE_TOKENS,
    NO_LABEL_COLUMNS,
    is_part,
)
from pipeline.data.file_index import (
    ANYWHERE,
    FileIndex,
    NamedRow,
    Placement,
    find_placements,
    parse_path,
)
from pipeline.data.file_kinds import IMAGE_SUFFIXES, TEXT_TABLES
from pipeline.data.formats.csv import list_images, list_tables
from pipeline.data.labels import WHOLE, normalize_label
from pipeline.data.names import get_suffix, listed, printable, quoted
from pipeline.data.source_classes import TooManyLabels
from pipeline.data.splits import (
    SPLITS,
    SplitUnclear,
    SplitWords,
    find_role,
    is_no,
    is_yes,
    normalize_word,
    parse_role,
    parse_split_words,
    tokenize_name,
)
from pipeline.data.tables import column_names, read_rows
from workers.errors import UserError
from workers.storage.artifact import join

MAX_SAMPLED_ROWS = 2000  # rows sampled to find the roles of columns
MAX_PLACED_ROWS = 20_000  # rows sampled to find the patterns of image files
# Values without an extension can be ids of images, or labels. They are not taken for ids if the
# column has on average more than MAX_ROWS_PER_ID rows per distinct value (labels repeat that
# often), or if the source has more than MAX_IMAGES_PER_ID files per distinct value.
MAX_ROWS_PER_ID = 20
MAX_IMAGES_PER_ID = 20
MAX_SAMPLED_VALUES = 40  # values per column that are looked up among the files


class NoTable(UserError):
    """The file is not a table of images and labels.

    It has no rows, names no existing images, or has no labels.
    """


@dataclass(frozen=True)
class Tables:
    """One table, or one table per split.

    Attributes:
        request: The user's request.
        base: Path or URI of the source.
        name: Name of the data set.
        names: Path of each table below the source -> its split, or "" for a table in no group.
        index: Index of the files that rows may name.
        is_whole: Whether the source is the table itself, not its folder.
    """

    request: Request
    base: str
    name: str
    names: Mapping[str, str]
    index: FileIndex
    is_whole: bool = False

    @property
    def first(self) -> str:
        """The first table, usually the train table."""
        return next(iter(self.names))

    def uri(self, name: str) -> str:
        """Return the path or URI of a table."""
        return join(self.base, name)


class TableReading(NamedTuple):
    """A data set read from a table.

    Attributes:
        data_set: The data set.
        is_strong: Whether the label column has a usual name, for example `label`, or the folders of
            the paths are the labels. Such a table is preferred to others.
        is_weak: Whether the label column is named like something else (`photographer`). Class
            folders are preferred to such a table.
        files: Path of each row's file below `Tables.base` -> its label.
        splits: The same paths -> split.
    """

    data_set: DataSet
    is_strong: bool
    is_weak: bool
    files: dict[str, str]
    splits: dict[str, str]


@dataclass(frozen=True)
class ColumnRoles:
    """The roles of a table's columns.

    Attributes:
        image: Column of image paths.
        label: Column of labels; equal to `image` if the folders of the paths are the labels.
        split: Columns of splits, or ().
        words: The values of the split columns for each split, or None without a split column.
        has_header: See `pipeline.data.tables.read_rows`.
        notes: Notes about the choice of the label.
    """

    image: str
    label: str
    split: tuple[str, ...]
    words: SplitWords | None
    has_header: bool | None
    notes: list[str]


def read_tables(tables: Tables) -> TableReading:
    """Read the data set in one table, or in one table per split.

    Raises:
        NoTable: If the table has no rows, names no existing images, or has no labels.
        LabelUnclear: If the label column is ambiguous.
        UserError: If the table can be read in several ways, or cannot be read.
    """
    request = tables.request
    roles = _find_roles(tables)
    tables, notes = _drop_other_tables(tables, roles)
    roles, more = _settle_splits(tables, roles)
    notes = [*roles.notes, *notes, *more]
    rows = _read_sample(tables, roles)
    if roles.label == roles.image:
        _check_levels(tables, rows)
    placement = _choose_placement(tables, rows, roles)
    # With patterns from the user, `_choose_placement` does not look for the files of the rows.
    has_files = request.given.get("files") is None
    for split in SPLITS[1:]:  # drop a val or test table if none of its images exists
        of_split = [f for r, f in zip(rows, placement.files, strict=True) if r.split == split]
        if has_files and of_split and not any(of_split) and split in tables.names.values():
            tables, more = _drop_split(tables, split, "names images that are not there")
            notes += more
            rows = _read_sample(tables, roles)
            placement = _choose_placement(tables, rows, roles)
    source: dict[str, Any] = {"format": "csv", "image": roles.image, "label": roles.label}
    source |= _build_split_settings(tables, placement, roles)
    if placement.patterns != ("{}",):
        source["files"] = list(placement.patterns)
    _widen_patterns(tables, placement, source)
    where = "" if placement.patterns == ("{}",) else f", at {listed(placement.patterns)}"
    label = quoted(roles.label)
    if roles.label == roles.image:
        label = "its folders"
    layout = f"a table, images in column {quoted(roles.image)}{where}, labels in {label}"
    if roles.split:
        layout += f", splits in {listed(roles.split)}"
    try:
        data_set = read_labelled(request, tables.name, layout, source, notes)
    except TooManyLabels as error:
        raise _suggest_other_label(tables, roles, error) from None
    base, _ = list_tables(data_set.card)
    below = posixpath.relpath(base.rstrip("/"), tables.base.rstrip("/"))
    files: dict[str, str] = {}
    splits: dict[str, str] = {}
    for one in list_images(data_set.card, [*data_set.entries]):
        if one.name:
            name = posixpath.normpath(posixpath.join(below, one.name))
            files[name] = str(one.label)
            splits[name] = one.split
    is_strong = normalize_word(roles.label) in LABEL_COLUMNS or roles.label == roles.image
    is_weak = normalize_word(roles.label) in NO_LABEL_COLUMNS
    return TableReading(data_set, is_strong, is_weak, files, splits)


def names_images(tables: Tables) -> bool:
    """Return whether a column of the first table names images of the source."""
    return bool(_find_image_columns(tables, TableScan(tables, None).sample))


def _widen_patterns(tables: Tables, placement: Placement, source: dict[str, Any]) -> None:
    """Rewrite the patterns of a table in a subfolder, so that its card covers the whole source.

    A card that names a single table covers the folder of the table, or a folder one level higher
    for each `../` in its patterns (see `csv.list_tables`). For a table in `labels`, the pattern
    `{}` becomes `../labels/{}`, which matches the same files.
    """
    folder = posixpath.dirname(tables.first)
    if source["path"] == tables.base or not folder or tables.is_whole:
        return
    up = "../" * (folder.count("/") + 1)
    if not any(pattern.startswith((up, ANYWHERE)) for pattern in placement.patterns):
        source["files"] = [f"{up}{folder}/{pattern}" for pattern in placement.patterns]


def _drop_other_tables(tables: Tables, roles: ColumnRoles) -> tuple[Tables, list[str]]:
    """Drop val and test tables without the image or the label column.

    Returns:
        The remaining tables, and a note about each dropped split.
    """
    notes: list[str] = []
    # val before test, because `_drop_split` renames val to test if test is dropped
    for name, split in sorted(tables.names.items(), key=itemgetter(1), reverse=True):
        if name not in tables.names:
            continue
        names = column_names(tables.uri(name), roles.has_header)
        missing = [column for column in (roles.image, roles.label) if column not in names]
        for column in missing:
            alike = [one for one in names if normalize_word(one) == normalize_word(column)]
            if alike:
                raise LabelUnclear(
                    f"{printable(tables.uri(name))} has a column {quoted(alike[0])}, and "
                    f"{quoted(tables.first)} a column {quoted(column)}; write them alike"
                )
        if missing and split not in ("", "train"):
            tables, more = _drop_split(tables, split, f"has no column {quoted(missing[0])}")
            notes += more
    return tables, notes


def _settle_splits(tables: Tables, roles: ColumnRoles) -> tuple[ColumnRoles, list[str]]:
    """Decide whether the split column or the names of several tables give the splits.

    Returns:
        The roles, without a split column if there are several tables; and a note about that.

    Raises:
        SplitUnclear: If there are several tables, and the column does not agree with their names.
    """
    if not roles.split or len(tables.names) < 2:
        return roles, []
    column = roles.split[0]
    split_of_word: dict[str, str] = {}
    for word_split, words in (roles.words.splits if roles.words else {}).items():
        split_of_word.update(dict.fromkeys(words, word_split))
    for name, split in tables.names.items():
        uri = tables.uri(name)
        values: set[str] = set()
        finding = f"{name} has no column {quoted(column)}"
        if column in column_names(uri, roles.has_header):
            values.update(row.values[0] or "" for row in read_rows(uri, [column], roles.has_header))
            finding = f"column {quoted(column)} of {name} has {listed(sorted(values))}"
        if len(roles.split) > 1 or {split_of_word.get(value, "") for value in values} != {split}:
            command = tables.request.command("source.split=null")
            raise SplitUnclear(
                f"{printable(tables.base)} has the tables {listed(tables.names)}, and {finding}, "
                "which does not follow from the names of the tables; to go by the names: "
                f"`{command}`; to go by the column, join the tables into one"
            )
    note = f"column {quoted(column)} gives the same splits as the names of the tables"
    return replace(roles, split=(), words=None), [note]


def _drop_split(tables: Tables, split: str, reason: str) -> tuple[Tables, list[str]]:
    """Drop the tables of a split. Return the remaining tables and a note.

    If test is dropped, val becomes test.
    """
    kept = {name: of for name, of in tables.names.items() if of != split}
    if split == "test":
        kept = {name: "test" if of == "val" else of for name, of in kept.items()}
    left_out = [name for name in tables.names if name not in kept]
    return replace(tables, names=kept), [f"table {listed(left_out)} is not read: it {reason}"]


def _suggest_other_label(tables: Tables, roles: ColumnRoles, error: UserError) -> UserError:
    """Return the error for a label column with too many values; it suggests another column."""
    scan = TableScan(tables, roles.has_header)
    taken = (roles.image, roles.label, *roles.split)
    try:
        other = find_label_column(scan.columns(), taken)
    except LabelUnclear as unclear:
        return LabelUnclear(f"{error}; {unclear}")
    if other is None:
        return error
    command = tables.request.command(f"source.label={to_yaml(other)}")
    return LabelUnclear(f"{error}; if another column is meant: `{command}`")


# ---- columns -------------------------------------------------------------------------------------
class TableScan:
    """Column values of the tables of one data set. Each table is read once.

    Distinct values are collected from all tables, the sample from the first table only.

    Attributes:
        names: Names of the columns of the first table.
        sample: Column -> values of MAX_SAMPLED_ROWS random rows of the first table.
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
            # reservoir sampling: each row is in the sample with the same probability
            slot = index if index < MAX_SAMPLED_ROWS else generator.randrange(index + 1)
            if slot < MAX_SAMPLED_ROWS:
                chosen[slot] = row.values
        rows = chosen.values()
        self.sample = {name: [row[i] for row in rows] for i, name in enumerate(columns)}
        for name in [*tables.names][1:]:
            names = column_names(tables.uri(name), has_header)
            shared = [column for column in columns if column in names]
            for row in read_rows(tables.uri(name), shared, has_header):
                for column, text in zip(shared, row.values, strict=True):
                    self._add(column, text or "")

    def _add(self, column: str, text: str) -> None:
        values = self._distinct[column]
        if values is not None:
            values.add(text)
            if len(values) > MAX_SPLIT_VALUES:
                self._distinct[column] = None

    def find_row(self, column: str, value: str) -> int:
        """Return the number of the first row with this value in the first table, or 0."""
        uri = self.tables.uri(self.tables.first)
        rows = read_rows(uri, [column], self.has_header)
        return next((row.number for row in rows if (row.values[0] or "") == value), 0)

    def columns(self) -> Columns:
        """Return the columns for `find_label_column` and `find_split_columns`."""
        where = printable(self.tables.uri(self.tables.first))
        return Columns(
            self.tables.request,
            where,
            self.names,
            self.sample,
            lambda column: self._distinct[column],
            self.find_row,
        )


def _find_roles(tables: Tables) -> ColumnRoles:
    """Find the roles of columns from their names, their values and the existing files.

    Raises:
        NoTable: If the table has no rows, no images or no labels.
        LabelUnclear: If the header, the image column or the label column is ambiguous.
        SplitUnclear: If the split column is ambiguous.
    """
    uri = tables.uri(tables.first)
    where = printable(uri)
    has_header: bool | None = None
    scan = TableScan(tables, has_header)
    if get_suffix(uri) in TEXT_TABLES and _is_first_row(tables, scan):
        first = column_names(uri, True)
        is_taken_for_header = scan.names == first
        has_header = False
        scan = TableScan(tables, has_header)
        # Without a header, columns are named 0, 1, ... If the first row contains such a name too,
        # a column name on the card does not tell whether the first row is a header.
        if is_taken_for_header and {*scan.names} & {*first}:
            raise LabelUnclear(
                f"{where}: its first row ({format_columns(first)}) can be a header or an image; "
                "add a header, such as image,label"
            )
    if not any(scan.sample.values()):
        raise NoTable(f"{where} has no rows; give a table of images and labels")
    columns = scan.columns()
    images = _find_image_columns(tables, scan.sample)
    image = _choose_image(tables, columns, images)
    split: tuple[str, ...] = ()
    words: SplitWords | None = None
    settings = tables.request.given
    if "splits" not in settings or settings.get("split"):
        split, words = find_split_columns(columns, [image, *images])
    taken = [image, *split, *images]
    free = {name: texts for name, texts in scan.sample.items() if name not in taken}
    one_hot = _find_one_hot_columns(free)
    try:
        label = find_label_column(columns, taken)
    except LabelUnclear:
        if one_hot:
            raise _one_hot_error(columns, one_hot) from None
        raise
    if label in one_hot and "label" not in tables.request.given:
        raise _one_hot_error(columns, one_hot)
    if label is None:
        label = _infer_label(tables, columns, image, taken)
    notes = note_label(columns, label, taken)
    return ColumnRoles(image, label, split, words, has_header, notes)


def _is_first_row(tables: Tables, scan: TableScan) -> bool:
    """Return whether the first row, which was read as the header, is the row of an image.

    This is the case if all its cells are whole numbers, but not 0, 1, 2, ... in this order, or if
    its cell in a column of images also names a file. A usual header such as `image` is not taken
    for a file name.
    """
    names = scan.names
    are_numbers = bool(names) and all(WHOLE.fullmatch(name) for name in names)
    if are_numbers and names != [*map(str, range(len(names)))]:
        return True
    if are_numbers and all(_has_file(tables, text or "") for text in scan.sample[names[0]]):
        return _has_file(tables, names[0])
    images = _find_image_columns(tables, scan.sample)
    images = [name for name in images if normalize_word(name) not in IMAGE_COLUMNS]
    return any(_has_file(tables, name) for name in images)


def _resolves(tables: Tables, texts: Sequence[str | None]) -> bool:
    """Return whether most values of a column name files.

    Values without the extension of an image do not count if only a few are distinct.
    """
    present = [text for text in texts if text]
    some = present
    if len(present) > MAX_SAMPLED_VALUES:
        some = random.Random(0).sample(present, MAX_SAMPLED_VALUES)
    num_found = sum(_has_file(tables, text) for text in some)
    are_ids = not any(get_suffix(text) in IMAGE_SUFFIXES for text in some)
    are_few = len(set(present)) * MAX_ROWS_PER_ID < len(present)  # they repeat like labels
    are_few = are_few or len(set(present)) * MAX_IMAGES_PER_ID < len(tables.index)
    return num_found * 2 > len(some) and not (are_ids and are_few)


def _has_file(tables: Tables, text: str) -> bool:
    """Return whether a file below the source ends with the path in a cell, or has its base name."""
    path = parse_path(text, tables.base)
    if path is None or "\0" in text:
        return False
    name = posixpath.normpath(path.text.removeprefix("/")).removeprefix("../")
    base = name.rpartition("/")[2]  # the folders may belong to another machine
    return any(map(tables.index.find_by_suffix, (name, base)))


def _find_image_columns(tables: Tables, sample: Values) -> list[str]:
    """Return the columns of file names, or else the columns of ids without an extension."""
    resolved = [name for name, texts in sample.items() if _resolves(tables, texts)]
    return [name for name in _find_path_columns(sample) if name in resolved] or resolved


def _find_path_columns(sample: Values) -> list[str]:
    """Return the columns in which most values have the extension of an image."""
    columns: list[str] = []
    for column, texts in sample.items():
        count = sum(get_suffix(text or "") in IMAGE_SUFFIXES for text in texts)
        if count * 2 > len(texts):
            columns.append(column)
    return columns


def _choose_image(tables: Tables, columns: Columns, images: Sequence[str]) -> str:
    """Choose the image column.

    Raises:
        LabelUnclear: If several columns are possible.
        NoTable: If no column names existing files.
        UserError: If the table does not have exactly one column of the requested name.
    """
    requested = tables.request.given.get("image")
    if requested is not None:
        return columns.check(requested)
    names = columns.names
    known = [name for name in names if normalize_word(name) in IMAGE_COLUMNS]
    if images:
        likely = [name for name in images if name in known] or [*images]
        paths = _find_path_columns(columns.sample)
        # several columns of ids without an extension are ambiguous, even if one has a usual name
        is_certain = all(name in paths for name in images) or len(images) == 1
        others = [name for name in known if name not in images]
        # If only masks exist, but another column is named like images, the images are missing.
        are_masks = _is_mask(likely[0])
        if len(likely) == 1 and is_certain and not (are_masks and others):
            return columns.check(likely[0])
        if are_masks and others:
            raise _missing_images_error(tables, next(filter(None, columns.sample[others[0]]), ""))
        raise columns.ambiguous_error("image", sorted(images, key=_is_mask))
    likely = _find_path_columns(columns.sample) or known
    addresses = [n for n in names if any("://" in (text or "") for text in columns.sample[n])]
    if addresses and not likely:
        likely = addresses
    if not likely:
        raise NoTable(
            f"{columns.where} has the columns {format_columns(names)}, and none of them names "
            f"images that are below {printable(tables.base)}; put the images there, or name the "
            f"image column, as in "
            f"`{tables.request.command(f'source.image={to_yaml(names[0])}')}`"
        )
    raise _missing_images_error(tables, next(filter(None, columns.sample[likely[0]]), ""))


def _is_mask(column: str) -> bool:
    """Return whether a column is named like files that belong to images, for example `mask`."""
    return bool(set(tokenize_lower(column)) & NO_IMAGE_TOKENS)


def _missing_images_error(tables: Tables, text: str) -> NoTable:
    where = printable(tables.uri(tables.first))
    if "://" in text:
        return NoTable(
            f"{where} names images by addresses such as {quoted(text)}, which are not fetched; "
            "download them, for example with img2dataset, and name the files"
        )
    return NoTable(
        f"{where} names images such as {quoted(text)}, which are not below "
        f"{printable(tables.base)}; put them there, beside the table or in a folder"
    )


def _infer_label(tables: Tables, columns: Columns, image: str, taken: Sequence[str]) -> str:
    """Return the image column as the label column if the folders of the paths are the labels.

    Raises:
        LabelUnclear: If another column can be the label.
        NoTable: If no labels are found.
    """
    others = {name: texts for name, texts in columns.sample.items() if name not in taken}
    paths = filter(None, columns.sample[image])
    folders = {posixpath.dirname(text.replace("\\", "/")) for text in paths}
    if not others and len(folders - {""}) > 1:
        return image  # a list of paths like `cat/1.png`
    if len(others) > 1:
        raise columns.ambiguous_error("label", sort_label_columns(columns.sample, others))
    raise NoTable(f"{columns.where} has no column of labels; give a table of images and labels")


def _check_levels(tables: Tables, rows: Sequence[NamedRow]) -> None:
    """Raise LabelUnclear if paths have several levels of folders that can be the labels.

    The innermost folder would be the label. Folders named like splits do not count.
    """
    folders = {posixpath.dirname(row.text.replace("\\", "/")) for row in rows}
    paths = [folder.split("/") for folder in folders if folder]
    levels = [{*names} - {""} for names in zip_longest(*paths, fillvalue="")]
    varying = [names for names in levels if len(names) > 1 and not all(map(parse_role, names))]
    # parts above the labels, such as `part_1/cat`, are no labels
    varying = [names for names in varying[:-1] if not all(map(is_part, names))] + varying[-1:]
    if len(varying) > 1 or len({*map(len, paths)}) > 1:
        raise LabelUnclear(
            f"{printable(tables.uri(tables.first))}: images are in folders of folders such as "
            f"{listed(sorted(folders)[:2])}, and which of them is the label is not clear; add a "
            "column `label`"
        )


def _one_hot_error(columns: Columns, one_hot: Sequence[str]) -> LabelUnclear:
    return LabelUnclear(
        f"{columns.where} has a column for each class ({format_columns(one_hot)}) with a 1 in one "
        "of them, and labels are read from one column; add a column `label` with the name of the "
        "class"
    )


def _find_one_hot_columns(values: Values) -> list[str]:
    """Return the one-hot columns: each row has a single 1 and otherwise 0."""
    names = [name for name, texts in values.items() if all(is_yes(t) or is_no(t) for t in texts)]
    if len(names) < 2:
        return []
    for row in zip(*(values[name] for name in names), strict=True):
        if sum(map(is_yes, row)) != 1:
            return []
    return names


# ---- splits --------------------------------------------------------------------------------------
def _build_split_settings(
    tables: Tables, placement: Placement, roles: ColumnRoles
) -> dict[str, Any]:
    """Build the source settings `path`, `splits` and `split`.

    The splits are given by the first that exists: the user's settings, split columns, a table per
    split, or words in the paths of the images. Otherwise all rows are train.
    """
    settings = tables.request.given
    uri = tables.uri(tables.first)
    if "splits" in settings and "split" in settings:
        return {"path": uri}
    if roles.words is not None:
        splits = {split: list(values) for split, values in roles.words.splits.items()}
        return {"path": uri, "split": list(roles.split), "splits": splits}
    if len(tables.names) > 1 or (not tables.is_whole and any(tables.names.values())):
        by_split: dict[str, list[str]] = {}
        for name, split in tables.names.items():
            by_split.setdefault(split or "train", []).append(name)
        return {"path": tables.base, "splits": by_split}
    words = None if "split" in settings else _find_split_in_paths(tables, placement)
    if words is None:
        return {"path": uri, "splits": {"train": "train"}}
    return {"path": uri, "split": roles.image, "splits": words.splits}


def _find_split_in_paths(tables: Tables, placement: Placement) -> SplitWords | None:
    """Find the splits in the folders or file names of images, for example `test/1.png`.

    Returns:
        The words of each split, or None if paths name no splits.

    Raises:
        SplitUnclear: If only some images have a split, or none is train.
    """
    where = printable(tables.uri(tables.first))
    files = [file for file in placement.files if file is not None]
    # If all words mean train, they are no split. Whole folder names are the strongest evidence;
    # parts of names count only if they name train and another split.
    for find in (_find_folder_word, _find_folder_part, _find_name_word):
        words = {find(file) for file in files} - {""}
        roles = set(map(find_role, words))
        if not words or (roles == {"train"} and find is not _find_name_word):
            continue
        if find is not _find_folder_word and (len(roles) < 2 or "train" not in roles):
            continue
        none = tables.request.command("source.split=null")
        unread = [file for file in files if not find(file)]
        if unread or "train" not in roles:
            problem = f"{quoted(unread[0])} is in none of them" if unread else "none is train"
            raise SplitUnclear(
                f"{where}: its images are in {listed(sorted(words))}, which looks like a split, "
                f"but {problem}; add a column `split`, or say that it is not a split: `{none}`"
            )
        return parse_split_words(words, exact=False)
    return None


def _find_folder_word(path: str) -> str:
    """Return the first folder whose whole name is a split word, for example `test`, or ""."""
    return next((part for part in path.split("/")[:-1] if parse_role(part)), "")


def _find_folder_part(path: str) -> str:
    """Return the first folder with a split word in its name, for example `seg_test`, or ""."""
    return next((part for part in path.split("/")[:-1] if find_role(part)), "")


def _find_name_word(path: str) -> str:
    """Return the split word at the start of the file name, for example of `test_1.png`, or ""."""
    name = path.rpartition("/")[2]
    for sign in "_-. ":
        first = name.partition(sign)[0]
        if first != name and parse_role(first):
            return first
    return ""


# ---- rows and files ------------------------------------------------------------------------------
def _read_sample(tables: Tables, roles: ColumnRoles) -> list[NamedRow]:
    """Sample at most MAX_PLACED_ROWS rows from all tables, with their labels and split words.

    If the tables are in several folders, relative paths are rewritten to be relative to the source.
    """
    rows: list[NamedRow] = []
    columns = [roles.image, roles.label, *roles.split[:1]]
    shared = _find_shared_folder(tables)
    for name, split in tables.names.items():
        folder = posixpath.dirname(name)
        for row in read_rows(tables.uri(name), columns, roles.has_header):
            text = row.values[0] or ""
            if folder != shared and text and not text.startswith("/"):
                text = posixpath.join(posixpath.relpath(folder or ".", shared or "."), text)
            label = normalize_label(row.values[1])
            word = (row.values[2] or "") if roles.split else split
            rows.append(NamedRow(text, "" if label is None else str(label), word))
    if len(rows) <= MAX_PLACED_ROWS:
        return rows
    chosen = sorted(random.Random(0).sample(range(len(rows)), MAX_PLACED_ROWS))
    return [rows[index] for index in chosen]


def _find_shared_folder(tables: Tables) -> str:
    """Return the folder of all tables, or "" (the source) if they are in several folders."""
    folders = {posixpath.dirname(name) for name in tables.names}
    return folders.pop() if len(folders) == 1 else ""


def _choose_placement(tables: Tables, rows: Sequence[NamedRow], roles: ColumnRoles) -> Placement:
    """Choose the patterns that map rows to image files.

    Patterns in the user's request are returned unchecked, without the files of the rows.

    Raises:
        NoTable: If most of the images do not exist.
        SplitUnclear: If the paths can be read in several ways.
    """
    where = printable(tables.uri(tables.first))
    if roles.label == roles.image:
        rows = [row._replace(label="") for row in rows]
    requested = tables.request.given.get("files")
    if requested is not None:
        patterns = (requested,) if isinstance(requested, str) else tuple(requested)
        return Placement(patterns, (None,) * len(rows))
    candidates = find_placements(rows, tables.index, _find_shared_folder(tables), tables.base)
    if not candidates:
        _check_labels(tables, rows)
        raise _missing_images_error(tables, next((row.text for row in rows if row.text), ""))
    if len(candidates) > 1:
        ways = " or ".join(listed(placement.patterns) for placement in candidates[:4])
        example = to_yaml(candidates[0].patterns[0])
        raise SplitUnclear(
            f"{where}: its rows name files of the same names in several folders, and the images "
            f"can be at {ways}; choose with source.files, as in "
            f"`{tables.request.command(f'source.files={example}')}`"
        )
    placement = candidates[0]
    is_direct = placement.patterns == ("{}",)
    if not is_direct and len({posixpath.dirname(name) for name in tables.names}) > 1:
        raise SplitUnclear(
            f"{where} and {listed(tables.names)} are in several folders and name images elsewhere; "
            "put the tables into one folder"
        )
    if placement.num_found * 2 < len(rows):
        lost = next(row.text for row, file in zip(rows, placement.files, strict=True) if not file)
        raise _missing_images_error(tables, lost)
    return placement


def _check_labels(tables: Tables, rows: Sequence[NamedRow]) -> None:
    """Raise LabelUnclear if rows with the same path have two labels.

    Nothing is raised if none of these paths names a file: the caller reports missing images then.
    """
    labels: dict[str, str] = {}
    twice: dict[str, tuple[str, str]] = {}
    for row in rows:
        first = labels.setdefault(row.text, row.label)
        if first != row.label:
            twice.setdefault(row.text, (first, row.label))
    if not twice or not any(_has_file(tables, text) for text in [*twice][:MAX_SAMPLED_VALUES]):
        return
    text, both = next(iter(twice.items()))
    raise LabelUnclear(
        f"{printable(tables.uri(tables.first))}: {format_count(len(twice), 'image')} have two "
        "labels, "
        f"such as {quoted(text)} with {listed(both)}; an image needs one class, so name another "
        "label column, or correct the table"
    )


def group_tables(names: Sequence[str]) -> Iterator[dict[str, str]]:
    """Group the tables of one data set, for example `train.csv` and `test.csv`.

    The paths of such tables differ only in a split word. Another example is `train/metadata.csv`
    and `test/metadata.csv`. Each remaining table is a separate group.

    Yields:
        A dict from table to split. The split is "" if the table is a separate group.
    """
    groups: dict[str, dict[str, list[str]]] = {}
    for name in names:
        rest, word = _split_table_name(name)
        if word:
            groups.setdefault(rest, {}).setdefault(word, []).append(name)
    taken: set[str] = set()
    for by_word in groups.values():
        words = parse_split_words(by_word)
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


def _split_table_name(name: str) -> tuple[str, str]:
    """Split the path of a table into the rest and its split word, or "" without one.

    Tables with the same rest belong together. If the word is the name of the folder, `//` in the
    rest marks its place.
    """
    folder, _, base = name.rpartition("/")
    stem, _, suffix = base.rpartition(".")
    words = [
        word for word in ([stem] if parse_role(stem) else tokenize_name(stem)) if parse_role(word)
    ]
    if find_role(stem) and words:
        return f"{folder}/{stem.replace(words[0], '', 1).strip('_-. ')}.{suffix}", words[0]
    last = folder.rpartition("/")[2]
    if parse_role(last):
        return f"{folder.rpartition('/')[0]}//{base}", last
    return name, ""
