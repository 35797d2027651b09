"""Tests of the cache of a node: complete files, eviction, locks, and permissions."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import tempfile
import threading
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest

from pipeline.graph.builder import cache_folder
from workers.data import cache
from workers.data.cache import CHECKSUM, Blocks, Cache
from workers.errors import DamagedArtifact, UserError


def written(data: bytes) -> Any:
    def write(stream: BinaryIO) -> None:
        stream.write(data)

    return write


def keep(cache: Cache, name: str, size: int = 100) -> None:
    cache.open_file(name, size, written(b"x" * size)).close()


def names(cache: Cache) -> set[str]:
    return {
        path.name
        for path in Path(cache.folder).rglob("*")
        if path.is_file() and path.suffix != ".lock"
    }


def test_least_recently_used_files_are_evicted(tmp_path: Path) -> None:
    cache = Cache(str(tmp_path), 340)
    for name in (
        "shards/a",
        "shards/b",
        "c.npy",
        "shards/a",
        "shards/d",
    ):  # `a` is used twice, so `b` is the oldest
        keep(cache, name)
    assert names(cache) == {"a", "c.npy", "d"}
    keep(cache, "shards/e", 250)
    assert names(cache) == {"e"}
    keep(cache, "shards/f", 1000)  # larger than the limit
    assert names(cache) == {"f"}


def test_eviction_frees_a_tenth_of_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, looks, look = Cache(str(tmp_path), 10_000), list[int](), Cache._files

    def counted(cache: Cache) -> Any:
        looks.append(1)
        return look(cache)

    monkeypatch.setattr(Cache, "_files", counted)
    for number in range(300):
        keep(cache, f"{number}")
        assert sum(path.stat().st_size for path in tmp_path.glob("*[0-9]")) <= 10_000
    assert len(looks) == 1 + 20, "one listing at the start, and one for every tenth of the limit"
    assert len(names(cache)) > 90
    assert [path.name for path in tmp_path.glob("*.lock")] == ["room.lock"]


@pytest.mark.parametrize("text", ["", "-5", "7", "9" * 30, "\0\0"])
def test_a_wrong_number_of_used_bytes_is_corrected(text: str, tmp_path: Path) -> None:
    keep(Cache(str(tmp_path), 1000), "a")
    (tmp_path / "room.lock").write_text(text)
    cache._swept.discard(str(tmp_path))  # simulate another process
    keep(Cache(str(tmp_path), 1000), "b")
    assert (tmp_path / "room.lock").read_text() == "200"


def test_open_files_are_not_evicted(tmp_path: Path) -> None:
    cache = Cache(str(tmp_path), 100)
    for name in ("b", "c"):  # first made, then found in the cache
        first = cache.open_file("a", 100, written(b"x" * 100))
        keep(cache, name)
        assert names(cache) == {"a", name}
        assert first.read_at(5, 95) == b"xxxxx"
        first.close()
    keep(cache, "d")
    assert names(cache) == {"d"}


def test_truncated_cache_file_is_made_again(
    tmp_path: Path,
) -> None:
    cache = Cache(str(tmp_path), 1000)
    keep(cache, "a", 4)
    keep(cache, "a", 4)
    with cache.open_file("a", 4, written(b"1234")) as stream:
        assert stream.read() == b"xxxx"
    (tmp_path / "a").write_bytes(b"xx")
    with cache.open_file("a", 4, written(b"1234")) as stream:
        assert stream.read() == b"1234"


@pytest.mark.parametrize(
    "error",
    [DamagedArtifact("k", "damaged"), KeyboardInterrupt(), OSError("AWS Error ACCESS_DENIED")],
)
def test_failed_write_leaves_no_file(error: Any, tmp_path: Path) -> None:
    def fails(stream: BinaryIO) -> None:
        stream.write(b"12")
        raise error

    with pytest.raises(type(error)):
        Cache(str(tmp_path), 1000).open_file("a", 4, fails)
    with pytest.raises(OSError, match="2 bytes were made of 4"):
        Cache(str(tmp_path), 1000).open_file("a", 4, written(b"12"))
    assert not names(Cache(str(tmp_path), 1000))


def test_full_disk_error_names_the_cache_setting(tmp_path: Path) -> None:
    def full(stream: BinaryIO) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match=r"has no room for 4 bytes .*No space left.*cluster\.cache"):
        Cache(str(tmp_path), 1000).open_file("a", 4, full)


def dies(folder: str) -> None:
    def write(stream: BinaryIO) -> None:
        stream.write(b"12")
        stream.flush()
        os._exit(9)

    Cache(folder, 1000).open_file("a", 4, write)


def test_partial_files_of_dead_processes_are_deleted(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=dies, args=(str(tmp_path),))
    process.start()
    process.join()
    cache = Cache(str(tmp_path), 1000)
    assert [name.rsplit(".")[-1] for name in names(cache)] == ["part"]
    keep(cache, "a", 4)
    assert names(cache) == {"a"}


def test_one_thread_makes_a_file_while_others_wait(tmp_path: Path) -> None:
    cache, made, begun, go = Cache(str(tmp_path), 1000), [], threading.Event(), threading.Event()

    def write(stream: BinaryIO) -> None:
        made.append(1)
        begun.set()
        go.wait()
        stream.write(b"1234")

    contents: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: contents.append(cache.open_file("a", 4, write).read()))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    begun.wait()
    go.set()
    for thread in threads:
        thread.join()
    assert (contents, made) == ([b"1234"] * 3, [1])


# ---- several processes, and the folder -----------------------------------------------------------
def test_unfinished_cache_file_reserves_room(
    tmp_path: Path,
) -> None:
    cache = Cache(str(tmp_path), 250)
    keep(cache, "old")

    def write(stream: BinaryIO) -> None:
        keep(cache, "second")  # before anything of `first` is written
        assert len(names(cache) - {"second"}) == 1, (
            "`old` is evicted, and the unfinished file of `first` stays"
        )
        stream.write(b"x" * 100)

    cache.open_file("first", 100, write).close()
    assert names(cache) == {"first", "second"}


@pytest.mark.parametrize("end", ["done", "killed"])
def test_waiting_process_takes_over_after_kill(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, waiting = Cache(str(tmp_path), 1000), threading.Event()
    (begun, go), made = [multiprocessing.get_context("fork").Event() for _ in range(2)], []

    def first(stream: BinaryIO) -> None:
        begun.set()
        go.wait()
        stream.write(b"1234")

    def second(stream: BinaryIO) -> None:
        waiting.set()  # the thread did not have to wait
        made.append(1)
        stream.write(b"5678")

    process = multiprocessing.get_context("fork").Process(
        target=cache.open_file, args=("a", 4, first)
    )
    process.start()
    begun.wait()
    flock = fcntl.flock

    def announced(file: Any, how: int) -> None:
        waiting.set()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", announced)
    contents: list[bytes] = []
    thread = threading.Thread(
        target=lambda: contents.append(cache.open_file("a", 4, second).read())
    )
    thread.start()
    waiting.wait()
    go.set() if end == "done" else process.kill()
    thread.join()
    process.join()
    assert (contents, made) == (([b"1234"], []) if end == "done" else ([b"5678"], [1]))
    assert names(cache) == {"a"}, "a killed process leaves no file"


def test_file_deleted_before_use_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, flock, path = Cache(str(tmp_path), 1000), fcntl.flock, tmp_path / "a"
    keep(cache, "a")

    def late(file: Any, how: Any) -> None:
        if how == fcntl.LOCK_SH and path.exists():
            path.unlink()  # as a process does that makes room
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with cache.open_file("a", 100, written(b"y" * 100)) as stream:
        assert stream.read() == b"y" * 100
    assert names(cache) == {"a"}


@pytest.mark.parametrize(
    ("content", "expected"), [("range", ["replace"]), ("images", ["fsync", "replace"])]
)
def test_only_decoded_images_are_synced_to_disk(
    content: str, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a crash, files may contain zeros, which digests detect.

    A lost range costs one request, but lost decoded images are made again one by one.
    """
    calls: list[str] = []

    def recorded(name: str) -> Any:
        function = getattr(os, name)

        def call(*args: Any) -> Any:
            calls.append(name)
            return function(*args)

        return call

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, recorded(name))
    cache = Cache(str(tmp_path), 1000)
    if content == "range":
        keep(cache, "a")
    else:
        images = np.zeros((2, 4), np.uint8)
        size = Blocks.size((2, 4))
        cache.open_file("a", size, lambda stream: Blocks.write(stream, iter(images))).close()
    assert calls == expected


