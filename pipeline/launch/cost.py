"""Forecast the cost of a run before it starts: device-hours, with their uncertainty.

The work of a stage is the number of images times the number of epochs. For an evaluation or a step
without epochs, it is the number of images. The seconds per image come from the first available
source of these:

1. finished stages of the same method, step and precision;
2. finished stages of other methods, of the same step and precision;
3. a calibration, or the number of operations of the backbone (module `speed`).

A stage has no forecast only if its number of images is unknown.

Measurements come from all runs with a record in this storage that have the same backbone and kind
of device. Ingest and report use no device and are left out.

A device is what one rank computes on: its GPU, or its CPU cores. A stage with 4 ranks that takes
one hour costs 4 device-hours. If ranks share a GPU, the module `sharing` gives the slowdown of each
rank, and device-hours count the GPU once.

Start reading at `forecast`; `format_forecast` prints its result.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from pipeline.config.settings import Config
from pipeline.config.text import format_count, format_seconds, table_text
from pipeline.data.cards import Card
from pipeline.data.formats import count_labels, is_local_source, list_source
from pipeline.graph.run_record import recorded_config
from pipeline.graph.stage import Graph, IngestJob, Stage
from pipeline.graph.store import Store
from pipeline.launch import speed
from pipeline.launch.sharing import (
    ALWAYS_BUSY,
    NOT_SHARED,
    Busy,
    Sharing,
    find_busy,
    find_sharing,
    read_cluster,
    read_ranks_per_gpu,
    shares_gpus,
    stretch,
)
from pipeline.launch.wall_time import wall_time
from pipeline.results.tables import Row
from workers.data.augment import Augment
from workers.errors import DamagedArtifact, UserError
from workers.job import StageJob, Task, TrainSettings, add_neutral_values
from workers.methods import METHODS
from workers.methods.linear import Linear
from workers.optim import fit_to_images
from workers.storage.artifact import Artifact
from workers.storage.parquet import read_table

Basis = Literal["same method", "other method", "calibration", "formula", "unknown"]
# Basis of a forecast -> factor by which the real time can be lower or higher. The factors of a
# calibration and of a formula allow for differences between methods: a training step takes 0.5 to 2
# times as long as with full fine-tuning, and 5 times as long with a few methods.
SPREADS: dict[Basis, float] = {
    "same method": 1.3,
    "other method": 2.0,
    "calibration": 3.0,
    "formula": 5.0,
    "unknown": 1.0,
}
STAGE_S = 0.5  # assumed seconds of a stage in addition to its images, if nothing was measured
MAX_SOURCES = 8  # maximum number of measured stages per `SourceKind`, from the most recent runs
WITHOUT_DEVICE = ("ingest", "report")  # steps that use no device
SHOWN_TASKS = 5  # maximum number of tasks that a note names


class Work(NamedTuple):
    """The work of a stage.

    Attributes:
        images: Number of images of one epoch; None if it is unknown.
        epochs: Number of epochs; 0 for a step without epochs.
    """

    images: float | None
    epochs: int


class TaskData(NamedTuple):
    """The data of a task.

    Attributes:
        key: Key of the ingested data.
        shares: See `Task.shares`.
    """

    key: str
    shares: Mapping[str, float]


class SourceKind(NamedTuple):
    """A kind of measured stages. Measurements of stages of the same kind can be combined.

    Attributes:
        method: Name of the method; empty for stages without a method.
        step: Kind of the stage.
        precision: Setting `train.precision`; empty for stages without it.
        reads_features: Whether the stages read stored features instead of images.
    """

    method: str
    step: str
    precision: str
    reads_features: bool


@dataclass(frozen=True)
class Measured:
    """The device-seconds of one finished stage, as if each rank had its own device.

    Attributes:
        fixed_s: Device-seconds that do not depend on the amount of work.
        image_s: Device-seconds per image and epoch.
        device: Description of the device.
    """

    fixed_s: float
    image_s: float
    device: str


Sources = Mapping[SourceKind, list[Measured]]


class Estimate(NamedTuple):
    """A forecast in seconds, with the limits of the likely range."""

    expected: float
    low: float
    high: float


@dataclass(frozen=True)
class Cost:
    """The predicted cost of a stage.

    Attributes:
        label: Label of the method, or the step.
        step: Kind of the stage.
        images: Number of images of one epoch; None if it is unknown.
        epochs: Number of epochs.
        device_s: Device-seconds, as if each rank had its own device; None if the number of images
            is unknown.
        basis: Origin of the forecast.
        part: Factor from `device_s` to `taken_s`; below 1 if ranks save GPU time by sharing a GPU.
    """

    label: str
    step: str
    images: float | None
    epochs: int
    device_s: float | None
    basis: Basis
    part: float = 1.0

    @property
    def taken_s(self) -> float | None:
        """Device-seconds of the stage, with a shared GPU counted once. None if unknown."""
        return None if self.device_s is None else self.device_s * self.part


@dataclass(frozen=True)
class Forecast:
    """The predicted costs of a run.

    Attributes:
        costs: Cost of each stage, by id.
        workers: Number of ranks of a group.
        groups: Number of groups; 0: as many as the stages can use.
        walls: Label -> seconds of wall time if only the stages of this label run. The key
            `together` is for all stages. Stages without a forecast count as 0.
        devices: Descriptions of the devices on which the stages were measured.
        speeds: Descriptions of the formulas or of the calibration.
        unknown: Names of tasks with an unknown number of images.
        sharing: The stages that share GPUs.
    """

    costs: dict[str, Cost]
    workers: int
    groups: int
    walls: dict[str, Estimate]
    devices: tuple[str, ...]
    speeds: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    sharing: Sharing = NOT_SHARED


@dataclass
class Images:
    """Counts the images of tasks, from the index of ingested data, the card, or the source's files.

    Attributes:
        store: Store of the ingested data.
        cards: Key of an ingest stage -> data card.
        counts: Key of an ingest stage -> number of images by (split, class), read from the index;
            None without an index.
        lists_sources: Whether to list the files of sources on this machine if neither an index nor
            the card has a count. This can take a while.
        listed: Key of an ingest stage -> number of images by split, from the files of the source.
    """

    store: Store
    cards: Mapping[str, Card] = field(default_factory=dict)
    counts: dict[str, Mapping[tuple[str, str], int] | None] = field(default_factory=dict)
    lists_sources: bool = False
    listed: dict[str, Mapping[str, float]] = field(default_factory=dict)

    def of(self, data: TaskData, split: str) -> float | None:
        """Return the number of images of a task in a split.

        If only the total of a split is known, all classes are assumed to be equally large.

        Args:
            data: Data of the task.
            split: `train`, `val` or `test`.

        Returns:
            The number; None if it is unknown.
        """
        if data.key not in self.counts:
            self.counts[data.key] = self._read_index(data.key)
        counts = self.counts[data.key]
        if counts is not None:
            return sum(counts.get((split, name), 0) * share for name, share in data.shares.items())
        card = self.cards.get(data.key)
        if card is None:
            return None
        if card.counts is not None:
            number = getattr(card.counts, split)
        else:
            if data.key not in self.listed:
                self.listed[data.key] = count_source(card) if self.lists_sources else {}
            number = self.listed[data.key].get(split)
        if number is None:
            return None
        return float(number * sum(data.shares.values()) / len(card.classes))

    def _read_index(self, key: str) -> Mapping[tuple[str, str], int] | None:
        artifact = Artifact.open(self.store.root, key)
        if artifact is None:
            return None
        try:
            table = read_table(artifact.read("index.parquet"), ["split", "class"])
        except (DamagedArtifact, OSError):
            return None
        splits = table["split"].to_pylist()
        return Counter(zip(splits, table["class"].to_pylist(), strict=True))


def count_source(card: Card) -> dict[str, float]:
    """Return the approximate number of images in each split of a source, by listing its files.

    It is approximate because ingest can reject images. The result is empty if the source is not
    on this machine or cannot be read. No error is raised, because ingest will explain it.
    """
    if card.source.format == "torchvision" or not is_local_source(card):
        return {}
    try:
        counts = count_labels(card, list_source(card) or [])
    except (UserError, OSError):
        return {}
    images: dict[str, float] = {}
    for (split, _), number in counts.items():
        images[split] = images.get(split, 0.0) + number
    if "test" not in images and "train" in images:
        images["test"] = images["train"] * card.test_fraction
        images["train"] -= images["test"]
    return images


# ---- the work of a stage -------------------------------------------------------------------------
def count_work(
    step: str, inputs: Mapping[str, Any], tasks: Mapping[str, TaskData], images: Images
) -> Work:
    """Return the work of a stage.

    For a training step, the images are the train images of one task, or of all tasks so far if the
    method trains on these. Replayed exemplars are not counted; their time is included in the
    seconds per image.

    Args:
        step: Kind of the stage.
        inputs: Inputs of the stage's key.
        tasks: Data of the tasks, by name.
        images: Counter of the images of tasks.
    """
    if step == "evaluate":
        return Work(count_evaluated_images(inputs, tasks, images), 1)
    names = trained_tasks(inputs)
    total = count_task_images(names, tasks, "train", images)
    if total is not None:
        val_fraction = (inputs.get("data") or {}).get("val_fraction", 0.0)
        total -= val_fraction * sum(count_divided_images(tasks[name], images) for name in names)
    train = fit_train_settings(inputs, total)
    return Work(total, train.epochs if train else 0)


def fit_train_settings(inputs: Mapping[str, Any], num_images: float | None) -> TrainSettings | None:
    """Return the training settings of a stage, with the length for its number of images.

    Args:
        inputs: Inputs of the stage's key.
        num_images: Number of images of an epoch; None if it is unknown.

    Returns:
        The settings; None for a step without training.
    """
    configured = inputs.get("train")
    if not configured:
        return None
    train = TrainSettings.model_validate(add_neutral_values(TrainSettings, configured))
    return fit_to_images(train, round(num_images or 0))


def count_evaluated_images(
    inputs: Mapping[str, Any], tasks: Mapping[str, TaskData], images: Images
) -> float | None:
    """Return the number of images of an evaluation; None if it is unknown.

    An evaluation uses the test images or the validation images of the tasks that it measures.
    Validation images are the validation split of the data sets, or held-out train images.
    """
    val_fraction = inputs.get("val_fraction", 0.0)
    if inputs.get("split") != "val":
        return count_task_images(list_seen_tasks(inputs), tasks, "test", images)
    if not val_fraction:
        return count_task_images(list_seen_tasks(inputs), tasks, "val", images)
    total = 0.0
    for name in list_seen_tasks(inputs):
        count = count_task_images([name], tasks, "train", images)
        if count is None:
            return None
        held_out = val_fraction * count_divided_images(tasks[name], images)
        total += held_out or images.of(tasks[name], "val") or 0.0
    return total


def count_divided_images(task: TaskData, images: Images) -> float:
    """Return the number of train images from which `data.val_fraction` holds some out.

    It is 0 for a data set with its own validation images.
    """
    if images.of(task, "val"):
        return 0.0
    return images.of(task, "train") or 0.0


def list_seen_tasks(inputs: Mapping[str, Any]) -> list[str]:
    """Return the names of the tasks that a stage reads or measures, from the inputs of its key."""
    return [name for name, _ in inputs.get("seen", ())]


def trained_tasks(inputs: Mapping[str, Any]) -> list[str]:
    """Return the names of the tasks whose images a training step reads."""
    method = METHODS.get(inputs.get("method", ""))
    if method is not None and method.trains_on == "seen":
        return list_seen_tasks(inputs)
    task = inputs.get("task")
    return [task] if task else []


def count_task_images(
    names: Iterable[str], tasks: Mapping[str, TaskData], split: str, images: Images
) -> float | None:
    """Return the number of images of several tasks; None if that of any task is unknown."""
    total = 0.0
    for name in names:
        count = images.of(tasks[name], split) if name in tasks else None
        if count is None:
            return None
        total += count
    return total


def read_precision(inputs: Mapping[str, Any]) -> str:
    """Return the setting `train.precision` of a stage, or an empty string without it."""
    return str((inputs.get("train") or {}).get("precision", ""))


def find_speed_settings(config: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the settings of a config that determine the speed of the backbone."""
    backbone = config.get("backbone") or {}
    options = sorted((backbone.get("options") or {}).items())
    return (
        backbone.get("name"),
        backbone.get("img_size"),
        repr(options),
        repr(backbone.get("context")),
    )


