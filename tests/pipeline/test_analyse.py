"""Tests of `analyse`: tables and pictures in reports and records, and its error messages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from PIL import Image, ImageOps

from pipeline import cli
from pipeline.app import analysis
from pipeline.app import runs as app
from pipeline.graph.store import Store
from pipeline.report import analyse, analysis_section, maps
from pipeline.results.tables import RunTables
from pipeline.tracking import mlflow_client
from tests import small_run
from workers.analysis import Maps

Say = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the config paths of four finished runs and of `unfinished`, which was never run. The
    finished runs are without and with scaled context, with one head, and without attention."""
    folder = tmp_path_factory.mktemp("analyse")
    cards = small_run.make_cards(folder, "ab")
    options = {**small_run.BACKBONE["options"], "num_heads": 1}
    changes: dict[str, dict[str, Any]] = {
        "plain": {"methods": {"finetune": {}, "meat": {}}},
        "scaled": {"methods": {"finetune": {}}, "backbone": {"context": {"kind": "cbs"}}},
        "one-head": {"methods": {"finetune": {}}, "backbone": {"options": options}},
        "unfinished": {"methods": {"finetune": {}}, "seed": 9},
        "convolutions": {
            "methods": {"linear": {}},
            "backbone": {
                "name": "resnet18",
                "img_size": 32,
                "options": {
                    "layers": [1, 1, 1, 1],
                    "channels": [8, 8, 8, 8],
                    "norm_layer": "groupnorm1",
                },
            },
        },
    }
    config_paths = {}
    for name, change in changes.items():
        body = small_run.make_body(
            folder, cards, change["methods"], name=name, seed=change.get("seed", 5)
        )
        body["backbone"] = {**body["backbone"], **change.get("backbone", {})}
        config_paths[name] = small_run.write_config(folder / f"{name}.yaml", body)
    for name in ("plain", "scaled", "one-head", "convolutions"):
        small_run.run(["run", config_paths[name]], folder / f"{name}.txt")
    return config_paths


