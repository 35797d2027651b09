"""Edit the stream of a config, and its cards, for new or removed data.

`edit_stream` makes the edits for new data. `StreamEditor` has the single edits, also for removals.
Nothing is written before `FileChanges.write`.
"""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pipeline.config.settings import Config, TaskEntry
from pipeline.config.text import format_count
from pipeline.config.yaml_files import CARDS
from pipeline.data import card_files
from pipeline.data.cards import FROM_SOURCE, Card, permuted
from pipeline.data.formats.folder import class_folders
from pipeline.data.names import listed, nfc, printable
from pipeline.data.proposal import card_text, make_relative
from pipeline.graph.run_record import RunRecord
from pipeline.growing.new_data import NewData, UsedCard
from pipeline.growing.yaml_edits import YamlText
from workers.errors import UserError
from workers.storage.artifact import write_bytes
from workers.storage.regular_file import read_regular

Kind = Literal["task", "classes", "images"]
MAX_FILE_BYTES = 64 << 20  # maximum size of a config or a card
TASKS = ("stream", "tasks")  # path of the list of tasks in a config
MIN_CLASSES = {"task": 2, "class": 1, "domain": 2}  # minimum number per task, by scenario
IMAGE_LIST = "-without-images.txt"  # suffix of the file that lists the images a card leaves out
# remedies in error messages
OWN_CARD = "give the new data a card of their own with --as task"
COPY_CARD = "copy the card beside the config, name the copy in stream.tasks, and try again"


@dataclass
class FileChanges:
    """Changes of several files.

    Attributes:
        texts: New contents by path, in writing order: new files and lists of images, the config,
            edited cards. If `add` is killed before the last step, the config names classes that
            its card lacks, so Accrete rejects the config until the command is repeated.
        lines: Descriptions of the changes.
        before: Previous contents by path, after `write`. None for a file that did not exist.
    """

    texts: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    before: dict[str, str | None] = field(default_factory=dict)

    def write(self) -> None:
        """Write the files whose content changes, each atomically."""
        for path, text in self.texts.items():
            before = read_file(path) if os.path.exists(path) else None
            if before != text:
                write_file(path, text)
                self.before[path] = before

    def undo(self) -> None:
        """Restore the previous contents of the files that `write` has written."""
        for path, text in self.before.items():
            if text is None:
                os.unlink(path)
            else:
                write_file(path, text)
        self.before = {}


def read_file(path: str) -> str:
    """Return the text of a config or a card."""
    return read_regular(Path(path), MAX_FILE_BYTES).decode()


def write_file(path: str, text: str) -> None:
    """Replace the text of a config or a card atomically.

    The file keeps its mode. If the path is a symbolic link, the target of the link is replaced.
    """
    target = os.path.realpath(path)
    for part in glob.glob(f"{glob.escape(target)}.*.part"):  # a killed command may have left them
        os.unlink(part)
    mode = os.stat(target).st_mode if os.path.exists(target) else None
    write_bytes(target, text.encode())
    if mode is not None:
        os.chmod(target, stat.S_IMODE(mode))


# ---- the classes of the tasks --------------------------------------------------------------------
def list_task_classes(config: Config, record: RunRecord | None) -> dict[str, tuple[str, ...]]:
    """Return the classes of each labelled task, by name of the task.

    Args:
        config: Config of the run.
        record: Record of the last run. The classes of a task are read from it if the config does
            not list them.

    Raises:
        UserError: If neither the config nor the record contains the classes of a task.
    """
    recorded = {}
    if record is not None:
        recorded = {task["name"]: tuple(task["classes"]) for task in record["tasks"]}
    classes: dict[str, tuple[str, ...]] = {}
    for entry in config.stream.tasks:
        if entry.role == "unlabelled":
            continue
        if entry.classes is not None:
            classes[_get_task_name(entry)] = entry.classes
            continue
        for name in list_entry_tasks(entry):
            if name not in recorded:
                raise UserError(
                    f"run {config.name!r}: the classes of task {name!r} follow from its card, and "
                    "no run has recorded them; run the config once before it grows, or write "
                    "`classes` to the task"
                )
            classes[name] = recorded[name]
    return classes


