"""Tests of streams with recurring classes: the images of each task."""

from __future__ import annotations

import copy
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.config import settings
from pipeline.config.settings import Slices
from pipeline.graph.build import build_graph
from pipeline.graph.graph_cache import _from_json, _task_json
from pipeline.graph.slices import cut_slices
from pipeline.graph.store import Store
from tests import small_run
from workers.errors import UserError

NAMES = [f"class {index}" for index in range(20)]


def cut(names: list[str] = NAMES, **values: Any) -> list[dict[str, tuple[float, float]]]:
    return cut_slices(Slices(**values), names, "entry")


def check_whole(tasks: list[dict[str, tuple[float, float]]]) -> None:
    """Check that the parts of each class fill [0, 1) without overlap."""
    for name in NAMES:
        parts = sorted(task[name] for task in tasks if name in task)
        assert parts[0][0] == 0
        assert parts[-1][1] == 1
        assert all(one[1] == two[0] for one, two in pairwise(parts))


@pytest.mark.parametrize("seed", range(5))
def test_half_of_the_classes_are_blurry(seed: int) -> None:
    tasks = cut(kind="blurry", tasks=5, seed=seed)
    check_whole(tasks)
    counts = [sum(name in task for task in tasks) for name in NAMES]
    assert sorted(counts) == [1] * 10 + [5] * 10
    for task in tasks:
        main = [name for name, (start, stop) in task.items() if stop - start > 0.5]
        assert len(main) == 4
        small = [stop - start for start, stop in task.values() if stop - start < 0.5]
        assert small == pytest.approx([0.1 / 4] * 8)


@pytest.mark.parametrize("values", [{"disjoint": 1.0}, {"disjoint": 0.0, "blur": 0.0}])
def test_classes_without_blur_are_disjoint(values: Any) -> None:
    tasks = cut(kind="blurry", tasks=4, **values)
    check_whole(tasks)
    whole = [[name for name, part in task.items() if part == (0, 1)] for task in tasks]
    assert [len(names) for names in whole] == [5] * 4
    assert [len(task) for task in tasks] == [5] * 4, "no empty parts"
    assert sorted(name for names in whole for name in names) == sorted(NAMES)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("number", "classes"), [(10, 4), (7, 5), (4, 20), (20, 1), (6, 19)])
def test_repeating_classes_fill_all_slots(number: int, classes: int, seed: int) -> None:
    tasks = cut(kind="repeating", tasks=number, classes=classes, seed=seed)
    check_whole(tasks)
    assert [len(task) for task in tasks] == [classes] * number
    counts = {sum(name in task for task in tasks) for name in NAMES}
    assert counts <= {number * classes // 20, number * classes // 20 + 1}


def test_slices_depend_on_seed_but_not_on_class_order() -> None:
    blurry = {"kind": "blurry", "tasks": 5}
    repeating = {"kind": "repeating", "tasks": 9, "classes": 4}
    kinds: list[dict[str, Any]] = [blurry, repeating]
    for values in kinds:
        assert cut(**values) == cut(NAMES[::-1], **values)
        assert cut(**values) != cut(**values, seed=1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "blurry", "tasks": 21}, "has 20 classes for slices.tasks = 21"),
        ({"kind": "repeating", "tasks": 5, "classes": 21}, "slices.classes is at most 20"),
        ({"kind": "repeating", "tasks": 5, "classes": 3}, "slices.classes at least 20"),
    ],
)
def test_impossible_slice_counts_are_refused(values: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        cut(**values)


# ---- configs -------------------------------------------------------------------------------------
@pytest.fixture
def body(tmp_path: Path) -> dict[str, Any]:
    """Return a config of five classes in three slices."""
    card = small_run.make_card(tmp_path, "five", "01234", train=20, test=10)
    body = small_run.make_body(tmp_path, {"five": card}, ["er"], scenario="domain")
    entry = {"card": card, "slices": {"kind": "blurry", "tasks": 3, "blur": 0.5}}
    body["stream"]["tasks"] = [entry]
    return body


def test_slice_tasks_have_all_classes_and_seed_changes_keys(
    body: dict[str, Any], tmp_path: Path
) -> None:
    store = Store(body["storage"])
    config = settings.check(body, "c")
    _, tasks = build_graph(config, store)
    assert [task.name for task in tasks] == ["five-0", "five-1", "five-2"]
    assert {task.classes for task in tasks} == {tuple("01234")}
    content = json.dumps({"name": "c", "stages": [], "tasks": [*map(_task_json, tasks)]})
    assert _from_json(json.loads(content)).tasks == tasks
    small_run.run(["ingest", small_run.write_config(tmp_path / "c.yaml", body)], tmp_path / "o.txt")
    keys = {stage.key for stage in build_graph(config, store)[0]}
    body["stream"]["tasks"][0]["slices"]["seed"] = 3
    others = {stage.key for stage in build_graph(settings.check(body, "c"), store)[0]}
    assert len(keys & others) == 2, "only the data and the backbone keep their keys"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stream": {"scenario": "class"}}, "stream.scenario is 'class'; set it to `domain`"),
        ({"entry": {"split": 5}}, r"slices and stream.tasks.0.split both say which tasks"),
        ({"entry": {"role": "base"}}, r"slices and stream.tasks.0.role both say which tasks"),
        ({"slices": {"classes": 2}}, "classes is 2.*kind"),
        ({"slices": {"tasks": 1}}, "tasks"),
        ({"methods": {"simplecil": {}}}, "methods.simplecil.*'simplecil', which has a head for"),
    ],
)
def test_invalid_slice_settings_are_refused(
    body: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    changed = copy.deepcopy(body)
    changed["stream"] |= change.get("stream", {})
    changed["stream"]["tasks"][0] |= change.get("entry", {})
    changed["stream"]["tasks"][0]["slices"] |= change.get("slices", {})
    changed["methods"] = change.get("methods", changed["methods"])
    with pytest.raises(UserError, match=message):
        settings.check(changed, "c.yaml")


def test_remove_command_refuses_a_config_with_slices(body: dict[str, Any], tmp_path: Path) -> None:
    path = small_run.write_config(tmp_path / "c.yaml", body)
    body["stream"]["tasks"][0]["classes"] = [*"01234"]
    small_run.write_config(Path(path), body)
    small_run.run(["ingest", path], tmp_path / "o.txt")
    process = small_run.start(["remove", path, "--class", "4"], tmp_path / "out.txt")
    process.join(900)
    assert process.exitcode == 2
    text = (tmp_path / "out.txt").read_text()
    assert "it divides images into slices" in text
    assert yaml.safe_load(Path(path).read_text()) == body
