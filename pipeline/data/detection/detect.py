"""Detect the data sets at a path or URI.

A folder can be read in three ways: its subfolders are classes, a table names its images, or it
contains archives of images (Parquet files or tars). Each way is tried. If exactly one way gives a
consistent data set, this way is used. If several ways give different data sets, an error asks the
user to choose, but class folders are preferred to a table whose label column is doubtful.
"""

from __future__ import annotations

import os
import posixpath
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeline.config.text import format_count
from pipeline.data.detection.archives import Files, holds_images, read_columns
from pipeline.data.detection.columns import LabelUnclear, classify_split_column
from pipeline.data.detection.data_set import (
    MAX_FILES,
    DataSet,
    Request,
    build_data_set,
    format_splits,
    to_yaml,
)
from pipeline.data.detection.doubts import (
    check_lists,
    check_reading,
    check_siblings,
    check_unread_parts,
)
from pipeline.data.detection.folders import (
    Layout,
    MaybeNoClass,
    NoClasses,
    find_class_layout,
    find_layout,
)
from pipeline.data.detection.libraries import (
    HUB,
    TORCHVISION,
    read_torchvision_set,
    resolve_hub_address,
)
from pipeline.data.detection.packed_files import build_unpack_command
from pipeline.data.detection.shards import read_shards
from pipeline.data.detection.tables import (
    NoTable,
    TableReading,
    Tables,
    group_tables,
    names_images,
    read_tables,
)
from pipeline.data.detection.words import LABEL_TABLES, is_part, says_no_labels
from pipeline.data.file_index import FileIndex
from pipeline.data.file_kinds import (
    COLUMN_FILES,
    IMAGE_FILES,
    IMAGE_SUFFIXES,
    TABLE_SUFFIXES,
    TAR_SUFFIX,
    TEXT_TABLES,
    is_packed,
)
from pipeline.data.formats.folder import labelled_entries
from pipeline.data.listing import (
    HIDDEN,
    Entry,
    Folder,
    folder_tree,
    is_folder,
    list_entries,
)
from pipeline.data.names import get_file_name, get_suffix, is_utf8, listed, nfc, printable, quoted
from pipeline.data.splits import (
    IGNORE,
    SplitUnclear,
    find_role,
    normalize_word,
    tokenize_name,
)
from pipeline.data.tables import column_names, read_rows
from workers.errors import UserError, did_you_mean
from workers.storage.artifact import exists, is_local, join, parent
from workers.storage.secrets import refuse_secrets

# generic stems: a data set in a file with such a name is named after its folder
PLAIN_STEMS = ("train", "labels", "label", "data", "metadata", "images", "index", "all", "dataset")
MAX_TABLES = 50  # tables in a source; each is read to its end
MAX_DATA_SETS = 200  # data sets in one folder
MAX_UNREAD = 0.05  # share of images that a table may leave out if another table is unreadable
MAX_DOUBTFUL = 100  # folders that one command leaves out
# suffixes of the files that detection reads
LISTED = IMAGE_SUFFIXES | TABLE_SUFFIXES | {TAR_SUFFIX}
ACCEPTED_LAYOUTS = (
    "supported: class folders (CLASS/*.jpg), with or without train/ and test/ above them, a "
    "CSV file of paths and labels, Parquet files, or WebDataset tars"
)


def detect(request: Request) -> list[DataSet]:
    """Detect the data sets at a path or URI.

    Raises:
        UserError: If the path contains no data set, or can be read in several ways.
    """
    path = request.path
    if not is_utf8(path) or "${" in path or "\0" in path or not path.strip():
        raise UserError(
            f"{printable(path) or 'an empty path'} cannot be written on a card (no name, no UTF-8, "
            "or '${', which stands for a variable of the environment); rename it"
        )
    refuse_secrets(path)
    if path.startswith(TORCHVISION):
        return [read_torchvision_set(path, request)]
    if path.startswith(HUB):
        path = resolve_hub_address(path)
    uri = path.rstrip("/")
    if "://" not in path:
        uri = os.path.abspath(path)
    without_revision = uri.partition("@")[0] if uri.startswith(HUB) else uri
    name = get_file_name(posixpath.basename(without_revision))
    if is_folder(uri):
        entries = list_entries(uri, [""], LISTED, MAX_FILES) or []
        return SourceFolder(request, uri, name, entries).data_sets()
    if not exists(uri):
        raise _missing_error(path)
    return [_detect_file(uri, request)]