# ---- measurements --------------------------------------------------------------------------------
def read_sources(
    store: Store,
    records: Iterable[Mapping[str, Any]],
    config: Config,
    images: Images,
    busy: Busy,
) -> Sources:
    """Return the device-seconds of finished stages by kind.

    A stage is used only if it ran on the kind of device (CPU or GPU) that `config` assigns to its
    step.

    Args:
        store: Store of the runs.
        records: Records of comparable runs.
        config: The config to forecast.
        images: Counter of the images of tasks.
        busy: Share of the time in which one rank keeps a GPU busy, to remove the slowdown from
            stages that shared GPUs.
    """
    sources: dict[SourceKind, list[Measured]] = {}
    read_keys: set[str] = set()
    for record in records:
        cluster = read_cluster(record)
        is_shared = shares_gpus(cluster)
        tasks = {}
        for task in record.get("tasks", ()):
            if "data" in task:
                shares = task.get("shares") or dict.fromkeys(task["classes"], 1.0)
                tasks[task["name"]] = TaskData(task["data"], shares)
        for stage in record["stages"]:
            inputs = stage.get("inputs") or {}
            step = stage.get("step", "")
            reads_features = any(p.startswith("features/") for p in stage.get("parents", ()))
            method = stage.get("method") or ""
            kind = SourceKind(method, step, read_precision(inputs), reads_features)
            is_full = len(sources.get(kind, ())) >= MAX_SOURCES
            if step in WITHOUT_DEVICE or stage["key"] in read_keys or is_full:
                continue
            read_keys.add(stage["key"])
            artifact = Artifact.open(store.root, stage["key"])
            if artifact is None:
                continue
            measured = read_measurement(artifact, count_work(step, inputs, tasks, images))
            if measured is not None and is_shared:
                ranks = read_ranks_per_gpu(store.storage, record["name"], cluster.of_step(step))
                measured = remove_slowdown(measured, stretch(ranks, busy))
            on_cpu = not config.cluster.of_step(step).gpus_per_worker
            if measured is not None and measured.device.startswith("cpu") == on_cpu:
                sources.setdefault(kind, []).append(measured)
    return sources


