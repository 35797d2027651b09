"""`Model`: a trained model of one method, for the Python interface."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.config.yaml_files import absolute
from pipeline.results.bundles import export_task, write_folder
from pipeline.results.data_frame import data_frame
from workers.analysis import logits_with_task
from workers.model.attention import record_class_attention
from workers.serving.bundle import Bundle
from workers.serving.images import Limits
from workers.serving.model_file import Rule, task_rows
from workers.serving.server import Answer, Predictor

if TYPE_CHECKING:
    import pandas as pd

AnyPath = str | os.PathLike[str]


class Model:
    """One network that serves all tasks of a method.

    Attributes:
        bundle: The files of the model, see `workers.serving.bundle.Bundle`.
        predictor: The network with its weights, which classifies images.
    """

    def __init__(self, bundle: Bundle):
        self.bundle = bundle
        self.predictor = Predictor(bundle)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.bundle.where}: {', '.join(self.tasks)}>"

    @property
    def tasks(self) -> list[str]:
        """Names of the served tasks, in stream order."""
        return [task.name for task in self.bundle.tasks]

    def classes(self, task: str) -> tuple[str, ...]:
        """Return the classes of a task. Raise `UserError` if the task is not served."""
        return self.bundle.task(task).classes

    def predict(
        self,
        images: Sequence[Any],
        task: Sequence[str | None] | str | None = None,
        rule: Rule = "refuse",
        top: int = 0,
    ) -> pd.DataFrame:
        """Classify images.

        Args:
            images: Paths, bytes of JPEG, PNG or WebP files, uint8 arrays (H, W, 3), or Pillow
                images.
            task: One task for all images, or a task or None for each image. None: the method infers
                the task.
            rule: How to choose the task of an image for which `task` is None, if the method cannot
                infer it. `refuse` raises an error; `confident`, `entropy`, `nearest` and `ranpac`
                choose a task; `recommended` is the one of these four rules that was right most
                often when the model was written. See `workers/serving/task_rules.py`.
            top: Number of probabilities per image; 0 for all.

        Returns:
            One row per image with the columns class, probability (of the class), task,
            confidence (certainty of the task, 1 if it was given), and probabilities (class ->
            probability). See `workers.serving.server.Answer`.

        Raises:
            UserError: If an image cannot be read, a task is not served, or a task is required but
                missing.
        """
        rows = [
            answer.row() for answer in predict_in_chunks(self.predictor, images, task, rule, top)
        ]
        return data_frame(rows, Answer("", 0.0, "", 0.0, {}).row())

    def attention(self, images: Sequence[Any], task: str) -> dict[str, NDArray[np.float32]]:
        """Return attention maps of the class token over the (h, w) grid of patches.

        Values are means over heads, relative to uniform attention, which is 1. If a block runs
        twice (top-down feedback), the map is from the second pass.

        Args:
            images: See `predict`.
            task: The task that the network is set to.

        Returns:
            Name of the block -> float32 (n, h, w). Empty if the backbone has no class token.

        Raises:
            UserError: If the task is not served or an image cannot be read.
        """
        self.bundle.task(task)
        limits = Limits(
            self.bundle.body["max_pixels"], value_range=self.bundle.value_range, paths=True
        )
        parts: dict[str, list[NDArray[np.float32]]] = {}
        for start in range(0, len(images), limits.images):
            pixels = self.predictor.read_pixels(images[start : start + limits.images], limits)
            for name, attention_map in self._attention(pixels, task).items():
                parts.setdefault(name, []).append(attention_map)
        return {name: np.concatenate(maps) for name, maps in parts.items()}

    @torch.no_grad()
    def _attention(self, pixels: NDArray[Any], task: str) -> dict[str, NDArray[np.float32]]:
        """Return name of the block -> attention maps, for pixels (n, 3, S, S)."""
        method = self.predictor.method
        with self.predictor.lock, record_class_attention(method) as blocks:
            images = self.predictor.network_input(pixels)
            logits_with_task(method, images, task)
        # Skip networks that did not run, or that ran on other inputs (with another batch size).
        ran = [block for block in blocks if block.passes and len(block.passes[-1]) == len(pixels)]
        networks = {block.network for block in ran}
        maps = {}
        for block in ran:
            name = f"block {block.block}"
            if len(networks) > 1:
                name = f"{block.network}, {name}"
            maps[name] = block.passes[-1].float().numpy()
        return maps

    @property
    def sizes(self) -> pd.DataFrame:
        """One row per task: the number of classes, and the bytes of the state."""
        return data_frame(task_rows(self.bundle.body))

    def save(self, folder: AnyPath) -> None:
        """Write the model to a new folder or URI, for `open_model`, `predict` and `serve`."""
        write_folder(self.bundle, os.fspath(folder))

    def save_timm(self, folder: AnyPath, task: str) -> None:
        """Write one task into a new folder, as weights and config for timm.

        `timm.create_model("local-dir:FOLDER", pretrained=True)` loads the model.

        Raises:
            UserError: If the model of timm does not compute the same logits.
        """
        from workers.serving import timm_model

        timm_model.write_timm_folder(self.bundle, task, absolute(os.fspath(folder)))

    def save_onnx(self, file: AnyPath, task: str) -> None:
        """Write one task as an ONNX file.

        The input is `images` (N, 3, H, W), normalised; the output is `logits`. The packages of the
        extra `onnx` are required.

        Raises:
            UserError: If a package is missing, or if onnxruntime does not compute the same logits.
        """
        from workers.serving import onnx_file

        onnx_file.write_onnx_file(self.bundle, task, absolute(os.fspath(file)))

    def export_task(self, task: str, file: AnyPath) -> None:
        """Write one task to a file, which `import_task` can add to another model folder."""
        export_task(self.bundle, task, os.fspath(file))


def predict_in_chunks(
    predictor: Predictor,
    images: Sequence[Any],
    task: Sequence[str | None] | str | None,
    rule: Rule,
    top: int,
) -> Iterator[Answer]:
    """Yield an answer for each image. Images are read in chunks of at most `Limits.images`.

    See `Predictor.predict` for the arguments. Strings among the images are paths.
    """
    if isinstance(images, os.PathLike):
        images = os.fspath(images)  # `read_pixels` rejects a single path like any single image
    tasks = predictor.check_request(len(images), task, rule, top)
    limits = Limits(
        predictor.bundle.body["max_pixels"],
        value_range=predictor.bundle.value_range,
        paths=True,
    )
    for start in range(0, len(images), limits.images):
        chunk = slice(start, start + limits.images)
        yield from predictor.predict(images[chunk], tasks[chunk], rule, top, limits)
