"""Tests of the stage graph: shapes, dependencies of steps, keys, task settings and diagrams."""

from __future__ import annotations

import copy
import shutil
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.config.settings import check
from pipeline.data import card_files
from pipeline.data.formats import source_state
from pipeline.graph import build, diagram, raw_data
from pipeline.graph.stage import Graph
from pipeline.graph.store import Store
from tests import small_run
from workers.errors import UserError
from workers.job import Task
from workers.methods import METHODS
from workers.methods.base import Method, Step

BASE = {"name": "base", "card": "digits", "classes": ["0", "1"], "role": "base"}
TASKS = [
    {"name": name, "card": "digits", "classes": list(classes)}
    for name, classes in (("a", "23"), ("b", "45"), ("c", "67"))
]


def graph_from(
    folder: Any, *labels: str, base: bool = False, **changes: Any
) -> tuple[Graph, list[Task]]:
    tasks = copy.deepcopy(([BASE] if base else []) + TASKS)
    body = {
        "name": "r",
        "methods": {label: {} for label in labels},
        "stream": {"tasks": tasks},
        **changes,
    }
    return build.build_graph(check(body, "test"), Store(str(folder)))


class Chained(Method):
    """A method with three consecutive steps; the second one has no epochs."""

    name = "chained"
    carries = ("weights",)
    steps = (Step("train"), Step("prune", trains=False), Step("retrain"))


class Side(Method):
    """A method with two parallel steps, and one step that waits for both."""

    name = "side"
    carries = ("memory",)
    steps = (
        Step("train"),
        Step("herd", trains=False, after=("train",)),
        Step("calibrate", after=("train",)),
        Step("align", trains=False, after=("herd", "calibrate")),
    )


class Balanced(Method):
    """A method that skips its second step on the first task of a stream."""

    name = "balanced"
    carries = ("weights",)
    steps = (Step("train"), Step("balance", later=True), Step("herd", trains=False))


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "chained", Chained)
    monkeypatch.setitem(METHODS, "side", Side)
    monkeypatch.setitem(METHODS, "balanced", Balanced)


