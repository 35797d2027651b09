"""Create a card and a config for unprepared data.

`start` detects the layout of the data and writes the files. It is used by `init`, and by `run`,
`plan` and `ingest` if they get a path of data instead of a config (`find_or_write_config`).
"""

from __future__ import annotations

import glob
import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.config import settings as configs
from pipeline.config.text import format_count
from pipeline.config.yaml_files import format_override, parse_override, parse_yaml
from pipeline.data.cards import Card
from pipeline.data.detection.data_set import TEST_FRACTION, DataSet, Request, read_card
from pipeline.data.detection.detect import detect
from pipeline.data.detection.libraries import TORCHVISION_PATH
from pipeline.data.file_kinds import IMAGE_SUFFIXES, TABLE_SUFFIXES, TAR_SUFFIX, is_packed
from pipeline.data.formats.folder import LABEL, split_folders
from pipeline.data.names import get_file_name, get_suffix, listed, printable
from pipeline.data.preview import PAGE_START, PREVIEW, render_sheets
from pipeline.data.proposal import (
    TaskPlan,
    are_domains,
    card_text,
    config_text,
    make_relative,
    plan_tasks,
)
from pipeline.data.splits import find_role
from workers.errors import UserError
from workers.storage.regular_file import read_regular
from workers.storage.secrets import refuse_secrets

# name of the program in written files; it does not depend on how Accrete was started
SCRIPT = "accrete"
CONFIG_SUFFIXES = (".yaml", ".yml")
DATA_SUFFIXES = TABLE_SUFFIXES | IMAGE_SUFFIXES | {TAR_SUFFIX}
# settings of a source that `init` accepts
GIVEN = ("format", "image", "label", "split", "splits", "files", "numbers", "range")
SHOWN_CLASSES = 8  # classes or tasks in a printed line
LONGEST_FILE = 16 << 20  # maximum bytes of an existing card or config
Say = Callable[[str], None]  # called with each line for the user


@dataclass(frozen=True)
class Starter:
    """The files to write for some data.

    Attributes:
        config: Name of the config in `files`.
        files: Name of a file in the current folder -> its text.
        stream: A line about the tasks, for the user.
        run_command: Command that runs the config.
        init_command: Command that creates the config.
    """

    config: str
    files: dict[str, str]
    stream: str
    run_command: str
    init_command: str


class GivenSource(NamedTuple):
    """A data set, and the path that the user gave."""

    data_set: DataSet
    path: str


def is_config(path: str) -> bool:
    """Return whether an argument of a command is a config, not data.

    A config has the suffix .yaml or .yml, or is a file with a suffix that data files do not have.
    """
    if path.lower().endswith(CONFIG_SUFFIXES):
        return True
    return os.path.isfile(path) and get_suffix(path) not in DATA_SUFFIXES and not is_packed(path)


def find_or_write_config(paths: Sequence[str], program: str, say: Say) -> str:
    """Return the path of the config for a command.

    Args:
        paths: A config, or data. For data, a card and a config are written to the current folder,
            unless they exist.
        program: Command that starts Accrete.
        say: Called with lines about the detected layout and written files.
    """
    if is_config(paths[0]) and len(paths) == 1:
        return paths[0]
    for path in paths:
        if is_config(path):
            raise UserError(
                f"{printable(path)} is a config, given together with {len(paths) - 1} other paths; "
                "give one config, or only paths of data"
            )
    return start(paths, program, say, keep=True)


def start(
    paths: Sequence[str],
    program: str,
    say: Say,
    name: str = "",
    keep: bool = False,
    settings: Sequence[str] = (),
) -> str:
    """Inspect data, describe them, and write cards, a config and a preview.

    Args:
        paths: Paths of data.
        program: Command that starts Accrete.
        say: Called with lines about the detected layout and written files.
        name: Name of the run. Empty: the name of the data.
        keep: Use existing files for the same data unchanged.
        settings: Settings of the cards for ambiguous data, for example `source.label=breed`.

    Returns:
        The path of the config.

    Raises:
        UserError: If the data cannot be used, or a file with other content exists. In this case,
            nothing is written.
    """
    given = parse_given_settings(settings)
    sources: list[GivenSource] = []
    for path in paths:
        request = Request(path, program, *given)
        sources += [GivenSource(data_set, path) for data_set in detect(request)]
    sources = _make_names_unique(sources)
    starter = propose(sources, name, paths, program, settings)
    for source in sources:
        say(describe_data_set(source.data_set))
    say(starter.stream)
    if keep and _are_there(starter):
        say(f"{starter.config} exists and is used unchanged")
        return starter.config
    preview_path(starter.config)  # raises before a file is written
    say(write_starter(starter))
    say(f"preview: {write_preview(starter, sources)}")
    return starter.config


