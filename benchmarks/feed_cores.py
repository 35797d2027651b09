"""Measure the images per second of the feed on one and on two cores, and how long it holds the
interpreter lock of the training process.

Command: `python -m benchmarks.feed_cores --side 224`. Sides are 32, 128 and 224; without `--side`,
all three are measured, each in about a minute on two idle cores. The feed makes random resized
crops and flips of 2,048 JPEG files of 256 px with two loader processes. The images are `streamed`
(decoded in every epoch) or `kept` (decoded once).

- One core and two: wall time of whole epochs, with all processes and threads pinned to one core and
  then to two.
- Lock: a separate process on its own core reads about a million times per second whether a thread
  of this process holds the lock. The threads of the feed and the loaders run on the other core.
- Memory: private memory of a loader.
- DataLoader: torch's DataLoader with a process per core, Pillow and torchvision's transforms.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from benchmarks import stream
from benchmarks.harness import Report, start
from workers import dist
from workers.data import loaders
from workers.data.feed import Feed
from workers.job import StageJob

SIDES = (32, 128, 224)
SOURCE_SIDE, IMAGES, CLASSES, BATCH = 256, 2048, 8, 128
LOADERS = 2
ROUNDS = 3
START_TIMEOUT_S = 60.0
LOWEST_PRIORITY = 19
RARE_INTERVAL_US = (
    987_654_321  # switch interval of the interpreter, a value that occurs nowhere else
)
RUNTIME_BYTES = 100_000  # searched part of CPython's runtime state
MIN_SPEEDUP = 1.85  # two cores over one
MAX_LOCK_S = 15e-6  # per image
MAX_LOADER_MIB = 60


class Files(Dataset[Tensor]):
    """The image files of a folder, as a torch data set."""

    def __init__(self, folder: Path, transform: v2.Compose):
        self.paths = sorted(folder.glob("train/*/*.jpg"))
        self.transform = transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Tensor:
        with Image.open(self.paths[index]) as image:
            tensor: Tensor = self.transform(image.convert("RGB"))
            return tensor


def make_data_loader(folder: Path, job: StageJob) -> DataLoader[Tensor]:
    """Return a torch DataLoader over the same images, with a process per core."""
    settings = job.backbone_settings
    transform = v2.Compose(
        [
            v2.RandomResizedCrop(settings.img_size, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(list(settings.mean), list(settings.std)),
        ]
    )
    return DataLoader(
        Files(folder, transform), BATCH, shuffle=True, num_workers=2, persistent_workers=True
    )


def make_feed(folder: Path, side: int, kept: bool) -> tuple[Feed, StageJob]:
    """Return the training feed of one task and its job."""
    card = str(folder / "card.yaml")
    if not (folder / "raw").exists():
        stream.draw_images(
            folder, CLASSES, IMAGES // CLASSES, 1, sides=(SOURCE_SIDE,), suffixes=(".jpg",)
        )
    store, graph, _ = stream.plan(
        folder / f"storage-{side}",
        card,
        1,
        methods={"finetune": {}},
        stream={"tasks": [{"card": card, "name": "t"}]},
        backbone={"name": "vit_tiny_patch16_224", "img_size": side, "crop_pct": 1.0},
        data={"crop": "resized", "flip": 0.5, "resident_mb": 4000 if kept else 0},
        train={"epochs": 1, "batch_size": BATCH},
        cluster={"workers": 0, "loader_workers": LOADERS},
    )
    stream.ingest(store, graph)
    job = stream.find_job(graph, "finetune/t/train")
    assert job.task is not None
    return Feed(job, (job.task,), "train", dist.Group(), training=True), job


def exhaust(feed: Feed, epochs: Iterator[int]) -> float:
    """Read an epoch and return the images per second."""
    began = time.perf_counter()
    count = sum(len(batch) for batches in feed.epoch(next(epochs)) for batch in batches)
    return count / (time.perf_counter() - began)


def pin(cores: set[int]) -> None:
    """Pin all threads of this process and its descendants to `cores`."""
    for pid in family(os.getpid()):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(ProcessLookupError):  # the threads of an epoch end with the epoch
                os.sched_setaffinity(int(thread), cores)


def family(pid: int) -> list[int]:
    """Return the ids of a process and its descendants."""
    pids = [pid]
    for thread in os.listdir(f"/proc/{pid}/task"):
        children = Path(f"/proc/{pid}/task/{thread}/children").read_text().split()
        for child in children:
            pids += family(int(child))
    return pids


def find_lock() -> int:
    """Return the address of the integer that is 1 while a thread holds the interpreter lock.

    In CPython's runtime state, this integer follows the switch interval and the last holder. The
    function sets the switch interval to a rare value and searches for that value.
    """
    runtime = ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, "_PyRuntime"))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(RARE_INTERVAL_US / 1e6)
    content = ctypes.string_at(runtime, RUNTIME_BYTES)
    sys.setswitchinterval(interval)
    word = ctypes.sizeof(ctypes.c_ulong)
    place = content.index(RARE_INTERVAL_US.to_bytes(word, sys.byteorder))
    return runtime + place + 2 * word


SAMPLE = """
import os, sys
pid, address, core = map(int, sys.argv[1:])
os.sched_setaffinity(0, {core})
memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
locked = total = 0
print("begun", flush=True)
os.set_blocking(0, False)
while True:
    for _ in range(1000):
        locked += os.pread(memory, 1, address) != b"\\0"
    total += 1000
    try:
        if os.read(0, 1) == b"":
            break
    except BlockingIOError:
        pass
