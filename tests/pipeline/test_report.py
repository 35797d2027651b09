"""Tests of the report: its tables, figures and self-contained page, also of unfinished runs."""

import hashlib
import inspect
import io
import json
import math
import re
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import fake_run
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from pipeline import cli
from pipeline.app.reports import REPORT_FILES, export
from pipeline.config.text import format_bytes, format_percent
from pipeline.graph.run import Outcome
from pipeline.graph.store import Store
from pipeline.report import (
    analysis_section,
    attention,
    figures,
    html_parts,
    maps,
    mask_plots,
    page,
    plots,
    samples,
    search_pictures,
    search_plots,
)
from pipeline.results import metrics
from pipeline.results.masks import BINS, MaskView, capacity, kinds, load_mask_view, overlap
from pipeline.results.tables import RunTables, TaskSizes
from pipeline.shell import console
from pipeline.tracking.points import (
    history_points,
    matrix_points,
    method_files,
    method_report_files,
)
from workers.methods import METHODS
from workers.methods.base import Method
from workers.storage.artifact import Artifact, withdraw
from workers.storage.taskstate import Carried, TaskState

pytestmark = pytest.mark.usefixtures("small_pictures")


@pytest.fixture(scope="module")
def tables(storage: Any) -> Any:
    return RunTables.load(storage, fake_run.record())


@pytest.fixture(scope="module")
def report(storage: Any) -> Any:
    return page.build_run_report(storage, fake_run.record())


def half(folder: Any, *missing: Any) -> Any:
    """Return the tables of a run without the stages that have one of the id prefixes `missing`."""
    fake_run.write(str(folder), {s.id for s in fake_run.stages() if not s.id.startswith(missing)})
    return RunTables.load(str(folder), fake_run.record())


# ---- matrices ------------------------------------------------------------------------------------
def test_star_matrix_follows_from_its_diagonal(
    tables: Any,
) -> None:
    chain, star = tables.matrix("finetune"), tables.matrix("meat")
    lower = np.tril(np.ones((4, 4), bool))
    assert (chain.source[lower] == "measured").all()
    assert (np.diagonal(star.source) == "measured").all()
    assert (star.source[np.tril(lower, -2)] == "follows").all()
    assert (
        star.source[np.tril(lower, -1) & ~np.tril(lower, -2)] == "measured"
    ).all()  # the canaries
    assert (star.source[~lower] == "ahead").all()
    assert np.isnan(star.correct[~lower]).all()
    for t, i in zip(*np.nonzero(lower), strict=True):
        assert star.correct[t, i] == round(fake_run.IMAGES[i] * fake_run.accuracy("meat", i, i))
        assert chain.correct[t, i] == round(
            fake_run.IMAGES[i] * fake_run.accuracy("finetune", t, i)
        )
        assert chain.total[t, i] == fake_run.IMAGES[i]


def test_a_star_does_not_forget_and_fine_tuning_does(tables: Any) -> None:
    assert tables.matrix("meat").final["forgetting"] == 0
    assert tables.matrix("hat-small").final["forgetting"] == 0
    assert tables.matrix("finetune").final["forgetting"] > 0.3


def test_missing_test_data_gives_holes_not_zero_forgetting(
    tmp_path: Path,
) -> None:
    """Missing values must not be filled in from the diagonal: a chain may have changed them."""
    fake_run.write(str(tmp_path))
    tables = RunTables.load(str(tmp_path), fake_run.record())
    result = tables.artifacts["finetune/roots/evaluate"].manifest["result"]
    result["rows"] = [r for r in result["rows"] if r["task"] == "roots"]
    matrix = tables.matrix("finetune")
    assert matrix.source[3].tolist() == ["missing", "missing", "missing", "measured"]
    assert np.isnan(metrics.METRICS["forgetting"](matrix.correct, matrix.total))


