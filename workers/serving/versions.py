"""Versions of a model folder: publish a new one, list them, go back, or forget earlier ones.

model.json              the current version; replacing it atomically is what publishes
versions/NUMBER.json    the `model.json` of each version, the current one included
versions/dropped.json   the numbers of versions that are being forgotten

A file lies at its own name, or, while a kept version has other bytes there, at a name with a part
of its sha256 (`at` in `model.json`). Equal bytes are stored once.

A version is published in this order: its file in `versions`, the files that the folder lacks, and
`model.json`. Versions above the current one were undone, or their process was killed before the
last step. They, and versions beyond the last `MAX_VERSIONS`, are deleted when a change begins and
when it ends, so that a folder is whole at whatever moment a process is killed. Files that no
version names are never touched.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from workers.errors import UserError
from workers.serving.model_file import (
    MODEL,
    PLACE,
    find_place,
    read_model,
    sealed,
    without_places,
    write_model,
)
from workers.storage.artifact import (
    exists,
    is_local,
    join,
    link_file,
    read_bytes,
    read_json,
    resolve,
    stored_files,
    write_bytes,
)
from workers.storage.lock import file_lock

if TYPE_CHECKING:
    from workers.serving.bundle import Bundle  # imports torch

MAX_VERSIONS = 3  # that are kept, the current one included
LOCK = ".lock"  # exists while the folder is changed
DROPPED = "versions/dropped.json"
VERSION_FILE = re.compile(r"versions/([1-9][0-9]*)\.json")
PARTIAL = re.compile(
    rf"({MODEL}|versions/[a-z0-9]+\.json|{PLACE})\.[^/]+-[0-9]+-[0-9a-f]{{8}}\.part"
)
SUBFOLDERS = ("tasks", "carried", "versions")
DIGEST_LENGTHS = (8, 64)  # of the part of a sha256 in the name of a file


class Version(NamedTuple):
    """A version that a folder keeps. written: seconds since the epoch."""

    number: int
    written: float
    tasks: tuple[str, ...]
    sha256: str
    is_current: bool


def publish(uri: str, bundle: Bundle) -> int:
    """Make a bundle the current version of a model folder.

    A server that follows the folder serves it from then on. If the folder has this content already,
    nothing changes.

    Args:
        uri: Of the folder, which has a `model.json`.
        bundle: Of a run in the store, or made by `Bundle.with_tasks`.

    Returns:
        The number of the current version.

    Raises:
        UserError: If the folder is no model folder, a file of the bundle cannot be read, or another
            process changed the folder at the same moment.
    """
    with changing(uri) as versions:
        return versions.publish(bundle)


def list_versions(uri: str) -> list[Version]:
    """Return the kept versions of a model folder, oldest first; the last is the current one.

    Raises:
        UserError: If the folder is no model folder, or the file of a version is damaged.
    """
    versions = Versions(uri)
    return [versions.describe(number) for number in versions.kept]


def rollback(uri: str) -> Version:
    """Make the version before the current one, and drop the current one.

    Returns:
        The version that is current now.

    Raises:
        UserError: If no earlier version is kept, or one of its files is missing.
    """
    with changing(uri) as versions:
        return versions.rollback()


def forget(uri: str, task: str | None = None) -> list[int]:
    """Delete earlier versions of a model folder, with the files that only they name.

    Args:
        uri: Of the folder.
        task: Only versions that have this task are deleted (None: all earlier versions).

    Returns:
        The numbers of the deleted versions.
    """
    with changing(uri) as versions:
        return versions.forget(task)


@contextmanager
def changing(uri: str) -> Iterator[Versions]:
    """Context manager that yields the versions of a folder, for one change.

    Other processes of this machine wait until it is done. An object store has no lock: there, the
    last of two writers at the same moment wins.
    """
    if not is_local(uri) or not os.path.isdir(resolve(uri)[1]):
        yield from _settled(uri)
        return
    folder = resolve(uri)[1]
    for name in SUBFOLDERS:
        if os.path.islink(os.path.join(folder, name)):
            raise UserError(
                f"{uri}: {name} is a link, and only files inside the folder are changed; replace "
                "the link by the folder that it leads to"
            )
    with file_lock(os.path.join(folder, LOCK)):
        yield from _settled(uri)


def _settled(uri: str) -> Iterator[Versions]:
    """Yield the versions of a folder, and clean up before and after."""
    Versions(uri).clean_up()
    yield Versions(uri)
    Versions(uri).clean_up()


class Versions:
    """The versions that a model folder had when this object was made.

    body: content of `model.json`. bodies: number -> the same of every version. current: number of
    the current version. dropped: numbers that are deleted unless current. stored: path -> size and
    time of every file.
    """

    def __init__(self, uri: str):
        self.uri = uri
        self.body = read_model(uri)
        self.stored = stored_files(uri)
        self.bodies = self._read_bodies()
        self.dropped = self._read_dropped()
        # Of two equal versions, the current one is the later.
        equal = [n for n, body in self.bodies.items() if body["sha256"] == self.body["sha256"]]
        self.current = max(equal, default=max(self.bodies, default=0) + 1)
        self.bodies[self.current] = self.body

    @property
    def kept(self) -> list[int]:
        """Numbers of the versions that can be opened, in order; the last is the current one."""
        numbers = {n for n in self.bodies if n < self.current} - self.dropped
        return [*sorted(numbers), self.current][-MAX_VERSIONS:]

    def find_earlier(self, task: str | None = None) -> list[int]:
        """Return the kept versions before the current one, or those of them that have a task."""
        return [n for n in self.kept[:-1] if task is None or _has_task(self.bodies[n], task)]

    def describe(self, number: int) -> Version:
        """Return a row about a version."""
        body = self.bodies[number]
        file = version_file(number)
        if file not in self.stored:
            file = MODEL
        tasks = tuple(task["name"] for task in body["tasks"])
        is_current = number == self.current
        return Version(number, self.stored[file].written, tasks, body["sha256"], is_current)

    def publish(self, bundle: Bundle, forget: str | None = None) -> int:
        """See `publish`. forget: a task; versions before the new one that have it are not kept."""
        if without_places(bundle.body)["sha256"] == without_places(self.body)["sha256"]:
            return self.current
        self._number_current()
        number = max(self.bodies) + 1
        body = self._with_places(bundle.body)
        write_model(self.uri, body, version_file(number))
        for name, info in body["files"].items():
            place = find_place(body, name)
            if place not in self.stored or self.stored[place].size_bytes != info["bytes"]:
                write_bytes(join(self.uri, place), bundle.read(name))
        if forget is not None:
            self._drop([n for n in self.kept if _has_task(self.bodies[n], forget)])
        missing = _find_missing(self.uri, body, version_file(number))
        if missing:
            raise UserError(
                f"{self.uri}: another process deleted {missing} while this version was written; "
                "let one process at a time change a folder, and try again"
            )
        write_model(self.uri, body)
        return number

    def rollback(self) -> Version:
        """See `rollback`."""
        earlier = self.find_earlier()
        if not earlier:
            raise UserError(
                f"{self.uri}: no version before the current one is kept; only the last "
                f"{MAX_VERSIONS} versions can be served, and none that had a removed task"
            )
        number = earlier[-1]
        file = version_file(number)
        missing = _find_missing(self.uri, self.bodies[number], file)
        if missing:
            raise UserError(
                f"{self.uri}: version {number} cannot be served, because {missing} is missing or "
                f"has another size; delete {file} to go back to the version before it"
            )
        self._number_current()
        write_bytes(join(self.uri, MODEL), read_bytes(join(self.uri, file)))
        return self.describe(number)._replace(is_current=True)

    def forget(self, task: str | None = None) -> list[int]:
        """See `forget`."""
        numbers = self.find_earlier(task)
        self._drop(numbers)
        return numbers

    def clean_up(self) -> None:
        """Delete versions that are not kept, files that only they name, and partial files.

        The file of a version goes after the files that it names: a later call can go on.
        """
        kept = self.kept
        needed = _places(self.bodies[number] for number in kept)
        unneeded = [path for path in self.stored if PARTIAL.fullmatch(path)]
        for number in sorted(self.bodies.keys() - {*kept}):
            unneeded += sorted(_places([self.bodies[number]]) - needed)
            unneeded.append(version_file(number))
        for path in [*unneeded, DROPPED]:
            if path in self.stored:
                _delete_file(join(self.uri, path))

    def _read_bodies(self) -> dict[int, dict[str, Any]]:
        bodies: dict[int, dict[str, Any]] = {}
        for path in self.stored:
            match = VERSION_FILE.fullmatch(path)
            if match is None:
                continue
            try:
                bodies[int(match[1])] = read_model(
                    self.uri, path, f"delete {path} to do without that version"
                )
            except UserError:
                if exists(join(self.uri, path)):  # else another process has just deleted it
                    raise
        return bodies

    def _read_dropped(self) -> set[int]:
        if DROPPED not in self.stored:
            return set()
        try:
            numbers = read_json(join(self.uri, DROPPED))
        except (FileNotFoundError, ValueError):
            return set()
        return {n for n in numbers if isinstance(n, int)} if isinstance(numbers, list) else set()

    def _number_current(self) -> None:
        """Write the file of the current version, unless it has one."""
        path = version_file(self.current)
        if path not in self.stored:
            link_file(join(self.uri, MODEL), join(self.uri, path))

    def _drop(self, numbers: Sequence[int]) -> None:
        """Note versions to delete: those before the current one now, and that one once replaced."""
        if numbers:
            write_bytes(join(self.uri, DROPPED), json.dumps(numbers).encode())

    def _with_places(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return a body in which each file has a place: where its bytes are, or a free one."""
        placed: dict[str, str] = {}  # place -> sha256
        for number in self.kept:
            kept_body = self.bodies[number]
            for name, info in kept_body["files"].items():
                placed[find_place(kept_body, name)] = info["sha256"]
        plain = without_places(body)
        files: dict[str, Any] = {}
        for name, info in plain["files"].items():
            place = self._choose_place(name, info["sha256"], placed)
            placed[place] = info["sha256"]
            files[name] = info if place == name else {**info, "at": place}
        return sealed({**plain, "files": files})

    def _choose_place(self, name: str, digest: str, placed: Mapping[str, str]) -> str:
        if placed.get(name) == digest:
            return name
        for place, placed_digest in placed.items():
            if placed_digest == digest:
                return place
        stem, _, suffix = name.rpartition(".")
        places = [name, *(f"{stem}-{digest[:length]}.{suffix}" for length in DIGEST_LENGTHS)]
        free = (place for place in places if place not in placed and place not in self.stored)
        return next(free, places[-1])


def version_file(number: int) -> str:
    """Return the path of the file of a version, below the folder."""
    return f"versions/{number}.json"


def _places(bodies: Iterable[Mapping[str, Any]]) -> set[str]:
    return {find_place(body, name) for body in bodies for name in body["files"]}


def _has_task(body: Mapping[str, Any], task: str) -> bool:
    return any(row["name"] == task for row in body["tasks"])


def _delete_file(uri: str) -> None:
    system, path = resolve(uri)
    with suppress(FileNotFoundError):  # two dropped versions named it
        system.delete_file(path)


def _find_missing(uri: str, body: Mapping[str, Any], file: str) -> str | None:
    """Return the first file of a version that is missing or has another size; None if none is.

    Args:
        uri: Of the folder.
        body: Of the version.
        file: Its own file, which must exist too.
    """
    stored = stored_files(uri)
    if file not in stored:
        return file
    for name, info in body["files"].items():
        place = find_place(body, name)
        if place not in stored or stored[place].size_bytes != info["bytes"]:
            return place
    return None
