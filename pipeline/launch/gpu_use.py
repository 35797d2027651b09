"""How busy the GPUs of a run are while its stages train, and the setting that uses them more."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from pipeline.config import ClusterSettings
from pipeline.graph.live_status import GpuSample
from pipeline.graph.stage import Graph
from pipeline.graph.walk import Decision, Event, EventKind, Walk

BUSY = 0.5  # share of the time; below it, more groups are suggested
MEMORY_SHARE = 0.9  # of a GPU, for all groups together
MIN_SAMPLES = 3


@dataclass
class Use:
    """The samples of one GPU while stages trained.

    busy: shares of the time in which the GPU computed. memory_bytes: largest use of its memory.
    """

    busy: list[float] = field(default_factory=list)
    memory_bytes: int = 0
    total_bytes: int = 0


class GpuUse:
    """Collects the samples of a run's GPUs.

    Args:
        graph: of the run.
        cluster: resources of its workers.
        chains: number of stages that can run beside each other.
    """

    def __init__(self, graph: Graph, cluster: ClusterSettings, chains: int):
        self.graph = graph
        self.cluster = cluster
        self.chains = chains
        self.training: set[str] = set()
        self.uses: dict[tuple[str, str], Use] = defaultdict(Use)  # by node and number of the GPU
        self.reasons: dict[str, None] = {}  # why there is no figure; an ordered set

    def progress(self, event: Event) -> None:
        """Note that a stage starts, or a sample."""
        if event.kind is EventKind.STARTED and self.graph[event.stage].inputs.get("train"):
            self.training.add(event.stage)
        if event.kind is EventKind.SAMPLE and self.training:
            for gpu, sample in event.body.get("gpus", {}).items():
                self._add(event.body["node"], gpu, sample)

    def on_event(self, walk: Walk, event: Event) -> None:
        """Note that a stage has ended."""
        if event.kind not in (EventKind.STARTED, EventKind.PROGRESS, EventKind.CHECKPOINT):
            self.training.discard(event.stage)
        else:
            self.progress(event)

    def on_decision(self, walk: Walk, decision: Decision) -> None:
        """Do nothing: a stage trains once it has started."""

    def _add(self, node: str, gpu: str, sample: GpuSample) -> None:
        if "utilization" not in sample:
            self.reasons[sample.get("reason", "it has no such figure")] = None
            return
        use = self.uses[node, gpu]
        use.busy.append(sample["utilization"])
        use.memory_bytes = max(use.memory_bytes, sample["memory_bytes"])
        use.total_bytes = sample["total_bytes"]

    def sentences(self) -> list[str]:
        """Return how busy each GPU was while stages trained, and the setting that uses it more."""
        lines = [f"the use of a GPU was not measured: {reason}" for reason in self.reasons]
        for (node, gpu), use in self.uses.items():
            if len(use.busy) >= MIN_SAMPLES:
                lines.append(self._sentence(node, gpu, use))
        return lines

    def _sentence(self, node: str, gpu: str, use: Use) -> str:
        busy = sum(use.busy) / len(use.busy)
        text = f"GPU {gpu} of {node} was busy {busy:.0%} of the time while stages trained"
        groups = self.groups_that_fit(use)
        if busy >= BUSY or groups < 2:
            return text
        workers = "" if self.cluster.workers else "cluster.workers=1 and "
        return (
            f"{text}; {workers}cluster.gpus_per_worker={1 / groups:.2g} trains {groups} chains "
            f"beside each other, which take about {groups * use.memory_bytes / 2**30:.1f} of its "
            f"{use.total_bytes / 2**30:.0f} GiB"
        )

    def groups_that_fit(self, use: Use) -> int:
        """Return how many chains may train beside each other on a GPU, by time and by memory."""
        if self.cluster.gpus_per_worker < 1 or self.cluster.workers > 1:
            return 1  # it is shared, or its ranks talk by NCCL, which takes whole GPUs
        busy = sum(use.busy) / len(use.busy)
        by_time = int(1 / max(busy, 0.01) + 1e-6)  # 1 / 0.2 is less than 5
        by_memory = int(MEMORY_SHARE * use.total_bytes / max(use.memory_bytes, 1))
        return min(self.chains, by_time, by_memory)
