"""Create MLflow's SQLite database under a temporary name, and move it into place when complete.

MLflow creates its tables with about a hundred statements, each committed separately. If a process
is killed meanwhile, no later process can complete the database. Such a database is renamed and a
new one is created.
"""

from __future__ import annotations

import fcntl
import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from workers.errors import UserError
from workers.storage import filesystem
from workers.storage.artifact import NO_LINKS, make_dirs, share_file, temporary_name

BESIDE = ("-journal", "-wal", "-shm")  # suffixes of SQLite's files next to a database
SPECIAL = re.compile(r"\?|%(?=[0-9A-Fa-f]{2})")  # characters of a path that a URI must quote


def sqlite_uri(path: Path) -> str:
    """Return SQLAlchemy's URI of the SQLite file at an absolute path.

    Special characters of the path are quoted.
    """
    text = SPECIAL.sub(lambda match: quote(match.group()), str(path))
    # Without a driver name in the URI, MLflow creates a folder with the quoted name. Other paths
    # have the usual URI without a driver name.
    return f"sqlite:///{text}" if text == str(path) else f"sqlite+pysqlite:///{text}"


def sqlite_path(uri: str) -> Path | None:
    """Return the path of a SQLite URI; None for a server and for any other database.

    The result is also None for a database in memory and for a URI with a query.
    """
    if not uri.startswith("sqlite"):
        return None
    from sqlalchemy.engine import make_url

    url = make_url(uri)
    plain = url.database and url.database != ":memory:" and not url.query
    return Path(url.database or "").absolute() if plain else None


def prepare_database(
    path: Path, initialize: Callable[[str], None], latest: Callable[[], str]
) -> None:
    """Create the database if it does not exist or is incomplete.

    Args:
        path: Path of the SQLite file.
        initialize: Function that creates all tables in the database of a URI, and closes it.
        latest: Function that returns the revision of the tables that `initialize` creates.

    Raises:
        UserError: If the file is not a SQLite database.
    """
    if is_whole(path, latest):
        return
    make_dirs(str(path.parent))
    with locked(path.parent):
        if is_whole(path, latest):  # another process created it in the meantime
            return
        if path.exists() and path.stat().st_size:
            aside = path.with_name(
                f"{path.name}.incomplete-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}"
            )
            path.rename(aside)
            filesystem.notify(
                f"{path} was incomplete and without runs, because its process was killed or used "
                f"another version of MLflow; it was renamed to {aside.name}, a new one is created"
            )
        else:
            path.unlink(missing_ok=True)
        _make(path, initialize)


def is_whole(path: Path, latest: Callable[[], str]) -> bool:
    """Return whether a database can be used: it has runs, or all tables in the latest revision.

    A database with runs is never renamed: MLflow itself checks its tables. See `prepare_database`
    for the arguments and errors.
    """
    if not path.exists() or not path.stat().st_size:
        return False
    try:
        with closing(
            sqlite3.connect(f"file:{quote(str(path))}?mode=rw", uri=True, timeout=20)
        ) as database:
            tables = {
                name
                for (name,) in database.execute(
                    "SELECT name FROM sqlite_master WHERE type = 'table'"
                )
            }
            if "runs" in tables and database.execute("SELECT 1 FROM runs LIMIT 1").fetchone():
                return True
            if "alembic_version" not in tables:
                return False
            versions = database.execute("SELECT version_num FROM alembic_version").fetchall()
            return versions == [(latest(),)]
    except sqlite3.OperationalError as error:
        if os.access(path, os.W_OK) or not os.access(path, os.R_OK):
            raise
        del error
        return True  # the database is read-only here, so nothing is repaired
    except sqlite3.DatabaseError as error:
        raise UserError(
            f"{path} is not a SQLite database ({error}); move it away and run the same "
            "command again"
        ) from None


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Context manager that locks a folder. The lock also ends with the process.

    On a file system without locks, the folder is not locked.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _make(path: Path, initialize: Callable[[str], None]) -> None:
    part = path.with_name(f"{path.name}.{temporary_name()}.part")
    try:
        initialize(sqlite_uri(part))
        share_file(str(part))
        with open(part, "rb") as stream:
            os.fsync(stream.fileno())
        try:
            os.link(part, path)
        except FileExistsError:  # another process was faster
            pass
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            os.replace(part, path)
    finally:
        for suffix in ("", *BESIDE):
            part.with_name(part.name + suffix).unlink(missing_ok=True)