@pytest.fixture(autouse=True)
def _faint_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the report by its insert markers, so that no pictures are drawn."""
    from pipeline.report import page

    report_files = {"report.html": "".join(analysis_section.INSERT_MARKERS).encode()}
    monkeypatch.setattr(page, "build_run_report", lambda *_: report_files)
    monkeypatch.setattr(analysis, "read_or_build_report", lambda *_: report_files)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture
def say(configs: dict[str, str], capsys: pytest.CaptureFixture[str]) -> Say:
    """Return a function that runs a command and returns its exit code and output. Arguments that
    are names of `configs` are replaced by the paths."""

    def run_command(*arguments: str) -> tuple[int, str]:
        code = cli.main([configs.get(a, a) for a in arguments])
        captured = capsys.readouterr()
        return code, captured.err if code else captured.out

    return run_command


def out(configs: dict[str, str], name: str) -> Path:
    return Path(configs[name]).parent / "storage" / "runs" / name


def rows_of(configs: dict[str, str], name: str, table: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(out(configs, name) / f"{table}.parquet").to_pylist()
    return rows


def page_of(configs: dict[str, str], name: str) -> str:
    return (out(configs, name) / "report.html").read_text()


# ---- measurements --------------------------------------------------------------------------------
@pytest.mark.few(1)
def test_analyse_writes_tables_and_pictures_for_each_method(
    configs: dict[str, str], say: Say
) -> None:
    code, output = say("analyse", "plain", "--images", "8", "--robustness")
    rows = rows_of(configs, "plain", "analysis")
    assert code == 0
    assert [(r["label"], r["task"], r["block"], r["head"]) for r in rows] == [
        (label, task, block, head)
        for label in ("finetune", "meat")
        for task in "ab"
        for block in range(2)
        for head in range(2)
    ]
    assert {r["name"] for r in rows} == {"finetune", "meat"}
    assert all(r["scale"] is None for r in rows)
    assert (out(configs, "plain") / "analysis.csv").read_text().count("\n") == 1 + len(rows)
    for name in ("analysis.png", "robustness.png", "maps-finetune.png", "maps-meat.png"):
        assert (out(configs, "plain") / name).read_bytes().startswith(b"\x89PNG")
    assert {r["kind"] for r in rows_of(configs, "plain", "robustness")} == {"occlusion", "fgsm"}
    assert "fgsm" in output
    assert not (out(configs, "plain") / "heads.png").exists(), (
        "all methods have the same number of heads"
    )


def test_printed_table_shows_evaluated_accuracy_beside_entropy(
    configs: dict[str, str], say: Say
) -> None:
    lines = [
        line.split()
        for line in say("analyse", "plain", "--images", "8", "--maps", "0")[1].splitlines()[:3]
    ]
    record = json.loads((out(configs, "plain") / "run.json").read_text())
    tables = RunTables.load(str(Path(configs["plain"]).parent / "storage"), record)
    assert lines[0][:3] == ["method", "accuracy", "entropy"]
    for label, words in zip(("finetune", "meat"), lines[1:], strict=True):
        assert words[:2] == [label, f"{100 * tables.matrix(label).final['average_accuracy']:.1f}"]


def test_tasks_are_analysed_with_the_model_of_the_last_stage(configs: dict[str, str]) -> None:
    prepared = app.prepare(configs["plain"])
    run = analyse.FinishedRun(prepared.config, prepared.graph, prepared.store, cast(Any, {}))
    for label in ("finetune", "meat"):
        assert [(job.id, task) for _, job, task in analyse.load_methods(run, label)] == [
            (f"{label}/b/evaluate", task) for task in prepared.tasks
        ]


def test_several_runs_are_compared_in_the_first_runs_folder(
    configs: dict[str, str], say: Say
) -> None:
    code, output = say("analyse", "scaled", "plain", "--images", "8", "--maps", "1")
    rows = rows_of(configs, "scaled", "analysis")
    assert code == 0
    assert list(dict.fromkeys(r["name"] for r in rows)) == [
        "scaled",
        "plain: finetune",
        "plain: meat",
    ], "a run with one method is labeled with the run name"
    assert all((r["scale"] is not None) == (r["run"] == "scaled") for r in rows)
    assert "plain: meat" in output
    assert {p.name for p in out(configs, "scaled").glob("maps-*.png")} == {
        "maps-scaled.png",
        "maps-plain~finetune.png",
        "maps-plain~meat.png",
    }
    assert "Compared: scaled, plain." in page_of(configs, "scaled")


def test_different_head_numbers_are_plotted_against_accuracy(
    configs: dict[str, str], say: Say
) -> None:
    assert say("analyse", "one-head", "plain", "scaled", "--images", "8", "--maps", "0")[0] == 0
    differences = [
        (r["run"], r["label"], r["family"], r["heads"])
        for r in rows_of(configs, "one-head", "heads")
    ]
    assert differences == [
        ("one-head", "finetune", "finetune", 1),
        ("plain", "finetune", "finetune", 2),
        ("plain", "meat", "meat", 2),
        ("scaled", "finetune", "finetune, cbs", 2),
    ]
    assert (out(configs, "one-head") / "heads.png").read_bytes().startswith(b"\x89PNG")
    assert "Accuracy against number of heads" in page_of(configs, "one-head")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["unfinished"], "run 'unfinished': stage finetune/a/evaluate has no result yet"),
        (["convolutions"], "its backbone must be a vision transformer"),
        (["plain", "--images", "0"], "--images is 0"),
        (["plain", "--maps", "-1"], "--maps is -1"),
        (
            ["plain", "--maps", "33"],
            "--maps is 33; give the number of test images of a task, 0 to 32",
        ),
        (["plain", "plain"], "two of these configs are runs called 'plain'"),
        (["plain", "unfinished"], "run 'unfinished': stage finetune/a/evaluate has no result yet"),
        (["plain", "--on", "nowhere"], "card 'nowhere' does not exist"),
        ([], "the following arguments are required: config"),
    ],
)
def test_invalid_analyse_arguments_print_one_line_error(
    say: Say, arguments: list[str], sentence: str
) -> None:
    code, output = say("analyse", *arguments)
    assert code == 2
    assert sentence in output
    assert output.count("\n") == 1


def test_unfinished_run_is_refused_before_any_measurement(
    say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(analyse, "attention_rows", lambda *_: pytest.fail("measured"))
    assert say("analyse", "plain", "unfinished")[0] == 2


def test_error_names_stage_of_missing_or_damaged_result(configs: dict[str, str], say: Say) -> None:
    run = app.prepare(configs["one-head"])
    files = [*(Path(run.store.root) / run.graph["finetune/b/train"].key).rglob("task.safetensors")]
    original_bytes = files[0].read_bytes()
    try:
        for harm in (lambda: files[0].write_bytes(original_bytes[:-1]), lambda: files[0].unlink()):
            harm()
            code, output = say("analyse", "one-head", "--images", "8", "--maps", "0")
            assert code == 2
            assert (
                "run 'one-head': the result of stage finetune/b/train is missing or damaged; "
                "`python -m pipeline run` computes it again" in output
            )
    finally:
        files[0].write_bytes(original_bytes)


def test_network_without_attention_still_gets_robustness_tests(
    configs: dict[str, str], say: Say
) -> None:
    code, output = say("analyse", "convolutions", "--images", "8", "--robustness")
    assert code == 0
    assert "attention: none of these methods has any" in output
    assert "maps: none of linear" in output
    assert rows_of(configs, "convolutions", "robustness")
    assert not (out(configs, "convolutions") / "analysis.png").exists()


# ---- another card --------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def inverted(configs: dict[str, str]) -> str:
    """Return a card with test images only: the inverted test images of task b."""
    folder = Path(configs["plain"]).parent
    for path in (folder / "raw" / "b" / "test").rglob("*.png"):
        target = folder / "raw" / "inverted" / "all" / path.parent.name / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        ImageOps.invert(Image.open(path).convert("L")).save(target)
    body = {
        "name": "inverted",
        "licence": "CC BY 4.0",
        "classes": "from_source",
        "num_classes": 2,
        "source": {
            "format": "folder",
            "path": str(folder / "raw" / "inverted"),
            "splits": {"test": "all"},
        },
    }
    path = folder / "cards" / "inverted.yaml"
    path.write_text(yaml.safe_dump(body))
    return str(path)


@pytest.mark.slow
def test_a_finished_model_is_tested_on_another_card(
    configs: dict[str, str], inverted: str, say: Say
) -> None:
    code, output = say("analyse", "plain", "--images", "8", "--maps", "0", "--on", inverted)
    rows = rows_of(configs, "plain", "shifted")
    assert code == 0
    assert [
        (r["label"], r["task"], r["kind"], r["card"], r["images"], r["total"]) for r in rows
    ] == [
        (label, "b", "shifted", "inverted", card_name, 20)
        for label in ("finetune", "meat")
        for card_name in ("b", "inverted")
    ], "all test images must be used"
    assert "own (inverted)" in output
    first_rows = rows_of(configs, "plain", "shifted")
    assert say("analyse", "plain", "--images", "8", "--maps", "0", "--on", inverted)[0] == 0, (
        "the existing shards must be reused"
    )
    assert rows_of(configs, "plain", "shifted") == first_rows


def test_card_with_the_same_images_reproduces_evaluated_accuracy(
    configs: dict[str, str], inverted: str, say: Say
) -> None:
    say("analyse", "plain", "--images", "8", "--maps", "0", "--on", inverted)
    record = json.loads((out(configs, "plain") / "run.json").read_text())
    tables = RunTables.load(str(Path(configs["plain"]).parent / "storage"), record)
    for row in rows_of(configs, "plain", "shifted"):
        if row["images"] == "b":
            assert row["correct"] == tables.matrix(row["label"]).correct[1, 1]


@pytest.mark.slow
def test_page_keeps_robustness_beside_results_on_another_card(
    configs: dict[str, str], inverted: str, say: Say
) -> None:
    say("analyse", "one-head", "--images", "8", "--maps", "0", "--robustness")
    say("analyse", "one-head", "--images", "8", "--maps", "0", "--on", inverted)
    assert {"robustness", "shifted"} <= json.loads(
        (out(configs, "one-head") / "analysis.json").read_text()
    ).keys()
    for title in ("<b>Robustness.</b>", "<b>Images of another card.</b>"):
        assert title in page_of(configs, "one-head")


def test_card_that_no_task_covers_is_refused(configs: dict[str, str], say: Say) -> None:
    other = small_run.make_card(Path(configs["plain"]).parent, "beyond", "49")
    code, output = say("analyse", "plain", "--on", other)
    assert code == 2
    assert (
        "--on 'beyond': no task of run 'plain' has all its 2 classes; 'b', which has most, "
        "lacks '9'" in output
    )
    assert output.count("\n") == 1


# ---- the report page -----------------------------------------------------------------------------
def test_the_page_shows_the_analysis(configs: dict[str, str], say: Say) -> None:
    (out(configs, "plain") / "analysis.json").unlink(missing_ok=True)
    say("analyse", "plain", "--images", "8", "--robustness", "--maps", "1")
    text = page_of(configs, "plain")
    assert (
        text.index('<a href="#analysis">Attention and robustness</a>')
        < text.index('<h2 id="analysis">Attention and robustness</h2>')
        < text.index('<h2 id="sizes">')
    )
    assert text.count("data:image/png;base64,") == 4
    assert "<code>robustness.parquet</code>" in text
    assert say("analyse", "plain", "--images", "8", "--maps", "0")[0] == 0
    assert page_of(configs, "plain").count("data:image/png;base64,") == 4, (
        "parts that were not computed again must be kept"
    )
    assert say("report", "plain")[0] == 0
    assert page_of(configs, "plain").count("data:image/png;base64,") == 4


def test_page_keeps_analysis_after_rerun(
    configs: dict[str, str], say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    say("analyse", "plain", "--images", "8", "--maps", "1")
    page_before = page_of(configs, "plain")
    monkeypatch.setattr(
        app,
        "report_files",
        lambda *_: {"report.html": "".join(analysis_section.INSERT_MARKERS).encode()},
    )
    code, output = say("run", "plain")
    assert code == 0
    assert "nothing to do" in output
    assert page_of(configs, "plain") == page_before


def test_outdated_analysis_is_omitted_from_page(configs: dict[str, str], say: Say) -> None:
    say("analyse", "scaled", "plain", "--images", "8", "--maps", "1")
    store = Store(str(Path(configs["plain"]).parent / "storage"))
    record, other = store.record("scaled"), store.record("plain")
    assert record is not None
    assert other is not None
    page = {"report.html": "".join(analysis_section.INSERT_MARKERS).encode()}
    assert b"data:image" in analysis_section.add_section(page, record, store)["report.html"]
    changed: Any = {
        **record,
        "stages": [
            {**s, "key": "0" * 32} if s["id"] == "finetune/b/evaluate" else s
            for s in record["stages"]
        ],
    }
    without = analysis_section.add_section(page, changed, store)["report.html"].decode()
    assert "data:image" not in without
    assert "is left out, because the results that it measured have changed" in without
    renamed: Any = {**record, "name": "moved"}
    assert analysis_section.add_section(page, renamed, store) == page, (
        "the folder of the new name has no analysis"
    )
    (out(configs, "scaled").parent / "moved").mkdir()
    for path in out(configs, "scaled").iterdir():
        (out(configs, "scaled").parent / "moved" / path.name).write_bytes(path.read_bytes())
    assert b"data:image" in analysis_section.add_section(page, renamed, store)["report.html"], (
        "a new run name must not invalidate the analysis"
    )
    grown: Any = {
        **record,
        "stages": [
            *record["stages"],
            {"id": "finetune/c/evaluate", "key": "1" * 32, "step": "evaluate"},
        ],
    }
    assert b"data:image" not in analysis_section.add_section(page, grown, store)["report.html"]
    try:
        store.save_record({**other, "stages": [{**s, "key": "0" * 32} for s in other["stages"]]})
        assert (
            b"data:image" not in analysis_section.add_section(page, record, store)["report.html"]
        ), "the results of a compared run have changed"
    finally:
        store.save_record(other)


def test_damaged_analysis_list_leaves_page_unchanged(
    configs: dict[str, str], tmp_path: Path
) -> None:
    store = Store(str(tmp_path))
    page = {"report.html": "".join(analysis_section.INSERT_MARKERS).encode()}
    for text in ("", "[]", '{"attention": 1}', '{"attention": {}}'):
        (tmp_path / "runs" / "some").mkdir(parents=True, exist_ok=True)
        (tmp_path / "runs" / "some" / analysis_section.LIST_FILE).write_text(text)
        assert (
            analysis_section.add_section(page, cast(Any, {"name": "some", "stages": []}), store)
            == page
        )


# ---- maps ----------------------------------------------------------------------------------------
def test_attention_map_is_brightest_at_its_highest_patch() -> None:
    image = np.zeros((maps.CELL, maps.CELL, 3), np.float32)
    look = torch.zeros(4, 4)
    look[0, 3] = 2.0
    drawn = maps.blend_map(image, look, "viridis", 2.0).sum(-1)
    y, x = np.unravel_index(drawn.argmax(), drawn.shape)
    assert y < maps.CELL / 4 <= 3 * maps.CELL / 4 < x


def test_optional_selection_map_is_drawn_between_first_and_second_look() -> None:
    looks = {
        "block 3, first look": torch.ones(2, 4, 4),
        "block 3, second look": torch.ones(2, 4, 4),
    }
    images = torch.rand(2, 16, 16, 3)
    entries = [
        ("base", Maps(images, ["a", "b"], ["a", "a"], looks)),
        ("one", Maps(images, ["a", "b"], ["a", "b"], looks, torch.ones(2, 4, 4))),
    ]
    assert maps._titles(entries) == ["block 3, first look", "selected", "block 3, second look"]
    words = [text.get_text() for text in maps.draw_maps("toast", entries).texts]
    assert words.count("answered right") == 3
    assert words.count("answered\na") == 1
    assert {
        "attention of the class token, 1 is uniform",
        "selected: clamp(cos(x, ξ), 0, 1)",
        "one",
        "toast",
    } <= set(words)


# ---- the record ----------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def tracked(configs: dict[str, str]) -> str:
    path = Path(configs["scaled"])
    body = {**yaml.safe_load(path.read_text()), "tracking": True}
    return small_run.write_config(path.parent / "tracked.yaml", body)


@pytest.mark.slow
def test_repeated_analysis_records_each_mlflow_curve_once(
    configs: dict[str, str], tracked: str, inverted: str, say: Say
) -> None:
    def recorded() -> tuple[dict[tuple[str, str], dict[int, float]], set[str], int]:
        client, _, experiment = mlflow_client.open_store(str(Path(tracked).parent / "storage"))
        runs = {
            (r.data.tags.get("label", ""), r.data.tags.get("task", "")): r
            for r in client.search_runs([experiment], max_results=1000)
        }
        curves = {
            (label, name): [
                (m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)
            ]
            for (label, task), run in runs.items()
            if not task
            for name in run.data.metrics
        }
        assert all(len(curve) == len(dict(curve)) for curve in curves.values()), (
            "each step must have one value"
        )
        paths = {f.path for f in client.list_artifacts(runs["", ""].info.run_id, "analysis")}
        return {key: dict(curve) for key, curve in curves.items()}, paths, len(runs)

    command = ["analyse", tracked, "--images", "8", "--robustness", "--on", inverted, "--maps", "1"]
    assert say(*command)[0] == 0
    curves, paths, count = recorded()
    rows = rows_of(configs, "scaled", "analysis")
    for name, value in (
        ("attention_entropy", "entropy"),
        ("attention_distance", "distance"),
        ("attention_distance_to_others", "distance_to_others"),
        ("context_scale", "scale"),
    ):
        assert curves["finetune", name] == {
            block: pytest.approx(np.mean([r[value] for r in rows if r["block"] == block]), rel=1e-5)
            for block in range(2)
        }
    assert [*curves["finetune", "accuracy_occluded"]] == [0, 10, 20, 25, 30, 40, 50]
    assert [*curves["finetune", "accuracy_fgsm"]] == [0, 1, 2, 4, 8]
    assert [*curves["finetune", "accuracy_shifted/inverted"]] == [0]
    assert {
        f"analysis/{name}"
        for name in (
            "analysis.csv",
            "analysis.json",
            "analysis.png",
            "robustness.png",
            "maps-finetune.png",
        )
    } <= paths
    assert say(*command)[0] == 0
    assert recorded() == (curves, paths, count)


def test_analysis_skips_disabled_tracking_and_warns_if_mlflow_fails(
    tracked: str, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no database today")

    monkeypatch.setattr(mlflow_client, "open_store", broken)
    assert "no database" not in say("analyse", "scaled", "--images", "8", "--maps", "0")[1]
    code, output = say("analyse", tracked, "--images", "8", "--maps", "0")
    assert code == 0
    assert "no database today" in output


PART = {
    "analysis-of": [{"run": "some", "evaluations": {}}],
    "files": ["a.csv"],
    "tables": [[["method"], [["finetune"]]]],
    "pictures": [{"name": "a.png", "title": "A", "says": "a"}],
}


@pytest.mark.parametrize(
    "damage",
    [
        {"files": None},
        {"files": ["../secret.csv"]},
        {"tables": [[["method"]]]},
        {"pictures": [{"name": "a.png"}]},
        {"pictures": [{"name": "../secret.png", "title": "A", "says": "a"}]},
        {"analysis-of": [{"run": "some"}]},
        {"analysis-of": ["some"]},
    ],
)
def test_damaged_analysis_parts_are_omitted_from_page(
    tmp_path: Path, damage: dict[str, Any]
) -> None:
    folder = tmp_path / "runs" / "some"
    folder.mkdir(parents=True)
    page = {"report.html": "".join(analysis_section.INSERT_MARKERS).encode()}
    store = Store(str(tmp_path))
    record = cast(Any, {"name": "some", "stages": []})
    for key in PART:
        text = json.dumps({"attention": {k: v for k, v in PART.items() if k != key}})
        (folder / analysis_section.LIST_FILE).write_text(text)
        assert analysis_section.add_section(page, record, store) == page
    text = json.dumps({"attention": {**PART, **damage}, "robustness": PART})
    (folder / analysis_section.LIST_FILE).write_text(text)
    assert [*analysis_section.load_parts(store, "some")] == ["robustness"]
    html = analysis_section.add_section(page, record, store)["report.html"]
    assert b"<code>a.csv</code>" in html


def test_new_analysis_keeps_unknown_parts_in_list(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "some"
    folder.mkdir(parents=True)
    (folder / analysis_section.LIST_FILE).write_text(json.dumps({"other": PART}))
    records = [cast(Any, {"name": "some", "stages": []})]
    parts = {"maps": analysis_section.AnalysisPart([])}
    files = analysis_section.build_files(parts, records, Store(str(tmp_path)))
    assert [*json.loads(files[analysis_section.LIST_FILE])] == ["maps", "other"]
