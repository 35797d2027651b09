"""Tests of read errors of shards and of the cache: messages, retries, and no endless waits."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
from counted_bucket import MANY, Bucket
from test_feed import COLOURS, publish
from test_reader import deal_of, fine_runs, read_all, stored_records

from tests.shard_names import shard_name
from workers.data.cache import Cache, LocalFile
from workers.data.reader import (
    BucketReader,
    DiskReader,
    Ranges,
    make_sequential_reader,
    make_shuffled_reader,
)
from workers.data.rows import SampleTable, select
from workers.errors import DamagedArtifact, UserError

FULL = {
    errno.ENOSPC: "No space left on device",
    errno.EDQUOT: "Disk quota exceeded",
}
SHARD = shard_name("train", "red", 1)
IN_RED = 70  # a row in this shard


# ---- shards --------------------------------------------------------------------------------------
@pytest.fixture
def on_disk(tmp_path: Path) -> SampleTable:
    publish(tmp_path / "disk", "colours", MANY, shard_images=60)
    return select(str(tmp_path / "disk"), (COLOURS,), "train", 0.0)


def error_of_reading(samples: SampleTable) -> BaseException:
    """Read one row in a thread that must end in time; return the error."""
    errors: list[BaseException] = []

    def read() -> None:
        try:
            DiskReader(samples).read(IN_RED)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "the read waits for a writer"
    return errors[0]


@pytest.mark.parametrize("kind", ["fifo", "folder", "missing", "dangling link"])
def test_missing_or_irregular_shard_file_is_damage(
    kind: str, on_disk: SampleTable, tmp_path: Path
) -> None:
    path = next(tmp_path.rglob(SHARD))
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "dangling link":
        path.symlink_to(tmp_path / "nowhere")
    error = error_of_reading(on_disk)
    assert isinstance(error, DamagedArtifact)
    assert f"{path} is " in str(error)
    assert str(error).endswith("run the same command again to repeat the ingest")


@pytest.mark.parametrize("refused", ["open", "read"])
def test_unreadable_shard_is_an_error_not_damage(
    refused: str, on_disk: SampleTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Repeating the ingest would hide wrong permissions or a failing disk."""

    def refuse(*_: Any) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    if refused == "open":
        monkeypatch.setattr(os, "open", refuse)  # tests may run as root
    else:
        monkeypatch.setattr(LocalFile, "read_at", refuse)
    error = error_of_reading(on_disk)
    monkeypatch.undo()
    assert type(error) is UserError
    path = next(tmp_path.rglob(SHARD))
    assert str(error) == (
        f"{path} cannot be read (Permission denied); fix its permissions or its disk, "
        "and run the same command again"
    )


