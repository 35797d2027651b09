"""Tests of runs with several seeds or class orders: config, graph, and commands."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline import cli
from pipeline.config.settings import Config, check, dump, load
from pipeline.graph import build
from pipeline.graph.replica_configs import make_replica_configs
from pipeline.graph.replicas import unite_graphs
from pipeline.graph.store import Store
from pipeline.results.runs import list_runs, run_status
from pipeline.tracking import mlflow_client
from tests import small_run
from workers.errors import UserError

pytestmark = pytest.mark.usefixtures("small_pictures")

STREAM: dict[str, Any] = {"tasks": [{"card": "digits", "classes": ["0", "1"]}]}
BODY: dict[str, Any] = {"name": "table", "stream": STREAM, "methods": {"linear": {}}}
SPLIT: dict[str, Any] = {"tasks": [{"card": "digits", "split": 5}]}


def config_of(**settings: Any) -> Config:
    return check({**BODY, **settings}, "test", with_methods=False)


def written(folder: Path, name: str, **settings: Any) -> str:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({**BODY, **settings}))
    return str(path)


# ---- the config ----------------------------------------------------------------------------------
def test_seeds_and_seed_together_are_refused_in_one_sentence() -> None:
    with pytest.raises(
        UserError, match=r"seed is 1 and seeds is .*one of the two; leave `seed` out$"
    ):
        config_of(seed=1, seeds=[0, 1])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"seeds": []}, "seeds is"),
        ({"seeds": [1, 1]}, "listed twice"),
        ({"seeds": [-1, 1]}, "greater than or equal to 0"),
        ({"seeds": 3}, "a list"),
        ({"orders": [1, 2]}, "no task of stream.tasks has `split`"),
    ],
)
def test_invalid_seeds_or_orders_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        config_of(**settings)


def test_single_entry_in_seeds_equals_seed() -> None:
    config = config_of(seeds=[4])
    assert (config.seed, config.seeds) == (4, ())
    assert dump(config) == dump(config_of(seed=4))
    assert make_replica_configs(config) == {}


def test_dumped_config_loads_as_equal_config() -> None:
    config = config_of(seeds=[0, 2], orders=[1, "cifar100/order1"], stream=SPLIT)
    assert check(dump(config), "again", with_methods=False) == config


def test_override_switches_between_seed_and_seeds(tmp_path: Path) -> None:
    written(tmp_path, "low", seed=3)
    path = written(tmp_path, "high", extends="low.yaml", seeds=[0, 1])
    assert load(path, with_methods=False).seeds == (0, 1)
    one = load(path, ["seed=1"], with_methods=False)
    assert (one.seed, one.seeds, one.name) == (1, (), "table-seed-1")
    several = load(str(tmp_path / "low.yaml"), ["seeds=[0, 2]"], with_methods=False)
    assert (several.seeds, several.name) == ((0, 2), "table-seeds-0-2")


def test_replica_config_equals_config_of_its_seed(tmp_path: Path) -> None:
    path = written(tmp_path, "table", seeds=[0, 1])
    replicas = make_replica_configs(load(path, with_methods=False))
    assert list(replicas) == ["seed-0", "seed-1"]
    for seed, config in enumerate(replicas.values()):
        alone = load(path, [f"seed={seed}"], with_methods=False)
        assert dump(config) == dump(alone)


def test_class_orders_and_seeds_are_crossed() -> None:
    orders = ["cifar100/order1", 7]
    replicas = make_replica_configs(config_of(seeds=[0, 1], orders=orders, stream=SPLIT))
    assert list(replicas) == [
        "order1-seed-0",
        "order1-seed-1",
        "order-7-seed-0",
        "order-7-seed-1",
    ]
    entry = replicas["order-7-seed-1"].stream.tasks[0]
    assert (entry.order, entry.split) == ("7", 5)


# ---- the graph -----------------------------------------------------------------------------------
def graph_of(config: Config, folder: Path) -> Any:
    return build.build_graph(config, Store(str(folder / "storage")))[0]


def union(config: Config, folder: Path) -> Any:
    graphs = {name: graph_of(one, folder) for name, one in make_replica_configs(config).items()}
    return unite_graphs(config.name, graphs)


def test_replica_stages_have_keys_of_single_seed_run(tmp_path: Path) -> None:
    config = config_of(seeds=[0, 1], backbone=small_run.BACKBONE)
    graph = union(config, tmp_path)
    for seed in (0, 1):
        alone = graph_of(config_of(seed=seed, backbone=small_run.BACKBONE), tmp_path)
        for stage in alone:
            if stage.step == "ingest":
                assert graph[stage.id].key == stage.key
            elif stage.step != "report":
                assert graph[f"seed-{seed}/{stage.id}"].key == stage.key
    assert [stage.id for stage in graph if stage.step == "ingest"] == ["data/digits"]
    assert [stage.id for stage in graph if stage.step == "report"] == ["report"]


def test_job_id_and_key_equal_those_of_graph_stage(tmp_path: Path) -> None:
    graph = union(config_of(seeds=[0, 1], backbone=small_run.BACKBONE), tmp_path)
    for stage in graph:
        if stage.step not in ("ingest", "report"):
            assert (stage.job.id, stage.job.key) == (stage.id, stage.key)
            assert stage.id.startswith(f"{stage.replica}/")


def test_class_orders_of_one_seed_share_its_backbone(tmp_path: Path) -> None:
    config = config_of(orders=[1, 2], stream=SPLIT, backbone=small_run.BACKBONE)
    graph = union(config, tmp_path)
    assert "backbone" in graph.stages
    classes = [graph[f"order-{n}/linear/digits-0/train"].job.task.classes for n in (1, 2)]
    assert classes[0] != classes[1]


# ---- commands ------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder and the config path of a finished run with two seeds and two methods."""
    folder = tmp_path_factory.mktemp("replicas")
    body = small_run.make_body(folder, small_run.make_cards(folder, "ab"), ["linear", "finetune"])
    del body["seed"]
    path = small_run.write_config(folder / "config.yaml", {**body, "seeds": [0, 1]})
    assert cli.main(["run", path]) == 0
    return folder, path


