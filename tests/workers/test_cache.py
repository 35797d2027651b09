"""The cache of a node: shards come once and whole, room is made of what was used longest ago, and
never of what is in use."""

from __future__ import annotations

import fcntl
import hashlib
import multiprocessing
import os
import tempfile
import threading
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from pipeline.data import cards, ingest
from pipeline.graph.builder import cache_folder
from tests import s3, small_run
from tests.s3 import Fault
from workers.data import cache
from workers.data.cache import Cache, CachedFile
from workers.data.shards import Shards
from workers.errors import DamagedArtifact, UserError
from workers.storage import filesystem
from workers.storage.artifact import join, write_bytes


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


def test_what_was_used_longest_ago_makes_room(tmp_path: Path) -> None:
    cache = Cache(str(tmp_path), 300)
    for name in (
        "shards/a",
        "shards/b",
        "c.npy",
        "shards/a",
        "shards/d",
    ):  # `a` twice: `b` is then the oldest
        keep(cache, name)
    assert names(cache) == {"a", "c.npy", "d"}
    keep(cache, "shards/e", 250)
    assert names(cache) == {"e"}
    keep(cache, "shards/f", 1000)  # more than the limit
    assert names(cache) == {"f"}


def test_what_is_in_use_is_not_deleted(tmp_path: Path) -> None:
    cache = Cache(str(tmp_path), 100)
    for name in ("b", "c"):  # when it was just made, and when it was found
        first = cache.open_file("a", 100, written(b"x" * 100))
        keep(cache, name)
        assert names(cache) == {"a", name}
        assert first.read_at(5, 95) == b"xxxxx"
        first.close()
    keep(cache, "d")
    assert names(cache) == {"d"}


def test_a_file_that_is_cut_short_is_made_again_and_one_that_is_whole_is_not(
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
def test_what_could_not_be_made_leaves_nothing(error: Any, tmp_path: Path) -> None:
    def fails(stream: BinaryIO) -> None:
        stream.write(b"12")
        raise error

    with pytest.raises(type(error)):
        Cache(str(tmp_path), 1000).open_file("a", 4, fails)
    with pytest.raises(OSError, match="2 bytes were made of 4"):
        Cache(str(tmp_path), 1000).open_file("a", 4, written(b"12"))
    assert not names(Cache(str(tmp_path), 1000))


def test_a_disk_that_keeps_nothing_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = hashlib.sha256(b"1234").hexdigest()
    with Cache(str(tmp_path), 1000).open_file("a", 4, written(b"1234"), right) as stream:
        assert stream.read() == b"1234", "it is read from its start"
    monkeypatch.setattr(cache, "_checked", set())
    monkeypatch.setattr(CachedFile, "read_at", lambda file, size, offset: b"5678"[offset:])
    with pytest.raises(
        UserError, match=r"gives back other bytes .*; name another folder in cluster\.cache"
    ):
        Cache(str(tmp_path), 1000).open_file("a", 4, written(b"1234"), right)


def test_a_file_is_checked_once_in_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = hashlib.sha256(b"1234").hexdigest()
    offsets: list[int] = []
    read_at = CachedFile.read_at

    def recorded(file: CachedFile, size: int, offset: int) -> bytes:
        offsets.append(offset)
        return read_at(file, size, offset)

    monkeypatch.setattr(CachedFile, "read_at", recorded)
    for _ in range(3):
        Cache(str(tmp_path), 1000).open_file("a", 4, written(b"1234"), right).close()
    assert len(offsets) == 2, "the bytes, and the end"


def test_a_full_disk_is_a_sentence(tmp_path: Path) -> None:
    def full(stream: BinaryIO) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match=r"cannot be kept in .*No space left.*cluster\.cache"):
        Cache(str(tmp_path), 1000).open_file("a", 4, full)


def dies(folder: str) -> None:
    def write(stream: BinaryIO) -> None:
        stream.write(b"12")
        stream.flush()
        os._exit(9)

    Cache(folder, 1000).open_file("a", 4, write)


