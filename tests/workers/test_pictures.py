"""Tests of kept pictures: samples equal streamed ones to the bit, also after damage on the disk."""

from __future__ import annotations

import gc
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from test_feed import COLOURS, SHAPES, encoded, feed_of, publish, samples

from workers.data import image_maker, pictures, sources
from workers.data.arena import Arena
from workers.data.cache import Blocks, Cache
from workers.data.decoding import read_picture
from workers.data.feed import PREFETCH_THREADS, Feed
from workers.data.image_maker import ImageMaker
from workers.data.pictures import KeptPictures, are_small
from workers.data.rows import SampleTable, select
from workers.data.sources import PictureSource, split_chunks
from workers.errors import UserError
from workers.job import Interpolation

FORMS = ("JPEG", "PNG", "WEBP")
LONGEST = 24  # three times the input side in these tests


def draw_mixed(record: str) -> bytes:
    """Return an image with sides, format and pixels derived from the record name; some are long."""
    generator = np.random.default_rng([*record.encode()])
    height, width = generator.integers(3, 70, 2).tolist()
    noise = generator.integers(0, 256, (height, width, 3), np.uint8)
    data: bytes = encoded(Image.fromarray(noise), FORMS[int(generator.integers(3))])
    return data


@pytest.fixture
def root(tmp_path: Path) -> Path:
    publish(tmp_path, "colours", {"red": 9, "green": 8, "blue": 6}, draw=draw_mixed)
    publish(tmp_path, "shapes", {"disc": 5, "ring": 7}, draw=draw_mixed)
    return tmp_path


@pytest.fixture
def table(root: Path) -> SampleTable:
    return select(str(root), (COLOURS,), "train", 0.25)


CROPS: dict[str, dict[str, Any]] = {
    "none": {"crop": "none", "flip": 0.0},
    "pad": {"crop": "pad"},
    "resized": {"crop": "resized"},
    "reduced": {"crop": "resized", "longest_side": 11, "crop_scale": (0.08, 1.0)},
    "whole": {"crop": "resized", "longest_side": 500, "flip": 0.0},
    "mixed": {"crop": "resized", "mixup": 0.8, "cutmix": 1.0, "randaugment": 2, "repeats": 2},
}


@pytest.mark.parametrize("crop", CROPS)
@pytest.mark.parametrize("cached", [False, True], ids=["memory", "cache"])
def test_resident_and_streamed_images_give_identical_samples(
    crop: str, cached: bool, root: Path, tmp_path: Path
) -> None:
    tasks = (SHAPES, COLOURS)
    cache = str(tmp_path / "cache") if cached else ""
    streamed = feed_of(root, "streamed", tasks=tasks, data=CROPS[crop])
    resident = feed_of(root, "resident", tasks=tasks, data=CROPS[crop], cache=cache, workers=3)
    for epoch in range(2):
        assert samples([resident], epoch) == samples([streamed], epoch)


@pytest.mark.parametrize("crop", CROPS)
def test_evaluation_does_not_depend_on_storage_or_training_crops(crop: str, root: Path) -> None:
    expected = [b.images for b in feed_of(root, "resident", training=False).evaluate(4)]
    for kind in ("resident", "streamed"):
        feed = feed_of(root, kind, training=False, data=CROPS[crop])
        for batch, images in zip(feed.evaluate(4), expected, strict=True):
            assert torch.equal(batch.images, images)


def test_cached_images_use_the_interpolation_of_the_backbone(root: Path, tmp_path: Path) -> None:
    def images(kind: str, interpolation: Interpolation, cache: str = "") -> list[bytes]:
        feed = feed_of(root, kind, training=False, cache=cache, interpolation=interpolation)
        return [batch.images.numpy().tobytes() for batch in feed.evaluate(4)]

    cache = str(tmp_path / "cache")
    bicubic = images("resident", "bicubic", cache)
    bilinear = images("resident", "bilinear", cache)
    assert bicubic != bilinear
    assert images("resident", "bicubic", cache) == bicubic
    assert images("streamed", "bilinear") == bilinear


def test_longest_side_changes_only_samples_of_longer_images(root: Path) -> None:
    def images(longest_side: int | None) -> list[bytes]:
        data = {"crop": "resized", "longest_side": longest_side}
        steps = samples([feed_of(root, "streamed", data=data)])
        return [step[position][0] for step in steps for position in sorted(step)]

    assert images(None) == images(LONGEST)
    differing = sum(a != b for a, b in zip(images(None), images(70), strict=True))
    assert 0 < differing < 17
    assert images(70) == images(500)


def kept_file(folder: Path) -> Path:
    (file,) = folder.glob("*.pictures")
    return file


def resized_feed(root: Path, cache: Path, limit: float = 1.0) -> Feed:
    data = {"crop": "resized"}
    feed: Feed = feed_of(root, "resident", data=data, cache=str(cache), cache_gb=limit)
    return feed