def test_report_of_unfinished_run_has_the_available_rows(tmp_path: Path) -> None:
    tables = half(tmp_path, "finetune/roots", "meat/leaves/evaluate", "hat-small")
    finetune, star, nothing = (tables.matrix(label) for label in ("finetune", "meat", "hat-small"))
    assert (finetune.finished, star.finished, nothing.finished) == (3, 2, 0)
    assert (finetune.source[3] == "missing").all()
    assert star.source[3].tolist() == ["follows", "follows", "measured", "measured"]
    assert finetune.final["average_accuracy"] == pytest.approx(np.mean(finetune.rates[2, :3]))
    assert nothing.final == {}
    row = next(r for r in tables.summary() if r["label"] == "hat-small")
    assert math.isnan(row["average_accuracy"])
    # the head of the base task exists
    assert row["growth"] == pytest.approx(1 + 528 / fake_run.BACKBONE_BYTES)


def test_empty_store_gives_a_page_without_comparison_figure(tmp_path: Path) -> None:
    files = page.build_run_report(str(tmp_path), fake_run.record())
    assert "0 of 25 stages finished so far" in files["report.html"].decode()
    assert "comparison.png" not in files


def test_task_aware_matrix_is_absent_unless_recorded(tables: Any) -> None:
    assert "measured" not in tables.matrix("finetune", "correct_task_aware").source


