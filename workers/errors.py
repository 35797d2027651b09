"""The one error that people see: a sentence that says what, where, the rule, and the remedy."""


class UserError(ValueError):
    """Bad input or a setting that cannot hold its promise. The command line prints its text alone and exits with 2."""


class DamagedArtefact(UserError):
    """A persisted file differs from its digest. The stage that wrote it is run again."""

    def __init__(self, key: str, message: str):
        super().__init__(message)
        self.key = key

    def __reduce__(self):  # keeps both arguments when Ray carries the error between processes
        return type(self), (self.key, str(self))
