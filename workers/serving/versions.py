"""Versions of a model folder: publish, list, roll back, or delete versions.

model.json              the current version; replacing it atomically publishes a version
versions/NUMBER.json    the `model.json` of each version, including the current one
versions/dropped.json   the numbers of versions to delete

The path of a file is usually its name. If a kept version has a file with other bytes at this path,
the path of the new file contains a part of the sha256 (`at` in `model.json`). Equal bytes are
stored once.

A version is published in this order: its file in `versions`, the missing files, and `model.json`.
Versions with a higher number than the current version were rolled back, or their process was killed
before the last step. These versions, versions before the last `MAX_VERSIONS`, and dropped versions
are deleted at the beginning and at the end of a change. Therefore the current version is complete
even if a process is killed at any moment. Files that no version contains are never changed or
deleted, except partial files.
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
    remove_places,
    sealed,
    write_model,
)
from workers.storage.artifact import (
    exists,
    is_local,
    join,
    link_file,
    list_stored_files,
    read_bytes,
    read_json,
    resolve,
    write_bytes,
)
from workers.storage.lock import file_lock

if TYPE_CHECKING:
    from workers.serving.bundle import Bundle  # imports torch

MAX_VERSIONS = 3  # number of kept versions, including the current version
LOCK = ".lock"  # name of the file that is locked during a change
DROPPED = "versions/dropped.json"
VERSION_FILE = re.compile(r"versions/([1-9][0-9]*)\.json")
# files that `write_bytes` or `link_file` had not renamed yet when their process was killed
PARTIAL = re.compile(
    rf"({MODEL}|versions/[a-z0-9]+\.json|{PLACE})\.[^/]+-[0-9]+-[0-9a-f]{{8}}\.part"
)
SUBFOLDERS = ("tasks", "carried", "versions")
DIGEST_LENGTHS = (8, 64)  # numbers of characters of the sha256 in a path, tried in this order


class Version(NamedTuple):
    """A kept version of a model folder.

    Attributes:
        number: Number of the version, from 1.
        written: Time of writing, in seconds since the epoch.
        tasks: Names of the tasks.
        sha256: Digest of `model.json`.
        is_current: Whether the folder serves this version.
    """

    number: int
    written: float
    tasks: tuple[str, ...]
    sha256: str
    is_current: bool


def publish(uri: str, bundle: Bundle) -> int:
    """Make a bundle the current version of a model folder.

    A running server of this folder then serves the bundle. If the current version has the same
    content, nothing changes.

    Args:
        uri: The model folder.
        bundle: A bundle of a run in the store, or a result of `Bundle.with_tasks`.

    Returns:
        The number of the current version.

    Raises:
        UserError: If the folder is not a model folder, a file of the bundle cannot be read, or
            another process changes the folder at the same time.
    """
    with changing(uri) as versions:
        return versions.publish(bundle)


def list_versions(uri: str) -> list[Version]:
    """Return the kept versions of a model folder, oldest first. The last is the current version.

    Raises:
        UserError: If the folder is not a model folder, or the file of a version is damaged.
    """
    versions = Versions(uri)
    return [versions.describe(number) for number in versions.kept]


def rollback(uri: str) -> Version:
    """Make the previous version the current version, and delete the version that was current.

    Returns:
        The new current version.

    Raises:
        UserError: If no earlier version is kept, or a file of that version is missing.
    """
    with changing(uri) as versions:
        return versions.rollback()


def forget(uri: str, task: str | None = None) -> list[int]:
    """Delete earlier versions of a model folder, with the files that only these versions use.

    Args:
        uri: The model folder.
        task: Delete only versions with this task; None: all earlier versions.

    Returns:
        The numbers of the deleted versions.
    """
    with changing(uri) as versions:
        return versions.forget(task)


@contextmanager
def changing(uri: str) -> Iterator[Versions]:
    """Context manager for one change of a model folder. It yields the versions of the folder.

    Other processes of this machine wait until the change is done. An object store has no lock: if
    two processes write at the same time, the version of the last writer is kept.

    Raises:
        UserError: If a subfolder is a link.
    """
    if not is_local(uri) or not os.path.isdir(resolve(uri)[1]):
        yield from _settled(uri)
        return
    folder = resolve(uri)[1]
    for name in SUBFOLDERS:
        if os.path.islink(os.path.join(folder, name)):
            raise UserError(
                f"{uri}: {name} is a link, but only files inside the folder are changed; replace "
                "the link with the folder to which it leads"
            )
    with file_lock(os.path.join(folder, LOCK)):
        yield from _settled(uri)


def _settled(uri: str) -> Iterator[Versions]:
    """Yield the versions of a folder. Clean up before, and after a change without an error."""
    Versions(uri).clean_up()
    yield Versions(uri)
    Versions(uri).clean_up()


class Versions:
    """The versions of a model folder at the time when this object was created.

    Args:
        uri: The model folder.

    Attributes:
        body: Content of `model.json`.
        bodies: Number -> content of the file of each version.
        current: Number of the current version.
        dropped: Numbers of versions to delete. The current version is never deleted.
        stored: Path -> size and time of every file.
    """

    def __init__(self, uri: str):
        self.uri = uri
        self.body = read_model(uri)
        self.stored = list_stored_files(uri)
        self.bodies = self._read_bodies()
        self.dropped = self._read_dropped()
        # If two versions are equal, the later one is current.
        equal = [n for n, body in self.bodies.items() if body["sha256"] == self.body["sha256"]]
        self.current = max(equal, default=max(self.bodies, default=0) + 1)
        self.bodies[self.current] = self.body

    @property
    def kept(self) -> list[int]:
        """Numbers of the kept versions, in order. The last is the current version."""
        numbers = {n for n in self.bodies if n < self.current} - self.dropped
        return [*sorted(numbers), self.current][-MAX_VERSIONS:]

    def find_earlier(self, task: str | None = None) -> list[int]:
        """Return the numbers of the kept versions before the current version, oldest first.

        Args:
            task: Return only versions with this task; None: all.
        """
        return [n for n in self.kept[:-1] if task is None or _has_task(self.bodies[n], task)]

    def describe(self, number: int) -> Version:
        """Return a description of a version."""
        body = self.bodies[number]
        file = version_file(number)
        if file not in self.stored:
            file = MODEL
        tasks = tuple(task["name"] for task in body["tasks"])
        is_current = number == self.current
        return Version(number, self.stored[file].written, tasks, body["sha256"], is_current)

    def publish(self, bundle: Bundle, forget: str | None = None) -> int:
        """Make a bundle the current version; see the function `publish`.

        Args:
            bundle: The bundle.
            forget: A task. Versions with this task are deleted, including the replaced version.

        Returns:
            The number of the current version.
        """
        if remove_places(bundle.body)["sha256"] == remove_places(self.body)["sha256"]:
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
        missing = _find_missing_file(self.uri, body, version_file(number))
        if missing:
            raise UserError(
                f"{self.uri}: another process deleted {missing} while this version was written; "
                "change a folder with one process at a time, and try again"
            )
        write_model(self.uri, body)
        return number

    def rollback(self) -> Version:
        """Make the previous version the current version; see the function `rollback`."""
        earlier = self.find_earlier()
        if not earlier:
            raise UserError(
                f"{self.uri}: no version before the current one is kept; a folder keeps the last "
                f"{MAX_VERSIONS} versions, but none with a removed task"
            )
        number = earlier[-1]
        file = version_file(number)
        missing = _find_missing_file(self.uri, self.bodies[number], file)
        if missing:
            raise UserError(
                f"{self.uri}: version {number} cannot be served, because {missing} is missing or "
                f"has another size; delete {file} to go back to an earlier version"
            )
        self._number_current()
        write_bytes(join(self.uri, MODEL), read_bytes(join(self.uri, file)))
        return self.describe(number)._replace(is_current=True)

    def forget(self, task: str | None = None) -> list[int]:
        """Delete earlier versions; see the function `forget`."""
        numbers = self.find_earlier(task)
        self._drop(numbers)
        return numbers

    def clean_up(self) -> None:
        """Delete versions that are not kept, files that only they use, and partial files.

        `versions/NUMBER.json` is deleted after the other files, so a later call can continue.
        """
        kept = self.kept
        needed = _list_places(self.bodies[number] for number in kept)
        unneeded = [path for path in self.stored if PARTIAL.fullmatch(path)]
        for number in sorted(self.bodies.keys() - {*kept}):
            unneeded += sorted(_list_places([self.bodies[number]]) - needed)
            unneeded.append(version_file(number))
        for path in [*unneeded, DROPPED]:
            if path in self.stored:
                _delete_file(join(self.uri, path))

    def _read_bodies(self) -> dict[int, dict[str, Any]]:
        """Read the files of all versions: number -> content."""
        bodies: dict[int, dict[str, Any]] = {}
        for path in self.stored:
            match = VERSION_FILE.fullmatch(path)
            if match is None:
                continue
            try:
                bodies[int(match[1])] = read_model(
                    self.uri, path, f"delete {path} to drop this version"
                )
            except UserError:
                if exists(join(self.uri, path)):  # otherwise another process has just deleted it
                    raise
        return bodies

    def _read_dropped(self) -> set[int]:
        """Read the numbers of versions to delete; an invalid file counts as empty."""
        if DROPPED not in self.stored:
            return set()
        try:
            numbers = read_json(join(self.uri, DROPPED))
        except (FileNotFoundError, ValueError):
            return set()
        return {n for n in numbers if isinstance(n, int)} if isinstance(numbers, list) else set()

    def _number_current(self) -> None:
        """Write the file of the current version if it is missing."""
        path = version_file(self.current)
        if path not in self.stored:
            link_file(join(self.uri, MODEL), join(self.uri, path))

    def _drop(self, numbers: Sequence[int]) -> None:
        """Write the numbers of versions to delete.

        They may include the current version, which is deleted after it has been replaced.
        """
        if numbers:
            write_bytes(join(self.uri, DROPPED), json.dumps(numbers).encode())

    def _with_places(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return a body with the path of each file: the path of equal bytes, or a free path."""
        placed: dict[str, str] = {}  # place -> sha256
        for number in self.kept:
            kept_body = self.bodies[number]
            for name, info in kept_body["files"].items():
                placed[find_place(kept_body, name)] = info["sha256"]
        plain = remove_places(body)
        files: dict[str, Any] = {}
        for name, info in plain["files"].items():
            place = self._choose_place(name, info["sha256"], placed)
            placed[place] = info["sha256"]
            files[name] = info if place == name else {**info, "at": place}
        return sealed({**plain, "files": files})

    def _choose_place(self, name: str, digest: str, placed: Mapping[str, str]) -> str:
        """Choose the path of a file.

        Args:
            name: Name of the file.
            digest: sha256 of the file.
            placed: Path -> sha256 of the files of kept versions.
        """
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
    """Return the path of the file of a version, relative to the folder."""
    return f"versions/{number}.json"


def _list_places(bodies: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the paths of all files of some versions."""
    return {find_place(body, name) for body in bodies for name in body["files"]}


def _has_task(body: Mapping[str, Any], task: str) -> bool:
    """Return whether a version has a task."""
    return any(row["name"] == task for row in body["tasks"])


def _delete_file(uri: str) -> None:
    """Delete a file if it exists."""
    system, path = resolve(uri)
    with suppress(FileNotFoundError):  # deleted already, because two dropped versions shared it
        system.delete_file(path)


def _find_missing_file(uri: str, body: Mapping[str, Any], file: str) -> str | None:
    """Return the first file of a version that is missing or has another size, or None.

    Args:
        uri: The model folder.
        body: Content of the version's file.
        file: Path of the version's own file, which must exist too.
    """
    stored = list_stored_files(uri)
    if file not in stored:
        return file
    for name, info in body["files"].items():
        place = find_place(body, name)
        if place not in stored or stored[place].size_bytes != info["bytes"]:
            return place
    return None
