"""Model folders: bundles that serve all tasks of one method of a finished run.

The state of a task is what the method stores to serve the task. A card describes the data set of a
task.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable

from pipeline.config.yaml_files import absolute
from pipeline.graph.stage import Graph
from pipeline.graph.store import Store
from workers.data.decoding import MAX_PIXELS, ImageLimits
from workers.data.shards import get_limits
from workers.errors import UserError
from workers.job import StageJob, Task
from workers.serving import single_tasks
from workers.serving.bundle import Bundle, check_new
from workers.serving.measuring import with_measurements
from workers.serving.model_file import MODEL
from workers.storage.artifact import Artifact, exists, join
from workers.storage.regular_file import read_regular, write_named_file


def build_run_bundle(graph: Graph, store: Store, label: str) -> Bundle:
    """Build the bundle that serves all tasks of a method.

    The bundle has the model that the last evaluation stage of the method loads, and the states of
    all tasks.

    Args:
        graph: Graph of the run.
        store: Store with the results of the run.
        label: Label of the method in the config.

    Raises:
        UserError: If an evaluation stage of the method has no result, or the cards of the tasks
            have different values of `source.range`.
    """
    stages = [stage for stage in graph if stage.step == "evaluate" and stage.method == label]
    for stage in stages:
        if Artifact.open(store.root, stage.key) is None:
            raise UserError(
                f"run {graph.name!r}: stage {stage.id} has no result yet; "
                "finish the run with `python -m pipeline run` first"
            )
    jobs = [stage.job for stage in stages if isinstance(stage.job, StageJob)]
    states: dict[str, str] = {}
    tasks: dict[Task, None] = {}
    for job in jobs:
        states |= job.states
        tasks |= dict.fromkeys(job.tasks)
    job = dataclasses.replace(jobs[-1], tasks=tuple(tasks), states=states)
    bundle = Bundle.of_job(job, _find_limits(store, tasks))
    return dataclasses.replace(bundle, where=f"run {graph.name!r}, method {label!r}")


def _find_limits(store: Store, tasks: Iterable[Task]) -> ImageLimits:
    """Return limits that fit the images of all tasks.

    These are the largest `max_pixels` and the common value range. Data sets that are not in the
    store are skipped. Without any data set, the default limits are returned.

    Raises:
        UserError: If two cards have different values of `source.range`.
    """
    found: list[ImageLimits] = []
    for key in dict.fromkeys(task.data for task in tasks):
        shards = Artifact.open(store.root, key)
        if shards is not None:
            found.append(get_limits(shards))
    ranges = {limits.value_range for limits in found}
    if len(ranges) > 1:
        named = " and ".join(sorted(map(str, ranges)))
        raise UserError(
            f"the cards of these tasks have different values of source.range ({named}), and a "
            "model reads all images alike; convert the images to 8 bits"
        )
    max_pixels = max((limits.max_pixels for limits in found), default=MAX_PIXELS)
    return ImageLimits(max_pixels, ranges.pop() if ranges else None)


# ---- model folders -------------------------------------------------------------------------------
def is_model_folder(path: str) -> bool:
    """Return whether a path is a folder or the URI of a bundle, not the path of a config.

    For a folder on disk, it is not checked whether the folder contains a bundle.
    """
    return os.path.isdir(path) or ("://" in path and exists(join(path, MODEL)))


def open_folder(folder: str) -> Bundle:
    """Open the bundle of a model folder or a URI.

    Raises:
        UserError: If the folder does not contain a bundle.
    """
    return Bundle.open(absolute(folder))


def write_folder(bundle: Bundle, folder: str) -> Bundle:
    """Write a bundle, with measurements on the images of the run.

    The measurements are the class means of each task, the distances of test images to them, and the
    accuracy of the rules that choose the task of an image (see `with_measurements`). A bundle that
    was opened from a folder is written unchanged, because its images are unknown.

    Args:
        bundle: Bundle to write.
        folder: Path or URI, which must be new or empty.

    Returns:
        The written bundle.

    Raises:
        UserError: If the folder is not empty.
    """
    uri = absolute(folder)
    check_new(uri)
    complete = with_measurements(bundle)
    complete.write(uri)
    return complete


def export_task(bundle: Bundle, task: str, file: str) -> int:
    """Export one task of a bundle to a file.

    Args:
        bundle: Bundle with the task.
        task: Name of the task.
        file: Path of the file.

    Returns:
        Size of the file in bytes.

    Raises:
        UserError: If the bundle has no such task or the file cannot be written.
    """
    data = single_tasks.export_task(bundle, task)
    write_named_file("file", file, data)
    return len(data)


def import_task(folder: str, file: str, replace: bool = False) -> Task:
    """Add an exported task to a model folder.

    Args:
        folder: Model folder.
        file: File with the exported task.
        replace: Whether to replace a task of the same name.

    Returns:
        The added task.

    Raises:
        OSError: If the file cannot be read or is too large.
        UserError: If model and task do not fit, or the folder has the task already and `replace` is
            False.
    """
    bundle = open_folder(folder)
    data = read_regular(file, bundle.max_task_bytes)
    return single_tasks.import_task(absolute(folder), data, file, replace)


def remove_task(folder: str, task: str) -> str:
    """Remove a task from a model folder.

    Args:
        folder: Model folder.
        task: Name of the task.

    Returns:
        A note, or "". It says that weights that the task shares with others keep the changes from
        its training, and which earlier versions of the folder were deleted.

    Raises:
        UserError: If the task is missing or the only one, or other tasks need its state.
    """
    return single_tasks.remove_task(absolute(folder), task)