def list_comparable_records(store: Store, graph: Graph, config: Config) -> list[Mapping[str, Any]]:
    """Return the records of runs with the backbone of `config`, the most recent first."""
    backbone = find_speed_settings(recorded_config(graph, config))
    records = []
    for name in store.run_names():
        record = store.record(name)
        if record and find_speed_settings(record.get("config") or {}) == backbone:
            records.append(record)
    return sorted(records, key=lambda record: str(record.get("created")), reverse=True)


def read_measurement(artifact: Artifact, work: Work) -> Measured | None:
    """Return the measurement of one result.

    Return None if the manifest lacks a value, or the number of images is unknown.
    """
    manifest = artifact.manifest
    wall_s = manifest.get("wall_s")
    workers = manifest.get("workers", 1)
    device = str((manifest.get("provenance") or {}).get("device", ""))
    if not isinstance(wall_s, (int, float)) or not device or work.images is None:
        return None
    if not work.images:  # a backbone stage that only builds the model
        return Measured(wall_s * workers, 0.0, device)
    epochs_s = read_epochs_s(artifact) if work.epochs else None
    images = work.images * max(1, work.epochs)
    if epochs_s is None:
        return Measured(0.0, wall_s * workers / images, device)
    fixed_s = max(0.0, wall_s - epochs_s) * workers
    return Measured(fixed_s, epochs_s * workers / images, device)


