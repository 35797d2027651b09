"""Tests of the reported GPU use: the figures, the advice, and the outputs that show them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.app import runs as app
from pipeline.cli import main
from pipeline.graph import journal
from pipeline.graph.gpu_use import GpuUse, gpu_sentences, read_gpu_use
from pipeline.graph.journal import Journal, TimeLeft
from pipeline.graph.live_status import GpuFigure, GpuSample, MachineSample, read_status
from pipeline.graph.run import look_up_all
from pipeline.graph.walk import Event, EventKind
from pipeline.launch import machine
from pipeline.launch.shares import compute_ranks_per_gpu
from pipeline.report.html_parts import render_macro
from pipeline.tracking import mlflow_client
from tests import small_run
from workers.data import accelerator

GIB = 1 << 30


def make_use(folder: Path, chains: int = 8, **cluster: Any) -> GpuUse:
    cards = small_run.make_cards(folder, ("base", "a"))
    body = small_run.make_body(
        folder, cards, ("finetune",), cluster={"workers": 1, "gpus_per_worker": 1, **cluster}
    )
    run = app.prepare(small_run.write_config(folder / "run.yaml", body))
    return GpuUse(run.graph, run.config.cluster, chains, lambda figures: None)


def feed(use: GpuUse, *shares: float, used: int = 3) -> None:
    """Post one sample of an 80 GiB GPU for each of these utilizations (0 to 1)."""
    for share in shares:
        sample: GpuSample = {
            "memory_bytes": used * GIB,
            "total_bytes": 80 * GIB,
            "utilization": share,
        }
        body = {"node": "n1", "gpus": {"0": sample}}
        use.progress(Event(EventKind.SAMPLE, "", body=body))


def sentences_of(use: GpuUse) -> list[str]:
    return gpu_sentences(use.figures())


def start(use: GpuUse, stage: str = "finetune/a/train") -> None:
    use.progress(Event(EventKind.STARTED, stage))


def test_samples_count_only_while_a_stage_trains(tmp_path: Path) -> None:
    use = make_use(tmp_path)
    feed(use, 0.0, 0.0, 0.0)
    start(use, "finetune/a/evaluate")
    feed(use, 0.0, 0.0, 0.0)
    assert sentences_of(use) == []
    start(use)
    feed(use, 0.6, 0.7, 0.8)
    use.on_event(None, Event(EventKind.DONE, "finetune/a/train"))  # type: ignore[arg-type]
    feed(use, 0.0)
    assert sentences_of(use) == ["GPU 0 of n1 was busy 70% of the time while stages trained"]


@pytest.mark.parametrize(
    ("chains", "used", "cluster", "expected"),
    [
        (8, 3, {}, "cluster.gpus_per_worker=0.2 trains 5 chains in parallel, which take "
         "about 15.0 of its 80 GiB"),
        (4, 3, {}, "cluster.gpus_per_worker=0.25 trains 4 chains"),  # the run has only 4
        (8, 30, {}, "cluster.gpus_per_worker=0.5 trains 2 chains"),  # only 2 fit
        (8, 60, {}, ""),
        (1, 3, {}, ""),
        (8, 3, {"gpus_per_worker": 0.5}, ""),
        (8, 3, {"workers": 2}, ""),
        (8, 3, {"workers": 0}, "cluster.workers=1 and cluster.gpus_per_worker=0.2 trains"),
    ],
)  # fmt: skip
def test_idle_gpu_gets_advice_to_train_more_chains(
    tmp_path: Path, chains: int, used: int, cluster: dict[str, Any], expected: str
) -> None:
    use = make_use(tmp_path, chains, **cluster)
    start(use)
    feed(use, 0.1, 0.2, 0.3, used=used)
    (sentence,) = sentences_of(use)
    assert sentence.startswith("GPU 0 of n1 was busy 20% of the time while stages trained")
    assert expected in sentence
    assert bool(expected) == ("; " in sentence)


class Gpu:
    """A GPU that does not report its utilization."""

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
def test_missing_utilization_is_explained(
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
    assert sentences_of(use) == [f"the use of a GPU was not measured: {reason}"]


def test_suggested_gpu_share_allows_the_stated_number_of_chains(tmp_path: Path) -> None:
    for chains in range(2, 31):
        use = make_use(tmp_path, chains)
        start(use)
        feed(use, 0.0, 0.0, 0.0, used=1)
        (figure,) = use.figures()
        share, text = figure["advice"].removeprefix("cluster.gpus_per_worker=").split(" trains ")
        assert text.startswith(f"{chains} chains")
        assert compute_ranks_per_gpu(float(share)) == chains


def test_ranks_on_a_gpu_are_counted_while_stages_train(tmp_path: Path) -> None:
    use = make_use(tmp_path, gpus_per_worker=0.5)
    start(use)
    feed(use, 0.4)
    start(use, "backbone")
    feed(use, 0.8, 0.8)
    (figure,) = use.figures()
    assert figure["ranks"] == pytest.approx(5 / 3)
    assert figure["busy"] == pytest.approx(2 / 3)


# ---- places that show the figures ----------------------------------------------------------------
SENTENCE = "was busy 20% of the time while stages trained"
ADVICE = "; cluster.workers=1 and cluster.gpus_per_worker=0.5 trains 2 chains"
REASON = "the use of a GPU was not measured: its driver says Not Supported"


def run_with_samples(
    folder: Path, monkeypatch: pytest.MonkeyPatch, gpus: dict[str, GpuSample]
) -> str:
    """Run a config on a machine that reports these GPUs, and return the path of the config."""

    def sample(device: torch.device) -> MachineSample:
        return {"node": "n1", "gpus": dict(gpus)}

    monkeypatch.setattr(machine, "sample_machine", sample)
    monkeypatch.setattr(machine, "SAMPLE_S", 0.01)
    monkeypatch.setattr(journal, "WRITE_S", 600.0)  # no periodic writes
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    cards = small_run.make_cards(folder, ("base", "a"))
    tracking = {"enabled": True, "system_metrics": True, "models": False}
    body = {**small_run.make_body(folder, cards, ("finetune",)), "tracking": tracking}
    path = small_run.write_config(folder / "run.yaml", body)
    assert main(["run", path]) == 0
    return path


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert main([*arguments]) == 0
    return capsys.readouterr().out


def recorded(storage: str) -> tuple[dict[str, float], dict[str, str]]:
    """Return the GPU metrics and the tags of a run in MLflow."""
    client, _, experiment = mlflow_client.open_store(storage)
    (run,) = client.search_runs([experiment], "tags.`accrete.kind` = 'run'")
    metrics = {name: v for name, v in run.data.metrics.items() if name.startswith("gpu_busy")}
    return metrics, run.data.tags


@pytest.mark.usefixtures("small_pictures")
def test_gpu_use_is_shown_in_status_report_and_mlflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes: GpuSample = {"memory_bytes": 3 * GIB, "total_bytes": 80 * GIB}
    gpus: dict[str, GpuSample] = {
        "10": {**sizes, "utilization": 0.7},
        "3": {**sizes, "utilization": 0.2},
        "7": {**sizes, "reason": "its driver says Not Supported"},
    }
    monkeypatch.setattr(GpuUse, "count_fitting_groups", lambda self, use: 2)
    path = run_with_samples(tmp_path, monkeypatch, gpus)
    storage = tmp_path / "storage"
    status = read_status(str(storage), "small")
    assert status is not None
    figures = {figure["gpu"]: figure for figure in status["gpu_use"]}
    texts = {
        "terminal": capsys.readouterr().out,
        "status": output(capsys, "status", path),
        "report": (storage / "runs" / "small" / "report.html").read_text(),
    }
    metrics, tags = recorded(str(storage))
    texts["tag"] = tags["gpu_use"]
    for place, text in texts.items():
        assert f"GPU 3 of n1 {SENTENCE}{ADVICE}" in text, place
        assert "GPU 10 of n1 was busy 70% of the time" in text, place
        assert REASON in text, place
    assert metrics == {"gpu_busy/0": 0.2, "gpu_busy/2": 0.7}
    assert "advice" not in figures["7"]


@pytest.mark.slow
@pytest.mark.usefixtures("small_pictures")
def test_run_without_gpus_does_not_mention_gpu_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run_with_samples(tmp_path, monkeypatch, {})
    storage = tmp_path / "storage"
    assert "gpu_use" not in (read_status(str(storage), "small") or {})
    assert "GPU" not in output(capsys, "status", path)
    page = (storage / "runs" / "small" / "report.html").read_text()
    assert "Use of the GPUs" not in page
    metrics, tags = recorded(str(storage))
    assert metrics == {}
    assert "gpu_use" not in tags


def test_gpu_use_is_kept_until_a_stage_trains_again(tmp_path: Path) -> None:
    cards = small_run.make_cards(tmp_path, ("base", "a"))
    body = small_run.make_body(tmp_path, cards, ("finetune",))
    run = app.prepare(small_run.write_config(tmp_path / "run.yaml", body))
    graph = run.graph
    lookups = look_up_all(graph, run.store, None)

    def open_journal() -> Journal:
        opened = Journal(
            run.store, graph, lookups, {*graph.stages}, "", lambda stages: TimeLeft(None, 0)
        )
        opened.start()
        return opened

    def stored() -> list[GpuFigure]:
        status = read_status(run.store.storage, graph.name)
        assert status is not None
        return status.get("gpu_use", [])

    first = open_journal()
    use = GpuUse(graph, run.config.cluster, 2, first.set_gpu_use)
    start(use)
    feed(use, 0.2, 0.2, 0.2)
    first.end("stopped")
    assert [figure["busy"] for figure in stored()] == [pytest.approx(0.2)]
    second = open_journal()
    use = GpuUse(graph, run.config.cluster, 2, second.set_gpu_use)
    start(use, "finetune/a/evaluate")
    second.save()
    assert len(stored()) == 1
    start(use)
    second.save()
    assert stored() == []
    feed(use, 0.6, 0.6, 0.6)
    second.end("stopped")
    assert [figure["busy"] for figure in stored()] == [pytest.approx(0.6)]


@pytest.mark.parametrize(
    "figures",
    [3, ["x"], [{"node": "n"}], [{"node": "n", "gpu": "0", "busy": "much"}]],
)
def test_status_with_damaged_gpu_use_is_ignored(tmp_path: Path, figures: Any) -> None:
    status: dict[str, Any] = {
        "name": "r",
        "state": "finished",
        "left_s": None,
        "stages": {},
        **dict.fromkeys(("host", "command"), ""),
        **dict.fromkeys(("pid", "started", "updated", "left_without"), 0),
    }
    path = tmp_path / "runs" / "r" / "status.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(status))
    assert read_gpu_use(str(tmp_path), "r") == []
    assert read_status(str(tmp_path), "r") is not None
    path.write_text(json.dumps({**status, "gpu_use": figures}))
    assert read_status(str(tmp_path), "r") is None


def test_node_names_are_escaped_in_gpu_use() -> None:
    figure: GpuFigure = {"node": "<b>", "gpu": "0", "busy": 0.5, "advice": ""}
    assert "GPU 0 of &lt;b&gt; was busy 50%" in render_macro("gpu_use", gpu_sentences([figure]))
