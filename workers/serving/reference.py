"""The reference of a task: class means of training images, and distances of test images to them.

`reference.safetensors` of a bundle has up to three tensors per task: `means/TASK`, float32
(classes, d), `levels/TASK`, float32 (19,), and `router/TASK`, float32 (classes, random features),
for the rule `ranpac`. There may be no routers, for example with one task. The metadata contains for
each task the digest of the measured state, and the number of test images or the reason why the
reference is missing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from workers.errors import UserError, describe_error
from workers.serving.bundle import Bundle
from workers.serving.model_file import REFERENCE, REMAKE, state_file
from workers.storage.taskstate import check_values, read_metadata

METADATA = "accrete.reference"  # key of the metadata
LEVELS = tuple(level / 20 for level in range(1, 20))  # quantiles 0.05, 0.1, ..., 0.95
MAX_PROJECTION = 10_000  # maximum number of random features of a router
MEDIAN, FAR = LEVELS.index(0.5), LEVELS.index(0.95)  # positions of these quantiles
OLD_FOLDER = (
    "the model folder was written without class means; write a new one with `accrete bundle`, "
    "from the storage of its run"
)
NO_ROUTER = (
    "the model folder was written without a router, or a task was removed since; write a new one "
    "with `accrete bundle`, from the storage of its run"
)
# errors of a damaged file
DAMAGE = (ValueError, LookupError, TypeError, AttributeError, RecursionError, SafetensorError)
CHANGED_TASK = "the task was imported or replaced after the folder was written"


@dataclass(frozen=True)
class TaskReference:
    """The reference of one task, with which the features of inputs are compared.

    Attributes:
        means: Mean features of the training images of each class with images, float32 (classes, d).
        levels: Quantiles `LEVELS` of the distances of test images to the nearest class mean,
            float32 (19,), in units of the features.
        test_images: Number of test images in `levels`.
        router: Weights of the rule `ranpac`, float32 (classes, random features), or None.
    """

    means: Tensor
    levels: Tensor
    test_images: int
    router: Tensor | None = None

    def distances(self, features: Tensor) -> Tensor:
        """Compute the relative distance of images to the task's training images.

        The relative distance is the Euclidean distance to the nearest class mean, divided by the
        median of this distance over the test images.

        Args:
            features: Result of `Predictor.features`, (b, d).

        Returns:
            float32 (b,), without unit; 1 for the median test image.
        """
        return compute_nearest_distances(features, self.means) / self.levels[MEDIAN]

    @property
    def far(self) -> float:
        """The relative distance that 5 % of the test images exceed."""
        return float(self.levels[FAR] / self.levels[MEDIAN])


@dataclass(frozen=True)
class Reference:
    """The references of a bundle.

    Attributes:
        tasks: Task -> reference.
        missing: Task without a reference -> the reason, as a sentence.
    """

    tasks: Mapping[str, TaskReference]
    missing: Mapping[str, str]


def compute_nearest_distances(features: Tensor, means: Tensor) -> Tensor:
    """Compute the Euclidean distance to the nearest mean.

    Args:
        features: (b, d).
        means: (c, d).

    Returns:
        float32 (b,), on the CPU.

    Example:
        >>> compute_nearest_distances(torch.tensor([[0.0, 3.0]]), torch.tensor([[4.0, 0.0]]))
        tensor([5.])
    """
    return torch.cdist(features.float().cpu()[None], means[None])[0].amin(1)


def forget_task(data: bytes, name: str) -> bytes:
    """Return the reference file without a task.

    The result has no router, because the router weights of each task depend on the images of all
    tasks.

    Args:
        data: Content of the reference file, which `load_reference` accepts.
        name: Name of the task.
    """
    about, tensors = _read_content(data)
    about.pop(name, None)
    tensors = {
        key: tensor
        for key, tensor in tensors.items()
        if not key.startswith("router/") and key.partition("/")[2] != name
    }
    return safetensors.torch.save(tensors, {METADATA: json.dumps(about, sort_keys=True)})


# ---- reading -------------------------------------------------------------------------------------
def load_reference(bundle: Bundle) -> Reference:
    """Read the reference of a bundle. Raise `UserError` if the file is damaged."""
    if REFERENCE not in bundle.body["files"]:
        return Reference({}, {task.name: OLD_FOLDER for task in bundle.tasks})
    data = bundle.read(REFERENCE)
    try:
        about, tensors = _read_content(data)
        check_values(tensors.values(), f"{REFERENCE} of {bundle.where}")
        return _parse_reference(bundle, about, tensors)
    except DAMAGE as error:
        reason = describe_error(error)
        raise UserError(
            f"{bundle.where}: {REFERENCE} cannot be used ({reason:.200}); {REMAKE}"
        ) from None


def _read_content(data: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the metadata and tensors of the file. Raise an error of `DAMAGE` if it is invalid."""
    return json.loads(read_metadata(data)[METADATA]), safetensors.torch.load(data)


def _parse_reference(
    bundle: Bundle, about: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Reference:
    """Convert the content of the file to references. Raise an error of `DAMAGE` if it is invalid.

    Args:
        bundle: The bundle.
        about: The metadata: task -> `state` (digest of the measured state), and `test_images` or
            `missing` (reason).
        tensors: The tensors of the file.
    """
    tasks: dict[str, TaskReference] = {}
    missing: dict[str, str] = {}
    widths: set[int] = set()
    for task in bundle.tasks:
        entry = about.get(task.name)
        state = bundle.body["files"][state_file(task.name)]["sha256"]
        if entry is None or entry["state"] != state:
            missing[task.name] = CHANGED_TASK
        elif "missing" in entry:
            missing[task.name] = str(entry["missing"])
        else:
            means, levels = tensors[f"means/{task.name}"], tensors[f"levels/{task.name}"]
            if means.ndim != 2 or not 1 <= len(means) <= task.num_classes:
                raise ValueError(f"the means of task {task.name!r} have shape {tuple(means.shape)}")
            if levels.shape != (len(LEVELS),) or not levels[MEDIAN] > 0:
                raise ValueError(f"the levels of task {task.name!r} are not positive")
            router = tensors.get(f"router/{task.name}")
            if router is not None:
                widths.add(router.shape[-1])
                if router.ndim != 2 or len(router) != task.num_classes:
                    raise ValueError(f"the router of task {task.name!r} has another shape")
            tasks[task.name] = TaskReference(
                means.float(),
                levels.float(),
                int(entry["test_images"]),
                None if router is None else router.float(),
            )
    if len(widths) > 1 or not 1 <= max(widths, default=1) <= MAX_PROJECTION:
        raise ValueError(f"the routers have {max(widths)} random features")
    return Reference(tasks, missing)