def remove_slowdown(measured: Measured, factor: float) -> Measured:
    """Return the measurement of a stage without the slowdown `factor` that other ranks caused."""
    return replace(measured, fixed_s=measured.fixed_s / factor, image_s=measured.image_s / factor)


def read_epochs_s(artifact: Artifact) -> float | None:
    """Return the total seconds of all epochs; None without a readable history."""
    if "history.parquet" not in artifact.manifest["files"]:
        return None
    try:
        rows = read_table(artifact.read("history.parquet")).to_pylist()
    except (DamagedArtifact, OSError):
        return None
    return float(sum(row.get("seconds") or 0.0 for row in rows)) or None


# ---- the forecast --------------------------------------------------------------------------------
def forecast(
    graph: Graph,
    config: Config,
    store: Store,
    todo: set[str],
    tasks: Iterable[Task],
    calibrate: bool = False,
) -> Forecast:
    """Forecast the costs of the stages `todo`.

    Args:
        graph: The graph of the run.
        config: The config of the run.
        store: Store of the results.
        todo: Ids of the stages to run.
        tasks: The tasks of the run.
        calibrate: Whether to measure this machine for a few seconds if finished stages give no
            measurements. Otherwise, a formula is used.

    Raises:
        UserError: If this machine cannot be calibrated for the config.
    """
    cards = {stage.key: stage.job.card for stage in graph if isinstance(stage.job, IngestJob)}
    images = Images(store, cards, lists_sources=True)
    records = list_comparable_records(store, graph, config)
    busy = ALWAYS_BUSY
    if any(map(shares_gpus, [config.cluster, *map(read_cluster, records)])):
        busy = find_busy(store.storage, [record["name"] for record in records])
    sources = read_sources(store, records, config, images, busy)
    steps = {stage.id: stage.step for stage in graph if isinstance(stage.job, StageJob)}
    sharing = find_sharing(config.cluster, steps, busy)
    data = collect_task_data(graph, tasks)
    speeds = Speeds(config, calibrate)
    costs: dict[str, Cost] = {}
    devices: set[str] = set()
    for stage in graph:
        if stage.id not in todo or not isinstance(stage.job, StageJob):
            continue
        work = count_work(stage.step, stage.inputs, data, images)
        basis, measurements = choose_measurements(stage, config, sources, work)
        devices.update(measured.device for measured in measurements)
        if basis == "unknown" and work.images is not None:
            basis = speeds.basis
            measurements = [speeds.of(stage, work)]
        label = stage.method or stage.step
        device_s = device_seconds(measurements, work)
        part = sharing.gpu_part(stage.id)
        costs[stage.id] = Cost(label, stage.step, work.images, work.epochs, device_s, basis, part)
    workers = max(1, config.cluster.workers)
    groups = config.cluster.groups if config.cluster.workers else 1
    walls = compute_wall_times(graph, costs, workers, groups or len(graph), sharing)
    unknown = [name for name, one in data.items() if images.of(one, "train") is None]
    return Forecast(
        costs,
        workers,
        groups,
        walls,
        tuple(sorted(devices)),
        tuple(speed.source for speed in speeds.known.values()),
        tuple(unknown),
        sharing,
    )