def test_damaged_picture_file_is_written_again(root: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    expected = samples([resized_feed(root, cache)])
    file = kept_file(cache)
    whole = file.read_bytes()
    written = file.stat().st_mtime_ns
    assert samples([resized_feed(root, cache)]) == expected
    assert file.stat().st_mtime_ns == written
    sides = len(whole) - 32 - 17 * 16
    for damaged in (
        whole[:-100],
        whole[:20],
        whole[:sides] + b"\xff" * 16 + whole[sides + 16 :],
        b"\0" * len(whole),
        whole[1000:],
    ):
        gc.collect()
        file.write_bytes(damaged)
        assert samples([resized_feed(root, cache)]) == expected
        assert kept_file(cache).read_bytes() == whole
    assert not list(cache.glob("*.part"))


@pytest.mark.parametrize("share", [0.0, 0.5, 0.97])
def test_flipped_bit_changes_no_sample_and_is_repaired(
    share: float, root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "cache"
    expected = samples([resized_feed(root, cache)])
    file = kept_file(cache)
    whole = file.read_bytes()
    data = bytearray(whole)
    data[int(share * (len(whole) - 32 - 17 * 16))] ^= 16
    gc.collect()
    file.write_bytes(data)
    assert samples([resized_feed(root, cache)]) == expected
    output = capfd.readouterr().err
    assert output.count("\n") == 1
    assert "1 decoded images in" in output
    assert file.read_bytes() == whole


def test_disk_that_returns_wrong_bytes_gives_a_user_error(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resized_feed(root, tmp_path / "cache")
    feed = resized_feed(root, tmp_path / "cache")  # reads the file that the first one wrote
    with monkeypatch.context() as patch:
        patch.setattr(Blocks, "_is_whole", lambda blocks, row: False)
        with pytest.raises(UserError, match="gives back other bytes than were written"):
            samples([feed])
    monkeypatch.setattr(pictures, "read_sides", lambda *_: None)
    with pytest.raises(UserError, match="gives back other bytes than were written"):
        resized_feed(root, tmp_path / "other")


def test_each_image_is_decoded_once_with_its_original_size(
    table: SampleTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []

    def counted(data: bytes, *args: Any) -> Any:
        decoded.append(len(data))
        return read_picture(data, *args)

    monkeypatch.setattr(image_maker, "read_picture", counted)
    for cache in (Cache(str(tmp_path / "cache"), 10**9), None):
        kept = KeptPictures(table, LONGEST, 2, cache)
        for row in (3, 16, 0, 3):
            original = Image.open(io.BytesIO(table.read_bytes(row)))
            (picture,) = kept.read(np.array([row]), Arena())
            assert (picture.width, picture.height) == original.size
            assert max(picture.pixels.shape) <= LONGEST
    assert len(decoded) == 2 * 17


@pytest.mark.parametrize("has_cache", [True, False])
def test_reused_memory_does_not_overwrite_pictures(
    table: SampleTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_cache: bool
) -> None:
    monkeypatch.setattr(pictures, "CHUNK", 1)
    cache = Cache(str(tmp_path / "cache"), 10**9) if has_cache else None
    kept = KeptPictures(table, LONGEST, 1, cache)
    for row in range(17):
        expected = read_picture(table.read_bytes(row), LONGEST)
        (picture,) = kept.read(np.array([row]), Arena())
        assert np.array_equal(picture.pixels, expected.pixels), row


def test_older_cache_files_are_deleted_as_the_file_grows(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.data.cache.GROWTH", 1000)
    cache = tmp_path / "cache"
    cache.mkdir()
    older = cache / "older"
    older.write_bytes(b"x" * 60_000)
    samples([resized_feed(root, cache, 60_500 / 2**30)])
    size = kept_file(cache).stat().st_size
    assert not older.exists()
    assert size <= int((cache / "room.lock").read_text()) <= size + 2000


def test_full_disk_error_suggests_keeping_fewer_images(
    table: SampleTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Blocks, "write", full)
    with pytest.raises(UserError, match=r"no room for more shards and.*lower data.resident_mb"):
        KeptPictures(table, LONGEST, 2, Cache(str(tmp_path / "cache"), 10**9))
    assert not list((tmp_path / "cache").glob("*.p*"))


def test_decoded_size_is_estimated_only_if_bounds_cannot_decide(
    table: SampleTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [read_picture(table.read_bytes(row), LONGEST).pixels.nbytes for row in range(17)]
    assert are_small(table, LONGEST, sum(sizes))
    assert not are_small(table, LONGEST, sum(sizes) - 1)
    monkeypatch.setattr(SampleTable, "read_bytes", lambda table, row: pytest.fail("it was read"))
    assert are_small(table, LONGEST, 17 * 3 * LONGEST**2)
    assert not are_small(table, LONGEST, 0)


@pytest.mark.parametrize("fed", ["resident", "streamed"])
def test_later_epochs_reuse_the_memory_of_earlier_threads(
    root: Path, monkeypatch: pytest.MonkeyPatch, fed: str
) -> None:
    made: list[ImageMaker] = []

    def note(*arguments: Any) -> ImageMaker:
        made.append(ImageMaker(*arguments))
        return made[-1]

    monkeypatch.setattr(sources, "ImageMaker", note)
    feed = feed_of(root, fed, data={"crop": "resized"})
    for epoch in range(6):
        assert len(list(feed.epoch(epoch))) == feed.steps_per_epoch > 1
    assert isinstance(feed.source, PictureSource)
    assert 1 <= len(made) <= max(PREFETCH_THREADS, feed.source.threads)
    assert len(feed.source.free) == len(set(feed.source.free)) == len(made)


@pytest.mark.parametrize("threads", [1, 3, 16])
def test_repeated_rows_are_in_the_same_job(threads: int) -> None:
    rows = np.random.default_rng(threads).integers(0, 40, 130)
    jobs = split_chunks(rows, threads)
    assert sorted(np.concatenate(jobs).tolist()) == list(range(130))
    rows_of_jobs = [set(rows[job].tolist()) for job in jobs]
    assert sum(map(len, rows_of_jobs)) == len(set(rows.tolist()))
    assert len(jobs) >= min(2 * threads, 8)
    assert split_chunks(rows[:0], threads) == []
