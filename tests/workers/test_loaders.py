"""Tests of loader processes: they produce the same bits as threads, and exit cleanly."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from counted_bucket import URI, Bucket
from test_feed import COLOURS, SHAPES, feed_of, publish, samples
from test_pictures import CROPS, draw_mixed

from workers.data import loaders, sources
from workers.data.augment import Augment
from workers.data.decoding import read_picture
from workers.data.feed import Feed
from workers.data.image_maker import ReadPicture
from workers.data.loaders import LoaderEnded, Loaders, count_cores, count_loaders
from workers.data.pictures import decode_rows
from workers.data.rows import select
from workers.errors import DamagedArtifact


def processes_of(server: int, count: int) -> list[int]:
    """Return the process ids of a server's loaders after it has forked them all."""
    children: list[str] = []
    while len(children) < count:
        children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
        time.sleep(0.01)
    return [int(child) for child in children]


@pytest.fixture(scope="module", autouse=True)
def at_once() -> Iterator[None]:
    """Start loaders with the first image, and make every feed wait for them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loaders, "START_AFTER_S", 0.0)
        find = Loaders.are_ready
        patch.setattr(Loaders, "are_ready", lambda self, timeout: find(self, 60.0))
        yield
        while loaders._shared.loaders:
            loaders._shared.loaders.popitem()[1].close()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    publish(tmp_path, "colours", {"red": 9, "green": 8, "blue": 6}, draw=draw_mixed)
    publish(tmp_path, "shapes", {"disc": 5, "ring": 7}, draw=draw_mixed)
    return tmp_path


@pytest.mark.few(3)
@pytest.mark.parametrize("crop", CROPS)
@pytest.mark.parametrize("kind", ["streamed", "kept", "cached"])
def test_images_do_not_depend_on_number_of_loaders(
    crop: str, kind: str, root: Path, tmp_path: Path
) -> None:
    def epochs(workers: int) -> list[Any]:
        cache = str(tmp_path / f"cache-{workers}") if kind == "cached" else ""
        place = "streamed" if kind == "streamed" else "resident"
        feed = feed_of(
            root, place, tasks=(SHAPES, COLOURS), data=CROPS[crop], cache=cache, workers=workers
        )
        evaluated = feed_of(root, place, training=False, cache=cache, workers=workers)
        images = [batch.images.numpy().tobytes() for batch in evaluated.evaluate(4)]
        return [samples([feed], 0), samples([feed], 1), images]

    expected = epochs(0)
    for workers in (1, 2, 5):
        assert epochs(workers) == expected


@pytest.mark.few(4)
@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize("workers", [0, 2, 5])
@pytest.mark.parametrize("kind", ["streamed", "resident"])
def test_loader_normalisation_equals_normalisation_in_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, workers: int, repeats: int
) -> None:
    """Batches are large enough for chunks with several images in non-ascending order."""
    classes = {"red": 90, "green": 80, "blue": 60}
    publish(tmp_path, "colours", classes, draw=draw_mixed, shard_images=50)
    data = {"crop": "resized", "repeats": repeats, "val_fraction": 0.0}
    with monkeypatch.context() as patch:
        patch.setattr(Augment, "only_crops", False)
        later = [
            samples([feed_of(tmp_path, kind, data=data, batch=64, workers=0)], e) for e in (0, 1)
        ]
    feed = feed_of(tmp_path, kind, data=data, batch=64, workers=workers)
    assert [samples([feed], epoch) for epoch in (0, 1)] == later


def test_cached_features_request_no_images(root: Path) -> None:
    data = {"crop": "none", "flip": 0.0, "erase": 0.0}
    feed = feed_of(root, "streamed", data=data)
    feed.cache_features(lambda images: images.flatten(1))
    assert len(list(feed.epoch(0))) == feed.steps_per_epoch


@pytest.mark.few("inside")
@pytest.mark.parametrize("when", ["before", "inside"])
def test_late_reads_of_abandoned_epoch_do_not_corrupt_images(
    counted_bucket: Bucket, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    folder = counted_bucket.folder
    publish(folder, "colours", {"red": 60, "green": 60, "blue": 60}, shard_images=30)
    data = {"crop": "resized"}
    expected = samples([feed_of(folder, "streamed", data=data, batch=16, workers=0)], 1)
    feed = feed_of(URI, "streamed", data=data, batch=16)
    samples([feed], 1)  # afterwards its reader has all bytes
    reader = feed.source.pictures.reader
    read = type(reader).read
    is_over = threading.Event()
    late: list[int] = []

    def read_late(self: Any, row: int) -> bytes:
        record: bytes = read(self, row)
        if not is_over.is_set() and len(late) < 40:
            late.append(row)
            is_over.wait(0.5 if when == "before" else 0.05)
        return record

    monkeypatch.setattr(type(reader), "read", read_late)
    with closing(feed.epoch(0)) as epoch:
        next(epoch)
    assert samples([feed], 1) == expected
    is_over.set()
    assert samples([feed], 1) == expected


@pytest.mark.few(2)
@pytest.mark.parametrize("limit", ["blocks", "loaders"])
def test_threads_replace_loaders_when_system_refuses_memory(
    root: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    feed = feed_of(root, "streamed", data={"crop": "resized"}, workers=6)
    expected = samples([feed_of(root, "streamed", data={"crop": "resized"}, workers=0)])

    def refuse(*arguments: Any) -> None:
        raise OSError(24, "Too many open files")

    if limit == "blocks":
        monkeypatch.setattr(Loaders, "_make_block", refuse)
    else:
        monkeypatch.setattr(loaders, "Loaders", refuse)
    assert samples([feed]) == expected


def test_forked_child_does_not_use_loaders_of_parent(root: Path) -> None:
    feed = feed_of(root, "streamed", data={"crop": "resized"}, workers=2)
    expected = samples([feed])
    child = os.fork()
    if not child:  # the child must not continue with the tests
        status = 1
        try:
            other = feed_of(root, "streamed", data={"crop": "resized"}, workers=2)
            status = 0 if samples([other]) == expected else 2
        finally:
            os._exit(status)
    assert samples([feed]) == expected
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert samples([feed]) == expected


def test_threads_make_no_images_while_loaders_work(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_here = []
    make = sources.PictureSource._make

    def note(*args: Any) -> None:
        made_here.append(args)
        make(*args)

    monkeypatch.setattr(sources.PictureSource, "_make", note)
    for kind in ("streamed", "resident"):
        for repeats in (1, 3):
            data = {"crop": "resized", "repeats": repeats}
            feed = feed_of(root, kind, data=data, batch=16, workers=5)
            assert len(list(feed.epoch(0))) == feed.steps_per_epoch
    assert not made_here
    list(feed_of(root, "streamed", data={"crop": "resized"}, workers=0).epoch(0))
    assert made_here


def test_loaders_make_images_of_bucket(counted_bucket: Bucket) -> None:
    folder = counted_bucket.folder
    publish(folder, "colours", {"red": 9, "green": 8, "blue": 6}, draw=draw_mixed)
    for data in ({"crop": "resized", "repeats": 2}, {"crop": "none", "flip": 0.0}):
        expected = samples([feed_of(folder, "streamed", data=data, workers=0)])
        assert samples([feed_of(URI, "streamed", data=data)]) == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_decoded_rows_equal_direct_decoding(root: Path, workers: int) -> None:
    table = select(str(root), (COLOURS, SHAPES), "train", 0.0)
    decoded = decode_rows(table, workers, None, ReadPicture(30))
    for row, picture in enumerate(decoded):
        expected = read_picture(table.read_bytes(row), 30)
        assert picture[1:] == expected[1:]
        assert np.array_equal(picture.pixels, expected.pixels)
    assert row == len(table) - 1


def test_failed_images_are_made_by_rank_or_reported(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = feed_of(root, "streamed", data={"crop": "resized"})
    expected = samples([feed])
    spec = feed.source.pictures.spec()
    moved = spec._replace(files=tuple(f"{path}.gone" for path in spec.files))
    notes: list[str] = []
    monkeypatch.setattr("workers.storage.filesystem.notify", notes.append)
    with monkeypatch.context() as patch:
        patch.setattr(type(feed.source.pictures), "spec", lambda self: moved)
        assert samples([feed_of(root, "streamed", data={"crop": "resized"})]) == expected
    (note,) = notes
    assert re.match(r"the loader processes failed to make \d+ images of a step; ", note)
    (shard,) = {shards.local_path(name) for shards, name in feed.samples.locations.files[:1]}
    data = bytearray(Path(shard).read_bytes())
    offset = int(feed.samples.locations.offsets[0])
    data[offset + 20] ^= 1
    Path(shard).write_bytes(data)
    with pytest.raises(DamagedArtifact, match="its bytes are not those that ingest wrote"):
        samples([feed])


def test_abandoned_epochs_do_not_affect_later_epochs(root: Path) -> None:
    feed = feed_of(root, "streamed", data={"crop": "resized"})
    expected = samples([feed], 3)
    for _ in range(20):
        with closing(feed.epoch(0)) as epoch:
            list(islice(epoch, 1))
    assert samples([feed], 3) == expected


def test_blocks_are_reused(root: Path) -> None:
    feed = feed_of(root, "streamed", data={"crop": "resized"}, workers=2)
    samples([feed])
    made = loaders._shared.loaders[2]
    num_pages = made._num_pages
    for epoch in range(5):
        samples([feed], epoch)
    assert made._num_pages <= 2 * num_pages


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "turn", [0, *(pytest.param(turn, marks=pytest.mark.slow) for turn in range(1, 10))]
)
def test_killed_loader_is_reported_and_replaced(root: Path, turn: int) -> None:
    feed = feed_of(root, "streamed", data={"crop": "resized"}, workers=3)
    expected = samples([feed])
    made = loaders._shared.loaders[3]
    server = made._server
    victims = processes_of(server.pid, 3)
    os.kill(victims[turn % 3], signal.SIGKILL)
    with pytest.raises(LoaderEnded, match=r"by signal SIGKILL; .* to fewer than 3, or to 0"):
        train_on(feed)
    assert samples([feed]) == expected
    assert loaders._shared.loaders[3] is not made
    del made
    wait_until_gone([server.pid, *victims])


@pytest.mark.parametrize(("number", "name"), [(signal.SIGKILL, "SIGKILL"), (35, "35")])
def test_killed_server_is_reported(root: Path, number: int, name: str) -> None:
    feed = feed_of(root, "streamed", data={"crop": "resized"}, workers=4)
    samples([feed])
    made = loaders._shared.loaders[4]
    children = processes_of(made._server.pid, 4)
    for pid in (made._server.pid, *children):
        os.kill(pid, number)
    with pytest.raises(LoaderEnded, match=f"by signal {name};"):
        samples([feed])
    wait_until_gone(children)


def train_on(feed: Feed) -> None:
    """Read epochs until something fails."""
    for epoch in range(1000):
        samples([feed], epoch)


TRAINER = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[1:3]
from test_feed import feed_of
from workers.data import loaders
loaders.START_AFTER_S = 0.0
feed = feed_of(Path(sys.argv[3]), "streamed", data={"crop": "resized"}, workers=2)
epoch = 0
while True:
    for step, _ in enumerate(feed.epoch(epoch)):
        made = loaders._shared.loaders.get(2)
        if made is not None and made.are_ready() and epoch > 1:
            print(made._server.pid, flush=True)
    epoch += 1
"""


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        *(pytest.param(signal.SIGKILL, marks=pytest.mark.slow) for _ in range(9)),
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_loaders_exit_with_killed_trainer(root: Path, number: signal.Signals) -> None:
    here = Path(__file__).parent
    command = [sys.executable, "-c", TRAINER, str(here), str(here.parent), str(root)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as trainer:
        try:
            assert trainer.stdout is not None
            server = int(trainer.stdout.readline())
            children = [server, *processes_of(server, 2)]
            # Python drops a KeyboardInterrupt that comes while a finalizer runs
            for _ in range(10):
                os.killpg(trainer.pid, number)  # as a terminal or a scheduler does
                with suppress(subprocess.TimeoutExpired):
                    trainer.communicate(timeout=20)
                    break
        finally:
            trainer.kill()
    assert trainer.returncode != 0
    wait_until_gone(children)


def wait_until_gone(pids: list[int]) -> None:
    """Wait until none of the processes is alive."""
    deadline = time.monotonic() + 900
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, [pid for pid in pids if is_alive(pid)]
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Return whether a process runs. A zombie does not run."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return re.sub(r".*\) ", "", status)[0] not in "ZX"


