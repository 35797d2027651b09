"""Delete the files, logged models and model versions of earlier states of a run in MLflow.

An earlier state is a record that was written before the config or the images of the run were
changed, for example before a class was removed. `find_earlier_files` finds its files, and
`EarlierFiles.delete` deletes them. Metrics, parameters and tags are kept, because they contain
neither images nor trained weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.config.settings import TrackingSettings
from pipeline.graph.run_record import RunRecord
from pipeline.tracking import mlflow_internals
from pipeline.tracking.mlflow_client import MlflowClientAdapter
from pipeline.tracking.run_writer import run_key
from workers.errors import describe_error

if TYPE_CHECKING:
    from mlflow.entities import LoggedModel, Run

KINDS = ("run", "method", "task")  # values of the tag `accrete.kind`; trials have other values


@dataclass
class EarlierFiles:
    """Files in MLflow of a run, from the time before its config or images were changed.

    Attributes:
        adapter: Client of the tracking server or database.
        runs: Runs in MLflow of earlier states that have files.
        models: Models logged by any run of an earlier state.
    """

    adapter: MlflowClientAdapter
    runs: list[Run]
    models: list[LoggedModel]

    def delete(self) -> list[str]:
        """Delete the files and the models.

        Returns:
            A sentence for each run and model whose files were not deleted.
        """
        left: list[str] = []
        client = self.adapter.client
        for model in self.models:
            try:
                for version in client.search_model_versions(f"run_id = '{model.source_run_id}'"):
                    if version.source == model.artifact_location:
                        client.delete_model_version(version.name, version.version)
                mlflow_internals.delete_artifacts(model.artifact_location, self.adapter.uri)
                client.delete_logged_model(model.model_id)
            except Exception as error:  # any error of the server or of the artifact store
                left.append(
                    _describe_kept_files(f"model {model.model_id}", model.artifact_location, error)
                )
        for run in self.runs:
            try:
                mlflow_internals.delete_artifacts(run.info.artifact_uri, self.adapter.uri)
            except Exception as error:
                run_id = run.info.run_id
                kept = _describe_kept_files(f"run {run_id}", run.info.artifact_uri, error)
                left.append(
                    f"{kept}; `mlflow runs "
                    f"delete --run-id {run_id}` and `mlflow gc --run-ids {run_id}` delete it whole"
                )
        return left


def find_earlier_files(settings: TrackingSettings, storage: str, record: RunRecord) -> EarlierFiles:
    """Find the files in MLflow of earlier states of a run.

    Args:
        settings: Tracking settings of the run.
        storage: Folder or URI of the storage.
        record: Current record of the run. Runs in MLflow with the same name and another `run_key`
            belong to earlier states.
    """
    adapter = MlflowClientAdapter(storage, settings)
    runs = [
        run
        for run in adapter.find({"run": record["name"]})
        if run.data.tags.get("accrete.kind") in KINDS
        and run.data.tags.get("accrete.run") != run_key(record)
    ]
    models = [model for run in runs for model in _list_models(adapter, run)]
    with_files = [run for run in runs if adapter.client.list_artifacts(run.info.run_id)]
    return EarlierFiles(adapter, with_files, models)


def _list_models(adapter: MlflowClientAdapter, run: Run) -> Iterable[LoggedModel]:
    if run.data.tags["accrete.kind"] != "method":
        return []
    found: Iterable[LoggedModel] = adapter.client.search_logged_models(
        [adapter.experiment], f"source_run_id = '{run.info.run_id}'"
    )
    return found


def _describe_kept_files(name: str, place: str, error: Exception) -> str:
    reason = describe_error(error, only_first_line=True)
    return f"MLflow's {name}: its files at {place} could not be deleted ({reason})"
