"""Log a bundle as a model to the method's run in MLflow, and register the model.

Start reading at `log`. A bundle is a folder that serves all tasks of a method. After it is
registered, the URI `models:/NAME@champion` can be loaded and served on any machine.
"""

from __future__ import annotations

import base64
import io
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.tracking import mlflow_internals
from workers.serving.bundle import Bundle

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel, Run

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "mlflow",
    "numpy",
    "pandas",
    "pillow",
    "pyarrow",
    "pydantic",
    "safetensors",
    "timm",
    "torch",
    "torchvision",
)
MAX_BYTES = 2 << 30  # maximal size of a logged bundle
ALIAS = "champion"
TAG = "accrete.bundle"  # tag of a logged model with the digest of its bundle


@dataclass(frozen=True)
class Published:
    """A model in MLflow.

    Attributes:
        model: URI of the model; "" if the model was not logged.
        version: Version of the registered model; "" if the model was not registered.
        warning: Reason why the model was not logged; "" if it was logged.
    """

    model: str
    version: str = ""
    warning: str = ""


def log(
    uri: str,
    run_id: str,
    folder: str,
    name: str = "",
    alias: str = ALIAS,
    max_bytes: int = MAX_BYTES,
) -> Published:
    """Log the bundle in a folder to a run, and register it if `name` is given.

    The run may have ended: its status and times do not change. A bundle that was logged to this run
    before is not logged again.

    Args:
        uri: The tracking URI.
        run_id: Id of the run.
        folder: Folder of the bundle.
        name: Name of the registered model. Empty: the model is not registered.
        alias: Alias to set on the version.
        max_bytes: Largest size of a logged bundle.

    Returns:
        The URI and version of the model, or the reason why it was not logged.

    Raises:
        UserError: If the folder has no bundle.
    """
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModelOutput

    bundle = Bundle.open(folder)
    if bundle.nbytes > max_bytes:
        return Published(
            "",
            warning=f"the model of {bundle.body['method']!r} takes {bundle.nbytes / 1e6:.0f} MB, "
            f"more than {max_bytes / 1e6:.0f}, and was not logged to MLflow; "
            "`python -m pipeline bundle` makes a folder of it",
        )
    client = MlflowClient(uri)
    run = client.get_run(run_id)
    model = _find_model(client, run, bundle) or _create_model(client, run, bundle)
    if model.status != "READY":
        model = _upload_model(client, run_id, model, bundle, folder)
    outputs = run.outputs.model_outputs if run.outputs else []
    if model.model_id not in [output.model_id for output in outputs]:
        client.log_outputs(run_id, [LoggedModelOutput(model.model_id, 0)])
    if not name:
        return Published(f"models:/{model.model_id}")
    note = format_note(bundle, name, alias)
    version = _register_model(client, model, run_id, name, alias, note)
    return Published(f"models:/{name}@{alias}", version)


def _find_model(client: MlflowClient, run: Run, bundle: Bundle) -> LoggedModel | None:
    """Return the model that was created in a run for this bundle, or None.

    The model can be without files, because an earlier process was killed before it wrote them. Then
    its status is not READY.
    """
    models = client.search_logged_models(
        [run.info.experiment_id], f"source_run_id = '{run.info.run_id}'"
    )
    for model in models:
        if model.tags.get(TAG) == bundle.body["sha256"]:
            return model
    return None


def _create_model(client: MlflowClient, run: Run, bundle: Bundle) -> LoggedModel:
    """Create a model without files, with MLflow's client.

    MLflow's fluent functions are not used, because they start runs and copy every metric of the run
    one by one.
    """
    body = bundle.body
    tags = {
        TAG: body["sha256"],
        "method": body["method"],
        "scenario": body["scenario"],
        "tasks": ", ".join(t.name for t in bundle.tasks)[:4000],
    }
    return client.create_logged_model(
        run.info.experiment_id,
        name="model",
        source_run_id=run.info.run_id,
        model_type="classifier",
        tags=tags,
    )


def _upload_model(
    client: MlflowClient, run_id: str, model: LoggedModel, bundle: Bundle, folder: str
) -> LoggedModel:
    """Upload the files of a model, and return the model with the status READY."""
    from mlflow.entities import LoggedModelStatus

    try:
        with tempfile.TemporaryDirectory(prefix="accrete-") as temporary:
            model_folder = str(Path(temporary, "model"))
            save(
                model_folder,
                bundle,
                folder,
                artifact_path=model.artifact_location,
                model_uuid=model.model_id,
                run_id=run_id,
                model_id=model.model_id,
            )
            client.log_model_artifacts(model.model_id, model_folder)
    except BaseException:
        client.finalize_logged_model(model.model_id, LoggedModelStatus.FAILED)
        raise
    return client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)


