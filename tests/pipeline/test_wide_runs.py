"""Tests that pages, pictures and terminal output of a large run (40 tasks, 15 methods) are
readable, also in dark mode and on a narrow screen."""

from __future__ import annotations

import io
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import fake_run
import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from pipeline import templates
from pipeline.graph import diagram
from pipeline.graph.run import Outcome
from pipeline.graph.stage import Graph, Stage
from pipeline.graph.walk import Event, EventKind, Walk
from pipeline.report import html_parts, mask_plots, plots, run_text
from pipeline.results.masks import MaskView
from pipeline.results.runs import MethodAccuracy, RunOverview
from pipeline.results.tables import Matrix, RunTables
from pipeline.shell import console
from workers.storage.taskstate import TaskState

STYLE = (Path(templates.__file__).parent / "style.css").read_text()
NUM_TASKS = 40
NUM_METHODS = 15
TASKS = tuple(f"species-group-{i:02d}" for i in range(NUM_TASKS))


def draw(figure: Figure) -> None:
    """Draw a figure, so that its text positions are known."""
    FigureCanvasAgg(figure).draw()  # type: ignore[no-untyped-call]


def overlaps(texts: list[Text]) -> list[tuple[str, str]]:
    """Return the pairs of adjacent texts whose boxes overlap."""
    visible = [text for text in texts if text.get_text()]
    pairs = []
    for first, second in pairwise(visible):
        if first.get_window_extent().overlaps(second.get_window_extent()):
            pairs.append((first.get_text(), second.get_text()))
    return pairs


def matrix_of(count: int) -> Matrix:
    """Return the matrix of a chain of `count` tasks with falling accuracies."""
    after, task = np.indices((count, count))
    is_learned = task <= after
    correct = np.where(is_learned, 45.0 - (after - task) // 2, np.nan)
    total = np.where(is_learned, 50.0, np.nan)
    source = np.where(is_learned, "measured", "ahead")
    names = tuple(f"species-group-{i:02d}" for i in range(count))
    chance = np.where(is_learned, 1 / 3, np.nan)
    return Matrix("finetune", names, correct, total, source, chance=chance)


# ---- pictures ------------------------------------------------------------------------------------
@pytest.mark.parametrize("count", [2, 13, NUM_TASKS, 150])
@pytest.mark.parametrize("inches", [4.0, 10.0])
def test_names_of_tasks_do_not_overlap(count: int, inches: float) -> None:
    figure, (axes,) = plots.new_figure(inches, inches)
    axes.set_xlim(-0.5, count - 0.5)
    axes.set_ylim(-0.5, count - 0.5)
    names = [f"task-{i:03d}" for i in range(count)]
    plots.label_tasks(axes, names, facts=[f"n {i}" for i in range(count)])
    draw(figure)
    assert axes.get_xticklabels()[0].get_text().startswith("task-000")
    assert overlaps(list(axes.get_xticklabels())) == []
    assert overlaps(list(axes.get_yticklabels())) == []


def test_long_matrix_labels_every_task_with_chance_and_images() -> None:
    matrix = matrix_of(24)
    figure = plots.draw_matrix(matrix)
    draw(figure)
    axes = figure.axes[0]
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert labels == [f"{task}, chance 33.3, n 50" for task in matrix.tasks]
    assert overlaps(list(axes.get_xticklabels())) == []


def test_lines_of_a_long_stream_have_few_markers() -> None:
    figure = plots.draw_averages([matrix_of(NUM_TASKS)])
    line = figure.axes[0].get_lines()[0]
    assert NUM_TASKS // int(str(line.get_markevery())) <= plots.MAX_MARKERS + 1
    figure = plots.draw_averages([matrix_of(5)])
    assert figure.axes[0].get_lines()[0].get_markevery() == 1


def spans_of(count: int, axes: Axes) -> list[Text]:
    """Mark `count` spans and return the texts above them."""
    spans = [(float(i), i + 1.0, f"species-group-{i:02d}") for i in range(count)]
    plots.mark_spans(axes, spans)
    return list(axes.texts)


@pytest.mark.parametrize("count", [2, 5, 13, NUM_TASKS])
def test_names_above_bands_do_not_overlap(count: int) -> None:
    figure, (axes, _, _) = plots.new_figure(10.4, 3.1, 1, 3)
    texts = spans_of(count, axes)
    draw(figure)
    assert overlaps(texts) == []


def test_labels_of_equally_large_methods_do_not_overlap() -> None:
    summary = []
    for index in range(NUM_METHODS):
        row = {"label": f"method-{index:02d}", "average_accuracy": 0.6 + 0.004 * (index % 4)}
        summary.append({**row, "growth": 2.0, "total_bytes": 440_000})
    figure = plots.draw_size_accuracy(summary)
    draw(figure)
    axes = figure.axes[0]
    by_height = sorted(axes.texts, key=lambda text: text.get_position()[1])
    assert len(by_height) == NUM_METHODS
    assert overlaps(by_height) == []
    num_moved = NUM_METHODS - 1  # at each height, at most one stays beside its point
    assert len(axes.get_lines()) >= num_moved - 3


def masked_views(count: int) -> list[MaskView]:
    """Return the masks of `count` tasks in two blocks."""
    views = []
    for index in range(count):
        rng = torch.Generator().manual_seed(index)
        masks = {}
        for block in range(2):
            masks[f"blocks.{block}.neurons"] = torch.rand(16, generator=rng) < 0.5
        state = TaskState(f"species-group-{index:02d}", ("a",), "hat", "d" * 64, masks=masks)
        views.append(MaskView.of("hat", state))
    return views


@pytest.mark.parametrize("count", [3, NUM_TASKS])
def test_legend_names_limited_tasks_and_stays_outside_axes(count: int) -> None:
    figure = mask_plots.draw_density(masked_views(count))
    assert figure is not None
    draw(figure)
    legend = figure.legends[0]
    names = [text.get_text() for text in legend.get_texts()]
    assert len(names) == min(count, mask_plots.MAX_NAMED)
    assert [names[0], names[-1]] == [TASKS[0], TASKS[count - 1]]
    assert not legend.get_window_extent().overlaps(figure.axes[0].get_window_extent())


# ---- pages ---------------------------------------------------------------------------------------
def colours(theme: str) -> dict[str, tuple[float, ...]]:
    """Return the page's colours by name, each as (R, G, B) in [0, 1]. theme: `light` or `dark`."""
    light, dark = STYLE.split("@media (prefers-color-scheme: dark)", 1)
    css = light if theme == "light" else dark[: dark.index("figure")]
    rgb = {}
    for name, digits in re.findall(r"--(\w+): #([0-9a-fA-F]{6})", css):
        rgb[name] = tuple(int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4))
    return rgb


