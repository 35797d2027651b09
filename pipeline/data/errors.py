"""The error of a card whose source cannot be read as the card says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workers.errors import UserError

if TYPE_CHECKING:
    from pipeline.data.cards import Card


class UnfitSource(UserError):
    """The source of a card is missing, or does not match the card.

    The command line adds a description of the actual source, see `source_advice`.

    Args:
        message: The error.
        card: The card.
    """

    def __init__(self, message: str, card: Card):
        super().__init__(message)
        self.card = card
