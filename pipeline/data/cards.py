"""Cards: `datasets/NAME/card.yaml` says where data comes from, under which licence, and what must
be found there."""

from __future__ import annotations

import difflib
import hashlib
import json
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field, ValidationError

from pipeline.config import sentence_of
from pipeline.yaml_files import expand, read_yaml
from workers.errors import UserError
from workers.job import Frozen, Neutral, key_inputs
from workers.storage.filesystem import FIRST_CONTACT_S, StorageUnavailable, patience

Split = Literal["train", "test"]
LONGEST_CLASS = 200  # characters
# 8-bit PNG reaches 1032, JPEG 512; of more is what is nearly of one colour
MAX_PIXELS_PER_BYTE = 2000
CARDS = Path(__file__).resolve().parents[2] / "datasets"


def nfc(name: str) -> str:
    """A name in Unicode's form NFC: some disks keep names in NFD, which looks the same."""
    return name if name.isascii() else unicodedata.normalize("NFC", name)


class Source(Frozen):
    """Where the raw data lies and how it is laid out."""

    format: Literal["folder", "parquet", "tar", "sklearn", "torchvision"]
    path: str = Field(
        "", description="folder or URI; ${NAME:-default} is replaced from the environment"
    )
    name: str = Field("", description="data set inside scikit-learn or torchvision")
    splits: dict[Split, str] = Field(
        {"train": "train", "test": "test"},
        description="sub-folder or glob of each split below `path`; without `train`, a card to be "
        "tested on alone",
    )
    image: str = Field(
        "image", description="column of the image (bytes, or a struct with `bytes`) in Parquet"
    )
    label: str | None = Field(
        "label",
        min_length=1,
        description="column of the label in Parquet; extension of the label member in tars; null: "
        "images have "
        "no labels, and the card has one class, which all of them belong to",
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

    def order(self) -> tuple[str, ...]:
        """Classes in stream order: `order[i]` is the name of class i."""
        if self.class_order_seed is None:
            return self.classes
        import numpy

        return tuple(
            self.classes[i]
            for i in numpy.random.RandomState(self.class_order_seed).permutation(len(self.classes))
        )

    def identity(self) -> str:
        """Hash of everything on the card that can change what ingest writes. Not the place of the
        source: data may move, and its fingerprint stands for what is there."""
        body = key_inputs(self, ("title", "licence", "cite")) | {
            "source": key_inputs(self.source, ("path",))
        }
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


class Memory(Protocol):
    """What was seen before, by a name of its own (the store keeps it)."""

    def remember(self, identity: str, value: Any) -> None: ...
    def remembered(self, identity: str) -> Any: ...


def load(name: str, memory: Memory | None = None) -> Card:
    """A card by name, or by path of a .yaml file. Raises UserError naming the nearest card.

    memory: gives the classes of a card that leaves them to its source once the source is gone.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else CARDS / name / "card.yaml"
    if not path.exists():
        known = sorted(p.parent.name for p in CARDS.glob("*/card.yaml"))
        close = difflib.get_close_matches(name, known, 1)
        raise UserError(
            f"card {name!r} does not exist ({path}); "
            + (f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(known)}")
        )
    body = read_yaml(path, "a card")
    if body.get("classes") == "from_source":
        body = body | {"classes": _folders(path, body, memory)}
    try:
        card = Card.model_validate(body)
    except ValidationError as error:
        raise UserError(f"{path}: {sentence_of(error, Card)}") from None
    often = Counter(map(nfc, card.classes))
    twice = sorted(c for c in card.classes if often[nfc(c)] > 1)
    odd = next(
        (c for c in card.classes if not (c.isprintable() and 0 < len(c) <= LONGEST_CLASS)), None
    )
    if odd is not None:
        raise UserError(
            f"{path}: class {odd!r:.60} is no name that can be shown and filed; give 1 to "
            f"{LONGEST_CLASS} printable characters"
        )
    if twice:
        raise UserError(
            f"{path}: class {twice[0]!r} is listed twice; every class has one place in the order"
        )
    if card.source.label is None and len(card.classes) != 1:
        raise UserError(
            f"{path}: source.label is null, so that all images are of one class, and "
            f"{len(card.classes)} classes are listed; list one, such as "
            "`classes: [image]`, or name the label"
        )
    if card.num_classes not in (None, len(card.classes)):
        raise UserError(
            f"{path}: num_classes is {card.num_classes}, but there are {len(card.classes)} "
            "classes; mend the one or the other"
            ", or the folders of the source"
        )
    if card.source.path:
        card = card.model_copy(
            update={"source": card.source.model_copy(update={"path": expand(card.source.path)})}
        )
    return card


def in_order(name: str, classes: tuple[str, ...]) -> tuple[str, ...]:
    """The classes that an order names by their places on a card, CARD/NAME being
    datasets/CARD/orders/NAME.yaml. Raises UserError where the file is not one, is not what its hash
    says, or does not go with the card."""
    folder, _, leaf = name.rpartition("/")
    path = CARDS / folder / "orders" / f"{leaf}.yaml"
    if not folder or not path.exists():
        known = ", ".join(
            sorted(f"{p.parent.parent.name}/{p.stem}" for p in CARDS.glob("*/orders/*.yaml"))
        )
        raise UserError(
            f"stream.tasks: class order {name!r} does not exist ({path}); there are: {known}"
        )
    body = read_yaml(path, "a class order")
    places = body.get("order")
    if (
        not isinstance(places, list)
        or not all(type(place) is int for place in places)
        or len(set(places)) != len(places)
    ):
        raise UserError(f"{path}: `order` must list whole numbers, none of them twice")
    if hashlib.sha256(",".join(map(str, places)).encode()).hexdigest()[:16] != body.get("sha256"):
        raise UserError(
            f"{path}: the order is not the one that its sha256 stands for; take the file from "
            "the repository again"
        )
    if not set(places) <= set(range(len(classes))):
        raise UserError(
            f"{path}: names class {max(places)}, and the card has {len(classes)}; use an order "
            "made for this card"
        )
    return tuple(classes[place] for place in places)


def _folders(path: Path, body: dict[str, Any], memory: Memory | None) -> list[str]:
    """The classes of a card that leaves them to its source: the sorted names of the folders in the
    train split, or in that of test where there is no other."""
    from pipeline.data.formats import check_forms, folders

    try:
        source = Source.model_validate(body.get("source"))
    except ValidationError as error:
        raise UserError(f"{path}: {sentence_of(error, Card)}") from None
    if source.format != "folder" or not body.get("num_classes"):
        raise UserError(
            f"{path}: `classes: from_source` needs a source of format folder, and num_classes "
            "beside it; add it, or list "
            "the classes"
        )
    identity = (
        "classes-"
        + hashlib.sha256(f"{body.get('name')}\n{body['num_classes']}".encode()).hexdigest()[:24]
    )
    try:
        with patience(FIRST_CONTACT_S):
            where, names = folders(
                expand(source.path),
                source.splits.get("train") or source.splits.get("test", "train"),
            )
    except StorageUnavailable:
        if not memory or not memory.remembered(identity):
            raise
        where, names = source.path, []
    check_forms(f"{path}: folders in {where}", names)
    names = sorted(map(nfc, names))
    if memory and names and names != memory.remembered(identity):
        memory.remember(identity, names)
    names = names or (memory.remembered(identity) if memory else None) or []
    if not names:
        raise UserError(
            f"{path}: its classes come from the folders in {where}, and there are none; put the "
            "data there, or list the "
            "classes on the card"
        )
    return names