def test_cache_is_private_to_its_user(tmp_path: Path) -> None:
    keep(Cache(str(tmp_path / "cache"), 1000), "shards/a")
    assert [
        oct(os.stat(tmp_path / "cache" / name).st_mode & 0o777) for name in ("shards", "shards/a")
    ] == ["0o700", "0o600"]


def test_cache_gets_its_own_folder_at_every_location(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert (
        cache_folder("~/scratch", "s3://bucket/x")
        == cache_folder("~/scratch", "/storage")
        == "/home/me/scratch/accrete-cache"
    )
    assert cache_folder("", "/storage") == "/storage/cache"
    monkeypatch.setattr(tempfile, "tempdir", "/scratch")
    assert cache_folder("", "s3://bucket/x") == f"/scratch/accrete-cache-{os.getuid()}", (
        "one folder per user, so that nobody deletes files of others"
    )


def test_checksums_equal_those_of_zlib(tmp_path: Path) -> None:
    """A machine without the faster library reads files written with it."""
    data = np.arange(1000, dtype=np.uint8)
    path = tmp_path / "rows"
    with path.open("wb") as stream:
        Blocks.write(stream, iter([data, data[1:]]))
    checksums = np.frombuffer(path.read_bytes()[-2 * CHECKSUM.itemsize :], CHECKSUM)
    assert checksums.tolist() == [zlib.crc32(data.data), zlib.crc32(data[1:].data)]
