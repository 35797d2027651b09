"""Tests of ingest through packs: requests to a bucket, restart after a kill, memory, disk space,
and progress."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.data import packs, shard_writer
from pipeline.data.card_files import load_card_file
from pipeline.data.cards import Card
from pipeline.data.formats import base
from pipeline.data.ingest import ingest
from pipeline.data.known_images import SOURCE
from pipeline.data.selection import _held_out
from pipeline.shell import console
from tests import ingest_sources, s3, small_run
from tests.hostile import costs
from tests.ingest_sources import card_of, make_folder, picture, serial
from workers.data.held_out import hold_out
from workers.errors import UserError
from workers.storage import artifact
from workers.storage.artifact import Artifact, Manifest, list_files

UNIT_BYTES = 2500  # about eight images
NUM_UNITS = 16  # of `make_folder`
NUM_SHARDS = 14


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "MIN_UNIT_BYTES", UNIT_BYTES)


def run(card: Card, root: Path | str, map_fn: Any = serial, **options: Any) -> Manifest:
    return ingest(card, str(root), "k", map_fn, {"step": "ingest"}, **options)


class Counting:
    """A map function that records its jobs.

    units, shards: names of the units and shards, in order. before: called before each job is run,
    with the number of units and shards so far; may kill the process.
    """

    def __init__(self, before: Callable[[int], None] = lambda number: None):
        self.before = before
        self.units: list[str] = []
        self.shards: list[str] = []

    def __call__(self, fn: Any, jobs: Any) -> Any:
        for job in jobs:
            if isinstance(job, packs.UnitJob):
                self.units.append(job.name)
            elif isinstance(job, shard_writer.ShardJob):
                self.shards += [shard.name for shard in job.shards]
            self.before(len(self.units) + len(self.shards))
            yield fn(job)


# ---- requests ------------------------------------------------------------------------------------
@pytest.mark.few("True-1-9")
@pytest.mark.parametrize(("is_small", "of_shard", "others"), [(False, 2, 34), (True, 1, 9)])
def test_ingest_of_digits_makes_few_bucket_requests(
    is_small: bool,
    of_shard: int,
    others: int,
    bucket: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both with packs in the bucket and with packs in a local folder, as for small sources."""
    if not is_small:
        monkeypatch.setattr("pipeline.data.ingest.is_small", lambda *_: False)
    on_disk = run(load_card_file("digits"), tmp_path)
    in_bucket = run(load_card_file("digits"), bucket.uri)
    assert in_bucket["files"] == on_disk["files"]
    num_shards = sum(name.endswith(".tar") for name in on_disk["files"])
    assert num_shards == 20, "one for each digit and split"
    assert num_shards < len(bucket.seen) <= of_shard * num_shards + others, bucket.counts()
    names = list(s3.files(bucket.upstream, bucket.bucket))
    assert not [name for name in names if "packs-" in name], names


def test_a_tar_in_a_bucket_is_read_in_long_ranges(bucket: Any, tmp_path: Path) -> None:
    tars = ingest_sources.make_tars(tmp_path / "tars", make_folder(tmp_path / "images"))
    client = s3.client_of(bucket.upstream)
    for file in tars.iterdir():
        client.put_object(Bucket=bucket.bucket, Key=f"tars/{file.name}", Body=file.read_bytes())
    card = card_of(tars, "tar", source={"splits": {"train": "train-0.tar"}}, test_fraction=0.2)
    source = card.source.model_copy(update={"path": f"s3://{bucket.bucket}/tars"})
    expected = run(card, tmp_path)
    in_bucket = run(card.model_copy(update={"source": source}), bucket.uri)["files"]
    del in_bucket[SOURCE]  # the times of the files differ
    assert in_bucket.items() <= expected["files"].items()
    num_images = expected["counts"]["train"] + expected["counts"]["test"]
    assert num_images > 25
    requests = bucket.counts("train-0.tar")["GET"]
    assert 2 <= requests < 25, "one for all headers, and one or two per unit"


def test_nearby_images_in_a_pack_are_merged_into_one_range() -> None:
    near = [("a", 0, 10), ("a", 20, 10), ("b", 0, 5), ("a", 10, 10)]
    far = [("a", 20 + packs.RANGE_GAP + 11, 5)]
    columns = zip(*near, *far, strict=True)
    rows = pa.table(dict(zip(("pack", "offset", "bytes"), map(list, columns), strict=True)))
    assert list(packs.merge_ranges(rows)) == [
        ("a", 0, 30),
        ("a", far[0][1], far[0][1] + 5),
        ("b", 0, 5),
    ]


