"""A config becomes a graph: a star or a chain for each method, from what the method carries; every
stage with its key."""

from __future__ import annotations

import copy
import difflib
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pipeline.config import Config, TaskEntry, place_of
from pipeline.data import cards
from pipeline.data.listing import CARDS, nfc
from pipeline.graph import raw_data
from pipeline.graph.stage import Graph, Stage
from pipeline.graph.store import Store, key_of
from pipeline.yaml_files import expand
from workers import evaluate, loop
from workers.data import sources
from workers.errors import UserError
from workers.job import DataSettings, StageJob, Task, TrainSettings, key_inputs
from workers.methods import METHODS
from workers.methods.base import MethodSettings, Step
from workers.model import vit
from workers.storage.artifact import Artifact
from workers.storage.regular_file import open_regular

REPORT_REVISION = 2  # raise it when the report shows other things
# raise it when other weights come out of the same settings: building, loading, resampling
BACKBONE_REVISION = 1


@dataclass(frozen=True)
class IngestJob:
    """What the ingest stage of one card is told."""

    card: cards.Card


@dataclass
class Builder:
    """Collects stages while the stream is walked once for each method."""

    config: Config
    store: Store
    provenance: dict[str, Any]
    stages: list[Stage] = field(default_factory=list)
    keys: dict[str, str] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)  # cards whose source and shards no longer exist
    split: Literal["test", "val"] = "test"  # what evaluations read
    # whether a source on another machine is asked for its fingerprint though its result stands
    ask_sources: bool = True

    def add(
        self, stage_id: str, step: str, inputs: Mapping[str, Any], parents: list[str], **rest: Any
    ) -> Stage:
        return self.keep(self.stage(stage_id, step, inputs, parents, **rest))

    def stage(
        self, stage_id: str, step: str, inputs: Mapping[str, Any], parents: list[str], **rest: Any
    ) -> Stage:
        """A stage with its key, which its job is told too."""
        parent_keys = tuple(self.keys[p] for p in parents)
        key = key_of({"step": step, **inputs}, parent_keys)
        if isinstance(rest.get("job"), StageJob):
            rest["job"] = replace(rest["job"], key=key, parents=parent_keys)
        return Stage(stage_id, step, key, inputs, tuple(parents), **rest)

    def keep(self, stage: Stage) -> Stage:
        self.stages.append(stage)
        self.keys[stage.id] = stage.key
        return stage

    def settings(self, label: str, task: Task | None = None) -> MethodSettings:
        """A method's own settings, as the steps of a task have them; None: as all tasks are
        served."""
        entry = self.config.entry_of(label, task.name if task else None)
        return METHODS[entry.method].Settings.model_validate(entry.settings)

    def recipe(
        self, label: str, step: str, task: Task | None
    ) -> tuple[TrainSettings, DataSettings]:
        """How a step of a method trains. Images without labels have nothing to be validated by: all
        are trained on, to the last epoch."""
        train, data = (
            self.config.train_of(label, step, task=task.name if task else None),
            self.config.data_of(label),
        )
        if task is None or task.role != "unlabelled":
            return train, data
        return train.model_copy(update={"keep": "last"}), data.model_copy(
            update={"val_fraction": 0.0}
        )

    def job(
        self,
        stage_id: str,
        step: str,
        label: str | None,
        task: Task | None,
        tasks: tuple[Task, ...],
        **rest: Any,
    ) -> StageJob:
        """The job of a stage; `add` fills in its key. It is told no setting that its step does not
        read."""
        c = self.config
        own = None if step == "evaluate" else task  # all tasks are served alike
        entry = c.entry_of(label, own.name if own else None) if label else None
        train, data = self.recipe(label, step, own) if label else (c.train, c.data)
        hidden = METHODS[entry.method].ignored_settings(step) if entry else frozenset()
        return StageJob(
            id=stage_id,
            key="",
            step=step,
            root=self.store.root,
            method=entry.method if entry else "finetune",
            settings={k: v for k, v in entry.settings.items() if k not in hidden} if entry else {},
            scenario=c.stream.scenario,
            seed=c.seed,
            backbone_settings=c.backbone.model_copy(update={"weights": weights_path(c)}),
            data=data,
            train=train,
            task=task,
            tasks=tasks,
            backbone=self.keys["backbone"] if label else None,
            provenance=self.provenance,
            checkpoint_s=c.cluster.checkpoint_s,
            loader_workers=c.cluster.loader_workers,
            cache=cache_folder(c.cluster.cache, self.store.storage),
            cache_gb=c.cluster.cache_gb,
            **rest,
        )