def list_entry_tasks(entry: TaskEntry) -> list[str]:
    """Return the names of the tasks of one entry of a stream."""
    return entry.list_task_names(_get_task_name(entry))


def _get_task_name(entry: TaskEntry) -> str:
    return entry.name or card_files.load_without_source(entry.card).name


def list_card_tasks(
    config: Config, used: UsedCard, task_classes: Mapping[str, Sequence[str]]
) -> list[str]:
    """Return the names of the labelled tasks that use a card.

    Args:
        config: The config.
        used: The card.
        task_classes: Classes of each labelled task.
    """
    names = [
        name for index in used.entries for name in list_entry_tasks(config.stream.tasks[index])
    ]
    return [name for name in names if name in task_classes]


def find_unlisted(
    config: Config,
    used: UsedCard,
    task_classes: Mapping[str, Sequence[str]],
    classes: Sequence[str] = (),
) -> list[str]:
    """Return the classes that the tasks of a card need, but that the card does not list.

    A task has such a class if `add` was killed between writing the config and the card. The result
    is empty if the classes of the card come from its source.

    Args:
        config: The config.
        used: The card.
        task_classes: Classes of each task.
        classes: Further classes that the card needs.
    """
    if used.card.classes == (FROM_SOURCE,):
        return []
    tasks = list_card_tasks(config, used, task_classes)
    of_tasks = [name for task in tasks for name in task_classes[task]]
    known = {*map(nfc, used.card.classes)}
    return [n for n in dict.fromkeys(map(nfc, (*of_tasks, *classes))) if n not in known]


# ---- changes by new data -------------------------------------------------------------------------
def edit_stream(
    config_path: str,
    config: Config,
    cards: Sequence[UsedCard],
    task_classes: Mapping[str, Sequence[str]],
    new: NewData,
    kind: Kind | None,
    into: str,
    name: str,
    data: str,
) -> FileChanges:
    """Return the changes of a config and its cards that add new data. Write nothing.

    Args:
        config_path: Path of the config file.
        config: The config.
        cards: Cards of the stream.
        task_classes: Classes of each task.
        new: The new data.
        kind: How to interpret the data. None: decide from the data, which must be unambiguous.
        into: Name of the task that the new classes join. Empty: they become a new task.
        name: Name of the new task. Empty: a free name is chosen.
        data: Path of the data as given by the user.

    Raises:
        UserError: If the data is ambiguous or cannot be added.
    """
    kind = choose_kind(new, kind, into, data)
    if kind == "images" and new.classes:
        raise UserError(
            f"{printable(data)} has classes that no task has ({listed(new.classes)}), and "
            "`--as images` accepts only images of known classes; give --as classes"
        )
    is_whole_task = new.data_set is not None and kind == "task"
    classes = new.all_classes if is_whole_task else new.classes
    if classes and not into:
        _check_class_count(config, classes, task_classes)
    has_new_task = bool(classes) and not into
    if name and not (into or has_new_task or name in task_classes):
        raise UserError(
            f"--name {name!r} is for a new task, and {printable(data)} has no new class for one; "
            "leave it out"
        )
    used = new.card
    if used is not None and not new.classes and not find_unlisted(config, used, task_classes):
        return FileChanges()  # only new images of known classes: no file changes
    editor = StreamEditor(config_path, config, cards, task_classes)
    if is_whole_task:
        return editor.add_card(new, name, data)
    if new.data_set is not None:
        used = editor.join_folder(new, into, data)
    assert used is not None
    if new.classes or new.data_set is None:
        editor.grow_card(used, new)
    if new.classes:
        editor.add_classes(used, new.classes, into, name)
    return editor.changes()


