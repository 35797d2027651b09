"""Measure how busy the GPUs of a run are during training, and suggest how to use them better.

The suggestion is to let several chains share a GPU. A chain is a sequence of stages that wait for
each other. Different chains can run in parallel.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pipeline.config.settings import ClusterSettings
from pipeline.graph.live_status import GpuFigure, GpuSample, read_status
from pipeline.graph.stage import Graph
from pipeline.graph.walk import Decision, Event, EventKind, Walk

BUSY = 0.5  # share of the time; below it, more chains per GPU are suggested
MEMORY_SHARE = 0.9  # share of the GPU memory that all chains on it may use together
MIN_SAMPLES = 3  # minimum number of samples of a GPU before its utilization is reported


@dataclass
class Use:
    """Sums over the samples of one GPU. Only samples taken while a stage trained count.

    Attributes:
        samples: Number of samples.
        measured: Number of samples that contain the utilization. Some GPUs do not report it.
        busy_sum: Sum of the utilization (share of the time in [0, 1]) over these samples.
        stages_sum: Sum over all samples of the number of stages in training on all GPUs.
        sampled_at: Time of the last sample, in seconds since the epoch.
        memory_bytes: Largest amount of used GPU memory.
        total_bytes: Size of the GPU memory.
        reason: Why the last sample without utilization lacks it; "" if there is no such sample.
    """

    samples: int = 0
    measured: int = 0
    busy_sum: float = 0.0
    stages_sum: int = 0
    sampled_at: float = 0.0
    memory_bytes: int = 0
    total_bytes: int = 0
    reason: str = ""

    @property
    def busy(self) -> float:
        """Mean share of the time in which the GPU computed. `measured` must not be 0."""
        return self.busy_sum / self.measured

    @property
    def stages(self) -> float:
        """Mean number of stages in training at the same time, on all GPUs."""
        return self.stages_sum / self.samples


class GpuUse:
    """Collects the samples of a run's GPUs. It is a `Watcher` of the run.

    Args:
        graph: The graph of the run.
        cluster: Resources of the workers.
        chains: Number of chains: how many stages can run in parallel.
        post: Called with the result of `figures` after each sample taken during training. Also
            called with an empty list when the first stage starts to train, because the figures of
            an earlier start of the run are out of date then.
    """

    def __init__(
        self,
        graph: Graph,
        cluster: ClusterSettings,
        chains: int,
        post: Callable[[list[GpuFigure]], None],
    ):
        self.graph = graph
        self.cluster = cluster
        self.chains = chains
        self.post = post
        self.training: set[str] = set()
        self.has_trained = False
        self.uses: dict[tuple[str, str], Use] = defaultdict(Use)  # by node and GPU number

    def progress(self, event: Event) -> None:
        """Note the start of a stage that trains, or a sample. Ignore other events."""
        if event.kind is EventKind.STARTED and self.graph[event.stage].inputs.get("train"):
            self.training.add(event.stage)
            if not self.has_trained:
                self.post([])
            self.has_trained = True
        if event.kind is EventKind.SAMPLE and self.training:
            for gpu, sample in event.body.get("gpus", {}).items():
                self._add(event.body["node"], gpu, sample)
            self.post(self.figures())

    def on_event(self, walk: Walk, event: Event) -> None:
        """Note the end of a stage. Pass a start, progress or a checkpoint on to `progress`."""
        if event.kind not in (EventKind.STARTED, EventKind.PROGRESS, EventKind.CHECKPOINT):
            self.training.discard(event.stage)
        else:
            self.progress(event)

    def on_decision(self, walk: Walk, decision: Decision) -> None:
        """Do nothing: the start event of a stage counts, not the decision to launch it."""

    def _add(self, node: str, gpu: str, sample: GpuSample) -> None:
        use = self.uses[node, gpu]
        use.samples += 1
        use.stages_sum += len(self.training)
        use.sampled_at = time.time()
        if "utilization" not in sample:
            use.reason = sample.get("reason", "it has no such figure")
            return
        use.measured += 1
        use.busy_sum += sample["utilization"]
        use.memory_bytes = max(use.memory_bytes, sample["memory_bytes"])
        use.total_bytes = sample["total_bytes"]

    def figures(self) -> list[GpuFigure]:
        """Return an entry for each GPU with enough samples, sorted by node and GPU number.

        A GPU that never reported its utilization has an entry with `reason` instead of `busy`.
        """
        figures: list[GpuFigure] = []
        for node, gpu in sorted(self.uses, key=lambda place: (place[0], len(place[1]), place[1])):
            use = self.uses[node, gpu]
            ranks = use.stages * max(1, self.cluster.workers) / len(self.uses)
            figure: GpuFigure = {
                "node": node,
                "gpu": gpu,
                "ranks": ranks,
                "sampled_at": use.sampled_at,
            }
            if use.measured >= MIN_SAMPLES:
                figures.append({**figure, "busy": use.busy, "advice": self._advice(use)})
            elif not use.measured:
                figures.append({**figure, "reason": use.reason})
        return figures

    def _advice(self, use: Use) -> str:
        """Return settings that use a GPU better, as text, or ""."""
        groups = self.count_fitting_groups(use)
        if use.busy >= BUSY or groups < 2:
            return ""
        workers = "" if self.cluster.workers else "cluster.workers=1 and "
        share = math.floor(1000 / groups) / 1000  # if it were rounded up, `groups` would not fit
        return (
            f"{workers}cluster.gpus_per_worker={share:g} trains {groups} chains in parallel, which "
            f"take about {groups * use.memory_bytes / 2**30:.1f} of its "
            f"{use.total_bytes / 2**30:.0f} GiB"
        )

    def count_fitting_groups(self, use: Use) -> int:
        """Return how many chains can train on a GPU in parallel.

        The result is the smallest of three limits: the number of chains, the number whose
        utilization adds up to at most 1, and the number that fits into the memory.
        """
        if self.cluster.gpus_per_worker < 1 or self.cluster.workers > 1:
            return 1  # the GPU is shared already, or ranks use NCCL, which needs a GPU per rank
        by_time = int(1 / max(use.busy, 0.01) + 1e-6)  # 1e-6: protects from rounding errors
        by_memory = int(MEMORY_SHARE * use.total_bytes / max(use.memory_bytes, 1))
        return min(self.chains, by_time, by_memory)


def read_gpu_use(storage: str, name: str) -> list[GpuFigure]:
    """Return the GPU figures of the last start of a run that trained stages.

    The result is empty if the run has no status file or its workers had no GPUs.
    """
    status = read_status(storage, name)
    return status.get("gpu_use", []) if status else []


def gpu_sentences(figures: Iterable[GpuFigure]) -> list[str]:
    """Describe how busy each GPU was during training, with settings that would use it better."""
    sentences = []
    for figure in figures:
        if "busy" not in figure:
            sentences.append(f"the use of a GPU was not measured: {figure.get('reason', '')}")
            continue
        sentence = (
            f"GPU {figure['gpu']} of {figure['node']} was busy {figure['busy']:.0%} of the time "
            "while stages trained"
        )
        advice = figure.get("advice")
        sentences.append(f"{sentence}; {advice}" if advice else sentence)
    return list(dict.fromkeys(sentences))