def test_what_a_process_left_behind_that_died_is_deleted(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=dies, args=(str(tmp_path),))
    process.start()
    process.join()
    cache = Cache(str(tmp_path), 1000)
    assert [name.rsplit(".")[-1] for name in names(cache)] == ["part"]
    keep(cache, "a", 4)
    assert names(cache) == {"a"}


def test_of_several_one_makes_it_and_the_others_wait(tmp_path: Path) -> None:
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


# ---- between processes, and what is promised of the folder ---------------------------------------
def test_what_is_being_made_takes_its_room_from_the_start_and_is_not_deleted(
    tmp_path: Path,
) -> None:
    cache = Cache(str(tmp_path), 250)
    keep(cache, "old")

    def write(stream: BinaryIO) -> None:
        keep(cache, "second")  # while nothing of the first is written
        assert len(names(cache) - {"second"}) == 1, (
            "`old` made room, and the part that somebody writes stays"
        )
        stream.write(b"x" * 100)

    cache.open_file("first", 100, write).close()
    assert names(cache) == {"first", "second"}


@pytest.mark.parametrize("end", ["done", "killed"])
def test_another_process_waits_for_the_one_that_makes_it_and_takes_over_where_that_is_killed(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, waiting = Cache(str(tmp_path), 1000), threading.Event()
    (begun, go), made = [multiprocessing.get_context("fork").Event() for _ in range(2)], []

    def first(stream: BinaryIO) -> None:
        begun.set()
        go.wait()
        stream.write(b"1234")

    def second(stream: BinaryIO) -> None:
        waiting.set()  # it does not wait
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
    assert names(cache) == {"a"}, "and nothing is left of who was killed"


def test_a_file_that_is_deleted_between_finding_and_using_it_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, flock, path = Cache(str(tmp_path), 1000), fcntl.flock, tmp_path / "a"
    keep(cache, "a")

    def late(file: Any, how: Any) -> None:
        if how == fcntl.LOCK_SH and path.exists():
            path.unlink()  # by a process that makes room
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with cache.open_file("a", 100, written(b"y" * 100)) as stream:
        assert stream.read() == b"y" * 100
    assert names(cache) == {"a"}


def test_a_file_has_its_name_only_when_its_bytes_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def recorded(name: str) -> Any:
        function = getattr(os, name)

        def call(*args: Any) -> Any:
            calls.append(name)
            return function(*args)

        return call

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, recorded(name))
    keep(Cache(str(tmp_path), 1000), "a")
    assert calls == ["fsync", "replace"], (
        "its size was set before, so that after a machine went down nothing else tells that it "
        "is whole"
    )


def test_nobody_else_reads_what_is_kept(tmp_path: Path) -> None:
    keep(Cache(str(tmp_path / "cache"), 1000), "shards/a")
    assert [
        oct(os.stat(tmp_path / "cache" / name).st_mode & 0o777) for name in ("shards", "shards/a")
    ] == ["0o700", "0o600"]


def test_a_cache_has_a_folder_of_its_own_wherever_it_is_put(
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
        "of each user: nobody deletes what is another's"
    )


