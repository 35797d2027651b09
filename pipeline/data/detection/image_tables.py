"""Data sets in tables of paths and labels, beside the images that they name."""

from __future__ import annotations

import posixpath
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from pipeline.data.detection.columns import (
    LabelUnclear,
    TableMeant,
    columns_of_classes,
    columns_of_paths,
    image_column,
    label_column,
    one_hot_columns,
    one_hot_labels,
    split_column,
    too_many_values,
)
from pipeline.data.detection.data_set import (
    MAX_CLASSES,
    DataSet,
    Request,
    check_classes,
    choose_splits,
    counted,
    quoted,
    sorted_labels,
)
from pipeline.data.detection.image_folders import (
    TableFile,
    present_texts,
    some_texts,
    split_word,
    where_images_lie,
)
from pipeline.data.detection.image_sizes import sizes_of_files
from pipeline.data.detection.tree import Folder
from pipeline.data.formats.csv import locate
from pipeline.data.listing import printable
from pipeline.data.tables import column_names, read_rows
from workers.errors import UserError
from workers.storage.artifact import join, parent

FIRST_ROWS = 200  # that columns are guessed from
MOST_ROWS = 20_000_000
MOST_TRIED = 12  # columns that may name images
MOST_TABLES = 20  # of a folder that are looked into


@dataclass(frozen=True)
class Guess:
    """The columns of a table, and where its images lie (see `Source.files`).

    samples: values of the image column. other_columns: that may hold labels too, the likeliest
    last.
    """

    image: str
    label: str
    split: str | None
    files: tuple[str, ...]
    samples: tuple[str, ...]
    other_columns: tuple[str, ...]


def table_at(uri: str, name: str, request: Request, folder: Folder) -> DataSet:
    """Return the data set of one table.

    folder: the one that holds the table. Raise `UserError` where it is none.
    """
    file = TableFile(parent(uri), posixpath.basename(uri))
    guess = guess_columns(file, request, folder)
    return _data_set(name, [("train", file)], guess, uri, request)


def tables_of(
    parts: Mapping[str, TableFile], folder: Folder, name: str, request: Request
) -> DataSet:
    """Return the data set of a table for each split; the first is that of train.

    folder: the one that holds the table of train. Raise `UserError` where they are none.
    """
    train = parts["train"]
    guess = guess_columns(train, request, folder)
    path = train.uri if len(parts) == 1 else train.folder
    return _data_set(name, list(parts.items()), guess, path, request)


def tables_in(uri: str, folder: Folder, name: str, request: Request) -> DataSet:
    """Return the data set of the tables in a folder.

    Raise `UserError` where none of them fits: a `LabelUnclear` where one names images that are
    there.
    """
    files = {table: TableFile(uri, table) for table in folder.tables}
    by_split = {split_word(table): table for table in files}
    if "train" in by_split:
        train = files[by_split["train"]]
        guess = guess_columns(train, request, folder)
        parts = [("train", train)]
        for split in ("test", "val"):
            table = by_split.get(split)
            if table is None or len(parts) > 1:
                continue
            test_guess = _guess_of_test(files[table], guess, folder)
            if test_guess is not None:
                parts.append(("test", files[table]))
                guess = test_guess
        return _data_set(name, parts, guess, uri, request, _unused(files, parts))
    errors: list[UserError] = []
    for table in sorted(files)[:MOST_TABLES]:
        try:
            guess = guess_columns(files[table], request, folder)
        except UserError as error:
            errors.append(error)
            continue
        parts = [("train", files[table])]
        return _data_set(name, parts, guess, files[table].uri, request, _unused(files, parts))
    for kind in (TableMeant, LabelUnclear):
        for table_error in errors:
            if isinstance(table_error, kind):
                raise table_error
    raise errors[0]


def _guess_of_test(file: TableFile, guess: Guess, folder: Folder) -> Guess | None:
    """Return what is known of the tables with that of test; None where it lacks labels or images.

    guess: of the table of train.
    """
    if not {guess.image, guess.label} <= set(column_names(file.uri)):
        return None
    rows = islice(read_rows(file.uri, [guess.image]), FIRST_ROWS)
    texts = some_texts([row.values[0] for row in rows])
    try:
        files = where_images_lie(file, texts, folder)
    except UserError:
        return None
    if files == guess.files:
        return guess
    train = TableFile(file.folder, "")
    if present_texts(file, texts, guess.files) or present_texts(train, guess.samples, files):
        return None  # the same names in two folders: a card could not tell which are meant
    return replace(guess, files=(*guess.files, *files))


def _unused(files: Mapping[str, TableFile], parts: Sequence[tuple[str, TableFile]]) -> list[str]:
    used = {file.name for _, file in parts}
    return [name for name in sorted(files) if name not in used]


# ---- columns -------------------------------------------------------------------------------------
def guess_columns(file: TableFile, request: Request, folder: Folder) -> Guess:
    """Return what the columns of a table mean, and where its images lie.

    Raise `UserError` where that is not clear, or where the images are not there.
    """
    where = printable(file.uri)
    names = column_names(file.uri)
    rows = [row.values for row in islice(read_rows(file.uri, names), FIRST_ROWS)]
    if not rows:
        raise UserError(f"{where} has no rows; give a table of images and labels")
    values = {name: [row[index] for row in rows] for index, name in enumerate(names)}
    split = split_column(values)
    image = _image_of(file, request, folder, values)
    other_columns = [name for name in names if name != split]
    texts = some_texts(values[image])
    other_values = {name: values[name] for name in other_columns}
    label = _label_of(file, request, folder, image, other_values)
    files = where_images_lie(file, texts, folder)
    remaining = {name: values[name] for name in other_columns if name not in (image, label)}
    return Guess(image, label, split, files, tuple(texts), tuple(columns_of_classes(remaining)))