def second_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every card name load the digits."""
    load = card_files.load_card_file
    monkeypatch.setattr(
        card_files,
        "load_card_file",
        lambda name, *rest: load("digits", *rest).model_copy(update={"name": name}),
    )


def test_stream_classes_match_card_in_both_unicode_forms(tmp_path: Path) -> None:
    nfc, nfd = "caf\u00e9", "cafe\u0301"
    for card_form, named in ((nfc, nfd), (nfd, nfc)):
        path = small_run.make_card(tmp_path, "cafe", "01")
        for split in ("train", "test"):
            split_folder = tmp_path / "raw" / "cafe" / split
            (split_folder / "1").rename(split_folder / card_form)
        card = yaml.safe_load(Path(path).read_text()) | {"classes": ["0", card_form]}
        Path(path).write_text(yaml.safe_dump(card))
        task = {"name": "a", "card": path, "classes": ["0", named]}
        body = {"name": "r", "methods": {"finetune": {}}, "stream": {"tasks": [task]}}
        (built,) = build.build_graph(check(body, "test"), Store(str(tmp_path)))[1]
        assert built.classes == ("0", card_form)
        shutil.rmtree(tmp_path / "raw")


# ---- features of a frozen backbone ---------------------------------------------------------------
def test_methods_share_the_features_of_a_task(tmp_path: Path) -> None:
    graph, _ = graph_from(tmp_path, "ncm", "ranpac", "finetune")
    stages = [stage for stage in graph if stage.step == "features"]
    assert [stage.id for stage in stages] == ["features/a", "features/b", "features/c"]
    for stage in stages:
        assert stage.parents == ("backbone", "data/digits")
        readers = {child.id for child in graph.children(stage.id)}
        assert readers == {f"{name}/{stage.task}/statistics" for name in ("ncm", "ranpac")}
        assert graph[f"ncm/{stage.task}/statistics"].job.features == stage.key
    assert all(stage.job.features is None for stage in graph if stage.method == "finetune")


def test_augmentation_changes_no_key_of_steps_that_read_features(tmp_path: Path) -> None:
    plain, _ = graph_from(tmp_path, "ncm")
    flipped, _ = graph_from(tmp_path, "ncm", data={"flip": 0.5})
    fewer, _ = graph_from(tmp_path, "ncm", data={"val_fraction": 0.3})
    for stage in plain:
        assert flipped[stage.id].key == stage.key
        if stage.step in ("features", "statistics"):
            assert (fewer[stage.id].key == stage.key) == (stage.step == "features")


# ---- star, chain, union --------------------------------------------------------------------------
def test_method_without_carried_state_builds_a_star(tmp_path: Path) -> None:
    graph, _ = graph_from(tmp_path, "meat")
    for task in "abc":
        assert graph[f"meat/{task}/train"].parents == ("backbone", "data/digits")
        assert graph[f"meat/{task}/train"].job.previous == {}
        assert graph[f"meat/{task}/train"].job.states == {}


def test_method_with_carried_state_builds_a_chain(tmp_path: Path) -> None:
    graph, _ = graph_from(tmp_path, "finetune")
    assert graph["finetune/a/train"].parents == ("backbone", "data/digits")
    assert graph["finetune/b/train"].parents == ("backbone", "data/digits", "finetune/a/train")
    assert graph["finetune/c/train"].parents == ("backbone", "data/digits", "finetune/b/train")
    assert [graph[f"finetune/{t}/train"].job.previous for t in "abc"] == [
        {},
        {"train": graph["finetune/a/train"].key},
        {"train": graph["finetune/b/train"].key},
    ]


def test_chain_evaluates_all_tasks_and_star_evaluates_new_and_previous(
    tmp_path: Path,
) -> None:
    graph, _ = graph_from(tmp_path, "finetune", "meat")
    chain, star = graph["finetune/c/evaluate"], graph["meat/c/evaluate"]
    assert [t.name for t in chain.job.tasks] == ["a", "b", "c"]
    assert chain.job.states == {t: graph[f"finetune/{t}/train"].key for t in "abc"}
    assert chain.job.previous == {"train": graph["finetune/c/train"].key}
    assert chain.job.measured == ("a", "b", "c")
    assert [t.name for t in star.job.tasks] == ["b", "c"]
    assert star.job.measured == ("b", "c")
    assert star.job.previous == {}
    assert star.parents == ("backbone", "data/digits", "meat/b/train", "meat/c/train")


def test_only_the_report_depends_on_evaluations(tmp_path: Path) -> None:
    graph, _ = graph_from(tmp_path, "finetune", "meat", "chained", base=True)
    evaluations = [s.id for s in graph if s.step == "evaluate"]
    assert set(graph["report"].parents) == set(evaluations)
    assert all([c.id for c in graph.children(i)] == ["report"] for i in evaluations)
    assert len(evaluations) == 3 * 4


def test_joint_training_reads_all_tasks_so_far_and_starts_fresh(tmp_path: Path) -> None:
    graph, _ = graph_from(tmp_path, "joint", base=True)
    job = graph["joint/b/train"].job
    assert [t.name for t in job.tasks] == ["base", "a", "b"]
    assert job.previous == {}
    assert "joint/a/train" not in graph["joint/b/train"].parents
    assert graph["joint/b/train"].inputs["seen"] == [
        ["base", ["0", "1"]],
        ["a", ["2", "3"]],
        ["b", ["4", "5"]],
    ]
    assert [t.name for t in graph["joint/b/evaluate"].job.tasks] == ["base", "a", "b"]


def test_base_task_trains_the_backbone_that_all_methods_evaluate(tmp_path: Path) -> None:
    graph, tasks = graph_from(tmp_path, "finetune", "meat", base=True)
    assert [t.name for t in tasks] == ["base", "a", "b", "c"]
    assert graph["backbone"].parents == ("data/digits",)
    assert graph["backbone"].job.task.name == "base"
    assert "meat/base/train" not in graph.stages
    assert graph["meat/base/evaluate"].job.states == {"base": graph["backbone"].key}
    assert graph["finetune/b/evaluate"].job.states["base"] == graph["backbone"].key
    assert graph["finetune/a/train"].job.previous == {}
    assert graph["finetune/a/train"].job.states == {"base": graph["backbone"].key}


def test_stream_with_only_a_base_task_is_evaluated(tmp_path: Path) -> None:
    graph, _ = graph_from(tmp_path, "meat", stream={"tasks": [BASE]})
    assert set(graph.stages) == {"data/digits", "backbone", "meat/base/evaluate", "report"}


@pytest.mark.parametrize("base", [False, True])
def test_unlabelled_images_pretune_start_of_star(tmp_path: Path, base: bool) -> None:
    entries = [
        {"name": "pictures", "card": "digits", "role": "unlabelled"},
        *([BASE] if base else []),
        *TASKS,
    ]
    graph, tasks = graph_from(tmp_path, "toast", "meat", stream={"tasks": entries})
    assert [t.name for t in tasks] == ["base"] * base + ["a", "b", "c"]
    plain, _ = graph_from(tmp_path, "toast", "meat", base=base)
    assert graph.stages.keys() - plain.stages.keys() == {"toast/pictures/pretune"}
    assert plain.stages.keys() - graph.stages.keys() == ({"toast/base/pretune"} if base else set())
    assert {s.id for s in graph if s.method == "meat" and s.key != plain[s.id].key} == set()
    assert graph["toast/pictures/pretune"].parents == ("backbone", "data/digits")
    pretune = {"pretune": graph["toast/pictures/pretune"].key}
    for stage in (graph["toast/a/train"], graph["toast/c/train"], graph["toast/c/evaluate"]):
        assert stage.job.previous == pretune
        assert "pictures" not in {t.name for t in stage.job.tasks}
    if base:
        assert graph["toast/base/evaluate"].job.states == {"base": graph["backbone"].key}
    best, _ = graph_from(
        tmp_path, "toast", "meat", stream={"tasks": entries}, train={"keep": "best"}
    )
    for job in (
        stage.job for stage in (graph["toast/pictures/pretune"], best["toast/pictures/pretune"])
    ):
        assert (job.data.val_fraction, job.train.keep) == (0.0, "last"), (
            "unlabelled images cannot be validated"
        )
    assert graph["toast/a/train"].job.data.val_fraction > 0


def test_backbone_needs_no_data_without_a_base_task(tmp_path: Path) -> None:
    graph, _ = graph_from(tmp_path, "meat")
    assert graph["backbone"].parents == ()
    assert graph["backbone"].job.task is None


def test_card_with_several_tasks_is_ingested_once(tmp_path: Path) -> None:
    graph, tasks = graph_from(tmp_path, "meat", base=True)
    assert [s.id for s in graph if s.step == "ingest"] == ["data/digits"]
    assert {t.data for t in tasks} == {graph["data/digits"].key}


# ---- steps ---------------------------------------------------------------------------------------
def test_steps_run_in_order_before_the_next_task(tmp_path: Path) -> None:
    graph, _ = graph_from(tmp_path, "chained")
    assert graph["chained/a/prune"].parents == ("backbone", "data/digits", "chained/a/train")
    assert graph["chained/a/retrain"].parents == ("backbone", "data/digits", "chained/a/prune")
    assert graph["chained/b/train"].parents == ("backbone", "data/digits", "chained/a/retrain")
    assert graph["chained/b/evaluate"].job.states == {
        t: graph[f"chained/{t}/retrain"].key for t in "ab"
    }
    assert graph["chained/b/prune"].job.previous == {"train": graph["chained/b/train"].key}
    assert graph["chained/b/prune"].job.states == {"a": graph["chained/a/retrain"].key}


@pytest.mark.parametrize("base", [False, True])
def test_first_task_skips_steps_marked_later(tmp_path: Path, base: bool) -> None:
    graph, _ = graph_from(tmp_path, "balanced", base=base)
    steps = {
        task: [
            s.step
            for s in graph
            if s.task == task and s.method == "balanced" and s.step != "evaluate"
        ]
        for task in "abc"
    }
    whole = ["train", "balance", "herd"]
    assert steps == {"a": whole if base else ["train", "herd"], "b": whole, "c": whole}
    assert graph["balanced/b/train"].job.previous == {"herd": graph["balanced/a/herd"].key}
    if not base:
        assert graph["balanced/a/herd"].job.previous == {"train": graph["balanced/a/train"].key}


def test_parallel_steps_share_parents_and_join(
    tmp_path: Path,
) -> None:
    graph, _ = graph_from(tmp_path, "side")
    for step in ("herd", "calibrate"):
        assert "side/a/train" in graph[f"side/a/{step}"].parents
        assert graph[f"side/a/{step}"].job.previous == {"train": graph["side/a/train"].key}
    assert not {"side/a/herd", "side/a/calibrate"} & {
        *graph["side/a/herd"].parents,
        *graph["side/a/calibrate"].parents,
    }
    assert {"side/a/herd", "side/a/calibrate"} <= set(graph["side/a/align"].parents)
    assert graph["side/a/align"].job.previous == {
        step: graph[f"side/a/{step}"].key for step in ("herd", "calibrate")
    }
    assert "side/a/align" in graph["side/b/train"].parents
    assert graph["side/b/train"].job.previous == {"align": graph["side/a/align"].key}


def test_next_task_waits_for_last_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Forked(Method):
        name = "forked"
        carries = ("memory",)
        steps = (Step("train"), Step("herd", trains=False), Step("probe", after=()))

    monkeypatch.setitem(METHODS, "forked", Forked)
    graph, _ = graph_from(tmp_path, "forked")
    assert graph["forked/a/probe"].parents == ("backbone", "data/digits")
    ends = {step: graph[f"forked/a/{step}"].key for step in ("herd", "probe")}
    assert graph["forked/b/train"].job.previous == graph["forked/b/probe"].job.previous == ends
    assert graph["forked/b/train"].parents == (
        "backbone",
        "data/digits",
        "forked/a/herd",
        "forked/a/probe",
    )
    assert graph["forked/b/evaluate"].job.states == {
        t: graph[f"forked/{t}/probe"].key for t in "ab"
    }
    assert {"forked/b/herd", "forked/b/probe"} <= set(graph["forked/b/evaluate"].parents)
    assert graph["forked/b/evaluate"].job.previous == {
        step: graph[f"forked/b/{step}"].key for step in ("herd", "probe")
    }


def test_chain_stage_waits_for_loaded_states_and_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Loads(Method):
        name = "loads"
        carries = ("memory",)
        reads = "seen"
        needs_states = True

    monkeypatch.setitem(METHODS, "loads", Loads)
    tasks = [BASE, TASKS[0], {**TASKS[1], "card": "roots"}]
    second_card(monkeypatch)
    graph, _ = graph_from(tmp_path, "loads", "finetune", stream={"tasks": tasks})
    assert graph["loads/b/train"].parents == (
        "backbone",
        "data/digits",
        "data/roots",
        "loads/a/train",
    )
    assert graph["finetune/b/train"].parents == ("backbone", "data/roots", "finetune/a/train")
    assert graph["loads/b/train"].job.states == {
        "base": graph["backbone"].key,
        "a": graph["loads/a/train"].key,
    }
    assert graph["loads/b/train"].inputs["seen"] == [
        ["base", ["0", "1"]],
        ["a", ["2", "3"]],
        ["b", ["4", "5"]],
    ]
    assert graph["finetune/b/train"].inputs["seen"] == [["b", ["4", "5"]]]


def test_base_task_starts_from_head_of_backbone_stage(
    tmp_path: Path,
) -> None:
    settings = {"method": "packnet", "base_mode": "prune_retrain"}
    graph, _ = graph_from(
        tmp_path, base=True, methods={"pack": settings}, stream={"tasks": [BASE, TASKS[0]]}
    )
    assert [s.id for s in graph if s.method == "pack" and s.task == "base"] == [
        "pack/base/prune",
        "pack/base/retrain",
        "pack/base/evaluate",
    ]
    prune, retrain, train = (
        graph[f"pack/{stage}"] for stage in ("base/prune", "base/retrain", "a/train")
    )
    assert prune.job.previous == {}
    assert prune.job.states == retrain.job.states == {"base": graph["backbone"].key}
    assert retrain.job.previous == {"prune": prune.key}
    assert train.job.previous == {"retrain": retrain.key}
    assert train.job.states == {"base": retrain.key}
    assert graph["pack/base/evaluate"].job.states == {"base": retrain.key}
    assert graph["pack/a/evaluate"].job.states["base"] == retrain.key


def test_settings_that_need_a_base_task_are_refused_without_one(tmp_path: Path) -> None:
    with pytest.raises(
        UserError,
        match=r"methods\.pack trains steps on the base task, and the stream has none; "
        r"give .* `role: base`",
    ):
        graph_from(tmp_path, methods={"pack": {"method": "packnet", "base_mode": "prune_retrain"}})


def test_scenario_class_evaluates_all_learned_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Apart(Method):
        name = "apart"
        scenarios = frozenset({"task", "class"})

    monkeypatch.setitem(METHODS, "apart", Apart)
    graph_with_task, _ = graph_from(tmp_path, "apart", "finetune")
    graph, _ = graph_from(
        tmp_path, "apart", "finetune", stream={"scenario": "class", "tasks": TASKS}
    )
    assert graph_with_task["apart/c/evaluate"].job.measured == ("b", "c")
    assert (
        graph["apart/c/evaluate"].job.measured
        == graph["finetune/c/evaluate"].job.measured
        == ("a", "b", "c")
    )
    assert graph["apart/c/evaluate"].job.states == {t: graph[f"apart/{t}/train"].key for t in "abc"}
    assert set(graph["finetune/c/train"].parents) == {
        "backbone",
        "data/digits",
        "finetune/a/train",
        "finetune/b/train",
    }


def test_missing_test_data_keeps_place_in_output_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second_card(monkeypatch)
    stream = {"scenario": "class", "tasks": [{**TASKS[0], "card": "roots"}, *TASKS[1:]]}
    graph_from(tmp_path, "finetune", stream=stream)
    monkeypatch.setattr(
        raw_data,
        "source_state",
        lambda card, entries: None if card.name == "roots" else source_state(card, entries),
    )
    graph, _ = graph_from(tmp_path, "finetune", stream=stream)
    job = graph["finetune/b/evaluate"].job
    assert ([t.name for t in job.tasks], job.measured) == (["a", "b"], ("b",))
    assert "data/roots" not in graph["finetune/b/evaluate"].parents


def test_only_the_report_has_no_dependent_stages(tmp_path: Path) -> None:
    graph, _ = graph_from(tmp_path, "side", "chained")
    assert [s.id for s in graph if not graph.children(s.id)] == ["report"]


def test_step_settings_change_keys_from_that_step_on(tmp_path: Path) -> None:
    before, _ = graph_from(tmp_path, "chained")
    after, _ = graph_from(tmp_path, methods={"chained": {"steps": {"retrain": {"epochs": 3}}}})
    same = {s.id for s in before if s.key == after[s.id].key}
    assert same == {"data/digits", "backbone", "chained/a/train", "chained/a/prune"}
    assert after["chained/a/retrain"].job.train.epochs == 3
    assert after["chained/a/train"].job.train.epochs == before["chained/a/train"].job.train.epochs


def test_training_settings_are_not_in_keys_of_other_steps(tmp_path: Path) -> None:
    before, _ = graph_from(tmp_path, "chained")
    assert before["chained/a/prune"].inputs["train"] == {}
    train = before["chained/a/train"]
    assert train.inputs["train"]["epochs"] == train.job.train.epochs > 0


def test_serving_settings_change_only_evaluation_keys(tmp_path: Path) -> None:
    graphs = [
        graph_from(
            tmp_path,
            "supsup",
            methods={"supsup": settings},
            stream={"tasks": TASKS, "scenario": "class"},
        )[0]
        for settings in ({}, {"infer": "one_shot", "density": 0.8}, {"density": 0.8})
    ]
    trained, measured = (
        [graph[f"supsup/a/{step}"] for graph in graphs] for step in ("train", "evaluate")
    )
    assert [stage.job.settings for stage in trained] == [{}, {"density": 0.8}, {"density": 0.8}]
    assert trained[0].key != trained[1].key == trained[2].key
    assert measured[1].job.settings == {"infer": "one_shot", "density": 0.8}
    assert len({stage.key for stage in measured}) == 3


# ---- settings of single tasks --------------------------------------------------------------------
def test_task_settings_apply_to_training_and_common_settings_to_evaluation(
    tmp_path: Path,
) -> None:
    settings = {
        "prune": 0.6,
        "steps": {"retrain": {"lr": 0.25}},
        "tasks": {"b": {"prune": 0.5, "train": {"lr": 0.5, "epochs": 4}}},
    }
    graph, _ = graph_from(tmp_path, methods={"packnet": settings})
    job_settings = {
        i: graph[f"packnet/{i}"].job
        for i in (
            "a/train",
            "b/train",
            "b/prune",
            "b/retrain",
            "c/prune",
            "b/evaluate",
            "c/evaluate",
        )
    }
    assert {i: job.settings["prune"] for i, job in job_settings.items()} == {
        "a/train": 0.6,
        "b/train": 0.5,
        "b/prune": 0.5,
        "b/retrain": 0.5,
        "c/prune": 0.6,
        "b/evaluate": 0.6,
        "c/evaluate": 0.6,
    }
    trained = [
        (job_settings[i].train.lr, job_settings[i].train.epochs)
        for i in ("a/train", "b/train", "b/retrain", "b/evaluate")
    ]
    defaults = graph_from(tmp_path, "packnet")[0]["packnet/a/train"].job.train
    default = (defaults.lr, defaults.epochs)
    assert default[0] not in (0.5, 0.25)
    assert trained == [default, (0.5, 4), (0.25, 4), default]
    assert graph["packnet/b/prune"].inputs["settings"]["prune"] == 0.5
    assert graph["packnet/b/evaluate"].inputs["settings"]["prune"] == 0.6
    assert graph["packnet/b/train"].inputs["train"]["lr"] == 0.5


@pytest.mark.parametrize(
    ("method", "task_settings", "alike"),
    [
        ("meat", {"lambda": 0.6}, {"a/train", "a/evaluate", "c/train"}),
        ("hat", {"c": 0.5}, {"a/train", "a/evaluate"}),
        ("packnet", {"train": {"lr": 0.5}}, {"a/train", "a/prune", "a/retrain", "a/evaluate"}),
    ],
)
def test_task_settings_change_its_keys_and_dependent_keys(
    tmp_path: Path, method: str, task_settings: dict[str, Any], alike: set[str]
) -> None:
    before, _ = graph_from(tmp_path, method)
    after, _ = graph_from(tmp_path, methods={method: {"tasks": {"b": task_settings}}})
    assert before.stages.keys() == after.stages.keys()
    assert {s.id for s in before if s.key == after[s.id].key} == {
        "data/digits",
        "backbone",
        *(f"{method}/{i}" for i in alike),
    }


def test_steps_of_a_task_depend_on_its_own_settings(tmp_path: Path) -> None:
    tasks = {"b": {"prune": [0.5, "none"]}}
    graph, _ = graph_from(tmp_path, methods={"packnet": {"tasks": tasks}})
    assert {t: [s.step for s in graph if s.task == t and s.step != "evaluate"] for t in "abc"} == {
        "a": ["train", "prune", "retrain"],
        "b": ["train"],
        "c": ["train", "prune", "retrain"],
    }


def test_base_and_pretuning_steps_accept_settings(
    tmp_path: Path,
) -> None:
    tasks = {"base": {"train": {"lr": 0.5}}}
    graph, _ = graph_from(
        tmp_path, base=True, methods={"toast": {"tasks": tasks}, "hat": {"tasks": tasks}}
    )
    assert graph["toast/base/pretune"].job.train.lr == graph["hat/base/train"].job.train.lr == 0.5
    defaults, _ = graph_from(tmp_path, "toast", "hat", base=True)
    for name in ("toast/a/train", "hat/a/train", "backbone"):
        assert graph[name].job.train.lr == defaults[name].job.train.lr != 0.5
    pictures = [{"name": "pictures", "card": "digits", "role": "unlabelled"}, *TASKS]
    graph, _ = graph_from(
        tmp_path,
        methods={"toast": {"tasks": {"pictures": {"train": {"lr": 0.5}}}}},
        stream={"tasks": pictures},
    )
    assert graph["toast/pictures/pretune"].job.train.lr == 0.5
    assert graph["toast/a/train"].job.train.lr == defaults["toast/a/train"].job.train.lr


@pytest.mark.parametrize(
    ("name", "base", "message"),
    [
        ("flwers", False, "did you mean 'flowers'"),
        ("elsewhere", False, "those with steps are: a, b, flowers-0, flowers-1"),
        ("flowers", False, "did you mean 'flowers-[01]'"),
        ("base", True, "those with steps are: a, b, flowers"),
    ],
)
def test_settings_for_a_task_without_steps_are_refused(
    tmp_path: Path, name: str, base: bool, message: str
) -> None:
    entry = {
        "name": "flowers",
        "card": "digits",
        "classes": ["6", "7", "8", "9"],
        "split": 0 if message in ("did you mean 'flowers'",) or base else 2,
    }
    stream = {"tasks": [*([BASE] if base else []), *TASKS[:2], entry]}
    with pytest.raises(
        UserError,
        match=rf"methods\.m\.tasks\.{name}: 'meat' has no step for a task '{name}' in this "
        rf"stream; {message}",
    ):
        graph_from(
            tmp_path,
            methods={"m": {"method": "meat", "tasks": {name: {"lambda": 0.6}}}},
            stream=stream,
        )


def test_every_job_holds_its_stage_id_and_key(tmp_path: Path) -> None:
    graph, _ = graph_from(tmp_path, "finetune", "meat", "side", base=True)
    for stage in graph:
        if stage.step not in ("ingest", "report"):
            assert (stage.job.id, stage.job.key) == (stage.id, stage.key)


def test_parents_come_before_their_children(tmp_path: Path) -> None:
    graph, _ = graph_from(tmp_path, "side", "joint", "meat", base=True)
    seen: set[str] = set()
    for stage in graph:
        assert set(stage.parents) <= seen
        seen.add(stage.id)


def test_class_order_is_split_into_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        card_files, "order_classes", lambda name, classes: tuple(classes[i] for i in (7, 2, 9, 4))
    )
    _, tasks = graph_from(
        tmp_path,
        "linear",
        stream={"tasks": [{"card": "digits", "name": "d", "order": "digits/some", "split": 2}]},
    )
    assert [task.classes for task in tasks] == [("7", "2"), ("9", "4")]
    with pytest.raises(UserError, match="task 'd' has `classes` and `order` 'digits/some'"):
        graph_from(
            tmp_path,
            "linear",
            stream={
                "tasks": [{"card": "digits", "name": "d", "order": "digits/some", "classes": ["1"]}]
            },
        )


def test_duplicate_task_names_and_second_base_task_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="two tasks are called 'a'"):
        graph_from(tmp_path, "meat", stream={"tasks": [TASKS[0], {**TASKS[1], "name": "a"}]})
    with pytest.raises(UserError, match="'base' and 'second' both have role `base`"):
        graph_from(tmp_path, "meat", stream={"tasks": [BASE, {**BASE, "name": "second"}]})


# ---- diagrams ------------------------------------------------------------------------------------
LABELS = ("finetune", "meat", "joint", "chained", "side")


@pytest.mark.parametrize(("labels", "base"), [(LABELS, True), (("meat", "ncm", "slda"), False)])
def test_svg_diagram_shows_every_stage_and_arrow(
    tmp_path: Path, labels: tuple[str, ...], base: bool
) -> None:
    graph, _ = graph_from(tmp_path, *labels, base=base)
    status = {s.id: "miss" if s.step == "train" else "hit" for s in graph}
    root = ElementTree.fromstring(diagram.to_svg(graph, status))
    titles = [t.text or "" for t in root.iter("{http://www.w3.org/2000/svg}title")]
    assert sorted(t.split()[0] for t in titles) == sorted(s.id for s in graph)
    assert all(graph[t.split()[0]].key[:12] == t.split()[1] for t in titles)
    boxes = [(r.get("x"), r.get("y")) for r in root.iter("{http://www.w3.org/2000/svg}rect")]
    assert len(set(boxes)) == len(boxes) == len(graph)
    assert len(list(root.iter("{http://www.w3.org/2000/svg}path"))) >= len(graph) - 2
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    assert all(0 <= float(x or 0) < width and 0 <= float(y or 0) < height for x, y in boxes)


def test_arrows_point_to_the_right(tmp_path: Path) -> None:
    graph, _ = graph_from(tmp_path, *LABELS)
    root = ElementTree.fromstring(diagram.to_svg(graph, {}))
    groups = list(root.iter("{http://www.w3.org/2000/svg}g"))
    x_by_label = {g[0].text.split()[0]: float(g[1].get("x", 0)) for g in groups if g[0].text}
    assert all(x_by_label[p] < x_by_label[s.id] for s in graph for p in s.parents)


def test_text_diagram_shows_stars_chains_and_pending_stages(tmp_path: Path) -> None:
    graph, _ = graph_from(tmp_path, *LABELS, base=True)
    status = {s.id: "miss" if s.task == "c" else "hit" for s in graph}
    lines = diagram.to_text(graph, status).splitlines()
    by_label = {line.split()[0]: line for line in lines}
    assert "data/digits  backbone" in by_label["shared"]
    width = max(map(len, LABELS))
    assert {line[width : width + 3] for line in lines} == {"   "}
    assert all(line[width + 3] != " " for line in lines)
    assert "a -> b -> c*" in by_label["finetune"]
    assert "a | b | c*" in by_label["meat"]
    assert "a -> a/prune -> a/retrain -> b" in by_label["chained"]
    assert "4 evaluate (1 to run)" in by_label["meat"]
    for stage in graph:
        if stage.method and stage.step not in ("evaluate", "train"):
            assert f"{stage.task}/{stage.step}" in by_label[stage.method]


def test_svg_diagram_shows_states_and_times_and_links_to_stages(tmp_path: Path) -> None:
    graph, _ = graph_from(tmp_path, "meat")
    states = {stage.id: "running" if stage.step == "train" else "done" for stage in graph}
    times = {"backbone": "3.0 s"}
    links = {stage.id: f"report.html#stage-{stage.id}" for stage in graph}
    root = ElementTree.fromstring(diagram.to_svg(graph, states, times, links))
    name = "{http://www.w3.org/2000/svg}"
    by_stage = {}
    for link in root.iter(f"{name}a"):
        box = link[0]
        by_stage[(box[0].text or "").split()[0]] = link
        colour = box[1].get("fill")
        assert colour == diagram.COLOURS[states[(box[0].text or "").split()[0]]]
    assert set(by_stage) == set(graph.stages)
    assert {link.get("href") for link in by_stage.values()} == set(links.values())
    assert (by_stage["backbone"][0][0].text or "").endswith(" done 3.0 s")
    texts = [text.text for text in root.iter(f"{name}text")]
    assert texts.count("3.0 s") == 1
    assert texts[-2:] == ["done", "running"]  # the legend
    boxes = [(int(r.get("y") or 0), int(r.get("height") or 0)) for r in root.iter(f"{name}rect")]
    tops = sorted({top for top, _ in boxes})
    assert all(below - above >= boxes[0][1] for above, below in pairwise(tops))


def test_status_text_is_escaped_in_the_svg_diagram(tmp_path: Path) -> None:
    graph, _ = graph_from(tmp_path, "meat")
    ElementTree.fromstring(diagram.to_svg(graph, {"backbone": "<&>"}))
