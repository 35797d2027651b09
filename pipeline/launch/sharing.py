"""Model the slowdown of ranks that share a GPU.

A rank with its own GPU keeps the GPU busy for a certain share of the time. Earlier runs measure
this share (`pipeline.graph.gpu_use`). If several ranks share a GPU and their shares add up to at
most 1, they run at full speed. Otherwise, each rank gets an equal part of the GPU time. If no run
has measured the share, it is assumed to be 1: the GPU time is divided, and sharing saves nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from pydantic import ValidationError

from pipeline.config.settings import ClusterSettings
from pipeline.graph.gpu_use import read_gpu_use
from pipeline.launch.shares import compute_ranks_per_gpu


class Busy(NamedTuple):
    """How busy one rank keeps its own GPU.

    Attributes:
        share: Share of the time in which the GPU is busy.
        run: Name of the run that measured the share; empty if no run did.
    """

    share: float
    run: str


ALWAYS_BUSY = Busy(1.0, "")


@dataclass(frozen=True)
class Sharing:
    """The stages of a run that share GPUs.

    Attributes:
        stages: Ids of these stages.
        ranks: Maximum number of ranks on one GPU at a time.
        workers: Number of ranks of a stage.
        busy: How busy one rank keeps a GPU.
    """

    stages: frozenset[str]
    ranks: int
    workers: int
    busy: Busy

    def stretch(self, running: int) -> float:
        """Return the slowdown factor of the stages that share GPUs, while `running` of them run.

        The ranks of these stages are assumed to fill one GPU before they use the next one.
        """
        return stretch(min(running * self.workers, self.ranks), self.busy)

    def gpu_part(self, stage_id: str) -> float:
        """Return the factor from the time of a rank on its own GPU to its part of a shared GPU.

        If the stage shares GPUs, its GPU is assumed to have the maximum number of ranks. If for
        example 4 ranks share a GPU at full speed, each rank accounts for 1/4 of its time. For a
        stage that shares no GPU, the factor is 1.
        """
        if stage_id not in self.stages:
            return 1.0
        return stretch(self.ranks, self.busy) / self.ranks


NOT_SHARED = Sharing(frozenset(), 1, 1, ALWAYS_BUSY)


def stretch(ranks: float, busy: Busy) -> float:
    """Return the slowdown factor, at least 1, of each rank if `ranks` ranks share a GPU."""
    return max(1.0, ranks * busy.share)


def find_sharing(cluster: ClusterSettings, steps: Mapping[str, str], busy: Busy) -> Sharing:
    """Find the stages of a run that share GPUs.

    Args:
        cluster: Settings with the resources of the workers.
        steps: Id of a stage -> kind of the stage.
        busy: How busy one rank keeps a GPU.
    """
    ranks = {
        stage_id: count_ranks_per_gpu(cluster.of_step(step)) for stage_id, step in steps.items()
    }
    shared = frozenset(stage_id for stage_id, number in ranks.items() if number > 1)
    return Sharing(shared, max(ranks.values(), default=1), max(1, cluster.workers), busy)


def count_ranks_per_gpu(cluster: ClusterSettings) -> int:
    """Return the maximum number of ranks of a run on one GPU at a time, at least 1."""
    if not cluster.workers:  # without Ray, one process runs one stage at a time
        return 1
    ranks = compute_ranks_per_gpu(cluster.gpus_per_worker)
    return min(ranks, cluster.groups * cluster.workers) if cluster.groups else ranks


def shares_gpus(cluster: ClusterSettings) -> bool:
    """Return whether the ranks of at least one kind of stage share a GPU."""
    kinds = [cluster, *(cluster.of_step(step) for step in cluster.stages)]
    return any(count_ranks_per_gpu(kind) > 1 for kind in kinds)


# ---- earlier runs --------------------------------------------------------------------------------
def read_cluster(record: Mapping[str, Any]) -> ClusterSettings:
    """Return the cluster settings of a recorded run, or the defaults if its record is invalid."""
    try:
        return ClusterSettings.model_validate((record.get("config") or {}).get("cluster") or {})
    except ValidationError:
        return ClusterSettings()


def find_busy(storage: str, names: Iterable[str]) -> Busy:
    """Return how busy one rank keeps a GPU, from the first of these runs that has measured it.

    If several ranks together kept the GPU fully busy, the result is a lower bound for one rank.

    Args:
        storage: URI of the storage.
        names: Names of runs.
    """
    for name in names:
        figures = [figure for figure in read_gpu_use(storage, name) if "busy" in figure]
        ranks = fmean(figure.get("ranks", 0.0) for figure in figures) if figures else 0.0
        if ranks > 0:
            return Busy(min(1.0, fmean(figure["busy"] for figure in figures) / ranks), name)
    return ALWAYS_BUSY


def read_ranks_per_gpu(storage: str, name: str, cluster: ClusterSettings) -> float:
    """Return the average number of ranks that trained on a GPU at a time in an earlier run.

    If the run has not recorded this number, return the largest possible number.

    Args:
        storage: URI of the storage.
        name: Name of the run.
        cluster: Cluster settings of the run.
    """
    max_ranks = count_ranks_per_gpu(cluster)
    ranks = [figure.get("ranks", max_ranks) for figure in read_gpu_use(storage, name)]
    return min(max_ranks, fmean(ranks)) if ranks else max_ranks
