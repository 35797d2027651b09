"""Measure speed on a GPU.

Command: `python -m benchmarks.gpu --speed`. It takes at most 5 minutes on one GPU.

It measures training steps of every method at the first and third task, hand-written training loops
for comparison, the feed by number of loader processes, DyTox with 1, 10 and 50 task tokens, MEAT
inference, and served requests of two tasks. Each measured row is written to `--out` at once. Rows
in that file are not measured again, so an interrupted run continues. `--device cpu` rehearses all
rows with small sizes.
"""

from __future__ import annotations

import copy
import json
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import dytox, stream
from benchmarks.meat_inference import meat
from benchmarks.methods import CLASSES, Conditions, Training
from pipeline.config.text import table_text
from pipeline.graph.run import look_up_all, run_graph
from pipeline.launch.local import LocalExecutor
from pipeline.results.bundles import build_run_bundle
from workers import capture
from workers.data import accelerator, loaders
from workers.data.feed import Feed
from workers.dist import Group
from workers.job import BackboneSettings
from workers.methods import METHODS
from workers.model import vit
from workers.serving.server import Predictor

LIMIT_S = 290.0
START_TIMEOUT_S = 60.0
BLOCKS = 3
PROFILED = ("finetune", "meat", "toast", "dytox")
COMPILED = ("finetune", "meat")
SMALL = ("finetune", "meat", "hat")  # also measured with small inputs, where the host is the limit
SMALL_SIDE, SMALL_BATCH = 128, 32
NUM_KERNELS = 3
Row = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurements.

    Attributes:
        backbone: Name of the backbone.
        side: Side of the images in pixels.
        batch: Images per training step.
        steps: Calls per timed block.
        feed_images: Images per epoch of the feed.
        loaders: Numbers of loader processes.
        dytox_batch: Images per training step of DyTox.
        inference_batch: Images per batch of inference and per served request.
        product: Side of the matrices of the bf16 product.
        copy_bytes: Bytes of the copy.
    """

    backbone: str = "deit_small_patch16_224"
    side: int = 224
    batch: int = 128
    steps: int = 12
    feed_images: int = 4096
    loaders: tuple[int, ...] = (2, 4, 8, 16)
    dytox_batch: int = 512
    inference_batch: int = 256
    product: int = 8192
    copy_bytes: int = 2 << 30


REHEARSAL = Sizes(
    "deit_tiny_patch16_224", 32, 8, 1, 32, (1, 2), dytox_batch=4, inference_batch=2, product=64,
    copy_bytes=1 << 16,
)  # fmt: skip


@dataclass
class Bench:
    """Measures the rows that the file does not have yet, until the time limit.

    Attributes:
        device: The device.
        sizes: Sizes of the measurements.
        out: File with a JSON object per line.
        limit_s: Time limit in seconds. No row is started after it.
        began: Time when the measurements started.
        left_out: Names of the rows for which no time was left.
    """

    device: torch.device
    sizes: Sizes
    out: Path
    limit_s: float = LIMIT_S
    began: float = field(default_factory=time.monotonic)
    left_out: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        lines = self.out.read_text().splitlines() if self.out.exists() else []
        self.rows: list[Row] = [json.loads(line) for line in lines]

    def measure(self, kind: str, name: str, make: Callable[[], Row]) -> None:
        """Measure one row, write it and print it. An error is also written as a row."""
        if any((row["kind"], row["name"]) == (kind, name) for row in self.rows):
            return
        if time.monotonic() - self.began > self.limit_s:
            self.left_out.append(f"{kind} {name}")
            return
        try:
            values = make()
        except Exception as error:
            values = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
        accelerator.release_memory(self.device)
        row = {"kind": kind, "name": name, **values}
        self.rows.append(row)
        with self.out.open("a") as stream:
            stream.write(json.dumps(row) + "\n")
        print(" ".join(f"{key}={format_cell(value)}" for key, value in row.items()), flush=True)

    def wait(self) -> None:
        """Wait until the device has computed everything."""
        if accelerator.is_accelerator(self.device):
            accelerator.functions().synchronize(self.device)

    def time(self, call: Callable[[], object], images: int) -> Row:
        """Return milliseconds per call (median of blocks), images per second and host CPU time."""
        call()
        self.wait()
        blocks = []
        cpu_s = time.process_time()
        for _ in range(BLOCKS):
            start = time.perf_counter()
            for _ in range(self.sizes.steps):
                call()
            self.wait()
            blocks.append((time.perf_counter() - start) / self.sizes.steps)
        cpu_s = (time.process_time() - cpu_s) / (BLOCKS * self.sizes.steps)
        seconds = sorted(blocks)[BLOCKS // 2]
        return {"ms": 1e3 * seconds, "images_s": images / seconds, "host_cpu_ms": 1e3 * cpu_s}


def format_cell(value: object) -> str:
    """Return a value of a row as text."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def tables(rows: list[Row]) -> str:
    """Return a table for each kind of row."""
    texts = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        chosen = [row for row in rows if row["kind"] == kind]
        columns = list(dict.fromkeys(name for row in chosen for name in row if name != "kind"))
        cells = [[format_cell(row.get(name, "-")) for name in columns] for row in chosen]
        texts.append(f"{kind}\n{table_text(columns, cells)}")
    return "\n\n".join(texts)


