"""The one error that people see: a sentence that says what, where, the rule, and the remedy."""

import importlib.util
import sys


class UserError(ValueError):
    """Bad input or a setting that cannot hold its promise. The command line prints its text alone
    and exits with 2."""


class DamagedArtifact(UserError):
    """A persisted file differs from its digest. The stage that wrote it is run again."""

    def __init__(self, key: str, message: str):
        super().__init__(message)
        self.key = key

    def __reduce__(self):  # keeps both arguments when Ray carries the error between processes
        return type(self), (self.key, str(self))


def require_package(name: str, user: str, remedy: str) -> None:
    """Raises UserError where a package is not installed that `user`, a setting or a command, needs.

    A bare machine has what training needs and may lack ray, mlflow and webdataset.
    """
    if sys.modules.get(name) is None and importlib.util.find_spec(name) is None:
        raise UserError(
            f"{user} needs the package {name}, which is not installed; install it, or {remedy}"
        )
