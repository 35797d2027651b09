"""Where a server gets its model from, and how it notices that there is another one."""

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
    """A model that is served. Both functions raise `UserError` when it cannot be read."""

    def version(self) -> str:
        """Return what differs as soon as another model is to be served."""

    def open(self) -> Bundle:
        """Return the model that is to be served now."""


@dataclass(frozen=True)
class FixedModel:
    """A bundle that does not change, as that of a run in the store."""

    bundle: Bundle

    def version(self) -> str:
        """Return the digest of the bundle."""
        return str(self.bundle.body["sha256"])

    def open(self) -> Bundle:
        """Return the bundle."""
        return self.bundle


@dataclass(frozen=True)
class FolderModel:
    """A model folder, to which tasks are added and from which they are removed."""

    uri: str

    def version(self) -> str:
        """Return the digest that the folder has now."""
        return str(read_model(self.uri)["sha256"])

    def open(self) -> Bundle:
        """Return the bundle as it is now."""
        return Bundle.open(self.uri)


@dataclass
class RegisteredModel:
    """A registered model of MLflow: `models:/NAME@ALIAS`, whose alias moves, or `models:/NAME/1`.

    storage: the folder of MLflow's database, where MLFLOW_TRACKING_URI names no other. No code of
    the model is run: the server has its own.
    """

    uri: str
    storage: str
    folder: Any = field(default=None, repr=False)  # of the model that was opened last

    def __post_init__(self) -> None:
        parts = REGISTERED.fullmatch(self.uri)
        if parts is None:
            raise UserError(
                f"{self.uri!r} is no model of MLflow; give models:/NAME@ALIAS, such as "
                "models:/RUN@champion, or models:/NAME/VERSION"
            )
        self.parts = parts

    @cached_property
    def address(self) -> str:
        """The tracking URI."""
        from pipeline.tracking.database import sqlite_path
        from pipeline.tracking.mlflow_client import tracking_uri

        address = tracking_uri(self.storage)
        database = sqlite_path(address)
        if database is not None and not Path(database).exists():
            raise UserError(
                f"{self.uri}: there is no database {database}; name the storage folder of the run "
                "with --storage, or a server in MLFLOW_TRACKING_URI"
            )
        return address

    @cached_property
    def client(self) -> MlflowClient:
        """MLflow's client."""
        from mlflow import MlflowClient  # takes a second

        return MlflowClient(self.address)

    def version(self) -> str:
        """Return the number of the version that the alias names now."""
        if self.parts["version"]:
            return self.parts["version"]
        try:
            version = self.client.get_model_version_by_alias(
                self.parts["name"], self.parts["alias"]
            )
        except UserError:
            raise
        except Exception as error:  # MLflow raises what its stores raise
            raise UserError(f"{self.uri} cannot be found ({error!s:.300})") from None
        return str(version.version)

    def open(self) -> Bundle:
        """Download the model, and return its bundle."""
        import mlflow.artifacts  # takes a second

        version = self.version()
        folder = tempfile.TemporaryDirectory(prefix="accrete-")
        try:
            mlflow.artifacts.download_artifacts(
                f"models:/{self.parts['name']}/{version}",
                dst_path=folder.name,
                tracking_uri=self.address,
                registry_uri=self.address,
            )
        except Exception as error:  # MLflow raises what its stores raise
            raise UserError(
                f"version {version} of {self.uri} cannot be downloaded ({error!s:.300})"
            ) from None
        path = next(Path(folder.name).glob(f"artifacts/*/{MODEL}"), None)
        if path is None:
            raise UserError(f"version {version} of {self.uri} is no model that Accrete has logged")
        self.folder = folder
        return Bundle.open(str(path.parent))
