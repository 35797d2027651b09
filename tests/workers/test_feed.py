"""Tests of the feed: every sample once per epoch, for any number of ranks, threads and caches."""

from __future__ import annotations

import gc
import hashlib
import io
import tarfile
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from tests.shard_names import shard_name
from workers.data import decoding, image_maker
from workers.data import feed as feeds
from workers.data.batch import Batch
from workers.data.cache import Blocks
from workers.data.decoding import ImageLimits, decode
from workers.data.feed import Feed
from workers.data.held_out import hold_out
from workers.data.shards import INDEX, SCHEMA, Shards
from workers.dist import Group
from workers.errors import DamagedArtifact, UserError
from workers.job import (
    BackboneSettings,
    DataSettings,
    Interpolation,
    StageJob,
    Task,
    TrainSettings,
)
from workers.storage.artifact import Attempt

SIDE = 8
SPLITS = ("train", "test")
CLASSES = {"red": 9, "green": 8, "blue": 6}
PLACES = {"resident": 1024, "streamed": 0}  # data.resident_mb


def noise_of(record: str) -> bytes:
    """Return a PNG with different noise for each record name."""
    generator = np.random.default_rng([*record.encode()])
    noise = generator.integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    return encoded(Image.fromarray(noise))


class Record(NamedTuple):
    """A record of an artifact."""

    split: str
    label: str
    key: str
    data: bytes

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


def shards_of_classes(records: list[Record], shard_images: int) -> dict[str, list[Record]]:
    """Return shards as ingest writes them: each has one class."""
    ordered = sorted(records, key=lambda r: (SPLITS.index(r.split), r.label, r.digest, r.key))
    shards: dict[str, list[Record]] = {}
    for (split, label), group in groupby(ordered, lambda record: record[:2]):
        members = list(group)
        for number, first in enumerate(range(0, len(members), shard_images)):
            name = shard_name(split, label, number)
            shards[name] = members[first : first + shard_images]
    return shards


def shards_of_splits(records: list[Record], shard_images: int) -> dict[str, list[Record]]:
    """Return shards with mixed classes, as earlier versions of ingest wrote them."""
    shards: dict[str, list[Record]] = {}
    for split in SPLITS:
        members = [record for record in records if record.split == split]
        members.sort(key=lambda record: hashlib.sha256(record.key.encode()).digest())
        for number, first in enumerate(range(0, len(members), shard_images)):
            shards[f"{split}-{number:05d}.tar"] = members[first : first + shard_images]
    return shards


def publish(
    root: Path,
    key: str,
    classes: dict[str, int],
    test: int = 5,
    shard_images: int = 6,
    draw: Callable[[str], bytes] = noise_of,
    layout: Callable[[list[Record], int], dict[str, list[Record]]] = shards_of_classes,
) -> None:
    """Write a data artifact. draw: function that returns the file of a record name."""
    records = []
    for split in SPLITS:
        for label, count in classes.items():
            for number in range(count if split == "train" else test):
                name = f"{split}/{label}/{number:03d}"
                records.append(Record(split, label, name, draw(name)))
    attempt, rows = Attempt(str(root), key), []
    for shard, members in layout(records, shard_images).items():
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            for record in members:
                rows.append(
                    {
                        "split": record.split,
                        "key": record.key,
                        "class": record.label,
                        "shard": shard,
                        "bytes": len(record.data),
                        "offset": tar.offset + 512,
                        "ext": "png",
                        "sha256": record.digest,
                    }
                )
                for ext, data in (("png", record.data), ("txt", record.label.encode())):
                    member = tarfile.TarInfo(f"{record.key}.{ext}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
        attempt.write(shard, buffer.getvalue())
    table = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), table)
    attempt.write(INDEX, table.getvalue())
    attempt.commit({"kind": "ingest"})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    publish(tmp_path, "colours", CLASSES)
    publish(tmp_path, "shapes", {"disc": 5, "ring": 7})
    return tmp_path


COLOURS = Task("colours", "colours", "colours", tuple(CLASSES))
SHAPES = Task("shapes", "shapes", "shapes", ("disc", "ring"))
AUGMENTED = {"crop": "pad", "flip": 0.5, "erase": 0.5}


