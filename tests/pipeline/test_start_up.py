"""Tests of start-up: no heavy imports if all results are up to date, and the graph cache."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pipeline import cli
from pipeline.app import runs as app
from pipeline.app.prepared import PreparedRun
from pipeline.config import settings as config
from pipeline.graph import build, graph_cache, run_record
from pipeline.graph.stage import Graph
from tests import small_run

HEAVY = ("torch", "timm", "ray", "mlflow", "matplotlib", "sklearn")
REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = """
import json, sys
from pipeline import cli
code = cli.main(sys.argv[2:])
with open(sys.argv[1], "w") as stream:
    json.dump([code, sorted(sys.modules)], stream)
"""


def heavy_imports(folder: Path, *argv: str) -> list[str]:
    """Run a command in a fresh process; return the heavy packages that it imported."""
    answer = folder / "modules.json"
    command = [sys.executable, "-c", SCRIPT, str(answer), *argv]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, timeout=900)
    code, modules = json.loads(answer.read_text())
    assert code == 0
    return [name for name in HEAVY if name in modules]


@pytest.fixture
def config_path(tmp_path: Path) -> str:
    body = small_run.make_body(tmp_path, small_run.make_cards(tmp_path, "ab"), ["meat", "linear"])
    return small_run.write_config(tmp_path / "config.yaml", body)


def test_plan_and_run_of_finished_results_import_no_heavy_packages(
    tmp_path: Path, quick: Any
) -> None:
    cards = small_run.make_cards(tmp_path, ("base", "a"))
    body = small_run.make_body(tmp_path, cards, ["linear"])
    body["tracking"] = {"models": False}
    path = small_run.write_config(tmp_path / "config.yaml", body)
    assert cli.main(["run", path]) == 0
    assert heavy_imports(tmp_path, "plan", path) == []
    assert heavy_imports(tmp_path, "run", path) == []


def test_the_tasks_of_a_model_are_listed_without_torch(tmp_path: Path, quick: Any) -> None:
    cards = small_run.make_cards(tmp_path, ("base", "a"))
    body = small_run.make_body(tmp_path, cards, ["linear"], tracking="off")
    path = small_run.write_config(tmp_path / "config.yaml", body)
    assert cli.main(["run", path]) == 0
    assert cli.main(["bundle", path, "--out", str(tmp_path / "model")]) == 0
    assert heavy_imports(tmp_path, "tasks", str(tmp_path / "model"), "list") == []


# ---- the cache -----------------------------------------------------------------------------------
@contextmanager
def fresh_start() -> Iterator[None]:
    """Act as in a process that has not imported the builder, so that the cache is used."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "BUILD_MODULE", "not imported")
        yield


def prepared(path: str, *overrides: str) -> PreparedRun:
    with fresh_start():
        return app.prepare(path, overrides, with_jobs=False)


def plain(graph: Graph) -> list[Any]:
    """Return the parts of a graph that `plan` and records read."""
    stages = [[s.id, s.step, s.key, s.inputs, s.parents, s.method, s.task, s.note] for s in graph]
    return [graph.name, *json.loads(json.dumps(stages))]


def test_a_cached_graph_equals_a_fresh_one(config_path: str) -> None:
    first = prepared(config_path, "seed=3")
    cached = prepared(config_path, "seed=3")
    assert first.has_jobs
    assert not cached.has_jobs
    checked = config.load(config_path, ["seed=3"])
    graph, tasks = build.build_graph(checked, cached.store)
    assert plain(cached.graph) == plain(first.graph) == plain(graph)
    assert cached.tasks == tasks
    assert cached.config == checked
    assert cached.config.base_name == checked.base_name
    assert plain(app.with_jobs(cached).graph) == plain(graph)


def test_changed_config_card_or_images_rebuild_the_graph(config_path: str, tmp_path: Path) -> None:
    prepared(config_path)
    assert prepared(config_path, "train.epochs=3").has_jobs
    assert not prepared(config_path).has_jobs
    card = tmp_path / "cards" / "a.yaml"
    text = card.read_text()
    card.write_text(text.replace("CC BY 4.0", "CC0"))
    assert prepared(config_path).has_jobs
    card.write_text(text)
    assert not prepared(config_path).has_jobs
    image = next((tmp_path / "raw" / "a" / "train").rglob("*.png"))
    image.unlink()
    changed = prepared(config_path)
    assert changed.has_jobs
    assert plain(prepared(config_path).graph) == plain(changed.graph)


def test_changed_code_or_versions_rebuild_the_graph(
    config_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared(config_path)
    for name in ("compute_project_digest", "package_versions"):
        with monkeypatch.context() as patch:
            patch.setattr(graph_cache, name, lambda: "other")
            assert prepared(config_path).has_jobs
    with monkeypatch.context() as patch:
        patch.setattr(run_record, "KEY_VERSION", 2)
        assert prepared(config_path).has_jobs
    assert not prepared(config_path).has_jobs


def test_the_code_of_every_method_is_in_the_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_cache, "REPOSITORY", tmp_path)
    path = tmp_path / "workers" / "methods" / "new.py"
    path.parent.mkdir(parents=True)
    digests = set()
    for text in ("", "revision = 1", "revision = 2"):
        path.write_text(text)
        digests.add(graph_cache.compute_project_digest.__wrapped__())
    assert len(digests) == 3


@pytest.mark.parametrize("damage", ["", "{", "[]", "null", '{"content": {}, "sha256": "x"}', "cut"])
def test_damaged_or_foreign_cache_file_is_ignored_and_rewritten(
    damage: str, config_path: str
) -> None:
    graph = plain(prepared(config_path).graph)
    path = next((Path(config_path).parent / "storage" / "graphs").iterdir())
    data = path.read_text()
    path.write_text(data[:-20] if damage == "cut" else damage)
    assert plain(prepared(config_path).graph) == graph
    assert path.read_text() == data


def test_a_cache_file_with_an_altered_key_is_ignored(config_path: str) -> None:
    run = prepared(config_path)
    path = next((Path(config_path).parent / "storage" / "graphs").iterdir())
    path.write_text(path.read_text().replace(run.graph["backbone"].key, "0" * 32))
    assert prepared(config_path).has_jobs


def test_only_the_newest_graphs_are_kept(config_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_cache, "MAX_FILES", 2)
    for seed in range(4):
        prepared(config_path, f"seed={seed}")
    assert len(list((Path(config_path).parent / "storage" / "graphs").iterdir())) == 2
    assert not prepared(config_path, "seed=3").has_jobs


def test_graph_with_missing_raw_data_is_rebuilt_each_time(config_path: str, tmp_path: Path) -> None:
    prepared(config_path)
    (tmp_path / "raw" / "a").rename(tmp_path / "elsewhere")
    assert prepared(config_path).has_jobs
    assert prepared(config_path).has_jobs
