"""The model that MLflow loads and serves: a bundle and this file, with `workers` beside them.

It needs no checkout, and nothing is unpickled. Use: `mlflow.pyfunc.load_model(URI).predict(frame)`.
frame: a column `image` (base64, bytes, nested lists or an array (height, width, 3) of values 0 to
255; also the path of a file if ACCRETE_ALLOW_PATHS is 1), and optionally a column `task`.
params: `rule` and `top`, see `Predictor.predict`.
"""

from __future__ import annotations

import os
from typing import Any

import mlflow
import numpy as np
import pandas as pd
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE
from mlflow.pyfunc.model import PythonModel

from workers.errors import UserError
from workers.serving.images import Limits
from workers.serving.server import Predictor

PATHS = "ACCRETE_ALLOW_PATHS"


class Refused(MlflowException):
    """Status 400 with one sentence.

    The message cannot be changed: MLflow's server would put the whole input in front of it.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "message" or "message" not in self.__dict__:
            super().__setattr__(name, value)


class ServedModel(PythonModel):
    """Answers with a row per image: class, probability, task, confidence, probabilities."""

    # MLflow derives a schema from type hints, which cannot express what the signature does.
    _skip_type_hint_validation = True

    def load_context(self, context: Any) -> None:
        """Load the bundle."""
        self.served = Predictor.open(context.artifacts["bundle"])

    def predict(
        self, context: Any, model_input: Any, params: dict[str, Any] | None = None
    ) -> pd.DataFrame:
        """Return a row per image. Raise `Refused` when the input cannot be answered."""
        bundle = self.served.bundle
        limits = Limits(
            bundle.body["max_pixels"],
            value_range=bundle.value_range,
            paths=os.environ.get(PATHS) == "1",
        )
        params = params or {}
        rule = params.get("rule", "refuse")
        top = params.get("top", 0)
        if isinstance(top, np.integer):
            top = top.item()
        try:
            images, tasks = columns(model_input)
            answers = self.served.predict(images, tasks, rule, top, limits)
        except UserError as error:
            raise Refused(" ".join(str(error).split()), INVALID_PARAMETER_VALUE) from None
        return pd.DataFrame(
            [answer.row() for answer in answers],
            columns=["class", "probability", "task", "confidence", "probabilities"],
        )


def columns(model_input: Any) -> tuple[list[Any], list[str | None]]:
    """Return the images of a frame or of records, and a task or None for each."""
    frame = model_input
    try:
        if not isinstance(model_input, pd.DataFrame):
            frame = pd.DataFrame.from_records(model_input)
    except Exception as error:  # whatever was sent
        raise UserError(
            f"the input is no table ({error}); "
            "give records such as {'image': BASE64, 'task': NAME}"
        ) from None
    if "image" not in frame:
        raise UserError(
            f"the input has no column 'image', it has {[str(name) for name in frame][:8]}; "
            "give records such as {'image': BASE64, 'task': NAME}"
        )
    tasks: list[str | None] = [None] * len(frame)
    if "task" in frame:
        tasks = [task_name(value) for value in frame["task"]]
    return list(frame["image"]), tasks


def task_name(value: Any) -> str | None:
    """Return a cell of the column `task` as a name; None when it is empty."""
    if pd.isna(value) or value == "":
        return None
    return str(value)


if __name__ != "pipeline.serving.served_model":  # MLflow runs this file under a name of its own
    mlflow.models.set_model(ServedModel())
