"""The reference of training: class means, and the distances of test images to them.

`reference.safetensors` of a bundle has two tensors per task: `means/TASK`, float32 (classes, d),
and `levels/TASK`, float32 (19,). The metadata contain for each task the digest of the measured
state, and the number of test images or the reason why the reference is missing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from workers.data import accelerator
from workers.data.rows import SampleTable, select
from workers.errors import UserError, describe_error
from workers.serving.bundle import Bundle
from workers.serving.images import Limits
from workers.serving.model_file import REFERENCE, REMAKE, sealed, state_file
from workers.serving.server import Predictor
from workers.storage.artifact import file_info

METADATA = "accrete.reference"
MAX_CLASS_IMAGES = 32  # training images per class mean
MAX_TRAIN_IMAGES = 256  # per task; with more classes, one image per class
MAX_TEST_IMAGES = 256  # per task
LEVELS = tuple(level / 20 for level in range(1, 20))  # 0.05, 0.1, ..., 0.95
MEDIAN, FAR = LEVELS.index(0.5), LEVELS.index(0.95)
OLD_FOLDER = (
    "the model folder was written without class means; write a new one with `accrete bundle`, "
    "from the storage of its run"
)
CHANGED_TASK = "the task was imported or replaced after the folder was written"


@dataclass(frozen=True)
class TaskReference:
    """The reference of one task, to which features of inputs are compared.

    Attributes:
        means: Mean features of training images of each class, float32 (classes, d).
        levels: Distances of test images to the nearest class mean at the quantiles `LEVELS`,
            float32 (19,), in units of the features.
        test_images: Number of test images in `levels`.
    """

    means: Tensor
    levels: Tensor
    test_images: int

    def distances(self, features: Tensor) -> Tensor:
        """Compute the relative distance of images to the task's training images.

        This is the Euclidean distance to the nearest class mean, divided by the median of this
        distance over the test images.

        Args:
            features: (b, d), as `Predictor.features` returns them.

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
        missing: Task -> reason, as a sentence, why the reference is missing.
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


# ---- measuring a finished run --------------------------------------------------------------------
def with_reference(bundle: Bundle) -> Bundle:
    """Add a reference for all tasks to a bundle, measured on images of the run's storage.

    At most `MAX_TRAIN_IMAGES` and `MAX_TEST_IMAGES` images per task are read. If the images of a
    task cannot be read, the file contains the reason instead.

    Args:
        bundle: The bundle of a run. The bundle of a folder is returned unchanged, because its
            images are unknown.
    """
    if bundle.job is None:
        return bundle
    device = accelerator.make_device(float(accelerator.is_available()))
    predictor = Predictor(bundle, device=device)
    tensors: dict[str, Tensor] = {}
    about: dict[str, dict[str, Any]] = {}
    for task in bundle.tasks:
        state = bundle.body["files"][state_file(task.name)]["sha256"]
        try:
            measured = _measure_task(predictor, task.name)
        except (UserError, OSError) as error:
            about[task.name] = {"state": state, "missing": " ".join(str(error).split())[:500]}
            continue
        tensors[f"means/{task.name}"] = measured.means
        tensors[f"levels/{task.name}"] = measured.levels
        about[task.name] = {"state": state, "test_images": measured.test_images}
    data = safetensors.torch.save(tensors, {METADATA: json.dumps(about, sort_keys=True)})
    files = {**bundle.body["files"], REFERENCE: file_info(data)}

    def fetch(name: str) -> bytes:
        return data if name == REFERENCE else bundle.fetch(name)

    return replace(bundle, body=sealed({**bundle.body, "files": files}), fetch=fetch)


def _measure_task(predictor: Predictor, name: str) -> TaskReference:
    """Measure the reference of a task on its training and test images."""
    job = predictor.bundle.job
    assert job is not None
    task = next(task for task in job.tasks if task.name == name)
    val_fraction = job.data.val_fraction
    train = select(job.root, (task,), "train", val_fraction)
    share = max(1, MAX_TRAIN_IMAGES // task.num_classes)
    means: list[Tensor] = []
    for label in range(task.num_classes):
        rows = (train.labels == label).nonzero().flatten()[: min(share, MAX_CLASS_IMAGES)]
        means.append(_read_features(predictor, train, rows.tolist(), name).mean(0))
    test = select(job.root, (task,), "test", val_fraction)
    count = min(len(test), MAX_TEST_IMAGES)
    rows = torch.linspace(0, len(test) - 1, count).round().long()  # evenly from all classes
    features = _read_features(predictor, test, rows.tolist(), name)
    distances = compute_nearest_distances(features, torch.stack(means))
    levels = torch.quantile(distances, torch.tensor(LEVELS))
    if not levels.isfinite().all() or levels[MEDIAN] <= 0:
        raise UserError(f"all test images of task {name!r} have the same features")
    return TaskReference(torch.stack(means), levels, count)


def _read_features(predictor: Predictor, table: SampleTable, rows: list[int], task: str) -> Tensor:
    """Return the features of some rows of a table, float32 (rows, d)."""
    limits = Limits(predictor.bundle.body["max_pixels"], value_range=predictor.bundle.value_range)
    images = [table.estimate_bytes(row) for row in rows]
    pixels = predictor.read_pixels(images, limits)
    return predictor.features(pixels, task)


# ---- reading -------------------------------------------------------------------------------------
def load_reference(bundle: Bundle) -> Reference:
    """Read the reference of a bundle. Raise `UserError` if the file is damaged."""
    if REFERENCE not in bundle.body["files"]:
        return Reference({}, {task.name: OLD_FOLDER for task in bundle.tasks})
    data = bundle.read(REFERENCE)
    try:
        length = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + length])["__metadata__"]
        about = json.loads(metadata[METADATA])
        tensors = safetensors.torch.load(data)
        return _parse_reference(bundle, about, tensors)
    except (ValueError, LookupError, TypeError, AttributeError, SafetensorError) as error:
        reason = describe_error(error)
        raise UserError(
            f"{bundle.where}: {REFERENCE} cannot be used ({reason:.200}); {REMAKE}"
        ) from None


def _parse_reference(
    bundle: Bundle, about: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Reference:
    """Convert the content of the file to references. Raise `ValueError` if it is invalid."""
    tasks: dict[str, TaskReference] = {}
    missing: dict[str, str] = {}
    for task in bundle.tasks:
        entry = about.get(task.name)
        state = bundle.body["files"][state_file(task.name)]["sha256"]
        if entry is None or entry["state"] != state:
            missing[task.name] = CHANGED_TASK
        elif "missing" in entry:
            missing[task.name] = str(entry["missing"])
        else:
            means, levels = tensors[f"means/{task.name}"], tensors[f"levels/{task.name}"]
            if means.ndim != 2 or len(means) != task.num_classes:
                raise ValueError(f"the means of task {task.name!r} have shape {tuple(means.shape)}")
            if levels.shape != (len(LEVELS),) or not levels[MEDIAN] > 0:
                raise ValueError(f"the levels of task {task.name!r} are not positive")
            tasks[task.name] = TaskReference(
                means.float(), levels.float(), int(entry["test_images"])
            )
    return Reference(tasks, missing)