print(locked / total)
"""


def lock_seconds(feed: Feed, epochs: Iterator[int], cores: list[int]) -> float:
    """Return the seconds per image during which a thread of this process holds the lock."""
    pin({cores[1]})
    for pid in family(os.getpid())[1:]:  # none takes the core from the lock holder
        os.setpriority(os.PRIO_PROCESS, pid, LOWEST_PRIORITY)
    arguments = [str(os.getpid()), str(find_lock()), str(cores[0])]
    with subprocess.Popen(
        [sys.executable, "-c", SAMPLE, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as sampler:
        assert sampler.stdin is not None
        assert sampler.stdout is not None
        sampler.stdout.readline()
        began = time.perf_counter()
        exhaust(feed, epochs)
        seconds = time.perf_counter() - began
        sampler.stdin.close()
        return float(sampler.stdout.readline()) * seconds / feed.num_samples


def private_mib(pid: int) -> float:
    """Return the MiB of a process that no other process shares: dirty pages of private mappings."""
    total = 0
    is_private = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            is_private = words[1].endswith("p")
        elif is_private and words[0] == "Private_Dirty:":
            total += int(words[1])
    return total / 1024


def measure(side: int, folder: Path, report: Report) -> None:
    """Measure streamed and kept images at one side."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    epochs = iter(range(1_000_000))
    job = None
    rates: dict[str, float] = {}
    for name in ("streamed", "kept"):
        feed, job = make_feed(folder, side, name == "kept")
        exhaust(feed, epochs)
        made = loaders.start_loaders(LOADERS, START_TIMEOUT_S)
        assert made is not None, "no loader has started"
        for _ in range(2):  # warm up
            exhaust(feed, epochs)
        measured: dict[int, list[float]] = {1: [], 2: []}
        for _ in range(ROUNDS):
            for number, of_number in measured.items():
                pin(set(cores[:number]))
                of_number.append(exhaust(feed, epochs))
        one, two = (statistics.median(of_number) for of_number in measured.values())
        rates[name] = two
        report.at_least(f"{side} px, {name}, two cores over one", two / one, MIN_SPEEDUP)
        what = f"{side} px, {name}, images/s on one core and on two"
        report.note(what, f"{one:,.0f}, {two:,.0f}")
        lock = statistics.median(lock_seconds(feed, epochs, cores) for _ in range(ROUNDS))
        what = f"{side} px, {name}, lock for an image (1.00x = {MAX_LOCK_S * 1e6:.0f} us)"
        report.at_most(what, lock / MAX_LOCK_S, 1.0)
        report.note(f"{side} px, {name}, lock for an image", f"{lock * 1e6:.1f} us")
        pin(set(cores))
        for pid in family(made._server.pid)[1:]:
            what = f"{side} px, {name}, memory of a loader (1.00x = {MAX_LOADER_MIB} MiB)"
            report.at_most(what, private_mib(pid) / MAX_LOADER_MIB, 1.0)
    assert job is not None
    data_loader = make_data_loader(folder / "raw", job)
    for turn in range(2):
        began = time.perf_counter()
        count = sum(len(batch) for batch in data_loader)
        if turn:
            rates["DataLoader"] = count / (time.perf_counter() - began)
    for name in ("streamed", "kept"):
        ratio = rates[name] / rates["DataLoader"]
        report.note(f"{side} px, {name} / torch's DataLoader with two processes", f"{ratio:.1f}x")


def main() -> None:
    """Measure one side or all sides."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--side", type=int, choices=SIDES, help="of the input, in pixels")
    options = parser.parse_args()
    start()
    report = Report()
    loaders.START_AFTER_S = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for side in [options.side] if options.side else SIDES:
            measure(side, Path(folder), report)
    report.exit()


if __name__ == "__main__":
    main()
