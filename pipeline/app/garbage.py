"""Garbage collection: results that no named run and no search needs."""

from __future__ import annotations

import math
import time
from collections.abc import Collection

from pipeline.graph.store import Garbage, Store
from pipeline.results.trials import keys_of_searches
from workers.errors import UserError
from workers.storage.artifact import READ_ONLY, delete_dir, join
from workers.storage.lock import stage_lock


def find_garbage(
    store: Store,
    changed: Collection[str] = (),
    older_than_s: float = 0.0,
    keep_bytes: float = 0.0,
) -> list[Garbage]:
    """Return folders of the storage that no named run and no search needs, by path.

    Args:
        store: The store.
        changed: Names of runs with earlier records; include results that only these need.
        older_than_s: Include only older folders, in seconds.
        keep_bytes: Keep the newest folders up to this size.

    Raises:
        UserError: If the storage does not exist, a record cannot be read, or a limit is negative or
            not finite.
    """
    for kind, limit in (("age", older_than_s), ("size", keep_bytes)):
        if not math.isfinite(limit) or limit < 0:
            raise UserError(
                f"the limit on the {kind} of garbage is {limit}; give a finite number of at least 0"
            )
    store.check_exists()
    garbage = store.garbage(keys_of_searches(store.storage), changed)
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
        paths: The folders.
        changed: Names of runs; also delete their earlier records if none of their results is left.

    Returns:
        The paths that a run needs by now, and those that a process is computing.

    Raises:
        UserError: If the storage is read-only.
    """
    try:
        return _delete_garbage(store, paths, changed)
    except OSError as error:
        if error.errno not in READ_ONLY:
            raise
        raise UserError(
            f"storage {store.storage!r} may only be read here ({error.strerror or error}), and gc "
            "deletes from it; run gc as a user, and on a machine, that may write there"
        ) from None


def _delete_garbage(
    store: Store, paths: list[str], changed: Collection[str]
) -> tuple[list[str], list[str]]:
    needed_again: list[str] = []
    busy: list[str] = []
    with store.claimed_by_gc():
        remaining_paths = {folder.path for folder in find_garbage(store, changed)}
        for path in paths:
            if path not in remaining_paths:
                needed_again.append(path)
                continue
            try:
                with stage_lock(store.root, path.split("/")[1], wait=False):
                    delete_dir(join(store.storage, path))
                remaining_paths.remove(path)
            except BlockingIOError:
                busy.append(path)
        if changed:
            store.forget_earlier({path.split("/")[1] for path in remaining_paths}, changed)
    return needed_again, busy