def test_pack_stores_images_in_shard_order(tmp_path: Path) -> None:
    """A shard needs one range of each pack, wherever its images were in the source."""
    source = make_folder(tmp_path / "images", train=40)
    card = card_of(source, "folder", source={"splits": {"train": "train"}}, test_fraction=0.3)
    tables: list[pa.Table] = []

    def keeping(fn: Any, jobs: Any) -> Any:
        for job in jobs:
            if isinstance(job, shard_writer.ShardJob):
                tables.extend(shard.rows for shard in job.shards)
            yield fn(job)

    run(card, tmp_path, keeping)
    jumps = 0
    for table in tables:
        for pack in set(table["pack"].to_pylist()):
            rows = [r for r in table.to_pylist() if r["pack"] == pack]
            jumps += sum(np.diff([row["offset"] for row in rows]) < 0)
    assert len(tables) > 15
    assert jumps <= 3  # near the held-out threshold, the order of a pack is a guess


# ---- a kill --------------------------------------------------------------------------------------
def ingest_until(number: int, what: str, card: Card, root: str) -> None:
    """Ingest, and kill this process at unit or shard `number`, or at write `number`.

    what: "write" to count writes, otherwise units and shards are counted.
    """
    base.MIN_UNIT_BYTES = UNIT_BYTES
    replace = os.replace
    calls = 0

    def kill_at(count: int) -> None:
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def replace_or_die(*args: Any) -> None:
        nonlocal calls
        calls += 1
        kill_at(calls)
        replace(*args)

    if what == "write":
        os.replace = replace_or_die  # type: ignore[assignment]
        run(card, root)
    else:
        run(card, root, Counting(kill_at))


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("what", "number"), [("unit", 6), ("write", 2), ("write", 7), ("write", 36), ("write", 51)]
)
def test_restarted_ingest_repeats_only_unfinished_units_and_shards(
    what: str, number: int, tmp_path: Path
) -> None:
    card = card_of(make_folder(tmp_path / "images"), "folder")
    root = tmp_path / "root"
    expected = run(card, tmp_path / "expected")
    process = small_run.processes().Process(
        target=ingest_until, args=(number, what, card, str(root))
    )
    process.start()
    process.join(900)
    assert process.exitcode == -signal.SIGKILL
    left = {path: (root / "k" / path).stat() for path in list_files(str(root / "k"))}
    tables = {Path(path).stem for path in left if path.endswith(packs.TABLE_SUFFIX)}
    shards = [Path(path).name for path in left if path.endswith(".tar")]
    marks = [path for path in left if path.endswith(shard_writer.MARK_SUFFIX)]
    counting = Counting()
    events: list[dict[str, Any]] = []
    manifest = run(card, root, counting, progress=events.append)
    assert manifest["files"] == expected["files"]
    assert not tables & set(counting.units)
    assert len(tables) + len(counting.units) == NUM_UNITS
    assert len(marks) <= len(shards) <= len(marks) + 1
    assert len(counting.shards) == NUM_SHARDS - len(marks)
    for path, before in left.items():
        if path.endswith(".tar") and Path(path).name not in counting.shards:
            assert (root / "k" / path).stat().st_ino == before.st_ino, "written again"
    assert sorted(os.listdir(root / "k")) == sorted([manifest["attempt"], "manifest.json"])
    assert bool(events[0]["images"]) == bool(tables), "progress includes the finished units"


