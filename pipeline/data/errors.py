"""The error of a source that does not match its card."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workers.errors import UserError

if TYPE_CHECKING:
    from pipeline.data.cards import Card


class UnfitSource(UserError):
    """A source does not match its card."""

    def __init__(self, message: str, card: Card):
        super().__init__(message)
        self.card = card