def choose_kind(new: NewData, kind: Kind | None, into: str, data: str) -> Kind:
    """Choose how to interpret new data: as a task, as new classes, or as images of known classes.

    Args:
        new: The new data.
        kind: Interpretation given by the user, if any.
        into: Name of the task that the new classes join. Empty: not given.
        data: Path of the data.

    Raises:
        UserError: If the data is ambiguous, or `kind` is "task" although `into` is given.
    """
    if kind == "task" and into:
        raise UserError(
            f"`--as task` makes a new task of {printable(data)}, and `--into {into}` lets its "
            "classes join one that there is; give one of the two"
        )
    if kind is not None:
        return kind
    if new.data_set is not None and new.images:
        names = listed(sorted(new.images))
        rest = "images" if not new.classes else "classes"
        raise UserError(
            f"{printable(data)} has classes of names that the stream has ({names}), and can be "
            f"read in two ways; give --as {rest} if these are images of the same classes, or "
            "--as task if all of it is a task of its own"
        )
    if not new.classes:
        return "images"
    return "classes" if into else "task"


def _check_class_count(
    config: Config, classes: Sequence[str], task_classes: Mapping[str, Sequence[str]]
) -> None:
    """Raise `UserError` if a new task has only one class, unless the scenario is `class`."""
    if len(classes) > 1 or config.stream.scenario == "class":
        return
    raise UserError(
        f"one new class, {classes[0]!r}, is not a task in scenario `{config.stream.scenario}`, "
        "where every answer "
        f"would be right; join it to a task (--into NAME, one of {listed([*task_classes])}), or "
        "set stream.scenario to class, where the classes of all tasks are told apart"
    )