def feed_of(
    root: Path,
    storage_kind: str,
    rank: int = 0,
    world: int = 1,
    split: str = "train",
    training: bool = True,
    tasks: tuple[Task, ...] = (COLOURS,),
    workers: int = 2,
    batch: int = 4,
    accumulate: int = 1,
    cache: str = "",
    data: dict[str, Any] | None = None,
    cache_gb: float = 1.0,
    interpolation: Interpolation = "bicubic",
    scenario: str = "task",
) -> Feed:
    job = StageJob(
        "id",
        "key",
        "train",
        str(root),
        "linear",
        {},
        BackboneSettings(img_size=SIDE, crop_pct=1.0, interpolation=interpolation),
        DataSettings(
            **{
                "val_fraction": 0.25,
                "resident_mb": PLACES[storage_kind],
                **AUGMENTED,
                **(data or {}),
            }
        ),
        TrainSettings(batch_size=batch, accumulate=accumulate),
        scenario,
        7,
        COLOURS,
        tasks,
        loader_workers=workers,
        cache=cache,
        cache_gb=cache_gb,
    )
    feed = Feed(job, tasks, split, Group(rank, world), training)
    assert feed.resident == (storage_kind == "resident")
    return feed


def samples(
    feeds: list[Feed], epoch: int = 0, start: int = 0
) -> list[dict[int, tuple[bytes, int, int]]]:
    """Return for each step: position in the global batch -> the sample after augmentation.
    Stand-ins are left out."""
    steps: list[dict[int, tuple[bytes, int, int]]] = []
    for feed in feeds:
        for step, batches in enumerate(feed.epoch(epoch, start)):
            if step == len(steps):
                steps.append({})
            for b in batches:
                if b.weight:
                    assert b.weight == len(b) / b.draw.size
                    for row, image, label, task in zip(
                        b.draw.positions.tolist(),
                        b.images,
                        b.labels.tolist(),
                        b.tasks.tolist(),
                        strict=True,
                    ):
                        assert row not in steps[step], "a position occurs twice"
                        steps[step][row] = (image.numpy().tobytes(), label, task)
    return steps


def plain(feed: Feed, epoch: int = 0) -> Counter[bytes]:
    return Counter(image for step in samples([feed], epoch) for image, _, _ in step.values())


# ---- samples of an epoch -------------------------------------------------------------------------
@pytest.mark.parametrize("storage_kind", PLACES)
def test_every_sample_comes_exactly_once_per_epoch(root: Any, storage_kind: Any) -> None:
    feed = feed_of(root, storage_kind, training=False)
    table = feed.samples.table
    expected: Counter[bytes] = Counter()
    for row in range(len(feed.samples)):
        pixels = torch.from_numpy(decode(feed.samples.read_bytes(row), SIDE).copy()).permute(
            2, 0, 1
        )
        expected[feed.augment.normalise(pixels).numpy().tobytes()] += 1
    assert len(expected) == table.num_rows == feed.num_samples == 23 - 6
    assert plain(feed, 0) == plain(feed, 1) == expected


@pytest.mark.parametrize("storage_kind", PLACES)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("data", [{}, {"mixup": 0.8, "cutmix": 1.0}], ids=["alone", "mixed"])
def test_augmented_samples_do_not_depend_on_ranks_or_threads(
    root: Any, storage_kind: Any, world: int, accumulate: int, data: Any
) -> None:
    one = samples([feed_of(root, storage_kind, data=data)], epoch=2)
    many = samples(
        [
            feed_of(
                root, storage_kind, r, world, workers=1 + 2 * r, accumulate=accumulate, data=data
            )
            for r in range(world)
        ],
        epoch=2,
    )
    assert one == many
    assert [len(step) for step in one] == [4, 4, 4, 4, 1]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("data", [{}, {"mixup": 0.8}, {"repeats": 3}], ids=repr)
def test_crops_of_originals_do_not_depend_on_ranks_or_threads(
    root: Any, world: int, data: Any
) -> None:
    data = {"crop": "resized", **data}
    one = samples([feed_of(root, "streamed", data=data)], epoch=2)
    feeds = [
        feed_of(root, "streamed", r, world, workers=1 + 2 * r, accumulate=2, data=data)
        for r in range(world)
    ]
    assert one == samples(feeds, epoch=2)


