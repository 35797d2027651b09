"""Describe how each method of a run will train: settings, epochs and steps. `plan` prints it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pipeline.graph.stage import Graph, IngestJob
from pipeline.graph.store import Lookup, Store
from pipeline.results.training import Length, StageInfo, StepTraining, group_steps
from workers.job import Task


def plan_training(
    graph: Graph,
    lookups: Mapping[str, Lookup],
    todo: set[str],
    store: Store,
    tasks: Iterable[Task],
) -> list[StepTraining]:
    """Return the training of each step of each method.

    The length of a stage that will run is computed from its number of images, if that is known. The
    length of any other stage comes from its result, if there is one.

    Args:
        graph: The graph of the run.
        lookups: Result of the look-up of each stage in the store, by stage id.
        todo: Ids of the stages to run.
        store: Store of the results.
        tasks: The tasks of the run.
    """
    lengths = compute_expected_lengths(graph, store, todo, tasks)
    steps = []
    for stage in graph:
        length = lengths.get(stage.id) or (lookups[stage.id].manifest or {}).get("length")
        label = stage.method or stage.step
        steps.append(StageInfo(label, stage.step, stage.task or "", stage.inputs, length))
    return group_steps(steps)


def compute_expected_lengths(
    graph: Graph, store: Store, todo: set[str], tasks: Iterable[Task]
) -> dict[str, Length]:
    """Return the expected length of the training of the stages `todo`, by stage id.

    Exemplars of earlier tasks are not counted. Stages without training, and stages with an unknown
    number of images, are left out. See `plan_training` for the arguments.
    """
    waiting = [stage for stage in graph if stage.id in todo and stage.inputs.get("train")]
    if not waiting:
        return {}
    from pipeline.launch import cost  # slow: imports torch
    from workers.optim import describe_length

    cards = {stage.key: stage.job.card for stage in graph if isinstance(stage.job, IngestJob)}
    images = cost.Images(store, cards)
    data = cost.collect_task_data(graph, tasks)
    lengths: dict[str, Length] = {}
    for stage in waiting:
        num_images = cost.count_work(stage.step, stage.inputs, data, images).images
        train = cost.fit_train_settings(stage.inputs, num_images)
        if num_images and train:
            lengths[stage.id] = describe_length(train, round(num_images))
    return lengths


def format_training(steps: Iterable[StepTraining]) -> str:
    """Return the text that `plan` prints, with a line per entry; empty without training."""
    lines = []
    for step in steps:
        name = step.label
        if step.step not in ("train", "backbone"):
            name += f" {step.step}"
        lines.append(f"  {name}: {step.format_optimizer()}; {step.format_length()}")
    if not lines:
        return ""
    return "\n".join(
        ["training settings (defaults of the method, if the config has none):", *lines]
    )