class Speeds:
    """The speeds of the workers of a config, for each combination of CPUs, GPUs and precision.

    Args:
        config: The config to forecast.
        calibrate: Whether to measure this machine. Otherwise, a formula is used.
    """

    def __init__(self, config: Config, calibrate: bool):
        self.config = config
        self.get = speed.calibrate if calibrate else speed.assume
        self.basis: Basis = "calibration" if calibrate else "formula"
        self.known: dict[tuple[int, float, str], speed.Speed] = {}

    def of(self, stage: Stage, work: Work) -> Measured:
        """Return the estimated device-seconds of a stage, in the form of a measurement."""
        assert isinstance(stage.job, StageJob)
        cluster = self.config.cluster.of_step(stage.step)
        precision = read_precision(stage.inputs) or "fp32"  # evaluations run in fp32
        kind = (cluster.cpus_per_worker, cluster.gpus_per_worker, precision)
        if kind not in self.known:
            self.known[kind] = self.get(stage.job.backbone_settings, *kind)
        one = self.known[kind]
        if reads_features(stage):
            return Measured(STAGE_S, 0.0, one.source)
        if not work.epochs or stage.step == "evaluate":
            return Measured(STAGE_S, one.forward_s, one.source)
        method = METHODS.get(stage.job.method)
        if method is None or not issubclass(method, Linear):
            return Measured(STAGE_S, one.train_s, one.source)
        # The method trains only a head on the features of a frozen backbone. If augmentation is
        # deterministic, it computes the features once, else in each epoch.
        if Augment(stage.job.data, stage.job.backbone_settings, training=True).is_deterministic:
            return Measured(STAGE_S + (work.images or 0.0) * one.forward_s, 0.0, one.source)
        return Measured(STAGE_S, one.forward_s, one.source)


