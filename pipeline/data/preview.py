"""The preview of a data set: a page with images of each class and split and the account of files.

The account is the outcome for every file (see `pipeline.data.account`). On this page, the user can
check that splits and labels were detected correctly.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from pipeline import templates
from pipeline.config.text import format_count
from pipeline.data.account import Account
from pipeline.data.cards import Card
from pipeline.data.image_checks import open_any
from pipeline.data.names import printable
from pipeline.data.splits import SPLITS
from workers.data.decoding import MAX_PIXELS, to_rgb

PREVIEW = "preview.html"
MAX_PER_GROUP = 8  # pictures per class and split
MAX_PICTURES = 800  # pictures per data set, see `limit_per_group`
SIDE = 72  # width and height of a picture in pixels
MAX_CAPTION_LENGTH = 60  # characters of the file name under a picture
# start of each preview; `starter` overwrites a file only if it starts like this
PAGE_START = '<!doctype html><html lang="en"><meta charset="utf-8"><title>Preview: '


class PreviewImage(NamedTuple):
    """An image on the page.

    Attributes:
        split: Split of the image.
        label: Class of the image.
        name: Name of the image in messages: the path, or the row of a table.
        thumbnail: A small JPEG, or b"" if the image cannot be decoded.
    """

    split: str
    label: str
    name: str
    thumbnail: bytes

    @classmethod
    def from_image(cls, card: Card, split: str, label: str, name: str, data: bytes) -> PreviewImage:
        """Create the preview of an image.

        Args:
            card: Card of the data set.
            split: Split of the image.
            label: Class of the image.
            name: Name of the image.
            data: Bytes of the image.
        """
        return cls(split, label, name, _make_thumbnail(data, card.source.range))


class PreviewSheet(NamedTuple):
    """One data set on the page.

    Attributes:
        card: Its card.
        layout: Short description of the detected layout.
        account: Account of the files.
        counts: (split, class) -> number of images.
        pictures: Some images per split and class.
        notes: Sentences at the top of the page.
    """

    card: Card
    layout: str
    account: Account
    counts: Mapping[tuple[str, str], int]
    pictures: Sequence[PreviewImage]
    notes: Sequence[str] = ()


def sample_rows(rows: pa.Table) -> pa.Table:
    """Return the first rows of each split and class for the preview.

    Each group has at most `limit_per_group` rows, and all groups together at most MAX_PICTURES.
    """
    splits = rows["split"].combine_chunks().dictionary_encode().indices.to_numpy()
    labels = rows["label"].combine_chunks().dictionary_encode().indices.to_numpy()
    if not len(rows):
        return rows
    groups = splits.astype(np.int64) * (int(labels.max()) + 1) + labels
    order = np.argsort(groups, kind="stable")
    _, firsts, sizes = np.unique(groups[order], return_index=True, return_counts=True)
    chosen: list[int] = []
    limit = limit_per_group(len(firsts))
    for first, size in zip(firsts[:MAX_PICTURES], sizes[:MAX_PICTURES], strict=True):
        chosen += order[first : first + min(int(size), limit)].tolist()
    return rows.take(pa.array(sorted(chosen)))


def limit_per_group(num_groups: int) -> int:
    """Return the maximum number of pictures per class and split, for at most MAX_PICTURES in all.

    It is at least 1, so more than MAX_PICTURES groups can have more pictures in all.
    """
    return max(min(MAX_PER_GROUP, MAX_PICTURES // max(num_groups, 1)), 1)


def render_preview(
    card: Card,
    account: Account,
    counts: Mapping[tuple[str, str], int],
    pictures: Sequence[PreviewImage],
) -> str:
    """Render the page of one ingested data set.

    Args:
        card: Card of the data set.
        account: Account of the files.
        counts: (split, class) -> number of images.
        pictures: Some images per split and class.
    """
    return render_sheets(
        [PreviewSheet(card, f"format {card.source.format}", account, counts, pictures)]
    )


def render_sheets(sheets: Sequence[PreviewSheet]) -> str:
    """Render a page of data sets. Names are escaped, and the page loads no other files."""
    return templates.render(
        "preview.html",
        title=", ".join(sheet.card.name for sheet in sheets),
        sheets=[_sheet_values(sheet) for sheet in sheets],
    )


def _sheet_values(sheet: PreviewSheet) -> dict[str, Any]:
    """Return the values of one data set in `preview.html`."""
    # notes are at the top of the page
    lines = [line for line in sheet.account.lines() if not line.startswith("note: ")]
    by_group: dict[tuple[str, str], list[PreviewImage]] = {}
    for picture in sheet.pictures:
        by_group.setdefault((picture.split, picture.label), []).append(picture)
    splits: list[dict[str, Any]] = []
    for split in SPLITS:
        counts = {label: n for (of, label), n in sheet.counts.items() if of == split}
        if not counts:
            continue
        groups: list[dict[str, Any]] = []
        for label, number in sorted(counts.items()):
            figures = [_figure_values(picture) for picture in by_group.get((split, label), [])]
            count = format_count(number, "image")
            groups.append({"label": printable(label), "count": count, "figures": figures})
        total = format_count(sum(counts.values()), "image")
        title = f"{split}: {total} of {format_count(len(counts), 'class')}"
        splits.append({"title": title, "groups": groups})
    return {
        "name": sheet.card.name,
        "layout": printable(sheet.layout),
        "notes": [printable(note) for note in (*sheet.notes, *sheet.account.notes)],
        "account": "\n".join(map(printable, lines)),
        "splits": splits,
    }


def _figure_values(picture: PreviewImage) -> dict[str, str]:
    """Return the values of one image in `preview.html`."""
    name = printable(picture.name)
    short = name if len(name) <= MAX_CAPTION_LENGTH else f"...{name[-MAX_CAPTION_LENGTH:]}"
    image = base64.b64encode(picture.thumbnail).decode()
    return {"name": name, "caption": short, "image": image}


def _make_thumbnail(data: bytes, value_range: tuple[float, float] | None) -> bytes:
    """Create a small JPEG of an image, or return b"" if it cannot be decoded."""
    try:
        image = open_any(data, MAX_PIXELS)
        image.draft("RGB", (SIDE, SIDE))  # decodes a JPEG at a smaller size
        image = to_rgb(image, value_range)
        image.thumbnail((SIDE, SIDE))
    except Exception:  # Pillow's plugins raise almost anything
        return b""
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=90, subsampling=0)
    return buffer.getvalue()
