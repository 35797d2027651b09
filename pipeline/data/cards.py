"""Cards: descriptions of data sets with source, licence and contents.

`Card` is the schema of a card's file. `card_files` reads the files.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, field_validator, model_validator

from pipeline.data.archives import Archive
from pipeline.data.names import nfc
from pipeline.data.splits import IGNORE, SPLITS, Split, SplitKey
from workers.job import Frozen, Neutral, key_inputs

# each name is a module in pipeline/data/formats
SourceFormat = Literal["folder", "csv", "parquet", "tar", "webdataset", "sklearn", "torchvision"]
Numbers = Literal["places", "names"]  # meaning of a label that is a number, see `Source.numbers`
MAX_CLASS_CHARACTERS = 200  # of the name of a class
# Default of `max_pixels_per_byte`. Intact 8-bit PNG (at most 1032 pixels per byte) and JPEG (512)
# stay below it. PNG of 1 bit, and WebP and GIF of one colour, can exceed it.
MAX_PIXELS_PER_BYTE = 2000
# Separator of a list in one text, as in WebDataset's lists of shards. The product avoids a literal
# that security checkers take for the IPv6 address of all interfaces.
LIST_MARK = 2 * ":"
FROM_SOURCE = "from_source"  # value of `classes`: take them from the source
# endings of the names of compressed files
COMPRESSED = re.compile(r"\.(tgz|tbz2?|txz|tzst|tar\.[A-Za-z0-9]+|gz|bz2|xz|zst|lz4|zip)$", re.I)


def _join_parts(parts: Any) -> Any:
    """Join a list of texts and integers into one text, and convert a single integer to text.

    Other values are returned unchanged; the validation checks them.
    """
    if isinstance(parts, (list, tuple)) and all(isinstance(part, (str, int)) for part in parts):
        return LIST_MARK.join(map(str, parts))
    return str(parts) if type(parts) is int else parts


_ONE_OR_MORE = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
# The parts of a split: folders, files, globs or values. A card's file has one text or a list of
# texts; a list is stored as one text, joined by LIST_MARK.
Parts = Annotated[str, BeforeValidator(_join_parts), WithJsonSchema(_ONE_OR_MORE)]


class MoreFolder(Frozen):
    """A further folder of class folders with images of the same data set."""

    path: str = Field(min_length=1, description="folder or URI, as `source.path`")
    splits: dict[Split, Parts] = Field(
        {"train": "."}, min_length=1, description="as `source.splits`, below this path"
    )


class Source(Frozen):
    """The location and the layout of the raw data."""

    format: SourceFormat = Field(description="how the raw data is laid out")
    path: str = Field(
        "",
        description="folder or URI; ${NAME:-default} is replaced from the environment; a relative "
        "path starts at the folder of the card's file, for cards in `datasets` at the folder above",
    )
    name: str = Field("", description="data set inside scikit-learn or torchvision")
    splits: dict[SplitKey, Parts] = Field(
        {"train": "train", "test": "test"},
        description="sub-folder, glob or table of each split below `path`, or a list of them; "
        "`{label}` stands for the folder of a class; under `ignore`: data that is not read; for "
        "webdataset: paths below `path`, absolute paths or URLs, with braces; if `split` is set: "
        "the values of that column; a card without `train` can only be used for testing",
    )
    image: str = Field(
        "image",
        description="column of the image (bytes, or a struct with `bytes`) in Parquet, of its path "
        "in csv; extensions of images in webdataset, `jpg;png;webp`",
    )
    label: str | None = Field(
        "label",
        min_length=1,
        description="column of the label in Parquet and csv; in tar and webdataset: extension of "
        "the label member, or json:FIELD; null: images have no labels, and the card has one class, "
        "to which all of them belong",
    )
    split: Annotated[str | None, BeforeValidator(_join_parts), Neutral(None)] = Field(
        None,
        min_length=1,
        description="column of the split in csv (`path` then names the table) and Parquet, "
        "json:FIELD in tar; `splits` gives its values; several flag columns: the split is the "
        "column whose value is 1; in csv, if this is the image column: a folder of the image's "
        "path, or the start of its file name, names the split",
    )
    numbers: Annotated[Numbers | None, Neutral("places")] = Field(
        None,
        description="what a label that is a number means: `names`: the name of a class, such as "
        "102; `places`: a place in `classes`, from 0; unset: a name, and refused if it could be "
        "both",
    )
    files: Annotated[Parts, Neutral("{}")] = Field(
        "{}",
        description="in csv, path of an image relative to the folder of its table: `{}` stands for "
        "the cell of the image column, as in `images/{}.jpg`, `{label}` and `{split}` for the "
        "label and split of the row; `**/{}`: anywhere below; of several patterns, exactly one "
        "must match a file",
    )
    range: Annotated[tuple[float, float] | None, Neutral(None)] = Field(
        None,
        description="the values of black and white in images of more than 8 bits, such as "
        "[0, 4095]; unset: those that the format declares (16 bits: 65535, float: 0 to 1)",
    )
    more: Annotated[tuple[MoreFolder, ...], Neutral(())] = Field(
        (),
        description="further folders of class folders, each with `path` and `splits`, whose images "
        "belong to the same classes; for format folder",
    )

    @field_validator("range")
    @classmethod
    def _check_range(cls, limits: tuple[float, float] | None) -> tuple[float, float] | None:
        if limits is not None and not limits[0] < limits[1]:
            raise ValueError(f"range is {list(limits)}; the second number must be the larger one")
        return limits

    @model_validator(mode="after")
    def _check_more(self) -> Source:
        if self.more and self.format != "folder":
            raise ValueError(
                f"source.more works only with format folder, and the format is {self.format}; "
                "leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_shards(self) -> Source:
        if self.format != "webdataset":
            return self
        for shards in self.splits.values():
            check_shard_patterns(shards)
        if not "".join(self.splits.values()).strip(": "):
            raise ValueError("splits name no shard; write shard-{000000..000099}.tar")
        return self

    def file_patterns(self) -> tuple[str, ...]:
        """Return the patterns of `files`, in the order of the card."""
        return tuple(part.strip() for part in self.files.split(LIST_MARK))

    def split_columns(self) -> tuple[str, ...]:
        """Return the columns with the split; () without such a column."""
        return tuple(self.split.split(LIST_MARK)) if self.split else ()

    def list_parts(self, split: SplitKey) -> tuple[str, ...]:
        """Return the folders, files, globs or values of a split, in the order of the card.

        The result is () if `splits` lacks the split.
        """
        text = self.splits.get(split)
        return () if text is None else tuple(part.strip() for part in text.split(LIST_MARK))

    def named_splits(self) -> tuple[Split, ...]:
        """Return the splits for which the card names at least one part, train first."""
        return tuple(split for split in SPLITS if "".join(self.list_parts(split)))


def check_shard_patterns(patterns: str) -> None:
    """Raise ValueError if shards are compressed or are the output of a program (`pipe:`).

    Images in compressed shards cannot be read by offset.
    """
    for pattern in patterns.split(LIST_MARK):
        if pattern.strip().startswith("pipe:"):
            raise ValueError(
                f"{pattern.strip()!r:.200} would run a program, which no card may; name the "
                "address that it reads from (s3://, gs://, hf://, https://), or download the shards"
            )
        if COMPRESSED.search(pattern.strip()):
            raise ValueError(
                f"{pattern.strip()!r:.200} is compressed; webdataset shards are used in place, so "
                "their images are read by offset, which compression prevents; unpack it (the .tar "
                "is hardly larger), or set format: tar to copy the images"
            )


class Counts(Frozen):
    """Numbers of images by split."""

    train: int = Field(ge=0, description="train images")
    test: int = Field(ge=0, description="test images")
    val: Annotated[int | None, Neutral(None)] = Field(
        None, ge=0, description="validation images; null: any number"
    )

    def by_split(self) -> dict[Split, int]:
        """Return the numbers by split, without `val` if it is None."""
        numbers = {split: getattr(self, split) for split in SPLITS}
        return {split: number for split, number in numbers.items() if number is not None}


class Card(Frozen):
    """The description of one data set.

    The order of `classes` is the class order. `class_order_seed` permutes it.
    """

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", description="name of the data set in configs"
    )
    title: str = Field("", description="the data set in a few words")
    source: Source = Field(description="path and layout of the raw data")
    licence: str = Field(description="the licence of the images, as their authors state it")
    cite: str = Field("", description="the paper, or the page, to be cited")
    classes: tuple[str, ...] = Field(
        min_length=1,
        description="`from_source` stands for those of the source, sorted: the names of its train "
        "folders, or the labels of its train images",
    )
    num_classes: int | None = Field(None, gt=0, description="how many classes there must be")
    class_order_seed: int | None = Field(
        None, ge=0, le=2**32 - 1, description="permutes `classes` by numpy's RandomState(seed)"
    )
    test_fraction: float = Field(
        0.0, ge=0, lt=1, description="share held out as test if the source has no test split"
    )
    hold_out: Annotated[Literal["rank", "threshold"], Neutral("rank")] = Field(
        "rank",
        description="how images are held out for test and validation; `rank`: of each class an "
        "exact share, so that new images move old ones from one side to the other; `threshold`: "
        "each image decides by its own digest and stays on its side, so that shares are not exact",
    )
    counts: Counts | None = Field(
        None,
        description="expected number of images, without those that ingest rejects (corrupt, "
        "unlabelled, dropped duplicates)",
    )
    content: str | None = Field(None, description="expected sha256 of the ingested index")
    duplicates: Literal["keep", "drop"] = Field(
        "keep", description="exact copies inside a split are listed; `drop` leaves them out"
    )
    per_class: Annotated[Counts | None, Neutral(None)] = Field(
        None, description="at most so many images of each class, by hash of the key"
    )
    leaks: Annotated[Literal["refuse", "allow"], Neutral("refuse")] = Field(
        "refuse",
        description="exact copies of train images among the test images are listed; `refuse`: if "
        "they are more than 1 % of the test images, that is an error",
    )
    max_bad_fraction: float = Field(
        0.01, ge=0, le=1, description="largest share of corrupt or unlabelled images"
    )
    max_pixels: int = Field(
        50_000_000, gt=0, description="an image with more pixels is refused as corrupt"
    )
    max_pixels_per_byte: Annotated[int, Neutral(2000)] = Field(
        MAX_PIXELS_PER_BYTE,
        gt=0,
        description="an image of over a million pixels with more pixels per byte than this is "
        "refused as corrupt: such a small file would take much memory and time",
    )
    shard_images: int = Field(1000, gt=0, description="images per shard")
    without_classes: Annotated[tuple[str, ...], Neutral(())] = Field(
        (), description="classes of the source that are left out, with all of their images"
    )
    without_images: Annotated[str, Neutral("")] = Field(
        "",
        description="text file, from the folder of the card's file, that names images to leave "
        "out, one a line: the path below the source, or the sha256 of the image",
    )
    archive: Annotated[Archive | None, Neutral(None)] = Field(
        None, description="the official files, and where to download them by hand"
    )
    verified: Annotated[str, Neutral("")] = Field(
        "",
        description="what was checked against the real data; empty: nothing, so that counts and "
        "classes are those that its authors state",
    )

    def order(self) -> tuple[str, ...]:
        """Return the classes in stream order: `order()[i]` is the name of class i.

        The classes in `without_classes` are left out.
        """
        classes = self.classes
        if self.class_order_seed is not None:
            classes = permuted(classes, self.class_order_seed)
        left_out = frozenset(map(nfc, self.without_classes))
        return tuple(name for name in classes if nfc(name) not in left_out)

    def images_left_out(self) -> frozenset[str]:
        """Return the names and digests of the images that the card excludes.

        `without_images` must hold the lines of the list, not its file name. `card_files` replaces
        the name by the lines, so that the lines are part of the card's identity.
        """
        return frozenset(filter(None, self.without_images.split("\n")))

    def identity(self) -> str:
        """Return the hash of everything on the card that can change the result of ingest.

        The path of the source is not part of the hash, because data can move. The data itself is
        identified by a fingerprint of its files (`graph.raw_data`).
        """
        body = key_inputs(self, ("title", "licence", "cite", "archive", "verified", "leaks"))
        source = key_inputs(self.source, ("path",))
        # Earlier versions had the default `places`. If `numbers` is unset, labels that `places`
        # would read differently are refused, so both settings give the same result and the same
        # hash as before.
        if self.source.numbers != "names":
            source.pop("numbers", None)
        for folder in source.get("more", ()):
            folder.pop("path")
        if self.source.split is not None:
            # Earlier versions left out the rows that a card now names under `ignore`. So `ignore`
            # does not change the result and is not part of the hash.
            source["splits"].pop(IGNORE, None)
        body |= {"source": source}
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def permuted(classes: tuple[str, ...], seed: int) -> tuple[str, ...]:
    """Return classes permuted by numpy's `RandomState(seed)`."""
    import numpy  # lazy import: only a seed needs numpy

    generator = numpy.random.RandomState(seed)
    return tuple(classes[index] for index in generator.permutation(len(classes)))