def luminance(rgb: tuple[float, ...]) -> float:
    """Return the relative luminance of a colour, as WCAG 2 defines it."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("ground", ["paper", "band", "note"])
def test_text_contrasts_with_background_in_both_themes(theme: str, ground: str) -> None:
    rgb = colours(theme)
    behind = luminance(rgb[ground])
    assert (behind < 0.2) == (theme == "dark")
    for name in ("ink", "soft", "blue", "green", "amber", "red"):
        lighter, darker = sorted((luminance(rgb[name]), behind), reverse=True)
        assert (lighter + 0.05) / (darker + 0.05) >= 4.5, name


def test_style_colours_use_theme_variables() -> None:
    rules = STYLE.split("* { box-sizing", 1)[1]
    for line in rules.splitlines():
        if "color:" in line or "background:" in line:
            assert "var(--" in line, line


def test_long_table_is_collapsed() -> None:
    rows = [[str(i)] for i in range(html_parts.MAX_OPEN_ROWS + 1)]
    short = html_parts.render_macro("long_table", ["n"], rows[:-1], 1, "rows")
    long = html_parts.render_macro("long_table", ["n"], rows, 1, "rows")
    assert "<details>" not in short
    assert long.startswith(f"<details><summary>{len(rows)} rows</summary>")
    assert long.count("<tr>") == len(rows) + 1


def test_surplus_warnings_are_collapsed() -> None:
    rows = [{"stage": "s", "stages": 1, "warning": f"sentence {i}"} for i in range(9)]
    html = html_parts.render_macro("warnings", rows)
    first, others = html.split("<details><summary>4 more warnings</summary>")
    assert "<b>9 warnings</b>" in first
    assert first.count("<li>") == html_parts.MAX_OPEN_WARNINGS
    assert others.count("<li>") == 4


# ---- the graph -----------------------------------------------------------------------------------
def graph_of_chains(num_methods: int, num_tasks: int) -> Graph:
    """Return a graph of one ingest and `num_methods` chains."""
    stages = [Stage("data/d", "ingest", "k" * 32, {}, ())]
    for label in map(str, range(num_methods)):
        previous = "data/d"
        for task in range(num_tasks):
            stage_id = f"{label}/{task}/train"
            stages.append(Stage(stage_id, "train", "k" * 32, {}, (previous,), label, str(task)))
            previous = stage_id
    return Graph.of("large", stages)


def test_large_graph_has_faint_arrows_and_legend_on_top() -> None:
    small = graph_of_chains(1, 3)
    large = graph_of_chains(NUM_METHODS, NUM_TASKS)
    assert 'stroke-opacity="1"' in diagram.to_svg(small, {})
    svg = diagram.to_svg(large, dict.fromkeys(large.stages, "done"))
    assert 'stroke-opacity="0.4"' in svg
    legend_y = int(re.findall(r'<circle cx="\d+" cy="(\d+)"', svg)[0])
    box_ys: list[Any] = re.findall(r'<rect x="\d+" y="(\d+)"', svg)
    assert legend_y < min(map(int, box_ys))


# ---- the terminal --------------------------------------------------------------------------------
class OneMatrix:
    """A fake of a run's tables that has only a matrix."""

    def __init__(self, matrix: Matrix):
        self.matrix_of_all = matrix

    def matrix(self, label: str) -> Matrix:
        return self.matrix_of_all


