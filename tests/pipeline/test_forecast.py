"""Promises of `plan --cost`: what a run will take, from what was measured, and nothing where
nothing was."""

import io
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks import stream
from pipeline import config
from pipeline.cli import main
from pipeline.graph import build
from pipeline.graph.run import look_up_all, stages_to_run
from pipeline.graph.store import Store, record_of
from pipeline.launch import cost as forecast
from tests import small_run
from workers.job import StageJob
from workers.storage.artifact import Attempt

CPU, GPU = "cpu (x86_64, 2 cores)", "NVIDIA H100"
TRAIN = 36  # of 2 x 20 images of a task, those that are not held out
TEST = 20


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Cards of three tasks that stand in a store, and nothing else."""
    folder = tmp_path_factory.mktemp("forecast")
    cards = small_run.make_cards(folder, ("base", "a", "b"))
    store, graph, _, _ = planned(folder, cards)
    stream.ingest(store, graph)
    return folder, cards


def planned(folder: Any, cards: Any, methods: Any = ("finetune",), **changes: Any) -> Any:
    checked = config.check(
        {**small_run.make_body(folder, cards, methods, **changes), "data": {"val_fraction": 0.1}},
        "a config",
    )
    store = Store(checked.storage)
    return store, *build.graph_of(checked, store), checked


def finished(
    folder: Any,
    cards: Any,
    methods: Any = ("finetune",),
    wall_s: Any = 10.0,
    epoch_s: Any = 3.0,
    workers: Any = 1,
    device: Any = CPU,
    **changes: Any,
) -> None:
    """Publishes results by hand as if all stages had run: wall seconds in all, and seconds per
    epoch."""
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
    store.save_record(record_of(graph, checked, tasks, {}))


def costs(folder: Any, cards: Any, methods: Any = ("finetune",), **changes: Any) -> Any:
    store, graph, tasks, checked = planned(folder, cards, methods, **changes)
    todo = stages_to_run(graph, look_up_all(graph, store, None))
    return forecast.forecast(graph, checked, store, todo, tasks)


@pytest.fixture
def at(place: Any, tmp_path: Path) -> Any:
    """The same cards and their ingested data in a storage of its own."""
    folder, cards = place
    shutil.copytree(folder / "storage", tmp_path / "storage")
    return tmp_path, cards


def test_twice_the_epochs_take_twice_the_time_of_epochs_and_the_rest_once(at: Any) -> None:
    finished(*at, wall_s=10.0, epoch_s=3.0)  # 2 epochs: 6 s of 10
    found = costs(*at, name="next", train={"epochs": 4})
    cost = found.costs["finetune/a/train"]
    assert (cost.images, cost.epochs, cost.basis) == (TRAIN, 4, "same method")
    assert cost.device_s == pytest.approx(4 + 4 * 3)
    assert found.devices == (CPU,)


def test_more_workers_take_as_many_device_seconds_in_less_time(at: Any) -> None:
    finished(*at, wall_s=10.0, epoch_s=3.0, workers=3)
    found = costs(*at, name="next", train={"epochs": 4}, cluster={"workers": 2, "groups": 1})
    assert found.costs["finetune/a/train"].device_s == pytest.approx(3 * 16)
    assert found.walls["together"] == pytest.approx(
        sum(c.device_s for c in found.costs.values()) / 2
    )


def test_an_evaluation_counts_the_test_images_of_all_tasks_that_it_measures(at: Any) -> None:
    # 20, 40 and 60 images in 10 s each: the median is 4 images in a second
    finished(*at, wall_s=10.0)
    found = costs(*at, name="next", train={"epochs": 4})
    cost = found.costs["finetune/b/evaluate"]
    assert cost.images == 3 * TEST
    assert cost.device_s == pytest.approx(60 / 4)


def test_another_method_stands_in_and_what_nobody_measured_is_said(at: Any) -> None:
    finished(*at)
    found = costs(*at, ("packnet",), name="next").costs
    assert found["packnet/a/train"].basis == found["packnet/a/evaluate"].basis == "other method"
    assert (found["packnet/a/prune"].basis, found["packnet/a/prune"].device_s) == (
        "not measured",
        None,
    )
    said = forecast.text(costs(*at, ("packnet",), name="next"))
    assert "without 4 stages that are not measured" in said
    assert "run one task of it first" in said


@pytest.mark.parametrize(
    "change",
    [{"backbone": {"img_size": 24}}, {"train": {"precision": "bf16"}}, {"device": GPU}],
    ids=["backbone", "precision", "device"],
)
def test_what_was_measured_of_something_else_does_not_count(at: Any, change: Any) -> None:
    finished(*at, **change)
    found = costs(*at, name="next", train={"epochs": 4})
    assert found.costs["finetune/a/train"].basis == "not measured"
    assert found.costs["finetune/a/train"].images == TRAIN


def test_the_card_tells_how_many_images_there_are_before_they_are_ingested(
    at: Any, tmp_path: Path
) -> None:
    finished(*at)
    counts = {"train": 200, "test": 100}
    cards = {
        **at[1],
        "b": small_run.make_card(tmp_path, "b", "45", counts=counts),
        "a": small_run.make_card(tmp_path, "other", "23"),
    }
    found = costs(tmp_path, cards, name="next")
    assert found.costs["finetune/b/train"].images == pytest.approx(180)
    assert found.costs["finetune/a/train"].images is None
    assert found.costs["finetune/a/train"].basis == "not measured"
    assert found.unknown == ("a",)
    assert "no count of images: a; bring the data in" in forecast.text(found)


def test_a_joint_training_counts_all_tasks_so_far(at: Any) -> None:
    found = costs(*at, ("joint",), name="next").costs
    trained = [cost.images for stage, cost in found.items() if stage.endswith("/b/train")]
    assert trained
    assert min(trained) > TRAIN


def test_a_star_gets_faster_with_groups_and_a_chain_does_not(at: Any) -> None:
    finished(*at, ("linear", "finetune"), wall_s=10.0, epoch_s=5.0)

    def wall(method: Any, groups: Any) -> Any:
        return costs(
            *at,
            (method,),
            name="next",
            train={"epochs": 20},
            cluster={"workers": 1, "groups": groups},
        ).walls["together"]

    assert wall("linear", 2) < 0.8 * wall("linear", 1)
    assert wall("linear", 0) == pytest.approx(wall("linear", 9))
    assert wall("finetune", 9) > 0.8 * wall("finetune", 1)


def test_every_method_has_a_line_of_its_own_beside_all_together(at: Any) -> None:
    finished(*at, ("linear", "finetune"))
    found = costs(
        *at,
        ("linear", "finetune"),
        name="next",
        train={"epochs": 4},
        cluster={"workers": 1, "groups": 1},
    )
    assert list(found.walls) == ["backbone", "linear", "finetune", "together"]
    assert found.walls["linear"] == pytest.approx(
        sum(c.device_s for c in found.costs.values() if c.label == "linear")
    )
    assert found.walls["together"] == pytest.approx(
        found.walls["backbone"] + found.walls["linear"] + found.walls["finetune"]
    )
    assert [line.split()[0] for line in forecast.text(found).splitlines()[1:5]] == list(found.walls)


def test_damaged_measurements_are_passed_over(at: Any) -> None:
    finished(*at)
    for path in (at[0] / "storage" / "stages").rglob("history.parquet"):
        path.write_bytes(b"")
    found = costs(*at, name="next", train={"epochs": 4})
    assert found.costs["finetune/a/train"].device_s == pytest.approx(20), "by wall time alone"


def test_the_forecast_of_a_real_run_of_twice_the_epochs_is_near_what_it_then_takes(
    tmp_path: Path, quick: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Near: within a factor of four, on whatever machine, however busy."""
    cards = small_run.make_cards(tmp_path, ("base", "a"))
    path = small_run.write_config(
        tmp_path / "run.yaml",
        small_run.make_body(tmp_path, cards, ("finetune",), train={"epochs": 8}),
    )
    assert main(["plan", path, "--cost"]) == 0
    assert "without 4 stages that are not measured" in capsys.readouterr().out
    assert main(["run", path]) == 0
    longer = ["--set", "train.epochs=16", "--set", "name=longer"]
    capsys.readouterr()
    assert main(["plan", path, "--cost", *longer]) == 0
    said = capsys.readouterr().out
    row = next(line.split() for line in said.splitlines() if line.startswith("together"))
    assert row[5:] == ["4", "0", "0"], "backbone, two evaluations and a training, all measured"
    assert main(["run", path, *longer]) == 0
    ran = [
        m
        for m in small_run.manifests(tmp_path / "storage", "longer").values()
        if m["step"] not in ("ingest", "report")
    ]
    took = sum(m["wall_s"] * m["workers"] for m in ran)
    assert took / 4 < 3600 * float(row[3]) < took * 4


def test_a_run_that_stands_costs_nothing(
    tmp_path: Path, quick: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    cards = small_run.make_cards(tmp_path, ("base",))
    path = small_run.write_config(
        tmp_path / "run.yaml", small_run.make_body(tmp_path, cards, ("finetune",))
    )
    assert main(["run", path]) == 0
    assert main(["plan", path, "--cost"]) == 0
    assert "cost: nothing to run" in capsys.readouterr().out
