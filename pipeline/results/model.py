"""The model of one method of a finished run, for Python: what it answers, as a data frame."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pipeline.results.data_frame import data_frame
from pipeline.yaml_files import absolute
from workers.serving.bundle import Bundle
from workers.serving.images import Limits
from workers.serving.server import Answer, Predictor, Rule

if TYPE_CHECKING:
    import pandas as pd


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
        rows = [answer.row() for answer in answers_of(self.predictor, images, task, rule, top)]
        return data_frame(rows, Answer("", 0.0, "", 0.0, {}).row())

    def save(self, folder: str) -> None:
        """Write the model into a new folder or a URI, which `predict` and `serve` also take."""
        self.bundle.write(absolute(folder))


def answers_of(
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
    limits = Limits(predictor.bundle.body["max_pixels"], paths=True)
    for start in range(0, len(images), limits.images):
        part = slice(start, start + limits.images)
        yield from predictor.predict(images[part], tasks[part], rule, top, limits)