def test_small_jobs_start_no_loaders(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaders, "START_AFTER_S", 1000.0)
    feed = feed_of(root, "streamed", data={"crop": "resized"}, workers=7)
    samples([feed])
    assert 7 not in loaders._shared.loaders
    assert loaders._shared.seconds > 0


def test_auto_uses_cores_of_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert count_loaders(3, 8) == 3
    assert count_loaders(0) == 0
    assert [count_loaders("auto", cores) for cores in (0, 1, 4)] == [2, 2, 4]
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr(loaders, "CPU_QUOTA", quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    for text, expected in (("", 16), ("max 100000\n", 16), ("950000 100000\n", 10)):
        quota.write_text(text)
        count_cores.cache_clear()
        assert count_loaders("auto") == expected
    count_cores.cache_clear()


@pytest.mark.parametrize("size", [1, 3, 8, 100])
def test_chunks_keep_copies_together(size: int) -> None:
    rows = np.array([7, 7, 3, 9, 9, 9, 1, 4, 4, 2])
    borders = sources.cut_chunks(rows, size).tolist()
    assert borders[0] == 0
    assert borders[-1] == len(rows)
    assert borders == sorted(set(borders))
    assert all(rows[border] != rows[border - 1] for border in borders[1:-1])
    assert max(np.diff(borders)) <= max(size + 2, 3)
    if size == 1:
        assert len(borders) - 1 == 6


def test_number_of_chunks_is_limited() -> None:
    rows = np.arange(100_000)
    borders = sources.cut_chunks(rows, 16)
    assert len(borders) - 1 <= sources.MAX_CHUNKS