# ---- the rows -----------------------------------------------------------------------------------
def measure_all(bench: Bench, names: list[str]) -> None:
    """Measure every row, the most important first."""
    bench.measure("ceiling", "product and copy", partial(ceiling, bench))
    torch.manual_seed(0)
    settings = BackboneSettings(name=bench.sizes.backbone, img_size=bench.sizes.side)
    backbone = vit.build(settings)
    timm_network = timm.create_model(
        bench.sizes.backbone, img_size=bench.sizes.side, num_classes=CLASSES
    )
    width: Any = backbone.num_features
    ours = nn.Sequential(copy.deepcopy(backbone), nn.Linear(width, CLASSES))
    bench.measure("plain loop", "our network", partial(plain_loop, bench, ours))
    bench.measure("plain loop", "timm", partial(plain_loop, bench, timm_network))
    for position in (0, 2):
        for name in (name for name in names if METHODS[name].has_training()):
            if position == 0 or METHODS[name].carries:
                label = f"{name}, task {position + 1}"
                bench.measure(
                    "training step", label, partial(method_row, bench, name, backbone, position)
                )
    small = replace(bench.sizes, side=min(SMALL_SIDE, bench.sizes.side), batch=SMALL_BATCH)
    network = vit.build(BackboneSettings(name=small.backbone, img_size=small.side))
    for name in (name for name in SMALL if name in names):
        label = f"{name}, {small.side} px, batch {small.batch}"
        bench.measure(
            "step of a small job", label, partial(method_row, bench, name, network, 0, sizes=small)
        )
    for name in (name for name in COMPILED if name in names):
        bench.measure("compiled step", name, partial(method_row, bench, name, backbone, 0, True))
    for name in (name for name in SMALL if name in names):
        bench.measure("captured step", name, partial(captured_row, bench, name, network, small))
    for tasks in (1, 10, 50):
        for precision in ("bf16", "fp32"):
            label = f"T={tasks}, {precision}"
            bench.measure("DyTox step", label, partial(dytox_row, bench, tasks, precision))
    for shared in (False, True):
        for precision in ("bf16", "fp32"):
            label = f"{'one mask' if shared else 'a mask a block'}, {precision}"
            bench.measure(
                "MEAT inference", label, partial(inference_row, bench, settings, shared, precision)
            )
    with tempfile.TemporaryDirectory(prefix="accrete-speed-") as folder:
        served = Path(folder) / "served"
        bench.measure("serving", "two tasks in a request", partial(serving_row, bench, served))
        for kept in (False, True):
            for count in bench.sizes.loaders:
                label = f"{'kept decoded' if kept else 'streamed'}, {count} loaders"
                bench.measure("feed", label, partial(feed_row, bench, Path(folder), count, kept))


