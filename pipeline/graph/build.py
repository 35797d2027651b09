"""Turn a config into a graph of stages with keys: each method gets a chain or a star of tasks.

`build_graph` is the entry point. The key of a stage is a hash of everything that can change its
result. The tasks of a method that carries state from task to task form a chain. The tasks of any
other method form a star.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pipeline.config.settings import Config, build_settings_path
from pipeline.graph.backbone import resolve_backbone
from pipeline.graph.builder import Builder
from pipeline.graph.collector import without_collections
from pipeline.graph.raw_data import KnownSource
from pipeline.graph.stage import Graph, Stage
from pipeline.graph.store import Store
from pipeline.graph.tasks import add_tasks
from workers import evaluate, feature_stage, loop
from workers.data import decoding
from workers.errors import UserError, did_you_mean
from workers.job import Task, key_inputs
from workers.methods import METHODS
from workers.methods.base import Method, Step
from workers.storage.artifact import Artifact

REPORT_REVISION = 4  # part of the key: increase it if the content of the report changes
# part of the key: increase it if equal settings result in other weights, for example after a change
# of how weights are loaded or resampled
BACKBONE_REVISION = 1
TRAINING_SPLITS = ("train", "val")  # validation images can be held out of the train images
NOT_IN_KEYS = ("resident_mb", "recompute")  # settings that do not change a result

Stages = dict[str, str]  # name of a step or of a task -> id of a stage


@without_collections
def build_graph(
    config: Config,
    store: Store,
    provenance: dict[str, Any] | None = None,
    split: Literal["test", "val"] = "test",
    ask_sources: bool = True,
    sources: Mapping[str, KnownSource] | None = None,
) -> tuple[Graph, list[Task]]:
    """Return the stages of a run in topological order, and its tasks. The base task is first.

    Args:
        config: The config.
        store: The store of the run. It also caches information about the data of the cards.
        provenance: Git commit and versions of packages, for manifests.
        split: Images for evaluations. `val` is for a search, which has no report stage. The keys of
            training stages do not depend on `split`.
        ask_sources: If false, do not contact a data source on another machine if its data was
            ingested.
        sources: Known state of the raw data, by name of the card. The raw data of other cards is
            looked up.

    Raises:
        UserError: If a method cannot be trained on this stream.
    """
    builder = Builder(config, store, provenance or {}, split, ask_sources, sources or {})
    all_tasks = add_tasks(builder)
    # Images without labels only train the shared steps of methods (pretuning). They are not a task
    # of the accuracy matrix.
    tasks = [task for task in all_tasks if task.role != "unlabelled"]
    if not tasks:
        raise UserError(
            f"stream.tasks: {all_tasks[0].name!r} has role `unlabelled`, "
            "and there is no other task; add one"
        )
    base = _task_with_role(all_tasks, "base")
    unlabelled = _task_with_role(all_tasks, "unlabelled")
    add_backbone(builder, tasks, base)
    evaluations: list[str] = []
    for label in config.methods:
        check_best_epochs(builder, label, tasks)
        evaluations += add_method(builder, label, tasks, base, unlabelled)
        check_task_settings(builder, label)
    if unlabelled is not None:
        check_unlabelled_used(builder, unlabelled)
    if split == "test":
        inputs = {"revision": REPORT_REVISION, "name": config.name}
        builder.add("report", "report", inputs, evaluations)
    return Graph.of(config.name, builder.stages), tasks


def _task_with_role(tasks: Sequence[Task], role: str) -> Task | None:
    return next((task for task in tasks if task.role == role), None)


def check_best_epochs(builder: Builder, label: str, tasks: Sequence[Task]) -> None:
    """Check that there are validation images if `keep: best` is set for a training step.

    Args:
        builder: The builder of the graph.
        label: Label of the method: its name in `methods` of the config.
        tasks: The tasks of the stream.

    Raises:
        UserError: If a task has no validation images.
    """
    config = builder.config
    if config.merge_data(label).val_fraction:
        return
    entry = config.methods[label]
    for name in (None, *entry.tasks):
        without = [
            t for t in tasks if not t.has_val and not t.has_own_head and name in (None, t.name)
        ]
        for step in dict.fromkeys(("train", *config.merge_entry(label, name).steps)):
            if without and config.configured_keep(label, step, task=name) == "best":
                key = "train.keep" if step == "train" else f"steps.{step}.keep"
                path = build_settings_path(label, name)
                raise UserError(
                    f"{path}.{key} is 'best' with data.val_fraction 0: the best epoch is chosen on "
                    f"validation images, and card {without[0].card!r} has none; hold some out, or "
                    "set it to last"
                )


def check_task_settings(builder: Builder, label: str) -> None:
    """Raise `UserError` if a method has settings for a task, but no training step for it."""
    entry = builder.config.methods[label]
    names: list[str] = []
    for stage in builder.stages:
        is_training = stage.method == label and stage.step != "evaluate"
        if is_training and stage.task and stage.task not in names:
            names.append(stage.task)
    for name in entry.tasks:
        if name not in names:
            remedy = did_you_mean(name, names, f"those with steps are: {', '.join(names)}")
            path = build_settings_path(label, name)
            raise UserError(
                f"{path}: {entry.method!r} has no step for a task {name!r} in this stream; {remedy}"
            )


def check_unlabelled_used(builder: Builder, unlabelled: Task) -> None:
    """Raise `UserError` if no stage reads the images without labels."""
    if any(stage.task == unlabelled.name for stage in builder.stages):
        return
    able = ", ".join(name for name, method in METHODS.items() if method.starts_from)
    raise UserError(
        f"stream.tasks: {unlabelled.name!r} has role `unlabelled`, "
        "and no method of this run trains on images without labels; "
        f"leave it out, or add one that pretunes on them: {able} (with `pretune: true`)"
    )


# ---- the backbone --------------------------------------------------------------------------------
def add_backbone(builder: Builder, tasks: list[Task], base: Task | None) -> None:
    """Add the backbone stage, and set `builder.backbone`.

    Args:
        builder: The builder of the graph.
        tasks: The tasks of the stream.
        base: The task that the backbone has learned already or will be trained on, or None.

    Raises:
        UserError: If a method cannot use this backbone.
    """
    config = builder.config
    backbone = resolve_backbone(config, builder.store, builder.ask_sources)
    builder.backbone = backbone.settings
    for label in config.methods:
        try:
            builder.method(label).check_backbone(
                # a copy, because the outline is shared
                builder.settings(label),
                copy.deepcopy(backbone.outline),
                tuple(tasks),
            )
        except UserError as error:
            raise UserError(f"methods.{label}: {error}") from None
    inputs: dict[str, Any] = {
        "backbone": {**key_inputs(backbone.settings), "weights": backbone.weights},
        "seed": config.seed,
        "revision": BACKBONE_REVISION,
    }
    job = builder.backbone_job(base)
    if base is None:
        builder.add("backbone", "backbone", inputs, [], job=job)
        return
    if base.has_own_head:
        if backbone.settings.weights == "none":
            raise UserError(
                f"stream.tasks: {base.name!r} has role `pretrained`, and backbone.weights is "
                "`none`; give weights with a classifier for this task, or the role `base`"
            )
        inputs["own_head"] = {"task": base.name, "classes": base.classes}
        builder.add("backbone", "backbone", inputs, [], task=base.name, job=job)
        return
    inputs |= {
        "task": base.name,
        "classes": base.classes,
        "images": builder.digest_images((base,), TRAINING_SPLITS),
        "train": key_inputs(config.backbone_train(), NOT_IN_KEYS),
        "data": key_inputs(config.data, NOT_IN_KEYS),
        "finetune": METHODS["finetune"].revision,
        **shared_revisions(),
    }
    parents = [f"data/{base.card}"]
    builder.add("backbone", "backbone", inputs, parents, task=base.name, job=job)


def shared_revisions() -> dict[str, int]:
    """Return the revisions of the code that every training stage uses, as inputs of keys."""
    return {"training": loop.TRAIN_REVISION, "decoding": decoding.DECODING}


def add_features(builder: Builder, task: Task) -> str:
    """Add the stage with the features of a task's train images, unless it exists; return its id.

    All methods share the stage, because it depends only on the backbone and the images.

    Args:
        builder: The builder of the graph.
        task: The task.
    """
    stage_id = f"features/{task.name}"
    if stage_id not in builder.keys:
        inputs = {
            "task": task.name,
            "classes": task.classes,
            "images": builder.digest_images((task,), ("train",)),
            "revision": feature_stage.FEATURES_REVISION,
            "decoding": decoding.DECODING,
        }
        parents = ["backbone", f"data/{task.card}"]
        job = builder.features_job(task)
        builder.add(stage_id, "features", inputs, parents, task=task.name, job=job)
    return stage_id


# ---- chains and stars ----------------------------------------------------------------------------
@dataclass
class TaskTopology:
    """The stages that the next task of a method starts from: a chain or a star.

    In a chain, every task starts from the carried states of the last steps of the previous task. In
    a star, all tasks start from the stages of the shared steps (`Method.starts_from`), which are
    trained on images without labels or on the base task. If the tasks of a star train on the data
    of all tasks so far, the state of the newest task serves all tasks.

    Attributes:
        method: The class of the method.
        shared_stages: Ids of the stages of the shared steps, by step.
        last_stages: Ids of the stages of the last steps of the newest task, by step.
    """

    method: type[Method[Any]]
    shared_stages: Stages = field(default_factory=dict)
    last_stages: Stages = field(default_factory=dict)

    def training_start(self) -> Stages:
        """Return the stages that the first steps of the next task start from."""
        return self.last_stages if self.method.carries else self.shared_stages

    def serving_start(self) -> Stages:
        """Return the stages whose carried states serve the tasks so far."""
        if self.method.carries or self.method.trains_on == "seen":
            return self.last_stages
        return self.shared_stages

    def add_task(self, steps: tuple[Step, ...], stages: Stages) -> None:
        """Update the topology after the stages of a task were added to the graph.

        Args:
            steps: Steps of the task.
            stages: Ids of the task's stages, by step.
        """
        shared = {step: stages[step] for step in self.method.starts_from if step in stages}
        self.shared_stages = self.shared_stages | shared
        self.last_stages = {step: stages[step] for step in _last_steps(steps)}


def _awaited_steps(steps: tuple[Step, ...]) -> dict[str, tuple[str, ...]]:
    """Map the name of each step to the steps of the same task that it waits for (`Step.after`)."""
    awaited: dict[str, tuple[str, ...]] = {}
    previous: tuple[str, ...] = ()
    for step in steps:
        awaited[step.name] = previous if step.after is None else step.after
        previous = (step.name,)
    return awaited


def _last_steps(steps: tuple[Step, ...]) -> list[str]:
    """Return the steps that no other step waits for."""
    awaited = _awaited_steps(steps)
    not_last: set[str] = set()
    for names in awaited.values():
        not_last.update(names)
    return [name for name in awaited if name not in not_last]


# ---- the stages of a method ----------------------------------------------------------------------
def add_method(
    builder: Builder, label: str, tasks: list[Task], base: Task | None, unlabelled: Task | None
) -> list[str]:
    """Add all stages of one method.

    The shared steps of a star are trained on images without labels if the stream has any and the
    method uses them. Otherwise they are trained on the base task.

    Args:
        builder: The builder of the graph.
        label: Label of the method.
        tasks: The tasks of the stream.
        base: The base task, see `add_backbone`.
        unlabelled: The task with images without labels, or None.

    Returns:
        The ids of the evaluation stages.

    Raises:
        UserError: If the method needs a base task and the stream has none.
    """
    method = builder.method(label)
    if base is None and method.needs_base(builder.settings(label)):
        raise UserError(
            f"methods.{label} trains steps on the base task, and the stream has none; "
            "give the task that the backbone is trained on `role: base`, "
            "or change the settings that ask for it"
        )
    stages = MethodStages(builder, label)
    if base is not None:
        stages.state_stages[base.name] = "backbone"
    topology = TaskTopology(method)
    pretuning: tuple[Step, ...] = ()
    if unlabelled is not None and method.starts_from:
        # the steps that would otherwise train on the base task, whose position is -1
        pretuning = method.steps_for(builder.settings(label, unlabelled), -1)
    if unlabelled is not None and pretuning:
        topology.shared_stages = stages.add_training(unlabelled, (unlabelled,), pretuning, {})
    evaluations = []
    first = 0 if base is None else 1  # the base task itself has position -1
    for index, task in enumerate(tasks):
        seen = tuple(tasks[: index + 1])
        steps = method.steps_for(builder.settings(label, task), index - first)
        if index == 0:
            steps = tuple(step for step in steps if not step.later)
        # the steps of the base task were trained on images without labels instead
        is_pretuned_base = bool(pretuning) and task is base
        if steps and not is_pretuned_base:
            task_stages = stages.add_training(task, seen, steps, topology.training_start())
            stages.state_stages[task.name] = task_stages[steps[-1].name]
            topology.add_task(steps, task_stages)
        following = tasks[index + 1] if index + 1 < len(tasks) else None
        if not builder.config.stream.measure_next:
            following = None
        evaluations.append(stages.add_evaluation(seen, topology.serving_start(), following))
    return evaluations


@dataclass
class MethodStages:
    """Adds the stages of one method to the graph.

    Attributes:
        builder: The builder of the graph.
        label: Label of the method.
        state_stages: Name of a task -> id of the stage with the state of the task.
    """

    builder: Builder
    label: str
    state_stages: Stages = field(default_factory=dict)

    def add_training(
        self, task: Task, seen: tuple[Task, ...], steps: tuple[Step, ...], start: Stages
    ) -> Stages:
        """Add the training stages of one task.

        Args:
            task: The task.
            seen: The tasks so far; `task` is the last one.
            steps: The steps to train.
            start: Ids of the stages that the first steps start from, by step.

        Returns:
            The ids of the added stages, by step.
        """
        builder = self.builder
        method = builder.method(self.label)
        read_tasks: tuple[Task, ...] = (task,)
        if (method.reads or method.trains_on) == "seen":  # also the data of earlier tasks
            read_tasks = seen
        # In a chain, the stages with the states of earlier tasks are ancestors of the new stages.
        # Therefore the states exist when the new stages start. In a star, they may not exist yet.
        state_stages: Stages = {}
        if method.carries:
            state_stages = {
                t.name: self.state_stages[t.name] for t in seen if t.name in self.state_stages
            }
        loaded_stages: Sequence[str] = ()
        if method.loads_states(builder.config.stream.scenario):
            loaded_stages = [*state_stages.values()]
        awaited = _awaited_steps(steps)
        stages: Stages = {}
        for step in steps:
            step_start = {name: stages[name] for name in awaited[step.name]} or start
            ignored = method.ignored_settings(step.name)
            # At the first task, `train` does not read these settings, so they must not change the
            # key. `vars` ignores base classes, because subclasses do not inherit the attribute.
            if step.name == "train" and seen == (task,):
                ignored |= vars(method).get("later_settings", frozenset())
            data_stages = [f"data/{t.card}" for t in read_tasks]
            parents = ["backbone", *data_stages, *step_start.values(), *loaded_stages]
            features = None
            if step.reads_features:
                parents.append(add_features(builder, task))
                features = builder.keys[parents[-1]]
            stage_id = f"{self.label}/{task.name}/{step.name}"
            job = builder.method_job(
                stage_id,
                step.name,
                self.label,
                task,
                seen,
                previous=builder.get_keys(step_start),
                states=builder.get_keys(state_stages),
                features=features,
                ignored=ignored,
            )
            builder.add(
                stage_id,
                step.name,
                self._training_inputs(task, read_tasks, step, ignored),
                list(dict.fromkeys(parents)),
                method=self.label,
                task=task.name,
                job=job,
            )
            stages[step.name] = stage_id
        return stages

    def _training_inputs(
        self, task: Task, read_tasks: tuple[Task, ...], step: Step, ignored: frozenset[str]
    ) -> dict[str, Any]:
        """Return everything that enters the key of a training stage, besides its parents.

        Args:
            task: The task.
            read_tasks: The tasks whose data the stage reads.
            step: The step.
            ignored: Names of the settings of the method that the stage does not read.
        """
        builder = self.builder
        method = builder.method(self.label)
        train, data = builder.train_and_data(self.label, step.name, task)
        data_inputs = key_inputs(data, NOT_IN_KEYS)
        if step.reads_features:  # features do not depend on data settings such as augmentation
            data_inputs = {"val_fraction": data.val_fraction}
        name = builder.config.methods[self.label].method
        return {
            "method": name,
            "revision": method.revision,
            **builder.code(name),
            "task": task.name,
            "seen": _names_and_classes(read_tasks),
            "images": builder.digest_images(read_tasks, TRAINING_SPLITS),
            "settings": key_inputs(builder.settings(self.label, task), ignored),
            "scenario": builder.config.stream.scenario,
            "seed": builder.config.seed,
            "train": key_inputs(train, NOT_IN_KEYS) if step.trains else {},
            "data": data_inputs,
            **shared_revisions(),
        }

    def add_evaluation(
        self, seen: tuple[Task, ...], start: Stages, following: Task | None = None
    ) -> str:
        """Add the evaluation after the last task in `seen`, and return the id of the stage.

        It measures all tasks in `seen` if the method can change predictions for earlier tasks.
        Otherwise it measures the last task, and the previous one as a check. An earlier task
        is left out if neither its data source nor its ingested shards exist any more, unless a
        result of the complete evaluation exists. Therefore a new task can still be added; the
        values that cannot be measured stay empty in the accuracy matrix.

        Args:
            seen: The tasks so far.
            start: Ids of the stages with the carried states that serve them, by step.
            following: The next task, if it is measured before it is learned, or None.
        """
        builder = self.builder
        method = builder.method(self.label)
        if following is not None and following.card in builder.cards_without_data:
            following = None
        served = seen[-2:]
        if method.changes_past_predictions(builder.config.stream.scenario):
            served = seen
        stage = self._evaluation(served, served, start, following)
        measurable = tuple(t for t in served if t.card not in builder.cards_without_data)
        is_part = seen[-1] in measurable and len(measurable) < len(served)
        if is_part and Artifact.open(builder.store.root, stage.key) is None:
            stage = self._evaluation(served, measurable, start, following)
        return builder.append(stage).id

    def _evaluation(
        self,
        served: tuple[Task, ...],
        measured: tuple[Task, ...],
        start: Stages,
        following: Task | None,
    ) -> Stage:
        """Return the stage of the evaluation after the last task in `served`.

        Args:
            served: The tasks that the evaluated model serves.
            measured: The tasks to measure, on their test images (or validation images).
            start: Ids of the stages with the carried states of the model, by step.
            following: See `add_evaluation`. A search on validation images does not measure it.
        """
        builder = self.builder
        if builder.split == "val":
            following = None
        config = builder.config
        task = served[-1]
        state_stages = {t.name: self.state_stages[t.name] for t in served}
        next_tasks = (following,) if following is not None else ()
        data_stages = [f"data/{t.card}" for t in (*measured, *next_tasks)]
        parents = ["backbone", *data_stages, *state_stages.values(), *start.values()]
        stage_id = f"{self.label}/{task.name}/evaluate"
        revision = builder.method(self.label).revision
        name = config.methods[self.label].method
        inputs: dict[str, Any] = {
            "method": name,
            "revision": [revision, evaluate.EVALUATE_REVISION, decoding.DECODING],
            **builder.code(name),
            "task": task.name,
            "settings": key_inputs(builder.settings(self.label)),
            "seed": config.seed,
            "seen": _names_and_classes(measured),
            "images": builder.digest_images(
                measured, ("test",) if builder.split == "test" else TRAINING_SPLITS
            ),
            "scenario": config.stream.scenario,
        }
        if following is not None:
            inputs["next"] = {
                "seen": _names_and_classes(next_tasks),
                "images": builder.digest_images(next_tasks, ("test",)),
            }
        if builder.split == "val":
            val_fraction = config.merge_data(self.label).val_fraction
            if not val_fraction and not all(task.has_val for task in measured):
                raise UserError(
                    "a search is judged on validation images, and data.val_fraction of method "
                    f"{self.label!r} is 0; hold some out, as in set: {{data.val_fraction: 0.1}}"
                )
            inputs |= {"split": "val", "val_fraction": val_fraction}
        job = builder.method_job(
            stage_id,
            "evaluate",
            self.label,
            task,
            served,
            measured=tuple(t.name for t in measured),
            following=following,
            split=builder.split,
            previous=builder.get_keys(start),
            states=builder.get_keys(state_stages),
        )
        parents = list(dict.fromkeys(parents))
        return builder.make_stage(
            stage_id, "evaluate", inputs, parents, method=self.label, task=task.name, job=job
        )


def _names_and_classes(tasks: Sequence[Task]) -> list[list[Any]]:
    return [[task.name, list(task.classes)] for task in tasks]
