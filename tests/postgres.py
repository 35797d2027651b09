"""A local PostgreSQL server from Debian's package, with a password."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.tracking import ui

USER, PASSWORD = "accrete", "thispasswordmustnotappearanywhere"
ACCOUNT = "postgres"  # system user, because PostgreSQL does not run as root


def programs() -> Path | None:
    """Return the folder of PostgreSQL's programs, or None if it is not installed."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    return folders[-1].parent if folders else None


def why_missing() -> str:
    """Return the reason why PostgreSQL cannot run on this machine, or ""."""
    if programs() is None:
        return "PostgreSQL missing: install postgresql"
    if importlib.util.find_spec("psycopg") is None:
        return "psycopg missing: install `.[postgres]`"
    try:
        subprocess.run(["true"], check=True, user=account())
    except (OSError, KeyError) as error:
        return f"PostgreSQL does not run as root, and another user cannot be had ({error})"
    return ""


def account() -> int | None:
    """Return the user id for PostgreSQL's processes; None for the user of this process."""
    return pwd.getpwnam(ACCOUNT).pw_uid if os.geteuid() == 0 else None


@dataclass
class Postgres:
    """A server on 127.0.0.1 with its data in a folder; tests stop and restart it."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def uri(self) -> str:
        """The URI of the only database, with the password."""
        return f"postgresql://{USER}:{PASSWORD}@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        address = ["-h", "127.0.0.1", "-p", str(self.port)]
        with open(self.folder / "log.txt", "ab") as log:
            self.process = subprocess.Popen(
                [self._program("postgres"), "-D", self.folder / "data", *address, "-k", "", "-F"],
                stdout=log,
                stderr=log,
                user=account(),
            )
        deadline = time.monotonic() + 900
        while subprocess.run([self._program("pg_isready"), "-q", *address], check=False).returncode:
            assert self.process.poll() is None, (self.folder / "log.txt").read_text()
            assert time.monotonic() < deadline, (self.folder / "log.txt").read_text()
            time.sleep(0.05)

    def stop(self) -> None:
        """Send SIGQUIT: the server drops all connections, and the next start recovers its data."""
        if self.process:
            self.process.send_signal(signal.SIGQUIT)
            self.process.wait(900)
            self.process = None

    def _program(self, name: str) -> Path:
        folder = programs()
        assert folder is not None
        return folder / name

    def _create(self) -> None:
        password = self.folder / "password.txt"
        password.write_text(PASSWORD)
        subprocess.run(
            [
                self._program("initdb"),
                "-D",
                self.folder / "data",
                "--auth=scram-sha-256",
                f"--username={USER}",
                f"--pwfile={password}",
                "--no-sync",
            ],
            check=True,
            stdout=subprocess.DEVNULL,
            user=account(),
        )


@contextlib.contextmanager
def postgres_up() -> Iterator[Postgres]:
    """Context manager that runs a new server with its data in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="postgres-of-a-test-") as folder:
        owner = account()
        if owner is not None:
            os.chown(folder, owner, -1)
        server = Postgres(Path(folder), ui.find_port("127.0.0.1"))
        server._create()
        try:
            server.start()
            yield server
        finally:
            server.stop()
