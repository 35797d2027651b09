"""What a run will cost, before anything runs: device-hours from what finished stages in the store
say that they took.

A stage's work is counted in images times epochs (an evaluation's, and that of a step without
epochs, in images). What was measured of the same method, step and backbone gives seconds per image;
else any method's same step; else it is not measured, and said so. Sources are the stages of all
named runs of this storage with the same backbone, precision and kind of device. Ingest and report
take no device, and are left out.
"""

from __future__ import annotations

import io
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, Literal

import pyarrow.parquet as pq

from pipeline.config import Config, dump
from pipeline.console import table_text
from pipeline.graph.stage import Graph, IngestJob, Stage
from pipeline.graph.store import Store
from pipeline.graph.walk import Event, EventKind, Walk
from pipeline.launch.queue import ReadyQueue, ReadyStage
from workers.errors import DamagedArtifact
from workers.job import StageJob, Task
from workers.methods import METHODS
from workers.storage.artifact import Artifact

Basis = Literal["same method", "other method", "not measured"]
BASES: tuple[Basis, ...] = ("same method", "other method", "not measured")
# finished stages that are read for one method and step, of the runs that were started last
MOST_SOURCES = 8


@dataclass(frozen=True)
class Measured:
    """One finished stage: device-seconds that do not grow with its work, those per image and epoch,
    and which device it was."""

    fixed_s: float
    image_s: float
    device: str


@dataclass(frozen=True)
class Cost:
    """A stage to come. images: of one epoch; None where nobody knows yet. device_s: None where it
    is not measured."""

    label: str
    step: str
    images: float | None
    epochs: int
    device_s: float | None
    basis: Basis


@dataclass(frozen=True)
class Forecast:
    """Costs by stage. walls: seconds of wall time by label, each alone, and `together`: of what is
    measured, with `groups` groups of `workers` ranks (0: as many groups as are asked for)."""

    costs: dict[str, Cost]
    workers: int
    groups: int
    walls: dict[str, float]
    devices: tuple[str, ...]
    unknown: tuple[str, ...] = ()  # tasks of which nobody knows how many images they have


@dataclass
class Images:
    """How many images tasks have: by the index of what was ingested, else by what the card
    promises."""

    store: Store
    cards: Mapping[str, Any] = field(default_factory=dict)  # key of an ingest stage -> its card
    known: dict[str, Mapping[tuple[str, str], int] | None] = field(default_factory=dict)

    def of(self, data: str, classes: Iterable[str], split: str) -> float | None:
        """Images of these classes in `train` or `test`. A card that promises a sum only has the
        same number of each class."""
        if data not in self.known:
            self.known[data] = self._index(data)
        counts, card, wanted = self.known[data], self.cards.get(data), [*classes]
        if counts is not None:
            return float(sum(counts.get((split, name), 0) for name in wanted))
        if card is not None and card.counts is not None:
            return float(getattr(card.counts, split) * len(wanted) / len(card.classes))
        return None

    def _index(self, data: str) -> Mapping[tuple[str, str], int] | None:
        found = Artifact.open(self.store.root, data)
        if found is None:
            return None
        try:
            table = pq.read_table(
                io.BytesIO(found.read("index.parquet")), columns=["split", "class"]
            )
        except (DamagedArtifact, OSError):
            return None
        return Counter(zip(table["split"].to_pylist(), table["class"].to_pylist(), strict=True))


# ---- what was measured ---------------------------------------------------------------------------
def work_of(
    step: str,
    inputs: Mapping[str, Any],
    tasks: Mapping[str, tuple[str, tuple[str, ...]]],
    images: Images,
) -> tuple[float | None, int]:
    """Images of an epoch, and epochs. tasks: name -> key of its data, its classes. A training step
    counts its own task's images, where it is measured and where it is to come; what a memory adds
    is in its seconds per image. One that trains on all tasks so far counts them all."""
    evaluates, method = step == "evaluate", METHODS.get(inputs.get("method", ""))
    every = evaluates or (method is not None and method.trains_on == "seen")
    names = (
        [name for name, _ in inputs.get("seen", ())]
        if every
        else [inputs["task"]]
        if inputs.get("task")
        else []
    )
    split = "test" if evaluates and inputs.get("split") != "val" else "train"
    parts = [images.of(*tasks[name], split) if name in tasks else None for name in names]
    total = (
        None
        if any(part is None for part in parts)
        else float(sum(part for part in parts if part is not None))
    )
    held_out = (
        inputs.get("val_fraction", 0.0)
        if evaluates
        else (inputs.get("data") or {}).get("val_fraction", 0.0)
    )
    share = 1.0 if split == "test" else held_out if evaluates else 1 - held_out
    return None if total is None else total * share, 1 if evaluates else int(
        (inputs.get("train") or {}).get("epochs", 0)
    )


