"""Find the data that the user wants to remove, and the resulting edits of config and cards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.config.settings import Config
from pipeline.config.text import format_count
from pipeline.data import card_files
from pipeline.data.cards import Card
from pipeline.data.names import nfc
from pipeline.graph.store import Store
from pipeline.growing.named_images import DIGEST, find_named_images
from pipeline.growing.new_data import UsedCard, list_used_cards
from pipeline.growing.stream_edits import (
    FileChanges,
    StreamEditor,
    list_card_tasks,
    list_entry_tasks,
    list_task_classes,
)
from workers.errors import UserError, did_you_mean
from workers.storage.artifact import join

MAX_PATHS = 20  # maximum number of listed raw files


@dataclass(frozen=True)
class Target:
    """The item to remove. Exactly one attribute is set.

    Attributes:
        task: Name of a task.
        class_: Name of a class.
        images: Path of a text file that names images.
    """

    task: str = ""
    class_: str = ""
    images: str = ""

    def __post_init__(self) -> None:
        count = sum(map(bool, (self.task, self.class_, self.images)))
        if count != 1:
            raise UserError(
                f"remove: {count} of task, class and images are given; give exactly one"
            )

    def options(self) -> list[str]:
        """Return the command-line option for this item, with its value."""
        for option, value in (("task", self.task), ("class", self.class_), ("images", self.images)):
            if value:
                return [f"--{option}", value]
        raise AssertionError("nothing to remove")


@dataclass
class Removal:
    """The changes that a removal needs.

    Attributes:
        cards: Names of the affected cards.
        changes: Changes of the config, the cards and the lists of images to leave out. Empty if an
            interrupted command has made them before.
        raw: Locations of raw data that contains the item. Raw data is never deleted: this is left
            to the user.
        kept: Notes about images that stay in the shards of the storage.
    """

    cards: list[str]
    changes: FileChanges
    raw: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)


def find_removal(target: Target, path: str, config: Config, store: Store) -> Removal:
    """Find the data to remove, and the resulting edits. Write nothing.

    The command can be repeated after an interruption: data already removed from the config
    needs no edits.

    Args:
        target: The item to remove.
        path: Path of the config file.
        config: The config.
        store: Store of the run.

    Raises:
        UserError: If the item does not exist, or the stream cannot exist without it.
    """
    cards = list_used_cards(config)
    task_classes = list_task_classes(config, store.record(config.name))
    editor = StreamEditor(path, config, cards, task_classes)
    if target.task:
        return _plan_task_removal(target.task, editor, store)
    if target.class_:
        return _remove_class(target.class_, editor, store)
    return _remove_images(target.images, editor, store)


def _plan_task_removal(task: str, editor: StreamEditor, store: Store) -> Removal:
    """Find the edits that remove a task.

    If other tasks use the card of the task, the card must also leave out the classes that only this
    task needs. Otherwise their images would stay in the shards.
    """
    config = editor.config
    tasks = [name for entry in config.stream.tasks for name in list_entry_tasks(entry)]
    if task not in tasks:  # an interrupted command may have removed it from the config
        card = _find_recorded_card(task, store, config.name)
        if not card:
            remedy = did_you_mean(task, tasks, f"its tasks are {', '.join(tasks)}")
            raise UserError(
                f"--task {task!r}: there is nothing to remove, as run {config.name!r} has no such "
                f"task; {remedy}"
            )
        raw = [path for used in editor.cards if used.card.name == card for path in _sources(used)]
        return Removal([card], FileChanges(), raw)
    if len(tasks) == 1:
        raise UserError(
            f"--task {task!r} is the only task of run {config.name!r}; remove the run (delete "
            f"{join(store.storage, 'runs', config.name)}, then `accrete gc --storage "
            f"{store.storage}`) and its config"
        )
    used = next(
        used
        for used in editor.cards
        if any(task in list_entry_tasks(config.stream.tasks[index]) for index in used.entries)
    )
    editor.remove_task(used, task)
    others = [name for name in list_card_tasks(config, used, editor.task_classes) if name != task]
    needed = {name for other in others for name in editor.task_classes[other]}
    unneeded = [name for name in editor.task_classes.get(task, ()) if name not in needed]
    removal = Removal([used.card.name], FileChanges(), _sources(used))
    if others and unneeded:
        try:
            editor.leave_out_classes(used, unneeded)
        except UserError as error:
            removal.kept.append(f"the images of task {task} stay in the shards: {error}")
    removal.changes = editor.changes()
    return removal


def _find_recorded_card(task: str, store: Store, run: str) -> str:
    """Return the card of a task in the records of a run, or "" if there was no such task."""
    record = store.record(run)
    records = store.earlier_records(run) + ([] if record is None else [record])
    for one in records:
        for entry in one.get("tasks", []):
            if entry["name"] == task:
                return entry["card"]
    return ""


def _remove_class(name: str, editor: StreamEditor, store: Store) -> Removal:
    name = nfc(name)
    classes: Mapping[str, Sequence[str]] = {
        used.path: card_files.load_card_file(used.path, store).order() for used in editor.cards
    }
    removal = Removal([], FileChanges())
    for used in editor.cards:
        has_class = name in map(nfc, classes[used.path])
        if has_class:
            editor.remove_class(used, name)
        if has_class or name in map(nfc, used.card.without_classes):
            removal.cards.append(used.card.name)
            removal.raw += _sources(used)
    if not removal.cards:
        known = [one for of_card in classes.values() for one in of_card]
        raise UserError(
            f"--class {name!r}: no card of run {editor.config.name!r} has this class; "
            f"{did_you_mean(name, known, f'there are {len(known)} classes')}"
        )
    removal.changes = editor.changes()
    return removal


def _remove_images(file: str, editor: StreamEditor, store: Store) -> Removal:
    lines = [_normalize(line) for line in card_files.read_image_lines(file)]
    if not lines:
        raise UserError(f"{file} names no image; write the path or the sha256 of one on each line")
    removal = Removal([], FileChanges())
    for named in find_named_images(file, lines, editor.cards, store):
        removal.cards.append(named.used.card.name)
        if named.lines:
            editor.leave_out_images(named.used, sorted(named.lines))
        removal.raw += _list_shown_paths(named.used.card, sorted(named.names))
    removal.changes = editor.changes()
    return removal


def _normalize(line: str) -> str:
    """Return a digest in lower case, and any other line unchanged."""
    return line.lower() if DIGEST.fullmatch(line.lower()) else line


def _sources(used: UsedCard) -> list[str]:
    """Return the locations of a card's raw data."""
    source = used.card.source
    if not source.path:
        return [f"{source.format} {source.name}"]
    in_place = " (shards that are used in place)" if source.format == "webdataset" else ""
    return [f"{path}{in_place}" for path in (source.path, *(more.path for more in source.more))]


def _list_shown_paths(card: Card, names: Sequence[str]) -> list[str]:
    """Return the locations of raw images; above MAX_PATHS, the number of the others."""
    paths = [join(card.source.path, name) if card.source.path else name for name in names]
    rest = len(paths) - MAX_PATHS
    return paths[:MAX_PATHS] + ([f"and {format_count(rest, 'image')} more"] if rest > 0 else [])
