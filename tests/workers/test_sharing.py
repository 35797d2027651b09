"""Tests of a storage that two users of a group share, with any umasks.

Each user can read, replace and delete the files of the other.
"""

from __future__ import annotations

import os
import stat
import tempfile
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipeline.graph import builder
from pipeline.graph.store import Store
from workers.storage.artifact import (
    Artifact,
    Attempt,
    delete_dir,
    join,
    make_dirs,
    withdraw,
    write_bytes,
)
from workers.storage.lock import stage_lock


def use(storage: str, name: str) -> None:
    """Use a storage as a run does: check, read, withdraw, write, lock, commit, delete."""
    store = Store(storage)
    store.check_writable()
    for other in ("first", "second"):
        if (artifact := Artifact.open(store.root, other)) is not None:
            assert artifact.read("state") == b"1"
            withdraw(store.root, other)
    write_bytes(join(storage, "runs", "r", "run.json"), name.encode())
    with stage_lock(store.root, "k"):
        attempt = Attempt(store.root, name)
        attempt.write("deep/er/state", b"1")
        attempt.write("state", b"1")
        assert attempt.commit({})
    delete_dir(join(storage, "stages", "old"))
    Attempt(store.root, "old").write("state", b"1")


def as_user(user: int, group: int, mask: int, call: Callable[[], None]) -> str:
    """Run `call()` in a process of another user; return the traceback, or "" without an error.

    The process is forked with all imports done, because that user may be unable to read the files
    of the interpreter.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setgid(group)
            os.setuid(user)
            os.umask(mask)
            call()
        except BaseException:
            os.write(writer, traceback.format_exc().encode()[-4000:])
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as stream:
        output = stream.read().decode()
    os.waitpid(child, 0)
    return output


def umasked(mask: int) -> int:
    return os.umask(mask)


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Any]:
    """Yield a storage for a group, while the umask of this process is strict."""
    storage = tmp_path / "storage"
    storage.mkdir()
    storage.chmod(0o2770)
    before = umasked(0o077)
    yield storage
    umasked(before)


@pytest.fixture
def folder_of_all() -> Iterator[Path]:
    """Yield a folder that every user may enter; pytest's own folders are only for its user."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def modes(storage: Path) -> dict[str, int]:
    return {
        str(path.relative_to(storage)): stat.S_IMODE(path.stat().st_mode)
        for path in storage.rglob("*")
    }


def test_shared_storage_stays_group_writable_for_any_umask(shared: Any) -> None:
    write_bytes(join(str(shared), "runs", "r", "run.json"), b"1")
    attempt = Attempt(str(shared / "stages"), "k")
    attempt.write("deep/er/state", b"1")
    attempt.commit({})
    with stage_lock(str(shared / "stages"), "c"):
        mode_by_path = modes(shared)
    assert {
        "claims/c",
        "runs/r/run.json",
        "stages/k/manifest.json",
        f"stages/k/{attempt.name}/deep/er/state",
    } <= mode_by_path.keys()
    for path, mode in mode_by_path.items():
        expected_mode = 0o2070 if (shared / path).is_dir() else 0o060
        assert mode & expected_mode == expected_mode, path
        assert not mode & 0o007, "others have only the permissions that the umask allows"


def test_private_storage_follows_the_umask(tmp_path: Path) -> None:
    before = umasked(0o027)
    try:
        make_dirs(str(tmp_path / "a" / "b"))
        write_bytes(str(tmp_path / "a" / "b" / "c"), b"1")
    finally:
        umasked(before)
    mode_by_path = modes(tmp_path)
    assert {path: mode_by_path[path] & 0o777 for path in ("a", "a/b", "a/b/c")} == {
        "a": 0o750,
        "a/b": 0o750,
        "a/b/c": 0o640,
    }


@pytest.mark.skipif(os.getuid() != 0, reason="it takes root to be two users")
@pytest.mark.parametrize("masks", [(0o077, 0o022), (0o022, 0o077)])
def test_group_members_can_read_and_replace_each_others_files(
    masks: Any, folder_of_all: Any
) -> None:
    storage = folder_of_all / "storage"
    storage.mkdir()
    os.chown(storage, 12001, 12000)
    storage.chmod(0o2770)
    for user, name, mask in (
        (12001, "first", masks[0]),
        (12002, "second", masks[1]),
        (12001, "third", masks[0]),
    ):
        assert as_user(user, 12000, mask, partial(use, str(storage), name)) == ""
    assert (storage / "runs" / "r" / "run.json").read_text() == "third"
    artifact = Artifact.open(str(storage / "stages"), "third")
    assert artifact is not None
    assert artifact.read("state") == b"1"


@pytest.mark.skipif(os.getuid() != 0, reason="it takes root to be two users")
def test_unshared_storage_gives_other_users_a_remedy(folder_of_all: Any) -> None:
    storage = folder_of_all / "storage"
    storage.mkdir()
    os.chown(storage, 12001, 12000)
    storage.chmod(0o755)
    assert as_user(12001, 12000, 0o022, lambda: use(str(storage), "first")) == ""
    output = as_user(12002, 12000, 0o022, lambda: use(str(storage), "second"))
    assert "UserError: storage" in output
    assert f"chmod -R g+rwX {storage}" in output
    assert "chmod g+s" in output


def test_cache_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = str(tmp_path)
    assert builder.cache_folder("", storage) == f"{storage}/cache"
    (tmp_path / "cache").mkdir()
    assert builder.cache_folder("", storage) == f"{storage}/cache"
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert builder.cache_folder("", storage) == f"{storage}/cache-12345"
