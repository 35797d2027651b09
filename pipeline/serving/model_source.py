"""Sources of a served model: a fixed bundle, a model folder, or a registered model of MLflow.

A source has a version, which changes when the model changes. `updates.Updates` checks it
regularly, and serves each new model.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from workers.errors import UserError
from workers.serving.bundle import Bundle
from workers.serving.model_file import MODEL, read_model

if TYPE_CHECKING:
    from mlflow import MlflowClient

REGISTERED = re.compile(r"models:/(?P<name>[^/@]+)(?:@(?P<alias>[^/@]+)|/(?P<version>\d+))")


class ModelSource(Protocol):
    """A source of a model. Both methods raise `UserError` if the model cannot be read."""

    def version(self) -> str:
        """Return an id that changes when the model changes."""

    def open(self) -> Bundle:
        """Return the current model."""


@dataclass(frozen=True)
class FixedModel:
    """A bundle that does not change, for example the bundle of a run in the store."""

    bundle: Bundle

    def version(self) -> str:
        """Return the digest of the bundle."""
        return str(self.bundle.body["sha256"])

    def open(self) -> Bundle:
        """Return the bundle."""
        return self.bundle


@dataclass(frozen=True)
class FolderModel:
    """A model folder at `uri`. Commands may add or remove tasks while it is served."""

    uri: str

    def version(self) -> str:
        """Return the current digest of the folder."""
        return str(read_model(self.uri)["sha256"])

    def open(self) -> Bundle:
        """Return the current bundle."""
        return Bundle.open(self.uri)


@dataclass
class RegisteredModel:
    """A registered model of MLflow.

    The code that MLflow stores with the model is not executed.

    Args:
        uri: `models:/NAME@ALIAS` or `models:/NAME/VERSION`. If the alias is moved to another
            version, the model changes.
        storage: Storage folder with MLflow's database, unless MLFLOW_TRACKING_URI is set.
        folder: Temporary folder with the files of the last opened model. It is kept here because
            Python deletes the folder when this reference is dropped.
    """

    uri: str
    storage: str
    folder: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        parts = REGISTERED.fullmatch(self.uri)
        if parts is None:
            raise UserError(
                f"{self.uri!r} is not a model of MLflow; give models:/NAME@ALIAS, for example "
                "models:/RUN@champion, or models:/NAME/VERSION"
            )
        self.parts = parts

    @cached_property
    def address(self) -> str:
        """The tracking URI.

        Raises:
            UserError: If the storage has no database.
        """
        from pipeline.tracking.database import sqlite_path
        from pipeline.tracking.mlflow_client import tracking_uri

        address = tracking_uri(self.storage)
        database = sqlite_path(address)
        if database is not None and not Path(database).exists():
            raise UserError(
                f"{self.uri}: there is no database {database}; give the storage folder of the run "
                "with --storage, or a server in MLFLOW_TRACKING_URI"
            )
        return address

    @cached_property
    def client(self) -> MlflowClient:
        """A client for the tracking URI."""
        from mlflow import MlflowClient  # slow to import

        return MlflowClient(self.address)

    def version(self) -> str:
        """Return the version number in the URI, or the one to which the alias points now."""
        if self.parts["version"]:
            return self.parts["version"]
        try:
            version = self.client.get_model_version_by_alias(
                self.parts["name"], self.parts["alias"]
            )
        except UserError:
            raise
        except Exception as error:  # the kinds of errors depend on MLflow's store
            raise UserError(f"{self.uri} cannot be found ({error!s:.300})") from None
        return str(version.version)

    def open(self) -> Bundle:
        """Download the model and return its bundle."""
        import mlflow.artifacts  # slow to import

        version = self.version()
        folder = tempfile.TemporaryDirectory(prefix="accrete-")
        try:
            mlflow.artifacts.download_artifacts(
                f"models:/{self.parts['name']}/{version}",
                dst_path=folder.name,
                tracking_uri=self.address,
                registry_uri=self.address,
            )
        except Exception as error:  # the kinds of errors depend on MLflow's store
            raise UserError(
                f"version {version} of {self.uri} cannot be downloaded ({error!s:.300})"
            ) from None
        path = next(Path(folder.name).glob(f"artifacts/*/{MODEL}"), None)
        if path is None:
            raise UserError(f"version {version} of {self.uri} is not a model that Accrete logged")
        self.folder = folder
        return Bundle.open(str(path.parent))