def graph_of(
    config: Config,
    store: Store,
    provenance: dict[str, Any] | None = None,
    split: Literal["test", "val"] = "test",
    ask_sources: bool = True,
) -> tuple[Graph, list[Task]]:
    """The stages of a run in topological order, and its tasks (the base task first, if there is
    one). With split `val`, for a search, methods are judged on validation images, and there is no
    report; all that is trained has the same keys. ask_sources: False opens no connection to a
    source on another machine whose ingested result stands."""
    builder = Builder(config, store, provenance or {}, split=split, ask_sources=ask_sources)
    entries = add_tasks(builder)
    tasks = [t for t in entries if t.role != "unlabelled"]
    if not tasks:
        raise UserError(
            f"stream.tasks: {entries[0].name!r} has role `unlabelled`, and there is no task "
            "beside it; add one"
        )
    base, unlabelled = (
        next((t for t in entries if t.role == role), None) for role in ("base", "unlabelled")
    )
    add_backbone(builder, tasks, base)
    leaves: list[str] = []
    for label in config.methods:
        leaves += add_method(builder, label, tasks, base, unlabelled)
        check_own(builder, label)
    if unlabelled and not any(stage.task == unlabelled.name for stage in builder.stages):
        able = ", ".join(name for name, method in METHODS.items() if method.starts_from)
        raise UserError(
            f"stream.tasks: {unlabelled.name!r} has role `unlabelled`, and no method of this "
            "run sees images without labels; leave it out, or "
            f"add one that pretunes on them: {able} (with `pretune: true`)"
        )
    if split == "test":
        builder.add("report", "report", {"revision": REPORT_REVISION, "name": config.name}, leaves)
    return Graph.of(config.name, builder.stages), tasks


def check_own(builder: Builder, label: str) -> None:
    """Raises UserError where a method has settings for a task that none of its steps is for."""
    entry = builder.config.methods[label]
    names = list(
        dict.fromkeys(
            s.task for s in builder.stages if s.method == label and s.task and s.step != "evaluate"
        )
    )
    unknown = next((name for name in entry.tasks if name not in names), None)
    if unknown is not None:
        near = difflib.get_close_matches(unknown, names, 1)
        raise UserError(
            f"{place_of(label, unknown)}: {entry.method!r} has no step for a task {unknown!r} "
            "in this stream; "
            + (
                f"did you mean {near[0]!r}?"
                if near
                else f"those with steps are: {', '.join(names)}"
            )
        )


def add_tasks(builder: Builder) -> list[Task]:
    """One ingest stage per card; the tasks that the stream cuts from the cards."""
    loaded: dict[str, cards.Card] = {}
    for entry in builder.config.stream.tasks:
        if entry.card not in loaded:
            card = cards.load(entry.card, builder.store)
            clash = next((other for other, c in loaded.items() if c.name == card.name), None)
            if clash:
                raise UserError(
                    f"stream.tasks: cards {clash!r} and {entry.card!r} have the same name "
                    f"{card.name!r}; rename one"
                )
            loaded[entry.card] = card
            _add_card(builder, card)
    tasks = [
        task
        for entry in builder.config.stream.tasks
        for task in _cut(builder, entry, loaded[entry.card])
    ]
    twice = next(
        (name for name, count in Counter(t.name for t in tasks).items() if count > 1), None
    )
    if twice:
        raise UserError(f"stream.tasks: two tasks are called {twice!r}; give each its own `name`")
    bases, unlabelled = ([t for t in tasks if t.role == role] for role in ("base", "unlabelled"))
    if len(bases) > 1:
        raise UserError(
            f"stream.tasks: {bases[0].name!r} and {bases[1].name!r} both have role `base`; one "
            "backbone has one base task"
        )
    if len(unlabelled) > 1:
        raise UserError(
            f"stream.tasks: {unlabelled[0].name!r} and {unlabelled[1].name!r} both have role "
            "`unlabelled`; put all such images on one "
            "card, and take it whole"
        )
    return bases + [t for t in tasks if t.role != "base"]


def read_sources_again(config: Config, store: Store, say: Callable[[str], None]) -> None:
    """Before a graph is built that is to be run: settles the content of raw data that was written
    again in place (see raw_data.py)."""
    for name in dict.fromkeys(entry.card for entry in config.stream.tasks):
        raw_data.read_again(store, cards.load(name, store), say)