def test_shard_with_stale_nfs_handle_is_reopened(
    on_disk: SampleTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An NFS server can report ESTALE after a restart."""
    reader = DiskReader(on_disk)
    record = reader.read(IN_RED)
    file = on_disk.shards[0]._file(SHARD)
    assert isinstance(file, LocalFile)
    stale = {file.fileno()}
    read_at = LocalFile.read_at

    def lost(file: LocalFile, size: int, offset: int) -> bytes:
        if file.fileno() in stale:
            stale.clear()
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return read_at(file, size, offset)

    monkeypatch.setattr(LocalFile, "read_at", lost)
    assert reader.read(IN_RED) == record
    assert not stale


@pytest.mark.parametrize("cached", [True, False])
def test_object_deleted_while_open_is_damage(
    cached: bool, colours: SampleTable, counted_bucket: Bucket, tmp_path: Path
) -> None:
    cache = Cache(str(tmp_path / "cache"), 10**9) if cached else None
    colours.shards[0]._file(SHARD)
    next(counted_bucket.folder.rglob(SHARD)).unlink()
    counted_bucket.refusal_of_reads = (
        "AWS Error NO_SUCH_KEY during GetObject operation: The key is gone."
    )
    with pytest.raises(DamagedArtifact, match=rf"{SHARD} is missing; run the same command"):
        make_shuffled_reader(colours, deal_of(colours), 2, cache).read(IN_RED)
    assert not list(tmp_path.glob("cache/**/*.part"))


@pytest.mark.parametrize("cached", [True, False])
def test_expired_credentials_are_reported(
    cached: bool, colours: SampleTable, counted_bucket: Bucket, tmp_path: Path
) -> None:
    cache = Cache(str(tmp_path / "cache"), 10**9) if cached else None
    made = make_shuffled_reader(colours, deal_of(colours), 2, cache)
    made.read(0)
    counted_bucket.refusal = (
        "AWS Error ACCESS_DENIED during GetObject operation: the token has expired"
    )
    with pytest.raises(UserError) as caught:
        made.read(899)
    assert type(caught.value) is UserError
    text = str(caught.value)
    assert text.startswith("test://bucket/colours/")
    assert "cannot be read (AWS Error ACCESS_DENIED" in text
    assert "credentials" in text


# ---- the cache of the node -----------------------------------------------------------------------
@pytest.mark.parametrize("number", FULL)
@pytest.mark.parametrize("remedy", ["", "keep fewer"])
def test_full_cache_disk_error_names_path_and_helpful_settings(
    remedy: str, number: int, tmp_path: Path
) -> None:
    def full(stream: BinaryIO) -> None:
        raise OSError(number, os.strerror(number))

    cache = Cache(str(tmp_path), 3 << 30)
    with pytest.raises(UserError) as caught:
        cache.open_file("a", 2 << 20, full, remedy)
    text = str(caught.value)
    assert f"the disk of {str(tmp_path)!r} has no room for 2,097,152 bytes more" in text
    assert FULL[number] in text
    assert "lower cluster.cache_gb (3 now)" in text
    assert "another folder in cluster.cache" in text
    assert text.endswith(", or keep fewer") == bool(remedy)


def test_full_disk_error_omits_resident_mb_without_decoded_images(
    colours: SampleTable, counted_bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "truncate", full)
    made = make_sequential_reader(colours, Cache(str(tmp_path / "cache"), 10**9))
    with pytest.raises(UserError, match=r"No space left") as caught:
        made.read(0)
    assert "resident_mb" not in str(caught.value)
    assert not list((tmp_path / "cache").rglob("*.part"))


def test_unreadable_cached_range_is_fetched_again(
    colours: SampleTable,
    counted_bucket: Bucket,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    fine_runs(monkeypatch)
    made = make_sequential_reader(colours, Cache(str(tmp_path / "cache"), 10**9))
    records = stored_records(colours, counted_bucket.folder)
    read_all(made, range(900))
    requests = counted_bucket.requests()
    bad = {path.stat().st_ino for path in (tmp_path / "cache" / "shards").iterdir()}
    read_at = LocalFile.read_at

    def fails(file: LocalFile, size: int, offset: int) -> bytes:
        if os.fstat(file.fileno()).st_ino in bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read_at(file, size, offset)

    held = [open(path, "rb") for path in (tmp_path / "cache" / "shards").iterdir()]  # noqa: SIM115
    monkeypatch.setattr(LocalFile, "read_at", fails)
    assert [made.read(row) for row in range(900)] == records
    for file in held:  # open until now, so that no new file gets the inode of a deleted one
        file.close()
    assert counted_bucket.requests() == 2 * requests, "one more request per range, not per record"
    lines = capfd.readouterr().err
    assert "cannot be read (Input/output error)" in lines
    assert "look after that disk" in lines


def test_cache_on_an_unreadable_disk_is_reported(
    colours: SampleTable, counted_bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    made = make_sequential_reader(colours, Cache(str(tmp_path / "cache"), 10**9))
    made.read(0)
    monkeypatch.setattr(LocalFile, "read_at", fails)
    with pytest.raises(UserError) as caught:
        made.read(1)
    assert "cannot read back the written data (Input/output error)" in str(caught.value)
    assert "name another folder in cluster.cache" in str(caught.value)


def test_evicted_range_is_fetched_once_more(
    colours: SampleTable, counted_bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fine_runs(monkeypatch)
    made = make_sequential_reader(colours, Cache(str(tmp_path / "cache"), 10**9))
    assert isinstance(made, BucketReader)
    records = stored_records(colours, counted_bucket.folder)
    ranges_of_rows = made.ranges.find(np.arange(len(colours)))
    (rows,) = np.nonzero(ranges_of_rows == ranges_of_rows[0])
    assert len(rows) > 5
    made.read(0)
    for path in (tmp_path / "cache" / "shards").iterdir():
        path.unlink()
    counted_bucket.seen.clear()
    assert [made.read(row) for row in rows.tolist()] == [records[row] for row in rows.tolist()]
    assert counted_bucket.requests() == 1


def test_too_small_cache_is_bypassed(
    colours: SampleTable, counted_bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each piece would be evicted before it is read, and fetched again."""
    fine_runs(monkeypatch)
    pieces = Ranges.of_pieces(colours)
    assert len(pieces.starts) > 15
    made = make_sequential_reader(colours, Cache(str(tmp_path / "cache"), 20_000))
    assert isinstance(made, BucketReader)
    records = stored_records(colours, counted_bucket.folder)
    for (row,) in made.ahead(iter(np.arange(900).reshape(-1, 1))):
        while made._num_running:
            time.sleep(0.001)
        assert made.read(row) == records[row]
    assert counted_bucket.requests() == len(pieces.starts)
