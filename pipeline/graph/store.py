"""The store: keys of stages, look-ups of results, records of runs, and garbage.

The storage is a folder or bucket given by the user. A `Store` gives access to its results and
records. A look-up that finds no valid result (a miss) gives the reason.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import posixpath
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from pyarrow import fs

from pipeline.config.settings import NAME, flatten
from pipeline.graph import failures, run_record
from pipeline.graph.collector import without_collections
from pipeline.graph.live_status import check_readable
from pipeline.graph.run_record import RunRecord, is_stage, needed_keys
from pipeline.graph.stage import UNKNOWN, Graph, Stage
from workers.errors import UserError
from workers.storage.artifact import (
    CHECKPOINTS,
    LATEST,
    MANIFEST,
    Artifact,
    StoredFile,
    delete_dir,
    exists,
    is_leftover,
    is_local,
    join,
    list_files,
    list_stored_files,
    read_json,
    resolve,
    temporary_name,
    withdraw,
    write_bytes,
)
from workers.storage.filesystem import FIRST_CONTACT_S, access_remedy, patience
from workers.storage.lock import stage_lock

EARLIER = "earlier"  # subfolder of a run with the records of earlier configs
NOT_FINISHED = "not finished"  # reason of a miss: the last run had this stage, but no result
MAX_CHANGES = 4  # maximum number of changed versions that a note lists


def compute_key(inputs: Mapping[str, Any], parents: Iterable[str]) -> str:
    """Return the content address of a stage: a hash of the inputs and the parents' keys.

    Values are tagged with their types, so 1, 1.0, "1" and True result in different keys. The order
    of the parents matters, the order of the inputs does not.

    Args:
        inputs: Inputs of the stage.
        parents: Keys of the parents, without ingest stages (see `Stage.inputs`).
    """
    return hashlib.sha256(_tagged([run_record.KEY_VERSION, inputs, list(parents)])).hexdigest()[:32]


def _tagged(value: Any) -> bytes:
    """Encode a value with types and lengths, so that different values have different encodings.

    Raises:
        TypeError: If the value is not made of plain values, lists and mappings.
    """
    if isinstance(value, str):
        text = value.encode()
    elif isinstance(value, (bool, int, float, type(None))):
        text = repr(value).encode()
    elif isinstance(value, (list, tuple)):
        return b"l%d:" % len(value) + b"".join(map(_tagged, value))
    elif isinstance(value, Mapping):
        items = b"".join(
            _tagged(str(k)) + _tagged(v)
            for k, v in sorted(value.items(), key=lambda kv: str(kv[0]))
        )
        return b"d%d:" % len(value) + items
    else:
        raise TypeError(f"{type(value).__name__} cannot be part of a key")
    return type(value).__name__.encode() + b"%d:" % len(text) + text


@dataclass(frozen=True)
class Lookup:
    """The outcome of looking up the result of a stage.

    Attributes:
        hit: Whether there is a valid result.
        reason: Why a valid result is missing, as text. "stands" for a hit.
        manifest: Manifest of the result. None for most misses; a forced stage keeps its manifest.
        must_withdraw: Whether there is an invalid result (damaged, outdated or forced to run again)
            that must be withdrawn before the stage runs.
    """

    hit: bool
    reason: str
    manifest: Mapping[str, Any] | None = None
    must_withdraw: bool = False


def remove_file(path: str) -> None:
    """Delete a local file; do nothing if it does not exist."""
    with suppress(FileNotFoundError):  # another driver may have deleted it
        os.unlink(path)


class Garbage(NamedTuple):
    """A folder that no run needs.

    Attributes:
        path: Path relative to the storage.
        size_bytes: Total size of the files.
        written: Time of the last write, in seconds since the epoch.
    """

    path: str
    size_bytes: int
    written: float


Verify = Literal["digests", "sizes", "nothing"]  # how a look-up verifies the files of a result


class Store:
    """Accesses the results in `<storage>/stages/<key>/`, and the records of named runs.

    Args:
        storage: URI of the storage.
    """

    def __init__(self, storage: str):
        self.storage = storage
        self.root = join(storage, "stages")

    def check_usable(self, to_write: bool) -> None:
        """Check that the storage can be used.

        Args:
            to_write: Whether the storage will be written. If false, an existing storage need not be
                writable.

        Raises:
            UserError: If the storage cannot be used.
        """
        if to_write or not self._exists():
            self.check_writable()

    def check_exists(self) -> None:
        """Raise `UserError` if the storage does not exist or cannot be read."""
        check_readable(self.storage)
        if not self._exists():
            raise UserError(
                f"storage {self.storage!r} holds no file; "
                "give the folder that holds the runs with --storage"
            )

    def _exists(self) -> bool:
        try:
            with patience(FIRST_CONTACT_S):
                return exists(self.storage)
        except OSError as error:
            raise UserError(
                f"storage {self.storage!r} cannot be read ({error}); {access_remedy(self.storage)}"
            ) from None

    def check_writable(self) -> None:
        """Raise `UserError` if the storage cannot be written."""
        resolve(self.storage)
        # the name is unique, because two runs may start at the same time
        probe = join(self.storage, f".probe-{temporary_name()}")
        try:
            with patience(FIRST_CONTACT_S):
                write_bytes(probe, b"accrete")
                system, path = resolve(probe)
                system.delete_file(path)
        except OSError as error:
            remedy = access_remedy(self.storage)
            if is_local(self.storage):
                remedy = "choose another folder with --set storage=PATH or fix its permissions"
                if (
                    error.errno == errno.EACCES
                    and os.path.isdir(self.storage)
                    and os.stat(self.storage).st_uid != os.getuid()
                ):
                    remedy = (
                        "it belongs to another user: choose another folder with --set "
                        "storage=PATH, or have that user share it with a group "
                        f"(chgrp -R GROUP, chmod -R g+rwX {self.storage}, and chmod g+s on each "
                        "of its folders)"
                    )
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    remedy = (
                        "free some space there, or choose another folder with --set storage=PATH"
                    )
            raise UserError(
                f"storage {self.storage!r} cannot be written ({error}); {remedy}"
            ) from None

    def sweep(self) -> None:
        """Delete temporary files that killed processes of this machine left in a local storage.

        These are partial copies of records, of states of sources and searches, and of the MLflow
        database, and files that test the access to the storage (`.probe-*`). Folders of Ray Train
        are deleted, too. Results are not touched.
        """
        system, top = resolve(self.storage)
        if not isinstance(system, fs.LocalFileSystem):
            return
        for folder in ("runs", "sources", "searches"):
            for path in list_files(join(self.storage, folder)):
                if path.endswith(".part") and is_leftover(posixpath.basename(path)):
                    remove_file(join(top, folder, path))
        for entry in os.scandir(top):
            if entry.name.startswith((".probe-", "mlflow.db.")) and is_leftover(entry.name):
                remove_file(entry.path)
        self.delete_group_folders()

    def delete_group_folders(self, owner: str | None = None) -> None:
        """Delete the folders of Ray Train that killed drivers of this machine left behind.

        Args:
            owner: Part of the names of the folders of a driver, whose folders are deleted too.
        """
        for folder in self.folders("ray"):
            is_own = owner is not None and owner in folder
            if folder.startswith("group-") and (is_own or is_leftover(folder)):
                delete_dir(join(self.storage, "ray", folder))

    def look_up(
        self, stage: Stage, previous: Mapping[str, Any] | None = None, verify: Verify = "digests"
    ) -> Lookup:
        """Look up the result of a stage.

        Args:
            stage: The stage.
            previous: Record of an earlier run of this config, to explain a miss.
            verify: How to verify the files of the result: by their digests, by their sizes, or not.
        """
        if stage.is_provisional:
            return Lookup(False, UNKNOWN)
        artifact = Artifact.open(self.root, stage.key)
        if artifact is not None:
            damage = None
            if verify == "digests":
                damage = artifact.damage()
            elif verify == "sizes":
                damage = artifact.size_damage()
            if damage is None:
                return Lookup(True, "stands", artifact.manifest)
        elif exists(join(self.root, stage.key, MANIFEST)):
            damage = f"{MANIFEST} is not as it was written"
        else:
            reason = why(stage, previous)
            if reason == NOT_FINISHED and exists(
                join(self.storage, CHECKPOINTS, stage.key, LATEST)
            ):
                reason += ", continues from its checkpoint"
            return Lookup(False, reason)
        return Lookup(False, f"damaged: {damage}", must_withdraw=True)

    def withdraw(self, key: str) -> None:
        """Make the result of a key invalid, so that its stage runs again."""
        withdraw(self.root, key)

    def compute_once(
        self,
        key: str,
        compute: Callable[[], dict[str, Any]],
        on_wait: Callable[[], object] | None = None,
    ) -> dict[str, Any]:
        """Return the manifest of a result, and compute the result if it is missing.

        The lock of the result is held during the computation. If several drivers need the result,
        one driver computes it, and the others wait (see `stage_lock`).

        Args:
            key: Key of the result.
            compute: Computes and commits the result. Returns its manifest.
            on_wait: Called from time to time while another process holds the lock.

        Returns:
            The manifest. It contains `reused: True` if the result already existed.
        """
        with stage_lock(self.root, key, on_wait=on_wait):
            artifact = Artifact.open(self.root, key)
            if artifact is not None:
                return {**artifact.manifest, "reused": True}
            return compute()

    def record_path(self, name: str) -> str:
        """Return the path of the record of a run."""
        return join(self.storage, "runs", name, "run.json")

    def record(self, name: str) -> RunRecord | None:
        """Return the record of the last start of a run; None if it is missing or invalid."""
        return self._read_record(self.record_path(name), name)

    def records(self, record: RunRecord) -> dict[str, RunRecord]:
        """Return the records of a run's replicas, by replica. Unreadable records are left out.

        For a run without replicas, the result contains its own record under an empty name.
        """
        names = record.get("replicas")
        if not isinstance(names, dict):
            return {"": record}
        records = {}
        names_read: set[str] = set()
        for replica, name in names.items():
            is_name = isinstance(name, str) and re.fullmatch(NAME, name)
            if not is_name or name in names_read:  # each replica must have a separate run
                continue
            names_read.add(name)
            replica_record = self.record(name)
            if replica_record is not None:
                records[replica] = replica_record
        return records

    def _read_record(self, path: str, name: str) -> RunRecord | None:
        try:
            record = read_json(path)
        except (FileNotFoundError, ValueError):
            return None
        whole = (
            isinstance(record, dict)
            and record.get("name") == name
            and isinstance(record.get("stages"), list)
        )
        return record if whole and all(is_stage(s) for s in record["stages"]) else None

    @without_collections
    def save_record(self, record: RunRecord) -> None:
        """Write the record of a run at its start, before the run looks up results.

        From then on, `gc` keeps all results that the run needs. If the existing record of this name
        needs other results, it is kept as an earlier record.
        """
        with self.hold_gc_lock():
            self._keep_earlier(record)
            write_bytes(self.record_path(record["name"]), json.dumps(record, indent=1).encode())

    def hold_gc_lock(self) -> AbstractContextManager[None]:
        """Context manager that holds the lock for deleting garbage and writing records.

        An object store has no locks (see lock.py). There, a run that starts during a deletion may
        have to compute a deleted result again.
        """
        return stage_lock(self.root, "gc")

    def _keep_earlier(self, record: RunRecord) -> None:
        """Keep the previous record of a run as an earlier record if its config was changed.

        A record is kept only if it needs a result that the new record does not need. If for example
        a task or a method was added, it is not kept. Earlier records that need no such result any
        more are deleted.
        """
        name, keys = record["name"], needed_keys(record)
        before = self.record(name)
        if before is not None and not needed_keys(before) <= keys:
            write_bytes(self._earlier_path(name, before), json.dumps(before, indent=1).encode())
        system, _ = resolve(self.storage)
        for path, earlier in self._earlier(name).items():
            if earlier is not None and needed_keys(earlier) <= keys:
                with suppress(FileNotFoundError):
                    system.delete_file(resolve(path)[1])

    def _earlier_path(self, name: str, record: RunRecord) -> str:
        digest = hashlib.sha256("\n".join(sorted(needed_keys(record))).encode()).hexdigest()
        return join(self.storage, "runs", name, EARLIER, f"{digest[:16]}.json")

    def _earlier(self, name: str) -> dict[str, RunRecord | None]:
        """Return the earlier records of a run by path; None for an unreadable record.

        An earlier record is the record of the run before its config was changed.
        """
        folder = join(self.storage, "runs", name, EARLIER)
        paths = [join(folder, file) for file in list_files(folder) if file.endswith(".json")]
        return {path: self._read_record(path, name) for path in paths}

    def earlier_records(self, name: str) -> list[RunRecord]:
        """Return the records of earlier configs of a run. Unreadable records are left out."""
        return [record for record in self._earlier(name).values() if record is not None]

    def earlier_names(self) -> list[str]:
        """Return the names of the runs that have records of earlier configs."""
        return [name for name in self.run_names() if self._earlier(name)]

    def forget_earlier(self, remaining_keys: set[str], runs: Collection[str]) -> None:
        """Delete the earlier records of some runs, except records that still need a result.

        Args:
            remaining_keys: Keys of the results that only earlier records need, and that still
                exist. An unreadable record may need any key.
            runs: Names of the runs.
        """
        system, _ = resolve(self.storage)
        for name in runs:
            records = self._earlier(name)
            num_protecting = 0
            for path, record in records.items():
                needed = remaining_keys
                if record is not None:
                    needed = remaining_keys & needed_keys(record)
                if needed:
                    num_protecting += 1
                    continue
                with suppress(FileNotFoundError):
                    system.delete_file(resolve(path)[1])
            if records and not num_protecting:
                delete_dir(join(self.storage, "runs", name, EARLIER))

    def run_names(self) -> list[str]:
        """Return the sorted names of all runs in the storage."""
        return self.folders("runs")

    def folders(self, parent: str) -> list[str]:
        """Return the sorted names of the folders directly below a folder of the storage."""
        system, path = resolve(join(self.storage, parent))
        entries = system.get_file_info(fs.FileSelector(path, allow_not_found=True))
        return sorted(entry.base_name for entry in entries if entry.type == fs.FileType.Directory)

    def garbage(self, search_keys: set[str], changed: Collection[str] = ()) -> list[Garbage]:
        """Return the folders below the storage that no named run needs.

        The results that no run needs are garbage, with their checkpoints and failure files. If a
        needed result is valid, its checkpoints, its failure files and the folders of other attempts
        at it are garbage, too.

        Args:
            search_keys: Keys of the stages that searches need.
            changed: Names of runs. Results that only earlier configs of these runs need are
                garbage, too.

        Raises:
            UserError: If a record cannot be read.
        """
        needed = set(search_keys)
        for name in self.run_names():
            record = self.record(name)
            if record is None and exists(self.record_path(name)):
                raise UserError(
                    f"{self.record_path(name)} is not readable, so what run {name!r} needs is not "
                    f"known; start the run again, or remove {join(self.storage, 'runs', name)}"
                )
            if record is not None:
                needed.update(stage["key"] for stage in record["stages"])
            if name in changed:
                continue
            for path, earlier_record in self._earlier(name).items():
                if earlier_record is None:
                    raise UserError(
                        f"{path} is not readable, so what run {name!r} needed before its config "
                        "was changed is not known; remove that file"
                    )
                needed |= needed_keys(earlier_record)
        files_in = {
            area: list_stored_files(join(self.storage, area))
            for area in ("stages", CHECKPOINTS, failures.FOLDER)
        }
        standing: dict[str, str] = {}  # key of a valid result -> name of the attempt folder
        for key in unclear(files_in) & needed:
            artifact = Artifact.open(self.root, key)
            if artifact:
                standing[key] = artifact.manifest["attempt"]
        garbage: dict[str, Garbage] = {}
        for area, files in files_in.items():
            for path, file in files.items():
                key, _, rest = path.partition("/")
                attempt, below, _ = rest.partition("/")
                if not rest:  # a file outside the folder of a key
                    continue
                if key not in needed or (area != "stages" and key in standing):
                    folder = key
                elif below and attempt != standing.get(key, attempt):
                    folder = f"{key}/{attempt}"
                else:
                    continue
                garbage_path = f"{area}/{folder}"
                others = garbage.get(garbage_path, Garbage(garbage_path, 0, 0.0))
                size_bytes = others.size_bytes + file.size_bytes
                written = max(others.written, file.written)
                garbage[garbage_path] = Garbage(garbage_path, size_bytes, written)
        return sorted(garbage.values())

    # ---- state of sources: results stay valid if the raw data does not exist any more ------------
    def remember(self, identity: str, value: Any) -> None:
        """Store a value in `<storage>/sources/`. `remembered` returns it.

        In a read-only storage, nothing is stored.

        Args:
            identity: Name of the value, for example the identity of a card.
            value: JSON value.
        """
        uri = join(self.storage, "sources", f"{identity}.json")
        try:
            write_bytes(uri, json.dumps({"seen": value}).encode())
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise

    def remembered(self, identity: str) -> Any:
        """Return the value that `remember` stored last, or None without a readable value."""
        try:
            return read_json(join(self.storage, "sources", f"{identity}.json"))["seen"]
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None


def unclear(files_in: Mapping[str, Mapping[str, StoredFile]]) -> set[str]:
    """Return the keys whose manifest must be read to know which of their files are garbage.

    These keys have files of several attempts, checkpoints, or failure files.

    Args:
        files_in: Files by path, for each area of the storage (stages, checkpoints, failures).
    """
    attempts: dict[str, set[str]] = {}
    for path in files_in["stages"]:
        key, _, rest = path.partition("/")
        if "/" in rest:
            attempts.setdefault(key, set()).add(rest.partition("/")[0])
    keys = {key for key, names in attempts.items() if len(names) > 1}
    for area, files in files_in.items():
        if area != "stages":
            keys.update(path.partition("/")[0] for path in files)
    return keys


def explain_outdated(
    graph: Graph, stage: Stage, manifest: Mapping[str, Any] | None, contents: Mapping[str, str]
) -> str | None:
    """Return the reason why a result does not match the stored results of the parents any more.

    This happens if a parent was computed again with the same key, but with another content, for
    example on another kind of device.

    Args:
        graph: The graph.
        stage: The stage.
        manifest: Manifest of the stage's result, if there is one.
        contents: Stage id -> content digest of the stored result.

    Returns:
        The reason, or None if the result matches. Also None if this is unknown: the result of a
        parent does not exist any more, or no content digest was recorded.
    """
    made_of = (manifest or {}).get("made_of") or {}
    for parent in stage.parents if made_of else ():
        if graph[parent].step == "ingest":  # the key of `stage` contains image digests
            continue
        before, now = made_of.get(graph[parent].key), contents.get(parent)
        if before and now and before != now:
            return f"made of another content of {parent} ({before[:12]}, and now it is {now[:12]})"
    return None


def why(stage: Stage, previous: Mapping[str, Any] | None) -> str:
    """Return the reason of a miss: the inputs that have changed since an earlier run.

    Args:
        stage: The stage.
        previous: Record of the earlier run of this config, if there is one.
    """
    before = {s["id"]: s for s in previous["stages"]}.get(stage.id) if previous else None
    if before is None:
        return "new"
    if before["key"] == stage.key or run_record.is_provisional(before):
        return NOT_FINISHED
    version = previous.get("key_version", 1) if previous else run_record.KEY_VERSION
    if version != run_record.KEY_VERSION:
        return f"key version {version} -> {run_record.KEY_VERSION}"
    old, new = flatten(before["inputs"]), flatten(stage.inputs)
    changes = [
        f"{k}: {old.get(k, 'absent')!r} -> {new.get(k, 'absent')!r}"
        for k in sorted(old.keys() | new.keys())
        if old.get(k) != new.get(k)
    ]
    if changes:
        more = f" and {len(changes) - 2} more" if len(changes) > 2 else ""
        return "changed " + "; ".join(changes[:2]) + more
    return "an earlier stage changed"


def version_notes(
    lookups: Mapping[str, Lookup], previous: Mapping[str, Any] | None, provenance: Mapping[str, Any]
) -> list[str]:
    """Describe the effect of an upgrade of Accrete or of packages on the results of a run.

    Results with another key version are not found any more. Results computed with other
    versions of the code or of packages stay valid.

    Args:
        lookups: Look-up of each stage.
        previous: Record of an earlier run of this config.
        provenance: Provenance with the versions of this process.
    """
    notes = []
    version = previous.get("key_version", 1) if previous else run_record.KEY_VERSION
    if version != run_record.KEY_VERSION:
        notes.append(
            f"the last run of this name had key version {version}, this code has "
            f"{run_record.KEY_VERSION}: its results are not found under the new keys, and are "
            "computed again"
        )
    manifests = [lookup.manifest for lookup in lookups.values() if lookup.hit and lookup.manifest]
    made_by = [
        _read_versions(manifest["provenance"])
        for manifest in manifests
        if isinstance(manifest.get("provenance"), dict)
    ]
    now = _read_versions(provenance)
    changes: Counter[str] = Counter()
    for versions in made_by:
        for name in sorted(now):
            if versions.get(name) != now[name]:
                before = versions.get(name) or "unknown"
                changes[f"{name} {before} -> {now[name] or 'unknown'}"] += 1
    differing = sum(versions != now for versions in made_by)
    if changes:
        listed = ", ".join(text for text, _ in changes.most_common(MAX_CHANGES))
        if len(changes) > MAX_CHANGES:
            listed += ", ..."
        notes.append(
            f"{differing} of {len(manifests)} valid results were made by other versions "
            f"({listed}); they stay valid: code with other results has another revision, which is "
            "part of the key"
        )
    return notes


def _read_versions(provenance: Mapping[str, Any]) -> dict[str, str]:
    """Return the versions of the packages and the git commit in a provenance, by name."""
    packages = provenance.get("packages")
    versions = {**packages} if isinstance(packages, dict) else {}
    return {**versions, "git commit": str(provenance.get("git_commit", ""))}