def _add_card(builder: Builder, card: cards.Card) -> None:
    source = raw_data.source_of(builder.store, card, builder.ask_sources)
    inputs = raw_data.stage_inputs(card, source)
    stage = builder.add(
        f"data/{card.name}", inputs.pop("step"), inputs, [], job=IngestJob(card), note=source.note
    )
    if not source.present and Artifact.open(builder.store.root, stage.key) is None:
        builder.gone.add(card.name)


def cards_graph(config: Config, store: Store, names: Sequence[str]) -> tuple[Graph, list[Task]]:
    """The ingest stages of cards that need not be in the stream, and each card as one task."""
    builder, tasks = Builder(config, store, {}), []
    for card in (cards.load(name, store) for name in dict.fromkeys(names)):
        _add_card(builder, card)
        tasks.append(Task(card.name, card.name, builder.keys[f"data/{card.name}"], card.order()))
    return Graph.of(config.name, builder.stages), tasks


def _cut(builder: Builder, entry: TaskEntry, card: cards.Card) -> list[Task]:
    order = card.order()
    if card.source.label is None and entry.role != "unlabelled":
        raise UserError(
            f"stream.tasks: the images of card {card.name!r} have no labels (its source.label "
            "is null); give the entry `role: unlabelled`, or the "
            "card labels"
        )
    if entry.order and entry.classes is not None:
        raise UserError(
            f"stream.tasks: task {entry.name or card.name!r} has `classes` and `order` "
            f"{entry.order!r}; both say which classes, so leave one out"
        )
    named = cards.in_order(entry.order, card.classes) if entry.order else entry.classes
    own = {
        nfc(c): c for c in order
    }  # a card and a config may be written in two Unicode forms
    chosen = [own.get(nfc(c), c) for c in named] if named is not None else order
    unknown = next((c for c in chosen if c not in order), None)
    if unknown is not None:
        more = " ..." if len(order) > 12 else ""
        raise UserError(
            f"stream.tasks: class {unknown!r} is not on card {card.name!r}; its classes are "
            f"{', '.join(order[:12])}{more}"
        )
    if len(set(chosen)) != len(chosen):
        raise UserError(
            f"stream.tasks: task {entry.name or card.name!r} lists a class twice; list each once"
        )
    name, key = entry.name or card.name, builder.keys[f"data/{card.name}"]
    if not entry.split:
        return [Task(name, card.name, key, tuple(chosen), entry.role)]
    if len(chosen) % entry.split:
        raise UserError(
            f"stream.tasks: {len(chosen)} classes of {name!r} cannot be split into "
            f"{entry.split} equal tasks; choose a divisor"
        )
    size, width = len(chosen) // entry.split, len(str(entry.split - 1))
    return [
        Task(
            f"{name}-{i:0{width}d}",
            card.name,
            key,
            tuple(chosen[i * size : (i + 1) * size]),
            entry.role,
        )
        for i in range(entry.split)
    ]


def weights_path(config: Config) -> str:
    """`none`, `hub`, or the absolute path of the weights file; a relative one starts at the
    checkout, as on cards."""
    weights = config.backbone.weights
    return (
        weights
        if weights in ("none", "hub")
        else os.path.normpath(CARDS.parent / expand(weights))
    )


def _weights_digest(config: Config, store: Store, most: int) -> str:
    """Digest of the weights file, of at most so many bytes, or what names the weights where there
    is no file."""
    path = weights_path(config)
    if path in ("none", "hub"):
        return path
    identity = "weights-" + hashlib.sha256(path.encode()).hexdigest()[:24]
    if os.path.isdir(path):
        raise UserError(
            f"backbone.weights is {path!r}, a folder; give a .safetensors file, `hub` or `none`"
        )
    if os.path.exists(path):
        try:
            with open_regular(path, most) as stream:
                found = hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            raise UserError(
                f"backbone.weights is {path!r}, which cannot be read ({error.strerror}); give a "
                ".safetensors file, `hub` or `none`"
            ) from None
        store.remember(identity, found)
        return found
    seen = store.remembered(identity)
    if seen is None:
        raise UserError(
            f"backbone.weights is {path!r}, which does not exist; give a .safetensors file, "
            "`hub` or `none`"
        )
    return seen