def format_column_settings(image: str | None, label: str | None) -> list[str]:
    """Convert the names of columns to settings of a card, as for `parse_given_settings`.

    A column that is None gives no setting.
    """
    named = {"source.image": image, "source.label": label}
    return [format_override(key, column) for key, column in named.items() if column is not None]


def parse_given_settings(settings: Sequence[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Parse the user's settings of a source, and the user's classes.

    Args:
        settings: For example `source.label=breed` or `classes=[cat, dog]`.

    Returns:
        Settings of the source by name, for example `{"label": "breed"}`, and the classes or ().

    Raises:
        UserError: If a setting is invalid.
    """
    source: dict[str, Any] = {}
    classes: tuple[str, ...] = ()
    for text in settings:
        key, value = parse_override(text)
        parts = key.split(".")
        if key == "classes" and isinstance(value, list):
            classes = tuple(map(str, value))
        elif parts[0] == "source" and len(parts) == 2 and parts[1] in GIVEN:
            source[parts[1]] = value
        elif parts[:2] == ["source", "splits"] and len(parts) == 3:
            source.setdefault("splits", {})[parts[2]] = value
        else:
            raise UserError(
                f"--set {text!r:.200}: {key!r} is not a setting that `init` takes; give source."
                f"{', source.'.join(GIVEN)}, or classes=[...]"
            )
    return source, classes


def write_preview(starter: Starter, sources: Sequence[GivenSource]) -> str:
    """Write the page with the detected layout, and return its path."""
    sheets = [source.data_set.preview_sheet() for source in sources]
    return _write_page(preview_path(starter.config), render_sheets(sheets))


def preview_path(config: str) -> str:
    """Return the path of the preview of a config.

    Raises:
        UserError: If another file exists there.
    """
    path = f"{config.removesuffix('.yaml')}-{PREVIEW}"
    is_ours = os.path.isfile(path) and Path(path).read_bytes().startswith(PAGE_START.encode())
    if os.path.islink(path) or (os.path.exists(path) and not is_ours):
        raise UserError(f"{printable(path)} is there and is not a preview; move it, or use --name")
    return path


def _write_page(path: str, page: str) -> str:
    Path(path).write_text(page, encoding="utf-8")
    return path


def preview_card(card: Card) -> str:
    """Write the page that shows how a card reads its source, and return its path."""
    data_set = read_card(card)
    path = preview_path(card.name)
    return _write_page(path, render_sheets([data_set.preview_sheet()]))


# ---- the files -----------------------------------------------------------------------------------
def propose(
    sources: Sequence[GivenSource],
    name: str,
    paths: Sequence[str],
    program: str,
    settings: Sequence[str] = (),
) -> Starter:
    """Return the cards and the config for some data sets.

    Args:
        sources: The data sets.
        name: Name of the run. Empty: the name of the data.
        paths: Paths from the user, for the command in the files and for the default of `name`.
        program: Command that starts Accrete.
        settings: Settings from the user, for the command.

    Raises:
        UserError: If no image is left to test on, results in the current folder would become part
            of the data, or a text is not valid.
    """
    data_sets = [source.data_set for source in sources]
    if not name:
        name = data_sets[0].name
        if len(sources) > 1 and len(paths) == 1:
            name = get_file_name(os.path.basename(os.path.abspath(paths[0])))
    config = f"{name}.yaml"
    # the command in a file does not depend on how Accrete was started
    words = ["init", *paths]
    for setting in settings:
        words += ["--set", setting]
    init_command = shlex.join(words)
    command = f"{SCRIPT} {init_command}"
    run_command = shlex.join(["run", config])
    files: dict[str, str] = {}
    for source in sources:
        _check_count(source.data_set)
        _check_folder(source, program)
        path = make_relative(source.data_set.card.source.path, source.path)
        if source.data_set.card.source.format == "torchvision":
            path = TORCHVISION_PATH
        card_name = source.data_set.name
        card_file = f"{name}-card.yaml" if len(sources) == 1 else f"{name}-{card_name}-card.yaml"
        files[card_file] = card_text(source.data_set, card_name, path, command)
    tasks = plan_tasks(data_sets, list(files), name)
    files[config] = config_text(
        name, tasks, data_sets, command, f"{SCRIPT} {run_command}", has_gpu()
    )
    _check_texts(files, config)
    return Starter(
        config,
        files,
        _stream_text(tasks, are_domains(data_sets)),
        f"{program} {run_command}",
        f"{program} {init_command}",
    )


def _make_names_unique(sources: Sequence[GivenSource]) -> list[GivenSource]:
    """Make the names of sources unique by appending numbers."""
    taken: set[str] = set()
    renamed: list[GivenSource] = []
    for source in sources:
        name = source.data_set.name
        number = 2
        while name.lower() in taken:
            name = f"{source.data_set.name}-{number}"
            number += 1
        taken.add(name.lower())
        renamed.append(GivenSource(replace(source.data_set, name=name), source.path))
    return renamed


def _check_count(data_set: DataSet) -> None:
    """Raise `UserError` if no image could be held out as test."""
    num_images = data_set.counts["train"]
    if not data_set.has_test and data_set.is_exact and num_images <= len(data_set.classes):
        raise UserError(
            f"{data_set.name}: {format_count(num_images, 'image')} of "
            f"{format_count(len(data_set.classes), 'class')} leave none to test on; add "
            "images, two of "
            "a class at least, or a folder test"
        )


def _check_folder(source: GivenSource, program: str) -> None:
    """Raise `UserError` if results in the current folder would become part of the data."""
    card = source.data_set.card
    path = card.source.path
    current = os.path.realpath(os.curdir)
    data = os.path.realpath(path)
    if "://" in path or card.source.format in ("torchvision", "csv"):
        return
    if current != data and not current.startswith(f"{data}/"):
        return
    below = os.path.relpath(current, data).split("/")
    # "x", "x": an invented class folder and image in the current folder
    takes = [path == "." or LABEL in path or "*" in path for path in _train_parts(card)]
    if any(takes) or any(folder.match([*below, "x", "x"])[0] for folder in split_folders(card)):
        parent = os.path.dirname(data)
        command = f"{program} {shlex.join(['init', os.path.basename(data)])}"
        raise UserError(
            "the current folder is that of the images, and results in it would become part of "
            f"them; use another one: `cd {shlex.quote(parent)} && {command}`"
        )


def _train_parts(card: Card) -> list[str]:
    """Return the folders and patterns of all splits."""
    return [part for split in card.source.named_splits() for part in card.source.list_parts(split)]


def _check_texts(files: dict[str, str], config: str) -> None:
    """Raise `UserError` if a text is not valid, for example because of a name in the data."""
    for file, text in files.items():
        body = parse_yaml(text, file)
        refuse_secrets(body, f"{file}: ")
        if file == config:
            configs.check(body, file, with_methods=False)
            continue
        if body["classes"] == "from_source":
            body["classes"] = ["a class"]
        configs.checked(Card, body, "", file)


def has_gpu() -> bool:
    """Return whether torch can use an NVIDIA GPU of this machine."""
    if not os.path.exists("/dev/nvidia0"):
        return False
    from workers.data import accelerator  # lazy import: torch takes seconds

    return accelerator.is_available()


def write_starter(starter: Starter) -> str:
    """Write the files to the current folder, and return a message.

    Raises:
        UserError: If a file with other content exists. In this case, nothing is written.
    """
    missing: list[str] = []
    for file, text in starter.files.items():
        if not os.path.lexists(file):
            missing.append(file)
        elif _read_if_exists(file) != text:
            raise _other_content(file, starter)
    for file in missing:
        # "x" fails if the file was created in the meantime
        with open(file, "x", encoding="utf-8") as stream:
            stream.write(starter.files[file])
    names = format_file_names(starter.files)
    return f"{'wrote' if missing else 'unchanged:'} {names}"


def format_file_names(files: dict[str, str]) -> str:
    """Format the names of files for a sentence."""
    names = list(files)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _other_content(file: str, starter: Starter) -> UserError:
    return UserError(
        f"{file} is in the current folder with another content, and nothing was written; use "
        f"another name: `{with_free_name(starter)}`"
    )


def with_free_name(starter: Starter) -> str:
    """Return the command that creates the files of a starter without overwriting other files.

    If necessary, it contains `--name` with an unused name.
    """
    if all(_is_free(file, text) for file, text in starter.files.items()):
        return starter.init_command
    stem = starter.config.removesuffix(".yaml")
    number = 2
    while glob.glob(f"{glob.escape(stem)}-{number}*.yaml"):
        number += 1
    return f"{starter.init_command} --name {shlex.quote(f'{stem}-{number}')}"


def _is_free(file: str, text: str) -> bool:
    """Return whether a file does not exist, or exists with this text."""
    return not os.path.lexists(file) or _read_if_exists(file) == text


def suggest(path: str, program: str) -> str | None:
    """Return the command that creates a card and a config for a path, or None if it would fail.

    Args:
        path: The path.
        program: Command that starts Accrete.
    """
    try:
        sources = [GivenSource(data_set, path) for data_set in detect(Request(path, program))]
        return with_free_name(propose(_make_names_unique(sources), "", [path], program))
    except UserError:
        return None


def _read_if_exists(file: str) -> str | None:
    """Return the text of a file, or None if it cannot be read."""
    try:
        return read_regular(Path(file), LONGEST_FILE).decode()
    except (OSError, UnicodeDecodeError):
        return None


def _are_there(starter: Starter) -> bool:
    """Return whether the config exists, with cards whose sources have the same paths."""
    if not os.path.isfile(starter.config):
        return False
    for file, text in starter.files.items():
        if file == starter.config:
            continue
        present = _read_if_exists(file)
        if present is None:
            return False
        sources = []
        for card in (present, text):
            body = parse_yaml(card, file)
            source = body.get("source") if isinstance(body, dict) else None
            path = source.get("path") if isinstance(source, dict) else None
            sources.append(path)
        if sources[0] != sources[1]:
            return False
    return True


# ---- messages ------------------------------------------------------------------------------------
def describe_data_set(data_set: DataSet) -> str:
    """Describe a data set in a few lines: the detected layout, and the account of the files."""
    class_names = ", ".join(data_set.classes[:SHOWN_CLASSES])
    if len(data_set.classes) > SHOWN_CLASSES:
        class_names += ", ..."
    lines = [
        f"{data_set.name}: {data_set.layout}",
        f"  {format_count(len(data_set.classes), 'class')}: {class_names}",
    ]
    is_exact = data_set.is_exact
    counts = data_set.counts
    numbers = [format_count(n, f"{split} image", is_exact) for split, n in counts.items()]
    if data_set.has_test:
        lines.append(f"  {', '.join(numbers)}")
    else:
        lines.append(
            f"  {format_count(counts['train'], 'image', is_exact)}; "
            f"{TEST_FRACTION:.0%} of each class "
            "are held out as test, by hash of their names"
        )
    if "val" in counts:
        lines.append("  validation images are those of the data, and none are held out of train")
        without = sorted(name for name in data_set.classes if ("val", name) not in data_set.images)
        if without:
            named = format_count(len(without), "class")
            lines.append(f"  note: {named} without validation images: {listed(without)}")
    elif _is_val_the_test(data_set):
        lines.append("  the validation images of the data are the test images")
    lines += [f"  note: {note}" for note in data_set.notes]
    lines += [f"  {line}" for line in data_set.account.lines()]
    return "\n".join(lines)


def _is_val_the_test(data_set: DataSet) -> bool:
    """Return whether the test images are in a folder or file named like validation images."""
    parts = data_set.card.source.list_parts("test")
    return any(find_role(part.rpartition("/")[2]) == "val" for part in parts)


def _stream_text(tasks: Sequence[TaskPlan], in_domains: bool) -> str:
    """Describe the tasks in one line. `in_domains`: all have the same classes."""
    parts: list[str] = []
    for task in tasks[:SHOWN_CLASSES]:
        role = ", the base" if task.is_base else ""
        parts.append(f"{task.name} ({format_count(task.num_classes, 'class')}{role})")
    more = len(tasks) - SHOWN_CLASSES
    if more > 0:
        parts.append(f"{more} more")
    text = f"{format_count(len(tasks), 'task')}: {', '.join(parts)}"
    if in_domains:
        text += (
            "; all have the same classes, so they are domains (stream.scenario), and no image has "
            "a task at test time"
        )
    return text