def ceiling(bench: Bench) -> Row:
    """Measure the speed of a bf16 matrix product and of a copy on the device."""
    size = bench.sizes.product
    left, right = torch.randn(2, size, size, device=bench.device, dtype=torch.bfloat16)
    product_s = bench.time(lambda: left @ right, 1)["ms"] / 1e3
    source = torch.empty(bench.sizes.copy_bytes, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    copy_s = bench.time(lambda: target.copy_(source), 1)["ms"] / 1e3
    return {
        "device": accelerator.describe_device(bench.device),
        "tflops_bf16": 2 * size**3 / product_s / 1e12,
        "copy_tb_s": 2 * bench.sizes.copy_bytes / copy_s / 1e12,
    }


def plain_loop(bench: Bench, network: nn.Module) -> Row:
    """Time a hand-written training step of a network under bf16 autocast."""
    network = network.to(bench.device).train()
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    side, batch = bench.sizes.side, bench.sizes.batch
    images = torch.randn(batch, 3, side, side, device=bench.device)
    labels = torch.randint(0, CLASSES, (batch,), device=bench.device)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(bench.device.type, torch.bfloat16):
            loss = F.cross_entropy(network(images), labels)
        loss.backward()
        optimizer.step()

    with FlopCounterMode(display=False) as counter:
        step()
    row = bench.time(step, batch)
    return row | {"tflops": counter.get_total_flops() / row["ms"] / 1e9}


def method_row(
    bench: Bench,
    name: str,
    backbone: nn.Module,
    position: int,
    compiled: bool = False,
    sizes: Sizes | None = None,
) -> Row:
    """Time a training step of a method under bf16 autocast."""
    scenario = max(METHODS[name].scenarios - {"domain"})
    sizes = sizes or bench.sizes
    conditions = Conditions(sizes.side, sizes.batch, position, "bf16", bench.device)
    training = Training(name, backbone, scenario, conditions)
    if compiled:
        vit.compile_blocks(training.method.backbone)
    training.step()
    bench.wait()
    row: Row = {"synchronisations": count_synchronisations(bench, training.step)}
    row |= bench.time(training.step, sizes.batch)
    if accelerator.is_accelerator(bench.device):
        row["peak_gib"] = accelerator.functions().max_memory_allocated(bench.device) / 2**30
        accelerator.functions().reset_peak_memory_stats(bench.device)
    if name in PROFILED and position == 0 and not compiled:  # also for small jobs
        row |= kernels(bench, training.step)
    finetune = [r for r in bench.rows if r["name"] == "finetune, task 1" and "ms" in r]
    if finetune:
        row["of_finetune"] = row["ms"] / finetune[0]["ms"]
    return row


def captured_row(bench: Bench, name: str, backbone: nn.Module, sizes: Sizes) -> Row:
    """Time captured steps (`train.compile: step`) and compare their losses with normal steps.

    The CPU has no graph capture, so both run normally there.
    """
    scenario = max(METHODS[name].scenarios - {"domain"})
    plain = Conditions(sizes.side, sizes.batch, 0, "bf16", bench.device)
    captured = replace(plain, is_captured=bench.device.type in capture.BACKENDS)
    trainings = [Training(name, backbone, scenario, each) for each in (plain, captured)]
    losses = [torch.stack([training.step() for _ in range(8)]) for training in trainings]
    bench.wait()
    row: Row = {"difference": float((losses[1] / losses[0] - 1).abs().max())}
    row |= bench.time(trainings[1].step, sizes.batch)
    return row | {"plain_ms": bench.time(trainings[0].step, sizes.batch)["ms"]}


def count_synchronisations(bench: Bench, step: Callable[[], object]) -> int:
    """Return how often the host waits for the device in a step (0 on a CPU)."""
    if not accelerator.is_accelerator(bench.device):
        return 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerator.functions().set_sync_debug_mode("warn")
        step()
        accelerator.functions().set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


def kernels(bench: Bench, step: Callable[[], object]) -> Row:
    """Return a step's device time and the shares of the slowest kernels."""
    on_gpu = accelerator.is_accelerator(bench.device)
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as trace:
        step()
        bench.wait()
    times = {}
    for event in trace.key_averages():
        times[event.key] = event.self_device_time_total if on_gpu else event.self_cpu_time_total
    total = sum(times.values()) or 1
    largest = sorted(times, key=lambda key: -times[key])[:NUM_KERNELS]
    texts = [f"{key[:40]} {times[key] / total:.1%}" for key in largest]
    return {"device_ms": total / 1e3, "kernels": "; ".join(texts)}


def dytox_row(bench: Bench, tasks: int, precision: str) -> Row:
    """Time a training step of DyTox's network at 32 px with `tasks` task tokens."""
    network = dytox.build_networks(tasks)[0].to(bench.device).train()
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    size, classes = bench.sizes.dytox_batch, dytox.CLASSES // tasks * tasks
    images = torch.randn(size, 3, 32, 32, device=bench.device)
    labels = torch.randint(0, classes, (size,), device=bench.device)
    targets = F.one_hot(labels, classes).float()

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(bench.device.type, torch.bfloat16, enabled=precision == "bf16"):
            loss = F.binary_cross_entropy_with_logits(network(images), targets)
        loss.backward()
        optimizer.step()

    return bench.time(step, size)


@torch.no_grad()
def inference_row(bench: Bench, settings: BackboneSettings, shared: bool, precision: str) -> Row:
    """Time inference of MEAT with half of the tokens and neurons.

    The compact network, dense masks and plain timm are measured.
    """
    size, side = bench.sizes.inference_batch, bench.sizes.side
    images = torch.randn(size, 3, side, side, device=bench.device)
    plain = timm.create_model(settings.name, img_size=side, num_classes=100).eval()
    plain.to(bench.device)
    method = meat(settings, 0.5, shared).to(bench.device)
    compact: Any = copy.deepcopy(method).compact("t")
    if isinstance(compact, nn.Module):
        compact.to(bench.device)
    variants: dict[str, Callable[[], Tensor]] = {
        "plain": lambda: plain(images),
        "compact": lambda: compact(images),
        "dense": lambda: method.logits(images, "t"),
    }
    row: Row = {}
    with torch.autocast(bench.device.type, torch.bfloat16, enabled=precision == "bf16"):
        for name, call in variants.items():
            row[f"{name}_images_s"] = bench.time(call, size)["images_s"]
    return row


def serving_row(bench: Bench, folder: Path) -> Row:
    """Time requests with images of two tasks under MEAT.

    The images are JPEG files, with their decoding, and then decoded arrays of the same size.
    """
    side, size = bench.sizes.side, bench.sizes.inference_batch
    card = stream.draw_images(folder, 4, 8, 4, sides=(side,), suffixes=(".jpg",))
    gpus = int(accelerator.is_accelerator(bench.device))
    store, graph, config = stream.plan(
        folder / "storage",
        card,
        2,
        methods={"meat": {}},
        backbone={"name": bench.sizes.backbone, "img_size": side, "crop_pct": 1.0},
        train={"epochs": 1, "batch_size": 8},
        cluster={"workers": 0, "gpus_per_worker": gpus, "loader_workers": 0},
    )
    executor = LocalExecutor(store, config.cluster, lambda stage: {}, lambda event: None)
    lookups = look_up_all(graph, store, None)
    run_graph(graph, store, lambda todo: executor, retries=0, watchers=[], lookups=lookups)
    predictor = Predictor(build_run_bundle(graph, store, "meat"), device=bench.device)
    names = [predictor.tasks[row % 2].name for row in range(size)]
    files = sorted(folder.glob("raw/**/*.jpg"))
    encoded = [files[row % len(files)].read_bytes() for row in range(size)]
    arrays = [np.zeros((side, side, 3), np.uint8)] * size
    row = bench.time(lambda: predictor.predict(encoded, names), size)
    return row | {
        "arrays_s": bench.time(lambda: predictor.predict(arrays, names), size)["images_s"]
    }


def feed_row(bench: Bench, folder: Path, count: int, kept: bool) -> Row:
    """Time the feed over two epochs: resized crops and flips of JPEG files of 256 px."""
    classes = 8
    images = bench.sizes.feed_images
    if not (folder / "raw").exists():
        stream.draw_images(folder, classes, images // classes, 1, sides=(256,), suffixes=(".jpg",))
    card = str(folder / "card.yaml")
    store, graph, _ = stream.plan(
        folder / "storage",
        card,
        1,
        methods={"finetune": {}},
        stream={"tasks": [{"card": card, "name": "t"}]},
        backbone={"name": bench.sizes.backbone, "img_size": bench.sizes.side, "crop_pct": 1.0},
        data={"crop": "resized", "flip": 0.5, "resident_mb": 4000 if kept else 0},
        train={"epochs": 1, "batch_size": bench.sizes.batch},
        cluster={"workers": 0, "loader_workers": count},
    )
    stream.ingest(store, graph)
    job = replace(stream.find_job(graph, "finetune/t/train"), loader_workers=count)
    assert job.task is not None
    feed = Feed(job, (job.task,), "train", Group(device=bench.device), training=True)
    loaders.START_AFTER_S = 0.0
    loaders.start_loaders(count, START_TIMEOUT_S)
    for _ in feed.epoch(0):  # warms up and fills the cache
        pass
    count = 0
    start = time.perf_counter()
    for batches in epochs(feed, 2):
        count += sum(len(batch.labels) for batch in batches)
    bench.wait()
    return {"images_s": count / (time.perf_counter() - start)}


def epochs(feed: Feed, number: int) -> Iterator[list[Any]]:
    """Yield the micro-batches of several epochs."""
    for epoch in range(1, number + 1):
        yield from feed.epoch(epoch)