def _image_of(
    file: TableFile, request: Request, folder: Folder, values: Mapping[str, Sequence[str | None]]
) -> str:
    """Return the column of images: by its name or its values, or else by the files that are there.

    values: of the first rows, by column. Raise `UserError` where that is not clear.
    """
    where = printable(file.uri)
    unclear: UserError | None = None
    image = ""
    try:
        image = image_column(request, where, list(values), columns_of_paths(values))
        if request.image is not None or _names_files(file, values[image], folder):
            return image
    except UserError as error:
        unclear = error
    if request.image is None:
        for name in list(values)[:MOST_TRIED]:
            if name != image and _names_files(file, values[name], folder):
                return name
    if unclear is not None:
        raise unclear
    return image


def _names_files(file: TableFile, texts: Sequence[str | None], folder: Folder) -> bool:
    sample = some_texts(texts)
    if len(set(sample)) * 2 <= len(sample):
        return False
    try:
        where_images_lie(file, sample, folder)
    except UserError:
        return False
    return True


def _label_of(
    file: TableFile,
    request: Request,
    folder: Folder,
    image: str,
    values: Mapping[str, Sequence[str | None]],
) -> str:
    """Return the column of labels. values: of the first rows, by column, without the split's.

    Raise `UserError` where it is not clear, a `LabelUnclear` where the images are there.
    """
    where = printable(file.uri)
    other_values = {name: texts for name, texts in values.items() if name != image}
    likely = columns_of_classes(other_values)
    try:
        return label_column(request, where, list(values), image, likely=likely)
    except UserError as error:
        unclear = error
    one_hot = one_hot_columns(other_values)
    if one_hot and request.label is None:
        unclear = one_hot_labels(where, one_hot)
    try:
        files = where_images_lie(file, some_texts(values[image]), folder)
    except UserError:
        raise unclear from None
    if files == ("{}",):
        raise LabelUnclear(str(unclear)) from None
    raise TableMeant(str(unclear)) from None


# ---- the data set --------------------------------------------------------------------------------
def _data_set(
    name: str,
    parts: Sequence[tuple[str, TableFile]],
    guess: Guess,
    path: str,
    request: Request,
    unused_tables: Sequence[str] = (),
) -> DataSet:
    where = printable(path)
    no_classes = too_many_values(where, guess.label, guess.other_columns, request)
    counts = _label_counts(parts, guess, no_classes)
    left_out = [f"table {quoted(table)}" for table in unused_tables]
    splits = {split: file.name for split, file in parts}
    source_path = parts[0][1].uri if len(parts) == 1 else parts[0][1].folder
    split_names = choose_splits(value for value in counts if value)
    train_key = "train"
    test_key = "test"
    column: str | None = None
    if guess.split is not None and len(parts) == 1 and split_names.train is not None:
        column = guess.split
        splits = {"train": split_names.train}
        train_key = split_names.train
        test_key = split_names.test or ""
        if split_names.test is not None:
            splits["test"] = split_names.test
        unused = [value for value in counts if value not in splits.values()]
        left_out += [f"rows with {quoted(value)} in {quoted(column)}" for value in unused]
    train = counts.get(train_key, Counter())
    test = counts.get(test_key, Counter())
    classes = check_classes(where, sorted_labels(label for label in train if label is not None))
    if len(classes) > 50 and len(classes) * 2 > sum(train.values()):
        raise no_classes
    num_unlabelled = train[None] + sum(n for label, n in test.items() if label not in classes)
    if num_unlabelled:
        rows = counted(num_unlabelled, "row")
        left_out.append(f"{rows} without a label, or with one that train lacks")
    source = {"format": "csv", "path": source_path, "splits": splits, "image": guess.image}
    source |= {"label": guess.label}
    if column is not None:
        source["split"] = column
    if all(label.isascii() and label.isdecimal() for label in classes):
        source["numbers"] = "names"
    if guess.files != ("{}",):
        source["files"] = list(guess.files)
        if len(guess.files) == 1:
            source["files"] = guess.files[0]
    total = sum(train.values()) + sum(test.values())
    image_counts = {"train": sum(train.values()) - train[None]}
    if "test" in splits:
        image_counts["test"] = sum(test[label] for label in classes)
    return DataSet(
        name=name,
        layout=f"a table, images in column {quoted(guess.image)}, labels in {quoted(guess.label)}",
        source=source,
        classes=classes,
        counts=image_counts,
        left_out=tuple(left_out),
        bad_fraction=num_unlabelled / max(total, 1),
        sizes=sizes_of_files(_sample_uris(parts[0][1], guess)),
    )


def _sample_uris(file: TableFile, guess: Guess) -> Iterator[str]:
    for text in guess.samples:
        name, _ = locate(text, posixpath.dirname(file.name), file.folder, guess.files[0])
        if name is not None:
            yield join(file.folder, name)


def _label_counts(
    parts: Sequence[tuple[str, TableFile]], guess: Guess, no_classes: UserError
) -> dict[str, Counter[str | None]]:
    """Return how many rows each label has, by value of the split column, else by split."""
    counts: dict[str, Counter[str | None]] = {}
    for split, file in parts:
        columns = [guess.label]
        if guess.split is not None and len(parts) == 1:
            columns.append(guess.split)
        for row in read_rows(file.uri, columns):
            if row.number > MOST_ROWS:
                raise UserError(
                    f"{printable(file.uri)} has more than {MOST_ROWS} rows; cut it into several, "
                    "or write the card by hand, see datasets/README.md"
                )
            key = row.values[1] if len(columns) > 1 else split
            counter = counts.setdefault(key or "", Counter())
            counter[row.values[0]] += 1
            if len(counter) > MAX_CLASSES:
                raise no_classes
    return counts
