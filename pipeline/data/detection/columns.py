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
MOST_NAMED = 12  # columns that a sentence lists


def plain(name: str) -> str:
    """Return the name of a column in lower case, without signs between its words."""
    return name.lower().replace("_", "").replace("-", "").replace(" ", "").replace(".", "")


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
    request: Request, where: str, names: Sequence[str], image: str, labels: Sequence[str] = ()
) -> str:
    """Return the column of labels.

    labels: the columns that the table itself declares to be labels. Raise `UserError` where that is
    not clear.
    """
    if request.label is not None:
        return _asked(request.label, where, names)
    other_columns = [name for name in names if name != image]
    exact = [name for name in other_columns if plain(name) == LABEL_COLUMNS[0]]
    if len(exact) == 1:
        return exact[0]
    candidates = list(labels) or [name for name in other_columns if plain(name) in LABEL_COLUMNS]
    if not candidates and len(other_columns) == 1:
        candidates = other_columns
    if len(candidates) == 1:
        return candidates[0]
    raise _unclear(request, where, "label", names, candidates)


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


def too_many_values(
    where: str, label: str, other_columns: Sequence[str], request: Request
) -> UserError:
    """Return the error of a label column that has another value in most rows, or no names.

    other_columns: columns that may be meant instead.
    """
    remedy = "give a table with a class for each image"
    if other_columns:
        remedy = f"if another column is meant: `{request.command(label=other_columns[0])}`"
    return UserError(
        f"{where}: the values of column {quoted(label)} are no classes (too many, or neither names "
        f"nor whole numbers); {remedy}"
    )