@pytest.mark.parametrize("columns", ["80", "200"])
@pytest.mark.parametrize("count", [3, 7, 15, NUM_TASKS])
def test_a_matrix_is_no_wider_than_the_terminal(
    count: int, columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    tables: Any = OneMatrix(matrix_of(count))
    lines = console.matrix_text(tables, "finetune").splitlines()
    assert max(map(len, lines)) < int(columns)
    if count > console.MAX_TASKS:
        assert lines == [f"finetune: the report has the accuracy matrix of its {count} tasks"]
    else:
        assert sum("species-group-" in line for line in lines) >= count


def test_narrow_matrix_shows_first_and_last_accuracy_chance_and_images(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    tables: Any = OneMatrix(matrix_of(7))
    lines = console.matrix_text(tables, "finetune").splitlines()
    assert lines[1].split() == (
        ["task", "when", "learned", "after", "species-group-06", "chance", "test", "images"]
    )
    assert lines[2].split() == ["species-group-00", "90.0", "84.0", "33.3", "50"]
    assert lines[-1].split() == ["species-group-06", "90.0", "90.0", "33.3", "50"]


@pytest.mark.parametrize("count", [2, NUM_TASKS])
def test_evaluation_line_has_bounded_length(count: int) -> None:
    graph = graph_of_chains(1, 1)
    stream = io.StringIO()
    screen = console.Console(graph, {}, stream)
    rows = [{"task": task, "correct": 30 + i, "total": 100} for i, task in enumerate(TASKS[:count])]
    body = {"kind": "evaluate", "result": {"rows": rows}, "wall_s": 2.0}
    walk = Walk.over(graph, [], 0)
    screen.on_event(walk, Event(EventKind.DONE, "0/0/train", body=body))
    text = stream.getvalue()
    assert len(text) < 160
    assert "\r" not in text
    assert "\x1b" not in text
    assert TASKS[count - 1] in text
    assert ("mean of 40 tasks 0.495" in text) == (count == NUM_TASKS)


def overview(num_methods: int) -> RunOverview:
    """Return a finished run of `num_methods` methods."""
    methods = tuple(MethodAccuracy(f"method-{i:02d}", 0.5 + i / 100) for i in range(num_methods))
    return RunOverview("real7-table", "finished", "2026-01-02T03:04:05+0000", 1228, 1228, methods)


@pytest.mark.parametrize("columns", [80, 120])
def test_the_list_of_runs_fits_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = run_text.runs_text([overview(NUM_METHODS), overview(1)], "storage")
    lines = text.splitlines()
    assert max(map(len, lines)) < columns
    assert "method-14 64.00 %, 14 more" in lines[1] or columns > 80
    assert lines[2].endswith("1228/1228  method-00 50.00 %")
    monkeypatch.setenv("COLUMNS", "20")
    assert "method-14 64.00 %, 14 more" in run_text.runs_text([overview(15)], "storage")


def test_a_live_status_fits_the_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    screen = run_text.fit_to_terminal("\n".join(["x" * 200] * 60)).splitlines()
    assert len(screen) == 23
    assert max(map(len, screen)) == 79


def test_few_warnings_are_printed_and_the_others_counted(
    storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = RunTables.load(storage, fake_run.record())
    rows = [{"stage": "s", "stages": 1, "warning": f"sentence {i}"} for i in range(40)]
    monkeypatch.setattr(RunTables, "warnings", lambda self: rows)
    text = console.summary(tables, Outcome({}, {}, 1.0), [])
    assert text.count("warning: ") == console.MAX_WARNINGS
    assert "20 more warnings: the report lists them" in text
