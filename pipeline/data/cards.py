"""Cards: `datasets/NAME/card.yaml` describes a data set, its source, licence and contents."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
import shlex
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field, ValidationError, field_validator, model_validator

from pipeline.config import sentence_of
from pipeline.data.archives import Archive
from pipeline.data.listing import CARDS, Split, check_unicode_forms, class_folders, nfc
from pipeline.yaml_files import expand, is_path_of_card, read_yaml
from workers.errors import UserError
from workers.job import Frozen, Neutral, key_inputs
from workers.storage.filesystem import FIRST_CONTACT_S, StorageUnavailable, patience

# each name is a module in pipeline/data/formats
SourceFormat = Literal["folder", "csv", "parquet", "tar", "webdataset", "sklearn", "torchvision"]
MAX_CLASS_CHARACTERS = 200
# 8-bit PNG reaches 1032, JPEG 512; of more is what is nearly of one colour
MAX_PIXELS_PER_BYTE = 2000
# between the parts of a list of shards, as WebDataset writes it in one text; written so, it is not
# taken for the address that means every interface
LIST_MARK = 2 * ":"
COMPRESSED = re.compile(r"\.(tgz|tbz2?|txz|tzst|tar\.[A-Za-z0-9]+|gz|bz2|xz|zst|lz4|zip)$", re.I)


class Source(Frozen):
    """Where the raw data lies and how it is laid out."""

    format: SourceFormat
    path: str = Field(
        "",
        description="folder or URI; ${NAME:-default} is replaced from the environment; a relative "
        "path starts at the folder of the card's file, for cards in `datasets` at the folder above",
    )
    name: str = Field("", description="data set inside scikit-learn or torchvision")
    splits: dict[Split, str] = Field(
        {"train": "train", "test": "test"},
        description="sub-folder, glob or table of each split below `path`; for webdataset, a list "
        "of paths below `path`, absolute paths or URLs, with braces; "
        "without `train`, a card to be tested on alone",
    )
    image: str = Field(
        "image",
        description="column of the image (bytes, or a struct with `bytes`) in Parquet, of its path "
        "in csv; extensions of images in webdataset, `jpg;png;webp`",
    )
    label: str | None = Field(
        "label",
        min_length=1,
        description="column of the label in Parquet and csv; extension of the label member in "
        "tars, or "
        "json:FIELD in webdataset; "
        "null: images have no labels, and the card has one class, which all of them belong to",
    )
    split: Annotated[str | None, Neutral(None)] = Field(
        None,
        min_length=1,
        description="column of the split in csv; `splits` then gives its values, and `path` names "
        "the table",
    )
    numbers: Annotated[Literal["places", "names"], Neutral("places")] = Field(
        "places",
        description="what a label that is a number means in Parquet and csv: a place in `classes`, "
        "from 0, or the name of a class, such as 102",
    )
    files: Annotated[str, Neutral("{}")] = Field(
        "{}",
        description="in csv, where an image lies from the folder of its table: `{}` stands for "
        "what its row says, as in `images/{}.jpg`",
    )

    @field_validator("splits", mode="before")
    @classmethod
    def _join_lists(cls, splits: Any) -> Any:
        if not isinstance(splits, dict):
            return splits
        return {split: _joined(shards) for split, shards in splits.items()}

    @model_validator(mode="after")
    def _check_shards(self) -> Source:
        for split, shards in self.splits.items():
            if self.format == "webdataset":
                check_shard_patterns(shards)
            elif LIST_MARK in shards:
                raise ValueError(
                    f"splits.{split} lists shards, which format webdataset alone reads; name one "
                    "sub-folder or glob"
                )
        if self.format == "webdataset" and not "".join(self.splits.values()).strip(": "):
            raise ValueError("splits name no shard; write shard-{000000..000099}.tar")
        return self

    def shard_patterns(self, split: Split) -> tuple[str, ...]:
        """Return the shards of a split as the card lists them: with braces, not below `path`."""
        patterns = (part.strip() for part in self.splits.get(split, "").split(LIST_MARK))
        return tuple(filter(None, patterns))


def _joined(shards: Any) -> Any:
    """Return a list of shards as one text."""
    if isinstance(shards, (list, tuple)) and all(isinstance(part, str) for part in shards):
        return LIST_MARK.join(shards)
    return shards


def check_shard_patterns(patterns: str) -> None:
    """Raise ValueError for shards that cannot be read by offset, or that a program would make."""
    for pattern in patterns.split(LIST_MARK):
        if pattern.strip().startswith("pipe:"):
            raise ValueError(
                f"{pattern.strip()!r:.200} would run a program, which no card may; name the "
                "address that it reads from (s3://, gs://, hf://, https://), or download the shards"
            )
        if COMPRESSED.search(pattern.strip()):
            raise ValueError(
                f"{pattern.strip()!r:.200} is compressed, and images of shards in place are read "
                "by their offsets; unpack it to .tar (images hardly shrink), or copy the images "
                "into shards with another format"
            )


class Counts(Frozen):
    train: int = Field(ge=0)
    test: int = Field(ge=0)


class Card(Frozen):
    """One data set. `classes` is the class order; without a seed it is taken as it stands."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    title: str = ""
    source: Source
    licence: str
    cite: str = ""
    classes: tuple[str, ...] = Field(
        min_length=1, description="`from_source` stands for the sorted names of the train folders"
    )
    num_classes: int | None = Field(
        None, gt=0, description="how many classes there must be; needed with `classes: from_source`"
    )
    class_order_seed: int | None = Field(
        None, ge=0, le=2**32 - 1, description="permutes `classes` by numpy's RandomState(seed)"
    )
    test_fraction: float = Field(
        0.0, ge=0, lt=1, description="share held out as test where the source has no test split"
    )
    counts: Counts | None = Field(None, description="images that must be found, after rejections")
    content: str | None = Field(
        None, description="sha256 of the ingested index; what is found must equal it"
    )
    duplicates: Literal["keep", "drop"] = Field(
        "keep", description="exact copies inside a split are listed; `drop` leaves them out"
    )
    per_class: Annotated[Counts | None, Neutral(None)] = Field(
        None, description="at most so many images of each class, by hash of the key"
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
        description="an image of more than a million pixels with more per "
        "byte is refused as corrupt: a few bytes that take much memory and time",
    )
    shard_images: int = Field(1000, gt=0, description="images per shard")
    archive: Annotated[Archive | None, Neutral(None)] = Field(
        None, description="the official files, where a person fetches them by hand"
    )
    verified: Annotated[str, Neutral("")] = Field(
        "",
        description="what was checked against the real data; empty: nothing, so that counts and "
        "classes are those that its authors state",
    )

    def order(self) -> tuple[str, ...]:
        """Return the classes in stream order: `order()[i]` is the name of class i."""
        if self.class_order_seed is None:
            return self.classes
        import numpy  # start-up time: a card without a seed needs none

        generator = numpy.random.RandomState(self.class_order_seed)
        return tuple(self.classes[index] for index in generator.permutation(len(self.classes)))

    def identity(self) -> str:
        """Return the hash of everything on the card that can change what ingest writes.

        The path of the source is not in it: data may move, and its fingerprint says what it is.
        """
        body = key_inputs(self, ("title", "licence", "cite", "archive", "verified"))
        body |= {"source": key_inputs(self.source, ("path",))}
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