def test_scenario_class_reports_top5_and_task_aware(
    storage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = RunTables.evaluation_rows

    def counted(self: Any, label: Any, after: Any) -> Any:
        return [
            row
            | {
                "correct_top5": (row["correct"] + row["total"]) // 2,
                "correct_task_aware": row["total"],
            }
            for row in measured(self, label, after)
        ]

    monkeypatch.setattr(RunTables, "evaluation_rows", counted)
    record = fake_run.record()
    assert "top-5" not in page.render_summary(RunTables.load(storage, record))
    record["config"]["stream"]["scenario"] = "class"
    tables = RunTables.load(storage, record)
    matrix, row = (
        tables.matrix("finetune"),
        next(r for r in tables.summary() if r["label"] == "finetune"),
    )
    halfway = (matrix.correct[3] + matrix.total[3]) // 2
    assert row["top5_last_accuracy"] == pytest.approx(halfway.sum() / matrix.total[3].sum())
    assert row["top5_average_accuracy"] == pytest.approx((halfway / matrix.total[3]).mean())
    assert (
        row["average_accuracy"]
        < row["top5_average_accuracy"]
        < row["task_aware_average_accuracy"]
        == 1
    )
    assert {"top5_last_accuracy", "task_aware_average_incremental_accuracy"} <= {
        p.name for p in matrix_points(matrix)
    }
    assert "top-5" in page.render_summary(tables)


def test_registered_metric_appears_everywhere(
    tables: RunTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    def worst_accuracy(a: metrics.Accuracies) -> metrics.Array:
        lowest: metrics.Array = a.rates[..., -1, :].min(-1)
        return lowest

    metric = metrics.Metric(
        "worst_accuracy",
        "lowest accuracy of a task, after the last one",
        "rate",
        max,
        ("report", "console", "comparison", "mlflow"),
        worst_accuracy,
    )
    monkeypatch.setitem(metrics.METRICS, metric.name, metric)
    matrix = tables.matrix("finetune")
    row = next(row for row in tables.summary() if row["label"] == "finetune")
    assert row["worst_accuracy"] == matrix.rates[-1].min()
    assert metric.meaning in page.render_summary(tables)
    assert "worst accuracy" in console.summary(tables, Outcome({}, {}, 1.0), [])
    assert "worst_accuracy" in {point.name for point in matrix_points(matrix)}
    (entry, *_) = page.compare_methods(tables).entries
    assert "worst_accuracy" in entry.numbers


# ---- sizes ---------------------------------------------------------------------------------------
def test_the_page_names_the_seed_of_a_single_run(tables: Any) -> None:
    (method, *_) = page.compare_methods(tables).entries
    assert method.conditions.seeds == (str(tables.record["config"]["seed"]),)


def test_sizes_count_masks_as_packed_bits(tables: Any) -> None:
    rows = tables.sizes("meat")
    assert [r["after"] for r in rows] == ["shapes", "birds", "leaves", "roots"]
    bits = fake_run.DEPTH * (fake_run.GRID**2 + 2 * fake_run.HIDDEN * fake_run.WIDTH)
    assert [r["masks"] for r in rows] == [0, bits // 8, 2 * bits // 8, 3 * bits // 8]
    heads = np.cumsum([4 * len(t["classes"]) * (fake_run.WIDTH + 1) for t in fake_run.TASKS])
    assert [r["head"] for r in rows] == heads.tolist()
    assert rows[-1]["total"] == fake_run.BACKBONE_BYTES + rows[-1]["masks"] + rows[-1]["head"]
    assert rows[-1]["growth"] == pytest.approx(rows[-1]["total"] / fake_run.BACKBONE_BYTES)


def test_carried_state_of_a_chain_counts_once(tables: Any) -> None:
    rows = tables.sizes("finetune")
    assert rows[0]["carried"] == 0
    assert rows[1]["carried"] == rows[3]["carried"] > 0
    assert 2 < rows[3]["growth"] < 2.05


def test_best_size_includes_carried_state(tables: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A method without bytes per task but with a large carried state is not the smallest."""
    row = tables.summary()[0]
    sizes = {"carries": (0.0, 3.96), "small": (3844.0, 1.0009), "as small": (3860.0, 1.0011)}
    summary = [
        {**row, "label": label, "bytes_per_task": task_bytes, "growth": growth}
        for label, (task_bytes, growth) in sizes.items()
    ]
    monkeypatch.setattr(tables, "summary", lambda: summary)
    text = str(page.render_summary(tables))
    assert re.findall("class=best>([^<]*)<", text) == ["1.00x", "1.00x"]


def test_carried_state_of_base_task_is_counted_for_star(
    tables: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    task_sizes = tables._task_sizes

    def carry_from_base(label: str, task: str) -> TaskSizes:
        carried_bytes = 1000 if task == "shapes" else 0
        sizes: TaskSizes = task_sizes(label, task)
        return sizes._replace(carried_bytes=carried_bytes)

    monkeypatch.setattr(tables, "_task_sizes", carry_from_base)
    rows = tables.sizes("meat")
    assert [r["carried"] for r in rows] == [1000] * 4
    assert (
        rows[-1]["total"] == fake_run.BACKBONE_BYTES + rows[-1]["masks"] + rows[-1]["head"] + 1000
    )


# ---- evidence ------------------------------------------------------------------------------------
def test_logits_are_compared_over_all_rows_including_canaries(tables: Any) -> None:
    assert {r["label"]: r["answers"] for r in tables.summary()} == {
        "meat": "identical",
        "hat-small": "identical",
        "finetune": "changed",
    }
    birds = next(r for r in tables.logits_rows("finetune") if r["task"] == "birds")
    assert (birds["measured"], birds["distinct_logits"], birds["logits_equal"]) == (3, 3, False)
    last = next(r for r in tables.logits_rows("hat-small") if r["task"] == "roots")
    assert last["logits_equal"] is None


def test_logits_are_compared_only_at_equal_thread_counts(
    tables: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another number of threads, the logits of the same weights differ in their last bits."""
    for threads, after in enumerate(tables.tasks("finetune")):
        stage = tables.artifacts.get(f"finetune/{after}/evaluate")
        if stage:
            machine = {"device": "cpu", "threads": 1 + (threads > 2)}
            monkeypatch.setitem(stage.manifest, "provenance", machine)
    rows = {r["task"]: r for r in tables.logits_rows("finetune")}
    assert (rows["birds"]["measured"], rows["birds"]["distinct_logits"]) == (3, 2)
    assert rows["birds"]["logits_equal"] is False, "measured twice on one thread"
    assert rows["leaves"]["logits_equal"] is None, "measured once on one thread and once on two"


def test_equal_warnings_are_listed_once_with_a_count(tables: Any) -> None:
    assert [(r["stage"], r["stages"]) for r in tables.warnings()] == [("meat/roots/train", 3)]


@pytest.mark.slow
def test_damaged_file_is_reported_without_breaking_the_report(
    tmp_path: Path,
) -> None:
    tables = half(tmp_path)
    Path(tables.artifacts["meat/birds/train"].uri("history.parquet")).write_bytes(b"broken")
    Path(tables.artifacts["meat/leaves/train"].uri("task.safetensors")).unlink()
    files = page.build_run_report(str(tmp_path), fake_run.record())
    text = files["report.html"].decode()
    assert "history.parquet: is truncated or padded" in text
    assert "task.safetensors: is missing" in text
    assert "matrix-finetune.png" in files


def test_a_confusion_matrix_counts_every_test_image(tables: Any) -> None:
    counts, names = tables.confusion("finetune", "roots", "birds")
    assert names == ["wren", "owl", "crow"]
    assert counts.sum() == 120
    assert np.trace(counts) == tables.matrix("finetune").correct[3, 1]


# ---- masks ---------------------------------------------------------------------------------------
def view(task: Any, **masks: Any) -> Any:
    return MaskView.of(
        "m", TaskState(task, (), "m", "", masks={k.replace("_", "."): v for k, v in masks.items()})
    )


def test_overlap_is_intersection_over_union() -> None:
    a = view(
        "a",
        blocks_0_fc1=torch.tensor([[1, 1, 0], [0, 0, 0]]).bool(),
        blocks_1_fc1=torch.tensor([1, 0, 0]).bool(),
    )
    b = view(
        "b",
        blocks_0_fc1=torch.tensor([[1, 0, 1], [0, 0, 0]]).bool(),
        blocks_1_fc1=torch.tensor([1, 0, 0]).bool(),
    )
    np.testing.assert_allclose(overlap([a, b], "fc1"), [[1, 2 / 4], [2 / 4, 1]])


def test_overlap_is_one_for_empty_and_nan_for_mismatched_masks() -> None:
    none, other = (
        view("a", blocks_0_fc1=torch.zeros(9).bool()),
        view("b", blocks_0_fc1=torch.ones(8).bool()),
    )
    values = overlap([none, other], "fc1")
    assert values[0, 0] == 1
    assert np.isnan(values[0, 1])


def test_masks_are_listed_tokens_first_then_block_by_block() -> None:
    masks = {f"blocks.{b}.fc1": torch.ones(4).bool() for b in (10, 2, 0)} | {
        "tokens": torch.ones(3, 4).bool()
    }
    mask_view = MaskView.of("m", TaskState("a", (), "m", "", masks=masks))
    assert list(mask_view.bits) == ["tokens", "blocks.0.fc1", "blocks.2.fc1", "blocks.10.fc1"]
    assert kinds([mask_view]) == ["tokens", "fc1"]
    assert [(r["kind"], r["block"], r["share"]) for r in mask_view.rows()][:4] == [
        ("tokens", 0, 1),
        ("tokens", 1, 1),
        ("tokens", 2, 1),
        ("fc1", 0, 1),
    ]


def test_dropped_patches_are_darkened_if_grid_does_not_divide_image() -> None:
    image = np.full((10, 10, 3), 200, np.uint8)
    dark_image = mask_plots.darken_patches(image, np.array([[True, False, True]] * 3))
    assert (dark_image[:, 0] == 200).all()
    assert (dark_image[:, 4] < 60).all()
    assert (dark_image[:, 9] == 200).all()


def test_mask_picture_uses_test_image_or_bare_grid(
    tmp_path: Path,
) -> None:
    tables = half(tmp_path)
    image = samples.sample_image(tables, "birds")
    assert image is not None
    assert image.shape == (192, 192, 3)
    views = figures.load_mask_views(tables, "meat")
    with_image = plots.to_png(figures.draw_run_token_masks(tables, views))
    withdraw(tables.root, tables.artifacts["data/birds"].key)
    assert samples.sample_image(tables, "birds") is None
    assert plots.to_png(figures.draw_run_token_masks(tables, views)) != with_image


# ---- files and page ------------------------------------------------------------------------------
def test_tables_are_written_as_csv_and_parquet(report: Any, tables: Any) -> None:
    rows = pq.read_table(io.BytesIO(report["matrix.parquet"])).to_pylist()
    assert len(rows) == 30
    assert report["matrix.csv"].decode().count("\n") == 31
    assert rows[0] == {
        "label": "meat",
        "after_index": 0,
        "after": "shapes",
        "task_index": 0,
        "task": "shapes",
        "correct": 190,
        "total": 200,
        "rate": 0.95,
        "chance": 0.25,
        "source": "measured",
    }
    assert {n.removesuffix(".csv") for n in report if n.endswith(".csv")} == {
        n.removesuffix(".parquet") for n in report if n.endswith(".parquet")
    }


def test_every_figure_is_a_png_embedded_in_the_page(report: Any) -> None:
    pictures = [n for n in report if n.endswith(".png")]
    expected = {
        "comparison.png",
        "averages.png",
        "size_accuracy.png",
        "masks-meat.png",
        "overlap-hat-small.png",
        "tokens-hat-small.png",
    }
    assert expected | {
        f"{kind}-{label}.png" for kind in ("matrix", "curves") for label in fake_run.METHODS
    } <= set(pictures)
    for name in pictures:
        assert Image.open(io.BytesIO(report[name])).width > 80
    assert report["report.html"].decode().count("data:image/png;base64,") == len(pictures)


def test_page_is_self_contained(report: Any) -> None:
    text = re.sub(r"data:image/png;base64,[^\"]*", "", report["report.html"].decode())
    assert not re.search(
        r'(src|href)="(?!#)[^"]+"|url\(|@import|<script|<link', text.replace('src=""', "")
    )
    assert text.count("<svg") == 1
    assert "<?xml" not in text


def test_graph_in_page_links_to_stage_rows(report: Any) -> None:
    text = report["report.html"].decode()
    for stage in fake_run.stages():
        assert f'href="#stage-{stage.id}"' in text
        assert f'id="stage-{stage.id}"' in text
    assert f'href="report.html#stage-{stage.id}"' in report["graph.svg"].decode()


def test_report_stage_is_done_if_all_others_are(tables: Any, tmp_path: Path) -> None:
    states = {row["stage"]: row["state"] for row in tables.stage_rows()}
    assert states["report"] == "done"
    unfinished = half(tmp_path, "meat/roots/evaluate")
    states = {row["stage"]: row["state"] for row in unfinished.stage_rows()}
    assert states["report"] == states["meat/roots/evaluate"] == "pending"


def test_the_settings_of_methods_are_shown_with_their_defaults(report: Any) -> None:
    text = report["report.html"].decode()
    section = text.split("own settings in effect")[1]
    row = "<tr><td class=left>meat</td><td class=left>lambda</td>"
    assert row in section
    assert "<td class=left>default</td>" in section


def test_page_shows_backbone_settings_resolved_from_timm(report: Any) -> None:
    text = report["report.html"].decode().split("backbone in effect")[1]
    assert "<dt>mean</dt><dd>[0.485, 0.456, 0.406]</dd>" in text


def test_page_has_each_analysis_insert_marker_once(report: Any) -> None:
    text = report["report.html"].decode()
    assert [text.count(marker) for marker in analysis_section.INSERT_MARKERS] == [1, 1]


def test_names_from_a_config_cannot_break_the_page(tmp_path: Path) -> None:
    record = fake_run.record("<b>&run</b>")
    text = page.build_run_report(str(tmp_path), record)["report.html"].decode()
    assert "<b>&run" not in text
    assert "&lt;b&gt;&amp;run" in text


def test_page_shows_results_and_settings_of_the_run(report: Any) -> None:
    text = report["report.html"].decode()
    for part in (
        "85.0 %",
        "earlier<br>logits",
        "identical",
        "0123456789abcdef",
        "img_size: 32",
        "meat/leaves/train",
        "and 2 more",
        "finished",
    ):
        assert part in text


@pytest.mark.slow
def test_the_same_store_gives_the_same_report(storage: Any, report: Any, tmp_path: Path) -> None:
    shutil.copytree(storage, tmp_path / "copy")
    again = page.build_run_report(str(tmp_path / "copy"), fake_run.record())
    assert {n: d for n, d in again.items() if n != "report.html"} == {
        n: d for n, d in report.items() if n != "report.html"
    }


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1234, "1.23 kB"),
        (999_600, "1 MB"),
        (123_456_789, "123 MB"),
        (None, "-"),
        (math.nan, "-"),
    ],
)
def test_bytes_are_written_with_three_digits(value: Any, text: str) -> None:
    assert format_bytes(value) == text


def test_tiny_negative_rates_are_formatted_as_zero() -> None:
    assert [html_parts.format_value(value, "rate") for value in (-1e-6, 0.0, -0.0155)] == [
        "0.0 %",
        "0.0 %",
        "-1.6 %",
    ]
    assert [format_percent(value) for value in (-1e-6, 0.0, -0.0155)] == [
        "0.00 %",
        "0.00 %",
        "-1.55 %",
    ]


def test_loss_terms_and_measures_are_separated_in_order() -> None:
    row = dict.fromkeys(
        [
            "epoch",
            "lr",
            "loss",
            "ce",
            "penalty",
            "images",
            "seconds",
            "keep",
            "val_correct",
            "val_total",
        ],
        1,
    )
    assert plots.split_history_columns([row]) == (["ce", "penalty"], ["keep"])


def test_curves_have_one_point_per_epoch_and_no_missing_numbers() -> None:
    rows = [
        {"epoch": 0, "loss": 2.0, "seconds": 1.5, "val_correct": 3, "val_total": 4},
        {"epoch": 1, "loss": math.nan, "seconds": 1.0, "odd name?": 1},
    ]
    points = history_points(rows, "train")
    assert ("train/val_accuracy", 0.75, 1, 1.5) in points
    assert [p.step for p in points if p.name == "train/loss"] == [1]
    assert any(p.name == "train/odd name_" and p.after_s == 2.5 for p in points)


def test_the_matrix_as_json_has_null_where_nothing_was_measured(tables: Any) -> None:
    body = json.loads(method_files(tables, "meat")["accuracy_matrix.json"])
    assert body["accuracy"][0] == [0.95, None, None, None]
    assert body["correct"][0] == [190, None, None, None]
    assert body["source"][3] == ["follows", "follows", "measured", "measured"]


def test_report_does_not_change_artifacts(storage: Any, report: Any) -> None:
    stage = fake_run.stages()[0]
    assert Artifact.need(f"{storage}/stages", stage.key).damage() is None


# ---- capacity and layers -------------------------------------------------------------------------
def test_capacity_counts_new_reused_and_total_units() -> None:
    a, b = (
        view("a", blocks_0_fc1=torch.tensor([1, 1, 0, 0]).bool()),
        view("b", blocks_0_fc1=torch.tensor([0, 1, 1, 0]).bool()),
    )
    shares = [
        (r["task"], r["fresh"], r["again"], r["used"], r["size"]) for r in capacity([a, b], "fc1")
    ]
    assert shares == [("a", 2, 0, 2, 4), ("b", 1, 1, 3, 4)]


def test_capacity_counts_entries_of_grown_layers_as_new() -> None:
    a, b = view("a", blocks_0_ff=torch.ones(4).bool()), view("b", blocks_0_ff=torch.ones(12).bool())
    assert [(r["fresh"], r["again"], r["used"], r["size"]) for r in capacity([a, b], "ff")] == [
        (4, 0, 4, 4),
        (8, 4, 12, 12),
    ]


def test_mask_profile_is_kept_share_per_output_unit() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()
    mask_view = view("a", blocks_0_fc1=mask, blocks_0_ff=torch.tensor([True, False]))
    assert mask_view.profile["blocks.0.fc1"].tolist() == [0.5, 0.25, 0.0]
    assert mask_view.profile["blocks.0.ff"].tolist() == [1.0, 0.0]
    assert mask_plots.draw_layers(mask_view) is not None
    assert len(view("b", blocks_0_fc1=torch.ones(5000, 2).bool()).profile["blocks.0.fc1"]) == BINS


def test_mask_figures_use_display_masks_of_the_method(
    tables: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The masks of a chain may follow from its carried state, while its task state has none."""

    class Owners(Method):
        @classmethod
        def display_masks(cls, state: Any, carried: Any) -> Any:
            return {"blocks.0.fc1": carried.tensors["owner"] == 1}

    monkeypatch.setitem(METHODS, "owners", Owners)
    state = TaskState("birds", (), "owners", "")
    monkeypatch.setattr(tables, "state", lambda label, task: state)
    monkeypatch.setattr(
        tables, "carried", lambda label, task: Carried({"owner": torch.tensor([0, 1, 1, 2])})
    )
    mask_view = load_mask_view(tables, "owners", "birds")
    assert mask_view is not None
    assert mask_view.num_kept == {"blocks.0.fc1": 2}


# ---- new figures ---------------------------------------------------------------------------------
def functions_returning(module: ModuleType, kinds: set[str]) -> dict[str, Any]:
    """Return the functions that a module defines with a return annotation in `kinds`."""
    functions = {}
    for name, function in vars(module).items():
        is_defined_here = getattr(function, "__module__", "") == module.__name__
        if is_defined_here and inspect.isfunction(function):
            if function.__annotations__.get("return") not in kinds:
                continue
            functions[name] = function
    return functions


@pytest.mark.parametrize(
    ("module", "registries"),
    [
        (figures, [figures.RUN_FIGURES, figures.METHOD_FIGURES]),
        (search_pictures, [search_pictures.SEARCH_FIGURES]),
    ],
)
def test_every_captioned_figure_is_registered(
    module: ModuleType, registries: list[dict[str, Any]]
) -> None:
    kinds = {"CaptionedFigure", "CaptionedFigure | None"}
    listed = [figure for registry in registries for figure in registry.values()]
    assert set(functions_returning(module, kinds).values()) == set(listed)


@pytest.mark.parametrize("module", [plots, mask_plots, search_plots, attention, maps])
def test_every_drawing_function_is_used(module: ModuleType) -> None:
    sources = [path.read_text() for path in Path(cli.__file__).parents[1].rglob("*.py")]
    for name in functions_returning(module, {"Figure", "Figure | None"}):
        uses = sum(len(re.findall(rf"\b{name}\(", source)) for source in sources)
        assert uses > 1, f"{module.__name__}.{name} is in no report: list it in a registry"


def test_every_figure_of_a_method_reaches_its_tracking_record(report: dict[str, bytes]) -> None:
    names = [name for name in report if name.endswith("-finetune.png")]
    assert len(method_report_files(report, "finetune")) == len(names)


def test_report_removes_only_its_own_earlier_files(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    folder = tmp_path / "runs" / "mine"
    export(
        store, "mine", {"report.html": b"1", "masks.csv": b"a", "maps/a.png": b"b", "old.csv": b"c"}
    )
    (folder / "old.csv").write_text("changed by a person")
    export(store, "mine", {"report.html": b"1", "masks.csv": b"a", "maps/a.png": b"b"})
    assert (folder / "masks.csv").read_bytes() == b"a", "written again, and therefore kept"
    assert (folder / "old.csv").exists(), "changed by a person since it was written"
    (folder / "notes.txt").write_text("of a person")
    (tmp_path / "precious.txt").write_text("elsewhere")
    listed = folder / REPORT_FILES
    forged = json.loads(listed.read_text())
    forged["../../precious.txt"] = hashlib.sha256(b"elsewhere").hexdigest()
    listed.write_text(json.dumps(forged))
    export(store, "mine", {"report.html": b"2"})
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    kept = {"runs/mine/notes.txt", "runs/mine/old.csv", "precious.txt"}
    assert left == {"runs/mine/report.html", f"runs/mine/{REPORT_FILES}", *kept}


def test_only_backticks_are_rendered_as_markup() -> None:
    assert html_parts.mark_code("a `b<c>` & d") == "a <code>b&lt;c&gt;</code> &amp; d"
    assert html_parts.mark_code("one ` of <two>") == "one ` of &lt;two&gt;"