# ---- shards on an object store -------------------------------------------------------------------
@pytest.fixture
def shards(bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shards:
    """40 images in shards of 15, and a cache."""
    monkeypatch.setattr(filesystem, "FIRST_S", 0.01)
    monkeypatch.setattr(filesystem, "TRIES", 1)
    card = small_run.make_card(tmp_path, "a", "01", train=20, test=1, shard_images=15)
    ingest.ingest(cards.load(card), bucket.uri, "data", map, {})
    return Shards.open(bucket.uri, "data", Cache(str(tmp_path / "cache"), 10**9))


def read_all(shards: Shards) -> list[bytes]:
    rows = shards.select("train", "01").to_pylist()
    return [
        shards.verify(r["key"], shards.read(r["shard"], r["offset"], r["bytes"]), r["sha256"])
        for r in rows
    ]


def tars(shards: Shards) -> list[str]:
    return sorted({name for name in shards.index["shard"].to_pylist() if name.startswith("train")})


def test_a_shard_is_fetched_once_and_never_image_by_image(shards: Any, bucket: Any) -> None:
    bucket.seen.clear()
    assert len(read_all(shards)) == 40
    assert bucket.counts(".tar") == {"HEAD": 3, "GET": 3}
    again = Shards.open(bucket.uri, "data", shards.cache)
    assert len(read_all(again)) == len(list(again.stream(tars(again), seed=1))) == 40
    assert bucket.counts(".tar") == {"HEAD": 3, "GET": 3}


def test_without_room_shards_come_again_and_the_images_are_the_same(
    shards: Any, bucket: Any
) -> None:
    expected = read_all(shards)
    tight = Shards.open(bucket.uri, "data", Cache(shards.cache.folder + "-2", 1))
    assert read_all(tight) == expected
    assert sorted(image for _, image in tight.stream(tars(tight))) == sorted(expected)


@pytest.mark.parametrize("kind", ["503", "cut download", "done, unsaid"])
def test_a_shard_arrives_through_errors_that_pass(kind: str, shards: Any, bucket: Any) -> None:
    bucket.faults[:] = [Fault(kind, "GET", ".tar", times=2)]
    assert len(read_all(shards)) == 40
    assert bucket.faults[0].times == 0


@pytest.mark.parametrize("location", ["storage", "cache"])
def test_a_damaged_shard_is_damage_and_one_that_only_the_cache_has_heals(
    location: str, shards: Any, bucket: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = read_all(shards)
    names = {name: info["sha256"] for name, info in shards.artifact.manifest["files"].items()}
    path = Path(shards.cache.folder, "shards", names["train-00001.tar"])
    data = bytearray(path.read_bytes())
    data[data.find(b"IDAT") + 9] ^= 1
    if location == "cache":
        path.write_bytes(data)
        assert read_all(shards) == expected, "also while the shard is open"
        assert capfd.readouterr().err.count("its shard is fetched again") == 1
        assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name
    else:
        shards.cache.forget(f"shards/{names['train-00001.tar']}")
        write_bytes(shards.uri("train-00001.tar"), bytes(data))
        again = Shards.open(bucket.uri, "data", shards.cache)
        for _ in range(2):
            with pytest.raises(DamagedArtifact, match=r"train-00001\.tar is not what ingest wrote"):
                read_all(again)
        assert not path.exists()


@pytest.mark.parametrize("at", [0, 5, 520, -3])  # of a header, of an image, of what nobody reads
def test_a_flipped_bit_in_a_kept_shard_is_found_when_a_process_first_reads_it(
    at: int,
    shards: Any,
    bucket: Any,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    expected = list(shards.stream(tars(shards)))
    monkeypatch.setattr(cache, "_checked", set())  # as in another process
    for path in Path(shards.cache.folder, "shards").iterdir():
        if path.suffix != ".lock":
            data = bytearray(path.read_bytes())
            data[at] ^= 1
            path.write_bytes(data)
    bucket.seen.clear()
    again = Shards.open(bucket.uri, "data", shards.cache)
    assert list(again.stream(tars(again))) == expected
    assert bucket.counts(".tar")["GET"] == 3
    assert capfd.readouterr().err.count("is not what was written there, and is made again") == 3
    assert list(Shards.open(bucket.uri, "data", shards.cache).stream(tars(again))) == expected
    assert not capfd.readouterr().err


def test_a_shard_that_is_gone_is_damage(shards: Any, bucket: Any) -> None:
    s3.client_of(bucket.upstream).delete_object(
        Bucket=bucket.bucket, Key=join("storage", *shards.uri("train-00000.tar").split("/")[4:])
    )
    for read in (read_all, lambda shards: list(shards.stream(tars(shards)))):
        with pytest.raises(DamagedArtifact, match=r"train-00000\.tar is missing"):
            read(shards)