def add_backbone(builder: Builder, tasks: list[Task], base: Task | None) -> None:
    c = builder.config
    empty = vit.check(c.backbone)
    for label, entry in c.methods.items():
        try:
            METHODS[entry.method].check_backbone(
                builder.settings(label), copy.deepcopy(empty), tuple(tasks)
            )
        except UserError as error:
            raise UserError(f"methods.{label}: {error}") from None
    settings = {
        **key_inputs(c.backbone),
        "weights": _weights_digest(c, builder.store, vit.most_bytes(empty)),
    }
    inputs: dict[str, Any] = {"backbone": settings, "seed": c.seed, "revision": BACKBONE_REVISION}
    if base:
        inputs |= {
            "task": base.name,
            "classes": base.classes,
            "train": key_inputs(c.train),
            "data": key_inputs(c.data),
            "finetune": METHODS["finetune"].revision,
            **shared_revisions(),
        }
    job = builder.job("backbone", "backbone", None, base, (base,) if base else ())
    builder.add(
        "backbone",
        "backbone",
        inputs,
        [f"data/{base.card}"] if base else [],
        task=base.name if base else None,
        job=job,
    )


def shared_revisions() -> dict[str, int]:
    """Revisions of the code that every training step runs, whatever its method."""
    return {"training": loop.TRAIN_REVISION, "decoding": sources.DECODING}


def add_method(
    builder: Builder, label: str, tasks: list[Task], base: Task | None, unlabelled: Task | None
) -> list[str]:
    """All stages of one method; returns the ids of its leaves. What tasks of a star start from
    comes from images without labels where there are such, else from the base task."""
    method = METHODS[builder.config.methods[label].method]
    # task -> stage that holds its state
    last: dict[str, str] = {base.name: "backbone"} if base else {}
    if base is None and method.needs_base(builder.settings(label)):
        raise UserError(
            f"methods.{label} goes through steps with the base task, and the stream has none; "
            "give the task that the backbone is trained on "
            "`role: base`, or change the settings that ask for it"
        )
    leaves: list[str] = []
    ends: dict[str, str] = {}  # step -> stage: those whose carried states the next task starts from
    common: dict[str, str] = {}  # the same for every task of a star
    ahead = (
        method.steps_for(builder.settings(label, unlabelled), -1)
        if unlabelled and method.starts_from
        else ()
    )
    if unlabelled and ahead:
        common = _add_steps(builder, label, unlabelled, (unlabelled,), ahead, {}, {})
    for position, task in enumerate(tasks):
        steps = tuple(
            step
            for step in method.steps_for(
                builder.settings(label, task), position - (base is not None)
            )
            if position or not step.later
        )
        if steps and not (ahead and task is base):
            seen = tuple(tasks[: position + 1])
            stages = _add_steps(
                builder, label, task, seen, steps, ends if method.carries else common, last
            )
            last[task.name] = stages[steps[-1].name]
            ends = {step: stages[step] for step in _ends(steps)}
            common |= {step: stages[step] for step in method.starts_from if step in stages}
        leaves.append(
            _add_evaluate(
                builder,
                label,
                tuple(tasks[: position + 1]),
                last,
                ends if method.carries or method.trains_on == "seen" else common,
            )
        )
    return leaves


def _waits(steps: tuple[Step, ...]) -> dict[str, tuple[str, ...]]:
    """Step -> the steps of the same task that it waits for."""
    names = [step.name for step in steps]
    return {
        step.name: tuple(names[max(0, i - 1) : i]) if step.after is None else step.after
        for i, step in enumerate(steps)
    }


def _ends(steps: tuple[Step, ...]) -> list[str]:
    """The steps that no step waits for."""
    waits = _waits(steps)
    awaited = {name for names in waits.values() for name in names}
    return [name for name in waits if name not in awaited]


