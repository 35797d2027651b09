"""Methods that infer the task of an image, and then predict as if the task were given."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from workers.job import ActiveIf
from workers.methods.base import S
from workers.methods.bases.class_incremental import ClassIncremental

# Distance by which the logits of other tasks' classes are below the smallest logit of the inferred
# task. Their softmax is below exp(-100), practically zero.
LOGIT_GAP = 100.0
# Marks settings of task inference: they have an effect only if the task of an image is not given.
NOT_GIVEN = ActiveIf("scenario", ("class", "domain"))


class ChoosesTask(ClassIncremental[S]):
    """A method that infers the task of each image. It implements the protocol `InfersTask`."""

    def candidates(self) -> dict[str, tuple[str, ...]]:
        """Return the tasks in the order of `class_slices`; no tasks in scenario `task`."""
        if self.scenario == "task":
            return {}
        return {name: (name,) for name in self.class_slices()}

    @abstractmethod
    def infer(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the index in `candidates` and a confidence in [0, 1] for each image, (b,) each."""

    def logits(self, images: Tensor, task: str | None) -> Tensor:
        """Return the logits. If `task` is None, infer the tasks first, in any scenario."""
        if task is not None:
            return super().logits(images, task)
        choices, _ = self.infer(images)
        return self.answer(images, choices, None)

    def answer(self, images: Tensor, choices: Tensor, task: str | None) -> Tensor:
        """Return each image's logits (b, classes so far) under the task inferred for it.

        The columns of other tasks are lower by LOGIT_GAP or more. In scenario `domain` there is one
        column per class, because all tasks have the same classes.

        Args:
            images: Images (b, 3, H, W).
            choices: Indices in `candidates`, (b,).
            task: Not used.
        """
        slices = self.class_slices()
        if self.scenario == "domain":
            slices = {name: slice(0, part.stop - part.start) for name, part in slices.items()}
        width = max(columns.stop for columns in slices.values())
        logits = images.new_empty((len(images), width))
        for index, (name, columns) in enumerate(slices.items()):
            rows = (choices == index).nonzero().squeeze(1)
            if len(rows):
                task_logits = self.logits(images[rows], name).to(logits.dtype)
                logits[rows] = task_logits.amin(1, keepdim=True) - LOGIT_GAP
                logits[rows, columns] = task_logits
        return logits
