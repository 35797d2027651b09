"""What MLflow loads and serves: a bundle and this file, with `workers` beside them; no checkout is
needed, and nothing is unpickled.

`mlflow.pyfunc.load_model(URI).predict(frame)`: a column `image` (base64, bytes, nested lists or an
array (height, width, 3) of values 0 to 255; where ACCRETE_ALLOW_PATHS is 1 also the path of a
file), and if wanted a column `task`. params: `rule` and `top`, see `Predictor.predict`.
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
    """Status 400, and one sentence that stays: MLflow's server would put the whole input in front
    of it."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "message" or "message" not in self.__dict__:
            super().__setattr__(name, value)


class ServedModel(PythonModel):
    """Answers with a row per image: class, probability, task, confidence, probabilities."""

    # MLflow would ask for type hints, take them for a schema, and they cannot say what the
    # signature says
    _skip_type_hint_validation = True

    def load_context(self, context: Any) -> None:
        self.served = Predictor.open(context.artifacts["bundle"])

    def predict(
        self, context: Any, model_input: Any, params: dict[str, Any] | None = None
    ) -> pd.DataFrame:
        limits = Limits(self.served.bundle.body["max_pixels"], paths=os.environ.get(PATHS) == "1")
        given = {"rule": "refuse", "top": 0, **(params or {})}
        try:
            images, tasks = columns(model_input)
            top = given["top"].item() if isinstance(given["top"], np.integer) else given["top"]
            found = self.served.predict(images, tasks, given["rule"], top, limits)
        except UserError as error:
            raise Refused(" ".join(str(error).split()), INVALID_PARAMETER_VALUE) from None
        return pd.DataFrame(
            [answer.row() for answer in found],
            columns=["class", "probability", "task", "confidence", "probabilities"],
        )


def columns(given: Any) -> tuple[list[Any], list[str | None]]:
    """A frame, or records -> images, and a task or None for each."""
    try:
        frame = given if isinstance(given, pd.DataFrame) else pd.DataFrame.from_records(given)
    except Exception as error:  # whatever was sent
        raise UserError(
            f"the input is no table ({error}); give records such as {{'image': BASE64, 'task': "
            f"NAME}}"
        ) from None
    if "image" not in frame:
        raise UserError(
            f"the input has no column 'image', it has {[str(name) for name in frame][:8]}; give "
            f"records such as {{'image': BASE64, 'task': NAME}}"
        )
    tasks = list(frame["task"]) if "task" in frame else [None] * len(frame)
    return list(frame["image"]), [
        None if pd.isna(task) or task == "" else str(task) for task in tasks
    ]


if __name__ != "pipeline.serving.served_model":  # MLflow runs this file under a name of its own
    mlflow.models.set_model(ServedModel())