def _add_steps(
    builder: Builder,
    label: str,
    task: Task,
    seen: tuple[Task, ...],
    steps: tuple[Step, ...],
    before: dict[str, str],
    last: dict[str, str],
) -> dict[str, str]:
    """The training stages of one task, by step. before: what the task before ended with; last: the
    stages that hold the states of earlier tasks, and of the base task itself where it goes through
    steps of the method's own."""
    c, entry = builder.config, builder.config.methods[label]
    method = METHODS[entry.method]
    settings = builder.settings(label, task)
    reads = seen if (method.reads or method.trains_on) == "seen" else (task,)
    # their stages are ancestors of this task's
    states = {t.name: last[t.name] for t in seen if t.name in last} if method.carries else {}
    loaded = states.values() if method.loads_states(c.stream.scenario) else ()
    waits, done = _waits(steps), dict[str, str]()
    for step in steps:
        train, data = builder.recipe(label, step.name, task)
        start = {name: done[name] for name in waits[step.name]} or before
        parents = list(
            dict.fromkeys(
                ["backbone", *(f"data/{t.card}" for t in reads), *start.values(), *loaded]
            )
        )
        stage_id = f"{label}/{task.name}/{step.name}"
        inputs = {
            "method": entry.method,
            "revision": method.revision,
            "task": task.name,
            "seen": [[t.name, list(t.classes)] for t in reads],
            "settings": key_inputs(settings, method.ignored_settings(step.name)),
            "scenario": c.stream.scenario,
            "seed": c.seed,
            "train": key_inputs(train) if step.trains else {},
            "data": key_inputs(data),
            **shared_revisions(),
        }
        job = builder.job(
            stage_id,
            step.name,
            label,
            task,
            seen,
            previous={name: builder.keys[stage] for name, stage in start.items()},
            states={name: builder.keys[stage] for name, stage in states.items()},
        )
        builder.add(stage_id, step.name, inputs, parents, method=label, task=task.name, job=job)
        done[step.name] = stage_id
    return done


def _add_evaluate(
    builder: Builder,
    label: str,
    so_far: tuple[Task, ...],
    last: dict[str, str],
    start: dict[str, str],
) -> str:
    """A leaf, after the last of the tasks `so_far`. Where later stages can change old answers it
    measures all of them; else this task, and the one before as a canary.

    Test data that is gone for good (source and shards) is asked for only where the result stands
    already: a new task can be added all the same, and what cannot be measured stays empty in the
    matrix.
    """
    method = METHODS[builder.config.methods[label].method]
    task = so_far[-1]
    served = (
        so_far if method.changes_past_predictions(builder.config.stream.scenario) else so_far[-2:]
    )
    stages = {t: last[t.name] for t in served}
    stage = _evaluate_stage(builder, label, stages, served, start)
    there = tuple(t for t in served if t.card not in builder.gone)
    if (
        task in there
        and len(there) < len(served)
        and Artifact.open(builder.store.root, stage.key) is None
    ):
        stage = _evaluate_stage(builder, label, stages, there, start)
    return builder.keep(stage).id


def _evaluate_stage(
    builder: Builder,
    label: str,
    stages: dict[Task, str],
    shown: tuple[Task, ...],
    start: dict[str, str],
) -> Stage:
    """stages: the tasks that are served, with the stages that hold their states, this stage's own
    task last. shown: those that are measured. start: the stages whose carried states they are
    served with, by step."""
    entry = builder.config.methods[label]
    method, task = METHODS[entry.method], [*stages][-1]
    parents = list(
        dict.fromkeys(
            ["backbone", *(f"data/{t.card}" for t in shown), *stages.values(), *start.values()]
        )
    )
    stage_id = f"{label}/{task.name}/evaluate"
    inputs = {
        "method": entry.method,
        "revision": [method.revision, evaluate.EVALUATE_REVISION, sources.DECODING],
        "task": task.name,
        "settings": key_inputs(builder.settings(label)),
        "seed": builder.config.seed,
        "seen": [[t.name, list(t.classes)] for t in shown],
        "scenario": builder.config.stream.scenario,
    }
    if builder.split == "val":
        inputs |= {"split": "val", "val_fraction": builder.config.data_of(label).val_fraction}
    job = builder.job(
        stage_id,
        "evaluate",
        label,
        task,
        tuple(stages),
        measured=tuple(t.name for t in shown),
        split=builder.split,
        previous={name: builder.keys[stage] for name, stage in start.items()},
        states={t.name: builder.keys[stage] for t, stage in stages.items()},
    )
    return builder.stage(
        stage_id, "evaluate", inputs, parents, method=label, task=task.name, job=job
    )


def cache_folder(named: str, storage: str) -> str:
    """Node-local folder of shards and decoded images: in the one that is named, else in the storage
    where that is a disk, else below the temporary folder."""
    if named:
        # one of our own: what else lies there is never deleted
        return os.path.join(os.path.abspath(os.path.expanduser(named)), "accrete-cache")
    if "://" not in storage:
        folder = os.path.join(os.path.abspath(storage), "cache")
        # What a user caches is for that user alone: who shares a storage with its first user has a
        # cache beside.
        others = os.path.isdir(folder) and os.stat(folder).st_uid != os.getuid()
        return f"{folder}-{os.getuid()}" if others else folder
    import tempfile

    return os.path.join(tempfile.gettempdir(), f"accrete-cache-{os.getuid()}")
