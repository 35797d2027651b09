"""Find and delete results that no run record and no search needs."""

from __future__ import annotations

import math
import time
from collections.abc import Collection

from pipeline.graph.store import Garbage, Store
from pipeline.results.trials import collect_search_keys
from workers.errors import UserError
from workers.storage.artifact import READ_ONLY, delete_dir, join
from workers.storage.lock import stage_lock


def find_garbage(
    store: Store,
    changed: Collection[str] = (),
    older_than_s: float = 0.0,
    keep_bytes: float = 0.0,
) -> list[Garbage]:
    """Return the folders of the storage that no run record and no search needs, sorted by path.

    Args:
        store: The store.
        changed: Names of runs with a changed config. The records of their earlier configs are
            ignored, so results that only these records need are included.
        older_than_s: Include only folders last written at least this many seconds ago.
            0: all.
        keep_bytes: Leave out the newest folders, up to this total size in bytes.

    Raises:
        UserError: If the storage does not exist, a record cannot be read, or a limit is negative or
            not finite.
    """
    for kind, limit in (("age", older_than_s), ("size", keep_bytes)):
        if not math.isfinite(limit) or limit < 0:
            raise UserError(
                f"the {kind} limit of garbage is {limit}; it must be a finite number of at least 0"
            )
    store.check_exists()
    garbage = store.garbage(collect_search_keys(store.storage), changed)
    newest_first = sorted(garbage, key=lambda folder: folder.written, reverse=True)
    written_before = time.time() - older_than_s
    size_bytes = 0
    chosen = []
    for folder in newest_first:
        size_bytes += folder.size_bytes
        is_old = not older_than_s or folder.written <= written_before
        if is_old and size_bytes > keep_bytes:
            chosen.append(folder)
    return sorted(chosen)


def delete_garbage(
    store: Store, paths: list[str], changed: Collection[str] = ()
) -> tuple[list[str], list[str]]:
    """Delete the folders in `paths` that are still garbage.

    Args:
        store: The store.
        paths: Paths of the folders, relative to the storage.
        changed: Names of runs, as in `find_garbage`. The records of their earlier configs are
            deleted too, except records that need a result that was not deleted.

    Returns:
        Two lists of paths that were not deleted: folders that are no longer garbage or no longer
        exist, and folders that another process has locked.

    Raises:
        UserError: If the storage is read-only or does not exist, or a record cannot be read.
    """
    try:
        return _delete_garbage(store, paths, changed)
    except OSError as error:
        if error.errno not in READ_ONLY:
            raise
        raise UserError(
            f"storage {store.storage!r} is read-only here ({error.strerror or error}); run gc as a "
            "user and on a machine with write access to it"
        ) from None


def _delete_garbage(
    store: Store, paths: list[str], changed: Collection[str]
) -> tuple[list[str], list[str]]:
    """Delete garbage while the lock of `gc` is held. See `delete_garbage`."""
    needed_again: list[str] = []
    busy: list[str] = []
    with store.hold_gc_lock():
        remaining_paths = {folder.path for folder in find_garbage(store, changed)}
        for path in paths:
            if path not in remaining_paths:
                needed_again.append(path)
                continue
            key = path.split("/")[1]  # a path is AREA/KEY or stages/KEY/ATTEMPT
            try:
                with stage_lock(store.root, key, wait=False):
                    delete_dir(join(store.storage, path))
                remaining_paths.remove(path)
            except BlockingIOError:
                busy.append(path)
        if changed:
            store.forget_earlier({path.split("/")[1] for path in remaining_paths}, changed)
    return needed_again, busy
