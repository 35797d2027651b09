"""Build the tasks of a stream, and add an ingest stage for each card (data set description)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from pipeline.config.settings import Config, TaskEntry
from pipeline.data import card_files, in_place
from pipeline.data.cards import FROM_SOURCE, Card
from pipeline.data.errors import UnfitSource
from pipeline.data.names import nfc
from pipeline.data.source_checks import check_source
from pipeline.graph import raw_data
from pipeline.graph.builder import Builder
from pipeline.graph.slices import cut_slices
from pipeline.graph.stage import Graph, IngestJob
from pipeline.graph.store import Store
from workers.errors import UserError
from workers.job import Task
from workers.storage.artifact import Artifact
from workers.storage.filesystem import StorageUnavailable

MAX_LISTED_CLASSES = 12  # maximum number of classes that an error message lists


def add_tasks(builder: Builder) -> list[Task]:
    """Add an ingest stage per card, and return the tasks of the stream.

    The base task (the task that the backbone has learned) is first.

    Raises:
        UserError: If the stream cannot be built from its cards.
    """
    loaded: dict[str, Card] = {}
    for entry in builder.config.stream.tasks:
        if entry.card not in loaded:
            card = load_card(entry.card, builder.store)
            _check_new_name(entry.card, card, loaded)
            loaded[entry.card] = card
            _add_card(builder, card)
    tasks: list[Task] = []
    for entry in builder.config.stream.tasks:
        tasks += _make_tasks(builder, entry, loaded[entry.card])
    _check_roles(tasks)
    scenario = builder.config.stream.scenario
    if scenario == "domain":
        tasks = _share_classes(tasks)
    if scenario != "class":
        _check_several_classes(tasks, scenario)
    base_tasks = [task for task in tasks if task.role == "base"]
    return base_tasks + [task for task in tasks if task.role != "base"]


def build_cards_graph(
    config: Config, store: Store, names: Sequence[str]
) -> tuple[Graph, list[Task]]:
    """Return a graph of the ingest stages of cards, and one task per card with all its classes.

    The cards need not belong to the stream of the config.

    Args:
        config: The config.
        store: Store of the run.
        names: Names or paths of cards.
    """
    builder = Builder(config, store, {})
    tasks = []
    for name in dict.fromkeys(names):
        card = load_card(name, store)
        _add_card(builder, card)
        key = builder.keys[f"data/{card.name}"]
        urls = in_place.get_shard_urls(card)
        has_val = "val" in card.source.named_splits()
        tasks.append(
            Task(card.name, card.name, key, card.order(), shard_urls=urls, has_val=has_val)
        )
    return Graph.of(config.name, builder.stages), tasks


def load_card(name: str, store: Store) -> Card:
    """Load a card.

    Args:
        name: Name or path of the card.
        store: Caches the classes of sources, for cards whose classes come from the source.

    Raises:
        UnfitSource: If the classes of the card come from its source, and cannot be found there.
        UserError: If the card is invalid.
    """
    try:
        return card_files.load_card_file(name, store)
    except StorageUnavailable:
        raise
    except UserError as error:
        load_error = error
    try:
        card = card_files.load_without_source(name)
    except UserError:
        raise load_error from None
    if card.classes != (FROM_SOURCE,):
        raise load_error from None
    raise UnfitSource(str(load_error), card) from None


def _check_new_name(path: str, card: Card, loaded: dict[str, Card]) -> None:
    for other_path, other in loaded.items():
        if other.name == card.name:
            raise UserError(
                f"stream.tasks: cards {other_path!r} and {path!r} have the same name "
                f"{card.name!r}; rename one"
            )


def _check_roles(tasks: list[Task]) -> None:
    """Raise `UserError` for two tasks with one name, two base tasks, or two unlabelled tasks."""
    for name, count in Counter(task.name for task in tasks).items():
        if count > 1:
            raise UserError(
                f"stream.tasks: two tasks are called {name!r}; give each its own `name`"
            )
    bases = [task.name for task in tasks if task.role == "base"]
    if len(bases) > 1:
        raise UserError(
            f"stream.tasks: {bases[0]!r} and {bases[1]!r} both have role `base` or `pretrained`; "
            "one backbone has one base task"
        )
    unlabelled = [task.name for task in tasks if task.role == "unlabelled"]
    if len(unlabelled) > 1:
        raise UserError(
            f"stream.tasks: {unlabelled[0]!r} and {unlabelled[1]!r} both have role `unlabelled`; "
            "put all such images on one card, and take it whole"
        )


def _share_classes(tasks: Sequence[Task]) -> list[Task]:
    """Return the tasks of scenario `domain` with their classes in one order.

    It is the order of the pretrained classifier, or else of the first task with labels.

    Raises:
        UserError: If two tasks have different classes.
    """
    labelled = [task for task in tasks if task.role != "unlabelled"]
    if not labelled:
        return list(tasks)
    # the order of the outputs of a pretrained classifier is fixed, so all tasks follow it
    first = next((task for task in labelled if task.has_own_head), labelled[0])
    shared = {nfc(name): name for name in first.classes}
    ordered = []
    for task in tasks:
        if task.role == "unlabelled":
            ordered.append(task)
            continue
        own = {nfc(name): name for name in task.classes}
        differing = [name for name in (*own, *shared) if (name in own) != (name in shared)]
        if differing:
            has = "has" if differing[0] in own else "lacks"
            raise UserError(
                f"stream.tasks: task {task.name!r} {has} class {differing[0]!r}, unlike task "
                f"{first.name!r}; in scenario `domain` all tasks have the same classes: give both "
                "the same `classes`, or set stream.scenario=class"
            )
        ordered.append(replace(task, classes=tuple(own[name] for name in shared)))
    return ordered


def _check_several_classes(tasks: Sequence[Task], scenario: str) -> None:
    """Check that no labelled task has only one class.

    Every prediction within such a task would be correct.

    Raises:
        UserError: If a task has only one class.
    """
    for task in tasks:
        if task.num_classes == 1 and task.role != "unlabelled":
            raise UserError(
                f"stream.tasks: task {task.name!r} has one class, {task.classes[0]!r}, so that in "
                f"scenario `{scenario}` every answer is right; join the class to another task (its "
                "`classes`), or set stream.scenario=class, where the classes of all tasks are told "
                "apart"
            )


def _add_card(builder: Builder, card: Card) -> None:
    """Add the ingest stage of a card.

    Raises:
        UnfitSource: If the card is not ingested, and its source does not exist or cannot be
            ingested.
    """
    try:
        _add_ingest(builder, card)
    except StorageUnavailable:
        raise
    except UserError as error:
        raise UnfitSource(str(error), card) from None


def _add_ingest(builder: Builder, card: Card) -> None:
    source = builder.sources.get(card.name)
    if source is None:
        source = raw_data.find_source(builder.store, card, builder.ask_sources)
    inputs = raw_data.stage_inputs(card, source)
    step = inputs.pop("step")
    images = raw_data.class_digests(builder.store, card, source)
    builder.images[card.name] = images
    job, note = IngestJob(card), source.note
    if images is None and source.entries is not None:
        files = raw_data.fingerprint_classes(card, source.entries)
        job = IngestJob(card, files, raw_data.previous_key(builder.store, card))
        changes = raw_data.describe_changes(builder.store, card, job.files)
        note = "; ".join(filter(None, (note, changes)))
    stage = builder.add(f"data/{card.name}", step, inputs, [], job=job, note=note)
    if Artifact.open(builder.store.root, stage.key) is not None:
        return
    if not source.present:
        builder.cards_without_data.add(card.name)
    elif source.entries is not None:
        check_source(card, source.entries)


def _make_tasks(builder: Builder, entry: TaskEntry, card: Card) -> list[Task]:
    """Return the tasks of one entry of the stream: several for `split` and `slices`, else one."""
    classes = _list_classes(entry, card)
    name = entry.name or card.name
    key = builder.keys[f"data/{card.name}"]
    urls = in_place.get_shard_urls(card)
    has_val = "val" in card.source.named_splits()
    has_own_head = entry.role == "pretrained"
    role = "base" if has_own_head else entry.role
    names = entry.list_task_names(card.name)
    if entry.slices:
        whole = Task(name, card.name, key, tuple(classes), role, urls, has_val)
        parts_of_tasks = cut_slices(entry.slices, classes, name)
        tasks = []
        for task_name, by_class in zip(names, parts_of_tasks, strict=True):
            parts = tuple((class_name, *part) for class_name, part in by_class.items())
            tasks.append(replace(whole, name=task_name, parts=parts))
        return tasks
    tasks = []
    start = 0
    for task_name, size in zip(names, _list_sizes(entry, name, len(classes)), strict=True):
        task_classes = tuple(classes[start : start + size])
        task = Task(task_name, card.name, key, task_classes, role, urls, has_val)
        tasks.append(replace(task, has_own_head=has_own_head))
        start += size
    return tasks


def _list_sizes(entry: TaskEntry, name: str, num_classes: int) -> Sequence[int]:
    """Return the numbers of classes of an entry's tasks.

    Raises:
        UserError: If `split` does not divide the classes.
    """
    if isinstance(entry.split, tuple):
        if sum(entry.split) != num_classes:
            raise UserError(
                f"stream.tasks: split of {name!r} is {list(entry.split)}, which is "
                f"{sum(entry.split)} classes, and there are {num_classes}; make the sum equal, or "
                "select classes with `classes`"
            )
        return entry.split
    count = entry.split or 1
    if num_classes % count:
        raise UserError(
            f"stream.tasks: {num_classes} classes of {name!r} cannot be split into {count} equal "
            "tasks; choose a divisor, or give a list with the number of classes of each task"
        )
    return [num_classes // count] * count


def _list_classes(entry: TaskEntry, card: Card) -> Sequence[str]:
    """Return the classes that an entry of the stream selects from its card, in order.

    Raises:
        UserError: If the card lacks a class, or the entry and its card contradict each other.
    """
    name = entry.name or card.name
    card_classes = card.order()
    if card.source.label is None and entry.role != "unlabelled":
        raise UserError(
            f"stream.tasks: the images of card {card.name!r} have no labels (its source.label is "
            "null); give the entry `role: unlabelled`, or give the card labels"
        )
    if entry.order and entry.classes is not None:
        raise UserError(
            f"stream.tasks: task {name!r} has `classes` and `order` {entry.order!r}; "
            "both say which classes, so leave one out"
        )
    classes: Sequence[str] | None = entry.classes
    if entry.order:
        ordered = card_files.order_classes(entry.order, card.classes)
        classes = [name for name in ordered if name in card_classes]
    if classes is None:
        return card_classes
    # the card and the config can spell a class in different Unicode normal forms
    spelling_on_card = {nfc(class_name): class_name for class_name in card_classes}
    classes = [spelling_on_card.get(nfc(class_name), class_name) for class_name in classes]
    for class_name in classes:
        if class_name not in card_classes:
            listed = ", ".join(card_classes[:MAX_LISTED_CLASSES])
            if len(card_classes) > MAX_LISTED_CLASSES:
                listed += " ..."
            raise UserError(
                f"stream.tasks: class {class_name!r} is not on card {card.name!r}; "
                f"its classes are {listed}"
            )
    if len(set(classes)) != len(classes):
        raise UserError(f"stream.tasks: task {name!r} lists a class twice; list each once")
    return classes