class StreamEditor:
    """Edits the stream in a config file, and the card files, in memory.

    Args:
        config_path: Path of the config file.
        config: The config.
        cards: Cards of the stream.
        task_classes: Classes of each task.

    Raises:
        UserError: If the file does not contain the list of tasks, or its stream cannot be edited
            because of `orders` or `slices`.
    """

    def __init__(
        self,
        config_path: str,
        config: Config,
        cards: Sequence[UsedCard],
        task_classes: Mapping[str, Sequence[str]],
    ):
        self.path = config_path
        # paths in a config are relative to the folder of the file itself, not of a link to it
        target = os.path.realpath(config_path) if os.path.islink(config_path) else config_path
        self.folder = os.path.dirname(target)
        self.config = config
        self.cards = cards
        self.task_classes = task_classes
        self.text = YamlText(read_file(config_path), config_path)
        self.card_texts: dict[str, YamlText] = {}
        self.new_files: dict[str, str] = {}
        self.lines: list[str] = []
        stream = self.text.body.get("stream")
        entries = stream.get("tasks") if isinstance(stream, dict) else None
        if not isinstance(entries, list) or len(entries) != len(config.stream.tasks):
            raise UserError(
                f"{config_path}: stream.tasks is not in this file (it `extends` another "
                "one); copy the list into this file, or name the other file"
            )
        if config.orders:
            raise UserError(
                f"{config_path}: it repeats its run in several class orders (`orders`), in which "
                "classes that come or go have no place; take `orders` out"
            )
        if any(entry.slices for entry in config.stream.tasks):
            raise UserError(
                f"{config_path}: it divides images into slices (`slices`), so that classes that "
                "come or go, and images that go, change every task; change the source and run the "
                "config"
            )

    def changes(self) -> FileChanges:
        """Return the edits so far as changes of files."""
        texts = {**self.new_files, self.path: self.text.text}
        texts |= {path: text.text for path, text in self.card_texts.items()}
        unchanged = [path for path in texts if os.path.exists(path)]
        changed = {p: t for p, t in texts.items() if p not in unchanged or read_file(p) != t}
        return FileChanges(changed, self.lines)

    # ---- tasks -----------------------------------------------------------------------------------
    def freeze(self, used: UsedCard) -> None:
        """Write the classes of a card's tasks into the config.

        Without this, tasks that take their classes from the card would change with the card. An
        entry of the stream with several tasks (`split`) is replaced by one entry per task.
        """
        # backwards, because new entries move the entries after them
        for index in reversed(used.entries):
            entry = self.config.stream.tasks[index]
            if entry.classes is not None or entry.role == "unlabelled":
                continue
            body = self.text.body["stream"]["tasks"][index]
            rest = {"card": body} if isinstance(body, str) else dict(body)
            for key in ("name", "classes", "order", "split"):
                rest.pop(key, None)
            names = list_entry_tasks(entry)
            if isinstance(body, dict) and len(names) == 1:  # edit the entry, to keep its comments
                for key in {"classes", "order", "split"} & {*body}:
                    self.text.remove([*TASKS, index, key])
                self.text.set([*TASKS, index, "name"], names[0])
                self.text.set([*TASKS, index, "classes"], list(self.task_classes[names[0]]))
                self.lines.append(f"{self.path}: the classes of {names[0]} are written out")
                continue
            bodies = [
                {"name": name, **rest, "classes": list(self.task_classes[name])} for name in names
            ]
            self.text.divide([*TASKS, index], bodies)
            self.lines.append(f"{self.path}: the classes of {', '.join(names)} are written out")

    def add_classes(
        self, used: UsedCard, classes: Sequence[str], into: str, name: str = ""
    ) -> None:
        """Add classes of a card to the stream: as a new task, or to an existing task.

        Args:
            used: The card.
            classes: The new classes.
            into: Name of the task that the classes join. Empty: they become a new task.
            name: Name of the new task. Empty: the next free name.

        Raises:
            UserError: If the task `into` does not list its classes or has role `pretrained`, or if
                both names are given.
        """
        if into:
            index = self._position(into)
            if self.config.stream.tasks[index].role == "pretrained":
                raise UserError(
                    f"task {into!r} has role `pretrained`: its classes are the outputs of the "
                    "classifier in backbone.weights; leave --into out to make a new task"
                )
            if name:
                raise UserError(
                    f"--name {name!r} names a new task, and --into {into} lets the classes join "
                    "one that there is; give one of the two"
                )
            self.text.extend([*TASKS, index, "classes"], classes)
            self.lines.append(f"{self.path}: task {into} gets {listed(classes)}")
            return
        name = name or self._free_name(used)
        body = {"name": name, "card": self._card_in_file(used), "classes": list(classes)}
        self.text.append(TASKS, body)
        self.lines.append(f"{self.path}: new task {name} of {format_count(len(classes), 'class')}")

    def _position(self, task: str) -> int:
        """Return the position in the file of the entry of a task.

        Raises:
            UserError: If there is no such entry, or if it does not list its classes.
        """
        index = self._find_entry(task)
        if index is not None:
            entry = self.text.body["stream"]["tasks"][index]
            if isinstance(entry, dict) and "classes" in entry:
                return index
        raise UserError(
            f"{self.path}: task {task!r} has no `classes` of its own; write them out in this file"
        )

    def _find_entry(self, task: str) -> int | None:
        """Return the position of the entry of a task in the file, or None."""
        for index, entry in enumerate(self.text.body["stream"]["tasks"]):
            body = {"card": entry} if isinstance(entry, str) else entry
            owner = next((used for used in self.cards if self._names(body["card"], used)), None)
            if task == body.get("name", owner and owner.card.name):
                return index
        return None

    def remove_task(self, used: UsedCard, task: str) -> None:
        """Remove a task of a card from the stream, and the settings of methods for this task."""
        self.freeze(used)
        index = self._find_entry(task)
        assert index is not None
        self.text.remove([*TASKS, index])
        methods = self.text.body.get("methods")
        for label, entry in methods.items() if isinstance(methods, dict) else ():
            if isinstance(entry, dict) and task in (entry.get("tasks") or {}):
                self.text.remove(["methods", label, "tasks", task])
        self.lines.append(f"{self.path}: task {task} is taken out")

    def remove_class(self, used: UsedCard, name: str) -> None:
        """Remove a class of a card from all tasks of the card, and let the card leave it out.

        Raises:
            UserError: If too few classes of a task would remain.
        """
        self.freeze(used)
        for task in list_card_tasks(self.config, used, self.task_classes):
            rest = [other for other in self.task_classes[task] if nfc(other) != nfc(name)]
            if len(rest) == len(self.task_classes[task]):
                continue
            scenario = self.config.stream.scenario
            if len(rest) < MIN_CLASSES[scenario]:
                raise UserError(
                    f"task {task!r} would keep {format_count(len(rest), 'class')} without "
                    f"{name!r}, and "
                    f"a task of scenario `{scenario}` has at least {MIN_CLASSES[scenario]}; remove "
                    f"the task (--task {task})"
                )
            index = self._position(task)
            listed_now = self.text.body["stream"]["tasks"][index]["classes"]
            place = [nfc(str(other)) for other in listed_now].index(nfc(name))
            self.text.remove([*TASKS, index, "classes", place])
            self.lines.append(f"{self.path}: task {task} loses {printable(name)}")
        self.leave_out_classes(used, [name])

    def _free_name(self, used: UsedCard) -> str:
        """Return a free name for a new task, from the name of the card and a number: `birds-3`."""
        taken = {*self.task_classes}
        number = len(taken)
        while f"{used.card.name}-{number}" in taken:
            number += 1
        return f"{used.card.name}-{number}"

    def _card_in_file(self, used: UsedCard) -> str:
        """Return the name or path of a card as written in the config file."""
        for body in self.text.body["stream"]["tasks"]:
            card = body if isinstance(body, str) else body["card"]
            if self._names(card, used):
                return str(card)
        return used.path

    def _names(self, card: str, used: UsedCard) -> bool:
        """Return whether a name or path in the config file means this card."""
        path = os.path.join(self.folder, card)
        return card == used.path or os.path.abspath(path) == os.path.abspath(used.path)

    # ---- cards -----------------------------------------------------------------------------------
    def leave_out_classes(self, used: UsedCard, names: Sequence[str]) -> None:
        """Add classes to the card's list of classes to leave out (`without_classes`)."""
        text = self._card_text(used, COPY_CARD)
        listed_before = text.body.get("without_classes") or []
        known = {nfc(str(name)) for name in listed_before}
        missing = [name for name in names if nfc(name) not in known]
        if missing:
            if listed_before:
                text.extend(["without_classes"], missing)
            else:
                text.set(["without_classes"], missing)
            self.lines.append(f"{text.where}: leaves out {listed(missing)}")

    def leave_out_images(self, used: UsedCard, lines: Sequence[str]) -> None:
        """Add images to the list of images that a card leaves out, a file next to the card.

        Args:
            used: The card.
            lines: Lines for the list: names or sha256 of images.

        Raises:
            UserError: If the list of the card is in another folder, or if a file with other content
                exists at the path of a new list.
        """
        text = self._card_text(used, COPY_CARD)
        name = text.body.get("without_images")
        file = text.where.removesuffix(".yaml").removesuffix(".yml") + IMAGE_LIST
        before: list[str] = []
        if name:
            file = str(card_files.resolve_image_list(text.where, name))
            folder = os.path.dirname(os.path.realpath(text.where))
            # an untrusted card must not name a file elsewhere, because the file is overwritten
            if os.path.dirname(os.path.realpath(file)) != folder:
                raise UserError(
                    f"{text.where}: without_images names {file}, but such a list must be in the "
                    "folder of its card; move it there, and name it in the card"
                )
            before = card_files.read_image_lines(file)
            # another card of the stream may have the same list
            before += self.new_files.get(file, "").splitlines()
        body = "".join(f"{line}\n" for line in sorted({*before, *lines}))
        if not name and os.path.lexists(file) and read_file(file) != body:
            raise UserError(
                f"{file} is there with other images, and the card does not name it; move it away, "
                "or name it in `without_images` of the card"
            )
        self.new_files[file] = body
        if not name:
            text.set(["without_images"], os.path.basename(file))
        self.lines.append(f"{text.where}: leaves out {format_count(len(lines), 'line')} of {file}")

    def _card_text(self, used: UsedCard, remedy: str = OWN_CARD) -> YamlText:
        """Return the text of a card for edits. Later calls return the same object.

        Args:
            used: The card.
            remedy: Remedy for the message if the card belongs to Accrete.

        Raises:
            UserError: If the card belongs to Accrete, or states the counts or digest of its data.
        """
        path = card_files.find_card_file(used.path)
        if CARDS in path.resolve().parents:
            raise UserError(
                f"card {used.card.name!r} belongs to Accrete and describes published data, which "
                f"does not change; {remedy}"
            )
        for key in ("counts", "content"):
            if getattr(used.card, key) is not None:
                raise UserError(
                    f"{path}: `{key}` says what must be found, so that these data cannot change; "
                    f"take `{key}` out"
                )
        file = str(path)
        if file not in self.card_texts:
            self.card_texts[file] = YamlText(read_file(file), file)
        return self.card_texts[file]

    def grow_card(self, used: UsedCard, new: NewData) -> None:
        """Add new classes at the end of a card's list of classes, if any, and to `num_classes`.

        Raises:
            UserError: If the card cannot be edited, or a new class was removed from it before.
        """
        self.freeze(used)
        text = self._card_text(used)
        removed = {*map(nfc, used.card.without_classes)} & {*map(nfc, new.classes)}
        if removed:
            raise UserError(
                f"{text.where}: `without_classes` leaves out {listed(sorted(removed))}, which were "
                "removed before; take them out of that list, and repeat the command"
            )
        card = used.card
        if card.classes != (FROM_SOURCE,):
            missing = find_unlisted(self.config, used, self.task_classes, new.classes)
            if not missing:
                return
            if card.class_order_seed is None:
                text.extend(["classes"], missing)
            else:  # replace the seed by the order that it gives, including left-out classes
                order = permuted(card.classes, card.class_order_seed)
                text.set(["classes"], [*order, *missing])
                text.remove(["class_order_seed"])
            if card.num_classes is not None:
                text.set(["num_classes"], len(card.classes) + len(missing))
        elif card.num_classes is not None:
            # a separate folder is not part of the card yet, so its classes are added below
            folders = class_folders(card, "train") if new.card is None else new.all_classes
            text.set(["num_classes"], len({*map(nfc, folders), *new.classes}))
        names = new.classes or find_unlisted(self.config, used, self.task_classes)
        self.lines.append(f"{text.where}: gets {listed(names)}")
        self._note_untested(card, new)

    def _note_untested(self, card: Card, new: NewData) -> None:
        """Note new classes without test images in `lines`, if other classes have test images."""
        if card.source.format != "folder":
            return
        tested = {*map(nfc, class_folders(card, "test"))}
        if new.data_set is not None:
            tested |= {nfc(name) for split, name in new.data_set.images if split == "test"}
        untested = [name for name in new.classes if nfc(name) not in tested]
        if tested and untested:
            self.lines.append(
                f"{listed(untested)}: no test images, so that the accuracy says nothing about them"
            )

    def add_card(self, new: NewData, name: str, data: str) -> FileChanges:
        """Add a new card for a separate data set, and a task with all its classes.

        Args:
            new: The new data.
            name: Name of the card and the task. Empty: the name of the data set, with a number if
                it is taken.
            data: Path of the data as given by the user.

        Raises:
            UserError: If the name is taken, or a file with other content exists at the path of the
                card.
        """
        data_set = new.data_set
        assert data_set is not None
        taken = {*self.task_classes, *(used.card.name for used in self.cards)}
        stem = Path(self.path).name.removesuffix(".yaml").removesuffix(".yml")
        command = f"accrete add {os.path.basename(self.path)} {data}"
        card_name = name or data_set.name
        number = 2
        while card_name in taken and not name:
            card_name = f"{data_set.name}-{number}"
            number += 1
        if card_name in taken:
            raise UserError(
                f"--name {name!r}: there is a task or a card of this name; give another"
            )
        file = os.path.join(self.folder, f"{stem}-{card_name}-card.yaml")
        path = _relative(data_set.card.source.path, self.folder, data)
        text = card_text(data_set, card_name, path, command)
        if os.path.lexists(file) and read_file(file) != text:
            raise UserError(
                f"{file} is there with another content; give the new task another --name"
            )
        self.new_files[file] = text
        body: dict[str, Any] = {"name": card_name, "card": os.path.basename(file)}
        self.text.append(TASKS, body | {"classes": list(data_set.classes)})
        self.lines.append(f"{file}: a card for {printable(data)}")
        number_of = format_count(len(data_set.classes), "class")
        self.lines.append(f"{self.path}: new task {card_name} of {number_of}")
        return self.changes()

    def join_folder(self, new: NewData, into: str, data: str) -> UsedCard:
        """Add a folder to the sources of the card that has the known classes of the new data.

        Args:
            new: The new data.
            into: Name of the task that new classes join. Empty: none.
            data: Path of the folder as given by the user.

        Returns:
            The card.

        Raises:
            UserError: If not exactly one card has these classes, or if its source or the new data
                is not a folder with a subfolder per class.
        """
        data_set = new.data_set
        assert data_set is not None
        owners = [used for used in self.cards if self._owns(used, new, into)]
        if len(owners) != 1:
            found = "none" if not owners else listed([used.card.name for used in owners])
            raise UserError(
                f"{printable(data)} must belong to one card of the stream, and {found} "
                "of them has its classes; add the parts one by one, or name the task with --into"
            )
        used = owners[0]
        if used.card.source.format != "folder" or data_set.card.source.format != "folder":
            raise UserError(
                f"{printable(data)} holds new images for card {used.card.name!r}, and only a card "
                "of class folders reads a further folder; put the images to its own data in "
                f"{printable(used.card.source.path)}, and add that"
            )
        text = self._card_text(used)
        path = _relative(data_set.card.source.path, os.path.dirname(text.where), data)
        source = data_set.card.source
        splits = {split: list(source.list_parts(split)) for split in source.named_splits()}
        body = {"path": path, "splits": splits}
        listed_before = text.body["source"].get("more")
        if listed_before and body in listed_before:
            return used
        if listed_before:
            text.append(["source", "more"], body)
        else:
            text.set(["source", "more"], [body])
        self.lines.append(f"{text.where}: reads {printable(data)} too")
        return used

    def _owns(self, used: UsedCard, new: NewData, into: str) -> bool:
        """Return whether a card has the task `into`, or a task with known classes of `new`."""
        for index in used.entries:
            for name in list_entry_tasks(self.config.stream.tasks[index]):
                classes = {*map(nfc, self.task_classes.get(name, ()))}
                if name == into or classes & {*map(nfc, new.images)}:
                    return True
        return False


def _relative(path: str, folder: str, given: str) -> str:
    """Return the path to write into a file: relative to its folder if the user's path is relative.

    Args:
        path: The path.
        folder: Folder of the file.
        given: Path as given by the user.
    """
    if "://" in path or os.path.isabs(given):
        return make_relative(path, given)
    return Path(os.path.relpath(path, folder or ".")).as_posix()