def precision_of(inputs: Mapping[str, Any]) -> str:
    return str((inputs.get("train") or {}).get("precision", ""))


def backbone_of(config: Mapping[str, Any]) -> tuple[Any, ...]:
    """What of a backbone decides how fast it is."""
    found = config.get("backbone") or {}
    return (
        found.get("name"),
        found.get("img_size"),
        repr(sorted((found.get("options") or {}).items())),
        repr(found.get("context")),
    )


def measured(
    store: Store, config: Config, images: Images
) -> dict[tuple[str, str, str], list[Measured]]:
    """(method, step, precision) -> what finished stages took, of the runs in this storage with the
    backbone and the kind of device of `config`."""
    found: dict[tuple[str, str, str], list[Measured]] = {}
    read: set[str] = set()
    records = [record for name in store.run_names() if (record := store.record(name))]
    for record in sorted(records, key=lambda r: str(r.get("created")), reverse=True):
        if backbone_of(record.get("config") or {}) != backbone_of(dump(config)):
            continue
        tasks = {
            t["name"]: (t["data"], tuple(t["classes"]))
            for t in record.get("tasks", ())
            if "data" in t
        }
        for stage in record["stages"]:
            kind = (
                stage.get("method") or "",
                stage.get("step", ""),
                precision_of(stage.get("inputs") or {}),
            )
            if (
                kind[1] in ("ingest", "report")
                or stage["key"] in read
                or len(found.get(kind, ())) >= MOST_SOURCES
            ):
                continue
            read.add(stage["key"])
            artifact = Artifact.open(store.root, stage["key"])
            one = (
                measure(artifact, work_of(kind[1], stage.get("inputs") or {}, tasks, images))
                if artifact
                else None
            )
            if one and one.device.startswith("cpu") == (not config.cluster.gpus_per_worker):
                found.setdefault(kind, []).append(one)
    return found


def measure(artifact: Artifact, work: tuple[float | None, int]) -> Measured | None:
    """What one result took; None where its manifest or the number of images does not say."""
    manifest, (images, epochs) = artifact.manifest, work
    wall, workers = manifest.get("wall_s"), manifest.get("workers", 1)
    device = str((manifest.get("provenance") or {}).get("device", ""))
    if not isinstance(wall, (int, float)) or not device or images is None:
        return None
    if not images:  # a backbone that is only built
        return Measured(wall * workers, 0.0, device)
    epoch_s = history_s(artifact) if epochs else None
    if epoch_s is None:
        return Measured(0.0, wall * workers / (images * max(1, epochs)), device)
    return Measured(
        max(0.0, wall - epoch_s) * workers, epoch_s * workers / (images * epochs), device
    )


def history_s(artifact: Artifact) -> float | None:
    """Seconds of all epochs together; None where there is no history."""
    if "history.parquet" not in artifact.manifest["files"]:
        return None
    try:
        rows = pq.read_table(io.BytesIO(artifact.read("history.parquet"))).to_pylist()
    except (DamagedArtifact, OSError):
        return None
    return float(sum(row.get("seconds") or 0.0 for row in rows)) or None


# ---- what is to come -----------------------------------------------------------------------------
def forecast(
    graph: Graph, config: Config, store: Store, todo: set[str], tasks: Iterable[Task]
) -> Forecast:
    """Costs of the stages `todo`."""
    images = Images(store, {s.key: s.job.card for s in graph if isinstance(s.job, IngestJob)})
    sources = measured(store, config, images)
    places = {
        t.name: (t.data, t.classes)
        for t in [
            *tasks,
            *(s.job.task for s in graph if isinstance(s.job, StageJob) and s.job.task),
        ]
    }
    costs, devices = dict[str, Cost](), set[str]()
    for stage in graph:
        if stage.id not in todo or not isinstance(stage.job, StageJob):
            continue
        work = work_of(stage.step, stage.inputs, places, images)
        basis, known = basis_of(stage, config, sources, work)
        devices |= {one.device for one in known}
        costs[stage.id] = Cost(
            stage.method or stage.step, stage.step, *work, seconds_of(known, work), basis
        )
    seconds = {
        i: cost.device_s / max(1, config.cluster.workers)
        for i, cost in costs.items()
        if cost.device_s is not None
    }
    groups = 1 if config.cluster.workers == 0 else config.cluster.groups
    unknown = tuple(
        name
        for name, (data, classes) in places.items()
        if images.of(data, classes, "train") is None
    )
    parts = {
        label: {i for i, cost in costs.items() if cost.label == label}
        for label in dict.fromkeys(c.label for c in costs.values())
    }
    walls = {
        label: wall(graph, part, seconds, groups or len(graph))
        for label, part in {**parts, "together": set(costs)}.items()
    }
    return Forecast(
        costs, max(1, config.cluster.workers), groups, walls, tuple(sorted(devices)), unknown
    )


