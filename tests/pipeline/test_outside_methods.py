"""Tests of methods defined in a notebook or script: they run, and their code is in their keys."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import pipeline
from docs.site.pages import text_of
from pipeline.app import runs as app
from pipeline.app.experiment import REPEAT_IN_PYTHON
from tests import small_run
from workers.errors import UserError
from workers.methods import METHODS
from workers.serving.bundle import Bundle

REPOSITORY = Path(__file__).resolve().parents[2]
HEADING = "## In a notebook or a script"


pytestmark = pytest.mark.usefixtures("clean_registry")


def example() -> str:
    """Return the first Python cell of the section in docs/new-method.md."""
    section = text_of("docs/new-method.md").partition(HEADING)[2]
    cells = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return str(cells[0])


def run_cell(text: str, module: str = "__main__") -> ModuleType:
    """Run a cell of a notebook, and return its module."""
    namespace = ModuleType(module)
    exec(compile(text, "a cell", "exec", dont_inherit=True), namespace.__dict__)
    return namespace


def definition() -> str:
    return example().partition("experiment = ")[0]


def config_body(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """Return a config of the example's method on two classes, for one epoch."""
    cards = small_run.make_cards(tmp_path, "a")
    return small_run.make_body(tmp_path, cards, ["square"], train={"epochs": 1}, **changes)


def test_documentation_example_builds_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = run_cell(example()).__dict__["experiment"].plan()
    assert "square/digits-4/evaluate" in set(plan["stage"])


def test_changed_notebook_cell_changes_only_keys_of_its_method(tmp_path: Path) -> None:
    run_cell(definition())
    experiment = pipeline.load(config_body(tmp_path))
    first = list(experiment.plan()["key"])
    run_cell(definition())
    assert list(experiment.plan()["key"]) == first
    run_cell(definition().replace(".square()", ".abs()"))
    second = list(experiment.plan()["key"])
    assert [old == new for old, new in zip(first, second, strict=True)] == [
        stage in ("data/a", "backbone") for stage in experiment.plan()["stage"]
    ]


@pytest.mark.slow
def test_notebook_method_runs_and_changed_code_reuses_no_results(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "BUILD_MODULE", "not imported")  # as in a new process
    run_cell(definition())
    experiment = pipeline.load(config_body(tmp_path))
    results = experiment.run(quiet=True)
    assert list(results.matrix["source"]) == ["measured"]
    assert results.model().tasks == ["a"]
    run_cell(definition())  # the same code again
    assert set(experiment.plan()["status"]) == {"hit"}
    run_cell(definition().replace(".square()", ".abs()"))
    plan = experiment.plan().set_index("stage")
    assert list(plan.loc[["data/a", "backbone"], "status"]) == ["hit", "hit"]
    assert set(plan.loc[["square/a/train", "square/a/evaluate"], "status"]) == {"miss"}
    assert re.match("changed code: '.*' -> '", plan.loc["square/a/train", "reason"])
    run_cell(definition())
    assert set(experiment.plan()["status"]) == {"hit"}
    folder = str(tmp_path / "model")
    results.model().save(folder)
    del METHODS["square"]
    with pytest.raises(UserError, match=r"ask the model in Python where `pipeline\.register` was"):
        Bundle.open(folder).method()


def test_notebook_method_with_ray_workers_is_refused(tmp_path: Path) -> None:
    run_cell(definition())
    body = config_body(tmp_path, cluster={"workers": 1})
    sentence = (
        r"^the config: methods\.square names 'square', which Ray workers cannot import, because "
        r"its class is defined in a notebook or script; set cluster\.workers to 0, or move "
    )
    with pytest.raises(UserError, match=sentence):
        pipeline.load(body)
    assert pipeline.load(body, **{"cluster.workers": 0}).name == "small"


def test_failed_python_run_suggests_python_calls_not_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_cell(definition())
    commands: list[str] = []

    def execute(run: Any, open_screen: Any, resume: str, report: str, selection: Any) -> Any:
        commands.extend([resume, report])
        raise UserError("a stage failed")

    monkeypatch.setattr(app, "execute", execute)
    path = small_run.write_config(tmp_path / "config.yaml", config_body(tmp_path))
    with pytest.raises(UserError, match="a stage failed"):
        pipeline.load(path).run()
    assert commands == [REPEAT_IN_PYTHON.format("run"), REPEAT_IN_PYTHON.format("report")]


# ---- other processes -----------------------------------------------------------------------------
SCRIPT = """
import json, sys
body = json.load(open(sys.argv[1]))
experiment = pipeline.load(body)
if sys.argv[2] == "run":
    experiment.run(quiet=True)
plan = experiment.plan()
print(json.dumps([list(plan["key"]), sorted(set(plan["status"]))]))
"""


def answer_of(script: Path, *arguments: str) -> Any:
    """Run a script in a new process, and return the value of the last line that it printed."""
    command = [sys.executable, str(script), *arguments]
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)}
    result = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, timeout=900, env=environment
    )
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.slow
def test_two_processes_give_a_class_the_same_key(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(config_body(tmp_path)))
    script = tmp_path / "script.py"
    script.write_text(definition() + SCRIPT)
    keys, _ = answer_of(script, str(config), "plan")
    assert answer_of(script, str(config), "plan") == [keys, ["miss"]]


@pytest.mark.slow
def test_ray_workers_import_a_method_from_its_module(tmp_path: Path) -> None:
    (tmp_path / "my_methods.py").write_text(definition())
    config = tmp_path / "config.json"
    config.write_text(json.dumps(config_body(tmp_path, cluster={"workers": 1})))
    script = tmp_path / "script.py"
    script.write_text("import pipeline, my_methods\n" + SCRIPT)
    _, status = answer_of(script, str(config), "run")
    assert status == ["hit"]