@contextmanager
def without_warning(text: str) -> Iterator[None]:
    """Context manager that drops warnings with the prefix `text`, and shows all others at its end.

    A filter is not sufficient, because packages that are imported inside insert their own filters
    before it.
    """
    with warnings.catch_warnings(record=True) as caught:
        yield
    for entry in caught:
        if not str(entry.message).startswith(text):
            warnings.warn_explicit(entry.message, entry.category, entry.filename, entry.lineno)


def save(path: str, bundle: Bundle, folder: str, **identity: Any) -> None:
    """Write an MLflow model to the new folder `path`.

    Args:
        path: The new folder.
        bundle: The bundle.
        folder: Folder of the bundle.
        identity: Ids of a model that was created before, as arguments of MLflow's `Model`. Empty
            for a new model.
    """
    import mlflow
    import pandas as pd
    from mlflow.models import Model, ModelSignature
    from mlflow.types.schema import AnyType, ColSpec, DataType, Map, ParamSchema, ParamSpec, Schema

    logging.getLogger("mlflow.pyfunc").setLevel(logging.WARNING)
    names = (
        ("class", DataType.string),
        ("probability", DataType.double),
        ("task", DataType.string),
        ("confidence", DataType.double),
    )
    answers = Schema(
        [
            *(ColSpec(kind, name) for name, kind in names),
            ColSpec(Map(DataType.double), "probabilities"),
        ]
    )
    params = ParamSchema(
        [ParamSpec("rule", DataType.string, "refuse"), ParamSpec("top", DataType.long, 0)]
    )
    signature = ModelSignature(
        Schema([ColSpec(AnyType(), "image"), ColSpec(DataType.string, "task", required=False)]),
        answers,
        params,
    )
    example = pd.DataFrame(
        [{"image": base64.b64encode(picture()).decode(), "task": bundle.tasks[0].name}]
    )
    with (
        without_warning("Failed to infer signature from type hint"),  # the model has a signature
        mlflow_internals.without_requirements_check(),
    ):
        mlflow.pyfunc.save_model(
            path,
            python_model=str(ROOT / "pipeline" / "serving" / "served_model.py"),
            artifacts={"bundle": folder},
            code_paths=[str(ROOT / "workers")],
            pip_requirements=requirements(),
            signature=signature,
            input_example=example,
            mlflow_model=Model(**identity),
        )


def picture() -> bytes:
    """Return a small grey PNG, the image of the example request."""
    from PIL import Image

    stream = io.BytesIO()
    Image.new("RGB", (8, 8), "grey").save(stream, "PNG")
    return stream.getvalue()


def requirements() -> list[str]:
    """Return the packages that serving imports, pinned to the installed versions."""
    # without the local part of versions like `2.11.0+cpu`, which the package index does not have
    return [f"{name}=={metadata.version(name).partition('+')[0]}" for name in PACKAGES]


def format_note(bundle: Bundle, name: str, alias: str) -> str:
    """Return the description that MLflow shows for a registered model (Markdown)."""
    names = [f"`{task.name}` ({len(task.classes)} classes)" for task in bundle.tasks]
    tasks = ", ".join(names[:40])
    if len(names) > 40:
        tasks += " ..."
    return (
        f"One model that serves every task of a run by method **{bundle.body['method']}**, "
        f"scenario `{bundle.body['scenario']}`: {tasks}.\n\n"
        f"`mlflow.pyfunc.load_model('models:/{name}@{alias}').predict(frame)` takes a column "
        "`image` (base64, bytes or arrays), and a column `task` if the task is known. It returns "
        "class, probability, task, confidence and all probabilities. "
        f"`mlflow models serve -m models:/{name}@{alias} --env-manager local` answers over HTTP."
    )


def _register_model(
    client: MlflowClient, model: LoggedModel, run_id: str, name: str, alias: str, note: str
) -> str:
    """Register a model as a new version, unless it is registered. Set the alias and the note.

    Returns:
        The version of the model.
    """
    from mlflow.exceptions import MlflowException

    with suppress(MlflowException):  # the name exists; any other error is raised by the next call
        client.create_registered_model(name)
    client.update_registered_model(name, note)
    versions = client.search_model_versions(f"name = '{name}'")
    version = next((v for v in versions if v.source == model.artifact_location), None)
    if version is None:
        version = client.create_model_version(
            name,
            source=model.artifact_location,
            run_id=run_id,
            model_id=model.model_id,
            description=note,
        )
    client.set_registered_model_alias(name, alias, version.version)
    return str(version.version)