def _detect_file(uri: str, request: Request) -> DataSet:
    """Detect the data set in a single file: a tar, a Parquet or Arrow file, or a table."""
    stem = _get_stem(uri)
    if stem.lower() in PLAIN_STEMS and "/" in request.path:
        stem = posixpath.basename(parent(uri))
    name = get_file_name(stem)
    base = parent(uri)
    file = posixpath.basename(uri)
    suffix = get_suffix(uri)
    if suffix == TAR_SUFFIX:
        return read_shards(Files(request, base, name, [file], uri))
    if suffix in COLUMN_FILES and holds_images(uri):
        return read_columns(Files(request, base, name, [file], uri))
    if suffix in TABLE_SUFFIXES:
        entries = list_entries(base, [""], LISTED, MAX_FILES) or []
        tables = Tables(request, base, name, {file: ""}, _index_images(entries), is_whole=True)
        data_set = read_tables(tables).data_set
        check_reading(request, data_set, entries)
        return data_set
    if is_packed(uri):
        command = build_unpack_command([request.path], "", request.program)
        remedy = f"unpack it: `{command}`" if command else "unpack it and give the folder"
        raise UserError(f"{printable(uri)} is a compressed archive, which is not read; {remedy}")
    raise UserError(
        f"{printable(uri)} is neither a config nor a data set; supported: a .yaml config, a "
        "folder of class folders, a CSV file of paths and labels, Parquet files, or WebDataset tars"
    )


def _missing_error(path: str) -> UserError:
    remedy = "give the path of a config or of images"
    folder = os.path.dirname(path) or "."
    if "://" not in path and os.path.isdir(folder):
        names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
        remedy = did_you_mean(os.path.basename(path), names, remedy, os.path.dirname(path))
    return UserError(f"{printable(path)} does not exist; {remedy}")


def _is_image(entry: Entry) -> bool:
    return not entry.problem and get_suffix(entry.name) in IMAGE_FILES


def _index_images(entries: Sequence[Entry]) -> FileIndex:
    return FileIndex(entry.name for entry in entries if _is_image(entry))


