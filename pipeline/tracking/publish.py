"""A bundle as a model in MLflow: logged to the run of its method, and registered;
`models:/NAME@champion` then serves it anywhere."""

from __future__ import annotations

import base64
import io
import logging
import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.serving.bundle import Bundle

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
MOST_BYTES = 2 << 30  # a larger bundle stays where it is
ALIAS = "champion"
TAG = "accrete.bundle"


@dataclass(frozen=True)
class Published:
    """model: its address in MLflow, "" where it was not logged. version: of the registered model.
    warning: why not, in a sentence."""

    model: str
    version: str = ""
    warning: str = ""


def log(
    uri: str,
    run_id: str,
    folder: str,
    name: str = "",
    alias: str = ALIAS,
    most_bytes: int = MOST_BYTES,
) -> Published:
    """Logs the bundle in `folder` to the run `run_id`, and registers it as `name` where one is
    given, with `alias` on the new version. The run's status and times stay as they are, so that it
    may be finished already; what is logged already is not logged again.

    uri: the tracking URI. Raises UserError where the folder holds no bundle, and what MLflow
    raises.
    """
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    from mlflow import MlflowClient

    bundle = Bundle.open(folder)
    if bundle.nbytes > most_bytes:
        return Published(
            "",
            warning=f"the model of {bundle.body['method']!r} takes {bundle.nbytes / 1e6:.0f} MB, "
            f"more than {most_bytes / 1e6:.0f}, and "
            "was not logged to MLflow; `python -m pipeline bundle` makes a folder of it",
        )
    client = MlflowClient(uri)
    run, digest = client.get_run(run_id), bundle.body["sha256"]
    found = [
        m
        for m in client.search_logged_models(
            [run.info.experiment_id], f"source_run_id = '{run_id}'"
        )
        if m.tags.get(TAG) == digest
    ]
    model = next((m for m in found if m.status == "READY"), None) or _logged(
        client, run, bundle, folder
    )
    if not name:
        return Published(f"models:/{model.model_id}")
    return Published(
        f"models:/{name}@{alias}",
        _registered(client, model, run_id, name, alias, note_of(bundle, name, alias)),
    )


def _logged(client: Any, run: Any, bundle: Bundle, folder: str) -> Any:
    """By the client's own calls: the fluent ones start runs, and copy every metric of the run one
    by one."""
    from mlflow.entities import LoggedModelOutput, LoggedModelStatus

    body, run_id = bundle.body, run.info.run_id
    tags = {
        TAG: body["sha256"],
        "method": body["method"],
        "scenario": body["scenario"],
        "tasks": ", ".join(t.name for t in bundle.tasks)[:4000],
    }
    model = client.create_logged_model(
        run.info.experiment_id,
        name="model",
        source_run_id=run_id,
        model_type="classifier",
        tags=tags,
    )
    try:
        with tempfile.TemporaryDirectory(prefix="accrete-") as place:
            save(
                str(Path(place, "model")),
                bundle,
                folder,
                artifact_path=model.artifact_location,
                model_uuid=model.model_id,
                run_id=run_id,
                model_id=model.model_id,
            )
            client.log_model_artifacts(model.model_id, str(Path(place, "model")))
    except BaseException:
        client.finalize_logged_model(model.model_id, LoggedModelStatus.FAILED)
        raise
    client.log_outputs(run_id, [LoggedModelOutput(model.model_id, 0)])
    return client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)


def save(path: str, bundle: Bundle, folder: str, **identity: Any) -> None:
    """Writes an MLflow model to the new folder `path`. folder: where the bundle lies. identity: of
    the model, if it has one."""
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
    """A small grey PNG: what an image looks like in a request."""
    from PIL import Image

    stream = io.BytesIO()
    Image.new("RGB", (8, 8), "grey").save(stream, "PNG")
    return stream.getvalue()


def requirements() -> list[str]:
    """What serving imports, at the versions that this checkout is tested with."""
    pins = dict(
        line.strip().split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    return [f"{name}=={pins[name]}" for name in PACKAGES]


def note_of(bundle: Bundle, name: str, alias: str) -> str:
    """What MLflow shows as the description of a registered model (Markdown)."""
    tasks = ", ".join(
        f"`{task.name}` ({len(task.classes)} classes)" for task in bundle.tasks[:40]
    ) + (" ..." if len(bundle.tasks) > 40 else "")
    return (
        f"One model that serves every task of a run by method **{bundle.body['method']}**, "
        f"scenario `{bundle.body['scenario']}`: {tasks}.\n\n"
        f"`mlflow.pyfunc.load_model('models:/{name}@{alias}').predict(frame)` takes a column "
        "`image` (base64, bytes or arrays) and, where the task is "
        "to be told, a column `task`; it answers with class, probability, task, confidence and "
        "all probabilities. "
        f"`mlflow models serve -m models:/{name}@{alias} --env-manager local` answers over HTTP."
    )


def _registered(client: Any, model: Any, run_id: str, name: str, alias: str, note: str) -> str:
    from mlflow.exceptions import MlflowException

    with suppress(MlflowException):  # it is there already; what else is wrong, the next call says
        client.create_registered_model(name)
    client.update_registered_model(name, note)
    there = [
        v
        for v in client.search_model_versions(f"name = '{name}'")
        if v.source == model.artifact_location
    ]
    version = (
        there[0]
        if there
        else client.create_model_version(
            name,
            source=model.artifact_location,
            run_id=run_id,
            model_id=model.model_id,
            description=note,
        )
    )
    client.set_registered_model_alias(name, alias, version.version)
    return str(version.version)
