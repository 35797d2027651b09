"""Files of cards (YAML descriptions of data sets), and published class orders.

Cards are `datasets/NAME/card.yaml`, or files next to the data.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline.config.settings import describe_validation_error
from pipeline.config.yaml_files import CARDS, expand, is_path_of_card, read_yaml
from pipeline.data.cards import FROM_SOURCE, MAX_CLASS_CHARACTERS, Card, permuted
from pipeline.data.names import nfc
from pipeline.data.source_classes import Memory, find_source_classes
from workers.errors import UserError, did_you_mean
from workers.storage.regular_file import read_regular

SEED = re.compile("[0-9]{1,9}")  # a class order may be the seed of a permutation
MAX_LIST_BYTES = 256 << 20  # maximum size of a file that lists images


def load_card_file(name: str, memory: Memory | None = None) -> Card:
    """Load a card.

    Args:
        name: Name of a card in `datasets`, path of a card file, or path of a folder with a
            card.yaml.
        memory: Store of the classes that were found earlier, for a card with `classes:
            from_source`. They are used again if the source is unchanged, gone or unreachable.

    Raises:
        UserError: If the card does not exist (the message suggests a similar name) or is invalid.
    """
    path = find_card_file(name)
    body = read_yaml(path, "a card")
    classes_from_source = body.get("classes") == FROM_SOURCE
    card = _parse_card(path, body)
    card = _resolve_files(card, path)
    if classes_from_source:
        source_classes = find_source_classes(card, str(path), memory)
        card = card.model_copy(update={"classes": source_classes.classes})
        # whether a label that is a number is a place in `classes` or a name (`Source.numbers`)
        card = _replace_source(card, numbers=source_classes.numbers)
    _check_card_classes(path, card)
    return card


def _parse_card(path: Path, body: dict[str, Any]) -> Card:
    """Return the card with the content of a file; `from_source` is not resolved."""
    if body.get("classes") == FROM_SOURCE:
        body = body | {"classes": [FROM_SOURCE]}
    try:
        return Card.model_validate(body)
    except ValidationError as error:
        raise UserError(f"{path}: {describe_validation_error(error, Card, body=body)}") from None


def _replace_source(card: Card, **changes: Any) -> Card:
    return card.model_copy(update={"source": card.source.model_copy(update=changes)})


def list_card_names() -> list[str]:
    """Return the names of the cards in `datasets`, sorted."""
    return sorted(path.parent.name for path in CARDS.glob("*/card.yaml"))


def load_without_source(name: str) -> Card:
    """Load a card by name or path without reading its source.

    If the classes come from the source, `classes` is `(FROM_SOURCE,)`. Classes are not checked.

    Raises:
        UserError: If the card does not exist, or is invalid.
    """
    path = find_card_file(name)
    return _resolve_files(_parse_card(path, read_yaml(path, "a card")), path)


def resolve_image_list(card_file: str | Path, value: str) -> Path:
    """Return the path of the file that lists the images to leave out.

    Args:
        card_file: Path of the card's file.
        value: Value of `without_images` on the card. A relative path starts at the folder of the
            card's file.
    """
    return Path(os.path.abspath(Path(card_file).parent / expand(value)))


def read_image_lines(path: str | Path) -> list[str]:
    """Return the distinct lines of a file that lists images, sorted, in Unicode form NFC.

    Empty lines and a byte order mark are left out.
    """
    text = read_regular(Path(path), MAX_LIST_BYTES).decode("utf-8-sig", "replace")
    lines = {nfc(line.strip()) for line in text.split("\n")}
    return sorted(lines - {""})


def _resolve_files(card: Card, card_file: Path) -> Card:
    """Return a card with resolved source paths, and with the content of the list of images."""
    if card.without_images:
        listed = resolve_image_list(card_file, card.without_images)
        if not listed.exists():
            raise UserError(
                f"{card_file}: without_images names {listed}, which does not exist; put the list "
                "of the images to leave out back, or remove the key to use all images"
            )
        # From here on the field holds the lines of the file, not its name.
        card = card.model_copy(update={"without_images": "\n".join(read_image_lines(listed))})
    if not card.source.path:
        return card
    more = tuple(  # further folders
        folder.model_copy(update={"path": _resolve_source_path(card_file, folder.path)})
        for folder in card.source.more
    )
    return _replace_source(card, path=_resolve_source_path(card_file, card.source.path), more=more)


def _resolve_source_path(card_file: Path, path: str) -> str:
    """Return the path of a source. A relative path starts at the folder of the card's file.

    For cards in `datasets`, relative paths stay relative. `listing.absolute_uri` resolves them when
    the source is read, against the folder that contains `datasets`.
    """
    source_path = expand(path)
    if "://" in source_path or CARDS in card_file.resolve().parents:
        return source_path
    return os.path.abspath(card_file.parent / source_path)


def find_card_file(name: str) -> Path:
    """Return the file of a card; raise `UserError` if it does not exist."""
    path = CARDS / name / "card.yaml"
    if is_path_of_card(name):
        path = Path(name)
    if "/" in name and path.is_dir():
        path = path / "card.yaml"
    if path.exists():
        return path
    known = list_card_names()
    hint = did_you_mean(name, known, f"`accrete data list` lists all {len(known)} cards")
    raise UserError(f"card {name!r} does not exist ({path}); {hint}")


def _check_card_classes(path: Path, card: Card) -> None:
    for name in card.classes:
        if not (name.isprintable() and 0 < len(name) <= MAX_CLASS_CHARACTERS):
            raise UserError(
                f"{path}: class {name!r:.60} is empty, too long or not printable; "
                f"give 1 to {MAX_CLASS_CHARACTERS} printable characters"
            )
    counts = Counter(map(nfc, card.classes))
    repeated = sorted(name for name in card.classes if counts[nfc(name)] > 1)
    if repeated:
        raise UserError(f"{path}: class {repeated[0]!r} is listed twice; list each class once")
    if card.source.label is None and len(card.classes) != 1:
        raise UserError(
            f"{path}: source.label is null, so all images are of one class, "
            f"but {len(card.classes)} classes are listed; "
            "list one, such as `classes: [image]`, or name the label"
        )
    if not card.order():
        raise UserError(
            f"{path}: without_classes leaves out all of its classes; keep at least one, or "
            "remove the card from the stream"
        )
    if card.num_classes not in (None, len(card.classes)):
        remedy = "correct `num_classes`, the list of classes, or the folders of the source"
        if card.num_classes < len(card.classes):
            remedy = (
                "add new classes with `accrete add CONFIG DATA`, or correct `num_classes` or the "
                "list of classes"
            )
        raise UserError(
            f"{path}: num_classes is {card.num_classes}, but there are {len(card.classes)} "
            f"classes; {remedy}"
        )


def order_classes(order: str, classes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the classes of a card in a published order, or permuted.

    Args:
        order: CARD/NAME for datasets/CARD/orders/NAME.yaml, which lists indices into `classes`, or
            the seed of a permutation.
        classes: Classes of the card.

    Raises:
        UserError: If the file is missing, does not match its hash, or does not fit the card.
    """
    if SEED.fullmatch(order):
        return permuted(classes, int(order))
    folder, _, stem = order.rpartition("/")
    path = CARDS / folder / "orders" / f"{stem}.yaml"
    if not folder or not path.exists():
        orders = sorted(f"{p.parent.parent.name}/{p.stem}" for p in CARDS.glob("*/orders/*.yaml"))
        raise UserError(
            f"stream.tasks: class order {order!r} does not exist ({path}); "
            f"there are: {', '.join(orders)}"
        )
    body = read_yaml(path, "a class order")
    indices = body.get("order")
    if not isinstance(indices, list) or not _are_distinct_integers(indices):
        raise UserError(f"{path}: `order` must list distinct whole numbers")
    digest = hashlib.sha256(",".join(map(str, indices)).encode()).hexdigest()[:16]
    if digest != body.get("sha256"):
        raise UserError(
            f"{path}: `order` does not match `sha256`; restore the file from the repository"
        )
    for index in indices:
        if not 0 <= index < len(classes):
            raise UserError(
                f"{path}: `order` lists class index {index}, but the card has {len(classes)} "
                "classes; use an order made for this card"
            )
    return tuple(classes[index] for index in indices)


def _are_distinct_integers(values: list[Any]) -> bool:
    return all(type(value) is int for value in values) and len(set(values)) == len(values)
