"""Promises of `analyse`: tables and pictures of finished runs beside their reports, and a sentence where there is nothing to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from pipeline import analyse, cli
from tests import small_run

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two finished runs, without and with scaled context, one that was never run, and one without attention."""
    folder = tmp_path_factory.mktemp("analyse")
    cards = small_run.make_cards(folder, "ab")
    changes: dict[str, dict[str, Any]] = {
        "plain": {"methods": {"finetune": {}, "meat": {}}}, "scaled": {"methods": {"finetune": {}}, "backbone": {"context": {"kind": "cbs"}}},
        "unfinished": {"methods": {"finetune": {}}, "seed": 9},
        "convolutions": {"methods": {"linear": {}}, "backbone": {"name": "resnet18", "img_size": 32, "options": {
            "layers": [1, 1, 1, 1], "channels": [8, 8, 8, 8], "norm_layer": "groupnorm1"}}}}
    found = {}
    for name, change in changes.items():
        body = small_run.make_body(folder, cards, change["methods"], name=name, seed=change.get("seed", 5))
        body["backbone"] = {**body["backbone"], **change.get("backbone", {})}
        found[name] = small_run.write_config(folder / f"{name}.yaml", body)
    for name in ("plain", "scaled", "convolutions"):
        small_run.run(["run", found[name]], folder / f"{name}.txt")
    return found


def out(configs: dict[str, str], name: str) -> Path:
    return Path(configs[name]).parent / "storage" / "runs" / name


def test_a_run_gets_tables_a_picture_and_a_line_per_method(configs: dict[str, str], capsys: pytest.CaptureFixture[str]):
    assert cli.main(["analyse", configs["plain"], "--images", "8", "--robustness"]) == 0
    said = capsys.readouterr().out
    rows = pq.read_table(out(configs, "plain") / "analysis.parquet").to_pylist()
    assert [(r["label"], r["task"], r["block"], r["head"]) for r in rows] == [
        (label, task, block, head) for label in ("finetune", "meat") for task in "ab" for block in range(2) for head in range(2)]
    assert {r["name"] for r in rows} == {"finetune", "meat"}
    assert all(r["scale"] is None for r in rows)
    assert (out(configs, "plain") / "analysis.csv").read_text().count("\n") == 1 + len(rows)
    for name in ("analysis.png", "robustness.png"):
        assert (out(configs, "plain") / name).read_bytes().startswith(b"\x89PNG")
    levels = pq.read_table(out(configs, "plain") / "robustness.parquet").to_pylist()
    assert {r["kind"] for r in levels} == {"occlusion", "fgsm"}
    assert said.splitlines()[0].startswith("method")
    assert [line.split()[0] for line in said.splitlines()[1:3]] == ["finetune", "meat"]
    assert "fgsm" in said


def test_a_task_is_looked_at_as_the_last_stage_has_it(configs: dict[str, str]):
    config, store, graph, tasks = cli.prepare(cli.parser().parse_args(["plan", configs["plain"]]))
    run = analyse.Analysed(config.name, graph, store)
    for label in ("finetune", "meat"):
        assert [(job.id, task) for _, job, task in analyse.finished(run, label)] == [(f"{label}/b/evaluate", task) for task in tasks]


def test_several_runs_are_compared_beside_the_first(configs: dict[str, str], capsys: pytest.CaptureFixture[str]):
    assert cli.main(["analyse", configs["scaled"], configs["plain"], "--images", "8"]) == 0
    rows = pq.read_table(out(configs, "scaled") / "analysis.parquet").to_pylist()
    assert list(dict.fromkeys(r["name"] for r in rows)) == ["scaled", "plain: finetune", "plain: meat"], "a run of one method is called by its own name"
    assert all((r["scale"] is not None) == (r["run"] == "scaled") for r in rows)
    assert "plain: meat" in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "sentence"), [
    (["unfinished"], "run 'unfinished': stage finetune/a/evaluate has no result yet"),
    (["convolutions"], "its backbone must be a vision transformer"),
    (["plain", "--images", "0"], "--images is 0"),
    ([], "the following arguments are required: config")])
def test_what_cannot_be_analysed_gets_a_sentence(configs: dict[str, str], arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["analyse", *(configs.get(a, a) for a in arguments)]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1