# ---- folders -------------------------------------------------------------------------------------
@dataclass(frozen=True)
class SourceFolder:
    """A folder that may contain data sets.

    `_read_folders`, `_read_table` and `_read_archive` return what they read, or the error that
    explains why they read nothing (None if the folder has no such files).

    Attributes:
        request: The user's request.
        uri: Path or URI of the folder.
        name: Name for a data set in it.
        entries: All files below it.
    """

    request: Request
    uri: str
    name: str
    entries: Sequence[Entry]

    def data_sets(self) -> list[DataSet]:
        """Return the data sets in this folder: one, or those of its subfolders.

        Raises:
            UserError: If the folder contains no data set, or can be read in several ways.
        """
        data_sets = self._read()
        if len(data_sets) == 1:
            check_reading(self.request, data_sets[0], self.entries)
            check_unread_parts(self.request, data_sets[0], self.entries)
        elif "format" not in self.request.given:
            check_lists(self.request, data_sets, self.entries)
        return data_sets

    def _read(self) -> list[DataSet]:
        """Read the folder in each of the three ways, and choose one (see the module)."""
        settings = self.request.given
        if settings.get("format") is not None:
            return self._read_format(str(settings["format"]))
        found_table, table_error, unused = self._read_table()
        archive, archive_error = self._read_archive()
        folders, folder_error = self._read_folders()
        about_columns = {"label", "image", "split", "files"} & settings.keys()
        if about_columns and (found_table or table_error):
            folders, folder_error = [], None
        if found_table and folders:
            chosen = self._choose_table_or_folders(found_table, folders)
            self._check_unused(unused, chosen)
            return chosen
        if folders and table_error and not isinstance(table_error, NoTable):
            as_folders = self.request.command("source.format=folder")
            raise LabelUnclear(f"{table_error}; if the folders are the classes: `{as_folders}`")
        ways = [folders, [found_table.data_set] if found_table else [], archive]
        possible = [way for way in ways if way]
        if len(possible) > 1:
            raise self._ambiguous_error(possible)
        if possible:
            self._check_unused(unused, possible[0])
            return possible[0]
        raise self._choose_error(table_error, archive_error, folder_error)

    def _read_format(self, source_format: str) -> list[DataSet]:
        """Read the data set in the format that the user gave."""
        settings = self.request.given
        tables = self._find_given_tables() if source_format == "csv" else {}
        if tables:
            index = _index_images(self.entries)
            found_table = read_tables(Tables(self.request, self.uri, self.name, tables, index))
            return [found_table.data_set]
        if "splits" in settings and source_format in ("folder", "csv"):
            layout = f"format {source_format}, as given"
            source = {"format": source_format, "path": self.uri}
            return [build_data_set(self.request, self.name, layout, source)]
        if source_format == "folder":
            data_sets, error = self._read_folders()
        elif source_format == "csv":
            table, error, _ = self._read_table()
            data_sets = [table.data_set] if table else []
        else:
            data_sets, error = self._read_archive()
        if not data_sets:
            raise error or self._no_data_set_error()
        return data_sets

    def _find_given_tables(self) -> dict[str, str]:
        """Map the tables in the setting `splits` to their split."""
        names = {entry.name for entry in self.entries}
        tables: dict[str, str] = {}
        for split, parts in dict(self.request.given.get("splits") or {}).items():
            for part in (parts,) if isinstance(parts, str) else parts:
                if split != IGNORE and part in names and get_suffix(part) in TABLE_SUFFIXES:
                    tables[part] = split
        return tables

    # ---- class folders ---------------------------------------------------------------------------
    def _read_folders(self) -> tuple[list[DataSet], UserError | None]:
        """Read the data sets in class folders."""
        if not any(map(_is_image, self.entries)):
            return [], None
        splits = self.request.given.get("splits")
        try:
            if splits is not None and "split" not in self.request.given:
                # the given splits override those of the layout in `build_data_set`
                layout: Layout | list[Folder] = Layout({}, "class folders, splits as given")
            else:
                layout = self._find_layout()
            if isinstance(layout, list):
                return self._read_each(layout), None
            source = {"format": "folder", "path": self.uri, "splits": layout.splits}
            return [
                build_data_set(self.request, self.name, layout.text, source, layout.notes)
            ], None
        except NoClasses:
            return [], self._no_data_set_error()
        except UserError as error:
            return [], self._add_location(error)

    def _find_layout(self) -> Layout | list[Folder]:
        """Find the layout of class folders.

        Raises:
            UserError: If there is none, or if folders can be read in several ways and the request
                does not name the classes. The remedy leaves out all folders that are in doubt.
        """
        tree = folder_tree(self.entries)
        try:
            return find_layout(tree)
        except SplitUnclear as error:
            named = find_class_layout(tree, self.request.classes) if self.request.classes else None
            if named is not None:
                return named
            if not isinstance(error, MaybeNoClass):
                raise
            doubt = error
        entries = self.entries
        doubtful: list[str] = []
        layout: Layout | list[Folder] = []
        while len(doubtful) < MAX_DOUBTFUL:
            doubtful.append(doubt.folder)
            entries = [e for e in entries if not e.name.startswith(f"{doubt.folder}/")]
            try:
                layout = find_layout(folder_tree(entries))
                break
            except MaybeNoClass as another:
                doubt = another
        if not isinstance(layout, Layout):
            raise doubt
        ignored = [*layout.splits.get(IGNORE, ()), *doubtful]
        leave_out = self.request.command(format_splits({**layout.splits, IGNORE: ignored}))
        keep = self.request.command(format_splits(layout.splits))
        raise SplitUnclear(
            f"folders {listed(doubtful)} can be classes, or not part of the data; leave them out "
            f"with `{leave_out}`; if they are classes: `{keep}`"
        )

    def _read_each(self, folders: Sequence[Folder]) -> list[DataSet]:
        """Read the data sets in each of several subfolders. Each folder can hold several."""
        if len(folders) > MAX_DATA_SETS:
            raise UserError(
                f"{printable(self.uri)} holds {len(folders)} folders of folders, and at most "
                f"{MAX_DATA_SETS} data sets are read at once; give the paths of the data sets"
            )
        if "format" not in self.request.given:
            check_siblings(self.request, printable(self.uri), folders)
        data_sets: list[DataSet] = []
        for folder in sorted(folders, key=lambda folder: folder.name):
            prefix = f"{folder.name}/"
            entries = [
                entry._replace(name=entry.name.removeprefix(prefix))
                for entry in self.entries
                if entry.name.startswith(prefix)
            ]
            name = get_file_name(folder.base_name)
            uri = join(self.uri, folder.name)
            request = replace(self.request, path=join(self.request.path, folder.name))
            data_sets += SourceFolder(request, uri, name, entries).data_sets()
        used = sum(len(data_set.entries) for data_set in data_sets)
        others = [e.name for e in self.entries if not _is_in_folders(e.name, folders)]
        if others and used:
            num_others = format_count(len(others), "file")
            note = f"{num_others} beside the data sets are not read: {listed(others)}"
            data_sets[0] = replace(data_sets[0], notes=(*data_sets[0].notes, note))
        return data_sets

    # ---- tables ----------------------------------------------------------------------------------
    def _read_table(self) -> tuple[TableReading | None, UserError | None, list[Tables]]:
        """Read the table of images and labels, or return the error of the likeliest table.

        All tables are read. Tables with a clear label column are preferred, and those that remain
        must agree. Tables of one data set, such as `train.csv` and `test.csv`, count as one.

        Returns:
            The table and None, or None and the error, which is None if there is no table; and the
            tables that are not tables of images and labels.
        """
        names = [
            entry.name
            for entry in self.entries
            if not entry.problem and get_suffix(entry.name) in TABLE_SUFFIXES
        ]
        stems = {e.name.rpartition(".")[0] for e in self.entries if _is_image(e)}
        bases = {stem.rpartition("/")[2] for stem in stems}
        # If many tables are named like an image (`1.csv` for `1.jpg`), each holds annotations of
        # its image, such as boxes, and is not a table of labels.
        has_annotations = 2 * sum(_get_stem(name) in bases for name in names) > len(stems)
        names = [
            name
            for name in names
            if not (has_annotations and _get_stem(name) in bases) and self._may_be_table(name)
        ]
        # likeliest first: no plain text, and few folders deep
        names.sort(key=lambda name: (get_suffix(name) == ".txt", name.count("/"), name))
        if not names:
            return None, None, []
        index = _index_images(self.entries)
        readings: list[tuple[str, TableReading]] = []
        errors: list[UserError] = []
        unused: list[Tables] = []
        try:
            groups = [*group_tables(names)]
        except SplitUnclear as error:
            return None, self._add_location(error), []
        if len(groups) > MAX_TABLES:
            command = self.request.command(path=join(self.request.path, names[0]))
            too_many = LabelUnclear(
                f"{printable(self.uri)} has {len(groups)} tables ({listed(names)}), and at most "
                f"{MAX_TABLES} are compared; give the one with the labels, as in `{command}`"
            )
            return None, too_many, []
        for group in groups:
            tables = Tables(self.request, self.uri, self.name, group, index)
            is_plain_text = get_suffix(tables.first) == ".txt" and not _is_label_table(tables)
            try:
                readings.append((tables.first, read_tables(tables)))
            except UserError as error:
                if not is_plain_text:
                    errors.append(error)
                if isinstance(error, NoTable) and not is_plain_text:
                    unused.append(tables)
        strong = [(name, reading) for name, reading in readings if reading.is_strong]
        if strong:
            known = {file for _, reading in strong for file in reading.files}
            others = [(name, reading) for name, reading in readings if not reading.is_strong]
            # another table is superseded if it has the same images, only some of them, or more
            others = [
                (name, one) for name, one in others if known - {*one.files} and {*one.files} - known
            ]
            if others:
                return None, self._conflicting_tables_error([*strong, *others], True), unused
            readings = strong
        labels = {tuple(sorted(reading.files.items())) for _, reading in readings}
        with_splits = [(name, one) for name, one in readings if len(one.data_set.counts) > 1]
        if len(labels) == 1 and with_splits:  # the others have equal labels and no splits
            readings = with_splits
        splits = {tuple(sorted(reading.splits.items())) for _, reading in readings}
        if len(labels) > 1 or len(splits) > 1:
            return None, self._conflicting_tables_error(readings, len(labels) > 1), unused
        serious = [e for e in errors if not isinstance(e, NoTable)]
        serious.sort(key=lambda error: isinstance(error, LabelUnclear))
        if readings and not (serious and self._leaves_out(readings[0][1], serious)):
            return readings[0][1], None, unused
        return None, next(iter(serious or errors), None), unused

    def _leaves_out(self, reading: TableReading, errors: Sequence[UserError]) -> bool:
        """Return whether a table may be incomplete without the tables that could not be read.

        That is so if its label column is uncertain, if it has one split and another table has
        unclear splits, or if it names too few of the images.

        Args:
            reading: The table.
            errors: Errors of the other tables.
        """
        if not reading.is_strong:
            return True
        if len(reading.data_set.counts) == 1 and any(isinstance(e, SplitUnclear) for e in errors):
            return True
        read = {posixpath.basename(file) for file in reading.files}
        images = [entry.name for entry in self.entries if _is_image(entry)]
        unread = sum(posixpath.basename(name) not in read for name in images)
        return unread > MAX_UNREAD * len(images)

    def _check_unused(self, unused: Sequence[Tables], data_sets: Sequence[DataSet]) -> None:
        """Check that no table which is not read has labels or splits.

        Args:
            unused: The tables.
            data_sets: The data sets that were read, from folders or from another table.

        Raises:
            LabelUnclear: If a table beside class folders has labels.
            SplitUnclear: If a table has splits, and the data sets have none.
        """
        as_folders = f"`{self.request.command('source.format=folder')}`"
        is_folder = data_sets[0].card.source.format == "folder"
        classes = {name for data_set in data_sets for name in data_set.classes}
        has_splits = any(len(data_set.counts) > 1 for data_set in data_sets)
        has_splits = has_splits or bool({"split", "splits"} & self.request.given.keys())
        for tables in unused:
            name = quoted(tables.first)
            for column in column_names(tables.uri(tables.first)):
                is_label = is_folder and normalize_word(column) in ("label", "labels", "target")
                if is_label and _has_other_labels(tables, column, classes):
                    raise LabelUnclear(
                        f"{printable(self.uri)} has class folders ({listed(sorted(classes))}), and "
                        f"its table {name} has labels in {quoted(column)}, but names no image; add "
                        "a column with the paths of the images, or, if the folders are the "
                        f"classes: {as_folders}"
                    )
                is_split = not has_splits and classify_split_column(column) == "column"
                if is_split and names_images(tables):
                    none = f"`{self.request.command('source.split=null')}`"
                    raise SplitUnclear(
                        f"{printable(self.uri)}: table {name} has a column {quoted(column)}, which "
                        "looks like a split, but no labels; add the column to the table with the "
                        "labels, sort the images into train/ and test/, or say that it is not a "
                        f"split: {as_folders if is_folder else none}"
                    )

    def _conflicting_tables_error(
        self, readings: Sequence[tuple[str, TableReading]], differ: bool
    ) -> LabelUnclear:
        """Return the error for tables that contradict each other.

        Args:
            readings: The tables and their names.
            differ: Whether the labels differ; otherwise the splits do.
        """
        names = [name for name, _ in readings]
        command = f"`{self.request.command(path=join(self.request.path, names[0]))}`"
        first = readings[0][1].data_set.card.source
        if first.path.rstrip("/") == self.uri.rstrip("/"):  # one table per split
            splits = {str(split): first.list_parts(split) for split in first.named_splits()}
            command = f"`{self.request.command('source.format=csv', format_splits(splits))}`"
        files = [set(table.files) for _, table in readings]
        if sum(map(len, files)) > len(set().union(*files)):
            kind = "labels" if differ else "splits"
            return LabelUnclear(
                f"{printable(self.uri)}: the tables {listed(names)} name images with different "
                f"{kind}; give the path of one, as in {command}"
            )
        if any(reading.data_set.card.source.split is not None for _, reading in readings):
            together = "join them into one table"  # only one table can have a column of splits
        else:
            parts = format_splits(_assign_tables(readings))
            read_all = self.request.command("source.format=csv", parts)
            together = f"read all as one data set: `{read_all}`"
        paths = {posixpath.join(self.request.path, posixpath.dirname(name)): None for name in names}
        each = ""
        if len(paths) == len(names):
            each = f", or as one task each: `{self.request.program} {shlex.join(['init', *paths])}`"
        return LabelUnclear(
            f"{printable(self.uri)}: the tables {listed(names)} name different images; give the "
            f"path of one, as in {command}, or {together}{each}"
        )

    def _may_be_table(self, name: str) -> bool:
        """Return whether a file may be a table of images, judged by its name and its columns.

        A Parquet or Arrow file with image bytes is not a table.
        """
        if says_no_labels(name):
            return False
        if get_suffix(name) not in COLUMN_FILES:
            return True
        try:
            return not holds_images(join(self.uri, name))
        except UserError:
            return False

    def _choose_table_or_folders(
        self, table: TableReading, folders: list[DataSet]
    ) -> list[DataSet]:
        """Choose between a table and class folders.

        The folders are chosen if the table does not look like a table of labels. The table is
        chosen if it has all images of the folders, and its labels agree with the folders: they are
        equal, map one to one, or the folders are only parts such as `part_1`.

        Raises:
            UserError: If the table and the folders contradict each other.
        """
        name = posixpath.basename(str(table.data_set.card.source.path))
        split = table.data_set.card.source.split
        if table.is_weak and split is not None:
            image = table.data_set.card.source.image
            by_table = self.request.command("source.format=csv", f"source.label={to_yaml(image)}")
            raise SplitUnclear(
                f"{printable(self.uri)} has class folders, and its table {quoted(name)} has "
                f"splits in {quoted(split)}; to use these splits and the classes of the folders: "
                f"`{by_table}`; to use only the folders: "
                f"`{self.request.command('source.format=folder')}`"
            )
        if table.is_weak or says_no_labels(name):
            note = f"table {quoted(name)} is not read: the folders are the classes"
            return [replace(folders[0], notes=(*folders[0].notes, note)), *folders[1:]]
        labels = self._read_folder_labels(folders)
        shared = [file for file in table.files if file in labels]
        differ = [file for file in shared if labels[file] != table.files[file]]
        classes = [cls for data_set in folders for cls in data_set.classes]
        pairs = {(labels[file], table.files[file]) for file in shared}
        are_names = len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})
        covers = len(shared) == len(labels)
        if covers and (not differ or are_names or all(map(is_part, classes))):
            return [table.data_set]
        if shared and not differ:
            problem = f"names {len(shared)} of {format_count(len(labels), 'image')}"
        elif differ:
            problem = f"gives {quoted(differ[0])} the label {quoted(table.files[differ[0]])}"
        else:
            problem = "names other images"
        as_folders = self.request.command("source.format=folder")
        as_table = self.request.command("source.format=csv")
        raise LabelUnclear(
            f"{printable(self.uri)} has class folders ({listed(classes)}), and its table "
            f"{quoted(name)} {problem}; say which is meant: `{as_folders}` or `{as_table}`"
        )

    def _read_folder_labels(self, folders: Sequence[DataSet]) -> dict[str, str]:
        """Map the path of each image below this folder to the class of its class folder."""
        labels: dict[str, str] = {}
        for data_set in folders:
            prefix = posixpath.relpath(data_set.card.source.path, self.uri)
            for one in labelled_entries(data_set.card, data_set.entries):
                if one.label is not None and _is_image(one.entry):
                    path = posixpath.normpath(posixpath.join(prefix, one.entry.name))
                    labels[path] = nfc(one.label)
        return labels

    # ---- archives --------------------------------------------------------------------------------
    def _read_archive(self) -> tuple[list[DataSet], UserError | None]:
        """Read the data set in Parquet files or tars."""
        files = [entry.name for entry in self.entries if not entry.problem]
        tars = sorted(name for name in files if get_suffix(name) == TAR_SUFFIX)
        columns = sorted(name for name in files if get_suffix(name) in COLUMN_FILES)
        try:
            columns = [name for name in columns if holds_images(join(self.uri, name))]
            if columns and tars:
                raise UserError(
                    f"{printable(self.uri)} holds images in {listed(columns)} and in "
                    f"{listed(tars)}; give the path of one kind"
                )
            if columns:
                return [read_columns(self._group_files(columns))], None
            if tars:
                return [read_shards(self._group_files(tars))], None
        except UserError as error:
            return [], error
        return [], self._find_column_error(files)

    def _find_column_error(self, files: Sequence[str]) -> UserError | None:
        """Return the error for Parquet files without image bytes, if there are such files."""
        columns = [name for name in files if get_suffix(name) in COLUMN_FILES]
        if not columns:
            return None
        try:
            read_columns(self._group_files(sorted(columns)))
        except UserError as error:
            return error
        return None

    def _group_files(self, names: Sequence[str]) -> Files:
        return Files(self.request, self.uri, self.name, names, self.uri)

    # ---- errors ----------------------------------------------------------------------------------
    def _ambiguous_error(self, ways: Sequence[Sequence[DataSet]]) -> UserError:
        texts = [way[0].layout for way in ways]
        commands = [
            self.request.command(f"source.format={way[0].card.source.format}") for way in ways
        ]
        return UserError(
            f"{printable(self.uri)} can be read as {' and as '.join(texts)}; choose one: "
            f"{' or '.join(f'`{command}`' for command in commands)}"
        )

    def _choose_error(
        self,
        table: UserError | None,
        archive: UserError | None,
        folders: UserError | None,
    ) -> UserError:
        """Choose the most helpful error: of a table, else of archives, else of folders.

        `NoTable` is a weak error: it comes first only if there is no error of folders. Otherwise it
        comes after archives, and before folders only if these have at most one class.
        """
        if table is not None and (not isinstance(table, NoTable) or folders is None):
            return table
        if archive is not None:
            return archive
        if table is not None and folders is not None and _is_about_one_class(folders):
            return table
        return folders or table or self._no_data_set_error()

    def _add_location(self, error: UserError) -> UserError:
        text = str(error)
        where = printable(self.uri)
        if where in text:
            return error
        kind = SplitUnclear if isinstance(error, MaybeNoClass) else type(error)
        return kind(f"{where}: {text}")

    def _no_data_set_error(self) -> UserError:
        """Return the error that lists the contents of this folder and the accepted layouts."""
        holds = f"{printable(self.uri)} {describe_contents(self.entries)}"
        return NoClasses(
            f"{holds}, which is not a data set of images with labels; {self._suggest_remedy()}"
        )

    def _suggest_remedy(self) -> str:
        """Suggest a command for a folder without a data set, or list the accepted layouts."""
        program = self.request.program
        top = [entry for entry in self.entries if "/" not in entry.name]
        packed = [join(self.uri, entry.name) for entry in top if is_packed(entry.name)]
        if packed and not any(map(_is_image, self.entries)) and is_local(self.uri):
            # several archives are parts of one data set, and are unpacked together
            command = build_unpack_command(packed, self.uri if len(packed) > 1 else "", program)
            if command is not None:
                return f"unpack it: `{command}`"
        links = [entry.name for entry in top if "folder outside" in (entry.problem or "")]
        if links and len(links) == len(self.entries) and is_local(self.uri):
            targets = {os.path.realpath(os.path.join(self.uri, name)) for name in links}
            parents = {posixpath.dirname(path) for path in targets}
            if len(parents) == 1:
                return f"give the folder they lead to: `{program} {shlex.join(['init', *parents])}`"
        tables = [e.name for e in self.entries if get_suffix(e.name) in TEXT_TABLES - {".txt"}]
        named = [name for name in tables if says_no_labels(name)]
        if named:
            command = self.request.command(path=join(self.request.path, named[0]))
            return (
                f"its tables {listed(named)} are named like predictions or lists of classes; if "
                f"one has the labels, give its path: `{command}`"
            )
        return ACCEPTED_LAYOUTS


