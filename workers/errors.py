"""The errors that people see: one sentence with the value, the rule and the remedy."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any


class UserError(ValueError):
    """Bad input, or a setting that cannot be honoured.

    The command line prints only its text and exits with 2.
    """


class DamagedArtifact(UserError):
    """A stored file differs from its digest. The stage that wrote it is run again."""

    def __init__(self, key: str, message: str):
        super().__init__(message)
        self.key = key

    def __reduce__(self) -> tuple[type[DamagedArtifact], tuple[str, str]]:
        # Keeps both arguments when Ray sends the error between processes.
        return type(self), (self.key, str(self))


class SourceGone(UserError):
    """Shards that are used in place are away, or are not those that were indexed."""


class UnfitSource(UserError):
    """A source is not what its card says. card: a `pipeline.data.cards.Card`."""

    def __init__(self, message: str, card: Any):
        super().__init__(message)
        self.card = card

    def __reduce__(self) -> tuple[type[UnfitSource], tuple[str, Any]]:
        return type(self), (str(self), self.card)


def require_package(name: str, user: str, remedy: str) -> None:
    """Raise `UserError` when a package is not installed.

    user: the setting or command that needs it.
    A bare GPU machine has what training needs and may lack ray and mlflow.
    """
    if sys.modules.get(name) is None and importlib.util.find_spec(name) is None:
        raise UserError(
            f"{user} needs the package {name}, which is not installed; install it, or {remedy}"
        )
