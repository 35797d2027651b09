"""A run says how busy its GPUs were while stages trained, and what would use them more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline import app
from pipeline.graph.live_status import GpuSample
from pipeline.graph.walk import Event, EventKind
from pipeline.launch import machine
from pipeline.launch.gpu_use import GpuUse
from tests import small_run
from workers.data import accelerator

GIB = 1 << 30


def make_use(folder: Path, chains: int = 8, **cluster: Any) -> GpuUse:
    cards = small_run.make_cards(folder, ("base", "a"))
    body = small_run.make_body(
        folder, cards, ("finetune",), cluster={"workers": 1, "gpus_per_worker": 1, **cluster}
    )
    run = app.prepare(small_run.write_config(folder / "run.yaml", body))
    return GpuUse(run.graph, run.config.cluster, chains)


def feed(use: GpuUse, *shares: float, used: int = 3) -> None:
    """Post a sample for each share of the time that a GPU of 80 GiB was busy."""
    for share in shares:
        sample: GpuSample = {
            "memory_bytes": used * GIB,
            "total_bytes": 80 * GIB,
            "utilization": share,
        }
        body = {"node": "n1", "gpus": {"0": sample}}
        use.progress(Event(EventKind.SAMPLE, "", body=body))


def start(use: GpuUse, stage: str = "finetune/a/train") -> None:
    use.progress(Event(EventKind.STARTED, stage))


def test_samples_count_while_a_stage_trains(tmp_path: Path) -> None:
    use = make_use(tmp_path)
    feed(use, 0.0, 0.0, 0.0)
    start(use, "finetune/a/evaluate")
    feed(use, 0.0, 0.0, 0.0)
    assert use.sentences() == []
    start(use)
    feed(use, 0.6, 0.7, 0.8)
    use.on_event(None, Event(EventKind.DONE, "finetune/a/train"))  # type: ignore[arg-type]
    feed(use, 0.0)
    assert use.sentences() == ["GPU 0 of n1 was busy 70% of the time while stages trained"]


@pytest.mark.parametrize(
    ("chains", "used", "cluster", "expected"),
    [
        (8, 3, {}, "cluster.gpus_per_worker=0.2 trains 5 chains beside each other, which take "
         "about 15.0 of its 80 GiB"),
        (4, 3, {}, "cluster.gpus_per_worker=0.25 trains 4 chains"),  # there are no more
        (8, 30, {}, "cluster.gpus_per_worker=0.5 trains 2 chains"),  # no more fit
        (8, 60, {}, ""),
        (1, 3, {}, ""),
        (8, 3, {"gpus_per_worker": 0.5}, ""),
        (8, 3, {"workers": 2}, ""),
        (8, 3, {"workers": 0}, "cluster.workers=1 and cluster.gpus_per_worker=0.2 trains"),
    ],
)  # fmt: skip
def test_an_idle_gpu_is_offered_more_chains(
    tmp_path: Path, chains: int, used: int, cluster: dict[str, Any], expected: str
) -> None:
    use = make_use(tmp_path, chains, **cluster)
    start(use)
    feed(use, 0.1, 0.2, 0.3, used=used)
    (sentence,) = use.sentences()
    assert sentence.startswith("GPU 0 of n1 was busy 20% of the time while stages trained")
    assert expected in sentence
    assert bool(expected) == ("; " in sentence)


class Gpu:
    """A GPU whose use cannot be read."""

    def __init__(self, error: Exception):
        self.error = error

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 5, 9

    def utilization(self, device: torch.device) -> int:
        raise self.error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ImportError("pynvml"), "nvidia-ml-py is not installed (`pip install nvidia-ml-py`)"),
        (RuntimeError("Not Supported"), "its driver says Not Supported"),
    ],
)
def test_a_figure_that_is_missing_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    monkeypatch.setattr(accelerator, "functions", lambda: Gpu(error))
    monkeypatch.setattr(machine, "functions", lambda: Gpu(error))
    sample = machine.sample_gpu(torch.device("cuda", 0))
    assert sample == {"memory_bytes": 4, "total_bytes": 9, "reason": reason}
    use = make_use(tmp_path)
    start(use)
    for _ in range(3):
        use.progress(Event(EventKind.SAMPLE, "", body={"node": "n", "gpus": {"0": sample}}))
    assert use.sentences() == [f"the use of a GPU was not measured: {reason}"]