def _assign_tables(readings: Sequence[tuple[str, TableReading]]) -> dict[str, list[str]]:
    """Return the tables of each split: as they were read, or by the words in their paths.

    If no table would be train, all are.
    """
    by_split: dict[str, list[str]] = {}
    for name, reading in readings:
        source = reading.data_set.card.source
        if get_suffix(source.path) in TABLE_SUFFIXES:  # one table
            role = find_role(name.rpartition(".")[0]) or "train"
            by_split.setdefault("test" if role == "held out" else role, []).append(name)
            continue
        for split in source.named_splits():
            by_split.setdefault(split, []).extend(source.list_parts(split))
    return by_split if "train" in by_split else {"train": [name for name, _ in readings]}


def _has_other_labels(tables: Tables, column: str, classes: set[str]) -> bool:
    """Return whether values of a column repeat like labels, and are not the given classes."""
    texts = [row.values[0] or "" for row in read_rows(tables.uri(tables.first), [column])]
    labels = {*texts} - {""}
    return 2 <= len(labels) <= len(texts) // 2 and not labels <= classes


def _get_stem(name: str) -> str:
    return posixpath.basename(name).rpartition(".")[0]


def _is_in_folders(name: str, folders: Sequence[Folder]) -> bool:
    return any(name.startswith(f"{folder.name}/") for folder in folders)


