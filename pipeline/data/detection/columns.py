"""Which columns of a table hold the image, the label and the split, by their names and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeline.data.detection.data_set import Request, quoted, split_of
from pipeline.data.formats.base import IMAGE_SUFFIXES
from pipeline.data.listing import suffix_of
from workers.errors import UserError

# in lower case, without signs between words; the first that occurs is taken before the others
IMAGE_COLUMNS = (
    "image",
    "img",
    "file",
    "path",
    "filename",
    "filepath",
    "imagepath",
    "imgpath",
    "imagefile",
    "imagename",
    "imageid",
    "imgname",
    "imgid",
    "photo",
    "picture",
    "id",
)
LABEL_COLUMNS = ("label", "labels", "class", "classname", "target", "category", "labelname", "y")
SPLIT_COLUMNS = ("split", "set", "subset", "partition", "phase", "usage", "dataset")
ONE = frozenset(("1", "1.0"))
ZERO_OR_ONE = ONE | {"0", "0.0"}
MOST_NAMED = 12  # columns that a sentence lists


def plain(name: str) -> str:
    """Return the name of a column in lower case, without signs between its words."""
    return name.lower().replace("_", "").replace("-", "").replace(" ", "").replace(".", "")


class LabelUnclear(UserError):
    """Which column of a table is the label is not clear, and the images that it names are there."""


class TableMeant(LabelUnclear):
    """The same, and the folders that the images lie in are no classes: the table names files."""


def image_column(request: Request, where: str, names: Sequence[str], images: Sequence[str]) -> str:
    """Return the column of images.

    where: the table, for errors. images: the columns whose values look like images. Raise
    `UserError` where that is not clear.
    """
    if request.image is not None:
        return _asked(request.image, where, names)
    candidates = list(images)
    if not candidates:
        candidates = [name for name in names if plain(name) in IMAGE_COLUMNS]
    if len(candidates) == 1:
        return candidates[0]
    for known in IMAGE_COLUMNS:
        matching = [name for name in candidates if plain(name) == known]
        if matching:
            return matching[0]
    raise _unclear(request, where, "image", names, candidates)


def label_column(
    request: Request,
    where: str,
    names: Sequence[str],
    image: str,
    declared: Mapping[str, Sequence[str]] | None = None,
    likely: Sequence[str] = (),
) -> str:
    """Return the column of labels.

    declared: classes of the columns that the table itself declares to be labels; of several, that
    with the most classes is taken. likely: columns that an error proposes first. Raise `UserError`
    where that is not clear.
    """
    if request.label is not None:
        return _asked(request.label, where, names)
    other_columns = [name for name in names if name != image]
    exact = [name for name in other_columns if plain(name) == LABEL_COLUMNS[0]]
    if len(exact) == 1:
        return exact[0]
    candidates = _with_most_classes(declared or {})
    if not candidates:
        candidates = [name for name in other_columns if plain(name) in LABEL_COLUMNS]
    if not candidates and len(other_columns) == 1:
        candidates = other_columns
    if len(candidates) == 1:
        return candidates[0]
    raise _unclear(request, where, "label", names, candidates or likely)


def _with_most_classes(declared: Mapping[str, Sequence[str]]) -> list[str]:
    most = max((len(classes) for classes in declared.values()), default=0)
    return [name for name, classes in declared.items() if len(classes) == most]


def columns_of_classes(values: Mapping[str, Sequence[str | None]]) -> list[str]:
    """Return the columns whose values repeat, as labels do: those with the fewest come last."""
    counts: dict[str, int] = {}
    for name, texts in values.items():
        distinct = set(filter(None, texts))
        if 2 <= len(distinct) < max(len(texts), 3):
            counts[name] = len(distinct)
    return sorted(counts, key=lambda name: -counts[name])


def one_hot_columns(values: Mapping[str, Sequence[str | None]]) -> list[str]:
    """Return the columns that are a class each: in every row, one of them is 1 and all others 0."""
    names = [name for name, texts in values.items() if set(texts) <= ZERO_OR_ONE]
    if len(names) < 2:
        return []
    for row in zip(*(values[name] for name in names), strict=True):
        if sum(text in ONE for text in row) != 1:
            return []
    return names


def split_column(values: Mapping[str, Sequence[str | None]]) -> str | None:
    """Return the column of splits, if one is called so and holds nothing else.

    values: of the first rows, by column.
    """
    for name in SPLIT_COLUMNS:
        for column, texts in values.items():
            is_split = all(text is not None and split_of(text) for text in texts)
            if plain(column) == name and texts and is_split:
                return column
    return None


def columns_of_paths(values: Mapping[str, Sequence[str | None]]) -> list[str]:
    """Return the columns most of whose values are called like images."""
    columns: list[str] = []
    for column, texts in values.items():
        count = sum(suffix_of(text or "") in IMAGE_SUFFIXES for text in texts)
        if count * 2 > len(texts):
            columns.append(column)
    return columns


def _asked(column: str, where: str, names: Sequence[str]) -> str:
    if column in names:
        return column
    raise UserError(
        f"{where} has no column {column!r}; its columns are {_listed(names)}; name one of these"
    )


def _unclear(
    request: Request, where: str, kind: str, names: Sequence[str], candidates: Sequence[str]
) -> UserError:
    likely = candidates or [name for name in names if plain(name) not in SPLIT_COLUMNS]
    if not likely:
        return UserError(f"{where} has no columns; give a table of images and labels")
    example = request.command(**{kind: likely[-1]})
    return UserError(
        f"{where} has the columns {_listed(names)}, and which is the {kind} is not clear; say it, "
        f"as in `{example}`"
    )


def _listed(names: Sequence[str]) -> str:
    text = ", ".join(quoted(name) for name in names[:MOST_NAMED])
    return f"{text}, ..." if len(names) > MOST_NAMED else text


def one_hot_labels(where: str, columns: Sequence[str]) -> UserError:
    """Return the error of a table that has a column for each class."""
    return UserError(
        f"{where} has a column for each class ({_listed(columns)}) with a 1 in one of them, and "
        "labels are read from one column; add a column `label` with the name of the class"
    )


def too_many_values(
    where: str, label: str, other_columns: Sequence[str], request: Request
) -> UserError:
    """Return the error of a label column that has another value in most rows, or no names.

    other_columns: columns that may be meant instead, the likeliest last.
    """
    remedy = "give a table with a class for each image"
    if other_columns:
        remedy = f"if another column is meant: `{request.command(label=other_columns[-1])}`"
    return UserError(
        f"{where}: the values of column {quoted(label)} are no classes (too many, or neither names "
        f"nor whole numbers); {remedy}"
    )
