"""Write inline cards of a config to files. The path of the file replaces the card in the config.

An inline card is a mapping with the content of a card file.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pipeline.config import settings as configs
from pipeline.config.yaml_files import dump_yaml
from pipeline.data.cards import FROM_SOURCE, Card
from workers.errors import UserError
from workers.storage.regular_file import read_regular
from workers.storage.secrets import refuse_secrets

HEADER = (
    "# Written from a mapping by `pipeline.load`, and written again when the mapping changes.\n"
)
LONGEST_CARD = 16 << 20  # maximum bytes of an existing card file


def write_inline_cards(body: dict[str, Any]) -> None:
    """Write the inline cards of a stream to the current folder, as `NAME-card.yaml`.

    Args:
        body: Plain values of a config; changed in place: each inline card, a mapping, is replaced
            by the path of the file.

    Raises:
        UserError: If a card is invalid, or a file with this name exists that this function did not
            write.
    """
    stream = body.get("stream")
    tasks = stream.get("tasks") if isinstance(stream, dict) else None
    if not isinstance(tasks, list):
        return
    for index, entry in enumerate(tasks):
        if not isinstance(entry, dict) or not isinstance(entry.get("card"), dict):
            continue
        entry["card"] = _write_card(entry["card"], f"stream.tasks.{index}.card")


def _write_card(card: dict[str, Any], where: str) -> str:
    """Write one card and return the path of the file; `where` is its path in the config."""
    refuse_secrets(card, f"{where}: ")
    checked_card = card
    if card.get("classes") == FROM_SOURCE:
        # a card file has `classes: from_source`; `Card` expects the list `[from_source]`
        checked_card = card | {"classes": [FROM_SOURCE]}
    name = configs.checked(Card, checked_card, where).name
    file = f"{name}-card.yaml"
    text = HEADER + dump_yaml(card)
    if os.path.lexists(file):
        _check_is_inline(file, where)
    Path(file).write_text(text, encoding="utf-8")
    return file


def _check_is_inline(file: str, where: str) -> None:
    """Raise `UserError` if a file was not written from a mapping and must not be replaced."""
    try:
        text = read_regular(Path(file), LONGEST_CARD).decode()
    except (OSError, UnicodeDecodeError):
        text = ""
    if not text.startswith(HEADER):
        raise UserError(
            f"{where} would be written to {file}, which is in the current folder and was not "
            f"written from a mapping; name that file, `card: {file}`, or give the card another name"
        )