def test_damaged_shards_are_not_reused_by_a_restarted_ingest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill after the manifest is written and before the packs are deleted leaves the marks of all
    shards."""
    card = card_of(make_folder(tmp_path / "images"), "folder")
    monkeypatch.setattr(artifact.Attempt, "_sweep", lambda *_: None)
    monkeypatch.setattr("pipeline.data.ingest.delete_dir", lambda _: None)
    before = run(card, tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(base, "MIN_UNIT_BYTES", UNIT_BYTES)
    shard = next((tmp_path / "k").glob("a-*/train-*-00000.tar"))
    shard.write_bytes(bytes(shard.stat().st_size))
    artifact.withdraw(str(tmp_path), "k")
    counting = Counting()
    after = run(card, tmp_path, counting)
    assert after["files"] == before["files"]
    assert after["attempt"] != before["attempt"]
    assert not counting.units
    assert Artifact.need(str(tmp_path), "k").damage() is None


def test_source_file_changed_after_a_kill_is_read_again(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "images")
    card = card_of(source, "folder")
    stop_in_shards(card, tmp_path)
    file = source / "train" / "dog" / "000.png"
    data = file.read_bytes()
    file.write_bytes(data[:-20] + bytes(20))  # of the same size
    os.utime(file, ns=(1, 1))
    counting = Counting()
    manifest = run(card, tmp_path, counting)
    assert len(counting.units) == NUM_UNITS
    assert manifest["rejected"]["corrupt"] == 4


def stop_in_shards(card: Card, root: Path) -> None:
    """Ingest, and fail when all units are packed and no shard is written."""

    def fail_at_shards(fn: Any, jobs: Any) -> Any:
        for job in jobs:
            if isinstance(job, shard_writer.ShardJob):
                raise KeyboardInterrupt
            yield fn(job)

    with pytest.raises(KeyboardInterrupt):
        run(card, root, fail_at_shards)


def test_damaged_pack_is_reported_and_rebuilt_on_rerun(tmp_path: Path) -> None:
    card = card_of(make_folder(tmp_path / "images"), "folder")
    expected = run(card, tmp_path / "expected")
    stop_in_shards(card, tmp_path)
    pack = next((tmp_path / "k").glob("*/*.pack"))
    data = pack.read_bytes()
    pack.write_bytes(bytes(len(data)))
    with pytest.raises(UserError, match=r"pack does not hold what was put .* same command again"):
        run(card, tmp_path)
    assert run(card, tmp_path)["files"] == expected["files"]


def test_refused_source_leaves_no_files_behind(tmp_path: Path) -> None:
    card = card_of(make_folder(tmp_path / "images"), "folder", max_bad_fraction=0.01)
    with pytest.raises(UserError, match="max_bad_fraction"):
        run(card, tmp_path)
    assert not list_files(str(tmp_path / "k"))


def test_slower_of_two_ingests_uses_the_published_result(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket has no locks, so both drivers write the same files from the packs in the bucket."""
    monkeypatch.setattr("pipeline.data.ingest.SMALL_BYTES", 0)
    card = card_of(make_folder(tmp_path / "images"), "folder")
    results: list[Manifest] = []

    def overtaken(fn: Any, jobs: Any) -> Any:
        for job in jobs:
            if isinstance(job, shard_writer.ShardJob):
                results.append(run(card, bucket.uri))
            yield fn(job)

    results.append(run(card, bucket.uri, overtaken))
    assert results[0]["files"] == results[1]["files"] == run(card, tmp_path)["files"]
    stored = Artifact.need(bucket.uri, "k")
    assert stored.damage() is None
    assert stored.manifest["attempt"] == results[0]["attempt"]


def test_discard_keeps_the_files_of_a_published_attempt(tmp_path: Path) -> None:
    for _ in range(2):
        attempt = artifact.Attempt(str(tmp_path), "k", "a-same")
        attempt.write("a", b"data")
        attempt.commit({})
        attempt.discard()
        assert Artifact.need(str(tmp_path), "k").read("a") == b"data"


