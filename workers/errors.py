"""Exceptions for users. A message names the value, the expected form and the remedy."""

from __future__ import annotations

import difflib
import importlib.util
import os
import sys
from collections.abc import Iterable


class UserError(ValueError):
    """Bad input, or a setting that cannot be satisfied.

    The command line prints only its text and exits with 2.
    """


class DamagedArtifact(UserError):
    """A stored file is missing, damaged or invalid. The stage that wrote it runs again.

    Args:
        key: Key of the stage that wrote the file.
        message: The text for the user.
    """

    def __init__(self, key: str, message: str):
        super().__init__(message)
        self.key = key

    def __reduce__(self) -> tuple[type[DamagedArtifact], tuple[str, str]]:
        # So that both arguments are kept when Ray pickles the error.
        return type(self), (self.key, str(self))


class SourceChanged(UserError):
    """Shards that are used in place are missing, or have changed since they were indexed."""


def describe_error(error: BaseException, only_first_line: bool = False) -> str:
    """Return an error's text in one line, or the name of the error's type if it has no text.

    Args:
        error: The error.
        only_first_line: Omit the lines after the first. Otherwise all lines are joined.
    """
    lines = str(error).strip().splitlines()[: 1 if only_first_line else None]
    return " ".join(" ".join(lines).split()) or type(error).__name__


def did_you_mean(
    name: str, known: Iterable[str], otherwise: str, folder: str = "", cutoff: float = 0.6
) -> str:
    """Return a question that proposes the known name most similar to `name`.

    Args:
        name: The unknown name.
        known: Known names.
        otherwise: Result if no known name is similar.
        folder: Prefix of the known name, if it is a path.
        cutoff: Lowest similarity, from 0 to 1.

    Example:
        >>> did_you_mean("alhpa", ["alpha", "lambda"], "see the docs")
        "did you mean 'alpha'?"
    """
    similar = difflib.get_close_matches(name, list(known), 1, cutoff)
    if not similar:
        return otherwise
    return f"did you mean {os.path.join(folder, similar[0])!r}?"


def require_package(name: str, required_by: str, remedy: str) -> None:
    """Raise `UserError` if a package is not installed.

    Packages such as ray and mlflow are optional: training works without them.

    Args:
        name: Name of the package.
        required_by: Setting or command that needs the package, for the message.
        remedy: How the user can do without the package, for the message.
    """
    if sys.modules.get(name) is None and importlib.util.find_spec(name) is None:
        raise UserError(
            f"{required_by} needs the package {name}, which is not installed; "
            f"install it, or {remedy}"
        )