def _is_label_table(tables: Tables) -> bool:
    words = tokenize_name(_get_stem(tables.first))
    return any(tables.names.values()) or any(word.lower() in LABEL_TABLES for word in words)


def _is_about_one_class(error: UserError) -> bool:
    # `source_classes` raises a plain UserError with this text
    return "has one class" in str(error) or isinstance(error, NoClasses)


def describe_contents(entries: Sequence[Entry]) -> str:
    """Describe the contents of a folder as a predicate, for example `holds 2 folders (a, b)`."""
    seen = [entry for entry in entries if entry.problem != HIDDEN]
    top = [entry for entry in seen if "/" not in entry.name]
    folders = sorted({e.name.partition("/")[0] for e in seen if "/" in e.name})
    loose = sum(map(_is_image, top))
    below = sum(map(_is_image, seen)) - loose
    links = [entry.name for entry in top if "folder" in (entry.problem or "")]
    files = [e.name for e in top if not _is_image(e) and e.name not in links]
    parts: list[str] = []
    if loose:
        parts.append(f"{format_count(loose, 'image')} in no folder of a class")
    if folders:
        parts.append(f"{format_count(len(folders), 'folder')} ({listed(folders)})")
    if below:
        parts.append(f"{format_count(below, 'image')} below")
    if links:
        parts.append(f"links to folders, which are not followed ({listed(links)})")
    others = sorted({get_suffix(e.name) for e in seen if "/" in e.name and not _is_image(e)} - {""})
    if not below and others:
        parts.append(f"files {', '.join(map(printable, others[:4]))} in them, which are not read")
    if files:
        parts.append(f"{format_count(len(files), 'other file')} ({listed(files)})")
    return f"holds {', '.join(parts)}" if parts else "is empty"
