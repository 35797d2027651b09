"""The model of one method of a finished run for Python; its predictions are data frames."""

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

    bundle: the files that it is made of.
    """

    def __init__(self, bundle: Bundle):
        self.bundle = bundle
        self.predictor = Predictor(bundle)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.bundle.where}: {', '.join(self.tasks)}>"

    @property
    def tasks(self) -> list[str]:
        """The tasks that it serves, in stream order."""
        return [task.name for task in self.bundle.tasks]

    def classes(self, task: str) -> tuple[str, ...]:
        """Return the classes of a task. Raise `UserError` when it is not served."""
        return self.bundle.task(task).classes

    def predict(
        self,
        images: Sequence[Any],
        task: Sequence[str | None] | str | None = None,
        rule: Rule = "refuse",
        top: int = 0,
    ) -> pd.DataFrame:
        """Return a row for each image: class, probability, task, confidence, probabilities.

        images: paths, bytes of JPEG, PNG or WebP files, uint8 arrays (H, W, 3), or Pillow images.
        task: one for all images, or one for each; None where the method can find it out. rule: for
        images without a task under other methods, `refuse`, or `confident`: the task that answers
        with the highest probability. top: how many probabilities are listed, 0 for all. Raise
        `UserError` when an image cannot be read, or its task is needed.
        """
        rows = [
            answer.row() for answer in make_answer_rows(self.predictor, images, task, rule, top)
        ]
        return data_frame(rows, Answer("", 0.0, "", 0.0, {}).row())

    def attention(self, images: Sequence[Any], task: str) -> dict[str, NDArray[np.float32]]:
        """Return where the class token looks in each block: (n, h, w) over the grid of patches.

        By name of the block, means over heads, relative to uniform attention, which is 1
        everywhere; empty for a backbone without a class token among patches. A block that runs
        twice, as under top-down feedback, has its second pass. images: as for `predict`. Raise
        `UserError` when the task is not served or an image cannot be read.
        """
        self.bundle.task(task)
        limits = Limits(
            self.bundle.body["max_pixels"], value_range=self.bundle.value_range, paths=True
        )
        parts: dict[str, list[NDArray[np.float32]]] = {}
        for start in range(0, len(images), limits.images):
            pixels = self.predictor.read_pixels(images[start : start + limits.images], limits)
            for name, look in self._attention(pixels, task).items():
                parts.setdefault(name, []).append(look)
        return {name: np.concatenate(looks) for name, looks in parts.items()}

    @torch.no_grad()
    def _attention(self, pixels: NDArray[Any], task: str) -> dict[str, NDArray[np.float32]]:
        """Return the attention for pixels (n, 3, S, S), by name of the block."""
        method = self.predictor.method
        with self.predictor.lock, record_class_attention(method) as blocks:
            images = self.predictor.network_input(pixels)
            logits_with_task(method, images, task)
        # a network that ran on other inputs than these images, or not at all, has no map for these
        ran = [block for block in blocks if block.passes and len(block.passes[-1]) == len(pixels)]
        networks = {block.network for block in ran}
        looks = {}
        for block in ran:
            name = f"block {block.block}"
            if len(networks) > 1:
                name = f"{block.network}, {name}"
            looks[name] = block.passes[-1].float().numpy()
        return looks

    @property
    def sizes(self) -> pd.DataFrame:
        """A row for each task: its number of classes, and the bytes of the state."""
        return data_frame(task_rows(self.bundle.body))

    def save(self, folder: AnyPath) -> None:
        """Write the model to a new folder or a URI, for `open_model`, `predict` and `serve`."""
        write_folder(self.bundle, os.fspath(folder))

    def save_timm(self, folder: AnyPath, task: str) -> None:
        """Write one task into a new folder, as weights and config that plain timm reads.

        `timm.create_model("local-dir:FOLDER", pretrained=True)` reads it. Raise `UserError` where
        timm's own model does not give the task's logits.
        """
        from workers.serving import timm_model

        timm_model.write(self.bundle, task, absolute(os.fspath(folder)))

    def save_onnx(self, file: AnyPath, task: str) -> None:
        """Write one task as an ONNX file: `images` (N, 3, H, W), normalised, give `logits`.

        It needs the packages of the extra `onnx`. Raise `UserError` where one is missing, or where
        onnxruntime does not give the task's logits.
        """
        from workers.serving import onnx_file

        onnx_file.write(self.bundle, task, absolute(os.fspath(file)))

    def export_task(self, task: str, file: AnyPath) -> None:
        """Write one task into a file of its own, which `import_task` adds to another folder."""
        export_task(self.bundle, task, os.fspath(file))


def make_answer_rows(
    predictor: Predictor,
    images: Sequence[Any],
    task: Sequence[str | None] | str | None,
    rule: Rule,
    top: int,
) -> Iterator[Answer]:
    """Yield the answer to each of any number of images, in parts that a request may have.

    The arguments are those of `Predictor.predict`; strings among the images are paths.
    """
    if isinstance(images, os.PathLike):
        images = os.fspath(images)  # is refused as any single image is
    tasks = predictor.check_request(len(images), task, rule, top)
    limits = Limits(
        predictor.bundle.body["max_pixels"],
        value_range=predictor.bundle.value_range,
        paths=True,
    )
    for start in range(0, len(images), limits.images):
        part = slice(start, start + limits.images)
        yield from predictor.predict(images[part], tasks[part], rule, top, limits)
