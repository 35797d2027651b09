"""Tests of `plan --cost`: forecasts from measurements, calibration and formulas."""

import io
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from benchmarks import stream
from pipeline.app import runs as app
from pipeline.cli import main
from pipeline.config import settings as config
from pipeline.graph import build
from pipeline.graph.live_status import GpuFigure, LiveStatus, write_status
from pipeline.graph.run import look_up_all, stages_to_run
from pipeline.graph.run_record import make_record
from pipeline.graph.stage import Graph, Stage
from pipeline.graph.store import Store
from pipeline.launch import cost, speed
from pipeline.launch.sharing import Busy, Sharing
from pipeline.launch.wall_time import wall_time
from tests import small_run
from workers.errors import UserError
from workers.job import StageJob
from workers.model import vit
from workers.model.compact import count_multiply_adds
from workers.storage.artifact import Attempt

CPU, GPU = "cpu (x86_64, 2 cores)", "NVIDIA H100"
TRAIN = 36  # training images of a task: 2 x 20, less the 10 % held out
TEST = 20


class Site(NamedTuple):
    """A folder with a storage, and the paths of the cards by task name."""

    folder: Path
    cards: dict[str, str]


@pytest.fixture(scope="module")
def ingested(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """Create a store that contains only the ingested data of three tasks."""
    folder = tmp_path_factory.mktemp("forecast")
    cards = small_run.make_cards(folder, ("base", "a", "b"))
    store, graph, _, _ = planned(folder, cards)
    stream.ingest(store, graph)
    return Site(folder, cards)


def planned(
    folder: Path, cards: dict[str, str], methods: Sequence[str] = ("finetune",), **changes: Any
) -> Any:
    checked = config.check(
        {**small_run.make_body(folder, cards, methods, **changes), "data": {"val_fraction": 0.1}},
        "a config",
    )
    store = Store(checked.storage)
    return store, *build.build_graph(checked, store), checked


def finished(
    folder: Path,
    cards: dict[str, str],
    methods: Sequence[str] = ("finetune",),
    wall_s: float = 10.0,
    epoch_s: float = 3.0,
    workers: int = 1,
    device: str = CPU,
    **changes: Any,
) -> None:
    """Publish results as if all stages had run.

    wall_s: wall seconds of each stage. epoch_s: seconds of each epoch.
    """
    store, graph, tasks, checked = planned(folder, cards, methods, **changes)
    for stage in graph:
        if isinstance(stage.job, StageJob):
            attempt = Attempt(store.root, stage.key)
            if stage.inputs.get("train"):
                rows = [
                    {"epoch": e, "seconds": epoch_s} for e in range(stage.inputs["train"]["epochs"])
                ]
                sink = io.BytesIO()
                pq.write_table(pa.Table.from_pylist(rows), sink)
                attempt.write("history.parquet", sink.getvalue())
            attempt.commit(
                {
                    "kind": stage.step,
                    "wall_s": wall_s,
                    "workers": workers,
                    "provenance": {"device": device},
                }
            )
    store.save_record(make_record(graph, checked, tasks, {}))


def device_seconds(prediction: cost.Forecast, label: str = "") -> float:
    """Return the device seconds of the stages with a label, or of all stages."""
    total = 0.0
    for stage in prediction.costs.values():
        if label in ("", stage.label):
            assert stage.device_s is not None
            total += stage.device_s
    return total


def costs(
    folder: Path, cards: dict[str, str], methods: Sequence[str] = ("finetune",), **changes: Any
) -> cost.Forecast:
    store, graph, tasks, checked = planned(folder, cards, methods, **changes)
    todo = stages_to_run(graph, look_up_all(graph, store, None))
    return cost.forecast(graph, checked, store, todo, tasks)


@pytest.fixture
def site(ingested: Site, tmp_path: Path) -> Site:
    """Return the cards of `ingested` with a copy of their data in a new storage."""
    shutil.copytree(ingested.folder / "storage", tmp_path / "storage")
    return Site(tmp_path, ingested.cards)


def test_doubled_epochs_double_only_the_epoch_time(site: Site) -> None:
    finished(*site, wall_s=10.0, epoch_s=3.0)  # 2 epochs take 6 s of the 10 s
    prediction = costs(*site, name="next", train={"epochs": 4})
    stage = prediction.costs["finetune/a/train"]
    assert (stage.images, stage.epochs, stage.basis) == (TRAIN, 4, "same method")
    assert stage.device_s == pytest.approx(4 + 4 * 3)
    assert prediction.devices == (CPU,)


def test_worker_count_changes_wall_time_but_not_device_seconds(site: Site) -> None:
    finished(*site, wall_s=10.0, epoch_s=3.0, workers=3)
    prediction = costs(*site, name="next", train={"epochs": 4}, cluster={"workers": 2, "groups": 1})
    assert prediction.costs["finetune/a/train"].device_s == pytest.approx(3 * 16)
    assert prediction.walls["together"].expected == pytest.approx(device_seconds(prediction) / 2)


class KnownImages(cost.Images):
    """Image counts read from the keys of tasks (`train/val`)."""

    def of(self, data: cost.TaskData, split: str) -> float | None:
        return float(data.key.split("/")[("train", "val").index(split)])


def test_tasks_with_validation_images_hold_out_no_training_images(tmp_path: Path) -> None:
    images = KnownImages(Store(str(tmp_path)))
    tasks = {"own": cost.TaskData("100/30", {}), "plain": cost.TaskData("100/0", {})}
    trained = {
        name: cost.count_work(
            "train",
            {"method": "finetune", "task": name, "data": {"val_fraction": 0.2}},
            tasks,
            images,
        ).images
        for name in tasks
    }
    assert trained == {"own": 100, "plain": 80}
    seen: list[tuple[str, list[str]]] = [(name, []) for name in tasks]
    inputs = {"split": "val", "val_fraction": 0.2, "seen": seen}
    assert cost.count_work("evaluate", inputs, tasks, images).images == 30 + 20


def test_evaluation_forecast_counts_test_images_of_all_evaluated_tasks(site: Site) -> None:
    # 20, 40 and 60 images in 10 s each: the median is 4 images per second
    finished(*site, wall_s=10.0)
    prediction = costs(*site, name="next", train={"epochs": 4})
    stage = prediction.costs["finetune/b/evaluate"]
    assert stage.images == 3 * TEST
    assert stage.device_s == pytest.approx(60 / 4)


def test_missing_measurements_fall_back_to_other_method_then_formula(
    site: Site,
) -> None:
    finished(*site)
    prediction = costs(*site, ("packnet",), name="next")
    assert prediction.costs["packnet/a/train"].basis == "other method"
    assert prediction.costs["packnet/a/evaluate"].basis == "other method"
    assert prediction.costs["packnet/a/prune"].basis == "formula"
    output = cost.format_forecast(prediction)
    assert "ranges: times or divided by other method 2, formula 5" in output
    assert "a run of one task" in output


def test_forecast_for_fresh_storage_uses_backbone_flops(site: Site) -> None:
    cluster = {"workers": 2, "groups": 1, "cpus_per_worker": 1}
    methods = ("finetune", "linear", "toast")
    prediction = costs(*site, methods, cluster=cluster, train={"epochs": 4})
    assert {stage.basis for stage in prediction.costs.values()} == {"formula"}
    graph = planned(*site)[1]
    job = graph["finetune/a/train"].job
    flops = 2 * count_multiply_adds(vit.outline(job.backbone_settings), 3, 16, 16)
    forward_s = flops / speed.CORE_FLOPS
    seconds = {stage_id: stage.device_s for stage_id, stage in prediction.costs.items()}
    image_s = speed.READ_S + 3 * forward_s
    assert seconds["finetune/a/train"] == pytest.approx(cost.STAGE_S + 4 * TRAIN * image_s)
    # TOAST's second pass runs in every epoch
    assert seconds["toast/a/train"] == seconds["finetune/a/train"]
    image_s = speed.READ_S + forward_s
    assert seconds["finetune/a/evaluate"] == pytest.approx(cost.STAGE_S + 2 * TEST * image_s)
    # features of a frozen backbone are computed once
    assert seconds["linear/a/train"] == pytest.approx(cost.STAGE_S + TRAIN * image_s)
    together = prediction.walls["together"]
    assert together.low == pytest.approx(together.expected / 5)
    assert together.high == pytest.approx(together.expected * 5)
    output = cost.format_forecast(prediction)
    assert f"formula: {flops / 1e9:.3g} GFLOP" in output
    assert "30 GFLOP/s (CPU, 1 core, fp32)" in output


def test_features_that_methods_share_are_forecast_once(site: Site) -> None:
    cards = {name: card for name, card in site.cards.items() if name != "base"}
    prediction = costs(site.folder, cards, ("ncm", "simplecil"))
    seconds = {stage_id: stage.device_s for stage_id, stage in prediction.costs.items()}
    assert seconds["ncm/a/statistics"] == seconds["simplecil/a/statistics"] == cost.STAGE_S
    shared = seconds["features/a"]
    assert shared is not None
    assert shared > cost.STAGE_S


def test_augmented_linear_method_computes_features_in_every_epoch(site: Site) -> None:
    body = small_run.make_body(*site, ("linear",), train={"epochs": 4})
    image_s = []
    for flip in (False, True):
        checked = config.check({**body, "data": {"val_fraction": 0.1, "flip": flip}}, "a config")
        store = Store(checked.storage)
        graph, tasks = build.build_graph(checked, store)
        prediction = cost.forecast(graph, checked, store, {"linear/a/train"}, tasks)
        device_s = prediction.costs["linear/a/train"].device_s
        assert device_s is not None
        image_s.append((device_s - cost.STAGE_S) / TRAIN)
    assert image_s[1] == pytest.approx(4 * image_s[0])


def test_a_calibration_replaces_the_formula(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def time_steps(settings: Any, device: Any, precision: str) -> tuple[float, float]:
        asked.append((settings.img_size, device.type, precision))
        return 0.03, 0.01

    monkeypatch.setattr(speed, "time_steps", time_steps)
    store, graph, tasks, checked = planned(*site)
    todo = stages_to_run(graph, look_up_all(graph, store, None))
    prediction = cost.forecast(graph, checked, store, todo, tasks, calibrate=True)
    assert asked == [(16, "cpu", "fp32")], "one calibration for all stages of a kind"
    stage = prediction.costs["finetune/a/train"]
    assert stage.basis == "calibration"
    epochs = checked.train.epochs
    expected = cost.STAGE_S + TRAIN * epochs * (0.03 + speed.READ_S)
    assert stage.device_s == pytest.approx(expected)
    assert "calibration: cpu (" in cost.format_forecast(prediction)


def test_a_calibration_takes_a_few_steps_of_the_real_backbone(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "CALIBRATION_S", 0.0)
    graph = planned(*site)[1]
    job = graph["finetune/a/train"].job
    train_s, forward_s = speed.time_steps(job.backbone_settings, torch.device("cpu"), "bf16")
    assert train_s > 0
    assert forward_s > 0


def test_gpu_calibration_is_refused_without_a_gpu(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    store, graph, tasks, checked = planned(*site, cluster={"workers": 1, "gpus_per_worker": 1})
    with pytest.raises(UserError, match="this machine, which has no GPU"):
        cost.forecast(graph, checked, store, set(graph.stages), tasks, calibrate=True)
    prediction = cost.forecast(graph, checked, store, set(graph.stages), tasks)
    assert "15000 GFLOP/s (GPU, fp32)" in cost.format_forecast(prediction)


@pytest.mark.parametrize(
    "change",
    [{"backbone": {"img_size": 24}}, {"train": {"precision": "bf16"}}, {"device": GPU}],
    ids=["backbone", "precision", "device"],
)
def test_measurements_with_other_settings_are_ignored(site: Site, change: Any) -> None:
    finished(*site, **change)
    prediction = costs(*site, name="next", train={"epochs": 4})
    assert prediction.costs["finetune/a/train"].basis == "formula"
    assert prediction.costs["finetune/a/train"].images == TRAIN


def test_cost_is_measured_on_configured_device(site: Site) -> None:
    finished(*site)  # on a CPU
    cluster = {"workers": 1, "gpus_per_worker": 1, "stages": {"evaluate": {"gpus": 0}}}
    prediction = costs(*site, name="next", train={"epochs": 4}, cluster=cluster)
    assert prediction.costs["finetune/a/evaluate"].basis == "same method"
    assert prediction.costs["finetune/a/train"].basis == "formula"


def test_uningested_images_are_counted_from_card_or_source_files(
    site: Site, tmp_path: Path
) -> None:
    finished(*site)
    counts = {"train": 40, "test": 20}
    cards = {
        **site[1],
        "b": small_run.make_card(tmp_path, "b", "45", counts=counts),
        "a": small_run.make_card(tmp_path, "other", "23"),
    }
    listed = costs(tmp_path, cards, name="next")
    assert listed.costs["finetune/a/train"].images == pytest.approx(TRAIN), (
        "counted by listing its files"
    )
    assert listed.costs["finetune/b/evaluate"].images == pytest.approx(3 * TEST)
    shutil.rmtree(tmp_path / "raw" / "other")
    prediction = costs(tmp_path, cards, name="next")
    assert prediction.costs["finetune/b/train"].images == pytest.approx(36)
    assert prediction.costs["finetune/a/train"].images is None
    assert prediction.costs["finetune/a/train"].basis == "unknown"
    assert prediction.unknown == ("a",)
    assert "no count of images: a; ingest the data" in cost.format_forecast(prediction)


def test_a_joint_training_counts_all_tasks_so_far(site: Site) -> None:
    prediction = costs(*site, ("joint",), name="next")
    images = [
        stage.images
        for stage_id, stage in prediction.costs.items()
        if stage_id.endswith("/b/train")
    ]
    assert images
    assert all(count is not None and count > TRAIN for count in images)


def test_only_stars_get_faster_with_more_groups(site: Site) -> None:
    finished(*site, ("linear", "finetune"), wall_s=10.0, epoch_s=5.0)

    def wall(method: Any, groups: Any) -> Any:
        return (
            costs(
                *site,
                (method,),
                name="next",
                train={"epochs": 20},
                cluster={"workers": 1, "groups": groups},
            )
            .walls["together"]
            .expected
        )

    assert wall("linear", 2) < 0.8 * wall("linear", 1)
    assert wall("linear", 0) == pytest.approx(wall("linear", 9))
    assert wall("finetune", 9) > 0.8 * wall("finetune", 1)


# ---- fractions of a GPU --------------------------------------------------------------------------
FOUR = ("linear", "finetune", "packnet", "ewc")


def note_gpu_use(site: Site, busy: float, ranks: float, name: str = "small") -> None:
    """Write the status of a run with this use of a GPU."""
    figure: GpuFigure = {"node": "n", "gpu": "0", "busy": busy, "advice": "", "ranks": ranks}
    status: LiveStatus = {
        "name": name,
        "state": "finished",
        "host": "h",
        "pid": 1,
        "started": 0.0,
        "updated": 0.0,
        "command": "",
        "left_s": None,
        "left_without": 0,
        "stages": {},
        "gpu_use": [figure],
    }
    write_status(str(site.folder / "storage"), status)


def hours(site: Site, gpus: float, groups: int, **cluster: Any) -> tuple[float, float, str]:
    """Return the device seconds, the wall seconds and the printed forecast of a run on GPUs."""
    settings = {"workers": 1, "groups": groups, "gpus_per_worker": gpus, **cluster}
    prediction = costs(*site, FOUR, name="next", train={"epochs": 4}, cluster=settings)
    row = cost.make_label_row(prediction, "together")
    return 3600 * row["device_hours"], 3600 * row["wall_hours"], cost.format_forecast(prediction)


@pytest.fixture(params=["formula", "same method"])
def on_gpu(request: pytest.FixtureRequest, site: Site) -> Site:
    """Return a storage without results, or with results measured on whole GPUs."""
    if request.param == "same method":
        whole = {"workers": 1, "gpus_per_worker": 1}
        finished(*site, FOUR, device=GPU, cluster=whole)
    return site


def test_ranks_sharing_a_gpu_take_as_long_as_sequential_ranks(on_gpu: Site) -> None:
    one_gpu, one_wall, one_text = hours(on_gpu, 1, groups=1)
    _, two_wall, _ = hours(on_gpu, 1, groups=2)
    _, four_wall, _ = hours(on_gpu, 1, groups=4)
    shared_gpu, shared_wall, text = hours(on_gpu, 0.25, groups=4)
    assert shared_gpu == pytest.approx(one_gpu)
    assert shared_wall == pytest.approx(one_wall)
    _, on_two_wall, on_two_text = hours(on_gpu, 0.4, groups=4)  # two GPUs with two ranks each
    assert four_wall < on_two_wall < one_wall
    assert on_two_wall == pytest.approx(two_wall, rel=0.25)
    assert "shared GPUs: up to 4 ranks on each, which device time counts once; no run" in text
    assert "up to 2 ranks on each" in on_two_text
    assert "shared GPUs" not in one_text
    assert "shared GPUs" not in hours(on_gpu, 0.25, groups=1)[2]


def test_measured_gpu_use_determines_savings_from_gpu_sharing(site: Site) -> None:
    finished(*site, FOUR, device=GPU, cluster={"workers": 1, "gpus_per_worker": 1})
    whole_gpu, _, _ = hours(site, 1, groups=1)
    _, four_wall, _ = hours(site, 1, groups=4)
    note_gpu_use(site, busy=0.2, ranks=1)
    gpu_s, wall_s, text = hours(site, 0.25, groups=4)  # together they use 0.8 of the GPU
    assert gpu_s == pytest.approx(whole_gpu / 4)
    assert wall_s == pytest.approx(four_wall)
    assert "one rank keeps a GPU 20% busy (measured by run small)" in text
    note_gpu_use(site, busy=0.5, ranks=1)
    gpu_s, wall_s, _ = hours(site, 0.25, groups=4)
    assert gpu_s == pytest.approx(whole_gpu / 2)
    assert four_wall < wall_s < 2 * four_wall


def test_stages_measured_on_shared_gpus_are_forecast_faster_alone(site: Site) -> None:
    shared = {"workers": 1, "groups": 4, "gpus_per_worker": 0.25}
    finished(*site, FOUR, device=GPU, cluster={"workers": 1, "gpus_per_worker": 1})
    whole_gpu, _, _ = hours(site, 1, groups=1)
    finished(*site, FOUR, device=GPU, cluster=shared)  # the same results, recorded with shared GPUs
    gpu_s, _, _ = hours(site, 1, groups=1)
    assert gpu_s == pytest.approx(whole_gpu / 4)
    note_gpu_use(site, busy=0.8, ranks=4)
    assert hours(site, 1, groups=1)[0] == pytest.approx(whole_gpu)
    note_gpu_use(site, busy=0.8, ranks=2)  # fewer ranks were at work than possible
    assert hours(site, 1, groups=1)[0] == pytest.approx(whole_gpu)


def test_a_stage_is_slowed_while_others_are_on_its_gpu() -> None:
    seconds = {"a": 10.0, "b": 20.0, "c": 25.0}
    graph = Graph.of("r", [Stage(name, "train", name, {}) for name in seconds])

    def wall(ids: str, ranks: int, share: float, workers: int = 1, groups: int = 3) -> float:
        sharing = Sharing(frozenset("ab"), ranks, workers, Busy(share, "r"))
        return wall_time(graph, {*ids}, seconds, groups, sharing)

    assert wall("ab", 2, 1.0) == pytest.approx(30)  # a ends after 20 s, and b is then alone
    assert wall("ab", 2, 0.6) == pytest.approx(12 + 10)
    assert wall("ab", 2, 0.5) == pytest.approx(20)
    assert wall("ab", 1, 1.0) == pytest.approx(20)  # each has its own GPU
    assert wall("abc", 2, 1.0) == pytest.approx(30)
    assert wall("c", 2, 1.0) == pytest.approx(25)
    assert wall("a", 2, 1.0, workers=2) == pytest.approx(20)  # its own ranks share a GPU
    assert wall("ab", 2, 1.0, groups=1) == pytest.approx(30)


def test_forecast_lists_each_method_and_the_total(site: Site) -> None:
    finished(*site, ("linear", "finetune"))
    prediction = costs(
        *site,
        ("linear", "finetune"),
        name="next",
        train={"epochs": 4},
        cluster={"workers": 1, "groups": 1},
    )
    assert list(prediction.walls) == ["backbone", "linear", "finetune", "together"]
    assert prediction.walls["linear"].expected == pytest.approx(
        device_seconds(prediction, "linear")
    )
    assert prediction.walls["together"].expected == pytest.approx(
        sum(prediction.walls[label].expected for label in ("backbone", "linear", "finetune"))
    )
    assert [line.split()[0] for line in cost.format_forecast(prediction).splitlines()[1:5]] == list(
        prediction.walls
    )


def test_damaged_history_falls_back_to_wall_time(site: Site) -> None:
    finished(*site)
    for path in (site.folder / "storage" / "stages").rglob("history.parquet"):
        path.write_bytes(b"")
    prediction = costs(*site, name="next", train={"epochs": 4})
    assert prediction.costs["finetune/a/train"].device_s == pytest.approx(20), (
        "estimated from the wall time alone"
    )


@pytest.mark.slow
def test_forecast_of_doubled_epochs_is_close(
    tmp_path: Path, quick: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Close means within a factor of four, on any machine, even a busy one."""
    cards = small_run.make_cards(tmp_path, ("base", "a"))
    path = small_run.write_config(
        tmp_path / "run.yaml",
        small_run.make_body(tmp_path, cards, ("finetune",), train={"epochs": 8}),
    )
    assert main(["plan", path, "--cost"]) == 0
    assert "formula: 4" in capsys.readouterr().out
    assert main(["run", path]) == 0
    longer = ["--set", "train.epochs=16", "--set", "name=longer"]
    capsys.readouterr()
    assert main(["plan", path, "--cost", *longer]) == 0
    output = capsys.readouterr().out
    row = next(line for line in output.splitlines() if line.startswith("together"))
    assert row.endswith("  same method: 4"), "backbone, two evaluations and a training"
    prepared = app.prepare(path, ["train.epochs=16", "name=longer"])
    predicted = cost.forecast(
        prepared.graph,
        prepared.config,
        prepared.store,
        app.plan(prepared).stages_to_run,
        prepared.tasks,
    )
    device_s = cost.sum_device_seconds(predicted.costs.values()).expected
    assert main(["run", path, *longer]) == 0
    ran = [
        m
        for m in small_run.manifests(tmp_path / "storage", "longer").values()
        if m["step"] not in ("ingest", "report")
    ]
    took = sum(m["wall_s"] * m["workers"] for m in ran)
    assert took / 4 < device_s < took * 4


def test_completed_run_costs_nothing(
    tmp_path: Path, quick: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    cards = small_run.make_cards(tmp_path, ("base",))
    path = small_run.write_config(
        tmp_path / "run.yaml", small_run.make_body(tmp_path, cards, ("finetune",))
    )
    assert main(["run", path]) == 0
    assert main(["plan", path, "--cost"]) == 0
    assert "cost: nothing to run" in capsys.readouterr().out