def collect_task_data(graph: Graph, tasks: Iterable[Task]) -> dict[str, TaskData]:
    """Return the data of `tasks` and of all tasks in the jobs of the graph, by name."""
    by_name = {task.name: TaskData(task.data, task.shares) for task in tasks}
    for stage in graph:
        if isinstance(stage.job, StageJob) and stage.job.task:
            task = stage.job.task
            by_name[task.name] = TaskData(task.data, task.shares)
    return by_name


def reads_features(stage: Stage) -> bool:
    """Return whether a stage reads stored features instead of images."""
    return isinstance(stage.job, StageJob) and stage.job.features is not None


def choose_measurements(
    stage: Stage, config: Config, sources: Sources, work: Work
) -> tuple[Basis, list[Measured]]:
    """Return the measurements for the forecast of a stage, and their basis.

    Without suitable measurements, the basis is "unknown" and the list is empty.
    """
    if work.images is None:
        return "unknown", []
    method = config.methods[stage.method].method if stage.method else ""
    kind = SourceKind(method, stage.step, read_precision(stage.inputs), reads_features(stage))
    same_method = sources.get(kind)
    if same_method:
        return "same method", same_method
    other_methods: list[Measured] = []
    for other, measurements in sources.items():
        if other[1:] == kind[1:]:
            other_methods += measurements
    if other_methods:
        return "other method", other_methods
    return "unknown", []


def device_seconds(measurements: list[Measured], work: Work) -> float | None:
    """Return the device-seconds of a stage, from the medians of the measurements."""
    if not measurements or work.images is None:
        return None
    fixed_s = statistics.median(measured.fixed_s for measured in measurements)
    image_s = statistics.median(measured.image_s for measured in measurements)
    return fixed_s + work.images * max(1, work.epochs) * image_s


def sum_device_seconds(costs: Iterable[Cost]) -> Estimate:
    """Return the total `device_s` of several stages. Stages without a forecast count as 0."""
    known = [(cost.device_s, SPREADS[cost.basis]) for cost in costs if cost.device_s is not None]
    return Estimate(
        sum(device_s for device_s, _ in known),
        sum(device_s / spread for device_s, spread in known),
        sum(device_s * spread for device_s, spread in known),
    )


def sum_taken_seconds(costs: Iterable[Cost]) -> Estimate:
    """Return the total `taken_s` of several stages. Stages without a forecast count as 0."""
    return sum_device_seconds(replace(cost, device_s=cost.taken_s) for cost in costs)


def compute_wall_times(
    graph: Graph, costs: Mapping[str, Cost], workers: int, groups: int, sharing: Sharing
) -> dict[str, Estimate]:
    """Return the seconds of wall time, as in `Forecast.walls`.

    Args:
        graph: The graph of the run.
        costs: Cost of each stage, by id.
        workers: Number of ranks of a group.
        groups: Number of groups.
        sharing: The stages that share GPUs.
    """
    seconds = {stage_id: sum_device_seconds([cost]) for stage_id, cost in costs.items()}
    stages_of: dict[str, set[str]] = {}
    for stage_id, cost in costs.items():
        stages_of.setdefault(cost.label, set()).add(stage_id)
    stages_of["together"] = set(costs)
    walls = {}
    for label, ids in stages_of.items():
        ends = []
        for end in range(3):  # expected, low, high
            stage_s = {stage_id: values[end] / workers for stage_id, values in seconds.items()}
            ends.append(wall_time(graph, ids, stage_s, groups, sharing))
        walls[label] = Estimate(*ends)
    return walls


# ---- the printed table ---------------------------------------------------------------------------
def format_forecast(prediction: Forecast) -> str:
    """Return the table of costs and the notes as text."""
    if not prediction.costs:
        return "cost: nothing to run"
    head = ["cost", "stages", "images x epochs", "device time", "wall time", "rests on"]
    rows = [table_row(prediction, label) for label in prediction.walls]
    lines = [table_text(head, rows, left=["cost", "rests on"]), "", *notes(prediction)]
    return "\n".join(lines)


