"""Immutable, digest-verified results on any pyarrow filesystem: files first, the manifest last.

Layout of one artifact, `<root>/<key>/`:

    <attempt>/state.safetensors ...   the files of the attempt that won
    manifest.json                     written last; names the attempt, the size and sha256 of each
                                      file, and its own sha256

Files are written below a name that only one attempt uses, and the manifest is a single atomic
write, so two runs that compute the same artifact at the same time can never mix their files, on a
disk and on an object store alike: whichever manifest stands decides. On a disk the first one stands
and the other attempt's files are dropped at once. S3 knows a conditional PUT (If-None-Match), which
pyarrow 25 does not offer; so on an object store of two at the same moment the last one stands, with
equal results, and `gc` finds the other files.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import posixpath
import re
import stat
import sys
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from pyarrow import fs

from workers.errors import DamagedArtifact, UserError
from workers.storage.filesystem import open_filesystem, put
from workers.storage.regular_file import read_regular
from workers.storage.secrets import refuse_secrets

MANIFEST = "manifest.json"
# from filesystems that know no hard links
NO_LINKS = (
    errno.EPERM,
    errno.ENOTSUP,
    errno.ENOSYS,
    errno.EMLINK,
)
LARGE_BYTES = 64 << 20
MOST_JSON = 64 << 20
_opened: ContextVar[Mapping[tuple[str, str], Artifact]] = ContextVar(
    "opened", default=MappingProxyType({})
)


def resolve(uri: str) -> tuple[fs.FileSystem, str]:
    """The filesystem and the path inside it of an absolute path or a URI (`s3://`, `gs://`,
    `hdfs://`, `file://`); see filesystem.py. Raises UserError where it is none, or holds a
    secret."""
    if "://" not in uri:
        return fs.LocalFileSystem(), os.path.abspath(uri)
    refuse_secrets(uri)
    parts = urlsplit(uri)
    try:
        system, top = open_filesystem(urlunsplit(parts._replace(path="/")))
    except (ValueError, OSError, NotImplementedError) as error:
        raise UserError(
            f"storage {uri!r} cannot be opened ({error}); give an absolute path or a URI "
            "pyarrow knows "
            "(file, s3, gs, hdfs) with its credentials in the environment"
        ) from None
    return system, posixpath.normpath(posixpath.join(top, parts.path.lstrip("/")))


def is_local(uri: str) -> bool:
    """Whether a path or URI lies on a disk of this machine, or on one that it has mounted."""
    return "://" not in uri or uri.startswith("file://")


def join(uri: str, *parts: str) -> str:
    """A place below `uri`; a query (`s3://bucket/folder?region=...`) stays at the end."""
    path, mark, query = uri.partition("?") if "://" in uri else (uri, "", "")
    return posixpath.join(path, *parts) + mark + query


def parent(uri: str) -> str:
    """The folder that `uri` lies in."""
    path, mark, query = uri.partition("?") if "://" in uri else (uri, "", "")
    return posixpath.dirname(path.rstrip("/")) + mark + query


def exists(uri: str) -> bool:
    system, path = resolve(uri)
    return system.get_file_info(path).type != fs.FileType.NotFound


def read_bytes(uri: str, most: int = sys.maxsize) -> bytes:
    """The bytes of a file. Raises OSError where it is not there, is no regular file, or has more
    than `most` bytes."""
    system, path = resolve(uri)
    if isinstance(system, fs.LocalFileSystem):
        return read_regular(path, most)
    with system.open_input_file(path) as file:
        if file.size() > most:
            raise OSError(errno.EFBIG, f"it has {file.size()} bytes, more than {most}", uri)
        return file.read()


def read_json(uri: str) -> Any:
    """What a JSON file holds. Raises OSError where it is not there, ValueError where it is no JSON,
    or larger or more deeply nested than any that is written here."""
    try:
        data = read_bytes(uri, MOST_JSON)
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise ValueError(f"it is larger than {MOST_JSON} bytes") from None
        raise
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def write_bytes(uri: str, data: bytes) -> None:
    """One atomic write: a temporary name and a move on a disk; on an object store a PUT, or above
    10 MB an upload in parts, which is visible once its end was asked for, and not if any part
    failed. Raises StorageUnavailable where the storage does not answer."""
    system, path = resolve(uri)
    if isinstance(system, fs.LocalFileSystem):
        make_dirs(os.path.dirname(path))
        part = f"{path}.{temporary_name()}.part"
        try:
            with open(part, "wb") as stream:
                share_file(part)
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(part, path)
        except BaseException:
            if os.path.exists(part):
                os.unlink(part)
            raise
    else:
        put(system, path, data)


def is_shared(folder: str) -> bool:
    """Whether a folder is meant for a group: it passes its group on (setgid), and its group may
    write. What is made in it is then for the group too, whatever the umask of who makes it."""
    mode = os.stat(folder).st_mode
    return bool(mode & stat.S_ISGID and mode & stat.S_IWGRP)


def share_file(path: str) -> None:
    """A file that was just made, for the group of its folder where that is shared."""
    if is_shared(os.path.dirname(path)):
        os.chmod(path, stat.S_IMODE(os.stat(path).st_mode) | stat.S_IRGRP | stat.S_IWGRP)


def make_dirs(folder: str) -> None:
    """The folder and those above it that are not there; each for the group of the one above where
    that is shared."""
    if os.path.isdir(folder):
        return
    above = os.path.dirname(folder)
    make_dirs(above)
    try:
        os.mkdir(folder)
    except FileExistsError:  # another process was faster
        if not os.path.isdir(folder):
            raise
        return
    if is_shared(above):
        os.chmod(folder, stat.S_IMODE(os.stat(folder).st_mode) | stat.S_ISGID | stat.S_IRWXG)


def temporary_name() -> str:
    """What the name of a file has in it that only a process under way needs: when its process is
    gone, `is_leftover` tells."""
    return f"{platform.node()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def is_leftover(name: str) -> bool:
    """Whether a file or folder is named after a process of this machine that is gone."""
    found = re.search(rf"{re.escape(platform.node())}-(\d+)-", name)
    if found is None:
        return False
    try:
        os.kill(int(found.group(1)), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


def list_files(uri: str) -> dict[str, int]:
    """Path below `uri` -> bytes, of every file there, in one listing; nothing where it is not
    there."""
    system, path = resolve(uri)
    infos = system.get_file_info(fs.FileSelector(path, allow_not_found=True, recursive=True))
    return {
        i.path[len(path) :].strip("/"): i.size or 0 for i in infos if i.type == fs.FileType.File
    }


def delete_dir(uri: str) -> None:
    """Deletes a folder and all in it. No error where it is not there, or another process deletes it
    or writes there too."""
    system, path = resolve(uri)
    try:
        # one request where there is nothing, in place of five
        system.get_file_info(fs.FileSelector(path))
        system.delete_dir(path)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.ENOTDIR):
            raise


def file_info(data: bytes) -> dict[str, Any]:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


@dataclass
class Attempt:
    """One try at writing the artifact `key`; `commit` makes it visible, `discard` leaves nothing
    behind."""

    root: str
    key: str
    name: str = field(default_factory=lambda: f"a-{uuid.uuid4().hex[:12]}")
    files: dict[str, dict[str, Any]] = field(default_factory=dict)

    def write(self, name: str, data: bytes) -> dict[str, Any]:
        """Writes one file and returns its size and digest. Other processes that write below the
        same attempt hand what this returns to whoever commits (see `files`)."""
        write_bytes(join(self.root, self.key, self.name, name), data)
        self.files[name] = file_info(data)
        return self.files[name]

    def commit(self, manifest: dict[str, Any]) -> bool:
        """Publishes. Returns False, with this attempt's files dropped, where another attempt was
        there first. Raises OSError where the storage has a file of another size than was
        written."""
        target = join(self.root, self.key, MANIFEST)
        there = list_files(join(self.root, self.key))
        if MANIFEST in there:
            self.discard()
            return False
        for name, info in self.files.items():
            if there.get(f"{self.name}/{name}") != info["bytes"]:
                raise OSError(
                    f"{join(self.root, self.key, self.name, name)} has "
                    f"{there.get(f'{self.name}/{name}', 'no')} bytes in the storage, "
                    f"{info['bytes']} were written"
                )
        body = json.loads(
            json.dumps(
                {**manifest, "key": self.key, "attempt": self.name, "files": self.files},
                default=str,
            )
        )
        data = json.dumps({**body, "sha256": digest_of(body)}, indent=1, sort_keys=True).encode()
        system, path = resolve(target)
        if isinstance(system, fs.LocalFileSystem):
            part = os.path.join(os.path.dirname(path), self.name, MANIFEST)
            make_dirs(os.path.dirname(part))
            try:
                with open(part, "wb") as stream:
                    share_file(part)
                    stream.write(data)
                    stream.flush()
                    os.fsync(stream.fileno())
                os.link(part, path)  # fails when another attempt was faster: exactly one wins
                self._sweep(os.path.dirname(path))
            except FileExistsError:
                self.discard()
                return False
            except OSError as error:
                if error.errno not in NO_LINKS:
                    raise
                # of two at the same moment the later one stands, as on an object store
                os.replace(part, path)
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(part)
            return True
        write_bytes(target, data)
        return True

    def _sweep(self, folder: str) -> None:
        """Of a result that has just come to stand on a disk: deletes what attempts that were
        killed have left beside it. One that is still under way finds the manifest, and is
        dropped anyway."""
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False) and entry.name != self.name:
                delete_dir(entry.path)

    def discard(self) -> None:
        delete_dir(join(self.root, self.key, self.name))


def digest_of(manifest: dict[str, Any]) -> str:
    """sha256 of a manifest as JSON gives it back, without its own `sha256`: it holds counts, which
    nothing else guards."""
    body = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def content_digest(manifest: dict[str, Any]) -> str:
    """Digest of what a result is, apart from when and how fast it was made: the images of an
    ingest, the numbers of an evaluation, the states that training leaves; empty where a result has
    none of these. Equal for all results of one key, unless what they were made of, or the machine,
    differs."""
    if isinstance(manifest.get("content"), str):
        return manifest["content"]
    files = manifest.get("files") or {}
    states = {name: info["sha256"] for name, info in files.items() if name.endswith(".safetensors")}
    parts = manifest.get("result") or states
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest() if parts else ""


@contextmanager
def cached_artifacts(root: str, keys: Iterable[str]) -> Iterator[dict[str, str]]:
    """Key -> content, of the results among `keys` that stand. Inside the block, and in its thread,
    `Artifact.open` answers for them from the manifests that were read for this."""
    artifacts = {key: Artifact.open(root, key) for key in keys}
    standing = {(root, key): artifact for key, artifact in artifacts.items() if artifact}
    token = _opened.set({**_opened.get(), **standing})
    try:
        yield {key: content_digest(artifact.manifest) for (_, key), artifact in standing.items()}
    finally:
        _opened.reset(token)


def names_own_files_only(manifest: dict[str, Any]) -> bool:
    """Whether the files that a manifest names lie in the folder of its attempt: its digest says
    that nothing changed, not who wrote it."""
    attempt, files = manifest.get("attempt"), manifest.get("files")
    if not isinstance(attempt, str) or "/" in attempt or not isinstance(files, dict):
        return False
    parts = {part for name in (attempt, *files) for part in name.split("/")}
    sound = all(
        isinstance(info, dict)
        and type(info.get("bytes")) is int
        and isinstance(info.get("sha256"), str)
        for info in files.values()
    )
    return sound and not parts & {"", ".", ".."} and not any("\0" in part for part in parts)


@dataclass(frozen=True)
class Artifact:
    """A published artifact: every read is checked against the manifest."""

    root: str
    key: str
    manifest: dict[str, Any]

    @classmethod
    def open(cls, root: str, key: str) -> Artifact | None:
        """The artifact, or None where no manifest stands that is as it was written."""
        if artifact := _opened.get().get((root, key)):
            return artifact
        try:
            manifest = read_json(join(root, key, MANIFEST))
        except (FileNotFoundError, ValueError):
            return None
        whole = (
            isinstance(manifest, dict)
            and manifest.get("sha256") == digest_of(manifest)
            and names_own_files_only(manifest)
        )
        return cls(root, key, manifest) if whole else None

    @classmethod
    def need(cls, root: str, key: str) -> Artifact:
        found = cls.open(root, key)
        if found is None:
            raise DamagedArtifact(
                key,
                f"stage result {key} is missing below {root}; run the same command again to "
                "compute it",
            )
        return found

    def uri(self, name: str) -> str:
        return join(self.root, self.key, self.manifest["attempt"], name)

    def read(self, name: str) -> bytes:
        """The bytes of one file. Raises DamagedArtifact where size or sha256 differ from the
        manifest."""
        problem, data = self._read(name)
        if problem:
            raise DamagedArtifact(
                self.key,
                f"{self.uri(name)}: {problem}; run the same command again to compute it anew",
            )
        return data

    def damage(self) -> str | None:
        """The first file that is missing, truncated or altered, in words; None when everything is
        as it was written. Files above LARGE_BYTES (shards of big data sets) are judged by their
        size here and by their digests when they are read."""
        for name, expected in self.manifest["files"].items():
            problem = (
                self._size_problem(name) if expected["bytes"] > LARGE_BYTES else self._read(name)[0]
            )
            if problem:
                return f"{name} {problem}"
        return None

    def _size_problem(self, name: str) -> str | None:
        system, path = resolve(self.uri(name))
        info = system.get_file_info(path)
        if info.type == fs.FileType.NotFound:
            return "is missing"
        expected = self.manifest["files"][name]["bytes"]
        return (
            None
            if info.size == expected
            else f"is truncated or padded ({info.size} bytes, the manifest says {expected})"
        )

    def _read(self, name: str) -> tuple[str | None, bytes]:
        expected = self.manifest["files"].get(name)
        if expected is None:
            return "is not in the manifest", b""
        try:
            data = read_bytes(self.uri(name), expected["bytes"])
        except FileNotFoundError:
            return "is missing", b""
        except OSError as error:
            if error.errno == errno.EFBIG:
                return self._size_problem(name), b""
            if error.errno in (errno.EINVAL, errno.EISDIR):
                return f"is none ({error.strerror})", b""
            raise
        if len(data) != expected["bytes"]:
            return (
                f"is truncated or padded ({len(data)} bytes, the manifest says "
                f"{expected['bytes']})",
                data,
            )
        if hashlib.sha256(data).hexdigest() != expected["sha256"]:
            return "is damaged (its sha256 differs from the manifest)", data
        return None, data


def withdraw(root: str, key: str) -> None:
    """Takes a damaged artifact out of sight so that its stage runs again. Its files stay until
    `gc`: most may be whole, and what they were made of may be gone."""
    system, path = resolve(join(root, key, MANIFEST))
    if system.get_file_info(path).type == fs.FileType.File:
        system.move(path, f"{path}.damaged")