class Memory(Protocol):
    """Values that were seen before, by name; the store keeps them."""

    def remember(self, identity: str, value: Any) -> None: ...
    def remembered(self, identity: str) -> Any: ...


def load(name: str, memory: Memory | None = None) -> Card:
    """Load a card by name, or by the path of its file, or of the folder that holds its card.yaml.

    memory: gives the classes of a card that takes them from its source, once the source is gone.
    Raise UserError where there is no such card, with the nearest name, or where it is not valid.
    """
    path = _card_path(name)
    body = read_yaml(path, "a card")
    if body.get("classes") == "from_source":
        body = body | {"classes": _classes_of_source(name, path, body, memory)}
    try:
        card = Card.model_validate(body)
    except ValidationError as error:
        raise UserError(f"{path}: {sentence_of(error, Card)}") from None
    _check_classes(path, card)
    if card.source.path:
        source = card.source.model_copy(update={"path": _source_path(path, card.source)})
        card = card.model_copy(update={"source": source})
    return card


def names() -> list[str]:
    """Return the names of the cards in `datasets`, sorted."""
    return sorted(path.parent.name for path in CARDS.glob("*/card.yaml"))


def load_without_source(name: str) -> Card:
    """Load a card by name or path, and do not look at its source.

    `classes` is `from_source` alone where they come from there. Raise UserError as `load` does.
    """
    path = _card_path(name)
    body = read_yaml(path, "a card")
    if body.get("classes") == "from_source":
        body = body | {"classes": ["from_source"]}
    try:
        card = Card.model_validate(body)
    except ValidationError as error:
        raise UserError(f"{path}: {sentence_of(error, Card)}") from None
    source = card.source.model_copy(update={"path": _source_path(path, card.source)})
    return card.model_copy(update={"source": source})


def _source_path(card_path: Path, source: Source) -> str:
    """Return the path of a source; a relative one starts at the folder of the card's file.

    Cards in `datasets` are found by name: their paths start where `listing.absolute_uri` says.
    """
    path = expand(source.path)
    if "://" in path or CARDS in card_path.resolve().parents:
        return path
    return os.path.abspath(card_path.parent / path)


