"""Immutable, digest-verified results on any pyarrow filesystem.

Layout of one artifact, `<root>/<key>/`:

    <attempt>/state.safetensors ...   the files of the successful attempt
    manifest.json                     written last; names the attempt, the size and sha256 of each
                                      file, and its own sha256

Each attempt writes its files to a folder with a unique name, and the manifest is a single atomic
write. So two runs that compute the same artifact at the same time never mix their files: the
manifest names one attempt. On a disk the first manifest is kept, and the files of the other attempt
are deleted immediately. On an object store the last manifest is kept, which is equivalent because
both results are equal, and `accrete gc` deletes the files of the other attempt. S3 could keep the
first manifest by a conditional PUT (If-None-Match), but pyarrow 25 does not offer it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import posixpath
import re
import shutil
import stat
import sys
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Required, TypedDict, cast
from urllib.parse import urlsplit, urlunsplit

from pyarrow import fs

from workers.errors import DamagedArtifact, UserError
from workers.storage.filesystem import open_filesystem, put_object
from workers.storage.regular_file import read_regular
from workers.storage.secrets import refuse_secrets

MANIFEST = "manifest.json"
CHECKPOINTS = "checkpoints"  # folder next to the folder of the stages, with a subfolder per key
LATEST = "latest.json"  # name of the file that names the last checkpoint of a key
DAMAGED_SUFFIX = ".damaged"  # suffix of a withdrawn manifest
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)  # hard links are not supported
READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)  # errors of a read-only location
LARGE_BYTES = 64 << 20  # above this size, `Artifact.damage` does not check the digest of a file
MAX_JSON_BYTES = 64 << 20
# artifacts that `Artifact.open` returns without reading their manifests: (root, key) -> artifact
_cached: ContextVar[Mapping[tuple[str, str], Artifact]] = ContextVar(
    "artifacts", default=MappingProxyType({})
)


class FileInfo(TypedDict):
    """Size and digest of a stored file."""

    bytes: int
    sha256: str


class Manifest(TypedDict, total=False):
    """The fields of `manifest.json`. Fields that are not required depend on the kind of the stage.

    Attributes:
        wall_s: Duration of the stage in seconds.
        cpu_s: CPU time of the stage in seconds, in the process of rank 0 and its ended children.
        made_of: Content digest of each input, by key of its stage.
    """

    attempt: Required[str]
    key: Required[str]
    files: Required[dict[str, FileInfo]]
    sha256: Required[str]
    step: str
    kind: str
    provenance: dict[str, Any]
    made_of: dict[str, str]
    wall_s: float
    cpu_s: float
    workers: int
    warnings: list[str]
    length: dict[str, int]
    content: str
    card: str
    classes: list[str]
    counts: dict[str, int]
    rejected: dict[str, int]
    fingerprint: str | None
    raw_content: str
    max_pixels: int
    range: list[float]
    digest: str
    bytes: int
    parameters: int
    sizes: dict[str, int]
    trained_parameters: int
    carried_bytes: int
    flops_share: float | None
    backbone_digest: str
    epochs: int
    result: dict[str, Any]


def resolve(uri: str) -> tuple[fs.FileSystem, str]:
    """Return the filesystem of an absolute path or a URI, and the path inside it.

    URIs are `s3://`, `gs://`, `hdfs://` and `file://`; see filesystem.py.

    Raises:
        UserError: If a URI cannot be opened, or contains a secret.
    """
    if "://" not in uri:
        return fs.LocalFileSystem(), os.path.abspath(uri)
    refuse_secrets(uri)
    try:
        parts = urlsplit(uri)
        system, top = open_filesystem(urlunsplit(parts._replace(path="/")))
    except (ValueError, OSError, NotImplementedError) as error:
        raise UserError(
            f"storage {uri!r} cannot be opened ({error}); give an absolute path or a URI "
            "pyarrow knows (file, s3, gs, hdfs) with its credentials in the environment"
        ) from None
    return system, posixpath.normpath(posixpath.join(top, parts.path.lstrip("/")))


def is_local(uri: str) -> bool:
    """Return whether `uri` is a path or a `file://` URI, on a local or mounted file system."""
    return "://" not in uri or uri.startswith("file://")


def _split_query(uri: str) -> tuple[str, str]:
    """Split a URI into the part before its query, and the query with its question mark."""
    if "://" not in uri:
        return uri, ""
    path, mark, query = uri.partition("?")
    return path, mark + query


def join(uri: str, *parts: str) -> str:
    """Join a path to `uri`. A query (`s3://bucket/folder?region=...`) stays at the end."""
    path, query = _split_query(uri)
    return posixpath.join(path, *parts) + query


def parent(uri: str) -> str:
    """Return the parent folder of `uri`."""
    path, query = _split_query(uri)
    return posixpath.dirname(path.rstrip("/")) + query


def exists(uri: str) -> bool:
    """Return whether a file or folder exists."""
    system, path = resolve(uri)
    return bool(system.get_file_info(path).type != fs.FileType.NotFound)


def read_bytes(uri: str, most: int = sys.maxsize) -> bytes:
    """Read a file.

    Args:
        uri: Path or URI of the file.
        most: Maximum number of bytes.

    Raises:
        OSError: If the file is missing, is not a regular file, or is larger than `most`.
    """
    system, path = resolve(uri)
    if isinstance(system, fs.LocalFileSystem):
        return read_regular(path, most)
    with system.open_input_file(path) as file:
        if file.size() > most:
            raise OSError(errno.EFBIG, f"it has {file.size()} bytes, more than {most}", uri)
        data: bytes = file.read()
        return data


def read_json(uri: str) -> Any:
    """Read a JSON file.

    Raises:
        OSError: If the file is missing.
        ValueError: If the file is not JSON, is larger than MAX_JSON_BYTES, or is nested too deeply.
    """
    try:
        data = read_bytes(uri, MAX_JSON_BYTES)
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise ValueError(f"it is larger than {MAX_JSON_BYTES} bytes") from None
        raise
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def write_bytes(uri: str, data: bytes) -> None:
    """Write a file atomically: readers see the whole new file, or the state before.

    On a disk the file is written with a temporary name and renamed. On an object store the file is
    written by a PUT, or above about 10 MB by a multipart upload, which becomes visible only when it
    is completed.

    Raises:
        StorageUnavailable: If the storage does not answer.
    """
    system, path = resolve(uri)
    if not isinstance(system, fs.LocalFileSystem):
        put_object(system, path, data)
        return
    make_dirs(os.path.dirname(path))
    part = f"{path}.{temporary_name()}.part"
    try:
        _write_synced(part, data)
        os.replace(part, path)
    except BaseException:
        if os.path.exists(part):
            os.unlink(part)
        raise


def _write_synced(path: str, data: bytes) -> None:
    """Write a file to a disk and sync it, so that the content survives a loss of power."""
    with open(path, "wb") as stream:
        share_file(path)
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def is_shared(folder: str) -> bool:
    """Return whether a folder is shared by a group, that is, setgid and group-writable.

    Files and folders that this project creates in a shared folder are made writable for the group,
    whatever the umask is.
    """
    mode = os.stat(folder).st_mode
    return bool(mode & stat.S_ISGID and mode & stat.S_IWGRP)


def share_file(path: str) -> None:
    """Make a new file readable and writable for the group if its folder is shared."""
    if is_shared(os.path.dirname(path)):
        mode = stat.S_IMODE(os.stat(path).st_mode)
        os.chmod(path, mode | stat.S_IRGRP | stat.S_IWGRP)


def make_dirs(folder: str) -> None:
    """Create a folder and its missing parents. Each is shared if its parent folder is shared."""
    if os.path.isdir(folder):
        return
    parent_folder = os.path.dirname(folder)
    make_dirs(parent_folder)
    try:
        os.mkdir(folder)
    except FileExistsError:  # another process was faster
        if not os.path.isdir(folder):
            raise
        return
    if is_shared(parent_folder):
        mode = stat.S_IMODE(os.stat(folder).st_mode)
        os.chmod(folder, mode | stat.S_ISGID | stat.S_IRWXG)


def temporary_name() -> str:
    """Return a unique part of a file name, which contains the id of this process.

    `is_leftover` recognises the name after the process has ended.
    """
    return f"{platform.node()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def is_leftover(name: str) -> bool:
    """Return whether a name is from `temporary_name` in an ended process of this machine."""
    match = re.search(rf"{re.escape(platform.node())}-(\d+)-", name)
    if match is None:
        return False
    try:
        os.kill(int(match.group(1)), 0)  # signal 0 only checks whether the process exists
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


class StoredFile(NamedTuple):
    """Size of a file, and the time of the last change in seconds since the epoch."""

    size_bytes: int
    written: float


def list_stored_files(uri: str) -> dict[str, StoredFile]:
    """List all files below `uri`: path relative to `uri` -> file; {} if `uri` is missing.

    On an object store this takes one request per thousand files.
    """
    system, path = resolve(uri)
    infos = system.get_file_info(fs.FileSelector(path, allow_not_found=True, recursive=True))
    files: dict[str, StoredFile] = {}
    for info in infos:
        if info.type == fs.FileType.File:
            written = (info.mtime_ns or 0) / 1e9
            files[info.path[len(path) :].strip("/")] = StoredFile(info.size or 0, written)
    return files


def list_files(uri: str) -> dict[str, int]:
    """List all files below `uri`: path relative to `uri` -> bytes; {} if `uri` is missing."""
    return {path: file.size_bytes for path, file in list_stored_files(uri).items()}


def link_file(source: str, target: str) -> None:
    """Create the file `target` with the content of `source`: a link on a disk, a copy in a bucket.

    A link is safe because files of results are never changed in place. If `target` exists with the
    same size, nothing is done.
    """
    system, source_path = resolve(source)
    _, target_path = resolve(target)
    size = system.get_file_info(source_path).size
    if size is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source_path)
    if system.get_file_info(target_path).size == size:
        return
    if not isinstance(system, fs.LocalFileSystem):
        system.copy_file(source_path, target_path)
        return
    make_dirs(os.path.dirname(target_path))
    part = f"{target_path}.{temporary_name()}.part"
    try:
        os.link(source_path, part)
    except OSError as error:
        if error.errno not in (*NO_LINKS, errno.EXDEV):
            raise
        shutil.copyfile(source_path, part)
    os.replace(part, target_path)


def delete_dir(uri: str) -> None:
    """Delete a folder with its contents.

    It is not an error if the folder is missing, or if another process deletes it or writes to it at
    the same time.
    """
    system, path = resolve(uri)
    try:
        # This listing fails for a missing folder with one request. `system.delete_dir` needs 5.
        system.get_file_info(fs.FileSelector(path))
        system.delete_dir(path)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.ENOTDIR):
            raise


def file_info(data: bytes) -> FileInfo:
    """Return the size and digest of the bytes of a file."""
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


@dataclass
class Attempt:
    """One attempt to write the artifact `key`: `commit` publishes it, `discard` deletes it.

    If a caller sets `name`, all attempts with this name must write files with the same bytes.
    Ingest uses such a name to continue with the files of a killed attempt.

    Attributes:
        root: Folder or URI of the results.
        key: Key of the result.
        name: Name of the attempt and its folder.
        files: Name of a written file -> its size and digest.
    """

    root: str
    key: str
    name: str = field(default_factory=lambda: f"a-{uuid.uuid4().hex[:12]}")
    files: dict[str, FileInfo] = field(default_factory=dict)

    def write(self, name: str, data: bytes) -> FileInfo:
        """Write one file and return its size and digest.

        Several processes can write files of one attempt. Each passes the result of this method to
        the committing process, which adds it to `files`.
        """
        write_bytes(join(self.root, self.key, self.name, name), data)
        self.files[name] = file_info(data)
        return self.files[name]

    def commit(self, manifest: Mapping[str, Any]) -> bool:
        """Publish the files with this manifest.

        Returns:
            False if another attempt was published first; the files of this attempt are deleted.

        Raises:
            OSError: If the size of a file in the storage differs from the written size.
        """
        folder = join(self.root, self.key)
        stored_sizes = list_files(folder)
        if MANIFEST in stored_sizes:
            self.discard()
            return False
        self._check_sizes(stored_sizes)
        fields = {**manifest, "key": self.key, "attempt": self.name, "files": self.files}
        body = json.loads(json.dumps(fields, default=str))
        sealed = {**body, "sha256": compute_sha256(body)}
        data = json.dumps(sealed, indent=1, sort_keys=True).encode()
        target = join(folder, MANIFEST)
        system, path = resolve(target)
        if isinstance(system, fs.LocalFileSystem):
            return self._commit_local(path, data)
        write_bytes(target, data)
        return True

    def _check_sizes(self, stored_sizes: Mapping[str, int]) -> None:
        for name, info in self.files.items():
            size = stored_sizes.get(f"{self.name}/{name}")
            if size != info["bytes"]:
                stored = "no" if size is None else str(size)
                raise OSError(
                    f"{join(self.root, self.key, self.name, name)} has {stored} bytes in the "
                    f"storage, {info['bytes']} were written"
                )

    def _commit_local(self, path: str, data: bytes) -> bool:
        """Write the manifest to `path` on a disk. Return False if a manifest exists already."""
        folder = os.path.dirname(path)
        part = os.path.join(folder, self.name, f"{MANIFEST}.{temporary_name()}.part")
        make_dirs(os.path.dirname(part))
        try:
            _write_synced(part, data)
            os.link(part, path)  # fails if another attempt was faster
            self._sweep(folder)
        except FileExistsError:
            self.discard()
            return False
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            # without links, the later of two simultaneous writes is kept, as on an object store
            os.replace(part, path)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(part)
        return True

    def _sweep(self, folder: str) -> None:
        """Delete other attempts, and partial files of this attempt, after the result is published.

        Another attempt that still runs is not needed: its `commit` would find the manifest and
        discard the attempt. This attempt can have a partial file if ingest continued a killed one.
        """
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False) and entry.name != self.name:
                delete_dir(entry.path)
        for name in os.listdir(os.path.join(folder, self.name)):
            if name.endswith(".part") and name not in self.files:
                with suppress(FileNotFoundError):
                    os.unlink(os.path.join(folder, self.name, name))

    def discard(self) -> None:
        """Delete the files of this attempt, unless an attempt with this name published them."""
        artifact = Artifact.open(self.root, self.key)
        if artifact and artifact.manifest["attempt"] == self.name:
            return
        delete_dir(join(self.root, self.key, self.name))


def compute_sha256(manifest: Mapping[str, Any]) -> str:
    """Return the sha256 of a manifest, without its field `sha256`.

    This digest protects the values in the manifest itself, for example counts.

    Args:
        manifest: The manifest as plain JSON values.
    """
    body = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def compute_content_digest(manifest: Mapping[str, Any]) -> str:
    """Return the digest of the content of a result, which does not depend on measured times.

    The digest covers the images of an ingest, the numbers of an evaluation, or the files of states
    and weights. It is "" for other results. All results of one key have the same digest, unless
    their inputs or the machine differ.
    """
    content = manifest.get("content")
    if isinstance(content, str):
        return content
    files = manifest.get("files") or {}
    states = {name: info["sha256"] for name, info in files.items() if name.endswith(".safetensors")}
    parts = manifest.get("result") or states
    if not parts:
        return ""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@contextmanager
def cache_artifacts(root: str, keys: Iterable[str]) -> Iterator[dict[str, str]]:
    """Context manager that yields key -> content digest of the published results among `keys`.

    Inside the block, and in its thread, `Artifact.open` returns these artifacts without reading
    their manifests again.
    """
    artifacts: dict[tuple[str, str], Artifact] = {}
    digests: dict[str, str] = {}
    for key in keys:
        artifact = Artifact.open(root, key)
        if artifact:
            artifacts[root, key] = artifact
            digests[key] = compute_content_digest(artifact.manifest)
    token = _cached.set({**_cached.get(), **artifacts})
    try:
        yield digests
    finally:
        _cached.reset(token)


def has_only_own_files(manifest: Mapping[str, Any]) -> bool:
    """Return whether the files of a manifest have sizes, digests, and paths in its attempt folder.

    This check is needed because anyone can write a manifest with a correct digest.
    """
    attempt = manifest.get("attempt")
    files = manifest.get("files")
    if not isinstance(attempt, str) or "/" in attempt or not isinstance(files, dict):
        return False
    for name in (attempt, *files):
        for part in name.split("/"):
            if part in ("", ".", "..") or "\0" in part:
                return False
    return all(map(_is_file_info, files.values()))


def _is_file_info(info: Any) -> bool:
    if not isinstance(info, dict):
        return False
    digest = info.get("sha256")
    # strict, because the digest is a part of a path in the cache of a node
    is_digest = isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest) is not None
    return type(info.get("bytes")) is int and is_digest


@dataclass(frozen=True)
class Artifact:
    """A published artifact. Every read is checked against the manifest.

    Attributes:
        root: Folder or URI of the results.
        key: Key of the result.
        manifest: Content of `manifest.json`.
    """

    root: str
    key: str
    manifest: Manifest

    @classmethod
    def open(cls, root: str, key: str) -> Artifact | None:
        """Return the artifact, or None if the manifest is missing or damaged."""
        cached = _cached.get().get((root, key))
        if cached:
            return cached
        try:
            manifest = read_json(join(root, key, MANIFEST))
        except (FileNotFoundError, ValueError):
            return None
        if not isinstance(manifest, dict) or manifest.get("sha256") != compute_sha256(manifest):
            return None
        if not has_only_own_files(manifest):
            return None
        return cls(root, key, cast(Manifest, manifest))

    @classmethod
    def need(cls, root: str, key: str) -> Artifact:
        """Return the artifact. Raise DamagedArtifact if `open` returns None."""
        artifact = cls.open(root, key)
        if artifact is None:
            raise DamagedArtifact(
                key,
                f"stage result {key} is missing below {root}; run the same command again to "
                "compute it",
            )
        return artifact

    def uri(self, name: str) -> str:
        """Return the URI of a file of the artifact."""
        attempt: str = self.manifest["attempt"]
        return join(self.root, self.key, attempt, name)

    def read(self, name: str) -> bytes:
        """Read one file. Raise DamagedArtifact if its size or sha256 differs from the manifest."""
        problem, data = self._read(name)
        if problem:
            raise DamagedArtifact(
                self.key,
                f"{self.uri(name)}: {problem}; run the same command again to recompute it",
            )
        return data

    def damage(self) -> str | None:
        """Describe the first missing, truncated or changed file; return None if all are intact.

        For files above LARGE_BYTES (shards of big data sets) only the size is checked here. Their
        digests are checked when they are read.
        """
        for name, expected in self.manifest["files"].items():
            if expected["bytes"] > LARGE_BYTES:
                problem = self._size_problem(name)
            else:
                problem, _ = self._read(name)
            if problem:
                return f"{name} {problem}"
        return None

    def size_damage(self) -> str | None:
        """Describe the first file that is missing or has another size, or return None.

        This takes one listing and does not read files.
        """
        sizes = list_files(self.uri(""))
        for name, expected in self.manifest["files"].items():
            if name not in sizes:
                return f"{name} is missing"
            if sizes[name] != expected["bytes"]:
                return f"{name} has {sizes[name]} bytes, and {expected['bytes']} were written"
        return None

    def _size_problem(self, name: str) -> str | None:
        system, path = resolve(self.uri(name))
        info = system.get_file_info(path)
        if info.type == fs.FileType.NotFound:
            return "is missing"
        expected = self.manifest["files"][name]["bytes"]
        if info.size == expected:
            return None
        return f"is truncated or padded ({info.size} bytes, the manifest says {expected})"

    def _read(self, name: str) -> tuple[str | None, bytes]:
        """Read a file.

        Returns:
            A description of the damage, or None if the file is intact; and the bytes.
        """
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
                return f"is not a regular file ({error.strerror})", b""
            raise
        if len(data) != expected["bytes"]:
            sizes = f"{len(data)} bytes, the manifest says {expected['bytes']}"
            return f"is truncated or padded ({sizes})", data
        if hashlib.sha256(data).hexdigest() != expected["sha256"]:
            return "is damaged (its sha256 differs from the manifest)", data
        return None, data


def withdraw(root: str, key: str) -> None:
    """Rename the manifest of a damaged artifact, so that its stage runs again.

    The files are kept at least until the next result, because most may be intact, and the inputs
    from which they were made may no longer exist.
    """
    system, path = resolve(join(root, key, MANIFEST))
    if system.get_file_info(path).type == fs.FileType.File:
        system.move(path, path + DAMAGED_SUFFIX)


def read_withdrawn_attempt(root: str, key: str) -> str | None:
    """Return the name of the attempt in the last withdrawn manifest, or None."""
    try:
        manifest = read_json(join(root, key, MANIFEST + DAMAGED_SUFFIX))
    except (FileNotFoundError, ValueError):
        return None
    attempt = manifest.get("attempt") if isinstance(manifest, dict) else None
    return attempt if isinstance(attempt, str) else None
