"""Advice about a card that does not match its source: the actual content, and a helpful command.

The command line adds it to an `UnfitSource` error.
"""

from __future__ import annotations

import os

from pipeline.config.invocation import shorten_path
from pipeline.data import starter
from pipeline.data.cards import Card
from pipeline.data.detection.data_set import MAX_FILES
from pipeline.data.detection.detect import LISTED, describe_contents
from pipeline.data.formats.base import source_uri
from pipeline.data.listing import list_entries
from pipeline.data.names import printable
from workers.errors import UserError, did_you_mean
from workers.storage.artifact import is_local


def describe_source(card: Card, program: str) -> str:
    """Describe the actual content of a card's source, for the end of a sentence.

    Args:
        card: The card.
        program: Command that starts Accrete.

    Returns:
        The text, which begins with `; `. It is "" if the source cannot be listed, and for remote
        sources and libraries, which are not inspected.
    """
    uri = source_uri(card)
    if not card.source.path or not is_local(uri) or card.source.format == "torchvision":
        return ""
    if not os.path.exists(uri):
        return f"; {_nearest(uri)}"
    folder = uri if os.path.isdir(uri) else os.path.dirname(uri)
    try:
        entries = list_entries(folder, [""], LISTED, MAX_FILES)
    except UserError:
        return ""
    advice = f"{printable(folder)} {describe_contents(entries or [])}"
    command = starter.suggest(shorten_path(uri), program)
    if command is not None:
        advice += f"; to write a card for the existing files: `{command}`"
    return f"; {advice}"


def _nearest(path: str) -> str:
    """Describe the nearest existing folder above a missing path, as a part of a sentence."""
    folder, name = os.path.split(path)
    while not os.path.isdir(folder):
        folder, name = os.path.split(folder)
    names = sorted(child for child in os.listdir(folder) if not child.startswith("."))
    tree = ", ".join(repr(printable(child)) for child in names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    contents = f"{printable(folder)} holds {tree or 'nothing'}{more}"
    return did_you_mean(name, names, contents, folder)