@pytest.mark.parametrize("storage_kind", PLACES)
def test_all_ranks_take_equal_steps_and_weights_sum_to_one(root: Any, storage_kind: Any) -> None:
    feeds = [feed_of(root, storage_kind, rank, 3, accumulate=2) for rank in range(3)]
    per_rank = [list(feed.epoch(0)) for feed in feeds]
    assert [len(steps) for steps in per_rank] == [feeds[0].steps_per_epoch] * 3 == [5] * 3
    for step in range(5):
        batches = [b for steps in per_rank for b in steps[step]]
        assert len(batches) == 6
        assert all(len(b) for b in batches)
        assert sum(b.weight for b in batches) == pytest.approx(1)
    assert [b.weight for steps in per_rank for b in steps[4]] == [1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("storage_kind", PLACES)
def test_epochs_differ_and_are_reproducible(root: Any, storage_kind: Any) -> None:
    feed = feed_of(root, storage_kind)
    assert samples([feed], 0) != samples([feed], 1)
    assert samples([feed], 1) == samples([feed_of(root, storage_kind)], 1)


@pytest.mark.parametrize("storage_kind", PLACES)
def test_resumed_epoch_continues_at_its_start_step(root: Any, storage_kind: Any) -> None:
    whole = samples([feed_of(root, storage_kind)], 1)
    assert samples([feed_of(root, storage_kind)], 1, start=3) == whole[3:]
    assert samples([feed_of(root, storage_kind)], 1, start=5) == []


@pytest.mark.parametrize("data", [{}, {"mixup": 0.8, "repeats": 3}], ids=["alone", "mixed"])
def test_resident_and_streamed_images_give_identical_samples(root: Any, data: Any) -> None:
    tasks = (SHAPES, COLOURS)
    resident, streamed = (samples([feed_of(root, p, tasks=tasks, data=data)], 1) for p in PLACES)
    assert resident == streamed


@pytest.mark.parametrize("storage_kind", PLACES)
def test_epoch_order_ignores_position_in_stream(root: Any, storage_kind: Any) -> None:
    alone = feed_of(root, storage_kind)
    assert alone.seed == feed_of(root, storage_kind, tasks=(COLOURS,), batch=9).seed
    assert alone.seed != feed_of(root, storage_kind, tasks=(SHAPES,)).seed


@pytest.mark.parametrize("storage_kind", PLACES)
def test_samples_of_several_tasks_are_mixed_with_correct_labels(
    root: Any, storage_kind: Any
) -> None:
    # some classes of COLOURS, in another order
    shared = Task("warm", "colours", "colours", ("blue", "red"))
    tasks = (SHAPES, COLOURS, shared)
    feed = feed_of(root, storage_kind, tasks=tasks, training=False)
    counts: Counter[tuple[str, str]] = Counter()
    for batches in feed.epoch(0):
        for b in batches:
            counts.update(
                (tasks[t].name, tasks[t].classes[y])
                for t, y in zip(b.tasks.tolist(), b.labels.tolist(), strict=True)
            )
    assert counts == {
        ("shapes", "disc"): 4,
        ("shapes", "ring"): 5,
        ("colours", "red"): 7,
        ("colours", "green"): 6,
        ("colours", "blue"): 4,
        ("warm", "red"): 7,
        ("warm", "blue"): 4,
    }
    first = {t for batches in list(feed.epoch(0))[:4] for b in batches for t in b.tasks.tolist()}
    assert len(first) > 1


def test_replacing_draw_positions_updates_device_positions(root: Any) -> None:
    """`replace` of a batch's random numbers drops the device copy of the positions."""
    ((batch, _), *_) = feed_of(root, "resident", accumulate=2).epoch(0)
    assert torch.equal(batch.draw.positions_on_device, batch.draw.positions)
    everybody = replace(batch.draw, positions=torch.arange(4))
    assert everybody.positions_on_device.tolist() == [0, 1, 2, 3]


# ---- the order ----------------------------------------------------------------------------------
LAYOUTS: dict[str, dict[str, Any]] = {
    "smaller shards": {"shard_images": 4},
    "larger shards": {"shard_images": 100},
    "another class": {"classes": {**CLASSES, "grey": 11, "black": 3}},
    "another class in the same shards": {
        "classes": {"grey": 11, **CLASSES},
        "shard_images": 7,
        "layout": shards_of_splits,
    },
}


@pytest.mark.few(4)
@pytest.mark.parametrize("storage_kind", PLACES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_batches_do_not_depend_on_storage_layout_or_other_images(
    name: str, storage_kind: Any, root: Any, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    publish(other, "colours", **{"classes": CLASSES, **LAYOUTS[name]})
    publish(other, "shapes", {"disc": 5, "ring": 7}, shard_images=3, layout=shards_of_splits)
    for tasks in ((COLOURS,), (SHAPES, COLOURS)):
        feeds = [feed_of(folder, storage_kind, tasks=tasks) for folder in (root, other)]
        for epoch in (0, 1):
            orders = [feed.deal.epoch(epoch) for feed in feeds]
            for step in range(feeds[0].steps_per_epoch):
                positions = np.arange(orders[0].size(step))
                keys, same_keys = (
                    feed.samples.keys(order.rows(step, positions))
                    for feed, order in zip(feeds, orders, strict=True)
                )
                assert keys == same_keys
            assert samples(feeds[:1], epoch) == samples(feeds[1:], epoch)


@pytest.mark.parametrize(
    ("scenario", "first_label", "second"),
    [("class", 3, SHAPES), ("domain", 0, replace(COLOURS, name="more colours"))],
)
def test_targets_of_several_tasks_are_in_one_output_space(
    scenario: str, first_label: int, second: Task, root: Path
) -> None:
    data = {"smoothing": 0.1}
    feed = feed_of(root, "streamed", tasks=(COLOURS, second), data=data, scenario=scenario)
    first_labels = torch.tensor([0, first_label])
    seen = set()
    for (batch,) in feed.epoch(0):
        assert batch.targets is not None
        expected = batch.labels + first_labels[batch.tasks]
        assert batch.targets.argmax(1).tolist() == expected.tolist()
        seen |= {*batch.tasks.tolist()}
    assert seen == {0, 1}


@pytest.mark.parametrize("split", ["train", "val", "test"])
@pytest.mark.parametrize("layout", [shards_of_classes, shards_of_splits])
def test_a_table_is_sorted_by_task_class_and_image(split: str, layout: Any, tmp_path: Path) -> None:
    publish(tmp_path, "colours", CLASSES, layout=layout)
    publish(tmp_path, "shapes", {"disc": 5, "ring": 7}, layout=layout)
    backwards = Task("shapes", "shapes", "shapes", ("ring", "disc"))
    feed = feed_of(tmp_path, "streamed", split=split, tasks=(backwards, COLOURS), training=False)
    digests = feed.samples.table["sha256"].to_pylist()
    rows = list(
        zip(feed.samples.tasks.tolist(), feed.samples.labels.tolist(), digests, strict=True)
    )
    assert rows == sorted(rows)
    assert {row[:2] for row in rows} == {(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)}


# ---- prefetching ---------------------------------------------------------------------------------
@pytest.mark.parametrize("storage_kind", PLACES)
@pytest.mark.parametrize("num_threads", [0, 1, 3])
def test_number_of_prefetch_threads_changes_no_bit(
    root: Any, storage_kind: Any, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = {"mixup": 0.8, "cutmix": 1.0, "randaugment": 2}
    expected = samples([feed_of(root, storage_kind, data=data, accumulate=2)], 1)
    monkeypatch.setattr(feeds, "PREFETCH_THREADS", num_threads)
    assert samples([feed_of(root, storage_kind, data=data, accumulate=2)], 1) == expected


@pytest.mark.parametrize("storage_kind", PLACES)
@pytest.mark.parametrize("steps", [1, 4, 5])
def test_an_epoch_that_is_dropped_leaves_no_thread(
    root: Any, storage_kind: Any, steps: int
) -> None:
    feed = feed_of(root, storage_kind)
    before = set(threading.enumerate())
    batches = feed.epoch(0)
    for _ in range(steps):
        next(batches)
    del batches
    preparing = [t for t in threading.enumerate() if t.name.startswith("batches-")]
    assert not preparing
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive()


def count_decoded(monkeypatch: pytest.MonkeyPatch) -> Counter[bytes]:
    """From now on, count how often each image is decoded, by its bytes."""
    decoded: Counter[bytes] = Counter()
    read_picture = decoding.read_picture

    def counted(data: bytes, *arguments: Any) -> Any:
        decoded[bytes(data)] += 1
        return read_picture(data, *arguments)

    monkeypatch.setattr(image_maker, "read_picture", counted)
    return decoded


def test_resumed_epoch_decodes_each_remaining_image_once(
    root: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images of finished steps are not read, and no image is read twice."""
    read = count_decoded(monkeypatch)
    samples([feed_of(root, "streamed", batch=2)], 1, start=5)
    assert sum(read.values()) == len(read) == 17 - 5 * 2


@pytest.mark.parametrize("storage_kind", PLACES)
def test_batch_error_is_raised_at_its_step(
    root: Any, storage_kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = feed_of(root, storage_kind)
    make = Feed._make_batches

    def failing(feed: Feed, rng: Any, *arguments: Any) -> Any:
        if rng.step == 2:
            raise DamagedArtifact("colours", "step 2")
        return make(feed, rng, *arguments)

    monkeypatch.setattr(Feed, "_make_batches", failing)
    batches = feed.epoch(0)
    assert len([next(batches), next(batches)]) == 2
    with pytest.raises(DamagedArtifact, match="step 2"):
        next(batches)


# ---- repeated augmentation -----------------------------------------------------------------------
UNCHANGED = {
    "crop": "none",
    "flip": 0.0,
    "erase": 0.0,
}  # an image has the same pixels at any position in a batch


def images_of_epoch(feed: Feed, epoch: int = 0) -> list[bytes]:
    """Return the images of an epoch in order."""
    return [step[position][0] for step in samples([feed], epoch) for position in sorted(step)]


@pytest.mark.parametrize("storage_kind", PLACES)
@pytest.mark.parametrize("repeats", [2, 3, 17, 40])
def test_repeated_images_are_consecutive_copies_of_first_shuffled_images(
    root: Any, storage_kind: Any, repeats: int
) -> None:
    """With repeated images, a batch of four has only one stream."""
    feed = feed_of(root, storage_kind, data={**UNCHANGED, "repeats": repeats})
    for epoch in (0, 1):
        feed.deal.repeats = repeats
        again = images_of_epoch(feed, epoch)
        feed.deal.repeats = 1
        once = images_of_epoch(feed, epoch)
        assert again == [image for image in once[: -(-17 // repeats)] for _ in range(repeats)][:17]
    assert len(set(once)) == 17


@pytest.mark.parametrize("storage_kind", PLACES)
def test_repeats_keep_epoch_length_and_augment_each_copy_separately(
    root: Any, storage_kind: Any
) -> None:
    plain, feed = feed_of(root, storage_kind), feed_of(root, storage_kind, data={"repeats": 3})
    assert (
        (feed.steps_per_epoch, feed.num_samples)
        == (plain.steps_per_epoch, plain.num_samples)
        == (5, 17)
    )
    assert [len(step) for step in samples([feed])] == [4, 4, 4, 4, 1]
    assert len(set(images_of_epoch(feed))) > 12, "each copy must be augmented separately"
    samples_of_two_tasks = 0
    for batches in feed_of(root, storage_kind, data={"repeats": 3}, tasks=(SHAPES, COLOURS)).epoch(
        0
    ):
        for batch in batches:
            assert batch.counts is not None
            samples_of_two_tasks += sum(batch.counts)
    assert samples_of_two_tasks == 26


@pytest.mark.parametrize("storage_kind", PLACES)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("data", [{}, {"mixup": 0.8, "cutmix": 1.0}], ids=["alone", "mixed"])
def test_repeated_samples_do_not_depend_on_ranks_threads_or_resume(
    root: Any, storage_kind: Any, world: int, data: Any
) -> None:
    one = samples([feed_of(root, storage_kind, data={**data, "repeats": 3})], epoch=2)
    many = samples(
        [
            feed_of(
                root,
                storage_kind,
                r,
                world,
                workers=1 + 2 * r,
                accumulate=2,
                data={**data, "repeats": 3},
            )
            for r in range(world)
        ],
        epoch=2,
    )
    assert one == many
    assert (
        samples([feed_of(root, storage_kind, data={**data, "repeats": 3})], 2, start=3) == one[3:]
    )


@pytest.mark.parametrize("storage_kind", PLACES)
def test_repeats_of_one_and_evaluation_repeat_no_image(root: Any, storage_kind: Any) -> None:
    assert samples([feed_of(root, storage_kind, data={"repeats": 1})]) == samples(
        [feed_of(root, storage_kind)]
    )
    plain, repeated = (
        [b.keys for b in feed_of(root, storage_kind, training=False, data=data).evaluate(4)]
        for data in ({}, {"repeats": 3})
    )
    assert plain == repeated


@pytest.mark.parametrize("crop", ["pad", "resized"])
def test_copies_of_a_streamed_image_are_decoded_once(
    crop: str, root: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = count_decoded(monkeypatch)
    images_of_epoch(feed_of(root, "streamed", batch=6, data={"repeats": 3, "crop": crop}))
    assert len(decoded) == 6
    assert set(decoded.values()) == {1}


# ---- evaluation ----------------------------------------------------------------------------------
def answers_of(batch: Batch) -> tuple[list[str], bytes, list[int]]:
    """Return the keys, pixels and labels of a batch."""
    assert batch.keys is not None
    return batch.keys, batch.images.numpy().tobytes(), batch.labels.tolist()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_evaluation_deals_whole_batches_in_fixed_order(root: Any, world: int) -> None:
    whole = feed_of(root, "resident", split="test", training=False)
    expected = [answers_of(batch) for batch in whole.evaluate(4)]
    assert [len(keys) for keys, _, _ in expected] == [4, 4, 4, 3]
    keys_in_order = [key for keys, _, _ in expected for key in keys]
    assert keys_in_order == whole.samples.table["key"].to_pylist()
    for storage_kind in PLACES:
        feeds = [
            feed_of(root, storage_kind, rank, world, split="test", training=False)
            for rank in range(world)
        ]
        for rank, feed in enumerate(feeds):
            dealt = [answers_of(batch) for batch in feed.evaluate(4)]
            assert dealt == expected[rank::world]
    for keys, _, labels in expected:
        assert [key.split("/")[1] for key in keys] == [COLOURS.classes[label] for label in labels]


# ---- validation ----------------------------------------------------------------------------------
def keys_of(feed: Feed) -> set[str]:
    return set(feed.samples.table["key"].to_pylist())


def test_validation_is_stratified_disjoint_and_apart_from_test(root: Any) -> None:
    train, val, test = (
        keys_of(feed_of(root, "resident", split=s, training=False))
        for s in ("train", "val", "test")
    )
    assert Counter(key.split("/")[1] for key in val) == {"red": 2, "green": 2, "blue": 2}
    assert not train & val
    assert {key.split("/")[0] for key in train | val} == {"train"}
    assert len(train | val) == 23
    assert {key.split("/")[0] for key in test} == {"test"}


def test_held_out_images_ignore_other_classes_and_row_order(root: Any) -> None:
    table = Shards.open(str(root), "colours").select("train", ["red", "green", "blue"])
    alone = Shards.open(str(root), "colours").select("train", ["green"])
    shuffled = table.take(np.random.default_rng(0).permutation(table.num_rows))
    held = [
        {k for k in hold_out(t, 0.3)[1]["key"].to_pylist() if "/green/" in k}
        for t in (table, alone, shuffled)
    ]
    assert held[0] == held[1] == held[2]
    assert len(held[0]) == 2


@pytest.mark.parametrize(
    ("count", "fraction", "expected"),
    [(1, 0.5, 0), (2, 0.01, 1), (2, 0.99, 1), (9, 0.0, 0), (10, 0.3, 3)],
)
def test_hold_out_leaves_images_in_both_splits(count: int, fraction: float, expected: int) -> None:
    keys = [str(i) for i in range(count)]
    table = pa.table({"key": keys, "class": ["a"] * count, "sha256": keys})
    train, val = hold_out(table, fraction)
    assert (train.num_rows, val.num_rows) == (count - expected, expected)


def test_copies_of_an_image_stay_in_one_split() -> None:
    """The class has 40 images, each four times under different names."""
    images = [str(number % 40) for number in range(160)]
    keys = [f"train/a/{number}" for number in range(160)]
    table = pa.table({"key": keys, "class": ["a"] * 160, "sha256": images})
    train, val = hold_out(table, 0.2)
    assert val.num_rows == 32
    assert not {*train["sha256"].to_pylist()} & {*val["sha256"].to_pylist()}
    lowest: dict[str, str] = {}
    for key, image in zip(keys, images, strict=True):
        digest = hashlib.sha256(key.encode()).hexdigest()
        lowest[image] = min(lowest.get(image, digest), digest)
    chosen = sorted(lowest, key=lambda image: lowest[image])[:8]
    assert {*val["sha256"].to_pylist()} == {*chosen}


def test_empty_splits_and_classes_are_refused(root: Any) -> None:
    with pytest.raises(UserError, match="class 'grey' of task 'colours' has no train images"):
        feed_of(root, "resident", tasks=(Task("colours", "colours", "colours", ("red", "grey")),))
    with pytest.raises(UserError, match=r"no validation images with data\.val_fraction = 0"):
        feed_of(root, "resident", split="val", data={"val_fraction": 0.0})
    publish(root, "untested", {"red": 2}, test=0)
    with pytest.raises(UserError, match="task 'x' has no test images"):
        feed_of(
            root, "resident", split="test", tasks=(Task("x", "untested", "untested", ("red",)),)
        )


# ---- the cache and damaged files -----------------------------------------------------------------
def test_cache_is_written_once_and_repaired_if_truncated(root: Any, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    expected = samples([feed_of(root, "resident")])
    assert samples([feed_of(root, "resident", cache=str(cache))]) == expected
    (file,) = cache.glob("*.npy")
    written = file.stat().st_mtime_ns
    assert samples([feed_of(root, "resident", cache=str(cache))]) == expected
    assert file.stat().st_mtime_ns == written
    file.write_bytes(file.read_bytes()[:-100])
    assert samples([feed_of(root, "resident", cache=str(cache))]) == expected
    assert not list(cache.glob("*.part"))
    feed_of(root, "resident", cache=str(cache), split="val")
    assert len(list(cache.glob("*.npy"))) == 2


PIXELS, ROW = 128, SIDE * SIDE * 3  # offset in the file; bytes of an image


@pytest.mark.parametrize(
    "at",
    [
        PIXELS,
        PIXELS + 5 * ROW + 7,
        PIXELS + 17 * ROW - 1,
        PIXELS + 17 * ROW,
        PIXELS + 17 * ROW + 4 * 17 - 1,
    ],
)
def test_flipped_bit_in_cache_is_repaired_and_changes_no_sample(
    at: Any, root: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "cache")
    expected = samples([feed_of(root, "resident", cache=folder)])
    (file,) = (tmp_path / "cache").glob("*.npy")
    whole = file.read_bytes()
    assert len(whole) == PIXELS + 17 * (ROW + 4)
    data = bytearray(whole)
    data[at] ^= 16
    file.write_bytes(data)
    gc.collect()
    assert samples([feed_of(root, "resident", cache=folder)]) == expected
    output = capfd.readouterr().err
    assert output.count("\n") == 1
    assert "1 decoded images in" in output
    assert file.read_bytes() == whole
    assert samples([feed_of(root, "resident", cache=folder)]) == expected
    assert not capfd.readouterr().err


def test_cached_image_is_checked_once_when_read(
    root: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: Counter[Any] = Counter()
    is_whole = Blocks._is_whole

    def counted(blocks: Any, row: Any) -> Any:
        checked[row] += 1
        return is_whole(blocks, row)

    monkeypatch.setattr(Blocks, "_is_whole", counted)
    feed = feed_of(root, "resident", cache=str(tmp_path / "cache"))
    with monkeypatch.context() as without_threads:  # threads would read ahead
        without_threads.setattr(feeds, "PREFETCH_THREADS", 0)
        next(feed.epoch(0))
    assert len(checked) == 4
    for epoch in range(3):
        samples([feed], epoch)
    assert set(checked.values()) == {1}
    assert len(checked) == 17


def test_unreliable_cache_disk_raises_user_error(
    root: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = feed_of(root, "resident", cache=str(tmp_path / "cache"))
    monkeypatch.setattr(Blocks, "_is_whole", lambda blocks, row: False)
    with pytest.raises(UserError, match=r"gives back other bytes than were written"):
        samples([feed])


@pytest.mark.parametrize(("limit", "count"), [(4000, 1), (10_000, 2)])
def test_cache_size_stays_within_limit(limit: int, count: int, root: Any, tmp_path: Path) -> None:
    for split in ("train", "val"):
        feed_of(
            root, "resident", cache=str(tmp_path / "cache"), split=split, cache_gb=limit / 2**30
        )
        gc.collect()  # a cache file is in use until its feed is deleted
    files = [*(tmp_path / "cache").glob("*.npy")]
    assert len(files) == count
    assert sum(file.stat().st_size for file in files) <= limit


def test_unwritable_cache_folder_raises_user_error(root: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="shards and decoded images cannot be kept in"):
        feed_of(root, "resident", cache=str(tmp_path / "file"))


def use(root: Path, storage_kind: str) -> None:
    for _ in feed_of(root, storage_kind).epoch(0):
        pass


@pytest.mark.parametrize("storage_kind", PLACES)
def test_a_flipped_bit_names_the_damaged_image(root: Any, storage_kind: Any) -> None:
    table = feed_of(root, "resident").samples
    row = table.table.slice(3, 1).to_pylist()[0]
    shards, shard = table.files[row["file"]]
    path = Path(shards.uri(shard))
    data = bytearray(path.read_bytes())
    data[row["offset"] + row["bytes"] - 20] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedArtifact, match=row["key"]) as caught:
        use(root, storage_kind)
    assert caught.value.key == "colours"


@pytest.mark.parametrize("storage_kind", PLACES)
@pytest.mark.parametrize("left", [0, 512 * 8, 512 * 9 + 100, None])
def test_truncated_or_missing_shard_raises_damaged_artifact(
    root: Any, storage_kind: Any, left: Any
) -> None:
    path = Path(Shards.open(str(root), "colours").uri(shard_name("train", "red")))
    if left is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(DamagedArtifact, match="run the same command again"):
        use(root, storage_kind)


# ---- decoding ------------------------------------------------------------------------------------
def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
def test_every_mode_decodes_to_rgb(mode: str) -> None:
    if mode == "I;16":
        image = Image.fromarray(np.full((6, 9), 40000, np.uint16))
    else:
        image = Image.new("RGB", (9, 6), (200, 200, 200)).convert(mode)
    pixels = decode(encoded(image), 4)
    assert pixels.shape == (4, 4, 3)
    assert pixels.dtype == np.dtype(np.uint8)
    assert abs(int(pixels[1, 1, 0]) - {"1": 255, "I;16": 40000 >> 8}.get(mode, 200)) < (
        256 if mode == "1" else 8
    )


def test_transparent_pixels_become_white() -> None:
    assert (decode(encoded(Image.new("RGBA", (5, 5), (0, 0, 0, 0))), 3) == 255).all()


def test_decoding_crops_the_central_square() -> None:
    wide = np.zeros((4, 12, 3), np.uint8)
    wide[:, 4:8] = 255
    assert (decode(encoded(Image.fromarray(wide)), 4) == 255).all()
    assert (decode(encoded(Image.fromarray(wide.transpose(1, 0, 2))), 4) == 255).all()


def test_decoding_refuses_oversized_image_and_invalid_data() -> None:
    with pytest.raises(UserError, match="max_pixels"):
        decode(encoded(Image.new("RGB", (50, 50))), 4, ImageLimits(max_pixels=100))
    with pytest.raises(UserError, match="cannot be decoded"):
        decode(b"no image", 4)