def table_row(prediction: Forecast, label: str) -> list[str]:
    """Return the cells of the table row of one label."""
    row = make_label_row(prediction, label)
    times = ["-", "-"]
    if not math.isnan(row["device_hours"]):
        times = [format_range(row, "device_hours"), format_range(row, "wall_hours")]
    bases = ", ".join(f"{basis}: {row[basis]}" for basis in SPREADS if row[basis])
    return [label, str(row["stages"]), f"{row['images']:,.0f}", *times, bases]


def format_range(row: Row, name: str) -> str:
    """Return a time and its likely range, for example `1 h 05 min (13 min 00 s to 5 h 25 min)`."""
    expected, low, high = (
        format_seconds(3600 * row[name + suffix]) for suffix in ("", "_low", "_high")
    )
    return f"{expected} ({low} to {high})"


def make_label_row(prediction: Forecast, label: str) -> Row:
    """Return the numbers of one label, or of all stages for the label `together`.

    `images` is the number of images times epochs. `device_hours` and `wall_hours` are NaN if no
    stage has a forecast; with the suffixes `_low` and `_high` they are the limits of the likely
    range. Under the name of each basis, the row has the number of stages with this basis.
    """
    costs = [cost for cost in prediction.costs.values() if label in (cost.label, "together")]
    row: Row = {
        "label": label,
        "stages": len(costs),
        "images": sum((cost.images or 0.0) * max(1, cost.epochs) for cost in costs),
    }
    is_known = any(cost.device_s is not None for cost in costs)
    hours = {"device_hours": sum_taken_seconds(costs), "wall_hours": prediction.walls[label]}
    for name, estimate in hours.items():
        for suffix, value in zip(("", "_low", "_high"), estimate, strict=True):
            row[name + suffix] = value / 3600 if is_known else math.nan
    stages_per_basis = Counter(cost.basis for cost in costs)
    return row | {basis: stages_per_basis[basis] for basis in SPREADS}


def notes(prediction: Forecast) -> list[str]:
    """Return the lines below the table: assumptions, and missing information."""
    groups = "as many groups as are asked for"
    if prediction.groups:
        groups = format_count(prediction.groups, "group")
    unknown = [cost for cost in prediction.costs.values() if cost.device_s is None]
    without = ""
    if unknown:
        without = f", without {format_count(len(unknown), 'stage')} of unknown cost"
    lines = [
        f"wall time: with {groups} of {format_count(prediction.workers, 'worker')}{without}; "
        "without ingest, report and the start of Ray"
    ]
    if prediction.sharing.stages:
        lines.append(describe_sharing(prediction.sharing))
    if prediction.devices:
        lines.append(f"measured on: {'; '.join(prediction.devices)}")
    bases = {cost.basis for cost in prediction.costs.values()}
    if prediction.speeds:
        basis = "formula" if "formula" in bases else "calibration"
        lines.append(f"{basis}: {'; '.join(prediction.speeds)}")
    spreads = [f"{basis} {SPREADS[basis]:g}" for basis in SPREADS if basis in bases - {"unknown"}]
    if spreads:
        lines.append(f"ranges: times or divided by {', '.join(spreads)}")
    if prediction.unknown:
        names = ", ".join(prediction.unknown[:SHOWN_TASKS])
        more = " ..." if len(prediction.unknown) > SHOWN_TASKS else ""
        lines.append(
            f"no count of images: {names}{more}; ingest the data with `python -m pipeline ingest "
            "CONFIG`, or put `counts` on its card"
        )
    if "formula" in bases:
        lines.append(
            "for narrower ranges: `plan CONFIG --calibrate` measures this machine for a few "
            "seconds; a run of one task, on this kind of device and into this storage, measures "
            "the methods"
        )
    return lines


def describe_sharing(sharing: Sharing) -> str:
    """Describe the assumption of the forecast about ranks that share a GPU."""
    text = f"shared GPUs: up to {sharing.ranks} ranks on each, which device time counts once; "
    if not sharing.busy.run:
        return (
            f"{text}no run in this storage measured how busy one rank keeps a GPU, so each counts "
            "as taking an equal part of its time"
        )
    return (
        f"{text}one rank keeps a GPU {sharing.busy.share:.0%} busy (measured by run "
        f"{sharing.busy.run}), and above 100% together each takes an equal part of its time"
    )
