"""The model that MLflow loads and serves. It consists of a bundle, this file and package `workers`.

`pipeline/tracking/publish.py` logs it. MLflow executes this file as the model's code ("models from
code"), so the model works without a checkout of this project, and does not use pickle.

Example:
    >>> model = mlflow.pyfunc.load_model(uri)  # doctest: +SKIP
    >>> model.predict(frame, params={"rule": "confident", "top": 3})  # doctest: +SKIP

The data frame has a column `image` and optionally a column `task`. An image is the bytes of a JPEG,
PNG or WebP file, the base64 text of these bytes, nested lists, or an array (height, width, 3) with
values from 0 to 255. With ACCRETE_ALLOW_PATHS=1 it can also be the path of a file. `rule` and `top`
are the parameters of `Predictor.predict`.
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


class InvalidInput(MlflowException):
    """Error for invalid input. MLflow's server answers with status 400.

    MLflow's server would add the complete input to the attribute `message`. Therefore, assignments
    to it are ignored after the creation of the error.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "message" or "message" not in self.__dict__:
            super().__setattr__(name, value)


class ServedModel(PythonModel):
    """The model for MLflow. Its answer has a row for each image; see `predict`."""

    # The logged signature is more precise than a schema that MLflow derives from type hints.
    _skip_type_hint_validation = True

    def load_context(self, context: Any) -> None:
        """Load the bundle of MLflow's context."""
        self.served = Predictor.open(context.artifacts["bundle"])

    def predict(
        self, context: Any, model_input: Any, params: dict[str, Any] | None = None
    ) -> pd.DataFrame:
        """Return a row for each image: class, probability, task, confidence and probabilities.

        Args:
            context: Unused. MLflow passes it.
            model_input: A data frame or records; see the docstring of this module.
            params: `rule` (default: `refuse`) and `top` (default: 0, all probabilities), or None.
                See `Predictor.predict`.

        Raises:
            InvalidInput: If the input is invalid.
        """
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
            images, tasks = split_columns(model_input)
            answers = self.served.predict(images, tasks, rule, top, limits)
        except UserError as error:
            raise InvalidInput(" ".join(str(error).split()), INVALID_PARAMETER_VALUE) from None
        return pd.DataFrame(
            [answer.row() for answer in answers],
            columns=["class", "probability", "task", "confidence", "probabilities"],
        )


def split_columns(model_input: Any) -> tuple[list[Any], list[str | None]]:
    """Return the images of a data frame or of records, and a task or None for each image.

    Raises:
        UserError: If the input is not a table, or has no column `image`.
    """
    frame = model_input
    try:
        if not isinstance(model_input, pd.DataFrame):
            frame = pd.DataFrame.from_records(model_input)
    except Exception as error:  # pandas raises errors of many types for invalid input
        raise UserError(
            f"the input is not a table ({error}); "
            "give records such as {'image': BASE64, 'task': NAME}"
        ) from None
    if "image" not in frame:
        raise UserError(
            f"the input has no column 'image', it has {[str(name) for name in frame][:8]}; "
            "give records such as {'image': BASE64, 'task': NAME}"
        )
    tasks: list[str | None] = [None] * len(frame)
    if "task" in frame:
        tasks = [to_task_name(value) for value in frame["task"]]
    return list(frame["image"]), tasks


def to_task_name(value: Any) -> str | None:
    """Return a cell of the column `task` as a name, or None if the cell is empty."""
    if pd.isna(value) or value == "":
        return None
    return str(value)


if __name__ != "pipeline.serving.served_model":  # MLflow executes this file under another name
    mlflow.models.set_model(ServedModel())
