"""Publish a finished run as the next version of a model folder.

After `add`, it is published only if no task loses too much accuracy (`publish_run`). After
`remove`, accuracies are not compared, and all earlier versions are deleted (`publish_removal`).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from pipeline.app.prepared import PreparedRun
from pipeline.config.settings import Config
from pipeline.config.text import format_count
from pipeline.config.yaml_files import absolute
from pipeline.graph.stage import Graph
from pipeline.graph.store import Store
from pipeline.growing.stream_edits import list_task_classes
from pipeline.results.bundles import build_run_bundle
from pipeline.results.frames import choose_label
from workers.data import accelerator
from workers.dist import Group
from workers.errors import UserError
from workers.evaluate import compute_logits, in_order, result
from workers.job import StageJob, Task
from workers.serving.bundle import Bundle
from workers.serving.measuring import with_measurements
from workers.serving.model_file import BACKBONE, MODEL, REFERENCE, remove_places, state_file
from workers.serving.versions import forget, publish
from workers.storage.artifact import delete_dir, exists, is_local, join


def choose_method(config: Config, model: str, label: str | None) -> str:
    """Return the label of the method that a model folder serves, or will serve if it is new.

    Args:
        config: Config of the run.
        model: The folder. It need not exist.
        label: Label given by the user, if any.

    Raises:
        UserError: If the run does not have the method, or the choice is ambiguous.
    """
    labels = [*config.methods]
    if not exists(join(absolute(model), MODEL)):
        return choose_label(config.name, labels, label, "--method")
    method = Bundle.open(absolute(model)).body["method"]
    fitting = [name for name in labels if config.methods[name].method == method]
    if label is None and len(fitting) == 1:
        return fitting[0]
    if not fitting or (label is not None and label not in fitting):
        raise UserError(
            f"{model} serves method {method!r}, and run {config.name!r} has "
            f"{', '.join(labels)}; give the folder of a method of this run"
        )
    return choose_label(config.name, fitting, label, "--method")


class Publication(NamedTuple):
    """Result of publishing to a model folder.

    Attributes:
        sentence: Description for the user.
        is_new: Whether the folder has a new version.
    """

    sentence: str
    is_new: bool


def publish_run(run: PreparedRun, label: str, model: str, max_drop: float) -> Publication:
    """Make a finished run the current version of a model folder.

    Args:
        run: The run.
        label: Label of the method.
        model: The folder. It is created if it does not exist.
        max_drop: Largest accepted loss of accuracy of a served task, in percentage points.

    Raises:
        UserError: If a task loses more accuracy than `max_drop`, if the folder serves a task that
            the run does not have, or if their accuracies cannot be compared. The folder is not
            changed.
    """
    uri = absolute(model)
    new = build_run_bundle(run.graph, run.store, label)
    if exists(join(uri, MODEL)):
        old = Bundle.open(uri)
        if _list_contents(old) == _list_contents(new):
            return Publication(f"{model}: serves {_list_tasks(old)}, as before", False)
        _check_no_task_lost(model, old, {task.name for task in new.tasks})
        _check_alike(model, old, new)
        losses = find_losses(old, new, find_last_evaluation(run.graph, label))
        worse = {name: loss for name, loss in losses.items() if loss > max_drop}
        if worse:
            listed = ", ".join(f"{name} by {loss:.1f}" for name, loss in worse.items())
            raise UserError(
                f"{model} keeps its version, because tasks lose more than {max_drop:g} points of "
                f"accuracy on their test images ({listed}); the run is finished, and "
                f"`--max-drop {max(worse.values()) + 0.1:.1f}` publishes it"
            )
        number = publish(uri, with_measurements(new))
    else:
        number = 1
        _write_new(with_measurements(new), uri)
    return Publication(f"{model}: version {number} serves {_list_tasks(new)}", True)


def check_served(model: str, config: Config, store: Store, removed: str) -> None:
    """Raise `UserError` if a model folder serves tasks that a run will not have.

    Args:
        model: The folder. It need not exist.
        config: Config of the run.
        store: Store of the run.
        removed: Task that is being removed; the folder may serve it. Empty: none.
    """
    uri = absolute(model)
    if exists(join(uri, MODEL)):
        names = {*list_task_classes(config, store.record(config.name)), removed}
        _check_no_task_lost(model, Bundle.open(uri), names)


def publish_removal(
    run: PreparedRun, label: str, model: str, removed: str, is_pending: bool
) -> str:
    """Make a finished run the current version of a model folder, and delete all earlier versions.

    Accuracies are not compared, because the model without the removed data must be served in any
    case.

    Args:
        run: The run.
        label: Label of the method.
        model: The folder. It is created if it does not exist.
        removed: Name of the removed task. Empty: none.
        is_pending: Whether the removal still had something to train or delete. If true, the
            measurements in the folder are compared, too: class means of each task (`REFERENCE`) and
            the accuracy of rules that choose a task (`rules`). They depend on the images, even if
            the task states do not change.

    Returns:
        A sentence about the change. Empty if the folder was up to date.
    """
    uri = absolute(model)
    new = build_run_bundle(run.graph, run.store, label)
    sentence = ""
    if exists(join(uri, MODEL)):
        old = Bundle.open(uri)
        _check_no_task_lost(model, old, {*(task.name for task in new.tasks), removed})
        is_same = _list_contents(old) == _list_contents(new)
        if is_pending or not is_same:
            new = with_measurements(new)
            is_same = is_same and _list_measurements(old) == _list_measurements(new)
        if not is_same:
            number = publish(uri, new)
            sentence = f"{model}: version {number} serves {_list_tasks(new)}"
    else:
        _write_new(with_measurements(new), uri)
        sentence = f"{model}: version 1 serves {_list_tasks(new)}"
    forgotten = forget(uri)
    if forgotten:
        sentence = sentence or f"{model} serves {_list_tasks(new)}"
        sentence += f"; {format_count(len(forgotten), 'earlier version')} deleted"
    return sentence


def _list_measurements(bundle: Bundle) -> tuple[str, Any]:
    """Return the digest of the file REFERENCE, and the value of `rules`: see `publish_removal`."""
    info = bundle.body["files"].get(REFERENCE)
    return "" if info is None else info["sha256"], bundle.body.get("rules")


def _list_tasks(bundle: Bundle) -> str:
    return ", ".join(task.name for task in bundle.tasks)


def _list_contents(bundle: Bundle) -> dict[str, Any]:
    """Return what a bundle serves, for a comparison: without measurements and provenance."""
    body = remove_places(bundle.body)
    files = {name: info for name, info in body["files"].items() if name != REFERENCE}
    left_out = ("provenance", "sha256", "rules")
    rest = {name: value for name, value in body.items() if name not in left_out}
    return rest | {"files": files}


def _write_new(bundle: Bundle, uri: str) -> None:
    """Write a bundle into a new folder; on a disk, atomically."""
    if not is_local(uri):
        bundle.write(uri)
        return
    folder, name = os.path.split(uri.rstrip("/"))
    part = os.path.join(folder, f".{name}.part")
    delete_dir(part)  # a killed command may have left it
    bundle.write(part)
    try:
        os.rename(part, uri)
    except OSError:
        delete_dir(part)
        raise UserError(
            f"{uri} is there and is not a model folder; give a new or empty folder"
        ) from None


def _check_alike(model: str, old: Bundle, new: Bundle) -> None:
    """Raise `UserError` if the accuracies of two models cannot be compared.

    This is the case if their scenario or their preprocessing differs.
    """
    for name in ("scenario", "preprocessing"):
        if old.body[name] != new.body[name]:
            raise UserError(
                f"{model} was made with another {name} ({old.body[name]!s:.100}) than the run has "
                f"({new.body[name]!s:.100}), so that their accuracies are of different things; "
                "give another folder"
            )


def _check_no_task_lost(model: str, old: Bundle, names: Collection[str]) -> None:
    """Raise `UserError` if a model folder serves a task outside `names`."""
    lost = [task.name for task in old.tasks if task.name not in names]
    if lost:
        raise UserError(
            f"{model} serves {', '.join(lost)}, which the run does not have; export the tasks "
            f"(`accrete tasks {model} export NAME FILE`) and import them again afterwards, remove "
            f"them (`accrete remove {model} --task NAME`), or give another folder"
        )


def find_last_evaluation(graph: Graph, label: str) -> StageJob:
    """Return the job of the last evaluation of a method, in the order of the graph."""
    jobs = [
        stage.job
        for stage in graph
        if stage.step == "evaluate" and stage.method == label and isinstance(stage.job, StageJob)
    ]
    return jobs[-1]


def find_losses(old: Bundle, new: Bundle, job: StageJob) -> dict[str, float]:
    """Compare the accuracy of two models on the tasks that both serve.

    Both models predict the current test images of the classes that the task has in both models. If
    these are not the first classes of the task in `new`, `new` predicts the images of all classes
    of the task. A task is not measured if nothing has changed that its predictions depend on: the
    shared files, its state and its classes. In other scenarios than `task`, predictions depend on
    all tasks, so every task is measured.

    Args:
        old: The earlier model.
        new: The new model. It serves all tasks of `old`.
        job: Job of an evaluation of the tasks of `new`.

    Returns:
        The loss of accuracy of each measured task, in percentage points; negative for a gain.
    """
    now = {task.name: task for task in new.tasks}
    same_network = _shared_files(old) == _shared_files(new)
    changed: list[Task] = []
    reduced: list[Task] = []
    for task in old.tasks:
        file = state_file(task.name)
        same_state = old.body["files"][file]["sha256"] == new.body["files"][file]["sha256"]
        same_classes = task.classes == now[task.name].classes
        is_alone = job.scenario == "task"
        if not (same_network and same_state and same_classes and is_alone):
            changed.append(replace(now[task.name], classes=task.classes))
            # labels are positions, so only the first classes of a task can be measured separately
            all_now = now[task.name].classes
            stayed = tuple(name for name in all_now if name in task.classes)
            is_first = all_now[: len(stayed)] == stayed
            reduced.append(replace(now[task.name], classes=stayed if is_first else all_now))
    if not changed:
        return {}
    before = measure_accuracies(old, job, changed)
    after = measure_accuracies(new, job, reduced)
    return {name: 100 * (before[name] - after[name]) for name in before}


def _shared_files(bundle: Bundle) -> dict[str, str]:
    """Return the digests of the files that all tasks of a model share: backbone, carried states."""
    files = bundle.body["files"]
    names = [BACKBONE, *bundle.body["carried"].values()]
    return {name: files[name]["sha256"] for name in names}


def measure_accuracies(bundle: Bundle, job: StageJob, tasks: Sequence[Task]) -> dict[str, float]:
    """Measure the accuracy of a model on test images, on a GPU if there is one.

    Args:
        bundle: The model.
        job: Job of an evaluation. It defines how images are read.
        tasks: The tasks. Images of other classes are ignored.

    Returns:
        The accuracy of each task in [0, 1], by name.
    """
    device = accelerator.make_device(float(accelerator.is_available()))
    method = bundle.method(device)
    group = Group(device=device)
    accuracies: dict[str, float] = {}
    for task in tasks:
        row, _ = result(method, task, in_order([compute_logits(job, method, task, group)]))
        accuracies[task.name] = row["correct"] / max(row["total"], 1)
    return accuracies