# ---- memory, space, time -------------------------------------------------------------------------
@pytest.mark.parametrize("part", [".pack", ".tar"])
def test_full_disk_reports_free_space_and_keeps_finished_packs(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = card_of(make_folder(tmp_path / "images"), "folder")
    write = artifact._write_synced
    writes: list[str] = []

    def full(path: str, data: bytes) -> None:
        writes.append(path)
        if part in path and len(writes) > 5:
            raise OSError(errno.ENOSPC, "No space left on device", path)
        write(path, data)

    monkeypatch.setattr(artifact, "_write_synced", full)
    with pytest.raises(
        UserError,
        match=r"is full \(No space left on device, [\d.]+ GB are free\): .*'tiny'",
    ):
        run(card, tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(base, "MIN_UNIT_BYTES", UNIT_BYTES)
    counting = Counting()
    run(card, tmp_path, counting)
    expected = {".pack": NUM_UNITS - 3, ".tar": 0}
    assert len(counting.units) == expected[part], "units with packs are kept"


def pack_copies(path: str, folder: str) -> str:
    """Pack the tables in the folder `path`. `stop` raises an error with the size of the packs."""
    card = card_of(Path(path), "parquet", max_pixels=10**9)
    manifest = run(card, folder, stop)
    return str(manifest)


def stop(fn: Any, jobs: Any) -> Any:
    for job in jobs:
        if isinstance(job, shard_writer.ShardJob):
            total = sum(size for name, size in list_files(job.packs).items() if "pack" in name)
            raise UserError(f"packs of {total} bytes")
        yield fn(job)


def test_image_repeated_in_a_table_is_packed_only_once(tmp_path: Path) -> None:
    """Otherwise a table of a few kilobytes would become 800 MB."""
    image = picture(1) + bytes(8 << 20)
    (tmp_path / "tables").mkdir()
    for split in ("train", "test"):
        column = pa.DictionaryArray.from_arrays(pa.array([0] * 100, pa.int32()), pa.array([image]))
        labels = pa.array(ingest_sources.CLASSES * 25)
        table = pa.table({"image": column, "label": labels})
        pq.write_table(table, tmp_path / "tables" / f"{split}-0.parquet", compression="zstd")
    outcome, megabytes = costs(pack_copies, str(tmp_path / "tables"), str(tmp_path / "root"))
    assert outcome.startswith("packs of ")
    assert int(outcome.split()[2]) < 3 * len(image)
    assert megabytes < 250


@pytest.mark.parametrize("group_rows", [200, 20])
def test_table_that_expands_beyond_the_size_limit_is_refused(
    group_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one row group, and in many small row groups."""
    monkeypatch.setattr(base, "MAX_UNFOLDED_BYTES", 30 << 20)
    image = picture(1) + bytes(1 << 20)
    (tmp_path / "tables").mkdir()
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 200, pa.int32()), pa.array([image]))
    table = pa.table({"image": column, "label": pa.array(ingest_sources.CLASSES * 50)})
    file = tmp_path / "tables" / "train-0.parquet"
    pq.write_table(table, file, compression="zstd", row_group_size=group_rows)
    assert file.stat().st_size < 300_000
    with pytest.raises(UserError, match=r"unfolds: its images have [34]\d{7} bytes and more"):
        run(card_of(tmp_path / "tables", "parquet"), tmp_path)


# ---- progress ------------------------------------------------------------------------------------
def test_ingest_progress_has_image_counts_and_time_left(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    run(card_of(make_folder(tmp_path / "images"), "folder"), tmp_path, progress=events.append)
    for doing in ("checking images", "writing shards"):
        steps = [event for event in events if event["doing"] == doing]
        images = [event["images"] for event in steps]
        assert images[0] == 0
        assert images == sorted(images)
        assert images[-1] == steps[-1]["of"] > 80
        assert steps[-1]["left_s"] == 0
        assert steps[1]["left_s"] > 0
    text = console.progress_text(
        {"doing": "checking images", "images": 5, "of": 9, "images_per_s": 2.0, "left_s": 2.0}
    )
    assert text == "checking images 5/9 images, 2 images/s, 2.0 s left"


# ---- selection -----------------------------------------------------------------------------------
@pytest.mark.parametrize("fraction", [0.0, 0.03, 0.5, 0.97])
def test_test_split_is_held_out_like_the_validation_split(fraction: float) -> None:
    rng = np.random.default_rng(0)
    labels = [f"class {number}" for number in rng.integers(0, 40, 500).tolist()] + ["alone"]
    keys = [f"{label}/{number}" for number, label in enumerate(labels)]
    # some images are exact copies, including copies of images of another class
    images = [str(number % 300) for number in range(len(keys))]
    table = pa.table({"key": keys, "class": labels, "sha256": images})
    _, expected = hold_out(table, fraction)
    text = pa.large_string()
    columns = {"key": keys, "label": labels, "sha256": images}
    rows = pa.table({name: pa.array(values, text) for name, values in columns.items()})
    is_held_out = _held_out(rows, fraction)
    assert rows.filter(pa.array(is_held_out))["key"].to_pylist() == expected["key"].to_pylist()


def test_units_cover_the_source_within_size_and_count_limits() -> None:
    for sizes in ([], [0] * 10_000, [10**9] * 5, [1000] * 300):
        parts = list(base.unit_slices(sizes))
        rows = [row for part in parts for row in range(len(sizes))[part]]
        assert rows == list(range(len(sizes)))
        assert all(part.stop - part.start <= base.UNIT_ITEMS for part in parts)
    many = json.loads(json.dumps([110_000] * 1_280))
    assert len(list(base.unit_slices(many))) <= 2 * base.UNITS