def printed(capsys: Any, *words: str, code: int = 0) -> str:
    capsys.readouterr()
    assert cli.main(list(words)) == code
    output = capsys.readouterr()
    return str(output.out + output.err)


@pytest.mark.slow
def test_single_seed_run_reuses_all_stages_except_report(small: Any, capsys: Any) -> None:
    _, path = small
    text = printed(capsys, "plan", path, "--set", "seed=1")
    misses = [line for line in text.splitlines() if line.startswith("miss")]
    assert [line.split()[1] for line in misses] == ["report"]


@pytest.mark.slow
def test_additional_seed_runs_only_its_own_stages(small: Any, capsys: Any) -> None:
    _, path = small
    text = printed(capsys, "plan", path, "--set", "seeds=[0, 1, 2]")
    misses = [line.split()[1] for line in text.splitlines() if line.startswith("miss")]
    assert {stage.split("/")[0] for stage in misses} == {"seed-2", "report"}


@pytest.mark.slow
def test_run_commands_accept_a_run_of_several_seeds(
    small: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # a narrow terminal omits columns
    folder, path = small
    storage = str(folder / "storage")
    listed = printed(capsys, "runs", "--storage", storage)
    row = next(line for line in listed.splitlines() if line.startswith("small "))
    assert row.count("%") == 2  # the mean of each method
    assert "small-seed-1" in listed
    assert "seed-1/linear/b/train" in printed(capsys, "status", path)
    assert "nothing to do" in printed(capsys, "run", path)
    assert "report.html" in printed(capsys, "report", path)
    page = (folder / "storage/runs/small/report.html").read_text()
    (side_by_side,) = re.findall(r'<div class="pictures">(.*?)<h2', page, re.DOTALL)
    assert side_by_side.count("<figure") == 2, "one matrix for each method is expected"
    compared = printed(capsys, "compare", path)  # compares the methods over both seeds
    assert "small (2 seeds): linear" in compared
    sentence = printed(capsys, "bundle", path, "--out", str(folder / "bundle"), code=2)
    assert "is a run of 2 replicas (seed-0, seed-1), and this needs one model" in sentence
    assert "--set seed=0" in sentence


@pytest.mark.slow
def test_run_record_names_its_replicas(small: Any) -> None:
    folder, _ = small
    record = json.loads((folder / "storage/runs/small/run.json").read_text())
    assert record["replicas"] == {"seed-0": "small-seed-0", "seed-1": "small-seed-1"}
    assert "seed" not in record["config"]
    assert run_status(str(folder / "storage"), "small").state == "finished"


@pytest.mark.slow
def test_run_list_omits_mean_if_a_replica_is_missing(small: Any, tmp_path: Path) -> None:
    folder, _ = small
    storage = tmp_path / "storage"
    shutil.copytree(folder / "storage", storage)
    means: list[list[bool]] = []
    for _ in range(2):
        (listed,) = [run for run in list_runs(str(storage)) if run.name == "small"]
        means.append([method.average_accuracy is not None for method in listed.methods])
        (storage / "runs/small-seed-1/run.json").unlink(missing_ok=True)
    assert means == [[True] * len(listed.methods), [False] * len(listed.methods)]


@pytest.mark.slow
def test_mlflow_nests_each_replica_once_below_the_run(
    small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder, path = small
    for _ in range(2):
        assert cli.main(["report", path, "--set", "tracking={models: false}"]) == 0
    client, _, experiment = mlflow_client.open_store(str(folder / "storage"))
    runs = client.search_runs([experiment], max_results=1000)
    names = {run.info.run_id: run.info.run_name for run in runs}
    above = [
        (run.info.run_name, names.get(run.data.tags.get("mlflow.parentRunId"))) for run in runs
    ]
    assert above.count(("small", None)) == 1
    for seed in ("small-seed-0", "small-seed-1"):
        assert above.count((seed, "small")) == 1
        assert above.count((f"linear ({seed})", seed)) == 1
    top = next(run for run in runs if run.info.run_name == "small")
    assert {"average_accuracy_mean/linear", "average_accuracy_sd/linear"} <= set(top.data.metrics)
    assert {run.info.status for run in runs} == {"FINISHED"}