def _card_path(name: str) -> Path:
    path = CARDS / name / "card.yaml"
    if is_path_of_card(name):
        path = Path(name)
    if "/" in name and path.is_dir():
        path = path / "card.yaml"
    if path.exists():
        return path
    known = names()
    close = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(known)}"
    raise UserError(f"card {name!r} does not exist ({path}); {hint}")


def _check_classes(path: Path, card: Card) -> None:
    for name in card.classes:
        if not (name.isprintable() and 0 < len(name) <= MAX_CLASS_CHARACTERS):
            raise UserError(
                f"{path}: class {name!r:.60} is no name that can be shown and filed; "
                f"give 1 to {MAX_CLASS_CHARACTERS} printable characters"
            )
    counts = Counter(map(nfc, card.classes))
    repeated = sorted(name for name in card.classes if counts[nfc(name)] > 1)
    if repeated:
        raise UserError(
            f"{path}: class {repeated[0]!r} is listed twice; every class has one place in the order"
        )
    if card.source.label is None and len(card.classes) != 1:
        raise UserError(
            f"{path}: source.label is null, so that all images are of one class, "
            f"and {len(card.classes)} classes are listed; "
            "list one, such as `classes: [image]`, or name the label"
        )
    if card.num_classes not in (None, len(card.classes)):
        raise UserError(
            f"{path}: num_classes is {card.num_classes}, but there are {len(card.classes)} "
            "classes; mend the one or the other, or the folders of the source"
        )


def in_order(name: str, classes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the classes of a card in a published order.

    name: CARD/NAME stands for datasets/CARD/orders/NAME.yaml, which lists indices into `classes`.
    Raise UserError where the file is missing, is not what its hash says, or does not go with the
    card.
    """
    folder, _, stem = name.rpartition("/")
    path = CARDS / folder / "orders" / f"{stem}.yaml"
    if not folder or not path.exists():
        orders = sorted(f"{p.parent.parent.name}/{p.stem}" for p in CARDS.glob("*/orders/*.yaml"))
        raise UserError(
            f"stream.tasks: class order {name!r} does not exist ({path}); "
            f"there are: {', '.join(orders)}"
        )
    body = read_yaml(path, "a class order")
    indices = body.get("order")
    if not isinstance(indices, list) or not _are_distinct_integers(indices):
        raise UserError(f"{path}: `order` must list whole numbers, none of them twice")
    digest = hashlib.sha256(",".join(map(str, indices)).encode()).hexdigest()[:16]
    if digest != body.get("sha256"):
        raise UserError(
            f"{path}: the order is not the one that its sha256 stands for; "
            "take the file from the repository again"
        )
    if not set(indices) <= set(range(len(classes))):
        raise UserError(
            f"{path}: names class {max(indices)}, and the card has {len(classes)}; "
            "use an order made for this card"
        )
    return tuple(classes[index] for index in indices)


def _are_distinct_integers(values: list[Any]) -> bool:
    return all(type(value) is int for value in values) and len(set(values)) == len(values)


def _classes_of_source(
    name: str, path: Path, body: dict[str, Any], memory: Memory | None
) -> list[str]:
    """Return the sorted names of the folders in the train split, or in test without train.

    Raise UserError where there are none, and none are remembered.
    """
    try:
        source = Source.model_validate(body.get("source"))
    except ValidationError as error:
        raise UserError(f"{path}: {sentence_of(error, Card)}") from None
    if source.format != "folder" or not body.get("num_classes"):
        raise UserError(
            f"{path}: `classes: from_source` needs a source of format folder, "
            "and num_classes beside it; add it, or list the classes"
        )
    digest = hashlib.sha256(f"{body.get('name')}\n{body['num_classes']}".encode()).hexdigest()
    identity = f"classes-{digest[:24]}"
    remembered = memory.remembered(identity) if memory else None
    split = source.splits.get("train") or source.splits.get("test", "train")
    try:
        with patience(FIRST_CONTACT_S):
            uri, folders = class_folders(_source_path(path, source), split)
    except StorageUnavailable:
        if not remembered:
            raise
        uri = source.path
        folders = []
    check_unicode_forms(f"{path}: folders in {uri}", folders)
    names = sorted(map(nfc, folders))
    if memory and names and names != remembered:
        memory.remember(identity, names)
    names = names or remembered or []
    if not names:
        hint = ""
        if "archive" in body:
            hint = f" (`accrete data list {shlex.quote(name)}` says how)"
        raise UserError(
            f"{path}: its classes come from the folders in {uri}, and there are none; "
            f"put the data there{hint}, or list the classes on the card"
        )
    return names