def basis_of(
    stage: Stage,
    config: Config,
    sources: Mapping[tuple[str, str, str], list[Measured]],
    work: tuple[float | None, int],
) -> tuple[Basis, list[Measured]]:
    """What the forecast of a stage rests on, and the measurements."""
    if work[0] is None:
        return "not measured", []
    method, precision = (
        config.methods[stage.method].method if stage.method else "",
        precision_of(stage.inputs),
    )
    if same := sources.get((method, stage.step, precision)):
        return "same method", same
    others = [
        one
        for (_, step, exact), some in sources.items()
        if (step, exact) == (stage.step, precision)
        for one in some
    ]
    return ("other method", others) if others else ("not measured", [])


def seconds_of(known: list[Measured], work: tuple[float | None, int]) -> float | None:
    """Device-seconds by the medians of what is known."""
    images, epochs = work
    if not known or images is None:
        return None
    return statistics.median(one.fixed_s for one in known) + images * max(
        1, epochs
    ) * statistics.median(one.image_s for one in known)


def wall(graph: Graph, todo: set[str], seconds: Mapping[str, float], groups: int) -> float:
    """When the last stage ends, in seconds, where so many groups take stages in the order of a run;
    those that are not in `seconds` take none."""
    walk, offers = Walk.over(graph, (s.id for s in graph if s.id not in todo), 0), ReadyQueue()
    running: list[tuple[float, str]] = []
    now = 0.0
    while not walk.ended:
        for decision in walk.decide():
            walk.carry_out(decision)
            offers.append(ReadyStage(decision.depth, graph[decision.stage]))
        while len(running) < groups and (stage := offers.take()):
            heappush(running, (now + seconds.get(stage.id, 0.0), stage.id))
        now, done = heappop(running)
        walk.apply(Event(EventKind.DONE, done))
    return now


def text(found: Forecast) -> str:
    """The table that a person reads."""
    if not found.costs:
        return "cost: nothing to run"
    rows = []
    for label, wall_s in found.walls.items():
        costs = [cost for cost in found.costs.values() if label in (cost.label, "together")]
        work = sum((c.images or 0.0) * max(1, c.epochs) for c in costs)
        device_s = [c.device_s for c in costs if c.device_s is not None]
        hours = [f"{sum(device_s) / 3600:.3g}", f"{wall_s / 3600:.3g}"] if device_s else ["-", "-"]
        basis = Counter(c.basis for c in costs)
        rows.append(
            [label, str(len(costs)), f"{work:,.0f}", *hours, *(str(basis[name]) for name in BASES)]
        )
    lines = [
        table_text(
            ["cost", "stages", "images x epochs", "device-hours", "wall hours", *BASES], rows
        ),
        "",
    ]
    where = (
        "as many groups as are asked for"
        if not found.groups
        else f"{found.groups} group{'s' * (found.groups > 1)}"
    )
    missing = sum(c.device_s is None for c in found.costs.values())
    lines.append(
        f"wall hours: with {where} of {found.workers} worker{'s' * (found.workers > 1)}"
        + (f", without {missing} stages that are not measured" if missing else "")
        + "; without ingest, report and the start of Ray"
    )
    if found.devices:
        lines.append(f"measured on: {'; '.join(found.devices)}")
    if found.unknown:
        lines.append(
            "no count of images: "
            f"{', '.join(found.unknown[:5])}{' ...' if len(found.unknown) > 5 else ''}; bring "
            "the data in with "
            "`python -m pipeline ingest CONFIG`, or put `counts` on its card"
        )
    if missing:
        lines.append(
            "to measure what is not, run one task of it first, with this backbone, on this kind "
            "of device and into this storage"
        )
    return "\n".join(lines)
